"""The domain: decides everything, touches nothing.

Standard library, pydantic and PyYAML (parsing only). No module here reads a clock, the environment or randomness: `now`
and `seed` are arguments. YAML -> api -> planner -> plan is the whole path.
"""

from importlib.metadata import version

DISTRIBUTION = "spillway-training"
"""for pip; on the package index `spillway` is another project"""
__version__ = version(DISTRIBUTION)


def install_command(extra: str) -> str:
    """What adds an extra of pyproject.toml to this installation."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
