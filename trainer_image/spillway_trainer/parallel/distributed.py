"""Communication between ranks: the only file that uses torch.distributed.

Ranks meet at a store, a key-value server in rank 0, and then have three gloo groups:

    exchange   the default group: what every step needs, within a time limit
    gradients  the same for the network lane of ranks on CPUs, which sums gradients while the step goes on
    decisions  without a time limit, because rank 0 may build a corpus or write a checkpoint first. Its operations are
               polled from Python, so that SIGTERM is handled meanwhile

All fail at once when a peer's connection is closed. Ranks on CUDA devices have an NCCL group in addition.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined] # public, but not declared so

from spillway.errors import SpillwayError, UserError
from spillway.planning.workload import DEVICE_EXCHANGE_PARAMETERS, EXCHANGE_PARAMETERS, NUM_GATHERED_SEGMENTS
from spillway.update_rules import MomentType

from ..ending import PeerLost, PeerNeverJoined, is_device_fault, is_device_out_of_memory
from ..kernels import dispatch as kernels
from ..kernels.reference import SquareSum
from ..models.chain import CPU
from ..optimizer.plain import MOMENT_DTYPES
from ..ranks import ONE_RANK, GradientSum, Ranks, Result, TakeBuffer, World
from ..tiers.arena import as_bytes

RENDEZVOUS_SECONDS = 300.0
"""Time for all ranks to appear once all pods are ready: a name may not resolve at first."""
COLLECTIVE_SECONDS = 300.0
"""Time for one exchange of the step: a rank that is later counts as lost."""
SHORTEST_POLL_SECONDS, LONGEST_POLL_SECONDS = 0.001, 0.05
LONGEST_PEER_POLL_SECONDS = 0.5
"""The longest poll while peers start, which may take minutes and during which all ranks ask rank 0."""
CONNECT_SECONDS = 2.0
LOOPBACK = "127.0.0.1"
NOT_THERE = "read the logs of the missing ranks, and check that the nodes can reach each other over the network"
NO_LIMIT = timedelta(days=3650)
HEADER_BYTES = 1024
"""Size of the header of a shared tensor: its name, shape and type."""
SQUARE_SUM_WORDS = 24
"""Number of 32-bit words of an exact sum of squares, which is below 2^(2 x 277 + 64) in units of 2^-298."""


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Waiting times in seconds, set by SPILLWAY_RENDEZVOUS_SECONDS and SPILLWAY_COLLECTIVE_SECONDS."""

    rendezvous_seconds: float = RENDEZVOUS_SECONDS
    collective_seconds: float = COLLECTIVE_SECONDS

    @staticmethod
    def of(environment: os._Environ[str]) -> Timeouts:
        return Timeouts(
            _seconds(environment, "SPILLWAY_RENDEZVOUS_SECONDS", RENDEZVOUS_SECONDS),
            _seconds(environment, "SPILLWAY_COLLECTIVE_SECONDS", COLLECTIVE_SECONDS),
        )


def _seconds(environment: os._Environ[str], name: str, default: float) -> float:
    text = environment.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < 1e9:
        raise UserError(f"environment variable {name} = {text!r}: must be a number of seconds above 0")
    return seconds


@contextmanager
def joined(world: World) -> Iterator[Ranks]:
    """Yields all ranks of the run, once the last one is there. A single rank has no process group."""
    if world.size == 1:
        yield ONE_RANK
        return
    limits = Timeouts.of(os.environ)
    store = meet(world, limits)
    check_device()
    with peers(f"{world.size} ranks to connect to each other"):
        dist.init_process_group(
            "gloo",
            store=PrefixStore("gloo", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=limits.collective_seconds),
        )
        decisions = dist.new_group(backend="gloo", timeout=NO_LIMIT)
        gradients = dist.new_group(backend="gloo", timeout=timedelta(seconds=limits.collective_seconds))
    assert isinstance(decisions, dist.ProcessGroup), "every rank is in it"
    assert isinstance(gradients, dist.ProcessGroup), "every rank is in it"
    yield TorchRanks(world, decisions, gradients)
    # Only here: after an error a peer may be gone, and the group would wait for it forever.
    dist.destroy_process_group()


