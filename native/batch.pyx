# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""What policies ask of many rows at once. Each function has the result, to the last bit, of the one
in `plain_batch.py` with its name, which says what it is."""

cimport numpy as cnp
from libc.math cimport INFINITY, ceil
from libc.stdint cimport int8_t, int64_t

from twinserve.native.arrays cimport (
    flags, floats, ints, new_flags, new_floats, new_ints, rows_of, size, whole
)

cnp.import_array()


def totals(cnp.ndarray is_prefill, new, context, swapped):
    cdef cnp.ndarray new_in = whole(new), context_in = whole(context), swapped_in = whole(swapped)
    cdef cnp.ndarray prefill_in = is_prefill
    cdef Py_ssize_t n = size(new_in), i
    cdef int64_t computed = 0, attended = 0, decodes = 0, of_decodes = 0, bytes_back = 0
    cdef int8_t* prefill
    cdef int64_t* tokens = ints(new_in)
    cdef int64_t* resident = ints(context_in)
    cdef int64_t* back = ints(swapped_in)
    if not cnp.PyArray_IS_C_CONTIGUOUS(is_prefill):
        prefill_in = is_prefill.copy()
    prefill = flags(prefill_in)
    if size(prefill_in) != n or size(context_in) != n or size(swapped_in) != n:
        raise ValueError("columns of a batch differ in length")
    for i in range(n):
        if prefill[i]:
            computed += tokens[i]
            attended += resident[i]
        else:
            decodes += 1
            of_decodes += resident[i]
        bytes_back += back[i]
    return computed, attended, decodes, of_decodes, bytes_back


def next_tokens(requests, rows, int64_t chunk):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef Py_ssize_t n = size(rows_in), i
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* computed = ints(requests.computed_tokens)
    cdef int64_t* prompt = ints(requests.prompt_tokens)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef cnp.ndarray prefill_out = new_flags(n), new_out = new_ints(n), context_out = new_ints(n)
    cdef int8_t* prefill = flags(prefill_out)
    cdef int64_t* new = ints(new_out)
    cdef int64_t* context = ints(context_out)
    for i in range(n):
        new[i] = prompt[row[i]] + output[row[i]] - computed[row[i]]
        prefill[i] = new[i] > 1 or output[row[i]] == 0
        if chunk:
            new[i] = min(new[i], chunk)
        context[i] = computed[row[i]] + new[i]
    return prefill_out, new_out, context_out


def due(requests, rows):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef Py_ssize_t n = size(rows_in), i
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef double* last_s = floats(requests.last_token_s)
    cdef double* arrival_s = floats(requests.arrival_s)
    cdef double* tpot = floats(requests.slo_tpot_s)
    cdef double* ttft = floats(requests.slo_ttft_s)
    cdef cnp.ndarray since_out = new_floats(n), slo_out = new_floats(n)
    cdef double* since = floats(since_out)
    cdef double* slo = floats(slo_out)
    for i in range(n):
        if output[row[i]] > 0:
            since[i], slo[i] = last_s[row[i]], tpot[row[i]]
        else:
            since[i], slo[i] = arrival_s[row[i]], ttft[row[i]]
        if slo[i] != slo[i]:  # NaN: no objective
            slo[i] = INFINITY
    return since_out, slo_out


def residual(requests, rows, double now, double lead):
    since_s, slo_s = due(requests, rows)
    cdef cnp.ndarray rows_in = whole(rows)
    cdef int64_t* row = ints(rows_in)
    cdef int64_t* in_flight = ints(requests.in_flight)
    cdef double* since = floats(since_s)
    cdef double* slo = floats(slo_s)
    cdef Py_ssize_t i
    for i in range(size(slo_s)):
        slo[i] = slo[i] - (now - since[i])
        if in_flight[row[i]] <= 0:
            slo[i] = slo[i] - lead
    return slo_s


def next_due(requests, rows, bint by_gap):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef Py_ssize_t n = size(rows_in), i
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef double* last_s = floats(requests.last_token_s)
    cdef double* arrival_s = floats(requests.arrival_s)
    cdef double* tpot = floats(requests.slo_tpot_s)
    cdef double* ttft = floats(requests.slo_ttft_s)
    cdef cnp.ndarray out = new_floats(n)
    cdef double* due_s = floats(out)
    cdef double pace
    for i in range(n):
        pace = INFINITY if tpot[row[i]] != tpot[row[i]] else tpot[row[i]]
        if by_gap and output[row[i]] > 0:
            due_s[i] = last_s[row[i]] + pace
            continue
        due_s[i] = arrival_s[row[i]] + ttft[row[i]]
        if due_s[i] != due_s[i]:  # NaN: no objective
            due_s[i] = INFINITY
        if output[row[i]] > 0:
            due_s[i] += output[row[i]] * pace
    return out


def tightest(requests, rows, bint by_gap, double now, double seconds):
    cdef cnp.ndarray rows_in = whole(rows), due_at = next_due(requests, rows_in, by_gap)
    cdef int64_t* row = ints(rows_in)
    cdef double* due_s = floats(due_at)
    cdef double* tpot = floats(requests.slo_tpot_s)
    cdef double least = INFINITY, left
    cdef Py_ssize_t i
    for i in range(size(rows_in)):
        left = due_s[i] - now
        if not left >= seconds:
            left = INFINITY if tpot[row[i]] != tpot[row[i]] else max(tpot[row[i]], seconds)
        least = min(least, left)
    return least


def split(requests, rows, missing):
    cdef cnp.ndarray rows_in = whole(rows), missing_in = whole(missing)
    cdef Py_ssize_t n = size(rows_in), i, at, ones = 0
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* lack = ints(missing_in)
    cdef int64_t* computed = ints(requests.computed_tokens)
    cdef int64_t* prompt = ints(requests.prompt_tokens)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef int64_t left
    cdef int64_t* into[2][4]
    cdef Py_ssize_t done[2]
    if size(missing_in) != n:
        raise ValueError("rows and what they miss differ in length")
    for i in range(n):
        left = prompt[row[i]] + output[row[i]] - computed[row[i]]
        ones += left == 1 and output[row[i]] > 0
    decodes = (new_ints(ones), new_ints(ones), new_ints(ones), new_ints(ones))
    others = (new_ints(n - ones), new_ints(n - ones), new_ints(n - ones), new_ints(n - ones))
    for i in range(4):
        into[0][i] = ints(decodes[i])
        into[1][i] = ints(others[i])
    done[0] = done[1] = 0
    for i in range(n):
        left = prompt[row[i]] + output[row[i]] - computed[row[i]]
        at = 0 if left == 1 and output[row[i]] > 0 else 1
        into[at][0][done[at]] = row[i]
        into[at][1][done[at]] = left
        into[at][2][done[at]] = computed[row[i]]
        into[at][3][done[at]] = lack[i]
        done[at] += 1
    return decodes, others


def within(new, int64_t limit, behind):
    cdef cnp.ndarray new_in = whole(new), behind_in = whole(behind)
    cdef int64_t* tokens = ints(new_in)
    cdef int64_t* before = ints(behind_in)
    cdef int64_t total = 0, longest = 0
    cdef Py_ssize_t i
    for i in range(size(behind_in)):
        total += before[i]
        longest = max(longest, before[i])
    for i in range(size(new_in)):
        total += tokens[i]
        longest = max(longest, tokens[i])
        if total - longest > limit:
            return i
    return size(new_in)


def growth(slack, Py_ssize_t steps, int64_t size_of_block):
    cdef cnp.ndarray slack_in = whole(slack), out = new_ints(steps)
    cdef int64_t* room = ints(slack_in)
    cdef int64_t* taken = ints(out)
    cdef Py_ssize_t i
    for i in range(steps):
        taken[i] = 0
    for i in range(size(slack_in)):
        if room[i] < 0:
            raise ValueError("a row has more tokens than memory")
        if room[i] < steps:
            taken[room[i]] += 1
    for i in range(size_of_block, steps):
        taken[i] += taken[i - size_of_block]
    return out


def expected_left(median, upper, rows, past):
    cdef cnp.ndarray rows_in = whole(rows), past_in = whole(past)
    cdef Py_ssize_t n = size(rows_in), i
    cdef int64_t* row = rows_of(rows_in, median)
    cdef int64_t* done = ints(past_in)
    cdef double* middle = floats(median)
    cdef double* most = floats(upper)
    cdef cnp.ndarray out = new_floats(n)
    cdef double* left = floats(out)
    if size(past_in) != n or size(median) != size(upper):
        raise ValueError("columns of a batch differ in length")
    for i in range(n):
        if done[i] < middle[row[i]]:
            left[i] = middle[row[i]] - done[i]
        elif done[i] < most[row[i]]:
            left[i] = most[row[i]] - done[i]
        else:
            left[i] = INFINITY
    return out


def allowed_prefill_seconds(slo, past_s, past, lower, double tpot):
    cdef cnp.ndarray past_in = whole(past)
    cdef Py_ssize_t n = size(past_in), i
    cdef double* pace = floats(slo)
    cdef double* since = floats(past_s)
    cdef int64_t* done = ints(past_in)
    cdef double* least = floats(lower)
    cdef cnp.ndarray out = new_floats(n)
    cdef double* allowed = floats(out)
    cdef double future
    if size(slo) != n or size(past_s) != n or size(lower) != n:
        raise ValueError("columns of a batch differ in length")
    for i in range(n):
        future = least[i] - done[i]
        if future < 1.0:  # NaN stays
            future = 1.0
        allowed[i] = pace[i] * (done[i] + future) - (since[i] + tpot * future)
        if pace[i] != pace[i]:  # NaN: no objective
            allowed[i] = INFINITY
    return out


def available_cells(
    int64_t free, blocks, resident, left, int64_t block_tokens, Py_ssize_t horizon
):
    cdef cnp.ndarray block_in = whole(blocks), resident_in = whole(resident)
    cdef Py_ssize_t n = size(block_in), i, stage
    cdef int64_t* held = ints(block_in)
    cdef int64_t* layers = ints(resident_in)
    cdef double* yet = floats(left)
    cdef cnp.ndarray out = new_ints(horizon + 1), ending = new_ints(horizon + 1)
    cdef int64_t* available = ints(out)
    cdef int64_t* fewer = ints(ending)
    cdef int64_t growing = 0
    cdef double ends
    if size(resident_in) != n or size(left) != n:
        raise ValueError("columns of a batch differ in length")
    for stage in range(horizon + 1):
        available[stage] = fewer[stage] = 0
    for i in range(n):
        ends = ceil(yet[i] / block_tokens)
        if ends >= 1:
            growing += layers[i]
        if 1 <= ends <= horizon:
            stage = <Py_ssize_t>ends
            fewer[stage] += layers[i]
            available[stage] += (held[i] + stage) * layers[i]
    available[0] = free
    for stage in range(1, horizon + 1):
        available[stage] += available[stage - 1] - growing
        growing -= fewer[stage]
    return out
