"""A shard as PyTorch sees it: a DTensor that has its row boundaries.

A flat layout splits a parameter between any two rows, so the ranks' pieces have different
lengths. ``RowShard`` has the boundaries. shard_operations.py computes operations on a
``ShardedTensor``. This file has the functions that do not reach it.
"""

import functools
import inspect
import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils import _foreach_utils

from flatshard._tensor import shard_gradients
from flatshard._tensor.memory import address_of
from flatshard._tensor.places import unit_of
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.row_spec import RowSpec, dtensor, make_spec
from flatshard._tensor.rules import OF_OPTIMIZERS, WITHOUT_OPERANDS
from flatshard._tensor.shard_values import (
    PlainMeetsShards,
    Values,
    base_of,
    is_cut,
    is_whole,
    own_rows,
    row_dim,
    same_cuts,
    tensors_in,
)
from flatshard._tensor.unscale import unscale, unscale_gradients
from flatshard._tensor.watched_tensor import WatchedTensor
from flatshard._tensor.writes import writes
from flatshard.torch_versions import plain_attributes, tree_map

_set_data = inspect.getattr_static(torch.Tensor, "data").__set__


class ShardedTensor(WatchedTensor):
    """A DTensor of which a mesh dimension may have a RowShard.

    Operations on it return what the same operations on full tensors return. Results
    that are computed row by row have the same row boundaries.
    """

    __slots__ = ()

    @staticmethod
    def wrap(local, mesh, placements, shape):
        """Returns a view: writes to it are writes to `local`.

        Args:
            local: [rows of this rank, ...] tensor.
            shape: of the full tensor.
        """
        is_cut = any(isinstance(p, RowShard) for p in placements)
        kind = RowSpec if is_cut else DTensorSpec
        stride = contiguous_stride(shape)
        spec = make_spec(mesh, placements, shape, stride, local.dtype, kind)
        return ShardedTensor.like_spec(local.detach(), spec)

    @staticmethod
    def of_rows(local, mesh, placements, shape, stride=None):
        """Works as `wrap` for a tensor without history: for results of operations."""
        if stride is None:
            stride = contiguous_stride(shape)
        spec = make_spec(mesh, placements, shape, stride, local.dtype)
        return ShardedTensor.like_spec(local, spec)

    @staticmethod
    def replicated(value, mesh):
        """Returns `value`, equal on all ranks, as a DTensor; one that is sparse as it
        is, since no DTensor is."""
        if value.layout != torch.strided:
            return value
        placements = (Replicate(),) * mesh.ndim
        return ShardedTensor.of_rows(
            value, mesh, placements, value.shape, value.stride()
        )

    @staticmethod
    def like_spec(local, spec):
        tensor = dtensor(local, spec)
        tensor.__class__ = ShardedTensor
        return tensor

    def beside(self, local):
        """Returns `local`, sharded as this one is and of the same dtype, as a separate
        tensor without gradient. Cheap: nothing is checked."""
        return ShardedTensor.like_spec(local, self._spec)

    def _note_cuts(self, tensor):
        if any(isinstance(p, RowShard) for p in tensor.placements) and same_cuts(
            tensor, self
        ):
            make_sharded(tensor, tensor._local_tensor, self)

    def become(self, other):
        """Has the values of `other`, a tensor of the same shape, from now on."""
        self.__class__ = type(other)
        self._spec = other._spec
        if base_of(other) is not other:
            self.base, self.frame = other.base, other.frame
        else:
            self.__dict__.pop("base", None)
            self._local_tensor = other._local_tensor

    @classmethod
    def _compute(cls, function, name, args, kwargs):
        if name == "__get__" or (name == "__set__" and args[1] is None):
            return function(*args)
        if function is unscale:
            return unscale_gradients(*args)
        if name in OF_OPTIMIZERS:
            result = _of_elements(function, name, args, kwargs)
            if result is not None:
                return result
        elif _updates_lists(function) and not torch.is_grad_enabled():
            pieces = _pieces(args)
            if pieces is not None:
                result = function(*pieces, **kwargs)
                writes.note([t for t in args[0] if type(t) is ShardedTensor])
                return None if result is None else args[0]
        given = args, kwargs
        if torch.is_grad_enabled() and name not in WITHOUT_OPERANDS:
            if _has_activations(given) and (unsharded := _unsharded(given)) is not None:
                args, kwargs = unsharded
                return function(*args, **kwargs)
            args, kwargs = shard_gradients.alike(ShardedTensor, name, args, kwargs)
        try:
            return function(*args, **kwargs)
        except PlainMeetsShards as error:
            if (unsharded := _unsharded(given)) is None:
                raise _used_outside(function, *given) from error
        args, kwargs = unsharded
        return function(*args, **kwargs)

    def over(self, local):
        return ShardedTensor.wrap(
            local, self.device_mesh, list(self.placements), self.shape
        )

    def __reduce_ex__(self, protocol):
        # A view has no separate memory, but torch's way needs it.
        if base_of(self) is not self or self.storage_offset() != 0:
            return self.detach().clone().__reduce_ex__(protocol)
        return super().__reduce_ex__(protocol)

    def __format__(self, spec):
        return (
            format(self.item(), spec) if self.dim() == 0 else super().__format__(spec)
        )

    def tolist(self):
        return self.full_tensor().tolist()

    def numpy(self, **options):
        return self.full_tensor().numpy(**options)

    def redistribute(self, device_mesh=None, placements=None, **options):
        mesh = device_mesh or self.device_mesh
        if placements is None:
            placements = [Replicate()] * mesh.ndim
        if tuple(placements) == tuple(self.placements) and all(
            isinstance(a, RowShard) == isinstance(b, RowShard)
            for a, b in zip(placements, self.placements)
        ):
            return self
        whole = shard_gradients.Replicated.apply(self, ShardedTensor)
        if all(placement.is_replicate() for placement in placements):
            return whole
        return DTensor.redistribute(whole, mesh, placements, **options)

    def full_tensor(self, *, grad_placements=None):
        if not (torch.is_grad_enabled() and self.requires_grad):
            return Values("full_tensor", self.device_mesh).asked_for(self).detach()
        return shard_gradients.Whole.apply(self, grad_placements, ShardedTensor)

    def to_local(self, *, grad_placements=None):
        writes.note_look(base_of(self))
        if not torch.is_grad_enabled():
            return self._local_tensor
        if not self.requires_grad:
            return self._local_tensor.detach()
        if not is_cut(self):
            return shard_gradients.Whole.apply(self, grad_placements, ShardedTensor)
        return shard_gradients.Local.apply(self)

    def rows_of(self, tensor):
        """Returns this rank's rows of `tensor`, plain or a DTensor, with as many rows.

        Collective when it is a DTensor with other placements.
        """
        if isinstance(tensor, DTensor):
            if not isinstance(tensor, ShardedTensor) and is_cut(tensor):
                tensor = ShardedTensor.wrap(
                    tensor._local_tensor,
                    tensor.device_mesh,
                    list(tensor.placements),
                    tensor.shape,
                )
            if same_cuts(tensor, self) and self._has_pieces_like(tensor):
                return tensor._local_tensor
            if not isinstance(tensor, ShardedTensor) and is_whole(tensor):
                tensor = tensor._local_tensor
            else:
                tensor = tensor.full_tensor()
        return own_rows(tensor.to(self._local_tensor.device), self)

    def _has_pieces_like(self, tensor):
        """Returns whether the pieces of `tensor`, a DTensor with equal placements, have
        the rows of this one's pieces on all ranks.

        torch puts Shard(0) in the place of an equal RowShard when a DTensor goes through
        an operation, nn.Parameter's detach() for example. Collective for a DTensor.
        """
        dim = row_dim(self)
        if dim is None or type(tensor) is ShardedTensor:
            return True
        mesh = self.device_mesh
        own = tensor._local_tensor.shape == self._local_tensor.shape
        on_all = torch.tensor([int(own)], device=mesh.device_type)
        dist.all_reduce(on_all, dist.ReduceOp.MIN, group=mesh.get_group(dim))
        return bool(on_all.item())


