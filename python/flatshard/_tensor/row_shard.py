"""A DTensor placement whose pieces have the lengths of the core's layout.

torch's ``Shard(0)`` assumes pieces as of ``torch.chunk`` and computes wrong values
from others without a word (torch 2.11).
"""

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard


def as_bytes(tensor):
    """Returns [bytes] uint8: of a contiguous tensor a view. Gloo does not support every
    dtype."""
    tensor = tensor.contiguous()  # which may have any stride when it has one element
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _reaches(group, device):
    # dist.get_backend_config returns a text of the same.
    return any(d.type == device.type for d in group._device_types)


class RowShard(Shard):
    """``Shard(0)`` whose piece s has the rows ``cuts[s] : cuts[s + 1]``.

    Args:
        cuts: ranks + 1 ascending row numbers, the first 0, the last the number
            of rows of the full tensor.
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
        """Returns the first row of rank `rank`, and the end."""
        piece = self.piece_of_ranks[rank]
        return self.cuts[piece], self.cuts[piece + 1]

    def rows(self, rank):
        begin, end = self.span(rank)
        return end - begin

    def window(self, first, count):
        """Returns the boundaries of rows `first : first + count`."""
        cuts = [min(max(c - first, 0), count) for c in self.cuts]
        return RowShard(cuts, self.piece_of_ranks)

    def slice(self, whole, rank):
        begin, end = self.span(rank)
        return whole[begin:end]

    # DTensor asks a Shard for these.

    def _local_shard_size_and_offset(self, curr_local_size, num_chunks, rank):
        return self.rows(rank), self.span(rank)[0]

    def gather(self, local, mesh, mesh_dim):
        """Returns the full tensor from the rows that each rank has, contiguous.
        Collective."""
        group = mesh.get_group(mesh_dim)
        row = local.shape[1:]
        whole = local.new_empty((self.cuts[-1], *row))
        if whole.numel() == 0:
            return whole
        home = whole.device
        if not _reaches(group, home):  # an offloaded shard
            local, whole = (t.to(mesh.device_type) for t in (local, whole))
        ranks = range(len(self.cuts) - 1)
        longest = max(map(self.rows, ranks))
        mine = as_bytes(local)
        if longest * len(ranks) > 2 * self.cuts[-1]:
            # Few ranks have rows: pieces of one length would need more memory.
            for rank in ranks:
                begin, end = self.span(rank)
                if end > begin:
                    piece = as_bytes(whole[begin:end])
                    if rank == mesh.get_local_rank(mesh_dim):
                        piece.copy_(mine)
                    dist.broadcast(piece, group=group, group_src=rank)
            return whole.to(home)
        padded = whole.new_empty((longest, *row))
        sent = as_bytes(padded)
        sent[: mine.numel()] = mine
        pieces = whole.new_empty((len(ranks), longest, *row))
        dist.all_gather_into_tensor(as_bytes(pieces), sent, group=group)
        for rank in ranks:
            begin, end = self.span(rank)
            whole[begin:end] = pieces[rank, : end - begin]
        return whole.to(home)

    def _to_replicate_tensor(self, local, mesh, mesh_dim, logical_shape):
        return self.gather(local, mesh, mesh_dim)

    def _replicate_to_shard(self, local, mesh, mesh_dim, shard_index):
        return self.slice(local, shard_index).clone()

    # DTensor asks in many places whether a placement equals Shard(0). It must not use
    # a plan that it cached for other row boundaries: see RowSpec.

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
