"""ActivationPlan -> the hook around each segment's forward, and its methods for the step loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spillway.plan import PLAN_AGAIN, ActivationPlan, Policy, Tier

from ..saved_tensors import ActivationBatch, ForwardVisit, Packer, ParameterSource, SavedTensors
from ..tiers.device_ledger import ACTIVATIONS, DeviceLedger
from ..tiers.lanes import Lanes
from ..tiers.nvme_slab import NvmeSlab
from .chooser import Chooser, Chosen
from .rebuilding import OperatorTape
from .store import SpillStore


class ActivationSpill:
    """The technique, attached to a model; `hook` goes to wrap_segments."""

    def __init__(
        self, hook: SavedTensors, store: SpillStore, ledger: DeviceLedger, chooser: Chooser | None = None
    ) -> None:
        """`chooser`: None if every segment keeps its own policy."""
        self.hook = hook
        self.store = store
        self.chooser = chooser
        self.tell: Callable[[Chosen], None] = lambda _: None
        """Receives every decision of the chooser about single storages."""
        self.after_step: Callable[[], None] = lambda: None
        """Called at the end of a step, when none of its activations is held any more."""
        self._ledger = ledger

    def start_backward(self) -> None:
        """Called when the forward of this micro-batch is complete."""
        self.hook.start_backward()

    def end_step(self) -> None:
        """Waits for everything in flight. Raises SpillIOError if a write failed, even one that nothing read."""
        self.store.drain()
        chosen = self.chooser.end_step() if self.chooser is not None else None
        if chosen is not None:
            self.tell(chosen)
        self.after_step()

    def held_bytes(self) -> dict[Tier, int]:
        """Bytes of saved activations by tier, now."""
        return {
            Tier.DEVICE: self._ledger.by_purpose().get(ACTIVATIONS, 0),
            Tier.HOST: self.store.held_bytes(Tier.HOST),
            Tier.NVME: self.store.held_bytes(Tier.NVME),
        }


class PlacedStore:
    """An ActivationStore whose batches ask a Chooser where each storage goes."""

    def __init__(self, store: SpillStore, chooser: Chooser) -> None:
        self._store, self._chooser = store, chooser

    def open(self, segment: str, answer: Policy) -> ActivationBatch:
        return self._store.open(segment, answer, placement=self._chooser.open(segment, answer))


def build(  # noqa: PLR0913 - the parts that it joins
    plan: ActivationPlan,
    segments: Sequence[str],
    parameters: ParameterSource,
    lanes: Lanes,
    ledger: DeviceLedger,
    nvme: NvmeSlab | None,
    inputs: Policy = Policy.KEEP,
    choosing: Callable[[Sequence[str]], Chooser] | None = None,
    *,
    may_move: bool = False,
) -> ActivationSpill:
    """Attach `plan` to a model with these segment names and `parameters`.

    `choosing` makes the Chooser of the segments that move. It is called if the plan moves some segments to host memory
    and some to NVMe, or if those on NVMe `may_move` to host memory later. None: a segment's answer applies to all its
    storages.

    Saved parameters are references and not charged again; what is kept is charged to `ledger` as "activations".
    `inputs`: where the inputs of a recomputed segment wait.
    """
    if plan.answers and len(plan.answers) != len(segments):
        raise ValueError(
            f"the plan has activation policies for {len(plan.answers)} segments, but the model has {len(segments)} "
            f"segments (groups of layers); {PLAN_AGAIN}"
        )
    if Policy.NVME in {*plan.uses, inputs}:
        if nvme is None:
            raise ValueError(
                f"the plan spills activations to NVMe, but reserves no bytes for a spill file on NVMe; {PLAN_AGAIN}"
            )
        nvme.reclaim = lanes.reclaim
    store = SpillStore(lanes, ledger, nvme, plan.minimum_bytes, plan.window_bytes)
    store.plans_host = Policy.HOST in plan.uses
    answers = dict(zip(segments, plan.answers or [Policy.KEEP] * len(segments), strict=True))
    moving = [name for name in segments if answers[name] in (Policy.HOST, Policy.NVME)]
    has_choice = plan.uses >= BOTH or (may_move and Policy.NVME in plan.uses)
    chooser = choosing(moving) if choosing is not None and has_choice else None
    placed = store if chooser is None else PlacedStore(store, chooser)
    lean = [name for name in segments[1:-1] if plan.lean and answers[name] is not Policy.RECOMPUTE]
    proven: dict[object, bool] = {}

    def record(packer: Packer, visit: ForwardVisit) -> OperatorTape:
        return OperatorTape(packer, visit, ledger, plan.minimum_bytes, None, proven)

    hook = SavedTensors(answers, parameters, placed, ledger, inputs, lean, record)
    return ActivationSpill(hook, store, ledger, chooser)


BOTH = frozenset({Policy.HOST, Policy.NVME})
