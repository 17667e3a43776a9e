"""examples/huggingface_spilling.py, unchanged, on a tiny model: its losses equal those of a plain loop in every
digit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from harness.places import ROOT

pytestmark = pytest.mark.ci

EXAMPLE = ROOT / "examples" / "huggingface_spilling.py"
TEXT = "It is a truth universally acknowledged that activations want room. " * 120
STEPS = 3


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a GPT-2 of two small layers, and a tokenizer of the text's words."""
    import tokenizers
    import transformers

    directory = tmp_path_factory.mktemp("tiny-gpt2")
    words = sorted(set(TEXT.replace(".", " .").split()))
    vocabulary = {word: index for index, word in enumerate(["?", *words])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(directory)
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_embd=256, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(directory)
    return directory


def losses(model_directory: Path, folder: Path, *options: str) -> tuple[list[str], str]:
    """Runs the example; returns its line for each step, and its last line."""
    text = folder / "text.txt"
    text.write_text(TEXT, encoding="utf-8")
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE), str(model_directory), str(text), "--spill", str(folder), "--nvme-gib", "0.1",
         "--steps", str(STEPS), "--sequence-length", "128", "--batch-size", "4", *options],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    *steps, last = ended.stdout.splitlines()
    return steps, last


def test_example_spills_with_the_losses_of_a_run_that_keeps_everything(model_directory: Path, tmp_path: Path) -> None:
    spilled, said = losses(model_directory, tmp_path, "--keep-gib", "0")
    kept, said_of_kept = losses(model_directory, tmp_path, "--keep-gib", "4")
    assert len(spilled) == STEPS
    assert spilled == kept
    assert (
        float(said.split()[0]) > float(said_of_kept.split()[0]) > 0
    )  # the first step spills everything, to find out what is saved
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
