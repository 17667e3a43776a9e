"""The queries of the chart's alerts and dashboards, for tests that ask a real Prometheus."""

from __future__ import annotations

from collections.abc import Collection

import alerts
import dashboards
from grafana import Chosen, as_json, expressions
from harness.patience import wait_until
from testbed.client import Bed

ANSWER_SECONDS = 120.0
"""Prometheus scrapes a job's last values only a little after its end; on a busy machine, asking for all of a dashboard
takes long"""


def alert_query(name: str) -> str:
    (expression,) = (alert.expression for alert in alerts.ALL if alert.name == name)
    return expression


def shown(dashboard: str, namespace: str, job: str = "") -> list[tuple[str, str]]:
    """Title and query of each panel and event of `dashboard`."""
    (model,) = (as_json(one) for one in dashboards.ALL if one.name == dashboard)
    return expressions(model, Chosen(namespace, job))


def panel_query(dashboard: str, title: str, namespace: str, job: str = "") -> str:
    """The first query of the panel or event that is called `title`."""
    return dict(reversed(shown(dashboard, namespace, job)))[title]


def until_it_has_data(bed: Bed, dashboard: str, namespace: str, job: str, but: Collection[str]) -> None:
    """Waits until each query of a dashboard has returned data within the last 10 minutes, so that it also works after
    the job's end. Queries whose title is in `but` may be empty."""
    empty = set[str]()

    def has_data() -> bool:
        empty.clear()
        empty.update(
            f"{title}: {expression}"
            for title, expression in shown(dashboard, namespace, job)
            if title not in but and not bed.query(f"last_over_time(({expression})[10m:2s])")
        )
        return not empty

    wait_until(has_data, why=lambda: f"no data: {empty}", seconds=ANSWER_SECONDS, pause=2.0)
