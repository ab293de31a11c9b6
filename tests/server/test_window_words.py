"""The texts of the live page: states, evictions, branches and axes in words and numbers; and their accessibility."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, get_args

import pytest
from support.browser import by_id, cells_of, complete, type_into
from support.running_server import running
from support.until import until
from support.window_client import Generating, ask

from quire import LLM
from quire.cache.event_dispatcher import LOSS_REASONS
from quire.engine.prompt_explanation import Reason
from quire.scheduler.phase import Phase
from quire.server.settings import ServerSettings

pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By

pytestmark = pytest.mark.ci  # a browser takes seconds for each

WORDS = """
  const done = arguments[0];
  import('/window/words.js').then((words) => done({ phases: Object.keys(words.PHASES),
    losses: Object.keys(words.LOSSES), misses: Object.keys(words.MISSES), states: Object.keys(words.BLOCK_STATES) }));
"""
# (text, contrast) of all text that is seen, with the background that lies under it.
CONTRASTS = """
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const back = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = rgb(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const found = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const add = (text, element, ink) => {
    const [high, low] = [light(rgb(ink)), light(back(element))].sort((a, b) => b - a);
    found.push([text.trim().slice(0, 30), (high + 0.05) / (low + 0.05)]);
  };
  for (let node; (node = walker.nextNode());) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || !parent.checkVisibility()) continue;
    if (parent.closest('.skip, noscript, script, :disabled')) continue;
    const style = getComputedStyle(parent);
    add(node.textContent, parent, parent.closest('svg') ? style.fill : style.color);
  }
  for (const input of document.querySelectorAll('[placeholder]'))
    if (input.checkVisibility()) add(input.placeholder, input, getComputedStyle(input, '::placeholder').color);
  return found;
"""
# What reaches beyond the screen's right edge.
SIDEWAYS = """
  return [...document.querySelectorAll('body *')]
    .filter((one) => one.checkVisibility() && !one.closest('.hidden, .skip, svg'))
    .filter((one) => one.getBoundingClientRect().right > innerWidth + 0.5)
    .map((one) => one.outerHTML.slice(0, 80));
"""
# Whether the end of the text of an element is on the screen, and in no way hidden by the box around it.
SEEN = """
  const text = [...document.querySelectorAll(arguments[0])].pop();
  const range = document.createRange();
  range.selectNodeContents(text);
  const box = [...range.getClientRects()].pop(), frame = text.closest('.output').getBoundingClientRect();
  return Boolean(box) && box.top >= Math.max(0, frame.top) - 1 && box.bottom <= Math.min(innerHeight, frame.bottom) + 1
    && box.right <= innerWidth;
