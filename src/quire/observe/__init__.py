"""Observation of the cache: mirror of the tree, events, history.

Others may use
    tree_mirror    a copy of the tree, kept up by events
    history        the log of lost blocks, and uses
    event_types    events in process
    known_parents  the events whose parent block a consumer knows
    kv_events      subscribers, and the events' wire format
    publisher      the events over ZeroMQ
    prefixes       the report of the largest prefixes
"""
