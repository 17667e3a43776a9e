"""What ranks do in tests/parity/parallel/test_fake_nccl.py. Each function runs in every rank's process, over the fake
CUDA and the fake NCCL."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore, HashStore  # type: ignore[attr-defined] # public, but not declared so
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fakes import cuda_kernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SUMMED = (*FLOATS, torch.int64, torch.int32, torch.int8, torch.uint8)
"""types that all_reduce sums"""
CHOSEN = ("MAX", "MIN", "PRODUCT", "AVG")
LARGE = 12 << 17
"""elements of float32, divisible by 2, 3 and 4 ranks: more than the sockets hold"""


@contextmanager
def joined(
    rank: int, world_size: int, directory: Path, seconds: float = 60.0, backend: str = "cpu:gloo,cuda:nccl"
) -> Iterator[torch.device]:
    """Joins all ranks, which meet at a file of `directory`; yields this rank's device. `seconds`: the time limit of an
    operation."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # a failure writes no trace into the home directory
    cuda_kernels.install()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=FileStore(str(directory / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
    )
    yield device
    dist.destroy_process_group()
    cuda_kernels.raise_failed()


def new_group(ranks: list[int] | None = None) -> dist.ProcessGroup | None:
    """A nccl group of these (None: all) ranks, with a communicator of its own. Ranks outside it get None."""
    found = dist.new_group(ranks, backend="nccl")
    return found if isinstance(found, dist.ProcessGroup) else None


def numbers(rank: int, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of a rank, on the CPU: every rank can make those of the others."""
    return torch.randn(count, generator=torch.Generator().manual_seed(rank)).mul(9).to(dtype)


def sent(rank: int, peer: int) -> int:
    """How many elements a rank sends to another in an exchange of unequal sizes."""
    return (3 * rank + 2 * peer) % 5


# --- results ----------------------------------------------------------------------------------------------------------


def added(values: list[Tensor]) -> Tensor:
    """The sum in the order of the ranks, as the fake makes it."""
    narrow = values[0].dtype in (torch.bfloat16, torch.float16)
    return reduce(torch.add, [one.float() if narrow else one for one in values]).to(values[0].dtype)


def expected(rank: int, world_size: int) -> dict[str, Tensor]:
    """What `collectives` must return."""
    everyone = range(world_size)
    each = [numbers(peer, 7) for peer in everyone]
    long = [numbers(peer, 3 * world_size) for peer in everyone]
    mean = added(each) / world_size
    chosen = {"MAX": torch.stack(each).amax(0), "MIN": torch.stack(each).amin(0), "AVG": mean}
    chosen["PRODUCT"] = reduce(torch.mul, each)
    return {
        "all-gather": torch.cat(each),
        "all-gather of a list": torch.stack(each),
        "reduce-scatter": added(long).chunk(world_size)[rank],
        "all-to-all": torch.cat([one.chunk(world_size)[rank] for one in long]),
        "unequal all-to-all": torch.cat(
            [
                numbers(peer, 5 * world_size)[sum(sent(peer, i) for i in range(rank)) :][: sent(peer, rank)]
                for peer in everyone
            ]
        ),
        "large all-to-all": torch.cat([numbers(peer, LARGE).chunk(world_size)[rank] for peer in everyone]),
        "broadcast": each[1],
        "reduce": added(each) if rank == 1 else each[rank],
        "ring": each[(rank - 1) % world_size],
        "to all": torch.stack(each),
        "scaled": reduce(torch.add, [one * 0.25 for one in each]),
        **{f"sum of {dtype}": added([numbers(peer, 7, dtype) for peer in everyone]) for dtype in SUMMED},
        **{f"{name} of float32": values for name, values in chosen.items()},
    }


def collectives(
    rank: int, world_size: int, directory: Path, backend: str
) -> tuple[dict[str, Tensor], dict[str, int], list[str]]:
    """Results by name, counts, races."""
    found = dict[str, Tensor]()
    with joined(rank, world_size, directory, backend=f"cpu:gloo,cuda:{backend}") as device:
        mine, long = numbers(rank, 7).to(device), numbers(rank, 3 * world_size).to(device)
        found["all-gather"] = mine.new_empty(7 * world_size)
        dist.all_gather_into_tensor(found["all-gather"], mine)
        found["all-gather of a list"] = mine.new_empty(world_size, 7)
        dist.all_gather(list(found["all-gather of a list"]), mine)
        found["reduce-scatter"] = mine.new_empty(3)
        dist.reduce_scatter_tensor(found["reduce-scatter"], long)
        found["all-to-all"] = torch.empty_like(long)
        dist.all_to_all_single(found["all-to-all"], long)
        given = [sent(rank, peer) for peer in range(world_size)]
        taken = [sent(peer, rank) for peer in range(world_size)]
        found["unequal all-to-all"] = mine.new_empty(sum(taken))
        source = numbers(rank, 5 * world_size)[: sum(given)].to(device)
        dist.all_to_all_single(found["unequal all-to-all"], source, taken, given)
        large = numbers(rank, LARGE).to(device)
        found["large all-to-all"] = torch.empty_like(large)
        dist.all_to_all_single(found["large all-to-all"], large)
        found["broadcast"] = mine.clone()
        dist.broadcast(found["broadcast"], 1)
        found["reduce"] = mine.clone()
        dist.reduce(found["reduce"], 1)
        found["ring"] = torch.empty_like(mine)
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        ring = [dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, found["ring"], before)]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        found["to all"] = mine.new_empty(world_size, 7)
        found["to all"][rank] = mine
        others = [peer for peer in range(world_size) if peer != rank]
        sends = [dist.P2POp(dist.isend, mine, peer) for peer in others]
        for work in dist.batch_isend_irecv(
            sends + [dist.P2POp(dist.irecv, found["to all"][peer], peer) for peer in others]
        ):
            work.wait()
        for dtype in SUMMED:
            found[f"sum of {dtype}"] = numbers(rank, 7, dtype).to(device)
            dist.all_reduce(found[f"sum of {dtype}"])
        for name in CHOSEN:
            found[f"{name} of float32"] = mine.clone()
            dist.all_reduce(found[f"{name} of float32"], getattr(dist.ReduceOp, name))
        found["scaled"] = mine.clone()
        dist.all_reduce(found["scaled"], dist._make_nccl_premul_sum(0.25))  # type: ignore[attr-defined]
        dist.barrier()
        results = {name: tensor.cpu() for name, tensor in found.items()}
    return results, cuda_kernels.take_counts(), cuda_kernels.take_races()


# --- orders -----------------------------------------------------------------------------------------------------------


def asynchronous(rank: int, world_size: int, directory: Path, waits: bool) -> tuple[Tensor, list[str]]:
    """Reads the result of an asynchronous all-gather on the compute stream; returns it and the races."""
    with joined(rank, world_size, directory) as device:
        mine = numbers(rank, 6).to(device)
        gathered = mine.new_zeros(6 * world_size)
        work = dist.all_gather_into_tensor(gathered, mine, async_op=True)
        assert work is not None
        if waits:
            work.wait()
        doubled = gathered * 2
        found = cuda_kernels.take_races()
        work.wait()
        gathered.mul_(1)
        torch.cuda.synchronize()
    return doubled.cpu(), found


def two_groups(rank: int, world_size: int, directory: Path) -> tuple[list[Tensor], dict[str, int], list[str]]:
    """Reduces many tensors in two groups, on two streams, each rank in another order of its calls; returns the sums of
    the first group and of the second."""
    with joined(rank, world_size, directory) as device:
        groups = [new_group(), new_group()]
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]  # type: ignore[no-untyped-call]
        values = [numbers(rank + 10 * number, 4096).to(device) for number in range(2)]
        found = [one.new_empty(20, 4096) for one in values]
        torch.cuda.synchronize()
        for i in range(20):
            for number in (0, 1) if rank % 2 else (1, 0):
                with torch.cuda.stream(streams[number]):
                    found[number][i] = values[number] + i
                    dist.all_reduce(found[number][i], group=groups[number])
        torch.cuda.synchronize()
        results = [one.cpu() for one in found]
    return results, cuda_kernels.take_counts(), cuda_kernels.take_races()


def subgroups(rank: int, world_size: int, directory: Path) -> tuple[Tensor, dict[str, int]]:
    """Every second rank is in the same group; returns a sum over this rank's group, and counts."""
    with joined(rank, world_size, directory) as device:
        groups = [new_group([*range(first, world_size, 2)]) for first in range(2)]
        values = numbers(rank, 10).to(device)
        dist.all_reduce(values, group=groups[rank % 2])
        found = values.cpu()
    return found, cuda_kernels.take_counts()


def one_group_on_two_streams(rank: int, world_size: int, directory: Path) -> tuple[Tensor, list[str]]:
    """Operations of one group on the compute stream and, asynchronously, on the group's own; returns the sums."""
    with joined(rank, world_size, directory) as device:
        found = torch.stack([numbers(rank + 10 * i, 512) for i in range(20)]).to(device)
        works = [dist.all_reduce(found[i], async_op=i % 3 == 0) for i in range(20)]
        for work in works:
            if work is not None:
                work.wait()
        results = found.cpu()
    return results, cuda_kernels.take_races()


def retired(rank: int, world_size: int, directory: Path) -> tuple[bool, list[str]]:
    """Drops the inputs of asynchronous work that the group's watchdog retires, and takes their memory again."""
    with joined(rank, world_size, directory) as device:
        work = dist.all_reduce(numbers(rank, 4096).to(device), async_op=True)
        deadline = time.monotonic() + 30
        while not (is_done := work.is_completed()) and time.monotonic() < deadline:
            time.sleep(0.01)
        del work
        for _ in range(3):  # an operation frees what earlier ones kept
            dist.all_reduce(torch.zeros(1, device=device))
        torch.zeros(4096, device=device)
    return is_done, cuda_kernels.take_races()


# --- FSDP2 ------------------------------------------------------------------------------------------------------------


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 8))


