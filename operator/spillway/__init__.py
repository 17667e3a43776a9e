"""The domain: decides everything, touches nothing.

Standard library, pydantic and PyYAML (parsing only). No module here reads a clock, the environment or randomness: `now`
and `seed` are arguments. YAML -> api -> planner -> plan is the whole path.
"""

DISTRIBUTION = "spillway-training"
"""For pip; on the package index `spillway` is another project."""
__version__ = "0.1.0"
