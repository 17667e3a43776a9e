"""The command line itself: help, rejections, exit codes, documents. No trainer is started here."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cases.job_documents import job
from fakes.fake_trainer import attempt_lines, step_line
from harness.places import ROOT
from harness.run_records import plan as made_plan
from spillway.api.job_file import JobFile
from spillway.api.load import load_job, parse_job
from spillway.api.pod import Member, Objective
from spillway.api.training_job import TrainingJob
from spillway.errors import DoesNotFit, ExitCode, UserError
from spillway.plan import MemoryPlan, Tier
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan, shared_memory
from spillway_cli import __main__ as cli
from spillway_cli.console import Format
from spillway_cli.machine.local_node import LocalResources, bytes_in_equal_shares, free_disk_bytes, probe
from spillway_cli.record.attempt_ends import Attempt, read_ended
from spillway_cli.record.directory import RunDirectory, create_run_directory, write_atomic
from spillway_cli.report.command import read_record, write_report
from spillway_cli.run import command as run_command
from spillway_cli.run import local_run
from spillway_cli.run.plan import BudgetOverrides, plan_for_this_machine, with_budget
from spillway_trainer.tiers import volumes

JOB = """\
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: tiny}
spec:
  model:
    config: {architecture: llama, hiddenSize: 256, numLayers: 6, numHeads: 4, intermediateSize: 688, vocabSize: 4096}
  data: {builtin: PythonStdlib}
  training: {steps: 80, sequenceLength: 256, globalBatchSize: 8, microBatchSize: 2}
  memory:
    budget: {device: 64Mi, host: 256Mi, nvme: 1Gi}
    advanced:
      activations: {policy: Nvme}
  checkpoint: {everySteps: 20, keep: 2}
"""
GIB = 2**30


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB, encoding="utf-8")
    return path


def changed(path: Path, *edits: tuple[str, str]) -> Path:
    """The job file with texts replaced."""
    text = path.read_text(encoding="utf-8")
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return path


def run(job: Path, *options: str) -> int:
    return cli.run_app(["run", str(job), "--output", str(job.parent / "out"), *options])


# --- help, version, imports -------------------------------------------------------------------------------------------


def test_help_fits_a_small_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_app(["--help"]) == 0
    assert len(capsys.readouterr().out.splitlines()) <= 24


def test_help_cuts_no_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    cli.run_app(["--help"])
    assert "..." not in capsys.readouterr().out.replace("[ARGS]...", "")


def test_version_is_the_installed_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_app(["--version"]) == 0
    assert re.fullmatch(r"spillway \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["plan", str(ROOT / "examples" / "demo.yaml"), "--node", "h100"],
        ["ckpt", "ls", "."],
        ["top", "."],
        ["doctor"],
    ],
)
def test_command_imports_no_torch(arguments: list[str]) -> None:
    code = (
        f"import sys; from spillway_cli.__main__ import run_app; run_app({arguments!r}); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_help_imports_no_model_of_the_api() -> None:
    code = "import sys; from spillway_cli.__main__ import run_app; run_app(['-h']); sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


# --- exit codes, errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["fly"], ["run"], ["run", "job.yaml", "--fast"], ["report", "x", "-o", "xml"]])
def test_wrong_command_line_is_a_user_error(arguments: list[str]) -> None:
    assert cli.run_app(arguments) == ExitCode.USER_ERROR


def test_missing_job_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "none.yaml") == ExitCode.USER_ERROR
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_every_wrong_field_is_named(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(job_file, ("steps: 80", "steps: -3"), ("sequenceLength", "sequenceLenght"))
    assert run(job_file) == ExitCode.USER_ERROR
    said = capsys.readouterr().err
    assert "spec.training.steps" in said and "sequenceLength?" in said and "Traceback" not in said


def test_rejected_job_leaves_nothing_behind(job_file: Path) -> None:
    run(changed(job_file, ("steps: 80", "steps: -3")))
    assert [path.name for path in job_file.parent.iterdir()] == ["job.yaml"]


def test_json_error_is_one_document_with_the_fields(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(job_file, ("steps: 80", "steps: -3"))
    assert run(job_file, "-o", "json") == ExitCode.USER_ERROR
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["exitCode"], error["reason"]) == (64, "UserError")
    assert [field["path"] for field in error["fields"]] == ["spec.training.steps"]


@pytest.fixture
def unexpected_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`spillway run` meets an error that nobody foresaw; its traceback goes below `tmp_path`."""

    def broken(*_: object) -> None:
        raise KeyError("surprise")

    monkeypatch.setattr(local_run, "reject_wrong_fields", broken)
    monkeypatch.setattr(cli.tempfile, "tempdir", str(tmp_path))


def test_unexpected_error_is_one_line_and_a_file(
    job_file: Path, capsys: pytest.CaptureFixture[str], unexpected_error: None
) -> None:
    assert run(job_file) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert "KeyError" in Path(said[0].split()[-1]).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "arguments",
    [["fly"], ["plan", "job.yaml", "--nodes"], ["run", "job.yaml", "--fast"], ["report", "x", "--step", "1"], ["ckpt"]],
)
def test_wrong_command_line_is_a_document_too(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_app([*arguments, "-o", "json"]) == ExitCode.USER_ERROR
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["exitCode"], error["reason"]) == (64, "UserError") and "spillway --help" in error["message"]


@pytest.mark.parametrize("arguments", [["run", "--help"], ["ckpt", "ls", "--help"]])
def test_help_is_help_with_json_too(arguments: list[str]) -> None:
    assert cli.run_app([*arguments, "-o", "json"]) == 0