# It has no additional slots: DTensor's class has to be assignable to it. But DCP's
# staging copies a tensor slot by slot and asks the type for them.
setattr(ShardedTensor, "__slots__", DTensor.__slots__)

# clip_grad_norm_ computes the norms of all gradients of these types at once, so in one
# collective. torch has no function that registers a type.
_foreach_utils._foreach_supported_types.append(ShardedTensor)

# torch.save names these types by the paths of version 0.2, because files contain them.
for kind, name in (
    (ShardedTensor, "sharded_tensor"),
    (RowShard, "row_shard"),
    (RowSpec, "row_spec"),
):
    kind.__module__ = f"flatshard.{name}"
    sys.modules[kind.__module__] = sys.modules[__name__]
# torch.load(weights_only=True) has to accept them in state dicts.
torch.serialization.add_safe_globals([ShardedTensor, RowShard, RowSpec])


def contiguous_stride(shape):
    stride, width = [], 1
    for size in reversed(shape):
        stride.append(width)
        width *= max(size, 1)
    return tuple(reversed(stride))


# The type of torch.ops.aten.add; it has no public name.
_OPERATION = type(torch.ops.aten.add)


def _of_elements(function, name, args, kwargs):
    """Returns the result from local tensors, where all are sharded alike; else None. The
    way through operations costs the host twice as much."""
    first = args[0] if args else None
    if type(first) is not ShardedTensor or isinstance(function, _OPERATION):
        return None  # an operation of somebody else may have any name
    if any(isinstance(value, torch.Tensor) for value in kwargs.values()):
        return None
    if torch.is_grad_enabled() and any(
        isinstance(value, torch.Tensor) and value.requires_grad for value in args
    ):
        return None
    pieces = [first._local_tensor]
    for value in args[1:]:
        piece = _piece_beside(first, value)
        if piece is None:
            return None
        pieces.append(piece)
    result = function(*pieces, **kwargs)
    if name.endswith("_") and not name.endswith("__"):
        writes.note(first)
        return first
    if result.dtype != first.dtype or result.stride() != pieces[0].stride():
        return ShardedTensor.of_rows(
            result.contiguous(), first.device_mesh, first.placements, first.shape
        )
    return first.beside(result)


