"""``convert verify A B``: are two checkpoints the same, bit for bit; with ``--logits true`` also by what they compute."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3.arch import ModelShape
from mcore_qwen3.cli.convert_job import read_reference, say, working_team
from mcore_qwen3.cli.convert_logits import available_memory, check_memory, compare_logits
from mcore_qwen3.cli.hub_model import NamedModel, find_model
from mcore_qwen3.config import VERIFY, VerifyConfig, parse_command
from mcore_qwen3.errors import ConfigError

EXIT_DIFFERENT = 1
_SHOWN = 20


def run(argv: list[str]) -> int:
    """The words after ``convert verify`` -> 0 where the checkpoints agree, 1 where they do not."""
    config = parse_command(argv, VERIFY).config
    models = [find_model(str(name), config.hub.use_hf) for name in (config.compare.a, config.compare.b)]
    for model in models:
        say(model.note)
    (sides, shape), (_, other) = (_reference(config, model) for model in models)
    from mcore_qwen3.converters import check_data_only, is_hf_dir, resolve_iteration_dir
    from mcore_qwen3.converters.verify import check_same_model

    check_same_model(shape, other)
    if config.compare.logits:
        if not any(is_hf_dir(model.directory) for model in models):
            raise ConfigError(
                "--logits needs a Hugging Face directory for transformers",
                seen=f"{config.compare.a} and {config.compare.b}",
                fix="convert one of them",
            )
        shape.check_router()
        check_memory(shape, available_memory())
    a, b = (str(model.with_weights().directory) for model in models)
    for path in (a, b):
        if not is_hf_dir(path):
            check_data_only(resolve_iteration_dir(path))
    agree = _compare_bits(a, b, shape)
    if config.compare.logits:
        mine, theirs = (a, b) if is_hf_dir(b) else (b, a)
        agree &= compare_logits(mine, theirs, shape, sides, config.compare.max_logit_difference)
    return 0 if agree else EXIT_DIFFERENT


def _reference(config: VerifyConfig, model: NamedModel) -> tuple[Path, ModelShape]:
    """`--hf_config` stands in where a checkpoint has no config.json of its own."""
    own = (model.directory / "config.json").is_file()
    return read_reference(model.directory, None if own else config.reference.hf_config, config.hub.use_hf)


def _compare_bits(a: str, b: str, shape: ModelShape) -> bool:
    from mcore_qwen3.arch import count_parameters
    from mcore_qwen3.converters import open_source
    from mcore_qwen3.converters.verify import compare

    with open_source(a, shape) as one, open_source(b, shape) as other:
        itemsize = next(iter(one.entries().values())).dtype.itemsize
        with working_team(1, count_parameters(shape).total * itemsize, "verify") as team:
            result = compare(one, other, shape, team.report)
    differing = result.differences
    say([f"differs: {difference.name}: {difference.how}" for difference in differing[:_SHOWN]])
    if len(differing) > _SHOWN:
        say([f"... and {len(differing) - _SHOWN} more"])
    say([f"{result.num_tensors - len(differing):,} of {result.num_tensors:,} tensors are equal, bit for bit"])
    return not differing
