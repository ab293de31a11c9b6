"""What completions and chat completions have in common: sampling fields, usage, the bodies of errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    model_validator,
)

__all__ = ["Body", "ErrorBody", "ModelCard", "ModelList", "SamplingBody", "StreamOptions", "Usage"]

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Text = Annotated[str, Field()]


def _end_at_first_error(schema: Any) -> None:
    parts = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict) and schema.get("type") == "list":
        schema["fail_fast"] = True
    for part in parts:
        _end_at_first_error(part)


class Body(BaseModel):
    """A request's body. Unknown fields are accepted, as OpenAI's clients send new ones at any time."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> Any:
        """A list's first wrong item is the last one looked at: an error for each took gigabytes and half a minute."""
        schema = handler(source)
        _end_at_first_error(schema)
        return schema


def _numbers(biases: Any) -> Any:
    """Refuses the first bias that is no number from -100 to 100: a dict has no such option as lists."""
    if isinstance(biases, dict):
        for token, bias in biases.items():
            try:
                is_right = -100 <= float(bias) <= 100
            except (TypeError, ValueError, OverflowError):
                is_right = False
            if not is_right:
                raise ValueError(
                    f"expected numbers from -100 to 100, got another for the token {str(token)[:16]!r}"
                )
    return biases


class StreamOptions(Body):
    include_usage: bool | None = Field(False, description="A last event with the usage.")


class SamplingBody(Body):
    """Fields that say how to draw tokens, and ours that say how to keep them."""

    model: str | None = Field(None, description="The served model's name; any of `/v1/models`.")
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="Ours: 0 or -1 for all tokens.")
    min_p: float | None = Field(None, ge=0, le=1, description="Ours.")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Ours.")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-100, le=100)]] | None, BeforeValidator(_numbers)
    ] = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: str | list[str] | None = None
    stop_token_ids: list[TokenId] | None = Field(None, description="Ours.")
    ignore_eos: bool | None = Field(False, description="Ours: end tokens do not end the answer.")
    n: int | None = Field(1, ge=1)
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Accepted and not used.")
    cache_salt: str | None = Field(
        None,
        max_length=1024,
        description="Ours: sets the content of this request's cache apart within its tenant.",
    )
    priority: int | None = Field(
        None, ge=0, le=2**20, description="Ours: smaller is served first, within what the tenant may have."
    )
    cache_priority: Literal["keep", "normal", "discard"] | None = Field(
        None,
        validation_alias=AliasChoices("cache_priority", "retention"),  # the second is its old name
        description="Ours: how long its content stays cached, beside others'.",
    )
    keep_for: float | None = Field(
        None, gt=0, le=30 * 86400, description="Ours: seconds for which its prompt's content is pinned."
    )

    @model_validator(mode="before")
    @classmethod
    def _one_name(cls, data: Any) -> Any:
        if isinstance(data, dict) and {"cache_priority", "retention"} <= data.keys():
            raise ValueError("expected cache_priority alone, got retention too, which is its old name")
        return data


class PromptTokensDetails(BaseModel):
    cached_tokens: int = 0


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails = PromptTokensDetails()

    @classmethod
    def of(cls, num_prompt: int, num_completion: int, num_cached: int) -> Usage:
        return cls(
            prompt_tokens=num_prompt,
            completion_tokens=num_completion,
            total_tokens=num_prompt + num_completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=num_cached),
        )


class Error(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """What every status from 400 on comes with."""

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
        400: "The request cannot be served as it is; the message says why.",
        401: "No API key, or an unknown one.",
        403: "This key may not do that.",
        404: "There is no such model or thing.",
        409: "The conversation is being answered, or has changed meanwhile.",
        413: "The body is too large.",
        429: "Too many requests are waiting; come back after Retry-After seconds.",
        500: "The server failed.",
        503: "The server is stopping, or its engine has failed.",
    }.items()
}
