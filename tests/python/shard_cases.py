"""Operations on sharded tensors for tests: each a function of two tensors of one shape
with different shardings, and a vector."""

import random

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate

from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor
from tests.python.device import on_device


def _histc(tensor):
    # CUDA's histc adds counts in no fixed order. torch refuses that, though they are
    # exact.
    deterministic = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return tensor.histc(5, -2, 2)
    finally:
        torch.use_deterministic_algorithms(deterministic)


# The tensors t and o have one shape [rows, columns] and different shards; v is
# [columns].
FUNCTIONS = {
    "mul": lambda t, o, v: t * o,
    "scaled": lambda t, o, v: (2 - t / 3) * v,
    "pow": lambda t, o, v: (t - o).pow(2),
    "rows scaled": lambda t, o, v: t * o.norm(dim=1, keepdim=True),
    "outer product of vectors": lambda t, o, v: t[:, 0, None] * v,
    "lerp": lambda t, o, v: torch.lerp(t, o, 0.3),
    "addcdiv": lambda t, o, v: torch.addcdiv(t, o, o.abs() + 1, value=0.5),
    "where": lambda t, o, v: torch.where(o > 0, t, v),
    "clamp": lambda t, o, v: t.clamp(max=o).clamp(-0.5),
    "maximum": lambda t, o, v: torch.maximum(t, o),
    "to": lambda t, o, v: t.double() + o,
    "sum": lambda t, o, v: t.sum(),
    "sum of columns": lambda t, o, v: t.sum(0, keepdim=True),
    "mean": lambda t, o, v: t.mean() + o.mean(1).sum(),
    "norms": lambda t, o, v: torch.stack([t.norm(), o.norm()]).sum(),
    "norms of rows": lambda t, o, v: t.norm(dim=1) + o.norm(p=1, dim=-1),
    "norms of columns": lambda t, o, v: torch.linalg.vector_norm(t, 3, 0),
    "infinity norm": lambda t, o, v: t.norm(float("inf")),
    "foreach norm": lambda t, o, v: torch.stack(torch._foreach_norm([t, o, v])).sum(),
    "max": lambda t, o, v: t.max() - t.amin(0),
    "max of columns": lambda t, o, v: t.max(0).values,
    "std": lambda t, o, v: t.std() + t.var(0),
    "prod": lambda t, o, v: t.prod(0),
    "logsumexp": lambda t, o, v: t.logsumexp(0) + o.logsumexp((0, 1)),
    "softmax": lambda t, o, v: t.softmax(0) * o.softmax(1),
    "log_softmax": lambda t, o, v: t.log_softmax(-1),
    "median": lambda t, o, v: t.median(),
    "quantile": lambda t, o, v: t.quantile(0.25) + o.quantile(0.5, dim=0),
    "kthvalue": lambda t, o, v: t.kthvalue(2, dim=0).values,
    "topk": lambda t, o, v: t.flatten().topk(3).values,
    "sort": lambda t, o, v: t.sort(0).values + o.sort(1, descending=True).values,
    "cumsum": lambda t, o, v: t.cumsum(0) - o.cumsum(1),
    "cumprod": lambda t, o, v: t.cumprod(0),
    "flip": lambda t, o, v: t.flip(0) + o.flip(1),
    "roll": lambda t, o, v: t.roll(1, 0) + o.roll(2),
    "diff": lambda t, o, v: t.diff(dim=0),
    "tril": lambda t, o, v: t.tril(),
    "diagonal": lambda t, o, v: t.diagonal() * o.diagonal(),
    "view": lambda t, o, v: t.view(-1)[1:-1],
    "flatten": lambda t, o, v: t.flatten() * o.reshape(-1),
    "another view": lambda t, o, v: t.reshape(t.shape[1], -1) + 1,
    "more dimensions": lambda t, o, v: t.view(-1, 1, t.shape[1]).squeeze(1)[None],
    "T": lambda t, o, v: t.T * v[:, None],
    "permute": lambda t, o, v: t.permute(1, 0) + o.transpose(0, 1),
    "T twice": lambda t, o, v: t.T.T * o.mT.mT,
    "expand": lambda t, o, v: t.expand(2, -1, -1) * o,
    "one row": lambda t, o, v: t[2] * o[-1],
    "rows": lambda t, o, v: t[1:3] + o[2:4],
    "every second row": lambda t, o, v: t[::2] * 2,
    "one element": lambda t, o, v: t[1, 2] * o[2][0],
    "columns": lambda t, o, v: t[:, 1:] * o[:, :-1],
    "listed rows": lambda t, o, v: t[[1, 3, 1]],
    "masked": lambda t, o, v: t[o > 0],
    "index_select": lambda t, o, v: t.index_select(
        0, torch.tensor([3, 0]).to(t.device)
    ),
    "gather": lambda t, o, v: t.gather(0, o.argsort(0)),
    "take_along_dim": lambda t, o, v: t.take_along_dim(o.argsort(1), 1),
    "cat": lambda t, o, v: torch.cat([t, o, v[None]]),
    "stack": lambda t, o, v: torch.stack([t, o], 1),
    "chunk": lambda t, o, v: t.chunk(2)[1] + t.chunk(2)[1],
    "split": lambda t, o, v: t.split([1, t.shape[0] - 1])[1] * 2,
    "unbind": lambda t, o, v: t.unbind()[1] + o.unbind(1)[0].sum(),
    "repeat": lambda t, o, v: t.repeat(2, 1),
    "pad": lambda t, o, v: F.pad(t, (1, 0, 0, 2)),
    "matmul": lambda t, o, v: t @ o.T,
    "mm of transposed": lambda t, o, v: torch.mm(t.t(), o),
    "mv": lambda t, o, v: t @ v,
    "outer": lambda t, o, v: torch.outer(t[0], o[:, 1]),
    "einsum": lambda t, o, v: torch.einsum("ij,ij,j->i", t, o, v),
    "linear": lambda t, o, v: F.linear(o, t, t[:, 0]),
    "bilinear form": lambda t, o, v: v @ t.T @ o @ v,
    "orthogonality": lambda t, o, v: (t.T @ t - torch.eye(t.shape[1]).to(t))
    .pow(2)
    .sum(),
    "normalize": lambda t, o, v: F.normalize(t, dim=1) + F.normalize(o, dim=0),
    "cosine similarity": lambda t, o, v: F.cosine_similarity(t, o, dim=0),
    "standardized": lambda t, o, v: (t - t.mean(1, keepdim=True))
    / o.std(1, keepdim=True),
    "layer norm": lambda t, o, v: F.layer_norm(t, (t.shape[1],), v),
    "cross entropy": lambda t, o, v: F.cross_entropy(t, o.argmax(1)),
    "mse": lambda t, o, v: F.mse_loss(t, o) + F.l1_loss(t, o, reduction="sum"),
    "singular values": lambda t, o, v: torch.linalg.svdvals(t),
    "nuclear norm": lambda t, o, v: torch.linalg.matrix_norm(t, "nuc"),
    "spectral norm": lambda t, o, v: torch.linalg.matrix_norm(t, 2),
    "qr": lambda t, o, v: torch.linalg.qr(t).R.abs(),
    "solve": lambda t, o, v: torch.linalg.solve(
        t.T @ t + torch.eye(t.shape[1]).to(t), v
    ),
    "histc": lambda t, o, v: _histc(t.detach()),
    "unique": lambda t, o, v: t.detach().round().unique(),
    "bincount": lambda t, o, v: o.argmax(1).bincount(minlength=t.shape[1]),
    "argmax": lambda t, o, v: t.argmax() + o.argmin(0),
    "nonzero": lambda t, o, v: (t > 0).nonzero(),
    "counted": lambda t, o, v: (t > 0).sum(0) + (o > 0).count_nonzero(),
    "any and all": lambda t, o, v: (t > 0).any(0) & (o < 9).all(),
    "allclose": lambda t, o, v: torch.tensor([t.allclose(t * 1.0), torch.equal(t, o)]),
    "isfinite": lambda t, o, v: (t / o).isfinite(),
    "complex": lambda t, o, v: torch.view_as_real(torch.complex(t, o).conj() * 1j),
    "bits": lambda t, o, v: t.detach().view(torch.int32),
}
# Operations that write to t in place, in rows that no gradient needs.
WRITES = {
    "mul_": lambda t, o, v: t.mul_(2).add_(o, alpha=0.5),
    "transposed": lambda t, o, v: t.T.mul_(v[:, None]),
    "flat": lambda t, o, v: t.view(-1)[1:4].fill_(7),
    "rows": lambda t, o, v: t.__setitem__(slice(0, 3), 0),
    "rows of others": lambda t, o, v: t.__setitem__(slice(1, 3), o[2:4]),
    "rows of plain values": lambda t, o, v: t.__setitem__(
        slice(2, None), torch.arange(t.shape[1], device=t.device) / 2
    ),
    "one row": lambda t, o, v: t[2].fill_(0.25),
    "one row of another": lambda t, o, v: t[-1].copy_(o[0] * v),
    "scaled rows": lambda t, o, v: t[3:5].mul_(2),
    "one element": lambda t, o, v: t.__setitem__((1, 2), 5.0),
    "a column": lambda t, o, v: t.__setitem__((slice(None), 1), o[:, 0]),
    "listed rows": lambda t, o, v: t.__setitem__([3, 1], v),
    "chosen rows": lambda t, o, v: t.__setitem__(o[:, 0] > 0, -1),
    "masked": lambda t, o, v: t.__setitem__(o > 0, 0),
    "masked values": lambda t, o, v: t.__setitem__(o > 0, o[o > 0] * 2),
    "masked_fill_": lambda t, o, v: t.masked_fill_(o > 0, 3.0),
    "index_put_": lambda t, o, v: t.index_put_(
        (torch.tensor([1, 1, -1], device=t.device),), v, accumulate=True
    ),
    "index_add_": lambda t, o, v: t.index_add_(
        0, torch.tensor([2, 0], device=t.device), o[:2]
    ),
    "index_fill_": lambda t, o, v: t.index_fill_(
        0, torch.tensor([2, 0], device=t.device), 1.5
    ),
    "scatter_": lambda t, o, v: t.scatter_(0, o.argsort(0), o),
    "scatter_add_": lambda t, o, v: t.scatter_add_(1, o.argsort(1), o),
    "cumsum_": lambda t, o, v: t.cumsum_(0),
    "lerp_": lambda t, o, v: t.lerp_(o, 0.1),
    "addmm_": lambda t, o, v: t.addmm_(o @ o.T, o, beta=0.5),
    "addcmul_": lambda t, o, v: t.addcmul_(o, v, value=0.1),
    "copy_": lambda t, o, v: t.copy_(o * v),
    "copy_ of plain values": lambda t, o, v: t.copy_(torch.ones(t.shape[1])),
    "zero_": lambda t, o, v: t.zero_(),
    "out": lambda t, o, v: torch.mul(o, 2, out=t),
    "out of another kind": lambda t, o, v: torch.cumsum(o, 0, out=t),
    "foreach": lambda t, o, v: torch._foreach_mul_([t, v], [o, v]),
    # Of other elements: one kernel on CUDA adds to all of them, in any order.
    "foreach of views": lambda t, o, v: torch._foreach_add_(
        [t[1:].T, t[0]], [o[1:].T, v]
    ),
    "turned": lambda t, o, v: t.clone().t_().mul_(2).t_() * 1,
    "squared": lambda t, o, v: t.view(1, *t.shape)[0].square_(),
}


