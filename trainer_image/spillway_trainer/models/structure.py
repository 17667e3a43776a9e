"""Text models of `transformers`, cut by their structure: what computes hidden states, the layers, what computes logits.

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
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from spillway.api.model import CHATS_NEED_CAUSAL
from spillway.errors import UserError

from ..corpus.objective import TrainingObjective
from ..corpus.packing import Documents, Lengths
from .chain import allocate, whole_shape
from .documents import ATTENTION, positions, reading
from .huggingface import HuggingFaceChain, numbered
from .loss import token_loss
from .source import PREFIX

MASKED: dict[str, str] = dict(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
"""Model type -> class that predicts masked tokens."""
ENCODER_AND_DECODER = "it has an encoder and a decoder instead of one sequence of layers"
BATCH, LENGTH = 2, 5
"""Batch size and sequence length when a small copy runs."""
MOST_PARAMETERS = 1 << 26
"""Most parameters of a small copy, because the CPU computes it whenever a model is built."""
MOST_POSITIONS_TRIED = 4096
"""Most tokens that a small copy reads at once."""
SMALL = {
    **dict.fromkeys(("vocab_size", "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "ffn_hidden_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("sliding_window", "attention_chunk_size", "window_size", "floor_scale"), LENGTH // 2),
}
"""Sizes of a small copy, by their names in config.json."""


@dataclass(frozen=True, slots=True)
class Call:
    """How a module is called: its arguments, with the class Tensor in place of each tensor."""

    values: tuple[Any, ...]
    spec: Any

    def __call__(self, module: nn.Module, *tensors: Tensor) -> Any:
        given = iter(tensors)
        positional, named = tree_unflatten([next(given) if v is Tensor else v for v in self.values], self.spec)
        return module(*positional, **named)


def recorded(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[Call, list[Tensor]]:
    """Returns a Call with these arguments, and the tensors among them."""
    leaves, spec = tree_flatten((positional, named))
    values = tuple(Tensor if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return Call(values, spec), [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True)
class Structure:
    """Names of modules; those inside the base model are relative to it."""

    base: str
    """The base model: the module that contains the layers, and that the forward of the model with its head calls."""
    layers: str
    """The list of layers."""
    num_returned: int
    """Number of values that a layer returns, hidden states first; 0: it returns the hidden states themselves."""
    before: tuple[str, ...]
    """Modules with parameters that compute the first hidden states."""
    embedding: tuple[str, Call] | None
    """The module that alone computes the first hidden states, from only the tokens, and its Call; None if there is
    none."""
    after: tuple[str, ...]
    """Modules that are called one after another, beginning with what the last layer returned."""
    output: type
    """Type that the base model returns."""
    max_positions: int | None
    unused: frozenset[str] = frozenset()
    """Parameters that the model's forward does not use: second names of tied ones."""


class _Reached(Exception):
    """The first layer was called, with these hidden states."""

    def __init__(self, x_BTD: Tensor) -> None:
        super().__init__()
        self.x_BTD = x_BTD


class _Stand(nn.Module):
    """Is called in place of a module, and has that module's attributes."""

    def __init__(self, module: nn.Module, answer: Callable[..., Any]) -> None:
        super().__init__()
        self._of, self.forward = (module,), answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_of"][0], name)


@contextmanager
def _replaced(root: nn.Module, path: str, answer: Callable[..., Any]) -> Iterator[None]:
    """Inside, calls of a module, or of each module of a list, are calls of `answer`."""
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
    """Computes from tokens the hidden states that the first layer gets."""

    def __init__(self, base: nn.Module, structure: Structure) -> None:
        super().__init__()
        self.parts = nn.ModuleList(base.get_submodule(path) for path in structure.before)
        self._run = (base, structure)  # a tuple, so that the whole model is not registered as a part of this one

    def forward(self, tokens_BT: Tensor, lengths: Lengths | None = None, positions_BT: Tensor | None = None) -> Tensor:
        base, structure = self._run
        if structure.embedding is not None:  # skips the masks, which the forward makes before its first layer
            path, call = structure.embedding
            return call(base.get_submodule(path), tokens_BT)  # type: ignore[no-any-return]
        try:
            with _replaced(base, structure.layers, _stop), reading(lengths):
                base(input_ids=tokens_BT, use_cache=False, **_named(positions_BT))
        except _Reached as reached:
            return reached.x_BTD
        raise AssertionError("the model's forward ended without calling its first layer")


def _named(positions_BT: Tensor | None) -> dict[str, Tensor]:
    """Returns arguments for a forward: none without positions, because not every model's forward takes them."""
    return {} if positions_BT is None else {"position_ids": positions_BT}


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x_BTD: Tensor, call: Call, *tensors: Tensor) -> Tensor:
        found = call(self.layer, x_BTD, *tensors)
        return found[0] if isinstance(found, tuple | list) else found  # type: ignore[no-any-return]


