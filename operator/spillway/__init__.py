"""The domain: makes all decisions, has no side effects.

It uses the standard library, pydantic and PyYAML (parsing only). No module here reads a clock, the environment or
randomness: `now` and `seed` are arguments. YAML -> api -> planner -> plan is the whole path.
"""

DISTRIBUTION = "spillway-training"
"""Name of the distribution for pip; on the package index, `spillway` is another project."""
__version__ = "0.1.0"
