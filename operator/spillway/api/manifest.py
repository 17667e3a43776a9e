"""Parses a YAML file into a typed model, or lists every error in it.

This module knows YAML and pydantic. All it knows of training is what fields were called before (earlier.py).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, NoReturn, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from spillway.api.earlier import problem_of_earlier
from spillway.api.field_types import EXAMPLES
from spillway.errors import FieldProblem, InvalidJob, UserError

Location = tuple[str | int, ...]
Lines = dict[Location, int]
M = TypeVar("M", bound=BaseModel)

_MAX_FILE_BYTES = 1 << 20
_KINDS = ("TrainingJob", "NodeProfile", "MemoryProfile")
_MAX_DIGITS = 40
"""Largest number of digits of an integer. YAML reads a longer one as text."""
_TOO_LONG = re.compile(rf"[-+]?[0-9_]{{{_MAX_DIGITS + 1},}}")
_MAX_VALUES = 20_000
"""Largest number of values in one manifest after aliases are expanded. Nested aliases can stand for billions of
values."""
_TYPES = {f"tag:yaml.org,2002:{name}" for name in ("map", "seq", "str", "int", "float", "bool", "null")}
_TRUE_AND_FALSE = ("true", "false", "True", "False", "TRUE", "FALSE")


class _Loader(yaml.SafeLoader):
    """YAML's safe loader without the YAML 1.1 surprises: no dates, no base-60 and no leading-zero octal numbers."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":int", ":float"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(rf"^[-+]?(0|[1-9][0-9_]{{0,{_MAX_DIGITS - 1}}})$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9]+\.[0-9]*([eE][-+]?[0-9]+)?$"), list("-+0123456789")
)


def read_text(path: Path, kind: str = "TrainingJob") -> str:
    """Returns the text of a manifest. Raises UserError if the file cannot be read, is too long or is not UTF-8."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; give the path of a {kind} in YAML") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); give the path of a {kind} in YAML") from None
    if len(raw) > _MAX_FILE_BYTES:
        raise UserError(f"{path}: more than {_MAX_FILE_BYTES} bytes; give the path of a {kind} in YAML")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8 text") from None


def parse(
    model: type[M] | Callable[[dict[str, Any]], type[M]], text: str, source: str, ignored: Sequence[Location] = ()
) -> M:
    """Validates a YAML document against `model`, or against the model that the function `model` chooses for the
    document. `ignored` locations (set by servers) are removed first.

    Raises InvalidJob with every wrong field.
    """
    document, lines, problems = _read_yaml(text, source)
    model = model if isinstance(model, type) else model(document)
    _reject_another_kind(model, document, source)
    if problems:
        raise InvalidJob(source, problems)
    for location in ignored:
        _drop(document, location)
    return validate(model, document, source, lines)


def validate(model: type[M], document: dict[str, Any], source: str, lines: Lines | None = None) -> M:
    """Validates a document that is plain data already, for example from an API server. Problems name a line only if
    `lines` has one for their location.

    Raises InvalidJob with every wrong field.
    """
    lines = lines or {}
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise InvalidJob(source, [p for detail in found for p in _translate(model, detail, lines, document)]) from None


def _reject_another_kind(model: type[BaseModel], document: Mapping[str, Any], source: str) -> None:
    """Raises UserError for another kind of Spillway's own objects, because every field of it would be wrong. An unknown
    kind is reported later, as one wrong field among others."""
    given, field = document.get("kind"), model.model_fields.get("kind")
    wanted = get_args(field.annotation) if field is not None else ()
    if wanted and given in _KINDS and given not in wanted:
        raise UserError(f"{source}: is a {given}, but a {wanted[0]} is expected; give a {wanted[0]} instead")


def _read_yaml(text: str, source: str) -> tuple[dict[str, Any], Lines, list[FieldProblem]]:
    try:
        loader = _Loader(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        _reject(source, f"line {line}", "", f"not valid YAML: character U+{ord(text[error.position]):04X}; remove it")
    try:
        node = loader.get_single_node()
        if node is None:
            _reject(source, "the file", "empty", "write a map with apiVersion, kind, metadata and spec")
        if not isinstance(node, yaml.MappingNode):
            kind = "a list" if isinstance(node, yaml.SequenceNode) else "a single value"
            _reject(source, "the file", kind, "write a map with apiVersion, kind, metadata and spec")
        lines: Lines = {}
        problems = list(_inspect(node, (), lines))
        document = {} if problems else loader.construct_document(node)
    except yaml.composer.ComposerError as error:
        problem = "more than one document; write one per file"
        if error.problem != "but found another document":
            problem = f"not valid YAML: {(error.context or error.problem or '').removesuffix('; first occurrence')}"
        _reject(source, _place(error.problem_mark), "", problem)
    except yaml.MarkedYAMLError as error:
        _reject(source, _place(error.problem_mark), "", f"not valid YAML: {error.problem or error.context}")
    except RecursionError:
        _reject(
            source,
            "the file",
            "",
            "nested too deeply, or an alias that contains itself; a manifest has about a dozen levels",
        )
    except (yaml.YAMLError, ValueError) as error:
        _reject(source, "the file", "", f"not valid YAML: {str(error).splitlines()[0]}")
    finally:
        loader.dispose()
    return document, lines, problems


def _reject(source: str, where: str, given: str, problem: str) -> NoReturn:
    raise InvalidJob(source, [FieldProblem(where, given, problem)]) from None


def _place(mark: yaml.Mark | None) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"


def _inspect(node: yaml.Node, location: Location, lines: Lines) -> Iterator[FieldProblem]:
    """Records the line of every value. Yields problems for duplicate keys, keys that are not names (such as merge
    keys), values with a type that JSON does not have, and YAML 1.1 booleans."""
    line = node.start_mark.line + 1
    lines[location] = line
    if len(lines) > _MAX_VALUES:
        raise ValueError(f"more than {_MAX_VALUES} values once aliases are expanded; write a shorter manifest")
    if node.tag not in _TYPES:
        tag = shown(node.tag.replace("tag:yaml.org,2002:", "!!"))
        yield FieldProblem(dotted(location), "", f"no field has the YAML type {tag}; write a plain value (line {line})")
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag.endswith(":merge"):
                wrong = "a key must be a name, not a list or a mapping"
                if isinstance(key_node, yaml.ScalarNode):
                    wrong = "merge keys (<<) are not supported; write the fields out"
                yield FieldProblem(dotted(location), "", f"{wrong} (line {key_line})")
                continue
            key = str(key_node.value)
            inner = (*location, key)
            if key in seen:
                yield FieldProblem(dotted(inner), "", f"given twice, on lines {seen[key]} and {key_line}; keep one")
            seen.setdefault(key, key_line)
            if _is_boolean_word(key_node):
                yield FieldProblem(dotted(inner), key, f"{key!r} means a boolean in YAML; quote it (line {key_line})")
            yield from _inspect(value_node, inner, lines)
            lines[inner] = key_line
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _inspect(item, (*location, index), lines)
    elif _is_boolean_word(node):
        wanted = f"{node.value!r} means true or false in YAML 1.1; write true or false, or quote it (line {line})"
        yield FieldProblem(dotted(location), str(node.value), wanted)


def _is_boolean_word(node: yaml.Node) -> bool:
    """Whether the value is a word such as yes, no, on or off, which kubectl reads as a boolean and most people as a
    word."""
    return bool(
        isinstance(node, yaml.ScalarNode) and node.tag == "tag:yaml.org,2002:bool" and node.value not in _TRUE_AND_FALSE
    )


def dotted(location: Location) -> str:
    """("spec", "members", 0, "name") -> "spec.members[0].name". Characters that could control a terminal are
    escaped."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += ("." if path else "") + (part if part.isprintable() else repr(part))
    return path or "the file"


