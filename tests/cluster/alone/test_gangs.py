"""Gangs without a queue, on a node whose free cores nobody else uses meanwhile."""

from __future__ import annotations

from harness.installed import Installed, changed, example, named

SECONDS = 600.0
"""limit for each job; two jobs share what is enough for one and a half"""


def test_two_gangs_on_capacity_for_one_and_a_half_both_complete(spillway: Installed, namespace: str) -> None:
    """Each gang gets places for one or two of its pods, and the younger gang gives its places back."""
    since = spillway.bed.audit_position()
    made = []
    for name in ("older", "younger"):
        spillway.bed.claim(name, namespace)
        made.append(
            changed(
                named(example("two-pod", namespace), name),
                namespace,
                checkpoint__claim=name,
                pod={"resources": {"cpu": _two_fifths_of_the_node(spillway)}},
            )
        )
    for each in made:
        spillway.create(each)
    for name in ("older", "younger"):
        ended = spillway.wait(namespace, name, "Complete", SECONDS)
        assert ended["status"]["attempts"]["restarts"] == 0
        assert ended["status"]["plan"]["gang"] == "Yield"
    verbs = {request.verb for request in spillway.writes(since, namespace) if request.resource == "jobs"}
    assert verbs <= {"create", "delete"}


def _two_fifths_of_the_node(spillway: Installed) -> str:
    """A CPU request with which three pods, but not four, fit on the free cores of the real node."""
    node = spillway.bed.get("node", "node-0")
    cores = node["status"]["allocatable"]["cpu"]
    total = int(cores[:-1]) if cores.endswith("m") else int(cores) * 1000
    used = 0
    for pod in spillway.bed.get("pods", "-A", "--field-selector=spec.nodeName=node-0,status.phase=Running")["items"]:
        for container in pod["spec"]["containers"]:
            asked = container.get("resources", {}).get("requests", {}).get("cpu", "0")
            used += int(asked[:-1]) if asked.endswith("m") else int(float(asked) * 1000)
    return f"{(total - used) * 2 // 7}m"
