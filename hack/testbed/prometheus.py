"""Prometheus and a node exporter on the bridge, scraping as the chart's monitors would."""

from __future__ import annotations

import re

from . import api, certificates
from .certificates import PROMETHEUS as IDENTITY
from .layout import NODE, NODE_EXPORTER, PROMETHEUS, REPOSITORY, State, write_setting
from .processes import start, wait_until

START_SECONDS = 30
SCRAPE_INTERVAL = "2s"
JOB_LABEL = "spillway.dev/job"
NODE_EXPORTERS = "spillway-node-exporter"
"""of the chart, and their job"""
RULES = REPOSITORY / "charts" / "spillway" / "files" / "rules"
PORT = "metrics"
"""name of the container port that is scraped"""


def ensure(state: State) -> None:
    api.apply(state, _manifests())
    start(
        state,
        "node-exporter",
        [
            "prometheus-node-exporter",
            f"--web.listen-address={NODE_EXPORTER}",
            "--collector.disable-defaults",
            *(f"--collector.{name}" for name in ("meminfo", "filesystem", "cpu", "diskstats", "loadavg")),
        ],
    )
    state.injected.mkdir(parents=True, exist_ok=True)
    settings = write_setting(state.settings / "prometheus.yaml", _settings(state))
    server = start(
        state,
        "prometheus",
        [
            state.bin / "prometheus",
            f"--config.file={settings}",
            f"--storage.tsdb.path={state.prometheus / 'series'}",
            f"--web.listen-address={PROMETHEUS.removeprefix('http://')}",
            "--web.enable-lifecycle",
            "--log.level=warn",
        ],
    )
    wait_until("Prometheus", _ready, START_SECONDS, server)


def _ready() -> bool:
    try:
        api.fetch(f"{PROMETHEUS}/-/ready")
    except OSError:
        return False
    return True


def _settings(state: State) -> dict[str, object]:
    return {
        "global": {
            "scrape_interval": SCRAPE_INTERVAL,
            "scrape_timeout": SCRAPE_INTERVAL,
            "evaluation_interval": SCRAPE_INTERVAL,
        },
        "rule_files": [str(RULES / "*.yaml"), str(state.injected / "*.rules")],
        "scrape_configs": [
            _pods(
                state,
                "spillway-trainer",
                [_keep(_label(JOB_LABEL, "labelpresent"), "true"), _copy(_label(JOB_LABEL), "training_job")],
            ),
            *(
                _pods(state, job, [_keep(_label("app.kubernetes.io/name"), name)])
                for job, name in (("spillway-operator", "spillway"), (NODE_EXPORTERS, NODE_EXPORTERS))
            ),
            {"job_name": "node", "static_configs": [{"targets": [NODE_EXPORTER], "labels": {"node": NODE}}]},
            {
                "job_name": "injected",
                "file_sd_configs": [{"files": [str(state.injected / "*.json")], "refresh_interval": "1s"}],
            },
        ],
    }


def _pods(state: State, name: str, chosen: list[dict[str, object]]) -> dict[str, object]:
    """Every label that says whose a series is comes from the target; only the operator's series may name others."""
    labels = {"namespace": "namespace", "pod_name": "pod", "pod_node_name": "node", "pod_container_name": "container"}
    return {
        "job_name": name,
        "honor_labels": name == "spillway-operator",
        "kubernetes_sd_configs": [
            {"role": "pod", "kubeconfig_file": str(certificates.kubeconfig(state, IDENTITY))},
        ],
        "relabel_configs": [
            *chosen,
            _keep("__meta_kubernetes_pod_container_port_name", PORT),
            _keep("__meta_kubernetes_pod_phase", "Running"),
            *(_copy(f"__meta_kubernetes_{source}", target) for source, target in labels.items()),
        ],
    }


def _label(name: str, kind: str = "label") -> str:
    return f"__meta_kubernetes_pod_{kind}_{re.sub('[^A-Za-z0-9]', '_', name)}"


def _keep(source: str, pattern: str) -> dict[str, object]:
    return {"action": "keep", "source_labels": [source], "regex": pattern}


def _copy(source: str, target: str) -> dict[str, object]:
    return {"source_labels": [source], "target_label": target}


def _manifests() -> list[dict[str, object]]:
    """What Prometheus may read."""
    name = "spillway-testbed-prometheus"
    rules = [{"apiGroups": [""], "resources": ["pods", "nodes"], "verbs": ["get", "list", "watch"]}]
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": name},
            "rules": rules,
        },
        certificates.cluster_role_binding(name, IDENTITY),
    ]
