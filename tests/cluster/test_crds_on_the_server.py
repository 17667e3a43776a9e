"""The CRDs on a real API server: it accepts them, and enforces every constraint with a good message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cases.crd_cases import Case, Server, cases
from harness.places import ROOT
from harness.server_client import Client
from spillway.api.crd import KINDS, TRAINING_JOB, Kind
from spillway.api.limits import GROUP as OWN_GROUP
from spillway.api.limits import VERSION
from testbed.client import Bed

GROUP = "crd-cases.test"
"""A separate group for the same schemas, so that no other objects are touched, whatever is installed."""
NAMESPACE = "default"
LONGEST_LINE = 300


@pytest.fixture(scope="module")
def server(testbed: Bed) -> Iterator[Server]:
    """An API server with the four kinds installed under GROUP."""
    client = Client(testbed.kubeconfig)
    found = Server(client.request, NAMESPACE, GROUP)
    names = [found.definition(kind)["metadata"]["name"] for kind in KINDS]
    testbed.apply(*(found.definition(kind) for kind in KINDS))
    testbed.kubectl("wait", "--for=condition=Established", "--timeout=30s", *(f"crd/{name}" for name in names))
    yield found
    testbed.kubectl("delete", "crd", *names, "--wait=false")
    client.close()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_the_server_accepts_the_file(testbed: Bed, kind: Kind) -> None:
    """The schema is structural, its CEL rules have the right types, and their cost is within the server's limit."""
    said = testbed.kubectl(
        "apply", "--server-side", "--dry-run=server", "--force-conflicts", "--filename", ROOT / kind.path
    )
    assert f"{kind.plural}.{OWN_GROUP} serverside-applied (server dry run)" in said


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_constraints_accept_their_edge_and_reject_beyond_with_clear_errors(
    server: Server, kind: Kind, eventually: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    eventually(f"{kind.plural} are served", lambda: server.request("GET", server.path(kind), None)[0] == 200, 30)
    tried = cases(kind)
    wrong = [sentence for case in tried for sentence in disappointment(case, server)]
    with capsys.disabled():
        print(f"\n{kind.kind}: {len(tried)} manifests tried on the API server")
    assert wrong == [], "\n".join(wrong)


def disappointment(case: Case, server: Server) -> Iterator[str]:
    answer = server.run(case)
    if answer.accepted != case.accepted:
        yield f"{case}, but it was {'accepted' if answer.accepted else 'rejected: ' + answer.message[:LONGEST_LINE]}"
    missing = [word for word in case.words if word not in answer.message]
    if missing and not answer.accepted:
        yield f"{case}, without saying {missing}: {answer.message[:LONGEST_LINE]}"


def test_a_new_object_gets_the_defaults_that_the_models_have(server: Server) -> None:
    case = next(case for case in cases(TRAINING_JOB) if case.accepted and not case.in_status)
    code, answer = server.request(
        "POST",
        f"{server.path(TRAINING_JOB)}?dryRun=All",
        {
            **case.manifest,
            "apiVersion": f"{GROUP}/{VERSION}",
            "spec": {name: value for name, value in case.manifest["spec"].items() if name != "managedBy"},
        },
    )
    assert code == 201
    made = answer["spec"]
    assert made["managedBy"] == "spillway.dev/operator"
    optimizer = made["training"]["optimizer"]
    assert (optimizer["name"], optimizer["learningRate"]) == ("AdamW", "0.0003")
    assert "eps" not in optimizer, "its default depends on the name, which may change later"
    assert made["memory"]["mode"] == "Auto"
