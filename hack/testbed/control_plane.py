"""etcd, API server, controller manager and scheduler, each one process on this machine."""

from __future__ import annotations

from pathlib import Path

from . import api, certificates
from .certificates import AGGREGATOR, AUTHORITY, CONTROLLER_MANAGER, KUBELET_CLIENT, SCHEDULER, SERVER, SERVICE_ACCOUNTS
from .layout import ADDRESS, ETCD, SERVICE_RANGE, State, write_setting
from .processes import Process, start, wait_until

START_SECONDS = 60
AUDIT_LOG_MEBIBYTES = "4096"
"""tests count requests in it, so it must not be rotated"""
FAST_CLIENT = ("--kube-api-qps=300", "--kube-api-burst=600")
"""with the default of 20 requests a second, a job of 400 pods starts three times slower"""


def start_servers(state: State) -> Process:
    """etcd and the API server, not waited for."""
    peer = "http://127.0.0.1:12380"
    start(
        state,
        "etcd",
        [
            state.bin / "etcd",
            "--name=etcd",
            f"--data-dir={state.data / 'etcd'}",
            "--unsafe-no-fsync",
            "--log-level=warn",
            f"--listen-client-urls={ETCD}",
            f"--advertise-client-urls={ETCD}",
            f"--initial-cluster=etcd={peer}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
        ],
    )
    return start(state, "kube-apiserver", [state.bin / "kube-apiserver", *_server_flags(state)])


def wait_ready(state: State, server: Process) -> None:
    wait_until("the API server", lambda: api.ready(state), START_SECONDS, server)


def start_controllers(state: State) -> None:
    key = state.certificates / f"{AUTHORITY}.key"
    start(
        state,
        "kube-controller-manager",
        [
            state.bin / "kube-controller-manager",
            *_client_flags(certificates.kubeconfig(state, CONTROLLER_MANAGER)),
            "--use-service-account-credentials=true",
            "--allocate-node-cidrs=false",
            "--concurrent-job-syncs=20",
            f"--service-account-private-key-file={state.certificates / SERVICE_ACCOUNTS}.key",
            f"--root-ca-file={_certificate(state, AUTHORITY)}",
            f"--cluster-signing-cert-file={_certificate(state, AUTHORITY)}",
            f"--cluster-signing-key-file={key}",
        ],
    )
    start(
        state,
        "kube-scheduler",
        [state.bin / "kube-scheduler", *_client_flags(certificates.kubeconfig(state, SCHEDULER))],
    )


def _client_flags(kubeconfig: Path) -> list[str]:
    kinds = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
    return [
        *(f"--{kind}={kubeconfig}" for kind in kinds),
        "--bind-address=127.0.0.1",
        "--leader-elect=false",
        *FAST_CLIENT,
    ]


def _server_flags(state: State) -> list[str]:
    def pair(certificate_flag: str, key_flag: str, name: str) -> list[str]:
        key = state.certificates / f"{name}.key"
        return [f"--{certificate_flag}={_certificate(state, name)}", f"--{key_flag}={key}"]

    authority = _certificate(state, AUTHORITY)
    return [
        f"--etcd-servers={ETCD}",
        f"--bind-address={ADDRESS}",
        f"--advertise-address={ADDRESS}",
        "--secure-port=6443",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--allow-privileged=true",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction,OwnerReferencesPermissionEnforcement",
        f"--client-ca-file={authority}",
        *pair("tls-cert-file", "tls-private-key-file", SERVER.name),
        *pair("kubelet-client-certificate", "kubelet-client-key", KUBELET_CLIENT.name),
        f"--kubelet-certificate-authority={authority}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-account-key-file={state.certificates / SERVICE_ACCOUNTS}.pub",
        f"--service-account-signing-key-file={state.certificates / SERVICE_ACCOUNTS}.key",
        f"--requestheader-client-ca-file={authority}",
        f"--requestheader-allowed-names={AGGREGATOR.user}",
        "--requestheader-username-headers=X-Remote-User",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        *pair("proxy-client-cert-file", "proxy-client-key-file", AGGREGATOR.name),
        "--endpoint-reconciler-type=lease",
        "--profiling=false",
        f"--audit-policy-file={_write_audit_policy(state)}",
        f"--audit-log-path={state.audit_log}",
        f"--audit-log-maxsize={AUDIT_LOG_MEBIBYTES}",
        "--audit-log-mode=blocking",  # a request that was answered is in the log
    ]


def _write_audit_policy(state: State) -> Path:
    """Who did what to which object, without contents; one line a request, none for probes."""
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "nonResourceURLs": ["/readyz*", "/livez*", "/healthz*", "/openapi/*", "/version"]},
            {"level": "Metadata"},
        ],
    }
    return write_setting(state.settings / "audit-policy.yaml", policy)


def _certificate(state: State, name: str) -> Path:
    return state.certificates / f"{name}.crt"
