"""The chart's NetworkPolicies, evaluated by a small evaluator of its own over a table of flows.

The test bed's network enforces none, so what they mean is read here from what `helm template` makes: a flow passes when
the policies that select its source let it out and those that select its destination let it in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from harness.places import GOLDEN
from harness.rendered_chart import HELMS, MATRIX, NAMESPACE, NO_HELM, Object, of_kind, only, rendered
from spillway_operator.decide.manifests import DOWNLOADS_LABEL, INSPECTION_LABEL

pytestmark = [pytest.mark.ci, pytest.mark.skipif(not HELMS, reason=NO_HELM)]
CHILDREN = GOLDEN / "children-two-pods.yaml"
OPEN = ("networkPolicies.enabled=false",)
PROMETHEUS = "prometheus.url=http://prometheus.monitoring.svc:9090"
TEAMS = "watchNamespaces={team-a,team-b}"
MONITORING = "networkPolicies.metricsFrom[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring"
NARROW_SERVER = "networkPolicies.apiServer.to[0].ipBlock.cidr=10.0.0.1/32"
STORE = (
    "networkPolicies.trainerEgress[0].to[0].ipBlock.cidr=192.0.2.0/24",
    "networkPolicies.trainerEgress[0].to[0].ipBlock.except={192.0.2.128/25}",
    "networkPolicies.trainerEgress[0].ports[0].port=443",
)


MINIO = "networkPolicies.downloadEgress[0].ports[0].port=9000"


@pytest.fixture(scope="module", params=sorted(HELMS) or ["none"], ids=lambda major: f"helm{major}")
def major(request: pytest.FixtureRequest) -> str:
    return str(request.param)


# --- the evaluator ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    """One end of a flow: a pod, or an address without one (namespace "")."""

    namespace: str = ""
    labels: dict[str, str] = field(default_factory=dict)
    address: str = "10.244.1.1"

    @property
    def namespace_labels(self) -> dict[str, str]:
        return {"kubernetes.io/metadata.name": self.namespace}


def selects(selector: Object, labels: dict[str, str]) -> bool:
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for term in selector.get("matchExpressions", []):
        holds = {
            "In": labels.get(term["key"]) in term.get("values", ()),
            "NotIn": labels.get(term["key"]) not in term.get("values", ()),
            "Exists": term["key"] in labels,
            "DoesNotExist": term["key"] not in labels,
        }
        if not holds[term["operator"]]:
            return False
    return True


def is_peer(peer: Object, end: End, namespace: str) -> bool:
    """`namespace` is the policy's: a peer without a namespaceSelector is in it."""
    assert set(peer) <= {"podSelector", "namespaceSelector", "ipBlock"} and peer
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(end.address), peer["ipBlock"]
        inside = address in ipaddress.ip_network(block["cidr"])
        return inside and not any(address in ipaddress.ip_network(hole) for hole in block.get("except", ()))
    if not end.namespace:
        return False
    if "namespaceSelector" in peer:
        if not selects(peer["namespaceSelector"], end.namespace_labels):
            return False
    elif end.namespace != namespace:
        return False
    return selects(peer.get("podSelector", {}), end.labels)


def has_port(rule: Object, protocol: str, port: int) -> bool:
    ports = rule.get("ports")
    return not ports or any(
        (entry.get("protocol", "TCP"), entry.get("port", port)) == (protocol, port) for entry in ports
    )


def passes(policies: list[Object], source: End, target: End, protocol: str, port: int) -> bool:
    for direction, here, there, peers in (
        ("Egress", source, target, "to"),
        ("Ingress", target, source, "from"),
    ):
        selecting = [
            policy
            for policy in policies
            if here.namespace
            and policy["metadata"]["namespace"] == here.namespace
            and direction in policy["spec"]["policyTypes"]
            and selects(policy["spec"]["podSelector"], here.labels)
        ]
        rules = [
            (rule, policy["metadata"]["namespace"])
            for policy in selecting
            for rule in policy["spec"].get(direction.lower()) or ()
        ]
        allowed = any(
            has_port(rule, protocol, port)
            and (not rule.get(peers) or any(is_peer(peer, there, namespace) for peer in rule[peers]))
            for rule, namespace in rules
        )
        if selecting and not allowed:
            return False
    return True


# --- who is there -----------------------------------------------------------------------------------------------------


def trainer(namespace: str, uid: str = "one") -> End:
    """With the labels that the operator gives to pods."""
    children = yaml.safe_load_all(CHILDREN.read_text(encoding="utf-8"))
    (job,) = [child for child in children if child["kind"] == "Job"]
    labels = dict(job["spec"]["template"]["metadata"]["labels"])
    assert "spillway.dev/job-uid" in labels
    return End(namespace, labels | {"spillway.dev/job-uid": uid})


OTHER_POD = {"app": "web"}
PROMETHEUS_POD = End("monitoring", {"app": "prometheus"})
DNS = End("kube-system", {"k8s-app": "kube-dns"})
API_SERVER = End(address="10.0.0.1")
INTERNET = End(address="203.0.113.7")
OBJECT_STORE, ITS_HOLE = End(address="192.0.2.10"), End(address="192.0.2.200")


