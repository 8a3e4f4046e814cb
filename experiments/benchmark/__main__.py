"""`python -m twinserve.experiments.benchmark`."""

from twinserve.experiments.benchmark.main import main

if __name__ == "__main__":
    main()
