"""A DTensor placement whose pieces have the lengths that the core's layout cut.

torch's ``Shard(0)`` assumes pieces as of ``torch.chunk`` and computes wrong values
from others without a word (torch 2.11).
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard


class RowShard(Shard):
    """``Shard(0)`` whose piece s holds the rows ``cuts[s] : cuts[s + 1]``.

    Args:
        cuts: ranks + 1 ascending row numbers, the first 0, the last the number
            of rows of the whole tensor.
        piece_of_ranks: the piece that each rank of the mesh dimension has. None:
            the rank's number.
    """

    def __new__(cls, cuts, piece_of_ranks=None):
        return super().__new__(cls, 0)

    def __init__(self, cuts, piece_of_ranks=None):
        super().__init__(0)
        self.cuts = tuple(cuts)
        self.piece_of_ranks = tuple(
            range(len(self.cuts) - 1) if piece_of_ranks is None else piece_of_ranks
        )

    def __reduce__(self):
        return RowShard, (self.cuts, self.piece_of_ranks)

    def __deepcopy__(self, memo):
        return self

    def span(self, rank):
        """First row of rank `rank`, and the end."""
        piece = self.piece_of_ranks[rank]
        return self.cuts[piece], self.cuts[piece + 1]

    def rows(self, rank):
        begin, end = self.span(rank)
        return end - begin

    def slice(self, whole, rank):
        begin, end = self.span(rank)
        return whole[begin:end]

    # What DTensor asks a Shard.

    def _local_shard_size_and_offset(self, curr_local_size, num_chunks, rank):
        return self.rows(rank), self.span(rank)[0]

    def _to_replicate_tensor(self, local, mesh, mesh_dim, logical_shape):
        longest = max(self.rows(r) for r in range(len(self.cuts) - 1))
        padded = local.new_zeros((longest, *local.shape[1:]))
        padded[: local.shape[0]] = local
        pieces = [torch.empty_like(padded) for _ in range(mesh.size(mesh_dim))]
        # Gloo does not know every dtype.
        sent = [p.flatten().view(torch.uint8) for p in (*pieces, padded)]
        dist.all_gather(sent[:-1], sent[-1], group=mesh.get_group(mesh_dim))
        order = sorted(range(len(pieces)), key=self.piece_of_ranks.__getitem__)
        return torch.cat([pieces[r][: self.rows(r)] for r in order])

    def _replicate_to_shard(self, local, mesh, mesh_dim, shard_index):
        return self.slice(local, shard_index).clone()

    # DTensor asks in many places whether a placement equals Shard(0). What must not
    # happen is that it takes a plan that it remembers for other cuts: see RowSpec.

    def __eq__(self, other):
        if isinstance(other, RowShard):
            return (other.cuts, other.piece_of_ranks) == (
                self.cuts,
                self.piece_of_ranks,
            )
        return isinstance(other, Shard) and other.dim == self.dim

    def __hash__(self):
        return hash(("RowShard", self.cuts, self.piece_of_ranks))

    def __repr__(self):
        return f"RowShard{self.cuts}"
