"""A model whose sizes the spec does not give: a pod finds them, and every attempt is planned from what it told."""

from __future__ import annotations

import base64
import json
import zlib
from dataclasses import replace
from typing import Any

import pytest

from cases.job_documents import job
from harness.cluster_model import NAME, NAMESPACE, UID, place
from harness.observations import NOW, condition, decide, observed
from spillway.api.sweep.members import inspected_as, solo_specs
from spillway.api.training_job import TrainingJobSpec
from spillway.placement.cluster_view import ClusterView
from spillway.planning.model_shape import ModelShape, model_shape, shape_of
from spillway_operator.decide import inspection
from spillway_operator.decide.observed import Claim, ContainerEnding, Desired, Inspection, Observed
from spillway_operator.decide.reconcile import reconcile

SOURCE: dict[str, Any] = {
    "spec.model": {"source": {"claim": "models", "subPath": "tiny"}},
    "spec.scheduling": {"nodeSelector": {"pool": "a"}, "queueName": "team"},
    "spec.pod": {"image": "trainer:2", "env": [{"name": "HF_HOME", "value": "/cache"}]},
}
CLAIMS = (Claim("models", True, ("ReadOnlyMany",)),)
SHAPE = shape_of(job().spec)


def seen(found: Inspection | None, changes: dict[str, Any] | None = None, **more: Any) -> Observed:
    return observed({**SOURCE, **(changes or {})}, inspection=found, claims=CLAIMS, **more)


def ended(code: int, message: str = "", reason: str = "Error") -> Inspection:
    ending = ContainerEnding(code, reason, message, NOW, NOW)
    return Inspection(job_uid="job", outcome="Failed" if code else "Complete", ending=ending)


def planned(desired: Desired) -> tuple[str, str, str]:
    found = condition(desired, "Planned")
    return found["status"], found["reason"], found["message"]


