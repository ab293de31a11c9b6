"""Items of `/v1/responses` and `/v1/conversations`: messages, calls and their outputs, reasoning, references."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.schemas.accepted import Accepted
from quire.server.schemas.caching import PromptCacheBreakpoint
from quire.server.schemas.strict_body import StrictBody
from quire.server.schemas.typed_union import OfTypes
from quire.server.schemas.unserved import OneOf

__all__ = [
    "FunctionCallItem",
    "FunctionCallOutputItem",
    "InputItem",
    "InputMessage",
    "ItemReference",
    "ReasoningItem",
]

_READS_TEXT = "this server reads text; describe it in an input_text"
_HOSTED = "this server runs no tools; describe a function, and run it where the client is"
_ELSEWHERE = "this server has no other server's histories; send messages, calls and their outputs"
_DIRECT = "calls are made by the model itself"

Id = Annotated[str, Field(min_length=1, max_length=256)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputTextPart(StrictBody):
    type: Literal["input_text"] = "input_text"
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class OutputTextPart(StrictBody):
    type: Literal["output_text"] = "output_text"
    text: str
    annotations: Annotated[list[Any] | None, Accepted("left out: they describe the text")] = None
    logprobs: Annotated[list[Any] | None, Accepted("left out")] = None
    parsed: Annotated[Any, Accepted("left out: it is the parsed text")] = None


class RefusalPart(StrictBody):
    type: Literal["refusal"] = "refusal"
    refusal: str


REFUSED_PARTS = {
    "input_image": f"images are not supported: {_READS_TEXT}",
    "input_file": f"files are not supported: {_READS_TEXT}",
    "input_audio": f"audio is not supported: {_READS_TEXT}",
    "computer_screenshot": f"images are not supported: {_READS_TEXT}",
}
Part = Annotated[InputTextPart | OutputTextPart | RefusalPart, OfTypes(REFUSED_PARTS)]
OutputPart = Annotated[InputTextPart, OfTypes(REFUSED_PARTS)]


class InputMessage(StrictBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: Id | None = None
    status: Annotated[Status | None, Accepted("left out")] = None
    phase: Annotated[
        Literal["commentary", "final_answer"] | None, Accepted("kept, the model is not told")
    ] = None


class FunctionCallItem(StrictBody):
    type: Literal["function_call"] = "function_call"
    call_id: Id
    name: str = Field(min_length=1, max_length=256)
    arguments: str
    id: Id | None = None
    status: Annotated[Status | None, Accepted("left out")] = None
    namespace: Annotated[Any, OneOf("functions have no namespaces; write it into the name")] = None
    caller: Annotated[Any, OneOf(_DIRECT, {"type": "direct"})] = None
    async_: Annotated[Any, OneOf("a call is answered before the model goes on", False)] = Field(
        None, alias="async"
    )
    parsed_arguments: Annotated[Any, Accepted("left out: they are the parsed arguments")] = None


class FunctionCallOutputItem(StrictBody):
    type: Literal["function_call_output"] = "function_call_output"
    call_id: Id
    output: str | list[OutputPart]
    id: Id | None = None
    status: Annotated[Status | None, Accepted("left out")] = None
    name: Annotated[str | None, Accepted("left out: the call has it")] = None
    namespace: Annotated[Any, OneOf("functions have no namespaces; write it into the name")] = None
    caller: Annotated[Any, OneOf(_DIRECT, {"type": "direct"})] = None


class SummaryPart(StrictBody):
    type: Literal["summary_text"] = "summary_text"
    text: str


class ThoughtPart(StrictBody):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class ReasoningItem(StrictBody):
    """An answer's reasoning, for chat templates that repeat it: its content, else its encrypted content, else its
    summary."""

    type: Literal["reasoning"] = "reasoning"
    id: Id | None = None
    summary: list[SummaryPart] = Field(default_factory=list)
    content: list[ThoughtPart] | None = None
    encrypted_content: str | None = Field(None, description="This server's, from an earlier answer.")
    status: Annotated[Status | None, Accepted("left out")] = None


class ItemReference(StrictBody):
    """A stored item, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


REFUSED_ITEMS = {
    **dict.fromkeys(
        (
            "file_search_call", "computer_call", "computer_call_output", "web_search_call", "tool_search_call",
            "tool_search_output", "image_generation_call", "code_interpreter_call", "local_shell_call",
            "local_shell_call_output", "shell_call", "shell_call_output", "apply_patch_call",
            "apply_patch_call_output", "mcp_list_tools", "mcp_approval_request", "mcp_approval_response", "mcp_call",
            "program", "program_output",
        ),
        _HOSTED,
    ),
    "custom_tool_call": "tools take JSON; describe a function with one text argument",
    "custom_tool_call_output": "tools take JSON; send a function_call_output",
    "additional_tools": "the tools of a request are in its tools",
    "configuration_update": "the settings of a request are its own fields",
    "compaction": _ELSEWHERE,
    "compaction_trigger": "this server compacts no histories; send truncation: auto, or fewer items",
}  # fmt: skip


def _type_of(item: Mapping[str, Any]) -> str:
    """The type of an item that has none: OpenAI's clients leave out those of messages and references."""
    return "message" if "role" in item or "id" not in item else "item_reference"


InputItem = Annotated[
    InputMessage | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference,
    OfTypes(REFUSED_ITEMS, default=_type_of),
]
