"""What can be seen of the cache: mirror of the tree, events, history, explanations.

Others may use
    mirror         a copy of the tree, fed by events
    history        what was given up, and when
    event_types    events in process
    known_parents  of all events, those that a consumer can place
    kv_events      events as other programs read them
    publisher      where those events go
    prefixes       the report of the largest prefixes
"""
