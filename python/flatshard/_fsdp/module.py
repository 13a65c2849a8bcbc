"""FSDPModule: what `fully_shard` makes of a module's class.

Its `__call__` is a forward of the unit, see forward.py.
"""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import nn

from flatshard import _C
from flatshard._fsdp.backward_pass import BackwardPass
from flatshard._fsdp.conversion import converting, converting_part
from flatshard._fsdp.forward import (
    UnshardHandle,
    make_root,
    outermost,
    root_of,
    run_forward,
)
from flatshard._fsdp.root import Stale
from flatshard._tensor.places import state_of, units_in
from flatshard.torch_versions import (
    call_before_dlpack,
    convert_all_inside,
    converts_inside,
    outside_of_graphs,
)

# Options that do not accept a number, unlike fully_shard's reshard_after_forward.
_WHETHER = ("reshard_after_forward", "reshard_after_backward", "unshard_in_backward")

# Layers inside units, such as for `layer.to_empty()`.
convert_all_inside(converting_part)
# A reshard is an error where the array is still used. Tensor.numpy() needs no call.
call_before_dlpack(_C.note_shared)


def class_before(cls):
    """Returns the class that a module of class `cls` had before fully_shard."""
    mro = cls.__mro__
    return mro[mro.index(FSDPModule) + 1] if FSDPModule in mro else cls


