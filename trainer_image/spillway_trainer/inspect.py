"""`python -m spillway_trainer.inspect JOB.yaml`: builds a model and prints its ModelShape as JSON.

    spec.model -> Chain without memory -> one micro-batch of fake tensors through it -> figures per segment

Fake tensors have shapes, types and the kernels of a device, but no memory, so a model of any size can be measured with
a CPU's kernels. What is measured is what autograd does: the storages that it saves, and the bytes alive at once.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spillway.api.limits import INSPECTION_DEADLINE_SECONDS
from spillway.api.load import load_job
from spillway.api.sweep.members import inspected_as, named_specs
from spillway.api.training_job import TrainingJobSpec
from spillway.errors import UserError
from spillway.planning.model_shape import ModelShape, Segment

from .corpus.packing import Documents
from .corpus.tokens import check_tokenizer
from .ending import LONGEST_TERMINATION
from .fetch import fetch_all
from .models.build import build_model, source_directory
from .models.chain import Chain, as_carried, parameter_shape, replace_parameters
from .segments import writing_nothing

_BATCHED_PRODUCTS = (torch.ops.aten.bmm.default, torch.ops.aten.baddbmm.default)


def inspect(spec: TrainingJobSpec, claims: Mapping[str, str]) -> ModelShape:
    """Returns the shape of the job's model at its micro-batch and sequence length, and the shapes of those members that
    have another one. Raises UserError if a model cannot be built, or if its forward fails on a micro-batch."""
    shape, others = _inspected(spec, claims), dict[str, ModelShape]()
    for name, one in named_specs(spec).items() if spec.model.config is None else ():
        if (key := inspected_as(one)) not in (inspected_as(spec), *others):
            try:
                others[key] = _inspected(one, claims)
            except UserError as error:
                raise UserError(f"member {name}: {error}") from error
    return replace(shape, others=tuple(others.items()))


def _inspected(spec: TrainingJobSpec, claims: Mapping[str, str]) -> ModelShape:
    chain = build_model(spec, claims)
    if spec.model.source is not None:
        directory, is_chat = source_directory(spec.model.source, claims), spec.data.chat is not None
        check_tokenizer(directory, chain.vocab_size, chain.objective, is_chat=is_chat)
    try:
        training = spec.training
        num_micro_batches = training.global_batch_size // training.micro_batch_size if spec.data.packing else 0
        return shape_of_chain(chain, training.micro_batch_size, training.sequence_length, num_micro_batches)
    except UserError:
        raise
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise UserError(
            f"spec.model: the model's forward calls {error.func}, whose result depends on the values of a tensor, so "
            "its memory cannot be planned from shapes; in a model of your own, use torch.where instead of a boolean "
            "index, and no .item()"
        ) from error
    except (Exception, SystemExit) as error:
        raise UserError(
            f"spec.model: the model's forward fails on a test micro-batch: {type(error).__name__}: {error}; correct "
            "the model"
        ) from error


def shape_of_chain(chain: Chain, batch: int, length: int, num_packed: int = 0) -> ModelShape:
    """Measures a `chain` as `build_model` makes it. It cannot be used for anything else afterwards, because its
    parameters have become fake.

    `num_packed`: how many micro-batches a step has if their rows hold several documents, because each of them has its
    own tables; else 0.
    """
    tokens_BT = torch.zeros(batch, length, dtype=torch.int64)
    labels_BT = torch.zeros_like(tokens_BT)
    documents = [Documents(((length,),) * batch)] if num_packed else []
    arguments = {name: chain.arguments(name, tokens_BT, labels_BT, 1, *documents) for name, _ in chain.segments}
    inside, tied = chain.parameters_of(), chain.tied
    places = {parameter: index for index, names in enumerate(inside.values()) for parameter in names}
    # The only type of all parameters that are not adapters.
    compute = [p.dtype for p in chain.parameters() if chain.autocast is None or not p.requires_grad]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        _make_fake(chain)
        fake = {name: tuple(_as_fake(mode, value) for value in values) for name, values in arguments.items()}
        measured = _measured(chain, _as_fake(mode, tokens_BT), fake)
    segments = [
        _segment(
            name, [(p, chain.get_parameter(p)) for p in inside[name]], tied, measured[name], batch * length, length
        )
        for name, _ in chain.segments
    ]
    return ModelShape(
        architecture=str(chain.description.get("config", {}).get("model_type", type(chain).__name__)),
        embedding=segments[0],
        blocks=tuple(segments[1:-1]),
        head=segments[-1],
        hidden_size=measured[chain.segments[0][0]].width,
        vocab_size=chain.vocab_size,
        compute_bytes=compute[0].itemsize,
        trained_bytes=max((p.element_size() for p in chain.parameters() if p.requires_grad), default=0),
        table_bytes_per_position=-(-_table_bytes(arguments, (tokens_BT, labels_BT)) * max(1, num_packed) // length),
        tied=tuple((places[alias], places[owner]) for alias, owner in tied.items()),
    )


@dataclass(slots=True)
class Measured:
    """One segment's figures at one micro-batch, in bytes unless the name says otherwise."""

    saved: list[int] = field(default_factory=list)
    """Bytes of each storage that this segment is the first to save."""
    made: list[int] = field(default_factory=list)
    """Bytes of each storage that this segment made and passes on."""
    passed: list[int] = field(default_factory=list)
    """Bytes of each storage that it received from the previous segment and passes on."""
    width: int = 0
    """Last dimension of the first output."""
    forward_peak: int = 0
    backward_peak: int = 0
    lean_peak: int = 0
    own_saved: int = 0
    """Bytes that this segment saves of storages that it made itself."""
    attention_flops: float = 0.0
    matrix_parameters: int = 0
    trained_matrix_parameters: int = 0


