"""What is read for one decision, and how hostile answers are taken."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from fakes.fake_api import FakeApi
from harness.operator_parts import KEY, Counts, child, labels, owned, pod, put_job, with_cluster
from spillway.placement.place import LiveBytes
from spillway_operator.decide.observed import Claim, Inspection, JobObject, OperatorFacts
from spillway_operator.kube.api_client import ApiClient, Unavailable
from spillway_operator.kube.store import Store, canonical, known_attempts, project_attempt, project_job
from spillway_operator.measured.cluster import FRESH_SECONDS, OLDEST_PEAKS_SECONDS, Cluster, project_node
from spillway_operator.measured.faulty_nodes import MOST_JOBS
from spillway_operator.measured.metrics_source import MetricsSource
from spillway_operator.measured.operator_config import OperatorConfig
from spillway_operator.measured.reservations import Reservations
from spillway_operator.observe import Observer, Sight, may_start, project_pod

FACTS = OperatorFacts(trainer_image="trainer:1")
NODE = {
    "metadata": {"name": "node-0", "labels": {"zone": "a"}},
    "spec": {"taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule"}]},
    "status": {
        "allocatable": {
            "cpu": "1930m", "memory": "32Gi", "ephemeral-storage": "100Gi", "nvidia.com/gpu": "8", "hugepages-2Mi": "0",
        },
        "conditions": [{"type": "Ready", "status": "True"}],
    },
}  # fmt: skip
BYTES = '{"device": "2Gi", "host": "1Gi", "nvme": "3Gi"}'
DECISION = f'{{"configMap": "demo-1", "nodes": ["node-0"], "podMemory": "5Gi", "bytes": {BYTES}}}'


class Bench:
    """An observer on a fake cluster; `seconds` is its clock."""

    def __init__(self, client: ApiClient, node_reader: bool = False, progress: Any = None) -> None:
        self.seconds = 1000.0
        self.store = Store()
        self.metrics = MetricsSource()
        self.reservations = Reservations(metrics_interval_seconds=15.0)
        self.config = OperatorConfig(client, True, lambda: None)
        self.cluster = Cluster(client, self.metrics, self.reservations, node_reader, self.config, lambda: self.seconds)
        self.observer = Observer(
            client, self.store, self.cluster, self.reservations, lambda: FACTS, lambda: self.seconds, progress
        )

    async def look(self, *needs: str) -> Sight:
        sight = await self.observer.observe(KEY, frozenset(needs))
        assert sight is not None
        return sight


def put_attempt(bench: Bench, api: FakeApi, number: int = 1, **status: Any) -> None:
    bench.store.put_attempt(project_attempt(api.put("jobs", child("Job", number, status=status))))


def test_while_an_attempt_lives_nothing_is_read() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client, node_reader=True)
        bench.store.put_job(put_job(api))
        put_attempt(bench, api, active=1)
        sight = await bench.look()
        assert api.requests == []
        assert sight.observed.contracts is sight.observed.pods is sight.observed.claims is None
        assert [attempt.name for attempt in sight.observed.attempts] == ["demo-1"]
        assert sight.observed.facts == FACTS

    with_cluster(scenario)


def test_what_was_heard_of_others_counts_only_while_others_run() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(
            client, progress=SimpleNamespace(hearing_seconds=lambda: 7.0, others_silent_seconds=lambda key: 5.0)
        )
        bench.store.put_job(put_job(api))
        put_attempt(bench, api, active=1, ready=1)
        other = child("Job", 9, status={"ready": 0})
        other["metadata"]["ownerReferences"] = owned("another")
        bench.store.put_attempt(project_attempt(api.put("jobs", other)))
        seen = (await bench.look()).observed
        assert (seen.hearing_seconds, seen.others_silent_seconds) == (7.0, None), "the other one waits"
        bench.store.put_attempt(project_attempt(api.put("jobs", other | {"status": {"ready": 1}})))
        bench.store.put_job(put_job(api, "another"))
        assert (await bench.look()).observed.others_silent_seconds is None, "it never reported"
        reported = {"progress": {"lastStepTime": "2026-11-21T10:00:00Z"}}
        bench.store.put_job(put_job(api, "another", reported))
        assert (await bench.look()).observed.others_silent_seconds == 5.0

    with_cluster(scenario)


def test_new_attempt_reads_job_contracts_and_attempts_from_the_server() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api, generation=1))
        api.put("trainingjobs", {"metadata": {"name": "demo", "generation": 2}, "spec": {"suspend": True}})
        for number in (2, 1):
            api.put("configmaps", child("ConfigMap", number, data={"job.json": "{}", "decision.json": "d"}))
        api.put("jobs", child("Job", 2))  # no event told of it
        sight = await bench.look()
        assert sight.observed.job.generation == 2
        assert sight.observed.contracts is not None
        assert [contract.attempt for contract in sight.observed.contracts] == [1, 2]
        assert sight.observed.contracts[0].decision_json == "d"
        assert [attempt.attempt for attempt in sight.observed.attempts] == [2]
        assert not sight.unwatched

    with_cluster(scenario)


def test_an_attempt_that_only_the_store_remembers_is_gone() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        put_attempt(bench, api, active=1)
        api.remove("jobs", "team", "demo-1")
        assert (await bench.look()).observed.attempts != ()
        assert (await bench.look("contracts")).observed.attempts == ()

    with_cluster(scenario)


def test_attempt_that_lost_its_labels_is_found_by_name_and_polled() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        api.put("configmaps", child("ConfigMap", 3))
        api.put("jobs", {"metadata": {"name": "demo-3", "ownerReferences": owned()}, "status": {"active": 1}})
        sight = await bench.look()
        assert sight.unwatched
        assert [(attempt.attempt, attempt.owner_uid) for attempt in sight.observed.attempts] == [(3, "uid-demo")]

    with_cluster(scenario)


def test_the_queue_is_asked_in_the_version_that_it_serves() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        put_attempt(bench, api)
        waits = {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": "no quota"}
        labels = {"kueue.x-k8s.io/job-uid": "uid-demo-1"}
        api.put("workloads", {"metadata": {"name": "w", "labels": labels}, "status": {"conditions": [waits]}})

        async def asked() -> list[str]:
            before = len(api.requests)
            assert (await bench.look("queue_says")).observed.queue_says == "no quota"
            return [path.split("/")[3] for _, path in api.requests[before:]]

        assert await asked() == ["v1beta2"]
        api.fail("GET", "/v1beta2/", 404)
        assert await asked() == ["v1beta2", "v1beta1"], "an older Kueue"
        assert await asked() == ["v1beta1"], "found once"
        api.fail("GET", "/v1beta1/", 404)
        assert await asked() == ["v1beta1", "v1beta2"], "upgraded"
        api.fail("GET", "/workloads", 404, times=2)
        assert (await bench.look("queue_says")).observed.queue_says == "", "removed"
        api.fail("GET", "/workloads", 403)
        assert (await bench.look("queue_says")).observed.queue_says == "", "not ours to see"
        assert await asked() == ["v1beta2"]

    with_cluster(scenario)


def test_a_foreign_job_with_the_next_name_is_seen_and_is_not_ours() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        api.put("configmaps", child("ConfigMap", 1))
        api.put("jobs", {"metadata": {"name": "demo-1"}})
        sight = await bench.look()
        assert [attempt.owner_uid for attempt in sight.observed.attempts] == [""]
        assert not sight.unwatched

    with_cluster(scenario)


def test_a_training_job_that_is_gone_is_none_and_leaves_the_store() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        assert await bench.observer.observe(KEY) is None
        bench.store.put_job(put_job(api))
        api.remove("trainingjobs", "team", "demo")
        assert await bench.observer.observe(KEY) is None
        assert bench.store.jobs.get(KEY) is None

    with_cluster(scenario)


def test_pods_are_those_that_the_attempts_job_controls() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        put_attempt(bench, api, 2, active=2)
        for number, index in ((2, 1), (2, 0), (1, 0)):
            api.put("pods", pod(number, index))
        foreign = {"kind": "ReplicaSet", "name": "demo-2", "uid": "uid-of-another", "controller": True}
        api.put("pods", {"metadata": {"name": "copycat", "labels": labels(2), "ownerReferences": [foreign]}})
        sight = await bench.look("pods")
        assert sight.observed.pods is not None
        assert [found.name for found in sight.observed.pods] == ["demo-2-0", "demo-2-1"]

    with_cluster(scenario)


def rejected_pod(job_uid: str, note: str, second: int, reason: str = "FailedCreate") -> dict[str, Any]:
    """The Job controller's event, as events.k8s.io shows it."""
    return {
        "metadata": {"name": f"demo-1.{second}{reason}"},
        "regarding": {"kind": "Job", "name": "demo-1", "uid": job_uid},
        "reason": reason,
        "note": note,
        "deprecatedLastTimestamp": f"2026-11-21T10:00:{second:02d}Z",
    }


