"""The chart's alerts: each fires and is silent when it should, uses series that somebody exports, and has a runbook."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

import alerts
import chart_files
import recording_rules
from cases.alert_cases import CASES, CHECKPOINT_TIME, HEALTHY, AlertCase, Series
from harness.page_commands import INHIBITED, RUNBOOKS, SECTIONS, commands_of
from harness.places import ROOT
from harness.promtool import needs_promtool, promtool, unit_tested
from spillway import metrics
from spillway_cli.__main__ import app

RULES = ROOT / chart_files.FILES / "rules"
ALERTS = {alert.name: alert for alert in alerts.ALL}


def test_the_file_is_in_step_with_its_source() -> None:
    file = RULES / "alerts.yaml"
    assert yaml.safe_load(file.read_text(encoding="utf-8")) == alerts.as_json(), "run `make crds`"


def test_each_alert_waits_has_a_severity_and_says_whose_fault_to_look_at_and_how() -> None:
    rules = alerts.as_json()["groups"][0]["rules"]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 16
    for rule in rules:
        assert re.fullmatch(r"[1-9]\d*[mh]", rule["for"]), rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"]["runbook_url"] == f"{alerts.PAGE}#{rule['alert'].lower()}"
        named = re.search(r"\$labels\.(training_job|node|namespace)", rule["annotations"]["summary"])
        assert named or rule["alert"] in {alert.name for alert in alerts.OPERATOR}


OURS = (*metrics.ALL, *metrics.OPERATOR, *metrics.NODE)


def series_of(expression: str) -> set[str]:
    """Names in a query that are neither functions, keywords nor labels."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\b(?:by|on|group_left) \([^)]*\)|\{[^}]*\}|\[\w+\]|\boffset \w+", " ", bare)
    return set(re.findall(r"\b[a-zA-Z_][\w:]*\b(?! ?\()", bare)) - {"and", "or", "unless"}


def test_every_series_is_exported_by_us_recorded_or_a_named_exporters() -> None:
    ours = {metric.name for metric in OURS}
    recorded = {rule.record for rule in recording_rules.ALL}
    used = {name for alert in alerts.ALL for name in series_of(alert.expression)}
    assert used - ours - recorded - {"max", "min", "sum"} == alerts.FOREIGN.keys()
    assert len(used & ours) > 15


def test_labels_of_a_query_are_those_of_its_metric() -> None:
    declared = {metric.name: {*metric.labels, "kind", "node"} for metric in OURS}
    for alert in alerts.ALL:
        for name, matchers in re.findall(r"\b(spillway_\w+)\{([^}]*)\}", alert.expression):
            assert set(re.findall(r"(\w+)(?:=|!)", re.sub(r'"[^"]*"', "", matchers))) <= declared[name], alert.name


# --- promtool ---------------------------------------------------------------------------------------------------------


@needs_promtool
def test_prometheus_own_parser_accepts_every_alert() -> None:
    done = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES / "alerts.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


def one_test(series: Series, at: str, fires: dict[str, int], **more: object) -> dict[str, object]:
    """Which alerts fire, and how often, at a time."""
    samples = [{"labels": f'{{alertname="{name}"}}', "value": number} for name, number in fires.items()]
    firing = {"expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": at, "exp_samples": samples}
    given = [{"series": name, "values": values} for name, values in (HEALTHY | series).items()]
    return {"interval": "1m", "input_series": given, "promql_expr_test": [firing], **more}


def verdict(tests: list[dict[str, object]], folder: Path) -> str:
    """Empty if all pass."""
    files = [str(RULES / "nodes.yaml"), str(RULES / "alerts.yaml")]
    done = unit_tested({"rule_files": files, "evaluation_interval": "1m", "tests": tests}, folder)
    return done.stdout + done.stderr if done.returncode else ""


@needs_promtool
def test_nothing_fires_without_a_fault(tmp_path: Path) -> None:
    assert verdict([one_test({}, at, {}) for at in ("10m", "1h", "4h", "9h")], tmp_path) == ""


def test_every_alert_has_its_cases() -> None:
    assert CASES.keys() == ALERTS.keys()


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_with_its_fault_and_no_other_does_that_is_not_inhibited(name: str, tmp_path: Path) -> None:
    alert, case = ALERTS[name], CASES[name]
    assert {(name, other) for other in case.also} <= INHIBITED.keys()
    annotations = {
        "summary": f"{case.says}. Next: {command_of(alert, case)}",
        "runbook_url": f"docs/runbooks.md#{name.lower()}",
    }
    exact = {
        "alertname": name,
        "eval_time": case.at,
        "exp_alerts": [{"exp_labels": {**case.labels, "severity": alert.severity}, "exp_annotations": annotations}],
    }
    fires = one_test(case.fires, case.at, dict.fromkeys((name, *case.also), 1), alert_rule_test=[exact])
    assert verdict([fires], tmp_path) == ""


