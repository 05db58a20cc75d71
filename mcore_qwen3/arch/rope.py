"""RoPE as a `config.json` gives it: the base, and YaRN where it stretches the positions.

Three spellings are read: `rope_theta` beside `rope_scaling` (the official files and the model cards), `rope_parameters`
with everything in it (transformers 5), and `type` for `rope_type` in either. Where a value is written twice, both must
agree, so that no base is lost when a scaling is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mcore_qwen3.arch.hf_values import bad_value, typed
from mcore_qwen3.errors import ConfigError

_PLACES = ("rope_scaling", "rope_parameters")
_NUMBERS = ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
_YARN_KEYS = {*_NUMBERS, "original_max_position_embeddings", "truncate"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """YaRN, with the terms and defaults of transformers 5.24 (`_compute_yarn_parameters`).

    Attributes:
        factor: how many times longer a sequence may be than in pre-training.
        original_max_position_embeddings: the longest sequence of pre-training.
        beta_fast, beta_slow: turns over that length above which a channel is not stretched, and below which it is
            stretched in full.
        attention_factor: scale of cosine and sine; None: see `attention_scale`.
        mscale, mscale_all_dim: what `attention_scale` is worked out from where both are given.
        truncate: whether the channels at which the ramp starts and ends are rounded outwards to whole ones.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @property
    def attention_scale(self) -> float:
        """What cosine and sine are multiplied by: attention_factor, else 0.1 x ln(factor) + 1.

        With mscale and mscale_all_dim both given and not 0, (0.1 x mscale x ln(factor) + 1) over the same with
        mscale_all_dim.
        """
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._scale(self.mscale) / self._scale(self.mscale_all_dim)
        return self._scale(1.0)

    def _scale(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


def rope_theta(config: Mapping[str, Any], source: str) -> float:
    """The base of RoPE, wherever it is written.

    Raises:
        ConfigError: it is missing, or written twice with different values.
    """
    found = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    found |= {f"{place}.rope_theta": r["rope_theta"] for place, r in _objects(config, source) if "rope_theta" in r}
    thetas = {key: typed(value, float, key, source) for key, value in found.items()}
    if len(set(thetas.values())) != 1:
        raise ConfigError(
            f"{source}: rope_theta must be given, and alike where it is given twice",
            seen=", ".join(f"{key} = {value!r}" for key, value in thetas.items()) or "no rope_theta",
            fix="write the value the weights were trained with",
        )
    return next(iter(thetas.values()))


def rope_scaling(config: Mapping[str, Any], source: str) -> RopeScaling | None:
    """YaRN's settings, or None where RoPE is not scaled.

    Raises:
        ConfigError: another kind of scaling, a key that YaRN does not have, or two places that disagree.
    """
    found = {place: _read_place(place, rope, source) for place, rope in _objects(config, source)}
    if len(set(found.values())) > 1:
        raise ConfigError(
            f"{source}: {' and '.join(_PLACES)} are two spellings of one thing and must agree",
            seen=", ".join(f"{place} = {dict(config[place])!r}" for place in found),
            fix="keep the right one",
        )
    return next(iter(found.values()), None)


def _objects(config: Mapping[str, Any], source: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for place in _PLACES:
        rope = config.get(place)
        if isinstance(rope, Mapping):
            yield place, rope
        elif rope is not None:
            raise bad_value(source, place, rope, "an object with rope_type and its settings")


def _read_place(place: str, rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    kinds = {key: rope[key] for key in ("rope_type", "type") if key in rope}
    for key, kind in kinds.items():
        if kind not in ("default", "yarn") or kind != next(iter(kinds.values())):
            wanted = "'default' (not scaled) or 'yarn'" + (", and alike in both spellings" if len(kinds) > 1 else "")
            raise bad_value(source, f"{place}.{key}", kind, wanted, "no other RoPE scaling is built")
    yarn = "yarn" in kinds.values()
    for key, value in rope.items():
        if key in kinds or key == "rope_theta":
            continue
        if key == "partial_rotary_factor":
            if value not in (1, None):
                raise bad_value(source, f"{place}.{key}", value, "1", "RoPE turns every channel of a head")
        elif value is not None and not (yarn and key in _YARN_KEYS):
            why = f"rope_type {'yarn' if yarn else 'default'} has no such key"
            raise bad_value(source, f"{place}.{key}", value, "absent", why)
    return _yarn(place, rope, source) if yarn else None


def _yarn(place: str, rope: Mapping[str, Any], source: str) -> RopeScaling:
    given = {key: value for key, value in rope.items() if key in _YARN_KEYS and value is not None}
    missing = [key for key in ("factor", "original_max_position_embeddings") if key not in given]
    if missing:
        raise ConfigError(
            f"{source}: YaRN needs factor and original_max_position_embeddings",
            seen=f"{place} without {' and '.join(missing)}",
            fix="write them as the model card gives them, such as 4.0 and 32768",
        )
    settings = {
        key: typed(value, kind, f"{place}.{key}", source)
        for kind, keys in ((float, _NUMBERS), (int, ("original_max_position_embeddings",)), (bool, ("truncate",)))
        for key, value in given.items()
        if key in keys
    }
    for key in {"attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings"} & settings.keys():
        if settings[key] <= 0:
            raise bad_value(source, f"{place}.{key}", settings[key], "above 0")
    if settings["factor"] < 1:
        raise bad_value(source, f"{place}.factor", settings["factor"], "1 or more")
    scaling = RopeScaling(**settings)
    if scaling.beta_fast < scaling.beta_slow:
        seen = f"{scaling.beta_fast} with beta_slow {scaling.beta_slow}"
        raise bad_value(source, f"{place}.beta_fast", seen, "beta_slow or more")
    return scaling
