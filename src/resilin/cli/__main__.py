"""`python -m resilin.cli`, for use when the `resilin` command is not on the path."""

import sys

from resilin.cli import main

if __name__ == "__main__":
    sys.exit(main())
