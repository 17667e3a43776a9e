"""Where everything of the test bed lies: paths below one state folder, and addresses on one bridge."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]

NODE = "node-0"
"""the real node's name"""
SECOND_NODE = "node-1"
"""of the second one, which `--second-node` adds"""
BRIDGE = "cni0"
ADDRESS = "10.244.0.1"
"""of the bridge: API server, kubelet, DNS and Prometheus listen here and nowhere else"""
SECOND_ADDRESS = "10.244.0.2"
"""of the second node's kubelet, on the same bridge"""
POD_RANGE = "10.244.0.0/24"
POD_ADDRESSES = ("10.244.0.10", "10.244.0.159")
"""first and last of the real node's pods"""
SECOND_POD_ADDRESSES = ("10.244.0.160", "10.244.0.250")
SERVICE_RANGE = "10.96.0.0/16"
FIRST_SERVICE_ADDRESS = "10.96.0.1"
FAKE_POD_RANGE = "10.245.0.0/16"
API_SERVER = f"https://{ADDRESS}:6443"
PROMETHEUS = f"http://{ADDRESS}:9090"
NODE_EXPORTER = f"{ADDRESS}:9100"
ETCD = "http://127.0.0.1:12379"


@dataclass(frozen=True, slots=True)
class State:
    """One test bed's folder. It exists from `up` to `down`."""

    root: Path

    @property
    def kubeconfig(self) -> Path:
        """of a cluster administrator"""
        return self.root / "kubeconfig"

    @property
    def bin(self) -> Path:
        """link to the built programs: kubectl, helm, ..."""
        return self.root / "bin"

    @property
    def checkout(self) -> Path:
        """link to the repository whose sources the image local/hostroot:1 shows"""
        return self.root / "checkout"

    @property
    def logs(self) -> Path:
        return self.root / "log"

    @property
    def audit_log(self) -> Path:
        return self.logs / "audit.log"

    @property
    def processes(self) -> Path:
        return self.root / "processes"

    @property
    def machine(self) -> Path:
        """what the machine was like before `up`"""
        return self.root / "machine.json"

    @property
    def settings(self) -> Path:
        """configuration files of the components"""
        return self.root / "etc"

    @property
    def certificates(self) -> Path:
        return self.root / "pki"

    @property
    def sockets(self) -> Path:
        return self.root / "run"

    @property
    def containerd_socket(self) -> Path:
        """of the first node"""
        return self.sockets / "containerd.sock"

    @property
    def second_containerd_socket(self) -> Path:
        return self.sockets / "containerd-1.sock"

    @property
    def data(self) -> Path:
        """what etcd, kubelet and containerd keep"""
        return self.root / "var"

    @property
    def images(self) -> Path:
        return self.root / "images"

    @property
    def volumes(self) -> Path:
        """folders behind the claims that tests make"""
        return self.root / "volumes"

    @property
    def prometheus(self) -> Path:
        return self.root / "prometheus"

    @property
    def injected(self) -> Path:
        """Prometheus reads targets from *.json here: [{"targets": [address], "labels": {"node": name}}]"""
        return self.prometheus / "injected"

    @property
    def unhealthy_gpus(self) -> Path:
        """names of fake GPUs that are to look broken, one a line: fake-gpu-0"""
        return self.root / "unhealthy-gpus"


def write_setting(path: Path, content: str | Mapping[str, object]) -> Path:
    """A component's configuration, as text or as JSON, which is YAML. Left alone where it says so already: kube-proxy,
    for one, ends when its file is touched."""
    text = content if isinstance(content, str) else json.dumps(content, indent=1)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


def state() -> State:
    return State(Path(os.environ.get("SPILLWAY_TESTBED", "/tmp/spillway-testbed")).absolute())  # noqa: S108


def cache() -> Path:
    """Built programs, shared by every checkout of this user."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "spillway" / "testbed"
