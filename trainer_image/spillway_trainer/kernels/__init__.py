"""Updates, norms, copies, encryption and I/O: native, in Triton, and as a reference that both must equal."""
