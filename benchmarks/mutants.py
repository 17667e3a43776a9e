"""Mutation testing: mutates the product and finds which tier of the tests kills each mutant.

    uv run --group mutants python benchmarks/mutants.py            # resumes; results in build/mutants/
    uv run --group mutants python benchmarks/mutants.py --report   # the table of the present results

NUMBER mutants, by cosmic-ray's operators, are drawn with SEED from the sources of AREAS: first a place, then one of its
mutations. Mutations of annotations, and of `frozen` and `slots` of dataclasses, do not count. Each mutant is written
into a clone of this checkout (one clone per worker). Only the tests that execute the mutated line run, according to
coverage.py's contexts of one run of the tests in FOLDERS at depth ci. They run shortest first until one fails: those of
`make test`, then those of CI, then the same at depth all, within MOST_SECONDS together. If no test executes the line in
its own process, the mutant is counted apart: the line runs in trainers, operators and images that tests start. A run
that takes three times as long as expected is a kill, too, except at depth all, where the expected time is a guess.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coverage
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / "build" / "mutants"
SEED, NUMBER, MOST_SECONDS, NUM_WORKERS = 20261124, 150, 600.0, 2
OPTIMIZER = (
    "optimizer/plain", "optimizer/loss_scale", "optimizer/schedule", "kernels/dispatch", "kernels/reference",
    "kernels/master_halves",
)  # fmt: skip
TECHNIQUES = ("optimizer_offload", "activation_spill", "model_spill")
AREAS = {
    "domain": (50, [ROOT / "operator/spillway"]),
    "decisions": (35, [ROOT / "operator/spillway_operator/decide"]),
    "techniques": (40, [ROOT / "trainer_image/spillway_trainer" / name for name in TECHNIQUES]),
    "optimizer": (25, [ROOT / f"trainer_image/spillway_trainer/{name}.py" for name in OPTIMIZER]),
}
"""area -> number of its mutants, and its files or folders"""
OPERATORS = re.compile(
    r"core/(ReplaceBinaryOperator_(Add|Sub|Mul|Div|FloorDiv|Mod)_(Add|Sub|Mul|Div|FloorDiv)"
    r"|ReplaceBinaryOperator_(BitOr_BitAnd|BitAnd_BitOr)"
    r"|ReplaceComparisonOperator_(Eq|NotEq|Lt|LtE|Gt|GtE)_(Eq|NotEq|Lt|LtE|Gt|GtE)"
    r"|ReplaceComparisonOperator_(Is_IsNot|IsNot_Is)|ReplaceUnaryOperator_(USub_UAdd|Delete_USub|Delete_Not)|AddNot"
    r"|ReplaceTrueWithFalse|ReplaceFalseWithTrue|ReplaceAndWithOr|ReplaceOrWithAnd|ReplaceBreakWithContinue"
    r"|ReplaceContinueWithBreak|ExceptionReplacer|NumberReplacer|RemoveDecorator|ZeroIterationForLoop)"
)
"""leaves out operators that nearly always raise a TypeError, such as a shift of a float: any test kills such mutants"""
FOLDERS = ("tests/parity", "tests/contract", "tests/unit")
"""tests/local, faults and cluster mostly start processes: the mutants that only they would kill are not counted"""
TIERS = ("quick", "ci", "all")
NAMES = {"quick": "make test", "ci": "CI", "all": "everything"}


@dataclass(frozen=True)
class Mutant:
    area: str
    path: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line} {self.operator.removeprefix('core/')}#{self.occurrence}"


# --- the draw ---------------------------------------------------------------------------------------------------------


def drawn() -> list[Mutant]:
    rng = random.Random(SEED)
    found = []
    for area, (number, places) in AREAS.items():
        files = sorted(path for place in places for path in ([place] if place.is_file() else place.rglob("*.py")))
        sites = {(str(path.relative_to(ROOT)), *site): made for path in files for site, made in sites_of(path).items()}
        order = sorted(sites)
        rng.shuffle(order)
        mutants = (mutant_at(area, site[0], rng.choice(sites[site])) for site in order)
        real = (mutant for mutant in mutants if mutant is not None)
        found += [next(real) for _ in range(number)]
    return found


def sites_of(path: Path) -> dict[tuple[int, int], list[tuple[str, int, int]]]:
    """Returns for each place of a file that can be mutated its mutations: (operator, occurrence, line)."""
    nodes = list(ast_nodes(get_ast(path.read_text(encoding="utf-8"))))
    sites: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
    for name in filter(OPERATORS.fullmatch, operator_names()):
        positions = [place for node in nodes for place, _ in get_operator(name)().mutation_positions(node)]
        for occurrence, place in enumerate(positions):
            sites.setdefault(place, []).append((name, occurrence, place[0]))
    return sites


def mutant_at(area: str, path: str, mutation: tuple[str, int, int]) -> Mutant | None:
    """Returns the mutant, or None if there is none, it computes the same as the original, or it is no Python."""
    operator, occurrence, line = mutation
    source = (ROOT / path).read_text(encoding="utf-8")
    mutated = mutate(source, operator, occurrence)
    if mutated is None or meaning(mutated) in (None, meaning(source)):
        return None
    lines = [pair for pair in zip(source.splitlines(), mutated.splitlines(), strict=False) if pair[0] != pair[1]]
    before, after = lines[0] if lines else ("", "")
    return Mutant(area, path, line, operator, occurrence, before.strip(), after.strip())


def mutate(source: str, operator: str, occurrence: int) -> str | None:
    mutated: str | None = mutate_code(source, get_operator(operator)(), occurrence)
    return mutated


def meaning(source: str) -> str | None:
    """Returns the AST of a module without annotations, `frozen` and `slots`, which compute nothing; None if `source` is
    no Python."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign | ast.arg):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.Call):
            node.keywords = [each for each in node.keywords if each.arg not in ("frozen", "slots")]
    return ast.dump(tree)


