"""The stored responses and OpenAI conversations of one tenant, with OpenAI's errors where one is not there.

A response's record has its own input and the response; its history is that of the responses before it. A
conversation's record has all of its items. Ids of items lead to their owner (`item_id`).
"""

from __future__ import annotations

import re
import secrets
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from quire.server.api_errors import ApiError
from quire.server.api_keys import ApiTenant
from quire.server.record_store import Record, record_bytes
from quire.server.response_output import item_id
from quire.server.service import Service

__all__ = ["TenantRecords", "items_page", "new_record_id", "with_new_ids"]

_ITEM_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{32})[0-9a-f]{6}")

Result = TypeVar("Result")


def new_record_id(kind: str) -> str:
    """kind: resp or conv."""
    return f"{kind}_{uuid.uuid4().hex}"


def with_new_ids(
    items: Sequence[dict[str, Any]], taken: Sequence[dict[str, Any]], owner: str
) -> list[dict[str, Any]]:
    """The items, each with an id that no other has. taken: items of the owner; owner: its id."""
    ids, found = {item["id"] for item in taken}, []
    for item in items:
        name = item["id"]
        while not name or name in ids:
            name = item_id(item["type"], owner.partition("_")[2], secrets.randbits(24))
        ids.add(name)
        found.append({**item, "id": name})
    return found


def items_page(items: Sequence[dict[str, Any]], after: str | None, limit: int, order: str) -> dict[str, Any]:
    """The fields of an `ItemList`. *raises:* ApiError: there is no item of the id `after`."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item["id"] == after]
        if not places:
            raise ApiError(404, f"expected the id of an item in this list, got {after[:64]!r}", param="after")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return {
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }


class TenantRecords:
    def __init__(self, service: Service, tenant: ApiTenant) -> None:
        self._service = service
        self._store = service.records
        self._tenant = tenant.name

    # -- responses -------------------------------------------------------------------------------------

    async def response(self, name: str, param: str | None = None) -> Record:
        """The record of a response. param: the field that names it. *raises:* ApiError 404."""
        record = await self._get("resp", name)
        if record is None:
            code = "previous_response_not_found" if param else "response_not_found"
            raise ApiError(
                404, f"Response with id {name[:64]!r} not found: {self._reasons}", param=param, code=code
            )
        return record

    async def keep_response(self, response: Record, items: Sequence[Record]) -> None:
        """items: of the response's own input."""
        record = {"input": list(items), "response": response}
        await self._call(self._store.put, self._tenant, response["id"], record)

    async def remove_response(self, name: str) -> None:
        """*raises:* ApiError 404."""
        await self.response(name)
        await self._call(self._store.remove, self._tenant, name)

    async def history(
        self, name: str | None, param: str | None = "previous_response_id"
    ) -> tuple[list[Record], str | None]:
        """(the items of a response and of all before it, the id of the first). *raises:* ApiError: one of them is not
        there."""
        turns: list[Record] = []
        max_turns = self._service.settings.limits.max_messages
        while name is not None:
            if len(turns) == max_turns:
                raise ApiError(
                    400, f"expected a history of at most {max_turns} responses, got more", param=param
                )
            turns.append(await self.response(name, param))
            response = turns[-1]["response"]
            if response["conversation"] is not None:
                raise ApiError(
                    400,
                    f"expected conversation: {response['conversation']['id']!r}, to which this response belongs",
                    param=param,
                )
            name = response["previous_response_id"]
        items = [item for turn in reversed(turns) for item in (*turn["input"], *turn["response"]["output"])]
        return items, turns[-1]["response"]["id"] if turns else None

    # -- conversations ---------------------------------------------------------------------------------

    async def make_conversation(self, items: Sequence[Record], metadata: dict[str, str]) -> Record:
        name = new_record_id("conv")
        own = with_new_ids(items, (), name)
        record = {"id": name, "created_at": int(time.time()), "metadata": metadata, "items": own}
        self.check_size(record, "items")
        await self._call(self._store.put, self._tenant, name, record)
        return record

    async def conversation(self, name: str, param: str | None = None) -> Record:
        """*raises:* ApiError 404."""
        return self._found(await self._get("conv", name), name, param)

    async def change_conversation(self, name: str, change: Callable[[Record], None]) -> Record:
        """Changes a conversation's record. *raises:* ApiError 404, and as `change`."""
        record = None
        if name.startswith("conv_"):
            record = await self._call(self._store.update, self._tenant, name, change)
        return self._found(record, name, None)

    async def add_items(
        self, name: str, items: Sequence[Record], *, is_checked: bool = False
    ) -> list[Record]:
        """Adds items to a conversation; returns them with their ids. is_checked: the size does not matter, as their
        answer is there. *raises:* ApiError: 404, or too large."""
        added: list[Record] = []

        def add(record: Record) -> None:
            added.extend(with_new_ids(items, record["items"], name))
            record["items"] = [*record["items"], *added]
            if not is_checked:
                self.check_size(record, "items")

        await self.change_conversation(name, add)
        return added

    async def remove_conversation(self, name: str) -> None:
        """*raises:* ApiError 404."""
        await self.conversation(name)
        await self._call(self._store.remove, self._tenant, name)

    # -- both ------------------------------------------------------------------------------------------

    async def item(self, name: str, param: str | None) -> Record:
        """A stored item by its id. *raises:* ApiError 404."""
        if match := _ITEM_ID.fullmatch(name):
            response = await self._get("resp", f"resp_{match[1]}")
            items = [] if response is None else [*response["input"], *response["response"]["output"]]
            conversation = await self._get("conv", f"conv_{match[1]}")
            items += [] if conversation is None else conversation["items"]
            for item in items:
                if item["id"] == name:
                    return item
        raise ApiError(
            404, f"Item with id {name[:64]!r} not found: {self._reasons}", param=param, code="item_not_found"
        )

    def check_size(self, record: Any, param: str) -> None:
        """*raises:* ApiError: the record alone is larger than all may be."""
        max_bytes = self._store.max_bytes
        if (num_bytes := len(record_bytes(record))) > max_bytes:
            raise ApiError(
                400,
                f"expected at most {max_bytes} bytes to store, got {num_bytes}; send fewer, or store: false to "
                "/v1/responses; the setting is max_record_bytes",
                param=param,
            )

    def _found(self, record: Record | None, name: str, param: str | None) -> Record:
        if record is None:
            raise ApiError(
                404,
                f"Conversation with id {name[:64]!r} not found: {self._reasons}",
                param=param,
                code="conversation_not_found",
            )
        return record

    @property
    def _reasons(self) -> str:
        """Why a record may be gone."""
        ends = "" if self._store.folder is not None else ", or from before a restart (give a disk cache)"
        return (
            "it is deleted, of another key, of a response with store: false, dropped for newer ones (the settings are "
            f"max_records and max_record_bytes){ends}"
        )

    async def _get(self, kind: str, name: str) -> Record | None:
        if not name.startswith(f"{kind}_"):
            return None
        return await self._call(self._store.get, self._tenant, name)

    async def _call(self, function: Callable[..., Result], *arguments: Any) -> Result:
        """In a thread: records are large, and may be files."""
        return await self._service.threads.run(function, *arguments)