def test_without_sizes_a_pod_of_the_trainer_image_is_asked_for_them() -> None:
    assert decide(seen(None)).needs == {"contracts", "claims", "inspection"}
    desired = decide(seen(Inspection()))
    assert planned(desired)[:2] == ("Unknown", "Inspecting")
    (made,) = desired.creates
    assert (made["kind"], made["metadata"]["name"]) == ("Job", f"{NAME}-inspect")
    assert made["metadata"]["ownerReferences"][0]["uid"] == UID
    assert made["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    assert set(made["metadata"]["labels"]) == {"spillway.dev/inspection", "kueue.x-k8s.io/queue-name"}, "no attempt's"
    template = made["spec"]["template"]
    told = json.loads(template["metadata"]["annotations"]["spillway.dev/inspection"])
    assert told["spec"]["model"]["source"] == {"claim": "models", "subPath": "tiny"}
    assert told["claims"] == {"models": "/claims/models"}
    pod, (container,) = template["spec"], template["spec"]["containers"]
    assert (pod["nodeSelector"], container["image"]) == ({"pool": "a"}, "trainer:2")
    assert {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}["model"] == "/claims/models"
    assert container["resources"]["limits"]["memory"] == "4Gi" and "nvidia.com/gpu" not in str(container)
    assert pod["securityContext"]["runAsNonRoot"] and pod["automountServiceAccountToken"] is False
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert made["spec"]["backoffLimit"] == 0 and made["spec"]["activeDeadlineSeconds"] == 600


FETCHED: dict[str, Any] = {
    "spec.model": {
        "source": {
            "claim": "models", "subPath": "tiny", "fetch": {"uri": "s3://models/tiny", "secretName": "keys"},
        },
    },
}  # fmt: skip


def test_what_is_fetched_comes_by_the_same_pod_with_its_secret() -> None:
    writable = (Claim("models", True, ("ReadWriteOnce",)),)
    desired = decide(replace(seen(Inspection(), FETCHED), claims=writable))
    assert planned(desired) == (
        "Unknown", "Inspecting",
        f"Job {NAME}-inspect fetches s3://models/tiny, and finds the model's sizes; its progress: kubectl logs -f "
        f"job/{NAME}-inspect -n {NAMESPACE}",
    )  # fmt: skip
    (made,) = desired.creates
    (container,) = made["spec"]["template"]["spec"]["containers"]
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    (mount,) = [one for one in container["volumeMounts"] if one["name"] == "model"]
    assert "readOnly" not in mount, "the download is written there"
    assert made["spec"]["activeDeadlineSeconds"] == 24 * 3600


def test_a_download_needs_a_claim_that_can_be_written() -> None:
    desired = decide(seen(Inspection(), FETCHED))
    assert planned(desired) == (
        "False", "ClaimNotWritable",
        "spec.model.source.claim = models: the download must be written to it, but its access mode is ReadOnlyMany; "
        "use a claim with ReadWriteOnce or ReadWriteMany",
    )  # fmt: skip


def test_fetched_text_is_waited_for_and_the_sizes_of_the_spec_are_planned() -> None:
    text = {"spec.data": {"text": {"claim": "models", "subPath": "text", "fetch": {"uri": "https://host/a.txt"}}}}
    writable = (Claim("models", True, ("ReadWriteMany",)),)
    waits = decide(observed(text, inspection=Inspection(), claims=writable))
    assert [child["metadata"]["name"] for child in waits.creates] == [f"{NAME}-inspect"]
    asked: list[ClusterView] = []

    def recorded(wanted: Any, cluster: ClusterView) -> Any:
        asked.append(cluster)
        return place(wanted, cluster)

    reconcile(observed(text, inspection=Inspection(shape=SHAPE.packed()), claims=writable), NOW, recorded)
    assert [one.shape for one in asked] == [None]


def test_while_the_pod_builds_the_model_the_job_waits_and_says_for_what() -> None:
    waits = decide(seen(Inspection(job_uid="job", obstacle="ImagePullBackOff: not found")))
    assert not waits.creates and waits.look_again_seconds == inspection.LOOK_SECONDS
    assert planned(waits)[1:] == (
        "Inspecting",
        f"Job {NAME}-inspect builds the model without allocating it, to find its sizes: ImagePullBackOff: not found",
    )


def test_what_the_pod_told_becomes_an_immutable_object_and_then_a_plan() -> None:
    desired = decide(seen(ended(0, f"{SHAPE.packed()}\n")))
    (made,) = desired.creates
    assert (made["kind"], made["metadata"]["name"], made["immutable"]) == ("ConfigMap", f"{NAME}-model", True)
    known = seen(Inspection(shape=made["data"]["shape"]))
    asked: list[ClusterView] = []

    def recorded(wanted: Any, cluster: ClusterView) -> Any:
        asked.append(cluster)
        return place(wanted, cluster)

    attempt = reconcile(known, NOW, recorded)
    assert [one["kind"] for one in attempt.creates] == ["ConfigMap", "Job"]
    assert asked[0].shape == SHAPE
    by_sizes = decide(observed())
    plans = [json.loads(made.creates[0]["data"]["plan.json"]) for made in (attempt, by_sizes)]
    assert plans[0]["bytes"] == plans[1]["bytes"], "the same model has the same plan"
    told = json.loads(attempt.creates[0]["data"]["job.json"])
    assert told["claims"] == {"models": "/claims/models"}
    mounts = attempt.creates[1]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    assert {"name": "model", "mountPath": "/claims/models", "readOnly": True} in mounts


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (ended(64, "spec.model.source: /claims/models/tiny has no config.json"), "has no config.json; correct"),
        (ended(137, "", "OOMKilled"), f"Job {NAME}-inspect used more than 4Gi of memory; correct the cause"),
        (ended(1, "Traceback"), "ended with exit code 1: Traceback"),
        (ended(0, "not a shape"), "ended with exit code 0: not a shape"),
        (ended(0, ""), "ended with exit code 0: no message"),
        (replace(ended(137), ending=None, reason="DeadlineExceeded"), "building the model took longer than 10m00s"),
        (Inspection(shape="forged"), f"ConfigMap {NAME}-model does not hold model sizes that this operator can read"),
    ],
)
def test_a_model_that_cannot_be_built_is_said_with_what_to_do(found: Inspection, why: str) -> None:
    desired = decide(seen(found))
    status, reason, message = planned(desired)
    assert (status, reason) == ("False", "InspectionFailed") and why in message
    assert f"kubectl delete job {NAME}-inspect -n team" in message or "delete it" in message
    assert not desired.creates and not desired.deletes


