"""Fields of other servers' requests that this server does not support: each accepts only values without effect.

Null, and the value of the behaviour that happens anyway, are accepted. Any other value is refused with the field's
name and an alternative: a client that asks for mirostat must not be answered as if it had not.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic_core import PydanticCustomError, core_schema

from quire.server.schemas.strict_body import StrictBody

__all__ = ["OneOf", "UnservedFields", "UnservedInChats", "UnservedInMessages", "UnservedInParts"]


class OneOf:
    """Marks a field that may be null or one of `values`. reason: the explanation in a refusal. refusal: replaces the
    list of allowed values, for a field that a client cannot keep by changing its value."""

    def __init__(self, reason: str, *values: Any, refusal: str = "") -> None:
        self.reason = reason
        self.values = values
        self.refusal = refusal

    def _check(self, value: Any) -> Any:
        if value is None or any(
            value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
            for allowed in self.values
        ):
            return value
        allowed = " or ".join(["null", *map(json.dumps, self.values)])
        message = f"{self.refusal or f'expected {allowed}'}: {self.reason}"
        raise PydanticCustomError("unserved", "{message}", {"message": message})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [None, *self.values], "description": f"Not served: {self.reason}."}


_NO_TRANSFER = "this server accepts no caches of other servers"
_NO_RENDER = "this server returns no rendered prompts"
_TOP = "put temperature, top_p, top_k and others next to the prompt or the messages"
_LENGTH = "say max_tokens"
_THINK = "say reasoning_effort, or enable_thinking: true or false"
_SAMPLER = "this server has no such sampler; say temperature, top_p, top_k or min_p"
_PENALTY = "say repetition_penalty, which holds for all tokens"
_LOGPROBS = "say logprobs"
_ROUTE = "this server forwards no requests"
_READS_TEXT = "this server reads text"
_NO_IMAGES = "images are not supported"
_NO_AUDIO = "audio is not supported"


class UnservedFields(StrictBody):
    """Fields of completions and chat completions."""

    skip_special_tokens: Annotated[Any, OneOf("text is written without special tokens", True)] = None
    logprob_token_ids: Annotated[Any, OneOf("give the number of most likely tokens instead")] = None
    logits_processors: Annotated[Any, OneOf("this server runs no code of clients", [])] = None
    guided_decoding_backend: Annotated[Any, OneOf("this server uses llguidance", "auto", "guidance")] = None
    guided_whitespace_pattern: Annotated[Any, OneOf("JSON is written on one line")] = None
    return_token_offsets: Annotated[Any, OneOf(_NO_RENDER, False)] = None
    return_mm_kwargs: Annotated[Any, OneOf(_NO_RENDER, True)] = None
    repetition_detection: Annotated[Any, OneOf("use repetition_penalty")] = None
    thinking_token_budget: Annotated[Any, OneOf("reasoning has no limit of its own; use max_tokens", -1)] = (
        None
    )
    watermarking: Annotated[Any, OneOf("this server marks no text", False)] = None
    stream_interval: Annotated[Any, OneOf("each step's tokens are an event", 1)] = None
    request_id: Annotated[Any, OneOf("answers have ids of the server's own")] = None
    kv_transfer_params: Annotated[Any, OneOf(_NO_TRANSFER)] = None
    ec_transfer_params: Annotated[Any, OneOf(_NO_TRANSFER)] = None
    routed_experts_prompt_start: Annotated[Any, OneOf("this server returns no routing", 0)] = None
    vllm_xargs: Annotated[Any, OneOf("this server has none of vLLM's extensions", {})] = None
    moderation: Annotated[Any, OneOf("this server has no moderation")] = None
    extra_body: Annotated[Any, OneOf("its fields belong in the body, next to the others", {})] = None
    # llama.cpp's
    n_predict: Annotated[Any, OneOf(_LENGTH, -1)] = None
    n_probs: Annotated[Any, OneOf(_LOGPROBS, 0)] = None
    n_keep: Annotated[Any, OneOf("a prompt is never shifted; say truncate_prompt_tokens", 0, -1)] = None
    repeat_penalty: Annotated[Any, OneOf(_PENALTY, 1.0)] = None
    repeat_last_n: Annotated[Any, OneOf(_PENALTY, 64)] = None
    penalty_last_n: Annotated[Any, OneOf(_PENALTY, 64)] = None
    typical_p: Annotated[Any, OneOf(_SAMPLER, 1.0)] = None
    tfs_z: Annotated[Any, OneOf(_SAMPLER, 1.0)] = None
    top_n_sigma: Annotated[Any, OneOf(_SAMPLER, -1.0)] = None
    mirostat: Annotated[Any, OneOf(_SAMPLER, 0)] = None
    dynatemp_range: Annotated[Any, OneOf(_SAMPLER, 0.0)] = None
    xtc_probability: Annotated[Any, OneOf(_SAMPLER, 0.0)] = None
    dry_multiplier: Annotated[Any, OneOf(_SAMPLER, 0.0)] = None
    samplers: Annotated[Any, OneOf("the order of samplers is fixed: temperature, top_k, top_p, min_p")] = None
    t_max_predict_ms: Annotated[Any, OneOf("close the connection to end an answer", 0)] = None
    return_tokens: Annotated[Any, OneOf("say return_token_ids", False)] = None
    response_fields: Annotated[Any, OneOf("answers are whole", [])] = None
    lora: Annotated[Any, OneOf("this server serves one model without adapters", [])] = None
    grammar: Annotated[Any, OneOf("say structured_outputs: {grammar: ...}", "")] = None
    # Ollama's
    options: Annotated[Any, OneOf(_TOP, {})] = None
    format: Annotated[Any, OneOf("say response_format", "")] = None
    num_predict: Annotated[Any, OneOf(_LENGTH, -1)] = None
    num_ctx: Annotated[Any, OneOf("the server's --max-model-len sets the longest sequence")] = None
    # OpenRouter's
    models: Annotated[Any, OneOf(_ROUTE, [])] = None
    provider: Annotated[Any, OneOf(_ROUTE, {})] = None
    route: Annotated[Any, OneOf(_ROUTE)] = None
    transforms: Annotated[Any, OneOf("say truncate_prompt_tokens", [])] = None
    plugins: Annotated[Any, OneOf(_ROUTE, [])] = None
    usage: Annotated[Any, OneOf("say stream_options: {include_usage: true}", {"include": False})] = None


class UnservedInChats(UnservedFields):
    """Fields of chat completions."""

    modalities: Annotated[Any, OneOf("this server answers in text", ["text"])] = None
    audio: Annotated[Any, OneOf("this server answers in text")] = None
    mm_processor_kwargs: Annotated[Any, OneOf("this server reads text")] = None
    media_io_kwargs: Annotated[Any, OneOf("this server reads text")] = None
    web_search_options: Annotated[Any, OneOf("this server has no web search")] = None
    prediction: Annotated[Any, OneOf("this server uses no predictions")] = None
    functions: Annotated[Any, OneOf("use tools", [])] = None
    function_call: Annotated[Any, OneOf("use tool_choice", "none", "auto")] = None
    include_reasoning: Annotated[Any, OneOf("reasoning is always returned, in reasoning_content", True)] = (
        None
    )
    echo: Annotated[Any, OneOf("answers to chats are new messages", False)] = None
    chat_template: Annotated[Any, OneOf("the model's own is used")] = None
    return_prompt_text: Annotated[Any, OneOf(_NO_RENDER, False)] = None
    reasoning: Annotated[Any, OneOf("say reasoning_effort")] = None
    reasoning_format: Annotated[
        Any, OneOf("reasoning is returned in reasoning_content", "auto", "deepseek")
    ] = None
    thinking: Annotated[Any, OneOf(_THINK)] = None
    think: Annotated[Any, OneOf(_THINK)] = None
    thinking_budget: Annotated[Any, OneOf("reasoning has no limit of its own; use max_tokens", -1)] = None
    max_length: Annotated[Any, OneOf(_LENGTH)] = None
    prompt: Annotated[Any, OneOf("say messages, or use POST /v1/completions")] = None
    system: Annotated[Any, OneOf("send a message with the role system")] = None


class UnservedInMessages(StrictBody):
    """Fields of messages."""

    function_call: Annotated[Any, OneOf("use tool_calls")] = None
    audio: Annotated[Any, OneOf(_READS_TEXT, refusal=_NO_AUDIO)] = None
    images: Annotated[Any, OneOf(_READS_TEXT, [], refusal=_NO_IMAGES)] = None
    prefix: Annotated[Any, OneOf("say continue_final_message: true next to the messages", False)] = None
    partial: Annotated[Any, OneOf("say continue_final_message: true next to the messages", False)] = None


class UnservedInParts(StrictBody):
    """Fields of the parts of a message's content."""

    image_url: Annotated[Any, OneOf(_READS_TEXT, refusal=_NO_IMAGES)] = None
    input_audio: Annotated[Any, OneOf(_READS_TEXT, refusal=_NO_AUDIO)] = None
    audio_url: Annotated[Any, OneOf(_READS_TEXT, refusal=_NO_AUDIO)] = None
    video_url: Annotated[Any, OneOf(_READS_TEXT, refusal="videos are not supported")] = None
    file: Annotated[Any, OneOf(_READS_TEXT, refusal="files are not supported")] = None
