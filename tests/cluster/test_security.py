"""Privileges that a TrainingJob cannot get, and secrets that nobody gets to see, on the real API server."""

from __future__ import annotations

import base64
import json
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.installed import (
    KWOK_TOLERATION,
    LONG,
    SYSTEM_NAMESPACE,
    Document,
    Installed,
    changed,
    example,
    named,
    on_fake_nodes,
)
from testbed.client import Bed
from testbed.errors import Failed
from testbed.layout import REPOSITORY

SECONDS = 180.0
KIND = "trainingjobs.spillway.dev"

# --- escalation -------------------------------------------------------------------------------------------------------

ESCALATIONS: dict[str, Any] = {
    f"spec.pod.{field}": value
    for field, value in {
        "hostPID": True,
        "hostIPC": True,
        "hostUsers": True,
        "shareProcessNamespace": True,
        "automountServiceAccountToken": True,
        "securityContext.privileged": True,
        "privileged": True,
        "capabilities": {"add": ["SYS_ADMIN"]},
        "volumes": [{"name": "root", "hostPath": {"path": "/"}}],
        "volumeMounts": [{"name": "root", "mountPath": "/host"}],
        "initContainers": [{"name": "x", "image": "x", "securityContext": {"privileged": True}}],
        "containers": [{"name": "x", "image": "x"}],
        "nodeName": "node-0",
        "schedulerName": "mine",
        "hostAliases": [{"ip": "127.0.0.1", "hostnames": ["kubernetes.default.svc"]}],
        "dnsConfig": {"nameservers": ["203.0.113.1"]},
        "resourceClaims": [{"name": "x"}],
        "spec": {"hostNetwork": True},
        "metadata": {"ownerReferences": []},
    }.items()
} | {
    "spec.securityContext": {"runAsUser": 0},
    "spec.volumes": [{"name": "root", "hostPath": {"path": "/"}}],
    "spec.hostNetwork": True,
    "spec.serviceAccountName": "default",
    "spec.envFrom": [{"secretRef": {"name": "x"}}],
    "spec.pod.resources.limits": {"memory": "1Ti"},
    "spec.spill.hostPath": "/",
    "spec.spill.emptyDir": {},
}
"""path -> value, for settings that have no field"""
ENVIRONMENT = {
    "configMapKeyRef": {"name": "x", "key": "y"},
    "fieldRef": {"fieldPath": "status.hostIP"},
    "resourceFieldRef": {"resource": "limits.memory"},
    "fileKeyRef": {"volumeName": "x", "path": "y", "key": "z"},
}
REJECTED_VALUES: dict[str, tuple[Any, str]] = {
    "spec.pod.labels": ({"spillway.dev/job-uid": "another"}, "is reserved"),
    "spec.pod.annotations": (
        {"container.apparmor.security.beta.kubernetes.io/trainer": "unconfined"},
        "is reserved",
    ),
    "spec.pod.labels.team": ({"team": "not a label!"}, "should match"),
    "spec.pod.env[0].name": ([{"name": "KUBEFLOW_TRAINER_SERVER_URL", "value": "https://elsewhere"}], "itself"),
    "spec.checkpoint.claim": ("../escape", "should match"),
    "spec.pod.securityContext.runAsUser": (0, "greater than or equal to 1"),
    "spec.parallelism": ({"nodes": 1024, "devicesPerNode": 2}, "at most 1024 ranks"),
}
"""path -> (forbidden value of an existing field, part of the rejection)"""


def with_value(job: Document, path: str, value: Any) -> Document:
    """The job with `value` at `path`, which is written as in messages; parts of it below a map or a list are in
    `value`."""
    fields = path.removeprefix("spec.").partition("[")[0].removesuffix(".team")
    return changed(job, job["metadata"]["namespace"], **{fields.replace(".", "__"): value})


