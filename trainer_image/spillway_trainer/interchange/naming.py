"""Maps parameter names between ours and other programs'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spillway.errors import UserError

from .export import huggingface_names, llama_name
from .foreign import Foreign

MOST_NAMED = 3
_PREFIX = "model."

Naming = Callable[[str], Sequence[str]]
"""Our name -> names in other programs, the usual one first."""


def own_names(name: str) -> Sequence[str]:
    """A model that Spillway built from an entry point has only one set of names."""
    return [name]


def class_names(model: Mapping[str, Any]) -> Naming:
    """Returns the names in the class of transformers, or under peft, that a checkpoint's `model` describes
    (Chain.description)."""
    if "lora" in model:
        return lambda name: ["base_model.model." + name.removeprefix(_PREFIX)]
    if "config" in model:
        return lambda name: huggingface_names(model["config"], name)
    if "hidden_size" in model:
        return lambda name: [llama_name(name)]
    return own_names


def matched(foreign: Foreign, shapes: Mapping[str, tuple[int, ...]], naming: Naming) -> dict[str, str]:
    """Returns our name -> the name in `foreign`, of every trained parameter of the job (`shapes`).

    Either all names are the class's, or all are ours. Raises UserError with the first differences: parameters that one
    side lacks, or that have another shape.
    """
    attempts = [_pairs(foreign, shapes, names) for names in (naming, own_names)]
    found = max(attempts, key=len)
    missing = [name for name in shapes if name not in found]
    strangers = sorted(set(foreign.shapes) - {other for name in found for other in _names(foreign, name, naming)})
    differing = [
        f"{found[name]}: {foreign.shapes[found[name]]} in the checkpoint, {shape} in the job"
        for name, shape in shapes.items()
        if name in found and foreign.shapes[found[name]] not in (None, shape)
    ]
    lines = [
        *differing,
        *(f"{naming(name)[0]}: missing from the checkpoint, {shapes[name]} in the job" for name in missing),
        *(f"{name}: trained in the checkpoint, not in the job" for name in strangers),
    ]
    if lines:
        shown = "\n".join(f"  {line}" for line in lines[:MOST_NAMED])
        raise UserError(
            f"{foreign.path}: belongs to another model than spec.model; {len(lines)} parameters differ, the "
            f"first:\n{shown}\ncorrect spec.model, or name a checkpoint of the model in spec.model"
        )
    return found


def _pairs(foreign: Foreign, shapes: Mapping[str, tuple[int, ...]], names: Naming) -> dict[str, str]:
    candidates = {name: [other for other in names(name) if other in foreign.shapes] for name in shapes}
    return {name: others[0] for name, others in candidates.items() if others}


def _names(foreign: Foreign, name: str, naming: Naming) -> set[str]:
    return {other for other in (*naming(name), name) if other in foreign.shapes}
