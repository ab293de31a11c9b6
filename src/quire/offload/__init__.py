"""Moves blocks between the pool and the tiers below it, or host memory: load, store, swap.

Others may use
    open_tiers              the tiers of an engine, opened from its config
    tier_load, store, swap  loads from tiers, stores into them, swaps of preempted sequences
    states                  states of recurrent layers, in and out
    kept_scores             scores of tokens, kept beside their keys
    throughputs             measured seconds of copying and computing
    tier_events             the tiers' KV events
    offloaded_sequence      the fields of a sequence that the offload needs
"""
