"""A real search: after a kill it continues with the same members, and stops and trains the same ones as an
uninterrupted search."""

from __future__ import annotations

from pathlib import Path

from harness import killed_runs, local_runs, sweep_runs
from harness.killed_runs import Kill
from spillway.api.job_file import JobFile

SEARCH = sweep_runs.JOB[: sweep_runs.JOB.index("  members:")] + (
    """  search:
    trials: 3
    seed: 5
    parameters:
    - {path: training.optimizer.learningRate, distribution: LogUniform, min: "1e-5", max: "1e-2"}
    - {path: training.seed, min: 0, max: 9}
"""
)


def test_a_killed_search_goes_on_with_the_same_trials_and_decides_the_same(tmp_path: Path) -> None:
    text, corpus = local_runs.write_text(tmp_path / "text"), tmp_path / "corpus"

    def searched(output: str, epoch: int) -> JobFile:
        return sweep_runs.sweep_file(tmp_path / output, text, corpus, epoch, job=SEARCH, objective="halving: 4")

    whole, killed, resumed = searched("whole", 1), searched("killed", 1), searched("killed", 2)
    assert local_runs.complete(whole, sweep_runs.sweep_plan(whole, 2)) == 0, local_runs.log_of(tmp_path / "whole", 1)
    process = killed_runs.start(killed, sweep_runs.sweep_plan(killed, 2), [Kill("a step", 8)])
    process.join()
    assert process.exitcode == -9
    written = JobFile.model_validate_json(killed.model_dump_json()).spec.members
    assert written == resumed.spec.members
    assert [one.name for one in written] == ["trial-00", "trial-01", "trial-02"]
    assert local_runs.complete(resumed, sweep_runs.sweep_plan(resumed, 2)) == 0, local_runs.log_of(
        tmp_path / "killed", 2
    )
    for one in written:
        outputs = [sweep_runs.member_output(job, one.name) for job in (whole, resumed)]
        assert sweep_runs.losses(outputs[0]) == sweep_runs.losses(outputs[1]) != {}
    ends = [
        {name: (event["event"], event["step"]) for name, event in sweep_runs.states(Path(job.output_directory)).items()}
        for job in (whole, resumed)
    ]
    assert ends[0] == ends[1]
    assert sorted(kind for kind, _ in ends[0].values()) == ["member_completed", "member_stopped", "member_stopped"]
