"""Values of the chart that its tests go through."""

from __future__ import annotations

MATRIX: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "two namespaces": ("watchNamespaces={team-a,team-b}",),
    "least": (
        "crds.enabled=false",
        "nodeReader.enabled=false",
        "progress.enabled=false",
        "userRoles.enabled=false",
        "dashboards.enabled=false",
        "watchNamespaces={team-a}",
    ),
    "most": (
        "monitoring.enabled=true",
        "monitoring.labels.release=prometheus",
        "prometheus.url=http://prometheus.monitoring.svc:9090",
        "progress.tls.secretName=own-certificate",
        "imagePullSecrets[0].name=registry",
        "serviceAccount.name=runner",
        "serviceAccount.annotations.role=trainer",
        "priorityClassName=high",
        "podLabels.team=ml",
        "podAnnotations.note=x",
        "nodeSelector.pool=system",
        "tolerations[0].operator=Exists",
        "dashboards.annotations.grafana_folder=Training",
        "fullnameOverride=own-name",
        "crds.keep=false",
    ),
    "digest": (f"image.digest=sha256:{'a' * 64}", f"trainer.image.digest=sha256:{'b' * 64}"),
}


def settings(values: tuple[str, ...]) -> list[str]:
    """Flags of helm."""
    return [word for value in values for word in ("--set", value)]
