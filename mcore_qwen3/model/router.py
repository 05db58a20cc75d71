"""The router: top-k softmax routing whose auxiliary losses do not depend on how a batch is cut or how much of it is trained.

Megatron's top-k router, with its auxiliary losses replaced. Under per-token loss megatron divides every gradient of a step
by the step's trained tokens, and undoes that for the auxiliary losses with the micro-batch's routed positions: so masking
prompts or padding changes their weight (with 10 % of the tokens trained it is ten times too strong). Here the factor is
exact (`Step.scale`), and each loss is a sum over ranks of what each rank's own tokens contribute.

Shapes: T tokens of this rank, E experts, R rows (packs) of the micro-batch. f_e: share of the routed (token, choice) pairs
that went to expert e, they sum to 1; P_e: mean probability of e. The balance loss of a layer is E * sum_e f_e * P_e (Fedus
et al. 2021, equation 4, with shares summing to 1 for any top-k).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    apply_router_token_dropping,
    topk_routing_with_score_function,
)
from megatron.core.transformer.moe.router import TopKRouter

from mcore_qwen3.runtime.device import current_device

BALANCE, Z, ROUTED, DROPPED = "balance_loss", "z_loss", "routed", "dropped"


@dataclass(frozen=True, slots=True)
class Step:
    """What the routers must know about the optimizer step they run in.

    Attributes:
        scale: trained tokens / (micro-batches x data-parallel ranks): a loss attached with it has, after megatron's
            division by the trained tokens, the weight of a mean over the step's micro-batches.
        replicas: data-parallel ranks.
        row_length: tokens of a row on the ranks of one context-parallel group together.
        rows: rows of a micro-batch.
    """

    scale: float
    replicas: int
    row_length: int
    rows: int


_step: Step | None = None
_recorded: dict[str, torch.Tensor] = {}
_expert_tokens: dict[int, torch.Tensor] = {}  # layer, from 0 -> this rank's tokens of each expert, [E]


def start_step(step: Step) -> None:
    """Tell all routers of this process the coming step; statistics start anew."""
    global _step
    _step = step
    _recorded.clear()
    _expert_tokens.clear()


def _record(name: str, value: torch.Tensor) -> None:
    """Add to what this rank has seen in this step."""
    value = value.detach().double()
    _recorded[name] = _recorded[name] + value if name in _recorded else value


class BalancedRouter(TopKRouter):
    """Softmax top-k routing; see the module's docstring for what differs from megatron's."""

    _counted_in: Step | None = None

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose experts.

        Args:
            logits: [tokens, 1, E], of this rank's tokens.
            padding_mask: [tokens, 1], True = padding: left out of every number of the router.

        Returns:
            Probabilities [T, E] (0 where not chosen) and the choice as booleans [T, E].
        """
        logits_TE = logits.view(-1, self.config.num_moe_experts)
        valid_T = None if padding_mask is None else ~padding_mask.reshape(-1)
        learning = self.training and torch.is_grad_enabled()
        if learning and self.config.moe_z_loss_coeff:
            logits_TE = self._with_z_loss(logits_TE, valid_T)
        probs_TE, chosen_TE = topk_routing_with_score_function(
            logits_TE, self.topk, use_pre_softmax=self.config.moe_router_pre_softmax, score_function="softmax"
        )
        if learning and self.is_aux_loss_enabled():
            probs_TE = self._with_balance_loss(probs_TE, logits_TE, chosen_TE, valid_T)
        if learning:  # under recompute this is the second forward pass alone
            self._count_tokens(chosen_TE, valid_T)
        if self.config.moe_expert_capacity_factor is not None:
            probs_TE, chosen_TE = self._within_capacity(probs_TE, chosen_TE, valid_T)
        return probs_TE, chosen_TE

    def _count_tokens(self, chosen_TE: torch.Tensor, valid_T: torch.Tensor | None) -> None:
        """Add the tokens that chose each expert, before any is dropped."""
        tokens_E = (chosen_TE if valid_T is None else chosen_TE & valid_T[:, None]).sum(dim=0)
        assert self.layer_number is not None
        layer = self.layer_number - 1
        _expert_tokens[layer] = _expert_tokens[layer] + tokens_E if layer in _expert_tokens else tokens_E

    def _sum_over_sequence(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold the other parts of the same rows (sequence and context parallel)."""
        dist.all_reduce(tensor, group=self.tp_cp_group)
        return tensor

    def _attach(self, carrier: torch.Tensor, name: str, loss: torch.Tensor, coefficient: float) -> torch.Tensor:
        """Give this rank's part of an auxiliary loss its gradient, and the log its value."""
        assert _step is not None, "start_step was not called"
        _record(name, loss)
        attached: torch.Tensor = MoEAuxLossAutoScaler.apply(carrier, loss * (coefficient * _step.scale))
        return attached

    def _with_z_loss(self, logits_TE: torch.Tensor, valid_T: torch.Tensor | None) -> torch.Tensor:
        """Add coefficient x mean over tokens of logsumexp(logits)^2 (Zoph et al. 2022, equation 5)."""
        squares_T = torch.logsumexp(logits_TE.float(), dim=-1).square()
        valid_T = torch.ones_like(squares_T, dtype=torch.bool) if valid_T is None else valid_T
        tokens = self._sum_over_sequence(valid_T.sum().float()).clamp(min=1)
        return self._attach(logits_TE, Z, (squares_T * valid_T).sum() / tokens, self.config.moe_z_loss_coeff)

    def _with_balance_loss(
        self,
        probs_TE: torch.Tensor,
        logits_TE: torch.Tensor,
        chosen_TE: torch.Tensor,
        valid_T: torch.Tensor | None,
    ) -> torch.Tensor:
        """Add the balance loss of the kind the run asks for."""
        scores_TE = logits_TE.softmax(dim=-1, dtype=torch.float32)
        chosen_TE = chosen_TE if valid_T is None else chosen_TE & valid_T[:, None]
        scores_TE = scores_TE if valid_T is None else scores_TE * valid_T[:, None]
        kind, coefficient = self.routing_type, self.config.moe_aux_loss_coeff
        row_T = self._rows_of_tokens(len(scores_TE)) if kind == "seq_aux_loss" else None
        count_RE, score_RE = _sum_rows(chosen_TE.float(), row_T), _sum_rows(scores_TE, row_T)
        count_RE = self._sum_over_sequence(count_RE)
        if kind == "global_aux_loss":
            dist.all_reduce(count_RE, group=parallel_state.get_data_parallel_group())
        tokens_R1 = count_RE.sum(dim=1, keepdim=True) / self.topk
        if kind == "global_aux_loss":
            count_RE = self._since_step_began(count_RE)
            # Each data-parallel rank adds its tokens' part of one mean, not a mean of its own.
            score_RE = score_RE * parallel_state.get_data_parallel_world_size()
        share_RE = count_RE / count_RE.sum(dim=1, keepdim=True).clamp(min=1)
        loss_R = self.config.num_moe_experts * (share_RE * score_RE / tokens_R1.clamp(min=1)).sum(dim=1)
        return self._attach(probs_TE, BALANCE, loss_R.mean(), coefficient)

    def _rows_of_tokens(self, tokens: int) -> torch.Tensor:
        """The row of each of this rank's tokens.

        Rows lie one behind the other; context parallel takes an equal part of each, sequence parallel cuts what it leaves
        into equal runs.
        """
        assert _step is not None, "start_step was not called"
        per_row = _step.row_length // self.cp_group.size()
        first = self.tp_group.rank() * tokens if self.config.sequence_parallel else 0
        return torch.div(torch.arange(first, first + tokens, device=current_device()), per_row, rounding_mode="floor")

    def _since_step_began(self, count_RE: torch.Tensor) -> torch.Tensor:
        """Counts of all micro-batches of this step up to this one: only totals matter, however tokens are spread."""
        if self._counted_in is not _step:
            self._counted_in, self._total_counts = _step, torch.zeros_like(count_RE)
        self._total_counts = self._total_counts + count_RE
        return self._total_counts

    def _within_capacity(
        self, probs_TE: torch.Tensor, chosen_TE: torch.Tensor, valid_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Drop what is over each expert's capacity, ceil(tokens x top-k / E x factor) of this rank's tokens."""
        if valid_T is not None:
            probs_TE, chosen_TE = probs_TE * valid_T[:, None], chosen_TE & valid_T[:, None]
        config = self.config
        assert config.moe_expert_capacity_factor is not None
        if config.moe_pad_expert_input_to_capacity:
            kept_probs, kept = apply_router_token_dropping(
                probs_TE,
                chosen_TE,
                self.topk,
                config.moe_expert_capacity_factor,
                config.moe_token_drop_policy,
                pad_to_capacity=True,
            )
        else:
            routed = int(chosen_TE.sum())
            capacity = math.ceil(routed / config.num_moe_experts * config.moe_expert_capacity_factor)
            kept = chosen_TE & _first_in_line(probs_TE, chosen_TE, capacity, config.moe_token_drop_policy)
            kept_probs = probs_TE * kept
        if self.training and torch.is_grad_enabled():
            _record(ROUTED, chosen_TE.sum())
            _record(DROPPED, (chosen_TE & ~kept).sum())
        return kept_probs, kept


def _sum_rows(values_TE: torch.Tensor, row_T: torch.Tensor | None) -> torch.Tensor:
    """Sum over the tokens of each row, [R, E]; one row for all if no rows are given."""
    if row_T is None:
        return values_TE.sum(dim=0, keepdim=True)
    assert _step is not None
    return values_TE.new_zeros(_step.rows, values_TE.shape[1]).index_add(0, row_T, values_TE)


def _first_in_line(probs_TE: torch.Tensor, chosen_TE: torch.Tensor, capacity: int, policy: str) -> torch.Tensor:
    """True for the `capacity` first tokens of each expert: by probability, or by position in the row."""
    tokens = len(probs_TE)
    if capacity >= tokens:
        return torch.ones_like(chosen_TE)
    position_T1 = torch.arange(tokens, 0, -1, device=probs_TE.device, dtype=torch.float32)[:, None]
    score_TE = probs_TE.float() if policy == "probs" else position_T1.expand(probs_TE.shape)
    places = score_TE.masked_fill(~chosen_TE, -1.0).topk(capacity, dim=0).indices
    return torch.zeros_like(chosen_TE).scatter(0, places, True)


def reduce_metrics(num_microbatches: int, moe_layers: int) -> dict[str, float]:
    """What the routers recorded in this step, the same on every rank. Collective.

    Returns:
        "balance_loss" and "z_loss": means over MoE layers and micro-batches (without coefficient); "dropped_share": share of
        the routed (token, choice) pairs dropped by the capacity limit; each only where the run has it.
    """
    assert _step is not None, "start_step was not called"
    names = (BALANCE, Z, ROUTED, DROPPED)
    # With a flag each: a pipeline stage without MoE layers has recorded nothing.
    sums = torch.zeros(2, len(names), dtype=torch.float64, device=current_device())
    for index, name in enumerate(names):
        if name in _recorded:
            sums[0, index], sums[1, index] = _recorded[name], 1.0
    dist.all_reduce(sums)
    totals = {name: float(sums[0, index]) for index, name in enumerate(names) if sums[1, index] > 0}
    means = moe_layers * num_microbatches * _step.replicas
    found = {name: totals[name] / means for name in (BALANCE, Z) if name in totals}
    if ROUTED in totals:
        found["dropped_share"] = totals[DROPPED] / max(1.0, totals[ROUTED])
    return found


def reduce_expert_tokens(num_layers: int, num_experts: int) -> torch.Tensor:
    """Tokens that chose each expert in this step, int64 [layers, E] on the CPU of every rank. Collective.

    Each token counts on one rank alone: sequence and context parallel cut the rows, expert-parallel ranks have rows of
    their own. Rows of layers without experts are 0.
    """
    tokens_LE = torch.zeros(num_layers, num_experts, dtype=torch.int64, device=current_device())
    for layer, tokens_E in _expert_tokens.items():
        tokens_LE[layer] = tokens_E
    dist.all_reduce(tokens_LE)
    return torch.tensor(tokens_LE.tolist())


def largest_load(tokens_LE: torch.Tensor) -> float:
    """Tokens of the busiest expert over the mean of its layer, of the layer where that is largest; 1 = even, E = worst."""
    mean_L = tokens_LE.double().mean(dim=1)
    return float((tokens_LE.amax(dim=1) / mean_L.clamp(min=1e-9)).max())
