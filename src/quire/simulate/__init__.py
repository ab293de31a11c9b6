"""Runs traced or synthetic requests through the real scheduler, cache and storages, with a clock in place of a model.

Others may use the names below, and
    comparison, side_by_side   storages over the same requests: in a table, and step by step
    plot                       a comparison as a picture
"""

from quire.simulate.cost_line import CostLine
from quire.simulate.lengths import Lengths
from quire.simulate.workload import TraceRequest, Workload, read_trace, synthetic

__all__ = ["CostLine", "Lengths", "TraceRequest", "Workload", "read_trace", "synthetic"]
