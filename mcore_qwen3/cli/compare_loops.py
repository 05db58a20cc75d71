"""Runs the plain loop beside what the ranks have left, and tells where the two part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from mcore_qwen3.cli.compare_faults import fault_of_activations, fault_of_gradients, fault_of_weights
from mcore_qwen3.cli.compare_rank import OurStep
from mcore_qwen3.cli.compare_tensors import Pair, activation_pairs, parameter_pairs
from mcore_qwen3.cli.plain_loop import Activations, PlainSettings, PlainStep, load_plain_model, plain_loop
from mcore_qwen3.cli.resolve import ResolvedRun, train_iters
from mcore_qwen3.config import CompareConfig, decay_iters, warmup_iters
from mcore_qwen3.config.compare import PlainLoopFlags
from mcore_qwen3.data.batches import StepBatch, train_batches
from mcore_qwen3.data.prepare import Prepared
from mcore_qwen3.runtime.device import choose_device
from mcore_qwen3.train.snapshot import Snapshot

RankResult = tuple[list[OurStep], Snapshot]


@dataclass(slots=True)
class Group:
    """Tensors of one kind, looked at in order.

    Attributes:
        title: what they are.
        limit: relative error above which one differs.
        count: how many were looked at.
        worst: the largest error among those that agree, and whose.
        first: the first that differs.
        fault: what it points to.
    """

    title: str
    limit: float
    count: int = 0
    worst: tuple[float, str] = (0.0, "")
    first: Pair | None = None
    first_error: float = 0.0
    differing: int = 0
    fault: str = ""

    def add(self, pair: Pair) -> float:
        """Look at one more; returns its error."""
        error = pair.error
        self.count += 1
        if error > self.limit:
            self.differing += 1
            if self.first is None:
                self.first, self.first_error = pair, error
        elif error > self.worst[0]:
            self.worst = (error, pair.hf_name)
        return error

    def lines(self) -> Iterator[str]:
        """What to print."""
        head = f"{self.title}, {self.count}: "
        if self.first is None:
            error, name = self.worst
            yield head + (f"agree; largest e {error:.1e}, {name}" if error else "the same, bit for bit")
            return
        yield head + f"{self.differing} differ; the first in the order of the computation:"
        yield f"  megatron      {self.first.our_name}"
        yield f"  transformers  {self.first.hf_name}"
        yield f"  e = {self.first_error:.2e}, limit {self.limit:.0e}"
        yield f"  points to     {self.fault}"


@dataclass(slots=True)
class Comparison:
    """What was found; `steps` are (step here, step there)."""

    flags: PlainLoopFlags
    groups: list[Group] = field(default_factory=list)
    steps: list[tuple[OurStep, PlainStep]] = field(default_factory=list)

    @property
    def agree(self) -> bool:
        """Whether every loss, gradient norm and tensor is within its limit."""
        return all(self._step_agrees(*pair) for pair in self.steps) and all(
            group.first is None for group in self.groups
        )

    def _step_agrees(self, ours: OurStep, theirs: PlainStep) -> bool:
        return (
            relative(ours.loss, theirs.loss) <= self.flags.loss_tolerance
            and relative(ours.grad_norm, theirs.grad_norm) <= self.flags.grad_norm_tolerance
            and relative(ours.lr, theirs.lr) <= 1e-9
        )

    def lines(self) -> Iterator[str]:
        """The whole report."""
        yield ""
        yield "step    megatron loss      plain loss    rel. diff   megatron norm      plain norm    rel. diff"
        for number, (ours, theirs) in enumerate(self.steps, 1):
            marks = "" if self._step_agrees(ours, theirs) else "  differs"
            if ours.skipped:
                marks += f"  megatron skipped it: {ours.skipped}"
            yield (
                f"{number:>4} {ours.loss:>16.8f} {theirs.loss:>15.8f} {relative(ours.loss, theirs.loss):>12.1e} "
                f"{ours.grad_norm:>15.7f} {theirs.grad_norm:>15.7f} {relative(ours.grad_norm, theirs.grad_norm):>12.1e}{marks}"
            )
        yield ""
        yield "e = largest difference / largest value of transformers' tensor"
        for group in self.groups:
            yield from group.lines()
        yield ""
        yield self._verdict()

    def _verdict(self) -> str:
        flags = self.flags
        limits = f"loss {flags.loss_tolerance:.0e}, gradient norm {flags.grad_norm_tolerance:.0e}"
        worst_loss = max(relative(ours.loss, theirs.loss) for ours, theirs in self.steps)
        worst_norm = max(relative(ours.grad_norm, theirs.grad_norm) for ours, theirs in self.steps)
        figures = f"largest relative differences: loss {worst_loss:.1e}, gradient norm {worst_norm:.1e} ({limits})"
        if self.agree:
            return f"the two loops agree over {len(self.steps)} steps; {figures}"
        for group in self.groups:
            if group.first is not None:
                return f"the two loops differ, first in {group.first.hf_name}: {group.fault}; {figures}"
        number, (ours, theirs) = next((n, pair) for n, pair in enumerate(self.steps, 1) if not self._step_agrees(*pair))
        if relative(ours.lr, theirs.lr) > 1e-9:
            fault = f"the learning rate, {ours.lr:.6e} here and {theirs.lr:.6e} in the plain loop"
        elif number == 1:
            fault = "how the loss is averaged or the norm is summed: every tensor of the step agrees"
        else:
            fault = "the update: clipping, Adam, weight decay or its groups; the first step's tensors agree"
        return f"the two loops differ, first at step {number}: {fault}; {figures}"


def relative(ours: float, theirs: float) -> float:
    """|a - b| / |b|; infinite where something meets 0, or is no number."""
    if ours == theirs:
        return 0.0
    difference = abs(ours - theirs) / abs(theirs) if theirs else float("inf")
    return difference if difference == difference else float("inf")


def read_ranks(folder: Path) -> list[RankResult]:
    """What the ranks of this job have left; the files are this job's own."""
    return [torch.load(file, weights_only=False, mmap=True) for file in sorted(folder.glob("rank_*.pt"))]


