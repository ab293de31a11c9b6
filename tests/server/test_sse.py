"""The events written by hand are those that JSON's own writer writes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from quire.server.sse import ChoiceEvents

HEAD = {"id": "a-1", "object": "text", "created": 7, "model": 'm"\u00e9\\'}
TEXT = st.text(st.characters() | st.sampled_from('"\\\n\r\0\x1f\x7f\u2028\ud800%{}'))


@given(TEXT, st.integers(0, 2000))
def test_plain_pieces_of_text(text: str, index: int) -> None:
    write = ChoiceEvents(HEAD)
    common = {"logprobs": None, "finish_reason": None}
    assert write.text(index, text) == write.choice({"index": index, "text": text, **common})
    event = write.content(index, text)
    assert event == write.choice({"index": index, "delta": {"content": text}, **common})
    assert event.count(b"\n") == 2  # one line and its end
    assert json.loads(event[6:])["model"] == HEAD["model"]
