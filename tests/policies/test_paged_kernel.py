"""The compiled kernel of the paged ledger makes the same changes as the ledger's own Python."""

import numpy as np
import pytest

from tests.parameters import mostly_nightly
from twinserve.native import plain_batch
from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.policies.kv.task_aware.eviction import CountedPool
from twinserve.policies.kv.task_aware.ledger import CountedLedger, TaskAwareLedger
from twinserve.policies.requests import RequestTable

kernel = pytest.importorskip("twinserve.native.paged", reason="the kernels are not compiled here")
BLOCKS, SIZE, SHARED, CHANGES = 40, 4, 30, 150


def state(ledger: PagedLedger) -> dict:
    """All that decides what the ledger does next."""
    pool, more = ledger.pool, {}
    order = [chunk[pool._stamp[chunk] == number] for number, chunk in pool._order]
    if isinstance(pool, CountedPool):
        order = [pool.eviction_order()]
        names = ("rc", "online", "_rank", "_used_at")
        more = {name: getattr(pool, name).tolist() for name in names}
        more["needs"] = (pool.needed, pool.lost)
    return more | {
        "refs": pool.refs.tolist(),
        "content": pool.content.tolist(),
        "found": pool._found_at.tolist(),
        "copies": pool._copies,
        "order": [block for chunk in order for block in chunk.tolist()],
        "blank": pool._blank.units().tolist(),
        "counts": (pool.free, pool.cached, pool.evicted, pool.contents),
        "held": ledger._held.tolist(),
        "published": {row: int(ledger._published[row]) for row in ledger._tables},
        "tables": {row: ledger.blocks_of(row).tolist() for row in ledger._tables},
        "usage": ledger.usage(),
        "users": (ledger._rt_blocks, ledger._rt_refs.tolist()),
    }


class Both:
    """A ledger with the kernel and one without, told the same."""

    def __init__(self, table: RequestTable, kind: type = PagedLedger, **settings) -> None:
        self.ledgers = [kind(table, BLOCKS, SIZE, **settings) for _ in range(2)]
        assert self.ledgers[0]._kernel is kernel
        self.ledgers[1]._kernel = None

    def __getattr__(self, name: str):
        def ask(*arguments):
            first, second = [getattr(ledger, name)(*arguments) for ledger in self.ledgers]
            assert first == second, name
            return first

        return ask

    def compare(self) -> None:
        quick, plain = map(state, self.ledgers)
        assert quick == plain
        self.check()


