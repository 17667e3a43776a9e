"""Disruptions of a job from outside, on the real cluster: a lost node, no API server, deletions, drains.

The lost node is `node-1`, a second containerd and kubelet on this machine, with a mount namespace and cgroups of their
own (hack/testbed/second_node.py). Its kubelet is killed with kill -9, but its containers continue to run: they are the
zombies. The next attempt runs on `node-0`, with the same claim. `make test-cluster` runs a reduced form;
SPILLWAY_DEPTH=all runs everything.
"""

from __future__ import annotations

import http.server
import json
import os
import random
import re
import signal
import statistics
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from harness.chart_queries import alert_query
from harness.depth import FULL
from harness.installed import LONG, WANTED, Document, Installed, changed, example, named, on_fake_nodes
from spillway.errors import ExitCode
from spillway.feedback.retries import EVICTED, NODE_LOST, POD_DELETED
from spillway.metrics import STEP, TIER_BYTES
from spillway.units import parse_quantity
from spillway_operator.decide.observed import OperatorFacts
from spillway_trainer.checkpoints.directory import choose_resume, list_checkpoints, verify
from spillway_trainer.checkpoints.manifest import CheckpointName, open_checkpoint
from spillway_trainer.checkpoints.sealed_json import unseal
from testbed import api
from testbed import second_node as second_node_of
from testbed.client import Bed
from testbed.layout import ADDRESS, NODE, PROMETHEUS, REPOSITORY, SECOND_NODE
from testbed.machine import pod_cgroups

TRIALS, AT_ONCE = (30, 3) if FULL else (1, 1)
"""number of trials, and of trials (jobs) that share one loss of the node"""
DELETIONS, OF_EACH_JOB = (100, 5) if FULL else (4, 2)
OUTAGE_SECONDS = 60.0 if FULL else 30.0
SEED = 20261122
SLOW = 300.0
"""limit in seconds for what takes ten on an idle machine"""
CONVERGENCE_SECONDS = 30.0 if FULL else SLOW
LOST_STEPS, HELD_STEP = (90, 45) if FULL else (40, 20)
"""steps of a job, and the step at which a zombie is stopped if the next attempt has not begun, so that it cannot
complete before it is fenced"""
METRICS_PORT = OperatorFacts(trainer_image="").metrics_port
TEXT_BYTES = 200_000
"""size of the text, from this repository's documentation; its corpus is built in a second"""
AT_ONCE_GONE = [
    {"key": f"node.kubernetes.io/{key}", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    for key in ("not-ready", "unreachable")
]
"""tolerations of one second; with the operator's own, it would wait a minute before it gives the node up. The rules are
the same, and trials are quicker."""


@pytest.fixture(scope="module")
def two_nodes(spillway: Installed) -> Iterator[Installed]:
    """Adds node-1 to node-0 for the module's tests, and removes it at the end."""
    spillway.bed.restart(replace(WANTED, second_node=True))
    try:
        yield spillway
    finally:
        second_node_of.end(spillway.bed.state)


@contextmanager
def cordoned(bed: Bed, node: str) -> Iterator[None]:
    bed.kubectl("cordon", node)
    try:
        yield
    finally:
        bed.kubectl("uncordon", node)


def eventually(what: str, holds: Callable[[], bool], seconds: float = SLOW) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.1)


def step_of(job: Document) -> int:
    return int(job["status"].get("progress", {}).get("step", 0))


def attempts_of(job: Document) -> Document:
    return job["status"].get("attempts", {})  # type: ignore[no-any-return]


def lost_its_node(job: Document) -> bool:
    return bool(attempts_of(job).get("lastReason") == NODE_LOST)


def alerted(bed: Bed, name: str, namespace: str) -> bool:
    """Whether the alert's query has a series of the namespace."""
    return any(one.labels["namespace"] == namespace for one in bed.query(alert_query(name)))


