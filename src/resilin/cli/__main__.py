"""`python -m resilin.cli`, for where the command itself is not on the path."""

import sys

from resilin.cli import main

if __name__ == "__main__":
    sys.exit(main())
