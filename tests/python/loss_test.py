"""linear_cross_entropy: the loss of a language model without float32 logits."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from flatshard import (
    MixedPrecisionPolicy,
    linear_cross_entropy,
    register_fsdp_forward_method,
)
from tests.python.device import DEVICE, on_device
from tests.python.models import llama
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard
from tests.python.training import distance, full_state, train, twins

DIM, VOCAB = 6, 11


def tensors(dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    input = on_device(torch.randn(3, 5, DIM, generator=generator)).to(dtype)
    weight = on_device(torch.randn(VOCAB, DIM, generator=generator)).to(dtype)
    target = on_device(torch.randint(VOCAB, (3, 5), generator=generator))
    target[1, :3] = -100
    return input.requires_grad_(), weight.requires_grad_(), target


def reference(input, weight, target, **options):
    logits = functional.linear(input, weight).float()
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), **options)


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 4}])
@pytest.mark.parametrize("chunk", [0, 1, 4, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_cross_entropy(dtype, chunk, options):
    input, weight, target = tensors(dtype)
    if "ignore_index" in options:
        target = target.clamp(min=0)
    ours = linear_cross_entropy(input, weight, target, chunk_tokens=chunk, **options)
    grads = torch.autograd.grad(3 * ours, (input, weight))
    theirs = reference(input, weight, target, **options)
    expected = torch.autograd.grad(3 * theirs, (input, weight))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, theirs)
    # Gradients of logits are rounded once in bfloat16, in both.
    bound = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for a, b in zip(grads, expected):
        torch.testing.assert_close(a, b, **bound)


class Tuned(nn.Module):
    """A transformers model whose loss is a separate forward."""

    def __init__(self, tied, fused):
        super().__init__()
        self.model = llama(tied).model
        self.fused = fused

    def forward(self, ids):
        hidden = self.model.model(input_ids=ids).last_hidden_state[:, :-1]
        weight, target = self.model.lm_head.weight, ids[:, 1:]
        if self.fused:
            return linear_cross_entropy(hidden, weight, target)
        return reference(hidden, weight, target)

    def units(self):
        return list(self.model.model.layers)

    def loss(self, generator):
        return self(on_device(torch.randint(67, (2, 10), generator=generator)))


@pytest.mark.parametrize("in_place", [False, True], ids=["tensors", "in_place"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_trains_a_sharded_model(tied, in_place, mesh, rank):
    """The head's weight is in the slot of its unit or in a tensor, also together with
    the embedding's gradient."""
    models = twins(lambda: Tuned(tied, False), mesh, {"grads_in_place": in_place})
    models[1].fused = True
    losses = [train(model, rank, accumulation=2) for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=SMALL_MODEL)
    assert distance(*map(full_state, models)) < 1e-4


def test_its_weight_gradient_makes_no_tensor(mesh, rank):
    seen = []

    class Watched(Tuned):
        def forward(self, ids):
            self.model.lm_head.weight.register_hook(seen.append)
            return super().forward(ids)

    torch.manual_seed(0)
    model = Watched(False, True)
    fully_shard(model, mesh=mesh, grads_in_place=True)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert seen == [None]
    assert model.model.lm_head.weight.grad.to_local().isfinite().all()


class WithLoss(LlamaForCausalLM):
    def own_loss(self, ids):
        hidden = self.model(input_ids=ids).last_hidden_state[:, :-1]
        return linear_cross_entropy(hidden, self.lm_head.weight, ids[:, 1:])


def test_in_a_method_of_its_own(mesh, rank):
    torch.manual_seed(0)
    model = llama().model
    model.__class__ = WithLoss
    plain = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "own_loss")
    generator = torch.Generator().manual_seed(rank)
    ids = on_device(torch.randint(67, (2, 10), generator=generator))
    loss = model.own_loss(ids)
    torch.testing.assert_close(loss, plain.own_loss(ids))
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_compiled_around():
    torch._dynamo.reset()
    input, weight, target = tensors()

    @torch.compile(backend="aot_eager")
    def loss(input):
        return 2 * linear_cross_entropy(2 * input, weight, target)

    ours = loss(input)
    theirs = 2 * reference(2 * input, weight, target)
    torch.testing.assert_close(ours, theirs)
    a, b = (torch.autograd.grad(x, (input, weight)) for x in (ours, theirs))
    torch.testing.assert_close(a, b)


def test_what_cannot_work_is_refused(mesh):
    input, weight, target = tensors()
    with pytest.raises(ValueError, match="reduction: expected 'mean' or 'sum'"):
        linear_cross_entropy(input, weight, target, reduction="none")
    with pytest.raises(ValueError, match="expected one dtype, got torch.bfloat16"):
        linear_cross_entropy(input.bfloat16(), weight, target)
    with pytest.raises(ValueError, match="chunk_tokens: expected 0 or more, got -1"):
        linear_cross_entropy(input, weight, target, chunk_tokens=-1)
    with pytest.raises(ValueError, match="expected int64 targets"):
        linear_cross_entropy(input, weight, target[0])
    if DEVICE == "cpu":  # on a GPU the loss is NaN
        with pytest.raises(ValueError, match=r"expected targets in \[0, 11\)"):
            linear_cross_entropy(input, weight, target.clamp(max=-3))
    head = fully_shard(on_device(nn.Linear(DIM, VOCAB, bias=False)), mesh=mesh)
    with pytest.raises(RuntimeError, match="got a shard: call linear_cross_entropy in"):
        linear_cross_entropy(input, head.weight, target)


def test_under_mixed_precision(mesh, rank):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    models = twins(
        lambda: Tuned(False, False), mesh, {"grads_in_place": True}, mp_policy=policy
    )
    models[1].fused = True
    losses = [train(model, rank) for model in models]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
