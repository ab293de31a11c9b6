"""Runs traced or synthetic requests through the real scheduler, cache and storages, with a clock in place of a model.

Others may use the names below, and
    comparison, side_by_side   storages over the same requests: in a table, and step by step
    plot                       a comparison as a picture, and hit rates
    simulated_cache, simulated_store                      caches without a model: one, and a shared tier
    replica, simulated_replica, engine_replica            a replica: its contract, one with a queue, one with steps
    routing, replay, trace_simulation                     the choice of a replica; a trace through replicas, in rows
    measured_cost, measured_store                         cost lines of a model on this machine, and of a store
"""

from quire.simulate.cost_line import CostLine
from quire.simulate.lengths import Lengths
from quire.simulate.trace_files import read_trace
from quire.simulate.workload import TraceRequest, Workload, synthetic

__all__ = ["CostLine", "Lengths", "TraceRequest", "Workload", "read_trace", "synthetic"]
