"""A release's life while jobs run, with Helm 3 and Helm 4: an earlier chart, upgrade, rollback, uninstall, reinstall.

The earlier chart is frozen in tests/fixtures/chart-0.0.9; its CRD lacks `spec.lifecycle.stallSeconds` and a few status
fields, and its roles lack a right. Both charts run the operator of this checkout, because no earlier image is kept.

`make test-cluster` tests Helm 4 with fake pods. SPILLWAY_DEPTH=all tests Helm 3 and Helm 4 with trainers on the real
kubelet, and with ten upgrades and ten rollbacks each.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from harness.depth import FULL
from harness.installed import (
    CHART,
    LONG,
    RELEASE,
    SYSTEM_NAMESPACE,
    Document,
    Installed,
    OperatorImage,
    example,
    install,
    named,
    running_for_an_hour,
    write_values,
)
from harness.patience import wait_until
from testbed.client import Bed
from testbed.errors import Failed
from testbed.layout import REPOSITORY

EARLIER = REPOSITORY / "tests" / "fixtures" / "chart-0.0.9"
ROUNDS = 10 if FULL else 1
"""number of upgrades, and of rollbacks"""
FAKE = tuple(f"fake-{index}" for index in range(5))
TRAINS, ENDS, SLEEPS, DONE = "trains", "ends-alone", "sleeps", "done"
TRAINERS = (TRAINS, ENDS)
CRDS = {f"{plural}.spillway.dev" for plural in ("trainingjobs", "memoryprofiles", "nodeprofiles", "operatorconfigs")}
CERTIFICATE = f"{RELEASE}-progress-tls"
ACCOUNT = "released"
"""another account than that of the other tests, because a test compares that account's rights with their use, and an
operator that is being uninstalled loses its rights before it ends"""
ACCOUNT_SET = ("--set", f"serviceAccount.name={ACCOUNT}")
USER = f"system:serviceaccount:{SYSTEM_NAMESPACE}:{ACCOUNT}"
QUIET_SECONDS = 5.0
SECONDS = 300.0
"""limit for each change to be seen, on a busy machine"""
TIMEOUT = f"{int(SECONDS)}s"
COMES_AND_GOES = ("Event", "Endpoints", "EndpointSlice", "Lease", "IPAddress", "APIService")
"""kinds that the cluster itself creates and removes (an APIService per group of CRDs); except Events, objects of these
kinds still count in the release's namespace"""
KEPT = ("CustomResourceDefinition", "Secret")

Named = tuple[str, str, str]
"""kind, namespace, name"""


@dataclass(frozen=True, slots=True)
class Seen:
    """A job and its children at one moment."""

    state: str
    attempts: int
    step: int
    stall_seconds: int | None
    active_time: str | None
    ready: str
    children: frozenset[str]
    """uids of its pods, its Job and its ConfigMap"""


@dataclass
class Life:
    """The observations of a release's life."""

    stages: dict[str, dict[str, Seen]] = field(default_factory=dict)
    writes_when_quiet: dict[str, list[str]] = field(default_factory=dict)
    unknown_field: str = ""
    """the API server's message about the new field under the earlier chart"""
    patched: int = 0
    left: set[Named] = field(default_factory=set)
    left_without_keep: set[Named] = field(default_factory=set)
    second_release: str = ""
    """Helm's message about a second release in the same cluster"""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Release:
    bed: Bed
    program: str
    values: Path

    def install(self, chart: Path, *settings: str, name: str = RELEASE) -> None:
        self._do("install", name, chart, "--values", self.values, *ACCOUNT_SET, *settings)

    def upgrade(self, *settings: str) -> None:
        """Upgrades as docs/install.md says: values that were given stay, and the others are the present chart's."""
        self._do("upgrade", RELEASE, CHART, "--reset-then-reuse-values", *settings)

    def _do(self, *arguments: str | Path) -> None:
        where = ("--namespace", SYSTEM_NAMESPACE, "--wait", "--timeout", TIMEOUT)
        self.bed.helm(*arguments, *where, program=self.program)

    def rollback(self) -> None:
        waiting = ("--wait", "--timeout", TIMEOUT)
        self.bed.helm("rollback", RELEASE, "--namespace", SYSTEM_NAMESPACE, *waiting, program=self.program)

    def uninstall(self) -> None:
        waiting = ("--wait", "--ignore-not-found", "--timeout", TIMEOUT)
        self.bed.helm("uninstall", RELEASE, "--namespace", SYSTEM_NAMESPACE, *waiting, program=self.program)


# --- contents of the cluster ------------------------------------------------------------------------------------------


