"""``megatron data``: prepare rows as training would, and show what they have become."""

from __future__ import annotations

from pathlib import Path

from mcore_qwen3.arch import find_config_file, read_model_shape
from mcore_qwen3.cli.hub_model import find_model
from mcore_qwen3.cli.prepare import epoch_line, request_of
from mcore_qwen3.cli.resolve import default_cache
from mcore_qwen3.cli.sft import progress_on_screen
from mcore_qwen3.config import DATA, InspectConfig, parse_command, with_values
from mcore_qwen3.errors import ConfigError


def run(argv: list[str]) -> int:
    """The words after ``megatron data`` -> exit code."""
    parsed = parse_command(argv, DATA)
    model = find_model(str(parsed.config.model.load), parsed.config.data.use_hf)
    print("".join(f"{line}\n" for line in model.note), end="", flush=True)
    config = _filled(parsed.config, model.directory)
    folder = _tokenizer_dir(model.directory)
    from mcore_qwen3.cli import data_view as view
    from mcore_qwen3.data.prepare import prepare

    purpose = config.purpose
    with progress_on_screen():
        prepared = prepare(request_of(config.data, raw_text=purpose.raw_text, tokenizer_dir=folder, seed=purpose.seed))
    view.show_samples(prepared, folder, config.view.show, with_ids=config.view.show_ids)
    view.show_table(prepared)
    print("\n".join((*prepared.report, epoch_line(prepared, purpose.global_batch_size))), flush=True)
    picture = config.view.histogram or (config.view.output and str(Path(config.view.output) / "lengths.png"))
    if picture:
        view.draw_histogram(prepared, Path(picture))
        print(f"histogram: {picture}")
    if config.view.output:
        print(f"for training: --data_cache_path {config.view.output} with the same data flags")
    return 0


def _filled(config: InspectConfig, directory: Path) -> InspectConfig:
    cache = config.view.output or config.data.data_cache_path or default_cache()
    length = config.data.max_length
    if length is None:
        try:
            length = read_model_shape(directory).max_position_embeddings
        except ConfigError:
            raise ConfigError(
                "the length limit is --max_length, or max_position_embeddings of the model's config.json",
                seen=f"no config.json in {config.model.load}",
                fix="--max_length",
            ) from None
    return with_values(config, {"data_cache_path": cache, "max_length": length})


def _tokenizer_dir(directory: Path) -> Path:
    """The folder of the tokenizer: the one named, or the one that holds the checkpoint's config.json."""
    return directory if (directory / "tokenizer.json").is_file() else find_config_file(directory).parent
