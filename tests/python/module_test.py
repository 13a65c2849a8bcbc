"""What programs do with modules: each must train like the unsharded one."""

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
from flatshard import MixedPrecisionPolicy, fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.models import DIM, HIDDEN, Block, Body, Mlp, llama, plain
from tests.python.training import (
    STRATEGIES,
    against_one_process,
    data,
    distance,
    full_state,
    shard,
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
    """Its parameters are gathered and get no gradient."""

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
    """FSDP2 of torch 2.11 waits for ever: the other ranks do not reduce."""
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
    # A backward that has none leaves what is there.
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
    model(data(rank)).square().mean().backward()
    for r in range(world):
        (expected(data(r)).square().mean() / world).backward()
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


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


def test_dropped_gradients_give_their_memory_back(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    model(data(rank)).sum().backward()
    kept = model.head.weight.grad
    values = kept._local_tensor.clone()
    model.zero_grad()
    model(2 * data(rank)).sum().backward()
    # What the user holds is the user's; the core fills new memory.
    assert model.head.weight.grad is not kept
    assert torch.equal(kept._local_tensor, values)
    core = flatshard.module.state_of(model).core
    model.zero_grad()
    assert core.grad(0) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_writes_reach_the_next_forward(strategy, dtype, mesh, rank):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = shard(
        Body(plain), fully_shard, mesh=mesh, strategy=strategy, mp_policy=policy
    )
    x = data(rank)
    model(x)
    bias = model.head.bias

    def out():
        with torch.no_grad():
            return model(x).float()

    def write_local(value):
        with torch.no_grad():
            bias.to_local().fill_(value)

    def write_data(value):
        bias.data.copy_(torch.full_like(bias, value))

    def write_in_place(value):
        with torch.no_grad():
            bias.fill_(value)

    def assign_data(value):
        bias.data = torch.full_like(bias, value)

    def load(value):
        state = model.state_dict()
        state["head.bias"] = torch.full_like(state["head.bias"], value)
        model.load_state_dict(state)

    with torch.no_grad():
        model.head.weight.zero_()
    for step, write in enumerate(
        (write_local, write_data, write_in_place, assign_data, load)
    ):
        write(float(step + 1))
        found = out()
        assert torch.equal(found, torch.full_like(found, step + 1)), write.__name__


def test_load_state_dict_assign(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    other = shard(Body(plain), fully_shard, mesh=mesh)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model(data(rank)), other(data(rank)))
    model(data(rank)).sum().backward()
    assert model.head.weight.grad is not None


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
            torch.manual_seed(flatshard.initialize._seed(3, name))
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
    # The first DTensor of a process leaves frames of torch's behind.
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
            weakref.ref(flatshard.module.state_of(model)),
        ]
        del model
        assert [w() for w in watched] == [None] * 3
    finally:
        gc.enable()


def test_a_list_is_one_unit(mesh, rank, world):
    model = Body(plain)
    single = copy.deepcopy(model)
    fully_shard(list(model.blocks), mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(data(rank)).square().mean().backward()
    for _ in range(2):
        for r in range(world):
            (single(data(r)).square().mean() / world).backward()
    for ours, theirs in zip(model.parameters(), single.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("function", [fully_shard, fsdp2])
def test_slices_of_a_sequence_are_plain(function, mesh, rank):
    """As FSDP2's are."""
    model = nn.Sequential(*(Block(DIM, HIDDEN) for _ in range(3)))
    single = copy.deepcopy(model)
    for block in model:
        function(block, mesh=mesh)
    function(model, mesh=mesh)
    x = data(rank)
    model(x)
    part = model[:2]
    assert type(part) is nn.Sequential and part[1] is model[1]
    torch.testing.assert_close(part(x), single[:2](x))
    part(x).square().mean().backward()
    assert part[0].up.weight.grad is not None and model[2].up.weight.grad is None


def test_a_slice_without_units_runs_while_whole(mesh, rank):
    model = nn.Sequential(*(Block(DIM, HIDDEN) for _ in range(2)))
    single = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    x = data(rank)
    with refused("weight of Linear .*unit root", RuntimeError):
        model(x), model[:1](x)
    model.unshard()
    torch.testing.assert_close(model[:1](x), single[:1](x))


class Tail(nn.Module):
    """Modules of a list unit, called as `order` says; "weight": no module, but what
    one of them holds."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, DIM)
        on_device(self)

    def forward(self, x, order):
        x = self.body(x)
        for name in order.split():
            if name == "weight":
                x = nn.functional.linear(x, self.head.weight)
            else:
                x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize(
    "order",
    ["norm", "head norm", "norm norm head", "norm head norm", "norm weight", "body"],
)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_modules_of_a_list_run_in_any_order(order, strategy, mesh, rank):
    """And the next step is right, too: those of FSDP2 are."""
    states = []
    for function, options in ((fully_shard, {"strategy": strategy}), (fsdp2, {})):
        torch.manual_seed(0)
        model = Tail()
        function([model.norm, model.head], mesh=mesh, **options)
        function(model, mesh=mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for now in (order, "norm head", order):
            with torch.no_grad():
                model(data(rank), now)
            model(data(rank), now).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        states.append(full_state(model))
    assert distance(*states) < 1e-5


def test_lists_that_interleave_or_nest(mesh, rank, world):
    def act(m, x):
        m(x).square().mean().backward()

    for nested in (False, True):
        states = []
        for function in (fully_shard, fsdp2):
            torch.manual_seed(0)
            model = Body(plain, blocks=4)
            a, b, c, d = model.blocks
            lists = ([[a, a.up], [b, b.down, b.up]]) if nested else ([[a, c], [b, d]])
            for modules in lists:
                function(modules, mesh=mesh)
            function(model, mesh=mesh)
            for _ in range(2):
                act(model, data(rank))
            states.append({n: p.grad for n, p in model.named_parameters()})
        for name, grad in states[0].items():
            torch.testing.assert_close(
                grad.full_tensor(), states[1][name].full_tensor()
            )


def test_weights_of_a_list_stay_for_all_its_modules(mesh, rank):
    model = Tail()
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = []
    model.body.register_forward_hook(
        lambda *_: seen.append(type(model.head.weight) is nn.Parameter)
    )
    with torch.no_grad():
        for order in ("norm body head body", "norm", "body"):
            model(data(rank), order)
    # Whole from the first of them to the last, and no longer than the forward.
    assert seen == [False, True, False, False, False, False]


def test_steps_of_other_models_change_nothing_here(mesh, rank):
    """A model waits for its backward while others are trained, as in a GAN. FSDP2's
    weights."""
    states = []
    for function in (fully_shard, fsdp2):
        torch.manual_seed(0)
        model, other, average = (
            shard(Body(plain), function, mesh=mesh) for _ in range(3)
        )
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)
            for m in (model, other)
        ]
        for _ in range(2):
            loss = model(data(rank)).square().mean()
            other(data(rank)).square().mean().backward()
            optimizers[1].step(), optimizers[1].zero_grad()
            with torch.no_grad():
                averages, weights = list(average.parameters()), list(other.parameters())
                torch._foreach_mul_(averages, 0.9)
                torch._foreach_add_(averages, weights, alpha=0.1)
                averages[0].mul_(2)
            loss.backward()
            optimizers[0].step(), optimizers[0].zero_grad()
            average(data(rank))
            average.reshard()  # FSDP2 shows the root's weights whole
        states.append([full_state(m) for m in (model, other, average)])
    for ours, theirs in zip(*states):
        assert distance(ours, theirs) < 1e-5


def test_a_step_that_fails_or_calls_the_model_is_seen(mesh, rank):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                torch._foreach_mul_(self.param_groups[0]["params"], 2.0)
                if closure is None:
                    raise ValueError
                closure()
                torch._foreach_mul_(self.param_groups[0]["params"], 0.25)

    model = shard(Body(plain), fully_shard, mesh=mesh)
    single = Body(plain)

    def check():
        single.load_state_dict(full_state(model))
        torch.testing.assert_close(model(data(rank)), single(data(rank)))

    check()
    optimizer = Fails(model.parameters(), lr=0.1)
    with pytest.raises(ValueError):
        optimizer.step()
    check()
    optimizer.step(check)
    check()
    loss = model(data(rank)).square().mean()
    torch.optim.SGD(model.parameters(), lr=0.1).step(loss.backward)
    check()


def test_a_unit_called_alone_after_a_step(mesh, rank):
    """FSDP2's weights."""
    states = []
    for function in (fully_shard, fsdp2):
        torch.manual_seed(0)
        model = shard(Body(plain), function, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(data(rank)).square().mean().backward()
        for _ in range(2):
            optimizer.step(), optimizer.zero_grad()
            model.blocks[1](data(rank)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.blocks[1](data(rank))
        states.append(full_state(model))
    assert distance(*states) < 1e-5


def test_setters(mesh, rank, world):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    single_loss = model(data(rank)).square().mean()
    single_loss.backward()
    grads = [p.grad.full_tensor().clone() for p in model.parameters()]

    def again():
        model.zero_grad()
        model(data(rank)).square().mean().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    a, b, c = model.blocks
    a.set_modules_to_forward_prefetch([b, c])
    c.set_modules_to_backward_prefetch([b, a])
    model.set_reshard_after_forward(False)
    model.set_reshard_after_backward(False)
    for ours, theirs in zip(again(), grads):
        torch.testing.assert_close(ours, theirs)
    model.set_reshard_after_backward(True)
    model.set_gradient_divide_factor(1.0)  # of the root's own parameters
    for (name, _), ours, theirs in zip(model.named_parameters(), again(), grads):
        factor = world if name.startswith("head") else 1
        torch.testing.assert_close(ours, factor * theirs)


def test_unshard_and_reshard(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    whole = full_state(model)
    model(data(rank)).sum().backward()
    block = model.blocks[1]
    for async_op in (False, True):
        handle = block.unshard(async_op)
        if async_op:
            handle.wait()
        assert type(block.up.weight) is nn.Parameter
        assert torch.equal(block.up.weight, whole["blocks.1.up.weight"])
        block.reshard()
        assert torch.equal(block.up.weight.full_tensor(), whole["blocks.1.up.weight"])
    block.unshard()
    model(data(rank)).sum().backward()


def test_unshard_before_the_first_forward(mesh, rank, world):
    torch.manual_seed(1)
    plain_model = Body(plain)
    whole = {name: t.clone() for name, t in plain_model.state_dict().items()}
    for first in ("root", "block", "async block"):
        model = shard(copy.deepcopy(plain_model), fully_shard, mesh=mesh)
        model.reshard()  # nothing is gathered yet
        if first == "root":
            model.unshard()
            assert torch.equal(model.head.weight, whole["head.weight"])
        else:
            block = model.blocks[1]
            handle = block.unshard(async_op=first == "async block")
            if handle:
                handle.wait()
            assert torch.equal(block.up.weight, whole["blocks.1.up.weight"])
        # The units are those of the whole model: it trains like any other.
        model(data(rank)).square().mean().backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim_grads", "optim"])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_unshard_sees_the_last_step(mesh, rank, strategy, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    options = {"mesh": mesh, "strategy": strategy, "mp_policy": policy}
    model = shard(Body(plain), fully_shard, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        model(data(rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        new = full_state(model)["blocks.1.up.weight"].to(dtype)
        block = model.blocks[1]
        block.unshard()
        assert torch.equal(block.up.weight, new)
        block.reshard()


def test_a_model_that_grows_after_unshard_is_refused(mesh, rank):
    model = Body(plain)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    model.blocks[1].unshard()
    fully_shard(model, mesh=mesh)
    with refused("unit blocks.1 ran, or was unsharded, before", RuntimeError):
        model(data(rank))


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
    model(data(rank)).square().mean().backward()
    for r in range(world):
        (single(data(r)).square().mean() / world).backward()
    for ours, theirs in zip(model.parameters(), single.parameters()):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def two_microbatches(m, x):
    if hasattr(m, "no_sync"):
        with m.no_sync():
            m(x).square().mean().backward()
    else:
        m(x).square().mean().backward()
    m(x).square().mean().backward()


def test_no_sync(mesh, rank, world):
    against_one_process(Body(plain), mesh, rank, world, act=two_microbatches)


class Doubles(Block):
    def __init__(self, dim, hidden):
        super().__init__(dim, hidden)
        self.double()

    def forward(self, x):
        return super().forward(x.to(self.up.weight.dtype)).to(x.dtype)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_parameters_train(strategy, mesh, rank, world):
    model = Body(plain)
    model.blocks[1] = Doubles(DIM, 40)
    model.blocks[0].down.bias.requires_grad_(False)
    against_one_process(model, mesh, rank, world, strategy=strategy)
    assert model.blocks[1].up.weight.dtype == torch.float64
    with refused("float64 parameters are not supported.*torch.optim", RuntimeError):
        flatshard.optim.AdamW(model.parameters())


FROZEN = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float64,
)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_frozen_parameters_of_any_dtype(strategy, param_dtype, mesh, rank, folder):
    class Quantized(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            values = torch.randint(2, (5, 3)).to(dtype)
            self.codes = nn.Parameter(values, requires_grad=False)

        def forward(self, x):
            return x + (self.codes.to(x.dtype) * self.scale).sum()

    model = on_device(nn.Sequential(*(Quantized(dtype) for dtype in FROZEN)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
    model(on_device(torch.ones(2, 3))).sum().backward()
    after = full_state(model)
    for name, value in before.items():
        if value.is_floating_point() and value.element_size() > 1 and param_dtype:
            assert torch.equal(after[name].to(value), value.to(param_dtype).to(value))
        else:
            assert after[name].dtype == value.dtype
            # Bits: float8 has no comparisons.
            ours, theirs = (t.flatten().view(torch.uint8) for t in (after[name], value))
            assert torch.equal(ours, theirs), name
    assert all(m.scale.grad is not None for m in model)
    optimizer = torch.optim.SGD((m.scale for m in model), lr=0.1)
    optimizer.step()
    flatshard.checkpoint.save(folder, 1, model, optimizer)
    saved = full_state(model)
    with torch.no_grad():
        for p in model.parameters():
            p._local_tensor.zero_()
    flatshard.checkpoint.load(folder, model, optimizer)
    for name, value in full_state(model).items():
        ours, theirs = (t.flatten().view(torch.uint8) for t in (value, saved[name]))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_trainable_parameters_of_other_dtypes_are_named(dtype, mesh):
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2).to(dtype))
    with refused("parameter weight is of type .* and trainable; .*Freeze it"):
        fully_shard(layer, mesh=mesh)


class Scalars(nn.Module):
    """A temperature, as contrastive models have, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor(2), requires_grad=False)
        on_device(self)

    def forward(self, x):
        return self.linear(x) * self.temperature.exp() + self.offset


def scalar_model():
    model = Body(plain)
    model.blocks[1] = Scalars()
    model.bias = nn.Parameter(on_device(torch.tensor(0.1)))
    model.body = lambda m, x: plain(m, x) + m.bias
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scalar_parameters_train(strategy, mesh, rank, world):
    def act(m, x):
        two_microbatches(m, x)
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9)

    torch.manual_seed(0)
    model = scalar_model()
    against_one_process(model, mesh, rank, world, act=act, strategy=strategy)
    temperature = model.blocks[1].temperature
    assert temperature.shape == () and temperature.placements[0].is_replicate()


def test_scalar_parameters_in_replicas(mesh_2d, rank, world):
    against_one_process(scalar_model(), mesh_2d, rank, world)


def test_scalar_parameters_are_clipped_saved_and_loaded(mesh, rank, folder):
    def made(function, seed):
        torch.manual_seed(seed)
        model = scalar_model()
        if function is not None:
            shard(model, function, mesh=mesh)
        return model

    single, model, norms = made(None, 1), made(fully_shard, 1), []
    for m in (single, model):
        m(data(0)).square().mean().backward()
        for order in (2.0, torch.inf):
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9, order)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    torch.testing.assert_close(norms[:2], norms[2:])
    for kind in (torch.optim.AdamW, flatshard.optim.AdamW):
        model, other = made(fully_shard, 1), made(fully_shard, 2)
        optimizers = [kind(m.parameters(), lr=0.1) for m in (model, other)]

        def step(m, optimizer):
            m(data(rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(model, optimizers[0])
        path = f"{folder}/{kind.__module__}"
        flatshard.checkpoint.save(path, 1, model, optimizers[0])
        flatshard.checkpoint.load(path, other, optimizers[1])
        step(model, optimizers[0])
        step(other, optimizers[1])
        ours, theirs = full_state(model), full_state(other)
        assert ours["blocks.1.temperature"] != 0.5
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
    # And DCP, and the unsharded model.
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    other = made(fully_shard, 3)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    other.load_state_dict(state["model"])
    for name, value in full_state(model).items():
        assert torch.equal(value, full_state(other)[name]), name
    single.load_state_dict(full_state(model))


def test_ignored_parameters_stay(mesh, rank):
    model = Body(plain)
    weight = model.head.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={weight})
    assert model.head.weight is weight
    model(data(rank)).sum().backward()
    assert weight.grad is not None and not hasattr(weight.grad, "placements")


def refused(match, kind=ValueError):
    return pytest.raises(kind, match=match)


def test_bad_arguments_are_named(mesh):
    model = Body(plain)
    with refused("strategy: expected one of"):
        fully_shard(model, mesh=mesh, strategy="zero9")
    with refused("granularity"):
        fully_shard(model, mesh=mesh, granularity="row3")
    with refused("container ModuleList"):
        fully_shard(model.blocks, mesh=mesh)
    with refused("mp_policy"):
        fully_shard(model, mesh=mesh, mp_policy=3)
    with refused("offload_policy: expected OffloadPolicy"):
        fully_shard(model, mesh=mesh, offload_policy="cpu")
    with refused("reshard_after_forward", NotImplementedError):
        fully_shard(model, mesh=mesh, reshard_after_forward=2)
    with refused("shard_placement_fn", NotImplementedError):
        fully_shard(
            model,
            mesh=mesh,
            shard_placement_fn=lambda p: torch.distributed.tensor.Shard(1),
        )
    fully_shard(model.blocks[0], mesh=mesh)
    with refused("applied to this FSDPBlock before"):
        fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(AssertionError, match="cannot be copied"):
        copy.deepcopy(model.blocks[0])
    with pytest.raises(NotImplementedError, match="mp_policy"):
        model.half()


def test_parameters_outside_of_their_unit_are_named(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    with refused("parameter weight of Linear .* of its unit.*unshard", RuntimeError):
        model.blocks[1].up(data(rank))
    model(data(rank)).sum().backward()
    with refused("parameter weight of Linear .* unit root.*register", RuntimeError):
        model.head(data(rank))
    with refused("linear: parameter weight of Linear .* unit blocks.1", RuntimeError):
        model.blocks[1].up(data(rank))
    with refused("add: a sharded tensor", RuntimeError):
        model.head.bias.detach() + on_device(torch.ones(5))
    model.unshard()
    model.head(data(rank))


def test_ties_over_units_are_named(mesh):
    model = Body(plain)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0], mesh=mesh)
    with refused("up.weight is shared with a unit that was wrapped before"):
        fully_shard(model.blocks[1], mesh=mesh)


def test_changed_requires_grad_is_named(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    model(data(rank))
    model.blocks[0].up.weight.requires_grad_(False)
    with torch.no_grad():
        model(data(rank))
    with refused("requires_grad of parameter weight", RuntimeError):
        model(data(rank))
