"""crds/ is in step with api.py, and is what an API server accepts: structural, bounded, documented."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from cases.crd_cases import cases, constraints, fields, schema_of
from harness.places import ROOT
from spillway.api import crd
from spillway.api.crd import KINDS, MEMORY_PROFILE, NODE_PROFILE, TRAINING_JOB, Kind
from spillway.api.earlier import MOVED
from spillway.api.profiles import MemoryProfileSpec, NodeProfileSpec
from spillway.api.training_job import TrainingJobSpec
from spillway_operator.decide.acceptance import UNLESS_SUSPENDED

MAX_ANNOTATION_BYTES = 256 * 1024
KIND_NODES: dict[str, dict[str, dict[str, Any]]] = {kind.kind: dict(fields(schema_of(kind))) for kind in KINDS}
NODES = {f"{kind}:{path}": node for kind, nodes in KIND_NODES.items() for path, node in nodes.items()}
"""every schema node of the four kinds"""
JOB_NODES = KIND_NODES[TRAINING_JOB.kind]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)


@each_kind
def test_the_file_is_in_step_with_the_models(kind: Kind) -> None:
    assert (ROOT / kind.path).read_text(encoding="utf-8") == crd.text(kind), "run `make crds`"


def test_check_fails_when_the_file_is_out_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert crd.main(["--check"]) == 1
    assert crd.main([]) == 0
    assert crd.main(["--check"]) == 0
    capsys.readouterr()
    for kind in KINDS:
        (tmp_path / kind.path).write_text("old", encoding="utf-8")
        assert crd.main(["--check"]) == 1
        assert capsys.readouterr().err.startswith(f"{kind.path} is out of step")
        assert crd.main([]) == 0


@each_kind
def test_the_file_is_small(kind: Kind) -> None:
    """kubectl apply keeps it in an annotation, as JSON without spaces."""
    content = yaml.safe_load((ROOT / kind.path).read_text(encoding="utf-8"))
    assert len(json.dumps(content, separators=(",", ":"))) < MAX_ANNOTATION_BYTES


def test_crds_holds_no_other_file() -> None:
    assert sorted((ROOT / crd.DIRECTORY).iterdir()) == sorted(ROOT / kind.path for kind in KINDS)


@each_kind
def test_every_constraint_has_an_accepted_and_a_rejected_manifest(kind: Kind) -> None:
    """The manifests meet a real API server in tests/cluster/test_crds_on_the_server.py."""
    tried = cases(kind)
    assert {case.constraint for case in tried if case.accepted} == set(constraints(kind))
    assert {case.constraint for case in tried if not case.accepted} == set(constraints(kind))


@each_kind
def test_every_rejection_is_expected_to_name_the_field_and_what_is_wrong(kind: Kind) -> None:
    assert [str(case) for case in cases(kind) if not case.accepted and len(case.words) < 2] == []


def test_every_field_is_described() -> None:
    inner = ("[]", ".*", ":")
    assert [path for path, node in NODES.items() if not path.endswith(inner) and not node.get("description")] == []


def test_every_string_is_bounded() -> None:
    free = (":apiVersion", ":kind")
    strings = {path: node for path, node in NODES.items() if node.get("type") == "string" and not path.endswith(free)}
    assert [path for path, node in strings.items() if "maxLength" not in node and "enum" not in node] == []


def test_every_integer_is_bounded() -> None:
    integers = {path: node for path, node in NODES.items() if node.get("type") == "integer"}
    assert [path for path, node in integers.items() if not {"minimum", "maximum"} <= set(node)] == []


def test_every_list_is_bounded_and_says_how_it_merges() -> None:
    lists = {path: node for path, node in NODES.items() if node.get("type") == "array"}
    assert [path for path, node in lists.items() if not {"maxItems", "x-kubernetes-list-type"} <= set(node)] == []


def test_keys_of_list_maps_are_required() -> None:
    for path, node in NODES.items():
        for key in node.get("x-kubernetes-list-map-keys", []):
            assert key in node["items"]["required"], path


def test_every_map_is_bounded() -> None:
    maps = {path: node for path, node in NODES.items() if "additionalProperties" in node}
    assert [path for path, node in maps.items() if "maxProperties" not in node] == []


def test_the_schema_is_structural() -> None:
    """No references, no unions of types, no closed objects: what a CRD cannot hold."""
    for path, node in NODES.items():
        assert not {"$ref", "$defs", "allOf", "oneOf", "const", "prefixItems", "exclusiveMinimum", "title"} & set(node)
        assert "anyOf" not in node or node.get("x-kubernetes-int-or-string"), path
        assert node.get("additionalProperties") is not False, path
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path


def test_floats_are_strings_and_so_are_their_defaults() -> None:
    text = (ROOT / TRAINING_JOB.path).read_text(encoding="utf-8")
    found = dict(fields(yaml.safe_load(text)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    assert "number" not in {node.get("type") for node in NODES.values()}
    assert found["spec.model.config.normEps"]["default"] == "1e-05"
    assert "default: 1e" not in text, "other parsers read a bare 1e-08 as a number"


def test_a_default_has_the_type_of_its_field() -> None:
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}
    for path, node in NODES.items():
        if "default" in node:
            assert isinstance(node["default"], kinds[node["type"]]), path


def test_an_object_with_a_default_requires_nothing() -> None:
    assert [path for path, node in NODES.items() if node.get("default") == {} and node.get("required")] == []


@each_kind
def test_every_rule_is_used(kind: Kind) -> None:
    assert set(kind.rules) - set(KIND_NODES[kind.kind]) == set()


@pytest.mark.parametrize("field", ["model", "data", "training", "parallelism"])
def test_what_decides_the_result_never_changes(field: str) -> None:
    rules = [rule["rule"] for rule in JOB_NODES[f"spec.{field}"]["x-kubernetes-validations"]]
    assert "self == oldSelf" in rules


LOCKED = ("memory", "scheduling", "spill", "checkpoint", "search", "members", "objective")


@pytest.mark.parametrize("field", LOCKED)
def test_what_the_next_attempt_needs_changes_only_while_suspended(field: str) -> None:
    """The operator itself checks those that it cannot do without (acceptance.UNLESS_SUSPENDED)."""
    (lock,) = (rule for rule in JOB_NODES["spec"]["x-kubernetes-validations"] if "oldSelf.suspend ||" in rule["rule"])
    assert f"self.{field} != oldSelf.{field}" in lock["rule"] and field in lock["message"]
    assert set(UNLESS_SUSPENDED) < set(LOCKED)


@each_kind
def test_columns_and_selectable_fields_point_at_fields_of_the_schema(kind: Kind) -> None:
    paths = [column[1] for column in kind.columns] + list(kind.selectable)
    assert [path for path in paths if not path.startswith(".metadata.") and path[1:] not in KIND_NODES[kind.kind]] == []


@pytest.mark.parametrize(
    ("kind", "spec"),
    [(TRAINING_JOB, TrainingJobSpec), (MEMORY_PROFILE, MemoryProfileSpec), (NODE_PROFILE, NodeProfileSpec)],
)
def test_the_schema_has_every_field_of_the_spec(kind: Kind, spec: Any) -> None:
    aliases = {field.alias or name for name, field in spec.model_fields.items()}
    assert (
        set(KIND_NODES[kind.kind]["spec"]["properties"])
        - {path for path in (*MOVED, "command") if kind is TRAINING_JOB}
        == aliases
    )


def test_nodes_have_profiles_cluster_wide_and_models_in_their_namespace() -> None:
    scopes = {kind.kind: (kind.scope, kind.short_name, kind.plural) for kind in KINDS}
    assert scopes == {
        "TrainingJob": ("Namespaced", "tjob", "trainingjobs"),
        "MemoryProfile": ("Namespaced", "mprof", "memoryprofiles"),
        "NodeProfile": ("Cluster", "nprof", "nodeprofiles"),
        "OperatorConfig": ("Cluster", "opconf", "operatorconfigs"),
    }


def test_jobs_and_memory_profiles_have_a_status_of_their_own() -> None:
    assert ["status" in nodes for nodes in KIND_NODES.values()] == [True, True, False, False]
