"""A headless Chromium for pages: the one that `make browser` fetches, or one on PATH."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

# It runs without a GPU, and as root in a container: its pages are this project's own files.
_ARGUMENTS = ["--no-sandbox", "--use-gl=disabled"]
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser(root: Path) -> tuple[Path, dict[str, str]]:
    """(the program, its environment); where `make browser` has one for this machine, its absence is a failure."""
    fetched = root / ".browser" / "chromium"
    if fetched.is_file():
        libraries = os.pathsep.join(filter(None, [os.environ.get("LD_LIBRARY_PATH"), str(fetched.parent / "lib")]))
        return fetched, {"LD_LIBRARY_PATH": libraries, "FONTCONFIG_FILE": str(_fonts(fetched.parent))}
    installed = next((path for name in _NAMES if (path := shutil.which(name))), None)
    if installed:
        return Path(installed), {}
    if (platform.system(), platform.machine()) == ("Linux", "x86_64"):
        pytest.fail("no browser: run `make browser`")
    pytest.skip(f"no Chromium or Chrome on PATH, and `make browser` has none for {platform.system()}")


def _fonts(folder: Path) -> Path:
    """The fetched typeface and the system's own, so that text looks alike on a bare machine."""
    file = folder / "fonts-here.conf"
    places = "".join(f"<dir>{place}</dir>" for place in (folder / "fonts", "/usr/share/fonts"))
    file.write_text(
        f"<?xml version='1.0'?><fontconfig>{places}<cachedir>{folder / 'fonts-cache'}</cachedir></fontconfig>"
    )
    return file


@contextmanager
def started(root: Path) -> Iterator[Any]:
    """The browser."""
    from playwright.sync_api import sync_playwright

    program, environment = find_browser(root)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program, args=_ARGUMENTS, env={**os.environ, **environment}
        )
        yield browser
        browser.close()


def opened(browser: Any, page: Path, **options: Any) -> tuple[Any, list[str]]:
    """(the page, what goes wrong in it: messages of the console, errors, dialogs, requests to elsewhere)."""
    wrong: list[str] = []
    shown = browser.new_page(viewport={"width": 1280, "height": 900}, **options)
    shown.on("console", lambda message: wrong.append(f"{message.type}: {message.text}"))
    shown.on("pageerror", lambda error: wrong.append(f"error: {error}"))
    shown.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
    shown.on("request", lambda asked: None if asked.url == page.as_uri() else wrong.append(f"request: {asked.url}"))
    shown.goto(page.as_uri())
    return shown, wrong
