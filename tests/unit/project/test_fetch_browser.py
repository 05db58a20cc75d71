"""`make browser`: what is there is left alone, what is fetched is checked and whole, other machines are told."""

from __future__ import annotations

import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script

PROGRAM = b"#!/bin/sh\necho a browser\n"


@pytest.fixture
def fetch(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script as a module; it imports its neighbour."""
    monkeypatch.syspath_prepend(str(repo_root / "scripts"))
    return load_script(repo_root / "scripts" / "fetch_browser.py")


def brotli(content: bytes) -> bytes:
    script = "process.stdin.pipe(require('node:zlib').createBrotliCompress()).pipe(process.stdout)"
    return subprocess.run(["node", "-e", script], input=content, capture_output=True, check=True).stdout


def tar(files: dict[str, bytes], mode: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode=mode) as archive:  # type: ignore[call-overload]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return packed.getvalue()


@pytest.fixture
def package() -> bytes:
    """What npm would give, with a program of a line."""
    inner = {"al2023": {"lib/libnss3.so": b"library"}, "fonts": {"fonts/A.ttf": b"font"}}
    files = {f"package/bin/{name}.tar.br": brotli(tar(content, "w")) for name, content in inner.items()}
    return tar(files | {"package/bin/chromium.br": brotli(PROGRAM)}, "w:gz")


def test_what_is_fetched_is_whole_and_runs_and_is_fetched_once(
    fetch: ModuleType, package: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(fetch, "npm_pack", lambda name, sha256: asked.append(name) or package)
    monkeypatch.setattr(fetch, "CHROMIUM", {"chromium": hashlib.sha256(PROGRAM).hexdigest()})
    assert fetch.make_browser(tmp_path / "browser")
    found = {
        str(path.relative_to(tmp_path / "browser")) for path in (tmp_path / "browser").rglob("*") if path.is_file()
    }
    assert found == {"chromium", "lib/libnss3.so", "fonts/A.ttf"}
    assert subprocess.check_output([tmp_path / "browser" / "chromium"]) == b"a browser\n"
    assert not fetch.make_browser(tmp_path / "browser")
    assert asked == ["@sparticuz/chromium@153.0.0"]


def test_another_program_than_the_pinned_one_is_refused(
    fetch: ModuleType, package: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "npm_pack", lambda name, sha256: package)
    with pytest.raises(fetch.FetchError, match="chromium has sha256"):
        fetch.make_browser(tmp_path)
    assert not (tmp_path / "chromium").exists()


def test_no_node(fetch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(fetch.FetchError, match="node was not found"):
        fetch.unpacked(b"")


def test_a_machine_without_one_is_told(
    fetch: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(fetch, "make_browser", lambda root: pytest.fail("nothing may be fetched"))
    monkeypatch.setattr(sys, "argv", ["fetch_browser.py"])
    assert fetch.main() == 0
    assert "tests take one on PATH, or skip" in capsys.readouterr().out


def test_the_tests_fail_without_a_browser_where_one_can_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers import browser

    monkeypatch.setattr(browser.shutil, "which", lambda name: None)
    monkeypatch.setattr(browser.platform, "system", lambda: "Linux")
    monkeypatch.setattr(browser.platform, "machine", lambda: "x86_64")
    with pytest.raises(pytest.fail.Exception, match="run `make browser`"):
        browser.find_browser(tmp_path)
    monkeypatch.setattr(browser.platform, "machine", lambda: "arm64")
    with pytest.raises(pytest.skip.Exception, match="no Chromium or Chrome on PATH"):
        browser.find_browser(tmp_path)
    monkeypatch.setattr(browser.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert browser.find_browser(tmp_path) == (Path("/usr/bin/chromium"), {})
