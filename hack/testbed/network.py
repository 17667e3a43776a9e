"""The bridge that pods hang on, Services, and names."""

from __future__ import annotations

from pathlib import Path

from . import certificates
from .certificates import DNS, PROXY
from .layout import ADDRESS, BRIDGE, NODE, POD_RANGE, State, write_setting
from .processes import run, start

FORWARDING = ("net/ipv4/ip_forward", "net/bridge/bridge-nf-call-iptables")
DOMAIN = "cluster.local"


def make_bridge() -> None:
    """Before the first pod, because the API server and the kubelet listen on its address."""
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        run(["ip", "link", "add", BRIDGE, "type", "bridge"])
        run(["ip", "address", "add", f"{ADDRESS}/24", "dev", BRIDGE])
    run(["ip", "link", "set", BRIDGE, "up"])
    for name in FORWARDING:
        setting = Path("/proc/sys") / name
        if setting.exists():
            setting.write_text("1", encoding="ascii")


def write_pod_network(state: State, node: str, addresses: tuple[str, str]) -> Path:
    """The folder of the network plugin's configuration: a node's pods get one of `addresses`, first to last."""
    first, last = addresses
    plugin = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "hairpinMode": True,
        "ipMasq": False,
        "ipam": {
            "type": "host-local",
            "dataDir": str(state.data / node / "addresses"),
            "ranges": [[{"subnet": POD_RANGE, "rangeStart": first, "rangeEnd": last, "gateway": ADDRESS}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        },
    }
    content = {"cniVersion": "0.4.0", "name": "pods", "plugins": [plugin]}
    return write_setting(state.settings / node / "cni" / "10-pods.conflist", content).parent


def start_services(state: State) -> None:
    """kube-proxy, and CoreDNS on the bridge's address."""
    settings = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "bindAddress": ADDRESS,
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "clientConnection": {"kubeconfig": str(certificates.kubeconfig(state, PROXY))},
        "clusterCIDR": POD_RANGE,
        "hostnameOverride": NODE,
        "mode": "iptables",
        # Without bridged packets in iptables, an answer from pod to pod would not pass the translation again.
        "iptables": {"masqueradeAll": not Path("/proc/sys", FORWARDING[1]).exists()},
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    proxy = write_setting(state.settings / "kube-proxy.yaml", settings)
    start(state, "kube-proxy", [state.bin / "kube-proxy", f"--config={proxy}"])
    names = write_setting(state.settings / "Corefile", _corefile(certificates.kubeconfig(state, DNS)))
    start(state, "coredns", [state.bin / "coredns", "-conf", names])


def _corefile(kubeconfig: Path) -> str:
    return f"""\
.:53 {{
    bind {ADDRESS}
    errors
    kubernetes {DOMAIN} in-addr.arpa {{
        kubeconfig {kubeconfig} testbed
        pods insecure
        ttl 2
    }}
    cache 2
}}
"""


def manifests() -> list[dict[str, object]]:
    """What CoreDNS may read."""
    name = "spillway-testbed-dns"
    watch = ["list", "watch"]
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": [
                {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": watch},
                {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": watch},
            ],
        },
        certificates.cluster_role_binding(name, DNS),
    ]
