"""`python -m twinserve.experiments.forms`."""

from twinserve.experiments.forms.main import main

if __name__ == "__main__":
    main()
