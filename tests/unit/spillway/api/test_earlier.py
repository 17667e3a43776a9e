"""Specs of earlier schemas: what they mean today, and what a new manifest that has such a field is told."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from cases.job_documents import EXAMPLE_JOBS, document, job
from harness.places import ROOT
from spillway.api.earlier import MOVED, as_today
from spillway.api.load import load_job
from spillway.api.manifest import validate
from spillway.api.training_job import TrainingJob
from spillway.errors import InvalidJob

EARLIER: dict[str, Any] = {
    "image": "trainer:1",
    "imagePullSecrets": [{"name": "pull"}],
    "env": [{"name": "A", "value": "b"}],
    "resources": {"cpu": "2"},
    "resourceName": "example.com/gpu",
    "runtimeClassName": "nvidia",
    "podOverrides": {"labels": {"a": "b"}, "annotations": {"c": "d"}, "serviceAccountName": "team"},
    "memory": {
        "budget": {"host": "1Gi"}, "optimizer": {"placement": "Host"}, "activations": {"policy": "Nvme"},
        "parameters": {"placement": "Auto"},
    },
    "lifecycle": {"activeDeadlineSeconds": 0, "pendingDeadlineSeconds": 0, "stallSeconds": 0, "maxRestarts": 2},
    "objective": {"metric": "Loss", "halving": 0},
    "members": [
        {"name": "a", "overrides": {"training.seed": "7", "training.optimizer.learningRate": "1e-4"}},
        {"name": "b", "overrides": {"training.optimizer.betas": '["0.8", "0.9"]', "model.config.numLayers": "1"}},
        {"name": "c"},
    ],
}  # fmt: skip
TODAY: dict[str, Any] = {
    "pod": {
        "image": "trainer:1", "imagePullSecrets": [{"name": "pull"}], "env": [{"name": "A", "value": "b"}],
        "resources": {"cpu": "2"}, "resourceName": "example.com/gpu", "runtimeClassName": "nvidia",
        "labels": {"a": "b"}, "annotations": {"c": "d"}, "serviceAccountName": "team",
    },
    "memory": {
        "budget": {"host": "1Gi"},
        "advanced": {
            "optimizer": {"placement": "Host"}, "activations": {"policy": "Nvme"}, "parameters": {"placement": "Auto"},
        },
    },
    "lifecycle": {"stallSeconds": 10**9, "maxRestarts": 2},
    "objective": {"metric": "Loss"},
    "members": [
        {"name": "a", "training": {"seed": 7, "optimizer": {"learningRate": "1e-4"}}},
        {"name": "b", "training": {"optimizer": {"betas": ["0.8", "0.9"]}}, "model": {"config": {"numLayers": 1}}},
        {"name": "c"},
    ],
}  # fmt: skip


def test_an_earlier_spec_is_read_as_what_it_means_today_and_is_valid() -> None:
    before = deepcopy(EARLIER)
    assert as_today(EARLIER) == TODAY
    assert before == EARLIER, "the object itself is left alone"
    assert as_today(TODAY) == TODAY
    whole = document()
    whole["spec"] |= as_today(EARLIER)
    assert validate(TrainingJob, whole, "earlier").spec.pod.image == "trainer:1"


def test_a_value_at_the_new_place_wins_and_defaults_of_the_old_schema_vanish() -> None:
    stored = {"image": "", "env": [], "podOverrides": {}, "pod": {"image": "new"}, "memory": {"optimizer": {}}}
    assert as_today(stored | {"resources": {"cpu": "1"}}) == {
        "pod": {"image": "new", "resources": {"cpu": "1"}}, "memory": {},
    }  # fmt: skip
    assert as_today({"image": "old", "pod": {"image": "new"}}) == {"pod": {"image": "new"}}


@pytest.mark.parametrize(
    "spec", [{"pod": None}, {"members": 3}, {"members": ["a"], "image": 4}, {"memory": 1, "env": {}}]
)
def test_a_spec_that_anybody_wrote_does_not_raise(spec: dict[str, Any]) -> None:
    as_today(spec)


@pytest.mark.parametrize("path", MOVED)
def test_a_new_manifest_is_told_where_the_field_is_now(path: str) -> None:
    with pytest.raises(InvalidJob) as error:
        job({f"spec.{path}": {}})
    (problem,) = error.value.problems
    assert (problem.path, problem.problem.partition(" (")[0]) == (f"spec.{path}", f"moved to spec.{MOVED[path]}")


def test_every_field_that_the_page_names_is_a_field() -> None:
    page = (ROOT / "docs" / "api-versions.md").read_text(encoding="utf-8")
    assert [path for path in MOVED if f"`{path}`" not in page or f"`{MOVED[path]}`" not in page] == []
    assert [load_job(file).kind for file in EXAMPLE_JOBS] == ["TrainingJob"] * len(EXAMPLE_JOBS)
