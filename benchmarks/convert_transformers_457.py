"""Does another transformers load an export, and compute the same? Run once in each environment (docs/convert.md).

    python benchmarks/convert_transformers_457.py EXPORT LOGITS.pt     # writes LOGITS.pt, or compares with it

Loads strictly (no tensor missing, unexpected or of another shape) and runs fixed tokens in fp32.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM


def main() -> None:
    """Load, run, write or compare."""
    directory, file = Path(sys.argv[1]), Path(sys.argv[2])
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, torch_dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    problems = {name: info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys") if info[name]}
    tokens = torch.randint(model.config.vocab_size, (4, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model.eval()(tokens, use_cache=False).logits
    print(f"transformers {transformers.__version__}: {type(model).__name__}, problems: {problems}")
    if not file.exists():
        torch.save(logits, file)
        print(f"written: {file}")
        sys.exit(bool(problems))
    difference = float((logits - torch.load(file, weights_only=True)).abs().max())
    print(f"largest difference {difference:.3e}, largest logit {float(logits.abs().max()):.3f}")
    sys.exit(bool(problems) or difference > 1e-5)


if __name__ == "__main__":
    main()