class After(nn.Module):
    """Final norm, output projection and loss: the logits exist only inside this segment."""

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
    """A model whose layers are called one after another, each with the hidden states of the layer before it."""

    def __init__(
        self, structure: Structure, model: PreTrainedModel, compute: torch.dtype, *, tie_head: bool = True
    ) -> None:
        self.structure = structure
        self._packed: WeakKeyDictionary[Documents, tuple[Tensor, tuple[Any, ...]]] = WeakKeyDictionary()
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

    def arguments(
        self,
        segment: str,
        tokens_BT: Tensor,
        labels_BT: Tensor,
        num_tokens: int,
        documents: Documents | None = None,
    ) -> tuple[object, ...]:
        if segment == "head":
            return labels_BT, num_tokens
        if segment == "embedding" and (documents is None or self.structure.embedding is not None):
            return ()
        if documents is None:
            return self.tables(tokens_BT)[int(segment.removeprefix("block"))]  # type: ignore[no-any-return]
        positions_BT, calls = self._tables_of(tokens_BT, documents)
        if segment == "embedding":
            return documents.lengths, positions_BT
        return calls[int(segment.removeprefix("block"))]  # type: ignore[no-any-return]

    def _tables_of(self, tokens_BT: Tensor, documents: Documents) -> tuple[Tensor, tuple[Any, ...]]:
        """Returns positions, and what each layer gets, for a batch with these documents: made once, and kept as long as
        `documents`."""
        if documents not in self._packed:
            positions_BT = positions(documents.lengths, tokens_BT.device)
            with reading(documents.lengths):
                self._packed[documents] = positions_BT, self.make_tables(tokens_BT, positions_BT)
        return self._packed[documents]

    def make_tables(self, tokens_BT: Tensor, positions_BT: Tensor | None = None) -> tuple[Any, ...]:
        """Returns for each layer the Call and its tensors. They come from a run of a copy of the base model: its
        parameters are zeros without memory, its layers do nothing, and it has no hooks."""
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
        copied = copy.deepcopy(base, replacements).eval()  # in training mode, dropout would draw random numbers
        for module in copied.modules():
            module._forward_pre_hooks.clear()
            module._forward_hooks.clear()
        with torch.no_grad():
            copied(input_ids=torch.zeros_like(tokens_BT), use_cache=False, **_named(positions_BT))
        return tuple(calls)

    def deviation(self, name: str) -> float:
        """In gpt2, projections onto the residual stream start smaller, by the root of their number (Radford et al.
        2019)."""
        deviation = super().deviation(name)
        if self.config.model_type == "gpt2" and name.endswith("c_proj.weight"):
            return deviation / math.sqrt(2 * self.config.n_layer)
        return deviation


_KNOWN: dict[tuple[type[PreTrainedModel], str, bool], Structure] = {}


def structure_of(model: PreTrainedModel, packed_length: int = 0) -> Structure:
    """Finds the structure of `model`, and proves on a small copy that its chain computes the same. `packed_length`:
    as in `families.chain_of`; proves, too, that each of several documents in a row is computed as if it were alone.

    Raises UserError that says why the model cannot be a chain, or cannot read such rows.
    """
    name, failed = type(model).__name__, None
    _check_config(model.config, name)
    if packs := packed_length > 0:
        _check_rope(model, packed_length)
    for sizes in (SMALL, None):
        small = _small(model, sizes)
        key = type(model), small.to_json_string(use_diff=False), packs
        try:
            if key not in _KNOWN:
                with torch.random.fork_rng(devices=[]), torch.enable_grad(), torch.device("cpu"):
                    torch.manual_seed(0)
                    _KNOWN[key] = _proven(model, small, packs=packs)
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
    """Raises UserError for settings that a chain does not support."""
    if getattr(config, "is_encoder_decoder", False):
        raise no_chain(name, ENCODER_AND_DECODER)
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
    """Returns the name of the only list that holds all layers. Raises UserError if there is not exactly one."""
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
    """Returns the configuration with just enough layers to show each kind of layer; with `sizes`, also with these sizes
    and two heads of the same width as before."""
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
    """Returns the names of the parameters that belong to no layer."""
    layers = _list_of_layers(model) + "."
    return {name for name, _ in model.named_parameters() if not name.startswith(layers)}


