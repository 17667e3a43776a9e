"""Exports a checkpoint's weights as a Hugging Face directory.

A model becomes config.json and model.safetensors; adapters become adapter_config.json and adapter_model.safetensors for
`PeftModel.from_pretrained`. One tensor is in memory at a time.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from spillway.errors import CheckpointCorrupt, UserError

from ..checkpoints.durable_files import DurableFiles, describe_file
from ..checkpoints.manifest import StoredCheckpoint, TrainingState, open_checkpoint, verify_checkpoint
from ..checkpoints.tensors import bytes_of, read, safetensors_header
from ..corpus.tokens import END_OF_TEXT_ID

ExportDtype = Literal["bfloat16", "float16", "float32"]

_MASTER = "master."
_LLAMA_NAMES = {"head.norm.weight": "model.norm.weight", "head.lm_head.weight": "lm_head.weight"}
_PREFIX = "model."
"""Prefix of the parameters of a transformers model (models/huggingface.py)."""
_PROJECTION_BIAS = ".decoder.bias"
"""A bias of bert and similar models, which also call it `.bias`; if parameters are tied, save_pretrained() writes only
that second name."""
Pieces = Callable[[str, Tensor], Mapping[str, Tensor]]
"""Name and value of a parameter -> names and values in a file."""
_BASE = "base"
_TOKENIZER_CONFIG = "tokenizer_config.json"
CARRIED = (
    _TOKENIZER_CONFIG, "chat_template.jinja", "generation_config.json", "special_tokens_map.json", "added_tokens.json",
)  # fmt: skip
"""Files of the source directory that training does not change."""
_LORA_A, _LORA_B = ".lora_A.default", ".lora_B.default"


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One safetensors file that is to be written."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    values: Callable[[], Iterable[Tensor]]
    """The values in the order of `shapes`."""

    def content(self, dtype: torch.dtype) -> Iterator[memoryview]:
        yield memoryview(safetensors_header({name: (dtype, shape) for name, shape in self.shapes.items()}))
        for name, value in zip(self.shapes, self.values(), strict=True):
            cast = value.to(dtype)
            if dtype == torch.float16 and bool(torch.isinf(cast).any()) and bool(torch.isfinite(value).all()):
                raise UserError(
                    f"{name}: has values beyond 65504, the largest number in float16; export the weights with --dtype "
                    "bfloat16"
                )
            yield bytes_of(cast)


@dataclass(frozen=True, slots=True)
class Exported:
    """Contents of the directory, apart from the tokenizer."""

    weights: tuple[WeightFile, ...]
    documents: Mapping[str, dict[str, Any]]


def export(
    checkpoint_path: Path,
    output: Path,
    *,
    tokenizer: Path,
    dtype: ExportDtype = "bfloat16",
    merge: bool = False,
    base: Path | None = None,
) -> list[str]:
    """Write weights, their description, tokenizer.json and tokenizer_config.json into the new directory `output`;
    returns the names of the weight files. `merge`: adapters are added to the weights of their base model. `base`: the
    directory that training started from, if it was moved; its files about tokenizer, chat and generation are kept.

    Raises CheckpointCorrupt if a byte of the checkpoint has changed, and UserError if `output` exists, if `tokenizer`
    is not the one that the model was trained with, or if other programs do not know the model.
    """
    if output.exists():
        raise UserError(f"{output}: already exists; name a new directory")
    checkpoint = verified(checkpoint_path)
    state = checkpoint.manifest.state
    if not tokenizer.is_file() or describe_file(tokenizer).xxh3_128 != state.tokenizer_xxh3:
        raise UserError(
            f"{tokenizer}: not the tokenizer that {checkpoint} was trained with, or missing; restore the "
            "tokenizer.json of that run's corpus"
        )
    source = _source(state.model, base)
    exported = _merged(checkpoint, source, dtype) if merge else _exported(checkpoint, output, dtype)
    kept = {name: (source / name).read_bytes() for name in CARRIED if source is not None and (source / name).is_file()}
    own = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": state.sequence_length}
    documents = {
        **exported.documents,
        "tokenizer_config.json": {**own, **json.loads(kept.pop(_TOKENIZER_CONFIG, b"{}")), **state.special_tokens},
    }
    texts = kept | {name: json.dumps(document, indent=2).encode() for name, document in documents.items()}
    texts["tokenizer.json"] = tokenizer.read_bytes()
    _write_directory(output, exported.weights, getattr(torch, dtype), texts)
    return [file.name for file in exported.weights]


def _source(model: Mapping[str, Any], base: Path | None) -> Path | None:
    """Returns the directory that the model started from; None if it is not here, or if there was none.

    Raises UserError for a `base` with other weights.
    """
    from ..models.source import open_model_directory  # noqa: PLC0415

    if "source" not in model:
        if base is not None:
            raise UserError(
                f"--base {base}: training did not start from a model directory, but from random values (spec.training."
                "seed) or an entry point (spec.model.entrypoint); leave --base out"
            )
        return None
    path = base or Path(model["source"])
    if base is None and not path.is_dir():
        return None
    if open_model_directory(path).digest() != model["source_xxh3"]:
        if base is None:
            return None
        raise UserError(
            f"--base {base}: its weights are not those that training started from; name that model's directory"
        )
    return path


def _exported(checkpoint: StoredCheckpoint, output: Path, dtype: ExportDtype) -> Exported:
    state = checkpoint.manifest.state
    model = state.model
    if "lora" in model:
        return _adapters(checkpoint, output, dtype)
    if "config" in model and not model["frozen"]:
        weights = _masters("model.safetensors", checkpoint, huggingface_pieces(model["config"]))
        return Exported((weights,), {"config.json": _config(model, dtype)})
    if "hidden_size" in model:
        weights = _masters("model.safetensors", checkpoint, lambda name, value: {llama_name(name): value})
        return Exported((weights,), {"config.json": llama_config(state, dtype)})
    why = (
        "some of its parameters are frozen, and checkpoints do not contain frozen parameters"
        if "config" in model
        else "other programs cannot load a model of this class"
    )
    raise UserError(f"{checkpoint}: a model of class {model.get('class')} cannot be exported: {why}")


def _adapters(checkpoint: StoredCheckpoint, output: Path, dtype: ExportDtype) -> Exported:
    """Returns the adapters, and also their base model if that came from the seed and is stored nowhere else."""
    state = checkpoint.manifest.state
    adapters = _masters("adapter_model.safetensors", checkpoint, lambda name, value: {adapter_name(name): value})
    base = state.model.get("source") or str(output.resolve() / _BASE)
    documents = {"adapter_config.json": state.model["lora"] | {"base_model_name_or_path": base}}
    if "source" in state.model:
        return Exported((adapters,), documents)
    documents[f"{_BASE}/config.json"] = _config(state.model, dtype)
    return Exported((adapters, _base_model(state)), documents)


def _merged(checkpoint: StoredCheckpoint, source: Path | None, dtype: ExportDtype) -> Exported:
    """Returns the base model with the products of the adapters added, in float32, as peft's merge_and_unload() does
    it."""
    from ..models import families  # noqa: PLC0415 - imports transformers
    from ..models.source import open_model_directory  # noqa: PLC0415

    state = checkpoint.manifest.state
    model = state.model
    if "lora" not in model:
        raise UserError(f"{checkpoint}: has no adapters to merge; leave --merge out")
    if "source" in model and source is None:
        raise UserError(
            f"{model['source']}: the base model of the adapters is missing or was changed; name a directory with the "
            "original model as --base"
        )
    directory = None if source is None else open_model_directory(source)
    empty = families.empty_model(families.config_from(model["config"]))
    chain = families.chain_of(empty, torch.float32, directory=directory)
    shapes = {name: tuple(p.shape) for name, p in chain.named_parameters() if name not in chain.tied}
    found = [name.removeprefix(_MASTER) for name in checkpoint.manifest.tensors]
    adapted = {name.replace(_LORA_A, ""): name for name in found if _LORA_A in name}
    if shared := sorted(adapted.keys() & {*chain.tied, *chain.tied.values()}):
        raise UserError(
            f"{checkpoint}: {shared[0]} is used in two places of the model, but has an adapter in only one of them, "
            "so the adapter cannot be merged; leave --merge out"
        )

    def stored(name: str) -> Tensor:
        return next(read(checkpoint, [_MASTER + name]))[1]

    def values() -> Iterator[tuple[str, Tensor]]:
        scale = model["lora"]["lora_alpha"] / model["lora"]["r"]
        for name, below in chain.initial_values(state.seed):
            if name in adapted:
                product = stored(adapted[name].replace(_LORA_A, _LORA_B)) @ stored(adapted[name])
                below.add_((product.T if model["lora"]["fan_in_fan_out"] else product) * scale)
            yield name, below

    weights = _weight_file("model.safetensors", shapes, values, huggingface_pieces(model["config"]))
    return Exported((weights,), {"config.json": _config(model, dtype)})


def _base_model(state: TrainingState) -> WeightFile:
    from ..models import families  # noqa: PLC0415 - imports transformers

    chain = families.chain_of(families.empty_model(families.config_from(state.model["config"])), torch.float32)
    shapes = {name: tuple(p.shape) for name, p in chain.named_parameters() if name not in chain.tied}
    initial, pieces = partial(chain.initial_values, state.seed), huggingface_pieces(state.model["config"])
    return _weight_file(f"{_BASE}/model.safetensors", shapes, initial, pieces)


def _masters(file: str, checkpoint: StoredCheckpoint, pieces: Pieces) -> WeightFile:
    """Returns a file of the checkpoint's masters, which are read file by file."""
    tensors = checkpoint.manifest.tensors
    masters = [name for name in tensors if name.startswith(_MASTER)]

    def values() -> Iterator[tuple[str, Tensor]]:
        return ((name.removeprefix(_MASTER), value) for name, value in read(checkpoint, masters))

    return _weight_file(file, {name.removeprefix(_MASTER): tensors[name].shape for name in masters}, values, pieces)


