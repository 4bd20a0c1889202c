"""`python -m benchmarks`: the same as `h2o bench`, from a checkout."""

import sys

from h2o.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
