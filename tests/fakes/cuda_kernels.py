"""Results for the fake CUDA device: every operator of torch computes with its CPU kernel, later, on the stream's
thread.

`install` replaces the CUDA kernels of ATen. An operator allocates its result from torch's real CUDA allocator and gives
the work to the current stream; the result has the CPU's bits. If torch composes an operator in another way on CUDA than
on a CPU, it is composed as on a CPU. Dropout draws from a CPU generator with the CUDA generator's seed, and attention
is composed of single operators.

The process must have the fake preloaded (`harness.fake_cuda`).
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from spillway_trainer.kernels import dispatch as kernels
from spillway_trainer.kernels import master_halves, reference
from spillway_trainer.kernels.reference import NUM_WORDS
from spillway_trainer.tiers.host_slab import HostSlab

Operator = Any

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


@cache
def fake() -> Any:
    found = ctypes.CDLL("libcuda.so.1")
    found.fake_cuda_launch.argtypes = [
        ctypes.c_void_p, CALL, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_char_p,
    ]  # fmt: skip
    found.fake_cuda_born.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    found.fake_cuda_tell.restype = ctypes.c_size_t
    found.fake_cuda_hear.argtypes = [ctypes.c_size_t]
    found.fake_cuda_take_counts.restype = found.fake_cuda_take_races.restype = ctypes.c_char_p
    return found


REAL = frozenset(
    {
        *(
            "as_strided",
            "view",
            "_reshape_alias",
            "unfold",
            "view_as_real",
            "view_as_complex",
            "resize_",
            "record_stream",
        ),
        *("set_", "set_.source_Storage", "set_.source_Storage_storage_offset", "set_.source_Tensor", "is_set_to"),
        *("is_pinned", "_pin_memory", "_local_scalar_dense"),
    }
)
"""operators on memory and views, for which torch's own kernels stay; they compute nothing"""
SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount", "equal"}
"""operators before which the device must finish its work, because the result's size or value is needed at once"""
DRAWN = ["uniform_", "normal_", "bernoulli_.float", "exponential_", "random_", "random_.to", "random_.from"]
REDISPATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def take_counts() -> dict[str, int]:
    """What the fake has counted since the last call: name -> number."""
    lines = fake().fake_cuda_take_counts().decode().splitlines()
    return {name: int(number) for number, _, name in (line.partition(" ") for line in lines)}


def take_races() -> list[str]:
    """The races that the judge has found since the last call."""
    return list(fake().fake_cuda_take_races().decode().splitlines())


# --- work on a stream -------------------------------------------------------------------------------------------------

_waiting: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)
_failed: list[BaseException] = []


@CALL
def _run(number: int) -> None:
    work = _waiting.pop(number)
    try:
        with torch.no_grad():
            work()
    except BaseException as error:  # it cannot be raised from here
        _failed.append(error)


def raise_failed() -> None:
    """Raises the first error that work on a stream raised."""
    if _failed:
        raise _failed[0]


