"""The profile of this machine: found where it was left; a wrong one is rejected or left aside aloud, never used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.job_documents import text
from spillway.api.profiles import NodeProfileSpec
from spillway.errors import UserError
from spillway.feedback.profiles import MEASURED, document, rates_from, with_rates
from spillway.planning.hardware import local_node
from spillway.units import GIB
from spillway_cli.__main__ import run_app
from spillway_cli.machine.node_profile import (
    FILE_NAMES,
    check_writable,
    default_path,
    named_node,
    own_profile,
    read_profile,
    write_profile,
)

FIGURES: dict[str, Any] = {
    "deviceKind": "Cpu",
    "numCores": 2,
    "bfloat16FlopsPerSecond": "1.23e11",
    "float32FlopsPerSecond": "1e11",
    "deviceBytesPerSecond": "9e9",
    "dramBytesPerSecond": "9e9",
    "cpuBytesPerSecond": "9e9",
    "nvmeReadBytesPerSecond": "1e9",
    "nvmeWriteBytesPerSecond": "1e9",
    "operationOverheadSeconds": "2e-5",
    "link": {"h2dBytesPerSecond": "4e9", "d2hBytesPerSecond": "4e9"},
    "measuredTime": "2026-11-21T19:09:46Z",
}


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state directory of a user who has measured nothing yet."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "spillway" / FILE_NAMES["Cpu"]


def written(path: Path, **changes: Any) -> Path:
    write_profile(path, document("here", NodeProfileSpec.model_validate({**FIGURES, **changes}), {}), "measured")
    return path


def test_a_profile_that_was_written_reads_as_it_was(tmp_path: Path) -> None:
    path = written(tmp_path / "deep" / "node.yaml")
    assert read_profile(path).spec == NodeProfileSpec.model_validate(FIGURES)
    assert path.read_text().startswith("# measured\n")


def test_the_file_is_what_kubectl_would_apply(tmp_path: Path) -> None:
    found = yaml.safe_load(written(tmp_path / "node.yaml").read_text())
    assert (found["apiVersion"], found["kind"], found["metadata"]) == (
        "spillway.dev/v1alpha1", "NodeProfile", {"name": "here"},
    )  # fmt: skip
    assert found["spec"]["link"] == {"h2dBytesPerSecond": "4000000000.0", "d2hBytesPerSecond": "4000000000.0"}


def test_what_an_api_server_adds_is_no_obstacle(tmp_path: Path) -> None:
    path = written(tmp_path / "node.yaml")
    found = yaml.safe_load(path.read_text())
    found["metadata"] |= {"uid": "1", "resourceVersion": "2", "creationTimestamp": "x", "managedFields": []}
    path.write_text(yaml.safe_dump(found))
    assert read_profile(path).spec.num_cores == 2


# --- which one is used ------------------------------------------------------------------------------------------------


def test_without_a_profile_the_catalog_counts_and_the_command_is_named(state: Path) -> None:
    own = own_profile(2)
    assert own.spec is None
    assert "catalog" in own.sentence and "spillway calibrate" in own.sentence


def test_the_profile_that_calibrate_left_is_used_and_named(state: Path) -> None:
    written(state)
    own = own_profile(2)
    assert own.spec is not None
    assert own.sentence == f"rates measured on 2026-11-21 ({state})"
    assert default_path() == state


def test_a_profile_of_other_cores_is_left_aside_aloud(state: Path) -> None:
    written(state)
    own = own_profile(8)
    assert own.spec is None
    assert "not used" in own.sentence and "2 cores, but 8 are usable" in own.sentence


def test_a_profile_of_other_cores_is_rejected_when_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="measured with 2 cores, but 8"):
        own_profile(8, given=written(tmp_path / "node.yaml"))


def test_a_profile_of_a_gpu_node_is_not_about_this_cpu(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="deviceKind = Cuda"):
        own_profile(2, given=written(tmp_path / "node.yaml", deviceKind="Cuda"))


def test_a_profile_without_a_rate_is_no_measurement(state: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(HEAD)
    with pytest.raises(UserError, match="contains no measured rate"):
        own_profile(2, given=state)
    own = own_profile(2)
    assert own.spec is None
    assert own.sentence.startswith("profile not used") and own.sentence.endswith("Using catalog rates")


def test_what_was_not_measured_is_named(state: Path) -> None:
    written(state, nvmeReadBytesPerSecond=None, link={"h2dBytesPerSecond": "4e9"})
    assert own_profile(2).sentence == (
        f"7 of 9 rates measured on 2026-11-21 ({state}); from the catalog: nvmeReadBytesPerSecond, d2hBytesPerSecond"
    )


@pytest.mark.parametrize("moment", ["3026-99-99T99:99:99Z", "yesterday", ""])
def test_a_time_of_measurement_that_is_none_is_rejected(moment: str, state: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(f"{HEAD}bfloat16FlopsPerSecond: '1e9'\n  measuredTime: '{moment}'\n")
    with pytest.raises(UserError, match=r"measuredTime.*a time is needed, for example 2026"):
        own_profile(2, given=state)


def test_a_gpu_without_memory_could_be_any(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(HEAD.replace("Cpu", "Cuda"))
    with pytest.raises(UserError, match=r"spec\.deviceMemory: missing"):
        named_node(str(path))


def test_what_is_nested_too_deeply_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("[" * 20_000)
    with pytest.raises(UserError, match="nested too deeply"):
        read_profile(path)


def test_another_kind_of_object_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(text())
    with pytest.raises(UserError) as rejected:
        named_node(str(path))
    assert str(rejected.value) == f"{path}: is a TrainingJob, but a NodeProfile is expected; give a NodeProfile instead"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "(uncalibrated: catalog rates)"),
        ("bfloat16FlopsPerSecond: '1e11'", "predicted from 1 of 9 rates measured; from the catalog: float32Flops"),
    ],
)
def test_a_plan_says_whose_rates_it_is_predicted_from(
    line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, manifest = tmp_path / "node.yaml", tmp_path / "job.yaml"
    path.write_text(HEAD + line + "\n")
    manifest.write_text(text())
    assert run_app(["plan", str(manifest), "--node", str(path)]) in (0, 3)
    printed = capsys.readouterr().out
    assert said in printed
    assert (" on cpu-measured:" in printed) == bool(line)


HOSTILE = {
    "not a number": "bfloat16FlopsPerSecond: .nan",
    "negative": "bfloat16FlopsPerSecond: '-1e9'",
    "infinite": "bfloat16FlopsPerSecond: .inf",
    "zero": "bfloat16FlopsPerSecond: '0'",
    "no rate": "bfloat16FlopsPerSecond: fast",
    "a list": "bfloat16FlopsPerSecond: [1e9]",
    "a day of overhead": "operationOverheadSeconds: '86400'",
    "unknown": "flops: '1e9'",
    "many digits": f"bfloat16FlopsPerSecond: '{'9' * 400}'",
}
HEAD = "apiVersion: spillway.dev/v1alpha1\nkind: NodeProfile\nmetadata: {name: here}\nspec:\n  deviceKind: Cpu\n  "


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_figure_is_rejected_by_name_and_left_aside_at_home(line: str, state: Path, tmp_path: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_text(HEAD + line + "\n")
    with pytest.raises(UserError, match=line.split(":", maxsplit=1)[0]):
        own_profile(2, given=state)
    own = own_profile(2)
    assert own.spec is None
    assert "not used" in own.sentence and "\n" not in own.sentence


FILES = {
    "10 MB": b"a" * 10_000_000,
    "empty": b"",
    "binary": bytes(range(256)),
    "a TrainingJob": text().encode(),
    "a list": b"- 1\n- 2\n",
    "nested": b"[" * 100_000,
    "aliases": b"a: &a [x]\nb: *a\n",
}


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_a_file_that_is_no_profile_is_left_aside(content: bytes, state: Path) -> None:
    state.parent.mkdir(parents=True)
    state.write_bytes(content)
    own = own_profile(2)
    assert own.spec is None
    assert "not used" in own.sentence
    with pytest.raises(UserError):
        own_profile(2, given=state)


def test_a_directory_in_its_place_is_left_aside(state: Path) -> None:
    state.mkdir(parents=True)
    assert "not used" in own_profile(2).sentence


def test_a_named_file_that_is_missing_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file; give the path of a NodeProfile"):
        own_profile(2, given=tmp_path / "none.yaml")


def test_without_a_home_the_output_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(UserError, match="--output"):
        default_path()
    assert own_profile(2).spec is None


def test_output_path_that_cannot_be_written_is_rejected(tmp_path: Path) -> None:
    """Calibration checks this before it measures anything."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "node.yaml", Path("/proc/node.yaml"), tmp_path):
        with pytest.raises(UserError, match="name another file with --output"):
            check_writable(path)


