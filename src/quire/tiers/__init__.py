"""Keys and values kept below the pool: in host memory, in a folder, on a Redis server.

names     what a segment is called, and what it stands for; the chain of them that a prompt is
segment   what it looks like as bytes, checked on every load
tier      the contract: values by key; by_url: which one a URL means
host      in this process's memory
remote    on a Redis server, shared by engines; breaker: what gives it a rest after a failure; signed: its values
          signed under a secret; finite: whether their numbers are numbers
stack     all of them together, asynchronous: what an engine talks to; transfer: a load or a lookup under way
guarded   one tier as the stack uses it; workers: its threads; speed: what it measured
disk      in a folder, for good: disk_index, an SQLite index; disk_schema, its tables; slabs, the files of values;
          read_buffers, what they are read into; extents, what is free in them; disk_writer, who changes them;
          shared_stores, those who store at the same time; files, the system calls; folder_lock; disk_folder, all of it
          checked or removed

Others may use
    tier, stack, guarded, transfer       the contract; all tiers together; one of them; a load under way
    disk, host, remote, signed, by_url   the tiers; which one a URL means
    disk_folder, disk_index              what is in a folder
    names, segment, stored_prefix        what a segment is called, its bytes; how far a prompt is stored
    speed, niceness                      what was measured; threads that give way
    files, folder_lock                   system calls; one at a time
"""