def test_missing_pods_are_explained_by_the_newest_event_of_their_job() -> None:
    """Without the pod's name, which changes with every try."""

    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        put_attempt(bench, api, active=0)
        uid = api.get("jobs", "demo-1")["metadata"]["uid"]
        assert (await bench.look("pods")).observed.pods_rejection == ""
        forbidden = 'Error creating: pods "demo-1-0-{}" is forbidden: {}'
        api.put("events", rejected_pod(uid, forbidden.format("x7k2p", "exceeded quota: small, used: pods=1"), 30))
        api.put("events", rejected_pod(uid, forbidden.format("bbbbb", "exceeded quota: of long ago"), 10))
        api.put("events", rejected_pod(uid, "Created pod: demo-1-0-x7k2p", 50, "SuccessfulCreate"))
        api.put("events", rejected_pod("uid-of-another", "Error creating: of another job", 55))
        assert (await bench.look("pods")).observed.pods_rejection == "exceeded quota: small, used: pods=1"
        assert (await bench.look()).observed.pods_rejection == "", "not asked for"
        api.put("events", rejected_pod(uid, 'Error creating: admission webhook "w" denied the request: no', 57))
        assert (await bench.look("pods")).observed.pods_rejection == 'admission webhook "w" denied the request: no'
        combined = "(combined from similar events): " + forbidden.format("ccccc", "exceeded quota: again")
        api.put("events", rejected_pod(uid, combined, 58))
        assert (await bench.look("pods")).observed.pods_rejection == "exceeded quota: again"
        api.fail("GET", "/events", 403)
        assert (await bench.look("pods")).observed.pods_rejection == "", "not ours to see"
        api.put("pods", pod(1, 0))
        api.requests.clear()
        assert (await bench.look("pods")).observed.pods_rejection == ""
        assert api.count("GET", "/events") == 0, "no pod is missing: nothing to ask"

    with_cluster(scenario)


