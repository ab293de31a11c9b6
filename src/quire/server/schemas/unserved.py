"""Fields of OpenAI's and vLLM's requests that this server does nothing for: each takes what asks for nothing.

Null, and the value that stands for what happens anyway, are accepted. All else is refused by the field's name: a client
that asks for beams must not be answered as if it had not.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import ConfigDict, model_validator
from pydantic_core import PydanticCustomError, core_schema

from quire.server.schemas.part import Part

__all__ = ["Only", "StrictBody", "UnservedFields", "UnservedInChats"]


class Only:
    """Of a field that may be null or one of `values`. why: what a refusal says behind that."""

    def __init__(self, why: str, *values: Any) -> None:
        self.why = why
        self.values = values

    def _check(self, value: Any) -> Any:
        if value is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.values
        ):
            return value
        allowed = " or ".join(["null", *map(json.dumps, self.values)])
        raise PydanticCustomError("unserved", "{message}", {"message": f"expected {allowed}: {self.why}"})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [None, *self.values], "description": f"Not served: {self.why}."}


class StrictBody(Part):
    """A part of a request whose every field is known here: an unknown one is refused unless it is null."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_unknown_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        names = {field.alias or name for name, field in cls.model_fields.items()}
        return {name: value for name, value in data.items() if value is not None or name in names}


_NO_PROMPT_LOGPROBS = "log probabilities are those of generated tokens"
_NO_BEAMS = "this server searches no beams"
_NO_TRANSFER = "this server takes no caches from others"
_NO_RENDER = "this server shows no rendered prompts"


class UnservedFields(StrictBody):
    """Those of completions and chat completions alike."""

    use_beam_search: Annotated[Any, Only(_NO_BEAMS, False)] = None
    length_penalty: Annotated[Any, Only(_NO_BEAMS, 1.0)] = None
    early_stopping: Annotated[Any, Only(_NO_BEAMS, False)] = None
    skip_special_tokens: Annotated[Any, Only("text is written without special tokens", True)] = None
    prompt_logprobs: Annotated[Any, Only(_NO_PROMPT_LOGPROBS)] = None
    logprob_token_ids: Annotated[Any, Only("say how many of the likeliest instead")] = None
    logits_processors: Annotated[Any, Only("this server runs no code of its clients", [])] = None
    guided_decoding_backend: Annotated[
        Any, Only("llguidance is what this server has", "auto", "guidance")
    ] = None
    guided_whitespace_pattern: Annotated[Any, Only("JSON is written on one line")] = None
    return_token_offsets: Annotated[Any, Only(_NO_RENDER, False)] = None
    return_mm_kwargs: Annotated[Any, Only(_NO_RENDER, True)] = None
    repetition_detection: Annotated[Any, Only("use repetition_penalty")] = None
    thinking_token_budget: Annotated[Any, Only("thoughts have no limit of their own; use max_tokens", -1)] = (
        None
    )
    watermarking: Annotated[Any, Only("this server marks no text", False)] = None
    stream_interval: Annotated[Any, Only("every step's tokens are an event", 1)] = None
    request_id: Annotated[Any, Only("answers have ids of the server's own")] = None
    kv_transfer_params: Annotated[Any, Only(_NO_TRANSFER)] = None
    ec_transfer_params: Annotated[Any, Only(_NO_TRANSFER)] = None
    routed_experts_prompt_start: Annotated[Any, Only("this server returns no routing", 0)] = None
    vllm_xargs: Annotated[Any, Only("this server has no extensions of vLLM's", {})] = None
    store: Annotated[Any, Only("this server keeps no answers", False)] = None
    service_tier: Annotated[Any, Only("this server has one", "auto", "default")] = None
    prompt_cache_retention: Annotated[Any, Only("say keep_for", "in_memory", "in-memory")] = None
    prompt_cache_options: Annotated[Any, Only("say cache_priority, cache_salt or keep_for")] = None
    moderation: Annotated[Any, Only("this server moderates nothing")] = None


class UnservedInChats(UnservedFields):
    """And those of chat completions."""

    modalities: Annotated[Any, Only("this server answers in text", ["text"])] = None
    audio: Annotated[Any, Only("this server answers in text")] = None
    mm_processor_kwargs: Annotated[Any, Only("this server reads text")] = None
    media_io_kwargs: Annotated[Any, Only("this server reads text")] = None
    web_search_options: Annotated[Any, Only("this server searches nothing")] = None
    prediction: Annotated[Any, Only("this server uses no predictions")] = None
    verbosity: Annotated[Any, Only("the model does not know it; ask in a message", "medium")] = None
    functions: Annotated[Any, Only("use tools", [])] = None
    function_call: Annotated[Any, Only("use tool_choice", "none", "auto")] = None
    include_reasoning: Annotated[Any, Only("thoughts are always told, in reasoning_content", True)] = None
    echo: Annotated[Any, Only("answers of chats are new messages", False)] = None
    chat_template: Annotated[Any, Only("the model's own is used")] = None
    return_prompt_text: Annotated[Any, Only(_NO_RENDER, False)] = None
