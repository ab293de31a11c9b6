"""The contiguous and growing storages: the same protocol without paging, for comparison.

Others may use
    contiguous, growing   the two storages
    row_cache             the cache protocol for storages with one row of memory a sequence
    arena, buffers        the free rows of each storage
"""