def _measured(chain: Chain, tokens_BT: Tensor, arguments: Mapping[str, tuple[Any, ...]]) -> dict[str, Measured]:
    """Measures segment after segment; segments with equal modules, parameters and inputs are measured once."""
    carried: tuple[Tensor, ...] = (tokens_BT,)
    found: dict[str, Measured] = {}
    equal: dict[Any, tuple[Measured, tuple[Tensor, ...]]] = {}
    others = [arguments[name] for name, _ in chain.segments[:-1]]  # without the head's labels, which the loss saves
    known = {_key(p) for p in chain.parameters()} | {_key(v) for v in tree_leaves(others) if isinstance(v, Tensor)}
    alive: list[Tensor] = []  # keeps storages alive, so that none of their addresses comes to mean another one
    for name, module in chain.segments:
        inputs = (*carried, *arguments[name])
        signature = (str(module), *(_kind(value) for value in (*module.parameters(), *inputs)))
        if signature not in equal:
            one = _peaks(name, module, inputs, _region(chain), tokens_BT.numel())
            with _region(chain)(), saved_tensors_hooks(_collector(one.saved, known, alive), _same):
                outputs = as_carried(module(*inputs))
            given = {_key(value) for value in carried}
            for key, nbytes in {_key(out): out.untyped_storage().nbytes() for out in outputs}.items():
                (one.passed if key in given else one.made).append(nbytes)
            one.width = outputs[0].shape[-1] if outputs[0].dim() else 1
            equal[signature] = one, tuple(out.detach().requires_grad_(out.requires_grad) for out in outputs)
        found[name], carried = equal[signature]
    if len(carried) != 1 or carried[0].dim():
        shapes = ", ".join(str(tuple(output.shape)) for output in carried)
        raise UserError(
            f"spec.model: the last segment of the model, {name}, returns tensors of shapes {shapes}; change it to "
            "return only the loss, a single number"
        )
    return found


