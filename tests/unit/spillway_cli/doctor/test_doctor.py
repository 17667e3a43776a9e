"""`spillway doctor`: its judgement of made-up facts, what it gathers here, and its time limit."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.job_documents import TINY
from fakes.fake_api_server import FakeApiServer, rejection
from harness.patience import HANG_SECONDS, wait_until
from harness.places import GOLDEN
from spillway.api.crd import KINDS, TRAINING_JOB, definition
from spillway.api.load import parse_job
from spillway.extras import EXTRAS
from spillway_cli.__main__ import run_app
from spillway_cli.doctor import command as doctor_command
from spillway_cli.doctor import gather as doctor_gather
from spillway_cli.doctor.cluster import RIGHTS, ClusterFacts, Right, cluster_findings
from spillway_cli.doctor.findings import Diagnosis, Missing, Severity
from spillway_cli.doctor.machine import (
    Cores,
    Disk,
    MachineFacts,
    MachineMemory,
    Native,
    Profile,
    is_older,
    machine_findings,
)
from spillway_cli.machine.gpus import Gpu, Gpus
from spillway_operator.decide import conditions

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
GIB = 2**30
HEALTHY = MachineFacts(
    python="3.12.1",
    versions=dict.fromkeys([name for names in EXTRAS.values() for name in names], "9.0"),
    minima={"torch": "2.11"},
    native=Native("avx512", ("scalar", "avx2", "avx512")),
    huge_pages="madvise",
    disk=Disk("/spill", 100 * GIB, True),
    memory=MachineMemory(64 * GIB, 32 * GIB, False),
    cores=Cores(8, 8, ""),
    memlock_bytes=None,
    profile=Profile("/state/node-profile.yaml", True, "2026-11-01T00:00:00Z"),
)


RTX = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, 23 * GIB, 0, (4, 16, 16), 4)


def the_bad(findings: list[Diagnosis]) -> list[Diagnosis]:
    return [finding for finding in findings if finding.severity is not Severity.OK]


def the_one(findings: list[Diagnosis]) -> Diagnosis:
    (found,) = the_bad(findings)
    return found


# --- this machine -----------------------------------------------------------------------------------------------------


def test_nothing_is_wrong_with_a_healthy_machine() -> None:
    assert the_bad(machine_findings(HEALTHY, NOW)) == []


NO_HF = {name: version for name, version in HEALTHY.versions.items() if name != "peft"}
NO_TORCH = {name: version for name, version in HEALTHY.versions.items() if name != "torch"}


@pytest.mark.parametrize(
    ("changes", "severity", "words", "fix"),
    [
        ({"versions": NO_HF}, "note", "not installed: peft", "spillway-training[hf]"),
        ({"versions": NO_TORCH}, "warning", "plan and submit jobs, not train", "spillway-training[trainer]"),
        ({"versions": {**HEALTHY.versions, "torch": "2.9.1+cpu"}}, "error", "2.9.1+cpu (at least 2.11)", "[trainer]"),
        ({"native": Native("reference", ())}, "warning", "no C++ compiler", "C++20 compiler"),
        ({"native": Native("reference", ("scalar",))}, "warning", "FORCE_ISA=reference", "unset"),
        (
            {"native": Missing("no module named torch", is_absent=True)},
            "error",
            "no module named torch",
            "spillway_trainer.kernels.native",
        ),
        ({"native": Missing("took more than 7 s")}, "warning", "took more than 7 s", "again on an idle machine"),
        ({"disk": Disk("/spill", GIB // 2, True)}, "warning", "only 512 MiB free", "free space"),
        ({"disk": Disk("/spill", 9 * GIB, False)}, "warning", "no O_DIRECT", "ext4 or xfs"),
        ({"disk": Disk("/spill", 0, False, True, "Permission denied")}, "error", "Permission denied", "--directory"),
        ({"disk": Disk(".", 0, False, False, "Permission denied")}, "warning", "Permission denied", "--directory"),
        ({"disk": Missing("no answer in time")}, "warning", "no answer in time", "again"),
        (
            {"memory": MachineMemory(64 * GIB, GIB // 4, True)},
            "warning",
            "limited by a cgroup",
            "container's memory limit",
        ),
        (
            {"memory": MachineMemory(64 * GIB, GIB // 4, False)},
            "warning",
            "256 MiB available",
            "end processes that use much memory",
        ),
        (
            {"memlock_bytes": 8 << 20, "gpus": Gpus((RTX,), "550.1", "12.4")},
            "note",
            "RLIMIT_MEMLOCK is 8.00 MiB",
            "ulimit -l",
        ),
        ({"huge_pages": "never"}, "warning", "huge pages are off", "madvise"),
        ({"cores": Cores(2, 8, "16")}, "warning", "OMP_NUM_THREADS=16, but only 2 cores", "unset"),
        ({"profile": Profile("/p", False)}, "note", "not measured", "spillway calibrate"),
        (
            {"profile": Profile("/p", True, "", "measured with 4 cores")},
            "warning",
            "with 4 cores",
            "spillway calibrate",
        ),
        ({"profile": Profile("/p", True, "2026-05-01T00:00:00Z")}, "warning", "204 days ago", "spillway calibrate"),
        (
            {"gpus": Gpus((RTX,), problem="torch is built without CUDA", fix="install it")},
            "warning",
            "no GPU can be used: torch is built without CUDA; runs use the CPU",
            "install it",
        ),
        (
            {"gpus": Gpus((replace(RTX, free_bytes=14 * GIB, num_processes=2),))},
            "warning",
            "10.0 GiB used by 2 computing processes",
            "nvidia-smi",
        ),
        (
            {"gpus": Gpus((replace(RTX, free_bytes=14 * GIB),))},
            "warning",
            "by the display or other programs",
            "nvidia-smi",
        ),
        (
            {"gpus": Gpus((replace(RTX, pcie=(4, 8, 16)),))},
            "warning",
            "8 of 16 lanes, so copies take 2 times as long",
            "another slot",
        ),
        (
            {"gpus": Gpus((RTX,)), "memlock_bytes": 8 << 20},
            "note",
            "may reject the pinned host memory of a plan",
            "ulimit -l",
        ),
        ({"gpus": Missing("no answer in time")}, "warning", "no answer in time", "again"),
    ],
)
def test_each_thing_that_is_wrong_is_said_with_its_fix(
    changes: dict[str, Any], severity: str, words: str, fix: str
) -> None:
    found = the_one(machine_findings(replace(HEALTHY, **changes), NOW))
    assert found.severity == severity
    assert words in found.message and fix in found.fix


def test_gpus_are_told_with_driver_memory_and_links() -> None:
    found = machine_findings(replace(HEALTHY, gpus=Gpus((RTX,), "580.00", "13.0")), NOW)
    assert the_bad(found) == []
    said = {one.check: one.message for one in found}
    assert said["gpu"] == "driver 580.00, torch built for CUDA 13.0"
    assert said["gpu 0"] == "NVIDIA GeForce RTX 4090, 23.0 GiB free of 24.0 GiB, PCIe 4 x16, 4 NVLinks"
    without = {one.check: one.message for one in machine_findings(HEALTHY, NOW)}
    assert without["gpu"] == "no GPU can be used: no NVIDIA driver; runs use the CPU"


@pytest.mark.parametrize(
    ("version", "least", "older"),
    [
        ("2.11.0+cpu", "2.11", False),
        ("2.9", "2.11", True),
        ("2", "2.11", True),
        ("3.0", "2.11", False),
        ("odd", "1", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version: str, least: str, older: bool) -> None:
    assert is_older(version, least) is older


def test_what_this_machine_has_is_gathered(tmp_path: Path) -> None:
    tasks = doctor_gather.machine_tasks(tmp_path)
    del tasks["native"]  # imports torch
    found = doctor_command.Gathering(tasks).answers(time.monotonic() + HANG_SECONDS)
    assert not [answer for answer in found.values() if isinstance(answer, Missing)]
    assert isinstance(found["disk"], Disk) and found["disk"].free_bytes > 0
    assert isinstance(found["cores"], Cores) and found["cores"].usable >= 1
    assert list(tmp_path.iterdir()) == []


def test_the_least_versions_are_those_of_the_distribution() -> None:
    assert {"torch", "transformers", "peft", "kubernetes"} <= doctor_gather.minima().keys()


def test_a_spill_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    found = doctor_gather.disk(tmp_path / "none")
    assert found.problem == "No such file or directory"


def test_huge_pages_are_read_from_sysfs(tmp_path: Path) -> None:
    enabled = tmp_path / "sys/kernel/mm/transparent_hugepage/enabled"
    enabled.parent.mkdir(parents=True)
    enabled.write_text("always madvise [never]\n")
    assert doctor_gather.huge_pages(tmp_path) == "never"
    assert doctor_gather.huge_pages(tmp_path / "none") == ""


# --- time -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def mended() -> Iterator[threading.Event]:
    """What hangs goes on when this is set: after the test, or when a test waits for it."""
    made = threading.Event()
    yield made
    made.set()


def test_whatever_hangs_the_others_are_answered_in_time(mended: threading.Event) -> None:
    gathering = doctor_command.Gathering(
        {"hangs": lambda: mended.wait(HANG_SECONDS), "fails": lambda: 1 // 0, "denied": denied, "works": lambda: 7}
    )
    wait_until(lambda: len(gathering._answers) == 3)
    found = gathering.answers(time.monotonic())
    assert found["works"] == 7
    assert found["hangs"] == Missing("no answer in time")
    assert found["fails"] == Missing("ZeroDivisionError: integer division or modulo by zero")
    assert found["denied"] == Missing("/proc/x: Permission denied")


def denied() -> None:
    raise PermissionError(13, "Permission denied", "/proc/x")


def test_an_api_server_that_says_nothing_costs_no_more_than_the_limit(
    server: FakeApiServer,
    mended: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Who waited for it would get its answer in the end."""
    monkeypatch.setattr(doctor_command, "LONGEST_SECONDS", 0.5)
    server.before = lambda path: mended.wait(HANG_SECONDS) and None
    assert run_app(["doctor", "-o", "json"]) == 1
    errors = [one for one in json.loads(capsys.readouterr().out)["findings"] if one["severity"] == "error"]
    assert [(one["check"], one["message"]) for one in errors] == [("api server", "no answer in time")]