# --- which tests execute a line ---------------------------------------------------------------------------------------


class Recorder:
    """A pytest plugin that records which test executes which line of the areas, and the seconds of each test. Every
    worker writes files of its own."""

    def __init__(self, folder: Path) -> None:
        include = [f"{place}/*" if place.is_dir() else str(place) for _, places in AREAS.values() for place in places]
        self.folder, self.seconds = folder, dict[str, float]()
        self.coverage = coverage.Coverage(data_file=str(folder / f"lines.{os.getpid()}"), include=include)
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)
        self._began = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.coverage.switch_context("")
        self.seconds[nodeid] = time.monotonic() - self._began

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        (self.folder / f"seconds.{os.getpid()}.json").write_text(json.dumps(self.seconds))


def pytest_configure(config: Any) -> None:
    """Registers the recorder if pytest runs with `-p mutants` and SPILLWAY_LINES is set."""
    folder = os.environ.get("SPILLWAY_LINES")
    if folder and not (config.option.numprocesses and not hasattr(config, "workerinput")):
        config.pluginmanager.register(Recorder(Path(folder)))


def pytest(tree: Path, depth: str, *arguments: str, limit: float | None = None, **environment: str) -> int:
    """Runs pytest in `tree`. Returns its exit code, or -1 if it took longer than `limit` seconds."""
    command = [str(tree / ".venv/bin/python"), "-P", "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environ = {**os.environ, "SPILLWAY_DEPTH": depth, "PATH": f"{tree}/.venv/bin:{os.environ['PATH']}", **environment}
    supervised = [sys.executable, str(tree / "hack" / "supervised.py")]
    environ["PYTHONPATH"] = f"{tree}/hack:{tree}/benchmarks"
    with (WORK / f"pytest-{tree.name}.log").open("w") as log:
        process = subprocess.Popen([*supervised, *command], cwd=tree, env=environ, stdout=log, stderr=log)
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.terminate()
            process.wait()
            return -1


def record(tree: Path) -> None:
    """Runs the tests at depth ci and records which lines each of them executes."""
    folder = WORK / "lines"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    parallel = ["--numprocesses", str(NUM_WORKERS), "--dist", "loadscope", "--no-loadscope-reorder"]
    code = pytest(tree, "ci", "-p", "mutants", *parallel, *FOLDERS, SPILLWAY_LINES=str(folder))
    if code not in (0, 1):
        sys.exit(f"the suite did not run: exit code {code}, {WORK}/pytest-{tree.name}.log")
    (folder / "complete").touch()


class Lines:
    """The lines and seconds of every test, as `record` wrote them."""

    def __init__(self, tree: Path) -> None:
        self.tree, self.data, self.seconds = tree, [], dict[str, float]()
        for path in (WORK / "lines").glob("lines.*"):
            data = coverage.CoverageData(basename=str(path))
            data.read()
            self.data.append(data)
        for path in (WORK / "lines").glob("seconds.*.json"):
            self.seconds |= json.loads(path.read_text())
        collect = ["--collect-only", "-q", "-o", "addopts=--import-mode=importlib"]
        listed = subprocess.run(
            [str(tree / ".venv/bin/python"), "-m", "pytest", *collect],
            cwd=tree, env={**os.environ, "SPILLWAY_DEPTH": "quick"}, capture_output=True, text=True, check=False,
        ).stdout  # fmt: skip
        self.quick = set(listed.splitlines())

    def tests(self, mutant: Mutant) -> list[str]:
        """Returns the tests that execute the mutated line, shortest first; if the line runs only at import, those that
        execute any line of its file."""
        path = str(self.tree / mutant.path)
        by_line: set[str] = set()
        by_file: set[str] = set()
        for data in self.data:
            for line, contexts in data.contexts_by_lineno(path).items():
                by_file |= {*contexts} - {""}
                if line == mutant.line:
                    by_line |= {*contexts}
        chosen = by_line - {""} or (by_file if "" in by_line else set())
        return sorted(chosen, key=lambda test: self.seconds.get(test, 1.0))


# --- the trial --------------------------------------------------------------------------------------------------------


def tried(mutant: Mutant, tree: Path, lines: Lines) -> dict[str, Any]:
    """Returns which test killed the mutant, and in which tier: "apart" if no test executes the line in its process."""
    found: dict[str, Any] = {**asdict(mutant), "killed_by": None, "test": None}
    tests = lines.tests(mutant)
    found["tests"] = len(tests)
    if not tests:
        return {**found, "killed_by": "apart"}
    path, began = tree / mutant.path, time.monotonic()
    source = path.read_text(encoding="utf-8")
    mutated = mutate(source, mutant.operator, mutant.occurrence)
    assert mutated is not None
    tiers = {"quick": [t for t in tests if t in lines.quick], "ci": tests, "all": tests}
    try:
        path.write_text(mutated, encoding="utf-8")
        for tier, chosen in tiers.items():
            left = MOST_SECONDS - (time.monotonic() - began)
            within, expected = [], 0.0
            for test in chosen:
                expected += lines.seconds.get(test, 1.0) * (4.0 if tier == "all" else 1.0)
                if expected > left:
                    break
                within.append(test)
            if not within:
                continue
            listed = WORK / f"tests-{tree.name}.txt"
            listed.write_text("\n".join(within))
            code = pytest(tree, tier, "-x", f"@{listed}", limit=3 * expected + 60)
            if code == -1 and tier == "all":  # at depth all the expected time is a guess
                found["out_of_time"] = True
            elif code not in (0, 5):
                said = (WORK / f"pytest-{tree.name}.log").read_text(errors="replace")
                failed = re.search(r"^(FAILED|ERROR) (\S.*?)( - |$)", said, flags=re.MULTILINE)
                return {**found, "killed_by": tier, "test": failed[2] if failed else f"exit code {code}"}
            found["untried"] = len(chosen) - len(within)
    finally:
        path.write_text(source, encoding="utf-8")
        found["seconds"] = round(time.monotonic() - began, 1)
    return found


def clone(number: int) -> Path:
    tree = WORK / f"tree-{number}"
    if not tree.exists():
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(tree)], check=True)
    subprocess.run(["git", "-C", str(tree), "pull", "--quiet", "--ff-only"], check=True)
    subprocess.run(["git", "-C", str(tree), "checkout", "--quiet", "."], check=True)
    subprocess.run(["uv", "sync", "--locked", "--quiet", "--group", "mutants"], cwd=tree, check=True)
    return tree