def tried(bed: Bed, jobs: list[Document], *flags: str) -> str:
    """kubectl's output when it creates all `jobs` as a dry run."""
    documents = "\n---\n".join(map(json.dumps, jobs))
    kubectl = [str(bed.state.bin / "kubectl"), "--kubeconfig", str(bed.kubeconfig)]
    ended = subprocess.run(
        [*kubectl, "create", "--dry-run=server", *flags, "-f", "-"],
        input=documents, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return ended.stdout + ended.stderr


def stored(said: str) -> list[Document]:
    """The objects in the output of `kubectl create -o json`, which prints one object after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while at < len(said.rstrip()):
        one, at = decoder.raw_decode(said, at)
        found.append(one)
        at += len(said[at:]) - len(said[at:].lstrip())
    return found


@pytest.fixture(scope="module")
def smallest(module_namespace: str) -> Document:
    return on_fake_nodes(example("one-pod", module_namespace))


def numbered(jobs: list[Document]) -> list[Document]:
    return [named(job, f"trial-{number}") for number, job in enumerate(jobs)]


def test_no_field_of_a_pod_that_lets_it_out_can_be_given(spillway: Installed, smallest: Document) -> None:
    """kubectl requests strict validation. Without it, jobs are created without these fields: see the test below."""
    given = [with_value(smallest, path, value) for path, value in ESCALATIONS.items()]
    given += [
        with_value(smallest, "spec.pod.env", [{"name": "A", "valueFrom": {source: value}}])
        for source, value in ENVIRONMENT.items()
    ]
    said = tried(spillway.bed, numbered(given))
    assert "created" not in said
    unnamed = [path for path in ESCALATIONS if f'unknown field "{path}"' not in said]
    unnamed += [source for source in ENVIRONMENT if f'unknown field "spec.pod.env[0].valueFrom.{source}"' not in said]
    assert unnamed == [], said
    print(f"\n{len(given)} ways out of the pod: all rejected at admission, by path")


def test_without_strict_validation_escalating_fields_are_dropped(spillway: Installed, smallest: Document) -> None:
    given = [with_value(smallest, path, value) for path, value in ESCALATIONS.items()]
    *kept, plain = stored(tried(spillway.bed, [*numbered(given), smallest], "--validate=ignore", "-o", "json"))
    assert len(kept) == len(given)
    plain["spec"].setdefault("pod", {})
    for job in kept:
        job["spec"].setdefault("pod", {})
        assert job["spec"] == plain["spec"], job["metadata"]["name"]


@pytest.mark.parametrize("path", REJECTED_VALUES)
def test_a_value_that_takes_what_is_not_the_jobs_is_rejected_at_admission(
    spillway: Installed, smallest: Document, path: str
) -> None:
    value, allowed = REJECTED_VALUES[path]
    said = tried(spillway.bed, [with_value(smallest, path, value)])
    assert path in said and allowed in said, said


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"pod__env": [{"name": f"V{n}", "value": "1"} for n in range(257)]}, "spec.pod.env: Too many: 257"),
        ({"pod__env": [{"name": f"V{n}", "value": "x" * 8000} for n in range(5)]}, "spec.pod.env"),
        ({"parallelism": {"nodes": 1025}}, "spec.parallelism.nodes"),
        ({"pod__imagePullSecrets": [{"name": f"s{n}"} for n in range(17)]}, "spec.pod.imagePullSecrets: Too many"),
        ({"pod__image": "x" * 1025}, "spec.pod.image: Too long"),
        ({"scheduling__tolerations": [KWOK_TOLERATION] * 65}, "spec.scheduling.tolerations: Too many"),
        ({"scheduling__nodeSelector": {f"k{n}": "v" for n in range(65)}}, "spec.scheduling.nodeSelector: Too many"),
        ({"pod__labels": {f"k{n}": "v" for n in range(65)}}, "spec.pod.labels: Too many"),
    ],
)
def test_what_is_too_much_is_rejected_at_admission(
    spillway: Installed, smallest: Document, changes: Document, path: str
) -> None:
    said = tried(spillway.bed, [changed(smallest, smallest["metadata"]["namespace"], **changes)])
    assert path in said and "created" not in said, said[:1000]


def test_a_spec_that_is_too_long_as_a_whole_is_rejected_by_a_condition(spillway: Installed, namespace: str) -> None:
    """The operator checks this, because no rule of a schema can count the bytes of an object."""
    annotations = {f"note-{number}": "x" * 1024 for number in range(64)}
    job = changed(on_fake_nodes(example("one-pod", namespace)), namespace, pod__annotations=annotations)
    spillway.create(job)
    job = spillway.until(lambda found: found["status"].get("state") == "Rejected", namespace, "one-pod", SECONDS)
    said = spillway.condition(namespace, "one-pod", "Accepted")
    assert said["reason"] == "InvalidSpec" and "spec" in said["message"] and "at most 65,536" in said["message"], said
    assert spillway.children("job", namespace, "one-pod") == []


def test_pod_with_every_allowed_option_is_restricted_and_has_no_api_token(spillway: Installed, namespace: str) -> None:
    bed = spillway.bed
    bed.kubectl("create", "serviceaccount", "team", "-n", namespace)
    bed.kubectl("create", "secret", "generic", "keys", "--from-literal=token=x", "-n", namespace)
    pod = {
        "labels": {"team": "a"}, "annotations": {"note": "b"}, "serviceAccountName": "team",
        "image": f"local/hostroot@sha256:{'a' * 64}", "imagePullSecrets": [{"name": "registry"}],
        "env": [{"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}}],
        "securityContext": {"runAsUser": 2000, "fsGroup": 3000, "supplementalGroups": [4000]},
        "resources": {"cpu": "100m"},
    }  # fmt: skip
    job = changed(on_fake_nodes(example("one-pod", namespace)), namespace, pod=pod)
    spillway.create(job)
    spillway.until(goes_on, namespace, "one-pod", SECONDS)
    (pod,) = spillway.children("pod", namespace, "one-pod")
    spec = pod["spec"]
    assert spec["serviceAccountName"] == "team" and spec["automountServiceAccountToken"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers", "shareProcessNamespace"} & set(spec)
    ids = {name: spec["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup", "supplementalGroups")}
    assert ids == {"runAsUser": 2000, "runAsGroup": 1000, "fsGroup": 3000, "supplementalGroups": [4000]}
    sources = [(set(volume) - {"name"}).pop() for volume in spec["volumes"]]
    assert set(sources) <= {"configMap", "emptyDir", "projected"}
    projected = [volume["projected"]["sources"] for volume in spec["volumes"] if "projected" in volume]
    assert [source["serviceAccountToken"]["audience"] for (source,) in projected] == ["progress.spillway.dev"]
    (container,) = spec["containers"]
    assert container["image"] == f"local/hostroot@sha256:{'a' * 64}", "by digest, as written"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip


def goes_on(job: Document) -> bool:
    """Whether the job's pods run or have completed, which fake pods do soon."""
    conditions = job["status"].get("conditions", [])
    return any(one["type"] in ("Running", "Complete") and one["status"] == "True" for one in conditions)


# --- secrets ----------------------------------------------------------------------------------------------------------

NUM_VARIABLES = 14
PROBE = "import os; print(sorted(value for value in os.environ.values() if value.startswith('marker-')))"


@pytest.fixture(scope="module")
def planted(spillway: Installed, module_namespace: str) -> Iterator[tuple[str, dict[str, str]]]:
    """A namespace in which one job trains and one has failed, both with secrets, and the marker in each secret."""
    bed, namespace = spillway.bed, module_namespace
    markers = {f"V{number}": f"marker-{secrets.token_hex(12)}" for number in range(NUM_VARIABLES)}
    markers |= {what: f"marker-{secrets.token_hex(12)}" for what in ("unused", "password", "user")}
    login = base64.b64encode(f"{markers['user']}:{markers['password']}".encode()).decode()
    registry = {"auths": {"registry.invalid": {"username": markers["user"], "password": markers["password"],
                                               "auth": login}}}  # fmt: skip
    markers["registry's auth"] = login
    bed.apply(
        secret(namespace, "keys", {name: markers[name] for name in markers if name.startswith("V")}),
        secret(namespace, "unused", {"key": markers["unused"]}),
        secret(namespace, "registry", {".dockerconfigjson": json.dumps(registry)}, "kubernetes.io/dockerconfigjson"),
    )
    given: Document = {
        "pod__env": [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": "keys", "key": name}}}
            for name in markers
            if name.startswith("V")
        ],
        "pod__imagePullSecrets": [{"name": "registry"}],
    }
    spillway.create(named(example("one-pod", namespace, training__steps=LONG, **given), "trains"))
    wrong = example("one-pod", namespace, data={"text": {"path": "/nowhere"}}, **given)
    spillway.create(named(wrong, "fails"))
    spillway.until(lambda job: job["status"].get("progress", {}).get("step", 0) > 0, namespace, "trains", SECONDS)
    spillway.wait(namespace, "fails", "Failed", SECONDS)
    (pod,) = spillway.children("pod", namespace, "trains")
    inside = ("exec", pod["metadata"]["name"], "-n", namespace, "--")
    seen = bed.kubectl(*inside, "python", "-c", PROBE)
    assert all(markers[f"V{number}"] in seen for number in range(NUM_VARIABLES)), "the trainer has them"
    markers["progress token"] = bed.kubectl(*inside, "cat", "/var/run/spillway/token").strip()
    key = bed.get("secret", "spillway-progress-tls", "-n", SYSTEM_NAMESPACE)["data"]["tls.key"]
    markers["private key"] = base64.b64decode(key).decode().splitlines()[3]
    yield namespace, markers
    bed.kubectl("delete", KIND, "--all", "-n", namespace, "--wait=false")


def secret(namespace: str, name: str, data: dict[str, str], kind: str = "Opaque") -> Document:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": kind, "stringData": data}


def everything_said(spillway: Installed, namespace: str, folder: Path) -> dict[str, str]:
    """Place -> text that Spillway wrote there."""
    bed = spillway.bed
    kinds = (
        "configmaps",
        KIND,
        "memoryprofiles.spillway.dev",
        "events.events.k8s.io",
        "jobs.batch",
        "pods",
        "services",
    )
    found = {kind: bed.kubectl("get", kind, "-n", namespace, "-o", "json") for kind in kinds}
    found["the operator's log"] = bed.kubectl("logs", "deployment/spillway", "-n", SYSTEM_NAMESPACE)
    found["the operator's objects"] = bed.kubectl(
        "get", "configmaps,deployments,pods", "-n", SYSTEM_NAMESPACE, "-o", "json"
    )
    for name in ("trains", "fails"):
        selector = ("-l", f"spillway.dev/job={name}", "-n", namespace, "--tail=-1")
        found[f"log of {name}"] = bed.kubectl("logs", *selector)
        found[f"status of {name}"] = said_by("status", name, "-n", namespace, kubeconfig=bed.kubeconfig)
        found[f"status of {name} as JSON"] = said_by(
            "status", name, "-n", namespace, "-o", "json", kubeconfig=bed.kubeconfig
        )
    manifest = folder / "job.json"
    manifest.write_text(json.dumps(without_status(spillway.job(namespace, "trains"))), encoding="utf-8")
    found["doctor"] = said_by("doctor", "-n", namespace, "--job", str(manifest), kubeconfig=bed.kubeconfig)
    found["top"] = said_by("top", "trains", "-n", namespace, "--once", "-o", "json", kubeconfig=bed.kubeconfig)
    return found


def without_status(job: Document) -> Document:
    return {name: part for name, part in job.items() if name != "status"}


def said_by(*arguments: str, kubeconfig: Path) -> str:
    environment = {"KUBECONFIG": str(kubeconfig), "PATH": "/usr/bin:/bin", "HOME": str(kubeconfig.parent)}
    command = [str(REPOSITORY / ".venv" / "bin" / "spillway"), *arguments]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
    return ended.stdout + ended.stderr


def test_no_secret_is_written_anywhere(
    spillway: Installed, planted: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    """0 hits of 20 markers, plain or base64, in what Spillway writes: objects, status, events, logs, command output."""
    namespace, markers = planted
    assert len(markers) == 20
    places = everything_said(spillway, namespace, tmp_path)
    empty = [place for place, text in places.items() if len(text) < 40]
    assert empty == [], "nothing was looked at there"
    assert "fails" in places["status of fails"] and "/nowhere" in places["pods"], "the termination message is there"
    hits = [
        (what, place)
        for what, marker in markers.items()
        for place, text in places.items()
        for shape in (marker, base64.b64encode(marker.encode()).decode().rstrip("="))
        if shape in text
    ]
    assert hits == []
    print(f"\n{len(markers)} secrets looked for in {len(places)} places, {sum(map(len, places.values())):,} characters")


def test_a_value_in_the_spec_is_no_secret(spillway: Installed, namespace: str) -> None:
    """Everyone who may read the job and its ConfigMap sees `env[].value`. This also proves that the search above
    works."""
    marker = f"marker-{secrets.token_hex(12)}"
    plain = [{"name": "PLAIN", "value": marker}]
    job = changed(on_fake_nodes(example("one-pod", namespace)), namespace, pod__env=plain)
    spillway.create(job)
    spillway.until(goes_on, namespace, "one-pod", SECONDS)
    assert marker in spillway.bed.kubectl("get", "configmaps", "-n", namespace, "-o", "json")


# --- people -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def people(spillway: Installed, module_namespace: str) -> str:
    """A namespace in which three users have the cluster's standard roles, and a fourth has none."""
    for user in ("view", "edit", "admin"):
        spillway.bed.kubectl(
            "create", "rolebinding", user, f"--clusterrole={user}", f"--user={user}", "-n", module_namespace
        )
    return module_namespace


def may(bed: Bed, asked: list[tuple[str, str, str]], namespace: str) -> list[bool]:
    """Whether each (user, verb, resource) is allowed in the namespace, in one call of kubectl."""
    reviews = []
    for user, verb, resource in asked:
        plural, _, subresource = resource.partition("/")
        attributes = {"namespace": namespace, "verb": verb, "group": "spillway.dev", "resource": plural}
        spec = {"user": user, "resourceAttributes": attributes | {"subresource": subresource}}
        reviews.append({"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec})
    said = bed.kubectl("create", "-o", "json", "-f", "-", stdin="\n---\n".join(map(json.dumps, reviews)))
    return [review["status"]["allowed"] for review in stored(said)]


RIGHTS = {
    ("get", "trainingjobs"): ("view", "edit", "admin"),
    ("create", "trainingjobs"): ("edit", "admin"),
    ("delete", "trainingjobs"): ("edit", "admin"),
    ("patch", "trainingjobs/status"): (),
    ("get", "memoryprofiles"): ("view", "edit", "admin"),
    ("delete", "memoryprofiles"): ("edit", "admin"),
    ("create", "memoryprofiles"): (),
    ("patch", "memoryprofiles"): (),
    ("patch", "memoryprofiles/status"): (),
    ("create", "nodeprofiles"): (),
    ("patch", "operatorconfigs"): (),
}


def test_users_have_what_their_role_says(spillway: Installed, people: str) -> None:
    asked = [(user, *right) for right in RIGHTS for user in ("view", "edit", "admin", "nobody")]
    answers = dict(zip(asked, may(spillway.bed, asked, people), strict=True))
    found = {
        right: tuple(who for who, *what in asked if tuple(what) == right and answers[who, *right]) for right in RIGHTS
    }
    assert found == RIGHTS


def test_who_may_edit_creates_jobs_and_writes_no_status_and_no_profile(spillway: Installed, people: str) -> None:
    """Makes real requests, and does not only ask whether they would be allowed."""
    bed = spillway.bed
    job = json.dumps(changed(example("one-pod", people), people, suspend=True))
    create = ("create", "-f", "-", "--as")
    with pytest.raises(Failed, match='User "view" cannot create resource "trainingjobs"'):
        bed.kubectl(*create, "view", stdin=job)
    bed.kubectl(*create, "edit", stdin=job)
    bed.kubectl("get", KIND, "one-pod", "-n", people, "--as", "view")
    with pytest.raises(Failed, match='User "nobody" cannot get resource "trainingjobs"'):
        bed.kubectl("get", KIND, "one-pod", "-n", people, "--as", "nobody")
    patch = ("patch", KIND, "one-pod", "-n", people, "--type=merge")
    for user in ("edit", "admin"):
        with pytest.raises(Failed, match=f'User "{user}" cannot (get|patch) resource "trainingjobs/status"'):
            bed.kubectl(*patch, "--subresource=status", "-p", '{"status": {"state": "Complete"}}', "--as", user)
    metadata = {"name": "mine", "namespace": people}
    profile = {"apiVersion": "spillway.dev/v1alpha1", "kind": "MemoryProfile", "metadata": metadata,
               "spec": {"fingerprint": "0" * 16}}  # fmt: skip
    with pytest.raises(Failed, match='User "edit" cannot create resource "memoryprofiles"'):
        bed.kubectl(*create, "edit", stdin=json.dumps(profile))
    # The API server ignores a status that is sent with the spec.
    bed.kubectl(*patch, "-p", '{"status": {"completionTime": "2026-01-01T00:00:00Z"}}', "--as", "edit")
    assert "completionTime" not in spillway.job(people, "one-pod")["status"]
    with pytest.raises(Failed, match='User "view" cannot delete resource "trainingjobs"'):
        bed.kubectl("delete", KIND, "one-pod", "-n", people, "--as", "view")
    bed.kubectl("delete", KIND, "one-pod", "-n", people, "--as", "edit", "--wait=false")
