"""A model that learns responses: under different plans, after an interruption, and as other programs load it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from cases.chats import UNMARKED, VOCABULARY, conversations, model_directory, write_lines
from harness import local_runs
from spillway.api.job_file import JobFile
from spillway.api.training_job import TrainingJob
from spillway_trainer.interchange.export import export

STEPS = 6


@pytest.fixture(scope="module", params=[False, True], ids=["padded", "packed"])
def job(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> JobFile:
    root = tmp_path_factory.mktemp("chats")
    sizes = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    torch.manual_seed(1)
    LlamaForCausalLM(sizes).save_pretrained(model_directory(root / "model", "llama3", UNMARKED["llama3"]))
    for name, seed in (("chats", 0), ("held", 1)):
        write_lines(root / f"{name}.jsonl", [{"messages": chat} for chat in conversations(40, seed)])
    document = yaml.safe_load(local_runs.JOB)
    document["spec"] |= {
        "model": {"source": {"path": str(root / "model")}},
        "data": {
            "chat": {"path": str(root / "chats.jsonl")},
            "packing": request.param,
            "evaluation": {"chat": {"path": str(root / "held.jsonl")}, "everySteps": 3},
        },
        "checkpoint": {"everySteps": 3, "keep": 2},
    }
    document["spec"]["training"] |= {"steps": STEPS, "sequenceLength": 512 if request.param else 64}
    made = local_runs.job_file(root / "whole", root, root / "corpus", epoch=1)
    return made.model_copy(update={"spec": TrainingJob.model_validate(document).spec})


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_a_run_on_chats_resumes_exactly_and_exports_its_template(job: JobFile) -> None:
    """The run resumes at step 3, under a plan without techniques: it reads no chat twice and skips none."""
    whole = Path(job.output_directory)
    assert local_runs.complete(job, local_runs.spread_plan()) == 0, local_runs.log_of(whole, 1)
    cut = whole.parent / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / f"step-{STEPS}.e1")
    places = {"output_directory": str(cut), "checkpoint_directory": str(cut / "checkpoints"), "epoch": 2}
    resumed = job.model_copy(update=places)
    assert local_runs.complete(resumed, local_runs.disabled_plan()) == 0, local_runs.log_of(cut, 2)
    last, again = whole / "checkpoints" / f"step-{STEPS}.e1", cut / "checkpoints" / f"step-{STEPS}.e2"
    uncut, found = tensors_of(last), tensors_of(again)
    assert uncut.keys() == found.keys()
    assert [name for name, tensor in uncut.items() if not torch.equal(tensor, found[name])] == []
    assert ("packing: 40 chats" if job.spec.data.packing else "chats: ") in local_runs.log_of(whole, 1)
    assert len(local_runs.events(whole, "evaluation")) == 2
    export(last, whole.parent / "exported", tokenizer=whole.parent / "corpus" / "tokenizer.json")
    assert AutoTokenizer.from_pretrained(whole.parent / "exported").chat_template == UNMARKED["llama3"]
