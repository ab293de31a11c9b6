"""Tiers below the pool: host memory, a folder, a Redis server. Each keeps values (segments' bytes) by key.

segment_key  `SegmentKey` and the chain of a prompt's segments
segment      a segment as bytes, checked on every load
tier         the contract: values by key; by_url: the tier of a URL
host         in this process's memory
remote       on a Redis server, shared by engines; circuit_breaker: pauses after failures; limited_socket: limits of
an exchange;
             signed: values signed under a secret; check_finite: no infinity or NaN in keys and values
stack        all tiers behind one asynchronous interface, which the engine uses; transfer: a lookup or load under way
tier_worker  one tier of the stack; workers: its threads; throughput: its measurements; tier_changes: stored and lost
disk         in a folder, durable; disk_index, an SQLite index; disk_schema, its tables; slabs, the files of values;
             read_buffers, memory to read into; extents, free space; disk_writer, all changes; shared_stores, group
             commit; recent_uses; files, the system calls; folder_lock; disk_folder, check or remove a folder

Others may use
    tier, stack, tier_worker, tier_changes, transfer   the contract; all tiers; one of them; a load under way
    disk, host, remote, signed, by_url                 the tiers; the tier of a URL
    disk_folder, disk_index                            the contents of a folder
    segment_key, segment, stored_prefix                a segment's key, its bytes; how far a prompt is stored
    throughput, thread_priority                        measurements; background threads
    files, folder_lock                                 system calls; locks
"""
