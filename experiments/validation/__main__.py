"""`python -m twinserve.experiments.validation`."""

from twinserve.experiments.validation.main import main

if __name__ == "__main__":
    main()
