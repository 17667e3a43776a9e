"""`spillway run`, `ckpt` and `report` with the real trainer, on a model with some thousand parameters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spillway.errors import ExitCode
from spillway_cli.__main__ import run_app
from spillway_cli.record.log import read_run_log

JOB = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {{name: tiny}}
spec:
  model:
    config: {{architecture: llama, hiddenSize: 32, numLayers: 2, numHeads: 2, intermediateSize: 64, vocabSize: 300}}
  data: {{text: {{claim: corpus}}}}
  training: {{steps: {steps}, sequenceLength: 32, globalBatchSize: 4, microBatchSize: 2}}
  memory: {{budget: {{device: 8Mi, host: 32Mi, nvme: 32Mi}}, advanced: {{optimizer: {{placement: Host}}}}}}
  checkpoint: {{everySteps: {every}, keep: 2}}
  scheduling: {{queueName: team-a}}
"""
WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "runs",
    "away",
    "from",
    "every",
    "other",
    "animal",
    "in",
    "the",
    "forest",
]


def make_job(directory: Path, steps: int, every: int) -> tuple[str, str]:
    """Writes a job file and its text; returns the file's path and the claim, as the command line takes them."""
    corpus = directory / "corpus"
    corpus.mkdir(parents=True)
    for number in range(8):
        words = [WORDS[(index * (number + 3) + index // 7) % len(WORDS)] for index in range(2000)]
        (corpus / f"{number}.txt").write_text(" ".join(words))
    job = directory / "job.yaml"
    job.write_text(JOB.format(steps=steps, every=every))
    return str(job), f"corpus={corpus}"


def command(job: str, claim: str, output: Path) -> list[str]:
    return ["run", job, "--output", str(output), "--claim", claim, "-o", "json"]


class Finished:
    """A finished run: its directory, its command, its output and its exit code."""

    def __init__(self, path: Path, arguments: list[str], out: str, err: str, code: int) -> None:
        self.path, self.arguments, self.err, self.code = path, arguments, err, code
        self.document: dict[str, Any] = json.loads(out)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    directory = tmp_path_factory.mktemp("run")
    job, claim = make_job(directory, steps=6, every=2)
    arguments = command(job, claim, directory / "out")
    done = subprocess.run(
        [sys.executable, "-m", "spillway_cli", *arguments], capture_output=True, text=True, check=False
    )
    return Finished(directory / "out", arguments, done.stdout, done.stderr, done.returncode)


@pytest.fixture
def copied(finished: Finished, tmp_path: Path) -> Path:
    """A copy of the finished run, which a test may damage."""
    return Path(shutil.copytree(finished.path, tmp_path / "copy"))


def test_run_ends_with_all_steps(finished: Finished) -> None:
    assert (finished.code, finished.document["steps"], finished.document["reason"]) == (0, 6, "Completed")


def test_run_says_what_it_does_before_the_first_step(finished: Finished) -> None:
    before = finished.err.partition("step 1/6")[0]
    told = [
        "building the model ...",
        "corpus: building from",
        "tokenizer: choosing tokens ...",
        "corpus: encoding, 0 B of",
        "initialising weights ...",
    ]
    places = [before.find(one) for one in told]
    assert -1 not in places and places == sorted(places), before
    log = (finished.path / "attempts" / "attempt-1" / "trainer.log").read_text()
    assert "corpus: encoding, 0 B of" in log


def test_run_writes_its_files_below_output_and_nothing_else(finished: Finished) -> None:
    names = {path.name for path in finished.path.iterdir()}
    assert names == {"job.json", "plan.json", "run.jsonl", "report.html", "corpus", "checkpoints", "attempts"}
    assert {path.name for path in finished.path.parent.iterdir()} == {"out", "corpus", "job.yaml"}


def test_run_names_fields_that_only_a_cluster_honours(finished: Finished) -> None:
    assert "not used locally: spec.scheduling.queueName" in finished.err


def test_run_stays_within_its_budgets(finished: Finished) -> None:
    tiers = finished.document["tiers"].values()
    assert all(tier["peakBytes"] <= tier["budgetBytes"] for tier in tiers)


def test_finished_run_is_complete_when_started_again(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    before = len(read_run_log(finished.path / "run.jsonl").starts)
    assert run_app(finished.arguments) == 0
    assert "already complete" in capsys.readouterr().err
    assert len(read_run_log(finished.path / "run.jsonl").starts) == before


@pytest.mark.parametrize("lost", ["the last", "all"])
def test_a_finished_run_without_its_result_is_not_complete(
    finished: Finished, tmp_path: Path, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(finished.path, copy)
    for checkpoint in (copy / "checkpoints").glob("step-6.*" if lost == "the last" else "step-*"):
        shutil.rmtree(checkpoint)
    code = run_app([str(copy) if each == str(finished.path) else each for each in finished.arguments])
    said = "".join(capsys.readouterr())
    if lost == "all":
        assert code == ExitCode.CHECKPOINT_CORRUPT
        assert "the checkpoint of step 6 is missing" in said
    else:
        assert code == ExitCode.COMPLETED
        assert read_run_log(copy / "run.jsonl").starts[-1].resumed_from_step == 4
        assert list((copy / "checkpoints").glob("step-6.*"))


def test_ckpt_ls_shows_the_kept_checkpoints(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["ckpt", "ls", str(finished.path), "-o", "json"]) == 0
    assert [one["step"] for one in json.loads(capsys.readouterr().out)["checkpoints"]] == [6, 4]


def test_run_resumes_from_its_own_imported_export_as_if_never_stopped(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "out", tmp_path / "again"
    assert run_app(["ckpt", "export", str(finished.path), "--to", str(out), "--step", "4", "--as", "universal"]) == 0
    _, job, _, _, _, claim, *_ = finished.arguments
    capsys.readouterr()
    options = ["--job", job, "--claim", claim, "--output", str(again), "-o", "json"]
    assert run_app(["ckpt", "import", str(out), *options]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["checkpoint"], document["step"], document["updates"]) == ("step-4.e1", 4, 4)
    assert (document["format"], document["run"]) == ("DeepSpeed universal", str(again))
    assert {path.name for path in again.iterdir()} == {"job.json", "plan.json", "corpus", "checkpoints"}
    assert str(tmp_path / "again.") not in (again / "job.json").read_text(), "paths of the directory that was renamed"
    done = subprocess.run(
        [sys.executable, "-m", "spillway_cli", *command(job, claim, again)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    whole, rest = (read_run_log(path / "run.jsonl").steps for path in (finished.path, again))
    losses = {step: whole[step].metrics.loss for step in whole if step > 4}
    assert {step: rest[step].metrics.loss for step in rest} == losses and len(losses) == 2
    ends = [next((path / "checkpoints").glob("step-6.e*")) for path in (finished.path, again)]
    files = [{path.name: path.read_bytes() for path in end.glob("*.safetensors")} for end in ends]
    assert files[0] == files[1]


def test_ckpt_import_rejects_an_existing_directory_and_leaves_none_behind(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, job, _, _, _, claim, *_ = finished.arguments
    options = ["--job", job, "--claim", claim, "--output"]
    assert run_app(["ckpt", "import", str(tmp_path), *options, str(finished.path)]) == 64
    assert "already exists" in capsys.readouterr().err
    assert run_app(["ckpt", "import", str(tmp_path), *options, str(tmp_path / "new")]) == 64
    assert "no checkpoint with optimizer states" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--as", "universal", "--dtype", "float32"], "--dtype float32: --as universal always writes float32 states"),
        (["--optimizer", "deepspeed"], "--optimizer deepspeed: only applies to --as universal"),
        (["--as", "zero"], "'zero': use huggingface, universal or dcp"),
    ],
)
def test_ckpt_export_rejects_options_of_another_form(
    finished: Finished, tmp_path: Path, options: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["ckpt", "export", str(finished.path), "--to", str(tmp_path / "out"), *options]) == 64
    assert sentence in " ".join(capsys.readouterr().err.split())


def test_ckpt_verify_passes_what_was_written(finished: Finished, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["ckpt", "verify", str(finished.path)]) == 0
    assert "2 checkpoints verified, no byte differs" in capsys.readouterr().out


def test_ckpt_verify_without_a_checkpoint_fails(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(copied / "checkpoints")
    assert run_app(["ckpt", "verify", str(copied)]) == 64
    assert "no checkpoint to verify" in capsys.readouterr().err


def with_a_flipped_bit(checkpoint: Path) -> Path:
    """Flips a bit in a file of the checkpoint; returns the file's path."""
    file = next(checkpoint.glob("*.safetensors"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    return file


def test_a_damaged_checkpoint_is_passed_over_in_words(
    finished: Finished, copied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = with_a_flipped_bit(copied / "checkpoints" / "step-6.e1")
    assert run_app(["ckpt", "export", str(copied), "--to", str(tmp_path / "hf"), "-o", "json"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document["checkpoint"] == "step-4.e1" and f"step-6.e1/{file.name}" in document["passedOver"][0]
    assert "skipped checkpoint: step-6.e1" in printed.err
    assert run_app([str(copied) if word == str(finished.path) else word for word in finished.arguments]) == 0
    assert "skipped checkpoint: step-6.e1" in capsys.readouterr().err


def test_ckpt_verify_finds_a_flipped_bit(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = with_a_flipped_bit(copied / "checkpoints" / "step-4.e1")
    assert run_app(["ckpt", "verify", str(copied)]) == 74
    assert f"step-4.e1/{file.name}" in capsys.readouterr().out


def test_ckpt_export_writes_a_hugging_face_directory(finished: Finished, tmp_path: Path) -> None:
    assert run_app(["ckpt", "export", str(finished.path), "--to", str(tmp_path / "hf")]) == 0
    names = {path.name for path in (tmp_path / "hf").iterdir()}
    assert names == {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}


def test_ckpt_export_of_the_checkpoint_directory_finds_the_tokenizer(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["ckpt", "export", str(finished.path / "checkpoints"), "--to", str(tmp_path / "hf")]) == 0
    tokenizer = (finished.path / "corpus" / "tokenizer.json").read_bytes()
    assert (tmp_path / "hf" / "tokenizer.json").read_bytes() == tokenizer
    copy = shutil.copytree(finished.path / "checkpoints", tmp_path / "elsewhere")
    assert run_app(["ckpt", "export", str(copy), "--to", str(tmp_path / "none")]) == 64
    assert "its tokenizer.json was not found in" in capsys.readouterr().err


def test_ckpt_export_of_a_step_without_checkpoint_names_those_there_are(
    finished: Finished, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["ckpt", "export", str(finished.path), "--to", str(tmp_path / "hf"), "--step", "5"]) == 64
    assert "available steps: 6, 4" in capsys.readouterr().err


def test_report_can_be_written_elsewhere(finished: Finished, tmp_path: Path) -> None:
    assert run_app(["report", str(finished.path), "--output", str(tmp_path / "r.html")]) == 0
    assert "tiny" in (tmp_path / "r.html").read_text(encoding="utf-8")


@pytest.mark.ci
def test_run_extended_under_a_constant_schedule_equals_the_uninterrupted_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trains 10 steps and then 20, and compares losses and the last checkpoint's bytes. Checkpoints name the job to
    which they belong."""
    job, claim = make_job(tmp_path, steps=20, every=5)
    text = Path(job).read_text().replace("training: {", "training: {schedule: {name: Constant, warmupSteps: 3}, ")
    Path(job).write_text(text)
    shorter = tmp_path / "shorter.yaml"
    shorter.write_text(text.replace("steps: 20", "steps: 10"))
    extended, whole = tmp_path / "extended", tmp_path / "whole"
    assert [run_app(command(str(shorter), claim, extended)), run_app(command(job, claim, extended))] == [0, 0]
    said = capsys.readouterr().err
    assert "spec.training.steps was 10, is now 20" in said and "resumed from the checkpoint of step 10" in said
    assert run_app(command(job, claim, whole)) == 0
    curves = [read_run_log(path / "run.jsonl").steps for path in (extended, whole)]
    losses = [{step: one.metrics.loss for step, one in curve.items()} for curve in curves]
    assert losses[0] == losses[1] and [*losses[0]] == [*range(1, 21)]
    ends = [next((path / "checkpoints").glob("step-20.e*")) for path in (extended, whole)]
    files = [{file.name: file.read_bytes() for file in end.glob("*.safetensors")} for end in ends]
    assert files[0] == files[1]
    capsys.readouterr()
    assert run_app(["ckpt", "ls", str(whole.parent / "extended"), "-o", "json"]) == 0
    listed = {one["step"]: one for one in json.loads(capsys.readouterr().out)["checkpoints"]}
    assert (listed[20]["schedule"]["num_steps"], listed[15]["parent"]) == (20, "step-10.e1")
    assert run_app(command(str(shorter), claim, extended)) == 64, "20 are trained"


@pytest.mark.ci
def test_text_may_be_corrected_after_a_start_that_trained_nothing(tmp_path: Path) -> None:
    """There is too little text, which shows only when the corpus is built. The same directory then accepts the
    corrected text."""
    job, claim = make_job(tmp_path, steps=2, every=2)
    for number in range(1, 8):
        (tmp_path / "corpus" / f"{number}.txt").rename(tmp_path / f"{number}.txt")
    (tmp_path / "corpus" / "0.txt").write_text("the quick brown fox")
    assert run_app(command(job, claim, tmp_path / "out")) == 64
    for number in range(1, 8):
        (tmp_path / f"{number}.txt").rename(tmp_path / "corpus" / f"{number}.txt")
    assert run_app(command(job, claim, tmp_path / "out")) == 0


@pytest.mark.ci
def test_stopped_run_goes_on_with_the_same_command(tmp_path: Path) -> None:
    """After SIGTERM in the middle, the command exits with 75 and leaves a checkpoint. The second one finishes the job,
    and each step is trained once."""
    arguments = command(*make_job(tmp_path, steps=200, every=100), tmp_path / "out")
    process = subprocess.Popen(
        [sys.executable, "-m", "spillway_cli", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("step "):
            break
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate()
    stopped = json.loads(out)
    assert (process.returncode, stopped["reason"]) == (75, "Preempted")
    assert 0 < stopped["steps"] < 200
    assert run_app(arguments) == 0
    log = read_run_log(tmp_path / "out" / "run.jsonl")
    assert log.starts[1].resumed_from_step == stopped["steps"]
    assert sorted(log.steps) == list(range(1, 201))


def test_empty_corpus_is_an_error_and_leaves_no_directory(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    job, claim = make_job(tmp_path, steps=4, every=2)
    for file in (tmp_path / "corpus").iterdir():
        os.truncate(file, 0)
    assert run_app(command(job, claim, tmp_path / "out")) == 64
    assert "all of them are empty" in json.loads(capfd.readouterr().out)["error"]["message"]
    assert not (tmp_path / "out").exists()
