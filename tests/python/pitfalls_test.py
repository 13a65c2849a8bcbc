"""The pitfalls of docs/dev/regressions.md that can occur in the Python layer. Test
names start with their numbers; scripts/mutate brings each back and sees the test
fail."""

import copy
import gc
import weakref

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import Shard, distribute_tensor

import flatshard
from flatshard import MixedPrecisionPolicy
from flatshard._fsdp import root
from flatshard._tensor.places import state_of
from flatshard._tensor.sharded_tensor import ShardedTensor
from tests.python.device import DEVICE, on_device
from tests.python.models import DIM, Block, Body, plain
from bench.harness.options import fully_shard
from tests.python.training import against_one_process, data, full_state, shard


def sharded(mesh, **options):
    return shard(Body(plain), fully_shard, mesh=mesh, **options)


def loss_of(model, rank):
    return model(data(rank)).square().mean()


def test_B2_attributes_reach_the_shards(mesh, rank):
    model = Body(plain)
    model.head.weight.no_decay = True
    model.blocks[0].up.bias.group = "biases"
    seen = []
    model.head.register_forward_hook(lambda m, *_: seen.append(m.weight.no_decay))
    shard(model, fully_shard, mesh=mesh)
    model(data(rank))
    assert seen == [True]
    assert model.head.weight.no_decay and model.blocks[0].up.bias.group == "biases"
    assert not hasattr(model.head.bias, "no_decay")


def test_B8_first_values_are_those_of_one_process(mesh, rank, world):
    with torch.device("meta"):
        model = Body(plain)
    shard(model, fully_shard, mesh=mesh)
    flatshard.reset_parameters(model, seed=1)

    def values(of):
        return {name: value.cpu() for name, value in full_state(of).items()}

    found = [None] * world
    torch.distributed.all_gather_object(found, values(model))
    with torch.device("meta"):
        again = Body(plain)
    shard(again, fully_shard, mesh=mesh)
    torch.manual_seed(100 + rank)  # what ranks drew before does not matter
    flatshard.reset_parameters(again, seed=1)
    found.append(values(again))
    for name, value in found[0].items():
        assert all(torch.equal(other[name], value) for other in found)


def test_B9_first_values_leave_the_programs_generator_alone(mesh):
    model = sharded(mesh)
    torch.manual_seed(3)
    expected = torch.rand(4, device=DEVICE)
    torch.manual_seed(3)
    flatshard.reset_parameters(model, seed=1)
    assert torch.equal(torch.rand(4, device=DEVICE), expected)


def test_B14_calling_below_the_root_is_named(mesh, rank, world):
    if world == 1:
        pytest.skip("no other rank has other data")
    model = sharded(mesh)
    model.set_reshard_after_forward(True, recurse=False)
    model(data(rank))
    with pytest.raises(RuntimeError, match="parameter weight of Linear .*unit root"):
        model.head(data(rank))
    loss_of(model, rank).backward()


