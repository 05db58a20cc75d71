"""Settings of `megatron data`, which prepares rows and shows them, and trains nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from mcore_qwen3.config.data import DataFlags, check_data
from mcore_qwen3.config.flags import flag
from mcore_qwen3.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerFlags:
    """Model: whose tokenizer and chat template."""

    load: str | None = flag(
        None, "checkpoint, a hub's OWNER/NAME, or a folder with tokenizer.json and the chat template alone"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class PurposeFlags:
    """Purpose: the run that the rows are for."""

    raw_text: bool = flag(False, "the rows are raw text for megatron pt; false: chat rows for megatron sft")
    global_batch_size: int = flag(16, "rows a step, to count steps an epoch", at_least=1)
    seed: int = flag(42, "seed of the rows that are sampled, interleaved or split off", at_least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ViewFlags:
    """View: what is shown and written."""

    show: int = flag(3, "samples to show, trained tokens in colour", at_least=0)
    show_ids: bool = flag(False, "show the token ids of those samples too")
    histogram: str | None = flag(None, "PNG file for the histogram of lengths; unset: lengths.png in --output")
    output: str | None = flag(None, "folder for the prepared data, for --data_cache_path of the training command")


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig:
    """Settings of `megatron data`."""

    model: TokenizerFlags = field(default_factory=TokenizerFlags)
    data: DataFlags = field(default_factory=DataFlags)
    purpose: PurposeFlags = field(default_factory=PurposeFlags)
    view: ViewFlags = field(default_factory=ViewFlags)


def check_inspect(config: InspectConfig) -> None:
    """Raise ConfigError for the first broken rule."""
    for name, given in (("load", config.model.load), ("dataset", config.data.dataset)):
        if not given:
            raise ConfigError(f"megatron data needs --{name}", fix=f"--{name}")
    if config.view.output and config.data.data_cache_path:
        raise ConfigError(
            "prepared data goes to one folder", seen="--output and --data_cache_path", fix="drop one of the two"
        )
    check_data(config.data, raw_text=config.purpose.raw_text)
