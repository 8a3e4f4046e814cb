# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What the paged ledger does in every step, block by block instead of array by array.

Each function makes the changes that a method of `PagedLedger` makes, named in its docstring. It
knows the plain case: no try open, nobody who listens, and a ledger that overrides none of these
methods. A pool with an eviction order of its own (`BlockPool.evicts_in_order`) is asked to take,
use and release blocks. In any other case a function answers None and has changed nothing: the
method's own Python goes on.
"""

cimport numpy as cnp
from libc.stdint cimport int8_t, int32_t, int64_t
from libc.string cimport memcpy

from twinserve.native.arrays cimport (
    ints, new_ints, rows_of, short_ints, size, tiny_ints, whole
)

cnp.import_array()

cdef cnp.ndarray NOTHING = new_ints(0)


cdef inline bint is_plain(pool) except -1:
    return pool.undo is None and pool.events is None


cdef inline int64_t free_blocks(pool) except -1:
    """`BlockPool.free`."""
    return <int64_t>pool._blank.free + <int64_t>pool.cached


cdef inline int64_t blocks_for(int64_t tokens, int64_t block_tokens):
    return (tokens + block_tokens - 1) // block_tokens


# -- questions -------------------------------------------------------------------------------------
def hit_tokens(ledger, int64_t row):
    """`PagedLedger.hit_tokens`, of a ledger that caches prefixes."""
    cdef object table = ledger.table
    cdef cnp.ndarray contents = contents_of(ledger, row)
    cdef int64_t* content = ints(contents)
    cdef int32_t* found_at = short_ints(ledger.pool._found_at)
    cdef int64_t block_tokens = ledger.block_tokens, hits = 0
    # one token at least remains to be computed
    cdef int64_t most = (table.prompt_tokens[row] + table.output_tokens[row] - 1) // block_tokens
    most = min(most, size(contents))
    while hits < most and found_at[content[hits]] > 0:
        hits += 1
    return hits * block_tokens


cdef cnp.ndarray contents_of(ledger, int64_t row):
    """`PagedLedger._contents_of`."""
    found = (<dict>ledger._contents).get(row)
    if found is None:
        found = ledger.table.prefix[row]
    return NOTHING if found is None else whole(found)


def block_growth(ledger, rows, Py_ssize_t steps):
    """`KvLedger.block_growth`. None: a row has more tokens than memory, an error, and Python's to
    raise."""
    cdef cnp.ndarray row_array = whole(rows), out = new_ints(steps)
    cdef int64_t* row = rows_of(row_array, ledger._held)
    cdef int64_t* held = ints(ledger._held)
    cdef int64_t* computed = ints(ledger.table.computed_tokens)
    cdef int64_t* taken = ints(out)
    cdef int64_t block_tokens = ledger.block_tokens, room
    cdef Py_ssize_t i
    rows_of(row_array, ledger.table)
    for i in range(steps):
        taken[i] = 0
    for i in range(size(row_array)):
        room = held[row[i]] * block_tokens - computed[row[i]]
        if room < 0:
            return None
        if room < steps:
            taken[room] += 1
    for i in range(block_tokens, steps):
        taken[i] += taken[i - block_tokens]
    return out


# -- changes ---------------------------------------------------------------------------------------
def admit(
    ledger, entry_type, int64_t row, int64_t tokens, int64_t hit_tokens, int64_t keep_free,
    int64_t reserve_tokens,
):
    """`PagedLedger.admit`; entry_type: of the row's block table."""
    cdef object pool = ledger.pool, table = ledger.table
    cdef dict tables = ledger._tables
    cdef int64_t block_tokens = ledger.block_tokens, free = free_blocks(pool), idle = 0, i
    cdef int64_t hits = hit_tokens // block_tokens
    cdef int64_t fresh = blocks_for(tokens, block_tokens) - hits
    cdef int64_t must_fit = max(fresh, blocks_for(reserve_tokens, block_tokens) - hits)
    cdef cnp.ndarray contents, blocks
    cdef int64_t *content
    cdef int64_t *block
    cdef int64_t *refs
    cdef int64_t *stamp
    cdef int32_t *found_at
    if not is_plain(pool) or row in tables or fresh < 0:
        return None
    ledger._make_room_for_row(row)
    contents = contents_of(ledger, row) if ledger.prefix_caching else NOTHING
    if hits > size(contents):
        return None
    blocks = new_ints(hits + fresh)
    content, block = ints(contents), ints(blocks)
    refs, stamp, found_at = ints(pool.refs), ints(pool._stamp), short_ints(pool._found_at)
    for i in range(hits):
        block[i] = found_at[content[i]] - 1
        if block[i] < 0:  # an error, and Python's to raise
            return None
        idle += refs[block[i]] == 0
    if must_fit + idle + keep_free > free:
        return False
    if pool.evicts_in_order:
        for i in range(hits):
            if refs[block[i]] == 0:
                stamp[block[i]] = 0  # it leaves the eviction order
            refs[block[i]] += 1
        pool.cached -= idle
    elif hits:
        pool.use(blocks[:hits])
    take(pool, fresh, block + hits)
    entry = tables[row] = entry_type(blocks, contents)
    ints(ledger._held)[row] = hits + fresh
    ints(ledger._published)[row] = hits
    ledger._count_row(row, blocks, 1)
    if ledger.prefix_caching:
        fresh = tokens // block_tokens
        if ledger.known_text_only:
            fresh = min(
                fresh,
                (
                    ints(table.prompt_tokens)[row]
                    + ints(table.output_tokens)[row]
                    - ints(table.in_flight)[row]
                )
                // block_tokens,
            )
        publish(ledger, entry, row, fresh)
    return True


