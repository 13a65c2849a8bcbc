"""The call of one operation on sharded tensors: its schema, its arguments' values, and
its results."""

import functools

import torch
from torch.distributed.tensor import DTensor

from flatshard._tensor.rules import OVERWRITING
from flatshard._tensor.shard_values import (
    Values,
    is_cut,
    own_rows,
    same_cuts,
    tensors_in,
)
from flatshard._tensor.sharded_tensor import ShardedTensor, contiguous_stride


class Traits:
    """The schema of an operation."""

    def __init__(self, func):
        schema = func._schema  # nothing public names the arguments that it writes
        self.overload = schema.overload_name
        self.returns = [result.name for result in schema.returns]
        self.name = schema.name.split("::")[-1]
        self.arguments = [a.name for a in schema.arguments]
        self.defaults = {
            a.name: a.default_value for a in schema.arguments if a.has_default_value()
        }
        aliases = [a for a in schema.arguments if a.alias_info is not None]
        # Such as a view.
        self.shows_argument = any(not a.alias_info.is_write for a in aliases)
        self.written = {a.name for a in aliases if a.alias_info.is_write}
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.overwrites = self.name in OVERWRITING

    def bind(self, args, kwargs):
        """Returns all arguments by name."""
        return {**self.defaults, **dict(zip(self.arguments, args)), **kwargs}


traits_of = functools.lru_cache(maxsize=None)(Traits)


# -- arguments -----------------------------------------------------------------------


def replaced(value, replace):
    """Returns `value` with `replace(tensor)` for each tensor in it."""
    if isinstance(value, torch.Tensor):
        return replace(value)
    if isinstance(value, (list, tuple)) and any(True for _ in tensors_in(value)):
        return [replaced(item, replace) for item in value]
    return value


def call(func, traits, args, kwargs, replace):
    """Calls func on the arguments with replace(tensor, whether it is written) for each."""

    def of(name, value):
        written = name in traits.written
        return replaced(value, lambda tensor: replace(tensor, written))

    return call_with(func, traits, args, kwargs, of)


def call_with(func, traits, args, kwargs, of):
    """Calls func on of(name, argument) for each argument."""
    args = [of(name, value) for name, value in zip(traits.arguments, args)]
    return func(*args, **{name: of(name, value) for name, value in kwargs.items()})


def values_for(traits, args, kwargs):
    """Returns the values of an operation's arguments; plain ones are equal on all
    ranks.

    Raises:
        PlainMeetsShards: they are not.
    """
    tensors = list(tensors_in((args, kwargs)))
    first = next(t for t in tensors if isinstance(t, ShardedTensor))
    values = Values(traits.name, first._spec.mesh)
    shards = [t for t in tensors if isinstance(t, ShardedTensor)]
    has_graph = torch.is_grad_enabled() and any(t.requires_grad for t in shards)
    if all(t.numel() == 1 for t in shards) and not has_graph:
        return values  # a number, such as the factor of clipping, may scale anything
    written = {id(t) for n in traits.written for t in named(traits, args, kwargs, n)}
    plain = {
        id(t): t
        for t in tensors
        if not isinstance(t, DTensor) and t.numel() > 1 and id(t) not in written
    }
    if plain:
        values.check_equal(list(plain.values()))
    return values


def named(traits, args, kwargs, name):
    return tensors_in(traits.bind(args, kwargs).get(name))


# -- everything ----------------------------------------------------------------------


def on_whole(func, traits, args, kwargs):
    """Runs the operation on full tensors on each rank. This is always right."""
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

    def shown(value):
        if id(value) in written:
            return written[id(value)]
        return ShardedTensor.replicated(value, values.mesh)

    return mapped(result, shown)


def mapped(result, function):
    if isinstance(result, torch.Tensor):
        return function(result)
    if isinstance(result, (list, tuple)):
        items = [mapped(item, function) for item in result]
        return items if isinstance(result, list) else tuple(items)
    return result


def as_rows(local, reference):
    """Returns `local` as a tensor with the rows of `reference`."""
    shape = torch.Size((reference.shape[0], *local.shape[1:]))
    if not local.is_contiguous():
        local = local.contiguous()
    spec = reference._spec
    if spec.tensor_meta == (shape, contiguous_stride(shape), local.dtype):
        return reference.beside(local)
    return ShardedTensor.of_rows(local, spec.mesh, spec.placements, shape)


def rows_beside(tensor, reference, values):
    """Returns the rows of `tensor` that meet the rows of `reference`, in a
    broadcast."""
    if isinstance(tensor, ShardedTensor) and is_cut(tensor):
        if tensor.shape[0] == reference.shape[0] and tensor.dim() == reference.dim():
            if same_cuts(tensor, reference):
                return tensor._local_tensor
    value = values.of(tensor)
    if value.dim() == reference.dim() and value.shape[0] == reference.shape[0]:
        return own_rows(value, reference)
    return value


def refuse(func, traits, args, kwargs):
    raise NotImplementedError(
        f"{traits.name} of a sharded tensor: its memory belongs to its unit. Write values "
        "of the same shape with copy_(), or call full_tensor() first"
    )


def refuse_collective(func, traits, args, kwargs):
    raise NotImplementedError(
        f"{traits.name} of a sharded tensor: expected a plain tensor; give it to_local(), "
        "the rows of this rank, or full_tensor()"
    )
