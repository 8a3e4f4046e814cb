"""What all errors about input have in common. Below every room."""


class TwinserveError(Exception):
    """Something is wrong with what was given, or cannot be done with it: a line that says what,
    where, and what to do. Any other exception is a defect of twinserve."""


def worded(error: BaseException) -> str:
    """What it says, in one line that is never empty. An exception that came without a word, as a
    library's TimeoutError() or a bare MemoryError, is called by its kind, and by what it came
    after."""
    chain: list[BaseException] = []
    after: BaseException | None = error
    while after is not None and after not in chain:
        words = " ".join(str(after).split())
        if any(sign.isalnum() for sign in words):  # KeyError("") says two quotes
            return ", after ".join([*(type(each).__name__ for each in chain), words])
        chain.append(after)
        after = after.__cause__ or after.__context__
    return ", after ".join(type(each).__name__ for each in chain)