# --- a cluster --------------------------------------------------------------------------------------------------------


def schema(kind: Any = TRAINING_JOB) -> dict[str, Any]:
    found: dict[str, Any] = definition(kind)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return json.loads(json.dumps(found))


VERSION_LABEL = "app.kubernetes.io/version"
DEPLOYMENT: dict[str, Any] = {
    "metadata": {"name": "spillway", "namespace": "spillway", "labels": {VERSION_LABEL: "0.1.0"}},
    "spec": {"replicas": 1, "template": {"spec": {"containers": [{"name": "operator", "image": "r/operator:0.1.0"}]}}},
    "status": {"readyReplicas": 1},
}
PROFILE = {"metadata": {"name": "node-a"}, "spec": {"measuredTime": "2026-11-01T00:00:00Z"}}
SOUND = ClusterFacts(
    host="https://api",
    namespace="team-a",
    version={"gitVersion": "v1.33.2"},
    resources=[kind.plural for kind in KINDS],
    schemas={kind.kind: schema(kind) for kind in KINDS},
    deployments=[DEPLOYMENT],
    rights={right: True for _, _, rights in RIGHTS.values() for right in rights},
    node_profiles=[PROFILE],
)


def judged(job: str | None = None, **changes: Any) -> list[Diagnosis]:
    parsed = None if job is None else parse_job(job, "job.yaml")
    return cluster_findings(replace(SOUND, **changes), "0.1.0", NOW, parsed)


