"""Operations on sharded tensors: the one place where each is given its values.

Below autograd, ``torch`` calls `dispatch` for each operation that a ``ShardedTensor``
takes part in. Where rows of the result need rows of the arguments alone, each rank
computes its own. Reductions over rows combine what the ranks have. Everything else is
computed on whole values, on each rank alike; so the result of an operation is that of
the same operation on whole tensors. Which way is taken, all ranks decide by shapes and
cuts, which all of them know.
"""

import functools

import torch
from torch._library.simple_registry import singleton as registry
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._mode_utils import no_dispatch

from flatshard import shard_random, shard_reductions, shard_views
from flatshard.shard_values import Values, base_of, is_cut, own_rows, same_cuts
from flatshard.shard_views import ShardedView
from flatshard.sharded_tensor import ShardedTensor
from flatshard.writes import writes

# Element by element besides those that torch's tag names.
_POINTWISE = {
    *("copy_", "fill", "fill_", "zero_", "masked_fill_", "_to_copy", "leaky_relu"),
    *("leaky_relu_", "leaky_relu_backward", "hardtanh", "hardtanh_", "hardswish"),
    *("elu_backward", "softplus_backward", "hardtanh_backward", "_pin_memory"),
}
_NOT_POINTWISE = {"equal"}
_LIKE = {"empty_like", "zeros_like", "ones_like", "full_like"}
_NEW = {"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"}
_SAME = {"detach", "alias", "lift_fresh"}
_RESHAPING = {"set_", "resize_", "resize_as_", "resize"}
# Of which each row of the result comes from one row, when `dim` is not that of the rows.
_ALONG = {
    *("sum", "nansum", "mean", "amax", "amin", "argmax", "argmin", "max", "min"),
    *("any", "all", "prod", "var", "std", "var_mean", "std_mean", "logsumexp"),
    *("linalg_vector_norm", "norm", "_softmax", "_log_softmax", "cumsum", "cumprod"),
    *("_softmax_backward_data", "_log_softmax_backward_data", "sort", "topk"),
    *("kthvalue", "median", "nanmedian", "mode", "flip", "roll", "count_nonzero"),
}
# Their first argument is written, whatever was in it.
_OVERWRITING = {"copy_", "fill_", "zero_", *shard_random.OVERWRITING}


class Traits:
    """What the schema of an operation says."""

    def __init__(self, func):
        schema = func._schema
        self.name = schema.name.split("::")[-1]
        self.arguments = [a.name for a in schema.arguments]
        self.defaults = {
            a.name: a.default_value
            for a in schema.arguments
            if a.has_default_value()
        }
        aliases = [a for a in schema.arguments if a.alias_info is not None]
        self.written = {a.name for a in aliases if a.alias_info.is_write}
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.overwrites = self.name in _OVERWRITING
        self.rules = list(self._rules(func, aliases))

    def _rules(self, func, aliases):
        if self.name in _RESHAPING:
            yield _refuse
        if torch.Tag.inplace_view in func.tags:
            yield _turn
        if self.name in _SAME:
            yield _same
        elif aliases and not self.written:
            yield shard_views.run
        if self.is_random:
            yield shard_random.run
        elif self.name.startswith(("_foreach_", "_fused_")):
            yield shard_reductions.foreach_norm
            yield _by_position
        elif self.name in _LIKE:
            yield _like
        elif self.name in _NEW:
            yield _new
        elif self.name in ("index_put_", "_index_put_impl_"):
            yield _put_rows
        elif self.name == "is_same_size":
            yield _is_same_size
        elif self.name == "record_stream":
            yield _on_local
        else:
            if self.name in _ALONG and not self.written:
                yield _along_rows
                yield shard_reductions.run
            tagged = torch.Tag.pointwise in func.tags
            if (tagged or self.name in _POINTWISE) and self.name not in _NOT_POINTWISE:
                yield _pointwise
        yield on_whole

    def bind(self, args, kwargs):
        """All arguments by name."""
        return {**self.defaults, **dict(zip(self.arguments, args)), **kwargs}


traits_of = functools.lru_cache(maxsize=None)(Traits)


