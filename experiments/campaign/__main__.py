"""`python -m twinserve.experiments.campaign`."""

import sys

try:
    from twinserve.experiments.campaign.main import main
except ImportError as error:
    print(f"error: the campaign cannot be imported: {error}", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    sys.exit(main())
