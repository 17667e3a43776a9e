"""Settings of every test."""

import atexit
import os
import shutil
import tempfile

from hypothesis import settings

# No example is too slow: machines that run tests are shared.
settings.register_profile("spillway", deadline=None)
settings.load_profile("spillway")

# A profile that somebody measured on this machine must not change what tests plan.
STATE = os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="spillway-tests-state-")
atexit.register(shutil.rmtree, STATE, ignore_errors=True)
