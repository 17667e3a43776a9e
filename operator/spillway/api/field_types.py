"""The scalar types of the API: spelled as in Kubernetes in YAML, plain numbers in Python.

Number     "3e-4" in YAML (floats do not survive every JSON parser), float in Python
Quantity   24Gi in YAML, bytes as int in Python
Cores      500m in YAML, 0.5 in Python
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    PlainSerializer,
    Strict,
    WithJsonSchema,
)
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from spillway.units import (
    BYTES_PATTERN,
    POSITIVE_BYTES_PATTERN,
    POSITIVE_QUANTITY_PATTERN,
    QUANTITY_PATTERN,
    format_cores,
    format_quantity,
    parse_bytes,
    parse_cores,
)

NUMBER_PATTERN = r"^[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,3})?$"
_NUMBER = re.compile(NUMBER_PATTERN)
MAX_COUNT = 10**12
_MAX_LENGTH = 32
"""Largest number of characters of a number or a quantity, as in the CRD."""


class Fields(BaseModel):
    """A map of the manifest: camelCase in YAML, snake_case in Python. Rejects unknown fields, and cannot be
    modified."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", alias_generator=to_camel, serialize_by_alias=True, protected_namespaces=()
    )


class Written(Fields):
    """A map that Spillway itself writes. It can also be constructed with the names that its fields have in Python."""

    model_config = ConfigDict(populate_by_name=True)


def _to_float(value: object) -> float:
    """Accepts a number of at least 0, with or without quotes. Negative numbers, `inf` and `nan` have no meaning in any
    field of the API."""
    text = str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else ""
    if not _NUMBER.fullmatch(text) or len(text) > _MAX_LENGTH:
        raise ValueError(
            f'a number >= 0 is needed, as a string of at most {_MAX_LENGTH} characters: for example "0.1" or "3e-4"'
        )
    if (number := float(text)) == math.inf:
        raise ValueError("at most 1e308")
    return number


