"""Functions about the CPU stand-ins that run inside a rank."""

from __future__ import annotations

from typing import Any

import torch


def name_of(owner: Any) -> str:
    """`torch.cuda` for the module, `torch.Tensor` for the class."""
    name = getattr(owner, "__qualname__", None)
    return owner.__name__ if name is None else f"{owner.__module__}.{name}"


def missing_stand_ins() -> list[str]:
    """Stand-ins that are not in place in this rank."""
    from megatron.core import jit
    from megatron.core.transformer.moe import token_dispatcher

    from mcore_qwen3.runtime import cpu_standins

    wanted = [(owner, name, stand_in) for owner, name, stand_in, _ in cpu_standins.STAND_INS]
    wanted.append((token_dispatcher, "maybe_move_tensor_to_cpu", cpu_standins._split_sizes_as_numpy))
    wanted.append((jit, "jit_fuser", jit.noop_decorator))
    return [f"{name_of(owner)}.{name}" for owner, name, stand_in in wanted if getattr(owner, name) is not stand_in]


def what_the_stand_ins_give() -> dict[str, Any]:
    """Answers of a CPU rank to what megatron asks of CUDA."""
    made = {
        "zeros": torch.zeros(2, device="cuda"),
        "ones": torch.ones(2, device=torch.device("cuda", 0)),
        "empty": torch.empty(2, device="cuda", pin_memory=True),
        "empty_like": torch.empty_like(torch.zeros(2), device="cuda"),
        "tensor": torch.tensor([0, 1], device="cuda"),
        "arange": torch.arange(2, device="cuda"),
        "current_device": torch.zeros(2, device=torch.cuda.current_device()),
        "cuda()": torch.zeros(2).cuda(),
        "module": torch.nn.Linear(1, 1).cuda().weight,
    }
    torch.cuda.manual_seed(3)
    state = torch.cuda.get_rng_state()
    first = torch.rand(4)
    torch.cuda.random.set_rng_state(state)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        again = torch.rand(4)
    torch.cuda.synchronize()
    return {
        "devices": {name: tensor.device.type for name, tensor in made.items()},
        "meta": torch.zeros(2, device="meta").device.type,  # only "cuda" is read as the CPU
        "arange": made["arange"].tolist(),
        "random state returns": torch.equal(first, again),
        "type": {str(dtype): torch.zeros(1, dtype=dtype).type() for dtype in (torch.float32, torch.bfloat16)},
        "converted": str(torch.zeros(1).type(torch.float64).dtype),
        "capturing": torch.cuda.is_current_stream_capturing(),
    }


def split_sizes() -> dict[str, Any]:
    """What the token dispatcher is given for all_to_all: plain numbers, and tensors where it wants tensors."""
    from megatron.core.transformer.moe.token_dispatcher import maybe_move_tensor_to_cpu

    counts = torch.tensor([3, 0, 5])
    return {
        "numpy": type(maybe_move_tensor_to_cpu(counts, as_numpy=True)).__name__,
        "tensor": type(maybe_move_tensor_to_cpu(counts)).__name__,
        "none": maybe_move_tensor_to_cpu(None, as_numpy=True),
    }


def logits_of_transformers(directory: str, dtype: torch.dtype) -> torch.Tensor:
    """Load a model by transformers, on one thread, and run it on fixed tokens."""
    from transformers import AutoModelForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        with torch.no_grad():
            return model(torch.arange(3, 40)[None], use_cache=False).logits
    finally:
        torch.set_num_threads(threads)


def group_timeouts(seconds: float) -> set[float]:
    """The time-outs of all groups of a layout that was started with that one."""
    import torch.distributed as dist
    from helpers import training
    from megatron.core import parallel_state

    from mcore_qwen3.arch.layout import ParallelLayout
    from mcore_qwen3.runtime import groups

    if training._started is not None:
        groups.stop_model_parallel()
        training._started = None
    world = dist.get_world_size()
    layout = ParallelLayout(
        world_size=world,
        tensor=1,
        pipeline=1,
        expert=1,
        expert_tensor=1,
        data=world,
        expert_data=world,
        sequence_parallel=False,
        is_moe=False,
        stages=((2,),),
    )
    groups.start_model_parallel(layout, seconds)
    try:
        made = [group for group in parallel_state._global_process_group_list if group is not None]
        backends = [group._get_backend(torch.device("cpu")) for group in made]
        assert len(made) > 5
        return {backend.options._timeout.total_seconds() for backend in backends}
    finally:
        groups.stop_model_parallel()
