"""RoPE of a config.json: the base in every spelling, YaRN as the model cards give it, everything else by name."""

from __future__ import annotations

from typing import Any

import pytest
from official_configs import D2, OFFICIAL

from mcore_qwen3.arch import ModelShape, RopeScaling
from mcore_qwen3.errors import ConfigError

# As the Qwen3 model cards write it.
CARD = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
OLD_CARD = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
YARN = RopeScaling(factor=4.0, original_max_position_embeddings=32768)


def without_theta(config: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_theta": 1e6}, None),
        ({"rope_theta": 1e6, "rope_scaling": None}, None),
        ({"rope_theta": 1e6, "rope_scaling": {"type": "default"}}, None),
        ({"rope_theta": 1e6, "rope_scaling": CARD}, YARN),
        ({"rope_theta": 1e6, "rope_scaling": OLD_CARD}, YARN),
        ({"rope_theta": 1e6, "rope_scaling": CARD | {"type": "yarn"}}, YARN),
        ({"rope_scaling": CARD | {"rope_theta": 1e6}}, YARN),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, None),
        ({"rope_parameters": {"rope_theta": 1e6}}, None),
        ({"rope_parameters": CARD | {"rope_theta": 1e6}}, YARN),
        ({"rope_theta": 1e6, "rope_parameters": OLD_CARD}, YARN),
        ({"rope_theta": 1e6, "rope_scaling": CARD, "rope_parameters": CARD | {"rope_theta": 1e6}}, YARN),
        # null is left out, and 1 is the whole of a head
        ({"rope_theta": 1e6, "rope_scaling": CARD | {"beta_fast": None, "partial_rotary_factor": 1.0}}, YARN),
    ],
)
def test_b14_the_base_is_kept_with_and_without_yarn(rope: dict[str, Any], scaling: RopeScaling | None) -> None:
    shape = ModelShape.from_hf_config(without_theta(D2) | rope)
    assert (shape.rope_theta, shape.rope_scaling) == (1e6, scaling)


def test_every_key_of_yarn_is_read() -> None:
    rope = CARD | {
        "attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 0.5,
        "truncate": False,
    }  # fmt: skip
    assert ModelShape.from_hf_config(D2 | {"rope_scaling": rope}).rope_scaling == RopeScaling(
        factor=4.0, original_max_position_embeddings=32768, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0,
        mscale=0.7, mscale_all_dim=0.5, truncate=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [{}, {"factor": 1.0}, {"attention_factor": 0.5}, {"mscale": 0.7, "mscale_all_dim": 0.5}, {"mscale": 0.7}],
)
def test_the_scale_of_attention_is_that_of_transformers(changes: dict[str, float]) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = D2 | {"rope_scaling": CARD | changes}
    theirs = ROPE_INIT_FUNCTIONS["yarn"](AutoConfig.for_model(**config), None)[1]
    scaling = ModelShape.from_hf_config(config).rope_scaling
    assert scaling is not None
    assert scaling.attention_scale == pytest.approx(theirs, rel=1e-12)


def test_yarn_lengthens_what_fits() -> None:
    plain = ModelShape.from_hf_config(OFFICIAL["8B"])
    assert (plain.max_position_embeddings, plain.max_sequence_length) == (40960, 40960)
    yarn = ModelShape.from_hf_config(OFFICIAL["8B"] | {"rope_scaling": CARD})
    assert (yarn.max_position_embeddings, yarn.max_sequence_length) == (40960, 131072)


@pytest.mark.parametrize(
    ("rope", "fragments"),
    [
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling.rope_type", "'linear'", "yarn"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling.type", "'dynamic'"]),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3"}}, ["rope_parameters.rope_type", "'llama3'"]),
        ({"rope_scaling": CARD | {"type": "default"}}, ["rope_scaling.type", "alike in both spellings"]),
        ({"rope_scaling": {"factor": 4.0}}, ["rope_scaling.factor must be absent", "rope_type default has no such key"]),
        ({"rope_scaling": CARD | {"low_freq_factor": 1.0}}, ["low_freq_factor must be absent", "rope_type yarn"]),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["without original_max_position_embeddings", "32768"]),
        ({"rope_scaling": CARD | {"factor": None}}, ["rope_scaling without factor"]),
        ({"rope_scaling": CARD | {"factor": 0.5}}, ["rope_scaling.factor must be 1 or more"]),
        ({"rope_scaling": CARD | {"factor": "4"}}, ["rope_scaling.factor must be a number", "'4'"]),
        ({"rope_scaling": CARD | {"original_max_position_embeddings": 0}}, ["embeddings must be above 0"]),
        ({"rope_scaling": CARD | {"beta_slow": 64.0}}, ["beta_fast must be beta_slow or more", "32.0 with beta_slow 64"]),
        ({"rope_scaling": CARD | {"truncate": 1}}, ["truncate must be true or false"]),
        ({"rope_scaling": CARD | {"partial_rotary_factor": 0.5}}, ["partial_rotary_factor must be 1"]),
        ({"rope_parameters": 3}, ["rope_parameters must be an object"]),
        ({"rope_scaling": CARD | {"rope_theta": 1e4}}, ["rope_theta = 1000000.0, rope_scaling.rope_theta = 10000.0"]),
        ({"rope_scaling": CARD, "rope_parameters": {"rope_theta": 1e6}}, ["two spellings of one thing", "must agree"]),
    ],
)  # fmt: skip
def test_refused_by_name(rope: dict[str, Any], fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ModelShape.from_hf_config(D2 | rope, source="config.json")
    message = str(caught.value)
    assert all(fragment in message for fragment in fragments), message
    assert message.count("\n") == 0
