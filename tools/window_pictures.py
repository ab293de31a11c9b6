"""Takes the pictures of `docs/window.md` and `docs/storages.md`: the live page of a server that three tenants use, and
the page of `quire compare --open`, in a headless Chromium.

    python tools/window_pictures.py [--to docs] [--looks DIR]

Needs chromium, chromedriver and selenium. --looks: also both pages in the other colours, with text twice as large and
on a narrow screen, for a human to look at; `tests/server/test_window_page.py` and `tests/cli/test_compare_page.py`
check the pages.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

TENANTS = ("support", "research", "batch")
CONFIG = "".join(f'[[tenants]]\nname = "{name}"\nkeys = ["key-of-{name}"]\n' for name in TENANTS)
CONFIG = f'[server]\nadmin_key = "key-of-the-admin"\n{CONFIG}'
SYSTEM = {
    name: f"# {name}: answers of this team are short, in plain words and checked.\n" * 3 for name in TENANTS
}
WIDTH = 1240


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--to", type=Path, default=Path(__file__).parent.parent / "docs")
    parser.add_argument("--looks", type=Path)
    arguments = parser.parse_args()
    with serving() as url, comparing() as comparison_url:
        with browser(1) as page:
            now(page, url)
            picture(page, arguments.to / "window-now.png")
            if arguments.looks:
                arguments.looks.mkdir(parents=True, exist_ok=True)
                colours(page, "dark")
                picture(page, arguments.looks / "now-dark.png")
            compare(page, comparison_url)
            colours(page, "dark")
            picture(page, arguments.to / "storages-side-by-side.png")
            if arguments.looks:
                colours(page, "light")
                picture(page, arguments.looks / "compare-light.png")
        if arguments.looks:
            with browser(2) as page:
                for name, shown, at in (("now", now, url), ("compare", compare, comparison_url)):
                    shown(page, at)
                    picture(page, arguments.looks / f"{name}-large-text.png")
                    picture(page, arguments.looks / f"{name}-large-text-narrow.png", 620)


@contextmanager
def serving() -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(CONFIG)
        file.flush()
        with running("serve", "--port", "0", "--kv-memory", "36MiB", "--config", file.name) as url:
            yield url


@contextmanager
def comparing() -> Iterator[str]:
    with running("compare", "--open") as url:
        yield url


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """The URL that a command prints, until the block ends."""
    command = [sys.executable, "-m", "quire", *arguments]
    environment = {**os.environ, "BROWSER": "true"}  # a program that shows nothing
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stderr is not None
        log = ""
        for line in process.stderr:
            log += line
            if found := re.search(r" on (http://\S+) ", line):
                yield found[1]
                return
        raise SystemExit(log)
    finally:
        process.terminate()
        process.wait(60)


def ask(url: str, tenant: str, question: str, max_tokens: int) -> None:
    body = {
        "prompt": SYSTEM[tenant] + question,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0.8,
    }
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer key-of-{tenant}"}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=120).read()


@contextmanager
def browser(text_size: float) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={WIDTH},1000")
    options.add_experimental_option("prefs", {"webkit.webprefs.default_font_size": round(16 * text_size)})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def now(page: Any, url: str) -> None:
    """The live page while six requests run and one typed into it, as the administrator sees it."""
    colours(page, "light")
    page.get(url)
    until(lambda: page.find_element(By.ID, "key-dialog").is_displayed())
    page.find_element(By.ID, "key").send_keys("key-of-the-admin" + Keys.ENTER)
    until(lambda: page.find_element(By.ID, "status").text == "live")
    for tenant in TENANTS:
        ask(url, tenant, "def first(", 24)
    asking = [
        threading.Thread(target=ask, args=(url, tenant, f"def {verb}_{tenant}(", 900))
        for tenant in TENANTS
        for verb in ("read", "write")
    ]
    for one in asking:
        one.start()
    page.find_element(By.CSS_SELECTOR, "input[value=tenant]").click()
    page.find_element(By.ID, "send").click()
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#sequences tr")) == 7)
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, "#tree tr")) >= 3)
    until(lambda: len(page.find_element(By.ID, "turns").text) > 200)


def compare(page: Any, url: str) -> None:
    """The storages side by side, half way through some requests of each kind."""
    page.get(url)
    until(lambda: len(page.find_elements(By.CSS_SELECTOR, ".storage")) == 4)
    buttons = [one for one in page.find_elements(By.CSS_SELECTOR, "button") if re.match(r"\d \w", one.text)]
    for one in [buttons[0], *buttons[1:2] * 3, *buttons[2:3] * 2]:
        one.click()
    until(lambda: int(page.find_element(By.ID, "steps").text.split(" ")[0]) >= 40)
    page.find_element(By.ID, "run").click()


def colours(page: Any, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def picture(page: Any, path: Path, width: int = WIDTH) -> None:
    """The whole page, at this width."""
    page.execute_cdp_cmd(
        "Emulation.setScrollbarsHidden", {"hidden": True}
    )  # else their width is missing at the right
    metrics = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
    page.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    time.sleep(0.7)  # two updates of the page
    taken = page.execute_cdp_cmd("Page.captureScreenshot", {"captureBeyondViewport": True})
    path.write_bytes(base64.b64decode(taken["data"]))
    page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def until(is_reached: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_reached():
        if time.monotonic() > end:
            raise SystemExit("the page did not reach the state for the picture")
        time.sleep(0.05)


if __name__ == "__main__":
    main()
