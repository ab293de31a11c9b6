"""The live page in a real browser: display, sound and keyboard."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.browser import (
    ask_for_completion,
    by_id,
    cells_of,
    check_texts_twice_as_large,
    complete,
    set_width,
    start_browser,
    type_into,
)
from support.running_server import running
from support.until import until

from quire import LLM
from quire.server.api_keys import ADMIN, ApiTenant, KeyRing, digest_of_key
from quire.server.settings import ServerSettings

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

pytestmark = pytest.mark.ci  # a browser takes seconds for each

HTML = "<img src=x onerror=\"document.title='owned'\"><b>bold</b><script>document.title='owned'</script>"


def pixel(browser: Any, cell_x: int, cell_y: int) -> list[int]:
    return browser.execute_script(
        "const m = document.getElementById('map'); const r = devicePixelRatio;"
        "return [...m.getContext('2d').getImageData(arguments[0] * r, arguments[1] * r, 1, 1).data];",
        cell_x,
        cell_y,
    )


def test_blocks_are_allocated_while_a_prompt_is_answered(
    page: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = llm.engine.step

    def slow_step() -> Any:  # a person could watch it
        time.sleep(0.03)
        return step()

    monkeypatch.setattr(llm.engine, "step", slow_step)
    monkeypatch.setattr(llm.engine._validator, "eos_token_ids", frozenset())
    llm.cache.reset()
    until(lambda: by_id(page, "legend").text.startswith("free") and "held 0" in by_id(page, "legend").text)
    free = pixel(page, 8, 8)
    ask_for_completion(page, 400)
    until(lambda: "in " in by_id(page, "try-status").text and "blocks:" in by_id(page, "try-status").text)
    assert by_id(page, "answer").text
    table = until(lambda: [row[7] for row in cells_of(page, "#sequences") if len(row) == 8])[0]
    assert int(table.split(",")[0].split("\u2013")[0]) == 0
    until(lambda: pixel(page, 8, 8) != free)
    blocks = [int(by_id(page, "try-status").text.split(" blocks")[0].split()[-1])]
    until(lambda: int(by_id(page, "try-status").text.split(" blocks")[0].split()[-1]) > blocks[0])
    by_id(page, "stop").click()
    until(lambda: by_id(page, "try-status").text == "stopped")
    until(lambda: "held 0" in by_id(page, "legend").text)  # given back
    assert "tokens/s" in by_id(page, "figures").text


def test_a_prompt_with_markup_is_shown_as_text(page: Any, url: str, llm: Any) -> None:
    llm.cache.reset()
    ask_for_completion(page, 3, HTML)
    until(lambda: "ended" in by_id(page, "completion-meta").text)
    by_id(page, "find-block").send_keys("1")
    page.find_element(By.CSS_SELECTOR, "#find button").click()
    until(lambda: by_id(page, "details").is_displayed())
    shown = page.find_element(By.CSS_SELECTOR, "#details .tokens").get_attribute("textContent")
    assert shown.startswith(HTML[:30])
    assert not page.find_elements(
        By.CSS_SELECTOR, "#details img, #details b, #details script, #answer :not(span)"
    )
    assert page.title == "Quire: what the cache does now"


def test_with_the_keyboard(page: Any, url: str, llm: Any) -> None:
    llm.cache.reset()
    complete(url, "Some content to look at with a keyboard, a few blocks of it.")
    until(lambda: "cached 0" not in by_id(page, "legend").text)
    by_id(page, "map").send_keys(Keys.ARROW_RIGHT)
    until(lambda: by_id(page, "announce").get_attribute("textContent").startswith("block 0, cached"))
    by_id(page, "map").send_keys(Keys.ARROW_RIGHT)
    until(lambda: by_id(page, "announce").get_attribute("textContent").startswith("block 1, cached"))
    assert "of default" in by_id(page, "announce").get_attribute("textContent")
    by_id(page, "map").send_keys(Keys.ENTER)
    until(lambda: by_id(page, "details-title").text == "Block 1")
    assert page.switch_to.active_element.get_attribute("id") == "details"
    assert "cached" in by_id(page, "details-body").text
    by_id(page, "details-close").send_keys(Keys.ENTER)
    assert not by_id(page, "details").is_displayed()
    assert page.switch_to.active_element.get_attribute("id") == "map"


def test_the_map_as_a_table_says_what_the_cache_counts(page: Any, url: str, llm: Any) -> None:
    llm.cache.reset()
    complete(url, "Counted in a table for those who do not see the map.")
    page.find_element(By.CSS_SELECTOR, "#map-section summary").click()
    pin = llm.pins.add("Counted in a table for those who do not see the map.", compute=False)
    stats = llm.cache.stats()
    wanted = {name.replace("_", " "): str(stats[name]) for name in ("cached", "held", "in_flight", "pinned")}

    def told() -> dict[str, str]:
        return {row[0]: row[1] for row in cells_of(page, "#map-table")}

    until(lambda: wanted.items() <= told().items())
    assert told()["tenant default"] == str(stats["cached"] + stats["pinned"])
    assert wanted["pinned"] != "0"
    llm.pins.remove(pin)


def test_the_prefix_tree_leads_to_tokens(page: Any, url: str, llm: Any) -> None:
    llm.cache.reset()
    complete(url, "A common beginning that several prompts share, one block and more. First.")
    complete(url, "A common beginning that several prompts share, one block and more. Second, other.")
    rows = until(
        lambda: len(found := page.find_elements(By.CSS_SELECTOR, "#tree tr button")) >= 3 and found, 30
    )
    names = [button.text for button in rows]
    assert names[0].startswith("A common")
    assert not any("node" in name for name in names)  # partial blocks have words too
    rows[0].click()
    until(lambda: by_id(page, "details").is_displayed())
    shown = page.find_element(By.CSS_SELECTOR, "#details .tokens").get_attribute("textContent")
    assert shown.startswith("A common beginning")


def test_a_sessions_turns_are_bars_that_say_why(page: Any, url: str, llm: Any) -> None:
    llm.cache.reset()
    said = "<b>A task</b> with a beginning that is kept, one block of it and more of it."
    for text in (said, said + " Then a second turn.", said.replace("more", "less")):
        complete(url, text, session_id="task <i>17</i>")

    def heights(bar: Any) -> list[float]:
        return page.execute_script(
            "return [...arguments[0].children].map((part) => parseFloat(part.style.height))", bar
        )

    def bars() -> list[Any]:
        return page.find_elements(By.CSS_SELECTOR, "#sessions .turn")

    first, second, third = until(lambda: len(found := bars()) == 3 and found)
    computed, prepared, hit = heights(second)
    assert (round(computed + hit), prepared) == (100, 0)
    assert 0 < computed < hit
    assert heights(first)[1:] == [0, 0]
    assert cells_of(page, "#sessions")[0][:2] == ["task <i>17</i>", "default"]
    page.execute_script("arguments[0].scrollIntoView()", third)
    webdriver.ActionChains(page).move_to_element(third).perform()
    about = by_id(page, "turn-about").text
    assert about.startswith("task <i>17</i>: Turn 3, ")
    assert "The cached prompt differs from here on: behind" in about
    assert "less" in about
    third.send_keys(Keys.HOME)
    assert "Turn 1" in page.switch_to.active_element.get_attribute("aria-label")
    assert "was never computed before" in by_id(page, "turn-about").text
    assert not page.find_elements(By.CSS_SELECTOR, "#sessions-section b, #sessions th i")


def test_the_map_by_time_unused(page: Any, url: str, llm: Any) -> None:
    llm.cache.reset()
    complete(url, "Some content that nobody asks for again, long enough for a block of it.")
    page.find_element(By.CSS_SELECTOR, "input[value=idle]").click()
    assert "unused for less than 10 s" in by_id(page, "legend").text
    by_id(page, "map").send_keys(Keys.HOME)

    def told() -> str:
        by_id(page, "map").send_keys(Keys.HOME)
        return by_id(page, "announce").get_attribute("textContent")

    until(lambda: "unused for less than" in told())
    assert "16 consecutive tokens" in by_id(page, "block-is").text


def test_figures_of_states_where_the_model_keeps_some(
    page: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def told() -> dict[str, str]:
        return page.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('#figures dl')]"
            ".map(one => [...one.children].slice(0, 2).map(part => part.textContent)))"
        )

    assert not any("tates" in name for name in told())
    stats = llm.cache.stats
    counts = {
        "state_slots": 1200, "free_state_slots": 100, "checkpoints": 95, "evicted_checkpoints": 7, "short_hits": 6,
        "slots_from_blocks": 5, "slots_to_blocks": 4,
    }  # fmt: skip
    monkeypatch.setattr(llm.cache, "stats", lambda: {**stats(), **counts})
    until(lambda: "Hits cut short" in told())
    assert {
        "States of sequences": "1,005 of 1,200",
        "Checkpoints of states": "95 7 evicted",
        "Hits cut short": "6 for lack of a state",
        "States made of blocks": "5 4 became blocks",
    }.items() <= told().items()
    counts["short_hits"] = 8
    until(lambda: told()["Hits cut short"].startswith("8 "))
    monkeypatch.undo()
    until(lambda: not any("tates" in name for name in told()))  # another model, as far as the page knows


def test_figures_of_drafts_where_the_engine_has_some(
    page: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shown() -> dict[str, str]:
        return page.execute_script(
            "return Object.fromEntries([...document.querySelectorAll('#figures dl')]"
            ".map(one => [...one.children].slice(0, 2).map(part => part.textContent)))"
        )

    stats = llm.cache.stats
    counts: dict[str, Any] = dict.fromkeys(("num_drafts", "num_draft_tokens", "num_accepted_tokens"), 0)
    counts["num_accepted_by_position"] = [0, 0, 0]
    monkeypatch.setattr(llm.cache, "stats", lambda: {**stats(), **counts})
    until(lambda: shown().get("Tokens a step", "").startswith("\u2013"))
    counts |= {"num_drafts": 40, "num_draft_tokens": 100, "num_accepted_tokens": 50}
    counts["num_accepted_by_position"] = [30, 15, 5]
    until(lambda: shown()["Drafts accepted"].startswith("50"))
    assert {
        "Drafts accepted": "50 % of 100",
        "Tokens a step": "2.25 with drafts, of a sequence",
        "Accepted by place": "75 % then 38, 13 %",
    }.items() <= shown().items()
    monkeypatch.undo()
    until(lambda: "Tokens a step" not in shown())


def test_landmarks_names_and_languages(page: Any) -> None:
    assert page.find_element(By.TAG_NAME, "html").get_attribute("lang") == "en"
    for name in ("header", "main", "h1"):
        assert len(page.find_elements(By.TAG_NAME, name)) == 1, name
    nameless = page.execute_script(
        "return [...document.querySelectorAll('input, textarea, canvas:not([aria-hidden]), section, button, nav')]"
        ".filter(e => !(e.labels?.length || e.textContent.trim() || e.getAttribute('aria-label')"
        "  || (e.getAttribute('aria-labelledby') && document.getElementById(e.getAttribute('aria-labelledby')))))"
        ".map(e => e.outerHTML.slice(0, 80));"
    )
    assert nameless == []
    assert by_id(page, "announce").get_attribute("aria-live") == "polite"
    assert by_id(page, "status").get_attribute("role") == "status"


def test_light_and_dark(page: Any) -> None:
    def background(scheme: str) -> list[float]:
        page.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        colour = page.execute_script(
            "return [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        return [sum(int(c) for c in text.split("(")[1].rstrip(")").split(",")[:3]) for text in colour]

    (light_back, light_text), (dark_back, dark_text) = background("light"), background("dark")
    assert light_back > 600 > 200 > light_text
    assert dark_back < 200 < 600 < dark_text


def test_a_narrow_screen_does_not_scroll_sideways(page: Any) -> None:
    metrics = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        assert page.execute_script("return document.documentElement.scrollWidth") <= 360
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


@pytest.fixture(scope="module")
def large_text_browser() -> Iterator[Any]:
    driver = start_browser(font_size=32)
    yield driver
    driver.quit()


@pytest.mark.parametrize("width", [1240, 620])
def test_text_twice_as_large_lies_on_no_other(
    large_text_browser: Any, url: str, llm: Any, width: int
) -> None:
    page = large_text_browser
    llm.cache.reset()
    complete(url, "A common beginning that several prompts share, one block and more. First.")
    set_width(page, width)
    page.get(url)
    try:
        until(lambda: page.find_elements(By.CSS_SELECTOR, "#tree tr button"))
        check_texts_twice_as_large(page, width)
    finally:
        page.get("about:blank")


def test_keys_are_asked_for_and_nothing_is_told_to_a_tenant(browser: Any, serve: Any, llm: Any) -> None:
    alice, boss = "key-of-alice-11", "key-of-the-boss-22"
    keys = KeyRing([(digest_of_key(alice), ApiTenant("alice-name")), (digest_of_key(boss), ADMIN)])
    with serve(ServerSettings(keys=keys)) as (url, _):
        browser.get(url)
        until(lambda: by_id(browser, "key-dialog").is_displayed())
        try:
            by_id(browser, "key").send_keys(alice + Keys.ENTER)
            until(lambda: by_id(browser, "status").text == "live")
            assert by_id(browser, "no-admin").is_displayed()
            assert not by_id(browser, "sequences").is_displayed()
            type_into(browser, "max-tokens", "3")
            by_id(browser, "send").send_keys(Keys.ENTER)
            until(lambda: "ended" in by_id(browser, "turns").text)  # a tenant may send prompts
            assert "alice-name" not in browser.page_source
            assert alice not in browser.page_source

            by_id(browser, "key-button").click()
            by_id(browser, "key").send_keys(boss + Keys.ENTER)
            until(lambda: by_id(browser, "tree").is_displayed())
            until(lambda: "alice-name" in by_id(browser, "tree").text)
            assert boss not in browser.page_source
            stored = browser.execute_script(
                "return localStorage.length + sessionStorage.length + document.cookie.length"
            )
            assert stored == 0
        finally:
            browser.get("about:blank")


@pytest.mark.parametrize("storage", ["contiguous", "growing"])
def test_a_storage_of_rows_can_be_clicked_too(browser: Any, storage: str) -> None:
    with LLM(kv_memory="16MiB", storage=storage) as llm, running(llm, ServerSettings()) as (url, _):
        step = llm.engine.step

        def slow_step() -> Any:  # so that it still runs when it is clicked
            time.sleep(0.03)
            return step()

        llm.engine.step = slow_step  # type: ignore[method-assign]
        browser.get_log("browser")
        browser.get(url)
        try:
            until(lambda: by_id(browser, "status").text == "live")
            kind = llm.cache.block_name
            until(lambda: by_id(browser, "map-title").text == f"{kind.capitalize()}s")
            ask_for_completion(browser, 1500)
            until(lambda: f"{kind}s: 0" in by_id(browser, "try-status").text)
            by_id(browser, "map").send_keys(Keys.HOME + Keys.ENTER)
            until(lambda: by_id(browser, "details").is_displayed())
            facts = by_id(browser, "details").text
            assert by_id(browser, "details-title").text.startswith(kind.capitalize())
            assert "held" in facts
            assert "(default)" in facts
            assert f"{kind}s 0" in facts
            tokens = browser.find_element(By.CSS_SELECTOR, "#details .tokens")
            assert tokens.get_attribute("textContent").startswith("def")
            assert "shares no prefixes" in by_id(browser, "tree").text
            by_id(browser, "stop").click()
            errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
            assert not errors
        finally:
            browser.get("about:blank")
