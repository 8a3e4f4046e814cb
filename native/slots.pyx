# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What the bidirectional ledger does in every step, cell by cell instead of array by array.

`state` is a SlotState. Each function makes the changes, or gives the answer, of the Python code
that its docstring names. Nothing is noted in the journal: callers do so before, and where that is
not enough, `grow_all` answers None and has changed nothing.
"""

cimport numpy as cnp
from libc.stdint cimport int8_t, int64_t
from libc.string cimport memcpy

from twinserve.native.arrays cimport ints, new_ints, rows_of, size, tiny_ints, whole

cnp.import_array()


cdef struct Columns:
    int64_t* owner
    int64_t* count
    int64_t* index
    int64_t* start
    int8_t* kind
    int64_t* tokens
    int64_t* held
    int64_t blocks


cdef int columns_of(state, Columns* of) except -1:
    of.owner, of.count, of.index = ints(state.owner), ints(state.count), ints(state.index)
    of.start, of.kind = ints(state.start), tiny_ints(state.kind)
    of.tokens, of.held, of.blocks = ints(state.tokens), ints(state.held), state.num_blocks
    return 0


cdef inline int64_t peer(int64_t cell, int64_t blocks):
    return cell + blocks if cell < blocks else cell - blocks


# -- questions -------------------------------------------------------------------------------------
def places_by_count(state):
    """`Placement.places_by_count`, made anew."""
    cdef int64_t slots = state.size, step = state.step, block, slot, free = 0
    cdef int8_t* kind = tiny_ints(state.kind)
    cdef int64_t* count = ints(state.count)
    cdef int64_t* owner = ints(state.owner)
    cdef int64_t* pinned = ints(state.pinned)
    cdef cnp.ndarray out = new_ints(slots + 1)
    cdef int64_t* places = ints(out)
    for slot in range(slots + 1):
        places[slot] = 0
    for block in range(<int64_t>state.empty.used):
        if kind[block] != 1:
            continue
        if pinned[owner[block]] == step:
            places[slots - count[block]] += 1
        else:
            free += 1
    places[slots] += free
    for slot in range(slots - 1, -1, -1):
        places[slot] += places[slot + 1]
    return out


cdef inline int64_t rank(int64_t count, int64_t owner, int64_t index):
    """The order of `Placement.emptiest`; no two cells in use have the same."""
    return count << 52 | owner << 24 | index


def block_for_be(state, int64_t tokens):
    """`Placement._block_for_be`."""
    cdef int64_t slots = state.size, step = state.step, block, key
    cdef int64_t best = -1, least = 0, idle = -1, least_idle = 0
    cdef int8_t* kind = tiny_ints(state.kind)
    cdef int64_t* count = ints(state.count)
    cdef int64_t* owner = ints(state.owner)
    cdef int64_t* index = ints(state.index)
    cdef int64_t* pinned = ints(state.pinned)
    for block in range(<int64_t>state.empty.used):
        if kind[block] != 1:
            continue
        key = rank(count[block], owner[block], index[block])
        if best < 0 or key < least:
            best, least = block, key
        if (idle < 0 or key < least_idle) and pinned[owner[block]] != step:
            idle, least_idle = block, key
    return best if best >= 0 and count[best] + tokens <= slots else idle


def blocks_for_be(state, parts):
    """Where `block_for_be` sends these best-effort cells, each of which has moved before the next
    is asked for: the cells of real-time owners. Ends before the first that would go where another
    one has been, or nowhere."""
    cdef cnp.ndarray parts_in = whole(parts)
    cdef Py_ssize_t n = size(parts_in), done = 0, at = 0, at_idle = 0, i
    cdef int64_t* part = rows_of(parts_in, state.owner)
    cdef int64_t slots = state.size, step = state.step, blocks = state.num_blocks, block, key, found
    cdef int64_t left = -1, least_left = 0
    cdef int8_t* kind = tiny_ints(state.kind)
    cdef int64_t* count = ints(state.count)
    cdef int64_t* owner = ints(state.owner)
    cdef int64_t* index = ints(state.index)
    cdef int64_t* pinned = ints(state.pinned)
    cdef cnp.ndarray out = new_ints(n)
    cdef int64_t* to = ints(out)
    cdef Emptiest every = Emptiest(n), idle = Emptiest(n)
    for block in range(<int64_t>state.empty.used):
        if kind[block] != 1:
            continue
        key = rank(count[block], owner[block], index[block])
        if every.wants(key):
            every.add(key, block)
        if idle.wants(key) and pinned[owner[block]] != step:
            idle.add(key, block)
    for i in range(n):
        while at < every.used and gone(to, done, every.cell[at]):
            at += 1
        found = every.cell[at] if at < every.used else -1
        if left >= 0 and (found < 0 or least_left < every.key[at]):
            found = left
        if found < 0:
            break
        if count[found] + count[part[i]] > slots:
            while at_idle < idle.used and gone(to, done, idle.cell[at_idle]):
                at_idle += 1
            if at_idle == idle.used:
                break
            found = idle.cell[at_idle]
        elif found == left:
            break
        to[done] = found
        done += 1
        block = part[i] - blocks
        key = rank(count[block], owner[block], index[block])
        if left < 0 or key < least_left:
            left, least_left = block, key
    return out[:done]


cdef inline bint gone(int64_t* to, Py_ssize_t done, int64_t cell):
    cdef Py_ssize_t i
    for i in range(done):
        if to[i] == cell:
            return True
    return False


cdef class Emptiest:
    """The `most` cells of least `rank`, in that order."""

    cdef int64_t* key
    cdef int64_t* cell
    cdef object kept
    cdef Py_ssize_t used, most

    def __cinit__(self, Py_ssize_t most):
        cdef cnp.ndarray keys = new_ints(most), cells = new_ints(most)
        self.key, self.cell, self.kept = ints(keys), ints(cells), (keys, cells)
        self.used, self.most = 0, most

    cdef inline bint wants(self, int64_t key):
        return self.used < self.most or key < self.key[self.most - 1]

    cdef inline void add(self, int64_t key, int64_t cell):
        cdef Py_ssize_t i = self.used if self.used < self.most else self.most - 1
        while i and self.key[i - 1] > key:
            self.key[i], self.cell[i] = self.key[i - 1], self.cell[i - 1]
            i -= 1
        self.key[i], self.cell[i] = key, cell
        self.used = min(self.used + 1, self.most)


def block_for_rt(state):
    """`Placement._block_for_rt`."""
    cdef int64_t step = state.step, blocks = state.num_blocks, block, cell, key, least = 0
    cdef int64_t best = -1
    cdef int8_t* kind = tiny_ints(state.kind)
    cdef int64_t* count = ints(state.count)
    cdef int64_t* owner = ints(state.owner)
    cdef int64_t* index = ints(state.index)
    cdef int64_t* pinned = ints(state.pinned)
    for block in range(<int64_t>state.empty.used):
        cell = block + blocks
        if kind[block] != 2 or pinned[owner[cell]] == step:
            continue
        key = rank(count[cell], owner[cell], index[cell])
        if best < 0 or key < least:
            best, least = cell, key
    return best


def slack(state, rows, computed_tokens):
    """`BidirectionalLedger.slack_tokens`; computed_tokens: column of the table."""
    cdef cnp.ndarray rows_in = whole(rows), out = new_ints(size(rows_in))
    cdef int64_t* row = rows_of(rows_in, state.tokens)
    cdef int64_t* computed = ints(computed_tokens)
    cdef int64_t* tokens = ints(state.tokens)
    cdef int64_t* missing = ints(state.missing_tokens)
    cdef int64_t* held = ints(state.held)
    cdef int64_t* last = ints(state.last)
    cdef int64_t* count = ints(state.count)
    cdef int64_t* free = ints(out)
    cdef int64_t blocks = state.num_blocks, slots = state.size, cell
    cdef Py_ssize_t i
    rows_of(rows_in, computed_tokens)
    for i in range(size(rows_in)):
        if missing[row[i]] > 0 or held[row[i]] == 0:
            free[i] = 0
            continue
        cell = last[row[i]]
        free[i] = max(slots - count[cell] - count[peer(cell, blocks)], 0)
        free[i] += tokens[row[i]] - computed[row[i]]
    return out


def alone(state, rows):
    """Whether nobody else has slots in the last block of any row, and no row misses any."""
    cdef cnp.ndarray rows_in = whole(rows)
    cdef int64_t* row = rows_of(rows_in, state.tokens)
    cdef int64_t* missing = ints(state.missing_tokens)
    cdef int64_t* last = ints(state.last)
    cdef int64_t* count = ints(state.count)
    cdef int64_t blocks = state.num_blocks
    cdef Py_ssize_t i
    for i in range(size(rows_in)):
        if missing[row[i]] or count[peer(last[row[i]], blocks)]:
            return False
    return True


# -- changes ---------------------------------------------------------------------------------------
def grow_all(state, rows, tokens):
    """`plain.grow_all`, while no try is open and no two rows of different classes share a block."""
    cdef cnp.ndarray rows_in = whole(rows), tokens_in = whole(tokens), taken
    cdef Py_ssize_t n = size(rows_in), i
    cdef int64_t* row = rows_of(rows_in, state.tokens)
    cdef int64_t* upto = ints(tokens_in)
    cdef int64_t* missing = ints(state.missing_tokens)
    cdef int64_t* last = ints(state.last)
    cdef int64_t* pinned = ints(state.pinned)
    cdef int64_t slots = state.size, step = state.step
    cdef int64_t cell, other, room, need, here, total = 0, fresh
    cdef int64_t* block = NULL
    cdef Columns of
    if state.journal.open or size(tokens_in) != n:
        return None
    columns_of(state, &of)
    for i in range(n):
        if missing[row[i]]:
            return False
    for i in range(n):
        if not of.tokens[row[i]]:  # an error, and Python's to raise
            return None
        cell, need = last[row[i]], upto[i] - of.tokens[row[i]]
        other = of.count[peer(cell, of.blocks)]
        room = max(slots - of.count[cell] - other, 0)
        if need > 0 and other and cell < of.blocks and of.count[cell] < slots:
            return None  # the row beside it may grow, too
        if need > room:
            total += (need - room + slots - 1) // slots
    if total > <int64_t>state.empty.free:
        return False
    if total:
        taken = state.empty.take(total)
        block = ints(taken) + total  # the topmost is the last
    for i in range(n):
        pinned[row[i]] = step
        need = upto[i] - of.tokens[row[i]]
        if need <= 0:
            continue
        cell = last[row[i]]
        room = max(slots - of.count[cell] - of.count[peer(cell, of.blocks)], 0)
        here = min(need, room)
        of.count[cell] += here
        of.tokens[row[i]] += here
        need -= here
        if need:
            fresh = (need + slots - 1) // slots
            block -= fresh
            enter(state, &of, row[i], block, fresh, need, 0 if cell < of.blocks else of.blocks)
    state.version += 1
    return True


cdef int enter(
    state, Columns* of, int64_t row, int64_t* block, int64_t fresh, int64_t tokens, int64_t side
) except -1:
    """The row's next `tokens` go into `fresh` empty blocks on its side, the last one first."""
    cdef int64_t* cells = room_for(state, row, fresh)
    cdef int64_t slots = state.size, i, took
    for i in range(fresh):
        took = min(tokens, slots)
        occupy(of, cells, block[fresh - 1 - i] + side, row, took)
        tokens -= took
    ints(state.last)[row] = cells[of.held[row] - 1]
    if side == 0:
        state.rt_blocks += fresh
    return 0


