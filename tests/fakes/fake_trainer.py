"""A trainer process without a model: it does what OUTPUT/script.json says for its epoch, and logs as the real one does.

    python fake_trainer.py OUTPUT        {"1": {"steps": [1, 5], "end": "kill"}, "2": {"steps": [4, 8], "end": 0}}

`end` is an exit code, "kill" (SIGKILL to itself), or "wait" (without limit for SIGTERM, then exit code 75).
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

LOSS_OF_FIRST_STEP = 8.0


def step_line(step: int, time: float) -> dict[str, Any]:
    return {
        "event": "step",
        "time": time,
        "step": step,
        "loss": LOSS_OF_FIRST_STEP / step,
        "learning_rate": 1e-3,
        "gradient_norm": 1.5,
        "clip_factor": 0.5,
        "tokens": 1024,
        "step_seconds": 0.5,
        "phase_seconds": {"data": 0.01, "forward": 0.1, "backward": 0.2, "optimizer": 0.1, "wait": 0.04},
        "tier_bytes": {"device": 40 << 20, "host": 80 << 20, "nvme": 20 << 20},
        "tier_peak_bytes": {"device": 60 << 20, "host": 88 << 20, "nvme": (30 << 20) + step * 4096},
        "moved_bytes": {"h2d": 1 << 20, "d2h": 1 << 20, "nvme_read": 3 << 20, "nvme_write": 3 << 20},
        "cpu_seconds": 0.75,
        "skipped": False,
        "tokens_per_second": 2048.0,
    }


def start_line(epoch: int, resumed_from_step: int, time: float) -> dict[str, Any]:
    return {
        "event": "start",
        "time": time,
        "job": "fake",
        "epoch": epoch,
        "resumed_from_step": resumed_from_step,
        "isa": "scalar",
        "io_backend": "threads+O_DIRECT",
        "parameters": 6_500_000,
    }


def attempt_lines(epoch: int, first: int, last: int) -> list[dict[str, Any]]:
    """The lines that one attempt appends to run.jsonl. Times depend only on epoch and step."""
    began = 1_700_000_000.0 + 1000 * epoch
    lines = [start_line(epoch, first - 1, began)]
    for step in range(first, last + 1):
        time = began + 0.5 * (step - first + 1)
        lines.append(step_line(step, time))
        if step % 4 == 0:
            lines.append({"event": "evaluation", "time": time, "step": step, "loss": 9 / step, "tokens": 99})
            lines.append(
                {"event": "checkpoint", "time": time, "step": step, "epoch": epoch, "bytes": 1 << 20, "seconds": 0.01}
            )
    return lines


def main() -> None:
    output = Path(sys.argv[1])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # sigwait below receives it, even if it comes earlier
    epoch = json.loads((output / "job.json").read_text())["epoch"]
    script = json.loads((output / "script.json").read_text())[str(epoch)]
    with (output / "run.jsonl").open("a") as log:
        for line in attempt_lines(epoch, *script["steps"]):
            log.write(json.dumps(line) + "\n")
    print(f"fake trainer, epoch {epoch}", flush=True)
    end = script["end"]
    if end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if end == "wait":
        signal.sigwait({signal.SIGTERM})
        end = 75
    if "message" in script:
        message = {"v": 1, "exitCode": end, "message": script["message"]}
        (output / "attempts" / f"attempt-{epoch}" / "termination.json").write_text(json.dumps(message))
    sys.exit(end)


if __name__ == "__main__":
    main()
