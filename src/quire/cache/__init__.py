"""Which token lives where: pool, prefix tree, groups, sequences, and the facade `Cache`. No tensors, no torch.

Others may use
    cache          `Cache`: the facade, with either block manager behind it
    protocol       the contract: `KVCache`, `PrefixKVCache`, `CacheSequence`
    prefix_key     whose content a prefix is
    state_cache, checkpoints   states of recurrent layers beside the blocks
    exchange       how many blocks and how many states one memory makes
    pins           what must stay, and of what priority
    answers, arguments, block_counts, block_hash, known_tokens   what implementations of the protocol share
    block_map, memory_use, report, tree_view                     what can be seen of a cache
    events, feed, steady_clock                                   what it tells of its changes, and when
"""