def test_proving_that_it_can_be_written_leaves_nothing(tmp_path: Path) -> None:
    check_writable(tmp_path / "node.yaml")
    assert list(tmp_path.iterdir()) == []


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_rates_are_taken_as_measured_and_capacities_as_they_are_now() -> None:
    free = local_node(2, 3 * GIB, 4 * GIB, 5 * GIB)
    spec = NodeProfileSpec.model_validate({**FIGURES, "hostMemory": "900Gi", "nvmeCapacity": "1Gi"})
    node = with_rates(spec, free)
    assert (node.device_bytes, node.host_bytes, node.nvme_bytes) == (3 * GIB, 4 * GIB, 5 * GIB)
    assert node.bfloat16_flops_per_second == 1.23e11
    assert node.link.h2d_bytes_per_second == 4e9
    assert node.name == f"local{MEASURED}"


def test_a_profile_holds_what_differs_with_three_digits() -> None:
    before = local_node(2, 0, 0, 0)
    spec = NodeProfileSpec.model_validate({"deviceKind": "Cpu", "link": {"h2dBytesPerSecond": "123456789"}})
    made = rates_from(with_rates(spec, before), before, NodeProfileSpec.model_validate({"deviceKind": "Cpu"}))
    assert made.link.h2d_bytes_per_second == 123e6
    assert made.float32_flops_per_second is None and made.link.d2h_bytes_per_second is None


