"""Fields that are accepted and change nothing about an answer: the complete list, with the effect of each.

Clients send them to every server, or send back fields of another server's answer. A field that asks for a different
answer is never here: it is obeyed, or refused by name (`unserved`). docs/server.md has this list as a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import Field

from quire.server.schemas.strict_body import StrictBody

__all__ = [
    "Accepted",
    "AcceptedFields",
    "AcceptedInCalls",
    "AcceptedInChats",
    "AcceptedInFunctions",
    "AcceptedInMessages",
    "AcceptedInParts",
    "accepted_fields",
    "without_accepted",
]

Body = TypeVar("Body", bound=StrictBody)


class Accepted:
    """Marks a field that changes nothing about an answer. effect: what the server does with it."""

    def __init__(self, effect: str) -> None:
        self.effect = effect

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "description": f"Accepted, changes no answer: {self.effect}."}


_OF_OTHERS = Accepted("left out: a field of another provider's answers")
_Anything = Annotated[Any, Field()]


class AcceptedFields(StrictBody):
    """Fields of completions and chat completions."""

    user: Annotated[str | None, Accepted("not used: keys tell tenants apart")] = None
    safety_identifier: Annotated[str | None, Accepted("not used")] = None
    session_id: Annotated[str | None, Accepted("names the session, whose next turn is prepared")] = None
    metadata: Annotated[dict[str, Any] | None, Accepted("not kept")] = None
    store: Annotated[bool | None, Accepted("no answer is kept")] = None
    service_tier: Annotated[str | None, Accepted("there is one")] = None
    prompt_cache_key: Annotated[
        str | None, Accepted("names the session, without session_id; prefixes are found by their tokens")
    ] = None
    cache_prompt: Annotated[
        bool | None, Accepted("prefixes are cached in any case, and change no token of an answer")
    ] = None
    id_slot: Annotated[int | None, Accepted("there are no slots: a prefix is found by any request")] = None
    keep_alive: Annotated[str | int | float | None, Accepted("the model stays loaded")] = None
    timings_per_token: Annotated[bool | None, Accepted("answers tell no times; GET /metrics does")] = None
    return_progress: Annotated[bool | None, Accepted("streams tell no progress of the prompt")] = None
    spaces_between_special_tokens: Annotated[bool | None, Accepted("text has no special tokens")] = None


class AcceptedInChats(AcceptedFields):
    """Fields of chat completions."""

    parallel_tool_calls: Annotated[
        bool | None, Accepted("true is the default; false is obeyed: only the first call is returned")
    ] = None
    verbosity: Annotated[str | None, Accepted("the model is not told; ask for it in a message")] = None
    vl_high_resolution_images: Annotated[bool | None, Accepted("there are no images")] = None


class _AcceptedOfProviders(StrictBody):
    provider_metadata: Annotated[_Anything, _OF_OTHERS] = None
    provider_specific_fields: Annotated[_Anything, _OF_OTHERS] = None
    extra_content: Annotated[_Anything, _OF_OTHERS] = None


class AcceptedInMessages(_AcceptedOfProviders):
    """Fields of messages."""

    id: Annotated[_Anything, Accepted("left out")] = None
    annotations: Annotated[_Anything, Accepted("left out: they describe the text")] = None
    parsed: Annotated[_Anything, Accepted("left out: it is the parsed content")] = None
    reasoning_details: Annotated[_Anything, Accepted("left out; send the text in reasoning_content")] = None
    thinking_blocks: Annotated[_Anything, Accepted("left out; send the text in reasoning_content")] = None


class AcceptedInParts(_AcceptedOfProviders):
    """Fields of the parts of a message's content."""

    id: Annotated[_Anything, Accepted("left out")] = None
    annotations: Annotated[_Anything, Accepted("left out: they describe the text")] = None
    signature: Annotated[_Anything, _OF_OTHERS] = None


class AcceptedInCalls(_AcceptedOfProviders):
    """Fields of the calls in a message."""

    index: Annotated[int | None, Accepted("calls are taken in the order of the list")] = None


class AcceptedInFunctions(_AcceptedOfProviders):
    """Fields of the function of such a call."""

    parsed_arguments: Annotated[_Anything, Accepted("left out: they are the parsed arguments")] = None


_PLACES: tuple[tuple[str, type[StrictBody]], ...] = (
    ("", AcceptedFields),
    ("", AcceptedInChats),
    ("messages[]", AcceptedInMessages),
    ("messages[].content[]", AcceptedInParts),
    ("messages[].tool_calls[]", AcceptedInCalls),
    ("messages[].tool_calls[].function", AcceptedInFunctions),
)


def accepted_fields() -> Iterator[tuple[str, str, str]]:
    """(place in the body, "" for its top level; field; effect) of each field, once."""
    yielded: set[tuple[str, str]] = set()
    for place, body in _PLACES:
        for name, field in body.model_fields.items():
            for mark in field.metadata:
                if isinstance(mark, Accepted) and (place, name) not in yielded:
                    yielded.add((place, name))
                    yield place, name, mark.effect


def without_accepted(body: Body) -> Body:
    """The body without fields that change nothing, in its parts too."""
    changed: dict[str, Any] = {}
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if value is not None and any(isinstance(mark, Accepted) for mark in field.metadata):
            changed[name] = None
        elif isinstance(value, StrictBody):
            changed[name] = without_accepted(value)
        elif isinstance(value, list):
            changed[name] = [
                without_accepted(entry) if isinstance(entry, StrictBody) else entry for entry in value
            ]
    return body.model_copy(update=changed)
