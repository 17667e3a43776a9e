"""Writes tensors into a checkpoint and reads them back: safetensors files, no pickle. The extra memory is that of one
file, or of a copy of all tensors, which is then written while training continues.

The tensors are canonical (independent of plan, placement and world size, by design). For every parameter X that is not
a tied alias there is one tensor of each kind of the update rule (`master.X`, `exp_avg.X` ...), in the parameter's
shape: masters in float32, moments in the type in which the run keeps them, but quantized ones flat, as the bytes of
reference.quantized. The running statistics of batch norms are stored as well (`buffer.X`: averages in float32, counts
in int64).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from errno import EIO
from itertools import groupby
from math import prod
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from spillway.errors import UserError
from spillway.units import MIB
from spillway.update_rules import MASTER, MomentType, UpdateRule

from ..optimizer.plain import MOMENT_DTYPES, Hyperparameters
from ..ranks import Ranks, Result
from .directory import Epoch, Part, Pending, not_written
from .durable_files import ANOTHER_DIRECTORY, DurableFiles, describe_file
from .manifest import StoredCheckpoint, TensorEntry, TrainingState

NONE: Mapping[str, Sequence[int]] = {}
FILE_BYTES = 64 * MIB
"""Tensor bytes per file, and the extra host memory of a checkpoint; a larger tensor gets its own file."""

_SAFETENSORS_DTYPE = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8",
                      torch.int64: "I64"}  # fmt: skip


def copied(
    tensors: Iterable[tuple[str, Tensor]], memory: Tensor
) -> tuple[list[tuple[str, Tensor]], list[tuple[str, Tensor]]]:
    """Copies tensors into `memory` until one does not fit. Returns the copies, and in a second list that first tensor,
    if any."""
    copies, used = list[tuple[str, Tensor]](), 0
    for name, tensor in tensors:
        if used + tensor.nbytes > memory.nbytes:
            return copies, [(name, tensor)]
        copies.append((name, _copied_to(memory, used, tensor)))
        used += _aligned(tensor.nbytes)
    return copies, []


def save(
    epoch: Epoch, state: TrainingState, tensors: Iterable[tuple[str, Tensor]], *, stay: bool = False
) -> StoredCheckpoint:
    """Commits one checkpoint. Raises CheckpointNotWritten (training can continue) or Fenced (it must end)."""
    with epoch.pending(state.step) as pending:
        write_tensors(pending, tensors, stay=stay)
        return pending.commit(state)


def save_in_pieces(
    ranks: Ranks,
    epoch: Epoch | None,
    state: TrainingState,
    pieces: Iterable[tuple[str, Tensor]],
    shapes: Mapping[str, Sequence[int]],
    then: Callable[[StoredCheckpoint], Result],
) -> Result | None:
    """Commits one checkpoint, into whose directory every rank writes its own `pieces` of the tensors with these
    `shapes`, and reads them back. Every rank calls it; only rank 0 has an epoch, and calls `then` with the checkpoint,
    whose result it gets. If one of them raises as `save`, all do."""
    begun: list[Pending] = []
    with ExitStack() as opened:

        def begin() -> str:
            assert epoch is not None
            begun.append(opened.enter_context(epoch.pending(state.step)))
            return str(begun[0].path)

        path = Path(ranks.tell("checkpoint", begin))

        def write() -> str:
            part = Part(path, begun[0].files if begun else DurableFiles(), f"rank-{ranks.world.rank}")
            with not_written(path.with_suffix("")):
                write_tensors(part, pieces)
                if wrong := [entry.name for entry in part.written if describe_file(path / entry.name) != entry]:
                    raise OSError(EIO, "what was read back differs from what was written", str(path / wrong[0]))
            return part.to_json()

        parts = ranks.each("checkpoint", write)

        def end() -> Result:
            assert epoch is not None
            begun[0].join(parts, shapes)
            stored = begun[0].commit(state)
            epoch.verified.add(stored.manifest.name)
            return then(stored)

        return ranks.first("checkpoint", end)


def write_tensors(
    part: Part, tensors: Iterable[tuple[str, Tensor]], file_bytes: int = FILE_BYTES, *, stay: bool = False
) -> None:
    """Writes tensors into numbered files. A tensor may be reused once the next one is requested, unless they `stay`."""
    group = _Group(part, file_bytes, stay)
    for name, tensor in tensors:
        assert tensor.dtype in _SAFETENSORS_DTYPE, f"{name} is {tensor.dtype}"
        assert name not in part.tensors, f"{name} comes twice"
        group.add(name, tensor)
    group.write()


class _Group:
    """Collects tensors until a file is full; copies them into one buffer unless they stay valid."""

    def __init__(self, part: Part, file_bytes: int, stay: bool) -> None:
        self._part, self._file_bytes, self._stay = part, file_bytes, stay
        # Pages are touched, and so become resident, only as far as the buffer fills.
        self._buffer = torch.empty(0 if stay else file_bytes, dtype=torch.uint8)
        self._used = 0
        self._held: dict[str, Tensor] = {}
        """Tensors of the next file."""
        self._num_files = 0

    def add(self, name: str, tensor: Tensor) -> None:
        if self._used + tensor.nbytes > self._file_bytes:
            self.write()
        if tensor.nbytes > self._file_bytes:
            self._write_file({name: tensor})
            return
        self._held[name] = tensor if self._stay else _copied_to(self._buffer, self._used, tensor)
        self._used += _aligned(tensor.nbytes)

    def write(self) -> None:
        if self._held:
            self._write_file(self._held)
            self._held, self._used = {}, 0

    def _write_file(self, tensors: Mapping[str, Tensor]) -> None:
        path = self._part.path / f"{self._part.prefix}-{self._num_files:05d}.safetensors"
        # The widest come first, because the data has no gaps and readers need every tensor aligned.
        in_order = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
        header = safetensors_header({name: (tensor.dtype, tensor.shape) for name, tensor in in_order.items()})
        content = [memoryview(header), *(bytes_of(tensor) for tensor in in_order.values() if tensor.nbytes)]
        self._part.written.append(self._part.files.write(path, content))
        for name, tensor in in_order.items():
            self._part.tensors[name] = TensorEntry((path.name,), tuple(tensor.shape))
        self._num_files += 1


def _copied_to(memory: Tensor, offset: int, tensor: Tensor) -> Tensor:
    place = memory[offset : offset + tensor.nbytes]
    if tensor.nbytes:  # with one thread: torch's threads wait for each other after each tensor, long on a busy machine
        place.numpy()[:] = bytes_of(tensor)
    return place.view(tensor.dtype).view(tensor.shape)


def _aligned(nbytes: int) -> int:
    """Returns `nbytes` rounded up to an offset at which a tensor of any type may begin."""
    return -(-nbytes // 8) * 8


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """Returns the first bytes of a safetensors file: length of the JSON as little-endian uint64, JSON padded to 8
    bytes.

    The data follows in the order of the mapping, without gaps (https://github.com/huggingface/safetensors, Format).
    """
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + dtype.itemsize * torch.Size(shape).numel()
        fields[name] = {"dtype": _SAFETENSORS_DTYPE[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load(
    checkpoint: StoredCheckpoint,
    shapes: Mapping[str, Sequence[int]],
    statistics: Mapping[str, Sequence[int]] = NONE,
    ranges: Mapping[str, tuple[int, int]] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a verified checkpoint, file by file, or only these `ranges` of them (read_ranges).
    `shapes` are those of the model's parameters without tied aliases, `statistics` those of its running statistics, by
    their names in the checkpoint.

    Raises UserError before the first tensor if names or shapes are not the model's.
    """
    state = checkpoint.manifest.state
    settings = Hyperparameters(rule=UpdateRule(state.rule), moments=MomentType(state.moments))
    _check_shapes(checkpoint, settings, settings.rule.state_kinds, shapes, statistics)
    if ranges is not None:
        return read_ranges(checkpoint, ranges)
    return _loaded(checkpoint, checkpoint.manifest.tensors, statistics)


def _loaded(
    checkpoint: StoredCheckpoint, wanted: Iterable[str], statistics: Mapping[str, Sequence[int]]
) -> Iterator[tuple[str, Tensor]]:
    """Yields the `wanted` tensors, in their order."""
    moments = MOMENT_DTYPES[MomentType(checkpoint.manifest.state.moments)]
    for name, tensor in read(checkpoint, wanted):
        of_kind = torch.float32 if name.startswith(f"{MASTER}.") else moments
        assert name in statistics or tensor.dtype == of_kind, name
        yield name, tensor


def read(checkpoint: StoredCheckpoint, wanted: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a verified checkpoint that are `wanted`, whole, in the order of the names."""
    tensors = checkpoint.manifest.tensors
    for name, pieces in _opened(checkpoint, ((name, tensors[name].files) for name in wanted)):
        found = [piece.get_tensor(name) for piece in pieces]
        yield name, found[0] if len(found) == 1 else torch.cat(found).view(tensors[name].shape)


def read_ranges(checkpoint: StoredCheckpoint, wanted: Mapping[str, tuple[int, int]]) -> Iterator[tuple[str, Tensor]]:
    """Yields only the values from `start` to before `end` of each wanted tensor, flat, and reads few others. A range
    has at least one value."""
    tensors = checkpoint.manifest.tensors
    places = {name: [*tensors[name].ranges(start, end)] for name, (start, end) in wanted.items()}
    files = ((name, tuple(file for file, *_ in found)) for name, found in places.items())
    for name, pieces in _opened(checkpoint, files):
        found = []
        for piece, (_, first, last) in zip((piece.get_slice(name) for piece in pieces), places[name], strict=True):
            shape = piece.get_shape()
            width = prod(shape[1:])
            row = first // width
            rows = piece[row : -(-last // width)] if shape else piece[...]
            found.append(rows.reshape(-1)[first - row * width : last - row * width])
        yield name, found[0] if len(found) == 1 else torch.cat(found)


def _opened(
    checkpoint: StoredCheckpoint, wanted: Iterable[tuple[str, tuple[str, ...]]]
) -> Iterator[tuple[str, list[Any]]]:
    """Yields each name with its files, opened. Neighbours that share files share the opening."""
    for files, names in groupby(wanted, key=itemgetter(1)):
        with ExitStack() as opened:
            pieces = [opened.enter_context(safe_open(checkpoint.path / file, framework="pt")) for file in files]
            yield from ((name, pieces) for name, _ in names)


def load_parameters(
    checkpoint: StoredCheckpoint, shapes: Mapping[str, Sequence[int]], statistics: Mapping[str, Sequence[int]] = NONE
) -> Iterator[tuple[str, Tensor]]:
    """As `load`, without the optimizer's moments: for a run that starts from another run's parameters."""
    try:
        _check_shapes(checkpoint, Hyperparameters(), (MASTER,), shapes, statistics)
    except UserError as error:
        raise UserError(
            f"spec.checkpoint.from: {error}; to train adapters on that model, or to change the model, export the "
            "checkpoint (spillway ckpt export) and name the exported directory as spec.model.source"
        ) from error
    tensors = checkpoint.manifest.tensors
    read = [name for name in tensors if name in statistics or name.startswith(f"{MASTER}.")]
    return _loaded(checkpoint, read, statistics)


def check_same_run(
    state: TrainingState,
    *,
    tokenizer_xxh3: str,
    data_xxh3: str,
    seed: int,
    rule: str,
    moments: str,
    source_xxh3: str = "",
) -> None:
    """Raises UserError if the tokenizer, corpus, sequence order, seed, optimizer or initial model of a checkpoint
    differs from this run's."""
    differences = [
        f"{what} {now!r} now, {then!r} in the checkpoint"
        for what, now, then in (
            ("tokenizer", tokenizer_xxh3, state.tokenizer_xxh3),
            ("tokens and their order", data_xxh3, state.data_xxh3),
            ("seed", seed, state.seed),
            ("optimizer", rule, state.rule),
            ("moments", moments, state.moments),
            ("weights of spec.model.source", source_xxh3, state.model.get("source_xxh3", "")),
        )
        if now != then
    ]
    if differences:
        raise UserError(
            f"checkpoint of step {state.step}: written under other settings: {'; '.join(differences)}. Restore these, "
            f"or train in {ANOTHER_DIRECTORY}. If only the tokens and their order differ, an older version of Spillway "
            "may have written the checkpoint; then only another directory helps"
        )


def check_same_base(start: StoredCheckpoint, model: Mapping[str, Any], seed: int, tokenizer_xxh3: str) -> None:
    """Raises UserError if the parameters of `start` have another meaning in this run: they are for another tokenizer,
    or are changes to other frozen parameters."""
    then = start.manifest.state
    where = f"spec.checkpoint.from: {start.path}: trained"
    if then.tokenizer_xxh3 != tokenizer_xxh3:
        raise UserError(
            f"{where} with another tokenizer than this job uses; set spec.model.source and the kind of spec.data as in "
            "the job that wrote the checkpoint"
        )
    base, base_then = model.get("source_xxh3", f"seed {seed}"), then.model.get("source_xxh3", f"seed {then.seed}")
    if model.get("frozen") and base != base_then:
        raise UserError(
            f"{where} on other frozen parameters than this job has; set spec.model.source (without a source: "
            "spec.training.seed) as in the job that wrote the checkpoint"
        )


def random_state(generator: torch.Generator = torch.default_generator) -> str:
    """Returns the state of torch's CPU generator as text, for TrainingState. A new generator has the state of a new
    process."""
    return base64.b64encode(generator.get_state().numpy().tobytes()).decode()


def restore_random_state(text: str) -> None:
    torch.set_rng_state(torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8))


def _check_shapes(
    checkpoint: StoredCheckpoint,
    settings: Hyperparameters,
    kinds: Collection[str],
    shapes: Mapping[str, Sequence[int]],
    statistics: Mapping[str, Sequence[int]],
) -> None:
    """Checks the states of these `kinds` and the running statistics against the model. Raises UserError."""
    wanted = {
        f"{kind}.{name}": settings.state_shape(kind, torch.Size(shape))
        for kind in kinds
        for name, shape in shapes.items()
    } | {name: tuple(shape) for name, shape in statistics.items()}
    read = {*kinds, "buffer"}
    tensors = checkpoint.manifest.tensors
    found = {name: entry.shape for name, entry in tensors.items() if name.partition(".")[0] in read}
    if wanted == found:
        return
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    lines = [
        f"  {name}: {found.get(name, 'absent')} in the checkpoint, {wanted.get(name, 'absent')} in the model"
        for name in differing[:3]
    ]
    raise UserError(
        f"{checkpoint.path}: belongs to another model; {len(differing)} of its tensors differ, the first:\n"
        + "\n".join(lines)
        + "\nset spec.model to the model of this checkpoint, or use another directory"
    )


def bytes_of(tensor: Tensor) -> memoryview:
    """Returns the tensor's elements, contiguous and little-endian; copies only if host memory does not have them so."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
