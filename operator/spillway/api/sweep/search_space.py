"""spec.search: a space of hyperparameters, from which the members of a sweep are made.

The members depend on the spec alone: they are the same with every version of Python and on every machine, and a larger
number of trials keeps the members that were there. Draws are digests, and logarithms are decimal, which rounds
correctly everywhere. A change of either would change the members of running jobs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from decimal import ROUND_HALF_EVEN, Context, Decimal, InvalidOperation, localcontext
from fractions import Fraction
from functools import cache, lru_cache
from itertools import product
from math import floor, prod
from types import UnionType
from typing import Annotated, Any, Literal, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, WithJsonSchema, model_validator

from spillway.api.earlier import join
from spillway.api.field_types import (
    LIST_BY_PATH,
    MAX_MEMBERS,
    Count,
    ExactNumber,
    Fields,
    Positive,
    exactly_one,
    quoted,
    reject,
)
from spillway.api.manifest import field_at, problem_of_value, unknown_field
from spillway.api.model import Data, Model
from spillway.api.pod import Member
from spillway.api.training import Training

PATH_PATTERN = r"^(model|data|training)(\.[A-Za-z0-9]+)+$"
OUTSIDE = "must be a field below model, data or training, for example training.optimizer.learningRate"
GIVEN_TWICE = "given twice; keep one"
BOTH_ENDS = "a range needs both min and max; give both, or list values"
STEP_OF_RANGE = "only a range (min and max) has a step; leave it out"
TRIALS_NEEDED = "required with algorithm Random; write the number of members to draw"
MEMBERS_ARE_MADE = "search already makes the members; leave out search or members"
_DIGITS, _DRAWS_PER_TRIAL, _MAX_LENGTH = 6, 100, 1024
_EXACT, _ROUNDED = Context(prec=28, rounding=ROUND_HALF_EVEN), Context(prec=_DIGITS, rounding=ROUND_HALF_EVEN)


def _scalar(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('an integer or a string is needed; write other numbers as strings: "0.1"')
    if len(str(value)) > _MAX_LENGTH:
        raise ValueError(f"at most {_MAX_LENGTH} characters")
    return value


Scalar = Annotated[
    int | str,
    BeforeValidator(_scalar),
    WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": _MAX_LENGTH}),
]


class _Sections(Fields):
    """The sections of a spec that members may change."""

    model: Model
    data: Data
    training: Training


def _known(path: str) -> str:
    section, *names = path.split(".")
    if section not in _Sections.model_fields or not names:
        raise ValueError(OUTSIDE)
    for end in range(1, len(names) + 1):
        location = (section, *names[:end])
        if field_at(_Sections, location) is None:
            raise ValueError(f"{location[-1]}: {unknown_field(_Sections, location)}")
    return path


@cache
def _number_type(path: str) -> type[int] | type[float] | None:
    """Whether the field holds an integer, another number, or neither."""

    def of(annotation: Any) -> type[int] | type[float] | None:
        if annotation in (int, float):
            return annotation  # type: ignore[no-any-return]
        inner = get_args(annotation) if get_origin(annotation) in (Union, UnionType, Annotated) else ()
        return next(filter(None, map(of, inner)), None)

    field = field_at(_Sections, tuple(path.split(".")))
    return of(None if field is None else field.annotation)


class SearchParameter(Fields):
    """A field in which the members differ. Set either values, or min and max."""

    path: Annotated[
        str,
        Field(max_length=128),
        AfterValidator(_known),
        WithJsonSchema({"type": "string", "maxLength": 128, "pattern": PATH_PATTERN}),
    ] = Field(
        description=(
            "Field that is varied, below spec.model, spec.data or spec.training; for example "
            "training.optimizer.learningRate."
        )
    )
    values: Annotated[tuple[Scalar, ...], Field(min_length=1, max_length=MAX_MEMBERS)] | None = Field(
        default=None,
        description=(
            "Values to choose from: integers or strings, written as in the field itself. Set either values, or "
            "min and max."
        ),
    )
    min: ExactNumber | None = Field(
        default=None, description="Smallest value of the range. Must be an integer if the field holds integers."
    )
    max: ExactNumber | None = Field(
        default=None, description="Largest value of the range. Must be an integer if the field holds integers."
    )
    step: ExactNumber | None = Field(
        default=None,
        description=(
            "Distance between two values of the range: min, min + step, ... up to max. Default: 1 if the field "
            "holds integers; otherwise any value of the range is allowed."
        ),
    )
    distribution: Literal["Uniform", "LogUniform"] = Field(
        default="Uniform",
        description=(
            "How Random draws values between min and max. Uniform: all values are equally likely. LogUniform: the "
            "logarithm of the value is distributed uniformly. Values that are not integers are rounded to "
            f"{_DIGITS} significant digits."
        ),
    )

    @model_validator(mode="after")
    def _is_a_space(self) -> Self:
        reject(exactly_one(self, ("values", "min")))
        problems = list(self._wrong_values() if self.values is not None else self._wrong_range())
        for field, value in () if problems else self._written():
            if (problem := problem_of_value(_Sections, tuple(self.path.split(".")), value)) is not None:
                problems.append((field, problem))
        reject(problems)
        return self

    def _wrong_values(self) -> Iterator[tuple[str, str]]:
        if self.max is not None or self.step is not None:
            yield ("max", BOTH_ENDS) if self.max is not None else ("step", STEP_OF_RANGE)
        if self.distribution == "LogUniform":
            listed = "this parameter lists values, which are equally likely; leave it out, or give min and max"
            yield "distribution", listed
        values = self.values or ()
        plain = [_number_or_text(value) for value in values]
        yield from ((f"values.{at}", GIVEN_TWICE) for at, value in enumerate(plain) if value in plain[:at])

    def _wrong_range(self) -> Iterator[tuple[str, str]]:
        if self.min is None or self.max is None:
            yield "max", BOTH_ENDS
        elif (type_ := _number_type(self.path)) is None:
            yield "min", "a range needs a numeric field, but path names another kind of field; list values"
        elif self.min >= self.max:
            yield "min", f"must be less than max ({self.max}); to set a single value, list it in values"
        else:
            for name in ("min", "max", "step"):
                if type_ is int and (value := getattr(self, name)) is not None and value != value.to_integral_value():
                    yield name, "an integer is needed, because the field of path is an integer"
            if self.distribution == "LogUniform" and not self.min:
                yield "min", "must be more than 0 with LogUniform"
            if self.step is not None and self.distribution == "LogUniform":
                yield "step", "LogUniform has no step; leave it out, or use Uniform"
            elif self.step is not None and not 0 < self.step <= self.max - self.min:
                yield "step", f"must be more than 0 and at most max - min ({self.max - self.min})"

    def _written(self) -> Iterator[tuple[str, int | str]]:
        """Yields (where, value) for each value that the user wrote for the field, in the form that the field has."""
        if self.values is not None:
            yield from ((f"values.{at}", value) for at, value in enumerate(self.values))
        for name in ("min", "max"):
            if (value := getattr(self, name)) is not None:
                yield name, self._as_field(value)

    def _as_field(self, value: Decimal | Fraction) -> int | str:
        return int(value) if _number_type(self.path) is int else quoted(float(value))

    @property
    def _ends(self) -> tuple[Decimal, Decimal]:
        return self.min or Decimal(0), self.max or Decimal(0)

    @property
    def _spacing(self) -> Fraction | None:
        """Distance between neighbouring values of a range; None if the range is continuous or logarithmic."""
        if self.step is not None:
            return Fraction(self.step)
        return Fraction(1) if _number_type(self.path) is int and self.distribution == "Uniform" else None

    @property
    def num_points(self) -> int | None:
        """The number of values that the parameter can take; None if they cannot be listed."""
        if self.values is not None:
            return len(self.values)
        (least, largest), spacing = map(Fraction, self._ends), self._spacing
        return None if spacing is None else floor((largest - least) / spacing) + 1

    def point(self, index: int) -> int | str:
        """The value at `index`, of num_points values."""
        if self.values is not None:
            return self.values[index]
        return self._as_field(Fraction(self._ends[0]) + index * (self._spacing or 0))

    def drawn(self, share: Fraction) -> int | str:
        """The value at this share of the space, 0 <= share < 1."""
        if self.num_points is not None:
            return self.point(floor(share * self.num_points))
        (least, largest), is_integer = self._ends, _number_type(self.path) is int
        is_log = self.distribution == "LogUniform"
        with localcontext(_EXACT):
            low, high = (least.ln(), (largest + is_integer).ln()) if is_log else (least, largest)
            value = low + (high - low) * share.numerator / share.denominator
            value = value.exp() if is_log else value
        value = Decimal(floor(value)) if is_integer else _ROUNDED.create_decimal(value)
        return self._as_field(min(max(value, least), largest))


def _share(key: str) -> Fraction:
    """A pseudo-random number from 0 up to, but not including, 1. It is the same for a key everywhere."""
    return Fraction(int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big"), 1 << 64)


class SearchSpace(Fields):
    """Makes the members: trial-00, trial-01, ..."""

    algorithm: Literal["Random", "Grid"] = Field(
        default="Random",
        description=(
            "Random: as many members as trials says, each with a different, randomly drawn combination of values. "
            "Grid: a member for every combination of values; each parameter then needs values or a step, unless "
            "its field holds integers."
        ),
    )
    seed: Count = Field(default=0, description="Seed of the random draws. Grid ignores it.")
    trials: Annotated[Positive, Field(le=MAX_MEMBERS)] | None = Field(
        default=None,
        description=(
            "Random: number of members to make; required. Grid: largest number of members; a larger grid is "
            f"rejected. Default: {MAX_MEMBERS} for Grid."
        ),
    )
    parameters: tuple[SearchParameter, ...] = Field(
        min_length=1,
        max_length=16,
        description="Fields in which the members differ, with the values to try.",
        json_schema_extra=LIST_BY_PATH,
    )

    @model_validator(mode="after")
    def _has_enough_points(self) -> Self:
        paths = [one.path for one in self.parameters]
        problems = [(f"parameters.{at}.path", GIVEN_TWICE) for at, path in enumerate(paths) if path in paths[:at]]
        if self.algorithm == "Grid":
            problems += self._wrong_grid()
        elif self.trials is None:
            problems.append(("trials", TRIALS_NEEDED))
        elif (found := len(self._points())) < self.trials:
            problems.append(("trials", f"the search space has only {found} points; lower trials, or list more values"))
        reject(problems)
        return self

    def _wrong_grid(self) -> Iterator[tuple[str, str]]:
        sizes = [one.num_points for one in self.parameters]
        endless = "Grid tries every value, so it needs a step (with Uniform) or a list of values"
        yield from ((f"parameters.{at}.step", endless) for at, size in enumerate(sizes) if size is None)
        total = prod(size or 1 for size in sizes)
        if None not in sizes and total > (self.trials or MAX_MEMBERS):
            most = f"trials allows {self.trials}" if self.trials else f"a job has at most {MAX_MEMBERS} members"
            where = "trials" if self.trials else "parameters"
            yield where, f"the grid has {total} points, but {most}; list fewer values, or draw some with Random"

    def _points(self) -> list[tuple[int | str, ...]]:
        """Different points of the space; fewer than `trials` if the space has no more."""
        if self.algorithm == "Grid":
            return list(product(*([one.point(at) for at in range(one.num_points or 0)] for one in self.parameters)))
        found, wanted = dict[tuple[int | str, ...], None](), self.trials or 0
        for draw in range(_DRAWS_PER_TRIAL * wanted):
            found[tuple(one.drawn(_share(f"{self.seed} {draw} {one.path}")) for one in self.parameters)] = None
            if len(found) == wanted:
                break
        return list(found)

    @property
    def members(self) -> tuple[Member, ...]:
        made = []
        for index, point in enumerate(self._points()):
            fields: dict[str, Any] = {"name": f"trial-{index:02}"}
            for parameter, value in zip(self.parameters, point, strict=True):
                join(fields, parameter.path.split("."), value)
            made.append(Member.model_validate(fields))
        return tuple(made)


def _number_or_text(value: object) -> object:
    """The number, or else the text, for comparison: 1e-3 and 0.001 are the same value."""
    try:
        return value if isinstance(value, bool) else Decimal(str(value))
    except InvalidOperation:
        return value


@lru_cache(maxsize=256)
def _made_by(search: str) -> tuple[Member, ...]:
    """The members that a search makes, given as JSON; none if it is invalid. Cached, because the operator asks each
    time it looks at a job."""
    try:
        return SearchSpace.model_validate(json.loads(search)).members
    except ValidationError:
        return ()


def members_in(spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Members of an unvalidated spec, listed in it or made by its search; none if these are invalid."""
    if (search := spec.get("search")) is not None:
        return [one.model_dump(mode="json") for one in _made_by(json.dumps(search, sort_keys=True))]
    found = spec.get("members")
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
