"""Fields that are accepted and change nothing about an answer: the whole list, with what is done with each.

Clients send them to every server, or send back what another server's answer had. A field that asks for another answer
is never here: it is obeyed, or it is refused by name (`unserved`). docs/server.md has this list as a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

from pydantic import Field

from quire.server.schemas.part import StrictBody

__all__ = [
    "Accepted",
    "AcceptedFields",
    "AcceptedInCalls",
    "AcceptedInChats",
    "AcceptedInFunctions",
    "AcceptedInMessages",
    "AcceptedInParts",
    "AcceptedInTools",
    "accepted_fields",
    "without_accepted",
]

Body = TypeVar("Body", bound=StrictBody)


class Accepted:
    """Of a field that changes nothing about an answer. done: what is done with it."""

    def __init__(self, done: str) -> None:
        self.done = done

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), "description": f"Accepted, changes no answer: {self.done}."}


_CACHED = Accepted("prefixes are cached in any case")
_OF_OTHERS = Accepted("left out: another provider's, of its own answers")
_Anything = Annotated[Any, Field()]


class AcceptedFields(StrictBody):
    """Of completions and chat completions alike."""

    user: Annotated[str | None, Accepted("not used: keys tell tenants apart")] = None
    safety_identifier: Annotated[str | None, Accepted("not used")] = None
    session_id: Annotated[str | None, Accepted("not used")] = None
    metadata: Annotated[dict[str, Any] | None, Accepted("not kept")] = None
    store: Annotated[bool | None, Accepted("no answer is kept")] = None
    service_tier: Annotated[str | None, Accepted("there is one")] = None
    prompt_cache_key: Annotated[
        str | None, Accepted("prefixes are found by their tokens; cache_salt sets them apart")
    ] = None
    prompt_cache_retention: Annotated[
        str | None, Accepted("prefixes stay cached while there is room; keep_for pins them")
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
    """And of chat completions."""

    parallel_tool_calls: Annotated[
        bool | None, Accepted("true is the default; false is obeyed: the first call alone is told")
    ] = None
    verbosity: Annotated[str | None, Accepted("the model is not told; ask for it in a message")] = None
    cache_control: Annotated[_Anything, _CACHED] = None
    vl_high_resolution_images: Annotated[bool | None, Accepted("there are no images")] = None


class _AcceptedOfProviders(StrictBody):
    cache_control: Annotated[_Anything, _CACHED] = None
    provider_metadata: Annotated[_Anything, _OF_OTHERS] = None
    provider_specific_fields: Annotated[_Anything, _OF_OTHERS] = None
    extra_content: Annotated[_Anything, _OF_OTHERS] = None


class AcceptedInMessages(_AcceptedOfProviders):
    """Of messages."""

    id: Annotated[_Anything, Accepted("left out")] = None
    copilot_cache_control: Annotated[_Anything, _CACHED] = None
    annotations: Annotated[_Anything, Accepted("left out: they tell of the text")] = None
    parsed: Annotated[_Anything, Accepted("left out: it is the content, read")] = None
    reasoning_details: Annotated[_Anything, Accepted("left out; send the text in reasoning_content")] = None
    thinking_blocks: Annotated[_Anything, Accepted("left out; send the text in reasoning_content")] = None


class AcceptedInParts(_AcceptedOfProviders):
    """Of the parts of a message's content."""

    id: Annotated[_Anything, Accepted("left out")] = None
    annotations: Annotated[_Anything, Accepted("left out: they tell of the text")] = None
    signature: Annotated[_Anything, _OF_OTHERS] = None
    prompt_cache_breakpoint: Annotated[_Anything, _CACHED] = None


class AcceptedInCalls(_AcceptedOfProviders):
    """Of the calls in a message."""

    index: Annotated[int | None, Accepted("calls are taken in the order of the list")] = None


class AcceptedInFunctions(_AcceptedOfProviders):
    """Of the function of such a call."""

    parsed_arguments: Annotated[_Anything, Accepted("left out: it is the arguments, read")] = None


class AcceptedInTools(StrictBody):
    """Of tools."""

    cache_control: Annotated[_Anything, _CACHED] = None


_PLACES: tuple[tuple[str, type[StrictBody]], ...] = (
    ("", AcceptedFields),
    ("", AcceptedInChats),
    ("messages[]", AcceptedInMessages),
    ("messages[].content[]", AcceptedInParts),
    ("messages[].tool_calls[]", AcceptedInCalls),
    ("messages[].tool_calls[].function", AcceptedInFunctions),
    ("tools[]", AcceptedInTools),
)


def accepted_fields() -> Iterator[tuple[str, str, str]]:
    """(where it stands: "" for the body, field, what is done with it) of each, once."""
    told: set[tuple[str, str]] = set()
    for place, body in _PLACES:
        for name, field in body.model_fields.items():
            for one in field.metadata:
                if isinstance(one, Accepted) and (place, name) not in told:
                    told.add((place, name))
                    yield place, name, one.done


def without_accepted(body: Body) -> Body:
    """The same without what changes nothing, in its parts too."""
    kept: dict[str, Any] = {}
    for name, field in type(body).model_fields.items():
        value = getattr(body, name)
        if value is not None and any(isinstance(one, Accepted) for one in field.metadata):
            kept[name] = None
        elif isinstance(value, StrictBody):
            kept[name] = without_accepted(value)
        elif isinstance(value, list):
            kept[name] = [without_accepted(one) if isinstance(one, StrictBody) else one for one in value]
    return body.model_copy(update=kept)
