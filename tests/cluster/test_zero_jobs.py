"""Divided models in real pods: two ranks share states and gradients (Zero2), or parameters too (Zero3, Fsdp), and end
with the bits of the same attempt run on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from harness.depth import FULL
from harness.installed import Document, Installed, example
from spillway.api.job_file import JobFile
from spillway_trainer.checkpoints.directory import choose_resume
from spillway_trainer.checkpoints.manifest import StoredCheckpoint
from testbed.layout import REPOSITORY

SECONDS = 240.0
STRATEGIES = ("Zero2", "Zero3", "Fsdp") if FULL else ("Zero3",)
STEPS = 6


def divided(strategy: str, namespace: str) -> Document:
    """The two-pod example, shortened, with optimizer states in host memory."""
    return example(
        "two-pod",
        namespace,
        training__steps=STEPS,
        training__schedule=None,
        data__evaluation=None,
        parallelism__strategy=strategy,
        memory={"advanced": {"optimizer": {"placement": "Host"}}},
        checkpoint__everySteps=STEPS,
    )


def last_checkpoint(directory: Path) -> StoredCheckpoint:
    found = choose_resume(directory).checkpoint
    assert found is not None, directory
    return found


def run_here(spillway: Installed, namespace: str, attempt: str, claim: Path, directory: Path) -> Path:
    """Runs the attempt on this machine, with both ranks and its own files except for paths; returns its checkpoint
    directory."""
    files = spillway.bed.get("configmap", attempt, "--namespace", namespace)["data"]
    job = JobFile.model_validate_json(files["job.json"])
    here = {
        "num_nodes": 1,
        "ranks_per_node": 2,
        "output_directory": str(directory / "output"),
        "checkpoint_directory": str(directory / "checkpoints"),
        "corpus_directory": str(claim / Path(job.corpus_directory).relative_to(Path(job.checkpoint_directory).parent)),
        "spill_directory": str(directory),
        "termination_message_path": str(directory / "termination"),
        "master_address": "127.0.0.1",
        "master_port": 0,
        "metrics_port": None,
    }
    (directory / "output").mkdir()
    (directory / "job.json").write_text(job.model_copy(update=here).model_dump_json(), encoding="utf-8")
    (directory / "plan.json").write_text(files["plan.json"], encoding="utf-8")
    python = REPOSITORY / ".venv" / "bin" / "python"
    command = [str(python), "-m", "spillway_trainer.launch", str(directory)]
    ended = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return directory / "checkpoints"


@pytest.mark.ci
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_divided_job_ends_with_the_bits_of_its_local_run(
    spillway: Installed, namespace: str, tmp_path: Path, strategy: str
) -> None:
    job = divided(strategy, namespace)
    name = job["metadata"]["name"]
    claim = spillway.bed.claim(name, namespace)
    spillway.create(job)
    status = spillway.wait(namespace, name, "Complete", SECONDS)["status"]
    assert strategy in status["plan"]["summary"]
    assert (status["attempts"]["total"], status["progress"]["step"]) == (1, STEPS)
    inside = last_checkpoint(claim / Path(status["checkpoint"]["path"]).parent.name)
    outside = last_checkpoint(run_here(spillway, namespace, f"{name}-1", claim, tmp_path))
    assert inside.manifest.state.data_xxh3 == outside.manifest.state.data_xxh3, "another text was trained on"
    assert inside.manifest.files == outside.manifest.files
