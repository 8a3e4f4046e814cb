"""`python -m twinserve.experiments.systems`."""

from twinserve.experiments.systems.main import STUDY

if __name__ == "__main__":
    STUDY.main()
