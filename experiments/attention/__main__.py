"""`python -m twinserve.experiments.attention`."""

import sys

from twinserve.experiments.attention.main import main

if __name__ == "__main__":
    sys.exit(main())
