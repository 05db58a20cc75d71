"""``convert verify --logits true``: what one checkpoint computes in this project's model and the other in transformers."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3.arch import ModelShape, count_parameters
from mcore_qwen3.cli.convert_job import say
from mcore_qwen3.errors import ConfigError

# Text, not random tokens, where there is a tokenizer: on tokens that make no text, the rounding errors of a trained model
# reach the logits a hundred times larger, in transformers as well as here.
_TEXTS = (
    "The water of a river that meets a stone divides, passes on both sides of it, and closes again behind. In the lee of "
    "the stone the water turns back on itself; there the sand that the river carries sinks to the ground.",
    "在很久以前，一位老人住在山脚下的小村庄里。每天清晨，他都会走到河边打水，然后坐在大树下给孩子们讲故事。",
    "def greatest_common_divisor(a: int, b: int) -> int:\n    while b:\n        a, b = b, a % b\n    return a\n",
    "Question: a train leaves at 9:40 and needs 2 hours and 35 minutes. When does it arrive?\nAnswer: 9:40 + 2:35 = 12:15.",
)
_SEQUENCES, _LENGTH = 4, 48


def check_memory(shape: ModelShape, available: int) -> None:
    """Refuse a model that does not fit twice in fp32: one after the other is held, each beside what it is read from.

    Args:
        shape: the model.
        available: bytes that can be had without swapping.

    Raises:
        ConfigError: with both numbers.
    """
    needed = 2 * 4 * count_parameters(shape).total
    if needed > available:
        raise ConfigError(
            "--logits needs room for the model in fp32 twice",
            seen=f"{needed:,} bytes needed, {available:,} available",
            fix="a machine with more memory, or verify without --logits, which compares every bit",
        )


def available_memory() -> int:
    """Bytes that Linux can give without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    (kilobytes,) = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes) * 1024


def compare_logits(mine: str, theirs: str, shape: ModelShape, sides: Path, limit: float) -> bool:
    """Run both in fp32 on the same tokens and print how far apart they are.

    Args:
        mine: the checkpoint for this project's model, in either format.
        theirs: a Hugging Face directory for transformers.
        shape: the model of both.
        sides: the directory with the tokenizer, where there is one.
        limit: the largest difference that passes.

    Returns:
        whether the largest difference is within the limit.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from mcore_qwen3.cli.logits import checkpoint_logits

    sequences, kind = _sequences(sides, shape.vocab_size)
    model = AutoModelForCausalLM.from_pretrained(theirs, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        reference = torch.cat([model(torch.tensor([ids]), use_cache=False).logits[0] for ids in sequences])
    del model  # one at a time is held
    ours = torch.cat(checkpoint_logits(mine, sequences, shape))
    difference = (ours - reference).abs()
    same = (ours.argmax(-1) == reference.argmax(-1)).float().mean()
    kl = torch.nn.functional.kl_div(ours.log_softmax(-1), reference.log_softmax(-1), reduction="none", log_target=True)
    largest = float(difference.max())
    say(
        [
            f"logits of {len(ours)} tokens of {kind} in fp32, {mine} by this project, {theirs} by transformers:",
            f"  largest difference {largest:.3e} (limit {limit:.0e}), mean {float(difference.mean()):.3e}, "
            f"same first token {float(same):.2%}, KL {float(kl.sum(-1).mean()):.3e}",
        ]
    )
    return largest <= limit


def _sequences(sides: Path, vocab_size: int) -> tuple[list[list[int]], str]:
    """(token ids, what they are)."""
    if (sides / "tokenizer.json").is_file():
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(sides / "tokenizer.json"))
        sequences = [tokenizer.encode(text).ids[:_LENGTH] for text in _TEXTS]
        largest = max(map(max, sequences))
        if largest >= vocab_size:
            raise ConfigError(
                "every token id of the tokenizer must be below the model's vocab_size",
                seen=f"token id {largest} of {sides / 'tokenizer.json'}, vocab_size {vocab_size}",
                fix="the model's own tokenizer.json, or none",
            )
        return sequences, "text"
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (_SEQUENCES, _LENGTH), generator=generator).tolist(), "no text (no tokenizer.json)"