class Case:
    """Tensors of random shape and shard sizes, full and sharded."""

    def __init__(self, mesh, seed):
        self.mesh = mesh
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        columns = self.random.randint(3, 5)
        rows = self.random.randint(6, 8) * columns  # for views of other shapes
        shapes = ((rows, columns), (rows, columns), (columns,))
        self.whole = [self.values(*shape) for shape in shapes]

    def values(self, *shape):
        return on_device(torch.randn(shape, generator=self.generator))

    def cuts(self, rows):
        world = self.mesh.size(-1)
        middle = [self.random.choice((0, rows, *range(rows))) for _ in range(world - 1)]
        pieces = self.random.sample(range(world), world)  # experts have another order
        return RowShard((0, *sorted(middle), rows), pieces)

    def cut(self, whole):
        cuts = self.cuts(whole.shape[0])
        dim = self.mesh.ndim - 1
        rows = cuts.slice(whole.detach(), self.mesh.get_local_rank(dim)).clone()
        placements = [Replicate()] * dim + [cuts]
        return ShardedTensor.wrap(rows, self.mesh, placements, whole.shape)

    def sharded(self):
        return [self.cut(whole) for whole in self.whole]


def value(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def weighted(result):
    """Returns a number that depends on each element of the result separately."""
    numbers = torch.arange(1.0, result.numel() + 1).reshape(result.shape)
    return (result * numbers.to(result.device).cos()).sum()
