"""Dashboards use declared metrics and labels, in queries that Prometheus' own parser accepts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard as Model

import alerts
import chart_files
import dashboards
import grafana
import recording_rules
from harness.built_programs import built_program
from harness.places import ROOT
from spillway import metrics

Json = dict[str, Any]

FILES = {path.stem: path for path in (ROOT / chart_files.FILES / "dashboards").glob("*.json")}
TRAINER = {metric.name for metric in (*metrics.ALL, *metrics.SWEEP)}
DECLARED = {metric.name: metric for metric in (*metrics.ALL, *metrics.SWEEP, *metrics.OPERATOR, *metrics.NODE)}
RECORDED = {rule.record for rule in recording_rules.ALL}
TARGET_LABELS = {"namespace", metrics.JOB_LABEL, "pod", "node"}
"""what the scrape configuration sets"""
OF_A_JOB = {"job", "memory-tiers", "sweep"}
"""dashboards"""
COLUMNS = 24
"""of Grafana's grid"""
UNITS = {"short", "s", "bytes", "Bps", "percentunit"}
KEYWORDS = {
    "max", "min", "sum", "avg", "count", "by", "rate", "increase", "deriv", "resets", "time", "offset", "or", "vector",
    "topk", "bottomk", "clamp_max", "on", "min_over_time", "round", "sort_desc", "histogram_quantile", "label_replace",
}  # fmt: skip


def model(name: str) -> Json:
    return dict(json.loads(FILES[name].read_text(encoding="utf-8")))


def panels(name: str) -> list[Json]:
    return [panel for panel in model(name)["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """(dashboard, expression with variables filled in)"""
    return [
        (name, query)
        for name in FILES
        for _, query in grafana.expressions(model(name), grafana.Chosen("team-a", "demo"))
    ]


def metric_of(series: str) -> metrics.Metric:
    """Also of a histogram's series."""
    return DECLARED[series.removesuffix("_bucket")]


def test_the_files_are_in_step_with_their_source() -> None:
    assert set(FILES) == {dashboard.name for dashboard in dashboards.ALL}
    for dashboard in dashboards.ALL:
        assert json.dumps(model(dashboard.name)) == json.dumps(grafana.as_json(dashboard)), "run `make crds`"


def test_check_names_the_file_that_is_out_of_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert chart_files.main(["--check"]) == 1
    assert chart_files.main([]) == 0
    assert chart_files.main(["--check"]) == 0
    job = tmp_path / chart_files.FILES / "dashboards" / "job.json"
    job.rename(job.with_name("other.json"))
    capsys.readouterr()
    assert chart_files.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "dashboards/job.json" in said
    assert "dashboards/other.json" in said
    assert chart_files.main([]) == 0
    assert chart_files.main(["--check"]) == 0


def test_the_chart_links_to_the_crds_instead_of_copying_them() -> None:
    assert (ROOT / chart_files.FILES / "crds").readlink() == Path("../../../crds")


@pytest.mark.parametrize(("name", "query"), queries())
def test_every_metric_and_label_is_declared(name: str, query: str) -> None:
    found = re.findall(rf"(?<![\w:])({metrics.PREFIX}\w+)(?:{{([^}}]*)}})?", query)
    assert found or any(record in query for record in RECORDED), "a query without a metric shows nothing of ours"
    for metric, selector in found:
        used = set(re.findall(r'(\w+)(?:=|!=|=~)"', selector))
        assert used <= TARGET_LABELS | set(metric_of(metric).labels), query
        if name in OF_A_JOB:
            assert {"namespace", metrics.JOB_LABEL} <= used, "shows other jobs, too"
        elif "namespace" in metric_of(metric).labels:
            assert "namespace" in used, "shows other namespaces, too"
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r"\s*,\s*", labels)}
    assert grouped - {"", "le"} <= TARGET_LABELS.union(*(metric_of(metric).labels for metric, _ in found))


@pytest.mark.parametrize(("name", "query"), queries())
def test_counters_are_read_as_rates_and_gauges_are_not(name: str, query: str) -> None:
    for function, metric in re.findall(r"(?:(\w+)\()?(?<![\w:])(spillway_\w+)", query):
        assert (function in ("rate", "increase")) is (metric_of(metric).kind in ("counter", "histogram")), query


@pytest.mark.parametrize("name", FILES)
def test_legends_name_labels_that_their_queries_keep(name: str) -> None:
    for panel in panels(name):
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {
                label for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(", ")
            }
            grouped |= {"node"} if "node:" in target["expr"] or "node_tier:" in target["expr"] else set()
            assert named <= grouped, target


@pytest.mark.parametrize("name", FILES)
def test_every_variable_is_defined_and_filled_in(name: str) -> None:
    defined = {variable["name"] for variable in model(name)["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", FILES[name].read_text(encoding="utf-8")))
    assert used - {"__rate_interval", "__range", "__data", "__url_time_range"} == defined
    assert [query for _, query in queries() if "$" in query] == []


def test_expressions_fill_in_what_they_are_given() -> None:
    found = grafana.expressions(model("job"), grafana.Chosen("n", "j", window="7s", shown="9m"))
    assert found[0] == ("Step", f'max({metrics.STEP.name}{{namespace="n",{metrics.JOB_LABEL}="j"}})')
    assert any("[7s]" in query for _, query in found)
    assert any(f"[9m:{grafana.RESOLUTION}]" in query for _, query in found)
    assert len(found) == sum(len(panel["targets"]) for panel in panels("job")) + len(dashboards.EVENTS)


