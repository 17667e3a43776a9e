"""Attempts of several ranks, on fake CUDA devices or on the CPU. To be called in a process over the fake for each rank
(`harness.fake_cuda.run_ranks`)."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.distributed.fsdp import FSDPModule

from cases import device_attempts
from harness import local_runs, rank_runs
from spillway.plan import NCCL_BYTES, Tier
from spillway_trainer import assemble
from spillway_trainer.optimizer_offload.offload import OptimizerOffload
from spillway_trainer.parallel import distributed, fsdp, reduced_gradients, segment_gradients
from spillway_trainer.parallel.backward_exchange import BackwardExchange
from spillway_trainer.parallel.distributed import Peers
from spillway_trainer.tiers.cuda_lanes import CudaLanes, StreamOperation
from spillway_trainer.tiers.lanes import DONE, Lane

BUCKET = 4096
"""number of gradients that ranks exchange at once: a segment has several times as many"""
Attempted = tuple[int, dict[str, int], list[str]]
"""Exit code, what the fake counted, races."""


def attempt(
    rank: int,
    world_size: int,
    port: int,
    root: Path,
    strategy: str,
    placement: str | None,
    *,
    on_device: bool,
    overlap: str = "None",
    changes: Mapping[str, str] | None = None,
    epoch: int = 1,
    defect: str = "",
    dies_at: int = 0,
) -> Attempted:
    """Runs one rank of an attempt under a placement of rank_runs.PLACEMENTS (None: mode Disabled). The last rank kills
    itself at gradient `dies_at`, if that is not 0."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()}, MASTER_ADDR="127.0.0.1")
    distributed.DEVICE_EXCHANGE_PARAMETERS = reduced_gradients.DEVICE_EXCHANGE_PARAMETERS = BUCKET
    text = local_runs.write_text(root.parent / "text") if rank == 0 else root.parent / "text"
    job = rank_runs.job_file(root, text, root.parent / "corpus", epoch, world_size, changes or {})
    plan = rank_runs.plan_for(job, placement)
    optimizer = plan.optimizer.model_copy(update={"overlap": overlap})
    budget = {**plan.budget, Tier.DEVICE: plan.budget[Tier.DEVICE] + NCCL_BYTES}
    if defect:
        DEFECTS[defect]()
    if dies_at and rank == world_size - 1:
        die_at_gradient(dies_at)
    update = {"strategy": strategy, "optimizer": optimizer, "budget": budget}
    return device_attempts.carried_out(job, plan.model_copy(update=update), on_device)


def attempt_with(rank: int, *given: Any) -> Attempted:
    """`attempt`, with the arguments by name as the last one."""
    return attempt(rank, *given[:-1], **given[-1])


def die_at_gradient(number: int) -> None:
    """Of Fsdp, Zero2 or Ddp."""
    numbers = itertools.count(1)

    def dying(take: Callable[..., None]) -> Any:
        def taken(*given: Any) -> None:
            if next(numbers) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            take(*given)

        return taken

    segment_gradients.SegmentGradients.take = dying(segment_gradients.SegmentGradients.take)  # type: ignore[method-assign]
    BackwardExchange.taken = dying(BackwardExchange.taken)  # type: ignore[method-assign]


# --- planted defects --------------------------------------------------------------------------------------------------


def gather_early() -> None:
    """Parameters are gathered while they are being updated."""
    fsdp.ShardedOptimizer.wait = lambda *_: None  # type: ignore[method-assign]


def complete_early() -> None:
    """Parameters are gathered, after the update, while lanes still write this rank's part."""
    OptimizerOffload.flush = lambda _: None  # type: ignore[method-assign]


def add_early() -> None:
    """Gradients of other ranks are added before they have arrived."""
    scatter = Peers.scatter

    def scattered(peers: Peers, *given: object) -> Callable[[], None]:
        scatter(peers, *given)  # type: ignore[arg-type]
        return lambda: None

    Peers.scatter = scattered  # type: ignore[method-assign]


def collect_early() -> None:
    """Sums over ranks are used while they are being made."""
    collect = reduced_gradients.GradientsBehind.collect

    def collected(behind: reduced_gradients.GradientsBehind) -> None:
        wait, behind._lanes.wait = behind._lanes.wait, lambda _: None  # type: ignore[method-assign]
        collect(behind)
        behind._lanes.wait = wait  # type: ignore[method-assign]

    reduced_gradients.GradientsBehind.collect = collected  # type: ignore[method-assign]


def refill_early() -> None:
    """A bucket is filled while it is being sent."""
    make = reduced_gradients.ReducedGradients.__init__

    def made(reduced: reduced_gradients.ReducedGradients, *given: object, **options: object) -> None:
        make(reduced, *given, **options)  # type: ignore[arg-type]
        reduced._buffers[1] = reduced._buffers[0]

    reduced_gradients.ReducedGradients.__init__ = made  # type: ignore[method-assign]


def gather_on_streams_of_torch() -> None:
    """FSDP2 gathers on its own streams, which do not wait for the updates of a later segment."""
    FSDPModule._set_unshard_async_op = lambda *_: None  # type: ignore[method-assign]


def exchange_early() -> None:
    """Gradients are exchanged while backward and the lanes still add to them."""
    submit = CudaLanes.submit

    def submitted(lanes: CudaLanes, lane: Lane, *given: object, **options: object) -> object:
        if lane is Lane.NETWORK:
            options["after"] = ()
        return submit(lanes, lane, *given, **options)  # type: ignore[arg-type]

    CudaLanes.submit = submitted  # type: ignore[method-assign,assignment]


def update_early() -> None:
    """Gradients are used while they are being exchanged."""

    class Waitless(BackwardExchange):
        def __call__(self) -> None:
            submit, wait = self._lanes.submit, StreamOperation.wait
            self._lanes.submit = lambda *given, **options: (submit(*given, **options), DONE)[1]  # type: ignore[method-assign]
            StreamOperation.wait = lambda _: None  # type: ignore[method-assign]
            super().__call__()
            self._lanes.submit, StreamOperation.wait = submit, wait  # type: ignore[method-assign]

    assemble.BackwardExchange = Waitless  # type: ignore[misc]


DEFECTS: dict[str, Callable[[], None]] = {
    one.__name__.replace("_", " "): one
    for one in (
        gather_early,
        complete_early,
        add_early,
        collect_early,
        refill_early,
        gather_on_streams_of_torch,
        exchange_early,
        update_early,
    )
}
"""defects that the judge of races finds"""
