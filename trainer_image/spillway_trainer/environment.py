"""Sets what torch reads from the environment at import. Import this module first in every training process.

A value that is set already stays.
"""

from __future__ import annotations

import os

# An OpenMP worker spins for some 30 µs before it sleeps: for ever, it would fight the I/O and update threads for the
# cores; not at all, every small operation would pay for waking it (small models: steps x 1.6). Five times as long makes
# small models faster on a machine of their own, and three times slower beside another trainer (docs/adr/0032).
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Tensors in huge pages, where they do not come from the pool: freed large blocks go back to the system
# (native.return_freed_memory), and this makes getting new ones cheap again.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# A lost connection is told in a sentence (PeerLost); torch would put the C++ stack before it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# As NVML numbers devices, which plans are made by; CUDA would put the fastest first.
os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
# cuBLAS gives the same bits each time only with a workspace of this form; read when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# torch's CUDA allocator maps pages where a block is to grow: its holes are few, and the plan's row `allocator` counts
# them (footprint.py). The second is the name of before torch 2.9, which the first would hide.
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
