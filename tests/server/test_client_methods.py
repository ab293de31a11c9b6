"""Laws from the installed clients: each of their paths is served or refused by name, each parameter of a query and of a
body is known."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from types import ModuleType
from typing import Any, get_type_hints

import anthropic.resources.messages as of_messages
import httpx
import openai
import openai.resources.chat.completions as of_chats
import openai.resources.completions as of_completions
import openai.resources.conversations as of_conversations
import openai.resources.models as of_models
import openai.resources.responses as of_responses
import pytest
from openai.types import conversations as conversation_types
from openai.types import responses as response_types
from openai.types.chat.chat_completion_stream_options_param import ChatCompletionStreamOptionsParam
from pydantic import BaseModel

from quire.server.schemas.common import StreamOptions
from quire.server.schemas.response_bodies import ConversationUpdate, NewItems, OpenAIConversationRequest

# Not served: stored chat completions, batches, deleting the model. Each is answered with the paths that there are.
UNSERVED = {
    ("get", "/v1/chat/completions"),
    ("get", "/v1/chat/completions/{completion_id}"),
    ("post", "/v1/chat/completions/{completion_id}"),
    ("delete", "/v1/chat/completions/{completion_id}"),
    ("get", "/v1/chat/completions/{completion_id}/messages"),
    ("delete", "/v1/models/{model}"),
    ("post", "/v1/messages/batches"),
    ("get", "/v1/messages/batches"),
    ("get", "/v1/messages/batches/{message_batch_id}"),
    ("delete", "/v1/messages/batches/{message_batch_id}"),
    ("post", "/v1/messages/batches/{message_batch_id}/cancel"),
}


def calls_of(module: ModuleType, root: str) -> set[tuple[str, str]]:
    """(method, path) of each call in the sources of a client's resource."""
    place = Path(inspect.getfile(module))
    files = place.parent.glob("*.py") if place.name == "__init__.py" else [place]
    text = "\n".join(file.read_text() for file in files)
    found = re.findall(
        r'self\._(get|post|delete)(?:_api_list)?\(\s*(?:path_template\(\s*)?f?"(/[^"]*)"', text
    )
    found += [
        ("get", path) for path in re.findall(r'_get_api_list\(\s*(?:path_template\(\s*)?"(/[^"]*)"', text)
    ]
    return {(method, (root + path).partition("?")[0]) for method, path in found}


CALLS = {
    call
    for module, root in (
        (of_completions, "/v1"),
        (of_chats, "/v1"),
        (of_responses, "/v1"),
        (of_conversations, "/v1"),
        (of_models, "/v1"),
        (of_messages, ""),
    )
    for call in calls_of(module, root)
}


def test_every_path_of_the_clients_is_served_or_refused(url: str) -> None:
    assert len(CALLS) > 25
    spec = httpx.get(f"{url}/openapi.json").json()["paths"]
    served = {
        (method, re.sub(r"\{[^}]*\}", "{}", path)) for path, methods in spec.items() for method in methods
    }
    missing = {
        (method, path) for method, path in CALLS if (method, re.sub(r"\{[^}]*\}", "{}", path)) not in served
    }
    assert missing == CALLS & UNSERVED
    for method, path in sorted(CALLS & UNSERVED):
        answer = httpx.request(method, url + re.sub(r"\{[^}]*\}", "some", path))
        assert answer.status_code in (404, 405), (method, path)
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "params"),
    [
        (
            "/v1/responses/{response_id}",
            response_types.response_retrieve_params.ResponseRetrieveParamsStreaming,
        ),
        ("/v1/responses/{response_id}/input_items", response_types.InputItemListParams),
        ("/v1/conversations/{conversation_id}/items", conversation_types.ItemListParams),
        ("/v1/conversations/{conversation_id}/items/{item_id}", conversation_types.ItemRetrieveParams),
    ],
)
def test_every_parameter_of_a_query_is_known(url: str, path: str, params: Any) -> None:
    described = httpx.get(f"{url}/openapi.json").json()["paths"][path]["get"]["parameters"]
    assert set(get_type_hints(params)) <= {parameter["name"] for parameter in described}


@pytest.mark.parametrize(
    ("model", "params", "in_query"),
    [
        (OpenAIConversationRequest, conversation_types.ConversationCreateParams, set()),
        (ConversationUpdate, conversation_types.ConversationUpdateParams, set()),
        (NewItems, conversation_types.ItemCreateParams, {"include"}),
        (StreamOptions, ChatCompletionStreamOptionsParam, set()),
    ],
)
def test_every_field_of_a_body_is_known(model: type[BaseModel], params: Any, in_query: set[str]) -> None:
    assert set(get_type_hints(params)) - in_query <= set(model.model_fields)


def test_what_a_query_includes(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    thought: Any = {
        "type": "reasoning",
        "id": "rs_own",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    encrypted: Any = ["reasoning.encrypted_content"]
    talk = client.conversations.create(items=[thought, {"role": "user", "content": "a"}])
    plain, sealed = [
        next(item for item in client.conversations.items.list(talk.id, **more) if item.type == "reasoning")
        for more in ({}, {"include": encrypted})
    ]
    assert (plain.encrypted_content, bool(sealed.encrypted_content)) == (None, True)
    one = client.conversations.items.retrieve(sealed.id, conversation_id=talk.id, include=encrypted)
    assert one == sealed
    again: Any = {
        "type": "reasoning",
        "id": "rs_2",
        "summary": [],
        "encrypted_content": sealed.encrypted_content,
    }
    asked: dict[str, Any] = {"model": client.models.list().data[0].id, "max_output_tokens": 1}
    by_text, by_seal = [
        client.responses.create(**asked, input=[item, {"role": "user", "content": "a"}])
        for item in (thought, again)
    ]
    assert by_text.usage
    assert by_seal.usage
    assert by_text.usage.input_tokens == by_seal.usage.input_tokens
    assert client.responses.retrieve(by_text.id, include=encrypted).id == by_text.id
    listed = list(client.responses.input_items.list(by_text.id, include=encrypted))
    assert any(getattr(item, "encrypted_content", None) for item in listed)
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(by_text.id, include=["web_search_call.results"])
    with pytest.raises(openai.BadRequestError):
        client.responses.retrieve(by_text.id, include_obfuscation=True)


def test_histories_are_not_compacted(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="truncation: auto"):
        client.responses.compact(model="embedded", input="a")
