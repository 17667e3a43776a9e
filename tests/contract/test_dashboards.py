"""Dashboards use declared metrics and labels, in queries that Prometheus' own parser accepts."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

import chart_files
import dashboards
from harness.built_programs import built_program
from harness.places import ROOT
from spillway import metrics

Json = dict[str, Any]

FILES = {path.stem: path for path in (ROOT / chart_files.FILES / "dashboards").glob("*.json")}
DECLARED = {metric.name: metric for metric in (*metrics.ALL, *metrics.SWEEP)}
TARGET_LABELS = {"namespace", metrics.JOB_LABEL, "pod", "node"}
"""what the scrape configuration sets"""
UNITS = {"short", "s", "bytes", "Bps", "percentunit"}
KEYWORDS = {"max", "min", "sum", "avg", "count", "by", "rate", "increase", "deriv", "resets", "time"}


def model(name: str) -> Json:
    return dict(json.loads(FILES[name].read_text(encoding="utf-8")))


def panels(name: str) -> list[Json]:
    return [panel for panel in model(name)["panels"] if panel["type"] != "row"]


def queries() -> list[tuple[str, str]]:
    """(dashboard, expression with variables filled in)"""
    return [(name, query) for name in FILES for query in dashboards.expressions(model(name), "team-a", "demo")]


def test_the_files_are_in_step_with_their_source(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FILES) == {"job", "memory-tiers", "sweep"}
    assert json.dumps(model("job")) == json.dumps(dashboards.as_json(dashboards.JOB)), (
        "run `python charts/chart_files.py`"
    )
    assert json.dumps(model("memory-tiers")) == json.dumps(dashboards.as_json(dashboards.MEMORY_TIERS))
    assert json.dumps(model("sweep")) == json.dumps(dashboards.as_json(dashboards.SWEEP))


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
    found = re.findall(rf"({metrics.PREFIX}\w+)(?:{{([^}}]*)}})?", query)
    assert found, "a query without a metric shows nothing of ours"
    for metric, selector in found:
        assert metric in DECLARED
        used = set(re.findall(r'(\w+)="', selector))
        assert used <= TARGET_LABELS | set(DECLARED[metric].labels), query
        assert {"namespace", metrics.JOB_LABEL} <= used, "shows other jobs, too"
    grouped = {label for labels in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r"\s*,\s*", labels)}
    assert grouped <= TARGET_LABELS.union(*(DECLARED[metric].labels for metric, _ in found))


@pytest.mark.parametrize(("name", "query"), queries())
def test_counters_are_read_as_rates_and_gauges_are_not(name: str, query: str) -> None:
    for function, metric in re.findall(r"(?:(\w+)\()?(spillway_\w+)", query):
        assert (function in ("rate", "increase")) is (DECLARED[metric].kind == "counter"), query


@pytest.mark.parametrize("name", FILES)
def test_legends_name_labels_that_their_queries_keep(name: str) -> None:
    for panel in panels(name):
        for target in panel["targets"]:
            named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            grouped = {
                label for labels in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in labels.split(", ")
            }
            assert named <= grouped, target


@pytest.mark.parametrize("name", FILES)
def test_every_variable_is_defined_and_filled_in(name: str) -> None:
    defined = {variable["name"] for variable in model(name)["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)\}?", FILES[name].read_text(encoding="utf-8")))
    assert used - {"__rate_interval", "__range"} == defined
    assert [query for _, query in queries() if "$" in query] == []


def test_expressions_fill_in_what_they_are_given() -> None:
    found = dashboards.expressions(model("job"), "n", "j", window="7s", shown="9m")
    assert found[0] == f'max({metrics.STEP.name}{{namespace="n",{metrics.JOB_LABEL}="j"}})'
    assert any("[7s]" in query for query in found)
    assert any(f"[9m:{dashboards.RESOLUTION}]" in query for query in found)
    assert len(found) == sum(len(panel["targets"]) for panel in panels("job"))


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
        assert max(x for x, _ in cells) < dashboards.COLUMNS
        taken |= cells
    bottom = max(y for _, y in taken) + 1
    assert len(taken) == bottom * dashboards.COLUMNS, "a gap"
    ids = [panel["id"] for panel in model(name)["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboards_show_every_series_of_a_trainer() -> None:
    """What is exported and shown nowhere is either a panel that is missing or a series that nobody needs."""
    shown = set(re.findall(rf"{metrics.PREFIX}\w+", " ".join(query for _, query in queries())))
    assert set(DECLARED) - shown == set()


def test_queries_use_no_function_that_nobody_checked() -> None:
    for _, query in queries():
        bare = re.sub(r"{[^}]*}|\[[^]]*\]", "", query)
        words = set(re.findall(r"[a-z_]{2,}", bare)) - set(DECLARED)
        assert words <= KEYWORDS | {"rank", "tier", "phase", "link", "backend", "kind", "member", "state"}, query


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
