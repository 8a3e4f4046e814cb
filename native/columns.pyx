# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""A step's book-keeping in the columns of a RequestTable. Each function has the result, to the last
bit, of the one in `plain.py` with its name, which says what it does."""

cimport numpy as cnp
from libc.stdint cimport int8_t, int64_t

from twinserve.native.arrays cimport (
    flags, floats, ints, new_flags, new_floats, new_ints, rows_of, size, tiny_ints, whole
)

cnp.import_array()


cdef extern from "Python.h":
    Py_ssize_t Py_REFCNT(object)

cdef cnp.ndarray NOBODY = new_ints(0)



def publish(requests, dict data, cnp.npy_intp places):
    cdef cnp.ndarray column, shown
    for name, column in data.items():
        if places > size(column):
            raise ValueError(f"{places} places of a column of {size(column)}")
        shown = getattr(requests, name, None)
        # The table's and ours: no other code sees the array become longer.
        if shown is not None and Py_REFCNT(shown) == 2 and cnp.get_array_base(shown) is column:
            cnp.PyArray_DIMS(shown)[0] = places
            continue
        shown = cnp.PyArray_SimpleNewFromData(
            1, &places, cnp.PyArray_TYPE(column), cnp.PyArray_DATA(column)
        )
        cnp.set_array_base(shown, column)
        setattr(requests, name, shown)


def lacking(requests, rows):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef Py_ssize_t n = size(rows_in), some = 0, i
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* all_computed = ints(requests.computed_tokens)
    cdef int64_t* prompt = ints(requests.prompt_tokens)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef cnp.ndarray rows_out = new_ints(n), computed_out = new_ints(n), wanted_out = new_ints(n)
    cdef int64_t* lacks = ints(rows_out)
    cdef int64_t* computed = ints(computed_out)
    cdef int64_t* wanted = ints(wanted_out)
    for i in range(n):
        lacks[some] = row[i]
        computed[some] = all_computed[row[i]]
        wanted[some] = prompt[row[i]] + output[row[i]] - computed[some]
        some += wanted[some] > 0
    if some == n:
        return rows, computed_out, wanted_out
    return rows_out[:some], computed_out[:some], wanted_out[:some]


def decoding(requests, rows, tokens, bint alone=False):
    cdef cnp.ndarray rows_in = whole(rows), tokens_in = whole(tokens)
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* new = ints(tokens_in)
    cdef int64_t* computed = ints(requests.computed_tokens)
    cdef int64_t* prompt = ints(requests.prompt_tokens)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef Py_ssize_t i
    same_length(rows_in, tokens_in)
    for i in range(size(rows_in)):
        if (alone and new[i] > 1) or new[i] == 1 and (
            output[row[i]] <= 0 or computed[row[i]] + 1 != prompt[row[i]] + output[row[i]]
        ):
            return False
    return True


def emitting(requests, rows, tokens):
    cdef cnp.ndarray rows_in = whole(rows), tokens_in = whole(tokens)
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* new = ints(tokens_in)
    cdef int64_t* computed = ints(requests.computed_tokens)
    cdef int64_t* prompt = ints(requests.prompt_tokens)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef cnp.ndarray out = new_flags(size(rows_in))
    cdef int8_t* emits = flags(out)
    cdef Py_ssize_t i
    same_length(rows_in, tokens_in)
    for i in range(size(rows_in)):
        emits[i] = computed[row[i]] + new[i] == prompt[row[i]] + output[row[i]]
    return out


def leaving(requests, rows, emitting, outputs):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef Py_ssize_t n = size(rows_in), m = 0, i
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int8_t* emits = flags(emitting)
    cdef int64_t* whole_output = ints(outputs)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef cnp.ndarray rows_out = new_ints(n), left_out = new_ints(n)
    cdef int64_t* emitted = ints(rows_out)
    cdef int64_t* left = ints(left_out)
    cdef int64_t least = 0
    same_length(rows_in, emitting)
    rows_of(rows_in, outputs)
    for i in range(n):
        if emits[i]:
            emitted[m] = row[i]
            left[m] = whole_output[row[i]] - output[row[i]]
            least = left[m] if m == 0 else min(least, left[m])
            m += 1
    if m == n:
        return rows, left_out, least
    return rows_out[:m], left_out[:m], least


def in_state(requests, rows, int8_t wanted):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef Py_ssize_t n = size(rows_in), m = 0, i
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int8_t* state = tiny_ints(requests.state)
    cdef cnp.ndarray rows_out = new_ints(n)
    cdef int64_t* found = ints(rows_out)
    for i in range(n):
        found[m] = row[i]
        m += state[row[i]] == wanted
    return rows if m == n else rows_out[:m]


def best_effort(requests, rows):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int8_t* kind = tiny_ints(requests.service_class)
    cdef Py_ssize_t found = 0, i
    for i in range(size(rows_in)):
        found += kind[row[i]] == 1
    return found


def advance(requests, rows, tokens, int64_t steps):
    cdef cnp.ndarray rows_in = whole(rows), tokens_in = whole(tokens)
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* new = ints(tokens_in)
    cdef int64_t* computed = ints(requests.computed_tokens)
    cdef Py_ssize_t i
    same_length(rows_in, tokens_in)
    for i in range(size(rows_in)):
        computed[row[i]] += new[i] * steps


def pooled(requests, rows, tokens, emitting, list first):
    cdef cnp.ndarray rows_in = whole(rows), tokens_in = whole(tokens)
    cdef Py_ssize_t n = size(rows_in), decodes = 0, i
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* all_new = ints(tokens_in)
    cdef int8_t* emits = flags(emitting)
    cdef int64_t* computed = ints(requests.computed_tokens)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef cnp.ndarray new_out = new_ints(n), resident_out = new_ints(n)
    cdef int64_t* new = ints(new_out)
    cdef int64_t* resident = ints(resident_out)
    cdef int64_t context = 0, longest = 0
    same_length(rows_in, tokens_in)
    same_length(rows_in, emitting)
    for i in range(n):
        if (emits[i] and all_new[i] == 1 and output[row[i]] > 0) or (first and row[i] in first):
            decodes += 1
            context += computed[row[i]]
            longest = max(longest, computed[row[i]])
        else:
            new[i - decodes] = all_new[i]
            resident[i - decodes] = computed[row[i]]
    if decodes == n:
        return decodes, context, longest
    return decodes, context, longest, new_out[: n - decodes], resident_out[: n - decodes]


def begin(requests, rows, tokens, emitted, list finished, double start_s):
    cdef cnp.ndarray rows_in = whole(rows), tokens_in = whole(tokens), emitted_in = whole(emitted)
    cdef Py_ssize_t gone = len(finished), i, k
    cdef cnp.ndarray gone_in = NOBODY if not gone else new_ints(gone)
    cdef int64_t* ends = ints(gone_in)
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* new = ints(tokens_in)
    cdef int64_t* emits = rows_of(emitted_in, requests)
    cdef int64_t* computed = ints(requests.computed_tokens)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef int64_t* in_flight = ints(requests.in_flight)
    cdef double* last_s = floats(requests.last_token_s)
    cdef cnp.ndarray kept_out = new_floats(size(emitted_in))
    cdef double* kept = floats(kept_out)
    same_length(rows_in, tokens_in)
    for k in range(gone):
        ends[k] = finished[k]
    for i in range(size(rows_in)):
        computed[row[i]] += new[i]
    for i in range(size(emitted_in)):
        kept[i] = last_s[emits[i]]
        k = 0
        while k < gone and ends[k] != emits[i]:
            k += 1
        if k < gone:
            continue
        output[emits[i]] += 1
        in_flight[emits[i]] = 1
        last_s[emits[i]] = start_s
    return kept_out


def unshow(requests, rows, last_token_s):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef int64_t* in_flight = ints(requests.in_flight)
    cdef double* last_s = floats(requests.last_token_s)
    cdef double* kept = floats(last_token_s)
    cdef Py_ssize_t i
    same_length(rows_in, last_token_s)
    for i in range(size(rows_in)):
        output[row[i]] -= in_flight[row[i]]
        in_flight[row[i]] = 0
        last_s[row[i]] = kept[i]


def book(requests, rows, cnp.ndarray ends_s):
    cdef cnp.ndarray rows_in = whole(rows)
    cdef Py_ssize_t n = size(rows_in), steps = size(ends_s), i, k
    cdef int64_t* row = rows_of(rows_in, requests)
    cdef double* slo = floats(requests.slo_tpot_s)
    cdef double* first_s = floats(requests.first_token_s)
    cdef double* last_s = floats(requests.last_token_s)
    cdef int64_t* output = ints(requests.output_tokens)
    cdef int64_t* late = ints(requests.late_tokens)
    cdef cnp.ndarray gaps_out = new_floats(n), ends_in
    cdef double* gaps = floats(gaps_out)
    cdef double* ends
    cdef double longest = 0.0
    ends_in = ends_s if ends_s.flags.c_contiguous else ends_s.copy()
    ends = floats(ends_in)
    for k in range(1, steps):
        longest = max(longest, ends[k] - ends[k - 1])
    for i in range(n):
        gaps[i] = ends[0] - last_s[row[i]]
        late[row[i]] += gaps[i] > slo[row[i]]  # never where there is no objective: NaN
        if longest > slo[row[i]]:
            for k in range(1, steps):
                late[row[i]] += ends[k] - ends[k - 1] > slo[row[i]]
        if output[row[i]] == 0:
            first_s[row[i]] = ends[0]
        output[row[i]] += steps
        last_s[row[i]] = ends[steps - 1]
    return gaps_out


def split_gaps(rows, cnp.ndarray gaps, cnp.ndarray service_class):
    cdef cnp.ndarray rows_in = whole(rows), real_time, best_effort
    cdef Py_ssize_t n = size(rows_in), n_be = 0, first = -1, of_rt = 0, of_be = 0, i
    cdef Py_ssize_t same_rt = 0, same_be = 0, known = 0
    cdef int64_t* row = rows_of(rows_in, service_class)
    cdef int8_t* kind = tiny_ints(service_class)
    cdef double* gap = floats(gaps)
    cdef double* rt
    cdef double* be
    same_length(rows_in, gaps)
    for i in range(n):
        n_be += kind[row[i]] == 1
        if gap[i] != gap[i]:  # NaN: a request's first token
            continue
        known += 1
        if first < 0:
            first = i
        if gap[i] == gap[first]:
            same_be += kind[row[i]] == 1
            same_rt += kind[row[i]] != 1
    if not known:
        return n_be, []
    found = [(gaps[first : first + 1], same_rt, same_be)]
    if same_rt + same_be == known:
        return n_be, found
    real_time, best_effort = new_floats(known), new_floats(known)
    rt, be = floats(real_time), floats(best_effort)
    for i in range(n):
        if gap[i] != gap[i] or gap[i] == gap[first]:
            continue
        if kind[row[i]] == 1:
            be[of_be] = gap[i]
            of_be += 1
        else:
            rt[of_rt] = gap[i]
            of_rt += 1
    if of_rt:
        found.append((real_time[:of_rt], 1, 0))
    if of_be:
        found.append((best_effort[:of_be], 0, 1))
    return n_be, found


cdef int same_length(cnp.ndarray one, cnp.ndarray other) except -1:
    if size(one) != size(other):
        raise ValueError("rows and what goes with them differ in number")
    return 0
