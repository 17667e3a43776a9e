"""The chart as `helm template` renders it, over a matrix of values.

Helm comes from PATH or from the test bed's cache (`make cluster-up` puts two major versions there).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from typing import Any

import yaml

from harness.built_programs import built_program
from harness.places import ROOT

CHART = ROOT / "charts" / "spillway"
RELEASE, NAMESPACE = "demo", "training-system"

Object = dict[str, Any]

MATRIX: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "two namespaces": ("watchNamespaces={team-a,team-b}",),
    "least": (
        "crds.enabled=false",
        "nodeReader.enabled=false",
        "nodeExporter.enabled=false",
        "progress.enabled=false",
        "userRoles.enabled=false",
        "dashboards.enabled=false",
        "watchNamespaces={team-a}",
    ),
    "most": (
        "monitoring.enabled=true",
        "monitoring.labels.release=prometheus",
        "prometheus.url=http://prometheus.monitoring.svc:9090",
        "prometheus.secretName=access",
        "nodeExporter.drives[0].mountPoint=/mnt/nvme0",
        "nodeExporter.drives[0].storageClassName=local-nvme",
        "nodeExporter.runtimeClassName=nvidia",
        "nodeExporter.nodeSelector.pool=gpu",
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


def _helms() -> dict[str, str]:
    """Major version -> path of Helm, for the versions that this machine has."""
    found = {}
    for path in filter(None, (shutil.which("helm"), built_program("helm"), built_program("helm3"))):
        said = subprocess.run([path, "version", "--short"], capture_output=True, text=True, check=False).stdout
        if match := re.match(r"v(\d+)\.", said):
            found[match[1]] = path
    return found


HELMS = _helms()
NO_HELM = "no helm in PATH and none in the test bed's cache: `make cluster-up` puts one there"


def helm(major: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HELMS[major], *arguments], capture_output=True, text=True, check=False, timeout=60)


def settings_of(values: tuple[str, ...]) -> list[str]:
    return [word for value in values for word in ("--set", value)]


@cache
def rendered(major: str, values: tuple[str, ...] = ()) -> tuple[Object, ...]:
    done = helm(major, "template", RELEASE, str(CHART), "--namespace", NAMESPACE, *settings_of(values))
    assert done.returncode == 0, done.stderr
    return tuple(document for document in yaml.safe_load_all(done.stdout) if document)


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def only(objects: tuple[Object, ...], kind: str) -> Object:
    (found,) = of_kind(objects, kind)
    return found
