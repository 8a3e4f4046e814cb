"""`python -m twinserve.experiments.sensitivity`."""

from twinserve.experiments.sensitivity.main import main

if __name__ == "__main__":
    main()
