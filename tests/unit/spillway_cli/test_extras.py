"""What each command says where an extra of the distribution is not installed: one sentence, before anything starts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from harness.places import ROOT
from spillway.errors import ExitCode
from spillway.extras import EXTRAS, install_command

ABSENT = "import os, sys\nsys.modules.update(dict.fromkeys(os.environ['SPILLWAY_TEST_ABSENT'].split(), None))\n"
"""sitecustomize of a process and of those that it starts: imports of these modules fail, as if they were not there"""
BASE = [name.replace("-", "_") for names in EXTRAS.values() for name in names]
TORCH, HF, DEEPSPEED = ["torch"], ["transformers", "peft"], ["deepspeed"]
RUN = ["--output", "out"]
JOB = "job.yaml"


def job_text(model: str, strategy: str = "Auto") -> str:
    return f"""\
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: tiny}}
spec:
  model: {model}
  data: {{text: {{path: {ROOT / "docs"}}}}}
  training: {{steps: 2, sequenceLength: 16, globalBatchSize: 4, microBatchSize: 2}}
  parallelism: {{strategy: {strategy}}}
"""


SIZES = "{config: {architecture: %s, hiddenSize: 16, numLayers: 2, numHeads: 2, vocabSize: 512}%s}"
LLAMA, GPT2, ADAPTERS = SIZES % ("llama", ""), SIZES % ("gpt2", ""), SIZES % ("llama", ", lora: {rank: 2}")
SOURCE = f"{{source: {{path: {ROOT / 'docs'}}}}}"


def spillway(directory: Path, absent: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "site").mkdir()
    (directory / "site" / "sitecustomize.py").write_text(ABSENT, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(directory / "site"), "SPILLWAY_TEST_ABSENT": " ".join(absent)}
    command = [sys.executable, "-m", "spillway_cli", *arguments]
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)


def deeper(*values: object) -> object:
    """A second on each: these from depth ci on."""
    return pytest.param(*values, marks=pytest.mark.ci)


@pytest.mark.parametrize(
    ("absent", "text", "arguments", "extra"),
    [
        (BASE, LLAMA, ["run", JOB, *RUN], "trainer"),
        deeper(BASE, LLAMA, ["demo"], "trainer"),
        deeper(BASE, LLAMA, ["calibrate"], "trainer"),
        deeper(BASE, LLAMA, ["ckpt", "export", ".", "--to", "out"], "trainer"),
        deeper(BASE, LLAMA, ["ckpt", "import", ".", "--job", JOB, *RUN], "trainer"),
        (BASE, LLAMA, ["status"], "operator"),
        (TORCH, LLAMA, ["run", JOB, *RUN], "trainer"),
        deeper(TORCH, LLAMA, ["demo"], "trainer"),
        (TORCH, LLAMA, ["calibrate"], "trainer"),
        (TORCH, LLAMA, ["ckpt", "export", ".", "--to", "out"], "trainer"),
        deeper(TORCH, LLAMA, ["ckpt", "export", ".", "--to", "out", "--as", "dcp"], "trainer"),
        (TORCH, SOURCE, ["plan", JOB, "--node", "cpu"], "trainer"),
        deeper(HF, SOURCE, ["plan", JOB, "--node", "cpu"], "hf"),
        (HF, ADAPTERS, ["plan", JOB, "--node", "cpu"], "hf"),
        (HF, GPT2, ["run", JOB, *RUN], "hf"),
        (["wandb"], job_text(LLAMA) + "  tracking: {wandb: {project: p}}\n", ["run", JOB, *RUN], "trackers"),
        (DEEPSPEED, job_text(LLAMA, "Zero1"), ["run", JOB, *RUN, "--ranks", "2"], "deepspeed"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "" if "{" in value else value,
)
def test_a_missing_extra_is_one_sentence_with_its_command(
    absent: list[str], text: str, arguments: list[str], extra: str, tmp_path: Path
) -> None:
    (tmp_path / JOB).write_text(text if "spec:" in text else job_text(text), encoding="utf-8")
    (tmp_path / "epoch-1.json").write_text("{}", encoding="utf-8")  # a directory of checkpoints
    done = spillway(tmp_path, absent, *arguments)
    assert (done.returncode, done.stdout) == (ExitCode.USER_ERROR, "")
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("spillway: ")
    assert install_command(extra) in sentence
    assert all(name in sentence for name in absent if name in EXTRAS[extra])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch-1.json", JOB, "site"]


def test_a_missing_extra_is_a_document_with_json(tmp_path: Path) -> None:
    (tmp_path / JOB).write_text(job_text(LLAMA), encoding="utf-8")
    done = spillway(tmp_path, BASE, "run", JOB, *RUN, "-o", "json")
    assert done.returncode == ExitCode.USER_ERROR
    assert json.loads(done.stdout)["error"]["reason"] == "UserError"
    assert install_command("trainer") in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", JOB, "--node", "cpu"],
        ["ckpt", "ls", "."],
        ["ckpt", "verify", "."],
        ["top", "run", "--once"],
        ["doctor"],
    ],
    ids=lambda words: "-".join(words[:2]),
)
def test_what_a_base_installation_can_do_needs_no_extra(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / JOB).write_text(job_text(LLAMA), encoding="utf-8")
    (tmp_path / "epoch-1.json").write_text("{}", encoding="utf-8")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.jsonl").touch()
    done = spillway(tmp_path, BASE, *arguments)
    assert "Traceback" not in done.stderr
    assert "Python packages not installed" not in done.stderr
    assert done.returncode != 1 or arguments == ["doctor"]
