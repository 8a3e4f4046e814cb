"""`python -m twinserve.experiments.optimality`."""

from twinserve.experiments.optimality.main import main

if __name__ == "__main__":
    main()
