"""grads_in_place: nn.Linear whose backward writes into the memory that is reduced."""

import functools

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from flatshard import MixedPrecisionPolicy
from flatshard._fsdp.linear import InPlaceLinear
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp, biases_only
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard
from tests.python.training import STRATEGIES, distance, full_state, shard, train, twins

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# Matmuls sum in another order: bfloat16 gradients differ by a unit in the last place,
# and AdamW amplifies that where they are small.
BOUND = {None: SMALL_MODEL, torch.bfloat16: 3e-2}


class Tied(nn.Module):
    """One weight of an embedding and of two calls of a Linear, and a subclass."""

    class Twice(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.inner = nn.Linear(6, 6)
        self.twice = self.Twice(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        on_device(self)

    def units(self):
        return []

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.twice(self.inner(torch.tanh(self.inner(x))))
        return self.head(x)

    def loss(self, generator):
        tokens = on_device(torch.randint(0, 11, (3, 5), generator=generator))
        return nn.functional.cross_entropy(
            self(tokens).float().flatten(0, 1), tokens.flatten()
        )


class Recomputing(Mlp):
    def forward(self, x):
        for block in self.units():
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def pair(make, mesh, **options):
    """The same model sharded, with tensors of gradients and in place."""
    in_place = {"grads_in_place": True}
    return twins(make, mesh, in_place, grads_in_place=False, **options)


def gradients_as_tensors(model, loss):
    """Names of the parameters whose gradients autograd made tensors of."""
    seen = set()

    def watch(unit):
        def hook(module, args, output):
            for name, p in module.named_parameters(unit, remove_duplicate=False):
                if not isinstance(p, DTensor):  # inner units' are sharded again
                    # A hook on the parameter would have a tensor made for it.
                    node = get_gradient_edge(p).node
                    node.register_prehook(functools.partial(note, name))

        return hook

    def note(name, grads):
        if grads[0] is not None:
            seen.add(name)

    names = {id(module): name for name, module in model.named_modules()}
    handles = [
        unit.register_forward_hook(watch(names[id(unit)]))
        for unit in [*model.units(), model]
    ]
    loss().backward()
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("precision", [MixedPrecisionPolicy(), BF16, WIDE])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_as_without(strategy, precision, mesh, rank):
    models = pair(Mlp, mesh, strategy=strategy, mp_policy=precision)
    for model in models:
        train(model, rank, accumulation=3, sync_last_only=strategy == "optim")
    states = [full_state(model) for model in models]
    assert distance(*states) < BOUND[precision.param_dtype]


# The head shares the embedding's weight.
@pytest.mark.parametrize(
    "make, others",
    [
        (Mlp, set()),
        (Tied, {"embed.weight", "head.weight", "twice.weight", "twice.bias"}),
    ],
)
def test_only_others_make_tensors(make, others, mesh, rank):
    plain, in_place = pair(make, mesh)

    def loss(model):
        return lambda: model.loss(torch.Generator().manual_seed(rank))

    names = {name for name, _ in plain.named_parameters()}
    assert gradients_as_tensors(plain, loss(plain)) >= names
    assert gradients_as_tensors(in_place, loss(in_place)) == others
    for a, b in zip(plain.parameters(), in_place.parameters()):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad.full_tensor())


def test_default_is_in_place_where_nothing_else_sees_it(mesh, rank):
    kinds = []
    for model in twins(Tied, mesh, {"grads_in_place": True}):
        train(model, rank)
        linears = [m for m in model.modules() if isinstance(m, nn.Linear)]
        kinds.append({type(m) for m in linears if m.weight is not model.head.weight})
        assert isinstance(model.head, InPlaceLinear) == (len(kinds) == 2)
    assert kinds[0] == kinds[1] and InPlaceLinear in kinds[0]


def test_hooks_of_unsharded_weights_see_gradients(mesh, rank):
    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh)
    seen = []

    def watch(module, args):
        module.weight.register_hook(lambda grad: seen.append(grad.shape))

    for block in model.blocks:
        block.up.register_forward_pre_hook(watch)
        block.down.register_forward_hook(lambda *of: watch(*of[:2]))
    train(model, rank, steps=1)
    shapes = [model.blocks[0].down.weight.shape, model.blocks[0].up.weight.shape]
    assert seen == shapes * 3


def test_tied_weights_and_two_calls(mesh, rank):
    models = pair(Tied, mesh)
    for model in models:
        train(model, rank, accumulation=2)
    assert isinstance(models[1].inner, InPlaceLinear)
    assert not isinstance(models[1].twice, InPlaceLinear)
    assert distance(*map(full_state, models)) < BOUND[None]


def test_frozen_weights_stay_plain(mesh, rank):
    models = pair(biases_only, mesh)
    assert not any(isinstance(m, InPlaceLinear) for m in models[1].modules())
    for model in models:
        train(model, rank)
    assert distance(*map(full_state, models)) < BOUND[None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed(reentrant, mesh, rank):
    def make():
        model = Mlp()
        model.__class__ = Recomputing
        model.reentrant = reentrant
        return model

    models = pair(make, mesh)
    for model in models:
        train(model, rank, accumulation=2)
    assert distance(*map(full_state, models)) < BOUND[None]


def test_autocast_compiled_and_evaluated(mesh, rank):
    """Where the usual code path applies, and once more where it does not."""
    models = pair(Mlp, mesh)
    for model in models:
        with torch.autocast(DEVICE, torch.bfloat16):
            model.loss(torch.Generator().manual_seed(rank)).backward()
        for block in model.units():
            block.compile(backend="aot_eager")
        model.loss(torch.Generator().manual_seed(rank + 10)).backward()
        with torch.no_grad():
            model.loss(torch.Generator().manual_seed(rank + 20))
    for a, b in zip(*(m.parameters() for m in models)):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad.full_tensor())


def test_an_error_in_the_backward(mesh, rank):
    _, model = pair(Mlp, mesh)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise RuntimeError("on purpose")

    first = model.units()[0]
    handle = first.register_forward_hook(lambda m, args, out: Fails.apply(out))
    with pytest.raises(RuntimeError, match="on purpose"):
        model.loss(torch.Generator().manual_seed(rank)).backward()
    handle.remove()
    model.zero_grad()
    _, fresh = pair(Mlp, mesh)
    for m in (model, fresh):
        m.loss(torch.Generator().manual_seed(rank)).backward()
    for a, b in zip(model.parameters(), fresh.parameters()):
        assert a.grad.to_local().equal(b.grad.to_local())
