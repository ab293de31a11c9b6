"""Keys and values kept below the pool: in host memory, in a folder, on a Redis server.

keys      what a segment is called: a chained hash of model, namespace and tokens
names     a key and what it stands for; the chain of them that a prompt is
segment   what it looks like as bytes, checked on every load
tier      the contract: values by key
host      in this process's memory
remote    on a Redis server, shared by engines; breaker: what gives it a rest after a failure
stack     all of them together, asynchronous: what an engine talks to; transfer: a load or a lookup under way
guarded   one tier as the stack uses it; workers: its threads; speed: what it measured
disk      in a folder, for good: disk_index, an SQLite index; disk_schema, its tables; slabs, the files of values;
          read_buffers, what they are read into; extents, what is free in them; disk_writer, who changes them;
          shared_stores, those who store at the same time; files, the system calls; folder_lock; disk_folder, all of it
          checked or removed
"""