def on_claim(spillway: Installed, namespace: str, name: str, **changes: object) -> tuple[Document, Path]:
    """A job with its own claim for text and checkpoints, and the claim's folder."""
    folder = spillway.bed.claim(name, namespace)
    write_text(folder)
    job = example("one-pod", namespace, checkpoint__claim=name, **changes)
    return named(changed(job, namespace, data={"text": {"claim": name, "subPath": "text"}}), name), folder


def write_text(folder: Path) -> None:
    (folder / "text").mkdir()
    pages = "\n".join(page.read_text(encoding="utf-8") for page in sorted((REPOSITORY / "docs").glob("*.md")))
    (folder / "text" / "pages.md").write_text(pages[:TEXT_BYTES], encoding="utf-8")


def run_directory(folder: Path, name: str) -> Path | None:
    """The folder of the run's checkpoints; None until its first attempt has made it."""
    return next((path for path in folder.iterdir() if path.name.startswith(f"{name}-")), None)


def commits(directory: Path | None, epoch: int) -> list[CheckpointName]:
    parsed = [CheckpointName.parse(path.name) for path in directory.iterdir()] if directory else []
    return sorted(name for name in parsed if name is not None and name.epoch == epoch)


def trainers(node: str, pod: Document) -> list[int]:
    """Process ids of a pod's ranks on one of this machine's nodes, found by the pod's cgroup."""
    uid, found = pod["metadata"]["uid"], set()
    for folder in pod_cgroups("kubepods" if node == NODE else node):
        for file in folder.rglob(f"*{uid}*/**/cgroup.procs"):
            for pid in file.read_text(encoding="ascii").split():
                with suppress(OSError):
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    if b"spillway_trainer" in words:
                        found.add(int(pid))
    return sorted(found)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- a node is lost ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Trial:
    """A job whose first attempt is on the node that is lost."""

    name: str
    folder: Path
    release_seconds: float
    """time from the start of the next attempt's pod until a held zombie is released"""
    pod: Document
    zombie: int
    log: Path
    killed_at_step: int = 0
    held: bool = False
    released: bool = False
    released_at: float | None = None
    together: bool = False
    """whether a rank of the old epoch was alive after the new epoch had begun"""

    @property
    def directory(self) -> Path | None:
        return run_directory(self.folder, self.name)

    @property
    def step(self) -> int:
        newest = commits(self.directory, 1)
        return newest[-1].step if newest else 0

    @property
    def fence(self) -> Path | None:
        path = self.directory / "epoch-2.json" if self.directory else None
        return path if path and path.exists() else None

    def look(self, next_began: float | None) -> None:
        """Stops the zombie before it can complete; continues it around the time when the next epoch begins."""
        if not self.held and not self.released and self.step >= HELD_STEP and is_alive(self.zombie):
            self.held = True
            os.kill(self.zombie, signal.SIGSTOP)
        if next_began is not None and not self.released and time.monotonic() - next_began >= self.release_seconds:
            self.released = True
            if is_alive(self.zombie):
                os.kill(self.zombie, signal.SIGCONT)
        self.together = self.together or (self.fence is not None and is_alive(self.zombie))


