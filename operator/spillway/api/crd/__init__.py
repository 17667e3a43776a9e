"""The CustomResourceDefinitions as code; `python -m spillway.api.crd` writes them into crds/."""

from .definition import (
    DIRECTORY,
    KINDS,
    MEMORY_PROFILE,
    NO_FIELD,
    NODE_PROFILE,
    OPERATOR_CONFIG,
    TRAINING_JOB,
    Kind,
    definition,
    main,
    text,
)
from .rules import MEMBER_SECTIONS, REQUIRED, WRONG_IN_SCRIPTS, WRONG_TOGETHER

__all__ = [
    "DIRECTORY",
    "KINDS",
    "MEMBER_SECTIONS",
    "MEMORY_PROFILE",
    "NODE_PROFILE",
    "NO_FIELD",
    "OPERATOR_CONFIG",
    "REQUIRED",
    "TRAINING_JOB",
    "WRONG_IN_SCRIPTS",
    "WRONG_TOGETHER",
    "Kind",
    "definition",
    "main",
    "text",
]
