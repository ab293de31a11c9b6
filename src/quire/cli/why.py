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
    bodies = [_body(path) for path in (first, second)]
    from quire.weights.load import load_tokenizer  # imported late: bad files do not wait for torch

    tokenizer = load_tokenizer(
        engine.get("model"),
        revision=engine.get("revision"),
        trust_remote_code=bool(engine.get("trust_remote_code")),
    )
    if tokenizer is None:
        raise ArgumentError("expected a model with a tokenizer, got one without - in `model`")
    prompts = [_tokens(tokenizer, body, path) for body, path in zip(bodies, (first, second), strict=True)]
    found = _compared(tokenizer, *prompts)
    print(json.dumps(found) if as_json else _as_text(found))


def _body(path: str) -> dict[str, Any]:
    try:
        body = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ArgumentError(f"expected a file with a request's JSON body, got {path!r}: {error}") from error
    if not isinstance(body, dict) or not ({"messages", "prompt"} & body.keys()):
        raise ArgumentError(f"expected a body with messages or a prompt, got another one - in {path}")
    return body


def _tokens(tokenizer: Any, body: dict[str, Any], path: str) -> list[int]:
    from pydantic import ValidationError

    from quire.server.api_errors import ApiError
    from quire.server.messages import render, template_options
    from quire.server.schemas.chat_bodies import ChatRequest
    from quire.server.schemas.completion_bodies import CompletionRequest
    from quire.server.settings import ServerLimits

    try:
        if "messages" in body:
            chat = ChatRequest.model_validate(body)
            tools = [] if chat.tool_choice == "none" else chat.tools or []
            text = render(tokenizer, chat.messages, ServerLimits(), tools, template_options(tokenizer, chat))
            return tokenizer(text, add_special_tokens=bool(chat.add_special_tokens))["input_ids"]
        prompt = CompletionRequest.model_validate(body).prompt
    except ValidationError as error:
        wrong = error.errors()[0]
        place = ".".join(map(str, wrong["loc"]))
        raise ArgumentError(
            f"expected a request's body, got {wrong['msg']} - in `{place}` of {path}"
        ) from error
    except ApiError as error:
        raise ArgumentError(f"{error} - in {path}") from error
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if prompt and isinstance(prompt[0], int):
        return list(prompt)  # type: ignore[arg-type]
    raise ArgumentError(f"expected one prompt, got a list of {len(prompt)} - in `prompt` of {path}")


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
    found["before"] = tokenizer.decode(second[max(0, common - _AROUND) : common])
    found["first"] = tokenizer.decode(first[common : common + _AROUND])
    found["second"] = tokenizer.decode(second[common : common + _AROUND])
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
