"""ctypes bindings of csrc/include/spillway.h; tests/contract/test_native_header.py compares the two.

Every call releases the GIL until it returns. Tensors must be contiguous and on the CPU; a wrong dtype, size or layout
raises ValueError before anything is changed. `SPILLWAY_FORCE_ISA=scalar|avx2|avx512|neon|reference` fixes the
instruction set of a process; with `reference` the library is not used.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import json
import math
import os
from collections.abc import Sequence
from ctypes import CDLL, POINTER, Array, Structure, c_char_p, c_float, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from importlib import resources

import torch
from torch import Tensor

from spillway.errors import UserError
from spillway.update_rules import MASTER, UNSIGNED_MOMENTS, UpdateRule

from .io_engine import Direction, IoRequest, SystemCall, TransferFailure
from .reference import MAPS, Map, SquareSum, UpdateScalars, float32, kept_elements
from .reference_cipher import BLOCK_BYTES, KEY_BYTES

ABI_VERSION = 9
FORCE_ISA = "SPILLWAY_FORCE_ISA"
ISA_CODES = {"scalar": 1, "avx2": 2, "avx512": 3, "neon": 4}
"""The codes SPILLWAY_ISA_*, narrowest first."""
RULE_CODES = {rule: code for code, rule in enumerate(UpdateRule, start=1)}
"""The codes SPILLWAY_ADAMW and others, in the header's order."""
TYPE_CODES = {torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}
"""The codes SPILLWAY_FLOAT32 and others; 0 is SPILLWAY_NONE."""
MOMENT_TYPES = {torch.float32: 1, torch.bfloat16: 2, torch.uint8: 4}
"""The codes of types of moments; uint8 is SPILLWAY_INT8, whose blocks are bytes."""
NUM_BUCKETS = 3074
"""SPILLWAY_NUM_BUCKETS"""
LEAST_BUCKET = 0x33800000
"""The bits of 2^-24: below it no map distinguishes values, except 0 from those above 0."""
M_MMAP_THRESHOLD = -3
"""The constant of malloc.h."""
MMAP_THRESHOLD_BYTES = 2 * 2**20
"""The size of a huge page. From this size on torch requests huge pages (THP_MEM_ALLOC_ENABLE), so mapping a block again
is cheap."""
NUM_LIMBS = 10
"""SPILLWAY_NUM_LIMBS"""
NO_MEMORY = 3
"""SPILLWAY_NO_MEMORY"""
LIBRARY_NAME = "libspillway_native.so"
TENSOR_POOL = "SPILLWAY_TENSOR_POOL"
"""`on` (the default), or `off`, which leaves torch's tensors in the C library's heap."""
TORCH_ALLOCATOR = b"libc10.so"
"""The library of torch that allocates CPU tensors."""
POOLED_BYTES = 256 * 2**10
"""Tensors of at least this size come from the pool: rounding up to whole pages costs them less than 2 %."""
POOL_SLACK_BYTES = 8 * 2**20
"""Bytes that may be resident beyond what tensors need, to allow for gaps between tensors."""


class UpdateScalarsStruct(Structure):
    """spillway_update_scalars"""

    _fields_ = [
        ("gradient_scale", c_float),
        ("decay", c_float),
        ("weight_decay", c_float),
        ("momentum", c_float),
        ("beta1", c_float),
        ("one_minus_beta1", c_float),
        ("beta2", c_float),
        ("one_minus_beta2", c_float),
        ("sqrt_bias_correction2", c_float),
        ("eps", c_float),
        ("step_size", c_float),
    ]


class StatesStruct(Structure):
    """spillway_states"""

    _fields_ = [("master", c_void_p), ("moment1", c_void_p), ("moment2", c_void_p)]


class MapStruct(Structure):
    """spillway_map"""

    _fields_ = [("values", c_void_p), ("nearest", c_void_p)]


