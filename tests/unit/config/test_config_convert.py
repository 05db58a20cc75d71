"""Settings of the conversions: their defaults, and what is refused before anything is read."""

from __future__ import annotations

import pytest

from mcore_qwen3.config import (
    EXPORT,
    HF2MCORE,
    MCORE2HF,
    VERIFY,
    Hf2McoreConfig,
    Mcore2HfConfig,
    VerifyConfig,
    parse_command,
    shard_bytes,
    to_flat_dict,
)
from mcore_qwen3.errors import ConfigError

WORK = {"workers": 1, "check_finite": False, "dry_run": False}
PLACE = {"src": None, "dst": None, "overwrite": False}
FORM = {"dtype": "keep", "router_dtype": "keep", "vocab_size": None}


def test_defaults() -> None:
    assert to_flat_dict(Hf2McoreConfig()) == PLACE | {"use_hf": None} | FORM | WORK
    assert to_flat_dict(Mcore2HfConfig()) == (
        PLACE | {"hf_config": None, "use_hf": None} | FORM | {"max_shard_size": "5GB"} | WORK
    )
    assert to_flat_dict(VerifyConfig()) == {
        "a": None,
        "b": None,
        "logits": False,
        "max_logit_difference": 1e-3,
        "hf_config": None,
        "use_hf": None,
    }


def test_words_names_and_other_names_say_the_same() -> None:
    forms = (
        ["x", "y"],
        ["--src", "x", "--dst", "y"],
        ["--model", "x", "--save", "y"],
        ["--mcore_model", "x", "--output_dir", "y"],
    )
    for command in (HF2MCORE, MCORE2HF, EXPORT):
        configs = [parse_command([*form, "--exist_ok", "true"], command).config for form in forms]
        assert all(config == configs[0] for config in configs)
        assert (configs[0].place.src, configs[0].place.dst, configs[0].place.overwrite) == ("x", "y", True)


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (HF2MCORE, ["x"], "the directory to read and the one to write; seen: SRC x, DST None"),
        (VERIFY, ["x"], "a comparison needs two directories; seen: A x, B None"),
        (MCORE2HF, ["x", "y", "--max_shard_size", "five"], "a size is a number with B, KB, MB, GB or TB; seen: five"),
        (HF2MCORE, ["x", "y", "--workers", "0"], "workers"),
        (HF2MCORE, ["x", "y", "--hf_config", "z"], "unknown flag"),
    ],
)
def test_refused(command, words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command(words, command)


def test_a_dry_run_needs_no_target() -> None:
    assert parse_command(["x", "--dry_run", "true"], HF2MCORE).config.place.dst is None


@pytest.mark.parametrize(("text", "size"), [("5GB", 5 * 10**9), ("500 mb", 5 * 10**8), ("1.5KB", 1500), ("7", 7)])
def test_sizes_are_powers_of_ten(text: str, size: int) -> None:
    assert shard_bytes(text) == size
