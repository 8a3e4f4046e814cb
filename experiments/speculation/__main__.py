"""`python -m twinserve.experiments.speculation`."""

from twinserve.experiments.speculation.main import main

if __name__ == "__main__":
    main()
