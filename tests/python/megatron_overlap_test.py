"""Schedules that call Megatron-FSDP's hooks by hand: a test for each row of the table in
the description of its 1F1B support, named by the row's hook."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from flatshard import diagnostics, megatron
from tests.python.backward_pass_test import (
    batches_of,
    example,
    expect_equal,
    gradients,
    train,
)
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.experts_mesh_test import Experts
from bench.harness.options import fully_shard

Layer, Piece = example.Layer, example.Piece


def sharded(mesh, strategy=3, **options):
    torch.manual_seed(0)
    options = {"enable_fine_grained_param_gather": True, **options}
    return megatron.fully_shard_model(
        on_device(example.Model()),
        [Layer],
        device_mesh=mesh,
        zero_dp_strategy=strategy,
        **options,
    )


@pytest.fixture
def model(mesh, world, monkeypatch):
    """That has run a step, and keeps a trace."""
    if world == 1:
        pytest.skip("nothing is gathered on one rank")
    monkeypatch.setenv("FLATSHARD_TRACE_STEPS", "1")
    made = sharded(mesh)
    made(batches_of(0)[0]).backward()
    made.zero_grad()
    diagnostics.take_trace(made)
    return made


def actions(model, *kinds):
    """Returns the actions of `kinds` since the last call: (kind, unit, phase)."""
    trace = diagnostics.take_trace(model)
    return [(a.kind, a.unit, a.phase) for a in trace if not kinds or a.kind in kinds]


class Microbatch:
    """A schedule that uses hooks and sub-modules, and neither passes nor forward() of a
    layer."""

    def __init__(self, model, x, scale=1.0):
        self.model, self.x, self.scale = model, x, scale
        self.pieces, self.grad = [], None

    def run(self, function):
        self.pieces.append(Piece(function, self.x))
        self.x = self.pieces[-1].output

    def embed(self):
        self.run(self.model.embed)

    def forward(self, number):
        layer = self.model.layers[number]
        self.run(layer.attend)
        self.run(layer.experts)
        self.model.post_forward_release_module(layer)

    def head(self):
        self.run(lambda x: self.model.loss(x) * self.scale)

    def forwards(self):
        return [
            self.embed,
            *(lambda n=n: self.forward(n) for n in range(len(self.model.layers))),
            self.head,
        ]

    def back(self):
        self.grad = self.pieces.pop().backward(self.grad)

    def backward(self, number):
        self.back()
        self.back()
        self.model.post_backward_release_module(self.model.layers[number])

    def backwards(self):
        numbers = reversed(range(len(self.model.layers)))
        return [
            self.back,
            *(lambda n=n: self.backward(n) for n in numbers),
            self.back,
        ]


def combined(model, forward, backward, is_last=True):
    """Runs one step of the schedule: a forward in turn with a backward, either may be
    None."""
    if backward is not None:
        model.pre_backward(is_last=is_last)
    steps = [m for m in (forward and forward.forwards(),) if m]
    steps += [m for m in (backward and backward.backwards(),) if m]
    for pair in zip(*steps):
        for step in pair:
            step()
    if backward is not None:
        model.post_backward()


def one_f_one_b(model, batches):
    model._replace_param_with_raw_if_needed()
    all_ = [Microbatch(model, x, 1 / len(batches)) for x in batches]
    losses = []
    for number in range(len(all_) + 1):
        forward = all_[number] if number < len(all_) else None
        backward = all_[number - 1] if number > 0 else None
        combined(model, forward, backward, is_last=number == len(all_))
        if forward is not None:
            losses.append(forward.x.detach())
    return losses


def forward(model):
    model._replace_param_with_raw_if_needed()
    mine = Microbatch(model, batches_of(0)[0])
    for step in mine.forwards():
        step()
    return mine


# -- the rows --------------------------------------------------------------------------


def test_replace_param_with_raw_if_needed__sub_modules_compute_without_the_root(model):
    layer, x = model.layers[0], batches_of(0)[0]
    model._replace_param_with_raw_if_needed()
    assert hasattr(layer.mix.weight, "placements")
    out = layer.attend(x)
    assert type(layer.mix.weight) is nn.Parameter and out.shape == x.shape
    # Once more, after a step that was left in the middle.
    model._replace_param_with_raw_if_needed()
    assert torch.equal(layer.attend(x), out)


def test_pre_forward_param_unshard__a_sub_module_gathers_its_unit(model):
    model._replace_param_with_raw_if_needed()
    x = model.embed(batches_of(0)[0])
    actions(model)
    model.layers[0].mix(x)
    assert ("await", "layers.0", "forward") in actions(model)
    model.layers[0].up(x)  # is unsharded
    assert actions(model, "gather", "await") == []


def test_post_forward_release_module__releases_the_layer(model):
    model._replace_param_with_raw_if_needed()
    x = model.layers[0](model.embed(batches_of(0)[0]))  # as a whole
    assert ("release", "layers.0", "forward") in actions(model)
    model.layers[1].attend(x)
    assert actions(model, "release") == []
    model.post_forward_release_module(model.layers[1])
    assert [a[:2] for a in actions(model, "release")] == [("release", "layers.1")]
    assert hasattr(model.layers[1].mix.weight, "placements")


def test_post_backward_release_module__releases_the_layer(model):
    mine = forward(model)
    model.pre_backward()
    mine.back()
    actions(model)
    mine.back()
    mine.back()
    assert ("release", "layers.2") not in [a[:2] for a in actions(model)]
    model.post_backward_release_module(model.layers[2])
    assert ("release", "layers.2") in [a[:2] for a in actions(model)]


def test_pre_backward_param_unshard__a_gradient_in_a_sub_module_gathers_its_unit(model):
    mine = forward(model)
    model.pre_backward()
    mine.back()
    mine.backward(2)
    actions(model)
    mine.back()
    assert [a[1] for a in actions(model, "await")] == ["layers.1"]


def test_root_pre_backward__all_runs_of_the_engine_are_one_backward(model):
    mine = forward(model)
    with pytest.raises(RuntimeError, match="post_backward: expected a forward"):
        model.post_backward()
    actions(model)
    model.pre_backward()
    for step in mine.backwards():
        step()
    assert actions(model, "join") == []
    with pytest.raises(RuntimeError, match="expected post_backward before another one"):
        model.pre_backward()
    model.post_backward()
    assert len(actions(model, "join")) == 1


def test_root_post_backward__reduces_the_root_and_shows_gradients(model):
    mine = forward(model)
    model.pre_backward()
    for step in mine.backwards():
        step()
    assert ("reduce", "root") not in [a[:2] for a in actions(model)]
    assert model.embed.weight.grad is None
    model.post_backward()
    assert ("reduce", "root") in [a[:2] for a in actions(model)]
    found = gradients(model)
    model(batches_of(0)[0]).backward()  # not in pieces any more
    assert all(map(torch.equal, found, gradients(model)))


def test_process_post_backward_gradients__each_gradient_counts_once(model):
    x = batches_of(0)[0]
    model(x).backward()
    expected = gradients(model)
    mine = forward(model)
    combined(model, None, mine)
    assert all(map(torch.equal, gradients(model), expected))


def test_process_post_backward_gradients__delayed_ones_count_once(mesh):
    model = sharded(mesh, grads_in_place=True)
    x = batches_of(0)[0]
    model(x).backward()
    expected = gradients(model)
    mine = forward(model)
    steps = model.pre_backward()
    mine.back()
    for n in (2, 1, 0):
        with steps.delay_wgrads(n):
            mine.backward(n)
        assert steps.num_delayed_wgrads == (3 if n == 2 else 6)  # mix, up and down
        if n != 2:
            steps.run_wgrads(model.layers[n], n)
            assert steps.num_delayed_wgrads == 3
    mine.back()
    model.post_backward()  # with layer 2's
    assert all(map(torch.equal, gradients(model), expected))


# -- full training steps ---------------------------------------------------------------


@pytest.mark.parametrize("strategy", [0, 1, 2, 3])
def test_a_schedule_is_plain_accumulation(strategy, mesh):
    ours = train(one_f_one_b, sharded(mesh, strategy))
    theirs = train(example.plain, sharded(mesh, strategy))
    expect_equal(ours, theirs)


def test_without_fine_grained_gathers_it_is_refused(mesh):
    for option in (None, False):
        model = sharded(mesh, enable_fine_grained_param_gather=option)
        with pytest.raises(ValueError, match="enable_fine_grained_param_gather=True"):
            model._replace_param_with_raw_if_needed()


def test_checkpoints_around_parts_of_units_and_not_around_units(mesh):
    model, x = sharded(mesh), batches_of(0)[0]
    model(x).backward()
    expected = gradients(model)
    layers = model.layers

    def run(around):
        model._replace_param_with_raw_if_needed()
        hidden = model.embed(x)
        for layer in layers:
            hidden = around(layer, hidden)
        loss = model.loss(hidden)
        model.pre_backward()
        loss.backward()
        for layer in reversed(layers):
            model.post_backward_release_module(layer)
        model.post_backward()

    def parts(layer, hidden):
        hidden = layer.experts(checkpoint(layer.attend, hidden, use_reentrant=False))
        model.post_forward_release_module(layer)
        return hidden

    run(parts)
    assert all(map(torch.equal, gradients(model), expected))
    with pytest.raises(NotImplementedError, match="a checkpoint around FSDPLayer"):
        run(lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=False))
    run(parts)
    assert all(map(torch.equal, gradients(model), expected))


# -- experts on a separate mesh
# ---------------------------------------------------------


class ExpertLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.experts = Experts(2)
        for p in self.experts.parameters():
            p.allreduce = False

    def forward(self, x):
        x = torch.tanh(self.dense(x))
        return x + self.experts(x.unsqueeze(0).expand(2, -1, -1)).sum(0)


def expert_model():
    torch.manual_seed(0)
    return on_device(nn.Sequential(ExpertLayer(8), nn.Linear(8, 8)))


def meshes(world):
    ep = 2 if world % 2 == 0 else 1
    mesh = named_mesh(edp=world // ep, ep=ep)
    return mesh, mesh["edp", "ep"]._flatten("dp")


def test_expt_device_mesh__experts_rest_on_it(world):
    if world % 2:
        pytest.skip("needs an even number of ranks")
    mesh, dp = meshes(world)
    model, same = expert_model(), expert_model()
    megatron.fully_shard_model(
        model,
        [ExpertLayer],
        device_mesh=dp,
        dp_shard_dim="dp",
        expt_device_mesh=mesh["edp"],
        expt_fsdp_group_ag=mesh["edp"].get_group(),
        hybrid_fsdp_expt_group=mesh["edp"].get_group(),
    )
    fully_shard(same[0].experts, mesh=mesh["edp"])
    fully_shard(same[0], mesh=dp)
    fully_shard(same, mesh=dp)
    # Slices of the full tensor: each rank of "ep" has two of four experts.
    assert model[0].experts.up.shape[0] == 2 * mesh["ep"].size()
    for m in (model, same):
        m(batches_of(0)[0][:, :8]).square().sum().backward()
    assert all(map(torch.equal, gradients(model), gradients(same)))


def test_expt_names_that_cannot_be_meant_are_refused(world):
    mesh, dp = meshes(world)
    experts = dict(fsdp_unit_modules=[ExpertLayer], device_mesh=dp)

    def refused(error, match, module=None, **options):
        with pytest.raises(error, match=match):
            megatron.fully_shard_model(
                module or expert_model(), **{**experts, **options}
            )

    edp = mesh["edp"]
    refused(
        ValueError,
        "expt_device_mesh: found no modules of experts",
        nn.Linear(8, 8),
        expt_device_mesh=edp,
    )
    group = dp.get_group()
    refused(
        ValueError,
        "expt_fsdp_group_ag: expected expt_device_mesh",
        expt_fsdp_group_ag=group,
    )
    refused(
        ValueError,
        "hybrid_fsdp_expt_group: expected expt_device_mesh",
        hybrid_fsdp_expt_group=group,
    )
    if world > 1:
        refused(
            ValueError,
            "expt_fsdp_group_ag: expected a group of the ranks",
            expt_device_mesh=mesh["ep"] if world % 2 else edp,
            expt_fsdp_group_ag=mesh["edp"].get_group() if world % 2 else group,
        )
    refused(
        NotImplementedError,
        "expt_device_mesh is not supported with outer_dp_sharding_strategy",
        expt_device_mesh=edp,
        device_mesh=mesh,
        outer_dp_sharding_strategy="optim",
    )
    refused(
        ValueError,
        "expt_device_mesh: expected a mesh whose dimensions have names",
        expt_device_mesh=init_device_mesh(DEVICE, (world,)),
    )
