"""Routes that generate nothing: models, tokens, metrics and health."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, Field

from quire.server.api_errors import ApiError
from quire.server.chat_prompt import prompt_of_chat
from quire.server.dependencies import TheService, TheTenant, tenant_of
from quire.server.http.bodies import BodyRoute
from quire.server.schemas.chat_bodies import ChatMessage, WholePromptFields
from quire.server.schemas.common import ERRORS, ModelCard, ModelList, TokenId
from quire.server.schemas.strict_body import StrictBody
from quire.server.schemas.unserved import OneOf
from quire.server.service import Service

__all__ = ["health_router", "router"]

router = APIRouter(dependencies=[Depends(tenant_of)], route_class=BodyRoute, responses=ERRORS)
health_router = APIRouter(tags=["Health"])


class TokenizeRequest(WholePromptFields):
    """A prompt, or messages with the fields of a chat completion that decide its prompt."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default: prompts get them and messages do not, as in completions and chats."
    )
    return_token_strs: Annotated[Any, OneOf("ask POST /detokenize", False)] = None


class TokenizeAnswer(BaseModel):
    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeRequest(StrictBody):
    model: str | None = None
    tokens: list[TokenId] = Field(max_length=1 << 20)


class DetokenizeAnswer(BaseModel):
    prompt: str


def _card(service: Service) -> ModelCard:
    return ModelCard(
        id=service.model_name, created=service.created, max_model_len=service.engine.max_model_len
    )


@router.get("/v1/models", tags=["OpenAI"])
async def models(service: TheService) -> ModelList:
    """The served model."""
    return ModelList(data=[_card(service)])


@router.get("/v1/models/{name:path}", tags=["OpenAI"])
async def model(name: str, service: TheService) -> ModelCard:
    service.check_model(name)
    return _card(service)


@router.post("/tokenize", tags=["Tokens"])
async def tokenize(body: TokenizeRequest, request: Request, service: TheService) -> TokenizeAnswer:
    """The tokens of a text, or of the prompt of a chat completion with the same fields."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "expected either a prompt or messages")
    if body.messages is not None:
        prompt = await prompt_of_chat(
            body,
            body.messages,
            request,
            service,
            add_special_tokens=bool(body.add_special_tokens),
            is_counted_only=True,
        )
        tokens = prompt.token_ids
    else:
        for name, field in WholePromptFields.model_fields.items():
            if getattr(body, name) not in (None, field.default):
                raise ApiError(400, f"expected messages with {name}, got a prompt", param=name)
        tokens = await service.encode(
            body.prompt or "", add_special_tokens=body.add_special_tokens is not False, is_prompt=False
        )
    return TokenizeAnswer(tokens=tokens, count=len(tokens), max_model_len=service.engine.max_model_len)


@router.post("/detokenize", tags=["Tokens"])
async def detokenize(body: DetokenizeRequest, service: TheService) -> DetokenizeAnswer:
    """The text of tokens."""
    service.check_model(body.model)
    vocab_size = service.engine.vocab_size
    if any(token >= vocab_size for token in body.tokens):
        raise ApiError(400, f"expected token ids below {vocab_size}, got {max(body.tokens)}", param="tokens")
    if service.tokenizer is None:
        raise ApiError(400, "expected a model with a tokenizer, this one has none", param="tokens")
    return DetokenizeAnswer(prompt=await service.decode(body.tokens))


@router.get("/metrics", tags=["Health"], response_class=Response)
async def metrics(service: TheService, tenant: TheTenant) -> Response:
    """Prometheus metrics: the whole server's or, for a tenant, its own requests'."""
    return Response(await service.metrics_page(tenant), media_type=CONTENT_TYPE_LATEST)


@health_router.get("/health", responses={503: {"description": "The engine has failed, or is not open."}})
async def health(request: Request) -> Response:
    """200 while the engine runs; 503 with the reason once it has failed."""
    service: Service = request.app.state.service
    failure = service.engine.failure
    if failure is not None:
        return JSONResponse({"status": "failed", "reason": str(failure)}, 503)
    return JSONResponse({"status": "ok"})


@health_router.get("/ready", responses={503: {"description": "Not taking requests."}})
async def ready(request: Request) -> Response:
    """200 while requests are taken; 503 while the server is stopping or its engine has failed."""
    service: Service = request.app.state.service
    if service.draining or service.engine.failure is not None:
        return JSONResponse({"status": "stopping" if service.draining else "failed"}, 503)
    return JSONResponse({"status": "ready"})
