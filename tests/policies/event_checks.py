"""A listener that takes nothing on trust: beside a ledger, and compared with it."""

from twinserve.policies.kv.paged.ledger import PagedLedger
from twinserve.sim.fleet.prefix_index import PrefixIndex


def findable(ledger: PagedLedger) -> set[int]:
    """Contents of the workload that some block holds, by the blocks themselves."""
    content = ledger.pool.content
    return set(content[(content >= 0) & (content < ledger.shared_contents)].tolist())


class Listener:
    """Hears a ledger's events, passes them to `index`, and refuses those that say nothing new, name
    what only one row can find, or come while a change is tried.

    stored, removed  contents, so far
    unsaid           rollbacks that took back something that others could have found, or not
    foretold         contents told as lost in a run of steps, before the ledger extends its rows
    """

    def __init__(self, ledger: PagedLedger, index: PrefixIndex, replica: int = 0) -> None:
        self.ledger, self.index, self.replica = ledger, index, replica
        self.held: set[int] = set()
        self.stored_blocks = self.removed_blocks = self.unsaid = self.foretold = 0
        self._feed = index.add(replica)
        self._rollback = ledger.rollback
        ledger.rollback = self.rollback
        self._extend = ledger.extend
        ledger.extend = self.extend
        ledger.subscribe(self)

    def stored(self, contents):
        names = self._names(contents)
        assert not names & self.held, f"{names & self.held} were stored before"
        self.held |= names
        self.stored_blocks += len(names)
        self._feed.stored(contents)

    def removed(self, contents):
        names = self._names(contents)
        assert names <= self.held, f"{names - self.held} were not stored"
        self.held -= names
        self.removed_blocks += len(names)
        self._feed.removed(contents)

    def _names(self, contents) -> set[int]:
        assert self.ledger.pool.undo is None, "an event while a change is tried"
        names = contents.tolist()
        assert names and names == sorted(set(names)), f"{names} are not ascending"
        assert names[-1] < self.ledger.shared_contents, "a name that only one row knows"
        return set(names)

    def rollback(self, mark: int) -> None:
        self.unsaid += findable(self.ledger) != self.held
        self._rollback(mark)

    def extend(self, rows, steps: int) -> None:
        """What the run evicts is known before, step by step as well as at once."""
        if self.ledger.pool.undo is not None:
            self._extend(rows, steps)
            return
        singly = list(self.ledger.lost_in_run(rows, 0, range(1, steps + 1)))
        known = {name for _, contents in singly for name in contents.tolist()}
        before = set(self.held)
        for _, contents in self.ledger.lost_in_run(rows, 0, [steps]):
            assert known == set(contents.tolist())
            self.ledger.foretell(contents)
        assert before - self.held == known & before
        self.foretold += len(before - self.held)
        there = set(self.held)
        self._extend(rows, steps)
        assert not there - self.held, "an eviction that was not foretold"
        assert not known & self.held, "a text was told as lost and is found"

    def compare(self) -> None:
        """What was heard is what the ledger holds; every row of the table finds as much in the
        index as in the ledger."""
        ledger, table, size = self.ledger, self.ledger.table, self.ledger.block_tokens
        assert self.held == findable(ledger), "the events are not what the blocks hold"
        assert self.held == set(self.index.contents(self.replica).tolist())
        for row, prefix in enumerate(table.prefix):
            if prefix is None:
                continue  # its text has no name
            whole = (int(table.known_tokens(row)) - 1) // size  # the last token is computed
            there = min(ledger.hit_tokens(row) // size, len(prefix))
            assert self.index.longest_prefix(self.replica, prefix[:whole]) == there, f"row {row}"
