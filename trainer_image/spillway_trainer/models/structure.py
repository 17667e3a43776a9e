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
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

from spillway.errors import UserError

from ..corpus.objective import TrainingObjective
from .chain import allocate, token_loss
from .huggingface import HuggingFaceChain, numbered
from .source import PREFIX

BATCH, LENGTH = 2, 5
"""Of the run of a small copy."""
MOST_PARAMETERS = 1 << 26
"""Of a small copy: it is computed on the CPU whenever a model is built."""
SMALL = {
    "vocab_size": 32, "vocab_size_per_layer_input": 32, "sliding_window": 3, "attention_chunk_size": 3, "window_size": 3,
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size", "moe_intermediate_size",
         "shared_expert_intermediate_size"), 32,
    ),
}  # fmt: skip
"""Sizes of a small copy, by their names in config.json."""


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
    after: tuple[str, ...]
    """Modules that are called one after the other with what the last layer returned."""
    output: type
    """What the base model returns."""
    max_positions: int | None
    unused: frozenset[str] = frozenset()
    """Parameters of the model that its forward does not use: second names of tied ones."""


@dataclass(frozen=True, slots=True)
class Call:
    """What a layer is called with beside hidden states and tensors: the places of these tensors, and all other values."""

    values: tuple[Any, ...]
    spec: Any

    def __call__(self, layer: nn.Module, x_BTD: Tensor, tensors: tuple[Tensor, ...]) -> Any:
        given = iter(tensors)
        positional, named = tree_unflatten([next(given) if v is Tensor else v for v in self.values], self.spec)
        return layer(x_BTD, *positional, **named)


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
        self._run = (base, structure.layers)  # a tuple, so that the whole model is not a part of this one

    def forward(self, tokens_BT: Tensor) -> Tensor:
        base, layers = self._run
        try:
            with _replaced(base, layers, _stop):
                base(input_ids=tokens_BT, use_cache=False)
        except _Reached as reached:
            return reached.x_BTD
        raise AssertionError("a forward calls its first layer")


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor, call: Call, *tensors: Tensor) -> Tensor:
        found = call(self.layer, x_BTD, tensors)
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
        return token_loss(self.logits(x_BTD).float(), labels_BT, num_tokens)


class StructuralChain(HuggingFaceChain):
    """A model whose layers are called one after the other, each with the hidden states of the one before."""

    def __init__(
        self, structure: Structure, model: PreTrainedModel, compute: torch.dtype, *, tie_head: bool = True
    ) -> None:
        self.structure = structure
        super().__init__(model, compute, tie_head=tie_head)
        self.max_positions = structure.max_positions
        if type(model).__name__ in MASKED.values():
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
        """For each layer the Call and its tensors, from a run of the base model's forward without its layers, and with
        parameters of zeros that take no memory."""
        base, path = self.model.get_submodule(self.structure.base), self.structure.layers
        zeros = {
            name: torch.zeros((), dtype=p.dtype, device=tokens_BT.device).expand(p.shape)
            for name, p in base.named_parameters(remove_duplicate=False)
            if not name.startswith(f"{path}.")
        }
        calls = []

        def capture(x_BTD: Tensor, *positional: Any, **named: Any) -> Any:
            leaves, spec = tree_flatten((positional, named))
            values = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            calls.append((Call(values, spec), *(leaf for leaf in leaves if isinstance(leaf, Tensor))))
            return (x_BTD, *[None] * (self.structure.num_returned - 1)) if self.structure.num_returned else x_BTD

        training = base.training
        base.eval()  # or dropout would draw random numbers
        try:
            with torch.no_grad(), _replaced(base, path, capture):
                tokens = torch.zeros_like(tokens_BT)
                torch.func.functional_call(base, zeros, (), {"input_ids": tokens, "use_cache": False})
        finally:
            base.train(training)
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
    name = type(model).__name__
    _check_config(model.config, name)
    try:
        small = _small(model)
        key = type(model), small.to_json_string(use_diff=False)
        if key not in _KNOWN:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                torch.manual_seed(0)
                _KNOWN[key] = _proven(type(model), small)
    except UserError:
        raise
    except Exception as error:
        raise _no_chain(name, f"a small copy of it fails: {type(error).__name__}: {error}") from error
    return _KNOWN[key]


