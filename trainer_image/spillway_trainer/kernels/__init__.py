"""Updates, norms, copies, encryption and I/O: native, Triton, and the reference that both must equal."""