def launch(label: str, work: Callable[[], None], reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
    """Gives `work` to the current stream."""
    raise_failed()
    read, written = list(spans(reads)), list(spans(writes))
    ranges = (ctypes.c_size_t * (2 * (len(read) + len(written))))(*itertools.chain(*read, *written))
    number = next(_numbers)
    _waiting[number] = work
    fake().fake_cuda_launch(
        current_stream(), _run, number, ctypes.addressof(ranges), len(read), len(written), label.encode()
    )


def current_stream() -> int:
    found: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return found


def allocate(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device | None, label: str
) -> Tensor:
    """Allocates a tensor with torch's allocator, in order with the current stream, and tells the judge."""
    where = (
        device if device is not None and device.index is not None else torch.device("cuda", torch.cuda.current_device())
    )
    storage = make_storage(torch.UntypedStorage, span_bytes(size, stride, dtype), device=where, label=label)
    form = {"storage_offset": 0, "size": tuple(size), "stride": tuple(stride), "dtype": dtype, "device": where}
    return torch._C._construct_CUDA_Tensor_From_Storage_And_Metadata(form, storage)


_new_storage = torch.UntypedStorage.__new__


def make_storage(
    kind: type[torch.UntypedStorage], *args: Any, label: str = "a storage", **options: Any
) -> torch.UntypedStorage:
    """Replaces torch's constructor, which `copy.deepcopy` of a tensor also calls. The judge must know of new memory:
    otherwise, it would report races between accesses of the memory's earlier owner and the new one."""
    made: torch.UntypedStorage = _new_storage(kind, *args, **options)
    if made.is_cuda and made.nbytes():
        tell_of_memory(current_stream(), made.data_ptr(), made.nbytes(), label)
    return made


def tell_of_memory(stream: int, address: int, nbytes: int, label: str) -> None:
    """Tells the judge that this memory is handed out, to be used in order with `stream`."""
    fake().fake_cuda_born(stream, address, nbytes, label.encode())


_resize_storage = torch.UntypedStorage.resize_


def resize_storage(storage: torch.UntypedStorage, nbytes: int) -> Any:
    """Replaces torch's method, by which FSDP2 takes and frees the memory of whole parameters."""
    found = _resize_storage(storage, nbytes)
    if storage.is_cuda and nbytes:
        tell_of_memory(current_stream(), storage.data_ptr(), nbytes, "a resized storage")
    return found


class Clocks:
    """The clocks of host threads, passed on by the events and queues of the lanes (fake_streams.handing_over)."""

    def told(self) -> int:
        return int(fake().fake_cuda_tell())

    def hear(self, told: int | dict[object, object]) -> None:
        if threading.current_thread().name.startswith("lane-"):
            fake().fake_cuda_own_clock()
        if isinstance(told, int):
            fake().fake_cuda_hear(told)


def judge_host_memory() -> None:
    """Makes HostSlab tell the judge of memory that it hands out, as torch's allocator does here."""
    allocate_now = HostSlab.allocate_now

    def judged(slab: HostSlab, nbytes: int, label: str) -> Tensor | None:
        found = allocate_now(slab, nbytes, label)
        if found is not None and nbytes:
            tell_of_memory(current_stream(), found.data_ptr(), nbytes, label)
        return found

    HostSlab.allocate_now = judged  # type: ignore[method-assign]


def spans(tensors: Iterable[Tensor]) -> Iterable[tuple[int, int]]:
    """(address, bytes) of each tensor with elements, from its first element to its last."""
    for tensor in tensors:
        if tensor.numel():
            yield tensor.data_ptr(), span_bytes(tensor.shape, tensor.stride(), tensor.dtype)


def span_bytes(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes from the first element to the last; 0 if there are no elements."""
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (last + 1) * dtype.itemsize if all(shape) else 0


def lying(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of a device's tensor; it does not keep that memory alive."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    found = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), torch.device("cpu"), storage.nbytes())
    return torch.empty(0, dtype=tensor.dtype).set_(found, tensor.storage_offset(), tensor.shape, tensor.stride())


def is_cuda(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_cuda


# --- any operator -----------------------------------------------------------------------------------------------------


def compose_attention() -> None:
    """Has attention composed of single operators on devices as on CPUs, because a fused kernel adds in another
    order."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)


def install() -> None:
    compose_attention()
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def put(name: str, function: Callable[..., Any], key: str = "CUDA") -> None:
        library.impl(name, function, key, allow_override=True)

    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        if namespace != "aten" or name in REAL or "backward_with" in name:
            continue
        if not has_kernel(full_name, "CUDA") and not (
            has_kernel(full_name, "CPU")
            and (
                has_kernel(full_name, "CompositeExplicitAutograd") or has_kernel(full_name, "CompositeImplicitAutograd")
            )
        ):
            continue
        operator = operator_named(name)
        results = operator._schema.returns
        if any(one.alias_info is not None and not one.alias_info.is_write for one in results):
            continue
        put(name, partial(compute, operator))
    put("copy_", copy)
    put("empty.memory_format", empty)
    put("empty_strided", empty_strided)
    for name in DRAWN:
        put(name, partial(draw, operator_named(name)))
    put("_fused_sdp_choice", lambda *_, **__: 0)  # composed
    put("dropout", dropout, "AutogradCUDA")
    put("rms_norm", rms_norm, "AutogradCUDA")
    kernels.triton_kernels = lambda: TRITON
    torch.UntypedStorage.__new__ = staticmethod(make_storage)  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.resize_ = resize_storage  # type: ignore[method-assign,assignment]
    judge_host_memory()


_libraries: list[torch.library.Library] = []


def operator_named(name: str) -> Operator:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, base), overload or "default")


def has_kernel(name: str, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, key)


