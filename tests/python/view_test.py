"""Views of unsharded parameters that outlive the forward of their unit."""

import contextlib
import dataclasses
import sys

import numpy
import pytest
import torch
from torch import nn

from flatshard import fully_shard

from tests.python.device import DEVICE, on_device

VIEWS = {
    "row": lambda w: w[0],
    "slice": lambda w: w[1:3],
    "transpose": lambda w: w.t(),
    "detached": lambda w: w.detach(),
    "data": lambda w: w.data,
    "view": lambda w: w.view(-1),
    "column": lambda w: w[:, 1],
    "chunk": lambda w: w.chunk(2)[1],
    "split": lambda w: w.split(2)[0],
    "unbind": lambda w: w.unbind()[1],
    "diagonal": lambda w: w.diagonal(),
    "expanded": lambda w: w[:1].expand(3, 4),
    "bits": lambda w: w.detach().view(torch.int32),
}


@dataclasses.dataclass
class Output:
    x: torch.Tensor
    view: torch.Tensor


RETURNS = {
    "tuple": (lambda x, v: (x, v), lambda out: out),
    "dict": (lambda x, v: {"x": x, "v": [v]}, lambda out: (out["x"], out["v"][0])),
    "dataclass": (Output, lambda out: (out.x, out.view)),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))


class Net(nn.Module):
    """Uses a view of its block's parameter."""

    def __init__(self, view, how):
        super().__init__()
        self.block, self.other, self.last = Block(), nn.Linear(4, 4), nn.Linear(4, 4)
        self.view, self.how = view, how
        self.block.forward = self._block

    def _block(self, x):
        view = self.view(self.block.weight)
        self.block.saved = view
        return RETURNS.get(self.how, RETURNS["tuple"])[0](x @ self.block.weight, view)

    def forward(self, x):
        x, view = RETURNS.get(self.how, RETURNS["tuple"])[1](self.block(x))
        if self.how == "attribute":
            view = self.block.saved
        return self.last(self.other(x)) + view.float().sum()


def nets(view, how, mesh, **options):
    torch.manual_seed(0)
    plain = on_device(Net(VIEWS[view], how))
    torch.manual_seed(0)
    model = on_device(Net(VIEWS[view], how))
    fully_shard(model.block, mesh=mesh, **options)
    fully_shard(model.other, mesh=mesh)  # the unit that runs last stays unsharded
    return plain, fully_shard(model, mesh=mesh)


def refused():
    return pytest.raises(
        RuntimeError, match=r"parameter block.weight is resharded[^$]*clone"
    )


def expect_refused(model, refused, world):
    """With and without gradients. One rank never reshards."""
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with refused() if world > 1 else contextlib.nullcontext():
                model(on_device(torch.ones(2, 4)))