"""


def narrow(page: Any, width: int, height: int) -> None:
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True},
    )


def media(page: Any, name: str, value: str) -> None:
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": name, "value": value}]})


def test_every_code_of_the_engine_has_words(page: Any) -> None:
    page.set_script_timeout(60)
    words = page.execute_async_script(WORDS)
    assert set(words["phases"]) == set(get_args(Phase))
    assert set(words["losses"]) == set(LOSS_REASONS)
    assert set(words["misses"]) == set(get_args(Reason))
    assert set(words["states"]) == {"free", "cached", "held", "in_flight", "pinned"}
    page.find_element(By.XPATH, "//summary[.='What the states mean']").click()
    meanings = by_id(page, "phases").text
    for words in ("prefill", "decoding", "waiting for memory", "preempted, its tokens kept", "paused"):
        assert words in meanings
    assert "in use by a request" in by_id(page, "legend").text
    assert "_" not in by_id(page, "legend").text


def test_requests_say_what_they_do_and_wait_for(
    page: Any, url: str, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm.engine.scheduler, "max_num_seqs", 1)

    def states() -> list[str]:
        return [row[1] for row in cells_of(page, "#sequences") if len(row) == 8]

    with ThreadPoolExecutor(1) as others, Generating(url, "def first(argv):") as first:
        second = others.submit(ask, url, "/v1/completions", body={"prompt": "def second():", "max_tokens": 2})
        until(lambda: states() == ["decoding", "waiting for a place in the batch"])
        assert by_id(page, "sequences-count").text == "1 with blocks, 1 waiting"
        first.__exit__()
        assert second.result()[0] == 200
    until(lambda: "No sequence runs or waits." in by_id(page, "sequences").text)


def test_a_preempted_request_says_so(page: Any) -> None:
    page.set_script_timeout(60)
    one = {"phase": "memory", "preempted": True, "swapped": False, "computed": 0, "tokens": 9}
    told = page.execute_async_script(
        "const done = arguments[1];"
        "import('/window/words.js').then(({ phaseWords }) => done(arguments[0].map(phaseWords)))",
        [
            one,
            {**one, "phase": "turn"},
            {**one, "swapped": True},
            {**one, "phase": "prefill", "preempted": False, "computed": 4},
        ],
    )
    assert told == [
        "preempted, its tokens kept; waiting for memory",
        "preempted, its tokens kept",
        "preempted, its tokens kept in host memory; waiting for memory",
        "prefill, 4 of 9 tokens",
    ]


def test_evictions_say_why(browser: Any) -> None:
    with LLM(kv_memory="8MiB") as small, running(small, ServerSettings()) as (url, _):
        browser.get(url)
        try:
            until(lambda: by_id(browser, "evictions-count").text == "none since the start")
            for word in ("import", "class", "return", "while"):
                complete(url, f"{word} os\n" * 300)
            until(lambda: "because the pool was full" in by_id(browser, "evictions-count").text)
            row = until(lambda: [row for row in cells_of(browser, "#evictions") if len(row) == 7])[0]
            assert re.fullmatch(r"just now|[\d.,]+ (s|min) ago", row[0])
            assert row[1] == f"the pool of {small.num_blocks} blocks was full; the least recently used went"
            assert row[2] == "default"
            assert "os" in row[6]
            small.between_steps(lambda: small.engine.trim())
            until(lambda: "a request dropped it" in cells_of(browser, "#evictions")[0][1])
        finally:
            browser.get("about:blank")


def test_branches_are_named_by_where_they_differ(page: Any, url: str, llm: Any) -> None:
    llm.cache.reset()
    same = "# a module of the project, with a licence in its head and more to say before anything else\n"
    for name in ("alpha", "beta", "gamma"):
        complete(url, f"{same}import {name}\n" + f"x = {name}\n" * 8)
    rows = until(lambda: (rows := cells_of(page, "#tree")) and len(rows) >= 4 and rows)
    names = [row[0] for row in rows]
    assert names[0].startswith("# a module")
    assert len({name.lstrip("\u2514 \u2026")[:8] for name in names}) == len(names)
    assert not any("licence" in name for name in names[1:])
    for name in ("alpha", "beta", "gamma"):
        assert any(name in one for one in names[1:])


def test_each_chart_has_two_axes_with_numbers(page: Any, url: str) -> None:
    complete(url, "Something to be seen in the charts.")

    def axes() -> dict[str, tuple[str, list[str], list[str]]]:
        return page.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('.chart')].map((one) => [one.id,"
            " [one.querySelector('.unit').textContent, ...['y', 'x'].map((axis) =>"
            "  [...one.querySelectorAll(`.tick.${axis}`)].map((tick) => tick.textContent))]]))"
        )

    until(lambda: all(len(one[1]) > 1 and len(one[2]) > 1 for one in axes().values()))
    assert {name: one[0] for name, one in axes().items()} == {
        "chart-generated": "tokens/s",
        "chart-first": axes()["chart-first"][0],
        "chart-hits": "% of prompt tokens",
        "chart-memory": "MiB",
    }
    assert axes()["chart-first"][0] in ("ms", "s")
    for _, numbers, times in axes().values():
        values = [float(text.replace(",", "")) for text in numbers]
        assert values[0] == 0
        assert len({round(b - a, 6) for a, b in pairwise(values)}) == 1
        assert times[0] == "now"
        assert all(re.fullmatch(r"\u2212\d+ (s|min|h)", text) for text in times[1:])
    assert axes()["chart-hits"][1] == ["0", "25", "50", "75", "100"]
    assert not page.find_elements(By.CSS_SELECTOR, "canvas:not(#map)")
    labels = [one.get_attribute("aria-label") for one in page.find_elements(By.CSS_SELECTOR, ".chart svg")]
    assert all(re.search(r"\d", label) for label in labels)


@pytest.mark.parametrize("mode", ["chat", "completion"])
@pytest.mark.parametrize("height", [640, 800])
def test_on_a_phone_the_answer_is_seen_as_it_comes(
    page: Any, llm: Any, mode: str, height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step

    def slow_step() -> Any:
        time.sleep(0.02)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine._validator, "eos_token_ids", frozenset())
    text = {"chat": "#turns .turn:last-child .text", "completion": "#answer .text"}[mode]
    narrow(page, 400, height)
    try:
        by_id(page, f"tab-{mode}").click()
        type_into(page, "max-tokens", "120")
        page.execute_script("document.getElementById('p-temperature').value = 0")
        by_id(
            page, "send"
        ).click()  # the driver scrolls to the button, as a person has, and nobody after that
        for length in (1, 60, 120):
            until(
                lambda length=length: (
                    len(
                        page.execute_script(
                            "return document.querySelector(arguments[0])?.textContent ?? ''", text
                        )
                    )
                    >= length
                )
            )
            assert page.execute_script(SEEN, text)
        assert page.execute_script(SIDEWAYS) == []
        page.find_element(By.CSS_SELECTOR, "#parameters summary").click()
        for summary in page.find_elements(By.CSS_SELECTOR, "#sequences ~ summary, #map-section summary"):
            summary.click()
        until(lambda: by_id(page, "send").is_enabled())
        assert page.execute_script(SIDEWAYS) == []
        assert page.execute_script("return document.documentElement.scrollWidth") <= 400
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_what_is_under_it(page: Any, url: str, scheme: str) -> None:
    media(page, "prefers-color-scheme", scheme)
    try:
        for _ in range(2):
            complete(url, "Some content for the tables, long enough for a block of it. " + scheme)
        page.find_element(By.CSS_SELECTOR, "#parameters summary").click()
        type_into(page, "message", "Hello")
        by_id(page, "send").click()
        until(lambda: "prompt tokens" in by_id(page, "turns").text)
        until(lambda: page.find_elements(By.CSS_SELECTOR, "#tree tr button"))
        told = page.execute_script(CONTRASTS)
        assert len(told) > 60
        assert [one for one in told if one[1] < 4.5] == []
    finally:
        media(page, "prefers-color-scheme", "")


@pytest.mark.parametrize(("wish", "moves"), [("reduce", False), ("no-preference", True)])
def test_nothing_moves_for_those_who_wish_so(
    page: Any, llm: Any, wish: str, moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step

    def slow_step() -> Any:
        time.sleep(0.03)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine._validator, "eos_token_ids", frozenset())
    media(page, "prefers-reduced-motion", wish)
    try:
        type_into(page, "max-tokens", "1500")
        by_id(page, "send").click()
        until(lambda: by_id(page, "turns").text.count("\n") >= 3)
        assert page.execute_script("return document.getAnimations().length > 0") == moves
        by_id(page, "stop").click()
        until(lambda: by_id(page, "send").is_enabled())
    finally:
        media(page, "prefers-reduced-motion", "")