def test_unexpected_error_is_a_document_too(
    job_file: Path, capsys: pytest.CaptureFixture[str], unexpected_error: None
) -> None:
    assert run(job_file, "-o", "json") == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["exitCode"], error["reason"]) == (1, "Unexpected") and "KeyError" in error["message"]


def test_what_the_system_rejects_is_a_sentence(
    job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "/private/text")

    monkeypatch.setattr(local_run, "reject_wrong_fields", denied)
    assert run(job_file) == ExitCode.USER_ERROR
    assert capsys.readouterr().err.startswith("spillway: /private/text: Permission denied")


def test_result_on_a_full_disk_is_a_sentence() -> None:
    job = str(ROOT / "examples" / "demo.yaml")
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "spillway_cli", "plan", job, "--node", "cpu"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == ExitCode.USER_ERROR
    assert done.stderr.startswith("spillway: the result: No space left on device")


@pytest.mark.parametrize("words", [[], ["-o", "json"], ["-o", "text"]])
def test_a_reader_that_has_seen_enough_is_no_error(words: list[str]) -> None:
    job = str(ROOT / "examples" / "demo.yaml")
    command = [sys.executable, "-m", "spillway_cli", "plan", job, "--node", "cpu", *words]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (ExitCode.FITS_WITH_SPILLING, "")


