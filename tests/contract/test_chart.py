"""The chart: what `helm template` makes of it over a matrix of values, and what its schema rejects."""

from __future__ import annotations

import base64
import json
import os
import re
import ssl
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from harness.rendered_chart import (
    CHART,
    HELMS,
    MATRIX,
    NAMESPACE,
    NO_HELM,
    RELEASE,
    ROOT,
    Object,
    helm,
    of_kind,
    only,
    rendered,
    settings_of,
)
from spillway.units import parse_cores

VALUES = (CHART / "values.yaml").read_text(encoding="utf-8")
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
FULL_NAME = "demo-spillway"
MAX_CONFIG_MAP_BYTES = 2**20

pytestmark = [pytest.mark.ci, pytest.mark.skipif(not HELMS, reason=NO_HELM)]


@pytest.fixture(scope="module", params=sorted(HELMS) or ["none"], ids=lambda major: f"helm{major}")
def major(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def operator_pod(objects: tuple[Object, ...]) -> Object:
    return dict(only(objects, "Deployment")["spec"]["template"]["spec"])


OF_THE_POD = {"metadata.uid": "0a1b-uid", "status.podIP": "10.0.0.7"}


def node_exporter_pod(objects: tuple[Object, ...]) -> Object:
    return dict(only(objects, "DaemonSet")["spec"]["template"]["spec"])


def operator_environment(objects: tuple[Object, ...]) -> dict[str, str]:
    """With what the kubelet would fill in."""
    (container,) = operator_pod(objects)["containers"]
    return {
        entry["name"]: entry["value"] if "value" in entry else OF_THE_POD[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }


# --- what is made -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", MATRIX)
def test_every_cell_of_the_matrix_renders_to_whole_and_distinct_objects(major: str, cell: str) -> None:
    objects = rendered(major, MATRIX[cell])
    names = [(found["kind"], found["metadata"].get("namespace"), found["metadata"]["name"]) for found in objects]
    assert len(set(names)) == len(names)
    for found in objects:
        if found["kind"] != "CustomResourceDefinition":
            assert found["metadata"]["labels"]["app.kubernetes.io/instance"] == RELEASE, found


@pytest.mark.parametrize("cell", MATRIX)
def test_what_has_a_namespace_says_which(major: str, cell: str) -> None:
    for found in rendered(major, MATRIX[cell]):
        cluster_scoped = found["kind"].startswith("Cluster") or found["kind"] == "CustomResourceDefinition"
        assert ("namespace" in found["metadata"]) != cluster_scoped, found["metadata"]


def test_names_of_cluster_scoped_objects_hold_the_releases_namespace(major: str) -> None:
    """Two releases of the same name in two namespaces would share them otherwise."""
    for found in rendered(major):
        if found["kind"].startswith("Cluster"):
            assert found["metadata"]["name"].startswith(f"{NAMESPACE}-{FULL_NAME}-")


@pytest.mark.skipif(len(HELMS) < 2, reason="one major version of Helm is here")
@pytest.mark.parametrize("cell", MATRIX)
def test_every_helm_renders_the_same(cell: str) -> None:
    """But for the certificate, which each makes anew."""
    first, *others = ([o for o in rendered(major, MATRIX[cell]) if o["kind"] != "Secret"] for major in sorted(HELMS))
    assert [sorted(other, key=str) for other in others] == [sorted(first, key=str)] * len(others)


def test_lint_finds_nothing_wrong(major: str) -> None:
    done = helm(major, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


def test_the_notes_name_the_next_command(major: str) -> None:
    if major == "3":
        pytest.skip("Helm 3 renders notes only with a cluster")
    arguments = ["install", RELEASE, str(CHART), "--namespace", NAMESPACE, "--dry-run=client"]
    done = helm(major, *arguments, *settings_of(("watchNamespaces={team-a}",)))
    notes = done.stdout.partition("NOTES:")[2]
    assert f"kubectl --namespace {NAMESPACE} rollout status deployment/{FULL_NAME}" in notes, done.stderr
    (example,) = re.findall(r"kubectl --namespace team-a apply -f (\S+)", notes)
    assert (ROOT / example).is_file()


# --- the operator's pod -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", MATRIX)
@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_the_pods_meet_the_restricted_standard(major: str, cell: str, kind: str) -> None:
    """But for the host's root, where drives of storage classes are named."""
    objects = rendered(major, MATRIX[cell])
    if (kind, cell) == ("DaemonSet", "least"):
        assert not of_kind(objects, kind)
        return
    pod = only(objects, kind)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}
    drives = {"hostPath"} if (kind, cell) == ("DaemonSet", "most") else set()
    for volume in pod["volumes"]:
        assert set(volume) - {"name"} <= {"secret", "emptyDir", "configMap", "projected"} | drives


@pytest.mark.parametrize("kind", ["Deployment", "DaemonSet"])
def test_an_id_that_is_null_is_left_to_the_cluster(major: str, kind: str) -> None:
    """OpenShift's restricted-v2 rejects each id that a pod names itself."""
    ids = ("runAsUser", "runAsGroup", "fsGroup")
    restricted = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}

    def context(*values: str) -> Object:
        return dict(only(rendered(major, values), kind)["spec"]["template"]["spec"]["securityContext"])

    assert context() == restricted | dict.fromkeys(ids, 1000)
    assert context(*(f"podSecurity.{name}=null" for name in ids)) == restricted
    assert context("podSecurity.runAsUser=1000650000")["runAsUser"] == 1000650000


@pytest.mark.parametrize("cell", MATRIX)
def test_every_image_is_named_exactly(major: str, cell: str) -> None:
    objects = rendered(major, MATRIX[cell])
    images = [operator_pod(objects)["containers"][0]["image"], operator_environment(objects)["SPILLWAY_TRAINER_IMAGE"]]
    for image in images:
        assert re.fullmatch(r"[^@:]+(@sha256:[0-9a-f]{64}|:[\w.-]+)", image)
        assert not image.endswith(":latest")
    if cell == "digest":
        assert [image.partition("@")[2][:10] for image in images] == ["sha256:aaa", "sha256:bbb"]


# --- the node exporter's pods ----------------------------------------------------------------------------------------


def test_an_exporter_runs_on_every_node_without_a_token_and_reads_only(major: str) -> None:
    pod = node_exporter_pod(rendered(major))
    assert pod["tolerations"] == [{"operator": "Exists"}]
    assert pod["automountServiceAccountToken"] is False
    (container,) = pod["containers"]
    assert container["image"] == operator_pod(rendered(major))["containers"][0]["image"]
    assert all(mount["readOnly"] for mount in container["volumeMounts"])


@pytest.mark.parametrize("cell", ["defaults", "most"])
def test_its_arguments_are_what_the_program_takes_and_drives_lie_in_what_is_mounted(major: str, cell: str) -> None:
    program = pytest.importorskip("spillway_operator.node_exporter.__main__", reason="needs the extra [operator]")
    (container,) = node_exporter_pod(rendered(major, MATRIX[cell]))["containers"]
    assert container["command"] == ["python", "-m", "spillway_operator.node_exporter"]
    given = program.parsed(container["args"])
    names = {entry["name"]: entry.get("valueFrom", {}).get("fieldRef") for entry in container["env"]}
    assert (given.node, given.address) == ("$(NODE_NAME)", "$(POD_IP)")
    assert names["NODE_NAME"] == {"fieldPath": "spec.nodeName"}
    assert names["POD_IP"] == {"fieldPath": "status.podIP"}
    assert container["ports"] == [{"name": "metrics", "containerPort": given.port}]
    named = [["/mnt/nvme0", "/host/mnt/nvme0", "local-nvme"]] if cell == "most" else []
    assert given.drive == [["/var/lib/kubelet", "/spill", ""], *named]
    mounts = {mount["mountPath"]: mount.get("mountPropagation") for mount in container["volumeMounts"]}
    assert mounts == {"/spill": None, **({"/host": "HostToContainer"} if named else {})}


def test_the_operator_finds_exporters_by_the_labels_that_they_have_and_no_operator(major: str) -> None:
    objects = rendered(major)
    selector = dict(term.split("=") for term in operator_environment(objects)["SPILLWAY_NODE_EXPORTERS"].split(","))
    labels = only(objects, "DaemonSet")["spec"]["template"]["metadata"]["labels"]
    assert selector == labels == only(objects, "DaemonSet")["spec"]["selector"]["matchLabels"]
    assert not only(objects, "Deployment")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert "SPILLWAY_NODE_EXPORTERS" not in operator_environment(rendered(major, MATRIX["least"]))


def test_token_and_authorities_of_prometheus_are_files_of_a_mounted_secret(major: str) -> None:
    folder = "/etc/spillway/prometheus"
    values = ("prometheus.secretName=access", f"prometheus.tokenFile={folder}/token", f"prometheus.caFile={folder}/ca")
    objects = rendered(major, (*values, 'prometheus.matchers={cluster="a"}'))
    environment, pod = operator_environment(objects), operator_pod(objects)
    assert environment["SPILLWAY_PROMETHEUS_TOKEN_FILE"] == f"{folder}/token"
    assert environment["SPILLWAY_PROMETHEUS_CA_FILE"] == f"{folder}/ca"
    assert environment["SPILLWAY_PROMETHEUS_MATCHERS"] == 'cluster="a"'
    assert {"name": "prometheus", "mountPath": folder, "readOnly": True} in pod["containers"][0]["volumeMounts"]
    assert "access" in {volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}


# --- more of the operator's pod ---------------------------------------------------------------------------------------


def test_two_operators_run_and_a_new_one_is_ready_before_an_old_one_goes(major: str) -> None:
    spec = only(rendered(major), "Deployment")["spec"]
    rolling = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert (spec["replicas"], spec["strategy"]) == (2, rolling)
    assert operator_environment(rendered(major))["SPILLWAY_LEASE_NAME"] == FULL_NAME


def test_disruption_budget_allows_one_eviction_and_is_absent_for_one_pod(major: str) -> None:
    budget = only(rendered(major), "PodDisruptionBudget")["spec"]
    assert budget["maxUnavailable"] == 1
    assert budget["selector"] == only(rendered(major), "Deployment")["spec"]["selector"]
    assert not of_kind(rendered(major, ("replicas=1",)), "PodDisruptionBudget")


def test_operators_prefer_different_nodes_unless_the_user_says_where(major: str) -> None:
    assert list(operator_pod(rendered(major))["affinity"]) == ["podAntiAffinity"]
    own = rendered(major, ("affinity.nodeAffinity.x=y",))
    assert operator_pod(own)["affinity"] == {"nodeAffinity": {"x": "y"}}


def test_the_pod_has_requests_limits_and_probes(major: str) -> None:
    (container,) = operator_pod(rendered(major))["containers"]
    assert {"requests", "limits"} == set(container["resources"])
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "metrics"}
    for probe in ("readinessProbe", "startupProbe"):
        assert container[probe]["httpGet"] == {"path": "/readyz", "port": "metrics"}


