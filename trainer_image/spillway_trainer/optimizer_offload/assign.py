"""Assigns chunks to update paths: parameters -> chunks -> paths. Pure; does not affect results."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ..optimizer.trainable import cut


class Path(StrEnum):
    """Where a chunk's update runs, and where its states live between updates."""

    CPU = "cpu"
    """States in host memory, updated by CPU threads; gradients are copied down, parameters up."""
    STREAMED = "streamed"
    """States in host memory, streamed through a device slot; the update runs on the device."""
    RESIDENT = "resident"
    """States and update on the device."""
    NVME = "nvme"
    """States on NVMe, read into host memory and updated by CPU threads; gradients and parameters as for `cpu`."""

    @property
    def updates_on_cpu(self) -> bool:
        """Whether CPU threads update the chunk, from an accumulator in host memory."""
        return self in (Path.CPU, Path.NVME)


@dataclass(frozen=True, slots=True)
class Shares:
    """The real-valued split c + g + s + n = 1 of the parameters by path."""

    cpu: float
    streamed: float
    resident: float
    nvme: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.cpu, self.streamed, self.resident, self.nvme)
        if min(shares) < 0.0 or abs(sum(shares) - 1.0) > 1e-6:
            raise ValueError(
                f"shares of the parameters by where they are updated (cpu, streamed, resident, nvme) are {shares}; "
                "each must be >= 0, and they must sum to 1"
            )

    def of(self, path: Path) -> float:
        return {
            Path.CPU: self.cpu, Path.STREAMED: self.streamed, Path.RESIDENT: self.resident, Path.NVME: self.nvme,
        }[path]  # fmt: skip

    @property
    def of_cpu(self) -> Shares:
        """How the CPU's updates divide between states in host memory and states on NVMe; all in host memory if there
        are none."""
        both = self.cpu + self.nvme
        return Shares(1.0 - self.nvme / both, 0.0, 0.0, self.nvme / both) if both else ALL_IN_HOST


ALL_IN_HOST = Shares(1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A slice of one flattened parameter: the unit of assignment, update and copy."""

    parameter: str
    offset: int
    """In parameters, from the start of the flattened parameter."""
    size: int
    """In parameters."""
    path: Path

    @property
    def end(self) -> int:
        return self.offset + self.size

    @property
    def label(self) -> str:
        return f"{self.parameter}[{self.offset}:{self.end}]"


Assignment = Callable[[Sequence[int], Shares], list[Path]]
"""Sizes of chunks in update order -> the path of each."""


def assign(sizes: Sequence[int], shares: Shares) -> list[Path]:
    """The path of each chunk, in update order.

    Every path works at a rate proportional to its share, so after T parameters it should have taken share x T. Each
    chunk goes to the path that is furthest behind this target and so would finish earliest: the paths alternate evenly,
    and at every prefix each share is met within one chunk (the largest one seen).
    """
    paths: list[Path] = []
    behind = dict.fromkeys(Path, 0.0)  # parameters due by share, less parameters taken
    for size in sizes:
        for path in Path:
            behind[path] += shares.of(path) * size
        chosen = max((path for path in Path if shares.of(path) > 0.0), key=behind.__getitem__)
        behind[chosen] -= size
        paths.append(chosen)
    return paths


def assign_by_size(sizes: Sequence[int], shares: Shares) -> list[Path]:
    """Like `assign`, but chunks of less than half of the largest go to the CPU, if its share has room for all of them.

    Two slots keep both directions of the link busy only while their chunks have the same size: a small chunk's copies
    end early, and the link waits until the states of the other slot have gone back. The weights of every norm would
    cost as much as the copy of a large chunk.
    """
    half = max(sizes, default=0) / 2
    large = [size for size in sizes if size >= half]
    total, num_large = sum(sizes), sum(large)
    if shares.streamed == 0.0 or total - num_large > shares.cpu * total:
        return assign(sizes, shares)
    paths = iter(assign(large, rest_of(shares, total, num_large)))
    return [next(paths) if size >= half else Path.CPU for size in sizes]


def stride(every: int) -> Assignment:
    """The assignment of Deep Optimizer States, for comparison: the device updates every `every`-th chunk, whatever its
    size, so that of the shares between 0 and 1/2 only 1/k are possible. Raises ValueError for a stride outside
    2..10."""
    if every not in STRIDES:
        raise ValueError(
            f"stride {every}: must be from 2 to 10; the device updates every stride-th chunk of the parameters"
        )
    return lambda sizes, _: [Path.CPU if (index + 1) % every else Path.STREAMED for index in range(len(sizes))]


STRIDES = range(2, 11)
"""The strides that the paper's authors ran."""


def assign_chunks(
    num_parameters: Mapping[str, int],
    chunk_parameters: int,
    shares: Shares,
    streamed: Container[str] = (),
    by: Assignment = assign_by_size,
) -> list[Chunk]:
    """Chunks of all parameters in update order: the declared order of the parameters, which is forward order.

    The CPU updates `streamed` parameters, which live outside the device, from states in host memory and on NVMe in the
    proportion of `shares`; the other parameters share what is left of each path.
    """
    slices = [
        (name, offset, size) for name, count in num_parameters.items() for offset, size in cut(count, chunk_parameters)
    ]
    free = [size for name, _, size in slices if name not in streamed]
    forced = [size for name, _, size in slices if name in streamed]
    of_free = iter(by(free, rest_of(shares, sum(num_parameters.values()), sum(free), shares.of_cpu)))
    of_forced = iter(assign(forced, shares.of_cpu))
    return [
        Chunk(name, offset, size, next(of_forced if name in streamed else of_free)) for name, offset, size in slices
    ]


def rest_of(shares: Shares, num_parameters: int, num_free: int, of_cpu: Shares = ALL_IN_HOST) -> Shares:
    """The shares of the `num_free` parameters that may take any path, if all others take the CPU's paths, divided as in
    `of_cpu`."""
    num_forced = num_parameters - num_free
    if num_forced == 0 or num_free == 0:
        return shares
    parts = (
        max(0.0, shares.cpu * num_parameters - of_cpu.cpu * num_forced),
        shares.streamed * num_parameters,
        shares.resident * num_parameters,
        max(0.0, shares.nvme * num_parameters - of_cpu.nvme * num_forced),
    )
    total = sum(parts)
    return Shares(*(part / total for part in parts)) if total else of_cpu