def _peaks(
    name: str,
    module: nn.Module,
    inputs: tuple[Any, ...],
    region: Callable[[], AbstractContextManager[Any]],
    num_tokens: int,
) -> Measured:
    """Measures the most bytes alive in a forward that saves nothing, in a forward that saves, and in its backward,
    where the gradient of a parameter is taken away as soon as it is complete."""
    one, saved = Measured(), list[int]()
    with writing_nothing(name, module, inputs), torch.no_grad(), region(), LiveStorages() as live:
        module(*inputs)
    one.lean_peak, one.attention_flops = live.peak, live.attention_flops
    matrices = [p for p in module.parameters() if p.dim() >= 2 and _key(p) not in live.looked_up]
    used = {_key(p): live.grouped.get(_key(p), 0) / num_tokens or p.numel() for p in matrices}
    one.matrix_parameters = round(sum(used.values()))
    one.trained_matrix_parameters = round(sum(used[_key(p)] for p in matrices if p.requires_grad))

    given = {_key(value) for value in (*inputs, *module.parameters()) if isinstance(value, Tensor)}
    held: list[Tensor] = []
    with region(), LiveStorages() as live, saved_tensors_hooks(_collector(saved, given, held), _same):
        outputs = as_carried(module(*inputs))
    held.clear()
    one.forward_peak, one.own_saved = live.peak, sum(saved)
    trained = [p for p in module.parameters() if p.requires_grad]
    hooks = [p.register_hook(live.forget) for p in trained]  # type: ignore[no-untyped-call]
    hooks += [
        p.register_post_accumulate_grad_hook(live.forget_whole)  # type: ignore[no-untyped-call]
        for p in trained
    ]
    if roots := [out for out in outputs if out.grad_fn is not None]:
        with live:
            torch.autograd.backward(roots, [torch.ones_like(out) for out in roots])
    for hook in hooks:
        hook.remove()
    for value in inputs:
        if isinstance(value, Tensor):
            value.grad = None
    one.backward_peak = live.peak
    return one


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tracks the highest sum of bytes of living storages that operations made, and what the operations were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self.attention_flops = 0.0
        self.looked_up: set[int] = set()
        """Storages of lookup tables: matrices that no product uses."""
        self.grouped: dict[int, int] = {}
        """Storage of the experts' matrices -> number of multiplications by them; each row is multiplied by one expert
        only."""
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._pending = 0
        """Bytes alive after the last operation that made a storage; if that is a parameter's gradient, it is
        subtracted."""

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        result = function(*arguments, **(keywords or {}))
        self.attention_flops += _attention_flops(function, arguments, keywords or {})
        if function is torch.ops.aten.embedding.default:
            self.looked_up.add(_key(arguments[0]))
        if "grouped_mm" in str(function):
            rows, experts = arguments[:2]
            self.grouped[_key(experts)] = self.grouped.get(_key(experts), 0) + rows.numel() * experts.shape[-1]
        known = {_key(value) for value in tree_leaves((arguments, keywords)) if isinstance(value, Tensor)}
        made = {_key(v): v for v in tree_leaves(result) if isinstance(v, Tensor) and _key(v) not in known}
        if made:  # not a view
            self._settle()
            self._storages = {key: entry for key, entry in self._storages.items() if not _expired(entry[0])}
            for key, value in made.items():
                storage = value.untyped_storage()
                self._storages[key] = _weak(storage), storage.nbytes()
            self._pending = sum(size for _, size in self._storages.values())
        return result

    def forget(self, gradient: Tensor) -> None:
        """Stops counting the gradient of a parameter here: gradients are counted separately (the largest one, once)."""
        _, size = self._storages.pop(_key(gradient), (None, 0))
        self._pending -= size

    def forget_whole(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        self.forget(parameter.grad)
        parameter.grad = None

    def __exit__(self, *error: Any) -> None:
        self._settle()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def _settle(self) -> None:
        self.peak, self._pending = max(self.peak, self._pending), 0


def _weak(storage: torch.UntypedStorage) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _expired(reference: StorageWeakRef) -> bool:
    return bool(reference.expired())  # type: ignore[no-untyped-call]


def _attention_flops(function: Any, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> float:
    """Returns the FLOPs of attention scores and of their product with the values, in forward. Fused kernels skip what a
    causal mask hides."""
    if function in _BATCHED_PRODUCTS:
        *_, left, right = [value for value in arguments if isinstance(value, Tensor)]
        return 2.0 * left.numel() * right.shape[-1]
    if "scaled_dot_product" in str(function) and "backward" not in str(function):
        query, key = arguments[:2]
        causal = keywords.get("is_causal", any(value is True for value in arguments[3:]))
        return float(4.0 * query.numel() * key.shape[-2] * (0.5 if causal else 1.0))
    return 0.0


def _segment(
    name: str,
    parameters: Sequence[tuple[str, nn.Parameter]],
    tied: Mapping[str, str],
    one: Measured,
    num_tokens: int,
    length: int,
) -> Segment:
    own = [p for parameter, p in parameters if parameter not in tied]
    trained = [p for _, p in parameters if p.requires_grad]

    def per_token(num_bytes: float) -> int:
        return -int(-num_bytes // num_tokens)

    return Segment(
        name=name,
        num_parameters=sum(p.numel() for p in own),
        num_frozen=sum(p.numel() for p in own if not p.requires_grad),
        num_aliased=sum(p.numel() for parameter, p in parameters if parameter in tied),
        num_accumulated=sum(p.numel() for p in trained),
        parameter_bytes=sum(p.numel() * p.element_size() for p in own),
        num_tensors=len(parameters),
        largest_parameter=max((p.numel() for p in trained), default=0),
        matrix_parameters=one.matrix_parameters,
        trained_matrix_parameters=one.trained_matrix_parameters,
        attention_width=round(one.attention_flops / (2.0 * length * num_tokens)),
        saved_bytes=tuple(per_token(nbytes) for nbytes in one.saved),
        made_bytes=tuple(per_token(nbytes) for nbytes in one.made),
        passed_bytes=tuple(per_token(nbytes) for nbytes in one.passed),
        forward_workspace_bytes=per_token(max(0, one.forward_peak - one.own_saved)),
        backward_workspace_bytes=per_token(max(0, one.backward_peak - one.own_saved)),
        lean_forward_bytes=per_token(one.lean_peak),
        parameters=tuple(parameter_shape(p, parameter in tied) for parameter, p in parameters),
    )


def _make_fake(chain: Chain) -> None:
    """Replaces parameters by ones that use the CPU's kernels and have no memory. Call it within FakeTensorMode."""

    def fake(parameter: nn.Parameter) -> nn.Parameter:
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
        return nn.Parameter(empty, requires_grad=parameter.requires_grad)

    replace_parameters(chain, fake)


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) else value


def _region(chain: Chain) -> Callable[[], AbstractContextManager[Any]]:
    """Returns the context in which every segment's forward runs."""
    if chain.autocast is None:
        return nullcontext
    return lambda: torch.autocast("cpu", dtype=chain.autocast)


def _collector(saved: list[int], known: set[int], alive: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Returns a pack hook that notes the bytes of each storage when it is first saved; never those of `known`
    storages."""

    def pack(tensor: Tensor) -> Tensor:
        if _key(tensor) not in known:
            known.add(_key(tensor))
            alive.append(tensor.detach())
            saved.append(tensor.untyped_storage().nbytes())
        return tensor

    return pack


def _kind(value: Any) -> Any:
    """Returns what operations depend on."""
    return (tuple(value.shape), value.dtype, value.requires_grad) if isinstance(value, Tensor) else value


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _table_bytes(arguments: Mapping[str, tuple[Any, ...]], batch: Sequence[Tensor]) -> int:
    """Returns the bytes of position tables and masks, which are made once and kept for the whole run."""
    of_batch = {_key(value) for value in batch}
    tables = {_key(v): v for v in tree_leaves(arguments) if isinstance(v, Tensor) and v.dtype != torch.int64}
    return sum(v.untyped_storage().nbytes() for key, v in tables.items() if key not in of_batch)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="spillway_trainer.inspect", description="Print a model's shape as JSON.")
    parser.add_argument("job", type=Path, help="a TrainingJob; with --in-pod, the request file that the operator wrote")
    parser.add_argument(
        "--claim",
        action="append",
        default=[],
        metavar="NAME=DIR",
        help="NAME=DIRECTORY: local directory that is used for the claim NAME",
    )
    parser.add_argument(
        "--in-pod", type=Path, metavar="FILE", help="write the shape as the termination message to this file"
    )
    given = parser.parse_args(arguments)
    if given.in_pod is not None:
        return _in_pod(given.job, given.in_pod)
    try:
        claims = dict(claim.split("=", 1) for claim in given.claim)
        with _answer() as answer:
            answer.write(inspect(load_job(given.job).spec, claims).to_json() + "\n")
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _in_pod(asked: Path, termination: Path) -> int:
    """Runs in a pod that the operator started. `asked` holds the spec, and where its claims are mounted. Fetches what
    is to be fetched, which may take hours, and inspects, which has a deadline."""
    try:
        document = json.loads(asked.read_text(encoding="utf-8"))
        spec = TrainingJobSpec.model_validate(document["spec"])
        fetch_all(spec, document["claims"], lambda line: print(line, flush=True))
        faulthandler.dump_traceback_later(INSPECTION_DEADLINE_SECONDS, exit=True)  # the log then tells where it hangs
        told = inspect(spec, document["claims"]).packed()
        if len(told) > LONGEST_TERMINATION:
            raise UserError(
                "spec.model: the model has too many layers of different sizes: the pod that measures them reports them "
                "in its termination message, which holds 4096 bytes; give more of the layers the same sizes, "
                "or let fewer members differ in model.lora"
            )
    except UserError as error:
        told = str(error).encode(errors="replace")[:LONGEST_TERMINATION].decode(errors="ignore")
        termination.write_text(told, encoding="utf-8")
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        faulthandler.cancel_dump_traceback_later()
    termination.write_text(told, encoding="ascii")
    return 0


def _answer() -> TextIO:
    """Returns standard output, for the answer alone: what a model's own code prints from now on goes to standard
    error."""
    answer = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = sys.stderr
    return answer


if __name__ == "__main__":
    sys.exit(main())
