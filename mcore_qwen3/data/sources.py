"""What `--dataset` names -> data files: local files and folders, and data sets of a hub.

An entry is `[hf::|ms::]name[:subset][#N]`. A name that is a file or folder here is that; otherwise `owner/name` is a
data set of Hugging Face or ModelScope, downloaded by its own library and read from the Arrow files that it keeps.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mcore_qwen3.data.hubs import HUGGING_FACE, MODELSCOPE, NotOnAHubError, first_answer, hubs_to_ask
from mcore_qwen3.data.rows import SUFFIXES, DataFile
from mcore_qwen3.errors import DataError

LOCAL = "local"  # the origin of a file or folder here
INDEXED_SUFFIXES = (".bin", ".idx")
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_ENTRY = re.compile(r"(?:(?P<hub>hf|ms)::)?(?P<name>.+?)(?:#(?P<number>\d+))?", re.DOTALL)
_NOT_ROWS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")  # what libraries write
RULE = f"a dataset is a local file ({', '.join(SUFFIXES)}), a folder of them, or a hub's owner/name"


@dataclass(frozen=True, slots=True)
class Source:
    """One entry of `--dataset`: its files, and the number of rows that `#N` asks for. `origin` says where from."""

    name: str
    origin: str
    files: tuple[DataFile, ...]
    number: int | None

    @property
    def indexed(self) -> bool:
        """Whether it is a ready-made Megatron data set: `files` are its .bin and its .idx."""
        return self.files[0].path.suffix == INDEXED_SUFFIXES[0]


def find_sources(entries: Sequence[str], use_hf: bool | None = None) -> list[Source]:
    """The sources that `entries` name, in order; hub data sets are downloaded.

    Args:
        entries: as the user wrote them.
        use_hf: which hub an id without prefix is on; None: Hugging Face, then ModelScope.

    Raises:
        DataError: an entry names nothing that can be read.
    """
    return [_source(entry, use_hf) for entry in entries]


def check_entries(entries: Sequence[str]) -> list[str]:
    """What `entries` name, for people, without reading or downloading; raises DataError for what never can be read."""
    shown = []
    for entry in entries:
        _, name, _ = _parts(entry)
        files = _local_files(name)
        shown += [file.name for file in files] if files else [f"{entry} (on a hub, not looked at)"]
        if not files:
            _hub_name(entry, name)
    return shown


def _source(entry: str, use_hf: bool | None) -> Source:
    hub, name, number = _parts(entry)
    if hub is None and (files := _local_files(name)):
        return Source(name, LOCAL, tuple(files), number)
    identifier, subset = _hub_name(entry, name)
    hubs = (hub,) if hub else hubs_to_ask(use_hf)
    try:
        title, found = first_answer({one: partial(_LOADERS[one], identifier, subset) for one in hubs})
    except NotOnAHubError as error:
        raise DataError(
            f"{identifier} is a data set that can be downloaded, or a file or folder here",
            seen=error,
            fix="the name, the network, hf:: or ms:: before the name, or a downloaded copy",
        ) from None
    files = [DataFile(f"{identifier}/{path.name}", path) for path in found]
    return Source(name, title, tuple(files), number)


def _parts(entry: str) -> tuple[str | None, str, int | None]:
    """(hub or None, name with its subset, N or None); a name that is a file wins over its own `#N`."""
    if Path(entry).expanduser().exists():
        return None, entry, None
    match = _ENTRY.fullmatch(entry)
    if match is None:
        raise DataError(RULE, seen=repr(entry), fix="name a file")
    number = match["number"]
    if number is not None and int(number) == 0:
        raise DataError("#N takes at least one row", seen=entry, fix="a larger N, or leave the dataset out")
    return match["hub"], match["name"], None if number is None else int(number)


def _hub_name(entry: str, name: str) -> tuple[str, str | None]:
    identifier, _, subset = name.partition(":")
    if not _HUB_ID.fullmatch(identifier) or Path(identifier).suffix.lower() in (*SUFFIXES, *INDEXED_SUFFIXES):
        raise DataError(RULE, seen=f"no file {name}" if name == entry else entry, fix="correct the path")
    return identifier, subset or None


def _local_files(name: str) -> list[DataFile]:
    """The files of a local name; none when it does not exist here.

    Raises:
        DataError: it is there and cannot be read.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        files = _folder_files(name, path)
    elif path.is_file() and path.suffix.lower() in SUFFIXES:
        files = [DataFile(name, path)]
    elif all(_beside(path, suffix).is_file() for suffix in INDEXED_SUFFIXES):
        files = [DataFile(name + suffix, _beside(path, suffix)) for suffix in INDEXED_SUFFIXES]
    elif path.is_file():
        raise DataError(RULE, seen=f"{name} ends in {path.suffix!r}", fix="convert it, or rename it to what it is")
    else:
        return []
    for file in files:
        try:
            file.path.open("rb").close()
        except OSError as error:
            raise DataError(RULE + " that can be read", seen=error, fix="its permissions") from None
    return files


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _folder_files(name: str, folder: Path) -> list[DataFile]:
    """All data files below a folder, in the order of their paths; of a saved `datasets` folder its Arrow files."""
    paths = [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file()
        and path.suffix.lower() in SUFFIXES
        and path.name not in _NOT_ROWS
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    ]
    if not paths:
        seen = f"the folder {name} has no file that ends in {', '.join(SUFFIXES)}"
        raise DataError(RULE, seen=seen, fix="name another folder")
    return [DataFile(f"{name.rstrip('/')}/{path.relative_to(folder)}", path) for path in paths]


def _from_hugging_face(identifier: str, subset: str | None) -> list[Path]:
    import datasets

    return _arrow_files(datasets.load_dataset(identifier, subset, split="train"))


def _from_modelscope(identifier: str, subset: str | None) -> list[Path]:
    found = importlib.import_module("modelscope").MsDataset.load(
        identifier, subset_name=subset or "default", split="train"
    )
    return _arrow_files(found.to_hf_dataset() if hasattr(found, "to_hf_dataset") else found)


def _arrow_files(dataset: Any) -> list[Path]:
    """The Arrow files in which the `datasets` library keeps a data set."""
    files = [Path(entry["filename"]) for entry in dataset.cache_files]
    if not files:
        raise ValueError("the data set is not kept in files")
    return files


_LOADERS: dict[str, Callable[[str, str | None], list[Path]]] = {
    HUGGING_FACE: _from_hugging_face,
    MODELSCOPE: _from_modelscope,
}
