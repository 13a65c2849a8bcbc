"""Forwards of wrapped modules: which root they have, and the events that the core gets.

Everything around a unit's forward happens outside `nn.Module.__call__`: hooks of the
user see unsharded parameters, compiled forwards contain no trace of sharding, and an
exception on the way is noticed.
"""

import weakref

from torch import nn

from flatshard._fsdp.casts import cast_inputs, cast_output
from flatshard._fsdp.root import Root, Stale
from flatshard._fsdp.unit import UnitState
from flatshard._graphs.checks import refuse_foreign_capture
from flatshard._tensor.places import state_of
from flatshard._tensor.writes import writes
from flatshard.torch_versions import (
    has_dispatch_mode,
    never_compiled,
    outside_of_graphs,
    wait_for_collectives,
)

# Every module that is wrapped now.
wrapped: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def without_compile(module):
    """Returns the module that torch.compile wrapped; otherwise `module`."""
    if state_of(module) is not None:
        return module
    return getattr(module, "_orig_mod", module)


def root_of(module):
    """Returns the Root of the outermost module that fully_shard wrapped."""
    state = state_of(module)
    if state is None:
        raise ValueError(
            "expected the outermost module that fully_shard wrapped, got a "
            f"{type(module).__name__} that it did not wrap"
        )
    if state.root is None:
        make_root(module)
    if state.core.number != 0:
        raise ValueError(
            f"expected the outermost module that fully_shard wrapped, got unit "
            f"{state.name} of one"
        )
    state.root.check_replaced()
    return state.root


def outermost(module):
    """Returns the wrapped module that `module` is part of and that is part of no
    other."""
    around = [m for m in wrapped if any(child is module for child in m.modules())]
    return max(around, key=lambda m: sum(1 for _ in m.modules()))


@outside_of_graphs
def run_forward(module, function, args, kwargs):
    """Returns function(*args, **kwargs) as a forward of the unit of `module`."""
    state = state_of(module)
    root = state.root
    if root is None:
        root = make_root(module)
    passes = root.passes
    if passes.concern_forwards:
        if passes.running is not None:
            return passes.running.run(module, function, args, kwargs)
        passes.refuse_between(module)
    if root.ranks.on_gpu:
        refuse_foreign_capture()
    policy = state.sharding.mp_policy
    if policy.param_dtype is not None:
        args, kwargs = cast_inputs(policy, args, kwargs)
    args = wait_for_collectives(module, args)
    core, modules = state.core, state.modules
    if writes.total != root.seen_writes.number or writes.lent:
        root.seen_writes.before_inner_forward(state)
    try:
        core.forward_begin(core.number, args, kwargs)
        of_several = len(modules) > 1
        if of_several and not modules.running:
            # Only modules that still exist count.
            modules.running.update(id(m) for r in modules if (m := r()) is not None)
        output = function(*args, **kwargs)
        if policy.output_dtype is not None:
            output = cast_output(policy, output)
        if of_several:
            # Its weights stay for those still to run.
            modules.running.discard(id(module))
        core.forward_end(core.number, output, of_several and bool(modules.running))
        if has_dispatch_mode():
            root.trace.report_after_forward(state)
    except Stale:
        core.forward_error()
        root.renew()
        return run_forward(module, function, args, kwargs)
    except BaseException:
        core.forward_error()
        raise
    return output


@never_compiled
def make_root(module):
    state = state_of(module)
    if len(state.modules) > 1:
        kinds = ", ".join(type(m()).__name__ for m in state.modules)
        raise RuntimeError(
            f"the outermost unit has several modules ({kinds}), so none of them sees "
            "where a step starts: apply fully_shard also to the module that calls them, "
            "and call that module"
        )
    return Root(state.modules[0](), state)  # a shallow copy is none of these


class UnshardHandle:
    """Waits for an `unshard(async_op=True)`."""

    def __init__(self, state: UnitState):
        self._state: UnitState | None = state

    def wait(self) -> None:
        """Waits until the unit's parameters are unsharded for kernels that are
        launched later. Does not block the host on a GPU."""
        if self._state is not None and self._state.root is not None:
            self._state.core.unshard()
        self._state = None
