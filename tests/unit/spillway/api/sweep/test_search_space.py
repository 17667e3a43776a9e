"""The members that spec.search makes: which values, how many, the same everywhere; and what it rejects, where."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from pydantic import ValidationError

from cases.job_documents import document as document_of_a_job
from cases.job_documents import job
from spillway.api.load import parse_job
from spillway.api.manifest import validate
from spillway.api.sweep.members import named_specs
from spillway.api.sweep.search_space import MEMBERS_ARE_MADE, SearchParameter, SearchSpace, members_in
from spillway.api.training_job import TrainingJob
from spillway.errors import InvalidJob
from spillway_operator.decide.case import num_steps

RATE = {"path": "training.optimizer.learningRate", "distribution": "LogUniform", "min": "1e-4", "max": "1e-2"}
SEED = {"path": "training.seed", "min": 0, "max": 99}
DECAY = {"path": "training.optimizer.weightDecay", "values": ["0", "0.01", "0.1"]}


def space(*parameters: dict[str, Any], **fields: Any) -> SearchSpace:
    return SearchSpace.model_validate({"parameters": list(parameters), **fields})


def points(made: SearchSpace) -> list[tuple[Any, ...]]:
    return [tuple(member.changes[one.path] for one in made.parameters) for member in made.members]


def test_the_drawn_values_are_those_of_every_version_of_python() -> None:
    """A change of these changes the members of jobs that run."""
    assert points(space(RATE, SEED, DECAY, trials=4)) == [
        ("0.0044605", 1, "0.01"),
        ("0.000284692", 64, "0.1"),
        ("0.000134953", 88, "0.1"),
        ("0.00114508", 94, "0.01"),
    ]
    flat = {"path": "training.gradientClipping", "min": "0.5", "max": 2}
    layers = {"path": "model.config.numLayers", "min": 1, "max": 64, "distribution": "LogUniform"}
    stepped = {"path": "model.config.dropout", "min": "0", "max": "0.3", "step": "0.1"}
    assert points(space(flat, layers, stepped, seed=7, trials=4)) == [
        ("1.57263", 4, "0.1"),
        ("1.55405", 28, "0.1"),
        ("1.36256", 5, "0.3"),
        ("1.88485", 24, "0.1"),
    ]


def test_a_grid_has_every_combination_and_the_last_parameter_varies_fastest() -> None:
    dropout = {"path": "model.config.dropout", "min": "0.1", "max": "0.35", "step": "0.1"}
    made = space(dropout, {"path": "training.seed", "min": 3, "max": 4}, algorithm="Grid")
    assert points(made) == [("0.1", 3), ("0.1", 4), ("0.2", 3), ("0.2", 4), ("0.3", 3), ("0.3", 4)]
    assert [one.name for one in made.members] == [f"trial-0{at}" for at in range(6)]


def test_more_trials_keep_the_members_that_were_there() -> None:
    few, many = (space(RATE, SEED, trials=trials, seed=3).members for trials in (5, 64))
    assert many[:5] == few
    assert [one.name for one in many] == sorted(one.name for one in many)


def test_another_parameter_leaves_the_values_of_the_others() -> None:
    alone, together = points(space(RATE, trials=4)), points(space(SEED, RATE, trials=4))
    assert [rate for _, rate in together] == [rate for (rate,) in alone]


def test_another_seed_draws_other_members() -> None:
    assert points(space(RATE, trials=4, seed=1)) != points(space(RATE, trials=4, seed=2))


def test_random_draws_no_point_twice_even_if_it_needs_the_whole_space() -> None:
    bits = [{"path": f"training.{name}", "min": 2, "max": 3} for name in ("steps", "seed", "globalBatchSize")]
    found = points(space(*bits, DECAY, trials=24))
    assert len(set(found)) == 24


@pytest.mark.parametrize("share", [Fraction(0), 1 - Fraction(1, 1 << 64)])
def test_a_draw_stays_between_min_and_max(share: Fraction) -> None:
    def drawn(**given: Any) -> Any:
        return SearchParameter.model_validate(given).drawn(share)

    first = share == 0
    narrow = {"path": "training.gradientClipping", "min": "1.00000001", "max": "1.00000002"}
    assert drawn(**narrow) == "1.00000001", "rounded to six digits it would lie below"
    assert drawn(**RATE) == ("0.0001" if first else "0.01")
    assert drawn(path="training.steps", min=3, max=7, distribution="LogUniform") == (3 if first else 7)
    assert drawn(**SEED) == (0 if first else 99)
    assert drawn(path="training.steps", min=1, max=10, step=4) == (1 if first else 9)
    assert drawn(**DECAY) == ("0" if first else "0.1")


def document(**search: Any) -> dict[str, Any]:
    made = document_of_a_job()
    made["spec"]["search"] = {"parameters": [RATE], "trials": 2, **search}
    return made


def test_a_search_is_its_members_and_is_read_again_from_json() -> None:
    read = validate(TrainingJob, document(), "job")
    assert [one.training.optimizer.learning_rate for one in named_specs(read.spec).values()] == [0.0044605, 0.000284692]
    assert TrainingJob.model_validate_json(read.model_dump_json()) == read


def test_a_member_is_no_search_itself() -> None:
    read = validate(TrainingJob, document(), "job")
    assert all(one.search is None and not one.members for one in named_specs(read.spec).values())


def test_the_list_of_members_next_to_a_search_is_rejected() -> None:
    made = document()
    made["spec"]["members"] = [{"name": "a"}]
    with pytest.raises(InvalidJob, match=f"spec.members.*{MEMBERS_ARE_MADE}"):
        validate(TrainingJob, made, "job")


def test_a_job_without_search_is_written_as_before() -> None:
    assert "search" not in job().spec.model_dump(mode="json")


def test_the_operator_counts_the_steps_of_members_that_a_search_makes() -> None:
    assert num_steps({"training": {"steps": 5}, "search": {"parameters": [RATE], "trials": 3}}) == 15
    steps = {"path": "training.steps", "values": [2, 9]}
    assert num_steps({"training": {"steps": 5}, "search": {"parameters": [steps], "algorithm": "Grid"}}) == 11
    assert members_in({"search": {"parameters": []}}) == members_in({"search": 3}) == []


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"parameters": [RATE, RATE], "trials": 2}, "parameters.1.path"),
        ({"parameters": [RATE | {"max": "1e999"}], "trials": 2}, "at most 1e308"),
        ({"parameters": [SEED | {"max": "1e300"}], "trials": 2}, "max: at most 1000000000000"),
        ({"parameters": [DECAY | {"values": ["x" * 1025]}], "trials": 2}, "at most 1024 characters"),
        ({"parameters": [DECAY | {"values": ["0", True]}], "trials": 2}, "an integer or a string is needed"),
        ({"parameters": [DECAY | {"max": 1}], "trials": 2}, "a range needs both min and max"),
        ({"parameters": [RATE | {"min": True}], "trials": 2}, "a number >= 0"),
        ({"parameters": [RATE | {"path": "training.seed.a"}], "trials": 2}, "a: unknown field"),
    ],
)
def test_what_no_manifest_of_the_fixtures_has_is_rejected_too(given: dict[str, Any], where: str) -> None:
    """tests/fixtures/bad_manifests/search.yaml has the rest."""
    with pytest.raises(ValidationError, match=where):
        SearchSpace.model_validate(given)


def test_errors_of_trials_are_at_the_parameter_that_caused_them_and_once() -> None:
    text = """
apiVersion: spillway.dev/v1alpha1
kind: TrainingJob
metadata: {name: wrong}
spec:
  model: {config: {architecture: llama, hiddenSize: 64, numLayers: 2, numHeads: 4, vocabSize: 512}}
  data: {builtin: PythonStdlib}
  training: {steps: 20, sequenceLength: 64, globalBatchSize: 8}
  search:
    algorithm: Grid
    parameters:
    - {path: training.seed, values: [1, 2]}
    - {path: model.config.numHeads, values: [3, 5]}
    - {path: training.microBatchSize, values: [1, 3]}
"""
    with pytest.raises(InvalidJob) as caught:
        parse_job(text, "job.yaml")
    found = {one.path: (one.given, one.problem) for one in caught.value.problems}
    assert list(found) == ["spec.search.parameters[1]", "spec.search.parameters"]
    assert found["spec.search.parameters[1]"] == ("3", "trial-00: must divide hiddenSize (64)")
    assert found["spec.search.parameters"][1] == (
        "trial-01 (model.config.numHeads 3, training.seed 1, training.microBatchSize 3): with this change, "
        "spec.training.globalBatchSize = 8: must be a multiple of microBatchSize (3)"
    )
