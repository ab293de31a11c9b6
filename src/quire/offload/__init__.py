"""What moves blocks between the pool and what is below it: load, store, swap.

Others may use
    tiering              the tiers of an engine, opened from its config
    load, store, swap    what moves blocks: in, out, and of a sequence that waits
    states               states of recurrent layers, in and out
    speeds               what moving and computing take
    tier_events          the tiers' events
    waiting              how far a search, a load or a swap has come
"""
