"""`make_graphed_callables`: torch's way to ask for `fully_shard(..., cuda_graph=True)`."""

import torch
from torch import nn

from flatshard._fsdp.forward import state_of
from flatshard._fsdp.wrapping import capture_forward
from flatshard._graphs.checks import DEFAULT_WARMUP_STEPS, check_cuda_graph
from flatshard._graphs.unit_graph import is_plain
from flatshard._tensor.mesh import device_of
from flatshard.torch_versions import never_compiled, tree_flatten


def make_graphed_callables(
    callables,
    sample_args,
    num_warmup_iters=DEFAULT_WARMUP_STEPS,
    allow_unused_input=False,
    pool=None,
    *,
    sample_kwargs=None,
    capture_time_hooks=None,
    capture_error_mode=None,
):
    """Forwards of units, and their backwards, as CUDA graphs; torch's signature.

    torch.cuda.make_graphed_callables runs modules on the samples and captures at once. A
    sharded module has no whole parameters then, so training itself is the warm-up: its
    first `num_warmup_iters` steps run eagerly and are watched, then all units are
    captured, as with fully_shard(..., cuda_graph=True). Of the samples only shapes,
    dtypes and flags are looked at. Call it after fully_shard, before the first forward.

    Args:
        callables: a module that fully_shard wrapped, or a tuple of them.
        sample_args: the positional arguments of a call, a tuple; for a tuple of modules
            a tuple of such tuples. Tensors in any nesting, on the mesh's device or on
            meta, and plain values. Calls with other shapes, dtypes, requires_grad, plain
            values or nesting run eagerly, counted by cuda_graph_stats.
        num_warmup_iters: steps that run eagerly at first, 1 or more. One number for a
            model: the largest of those that its units were given.
        allow_unused_input: False: the first forward raises RuntimeError when an argument
            needs a gradient and none of the results depends on it.
        pool: None; all units of a model share a pool of their own.
        sample_kwargs: the keyword arguments, a dict; a tuple of dicts for a tuple of
            modules; None: none.
        capture_time_hooks: None.
        capture_error_mode: None or "thread_local", which it is.

    Returns:
        `callables`: the modules themselves, in a tuple if they came in one.

    Raises:
        TypeError: a callable is no module that fully_shard wrapped, or an argument has
            another type than torch's function expects.
        ValueError: an argument that cannot work, naming it.
        RuntimeError: a forward of the model ran before.
        NotImplementedError: one that is not supported, naming it.
    """
    _refuse_unsupported(pool, capture_time_hooks, capture_error_mode)
    if type(num_warmup_iters) is not int or num_warmup_iters < 1:
        raise ValueError(
            f"num_warmup_iters: expected a number of steps, 1 or more, got "
            f"{num_warmup_iters!r}"
        )
    if not isinstance(allow_unused_input, bool):
        raise ValueError(
            f"allow_unused_input: expected True or False, got {allow_unused_input!r}"
        )
    several = isinstance(callables, tuple)
    modules = callables if several else (callables,)
    all_args = _one_each("sample_args", sample_args, modules, several, tuple)
    if sample_kwargs is None:
        all_kwargs = [{} for _ in modules]
    else:
        all_kwargs = _one_each("sample_kwargs", sample_kwargs, modules, several, dict)
    # All are checked before the first is changed.
    samples = [
        _sample_of(modules, number, args, kwargs, allow_unused_input)
        for number, (args, kwargs) in enumerate(zip(all_args, all_kwargs))
    ]
    for module, sample in zip(modules, samples):
        state = state_of(module)
        state.core.write_grads_in_place()
        state.graph_warmup_steps = num_warmup_iters
        state.cuda_graph = True
        capture_forward(module, sample)
    return callables


def _refuse_unsupported(pool, capture_time_hooks, capture_error_mode):
    if pool is not None:
        raise NotImplementedError(
            f"pool: expected None, got {pool!r}: the graphs of a model share a pool of "
            "their own, and others cannot use it"
        )
    if capture_time_hooks is not None:
        raise NotImplementedError(
            "capture_time_hooks: expected None: a capture runs no hooks; those of the "
            "module run in every step"
        )
    if capture_error_mode not in (None, "thread_local"):
        raise NotImplementedError(
            "capture_error_mode: expected None or 'thread_local', got "
            f"{capture_error_mode!r}"
        )


def _one_each(name, values, modules, several, kind):
    """`values` for each module, as a list."""
    if not several:
        values = (values,)
    elif not isinstance(values, tuple) or len(values) != len(modules):
        got = len(values) if isinstance(values, tuple) else type(values).__name__
        raise ValueError(
            f"{name}: expected a tuple with one {kind.__name__} for each of "
            f"{len(modules)} callables, got {got}"
        )
    for value in values:
        if not isinstance(value, kind):
            raise TypeError(
                f"{name}: expected a {kind.__name__} for each callable, got a "
                f"{type(value).__name__}"
            )
    return list(values)


