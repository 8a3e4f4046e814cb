"""`python -m twinserve.experiments.step_times`."""

from twinserve.experiments.step_times.main import main

if __name__ == "__main__":
    main()
