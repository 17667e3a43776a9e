"""Members of a sweep: the spec and the job.json of each one's solo run, and the plan of all of them."""

from __future__ import annotations

import re

import pytest

from spillway.api.job_file import JobFile
from spillway.api.load import parse_job
from spillway.api.sweep.members import member_job, member_spec, problems_of
from spillway.api.training_job import TrainingJob, TrainingJobSpec
from spillway.errors import InvalidJob
from spillway.plan import Infeasible, MemoryPlan, Tier
from spillway.planning.hardware import local_node
from spillway.planning.planner import make_plan
from spillway.planning.sweep_plan import turns
from spillway.units import GIB, MIB
from spillway_cli.plan_command import member_table, turns_sentence

SWEEP = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: sweep}
spec:
  model: {config: {architecture: llama, hiddenSize: 64, numLayers: 2, numHeads: 4, vocabSize: 512}}
  data: {builtin: PythonStdlib, evaluation: {everySteps: 5}}
  training: {steps: 20, sequenceLength: 64, globalBatchSize: 8}
  OBJECTIVE
  members: [MEMBERS]
"""


def sweep(members: str, objective: str = "objective: {halving: 5}") -> TrainingJob:
    # what is wrong with members is asked of problems_of here
    text = SWEEP.replace("OBJECTIVE", objective).replace("MEMBERS", "")
    job = parse_job(SWEEP.replace("OBJECTIVE", "").replace("MEMBERS", ""), "sweep")
    given = parse_yaml(text.replace("members: []", f"members: [{members}]"))
    spec = type(job.spec).model_validate(given["spec"])
    return job.model_copy(update={"spec": spec})


def parse_yaml(text: str) -> dict[str, object]:
    import yaml

    document = yaml.safe_load(text)
    assert isinstance(document, dict)
    return document


THREE = (
    '{name: slow, training: {optimizer: {learningRate: "1e-4"}}}, '
    "{name: wide, model: {config: {hiddenSize: 128}}, training: {seed: 3}}, "
    "{name: lion, training: {optimizer: {name: Lion}}}"
)


def test_a_member_is_the_job_with_its_own_fields_and_without_members() -> None:
    job = sweep(THREE)
    slow, wide, lion = (member_spec(job.spec, member) for member in job.spec.members)
    assert slow.training.optimizer.learning_rate == 1e-4
    assert not slow.members
    assert slow.objective is None
    assert (wide.training.seed, wide.model.transformer.hidden_size) == (3, 128)
    assert lion.training.optimizer.betas == (0.9, 0.99)
    assert lion.data == slow.data == job.spec.data


def test_a_size_that_only_followed_another_one_follows_the_members() -> None:
    job = sweep(THREE)
    assert member_spec(job.spec, job.spec.members[1]).model.transformer.intermediate_size == 512


def test_members_are_the_same_after_a_journey_through_json() -> None:
    job = sweep(THREE)
    again = type(job.spec).model_validate_json(job.spec.model_dump_json())
    assert [member_spec(again, one) for one in again.members] == [
        member_spec(job.spec, one) for one in job.spec.members
    ]


@pytest.mark.parametrize(
    ("members", "where", "allowed"),
    [
        ("{name: a}, {name: a}", "spec.members[1].name", "give each member its own"),
        ('{name: a, training: {stepz: "2"}}', "spec.members[0].training.stepz", "did you mean steps?"),
        ('{name: a, training: {steps: 0}}', "spec.members[0].training.steps", "at least 1"),
        ('{name: a, training: {microBatchSize: 3}}', "spec.members[0].training", "multiple of"),
        ('{name: a, model: {config: null, entrypoint: "m:f"}}', "spec.members[0].model.config", "a separate job"),
        ('{name: a, data: {evaluation: null}}', "spec.members[0].data.evaluation", "compared by their"),
        ('{name: a, data: {evaluation: {seed: 1}}}', "spec.members[0].data.evaluation", "on the same text"),
        ('{name: a, data: {evaluation: {fraction: "0.2"}}}', "spec.members[0].data.evaluation", "on the same text"),
        ('{name: a, data: {evaluation: {sequences: 2}}}', "spec.members[0].data.evaluation", "on the same text"),
    ],
)  # fmt: skip
def test_what_a_member_cannot_be_is_rejected_where_it_stands(members: str, where: str, allowed: str) -> None:
    problems = problems_of(sweep(members))
    assert any(where in one.path and allowed in one.problem for one in problems), problems


def test_members_of_a_model_that_is_built_may_have_other_adapters_and_nothing_else_of_it() -> None:
    listed = "{name: a, model: {lora: {rank: 8}}}, {name: b, model: {precision: {compute: float32}}}"
    text = SWEEP.replace("config: {architecture: llama, hiddenSize: 64, numLayers: 2, numHeads: 4, vocabSize: 512}",
                         "source: {path: /models/a}, lora: {rank: 4}")  # fmt: skip
    given = parse_yaml(text.replace("OBJECTIVE", "").replace("MEMBERS", listed))
    spec = TrainingJobSpec.model_validate(given["spec"])
    (problem,) = problems_of(sweep(THREE).model_copy(update={"spec": spec}))
    assert problem.path == "spec.members[1].model.precision.compute"
    assert "let members differ only in model.lora, training and data" in problem.problem


def test_sound_members_have_no_problems_and_a_stray_objective_has_one() -> None:
    assert problems_of(sweep(THREE)) == []
    assert problems_of(sweep("{name: a, data: {evaluation: {everySteps: 10}}, training: {seed: 1}}")) == []
    assert [one.path for one in problems_of(sweep(""))] == ["spec.objective"]


def test_member_spec_rejects_by_name() -> None:
    job = sweep("{name: a, training: {steps: 0}}")
    with pytest.raises(InvalidJob, match="member a"):
        member_spec(job.spec, job.spec.members[0])


def test_members_have_their_own_directories_and_one_corpus_per_vocabulary() -> None:
    job = sweep(THREE + ", {name: rich, model: {config: {vocabSize: 1024}}}")
    file = JobFile(
        name="sweep", uid="u", epoch=1, spec=job.spec, output_directory="/out", corpus_directory="/out/corpus",
        checkpoint_directory="/claim/sweep", spill_directory="/spill", termination_message_path="/out/t",
        compute_threads=1,
    )  # fmt: skip
    slow, rich = member_job(file, job.spec.members[0]), member_job(file, job.spec.members[3])
    assert slow.output_directory == "/out/members/slow"
    assert slow.checkpoint_directory == "/claim/sweep/members/slow"
    assert slow.corpus_directory == "/out/corpus"
    assert rich.corpus_directory == "/out/corpus-rich"


NODE = local_node(2, 4 * GIB, 4 * GIB, 8 * GIB)


def planned(members: str) -> MemoryPlan:
    plan = make_plan(sweep(members), NODE, explained=False)
    assert isinstance(plan, MemoryPlan)
    return plan


def test_the_plan_of_a_sweep_is_what_its_members_need_together() -> None:
    plan = planned(THREE)
    slow, wide, lion = plan.members
    assert [one.name for one in plan.members] == ["slow", "wide", "lion"]
    assert plan.bytes[Tier.DEVICE] == wide.plan.bytes[Tier.DEVICE]
    assert plan.bytes[Tier.NVME].optimizer_states >= slow.parked_bytes + wide.parked_bytes + lion.parked_bytes
    assert all(one.plan.bytes[tier].total <= plan.bytes[tier].total for one in plan.members for tier in Tier)
    assert lion.parked_bytes < slow.parked_bytes  # one moment, not two
    assert plan.turns is not None
    assert plan.turns.seconds >= plan.turns.bound_seconds
    assert MemoryPlan.model_validate_json(plan.model_dump_json()) == plan


@pytest.mark.parametrize(("parking_share", "num_steps"), [(0.0, 5), (0.09, 5), (0.11, 10), (0.31, 20), (5.0, 20)])
def test_turns_end_at_reports_unless_parking_takes_more_than_a_tenth(parking_share: float, num_steps: int) -> None:
    """`parking_share`: of the seconds between two evaluations, 5 steps; the members have 20."""
    members = [
        one.model_copy(update={"parking_seconds": parking_share * 5 * one.plan.prediction.step_seconds})
        for one in planned(THREE).members
    ]
    found = turns(sweep(THREE).spec, members)
    assert found.num_steps == num_steps
    assert found.policy == ("RoundRobin" if num_steps < 20 else "Sequential")


def test_a_plan_of_one_model_has_no_members() -> None:
    plan = make_plan(sweep("", ""), NODE, explained=False)
    assert isinstance(plan, MemoryPlan)
    assert (plan.members, plan.turns, plan.turn_steps) == ((), None, 0)


def test_a_member_that_does_not_fit_is_named_with_what_is_missing() -> None:
    found = make_plan(sweep(THREE), local_node(2, 1 * MIB, 1 * MIB, 8 * GIB), explained=False)
    assert isinstance(found, Infeasible)
    assert found.job == "member slow of sweep"
    assert found.nearest == "", "without an explanation, place.py asks again for one"
    assert max(found.missing_bytes.values()) > 0


def test_members_that_have_no_room_to_park_are_rejected_with_bytes() -> None:
    found = make_plan(sweep(THREE), local_node(2, 4 * GIB, 4 * GIB, 1 * MIB), explained=False)
    assert isinstance(found, Infeasible)
    assert found.missing_bytes[Tier.NVME] > 0
    assert re.search(r"nvme: more than \w+, which the states of the 3 members take while", found.nearest)


def test_plan_shows_a_row_per_member_and_compares_the_total_with_the_bound() -> None:
    plan = planned(THREE)
    assert member_table(plan).row_count == 3
    assert plan.turns is not None
    assert f"turns of {plan.turn_steps} steps" in turns_sentence(plan.turns, plan.prediction)
    assert "times the lower bound" in turns_sentence(plan.turns, plan.prediction)
