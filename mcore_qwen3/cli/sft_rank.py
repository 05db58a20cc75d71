"""What one rank of `megatron sft` does, from joining the others to the last checkpoint. Joins all packages."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from mcore_qwen3.cli.prepare import check_same_data, prepare_data
from mcore_qwen3.cli.resolve import ResolvedRun, resolve, train_iters, with_steps, with_weights
from mcore_qwen3.cli.resume import check_same_point
from mcore_qwen3.cli.shared_folder import check_shared_folder
from mcore_qwen3.config import ParsedRun, RunConfig, greater_is_better
from mcore_qwen3.data.prepare import Prepared
from mcore_qwen3.errors import ConfigError
from mcore_qwen3.launch import SUPERVISED, Heartbeat, on_stop_request, rank_main, restarted, started_at
from mcore_qwen3.runtime import groups
from mcore_qwen3.runtime.device import Device, choose_device, memory_gib, set_cuda_environment

Say = Callable[[str], None]


def run_rank(parsed: ParsedRun) -> int:
    """Run this rank; errors are reported to the launcher. Returns the process's exit code."""
    return rank_main(lambda: _run(parsed))


def _run(parsed: ParsedRun) -> int:
    def say(text: str) -> None:
        if os.environ["RANK"] == "0":
            print(text, flush=True)

    run = with_weights(resolve(parsed, int(os.environ["WORLD_SIZE"])))
    if run.config.launch.device == "cuda":
        beside = run.config.numerics.overlap_moe_expert_parallel_comm
        for line in set_cuda_environment(many_queues=beside and run.layout.tensor == run.layout.context == 1):
            say(line)
    for line in _idle_limits(run.config):
        say(line)
    device = choose_device(parsed.config.launch.device, int(os.environ["LOCAL_RANK"]))
    if device.kind != run.config.launch.device:
        raise ConfigError(
            "--device auto needs a torch that sees the GPUs which the machine has",
            seen=f"{run.config.launch.device} by the machine's device files, {device.kind} by torch",
            fix="--device cpu, or a torch build and a driver (nvidia-smi) that fit the GPUs",
        )
    prepared = prepare_data(run)  # found in the cache; before the ranks meet, so that no collective waits for it
    run = with_steps(run, prepared.train.rows)
    groups.prepare_megatron(device)
    timeout_s = 60 * run.config.launch.distributed_timeout_minutes
    groups.start_process_group(device, timeout_s)
    check_shared_folder(Path(str(run.config.checkpoint.save)))
    check_same_data(prepared)
    check_same_point(run.resume)
    groups.start_model_parallel(run.layout, timeout_s)
    groups.seed_everything(run.config.train.seed)
    say(f"{run.layout.world_size} ranks joined; device {device.kind}: {device.reason}")
    code = _train(run, prepared, device, say)
    groups.stop_process_group()
    return code


def _train(run: ResolvedRun, prepared: Prepared, device: Device, say: Say) -> int:
    """Build everything, train, and return the exit code. Megatron is imported here, after its stand-ins."""
    from mcore_qwen3.cli import rank_parts as parts
    from mcore_qwen3.cli.rank_settings import schedules
    from mcore_qwen3.train.log import TrainLog
    from mcore_qwen3.train.loop import Parts, Plan, StopRequest, train

    config = run.config
    stop = StopRequest(_time_limit(config))
    on_stop_request(stop.set)
    heartbeat = Heartbeat(enabled=config.launch.step_timeout > 0)
    before = memory_gib(device)
    chunks, optimizer, state = parts.build(run, device, say)
    row_length = parts.dry_batch(run, prepared, device, chunks, optimizer, say)
    save = parts.save_root(run)
    total = train_iters(config)
    first = os.environ["RANK"] == "0"
    facts = parts.run_facts(run, prepared, device)
    log = TrainLog(
        save,
        facts,
        config.train.log_interval,
        active=first,
        start_iteration=state.iteration,
        trackers=parts.open_trackers(run, state.iteration) if first else (),
    )
    if facts.peak_tflops is None:
        say(f"MFU is not counted: {facts.no_peak_because}")
    if (restart := restarted(os.environ)) is not None:
        log.restart(state.iteration, restart.number, restart.reason)
    plan = Plan(
        train_iters=total,
        global_batch_size=run.batch.global_batch_size,
        eval_interval=config.train.eval_interval or total,
        save_interval=config.checkpoint.save_interval,
        save_optimizer=not config.checkpoint.no_save_optim,
        eval_on_start=config.train.eval_on_start,
        max_skipped_iters=config.train.max_skipped_iters,
        metric_for_best_model=config.checkpoint.metric_for_best_model or "",
        greater_is_better=greater_is_better(config),
    )
    rate, weight_decay = schedules(config)
    evaluation = parts.evaluation(run, prepared)
    state = train(
        plan,
        Parts(
            device=device,
            chunks=chunks,
            optimizer=optimizer,
            schedule=rate,
            weight_decay=weight_decay,
            batches=heartbeat.around("step", parts.training_batches(run, prepared, state.consumed_samples)),
            evaluation=evaluation and (lambda: heartbeat.around("evaluation", evaluation())),
            enter=heartbeat.enter,
            saver=parts.checkpoint_saver(run, log.say),
            log=log,
            profiler=parts.profiler(run, device),
        ),
        state,
        stop,
    )
    heartbeat.enter("end")
    parts.tell_memory(run, device, before=before, row_length=row_length, log=log, step=state.iteration)
    log.close()
    if state.stopped_by != "end":
        say(f"stopped by {state.stopped_by} after step {state.iteration}; the same command continues")
    return config.train.exit_code_on_signal if state.stopped_by.startswith("SIG") else 0


def _time_limit(config: RunConfig) -> float | None:
    """When the run has to end by exit_duration_in_mins, by time.monotonic()."""
    minutes = config.train.exit_duration_in_mins
    return started_at(os.environ) + 60 * minutes if minutes else None


def _idle_limits(config: RunConfig) -> list[str]:
    """What a rank that someone started by hand cannot do: there is no supervisor to do it."""
    if SUPERVISED in os.environ:
        return []
    values = {"max_restarts": config.launch.max_restarts, "step_timeout": config.launch.step_timeout}
    because = "the ranks were started without megatron's own launcher"
    return [f"--{name} has no effect in this run: {because}" for name, value in values.items() if value]
