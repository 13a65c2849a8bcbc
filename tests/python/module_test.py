"""Programs use modules in these ways, and each must train like the unsharded one."""

import copy
import gc
import warnings
import weakref
from dataclasses import dataclass

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import fully_shard
from flatshard._fsdp import initialize
from flatshard._tensor.places import state_of
from tests.python.device import DEVICE, on_device
from tests.python.models import DIM, Block, Body, Mlp, llama, plain
from tests.python.training import (
    against_one_process,
    assert_same_grads,
    backward_both,
    data,
    full_state,
    shard,
    two_microbatches,
)


def test_order_of_calls_may_change(mesh, rank, world):
    orders = [[0, 1, 2], [2, 0, 1], [1, 2, 0], [0, 1, 2]]

    def body(m, x):
        for i in m.order:
            x = m.blocks[i](x)
        return x

    def act(m, x):
        for m.order in orders:
            m(x).square().mean().backward()

    against_one_process(Body(body), mesh, rank, world, act=act)


def test_a_unit_called_twice(mesh, rank, world):
    def body(m, x):
        return m.blocks[2](m.blocks[1](m.blocks[0](m.blocks[0](x))))

    against_one_process(Body(body), mesh, rank, world)


def test_unused_unit_and_unused_parameter(mesh, rank, world):
    class OnlyUp(Block):
        def forward(self, x):
            return x + self.up(x).sum(-1, keepdim=True)

    model = Body(lambda m, x: m.blocks[1](m.blocks[0](x)))
    model.blocks[1] = OnlyUp(DIM, 40)
    against_one_process(model, mesh, rank, world)


class Skips(Block):
    """Its parameters are all-gathered and get no gradient."""

    used = False

    def forward(self, x):
        return super().forward(x) if self.used else x + 0


def skipping_model():
    model = Body(lambda m, x: plain(m, x))
    model.blocks[1] = Skips(DIM, 40)
    model.scale = nn.Parameter(torch.ones(3))
    model.head.requires_grad_(False)
    return on_device(model)


def test_units_without_a_gradient_have_none_as_under_fsdp2(mesh, rank):
    model = skipping_model()
    theirs = shard(copy.deepcopy(model), fsdp2, mesh=mesh)
    before = copy.deepcopy(model).state_dict()
    shard(model, fully_shard, mesh=mesh)
    for m in (model, theirs):
        m(data(rank)).sum().backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {n for n, p in theirs.named_parameters() if p.grad is None}
    assert {"scale", "blocks.1.up.weight"} < without
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    optimizer.step()
    after = full_state(model)
    for name, value in before.items():
        assert torch.equal(value, after[name]) == (name in without), name


@pytest.mark.parametrize("hooked", [False, True])
def test_a_unit_with_a_gradient_on_one_rank(hooked, mesh, rank, world):
    """FSDP2 of torch 2.11 waits forever: the other ranks do not reduce."""
    torch.manual_seed(0)
    model = skipping_model()
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)
    seen = []
    weight = model.blocks[1].up.weight
    if hooked:
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model(data(rank)).sum().backward()
    assert weight.grad is None and not seen
    model.zero_grad()
    model.blocks[1].used = rank == 0
    model(data(rank)).sum().backward()
    single.blocks[1].used = True
    (single(data(0)).sum() / world).backward()
    expected = single.blocks[1].up.weight.grad
    torch.testing.assert_close(weight.grad.full_tensor(), expected)
    assert len(seen) == hooked
    # A backward without a gradient leaves the existing one.
    model.blocks[1].used = False
    model(data(rank)).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), expected)
    model.zero_grad()
    # Nor does the last microbatch forget what others had.
    model.blocks[1].used = rank == 0
    with model.no_sync():
        model(data(rank)).sum().backward()
    model.blocks[1].used = False
    model(data(rank)).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), expected)
    model.zero_grad()
    model(data(rank)).sum().backward()
    assert weight.grad is None


@dataclass
class Result:
    hidden: torch.Tensor
    extra: dict


class Nested(Block):
    def forward(self, *, state):
        hidden = super().forward(state.hidden)
        return Result(hidden, {"pair": (hidden * 2, [hidden + 1])})


