"""Writes docs/fields.md from the CRDs: every field with its type, default and meaning. `--check` compares instead.

Run from the root of the repository: `python hack/field_reference.py [--check]` (`make crds`).
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from spillway.api.crd import KINDS, MEMBER_SECTIONS, NO_FIELD, Kind, definition
from spillway.api.field_types import NUMBER_PATTERN

PAGE = Path("docs") / "fields.md"
HEAD = """# Fields

Every field of the four kinds of objects, with its type, default and meaning. `kubectl explain` shows the same texts.
`make crds` generates this page from `operator/spillway/api/`. Floats are strings, as in all of Kubernetes (`"1e-3"`);
byte counts are quantities (`96Mi`). [Versions of the API](api-versions.md) lists fields that had other names before.

Words that the descriptions use:

- *attempt*: one start of the job's pods. After a failure the operator starts another attempt, which resumes from the
  last checkpoint. Attempts are numbered 1, 2, 3 and so on.
- *rank*: one training process, with one device
- *tier*: device memory, host memory, or NVMe
- *plan*: for each tier, what the job keeps there and when it is moved. The operator makes it before an attempt starts.
- *spill*: move bytes to host memory or NVMe until they are needed. The *spill file* of a rank is its file on NVMe.
- *member*: one of several models that a job trains (a *sweep*)
- *hardware catalog*: capacities and rates of common GPUs, nodes and drives, which are part of Spillway
- *local run*: `spillway run` on a machine without a cluster
"""


def fields(schema: Mapping[str, Any], path: str) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Yields (path, schema, whether it is required) of each field below `schema`, parents before children."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        if str(field.get("description", "")).startswith(NO_FIELD):
            continue
        inner, here = field, f"{path}.{name}" if path else name
        if field.get("type") == "array":
            inner, here = field["items"], f"{here}[]"
        elif isinstance(field.get("additionalProperties"), Mapping):
            inner = field["additionalProperties"]
        yield here, field, name in required
        if f"spec.{here}" not in MEMBER_SECTIONS:  # these have the same fields as spec
            yield from fields(inner, here)


def type_of(field: Mapping[str, Any]) -> str:
    """Returns a field's allowed values, or else its type, in words."""
    if choices := field.get("enum"):
        return ", ".join(f"`{choice}`" for choice in choices if choice != "")
    if field.get("x-kubernetes-int-or-string"):
        return {None: "integer or string", NUMBER_PATTERN: "number"}.get(field.get("pattern"), "quantity")
    kind = field.get("type", "any")
    return f"list of {type_of(field['items'])}" if kind == "array" else str(kind)


def heading(title: str, schema: Mapping[str, Any]) -> str:
    """Returns a heading, followed by the schema's description if it has one."""
    about = schema.get("description", "")
    return f"\n### {title}\n" + (f"\n{textwrap.fill(about, 120)}\n" if about else "")


def section(title: str, schema: Mapping[str, Any]) -> Iterator[str]:
    yield heading(title, schema)
    for name, field, is_required in fields(schema, ""):
        meaning = " ".join(str(field.get("description", "")).split())
        facts = [type_of(field)]
        if is_required:
            facts.append("required")
        elif (default := field.get("default")) not in (None, {}, [], "") and "Default:" not in meaning:
            facts.append(f"default `{str(default).lower() if isinstance(default, bool) else default}`")
        line = f"- `{name}` ({', '.join(facts)}): {meaning}"
        yield textwrap.fill(line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def page() -> str:
    lines = [HEAD]
    for kind in KINDS:
        lines += reference(kind)
    return "\n".join(lines) + "\n"


def reference(kind: Kind) -> Iterator[str]:
    (version,) = definition(kind)["spec"]["versions"]
    top = version["schema"]["openAPIV3Schema"]["properties"]
    yield f"\n## {kind.kind}\n\n{textwrap.fill(kind.description, 120)}"
    for part in ("spec", "status"):
        schema = top.get(part)
        if schema is None:
            continue
        today = {n: f for n, f in schema["properties"].items() if not f.get("description", "").startswith(NO_FIELD)}
        sections = {name: field for name, field in today.items() if field.get("properties")}
        rest = {name: field for name, field in today.items() if name not in sections}
        if not sections:
            yield from section(part, schema)
            continue
        yield heading(part, schema).rstrip("\n")
        for name, field in sections.items():
            yield from section(f"{part}.{name}", field)
        yield from section(f"other fields of {part}", {"properties": rest, "required": schema.get("required", ())})


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        sys.stderr.write(f"{PAGE} is out of step with operator/spillway/api: run `make crds`\n")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