def compute(operator: Operator, *args: Any, **kwargs: Any) -> Any:
    schema, name = arguments_of(operator), operator._schema.name.removeprefix("aten::")
    if any(isinstance(args[place], int | float | complex) for place in schema.tensors if place < len(args)):
        operator = operator.overloadpacket  # x + 1: torch passes the number in the place of a tensor
    written = [
        args[place] if place < len(args) else kwargs.get(key) for place, key in enumerate(schema.names)
        if key in schema.written
    ]  # fmt: skip
    into = [one for one in tree_flatten(written)[0] if isinstance(one, Tensor)]
    if "out" in operator.__name__ and any(one.numel() == 0 for one in into):
        resize(operator, args, kwargs, into)
    flat, tree = tree_flatten((args, {key: cpu_device(value) for key, value in kwargs.items()}))
    flat = [cpu_device(value) for value in flat]
    lie = [lying(value) if is_cuda(value) else value.clone() if isinstance(value, Tensor) else value for value in flat]
    if "generator" in schema.names:
        raise NotImplementedError(f"{name} draws random numbers, and the fake has no way for it")
    there_args, there_kwargs = tree_unflatten(lie, tree)
    reads = [value for value in flat if is_cuda(value)]
    if name in SIZED_BY_VALUES:
        torch.cuda.current_stream().synchronize()
        return tree_map_only(Tensor, lambda found: found.to("cuda"), operator(*there_args, **there_kwargs))
    if schema.written:
        launch(name, lambda: operator(*there_args, **there_kwargs), reads, [one for one in into if one.is_cuda])
        if not schema.returned:
            return None
        found = tuple(args[place] if place < len(args) else kwargs[key] for place, key in schema.returned)
        return found if len(found) > 1 else found[0]
    shapes = rehearsed(operator, flat, tree)
    made = [shape and allocate(*shape, None, name) for shape in shapes[0]]
    outs = [one if one is None else lying(one) for one in made]

    def work() -> None:
        results = tree_flatten(operator(*there_args, **there_kwargs))[0]
        for out, result in zip(outs, results, strict=True):
            if out is not None:
                out.copy_(result)

    launch(name, work, reads, [one for one in made if one is not None])
    return tree_unflatten(made, shapes[1])


def resize(operator: Operator, args: Sequence[Any], kwargs: dict[str, Any], into: Sequence[Tensor]) -> None:
    """Resizes results that are still empty to the sizes that the operator gives them."""
    flat, tree = tree_flatten((args, kwargs))
    for out, (shape, stride, dtype) in zip(into, rehearsed(operator, flat, tree)[0], strict=True):
        out.set_(allocate(shape, stride, dtype, out.device, "resize"))


def cpu_device(value: Any) -> Any:
    return torch.device("cpu") if isinstance(value, torch.device) and value.type == "cuda" else value


@cache
def arguments_of(operator: Operator) -> Any:
    """The arguments in an operator's schema: all names, names of those that are written, (place, name) of those that
    are returned, and places of those that are a single tensor."""
    arguments = operator._schema.arguments
    written = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
    sets = {frozenset(one.alias_info.before_set): (i, one.name) for i, one in enumerate(arguments) if one.alias_info}
    returned = [sets[frozenset(one.alias_info.before_set)] for one in operator._schema.returns if one.alias_info]
    tensors = [i for i, one in enumerate(arguments) if isinstance(one.type, torch.TensorType)]
    names = [one.name for one in arguments]
    return SimpleNamespace(names=names, written=written, returned=returned, tensors=tensors)


_rehearsed: dict[Any, tuple[list[Any], Any]] = {}


def rehearsed(operator: Operator, flat: Sequence[Any], tree: Any) -> tuple[list[Any], Any]:
    """(shape, strides, dtype) of each result, found by running the CPU kernel on zeros, and the results' structure."""

    def form(value: Any) -> Any:
        if isinstance(value, Tensor):
            return (value.shape, value.stride(), value.dtype, value.is_cuda)
        return (type(value), str(value) if isinstance(value, float) else value)

    key = (operator, str(tree), tuple(map(form, flat)))
    try:
        if key in _rehearsed:
            return _rehearsed[key]
    except TypeError:
        key = str(key)
        if key in _rehearsed:
            return _rehearsed[key]
    zeros = [
        torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).zero_() if is_cuda(value) else value
        for value in flat
    ]
    args, kwargs = tree_unflatten(zeros, tree)
    with torch.no_grad():
        results, shape = tree_flatten(operator(*args, **kwargs))
    found = [(one.shape, one.stride(), one.dtype) if isinstance(one, Tensor) else None for one in results]
    _rehearsed[key] = found, shape
    return found, shape


