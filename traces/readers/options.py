"""A reader's options, and readers of other packages and of files of their own."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from twinserve.own_code import IN_FILE, Names, class_in_file, file_sha256
from twinserve.traces.measurement import Measurement
from twinserve.traces.workload import Workload

DEFAULT_RATE = 1.0


@dataclass(frozen=True)
class ReadOptions:
    """Overrides of what a format fixes, and how arrivals are made for files that have none. What a
    format has no use for is refused (`formats.read_bytes`).

    block_tokens   tokens a hash id covers; None = the format's. Mooncake and Bailian
    time_unit      "ms" or "s"; None = the format's. Mooncake and `custom`
    rate           requests a second of generated Poisson arrivals; None = 1
    seed           of those arrivals
    columns        which column of a CSV file is what (`readers/measured/table.py`)
    benchmark      which benchmark of a report of guidellm, from 1
    """

    block_tokens: int | None = None
    time_unit: str | None = None
    rate: float | None = None
    seed: int = 0
    columns: str | None = None
    benchmark: int | None = None


class TraceReader(ABC):
    """A format of another package (entry point group `twinserve.readers`) or of a file,
    `--format FILE.py:Class`. `name` is the format's."""

    name: ClassVar[str]

    @abstractmethod
    def read(self, data: bytes, path: str, options: ReadOptions) -> Workload | Measurement:
        """What a file says: requests to serve, or how requests were served.

        data  the file's content
        path  for messages

        Raise WorkloadError, with path, line and what to do, for whatever is wrong with the file.
        """


OWN_READERS = Names("trace format", "", {}, "twinserve.readers", TraceReader)


def own_reader(format: str | type[TraceReader]) -> TraceReader | None:
    """The reader of another package, or `FILE.py:Class`, or of this class; None: the name is of
    none. Raises RegistryError for a class that is no reader."""
    if isinstance(format, type):
        return format()
    if format in OWN_READERS.all():
        return OWN_READERS.find(format)()
    if given := IN_FILE.fullmatch(format):
        return class_in_file(OWN_READERS, given["file"], given["cls"] or "")()
    return None


def reader_sha256(format: str | None) -> str | None:
    """Of the file that the reader `FILE.py:Class` is from; None for one from elsewhere."""
    if format is None or not IN_FILE.fullmatch(format):
        return None
    reader = own_reader(format)
    return None if reader is None else file_sha256(type(reader))
