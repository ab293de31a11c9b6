"""Bodies of `/v1/completions`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from quire.server.schemas.common import PromptLogprobs, SamplingBody, TokenId, Usage
from quire.server.schemas.unserved import OneOf

__all__ = ["Completion", "CompletionChoice", "CompletionRequest"]

Tokens = Annotated[list[TokenId], Field(min_length=1)]


class CompletionRequest(SamplingBody):
    prompt: str | Tokens | Annotated[list[str | Tokens], Field(min_length=1)]
    max_tokens: int | None = Field(
        16, ge=0, lt=2**31, description="0: the prompt is computed and cached, nothing is generated."
    )
    logprobs: int | None = Field(None, ge=0, description="With echo, of the prompt's tokens too.")
    echo: bool | None = Field(False, description="The text begins with the prompt.")
    suffix: str | None = Field(
        None,
        description="The text behind the answer, for models whose tokenizer has tokens to fill in the middle; others "
        "refuse it.",
    )
    prompt_embeds: Annotated[Any, OneOf("a prompt is text or tokens")] = None
    json_schema: dict[str, Any] | None = Field(None, description="Ours: the answer is JSON of this schema.")
    regex: str | None = Field(None, description="Ours: the answer matches this expression.")


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]

    def followed_by(self, others: CompletionLogprobs) -> CompletionLogprobs:
        """These tokens and further ones of the same text."""
        tops = self.top_logprobs
        return CompletionLogprobs(
            tokens=self.tokens + others.tokens,
            token_logprobs=self.token_logprobs + others.token_logprobs,
            top_logprobs=None if tops is None else tops + (others.top_logprobs or []),
            text_offset=self.text_offset + others.text_offset,
        )


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
