"""The catalog and the names that resolve into it."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from spillway.errors import UserError
from spillway.planning.hardware import gpu_node, local_node, node_names, resolve_node

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
        ("cpu-large", "cpu-large"),
        ("2xh100+4xnvme-gen5", "2x-h100-80+4xnvme-gen5"),
    ],
)
def test_a_name_resolves(name: str, expected: str) -> None:
    assert resolve_node(name).name == expected


@pytest.mark.parametrize(
    ("name", "words"),
    [("h10", "did you mean h100"), ("tpu", "Known: "), ("", "empty"), ("h100+floppy", "known: local-ssd, nvme-gen3")],
)
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


def test_cpu_ranks_share_one_device_and_gpu_ranks_have_one_each() -> None:
    cpu, gpus = resolve_node("cpu"), resolve_node("8xh100")
    assert cpu.bytes_of_device(4) == cpu.device_bytes // 4
    assert gpus.bytes_of_device(8) == gpus.device_bytes


def test_several_cpu_devices_are_not_more_than_a_rank_can_use() -> None:
    four = resolve_node("4xcpu")
    assert four.bytes_of_device(1) == four.bytes_of_device(4) == four.device_bytes
    assert four.bytes_of_device(8) == four.device_bytes // 2


@pytest.mark.parametrize(
    ("product", "memory_mib", "expected"),
    [
        ("NVIDIA-H100-80GB-HBM3", None, "2x-h100-80"),
        ("NVIDIA-A100-SXM4-40GB", 40441, "2x-a100-40"),
        ("NVIDIA-Z900", 97000, "2x-h100-80"),
        ("NVIDIA-H200", 143771, "2x-h200"),
        ("NVIDIA-A100-SXM4-80GB", None, "2x-a100-80"),
        ("NVIDIA-L40S", None, "2x-l40s"),
        ("NVIDIA-GeForce-RTX-4090", None, "2x-rtx-4090"),
        ("NVIDIA-Z900", 45000, "2x-a100-40"),
        ("NVIDIA-Z900", 8000, "2x-rtx-4090"),
        ("NVIDIA-Z900", None, "2x-rtx-4090"),
        ("", None, "2x-rtx-4090"),
    ],
)
def test_a_gpu_is_found_by_its_product_or_by_its_memory(product: str, memory_mib: int | None, expected: str) -> None:
    node = gpu_node(product, None if memory_mib is None else memory_mib * 2**20, 2)
    assert (node.name, node.num_devices) == (expected, 2)


def test_gpu_memory_is_what_the_driver_reports_minus_the_reserve() -> None:
    node, catalog = gpu_node("NVIDIA-H100-80GB-HBM3", 100_000 * 2**20, 1), resolve_node("1xh100")
    assert node.device_bytes - catalog.device_bytes == 100_000 * 2**20 - 85520809984
    assert gpu_node("", 2**20, 1).device_bytes == 0
