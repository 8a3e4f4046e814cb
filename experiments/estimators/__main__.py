"""`python -m twinserve.experiments.estimators`."""

from twinserve.experiments.estimators.main import STUDY

if __name__ == "__main__":
    STUDY.main()
