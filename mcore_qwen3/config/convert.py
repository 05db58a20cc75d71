"""Settings of the conversions and of the comparison."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from mcore_qwen3.config.flags import flag
from mcore_qwen3.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(B|KB|MB|GB|TB|)", re.IGNORECASE)
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceFlags:
    """Places: what is read and what is written."""

    src: str | None = flag(
        None, "what to read: a directory, or (hf2mcore) a hub's OWNER/NAME; the first word without a flag"
    )
    dst: str | None = flag(None, "directory to write; the second word without a flag")
    overwrite: bool = flag(False, "put the result in place of a directory that exists")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceFlags:
    """Reference: the files beside the weights, for a checkpoint without hf/."""

    hf_config: str | None = flag(
        None, "directory, or a hub's OWNER/NAME, with config.json and the tokenizer; unset: the checkpoint's own hf/"
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class HubFlags:
    """Hub: where a model comes from that is named as OWNER/NAME and is no directory here."""

    use_hf: bool | None = flag(None, "true Hugging Face, false ModelScope; unset: one, then the other")


@dataclass(frozen=True, kw_only=True, slots=True)
class FormFlags:
    """Form: how the weights are written."""

    dtype: str = flag(
        "keep",
        "dtype of the weights; keep: as they are (to mcore), or as config.json says (to Hugging Face)",
        choices=("keep", "bf16", "fp16", "fp32"),
    )
    router_dtype: str = flag(
        "keep",
        "the router's: keep leaves it in fp32 where the source holds fp32, whatever --dtype says; same follows --dtype",
        choices=("keep", "same"),
    )
    vocab_size: int | None = flag(
        None, "rows of embedding and output layer; to mcore: padded with zeros; to Hugging Face: cut", at_least=1
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFlags:
    """Shards: the files of the result."""

    max_shard_size: str = flag("5GB", "most bytes of tensors in one file, such as 5GB or 500MB (powers of ten)")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkFlags:
    """Work: how it is done. NNODES and NODE_RANK split it over nodes that share the disk."""

    workers: int = flag(1, "processes on this node, each writing files of its own", at_least=1)
    check_finite: bool = flag(False, "stop at the first weight that is infinite or no number")
    dry_run: bool = flag(False, "print the whole plan, from config.json and the index alone, and stop")


@dataclass(frozen=True, kw_only=True, slots=True)
class CompareFlags:
    """Compare: two checkpoints, each in either format."""

    a: str | None = flag(None, "first checkpoint: a directory or a hub's OWNER/NAME; the first word without a flag")
    b: str | None = flag(None, "second checkpoint, likewise; the second word without a flag")
    logits: bool = flag(False, "also run A by this project's model and B by transformers, both in fp32, and compare")
    max_logit_difference: float = flag(1e-3, "with --logits: the largest difference that passes", at_least=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hf2McoreConfig:
    """Settings of `convert hf2mcore`."""

    place: PlaceFlags = field(default_factory=PlaceFlags)
    hub: HubFlags = field(default_factory=HubFlags)
    form: FormFlags = field(default_factory=FormFlags)
    work: WorkFlags = field(default_factory=WorkFlags)


@dataclass(frozen=True, kw_only=True, slots=True)
class Mcore2HfConfig:
    """Settings of `convert mcore2hf` and `megatron export`."""

    place: PlaceFlags = field(default_factory=PlaceFlags)
    reference: ReferenceFlags = field(default_factory=ReferenceFlags)
    hub: HubFlags = field(default_factory=HubFlags)
    form: FormFlags = field(default_factory=FormFlags)
    shards: ShardFlags = field(default_factory=ShardFlags)
    work: WorkFlags = field(default_factory=WorkFlags)


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyConfig:
    """Settings of `convert verify`."""

    compare: CompareFlags = field(default_factory=CompareFlags)
    reference: ReferenceFlags = field(default_factory=ReferenceFlags)
    hub: HubFlags = field(default_factory=HubFlags)


def check_conversion(config: Hf2McoreConfig | Mcore2HfConfig) -> None:
    """Raise ConfigError where a place is missing or a size cannot be read."""
    if not config.place.src or not (config.place.dst or config.work.dry_run):
        raise ConfigError(
            "a conversion needs the directory to read and the one to write",
            seen=f"SRC {config.place.src}, DST {config.place.dst}",
            fix="write SRC DST",
        )
    if isinstance(config, Mcore2HfConfig):
        shard_bytes(config.shards.max_shard_size)


def check_verify(config: VerifyConfig) -> None:
    """Raise ConfigError where one of the two is missing."""
    if not config.compare.a or not config.compare.b:
        raise ConfigError(
            "a comparison needs two directories",
            seen=f"A {config.compare.a}, B {config.compare.b}",
            fix="convert verify A B",
        )


def shard_bytes(text: str) -> int:
    """Bytes of a size such as 5GB, in powers of ten.

    Raises:
        ConfigError: not a size, or zero.
    """
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * _UNITS[match[2].upper()])
    if size < 1:
        raise ConfigError("a size is a number with B, KB, MB, GB or TB", seen=text, fix="--max_shard_size 5GB")
    return size
