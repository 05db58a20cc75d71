"""What megatron's configurations hold for a command line, run inside a rank: nothing is trained."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock


class _FusedAdam:
    """Takes what transformer-engine's takes, for megatron looks at its arguments."""

    def __init__(
        self, master_weight_dtype: Any, exp_avg_dtype: Any, exp_avg_sq_dtype: Any, use_decoupled_grad: Any
    ) -> None:
        raise NotImplementedError


@contextlib.contextmanager
def _transformer_engine() -> Iterator[None]:
    """A package of that name whose parts can be found and not used."""
    from megatron.core import utils
    from megatron.core.transformer.moe import moe_utils
    from packaging.version import Version

    modules = {name: ModuleType(name) for name in ("transformer_engine", "transformer_engine.pytorch")}
    optimizers = ModuleType("transformer_engine.pytorch.optimizers")
    optimizers.FusedAdam = _FusedAdam  # type: ignore[attr-defined]
    modules[optimizers.__name__] = optimizers
    names = ("permute", "permute_with_probs", "sort_chunks_by_index", "sort_chunks_by_index_with_probs", "unpermute")
    fused = {f"fused_{name}": object() for name in names}
    with (
        mock.patch.dict(sys.modules, modules),
        mock.patch.multiple(moe_utils, **fused),
        mock.patch.object(utils, "_te_version", Version("2.10.0")),
    ):
        yield


def megatron_fields(model_dir: str, words: list[str], world_size: int = 1) -> dict[str, Any]:
    """Every field of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, by class and name; and the
    schedules, as the trainer makes them from a command line for GPUs."""
    from mcore_qwen3.arch import read_model_shape
    from mcore_qwen3.cli import rank_settings
    from mcore_qwen3.cli.resolve import layout_of
    from mcore_qwen3.config import parse_args
    from mcore_qwen3.model.config import transformer_config
    from mcore_qwen3.runtime.device import Device
    from mcore_qwen3.train.optimizer import data_parallel_config, optimizer_config

    argv = ["--load", model_dir, "--dataset", "a.jsonl", "--train_iters", "10", "--bf16", "true", *words]
    config, shape = parse_args(argv, "sft").config, read_model_shape(model_dir)
    run: Any = SimpleNamespace(config=config, shape=shape, layout=layout_of(config, world_size, shape))
    with (
        _transformer_engine(),
        mock.patch.object(rank_settings, "choose_modules", lambda wanted, on_cuda: ("torch", "")),
    ):
        options = rank_settings.model_options(run, Device("cuda", 0, "nccl", ""), lambda text: None)
        made = {
            "TransformerConfig": transformer_config(shape, run.layout, options),
            "DistributedDataParallelConfig": data_parallel_config(rank_settings.data_parallel_settings(config)),
            "OptimizerConfig": optimizer_config(rank_settings.optimizer_settings(config), bf16=options.bf16),
            "Freezing": rank_settings.freezing(config),
        }
    rate, decay = rank_settings.schedules(config)
    made |= {"LearningRate": rate, "WeightDecay": decay}
    return {
        f"{kind}.{name}": _plain(getattr(settings, name))
        for kind, settings in made.items()
        for name in type(settings).__dataclass_fields__
    }


def _plain(value: Any) -> Any:
    """What can be sent to the test's own process and compared there."""
    return value if isinstance(value, bool | int | float | str | tuple | None) else str(value)


def names_of_datasets(words: list[str]) -> tuple[str, ...]:
    """Under which names the losses of data sets are told."""
    from mcore_qwen3.cli.rank_settings import dataset_names
    from mcore_qwen3.config import parse_args

    return dataset_names(parse_args(["--load", "m", "--train_iters", "10", *words], "sft").config)


def userbuffers_asked_for(model_dir: str, words: list[str], world_size: int) -> dict[str, Any]:
    """What transformer-engine's `initialize_ub` is called with."""
    from mcore_qwen3.arch import read_model_shape
    from mcore_qwen3.cli.rank_settings import userbuffer_sizes
    from mcore_qwen3.cli.resolve import layout_of
    from mcore_qwen3.config import parse_args
    from mcore_qwen3.model.userbuffers import start_userbuffers

    argv = ["--load", model_dir, "--dataset", "a.jsonl", "--train_iters", "10", *words]
    config, shape = parse_args(argv, "sft").config, read_model_shape(model_dir)
    run: Any = SimpleNamespace(config=config, shape=shape, layout=layout_of(config, world_size, shape))
    told: dict[str, Any] = {}
    engine = ModuleType("transformer_engine.pytorch.module.base")
    engine.initialize_ub = lambda **asked: told.update(asked)  # type: ignore[attr-defined]
    engine.UserBufferQuantizationMode = SimpleNamespace(FP8="fp8", NONE="none")  # type: ignore[attr-defined]
    parents = ("transformer_engine", "transformer_engine.pytorch", "transformer_engine.pytorch.module")
    modules = {name: ModuleType(name) for name in parents} | {engine.__name__: engine}
    with mock.patch.dict(sys.modules, modules):
        start_userbuffers(**userbuffer_sizes(run))
    return told