def test_B33_ranks_without_rows_save_and_load(mesh, rank, folder):
    def make(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 1))  # a bias of one row
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(on_device(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        parts = get_state_dict(model, optimizer)
        return model, dict(zip(("model", "optimizer"), parts))

    saved, state = make(0)
    dcp.save(state, checkpoint_id=folder)
    loaded, state = make(1)
    dcp.load(state, checkpoint_id=folder)
    loaded.load_state_dict(state["model"])
    expected = full_state(saved)
    for name, value in full_state(loaded).items():
        assert torch.equal(value, expected[name]), name


def test_B34_copies_keep_what_describes_them(mesh, rank):
    model = nn.Sequential(nn.Conv2d(3, 7, 3), nn.Conv2d(7, 2, 1))
    fully_shard(model, mesh=mesh)
    state = model.state_dict()
    for copied in (copy.deepcopy(state), {k: t.clone() for k, t in state.items()}):
        for name, tensor in copied.items():
            assert type(tensor) is ShardedTensor
            assert tensor.placements == state[name].placements
            assert torch.equal(tensor.full_tensor(), state[name].full_tensor())
            assert (
                tensor._local_tensor.data_ptr()
                != (state[name]._local_tensor.data_ptr())
                or not tensor._local_tensor.numel()
            )
    # torch copies no tensor that has a history.
    doubled = model[0].weight * 2
    copied = copy.deepcopy(doubled)
    assert not copied.requires_grad
    assert torch.equal(copied.full_tensor(), doubled.full_tensor())


def test_B35_a_replacement_of_another_shape_is_refused(mesh):
    model = sharded(mesh)
    state = model.state_dict()
    del state["head.weight"]
    with pytest.raises(RuntimeError, match="Missing key.*head.weight"):
        model.load_state_dict(state)
    state["head.weight"] = torch.ones(1, DIM)
    with pytest.raises(RuntimeError, match="size mismatch for head.weight"):
        model.load_state_dict(state, assign=True)
    # One row would be spread over all of them.
    model.head._parameters["weight"] = nn.Parameter(torch.ones(1, DIM))
    with pytest.raises(ValueError, match="head.weight was replaced .*plain tensor"):
        model(data(0))
    row = distribute_tensor(torch.ones(1, DIM), mesh, [Shard(0)])
    model.head._parameters["weight"] = nn.Parameter(row)
    with pytest.raises(ValueError, match="head.weight was replaced .*one of shape"):
        model(data(0))


def test_B38_a_deleted_model_needs_no_collector(mesh, rank):
    first = sharded(mesh)  # torch keeps frames of the first backward
    loss_of(first, rank).backward()
    gc.collect()
    gc.disable()
    try:
        model = sharded(mesh)
        loss_of(model, rank).backward()
        refs = [weakref.ref(state_of(model)), weakref.ref(model.head.weight)]
        del model
        assert [ref() for ref in refs] == [None, None]
    finally:
        gc.enable()


def test_B39_a_tied_parameter_has_one_place(mesh, rank, world):
    model = Body(plain)
    model.blocks[0].down.weight = nn.Parameter(model.blocks[0].up.weight.t().clone())
    model.more = nn.Linear(DIM, 5, bias=False)
    model.more.weight = model.head.weight

    def body(m, x):
        return m.blocks[0](x) + m.more(x).sum(-1, keepdim=True)

    model.body = body
    against_one_process(model, mesh, rank, world)
    assert model.more.weight is model.head.weight
    assert state_of(model).core.num_parameters == 2


@pytest.mark.parametrize("stays", [False, True])
def test_B42_every_forward_sees_the_last_write(mesh, rank, stays):
    model = sharded(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    if stays:  # whole from one step to the next, but for writes
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    x = data(rank)
    for _ in range(3):
        model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = Body(plain).bfloat16()
        whole.load_state_dict(full_state(model))
        with torch.no_grad():
            assert torch.equal(model(x), whole(x.bfloat16()))


def test_B43_assigning_a_state_keeps_the_shards(mesh, rank):
    model, other = sharded(mesh), sharded(mesh)
    before = dict(model.named_parameters())
    model.load_state_dict(other.state_dict(), assign=True)
    assert all(p is before[name] for name, p in model.named_parameters())
    assert torch.equal(model(data(rank)), other(data(rank)))


def test_B46_no_sync_loses_no_microbatch(mesh, rank, world):
    def act(m, x):
        if not hasattr(m, "no_sync"):
            for _ in range(4):
                loss = m(x).square().mean()
                loss.backward()
            return
        with m.no_sync():
            m(x).square().mean().backward()
            with m.no_sync():  # ends without ending the outer one
                m(x).square().mean().backward()
            assert not m._state().policy.sync_gradients
            m(x).square().mean().backward()
        assert m._state().policy.sync_gradients
        m(x).square().mean().backward()

    against_one_process(Body(plain), mesh, rank, world, act=act)


def test_B54_each_parameter_belongs_to_one_unit(mesh, rank, world):
    model = Body(plain)
    fully_shard(model.blocks[0].up, mesh=mesh)  # a unit in a unit in a unit
    shard(model, fully_shard, mesh=mesh)
    held = [
        id(p.shard)
        for m in model.modules()
        if (state := state_of(m)) is not None
        for p in state.parameters
    ]
    assert len(held) == len(set(held)) == len(list(model.parameters()))
    loss_of(model, rank).backward()


def test_B64_outputs_may_be_changed_in_place(mesh, rank, world):
    def body(m, x):
        for block in m.blocks:
            x = block(x)
            x.mul_(0.5)
        return x

    against_one_process(Body(body), mesh, rank, world)


class Fails(Exception):
    pass


def test_R4_a_forward_that_throws(mesh, rank, world):
    def fails(m, x):
        m.blocks[1](m.blocks[0](x))
        raise Fails

    model = Body(plain)
    single = copy.deepcopy(model)
    fully_shard(list(model.blocks[:2]), mesh=mesh)  # one unit of two modules
    shard_rest = [model.blocks[2], model]
    for module in shard_rest:
        fully_shard(module, mesh=mesh)
    for body in (fails, lambda m, x: m.blocks[0](x[:, :1])):
        model.body = body
        with pytest.raises((Fails, RuntimeError)):
            loss_of(model, rank)
    model.body = plain
    loss_of(model, rank).backward()
    for r in range(world):
        (loss_of(single, r) / world).backward()
    for ours, theirs in zip(model.parameters(), single.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_R6_gradients_travel_in_the_reduce_dtype(mesh, rank, world):
    if world == 1:
        pytest.skip("nothing is reduced")
    grads = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = sharded(mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        loss_of(model, rank).backward()
        grads[dtype] = model.head.weight.grad.full_tensor()
    rounded = grads[torch.bfloat16]
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, grads[torch.float32])
    torch.testing.assert_close(rounded, grads[torch.float32], rtol=0.05, atol=1e-3)


def test_R21_every_option_has_an_effect(mesh, world, monkeypatch):
    if world == 1:
        pytest.skip("one rank holds all rows")
    rows = world + 1  # more rows than ranks, not a multiple

    def placement(width=64, **options):
        model = fully_shard(nn.Linear(width, rows, bias=False), mesh=mesh, **options)
        return model.weight.placements[0]

    by_row = placement()
    assert max(by_row.rows(r) for r in range(world)) == 2
    whole = placement(granularity="tensor")
    assert sorted(whole.rows(r) for r in range(world)) == [0] * (world - 1) + [rows]
    assert not hasattr(placement(strategy="no_shard"), "rows")
    with pytest.raises(ValueError, match="max_padding"):
        placement(max_padding=-1.0)
    wide = fully_shard(nn.Linear(4, rows), mesh=mesh, max_padding=0.3)
    assert state_of(wide).sharding.model_options.max_padding == 0.3
    asked = []
    monkeypatch.setattr(
        root._C,
        "describe_excessive_padding",
        lambda units, max_padding: asked.append(max_padding),
    )
    wide(on_device(torch.ones(1, 4)))
    assert asked == [0.3]


def test_R22_hooks_of_the_user_run_and_can_be_removed(mesh, rank):
    model = sharded(mesh)
    calls = []
    block = model.blocks[1]

    def before(module, args):
        calls.append(("before", tuple(module.up.weight.shape)))

    def after(module, args, out):
        calls.append(("after", type(module.up.weight) is nn.Parameter))

    handles = [
        block.register_forward_pre_hook(before),
        block.register_forward_hook(after),
        block.register_full_backward_hook(lambda *_: calls.append(("backward", True))),
    ]
    loss_of(model, rank).backward()
    shape = tuple(block.up.weight.shape)
    expected = [("before", shape), ("after", True), ("backward", True)]
    assert calls == expected
    for handle in handles:
        handle.remove()
    loss_of(model, rank).backward()
    assert calls == expected
    assert not block._forward_hooks and not block._forward_pre_hooks


def test_R26_a_step_returns_the_closures_loss(mesh, rank):
    model = sharded(mesh)
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-2)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rank)
        loss.backward()
        return loss

    expected = loss_of(model, rank)
    assert torch.equal(optimizer.step(closure), expected)
    assert not torch.equal(loss_of(model, rank), expected)


def test_R27_nested_outputs_are_seen(mesh, rank, world):
    class Nests(Block):
        def forward(self, x):
            return {"deep": ([super().forward(x["deep"][0][0])],)}

    def body(m, x):
        x = {"deep": ([x],)}
        for block in m.blocks:
            x = block(x)
        return x["deep"][0][0]

    model = Body(body)
    model.blocks = nn.ModuleList(Nests(DIM, 17) for _ in range(3))
    against_one_process(model, mesh, rank, world)


def test_R28_reading_a_released_parameter_is_named(mesh, rank, world):
    model = sharded(mesh)
    kept = []
    model.blocks[1].up.register_forward_hook(lambda m, *_: kept.append(m.weight))
    loss_of(model, rank).backward()
    assert type(kept[0]) is nn.Parameter
    if world > 1:
        with pytest.raises(
            RuntimeError, match="parameter blocks.1.up.weight .*unshard"
        ):
            kept[0].sum()
    model.blocks[1].unshard()
    assert torch.isfinite(kept[0].sum())