def _proven(model: PreTrainedModel, config: PreTrainedConfig, *, packs: bool) -> Structure:
    """Returns the structure that a run of a small model shows, if its chain computes the same logits and gradients.

    Raises ValueError if the copy is too large, or has other parameters outside the layers than `model`.
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
    found = _logits(chain, tokens)
    token_loss(found, labels, labels.numel()).backward()  # type: ignore[no-untyped-call]
    if not torch.equal(found, logits):
        raise no_chain(
            type(model).__name__,
            "in a trial run of a small copy, calling the layers one by one gave other logits than the model's forward",
        )
    proven = replace(structure, unused=_compared(chain, whole))
    if packs:
        _check_packing(chain, whole, tokens)
    return proven


def _logits(chain: StructuralChain, tokens_BT: Tensor, documents: Documents | None = None) -> Tensor:
    """Runs the segments one by one."""
    x: Any = tokens_BT
    for name, segment in chain.segments[:-1]:
        x = segment(x, *chain.arguments(name, tokens_BT, tokens_BT, 1, documents))
    head: Any = chain.segments[-1][1]
    return head.logits(x)  # type: ignore[no-any-return]


def _check_packing(chain: StructuralChain, whole: Any, tokens_BT: Tensor) -> None:
    """Raises UserError unless each document of a row has the logits that it has alone. Afterwards, both models attend
    within documents."""
    if is_masked(whole):
        raise UserError(CHATS_NEED_CAUSAL)
    if (attention := whole.config._attn_implementation) != "sdpa":
        raise _no_packing(whole, f"its attention is `{attention}` of transformers, but packing needs `sdpa`")
    documents = Documents(((LENGTH - 1, 1), (1, LENGTH - 1)))
    rows = [torch.split(tokens_BT[row], list(lengths)) for row, lengths in enumerate(documents.lengths)]
    for parameter in (*whole.parameters(), *chain.parameters()):
        parameter.data.mul_(4.0)  # so that attention is sharp, and a wrong score shows in the logits
    try:
        with torch.no_grad():
            alone = [
                torch.cat([whole(input_ids=each[None], use_cache=False).logits[0] for each in row]) for row in rows
            ]
            chain.config._attn_implementation = ATTENTION
            logits = _logits(chain, tokens_BT, documents)
    except Exception as error:
        why = f"its own code changes attention masks, which packing replaces ({type(error).__name__}: {error})"
        raise _no_packing(whole, why) from error
    if not torch.allclose(logits, torch.stack(alone), rtol=1e-4, atol=1e-6):
        raise _no_packing(
            whole, "in a trial run of a small copy, the logits of a document depended on the others in its row"
        )


def _check_rope(model: PreTrainedModel, packed_length: int) -> None:
    """Raises UserError if rotary embeddings depend on the largest position of a batch, which could be another
    document's."""
    given: Any = getattr(model.config, "rope_parameters", None) or {}
    for rope in [given, *given.values()]:
        if isinstance(rope, dict) and (kind := rope.get("rope_type")) in ("dynamic", "longrope"):
            limit = rope.get("original_max_position_embeddings") or model.config.max_position_embeddings
            if packed_length > limit:
                raise _no_packing(
                    model,
                    f"a document of more than {limit} tokens would change the rotary embeddings ({kind}) of all others",
                    f"use a spec.training.sequenceLength of at most {limit}, or ",
                )


def _no_packing(model: Any, why: str, other_remedy: str = "") -> UserError:
    return UserError(
        f"spec.data.packing: {type(model).__name__} cannot read several documents in one row: {why}; {other_remedy}set "
        "spec.data.packing to false"
    )


def is_masked(model: PreTrainedModel) -> bool:
    """Whether the model learns to predict masked tokens."""
    return type(model).__name__ in MASKED.values()


def _check_order(whole: Any, tokens: Tensor, logits: Tensor) -> None:
    """Raises UserError if a model is to predict the next token, but its logits depend on later tokens."""
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % int(whole.config.vocab_size)
    with torch.no_grad():
        others = whole(input_ids=changed, use_cache=False).logits
    # Experts compute all tokens that are routed to them together, which may round differently.
    if not is_masked(whole) and not torch.allclose(others[:, :-1], logits[:, :-1], rtol=1e-4, atol=1e-6):
        raise UserError(
            f"{type(whole).__name__}: its logits depend on later tokens, so it cannot learn to predict the next one; "
            "set is_decoder to true in its configuration"
        )


def _compared(chain: StructuralChain, whole: Any) -> frozenset[str]:
    """Returns the parameters that are not used. Raises UserError for a gradient that differs from that of `whole`."""
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
    """Returns, for each parameter that the class of `model` can tie to another one, its name -> the name of that
    one."""
    return {owner: alias for alias, owner in (model._tied_weights_keys or {}).items()}


def _observed(whole: Any, tokens: Tensor) -> Structure:
    """Runs the forward, notes which modules it calls, in which order and with what, and derives the structure from
    that."""
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
    whole.train()(input_ids=tokens, use_cache=False)  # in training mode: otherwise dropout returns its very input
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
    returned, after = outputs[layers[-1]], list[str]()
    for one in called[end + 1 :]:
        if one.startswith(f"{base}.") and not any(one.startswith(f"{outer}.") for outer in after):
            after.append(one)
    hidden = [(returned[0] if isinstance(returned, tuple | list) else returned), *(outputs[one] for one in after)]
    made = [number for number, one in enumerate(hidden) if one is outputs[base].last_hidden_state]
    after = after[: made[0]] if made else after  # what comes later, such as a pooler, computes something else
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
    """Raises UserError unless each layer gets the hidden states of the layer before it, and shares nothing else with
    it.

    `calls`: layer -> what it was called with, and what it returned.
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
    """Notes for each lookup table its number of rows, and the largest row number that was read."""

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
    """Returns the longest sequence for which the smallest position table (a table in which one more row is read for
    each further token) has enough rows; if there is no such table, the stated limit."""
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
    """Returns the limit that the configuration states if one more token raises an error: for positions that are looked
    up in another way."""
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
