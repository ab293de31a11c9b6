"""Quantized weights of a few bits a value, and the product with one that never dequantizes it as a whole.

Others may use the names below, and
    rounding    the version of the rounding
    readers     quantized weights from checkpoints and GGUF files
"""

from quire.weights.codes.code_device import code_extension
from quire.weights.codes.code_form import (
    PANEL,
    PANEL_LAYOUT,
    CodeForm,
    FactorForm,
    form_of,
    join_forms,
    require_product,
    rounded_form,
)
from quire.weights.codes.panels import QuantizedPanels
from quire.weights.codes.quantized_reference import multiply
from quire.weights.codes.rounding import round_to_codes
from quire.weights.codes.weight import Factor, QuantizedWeight, join_weights

__all__ = [
    "PANEL",
    "PANEL_LAYOUT",
    "CodeForm",
    "Factor",
    "FactorForm",
    "QuantizedPanels",
    "QuantizedWeight",
    "code_extension",
    "form_of",
    "join_forms",
    "join_weights",
    "multiply",
    "require_product",
    "round_to_codes",
    "rounded_form",
]
