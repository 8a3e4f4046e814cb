"""`python -m twinserve.experiments.routers`."""

from twinserve.experiments.routers.main import STUDY

if __name__ == "__main__":
    STUDY.main()
