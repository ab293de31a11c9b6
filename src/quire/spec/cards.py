"""Graphics cards by name: memory, bandwidth and arithmetic, for a plan before a card is there.

A process cannot take the round number of a card's name: the driver's firmware, and the error correction of GDDR memory,
take a part. `total_bytes` is the least total that torch reported for the card in public logs of out-of-memory errors
("GPU 0 has a total capacity of 79.11 GiB"), rounded down to 0.1 GiB. `CONTEXT_BYTES` of it are for the CUDA context,
torch's and the kernels' code. `spare_bytes` of a card are left to torch when a budget is made, there or in a plan.

`bytes_per_s` and `flops` (16-bit numbers, matrix units, sums in float32, dense: without the doubling by sparsity) are
the peaks of the makers' data sheets, so they serve as bounds: NVIDIA H100, H200, A100, L4, L40S, A10, T4, V100, HGX
B200; the architecture papers of GA102, AD102 and GB202 for the three GeForce cards; AMD Instinct MI300X, MI325X.

Not a promise that Quire runs on a card: docs/plan.md.

Cost: a look-up in a dict; imports no torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.errors import ArgumentError
from quire.sizes import parse_size

__all__ = ["CARDS", "CONTEXT_BYTES", "Card", "card_called", "check_device", "parse_card", "spare_bytes"]

CONTEXT_BYTES = 512 << 20
_SPARE_SHARE, _SPARE_BYTES = 0.05, 512 << 20
_TORCH = re.compile(r"(?:cpu|cuda|mps|xpu)(?::\d+)?")
_OWN = re.compile(r"([\w .-]+):([^:]+)(?::([^:]+)/s)?")


@dataclass(frozen=True)
class Card:
    """A graphics card.

    name: of the option `device`. title: the driver's name of it. total_bytes: memory that torch reports. bytes_per_s:
    of its memory; None: unknown. flops: 16-bit operations a second; None: unknown. architecture: the compiler's target.
    """

    name: str
    title: str
    total_bytes: int
    bytes_per_s: float | None = None
    flops: float | None = None
    architecture: str = ""

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes of models that it computes; Volta and Turing have no bfloat16."""
        old = self.architecture in ("sm_70", "sm_75")
        return ("float32", "float16") if old else ("float32", "bfloat16", "float16")


def _card(name: str, title: str, gib: float, gb_per_s: float, tflops: float, architecture: str) -> Card:
    return Card(name, title, int(gib * 2**30), gb_per_s * 1e9, tflops * 1e12, architecture)


CARDS = {
    card.name: card
    for card in (
        _card("b200", "NVIDIA B200", 178.3, 8000, 2250, "sm_100"),
        _card("h200", "NVIDIA H200", 139.7, 4800, 989, "sm_90"),
        _card("h100", "NVIDIA H100 80GB HBM3", 79.1, 3350, 989, "sm_90"),
        _card("h100-pcie", "NVIDIA H100 PCIe", 79.1, 2000, 756, "sm_90"),
        _card("a100", "NVIDIA A100-SXM4-80GB", 79.1, 2039, 312, "sm_80"),
        _card("a100-40gb", "NVIDIA A100-SXM4-40GB", 39.3, 1555, 312, "sm_80"),
        _card("l40s", "NVIDIA L40S", 44.3, 864, 362, "sm_89"),
        _card("l4", "NVIDIA L4", 21.9, 300, 121, "sm_89"),
        _card("a10", "NVIDIA A10", 21.9, 600, 125, "sm_86"),
        _card("t4", "Tesla T4", 14.5, 320, 65, "sm_75"),
        _card("v100", "Tesla V100-SXM2-16GB", 15.7, 900, 125, "sm_70"),
        _card("v100-32gb", "Tesla V100-SXM2-32GB", 31.7, 900, 125, "sm_70"),
        _card("5090", "NVIDIA GeForce RTX 5090", 31.3, 1792, 209.5, "sm_120"),
        _card("4090", "NVIDIA GeForce RTX 4090", 23.5, 1008, 165.2, "sm_89"),
        _card("3090", "NVIDIA GeForce RTX 3090", 23.5, 936, 71, "sm_86"),
        _card("mi300x", "AMD Instinct MI300X", 191.6, 5300, 1307, "gfx942"),
        _card("mi325x", "AMD Instinct MI325X", 255.6, 6000, 1307, "gfx942"),
    )
}


def parse_card(text: str) -> Card:
    """The card of a name such as "h100" or "rtx4090", or of sizes: "mine:40GiB", "mine:40GiB:1.5TB/s".

    *raises:* ArgumentError: an unknown name, or sizes that cannot be read.
    """
    name = re.sub(r"^rtx[ _-]*", "", text.strip().lower())
    if name in CARDS:
        return CARDS[name]
    if (own := _OWN.fullmatch(text.strip())) is None:
        raise ArgumentError(
            f"expected cpu, cuda, a card, one of {', '.join(CARDS)}, or sizes such as mine:40GiB or "
            f"mine:40GiB:1.5TB/s, got {text!r} - in `device`"
        )
    title, size, speed = own.groups()
    total_bytes = parse_size(size, where="`device`")
    if total_bytes <= (least := CONTEXT_BYTES + spare_bytes(total_bytes)):
        raise ArgumentError(
            f"expected a card of more than the {least >> 20} MiB that its context and a step take, got {size!r} - in "
            "`device`"
        )
    return Card(
        title, title, total_bytes, None if speed is None else float(parse_size(speed, where="`device`"))
    )


def check_device(text: str) -> str | None:
    """Returns a device of torch ("cpu", "cuda:1"), or None for a card of `parse_card`. *raises:* ArgumentError:
    neither."""
    if _TORCH.fullmatch(text):
        return text
    parse_card(text)
    return None


def spare_bytes(total_bytes: int) -> int:
    """Memory of a card that is left to torch for the tensors of a step and its workspaces."""
    return max(_SPARE_BYTES, int(total_bytes * _SPARE_SHARE))


def card_called(title: str) -> Card | None:
    """The card that the driver calls `title`, if the table has it."""
    return next((card for card in CARDS.values() if card.title == title), None)
