"""Random programs with two and three models against the same programs on one process.

FLATSHARD_PROGRAMS=200 runs 200 programs instead of 16. The name of a failing case has the
seed of its program, and the error has the program.
"""

import copy
import os
import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from flatshard import ShardOptions, fully_shard, share_comm_ctx
from tests.python.device import named_mesh, on_device

PROGRAMS = int(os.environ.get("FLATSHARD_PROGRAMS", 16))
DIM, ROWS = 7, 2
# Sums of float64 in another order, over some ten layers and steps.
TOLERANCE = dict(rtol=1e-9, atol=1e-11)


class Block(nn.Module):
    """x + down(act(up(x))), with variants."""

    def __init__(self, kind, hidden):
        super().__init__()
        self.kind = kind
        self.up = nn.Linear(DIM, hidden)
        self.down = nn.Linear(hidden, DIM, bias=kind != "no bias")
        if kind == "unused":
            self.unused = nn.Parameter(torch.ones(3, 2))
        if kind == "tied":
            self.again = nn.Linear(DIM, hidden, bias=False)
            self.again.weight = self.up.weight
        if kind == "scale":
            self.scale = nn.Parameter(torch.tensor(0.5))

    def _inside(self, x):
        h = torch.tanh(self.up(x))
        if self.kind == "tied":
            h = h + self.again(x)
        h = self.down(h)
        return h * self.scale if self.kind == "scale" else h

    def forward(self, x):
        if self.kind == "checkpoint" and torch.is_grad_enabled():
            return x + checkpoint(self._inside, x, use_reentrant=False)
        return x + self._inside(x)


KINDS = "plain", "no bias", "unused", "tied", "scale", "checkpoint"


@dataclass
class ModelPlan:
    """How one model is made and sharded."""

    kinds: list
    hidden: int
    units: list  # numbers of blocks that are units
    options: dict
    with_replicas: bool

    def make(self):
        blocks = (Block(kind, self.hidden) for kind in self.kinds)
        return on_device(nn.Sequential(*blocks).double())

    def shard(self, model, mesh):
        for number in self.units:
            fully_shard(model[number], mesh=mesh, **self.options)
        return fully_shard(model, mesh=mesh, **self.options)


@dataclass
class Program:
    """Models, and for each step its actions: (name, numbers of models)."""

    models: list
    shares_streams: bool
    steps: list = field(default_factory=list)


def random_model(rng):
    kinds = rng.choices(KINDS, k=rng.randint(1, 4))
    strategy = rng.choice(["zero0", "zero1", "zero2", "zero3", "zero3", "zero3"])
    options = {"strategy": strategy}
    if strategy == "zero3":
        options["reshard_after_forward"] = rng.choice([None, True, False])
    if strategy != "zero0" and rng.random() < 0.3:
        options["options"] = ShardOptions(granularity=rng.choice(["chunk", "tensor"]))
    units = [n for n in range(len(kinds)) if rng.random() < 0.7]
    return ModelPlan(kinds, rng.randint(3, 19), units, options, rng.random() < 0.3)


def random_program(seed):
    rng = random.Random(seed)
    number = rng.choice([2, 3])
    program = Program(
        [random_model(rng) for _ in range(number)], shares_streams=rng.random() < 0.3
    )
    for _ in range(rng.randint(2, 4)):
        step = []
        for _ in range(rng.randint(1, 3)):
            chosen = rng.choices(range(number), k=rng.randint(1, 4))
            step.append((rng.choice(ACTIONS), chosen))
        program.steps.append(step)
    return program


# -- actions: functions of models and an input [ROWS, DIM] -----------------------------


def backward(loss):
    if loss.requires_grad:  # some of what it depends on is not frozen
        loss.backward()


def chain(models, x):
    for model in models:
        x = model(x)
    backward(x.square().mean())


def detached(models, x):
    for model in models:
        x = model(x.detach())
        backward(x.square().mean())


def together(models, x):
    backward(sum(model(x).square().mean() for model in models))


def adversarial(models, x):
    fake = models[0](x)
    backward(models[-1](fake.detach()).mean())
    backward(-models[-1](fake).mean())


def taught(models, x):
    """The first is a teacher."""
    with torch.no_grad():
        wanted = models[0](x)
    backward((models[-1](x) - wanted).square().mean())


def without_sync(models, x):
    """Two microbatches of each, the first without collectives."""
    for model in models:
        if hasattr(model, "no_sync"):
            with model.no_sync():
                backward(model(x).mean())
        else:
            backward(model(x).mean())
        backward(model(x).square().mean())


def two_backwards(models, x):
    """The forwards of all run before the first backward."""
    for y in [model(x) for model in models]:
        backward(y.square().mean())


def evaluate(models, x):
    with torch.no_grad():
        for model in models:
            x = model(x)


def write(models, x):
    with torch.no_grad():
        for p in models[0].parameters():
            p.mul_(0.9)


def freeze(models, x):
    """Freezes a block, or trains it again. Nothing of this step has its gradients yet."""
    for p in models[0][0].parameters():
        p.requires_grad_(not p.requires_grad)


TRAINING = chain, detached, together, adversarial, taught, without_sync, two_backwards
ACTIONS = [f.__name__ for f in (*TRAINING, *TRAINING, evaluate, write, freeze)]
FIRST = "write", "freeze"  # in a step


def run_step(step, models, inputs):
    """Runs the actions of one step on `models`, each once for each of `inputs`."""
    for name, chosen in sorted(step, key=lambda action: action[0] not in FIRST):
        once = name in FIRST
        for x in inputs[:1] if once else inputs:
            globals()[name]([models[number] for number in chosen], x)


@pytest.mark.parametrize("seed", range(PROGRAMS))
def test_a_program_equals_one_process(seed, mesh, rank, world):
    program = random_program(seed)
    torch.manual_seed(seed)
    plain = [plan.make() for plan in program.models]
    replicas = named_mesh(outer=2, dp=world // 2) if world % 2 == 0 else mesh
    meshes = [replicas if plan.with_replicas else mesh for plan in program.models]
    sharded = [
        plan.shard(copy.deepcopy(model), own)
        for plan, model, own in zip(program.models, plain, meshes)
    ]
    if program.shares_streams and all(own is meshes[0] for own in meshes):
        share_comm_ctx(sharded)
    optimizers = [
        torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.05)
        for models in (plain, sharded)
    ]
    generator = torch.Generator().manual_seed(seed)
    for step in program.steps:
        shape = world, ROWS, DIM
        inputs = on_device(torch.randn(shape, generator=generator, dtype=torch.float64))
        run_step(step, plain, list(inputs))
        for p in (p for model in plain for p in model.parameters()):
            if p.grad is not None:
                p.grad /= world
        run_step(step, sharded, [inputs[rank]])
        for number, (one, model) in enumerate(zip(plain, sharded)):
            for (name, p), q in zip(one.named_parameters(), model.parameters()):
                where = f"{name} of model {number} in {step} of {program}"
                same(q.grad, p.grad, f"gradient of {where}")
                same(q, p, where)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(shard, wanted, what):
    if shard is None or wanted is None:
        found = [t for t in (shard, wanted) if t is not None]
        assert not any(whole(t).any() for t in found), what
        return
    torch.testing.assert_close(
        whole(shard), wanted, **TOLERANCE, msg=lambda text: f"{what}: {text}"
    )


def whole(tensor):
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
