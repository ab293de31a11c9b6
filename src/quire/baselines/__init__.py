"""contiguous and growing storage: the same protocol without paging, off the main path.

Others may use
    contiguous, growing   the two storages
    row_cache             the cache protocol where a sequence is one row of memory
    arena, buffers        which rows are free, of each storage
"""
