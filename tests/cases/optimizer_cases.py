"""Optimizers driven by the same gradients. A case is a set of parameters, gradients and hyperparameters from one
seed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from fakes.fake_spill_file import FakeSpillFile
from fakes.lazy_lanes import LazyLanes
from fakes.tracing import TracingLanes
from spillway.parameter_groups import Group, groups_by_name
from spillway.plan import OptimizerPlan, Overlap
from spillway.update_rules import MomentType, UpdateRule
from spillway_trainer.kernels import reference
from spillway_trainer.optimizer.plain import Hyperparameters, ResidentOptimizer, StepOptimizer
from spillway_trainer.optimizer_offload import OptimizerOffload
from spillway_trainer.tiers.device_ledger import DeviceLedger
from spillway_trainer.tiers.host_slab import HostSlab
from spillway_trainer.tiers.lanes import CpuLanes, Lane, Lanes
from spillway_trainer.tiers.nvme_slab import NvmeSlab, OpenFile

SETTINGS = Hyperparameters(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SHAPES = {
    "embedding": (61, 37),
    "norm": (37,),
    "up": (83, 37),
    "bias": (83,),
    "empty": (0, 37),
    "rare": (19, 7),
    "down": (37, 83),
}
"""8,652 parameters in matrices and vectors: no size is a multiple of a vector's width or of a chunk; one is empty, as a
shard may be"""
ALIAS, ALIAS_OWNER = "head", "embedding"
UNTIL_MIDDLE, NUM_STEPS = 2, 5
SKIPPED_STEP, RARE_STEPS, ALIAS_ALONE_STEP = 3, (1, 4), 4
HOST_BYTES, LANE_RATE = 8 * 2**20, 1e9

GROUPS = (Group("*norm", weight_decay=0.3), Group("[nu]p*", 3.0, 0.0), Group("e*", 0.1))
"""the vector "norm" decays, "up" does not; the tied "embedding" and "empty" have lower learning rates"""

Named = list[tuple[str, Parameter]]


def odd_chunk(moments: MomentType) -> int:
    """A prime number of parameters or, if values share scales, the nearest number of whole blocks."""
    return 1024 if moments is MomentType.INT8 else 1009


@dataclass(frozen=True, slots=True)
class Case:
    dtype: torch.dtype
    num_micro_batches: int = 1
    clipping: float | None = None
    tied: bool = False
    seed: int = 0
    rule: UpdateRule = UpdateRule.ADAMW
    groups: tuple[Group, ...] = ()
    moments: MomentType = MomentType.FLOAT32

    @property
    def settings(self) -> Hyperparameters:
        groups = groups_by_name(self.groups, [*SHAPES], self.aliases)
        return replace(SETTINGS, rule=self.rule, moments=self.moments, momentum=0.8, groups=groups)

    @property
    def aliases(self) -> dict[str, str]:
        return {ALIAS: ALIAS_OWNER} if self.tied else {}

    def parameters(self) -> Named:
        """New parameters with the same bits each time; one of them is frozen."""
        generator = torch.Generator().manual_seed(self.seed)
        named = [(name, self._parameter(shape, generator)) for name, shape in SHAPES.items()]
        named.append(("frozen", Parameter(torch.ones(5, dtype=self.dtype), requires_grad=False)))
        if self.tied:
            alias = Parameter(torch.empty(0, dtype=self.dtype))
            alias.data = dict(named)[ALIAS_OWNER].data
            named.append((ALIAS, alias))
        return named

    @property
    def uses(self) -> list[str]:
        """Names of trained parameters in forward order; a tied parameter appears at each of its uses."""
        return [*SHAPES, *self.aliases]

    def gradients(self, step: int, micro_batch: int) -> Iterator[tuple[str, Tensor]]:
        """(name, gradient) pairs in backward order. "rare" has a gradient only in some steps, SKIPPED_STEP has an
        infinity, and in ALIAS_ALONE_STEP the owner of a tied pair has no gradient."""
        generator = torch.Generator().manual_seed(1000 * self.seed + 10 * step + micro_batch)
        uses = {**SHAPES, **({ALIAS: SHAPES[ALIAS_OWNER]} if self.tied else {})}
        for name, shape in reversed(uses.items()):
            scale = 10.0 ** torch.randint(-6, 2, (1,), generator=generator).item()
            gradient = (torch.randn(shape, generator=generator) * scale).to(self.dtype)
            if step == SKIPPED_STEP and name == "up":
                gradient[0, 0] = math.inf
            owner_left_out = self.tied and step == ALIAS_ALONE_STEP and name == ALIAS_OWNER
            if not owner_left_out and (name != "rare" or step in RARE_STEPS):
                yield name, gradient

    def _parameter(self, shape: tuple[int, ...], generator: torch.Generator) -> Parameter:
        return Parameter(torch.randn(shape, generator=generator).to(self.dtype))


@dataclass(slots=True)
class Outcome:
    """The results of a run that placement must not change."""

    parameters: dict[str, Tensor]
    states: dict[str, Tensor]
    scalars: dict[str, float]
    norms: list[float] = field(default_factory=list)

    def difference(self, other: Outcome) -> list[str]:
        """Names of results that differ in any bit."""
        pairs = [(self.parameters, other.parameters), (self.states, other.states)]
        names = [name for mine, theirs in pairs for name in mine if not torch.equal(mine[name], theirs[name])]
        if [repr(norm) for norm in self.norms] != [repr(norm) for norm in other.norms]:
            names.append("norms")
        return names + ([] if self.scalars == other.scalars else ["scalars"])


def drive(
    optimizer: StepOptimizer,
    case: Case,
    first: int = 0,
    last: int = NUM_STEPS,
    read: Callable[[str], None] = lambda name: None,
) -> list[float]:
    """Makes steps first..last-1 as the step loop does, with every parameter as a segment of its own. Calls `read` for a
    parameter where forward uses it. Returns the gradient norms."""
    norms = []
    for step in range(first, last):
        optimizer.begin(1e-2 / (step + 1))
        for micro_batch in range(case.num_micro_batches):
            for name in case.uses:
                optimizer.wait([name])
                read(name)
            for name, gradient in case.gradients(step, micro_batch):
                optimizer.take(name, gradient)
        norm = optimizer.norm()
        norms.append(norm)
        if math.isfinite(norm):
            clip_factor = 1.0 if case.clipping is None else min(1.0, case.clipping / (norm + 1e-6))
            optimizer.step(1e-2 / (step + 1), clip_factor)
        else:
            optimizer.skip()
    return norms


def outcome(optimizer: StepOptimizer, parameters: Named, norms: list[float]) -> Outcome:
    optimizer.flush()
    tensors = {name: parameter.detach().clone() for name, parameter in parameters}
    return Outcome(tensors, dict(optimizer.state()), optimizer.scalars(), norms)


def resident(parameters: Named, case: Case) -> ResidentOptimizer:
    return ResidentOptimizer(parameters, case.aliases, case.settings, DeviceLedger(None), update=reference.update)


_ORACLES: dict[Case, Outcome] = {}


def oracle(case: Case) -> Outcome:
    """The outcome of all steps with the plain optimizer and the reference arithmetic."""
    if case not in _ORACLES:
        parameters = case.parameters()
        optimizer = resident(parameters, case)
        _ORACLES[case] = outcome(optimizer, parameters, drive(optimizer, case))
    return _ORACLES[case]


LANES: dict[str, Callable[[HostSlab, DeviceLedger], Lanes]] = {
    "cpu": CpuLanes,
    "lazy": LazyLanes,
    "tracing": lambda host, ledger: TracingLanes(host, ledger, dict.fromkeys(Lane, LANE_RATE)),
}


def offload(
    parameters: Named,
    case: Case,
    plan: OptimizerPlan,
    lanes: Lanes,
    ledger: DeviceLedger,
    nvme: NvmeSlab | None = None,
    *,
    in_place: bool = False,
) -> OptimizerOffload:
    """An optimizer whose CPU path uses the native kernel, and whose device path uses the reference, so that two
    different implementations must agree."""
    return OptimizerOffload(
        parameters,
        case.aliases,
        case.settings,
        plan,
        lanes,
        ledger,
        nvme=nvme,
        device_update=reference.update,
        in_place=in_place,
    )


def nvme_slab(nbytes: int = HOST_BYTES, open_file: OpenFile = FakeSpillFile) -> NvmeSlab:
    return NvmeSlab(Path("/spill"), nbytes, 1, open_file=open_file)


def split(
    cpu: float,
    streamed: float,
    resident: float,
    chunk_parameters: int,
    num_threads: int = 1,
    overlap: Overlap = "None",
    speculative_parameters: int = 0,
    *,
    nvme: float = 0.0,
) -> OptimizerPlan:
    return OptimizerPlan(
        nvme_share=nvme,
        cpu_share=cpu,
        streamed_share=streamed,
        resident_share=resident,
        chunk_parameters=chunk_parameters,
        num_threads=num_threads,
        overlap=overlap,
        speculative_parameters=speculative_parameters,
    )
