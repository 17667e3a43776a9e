"""A sample of the fuzzed jobs and their children on the real API server, which decides whether they are valid."""

from __future__ import annotations

import pytest

from cases.crd_cases import NOBODY
from cases.fuzzed_jobs import decided
from harness.server_client import Client
from spillway_operator.decide.observed import Desired
from testbed.client import Bed

SEED, NUM_JOBS = 20261122, 50
PATHS = {
    "TrainingJob": "/apis/spillway.dev/v1alpha1/namespaces/{}/trainingjobs",
    "ConfigMap": "/api/v1/namespaces/{}/configmaps",
    "Service": "/api/v1/namespaces/{}/services",
    "Job": "/apis/batch/v1/namespaces/{}/jobs",
}


def is_accepted(desired: Desired) -> bool:
    """Whether the operator accepts the job. If it does not, admission may reject the job, too."""
    conditions = (desired.status or {}).get("conditions", [])
    return not any(one["type"] == "Accepted" and one["status"] == "False" for one in conditions)


@pytest.mark.usefixtures("spillway")
def test_the_api_server_takes_fuzzed_jobs_and_their_children(
    testbed: Bed, namespace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    client = Client(testbed.kubeconfig)
    wrong, num_children = [], 0
    for seed in range(SEED, SEED + NUM_JOBS):
        document, desired = decided(seed)
        document["spec"]["managedBy"] = NOBODY  # some have fields that our operator never honours
        num_children += len(desired.creates)
        for made in (*([document] if is_accepted(desired) else []), *desired.creates):
            placed = {**made, "metadata": {**made["metadata"], "namespace": namespace}}
            path = PATHS[made["kind"]].format(namespace) + "?dryRun=All&fieldValidation=Strict"
            code, answer = client.request("POST", path, placed)
            if code != 201:
                wrong.append(f"seed {seed}: {made['kind']}: {str(answer.get('message'))[:300]}")
    client.close()
    with capsys.disabled():
        print(f"\n{NUM_JOBS} fuzzed jobs and {num_children} children tried on the API server")
    assert wrong == [], "\n".join(wrong)
    assert num_children
