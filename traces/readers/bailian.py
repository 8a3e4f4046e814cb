"""Bailian (Qwen) traces: chats of a production service, with the ids of their 16-token blocks.

    {"chat_id": 159, "parent_chat_id": 55, "timestamp": 61.114, "input_length": 521,
     "output_length": 132, "type": "text", "turn": 2, "hash_ids": [1089, ...]}

Timestamps are seconds. Every row's prompt already holds the whole conversation, with a known
arrival. So turns are replayed at their recorded times, not as closed loops, and the block ids have
what they share. A last block that is only partly filled may lack its id. Wang et al., KVCache Cache
in the Wild, USENIX ATC 2025.
"""

from twinserve.traces.readers import jsonl
from twinserve.traces.readers.columns import assemble, unused
from twinserve.traces.readers.options import ReadOptions
from twinserve.traces.workload import Workload

NAME = "bailian"
BLOCK_TOKENS = 16
# parent_chat_id and turn say what the block ids say too; type is text, image, file or search
FIELDS = tuple(
    "chat_id parent_chat_id turn type timestamp input_length output_length hash_ids".split()
)


def read(data: bytes, path: str, options: ReadOptions = ReadOptions()) -> Workload:
    """The workload of a Bailian file. Raises WorkloadError."""
    rows, where = jsonl.parse(data, path)
    block = options.block_tokens or BLOCK_TOKENS
    prompt = where.whole("input_length", jsonl.required(rows, where, "input_length"))
    hashes = jsonl.column(rows, "hash_ids")
    ids = where.texts("chat_id", jsonl.required(rows, where, "chat_id"))
    for row, name in enumerate(ids):
        if name is None:
            where.fail(row, "chat_id", "is missing")
    return assemble(
        where,
        name=NAME,
        arrival_s=where.number("timestamp", jsonl.required(rows, where, "timestamp")),
        prompt_tokens=prompt,
        output_tokens=where.whole("output_length", jsonl.required(rows, where, "output_length")),
        hash_ids=hashes and where.hash_lists("hash_ids", hashes, prompt, block, 1),
        block_tokens=block,
        ids=ids,
        notices=unused(rows.names, FIELDS),
    )