def _weight_file(
    file: str,
    shapes: Mapping[str, tuple[int, ...]],
    values: Callable[[], Iterable[tuple[str, Tensor]]],
    pieces: Pieces,
) -> WeightFile:
    """`values` come in the order of `shapes`; `pieces` says what each of them becomes in the file."""
    stored = [pieces(name, torch.empty(shape, device="meta")) for name, shape in shapes.items()]
    return WeightFile(
        file,
        {name: tuple(piece.shape) for one in stored for name, piece in one.items()},
        lambda: (piece.contiguous() for name, value in values() for piece in pieces(name, value).values()),
    )


def _config(model: Mapping[str, Any], dtype: ExportDtype) -> dict[str, Any]:
    """Returns config.json of a model of transformers; the type has the names of both version 4 and 5."""
    return {**model["config"], "architectures": [model["class"]], "dtype": dtype, "torch_dtype": dtype}


def llama_config(state: TrainingState, dtype: ExportDtype) -> dict[str, Any]:
    """Returns config.json of LlamaForCausalLM; rope and dtype have the names of both transformers 4 and 5."""
    model = state.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model["hidden_size"],
        "num_hidden_layers": model["num_layers"],
        "num_attention_heads": model["num_heads"],
        "num_key_value_heads": model["num_key_value_heads"],
        "head_dim": model["hidden_size"] // model["num_heads"],
        "intermediate_size": model["intermediate_size"],
        "vocab_size": model["vocab_size"],
        "tie_word_embeddings": model["tie_word_embeddings"],
        "max_position_embeddings": state.sequence_length,
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]},
        "initializer_range": model["initializer_range"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def llama_name(name: str) -> str:
    """Returns the name in LlamaForCausalLM: it has a prefix that ours lacks, and other names for norm and head."""
    return _LLAMA_NAMES.get(name, f"model.{name}")


def huggingface_names(config: Mapping[str, Any], name: str) -> list[str]:
    """Returns both names of a parameter that has two, if nothing is tied: loaders would not take one for the other."""
    stored = name.removeprefix(_PREFIX)
    if not stored.endswith(_PROJECTION_BIAS):
        return [stored]
    second = stored.removesuffix(_PROJECTION_BIAS) + ".bias"
    return [second] if config["tie_word_embeddings"] else [stored, second]


def huggingface_pieces(config: Mapping[str, Any]) -> Pieces:
    """Returns a function that gives the pieces as save_pretrained() writes them."""
    from ..models import families  # noqa: PLC0415 - imports transformers

    model = families.empty_model(families.config_from(config))
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def pieces(name: str, value: Tensor) -> dict[str, Tensor]:
        names = [one for one in huggingface_names(config, name) if one in known] or [name.removeprefix(_PREFIX)]
        return {piece: made for one in names for piece, made in families.stored_pieces(model, one, value).items()}

    return pieces


def adapter_name(name: str) -> str:
    """Returns the name as in peft's save_pretrained(), without the name of the adapter."""
    return "base_model.model." + name.removeprefix(_PREFIX).replace(".default.", ".")


def verified(path: Path) -> StoredCheckpoint:
    if problems := verify_checkpoint(path):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointCorrupt(f"{path}: not exported, because the checkpoint is damaged; export another one\n{lines}")
    return open_checkpoint(path)


def _write_directory(
    output: Path, weights: Iterable[WeightFile], dtype: torch.dtype, texts: Mapping[str, bytes]
) -> None:
    files = DurableFiles()
    temporary = output.with_name(f"{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary_directory(temporary):
            for file in weights:
                (temporary / file.name).parent.mkdir(exist_ok=True)
                files.write(temporary / file.name, file.content(dtype))
            for name, text in texts.items():
                files.write(temporary / name, [memoryview(text)])
            for directory in {*((temporary / file.name).parent for file in weights), temporary}:
                files.sync_directory(directory)
            files.rename(temporary, output)
        files.sync_directory(output.parent)
    except OSError as error:
        raise UserError(f"{output}: not exported: {error.strerror or error}") from error
