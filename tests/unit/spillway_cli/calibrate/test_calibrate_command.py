"""`spillway calibrate`: what runs and probes become, and what is rejected; the machine itself is not measured here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cases.job_documents import job
from fakes.fake_trainer import start_line, step_line
from spillway.api.job_file import JobFile
from spillway.errors import ExitCode, SpillVolumeFull, UserError
from spillway.metrics import Phase
from spillway.plan import MemoryPlan
from spillway.planning.hardware import NodeSpec, local_node, resolve_node
from spillway.planning.planner import make_plan
from spillway.units import GIB
from spillway_cli.__main__ import run_app
from spillway_cli.calibrate import command as calibrate_command
from spillway_cli.calibrate.command import outcome, probed_node, read_evidence, samples_of
from spillway_cli.machine.node_profile import read_profile
from spillway_trainer.tiers import volumes
from spillway_trainer.tiers.volumes import file_system

CORES = 2
SPEC = {
    "spec.memory.advanced.optimizer.placement": "Host",
    "spec.memory.advanced.parameters.placement": "Resident",
    "spec.training.sequenceLength": 128,  # an update that is 3 % of a step: less is not calibrated
}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(calibrate_command, "usable_cores", lambda _: CORES)
    return tmp_path / "state" / "spillway" / "node-profile.yaml"


def here() -> NodeSpec:
    return local_node(CORES, 4 * GIB, 4 * GIB, 64 * GIB)


def run_directory(path: Path, factor: float, steps: int = 12, threads: int = CORES, **changes: Any) -> Path:
    """A run whose every phase took `factor` times what the catalog predicted."""
    wanted = job(SPEC)
    decided = make_plan(wanted, here())
    assert isinstance(decided, MemoryPlan)
    path.mkdir(parents=True)
    file = JobFile(
        name="slow", uid="u", epoch=1, spec=wanted.spec, output_directory=str(path), corpus_directory=str(path),
        checkpoint_directory=str(path), spill_directory=str(path), termination_message_path=str(path / "end"),
        compute_threads=threads,
    )  # fmt: skip
    (path / "job.json").write_text(file.model_dump_json())
    (path / "plan.json").write_text(decided.model_copy(update=changes).model_dump_json())
    phases = {name: factor * seconds for name, seconds in decided.prediction.phase_seconds.items()}
    lines = [start_line(1, 0, 1.0)]
    for number in range(1, steps + 1):
        line = step_line(number, float(number))
        lines.append({**line, "phase_seconds": phases, "step_seconds": sum(phases.values()), "moved_bytes": {}})
    (path / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def calibrate(*words: str) -> int:
    return run_app(["calibrate", *words])


# --- runs -------------------------------------------------------------------------------------------------------------


def test_a_run_three_times_slower_makes_a_profile_three_times_slower(tmp_path: Path, own_state: Path) -> None:
    assert calibrate("--from", str(run_directory(tmp_path / "run", 3.0))) == 0
    spec = read_profile(own_state).spec
    assert spec.bfloat16_flops_per_second == pytest.approx(here().bfloat16_flops_per_second / 3, rel=1e-2)
    assert spec.cpu_bytes_per_second == pytest.approx(here().cpu_bytes_per_second / 3, rel=1e-2)
    assert (spec.source, spec.num_cores) == ("Training", CORES)
    assert spec.network_bytes_per_second is None, "nothing was measured of it"


def test_calibration_document_lists_corrections_and_new_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate("--from", str(run_directory(tmp_path / "run", 3.0)), "-o", "json")
    document = json.loads(capsys.readouterr().out)
    assert {one["resource"]: round(one["factor"], 3) for one in document["corrections"]} == {
        "compute": 3.0, "update": 3.0,
    }  # fmt: skip
    (run,) = document["runs"]
    assert run["predictedBefore"] == pytest.approx(run["measuredStepSeconds"] / 3, rel=0.05)
    assert run["predictedAfter"] == pytest.approx(run["measuredStepSeconds"], rel=0.05)


def test_the_same_run_again_changes_nothing(tmp_path: Path, own_state: Path) -> None:
    run = str(run_directory(tmp_path / "run", 3.0))
    calibrate("--from", run)
    before = read_profile(own_state).spec
    calibrate("--from", run)
    after = read_profile(own_state).spec
    assert after.bfloat16_flops_per_second == pytest.approx(before.bfloat16_flops_per_second, rel=5e-3)


def test_of_three_runs_the_one_in_the_middle_counts(tmp_path: Path, own_state: Path) -> None:
    runs = [str(run_directory(tmp_path / str(factor), factor)) for factor in (2.0, 15.0, 4.0)]
    calibrate(*(word for run in runs for word in ("--from", run)))
    rate = read_profile(own_state).spec.bfloat16_flops_per_second
    assert rate == pytest.approx(here().bfloat16_flops_per_second / 4, rel=1e-2)


def test_a_plan_after_calibration_predicts_what_was_measured(
    tmp_path: Path, own_state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate("--from", str(run_directory(tmp_path / "run", 3.0)))
    shown = capsys.readouterr().out
    assert f"profile: {own_state}" in shown
    assert "`spillway plan JOB` and `spillway run` use it from now on" in shown


def test_another_output_says_how_it_is_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "mine.yaml"
    assert calibrate("--from", str(run_directory(tmp_path / "run", 2.0)), "--output", str(target)) == 0
    assert f"--node {target}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("steps", "threads", "sentence"),
    [(6, CORES, "at least 5 are required"), (12, 8, "this run used 8 threads, but 2 cores")],
)
def test_a_run_that_tells_nothing_is_rejected_and_nothing_is_written(
    steps: int, threads: int, sentence: str, tmp_path: Path, own_state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_directory(tmp_path / "run", 2.0, steps, threads)
    assert calibrate("--from", str(run)) == ExitCode.USER_ERROR
    assert sentence in capsys.readouterr().err
    assert not own_state.exists()


def test_a_plan_of_an_earlier_version_is_rejected(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", 2.0)
    plan = json.loads((run / "plan.json").read_text())
    del plan["prediction"]["work"]
    (run / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(UserError, match="run the job again with this version"):
        read_evidence(run, CORES)


def overlapping(tmp_path: Path, window: int) -> Path:
    run = run_directory(tmp_path / "run", 2.0)
    plan = json.loads((run / "plan.json").read_text())
    plan["optimizer"] |= {"overlap": "Backward", "speculative_parameters": window}
    (run / "plan.json").write_text(json.dumps(plan))
    return run


@pytest.mark.parametrize(("window", "overlap"), [(0, "Forward"), (4096, "Backward")])
def test_an_update_overlaps_backward_only_where_something_is_updated_there(
    window: int, overlap: str, tmp_path: Path
) -> None:
    assert read_evidence(overlapping(tmp_path, window), CORES).overlap == overlap


def test_what_a_run_cannot_tell_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = overlapping(tmp_path, 4096)
    plan = json.loads((run / "plan.json").read_text())
    plan["prediction"]["work"]["forward"]["D2H"] = 1e9
    (run / "plan.json").write_text(json.dumps(plan))
    assert calibrate("--from", str(run)) == 0
    assert "not corrected by slow: compute, update: the update ran" in " ".join(capsys.readouterr().out.split())


def test_a_directory_without_a_run_is_rejected(tmp_path: Path) -> None:
    assert calibrate("--from", str(tmp_path)) == ExitCode.USER_ERROR


def test_a_home_that_cannot_be_written_is_rejected_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    monkeypatch.setattr(calibrate_command, "run_probe", lambda *_: pytest.fail("measured before it could be kept"))
    assert calibrate("-o", "json") == ExitCode.USER_ERROR
    assert "name another file with --output" in json.loads(capsys.readouterr().out)["error"]["message"]


# --- the probe's answer -----------------------------------------------------------------------------------------------

SAMPLES = [90.0, 100.0, 110.0, 100.0, 100.0]
FIGURES = {
    "disk write": [1e9 * s for s in SAMPLES],
    "disk read": [2e9 * s for s in SAMPLES],
    "matrix product bfloat16 256": [3e9 * s for s in SAMPLES],
    "matrix product float32 256": [2e9 * s for s in SAMPLES],
    "copy": [1.5e8 * s for s in SAMPLES],
    "host memory": [2e8 * s for s in SAMPLES],
    "optimizer update": [3e8 * s for s in SAMPLES],
}
FLOP, OPERATION = {"bfloat16": 4e-12, "float32": 1e-11}, 2e-5


def cell(compute: str, flops: float, operations: float) -> dict[str, Any]:
    """A cell of the probe whose phases cost FLOP and OPERATION and nothing else."""
    amounts = {"flops": flops, "values": 0.0, "operations": operations}
    seconds = flops * FLOP[compute] + operations * OPERATION
    phases = {"forward": seconds, "backward": seconds, "optimizer": 40 * OPERATION, "wait": 0.0}
    step = {**step_line(1, 1.0), "phase_seconds": phases}
    return {
        "compute": compute, "optimizer": "Device", "activations": "Keep", "device": "Cpu", "steps": [step] * 9,
        "work": {"forward": amounts, "backward": amounts, "optimizer": {"operations": 40}},
    }  # fmt: skip


def result(backend: str = "threads+O_DIRECT", load: float = 0.5) -> dict[str, Any]:
    shapes = [(1e9, 20), (4e10, 500), (9e9, 10)]
    cells = [cell(compute, *shape) for compute in ("bfloat16", "float32") for shape in shapes]
    return {"figures": FIGURES, "cells": cells, "backend": backend, "isa": "avx2", "threads": CORES, "loadBefore": load}


def test_a_probe_becomes_a_profile(
    monkeypatch: pytest.MonkeyPatch, own_state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate_command, "run_probe", lambda *_: result())
    assert calibrate() == 0
    spec = read_profile(own_state).spec
    assert spec.bfloat16_flops_per_second == pytest.approx(2.5e11, rel=1e-2)
    assert spec.float32_flops_per_second == pytest.approx(1e11, rel=1e-2)
    assert spec.operation_overhead_seconds == pytest.approx(2e-5, rel=1e-2)
    assert (spec.nvme_write_bytes_per_second, spec.link.h2d_bytes_per_second) == (1e11, 1.5e10)
    assert (spec.cpu_bytes_per_second, spec.dram_bytes_per_second) == (3e10, 3e10)
    assert spec.bfloat16_values_per_second == calibrate_command.FREE, "nothing was left to price"
    assert spec.source == "Probe"
    shown = capsys.readouterr().out
    assert "250 GFLOP/s" in shown and "included in the FLOP rates" in shown and "noise" in shown


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [({"load": 9.0}, "the machine was busy"), ({"backend": "threads+buffered"}, "does not support O_DIRECT")],
)
def test_what_makes_figures_doubtful_is_said(
    changes: dict[str, Any], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate_command, "run_probe", lambda *_: result(**changes))
    calibrate("-o", "json")
    assert any(sentence in note for note in json.loads(capsys.readouterr().out)["notes"])


MOUNTS = """\
/dev/vda / ext4 rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
/dev/sdb /dev/shm/disk\\040one xfs rw 0 0
"""


@pytest.mark.parametrize(
    ("directory", "kind"),
    [("/home/me", "ext4"), ("/dev/shm/spill", "tmpfs"), ("/dev/shm/disk one/spill", "xfs"), ("/dev/shmem", "ext4")],
)
def test_the_file_system_is_that_of_the_nearest_mount(directory: str, kind: str) -> None:
    assert file_system(Path(directory), MOUNTS) == kind


def test_a_directory_in_memory_is_said_to_be_no_disk(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate_command, "run_probe", lambda *_: result())
    monkeypatch.setattr(volumes, "read_text", lambda _: "tmpfs / tmpfs rw 0 0")
    calibrate("-o", "json")
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert any("is in memory (tmpfs)" in note for note in notes)


def test_cells_with_copies_count_as_one_sample_with_their_waiting() -> None:
    made = cell("bfloat16", 1e9, 20)
    made["optimizer"] = "Host"
    both, optimizer = samples_of(made)
    assert both.amounts["flops"] == 2e9
    assert both.seconds == pytest.approx(2 * samples_of(cell("bfloat16", 1e9, 20))[0].seconds)
    assert optimizer.amounts == made["work"][Phase.OPTIMIZER]


def test_of_a_step_on_a_gpu_only_the_whole_counts() -> None:
    (whole,) = samples_of(cell("bfloat16", 1e9, 20) | {"device": "Cuda"})
    assert whole.amounts == {"flops": 2e9, "values": 0.0, "operations": 80.0}
    assert whole.seconds == step_line(1, 1.0)["step_seconds"]


def test_the_probed_node_of_a_gpu_has_its_links() -> None:
    names = {"h2d": 5e10, "d2h": 4e10, "both_ways": 6.3e10, "on_device": 2e12}
    measured = {"figures": FIGURES | {name: [rate, rate] for name, rate in names.items()}}
    node = probed_node(measured, resolve_node("h100"))
    assert (node.link.h2d_bytes_per_second, node.link.d2h_bytes_per_second) == (5e10, 4e10)
    assert node.link.duplex_efficiency == 0.7
    assert (node.device_bytes_per_second, node.cpu_bytes_per_second) == (2e12, 3e10)


def test_the_probed_node_has_the_medians() -> None:
    node = probed_node(result(), local_node(CORES, 0, 0, 0))
    assert node.nvme_read_bytes_per_second == 2e11
    assert node.network_bytes_per_second == here().network_bytes_per_second


def test_the_probes_own_error_is_passed_on() -> None:
    with pytest.raises(SpillVolumeFull, match="no room"):
        outcome({"error": {"exitCode": int(ExitCode.SPILL_VOLUME_FULL), "message": "no room"}}, 72, "")


def test_a_probe_that_dies_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"code -9 \(Killed\)"):
        outcome(None, -9, "x\nKilled\n")


@pytest.mark.parametrize("words", [["--quick"], ["--directory", "."]])
def test_options_of_the_probe_are_rejected_beside_runs(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert calibrate("--from", str(run_directory(tmp_path / "run", 3.0)), *words) == ExitCode.USER_ERROR
    assert f"{words[0]}: has no effect with --from" in capsys.readouterr().err
