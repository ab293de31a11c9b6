"""The conversations of a server, by tenant. They hold tokens; blocks only during a turn.

Invariants
    C1  only a conversation's tenant finds it; a tenant has at most `max_count`, and begins nothing that would make
        its conversations larger than `max_bytes` together. The model's tokens count once they are there.
    C2  one turn at a time; it changes the conversation as a whole at its end, or not at all.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from quire.engine.async_conversation import AsyncConversation
from quire.server.api_errors import ApiError
from quire.server.api_keys import ApiTenant
from quire.server.schemas.accepted import without_accepted
from quire.server.schemas.chat_bodies import ChatMessage

__all__ = ["ConversationEntry", "Conversations", "conversation_bytes"]

_BYTES_OF_TOKEN = 4
# Python's memory of a conversation, a message, a part or a tool call, rounded up.
_BYTES_OF_OBJECT = 2048


def conversation_bytes(messages: Sequence[ChatMessage], num_tokens: int) -> int:
    """The memory of a conversation with these messages and tokens, roughly and not too little."""
    num_objects = 1 + len(messages) + sum(len(message.tool_calls or ()) for message in messages)
    num_objects += sum(len(message.content) for message in messages if isinstance(message.content, list))
    num_bytes = sum(len(message.model_dump_json()) for message in messages)
    return _BYTES_OF_OBJECT * num_objects + num_bytes + _BYTES_OF_TOKEN * num_tokens


class ConversationEntry:
    """One conversation. first: messages before those of the first turn; starts: where turns begin, in tokens."""

    def __init__(
        self,
        state: AsyncConversation,
        cache_salt: str | None,
        first: Sequence[ChatMessage] = (),
        starts: Sequence[int] = (),
    ) -> None:
        self.id = f"conv-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.state = state
        self.cache_salt = cache_salt
        self.first = tuple(map(without_accepted, first))  # as the template gets them
        self._first_bytes = conversation_bytes(self.first, 0)
        self.starts = list(starts)
        self._turn: AsyncConversation | None = None

    @property
    def num_bytes(self) -> int:
        """Its memory, roughly."""
        return self._first_bytes + _BYTES_OF_TOKEN * len(self.state) + 8 * len(self.starts)

    def begin(self, base: AsyncConversation, turn: AsyncConversation) -> None:
        """Begins `turn`, a fork of `base` with something appended. *raises:* ApiError 409."""
        self.require_idle()
        if self.state is not base:
            raise ApiError(409, "the conversation has changed since this turn was asked for", code="conflict")
        self._turn = turn

    def end(self, turn: AsyncConversation, is_kept: bool) -> None:
        """Ends that turn; a second call does nothing."""
        if self._turn is not turn:
            return
        self._turn = None
        if is_kept:
            self.starts.append(len(self.state))
            self.state = turn

    def require_idle(self) -> None:
        if self._turn is not None:
            raise ApiError(
                409, "the conversation is being answered: wait for the end, or fork it", code="conflict"
            )

    def fork(self) -> ConversationEntry:
        """A new conversation with the same tokens; during a turn, also those of the answer so far."""
        state, starts = self.state, list(self.starts)
        if self._turn is not None:
            starts.append(len(state))
            state = self._turn
        return ConversationEntry(state.fork(), self.cache_salt, self.first, starts)

    def close(self) -> None:
        """Ends a turn under way."""
        for conversation in (self._turn, self.state):
            if conversation is not None:
                conversation.close()


class Conversations:
    """The conversations by tenant and id. max_count, max_bytes: of one tenant."""

    def __init__(self, max_count: int, max_bytes: int) -> None:
        self._max_count = max_count
        self._max_bytes = max_bytes
        self._by_tenant: dict[str, dict[str, ConversationEntry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_tenant.values()))

    def entries_of(self, tenant: ApiTenant) -> list[ConversationEntry]:
        return list(self._by_tenant.get(tenant.name, {}).values())

    def check_room(self, tenant: ApiTenant) -> None:
        if len(self._by_tenant.get(tenant.name, ())) >= self._max_count:
            raise ApiError(
                429,
                f"at most {self._max_count} conversations of one tenant; delete some",
                code="too_many_conversations",
                retry_after_s=1,
            )

    def check_bytes(self, tenant: ApiTenant, num_more: int) -> None:
        """*raises:* ApiError 429: the tenant's conversations would exceed their memory limit."""
        num_bytes = sum(entry.num_bytes for entry in self._by_tenant.get(tenant.name, {}).values())
        if num_bytes + num_more > self._max_bytes:
            raise ApiError(
                429,
                f"expected conversations of at most {self._max_bytes} bytes of one tenant, got {num_bytes} and "
                f"{num_more} more; delete some",
                code="conversations_full",
                retry_after_s=1,
            )

    def add(self, tenant: ApiTenant, entry: ConversationEntry) -> ConversationEntry:
        self.check_room(tenant)
        self.check_bytes(tenant, entry.num_bytes)
        self._by_tenant.setdefault(tenant.name, {})[entry.id] = entry
        return entry

    def get(self, tenant: ApiTenant, name: str) -> ConversationEntry:
        """*raises:* ApiError 404: no such conversation, or another tenant's."""
        entry = self._by_tenant.get(tenant.name, {}).get(name)
        if entry is None:
            raise ApiError(404, "there is no such conversation", code="conversation_not_found")
        return entry

    def remove(self, tenant: ApiTenant, name: str) -> None:
        self.get(tenant, name).close()
        del self._by_tenant[tenant.name][name]

    def close(self) -> None:
        closed, self._by_tenant = self._by_tenant, {}
        for entries in list(closed.values()):
            for entry in list(entries.values()):
                entry.close()
