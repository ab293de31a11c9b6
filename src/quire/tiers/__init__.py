"""Tiers below the pool: host memory, a folder, peers, a shared store. Each keeps values (segments' bytes) by key.

segment_key  `SegmentKey` and the chain of a prompt's segments
segment      a segment as bytes, checked on every load; check_finite: no infinity or NaN in keys and values
tier         the contract: values by key; by_url: the tier of a URL
host         in this process's memory
disk/        in a folder, durable
peers/       host memory of other engines, over TCP
remote/      in a store that engines share (Redis, S3, a folder, Mooncake); circuit_breaker: pauses after failures
stack        all tiers behind one asynchronous interface, which the engine uses; transfer: a lookup or load under way
tier_worker  one tier of the stack; workers: its threads; throughput: its measurements; tier_changes: stored and lost

Others may use
    tier, stack, tier_worker, tier_changes, transfer   the contract; all tiers; one of them; a load under way
    host, disk.disk_tier, remote.remote_tier           the tiers
    remote.signed, remote.store_protocol, by_url       signed values; the contract of a store; the tier of a URL
    peers.peer_server, peers.peer_tier                 gives values to peers; fetches them
    disk.disk_folder, disk.disk_index                  the contents of a folder
    segment_key, segment, stored_prefix                a segment's key, its bytes; how far a prompt is stored
    throughput, thread_priority                        measurements; background threads
    disk.files, disk.folder_lock                       system calls; locks
"""