@functools.lru_cache(maxsize=None)
def _updates_lists(function):
    """Returns whether a function is foreach in place, or fused: what torch's optimizers
    call. These compute element by element."""
    name = function.__name__.split(".")[0]
    return name.startswith(("_foreach_", "_fused_")) and name.endswith("_")


def _pieces(args):
    """Returns the arguments' local tensors, for a function to whose result they
    suffice; None for another one. The way through operations costs the host ten times
    as much."""
    first = args[0]
    pieces = [[_piece(tensor) for tensor in first]]
    if any(piece is None for piece in pieces[0]):
        return None
    for value in args[1:]:
        if isinstance(value, (list, tuple)) and len(value) == len(first):
            value = _pieces_beside(first, value)
            if value is None:
                return None
        elif isinstance(value, torch.Tensor):
            value = _piece_beside(None, value)
            if value is None:
                return None
        pieces.append(value)
    return pieces


def _pieces_beside(references, values):
    """Returns the operands that meet the local tensors of `references`, or None."""
    # An optimizer's gradients and states have the specs of their parameters. Its counts
    # of steps are numbers.
    if values and type(values[0]) is torch.Tensor:
        pieces = [b for b in values if type(b) is torch.Tensor and not b.dim()]
    else:
        pieces = [
            b._local_tensor
            for a, b in zip(references, values)
            if type(a) is type(b) is ShardedTensor and a._spec is b._spec
        ]
    if len(pieces) == len(values):
        return pieces
    pieces = [_piece_beside(a, b) for a, b in zip(references, values)]
    return None if any(piece is None for piece in pieces) else pieces


def _piece(tensor):
    if type(tensor) is ShardedTensor:
        return tensor._local_tensor
    return None if isinstance(tensor, DTensor) else tensor