def tjob(name: str, *found: tuple[str, str, str, str]) -> dict[str, Any]:
    listed = [{"type": t, "status": s, "reason": r, "message": m} for t, s, r, m in found]
    metrics = {"conditions": listed, "plan": {"metricsSource": "Prometheus"}}
    return {"metadata": {"name": name, "namespace": "team-a"}, "spec": {}, "status": metrics}


def test_nothing_is_wrong_with_a_sound_cluster() -> None:
    assert the_bad(judged()) == []


def without(path: str) -> dict[str, Any]:
    lacking = schema()
    *parents, last = path.split(".")
    place = lacking
    for parent in parents:
        place = place["properties"][parent]
    del place["properties"][last]
    return {**SOUND.schemas, "TrainingJob": lacking}  # type: ignore[dict-item]


def with_field(name: str) -> dict[str, Any]:
    newer = schema()
    newer["properties"]["spec"]["properties"][name] = {"type": "string"}
    return {**SOUND.schemas, "TrainingJob": newer}  # type: ignore[dict-item]


def deployed(**changes: Any) -> list[dict[str, Any]]:
    return [{**DEPLOYMENT, **changes}]


def denied_rights(*labels: str) -> dict[Right, bool]:
    return {right: right.label not in labels for _, _, rights in RIGHTS.values() for right in rights}


