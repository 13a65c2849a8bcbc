"""Operations on sharded tensors: the one place where each is given its values.

Below autograd, ``torch`` calls `dispatch` for each operation that a ``ShardedTensor``
takes part in. Where rows of the result need rows of the arguments alone, each rank
computes its own. Reductions over rows combine what the ranks have. Everything else is
computed on whole values, on each rank alike. So the result equals the result of the
same operation on whole tensors. All ranks choose the way by shapes and cuts, which are
the same on all of them.
"""

import functools

import torch

# torch asks its rules before DTensor's dispatch; see `register`.
from torch._library.simple_registry import singleton as registry

# Inside, an operation changes sizes and strides of a tensor without its dispatch.
from torch.utils._mode_utils import no_dispatch

from flatshard._tensor import shard_random, shard_reductions, shard_rows, shard_views
from flatshard._tensor.shard_calls import on_whole, traits_of
from flatshard._tensor.shard_values import base_of, tensors_in
from flatshard._tensor.shard_views import ShardedView
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard._tensor.writes import writes

# Operations element by element, in addition to those that torch's tag names.
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


def dispatch(cls, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    traits = traits_of(func)
    for rule in rules_of(func):
        result = rule(func, traits, args, kwargs)
        if result is not NotImplemented:
            break
    for name in traits.written:
        for written in tensors_in(traits.bind(args, kwargs).get(name)):
            writes.note(base_of(written))
    return result


@functools.lru_cache(maxsize=None)
def rules_of(func):
    return list(_rules(func, traits_of(func)))


def _rules(func, traits):
    """Returns the ways to compute `func`, of which the first takes it that can."""
    if "c10d" in func.namespace:
        yield _refuse_collective
    if func.namespace != "aten":
        yield on_whole
    if traits.name in _RESHAPING:
        yield _refuse
    if torch.Tag.inplace_view in func.tags:
        yield _turn
    if traits.name in _SAME:
        yield _same
    elif traits.shows_argument and not traits.written:
        yield shard_views.run
    if traits.is_random:
        yield shard_random.run
    elif traits.name.startswith(("_foreach_", "_fused_")):
        yield shard_reductions.foreach_norm
        yield shard_rows.by_position
    elif traits.name in _LIKE:
        yield shard_rows.like
    elif traits.name in _NEW:
        yield shard_rows.new_values
    elif traits.name in ("index_put_", "_index_put_impl_"):
        yield shard_rows.put_rows
    elif traits.name == "is_same_size":
        yield _is_same_size
    elif traits.name == "record_stream":
        yield _on_local
    else:
        if traits.name in shard_rows.ALONG and not traits.written:
            yield shard_rows.along_rows
            yield shard_reductions.run
        tagged = torch.Tag.pointwise in func.tags
        if (tagged or traits.name in _POINTWISE) and traits.name not in _NOT_POINTWISE:
            yield shard_rows.pointwise
    yield on_whole


def register():
    """Makes `dispatch` what torch calls, also with operations that there are now.

    Before torch 2.15, DTensor's own dispatch, below Python, came before a subclass's;
    rules of operations came first.
    """
    ShardedTensor.__torch_dispatch__ = classmethod(dispatch)
    for name in torch._C._dispatch_get_all_op_names():
        rules = registry.find(name).torch_dispatch_rules
        for kind in (ShardedTensor, ShardedView):
            rules.register(kind, dispatch)


def _same(func, traits, args, kwargs):
    source = args[0]
    if isinstance(source, ShardedView):
        return ShardedView.of(source.base, *source.frame)
    return ShardedTensor.like_spec(func(source._local_tensor), source._spec)


def _turn(func, traits, args, kwargs):
    """Operations in place that change the shape (t_, squeeze_): the tensor becomes the
    view."""
    target = args[0]
    overload = "int" if traits.name == "transpose_" else traits.overload or "default"
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


def _refuse_collective(func, traits, args, kwargs):
    raise NotImplementedError(
        f"{traits.name} of a sharded tensor: expected a plain tensor; give it to_local(), "
        "the rows of this rank, or full_tensor()"
    )


register()
