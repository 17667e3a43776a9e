"""The chart's recording rules: in step with their source, what the operator asks, and by promtool's own tests right."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

import chart_files
import recording_rules
from harness.places import FIXTURES, ROOT
from harness.promtool import needs_promtool, promtool, unit_tested
from spillway.placement import node_signals

FILE = ROOT / chart_files.FILES / "rules" / "nodes.yaml"
EXPECTED = FIXTURES / "recording_rules_test.yaml"


def promtools_tests_of(rules: recording_rules.Json, folder: Path) -> subprocess.CompletedProcess[str]:
    """promtool's tests, of other rules than those of the chart."""
    (folder / "rules.yaml").write_text(json.dumps(rules), encoding="utf-8")
    return unit_tested({**yaml.safe_load(EXPECTED.read_text(encoding="utf-8")), "rule_files": ["rules.yaml"]}, folder)


def test_the_file_is_in_step_with_its_source() -> None:
    assert yaml.safe_load(FILE.read_text(encoding="utf-8")) == recording_rules.as_json(), "run `make crds`"


def test_what_the_operator_asks_is_what_is_recorded() -> None:
    """So that promtool's tests of the rules are tests of the questions."""
    source = pytest.importorskip("spillway_operator.measured.metrics_source", reason="needs the extra [operator]")
    recorded = " ".join(rule.expression for rule in recording_rules.ALL)
    for question in source.QUESTIONS:
        # A rule asks for each mount point; that the operator picks one of them is tests/unit's.
        matchers = ('mountpoint="/"',) if question is node_signals.disk_free_bytes else ()
        assert question(*matchers) in recorded


def test_names_say_by_which_labels_and_each_is_recorded_once() -> None:
    names = [(rule.record, rule.tier) for rule in recording_rules.ALL]
    assert len(set(names)) == len(names)
    for rule in recording_rules.ALL:
        labels, name, operation = rule.record.split(":")
        assert re.fullmatch(r"spillway_[a-z_]+", name)
        assert operation in ("min", "sum", "rate2m", "count")
        grouped = re.match(r"(?:min|max|count) by \(([^)]*)\)", rule.expression)
        assert grouped is not None, rule.expression
        assert grouped[1].split(", ") + ["tier"] * (rule.tier is not None) == labels.split("_"), rule.record


@needs_promtool
def test_prometheus_own_parser_accepts_every_rule() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", FILE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(recording_rules.ALL)} rules found" in done.stdout


@needs_promtool
def test_promtools_tests_of_the_rules_pass() -> None:
    done = promtool("test", "rules", EXPECTED)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("min by (node) ", "max by (node) "),
        ("max by (node) ((rate", "min by (node) ((rate"),
        (" and time() - timestamp(node_pressure", " or time() - timestamp(node_pressure"),
        (" < 120", " < 12000"),
        ("(rate(", "(0 * rate("),
        ("exported_node", "node"),
        ("exported_pod", "pod"),
        ('node!=""', 'node!="none"'),
        ('training_job=""', 'training_job!="none"'),
        (" and max by (namespace, pod) (label_replace", " or max by (namespace, pod) (label_replace"),
        ('phase=~"Pending|Running"', 'phase=~".+"'),
        (" and on (namespace, pod) spillway_rank_up", ""),
        (" * 1048576", ""),
        ("/var/lib/kubelet", "/var/lib/containers"),
    ],
)  # fmt: skip
def test_promtools_tests_notice_a_rule_that_is_wrong(right: str, wrong: str, tmp_path: Path) -> None:
    rules = recording_rules.as_json()
    changed = 0
    for rule in rules["groups"][0]["rules"]:
        changed += right in rule["expr"]
        rule["expr"] = rule["expr"].replace(right, wrong)
    assert changed, "no rule has it"
    assert promtools_tests_of(rules, tmp_path).returncode == 1