def test_the_example_of_a_script_fits_beside_the_operators_on_a_node_of_two_cores() -> None:
    values = yaml.safe_load(VALUES)
    script = yaml.safe_load((ROOT / "examples" / "script.yaml").read_text(encoding="utf-8"))
    pods = [values] * values["replicas"] + [values["nodeExporter"]]
    requests = [pod["resources"]["requests"] for pod in pods] + [script["spec"]["pod"]["resources"]]
    cores = [parse_cores(str(each["cpu"])) for each in requests]
    assert sum(cores) < 2.0, cores


@pytest.mark.parametrize("cell", MATRIX)
def test_the_environment_is_what_the_operators_settings_read(
    major: str, cell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = pytest.importorskip("spillway_operator.settings", reason="needs the extra [operator]")
    environment = operator_environment(rendered(major, MATRIX[cell]))
    assert set(environment) <= {settings.variable(field) for field in settings.Settings.model_fields}
    for name in [name for name in os.environ if name.startswith(settings.PREFIX)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if "SPILLWAY_TLS_DIRECTORY" in environment:
        for name in (settings.CERTIFICATE, settings.PRIVATE_KEY, settings.AUTHORITY):
            (tmp_path / name).touch()
        monkeypatch.setenv("SPILLWAY_TLS_DIRECTORY", str(tmp_path))
    read = settings.load_settings({})
    assert read.node_reader is (cell != "least")
    assert read.namespaces == {"two namespaces": ("team-a", "team-b"), "least": ("team-a",)}.get(cell, ())
    assert bool(read.progress_url) is (cell != "least")


def test_what_the_operator_serves_is_reached_through_the_service(major: str) -> None:
    objects = rendered(major)
    ports = {port["name"]: port["containerPort"] for port in operator_pod(objects)["containers"][0]["ports"]}
    environment = operator_environment(objects)
    assert ports == {
        "progress": int(environment["SPILLWAY_PROGRESS_PORT"]),
        "metrics": int(environment["SPILLWAY_HEALTH_PORT"]),
    }
    progress, metrics = of_kind(objects, "Service")
    selected = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert metrics["spec"]["selector"].items() <= selected.items()
    assert [(port["targetPort"], port["port"]) for port in metrics["spec"]["ports"]] == [("metrics", ports["metrics"])]
    host = f"{progress['metadata']['name']}.{NAMESPACE}.svc"
    assert environment["SPILLWAY_PROGRESS_URL"] == f"https://{host}:{ports['progress']}/progress"
    assert progress["spec"]["ports"] == [
        {"name": "progress", "port": ports["progress"], "targetPort": ports["progress"]}
    ]


def test_progress_reaches_no_pod_but_the_one_that_the_leader_names(major: str) -> None:
    objects = rendered(major)
    service = of_kind(objects, "Service")[0]
    labels = only(objects, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert not service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["selector"], "without one, slices of an earlier release would stay"
    assert operator_environment(objects)["SPILLWAY_PROGRESS_SERVICE"] == service["metadata"]["name"]


# --- the certificate --------------------------------------------------------------------------------------------------


def test_the_certificate_is_for_the_name_that_trainers_call(major: str, tmp_path: Path) -> None:
    secret = only(rendered(major), "Secret")
    for name, text in secret["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(text))
    assert handshake(tmp_path, f"{FULL_NAME}.{NAMESPACE}.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(tmp_path, "someone-else.svc")


@pytest.mark.parametrize(
    ("values", "kept"),
    [((), True), (("crds.enabled=false",), True), (("crds.enabled=false", "crds.keep=false"), True),
     (("crds.keep=false",), False)],
)  # fmt: skip
def test_the_certificate_outlives_the_release_where_jobs_do(major: str, values: tuple[str, ...], kept: bool) -> None:
    """Trainers that run trust its authority; the next installation looks it up."""
    annotations = only(rendered(major, values), "Secret")["metadata"].get("annotations")
    assert annotations == ({"helm.sh/resource-policy": "keep"} if kept else None)


def handshake(folder: Path, host: str) -> bool:
    """A TLS connection in memory between a server with the Secret's pair and a client with its authority."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    client_context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(to_client, to_server, server_hostname=host)
    server = server_context.wrap_bio(to_server, to_client, server_side=True)
    done = {client: False, server: False}
    for _ in range(8):
        for side in (client, server):
            if not done[side]:
                try:
                    side.do_handshake()
                    done[side] = True
                except ssl.SSLWantReadError:
                    continue
    return all(done.values())


def test_a_secret_of_the_users_is_mounted_and_none_is_made(major: str) -> None:
    objects = rendered(major, MATRIX["most"])
    assert not of_kind(objects, "Secret")
    (tls,) = [volume for volume in operator_pod(objects)["volumes"] if volume["name"] == "tls"]
    assert tls["secret"]["secretName"] == "own-certificate"


def test_disabling_progress_removes_certificate_port_and_token_reviews(major: str) -> None:
    objects = rendered(major, ("progress.enabled=false",))
    assert not of_kind(objects, "Secret")
    assert [port["name"] for port in only(objects, "Service")["spec"]["ports"]] == ["metrics"]
    assert "tokenreviews" not in str(of_kind(objects, "ClusterRole"))


# --- rights -----------------------------------------------------------------------------------------------------------

IN_NAMESPACES = {
    ("spillway.dev", "trainingjobs"): "get list watch delete",
    ("spillway.dev", "trainingjobs/status"): "patch",
    ("spillway.dev", "memoryprofiles"): "get list create patch delete",
    ("spillway.dev", "memoryprofiles/status"): "patch",
    ("batch", "jobs"): "get list watch create delete",
    ("", "configmaps"): "get list create delete",
    ("", "services"): "get create delete",
    ("", "pods"): "get list",
    ("", "persistentvolumeclaims"): "get",
    ("kueue.x-k8s.io", "workloads"): "list",
    ("events.k8s.io", "events"): "list create",
}
OF_THE_LEADER = {
    ("coordination.k8s.io", "leases", FULL_NAME): "get update",
    ("coordination.k8s.io", "leases", ""): "create",
    ("discovery.k8s.io", "endpointslices", f"{FULL_NAME}-leader-ipv4 {FULL_NAME}-leader-ipv6"): "get patch",
    ("discovery.k8s.io", "endpointslices", ""): "create",
    ("", "services", FULL_NAME): "get",
}
IN_THE_CLUSTER = {
    "node-reader": {
        ("", "nodes"): "list",
        ("", "pods"): "list",
        ("storage.k8s.io", "csistoragecapacities"): "list",
        ("spillway.dev", "nodeprofiles"): "list",
        ("spillway.dev", "operatorconfigs"): "get",
    },
    "token-review": {("authentication.k8s.io", "tokenreviews"): "create"},
}


def rules_of(role: Object) -> dict[tuple[str, ...], str]:
    """(API group, resource, and the names of a rule that holds for those only) -> verbs. In a role where any rule has
    names, the others have ""."""
    assert all(set(rule) - {"resourceNames"} == {"apiGroups", "resources", "verbs"} for rule in role["rules"])
    named = any("resourceNames" in rule for rule in role["rules"])
    return {
        (group, resource, *([" ".join(rule.get("resourceNames", ()))] if named else [])): " ".join(rule["verbs"])
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }


def operator_roles(objects: tuple[Object, ...]) -> Iterator[tuple[str, str, Object]]:
    """(namespace or "", name without the release's part, role) of each role that is bound to the operator."""
    account = operator_pod(objects)["serviceAccountName"]
    roles = {(role["kind"], role["metadata"].get("namespace", ""), role["metadata"]["name"]): role for role in objects}
    for binding in [*of_kind(objects, "RoleBinding"), *of_kind(objects, "ClusterRoleBinding")]:
        (subject,) = binding["subjects"]
        assert subject == {"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}
        namespace, reference = binding["metadata"].get("namespace", ""), binding["roleRef"]
        role = roles[reference["kind"], namespace, reference["name"]]
        yield namespace, reference["name"].removeprefix(f"{NAMESPACE}-{FULL_NAME}").lstrip("-"), role


def test_the_operator_has_these_rights_and_no_others(major: str) -> None:
    found = {(namespace, part): rules_of(role) for namespace, part, role in operator_roles(rendered(major))}
    assert found == {
        ("", "all-namespaces"): IN_NAMESPACES,
        (NAMESPACE, "leader"): OF_THE_LEADER,
        **{("", part): IN_THE_CLUSTER[part] for part in IN_THE_CLUSTER},
    }


def test_with_watched_namespaces_the_same_rights_end_at_their_borders(major: str) -> None:
    objects = rendered(major, MATRIX["two namespaces"])
    found = {(namespace, part): rules_of(role) for namespace, part, role in operator_roles(objects)}
    assert found == {
        ("team-a", ""): IN_NAMESPACES,
        ("team-b", ""): IN_NAMESPACES,
        (NAMESPACE, "leader"): OF_THE_LEADER,
        **{("", part): IN_THE_CLUSTER[part] for part in IN_THE_CLUSTER},
    }


def test_minimal_operator_has_one_namespaced_role_and_one_for_its_lease(major: str) -> None:
    found = {
        (namespace, part): rules_of(role) for namespace, part, role in operator_roles(rendered(major, MATRIX["least"]))
    }
    leases = {right: verbs for right, verbs in OF_THE_LEADER.items() if right[1] == "leases"}
    assert found == {("team-a", ""): IN_NAMESPACES, (NAMESPACE, "leader"): leases}


@pytest.mark.parametrize("cell", MATRIX)
def test_no_role_has_a_wildcard_or_touches_secrets(major: str, cell: str) -> None:
    objects = rendered(major, MATRIX[cell])
    for role in [*of_kind(objects, "Role"), *of_kind(objects, "ClusterRole")]:
        for (group, resource, *_), verbs in rules_of(role).items():
            assert "*" not in group + resource + verbs
            assert resource not in ("secrets", "pods/exec", "serviceaccounts/token")


def test_people_get_their_rights_through_the_clusters_own_roles(major: str) -> None:
    roles = {role["metadata"]["name"].rpartition("-")[2]: role for role in of_kind(rendered(major), "ClusterRole")}
    joined = {
        name: sorted(
            label.removeprefix("rbac.authorization.k8s.io/aggregate-to-")
            for label in roles[name]["metadata"]["labels"]
            if label.startswith("rbac.authorization.k8s.io/")
        )
        for name in ("view", "edit")
    }
    assert joined == {"view": ["admin", "edit", "view"], "edit": ["admin", "edit"]}
    assert set(rules_of(roles["view"]).values()) == {"get list watch"}
    assert "status" not in str(rules_of(roles["edit"])), "people never write a status"


# --- CRDs, monitors, dashboards ---------------------------------------------------------------------------------------


def test_the_charts_copy_of_the_crds_is_in_step() -> None:
    ours = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "crds").glob("*.yaml")}
    copies = {path.name: path.read_text(encoding="utf-8") for path in (CHART / "files" / "crds").glob("*.yaml")}
    assert copies == ours, "run `python charts/chart_files.py`"


@pytest.mark.parametrize("keep", [True, False])
def test_crds_are_rendered_as_they_are_but_for_their_metadata(major: str, keep: bool) -> None:
    objects = rendered(major, () if keep else ("crds.keep=false",))
    found = {crd["metadata"]["name"]: crd for crd in of_kind(objects, "CustomResourceDefinition")}
    wanted = [yaml.safe_load(path.read_text(encoding="utf-8")) for path in (CHART / "files" / "crds").glob("*.yaml")]
    assert set(found) == {crd["metadata"]["name"] for crd in wanted}
    for crd in wanted:
        made = found[crd["metadata"]["name"]]
        assert made["spec"] == crd["spec"]
        assert made["metadata"].get("annotations") == ({"helm.sh/resource-policy": "keep"} if keep else None)


def test_crds_can_be_left_to_somebody_else(major: str) -> None:
    assert not of_kind(rendered(major, ("crds.enabled=false",)), "CustomResourceDefinition")


def test_monitors_are_made_on_request_with_the_labels_that_select_them(major: str) -> None:
    assert not of_kind(rendered(major), "PodMonitor")
    objects = rendered(major, MATRIX["most"])
    for monitor in (*of_kind(objects, "PodMonitor"), only(objects, "ServiceMonitor")):
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


def rules_by_part(major: str, *values: str) -> dict[str, Object]:
    """The rules of the chart, by the end of their objects' names."""
    made = of_kind(rendered(major, ("monitoring.enabled=true", *values)), "PrometheusRule")
    return {one["metadata"]["name"].rpartition("-")[2]: one for one in made}


def test_rules_and_alerts_come_with_the_monitors_and_equal_the_files(major: str) -> None:
    made = rules_by_part(major, "monitoring.labels.release=prometheus")
    assert made.keys() == {"nodes", "alerts"}
    for part, one in made.items():
        assert one["metadata"]["labels"]["release"] == "prometheus"
        assert one["spec"] == yaml.safe_load((CHART / "files" / "rules" / f"{part}.yaml").read_text(encoding="utf-8"))
    assert not of_kind(rendered(major), "PrometheusRule")
    assert not rules_by_part(major, "monitoring.rules=false")
    assert rules_by_part(major, "monitoring.alerts.enabled=false").keys() == {"nodes"}


def test_alerts_are_left_out_relabelled_and_linked_as_the_values_say(major: str) -> None:
    made = rules_by_part(
        major,
        "monitoring.alerts.disabled={SpillwayGoodputLow}",
        "monitoring.alerts.severities.critical=page",
        "monitoring.alerts.severities.SpillwayJobFailed=info",
        "monitoring.alerts.labels.team=ml",
        "monitoring.alerts.runbookUrl=https://wiki.example.com/runs",
    )
    as_written = yaml.safe_load((CHART / "files" / "rules" / "alerts.yaml").read_text(encoding="utf-8"))
    (before,), (group,) = as_written["groups"], made["alerts"]["spec"]["groups"]
    assert made["nodes"]["spec"] == rules_by_part(major)["nodes"]["spec"]
    after = {rule["alert"]: rule for rule in group["rules"]}
    assert [rule["alert"] for rule in before["rules"] if rule["alert"] != "SpillwayGoodputLow"] == list(after)
    for rule in before["rules"]:
        if (now := after.get(rule["alert"])) is not None:
            severity = {"critical": "page"}.get(rule["labels"]["severity"], rule["labels"]["severity"])
            severity = "info" if rule["alert"] == "SpillwayJobFailed" else severity
            assert now["labels"] == {"severity": severity, "team": "ml"}
            url = f"https://wiki.example.com/runs#{rule['alert'].lower()}"
            assert now["annotations"] == rule["annotations"] | {"runbook_url": url}
            assert (now["expr"], now["for"]) == (rule["expr"], rule["for"])


@pytest.mark.parametrize("value", ["disabled={SpillwayGoodputLo}", "severities.SpillwayGoodputLo=info"])
def test_an_alert_that_does_not_exist_cannot_be_meant(major: str, value: str) -> None:
    values = ("monitoring.enabled=true", f"monitoring.alerts.{value}")
    done = helm(major, "template", RELEASE, str(CHART), *settings_of(values))
    assert f"monitoring.alerts.{value[:8]}" in done.stderr
    assert "SpillwayGoodputLo: n" in done.stderr
    assert done.returncode


def test_whose_series_they_are_is_known_from_the_pod_alone(major: str) -> None:
    trainers, node_exporters = of_kind(rendered(major, MATRIX["most"]), "PodMonitor")
    (of_nodes,), (endpoint,) = (one["spec"]["podMetricsEndpoints"] for one in (node_exporters, trainers))
    assert of_nodes["honorLabels"] is endpoint["honorLabels"] is False
    assert of_nodes["relabelings"] == [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}]
    exporter = only(rendered(major, MATRIX["most"]), "DaemonSet")
    assert node_exporters["spec"]["selector"] == exporter["spec"]["selector"]
    assert {relabelling["targetLabel"] for relabelling in endpoint["relabelings"]} == {
        "node",
        "namespace",
        "pod",
        "training_job",
    }


def test_monitors_look_where_the_operator_works(major: str) -> None:
    everywhere = rendered(major, ("monitoring.enabled=true",))
    assert of_kind(everywhere, "PodMonitor")[0]["spec"]["namespaceSelector"] == {"any": True}
    two = rendered(major, ("monitoring.enabled=true", *MATRIX["two namespaces"]))
    assert of_kind(two, "PodMonitor")[0]["spec"]["namespaceSelector"] == {"matchNames": ["team-a", "team-b"]}


def test_each_dashboard_is_a_config_map_that_grafanas_sidecar_finds(major: str) -> None:
    files = {path.name: path.read_text(encoding="utf-8") for path in (CHART / "files" / "dashboards").glob("*.json")}
    maps = of_kind(rendered(major), "ConfigMap")
    assert {name: json.loads(text) for found in maps for name, text in found["data"].items()} == {
        name: json.loads(text) for name, text in files.items()
    }
    for found in maps:
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert len(json.dumps(found)) < MAX_CONFIG_MAP_BYTES


# --- values -----------------------------------------------------------------------------------------------------------

REJECTED = {
    "a name that is not a value": ("imagee.tag=1", "imagee"),
    "a name inside a value": ("image.tags=1", "tags"),
    "latest": ("image.tag=latest", "image.tag"),
    "latest of the trainer": ("trainer.image.tag=latest", "trainer.image.tag"),
    "a tag in the repository's digest": ("image.repository=a@sha256:b", "image.repository"),
    "half a digest": ("image.digest=sha256:abc", "image.digest"),
    "a pull policy that is none": ("image.pullPolicy=Sometimes", "image.pullPolicy"),
    "a namespace instead of a list": ("watchNamespaces=team-a", "watchNamespaces"),
    "a namespace that cannot be": ("watchNamespaces={Team_A}", "watchNamespaces"),
    "the same namespace twice": ("watchNamespaces={team-a,team-a}", "watchNamespaces"),
    "half an operator": ("replicas=1.5", "replicas"),
    "a word for a switch": ("crds.enabled=maybe", "crds.enabled"),
    "an address without its scheme": ("prometheus.url=prometheus:9090", "prometheus.url"),
    "a port that is none": ("prometheus.url=http://prometheus:70000", "prometheus.url"),
    "a port in words": ("prometheus.url=http://prometheus:web", "prometheus.url"),
    "a matcher that is none": ("prometheus.matchers={cluster}", "prometheus.matchers"),
    "a token's file that is no path": ("prometheus.tokenFile=token", "prometheus.tokenFile"),
    "a drive that is no path": (
        "nodeExporter.drives[0].mountPoint=mnt,nodeExporter.drives[0].storageClassName=a",
        "nodeExporter.drives",
    ),
    "a drive without its class": ("nodeExporter.drives[0].mountPoint=/mnt", "nodeExporter.drives"),
    "no time between readings": ("prometheus.intervalSeconds=0", "prometheus.intervalSeconds"),
    "a name too long": (f"fullnameOverride={'a' * 53}", "fullnameOverride"),
    "a log level that is none": ("operator.logLevel=LOUD", "operator.logLevel"),
    "no workers": ("operator.workers=0", "operator.workers"),
    "an interval without a unit": ("monitoring.interval=15", "monitoring.interval"),
    "an entry without its name": ("imagePullSecrets[0].nam=x", "imagePullSecrets"),
    "a request of what is none": ("resources.request.cpu=1", "resources"),
    "a Secret that cannot be": ("progress.tls.secretName=My_Secret", "progress.tls.secretName"),
    "the user root": ("podSecurity.runAsUser=0", "podSecurity.runAsUser"),
    "no group of values": ("progress=null", "progress"),
    "NetworkPolicies that would be left out in silence": ("networkPolicies=null", "networkPolicies"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_the_schema_rejects(major: str, case: str) -> None:
    value, path = REJECTED[case]
    done = helm(major, "template", RELEASE, str(CHART), "--set", value)
    assert done.returncode != 0
    assert path in done.stderr.replace("/", "."), done.stderr
    assert "values don't meet the specifications" in done.stderr, "said by the schema, not by a template that breaks"


def test_names_of_what_others_made_are_those_that_the_cluster_allows(major: str) -> None:
    """A Secret's name may have dots and begin with a digit, and be longer than the objects of the release."""
    name = "1st.spillway-operator.progress.tls.certificate.of-the-whole-training-system"
    objects = rendered(major, (f"progress.tls.secretName={name}", f"serviceAccount.name={name}"))
    pod = only(objects, "Deployment")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == name
    assert name in {volume.get("secret", {}).get("secretName") for volume in pod["volumes"]}


def test_the_schema_is_closed_and_describes_every_value() -> None:
    open_on_purpose = ("global", "affinity")
    for path, node in schema_nodes(SCHEMA):
        if "properties" in node:
            assert node.get("additionalProperties") is False, path
        elif node.get("type") == "object" and path not in open_on_purpose and not path.endswith("[]"):
            assert isinstance(node.get("additionalProperties"), dict), path
        assert not path or path.endswith("[]") or len(node.get("description", "")) > 10, path


def test_values_and_schema_name_the_same_things() -> None:
    """Maps that users fill are empty in values.yaml; their keys are no names of ours."""
    filled = re.compile(r"(dashboards\.labels|(nodeExporter\.)?resources\.(requests|limits))\.")
    values = {path for path in value_paths(yaml.safe_load(VALUES)) if not filled.match(path)}
    schema = {path for path, _ in schema_nodes(SCHEMA) if path and "[]" not in path and path != "global"}
    assert values == schema


def test_every_value_is_explained_above_it() -> None:
    """By a comment right above, or above the group of lines that it stands in."""
    lines = VALUES.splitlines()
    keys = [number for number, line in enumerate(lines) if re.match(r" *\w+:", line)]
    assert [lines[number] for number in keys if not explained(lines[:number])] == []


def explained(lines_above: list[str]) -> bool:
    for line in map(str.strip, reversed(lines_above)):
        if not line or line.startswith("#"):
            return bool(line)
    return False


def schema_nodes(node: Object, path: str = "") -> Iterator[tuple[str, Object]]:
    reference = node.get("$ref", "").rpartition("/")[2]
    resolved = {**SCHEMA["definitions"][reference], **node} if reference else node
    yield path, resolved
    for name, inner in resolved.get("properties", {}).items():
        yield from schema_nodes(inner, f"{path}.{name}" if path else name)
    if "items" in resolved:
        yield from schema_nodes(resolved["items"], f"{path}[]")


def value_paths(values: Object, prefix: str = "") -> Iterator[str]:
    for name, value in values.items():
        yield prefix + name
        if isinstance(value, dict):
            yield from value_paths(value, f"{prefix}{name}.")


def test_chart_and_distribution_have_the_same_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (project["version"], project["version"])
