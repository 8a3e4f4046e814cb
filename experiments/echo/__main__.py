"""`python -m twinserve.experiments.echo`."""

from twinserve.experiments.echo.main import STUDY

if __name__ == "__main__":
    STUDY.main()