FORBIDDEN = Missing("forbidden", is_forbidden=True)
ABSENT = Missing("not found", is_absent=True)
OLD_PROFILE = {"metadata": {"name": "node-b"}, "spec": {"measuredTime": "2026-01-01T00:00:00Z"}}
LABELLED = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}


@pytest.mark.parametrize(
    ("changes", "severity", "words", "fix"),
    [
        ({"version": Missing("no cluster answers at https://api")}, "error", "no cluster answers", "KUBECONFIG"),
        ({"version": {"gitVersion": "v1.29.3"}}, "error", "needs 1.31", "upgrade the cluster"),
        ({"resources": ["trainingjobs"]}, "error", "not installed: MemoryProfile, NodeProfile", "helm"),
        ({"schemas": without("spec.memory.endurance")}, "error", "lack TrainingJob spec.memory.endurance", "crds"),
        ({"schemas": with_field("later")}, "warning", "lacks TrainingJob spec.later", "install"),
        ({"schemas": FORBIDDEN}, "note", "you may not read", "ask"),
        ({"deployments": []}, "error", "no Deployment of the operator", "helm"),
        ({"deployments": FORBIDDEN}, "note", "you may not read the operator's Deployment", "ask"),
        ({"deployments": deployed(spec={"replicas": 0})}, "error", "scaled to 0", "kubectl scale"),
        ({"deployments": deployed(status={})}, "error", "no replica is ready", "kubectl logs"),
        (
            {"deployments": deployed(metadata={**DEPLOYMENT["metadata"], "labels": {VERSION_LABEL: "0.2"}})},
            "warning", "version 0.2, but this client is 0.1.0", "spillway-training 0.2 here",
        ),
        ({"rights": denied_rights("create trainingjobs")}, "warning", "`spillway submit`: you may not", "=edit"),
        ({"rights": denied_rights("list trainingjobs")}, "error", "`spillway status`: you may not", "=view"),
        ({"rights": denied_rights("get pods/log")}, "warning", "you may not get pods/log", "=view"),
        ({"rights": denied_rights("get pods/proxy")}, "note", "shows no rates", "=edit"),
        ({"node_profiles": []}, "note", "no NodeProfile", "spillway calibrate"),
        ({"node_profiles": [PROFILE, OLD_PROFILE]}, "warning", "older than 90 days: node-b", "spillway calibrate"),
        ({"namespace_object": ABSENT}, "error", "namespace team-a does not exist", "kubectl create namespace"),
        (
            {"namespace_object": LABELLED, "pod_rejection": 'violates PodSecurity "restricted:latest"'},
            "error", "Pod Security enforces restricted: violates", "policy",
        ),
        ({"jobs": Missing("cannot answer now")}, "warning", "cannot answer now", "try again"),
        (
            {"jobs": [tjob("a", ("MetricsAvailable", "False", "Stale", "no answer for 40 s"))]},
            "warning", "a: no answer for 40 s", "Prometheus",
        ),
        (
            {"jobs": [tjob("a", ("MetricsAvailable", "False", "NotConfigured", "no source"))]},
            "note", "no source", "prometheus.url",
        ),
    ],
)  # fmt: skip
def test_each_thing_that_is_wrong_with_a_cluster_is_said_with_its_fix(
    changes: dict[str, Any], severity: str, words: str, fix: str
) -> None:
    found = the_one(judged(**changes))
    assert found.severity == severity, found
    assert words in found.message and fix in found.fix, found


