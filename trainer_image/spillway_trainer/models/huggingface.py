"""HuggingFaceChain: a model of `transformers` as segments. Its code is unchanged: segments call its layer modules.

    PreTrainedModel on device meta -> buffers real -> parameters in the compute type -> a leaf per use -> segments

What the model's own forward computes outside the layers (masks, position tables) is computed here by the same functions
and given to the segments as arguments; tests/parity/models/test_huggingface.py compares loss and gradients.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spillway.errors import UserError

from ..seeds import fork_seed
from .chain import Chain, whole_shape
from .source import PREFIX, Weights, stored_name


class HuggingFaceChain(Chain):
    """A PreTrainedModel of one family. Subclasses define the segments."""

    def __init__(self, model: PreTrainedModel, compute: torch.dtype, *, tie_head: bool = True) -> None:
        """`model` has its parameters on device meta; all except adapters get type `compute`. `tie_head` False: the
        configuration ties the head, but the source has an output projection of its own."""
        super().__init__()
        self.model: Any = model  # each family's class has attributes of its own
        self.adapted = any(is_adapter(name) for name, _ in model.named_parameters())
        self.autocast = compute if self.adapted and compute != torch.float32 else None
        self._tie_head = tie_head
        self._tables: dict[tuple[int, ...], tuple[Any, ...]] = {}
        make_buffers(model)
        self._segments = self.make_segments()
        self._tied = self._separate_uses(tie_head)
        cast_parameters(model, compute)
        self._check_cover()
        self.weights: Weights | None = None
        """Values of the parameters that are not adapters; None: they come from the seed."""

    def make_segments(self) -> list[tuple[str, nn.Module]]:
        """Returns modules that hold modules of the model, never its parameters, which are replaced when they get
        memory."""
        raise NotImplementedError

    def make_tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        """Returns masks and position tables for token batches of this shape."""
        raise NotImplementedError

    def tables(self, tokens_BT: Tensor) -> tuple[Any, ...]:
        """Returns `make_tables`, made once per shape, so that every segment of every micro-batch gets the same
        tensors."""
        shape = tuple(tokens_BT.shape)
        if shape not in self._tables:
            self._tables[shape] = self.make_tables(tokens_BT)
        return self._tables[shape]

    @property
    def segments(self) -> list[tuple[str, nn.Module]]:
        return self._segments

    @property
    def tied(self) -> dict[str, str]:
        return self._tied

    @property
    def config(self) -> Any:
        return self.model.config

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)

    @property
    def description(self) -> dict[str, Any]:
        """`frozen` in it: whether there are parameters whose values are in no checkpoint."""
        config = json.loads(self.config.to_json_string(use_diff=False))
        if not (self._tie_head and config.get("scale_decoder_outputs", True)):
            config["tie_word_embeddings"] = False  # t5 always says true, but scales by what it was given
        described = {
            "class": type(self.model).__name__,
            "config": config,
            "frozen": not all(p.requires_grad for p in self.parameters()),
        }
        if self.adapted:
            described["lora"] = json.loads(json.dumps(self.model.peft_config["default"].to_dict(), default=sorted))
        if self.weights is not None:
            described |= {"source": str(self.weights.directory.path), "source_xxh3": self.weights.xxh3}
        return described

    def initial_values(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the initial values of all parameters but aliases. Adapters have their own random generator, so that
        the base model is the same with and without them."""
        generator = torch.Generator().manual_seed(seed)
        of_adapters = torch.Generator().manual_seed(fork_seed(seed, 0, 0, 0))
        for name, parameter in self.named_parameters():
            if name in self.tied:
                continue
            if self.weights is not None and not is_adapter(name):
                yield name, self.weights.value(name).float()
            else:
                value = torch.empty(whole_shape(parameter), dtype=torch.float32)
                self.fill_initial(name, value, of_adapters if is_adapter(name) else generator)
                yield name, value

    def initial_trained(self, seed: int) -> Iterator[tuple[str, Tensor]]:
        """Yields the initial values of the adapters. Does not read the base model's weights, because adapters have
        their own random generator."""
        if not self.adapted:
            yield from super().initial_trained(seed)
            return
        of_adapters = torch.Generator().manual_seed(fork_seed(seed, 0, 0, 0))
        for name, parameter in self.named_parameters():
            if is_adapter(name):
                value = torch.empty(whole_shape(parameter), dtype=torch.float32)
                self.fill_initial(name, value, of_adapters)
                yield name, value

    def deviation(self, name: str) -> float:
        return float(getattr(self.config, "initializer_range", self.initializer_range))

    def fill_initial(self, name: str, value: Tensor, generator: torch.Generator) -> None:
        """Adapters start as in peft: A uniform in +-1 / sqrt(inputs), B zero, so that the sum is the base model."""
        if ".lora_A." in name:
            bound = value.shape[1] ** -0.5
            value.uniform_(-bound, bound, generator=generator)
        elif ".lora_B." in name:
            value.zero_()
        else:
            super().fill_initial(stored_name(name), value, generator)

    def like_hidden(self, tokens_BT: Tensor) -> Tensor:
        """Returns a tensor with the type of the hidden states, and with their shape but for the last dimension, without
        their memory: it is enough for the mask functions."""
        shape = (*tokens_BT.shape, 1)
        return torch.zeros((), dtype=self.hidden_dtype, device=tokens_BT.device).expand(shape)

    @property
    def hidden_dtype(self) -> torch.dtype:
        return next(self._segments[0][1].parameters()).dtype

    def _separate_uses(self, tie_head: bool) -> dict[str, str]:
        """Gives each further use of a shared parameter its own leaf; returns alias -> owner.

        A use is a segment: a module that is used several times inside one segment stays one module.
        """
        places: dict[int, list[tuple[str, nn.Module, str]]] = {}
        for prefix, module in self.model.named_modules():
            for leaf, parameter in module.named_parameters(recurse=False):
                places.setdefault(id(parameter), []).append((PREFIX + f"{prefix}.{leaf}", module, leaf))
        tied = {}
        for (owner, _, _), *others in places.values():
            for alias, module, leaf in others:
                shared = getattr(module, leaf)
                leaf_of_its_own = nn.Parameter(torch.empty_like(shared), requires_grad=shared.requires_grad)
                module.register_parameter(leaf, leaf_of_its_own)
                if tie_head or module is not self.model.get_output_embeddings():
                    tied[alias] = owner
        return tied

    def _check_cover(self) -> None:
        inside = [id(p) for _, module in self._segments for p in module.parameters()]
        names = {id(p): name for name, p in self.model.named_parameters()}
        if sorted(inside) != sorted(names):
            wrong = sorted(name for key, name in names.items() if inside.count(key) != 1)
            raise UserError(
                f"{type(self.model).__name__}: {', '.join(wrong[:1]) or 'a parameter'} does not belong to exactly one "
                "layer; models that use a layer twice, or have a parameter that their forward does not use, cannot be "
                "trained as they are. Declare a Chain in an entry point (docs/models.md, Entry points)"
            )


