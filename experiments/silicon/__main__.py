"""`python -m twinserve.experiments.silicon`."""

from twinserve.experiments.silicon.main import main

if __name__ == "__main__":
    main()
