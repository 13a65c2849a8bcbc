"""Operations on sharded tensors against the same operations on full tensors: values,
gradients, writes. Random shapes and shard sizes, also with ranks that have no rows."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from flatshard._tensor.shard_values import Values
from tests.python.device import on_device
from tests.python.shard_cases import FUNCTIONS, WRITES, Case, value, weighted
from tests.python.sum_order import SMALL_MODEL

NUM_CASES = 3  # of each operation, each with other shapes and cuts


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*all-gathers it")
        yield


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name, mesh):
    function = FUNCTIONS[name]
    for seed in range(NUM_CASES):
        case = Case(mesh, seed)
        results, gradients = [], []
        for tensors in (case.whole, case.sharded()):
            leaves = [
                t.clone().requires_grad_() for t in map(torch.Tensor.detach, tensors)
            ]
            leaves = [t.detach().requires_grad_() for t in leaves]
            result = function(*leaves)
            results.append(value(result).detach())
            if result.requires_grad:
                weighted(result).backward()
            gradients.append(leaves)
        torch.testing.assert_close(*results)
        for wholes, shard in zip(*gradients):
            assert (wholes.grad is None) == (shard.grad is None)
            if shard.grad is not None:
                assert shard.grad.placements == shard.placements
                assert shard.grad.to_local().shape == shard.to_local().shape
                torch.testing.assert_close(
                    shard.grad.full_tensor(), wholes.grad, rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("name", WRITES)
def test_writes(name, mesh):
    for seed in range(NUM_CASES):
        case = Case(mesh, seed)
        sharded = case.sharded()
        memory = sharded[0].to_local()
        results = [WRITES[name](*tensors) for tensors in (case.whole, sharded)]
        for whole, shard in zip(case.whole, sharded):
            torch.testing.assert_close(shard.full_tensor(), whole)
        assert sharded[0].to_local().data_ptr() == memory.data_ptr()
        if isinstance(results[0], torch.Tensor):
            torch.testing.assert_close(value(results[1]), results[0])


def test_replicas_agree(mesh_2d):
    for seed, name in enumerate(("norms", "T", "quantile", "matmul", "sum of columns")):
        case = Case(mesh_2d, seed)
        leaves = [t.detach().requires_grad_() for t in case.sharded()]
        whole = [t.detach().requires_grad_() for t in case.whole]
        results = [FUNCTIONS[name](*tensors) for tensors in (whole, leaves)]
        torch.testing.assert_close(value(results[1]), results[0])
        for result in results:
            weighted(result).backward()
        for a, b in zip(whole, leaves):
            if a.grad is not None:
                assert b.grad.placements == b.placements
                torch.testing.assert_close(
                    b.grad.full_tensor(), a.grad, rtol=1e-4, atol=1e-5
                )
    torch.manual_seed(torch.distributed.get_rank())  # the first rank's is used
    case = Case(mesh_2d, 1)
    noise = case.cut(case.whole[0]).normal_().full_tensor()
    all_noise = [torch.empty_like(noise) for _ in range(mesh_2d.size())]
    torch.distributed.all_gather(all_noise, noise)
    assert all(torch.equal(noise, other) for other in all_noise)


def test_views_see_later_writes(mesh):
    case = Case(mesh, 0)
    results = []
    for t, _, _ in (case.whole, case.sharded()):
        views = [t.T, t.view(-1), t[1:3], t[2], t.T[1:].T, t[:, 1]]
        t.mul_(2)
        views[0][1].add_(1)
        results.append([value(view * 1) for view in views])
    for whole, sharded in zip(*results):
        torch.testing.assert_close(sharded, whole)


def test_chains_of_operations(mesh):
    """Random chains: operations on the results of other operations."""
    names = [
        n for n in FUNCTIONS if n not in ("complex", "bits", "allclose", "nonzero")
    ]
    for seed in range(12):
        case = Case(mesh, seed)
        chosen = [case.random.choice(names) for _ in range(4)]
        ends = []
        for tensors in (case.whole, case.sharded()):
            leaf = tensors[0].detach().requires_grad_()
            t, o, v = leaf, *tensors[1:]
            for name in chosen:
                result = FUNCTIONS[name](t, o, v)
                if result.shape == t.shape and result.dtype == t.dtype:
                    t = result.tanh()
                elif result.is_floating_point():
                    t = t * (1 + weighted(result).tanh())
            t.sum().backward()
            ends += [value(t), value(leaf.grad)]
        torch.testing.assert_close(ends[2], ends[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ends[3], ends[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["norms", "T", "flatten", "normalize", "chunk", "mse"])
def test_inference_mode(name, mesh):
    case = Case(mesh, 6)
    with torch.inference_mode():
        results = [FUNCTIONS[name](*t) * 1 for t in (case.whole, case.sharded())]
        torch.testing.assert_close(value(results[1]), results[0])


IN_PLACE = {
    "rows": lambda q, t: q[1:3].zero_(),
    "one row": lambda q, t: q[2].mul_(3),
    "transposed": lambda q, t: q.T.add_(1),
    "flat": lambda q, t: q.view(-1)[3:8].mul_(3),
    "listed": lambda q, t: q.__setitem__([1, 2], q[[1, 2]] * t[[2, 3]]),
    "masked": lambda q, t: q.__setitem__(q > 0.1, 0.5),
    "columns": lambda q, t: q[:, 1].copy_(t[:, 0]),
    "turned": lambda q, t: q.t()[1].mul_(2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_gradients_of_writes(name, mesh):
    case = Case(mesh, 7)
    ends = []
    for tensors in (case.whole, case.sharded()):
        t = tensors[0].detach().requires_grad_()
        q = t * 2
        IN_PLACE[name](q, t)
        (q * q * q).sum().backward()
        ends += [value(q).detach(), value(t.grad)]
    torch.testing.assert_close(ends[2:], ends[:2], rtol=1e-4, atol=1e-4)


def test_python_reads_results(mesh):
    case = Case(mesh, 8)
    t = case.cut(case.whole[0])
    whole = case.whole[0]
    assert f"{t.sum():.2f}" == f"{whole.sum():.2f}"
    assert t.tolist() == whole.tolist() and len(t) == len(whole)
    assert (t.cpu().numpy() == whole.cpu().numpy()).all()
    assert bool((t > 0).any()) and torch.equal(
        copy.deepcopy(t.T).full_tensor(), whole.T
    )
    for view in (t, t.T, t[2], t[1:4], t @ t.T):
        file = io.BytesIO()
        torch.save(view, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=True)
        assert torch.equal(loaded.full_tensor(), view.full_tensor())


def test_second_derivatives(mesh):
    case = Case(mesh, 0)
    ends = []
    for tensors in (case.whole, case.sharded()):
        t, o, v = [x.detach().requires_grad_() for x in tensors]
        loss = (
            (t @ v).pow(3).sum() + (t * o).norm() + t.full_tensor().pow(3).mean()
            if (isinstance(t, DTensor))
            else (t @ v).pow(3).sum() + (t * o).norm() + t.pow(3).mean()
        )
        gradients = torch.autograd.grad(loss, (t, o, v), create_graph=True)
        for leaf, gradient in zip((t, o, v), gradients):
            if isinstance(leaf, DTensor):
                assert gradient.placements == leaf.placements
        sum(g.pow(2).sum() for g in gradients).backward()
        ends.append([value(x.grad) for x in (t, o, v)])
    for whole, sharded in zip(*ends):
        torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-4)


def test_replicated_and_evenly_sharded_tensors_may_be_beside(mesh):
    case = Case(mesh, 1)
    whole = case.whole[0]
    shard = case.cut(whole)
    for placement in (Replicate(), Shard(0), Shard(1)):
        other = distribute_tensor(whole.clone(), mesh, [placement])
        for result in (shard - other, other @ shard.T - whole @ whole.T, other - shard):
            assert value(result).abs().max() < SMALL_MODEL
        other.copy_(2 * shard)
        assert torch.equal(other.full_tensor(), 2 * whole)


def test_plain_tensors_count_as_equal_on_all_ranks(mesh, rank, world):
    case = Case(mesh, 2)
    whole = case.whole[0]
    shard = case.cut(whole)
    assert torch.equal((shard - whole).full_tensor(), whole - whole)
    other = whole * (rank + 1)
    if world > 1:
        with pytest.raises(RuntimeError, match="mul: a sharded tensor meets plain"):
            shard * other
        gain = case.cut(on_device(torch.ones(1))).requires_grad_()
        with pytest.raises(RuntimeError, match="mul: a sharded tensor meets plain"):
            gain * other  # whose gradient each rank would have of its local values
    other.copy_(shard)  # its contents do not matter
    assert torch.equal(other, whole)
    loss = on_device(torch.tensor(1.0 + rank, requires_grad=True))
    total = loss * 2 + shard.pow(2).sum()
    total.backward()
    assert type(loss.grad) is torch.Tensor and loss.grad == 2


def test_a_gather_is_warned_of_once(mesh, monkeypatch):
    monkeypatch.setattr(Values, "warned", set())
    case = Case(mesh, 3)
    shard = case.cut(case.whole[0])
    with pytest.warns(UserWarning, match=r"flip .* all-gathers it: .* MiB .*to_local"):
        shard.flip(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shard.flip(0)
        (
            shard.sum(),
            shard.norm(),
            shard * 2,
            shard.T,
            shard[2].fill_(1),
            shard.softmax(1),
        )


def test_shapes_of_memory_stay(mesh):
    case = Case(mesh, 4)
    with pytest.raises(NotImplementedError, match="resize_ of a sharded tensor"):
        case.cut(case.whole[0]).resize_(3)
    with pytest.raises(RuntimeError):
        case.cut(case.whole[0]).add_(on_device(torch.ones(2, *case.whole[0].shape)))


# -- random numbers --------------------------------------------------------------------

RANDOM = {
    "normal_": lambda t: t.normal_(1, 2),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "transposed": lambda t: t.T.normal_(),
    "rows": lambda t: t[1:4].normal_(),
    "randn_like": torch.randn_like,
    "noise": lambda t: t + 0.1 * torch.rand_like(t),
    "dropout": lambda t: F.dropout(t, 0.5),
    "bernoulli": lambda t: t.sigmoid().bernoulli(),
    "multinomial": lambda t: t.abs().sum(1).multinomial(3),
    "xavier": torch.nn.init.xavier_uniform_,
    "kaiming": torch.nn.init.kaiming_normal_,
    "trunc_normal": torch.nn.init.trunc_normal_,
    "orthogonal": torch.nn.init.orthogonal_,
    "sparse": lambda t: torch.nn.init.sparse_(t, 0.5),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_numbers_are_those_of_one_process(name, mesh, rank):
    case = Case(mesh, 5)
    results = []
    for tensor in (case.whole[0].clone(), case.cut(case.whole[0])):
        torch.manual_seed(7)
        results += [value(RANDOM[name](tensor)), value(tensor)]
        after = torch.rand(1)
    torch.testing.assert_close(results[2:], results[:2])
    if name == "sparse":
        return  # it draws indices, which have to be equal on all ranks
    torch.manual_seed(100 + rank)  # ranks that are seeded apart: the first one's values
    expected = torch.rand(1) if rank else None
    torch.manual_seed(100 + rank)
    results = value(RANDOM[name](case.cut(case.whole[0])))
    others = [torch.empty_like(results) for _ in range(mesh.size())]
    torch.distributed.all_gather(others, results.contiguous(), group=mesh.get_group())
    assert all(torch.equal(results, other) for other in others)
    assert rank == 0 or torch.equal(torch.rand(1), expected)
    assert after is not None
