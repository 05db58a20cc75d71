"""Real instruction rows, rendered and tokenized by the real tokenizer, with ids folded into a tiny vocabulary.

Lengths, trained spans and repetition are those of real data; only the ids are smaller, so that tiny models can be used.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from helpers.tiny import VOCABULARY, Sample


def real_samples(material: Path, number: int, *, longest: int = 96, vocabulary: int = VOCABULARY) -> list[Sample]:
    """The first rows, English and Chinese in turn, that are no longer than `longest` tokens."""
    from mcore_qwen3.data.template import load_tokenizer

    tokenizer = load_tokenizer(material / "tokenizer")
    files = [json.loads((material / "data" / f"alpaca_{language}_demo.json").read_text()) for language in ("en", "zh")]
    found: list[Sample] = []
    for pair in zip(*files, strict=False):
        for row in pair:
            messages = [
                {"role": "user", "content": row["instruction"]},
                {"role": "assistant", "content": row["output"]},
            ]
            ids, mask = next(iter(tokenizer.encode([tokenizer.render(messages)])))
            if len(ids) <= longest:
                found.append(Sample(np.asarray(ids, dtype=np.int64) % vocabulary, np.asarray(mask, dtype=np.uint8)))
        if len(found) >= number:
            return found[:number]
    raise AssertionError(f"only {len(found)} rows of at most {longest} tokens")