def grow_all(ledger, rows, tokens):
    """`PagedLedger.grow_all`."""
    cdef object pool = ledger.pool
    cdef cnp.ndarray row_array = whole(rows), token_array = whole(tokens), taken
    cdef int64_t* row = ints(row_array)
    cdef int64_t* upto = ints(token_array)
    cdef int64_t* held = ints(ledger._held)
    cdef int64_t* published = ints(ledger._published)
    cdef int64_t block_tokens = ledger.block_tokens, total = 0, fresh, full, known
    cdef Py_ssize_t n = size(row_array), rooms = size(ledger._held), i
    cdef bint publishes = ledger.prefix_caching, fills = False
    cdef bint ahead = ledger.known_text_only
    cdef object entry, table = ledger.table
    cdef int64_t *prompt
    cdef int64_t *output
    cdef int64_t *in_flight
    if not is_plain(pool) or size(token_array) != n:
        return None
    for i in range(n):
        if not 0 <= row[i] < rooms:  # an error, and Python's to raise
            return None
        if upto[i] > held[row[i]] * block_tokens:  # products: divisions would take most of the time
            total += blocks_for(upto[i], block_tokens) - held[row[i]]
        fills = fills or upto[i] >= (published[row[i]] + 1) * block_tokens
    if total:
        if total > free_blocks(pool):
            return False
        taken = new_ints(total)
        take(pool, total, ints(taken))
        total = 0
        for i in range(n):
            if upto[i] > held[row[i]] * block_tokens:
                fresh = blocks_for(upto[i], block_tokens) - held[row[i]]
                append(ledger, row[i], held, taken, total, fresh)
                total += fresh
    if publishes and fills:
        prompt, output = ints(table.prompt_tokens), ints(table.output_tokens)
        in_flight = ints(table.in_flight)
        for i in range(n):
            if upto[i] >= (published[row[i]] + 1) * block_tokens:
                entry, full = (<dict>ledger._tables)[row[i]], upto[i] // block_tokens
                if ahead:
                    known = prompt[row[i]] + output[row[i]] - in_flight[row[i]]
                    full = min(full, known // block_tokens)
                if full > published[row[i]]:
                    publish(ledger, entry, row[i], full)
    return True


def grow(ledger, int64_t row, int64_t tokens):
    """`PagedLedger.grow`."""
    cdef cnp.ndarray rows = new_ints(1), upto = new_ints(1)
    ints(rows)[0], ints(upto)[0] = row, tokens
    return grow_all(ledger, rows, upto)


def extend(ledger, rows, int64_t steps):
    """`PagedLedger.grow_all` by `steps` tokens beyond those computed."""
    cdef cnp.ndarray row_array = whole(rows), upto = new_ints(size(row_array))
    cdef int64_t* row = rows_of(row_array, ledger.table)
    cdef int64_t* computed = ints(ledger.table.computed_tokens)
    cdef int64_t* tokens = ints(upto)
    cdef Py_ssize_t i
    for i in range(size(row_array)):
        tokens[i] = computed[row[i]] + steps
    return grow_all(ledger, row_array, upto)


cdef int append(
    ledger, int64_t row, int64_t* held, cnp.ndarray taken, int64_t begin, int64_t fresh
) except -1:
    """`PagedLedger._append` of `fresh` blocks of `taken` from `begin` on."""
    cdef object entry = (<dict>ledger._tables)[row]
    cdef cnp.ndarray blocks = entry.blocks
    cdef int64_t had = held[row]
    if had + fresh > size(blocks):  # as `_BlockTable.put`
        blocks = entry.blocks = longer(blocks, had, max(had + fresh, had + had // 4 + 8))
    memcpy(ints(blocks) + had, ints(taken) + begin, fresh * sizeof(int64_t))
    held[row] += fresh
    if ledger._mixed:
        ledger._count_row(row, taken[begin : begin + fresh], 1)
    return 0


cdef cnp.ndarray longer(cnp.ndarray column, int64_t n, int64_t room):
    """The first `n` of `column` in an array with room for more."""
    cdef cnp.ndarray grown = new_ints(room)
    memcpy(ints(grown), ints(column), n * sizeof(int64_t))
    return grown


cdef int name_contents(ledger, entry, int64_t full) except -1:
    """`PagedLedger._name_contents`."""
    cdef object pool = ledger.pool
    cdef cnp.ndarray contents = entry.contents
    cdef int64_t had = size(contents), at_once = ledger.own_contents, first = pool.contents, i
    cdef int64_t own = (full - had + at_once - 1) // at_once * at_once
    cdef int64_t* content
    if first + own > size(pool._found_at):
        pool.new_contents(own)
    else:
        pool.contents = first + own
    entry.contents = contents = longer(contents, had, had + own)
    content = ints(contents)
    for i in range(own):
        content[had + i] = first + i
    return 0


cdef int publish(ledger, entry, int64_t row, int64_t full) except -1:
    """`PagedLedger._publish` of `full` blocks whose text is known."""
    cdef object pool = ledger.pool
    cdef int64_t* published = ints(ledger._published)
    cdef int64_t *block
    cdef int64_t *content
    cdef int64_t *held_content
    cdef int32_t *found_at
    cdef int64_t i
    if full <= published[row]:
        return 0
    if full > size(entry.contents):
        name_contents(ledger, entry, full)
    block, content = ints(entry.blocks), ints(entry.contents)
    held_content, found_at = ints(pool.content), short_ints(pool._found_at)
    for i in range(published[row], full):
        if found_at[content[i]] == 0:
            found_at[content[i]] = <int32_t>(block[i] + 1)
        else:
            copies = pool._copies.setdefault(content[i], [found_at[content[i]] - 1])
            copies.append(block[i])
        held_content[block[i]] = content[i]
    published[row] = full
    pool.version += 1
    return 0


def give_back(ledger, int64_t row):
    """`PagedLedger._give_back`."""
    cdef object pool = ledger.pool, entry
    cdef int64_t *block
    cdef int64_t *refs
    cdef int64_t *content
    cdef int64_t *stamp
    cdef int64_t *idle
    cdef int64_t i, kept = 0, blank = 0, held, number
    cdef cnp.ndarray chunk
    if not is_plain(pool) or not pool.evicts_in_order:
        return None
    entry, held = ledger._tables.pop(row), ints(ledger._held)[row]
    ints(ledger._held)[row] = 0
    if ledger._mixed:
        ledger._count_row(row, entry.blocks[:held], -1)
    block, chunk = ints(entry.blocks), new_ints(held)
    refs, content, stamp, idle = (
        ints(pool.refs), ints(pool.content), ints(pool._stamp), ints(chunk)
    )
    # From its tail on. What can be found fills `chunk` from the front, what cannot from the back.
    for i in range(held - 1, -1, -1):
        refs[block[i]] -= 1
        if refs[block[i]]:
            continue
        if content[block[i]] < 0:
            blank += 1
            idle[held - blank] = block[i]
        else:
            idle[kept] = block[i]
            kept += 1
    if kept:
        number = pool._chunks = pool._chunks + 1
        for i in range(kept):
            stamp[idle[i]] = number
        pool._order.append((number, chunk[:kept].copy() if kept < held else chunk))
        pool.cached += kept
    if blank:
        put_back(pool._blank, idle + held - 1, blank)
    return True


cdef int put_back(stack, int64_t* last, int64_t n) except -1:
    """`FreeStack.put` of the `n` units up to `last`, from there on."""
    cdef int64_t back = stack.free - (stack.capacity - stack.used), i
    cdef cnp.ndarray entries = stack._entries
    if back + n > size(entries):
        room = min(<int64_t>stack.used, max(back + n, 2 * size(entries), 16))
        entries = stack._entries = longer(entries, back, room)
    for i in range(n):
        ints(entries)[back + i] = last[-i]
    stack.free += n
    return 0


# -- the pool --------------------------------------------------------------------------------------
cdef int take(pool, int64_t n, int64_t* out) except -1:
    """`BlockPool.take` of no more blocks than are free."""
    cdef int64_t blank = min(n, <int64_t>pool._blank.free), i
    cdef int64_t* refs
    cdef cnp.ndarray fresh
    if not pool.evicts_in_order:
        fresh = pool.take(n)
        memcpy(out, ints(fresh), n * sizeof(int64_t))
        return 0
    if blank:
        fresh = pool._blank.take(blank)
        memcpy(out, ints(fresh), blank * sizeof(int64_t))
        if <int64_t>pool._blank.used > size(pool.refs):
            pool._reach(pool._blank.used)
    if blank < n:
        evict(pool, n - blank, out + blank)
    refs = ints(pool.refs)
    for i in range(n):
        refs[out[i]] = 1
    return 0


cdef int evict(pool, int64_t n, int64_t* out) except -1:
    """`BlockPool._evict`."""
    cdef int64_t* stamp = ints(pool._stamp)
    cdef int64_t* content = ints(pool.content)
    cdef int32_t* found_at = short_ints(pool._found_at)
    cdef int64_t* block
    cdef int64_t number, found = 0
    cdef Py_ssize_t i
    cdef cnp.ndarray chunk
    cdef dict copies = pool._copies
    while found < n:
        number, chunk = pool._order.popleft()
        block, i = ints(chunk), 0
        while i < size(chunk) and found < n:
            if stamp[block[i]] == number:
                out[found] = block[i]
                found += 1
                stamp[block[i]] = 0
                if copies:
                    pool._forget_one(block[i], content[block[i]])
                else:
                    found_at[content[block[i]]] = 0
                content[block[i]] = -1
            i += 1
        if i < size(chunk):
            pool._order.appendleft((number, chunk[i:]))
    pool.cached -= n
    pool.evicted += n
    pool.version += 1
    return 0
