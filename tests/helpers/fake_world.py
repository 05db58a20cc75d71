"""Builds models on the meta device in a world that does not exist, and prints the parameters that megatron gave each stage.

Run as a program, since it changes where torch makes tensors: `python fake_world.py < cases.json > sizes.json`. A case is
{"sizes": fields of ModelShape, "world": ranks, "layout": arguments of resolve_layout, "stages": pipeline ranks, "grouped":
moe_grouped_gemm}; the answer to each is, for each of those stages, one list a model chunk of [values, is an expert's].
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist


def main() -> None:
    """Read cases, write answers."""
    from mcore_qwen3.runtime import device, groups

    groups.prepare_megatron(device.choose_device("cpu"))
    meta = torch.device("meta")
    torch.cuda.current_device = lambda: meta  # type: ignore[assignment, return-value]
    device.Device.torch_device = property(lambda self: meta)  # type: ignore[assignment, method-assign]
    json.dump([_answer(case) for case in json.load(sys.stdin)], sys.stdout)


def _answer(case: dict[str, Any]) -> list[list[list[tuple[int, bool]]]]:
    from mcore_qwen3.arch import ModelShape, resolve_layout

    sizes = case["sizes"] | {"moe_layers": tuple(case["sizes"].get("moe_layers", ()))}
    shape = ModelShape(**sizes)
    layout = resolve_layout(case["world"], shape=shape, **case["layout"])
    return [_stage(shape, layout, stage, case["grouped"]) for stage in case["stages"]]


def _stage(shape: Any, layout: Any, stage: int, grouped: bool) -> list[list[tuple[int, bool]]]:
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from mcore_qwen3.model.build import build_chunks
    from mcore_qwen3.model.config import ModelOptions
    from mcore_qwen3.runtime import groups

    rank = stage * layout.world_size // layout.pipeline
    dist.init_process_group("fake", rank=rank, world_size=layout.world_size, store=FakeStore())
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
    )
    groups.seed_everything(1)
    chunks = build_chunks(shape, layout, ModelOptions(bf16=True, moe_grouped_gemm=grouped))
    found = [
        [(parameter.numel(), ".experts." in name) for name, parameter in chunk.named_parameters()] for chunk in chunks
    ]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main()
