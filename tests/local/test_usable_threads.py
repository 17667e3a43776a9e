"""A trainer whose plan was made for more cores than it may use takes those that it has, and says so.

tests/parity shows that the number of threads changes no bit.
"""

from __future__ import annotations

import os
from pathlib import Path

from harness.local_runs import complete, events, job_file, log_of, spread_plan, write_text


def test_a_plan_for_a_larger_node_runs_on_the_cores_that_are_here(tmp_path: Path) -> None:
    threads = len(os.sched_getaffinity(0)) + 7
    job = job_file(tmp_path, write_text(tmp_path / "text"), tmp_path / "corpus", epoch=1)
    training = job.spec.training.model_copy(update={"steps": 3})
    job = job.model_copy(update={"spec": job.spec.model_copy(update={"training": training})})
    plan = spread_plan()
    plan = plan.model_copy(update={"optimizer": plan.optimizer.model_copy(update={"num_threads": threads})})
    assert complete(job, plan) == 0, log_of(tmp_path, 1)
    assert len(events(tmp_path, "step")) == 3
    assert f"instead of the plan's {threads}" in log_of(tmp_path, 1)