def _to_bytes(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError("a quantity is needed, for example 24Gi")
    text = str(value)
    if text != text.strip() or len(text) > _MAX_LENGTH:
        raise ValueError(f"a quantity of at most {_MAX_LENGTH} characters is needed, without spaces: for example 24Gi")
    return parse_bytes(text)


def _to_cores(value: object) -> float:
    """The number of cores, in whole thousandths of a core, as the API server stores it."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or len(str(value)) > _MAX_LENGTH:
        raise ValueError("a number of cores is needed, for example 2 or 500m")
    return parse_cores(str(value))


def quoted(value: float) -> str:
    """The shortest text that reads back as the same float: 0.0003 -> "0.0003", 1e-08 -> "1e-08"."""
    return repr(value)


_MORE_THAN_NONE = {
    "x-kubernetes-int-or-string": True, "maxLength": _MAX_LENGTH, "pattern": POSITIVE_QUANTITY_PATTERN, "minimum": 1,
}  # fmt: skip
NUMBER_SCHEMA: dict[str, Any] = {"type": "string", "maxLength": _MAX_LENGTH, "pattern": NUMBER_PATTERN}
Number = Annotated[
    float,
    BeforeValidator(_to_float),
    PlainSerializer(quoted, return_type=str),
    WithJsonSchema(NUMBER_SCHEMA),
]


def _to_decimal(value: object) -> Decimal:
    """The number as written, without rounding to a float."""
    _to_float(value)
    return Decimal(str(value))


ExactNumber = Annotated[
    Decimal,
    BeforeValidator(_to_decimal),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": _MAX_LENGTH, "pattern": NUMBER_PATTERN}),
]
"""A number for a field that may also be an integer; an integer is written without quotes."""
Epsilon = Annotated[Number, Field(ge=1e-37, le=1e38)]
"""A value that float32 distinguishes from 0 and from infinity."""
Fraction = Annotated[Number, Field(ge=0.0, le=1.0)]
Quantity = Annotated[
    int,
    BeforeValidator(_to_bytes),
    PlainSerializer(format_quantity, return_type=str),
    WithJsonSchema(
        {"x-kubernetes-int-or-string": True, "maxLength": _MAX_LENGTH, "pattern": BYTES_PATTERN, "minimum": 0}
    ),
]
SomeBytes = Annotated[Quantity, Field(gt=0), WithJsonSchema(_MORE_THAN_NONE | {"pattern": POSITIVE_BYTES_PATTERN})]
"""At least one byte."""
Cores = Annotated[
    float,
    BeforeValidator(_to_cores),
    PlainSerializer(format_cores, return_type=str),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": _MAX_LENGTH, "pattern": QUANTITY_PATTERN}),
]
SomeCores = Annotated[Cores, Field(gt=0.0), WithJsonSchema(_MORE_THAN_NONE)]
"""More than 0 cores."""
Count = Annotated[int, Strict(), Field(ge=0, le=MAX_COUNT)]
Positive = Annotated[int, Strict(), Field(ge=1, le=MAX_COUNT)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Field(max_length=1024)]
MAX_MEMBERS = 64
LIST_BY_NAME: dict[str, JsonValue] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
"""Items are merged by name."""
LIST_BY_PATH: dict[str, JsonValue] = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["path"]}
EXAMPLES: dict[str, str] = {}
"""Pattern of a field -> a value that matches it, for error messages."""


def matching(pattern: str, example: str) -> str:
    """Returns `pattern`, for use in a Field. Errors about values that do not match it show `example`."""
    EXAMPLES[pattern] = example
    return pattern


MemberName = Annotated[
    str, Field(min_length=1, max_length=63, pattern=matching(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "seed-1"))
]
"""Name of a member of a sweep. It is also used as the name of a directory and as the value of a label."""
Name = Annotated[str, Field(min_length=1, max_length=253)]
ClaimName = Annotated[
    str,
    Field(
        min_length=1,
        max_length=253,
        pattern=matching(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$", "my-claim"),
    ),
]
"""A DNS subdomain, because it becomes part of the path of a request and of a mount."""
STAYS_ON_CLAIM = 'must be a relative path on the claim, without ".."'


def _on_the_claim(value: str) -> str:
    if value.startswith("/") or ".." in value.split("/"):
        raise ValueError(STAYS_ON_CLAIM)
    return value


SubPath = Annotated[Text, AfterValidator(_on_the_claim)]
MAX_DOMAIN_LENGTH, MAX_DOMAIN_NAME_LENGTH = 244, 63
"""Largest lengths of the domain and of the name of an extended resource. A quota prepends `requests.` to the domain,
and the result may have at most 253 characters."""
RESOURCE_PATTERN = matching(
    r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$",
    "nvidia.com/gpu",
)
NATIVE_RESOURCES, QUOTA_PREFIX = "kubernetes.io/", "requests."
EXTENDED_RESOURCE_NEEDED = (
    "must be an extended resource: a domain, a slash and a name, for example nvidia.com/gpu. The domain has at most "
    f"{MAX_DOMAIN_LENGTH} characters, does not begin with {QUOTA_PREFIX} and does not end in "
    f"{NATIVE_RESOURCES.rstrip('/')}"
)


def _extended_resource(value: str) -> str:
    """Rejects names of Kubernetes' own resources, as the scheduler does."""
    domain = value.partition("/")[0]
    if len(domain) > MAX_DOMAIN_LENGTH or value.startswith(QUOTA_PREFIX) or NATIVE_RESOURCES in value:
        raise ValueError(EXTENDED_RESOURCE_NEEDED)
    return value


ExtendedResource = Annotated[
    str,
    Field(min_length=1, max_length=MAX_DOMAIN_LENGTH + 1 + MAX_DOMAIN_NAME_LENGTH, pattern=RESOURCE_PATTERN),
    AfterValidator(_extended_resource),
]


def _extended_name(value: str) -> str:
    if not re.fullmatch(RESOURCE_PATTERN, value):
        raise ValueError(EXTENDED_RESOURCE_NEEDED)
    return _extended_resource(value)


ExtendedCounts = Annotated[
    dict[
        Annotated[
            str, Field(max_length=MAX_DOMAIN_LENGTH + 1 + MAX_DOMAIN_NAME_LENGTH), AfterValidator(_extended_name)
        ],
        Positive,
    ],
    Field(max_length=8),
]
"""Extended resource -> count."""
StringMap = Annotated[
    dict[Annotated[str, Field(max_length=317)], Annotated[str, Field(max_length=1024)]], Field(max_length=64)
]
LabelMap = Annotated[
    dict[
        Annotated[str, Field(max_length=317)],
        Annotated[
            str, Field(max_length=63, pattern=matching(r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$", "team-a"))
        ],
    ],
    Field(max_length=64),
]
"""Labels with values that the API server accepts."""


def reject(problems: list[tuple[str, str]]) -> None:
    """Raises one error with all `problems`, pairs of (dotted field below this model, what is allowed); does nothing if
    there are none. For model validators."""
    if problems:
        text = "; ".join(f"{field}: {problem}" if field else problem for field, problem in problems)
        context: dict[str, Any] = {"problems": problems, "text": text}
        raise PydanticCustomError("rules", "{text}", context)


def exactly_one(owner: BaseModel, names: tuple[str, ...]) -> list[tuple[str, str]]:
    """The problem, for `reject`, if not exactly one of the fields is given; empty otherwise."""
    given = [name for name in names if getattr(owner, name) is not None]
    if len(given) == 1:
        return []
    choices = ", ".join(to_camel(name) for name in names)
    found = " and ".join(to_camel(name) for name in given) or "none"
    return [("", f"exactly one of {choices} is needed; found {found}")]