def test_node_takes_a_profile_file_or_a_class_of_the_catalog(tmp_path: Path) -> None:
    assert named_node("h100").node.name == "8x-h100-80"
    assert named_node(str(written(tmp_path / "node.yaml"))).node.bfloat16_flops_per_second == 1.2e11
    gpu = named_node(str(written(tmp_path / "gpu.yaml", deviceKind="Cuda", deviceMemory="80Gi", numDevices=4))).node
    assert (gpu.device_kind, gpu.num_devices) == ("Cuda", 4)


def test_plan_for_this_machine_says_where_its_rates_come_from(
    tmp_path: Path, state: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(text())
    assert run_app(["plan", str(tmp_path / "job.yaml")]) in {0, 3}
    shown = capsys.readouterr()
    assert "this machine: catalog rates" in shown.err
    assert "step: about " in shown.out and "(uncalibrated: run `spillway calibrate`)" in shown.out


def test_plan_with_a_profile_says_that_its_rates_were_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(text())
    node = written(tmp_path / "node.yaml")
    assert run_app(["plan", str(tmp_path / "job.yaml"), "--node", str(node)]) in {0, 3}
    assert "predicted from measured rates" in capsys.readouterr().out


def test_run_rejects_a_bad_profile_before_it_writes_anything(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(text({"spec.data": {"builtin": "PythonStdlib"}}))
    (tmp_path / "node.yaml").write_text("- nothing\n")
    arguments = ["run", str(tmp_path / "job.yaml"), "--output", str(tmp_path / "out")]
    assert run_app([*arguments, "--node", str(tmp_path / "node.yaml")]) == 64
    assert not (tmp_path / "out").exists()
