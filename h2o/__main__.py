"""`python -m h2o` is the command `h2o`."""

import sys

from h2o.cli import main

if __name__ == "__main__":
    sys.exit(main())
