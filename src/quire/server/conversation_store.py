"""The conversations of a server: whose each is, and how it stands. They hold tokens, and blocks only during a turn.

Invariants
    C1  a conversation is found by its tenant and by nobody else; a tenant has at most `most`, and begins nothing that
        would make its conversations larger than `most_bytes` together. What the model adds is counted when it is there.
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

__all__ = ["ConversationEntry", "Conversations", "kept_bytes"]

_BYTES_OF_TOKEN = 4
_BYTES_OF_OBJECT = (
    2048  # a conversation, a message, a part, a call of a tool: what Python takes for one, rounded up
)


def kept_bytes(messages: Sequence[ChatMessage], num_tokens: int) -> int:
    """What a conversation takes that holds these, roughly and not too little."""
    num_objects = 1 + len(messages) + sum(len(message.tool_calls or ()) for message in messages)
    num_objects += sum(len(message.content) for message in messages if isinstance(message.content, list))
    num_bytes = sum(len(message.model_dump_json()) for message in messages)
    return _BYTES_OF_OBJECT * num_objects + num_bytes + _BYTES_OF_TOKEN * num_tokens


class ConversationEntry:
    """One of them. first: messages that stand before those of the first turn; starts: where turns begin, in tokens."""

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
        self.first = tuple(map(without_accepted, first))  # what a template is given
        self._first_bytes = kept_bytes(self.first, 0)
        self.starts = list(starts)
        self._turn: AsyncConversation | None = None

    @property
    def num_bytes(self) -> int:
        """Of memory, roughly."""
        return self._first_bytes + _BYTES_OF_TOKEN * len(self.state) + 8 * len(self.starts)

    def begin(self, base: AsyncConversation, turn: AsyncConversation) -> None:
        """`turn`, a fork of `base` with something appended, is being answered. *raises:* ApiError 409."""
        self.require_rest()
        if self.state is not base:
            raise ApiError(409, "the conversation has changed since this turn was asked for", code="conflict")
        self._turn = turn

    def end(self, turn: AsyncConversation, is_kept: bool) -> None:
        """Of that turn; twice does nothing."""
        if self._turn is not turn:
            return
        self._turn = None
        if is_kept:
            self.starts.append(len(self.state))
            self.state = turn

    def require_rest(self) -> None:
        if self._turn is not None:
            raise ApiError(
                409, "the conversation is being answered: wait for the end, or fork it", code="conflict"
            )

    def fork(self) -> ConversationEntry:
        """Another one, the same so far; during a turn, with what there is of the answer."""
        state, starts = self.state, list(self.starts)
        if self._turn is not None:
            starts.append(len(state))
            state = self._turn
        return ConversationEntry(state.fork(), self.cache_salt, self.first, starts)

    def close(self) -> None:
        """Ends a turn under way."""
        for one in (self._turn, self.state):
            if one is not None:
                one.close()


class Conversations:
    """By tenant and id. most, most_bytes: of one tenant."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._of: dict[str, dict[str, ConversationEntry]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    def of(self, tenant: ApiTenant) -> list[ConversationEntry]:
        return list(self._of.get(tenant.name, {}).values())

    def check_room(self, tenant: ApiTenant) -> None:
        if len(self._of.get(tenant.name, ())) >= self._most:
            raise ApiError(
                429,
                f"at most {self._most} conversations of one tenant; delete some",
                code="too_many_conversations",
                retry_after_s=1,
            )

    def check_bytes(self, tenant: ApiTenant, more: int) -> None:
        """*raises:* ApiError 429: the tenant's conversations would take more memory than they may."""
        num_bytes = sum(talk.num_bytes for talk in self._of.get(tenant.name, {}).values())
        if num_bytes + more > self._most_bytes:
            raise ApiError(
                429,
                f"expected conversations of at most {self._most_bytes} bytes of one tenant, got {num_bytes} and {more} "
                "more; delete some",
                code="conversations_full",
                retry_after_s=1,
            )

    def add(self, tenant: ApiTenant, talk: ConversationEntry) -> ConversationEntry:
        self.check_room(tenant)
        self.check_bytes(tenant, talk.num_bytes)
        self._of.setdefault(tenant.name, {})[talk.id] = talk
        return talk

    def get(self, tenant: ApiTenant, name: str) -> ConversationEntry:
        """*raises:* ApiError 404 for what is not there, or another's."""
        talk = self._of.get(tenant.name, {}).get(name)
        if talk is None:
            raise ApiError(404, "there is no such conversation", code="conversation_not_found")
        return talk

    def remove(self, tenant: ApiTenant, name: str) -> None:
        self.get(tenant, name).close()
        del self._of[tenant.name][name]

    def close(self) -> None:
        for talks in self._of.values():
            for talk in talks.values():
                talk.close()
        self._of.clear()
