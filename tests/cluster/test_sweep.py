"""From `kubectl apply` to the best of three models: a sweep in one pod, whose members take turns, on a real kubelet."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from harness.chart_queries import until_it_has_data
from harness.installed import Document, Installed, example, named
from harness.patience import wait_until
from spillway_trainer.checkpoints.sealed_json import unseal

NAME = "sweep"
SECONDS = 180.0
WITHOUT_FAULTS = {
    "Attempt ended early",
    "Out of memory: next attempt with another plan",
    "Live correction: smaller spill files",
}
"""Events of the dashboard that do not happen to this job."""


@dataclass(frozen=True, slots=True)
class Swept:
    """The sweep after its end."""

    namespace: str
    job: Document
    installed: Installed

    @property
    def members(self) -> dict[str, Document]:
        return {member["name"]: member for member in self.job["status"]["members"]}


@pytest.fixture(scope="module")
def swept(spillway: Installed, module_namespace: str) -> Swept:
    spillway.bed.kubectl("apply", "-f", "-", stdin=json.dumps(example(NAME, module_namespace)))
    job = spillway.wait(module_namespace, NAME, "Complete", SECONDS)
    return Swept(module_namespace, job, spillway)


def test_status_names_the_best_member(swept: Swept) -> None:
    """A round of three members keeps one, and only that one trains to the end."""
    best = swept.job["status"]["bestMember"]
    assert [member["name"] for member in swept.job["spec"]["members"]] == list(swept.members)
    assert {name for name, member in swept.members.items() if member["state"] == "Complete"} == {best}
    assert swept.members[best]["step"] == swept.members[best]["steps"] == swept.job["spec"]["training"]["steps"]
    assert float(swept.members[best]["objective"]) < min(
        float(member["objective"]) for name, member in swept.members.items() if name != best
    )


def test_a_stopped_member_says_why_in_its_row_and_in_an_event(swept: Swept) -> None:
    halving = swept.job["spec"]["objective"]["halving"]
    stopped = [member for member in swept.members.values() if member["state"] == "Stopped"]
    assert len(stopped) == 2
    wanted = {f"member {member['name']}: {member['message']}" for member in stopped}

    def notes() -> set[str]:
        events = swept.installed.bed.get("events.events.k8s.io", "-n", swept.namespace)["items"]
        return {event["note"] for event in events if event["reason"] == "MemberStopped"}

    # Events are posted after the status is written.
    wait_until(lambda: wanted <= notes(), why=lambda: f"{wanted} not in {notes()}", pause=0.5)
    for member in stopped:
        sentence = rf"stopped after {halving} steps: evaluation loss ([\d.]+), best ([\d.]+)"
        found = re.fullmatch(sentence, member["message"])
        assert found is not None, member
        assert float(found[1]) > float(found[2])


def test_kubectl_get_wide_has_a_column_that_names_it(swept: Swept) -> None:
    shown = swept.installed.bed.kubectl("get", "tjob", NAME, "-n", swept.namespace, "-o", "wide")
    heading, row = shown.splitlines()
    begin = heading.index("BEST")
    assert row[begin:].split()[0] == swept.job["status"]["bestMember"]


def test_its_progress_is_that_of_all_members_together(swept: Swept) -> None:
    progress = swept.job["status"]["progress"]
    assert progress["step"] == progress["steps"] == sum(member["step"] for member in swept.members.values())
    assert progress["display"] == "100%"
    complete = next(found for found in swept.job["status"]["conditions"] if found["type"] == "Complete")
    assert complete["message"].endswith(f"the best of 3 members is {swept.job['status']['bestMember']}")
    assert swept.job["status"]["attempts"]["total"] == 1


def test_every_query_of_the_sweeps_dashboard_returns_data(swept: Swept) -> None:
    until_it_has_data(swept.installed.bed, "sweep", swept.namespace, NAME, WITHOUT_FAULTS)


def test_a_sweep_on_two_devices_whose_pod_is_deleted_trains_every_member_to_its_end(
    spillway: Installed, namespace: str
) -> None:
    """Two CPU devices in one pod; the second attempt resumes each member from its checkpoint on the claim."""
    folder = spillway.bed.claim("kept", namespace)
    document = example(
        NAME,
        namespace,
        checkpoint={"claim": "kept", "everySteps": 5},
        training__steps=120,
        parallelism={"device": "Cpu", "devicesPerNode": 2},
        objective=None,
    )
    job = named(document, "two-devices")
    spillway.create(job)

    def has_trained(found: Document) -> bool:
        return int(found["status"].get("progress", {}).get("step", 0)) >= 30

    spillway.until(has_trained, namespace, "two-devices", SECONDS)
    (pod,) = spillway.children("pod", namespace, "two-devices")
    spillway.bed.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false")
    ended = spillway.wait(namespace, "two-devices", "Complete", SECONDS)["status"]
    assert [member["state"] for member in ended["members"]] == ["Complete"] * 3
    assert ended["attempts"]["total"] == 2
    assert len([*folder.rglob("step-120.e2")]) == 3
    epochs = [unseal(path.read_bytes()) for path in folder.rglob("epoch-2.json")]
    assert any(epoch["resumes_from"] for epoch in epochs), "no member resumed"


@pytest.mark.ci
def test_a_search_trains_the_members_that_it_makes(spillway: Installed, namespace: str) -> None:
    spillway.bed.kubectl("apply", "-f", "-", stdin=json.dumps(example("search", namespace)))
    job = spillway.wait(namespace, "search", "Complete", SECONDS)
    assert [one["name"] for one in job["status"]["members"]] == [f"trial-0{at}" for at in range(8)]
    assert "members" not in job["spec"], "the object has the search alone"
    states = {one["name"]: one["state"] for one in job["status"]["members"]}
    assert sorted(states.values()) == ["Complete"] * 2 + ["Stopped"] * 6
    assert states[job["status"]["bestMember"]] == "Complete"
