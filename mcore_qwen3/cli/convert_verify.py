"""``convert verify A B``: are two checkpoints the same, bit for bit; with ``--logits true`` also by what they compute."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.cli.convert_job import read_reference, say, working_team
from mcore_qwen3.config import VERIFY, VerifyConfig, parse_command
from mcore_qwen3.errors import ConfigError

EXIT_DIFFERENT = 1
_SHOWN = 20
_SEQUENCES, _LENGTH = 4, 48


def run(argv: list[str]) -> int:
    """The words after ``convert verify`` -> 0 where the checkpoints agree, 1 where they do not."""
    config = parse_command(argv, VERIFY).config
    a, b = str(config.compare.a), str(config.compare.b)
    (_, shape), (_, other) = (read_reference(path, _reference(config, path)) for path in (a, b))
    from mcore_qwen3.converters import check_data_only, is_hf_dir, resolve_iteration_dir
    from mcore_qwen3.converters.verify import check_same_model

    check_same_model(shape, other)
    for path in (a, b):
        if not is_hf_dir(path):
            check_data_only(resolve_iteration_dir(path))
    agree = _compare_bits(a, b, shape)
    if config.compare.logits:
        agree &= _compare_logits(config, a, b, shape)
    return 0 if agree else EXIT_DIFFERENT


def _reference(config: VerifyConfig, path: str) -> str | None:
    """`--hf_config` stands in where a checkpoint has no config.json of its own."""
    own = Path(path) / "config.json"
    return None if own.is_file() else config.reference.hf_config


def _compare_bits(a: str, b: str, shape: ModelShape) -> bool:
    from mcore_qwen3.arch import count_parameters
    from mcore_qwen3.converters import open_source
    from mcore_qwen3.converters.verify import compare

    with open_source(a, shape) as one, open_source(b, shape) as other:
        itemsize = next(iter(one.entries().values())).dtype.itemsize
        with working_team(1, count_parameters(shape).total * itemsize, "verify") as team:
            result = compare(one, other, shape, team.report)
    differing = result.differences
    say([f"differs: {difference.name}: {difference.how}" for difference in differing[:_SHOWN]] if differing else [])
    if len(differing) > _SHOWN:
        say([f"... and {len(differing) - _SHOWN} more"])
    say([f"{result.num_tensors - len(differing):,} of {result.num_tensors:,} tensors are equal, bit for bit"])
    return not differing


def _compare_logits(config: VerifyConfig, a: str, b: str, shape: ModelShape) -> bool:
    """A by our model, B by transformers, on fixed random tokens."""
    from mcore_qwen3.converters import is_hf_dir

    ours, theirs = (a, b) if is_hf_dir(b) else (b, a)
    if not is_hf_dir(theirs):
        raise ConfigError(
            "--logits needs a Hugging Face directory for transformers", seen=f"{a} and {b}", fix="convert one of them"
        )
    import torch
    from transformers import AutoModelForCausalLM

    from mcore_qwen3.cli.logits import checkpoint_logits

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(shape.vocab_size, (_SEQUENCES, _LENGTH), generator=generator)
    model = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        reference = model(tokens, use_cache=False).logits.float()
    del model
    # The other model is gone: one at a time is held.
    mine = torch.stack(checkpoint_logits(ours, tokens.tolist(), shape))
    difference = (mine - reference).abs()
    same = (mine.argmax(-1) == reference.argmax(-1)).float().mean()
    kl = torch.nn.functional.kl_div(mine.log_softmax(-1), reference.log_softmax(-1), reduction="none", log_target=True)
    largest, limit = float(difference.max()), config.compare.max_logit_difference
    say(
        [
            f"logits of {tokens.numel()} tokens in fp32, {ours} by this project, {theirs} by transformers:",
            f"  largest difference {largest:.3e} (limit {limit:.0e}), mean {float(difference.mean()):.3e}, "
            f"same first token {float(same):.2%}, KL {float(kl.sum(-1).mean()):.3e}",
        ]
    )
    return largest <= limit
