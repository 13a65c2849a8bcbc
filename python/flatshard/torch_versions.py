"""What Flatshard's Python takes of torch that has no public name, and how torch's versions
differ there.

What is about DTensors is in _tensor/; all other private names are here, each with the
reason for it. tests/python/torch_names_test.py names the one that another torch changed.
Which versions were tried is in docs/python.md.
"""

import functools
from operator import attrgetter

import torch
from torch.nn.modules import module as nn_module

# What tensors in nested arguments are found by: only this one knows the containers that
# libraries register, such as transformers' outputs.
from torch.utils._pytree import (  # noqa: F401
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

VERSION = tuple(int(part) for part in torch.__version__.split(".")[:2])


def default_reduce_dtype(param_dtype, dtype):
    """FSDP2's meaning of reduce_dtype=None for a parameter of `dtype`: up to 2.14
    the dtype it is gathered in, since 2.15 its own."""
    if VERSION < (2, 15) and param_dtype is not None:
        return param_dtype
    return dtype


# -- modules, each alone ---------------------------------------------------------------

# {name: parameter or None}. Shards and whole parameters are put there as they are; setattr
# would check and register them, in each forward.
parameters_of = attrgetter("_parameters")
# {name: buffer or None}; another buffer may be put there.
buffers_of = attrgetter("_buffers")
# {name: module} and {id: hook}: the same objects for as long as the module is there. Each
# forward looks whether somebody replaced a child, or put a hook there.
children_of = attrgetter("_modules")
forward_hooks = attrgetter("_forward_hooks")
# All hooks that a module calls, and a replay of it would not.
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


def persistent_buffers(module):
    """[(name, buffer)]; state_dict() would call the user's hooks."""
    left_out = module._non_persistent_buffers_set
    named = module._buffers.items()
    return [(n, b) for n, b in named if b is not None and n not in left_out]


def converts_inside(context):
    """Class decorator of a mixin of nn.Module: `to`, `cuda`, `to_empty` and the like run
    inside of context(module, function of a tensor). They all call `_apply`."""

    def decorate(cls):
        def _apply(self, fn, recurse=True):
            with context(self, fn):
                return super(cls, self)._apply(fn, recurse)

        cls._apply = _apply
        return cls

    return decorate


# -- tensors ---------------------------------------------------------------------------

# `.grad` and `.requires_grad` of a tensor subclass go through __torch_function__ outside
# of this context, at twenty times the price, for each parameter of the model.
plain_attributes = torch._C.DisableTorchFunctionSubclass

# Dictionaries of hooks, from which the handles that users have remove theirs.
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def hooks_of_tensor(tensor):
    """{attribute: dictionary} of those that are not empty."""
    found = {name: getattr(tensor, name) for name in _TENSOR_HOOKS}
    return {name: hooks for name, hooks in found.items() if hooks}


def set_hooks_of_tensor(tensor, found):
    for name, hooks in found.items():
        setattr(tensor, name, hooks)


def version_of(tensor):
    """How often a tensor was written: only its own counter tells."""
    return 0 if tensor.is_inference() else tensor._version


def set_access_error(tensor, text):
    """What reading a tensor without memory raises, instead of torch's own text."""
    torch._C._set_storage_data_ptr_access_error_msg(
        tensor.untyped_storage()._cdata, text
    )


# -- what runs around a forward --------------------------------------------------------


def in_backward():
    """Whether the autograd engine runs on this thread: a recomputed forward, for one."""
    return torch._C._current_graph_task_id() >= 0


def has_saved_tensor_hooks():
    """Whether hooks on saved tensors are around: a checkpoint, or offloading."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_dispatch_mode():
    """Whether a TorchDispatchMode is around, which sees each operation."""
    return torch._C._len_torch_dispatch_stack() > 0


# Whether a function of torch.func is around, whose tensors are others inside.
in_functorch = torch._C._are_functorch_transforms_active


# -- torch.compile ---------------------------------------------------------------------


def is_compiled_around():
    """Whether frames that are called from here on are compiled."""
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None


def _set_strategy(function, callees):
    # Not torch.compiler.disable: that imports dynamo, which takes a second, and
    # puts a call around every call.
    frames = torch._C._dynamo.eval_frame
    frames.set_code_exec_strategy(
        function.__code__,
        frames._FrameExecStrategy(frames._FrameAction.SKIP, callees),
    )
    function._torchdynamo_disable = True
    return function


def outside_of_graphs(function):
    """Dynamo leaves the function's frame alone and compiles what it calls."""
    return _set_strategy(function, torch._C._dynamo.eval_frame._FrameAction.DEFAULT)


def never_compiled(function):
    """Dynamo leaves alone the function's frame and those that it calls."""
    return _set_strategy(function, torch._C._dynamo.eval_frame._FrameAction.SKIP)


@functools.cache
def register_effect(operator):
    """torch.compile neither leaves calls of it out nor joins two of them."""
    # Imported here: it takes a second.
    from torch._library.effects import EffectType
    from torch.library import _register_effectful_op

    _register_effectful_op(operator, EffectType.ORDERED)
