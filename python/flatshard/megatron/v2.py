"""The names of Megatron-FSDP's second version (megatron_fsdp.experimental).

with fully_shard_context() as context:
    for block in model.layers:
        fully_shard(block, mesh, placements)
    fully_shard(model, mesh, placements)
optimizer = torch.optim.AdamW(model.parameters())
fully_shard_optimizer(optimizer)
for i, batch in enumerate(batches):
    with microbatch(context, is_last=i + 1 == len(batches)):
        model(batch).backward()
optimizer.step()
"""

import contextlib
import contextvars
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh

from flatshard._fsdp.fully_shard import fully_shard as _fully_shard
from flatshard._fsdp.module import FSDPModule
from flatshard._fsdp.options import ShardOptions
from flatshard._fsdp.former import former_name
from flatshard._fsdp.wrapping import check_module
from flatshard.megatron.float8 import FullyShardFP8Policy, check_dtype, float8_policy
from flatshard.megatron.placements import Placements, data_parallel_mesh, strategy_of
from flatshard.megatron.precision import (
    FullyShardMixedPrecisionPolicy,
    MixedPrecisionPolicy,
    main_dtype,
)


class FsdpContext:
    """The modules that one `with fully_shard_context()` sharded."""

    def __init__(self, device: torch.device | str | None):
        self.device = device
        # In the order of the calls.
        self._modules: list[weakref.ref[nn.Module]] = []
        # Once the context has been left.
        self._roots: list[weakref.ref[nn.Module]] | None = None
        self._is_last_microbatch = True

    @property
    def is_last_microbatch(self):
        return self._is_last_microbatch

    @is_last_microbatch.setter
    def is_last_microbatch(self, is_last):
        """Sets whether the current microbatch is the last; see `microbatch`."""
        self.ensure_finalized()
        self._is_last_microbatch = bool(is_last)
        for ref in self._roots:
            root = ref()
            if root is not None:
                root.set_requires_all_reduce(self._is_last_microbatch)

    def ensure_finalized(self) -> None:
        if self._roots is None:
            raise RuntimeError(
                "microbatch: leave the fully_shard_context, without an exception, "
                "before its modules run"
            )

    def _register(self, module):
        self._modules.append(weakref.ref(module))
        _contexts[module] = self

    def _finalize(self):
        below = {
            id(child)
            for ref in self._modules
            for child in ref().modules()
            if child is not ref()
        }
        self._roots = [ref for ref in self._modules if id(ref()) not in below]


_contexts: weakref.WeakKeyDictionary[nn.Module, FsdpContext] = (
    weakref.WeakKeyDictionary()
)
_current: contextvars.ContextVar[FsdpContext | None] = contextvars.ContextVar(
    "flatshard_megatron_context", default=None
)


@contextlib.contextmanager
def fully_shard_context(
    device: torch.device | None = None,
    *,
    use_symmetric_memory: bool = False,
    unify_communication_stream: bool = False,
) -> Iterator[FsdpContext]:
    """Returns a context for the calls of `fully_shard` for one or several models.

    Args:
        device: device of the meshes. None: the device that they have.
        use_symmetric_memory, unify_communication_stream: not supported; leave them False.

    Raises:
        RuntimeError: inside another one.
        NotImplementedError: naming the argument.
    """
    if _current.get() is not None:
        raise RuntimeError(
            "fully_shard_context cannot be nested; leave the other first"
        )
    if use_symmetric_memory:
        raise NotImplementedError(
            "use_symmetric_memory=True is not supported: collectives use buffers of "
            "torch's allocator; leave it False"
        )
    if unify_communication_stream:
        raise NotImplementedError(
            "unify_communication_stream=True is not supported: all-gathers and reductions "
            "have a stream each. To save memory, use flatshard.fully_shard with prefetch=0 "
            "(no unit is all-gathered ahead)"
        )
    context = FsdpContext(None if device is None else torch.device(device))
    token = _current.set(context)
    try:
        yield context
    finally:
        _current.reset(token)
    context._finalize()


