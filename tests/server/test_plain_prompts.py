"""Prompts of a model without a chat template: the plain form."""

from __future__ import annotations

from quire.server.messages import render
from quire.server.schemas.chat_bodies import ChatMessage
from quire.server.settings import ServerLimits


def plain(*messages: tuple[str, str]) -> str:
    return render(
        None, [ChatMessage(role=role, content=content) for role, content in messages], ServerLimits()
    )


def test_a_blank_that_an_answer_begins_with_is_the_one_behind_its_role() -> None:
    expected = "user: Hello\nassistant: Here.\nassistant:"
    assert plain(("user", "Hello"), ("assistant", " Here.")) == expected
    assert plain(("user", "Hello"), ("assistant", "Here.")) == expected


def test_an_answer_that_begins_with_a_line_end_keeps_it() -> None:
    assert plain(("assistant", "\nHere.")) == "assistant:\nHere.\nassistant:"


def test_a_question_is_written_as_it_is() -> None:
    assert plain(("user", " Hello")) == "user:  Hello\nassistant:"