INTERRUPTED = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder)
sys.argv = ["spillway", *{arguments!r}]
from spillway_cli.__main__ import main
main()
"""


@pytest.mark.parametrize(
    "module", ["typer", "spillway.errors", "spillway_cli.plan_command", "spillway.planning.planner"]
)
@pytest.mark.parametrize("words", [[], ["-o", "json"]])
def test_ctrl_c_while_anything_is_imported_is_a_sentence(module: str, words: list[str]) -> None:
    arguments = ["plan", str(ROOT / "examples" / "demo.yaml"), "--node", "cpu", *words]
    code = INTERRUPTED.format(module=module, arguments=arguments)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == ExitCode.PREEMPTED
    if words:
        failure = {"exitCode": 75, "reason": "Preempted", "message": "stopped on request"}
        assert (json.loads(done.stdout), done.stderr) == ({"error": failure}, "")
    else:
        assert (done.stdout, done.stderr) == ("", "spillway: stopped on request\n")


@pytest.mark.parametrize("words", [[], ["-o", "json"]])
def test_ctrl_c_in_a_command_is_a_sentence(
    words: list[str], job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(local_run, "reject_wrong_fields", interrupted)
    assert run(job_file, *words) == ExitCode.PREEMPTED
    printed = capsys.readouterr()
    assert "stopped on request" in (printed.out if words else printed.err)
    assert "Aborted" not in printed.err


def test_ctrl_c_stays_pythons_where_we_are_a_library() -> None:
    code = "import signal; signal.signal(2, signal.default_int_handler); import spillway_cli.__main__; "
    code += "assert signal.getsignal(2) is signal.default_int_handler"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_full_disk_names_the_directory_and_leaves_no_folder(
    job_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local_run, "write_atomic", full)
    assert cli.run_app(["run", str(job_file), "--output", str(tmp_path / "out")]) == ExitCode.USER_ERROR
    wanted = f"spillway: --output {tmp_path / 'out'}: No space left on device; free space"
    assert wanted in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_job_that_does_not_fit_leaves_no_folder_but_one_that_was_there(job_file: Path, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for name in ("new", "there"):
        words = ["run", str(job_file), "--output", str(tmp_path / name), "--device", "1Ki"]
        assert cli.run_app(words) == ExitCode.DOES_NOT_FIT
    assert ((tmp_path / "new").exists(), (tmp_path / "there").exists()) == (False, True)


def test_output_that_is_a_file_is_said_to_be_one(job_file: Path) -> None:
    with pytest.raises(UserError, match=r"job\.yaml: is a file; name a directory"):
        create_run_directory(job_file)


@pytest.mark.parametrize("words", [["--output", ""], ["--output="], ["--output", "x", "--spill", ""]])
def test_empty_value_is_rejected_not_taken_for_the_current_directory(
    words: list[str], job_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(job_file.parent)
    assert cli.run_app(["run", job_file.name, *words]) == ExitCode.USER_ERROR
    assert "empty value after --" in capsys.readouterr().err
    assert [path.name for path in job_file.parent.iterdir()] == ["job.yaml"]


def test_character_that_the_terminal_lacks_is_escaped() -> None:
    command = [sys.executable, "-m", "spillway_cli", "plan", str(ROOT / "examples" / "demo.yaml"), "--node", "cpu"]
    environment = {**os.environ, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (ExitCode.FITS_WITH_SPILLING, b"")


def test_exit_code_outlives_a_closed_stderr() -> None:
    command = f"{sys.executable} -m spillway_cli plan none.yaml --node cpu 2>&-"
    assert subprocess.run(["sh", "-c", command], check=False).returncode == ExitCode.USER_ERROR


@pytest.mark.parametrize("command", [["plan", "--node", "cpu"], ["run", "--output", "out"]])
def test_device_budget_of_zero_is_rejected_as_in_the_job(
    command: list[str], job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run_app([*command, str(job_file), "--device", "0"]) == ExitCode.USER_ERROR
    assert "--device 0: the memory budget of a device must be more than 0" in capsys.readouterr().err


def test_metrics_port_in_use_is_rejected_before_anything_starts(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        assert run(job_file, "--metrics-port", str(port)) == ExitCode.USER_ERROR
    assert f"--metrics-port {port}: Address already in use" in capsys.readouterr().err
    assert not (job_file.parent / "out").exists()


def test_spill_directory_that_cannot_be_written_is_named(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job_file, "--spill", str(job_file / "spill")) == ExitCode.USER_ERROR
    assert f"--spill {job_file / 'spill'}: not writable" in capsys.readouterr().err


def test_spill_directory_that_is_missing_is_rejected_and_not_made(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slip = job_file.parent / "nvmee" / "spill"
    assert run(job_file, "--spill", str(slip)) == ExitCode.USER_ERROR
    assert f"--spill {slip}: no such directory; correct it, or create it on" in capsys.readouterr().err
    assert not slip.parent.exists()


@pytest.mark.parametrize(("kind", "is_rejected"), [("tmpfs", True), ("ramfs", True), ("ext4", False)])
def test_spill_directory_in_memory_is_rejected(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_rejected: bool
) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nx {job_file.parent} {kind} rw 0 0\n"
    monkeypatch.setattr(volumes, "read_text", lambda path: mounts)
    (job_file.parent / "spill").mkdir()
    if not is_rejected:
        assert run_command.spill_directories([job_file.parent / "spill"])
        return
    with pytest.raises(UserError, match=rf"--spill .*spill: is in memory \({kind}\), so spilled bytes"):
        run_command.spill_directories([job_file.parent / "spill"])


def in_memory(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = f"/dev/a / ext4 rw 0 0\nx {directory} tmpfs rw 0 0\n"
    monkeypatch.setattr(volumes, "read_text", lambda path: mounts)


def test_run_that_would_spill_beside_an_output_in_memory_is_rejected(
    job_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_memory(job_file.parent, monkeypatch)
    assert run(job_file) == ExitCode.USER_ERROR
    said = capsys.readouterr().err
    assert f"--output {job_file.parent / 'out'}: is in memory (tmpfs), so spilled bytes would use" in said
    assert "name one on a disk, or give --spill a disk's" in said
    assert not (job_file.parent / "out" / "job.json").exists(), "nothing was trained"


def test_demo_whose_output_lies_in_memory_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_memory(tmp_path, monkeypatch)
    assert cli.run_app(["demo", "--output", str(tmp_path / "demo")]) == ExitCode.USER_ERROR
    assert f"--output {tmp_path / 'demo' / 'budget'}: is in memory (tmpfs)" in capsys.readouterr().err


def test_an_output_in_memory_is_no_matter_where_nothing_is_spilled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_memory(tmp_path, monkeypatch)
    plan = make_plan(job(), local_node(6, 4 * GIB, 4 * GIB, GIB), explained=False)
    assert plan.slab_bytes(Tier.NVME) == 0
    local_run.reject_spill_in_memory(tmp_path, plan, "")


def test_spill_directory_that_is_given_twice_is_rejected(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = job_file.parent / "fast"
    fast.mkdir()
    assert run(job_file, "--spill", str(fast), "--spill", f"{fast}/../fast") == ExitCode.USER_ERROR
    assert f"--spill {fast}: given twice; name each volume's directory once" in capsys.readouterr().err


def test_vocabulary_too_small_for_text_is_rejected_before_anything_starts(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(changed(job_file, ("vocabSize: 4096", "vocabSize: 256"))) == ExitCode.USER_ERROR
    assert "spec.model.config.vocabSize = 256: must be at least 257" in capsys.readouterr().err
    assert not (job_file.parent / "out").exists()


def test_budget_that_is_no_quantity_is_rejected(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job_file, "--device", "many") == ExitCode.USER_ERROR
    assert "--device" in capsys.readouterr().err


def test_impossible_budget_says_numbers_and_what_would_fit(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job_file, "--device", "1Mi") == ExitCode.DOES_NOT_FIT
    said = capsys.readouterr().err
    assert (
        re.search(r": \d+(\.\d+)? MiB of device memory missing", said)
        and "what would fit: spec.memory.budget.device" in said
    )


def test_no_traceback_without_a_run_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run_app(["report", str(tmp_path)]) == ExitCode.USER_ERROR
    assert "no run here" in capsys.readouterr().err


def test_demo_rejects_a_directory_of_somebody_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").touch()
    assert cli.run_app(["demo", "--output", str(tmp_path)]) == ExitCode.USER_ERROR
    assert (tmp_path / "thesis.tex").exists()


# --- claims and text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["corpus"], "write NAME=DIRECTORY"),
        (["=x"], "write NAME=DIRECTORY"),
        (["corpus=/does/not/exist"], "is not a directory"),
        (["corpus=/", "corpus=/"], "given twice"),
    ],
)
def test_wrong_claim_is_rejected(texts: list[str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        local_run.parse_claims(texts)


def test_claim_of_the_text_must_be_given(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(job_file, ("builtin: PythonStdlib", "text: {claim: corpus}"))
    assert run(job_file) == ExitCode.USER_ERROR
    assert "--claim corpus=DIRECTORY" in capsys.readouterr().err


def test_text_on_a_claim_must_exist(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(job_file, ("builtin: PythonStdlib", "text: {claim: corpus, subPath: en}"))
    assert run(job_file, "--claim", f"corpus={job_file.parent}") == ExitCode.USER_ERROR
    assert "spec.data.text.subPath = en" in capsys.readouterr().err


def test_path_of_the_text_must_exist(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(job_file, ("builtin: PythonStdlib", "text: {path: /does/not/exist}"))
    assert run(job_file) == ExitCode.USER_ERROR
    assert "spec.data.text.path = /does/not/exist" in capsys.readouterr().err


REJECTED_HERE = {
    "spec.data.text.path": ("{builtin: PythonStdlib", "{text: {path: /does/not/exist}"),
    "spec.data.evaluation.text.path": (
        "{builtin: PythonStdlib", "{builtin: PythonStdlib, evaluation: {text: {path: /does/not/exist}}"
    ),
    "spec.checkpoint.from.path": ("{everySteps: 20,", "{from: {path: /does/not/exist}, everySteps: 20,"),
    "spec.checkpoint.resume": ("{everySteps: 20,", "{resume: Never, everySteps: 20,"),
    "spec.model.config.vocabSize": ("vocabSize: 4096", "vocabSize: 256"),
    "spec.parallelism.device": ("spec:\n", "spec:\n  parallelism: {device: Cuda}\n"),
}  # fmt: skip


@pytest.mark.parametrize("path", REJECTED_HERE)
def test_plan_rejects_what_run_rejects_in_the_same_words(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(JOB, encoding="utf-8")
    changed(job_file, REJECTED_HERE[path])
    assert run(job_file) == ExitCode.USER_ERROR
    by_run = capsys.readouterr().err
    assert cli.run_app(["plan", str(job_file)]) == ExitCode.USER_ERROR
    assert capsys.readouterr().err == by_run
    assert f"{path} = " in by_run


def test_plan_for_several_ranks_is_that_of_a_run_with_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(JOB, encoding="utf-8")
    assert cli.run_app(["plan", str(job_file), "--ranks", "2", "-o", "json"]) in (0, ExitCode.FITS_WITH_SPILLING)
    assert json.loads(capsys.readouterr().out)["world_size"] == 2
    assert cli.run_app(["plan", str(job_file), "--ranks", "2", "--node", "cpu"]) == ExitCode.USER_ERROR
    assert "leave --ranks out" in capsys.readouterr().err


def test_plan_and_run_reject_text_without_a_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job_file, text = tmp_path / "job.yaml", tmp_path / "text"
    job_file.write_text(JOB, encoding="utf-8")
    changed(job_file, ("{builtin: PythonStdlib", f"{{text: {{path: {text}}}"))
    text.touch()
    assert [run(job_file), cli.run_app(["plan", str(job_file)])] == [64, 64]
    assert capsys.readouterr().err.count(f"{text} is empty") == 2
    text.unlink()
    text.mkdir()
    assert [run(job_file), cli.run_app(["plan", str(job_file)])] == [64, 64]
    assert capsys.readouterr().err.count("there is none") == 2


# --- one directory, one run -------------------------------------------------------------------------------------------


def tiny_job(*edits: tuple[str, str]) -> TrainingJob:
    text = JOB
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    return parse_job(text, "job.yaml")


def job_json(job: TrainingJob, **changes: Any) -> JobFile:
    fields: dict[str, Any] = {
        "name": job.metadata.name, "uid": "u", "epoch": 1, "spec": job.spec, "output_directory": "o",
        "corpus_directory": "c", "checkpoint_directory": "p", "spill_directory": "s",
        "termination_message_path": "t", "compute_threads": 3,
    }  # fmt: skip
    return JobFile(**{**fields, **changes})


def trained(directory: Path) -> RunDirectory:
    (directory / "run.jsonl").write_text(json.dumps(step_line(1, 1.0)) + "\n")
    return RunDirectory(directory)


WIDER = ("hiddenSize: 256", "hiddenSize: 512")


def test_a_job_that_never_trained_does_not_bind_its_directory(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "epoch-1.json").write_text("{}")
    local_run.reject_another_run(RunDirectory(tmp_path), tiny_job(WIDER), job_json(tiny_job()))


def made_of_text(directory: Path) -> Path:
    """As build_corpus leaves it."""
    directory.mkdir(parents=True)
    for name in ("index.json", "tokenizer.json"):
        (directory / name).write_text("{}")
    return directory


def test_what_an_untrained_start_made_of_its_text_is_removed(tmp_path: Path) -> None:
    """And the plans of its attempts, which say what another model ran out of; a folder of the user's stays."""
    run = RunDirectory(tmp_path)
    corpora = [made_of_text(tmp_path / name) for name in ("corpus", "corpus-b")]
    notes, plan = tmp_path / "corpus-notes", run.attempt(1) / "plan.json"
    for file in (notes / "index.json", plan):
        file.parent.mkdir(parents=True)
        file.write_text("{}")
    local_run.reject_another_run(run, tiny_job(), job_json(tiny_job()))
    assert all(corpus.is_dir() for corpus in corpora) and plan.is_file(), "the same job uses them again"
    local_run.reject_another_run(run, tiny_job(WIDER), job_json(tiny_job()))
    assert not any(corpus.exists() for corpus in corpora) and not plan.exists() and notes.is_dir()