def _no_chain(name: str, why: str) -> UserError:
    return UserError(
        f"{name}: cannot be cut into a chain of layers: {why}. Declare its segments as a Chain in an entry point "
        "(docs/models.md, Entry points)"
    )


def _check_config(config: Any, name: str) -> None:
    if getattr(config, "is_encoder_decoder", False):
        raise _no_chain(name, "it has an encoder and a decoder")
    if getattr(config, "output_router_logits", False):
        raise UserError(
            f"{name}: output_router_logits is true, which adds a load-balancing loss of the routers over all layers; "
            "it is not computed here: set output_router_logits to false"
        )
    for field in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, field, 0):
            raise UserError(f"{name}: {field} is {getattr(config, field)}: layers cannot be left out; set it to 0")


def _list_of_layers(model: Any) -> str:
    """Name of the only list of all layers."""
    count = getattr(model.config, "num_hidden_layers", None)
    lists: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists[path] = len(module)
    found = [path for path, length in lists.items() if length == count]
    if len(found) != 1:
        listed = ", ".join(f"{path} of {length}" for path, length in lists.items()) or "none"
        raise _no_chain(type(model).__name__, f"it needs one list of {count} layers, and its lists are: {listed}")
    return found[0]


def _small(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration with as few layers as show each kind of them, two heads of the same size, and small sizes."""
    config: Any = copy.deepcopy(model.config)
    layers: Any = model.get_submodule(_list_of_layers(model))
    count = len(layers)
    lists = {name: v for name, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == count}
    kinds = [(str(layer), *(str(v[index]) for v in lists.values())) for index, layer in enumerate(layers)]
    kept = max(2, *(kinds.index(kind) + 1 for kind in kinds)) if count > 1 else 1
    if kept < count:
        config.num_hidden_layers = kept
        for name, value in lists.items():
            setattr(config, name, value[:kept])
    sizes = dict(SMALL)
    if heads := getattr(config, "num_attention_heads", None):
        width = 2 * (config.hidden_size // heads)
        width = -(-width // 16) * 16 if getattr(config, "head_dim", None) else width  # as grouped products need it
        sizes |= {"hidden_size": width, "num_attention_heads": 2}
    sizes |= {name: 2 if getattr(config, name, 0) == heads else 1 for name in ("num_key_value_heads", "num_kv_heads")}
    if getattr(config, "word_embed_proj_dim", None) == config.hidden_size:
        sizes["word_embed_proj_dim"] = sizes.get("hidden_size", config.hidden_size)
    for name, value in sizes.items():
        if isinstance(current := getattr(config, name, None), int) and not isinstance(current, bool):
            setattr(config, name, min(current, value))
    for name, value in vars(config).items():
        if name.endswith("_token_id") and isinstance(value, int):
            setattr(config, name, value % config.vocab_size)
        elif name.endswith("_token_id") and isinstance(value, list):
            setattr(config, name, [token % config.vocab_size for token in value])
    return config  # type: ignore[no-any-return]


def _proven(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> Structure:
    """The structure that a run of this model shows, whose chain computes the same logits and gradients."""
    with torch.device("meta"):
        empty: Any = model_class(config)
    size = sum(p.numel() for p in empty.parameters())
    if size > MOST_PARAMETERS:
        raise _no_chain(model_class.__name__, f"a small copy still has {size} parameters, {MOST_PARAMETERS} are checked")
    whole: Any = model_class(config).float().eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(0.0, 0.1)
    tokens, labels = torch.randint(0, int(whole.config.vocab_size), (2, BATCH, LENGTH))
    structure, logits = _observed(whole, tokens)
    token_loss(logits.float(), labels, labels.numel()).backward()  # type: ignore[no-untyped-call]

    chain = StructuralChain(structure, empty, torch.float32).eval()
    allocate(chain)
    for name, parameter in chain.named_parameters():
        parameter.data.copy_(whole.get_parameter(name.removeprefix(PREFIX)))
    x: Any = tokens
    for name, segment in chain.segments[:-1]:
        x = segment(x, *chain.arguments(name, tokens, labels, labels.numel()))
    found = chain.segments[-1][1].logits(x)  # type: ignore[operator]
    token_loss(found.float(), labels, labels.numel()).backward()  # type: ignore[no-untyped-call]
    if not torch.equal(found, logits):
        raise _no_chain(model_class.__name__, "on a small copy, the logits of its layers one by one are others")
    return replace(structure, unused=_compared(chain, whole))


def _compared(chain: StructuralChain, whole: Any) -> frozenset[str]:
    """Raises UserError for a gradient that is another; returns the parameters that are not used."""
    name_of = {name: chain.tied.get(name, name).removeprefix(PREFIX) for name, _ in chain.named_parameters()}
    sums: dict[str, Tensor] = {}
    for name, parameter in reversed(list(chain.named_parameters())):  # the order of backward
        if parameter.grad is not None:
            owner = name_of[name]
            sums[owner] = sums[owner] + parameter.grad if owner in sums else parameter.grad
    for name, parameter in whole.named_parameters():
        expected, found = parameter.grad, sums.get(name)
        if (expected is None) != (found is None) or not (expected is None or torch.equal(expected, found)):
            raise _no_chain(
                type(whole).__name__, f"on a small copy, the gradient of {name} through its layers one by one is another"
            )
    unused = {n.removeprefix(PREFIX) for n, p in chain.named_parameters() if p.requires_grad and p.grad is None}
    if others := sorted(unused - second_names(whole).keys()):
        raise _no_chain(type(whole).__name__, f"its forward does not use the parameter {others[0]}")
    return frozenset(unused)


def second_names(model: Any) -> Mapping[str, str]:
    """Names of parameters that the class of `model` ties, each with the other name."""
    tied = model._tied_weights_keys
    return {owner: alias for alias, owner in tied.items()} if isinstance(tied, dict) else {}


def _observed(whole: Any, tokens: Tensor) -> tuple[Structure, Tensor]:
    """Runs the forward and notes which modules it calls, in which order, and with what. Returns the logits, too."""
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
    logits = whole(input_ids=tokens, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    if (order := [one for one in called if one in layers]) != layers:
        numbers = ", ".join(one.rpartition(".")[2] for one in order) or "none"
        raise _no_chain(name, f"its forward calls its {len(layers)} layers in the order {numbers}")
    base = next((one for one in called if path.startswith(f"{one}.")), None)
    if base is None or not hasattr(outputs[base], "last_hidden_state"):
        raise _no_chain(name, "it has no base model below its head that returns last_hidden_state")
    last: Any = None
    for layer in layers:
        positional, named = inputs[layer]
        first, *others = tree_leaves((positional, named))
        if not positional or first is not positional[0] or (layer != layers[0] and first is not last):
            raise _no_chain(name, f"{layer} does not get what the layer before it returned")
        for leaf in others:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                raise _no_chain(name, f"{layer} gets a second tensor that has a gradient")
            if not isinstance(leaf, Tensor | bool | int | float | str | None):
                raise _no_chain(name, f"{layer} gets a {type(leaf).__name__}, in which layers could share state")
        last = outputs[layer][0] if isinstance(outputs[layer], tuple | list) else outputs[layer]
        if not isinstance(last, Tensor):
            raise _no_chain(name, f"{layer} returns a {type(outputs[layer]).__name__}, needed are hidden states")
    start, end = called.index(layers[0]), called.index(layers[-1])
    own = {one for one in called[:start] if any(True for _ in outside[one].parameters(recurse=False))}
    after: list[str] = []
    for one in called[end + 1 :]:
        if one.startswith(f"{base}.") and not any(one.startswith(f"{outer}.") for outer in after):
            after.append(one)
    returned = outputs[layers[-1]]
    structure = Structure(
        base=base,
        layers=path.removeprefix(f"{base}."),
        num_returned=len(returned) if isinstance(returned, tuple | list) else 0,
        before=tuple(one.removeprefix(f"{base}.") for one in outside if one in own),
        after=tuple(one.removeprefix(f"{base}.") for one in after),
        output=type(outputs[base]),
        max_positions=_max_positions(whole.get_submodule(base)),
    )
    return structure, logits


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
    return min(limits, default=None)
