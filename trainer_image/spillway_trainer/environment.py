"""Sets the variables that torch reads from the environment at import. Import this module first in every training
process.

A variable that is already set keeps its value.
"""

from __future__ import annotations

import os

# An OpenMP worker spins for about 30 µs before it sleeps. If it never slept, it would compete with the I/O and update
# threads for the cores; if it slept immediately, every small operation would pay for waking it (steps of small models
# take 1.6 times as long). Spinning five times as long makes small models faster on a machine of their own, and three
# times slower beside another trainer (docs/adr/0032).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Puts tensors that do not come from the pool into huge pages: freed large blocks go back to the system
# (native.return_freed_memory), and huge pages make new blocks cheap again.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# A lost connection is reported in one sentence (PeerLost); torch would print its C++ stack before it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Plans number devices as NVML does; CUDA's default would put the fastest device first.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
# cuBLAS gives the same bits each time only with a workspace of this form. Read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Lets torch's CUDA allocator map pages where a block is to grow, so that it has few holes; the plan's row `allocator`
# counts them (footprint.py). PYTORCH_CUDA_ALLOC_CONF is the name before torch 2.9; the new name would hide its value.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