@needs_promtool
@pytest.mark.parametrize("name", CASES)
def test_an_alert_is_silent_just_before_its_fault(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    assert verdict([one_test(case.silent, case.at, {})], tmp_path) == ""


@needs_promtool
def test_a_job_that_never_committed_a_checkpoint_lacks_one_too(tmp_path: Path) -> None:
    assert verdict([one_test({CHECKPOINT_TIME: "_x600"}, "2h", {"SpillwayCheckpointMissing": 1})], tmp_path) == ""


@needs_promtool
def test_no_alert_fires_for_its_fault_with_its_last_comparison_turned_round(tmp_path: Path) -> None:
    turned = {">=": "<", "==": "!=", ">": "<", "<": ">"}
    rules = alerts.as_json()
    for rule in rules["groups"][0]["rules"]:
        head, sign, tail = re.fullmatch(r"(?:(.*) (>=|==|[<>]) )?(.*)", rule["expr"]).groups()  # type: ignore[union-attr]
        rule["expr"] = f"{head} {turned[sign]} {tail}" if sign else "vector(1) == 0"
    (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(rules), encoding="utf-8")
    tests = [
        one_test(case.fires, case.at, {})
        | {"promql_expr_test": [{"expr": f'ALERTS{{alertstate="firing",alertname="{name}"}}', "eval_time": case.at}]}
        for name, case in CASES.items()
    ]
    files = [str(RULES / "nodes.yaml"), "alerts.yaml"]
    silent = unit_tested({"rule_files": files, "evaluation_interval": "1m", "tests": tests}, tmp_path)
    assert silent.returncode == 0, silent.stdout + silent.stderr


def command_of(alert: alerts.Alert, case: AlertCase) -> str:
    command = alert.command
    for word, label in alerts.LABELS.items():
        command = command.replace(word, case.labels.get(label, ""))
    return command


# --- the runbook ------------------------------------------------------------------------------------------------------


def test_every_alert_has_a_section_with_its_command_and_no_section_is_left_over() -> None:
    assert SECTIONS.keys() == ALERTS.keys()
    for name, text in SECTIONS.items():
        assert ALERTS[name].command in text, name


def test_inhibitions_are_between_alerts_that_have_the_labels() -> None:
    assert len(INHIBITED) >= 5
    for (firing, silenced), labels in INHIBITED.items():
        for name in (firing, silenced):
            assert name in ALERTS, name
            wanted = {} if labels == "none" else set(labels.split(", "))
            assert set(wanted) <= CASES[name].labels.keys(), (name, labels)


KUBECTL = {
    "get": r"(?:pods|nodes|events|lease|leases|secrets|resourcequotas|persistentvolumeclaims|trainingjobs|tjob|"
    r"nodeprofiles|servicemonitors,podmonitors|workloads|clusterrolebindings|endpointslices)(?: [A-Z]+)?",
    "describe": "(?:trainingjob|node|persistentvolumeclaim|pod) [A-Z]+",
    "top": "(?:pods|nodes)",
    "logs": "",
    "edit": "trainingjob [A-Z]+",
    "cordon": "NODE",
    "uncordon": "NODE",
    "rollout": "restart deployment/spillway",
    "auth": "can-i [a-z]+ [a-z]+ --as=system:serviceaccount:spillway:spillway",
}
FLAGS = r"(?: (?:-n (?:NAMESPACE|spillway)|-A|-o wide|-l [\w./=-]+|--tail=\d+|--previous|--sort-by=\.lastTimestamp))*"


@pytest.mark.parametrize("command", sorted(set(commands_of(RUNBOOKS))))
def test_every_command_of_the_runbook_is_a_real_one(command: str) -> None:
    program, *arguments = shlex.split(command)
    if program == "spillway":
        group = get_command(app)
        context = group.make_context("spillway", arguments[:])
        name, found, rest = group.resolve_command(context, arguments)  # type: ignore[attr-defined]
        found.make_context(name, rest, parent=context)  # a wrong option or argument is an error here
    elif program == "helm":
        assert arguments[:2] == ["get", "values"]
    else:
        assert program == "kubectl"
        verb, _, rest = command.removeprefix("kubectl ").partition(" ")
        plain = re.fullmatch(KUBECTL[verb] + FLAGS, rest if KUBECTL[verb] else f" {rest}")
        assert plain is not None, command
