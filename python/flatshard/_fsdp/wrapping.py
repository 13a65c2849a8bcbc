"""Modules become FSDPModules, and their methods forwards."""

import functools
import sys
import types

from torch import nn

from flatshard import _C
from flatshard._fsdp.forward import run_forward, wrapped
from flatshard._fsdp.module import FSDPModule, class_before
from flatshard._graphs.unit_graph import UnitGraph
from flatshard._tensor.places import state_of
from flatshard.torch_versions import outside_of_graphs, register_as_sharded


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Makes calls of `module.method_name(...)` all-gather and reshard like a forward.

    Does nothing for a module that fully_shard did not wrap, as in FSDP2.
    """
    if not isinstance(module, FSDPModule):
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ValueError(f"{type(module).__name__} has no method {method_name}")

    @functools.wraps(method)
    def gathering(self, *args, **kwargs):
        return run_forward(self, method, args, kwargs)

    # A plain attribute, so that the class of other instances stays as it is.
    setattr(module, method_name, types.MethodType(gathering, module))


def share_comm_ctx(modules: list[nn.Module]) -> None:
    """Lets the models share the streams of their all-gathers and reductions, so that
    torch's allocator keeps memory for one set of streams. Meant for the chunks of a
    pipeline.

    Args:
        modules: outermost modules that fully_shard wrapped, before their first forward.
    """
    states = []
    for module in modules:
        if not isinstance(module, FSDPModule):
            raise ValueError(
                "share_comm_ctx: expected modules that fully_shard wrapped, got a "
                f"{type(module).__name__}"
            )
        states.append(state_of(module))
        states[-1].life.check("share_streams", kind=type(module).__name__)
    if states:
        streams = _C.CommStreams(states[0].sharding.mesh)
        for state in states:
            state.policy.shared_streams = streams


def wrap_class(module, cuda_graph=False):
    """Puts FSDPModule before the module's class."""
    module.__class__ = _wrapped_class(type(module), False)
    if cuda_graph:
        capture_forward(module)
    wrapped.add(module)
    register_as_sharded(module)


def capture_forward(module, sample=None):
    """Makes the forward of a wrapped module be captured as a CUDA graph, for calls like
    `sample` if any."""
    own = class_before(type(module))
    module.__class__ = _wrapped_class(own, True)
    module.__dict__["_flatshard_graph"] = UnitGraph(sample, _has_own_call(own))


@functools.lru_cache(maxsize=None)
def _wrapped_class(cls, cuda_graph):
    members = {"__module__": cls.__module__}
    if cuda_graph and _has_own_call(cls):
        graphed = _graphed(cls.__call__)

        @outside_of_graphs
        def call(self, *args, **kwargs):
            region = functools.partial(graphed, self)
            return run_forward(self, region, args, kwargs)

        members["__call__"] = call
    elif cuda_graph:
        members["forward"] = _graphed(cls.forward)
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)


def _has_own_call(cls):
    """Returns whether calls of the class do more than its forward and hooks. A layer of
    transformers checkpoints itself there, and the graph has to contain the checkpoint."""
    return cls.__call__ is not nn.Module.__call__


def _graphed(function):
    @outside_of_graphs
    def graphed(self, *args, **kwargs):
        return self.__dict__["_flatshard_graph"].run(self, function, args, kwargs)

    return functools.wraps(function)(graphed)


def check_module(module):
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and (
        type(module).forward is nn.Module.forward
    ):
        raise ValueError(
            "fully_shard does not support containers that do not implement forward, got "
            f"{type(module).__name__}; wrap its children one by one"
        )
    of_torch = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for name, part in module.named_modules():
        if isinstance(part, of_torch) and state_of(part) is None:
            raise ValueError(
                f"module: expected modules that torch's fully_shard did not shard, got "
                f"{name or type(part).__name__} that it did; import fully_shard only from "
                "flatshard"
            )
    if state_of(module) is not None:
        raise AssertionError(
            "Each distinct composable distributed API can only be applied to a module once. "
            f"fully_shard was applied to this {type(module).__name__} before"
        )
