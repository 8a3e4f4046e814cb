"""What a worker's KV events say of its cache: names by chaining, copies, gaps and replays."""

import asyncio

import numpy as np
import pytest

pytest.importorskip("msgspec")
pytest.importorskip("zmq")

from tests.route.fronts import prompts_of
from tests.route.kv_publisher import BLOCK, CLEARED, packed, removed, stored
from twinserve.backends.live.route.kv_blocks import (
    END,
    Gap,
    KvBlocks,
    KvStream,
    Message,
    UnreadableError,
    decode,
    message_of,
)
from twinserve.backends.live.route.names import Numbers
from twinserve.sim.fleet.prefix_index import PrefixIndex

TEXT = [(7 * i) % 50 for i in range(6 * BLOCK)]
HUGE = packed(stored(TEXT[:BLOCK], token_ids=[2**63] * BLOCK))
OTHER = TEXT[: 2 * BLOCK] + [99] * (3 * BLOCK)


class Worker:
    """A stream of events into an index, and prompts that are looked up there."""

    def __init__(self) -> None:
        self.prompts = prompts_of()
        self.index = PrefixIndex()
        cache = self.index.add(0)
        self.told: list[tuple[bool, int]] = []

        def tell(stored: bool, contents: np.ndarray) -> None:
            self.told.append((stored, len(contents)))
            (cache.stored if stored else cache.removed)(contents)

        self.blocks = KvBlocks(self.prompts.numbers, BLOCK, tell, self.prompts.adapters, 30)
        self.gaps: list[Gap] = []
        self.stream = KvStream(self.blocks, self.gaps.append)

    def hear(self, *events: dict) -> None:
        self.stream.apply(decode(packed(*events)))

    def live(self, number: int, *events: dict) -> bool:
        return self.stream.live(Message(number, packed(*events)))

    def replayed(self, *batches: tuple[int, dict], first: bool = False) -> None:
        found = [Message(number, packed(event)) for number, event in batches]
        asyncio.run(self.stream.replayed(found, first))

    def matched(self, tokens: list[int], **body) -> int:
        """Leading blocks of a prompt that the worker has."""
        request = self.prompts.request("r", {"prompt": tokens, **body}, 0.0, [])
        return self.index.longest_prefix(0, request.contents(BLOCK))


def test_blocks_have_the_names_that_prompts_give_them():
    worker = Worker()
    worker.hear(stored(TEXT[: 4 * BLOCK]))
    worker.hear(stored(TEXT, first=4))  # a request that went on: its parent is known
    assert worker.matched(TEXT) == 6 and worker.matched(OTHER) == 2
    assert worker.matched(TEXT[: 3 * BLOCK + 5]) == 3
    assert worker.matched([1, *TEXT]) == 0
    worker.hear(removed(TEXT, first=3))
    assert worker.matched(TEXT) == 3 and len(worker.blocks) == 3
    worker.hear(CLEARED)
    assert worker.matched(TEXT) == 0 and len(worker.blocks) == 0


def test_a_text_is_told_of_with_its_first_block_and_its_last():
    worker = Worker()
    for _ in range(2):
        worker.hear(stored(TEXT))
    worker.hear(removed(TEXT))
    assert worker.told == [(True, 6)] and worker.matched(TEXT) == 6
    worker.hear(removed(TEXT), removed(TEXT))  # the last is of blocks that nobody has
    assert worker.told == [(True, 6), (False, 6)] and worker.matched(TEXT) == 0


def test_more_blocks_than_a_worker_has_room_for_empty_the_index():
    """A request with `kv_cache_report_mode: full` makes vLLM tell of each block that it finds, so
    that no number of ends would take them away again."""
    worker = Worker()
    for _ in range(5):
        worker.hear(stored(TEXT))
    assert worker.gaps == [] and worker.matched(TEXT) == 6
    worker.hear(removed(TEXT, first=5), removed(TEXT, first=5), stored(TEXT, first=5))
    assert worker.gaps == []
    worker.hear(stored(TEXT, first=4), removed(OTHER, first=2))  # the second is of nobody's
    assert worker.gaps == [Gap.DROPPED]
    assert worker.matched(TEXT) == 0 and len(worker.blocks) == 0
    worker.hear(stored(OTHER))
    assert worker.matched(OTHER) == 5 and worker.gaps == [Gap.DROPPED]


def test_salts_and_adapters_have_names_of_their_own():
    worker = Worker()
    worker.hear(stored(TEXT, salt="mine"))
    assert worker.matched(TEXT) == 0 and worker.matched(TEXT, cache_salt="yours") == 0
    assert worker.matched(TEXT, cache_salt="mine") == 6
    keys = [["french"]] * 5
    worker.hear(stored(OTHER, lora_name="french", extra_keys=keys, block_hashes=list(range(5))))
    assert worker.matched(OTHER) == 0 and worker.matched(OTHER, model="french") == 5


@pytest.mark.parametrize("more", [{"medium": "CPU"}, {"group_idx": 1}, {"locality": "REMOTE"}])
def test_what_lies_elsewhere_does_not_count(more):
    worker = Worker()
    worker.hear(stored(TEXT, **more))
    assert worker.matched(TEXT) == 0
    worker.hear(stored(TEXT))
    worker.hear(removed(TEXT, **more))
    assert worker.matched(TEXT) == 6


