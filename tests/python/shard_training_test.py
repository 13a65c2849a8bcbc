"""Training code of users over sharded parameters against the same code over full ones:
optimizers of torch, penalties, clipping, averages, saved states."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from flatshard import fully_shard
from tests.python.device import on_device

# Sums over rows have another order on several ranks; Adam's first steps divide by them.
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*all-gathers it")
        yield


def network(bias=True):
    torch.manual_seed(0)
    sizes = (7, 9, 9, 3)
    layers = [nn.Linear(a, b, bias=bias) for a, b in zip(sizes, sizes[1:])]
    return on_device(
        nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    )


def twins(mesh, **options):
    """Returns an unsharded model and a sharded one."""
    whole = network(**options)
    sharded = copy.deepcopy(whole)
    for layer in (sharded[0], sharded[2]):
        fully_shard(layer, mesh=mesh)
    return whole, fully_shard(sharded, mesh=mesh)


def data_loss(model, step=0):
    generator = torch.Generator().manual_seed(step)
    x = on_device(torch.randn(4, 7, generator=generator))
    return model(x).square().mean()


def value(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_equal(whole, sharded, of=lambda p: p, **tolerance):
    for p, q in zip(whole.parameters(), sharded.parameters()):
        torch.testing.assert_close(value(of(q)), of(p), **(tolerance or TOLERANCE))


def steps(model, make_optimizer, num_steps=3, first=0):
    optimizer = make_optimizer(model)
    for step in range(first, first + num_steps):

        def closure():
            optimizer.zero_grad()
            loss = data_loss(model, step)
            loss.backward()
            return loss

        optimizer.step(closure)
    return optimizer


OPTIMIZERS = {
    "muon": (torch.optim.Muon, {"lr": 0.1, "momentum": 0.5}),
    "lbfgs": (torch.optim.LBFGS, {"lr": 0.5, "max_iter": 4}),
    "lbfgs with line search": (
        torch.optim.LBFGS,
        {"max_iter": 4, "line_search_fn": "strong_wolfe"},
    ),
    "rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "adafactor foreach": (torch.optim.Adafactor, {"lr": 0.1, "foreach": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "foreach": True}),
    "radam": (torch.optim.RAdam, {"lr": 0.01}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1, "foreach": True}),
    "adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "foreach": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "foreach": False}),
    "adamw foreach": (
        torch.optim.AdamW,
        {"lr": 0.01, "foreach": True, "amsgrad": True},
    ),
    "adamw fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "adam with a tensor for lr": (
        torch.optim.Adam,
        {"lr": torch.tensor(0.01), "fused": True},
    ),
}
# Newton-Schulz iterations in bfloat16 have errors of 2^-8, times lr and steps.
WIDER = {"muon": {"rtol": 0, "atol": 3 * 0.1 * 2**-6}}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name, mesh):
    kind, options = OPTIMIZERS[name]
    models = twins(mesh, bias=name != "muon")
    tolerance = WIDER.get(name, {"rtol": 1e-3, "atol": 1e-4})

    def make(model):
        return kind(model.parameters(), **copy.deepcopy(options))

    optimizers = [steps(model, make) for model in models]
    assert_equal(*models, **tolerance)
    for p in models[1].parameters():
        for state in optimizers[1].state[p].values():
            if isinstance(state, DTensor) and state.shape == p.shape:
                assert state.placements == p.placements
    # Saved, loaded into another model, and on from there.
    file = io.BytesIO()
    torch.save([models[1].state_dict(), optimizers[1].state_dict()], file)
    file.seek(0)
    model_state, optimizer_state = torch.load(file, weights_only=True)
    torch.manual_seed(1)
    other = twins(mesh, bias=name != "muon")[1]
    steps(other, make, first=7)
    other.load_state_dict(model_state)

    def loaded(model):
        optimizer = make(model)
        optimizer.load_state_dict(copy.deepcopy(optimizer_state))
        return optimizer

    steps(other, loaded, 2, first=3)
    steps(models[0], lambda _: optimizers[0], 2, first=3)
    assert_equal(models[0], other, **tolerance)


# -- penalties -------------------------------------------------------------------------

PENALTIES = {
    "squares": lambda p, old: (p * p).sum(),
    "pow": lambda p, old: p.pow(2).sum(),
    "l1": lambda p, old: p.abs().sum(),
    "norm": lambda p, old: p.norm(),
    "distance": lambda p, old: (p - old).pow(2).sum(),
    "elastic weights": lambda p, old: (old.square() * (p - old / 2).pow(2)).mean(),
    "orthogonality": lambda p, old: (
        (p @ p.T - torch.eye(len(p)).to(p)).norm() if p.dim() > 1 else p.sum()
    ),
    "nuclear": lambda p, old: torch.linalg.matrix_norm(p.view(len(p), -1), "nuc"),
    "flat": lambda p, old: p.flatten()[1:].diff().square().sum(),
    "full": lambda p, old: value(p).pow(3).sum(),
}


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("place", ["alone", "before", "after", "inside"])
def test_penalties(name, place, mesh):
    models = twins(mesh)
    for model in models:
        old = [p.detach().clone() for p in model.parameters()]

        def penalty():
            terms = [PENALTIES[name](p, q) for p, q in zip(model.parameters(), old)]
            return 1e-2 * sum(terms)

        for step in range(2):  # microbatches
            if place in ("alone", "before"):
                penalty().backward()
            if place == "inside":
                (data_loss(model, step) + penalty()).backward()
            elif place != "alone":
                data_loss(model, step).backward()
            if place == "after":
                penalty().backward()
    for p in models[1].parameters():
        assert p.grad.placements == p.placements
    assert_equal(*models, of=lambda p: p.grad)
    for model in models:
        torch.optim.AdamW(model.parameters()).step()
    assert_equal(*models, rtol=1e-3, atol=1e-4)


# -- recipes ---------------------------------------------------------------------------


def sharpness_aware(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data_loss(model).backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        old = [p.clone() for p in model.parameters()]
        for p in model.parameters():
            p.add_(p.grad * 0.5 / (norm + 1e-12))
    model.zero_grad()
    data_loss(model).backward()
    with torch.no_grad():
        for p, q in zip(model.parameters(), old):
            p.copy_(q)
    optimizer.step()


def gradient_noise(model):
    data_loss(model).backward()
    torch.manual_seed(3)
    for p in model.parameters():
        p.grad.add_(torch.randn_like(p.grad), alpha=0.1)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def gradient_centralization(model):
    data_loss(model).backward()
    for p in model.parameters():
        if p.dim() > 1:
            p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        p.grad.sub_(p.grad.mean(0)).div_(p.grad.std() + 1e-3)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@torch.no_grad()
def weight_standardization(model):
    for p in model.parameters():
        w = p.view(p.shape[0], -1)
        p.copy_(((w - w.mean(0)) / (w.std(0) + 1e-3)).view_as(p))


@torch.no_grad()
def pruning(model):
    flat = torch.cat([p.abs().flatten() for p in model.parameters()])
    threshold = flat.kthvalue(int(0.3 * flat.numel())).values
    for p in model.parameters():
        p.mul_(p.abs() > threshold)


@torch.no_grad()
def pruning_with_plain_masks(model):
    for p in model.parameters():
        p.mul_((value(p).abs() > 0.1).to(p.dtype))
        p[value(p) < -0.2] = -0.2


@torch.no_grad()
def spectral_norm(model):
    for p in model.parameters():
        if p.dim() == 2:
            u = F.normalize(torch.ones_like(p[:, 0]), dim=0)
            for _ in range(3):
                v = F.normalize(p.T @ u, dim=0)
                u = F.normalize(p @ v, dim=0)
            p.div_(u @ p @ v)


@torch.no_grad()
def vectors(model):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2 + 1, model.parameters())


@torch.no_grad()
def new_tokens(model):
    weight = model[0].weight
    weight[6:] = weight[:6].mean(0)
    weight[2].fill_(0.25)
    weight[3:5] *= 2


@torch.no_grad()
def initialized(model):
    torch.manual_seed(5)
    for p in model.parameters():
        if p.dim() > 1:
            nn.init.orthogonal_(p)
        else:
            nn.init.normal_(p, std=0.1)


def clipped_by_value(model):
    data_loss(model).backward()
    nn.utils.clip_grad_value_(model.parameters(), 1e-2)
    torch.optim.SGD(model.parameters(), lr=1.0).step()


def averaged(model):
    average = [p.detach().clone() for p in model.parameters()]
    steps(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.5))
    with torch.no_grad():
        for a, p in zip(average, model.parameters()):
            a.lerp_(p, 0.5)
        torch._foreach_lerp_(average, list(model.parameters()), 0.25)
        for a, p in zip(average, model.parameters()):
            p.copy_(a)


RECIPES = [
    *(sharpness_aware, gradient_noise, gradient_centralization, weight_standardization),
    *(pruning, pruning_with_plain_masks, spectral_norm, vectors, new_tokens),
    *(initialized, clipped_by_value, averaged),
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_recipes(recipe, mesh):
    models = twins(mesh)
    for model in models:
        recipe(model)
    assert_equal(*models)
    outputs = [data_loss(model) for model in models]  # the writes have arrived
    torch.testing.assert_close(*outputs, **TOLERANCE)


# -- plain parameters among sharded ones
# ------------------------------------------------


@pytest.mark.parametrize("foreach", [True, False, None])
@pytest.mark.parametrize("order", [2.0, 1.0, float("inf")])
def test_clipping_over_sharded_and_plain_parameters(foreach, order, mesh, world):
    whole = network()
    model = copy.deepcopy(whole)
    fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
    for each in (whole, model):
        data_loss(each).backward()
    assert type(model[2].weight.grad) is torch.Tensor
    norms = [
        nn.utils.clip_grad_norm_(each.parameters(), 0.01, order, foreach=foreach)
        for each in (whole, model)
    ]
    torch.testing.assert_close(value(norms[1]), norms[0])
    assert_equal(whole, model, of=lambda p: p.grad)
    optimizers = [
        torch.optim.AdamW(each.parameters(), lr=0.01, foreach=foreach, eps=1e-4)
        for each in (whole, model)
    ]
    for optimizer in optimizers:
        optimizer.step()
    assert_equal(whole, model)


def test_fused_optimizers_over_sharded_and_plain_parameters(mesh):
    whole = network()
    model = copy.deepcopy(whole)
    fully_shard(model, mesh=mesh, ignored_params=set(model[2].parameters()))
    for each in (whole, model):
        steps(each, lambda m: torch.optim.AdamW(m.parameters(), fused=True, eps=1e-4))
    assert_equal(whole, model)


def test_clipping_takes_one_collective(mesh, world):
    model = twins(mesh)[1]
    data_loss(model).backward()
    with CommDebugMode() as mode:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert mode.get_total_counts() == (1 if world > 1 else 0)


def test_averaged_models(mesh):
    """torch.optim.swa_utils over lists of parameters; a sharded module is not copied."""
    from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

    models = twins(mesh)
    for update in (get_ema_multi_avg_fn(0.9), get_swa_multi_avg_fn()):
        averages = []
        for model in models:
            average = [p.detach().clone() for p in model.parameters()]
            steps(model, lambda m: torch.optim.SGD(m.parameters(), lr=0.1), 1)
            update(average, [p.detach() for p in model.parameters()], torch.tensor(1))
            averages.append(average)
        for a, b in zip(*averages):
            torch.testing.assert_close(value(b), a, **TOLERANCE)


def test_gradients_may_be_asked_for(mesh):
    models = twins(mesh)
    results = []
    for model in models:
        p = model[0].weight
        loss = (p @ p.T).pow(2).sum()
        (first,) = torch.autograd.grad(loss, p, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), p)
        results.append((first, second))
    for a, b in zip(*results):
        assert b.placements == models[1][0].weight.placements
        torch.testing.assert_close(value(b), a, rtol=1e-3, atol=1e-3)


def test_writes_reach_the_next_forward(mesh):
    model = twins(mesh)[1]
    with torch.no_grad():
        before = data_loss(model)
        for write in (
            lambda w: w[1].fill_(1.0),
            lambda w: w.T.mul_(2),
            lambda w: w.view(-1)[:5].zero_(),
            lambda w: w.__setitem__([0, 3], 2.0),
            lambda w: torch.add(w, 1, out=w),
        ):
            write(model[0].weight)
            after = data_loss(model)
            assert after != before
            before = after
