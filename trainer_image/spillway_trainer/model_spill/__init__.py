"""model_spill: segments whose parameters live in host memory or on NVMe and pass through a few device slots.

    layout.py               where each parameter of a streamed segment lies, and what is rejected
    homes.py                the segment's values between uses: a host buffer, or extents of the spill file
    slots.py                device memory that segments use in turn; parameters are bound to it while they are loaded
    streamed_parameters.py  finds saved parameters by name, wherever their segment is by then; prefetches segments
    weight_stationary.py    runs a step segment by segment, all micro-batches at a time
    boundaries.py           outputs of segments, kept until the next segment needs them
    spill.py                assembles these parts from a plan

After Hydra (arXiv 2110.08633), which has the double buffer and the fused turn; docs/model-spill.md says what differs.
"""

from .boundaries import Boundaries
from .spill import ModelSpill, build
from .streamed_parameters import StreamedParameters
from .weight_stationary import WeightStationary

__all__ = ["Boundaries", "ModelSpill", "StreamedParameters", "WeightStationary", "build"]
