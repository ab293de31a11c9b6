"""GGUF blocks as codes: the bits of the gguf package's own dequantization, for any bytes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.errors import LoadError
from quire.weights.codes import form_of
from quire.weights.codes.readers import GGUF_TYPES, gguf_form, read_gguf


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_random_bytes_have_the_bits_of_the_package(kind: str) -> None:
    quant = gguf.GGMLQuantizationType[kind]
    num_values, num_bytes = gguf.GGML_QUANT_SIZES[quant]
    rows, blocks = 70, 3
    data = np.random.default_rng(len(kind)).integers(0, 256, (rows, blocks * num_bytes), dtype=np.uint8)
    with np.errstate(invalid="ignore", over="ignore"):
        expected = torch.from_numpy(gguf.dequantize(data, quant))
    weight = read_gguf(kind, torch.from_numpy(data))
    assert weight.label == kind
    assert gguf_form(kind, blocks * num_values) == form_of(weight)  # told by the header alone
    got = weight.dequantize()
    assert got.shape == (rows, blocks * num_values)
    assert torch.equal(got.isnan(), expected.isnan())
    known = ~expected.isnan()
    assert known.float().mean() > 0.8
    assert torch.equal(got.view(torch.int32)[known], expected.view(torch.int32)[known])


def test_other_types_are_refused_by_name() -> None:
    with pytest.raises(LoadError, match=r"expected a GGUF type of Q4_0, .*MXFP4, got IQ2_XXS"):
        read_gguf("IQ2_XXS", torch.zeros(1, 66, dtype=torch.uint8))
    with pytest.raises(LoadError, match=r"expected Q4_K as \[N, multiple of 144\] uint8, got \(2, 143\)"):
        read_gguf("Q4_K", torch.zeros(2, 143, dtype=torch.uint8))