def compare_loops(
    config: CompareConfig, run: ResolvedRun, prepared: Prepared, hf: Path, ranks: Sequence[RankResult]
) -> bool:
    """Run the plain loop, print the comparison, and say whether the two agree.

    Args:
        config: the command's flags.
        run: the run that the ranks have trained, its steps filled in.
        prepared: its data.
        hf: the directory for transformers.
        ranks: from `read_ranks`, or from the ranks themselves.
    """
    device = choose_device(run.config.launch.device)
    print(f"plain loop: transformers {transformers.__version__}, torch {torch.__version__}, {device.kind}", flush=True)
    comparison = run_comparison(config.plain, run, prepared, load_plain_model(hf, device.torch_device), ranks)
    print("\n".join(comparison.lines()), flush=True)
    return comparison.agree


def run_comparison(
    flags: PlainLoopFlags,
    run: ResolvedRun,
    prepared: Prepared,
    model: torch.nn.Module,
    ranks: Sequence[RankResult],
) -> Comparison:
    """Run the plain loop on the packs that the ranks had, and compare every step and the first one's tensors."""
    comparison = Comparison(flags)
    batches = [
        train_batches(prepared, run.batch, dp_rank=rank, consumed_samples=0, seed=run.config.train.seed, num_workers=0)
        for rank in range(run.batch.data)
    ]
    first_steps = [next(each) for each in batches]

    def after_first_backward(activations: Activations) -> None:
        comparison.groups = list(_tensor_groups(flags, run, model, activations, first_steps[0], ranks))

    ours = ranks[0][0]
    again = [_chained(first, rest) for first, rest in zip(first_steps, batches, strict=True)]
    for number, theirs in enumerate(plain_loop(model, again, settings_of(flags, run), after_first_backward)):
        print(f"plain step {number + 1}/{flags.steps}: loss {theirs.loss:.6f}, norm {theirs.grad_norm:.6f}", flush=True)
        comparison.steps.append((ours[number], theirs))
    return comparison


