"""`python -m twinserve.experiments.justitia`."""

from twinserve.experiments.justitia.main import STUDY

if __name__ == "__main__":
    STUDY.main()