@dataclass(frozen=True)
class Flow:
    what: str
    source: str
    target: str
    port: int
    passes: bool
    values: tuple[str, ...] = (TEAMS, PROMETHEUS)
    protocol: str = "TCP"


def ends(objects: tuple[Object, ...]) -> dict[str, End]:
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    return {
        "operator": End(NAMESPACE, labels),
        "node exporter": End(NAMESPACE, only(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]),
        "another pod there": End(NAMESPACE, OTHER_POD),
        "trainer": trainer("team-a"),
        "its peer": trainer("team-a"),
        "a neighbour": trainer("team-a", "two"),
        "a trainer elsewhere": trainer("team-b"),
        "an unserved trainer": trainer("team-x"),
        "an inspection": End("team-a", {INSPECTION_LABEL: "demo"}),
        "a download": End("team-a", {INSPECTION_LABEL: "demo", DOWNLOADS_LABEL: "true"}),
        "another pod": End("team-a", OTHER_POD),
        "a pod elsewhere": End("team-x", OTHER_POD),
        "an impostor": End("team-x", labels),
        "Prometheus": PROMETHEUS_POD,
        "DNS": DNS,
        "the API server": API_SERVER,
        "the internet": INTERNET,
        "the object store": OBJECT_STORE,
        "a hole of it": ITS_HOLE,
    }


NARROW = (TEAMS, PROMETHEUS, MONITORING, NARROW_SERVER)
EVERYWHERE = (PROMETHEUS,)
FLOWS = (
    # ranks
    Flow("ranks meet", "trainer", "its peer", 29500, True),
    Flow("ranks meet on any port that gloo or NCCL chooses", "trainer", "its peer", 43211, True),
    Flow("what is no trainer reaches no rank", "another pod", "trainer", 29500, False),
    Flow("nor from another namespace", "a pod elsewhere", "trainer", 29500, False),
    Flow("nor does a trainer of another namespace", "a trainer elsewhere", "trainer", 29500, False),
    Flow("nor does one of a namespace that is not served", "an unserved trainer", "trainer", 43211, False),
    Flow("nor the operator", "operator", "trainer", 29500, False),
    Flow("nor the outside", "the internet", "trainer", 29500, False),
    Flow("a policy cannot compare labels: jobs of one namespace are one group", "a neighbour", "trainer", 29500, True),
    # what trainers reach
    Flow("trainers report progress", "trainer", "operator", 8443, True),
    Flow("trainers ask DNS", "trainer", "DNS", 53, True, protocol="UDP"),
    Flow("trainers ask DNS by TCP", "trainer", "DNS", 53, True),
    Flow("trainers reach no other port of the operator", "trainer", "operator", 8081, False),
    Flow("trainers do not read the operator's metrics", "trainer", "operator", 8080, False),
    Flow("trainers do not reach the API server", "trainer", "the API server", 6443, False),
    Flow("nor 443", "trainer", "the API server", 443, False),
    Flow("nor the internet", "trainer", "the internet", 443, False),
    Flow("nor another pod of their namespace", "trainer", "another pod", 80, False),
    Flow("nor what calls itself the operator elsewhere", "trainer", "an impostor", 8443, False),
    Flow("but what the values add", "trainer", "the object store", 443, True, (TEAMS, *STORE)),
    Flow("and no more of it", "trainer", "the object store", 80, False, (TEAMS, *STORE)),
    Flow("nor what is left out of it", "trainer", "a hole of it", 443, False, (TEAMS, *STORE)),
    # what fetches and inspects
    Flow("a download fetches", "a download", "the internet", 443, True),
    Flow("by name", "a download", "DNS", 53, True, protocol="UDP"),
    Flow("but from no other port", "a download", "the object store", 9000, False),
    Flow("except what the values say", "a download", "the object store", 9000, True, (TEAMS, MINIO)),
    Flow("instead of the default", "a download", "the internet", 443, False, (TEAMS, MINIO)),
    Flow("a download reaches no trainer", "a download", "trainer", 29500, False),
    Flow("nor the operator", "a download", "operator", 8443, False),
    Flow("nobody reaches a download", "trainer", "a download", 443, False),
    Flow("an inspection that fetches nothing reaches nobody", "an inspection", "the internet", 443, False),
    Flow("not even DNS", "an inspection", "DNS", 53, False, protocol="UDP"),
    # metrics
    Flow("trainers are scraped", "Prometheus", "trainer", 9400, True),
    Flow("the operator is scraped", "Prometheus", "operator", 8080, True),
    Flow("`spillway top JOB` comes through the API server", "the API server", "trainer", 9400, True),
    Flow("node exporters are scraped", "Prometheus", "node exporter", 9402, True),
    Flow("narrowed, node exporters are scraped", "Prometheus", "node exporter", 9402, True, NARROW),
    Flow("narrowed, nobody else scrapes node exporters", "a pod elsewhere", "node exporter", 9402, False, NARROW),
    Flow("without Prometheus the operator scrapes them, narrowed or not", "operator", "node exporter", 9402, True,
         (TEAMS, MONITORING, NARROW_SERVER)),
    Flow("with it, it does not", "operator", "node exporter", 9402, False),
    Flow("a node exporter reaches nobody", "node exporter", "the API server", 443, False),
    Flow("not even DNS", "node exporter", "DNS", 53, False, protocol="UDP"),
    Flow("nothing else of a node exporter is reached", "Prometheus", "node exporter", 22, False),
    Flow("narrowed, trainers are scraped", "Prometheus", "trainer", 9400, True, NARROW),
    Flow("narrowed, the operator is scraped", "Prometheus", "operator", 8080, True, NARROW),
    Flow("narrowed, nobody else scrapes trainers", "another pod", "trainer", 9400, False, NARROW),
    Flow("narrowed, nobody else scrapes the operator", "a pod elsewhere", "operator", 8080, False, NARROW),
    Flow("Prometheus reaches nothing else of a trainer", "Prometheus", "trainer", 29500, False),
    Flow("Prometheus reaches nothing else of the operator", "Prometheus", "operator", 8443, False),
    # the operator
    Flow("the operator reaches the API server", "operator", "the API server", 6443, True),
    Flow("the operator reaches the API server at 443", "operator", "the API server", 443, True),
    Flow("narrowed, too", "operator", "the API server", 6443, True, NARROW),
    Flow("narrowed, nothing else at that port", "operator", "the internet", 443, False, NARROW),
    Flow("the operator asks DNS", "operator", "DNS", 53, True, protocol="UDP"),
    Flow("the operator asks Prometheus", "operator", "Prometheus", 9090, True),
    Flow("without a Prometheus it asks none", "operator", "Prometheus", 9090, False, (TEAMS,)),
    Flow("the operator reaches nobody else", "operator", "another pod", 80, False),
    Flow("the operator does not reach the internet", "operator", "the internet", 80, False),
    Flow("only trainers post progress", "another pod", "operator", 8443, False),
    Flow("not even a pod beside the operator", "another pod there", "operator", 8443, False),
    Flow("nor a trainer of a namespace that is not served", "an unserved trainer", "operator", 8443, False),
    Flow("nor the outside", "the internet", "operator", 8443, False),
    Flow("an unknown port is closed to everybody", "another pod there", "operator", 22, False),
    # all namespaces
    Flow("where all are served, trainers of all post", "an unserved trainer", "operator", 8443, True, EVERYWHERE),
    Flow("and only trainers", "a pod elsewhere", "operator", 8443, False, EVERYWHERE),
    Flow(
        "trainers are closed where the values name their namespace", "a pod elsewhere", "trainer", 29500, False,
        (*EVERYWHERE, "networkPolicies.trainerNamespaces={team-a}"),
    ),
    Flow("and open where nothing names it", "a pod elsewhere", "trainer", 29500, True, EVERYWHERE),
    Flow("without policies everything passes", "the internet", "operator", 22, True, OPEN),
)  # fmt: skip


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.what)
def test_a_flow_passes_or_not(major: str, flow: Flow) -> None:
    objects = rendered(major, flow.values)
    there = ends(objects)
    policies = of_kind(objects, "NetworkPolicy")
    assert passes(policies, there[flow.source], there[flow.target], flow.protocol, flow.port) is flow.passes