def test_where_spillway_is_not_installed_that_is_all_that_is_said_of_it() -> None:
    found = the_bad(judged(resources=ABSENT, deployments=[], node_profiles=ABSENT, jobs=ABSENT))
    assert [one.check for one in found] == ["crds", "operator"]


@pytest.mark.parametrize(
    ("type_", "status", "reason"),
    [
        ("Accepted", "False", "InvalidSpec"),
        ("Accepted", "False", "Unsupported"),
        ("Planned", "False", "NoNode"),
        ("Planned", "False", "DoesNotFit"),
        ("Planned", "False", "InspectionFailed"),
        ("Planned", "False", "NoNumber"),
        ("Running", "False", "JobGone"),
        ("Progressing", "False", "NoProgress"),
    ],
)
def test_a_stuck_job_is_an_error_with_the_conditions_sentence(type_: str, status: str, reason: str) -> None:
    found = the_one(judged(jobs=[tjob("tiny", (type_, status, reason, "device lacks 3 GiB"))]))
    assert found.severity is Severity.ERROR and found.fix
    assert found.message == f"team-a/tiny: {type_}={status} ({reason}): device lacks 3 GiB"


def test_a_job_that_does_not_report_may_be_well() -> None:
    found = the_one(judged(jobs=[tjob("tiny", ("Progressing", "Unknown", "NoReport", "never reported"))]))
    assert found.severity is Severity.WARNING and "progress Service" in found.fix


def test_a_job_that_has_ended_is_not_stuck() -> None:
    ended = tjob("a", ("Failed", "True", "NoProgress", "x"), ("Progressing", "False", "NoProgress", "x"))
    assert the_bad(judged(jobs=[ended])) == []


def test_reasons_with_a_fix_are_reasons_of_the_operator() -> None:
    from spillway_cli.doctor.cluster import FIXES, STUCK

    known = {reason for reasons in conditions.REASONS.values() for reason in reasons}
    assert FIXES.keys() <= known and {*STUCK} <= FIXES.keys()


