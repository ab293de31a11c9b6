"""The place of every token: pool, prefix tree, groups, sequences, and the facade `Cache`. No tensors, no torch.

Others may use
    cache          `Cache`: the facade, with either block manager behind it
    protocol       the contract: `KVCache`, `PrefixKVCache`, `CacheSequence`
    prefix_key     the owner and namespace of a prefix
    states.state_cache, states.checkpoints   states of recurrent layers
    states.memory_split                      how blocks and state slots share one memory
    pins           content that stays in memory on request
    results, arguments, block_counts, block_hash, known_tokens   shared by implementations of the protocol
    block_map, memory_use, report, tree_view                     views of a cache
    events, event_dispatcher, steady_clock                       changes, their listeners, and their times
"""