def lose_a_node(spillway: Installed, namespace: str, first: int, moments: random.Random) -> list[Trial]:
    """Makes AT_ONCE trials: jobs train on node-1, its kubelet is killed, and all jobs complete on node-0."""
    bed, state = spillway.bed, spillway.bed.state
    names = [f"lost-{number}" for number in range(first, first + AT_ONCE)]
    changes = {"training__steps": LOST_STEPS, "checkpoint__everySteps": 1, "scheduling__tolerations": AT_ONCE_GONE}
    trials = []
    with cordoned(bed, NODE):
        folders = {}
        for name in names:
            job, folders[name] = on_claim(spillway, namespace, name, **changes)
            spillway.create(job)
        for name in names:
            eventually(f"a commit of {name}", lambda name=name: bool(commits(run_directory(folders[name], name), 1)))  # type: ignore[misc]
            pod = spillway.children("pod", namespace, name)[0]
            assert pod["spec"]["nodeName"] == SECOND_NODE
            pid = trainers(SECOND_NODE, pod)[-1]
            logs = state.data / "pod-logs-1" / f"{namespace}_{pod['metadata']['name']}_{pod['metadata']['uid']}"
            trial = Trial(name, folders[name], moments.uniform(3, 20), pod, pid, next(logs.glob("trainer/*.log")))
            trials.append(trial)
            trial.look(None)
    bed.kill("kubelet-1")
    began: dict[str, float] = {}
    for trial in trials:
        trial.killed_at_step = trial.step
    deadline = time.monotonic() + SLOW
    while True:
        for trial in trials:
            if trial.name not in began and trial.directory is not None:
                pods = spillway.children("pod", namespace, trial.name)
                if any(pod["spec"].get("nodeName") == NODE for pod in pods):
                    began[trial.name] = time.monotonic()
                    # The status is written after the attempt's Job is created.
                    spillway.until(lost_its_node, namespace, trial.name)
            trial.look(began.get(trial.name))
        done = [spillway.condition(namespace, trial.name, "Complete").get("status") == "True" for trial in trials]
        if all(done) and not any(is_alive(trial.zombie) for trial in trials):
            return trials
        assert time.monotonic() < deadline, [spillway.job(namespace, trial.name)["status"] for trial in trials]
        time.sleep(0.1)


def assert_fenced(spillway: Installed, namespace: str, trial: Trial) -> str:
    """Asserts that the finished run has the right lineage, and that the zombie was fenced; returns a line that says
    so."""
    directory, fence = trial.directory, trial.fence
    assert directory is not None and fence is not None, f"{trial.name}: the second epoch never began"
    base = CheckpointName.parse(unseal(fence.read_bytes())["resumes_from"])
    assert base is not None and base.epoch == 1
    assert base.step > trial.killed_at_step, "the zombie went on without its kubelet"
    status = spillway.job(namespace, trial.name)["status"]
    attempts = status["attempts"]
    assert (attempts["total"], attempts["restarts"], attempts["disruptions"]) == (2, 0, 1), attempts
    assert verify(directory) == []
    # An attempt that resumes now uses what epoch 2 committed, whatever the zombie left.
    found = choose_resume(directory).checkpoint
    last = base if base.step == LOST_STEPS else CheckpointName(epoch=2, step=LOST_STEPS)
    assert found is not None and found.manifest.name == last
    late = [name for name in commits(directory, 1) if name.step > base.step]
    for name in late:
        assert not next(line for line in list_checkpoints(directory) if line.name == str(name)).in_lineage
    parents = [open_checkpoint(directory / str(name)).manifest.parent for name in commits(directory, 2)]
    assert all(parent is None or parent.epoch == 2 or parent == base for parent in parents), (base, parents)
    said = trial.log.read_text(encoding="utf-8", errors="replace")
    fenced = ExitCode.FENCED.reason in said
    assert fenced or "Completed" in said, said[-500:]
    return (
        f"{trial.name}: kubelet killed at step {trial.killed_at_step}, epoch 2 resumed from {base}, "
        f"zombie {'fenced' if fenced else 'completed'}{', alive beside epoch 2' if trial.together else ''}"
        f"{', held' if trial.held else ''}, {len(late)} late commits, none resumed"
    )


@pytest.mark.full
def test_what_a_zombie_on_a_lost_node_commits_is_never_resumed(two_nodes: Installed, namespace: str) -> None:
    spillway, moments = two_nodes, random.Random(SEED)
    reduced = "" if FULL else " of 30 (SPILLWAY_DEPTH=all)"
    print(f"\n{TRIALS} trials{reduced}, {AT_ONCE} jobs a lost node, seed {SEED}")
    trials: list[Trial] = []
    while len(trials) < TRIALS:
        spillway.bed.restart(replace(WANTED, second_node=True))
        started = time.monotonic()
        found = lose_a_node(spillway, namespace, len(trials), moments)
        assert alerted(spillway.bed, "SpillwayNodeLost", namespace)
        for trial in found:
            print(assert_fenced(spillway, namespace, trial))
        print(f"{time.monotonic() - started:.0f} s")
        trials += found
        for trial in found:
            spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", trial.name, "-n", namespace, "--wait=false")
    if FULL:  # left to chance, in three trials of four
        assert any(trial.together for trial in trials), "no two trainers were ever alive at once: nothing was shown"
    spillway.bed.restart(replace(WANTED, second_node=True))


