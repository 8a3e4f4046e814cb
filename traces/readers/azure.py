"""Azure LLM inference traces of 2023 and 2024: arrivals and lengths of production requests.

    TIMESTAMP,ContextTokens,GeneratedTokens
    2023-11-16 18:15:46.6805900,374,44

Timestamps are calendar times, with up to nine decimals or none; 2024's end in +00:00. One without a
zone is in UTC. Arrivals are seconds from the first row. Multimodal traces have a column NumImages:
a notice says how many images there were, since nothing here computes an image.
Patel et al., Splitwise, ISCA 2024; Stojkovic et al., DynamoLLM, HPCA 2025.
"""

import numpy as np

from twinserve.traces.readers.columns import assemble
from twinserve.traces.readers.csvfile import Table
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import Workload

NAME = "azure"
COLUMNS = ("timestamp", "contexttokens", "generatedtokens")
IMAGES = "numimages"


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Workload:
    """The workload of an Azure CSV file. Raises WorkloadError."""
    import pyarrow as pa
    import pyarrow.compute as pc

    table = Table(data, path)
    table.require("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    text = table.text("TIMESTAMP")
    zoned = pc.match_substring_regex(text, r"(Z|[+-]\d\d:?\d\d)$|^$")
    stamps = pc.if_else(zoned, text, pc.binary_join_element_wise(text, "Z", ""))
    meaning = "a calendar time (2023-11-16 18:15:46.68, or with a zone, +02:00)"
    when = table.cast("TIMESTAMP", pa.timestamp("ns", "UTC"), meaning, stamps)
    ticks = when.astype(np.int64)
    arrival = (ticks - ticks.min()) / 1e9
    table.rows.number("TIMESTAMP", arrival)
    return assemble(
        table.rows,
        name=NAME,
        arrival_s=arrival,
        prompt_tokens=table.rows.whole("ContextTokens", table.numbers("ContextTokens")),
        output_tokens=table.rows.whole("GeneratedTokens", table.numbers("GeneratedTokens")),
        notices=[*table.unused((*COLUMNS, IMAGES)), *_images(table)],
    )


def _images(table: Table) -> list[str]:
    if IMAGES not in table.columns:
        return []
    images = table.rows.whole("NumImages", table.numbers("NumImages"))
    if not images.any():
        return []
    return [
        f"{int(images.sum())} images in {int((images > 0).sum())} requests (NumImages): their "
        "encoding is not simulated, and of their tokens only those that ContextTokens counts"
    ]