@pytest.mark.parametrize(
    ("model", "found", "why"),
    [
        ({"entrypoint": "my.module:build"}, ended(137, "", "OOMKilled"), "create the model's parameters without"),
        (
            FETCHED["spec.model"],
            replace(ended(137), ending=None, reason="DeadlineExceeded"),
            "the download took longer",
        ),
    ],
)
def test_advice_about_building_is_given_only_where_a_model_is_built(model: Any, found: Inspection, why: str) -> None:
    writable = (Claim("models", True, ("ReadWriteOnce",)),)
    assert why in planned(decide(replace(seen(found, {"spec.model": model}), claims=writable)))[2]


def test_members_are_planned_from_the_shapes_of_their_own_adapters() -> None:
    ranks = {f"r{rank}": {"model": {"lora": {"rank": rank}}} for rank in (2, 8)}
    members = {
        "spec.model": {"source": {"claim": "models", "subPath": "tiny"}, "lora": {"rank": 4}},
        "spec.members": [{"name": name, **one} for name, one in ranks.items()],
    }
    desired = decide(seen(Inspection(shape=SHAPE.packed()), members))
    message = planned(desired)[2]
    assert "does not hold the sizes of all members' models; delete it and the Job that made it" in message
    assert f"configmap/{NAME}-model job/{NAME}-inspect -n team" in message
    own = seen(Inspection(), members).job.spec
    others = tuple((inspected_as(one), SHAPE) for one in solo_specs(TrainingJobSpec.model_validate_json(own)))
    known = replace(SHAPE, others=others)
    asked: list[ClusterView] = []

    def recorded(wanted: Any, cluster: ClusterView) -> Any:
        asked.append(cluster)
        return place(wanted, cluster)

    attempt = reconcile(seen(Inspection(shape=known.packed()), members), NOW, recorded)
    assert asked[0].shape == known
    assert [one["kind"] for one in attempt.creates] == ["ConfigMap", "Job"], (own, planned(attempt))


def test_a_lost_pod_is_no_fault_of_the_model() -> None:
    desired = decide(seen(Inspection(job_uid="job", outcome="Failed", reason="BackoffLimitExceeded")))
    assert [(one.kind, one.name, one.uid) for one in desired.deletes] == [("Job", f"{NAME}-inspect", "job")]
    assert planned(desired)[1] == "Inspecting"


def test_a_foreign_object_of_the_name_is_left_alone() -> None:
    desired = decide(seen(Inspection(foreign=f"Job {NAME}-inspect")))
    assert not desired.creates and not desired.deletes
    assert condition(desired, "Accepted")["reason"] == "NameConflict"


def test_a_model_with_sizes_needs_no_pod() -> None:
    assert [one["kind"] for one in decide(observed()).creates] == ["ConfigMap", "Job"]
    assert not inspection.is_needed(job().spec)
    entrypoint = {"spec.model": {"entrypoint": "models:tiny"}}
    (made,) = decide(seen(Inspection(), entrypoint)).creates
    assert "model" not in {volume["name"] for volume in made["spec"]["template"]["spec"]["volumes"]}


def test_of_equal_layers_one_is_told() -> None:
    sizes = {"hiddenSize": 8192, "numLayers": 80, "numHeads": 64, "numKeyValueHeads": 8, "vocabSize": 128256}
    spec = job({f"spec.model.config.{name}": size for name, size in sizes.items()}).spec
    deep = model_shape(spec.model.transformer, "bfloat16")
    assert len(deep.packed()) < 2048
    assert ModelShape.unpacked(deep.packed()) == deep
    assert [one.name for one in ModelShape.unpacked(deep.packed()).blocks] == [one.name for one in deep.blocks]


def packed(document: Any) -> str:
    return base64.b85encode(zlib.compress(json.dumps(document).encode())).decode()


@pytest.mark.parametrize(
    "text",
    [
        "", "x", "ünïcödé", packed([]), packed({}), packed({"unlike": [], "names": [], "segments": []}),
        packed({"unlike": [{}], "names": ["a"] * 9999, "segments": [0] * 9999}), SHAPE.packed()[:-8],
        base64.b85encode(zlib.compress(b" " * (64 << 20))).decode(),
        packed({
            "unlike": [[0] * 20_000],
            "others": [["a", {"names": ["a"] * 4096, "segments": [0] * 4096}]] * 16, "names": ["a"], "segments": [0],
        }),
        replace(SHAPE, hidden_size=-1).packed(), replace(SHAPE, vocab_size=2**70).packed(),
    ],
    ids=lambda text: f"{len(text)} characters",
)  # fmt: skip
def test_what_is_no_shape_is_not_believed(text: str) -> None:
    assert inspection.read_shape(text) is None
