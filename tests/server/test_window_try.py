"""Chat and completion of the live page: requests, reports, errors, and their streams."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from support.browser import ask_for_completion, by_id, type_into
from support.until import until
from support.window_client import ask

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

pytestmark = pytest.mark.ci  # a browser takes seconds for each

SYSTEM = "You review Python code. " * 8
RECORD = """
  window.sent = [];
  const real = window.fetch;
  window.fetch = (path, options) => {
    if (options?.body) window.sent.push([path, JSON.parse(options.body)]);
    return real(path, options);
  };
"""
# The next request to the API gets a stream of these pieces of bytes; each waits for `window.go()` but the first.
STREAM = """
  const pieces = arguments[0], wait = arguments[1], real = window.fetch;
  window.fetch = (path, options) => {
    if (!path.startsWith('/v1/')) return real(path, options);
    window.fetch = real;
    const encoder = new TextEncoder();
    return Promise.resolve(new Response(new ReadableStream({
      async start(controller) {
        for (const [i, piece] of pieces.entries()) {
          if (i && wait) await new Promise((resolve) => { window.go = resolve; });
          if (piece === null) controller.error(new TypeError('network error'));
          else controller.enqueue(encoder.encode(piece));
        }
        controller.close();
      }}), { headers: { 'Content-Type': 'text/event-stream' } }));
  };
"""
REFUSE = """
  const real = window.fetch, status = arguments[0];
  window.fetch = () => {
    window.fetch = real;
    const body = JSON.stringify({ error: { message: 'so it is' } });
    return Promise.resolve(new Response(body, { status, headers: { 'Retry-After': '3' } }));
  };
"""
READ = """
  const [pieces, done] = [arguments[0], arguments[1]];
  import('/window/server.js').then(async ({ readEvents }) => {
    const found = [];
    const encoder = new TextEncoder();
    const bytes = new ReadableStream({ start(controller) {
      for (const piece of pieces) controller.enqueue(encoder.encode(piece));
      controller.close();
    } });
    try { for await (const event of readEvents(bytes)) found.push(event); }
    catch (error) { found.push([error.message, error.type]); }
    done(found);
  });
"""


@pytest.fixture(autouse=True)
def one_script_at_a_time(browser: Any) -> None:
    browser.set_script_timeout(60)


def open_parameters(page: Any, **values: str) -> None:
    if by_id(page, "parameters").get_attribute("open") is None:
        page.find_element(By.CSS_SELECTOR, "#parameters summary").click()
    for name, value in values.items():
        type_into(page, f"p-{name}", value)


def turns(page: Any) -> list[dict[str, str]]:
    """What each turn of the chat shows."""
    return page.execute_script(
        "return [...document.querySelectorAll('#turns > li')].map(li => ({ who: li.querySelector('h3').textContent,"
        " text: li.querySelector('.text').textContent, meta: li.querySelector('.meta')?.textContent ?? '' }))"
    )


def say(page: Any, text: str) -> dict[str, str]:
    """A turn of the chat; the model's."""
    before = len(turns(page))
    type_into(page, "message", text)
    by_id(page, "send").click()
    until(lambda: len(turns(page)) == before + 2 and turns(page)[-1]["meta"])
    return turns(page)[-1]


def chunk(text: str = "", reason: str | None = None, **more: Any) -> str:
    choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": reason}
    return f"data: {json.dumps({'choices': [choice], **more})}\n\n"


