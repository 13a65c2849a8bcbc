"""Operations on sharded tensors: the one place where each is given its values, by its row
of rules.py.

Below autograd, ``torch`` calls `dispatch` for each operation that a ``ShardedTensor``
is an argument of. Where rows of the result need only the same rows of the arguments,
each rank computes its own. Reductions over rows combine what the ranks have. Everything
else is computed on full values, on each rank alike. So the result equals the result of
the same operation on full tensors. All ranks choose the way by shapes and row boundaries,
because these are the same on all of them.
"""

import functools

import torch

# torch asks its rules before DTensor's dispatch; see `register`.
from torch._library.simple_registry import singleton as registry

from flatshard._tensor import (
    shard_calls,
    shard_random,
    shard_reductions,
    shard_rows,
    shard_views,
)
from flatshard._tensor.rules import rule_of
from flatshard._tensor.shard_values import base_of, tensors_in
from flatshard._tensor.shard_views import ShardedView
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard._tensor.writes import writes

# The ways of rules.py, by name.
WAYS = {
    "pointwise": shard_rows.pointwise,
    "along_rows": shard_rows.along_rows,
    "by_position": shard_rows.by_position,
    "like": shard_rows.like,
    "new_values": shard_rows.new_values,
    "put_rows": shard_rows.put_rows,
    "on_local": shard_rows.on_local,
    "is_same_size": shard_rows.is_same_size,
    "reduce": shard_reductions.reduce,
    "foreach_norm": shard_reductions.foreach_norm,
    "same": shard_views.same,
    "turn": shard_views.turn,
    "view": shard_views.view,
    "random": shard_random.run,
    "refuse": shard_calls.refuse,
    "refuse_collective": shard_calls.refuse_collective,
}


def dispatch(cls, func, types, args=(), kwargs=None):
    kwargs = kwargs or {}
    traits = shard_calls.traits_of(func)
    for way in ways_of(func):
        result = way(func, traits, args, kwargs)
        if result is not NotImplemented:
            break
    for name in traits.written:
        for written in tensors_in(traits.bind(args, kwargs).get(name)):
            writes.note(base_of(written))
    return result


@functools.lru_cache(maxsize=None)
def ways_of(func):
    """Returns the ways to compute `func`. The first possible one is used."""
    names = rule_of(func, shard_calls.traits_of(func)).forward
    return [*(WAYS[name] for name in names), shard_calls.on_whole]


def register():
    """Makes `dispatch` what torch calls, also with operations that there are now.

    Before torch 2.15, DTensor's own dispatch, below Python, ran before the dispatch of a
    subclass; rules of operations ran first.
    """
    ShardedTensor.__torch_dispatch__ = classmethod(dispatch)
    for name in torch._C._dispatch_get_all_op_names():
        rules = registry.find(name).torch_dispatch_rules
        for kind in (ShardedTensor, ShardedView):
            rules.register(kind, dispatch)


register()
