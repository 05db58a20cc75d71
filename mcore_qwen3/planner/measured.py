"""Runs whose time is known: what the calibration is fitted to, and what an estimate is compared with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from mcore_qwen3.arch import ModelShape, ParallelLayout
from mcore_qwen3.planner.calibration import Calibration
from mcore_qwen3.planner.gpus import Gpu
from mcore_qwen3.planner.settings import Settings
from mcore_qwen3.planner.step_time import StepTime, estimate_step


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """One run and the tokens it handled.

    Attributes:
        name: how a table calls it.
        source: who measured; runs of one source share hardware, software and habits.
        shape, layout, settings, gpu: the run. Where `natural_routing`, the calibration's imbalance overrules the settings'.
        tokens_per_second_per_gpu: measured, padding included.
        natural_routing: the router was free; else it was forced to balance.
        fitted: whether a calibration may learn from it; else it is only compared.
        facts: numbers of the calibration that this run's software fixes, such as no launches under CUDA graphs.
    """

    name: str
    source: str
    shape: ModelShape
    layout: ParallelLayout
    settings: Settings
    gpu: Gpu
    tokens_per_second_per_gpu: float
    natural_routing: bool = True
    fitted: bool = True
    facts: dict[str, float] = field(default_factory=dict)

    def estimate(self, calibration: Calibration) -> StepTime:
        """What the model says of this run."""
        settings = self.settings
        if self.natural_routing:
            settings = replace(settings, moe_imbalance=calibration.natural_imbalance)
        return estimate_step(self.shape, self.layout, settings, self.gpu, replace(calibration, **self.facts))
