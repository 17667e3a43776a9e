"""Bad manifests written by hand (fixtures/bad_manifests): each is the good job with one mistake, and its rejection.

at, write     the field, and what a user writes there, as YAML; `remove: true` removes the field
with          other fields that are set, so that no other rule is violated
path, given   the path in the rejection, and the value that it shows; default: `at`, and what was written
allowed       what is allowed instead, in Spillway's words
server        the same in the API server's words, if EQUIVALENT does not give them
by            `condition`: the API server accepts it, and the operator rejects; default: the API server rejects
suspended     spec.suspend of the existing job that is changed, for mistakes that are changes
claims        PersistentVolumeClaims that exist, with their access modes
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import yaml

from harness.cluster_model import FACTS, NAMESPACE, UID
from harness.observations import NOW
from harness.places import FIXTURES
from spillway.placement.cluster_view import ClusterView
from spillway_operator.decide.observed import Claim, JobObject, Observed
from spillway_operator.decide.reconcile import reconcile

FOLDER = FIXTURES / "bad_manifests"
GOOD: dict[str, Any] = yaml.safe_load((FOLDER / "good.yaml").read_text(encoding="utf-8"))
TOPICS = sorted(file.stem for file in FOLDER.glob("*.yaml") if file.stem != "good")
CHANGES, CLUSTER = "changes", "cluster"
"""topics whose mistakes do not show in a single manifest"""
_MARK = "written-{}-here"


@dataclass(frozen=True, slots=True)
class Mistake:
    topic: str
    at: str
    write: str
    """empty: the field is removed"""
    path: str
    given: str
    """empty if there is no value to show, because the field is missing or unknown"""
    allowed: str
    server: str = ""
    by_condition: bool = False
    others: dict[str, str] = field(default_factory=dict)
    suspended: bool = False
    claims: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.topic}: {self.at}: {self.write or 'removed'}"

    @property
    def text(self) -> str:
        """The manifest as the user wrote it."""
        return manifest({self.at: self.write, **self.others})

    @property
    def words(self) -> tuple[str, ...]:
        """The texts that Spillway's rejection must contain."""
        return tuple(word for word in (self.path, self.given, self.allowed) if word)


def mistakes(topic: str) -> list[Mistake]:
    """The mistakes of a topic, in the file's order. Scalars of the file are read as strings, because `write` is YAML
    that the user wrote."""
    text = (FOLDER / f"{topic}.yaml").read_text(encoding="utf-8")
    return [_mistake(topic, entry) for entry in yaml.load(text, Loader=yaml.BaseLoader)]


def all_mistakes() -> list[Mistake]:
    return [mistake for topic in TOPICS for mistake in mistakes(topic)]


def _mistake(topic: str, entry: dict[str, Any]) -> Mistake:
    known = {"at", "write", "remove", "with", "path", "given", "allowed", "server", "by", "suspended", "claims"}
    assert set(entry) <= known, f"{topic}: {entry}"
    write, path = entry.get("write", ""), entry.get("path", entry["at"])
    return Mistake(
        topic=topic,
        at=entry["at"],
        write=write,
        path=path,
        given=entry.get("given", "" if topic == "unknown_fields" or not write else write),
        allowed=entry["allowed"],
        server=entry.get("server", ""),
        by_condition=entry.get("by") == "condition",
        others=entry.get("with", {}),
        suspended=entry.get("suspended") == "true",
        claims=entry.get("claims", {}),
    )


# --- manifests --------------------------------------------------------------------------------------------------------


def manifest(written: dict[str, str]) -> str:
    """The good job with YAML texts at dotted paths; an empty text removes the field."""
    made, texts = copy.deepcopy(GOOD), {}
    for number, (path, text) in enumerate(written.items()):
        *parents, last = path.split(".")
        place = made
        for parent in parents:
            place = place.setdefault(parent, {})
        if text:
            texts[_MARK.format(number)] = text
            place[last] = _MARK.format(number)
        else:
            del place[last]
    found = yaml.safe_dump(made, sort_keys=False, allow_unicode=True)
    for mark, text in texts.items():
        found = found.replace(mark, text)
    return found


class _AsKubectl(yaml.SafeLoader):
    """Reads YAML as kubectl does: as YAML 1.1, except that 3e-4 is a number."""


