"""Valid jobs at random: each gets a plan and children, or a clear refusal; nothing raises and nothing takes long."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from typing import Any

import pytest
import yaml

from cases.crd_cases import fields, schema_of
from cases.fuzzed_jobs import decided, fuzzed_job
from spillway.api import TrainingJob
from spillway.crd import TRAINING_JOB
from spillway.manifest import parse, validate
from spillway.status import TrainingJobStatus
from spillway_operator.observed import Desired

FULL = os.environ.get("SPILLWAY_SWEEPS") == "full"
NUM_JOBS, SEED = (10_000 if FULL else 150), 20261122
LONGEST_CPU_SECONDS = 60.0
"""a search without end; the slowest takes 4 s, on a busy machine some times as much"""
UNCLEAR = ("which is a defect", "Traceback", "Error:")


def outcome(desired: Desired) -> str:
    """`planned`, `suspended`, or the reason of the refusal. Raises AssertionError for what is none of these."""
    assert desired.status is not None, "a new job leaves a status"
    TrainingJobStatus.model_validate(desired.status)
    conditions = {found["type"]: found for found in desired.status["conditions"]}
    if desired.creates:
        json.dumps(desired.creates)
        assert [child["kind"] for child in desired.creates][:: len(desired.creates) - 1] == ["ConfigMap", "Job"]
        return "planned"
    if conditions.get("Suspended", {}).get("status") == "True":
        return "suspended"
    refused = [
        conditions[kind] for kind in ("Accepted", "Planned") if conditions.get(kind, {}).get("status") == "False"
    ]
    assert refused, conditions
    message = refused[0]["message"]
    assert len(message) > 20 and not any(word in message for word in UNCLEAR), message
    return str(refused[0]["reason"])


def test_every_valid_job_is_planned_or_refused_clearly_and_soon(capsys: pytest.CaptureFixture[str]) -> None:
    tally: Counter[str] = Counter()
    slowest, wrong = (0.0, -1), []
    for seed in range(SEED, SEED + NUM_JOBS):
        began = time.process_time()
        try:
            tally[outcome(decided(seed)[1])] += 1
        except Exception as error:
            wrong.append(f"seed {seed}: {type(error).__name__}: {error}")
        seconds = time.process_time() - began
        slowest = max(slowest, (seconds, seed))
        if seconds > LONGEST_CPU_SECONDS:
            wrong.append(f"seed {seed}: {seconds:.1f} s")
    with capsys.disabled():
        reduced = "" if FULL else " (10,000 in `make faults`)"
        print(
            f"\n{NUM_JOBS} fuzzed jobs from seed {SEED}{reduced}: {dict(tally.most_common())}; "
            f"slowest {slowest[0]:.2f} s of CPU (seed {slowest[1]})"
        )
    assert wrong == [], "\n".join(wrong[:20])
    assert tally["planned"] > NUM_JOBS / 10, "few of them are jobs that anybody could run"


def test_the_file_of_a_fuzzed_job_is_read_as_the_object_is() -> None:
    for seed in range(SEED, SEED + 20):
        document = fuzzed_job(seed)
        text = yaml.safe_dump(document, allow_unicode=True)
        assert parse(TrainingJob, text, "fuzz.yaml") == validate(TrainingJob, document, "fuzz")


def test_every_field_of_the_api_is_tried() -> None:
    tried: set[str] = set()
    for seed in range(SEED, SEED + 2000):
        tried |= set(paths(fuzzed_job(seed)["spec"], "spec"))
    all_of_them = {path for path, _ in fields(schema_of(TRAINING_JOB)) if path.startswith("spec.")}
    assert all_of_them - tried - {path for path in all_of_them if path.endswith((".*", "[]"))} == set()


def paths(value: Any, path: str) -> list[str]:
    found = [path]
    if isinstance(value, dict):
        found += [inner for name, held in value.items() for inner in paths(held, f"{path}.{name}")]
    if isinstance(value, list):
        found += [inner for held in value for inner in paths(held, f"{path}[]")]
    return found
