"""A disk that is full."""

import resource
from contextlib import contextmanager


@contextmanager
def no_file_above(size: int):
    """Bytes; what is written beyond fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
