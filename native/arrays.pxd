"""Arrays of numpy as C sees them, checked: a pointer knows neither type nor stride.

A pointer keeps no array alive: name the array that it is of, or know who holds it.

Memoryviews check the same, and take 0.15 us each to make, ten times as long. A step hands forty
columns to kernels that work for a microsecond.
"""

cimport numpy as cnp
from libc.stdint cimport int8_t, int32_t, int64_t


cdef inline void* _column(cnp.ndarray column, int kind) except? NULL:
    if cnp.PyArray_TYPE(column) != kind or not cnp.PyArray_ISCARRAY_RO(column):
        raise TypeError("a kernel wants a column of its type, whole and without gaps")
    return cnp.PyArray_DATA(column)


cdef inline int64_t* ints(column) except? NULL:
    return <int64_t*>_column(column, cnp.NPY_INT64)


cdef inline int32_t* short_ints(column) except? NULL:
    return <int32_t*>_column(column, cnp.NPY_INT32)


cdef inline int8_t* tiny_ints(column) except? NULL:
    return <int8_t*>_column(column, cnp.NPY_INT8)


cdef inline int8_t* flags(column) except? NULL:
    return <int8_t*>_column(column, cnp.NPY_BOOL)


cdef inline double* floats(column) except? NULL:
    return <double*>_column(column, cnp.NPY_FLOAT64)


cdef inline int64_t* rows_of(rows, columns) except? NULL:
    """`rows`, each of which the columns have (a RequestTable, or one column)."""
    cdef int64_t* row = ints(rows)
    cdef int64_t wrong = 0
    # a table's own `len` is a call of Python's
    cdef Py_ssize_t i, length = (
        size(columns) if isinstance(columns, cnp.ndarray) else len(columns.ids)
    )
    for i in range(size(rows)):
        wrong |= row[i] | (length - 1 - row[i])  # below 0 if either part is, without a branch
    for i in range(size(rows) if wrong < 0 else 0):
        if not 0 <= row[i] < length:
            raise IndexError(f"row {row[i]} of columns of {length} rows")
    return row


cdef inline Py_ssize_t size(cnp.ndarray column):
    return cnp.PyArray_DIM(column, 0)


cdef inline cnp.ndarray new_ints(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_INT64)


cdef inline cnp.ndarray new_floats(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_FLOAT64)


cdef inline cnp.ndarray new_flags(Py_ssize_t n):
    cdef cnp.npy_intp shape = n
    return cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_BOOL)


cdef inline cnp.ndarray whole(values):
    """`values` (a caller's, not a column) as int64 without gaps."""
    if cnp.PyArray_TYPE(values) == cnp.NPY_INT64 and cnp.PyArray_ISCARRAY_RO(values):
        return values
    return values.astype("int64", order="C", casting="safe")
