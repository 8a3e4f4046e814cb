"""`python -m twinserve.experiments.apart`."""

from twinserve.experiments.apart.main import main

if __name__ == "__main__":
    main()