@pytest.mark.parametrize("name", FILES)
def test_every_panel_has_a_unit_a_description_and_something_to_show(name: str) -> None:
    for panel in panels(name):
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["targets"], panel["title"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


@pytest.mark.parametrize("name", FILES)
def test_panels_fill_their_rows_and_never_overlap(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in model(name)["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < COLUMNS
        taken |= cells
    bottom = max(y for _, y in taken) + 1
    assert len(taken) == bottom * COLUMNS, "a gap"
    ids = [panel["id"] for panel in model(name)["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboards_show_every_series_of_a_trainer_and_of_the_operator() -> None:
    """What is exported and shown nowhere is either a panel that is missing or a series that nobody needs."""
    shown = set(re.findall(rf"(?<![\w:]){metrics.PREFIX}\w+", " ".join(query for _, query in queries())))
    missing = TRAINER | {metric.name for metric in metrics.OPERATOR}
    assert missing - {series.removesuffix("_bucket") for series in shown} == set()


RED = {
    "Since the last step": "SpillwayTrainerStuck", "Since the last checkpoint": "SpillwayCheckpointMissing",
    "Goodput": "SpillwayGoodputLow", "Goodput by namespace": "SpillwayGoodputLow",
    "Waiting for host memory": "SpillwayHostMemoryStalled", "Free share of the spill drive": "SpillwaySpillDriveFull",
    "Nodes avoided": "SpillwayNodeAvoided", "Drive wear": "SpillwaySpillDriveWorn",
    "Leaders": "SpillwayOperatorWithoutLeader", "Event loop blocked": "SpillwayOperatorSlow",
    "Oldest plan": "SpillwayPlanningStuck", "Age of the nodes' metrics": "SpillwayPlacementMetricsStale",
    "Certificate valid for": "SpillwayCertificateExpires", "Failed requests": "SpillwayOperatorApiErrors",
    "Rejected reports": "SpillwayReportsRejected", "Watch delay": "SpillwayWatchLags",
    "Free space for checkpoints": "SpillwayCheckpointVolumeFull",
}  # fmt: skip
"""panel with a limit -> its alert"""
OF_NONE = {"Leaders": " == 0", "Nodes avoided": " > 0", "Since the last checkpoint": " < 3600"}
"""a limit that the alert writes otherwise"""


def test_the_red_of_a_panel_begins_where_its_alert_does() -> None:
    fired = {alert.name: alert.expression for alert in alerts.ALL}
    found = {}
    for panel in (panel for name in FILES for panel in panels(name)):
        base, *steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        for step in steps:
            sign = "<" if base["color"] == "red" else ">"
            limit = OF_NONE.get(panel["title"], rf" {sign}=? {step['value']:.12g}\b")
            assert re.search(limit, fired[RED[panel["title"]]]), panel["title"]
            found[panel["title"]] = step["value"]
    assert found.keys() == RED.keys()


@pytest.mark.parametrize("name", FILES)
def test_every_graph_has_a_legend_and_every_variable_is_its_own(name: str) -> None:
    for panel in panels(name):
        assert panel["type"] != "timeseries" or panel["options"]["legend"]["showLegend"] is True, panel["title"]
    assert all("id" not in variable for variable in model(name)["templating"]["list"])


@pytest.mark.parametrize("name", FILES)
def test_grafanas_own_types_read_a_dashboard_back_unchanged(name: str) -> None:
    written = model(name)
    read = json.loads(json.dumps(Model.from_json(written), cls=JSONEncoder))
    for variable in read["templating"]["list"]:
        del variable["id"]
    for annotation in written["annotations"]["list"]:  # the types lack these two
        del annotation["titleFormat"], annotation["useValueForTime"]
    assert read == written


@pytest.mark.parametrize("name", FILES)
def test_events_mark_the_graphs_of_a_job(name: str) -> None:
    events = [annotation["name"] for annotation in model(name)["annotations"]["list"]]
    expected = [event.name for event in dashboards.EVENTS] if name in OF_A_JOB else []
    assert events == (expected[1:3] if name == "sweep" else expected)


def test_a_row_of_the_waiting_jobs_opens_the_jobs_dashboard() -> None:
    (table,) = (panel for panel in panels("fleet") if panel["type"] == "table")
    (link,) = table["fieldConfig"]["defaults"]["links"]
    page, _, values = link["url"].partition("?")
    assert page == f"/d/{model('job')['uid']}"
    names = [variable["name"] for variable in model("job")["templating"]["list"][1:]]
    chosen = [f"var-{name}=${{__data.fields.{name}}}" for name in names]
    assert values == "&".join([*chosen, "var-datasource=${datasource}", "${__url_time_range}"])


def test_queries_use_no_function_that_nobody_checked() -> None:
    for _, query in queries():
        bare = re.sub(r"{[^}]*}|\[[^]]*\]", "", query)
        bare = re.sub(r'"[^"]*"|by \([^)]*\)', "", bare)
        words = set(re.findall(r"\b[a-z_:0-9]*[a-z_]{2,}[a-z_:0-9]*\b", bare)) - RECORDED - alerts.FOREIGN.keys()
        assert {word for word in words if word.removesuffix("_bucket") not in DECLARED} <= KEYWORDS, query


def test_prometheus_own_parser_accepts_every_query(tmp_path: Path) -> None:
    promtool = built_program("promtool", otherwise="promtool")
    if promtool is None:
        pytest.skip("no promtool: `make cluster-up` builds it, and Debian's package prometheus has one")
    rules = [{"record": f"query:{number}", "expr": query} for number, (_, query) in enumerate(queries())]
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "dashboards", "rules": rules}]}), encoding="utf-8")
    checked = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(rules)} rules found" in checked.stdout