def test_a_pod_that_the_kubelet_cannot_start_is_explained_by_its_newest_warning() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        put_attempt(bench, api, active=1)
        waits = pod(1, 0)
        waits["spec"] = {"nodeName": "node-0"}
        waits["status"] = {"phase": "Pending"}
        uid = api.put("pods", waits)["metadata"]["uid"]
        for second, type_, reason, note in (
            (10, "Warning", "FailedMount", 'configmap "old" not found'),
            (30, "Warning", "FailedMount", 'configmap "code" not found'),
            (40, "Normal", "Pulled", "image is there"),
        ):
            event = rejected_pod(uid, note, second, reason)
            api.put("events", event | {"type": type_, "regarding": {"kind": "Pod", "uid": uid}})
        [seen] = (await bench.look("pods")).observed.pods or ()
        assert seen.waiting == 'FailedMount: configmap "code" not found'
        api.fail("GET", "/events", 403)
        [seen] = (await bench.look("pods")).observed.pods or ()
        assert seen.waiting == "", "not ours to see"

    with_cluster(scenario)


def test_when_the_deletion_of_a_pod_was_asked_for_can_be_told() -> None:
    """deletionTimestamp is the end of its grace period."""
    times = {"deletionTimestamp": "2026-11-21T10:00:40Z", "deletionGracePeriodSeconds": 40}
    found = project_pod({"metadata": pod(1)["metadata"] | {"uid": "u"} | times})
    assert (found.deleting, found.deletion_time, found.grace_seconds) == (True, "2026-11-21T10:00:40Z", 40)
    assert not found.orphaned


