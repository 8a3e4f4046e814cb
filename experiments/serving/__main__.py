"""`python -m twinserve.experiments.serving`."""

from twinserve.experiments.serving.main import main

if __name__ == "__main__":
    main()
