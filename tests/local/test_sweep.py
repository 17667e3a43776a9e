"""Real runs of sweeps: every member equals its solo run bit for bit, whatever its turns, rounds, failures and kills."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from harness import killed_runs, local_runs, sweep_runs
from harness.depth import FULL
from harness.killed_runs import Kill
from harness.sweep_runs import same_as_alone
from spillway.api.job_file import JobFile
from spillway.errors import ExitCode
from spillway.plan import MemberPlan, Turns
from spillway.units import MIB
from spillway_cli.__main__ import run_app


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return local_runs.write_text(tmp_path_factory.mktemp("text"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("corpus") / "corpus"


@pytest.fixture(scope="module")
def solo(tmp_path_factory: pytest.TempPathFactory, text: Path, corpus: Path) -> dict[str, Path]:
    return sweep_runs.solo_runs(tmp_path_factory, text, corpus)


def run(job: JobFile, turn_steps: int) -> None:
    plan = sweep_runs.sweep_plan(job, turn_steps)
    assert local_runs.complete(job, plan) == 0, local_runs.log_of(Path(job.output_directory), job.epoch)


KILLS = [Kill("a step", 6), Kill("parking", 2)]
"""kills that end one attempt each, after which another attempt continues; test_sweep_kills.py kills at every moment"""


@pytest.mark.parametrize("turn_steps", [1, 3] if FULL else [3])
def test_each_member_of_a_sweep_is_its_solo_run_bit_for_bit(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path], turn_steps: int
) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1)
    run(job, turn_steps)
    for name, alone in solo.items():
        same_as_alone(job, name, alone)
    assert {one["event"] for one in sweep_runs.states(tmp_path).values()} == {"member_completed"}
    turns = [event["member"] for event in local_runs.events(tmp_path, "member_started")]
    assert turns[:6] == ["slow", "other-seed", "deeper"] * 2


@pytest.mark.ci
def test_killed_sweep_trains_the_same_curves_and_stops_the_same_members(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path]
) -> None:
    for epoch, kill in enumerate(KILLS, 1):
        job = sweep_runs.sweep_file(tmp_path, text, corpus, epoch, objective="halving: 4")
        process = killed_runs.start(job, sweep_runs.sweep_plan(job, 2), [kill])
        process.join()
        assert process.exitcode == -9, local_runs.log_of(tmp_path, epoch)
    job = sweep_runs.sweep_file(tmp_path, text, corpus, len(KILLS) + 1, objective="halving: 4")
    run(job, 2)
    values = {name: sweep_runs.evaluations(alone)[4] for name, alone in solo.items()}
    best = min(values, key=lambda name: values[name])
    states = sweep_runs.states(tmp_path)
    for name, alone in solo.items():
        assert states[name]["event"] == ("member_completed" if name == best else "member_stopped")
        same_as_alone(job, name, alone, 8 if name == best else 4)


def test_halving_stops_the_worse_half_and_others_match_training_alone(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path]
) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1, objective="halving: 3")
    run(job, 2)
    values = {name: sweep_runs.evaluations(sweep_runs.member_output(job, name))[3] for name in solo}
    best = min(values, key=lambda name: values[name])
    states = sweep_runs.states(tmp_path)
    assert states[best]["event"] == "member_completed"
    for name, alone in solo.items():
        if name != best:
            assert (states[name]["event"], states[name]["step"]) == ("member_stopped", 3)
        same_as_alone(job, name, alone, 8 if name == best else 3)
    assert local_runs.events(tmp_path, "best")[-1]["member"] == best


TWO = (
    sweep_runs.JOB[: sweep_runs.JOB.index("  - {name: other-seed")]
    .replace("steps: 8", "steps: STEPS")
    .replace("name: Cosine", "name: Constant")
    + """
  - {name: other-seed, training: {seed: 7}, model: {config: {vocabSize: 500}}}
