"""The work of every engine: the cases, their prompts, and their figures.

Standard library only: the comparison, and nothing of an engine. Prompts are token ids, drawn from the name of the
case and the repetition, so that every engine gets the same and no engine finds those of an earlier repetition in
its prefix cache. Greedy, fixed length, the end token ignored.

Figures, from `times[request][token]` in seconds since the engine got the requests:
    rate      tokens per second that came after every request had its first one
    prefill   prompt tokens per second until the first token
    seconds   until the last token of the last request
    turn      seconds from the last token of the first turn to the first one of the second

A second turn continues a conversation: the first request's prompt, the engine's answer, and new tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["CASES", "START", "Case", "cases_of"]


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Args:
        figure: "rate", "prefill", "seconds" or "turn".
        shared: the first so many tokens of each prompt are the same in all.
        lead: the first request finishes before the others arrive.
        turn: new tokens of the second of two requests, which goes on with the first.
        tight: in its own process, whose KV cache has `tight_kv_bytes` of the shape, too few for all at once.
        dense_only: not asked of models with recurrent layers.
        target: least ratio to the best peer of a dense model, without and with AMX.
        quantized_target: the same among engines with weights of 4 bits.
    """

    name: str
    figure: str
    batch: int
    prompt: int
    new: int
    target: tuple[float, float] | None
    shared: int = 0
    lead: bool = False
    turn: int = 0
    tight: bool = False
    dense_only: bool = False
    quantized_target: float | None = None

    @property
    def higher_is_better(self) -> bool:
        return self.figure in ("rate", "prefill")

    @property
    def unit(self) -> str:
        return "tokens/s" if self.higher_is_better else "s"

    @property
    def needs_prefix_cache(self) -> bool:
        return bool(self.shared or self.turn)

    @property
    def length(self) -> int:
        """Tokens of its longest request, with its answer."""
        return self.prompt + self.new + (self.turn + self.new if self.turn else 0)

    def prompts(self, vocab_size: int, repetition: int) -> list[list[int]]:
        """The new tokens of a second turn; the driver puts the conversation before them."""
        draw = random.Random(f"{self.name} {repetition}")
        if self.turn:
            return [[draw.randrange(vocab_size) for _ in range(count)] for count in (self.prompt, self.turn)]
        shared = [draw.randrange(vocab_size) for _ in range(self.shared)]
        own = self.prompt - self.shared
        return [shared + [draw.randrange(vocab_size) for _ in range(own)] for _ in range(self.batch)]

    def quick(self) -> Case:
        """The same kind of case, small."""
        return Case(
            name=self.name,
            figure=self.figure,
            batch=min(self.batch, 4),
            prompt=max(self.prompt // 16, 17),
            new=min(self.new, 8),
            target=self.target,
            shared=self.shared // 16,
            lead=self.lead,
            turn=self.turn // 32,
            tight=self.tight,
        )

    def count(self, times: list[list[float]]) -> float:
        """The case's figure of one run. *raises:* ValueError if tokens are missing."""
        got = [len(one) for one in times]
        if got != [self.new] * self.batch:
            raise ValueError(
                f"expected {self.batch} requests of {self.new} tokens, got {got} - in {self.name}"
            )
        end = max(one[-1] for one in times)
        if self.figure == "seconds":
            return end
        if self.figure == "turn":
            return times[1][0] - times[0][-1]
        first = max(one[0] for one in times)
        if self.figure == "prefill":
            return self.batch * self.prompt / first
        return sum(at > first for one in times for at in one) / (end - first)


START = Case("start to first token", "seconds", 1, 128, 1, target=(1.0, 1.0))
CASES = [
    Case("decode, batch 1", "rate", 1, 128, 64, target=(1.1, 1.05), quantized_target=1.5),
    Case("decode, batch 8", "rate", 8, 128, 64, target=(1.25, 1.2), quantized_target=1.3),
    Case("decode, batch 32", "rate", 32, 128, 64, target=(1.35, 1.25), quantized_target=1.3),
    Case("decode, 8 x 2048", "rate", 8, 2048, 32, target=(1.7, 1.05), dense_only=True),
    Case("prefill 2048", "prefill", 1, 2048, 1, target=(1.1, 1.05)),
    Case("16 x (1024 shared + 32), together", "seconds", 16, 1056, 16, target=(1.4, 1.4), shared=1024),
    Case(
        "16 x (1024 shared + 32), one first",
        "seconds",
        16,
        1056,
        16,
        target=(1.4, 1.4),
        shared=1024,
        lead=True,
    ),
    Case("first token of 2000 + 16 + 64, cold", "seconds", 1, 2080, 1, target=None),
    Case("first token of 2000 + 16 + 64, second turn", "turn", 2, 2000, 16, target=None, lead=True, turn=64),
    Case(
        "32 x (512 + 128) in 256 MiB", "seconds", 32, 512, 128, target=(1.2, 1.2), tight=True, dense_only=True
    ),
]


def cases_of(kind: str) -> list[Case]:
    """Those asked of models of this kind (`shape.KINDS`)."""
    return [case for case in CASES if kind == "dense" or not case.dense_only]