def test_blocks_after_what_was_missed_have_no_names():
    worker = Worker()
    worker.hear(stored(TEXT, first=3))
    worker.hear(stored(TEXT, block_size=2 * BLOCK))
    worker.hear(stored(TEXT[: 2 * BLOCK], token_ids=TEXT[:5]))  # of blocks that were left out
    assert worker.blocks.unnamed == 3 + 6 + 2 and worker.told == []
    worker.hear(stored(TEXT[: 3 * BLOCK]), stored(TEXT, first=3))
    assert worker.matched(TEXT) == 6


def test_a_name_stays_while_a_worker_has_it():
    numbers = Numbers(2)
    assert numbers.hold(b"a") == numbers.of(b"a") == 0
    given = {key: numbers.of(key) for key in (b"b", b"c", b"d")}
    assert given == {b"b": 1, b"c": 2, b"d": 1} and numbers.of(b"a") == 0
    assert numbers.hold(b"a") == numbers.release(b"a") == numbers.release(b"a") == 0
    assert len(numbers) == 3
    assert {numbers.of(key) for key in (b"x", b"y", b"z")} == {0, 1, 2}  # nobody holds one now
    with pytest.raises(KeyError):
        numbers.release(b"a")


def test_a_gap_is_replayed():
    worker = Worker()
    assert not worker.live(0, stored(TEXT[:BLOCK]))
    assert worker.live(2, removed(TEXT, first=2))  # the second one is missing
    assert worker.stream.wanted == 1 and worker.matched(TEXT) == 1
    worker.replayed((1, stored(TEXT, first=1)), (2, removed(TEXT, first=2)))
    assert worker.gaps == [Gap.REPLAYED] and worker.matched(TEXT) == 2
    assert not worker.live(3, CLEARED) and worker.matched(TEXT) == 0


def test_a_gap_that_nobody_fills_drops_what_was_known():
    worker = Worker()
    worker.live(0, stored(TEXT))
    assert worker.live(5, stored(OTHER))
    worker.replayed((4, stored([3] * BLOCK)))  # the buffer begins later
    assert worker.gaps == [Gap.DROPPED]
    assert worker.matched(TEXT) == 2 and worker.matched(OTHER) == 5  # as OTHER alone has it
    assert worker.matched([3] * BLOCK) == 1 and worker.stream.wanted == 6
    assert worker.live(7, stored(TEXT))
    asyncio.run(worker.stream.replayed(None))  # nobody answers
    assert worker.gaps == [Gap.DROPPED] * 2
    assert worker.matched(TEXT) == 6 and worker.matched(OTHER) == 2


def test_a_publisher_that_began_anew_has_an_empty_cache():
    worker = Worker()
    for number in range(3):
        worker.live(number, stored(TEXT))
    assert not worker.live(0, stored(OTHER))
    assert worker.gaps == [Gap.RESTARTED]
    assert worker.matched(TEXT) == 2 and len(worker.blocks) == 5


def test_a_publisher_that_began_anew_before_anything_came_live():
    worker = Worker()
    worker.replayed((0, stored(TEXT)), (1, CLEARED), (2, stored(TEXT)), first=True)
    assert not worker.live(1, CLEARED) and worker.matched(TEXT) == 6  # it came with the replay
    assert not worker.live(0, stored(OTHER)) and worker.gaps == [Gap.RESTARTED]
    other = Worker()
    other.replayed((8, stored(TEXT)), (9, CLEARED), (10, stored(TEXT)), first=True)
    assert other.live(3, stored(OTHER)) and other.gaps == [Gap.RESTARTED]  # its first ones are lost
    assert len(other.blocks) == 0 and other.stream.wanted == 0
    third = Worker()
    third.replayed((0, stored(TEXT)), (1, stored(TEXT)), first=True)
    assert not third.live(0, stored(OTHER)) and third.gaps == [Gap.RESTARTED]
    assert third.matched(TEXT) == 2 and third.matched(OTHER) == 5


def test_what_a_worker_had_before_it_was_listened_to():
    worker = Worker()
    worker.replayed((3, stored(TEXT)), (4, removed(TEXT, first=5)), first=True)
    assert worker.matched(TEXT) == 5 and worker.gaps == []
    assert not worker.live(4, removed(TEXT, first=5))  # it came with the replay
    assert not worker.live(5, stored(TEXT, first=5))
    assert worker.matched(TEXT) == 6
    silent = Worker()  # without a replay socket: from what comes first on
    asyncio.run(silent.stream.replayed(None, first=True))
    assert not silent.live(17, stored(TEXT)) and silent.matched(TEXT) == 6
    assert silent.gaps == [] and silent.live(19, CLEARED)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", packed({"type": "BlockStored"}), packed({"type": "Other"}), b"\x91", HUGE],
)
def test_what_cannot_be_read(payload):
    with pytest.raises(UnreadableError) as error:
        decode(payload)
    assert "\n" not in str(error.value)


def test_messages():
    assert message_of([b"topic", (7).to_bytes(8, "big"), b"x"]) == Message(7, b"x")
    assert message_of([b"", END, b""]) is None
    for frames in ([], [b"x"], [b"", b"1", b""]):
        with pytest.raises(UnreadableError):
            message_of(frames)


def test_fields_of_later_servers_are_passed_over():
    worker = Worker()
    worker.hear(stored(TEXT, session_id="s", new_field={"deep": [1]}))
    assert worker.matched(TEXT) == 6
