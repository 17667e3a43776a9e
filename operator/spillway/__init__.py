"""The domain: decides everything, touches nothing.

Standard library, pydantic and PyYAML (parsing only). No module here reads a clock, the environment or randomness: `now`
and `seed` are arguments. YAML -> api -> planner -> plan is the whole path.
"""
