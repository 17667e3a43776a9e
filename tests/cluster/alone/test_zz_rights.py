"""The operator has exactly the rights that it uses: compares this session's audit log with the rendered rules.

It runs last, because the other tests of this folder make the operator use its rights.
"""

from __future__ import annotations

import pytest
import yaml

from harness.installed import CHART, OPERATOR_USER, RELEASE, SYSTEM_NAMESPACE, Installed

Right = tuple[str, str, str]
"""verb, API group, resource with its subresource"""
OF_THE_CLUSTER, OF_THE_RELEASE, OF_JOBS = "cluster", "release's namespace", "namespaces of jobs"
OF_ALL_NODES = ("nodes", "nodeprofiles", "operatorconfigs", "csistoragecapacities", "tokenreviews")
ROLES = {"node-reader": OF_THE_CLUSTER, "token-review": OF_THE_CLUSTER, "leader": OF_THE_RELEASE}
"""suffix of a role's name -> where the role holds; all other roles hold in the namespaces of jobs"""


def rendered(spillway: Installed) -> set[tuple[Right, str]]:
    """Every right in the chart's bound roles, and where it holds."""
    text = spillway.bed.helm("template", RELEASE, CHART, "--namespace", SYSTEM_NAMESPACE)
    documents = [document for document in yaml.safe_load_all(text) if document]
    bound = {
        document["roleRef"]["name"]
        for document in documents
        if document["kind"] in ("ClusterRoleBinding", "RoleBinding")
    }
    return {
        ((verb, group, resource), place_of_role(document["metadata"]["name"]))
        for document in documents
        if document["kind"] in ("ClusterRole", "Role") and document["metadata"]["name"] in bound
        for rule in document["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def place_of_role(name: str) -> str:
    return next((place for end, place in ROLES.items() if name.endswith(f"-{end}")), OF_JOBS)


def used(spillway: Installed) -> set[tuple[Right, str]]:
    found = set()
    for request in spillway.bed.requests(0, OPERATOR_USER):
        resource = f"{request.resource}/{request.subresource}" if request.subresource else request.resource
        if resource.startswith("selfsubject"):
            continue
        place = OF_JOBS
        exporters_or_all = request.resource == "pods" and request.namespace in ("", SYSTEM_NAMESPACE)
        if request.resource in OF_ALL_NODES or exporters_or_all:
            place = OF_THE_CLUSTER
        elif request.namespace == SYSTEM_NAMESPACE:
            place = OF_THE_RELEASE
        found.add(((request.verb, request.group, resource), place))
        if request.verb == "patch" and request.code == 201:  # server-side apply of a new object needs both rights
            found.add((("create", request.group, resource), place))
    return found


@pytest.mark.ci
def test_every_rule_of_the_chart_is_used_and_nothing_else_is_asked(spillway: Installed) -> None:
    rules, uses = rendered(spillway), used(spillway)
    assert uses - rules == set(), "asked without a rule: the chart lacks it"
    assert rules - uses == set(), "rules that nothing uses: remove them"


def test_nothing_was_forbidden(spillway: Installed) -> None:
    """Rejections of requests that were also allowed do not count: a restarted API server rejects until it has read its
    roles."""
    asked: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
    for request in spillway.bed.requests(0, OPERATOR_USER):
        asked[request.allowed].add((request.verb, request.resource, request.subresource, request.namespace))
    rejected = asked[False] - asked[True]
    if rejected:
        pytest.fail(f"the API server rejected {sorted(rejected)}")


def test_nobody_but_the_user_writes_a_spec(spillway: Installed) -> None:
    """GitOps tools would undo such writes. The operator only writes a TrainingJob's status, and deletes it after its
    time to live."""
    written = {
        (request.verb, request.subresource)
        for request in spillway.bed.requests(0, OPERATOR_USER)
        if request.mutating and request.resource == "trainingjobs"
    }
    assert written <= {("patch", "status"), ("delete", "")}, written