def _sample_of(modules, number, args, kwargs, allow_unused_input):
    module = modules[number]
    state = state_of(module) if isinstance(module, nn.Module) else None
    if state is None:
        raise TypeError(
            "callables: expected a module that fully_shard wrapped, or a tuple of them, "
            f"got a {type(module).__name__}; torch.cuda.make_graphed_callables takes "
            "functions and modules that are not sharded"
        )
    if any(module is other for other in modules[:number]):
        raise ValueError(
            f"callables: the same {type(module).__name__} is there twice; a unit has one "
            "set of graphs"
        )
    if state.root is not None:
        raise RuntimeError(
            f"make_graphed_callables: unit {state.name} ran before; call it between "
            "fully_shard and the first forward"
        )
    check_cuda_graph(
        [m() for m in state.modules],
        state.device_mesh,
        state.core.offloads,
        "make_graphed_callables",
    )
    for name, buffer in module.named_buffers():
        if buffer.requires_grad:
            raise ValueError(
                f"callables: expected buffers that need no gradient, got {name} of a "
                f"{type(module).__name__}"
            )
    return Sample(args, kwargs, state, allow_unused_input)


class Sample:
    """What the arguments of the call that is captured look like; keeps no tensor."""

    def __init__(self, args, kwargs, state, allow_unused_input):
        self._args, self._structure = self._flatten(args, "sample_args", state)
        self._keywords = {
            name: self._flatten(value, f"sample_kwargs[{name!r}]", state)
            for name, value in kwargs.items()
        }
        self._unused_allowed = allow_unused_input

    @staticmethod
    def _flatten(tree, name, state):
        leaves, structure = tree_flatten(tree)
        return [_describe(leaf, name, state) for leaf in leaves], structure

    @never_compiled
    def difference(self, args, kwargs):
        """In what a call differs; empty: in nothing."""
        if kwargs.keys() != self._keywords.keys():
            return "it has other keyword arguments than sample_kwargs"
        difference = _compare(args, self._args, self._structure, "sample_args")
        for name, value in kwargs.items():
            difference = difference or _compare(
                value, *self._keywords[name], f"sample_kwargs[{name!r}]"
            )
        return difference

    @never_compiled
    def check_used(self, tensors, outputs, unit):
        """Of a forward from `tensors` to `outputs`."""
        if self._unused_allowed:
            return
        unused = _unused(tensors, outputs)
        if unused is not None:
            raise RuntimeError(
                f"make_graphed_callables: argument tensor {unused} of unit {unit} needs "
                "a gradient, and none of its results depends on it; pass it without "
                "requires_grad, in sample_args as well, or set allow_unused_input=True"
            )
        self._unused_allowed = True  # once is enough


class _TensorLike:
    """Shape, dtype and flag of a tensor."""

    __slots__ = ("dtype", "needs_grad", "shape")

    def __init__(self, shape, dtype, needs_grad):
        self.shape, self.dtype, self.needs_grad = shape, dtype, needs_grad


def _describe(leaf, name, state):
    if isinstance(leaf, torch.Tensor):
        device = device_of(state.device_mesh)
        if type(leaf) not in (torch.Tensor, nn.Parameter) or (
            leaf.layout is not torch.strided
        ):
            raise TypeError(
                f"{name}: expected strided tensors, got a {leaf.layout} "
                f"{type(leaf).__name__}"
            )
        if leaf.device != device and not leaf.is_meta:
            raise ValueError(
                f"{name}: expected tensors on {device} or meta, got one on {leaf.device}"
            )
        policy = state.mp_policy
        casts = policy.cast_forward_inputs and leaf.is_floating_point()
        dtype = policy.param_dtype if casts and policy.param_dtype else leaf.dtype
        return _TensorLike(tuple(leaf.shape), dtype, leaf.requires_grad)
    if not is_plain(leaf):
        raise TypeError(
            f"{name}: expected tensors and plain values, got a {type(leaf).__name__}"
        )
    return type(leaf), leaf


def _compare(tree, expected, structure, name):
    leaves, found = tree_flatten(tree)
    if found != structure:
        return f"its arguments are nested in another way than {name}"
    for leaf, like in zip(leaves, expected):
        if type(like) is tuple:
            if (type(leaf), leaf) != like:
                return f"an argument that is no tensor has another value than in {name}"
        elif not isinstance(leaf, torch.Tensor):
            return f"an argument is no tensor as in {name}"
        elif leaf.shape != like.shape or leaf.dtype != like.dtype:
            return (
                f"an argument has another shape or dtype than in {name}: "
                f"{list(like.shape)}, {like.dtype}"
            )
        elif leaf.requires_grad != like.needs_grad:
            return f"an argument needs a gradient and does not in {name}, or vice versa"
    return ""


def _unused(tensors, outputs):
    """The number of a tensor that needs a gradient and gets none; None: there is none."""
    edge = torch.autograd.graph.get_gradient_edge
    wanted = {}
    for number, tensor in enumerate(tensors):
        if tensor.requires_grad:
            wanted[edge(tensor)[:2]] = number
    missing = set(wanted.values())
    todo = [edge(t)[:2] for t in outputs if t.requires_grad]
    seen = set(todo)
    while todo and missing:
        found = todo.pop()
        if found in wanted:
            missing.discard(wanted[found])
            continue  # behind it lies what others did
        for following in found[0].next_functions:
            if following[0] is not None and following not in seen:
                seen.add(following)
                todo.append(following)
    return min(missing, default=None)