def meet(world: World, limits: Timeouts) -> TCPStore:
    """Returns the store, once every rank has announced itself. Raises PeerNeverJoined, which names the missing
    ranks."""
    deadline = JoinDeadline(world, limits.rendezvous_seconds)
    place = f"{world.master_address}:{world.master_port}"
    if not world.is_first:
        await_listener(world, deadline)
    timeout = timedelta(seconds=limits.collective_seconds)
    host = LOOPBACK if world.is_first else world.master_address  # its own name may not resolve yet
    try:
        listener = local_listener(world)
        store = TCPStore(
            host,
            world.master_port,
            world.size,
            world.is_first,
            timeout,
            wait_for_workers=False,
            master_listen_fd=listener,
        )
    except (RuntimeError, OSError) as error:
        if world.is_first:
            raise RuntimeError(
                f"port {world.master_port}: rank 0 cannot accept connections of the other ranks (training processes) "
                f"there: {error}"
            ) from error
        raise PeerNeverJoined(
            f"rank {world.rank} could not connect to rank 0 at {place}: {error}; read rank 0's log"
        ) from error
    with peers(f"all {world.size} ranks to come to {place}"):
        store.set(_there(world.rank), "")
        pause, everyone = SHORTEST_POLL_SECONDS, [_there(rank) for rank in range(world.size)]
        while not store.check(everyone):
            if deadline.is_over() and (
                missing := [rank for rank, key in enumerate(everyone) if not store.check([key])]
            ):
                raise PeerNeverJoined(
                    f"rank {world.rank} waited {limits.rendezvous_seconds:.0f} s at {place} for {_named(missing)} to "
                    f"connect; {NOT_THERE}"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PEER_POLL_SECONDS)
    return store


@dataclass(slots=True)
class JoinDeadline:
    """Decides when a rank gives up on peers that do not appear: `seconds` after the last check that found a pod not
    ready.

    Until all pods are ready, a node may still be created or an image pulled, and the operator decides how long that may
    take. It also ends the attempt when a pod fails.
    """

    world: World
    seconds: float
    _deadline: float = 0.0
    _next_look: float = 0.0

    def is_over(self) -> bool:
        now = time.monotonic()
        if now >= self._next_look:
            if not self._deadline or is_pod_missing(self.world):
                self._deadline = now + self.seconds
            self._next_look = now + self.seconds / 10
        return now > self._deadline


def is_pod_missing(world: World) -> bool:
    """Whether a pod of the attempt is known not to be ready: the operator's Service (<name> in rank 0's host name
    <name>-0.<name>) has the addresses of the ready pods. False outside a cluster, and if DNS does not answer."""
    host, _, service = world.master_address.partition(".")
    if not service or host != f"{service}-0":
        return False
    try:
        found = socket.getaddrinfo(service, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return len({address[0] for *_, address in found}) < world.num_nodes


def local_listener(world: World) -> int | None:
    """Returns rank 0's socket if all ranks are on one machine: then nobody outside it has to reach the store, which
    asks for no password. None: the store opens its own socket, on every address. The store closes the socket."""
    if not world.is_first or world.master_address not in (LOOPBACK, "localhost"):
        return None
    return socket.create_server((LOOPBACK, world.master_port)).detach()


def check_device() -> None:
    """Opens the devices that gloo will use later, because a missing interface would then look like a lost peer. Raises
    RuntimeError."""
    gloo = dist.ProcessGroupGloo
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    for interface in interfaces:
        gloo.create_device(interface=interface)
    if not interfaces:
        gloo.create_default_device()


def await_listener(world: World, deadline: JoinDeadline) -> None:
    """Tries to connect to rank 0 until it listens. Uses Python's own sockets, so that a signal ends the wait."""
    pause = SHORTEST_POLL_SECONDS
    while True:
        try:
            socket.create_connection((world.master_address, world.master_port), CONNECT_SECONDS).close()
        except OSError as error:
            if deadline.is_over():
                raise PeerNeverJoined(
                    f"rank {world.rank} could not connect to rank 0 at {world.master_address}:{world.master_port}: "
                    f"{error}; {NOT_THERE}"
                ) from error
        else:
            return
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PEER_POLL_SECONDS)


@contextmanager
def peers(awaited: str) -> Iterator[None]:
    """Reports a RuntimeError in its block as the loss of another rank (PeerLost), unless it is about this rank's own
    device."""
    try:
        yield
    except RuntimeError as error:  # what the store, gloo and NCCL raise
        if is_device_out_of_memory(error) or is_device_fault(error):
            raise
        abort_exchanges()
        raise PeerLost(
            f"another rank ended while this one waited for {awaited}: {in_short(error)}; read the logs of the other "
            "ranks"
        ) from error


_ON_DEVICES: list[dist.ProcessGroup] = []
"""The NCCL groups of this process."""


