"""The commands of the pages that need a cluster, run as they are written, page by page, on an empty bed.

The quick image replaces both images on pages that do not name a registry.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cases.page_commands import CLUSTER, CLUSTER_PAGES
from harness.depth import DEPTH
from harness.installed import OF_THE_OPERATOR, SYSTEM_NAMESPACE, install
from harness.page_commands import Shell, commands_of
from harness.places import ROOT
from testbed.client import Bed

CRDS = tuple(
    f"{plural}.spillway.dev" for plural in ("trainingjobs", "memoryprofiles", "nodeprofiles", "operatorconfigs")
)
NAMESPACE, TEAM = "spillway", "team-a"
CLAIM = Path("/var/tmp/spillway-two-pod")
QUICK_IMAGE = "local/hostroot --set-string image.tag=1,trainer.image.tag=1"
KEEPS_CRDS = "docs/security.md"
"""the page whose installation uses CRDs that are already there"""


def emptied(bed: Bed, *, crds: bool = True) -> None:
    """Removes the release and all jobs and, without `crds`, also the CRDs."""
    if bed.kubectl("get", "crd", CRDS[0], "--ignore-not-found"):
        bed.kubectl("delete", "trainingjobs.spillway.dev", "--all", "-A", "--cascade=foreground", "--timeout=120s")
    for namespace in (NAMESPACE, SYSTEM_NAMESPACE):
        bed.helm("uninstall", "spillway", "--namespace", namespace, "--ignore-not-found", "--wait", "--timeout", "120s")
    bed.kubectl("delete", "namespace", NAMESPACE, TEAM, "--ignore-not-found", "--timeout=120s")
    bed.kubectl("delete", "-f", ROOT / "examples" / "two-pod-claim.yaml", "--ignore-not-found", "--timeout=120s")
    if not crds:
        bed.kubectl("delete", "crd", *CRDS, "--ignore-not-found", "--timeout=120s")
    shutil.rmtree(CLAIM, ignore_errors=True)


@pytest.fixture(scope="module")
def shell(testbed: Bed, shared: Path, request: pytest.FixtureRequest) -> Iterator[Shell]:
    emptied(testbed, crds=False)
    homes = {f"HELM_{kind}_HOME": str(testbed.state.data / "helm") for kind in ("CACHE", "CONFIG", "DATA")}
    path = f"{testbed.state.bin}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    replaced = {
        "REGISTRY/spillway-operator": "local/hostroot",
        "REGISTRY/spillway-trainer": QUICK_IMAGE,
        "sha256:...": f"sha256:{'0' * 64}",
        "/tmp/spillway-testbed": str(testbed.state.root),
    }
    yield Shell(ROOT, {**os.environ, "KUBECONFIG": str(testbed.kubeconfig), "PATH": path, **homes}, replaced)
    emptied(testbed, crds=False)
    if (shared / "installed").exists():
        install(testbed, request.getfixturevalue("operator_image"))


@pytest.mark.parametrize("page", [page for page, depth in CLUSTER_PAGES.items() if depth <= DEPTH])
def test_the_commands_of_a_page_work_on_a_cluster(page: str, shell: Shell, testbed: Bed) -> None:
    if page == KEEPS_CRDS:
        testbed.kubectl("create", "namespace", TEAM)
        testbed.kubectl("apply", "--server-side", "--force-conflicts", "-f", ROOT / "crds")  # as a release leaves them
    try:
        for command in commands_of(ROOT / page):
            if command in CLUSTER:
                shell.run(command)
    except AssertionError as error:
        seen = testbed.kubectl("get", "pods,trainingjobs.spillway.dev", "-A", "-o", "wide")
        logs = testbed.kubectl("logs", "-l", OF_THE_OPERATOR, "-n", NAMESPACE, "--tail=40", "--ignore-errors")
        raise AssertionError(f"{error}\n{seen}\n{logs}") from error
    finally:
        shell.exports.clear()
        emptied(testbed)
