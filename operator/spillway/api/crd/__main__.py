"""`python -m spillway.api.crd` writes crds/; with `--check` it compares instead. Run it in the root of the
repository."""

import sys

from .definition import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