@pytest.mark.parametrize("how", [*RETURNS, "attribute"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_resharded_unit(view, how, mesh, world):
    _, model = nets(view, how, mesh)
    expect_refused(model, refused, world)
    with refused() if world > 1 else torch.no_grad():
        model.block.saved.float().sum()


@pytest.mark.parametrize("how", ["tuple", "attribute"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_unit_that_stays_unsharded(view, how, mesh, rank, world):
    plain, model = nets(view, how, mesh, reshard_after_forward=False)
    inputs = [on_device(torch.full((2, 4), 1.0 + r)) for r in range(world)]
    for _ in range(2):
        (sum(plain(x).square().mean() for x in inputs) / world).backward()
        model(inputs[rank]).square().mean().backward()
        if world > 1:
            with refused():
                model.block.saved.float().sum()
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


@pytest.mark.parametrize("view", ["row", "transpose", "detached"])
def test_views_of_a_root(view, mesh, world):
    """Created after the forward, while the root stays unsharded."""
    model = fully_shard(on_device(nn.Linear(4, 4)), mesh=mesh)
    x = on_device(torch.ones(2, 4))
    out = model(x)
    taken = VIEWS[view](model.weight)
    assert torch.isfinite(taken).all()
    out.sum().backward()
    if world == 1:
        return
    with pytest.raises(RuntimeError, match="parameter weight is resharded"):
        taken.sum()
    with pytest.raises(RuntimeError, match="parameter weight is resharded"):
        taken[0].clone()
    with torch.no_grad(), pytest.raises(RuntimeError, match="weight is resharded"):
        (taken.detach()).fill_(1)
    model.unshard()
    assert torch.isfinite(taken).all()  # it has memory again
    model.reshard()


def test_a_view_in_the_backward(mesh, world):
    """A hook reads it after the block's backward."""
    _, model = nets("row", "tuple", mesh, reshard_after_forward=False)
    x = on_device(torch.ones(2, 4)).requires_grad_()
    x.register_hook(lambda grad: model.block.saved.detach().sum() * grad)
    loss = model(x * 1).sum()
    if world == 1:
        loss.backward()
    else:
        with refused():
            loss.backward()


# -- arrays of other libraries -----------------------------------------------------------

ARRAYS = {
    "numpy": lambda w: w.detach().numpy(),
    "numpy of a row": lambda w: w.detach()[1].numpy(),
    "numpy.asarray": lambda w: numpy.asarray(w.detach()),
    "numpy by DLPack": lambda w: numpy.from_dlpack(w.detach()),
    "DLPack": lambda w: torch.from_dlpack(w.detach()),
    "a capsule": lambda w: torch.utils.dlpack.to_dlpack(w.detach()),
}
CPU_ARRAYS = [name for name in ARRAYS if "numpy" in name]


def array_refused():
    return pytest.raises(
        RuntimeError,
        match=r"parameter block.weight of .*passed to numpy\(\) or DLPack[^$]*clone",
    )


def with_arrays(array, mesh, keep=True, frozen=False):
    """Returns nets whose block makes an array of its parameter, and may keep it."""

    def take(w):
        made = ARRAYS[array](w)
        if keep:
            taken.append(made)
        return w[0] * 1

    if DEVICE == "cuda" and array in CPU_ARRAYS:
        pytest.skip("NumPy has no memory of GPUs")
    taken = []
    torch.manual_seed(0)
    model = on_device(Net(take, "tuple"))
    model.block.requires_grad_(not frozen)
    fully_shard(model.block, mesh=mesh)
    fully_shard(model.other, mesh=mesh)
    return fully_shard(model, mesh=mesh), taken


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("array", ARRAYS)
def test_an_array_of_a_resharded_unit(array, frozen, mesh, world):
    model, taken = with_arrays(array, mesh, frozen=frozen)
    expect_refused(model, array_refused, world)


@pytest.mark.parametrize("array", ARRAYS)
def test_an_array_that_is_gone(array, mesh):
    model, _ = with_arrays(array, mesh, keep=False)
    x = on_device(torch.ones(2, 4))
    with torch.no_grad():
        for _ in range(2):
            model(x)


def test_an_array_of_a_copy(mesh, rank, monkeypatch):
    copied = {"copy": lambda w: w.detach().clone().numpy(force=True)}
    monkeypatch.setattr(sys.modules[__name__], "ARRAYS", copied)
    model, taken = with_arrays("copy", mesh)
    model(on_device(torch.ones(2, 4))).sum().backward()
    assert (taken[0] == model.block.weight.full_tensor().numpy(force=True)).all()


@pytest.mark.parametrize("array", ARRAYS)
def test_an_array_of_an_unsharded_unit(array, mesh, world):
    model, _ = with_arrays(array, mesh, keep=False)
    with torch.no_grad():
        model(on_device(torch.ones(2, 4)))
    model.block.unshard()
    ARRAYS[array](model.block.weight)
    model.block.reshard()
    model.block.unshard()
    kept = ARRAYS[array](model.block.weight)
    if world == 1:
        model.block.reshard()
    else:
        with array_refused():
            model.block.reshard()
    del kept
    model(on_device(torch.ones(2, 4))).sum().backward()
    assert model.block.weight.grad is not None


def test_an_unsharded_parameter_is_not_resized(mesh, world):
    model = fully_shard(on_device(nn.Linear(4, 4)), mesh=mesh)
    model.unshard()
    if world > 1:
        with torch.no_grad(), pytest.raises(RuntimeError, match="resize a clone"):
            model.weight.detach().resize_(9, 9)
    model.reshard()