def test_text_that_a_start_was_rejected_for_may_be_corrected(tmp_path: Path) -> None:
    """The same job again: the path is right, what lies there was not."""
    corpus, end = made_of_text(tmp_path / "corpus"), {"event": "end", "time": 1.0, "step": 0, "message": ""}
    for code, stays in ((137, True), (64, False)):
        (tmp_path / "run.jsonl").write_text(json.dumps(end | {"reason": "", "exit_code": code}) + "\n")
        local_run.reject_another_run(RunDirectory(tmp_path), tiny_job(), job_json(tiny_job()))
        assert corpus.exists() == stays


def test_a_checkpoint_binds_its_directory(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-4.e1").mkdir(parents=True)
    with pytest.raises(UserError, match="contains a run that this job does not continue"):
        local_run.reject_another_run(RunDirectory(tmp_path), tiny_job(WIDER), job_json(tiny_job()))


def test_directory_of_another_run_lists_every_field_and_both_values(tmp_path: Path) -> None:
    batches = ("sequenceLength: 256, globalBatchSize: 8", "sequenceLength: 128, globalBatchSize: 16")
    other = tiny_job(WIDER, ("numLayers: 6", "numLayers: 4"), ("steps: 80", "steps: 80, seed: 7"), batches)
    with pytest.raises(UserError) as rejected:
        local_run.reject_another_run(trained(tmp_path), other, job_json(tiny_job()))
    first, *fields, last = str(rejected.value).splitlines()
    assert first.endswith("contains a run that this job does not continue:") and "name another directory" in last
    assert [field.strip() for field in fields] == [
        "spec.model.config.hiddenSize was 256, is now 512",
        "spec.model.config.numLayers was 6, is now 4",
        "spec.training.globalBatchSize was 8, is now 16",
        "spec.training.seed was 0, is now 7",
        "spec.training.sequenceLength was 256, is now 128",
    ]


CHANGES = "optimizer: {learningRate: '2e-3'}, schedule: {name: Linear, warmupSteps: 2, finalFraction: '0'}"


def test_steps_schedule_and_rate_may_change_and_are_said(tmp_path: Path) -> None:
    extended = tiny_job(("steps: 80", f"steps: 90, {CHANGES}"))
    assert local_run.reject_another_run(trained(tmp_path), extended, job_json(tiny_job())) == [
        "spec.training.optimizer.learningRate was 0.0003, is now 0.002",
        "spec.training.schedule.finalFraction was 0.1, is now 0.0",
        "spec.training.schedule.name was Cosine, is now Linear",
        "spec.training.schedule.warmupSteps was 0, is now 2",
        "spec.training.steps was 80, is now 90",
    ]


@pytest.mark.parametrize("trace", ["a step", "a checkpoint"])
def test_fewer_steps_than_are_trained_are_rejected(tmp_path: Path, trace: str) -> None:
    run = RunDirectory(tmp_path)
    if trace == "a step":
        run.log.write_text(json.dumps(step_line(40, 1.0)) + "\n")
    else:
        (run.checkpoints / "step-40.e1").mkdir(parents=True)
    local_run.reject_another_run(run, tiny_job(("steps: 80", "steps: 40")), job_json(tiny_job()))
    with pytest.raises(UserError, match=r"spec\.training\.steps is 39, but 40 steps are already trained"):
        local_run.reject_another_run(run, tiny_job(("steps: 80", "steps: 39")), job_json(tiny_job()))


def test_interrupted_run_whose_checkpoints_are_gone_is_rejected(
    job_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Epoch file, job and log are there, and say that a checkpoint was written: nothing is trained again from 0."""
    output = job_file.parent / "out"
    (output / "checkpoints").mkdir(parents=True)
    (output / "checkpoints" / "epoch-1.json").write_text("{}")
    (output / "job.json").write_text(job_json(tiny_job()).model_dump_json())
    (output / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in attempt_lines(1, 1, 7)))
    assert run(job_file) == ExitCode.CHECKPOINT_CORRUPT
    assert "the checkpoint of step 4 is missing; restore it" in " ".join(capsys.readouterr().err.split())
    assert not (output / "attempts").exists()


def test_directory_of_another_name_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"metadata\.name was other, is now tiny"):
        local_run.reject_another_run(trained(tmp_path), tiny_job(), job_json(tiny_job(), name="other"))


def test_budgets_may_change_between_invocations(tmp_path: Path) -> None:
    smaller = tiny_job(("device: 64Mi", "device: 48Mi"), ("policy: Nvme", "policy: Host"))
    local_run.reject_another_run(trained(tmp_path), smaller, job_json(tiny_job()))


def sweep_job(names: str, halving: int | None = None, **rates: str) -> TrainingJob:
    """Members of one letter each; `rates`: learning rate by name."""
    job = tiny_job()
    members = tuple(
        Member(name=name, training={"optimizer": {"learningRate": rates.get(name, "1e-3")}}) for name in names
    )
    changes = {"members": members, "objective": Objective(halving=halving)}
    return job.model_copy(update={"spec": job.spec.model_copy(update=changes)})


def member_event(name: str, event: str, step: int) -> str:
    fields = {"time": 1.0, "member": name, "step": step, "loss": None, "objective": None, "reason": ""}
    return json.dumps({"event": f"member_{event}", **fields}) + "\n"


def trained_sweep(directory: Path, *events: str) -> RunDirectory:
    (directory / "run.jsonl").write_text("".join(events))
    return RunDirectory(directory)


def test_a_sweep_that_has_trained_keeps_what_its_members_are(tmp_path: Path) -> None:
    run, earlier = trained_sweep(tmp_path, member_event("a", "parked", 3)), job_json(sweep_job("ab"))
    with pytest.raises(UserError, match=r"spec\.members\.b\.training\.optimizer\.learningRate was 1e-3, is now 2e-3"):
        local_run.reject_another_run(run, sweep_job("ab", b="2e-3"), earlier)
    with pytest.raises(UserError, match=r"spec\.objective\.halving was absent, is now 5"):
        local_run.reject_another_run(run, sweep_job("ab", halving=5), earlier)


def test_a_sweep_where_one_run_was_trained_is_said_first(tmp_path: Path) -> None:
    run = trained_sweep(tmp_path, member_event("a", "parked", 3))
    one = sweep_job("ab")
    alone = one.model_copy(update={"spec": one.spec.model_copy(update={"members": (), "objective": None})})
    with pytest.raises(
        UserError, match=r"continue:\n  spec\.members: a sweep was trained there, but this job is one run"
    ):
        local_run.reject_another_run(run, alone, job_json(one))


def test_members_join_and_leave_a_sweep_without_rounds(tmp_path: Path) -> None:
    run = trained_sweep(tmp_path, member_event("a", "parked", 3))
    local_run.reject_another_run(run, sweep_job("bc"), job_json(sweep_job("ab")))
    with pytest.raises(UserError, match=r"spec\.members\.a was"):
        local_run.reject_another_run(run, sweep_job("bc", halving=5), job_json(sweep_job("ab", halving=5)))


def test_a_sweep_of_which_no_member_trained_does_not_bind_its_directory(tmp_path: Path) -> None:
    run = trained_sweep(tmp_path, member_event("a", "started", 0), member_event("a", "failed", 0))
    local_run.reject_another_run(run, sweep_job("ab", b="2e-3"), job_json(sweep_job("ab")))
    (tmp_path / "checkpoints" / "members" / "a" / "step-1.e1").mkdir(parents=True)
    with pytest.raises(UserError, match="contains a run that this job does not continue"):
        local_run.reject_another_run(run, sweep_job("ab", b="2e-3"), job_json(sweep_job("ab")))


def test_sweep_is_complete_only_when_every_listed_member_has_ended(tmp_path: Path) -> None:
    end = json.dumps({"event": "end", "time": 2.0, "step": 5, "reason": "Completed", "exit_code": 0, "message": ""})
    events = (member_event("a", "completed", 80), member_event("b", "stopped", 1), end + "\n")
    assert local_run.is_complete(trained_sweep(tmp_path, *events), sweep_job("ab"))
    assert not local_run.is_complete(trained_sweep(tmp_path, *events), sweep_job("abc"))
    assert not local_run.is_complete(trained_sweep(tmp_path, *events[:2]), sweep_job("ab"))
    parked = (events[0], member_event("b", "parked", 1), events[2])
    assert not local_run.is_complete(trained_sweep(tmp_path, *parked), sweep_job("ab"))


def longer(job: TrainingJob, steps: int) -> TrainingJob:
    training = job.spec.training.model_copy(update={"steps": steps})
    return job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})


def test_a_sweep_without_rounds_may_be_given_more_steps(tmp_path: Path) -> None:
    end = json.dumps({"event": "end", "time": 2.0, "step": 160, "reason": "Completed", "exit_code": 0, "message": ""})
    run = trained_sweep(tmp_path, member_event("a", "completed", 80), member_event("b", "completed", 80), end + "\n")
    extended, earlier = longer(sweep_job("ab"), 90), job_json(sweep_job("ab"))
    changed = local_run.reject_another_run(run, extended, earlier)
    assert changed == ["spec.training.steps was 80, is now 90"]
    assert local_run.is_complete(run, sweep_job("ab")) and not local_run.is_complete(run, extended)
    with pytest.raises(UserError, match="steps of member a is 70, but 80 steps are already trained"):
        local_run.reject_another_run(run, longer(sweep_job("ab"), 70), earlier)
    rounds = job_json(sweep_job("ab", halving=5))
    with pytest.raises(UserError, match="steps was 80, is now 90"):
        local_run.reject_another_run(run, longer(sweep_job("ab", halving=5), 90), rounds)


def test_checkpoints_without_a_job_file_are_rejected(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(UserError, match=r"no job\.json"):
        local_run.reject_another_run(RunDirectory(tmp_path), tiny_job(), None)


def test_resumed_run_keeps_its_uid_and_threads(tmp_path: Path) -> None:
    local = local_run.LocalJob(tiny_job(), {}, tmp_path, (tmp_path,))
    files = local_run.local_files(RunDirectory(tmp_path), local, made_plan(), 64, job_json(tiny_job()))
    assert (files.uid, files.compute_threads) == ("u", 3)


def test_job_file_reads_back_as_the_same_job(tmp_path: Path) -> None:
    run_directory = RunDirectory(tmp_path)
    local = local_run.LocalJob(tiny_job(), {"corpus": tmp_path}, tmp_path / "c", (tmp_path / "s", tmp_path / "t"), 9400)
    local_run.local_files(run_directory, local, made_plan(), 2, None).write(4)
    read = local_run.read_job_file(run_directory.job_file)
    assert read is not None
    assert (read.epoch, read.spec, read.claims) == (4, tiny_job().spec, {"corpus": str(tmp_path)})
    assert read.spill_directories == (str(tmp_path / "s"), str(tmp_path / "t"))


def test_job_file_of_another_version_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"version": 99}')
    with pytest.raises(UserError, match="written by another version of spillway"):
        local_run.read_job_file(tmp_path / "job.json")


def test_output_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="not writable"):
        create_run_directory(tmp_path / "file" / "out")


@pytest.mark.parametrize("option", ["--output", "--spill"])
def test_directory_whose_name_is_no_text_is_a_sentence(option: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"{option} .*not valid UTF-8"):
        create_run_directory(tmp_path / "bad\udcff", option)
    assert not list(tmp_path.iterdir())


def test_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_report_without_room_hides_no_outcome(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = RunDirectory(tmp_path)
    write_atomic(directory.plan_file, made_plan().model_dump_json())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    crash = Attempt(1, 137, "RankCrashed", "killed by SIGKILL")
    assert run_command.finish(directory, tiny_job(), [crash], Format.JSON) == 137
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert (document["exitCode"], document["report"]) == (137, None)
    assert "No space left on device" in printed.err


def summary_of(directory: RunDirectory, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    run_command.finish(directory, tiny_job(), [], Format.JSON)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def attempts_under(directory: RunDirectory, *budgets: int) -> list[MemoryPlan]:
    """One attempt of four steps a host budget, each with a plan.json of its own; the last one made no step yet."""
    plans, lines = [], list[dict[str, Any]]()
    for epoch, budget in enumerate(budgets, 1):
        plans.append(made_plan(budget={**made_plan().budget, Tier.HOST: budget}))
        directory.attempt(epoch).mkdir(parents=True)
        for file in (directory.plan_file, directory.attempt(epoch) / "plan.json"):
            write_atomic(file, plans[-1].model_dump_json())
        for line in attempt_lines(epoch, 4 * epoch - 3, 4 * epoch) if epoch < len(budgets) else ():
            if line["event"] == "step":
                line["tier_peak_bytes"] = {"host": budget // 2 + line["step"]}
            lines.append(line)
    directory.log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return plans


@pytest.mark.parametrize(
    ("budgets", "shown", "peak"), [((900, 300, 500), 300, 158), ((300, 300, 500), 300, 158), ((900, 500), 900, 454)]
)
def test_measured_bytes_are_shown_with_the_plan_they_were_made_under(
    tmp_path: Path, budgets: tuple[int, ...], shown: int, peak: int, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    attempts_under(run, *budgets)
    host = summary_of(run, capsys)["tiers"]["host"]
    assert (host["budgetBytes"], host["peakBytes"]) == (shown, peak)
    capsys.readouterr()
    assert cli.run_app(["report", str(tmp_path), "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["planAgainstReality"]["tiers"]["host"]["measuredBytes"] == peak


def test_what_was_not_measured_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path)
    attempts_under(run, 300)
    found = summary_of(run, capsys)
    names = ("firstLoss", "finalLoss", "evaluationLoss", "tokensPerSecond", "stepSeconds")
    assert [found[name] for name in names] == [None] * 5
    assert {tier["peakBytes"] for tier in found["tiers"].values()} == {None}
    page = run.report.read_text(encoding="utf-8")
    assert "not finite" not in page and "0 tok/s" not in page


def test_report_that_cannot_be_written_names_the_option(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    write_atomic(directory.plan_file, made_plan().model_dump_json())
    with pytest.raises(UserError, match="name another --output"):
        write_report(read_record(directory), tmp_path / "none" / "report.html")


def test_summary_without_a_step_shows_no_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = RunDirectory(tmp_path)
    write_atomic(directory.plan_file, made_plan().model_dump_json())
    rejected = Attempt(1, 64, "UserError", "no text")
    assert run_command.finish(directory, tiny_job(), [rejected], Format.TEXT) == 64
    printed = capsys.readouterr().out
    assert "0 of 80" in printed and "not finite" not in printed


@pytest.mark.parametrize(
    ("attempt", "sentence"),
    [
        (Attempt(1, 64, "UserError", "no text."), "ended: UserError: no text. Log: "),
        (Attempt(1, 75, "Preempted", "stopped"), "stopped before the first step; run the same command to start again"),
    ],
)
def test_closing_sentence_is_well_formed(attempt: Attempt, sentence: str, tmp_path: Path) -> None:
    assert run_command.closing_sentence(attempt, 0, RunDirectory(tmp_path)).startswith(sentence)


@pytest.mark.parametrize("content", ["{}", '{"exitCode": "many"}', '{"exitCode": 1, "reason": 2}', "[]", "half"])
def test_damaged_record_of_an_end_is_none(content: str, tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.attempt(1).mkdir(parents=True)
    (directory.attempt(1) / "ended.json").write_text(content)
    assert read_ended(directory, 1) is None


def test_nodes_and_devices_are_used_when_ranks_stand_for_as_many() -> None:
    job = tiny_job(("spec:\n", "spec:\n  parallelism: {nodes: 2, devicesPerNode: 2}\n"))
    counts = ["spec.parallelism.devicesPerNode", "spec.parallelism.nodes"]
    assert local_run.unused_fields(job.spec, num_ranks=4) == []
    assert local_run.unused_fields(job.spec, num_ranks=2) == counts == local_run.unused_fields(job.spec)


def test_ranks_that_cannot_share_the_batch_are_rejected(job_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(job_file, "--ranks", "3") == 64
    assert "globalBatchSize = 8: must be a multiple of microBatchSize x ranks (2 x 3)" in capsys.readouterr().err


@pytest.mark.parametrize(("cores", "ranks", "threads"), [(8, 2, 4), (8, 3, 2), (1, 2, 1)])
def test_ranks_share_the_cores_and_get_a_launcher(tmp_path: Path, cores: int, ranks: int, threads: int) -> None:
    run_directory = RunDirectory(tmp_path)
    local = local_run.LocalJob(tiny_job(), {}, tmp_path, (tmp_path,), num_ranks=ranks)
    local_run.local_files(run_directory, local, made_plan(), cores, None).write(1)
    read = local_run.read_job_file(run_directory.job_file)
    assert read is not None
    assert (read.ranks_per_node, read.num_nodes, read.compute_threads) == (ranks, 1, threads)
    assert local_run.trainer_command(run_directory, ranks)[-2] == "spillway_trainer.launch"
    assert local_run.trainer_command(run_directory, 1)[-2] == "spillway_trainer"


def test_checkpoint_claim_is_not_used_locally() -> None:
    job = tiny_job(("keep: 2", "keep: 2, claim: ckpt"))
    assert local_run.unused_fields(job.spec) == ["spec.checkpoint.claim"]


# --- this machine -----------------------------------------------------------------------------------------------------


def machine(root: Path, cgroup: str, files: dict[str, str], available_kib: int = 8 << 20) -> Path:
    for name, text in {
        "proc/meminfo": f"MemTotal: 99 kB\nMemAvailable:    {available_kib} kB\n",
        "proc/self/cgroup": cgroup,
        **files,
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_directories_on_one_volume_share_it_and_the_smallest_share_decides(tmp_path: Path) -> None:
    large, small = (1, 12 * GIB), (2, 5 * GIB)
    assert bytes_in_equal_shares([large]) == 12 * GIB
    assert bytes_in_equal_shares([large, large]) == 12 * GIB
    assert bytes_in_equal_shares([large, small]) == 2 * 5 * GIB
    assert bytes_in_equal_shares([large, large, large, small]) == 4 * 4 * GIB
    assert free_disk_bytes([tmp_path, tmp_path]) <= free_disk_bytes([tmp_path]) + GIB


V2 = {"sys/fs/cgroup/pod/box/memory.max": "max\n", "sys/fs/cgroup/pod/box/memory.current": "1000\n"}


def test_memory_without_a_limit_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    assert probe(tmp_path, machine(tmp_path, "0::/\n", {})).memory_bytes == 8 * GIB


def test_memory_limit_of_an_outer_cgroup_binds(tmp_path: Path) -> None:
    limits = {"sys/fs/cgroup/pod/memory.max": f"{2 * GIB}\n", "sys/fs/cgroup/pod/memory.current": f"{GIB // 2}\n"}
    assert probe(tmp_path, machine(tmp_path, "0::/pod/box\n", V2 | limits)).memory_bytes == 2 * GIB - GIB // 2


def test_page_cache_in_a_cgroup_does_not_count_as_used(tmp_path: Path) -> None:
    files = {
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 4}\n",
    }
    assert probe(tmp_path, machine(tmp_path, "0::/\n", files)).memory_bytes == GIB // 4


def test_memory_limit_of_cgroup_v1_binds(tmp_path: Path) -> None:
    directory = "sys/fs/cgroup/memory/docker/abc"
    files = {f"{directory}/memory.limit_in_bytes": f"{GIB}\n", f"{directory}/memory.usage_in_bytes": "0\n"}
    root = machine(tmp_path, "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n", files)
    assert probe(tmp_path, root).memory_bytes == GIB


def test_no_limit_of_cgroup_v1_is_no_limit(tmp_path: Path) -> None:
    directory = "sys/fs/cgroup/memory"
    files = {f"{directory}/memory.limit_in_bytes": "9223372036854771712\n", f"{directory}/memory.usage_in_bytes": "0\n"}
    assert probe(tmp_path, machine(tmp_path, "4:memory:/\n", files)).memory_bytes == 8 * GIB


def test_container_without_its_own_cgroup_namespace_uses_the_mount(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{GIB}\n", "sys/fs/cgroup/memory.current": "0\n"}
    assert probe(tmp_path, machine(tmp_path, "0::/kubepods/pod1/c1\n", files)).memory_bytes == GIB


@pytest.mark.parametrize(("limit", "said"), [
    (f"{500 * 2**20}", "this container's memory limit leaves 500 MiB, but the trainer itself needs"),
    ("max", "this machine has free 500 MiB, but the trainer itself needs"),
])  # fmt: skip
def test_memory_below_the_trainers_own_need_is_named_with_its_limit(limit: str, said: str, tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": f"{limit}\n", "sys/fs/cgroup/memory.current": "0\n"}
    found = probe(tmp_path, machine(tmp_path, "0::/\n", files, available_kib=(500 if limit == "max" else 8000) << 10))
    with pytest.raises(DoesNotFit, match=said):
        plan_for_this_machine(tiny_job(), found)


def test_cpu_quota_bounds_the_cores(tmp_path: Path) -> None:
    assert probe(tmp_path, machine(tmp_path, "0::/\n", {"sys/fs/cgroup/cpu.max": "150000 100000\n"})).cores == 1


def test_host_tier_gets_what_the_device_leaves() -> None:
    assert shared_memory(tiny_job(("host: 256Mi, ", "")), GIB).host_bytes == GIB - 64 * 2**20


def test_device_without_a_budget_leaves_memory_to_the_host_tier() -> None:
    job = tiny_job(("device: 64Mi, host: 256Mi, ", ""))
    assert (shared_memory(job, 4 * GIB).device_bytes, shared_memory(job, 4 * GIB).host_bytes) == (3 * GIB, GIB)


def test_memory_is_split_25_to_75_where_a_run_fits_in_no_other_way() -> None:
    """As in a cluster (test_placement.py): the demo's job, whose optimizer states must lie in host memory."""
    job = load_job(ROOT / "examples" / "demo.yaml")
    budget = {"device": None, "host": None, "nvme": None}
    free = job.spec.memory.model_copy(update={"budget": job.spec.memory.budget.model_copy(update=budget)})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"memory": free})})
    plan = plan_for_this_machine(job, LocalResources(cores=2, memory_bytes=GIB, disk_bytes=GIB))
    assert 2.9 < plan.budget[Tier.HOST] / plan.budget[Tier.DEVICE] < 3.1


def test_budget_on_the_command_line_replaces_the_jobs() -> None:
    job = with_budget(tiny_job(), BudgetOverrides(device="1Gi"))
    assert (job.spec.memory.budget.device, job.spec.memory.budget.host) == (GIB, 256 * 2**20)


# --- what is written down ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", list(ExitCode))
def test_every_exit_code_is_documented(code: ExitCode) -> None:
    text = (ROOT / "docs/exit-codes.md").read_text(encoding="utf-8")
    assert re.search(rf"^\| {code.value} \| {code.reason} ", text, flags=re.MULTILINE)


COMMANDS = (
    ["plan"], ["run"], ["demo"], ["report"], ["submit"], ["status"], ["logs"], ["top"], ["doctor"],
    ["calibrate"],
    ["ckpt", "ls"], ["ckpt", "verify"], ["ckpt", "export"],
)  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_documented(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    cli.run_app([*command, "--help"])
    options = {*re.findall(r"(--[a-z-]+)", capsys.readouterr().out)} - {"--help", "--no-keep"}
    text = (ROOT / "docs/cli.md").read_text(encoding="utf-8")
    section = text.split(f"## spillway {' '.join(command)}\n")[1].split("\n## ")[0]
    assert {option for option in options if option not in section} == {*()}
