"""A simulation whose plans a memory of labels carries out beside it."""


def follow(backend, labels) -> list:
    """From now on `labels` makes each step of `backend`, and what it moves without one. Returns the
    moves of the steps, a list that grows."""
    execute, transfer, moves = backend.execute, backend.transfer, []

    def executed(plan, *args):
        moves.extend(plan.moves)
        labels.step(plan)
        backend.transfer = transfer  # which execute calls
        outcome = execute(plan, *args)
        backend.transfer = without_step
        return outcome

    def without_step(plan, now):
        labels.memory.follow(plan.moves)
        return transfer(plan, now)

    backend.execute, backend.transfer = executed, without_step
    return moves
