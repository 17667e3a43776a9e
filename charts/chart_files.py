"""Writes what the chart takes from elsewhere into charts/spillway/files; `--check` compares instead.

    dashboards.py       -> files/dashboards/*.json
    recording_rules.py  -> files/rules/nodes.yaml
    alerts.py           -> files/rules/alerts.yaml

files/crds is a link to crds/, which Helm follows when it installs and when it packages.

Run from the root of the repository: `python charts/chart_files.py [--check]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml

import alerts
import dashboards
import grafana
import recording_rules

FILES = Path("charts") / "spillway" / "files"


def wanted() -> dict[Path, str]:
    """Every generated file of the chart with its contents."""
    found = {}
    for dashboard in dashboards.ALL:
        text = json.dumps(grafana.as_json(dashboard), indent=1, ensure_ascii=False)
        found[FILES / "dashboards" / f"{dashboard.name}.json"] = text + "\n"
    for name, rules in (("nodes", recording_rules.as_json()), ("alerts", alerts.as_json())):
        found[FILES / "rules" / f"{name}.yaml"] = yaml.safe_dump(rules, sort_keys=False, width=120)
    return found


def present() -> dict[Path, str]:
    return {path: path.read_text(encoding="utf-8") for path in sorted(FILES.rglob("*")) if path.is_file()}


def main(arguments: list[str]) -> int:
    files, found = wanted(), present()
    if "--check" in arguments:
        wrong = sorted(path for path in files.keys() | found.keys() if files.get(path) != found.get(path))
        for path in wrong:
            sys.stderr.write(f"{path} is out of step with charts/*.py: run `make crds`\n")
        return 1 if wrong else 0
    for path in found.keys() - files.keys():
        path.unlink()
    for path, text in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
