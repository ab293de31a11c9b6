"""`quire chat`: a conversation in the terminal that shows how fast each turn came, and what of it from the cache."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quire.cli import options
from quire.cli.opening import open_llm
from quire.config import EngineConfig
from quire.errors import ArgumentError, CapacityError, PromptError

if TYPE_CHECKING:
    from quire.engine.llm import LLM
    from quire.sampling.params import SamplingParams
    from quire.scheduler.request import RequestOutput

__all__ = ["chat"]

_HELP = """\
/system TEXT  what the model is told before all turns; without TEXT nothing
/reset        starts anew; what /system said stays
/help         lists these
/exit         leaves, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with a blank is no command."""


@options.engine_flags(without=("profile",))
def chat(
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    **engine: Any,
) -> None:
    """Talks with a model, a line a turn; an empty line is skipped. /help lists what else a line may say."""
    from quire.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with open_llm(EngineConfig(**engine)) as llm:
        _tell(f"{llm.capacity}. /help lists commands, /exit or Ctrl-D leaves")
        conversation = _Conversation(llm, params)
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                name, _, text = line.partition(" ")
                if name == "/exit":
                    return
                conversation.obey(name, text.strip())
            elif line.strip():
                conversation.say(line)


def _tell(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr)


def _read_line() -> str | None:
    """The next line, without blanks at its end; None at the end of the input. *raises:* ArgumentError: no text."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # `input` edits a line by it, and remembers those before
    while True:
        try:
            if is_terminal and not sys.stdout.isatty():
                print("> ", end="", file=sys.stderr, flush=True)
            return input("> " if is_terminal and sys.stdout.isatty() else "").rstrip()
        except EOFError:
            if is_terminal:
                print(file=sys.stderr)
            return None
        except UnicodeDecodeError as error:
            raise ArgumentError(f"expected lines of text, got {error}") from error
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(file=sys.stderr)
            _tell("/exit or Ctrl-D leaves")


class _Conversation:
    """The turns so far, and the commands that change them."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._system: list[dict[str, str]] = []
        self._turns: list[dict[str, str]] = []

    def obey(self, name: str, text: str) -> None:
        """A command, and what stands behind it."""
        if name == "/system":
            self._system = [{"role": "system", "content": text}] if text else []
        elif name == "/reset":
            self._turns = []
        elif name == "/help":
            print(_HELP, file=sys.stderr)
        else:
            _tell(f"expected /system, /reset, /help or /exit, got {name}")

    def say(self, line: str) -> None:
        """Prints the answer as it comes. Ctrl-C ends it: what was said so far stays."""
        turns = [*self._turns, {"role": "user", "content": line}]
        answer, stream = "", None
        try:
            stream = self._llm.stream([*self._system, *turns], self._params)
            for delta in stream:
                answer += delta
                print(delta, end="", flush=True)
        except (PromptError, CapacityError) as error:
            _tell(f"{error} (/reset starts anew)")
            return
        except KeyboardInterrupt:
            if stream is not None:
                stream.close()
            if stream is None or not answer:
                print(file=sys.stderr)
                return
        print()
        self._turns = [*turns, {"role": "assistant", "content": answer}]
        if stream.result is not None:
            print(f"  [{_told(stream.result)}]", file=sys.stderr)


def _told(result: RequestOutput) -> str:
    """Tokens of a turn: found in the cache, generated, and how fast."""
    num_tokens, times = len(result.outputs[0].token_ids), result.timings
    parts = [
        f"{result.num_cached_tokens} of {len(result.prompt_token_ids)} prompt tokens from the cache",
        f"{num_tokens} tokens",
    ]
    first_s, total_s = times.time_to_first_token_s, times.total_s
    if first_s is not None:
        parts.append(f"the first after {first_s:.2f} s")
        if total_s is not None and total_s > first_s and num_tokens > 1:
            parts.append(f"then {(num_tokens - 1) / (total_s - first_s):.1f} tokens/s")
    return ", ".join(parts)