class SquareSumStruct(Structure):
    """spillway_square_sum"""

    _fields_ = [("limbs", c_uint64 * NUM_LIMBS), ("num_non_finite", c_uint64)]


class CopyStruct(Structure):
    """spillway_copy"""

    _fields_ = [("dst", c_void_p), ("src", c_void_p), ("nbytes", c_uint64)]


class IoRequestStruct(Structure):
    """spillway_io_request"""

    _fields_ = [
        ("buffer", c_void_p),
        ("nbytes", c_uint64),
        ("offset", c_uint64),
        ("crc32c", c_uint32),
        ("crc32c_found", c_uint32),
        ("error", c_int32),
        ("os_error", c_int32),
        ("error_offset", c_uint64),
    ]


IO_CALL = ctypes.CFUNCTYPE(c_int64, c_void_p, c_int32, c_int32, c_void_p, c_uint64, c_uint64)
"""spillway_io_call."""

SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "spillway_abi_version": (c_int32, ()),
    "spillway_strerror": (c_char_p, (c_int32,)),
    "spillway_isa_available": (c_int32, (c_int32,)),
    "spillway_update": (
        c_int32,
        (
            *(c_int32, POINTER(UpdateScalarsStruct), POINTER(StatesStruct), POINTER(StatesStruct), c_int32),
            *(POINTER(MapStruct), c_void_p, c_int32, c_void_p, c_int32, c_int64, c_int32, c_int32),
        ),
    ),
    "spillway_accumulate": (c_int32, (c_void_p, c_void_p, c_int32, c_int32, c_int64, c_int32, c_int32)),
    "spillway_sum_squares": (c_int32, (POINTER(SquareSumStruct), c_void_p, c_int32, c_int64, c_int32, c_int32)),
    "spillway_copy_batch": (c_int32, (POINTER(CopyStruct), c_int64, c_int32)),
    "spillway_crc32c": (c_uint32, (c_uint32, c_void_p, c_uint64)),
    "spillway_crc32c_combine": (c_uint32, (c_uint32, c_uint32, c_uint64)),
    "spillway_io_open": (c_int32, (c_int32, c_int32, IO_CALL, c_void_p, POINTER(c_void_p))),
    "spillway_io_transfer": (c_int32, (c_void_p, c_int32, POINTER(IoRequestStruct), c_int64)),
    "spillway_io_close": (None, (c_void_p,)),
    "spillway_cipher_open": (c_int32, (c_void_p, POINTER(c_void_p))),
    "spillway_cipher_apply": (
        c_int32,
        (c_void_p, c_int32, c_void_p, c_void_p, *(c_uint64,) * 4, c_int32, c_int32),
    ),
    "spillway_cipher_close": (None, (c_void_p,)),
    "spillway_pool_attach": (c_int32, (c_char_p, c_uint64, c_uint64, c_uint64)),
    "spillway_pool_mark": (None, ()),
    "spillway_pool_held_bytes": (c_uint64, ()),
    "spillway_pool_resident_bytes": (c_uint64, ()),
}
"""Result and argument types of every function of the header; arrays and opaque handles are c_void_p."""


