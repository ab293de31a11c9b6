"""The flags of `quire.config.EngineConfig`, for the verbs that open an engine; and two of sampling."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer

from quire.config import EngineConfig

__all__ = ["MaxTokens", "Temperature", "engine_flags", "flag", "number"]

MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Tokens to generate at most.")]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="0 is greedy; the model's own default if not given.")
]


def engine_flags(
    *names: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Gives a verb flags in place of its `**engine`: those of `names`, or of all options but `without`.

    `engine` holds the options that were given, by name, their values unchecked.
    """
    all_flags = _all_flags()
    flags = [all_flags[name] for name in names or all_flags if name not in without]

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(verb)
        def run(**given: Any) -> Any:
            not_given = {flag.name for flag in flags if given[flag.name] is None}
            return verb(**{name: value for name, value in given.items() if name not in not_given})

        own = inspect.signature(verb, eval_str=True).parameters.values()
        kept = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in own if one.name != "engine"]
        run.__signature__ = inspect.Signature([*kept, *flags])  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate


def flag(name: str) -> str:
    """ "--block-size" of "block_size"."""
    return "--" + name.replace("_", "-")


def number(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """A reader of a flag's text. It gives the number, or the text itself, which the option then refuses."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return parse


@functools.cache
def _all_flags() -> dict[str, inspect.Parameter]:
    """What typer makes flags of, by option; None where one is not given."""
    hints = get_type_hints(EngineConfig)
    found = {}
    for entry in fields(EngineConfig):
        about = EngineConfig.options()[entry.name]
        if about.is_secret:
            continue
        hint, default = hints[entry.name], entry.default
        kind = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
        positive, negative = flag(entry.name), flag(f"no_{entry.name}")
        names = [
            f"{positive}/{negative}" if kind is bool else positive,
            *([about.short] * bool(about.short)),
        ]
        told = "" if default is None or isinstance(default, bool) else f"  [default: {default}]"
        about_flag: dict[str, Any] = {"metavar": about.metavar, "help": about.help + told}
        if kind in (int, float):
            about_flag["parser"] = number(kind)
        annotation = Annotated[kind | None, typer.Option(*names, **about_flag)]
        found[entry.name] = inspect.Parameter(
            entry.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
    return found