@pytest.mark.parametrize("total", [10**9, 10**12, -1, "7", None])
def test_a_count_of_attempts_that_cannot_be_is_none(total: object) -> None:
    assert known_attempts(job_of({"attempts": {"total": total}})) == 0
    assert known_attempts(job_of({"attempts": total})) == known_attempts(job_of({})) == 0
    assert known_attempts(job_of({"attempts": {"total": 7}})) == 7


def job_of(status: object) -> JobObject:
    return JobObject("uid-demo", "demo", "team", 1, 1, "", b"{}", canonical(status))


def test_pods_outlive_their_job() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api, status={"attempts": {"total": 2}}))
        api.put("pods", pod(2, 0))
        sight = await bench.look("pods", "contracts")
        assert sight.observed.pods is not None
        assert [found.name for found in sight.observed.pods] == ["demo-2-0"]

    with_cluster(scenario)


@pytest.mark.parametrize(("phase", "lives"), [("Running", True), ("Pending", True), ("Failed", False)])
def test_a_pod_whose_job_was_deleted_around_it_lives_and_explains_no_end(phase: str, lives: bool) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api, status={"attempts": {"total": 1}}))
        ended = {"name": "trainer", "state": {"terminated": {"exitCode": 64, "message": "{}"}}}
        orphan = pod(1, phase=phase, containerStatuses=[ended])
        del orphan["metadata"]["ownerReferences"]
        api.put("pods", orphan)
        pods = (await bench.look("pods", "contracts")).observed.pods
        assert pods is not None
        assert [(found.name, found.ending) for found in pods] == ([("demo-1-0", None)] if lives else [])
        assert all(found.orphaned for found in pods)

    with_cluster(scenario)


@pytest.mark.parametrize("name", ["../../victim/configmaps/secret-plan", "..", "a%2fb"])
def test_claim_with_an_impossible_name_does_not_exist_and_is_not_requested(name: str) -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api, checkpoint={"claim": name}))
        put_attempt(bench, api)
        assert (await bench.look("claims")).observed.claims == (Claim(name, exists=False),)
        assert api.requests == []

    with_cluster(scenario)


def test_a_key_that_happens_to_be_called_claim_names_no_claim() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        selector = {"claim": "../../../../../apis/batch/v1/jobs?limit=0"}
        bench.store.put_job(put_job(api, scheduling={"nodeSelector": selector}, env=[{"claim": "a"}]))
        put_attempt(bench, api)
        assert (await bench.look("claims")).observed.claims == ()
        assert api.requests == []

    with_cluster(scenario)


def test_claims_of_a_spec_are_looked_up_once_each() -> None:
    async def scenario(api: FakeApi, client: ApiClient, counts: Counts) -> None:
        bench = Bench(client)
        spec = {
            "checkpoint": {"claim": "kept"},
            "data": {"text": {"claim": "corpus"}, "evaluation": {"text": {"claim": "corpus"}}},
            "model": {"source": {"claim": "kept"}},
        }
        bench.store.put_job(put_job(api, **spec))
        put_attempt(bench, api)
        api.put("persistentvolumeclaims", {"metadata": {"name": "kept"}, "spec": {"accessModes": ["ReadWriteMany"]}})
        sight = await bench.look("claims")
        assert sight.observed.claims == (Claim("corpus", exists=False), Claim("kept", True, ("ReadWriteMany",)))
        assert counts["get", "persistentvolumeclaims", 200] == 1
        api.fail("GET", "persistentvolumeclaims", 403, times=2)
        assert (await bench.look("claims")).observed.claims == (Claim("corpus", True), Claim("kept", True))

    with_cluster(scenario)


