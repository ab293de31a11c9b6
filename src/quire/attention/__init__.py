"""Attention over paged keys and values: write them to slots, read them through block tables.

`backend()` is the way in; `reference` is the definition in torch, `native` the kernels.
"""

from quire.attention.backends import AttentionBackend, backend
from quire.attention.options import AttentionOptions
from quire.attention.plan import AttentionPlan

__all__ = ["AttentionBackend", "AttentionOptions", "AttentionPlan", "backend"]
