"""`python -m lab35`, for where the console script is not on the path."""

import sys

from lab35.cli import main

if __name__ == "__main__":
    sys.exit(main())
