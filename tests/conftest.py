"""Settings of every test."""

from hypothesis import settings

# No example is too slow: machines that run tests are shared.
settings.register_profile("spillway", deadline=None)
settings.load_profile("spillway")
