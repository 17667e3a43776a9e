"""model_spill: segments whose parameters live in host memory or on NVMe and pass through a few device slots.

    layout.py               where each parameter of a streamed segment lies, and what is refused
    homes.py                its values between uses: a host buffer, or extents of the spill file
    slots.py                device memory that segments take in turn; parameters are bound to it while they are there
    streamed_parameters.py  saved parameters by name, wherever their segment is by then; the prefetch
    weight_stationary.py    a step segment by segment, all micro-batches at a time
    boundaries.py           what segments hand on meanwhile
    spill.py                a plan's part of it, wired

After Hydra (arXiv 2110.08633), whose double buffer and fused turn these are; docs/model-spill.md says what differs.
"""

from .boundaries import Boundaries
from .spill import ModelSpill, build
from .streamed_parameters import StreamedParameters
from .weight_stationary import WeightStationary

__all__ = ["Boundaries", "ModelSpill", "StreamedParameters", "WeightStationary", "build"]
