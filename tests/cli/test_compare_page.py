"""`quire compare --open`: its page over HTTP, in a real browser, and as a command."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.asgi_hosts import under_uvicorn
from support.browser import by_id, cells_of, check_texts_twice_as_large, set_width, start_browser
from support.until import until

from quire.cli.compare_page.comparison_app import comparison_app
from quire.config import STORAGES


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with under_uvicorn(comparison_app(STORAGES)) as url:
        yield url


@pytest.fixture
def begun(url: str) -> str:
    assert httpx.post(f"{url}/comparison", json={}).status_code == 200
    return url


def post(url: str, path: str, body: Any) -> dict[str, Any]:
    answer = httpx.post(f"{url}/comparison{path}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_comparison_over_http(url: str) -> None:
    state = post(url, "", {})
    assert [one["name"] for one in state["storages"]] == ["paged", "contiguous", "growing", "virtual"]
    post(url, "/requests", {"count": 20, "prompt_tokens": 60, "output_tokens": 30})
    state = post(url, "/step", {"steps": 10})
    by_name = {one["name"]: one for one in state["storages"]}
    assert by_name["contiguous"]["running"] == 8
    assert by_name["paged"]["running"] == 20
    assert by_name["contiguous"]["waste_share"] > 0.5 > by_name["paged"]["waste_share"]
    state = post(url, "/requests", {"count": 2, "prompt_tokens": 60, "output_tokens": 30})  # while it runs
    assert state["open"] == 22
    state = post(url, "/finish", {"request": 0})
    assert {one["done"] for one in state["storages"]} == {1}
    assert post(url, "/finish", {})["open"] == 0
    assert post(url, "", {})["steps"] == 0


@pytest.mark.parametrize(
    "body",
    [
        {"count": 65, "prompt_tokens": 1, "output_tokens": 1},
        {"prompt_tokens": 0, "output_tokens": 1},
        {"prompt_tokens": 10**9, "output_tokens": 1},
        {"prompt_tokens": 4, "output_tokens": 1, "shared_tokens": 5},
        {"prompt_tokens": 4, "output_tokens": 1, "tokens": 5},
        {},
    ],
)
def test_impossible_requests_are_refused(begun: str, body: dict[str, int]) -> None:
    answer = httpx.post(f"{begun}/comparison/requests", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert post(begun, "/step", {})["asked"] == 0


def test_the_settings_of_a_comparison(url: str) -> None:
    state = post(url, "", {"block_size": 64, "reservation": "exact"})
    assert (state["block_size"], state["reservation"]) == (64, "exact")
    for body in ({"block_size": 0}, {"block_size": 48}, {"reservation": "most"}):
        assert httpx.post(f"{url}/comparison", json=body).status_code == 400
    assert post(url, "/step", {})["block_size"] == 64


def test_a_step_needs_a_comparison() -> None:
    with under_uvicorn(comparison_app(["paged"])) as url:
        answer = httpx.post(f"{url}/comparison/step", json={})
        assert answer.status_code == 400
        assert "POST /comparison begins it" in answer.json()["error"]["message"]
        assert [one["name"] for one in post(url, "", {})["storages"]] == ["paged"]


def test_open_requests_are_bounded(begun: str) -> None:
    for _ in range(4):
        post(begun, "/requests", {"count": 64, "prompt_tokens": 9, "output_tokens": 9})
    answer = httpx.post(
        f"{begun}/comparison/requests", json={"count": 1, "prompt_tokens": 9, "output_tokens": 9}
    )
    assert (answer.status_code, post(begun, "/step", {})["asked"]) == (400, 256)


def test_calls_at_once_wait_for_each_other(begun: str) -> None:
    post(begun, "/requests", {"count": 8, "prompt_tokens": 40, "output_tokens": 40})
    threads = [threading.Thread(target=post, args=(begun, "/step", {"steps": 4})) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert post(begun, "/step", {"steps": 1})["steps"] == 33


def test_the_page_has_its_files_and_nothing_from_elsewhere(url: str) -> None:
    page = httpx.get(url)
    names = re.findall(r'(?:src|href)="([^"#]+)"', page.text)
    assert {"window/compare.js", "window/compare.css", "window/page.css"} <= set(names)
    scripts = {
        f"window/{name}"
        for name in re.findall(r'from "\./(.+?)"', httpx.get(f"{url}/window/compare.js").text)
    }
    assert "window/server.js" in scripts
    for name in {*names, *scripts}:
        answer = httpx.get(f"{url}/{name}")
        assert answer.status_code == 200, name
        assert answer.headers["content-security-policy"].startswith("default-src 'none'; script-src 'self';")
    assert httpx.get(f"{url}/window/comparison_app.py").status_code == 404


def test_other_sites_are_refused(begun: str) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "https://evil.example"}):
        for answer in (
            httpx.get(begun, headers=headers),
            httpx.post(f"{begun}/comparison/finish", json={}, headers=headers),
        ):
            assert answer.status_code == 403


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {shown}.part && mv {shown}.part {shown}\n')
    browser.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "quire", "compare", "--open", "--storages", "paged,contiguous"],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "BROWSER": str(browser)},
    )
    try:
        assert process.stderr is not None
        url = re.findall(r"http://127\.0\.0\.1:\d+", process.stderr.readline())[0]
        assert [one["name"] for one in post(url, "", {})["storages"]] == ["paged", "contiguous"]
        until(shown.exists)
        assert shown.read_text() == url
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()


# -- in a browser --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = start_browser()
    yield driver
    driver.quit()


@pytest.fixture
def page(browser: Any, url: str) -> Iterator[Any]:
    """The page once it runs; nothing in it may have failed when the test ends."""
    browser.get_log("browser")
    browser.get(url)
    until(lambda: len(browser.find_elements("css selector", ".storage")) == 4)
    yield browser
    errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    browser.get("about:blank")  # else it goes on stepping
    assert not errors


def row(page: Any, name: str) -> list[str]:
    return {cells[0]: cells[1:] for cells in cells_of(page, "#figures-table tbody")}.get(name, [])


@pytest.mark.ci
def test_storages_side_by_side(page: Any) -> None:
    until(lambda: row(page, "Running now")[:1] and int(row(page, "Running now")[0]) > 8)  # the demo load
    by_id(page, "finish").click()
    until(lambda: row(page, "Running now") == ["0", "0", "0", "0"])
    for _ in range(3):
        page.find_elements("css selector", "button[data-shared]")[0].click()

    until(lambda: row(page, "Running now")[1:2] == ["8"])
    until(lambda: int(row(page, "Running now")[0]) > 8)
    by_id(page, "run").click()
    assert by_id(page, "run").get_attribute("aria-pressed") == "false"
    waste = [float(text.split()[0]) for text in row(page, "Reserved and empty (internal)")]
    assert waste[1] > waste[0]
    page.find_elements("css selector", "button[data-prompt='600']")[0].click()
    until(lambda: row(page, "Refused: can never fit") == ["1", "1", "1", "1"])
    by_id(page, "finish").click()
    until(lambda: row(page, "Running now") == ["0", "0", "0", "0"])


@pytest.mark.ci
def test_own_requests_and_gaps_side_by_side(page: Any) -> None:
    assert by_id(page, "legend").value_of_css_property("list-style-type") == "none"
    assert "A block is" in by_id(page, "main").text
    page.find_element("css selector", "#reservation option[value=exact]").click()
    page.find_element("css selector", "#block-size option:first-child").click()
    until(lambda: "blocks of 1 token," in by_id(page, "storages").text)
    assert "gaps" in by_id(page, "storages").text
    until(lambda: row(page, "Free, but in gaps too small (external)")[1:2] not in ([], ["0 B"]))  # contiguous
    by_id(page, "own-output").clear()
    by_id(page, "own-output").send_keys("1")
    done = int(row(page, "Done")[0])
    page.find_element("css selector", "#own button").click()
    until(lambda: int(row(page, "Done")[0]) >= done + 4)


@pytest.mark.ci
def test_text_twice_as_large_lies_on_no_other(url: str) -> None:
    page = start_browser(font_size=32)
    try:
        for width in (1240, 620):
            set_width(page, width)
            page.get(url)
            until(lambda: cells_of(page, "#figures-table tbody"))
            check_texts_twice_as_large(page, width)
    finally:
        page.quit()
