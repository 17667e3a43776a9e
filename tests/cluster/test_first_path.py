"""From `kubectl apply` to a trained model: a two-pod CPU job (gloo, NVMe spill, host limit) on the real kubelet."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from harness.chart_queries import until_it_has_data
from harness.installed import CHART, Document, Installed, OperatorImage, example
from harness.patience import wait_until
from spillway.metrics import (
    OPERATOR_ATTEMPTS_ENDED,
    OPERATOR_DEVICE_SECONDS,
    OPERATOR_FIRST_STEP,
    OPERATOR_JOBS,
    OPERATOR_QUEUE_WAIT,
    TIER_BYTES,
    TIER_PEAK_BYTES,
)
from testbed.client import Bed, Request
from testbed.layout import REPOSITORY

NAME = "two-pod"
LARGEST_OPERATOR_IMAGE_BYTES = 250_000_000


@dataclass(frozen=True, slots=True)
class Trained:
    """The job after its end, and what was observed meanwhile."""

    namespace: str
    job: Document
    claim: Path
    seconds: float
    """from creation to Complete"""
    watched: str
    """output of `kubectl get tjob -w`"""
    writes: list[Request]
    bed: Bed
    installed: Installed


@pytest.fixture(scope="module")
def trained(spillway: Installed, module_namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    bed, namespace = spillway.bed, module_namespace
    claim = bed.claim(NAME, namespace)
    since = bed.audit_position()
    watched = tmp_path_factory.mktemp("watch") / "watched.txt"
    command = ["kubectl", "get", "tjob", "-n", namespace, "--watch", "--kubeconfig", str(bed.kubeconfig)]
    started = time.monotonic()
    with watched.open("wb") as output:
        watching = subprocess.Popen([str(bed.state.bin / command[0]), *command[1:]], stdout=output)
    try:
        spillway.create(example(NAME, namespace, training__steps=160))  # long enough for several scrapes
        job = spillway.wait(namespace, NAME, "Complete")
        wait_until(lambda: "Complete" in watched.read_text(encoding="utf-8"), why=lambda: "kubectl does not show it")
    finally:
        watching.kill()
        watching.wait()
    seconds = time.monotonic() - started
    print(f"\ntwo pods: created -> Complete in {seconds:.1f} s")
    writes = spillway.writes(since, namespace)
    return Trained(namespace, job, claim, seconds, watched.read_text(encoding="utf-8"), writes, bed, spillway)


def test_the_operators_image_is_small(operator_image: OperatorImage) -> None:
    assert sum(operator_image.layers) <= LARGEST_OPERATOR_IMAGE_BYTES


def test_the_job_is_complete_and_says_how_far_it_came(trained: Trained) -> None:
    status = trained.job["status"]
    assert status["state"] == "Complete"
    assert status["progress"]["step"] == status["progress"]["steps"] == trained.job["spec"]["training"]["steps"]
    assert float(status["progress"]["loss"]) < 7.0
    assert status["attempts"]["total"] == 1
    assert status["completionTime"]


def test_kubectl_get_watch_moves(trained: Trained) -> None:
    rows = trained.watched.splitlines()
    assert rows[0].split()[:4] == ["NAME", "STATE", "STEP", "PROGRESS"]
    states = [row.split()[1] for row in rows[1:] if len(row.split()) > 2]
    assert {"Starting", "Running", "Complete"} <= set(states), trained.watched


def test_a_start_costs_no_more_writes_than_designed(trained: Trained) -> None:
    """Progress and events are counted separately; the terminal status is the sixth write."""
    status_writes = [request for request in trained.writes if request.subresource == "status"]
    created = [request for request in trained.writes if request.verb == "create"]
    assert [(request.resource, request.code) for request in created] == [
        ("configmaps", 201), ("services", 201), ("jobs", 201),
    ]  # fmt: skip
    others = [request for request in trained.writes if request not in status_writes and request not in created]
    assert not others
    minutes = trained.seconds / 60
    progress_allowance = 2 + int(4 * minutes + 1)  # the first and the last report are written at once
    assert len(status_writes) <= 3 + progress_allowance
    print(f"\nwrites: {len(created)} creates, {len(status_writes)} of status in {trained.seconds:.0f} s")


def test_the_committed_checkpoint_verifies(trained: Trained) -> None:
    directory = trained.claim / Path(trained.job["status"]["checkpoint"]["path"]).parent.name
    spillway = REPOSITORY / ".venv" / "bin" / "spillway"
    ended = subprocess.run(
        [str(spillway), "ckpt", "verify", str(directory)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert trained.job["status"]["checkpoint"]["step"] == trained.job["spec"]["training"]["steps"]


def test_prometheus_holds_tier_series_of_both_ranks(trained: Trained) -> None:
    selector = f'namespace="{trained.namespace}",training_job="{NAME}"'
    for metric in (TIER_BYTES, TIER_PEAK_BYTES):
        samples = trained.bed.query(f"max by (rank, tier) (max_over_time({metric.name}{{{selector}}}[10m]))")
        found = {(sample.labels["rank"], sample.labels["tier"]): sample.value for sample in samples}
        for rank in ("0", "1"):
            assert found[rank, "device"] > 0
            assert found[rank, "host"] > 0
        if metric is TIER_PEAK_BYTES:
            assert found["0", "nvme"] > 0
            assert found["1", "nvme"] > 0


DASHBOARDS = CHART / "files" / "dashboards"
NOT_HERE = {
    # The job has no fault; test_failures.py tests the attempts and the table.
    "Attempt ended early", "Out of memory: next attempt with another plan", "Live correction: smaller spill files",
    "Why, and for how long", "Steps trained again", "Plans changed because memory ran out", "Corrections of watches",
    # The job may have ended before a scrape with its measured memory.
    "Planned memory that was not used",
    # The machine has no GPU, and its drive reports no wear.
    "Device", "Unrequested GPUs", "Drive wear",
}  # fmt: skip
"""Panels and events that may be empty."""


@pytest.mark.parametrize("name", sorted({file.stem for file in DASHBOARDS.glob("*.json")} - {"sweep"}))
def test_every_query_of_the_dashboards_returns_data(trained: Trained, name: str) -> None:
    """The dashboard `sweep` is tested in test_sweep.py, with a job that has members."""
    until_it_has_data(trained.bed, name, trained.namespace, NAME, NOT_HERE)


def test_prometheus_holds_the_service_levels_of_the_jobs_namespace(trained: Trained) -> None:
    bed, namespace = trained.bed, trained.namespace
    wanted = {
        f'{OPERATOR_ATTEMPTS_ENDED.name}{{namespace="{namespace}",reason="Completed"}}': 1.0,
        f'{OPERATOR_QUEUE_WAIT.name}_count{{namespace="{namespace}"}}': 1.0,
        f'{OPERATOR_FIRST_STEP.name}_count{{namespace="{namespace}"}}': 1.0,
        f'{OPERATOR_JOBS.name}{{namespace="{namespace}",state="Complete"}}': 1.0,
    }
    trained.installed.until_measured(wanted)
    held, committed = (
        sum(
            sample.value
            for sample in bed.query(f'{OPERATOR_DEVICE_SECONDS.name}{{namespace="{namespace}",use="{use}"}}')
        )
        for use in ("held", "committed")
    )
    assert 0 < committed <= held
    print(f"\ngoodput {committed / held:.2f} of {held:.0f} device seconds")


def test_every_alert_can_be_asked_and_none_is_about_a_job_that_ran_well(trained: Trained) -> None:
    import alerts  # from charts/, which conftest adds to the path

    found = {alert.name: trained.bed.query(alert.expression) for alert in alerts.ALL}
    ours = {"namespace": trained.namespace}
    assert {
        name for name, samples in found.items() if any(ours.items() <= one.labels.items() for one in samples)
    } == set()
    assert not found["SpillwayOperatorDown"]  # other tests may briefly cause other alerts of the operator


def test_the_plan_names_real_figures_of_the_real_node(trained: Trained) -> None:
    plan = trained.job["status"]["plan"]
    assert plan["metricsSource"] == "Prometheus"
    assert "node-0" in plan["nodes"] or "node-0" in plan["reason"], plan
    assert plan["headroom"]["host"]


def test_nothing_is_written_about_a_job_that_has_ended(trained: Trained) -> None:
    since = trained.bed.audit_position()
    time.sleep(10)
    assert trained.installed.writes(since, trained.namespace) == []


def test_status_and_logs_commands_show_it(trained: Trained) -> None:
    spillway = str(REPOSITORY / ".venv" / "bin" / "spillway")
    environment = {"KUBECONFIG": str(trained.bed.kubeconfig), "PATH": "/usr/bin:/bin", "COLUMNS": "160"}
    status = subprocess.run(
        [spillway, "status", NAME, "-n", trained.namespace],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert status.returncode == 0, status.stderr
    assert "Complete" in status.stdout
    logs = subprocess.run(
        [spillway, "logs", NAME, "-n", trained.namespace], env=environment, capture_output=True, text=True, check=False
    )
    assert logs.returncode == 0, logs.stderr
    assert "Completed" in logs.stdout
