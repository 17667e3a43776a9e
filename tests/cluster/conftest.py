"""The test bed of this session: a real Kubernetes on this machine, which is started here or already runs."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.installed import WANTED, Document, Installed, OperatorImage, install, read_json
from harness.places import ROOT
from testbed import bed as whole_bed
from testbed import packages
from testbed.client import Bed
from testbed.errors import ExitCode, Unavailable
from testbed.layout import cache, state
from testbed.machine import PODS, SYSCTLS

HACK = ROOT / "hack"
CANNOT = (ExitCode.UNAVAILABLE, ExitCode.REJECTED)


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of this session share."""
    mine = tmp_path_factory.getbasetemp()
    return mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine


@contextmanager
def locked(file: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    with file.open("a", encoding="ascii") as opened:
        fcntl.flock(opened, how)
        yield


@pytest.fixture(scope="module", autouse=True)
def turn(request: pytest.FixtureRequest, shared: Path) -> Iterator[None]:
    """Makes sure that no other file runs while a file of alone/ does."""
    is_alone = request.path.parent.name == "alone"
    with locked(shared / "turn", fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH):
        yield


@pytest.fixture(scope="session")
def testbed(shared: Path) -> Iterator[Bed]:
    """The test bed. Unless it runs, the first worker that needs it starts it with fake nodes, fake GPUs, Prometheus and
    Kueue; then the last worker ends it."""
    if os.environ.get("SPILLWAY_NO_CLUSTER"):
        pytest.skip("no control plane: SPILLWAY_NO_CLUSTER is set")
    record = shared / "bed.json"
    with locked(shared / "bed"):
        known = read_json(record) if record.exists() else {"workers": 0, **started()}
        record.write_text(json.dumps({**known, "workers": known["workers"] + 1}), encoding="utf-8")
    yield Bed(state())
    with locked(shared / "bed"):
        known = read_json(record)
        record.write_text(json.dumps({**known, "workers": known["workers"] - 1}), encoding="utf-8")
        if known["workers"] == 1 and not known["was running"]:
            assert testbed_command("down").returncode == 0
            assert machine_state() == known["machine"], "the test bed did not put the machine back"


def started() -> Document:
    """Starts the test bed unless it runs; returns whether it ran, and the machine's state before the start."""
    was_running = whole_bed.runs(state())
    if not was_running:
        testbed_command("down")  # removes what a killed bed has left, which is no part of the machine's own state
    before = machine_state()
    # Pods mount this environment and keep no bytecode. Without bytecode, each start of a trainer would compile torch.
    subprocess.run([sys.executable, "-c", "import spillway_trainer.__main__"], check=True)
    # In a separate process, so that its children are not children of this one.
    flags = ["--fake-nodes", str(WANTED.fake_nodes), "--fake-gpus", str(WANTED.fake_gpus), "--prometheus", "--kueue"]
    ended = testbed_command("up", *flags)
    if ended.returncode in CANNOT:
        pytest.skip(f"no control plane: {ended.stderr.strip()}")
    if ended.returncode:
        if not was_running:
            testbed_command("down")
        pytest.fail(f"the test bed did not start:\n{ended.stdout}\n{ended.stderr}")
    return {"was running": was_running, "machine": before}


@pytest.fixture
def namespace(testbed: Bed) -> Iterator[str]:
    yield from _namespace(testbed)


def _namespace(testbed: Bed) -> Iterator[str]:
    """A new, empty namespace that admits only restricted pods; it is deleted at the end."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    testbed.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": restricted}})
    testbed.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, "--timeout=30s")
    yield name
    testbed.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def eventually() -> Callable[..., None]:
    """A function that waits for a condition that the cluster makes true by itself."""
    from testbed.processes import wait_until

    return wait_until


def testbed_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HACK)}
    command = [sys.executable, "-m", "testbed", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def machine_state() -> dict[str, object]:
    """The state of everything that the test bed may change, as far as it can be read without root."""
    ours = re.compile(rf"{re.escape(str(state().root))}|/run/netns|kubelet|containerd")
    mounts = Path("/proc/mounts").read_text(encoding="utf-8").splitlines() if Path("/proc/mounts").exists() else []
    sysctls = {name: Path("/proc/sys") / name.replace(".", "/") for name in SYSCTLS}
    return {
        "mounts": sorted(filter(ours.search, mounts)),
        "links": sorted(os.listdir("/sys/class/net")) if Path("/sys/class/net").exists() else [],
        "sysctls": {name: path.read_text(encoding="ascii") for name, path in sysctls.items() if path.exists()},
        "firewall": [rule for command in ("iptables-save", "ip6tables-save") for rule in firewall(command)],
        "cgroups": sorted(str(path) for pods in PODS for path in Path("/sys/fs/cgroup").glob(f"*/{pods}")),
        "folders": [path for path in ("/var/lib/kubelet", "/run/containerd", "/etc/cni") if Path(path).exists()],
    }


def firewall(command: str) -> list[str]:
    """The firewall's rules, own chains and policies. A table that was used and is empty again adds nothing."""
    try:
        listed = subprocess.run([command], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    as_new = re.compile(r"^(#.*|\*.*|COMMIT|:[A-Z]+ ACCEPT .*)$")
    return [f"{command}: {line}" for line in listed.splitlines() if not as_new.match(line)]


# --- Spillway on it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def operator_image(testbed: Bed, shared: Path) -> OperatorImage:
    """The operator's image, built from this checkout and imported. Tests are skipped with the reason if it cannot be
    built."""
    record = shared / "operator.json"
    with locked(shared / "image"):
        if not record.exists():
            try:
                packages.ensure(packages.IMAGES)
            except Unavailable as error:
                pytest.skip(f"no operator image: {error}")
            command = [sys.executable, str(HACK / "images.py"), "operator"]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            assert ended.returncode == 0, f"the operator's image was not built:\n{ended.stdout}\n{ended.stderr}"
            built = read_json(cache() / "images" / "operator.json")
            testbed.import_images(Path(built["archive"]))
            record.write_text(json.dumps(built), encoding="utf-8")
    built = read_json(record)
    return OperatorImage(built["image"], tuple(built["layers"]))


@pytest.fixture(scope="session")
def spillway(testbed: Bed, operator_image: OperatorImage, shared: Path) -> Installed:
    """The chart, installed on the test bed. The operator runs in its own image. Trainers run in the quick image (this
    machine's Python, this checkout's code), because their own has five gigabytes; `make images` builds and tests it."""
    with locked(shared / "release"):
        if (shared / "installed").exists():
            return Installed(testbed)
        found = install(testbed, operator_image)
        (shared / "installed").touch()
        return found


@pytest.fixture(scope="module")
def module_namespace(testbed: Bed) -> Iterator[str]:
    yield from _namespace(testbed)
