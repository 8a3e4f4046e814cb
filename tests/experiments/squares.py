"""Work for test_grid.py. Its worker processes import this module, which needs nothing else."""

CALLS = []


def square(x: int, seed: int) -> dict:
    CALLS.append((x, seed))
    return {"y": x * x + seed}