def test_a_chat_by_the_models_template_tells_what_was_cached_of_each_turn(
    page: Any, url: str, llm: Any
) -> None:
    llm.cache.reset()
    page.execute_script(RECORD)
    open_parameters(
        page, system=SYSTEM, temperature="0", top_p="0.9", top_k="40", seed="7", repetition_penalty="1.1"
    )
    type_into(page, "max-tokens", "12")
    first = say(page, "What is a loop?")
    second = say(page, "And a function?")
    sent = [body for path, body in page.execute_script("return sent") if path == "/v1/chat/completions"]
    wanted = {
        "temperature": 0,
        "top_p": 0.9,
        "top_k": 40,
        "seed": 7,
        "repetition_penalty": 1.1,
        "max_tokens": 12,
    }
    assert [{name: body.get(name) for name in wanted} for body in sent] == [wanted] * 2
    assert sent[1]["stream_options"] == {"include_usage": True}
    assert sent[1]["messages"] == [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "What is a loop?"},
        {"role": "assistant", "content": first["text"]},
        {"role": "user", "content": "And a function?"},
    ]
    counts = [
        json.loads(ask(url, "/tokenize", body={"messages": body["messages"]})[2])["count"] for body in sent
    ]
    assert first["meta"].startswith(f"0 of {counts[0]} prompt tokens from the cache")
    cached = int(second["meta"].split(" of ")[0])
    assert second["meta"].startswith(f"{cached} of {counts[1]} prompt tokens from the cache")
    assert counts[0] <= cached < counts[1]
    assert "tokens/s" in second["meta"]
    assert "first token after" in second["meta"]
    by_id(page, "new-chat").click()
    assert turns(page) == []
    say(page, "Anew.")
    assert len(page.execute_script("return sent")[-1][1]["messages"]) == 2


def test_stop_strings_end_an_answer_and_are_named(page: Any) -> None:
    type_into(page, "max-tokens", "40")
    open_parameters(page, temperature="0")
    page.execute_script(RECORD)
    text = say(page, "Write a function.")["text"]
    stop = text[3:7]
    assert len(stop) == 4
    by_id(page, "new-chat").click()
    escaped = stop.replace("\\", "\\\\").replace("\n", "\\n").replace("\t", "\\t")
    page.execute_script("document.getElementById('p-stop').value = arguments[0]", f"never said 12\n{escaped}")
    told = say(page, "Write a function.")
    assert page.execute_script("return sent")[-1][1]["stop"] == ["never said 12", stop]
    assert told["text"] == text[: text.index(stop)]
    assert f"ended at the stop string {json.dumps(stop)}" in told["meta"]


def test_the_stop_button_ends_the_request_and_keeps_what_there_is(
    page: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step

    def slow_step() -> Any:  # so that it still runs when it is stopped
        time.sleep(0.03)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine._validator, "eos_token_ids", frozenset())
    type_into(page, "max-tokens", "1500")
    by_id(page, "send").click()
    until(lambda: turns(page) and len(turns(page)[-1]["text"]) > 10)
    assert not by_id(page, "send").is_enabled()
    by_id(page, "stop").send_keys(Keys.ENTER)
    until(lambda: by_id(page, "send").is_enabled())
    assert by_id(page, "try-status").text == "stopped"
    assert "stopped" in turns(page)[-1]["meta"]
    until(lambda: not llm.engine.scheduler.requests)
    said = turns(page)[-1]["text"]
    page.execute_script(RECORD)
    type_into(page, "max-tokens", "2")
    say(page, "Go on.")
    assert page.execute_script("return sent")[-1][1]["messages"][1]["content"] == said


def test_a_raw_completion_shows_the_prompt_and_what_was_cached(page: Any, llm: Any) -> None:
    llm.cache.reset()
    prompt = "import os\nimport sys\n\n\ndef parse_args(argv):"
    for cached in (False, True):
        page.execute_script("document.getElementById('completion-meta').textContent = ''")
        ask_for_completion(page, 4, prompt)
        until(lambda: "ended" in by_id(page, "completion-meta").text)
        count = len(llm.tokenizer(prompt)["input_ids"])
        assert f"{count - 1 if cached else 0} of {count} prompt tokens" in by_id(page, "completion-meta").text
    shown = by_id(page, "answer").get_attribute("textContent")
    assert shown.startswith(prompt)
    assert len(shown) > len(prompt)
    assert not by_id(page, "turns").is_displayed()