"""
)


def two(output: Path, text: Path, epoch: int, steps: int) -> JobFile:
    """A sweep of two members whose vocabularies, and so corpora, differ; writes its job.json."""
    job = TWO.replace("STEPS", str(steps))
    made = sweep_runs.sweep_file(output, text, output / "corpus", epoch, job=job)
    (output / "job.json").write_text(made.model_dump_json())
    return made


@pytest.mark.ci
def test_members_are_listed_verified_and_the_best_one_is_exported(
    tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = two(tmp_path, text, epoch=1, steps=3)
    run(job, 3)

    def ckpt(*words: object) -> tuple[int, str]:
        code = run_app(["ckpt", *map(str, words)])
        printed = capsys.readouterr()
        return code, " ".join((printed.out + printed.err).split())

    code, said = ckpt("ls", tmp_path, "-o", "json")
    listed = [(one["member"], one["name"], one["schedule"]["peak"]) for one in json.loads(said)["checkpoints"]]
    assert (code, listed) == (0, [("other-seed", "step-3.e1", 0.002), ("slow", "step-3.e1", 1e-05)])
    assert ckpt("verify", tmp_path) == (0, "2 checkpoints verified, no byte differs")
    assert ckpt("verify", tmp_path, "--member", "slow") == (0, "1 checkpoint verified, no byte differs")
    best = local_runs.events(tmp_path, "best")[-1]["member"]
    others = {"slow": "other-seed", "other-seed": "slow"}
    masters = {name: sweep_runs.final_tensors(sweep_runs.member_checkpoints(job, name), 3) for name in others}
    for source, name, words, why in (
        (tmp_path, best, [], f"member {best}, the best of 2 by evaluation loss "),
        (tmp_path, others[best], ["--member", others[best]], f"member {others[best]}: "),
        (sweep_runs.member_checkpoints(job, "slow"), "slow", [], "step-3.e1 exported"),
        (sweep_runs.member_checkpoints(job, "other-seed"), "other-seed", [], "step-3.e1 exported"),
    ):
        to = tmp_path / f"exported-{len([*tmp_path.iterdir()])}"
        code, said = ckpt("export", source, "--to", to, "--dtype", "float32", *words)
        assert code == 0 and said.startswith(why), said
        weights = load_file(to / "model.safetensors")
        assert torch.equal(weights["model.embed_tokens.weight"], masters[name]["master.embed_tokens.weight"])
        corpus = "corpus" if name == "slow" else "corpus-other-seed"
        assert (to / "tokenizer.json").read_bytes() == (tmp_path / corpus / "tokenizer.json").read_bytes()
    assert ckpt("export", tmp_path, "--to", tmp_path / "x", "--member", "third")[0] == 64
    code, said = ckpt("export", tmp_path / "checkpoints", "--to", tmp_path / "x")
    assert code == 64 and "give --member, one of other-seed, slow" in said
    file = next(sweep_runs.member_checkpoints(job, "slow").glob("step-*/*.safetensors"))
    file.write_bytes(file.read_bytes()[:-1])
    code, said = ckpt("verify", tmp_path)
    assert code == 74 and said.startswith("slow/step-3.e1/")


@pytest.mark.ci
def test_sweep_of_more_steps_goes_on_as_its_members_would_alone(tmp_path: Path, text: Path) -> None:
    whole = two(tmp_path / "whole", text, epoch=1, steps=6)
    for job in (whole, two(tmp_path / "extended", text, 1, 3), two(tmp_path / "extended", text, 2, 6)):
        run(job, 2)
    for name in ("slow", "other-seed"):
        first, second = (sweep_runs.member_output(each, name) for each in (whole, job))
        assert sweep_runs.losses(first) == sweep_runs.losses(second)
        ends = [sweep_runs.final_tensors(sweep_runs.member_checkpoints(each, name), 6) for each in (whole, job)]
        assert ends[0].keys() == ends[1].keys()
        assert all(torch.equal(ends[0][tensor], ends[1][tensor]) for tensor in ends[0])


def test_nothing_of_parked_members_is_left_on_the_disk(tmp_path: Path, text: Path, corpus: Path) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1)
    job = job.model_copy(update={"spill_directory": str(tmp_path / "spill"), "spill_is_listed": True})
    (tmp_path / "spill").mkdir()
    run(job, 3)
    assert not list((tmp_path / "spill").iterdir())


@pytest.mark.ci
def test_members_that_fail_end_alone_and_the_job_completes_and_names_them(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path]
) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1, job=sweep_runs.WITH_FAILING)
    run(job, 3)
    for name, alone in solo.items():
        same_as_alone(job, name, alone)
    sweep_runs.failing_ones_failed(tmp_path)
    (end,) = local_runs.events(tmp_path, "end")
    assert end["exit_code"] == 0
    assert "exploding failed: step" in end["message"] and "textless failed: " in end["message"]


@pytest.mark.ci
def test_sweep_with_only_failed_members_exits_with_the_code_of_the_first(
    tmp_path: Path, text: Path, corpus: Path
) -> None:
    listed = sweep_runs.JOB[: sweep_runs.JOB.index("  members:")] + f"  members:{sweep_runs.FAILING}"
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1, job=listed)
    assert local_runs.complete(job, sweep_runs.sweep_plan(job, 3)) == ExitCode.NON_FINITE
    (end,) = local_runs.events(tmp_path, "end")
    assert "all 2 members failed; the first, exploding" in end["message"]


DRAWN = """
  - {name: plain}
  - {name: other-seed, training: {seed: 7, optimizer: {moments: int8}}}
