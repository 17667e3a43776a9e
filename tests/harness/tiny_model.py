"""A model directory as `save_pretrained` writes it, small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY = 300


def save_model(directory: Path) -> None:
    """Saves a small gpt2 with weights, and a tokenizer of bytes."""
    torch.manual_seed(3)
    sizes = GPT2Config(vocab_size=VOCABULARY, n_positions=256, n_embd=32, n_layer=3, n_head=2)
    GPT2LMHeadModel(sizes).save_pretrained(directory)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