def test_an_api_server_that_fails_is_no_observation() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        bench.store.put_job(put_job(api))
        api.fail("GET", "configmaps", 500)
        with pytest.raises(Unavailable):
            await bench.look()

    with_cluster(scenario)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (lambda job: job, True),
        (lambda job: job | {"status": {"conditions": [{"type": "Complete", "status": "True"}]}}, False),
        (lambda job: job | {"status": {"conditions": [{"type": "Failed", "status": "True"}]}}, False),
        (lambda job: job | {"status": {"conditions": [{"type": "Failed", "status": "False"}]}}, True),
        (lambda job: job | {"metadata": job["metadata"] | {"deletionTimestamp": "2026-11-21T12:00:00Z"}}, False),
    ],
)
def test_an_attempt_may_start_unless_the_job_is_over(
    changes: Callable[[dict[str, Any]], dict[str, Any]], expected: bool
) -> None:
    found = {"metadata": {"name": "demo", "namespace": "team", "uid": "u", "resourceVersion": "1"}}
    assert may_start(project_job(changes(found)), ()) is expected


# --- nodes ------------------------------------------------------------------------------------------------------------


def test_a_node_is_projected_with_what_pods_can_have() -> None:
    view = project_node(NODE)
    assert (view.allocatable_cores, view.allocatable_memory_bytes) == (1.93, 32 << 30)
    assert view.allocatable_devices == {"nvidia.com/gpu": 8}
    assert view.taints[0].key == "gpu"
    assert view.ready


def test_nodes_are_listed_once_in_a_while_and_only_for_plans() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client, node_reader=True)
        bench.store.put_job(put_job(api))
        api.put("nodes", {**NODE, "metadata": dict(NODE["metadata"])})
        for _look in range(3):
            sight = await bench.look()
        assert api.count("GET", "/nodes") == 1
        assert sight.observed.cluster.nodes is not None
        assert sight.observed.cluster.nodes[0].live is None
        bench.seconds += 31.0
        await bench.look()
        assert api.count("GET", "/nodes") == 2

    with_cluster(scenario)


def test_live_bytes_join_the_nodes_of_their_name() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client, node_reader=True)
        bench.store.put_job(put_job(api))
        api.put("nodes", {**NODE, "metadata": dict(NODE["metadata"])})
        from dataclasses import replace

        bench.metrics._last = replace(
            bench.metrics._last, nodes={"node-0": LiveBytes(host=5)}, taken_at=bench.seconds - 7.0, source="Prometheus"
        )
        view = (await bench.look()).observed.cluster
        assert view.nodes is not None
        assert view.nodes[0].live == LiveBytes(host=5)
        assert view.metrics_age_seconds == 7.0
        assert view.metrics_source == "Prometheus"

    with_cluster(scenario)


def test_without_the_right_to_list_nodes_there_is_no_view_of_them() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        blind = Bench(client)
        blind.store.put_job(put_job(api))
        assert (await blind.look()).observed.cluster.nodes is None
        assert api.count("GET", "/nodes") == 0
        rejected = Bench(client, node_reader=True)
        rejected.store.put_job(put_job(api))
        api.fail("GET", "/nodes", 403)
        assert (await rejected.look()).observed.cluster.nodes is None

    with_cluster(scenario)


