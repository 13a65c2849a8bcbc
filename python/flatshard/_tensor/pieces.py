"""This rank's piece of a parameter, whichever dimension it is cut along.

The core stores and cuts rows. A parameter that is cut by rows is shown as a
ShardedTensor. One that is cut along another dimension is stored with that dimension
first, and shown as an EvenShard.
"""

from torch.distributed.tensor import DTensor

from flatshard._tensor.even_shard import EvenShard
from flatshard._tensor.memory import local_of
from flatshard._tensor.sharded_tensor import (
    ShardedTensor,
    contiguous_stride,
    make_sharded,
    with_local,
)


def even_shard(rows, mesh, placements, shape):
    """The DTensor of a parameter that is cut along `placements[-1].dim`.

    Args:
        rows: [slices of that dimension, ...] as the core stores them.
        shape: of the whole tensor.
    """
    piece = rows.movedim(0, placements[-1].dim)
    return EvenShard.wrap(piece, mesh, placements, shape, contiguous_stride(shape))


def like(shard, piece):
    """A DTensor of `piece`, of another dtype perhaps, that is cut as `shard` is."""
    if isinstance(shard, ShardedTensor):
        return with_local(shard, piece)
    spec = shard._spec
    return EvenShard.wrap(
        piece, spec.mesh, spec.placements, shard.shape, shard.stride()
    )


def make_shard(tensor, piece, former):
    """Makes the DTensor `tensor` a shard over `piece`, cut as `former` is."""
    if isinstance(former, ShardedTensor):
        make_sharded(tensor, piece, former)
    else:
        tensor._local_tensor, tensor._spec = piece, like(former, piece)._spec
        tensor.__class__ = EvenShard


def cut_dim(shard):
    """The dimension along which a parameter is cut."""
    last = shard._spec.placements[-1]
    return last.dim if isinstance(shard, EvenShard) else 0


def beside(shard, rows):
    """The DTensor of a gradient's `rows`, as the core stores them."""
    if isinstance(shard, ShardedTensor):
        return shard.beside(rows)
    return EvenShard.like_spec(rows.movedim(0, cut_dim(shard)), shard._spec)


def rows_of(shard, tensor):
    """This rank's rows, as the core stores them, of `tensor`. See piece_of."""
    return piece_of(shard, tensor).movedim(cut_dim(shard), 0)


def piece_of(shard, tensor):
    """This rank's piece of `tensor`, plain or a DTensor, of the shape of `shard`.

    Collective when it is a DTensor that is cut otherwise.
    """
    if isinstance(shard, ShardedTensor):
        return shard.rows_of(tensor)
    mesh, placements = shard._spec.mesh, shard._spec.placements
    if isinstance(tensor, DTensor):
        same = tensor._spec.mesh == mesh and tensor._spec.placements == placements
        if same and not isinstance(tensor, ShardedTensor):  # RowShard equals Shard(0)
            return local_of(tensor)
        tensor = tensor.full_tensor()
    dim, last = placements[-1].dim, mesh.ndim - 1
    size = tensor.shape[dim] // mesh.size(last)
    piece = tensor.narrow(dim, mesh.get_local_rank(last) * size, size)
    return piece.to(local_of(shard).device)