def everything(bed: Bed, but: str) -> set[Named]:
    """Every object of the cluster, except those in namespace `but` and those that come and go by themselves."""
    kinds = bed.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    columns = "K:.kind,S:.metadata.namespace,N:.metadata.name,D:.metadata.deletionTimestamp"
    listed = bed.kubectl("get", ",".join(sorted(kinds)), "-A", "--no-headers", "-o", f"custom-columns={columns}")
    found = set()
    for kind, namespace, name, deleted in (line.split() for line in listed.splitlines() if line.strip()):
        passing = kind in COMES_AND_GOES and (namespace != SYSTEM_NAMESPACE or kind == "Event")
        if namespace != but and not passing and deleted == "<none>":
            found.add((kind, namespace.replace("<none>", ""), name))
    return found


def none_there(bed: Bed, program: str) -> None:
    """Removes the release and its CRDs, and replaces its namespace by an empty one."""
    Release(bed, program, Path()).uninstall()
    bed.kubectl("delete", "namespace", SYSTEM_NAMESPACE, "--ignore-not-found", f"--timeout={TIMEOUT}")
    bed.kubectl("delete", "crd", *CRDS, "--ignore-not-found", f"--timeout={TIMEOUT}")
    bed.kubectl("create", "namespace", SYSTEM_NAMESPACE)
    bed.kubectl("wait", "--for=create", "serviceaccount/default", "-n", SYSTEM_NAMESPACE, f"--timeout={TIMEOUT}")
    bed.kubectl("wait", "--for=create", "configmap/kube-root-ca.crt", "-n", SYSTEM_NAMESPACE, f"--timeout={TIMEOUT}")


def left_behind(bed: Bed, before: set[Named], but: str) -> set[Named]:
    """The objects that are there and were not before, once the cluster has collected those that the release's objects
    owned."""
    deadline = time.monotonic() + SECONDS
    while True:
        left = everything(bed, but) - before
        if all(kind in KEPT for kind, _, _ in left) or time.monotonic() > deadline:
            return left
        time.sleep(1.0)


def seen(spillway: Installed, namespace: str) -> dict[str, Seen]:
    children: dict[str, set[str]] = {}
    for item in spillway.bed.get("pods,jobs,configmaps", "-n", namespace, "-l", "spillway.dev/job")["items"]:
        children.setdefault(item["metadata"]["labels"]["spillway.dev/job"], set()).add(item["metadata"]["uid"])
    found = {}
    for job in spillway.bed.get("trainingjobs.spillway.dev", "-n", namespace)["items"]:
        name, status = job["metadata"]["name"], job.get("status", {})
        attempts = status.get("attempts", {})
        conditions = {condition["type"]: condition["status"] for condition in status.get("conditions", [])}
        found[name] = Seen(
            state=status.get("state", ""),
            attempts=attempts.get("total", 0),
            step=status.get("progress", {}).get("step", 0),
            stall_seconds=job["spec"]["lifecycle"].get("stallSeconds"),
            active_time=attempts.get("activeTime"),
            ready=conditions.get("Ready", ""),
            children=frozenset(children.get(name, set())),
        )
    return found


# --- a life -----------------------------------------------------------------------------------------------------------


def lived(bed: Bed, image: OperatorImage, program: str, namespace: str, trainers: bool) -> Life:
    began, life, spillway = time.monotonic(), Life(), Installed(bed)
    release = Release(bed, program, write_values(bed, image))
    none_there(bed, program)
    before = everything(bed, but=namespace)

    release.install(EARLIER)
    create_jobs(spillway, namespace, trainers)
    life.unknown_field = rejected_field(spillway, namespace)
    look(life, spillway, namespace, "earlier chart")
    keeps_quiet(life, spillway, namespace, "earlier chart")
    for turn in range(ROUNDS):
        release.upgrade()
        if not turn:
            spillway.change(namespace, FAKE[0], {"lifecycle": {"stallSeconds": 3600}})
        for name in FAKE:  # helm does not wait for the new operator's first look
            spillway.until(lambda job: "activeTime" in job["status"]["attempts"], namespace, name, SECONDS)
        look(life, spillway, namespace, f"upgrade {turn + 1}", trainers)
        since = bed.audit_position()
        release.rollback()
        until_written(spillway, namespace, since)
        look(life, spillway, namespace, f"rollback {turn + 1}", trainers)
    keeps_quiet(life, spillway, namespace, "rolled back")

    release.uninstall()
    life.left = left_behind(bed, before, but=namespace)
    if trainers:
        spillway.signal(namespace, ENDS, "SIGCONT")
        bed.kubectl("wait", "--for=condition=Complete", f"job/{ENDS}-1", "-n", namespace, f"--timeout={TIMEOUT}")
    life.stages["uninstalled"] = seen(spillway, namespace)
    release.install(CHART)
    if trainers:
        spillway.wait(namespace, ENDS, "Complete", SECONDS)
    look(life, spillway, namespace, "installed again", trainers)

    life.second_release = second_release(release)
    release.upgrade("--set", "crds.enabled=false")
    look(life, spillway, namespace, "without CRDs in the release")
    # To Helm, CRDs that left a release belong to somebody else until it is told to take them.
    release.upgrade("--set", "crds.enabled=true,crds.keep=false", "--take-ownership")
    # As docs/install.md says: children are surely deleted with their job, but not with the CRD.
    bed.kubectl(
        "delete", "trainingjobs.spillway.dev", "--all", "-n", namespace, "--cascade=foreground", f"--timeout={TIMEOUT}"
    )
    bed.kubectl("wait", "--for=delete", "pod", "-l", "spillway.dev/job", "-n", namespace, f"--timeout={TIMEOUT}")
    release.uninstall()
    life.left_without_keep = left_behind(bed, before, but=namespace)
    life.seconds = time.monotonic() - began
    return life