def copy(dst: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """Uses torch's own copy for transfers and for plain copies within the device; other copies within it become
    kernels."""
    is_plain = dst.dtype == src.dtype and dst.shape == src.shape and dst.is_contiguous() and src.is_contiguous()
    if not (dst.is_cuda and src.is_cuda) or is_plain:
        torch.ops.aten.copy_.default.redispatch(REDISPATCHED, dst, src, non_blocking)
        return dst
    to, source = lying(dst), lying(src)
    launch("copy", lambda: to.copy_(source), [src], [dst])
    return dst


def empty(size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device, **_: Any) -> Tensor:
    strides = [*itertools.accumulate(reversed([max(1, one) for one in size[1:]]), lambda x, y: x * y, initial=1)]
    return allocate(size, strides[::-1] if size else (), dtype or torch.get_default_dtype(), device, "empty")


def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device, **_: Any
) -> Tensor:
    return allocate(size, stride, dtype or torch.get_default_dtype(), device, "empty_strided")


# --- random numbers ---------------------------------------------------------------------------------------------------

_states: dict[tuple[int, int], Tensor] = {}
"""(seed, offset) of the CUDA generator -> state of a CPU generator with that seed after the same number of draws"""
_drawing = threading.Lock()


@contextmanager
def drawing(theirs: torch.Generator) -> Iterator[torch.Generator]:
    """A CPU generator that replaces the device's: it has the same seed, and continues after the same number of
    draws."""
    with _drawing:
        seed, offset = theirs.initial_seed(), theirs.get_offset()
        made = torch.Generator()
        made.manual_seed(seed)
        if offset:
            made.set_state(_states[seed, offset])
        yield made
        _states[seed, offset + 4] = made.get_state()
        theirs.set_offset(offset + 4)


def draw(
    operator: Operator, into: Tensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any
) -> Tensor:
    """Fills `into` with random numbers. They are drawn at the launch, when a real generator's offset would be taken."""
    numbers = torch.empty_strided(into.shape, into.stride(), dtype=into.dtype)
    with drawing(generator or torch.cuda.default_generators[into.device.index]) as ours:
        operator(numbers, *args, generator=ours, **kwargs)
    there = lying(into)
    launch(operator._schema.name, lambda: there.copy_(numbers), [], [into])
    return into


def dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout as composed on a CPU; on a real device it is one fused kernel, which rounds differently."""
    if p == 0 or not train or not x.numel():
        return x
    return x * torch.empty_like(x).bernoulli_(1 - p).div_(1 - p)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """RMSNorm as composed on a CPU; on a real device it is one fused kernel."""
    wide = x.to(torch.float32)
    least = torch.finfo(x.dtype).eps if eps is None else eps
    scale = wide.pow(2).mean([*range(-len(shape), 0)], keepdim=True).add_(least).rsqrt()
    found = wide.mul(scale)
    return (found if weight is None else found.mul(weight)).type_as(x)


# --- the project's own kernels ----------------------------------------------------------------------------------------


def update(scalars: Any, master: Tensor, moments: Sequence[Tensor], gradient: Tensor, out: Tensor | None) -> None:
    written = [master, *moments, *([] if out is None else [out])]
    lie, theirs = [lying(one) for one in written], lying(gradient)
    states, there = lie[1 : 1 + len(moments)], None if out is None else lie[-1]
    launch("update", lambda: reference.update(scalars, lie[0], states, theirs, there), [gradient, *written], written)


def update_split(scalars: Any, rest: Tensor, moments: Sequence[Tensor], gradient: Tensor, weights: Tensor) -> None:
    written = [rest, weights, *moments]
    lie, theirs = [lying(one) for one in written], lying(gradient)

    def work() -> None:
        master_halves.update(reference.update, scalars, lie[0], lie[2:], theirs, lie[1])

    launch("update_split", work, [gradient, *written], written)


def accumulate(accumulator: Tensor, gradient: Tensor, first: bool) -> None:
    into, theirs = lying(accumulator), lying(gradient)
    reads = [gradient] if first else [gradient, accumulator]
    launch("accumulate", lambda: reference.accumulate(into, theirs, first), reads, [accumulator])


def square_sum(values: Tensor) -> Tensor:
    words = torch.empty(1, NUM_WORDS, dtype=torch.int64, device=values.device)
    into, theirs = lying(words)[0], lying(values)

    def work() -> None:
        found = reference.square_sum(theirs)
        for index in range(NUM_WORDS - 1):
            into[index] = found.total >> 32 * index & 0xFFFFFFFF
        into[-1] = found.num_non_finite

    launch("square_sum", work, [values], [words])
    return words


TRITON = SimpleNamespace(update=update, update_split=update_split, accumulate=accumulate, square_sum=square_sum)