def _chained(first: StepBatch, rest: Iterator[StepBatch]) -> Iterator[StepBatch]:
    yield first
    yield from rest


def settings_of(flags: PlainLoopFlags, run: ResolvedRun) -> PlainSettings:
    """What the plain loop does, by the run's flags."""
    optim = run.config.optim
    return PlainSettings(
        steps=flags.steps,
        optimizer=optim.optimizer,
        lr=optim.lr,
        min_lr=optim.min_lr,
        lr_decay_style=optim.lr_decay_style,
        lr_warmup_iters=warmup_iters(run.config),
        lr_warmup_init=optim.lr_warmup_init,
        lr_decay_iters=decay_iters(run.config),
        lr_wsd_decay_iters=optim.lr_wsd_decay_iters or 0,
        lr_wsd_decay_style=optim.lr_wsd_decay_style,
        weight_decay=optim.weight_decay,
        start_weight_decay=optim.start_weight_decay or 0.0,
        end_weight_decay=optim.end_weight_decay or 0.0,
        weight_decay_incr_style=optim.weight_decay_incr_style,
        train_iters=train_iters(run.config),
        adam_beta1=optim.adam_beta1,
        adam_beta2=optim.adam_beta2,
        adam_eps=optim.adam_eps,
        sgd_momentum=optim.sgd_momentum,
        clip_grad=optim.clip_grad,
    )


def _tensor_groups(
    flags: PlainLoopFlags,
    run: ResolvedRun,
    model: torch.nn.Module,
    activations: Activations,
    step: StepBatch,
    ranks: Sequence[RankResult],
) -> Iterator[Group]:
    """Weights, activations and gradients of the first step."""
    parameters = dict(model.named_parameters())
    snapshots = [snapshot for _, snapshot in ranks]
    weights = Group("weights", flags.tensor_tolerance)
    parts = (part for snapshot in snapshots for part in snapshot.weights)
    for pair in parameter_pairs("weight", parts, lambda name: _data(parameters, name), run.shape):
        weights.add(pair)
    if weights.first is not None:
        weights.fault = fault_of_weights(weights.first, run.shape, lambda name: _data(parameters, name))
    yield weights

    seen = Group("activations of the first micro-batch", flags.tensor_tolerance)
    batch = step.micro_batches[0]
    pairs = activation_pairs(
        (each for snapshot in snapshots for each in snapshot.activations), activations, batch.padding_mask[0]
    )
    for pair in pairs:
        seen.add(pair)
    if seen.first is not None:
        starts = batch.cu_seqlens[:-1][~batch.padding_mask[0][batch.cu_seqlens[:-1].long()]].tolist()
        seen.fault = fault_of_activations(pairs, seen.first, starts, flags.tensor_tolerance)
    yield seen

    gradients = Group("gradients of the first step", flags.tensor_tolerance)
    lengths: list[tuple[float, float]] = []
    parts = (part for snapshot in snapshots for part in snapshot.gradients)
    for pair in parameter_pairs("gradient", parts, lambda name: _gradient(parameters, name), run.shape):
        error = gradients.add(pair)
        if square := float(pair.theirs.square().sum()):
            lengths.append((error, float((pair.ours * pair.theirs).sum()) / square))
    if gradients.first is not None:
        after = "" if seen.first is None else "what the forward pass above points to"
        gradients.fault = after or fault_of_gradients(lengths)
    yield gradients


def _data(parameters: dict[str, torch.nn.Parameter], name: str) -> torch.Tensor | None:
    return parameters[name].detach() if name in parameters else None


def _gradient(parameters: dict[str, torch.nn.Parameter], name: str) -> torch.Tensor | None:
    if name not in parameters:
        return None
    gradient = parameters[name].grad
    return torch.zeros_like(parameters[name]) if gradient is None else gradient
