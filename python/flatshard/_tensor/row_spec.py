"""The spec of a DTensor that is split between any two rows."""

import torch
from torch.distributed.tensor import DTensor

# No public function creates a DTensor with other row boundaries than Shard has.
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta


class RowSpec(DTensorSpec):
    """The spec of a ShardedTensor. DTensor finds what it has worked out for an
    operation by the specs of its arguments: this one differs from specs with other
    row boundaries and from specs with Shard(0)."""

    def __eq__(self, other):
        return isinstance(other, RowSpec) and super().__eq__(other)

    def __hash__(self):
        return hash(("RowSpec", super().__hash__()))


def make_spec(mesh, placements, shape, stride, dtype, kind=RowSpec):
    meta = TensorMeta(torch.Size(shape), tuple(stride), dtype)
    return kind(mesh, tuple(placements), tensor_meta=meta)


def dtensor(local, spec):
    """Makes a DTensor over `local` itself. DTensor.from_local copies a tensor that is on
    another device than the mesh: an offloaded shard would be no view any more."""
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)
