"""Kueue: its manager as a process of the bed, its kinds, rights and webhooks from the module's own files.

Of its integrations only batch/v1 Jobs: what the operator makes. Nothing but a Job with the label
kueue.x-k8s.io/queue-name is touched, nor rejected while Kueue is away. It is 0.18, because Kueue 0.19 needs a module of
which Go's checksum database has no sum.
"""

from __future__ import annotations

import base64
import shutil
from pathlib import Path
from typing import Any

import yaml

from . import api, certificates
from .binaries import KUEUE_FILES
from .certificates import AUTHORITY, KUEUE
from .layout import ADDRESS, State, write_setting
from .processes import run, start, wait_until

START_SECONDS = 90
NAMESPACE = "kueue-system"
USER = 65532
"""as in its image: not root"""
WEBHOOK_PORT = 9443
HEALTH = "127.0.0.1:10266"
KINDS, MANAGER = KUEUE_FILES
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
JOB = "batch-v1-job"
SERVED = (JOB, "clusterqueue", "cohort", "resourceflavor", "v1beta2-workload")
"""how the paths of the webhooks end that are wanted: the others are for kinds of other projects, and for every pod"""
WATCHED = ("workloads", "clusterqueues", "localqueues", "resourceflavors", "workloadpriorityclasses", "cohorts")
METRICS_CERTIFICATE = Path("metrics", "certs")
"""below /etc/kueue: where Kueue reads it from when it is not to make certificates itself; no setting moves it"""


def ensure(state: State) -> None:
    kubectl: list[str | Path] = [state.bin / "kubectl", "--kubeconfig", state.kubeconfig]
    run([*kubectl, "apply", "--server-side", "--force-conflicts", "-f", state.bin / KINDS])
    wait_until("Kueue's kinds", lambda: all(_is_served(state, name) for name in WATCHED), START_SECONDS)
    role, webhooks = _manifests(state)
    api.apply(state, [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}, *role])
    own_etc = _write_credentials(state)
    settings = write_setting(state.settings / "kueue.yaml", _settings(own_etc / "kueue" / METRICS_CERTIFICATE))
    # It sees our folder as /etc, in a mount namespace of its own: the machine's /etc stays as it is.
    enter = ["unshare", "--mount", "--propagation", "private", "sh", "-c", 'mount --bind "$0" /etc && exec "$@"']
    user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
    manager = start(
        state,
        "kueue",
        [*enter, own_etc, *user, state.bin / "kueue", f"--config={settings}"],
        {"KUBECONFIG": str(own_etc / "kueue" / "kubeconfig")},
    )
    wait_until("Kueue", _ready, START_SECONDS, manager)
    api.apply(state, webhooks)  # now somebody answers them: they fail closed


def _is_served(state: State, plural: str) -> bool:
    return api.read(state, f"/apis/kueue.x-k8s.io/v1beta2/{plural}?limit=1") is not None


def _ready() -> bool:
    try:
        return api.fetch(f"http://{HEALTH}/readyz") == b"ok"
    except OSError:
        return False


def _settings(certificate_folder: Path) -> dict[str, object]:
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "namespace": NAMESPACE,
        "health": {"healthProbeBindAddress": HEALTH},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": ADDRESS, "port": WEBHOOK_PORT, "certDir": str(certificate_folder)},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
        "featureGates": {"VisibilityOnDemand": False, "MultiKueue": False},
    }


def _write_credentials(state: State) -> Path:
    """The folder that Kueue sees as /etc: copies that its user can read."""
    own_etc = state.data / "kueue" / "etc"
    folder = own_etc / "kueue" / METRICS_CERTIFICATE
    folder.mkdir(parents=True, exist_ok=True)
    copies = {
        folder / "tls.crt": state.certificates / f"{KUEUE.name}.crt",
        folder / "tls.key": state.certificates / f"{KUEUE.name}.key",
        own_etc / "kueue" / "kubeconfig": certificates.kubeconfig(state, KUEUE),
    }
    for copy, made in copies.items():
        shutil.copy(made, copy)
        shutil.chown(copy, USER, USER)
    return own_etc


def _manifests(state: State) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the manager may do; and the webhooks that it answers, at its own address."""
    authority = base64.b64encode((state.certificates / f"{AUTHORITY}.crt").read_bytes()).decode("ascii")
    role, webhooks = [], []
    for found in yaml.safe_load_all((state.bin / MANAGER).read_text(encoding="utf-8")):
        if found is None:
            continue
        found["metadata"]["name"] = name = f"kueue-{found['metadata']['name']}"
        if found["kind"] == "ClusterRole":
            role += [found, certificates.cluster_role_binding(name, KUEUE)]
            continue
        wanted = [hook for hook in found["webhooks"] if hook["clientConfig"]["service"]["path"].endswith(SERVED)]
        for hook in wanted:
            address = f"https://{ADDRESS}:{WEBHOOK_PORT}{hook['clientConfig']['service']['path']}"
            hook["clientConfig"] = {"url": address, "caBundle": authority}
            if address.endswith(JOB):
                hook["objectSelector"] = {"matchExpressions": [{"key": QUEUE_LABEL, "operator": "Exists"}]}
        webhooks.append({**found, "webhooks": wanted})
    return role, webhooks