_AsKubectl.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def as_kubectl_sends_it(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.load(text, Loader=_AsKubectl)
    return found


def stored(suspended: bool) -> dict[str, Any]:
    """The existing job that a mistake changes."""
    made = copy.deepcopy(GOOD)
    made["spec"]["suspend"] = suspended
    return made


# --- what the API server says -----------------------------------------------------------------------------------------

PATTERN = "in body should match '^"
EQUIVALENT: tuple[tuple[str, str], ...] = (
    (r"at least (\d+) entries.*", r"should have at least \1 items"),
    (r"at most (\d+) entries.*", r"must have at most \1 items"),
    (r"at most (\d+) characters", r"may not be more than \1 bytes"),
    (r"at least (\d+)", r"should be greater than or equal to \1"),
    (r"at most (\d+)", r"should be less than or equal to \1"),
    (r"an integer is needed", r"must be of type int"),
    (r"true or false is needed", r"must be of type boolean"),
    (r"a string is needed", r"must be of type string"),
    (r"a map of fields is needed", r"must be of type object"),
    (r"a list is needed", r"must be of type array"),
    (r"must not be empty", r"should be at least 1 chars long"),
    (r"this field is required", r"Required value"),
    (r".*found none", r"is needed; found []"),
    (r"found (\w+) and (\w+)", r'is needed; found ["\1", "\2"]'),
    (r"(.*multiple of .*) \(\d+ x \d+\)", r"\1 ("),
    (r"a number >= 0 is needed", r"must be of type string"),
    (r"a quantity is needed|.*2 or 500m|at most 32 characters", r"must be of type integer,string"),
    (r".*Ki, Mi, Gi, Ti|.*2 or 500m", r"should be greater than or equal to 1"),
    (r"more than 0", r"should be greater than or equal to 1"),
    (r".*means true or false in YAML 1.1", r"must be of type string"),
)
"""(pattern of what Spillway says is allowed, the API server's words for the same)"""


def said_by_the_server(mistake: Mistake, message: str, sentence: str) -> list[str]:
    """Returns what the API server's message lacks: the path, the value, or what is allowed. `sentence` is Spillway's
    own message.

    For a value of a wrong type, the API server shows only the type. For a field that it does not know, or that a rule
    of the object above rejects, it shows only the path.
    """
    if is_unknown_field(message):
        return [] if mistake.path in message else [mistake.path]
    lacks = [] if mistake.path in message else [mistake.path]
    value = mistake.given.strip("'")
    is_typed = re.search(r'Invalid value: (?:"(string|integer|number|boolean|array|object|float64)?"|[a-z])', message)
    if value and value[:20] not in message and not is_typed and not re.search(r"found |items|Too long", message):
        lacks.append(value)
    return lacks if _says_what_is_allowed(mistake, message, sentence) else [*lacks, mistake.allowed]


def is_unknown_field(message: str) -> bool:
    """Whether the API server rejected a manifest while decoding it. It then names every field that the schema does not
    have, and suggests none."""
    return "strict decoding error: unknown field" in message


def _says_what_is_allowed(mistake: Mistake, message: str, sentence: str) -> bool:
    if mistake.server:
        return mistake.server in message
    choices = re.search(r': (?:one of|must be) (["\w, ]+?)(?:;| \(line|$)', sentence)
    if choices:
        return all(f'"{choice.strip(chr(34))}"' in message for choice in choices[1].split(", "))
    if mistake.allowed in message or PATTERN in message:
        return True
    return any(
        re.sub(ours, theirs, mistake.allowed) in message
        for ours, theirs in EQUIVALENT
        if re.fullmatch(ours, mistake.allowed)
    )


# --- what the operator says -------------------------------------------------------------------------------------------


def rejection_in_cluster(mistake: Mistake, spec: dict[str, Any]) -> str:
    """Reason and message of the condition that keeps a job with this spec from starting; empty if there is none. The
    cluster has the mistake's claims, and its nodes cannot be read."""
    claims = tuple(
        Claim(name, exists=name in mistake.claims, access_modes=tuple(filter(None, [mistake.claims.get(name, "")])))
        for name in claims_of(spec)
    )
    desired = reconcile(observed_spec(spec, claims=claims), NOW)
    conditions = {found["type"]: found for found in (desired.status or {}).get("conditions", ())}
    rejected = [
        found for type_ in ("Accepted", "Planned") if (found := conditions.get(type_, {})).get("status") == "False"
    ]
    return f"{rejected[0]['reason']}: {rejected[0]['message']}" if rejected else ""


def claims_of(spec: dict[str, Any]) -> set[str]:
    """Names of all claims that a spec mounts, in any of its fields."""

    def named(value: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from ([value["claim"]] if isinstance(value.get("claim"), str) else [])
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        for one in inner:
            yield from named(one)

    return set(named(spec))


def observed_spec(spec: dict[str, Any], claims: tuple[Claim, ...] = (), cluster: ClusterView | None = None) -> Observed:
    """An observation of a new job with this spec."""
    job = JobObject(UID, "good", NAMESPACE, 1, 1, "2026-11-21T10:00:00Z", json.dumps(spec).encode(), b"{}")
    return Observed(
        job=job, facts=FACTS, cluster=cluster or ClusterView(), attempts=(), contracts=(), pods=(), claims=claims
    )
