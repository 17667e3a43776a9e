"""activation_spill: moves saved tensors to host memory or NVMe in forward, and back before backward needs them.

    store.py           one batch per segment forward: deduplicates storages, bounds bytes in flight
    records.py         one storage: source, copy, reload, and its views
    transfer.py        the copies of one batch, out and back
    reload_order.py    the order in which backward reads spilled storages, recorded for the next step
    chooser.py         observes forwards and sets a policy per storage, agreed between ranks
    lean.py            selective recomputation: what is cheaper to recompute than to move
    rebuilding.py      records cheap operators and reruns them in backward
    spill.py           ActivationPlan -> hooks around segments
    alone.py           Spilling: a context manager around any forward, without a plan
    callback.py        Spilling for the Trainer of transformers

After SSDTrain (arXiv 2408.10013) and KARMA.
"""

from spillway.planning.storage_choice import PolicyLimits

from .alone import Spilling
from .chooser import Chooser, Chosen
from .spill import ActivationSpill, build

__all__ = ["ActivationSpill", "Chooser", "Chosen", "PolicyLimits", "Spilling", "build"]