@converts_inside(converting)
class FSDPModule:
    """Methods that `fully_shard` adds to a module, named as in FSDP2.

    Setters act from the next forward or backward on and have to be called with
    equal arguments on all ranks, between two steps.
    """

    def __new__(cls, *args, **kwargs):
        # Only fully_shard makes one, of a module. Objects that modules make of their
        # class (slices of nn.Sequential) have the class from before.
        return class_before(cls)(*args, **kwargs)

    @outside_of_graphs
    def __call__(self, *args, **kwargs):
        return run_forward(self, super().__call__, args, kwargs)

    # -- unshard and reshard -------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """All-gathers the unit's parameters now. Collective.

        They stay unsharded until `reshard()`, or until the next forward or backward
        of the unit reshards them as always. Before the first forward the outermost
        module wrapped so far counts as the one whose forward that will be.

        Args:
            async_op: return a handle at once; call its `wait()` before reading.
        """
        state = self._state()
        if state.root is None:
            make_root(outermost(self))
        try:
            state.core.unshard(not async_op)
        except Stale:
            state.root.renew()
            state.core.unshard(not async_op)
        state.root.trace.report()
        return UnshardHandle(state) if async_op else None

    def reshard(self) -> None:
        """Frees the unit's unsharded parameters."""
        state = self._state()
        if state.root is not None:
            state.core.reshard()

    # -- custom schedules ------------------------------------------------------------

    def backward_pass(
        self, *, is_last: bool = True, interleaved: bool = False
    ) -> BackwardPass:
        """Returns a BackwardPass: a microbatch whose modules run in pieces. Call it on the
        root, once per microbatch.

        Args:
            is_last: whether it is the last of the step: with HSDP the outer axis is reduced
                then, with ZeRO-0 and ZeRO-1 all axes.
            interleaved: while its backward is open, the forward of the next microbatch
                runs. That microbatch's backward runs later. Unless this one is the last
                as well, `.grad`s are complete after the backward of the next.

        Raises:
            NotImplementedError: a model with cuda_graph=True.
        """
        return BackwardPass(root_of(self), is_last, interleaved)

    # -- when gradients are reduced --------------------------------------------------

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether the next backwards reduce. False: they accumulate gradients
        unsharded, without any collective. Sets set_requires_all_reduce likewise.

        Args:
            recurse: also for the units inside this module.
        """
        self._set("sync_gradients", requires_gradient_sync, recurse)
        self._set("all_reduce", requires_gradient_sync, recurse)

    def set_requires_all_reduce(
        self, requires_all_reduce: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether the next backwards reduce gradients over all mesh dimensions.

        Args:
            requires_all_reduce: False: reduce over only the inner mesh dimension (HSDP), or
                accumulate (strategies whose gradients are not sharded).
            recurse: also for the units inside this module.
        """
        self._set("all_reduce", requires_all_reduce, recurse)

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Does nothing, for compatibility with FSDP2: no backward leaves work that the host
        has to wait for, so nothing is to finish after the last one."""

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate gradients without collectives."""
        states = units_in(self)
        former = [(s.policy.sync_gradients, s.policy.all_reduce) for s in states]
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            for state, (sync_gradients, all_reduce) in zip(states, former):
                state.policy.sync_gradients = sync_gradients
                state.policy.all_reduce = all_reduce
                if state.root is not None:
                    state.root.apply_policy(state)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides the sums of reduced gradients by `factor` instead of the number of
        ranks."""
        state = self._state()
        state.policy.divide_factor = float(factor)
        state.apply_to_core()

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of set_gradient_divide_factor."""
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self,
        hook: Callable[[torch.Tensor], None] | None,
        *,
        stream: "torch.cuda.Stream | None" = None,
    ) -> None:
        """Calls `hook(reduced)` with each reduced gradient of this unit. The hook may
        change it in place; None for no hook. Set it between steps.

        Args:
            hook: function of `reduced`, a tensor [n] of the flat gradients of the rows
                that this rank has, with padding, in the dtype of the reduction: after
                the reductions over all mesh dimensions, before the divide factor. Runs
                on the stream of the reductions, on CPUs on their thread. The backward
                raises its errors.
            stream: on which `hook` runs instead. Not with replicas (HSDP), as in FSDP2.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"hook: expected a callable or None, got {hook!r}")
        state = self._state()
        if stream is not None and state.sharding.device_mesh.ndim == 2:
            raise ValueError("stream cannot be set when using native HSDP")
        if stream is not None and hook is not None:
            hook = _runs_on(stream, hook)
        state.policy.reduced_hook = hook
        state.apply_to_core()

    def set_custom_all_gather(self, comm: object) -> None:
        raise NotImplementedError(_own_collectives("set_custom_all_gather"))

    def set_custom_reduce_scatter(self, comm: object) -> None:
        raise NotImplementedError(_own_collectives("set_custom_reduce_scatter"))

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        if enable:
            name = "set_allocate_memory_from_process_group_for_comm"
            raise NotImplementedError(_own_collectives(name))

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sets whether collectives that reduce this unit's gradients only sum. The mean is
        then computed from the sum, in the dtype of the reduction."""
        state = self._state()
        state.policy.sums_only = bool(enable)
        state.apply_to_core()

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Lets the next forward wait for `event`, recorded after the optimizer's step,
        before it all-gathers. Call it on the root, after each step. Its stream waits as
        well, since all-gathers wait for that.
        """
        root_of(self).passes.post_optim_event = event

    def get_pending_gradients(self) -> None:
        raise NotImplementedError(
            "get_pending_gradients is not supported: no gradient is pending after a "
            "backward. Reduced gradients are in .grad when it returns. Gradients that are "
            "not reduced yet, after set_requires_gradient_sync(False), cannot be read"
        )

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int | None, *, recurse: bool = True
    ) -> None:
        """Sets how many reductions may be under way while the next unit's gradients are
        computed; 1 at first. Each additional one needs memory of a unit's gradients, and
        help where reductions are slower than the backward. Call it on the root: one
        number serves all units."""
        n = max_input_buffers
        if isinstance(n, bool) or not isinstance(n, int):
            raise TypeError(f"max_input_buffers: expected an int, got {n!r}")
        if n < 1:
            raise ValueError(f"max_input_buffers: expected at least 1, got {n}")
        if not recurse:
            raise NotImplementedError(
                "set_reduce_scatter_max_input_buffers is not supported with "
                "recurse=False: one number serves all units of a model"
            )
        if not root_of(self).graphs.buffers_on_demand:
            raise NotImplementedError(
                "set_reduce_scatter_max_input_buffers is not supported with "
                "cuda_graph=True or buffers_on_demand=False, where gradients have two "
                "fixed places"
            )
        self._state().policy.max_input_buffers = n
        root_of(self).limit_input_buffers(n)

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Accepts only True, because a parameter without a gradient always counts as zeros
        in the reduction of its unit. Ranks may differ in which parameters these are."""
        if not reduce_scatter_unused_params:
            raise NotImplementedError(
                "set_reduce_scatter_unused_params(False) is not supported: parameters "
                "without a gradient always count as zeros in their unit's reduction"
            )

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """Accepts only True, because reductions always have a separate communicator."""
        if not enable:
            raise NotImplementedError(
                "set_separate_reduce_scatter_group(False) is not supported: reductions "
                "always have a communicator of their own"
            )

    def set_symm_mem_for_comm(self, backend: str | None = "NCCL") -> None:
        raise NotImplementedError(
            "set_symm_mem_for_comm is not supported: for all-gathers and reductions by copy "
            "engines use ModelOptions(copy_engines='auto')"
        )

    def reset_iter_state(self) -> None:
        """Recovers from an exception in forward or backward: ends what is open, reshards
        all weights and drops the gradients of the failed step. The next forward of the
        root does it automatically, too. Call it on the root, on all ranks. Blocks until
        the communication under way has finished."""
        root_of(self).reset()

    def reset_cuda_graphs(self) -> None:
        """Drops the CUDA graphs of ShardOptions(cuda_graph=True); blocks are captured
        again after another warm-up. Use it for changes that a graph cannot see: a
        tensor that is not an argument, parameter or buffer and is elsewhere now. Call it on
        the root, between steps."""
        root_of(self).graphs.reset()

    def finalize_backward(self, async_op: bool = False) -> None:
        raise NotImplementedError(
            "finalize_backward is not supported: each backward reduces at its end, "
            "unless set_requires_gradient_sync(False) or no_sync() is in effect; leave "
            "the call out and let the last backward synchronize"
        )

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        if enabled:
            raise NotImplementedError(
                "set_manual_backward_finalization(True) is not supported: each backward "
                "reduces at its end; no_sync() puts that off to the last one"
            )

    def _set_unshard_async_op(self, async_op: bool, *, recurse: bool = True) -> None:
        """Does nothing and exists for FSDP2's sake: all-gathers always run on a
        separate stream."""

    # -- how long parameters stay unsharded --------------------------------------------

    def set_reshard_after_forward(
        self, reshard_after_forward: bool, recurse: bool = True
    ) -> None:
        """Sets whether parameters are resharded after the forward. False: they stay
        unsharded from forward to backward. True: they are sharded over all ranks, also if
        fully_shard got a number."""
        self._set("reshard_after_forward", reshard_after_forward, recurse)
        self._set("keep_post_forward", False, recurse)

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether parameters are resharded after the backward. False: they stay
        unsharded until they change."""
        self._set("reshard_after_backward", reshard_after_backward, recurse)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        if keep:
            raise NotImplementedError(
                "set_keep_unsharded_storage(True) is not supported: the memory of "
                "released parameters serves other units; "
                "set_reshard_after_forward(False) and set_reshard_after_backward(False) "
                "keep parameters unsharded, and where they are"
            )

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether parameters are all-gathered for the backward. False is for units
        whose backward does not read their parameters (embeddings)."""
        self._set("unshard_in_backward", unshard_in_backward, False)

    def set_modules_to_forward_prefetch(self, modules: list[nn.Module]) -> None:
        """Sets the units to all-gather when this one's forward starts, instead of the units
        that ran next the last time."""
        self._set("forward_prefetch", _states(modules), False)

    def set_modules_to_backward_prefetch(self, modules: list[nn.Module]) -> None:
        """Sets the units to all-gather when this one's backward starts, instead of the
        units that ran next the last time."""
        self._set("backward_prefetch", _states(modules), False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Works as in nn.Module, also between a forward and its backward, where a unit
        may show unsharded parameters: their gradients are the sharded parameters'
        gradients."""
        for state in units_in(self):
            state.show_shards()
        super().zero_grad(set_to_none)  # type: ignore[misc]

    # -- inside ------------------------------------------------------------------------

    def _state(self):
        return state_of(self)

    def _set(self, name, value, recurse):
        if name in _WHETHER and not isinstance(value, bool):
            raise ValueError(f"{name}: expected True or False, got {value!r}")
        for state in units_in(self) if recurse else [self._state()]:
            setattr(state.policy, name, value)
            if state.root is not None:
                state.root.apply_policy(state)

    def __copy__(self):
        """Returns the same unit under another name: a shallow copy shares parameters."""
        copied = object.__new__(type(self))
        # The copy shares roots and forwards with the module that fully_shard wrapped.
        copied.__dict__.update(vars(self), _flatshard_original=self)
        return copied

    def __deepcopy__(self, memo):
        raise AssertionError(
            "FSDP does not support deepcopy: copy the module before fully_shard, or load "
            "its state_dict() into another one. For averaged weights (EMA) copy the model "
            "before fully_shard, AveragedModel(model) does so, and shard both; or keep "
            "copy.deepcopy(model.state_dict())"
        )

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "FSDP does not support pickling: save the module's state_dict(), by torch.save "
            "or torch.distributed.checkpoint"
        )


def _runs_on(stream, hook):
    """Runs `hook` on `stream`. Later work of the caller's stream waits for it."""

    def run(reduced):
        device = torch.get_device_module(reduced.device)
        callers = device.current_stream()
        stream.wait_stream(callers)
        with device.stream(stream):
            hook(reduced)
        callers.wait_stream(stream)

    return run


def _own_collectives(name):
    return (
        f"{name} is not supported: the core launches its collectives on communicators "
        "and separate buffers"
    )


def _states(modules):
    if not isinstance(modules, (list, tuple)):
        raise ValueError(f"expected a list of modules, got {type(modules).__name__}")
    states = []
    for module in modules:
        if state_of(module) is None:
            raise ValueError(
                f"expected modules that fully_shard wrapped, got {type(module).__name__}"
            )
        states.append(state_of(module))
    return states
