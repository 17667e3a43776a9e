"""The catalog and the names that resolve into it."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from spillway.errors import UserError
from spillway.hardware import local_node, node_names, resolve_node

ENTRIES = {
    entry.name: tomllib.loads(entry.read_text(encoding="utf-8"))
    for entry in files("spillway").joinpath("catalog").iterdir()
    if entry.name.endswith(".toml")
}


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_every_figure_has_a_source(name: str) -> None:
    figures = [figure for part in ENTRIES[name].values() if isinstance(part, dict) for figure in part.values()]
    assert figures
    assert all(figure["value"] >= 0 and len(figure["source"]) > 10 for figure in figures)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("h100", "8x-h100-80"),
        ("h100-80", "8x-h100-80"),
        ("H100", "8x-h100-80"),
        ("2xh100", "2x-h100-80"),
        ("8xa100-40", "8x-a100-40"),
        ("cpu", "cpu"),
        ("4xcpu", "4x-cpu"),
    ],
)
def test_a_name_resolves(name: str, expected: str) -> None:
    assert resolve_node(name).name == expected


@pytest.mark.parametrize(("name", "words"), [("h10", "did you mean h100"), ("tpu", "Known: "), ("", "empty")])
def test_an_unknown_name_is_answered_with_the_known_ones(name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        resolve_node(name)


def test_a_disk_is_no_node() -> None:
    with pytest.raises(UserError):
        resolve_node("nvme-gen4")
    assert "nvme-gen4" not in node_names()


def test_a_gpu_node_has_less_memory_than_its_cards() -> None:
    assert resolve_node("h100").device_bytes < 80 * 2**30


def test_a_local_node_has_the_given_capacities_and_the_catalogs_rates() -> None:
    node, catalog = local_node(2, 100, 200, 300), resolve_node("cpu")
    assert (node.name, node.device_bytes, node.host_bytes, node.nvme_bytes) == ("local", 100, 200, 300)
    assert node.bfloat16_flops_per_second == catalog.bfloat16_flops_per_second / catalog.num_cores * 2
