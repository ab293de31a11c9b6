"""Keys and values kept below the pool: in host memory, in a folder, on a Redis server.

keys      what a segment is called: a chained hash of model, namespace and tokens
segment   what it looks like as bytes, checked on every load
tier      the contract: values by key
disk      in a folder, for good: disk_index, an SQLite index; slabs, the files of values; extents, what is free in them;
          disk_writer, who changes them; files, the system calls; folder_lock; disk_folder, all of it checked or removed
"""
