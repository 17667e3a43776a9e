"""The documentation points at what exists, and its examples work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from harness.places import ROOT
from spillway import metrics
from spillway.api.load import parse_job
from spillway.plan import MemoryPlan
from spillway.planning.hardware import resolve_node
from spillway.planning.planner import make_plan
from spillway_cli.__main__ import app

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCED = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
BUILT = ("build",)
FOLDERS = sorted(
    path.name for path in ROOT.iterdir() if path.is_dir() and path.name not in BUILT and path.name[0] != "."
)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def links(page: Path) -> list[tuple[Path, str]]:
    """(file, section) of every relative link; the section is empty where there is none."""
    found = re.findall(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)", FENCED.sub("", text_of(page)))
    return [((page.parent / target).resolve() if target else page, section) for target, section in found]


def sections(page: Path) -> set[str]:
    """Of every heading, the anchor that GitHub makes of it."""
    made: list[str] = []
    for heading in re.findall(r"^#+ +(.+?) *$", FENCED.sub("", text_of(page)), flags=re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        made.append(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return {f"{name}-{made[:at].count(name)}" if name in made[:at] else name for at, name in enumerate(made)}


@each_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert [str(target) for target, _ in links(page) if not target.exists()] == []


@each_page
def test_every_row_of_a_table_stands_below_its_headings(page: Path) -> None:
    """An empty line ends a table: rows after it are shown as text."""
    lines = ["", *text_of(page).splitlines(), ""]
    begins = [here for here in range(1, len(lines) - 1) if lines[here].startswith("| ") and not lines[here - 1].strip()]
    assert [lines[here] for here in begins if not lines[here + 1].startswith("|---")] == []


@each_page
def test_every_link_to_a_section_finds_it(page: Path) -> None:
    wanted = [(target, section) for target, section in links(page) if section and target.suffix == ".md"]
    assert [f"{target.name}#{section}" for target, section in wanted if section not in sections(target)] == []


@each_page
def test_no_line_is_longer_than_120_columns(page: Path) -> None:
    """But for what programs print, which stands in fenced blocks."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    assert [line for line in text.splitlines() if len(line) > 120] == []


def test_the_operators_page_lists_each_of_its_metrics_and_no_other() -> None:
    listed = re.findall(r"spillway_operator_\w+", text_of(ROOT / "docs" / "operator.md"))
    assert set(listed) == {metric.name for metric in metrics.OPERATOR}


def test_every_page_can_be_reached_from_the_readme() -> None:
    reached, left = set[Path](), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page not in reached:
            reached.add(page)
            left += [target for target, _ in links(page) if target.suffix == ".md" and target.exists()]
    assert [str(page.relative_to(ROOT)) for page in PAGES if page not in reached] == []


@each_page
def test_every_file_that_is_named_in_backticks_exists(page: Path) -> None:
    """A path that begins with a folder of the repository; `*` and `<name>` stand for anything."""
    spans = SPAN.findall(FENCED.sub("", text_of(page)))
    paths = [span for span in spans if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./*<>-]+", span)]
    assert [path for path in paths if not list(ROOT.glob(re.sub(r"<[^>]*>", "*", path).rstrip("/")))] == []


@each_page
def test_every_command_and_option_that_is_written_exists(page: Path) -> None:
    assert [f"{line}: {wrong}" for line in command_lines(text_of(page)) if (wrong := unknown_word(line))] == []


def command_lines(text: str) -> list[str]:
    """What begins with `spillway` in code."""
    blocks = "\n".join(FENCED.findall(text)).replace("\\\n", " ").splitlines()
    spans = SPAN.findall(FENCED.sub("", text))
    code = [line.strip().removeprefix("$ ") for line in (*blocks, *spans)]
    return [line for line in code if re.match(r"spillway [a-z]", line)]


def unknown_word(line: str) -> str:
    """The first subcommand (`ls|verify`: any of them) or option that the parser lacks; empty when there is none."""
    command: Any = typer.main.get_command(app)
    options: set[str] = {"--help"}
    for word in re.split(r" [|>&;#]|\.\.\.", line)[0].split()[1:]:
        name = re.match(r"\[?(--?[a-z][a-z-]*|[a-z]+$)?", word)[1]  # type: ignore[index]
        if name and name.startswith("-"):
            options |= {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
            if name not in options:
                return name
        elif hasattr(command, "commands"):
            known = [command.commands.get(choice) for choice in word.split("|")]
            if None in known:
                return word
            command = known[0]
    return ""


def test_every_file_of_the_architecture_table_exists() -> None:
    rows = [row for row in (ROOT / "docs/architecture.md").read_text().splitlines() if row.startswith("|")]
    missing = []
    for row in rows:
        *_, files, _end = row.split("|")
        folder = ROOT
        for name in re.findall(r"`([\w./*-]+\.(?:py|toml)|[\w./-]+/)`", files):
            path = ROOT / name if "/" in name and (ROOT / name.split("/")[0]).exists() else folder / name
            folder = path.parent
            if not list(path.parent.glob(path.name or ".")):
                missing.append(name)
    assert missing == []


def test_the_readmes_job_is_valid_and_fits_its_budgets() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)
    assert isinstance(make_plan(parse_job(block, "README.md"), resolve_node("cpu")), MemoryPlan)