def _piece_beside(reference, value):
    """Returns the operand that meets the local tensor of `reference`; None when that is
    not clear."""
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        plain = value.dim() == 0 or type(reference) is torch.Tensor
        return value if plain or type(reference) is torch.nn.Parameter else None
    if type(value) is not ShardedTensor:
        return None
    if value.dim() == 0:
        return value._local_tensor
    if type(reference) is not ShardedTensor:
        return None
    a, b = value._spec, reference._spec
    same = a is b or (
        a.placements == b.placements
        and a.mesh == b.mesh
        and value._local_tensor.shape == reference._local_tensor.shape
    )
    return value._local_tensor if same else None


def _has_activations(arguments):
    """Returns whether shards meet this rank's plain tensors with a history.
    An attempt to compute with both would save tensors for the backward, and a
    checkpoint counts."""
    return any(
        tensor.requires_grad and tensor.dim() and not isinstance(tensor, DTensor)
        for tensor in tensors_in(arguments)
    )


def _unsharded(arguments):
    """Returns `arguments` with unsharded parameters in place of shards, where their
    units stay
    unsharded after their forwards: a head that is called after its model's forward. Else
    None."""
    shards = [t for t in tensors_in(arguments) if isinstance(t, ShardedTensor)]
    found = {}
    for shard in shards:
        place = unit_of(shard)
        found[id(shard)] = None if place is None else place[0].unsharded(place[1])
    if any(whole is None for whole in found.values()):
        return None
    return tree_map(lambda value: found.get(id(value), value), arguments)


def _place_of(shard):
    """Returns (UnitState, index) of a parameter, also of its detach(); else None."""
    place = unit_of(shard)
    unit = None if place else writes.unit_of(shard)
    if unit is None:
        return place
    found = [
        p.index for p in unit.parameters if address_of(p.shard) == address_of(shard)
    ]
    return (unit, found[0]) if found else None


def _used_outside(function, args, kwargs):
    """Returns the error of a module that computes with a parameter that is not
    unsharded."""
    shards = [t for t in tensors_in((args, kwargs)) if isinstance(t, ShardedTensor)]
    place = next((place for s in shards if (place := _place_of(base_of(s)))), None)
    what, unit = "a sharded tensor", "its unit"
    if place is not None:
        state, index = place
        p = state.parameters[index]
        what = f"parameter {p.title}"
        if p.sites and (owner := p.sites[0][0]()) is not None:
            what += f" of {type(owner).__name__}"
        elif p.names:
            return PlainMeetsShards(
                f"{function.__name__}: parameter {p.names[0]} meets plain tensors as a "
                "shard, and the module that fully_shard found it in is gone. Exchange "
                "modules before fully_shard, or change them in place"
            )
        unit = f"unit {state.name}" if state.name else "its unit"
    return PlainMeetsShards(
        f"{function.__name__}: {what} meets plain tensors as a shard, outside the "
        f"forward of {unit}, and the ranks have different ones. Call the module that "
        "fully_shard wrapped, not one inside it; name other methods with "
        "register_fsdp_forward_method(module, name); or call unshard() of the unit first"
    )


def become(tensor, data):
    """Makes `tensor`, a leaf without gradient, what `data` is, a DTensor of the same shape:
    sharded, of the dtype and on the device as that one. It stays the same object."""
    with plain_attributes():
        shown = data
        if data.is_meta:  # torch gives a tensor of another device no data on meta
            piece = torch.empty_like(data._local_tensor, device=tensor.device)
            shown = data.over(piece)
        if tensor.dtype != shown.dtype or tensor.device != shown.device:
            _set_data(tensor, shown)
    tensor._local_tensor, tensor._spec = data._local_tensor, data._spec


def make_sharded(tensor, local, like):
    """Makes the DTensor `tensor` a ShardedTensor over `local`, sharded as `like` is."""
    like = like if local.dtype == like.dtype else like.over(local)
    tensor._local_tensor, tensor._spec = local, like._spec
    tensor.__class__ = ShardedTensor
