"""Valid jobs at random: each gets a plan and children, or a clear rejection; nothing raises, no search is endless."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest
import yaml

from cases.crd_cases import fields, schema_of
from cases.fuzzed_jobs import decided, fuzzed_job
from harness.depth import FULL, at
from spillway.api.crd import TRAINING_JOB
from spillway.api.earlier import HUGGING_FACE, MOVED
from spillway.api.load import job_type
from spillway.api.manifest import parse, validate
from spillway.api.status import TrainingJobStatus
from spillway.planning.search import Search
from spillway_operator.decide.observed import Desired

NUM_JOBS, SEED = at(20, 60, 10_000), 20261122
MOST_CANDIDATES = 1_000_000
"""that are tried for one job: more are a search without end; the longest of hundreds of jobs tries 130,000"""
UNCLEAR = ("which is a bug", "Traceback", "Error:")


def outcome(desired: Desired) -> str:
    """`planned`, `suspended`, or the reason of the rejection. Raises AssertionError for what is none of these."""
    assert desired.status is not None, "a new job leaves a status"
    TrainingJobStatus.model_validate(desired.status)
    conditions = {found["type"]: found for found in desired.status["conditions"]}
    if desired.creates:
        json.dumps(desired.creates)
        assert [child["kind"] for child in desired.creates][:: len(desired.creates) - 1] == ["ConfigMap", "Job"]
        return "planned"
    if conditions.get("Suspended", {}).get("status") == "True":
        return "suspended"
    rejected = [
        conditions[kind] for kind in ("Accepted", "Planned") if conditions.get(kind, {}).get("status") == "False"
    ]
    assert rejected, conditions
    message = rejected[0]["message"]
    assert len(message) > 20 and not any(word in message for word in UNCLEAR), message
    return str(rejected[0]["reason"])


def test_every_valid_job_is_planned_or_rejected_clearly_and_soon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tally: Counter[str] = Counter()
    tried: Counter[int] = Counter()
    wrong, seed, settle = [], SEED, Search._settled

    def settled(*given: Any) -> Any:
        tried[seed] += 1
        assert tried[seed] <= MOST_CANDIDATES, "a search without end"
        return settle(*given)

    monkeypatch.setattr(Search, "_settled", settled)
    for seed in range(SEED, SEED + NUM_JOBS):
        try:
            tally[outcome(decided(seed)[1])] += 1
        except Exception as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
    [(longest, candidates)] = tried.most_common(1)
    with capsys.disabled():
        reduced = "" if FULL else " (10,000 in `make test-all`)"
        print(
            f"\n{NUM_JOBS} fuzzed jobs from seed {SEED}{reduced}: {dict(tally.most_common())}; "
            f"at most {candidates:,} candidates tried (seed {longest})"
        )
    assert wrong == [], "\n".join(wrong[:20])
    assert tally["planned"] > NUM_JOBS / 10, "few of them are jobs that anybody could run"


def test_the_file_of_a_fuzzed_job_is_read_as_the_object_is() -> None:
    for seed in range(SEED, SEED + 20):
        document = fuzzed_job(seed)
        text = yaml.safe_dump(document, allow_unicode=True)
        assert parse(job_type, text, "fuzz.yaml") == validate(job_type(document), document, "fuzz")


def test_every_field_of_the_api_is_tried() -> None:
    tried: set[str] = set()
    for seed in range(SEED, SEED + 2000):
        tried |= set(paths(fuzzed_job(seed)["spec"], "spec"))
    all_of_them = {path for path, _ in fields(schema_of(TRAINING_JOB)) if path.startswith("spec.")}
    tried |= {path for path in all_of_them if path.endswith((".*", "[]"))}
    of_members = re.compile(r"spec\.members\[\]\.(\w+\.|overrides)")  # fields of spec, tried there
    tried |= {path for path in all_of_them if of_members.match(path)}
    earlier = tuple(f"spec.{path}" for path in (*MOVED, HUGGING_FACE))
    assert [path for path in all_of_them - tried if not path.startswith(earlier)] == []


def paths(value: Any, path: str) -> list[str]:
    found = [path]
    if isinstance(value, dict):
        found += [inner for name, held in value.items() for inner in paths(held, f"{path}.{name}")]
    if isinstance(value, list):
        found += [inner for held in value for inner in paths(held, f"{path}[]")]
    return found