def test_nested_outputs_and_keyword_only_inputs(mesh, rank, world):
    def body(m, x):
        state = Result(x, {})
        for block in m.blocks:
            state = block(state=state)
        pair = state.extra["pair"]
        return state.hidden + pair[0] + pair[1][0]

    model = Body(body)
    model.blocks = nn.ModuleList(Nested(DIM, 40) for _ in range(3))
    against_one_process(model, mesh, rank, world)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_around_units(reentrant, mesh, rank, world):
    def body(m, x):
        x = x * m.head.weight.sum()  # reentrant checkpoints want an input with gradient
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    against_one_process(Body(body), mesh, rank, world)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_inside_units(reentrant, mesh, rank, world):
    class Inside(Block):
        def forward(self, x):
            return x + checkpoint(self.inner, x, use_reentrant=reentrant)

        def inner(self, x):
            return self.down(torch.relu(self.up(x)))

    model = Body(plain)
    model.blocks = nn.ModuleList(Inside(DIM, 40) for _ in range(3))
    against_one_process(model, mesh, rank, world)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_over_two_units(reentrant, mesh, rank, world):
    def body(m, x):
        x = x * m.head.weight.sum()
        x = checkpoint(
            lambda y: m.blocks[1](m.blocks[0](y)), x, use_reentrant=reentrant
        )
        return m.blocks[2](x)

    against_one_process(Body(body), mesh, rank, world)


def test_in_place_on_outputs_and_inputs(mesh, rank, world):
    class Writes(Block):
        def forward(self, x):
            x.mul_(0.5)
            return super().forward(x)

    def body(m, x):
        x = x + 0
        for block in m.blocks:
            x = block(x)
            x.add_(1)
        return x

    model = Body(body)
    model.blocks[1] = Writes(DIM, 40)
    against_one_process(model, mesh, rank, world)


def test_evaluation_between_steps(mesh, rank, world):
    def act(m, x):
        with torch.no_grad():
            m(x)
        loss = m(x).square().mean()
        with torch.inference_mode():
            m(x)
        loss.backward()
        with torch.no_grad():
            m(x)

    against_one_process(Body(plain), mesh, rank, world, act=act)


def test_two_forwards_before_two_backwards(mesh, rank, world):
    def act(m, x):
        a, b = m(x).square().mean(), m(x + 1).square().mean()
        a.backward()
        b.backward()

    against_one_process(Body(plain), mesh, rank, world, act=act)


def test_autocast(mesh, rank, world):
    def act(m, x):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = m(x).square().mean()
        loss.backward()

    model = Body(plain)
    shard(model, fully_shard, mesh=mesh)
    act(model, data(rank))
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