def test_a_model_without_a_template_says_so(page: Any, llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert by_id(page, "tab-chat").get_attribute("aria-selected") == "true"
    monkeypatch.setattr(llm.tokenizer, "chat_template", None)
    until(lambda: by_id(page, "tab-completion").get_attribute("aria-selected") == "true")
    assert not by_id(page, "no-template").is_displayed()
    by_id(page, "tab-chat").click()
    assert "no chat template" in by_id(page, "no-template").text


def test_the_tabs_with_the_keyboard(page: Any) -> None:
    by_id(page, "tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert page.switch_to.active_element.get_attribute("id") == "tab-completion"
    assert by_id(page, "prompt").is_displayed()
    assert not by_id(page, "message").is_displayed()
    assert by_id(page, "tab-chat").get_attribute("tabindex") == "-1"
    by_id(page, "tab-completion").send_keys(Keys.HOME)
    assert page.switch_to.active_element.get_attribute("id") == "tab-chat"
    type_into(page, "max-tokens", "2")
    by_id(page, "message").clear()
    by_id(page, "message").send_keys("one" + Keys.SHIFT + Keys.ENTER + Keys.NULL + "two" + Keys.ENTER)
    until(lambda: turns(page) and turns(page)[-1]["meta"])
    assert turns(page)[0]["text"] == "one\ntwo"


def test_errors_of_the_api_are_told_in_words(page: Any) -> None:
    open_parameters(page, temperature="9")
    type_into(page, "message", "Hello")
    by_id(page, "send").click()
    until(lambda: by_id(page, "try-status").text.startswith("The request was refused: "))
    assert "temperature" in by_id(page, "try-status").text
    assert turns(page) == []
    assert by_id(page, "message").get_attribute("value") == "Hello"  # nothing is lost
    page.get_log("browser")  # the refusal is in it
    answers = {
        401: "The server wants an API key",
        429: "The server has too much to do: so it is. Try again in 3 s.",
        503: "The server takes no requests now: so it is.",
    }
    for status, words in answers.items():
        page.execute_script(REFUSE, status)
        by_id(page, "send").click()
        until(lambda words=words: by_id(page, "try-status").text.startswith(words))
    page.execute_script(
        "const real = window.fetch;"
        "window.fetch = () => { window.fetch = real; return Promise.reject(new TypeError('Failed to fetch')); }"
    )
    by_id(page, "send").click()
    until(lambda: by_id(page, "try-status").text.startswith("There is no connection to the server"))


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (
            'data: {"error": {"message": "no memory", "type": "internal_error"}}\n\n',
            "The server failed: no memory.",
        ),
        (": bye\n\n", "The server failed: the connection ended before the answer did."),
        (None, "There is no connection to the server"),
    ],
)
def test_an_error_behind_some_tokens_keeps_them(page: Any, last: str | None, words: str) -> None:
    page.execute_script(STREAM, [": hello\n\n" + chunk("so "), chunk("far"), last], True)
    by_id(page, "send").click()
    for text in ("so ", "so far"):
        until(lambda text=text: turns(page) and turns(page)[-1]["text"] == text)
        until(lambda: page.execute_script("return Boolean(window.go)"))
        page.execute_script("const go = window.go; window.go = null; go()")
    until(lambda: by_id(page, "try-status").text.startswith(words))
    assert turns(page)[-1]["text"] == "so far"
    assert "broken off" in turns(page)[-1]["meta"]


@pytest.mark.parametrize("size", [1, 3, 7, 10_000])
def test_streams_are_read_whatever_their_pieces_are(page: Any, size: int) -> None:
    stream = (
        ': a comment\n\ndata: {"a": 1}\n\n: another\n: and more\nevent: message\nid: 4\ndata:{"b":\ndata: 2}\n\n'
        'data: {"c": "\u00e9\u20ac: x"}\r\n\r\n:\n\n\n\ndata: {"d": 4}\r\rdata: [DONE]\n\ndata: {"late": 1}\n\n'
    )
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert page.execute_async_script(READ, pieces) == [
        {"a": 1},
        {"b": 2},
        {"c": "\u00e9\u20ac: x"},
        {"d": 4},
        None,
    ]
    error = 'data: {"a": 1}\n\n: gap\n\nevent: error\ndata: {"error": {"message": "m", "type": "t"}}\n\n'
    pieces = [error[at : at + size] for at in range(0, len(error), size)]
    assert page.execute_async_script(READ, pieces) == [{"a": 1}, ["m", "t"]]
