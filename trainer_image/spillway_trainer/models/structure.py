"""Text models of `transformers` by their structure: what computes hidden states, the layers, what computes logits.

    before  the model's own forward, up to its first layer
    layer   called with what the model's own forward gives it: masks and positions are captured, once per batch shape
    after   the modules that the forward calls after its last layer, then the forward of the model with its head

Nothing is assumed about a family. The structure is read from a run of a small copy of the model, and accepted only if
the chain computes the same logits and gradients, bit for bit, as that copy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from spillway.errors import UserError

from ..corpus.objective import TrainingObjective
from .chain import allocate, whole_shape
from .huggingface import HuggingFaceChain, numbered
from .loss import token_loss
from .source import PREFIX

MASKED: dict[str, str] = dict(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
"""Model type -> class that predicts masked tokens."""
BATCH, LENGTH = 2, 5
"""Of the run of a small copy."""
MOST_PARAMETERS = 1 << 26
"""Of a small copy: the CPU computes it whenever a model is built."""
MOST_POSITIONS_TRIED = 4096
"""Tokens that a small copy reads at once."""
SMALL = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size"), LENGTH // 2),
}
"""Sizes of a small copy, by their names in config.json."""


@dataclass(frozen=True, slots=True)
class Call:
    """How a module is called: its arguments, with Tensor in the place of each tensor."""

    values: tuple[Any, ...]
    spec: Any

    def __call__(self, module: nn.Module, *tensors: Tensor) -> Any:
        given = iter(tensors)
        positional, named = tree_unflatten([next(given) if v is Tensor else v for v in self.values], self.spec)
        return module(*positional, **named)


def recorded(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Call, list[Tensor]]:
    """A call with these arguments, and the tensors among them."""
    leaves, spec = tree_flatten((positional, named))
    values = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Call(values, spec), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class Structure:
    """Names of modules, those of the base model below it."""

    base: str
    """The base model: the module with the layers that the forward of the model with its head calls."""
    layers: str
    """The list of layers."""
    num_returned: int
    """Values that a layer returns, hidden states first; 0: the hidden states themselves."""
    before: tuple[str, ...]
    """Modules with parameters that compute the first hidden states."""
    embedding: tuple[str, Call] | None
    """The one module that computes them from the tokens alone, if there is one."""
    after: tuple[str, ...]
    """Modules that are called one after the other with what the last layer returned."""
    output: type
    """What the base model returns."""
    max_positions: int | None
    unused: frozenset[str] = frozenset()
    """Parameters of the model that its forward does not use: second names of tied ones."""


class _Reached(Exception):
    """The first layer was called, with these hidden states."""

    def __init__(self, x_BTD: Tensor) -> None:
        super().__init__()
        self.x_BTD = x_BTD


class _Stand(nn.Module):
    """Is called in place of a module, whose attributes it has."""

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        super().__init__()
        self._of, self.forward = (module,), answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"][0], name)


@contextmanager
def _replaced(root: nn.Module, path: str, answer: Callable[..., Any]) -> Iterator[None]:
    """A module, or each module of a list, is called as `answer`."""
    owner, _, name = path.rpartition(".")
    modules = root.get_submodule(owner)._modules
    known = modules[name]
    if isinstance(known, nn.ModuleList):
        modules[name] = nn.ModuleList(_Stand(module, answer) for module in known)
    else:
        modules[name] = _Stand(root.get_submodule(path), answer)
    try:
        yield
    finally:
        modules[name] = known


def _stop(x_BTD: Tensor, *_: Any, **__: Any) -> None:
    raise _Reached(x_BTD)


class Before(nn.Module):
    """Tokens to the hidden states that the first layer gets."""

    def __init__(self, base: nn.Module, structure: Structure) -> None:
        super().__init__()
        self.parts = nn.ModuleList(base.get_submodule(path) for path in structure.before)
        self._run = (base, structure)  # a tuple, so that the whole model is not a part of this one

    def forward(self, tokens_BT: Tensor) -> Tensor:
        base, structure = self._run
        if structure.embedding is not None:  # without masks, which the forward makes before its first layer
            path, call = structure.embedding
            return call(base.get_submodule(path), tokens_BT)  # type: ignore[no-any-return]
        try:
            with _replaced(base, structure.layers, _stop):
                base(input_ids=tokens_BT, use_cache=False)
        except _Reached as reached:
            return reached.x_BTD
        raise AssertionError("the model's forward ended without calling its first layer")


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor, call: Call, *tensors: Tensor) -> Tensor:
        found = call(self.layer, x_BTD, *tensors)
        return found[0] if isinstance(found, tuple | list) else found  # type: ignore[no-any-return]


class After(nn.Module):
    """Final norm, output projection and loss: the logits live and die inside one segment."""

    def __init__(self, model: Any, structure: Structure) -> None:
        super().__init__()
        base = model.get_submodule(structure.base)
        self.parts = nn.ModuleList(base.get_submodule(path) for path in structure.after)
        top = structure.base.split(".")[0]
        self.head = nn.ModuleList(module for name, module in model.named_children() if name != top)
        self._run = (model, structure)

    def logits(self, x_BTD: Tensor) -> Tensor:
        model, structure = self._run
        for part in self.parts:
            x_BTD = part(x_BTD)
        found = structure.output(last_hidden_state=x_BTD)
        with _replaced(model, structure.base, lambda *_, **__: found):
            return model(inputs_embeds=x_BTD, use_cache=False).logits  # type: ignore[no-any-return]

    def forward(self, x_BTD: Tensor, labels_BT: Tensor, num_tokens: int) -> Tensor:
        return token_loss(self.logits(x_BTD), labels_BT, num_tokens)


class StructuralChain(HuggingFaceChain):
    """A model whose layers are called one after the other, each with the hidden states of the one before."""

    def __init__(
        self, structure: Structure, model: PreTrainedModel, compute: torch.dtype, *, tie_head: bool = True
    ) -> None:
        self.structure = structure
        super().__init__(model, compute, tie_head=tie_head)
        self.max_positions = structure.max_positions
        if is_masked(model):
            self.objective = TrainingObjective.MASKED

    def make_segments(self) -> list[tuple[str, nn.Module]]:
        base = self.model.get_submodule(self.structure.base)
        layers = [Layer(layer) for layer in base.get_submodule(self.structure.layers)]
        return [
            ("embedding", Before(base, self.structure)),
            *numbered("block", layers),
            ("head", After(self.model, self.structure)),
        ]

    def arguments(self, segment: str, tokens_BT: Tensor, labels_BT: Tensor, num_tokens: int) -> tuple[object, ...]:
        if segment == "embedding":
            return ()
        if segment == "head":
            return labels_BT, num_tokens
        return self.tables(tokens_BT)[int(segment.removeprefix("block"))]  # type: ignore[no-any-return]

    def make_tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        """For each layer the Call and its tensors, from a run of a copy of the base model: its parameters are zeros
        without memory, its layers do nothing, and it has no hooks."""
        base, calls = self.model.get_submodule(self.structure.base), []

        def capture(*positional: Any, **named: Any) -> Any:
            call, (x_BTD, *tensors) = recorded(positional, named)
            calls.append((call, *tensors))
            return (x_BTD, *[None] * (self.structure.num_returned - 1)) if self.structure.num_returned else x_BTD

        layers: Any = base.get_submodule(self.structure.layers)
        replacements: dict[int, Any] = {id(layers): nn.ModuleList(_Stand(layer, capture) for layer in layers)}
        for parameter in base.parameters():
            zero = torch.zeros((), dtype=parameter.dtype, device=tokens_BT.device).expand(whole_shape(parameter))
            replacements[id(parameter)] = nn.Parameter(zero, requires_grad=False)
        copied = copy.deepcopy(base, replacements).eval()  # else dropout would draw random numbers
        for module in copied.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        with torch.no_grad():
            copied(input_ids=torch.zeros_like(tokens_BT), use_cache=False)
        return tuple(calls)

    def deviation(self, name: str) -> float:
        """In gpt2 projections onto the residual stream start smaller, by their number (Radford et al. 2019)."""
        deviation = super().deviation(name)
        if self.config.model_type == "gpt2" and name.endswith("c_proj.weight"):
            return deviation / math.sqrt(2 * self.config.n_layer)
        return deviation


_KNOWN: dict[tuple[type[PreTrainedModel], str], Structure] = {}


def structure_of(model: PreTrainedModel) -> Structure:
    """Finds the structure of `model`, and proves on a small copy that its chain computes the same.

    Raises UserError that says why the model is no chain.
    """
    name, failed = type(model).__name__, None
    _check_config(model.config, name)
    for sizes in (SMALL, None):
        small = _small(model, sizes)
        key = type(model), small.to_json_string(use_diff=False)
        try:
            if key not in _KNOWN:
                with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
                    torch.manual_seed(0)
                    _KNOWN[key] = _proven(model, small)
            return _KNOWN[key]
        except UserError:
            raise
        except Exception as error:
            failed = failed or error
    raise no_chain(name, f"a trial run of a small copy failed: {type(failed).__name__}: {failed}") from failed


def no_chain(name: str, why: str) -> UserError:
    return UserError(
        f"{name}: Spillway cannot run the layers of this model one by one: {why}. Write a Python function that returns "
        "the layers as a Chain, and name it in spec.model.entrypoint (docs/models.md, Entry points)"
    )


def _check_config(config: Any, name: str) -> None:
    """Raises UserError for what a chain does not do."""
    if getattr(config, "is_encoder_decoder", False):
        raise no_chain(name, "it has an encoder and a decoder instead of one sequence of layers")
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{name}: output_router_logits is true, which adds a load-balancing loss over the experts of all layers, "
            "but Spillway does not support this loss; set output_router_logits to false in the model's configuration"
        )
    for field in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, field, 0):
            found = getattr(config, field)
            raise UserError(
                f"{name}: {field} is {found}, but skipping layers at random is not supported; set {field} to 0 in the "
                "model's configuration"
            )


def _list_of_layers(model: Any) -> str:
    """Name of the only list of all layers."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists[path] = len(module)
    found = [path for path, length in lists.items() if length == count]
    if len(found) != 1:
        listed = ", ".join(f"{path} of length {length}" for path, length in lists.items()) or "none"
        raise no_chain(
            type(model).__name__,
            f"it needs exactly one nn.ModuleList of {count} layers (num_hidden_layers), but its lists are: {listed}",
        )
    return found[0]