def test_frozen_backbone_and_lora(mesh, rank, world):
    class Lora(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(DIM, DIM).requires_grad_(False)
            self.a = nn.Linear(DIM, 2, bias=False)
            self.b = nn.Linear(2, DIM, bias=False)
            on_device(self)

        def forward(self, x):
            return x + self.base(x) + self.b(self.a(x))

    model = Body(plain)
    model.blocks = nn.ModuleList(Lora() for _ in range(3))
    against_one_process(model, mesh, rank, world)
    assert model.blocks[0].base.weight.grad is None


def test_conditional_branches_differ_between_ranks(mesh, rank, world):
    class Branch(Block):
        def forward(self, x):
            if x.sum() > 0:
                return x + self.down(torch.relu(self.up(x)))
            return x + self.up(x).sum(-1, keepdim=True)

    model = Body(plain)
    model.blocks = nn.ModuleList(Branch(DIM, 40) for _ in range(3))
    against_one_process(model, mesh, rank, world)


def test_errors_leave_the_model_usable(mesh, rank, world):
    class Fails(Exception):
        pass

    class Bomb(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise Fails

    model = Body(plain)
    expected = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)

    def fail_forward(m, x):
        m.blocks[0](x)
        raise Fails

    for body in (fail_forward, lambda m, x: m.blocks[1](Bomb.apply(m.blocks[0](x)))):
        model.body = body
        with pytest.raises(Fails):
            model(data(rank)).square().mean().backward()
        assert all(p.grad is None for p in model.parameters() if p.grad is not None)
    model.body = plain
    backward_both(model, expected, [data(r) for r in range(world)], rank)
    assert_same_grads(model, expected)


def test_gradients_that_the_user_touches(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    loss = lambda: model(data(rank)).square().mean()  # noqa: E731
    loss().backward()
    first = [p.grad.full_tensor().clone() for p in model.parameters()]
    loss().backward()  # accumulates
    for p, grad in zip(model.parameters(), first):
        torch.testing.assert_close(p.grad.full_tensor(), 2 * grad)
        p.grad = None
    loss().backward()
    for p, grad in zip(model.parameters(), first):
        torch.testing.assert_close(p.grad.full_tensor(), grad)
    model.zero_grad(set_to_none=False)
    loss().backward()
    for p, grad in zip(model.parameters(), first):
        torch.testing.assert_close(p.grad.full_tensor(), grad)
    model.head.bias.grad = None  # one of a unit
    model.head.weight.grad = 3 * model.head.weight.grad
    loss().backward()
    torch.testing.assert_close(model.head.bias.grad.full_tensor(), first[-1])
    torch.testing.assert_close(model.head.weight.grad.full_tensor(), 4 * first[-2])


def test_meta_device_and_reset_parameters(mesh, rank, world):
    with torch.device("meta"):
        model = Mlp()
    shard(model, fully_shard, mesh=mesh)
    with pytest.raises(RuntimeError, match="reset_parameters"):
        model(data(rank))
    flatshard.reset_parameters(model, seed=3)
    state = full_state(model)
    single = Mlp()
    for name, module in single.named_modules():
        if hasattr(module, "reset_parameters"):
            torch.manual_seed(initialize._seed(3, name))
            module.reset_parameters()
    for name, value in single.state_dict().items():
        assert torch.equal(value, state[name]), name
    model(data(rank)).sum().backward()


def test_a_model_on_meta_says_so_until_it_has_values(mesh, rank, folder):
    def on_meta(function):
        with torch.device("meta"):
            return shard(Mlp(), function, mesh=mesh)

    filled = shard(Mlp(), fully_shard, mesh=mesh)
    expected = full_state(filled)
    dcp.save({"model": filled.state_dict()}, checkpoint_id=f"{folder}/dcp")
    optimizer = torch.optim.SGD(filled.parameters(), lr=0.1)
    flatshard.checkpoint.save(f"{folder}/own", 1, filled, optimizer)

    def load_dcp(model):
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}/dcp")
        model.load_state_dict(state["model"])

    def to_empty(model):
        model.to_empty(device=DEVICE)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(filled.state_dict()[name])

    for fill in (
        lambda m: m.load_state_dict(filled.state_dict()),
        lambda m: m.load_state_dict(filled.state_dict(), assign=True),
        lambda m: flatshard.checkpoint.load(f"{folder}/own", m),
        load_dcp,
        to_empty,
    ):
        ours, theirs = on_meta(fully_shard), on_meta(fsdp2)
        parameters = list(ours.parameters())
        for p, q in zip(parameters, theirs.parameters()):
            for tensor in (p, p.data, p.detach()):
                assert tensor.is_meta and tensor.device == q.device
        for model in (ours, theirs):
            with pytest.raises(NotImplementedError, match="copy out of meta.*to_empty"):
                model.to(DEVICE)
        assert all(t.is_meta for t in ours.state_dict().values())
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*no-op")
            fill(ours)
        for p, q in zip(parameters, ours.parameters()):
            assert p is q and p.device.type == DEVICE and not p.is_meta
        for name, value in full_state(ours).items():
            assert torch.equal(value, expected[name]), name
        ours(data(rank))


def test_generate_while_sharded(mesh):
    model = llama()
    plain_model = copy.deepcopy(model)
    for layer in model.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model.model, mesh=mesh)
    ids = on_device(torch.tensor([[1, 2, 3]]))
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = plain_model.model.generate(ids, **options)
    assert torch.equal(model.model.generate(ids, **options), expected)


def test_a_deleted_model_is_gone_at_once(mesh, rank):
    # The first DTensor of a process keeps frames of torch's alive.
    first = shard(Body(plain), fully_shard, mesh=mesh)
    first(data(rank)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        model = shard(Body(plain), fully_shard, mesh=mesh)
        model(data(rank)).sum().backward()
        watched = [
            weakref.ref(model.blocks[0].up.weight),
            weakref.ref(model),
            weakref.ref(state_of(model)),
        ]
        del model
        assert [w() for w in watched] == [None] * 3
    finally:
        gc.enable()


def test_registered_forward_method(mesh, rank, world):
    class Encoder(Block):
        def encode(self, x):
            return self.forward(x)

    def body(m, x):
        for block in m.blocks:
            x = block.encode(x)
        return x

    model = Body(body)
    model.blocks = nn.ModuleList(Encoder(DIM, 40) for _ in range(3))
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)
    for block in model.blocks:
        flatshard.register_fsdp_forward_method(block, "encode")
    flatshard.register_fsdp_forward_method(single, "body")  # not wrapped: nothing
    backward_both(model, single, [data(r) for r in range(world)], rank)
    assert_same_grads(model, single)


def test_no_sync(mesh, rank, world):
    against_one_process(Body(plain), mesh, rank, world, act=two_microbatches)
