"""Keys and values kept below the pool: in host memory, in a folder, on a Redis server.

keys      what a segment is called: a chained hash of model, namespace and tokens
names     a key and what it stands for; the chain of them that a prompt is
segment   what it looks like as bytes, checked on every load
tier      the contract: values by key
host      in this process's memory
remote    on a Redis server, shared by engines; breaker: what gives it a rest after a failure
stack     all of them together, asynchronous: what an engine talks to; transfer: a load or a lookup under way
guarded   one tier as the stack uses it; workers: its threads; speed: what it measured
"""
