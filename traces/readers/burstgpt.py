"""BurstGPT: arrivals and lengths of ChatGPT and GPT-4 requests at a university, in two layouts.

    Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
    Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type

Columns go by name, so both layouts (and reordered ones) read alike. Timestamps are seconds.
Arrivals stay as they were recorded: sessions are not made into closed loops. Rows without response
tokens failed and are dropped. Wang et al., BurstGPT, KDD 2025.
"""

from twinserve.traces.readers.columns import assemble
from twinserve.traces.readers.csvfile import Table
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import Workload

NAME = "burstgpt"
COLUMNS = ("timestamp", "request tokens", "response tokens", "total tokens")


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Workload:
    """The workload of a BurstGPT CSV file. Raises WorkloadError."""
    table = Table(data, path)
    table.require("Timestamp", "Request tokens", "Response tokens")
    return assemble(
        table.rows,
        name=NAME,
        arrival_s=table.rows.number("Timestamp", table.numbers("Timestamp")),
        prompt_tokens=table.rows.whole("Request tokens", table.numbers("Request tokens")),
        output_tokens=table.rows.whole("Response tokens", table.numbers("Response tokens")),
        notices=table.unused(COLUMNS),
    )
