"""transformers' models with experts, spread over ranks."""

import copy
import itertools

import pytest
import torch

import flatshard
from flatshard import MixedPrecisionPolicy, expert_parallel, fully_shard
from tests.python.device import named_mesh, on_device
from tests.python.models import SIZES
from tests.python.training import adamw, clip_to, train_batches

transformers = pytest.importorskip("transformers")

SHAPE = dict(
    SIZES,
    vocab_size=64,
    output_router_logits=True,
    router_aux_loss_coef=0.02,
)
FAMILIES = {
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SHAPE,
            moe_intermediate_size=24,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            head_dim=8,
        )
    ),
}


def qwen2_moe():
    """Returns a model with a shared expert."""
    config = transformers.Qwen2MoeConfig(
        **SHAPE,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.Qwen2MoeForCausalLM(config)


IS_4 = transformers.__version__.startswith("4.")


def make(family):
    torch.manual_seed(0)
    return on_device({**FAMILIES, "qwen2_moe": qwen2_moe}[family]())


def experts_of(layer):
    return getattr(layer, "block_sparse_moe", None) or layer.mlp


def sharded(model, edp, ep, copy_engines="auto", **options):
    mesh = named_mesh(edp=edp, ep=ep)
    dp = mesh["edp", "ep"]._flatten("dp")
    expert_parallel(model, mesh["ep"], copy_engines=copy_engines)
    for layer in model.model.layers:
        fully_shard(experts_of(layer).experts, mesh=mesh["edp"], **options)
        fully_shard(layer, mesh=dp, **options)
    return fully_shard(model, mesh=dp, **options)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = on_device(torch.randint(0, 64, (2, 16), generator=generator))
    return model(input_ids=tokens, labels=tokens).loss


def train(model, ranks, steps=3):
    return train_batches(
        lambda step, rank: loss_of(model, 100 * step + rank),
        adamw(model),
        ranks,
        steps,
        clip_to(model, 1.0),
    )


def values(model):
    """The experts' weights under version 5's names, and all others."""
    named = {}
    for name, p in model.state_dict().items():
        named[name] = p.full_tensor() if hasattr(p, "full_tensor") else p
    return named


def expected_values(model):
    """Returns the values of a model that was not spread: transformers 4's experts
    stacked."""
    if not IS_4:
        return values(model)
    for module in model.modules():
        if isinstance(getattr(module, "experts", None), torch.nn.ModuleList):
            flatshard.expert_parallel.__globals__["_stack"](module)
    return values(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_trains_like_one_process(family, rank, world):
    shapes = {1: [(1, 1)], 2: [(1, 2)], 4: [(1, 4), (2, 2), (4, 1)]}.get(world)
    if shapes is None:
        pytest.skip("needs 1, 2 or 4 ranks")
    for edp, ep in shapes:
        reference, model = make(family), sharded(make(family), edp, ep)
        theirs = train(reference, range(world))
        ours = train(model, [rank])
        assert ours == pytest.approx(theirs[rank::world], rel=2e-4), (edp, ep)
        expected = expected_values(reference)
        for name, value in values(model).items():
            torch.testing.assert_close(
                value, expected[name], rtol=2e-3, atol=2e-4, msg=f"{name} {edp} {ep}"
            )


@pytest.mark.parametrize("family", [*FAMILIES, "qwen2_moe"])
def test_gradients_are_those_of_one_process(family, rank, world):
    if world not in (2, 4):
        pytest.skip("needs 2 or 4 ranks")
    reference, model = make(family), sharded(make(family), world // 2, 2)
    for r in range(world):
        (loss_of(reference, r) / world).backward()
    loss_of(model, rank).backward()
    grads = {name: p.grad for name, p in reference.named_parameters()}
    for name, p in model.named_parameters():
        if name in grads:
            torch.testing.assert_close(
                p.grad.full_tensor(), grads[name], rtol=1e-4, atol=1e-6, msg=name
            )


def test_copies_are_bitwise_the_collectives(rank, world):
    """Also of more tokens than the windows were made for."""
    if world not in (2, 4):
        pytest.skip("needs 2 or 4 ranks")
    results = []
    for copy_engines in ("none", "all"):
        model = sharded(make("qwen3_moe"), world // 2, 2, copy_engines)
        losses = train(model, [rank], steps=2)
        tokens = on_device(torch.arange(64).repeat(6 + rank, 1))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        results.append((losses, loss, [p.grad for p in model.parameters()]))
    (losses, loss, grads), (other_losses, other_loss, other_grads) = results
    assert losses == other_losses and torch.equal(loss, other_loss)
    for ours, theirs in zip(grads, other_grads):
        assert torch.equal(ours.full_tensor(), theirs.full_tensor())


def test_tokens_of_one_expert(rank, world):
    """All rows are sent to one rank, and the others compute with none."""
    if world not in (2, 4):
        pytest.skip("needs 2 or 4 ranks")
    model = make("mixtral")
    with torch.no_grad():
        for layer in model.model.layers:
            experts_of(layer).gate.weight.zero_()  # of equal ones the first are chosen
    reference = copy.deepcopy(model)
    model = sharded(model, 1, world)
    ours, theirs = loss_of(model, rank), loss_of(reference, rank)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    ours.backward()


class ExpertsWithBiases(torch.nn.Module):
    """Custom models have such experts: the members that transformers' interface has, no
    more."""

    def __init__(self):
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = torch.nn.Parameter(torch.randn(4, 8, 6))
        self.gate_up_proj_bias = torch.nn.Parameter(torch.randn(4, 8))
        self.down_proj = torch.nn.Parameter(torch.randn(4, 6, 4))

    def forward(self, x, top_k_index, top_k_weights):
        out = torch.zeros_like(x)
        for k, e in itertools.product(range(top_k_index.shape[1]), range(4)):
            mine = top_k_index[:, k] == e
            if e < self.num_experts and mine.any():
                rows = x[mine] @ self.gate_up_proj[e].T + self.gate_up_proj_bias[e]
                gate, up = rows.chunk(2, 1)
                rows = (gate.tanh() * up) @ self.down_proj[e].T
                out[mine] = out[mine] + rows * top_k_weights[mine, k, None]
        return out


@pytest.mark.parametrize("num_chosen", [4, 1])
def test_a_custom_forward_runs_on_the_rows_that_arrive(num_chosen, rank, world):
    if world not in (1, 2, 4):
        pytest.skip("needs 1, 2 or 4 ranks")
    reference = on_device(torch.nn.Sequential(ExpertsWithBiases()))
    model = copy.deepcopy(reference)
    expert_parallel(model, named_mesh(ep=world)["ep"])
    x, weights = on_device(torch.randn(5, 6)), on_device(torch.rand(5, 2))
    chosen = on_device(torch.arange(10).view(5, 2) % num_chosen)

    def gradients_of(model):
        inputs = [t.clone().requires_grad_() for t in (x, weights)]
        out = model[0](inputs[0], chosen, inputs[1])
        parameters = list(model.parameters())
        return out, *torch.autograd.grad(out.square().sum(), [*inputs, *parameters])

    ours, theirs = gradients_of(model), gradients_of(reference)
    with pytest.raises(RuntimeError, match="no second derivative"):
        out = model[0](x.requires_grad_(), chosen, weights)
        torch.autograd.grad(out.sum(), x, create_graph=True)
    close = dict(rtol=1e-4, atol=1e-4)  # sums in float32 in another order
    for mine, whole in zip(ours[:3], theirs[:3]):
        torch.testing.assert_close(mine, whole, **close)
    for mine, whole in zip(ours[3:], theirs[3:]):  # tokens of all ranks
        whole = world * whole.chunk(world)[rank]
        torch.testing.assert_close(mine, whole, **close)


def test_mixed_precision_and_recomputation(rank, world):
    if world not in (2, 4):
        pytest.skip("needs 2 or 4 ranks")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    losses = []
    for recompute in (False, True):
        model = make("qwen3_moe")
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model = sharded(model, 1, world, mp_policy=policy).train()
        losses.append(train(model, [rank]))
    # transformers' attention rounds otherwise when it is recomputed.
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert losses[0][-1] < losses[0][0] * 1.05


def test_what_cannot_be_spread_is_named(world):
    mesh = named_mesh(ep=world)
    with pytest.raises(ValueError, match="overlap: expected True or False"):
        expert_parallel(make("mixtral"), mesh, overlap="1f1b")
    with pytest.raises(ValueError, match="copy_engines: expected 'none', 'auto'"):
        expert_parallel(make("mixtral"), mesh, copy_engines="nvlink")
    with pytest.raises(ValueError, match="found none in Linear"):
        expert_parallel(torch.nn.Linear(2, 2), mesh)
    with pytest.raises(ValueError, match="ep_mesh"):
        expert_parallel(make("mixtral"), world)
    if world == 3:
        with pytest.raises(ValueError, match="4 experts do not divide by 3 ranks"):
            expert_parallel(make("mixtral"), mesh)
    model = make("mixtral")
    expert_parallel(model, mesh) if world in (1, 2, 4) else None
    if world in (1, 2, 4):
        with pytest.raises(ValueError, match="before"):
            expert_parallel(model, mesh)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_call_shards_as_several_do(family, rank, world):
    shapes = {1: [(1, 1)], 2: [(1, 2)], 4: [(1, 4), (2, 2)]}.get(world)
    if shapes is None:
        pytest.skip("needs 1, 2 or 4 ranks")
    for edp, ep in shapes:
        by_hand = sharded(make(family), edp, ep)
        model = flatshard.shard_moe(make(family), ep=ep)
        # With one rank for experts they are in the layer's unit.
        close = {"rtol": 1e-4, "atol": 1e-5} if ep == 1 else {"rtol": 0, "atol": 0}
        losses = torch.tensor([train(m, [rank]) for m in (model, by_hand)])
        torch.testing.assert_close(*losses, **close)
        expected = values(by_hand)
        for name, value in values(model).items():
            torch.testing.assert_close(value, expected[name], **close, msg=name)


def test_one_call_with_replicas(rank, world):
    if world != 4:
        pytest.skip("needs 4 ranks")
    mesh = named_mesh(replicate=2, dp=2)
    reference = make("qwen3_moe")
    model = flatshard.shard_moe(make("qwen3_moe"), mesh, ep=2)
    theirs, ours = train(reference, range(world)), train(model, [rank])
    assert ours == pytest.approx(theirs[rank::world], rel=2e-4)


def test_one_call_says_what_does_not_fit(world):
    with pytest.raises(
        ValueError, match=f"ep: expected a number that divides the {world}"
    ):
        flatshard.shard_moe(make("mixtral"), ep=world + 1)
    with pytest.raises(
        ValueError, match="does not declare which modules are its layers"
    ):
        flatshard.shard_moe(torch.nn.Linear(2, 2), ep=1)
