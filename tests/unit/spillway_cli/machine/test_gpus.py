"""Which GPUs a run on this machine can use, and what is said where it can use none."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pynvml
import pytest

from cases.job_documents import job
from spillway.api.profiles import NodeProfileSpec
from spillway.errors import UserError
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.corrections import Corrections
from spillway.units import GIB
from spillway_cli.machine.gpus import NO_DRIVER, Gpu, Gpus, find_gpus, problem_of, torch_cuda, visible
from spillway_cli.machine.local_node import LocalResources
from spillway_cli.machine.node_profile import OwnProfile
from spillway_cli.run.plan import decided_for_this_machine, local_devices

RTX = Gpu("NVIDIA GeForce RTX 4090", 24 * GIB, 20 * GIB)
TWO = Gpus((RTX, replace(RTX, free_bytes=10 * GIB)), "580.00")
HERE = LocalResources(cores=16, memory_bytes=64 * GIB, disk_bytes=500 * GIB, gpus=TWO)


@pytest.mark.parametrize(
    ("listed", "shown"),
    [
        (None, ["a1", "a2", "b3"]),
        ("", []),
        ("-1", []),
        ("2,0", ["b3", "a1"]),
        ("b,0", ["b3", "a1"]),
        ("a", []),
        ("1,7,0", ["a2"]),
        (" 1 , b3", ["a2", "b3"]),
    ],
)
def test_the_visible_gpus_are_those_that_cuda_shows_in_its_order(listed: str | None, shown: list[str]) -> None:
    assert visible(["a1", "a2", "b3"], str, listed) == shown


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ((1, 1, 13000, "13.0"), ""),
        ((1, 1, 12040, None), ""),
        ((0, 0, 13000, "13.0"), "the driver finds no GPU"),
        ((2, 0, 13000, "13.0"), "CUDA_VISIBLE_DEVICES hides all 2 GPUs"),
        ((1, 1, 13000, ""), "torch is built without CUDA"),
        ((1, 1, 12040, "13.0"), "the driver supports CUDA 12.4, torch is built for 13.0"),
    ],
)
def test_why_no_gpu_can_be_used_is_said(facts: tuple[int, int, int, str | None], problem: str) -> None:
    assert problem_of(*facts)[0] == problem


def test_a_machine_without_a_driver_or_with_a_silent_one_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for code, problem in (
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, NO_DRIVER.problem),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "the NVIDIA driver does not answer: Driver Not Loaded"),
    ):
        monkeypatch.setattr(pynvml, "nvmlInit", Mock(side_effect=pynvml.NVMLError(code)))
        assert find_gpus().problem == problem


def test_the_cuda_of_torch_is_read_without_importing_it() -> None:
    import torch

    assert (torch_cuda() or None) == torch.version.cuda


def test_device_auto_is_a_gpu_with_what_is_free_on_it() -> None:
    plan = decided_for_this_machine(job(), HERE)
    assert isinstance(plan, MemoryPlan)
    assert (plan.device, plan.node) == ("Cuda", "local-2x-rtx-4090")
    assert plan.reasons[0] == "device: Cuda, NVIDIA GeForce RTX 4090, 20.0 GiB free"
    both = decided_for_this_machine(job({"spec.training.globalBatchSize": 8}), HERE, num_ranks=2)
    assert isinstance(both, MemoryPlan)
    assert both.budget[Tier.DEVICE] == 9 * GIB


def test_device_auto_is_the_cpu_where_the_model_does_not_fit_the_gpu() -> None:
    tiny = replace(HERE, gpus=Gpus((replace(RTX, free_bytes=0),)))
    plan = decided_for_this_machine(job(), tiny)
    assert isinstance(plan, MemoryPlan)
    assert plan.reasons[0].startswith("device: Cpu, no plan fits on the GPU (NVIDIA GeForce RTX 4090, 0 B free): ")
    assert plan.reasons[0].endswith(" of device memory missing (budget 0 B)")
    lacking = decided_for_this_machine(job(), replace(tiny, memory_bytes=0), corrections=Corrections())
    assert isinstance(lacking, Infeasible)
    assert lacking.node == "local-1x-rtx-4090"


def test_a_profile_of_the_gpu_is_used_for_plans_on_it_alone() -> None:
    measured = NodeProfileSpec.model_validate({"deviceKind": "Cuda", "operationOverheadSeconds": "1e-3"})
    profiles = {"Cuda": OwnProfile(measured, "measured"), "Cpu": OwnProfile(None, "")}
    for device, name in (("Cuda", "local-2x-rtx-4090-measured"), ("Cpu", "local")):
        asked = job({"spec.parallelism.device": device})
        plan = decided_for_this_machine(asked, HERE, profiles=profiles.__getitem__)
        assert isinstance(plan, MemoryPlan)
        assert plan.node == name


def test_a_job_that_names_a_gpu_is_rejected_where_none_can_be_used() -> None:
    spec = job({"spec.parallelism.device": "Cuda"}).spec
    with pytest.raises(UserError, match=r"device = Cuda: no GPU can be used here: no NVIDIA driver"):
        local_devices(spec, NO_DRIVER, 1)
    with pytest.raises(UserError, match="3 ranks need a GPU each, but there are 2"):
        local_devices(spec, TWO, 3)
    assert local_devices(spec, TWO, 2) == [("Cuda", "")]