# --- no API server ----------------------------------------------------------------------------------------------------


def trained_steps(pod: Document) -> int:
    """The step that the trainer itself reports on its own port, without asking the cluster."""
    url = f"http://{pod['status']['podIP']}:{METRICS_PORT}/metrics"
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as answer:
            found = re.search(rf"^{STEP.name}(?:{{[^}}]*}})? ([0-9.e+]+)$", answer.read().decode(), re.MULTILINE)
    except OSError:
        return 0
    return int(float(found[1])) if found else 0


def trains(spillway: Installed, namespace: str, name: str, beyond: int = 0) -> Document:
    """Waits until the job has trained more than `beyond` steps; returns the pod of its attempt."""
    pods: list[Document] = []

    def does() -> bool:
        pods[:] = [pod for pod in spillway.children("pod", namespace, name) if is_running(pod)]
        return bool(pods) and trained_steps(pods[0]) > beyond

    eventually(f"step {beyond + 1} of {name}", does)
    return pods[0]


def is_running(pod: Document) -> bool:
    return pod["status"]["phase"] == "Running" and "podIP" in pod["status"] and not is_deleting(pod)


def is_deleting(pod: Document) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def test_training_goes_on_without_an_api_server_and_all_is_told_afterwards(spillway: Installed, namespace: str) -> None:
    bed = spillway.bed
    lasting, _ = on_claim(spillway, namespace, "lasting", training__steps=LONG, checkpoint__everySteps=LONG)
    ending, _ = on_claim(spillway, namespace, "ending", training__steps=100, checkpoint__everySteps=LONG)
    for job in (lasting, ending):
        spillway.create(job)
    pods = {name: trains(spillway, namespace, name) for name in ("ending", "lasting")}
    node = pods["ending"]["spec"]["nodeName"]
    held = trainers(node, pods["ending"])
    for pid in held:  # it shall end while the API server is down
        os.kill(pid, signal.SIGSTOP)
    # Components that elect leaders end when they lose their leases, and are restarted here: with their old watches they
    # would sleep for a minute and then consider every node lost.
    for component in ("kube-apiserver", "kube-controller-manager", "kube-scheduler"):
        bed.kill(component)
    went = time.monotonic()
    try:
        before = trained_steps(pods["lasting"])
        for pid in held:
            os.kill(pid, signal.SIGCONT)
        for _ in range(int(OUTAGE_SECONDS)):
            time.sleep(1)
        eventually("'ending' ends while there is no API server", lambda: not any(map(is_alive, held)))
        after = trained_steps(pods["lasting"])
    finally:
        restarting = threading.Thread(target=bed.restart, args=(WANTED,))
        restarting.start()
    eventually("the API server", lambda: api.ready(bed.state))
    back = time.monotonic()
    restarting.join()
    print(f"\n{back - went:.0f} s without an API server: from step {before} to {after}")
    assert after > before + 5, "training stood still"

    spillway.wait(namespace, "ending", "Complete", CONVERGENCE_SECONDS)
    spillway.until(lambda job: step_of(job) >= after, namespace, "lasting", CONVERGENCE_SECONDS)
    took = time.monotonic() - back
    print(f"converged {took:.1f} s after it was back")
    assert took <= CONVERGENCE_SECONDS
    for name in pods:
        assert attempts_of(spillway.job(namespace, name))["total"] == 1
    assert [pod["metadata"]["uid"] for pod in spillway.children("pod", namespace, "lasting")] == [
        pods["lasting"]["metadata"]["uid"]
    ]


