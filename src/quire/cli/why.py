"""`quire why`: where the prompts of two recorded requests part, and why a cache finds no more of the second.

The bodies are those of `/v1/chat/completions` or `/v1/completions`. They are rendered and tokenized as by a
server. Of the model only the tokenizer is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from quire.cli import options
from quire.errors import ArgumentError

__all__ = ["why"]

_AROUND = 12  # tokens on each side


@options.engine_flags("model", "revision", "trust_remote_code")
def why(
    first: Annotated[str, typer.Argument(metavar="FIRST", help="A file with the body of the first request.")],
    second: Annotated[str, typer.Argument(metavar="SECOND", help="The body of the next one.")],
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    **engine: Any,
) -> None:
    """Says where the prompts of two recorded requests part."""
    fields = [_fields(path) for path in (first, second)]
    from quire.server.recorded_body import (  # imported late: bad files do not wait for torch
        body_of,
        tokens_of,
    )
    from quire.weights.load import load_tokenizer

    bodies = [body_of(one, path) for one, path in zip(fields, (first, second), strict=True)]
    tokenizer = load_tokenizer(
        engine.get("model"),
        revision=engine.get("revision"),
        trust_remote_code=bool(engine.get("trust_remote_code")),
    )
    prompts = []
    for body, path in zip(bodies, (first, second), strict=True):
        of_body = tokens_of(tokenizer, body, path)
        if len(of_body) > 1:
            raise ArgumentError(f"expected one prompt, got a list of {len(of_body)} - in `prompt` of {path}")
        prompts += of_body
    found = _compared(tokenizer, *prompts)
    print(json.dumps(found) if as_json else _as_text(found))


def _fields(path: str) -> Any:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ArgumentError(f"expected a file with a request's JSON body, got {path!r}: {error}") from error


def _compared(tokenizer: Any, first: list[int], second: list[int]) -> dict[str, Any]:
    common = next(
        (at for at, (one, other) in enumerate(zip(first, second, strict=False)) if one != other),
        min(len(first), len(second)),
    )
    found: dict[str, Any] = {
        "first_tokens": len(first),
        "second_tokens": len(second),
        "common_tokens": common,
    }
    found["to_compute"] = len(second) - min(common, len(second) - 1)
    decode = str if tokenizer is None else tokenizer.decode
    found["before"] = decode(second[max(0, common - _AROUND) : common])
    found["first"] = decode(first[common : common + _AROUND])
    found["second"] = decode(second[common : common + _AROUND])
    return found


def _as_text(found: dict[str, Any]) -> str:
    lines = [
        f"{found['common_tokens']} of {found['second_tokens']} tokens are the first request's, "
        f"{found['to_compute']} have to be computed"
    ]
    if found["common_tokens"] == found["second_tokens"]:
        lines.append("the second prompt is a part of the first")
    elif found["common_tokens"] == found["first_tokens"]:
        lines.append(f"the second prompt goes on behind the first: {found['second']!r}")
    else:
        lines += [
            f"they part at token {found['common_tokens']}, behind {found['before']!r}",
            f"  first:  {found['first']!r}",
            f"  second: {found['second']!r}",
        ]
    return "\n".join(lines)
