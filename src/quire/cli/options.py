"""The flags of `quire.config.EngineConfig` for the verbs that open an engine, and two flags of sampling.

Each verb that reads a model takes it as `--model M`, and as its argument where it has no other argument. `embedded`
is the embedded model; a folder of that name is `./embedded`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Annotated, Any, get_args, get_type_hints

import typer

from quire.config import EngineConfig
from quire.errors import ArgumentError

__all__ = [
    "EMBEDDED",
    "BeamWidth",
    "EarlyStopping",
    "LengthPenalty",
    "MaxTokens",
    "Temperature",
    "chosen_model",
    "engine_flags",
    "flag",
    "number",
    "refuse_models",
]

MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Largest number of tokens to generate.")]
Temperature = Annotated[
    float | None, typer.Option(metavar="T", help="0 is greedy; the model's own default if not given.")
]

BeamWidth = Annotated[
    int | None, typer.Option(metavar="N", help="A beam search with N beams; its best answer is printed.")
]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        metavar="P", help="Of a beam search: a score is divided by the answer's length to this power."
    ),
]
EarlyStopping = Annotated[
    str | None,
    typer.Option(
        metavar="WHEN",
        help="When a beam search ends: true, with N answers; false, when no beam can do better at its length; never, "
        "at any length.",
    ),
]


def engine_flags(
    *names: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Replaces a verb's `**engine` by flags: those of `names`, or of all options except `without`. A verb without an
    argument of its own also gets the argument MODEL.

    `engine` then holds the given options by name, their values unchecked.
    """
    all_flags = _all_flags()
    flags = [all_flags[name] for name in names or all_flags if name not in without]

    def decorate(verb: Callable[..., Any]) -> Callable[..., Any]:
        parameters = inspect.signature(verb, eval_str=True).parameters.values()
        others = [
            entry.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for entry in parameters
            if entry.name != "engine"
        ]
        takes_model = any(flag.name == "model" for flag in flags)
        argument = [_MODEL] if takes_model and not any(map(_is_argument, others)) else []

        @functools.wraps(verb)
        def run(**given: Any) -> Any:
            model = given.pop(_MODEL.name, None)
            if takes_model:
                given["model"] = chosen_model(model, given["model"])
            not_given = {flag.name for flag in flags if given[flag.name] is None}
            if given.get("model") == EMBEDDED:
                given["model"] = None
            return verb(**{name: value for name, value in given.items() if name not in not_given})

        run.__signature__ = inspect.Signature([*argument, *others, *flags])  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return decorate


def refuse_models(prompts: Iterable[str], given: Mapping[str, Any]) -> None:
    """*raises:* ArgumentError: no model is named, and a prompt is the path of a model, as the argument of other verbs
    is."""
    for prompt in () if "model" in given else prompts:
        is_file = prompt.endswith(".gguf") and os.path.isfile(prompt)
        if is_file or (prompt and os.path.isfile(os.path.join(prompt, "config.json"))):
            raise ArgumentError(
                f"expected a prompt, got the model {prompt!r}; give it with --model {prompt}, or give "
                f"--model {EMBEDDED} to continue that text with the embedded model"
            )


def chosen_model(argument: str | None, flag: str | None) -> str | None:
    """*raises:* ArgumentError: two models are named."""
    if argument is not None and flag is not None and argument != flag:
        raise ArgumentError(f"expected one model, got {argument!r} and --model {flag}; leave out one of them")
    return flag if argument is None else argument


def flag(name: str) -> str:
    """`--block-size` for "block_size"."""
    return "--" + name.replace("_", "-")


def number(kind: type[int] | type[float]) -> Callable[[str], Any]:
    """A parser of a flag's text. It returns the number, or the text itself, which the option then refuses."""

    def parse(text: str) -> Any:
        try:
            return kind(text)
        except ValueError:
            return text

    return parse


EMBEDDED = "embedded"
_MODEL = inspect.Parameter(
    "model_argument",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        str | None, typer.Argument(metavar="MODEL", help="Folder, GGUF file or Hub id, as with --model.")
    ],
)


def _is_argument(parameter: inspect.Parameter) -> bool:
    return any(isinstance(one, type(typer.Argument())) for one in get_args(parameter.annotation))


@functools.cache
def _all_flags() -> dict[str, inspect.Parameter]:
    """Typer's parameter of each option; a flag that is not given is None."""
    hints = get_type_hints(EngineConfig)
    parameters = {}
    for entry in fields(EngineConfig):
        about = EngineConfig.options()[entry.name]
        if about.is_secret:
            continue
        hint = hints[entry.name]
        kind = next((kind for kind in (bool, int, float) if hint in (kind, kind | None)), str)
        positive, negative = flag(entry.name), flag(f"no_{entry.name}")
        names = [
            f"{positive}/{negative}" if kind is bool else positive,
            *([about.short] * bool(about.short)),
        ]
        about_flag: dict[str, Any] = {"metavar": about.metavar, "help": about.help}
        if kind in (int, float):
            about_flag["parser"] = number(kind)
        annotation = Annotated[kind | None, typer.Option(*names, **about_flag)]
        parameters[entry.name] = inspect.Parameter(
            entry.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
    return parameters
