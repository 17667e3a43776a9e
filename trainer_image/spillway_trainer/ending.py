"""How a trainer process ends: an exception becomes a reason, an exit code and a termination message. Torch-free."""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from spillway.errors import RANK_CRASHED, ExitCode, SpillwayError

TERMINATION_VERSION = 1
LONGEST_TERMINATION = 4096
"""Bytes; the kubelet truncates longer messages, which breaks the JSON."""
LONGEST_MESSAGE = 2048
"""Most bytes that JSON needs for the message."""
OFFLOAD_MORE = (
    "offload more (spec.memory.advanced.activations.policy, spec.memory.advanced.optimizer.placement), or use a "
    "smaller spec.training.microBatchSize in a new job"
)
"""What a user may do if device memory runs out."""
CRASHED = 1
"""Exit code of an unexpected error, the same as Python's."""
FOLLOWER = "follower"
"""Key that is true in the termination message of a rank that ended because another rank had: launcher and operator then
look for that other rank."""
NEVER_JOINED = "neverJoined"
"""Key that is true in addition if the other rank never appeared: then no deleted pod is the cause."""


class PeerLost(Exception):
    """Another rank is lost, and this one cannot continue without it. This rank's end counts as a crash, but not as the
    cause of the attempt's end."""


class PeerNeverJoined(PeerLost):
    """This rank waited its whole time limit for a rank that never appeared."""


@dataclass(frozen=True, slots=True)
class Ending:
    reason: str
    exit_code: int
    message: str
    details: dict[str, object] = field(default_factory=dict)

    @property
    def expected(self) -> bool:
        """False for a crash, for which a traceback says more than the message does."""
        return self.reason != RANK_CRASHED or FOLLOWER in self.details

    def to_json(self, rank: int, step: int) -> str:
        """{"v":1,"reason":"DeviceOutOfMemory","exitCode":70,"rank":3,"step":812,"message":"...",...}

        At most LONGEST_TERMINATION bytes: a long message is cut, and details that do not fit in addition are left out.
        """
        head = {"v": TERMINATION_VERSION, "reason": self.reason, "exitCode": self.exit_code, "rank": rank, "step": step}
        head["message"] = shortened(self.message, LONGEST_MESSAGE)
        whole = json.dumps({**self.details, **head}, default=str)
        return whole if len(whole) < LONGEST_TERMINATION else json.dumps(head)


def shortened(text: str, longest: int) -> str:
    """Returns a beginning of `text` for which JSON needs at most `longest` bytes (six for a character outside
    ASCII)."""
    while (needed := len(json.dumps(text)) - 2) > longest:
        text = text[: len(text) * longest // needed]
    return text


def completed(message: str) -> Ending:
    return Ending(ExitCode.COMPLETED.reason, ExitCode.COMPLETED, message)


def ending_of(error: BaseException) -> Ending:
    """Returns the documented ending of `error`; an unforeseen error is a crash."""
    if isinstance(error, SpillwayError):
        return Ending(error.exit_code.reason, error.exit_code, str(error), error.details)
    if isinstance(error, PeerLost):
        details = {FOLLOWER: True} | ({NEVER_JOINED: True} if isinstance(error, PeerNeverJoined) else {})
        return Ending(RANK_CRASHED, CRASHED, str(error), {**details})
    if is_device_out_of_memory(error):
        code = ExitCode.DEVICE_OUT_OF_MEMORY
        found = str(error).partition("\n")[0]
        message = f"an allocation on the device failed: {found} To need less, {OFFLOAD_MORE}."
        return Ending(code.reason, code, message)
    if is_device_fault(error):
        code = ExitCode.DEVICE_FAULT
        found = str(error).partition("\n")[0]
        return Ending(code.reason, code, f"the device failed: {found}. Run the job on another device; `nvidia-smi -q` "
                      "and the kernel's log (Xid) say what is wrong with this one.")  # fmt: skip
    if is_out_of_memory(error):
        code = ExitCode.HOST_OUT_OF_MEMORY
        found = str(error) or type(error).__name__
        return Ending(code.reason, code, f"out of host memory: {found}. Raise the container's memory limit, or lower "
                      "spec.memory.budget.host (on CPUs, also spec.memory.budget.device).")  # fmt: skip
    return Ending(RANK_CRASHED, CRASHED, f"{type(error).__name__}: {error}")


def is_device_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is torch.OutOfMemoryError, raised by the device's allocator, or CUDA's own error, which may come
    from a context or a library; NCCL reports that of its own buffers as a "Cuda failure"."""
    text = str(error)
    of_nccl = "Cuda failure" in text and "out of memory" in text
    return type(error).__name__ == "OutOfMemoryError" or text.startswith("CUDA error: out of memory") or of_nccl


def is_device_fault(error: BaseException) -> bool:
    """Whether `error` is CUDA's error about a device, driver or library (torch.AcceleratorError, or RuntimeError if a
    library reports it; NCCL: "Cuda failure"). A failed assertion in a kernel is the program's own error."""
    text = str(error)
    is_of_cuda = text.startswith(("CUDA error: ", "CUDA driver error: ")) or "Cuda failure" in text
    is_of_cuda &= isinstance(error, RuntimeError) and not is_device_out_of_memory(error)
    return is_of_cuda and "device-side assert" not in text


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` is Python's own, the operating system's (of a mapping), or that of torch's host allocator."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def write_termination(path: Path, ending: Ending, rank: int, step: int) -> None:
    """Writes the termination message if it can: a run that cannot say how it ended still ends with its exit code."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(ending.to_json(rank, step) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"termination message not written to {path}: {error}")


def leave(exit_code: int) -> NoReturn:
    """Ends the process without destructors, because that of a process group would wait for peers that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)
