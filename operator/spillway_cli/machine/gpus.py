"""Finds the GPUs that a run could use, through the driver's library: importing torch would take seconds."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pynvml

from spillway.units import format_bytes
from spillway_operator.node_exporter.gpus import Gpu, gpu_of

VISIBLE = "CUDA_VISIBLE_DEVICES"
CUDA_PACKAGE = "install the CUDA build of torch: https://pytorch.org/get-started/locally/"


@dataclass(frozen=True, slots=True)
class Gpus:
    """The machine's GPUs, in CUDA's order."""

    found: tuple[Gpu, ...] = ()
    driver: str = ""
    torch_cuda: str | None = None
    """CUDA version that torch is built for, as `torch_cuda` returns it."""
    problem: str = ""
    """Why a run can use no GPU; empty = it can."""
    fix: str = ""

    @property
    def said(self) -> str:
        """Name and free memory of the first GPU."""
        return f"{self.found[0].name}, {format_bytes(self.found[0].free_bytes)} free" if self.found else ""

    def lacking(self, num_ranks: int) -> str:
        """Why `num_ranks` ranks cannot run here; empty = they can."""
        if self.problem or len(self.found) >= num_ranks:
            return self.problem
        return f"{num_ranks} ranks need a GPU each, but there are {len(self.found)}"


NO_DRIVER = Gpus(problem="no NVIDIA driver")


def find_gpus() -> Gpus:
    try:
        pynvml.nvmlInit()
        driver, cuda = pynvml.nvmlSystemGetDriverVersion(), pynvml.nvmlSystemGetCudaDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        shown = visible(handles, pynvml.nvmlDeviceGetUUID, os.environ.get(VISIBLE))
        found = tuple(gpu_of(pynvml, handle) for handle in shown)
        pynvml.nvmlShutdown()
    except pynvml.NVMLError_LibraryNotFound:
        return NO_DRIVER
    except pynvml.NVMLError as error:
        problem = f"the NVIDIA driver does not answer: {error}"
        return Gpus(problem=problem, fix="see nvidia-smi; load or update the driver")
    built_for = torch_cuda()
    return Gpus(found, driver, built_for, *problem_of(len(handles), len(found), cuda, built_for))


def problem_of(num_there: int, num_visible: int, driver_cuda: int, built_for: str | None) -> tuple[str, str]:
    """Why a run cannot use a GPU, and the fix; empty = it can. `driver_cuda`: 12040 is 12.4; `built_for`: see
    `torch_cuda`."""
    if not num_there:
        return "the driver finds no GPU", "see nvidia-smi; check that the container was given a GPU"
    if not num_visible:
        return f"{VISIBLE} hides all {num_there} GPUs", f"unset {VISIBLE}"
    if built_for == "":
        return "torch is built without CUDA", CUDA_PACKAGE
    if built_for and driver_cuda // 1000 < int(built_for.partition(".")[0]):
        knows = f"{driver_cuda // 1000}.{driver_cuda % 1000 // 10}"
        message = f"the driver supports CUDA {knows}, torch is built for {built_for}"
        return message, "update the driver, or install an older torch"
    return "", ""


def visible(handles: Sequence[Any], uuid: Callable[[Any], str], listed: str | None) -> list[Any]:
    """The GPUs that CUDA shows, in its order: CUDA_VISIBLE_DEVICES lists numbers or UUID prefixes, and CUDA ignores all
    after the first invalid one. (Numbers are NVML's: environment.py makes CUDA use the same order.)"""
    if listed is None:
        return [*handles]
    found = []
    for text in listed.split(","):
        word = text.strip()
        if word.isdecimal():
            named = [*handles[int(word) : int(word) + 1]]
        else:
            named = [handle for handle in handles if word and uuid(handle).startswith(word)]
        if len(named) != 1:
            break
        found += named
    return found


def torch_cuda() -> str | None:
    """The CUDA version that torch is built for ("13.0"; empty = none); None without torch. Does not import torch."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        return None
    match = re.search(r"^cuda\b.*'([\d.]+)'", Path(found.origin).with_name("version.py").read_text(), re.MULTILINE)
    return match[1] if match else ""