def test_every_finding_that_is_worse_than_a_note_has_a_fix() -> None:
    nothing = Missing("no answer in time")
    blind = MachineFacts("3", {"torch": "9"}, {}, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    dark = ClusterFacts("h", "n", {}, nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing)
    findings = [*machine_findings(blind, NOW), *cluster_findings(dark, "1", NOW, None)]
    assert len(findings) > 12
    assert [one for one in findings if one.severity in ("warning", "error") and not one.fix] == []


CLAIMING = json.dumps(TINY | {"spec": TINY["spec"] | {"checkpoint": {"claim": "kept"}}})


def claim(phase: str, *modes: str) -> dict[str, Any]:
    return {"spec": {"accessModes": [*modes]}, "status": {"phase": phase}}


@pytest.mark.parametrize(
    ("changes", "severity", "words"),
    [
        ({"claims": {"kept": ABSENT}}, "error", "spec.checkpoint.claim = kept: claim not found in team-a"),
        ({"claims": {"kept": claim("Pending", "ReadWriteMany")}}, "note", "Pending"),
        ({"claims": {"kept": claim("Lost", "ReadWriteMany")}}, "error", "lost"),
        ({"claims": {"kept": FORBIDDEN}}, "note", "you may not read"),
        ({"storage_classes": {"fast": ABSENT}}, "error", "spec.spill.storageClassName = fast: StorageClass not found"),
    ],
)
def test_volumes_of_the_job_are_looked_for(changes: dict[str, Any], severity: str, words: str) -> None:
    found = the_one(judged(CLAIMING, **changes))
    assert (found.check, found.severity) == ("volumes", severity) and words in found.message


def test_a_claim_of_one_node_is_rejected_for_two() -> None:
    spec = TINY["spec"] | {"checkpoint": {"claim": "kept"}, "parallelism": {"nodes": 2}}
    two = json.dumps(TINY | {"spec": spec})
    found = the_one(judged(two, claims={"kept": claim("Bound", "ReadWriteOnce")}))
    assert found.severity is Severity.ERROR and "2 nodes write to it" in found.message
    assert the_bad(judged(CLAIMING, claims={"kept": claim("Bound", "ReadWriteOnce")})) == []
    found = the_one(judged(CLAIMING, claims={"kept": claim("Bound", "ReadOnlyMany")}))
    assert found.severity is Severity.ERROR and "checkpoints must be written to it" in found.message


def test_a_job_without_a_claim_for_checkpoints_is_told_that_they_are_lost() -> None:
    found = the_one(judged(json.dumps(TINY)))
    assert (found.severity, found.message) == (
        "note", "spec.checkpoint.claim is not set: checkpoints are lost with the pod"
    )  # fmt: skip


NAMING = json.dumps(
    TINY
    | {
        "spec": TINY["spec"]
        | {
            "checkpoint": {"claim": "kept"},
            "pod": {
                "imagePullSecrets": [{"name": "registry"}],
                "env": [{"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "wandb", "key": "key"}}}],
                "mounts": [{"path": "/conf", "configMap": "settings"}],
                "serviceAccountName": "trainer",
            },
            "model": {
                "source": {"claim": "kept", "subPath": "m", "fetch": {"uri": "s3://b/m", "secretName": "s3"}},
                "precision": {"compute": "bfloat16"},
            },
        }
    }
)
NAMED: dict[str, Any] = {
    "Secret/registry": {}, "Secret/wandb": {"data": {"key": "c2VjcmV0"}}, "ConfigMap/settings": {},
    "Secret/s3": {}, "ServiceAccount/trainer": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "severity", "message"),
    [
        ({"Secret/registry": ABSENT}, "error", "spec.pod.imagePullSecrets[0]: Secret registry not found in team-a"),
        ({"Secret/wandb": ABSENT}, "error", "spec.pod.env[0]: Secret wandb not found in team-a"),
        ({"Secret/wandb": {"data": {"other": "x"}}}, "error", "spec.pod.env[0]: Secret wandb has no key key"),
        ({"ConfigMap/settings": ABSENT}, "error", "spec.pod.mounts[0]: ConfigMap settings not found in team-a"),
        ({"Secret/s3": ABSENT}, "error", "spec.model.source.fetch.secretName: Secret s3 not found in team-a"),
        (
            {"ServiceAccount/trainer": ABSENT},
            "error",
            "spec.pod.serviceAccountName: ServiceAccount trainer not found in team-a",
        ),
        ({"Secret/wandb": FORBIDDEN}, "note", "you may not read spec.pod.env[0]: Secret wandb"),
    ],
)
def test_what_pods_cannot_start_without_is_looked_for(changes: dict[str, Any], severity: str, message: str) -> None:
    assert the_bad(judged(NAMING, named=NAMED)) == []
    found = the_one(judged(NAMING, named=NAMED | changes))
    assert (found.check, found.severity, found.message) == ("pod inputs", severity, message)


def test_values_of_secrets_are_never_shown() -> None:
    assert not [one for one in judged(NAMING, named=NAMED) if "c2VjcmV0" in one.message]


def test_the_pod_that_is_tried_is_as_safe_as_a_trainers() -> None:
    golden = GOLDEN / "children-one-pod.yaml"
    made = next(one for one in yaml.safe_load_all(golden.read_text("utf-8")) if one["kind"] == "Job")
    trainer, tried = made["spec"]["template"]["spec"], doctor_gather.sample_pod()["spec"]
    assert tried["securityContext"] == trainer["securityContext"]
    assert tried["containers"][0]["securityContext"] == trainer["containers"][0]["securityContext"]
    assert tried["automountServiceAccountToken"] is trainer["automountServiceAccountToken"]


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The trainer's process is a local test's; a profile of this machine must not change a result."""
    monkeypatch.setattr(doctor_gather, "native", lambda: HEALTHY.native)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_torch: None) -> Iterator[FakeApiServer]:
    fake = FakeApiServer()
    fake.write_kubeconfig(tmp_path / "kubeconfig")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    fake.objects = {
        "/version": {"gitVersion": "v1.33.2"},
        "/apis/spillway.dev/v1alpha1": {"resources": [{"name": kind.plural} for kind in KINDS]},
        "/openapi/v3/apis/spillway.dev/v1alpha1": {
            "components": {"schemas": {f"dev.spillway.v1alpha1.{kind.kind}": schema(kind) for kind in KINDS}}
        },
        "/apis/apps/v1/deployments": {"items": [DEPLOYMENT]},
        "/apis/spillway.dev/v1alpha1/nodeprofiles": {"items": []},
        "/api/v1/namespaces/team-a": LABELLED,
    }
    yield fake
    fake.close()


def documents(out: str) -> dict[str, dict[str, Any]]:
    return {one["check"]: one for one in json.loads(out)["findings"] if one["area"] == "cluster"}


def test_without_a_cluster_one_line_says_so_and_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.count("kubeconfig") == 2 and "the cluster was not examined" in out
    assert out.splitlines()[-1].startswith("0 errors, ")


@pytest.mark.parametrize("arguments", [["--context", "nowhere"], []])
def test_a_kubeconfig_that_cannot_be_used_is_an_error(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if not arguments:
        (tmp_path / "none").write_text("[1, 2]")
    assert run_app(["doctor", *arguments]) == 1
    assert "error    kubeconfig" in capsys.readouterr().out


def test_a_sound_cluster_is_looked_at_with_requests_that_change_nothing(
    server: FakeApiServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["doctor", "-o", "json"]) == 0
    found = documents(capsys.readouterr().out)
    assert {check: one["severity"] for check, one in found.items()} == {
        "api server": "ok", "crds": "ok", "operator": "ok", "rights": "ok", "nodes": "note", "pods": "ok", "jobs": "ok",
    }  # fmt: skip
    written = {(path, query.get("dryRun")) for method, path, query, _ in server.requests if method == "POST"}
    assert written == {
        ("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", None),
        ("/api/v1/namespaces/team-a/pods", "All"),
    }


def test_who_may_not_create_pods_tries_none(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.forbidden = {"create pods", "get pods/log"}
    assert run_app(["doctor", "-o", "json"]) == 0
    found = documents(capsys.readouterr().out)
    assert "you may not create pods" in found["pods"]["message"] and found["pods"]["severity"] == "ok"
    assert not [path for method, path, *_ in server.requests if method == "POST" and path.endswith("/pods")]


def test_a_namespace_that_rejects_pods_is_an_error(server: FakeApiServer, capsys: pytest.CaptureFixture[str]) -> None:
    rejected = rejection(403, "Forbidden", "exceeded quota: small, requested: pods=1")
    server.objects["POST /api/v1/namespaces/team-a/pods"] = rejected
    assert run_app(["doctor"]) == 1
    assert "exceeded quota: small" in capsys.readouterr().out


def test_a_job_is_asked_for_its_claims_in_its_namespace(
    server: FakeApiServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(CLAIMING)
    assert run_app(["doctor", "--job", "job.yaml", "-o", "json"]) == 1
    assert "kept: claim not found in team-a" in documents(capsys.readouterr().out)["volumes"]["message"]
    server.objects["/api/v1/namespaces/team-a/persistentvolumeclaims/kept"] = claim("Bound", "ReadWriteMany")
    assert run_app(["doctor", "--job", "job.yaml", "-o", "json"]) == 0
    (tmp_path / "job.yaml").write_text(NAMING)
    assert run_app(["doctor", "--job", "job.yaml", "-o", "json"]) == 1
    places = ("secrets/registry", "secrets/wandb", "configmaps/settings", "secrets/s3", "serviceaccounts/trainer")
    asked = [path for method, path, *_ in server.requests if method == "GET"]
    assert {f"/api/v1/namespaces/team-a/{place}" for place in places} <= {*asked}


def test_a_wrong_job_is_rejected_before_anything_is_looked_at(server: FakeApiServer, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("kind: Pod")
    assert run_app(["doctor", "--job", "job.yaml"]) == 64
    assert server.requests == []


def test_a_users_environment_is_left_alone(tmp_path: Path) -> None:
    before = dict(os.environ)
    run_app(["doctor"])
    assert dict(os.environ) == before and list(tmp_path.iterdir()) == []
