"""The test bed of this session: a real Kubernetes on this machine, booted here or found running."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.installed import WANTED, Installed, OperatorImage, install, read_json
from harness.places import ROOT
from testbed import bed as whole_bed
from testbed import packages
from testbed.client import Bed
from testbed.errors import ExitCode, Unavailable
from testbed.layout import state
from testbed.machine import PODS, SYSCTLS

HACK = ROOT / "hack"
CANNOT = (ExitCode.UNAVAILABLE, ExitCode.REFUSED)


@pytest.fixture(scope="session")
def testbed() -> Iterator[Bed]:
    """Started if it does not run, with fake nodes, fake GPUs, Prometheus and Kueue; ended only if started here."""
    if os.environ.get("SPILLWAY_NO_CLUSTER"):
        pytest.skip("no control plane: SPILLWAY_NO_CLUSTER is set")
    running = whole_bed.runs(state())
    if not running:
        testbed_command("down")  # what a bed that was killed has left is not how the machine was
    before = machine_state()
    # Pods mount this environment and keep no bytecode: without it, each start of a trainer would compile torch.
    subprocess.run([sys.executable, "-c", "import spillway_trainer.__main__"], check=True)
    # In a process of its own, whose children are not ours to wait for.
    flags = ["--fake-nodes", str(WANTED.fake_nodes), "--fake-gpus", str(WANTED.fake_gpus), "--prometheus", "--kueue"]
    ended = testbed_command("up", *flags)
    if ended.returncode in CANNOT:
        pytest.skip(f"no control plane: {ended.stderr.strip()}")
    if ended.returncode:
        if not running:
            testbed_command("down")
        pytest.fail(f"the test bed did not start:\n{ended.stdout}\n{ended.stderr}")
    yield Bed(state())
    if not running:
        assert testbed_command("down").returncode == 0
        assert machine_state() == before, "the test bed did not put the machine back"


@pytest.fixture
def namespace(testbed: Bed) -> Iterator[str]:
    yield from _namespace(testbed)


def _namespace(testbed: Bed) -> Iterator[str]:
    """An empty one in which only restricted pods are admitted."""
    name = f"test-{uuid.uuid4().hex[:8]}"
    restricted = {"pod-security.kubernetes.io/enforce": "restricted"}
    testbed.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": restricted}})
    testbed.kubectl("wait", "--for=create", "serviceaccount/default", "--namespace", name, "--timeout=30s")
    yield name
    testbed.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait for a condition that the cluster makes true by itself."""
    from testbed.processes import wait_until

    return wait_until


def testbed_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HACK)}
    command = [sys.executable, "-m", "testbed", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def machine_state() -> dict[str, object]:
    """What the test bed may touch, as far as it can be read without root."""
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
    """Rules, own chains and policies; a table that was used once and is as new does not count."""
    try:
        listed = subprocess.run([command], capture_output=True, text=True, check=False).stdout
    except OSError:
        return []
    as_new = re.compile(r"^(#.*|\*.*|COMMIT|:[A-Z]+ ACCEPT .*)$")
    return [f"{command}: {line}" for line in listed.splitlines() if not as_new.match(line)]


# --- Spillway on it ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def operator_image(testbed: Bed) -> OperatorImage:
    """The operator's own image, built from this checkout and imported; skipped aloud where none can be built."""
    try:
        packages.ensure(packages.IMAGES)
    except Unavailable as error:
        pytest.skip(f"no operator image: {error}")
    ended = subprocess.run(
        [sys.executable, str(HACK / "images.py"), "operator", "--folder", str(testbed.state.data / "built")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, f"the operator's image was not built:\n{ended.stdout}\n{ended.stderr}"
    built = read_json(testbed.state.data / "built" / "operator.json")
    testbed.import_images(Path(built["archive"]))
    print(f"\noperator image: {sum(built['layers']) / 1e6:.0f} MB in {len(built['layers'])} layers")
    return OperatorImage(built["image"], tuple(built["layers"]))


@pytest.fixture(scope="session")
def spillway(testbed: Bed, operator_image: OperatorImage) -> Installed:
    """The chart installed on it. The operator runs in its own image; trainers run in the quick one (this machine's
    Python, this checkout's code), because theirs has five gigabytes: `make images` builds and tries it."""
    return install(testbed, operator_image)


@pytest.fixture(scope="module")
def module_namespace(testbed: Bed) -> Iterator[str]:
    yield from _namespace(testbed)
