"""`quire chat`: a conversation in the terminal that shows each turn's speed and its tokens from the cache."""

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
/system TEXT  sets the system message; without TEXT removes it
/reset        starts a new conversation; the system message stays
/help         lists these commands
/exit         leaves, as Ctrl-D does
Ctrl-C stops an answer. A line that begins with a blank is no command."""


@options.engine_flags(without=("profile",))
def chat(
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    **engine: Any,
) -> None:
    """Talks with a model in the terminal; /help lists the commands."""
    from quire.sampling.params import SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature)
    with open_llm(EngineConfig(**engine)) as llm:
        _print_note(f"{llm.capacity}. /help lists commands, /exit or Ctrl-D leaves")
        conversation = _Conversation(llm, params)
        while (line := _read_line()) is not None:
            if line.startswith("/"):
                name, _, text = line.partition(" ")
                if name == "/exit":
                    return
                conversation.run_command(name, text.strip())
            elif line.strip():
                conversation.answer(line)


def _print_note(text: str) -> None:
    print(f"quire: {text}", file=sys.stderr)


def _read_line() -> str | None:
    """The next line, without blanks at its end; None at the end of the input. *raises:* ArgumentError: not UTF-8."""
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  # gives `input` line editing and a history
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
            _print_note("/exit or Ctrl-D leaves")


class _Conversation:
    """The turns so far, and the commands that change them."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm = llm
        self._params = params
        self._system: list[dict[str, str]] = []
        self._turns: list[dict[str, str]] = []

    def run_command(self, name: str, text: str) -> None:
        """text: the rest of the line."""
        if name == "/system":
            self._system = [{"role": "system", "content": text}] if text else []
        elif name == "/reset":
            self._turns = []
        elif name == "/help":
            print(_HELP, file=sys.stderr)
        else:
            _print_note(f"expected /system, /reset, /help or /exit, got {name}")

    def answer(self, line: str) -> None:
        """Prints the answer as it comes. Ctrl-C ends it and keeps the text so far."""
        turns = [*self._turns, {"role": "user", "content": line}]
        answer, stream = "", None
        try:
            stream = self._llm.stream([*self._system, *turns], self._params)
            for delta in stream:
                answer += delta
                print(delta, end="", flush=True)
        except (PromptError, CapacityError) as error:
            _print_note(f"{error} (/reset starts a new conversation)")
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
            print(f"  [{_figures(stream.result)}]", file=sys.stderr)


def _figures(result: RequestOutput) -> str:
    """A turn's cached and generated tokens, and its speed."""
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
