"""The KV of one layer: the past tokens that it still needs (`Span`), and the shape of K and V of a token (`LayerSpec`).

A new kind of layer is one more entry in `KINDS`. Every call is O(1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quire.errors import ArgumentError
from quire.spec.kv_formats import format_of, pair_name

__all__ = ["KINDS", "LayerSpec", "Span", "layer_ranges"]

KINDS: dict[str, Callable[[int], tuple[int, int]]] = {
    "full": lambda size: (0, 1),
    "window": lambda size: (size, 1),
    "chunked": lambda size: (1, size),
}
"""Kind of layer -> (window, step) of a size. A query at q sees the keys from the last multiple of `step`
that is at most q - window + 1; all keys if window is 0."""


@dataclass(frozen=True)
class Span:
    """The past tokens that a layer still needs.

    `full`: all. `window`: a query at position q sees keys k with q - k < size. `chunked`: keys with
    k // size == q // size. Other kinds are entries of `KINDS`.
    """

    kind: str = "full"
    size: int = 0
    window: int = field(init=False, repr=False, compare=False)
    step: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            *others, last = KINDS
            raise ArgumentError(f"expected {', '.join(others)} or {last}, got {self.kind!r} as a span kind")
        if (self.kind == "full") != (self.size == 0) or self.size < 0:
            raise ArgumentError(
                f"expected a positive size for a window or chunk and 0 for full, got {self.kind} of {self.size}"
            )
        window, step = KINDS[self.kind](self.size)
        object.__setattr__(self, "window", window)
        object.__setattr__(self, "step", step)

    def first_needed(self, position: int) -> int:
        """First token position that the query at `position` may read."""
        if not self.window:
            return 0
        first = max(0, position - self.window + 1)
        return first - first % self.step

    @property
    def max_num_kept(self) -> int:
        """Largest number of a sequence's tokens that a layer with a window or chunks stores; 0 for a full layer."""
        return self.window + self.step - 1

    def num_kept(self, num_tokens: int) -> int:
        """Largest number of tokens that a layer stores at once for a sequence of `num_tokens` tokens."""
        return min(num_tokens, self.max_num_kept) if self.window else num_tokens


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer's KV: its span and shape (elements), or the layer whose KV it reads instead.

    A layer without K and V (with a state instead, `KVSpec.states`) has 0 heads.
    latent: V is not a separate field but the first `v_head_dim` columns of K (MLA: one head, K the compressed latent
    followed by the rotated part of the keys, V the latent).
    index_of: not a decoder layer, but the keys by which that layer's indexer chooses tokens (DSA): one head, K alone.
    Such layers follow the decoder's.
    k_format, v_format: names of the formats of stored rows of K and of V (`quire.spec.kv_formats`); empty for the
    model's own dtype.
    """

    span: Span
    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    shares_kv_with: int | None = None
    latent: bool = False
    index_of: int | None = None
    k_format: str = ""
    v_format: str = ""

    def __post_init__(self) -> None:
        if self.latent and self.v_head_dim > self.k_head_dim:
            raise ArgumentError(
                f"expected a latent layer's values among its keys' {self.k_head_dim} columns, got {self.v_head_dim}"
            )

    @property
    def stored_v_dim(self) -> int:
        """Elements of a head's V stored next to K: 0 if V is a part of K."""
        return 0 if self.latent else self.v_head_dim

    @property
    def stored_dims(self) -> tuple[int, ...]:
        """Elements of a head's K and of its V; of K alone if V is a part of it."""
        return (self.k_head_dim,) if self.latent else (self.k_head_dim, self.v_head_dim)

    def row_elements(self, dtype_bytes: int) -> tuple[int, ...]:
        """Size of a stored row of a head's K, and of its V: in elements of the model's dtype, of so many bytes, in any
        format, so that storages have rows of one kind of element."""
        return tuple(
            -(-format_of(name).row_bytes(dim) // dtype_bytes) if name else dim
            for name, dim in zip((self.k_format, self.v_format), self.stored_dims, strict=False)
        )

    def kv_dtype(self, dtype: str) -> str:
        """The storage format of K and V, by `kv_dtype`'s name; dtype: the model's."""
        return pair_name(self.k_format, self.v_format or self.k_format) or dtype

    @property
    def input_dims(self) -> tuple[int, int]:
        """Elements of a head that a model passes to its cache as K and as V: for a latent layer the latent, and the
        rotated part that follows it."""
        if self.latent:
            return self.v_head_dim, self.k_head_dim - self.v_head_dim
        return self.k_head_dim, self.v_head_dim

    @property
    def attends(self) -> bool:
        """Whether it reads K and V, its own or another layer's."""
        return self.shares_kv_with is not None or self.num_kv_heads > 0

    @property
    def stores_kv(self) -> bool:
        """Whether it stores keys and values of its own."""
        return self.shares_kv_with is None and self.num_kv_heads > 0

    @property
    def elements_per_token(self) -> int:
        """Elements of K and V that one token adds to this layer; 0 for a shared layer."""
        if self.shares_kv_with is not None:
            return 0
        return self.num_kv_heads * sum(self.stored_dims)


def layer_ranges(numbers: Iterable[int], between: str = "-") -> str:
    """Ranges of rising numbers: "0-1, 5"; between: separates the first of a run from its last."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}{between}{last}" for first, last in runs)
