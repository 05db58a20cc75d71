"""A run's memory by the planner: the same account for `--dry_run`, for `megatron plan` and beside a run's measured peak."""

from __future__ import annotations

from collections.abc import Iterator

from mcore_qwen3.arch import ModelShape, ParallelLayout
from mcore_qwen3.cli.resolve import ResolvedRun
from mcore_qwen3.config import RunConfig, freezes
from mcore_qwen3.planner.memory import GIB, Account, heaviest_account, stage_account
from mcore_qwen3.planner.settings import Settings, settings_of


def expected_modules(config: RunConfig) -> str:
    """The modules of a run that has not started: transformer-engine's on GPUs, unless the user has chosen."""
    on_cpu = config.launch.device == "cpu"
    return "torch" if on_cpu or config.model.transformer_impl == "torch" else "transformer_engine"


def run_settings(run: ResolvedRun, modules: str) -> Settings:
    """The planner's settings of a resolved run with these modules, its rows as long as they can be."""
    return settings_of(run.config, run.layout, modules=modules, on_cuda=run.config.launch.device == "cuda")


def not_counted(config: RunConfig) -> list[str]:
    """What the run asks for and the account leaves out, one line each."""
    left_out = (
        (freezes(config.optim), "frozen parameters are counted as trained"),
        (config.numerics.fp8_format is not None, "products in fp8 are counted as bf16"),
        (config.numerics.overlap_grad_reduce, "the padding of each bucket of overlap_grad_reduce is not counted"),
        (
            config.numerics.overlap_moe_expert_parallel_comm,
            "overlap_moe_expert_parallel_comm: a micro-batch more that it holds, and messages that it hides, are not counted",
        ),
    )
    return [f"note: {text}" for applies, text in left_out if applies]


def assumed_text(shape: ModelShape, layout: ParallelLayout, settings: Settings) -> str:
    """What an estimate takes for granted."""
    load = settings.expert_load(layout)
    uneven = f", busiest experts at {load:.2f} of an even share" if shape.is_moe and load > 1 else ""
    place = "" if settings.on_cuda else " on CPU, without the libraries of the process"
    return f"{settings.modules} modules{place}; rows of {settings.row_length:,} tokens{uneven}"


def range_text(account: Account) -> str:
    """The middle of an estimate and its range."""
    return f"{_gib(account.total)} GiB ({_gib(account.low)} to {_gib(account.high)} to be expected)"


def account_lines(account: Account) -> Iterator[str]:
    """Every part of an account with where it comes from."""
    for item in (*account.items, *account.fitted):
        yield f"{item.name:<20} {_gib(item.bytes):>8} GiB  {item.source}"


def memory_lines(run: ResolvedRun) -> Iterator[str]:
    """The account of the fullest rank, part by part, and the totals of all stages."""
    shape, layout = run.shape, run.layout
    settings = run_settings(run, expected_modules(run.config))
    account = heaviest_account(shape, layout, settings)
    yield from not_counted(run.config)
    yield f"memory of the fullest rank, estimated ({assumed_text(shape, layout, settings)}):"
    yield f"  stage {account.stage}: {range_text(account)}"
    yield from (f"    {line}" for line in account_lines(account))
    if layout.pipeline > 1:
        totals = [stage_account(shape, layout, settings, stage).total for stage in range(layout.pipeline)]
        yield f"  GiB of each stage: {', '.join(map(_gib, totals))}"


def _gib(size: float) -> str:
    """GiB with one digit, or as many as a small size needs."""
    gib = size / GIB
    return f"{gib:.1f}" if gib >= 0.95 else f"{gib:.2g}" if gib < 0.1 else f"{gib:.2f}"
