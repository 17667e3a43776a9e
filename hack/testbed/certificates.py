"""One authority, one certificate for each component, one kubeconfig for each client. By openssl, in half a second."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass
from pathlib import Path

from .layout import ADDRESS, API_SERVER, FIRST_SERVICE_ADDRESS, NODE, SECOND_ADDRESS, SECOND_NODE, State
from .processes import run

VALID_DAYS = "30"
AUTHORITY = "ca"
SERVICE_ACCOUNTS = "service-accounts"
"""key that signs the tokens of pods"""


@dataclass(frozen=True, slots=True)
class Identity:
    """A certificate's holder: RBAC knows it as user `user` in `group`; `hosts` are the names that it serves."""

    name: str
    user: str
    group: str = ""
    hosts: str = ""

    @property
    def subject(self) -> str:
        return (f"/O={self.group}" if self.group else "") + f"/CN={self.user}"

    @property
    def extensions(self) -> str:
        usage = "clientAuth,serverAuth" if self.hosts else "clientAuth"
        lines = ["basicConstraints=CA:FALSE", "keyUsage=digitalSignature,keyEncipherment", f"extendedKeyUsage={usage}"]
        return "\n".join([*lines, *([f"subjectAltName={self.hosts}"] if self.hosts else [])]) + "\n"


ADMINISTRATOR = Identity("admin", "admin", "system:masters")
CONTROLLER_MANAGER = Identity("controller-manager", "system:kube-controller-manager")
SCHEDULER = Identity("scheduler", "system:kube-scheduler")
PROXY = Identity("proxy", "system:kube-proxy")
DNS = Identity("dns", "spillway-testbed:dns")
PROMETHEUS = Identity("prometheus", "spillway-testbed:prometheus")
KUBELET = Identity("kubelet", f"system:node:{NODE}", "system:nodes", f"DNS:{NODE},IP:{ADDRESS}")
SECOND_KUBELET = Identity(
    "kubelet-1", f"system:node:{SECOND_NODE}", "system:nodes", f"DNS:{SECOND_NODE},IP:{SECOND_ADDRESS}"
)
KUEUE = Identity("kueue", "spillway-testbed:kueue", hosts=f"IP:{ADDRESS}")
CLIENTS = (ADMINISTRATOR, CONTROLLER_MANAGER, SCHEDULER, PROXY, DNS, PROMETHEUS, KUBELET, SECOND_KUBELET, KUEUE)

SERVICE_NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")
SERVER = Identity(
    "apiserver",
    "kube-apiserver",
    hosts=",".join([f"DNS:{name}" for name in SERVICE_NAMES] + [f"IP:{ADDRESS}", f"IP:{FIRST_SERVICE_ADDRESS}"]),
)
KUBELET_CLIENT = Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters")
AGGREGATOR = Identity("front-proxy-client", "front-proxy-client")


def make(state: State) -> None:
    """All keys, certificates and kubeconfigs, unless they are there."""
    if state.kubeconfig.exists():
        return
    folder = state.certificates
    authority = folder / f"{AUTHORITY}.key"
    _key(authority)
    run(
        [
            "openssl",
            "req",
            "-x509",
            "-new",
            "-key",
            authority,
            "-subj",
            "/CN=spillway-testbed",
            "-days",
            VALID_DAYS,
            "-out",
            str(folder / f"{AUTHORITY}.crt"),
        ]
    )
    _key(folder / f"{SERVICE_ACCOUNTS}.key")
    run(
        [
            "openssl",
            "ec",
            "-in",
            folder / f"{SERVICE_ACCOUNTS}.key",
            "-pubout",
            "-out",
            str(folder / f"{SERVICE_ACCOUNTS}.pub"),
        ]
    )
    for identity in (*CLIENTS, SERVER, KUBELET_CLIENT, AGGREGATOR):
        _certificate(folder, identity)
    for identity in CLIENTS:
        _write_private(kubeconfig(state, identity), json.dumps(_kubeconfig(folder, identity), indent=1))
    kubeconfig(state, ADMINISTRATOR).rename(state.kubeconfig)  # last: its presence says that all the others are there


def kubeconfig(state: State, identity: Identity) -> Path:
    return state.settings / f"{identity.name}.kubeconfig"


def _certificate(folder: Path, identity: Identity) -> None:
    key, request = folder / f"{identity.name}.key", folder / f"{identity.name}.csr"
    extensions = folder / f"{identity.name}.ext"
    _key(key)
    run(["openssl", "req", "-new", "-key", key, "-subj", identity.subject, "-out", request])
    extensions.write_text(identity.extensions, encoding="ascii")
    run(
        [
            "openssl",
            "x509",
            "-req",
            "-in",
            request,
            "-days",
            VALID_DAYS,
            "-extfile",
            extensions,
            "-CA",
            str(folder / f"{AUTHORITY}.crt"),
            "-CAkey",
            str(folder / f"{AUTHORITY}.key"),
            "-CAcreateserial",
            "-out",
            str(folder / f"{identity.name}.crt"),
        ]
    )
    request.unlink()
    extensions.unlink()


def _key(path: Path) -> None:
    _write_private(path, run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout"]))


def _write_private(path: Path, text: str) -> None:
    path.touch(mode=0o600)
    path.write_text(text, encoding="ascii")


def _kubeconfig(folder: Path, identity: Identity) -> dict[str, object]:
    """Self-contained, so that it can be copied; JSON is YAML."""

    def content(name: str) -> str:
        return base64.b64encode((folder / name).read_bytes()).decode("ascii")

    user = {
        "client-certificate-data": content(f"{identity.name}.crt"),
        "client-key-data": content(f"{identity.name}.key"),
    }
    cluster = {"server": API_SERVER, "certificate-authority-data": content(f"{AUTHORITY}.crt")}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "testbed",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": identity.name, "user": user}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": identity.name}}],
    }


def cluster_role_binding(role: str, identity: Identity) -> dict[str, object]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": role},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": identity.user}],
    }