def abort_exchanges() -> None:
    """Ends all exchanges between devices that have begun, and makes later ones fail. Otherwise streams would wait for a
    rank that is gone, or that waits for this one, and the host would wait for its streams."""
    with suppress(IndexError):
        while True:
            group = _ON_DEVICES.pop()
            with suppress(RuntimeError):
                group.abort()


def device_group(device: torch.device) -> dist.ProcessGroup:
    """Makes the NCCL group of all ranks. Every rank calls it."""
    seconds = Timeouts.of(os.environ).collective_seconds
    with peers("all ranks to agree on the exchange between devices"):
        made = dist.new_group(backend="nccl", timeout=timedelta(seconds=seconds), device_id=device)
    assert isinstance(made, dist.ProcessGroup), "every rank is in it"
    _ON_DEVICES.append(made)
    return made


def in_short(error: RuntimeError) -> str:
    """Returns the first sentence of the error, without torch's path in brackets before it and its advice after it."""
    return re.sub(r"^\[\S*\] ", "", str(error)).partition("\n")[0].partition(". ")[0]


def _there(rank: int) -> str:
    return f"there/{rank}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True, slots=True)
class TorchRanks:
    """The ranks of a world, after they have joined."""

    world: World
    decisions: dist.ProcessGroup
    gradients: dist.ProcessGroup

    def first(self, label: str, work: Callable[[], Result]) -> Result | None:
        results: list[Result] = []

        def kept() -> str:
            results.append(work())
            return ""

        self.tell(label, kept)
        return results[0] if results else None

    def tell(self, label: str, work: Callable[[], str]) -> str:
        decision = decided(work) if self.world.is_first else None
        content = decision.to_json() if decision else b""
        length = torch.tensor([len(content)])
        self._wait(label, dist.broadcast(length, 0, self.decisions, async_op=True))
        text = torch.frombuffer(bytearray(content), dtype=torch.uint8) if content else bytes_of_size(length)
        self._wait(label, dist.broadcast(text, 0, self.decisions, async_op=True))
        return (decision or Outcome.from_json(text.numpy().tobytes())).result()

    def each(self, label: str, work: Callable[[], str]) -> list[str]:
        own = decided(work)
        content = own.to_json()
        lengths = torch.empty(self.world.size, dtype=torch.int64)
        length = torch.tensor([len(content)])
        self._wait(label, dist.all_gather_into_tensor(lengths, length, self.decisions, async_op=True))
        longest = int(lengths.max())
        padded = torch.frombuffer(bytearray(content.ljust(longest)), dtype=torch.uint8)
        every = torch.empty(self.world.size * longest, dtype=torch.uint8)
        self._wait(label, dist.all_gather_into_tensor(every, padded, self.decisions, async_op=True))
        found = [Outcome.from_json(part.numpy().tobytes()) for part in torch.split(every, longest)]
        found[self.world.rank] = own  # with its traceback
        return [one.result() for one in found]

    def agree(self, what: str, value: str) -> None:
        values = self.each(what, lambda: value)
        if others := [rank for rank, said in enumerate(values) if said != values[0]]:
            raise UserError(
                f"{what}: not the same on all ranks ({_named(others)}: {values[others[0]]}, rank 0: {values[0]}); give "
                "every node the same files and the same trainer image"
            )

    def share(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors if self.world.is_first else self._received():
            if self.world.is_first:
                self._send(name, tensor)
            yield name, tensor
        if self.world.is_first:
            self._broadcast(header_of("", (), torch.float32))

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        own = torch.tensor(values, dtype=torch.float64)
        every = torch.empty(self.world.size * own.numel(), dtype=torch.float64)
        with peers("the other ranks' losses"):
            dist.all_gather_into_tensor(every, own)
        return [part.tolist() for part in torch.tensor_split(every, self.world.size)]

    def gradient_sum(
        self, num_values: int, wire: torch.dtype, buffer: TakeBuffer, num_threads: int, device: torch.device
    ) -> GradientSum:
        group = self.gradients if device.type == "cpu" else device_group(device)
        return ExchangedSum(self.world, num_values, wire, buffer, num_threads, group, device)

    def _wait(self, label: str, operation: dist.Work | None) -> None:
        assert operation is not None, "only a rank outside the group gets none"
        with peers(f"the other ranks ({label})"):
            pause = SHORTEST_POLL_SECONDS
            while not operation.is_completed():
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_SECONDS)
            operation.wait()

    def _received(self) -> Iterator[tuple[str, Tensor]]:
        while True:
            name, shape, dtype = read_header(self._broadcast(torch.empty(HEADER_BYTES, dtype=torch.uint8)))
            if not name:
                return
            received = torch.empty(shape, dtype=dtype)
            self._broadcast(as_bytes(received.view(-1)))
            yield name, received

    def _send(self, name: str, tensor: Tensor) -> None:
        self._broadcast(header_of(name, tensor.shape, tensor.dtype))
        self._broadcast(as_bytes(tensor.contiguous().view(-1)))

    def _broadcast(self, tensor: Tensor) -> Tensor:
        with peers("rank 0's parameters and states"):
            dist.broadcast(tensor, src=0)
        return tensor


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a rank's work: a text or an error."""

    text: str = ""
    error: SpillwayError | None = None

    def result(self) -> str:
        if self.error is not None:
            raise self.error
        return self.text

    def to_json(self) -> bytes:
        fields: dict[str, object] = {"text": self.text}
        if self.error is not None:
            fields = {"error": type(self.error).__name__, "message": str(self.error), "details": self.error.details}
        return json.dumps(fields, default=str).encode()

    @staticmethod
    def from_json(content: bytes) -> Outcome:
        fields = json.loads(content)
        if "text" in fields:
            return Outcome(text=fields["text"])
        kind = {kind.__name__: kind for kind in kinds_of_error(SpillwayError)}[fields["error"]]
        error = kind.__new__(kind)  # not by its own __init__: InvalidJob's arguments are not sent
        SpillwayError.__init__(error, fields["message"], **fields["details"])
        return Outcome(error=error)


