"""ActivationPlan -> the hook around every segment's forward, and what the step loop tells it."""

from __future__ import annotations

from collections.abc import Sequence

from spillway.plan import ActivationPlan, Answer, Tier

from ..saved_tensors import ParameterSource, SavedTensors
from ..tiers.device_ledger import ACTIVATIONS, DeviceLedger
from ..tiers.lanes import Lanes
from ..tiers.nvme_slab import NvmeSlab
from .store import SpillStore


class ActivationSpill:
    """The technique, attached: `hook` goes to wrap_segments."""

    def __init__(self, hook: SavedTensors, store: SpillStore, ledger: DeviceLedger) -> None:
        self.hook = hook
        self.store = store
        self._ledger = ledger

    def start_backward(self) -> None:
        """Forward of this micro-batch is complete."""
        self.hook.start_backward()

    def end_step(self) -> None:
        """Everything in flight ends. Raises SpillIOError when a write failed, also one that nobody came to read."""
        self.store.drain()

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of saved activations by tier, now."""
        return {
            Tier.DEVICE: self._ledger.by_purpose().get(ACTIVATIONS, 0),
            Tier.HOST: self.store.held_bytes(Tier.HOST),
            Tier.NVME: self.store.held_bytes(Tier.NVME),
        }


def build(
    plan: ActivationPlan,
    segments: Sequence[str],
    parameters: ParameterSource,
    lanes: Lanes,
    ledger: DeviceLedger,
    nvme: NvmeSlab | None,
    inputs: Answer = Answer.KEEP,
) -> ActivationSpill:
    """Attach `plan` to a model with these segment names and `parameters`.

    Saved parameters are references, not charged again; what is kept is charged to `ledger` as "activations". `inputs`:
    where those of a recomputed segment wait.
    """
    if plan.answers and len(plan.answers) != len(segments):
        raise ValueError(f"the plan answers for {len(plan.answers)} segments and the model has {len(segments)}")
    if Answer.NVME in {*plan.uses, inputs}:
        if nvme is None:
            raise ValueError("the plan spills activations to NVMe and there is no spill file")
        nvme.reclaim = lanes.reclaim
    store = SpillStore(lanes, ledger, nvme, plan.minimum_bytes, plan.window_bytes)
    answers = dict(zip(segments, plan.answers or [Answer.KEEP] * len(segments), strict=True))
    hook = SavedTensors(answers, parameters, store, ledger, inputs)
    return ActivationSpill(hook, store, ledger)
