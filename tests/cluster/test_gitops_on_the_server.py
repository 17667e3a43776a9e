"""What GitOps tools repeatedly do with a TrainingJob: apply the same manifest, compare it, and read its health."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from lupa import lua51

from harness.installed import Document, Installed, example, named, on_fake_nodes, running_for_an_hour
from spillway_operator.kube.api_client import FIELD_MANAGER
from testbed.layout import REPOSITORY

SECONDS = 120.0
HEALTH = (REPOSITORY / "docs" / "argocd-health.lua").read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Applied:
    """A manifest, and how a tool applies it."""

    spillway: Installed
    manifest: Document
    server_side: bool

    @property
    def text(self) -> str:
        return json.dumps(self.manifest)

    def apply(self) -> Document:
        flags = ("--server-side", "--field-manager=tool") if self.server_side else ()
        said = self.spillway.bed.kubectl("apply", *flags, "-o", "json", "-f", "-", stdin=self.text)
        found: Document = json.loads(said)
        return found

    def difference(self) -> str:
        """Runs `kubectl diff`; returns an empty string, or raises an error with the difference."""
        flags = ("--server-side", "--field-manager=tool") if self.server_side else ()
        return self.spillway.bed.kubectl("diff", *flags, "-f", "-", stdin=self.text)

    def now(self) -> Document:
        return self.spillway.job(self.manifest["metadata"]["namespace"], self.manifest["metadata"]["name"])


@pytest.fixture(scope="module", params=["server side", "client side"])
def jobs(request: pytest.FixtureRequest, spillway: Installed, module_namespace: str) -> dict[str, Applied]:
    """State -> a job that has reached it; the pods are fake."""
    side = request.param.split()[0]
    one = example("one-pod", module_namespace, checkpoint__claim=None)
    asleep: Any = on_fake_nodes(named(one, f"asleep-{side}"))
    asleep["spec"]["suspend"] = True
    wanted = {
        "Running": named(running_for_an_hour(one), f"runs-{side}"),
        "Complete": on_fake_nodes(named(one, f"ends-{side}")),
        "Suspended": asleep,
    }
    found = {state: Applied(spillway, manifest, side == "server") for state, manifest in wanted.items()}
    for job in found.values():
        job.apply()
    for state, job in found.items():
        spillway.wait(module_namespace, job.manifest["metadata"]["name"], state, SECONDS)
    return found


@pytest.mark.parametrize("state", ["Running", "Complete", "Suspended"])
def test_the_same_manifest_makes_no_difference(jobs: dict[str, Applied], state: str) -> None:
    job = jobs[state]
    assert job.difference() == ""
    before = job.now()
    after = job.apply()
    assert after["metadata"]["generation"] == before["metadata"]["generation"] == 1
    assert after["spec"] == before["spec"]
    assert job.now()["status"]["attempts"] == before["status"]["attempts"]
    assert job.difference() == ""


def test_the_operator_owns_the_status_and_nothing_else(jobs: dict[str, Applied]) -> None:
    job = jobs["Running"]
    fields = job.spillway.bed.kubectl(
        "get", "trainingjobs.spillway.dev", job.manifest["metadata"]["name"], "-n",
        job.manifest["metadata"]["namespace"], "-o", "json", "--show-managed-fields",
    )  # fmt: skip
    owned = {entry["manager"]: entry for entry in json.loads(fields)["metadata"]["managedFields"]}
    assert owned[FIELD_MANAGER]["subresource"] == "status"
    assert set(owned[FIELD_MANAGER]["fieldsV1"]) == {"f:status"}
    tool = next(entry for manager, entry in owned.items() if manager != FIELD_MANAGER)
    assert "f:status" not in tool["fieldsV1"]


def test_argo_cd_reads_the_health_of_what_the_server_holds(jobs: dict[str, Applied]) -> None:
    for state, word in (("Running", "Healthy"), ("Complete", "Healthy"), ("Suspended", "Suspended")):
        lua = lua51.LuaRuntime(register_eval=False)
        lua.globals().obj = lua.table_from(jobs[state].now(), recursive=True)
        assert lua.execute(HEALTH).status == word