def prefix_of(rng: np.random.Generator, prompt: int) -> np.ndarray:
    names = np.cumsum(rng.integers(1, 3, prompt // SIZE)) + rng.integers(0, 3)
    names = names[names < SHARED]
    # as a view with gaps, now and then: content ids may be every other one of a trace's
    return names if rng.random() < 0.7 else names.repeat(2)[::2]


def change_at_random(seed: int, kind: type = PagedLedger) -> None:
    rng = np.random.default_rng(seed)
    table = RequestTable()
    caching = seed % 5 > 0
    both = Both(table, kind, prefix_caching=caching, shared_contents=SHARED * caching)
    ahead = bool(seed % 2)
    for ledger in both.ledgers:
        ledger.known_text_only = ahead
    holding: list[int] = []
    dropped: list[int] = []

    def admit(row: int) -> None:
        hits, prompt = both.hit_tokens(row), int(table.known_tokens(row))
        new = int(rng.integers(1, prompt - hits + 1))
        reserve = prompt * int(rng.integers(2))
        if both.admit(row, hits + new, hits, int(rng.integers(3)), reserve):
            table.computed_tokens[row] = hits + new
            holding.append(row)
        else:
            dropped.append(row)

    def grow_one() -> None:
        row = holding[int(rng.integers(len(holding)))]
        upto = max(int(table.known_tokens(row)), int(table.computed_tokens[row]))
        if both.grow(row, upto):
            computed(np.array([row]), np.array([upto]))

    def grow() -> None:
        rows = rng.permutation(holding)[: rng.integers(1, 6)].astype(np.int64)
        known = table.known_tokens(rows) - table.computed_tokens[rows]
        more = np.where(known > 0, known, rng.integers(0, 7, len(rows)))
        upto = table.computed_tokens[rows] + more
        if both.grow_all(rows, upto):
            computed(rows, upto)

    def computed(rows: np.ndarray, upto: np.ndarray) -> None:
        table.computed_tokens[rows] = upto
        short = np.maximum(upto + 1 - table.known_tokens(rows), 0)
        table.output_tokens[rows] += short
        table.in_flight[rows] = ahead & (short > 0)

    def run() -> None:
        rows = rng.permutation(holding)[: rng.integers(1, 6)].astype(np.int64)
        quick, plain = (ledger.block_growth(rows, 11).tolist() for ledger in both.ledgers)
        assert quick == plain
        if steps := both.decode_steps(rows, 9):
            both.extend(rows, steps)
            computed(rows, table.computed_tokens[rows] + steps)

    for _ in range(CHANGES):
        change = rng.integers(8)
        both.begin_step()
        if change < 2:
            prompt = int(rng.integers(1, 40))
            admit(
                table.submit(
                    f"r{len(table)}",
                    prefix=prefix_of(rng, prompt) if caching else None,
                    prompt_tokens=prompt,
                    service_class=int(rng.random() < 0.2 * (seed % 3)),
                )
            )
        elif change == 2 and dropped:
            admit(dropped.pop(int(rng.integers(len(dropped)))))
        elif change < 5 and holding:
            grow() if rng.random() < 0.7 else grow_one()
        elif change == 7 and holding:
            run()
        elif change == 5 and holding:
            row = holding.pop(int(rng.integers(len(holding))))
            if rng.random() < 0.3:
                table.in_flight[row] = table.computed_tokens[row] = 0
                both.drop(row)
                dropped.append(row)
            else:
                both.free(row)
        elif holding:  # a try, in which the kernel leaves all to Python
            mark = both.mark()
            both.grow(holding[0], int(table.computed_tokens[holding[0]]) + SIZE)
            both.free(holding[-1])
            both.rollback(mark)
        both.compare()


@pytest.mark.parametrize("seed", mostly_nightly(range(10), *range(4)))
def test_the_kernel_makes_the_same_changes(seed):
    change_at_random(seed)


@pytest.mark.parametrize("kind", [CountedLedger, TaskAwareLedger])
@pytest.mark.parametrize("seed", mostly_nightly(range(20), *range(4)))
def test_pools_with_an_order_of_their_own_are_asked(seed, kind):
    change_at_random(seed, kind)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(20))
def test_the_kernel_makes_the_same_changes_always(part):
    for seed in range(10 + 20 * part, 30 + 20 * part):
        change_at_random(seed)


def test_what_is_an_error_stays_one():
    table = RequestTable()
    both = Both(table, shared_contents=SHARED)
    row = table.submit("a", prefix=np.arange(3), prompt_tokens=13)
    assert both.admit(row, 13)
    for ledger in both.ledgers:
        with pytest.raises(AssertionError, match="holds 4 blocks"):
            ledger.admit(row, 13)
        with pytest.raises(AssertionError, match="2 cached blocks, 0 are there"):
            ledger.admit(table.submit("b", prefix=np.arange(9, 12), prompt_tokens=13), 13, 8)
        with pytest.raises(IndexError):
            ledger.grow_all(np.array([1_000]), np.array([4]))
    wrong = both.ledgers[0]
    wrong._held = wrong._held.repeat(2)[::2]  # a column with gaps
    with pytest.raises(TypeError, match="without gaps"):
        wrong.grow_all(np.array([row]), np.array([14]))


# -- what the compiled kernel says of many rows is what its plain twin says, to the last bit -------
compiled = pytest.importorskip("twinserve.native.batch", reason="kernels are not compiled here")


@pytest.mark.parametrize("seed", mostly_nightly(range(20), *range(6)))
def test_each_function_does_as_its_twin(seed):
    rng = np.random.default_rng(seed)
    table = RequestTable()
    for i in range(30):
        prompt, output = int(rng.integers(1, 20)), int(rng.integers(0, 3))
        table.submit(
            f"r{i}",
            arrival_s=rng.random(),
            prompt_tokens=prompt,
            output_tokens=output,
            computed_tokens=prompt + output - int(rng.integers(1, 9)),
            slo_ttft_s=rng.choice([np.nan, 0.5]),
            slo_tpot_s=rng.choice([np.nan, 0.05, 0.1]),
            last_token_s=rng.random() if output else np.nan,
            in_flight=int(output and rng.integers(0, 2)),
        )

    def same(name: str, *given):
        ours, theirs = (getattr(module, name)(*given) for module in (compiled, plain_batch))
        np.testing.assert_equal(ours, theirs)
        return ours

    for _ in range(20):
        rows = rng.permutation(30)[: rng.integers(0, 30)]
        if rng.random() < 0.3:
            rows = rows[::-1]  # a view with a stride of its own
        same("due", table, rows)
        same("residual", table, rows, rng.random(), rng.choice([0.0, 0.1]))
        by_gap, now = bool(rng.integers(2)), rng.random()
        same("next_due", table, rows, by_gap)
        if len(rows):
            same("tightest", table, rows, by_gap, now, rng.choice([0.0, 0.07, 0.3]))
        same("split", table, rows, rng.integers(0, 3, len(rows)))
        prefill, new, context = same("next_tokens", table, rows, int(rng.integers(0, 5)))
        same("growth", rng.integers(0, 30, len(rows)), int(rng.integers(1, 40)), 8)
        swapped = rng.integers(0, 3, len(rows)) * 1000
        for step in (1, 2, -1):
            same("totals", *(column[::step] for column in (prefill, new, context, swapped)))
        median, upper = (rng.choice([1.0, 3.0, np.inf], 30) for _ in range(2))
        past = rng.integers(0, 5, len(rows))
        left = same("expected_left", median, upper, rows, past)
        slo, since = rng.choice([np.nan, 0.05], len(rows)), rng.random(len(rows))
        same(
            "allowed_prefill_seconds",
            slo,
            since,
            past,
            rng.integers(1, 9, len(rows)) * 1.0,
            rng.random() / 9,
        )
        same("available_cells", 50, new, past, left, int(rng.integers(1, 3)), len(rows) % 6)
        same("available_cells", 50, new, past, left - 2, 1, 4)
        cut = int(rng.integers(0, len(rows) + 1))
        for limit in (0, 3, int(new.sum())):
            same("within", new[cut:], limit, new[:cut])


def test_columns_that_do_not_fit_are_an_error():
    one, two = np.ones(1, np.int64), np.ones(2, np.int64)
    with pytest.raises(ValueError):
        compiled.totals(one > 0, two, two, two)
    with pytest.raises(TypeError):
        compiled.totals(two, two, two, two)
    with pytest.raises(IndexError):
        compiled.due(RequestTable(), np.array([3]))