def report(found: list[dict[str, Any]]) -> str:
    rows = ["| area | mutants | executed | " + " | ".join(f"killed by {NAMES[tier]}" for tier in TIERS) + " |"]
    rows.append("|---" * 6 + "|")
    for area in (*AREAS, "all"):
        ours = [one for one in found if area in (one["area"], "all")]
        counts = Counter(one["killed_by"] for one in ours)
        executed = len(ours) - counts["apart"]
        killed = [sum(counts[each] for each in TIERS[: i + 1]) for i in range(len(TIERS))]
        shares = [f"{number} ({number / max(1, killed[-1]):.0%})" for number in killed]
        rows.append(f"| {area} | {len(ours)} | {executed} | " + " | ".join(shares) + " |")
    rate = killed[-1] / max(1, executed)
    rows.append(f"\nShares are of what everything kills, which is {rate:.0%} of what tests execute themselves.\n")
    for title, which in (("Survivors", None), ("Killed by CI, not by make test", "ci"), ("Apart", "apart")):
        rows += [f"\n{title}:\n", "| where | before | after | tests |", "|---|---|---|---|"]
        rows += [
            f"| {one['path']}:{one['line']} | `{one['before']}` | `{one['after']}` | {one['tests']} |".replace(
                "||", "\\|\\|"
            )
            for one in found
            if one["killed_by"] == which
        ]
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", action="store_true", help="the table of what is there; runs nothing")
    parser.add_argument("--again", action="store_true", help="try survivors again, with the tests as they are now")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    results = WORK / "results.jsonl"
    known = {}
    for line in results.read_text().splitlines() if results.exists() else []:
        one = json.loads(line)
        known[one["name"]] = one
    if options.report:
        print(report([*known.values()]))
        return
    mutants = drawn()
    trees = [clone(number) for number in range(NUM_WORKERS)]
    if options.again or not (WORK / "lines" / "complete").exists():
        record(trees[0])
    todo = [one for one in mutants if one.name not in known or (options.again and known[one.name]["killed_by"] is None)]
    lines = Lines(trees[0])

    def work(tree: Path) -> None:
        while todo:
            mutant = todo.pop(0)
            found = {"name": mutant.name, **tried(mutant, tree, lines)}
            known[mutant.name] = found
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(f"{found['killed_by'] or 'SURVIVED':<10} {found.get('seconds', 0):6} s  {mutant.name}", flush=True)

    with ThreadPoolExecutor(NUM_WORKERS) as pool:
        list(pool.map(work, trees))
    print(report([known[mutant.name] for mutant in mutants]))


if __name__ == "__main__":
    main()
