"""A release that serves one namespace, with Roles only."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from harness.installed import CHART, HOST_MOUNT_IMAGE, Document, Installed, OperatorImage, example, on_fake_nodes

SECONDS = 60.0


@pytest.fixture
def least(spillway: Installed, operator_image: OperatorImage, namespace: str) -> Iterator[tuple[str, int]]:
    """A second release that serves one namespace with Roles only, while the first one is scaled to 0. Yields its
    namespace, and the position of the audit log before it."""
    bed, own = spillway.bed, f"{namespace}-system"
    repository, tag = operator_image.name.rsplit(":", 1)
    values: Document = {
        "image": {"repository": repository, "tag": tag},
        "trainer": {"image": HOST_MOUNT_IMAGE},
        "watchNamespaces": [namespace],
        "crds": {"enabled": False},
        "nodeReader": {"enabled": False},
        "progress": {"enabled": False},
        "userRoles": {"enabled": False},
        "dashboards": {"enabled": False},
    }
    file = bed.state.data / "least.json"
    file.write_text(json.dumps(values), encoding="utf-8")
    since = bed.audit_position()
    with spillway.stopped():
        try:
            bed.helm(
                "install", "least", CHART, "--namespace", own, "--create-namespace", "--values", file, "--wait",
                "--timeout", "120s",
            )  # fmt: skip
            yield own, since
        finally:
            bed.helm("uninstall", "least", "--namespace", own, "--wait", "--timeout", "60s")
            bed.kubectl("delete", "namespace", own, "--wait=false")


def test_job_runs_with_roles_in_one_namespace_and_no_request_is_denied(
    spillway: Installed, least: tuple[str, int], namespace: str
) -> None:
    own, since = least
    bed = spillway.bed
    bindings = bed.get("clusterrolebindings", "-l", "app.kubernetes.io/instance=least")["items"]
    assert bindings == [], "no right outside the namespace"
    spillway.create(on_fake_nodes(example("one-pod", namespace)))  # the catalog's node is larger than the bed's
    job = spillway.wait(namespace, "one-pod", "Complete", SECONDS)
    metrics = spillway.condition(namespace, "one-pod", "MetricsAvailable")
    assert (metrics["status"], metrics["reason"]) == ("False", "NoNodeView")
    assert job["status"]["plan"]["podMemory"], "planned from the catalog"
    user = f"system:serviceaccount:{own}:least-spillway"
    requests = [one for one in bed.requests(since, user) if not one.resource.startswith("selfsubject")]
    assert requests
    forbidden = {(one.verb, one.resource, one.namespace) for one in requests if not one.allowed}
    assert forbidden == set()
    elsewhere = {(one.resource, one.namespace) for one in requests if one.namespace != namespace}
    assert elsewhere == {("leases", own)}, "who leads is a matter of its own namespace"