def _drop(document: dict[str, Any], location: Location) -> None:
    inner: Any = document
    for part in location[:-1]:
        inner = inner.get(part) if isinstance(inner, dict) else None
    if isinstance(inner, dict):
        inner.pop(location[-1], None)


# --- pydantic's errors in our words -----------------------------------------------------------------------------------


def _translate(model: type[BaseModel], detail: ErrorDetails, lines: Lines, document: object) -> Iterator[FieldProblem]:
    location, context = tuple(detail["loc"]), dict(detail.get("ctx", {}))
    if detail["type"] == "default_factory_not_called":
        return  # the default depends on a field that is itself wrong, and reported
    if detail["type"] == "too_short" and len(detail["input"]) > context["actual_length"]:
        return  # entries that are wrong were not counted; they are reported themselves
    if detail["type"] == "rules":
        for field, problem in context["problems"]:
            below = (int(part) if part.isdigit() else part for part in field.split(".") if part)
            inner = (*location, *below)
            yield FieldProblem(dotted(inner), shown(_value_at(document, inner)), _with_line(problem, inner, lines))
        return
    if detail["type"] == "extra_forbidden":
        path = dotted(location)
        problem = problem_of_earlier(path.removeprefix("spec.")) or unknown_field(model, location)
        yield FieldProblem(path, "", _with_line(problem, location, lines))
        return
    if location[-1:] == ("[key]",):
        location = location[:-1]
    given = "" if detail["type"] == "missing" else shown(detail["input"])
    yield FieldProblem(dotted(location), given, _with_line(_problem(detail, context), location, lines))


def _with_line(problem: str, location: Location, lines: Lines) -> str:
    """Adds the line to a problem. For a missing field, it is the line of the map that lacks the field."""
    line = lines.get(location) or lines.get(location[:-1])
    return f"{problem} (line {line})" if line else problem