def create_jobs(spillway: Installed, namespace: str, trainers: bool) -> None:
    one = example("one-pod", namespace, checkpoint__claim=None)
    suspended = named(one, SLEEPS)
    suspended["spec"] = {**one["spec"], "suspend": True}
    jobs = [named(running_for_an_hour(one), name) for name in FAKE] + [suspended, named(ends_at_once(one), DONE)]
    if trainers:
        training = one["spec"]["training"]
        for name, steps in ((TRAINS, LONG), (ENDS, 200)):
            jobs.append({**named(one, name), "spec": {**one["spec"], "training": {**training, "steps": steps}}})
    for job in jobs:
        spillway.create(as_earlier(job))
    if trainers:
        for name in TRAINERS:
            spillway.until(lambda job: job["status"].get("progress", {}).get("step", 0) > 0, namespace, name, SECONDS)
            if name == ENDS:  # stopped while there is an operator; it continues without one
                spillway.signal(namespace, ENDS, "SIGSTOP")
    for name in FAKE:
        spillway.wait(namespace, name, "Running", SECONDS)
    spillway.wait(namespace, SLEEPS, "Suspended", SECONDS)
    spillway.wait(namespace, DONE, "Complete", SECONDS)


def as_earlier(job: Document) -> Document:
    """A job in the form of the earlier schema."""
    spec = dict(job["spec"])
    pod = spec.pop("pod", {})
    spec |= {"resources": pod.get("resources", {}), "podOverrides": {"annotations": pod.get("annotations", {})}}
    return {**job, "spec": spec}


def ends_at_once(job: Document) -> Document:
    job = running_for_an_hour(job)
    del job["spec"]["pod"]["annotations"]
    return job


def rejected_field(spillway: Installed, namespace: str) -> str:
    """The API server's rejection of a manifest of the present version; empty if it accepts it."""
    job = named(example("one-pod", namespace, checkpoint__claim=None, lifecycle={"stallSeconds": 60}), "too-new")
    try:
        spillway.create(job)
    except Failed as error:
        return str(error)
    return ""


def until_written(spillway: Installed, namespace: str, since: int) -> None:
    """Waits until the present operator has written the status of each fake job. It does so once, because it does not
    know yet that the earlier CRD lacks a field."""

    def written() -> set[str]:
        present = {pod["metadata"]["name"] for pod in spillway.operator_pods()}
        return {request.name for request in spillway.writes(since, namespace, USER) if request.pod in present}

    wait_until(lambda: {*FAKE} <= written(), why=lambda: f"only {written()}", seconds=SECONDS, pause=0.5)


def look(life: Life, spillway: Installed, namespace: str, stage: str, trainers: bool = False) -> None:
    """Records the jobs of a stage once the present operator has received a new step (with `trainers`) and has looked at
    every job."""
    if trainers:
        last = max(jobs[TRAINS].step for jobs in life.stages.values())
        spillway.until(lambda job: job["status"]["progress"]["step"] > last, namespace, TRAINS, SECONDS)
    time.sleep(1.0)  # a new operator writes at once what it has to write
    life.stages[stage] = seen(spillway, namespace)


def keeps_quiet(life: Life, spillway: Installed, namespace: str, stage: str) -> None:
    since = spillway.bed.audit_position()
    time.sleep(QUIET_SECONDS)
    assert spillway.writes(0, namespace, USER), "it wrote something before"
    writes = spillway.writes(since, namespace, USER)
    life.writes_when_quiet[stage] = [f"{w.verb} {w.resource} {w.name}" for w in writes if w.name not in TRAINERS]


