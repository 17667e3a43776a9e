"""From `kubectl apply` to the best of three models: a sweep in one pod, whose members take turns, on a real kubelet."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from harness.installed import CHART, Document, Installed, example

NAME = "sweep"
SECONDS = 180.0


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
    """One round of three keeps one, which alone trains to the end."""
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
    events = swept.installed.bed.get("events.events.k8s.io", "-n", swept.namespace)["items"]
    notes = {event["note"] for event in events if event["reason"] == "MemberStopped"}
    for member in stopped:
        sentence = rf"stopped after {halving} steps: evaluation loss ([\d.]+), best ([\d.]+)"
        found = re.fullmatch(sentence, member["message"])
        assert found is not None, member
        assert float(found[1]) > float(found[2])
        assert f"member {member['name']}: {member['message']}" in notes


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
    from dashboards import expressions  # charts/: on the path by conftest

    dashboard = json.loads((CHART / "files" / "dashboards" / "sweep.json").read_text(encoding="utf-8"))
    empty = []
    for expression in expressions(dashboard, swept.namespace, NAME):
        # After the job's end: as the dashboard would have shown it while it ran.
        if not swept.installed.bed.query(f"last_over_time(({expression})[10m:2s])"):
            empty.append(expression)
    assert not empty
