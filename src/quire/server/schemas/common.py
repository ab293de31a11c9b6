"""Common parts of completions and chat completions: sampling fields, usage, bodies of errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
)

from quire.server.schemas.accepted import AcceptedFields
from quire.server.schemas.caching import PromptCacheFields
from quire.server.schemas.session_bodies import SessionCache
from quire.server.schemas.strict_body import GeneratingBody, StrictBody
from quire.server.schemas.unserved import OneOf, UnservedFields

__all__ = [
    "ErrorBody",
    "ModelCard",
    "ModelList",
    "PromptLogprob",
    "PromptLogprobs",
    "ResponseFormat",
    "SamplingBody",
    "StreamOptions",
    "StructuredOutputs",
    "Usage",
]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field()]


def _check_biases(biases: Any) -> Any:
    """Refuses at the first bias that is not a number from -100 to 100: pydantic would report every entry of a
    dict."""
    if isinstance(biases, dict):
        for token, bias in biases.items():
            try:
                is_right = -100 <= float(bias) <= 100
            except (TypeError, ValueError, OverflowError):
                is_right = False
            if not is_right:
                raise ValueError(
                    f"expected numbers from -100 to 100, got another value for the token {str(token)[:16]!r}"
                )
    return biases


class StreamOptions(StrictBody):
    include_usage: bool | None = Field(False, description="Adds a last event with the usage.")
    include_obfuscation: Annotated[Any, OneOf("events are not padded", False)] = None
    continuous_usage_stats: bool | None = Field(
        False, description="vLLM's: every event has the usage of the answer so far."
    )


class JsonSchemaFormat(StrictBody):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(StrictBody):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Annotated[Any, OneOf("say type json_schema and json_schema: {schema: ...}")] = Field(
        None, alias="schema"
    )


Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class StructuredOutputs(StrictBody):
    """vLLM's: one of json, regex, choice, grammar and json_object."""

    json_: dict[str, Any] | str | None = Field(None, alias="json", description="A schema, or its JSON text.")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = Field(
        None, description="In Lark, as llguidance reads it, or as `name ::= ...` rules."
    )
    json_object: bool | None = None
    disable_any_whitespace: bool | None = Field(None, description="JSON is written on one line in any case.")
    disable_additional_properties: Annotated[Any, OneOf("say it in the schema", False)] = None
    whitespace_pattern: Annotated[Any, OneOf("JSON is written on one line")] = None
    structural_tag: Annotated[Any, OneOf("ask for json, regex, choice or grammar")] = None


