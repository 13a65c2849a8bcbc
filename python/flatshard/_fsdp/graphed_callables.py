"""`make_graphed_callables`, torch's way to ask for `ShardOptions(cuda_graph=True)`, and
`cuda_graph_stats`."""

from dataclasses import replace

from torch import nn

from flatshard._fsdp.forward import root_of
from flatshard._fsdp.wrapping import capture_forward
from flatshard._graphs.checks import DEFAULT_WARMUP_STEPS, check_cuda_graph
from flatshard._graphs.sample import Sample
from flatshard._tensor.places import state_of


def make_graphed_callables(
    callables: nn.Module | tuple[nn.Module, ...],
    sample_args: tuple,
    num_warmup_iters: int = DEFAULT_WARMUP_STEPS,
    allow_unused_input: bool = False,
    pool: None = None,
    *,
    sample_kwargs: dict | tuple[dict, ...] | None = None,
    capture_time_hooks: None = None,
    capture_error_mode: str | None = None,
) -> nn.Module | tuple[nn.Module, ...]:
    """Forwards of units, and their backwards, as CUDA graphs; torch's signature.

    torch.cuda.make_graphed_callables runs modules on the samples and captures at once. A
    sharded module has no unsharded parameters then, so training itself is the warm-up:
    its first `num_warmup_iters` steps run eagerly and are watched, then all units are
    captured, as with ShardOptions(cuda_graph=True). Of the samples only shapes, dtypes
    and flags are looked at. Call it after fully_shard, before the first forward.

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
        pool: None; all units of a model share one pool.
        sample_kwargs: the keyword arguments, a dict; a tuple of dicts for a tuple of
            modules; None: none.
        capture_time_hooks: None.
        capture_error_mode: None or "thread_local"; both mean the latter.

    Returns:
        `callables`: the modules themselves, in a tuple if they came in one.

    Raises:
        TypeError: a callable is not a module that fully_shard wrapped, or an argument has
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
    modules = callables if isinstance(callables, tuple) else (callables,)
    several = modules is callables
    all_args = _one_each("sample_args", sample_args, modules, several, tuple)
    if sample_kwargs is None:
        sample_kwargs = tuple({} for _ in modules) if several else {}
    all_kwargs = _one_each("sample_kwargs", sample_kwargs, modules, several, dict)
    # All are checked before the first is changed.
    samples = [
        _sample_of(modules, number, args, kwargs, allow_unused_input)
        for number, (args, kwargs) in enumerate(zip(all_args, all_kwargs))
    ]
    for module, sample in zip(modules, samples):
        state = state_of(module)
        state.core.write_grads_in_place()
        state.sharding.graph_warmup_steps = num_warmup_iters
        options = replace(state.sharding.options, cuda_graph=True)
        state.sharding.options = options
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
            "capture_time_hooks: expected None: a capture runs no hooks; the module's "
            "hooks run in every step"
        )
    if capture_error_mode not in (None, "thread_local"):
        raise NotImplementedError(
            "capture_error_mode: expected None or 'thread_local', got "
            f"{capture_error_mode!r}"
        )


def _one_each(name, values, modules, several, kind):
    """Returns `values` for each module, as a list."""
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
            f"got a {type(module).__name__}; torch.cuda.make_graphed_callables accepts "
            "functions and modules that are not sharded"
        )
    if any(module is other for other in modules[:number]):
        raise ValueError(
            f"callables: the same {type(module).__name__} is given twice; a unit has one "
            "set of graphs"
        )
    state.life.check("capture", state.name)
    check_cuda_graph(
        [m() for m in state.modules],
        state.sharding.device_mesh,
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


def cuda_graph_stats(model: nn.Module) -> dict:
    """Returns counts of ShardOptions(cuda_graph=True) since the first forward.

    Args:
        model: the outermost module that fully_shard wrapped.

    Returns:
        dict with zeros where no unit has cuda_graph=True. It has `captures` of forwards
        and backwards, `forward_replays`, `backward_replays`, and `nbytes`, the GPU memory
        of the graphs. `fallbacks` is a dict of the number of forwards and
        backwards that ran eagerly after the warm-up, by reason.
        FLATSHARD_AUDIT_CUDA_GRAPHS=1 counts `audited_addresses`, and `audit_findings`
        is a list of the addresses in memory of others.

    Raises:
        ValueError: it is another module.
    """
    return root_of(model).graphs.stats()
