"""The values in which members of a sweep differ from their job, as commands show them. Pure.

member -> its values by field below spec (Member.changes) -> a table with a column for each field
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from spillway.api.pod import Member, leaves
from spillway.api.sweep.members import SECTIONS
from spillway.api.sweep.search_space import members_in

from ..console import printable, table
from .sweep_view import UNKNOWN

Values = Mapping[str, Mapping[str, Any]]
"""Member -> field below spec -> its own value."""
NO_VALUES: Values = {}


def values_of(members: Sequence[Member]) -> Values:
    return {one.name: one.changes for one in members}


def values_in(spec: Mapping[str, Any]) -> Values:
    """The members' own values in a spec that is not validated."""
    return {
        str(one.get("name", "")): dict(leaves({name: one.get(name) or {} for name in SECTIONS}))
        for one in members_in(spec)
    }


def fields_of(values: Values) -> dict[str, str]:
    """Field -> heading: the last name of the field's path, or the whole path if two fields end in the same name."""
    fields = dict.fromkeys(field for own in values.values() for field in own)
    last = {field: field.rpartition(".")[2] for field in fields}
    counts = Counter(last.values())
    return {field: name if counts[name] == 1 else field for field, name in last.items()}


def value_cells(own: Mapping[str, Any], fields: Mapping[str, str]) -> list[str]:
    return [value_text(own[field]) if field in own else UNKNOWN for field in fields]


def value_text(value: object) -> str:
    return printable(value if isinstance(value, str) else json.dumps(value))


def values_table(values: Values) -> Table:
    """A row for each member, and a column for each field that a member changes."""
    fields = fields_of(values)
    made = table("member", *map(printable, fields.values()))
    for name, own in values.items():
        made.add_row(printable(name), *value_cells(own, fields))
    return made


def values_sentence(values: Values, name: str) -> str:
    """For example: learningRate 0.00488, seed 75; "" for a member that changes nothing."""
    fields = fields_of(values)
    return ", ".join(f"{fields[field]} {value_text(value)}" for field, value in values.get(name, {}).items())


def values_json(values: Values) -> dict[str, object]:
    """`memberValues` of a JSON document; empty unless members have values of their own."""
    return {"memberValues": values} if any(values.values()) else {}
