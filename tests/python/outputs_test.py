"""Inputs and results of units: any nesting, cast or not, changed in place."""

import types
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from transformers.utils import ModelOutput

from flatshard import MixedPrecisionPolicy, fully_shard
from tests.python.models import DIM, Block, Body, plain
from tests.python.training import against_one_process, data


@dataclass
class Plain:
    hidden: torch.Tensor
    note: str = "kept"


@dataclass(frozen=True)
class Frozen:
    hidden: torch.Tensor


@dataclass
class Derived:
    """A field that __init__ does not accept, and one that __post_init__ changes."""

    hidden: torch.Tensor
    count: int = field(default=0, init=False)

    def __post_init__(self):
        self.count += 1


@dataclass
class Output(ModelOutput):
    hidden: torch.Tensor = None
    extra: tuple = None


Named = namedtuple("Named", ["hidden", "rest"])

OUTPUTS = {
    "tensor": (lambda h: h, lambda out: out),
    "list": (lambda h: [h, None], lambda out: out[0]),
    "dict": (lambda h: {"a": {"b": (1, h)}}, lambda out: out["a"]["b"][1]),
    "ordered dict": (lambda h: OrderedDict(h=h), lambda out: out["h"]),
    "named tuple": (lambda h: Named(h, "rest"), lambda out: out.hidden),
    "dataclass": (Plain, lambda out: out.hidden),
    "frozen dataclass": (Frozen, lambda out: out.hidden),
    "derived dataclass": (Derived, lambda out: out.hidden),
    "dataclass in a list": (lambda h: [Plain(h)], lambda out: out[0].hidden),
    "list in a dataclass": (lambda h: Plain([h]), lambda out: out.hidden[0]),
    "model output": (lambda h: Output(h), lambda out: out.hidden),
    "model output, nested": (
        lambda h: Output(extra=(Plain(h),)),
        lambda out: out["extra"][0].hidden,
    ),
}


class Wraps(Block):
    """A block that accepts and returns one of OUTPUTS."""

    def __init__(self, name):
        super().__init__(DIM, 17)
        self.wrap, self.unwrap = OUTPUTS[name]

    def forward(self, x):
        return self.wrap(super().forward(self.unwrap(x)))


def wrapping(name):
    wrap, unwrap = OUTPUTS[name]

    def body(m, x):
        x = wrap(x)
        for block in m.blocks:
            x = block(x)
        return unwrap(x)

    model = Body(body)
    model.blocks = nn.ModuleList(Wraps(name) for _ in range(3))
    return model


@pytest.mark.parametrize("name", OUTPUTS)
def test_any_nesting_trains(name, mesh, rank, world):
    against_one_process(wrapping(name), mesh, rank, world)


@pytest.mark.parametrize("name", OUTPUTS)
def test_any_nesting_is_cast(name, mesh, rank):
    """Inputs to the dtype of the parameters, outputs to output_dtype; the rest
    stays."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, output_dtype=torch.float32
    )
    wrap, unwrap = OUTPUTS[name]
    block = fully_shard(Wraps(name), mesh=mesh, mp_policy=policy)
    seen = []
    block.up.register_forward_pre_hook(lambda m, args: seen.append(args[0].dtype))
    given = wrap(data(rank))
    out = block(given)
    assert seen == [torch.bfloat16]
    assert unwrap(given).dtype == torch.float32, "the caller's own was changed"
    assert type(out) is type(given)
    assert unwrap(out).dtype == torch.float32
    if isinstance(out, Plain):
        assert out.note == "kept"
    if isinstance(out, Derived):
        assert out.count == 1
    unwrap(out).sum().backward()
    assert all(p.grad is not None for p in block.parameters())


def test_an_output_that_nobody_can_look_into_is_right_or_an_error(mesh, rank, world):
    """The start of such a unit's backward is not seen: its parameters may be resharded,
    and reading them must not give a wrong gradient."""

    class Hides(Block):
        def forward(self, x):
            return types.SimpleNamespace(hidden=super().forward(x))

    def body(m, x):
        return m.blocks[1](m.blocks[0](x).hidden)

    model = Body(body, blocks=2)
    model.blocks[0] = Hides(DIM, 17)
    try:
        against_one_process(model, mesh, rank, world)
    except RuntimeError as error:
        assert "storage" in str(error) or "is resharded" in str(error)
    model.body = lambda m, x: m.blocks[1](x)
    model(data(rank)).sum().backward()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_in_place_on_outputs(checkpoints, mesh, rank, world):
    class Changes(Block):
        def forward(self, x):
            hidden = super().forward(x)
            return {"a": hidden, "b": hidden * 2}

    def body(m, x):
        out = m.blocks[0](x)
        out["a"].add_(1)
        out["b"].relu_()
        x = m.blocks[1](out["a"] + out["b"])
        x[:, 0] = 0
        x.mul_(x.detach().sigmoid())
        if checkpoints:
            x = torch.utils.checkpoint.checkpoint(m.blocks[2], x, use_reentrant=False)
        else:
            x = m.blocks[2](x)
        x.clamp_(-1, 1)
        return x

    model = Body(body)
    model.blocks[0] = Changes(DIM, 17)
    against_one_process(model, mesh, rank, world)


def test_in_place_on_the_roots_output(mesh, rank, world):
    def act(m, x):
        out = m(x)
        out -= 1
        out.square().mean().backward()

    against_one_process(Body(plain), mesh, rank, world, act=act)


def test_outputs_made_in_inference_mode(mesh, rank, world):
    """Evaluation in between, also as the first forward of all, leaves nothing that
    a training step meets."""

    def act(m, x):
        with torch.inference_mode():
            expected = m(x).clone()
        loss = m(x)
        assert torch.equal(loss, expected)
        loss.square().mean().backward()
        with torch.inference_mode():
            assert torch.equal(m(x), expected)

    model = against_one_process(Body(plain), mesh, rank, world, steps=3, act=act)
    assert not any(p.is_inference() for p in model.parameters())
    for p in model.parameters():
        p.grad is None or p.grad.add_(1)
