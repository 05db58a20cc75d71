"""A model that the user names -> a directory on this machine: its own, or one that a hub's library keeps in its cache."""

from __future__ import annotations

import dataclasses
import importlib
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mcore_qwen3.data.hubs import HUGGING_FACE, MODELSCOPE, NotOnAHubError, first_answer, hubs_to_ask
from mcore_qwen3.errors import ConfigError

_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# What a conversion copies, and the index; of the weights this one format. Never code, pickles or subdirectories.
_SIDE_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.md", "LICENSE*"]
_WEIGHTS = ["*.safetensors"]
_SUBDIRECTORIES = ["*/*"]


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model and where it lies.

    Attributes:
        name: as the user wrote it.
        directory: on this machine.
        hub: title of the hub it was fetched from; None for a directory of the user's.
        use_hf: which hub the name is on; None: not said.
    """

    name: str
    directory: Path
    hub: str | None = None
    use_hf: bool | None = None

    @property
    def note(self) -> list[str]:
        """One line for the log where it came from a hub."""
        return [] if self.hub is None else [f"{self.name} is a model of {self.hub}, kept in {self.directory}"]

    def with_weights(self) -> NamedModel:
        """The same model with its weights fetched too, which may take long; a directory of the user's is as it is.

        Raises:
            ConfigError: the hub cannot be reached, or does not have it.
        """
        return self if self.hub is None else _fetched(self, [*_SIDE_FILES, *_WEIGHTS])


def find_model(name: str, use_hf: bool | None = None) -> NamedModel:
    """The directory of a model. Of a hub's model it holds config, tokenizer and index, but not yet the weights.

    Args:
        name: a path, which wins, or a hub's `owner/name`.
        use_hf: the hub of an id: True Hugging Face, False ModelScope, None one and then the other.

    Raises:
        ConfigError: there is no such path, and no hub has it or can be reached.
    """
    model = NamedModel(name, Path(name), use_hf=use_hf)
    if model.directory.exists() or not _HUB_ID.fullmatch(name):
        return model
    return _fetched(model, _SIDE_FILES)


def _fetched(model: NamedModel, patterns: list[str]) -> NamedModel:
    ask = {hub: partial(_DOWNLOADS[hub], model.name, patterns) for hub in hubs_to_ask(model.use_hf)}
    try:
        hub, directory = first_answer(ask)
    except NotOnAHubError as error:
        raise ConfigError(
            f"{model.name} is a directory on this machine, or a model that can be downloaded",
            seen=error,
            fix="the path, the name, the network, --use_hf, or a downloaded copy",
        ) from None
    return dataclasses.replace(model, directory=directory, hub=hub)


def _from_hugging_face(name: str, patterns: list[str]) -> Path:
    import huggingface_hub

    return Path(
        huggingface_hub.snapshot_download(name, allow_patterns=patterns, ignore_patterns=_SUBDIRECTORIES, max_workers=4)
    )


def _from_modelscope(name: str, patterns: list[str]) -> Path:
    download = importlib.import_module("modelscope").snapshot_download
    return Path(download(name, allow_patterns=patterns, ignore_patterns=_SUBDIRECTORIES))


_DOWNLOADS = {HUGGING_FACE: _from_hugging_face, MODELSCOPE: _from_modelscope}
