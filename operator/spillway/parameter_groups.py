"""Parameter groups: parameters with their own learning rate or weight decay.

A parameter belongs to the first group that matches it. A group to which no parameter belongs is a mistake, and raises
UserError.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from spillway.errors import UserError

FIELD = "spec.training.optimizer.groups"
NUM_NEAR = 3
"""Number of names that an error proposes."""


@dataclass(frozen=True, slots=True)
class Group:
    """One group: which parameters it matches, and the settings that differ for them."""

    match: str
    """Glob for parameter names: * matches any characters including dots, ? matches one character, [ab] matches a or
    b."""
    learning_rate_factor: float = 1.0
    weight_decay: float | None = None
    """None: the same as for all other parameters."""


def groups_by_name(groups: Sequence[Group], names: Sequence[str], tied: Mapping[str, str]) -> dict[str, Group]:
    """The group of each of `names`, the trained parameters; parameters in no group are left out. Aliases (the keys of
    `tied`) are updated with their owners and belong to no group themselves.

    Raises UserError for a group that no parameter belongs to.
    """
    found: dict[str, Group] = {}
    for index, group in enumerate(groups):
        matched = [name for name in names if fnmatchcase(name, group.match)]
        new = [name for name in matched if name not in found]
        if not new:
            raise UserError(f"{FIELD}[{index}].match = {group.match}: {_nobody(group, matched, found, names, tied)}")
        found |= dict.fromkeys(new, group)
    return found


def _nobody(
    group: Group, matched: Sequence[str], found: Mapping[str, Group], names: Sequence[str], tied: Mapping[str, str]
) -> str:
    """Why no parameter belongs to the group, and what to do."""
    if matched:
        earlier = found[matched[0]].match
        return (
            f"all parameters that match already belong to earlier groups ({matched[0]} belongs to the group with match "
            f"= {earlier}); move this group before those groups"
        )
    if aliases := [alias for alias in tied if fnmatchcase(alias, group.match)]:
        return f"{aliases[0]} is tied to {tied[aliases[0]]} and updated with it; match {tied[aliases[0]]} instead"
    near = difflib.get_close_matches(group.match, names, n=NUM_NEAR, cutoff=0.0)
    return (
        f"matches no trained parameter; correct the pattern (similar among the {len(names)} names: {', '.join(near)})"
    )
