"""The commands that the documentation pages show, and a shell that runs them as they are written."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from harness.places import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").iterdir())]
RUNBOOKS = ROOT / "docs" / "runbooks.md"
"""Its commands have placeholders and examine a fault. Therefore tests/contract/test_alerts.py only parses them, and
tests/cluster/alone/test_alerts.py runs the commands for the faults that it causes."""
INHIBITED = {
    (firing, silenced): labels
    for firing, others, labels in re.findall(
        r"^\| (Spillway\w+) \| (.*?) \| (.*?) \|$", RUNBOOKS.read_text("utf-8"), re.M
    )
    for silenced in others.split(", ")
}
"""(alert, alert that it silences) -> labels that both must have in common, from the runbook's table"""
SECTIONS = dict(re.findall(r"^## (Spillway\w+)\n(.*?)(?=^## |\Z)", RUNBOOKS.read_text("utf-8"), re.M | re.S))
"""alert -> text of its section in the runbook"""
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
SHELLS = ("bash", "sh", "shell", "console")
PROGRAM = re.compile(
    r"(?:\w+=\S+ )*(?:\S*/)?(?:spillway|python3?|pip|uv|make|kubectl|helm|docker|kind|git|curl|export|mkdir|cd)\s"
)
"""the beginning of a line with a command; a block without a language has commands if one of its lines begins so"""
WATCHES = re.compile(r" (?:--watch|-w)\b")
"""marks a command that runs until somebody ends it"""


def commands_of(page: Path) -> list[str]:
    """The commands of a page, in order and without comments; continued lines are joined."""
    text = page.read_text(encoding="utf-8")
    if page.suffix != ".md":
        comments = re.findall(r"^(?:#  +| {4})(\S.*)$", text, flags=re.MULTILINE)
        return [bare(line) for line in comments if PROGRAM.match(line)]
    return commands_in(text)


def commands_in(text: str) -> list[str]:
    """The commands of a Markdown text, likewise."""
    found: list[str] = []
    for indent, language, body in BLOCK.findall(text):
        lines = [line.removeprefix(indent) for line in body.replace("\\\n", " ").splitlines()]
        if shown := [line[2:] for line in lines if line.startswith("$ ")]:
            found += map(bare, shown)  # the other lines are their output
        elif language in SHELLS or (not language and any(map(PROGRAM.match, lines))):
            found += [bare(line) for line in lines if bare(line)]
    return found


def bare(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"(^|\s+)# .*", "", line)).strip()


def without_makes(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables of the `make` that runs the tests: its ARGS would reach a page's `make`,
    where they belong to another target."""
    return {name: value for name, value in environment.items() if name not in ("ARGS", "MAKEFLAGS", "MAKELEVEL")}


@dataclass
class Shell:
    """Runs commands one after the other in a directory; later commands have the variables that earlier ones
    exported."""

    directory: Path
    environment: Mapping[str, str]
    replaced: Mapping[str, str] = field(default_factory=dict)
    """text of a page -> its replacement in this test"""
    accepted: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """command -> its accepted exit codes; all other commands must exit with 0"""
    exports: list[str] = field(default_factory=list)

    def run(self, command: str) -> str:
        """Runs `command`; returns what it printed. Raises AssertionError if it fails."""
        text = command
        for placeholder, here in self.replaced.items():
            text = text.replace(placeholder, here)
        if text.startswith("export "):
            self.exports.append(text)
        script = "\n".join(["set -e", *self.exports, text])
        started = subprocess.Popen(
            ["bash", "-c", script], cwd=self.directory, env=without_makes(self.environment), text=True, process_group=0,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert started.stdout is not None
        if WATCHES.search(text):
            printed = started.stdout.readline()
            signal_group(started.pid)
            started.communicate()
            assert printed, f"{text}: printed nothing"
            return printed
        try:
            printed = started.communicate()[0]
        finally:
            signal_group(started.pid)
        assert started.returncode in self.accepted.get(command, (0,)), f"{text}: {started.returncode}\n{printed}"
        return printed


def signal_group(group: int) -> None:
    """Ends the processes that are left of a command."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
