"""`python -m twinserve.experiments.route`."""

from twinserve.experiments.route.main import main

if __name__ == "__main__":
    main()
