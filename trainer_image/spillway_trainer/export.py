"""A checkpoint's weights as a Hugging Face llama directory: what other programs load."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from spillway.errors import CheckpointCorrupt, UserError

from .checkpoint import bytes_of, safetensors_header
from .checkpoint_manifest import Checkpoint, Manifest, open_checkpoint, verify_checkpoint
from .durable_files import DurableFiles, describe_file
from .tokens import END_OF_TEXT, end_of_text_id

ExportDtype = Literal["bfloat16", "float32"]

_MASTER = "master."
_RENAMED = {"head.norm.weight": "model.norm.weight", "head.lm_head.weight": "lm_head.weight"}


def export(checkpoint_path: Path, output: Path, *, tokenizer: Path, dtype: ExportDtype = "bfloat16") -> None:
    """Write model.safetensors, config.json, tokenizer.json and tokenizer_config.json into the new directory `output`.

    Raises CheckpointCorrupt when a byte of the checkpoint changed, UserError when `output` exists or `tokenizer` is not
    the one that the model was trained with. One tensor is in memory at a time.
    """
    if output.exists():
        raise UserError(f"{output}: exists already; name a directory that does not")
    checkpoint = _verified(checkpoint_path)
    state = checkpoint.manifest.state
    if not tokenizer.is_file() or describe_file(tokenizer).xxh3_128 != state.tokenizer_xxh3:
        raise UserError(f"{tokenizer}: not the tokenizer that {checkpoint} was trained with; give its tokenizer.json")
    end_of_text = end_of_text_id(Tokenizer.from_file(str(tokenizer)))
    documents = {
        "config.json": llama_config(checkpoint.manifest, dtype, end_of_text),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END_OF_TEXT,
            "model_max_length": state.sequence_length,
        },
    }
    texts = {name: json.dumps(document, indent=2).encode() for name, document in documents.items()}
    _write_directory(output, checkpoint, getattr(torch, dtype), {**texts, "tokenizer.json": tokenizer.read_bytes()})


def llama_config(manifest: Manifest, dtype: ExportDtype, end_of_text: int) -> dict[str, Any]:
    """config.json of LlamaForCausalLM; rope and dtype are spelled for transformers 4 and 5 both."""
    model = manifest.state.model
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
        "max_position_embeddings": manifest.state.sequence_length,
        "rms_norm_eps": model["norm_eps"],
        "rope_theta": model["rope_theta"],
        "rope_parameters": {"rope_type": "default", "rope_theta": model["rope_theta"]},
        "initializer_range": model["initializer_range"],
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def llama_name(name: str) -> str:
    """Our parameter names are those of LlamaForCausalLM without its prefix, and a head of their own."""
    return _RENAMED.get(name, f"model.{name}")


def _verified(path: Path) -> Checkpoint:
    if problems := verify_checkpoint(path):
        lines = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointCorrupt(f"{path}: not exported, it is not as it was written\n{lines}")
    return open_checkpoint(path)


def _write_directory(output: Path, checkpoint: Checkpoint, dtype: torch.dtype, texts: dict[str, bytes]) -> None:
    files = DurableFiles()
    temporary = output.with_name(f"{output.name}.{secrets.token_hex(4)}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary_directory(temporary):
            files.write(temporary / "model.safetensors", _weights(checkpoint, dtype))
            for name, text in texts.items():
                files.write(temporary / name, [memoryview(text)])
            files.sync_directory(temporary)
            files.rename(temporary, output)
        files.sync_directory(output.parent)
    except OSError as error:
        raise UserError(f"{output}: not exported: {error.strerror or error}") from error


def _weights(checkpoint: Checkpoint, dtype: torch.dtype) -> Iterator[memoryview]:
    """One safetensors file in chunks: its header, then each master weight rounded to `dtype`."""
    masters = {name: entry for name, entry in checkpoint.manifest.tensors.items() if name.startswith(_MASTER)}
    header = {llama_name(name.removeprefix(_MASTER)): (dtype, entry.shape) for name, entry in masters.items()}
    yield memoryview(safetensors_header(header))
    for file_name, names in groupby(masters, key=lambda name: masters[name].file):
        with safe_open(checkpoint.path / file_name, framework="pt") as file:
            for name in names:
                yield bytes_of(file.get_tensor(name).to(dtype))
