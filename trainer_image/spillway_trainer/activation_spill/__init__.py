"""activation_spill: what autograd saves goes to host memory or NVMe in forward and is back before backward needs it.

    saved_tensors.py   which saved tensors are activations, and each segment's answer
    store.py           a batch a segment: dedup by storage, bounded bytes in flight
    records.py         one storage: source, copy, reload; the views of it
    transfer.py        one batch's copies: their order, their buffers, their way back
    needs.py           the order in which backward needs what left, seen in one step, foreseen in the next
    chooser.py         what forwards save and when it is needed, watched; the choice, agreed between ranks
    lean.py            what is cheaper rebuilt than moved, and how much of it is wanted
    rebuilding.py      sees the operators run, and runs them again in backward
    alone.py           a context manager around any forward, without a plan

After SSDTrain (arXiv 2408.10013) and KARMA.
"""

from spillway.planning.storage_choice import PolicyLimits

from .alone import Spilling
from .chooser import Chooser, Chosen
from .spill import ActivationSpill, build

__all__ = ["ActivationSpill", "Chooser", "Chosen", "PolicyLimits", "Spilling", "build"]
