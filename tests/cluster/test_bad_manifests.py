"""The hand-written bad manifests on the real API server: rejected by admission, or accepted and rejected by the
operator."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from cases.bad_manifests import (
    CHANGES,
    CLUSTER,
    Mistake,
    all_mistakes,
    as_kubectl_sends_it,
    is_unknown_field,
    rejection_in_cluster,
    said_by_the_server,
    stored,
)
from cases.crd_cases import NOBODY
from harness.installed import Document, Installed
from harness.server_client import Client
from spillway.api.limits import GROUP, VERSION
from spillway.api.load import parse_job
from spillway.errors import InvalidJob

FEWEST = 300
SAMPLED = 8
"""one in so many rejections by condition is also tried with the real operator"""
CONDITION_SECONDS = 60.0


class Jobs:
    """TrainingJobs of one namespace."""

    def __init__(self, client: Client, namespace: str) -> None:
        self.request = client.request
        self.path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/trainingjobs"

    def tried(self, mistake: Mistake) -> tuple[int, Document]:
        """Tries a mistake as a dry run; returns the server's status code and answer."""
        query = "dryRun=All&fieldValidation=Strict"
        document = as_kubectl_sends_it(mistake.text)
        if mistake.topic != CHANGES:
            return self.request("POST", f"{self.path}?{query}", document)
        known = self.stored(mistake.suspended)
        document["metadata"] = {key: known[key] for key in ("name", "resourceVersion")}
        document["spec"] = {"suspend": mistake.suspended, "managedBy": NOBODY, **document["spec"]}
        return self.request("PUT", f"{self.path}/{known['name']}?{query}", document)

    def stored(self, suspended: bool) -> Document:
        """Creates a job that no operator runs, unless it exists; returns its metadata."""
        made = stored(suspended)
        made["metadata"]["name"] = f"stored-{suspended}".lower()
        made["spec"]["managedBy"] = NOBODY
        code, answer = self.request("POST", self.path, made)
        if code == 409:
            code, answer = self.request("GET", f"{self.path}/{made['metadata']['name']}")
        assert code in (200, 201), answer
        metadata: Document = answer["metadata"]
        return metadata


@pytest.fixture
def jobs(spillway: Installed, namespace: str) -> Iterator[Jobs]:
    client = Client(spillway.bed.kubeconfig)
    yield Jobs(client, namespace)
    client.close()


def sentences(mistake: Mistake) -> str:
    """The error of Spillway's own parser; empty if it accepts the manifest."""
    try:
        parse_job(mistake.text, "job.yaml")
    except InvalidJob as error:
        return str(error)
    return ""


def disappointments(mistake: Mistake, jobs: Jobs, tally: Counter[str]) -> Iterator[str]:
    code, answer = jobs.tried(mistake)
    accepted, message = code in (200, 201), str(answer.get("message", ""))
    if accepted != mistake.by_condition:
        yield f"{mistake}: {'accepted by the API server' if accepted else message[:300]}"
    elif accepted:
        said = rejection_in_cluster(mistake, answer["spec"])
        lacks = [word for word in mistake.words if word not in said]
        tally["by condition"] += not lacks
        if lacks:
            yield f"{mistake}: the condition lacks {lacks}: {said}"
    else:
        lacks = said_by_the_server(mistake, message, sentences(mistake))
        tally["at admission, as unknown fields" if is_unknown_field(message) else "at admission"] += not lacks
        if lacks:
            yield f"{mistake}: the API server's message lacks {lacks}: {message[:300]}"


def test_every_bad_manifest_is_rejected_with_path_value_and_what_is_allowed(
    jobs: Jobs, capsys: pytest.CaptureFixture[str]
) -> None:
    tally: Counter[str] = Counter()
    found = all_mistakes()
    wrong = [sentence for mistake in found for sentence in disappointments(mistake, jobs, tally)]
    with capsys.disabled():
        print(f"\nbad manifests: {tally.total()} of {len(found)} rejected in full ({dict(tally)})")
    assert wrong == [], "\n".join(wrong)
    assert tally.total() == len(found) >= FEWEST


def test_the_operator_says_in_the_status_what_the_table_says(spillway: Installed, namespace: str) -> None:
    """Tests a sample of the mistakes with the real operator."""
    sampled = [mistake for mistake in all_mistakes() if mistake.by_condition and not mistake.claims]
    sampled = [*sampled[::SAMPLED], *(mistake for mistake in sampled if mistake.topic == CLUSTER)]
    for number, mistake in enumerate(sampled):
        spillway.create(named(as_kubectl_sends_it(mistake.text), f"bad-{number}", namespace))
    for number, mistake in enumerate(sampled):
        found = spillway.until(is_rejected, namespace, f"bad-{number}", CONDITION_SECONDS)
        said = json.dumps([condition["message"] for condition in rejections(found)], ensure_ascii=False)
        assert all(word in said.replace('\\"', '"') for word in mistake.words), (str(mistake), said)
        assert found["status"]["state"] in ("Rejected", "Pending")
    assert spillway.bed.get("jobs", "-n", namespace)["items"] == []


def named(job: Document, name: str, namespace: str) -> Document:
    return {**job, "metadata": {"name": name, "namespace": namespace}}


def rejections(job: Document) -> list[dict[str, Any]]:
    return [
        condition
        for condition in job["status"].get("conditions", [])
        if condition["type"] in ("Accepted", "Planned") and condition["status"] == "False"
    ]


def is_rejected(job: Document) -> bool:
    return bool(rejections(job))