class SamplingBody(UnservedFields, AcceptedFields, PromptCacheFields, GeneratingBody):
    """Sampling fields, and Quire's own fields of caching. Unknown ones are refused by name."""

    model: str | None = Field(None, description="The served model's name; any of `/v1/models`.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1, description="0: the most likely token.")
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Ours: 0 or -1 for all tokens.")
    min_p: float | None = Field(None, ge=0, le=1, description="Ours.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Ours.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_check_biases)
    ] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, description="Ours.")
    include_stop_str_in_output: bool | None = Field(
        False, description="vLLM's: the text includes the stop string or stop token that ended it."
    )
    min_tokens: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="vLLM's: only max_tokens ends an answer of at most so many tokens; null: the model's default.",
    )
    bad_words: list[Annotated[str, Field(min_length=1, max_length=256)]] | None = Field(
        None, max_length=256, description="vLLM's: words that are never written, see SamplingParams."
    )
    allowed_token_ids: list[TokenId] | None = Field(
        None, min_length=1, description="vLLM's: the only tokens that may be generated."
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's.")
    guided_json: dict[str, Any] | str | None = Field(None, description="vLLM's before structured_outputs.")
    guided_regex: str | None = Field(None, description="Likewise.")
    guided_choice: Choices | None = Field(None, description="Likewise.")
    guided_grammar: str | None = Field(None, description="Likewise.")
    truncate_prompt_tokens: int | None = Field(
        None, ge=1, lt=2**31, description="vLLM's: a longer prompt is cut to this number of tokens."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None,
        description="vLLM's: the side at which a prompt is cut; left, the default, keeps the last tokens.",
    )
    return_tokens_as_token_ids: bool | None = Field(
        False, description="vLLM's: logprobs name tokens `token_id:N`."
    )
    return_token_ids: bool | None = Field(
        False, description="vLLM's: the answer has token_ids and prompt_token_ids."
    )
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        description="vLLM's: the answer has the log probability of each token of the prompt, and those of this many "
        "likeliest tokens in its place.",
    )
    prompt_logprobs_start: int | None = Field(
        None,
        ge=0,
        lt=2**31,
        description="Ours: tokens of the prompt before this position have no log probability; their keys and values "
        "may come from the cache.",
    )
    add_special_tokens: bool | None = Field(
        None,
        description="vLLM's: whether a text gets the tokenizer's special first tokens. Default: prompts do, "
        "messages do not.",
    )
    ignore_eos: bool | None = Field(False, description="Ours: end tokens do not end the answer.")
    n: int | None = Field(1, ge=1)
    use_beam_search: bool | None = Field(
        None,
        description="vLLM's: a beam search with best_of beams, at temperature 0; the n best are the answers. A stream "
        "has them at its end. Default: as num_beams of the model's generation config, if temperature is not above 0.",
    )
    best_of: int | None = Field(
        None, ge=1, description="vLLM's: beams of a beam search, by default n; without one it has to equal n."
    )
    length_penalty: float | None = Field(
        None, description="vLLM's: of a beam search, see SamplingParams; by default the model's, else 1."
    )
    early_stopping: bool | Literal["never"] | None = Field(
        None, description="vLLM's: of a beam search, see SamplingParams; by default the model's, else false."
    )
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = Field(
        None,
        max_length=1024,
        description="Ours: separates this request's cached content from others' of the tenant.",
    )
    priority: int | None = Field(
        None, ge=0, le=2**20, description="Ours: smaller is served first, within the tenant's rights."
    )
    cache_priority: Literal["keep", "normal", "discard"] | None = Field(
        None,
        description="Ours: how early its cached content is evicted.",
    )
    keep_for: float | None = Field(
        None, gt=0, le=30 * 86400, description="Ours: seconds for which its prompt's blocks are pinned."
    )

    cache_report: bool | None = Field(
        False, description="Ours: the answer says how much of its prompt was cached, and why no more."
    )

    session_cache: SessionCache = None

    def cut(self, token_ids: list[int]) -> list[int]:
        """The prompt's tokens after `truncate_prompt_tokens`."""
        limit = self.truncate_prompt_tokens
        if limit is None:
            return token_ids
        return token_ids[:limit] if self.truncation_side == "right" else token_ids[-limit:]


class PromptLogprob(BaseModel):
    """vLLM's. rank: 1 for the likeliest token; null for a token of the prompt that is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str | None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""An entry for each token of the prompt: by token id, the prompt's own token first; null for the first token."""


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0
    cache_write_tokens: int = Field(default=0, description="Computed, and cached for other requests.")
    computed_tokens: int = Field(default=0, description="Ours: tokens whose keys and values were computed.")
    kept_tokens: int = Field(default=0, description="Ours: pinned by caching fields of the request.")


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()

    @classmethod
    def of(
        cls, num_prompt: int, num_completion: int, num_cached: int, *, is_kept: bool, num_pinned: int = 0
    ) -> Usage:
        """is_kept: other requests find what was computed. num_pinned: tokens of the prompt."""
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=num_cached,
                cache_write_tokens=num_prompt - num_cached if is_kept else 0,
                computed_tokens=num_prompt - num_cached,
                kept_tokens=num_pinned,
            ),
        )


class Error(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str


class ErrorBody(BaseModel):
    """The body of every answer with a status from 400 on."""

    error: Error


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "quire"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text}
    for status, text in {
        400: "The request cannot be served; the message says why.",
        401: "No API key, or an unknown one.",
        403: "This key may not do that.",
        404: "There is no such model or object.",
        409: "The conversation is being answered, or has changed meanwhile.",
        413: "The body is too large.",
        429: "Too many requests are waiting; try again after Retry-After seconds.",
        500: "The server failed.",
        503: "The server is stopping, or its engine has failed.",
    }.items()
}
