"""`python -m twinserve.experiments.from_serving`."""

from twinserve.experiments.from_serving.main import main

if __name__ == "__main__":
    main()
