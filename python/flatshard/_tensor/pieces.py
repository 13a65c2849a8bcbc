"""This rank's piece of a parameter, whichever dimension it is sharded along.

The core stores and splits rows. A parameter that is sharded by rows is shown as a
ShardedTensor. One that is sharded along another dimension is stored with that dimension
first, and shown as an EvenShard. So is one with tensor parallelism, because it is sharded
over other mesh dimensions as well.
"""

import torch
from torch.distributed.tensor import DTensor

from flatshard._tensor.even_shard import EvenShard
from flatshard._tensor.memory import local_of
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.shard_values import row_dim
from flatshard._tensor.sharded_tensor import (
    ShardedTensor,
    contiguous_stride,
    make_sharded,
)


def even_shard(rows, mesh, placements, shape):
    """Returns the DTensor of a parameter that is sharded along `placements[-1].dim`.

    Args:
        rows: [slices of that dimension, ...] as the core stores them.
        shape: of the full tensor.
    """
    piece = rows.movedim(0, placements[-1].dim)
    return EvenShard.wrap(piece, mesh, placements, shape, contiguous_stride(shape))


def parallel_shard(rows, parallel, placements, mesh_dim, dim):
    """Returns the DTensor of a parameter with tensor parallelism.

    Args:
        rows: [slices of `dim`, ...] of this rank's tensor, as the core stores them.
        parallel: the parameter's TensorParallel.
        placements: over `parallel.mesh`.
        mesh_dim: the dimension of that mesh that fully_shard shards over.
    """
    piece = rows.movedim(0, dim)
    shard = EvenShard.wrap(
        piece, parallel.mesh, placements, parallel.shape, parallel.stride
    )
    note_cut(shard, mesh_dim, dim)
    return shard


def on_meta(shard, as_chunks):
    """Returns what shows a parameter without values: a tensor on meta like `shard`.

    Args:
        as_chunks: split as torch.chunk does, since loaders read those rows of a file.
    """
    local = shard._local_tensor
    if not as_chunks or row_dim(shard) is None:
        return shard.over(torch.empty_like(local, device="meta"))
    placements, dim = list(shard.placements), row_dim(shard)
    ranks, rows = shard.device_mesh.size(dim), shard.shape[0]
    longest = -(-rows // ranks)
    cuts = [min(rank * longest, rows) for rank in range(ranks + 1)]
    placements[dim] = RowShard(cuts)
    own = placements[dim].rows(shard.device_mesh.get_local_rank(dim))
    piece = torch.empty((own, *local.shape[1:]), dtype=local.dtype, device="meta")
    return ShardedTensor.wrap(piece, shard.device_mesh, placements, shard.shape)


def note_cut(shard, mesh_dim, dim):
    """Records how fully_shard splits an EvenShard that is not only sharded over the mesh's
    last dimension."""
    shard._flatshard_cut = mesh_dim, dim


def _cut_of(shard):
    """Returns the mesh dimension and the tensor dimension that fully_shard shards."""
    spec = shard._spec
    last = spec.mesh.ndim - 1
    noted = getattr(shard, "_flatshard_cut", None)
    return noted or (last, spec.placements[last].dim)


def make_shard(tensor, piece, former):
    """Makes the DTensor `tensor` a shard over `piece`, sharded as `former` is."""
    if isinstance(former, ShardedTensor):
        make_sharded(tensor, piece, former)
    else:
        cut = getattr(former, "_flatshard_cut", None)
        tensor._local_tensor, tensor._spec = piece, former.over(piece)._spec
        tensor.__class__ = EvenShard
        if cut is not None:
            note_cut(tensor, *cut)


def cut_dim(shard):
    """Returns the dimension along which a parameter is sharded."""
    return _cut_of(shard)[1] if isinstance(shard, EvenShard) else 0


def beside(shard, rows):
    """Returns the DTensor of a gradient's `rows`, as the core stores them."""
    if isinstance(shard, ShardedTensor):
        return shard.beside(rows)
    return EvenShard.like_spec(rows.movedim(0, cut_dim(shard)), shard._spec)


def state_beside(shard, rows):
    """Returns the DTensor of an optimizer's state, of any dtype. See `beside`."""
    mesh, placements = shard._spec.mesh, list(shard._spec.placements)
    if isinstance(shard, ShardedTensor):
        return ShardedTensor.wrap(rows, mesh, placements, shard.shape)
    return EvenShard.wrap(
        rows.movedim(0, cut_dim(shard)), mesh, placements, shard.shape, shard.stride()
    )


def is_laid_out_like(tensor, shard):
    """Returns whether the pieces of `tensor`, an optimizer's state, cover the same rows as
    the pieces of `shard`."""
    if not isinstance(tensor, DTensor) or tensor.shape != shard.shape:
        return False
    if isinstance(shard, ShardedTensor):
        return isinstance(tensor, ShardedTensor)
    ours, theirs = shard._spec, tensor._spec
    return theirs.mesh == ours.mesh and theirs.placements == ours.placements


def rows_of(shard, tensor):
    """Returns this rank's rows of `tensor`, as the core stores them. See piece_of."""
    return piece_of(shard, tensor).movedim(cut_dim(shard), 0)


def piece_of(shard, tensor):
    """Returns this rank's piece of `tensor`, plain or a DTensor, of the shape of `shard`.

    Collective when it is a DTensor with other placements.
    """
    if isinstance(shard, ShardedTensor):
        return shard.rows_of(tensor)
    mesh, placements = shard._spec.mesh, shard._spec.placements
    if isinstance(tensor, DTensor):
        same = tensor._spec.mesh == mesh and tensor._spec.placements == placements
        if same and not isinstance(tensor, ShardedTensor):  # RowShard equals Shard(0)
            return local_of(tensor)
        tensor = tensor.full_tensor()
    own, _ = _cut_of(shard)
    # fully_shard shards what the other dimensions have left.
    for i in [*range(own + 1, mesh.ndim), own]:
        if placements[i].is_replicate():
            continue
        chunks = torch.chunk(tensor, mesh.size(i), placements[i].dim)
        rank = mesh.get_local_rank(i)
        if rank < len(chunks):
            tensor = chunks[rank]
        else:
            tensor = tensor.narrow(placements[i].dim, 0, 0)
    return tensor.to(local_of(shard).device)
