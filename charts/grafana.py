"""What a dashboard is, and how Grafana reads it: built with Grafana's own types (grafana-foundation-sdk).

dashboards.py has those of a job, cluster_dashboards.py those of the cluster.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from grafana_foundation_sdk.builders import common as common_builders
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from spillway import metrics
from spillway.metrics import JOB_LABEL, NAMESPACE_LABEL, Metric

Json = dict[str, Any]

COLUMNS = 24
"""of Grafana's grid"""
JOB_LABELS = (NAMESPACE_LABEL, JOB_LABEL)
JOB_PAGE = "job"
"""name of the dashboard that a row of a table opens"""
SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
RATE_WINDOW = "$__rate_interval"
RANGE = "$__range"
RESOLUTION = "5s"
"""of subqueries: shorter than any job that is worth looking at; the server's own default may be longer than one"""


@dataclass(frozen=True, slots=True)
class Query:
    expression: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    description: str
    unit: str
    """Grafana's name of the unit: bytes, Bps, s, percentunit, short, ..."""
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "table"] = "timeseries"
    width: int = 8
    stacked: bool = False
    text: Literal["auto", "name"] = "auto"
    """what a stat shows: its value, or the name of its series"""
    bad_above: float | None = None
    """drawn red from here on"""
    bad_below: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Event:
    """Marks in all graphs, where the expression has a sample."""

    name: str
    expression: str
    colour: str
    at_value: bool = False
    """the mark's time is the sample's value, Unix time in ms"""


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str
    """of its file, and the end of its uid"""
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[str, ...] = ()
    """labels to choose from, each among the values that agree with those before it"""
    variables_of: Metric = metrics.STEPS_PLANNED
    """the series that have these labels"""
    several: bool = False
    """whether a variable may stand for several values or for all; its name is then the label's with an s"""
    events: tuple[Event, ...] = ()


def as_json(dashboard: Dashboard) -> Json:
    """The dashboard's model, for Grafana's sidecar or import."""
    link = builders.DashboardLink("Spillway").type(models.DashboardLinkType.DASHBOARDS).tags(["spillway"])
    built = (
        builders.Dashboard(dashboard.title)
        .uid(f"spillway-{dashboard.name}")
        .description(dashboard.description)
        .tags(["spillway"])
        .editable()
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .link(link.include_vars(True).keep_time(True))
        .with_variable(builders.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
    )
    for index, label in enumerate(dashboard.variables):
        built.with_variable(_variable(dashboard, index, label))
    number = 0
    for row in dashboard.rows:
        number += 1
        built.with_row(builders.Row(row.title).id(number))
        height = 4 if all(panel.kind == "stat" for panel in row.panels) else 8
        for panel in row.panels:
            number += 1
            built.with_panel(_panel(panel).id(number).height(height))
    made = built.build().to_json() | {"annotations": {"list": [_annotation(event) for event in dashboard.events]}}
    model: Json = json.loads(json.dumps(made, cls=JSONEncoder))
    for variable in model["templating"]["list"]:
        del variable["id"]  # the same one in all, and Grafana 10 keeps one variable for each id
    return model


def _variable(dashboard: Dashboard, index: int, label: str) -> builders.QueryVariable:
    """The label's values among those series that agree with the variables before it."""
    chosen = ",".join(f'{name}="${name}"' for name in dashboard.variables[:index])
    made = (
        builders.QueryVariable(f"{label}s" if dashboard.several else label)
        .datasource(SOURCE)
        .query(f"label_values({dashboard.variables_of.name}{{{chosen}}}, {label})")
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
    )
    return made.multi(True).include_all(True).all_value(".*") if dashboard.several else made


def _annotation(event: Event) -> Json:
    """With the fields of the Prometheus source that Grafana's types leave out."""
    made = models.AnnotationQuery(event.name, SOURCE, icon_color=event.colour, expr=event.expression)
    return made.to_json() | {"titleFormat": event.name, "useValueForTime": event.at_value}


def _panel(panel: Panel) -> timeseries.Panel | stat.Panel | table.Panel:
    made: timeseries.Panel | stat.Panel | table.Panel
    if panel.kind == "timeseries":
        made = timeseries.Panel().tooltip(
            common_builders.VizTooltipOptions()
            .mode(common_models.TooltipDisplayMode.MULTI)
            .sort(common_models.SortOrder.DESCENDING)
        )
        legend = common_builders.VizLegendOptions().show_legend(True).placement(common_models.LegendPlacement.BOTTOM)
        made.legend(legend.display_mode(common_models.LegendDisplayMode.LIST).calcs([]))
        if panel.stacked:
            stacking = common_builders.StackingConfig().mode(common_models.StackingMode.NORMAL)
            made.fill_opacity(30).stacking(stacking)
        if panel.bad_above is not None or panel.bad_below is not None:
            style = common_builders.GraphThresholdsStyleConfig()
            made.thresholds_style(style.mode(common_models.GraphTresholdsStyleMode.DASHED))
    elif panel.kind == "stat":
        made = stat.Panel().text_mode(common_models.BigValueTextMode(panel.text))
        made.graph_mode(common_models.BigValueGraphMode.NONE)
        made.reduce_options(common_builders.ReduceDataOptions().calcs(["lastNotNull"]))
    else:
        chosen = [f"var-{label}=${{__data.fields.{label}}}" for label in JOB_LABELS]
        page = f"/d/spillway-{JOB_PAGE}?" + "&".join([*chosen, "var-datasource=${datasource}", "${__url_time_range}"])
        made = table.Panel().data_links([builders.DashboardLink("Open the job's dashboard").url(page)])
    steps = [models.Threshold(color="green")]
    if panel.bad_above is not None:
        steps.append(models.Threshold(panel.bad_above, "red"))
    if panel.bad_below is not None:
        # A line of a graph has the colour below it where its own is transparent.
        above = "transparent" if panel.kind == "timeseries" else "green"
        steps = [models.Threshold(color="red"), models.Threshold(panel.bad_below, above)]
    made.title(panel.title).description(panel.description).datasource(SOURCE).unit(panel.unit).span(panel.width)
    made.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    for index, query in enumerate(panel.queries):
        target = prometheus.Dataquery().ref_id(chr(ord("A") + index)).datasource(SOURCE).expr(query.expression)
        target.legend_format(query.legend or "__auto")
        if panel.kind == "table":
            target.format(PromQueryFormat.TABLE)
        made.with_target(target.range() if panel.kind == "timeseries" else target.instant())
    return made


@dataclass(frozen=True, slots=True)
class Chosen:
    """What Grafana's variables stand for."""

    namespace: str
    training_job: str
    namespaces: str = ""
    """an expression; empty: the namespace alone"""
    window: str = "1m"
    """of rates, as a PromQL duration"""
    shown: str = "1h"
    """the time range of the page"""

    def filled(self, expression: str) -> str:
        values = {
            RATE_WINDOW: self.window,
            RANGE: self.shown,
            f"${NAMESPACE_LABEL}s": self.namespaces or self.namespace,
            f"${NAMESPACE_LABEL}": self.namespace,
            f"${JOB_LABEL}": self.training_job,
        }
        for name, value in values.items():
            expression = expression.replace(name, value)
        return expression


def expressions(dashboard: Json, chosen: Chosen) -> list[tuple[str, str]]:
    """Title and PromQL of every query of a dashboard's JSON, Grafana's variables filled in; then of the annotations."""
    found = [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", [])]
    found += [(annotation["name"], annotation["expr"]) for annotation in dashboard["annotations"]["list"]]
    return [(title, chosen.filled(expression)) for title, expression in found]
