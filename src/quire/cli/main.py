"""The `quire` command: its verbs, and the one place where an error becomes a line and an exit status.

Exit status: 0 done; 1 something failed; 2 an argument is wrong (a request that can never fit counts as one: its
message names the argument to change); 130 interrupted. Nothing but results goes to stdout.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, NoReturn

import typer

import quire
from quire.cli.cache import cache
from quire.cli.chat import chat
from quire.cli.compare import compare
from quire.cli.explain import explain
from quire.cli.generate import generate
from quire.cli.limits import limit_behind
from quire.cli.plan import plan
from quire.cli.serve import serve
from quire.cli.top import top
from quire.errors import ArgumentError, CapacityError, QuireError

__all__ = ["app", "main"]

app = typer.Typer(
    name="quire",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _tell_version(asked: bool) -> None:
    if asked:
        print(f"quire {quire.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """The memory system of LLM inference: any Hugging Face decoder, answered from a paged KV cache."""


app.command()(generate)
app.command()(chat)
app.command()(compare)
app.command()(explain)
app.command()(plan)
app.add_typer(cache)
app.command()(serve)
app.command()(top)


# typer keeps its copy of click private; this is the root of its complaints about a command line.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_INTERRUPTED = 130

# transformers and its Hub client say nothing while a model is loaded, unless they are told to: what fails is an error.
_QUIET = {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def fail(message: str, status: int) -> NoReturn:
    """Prints one line on stderr and leaves."""
    print("quire: " + " ".join(message.split()), file=sys.stderr)
    sys.exit(status)


def main() -> None:
    """Runs the verb named on the command line; the entry point of `quire` and of `python -m quire`."""
    arguments = sys.argv[1:] or ["--help"]
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    for place, argument in enumerate(arguments, 1):
        try:
            argument.encode()
        except UnicodeEncodeError:  # bytes that are not UTF-8, which Python keeps as halves of characters
            shown = argument.encode(errors="surrogateescape").decode(errors="replace")
            fail(f"expected text in UTF-8, got {shown[:64]!r} - as argument {place}", 2)
    try:
        status = app(arguments, standalone_mode=False)
    except UsageError as error:
        fail(f"{error.format_message()} (see `quire --help`)", 2)  # pyright: ignore[reportAttributeAccessIssue]
    except (ArgumentError, CapacityError) as error:
        for note in getattr(error, "__notes__", ()):  # the plan of a start that would not fit
            print(note, file=sys.stderr)
        fail(str(error), 2)
    except QuireError as error:
        fail(str(error), 1)
    except BrokenPipeError:
        # Whoever read our output has gone; keep Python from complaining about it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (OSError, ImportError, MemoryError, RuntimeError) as error:
        limit = limit_behind(error)
        if limit is None and not isinstance(error, OSError):
            raise
        fail(limit or str(error), 1)
    except typer.Abort:
        status = _INTERRUPTED
    if status == _INTERRUPTED:  # what typer makes of a KeyboardInterrupt
        fail("interrupted", _INTERRUPTED)
    sys.exit(status if isinstance(status, int) else 0)
