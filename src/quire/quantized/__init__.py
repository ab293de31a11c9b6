"""Weights as codes of a few bits, and the product with one without widening a whole one."""

from quire.quantized.reference import multiply
from quire.quantized.rounding import Rounding, parse_rounding, round_to_codes
from quire.quantized.weight import Factor, QuantizedWeight

__all__ = ["Factor", "QuantizedWeight", "Rounding", "multiply", "parse_rounding", "round_to_codes"]
