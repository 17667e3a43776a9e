"""Which parameters a group has, and what is said of a group that has none."""

from __future__ import annotations

import pytest

from spillway.errors import UserError
from spillway.parameter_groups import Group, groups_by_name

NAMES = ["embed_tokens.weight", "layers.0.norm.weight", "layers.0.mlp.up.weight", "layers.1.norm.weight", "norm.weight"]
TIED = {"head.weight": "embed_tokens.weight"}


def found(*groups: Group) -> dict[str, Group]:
    return groups_by_name(groups, NAMES, TIED)


def rejected(*patterns: str) -> str:
    with pytest.raises(UserError) as caught:
        found(*map(Group, patterns))
    return str(caught.value)


def test_without_groups_no_parameter_is_in_one() -> None:
    assert found() == {}


def test_a_star_stands_for_dots_too() -> None:
    norms = Group("*norm.weight", 0.5)
    assert found(norms) == dict.fromkeys([NAMES[1], NAMES[3], NAMES[4]], norms)


def test_the_first_group_that_matches_counts() -> None:
    first, second = Group("layers.0.*", 0.5), Group("*", 2.0)
    by_name = found(first, second)
    assert [by_name[name] for name in NAMES] == [second, first, first, second, second]


def test_a_pattern_is_matched_whole_and_with_its_capitals() -> None:
    assert "matches no trained parameter" in rejected("norm")
    assert "matches no trained parameter" in rejected("Norm.weight")


def test_a_group_without_parameters_is_rejected_with_the_nearest_names() -> None:
    told = rejected("*", "layers.0.nrom.weight")
    assert told.startswith(
        "spec.training.optimizer.groups[1].match = layers.0.nrom.weight: matches no trained parameter"
    )
    assert "similar among the 5 names: layers.0.norm.weight, layers.1.norm.weight" in told


def test_a_group_whose_parameters_all_belong_to_earlier_ones_is_rejected() -> None:
    told = rejected("layers.*", "layers.0.*")
    assert (
        "all parameters that match already belong to earlier groups (layers.0.norm.weight belongs to the group with "
        "match = layers.*)" in told
    )


def test_a_group_of_a_tied_alias_is_told_whom_to_match() -> None:
    assert "head.weight is tied to embed_tokens.weight and updated with it" in rejected("head.*")