def _small(model: PreTrainedModel, sizes: Mapping[str, int] | None) -> PreTrainedConfig:
    """The configuration with as few layers as show each kind of them; with `sizes`, and two heads of the same width."""
    config: Any = copy.deepcopy(model.config)
    layers: Any = model.get_submodule(_list_of_layers(model))
    lists = {name: v for name, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == len(layers)}
    kinds = [(str(layer), *(str(v[index]) for v in lists.values())) for index, layer in enumerate(layers)]
    kept = min(len(layers), max(2, *(kinds.index(kind) + 1 for kind in kinds)))
    if kept < len(layers):
        config.num_hidden_layers = kept
        for name, value in lists.items():
            setattr(config, name, value[:kept])
    if sizes is None:
        return config  # type: ignore[no-any-return]
    sizes, heads = dict(sizes), getattr(config, "num_attention_heads", None)
    if heads:
        width = 2 * (config.hidden_size // heads)
        if getattr(config, "head_dim", None):
            width = -(-width // 16) * 16  # rows of experts must begin at multiples of 16 bytes
        key_values = ("num_key_value_heads", "num_kv_heads")
        sizes |= {"hidden_size": width, "num_attention_heads": 2}
        sizes |= {name: 2 if getattr(config, name, 0) == heads else 1 for name in key_values}
        if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
            sizes["word_embed_proj_dim"] = width
    for name, size in sizes.items():
        current = getattr(config, name, None)
        if isinstance(current, int) and not isinstance(current, bool):
            setattr(config, name, min(current, size))
    for name, token in list(vars(config).items()):
        if name.endswith("_token_id") and isinstance(token, int):
            setattr(config, name, token % config.vocab_size)
    return config  # type: ignore[no-any-return]


def _outside(model: PreTrainedModel) -> set[str]:
    """Names of parameters that belong to no layer."""
    layers = _list_of_layers(model) + "."
    return {name for name, _ in model.named_parameters() if not name.startswith(layers)}


def _proven(model: PreTrainedModel, config: PreTrainedConfig) -> Structure:
    """The structure that a run of a small model shows, whose chain computes the same logits and gradients.

    Raises ValueError if it is too large, or has other modules than `model`.
    """
    with torch.device("meta"):
        empty = type(model)(config)
    if _outside(model) != _outside(empty):
        differing = ", ".join(sorted(_outside(model) ^ _outside(empty)))
        raise ValueError(f"only one of model and copy has these parameters outside the layers: {differing}")
    if (size := sum(p.numel() for p in empty.parameters())) > MOST_PARAMETERS:
        raise ValueError(f"the copy has {size} parameters, but a trial run allows at most {MOST_PARAMETERS}")
    whole: Any = type(model)(config)
    whole.float()
    for parameter in whole.parameters():
        parameter.data.normal_(0.0, 0.1)
    tokens, labels = torch.randint(0, int(whole.config.vocab_size), (2, BATCH, LENGTH))
    versions = {name: parameter._version for name, parameter in whole.named_parameters()}
    structure = _observed(whole, tokens)
    logits = whole(input_ids=tokens, use_cache=False).logits
    if written := [name for name, parameter in whole.named_parameters() if parameter._version != versions[name]]:
        raise no_chain(type(model).__name__, f"its forward changes the parameter {written[0]}")
    _check_order(whole, tokens, logits)
    token_loss(logits, labels, labels.numel()).backward()  # type: ignore[no-untyped-call]

    chain = StructuralChain(structure, empty, torch.float32).eval()
    allocate(chain)
    for name, parameter in chain.named_parameters():
        parameter.data.copy_(whole.get_parameter(name.removeprefix(PREFIX)))
    x: Any = tokens
    for name, segment in chain.segments[:-1]:
        x = segment(x, *chain.arguments(name, tokens, labels, labels.numel()))
    head: Any = chain.segments[-1][1]
    found = head.logits(x)
    token_loss(found, labels, labels.numel()).backward()  # type: ignore[no-untyped-call]
    if not torch.equal(found, logits):
        raise no_chain(
            type(model).__name__,
            "in a trial run of a small copy, calling the layers one by one gave other logits than the model's forward",
        )
    return replace(structure, unused=_compared(chain, whole))


def is_masked(model: PreTrainedModel) -> bool:
    """Whether it learns to predict masked tokens."""
    return type(model).__name__ in MASKED.values()


def _check_order(whole: Any, tokens: Tensor, logits: Tensor) -> None:
    """Raises UserError for a model that is to predict the next token, and reads it."""
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % int(whole.config.vocab_size)
    with torch.no_grad():
        others = whole(input_ids=changed, use_cache=False).logits
    # Experts compute the tokens that are routed to them together, which may round differently.
    if not is_masked(whole) and not torch.allclose(others[:, :-1], logits[:, :-1], rtol=1e-4, atol=1e-6):
        raise UserError(
            f"{type(whole).__name__}: its logits depend on later tokens, so it cannot learn to predict the next one; "
            "set is_decoder to true in its configuration"
        )


def _compared(chain: StructuralChain, whole: Any) -> frozenset[str]:
    """Raises UserError for a gradient that is not that of `whole`; returns the parameters that are not used."""
    sums: dict[str, Tensor] = {}
    unused = set()
    for name, parameter in reversed(list(chain.named_parameters())):  # the order of backward
        owner = chain.tied.get(name, name).removeprefix(PREFIX)
        if parameter.grad is not None:
            sums[owner] = sums[owner] + parameter.grad if owner in sums else parameter.grad
        elif parameter.requires_grad:
            unused.add(name.removeprefix(PREFIX))
    expected = {name: parameter.grad for name, parameter in whole.named_parameters() if parameter.grad is not None}
    wrong = [name for name in expected if name not in sums or not torch.equal(expected[name], sums[name])]
    if wrong or len(expected) != len(sums):
        raise no_chain(
            type(whole).__name__,
            "in a trial run of a small copy, calling the layers one by one gave other gradients than the model's "
            f"forward (of parameter {', '.join(wrong[:1])})",
        )
    if others := sorted(unused - second_names(whole).keys()):
        raise no_chain(type(whole).__name__, f"its forward does not use the parameter {others[0]}")
    return frozenset(unused)


def second_names(model: Any) -> Mapping[str, str]:
    """Names of parameters that the class of `model` can tie to another one, each with the name of that."""
    return {owner: alias for alias, owner in (model._tied_weights_keys or {}).items()}


def _observed(whole: Any, tokens: Tensor) -> Structure:
    """Runs the forward and notes which modules it calls, in which order, and with what."""
    name, path = type(whole).__name__, _list_of_layers(whole)
    layers = [f"{path}.{index}" for index in range(len(whole.get_submodule(path)))]
    inputs: dict[str, Any] = {}
    outputs: dict[str, Any] = {}
    called: list[str] = []

    def note(module_path: str, module: nn.Module) -> list[Any]:
        def before(_: nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
            called.append(module_path)
            inputs[module_path] = positional, named

        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(lambda _, __, output: outputs.__setitem__(module_path, output)),
        ]

    outside = {p: m for p, m in whole.named_modules() if p and (p in layers or not p.startswith(f"{path}."))}
    hooks = [hook for module_path, module in outside.items() for hook in note(module_path, module)]
    whole.train()(input_ids=tokens, use_cache=False)  # with dropout, which returns its input itself if it does nothing
    for hook in hooks:
        hook.remove()
    whole.eval()
    if (order := [one for one in called if one in layers]) != layers:
        numbers = ", ".join(one.rpartition(".")[2] for one in order) or "none"
        raise no_chain(
            name, f"its forward must call its {len(layers)} layers in order, each once, but calls layers: {numbers}"
        )
    base = next((one for one in called if path.startswith(f"{one}.")), None)
    if base is None or not hasattr(outputs[base], "last_hidden_state"):
        raise no_chain(name, "it has no submodule that contains all layers and returns last_hidden_state")
    _check_layers(name, {layer: (inputs[layer], outputs[layer]) for layer in layers})
    start, end = called.index(layers[0]), called.index(layers[-1])
    first = inputs[layers[0]][0][0]
    own = {one for one in called[:start] if any(True for _ in outside[one].parameters(recurse=False))}
    embedding = None
    for one in called[:start]:
        call, tensors = recorded(*inputs[one])
        alone = len(tensors) == 1 and tensors[0] is tokens and outputs.get(one) is first
        if alone and all(f"{part}.".startswith(f"{one}.") for part in own):
            embedding = one.removeprefix(f"{base}."), call
    after: list[str] = []
    for one in called[end + 1 :]:
        if one.startswith(f"{base}.") and not any(one.startswith(f"{outer}.") for outer in after):
            after.append(one)
    returned = outputs[layers[-1]]
    return Structure(
        base=base,
        layers=path.removeprefix(f"{base}."),
        num_returned=len(returned) if isinstance(returned, tuple | list) else 0,
        before=tuple(one.removeprefix(f"{base}.") for one in outside if one in own),
        embedding=embedding,
        after=tuple(one.removeprefix(f"{base}.") for one in after),
        output=type(outputs[base]),
        max_positions=_max_positions(whole.get_submodule(base)),
    )


def _check_layers(name: str, calls: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises UserError unless each layer gets the hidden states of the one before, and shares nothing with it.

    `calls`: layer -> what it was called with and what it returned.
    """
    last: Any = None
    for layer, ((positional, named), output) in calls.items():
        first, *others = tree_leaves((positional, named))
        if not positional or first is not positional[0] or (last is not None and first is not last):
            raise no_chain(name, f"the input of {layer} is not the output of the layer before it")
        for leaf in others:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise no_chain(
                    name,
                    f"{layer} gets a second input that needs a gradient, but gradients can pass only through hidden "
                    "states",
                )
            if not isinstance(leaf, Tensor | bool | int | float | str | None):
                raise no_chain(
                    name,
                    f"{layer} gets an argument of type {type(leaf).__name__}, through which layers could share state",
                )
        last = output[0] if isinstance(output, tuple | list) else output
        if not isinstance(last, Tensor):
            raise no_chain(
                name, f"{layer} returns an object of type {type(output).__name__} instead of a tensor of hidden states"
            )


class _LookUps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rows of each table that is looked up in, and the largest number of a row that was."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[int, tuple[int, int]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: dict[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.embedding.default:
            self.found[arguments[0].data_ptr()] = arguments[0].shape[0], int(arguments[1].max())
        return function(*arguments, **(keywords or {}))


def _max_positions(base: nn.Module) -> int | None:
    """Rows of the smallest table of positions: one more of them is read for one more token."""
    read = []
    for length in (LENGTH, LENGTH + 1):
        with torch.no_grad(), _LookUps() as tables:
            base(input_ids=torch.full((1, length), 2), use_cache=False)
        read.append(tables.found)
    parameters = {p.data_ptr() for p in base.parameters()}
    limits = [
        rows - (highest - LENGTH)
        for table, (rows, highest) in read[1].items()
        if table in parameters and highest > read[0][table][1]
    ]
    return min(limits, default=None) or _stated_limit(base)


def _stated_limit(base: nn.Module) -> int | None:
    """Of positions that are looked up in another way: what the configuration states, if one token more is an error."""
    config = getattr(base, "config", None)
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")  # several may name one value
    stated = (getattr(config, name, None) for name in names)
    for limit in dict.fromkeys(one for one in stated if isinstance(one, int)):
        if LENGTH < limit <= MOST_POSITIONS_TRIED:
            try:
                with torch.no_grad():
                    base(input_ids=torch.full((1, limit + 1), 2), use_cache=False)
            except (RuntimeError, IndexError):
                return limit
    return None
