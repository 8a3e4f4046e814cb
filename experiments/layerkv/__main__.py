"""`python -m twinserve.experiments.layerkv`."""

from twinserve.experiments.layerkv.main import STUDY

if __name__ == "__main__":
    STUDY.main()