# --- pods are deleted -------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Deleted:
    """A deletion of a training pod, and its outcome."""

    committed: bool
    """whether, within the grace period, the attempt committed a checkpoint of the step that it had reached or of a
    later one"""
    step: int
    seconds: float
    reason: str
    restarts: int


def delete_and_see(spillway: Installed, namespace: str, name: str, folder: Path, beyond: int) -> Deleted:
    """Deletes the job's pod once it has trained beyond a step; returns what was committed, and how the end was
    counted."""
    pod = trains(spillway, namespace, name, beyond)
    attempt, grace = (
        int(pod["metadata"]["labels"]["spillway.dev/attempt"]),
        pod["spec"]["terminationGracePeriodSeconds"],
    )
    step, asked = trained_steps(pod), time.time()
    spillway.bed.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false")
    job = spillway.until(lambda job: attempts_of(job)["ended"] >= attempt, namespace, name, SLOW)
    directory, known = run_directory(folder, name), attempts_of(job)
    assert directory is not None
    found = [name for name in commits(directory, attempt) if name.step >= step]
    seconds = (directory / str(found[-1])).stat().st_mtime - asked if found else float("inf")
    return Deleted(
        seconds <= grace, found[-1].step if found else beyond, seconds, known["lastReason"], known["restarts"]
    )


