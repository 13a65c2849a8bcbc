"""Optimizers, clipping, state dicts and distributed checkpoints of torch on the result
of `fully_shard`, and the core's AdamW compared with torch.optim.AdamW."""

import copy
import io
import pickletools
import zipfile

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import flatshard
from flatshard import fully_shard
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp
from tests.python.sum_order import SMALL_MODEL
from tests.python.training import distance, full_state, shard, train

# -- DTensor ---------------------------------------------------------------------


@pytest.fixture(params=["uneven", "first rank alone", "last rank alone"])
def pair(request, mesh, world, rank):
    """Returns a tensor and the same one, sharded unevenly; or one rank has all rows."""
    rows = 4 * world
    full = on_device(torch.arange(1.0, 1 + 3 * rows)).reshape(rows, 3)
    cuts = {
        "uneven": tuple(range(world)) + (rows,),
        "first rank alone": (0,) + world * (rows,),
        "last rank alone": world * (0,) + (rows,),
    }[request.param]
    return full, cut(full, mesh, rank, cuts)


def cut(full, mesh, rank, cuts):
    local = full[cuts[rank] : cuts[rank + 1]].clone()
    return ShardedTensor.wrap(local, mesh, [RowShard(cuts)], full.shape)


RIGHT = {
    "detach": lambda t: t.detach(),
    "clone": lambda t: t.clone(),
    "zeros_like": torch.zeros_like,
    "mul": lambda t: t * 2,
    "add": lambda t: t + t,
    "where": lambda t: torch.where(t > 3, t, 0.0),
    "to": lambda t: t.to(torch.bfloat16),
    "in place": lambda t: t.clone().mul_(3).add_(t),
    "sum": lambda t: t.sum(),
    "sum of rows": lambda t: t.sum(1),
    "sum of columns": lambda t: t.sum(0),
    "norm": lambda t: t.norm(),
    "max": lambda t: t.max(),
    "min": lambda t: (-t).min(),
    "max of integers": lambda t: t.to(torch.int32).max(),
    "max of columns": lambda t: t.amax(0),
    "max of rows": lambda t: t.amax(1),
    "aminmax": lambda t: t.aminmax()[0],
    "inf-norm": lambda t: t.norm(float("inf")),
    "inf-norm of columns": lambda t: torch.linalg.vector_norm(t, torch.inf, dim=0),
    "negative norm": lambda t: torch.linalg.vector_norm(t, ord=-1),
    "foreach inf-norm": lambda t: torch._foreach_norm([t, t], torch.inf)[1],
    "largest of rows": lambda t: t.max(dim=1).values,
    "largest of columns": lambda t: t.max(dim=0).indices,
    "topk": lambda t: t.topk(2).values,
    "sort": lambda t: t.sort(descending=True).indices,
    "qr": lambda t: torch.linalg.qr(t).Q,
    "singular values": lambda t: torch.linalg.svd(t).S,
    "view of rows": lambda t: t.view(-1, 3, 1),
    "squeeze": lambda t: t.unsqueeze(-1).squeeze(),
    "std": lambda t: t.std(),
    "one row": lambda t: t[2],
    "some rows": lambda t: t[1:4],
    "cumsum": lambda t: t.cumsum(0),
    "tril": lambda t: t.tril(),
    "softmax over rows": lambda t: t.softmax(0),
    "cat": lambda t: torch.cat([t, t]),
    "foreach": lambda t: torch._foreach_mul([t, t], 2.0)[1],
    "mean": lambda t: t.mean(),
    "flip": lambda t: t.flip(0),
    "var over rows": lambda t: t.var(0),
    "sort over rows": lambda t: t.sort(0, descending=True)[0],
    "view": lambda t: t.view(-1),
    "reshape": lambda t: t.reshape(t.shape[0] // 2, 6),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(0, (2, -1)),
    "argmax": lambda t: t.argmax(),
    "t": lambda t: t.t(),
    "T": lambda t: t.T,
    "quantile": lambda t: t.quantile(0.5),
}


def value(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize("name", RIGHT)
def test_results_are_right(name, pair):
    if name == "cumsum" and DEVICE == "cuda":
        pytest.skip("CUDA has no deterministic cumsum of floats")
    full, sharded = pair
    torch.testing.assert_close(value(RIGHT[name](sharded)), RIGHT[name](full))


def test_reductions_of_a_rank_without_rows_have_gradients(pair):
    full, sharded = pair
    for reduce in (lambda t: t.abs().max(), lambda t: t.view(-1, 1, 3).amax(0).sum()):
        grads = []
        for tensor in (full, sharded):
            leaf = tensor.detach().requires_grad_()
            value(reduce(leaf)).backward()
            grads.append(value(leaf.grad))
        assert torch.equal(*grads)


def test_other_cuts_are_brought_together(pair, mesh, world, rank):
    full, sharded = pair
    rows = full.shape[0]
    others = [
        cut(
            full,
            mesh,
            rank,
            (0,) + tuple(rows - world + i for i in range(1, world + 1)),
        ),
        distribute_tensor(full, mesh, [Shard(0)]),
        distribute_tensor(full, mesh, [Replicate()]),
    ]
    for other in others:
        assert torch.equal(value(sharded + other), 2 * full)
        assert torch.equal(value(other + sharded), 2 * full)
        assert torch.equal(value(sharded.clone().copy_(other * 3)), 3 * full)
        assert torch.equal(value(other.clone().copy_(sharded * 3)), 3 * full)
        assert torch.equal(value(torch._foreach_add([sharded], [other])[0]), 2 * full)
        for mine, yours in ((sharded, other), (other, sharded)):
            lists = [mine.clone(), mine.clone()], [yours.clone(), mine.clone()]
            with torch.no_grad():
                torch._foreach_add_(*lists)
            for result in lists[0]:
                assert torch.equal(value(result), 2 * full)
    there = sharded.redistribute(mesh, [Shard(0)])
    assert type(there.placements[0]) is Shard and torch.equal(value(there), full)


def test_lists_are_updated_piece_by_piece(pair, mesh):
    full, sharded = pair
    scalar = distribute_tensor(on_device(torch.tensor(3.0)), mesh, [Replicate()])
    partial = (sharded * 0 + 1).sum()  # to be summed over the ranks
    with torch.no_grad():
        for factor, expected in ((2.0, 2), ([2.0, 2.0], 2), (scalar, 3)):
            tensors = [sharded.clone(), sharded.clone()]
            torch._foreach_mul_(tensors, factor)
            assert all(torch.equal(value(t), expected * full) for t in tensors)
        tensors = [sharded.clone(), sharded.clone()]
        torch._foreach_mul_(tensors, partial)
        for result in tensors:
            torch.testing.assert_close(value(result), full * full.numel())
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        torch._foreach_add_([sharded.detach().requires_grad_()], 1.0)


def test_cuts_are_never_taken_for_others(mesh, world, rank):
    """DTensor remembers how it did an operation, by the specs of its arguments."""
    rows = 8 * world
    full = on_device(torch.randn(rows, 3, generator=torch.Generator().manual_seed(1)))
    plain = distribute_tensor(full, mesh, [Shard(0)])
    for first in range(1, 5):
        cuts = (0,) + tuple(first + i for i in range(world - 1)) + (rows,)
        sharded = cut(full, mesh, rank, cuts)
        for tensor in (sharded, plain, sharded * 1, plain * 1):
            assert torch.equal(value(tensor), full)
            assert torch.equal(value(tensor[3]), full[3])


# -- optimizers ----------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {}),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
    "adamw fused": (torch.optim.AdamW, {"fused": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {}),
    "adagrad": (torch.optim.Adagrad, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch(name, mesh, rank, world):
    kind, options = OPTIMIZERS[name]
    ours, theirs = Mlp(), None
    theirs = copy.deepcopy(ours)
    shard(ours, fully_shard, mesh=mesh)
    shard(theirs, fsdp2, mesh=mesh)
    for model in (ours, theirs):
        optimizer = kind(model.parameters(), lr=1e-2, **options)
        for step in range(3):
            loss = model.loss(torch.Generator().manual_seed(10 * step + rank))
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert distance(full_state(ours), full_state(theirs)) < SMALL_MODEL
    assert norm.full_tensor() > 0


@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_cores_adamw_equals_torchs(strategy, dtype, mesh, rank):
    options = {
        "mesh": mesh,
        "strategy": strategy,
        "mp_policy": flatshard.MixedPrecisionPolicy(param_dtype=dtype),
    }
    ours = Mlp()
    theirs = copy.deepcopy(ours)
    for model, kind in ((ours, flatshard.optim.AdamW), (theirs, torch.optim.AdamW)):
        shard(model, fully_shard, **options)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        others = [p for p in model.parameters() if p.dim() <= 1]
        optimizer = kind(
            [{"params": decayed}, {"params": others, "weight_decay": 0.0}],
            lr=1e-2,
            eps=1e-4,
            weight_decay=0.1,
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 4)
        for step in range(4):
            model.loss(torch.Generator().manual_seed(10 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    # A weight that is rounded the other way to bf16 changes gradients by 2^-8.
    bound = SMALL_MODEL if dtype is None else 1e-3
    assert distance(full_state(ours), full_state(theirs)) < bound


def test_state_of_the_cores_adamw_travels(mesh, rank):
    def fresh(kind):
        torch.manual_seed(0)
        model = shard(Mlp(), fully_shard, mesh=mesh)
        return model, kind(model.parameters(), lr=1e-2, eps=1e-4)

    a, core = fresh(flatshard.optim.AdamW)
    train(a, rank, steps=2, optimizer=core)
    b, plain = fresh(torch.optim.AdamW)
    b.load_state_dict(a.state_dict())
    # torch's optimizers keep the given tensors themselves.
    plain.load_state_dict(copy.deepcopy(core.state_dict()))
    c, again = fresh(flatshard.optim.AdamW)
    c.load_state_dict(a.state_dict())
    again.load_state_dict(copy.deepcopy(plain.state_dict()))
    for model, optimizer in ((a, core), (b, plain), (c, again)):
        train(model, rank, steps=2, optimizer=optimizer)
    assert distance(full_state(a), full_state(c)) == 0
    assert distance(full_state(a), full_state(b)) < SMALL_MODEL


def test_the_cores_adamw_names_what_it_cannot_do(mesh):
    model = shard(Mlp(), fully_shard, mesh=mesh)
    parameters = list(model.parameters())
    with pytest.raises(NotImplementedError, match="amsgrad"):
        flatshard.optim.AdamW(parameters, amsgrad=True)
    with pytest.raises(ValueError, match="lr: expected at least 0"):
        flatshard.optim.AdamW(
            [{"params": parameters[:3]}, {"params": parameters[3:], "lr": -1.0}]
        )
    # Programs of accelerate shard the parameters afterwards.
    of_plain = flatshard.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(
        ValueError, match="expected parameters that fully_shard sharded"
    ):
        of_plain.step()


def test_clipping_sees_every_element_once(mesh, world, rank):
    model = Mlp()
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    for r in range(world):
        (single.loss(torch.Generator().manual_seed(r)) / world).backward()
    for foreach in (True, False):
        ours = torch.nn.utils.clip_grad_norm_(
            model.parameters(), 1e9, foreach=foreach
        ).full_tensor()
        theirs = torch.nn.utils.clip_grad_norm_(single.parameters(), 1e9)
        torch.testing.assert_close(ours, theirs)
        # Some biases have no rows on some rank.
        torch.testing.assert_close(
            torch.nn.utils.clip_grad_norm_(
                model.parameters(), 1e9, norm_type=torch.inf, foreach=foreach
            ).full_tensor(),
            torch.nn.utils.clip_grad_norm_(single.parameters(), 1e9, torch.inf),
        )


# -- checkpoints ------------------------------------------------------------------------


def trained(function, mesh, rank, kind=torch.optim.AdamW, seed=0):
    torch.manual_seed(seed)
    model = shard(Mlp(), function, mesh=mesh)
    optimizer = kind(model.parameters(), lr=1e-2)
    train(model, rank, steps=2, optimizer=optimizer)
    return model, optimizer


@pytest.mark.parametrize(
    "writer, reader",
    [(fully_shard, fsdp2), (fsdp2, fully_shard), (fully_shard, fully_shard)],
    ids=["to fsdp2", "from fsdp2", "to itself"],
)
def test_dcp(writer, reader, folder, mesh, rank):
    a, optimizer_a = trained(writer, mesh, rank)
    model_state, optimizer_state = get_state_dict(a, optimizer_a)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    b, optimizer_b = trained(reader, mesh, rank, seed=1)
    model_state, optimizer_state = get_state_dict(b, optimizer_b)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(
        b,
        optimizer_b,
        model_state_dict=model_state,
        optim_state_dict=optimizer_state,
    )
    assert distance(full_state(a), full_state(b)) == 0
    for model, optimizer in ((a, optimizer_a), (b, optimizer_b)):
        train(model, rank, steps=2, optimizer=optimizer)
    assert distance(full_state(a), full_state(b)) < SMALL_MODEL


def test_dcp_async_save(folder, mesh, rank):
    model, _ = trained(fully_shard, mesh, rank)
    before = full_state(model)
    future = dcp.async_save(get_model_state_dict(model), checkpoint_id=folder)
    future.result()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state)
    assert distance(full_state(model), before) == 0


@pytest.mark.parametrize("weights_only", [True, False])
def test_saved_shards_name_types_as_version_0_2_did(weights_only, mesh):
    model = fully_shard(on_device(Mlp()), mesh=mesh)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    archive = zipfile.ZipFile(file)
    (name,) = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    types = {
        argument
        for opcode, argument, _ in pickletools.genops(archive.read(name))
        if opcode.name == "GLOBAL" and argument.startswith("flatshard")
    }
    expected = {"flatshard.sharded_tensor ShardedTensor"}
    if mesh.size() > 1:
        expected |= {"flatshard.row_shard RowShard", "flatshard.row_spec RowSpec"}
    assert types == expected
    file.seek(0)
    loaded = torch.load(file, weights_only=weights_only)
    for name, value in model.state_dict().items():
        assert loaded[name].placements == value.placements
        assert torch.equal(loaded[name].to_local(), value.to_local())


def test_full_state_dicts(mesh, rank):
    model, optimizer = trained(fully_shard, mesh, rank)
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model, options=options)
    whole = full_state(model)
    assert state.keys() == whole.keys()
    assert all(torch.equal(state[name], whole[name]) for name in state)
    Mlp().load_state_dict(state)
    optimizer_state = get_optimizer_state_dict(model, optimizer, options=options)
    shape = optimizer_state["state"]["head.weight"]["exp_avg"].shape
    assert shape == (5, 13)
    other, _ = trained(fully_shard, mesh, rank, seed=1)
    set_model_state_dict(other, state, options=options)
    assert distance(full_state(other), whole) == 0


def test_new_values_in_a_shards_shape_have_its_rows(mesh):
    model = fully_shard(on_device(torch.nn.Linear(5, 7)), mesh=mesh)
    for p in model.parameters():
        rows = p.to_local().shape
        for made in (
            p.new_zeros(p.shape),
            p.new_empty(p.shape, dtype=torch.float64).zero_(),
            p.new_full(p.shape, 0.0),
        ):
            assert type(made) is type(p.data) and made.shape == p.shape
            assert made.placements == p.placements
            assert made.to_local().shape == rows
            torch.testing.assert_close(
                made.full_tensor(), on_device(torch.zeros(p.shape, dtype=made.dtype))
            )
