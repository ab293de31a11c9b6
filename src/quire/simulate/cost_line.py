"""The duration of a step without a model: linear in the tokens that the step computes and reads.

    seconds = fixed + token * new tokens + context * tokens of context read

A sequence with one new token costs `decode` in place of `token`; without that term it costs a token as any other.
The default is the line through this project's own figures for a 0.6B decoder in bfloat16 on two AVX-512 cores
(docs/benchmarks.md: decode of 1 and of 32 sequences, and of 8 at a context of 2 048): an example; replace it by a line
through your own machine's figures.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.errors import ArgumentError

__all__ = ["CostLine"]

_UNIT_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TERM = re.compile(r"\s*([0-9.]+)\s*(s|ms|us|ns)\s*(?:/\s*(token|decode|context))?\s*")


@dataclass(frozen=True)
class CostLine:
    """Seconds of a step: `fixed_s`, plus `token_s` for each new token and `context_s` for each token of context.
    decode_s: in place of `token_s`, for a sequence with one new token; None: `token_s`."""

    fixed_s: float = 28e-3
    token_s: float = 2.4e-3
    context_s: float = 3.5e-6
    decode_s: float | None = None

    @classmethod
    def parse(cls, text: str) -> CostLine:
        """ "28ms + 2.4ms/token + 1ms/decode + 3.5us/context"; a missing term is 0, a missing decode a token's.

        *raises:* ArgumentError.
        """
        seconds_by_term = {"": 0.0, "token": 0.0, "context": 0.0}
        for part in text.split("+"):
            match = _TERM.fullmatch(part)
            try:
                assert match is not None
                term = match[3] or ""
                seconds_by_term[term] = (
                    seconds_by_term.get(term, 0.0) + float(match[1]) * _UNIT_SECONDS[match[2]]
                )
            except (AssertionError, ValueError):
                raise ArgumentError(
                    f'expected a cost line such as "28ms + 2.4ms/token + 3.5us/context", got {text!r} at '
                    f"{part.strip()!r}"
                ) from None
        return cls(
            seconds_by_term[""],
            seconds_by_term["token"],
            seconds_by_term["context"],
            seconds_by_term.get("decode"),
        )

    def __str__(self) -> str:
        decode = "" if self.decode_s is None else f" + {self.decode_s * 1e3:g}ms/decode"
        return (
            f"{self.fixed_s * 1e3:g}ms + {self.token_s * 1e3:g}ms/token{decode} + "
            f"{self.context_s * 1e6:g}us/context"
        )

    def prompt_token_s(self, step_tokens: int) -> float:
        """Seconds of a prompt's token in full steps of so many tokens, without its context."""
        return self.token_s + self.fixed_s / step_tokens

    def seconds(self, num_new_tokens: int, num_context_tokens: int, num_decodes: int = 0) -> float:
        """num_decodes: of the new tokens, those that are alone in their sequence."""
        seconds = self.fixed_s + self.token_s * num_new_tokens + self.context_s * num_context_tokens
        return seconds if self.decode_s is None else seconds + (self.decode_s - self.token_s) * num_decodes