_PROBLEMS = {
    "missing": "missing; this field is required",
    "bool_type": "true or false is needed, as a plain word",
    "string_type": "a string is needed; quote it",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "too_long": "at most {max_length} entries, found {actual_length}",
    "too_short": "at least {min_length} entries, found {actual_length}",
    "string_too_long": "at most {max_length} characters",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "must match {pattern}{example}",
    "model_type": "a map of fields is needed",
    "model_attributes_type": "a map of fields is needed",
    "dict_type": "a map of fields is needed",
    "list_type": "a list is needed",
    "tuple_type": "a list is needed",
    "value_error": "{error}",
}


def _problem(detail: ErrorDetails, context: Mapping[str, Any]) -> str:
    if detail["type"] == "int_type":
        return _integer_needed(detail["input"])
    if detail["type"] == "literal_error":
        return _wrong_choice(detail["input"], context["expected"])
    context = {name: f"{value:g}" if isinstance(value, float) else value for name, value in context.items()}
    example = EXAMPLES.get(str(context.get("pattern")))
    context["example"] = f", for example {example}" if example else ""
    sentence = _PROBLEMS.get(detail["type"])
    return sentence.format(**context) if sentence else detail["msg"]


def _integer_needed(given: object) -> str:
    """What to write instead of `given`. To YAML 1.1, 3e4 is text and 3.0 is a float, so for these the advice cannot be
    to leave out quotes."""
    text = str(given)
    if _TOO_LONG.fullmatch(text):
        return f"an integer of at most {_MAX_DIGITS} digits is needed"
    if re.fullmatch(r"[-+]?(0|[1-9][0-9_]*)", text):
        return "an integer is needed, without quotes"
    number = re.fullmatch(r"[-+]?[1-9][0-9]*(\.[0-9]*)?([eE]\+?[0-9]{1,2})?", text)
    if number and float(text).is_integer() and abs(float(text)) < 2**53:
        return f"an integer is needed; write {float(text):.0f}"
    return "an integer is needed"


def _wrong_choice(given: object, expected: str) -> str:
    """`expected` is pydantic's list: "'Auto', 'Keep' or 'Host'"."""
    choices = re.findall(r"'([^']*)'", expected)
    named = ", ".join(choice or '""' for choice in choices)
    allowed = f"one of {named}" if len(choices) > 1 else f"must be {named}"
    lower = str(given).lower()
    by_lower = {choice.lower(): choice for choice in choices if choice[:1].lower() == lower[:1]}  # GPU is not Cpu
    widths = {choice: name for choice, name in by_lower.items() if _same_number(lower, choice)}
    near = difflib.get_close_matches(lower, widths, n=1, cutoff=0.6)
    return f"{allowed}; did you mean {by_lower[near[0]]}?" if near and len(choices) > 1 else allowed


def _same_number(given: str, choice: str) -> bool:
    """Whether `given` may be a typing error for `choice`, judging by the numbers at their ends: float16 is not one for
    float32, but fsdp2 may be one for Fsdp, which has no number."""
    numbers = [re.search(r"[0-9]*$", name) for name in (given, choice)]
    ends = {found.group() for found in numbers if found and found.group()}
    return len(ends) < 2


def problem_of_value(model: type[BaseModel], location: Location, value: object) -> str | None:
    """What is wrong with `value` at `location`, regardless of other fields; None if nothing is."""
    field = field_at(model, location)
    assert field is not None
    try:
        alone: Any = Annotated[(field.annotation, Field(), *field.metadata)]
        TypeAdapter(alone).validate_python(value)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        return None if detail["loc"] or detail["type"] == "rules" else _problem(detail, detail.get("ctx", {}))
    return None


def unknown_field(model: type[BaseModel], location: Location) -> str:
    owner = _model_at(model, location[:-1])
    if owner is None:
        return "unknown field"
    names = [field.alias or name for name, field in owner.model_fields.items()]
    by_lower = {name.lower(): name for name in names}
    near = difflib.get_close_matches(str(location[-1]).replace("_", "").lower(), by_lower, n=1, cutoff=0.6)
    if near:
        return f"unknown field; did you mean {by_lower[near[0]]}?"
    return f"unknown field; the fields here are {', '.join(names)}"


def field_at(model: type[BaseModel], location: Location) -> FieldInfo | None:
    owner = _model_at(model, location[:-1])
    fields = {} if owner is None else {field.alias or name: field for name, field in owner.model_fields.items()}
    return fields.get(str(location[-1]))


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model class that validates the value at `location`."""
    current: type[BaseModel] | None = model
    for part in location:
        if current is None:
            return None
        if isinstance(part, int):
            continue
        fields = {field.alias or name: field for name, field in current.model_fields.items()}
        current = _model_in(fields[part].annotation) if part in fields else None
    return current


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The model inside `X`, `X | None` or `tuple[X, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, UnionType, tuple):
        return next((found for found in map(_model_in, get_args(annotation)) if found), None)
    return None


def _value_at(document: object, location: Location) -> object:
    for part in location:
        try:
            document = document[part]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            return None
    return document


def shown(value: object) -> str:
    """A value as error messages show it: short, and as the user wrote it."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    if isinstance(value, bool):
        return "true" if value else "false"
    text = str(value) if isinstance(value, int | float) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
