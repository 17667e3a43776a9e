"""docs/planning.md: its example is computed, line by line, and is the plan that the planner makes."""

from __future__ import annotations

import re
from typing import Any

import pytest

from cases.job_documents import job
from harness.places import ROOT
from spillway.plan import MemoryPlan, Policy, Tier
from spillway.planning.hardware import node_names, resolve_node
from spillway.planning.planner import make_plan
from spillway_cli import plan_command
from spillway_cli.run.plan import BudgetOverrides

PAGE = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
(EXAMPLE,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
JOB = {
    "spec.model.config": {
        "architecture": "llama", "hiddenSize": 4096, "numLayers": 32, "numHeads": 32, "numKeyValueHeads": 8,
        "intermediateSize": 14336, "vocabSize": 128256,
    },
    "spec.training.sequenceLength": 4096, "spec.training.globalBatchSize": 8, "spec.training.microBatchSize": 1,
    "spec.memory.budget": {"device": "13824Mi"}, "spec.memory.advanced.optimizer.overlap": "None",
}  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> MemoryPlan:
    decided = make_plan(job(JOB), resolve_node("1xh100"))
    assert isinstance(decided, MemoryPlan)
    return decided


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(EXAMPLE, names)
    return names


LINES = [line for line in EXAMPLE.splitlines() if re.search(r"# +[0-9.]+", line)]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split(" =")[0])
def test_every_printed_value_is_what_its_line_computes(line: str, values: dict[str, Any]) -> None:
    name, printed = line.split(" =", maxsplit=1)[0], re.findall(r"# +([0-9.]+)", line)[0]
    assert values[name] == pytest.approx(float(printed), rel=1e-9)


def test_the_plan_is_the_one_that_the_page_tells_of(plan: MemoryPlan, values: dict[str, Any]) -> None:
    homes, answers = plan.parameters.homes, plan.activations.answers
    assert homes.count(Tier.HOST) == values["streamed"]
    assert (homes[0], homes[-1]) == (Tier.DEVICE, Tier.DEVICE)
    assert (answers.count(Policy.HOST), answers.count(Policy.RECOMPUTE)) == (values["moved"], values["recomputed"])
    assert plan.optimizer.cpu_share == 1.0


def test_the_example_by_hand_is_the_plans_own_arithmetic(plan: MemoryPlan, values: dict[str, Any]) -> None:
    """But for roundings: whole pages, whole chunks, the mean number of loads, what cannot hide."""
    device, host = plan.bytes[Tier.DEVICE], plan.bytes[Tier.HOST]
    assert device.parameters == values["resident"] + values["tables"]
    assert device.gradients == values["device_gradients"]
    assert device.total == pytest.approx(values["device"], rel=1e-3)
    assert host.optimizer_states == pytest.approx(values["states"], rel=1e-4)
    assert host.gradients == pytest.approx(values["gradients"], rel=1e-4)
    assert host.parameters == pytest.approx(values["homes"], rel=1e-4)
    assert host.total == pytest.approx(values["host"], rel=1e-3)
    assert plan.prediction.step_seconds == pytest.approx(values["step"], rel=2e-3)


def test_every_node_of_the_catalog_is_named() -> None:
    names = {re.sub(r"^h100-80$", "h100", name) for name in node_names()}
    assert [name for name in names if f"`{name}`" not in PAGE] == []


def test_the_page_shows_what_plan_prints(capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = re.findall(r"^\$ \S*spillway plan examples/llama-70b.yaml --node 8xh100\n(.*?)^```", PAGE, re.M | re.S)
    plan_command.plan(ROOT / "examples/llama-70b.yaml", "8xh100", BudgetOverrides(), None, "text")
    assert shown == capsys.readouterr().out