def decided(work: Callable[[], str]) -> Outcome:
    try:
        return Outcome(text=work())
    except SpillwayError as error:
        return Outcome(error=error)


def kinds_of_error(kind: type[SpillwayError]) -> Iterator[type[SpillwayError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from kinds_of_error(narrower)


def bytes_of_size(size: Tensor) -> Tensor:
    return torch.empty(int(size.item()), dtype=torch.uint8)


def header_of(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    text = json.dumps([name, list(shape), _TYPE_NAMES[dtype]]).encode()
    assert len(text) <= HEADER_BYTES, f"{name}: a name too long to share"
    return torch.frombuffer(bytearray(text.ljust(HEADER_BYTES)), dtype=torch.uint8)


def read_header(header: Tensor) -> tuple[str, list[int], torch.dtype]:
    name, shape, type_name = json.loads(header.numpy().tobytes())
    return name, shape, MOMENT_DTYPES[MomentType(type_name)]


_TYPE_NAMES = {dtype: kind.value for kind, dtype in MOMENT_DTYPES.items()}
"""Names of the types of everything that ranks share: parameters, masters and moments."""


class ExchangedSum:
    """The sum over the ranks, bucket by bucket, defined value by value: each rank's value is rounded to the wire type
    (to nearest even), and these are added in float32, in the order of the ranks.

        all-to-all   rank s gets segment s of every rank's bucket, in the wire type
        add          each rank its own segment
        all-gather   the float32 sums, to every rank

    Both exchanges use plain sends, because gloo's own all-to-all and all-gather copy more than they send. The buckets
    are on `device`. If that is not the CPU, the current stream waits for each exchange, and gradients in host memory
    are copied to the device and back.

    So the bits depend neither on buckets nor on how a placement cuts the gradients into accumulators. If every rank has
    one micro-batch, a bfloat16 gradient loses nothing on the way: the sum equals a single rank's, bit by bit.
    """

    def __init__(
        self,
        world: World,
        num_values: int,
        wire: torch.dtype,
        buffer: TakeBuffer,
        num_threads: int,
        group: dist.ProcessGroup | None = None,
        device: torch.device = CPU,
    ) -> None:
        self._world, self._wire, self._num_threads, self._group = world, wire, num_threads, group
        on_device, narrows = device.type != "cpu", wire != torch.float32
        segment = -(-min(DEVICE_EXCHANGE_PARAMETERS if on_device else EXCHANGE_PARAMETERS, num_values) // world.size)
        self.bucket = segment * world.size
        wire_bytes, sum_bytes = wire.itemsize * self.bucket, torch.float32.itemsize * segment
        parts = [world.size * sum_bytes, sum_bytes, wire_bytes, wire_bytes * (on_device and narrows)]
        sums, own, incoming, outgoing = torch.split(buffer(sum(parts)), parts)
        self._sums, self._own, self._incoming = sums.view(torch.float32), own.view(torch.float32), incoming.view(wire)
        self._outgoing = (outgoing if on_device and narrows else sums).view(wire)
        """The bucket being sent. The sums overwrite it, except on a device with a 16-bit wire type: there, gradients
        from host memory first pass through `_sums`, so the rounded ones need memory of their own."""

    def __call__(self, gradients: Iterable[Tensor]) -> None:
        for pieces in buckets(gradients, self.bucket):
            self._sum(pieces)

    def sent_bytes(self, num_values: int) -> int:
        return num_values * (self._wire.itemsize + torch.float32.itemsize) * (self._world.size - 1) // self._world.size

    def _sum(self, pieces: Sequence[Tensor]) -> None:
        size, sizes = self._world.size, [piece.numel() for piece in pieces]
        segment = -(-sum(sizes) // size)
        is_whole = len(pieces) == 1 and sizes[0] == segment * size and pieces[0].device == self._sums.device
        sums = pieces[0] if is_whole else self._sums[: segment * size]
        sent = sums if is_whole and self._wire == sums.dtype else self._outgoing[: segment * size]
        sizes.append(segment * size - sum(sizes))
        *parts, padding = torch.split(sent, sizes)
        places = torch.split(sums, sizes)
        for part, piece, place in zip(parts, pieces, places, strict=False) if sent is not pieces[0] else ():
            if piece.device == part.device:
                part.copy_(piece)
            else:
                kernels.copy(as_bytes(place), as_bytes(piece))
                part.copy_(place)
        padding.zero_()
        received, results = torch.split(self._incoming[: segment * size], segment), torch.split(sums, segment)
        with peers("the other ranks' gradients"):
            self._swap(torch.split(sent, segment), received)
        own = self._add(sent[segment * self._world.rank :][:segment], received, results[self._world.rank])
        with peers("the other ranks' sums of gradients"):
            self._swap([own] * size, results)
        for place, piece in zip(places, pieces, strict=False):
            if sums is not piece:
                kernels.copy(as_bytes(piece), as_bytes(place))

    def _add(self, own: Tensor, received: Sequence[Tensor], result: Tensor) -> Tensor:
        """Writes the sum of all ranks' parts to `result` and returns it; `own` lies in the memory of all results."""
        add = partial(kernels.accumulate, num_threads=self._num_threads)
        ranks = range(self._world.size)
        if self._wire == torch.float32 and self._world.rank < 2:  # `own` is in `result`, and a + b = b + a
            for rank in ranks:
                if rank != self._world.rank:
                    add(result, received[rank], False)
            return result
        total = self._own[: own.numel()]
        for rank in ranks:
            add(total, own if rank == self._world.rank else received[rank], rank == 0)
        return result.copy_(total)

    def _swap(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Sends sent[s] to rank s and receives into received[s] from it, for every other rank s."""
        others = [rank for rank in range(self._world.size) if rank != self._world.rank]
        operations = [dist.P2POp(dist.irecv, received[rank], rank, self._group) for rank in others]
        operations += [dist.P2POp(dist.isend, sent[rank], rank, self._group) for rank in others]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def buckets(gradients: Iterable[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yields every value once, in groups of at most `size` values. A gradient of half a bucket or more is cut into
    buckets of its own, which need no copy. Slices of the others follow one another, and the last bucket may hold fewer
    values."""
    pieces: list[Tensor] = []
    room = size
    for gradient in gradients:
        if 2 * gradient.numel() >= size:
            yield from ([piece] for piece in torch.split(gradient, size))
            continue
        offset = 0
        while offset < gradient.numel():
            piece = gradient[offset : offset + room]
            pieces.append(piece)
            offset, room = offset + piece.numel(), room - piece.numel()
            if not room:
                yield pieces
                pieces, room = [], size
    if pieces:
        yield pieces


def _waiting(begun: dist.Work | None, what: str) -> Callable[[], None]:
    assert begun is not None, "only a rank outside the group gets none"

    def wait() -> None:
        with peers(what):
            begun.wait()

    return wait


@dataclass(frozen=True, slots=True)
class Peers:
    """The exchanges of the ranks of a sharded model: parts of gradients, sums of squares, states.

    Every rank makes the same calls in the same order. Each raises PeerLost.
    """

    world: World
    devices: dist.ProcessGroup | None = None
    """The NCCL group through which parameters and gradients pass, if they are on CUDA devices. Everything that the host
    reads passes through gloo, which also notices first that a rank is gone."""

    @staticmethod
    def on(device: torch.device, world: World) -> Peers:
        """Returns the ranks of a model whose parameters are on `device`."""
        return Peers(world, None if device.type == "cpu" else device_group(device))

    @property
    def num_gathered(self) -> int:
        """Number of segments that a forward has gathered when it begins one: that one, and on devices the next."""
        return NUM_GATHERED_SEGMENTS if self.devices else 1

    def same(self, value: int) -> bool:
        """Whether all ranks have this value (below 2^63)."""
        every = torch.empty(self.world.size, dtype=torch.int64)
        with peers("the other ranks' gradients"):
            dist.all_gather_into_tensor(every, torch.tensor([value]))
        return bool((every == value).all())

    def any(self, own: Sequence[bool]) -> list[bool]:
        """Returns, by position, whether any rank passes True; all ranks pass equally many values."""
        found = torch.tensor(own, dtype=torch.uint8)
        with peers("the other ranks' gradients"):
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return [bool(value) for value in found.tolist()]

    def scatter(self, received: Tensor, sent: Tensor, sizes: Sequence[int]) -> Callable[[], None]:
        """Begins to send part s of `sent`, whose parts have `sizes`, to rank s; `received` gets this rank's part from
        every rank, in the order of the ranks, end to end. Returns a function that waits for it; on a device, the
        current stream waits."""
        taken = [sizes[self.world.rank]] * self.world.size
        with peers("the other ranks' gradients"):
            begun = dist.all_to_all_single(received, sent, taken, list(sizes), self.devices, async_op=True)
        return _waiting(begun, "the other ranks' gradients")

    def add(self, own: SquareSum) -> SquareSum:
        """Returns the sum over ranks: exact, so its order does not matter."""
        words = [own.total >> 32 * word & 0xFFFFFFFF for word in range(SQUARE_SUM_WORDS)] + [own.num_non_finite]
        assert own.total >> 32 * SQUARE_SUM_WORDS == 0
        every = torch.empty(self.world.size * len(words), dtype=torch.int64)
        with peers("the other ranks' norms"):
            dist.all_gather_into_tensor(every, torch.tensor(words))
        found = SquareSum()
        for of_rank in torch.split(every, len(words)):
            *total, num_non_finite = of_rank.tolist()
            found += SquareSum(sum(word << 32 * index for index, word in enumerate(total)), num_non_finite)
        return found

    def joined(self, own: Tensor, sizes: Sequence[int]) -> Tensor:
        """Returns the flat parts of all ranks, end to end, on every rank, in host memory; `sizes` are those of the
        parts."""
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=own.dtype)
        padded[: own.numel()].copy_(own)
        every = torch.empty(self.world.size * longest, dtype=own.dtype)
        with peers("the other ranks' states"):
            dist.all_gather_into_tensor(every, padded)
        parts = torch.split(every, longest)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    def complete(self, whole: Tensor, part: Tensor) -> Callable[[], None]:
        """Begins to fill `whole` with every rank's `part`, equal in size, in the order of the ranks. `part` may lie in
        `whole`. Returns a function that waits for it; on a device, the current stream waits."""
        with peers("the other ranks' parameters"):
            begun = dist.all_gather_into_tensor(whole, part, self.devices, async_op=True)
        return _waiting(begun, "the other ranks' parameters")

    def shard(self, modules: Iterable[nn.Module], root: nn.Module) -> None:
        """Applies FSDP2: each of `modules` becomes one group, whose parameters are DTensors and whole while it runs.
        The iterator `modules` may allocate each module's memory when it yields it. `root` is the module that is called;
        its own modules include them."""
        from torch.distributed.device_mesh import DeviceMesh  # noqa: PLC0415 - seconds, and only Fsdp needs them
        from torch.distributed.fsdp import fully_shard  # noqa: PLC0415

        group = self.devices or dist.group.WORLD
        assert group is not None, "only ranks of a group have something to divide"
        mesh = DeviceMesh.from_group(group, "cuda" if self.devices else "cpu")
        with peers("the other ranks to divide the model"):
            made = [fully_shard(module, mesh=mesh) for module in modules]
            fully_shard(root, mesh=mesh, ignored_params=set(root.parameters()))
        if self.devices:
            # Memory and copies of a gather are the compute stream's: they come after the update of the parameters, and
            # the allocator can use the memory again at once.
            for module, following in zip_longest(made, made[1:]):
                module._set_unshard_async_op(True)
                if following is not None:
                    module.set_modules_to_forward_prefetch([following])
