"""The real node: containerd and the kubelet."""

from __future__ import annotations

from pathlib import Path

from . import api, certificates, host_mount, network
from .certificates import AUTHORITY, KUBELET
from .errors import Failed
from .images import PAUSE
from .layout import ADDRESS, NODE, State, write_setting
from .processes import Process, run, start, wait_until

START_SECONDS = 60
KEPT_FREE = {
    "memory.available": "200Mi",
    "nodefs.available": "2Gi",
    "imagefs.available": "2Gi",
    "nodefs.inodesFree": "1%",
}


def start_containerd(state: State, specification: Path) -> Process:
    """`specification` is what containers of the runtime class `host-mount` start from."""
    content = _containerd(state, network.write_pod_network(state), specification)
    settings = write_setting(state.settings / "containerd.toml", content)
    return start(state, "containerd", ["containerd", "--config", settings])


def wait_for_containerd(state: State, process: Process) -> None:
    def answers() -> bool:
        try:
            run(["ctr", "--address", state.containerd_socket, "--connect-timeout", "1s", "version"])
        except Failed:
            return False
        return True

    wait_until("containerd", answers, START_SECONDS, process)


def start_kubelet(state: State) -> Process:
    settings = write_setting(state.settings / "kubelet.yaml", _kubelet(state))
    return start(
        state,
        "kubelet",
        [
            state.bin / "kubelet",
            f"--config={settings}",
            f"--kubeconfig={certificates.kubeconfig(state, KUBELET)}",
            f"--root-dir={state.data / 'kubelet'}",
            f"--cert-dir={state.data / 'kubelet-certificates'}",
            # The last one is deprecated and needed: without it the kubelet has metrics of pods but not of containers.
            f"--hostname-override={NODE}",
            f"--node-ip={ADDRESS}",
            f"--containerd={state.containerd_socket}",
        ],
    )


def wait_ready(state: State, kubelet: Process) -> None:
    wait_until(f"node {NODE}", lambda: api.node_ready(state, NODE), START_SECONDS, kubelet)
    account = "/api/v1/namespaces/default/serviceaccounts/default"
    wait_until("the default service account", lambda: api.read(state, account) is not None, START_SECONDS)


def _kubelet(state: State) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{state.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "failCgroupV1": False,
        "failSwapOn": False,
        "oomScoreAdj": 0,  # lowering it needs CAP_SYS_RESOURCE
        "address": ADDRESS,
        "healthzBindAddress": "127.0.0.1",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(state.certificates / f"{AUTHORITY}.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(state.certificates / f"{KUBELET.name}.crt"),
        "tlsPrivateKeyFile": str(state.certificates / f"{KUBELET.name}.key"),
        "clusterDNS": [ADDRESS],
        "clusterDomain": network.DOMAIN,
        "resolvConf": "",
        "podLogsDir": str(state.data / "pod-logs"),
        "imageGCHighThresholdPercent": 100,  # there is no registry to get an image from again
        "evictionHard": KEPT_FREE,
        "nodeStatusUpdateFrequency": "5s",
        "syncFrequency": "10s",
        "volumeStatsAggPeriod": "10s",  # an emptyDir over its limit is evicted after 20 s instead of 50
        "makeIPTablesUtilChains": False,
        "maxPods": 110,
        "crashLoopBackOff": {"maxContainerRestartPeriod": "1s"},
    }


def _containerd(state: State, pod_network: Path, specification: Path) -> str:
    interface = 'plugins."io.containerd.grpc.v1.cri"'

    def runtime(name: str, *settings: str) -> str:
        table = f"{interface}.containerd.runtimes.{name}"
        options = f'[{table}.options]\n  SystemdCgroup = false\n  Root = "{state.sockets / "runc"}"\n'
        return "\n".join([f"[{table}]", '  runtime_type = "io.containerd.runc.v2"', *settings, options])

    return f"""\
version = 2
root = "{state.data / "containerd"}"
state = "{state.sockets / "containerd"}"
[grpc]
  address = "{state.containerd_socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{state.data / "containerd-opt"}"
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
