"""`python -m twinserve.experiments.bros`."""

from twinserve.experiments.bros.main import STUDY

if __name__ == "__main__":
    STUDY.main()
