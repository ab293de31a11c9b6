"""Keys and values kept below the pool: in host memory, in a folder, on a Redis server.

keys      what a segment is called: a chained hash of model, namespace and tokens
segment   what it looks like as bytes, checked on every load
tier      the contract: values by key
"""