def return_freed_memory() -> None:
    """Makes this process occupy no more memory than the ledger counts: large CPU tensors come from one pool, and the C
    library returns every other freed block of MMAP_THRESHOLD_BYTES or more to the system at once.

    Otherwise glibc would raise that threshold up to 32 MiB and keep freed tensors in a heap full of gaps, which aligned
    allocations cannot reuse: a process that held at most 250 MiB then occupied 620. Without glibc, only the pool is set
    up.
    """
    mallopt = getattr(CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
    attach_tensor_pool()


@functools.cache
def attach_tensor_pool() -> bool:
    """Makes torch take large CPU tensors from one pool, from now on, in this process: freed memory is reused without a
    page fault, and no more is resident than was held at the peak (docs/adr/0022-tensor-pool.md).

    Returns False if there is no pool, and nothing changes: without the native library or torch's own allocator, if the
    system rejects the addresses, and with SPILLWAY_TENSOR_POOL=off.
    """
    wanted = os.environ.get(TENSOR_POOL, "")
    if wanted not in ("", "on", "off"):
        raise UserError(f"{TENSOR_POOL}={wanted}: set this environment variable to on or off, or unset it")
    library = load_library()
    if library is None or wanted == "off":
        return False
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    error: int = library.spillway_pool_attach(TORCH_ALLOCATOR, memory_bytes, POOLED_BYTES, POOL_SLACK_BYTES)
    return error == 0


def compute_alone() -> None:
    """Makes this thread run torch's operations on itself alone from now on: for threads that work beside the compute
    thread.

    libgomp gives each thread that ran a parallel region a team of its own. With more team threads than cores, these no
    longer spin at the end of a region, and every small operation of the compute thread would wait for a wake-up (a step
    of the demo with its states in host memory took 1.4 times as long). Without libgomp, a no-op.
    """
    torch.get_num_threads()  # otherwise torch would reset the number at its first use in this thread
    set_num_threads = getattr(CDLL(None), "omp_set_num_threads", None)
    if set_num_threads is not None:
        set_num_threads(1)


def pooled_bytes() -> float:
    """Returns the size from which on torch's tensors come from the pool, in whole pages; infinite if there is no
    pool."""
    return POOLED_BYTES if attach_tensor_pool() else math.inf


def mark_tensor_pool() -> None:
    """Tells the pool that a step begins: memory that the step before did not need returns to the system. Without a
    pool, a no-op."""
    library = load_library()
    if library is not None:
        library.spillway_pool_mark()


def empty_tensor_pool() -> None:
    """Returns the pool's memory that no tensor holds to the system, except the slack. For when no more steps follow."""
    # Twice, because the pool keeps what this step and the one before it held at their peaks.
    mark_tensor_pool()
    mark_tensor_pool()


def tensor_pool_bytes() -> tuple[int, int]:
    """Returns the bytes that tensors hold of the pool, and the bytes that the system has given it; zeros without a
    pool."""
    library = load_library()
    return (0, 0) if library is None else (library.spillway_pool_held_bytes(), library.spillway_pool_resident_bytes())


@functools.cache
def load_library() -> CDLL | None:
    """Returns the library next to this package, or None if it was not built (no C++ compiler)."""
    path = resources.files("spillway_trainer").joinpath(LIBRARY_NAME)
    if not path.is_file():
        return None
    library = CDLL(str(path))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    found = library.spillway_abi_version()
    if found != ABI_VERSION:
        raise UserError(
            f"{path}: the native library has ABI version {found}, but this package needs {ABI_VERSION}; reinstall "
            "spillway"
        )
    return library


def instruction_sets() -> tuple[str, ...]:
    """Returns the instruction sets that both the library and the processor have, narrowest first; empty without the
    library."""
    library = load_library()
    return tuple(name for name, code in ISA_CODES.items() if library and library.spillway_isa_available(code))


@functools.cache
def isa() -> str:
    """Returns the instruction set of this process: "avx512", "avx2", "neon", "scalar", or "reference" if the library is
    not used."""
    found = ("reference", *instruction_sets())
    forced = os.environ.get(FORCE_ISA, "")
    if forced and forced not in found:
        raise UserError(
            f"{FORCE_ISA}={forced}: this instruction set is not available on this machine; set the environment "
            f"variable to one of {', '.join(found)}, or unset it"
        )
    return forced or found[-1]


def available() -> bool:
    """True if the library exists and is not switched off by SPILLWAY_FORCE_ISA=reference."""
    return isa() != "reference"


def update(
    scalars: UpdateScalars,
    master: Tensor,
    moments: Sequence[Tensor],
    gradient: Tensor,
    out: Tensor | None,
    *,
    after: Sequence[Tensor] | None = None,
    num_threads: int = 1,
    instruction_set: str = "",
) -> None:
    """reference.update, on `num_threads` threads; an `instruction_set` other than `isa()` is for tests."""
    n, before, moment_type = master.numel(), (master, *moments), moments[0].dtype
    num_kept = kept_elements(n, moment_type)
    _check(scalars.rule.moments[0], moments[0], num_kept, *MOMENT_TYPES)
    for states in (before,) if after is None else (before, after):
        for name, tensor in zip(scalars.rule.state_kinds, states, strict=True):
            _check(name, tensor, *((n, torch.float32) if name == MASTER else (num_kept, moment_type)))
    _check("gradient", gradient, n, *TYPE_CODES)
    if out is not None:
        _check("out", out, n, *TYPE_CODES)
    error = _library().spillway_update(
        RULE_CODES[scalars.rule],
        _scalars_struct(scalars),
        _states_struct(before),
        _states_struct(before if after is None else after),
        MOMENT_TYPES[moment_type],
        _maps_struct(scalars.rule) if moment_type == torch.uint8 else None,
        gradient.data_ptr(),
        TYPE_CODES[gradient.dtype],
        None if out is None else out.data_ptr(),
        0 if out is None else TYPE_CODES[out.dtype],
        n,
        ISA_CODES[instruction_set or isa()],
        num_threads,
    )
    _raise_for("spillway_update", error)


def accumulate(
    accumulator: Tensor, gradient: Tensor, first: bool, *, num_threads: int = 1, instruction_set: str = ""
) -> None:
    """reference.accumulate, on `num_threads` threads."""
    _check("accumulator", accumulator, accumulator.numel(), torch.float32)
    _check("gradient", gradient, accumulator.numel(), *TYPE_CODES)
    error = _library().spillway_accumulate(
        accumulator.data_ptr(),
        gradient.data_ptr(),
        TYPE_CODES[gradient.dtype],
        first,
        accumulator.numel(),
        ISA_CODES[instruction_set or isa()],
        num_threads,
    )
    _raise_for("spillway_accumulate", error)


def square_sum(values: Tensor, *, num_threads: int = 1, instruction_set: str = "") -> SquareSum:
    """reference.square_sum, on `num_threads` threads."""
    _check("values", values, values.numel(), *TYPE_CODES)
    found = SquareSumStruct()
    error = _library().spillway_sum_squares(
        found,
        values.data_ptr(),
        TYPE_CODES[values.dtype],
        values.numel(),
        ISA_CODES[instruction_set or isa()],
        num_threads,
    )
    _raise_for("spillway_sum_squares", error)
    total = sum(limb << (64 * i) for i, limb in enumerate(found.limbs))
    return SquareSum(total, found.num_non_finite)


def copy_batch(pairs: Sequence[tuple[Tensor, Tensor]], *, num_threads: int = 1) -> None:
    """memmove of src to dst for every (dst, src), uint8 tensors of one size, without the GIL.

    The order is not specified: no destination may overlap another pair. All pairs are one call, because releasing the
    GIL and taking it again costs about 50 us on a busy machine.
    """
    copies = (CopyStruct * len(pairs))()
    for entry, (dst, src) in zip(copies, pairs, strict=True):
        _check("dst", dst, src.numel(), torch.uint8)
        _check("src", src, src.numel(), torch.uint8)
        entry.dst, entry.src, entry.nbytes = dst.data_ptr(), src.data_ptr(), src.numel()
    _raise_for("spillway_copy_batch", _library().spillway_copy_batch(copies, len(pairs), num_threads))


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the bytes of a tensor without gaps, from its first value on; valid as long as it lives."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def crc32c(tensor: Tensor) -> int:
    """Returns the CRC-32C of a uint8 tensor."""
    _check("tensor", tensor, tensor.numel(), torch.uint8)
    value: int = _library().spillway_crc32c(0, tensor.data_ptr(), tensor.numel())
    return value


class NativeEngine:
    """The library's io_engine.IoEngine; releases the GIL while bytes move. A `call` that is an IO_CALL is called
    without the interpreter."""

    name = "threads"

    def __init__(self, file: int, queue_depth: int, call: SystemCall | None = None) -> None:
        if not isinstance(call, IO_CALL):
            call = IO_CALL(0) if call is None else IO_CALL(functools.partial(_system_call, call))
        self._call = call
        self._handle = c_void_p()
        _raise_for("spillway_io_open", _library().spillway_io_open(file, queue_depth, self._call, None, self._handle))

    def transfer(self, direction: Direction, transfers: Sequence[IoRequest]) -> None:
        requests = (IoRequestStruct * len(transfers))()
        for request, transfer in zip(requests, transfers, strict=True):
            request.buffer, request.nbytes = transfer.tensor.data_ptr(), transfer.tensor.numel()
            request.offset, request.crc32c = transfer.offset, transfer.checksum
        error = _library().spillway_io_transfer(self._handle, direction, requests, len(transfers))
        if error not in set(TransferFailure):
            _raise_for("spillway_io_transfer", error)
        for request, transfer in zip(requests, transfers, strict=True):
            transfer.checksum, transfer.found = request.crc32c, request.crc32c_found
            transfer.failure, transfer.os_error = TransferFailure(request.error), request.os_error
            transfer.error_offset = request.error_offset

    def close(self) -> None:
        handle, self._handle = self._handle, c_void_p()
        _library().spillway_io_close(handle)


class Cipher:
    """The library's form of reference_cipher.ReferenceCipher; works without the GIL. Without `key`, it has a random key
    that never leaves the library."""

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and len(key) != KEY_BYTES:
            raise ValueError(f"a key of {len(key)} bytes was given, but AES-256-XTS takes {KEY_BYTES} bytes")
        self._handle = c_void_p()
        _raise_for("spillway_cipher_open", _library().spillway_cipher_open(key, self._handle))

    def apply(
        self,
        direction: Direction,
        dst: Tensor,
        src: Tensor,
        *,
        first_unit: int,
        sequence: int,
        unit_bytes: int,
        num_threads: int = 1,
        instruction_set: str = "",
    ) -> None:
        """ReferenceCipher.apply; the `instruction_set` scalar is the portable form, any other the fastest."""
        _check("dst", dst, src.numel(), torch.uint8)
        _check("src", src, src.numel(), torch.uint8)
        if src.numel() % unit_bytes or unit_bytes % BLOCK_BYTES:
            raise ValueError(
                f"src has {src.numel()} bytes and unit_bytes is {unit_bytes}; pass whole units, and as unit_bytes a "
                "multiple of 16, the bytes of an AES block"
            )
        is_scalar = (instruction_set or isa()) == "scalar"
        error = _library().spillway_cipher_apply(
            self._handle,
            direction,
            dst.data_ptr(),
            src.data_ptr(),
            src.numel(),
            unit_bytes,
            first_unit,
            sequence,
            ISA_CODES["scalar"] if is_scalar else 0,
            num_threads,
        )
        _raise_for("spillway_cipher_apply", error)

    def close(self) -> None:
        """Wipes the key. No call may be in progress. Idempotent."""
        handle, self._handle = self._handle, c_void_p()
        _library().spillway_cipher_close(handle)


def _system_call(
    call: SystemCall, context: int | None, direction: int, file: int, address: int, nbytes: int, offset: int
) -> int:
    """Calls a fault test's `call` from a native thread; an exception there counts as EIO, never as success."""
    try:
        memory = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
        return call(Direction(direction), file, memory, offset)
    except Exception:
        return -errno.EIO


def strerror(error: int) -> str:
    """Returns the sentence for a spillway_error."""
    sentence: bytes = _library().spillway_strerror(error)
    return sentence.decode()


def _library() -> CDLL:
    library = load_library()
    assert library is not None, "native functions are called only where native.available()"
    return library


def _raise_for(function: str, error: int) -> None:
    """Raises the error for a code that a checked call can still return: no memory, or a defect of this module."""
    if error:
        raise (MemoryError if error == NO_MEMORY else RuntimeError)(f"{function}: {strerror(error)}")


def _check(name: str, tensor: Tensor, num_elements: int, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes or tensor.numel() != num_elements or not tensor.is_contiguous() or not tensor.is_cpu:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"{name} is {tensor.dtype} of shape {tuple(tensor.shape)} and stride {tensor.stride()} on {tensor.device}; "
            f"pass a contiguous {wanted} tensor of {num_elements} elements on the CPU"
        )


def _states_struct(states: Sequence[Tensor]) -> StatesStruct:
    master, *moments = (tensor.data_ptr() for tensor in states)
    return StatesStruct(master, moments[0], moments[-1])


@functools.cache
def _maps_struct(rule: UpdateRule) -> Array[MapStruct]:
    """Returns the maps of a rule's moments. If two lanes make their first update at the same time, each may create its
    own maps, of which the cache keeps one. So each object keeps the tables that it points to alive."""
    tables = [_tables(MAPS[kind in UNSIGNED_MOMENTS]) for kind in rule.moments]
    found = (MapStruct * len(tables))(*(MapStruct(*(table.data_ptr() for table in pair)) for pair in tables))
    found.tables = tables  # type: ignore[attr-defined]
    return found


@functools.cache
def _tables(found: Map) -> tuple[Tensor, Tensor]:
    """Returns the two tables of spillway_map: the number of each code, and the table that finds the code of a
    number."""
    every = torch.arange(256, dtype=torch.uint8)
    return found.values[found.positions(every)], nearest_codes(found)


def nearest_codes(found: Map) -> Tensor:
    """Returns `nearest` of spillway_map (int32). The upper half of an entry is the code of the least number in its
    bucket. The lower half is 2^16 minus the limit of `low` from which on the code is the next one."""
    least = LEAST_BUCKET + ((torch.arange(NUM_BUCKETS, dtype=torch.int32) - 1) << 16)
    least[0] = 0
    largest = least + 0xFFFF
    largest[0] = LEAST_BUCKET - 1
    above, below = least.view(torch.float32), -largest.view(torch.float32)
    nearest = torch.cat([found.codes(above), found.codes(below)]).int() << 16
    for border in found.borders.tolist():
        bits = int(torch.tensor(abs(border)).view(torch.int32))
        bucket = max(0, (bits - LEAST_BUCKET >> 16) + 1)
        assert bucket > 0 or border == 0.0, f"{border}: between 0 and the first bucket"
        low = bits & 0xFFFF
        at, limit = (bucket, low + 1) if border >= 0.0 else (bucket + NUM_BUCKETS, 0x10000 - low)
        assert not int(nearest[at]) & 0xFFFF, f"{border}: two borders in a bucket"
        nearest[at] += 0x10000 - limit
    return nearest


def _scalars_struct(scalars: UpdateScalars) -> UpdateScalarsStruct:
    return UpdateScalarsStruct(
        gradient_scale=float32(scalars.gradient_scale),
        decay=scalars.decay,
        weight_decay=float32(scalars.weight_decay),
        momentum=float32(scalars.momentum),
        beta1=float32(scalars.beta1),
        one_minus_beta1=scalars.one_minus_beta1,
        beta2=float32(scalars.beta2),
        one_minus_beta2=scalars.one_minus_beta2,
        sqrt_bias_correction2=scalars.sqrt_bias_correction2,
        eps=float32(scalars.eps),
        step_size=scalars.step_size,
    )


def describe() -> dict[str, object]:
    """Returns the instruction set in use and those available."""
    return {
        "isa": isa(),
        "instructionSets": instruction_sets(),
    }


if __name__ == "__main__":  # `spillway doctor` runs this in a process of its own
    print(json.dumps(describe()))
