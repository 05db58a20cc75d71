"""Megatron's layout strings (`--pipeline_model_parallel_layout`): which layers each model chunk holds, written out.

"Et*3|(tt|)*2tL": E the embedding, t a layer, L the output layer and the loss, `|` between chunks, `x*n` or `(...)*n` for
repetition, commas for the eye. Chunk c of stage s is number c x PP + s.
"""

from __future__ import annotations

import re

from mcore_qwen3.errors import ConfigError

FLAG = "--pipeline_model_parallel_layout"


def chunk_letters(text: str) -> list[str]:
    """The letters of each chunk, in the order of the model's layers.

    Raises:
        ConfigError: a letter or a form that is none of the above.
    """
    plain = text.replace(",", "").replace(" ", "")
    for group in (r"\(([^()]+)\)\*(\d+)", r"([A-Za-z])\*(\d+)"):
        plain = re.sub(group, lambda found: found[1] * int(found[2]), plain)
    strays = sorted(set(plain) - set("EtL|"))
    if strays:
        raise ConfigError(
            "a pipeline layout is made of E, t, L, |, and repetitions *n",
            seen=f"{FLAG} {text}: {' '.join(strays)}",
            fix=f"{FLAG} 'Et*4|t*4L' for two stages of four layers",
        )
    return plain.split("|")


def layout_stages(text: str, pipeline: int, num_layers: int) -> tuple[tuple[int, ...], ...]:
    """Number of layers of each [stage][chunk].

    Args:
        text: the string.
        pipeline: PP size.
        num_layers: of the model.

    Raises:
        ConfigError: it cannot be read, or does not fit the model or PP.
    """
    chunks = chunk_letters(text)
    layers = "".join(chunks)
    rules = (
        (layers[:1] == "E" and layers.count("E") == 1, "one E, first of all"),
        (layers[-1:] == "L" and layers.count("L") == 1, "one L, last of all"),
        (layers.count("t") == num_layers, f"{num_layers} t, one for each layer of the model"),
        (pipeline > 1 and len(chunks) % pipeline == 0, "a number of chunks that is a multiple of PP, and PP above 1"),
        (all("t" in chunk for chunk in chunks), "at least one layer in every chunk"),
    )
    for holds, rule in rules:
        if not holds:
            raise ConfigError(
                f"a pipeline layout has {rule}",
                seen=f"{FLAG} {text}: {len(chunks)} chunks, {layers.count('t')} layers, PP {pipeline}",
                fix="write the layers of each chunk, such as 'Et*3|t*5L'",
            )
    counts = [chunk.count("t") for chunk in chunks]
    return tuple(tuple(counts[stage::pipeline]) for stage in range(pipeline))
