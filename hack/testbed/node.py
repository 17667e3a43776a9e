"""A real node: containerd and the kubelet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from . import api, certificates, host_mount, network
from .certificates import AUTHORITY, KUBELET, Identity
from .errors import Failed
from .images import PAUSE
from .layout import ADDRESS, NODE, POD_ADDRESSES, State, write_setting
from .processes import Process, run, start, wait_until

START_SECONDS = 60
LEASE_SECONDS = 20
"""a kubelet renews its lease every quarter of it"""
KEPT_FREE = {
    "memory.available": "200Mi",
    "nodefs.available": "2Gi",
    "imagefs.available": "2Gi",
    "nodefs.inodesFree": "1%",
}


@dataclass(frozen=True, slots=True)
class RealNode:
    """What tells one real node of this machine from another."""

    name: str
    suffix: str
    """of the names of its processes, files and folders"""
    address: str
    pod_addresses: tuple[str, str]
    identity: Identity
    """of its kubelet"""
    cgroup: str = "/"
    """its pods' cgroups lie below"""

    def socket(self, state: State) -> Path:
        return state.sockets / f"containerd{self.suffix}.sock"


FIRST = RealNode(NODE, "", ADDRESS, POD_ADDRESSES, KUBELET)


def start_containerd(
    state: State, specification: Path, node: RealNode = FIRST, within: tuple[str | Path, ...] = ()
) -> Process:
    """`specification` is what containers of the runtime class `host-mount` start from; `within` enters namespaces."""
    content = _containerd(state, node, network.write_pod_network(state, node.name, node.pod_addresses), specification)
    settings = write_setting(state.settings / f"containerd{node.suffix}.toml", content)
    return start(state, f"containerd{node.suffix}", [*within, "containerd", "--config", settings])


def wait_for_containerd(state: State, process: Process, node: RealNode = FIRST) -> None:
    def answers() -> bool:
        try:
            run(["ctr", "--address", node.socket(state), "--connect-timeout", "1s", "version"])
        except Failed:
            return False
        return True

    wait_until("containerd", answers, START_SECONDS, process)


def start_kubelet(state: State, node: RealNode = FIRST, within: tuple[str | Path, ...] = ()) -> Process:
    settings = write_setting(state.settings / f"kubelet{node.suffix}.yaml", _kubelet(state, node))
    return start(
        state,
        f"kubelet{node.suffix}",
        [
            *within,
            state.bin / "kubelet",
            f"--config={settings}",
            f"--kubeconfig={certificates.kubeconfig(state, node.identity)}",
            f"--root-dir={state.data / f'kubelet{node.suffix}'}",
            f"--cert-dir={state.data / f'kubelet-certificates{node.suffix}'}",
            # The last one is deprecated and needed: without it the kubelet has metrics of pods but not of containers.
            f"--hostname-override={node.name}",
            f"--node-ip={node.address}",
            f"--containerd={node.socket(state)}",
        ],
    )


def wait_ready(state: State, kubelet: Process, node: RealNode = FIRST) -> None:
    wait_until(f"node {node.name}", lambda: api.node_ready(state, node.name), START_SECONDS, kubelet)
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    wait_until("the default service account", lambda: api.read(state, account) is not None, START_SECONDS)


def _kubelet(state: State, node: RealNode) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{node.socket(state)}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": node.cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # lowering it needs CAP_SYS_RESOURCE
        "address": node.address,
        "healthzBindAddress": "127.0.0.1",
        "healthzPort": 0 if node.suffix else 10248,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(state.certificates / f"{AUTHORITY}.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(state.certificates / f"{node.identity.name}.crt"),
        "tlsPrivateKeyFile": str(state.certificates / f"{node.identity.name}.key"),
        "clusterDNS": [ADDRESS],
        "clusterDomain": network.DOMAIN,
        "resolvConf": "",
        "podLogsDir": str(state.data / f"pod-logs{node.suffix}"),
        "imageGCHighThresholdPercent": 100,  # there is no registry to get an image from again
        "evictionHard": KEPT_FREE,
        "nodeStatusUpdateFrequency": "5s",
        "nodeLeaseDurationSeconds": LEASE_SECONDS,
        "syncFrequency": "10s",
        "volumeStatsAggPeriod": "10s",  # an emptyDir over its limit is evicted after 20 s instead of 50
        "makeIPTablesUtilChains": False,
        "maxPods": 110,
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
    }


def _containerd(state: State, node: RealNode, pod_network: Path, specification: Path) -> str:
    interface = 'plugins."io.containerd.grpc.v1.cri"'

    def runtime(name: str, *settings: str) -> str:
        table = f"{interface}.containerd.runtimes.{name}"
        options = f'[{table}.options]\n  SystemdCgroup = false\n  Root = "{state.sockets / f"runc{node.suffix}"}"\n'
        return "\n".join([f"[{table}]", '  runtime_type = "io.containerd.runc.v2"', *settings, options])

    return f"""\
version = 2
root = "{state.data / f"containerd{node.suffix}"}"
state = "{state.sockets / f"containerd{node.suffix}"}"
[grpc]
  address = "{node.socket(state)}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state.data / f"containerd-opt{node.suffix}"}"
[{interface}]
  sandbox_image = "{PAUSE}"
  # Neither is to be had in every container or virtual machine that this runs in.
  restrict_oom_score_adj = true
  disable_apparmor = true
[{interface}.cni]
  bin_dir = "/usr/lib/cni"
  conf_dir = "{pod_network}"
[{interface}.containerd]
  snapshotter = "overlayfs"
  default_runtime_name = "runc"
{runtime("runc")}
{runtime(host_mount.RUNTIME_CLASS, f'  base_runtime_spec = "{specification}"')}
"""
