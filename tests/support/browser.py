"""The live page in a headless Chromium: started, read and typed into."""

from __future__ import annotations

import json
import shutil
import urllib.request
from typing import Any

import pytest

__all__ = [
    "ask_for_completion",
    "by_id",
    "cells_of",
    "check_texts_twice_as_large",
    "complete",
    "set_width",
    "start_browser",
    "type_into",
]


# Texts that lie on one another, as far as they can be seen: pairs of their beginnings.
_OVERLAPS = """
  const texts = [], walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node; (node = walker.nextNode());) {
    const parent = node.parentElement;
    if (!node.textContent.trim() || !parent.checkVisibility()) continue;
    if (parent.closest(".hidden, .skip, noscript, script")) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const { left, top, right, bottom } of range.getClientRects()) {
      const box = { left, top, right, bottom, node };
      for (let clip = parent; clip; clip = clip.parentElement) {
        if (getComputedStyle(clip).overflow === "visible") continue;
        const frame = clip.getBoundingClientRect();
        box.left = Math.max(box.left, frame.left); box.right = Math.min(box.right, frame.right);
        box.top = Math.max(box.top, frame.top); box.bottom = Math.min(box.bottom, frame.bottom);
      }
      if (box.right > box.left && box.bottom > box.top) texts.push(box);
    }
  }
  const found = [];
  for (let i = 0; i < texts.length; i++)
    for (let j = i + 1; j < texts.length; j++) {
      const [a, b] = [texts[i], texts[j]];
      if (a.node !== b.node && Math.min(a.right, b.right) - Math.max(a.left, b.left) > 2
          && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 4)
        found.push([a.node.textContent.slice(0, 40), b.node.textContent.slice(0, 40)]);
    }
  return found;"""


def start_browser(font_size: int = 16) -> Any:
    """A new one; skips the test where none is installed. font_size: of its settings, where 16 is the default."""
    webdriver = pytest.importorskip("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    names = ("chromium", "chromium-browser", "google-chrome")
    chromium = next((found for name in names if (found := shutil.which(name))), None)
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("chromium and its driver are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    # No sandbox: these tests also run as root, where Chromium's does not work. Only our own page is opened.
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument("--window-size=1300,1000")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    options.add_experimental_option("prefs", {"webkit.webprefs.default_font_size": font_size})
    return webdriver.Chrome(options=options, service=Service(driver))


def by_id(browser: Any, name: str) -> Any:
    return browser.find_element("id", name)


def cells_of(browser: Any, body: str) -> list[list[str]]:
    """The texts of a table's rows, read at one moment."""
    return browser.execute_script(
        "return [...document.querySelectorAll(arguments[0] + ' tr')].map(r => [...r.children].map(c => c.textContent))",
        body,
    )


def type_into(browser: Any, name: str, text: str) -> None:
    by_id(browser, name).clear()
    by_id(browser, name).send_keys(text)


def ask_for_completion(browser: Any, max_tokens: int, prompt: str | None = None) -> None:
    by_id(browser, "tab-completion").click()
    if prompt is not None:
        type_into(browser, "prompt", prompt)
    type_into(browser, "max-tokens", str(max_tokens))
    by_id(browser, "send").click()


def complete(url: str, prompt: str, **more: Any) -> None:
    body = json.dumps({"prompt": prompt, "max_tokens": 2, **more}).encode()
    request = urllib.request.Request(
        url + "/v1/completions", body, {"Content-Type": "application/json", **more.pop("headers", {})}
    )
    urllib.request.urlopen(request, timeout=60).read()


def set_width(browser: Any, width: int) -> None:
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )


def check_texts_twice_as_large(page: Any, width: int) -> None:
    """A page in a browser of `font_size=32`: no text lies on another, and it does not scroll sideways."""
    assert page.execute_script("return parseFloat(getComputedStyle(document.body).fontSize)") == 30
    assert page.execute_script(_OVERLAPS) == []
    assert page.execute_script("return document.documentElement.scrollWidth") <= width
