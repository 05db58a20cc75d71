"""What megatron-core 0.19 asks of CUDA, answered for a CPU rank.

megatron-core has no device layer: it calls `torch.cuda` by name and hands the literal "cuda" to factories. On a CPU rank
(and only there) `install` puts the functions below in those places. Each entry of `STAND_INS` says what needs it. Nothing
here runs in a process that uses a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

CPU = torch.device("cpu")
_installed = False


class _Stream:
    """A stream or event of a device that runs everything in order: waiting is never needed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: _Stream) -> None: ...

    def wait_event(self, event: _Stream) -> None: ...

    def record(self, stream: _Stream | None = None) -> None: ...

    def record_event(self, event: _Stream | None = None) -> _Stream:
        return event or self

    def wait(self, stream: _Stream | None = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


_THE_STREAM = _Stream()


@contextlib.contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    yield


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A torch factory that reads device="cuda" as the CPU and never pins memory."""

    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    create.__name__ = getattr(factory, "__name__", "create")
    return create


def _tensor_type(original: Callable[..., Any]) -> Callable[..., Any]:
    """`tensor.type()` with the name that the same tensor would have on a GPU; conversions are left alone."""

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and not args and not kwargs:
            return original(self).replace("torch.", "torch.cuda.", 1)
        return original(self, dtype, *args, **kwargs)

    return tensor_type


def _identity(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


def _split_sizes_as_numpy(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _cpu_rng_state(*args: Any, **kwargs: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    torch.set_rng_state(state)


def _share_storage(output: torch.Tensor, recomputed: torch.Tensor) -> None:
    """Give a released output its values back; megatron compiles a C++ extension that does it without a copy."""
    storage = output.untyped_storage()
    storage.resize_(recomputed.untyped_storage().nbytes())
    storage.copy_(recomputed.untyped_storage())


# (where, name, stand-in, what needs it)
STAND_INS: tuple[tuple[Any, str, Any, str], ...] = (
    (torch.cuda, "current_device", lambda: CPU, "about 200 factories: tensor_parallel, p2p, router, rotary embedding"),
    (torch.cuda, "synchronize", _nothing, "dist_checkpointing, p2p without overlap"),
    (torch.cuda, "empty_cache", _nothing, "optimizer state reload"),
    (torch.cuda, "manual_seed", torch.manual_seed, "the random state tracker"),
    (torch.cuda, "get_rng_state", _cpu_rng_state, "the random state tracker and checkpointed layers"),
    (torch.cuda, "set_rng_state", _set_cpu_rng_state, "the random state tracker and checkpointed layers"),
    (torch.cuda.random, "get_rng_state", _cpu_rng_state, "the random state tracker, through the module"),
    (torch.cuda.random, "set_rng_state", _set_cpu_rng_state, "the random state tracker, through the module"),
    (torch.cuda, "Stream", _Stream, "the all-to-all token dispatcher's side stream"),
    (torch.cuda, "Event", _Stream, "the all-to-all token dispatcher"),
    (torch.cuda, "current_stream", lambda *a: _THE_STREAM, "gradient buckets and the token dispatcher"),
    (torch.cuda, "stream", _stream_context, "gradient buckets and the token dispatcher"),
    (torch.cuda, "is_current_stream_capturing", lambda: False, "CUDA-graph guards"),
    (torch.cuda, "get_device_capability", lambda *a: (0, 0), "guards for new GPUs"),
    (torch.Tensor, "cuda", _identity, "optimizer state and loaded shards"),
    (torch.Tensor, "record_stream", _nothing, "the token dispatcher"),
    (torch.nn.Module, "cuda", _identity, "module builders"),
    (torch.Tensor, "type", _tensor_type(torch.Tensor.type), "the distributed optimizer tells parameters by type name"),
    (torch, "zeros", _on_cpu(torch.zeros), 'literal device="cuda": token counts of the schedules, clipping'),
    (torch, "ones", _on_cpu(torch.ones), 'literal device="cuda"'),
    (torch, "empty", _on_cpu(torch.empty), 'literal device="cuda": checkpoint exchange; pin_memory'),
    (torch, "empty_like", _on_cpu(torch.empty_like), 'literal device="cuda": checkpoint exchange'),
    (torch, "tensor", _on_cpu(torch.tensor), 'literal device="cuda": overflow buffers; pin_memory of rope'),
    (torch, "arange", _on_cpu(torch.arange), 'literal device="cuda"'),
)


def install() -> None:
    """Put every stand-in in place, once per process.

    Raises:
        RuntimeError: the process has already started CUDA; stand-ins would hide a real device.
    """
    global _installed
    if _installed:
        return
    if torch.cuda.is_initialized():
        raise RuntimeError("CPU stand-ins were asked for in a process that has started CUDA")
    # torch.compile of megatron's small fused functions takes minutes on CPU and gains nothing: the plain functions run.
    from megatron.core import jit

    jit.disable_jit_fuser()
    # `with torch.device(...)` acts on a set of factories that torch makes at its first use: it must hold torch's own, or
    # models that transformers loads under torch.device("meta") keep weights that were never read.
    with CPU:
        torch.empty(0)
    for owner, name, stand_in, _reason in STAND_INS:
        setattr(owner, name, stand_in)
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    # Selective recompute of norms and activations; the extension would need a C++ compiler on the user's machine.
    megatron_random._get_share_storage = lambda: _share_storage

    # all_to_all wants split sizes as plain numbers; megatron converts them only when they come from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = _split_sizes_as_numpy
    _installed = True
