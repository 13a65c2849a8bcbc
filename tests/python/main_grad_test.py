"""Modules that write weight gradients to `main_grad`, as TransformerEngine's do."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatshard import MixedPrecisionPolicy
from tests.python.device import on_device
from tests.python.models import TokenModel
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard
from tests.python.training import STRATEGIES, distance, full_state, shard, train

DIM = 8


class FusedProduct(torch.autograd.Function):
    """The backward of TransformerEngine's Linear, with its names."""

    @staticmethod
    def forward(ctx, x, weight, module):
        ctx.save_for_backward(x)
        ctx.weight, ctx.module = weight, module
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        (x,), weight = ctx.saved_tensors, ctx.weight
        dx = grad @ weight
        wgrad = grad.flatten(0, -2).t() @ x.flatten(0, -2)
        if not (ctx.module.fuse_wgrad_accumulation and weight.requires_grad):
            return dx, wgrad, None
        if hasattr(weight, "__fsdp_param__") and ctx.module.asks:
            weight.main_grad = weight.get_main_grad()
        main_grad = weight.main_grad
        if getattr(weight, "overwrite_main_grad", False):
            main_grad.copy_(wgrad)
        else:
            main_grad.add_(wgrad)
        ctx.module.wrote += 1
        if not hasattr(weight, "grad_added_to_main_grad") or not ctx.module.dummy:
            return dx, None, None
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return dx, torch.zeros_like(weight), None
        return dx, torch.full_like(weight, float("nan")), None


class Fused(nn.Module):
    def __init__(self, inner, outer, fuse=True):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outer, inner) / inner**0.5)
        self.fuse_wgrad_accumulation = fuse
        self.asks, self.dummy, self.wrote = True, True, 0

    def forward(self, x):
        return FusedProduct.apply(x, self.weight, self)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = Fused(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        # Twice, so that the second one adds.
        y = self.down(torch.tanh(self.up(self.norm(x))))
        return x + y + self.down(torch.tanh(self.up(y)))


class Stack(TokenModel):
    recomputes = False

    def __init__(self):
        super().__init__(11, DIM, (Block() for _ in range(2)), lambda: Fused(DIM, 11))

    def run(self, block, x):
        return (
            checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        )


class Tied(Stack):
    """The head's dummy is added to the embedding's gradient."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


def fused(model):
    return [m for m in model.modules() if isinstance(m, Fused)]


def pair(make, mesh, change=lambda module: None, **options):
    """The same model, with gradients as tensors and with main_grad."""
    torch.manual_seed(0)
    plain = make()
    model = copy.deepcopy(plain)
    for module in fused(plain):
        module.fuse_wgrad_accumulation = False
    for module in fused(model):
        change(module)
    for m in (plain, model):
        shard(m, fully_shard, mesh=mesh, **options)
    return plain, model


def check_trains_alike(plain, model, rank, **training):
    losses = [train(m, rank, **training) for m in (plain, model)]
    assert losses[0] == pytest.approx(losses[1], rel=SMALL_MODEL)
    assert distance(full_state(plain), full_state(model)) < SMALL_MODEL
    assert all(m.wrote == 0 for m in fused(plain))
    assert all(m.wrote > 0 for m in fused(model))


def test_B10_main_grad_begins_with_zeros_and_adds_up(mesh, rank):
    """Over uses in a backward and over microbatches, in memory with leftover values."""
    plain, model = pair(Stack, mesh)
    check_trains_alike(plain, model, rank, accumulation=3, sync_last_only=True)


@pytest.mark.parametrize("make", [Stack, Tied])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_F17_it_trains_as_with_tensors(strategy, make, mesh, rank):
    for training in ({}, {"accumulation": 3}):
        plain, model = pair(make, mesh, strategy=strategy)
        check_trains_alike(plain, model, rank, **training)
    plain, model = pair(make, mesh, strategy=strategy)
    check_trains_alike(plain, model, rank, accumulation=2, sync_last_only=True)


@pytest.mark.parametrize(
    "options",
    [
        {"buffers_on_demand": False},
        {"grads_in_place": True},
        {"copy_engines": "all"},
        {"reshard_after_forward": False},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options(options, mesh, rank):
    check_trains_alike(*pair(Stack, mesh, **options), rank)


def test_recomputation(mesh, rank):
    def make():
        model = Stack()
        model.recomputes = True
        return model

    check_trains_alike(*pair(make, mesh), rank)


def asks_for_nothing(module):
    module.asks = False


def returns_no_dummy(module):
    module.dummy = False


def only_attributes(module):
    """No switch; Megatron-Core's data parallelism leaves these."""
    module.weight.main_grad = torch.zeros(1)
    module.weight.grad_added_to_main_grad = True


@pytest.mark.parametrize(
    "change", [asks_for_nothing, returns_no_dummy, only_attributes]
)
def test_modules_that_use_parts_of_it(change, mesh, rank):
    plain, model = pair(Stack, mesh, change)
    check_trains_alike(plain, model, rank, accumulation=2)
    assert all(not hasattr(p, "main_grad") for p in model.parameters())


def test_the_memory_is_that_of_the_reduction(mesh, rank):
    mp_policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = shard(Stack(), fully_shard, mesh=mesh, mp_policy=mp_policy)
    found = []

    def see(module, args):
        module.weight.register_hook(lambda _: found.append(module.weight.main_grad))

    handle = model.blocks[0].up.register_forward_pre_hook(see)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    handle.remove()
    assert found[0].dtype == torch.float32 and found[0].shape == (2 * DIM, DIM)


def test_a_backward_of_the_input_alone(mesh, rank):
    """Ignores gradients that are written then."""
    model = shard(Stack(), fully_shard, mesh=mesh)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    before = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    block = model.blocks[0]
    block.unshard()
    x = on_device(torch.ones(2, DIM)).requires_grad_()
    (dx,) = torch.autograd.grad(block(x).sum(), [x])
    assert dx.any() and all(p.grad is None for p in block.parameters())
    block.reshard()
    model.loss(torch.Generator().manual_seed(rank)).backward()
    for p, grad in zip(model.parameters(), before):
        assert torch.equal(p.grad.full_tensor(), grad)


class Early(Fused):
    def forward(self, x):
        self.weight.main_grad
        return super().forward(x)


class Other(Fused):
    def forward(self, x):
        self.weight.register_hook(self.replace)
        return super().forward(x)

    def replace(self, _):
        self.weight.main_grad = torch.zeros_like(self.weight)


class Overwrites(Fused):
    def forward(self, x):
        self.weight.overwrite_main_grad = False
        self.weight.overwrite_main_grad = True


@pytest.mark.parametrize(
    "kind, problem",
    [
        (
            Early,
            "main_grad of parameter weight exists only during the backward: .*2.10",
        ),
        (Other, "main_grad of parameter weight cannot be another tensor"),
        (Overwrites, "overwrite_main_grad of parameter weight cannot be True: .*zeros"),
    ],
)
def test_what_cannot_be_is_named(kind, problem, mesh):
    model = on_device(nn.Sequential(kind(DIM, DIM)))
    fully_shard(model, mesh=mesh)
    with pytest.raises(Exception, match=problem):
        model(on_device(torch.ones(2, DIM))).sum().backward()


def test_graphs_are_refused(mesh, graphs_on_cpu):
    model = Stack()
    fully_shard(model.blocks[0], mesh=mesh, cuda_graph=True)
    fully_shard(model, mesh=mesh)
    with pytest.raises(
        NotImplementedError, match="unit blocks.0, because its modules write"
    ):
        model.loss(torch.Generator())