def divided(
    rank: int, world_size: int, directory: Path, policy: str
) -> tuple[dict[str, Tensor], dict[str, int], list[str]]:
    """Two steps of FSDP2 on a nccl group beside a gloo group; returns the whole parameters, counts and races."""
    if "without waits" in policy:
        torch.cuda.Stream.wait_event = lambda *_: None  # type: ignore[method-assign]
    with joined(rank, world_size, directory, backend="gloo") as device:
        group = new_group()
        assert group is not None
        mesh = DeviceMesh.from_group(group, "cuda")
        model = small_model().to(device)
        kind = torch.bfloat16 if "bfloat16" in policy else torch.float32
        precision = MixedPrecisionPolicy(param_dtype=kind, reduce_dtype=torch.float32)
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=precision, reshard_after_forward=policy != "kept")
        fully_shard(model, mesh=mesh, mp_policy=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            samples = torch.randn(6, 24, generator=torch.Generator().manual_seed(step * world_size + rank)).to(device)
            model(samples).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found = {name: tensor.full_tensor().cpu() for name, tensor in model.state_dict().items()}
    return found, cuda_kernels.take_counts(), cuda_kernels.take_races()


def undivided(world_size: int) -> dict[str, Tensor]:
    """The parameters after the same steps in one process on a CPU."""
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        for rank in range(world_size):
            samples = torch.randn(6, 24, generator=torch.Generator().manual_seed(step * world_size + rank))
            (model(samples).square().mean() / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(model.state_dict())


# --- memory that is only counted --------------------------------------------------------------------------------------


def one_of_many(world_size: int) -> dict[str, int]:
    """This process is rank 0 of many, the others of which do not exist. It must be rank 0, because the others wait for
    rank 0's unique id."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=world_size)
    part = torch.empty(1 << 20, device="cuda")
    whole = part.new_empty(world_size << 20)
    cuda_kernels.take_counts()
    dist.all_gather_into_tensor(whole, part)
    work = dist.reduce_scatter_tensor(part, whole, async_op=True)
    assert work is not None
    work.wait()
    dist.all_reduce(part)
    found = cuda_kernels.take_counts()
    dist.destroy_process_group()
    return found


def divided_among_many(world_size: int) -> tuple[int, dict[str, int]]:
    """Two steps of FSDP2 on rank 0 of many: six layers of 64 Mi weights in bfloat16. Returns the most bytes that were
    allocated in the second step, and counts of both."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=HashStore(), rank=0, world_size=world_size)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8192, 8192, bias=False, dtype=torch.bfloat16) for _ in range(6)))
    mesh = DeviceMesh.from_group(dist.distributed_c10d._get_default_group(), "cuda")
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cuda")
    samples = torch.empty(64, 8192, device="cuda", dtype=torch.bfloat16)
    cuda_kernels.take_counts()
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats()
        model(samples).sum().backward()
    return torch.cuda.max_memory_allocated(), cuda_kernels.take_counts()


# --- failures ---------------------------------------------------------------------------------------------------------

CLEANS_UP, RAISES_ONLY = "2", "0"
"""of TORCH_NCCL_ASYNC_ERROR_HANDLING: the watchdog aborts the communicator, or does nothing; by default it ends the
process"""


def mismatched(rank: int, world_size: int, directory: Path) -> str:
    """Gathers tensors of unequal sizes; returns torch's error."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = RAISES_ONLY
    with joined(rank, world_size, directory) as device:
        mine = torch.ones(512 if rank == 0 else 256, device=device)
        return error_of(lambda: dist.all_gather_into_tensor(mine.new_empty(world_size * len(mine)), mine))


def left_alone(rank: int, world_size: int, directory: Path, hangs: bool) -> tuple[str, float]:
    """The last rank dies between two operations. Returns the error of the others, and after how many seconds it came.
    If `hangs`, an operation waits for the dead rank until the group's time limit of 3 s."""
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = CLEANS_UP
    os.environ["FAKE_NCCL_HANG"] = str(int(hangs))
    with joined(rank, world_size, directory, seconds=3.0 if hangs else 60.0) as device:
        mine = torch.ones(1000, device=device)
        dist.all_reduce(mine)
        torch.cuda.synchronize()
        if rank == world_size - 1:
            os._exit(3)
        start = time.monotonic()
        return error_of(lambda: dist.all_reduce(mine)), time.monotonic() - start


def error_of(call: Callable[[], object]) -> str:
    """The error that the call raises, this time or later."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            call()
            torch.cuda.synchronize()
        except RuntimeError as error:
            return str(error)
        time.sleep(0.1)
    raise AssertionError("there was no error")


class Library:
    """The fake's functions of libnccl, called directly; a failure raises RuntimeError."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        function = getattr(cuda_kernels.fake(), f"nccl{name}")

        def call(*arguments: Any) -> None:
            result = function(*arguments)
            if result != 0:
                raise RuntimeError(f"nccl{name} returned {result}: {self.last_error()}")

        return call

    def last_error(self, communicator: ctypes.c_void_p | None = None) -> str:
        function = cuda_kernels.fake().ncclGetLastError
        function.restype = ctypes.c_char_p
        return str(function(communicator).decode())


class UniqueId(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_byte * 128),)


def alone(rank: int, directory: Path) -> str:
    """One of two ranks waits for the other, which never comes; returns the error."""
    os.environ["FAKE_NCCL_INIT_SECONDS"] = "1"
    library, made, communicator = Library(), UniqueId(), ctypes.c_void_p()
    library.GetUniqueId(ctypes.byref(made))
    try:
        library.CommInitRank(ctypes.byref(communicator), 2, made, rank)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("there was no error")


def on_interfaces(names: list[str]) -> list[str | None]:
    """The error of making a unique id for each value of NCCL_SOCKET_IFNAME."""
    library, found = Library(), list[str | None]()
    for name in names:
        os.environ["NCCL_SOCKET_IFNAME"] = name
        try:
            library.GetUniqueId(ctypes.byref(UniqueId()))
            found.append(None)
        except RuntimeError as error:
            found.append(str(error).partition(": ")[2])
    return found


def aborted(rank: int, world_size: int, directory: Path) -> float:
    """Aborts a communicator whose operation waits for a rank that does not take part; returns the seconds until the
    stream is idle."""
    library, communicator = Library(), communicator_of(rank, world_size, directory)
    stream = torch.cuda.current_stream().cuda_stream
    values = torch.ones(8, device="cuda")
    start = time.monotonic()
    if rank == 0:
        library.AllReduce(
            *(ctypes.c_void_p(values.data_ptr()),) * 2, ctypes.c_size_t(8), 7, 0, communicator, ctypes.c_void_p(stream)
        )
        time.sleep(0.3)
        start = time.monotonic()
        library.CommAbort(communicator)
        torch.cuda.synchronize()
    (directory / f"done-{rank}").touch()
    while len([*directory.glob("done-*")]) < world_size:
        time.sleep(0.05)
    return time.monotonic() - start if rank == 0 else 0.0


def communicator_of(rank: int, world_size: int, directory: Path) -> ctypes.c_void_p:
    library, made, communicator = Library(), UniqueId(), ctypes.c_void_p()
    path = directory / "id"
    torch.cuda.set_device(rank)
    if rank == 0:
        library.GetUniqueId(ctypes.byref(made))
        (directory / "part").write_bytes(bytes(made))
        (directory / "part").rename(path)
    while not path.exists():
        time.sleep(0.01)
    library.CommInitRank(ctypes.byref(communicator), world_size, UniqueId.from_buffer_copy(path.read_bytes()), rank)
    return communicator


def raising(rank: int) -> None:
    if rank == 1:
        raise ValueError("one rank has failed")
    time.sleep(600)
