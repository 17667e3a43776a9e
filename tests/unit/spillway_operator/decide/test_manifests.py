"""The children of an attempt: what they hold, what they ask for, and what a job cannot change in them.

The golden files are the whole truth for one pod and for two; SPILLWAY_GOLDEN=write makes them anew, to be read.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import Any

import pytest
import yaml

from cases.job_documents import document, job
from harness.places import GOLDEN
from spillway.api.job_file import JobFile
from spillway.api.limits import RESERVED_VARIABLES
from spillway.api.operator_config import OperatorConfigSpec, with_defaults
from spillway.api.status import Attempts, PlanStatus
from spillway.errors import UserError
from spillway.plan import ActivationPlan, MemoryPlan, OptimizerPlan, Policy, Prediction, Tier, TierBytes
from spillway.units import parse_quantity
from spillway_operator.decide import manifests
from spillway_operator.decide.manifests import AttemptFiles, Decision, Preferred, attempt_files, children
from spillway_operator.decide.observed import Contract, JobObject, OperatorFacts

MIB = 1 << 20
UID = "9b1deb4d-3b7d-4bad-9bdd-2b0d7b3dcb6d"
FACTS = OperatorFacts(
    trainer_image="registry.example/spillway/trainer:0.1.0",
    progress_url="https://spillway-progress.spillway.svc:8443/progress",
    progress_ca="-----BEGIN CERTIFICATE-----\n",
)
TWO_PODS = {
    "spec.parallelism": {"nodes": 2, "device": "Cpu"},
    "spec.checkpoint": {"claim": "checkpoints"},
    "spec.data": {"text": {"claim": "corpus", "subPath": "en"}, "evaluation": {"text": {"claim": "held"}}},
    "spec.scheduling": {
        "nodeSelector": {"pool": "training"},
        "tolerations": [{"key": "training", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "batch",
    },
    "spec.spill.storageClassName": "nvme",
    "spec.pod": {
        "imagePullSecrets": [{"name": "pull"}],
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "token"}}}],
        "labels": {"team": "a"},
        "annotations": {"note": "b"},
        "serviceAccountName": "trainer",
    },
}


def plan(device: str = "Cpu", nvme_bytes: int = 64 * MIB, world_size: int = 1) -> MemoryPlan:
    return MemoryPlan(
        job="tiny", node="cpu-2-cores", device=device, mode="Auto", world_size=world_size, micro_batch_size=4,
        num_micro_batches=2, num_segments=6, optimizer=OptimizerPlan(num_threads=2),
        activations=ActivationPlan(answers=(Policy.KEEP, *([Policy.NVME] * 4), Policy.KEEP)),
        bytes={Tier.DEVICE: TierBytes(parameters=100 * MIB), Tier.HOST: TierBytes(),
               Tier.NVME: TierBytes(activations=nvme_bytes)},
        budget={Tier.DEVICE: 128 * MIB, Tier.HOST: 128 * MIB, Tier.NVME: 1024 * MIB},
        prediction=Prediction(step_seconds=0.5, compute_seconds=0.4, exposed_optimizer_seconds=0.1,
                              exposed_transfer_seconds=0.0, bound_by="compute"),
    )  # fmt: skip


def files(
    changes: dict[str, Any] | None = None, made: MemoryPlan | None = None, decision: Decision | None = None
) -> AttemptFiles:
    given = job(changes)
    decision = decision or Decision(
        attempts=Attempts(total=3, ended=2, start_time="2026-11-21T10:00:00Z"),
        preferences=(Preferred(node="node-7", weight=100),),
    )
    status = PlanStatus(node="cpu-2-cores", reason="node-7 has most free memory")
    made = made or plan(world_size=given.spec.parallelism.world_size)
    return attempt_files(given, UID, made, status, decision, 2, FACTS)


def owner(changes: dict[str, Any] | None = None) -> JobObject:
    spec = json.dumps(document(changes)["spec"]).encode()
    return JobObject(UID, "tiny", "team-a", 1, 1, "2026-11-21T10:00:00Z", spec, b"{}")


def made(changes: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    """kind -> manifest"""
    return {str(child["kind"]): child for child in children(files(changes, **others), owner(changes), FACTS)}


def pod(changes: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return dict(made(changes, **others)["Job"]["spec"]["template"]["spec"])


def container(changes: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    return dict(pod(changes, **others)["containers"][0])


@pytest.mark.parametrize(("name", "changes"), [("children-one-pod", {}), ("children-two-pods", TWO_PODS)])
def test_the_children_are_those_of_the_golden_file(
    name: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Figures are those of pod_resources, which has its own tests: here they are round."""
    figures = replace(
        files(changes).resources, memory_bytes=1024 * MIB, shared_memory_bytes=64 * MIB, spill_volume_bytes=128 * MIB,
        ephemeral_storage_bytes=512 * MIB, cpu_cores=0.5, grace_seconds=60,
    )  # fmt: skip
    monkeypatch.setattr(manifests, "pod_resources", lambda *_: figures)
    found = [dict(child) for child in children(files(changes), owner(changes), FACTS)]
    found[0]["data"] = dict.fromkeys(found[0]["data"], "...")
    text = yaml.safe_dump_all(found, sort_keys=True, width=120)
    path = GOLDEN / f"{name}.yaml"
    if os.environ.get("SPILLWAY_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def test_one_pod_needs_no_service() -> None:
    assert [child["kind"] for child in children(files(), owner(), FACTS)] == ["ConfigMap", "Job"]


def test_the_configmap_comes_first_and_the_job_last() -> None:
    assert list(made(TWO_PODS)) == ["ConfigMap", "Service", "Job"]


def test_all_children_carry_one_name_the_labels_and_the_controller() -> None:
    for child in made(TWO_PODS).values():
        metadata = child["metadata"]
        assert metadata["name"] == "tiny-3"
        assert metadata["labels"]["spillway.dev/job"] == "tiny"
        assert metadata["labels"]["spillway.dev/attempt"] == "3"
        assert metadata["labels"]["spillway.dev/job-uid"] == UID
        assert metadata["labels"]["app.kubernetes.io/managed-by"] == "spillway"
        (reference,) = metadata["ownerReferences"]
        assert (reference["uid"], reference["controller"]) == (UID, True)


def test_the_contract_is_immutable_and_can_be_read_back() -> None:
    written = files(TWO_PODS)
    config_map = made(TWO_PODS)["ConfigMap"]
    assert config_map["immutable"] is True
    data = config_map["data"]
    contract = Contract(
        3, "tiny-3", UID, data["job.json"], data["plan.json"], data["decision.json"], data["attempt.json"]
    )
    assert manifests.read_contract(contract) == written


def test_a_contract_in_other_words_is_not_read() -> None:
    assert manifests.read_contract(Contract(3, "tiny-3", UID, "{}", "[]", "no JSON", "")) is None


def test_the_trainer_is_told_where_everything_is() -> None:
    told = JobFile.model_validate_json(made(TWO_PODS)["ConfigMap"]["data"]["job.json"])
    assert told.epoch == 3
    assert told.checkpoint_directory == "/checkpoints/tiny-9b1deb4d"
    assert told.corpus_directory == "/checkpoints/tiny-9b1deb4d/corpus"
    assert told.claims == {"corpus": "/claims/corpus", "held": "/claims/held"}
    assert (told.num_nodes, told.ranks_per_node) == (2, 1)
    assert (told.master_address, told.master_port) == ("tiny-3-0.tiny-3", 29500)


def test_without_a_claim_checkpoints_end_with_the_pod() -> None:
    told = JobFile.model_validate_json(made()["ConfigMap"]["data"]["job.json"])
    assert (told.checkpoint_directory, told.corpus_directory) == ("/work/checkpoints", "/work/corpus")
    assert (told.master_address, told.master_port) == ("127.0.0.1", 0)


def test_an_attempt_is_one_try_of_every_pod() -> None:
    spec = made(TWO_PODS)["Job"]["spec"]
    assert (spec["backoffLimit"], spec["podReplacementPolicy"], spec["completionMode"]) == (0, "Failed", "Indexed")
    assert spec["completions"] == spec["parallelism"] == 2
    assert spec["template"]["spec"]["restartPolicy"] == "Never"
    assert "ttlSecondsAfterFinished" not in spec


def test_the_service_gives_names_and_counts_ready_pods() -> None:
    spec = made(TWO_PODS)["Service"]["spec"]
    assert spec["clusterIP"] == "None"
    assert "publishNotReadyAddresses" not in spec, "trainers count the ready pods by it"
    template = made(TWO_PODS)["Job"]["spec"]["template"]
    assert spec["selector"].items() <= template["metadata"]["labels"].items()
    assert template["spec"]["subdomain"] == "tiny-3"


def test_with_a_queue_the_job_is_born_suspended() -> None:
    queued = made({"spec.scheduling.queueName": "team-a"})["Job"]
    assert queued["spec"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    assert "suspend" not in made()["Job"]["spec"]


def test_a_pod_is_restricted() -> None:
    spec, trainer = pod(), container()
    assert spec["automountServiceAccountToken"] is False and spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    security = trainer["securityContext"]
    assert security == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "ids"),
    [
        ({}, {"runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000, "fsGroupChangePolicy": "OnRootMismatch"}),
        (
            {"runAsUser": 2000, "fsGroup": 3000},
            {"runAsUser": 2000, "runAsGroup": 1000, "fsGroup": 3000, "fsGroupChangePolicy": "OnRootMismatch"},
        ),
        ({"assignedByCluster": True, "supplementalGroups": [7]}, {"supplementalGroups": [7]}),
    ],
)
def test_a_pod_has_the_ids_that_the_job_names_or_leaves_them_to_the_cluster(
    asked: dict[str, Any], ids: dict[str, Any]
) -> None:
    security = pod({"spec.pod.securityContext": asked})["securityContext"]
    assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **ids}


def test_a_pod_gets_the_resources_and_the_network_that_the_job_names() -> None:
    resources = {"memory": "40Gi", "sharedMemory": "3Gi", "extended": {"rdma/hca": 2}}
    changes = {"spec.pod.resources": resources, "spec.pod.hostNetwork": True}
    spec, given = pod(changes), container(changes)["resources"]
    for kind in ("requests", "limits"):
        assert (given[kind]["memory"], given[kind]["rdma/hca"]) == ("40Gi", "2")
    (memory,) = [one["emptyDir"] for one in spec["volumes"] if one["name"] == "shared-memory"]
    assert memory == {"medium": "Memory", "sizeLimit": "3Gi"}
    assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
    assert not {"hostNetwork", "dnsPolicy"} & set(pod())


def test_a_pod_tolerates_the_taints_of_its_extended_resources() -> None:
    """Clouds taint GPU nodes by the resource's name; not every API server adds the toleration."""
    changes = {"spec.parallelism.device": "Cuda", "spec.pod.resources.extended": {"rdma/hca": 1}}
    for name in ("nvidia.com/gpu", "rdma/hca"):
        toleration = {"key": name, "operator": "Exists", "effect": "NoSchedule"}
        assert toleration in pod(changes, made=plan("Cuda"))["tolerations"]
        assert toleration not in pod()["tolerations"]


IB = {"name": "NCCL_IB_HCA", "value": "mlx5"}


@pytest.mark.parametrize("given", [{"env": [IB]}, {"networkPreset": "infiniband"}])
def test_variables_of_nccl_reach_the_container(given: dict[str, Any]) -> None:
    presets = {"networkPresets": [{"name": "infiniband", "env": [IB]}]}
    spec, _ = with_defaults(document({"spec.pod": given})["spec"], OperatorConfigSpec.model_validate(presets))
    assert IB in container({"spec.pod": spec["pod"]})["env"]


def test_a_run_in_a_cluster_knows_it_so_that_its_checkpoints_have_an_owner() -> None:
    assert json.loads(made()["ConfigMap"]["data"]["job.json"])["in_cluster"] is True


def test_what_kills_when_exceeded_is_requested_in_full() -> None:
    resources = container()["resources"]
    for name in ("memory", "ephemeral-storage"):
        assert resources["requests"][name] == resources["limits"][name]
    assert "cpu" in resources["requests"] and "cpu" not in resources["limits"]


@pytest.mark.parametrize(("share", "given"), [(0.6, 0.6), (1.0, 1.0), (1.5, 1.0), (0.1, 1.0), (0.0, 1.0)])
def test_pod_requests_the_memory_backed_by_evidence_unless_implausible(share: float, given: float) -> None:
    counted = files()
    asked = int(share * counted.counted.memory_bytes)
    status = counted.plan_status.model_copy(update={"pod_memory": asked})
    decided = replace(counted, plan_status=status)
    expected = int(given * counted.counted.memory_bytes)
    assert decided.resources.memory_bytes == expected
    assert decided.spared_bytes == counted.counted.memory_bytes - expected
    (job_manifest,) = [child for child in children(decided, owner(), FACTS) if child["kind"] == "Job"]
    (limits,) = [one["resources"]["limits"] for one in job_manifest["spec"]["template"]["spec"]["containers"]]
    assert parse_quantity(limits["memory"]) == expected


def test_a_cuda_job_asks_for_its_devices() -> None:
    changes = {"spec.parallelism": {"device": "Cuda"}}
    limits = container(changes, made=plan("Cuda"))["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in container()["resources"]["limits"]


def test_the_grace_period_holds_a_step_and_a_checkpoint() -> None:
    assert pod()["terminationGracePeriodSeconds"] == files().resources.grace_seconds >= 30


def test_a_plan_without_nvme_mounts_no_spill_volume() -> None:
    names = [volume["name"] for volume in pod(made=plan(nvme_bytes=0))["volumes"]]
    assert "spill" not in names
    assert "spill" in [volume["name"] for volume in pod()["volumes"]]


def test_a_storage_class_makes_the_spill_volume_an_ephemeral_claim() -> None:
    volumes = {volume["name"]: volume for volume in pod(TWO_PODS)["volumes"]}
    claim = volumes["spill"]["ephemeral"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == "nvme" and claim["accessModes"] == ["ReadWriteOnce"]
    assert "sizeLimit" in {volume["name"]: volume for volume in pod()["volumes"]}["spill"]["emptyDir"]


def test_several_volumes_are_a_claim_and_a_directory_each() -> None:
    volumes = {"spec.spill": {"storageClassName": "nvme", "numVolumes": 3}}
    made = files(volumes)
    assert made.job.spill_directories == ("/spill", "/spill-1", "/spill-2")
    spill = {v["name"]: v for v in pod(volumes)["volumes"] if v["name"].startswith("spill")}
    assert list(spill) == ["spill", "spill-1", "spill-2"]
    assert len({str(volume["ephemeral"]) for volume in spill.values()}) == 1
    mounts = {mount["name"]: mount["mountPath"] for mount in container(volumes)["volumeMounts"]}
    assert [mounts[name] for name in spill] == list(made.job.spill_directories)


def test_text_is_mounted_read_only() -> None:
    mounts = {mount["name"]: mount for mount in container(TWO_PODS)["volumeMounts"]}
    assert mounts["text"] == {"name": "text", "mountPath": "/claims/corpus", "readOnly": True}
    assert mounts["evaluation-text"] == {"name": "evaluation-text", "mountPath": "/claims/held", "readOnly": True}
    assert "readOnly" not in mounts["checkpoints"]


def test_text_to_train_and_to_evaluate_on_may_share_a_claim() -> None:
    place = {"claim": "corpus", "subPath": "en"}
    mounts = container({"spec.data": {"text": place, "evaluation": {"text": place}}})["volumeMounts"]
    assert [mount["name"] for mount in mounts if mount["mountPath"].startswith("/claims")] == ["text"]


def test_every_mount_has_its_volume() -> None:
    for changes in ({}, TWO_PODS):
        volumes = [volume["name"] for volume in pod(changes)["volumes"]]
        assert volumes == [mount["name"] for mount in container(changes)["volumeMounts"]]
        assert len(set(volumes)) == len(volumes)


def test_the_only_token_is_for_progress() -> None:
    sources = [volume["projected"]["sources"] for volume in pod()["volumes"] if "projected" in volume]
    assert [source["serviceAccountToken"]["audience"] for (source,) in sources] == ["progress.spillway.dev"]


def test_without_a_progress_endpoint_there_is_no_token() -> None:
    bare = OperatorFacts(trainer_image="trainer:1")
    spec = manifests.pod_spec(files(), bare)
    assert not any("projected" in volume for volume in spec["volumes"])
    assert not any(variable["name"].startswith("KUBEFLOW") for variable in spec["containers"][0]["env"])


def test_live_headroom_only_prefers() -> None:
    affinity = pod()["affinity"]["nodeAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["weight"] == 100
    assert term["preference"]["matchFields"] == [{"key": "metadata.name", "operator": "In", "values": ["node-7"]}]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in affinity


def test_the_node_class_of_the_plan_is_required() -> None:
    decision = Decision(attempts=Attempts(total=1), required_labels={"nvidia.com/gpu.product": "H100"})
    affinity = pod(decision=decision)["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "nvidia.com/gpu.product", "operator": "In", "values": ["H100"]}]


def test_labels_of_ours_win_over_a_jobs() -> None:
    template = made({"spec.pod": {"labels": {"spillway.dev/job": "other", "team": "a"}}})["Job"]["spec"]["template"]
    assert template["metadata"]["labels"]["spillway.dev/job"] == "tiny"
    assert template["metadata"]["labels"]["team"] == "a"


def test_variables_of_ours_come_last() -> None:
    names = [variable["name"] for variable in container(TWO_PODS)["env"]]
    assert names[0] == "HF_TOKEN"
    assert set(names[1:]) <= set(RESERVED_VARIABLES)


def test_a_jobs_own_image_goes_before_the_charts() -> None:
    assert container()["image"] == FACTS.trainer_image
    for image in ("mine:2", f"registry.example/mine@sha256:{'a' * 64}"):
        assert container({"spec.pod.image": image})["image"] == image


def test_a_contract_that_fits_no_configmap_is_rejected_with_its_size() -> None:
    with pytest.raises(UserError, match=r"a ConfigMap holds 1 MiB: shorten spec\.pod\.env"):
        children(files(), owner(), replace(FACTS, progress_ca="x" * 1_000_000))


def tolerations(*given: dict[str, Any]) -> dict[str, Any]:
    """taint -> what tolerates its NoExecute"""
    found = pod({"spec.scheduling.tolerations": list(given)})["tolerations"]
    return {each.get("key", ""): each for each in found if each.get("effect", "NoExecute") == "NoExecute"}


def test_a_pod_leaves_a_node_that_does_not_answer_after_a_minute() -> None:
    found = tolerations()
    for key in ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"):
        assert found[key]["tolerationSeconds"] == manifests.NODE_LOST_SECONDS == 60


@pytest.mark.parametrize(
    ("given", "added"),
    [
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute",
          "tolerationSeconds": 600}, ["node.kubernetes.io/not-ready"]),
        ({"operator": "Exists"}, []),
        ({"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoSchedule"},
         ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"]),
    ],
    ids=["longer", "everything", "scheduling only"],
)  # fmt: skip
def test_what_the_user_tolerates_of_a_lost_node_stands_alone(given: dict[str, Any], added: list[str]) -> None:
    """Of two tolerations of one taint Kubernetes counts the shorter one."""
    found = pod({"spec.scheduling.tolerations": [given]})["tolerations"]
    assert [each["key"] for each in found if each.get("tolerationSeconds") == 60] == added
    assert [each for each in found if each.get("tolerationSeconds") != 60] == [given]