"""


@pytest.mark.ci
def test_members_whose_model_draws_buffers_draw_those_of_their_solo_runs(
    tmp_path: Path, text: Path, corpus: Path
) -> None:
    """They draw the buffers in every turn, because no checkpoint and no parked member holds them."""
    before, _, after = sweep_runs.JOB.partition("    config:")
    document = f"{before}    entrypoint: cases.user_models:drawing\n{after[after.index('  data:') :]}"
    document = document[: document.index("  members:")] + f"  members:{DRAWN}"
    job = sweep_runs.sweep_file(tmp_path / "sweep", text, corpus, 1, job=document)
    plan = local_runs.disabled_plan(2).model_copy(update={"num_segments": 4})
    members = tuple(MemberPlan(name=one.name, plan=plan, parked_bytes=MIB, num_steps=8) for one in job.spec.members)
    turns = Turns(policy="RoundRobin", num_steps=3, seconds=1.0, bound_seconds=1.0)
    together = plan.model_copy(update={"members": members, "turns": turns})
    assert local_runs.complete(job, together) == 0, local_runs.log_of(tmp_path / "sweep", 1)
    for one in members:
        file = sweep_runs.solo_file(job, one.name, tmp_path / one.name)
        assert local_runs.complete(file, plan) == 0, local_runs.log_of(tmp_path / one.name, 1)
        same_as_alone(job, one.name, tmp_path / one.name)


@pytest.mark.ci
def test_a_round_whose_values_are_lost_is_an_error_and_no_early_end(tmp_path: Path, text: Path, corpus: Path) -> None:
    """The best member's checkpoint is beyond the round, so it will not report the round's value again."""
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1, objective="halving: 4")
    process = killed_runs.start(job, sweep_runs.sweep_plan(job, 2), [Kill("a step", 15)])
    process.join()
    assert process.exitcode == -9, local_runs.log_of(tmp_path, 1)
    (tmp_path / "checkpoints" / "sweep-1.json").unlink()
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 2, objective="halving: 4")
    assert local_runs.complete(job, sweep_runs.sweep_plan(job, 2)) == ExitCode.USER_ERROR
    assert "wait for the end of a round of successive halving" in local_runs.log_of(tmp_path, 2)


@pytest.mark.ci
def test_unwritable_member_directory_fails_the_job_and_costs_no_member(
    tmp_path: Path, text: Path, corpus: Path, solo: dict[str, Path]
) -> None:
    """This is not a failure of each member: with rounds of halving, a failed member would stay out for ever."""
    (tmp_path / "members").write_text("in the way")
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1, objective="halving: 4")
    assert local_runs.complete(job, sweep_runs.sweep_plan(job, 2)) == ExitCode.USER_ERROR
    assert local_runs.events(tmp_path, "member_failed") == []
    assert "members/slow: cannot be written: Not a directory" in local_runs.log_of(tmp_path, 1)
    (tmp_path / "members").unlink()
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 2, objective="halving: 4")
    run(job, 2)
    assert sorted(one["event"] for one in sweep_runs.states(tmp_path).values()) == [
        "member_completed",
        "member_stopped",
        "member_stopped",
    ]


@pytest.mark.ci
def test_a_log_that_no_disk_has_room_for_ends_the_attempt_and_no_member(
    tmp_path: Path, text: Path, corpus: Path
) -> None:
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1)
    output = sweep_runs.member_output(job, "other-seed")
    output.mkdir(parents=True)
    (output / "run.jsonl").symlink_to("/dev/full")
    assert local_runs.complete(job, sweep_runs.sweep_plan(job, 3)) == ExitCode.USER_ERROR
    assert "run.jsonl: cannot be written: No space left on device" in local_runs.log_of(tmp_path, 1)
    assert "failed, other members continue" not in local_runs.log_of(tmp_path, 1)


def test_sweep_resumed_with_another_metric_past_its_round_is_rejected(tmp_path: Path, text: Path, corpus: Path) -> None:
    """All members are beyond the round: it was decided by their losses, and they have no evaluations there."""
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 1, objective="halving: 4, metric: Loss")
    process = killed_runs.start(job, sweep_runs.sweep_plan(job, 2), [Kill("a step", 15)])
    process.join()
    assert process.exitcode == -9, local_runs.log_of(tmp_path, 1)
    job = sweep_runs.sweep_file(tmp_path, text, corpus, 2, objective="halving: 4, metric: EvaluationLoss")
    assert local_runs.complete(job, sweep_runs.sweep_plan(job, 2)) == ExitCode.USER_ERROR
    log = local_runs.log_of(tmp_path, 2)
    assert "the evaluation loss that another member reported in this round is missing" in log
    assert "restore the earlier spec.objective" in log
