"""Private names of torch that the package uses, and differences between torch's versions.

Each stands here with its reason. The reasons for DTensors are in _tensor/. A test of
tests/python/torch_names_test.py reports the name that another torch changed.
docs/reference/compatibility.md lists the versions that were tried.
"""

import contextlib
import functools
import sys
from operator import attrgetter

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.multiprocessing.reductions import reduce_tensor
from torch.nn.modules import module as nn_module

# They find the tensors in nested arguments. Libraries register containers only with this
# module, such as transformers its outputs.
from torch.utils._pytree import (  # noqa: F401
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def default_reduce_dtype(param_dtype, dtype):
    """Returns FSDP2's meaning of reduce_dtype=None for a parameter of `dtype`: up to 2.14
    the dtype it is all-gathered in, since 2.15 its own."""
    if VERSION < (2, 15) and param_dtype is not None:
        return param_dtype
    return dtype


# -- single modules --------------------------------------------------------------------

# {name: parameter or None}. The core and the package put shards and unsharded parameters
# there as they are. setattr would check and register them in each forward.
parameters_of = attrgetter("_parameters")
# {name: buffer or None}. Callers put buffers there that were moved.
buffers_of = attrgetter("_buffers")
# {name: module} and {id: hook}, the same objects as long as the module exists. Each forward
# checks whether a child was replaced or a hook was added.
children_of = attrgetter("_modules")
forward_hooks = attrgetter("_forward_hooks")
# All hooks that a module calls. A replay calls none of them.
hooks_of_module = attrgetter(
    "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"
)
# The same of hooks of all modules.
GLOBAL_HOOKS = attrgetter(
    "_global_forward_pre_hooks",
    "_global_forward_hooks",
    "_global_backward_pre_hooks",
    "_global_backward_hooks",
)(nn_module)


# The hooks of parallelize_module and of transformers' tp_plan have these modules: they
# redistribute arguments and results, and do the same in each call.
_PLACING = {
    "torch.distributed.tensor._api",
    "torch.distributed.tensor.parallel.style",
    "transformers.integrations.tensor_parallel",
}


def places_tensors(hook):
    """Returns whether a module's hook is one of tensor parallelism."""
    function = hook.func if isinstance(hook, functools.partial) else hook
    return getattr(function, "__module__", None) in _PLACING


def persistent_buffers(module):
    """Returns [(name, buffer)]. state_dict() would call the user's hooks."""
    left_out = module._non_persistent_buffers_set
    named = module._buffers.items()
    return [(n, b) for n, b in named if b is not None and n not in left_out]


def converts_inside(context):
    """Makes a class decorator for a mixin of nn.Module. `to`, `cuda`, `to_empty` and the
    like all call `_apply`, and run inside context(module, function of a tensor,
    whether modules below are converted)."""

    def decorate(cls):
        def _apply(self, fn, recurse=True):
            with context(self, fn, recurse):
                return super(cls, self)._apply(fn, recurse)

        cls._apply = _apply
        return cls

    return decorate


def convert_all_inside(context):
    """Lets every nn.Module convert its own parameters inside context(module, function
    of a tensor). torch has no hook for it."""
    convert = nn.Module._apply

    @functools.wraps(convert)
    def _apply(self, fn, recurse=True):
        with context(self, fn):
            return convert(self, fn, recurse)

    nn.Module._apply = _apply  # type: ignore[method-assign]


def register_as_sharded(module):
    """Makes composable replicate() ignore the module and the modules below it. torch has
    no public function for it."""
    # Imported here: the package around it imports DistributedDataParallel.
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    registry = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry["fully_shard"] = RegistryItem()


# -- tensors ---------------------------------------------------------------------------


def grad_dtype_of(tensor):
    """Returns the dtype that the user requested for the gradient of a leaf; None: any."""
    return tensor.grad_dtype if tensor.requires_grad else tensor.dtype


# Without this context, `.grad` and `.requires_grad` of a tensor subclass go through
# __torch_function__, at twenty times the price, for each parameter of the model.
plain_attributes = torch._C.DisableTorchFunctionSubclass

# Dictionaries of hooks. The handles that users have remove hooks from them.
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of_tensor(tensor):
    """Returns {attribute: dictionary} of those that are not empty."""
    found = {name: getattr(tensor, name) for name in _TENSOR_HOOKS}
    return {name: hooks for name, hooks in found.items() if hooks}


def gradient_hooks(tensor):
    """Returns the hooks of register_hook."""
    return list((tensor._backward_hooks or {}).values())


def has_accumulation_hooks(tensor):
    """Returns whether it has hooks of register_post_accumulate_grad_hook."""
    return bool(tensor._post_accumulate_grad_hooks)


def set_hooks_of_tensor(tensor, found):
    for name, hooks in found.items():
        setattr(tensor, name, hooks)


def forget_hooks_of_tensor(tensor):
    set_hooks_of_tensor(tensor, dict.fromkeys(_TENSOR_HOOKS))


# A context: writes inside do not count for autograd. FSDP2's protocol of subclasses writes
# again what a backward saved.
keeps_version = torch.autograd._unsafe_preserve_version_counter


def version_of(tensor):
    """Returns the counter of writes that autograd checks; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


def drop_values(tensor, text):
    """Frees the memory of `tensor`. Reading it raises RuntimeError(text)."""
    tensor.data = tensor.detach().new_empty(()).expand(tensor.shape)
    torch._C._set_storage_data_ptr_access_error_msg(
        tensor.untyped_storage()._cdata, text
    )


def call_before_dlpack(function):
    """Calls `function(tensor)` before another library gets the memory of a tensor by
    DLPack. torch has no hook for it."""
    for owner, name in (
        (torch.Tensor, "__dlpack__"),
        (torch, "to_dlpack"),
        (torch.utils.dlpack, "to_dlpack"),
    ):
        setattr(owner, name, _before(function, getattr(owner, name)))


def _before(first, call):
    @functools.wraps(call)
    def around(tensor, *args, **kwargs):
        first(tensor)
        return call(tensor, *args, **kwargs)

    return around


# -- what runs around a forward --------------------------------------------------------


def in_backward():
    """Returns whether the autograd engine runs on this thread, as in a recomputed forward."""
    return torch._C._current_graph_task_id() >= 0


def has_saved_tensor_hooks():
    """Returns whether hooks on saved tensors are active, of a checkpoint or offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_dispatch_mode():
    """Returns whether a TorchDispatchMode is active and sees each operation."""
    return torch._C._len_torch_dispatch_stack() > 0


def comm_debug_modes():
    """Returns the CommDebugModes that are active, the outermost first."""
    if not has_dispatch_mode():
        return []
    # Imported here: most programs never need it.
    from torch.distributed.tensor.debug import CommDebugMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    stack = _get_current_dispatch_mode_stack()
    return [mode for mode in stack if isinstance(mode, CommDebugMode)]


def without_dispatch_modes():
    """Returns a context that hides operations from each TorchDispatchMode."""
    if not has_dispatch_mode():
        return contextlib.nullcontext()
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def queue_callback(function):
    """Calls `function` at the end of the backward that runs, after what was queued before."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def choose_inputs_by(choose):
    """Backwards with chosen inputs, as backward(inputs=...) and torch.autograd.grad run
    them, are choose(run, inputs, allow_unused, accumulate). `run(inputs,
    allow_unused)` runs the engine. torch asks no function of a tensor in `inputs`."""
    variable = torch.autograd.Variable

    class Engine(type(variable._execution_engine)):
        def run_backward(
            self,
            tensors,
            grads,
            keep_graph,
            create_graph,
            inputs=(),
            allow_unreachable=False,
            accumulate_grad=False,
        ):
            def run(inputs, allow_unused):
                return super(Engine, self).run_backward(
                    tensors,
                    grads,
                    keep_graph,
                    create_graph,
                    inputs,
                    allow_unreachable=allow_unused,
                    accumulate_grad=accumulate_grad,
                )

            if not inputs:
                return run(inputs, allow_unreachable)
            return choose(run, inputs, allow_unreachable, accumulate_grad)

    variable._execution_engine = Engine()


def leaf_of_edge(edge):
    """Returns the leaf whose gradient a torch.autograd.graph.GradientEdge is, or None."""
    return getattr(edge.node, "variable", None)


def in_functional_call():
    """Returns whether torch.func.functional_call runs. It replaces parameters of modules.
    Slow."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.nn.utils.stateless":
            return True
        frame = frame.f_back
    return False


# Returns whether a function of torch.func runs. Its tensors wrap the caller's tensors.
in_functorch = torch._C._are_functorch_transforms_active


def is_batched(tensor):
    """Returns whether it has the dimension of torch.vmap, or of
    torch.autograd.grad(is_grads_batched=True)."""
    functorch = torch._C._functorch
    return functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(
        tensor
    )


# -- torch.compile ---------------------------------------------------------------------


def is_compiled_around():
    """Returns whether torch.compile compiles the frames that are called from here on."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def _set_strategy(function, callees):
    # Not torch.compiler.disable: that imports dynamo (about 1 s), and puts a call around
    # every call.
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        function.__code__,
        frames._FrameExecStrategy(frames._FrameAction.SKIP, callees),
    )
    function._torchdynamo_disable = True
    return function


def outside_of_graphs(function):
    """Makes dynamo skip the function's frame and compile what it calls."""
    return _set_strategy(function, torch._C._dynamo.eval_frame._FrameAction.DEFAULT)


def never_compiled(function):
    """Makes dynamo skip the function's frame and the frames that it calls."""
    return _set_strategy(function, torch._C._dynamo.eval_frame._FrameAction.SKIP)


@functools.cache
def register_effect(operator):
    """Keeps torch.compile from removing calls of the operator or merging two of them."""
    # Imported here, because the import is slow (about 1 s).
    from torch._library.effects import EffectType
    from torch.library import _register_effectful_op

    _register_effectful_op(operator, EffectType.ORDERED)


def call_before_groups_end(function):
    """Calls `function()` before Python shuts down or aborts a process group, as
    destroy_process_group does. torch has no hook for it."""
    for name in ("shutdown", "abort"):
        setattr(ProcessGroup, name, _after(function, getattr(ProcessGroup, name)))


def _after(first, method):
    @functools.wraps(method)
    def around(self):
        first()
        return method(self)

    return around


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        whole = tensor.trigger_wait()
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _AwaitGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, grad):
        return grad.trigger_wait() if type(grad) is AsyncCollectiveTensor else grad


def await_gradient(tensor):
    """Returns a view of `tensor`. Its gradient is a plain tensor."""
    return _AwaitGradient.apply(tensor)


def await_leaves(leaves):
    """Returns the sequence, where plain tensors replace the AsyncCollectiveTensors. The
    same one when it has none."""
    if all(type(leaf) is not AsyncCollectiveTensor for leaf in leaves):
        return leaves
    return [
        _Wait.apply(leaf) if type(leaf) is AsyncCollectiveTensor else leaf
        for leaf in leaves
    ]


@never_compiled
def wait_for_collectives(module, args):
    """Returns the arguments of a module's forward. Where `module.compile` was called, plain
    tensors replace AsyncCollectiveTensors with collectives that nothing has waited for:
    torch 2.15 loses the gradients of those.
    """
    if module._compiled_call_impl is None:
        return args
    return tuple(await_leaves(args))


def shared_memory_handle(tensor):
    """Returns a function and its arguments. Called in another process on the same GPU, it
    returns the tensor. The tensor has to exist here until then."""
    return reduce_tensor(tensor)