@pytest.mark.ci
def test_a_deleted_pod_commits_within_its_grace_and_is_no_failure(spillway: Installed, namespace: str) -> None:
    """Each job has few deletions, because pauses grow between attempts that are short several times in a row."""
    of_each, at_once = OF_EACH_JOB, 4 if FULL else 2
    print(f"\n{DELETIONS} deletions{'' if FULL else ' of 100 (SPILLWAY_DEPTH=all)'}, {at_once} jobs at once")
    seen: list[Deleted] = []
    for first in range(0, DELETIONS // of_each, at_once):
        names = [f"taken-{number}" for number in range(first, min(first + at_once, DELETIONS // of_each))]
        folders = {}
        for name in names:
            job, folders[name] = on_claim(spillway, namespace, name, training__steps=LONG, checkpoint__everySteps=LONG)
            spillway.create(job)
        steps = dict.fromkeys(names, 0)
        for _ in range(of_each):
            for name in names:
                seen.append(delete_and_see(spillway, namespace, name, folders[name], steps[name]))
                steps[name] = seen[-1].step
        for name in names:
            known = attempts_of(spillway.job(namespace, name))
            assert (known["restarts"], known["disruptions"]) == (0, of_each), known
            directory = run_directory(folders[name], name)
            assert directory is not None and verify(directory) == []
            spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", name, "-n", namespace, "--wait=false")
    committed = [each for each in seen if each.committed]
    took = sorted(each.seconds for each in committed)
    reasons = Counter(each.reason for each in seen)
    print(f"{len(committed)} of {len(seen)} committed, {statistics.median(took):.1f} s in the middle, at most "
          f"{took[-1]:.1f} s; {dict(reasons)}")  # fmt: skip
    assert len(committed) >= 0.99 * len(seen), [each for each in seen if not each.committed]
    assert set(reasons) <= {POD_DELETED, ExitCode.PREEMPTED.reason}


def test_one_deleted_pod_of_two_stops_both_ranks_at_a_checkpoint(spillway: Installed, namespace: str) -> None:
    folder = spillway.bed.claim("two-pod", namespace)
    job = example("two-pod", namespace, training__steps=LONG, checkpoint__everySteps=LONG, data__evaluation=None)
    write_text(folder)
    spillway.create(changed(job, namespace, data={"text": {"claim": "two-pod", "subPath": "text"}}))
    trains(spillway, namespace, "two-pod")
    second = next(p for p in spillway.children("pod", namespace, "two-pod") if "-1-1-" in p["metadata"]["name"])
    spillway.bed.kubectl("delete", "pod", second["metadata"]["name"], "-n", namespace, "--wait=false")
    ended = spillway.until(lambda job: attempts_of(job)["ended"] >= 1, namespace, "two-pod", SLOW)
    assert commits(run_directory(folder, "two-pod"), 1), "no checkpoint"
    assert attempts_of(ended)["restarts"] == 0
    assert attempts_of(ended)["lastReason"] in (POD_DELETED, ExitCode.PREEMPTED.reason)
    saved = commits(run_directory(folder, "two-pod"), 1)[-1].step
    spillway.until(lambda job: attempts_of(job)["total"] == 2 and step_of(job) >= saved, namespace, "two-pod", SLOW)


@pytest.mark.full
def test_a_pod_deleted_before_its_first_step_costs_nothing(spillway: Installed, namespace: str) -> None:
    """The pod is deleted while it imports torch or prepares the text: there is nothing to save, and this is no
    failure."""
    for number, seconds in enumerate((0.0, 1.0, 3.0)):
        job, _ = on_claim(spillway, namespace, f"early-{number}", training__steps=LONG)
        name = job["metadata"]["name"]
        spillway.create(job)
        pods: list[Document] = []

        def runs(name: str = name, pods: list[Document] = pods) -> bool:
            pods[:] = [pod for pod in spillway.children("pod", namespace, name) if is_running(pod)]
            return bool(pods)

        eventually(f"a pod of {name}", runs)
        time.sleep(seconds)
        spillway.bed.kubectl("delete", "pod", pods[0]["metadata"]["name"], "-n", namespace, "--wait=false")
        found = attempts_of(spillway.until(lambda job: attempts_of(job)["total"] >= 2, namespace, name, SLOW))
        assert (found["restarts"], found["disruptions"]) == (0, 1), found
        assert found["lastReason"] in (POD_DELETED, ExitCode.PREEMPTED.reason)
        spillway.bed.kubectl("delete", "trainingjobs.spillway.dev", name, "-n", namespace, "--wait=false")


@pytest.mark.full
def test_sigterm_sent_twice_while_a_checkpoint_is_written_leaves_it_whole(spillway: Installed, namespace: str) -> None:
    """Checkpoints follow every step, so that most requests to stop come while one is written."""
    job, folder = on_claim(spillway, namespace, "twice", training__steps=LONG, checkpoint__everySteps=1)
    spillway.create(job)
    pod = trains(spillway, namespace, "twice", 2)
    twice = "import os, signal, time; [(os.kill(1, signal.SIGTERM), time.sleep(0.05)) for _ in range(2)]"
    spillway.bed.kubectl("exec", pod["metadata"]["name"], "-n", namespace, "--", "python", "-c", twice)
    found = spillway.until(lambda job: attempts_of(job)["ended"] >= 1, namespace, "twice", SLOW)
    known = attempts_of(found)
    assert (known["lastReason"], known["restarts"]) == (ExitCode.PREEMPTED.reason, 0)
    directory = run_directory(folder, "twice")
    assert directory is not None and verify(directory) == []
    assert found["status"]["checkpoint"]["step"] == commits(directory, 1)[-1].step


@pytest.mark.full
def test_drain_checkpoints_a_running_job_and_leaves_a_waiting_one_alone(two_nodes: Installed, namespace: str) -> None:
    spillway, bed = two_nodes, two_nodes.bed
    with cordoned(bed, NODE):
        job, folder = on_claim(spillway, namespace, "drained", training__steps=LONG, checkpoint__everySteps=LONG)
        spillway.create(job)
        assert trains(spillway, namespace, "drained")["spec"]["nodeName"] == SECOND_NODE
    try:
        bed.kubectl("drain", SECOND_NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=120s")
        there = {"kubernetes.io/hostname": SECOND_NODE}
        job, _ = on_claim(spillway, namespace, "waits", scheduling__nodeSelector=there)
        spillway.create(job)
        found = spillway.until(lambda job: attempts_of(job)["total"] == 2, namespace, "drained", SLOW)
        saved = commits(run_directory(folder, "drained"), 1)
        assert len(saved) == 1, "the eviction's SIGTERM ended in a checkpoint"
        known = attempts_of(found)
        assert (known["restarts"], known["disruptions"]) == (0, 1)
        assert known["lastReason"] in (POD_DELETED, ExitCode.PREEMPTED.reason)
        assert trains(spillway, namespace, "drained", saved[0].step)["spec"]["nodeName"] == NODE
        bed.kubectl("drain", SECOND_NODE, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=60s")
        assert attempts_of(spillway.job(namespace, "waits"))["ended"] == 0
    finally:
        bed.kubectl("uncordon", SECOND_NODE)
    spillway.until(lambda job: job["status"]["state"] in ("Running", "Complete"), namespace, "waits", SLOW)
    assert attempts_of(spillway.job(namespace, "waits"))["disruptions"] == 0


FILL = "import os; f = os.open('/tmp/fill', os.O_CREAT | os.O_WRONLY); os.posix_fallocate(f, 0, {size})"


@pytest.mark.full
def test_a_pod_that_fills_its_disk_is_evicted_and_the_job_says_so(spillway: Installed, namespace: str) -> None:
    job, _ = on_claim(spillway, namespace, "fills", training__steps=LONG)
    spillway.create(job)
    pod = trains(spillway, namespace, "fills")
    limit = parse_quantity(pod["spec"]["containers"][0]["resources"]["limits"]["ephemeral-storage"])
    fill = FILL.format(size=limit + 64 * 2**20)
    spillway.bed.kubectl("exec", pod["metadata"]["name"], "-n", namespace, "--", "python", "-c", fill)
    spillway.wait(namespace, "fills", "Failed", SLOW)
    failed = spillway.condition(namespace, "fills", "Failed")
    assert failed["reason"] == EVICTED, failed
    assert "ephemeral" in failed["message"] or "emptyDir" in failed["message"]


# --- a Prometheus that is down or lies --------------------------------------------------------------------------------


@contextmanager
def served(answer: Callable[[], tuple[int, bytes]], port: int = 0) -> Iterator[str]:
    """Yields the address of an HTTP server on the bridge that answers every request with `answer()`: status code and
    body."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, body = answer()
            with suppress(OSError):  # the client has closed the connection
                self.send_response(code)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing, because nobody would read it."""

    server = http.server.ThreadingHTTPServer((ADDRESS, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"{ADDRESS}:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


VALUES = {"negative": "-1", "no number": "NaN", "huge": "1e300", "no room": "0", "wrong labels": "1e9"}
"""fault -> value of every queried series, on each of the fake nodes"""


def lie(fault: str) -> tuple[int, bytes]:
    """The answer of a Prometheus with this fault."""
    if fault == "never answers":
        time.sleep(30)
    if fault == "answers 500":
        return 500, b"no"
    if fault == "answers nonsense":
        return 200, b"\x00\xff<html>"
    if fault == "answers without end":
        return 200, b"[" * (20 * 2**20)
    label = "host" if fault == "wrong labels" else "node"
    found = [
        {"metric": {label: f"fake-00{number}"}, "value": [time.time(), VALUES[fault]]}
        for number in range(4 if fault in VALUES else 0)
    ]
    said = {"status": "success", "data": {"resultType": "vector", "result": found}}
    return 200, json.dumps(said).encode()


FAULTS = {
    "away": "False", "empty": "False", "negative": "False", "no number": "False", "wrong labels": "False",
    "answers 500": "False", "answers nonsense": "False", "answers without end": "False", "never answers": "False",
    "huge": "True", "no room": "True",
}  # fmt: skip
"""fault -> expected status of MetricsAvailable. The last two are valid byte counts, which can only reorder the
nodes."""
TRIED = FAULTS if FULL else {fault: FAULTS[fault] for fault in ("away", "no number", "never answers", "no room")}
ALLOWED_DELAY_SECONDS = 1.0
MOST_STARTS = 8
"""starts of which one must be in time: a busy machine delays some, a Prometheus that is waited for delays all"""


def start_seconds(spillway: Installed, namespace: str, name: str) -> float:
    """Creates a job on the fake nodes; returns the seconds until its attempt's Job exists."""
    job = on_fake_nodes(named(example("one-pod", namespace, checkpoint__claim=None), name))
    job["spec"]["pod"] |= {
        "annotations": {f"pod-complete.stage.kwok.x-k8s.io/{part}": "1h" for part in ("delay", "jitter-delay")}
    }
    spillway.create(job)
    began = time.monotonic()
    eventually(f"the Job of {name}", lambda: bool(spillway.children("job", namespace, name)))
    return time.monotonic() - began


@pytest.mark.ci
def test_whatever_prometheus_says_no_job_is_delayed_moved_or_ended(spillway: Installed, namespace: str) -> None:
    bed, now = spillway.bed, {"fault": "away"}
    usual = min(start_seconds(spillway, namespace, f"usual-{number}") for number in range(3))
    pods = {pod["metadata"]["uid"] for pod in bed.get("pods", "-n", namespace)["items"]}
    bed.kill("prometheus")
    with ExitStack() as liar:
        liar.callback(bed.restart, WANTED)
        for number, (fault, status) in enumerate(TRIED.items()):
            now["fault"] = fault
            if number == 1:
                liar.enter_context(served(lambda: lie(now["fault"]), int(PROMETHEUS.rpartition(":")[2])))
            time.sleep(6)  # three readings of the operator
            wanted = (status, "Stale" if status == "False" else "Fresh")
            names: list[str] = []
            delay = float("inf")
            for each in range(MOST_STARTS):
                names.append(f"fault-{number}-{each}")
                delay = min(delay, start_seconds(spillway, namespace, names[-1]) - usual)
                found = spillway.until(lambda job: job["status"].get("state") == "Running", namespace, names[-1], SLOW)
                seen = spillway.condition(namespace, names[-1], "MetricsAvailable")
                if delay <= ALLOWED_DELAY_SECONDS and (seen["status"], seen["reason"]) == wanted:
                    break
            print(f"\nPrometheus {fault}: {delay:+.2f} s; {seen['status']} {seen['reason']}: {seen['message'][:100]}")
            assert delay <= ALLOWED_DELAY_SECONDS
            assert (seen["status"], seen["reason"]) == wanted
            assert attempts_of(found)["memoryErrors"] == 0
            for name in names:
                spec = spillway.children("pod", namespace, name)[0]["spec"]
                affinity = spec.get("affinity", {}).get("nodeAffinity", {})
                assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity
        alive = {pod["metadata"]["uid"] for pod in bed.get("pods", "-n", namespace)["items"] if not is_deleting(pod)}
        assert pods <= alive, "a running pod was ended"
        jobs = bed.get("trainingjobs.spillway.dev", "-n", namespace)["items"]
        assert {job["status"]["attempts"]["total"] for job in jobs} == {1}


def test_an_exporter_that_claims_another_jobs_labels_is_not_believed(spillway: Installed, namespace: str) -> None:
    """The labels that identify a series' job come from the scrape target, so the operator's queries do not see the
    claims."""
    claimed = f'{TIER_BYTES.name}{{namespace="{namespace}",pod="victim-1-0",node="fake-000",tier="host"}} 9e15\n'
    hostile = f'node_memory_MemAvailable_bytes{{node="fake-000"}} 9e15\n{claimed}'
    with served(lambda: (200, hostile.encode())) as address:
        spillway.bed.inject("hostile", address, {"node": "fake-001", "namespace": "another", "pod": "hostile-0"})
        try:

            def believed(labels: str) -> list[float]:
                return [sample.value for sample in spillway.bed.query(labels)]

            eventually("the hostile series", lambda: bool(believed('node_memory_MemAvailable_bytes{node="fake-001"}')))
            assert 9e15 not in believed('node_memory_MemAvailable_bytes{node="fake-000"}')
            assert believed(f'{TIER_BYTES.name}{{namespace="{namespace}"}}') == []
        finally:
            (spillway.bed.state.injected / "hostile.json").unlink()