def is_adapter(name: str) -> bool:
    return ".lora_" in name


def make_buffers(model: PreTrainedModel) -> None:
    """Gives every buffer memory and values: they are not in the files, and the model's own code knows how to make them.

    Raises UserError for a buffer that this code does not set.
    """
    for prefix, module in model.named_modules():
        buffers = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in buffers:
            old = getattr(module, name)
            unset = float("nan") if old.is_floating_point() else -1
            module.register_buffer(name, torch.full(old.shape, unset, dtype=old.dtype, device="cpu"), persistent=False)
        if buffers:
            model._init_weights(module)  # type: ignore[no-untyped-call]
        for name in buffers:
            made = getattr(module, name)
            if bool(made.isnan().any() if made.is_floating_point() else (made == -1).any()):
                raise UserError(
                    f"{type(model).__name__}: its code in transformers does not set the values of "
                    f"buffer {prefix}.{name}, so the model cannot be built; declare a Chain in an entry point "
                    "(docs/models.md, Entry points), or use another model"
                )


def cast_parameters(model: nn.Module, compute: torch.dtype) -> None:
    """Casts parameters on device meta: adapters to float32, everything else to `compute`."""
    for prefix, module in model.named_modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            dtype = torch.float32 if is_adapter(f"{prefix}.{name}") else compute
            if parameter.dtype != dtype:
                cast = torch.empty_like(parameter, dtype=dtype)
                module.register_parameter(name, nn.Parameter(cast, requires_grad=parameter.requires_grad))


def numbered(name: str, modules: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    return ((f"{name}{index}", module) for index, module in enumerate(modules))
