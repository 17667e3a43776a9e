"""`python -m spillway_trainer.launch DIRECTORY`: process 1 of a trainer pod."""

import sys

from .launcher import main

sys.exit(main(sys.argv[1:]))
