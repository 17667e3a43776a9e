"""ActivationPlan -> the hook around every segment's forward, and what the step loop tells it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from spillway.plan import ActivationPlan, Answer, Tier

from ..resident_parameters import ResidentParameters
from ..saved_tensors import SavedTensors
from ..tiers.device_ledger import ACTIVATIONS, DeviceLedger
from ..tiers.lanes import Lanes
from ..tiers.nvme_slab import NvmeSlab
from .store import SpillStore


class ActivationSpill:
    """The technique, attached: `hook` goes to wrap_segments."""

    def __init__(self, hook: SavedTensors, store: SpillStore, ledger: DeviceLedger) -> None:
        self.hook = hook
        self._store = store
        self._ledger = ledger

    def start_backward(self) -> None:
        """Forward of this micro-batch is complete."""
        self.hook.start_backward()

    def end_step(self) -> None:
        """Everything in flight ends. Raises SpillIOError when a write failed, also one that nobody came to read."""
        self._store.drain()

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of saved activations by tier, now."""
        return {
            Tier.DEVICE: self._ledger.by_purpose().get(ACTIVATIONS, 0),
            Tier.HOST: self._store.held_bytes(Tier.HOST),
            Tier.NVME: self._store.held_bytes(Tier.NVME),
        }


def build(
    plan: ActivationPlan,
    segments: Sequence[str],
    parameters: Iterable[tuple[str, Tensor]],
    lanes: Lanes,
    ledger: DeviceLedger,
    nvme: NvmeSlab | None,
) -> ActivationSpill:
    """Attach `plan` to a model with these segment names and (name, tensor) parameters, in their final storages.

    Saved parameters are references, not charged again; what is kept is charged to `ledger` as "activations".
    """
    if plan.answers and len(plan.answers) != len(segments):
        raise ValueError(f"the plan answers for {len(plan.answers)} segments and the model has {len(segments)}")
    if Answer.NVME in plan.uses:
        if nvme is None:
            raise ValueError("the plan spills activations to NVMe and there is no spill file")
        nvme.reclaim = lanes.reclaim
    store = SpillStore(lanes, ledger, nvme, plan.minimum_bytes, plan.window_bytes)
    answers = dict(zip(segments, plan.answers or [Answer.KEEP] * len(segments), strict=True))
    hook = SavedTensors(answers, ResidentParameters(parameters), store, ledger)
    return ActivationSpill(hook, store, ledger)
