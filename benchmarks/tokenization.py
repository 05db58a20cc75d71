"""Preparing data against the raw rate of the `tokenizers` library: same text, same cores.

    make material
    taskset -c 0 python benchmarks/tokenization.py --rows short
    taskset -c 0 python benchmarks/tokenization.py --rows long

`short` are the alpaca rows of `.material`; `long` are rows of 2,500 and more tokens made of them, as long reasoning
answers are. Preparing is reading, rendering by the chat template, encoding, marking and writing; the raw rate is
`encode_batch` over the rendered texts alone, in batches of the same size, which gives no files and no marks. The two
take turns; preparing includes loading the tokenizer. With one process the seconds are CPU seconds, so that a busy
machine does not blur them; with several they are of the clock. The second start is of the clock, on the cache that
preparing left.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

MATERIAL = Path(__file__).resolve().parent.parent / ".material"
LONG_TOKENS = 2600
CHARACTERS_A_TOKEN = 4


def write_rows(file: Path, kind: str, number: int) -> None:
    """Write `number` rows, alpaca rows over and over, or long ones made of many."""
    given = [
        row
        for name in ("alpaca_en_demo.json", "alpaca_zh_demo.json")
        for row in json.loads((MATERIAL / "data" / name).read_text(encoding="utf-8"))
    ]
    with file.open("w", encoding="utf-8") as handle:
        at = 0
        for index in range(number):
            row = given[at % len(given)]
            at += 1
            answer = row["output"]
            # English first rows: four characters a token or fewer, so the row has at least the tokens wanted.
            while kind == "long" and len(answer) < LONG_TOKENS * CHARACTERS_A_TOKEN:
                answer += f"\n\n{given[at % len(given)]['output']}"
                at += 1
            query = f"{row['instruction']}\n{row['input']} ({index})"
            handle.write(json.dumps({"query": query, "response": answer}, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", choices=("short", "long"), default="short")
    parser.add_argument("--number", type=int, default=0, help="rows; 0: 20,000 short or 1,000 long ones")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    number = options.number or {"short": 20_000, "long": 1_000}[options.rows]

    from mcore_qwen3.data.encode import CHUNK_ROWS
    from mcore_qwen3.data.forms import Conversation, read_conversations
    from mcore_qwen3.data.prepare import PrepareRequest, prepare
    from mcore_qwen3.data.rows import read_rows
    from mcore_qwen3.data.sources import find_sources
    from mcore_qwen3.data.template import load_tokenizer

    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "rows.jsonl"
        write_rows(file, options.rows, number)
        tokenizer = load_tokenizer(MATERIAL / "tokenizer")
        rows = read_conversations(file.name, read_rows(find_sources([str(file)])[0].files[0])).items
        texts = [tokenizer.render(row.messages).text for row in rows if isinstance(row, Conversation)]
        clock = time.process_time if options.processes == 1 else time.perf_counter
        prepared_seconds, raw_seconds, again_seconds = [], [], []
        for attempt in range(options.repeat):
            start = clock()
            tokens = 0
            for first in range(0, len(texts), CHUNK_ROWS):
                batch = tokenizer.backend.encode_batch(texts[first : first + CHUNK_ROWS], add_special_tokens=False)
                tokens += sum(len(one.ids) for one in batch)
            raw_seconds.append(clock() - start)
            request = PrepareRequest(
                dataset=(str(file),),
                max_length=32768,
                dataset_num_proc=options.processes,
                tokenizer_dir=MATERIAL / "tokenizer",
                cache_dir=Path(scratch) / f"cache{attempt}",
            )
            start = clock()
            prepared = prepare(request)
            prepared_seconds.append(clock() - start)
            assert prepared.train.tokens == tokens, "the two did not do the same text"
            start = time.perf_counter()
            prepare(request)
            again_seconds.append(time.perf_counter() - start)
    raw, ours = min(raw_seconds), min(prepared_seconds)
    print(
        f"{number:,} {options.rows} rows, {tokens:,} tokens ({tokens / number:,.0f} a row), {options.processes} "
        f"process(es), {len(os.sched_getaffinity(0))} core(s), load {os.getloadavg()[0]:.1f}\n"
        f"  tokenizers alone: {tokens / raw:,.0f} tokens/s; preparing: {tokens / ours:,.0f} tokens/s = {raw / ours:.2f}\n"
        f"  second start: {min(again_seconds):.2f} s"
    )


if __name__ == "__main__":
    main()
