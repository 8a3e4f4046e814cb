"""What all errors about input have in common. Below every room."""


class TwinserveError(Exception):
    """Something is wrong with what was given, or cannot be done with it: a line that says what,
    where, and what to do. Any other exception is a defect of twinserve."""
