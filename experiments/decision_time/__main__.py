"""`python -m twinserve.experiments.decision_time`."""

from twinserve.experiments.decision_time.main import main

if __name__ == "__main__":
    main()