def fully_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    placements: Placements,
    mixed_precision_policy: MixedPrecisionPolicy | None = None,
    grad_divisor: int = 1,
) -> None:
    """Shards the parameters of `module` that no inner call has sharded, in place.

    Args:
        mesh: the mesh; the axes that `placements` does not name have independent
            copies, and a mesh with such axes needs names for its axes.
        placements: ZeRO-0 to 3 on one axis; on two the same with replicas over the
            first (HSDP).
        mixed_precision_policy: None: MixedPrecisionPolicy().
        grad_divisor: gradients, averaged over the ranks, are divided by it too.

    Raises:
        RuntimeError: outside fully_shard_context.
        ValueError, NotImplementedError: naming the argument.
    """
    check_module(module)
    context = _current.get()
    if context is None:
        raise RuntimeError("fully_shard: expected to be inside fully_shard_context")
    for child in module.modules():
        if isinstance(child, FSDPModule) and _contexts.get(child) is not context:
            raise ValueError(
                f"{type(module).__name__} contains a {type(child).__name__} that was "
                "sharded outside this fully_shard_context; shard both inside one"
            )
    if not grad_divisor > 0:
        raise ValueError(f"grad_divisor: expected a number > 0, got {grad_divisor}")
    strategy, outer = strategy_of(placements)
    mesh = data_parallel_mesh(mesh, placements.dp_axes)
    _check_device(context.device, mesh)
    policy = mixed_precision_policy or MixedPrecisionPolicy()
    if policy.main_params_dtype is None:
        policy = replace(policy, main_params_dtype=torch.float32)
    fp8 = float8_policy(policy)
    with main_dtype(module, policy) as mp_policy:
        check_dtype(fp8, mp_policy, module)
        _fully_shard(
            module,
            mesh=mesh,
            strategy=strategy,
            mp_policy=mp_policy,
            options=ShardOptions(outer=outer, fp8=fp8),
        )
    if grad_divisor != 1:
        sharded = cast(FSDPModule, module)
        sharded.set_gradient_divide_factor(mesh.size() * grad_divisor)
    context._register(module)


@contextlib.contextmanager
def microbatch(context: FsdpContext, is_last: bool) -> Iterator[None]:
    """Returns a context for the forward and backward of one of several microbatches.

    Work that waits for the last one: with HSDP the reduction over the outer axis, with
    ZeRO-0 and ZeRO-1 the only one. ZeRO-2 and 3 on one axis reduce each microbatch.
    Equal on all ranks. Afterwards `context.is_last_microbatch` is what it was.

    Raises:
        RuntimeError: inside fully_shard_context, or after it failed.
    """
    if not isinstance(context, FsdpContext):
        raise TypeError(
            "microbatch: expected what `with fully_shard_context() as context` gives, "
            f"got {type(context).__name__}"
        )
    context.ensure_finalized()
    before = context.is_last_microbatch
    context.is_last_microbatch = is_last
    try:
        yield
    finally:
        context.is_last_microbatch = before


def fully_shard_optimizer(
    optimizer: torch.optim.Optimizer, *, precision_aware: bool = False
) -> None:
    """Checks that `optimizer` was made from sharded parameters. It needs no more:
    the core notices what an optimizer writes, and closures work.

    Args:
        precision_aware: whether the optimizer accepts gradients of a dtype other than the
            dtype of its parameters. They are equal here, so both values are allowed.

    Raises:
        TypeError: it has something other than parameters.
        ValueError: it has parameters as they were before fully_shard.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, nn.Parameter):
                raise TypeError(
                    "fully_shard_optimizer: expected an optimizer of nn.Parameters, "
                    f"got a {type(p).__name__} of shape {tuple(p.shape)}"
                )
            if (name := former_name(p)) is not None:
                raise ValueError(
                    f"fully_shard_optimizer: the optimizer has parameter {name} as it "
                    "was before fully_shard and would not update the model; create it "
                    "from model.parameters() afterwards"
                )


def save_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike,
) -> None:
    """Writes both to a folder, with torch.distributed.checkpoint. Collective."""
    dcp.save(_state(model, optimizer), checkpoint_id=checkpoint_dir)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint_dir: str | os.PathLike,
    *,
    sync_model_weights: bool = True,
) -> None:
    """Reads what save_checkpoint wrote, on any number of ranks. Collective."""
    if not sync_model_weights:
        raise NotImplementedError(
            "sync_model_weights=False is not supported: the next forward always "
            "computes with the loaded parameters"
        )
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=checkpoint_dir)
    dcp_state.set_model_state_dict(model, state["model"])
    dcp_state.set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _state(model, optimizer):
    return {
        "model": dcp_state.get_model_state_dict(model),
        "optimizer": dcp_state.get_optimizer_state_dict(model, optimizer),
    }


def _check_device(device, mesh):
    if device is not None and device.type != mesh.device_type:
        raise ValueError(
            f"fully_shard_context: device {device} is not of the mesh's type, "
            f"{mesh.device_type}"
        )
    if device is not None and device.index not in (None, _current_index(device)):
        raise ValueError(
            f"fully_shard_context: expected the current device, got {device}; call "
            "torch.cuda.set_device first"
        )


def _current_index(device):
    return torch.cuda.current_device() if device.type == "cuda" else 0


__all__ = [
    "FsdpContext",
    "FullyShardFP8Policy",
    "FullyShardMixedPrecisionPolicy",
    "MixedPrecisionPolicy",
    "Placements",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "load_checkpoint",
    "microbatch",
    "save_checkpoint",
]
