"""A DTensor with equal pieces, which torch computes with, that notices writes."""

import copy
import sys

import torch
from torch.distributed.tensor import DTensor

from flatshard._tensor.meta_shards import of_meta, where_it_is
from flatshard._tensor.row_spec import DTensorSpec, dtensor, make_spec
from flatshard._tensor.shard_values import tensors_in
from flatshard._tensor.writes import writes
from flatshard.torch_versions import plain_attributes

_set_data = torch.Tensor.data.__set__


class EvenShard(DTensor):
    """The shard of a parameter that is no ShardedTensor. Results of operations on it are
    plain DTensors."""

    __slots__ = ()

    @staticmethod
    def wrap(local, mesh, placements, shape, stride):
        """A view: writes to it are writes to `local`."""
        spec = make_spec(mesh, placements, shape, stride, local.dtype, DTensorSpec)
        return EvenShard.like_spec(local.detach(), spec)

    @staticmethod
    def like_spec(local, spec):
        tensor = dtensor(local, spec)
        tensor.__class__ = EvenShard
        return tensor

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function == _set_data:
            with torch.no_grad():
                args[0].copy_(args[1])
            return None
        kwargs = kwargs or {}
        name = function.__name__
        if of_meta and name == "__get__" and isinstance(args[0], EvenShard):
            place = where_it_is(args[0], function.__self__.__name__)
            if place is not None:
                return place
        with plain_attributes():
            result = function(*args, **kwargs)
        if name == "detach":  # nn.Parameter makes one of it, of the same type
            result.__class__ = EvenShard
        in_place = name.endswith("_") and not name.endswith("__")
        if in_place or "out" in kwargs:
            for tensor in tensors_in([args, kwargs]):
                if isinstance(tensor, EvenShard):
                    writes.note(tensor)
        return result

    def __deepcopy__(self, memo):
        local = copy.deepcopy(self._local_tensor.detach(), memo)
        spec = self._spec
        copied = EvenShard.wrap(
            local, spec.mesh, spec.placements, self.shape, self.stride()
        )
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        copied.__dict__.update(self.__dict__)
        memo[id(self)] = copied
        return copied

    def to_local(self, **options):
        writes.note_look(self)
        return super().to_local(**options)


EvenShard.__slots__ = DTensor.__slots__  # as those of ShardedTensor
EvenShard.__module__ = "flatshard.even_shard"
sys.modules[EvenShard.__module__] = sys.modules[__name__]
torch.serialization.add_safe_globals([EvenShard])