def every_flow(objects: tuple[Object, ...]) -> Iterator[tuple[str, str, int]]:
    there, policies = ends(objects), of_kind(objects, "NetworkPolicy")
    for source in there:
        for target in there:
            for port in (22, 53, 80, 443, 6443, 8080, 8443, 9090, 9400, 9402, 29500, 43211):
                if source != target and passes(policies, there[source], there[target], "TCP", port):
                    yield source, target, port


def test_nothing_else_passes_into_or_out_of_a_trainer(major: str) -> None:
    """Every pair of ends and every port: what passes is in this list."""
    ranks = ("trainer", "its peer", "a neighbour")
    found = set(every_flow(rendered(major, NARROW)))
    into = {(source, port) for source, target, port in found if target == "trainer" and source not in ranks}
    assert into == {("Prometheus", 9400)}
    out = {(target, port) for source, target, port in found if source == "trainer" and target not in ranks}
    elsewhere = set(ends(rendered(major, NARROW))) - {
        *ranks,
        "operator",
        "node exporter",
        "a trainer elsewhere",
        "an inspection",
        "a download",
    }
    assert out == {("operator", 8443), *((target, 53) for target in elsewhere)}


@pytest.mark.parametrize("cell", MATRIX)
def test_every_policy_denies_by_default_in_both_directions(major: str, cell: str) -> None:
    policies: list[Any] = of_kind(rendered(major, MATRIX[cell]), "NetworkPolicy")
    assert policies
    for policy in policies:
        assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
        assert all(rule for direction in ("ingress", "egress") for rule in policy["spec"][direction]), "{} allows all"
