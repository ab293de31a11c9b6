"""The `quire` command: its verbs, and the one place that turns an error into a line and an exit status.

Exit status: 0 done; 1 a failure; 2 a wrong argument (also a request that can never fit: the message names the
argument to change); 130 interrupted. Only results go to stdout.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer

import quire
from quire.cli.cache import cache
from quire.cli.chat import chat
from quire.cli.cluster import cluster
from quire.cli.compare import compare
from quire.cli.explain import explain
from quire.cli.generate import generate
from quire.cli.limits import limit_behind
from quire.cli.plan import plan
from quire.cli.score import score
from quire.cli.serve import serve
from quire.cli.simulate import simulate
from quire.cli.top import top
from quire.cli.why import why
from quire.errors import ArgumentError, CapacityError, QuireError, with_flag_names

__all__ = ["app", "main"]

app = typer.Typer(
    name="quire",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(is_given: bool) -> None:
    if is_given:
        print(f"quire {quire.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    """The memory system of LLM inference: runs Hugging Face decoders from a paged KV cache."""


app.command()(generate)
app.command()(chat)
app.command()(compare)
app.command()(explain)
app.command()(plan)
app.command()(score)
app.add_typer(cache)
app.add_typer(cluster)
app.command()(serve)
app.command()(simulate)
app.command()(top)
app.command()(why)


# typer keeps its copy of click private; this is the base class of its errors about a command line.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_INTERRUPTED = 130

# Silences transformers and its Hub client while a model is loaded; a failure raises an error.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def fail(message: str, status: int) -> NoReturn:
    """Prints one line on stderr and exits."""
    print("quire: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


def _flags(arguments: Sequence[str]) -> dict[str, str]:
    """The flags of the verb that the arguments name, by Python name."""
    command: Any = typer.main.get_command(app)
    for word in arguments:
        command = getattr(command, "commands", {}).get(word, command)
    return {
        parameter.name: max(parameter.opts, key=len)
        for parameter in command.params
        if parameter.name is not None and max(parameter.opts, key=len).startswith("--")
    }


def main() -> None:
    """Runs the verb of the command line; the entry point of `quire` and of `python -m quire`."""
    arguments = sys.argv[1:] or ["--help"]
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for place, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:  # bytes that are not UTF-8, which Python keeps as surrogates
            shown = argument.encode(errors="surrogateescape").decode(errors="replace")
            fail(f"expected text in UTF-8, got {shown[:64]!r} - as argument {place}", 2)
    try:
        status = app(arguments, standalone_mode=False)
    except UsageError as error:
        fail(f"{error.format_message()} (see `quire --help`)", 2)  # pyright: ignore[reportAttributeAccessIssue]
    except (ArgumentError, CapacityError) as error:
        for note in getattr(error, "__notes__", ()):  # the plan of a start that does not fit
            print(note, file=sys.stderr)
        fail(with_flag_names(str(error), _flags(arguments)), 2)
    except QuireError as error:
        fail(with_flag_names(str(error), _flags(arguments)), 1)
    except BrokenPipeError:
        # The reader of our output has gone; this keeps Python from complaining about it again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        limit = limit_behind(error)
        if limit is None and not isinstance(error, OSError):
            raise
        fail(limit or str(error), 1)
    except typer.Abort:
        status = _INTERRUPTED
    if status == _INTERRUPTED:  # typer's answer to a KeyboardInterrupt
        fail("interrupted", _INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)
