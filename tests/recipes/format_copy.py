"""The recipe's smallest format: bfloat16 under another name."""

from quire.spec.kv_formats import KVFormat, register

COPY = KVFormat("bfloat16-copy", element="bfloat16", num_bytes=2)
register(COPY)