cdef int64_t* room_for(state, int64_t row, int64_t fresh) except NULL:
    """`SlotState.append`: the row's cells, and room for `fresh` more."""
    cdef dict tables = state.tables
    cdef int64_t held = ints(state.held)[row], need = held + fresh
    cdef cnp.ndarray table = tables[row], grown
    if need > size(table):
        grown = new_ints(need + need // 4 + 8)
        memcpy(ints(grown), ints(table), held * sizeof(int64_t))
        table = tables[row] = grown
    return ints(table)


cdef inline void occupy(Columns* of, int64_t* cells, int64_t cell, int64_t row, int64_t tokens):
    """The row's next `tokens` lie in the free `cell`, the next one of its `cells`."""
    cells[of.held[row]] = cell
    of.owner[cell] = row
    of.count[cell] = tokens
    of.index[cell] = of.held[row]
    of.start[cell] = of.tokens[row]
    if cell < of.blocks:
        of.kind[cell] |= 1
    else:
        of.kind[cell - of.blocks] |= 2
    of.held[row] += 1
    of.tokens[row] += tokens


def claim(state, int64_t row, cells, counts):
    """`SlotState.claim` for a row that has a table."""
    cdef cnp.ndarray cells_in = whole(cells), counts_in = whole(counts)
    cdef Py_ssize_t n = size(cells_in), i
    cdef int64_t* cell = rows_of(cells_in, state.owner)
    cdef int64_t* count = ints(counts_in)
    cdef int64_t* table = room_for(state, row, n)
    cdef int64_t real_time = 0
    cdef Columns of
    if not n or size(counts_in) != n:
        raise ValueError("cells and what they hold differ in number")
    columns_of(state, &of)
    for i in range(n):
        occupy(&of, table, cell[i], row, count[i])
        real_time += cell[i] < of.blocks
    ints(state.last)[row] = cell[n - 1]
    if real_time:
        state.rt_blocks += real_time
    state.version += 1


def vacate(state, cells):
    """`SlotState.vacate`. Returns the blocks that nobody holds any more, in order of `cells`."""
    cdef cnp.ndarray cells_in = whole(cells), out = new_ints(size(cells_in))
    cdef int64_t* cell = rows_of(cells_in, state.owner)
    cdef int64_t* owner = ints(state.owner)
    cdef int64_t* count = ints(state.count)
    cdef int64_t* lack = ints(state.lack)
    cdef int64_t* index = ints(state.index)
    cdef int64_t* start = ints(state.start)
    cdef int8_t* kind = tiny_ints(state.kind)
    cdef int64_t* empty = ints(out)
    cdef int64_t blocks = state.num_blocks, real_time = 0, found = 0, block
    cdef Py_ssize_t i
    for i in range(size(cells_in)):
        owner[cell[i]] = count[cell[i]] = lack[cell[i]] = index[cell[i]] = start[cell[i]] = 0
        if cell[i] < blocks:
            block = cell[i]
            kind[block] &= ~1
            real_time += 1
        else:
            block = cell[i] - blocks
            kind[block] &= ~2
        if kind[block] == 0:
            empty[found] = block
            found += 1
    if real_time:
        state.rt_blocks -= real_time
    state.version += 1
    return out[:found]
