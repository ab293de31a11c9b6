"""Attention over tokens with pages of their own, with unmapped addresses before the first visible token and behind the
last.

Run as a program: a kernel that reads one byte too far ends the process. Both back ends, compared with each other.
With `--beyond` the program itself reads the first byte behind a context, and must be killed.
"""

from __future__ import annotations

import itertools
import math
import sys
from dataclasses import dataclass

import numpy as np
import torch

from quire.attention import AttentionOptions, attention_batch, reference_attention
from quire.devices.cpu import native_attention
from quire.memory import KVView
from quire.memory.placement import PlacementHeap

PAGE = 4096
ROW_TOKENS = 1024
# (context, new tokens): around tiles of 32, blocks of rows and partials of 512.
LENGTHS = [(1, 1), (31, 1), (32, 1), (33, 5), (64, 64), (100, 37), (513, 1), (545, 70)]


@dataclass(frozen=True)
class Guarded:
    """Sequences in rows of a placement heap, of which only the visible tokens are mapped."""

    dtype: torch.dtype
    k_dim: int
    v_dim: int
    window: int

    def run(self, *, beyond: bool = False) -> None:
        item = self.dtype.itemsize
        heads = math.lcm(*(PAGE // math.gcd(PAGE, dim * item) for dim in (self.k_dim, self.v_dim)))
        dims = (self.k_dim, self.v_dim)
        heap = PlacementHeap([heads * dim * item for dim in dims], max_blocks=4096)
        rows = heap.reserve(len(LENGTHS) * ROW_TOKENS)
        options = AttentionOptions(scale=self.k_dim**-0.5, window=self.window)
        positions = []
        for row, (context, new) in enumerate(LENGTHS):
            first = options.first_visible(context - new)
            positions.append(row * ROW_TOKENS + np.arange(first, context))
        mapped = np.concatenate(positions)
        # No two neighbours: what follows in memory is never the next token.
        block_ids = heap.allocate(2 * len(mapped))[::2]
        heap.map([(rows, mapped, block_ids)])
        k, v = (
            rows.tensor(layer_buffer, self.dtype).as_strided(
                (len(LENGTHS), heads, ROW_TOKENS, dim), (ROW_TOKENS * heads * dim, dim, heads * dim, 1)
            )
            for layer_buffer, dim in enumerate(dims)
        )
        view = KVView(k, v, ROW_TOKENS)
        rng = torch.Generator().manual_seed(1)
        written = [torch.randn(len(mapped), heads, dim, generator=rng).to(self.dtype) for dim in dims]
        native_attention.write(view, written[0], written[1], torch.from_numpy(mapped))
        plan = attention_batch(
            np.cumsum([0, *(new for _, new in LENGTHS)]),
            np.array([context for context, _ in LENGTHS]),
            np.arange(len(LENGTHS))[:, None],
            ROW_TOKENS,
        )
        query = torch.randn(plan.num_tokens, heads, self.k_dim, generator=rng).to(self.dtype)
        want = reference_attention.run(view, query.float(), plan, options)
        got = native_attention.run(view, query, plan, options)
        if beyond:
            print(float(view.k[0, 0, LENGTHS[0][0], 0]))
        bound = 1e-4 if self.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.float(), want, rtol=bound, atol=bound)
        heap.close()


def main() -> None:
    if "--beyond" in sys.argv:
        Guarded(torch.float32, 128, 128, 0).run(beyond=True)
        return
    dtypes = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, (k_dim, v_dim), window in itertools.product(dtypes, [(128, 128), (64, 96), (40, 24)], [0, 37]):
        Guarded(dtype, k_dim, v_dim, window).run()


if __name__ == "__main__":
    main()