def test_pods_of_all_namespaces_count_on_their_nodes_but_not_the_jobs_own() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client, node_reader=True)
        bench.store.put_job(job := put_job(api))
        api.put("nodes", {**NODE, "metadata": dict(NODE["metadata"])})
        for name, uid in (("foreign", ""), ("own", job.uid), ("other", "uid-other")):
            requests = {"nvidia.com/gpu": "1", "memory": "1Gi"}
            spec = {"nodeName": "node-0", "containers": [{"resources": {"requests": requests}}]}
            metadata = {"name": name, "namespace": f"of-{name}", "labels": {"spillway.dev/job-uid": uid} if uid else {}}
            api.put("pods", {"metadata": metadata, "spec": spec})
        (view,) = (await bench.look()).observed.cluster.nodes or ()
        assert view.others is not None
        assert (view.others.devices, view.ours.devices) == ({"nvidia.com/gpu": 1}, {"nvidia.com/gpu": 1})
        assert view.free.allocatable_memory_bytes == 30 << 30
        bench.seconds += 31.0
        api.fail("GET", "/pods", 403)
        (view,) = (await bench.look()).observed.cluster.nodes or ()
        assert view.others is None, "not known"

    with_cluster(scenario)


def test_a_node_that_failed_several_jobs_is_avoided_by_the_others() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client, node_reader=True)
        faulty = [{"node": "node-7", "reason": "DeviceFault", "time": datetime.now(UTC).isoformat()}]
        for number in range(MOST_JOBS):
            assert bench.cluster.avoided_nodes == frozenset()
            bench.cluster.view(put_job(api, f"job-{number}", {"attempts": {"faultyNodes": faulty}}))
        assert bench.cluster.view(put_job(api)).avoided == bench.cluster.avoided_nodes == {"node-7"}

    with_cluster(scenario)


def test_storage_capacities_join_the_nodes_that_their_topology_selects() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client, node_reader=True)
        bench.store.put_job(put_job(api))
        for name, zone in (("node-0", "a"), ("node-1", "b")):
            api.put("nodes", {**NODE, "metadata": {"name": name, "labels": {"zone": zone}}})
        capacity = {"storageClassName": "local-nvme", "nodeTopology": {"matchLabels": {"zone": "a"}}}
        api.put("csistoragecapacities", {"metadata": {"name": "of-a"}, **capacity, "maximumVolumeSize": "90Gi"})
        nodes = (await bench.look()).observed.cluster.nodes or ()
        assert {node.name: node.volumes for node in nodes} == {
            "node-0": {"local-nvme": 90 << 30}, "node-1": {"local-nvme": 0},
        }  # fmt: skip

    with_cluster(scenario)


def test_old_nodes_are_used_while_the_server_does_not_list_them() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client, node_reader=True)
        bench.store.put_job(put_job(api))
        api.put("nodes", {**NODE, "metadata": dict(NODE["metadata"])})
        await bench.look()
        bench.seconds += 100.0
        api.fail("GET", "/nodes", 500, times=2)
        assert (await bench.look()).observed.cluster.nodes is not None
        bench.seconds += 300.0
        with pytest.raises(Unavailable):
            await bench.look()

    with_cluster(scenario)


