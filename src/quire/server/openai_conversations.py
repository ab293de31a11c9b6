"""`/v1/conversations`: OpenAI's conversations, lists of items that responses read and add to.

Quire's own conversations, of tokens, are `/quire/conversations`.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from quire.server.api_errors import ApiError
from quire.server.dependencies import TheService, TheTenant
from quire.server.http.bodies import BodyRoute
from quire.server.response_input import messages_of_items, stored_item
from quire.server.responses import After, Included, Limit, Order, with_included
from quire.server.schemas.common import ERRORS
from quire.server.schemas.response_bodies import (
    ConversationItemList,
    ConversationUpdate,
    DeletedConversation,
    NewItems,
    OpenAIConversation,
    OpenAIConversationRequest,
)
from quire.server.schemas.response_items import ItemReference
from quire.server.service import Service
from quire.server.tenant_records import TenantRecords, items_page

__all__ = ["router"]

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute, responses=ERRORS)


def _card(record: dict[str, Any]) -> OpenAIConversation:
    return OpenAIConversation(id=record["id"], created_at=record["created_at"], metadata=record["metadata"])


async def _stored_items(items: list[Any], service: Service, records: TenantRecords) -> list[dict[str, Any]]:
    """The items as they are stored, references replaced. *raises:* ApiError: items that no response could read."""
    max_items = service.settings.limits.max_messages
    if len(items) > max_items:
        raise ApiError(400, f"expected at most {max_items} items, got {len(items)}", param="items")
    messages_of_items([item for item in items if not isinstance(item, ItemReference)], "items")
    found: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if isinstance(item, ItemReference):
            found.append(await records.item(item.id, f"items.{number}.id"))
        else:
            found.append(stored_item(item, ""))
    return found


@router.post("/v1/conversations")
async def create_conversation(
    service: TheService, tenant: TheTenant, body: OpenAIConversationRequest | None = None
) -> OpenAIConversation:
    """Makes a conversation, empty or with items."""
    body = body or OpenAIConversationRequest()
    records = TenantRecords(service, tenant)
    items = await _stored_items(body.items or [], service, records)
    return _card(await records.make_conversation(items, body.metadata or {}))


@router.get("/v1/conversations/{conversation_id}")
async def retrieve_conversation(
    conversation_id: str, service: TheService, tenant: TheTenant
) -> OpenAIConversation:
    """A conversation, without its items."""
    return _card(await TenantRecords(service, tenant).conversation(conversation_id))


@router.post("/v1/conversations/{conversation_id}")
async def update_conversation(
    conversation_id: str, body: ConversationUpdate, service: TheService, tenant: TheTenant
) -> OpenAIConversation:
    """Replaces the metadata."""

    def change(record: dict[str, Any]) -> None:
        record["metadata"] = body.metadata or {}

    return _card(await TenantRecords(service, tenant).change_conversation(conversation_id, change))


@router.delete("/v1/conversations/{conversation_id}")
async def delete_conversation(
    conversation_id: str, service: TheService, tenant: TheTenant
) -> DeletedConversation:
    """Removes a conversation with its items; its responses stay."""
    await TenantRecords(service, tenant).remove_conversation(conversation_id)
    return DeletedConversation(id=conversation_id)


@router.post("/v1/conversations/{conversation_id}/items")
async def add_conversation_items(
    conversation_id: str,
    body: NewItems,
    service: TheService,
    tenant: TheTenant,
    included: Included = frozenset(),
) -> ConversationItemList:
    """Adds items at the end."""
    records = TenantRecords(service, tenant)
    await records.conversation(conversation_id)
    items = await _stored_items(body.items, service, records)
    added = await records.add_items(conversation_id, items)
    return ConversationItemList(**items_page(with_included(added, included), None, len(added), "asc"))


@router.get("/v1/conversations/{conversation_id}/items")
async def list_conversation_items(
    conversation_id: str,
    service: TheService,
    tenant: TheTenant,
    after: After = None,
    limit: Limit = 20,
    order: Order = "desc",
    included: Included = frozenset(),
) -> ConversationItemList:
    """A page of the items."""
    record = await TenantRecords(service, tenant).conversation(conversation_id)
    items = with_included(record["items"], included)
    return ConversationItemList(**items_page(items, after, limit, order))


@router.get("/v1/conversations/{conversation_id}/items/{item_id}")
async def retrieve_conversation_item(
    conversation_id: str,
    item_id: str,
    service: TheService,
    tenant: TheTenant,
    included: Included = frozenset(),
) -> dict[str, Any]:
    """One item."""
    record = await TenantRecords(service, tenant).conversation(conversation_id)
    return with_included([record["items"][_place_of(record, item_id)]], included)[0]


@router.delete("/v1/conversations/{conversation_id}/items/{item_id}")
async def delete_conversation_item(
    conversation_id: str, item_id: str, service: TheService, tenant: TheTenant
) -> OpenAIConversation:
    """Removes one item."""

    def change(record: dict[str, Any]) -> None:
        del record["items"][_place_of(record, item_id)]

    return _card(await TenantRecords(service, tenant).change_conversation(conversation_id, change))


def _place_of(record: dict[str, Any], item_id: str) -> int:
    """*raises:* ApiError 404."""
    for place, item in enumerate(record["items"]):
        if item["id"] == item_id:
            return place
    raise ApiError(
        404, f"expected the id of an item in this conversation, got {item_id[:64]!r}", code="item_not_found"
    )