def second_release(release: Release) -> str:
    """Tries a second release, which is rejected because the CRDs belong to the first one, and allowed without CRDs or
    if it takes them; returns the rejection."""
    apart = ("--dry-run=server", "--set", "serviceAccount.name=other")
    try:
        release.install(CHART, *apart, name="other")
    except Failed as error:
        release.install(CHART, *apart, "--set", "crds.enabled=false", name="other")
        release.install(CHART, *apart, "--take-ownership", name="other")
        return str(error)
    return ""


@pytest.fixture(
    scope="module",
    params=[pytest.param("helm", marks=pytest.mark.ci), pytest.param("helm3", marks=pytest.mark.full)],
)
def life(request: pytest.FixtureRequest, testbed: Bed, operator_image: OperatorImage, module_namespace: str) -> Life:
    try:
        found = lived(testbed, operator_image, request.param, module_namespace, trainers=FULL)
    finally:
        Release(testbed, request.param, Path()).uninstall()
        install(testbed, operator_image)
    reduced = "" if FULL else "; reduced, SPILLWAY_DEPTH=all runs ten of each, with trainers and with Helm 3, too"
    with_ = "trainers and fake pods" if FULL else "fake pods"
    print(f"\n{request.param}: {ROUNDS} upgrades and rollbacks over {with_} in {found.seconds:.0f} s{reduced}")
    return found


def test_upgrade_rollback_and_reinstall_start_and_end_no_attempt(life: Life) -> None:
    first = life.stages["earlier chart"]
    for stage, jobs in life.stages.items():
        assert jobs.keys() == first.keys(), stage
        for name, job in jobs.items():
            assert job.attempts == first[name].attempts == (0 if name == SLEEPS else 1), (stage, name)
            assert job.children == first[name].children, (stage, name)


def test_every_job_keeps_its_state_through_all_of_it(life: Life) -> None:
    wanted = {**dict.fromkeys(FAKE, "Running"), SLEEPS: "Suspended", DONE: "Complete"}
    for stage, jobs in life.stages.items():
        assert {name: jobs[name].state for name in wanted} == wanted, stage
        assert {jobs[name].ready for name in wanted} == {"True"}, stage


def test_training_goes_on_under_every_chart_and_without_one(life: Life) -> None:
    if TRAINS not in life.stages["earlier chart"]:
        pytest.skip("fake pods only; SPILLWAY_DEPTH=all has trainers here, too")
    heard = [jobs[TRAINS].step for stage, jobs in life.stages.items() if not stage.startswith("without CRDs")]
    later = [step for stage, step in zip(life.stages, heard, strict=False) if stage != "uninstalled"]
    assert sorted(set(later)) == later, heard


def test_job_that_ends_without_an_operator_is_complete_once_one_is_back(life: Life) -> None:
    if ENDS not in life.stages["earlier chart"]:
        pytest.skip("fake pods only; SPILLWAY_DEPTH=all has trainers here, too")
    assert life.stages["uninstalled"][ENDS].state == "Running", "nobody was there to say more"
    assert life.stages["installed again"][ENDS].state == "Complete"


def test_a_new_field_takes_effect_with_jobs_of_the_earlier_chart_present(life: Life) -> None:
    assert 'unknown field "spec.lifecycle.stallSeconds"' in life.unknown_field
    for stage, jobs in life.stages.items():
        new = not stage.startswith(("earlier", "rollback", "uninstalled"))
        for name, job in jobs.items():
            assert (job.stall_seconds is not None) == new, (stage, name)
            assert new or job.active_time is None, (stage, name)
    upgraded = life.stages["upgrade 1"]
    assert upgraded[FAKE[0]].stall_seconds == 3600
    assert upgraded[FAKE[1]].stall_seconds == 1800, "the default"
    assert all(upgraded[name].active_time for name in FAKE), "a new status field"


def test_an_operator_whose_crd_lacks_its_fields_does_not_write_for_ever(life: Life) -> None:
    assert {stage: writes for stage, writes in life.writes_when_quiet.items() if writes} == {}


def test_uninstall_leaves_only_the_crds_and_the_certificate(life: Life) -> None:
    """The certificate is kept because running trainers trust it."""
    crds = {("CustomResourceDefinition", "", name) for name in CRDS}
    assert life.left == crds | {("Secret", SYSTEM_NAMESPACE, CERTIFICATE)}


def test_without_crds_keep_uninstall_leaves_nothing(life: Life) -> None:
    assert life.left_without_keep == set()


def test_a_second_release_is_rejected_where_the_crds_are_anothers(life: Life) -> None:
    assert "invalid ownership metadata" in life.second_release
    assert "customresourcedefinition" in life.second_release.lower()
