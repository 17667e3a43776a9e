"""Every exception of a trainer becomes a documented reason, code and message."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch

from spillway import errors
from spillway_trainer.ending import LONGEST_MESSAGE, completed, ending_of, write_termination


@pytest.mark.parametrize("error_class", errors.SpillwayError.__subclasses__(), ids=lambda c: c.__name__)
def test_an_error_of_ours_ends_with_its_own_code(error_class: type[errors.SpillwayError]) -> None:
    ending = ending_of(error_class("sentence"))
    assert (ending.exit_code, ending.reason, ending.message) == (
        error_class.exit_code,
        error_class.exit_code.reason,
        "sentence",
    )


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
    ],
)
def test_a_failed_allocation_is_host_out_of_memory(error: Exception) -> None:
    ending = ending_of(error)
    assert ending.exit_code == errors.ExitCode.HOST_OUT_OF_MEMORY
    assert ending.message.startswith(f"out of host memory: {str(error) or 'MemoryError'}. Raise")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"), errors.ExitCode.DEVICE_FAULT),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `f`"), errors.ExitCode.DEVICE_FAULT),
        (torch.AcceleratorError("CUDA error: out of memory"), errors.ExitCode.DEVICE_OUT_OF_MEMORY),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), 1),
        (RuntimeError("CUDA error is a word here"), 1),
    ],
)
def test_an_error_of_cuda_ends_as_what_it_is(error: Exception, code: int) -> None:
    assert ending_of(error).exit_code == code


def test_an_unforeseen_error_is_a_crash_that_names_its_type() -> None:
    ending = ending_of(KeyError("weights"))
    assert (ending.reason, ending.exit_code, ending.expected) == ("RankCrashed", 1, False)
    assert "KeyError" in ending.message


def test_details_cannot_replace_the_reason() -> None:
    ending = ending_of(errors.SpillIOError("bad", reason="mine", errno=5))
    content = json.loads(ending.to_json(rank=3, step=812))
    assert (content["reason"], content["errno"], content["rank"], content["step"]) == ("SpillIOError", 5, 3, 812)


def test_a_termination_message_fits_the_kubelets_4096_bytes(tmp_path: Path) -> None:
    path = tmp_path / "attempts" / "termination.json"
    write_termination(path, ending_of(RuntimeError("x" * 10_000)), rank=0, step=1)
    assert path.stat().st_size <= 4096
    assert len(json.loads(path.read_text())["message"]) == LONGEST_MESSAGE


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("\N{SNOWMAN}" * 3000),
        errors.CheckpointCorrupt("none verifies\n" * 300, problems=["a problem"] * 300),
    ],
    ids=["letters of six bytes", "many details"],
)
def test_whatever_is_said_a_termination_message_is_whole_json(tmp_path: Path, error: Exception) -> None:
    path = tmp_path / "termination.json"
    write_termination(path, ending_of(error), rank=0, step=1)
    assert path.stat().st_size <= 4096
    assert str(error).startswith(json.loads(path.read_text())["message"].removeprefix("RuntimeError: "))


def test_an_unwritable_termination_message_is_no_second_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    write_termination(tmp_path / "file" / "termination.json", completed("done"), rank=0, step=1)
    assert "not written" in capsys.readouterr().out


def test_a_device_whose_allocator_rejects_is_device_memory_that_ran_out() -> None:
    """Also where the model allocates by itself, past our ledger; torch's advice behind the first line is left out."""
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")
    ending = ending_of(error)
    assert (ending.exit_code, ending.reason) == (70, "DeviceOutOfMemory")
    assert "Tried to allocate 2.00 GiB. To need less, offload more" in ending.message
