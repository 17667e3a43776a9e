"""Each model family from text to a directory that other programs load: trained, resumed, exported and loaded."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedModel,
)

from cases.huggingface_models import batch_for
from harness import local_runs
from harness.depth import some
from spillway.api.job_file import JobFile
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway_trainer.checkpoints.manifest import open_checkpoint
from spillway_trainer.corpus.objective import TrainingObjective, prefix_length
from spillway_trainer.interchange.export import export
from spillway_trainer.models.build import build_model
from spillway_trainer.models.chain import Chain, allocate

STEPS = 6
SIZES = {"hiddenSize": 32, "numLayers": 2, "numHeads": 4, "intermediateSize": 48, "vocabSize": 300, "maxPositions": 64}
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"config": SIZES | {"architecture": "gpt2", "dropout": "0.1"}},
    "bert": {"config": SIZES | {"architecture": "bert", "dropout": "0.1"}},
    "t5": {"config": SIZES | {"architecture": "t5", "dropout": "0.1"}},
    "adapters": {"config": SIZES | {"architecture": "llama"}, "lora": {"rank": 4}},
}
LOADERS = {"gpt2": AutoModelForCausalLM, "bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_runs.write_text(tmp_path_factory.mktemp("families") / "text")


def document_of(model: dict[str, Any], text: Path) -> dict[str, Any]:
    document = yaml.safe_load(local_runs.JOB.replace("TEXT", str(text)))
    document["spec"]["model"] = model
    document["spec"]["training"]["steps"] = STEPS
    document["spec"]["checkpoint"] = {"everySteps": 3, "keep": 2}
    return document


def spec_of(model: dict[str, Any], text: Path) -> TrainingJobSpec:
    return TrainingJob.model_validate(document_of(model, text)).spec


def job_of(model: dict[str, Any], text: Path, output: Path, epoch: int) -> JobFile:
    job = local_runs.job_file(output, text, output.parent / "corpus", epoch)
    return job.model_copy(update={"spec": spec_of(model, text)})


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    return {name: t for file in checkpoint.glob("*.safetensors") for name, t in load_file(file).items()}


@pytest.fixture(scope="module", params=some(MODELS, 2))
def trained(request: pytest.FixtureRequest, text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A completed run of one family, with its own corpus: the model's name and the output directory."""
    output = tmp_path_factory.mktemp("run") / "whole"
    job = job_of(MODELS[request.param], text, output, epoch=1)
    plan = local_runs.spread_plan(len(build_model(job.spec).segments) - 2)
    assert local_runs.complete(job, plan) == 0, local_runs.log_of(output, 1)
    return request.param, output


@pytest.mark.ci
@pytest.mark.parametrize("trained", ["bert", "adapters"], indirect=True)
def test_a_resumed_run_is_the_uncut_one(trained: tuple[str, Path], text: Path) -> None:
    """The run resumes at step 3 under another plan, with hidden tokens, dropout and frozen parameters."""
    name, whole = trained
    cut = whole.parent / "cut"
    shutil.copytree(whole, cut)
    shutil.rmtree(cut / "checkpoints" / f"step-{STEPS}.e1")
    job = job_of(MODELS[name], text, cut, epoch=2)
    plan = local_runs.disabled_plan(len(build_model(job.spec).segments) - 2)
    assert local_runs.complete(job, plan) == 0, local_runs.log_of(cut, 2)
    uncut = tensors_of(whole / "checkpoints" / f"step-{STEPS}.e1")
    resumed = tensors_of(cut / "checkpoints" / f"step-{STEPS}.e2")
    assert uncut.keys() == resumed.keys()
    assert [name for name, tensor in uncut.items() if not torch.equal(tensor, resumed[name])] == []


def test_a_checkpoint_holds_what_is_trained_and_nothing_else(trained: tuple[str, Path], text: Path) -> None:
    name, whole = trained
    chain = build_model(spec_of(MODELS[name], text))
    states = tensors_of(whole / "checkpoints" / f"step-{STEPS}.e1")
    masters = {state.removeprefix("master.") for state in states if state.startswith("master.")}
    assert masters == {n for n, p in chain.named_parameters() if p.requires_grad and n not in chain.tied}
    if name == "adapters":
        assert all(".lora_" in master for master in masters)
    assert json.loads(json.dumps(chain.description)) == dict(
        open_checkpoint(whole / "checkpoints" / f"step-{STEPS}.e1").manifest.state.model
    )


def chain_at(name: str, checkpoint: Path, text: Path) -> Chain:
    """The chain of a model in float32, with the checkpoint's masters and, for frozen parameters, the seed's values."""
    model = MODELS[name] | {"precision": {"compute": "float32"}}
    chain = build_model(spec_of(model, text))
    allocate(chain)
    values = dict(chain.initial_values(0)) | {
        state.removeprefix("master."): tensor
        for state, tensor in tensors_of(checkpoint).items()
        if state.startswith("master.")
    }
    for parameter, value in values.items():
        chain.get_parameter(parameter).data.copy_(value)
    chain.tie()
    return chain.eval()


def logits_of(model: nn.Module, objective: TrainingObjective, tokens: Tensor) -> Tensor:
    P = prefix_length(tokens.shape[1])
    inputs = {"input_ids": tokens}
    if objective is TrainingObjective.PREFIX:
        inputs = {"input_ids": tokens[:, :P], "decoder_input_ids": tokens[:, P:]}
    with torch.no_grad():
        return model(**inputs).logits