def test_observed_peaks_of_namespaces_that_stopped_planning_are_dropped() -> None:
    async def scenario(_api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        for number in range(10):
            await bench.cluster.refresh(f"team-{number}")
            bench.seconds += OLDEST_PEAKS_SECONDS / 2
        assert list(bench.cluster._known) == ["team-8", "team-9"]

    with_cluster(scenario)


# --- reservations -----------------------------------------------------------------------------------------------------


def test_a_decision_is_debited_for_others_until_observation_takes_over() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        job = put_job(api, parallelism={"nodes": 1, "devicesPerNode": 2})
        bench.store.put_job(job)
        bench.reservations.decided(job, [child("ConfigMap", data={"decision.json": DECISION})])
        (debit,) = bench.reservations.of_others(("team", "other"), bench.seconds)
        assert (debit.node, debit.device, debit.host, debit.nvme) == ("node-0", 2 << 30, 5 << 30, 6 << 30)
        assert bench.reservations.of_others(KEY, bench.seconds) == ()
        put_attempt(bench, api, ready=1)
        await bench.look()
        bench.seconds += 89.0
        await bench.look()
        assert len(bench.reservations.of_others(("team", "other"), bench.seconds)) == 1
        bench.seconds += 2.0
        assert bench.reservations.of_others(("team", "other"), bench.seconds) == ()
        await bench.look()
        await bench.look()
        assert len(bench.reservations) == 0

    with_cluster(scenario)


async def look_at_a_planned_attempt(bench: Bench, api: FakeApi) -> None:
    """Looks at a job whose status holds a plan and whose attempt runs."""
    plan = {"configMap": "demo-1", "nodes": ["node-0"], "bytes": {"device": "2Gi"}}
    bench.store.put_job(put_job(api, status={"plan": plan}))
    put_attempt(bench, api, active=1)
    await bench.look()


def test_after_a_restart_debits_are_learned_from_the_status() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        await look_at_a_planned_attempt(bench, api)
        assert len(bench.reservations.of_others(("team", "other"), bench.seconds)) == 1

    with_cluster(scenario)


def test_the_debit_ends_with_the_attempt() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        job = put_job(api)
        bench.store.put_job(job)
        bench.reservations.decided(job, [child("ConfigMap", data={"decision.json": DECISION})])
        put_attempt(bench, api, conditions=[{"type": "Failed", "status": "True"}])
        await bench.look()
        assert len(bench.reservations) == 0

    with_cluster(scenario)


def test_an_attempt_that_waits_in_a_queue_holds_no_reservation_until_it_is_admitted() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        plan = {"configMap": "demo-1", "nodes": ["node-0"], "bytes": {"device": "2Gi"}}
        job = put_job(api, status={"plan": plan})
        bench.store.put_job(job)
        bench.reservations.decided(job, [child("ConfigMap", data={"decision.json": DECISION})])
        for suspend, held in ((True, 0), (False, 1)):
            queued = child("Job", 1) | {"spec": {"suspend": suspend}}
            bench.store.put_attempt(project_attempt(api.put("jobs", queued)))
            await bench.look()
            assert len(bench.reservations.of_others(("team", "other"), bench.seconds)) == held

    with_cluster(scenario)


@pytest.mark.parametrize("text", ["", "no json", "[]", '{"nodes": 7}', '{"unheardOf": 1}'])
def test_a_decision_in_other_words_debits_nothing(text: str) -> None:
    reservations = Reservations(15.0)
    job = project_job({"metadata": {"name": "demo", "namespace": "team", "uid": "u", "resourceVersion": "1"}})
    reservations.decided(job, [child("ConfigMap", data={"decision.json": text})])
    assert reservations.of_others(("team", "other"), 0.0) == ()


# --- pods -------------------------------------------------------------------------------------------------------------


def test_a_pods_ending_is_the_trainers() -> None:
    ended = {"exitCode": 70, "reason": "Error", "message": "{}", "finishedAt": "2026-11-21T12:00:00Z"}
    sidecar = {"name": "proxy", "state": {"terminated": {"exitCode": 1}}}
    found = project_pod(pod(containerStatuses=[sidecar, {"name": "trainer", "state": {"terminated": ended}}]))
    assert found.ending is not None
    assert (found.ending.exit_code, found.ending.message) == (70, "{}")


def test_why_a_pod_waits_is_said_in_the_clusters_words() -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/4 nodes"}
    assert project_pod(pod(conditions=[unschedulable])).unschedulable == "0/4 nodes"
    time = "2026-11-21T10:00:00Z"
    assert project_pod(pod(conditions=[unschedulable | {"lastTransitionTime": time}])).scheduled_at == ""
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": time}
    assert project_pod(pod(conditions=[scheduled])).scheduled_at == time
    pulling = {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}}
    assert project_pod(pod(containerStatuses=[pulling])).waiting == "ImagePullBackOff: not found"
    starting = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
    assert project_pod(pod(containerStatuses=[starting])).waiting == ""