def dispatch(cls, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    traits = traits_of(func)
    for rule in traits.rules:
        result = rule(func, traits, args, kwargs)
        if result is not NotImplemented:
            break
    for name in traits.written:
        for written in tensors_in(traits.bind(args, kwargs).get(name)):
            writes.note(base_of(written))
    return result


def register():
    """Makes `dispatch` what torch calls, with each operation that there is now.

    DTensor's own dispatch is below Python and takes no subclass's.
    """
    for name in torch._C._dispatch_get_all_op_names():
        if "c10d" not in name.split("::")[0]:
            register_one(name)


def register_one(name):
    rules = registry.find(name).torch_dispatch_rules
    for kind in (ShardedTensor, ShardedView):
        if rules.find(kind) is None:
            rules.register(kind, dispatch)


# -- arguments -----------------------------------------------------------------------


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def replaced(value, replace):
    """`value` with `replace(tensor)` for each tensor in it."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, (list, tuple)) and any(True for _ in tensors_in(value)):
        return [replaced(item, replace) for item in value]
    return value


def call(func, traits, args, kwargs, replace):
    """func of the arguments with replace(tensor, whether it is written) for each."""

    def of(name, value):
        written = name in traits.written
        return replaced(value, lambda tensor: replace(tensor, written))

    args = [of(name, value) for name, value in zip(traits.arguments, args)]
    return func(*args, **{name: of(name, value) for name, value in kwargs.items()})


def values_for(traits, args, kwargs):
    """The values of an operation's arguments; plain ones are equal on all ranks.

    Raises:
        PlainMeetsShards: they are not.
    """
    tensors = list(tensors_in((args, kwargs)))
    first = next(t for t in tensors if isinstance(t, ShardedTensor))
    values = Values(traits.name, first._spec.mesh)
    if all(t.numel() == 1 for t in tensors if isinstance(t, ShardedTensor)):
        return values  # numbers: whoever computes with them has all of them
    written = {id(t) for n in traits.written for t in _named(traits, args, kwargs, n)}
    plain = {
        id(t): t
        for t in tensors
        if not isinstance(t, DTensor) and t.numel() > 1 and id(t) not in written
    }
    if plain:
        values.check_equal(list(plain.values()))
    return values


def _named(traits, args, kwargs, name):
    return tensors_in(traits.bind(args, kwargs).get(name))


# -- everything ----------------------------------------------------------------------


def on_whole(func, traits, args, kwargs, before=None):
    """The rule that is always right: on each rank the whole operation."""
    values = values_for(traits, args, kwargs)
    written = {}  # id of a value: of which tensor

    def plain(tensor, is_written):
        value = values.of(tensor, is_written and traits.overwrites)
        if is_written:
            written[id(value)] = tensor
        return value

    result = call(func, traits, args, kwargs, plain)
    for tensor in written.values():
        values.store(tensor)
    mesh = values._mesh

    def shown(value):
        if id(value) in written:
            return written[id(value)]
        return replicated(value, mesh)

    return _mapped(result, shown)


def _mapped(result, function):
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, (list, tuple)):
        items = [_mapped(item, function) for item in result]
        return items if isinstance(result, list) else tuple(items)
    return result


def replicated(value, mesh):
    if value.layout != torch.strided:
        return value  # no DTensor is sparse
    return ShardedTensor.of_rows(
        value, mesh, (Replicate(),) * mesh.ndim, value.shape, value.stride()
    )


# -- row by row ----------------------------------------------------------------------


def _as_rows(local, reference):
    """A result whose rows belong to those of `reference`."""
    shape = torch.Size((reference.shape[0], *local.shape[1:]))
    if not local.is_contiguous():
        local = local.contiguous()
    spec = reference._spec
    return ShardedTensor.of_rows(local, spec.mesh, spec.placements, shape)


def _rows_beside(tensor, reference, values):
    """The rows of `tensor` that meet those of `reference`, in a broadcast."""
    if isinstance(tensor, ShardedTensor) and is_cut(tensor):
        if tensor.shape[0] == reference.shape[0] and tensor.dim() == reference.dim():
            if same_cuts(tensor, reference):
                return tensor._local_tensor
    value = values.of(tensor)
    if value.dim() == reference.dim() and value.shape[0] == reference.shape[0]:
        return own_rows(value, reference)
    return value


def _pointwise(func, traits, args, kwargs):
    tensors = list(tensors_in((args, kwargs)))
    written = [t for n in traits.written for t in _named(traits, args, kwargs, n)]
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    for reference in written or tensors:
        if (
            isinstance(reference, ShardedTensor)
            and is_cut(reference)
            and len(reference.shape) == len(shape)
            and reference.shape[0] == shape[0]
        ):
            break
    else:
        return NotImplemented
    if any(t.shape != shape for t in written):
        return NotImplemented  # torch's error
    if any(not is_cut(t) or not same_cuts(t, reference) for t in written):
        return NotImplemented
    values = values_for(traits, args, kwargs)
    shown = {}

    def rows(tensor, is_written):
        value = _rows_beside(tensor, reference, values)
        if is_written:
            shown[id(value)] = tensor
        return value

    result = call(func, traits, args, kwargs, rows)
    return _mapped(
        result,
        lambda t: shown[id(t)] if id(t) in shown else _as_rows(t, reference),
    )


def _along_rows(func, traits, args, kwargs):
    source = args[0]
    if not isinstance(source, ShardedTensor) or not is_cut(source):
        return NotImplemented
    bound = traits.bind(args, kwargs)
    dims = bound.get("dim", bound.get("dims"))
    if dims is None or dims == [] or dims == ():
        return NotImplemented
    dims = dims if isinstance(dims, (list, tuple)) else [dims]
    if any(d in (0, -source.dim()) or not -source.dim() <= d < source.dim() for d in dims):
        return NotImplemented
    tensors = list(tensors_in((args, kwargs)))
    if any(t.shape != source.shape for t in tensors):
        return NotImplemented
    if 0 in source.shape[1:]:
        return NotImplemented
    values = values_for(traits, args, kwargs)
    result = call(
        func, traits, args, kwargs, lambda t, _: _rows_beside(t, source, values)
    )
    return _mapped(result, lambda t: _as_rows(t, source))


def _by_position(func, traits, args, kwargs):
    """foreach and fused: lists of tensors, of which those of one position meet."""
    first = args[0]
    if traits.name.startswith(("_foreach_max", "_foreach_norm", "_foreach_powsum")):
        return NotImplemented
    values = values_for(traits, args, kwargs)
    lists = {}
    for name, value in traits.bind(args, kwargs).items():
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            lists[name] = value
    if any(
        isinstance(b, DTensor) and not _written_alike(a, b)
        for name in traits.written
        if name in lists
        for a, b in zip(first, lists[name])
    ):
        return _one_by_one(func, traits, args, kwargs, lists)

    def local(reference, tensor):
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if isinstance(reference, ShardedTensor) and is_cut(reference):
            return _rows_beside(tensor, reference, values)
        return values.of(tensor)

    def of(name, value):
        if name in lists:
            return [local(a, b) for a, b in zip(first, value)]
        return replaced(value, values.of)

    result = func(
        *[of(name, value) for name, value in zip(traits.arguments, args)],
        **{name: of(name, value) for name, value in kwargs.items()},
    )
    if traits.written:
        return list(first) if func._schema.returns else None
    return [
        _as_rows(t, a)
        if isinstance(a, ShardedTensor) and is_cut(a)
        else replicated(t, values._mesh)
        for a, t in zip(first, result)
    ]


def _one_by_one(func, traits, args, kwargs, lists):
    """Lists of views, which may overlap: each sees what was written before."""
    length = len(args[0])
    if length == 1:
        return NotImplemented
    for i in range(length):

        def of(name, value):
            return [value[i]] if name in lists else value

        func(
            *[of(name, value) for name, value in zip(traits.arguments, args)],
            **{name: of(name, value) for name, value in kwargs.items()},
        )
    return list(args[0]) if func._schema.returns else None


def _written_alike(reference, tensor):
    if isinstance(tensor, ShardedView) or not isinstance(tensor, ShardedTensor):
        return False
    if not is_cut(tensor):
        return not isinstance(reference, ShardedTensor) or not is_cut(reference)
    return isinstance(reference, ShardedTensor) and same_cuts(tensor, reference)


# -- others --------------------------------------------------------------------------


def _same(func, traits, args, kwargs):
    source = args[0]
    if isinstance(source, ShardedView):
        return ShardedView.of(source.base, *source.frame)
    return ShardedTensor.like_spec(func(source._local_tensor), source._spec)


def _turn(func, traits, args, kwargs):
    """Operations in place that change the shape (t_, squeeze_): the tensor becomes the
    view."""
    target = args[0]
    schema = func._schema
    overload = "int" if traits.name == "transpose_" else schema.overload_name or "default"
    out_of_place = getattr(getattr(torch.ops.aten, traits.name[:-1]), overload)
    view = shard_views.run(out_of_place, traits_of(out_of_place), args, kwargs)
    if view is NotImplemented:
        view = on_whole(out_of_place, traits_of(out_of_place), args, kwargs)
    with no_dispatch():
        func(*args, **kwargs)  # sizes and strides
    target.become(view)
    return target


def _on_local(func, traits, args, kwargs):
    return func(args[0]._local_tensor, *args[1:], **kwargs)


def _is_same_size(func, traits, args, kwargs):
    return args[0].shape == args[1].shape


def _refuse(func, traits, args, kwargs):
    raise NotImplementedError(
        f"{traits.name} of a sharded tensor: its memory belongs to its unit. Write values "
        "of the same shape with copy_(), or take full_tensor() first"
    )


def _like(func, traits, args, kwargs):
    source = args[0]
    if not is_cut(source):
        mesh = source._spec.mesh
        local = source._local_tensor if not isinstance(source, ShardedView) else None
        if local is None:
            local = source.base._local_tensor.new_empty_strided(
                source.shape, source.stride()
            )
        return replicated(func(local, *args[1:], **kwargs), mesh)
    return _as_rows(func(source._local_tensor, *args[1:], **kwargs), source)


def _new(func, traits, args, kwargs):
    """In the shape of a shard it has its rows; in another one it is whole."""
    source, size, *others = args
    if is_cut(source) and tuple(size) == tuple(source.shape):
        local = source._local_tensor
        if traits.name == "new_empty_strided":
            return _as_rows(local.new_empty(local.shape, **kwargs), source)
        return _as_rows(func(local, local.shape, *others, **kwargs), source)
    base = base_of(source)
    return replicated(func(base._local_tensor, size, *others, **kwargs), source._spec.mesh)


def _put_rows(func, traits, args, kwargs):
    """weight[rows] = values, and grad[mask] = number: where the rows are."""
    bound = traits.bind(args, kwargs)
    target, indices, new = bound["self"], bound["indices"], bound["values"]
    if not isinstance(target, ShardedTensor) or not is_cut(target):
        return NotImplemented
    if len(indices) == 0 or indices[0] is None or any(i is not None for i in indices[1:]):
        return NotImplemented
    values = values_for(traits, args, kwargs)
    index = indices[0]
    others = [bound["accumulate"], *([bound["unsafe"]] if "unsafe" in bound else [])]
    local = target._local_tensor
    if index.dtype == torch.bool and index.dim() > 1:
        if index.shape != target.shape or new.numel() != 1:
            return NotImplemented
        mask = _rows_beside(index, target, values)
        func(local, [mask], values.of(new), *others)
        return target
    index = values.of(index)
    if index.dim() != 1:
        return NotImplemented
    if index.dtype == torch.bool:
        if index.shape[0] != target.shape[0]:
            return NotImplemented
        index = index.nonzero().flatten()
    count = target.shape[0]
    if bool(((index < -count) | (index >= count)).any()):
        return NotImplemented  # torch's error
    index = torch.where(index < 0, index + count, index).to(local.device)
    new = values.of(new).expand(index.shape[0], *target.shape[1:])
    numbers = own_rows(torch.arange(count, device=local.device), target)
    if numbers.numel() == 0:
        return target
    first = int(numbers[0])
    here = (index >= first) & (index < first + numbers.numel())
    func(local, [index[here] - first], new[here.to(new.device)], *others)
    return target


register()
