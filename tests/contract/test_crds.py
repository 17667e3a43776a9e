"""crds/ is in step with api.py, and is what an API server accepts: structural, bounded, documented."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spillway import crd
from spillway.api import TrainingJobSpec

FILE = Path(__file__).resolve().parents[2] / crd.PATH
SCHEMA: dict[str, Any] = crd.definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
MAX_FILE_BYTES = 200 * 1024


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema node with its path, but metadata, which is the API server's own."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        if (path, name) != ("", "metadata"):
            yield from nodes(inner, f"{path}.{name}" if path else name)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], path + mark)


NODES = dict(nodes(SCHEMA))


def test_the_file_is_in_step_with_the_models() -> None:
    assert FILE.read_text(encoding="utf-8") == crd.text(), "run `make crds`"


def test_check_fails_when_the_file_is_out_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert crd.main(["--check"]) == 1
    assert crd.main([]) == 0
    assert crd.main(["--check"]) == 0
    (tmp_path / crd.PATH).write_text("old", encoding="utf-8")
    assert crd.main(["--check"]) == 1
    assert "make crds" in capsys.readouterr().err


def test_the_file_is_small() -> None:
    assert FILE.stat().st_size < MAX_FILE_BYTES


def test_every_field_is_described() -> None:
    assert [path for path, node in NODES.items() if path and "[]" not in path[-2:] and ".*" not in path[-2:]
            and not node.get("description")] == []  # fmt: skip


def test_every_string_is_bounded() -> None:
    free = ("apiVersion", "kind")
    strings = {path: node for path, node in NODES.items() if node.get("type") == "string" and path not in free}
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
    document = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    found = dict(nodes(document["spec"]["versions"][0]["schema"]["openAPIV3Schema"]))
    assert "number" not in {node.get("type") for node in found.values()}
    assert found["spec.training.optimizer.eps"]["default"] == "1e-08"
    assert "default: 1e" not in FILE.read_text(encoding="utf-8"), "other parsers read a bare 1e-08 as a number"


def test_a_default_has_the_type_of_its_field() -> None:
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}
    for path, node in NODES.items():
        if "default" in node:
            assert isinstance(node["default"], kinds[node["type"]]), path


def test_an_object_with_a_default_requires_nothing() -> None:
    assert [path for path, node in NODES.items() if node.get("default") == {} and node.get("required")] == []


def test_every_rule_is_used() -> None:
    assert set(crd.RULES) - set(NODES) == set()


@pytest.mark.parametrize("field", ["model", "data", "training", "parallelism"])
def test_what_decides_the_result_never_changes(field: str) -> None:
    rules = [rule["rule"] for rule in NODES[f"spec.{field}"]["x-kubernetes-validations"]]
    assert "self == oldSelf" in rules


def test_columns_point_at_fields_of_the_schema() -> None:
    for _, path, *_ in crd.COLUMNS:
        assert path.startswith(".metadata.") or path.removeprefix(".") in NODES


def test_the_schema_has_every_field_of_the_spec() -> None:
    aliases = {field.alias or name for name, field in TrainingJobSpec.model_fields.items()}
    assert set(NODES["spec"]["properties"]) == aliases