@pytest.mark.parametrize(
    "status",
    [
        {},
        {"containerStatuses": None, "conditions": None, "phase": None},
        {"containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": "x", "message": "m" * 9000}}}]},
        {"containerStatuses": [{"name": "trainer", "state": None}], "conditions": [{}]},
    ],
)
def test_an_odd_pod_is_projected_without_complaint(status: dict[str, Any]) -> None:
    found = project_pod(pod(**status))
    assert found.ending is None or (found.ending.exit_code == -1 and len(found.ending.message) == 4096)


def test_profiles_are_listed_again_when_one_was_written_and_after_half_a_minute() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)

        async def listings() -> int:
            await bench.cluster.refresh(KEY[0])
            return sum("memoryprofiles" in str(request) for request in api.requests)

        assert [await listings(), await listings()] == [1, 1]
        bench.cluster.profile_written("another")
        assert await listings() == 1
        bench.cluster.profile_written(KEY[0])
        assert [await listings(), await listings()] == [2, 2]
        bench.seconds += FRESH_SECONDS
        assert await listings() == 3

    with_cluster(scenario)


def test_an_inspected_model_is_read_from_its_configmap_else_from_its_job_and_pod() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        async def look() -> Inspection:
            found = (await bench.look("inspection")).observed.inspection
            assert found is not None
            return found

        bench = Bench(client)
        bench.store.put_job(put_job(api))
        assert (await bench.look()).observed.inspection is None, "not asked for"
        assert await look() == Inspection()
        metadata: dict[str, Any] = {"namespace": "team", "ownerReferences": owned()}
        job = {"kind": "Job", "metadata": metadata | {"name": "demo-inspect"}}
        uid = api.put("jobs", job)["metadata"]["uid"]
        assert await look() == Inspection(job_uid=uid)
        pod: dict[str, Any] = {
            "kind": "Pod", "spec": {},
            "metadata": {"name": "demo-inspect-x", "namespace": "team", "uid": "p", "labels": {
                "batch.kubernetes.io/controller-uid": uid,
            }},
            "status": {"phase": "Pending", "containerStatuses": [
                {"name": "trainer", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no"}}}
            ]},
        }  # fmt: skip
        api.put("pods", pod)
        assert await look() == Inspection(job_uid=uid, obstacle="ImagePullBackOff: no")
        ending = {"exitCode": 64, "reason": "Error", "message": "no config.json"}
        api.put("pods", pod | {"status": {"containerStatuses": [{"name": "trainer", "state": {"terminated": ending}}]}})
        failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
        api.put("jobs", job | {"status": failed})
        found = await look()
        assert (found.outcome, found.reason) == ("Failed", "BackoffLimitExceeded")
        assert found.ending is not None and (found.ending.exit_code, found.ending.message) == (64, "no config.json")
        assert await bench.look() and bench.store.attempts_of(KEY) == (), "it is no attempt"
        shape = {"kind": "ConfigMap", "metadata": metadata | {"name": "demo-model"}, "data": {"shape": "packed"}}
        api.put("configmaps", shape)
        assert await look() == Inspection(shape="packed")
        api.put("configmaps", shape | {"metadata": {**shape["metadata"], "ownerReferences": owned("other")}})
        assert await look() == Inspection(foreign="ConfigMap demo-model")

    with_cluster(scenario)


def test_a_suspended_jobs_reservation_ends() -> None:
    async def scenario(api: FakeApi, client: ApiClient, _: Counts) -> None:
        bench = Bench(client)
        await look_at_a_planned_attempt(bench, api)
        assert len(bench.reservations) == 1
        bench.store.put_attempt(project_attempt(api.put("jobs", child("Job", 1, spec={"suspend": True}))))
        await bench.look()
        assert len(bench.reservations) == 0

    with_cluster(scenario)