def loaded(name: str, directory: Path) -> nn.Module:
    """The exported model as another program loads it; asserts that no weights are missing or unexpected."""
    if name == "adapters":
        base = AutoModelForCausalLM.from_pretrained(directory / "base")
        return PeftModel.from_pretrained(base, directory).eval()
    model, report = LOADERS[name].from_pretrained(directory, output_loading_info=True)
    assert not any(report.values()), report
    assert isinstance(model, PreTrainedModel)
    return model.eval()


def test_the_exported_directory_loads_and_has_the_same_logits(trained: tuple[str, Path], text: Path) -> None:
    name, whole = trained
    checkpoint, directory = whole / "checkpoints" / f"step-{STEPS}.e1", whole.parent / "exported"
    export(checkpoint, directory, tokenizer=whole.parent / "corpus" / "tokenizer.json", dtype="float32")
    chain, model = chain_at(name, checkpoint, text), loaded(name, directory)
    tokens, _, _ = batch_for(chain.objective)
    assert torch.equal(logits_of(model, chain.objective, tokens), logits_of(chain.model, chain.objective, tokens))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.decode(tokenizer.encode("def trained(self):")) == "def trained(self):"


def spillway(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "spillway_cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.ci
def test_exported_model_keeps_its_tokenizer_and_other_weights_are_rejected(  # noqa: PLR0915 - one life of a model
    text: Path, tmp_path: Path
) -> None:
    """Uses the command line and a claim: a plan by inspection, a run, adapters on a source, and rejection of another
    source."""
    first = job_of(MODELS["gpt2"], text, tmp_path / "first", epoch=1)
    assert local_runs.complete(first, local_runs.disabled_plan(2)) == 0
    tokenizer = tmp_path / "corpus" / "tokenizer.json"
    for step in (3, STEPS):
        checkpoint = tmp_path / "first" / "checkpoints" / f"step-{step}.e1"
        export(checkpoint, tmp_path / f"model-{step}", tokenizer=tokenizer)
    (tmp_path / "model-3").rename(tmp_path / "model")
    template, generation = "{% for one in messages %}{{ one.content }}{% endfor %}", {"max_new_tokens": 7}
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    (tmp_path / "model" / "generation_config.json").write_text(json.dumps(generation))
    said = json.loads((tmp_path / "model" / "tokenizer_config.json").read_text())
    more = {"bos_token": said["eos_token"], "pad_token": said["eos_token"], "model_max_length": 4096}
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps(said | more))

    job, output = tmp_path / "job.yaml", tmp_path / "second"
    source = {"source": {"claim": "models", "subPath": "model"}, "lora": {"rank": 4}}
    document = document_of(source, text)
    document["spec"]["training"]["steps"] = 4
    job.write_text(yaml.safe_dump(document))
    command = ("run", str(job), "--output", str(output), "--claim", f"models={tmp_path}")
    done = spillway(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (output / "corpus" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()

    directory = tmp_path / "adapters"
    done = spillway("ckpt", "export", str(output), "--to", str(directory))
    assert done.returncode == 0 and "adapter_model.safetensors" in done.stdout, done.stdout + done.stderr
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert isinstance(PeftModel.from_pretrained(base, directory), PeftModel)
    assert json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"].endswith("model")

    exact, merged = tmp_path / "exact", tmp_path / "merged"
    for to, more in ((exact, ()), (merged, ("--merge",))):
        done = spillway("ckpt", "export", str(output), "--to", str(to), "--dtype", "float32", *more)
        assert done.returncode == 0, done.stdout + done.stderr
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, exact).merge_and_unload().state_dict()
    ours = AutoModelForCausalLM.from_pretrained(merged)
    assert ours.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False).shape == (1, 5)
    assert ours.generation_config.max_new_tokens == 7
    for to in (directory, merged):
        of_source = AutoTokenizer.from_pretrained(to)
        assert (of_source.pad_token, of_source.model_max_length) == (said["eos_token"], 4096)
        assert of_source.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False) == "ab"
    assert [name for name, value in ours.state_dict().items() if not torch.equal(value, theirs[name])] == []
    done = spillway(
        "ckpt",
        "export",
        str(output),
        "--to",
        str(tmp_path / "no"),
        "--merge",
        "--base",
        str(tmp_path / f"model-{STEPS}"),
    )
    assert done.returncode == 64 and "its weights are not those that training started from" in done.stderr
    done = spillway("ckpt", "export", str(output), "--to", str(tmp_path / "no"), "--as", "dcp", "--merge")
    assert done.returncode == 64 and not (tmp_path / "no").exists()

    shutil.rmtree(tmp_path / "model")
    (tmp_path / f"model-{STEPS}").rename(tmp_path / "model")
    for checkpoint in (output / "checkpoints").glob("step-4.*"):
        shutil.rmtree(checkpoint)
    log = output / "run.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"event": "end"' not in line))
    done = spillway(*command, "--max-restarts", "0")
    assert done.returncode == 64 and "weights of spec.model.source" in done.stdout + done.stderr, done.stderr


@pytest.mark.ci
def test_plan_shows_a_model_that_had_to_be_built(text: Path, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump(document_of(MODELS["adapters"], text)))
    done = spillway("plan", str(job), "--node", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
