"""Custom schedules: modules in pieces, several microbatches under way."""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy
from tests.python.device import DEVICE, on_device
from bench.harness.options import fully_shard
from tests.python.training import full_state

EXAMPLE = Path(__file__).parents[2] / "examples/python/one_f_one_b.py"
spec = importlib.util.spec_from_file_location("one_f_one_b", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
example.fully_shard = fully_shard

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")


def batches_of(step):
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    return list(on_device(torch.randn(3, 8, 16, generator=generator)))


def sharded(**options):
    torch.manual_seed(0)
    return example.shard(on_device(example.Model()), **options)


def train(step, model, steps=3):
    """Losses and the weights at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for n in range(steps):
        losses += step(model, batches_of(n))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), full_state(model)


def trained(step, steps=3, **options):
    return train(step, sharded(**options), steps)


def expect_equal(ours, theirs):
    assert torch.equal(ours[0], theirs[0])
    assert all(torch.equal(ours[1][name], value) for name, value in theirs[1].items())


# -- 1F1B ------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_1f1b_is_plain_accumulation(strategy, mesh):
    options = dict(mesh=mesh, strategy=strategy)
    ours = trained(example.one_f_one_b, **options)
    expect_equal(ours, trained(example.plain, **options))
    assert ours[0][-1] != ours[0][0]


def test_1f1b_is_plain_accumulation_with_replicas(mesh_2d):
    ours = trained(example.one_f_one_b, mesh=mesh_2d)
    expect_equal(ours, trained(example.plain, mesh=mesh_2d))


@pytest.mark.parametrize(
    "options",
    [
        dict(offload_policy=CPUOffloadPolicy()),
        dict(copy_engines="all"),
        dict(buffers_on_demand=False, grads_in_place=True),
        dict(prefetch=2, strategy="zero1"),
    ],
    ids=lambda options: "-".join(options),
)
def test_1f1b_goes_with_other_options(options, mesh):
    if DEVICE == "cuda" and "copy_engines" in options:
        pytest.skip("ranks that share a GPU have no copy engines")
    ours = trained(example.one_f_one_b, 2, mesh=mesh, **options)
    expect_equal(ours, trained(example.plain, 2, mesh=mesh, **options))


def test_hooks_of_gradients_are_refused_where_backwards_interleave(mesh):
    model = sharded(mesh=mesh)
    model.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(flatshard.ConfigError, match="expected no hooks of"):
        example.one_f_one_b(model, batches_of(0))
    model(batches_of(0)[0]).backward()


def test_1f1b_with_three_slots_of_gradients(mesh):
    def step(model, batches):
        model.set_reduce_scatter_max_input_buffers(2)
        return example.one_f_one_b(model, batches)

    model = sharded(mesh=mesh)
    model(batches_of(0)[0]).backward()
    for p in model.parameters():
        p.grad = None
    losses = step(model, batches_of(0))
    again = sharded(mesh=mesh)
    assert all(map(torch.equal, losses, example.plain(again, batches_of(0))))
    for p, q in zip(model.parameters(), again.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())


# -- pieces ----------------------------------------------------------------------------


def forward_in_pieces(model, steps, x):
    """Runs the full model in pieces. The output of the last one is the loss."""
    pieces = []

    def run(function, x):
        pieces.append(example.Piece(function, x))
        return pieces[-1].output

    steps.begin_forward(model)
    x = run(model.embed, x)
    for layer in model.layers:
        steps.begin_forward(layer)
        x = run(layer.experts, run(layer.attend, x))
        steps.end_forward(layer)
    run(model.loss, x)
    steps.end_forward(model)
    return pieces


def backward_in_pieces(model, steps, pieces, until=None):
    steps.begin_backward(model)
    grad = pieces.pop().backward()
    for layer in reversed(model.layers):
        if layer is until:
            raise KeyError("until")
        steps.begin_backward(layer)
        grad = pieces.pop().backward(grad)
        grad = pieces.pop().backward(grad)
        steps.end_backward(layer)
    pieces.pop().backward(grad)
    steps.end_backward(model)


def gradients(model):
    found = [p.grad.full_tensor().clone() for p in model.parameters()]
    model.zero_grad()
    return found


def test_parameters_are_whole_between_begin_and_end(mesh):
    model = sharded(mesh=mesh)
    layer, x = model.layers[0], batches_of(0)[0]
    model(x).backward()
    steps = model.backward_pass()
    steps.begin_forward(model)
    steps.begin_forward(layer)
    assert type(layer.mix.weight) is nn.Parameter
    layer.attend(x)
    steps.end_forward(layer)
    assert hasattr(layer.mix.weight, "placements")
    steps.give_up()
    model(x).backward()


def test_late_weight_gradients(mesh):
    x = batches_of(0)[0]
    model = sharded(mesh=mesh, grads_in_place=True)
    model(x).backward()
    expected = gradients(model)
    for asks in (True, False):
        steps = model.backward_pass()
        pieces = forward_in_pieces(model, steps, x)
        with steps:
            steps.begin_backward(model)
            grad = pieces.pop().backward()
            for layer in reversed(model.layers):
                steps.begin_backward(layer)
                with steps.delay_wgrads(1):
                    grad = pieces.pop().backward(grad)
                grad = pieces.pop().backward(grad)
                steps.end_backward(layer)
                if asks:
                    steps.run_wgrads(layer, 0)  # another node's
                    assert steps.num_delayed_wgrads == 2
                    steps.run_wgrads(layer, 1)
                    assert steps.num_delayed_wgrads == 0
            assert asks or steps.num_delayed_wgrads == 2 * len(model.layers)
            pieces.pop().backward(grad)
            steps.end_backward(model)
        assert all(map(torch.equal, gradients(model), expected))


def test_recomputation(mesh):
    x = batches_of(0)[0]
    model = sharded(mesh=mesh)
    model(x).backward()
    expected = gradients(model)
    steps = model.backward_pass()
    steps.begin_forward(model)
    embed = example.Piece(model.embed, x)
    x, inputs = embed.output, []
    for layer in model.layers:
        inputs.append(x.detach().requires_grad_())
        steps.begin_forward(layer)
        with torch.no_grad():
            x = layer.experts(layer.attend(x))
        steps.end_forward(layer)
    head = example.Piece(model.loss, x.requires_grad_())
    steps.end_forward(model)
    with steps:
        steps.begin_backward(model)
        grad = head.backward()
        for layer in reversed(model.layers):
            steps.begin_backward(layer)
            with steps.recompute(layer):
                piece = example.Piece(
                    lambda x: layer.experts(layer.attend(x)), inputs.pop()
                )
            grad = piece.backward(grad)
            steps.end_backward(layer)
        embed.backward(grad)
        steps.end_backward(model)
    assert all(map(torch.equal, gradients(model), expected))


def test_calls_inside_of_forward_belong_to_the_pass(mesh):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model, x = sharded(mesh=mesh, mp_policy=policy), batches_of(0)[0]
    expected = model(x)
    expected.backward()
    grads = gradients(model)
    steps = model.backward_pass()
    with steps.forward():
        loss = model(x)  # layers inside likewise; one graph
    assert torch.equal(loss, expected)
    with steps:
        for module in (model, *reversed(model.layers)):
            steps.begin_backward(module)
        loss.backward()
        for module in (*reversed(model.layers), model):
            steps.end_backward(module)
    assert all(map(torch.equal, gradients(model), grads))


# -- what goes wrong -------------------------------------------------------------------


def test_an_exception_leaves_the_next_step_right(mesh):
    model, x = sharded(mesh=mesh), batches_of(0)[0]
    model(x).backward()
    expected = gradients(model)
    for until in model.layers:
        steps = model.backward_pass()
        pieces = forward_in_pieces(model, steps, x)
        with pytest.raises(KeyError, match="until"), steps:
            backward_in_pieces(model, steps, pieces, until)
        steps = model.backward_pass()
        with pytest.raises(KeyError, match="in the forward"):
            with steps.forward():
                steps.begin_forward(model)
                raise KeyError("in the forward")
        steps = model.backward_pass()
        pieces = forward_in_pieces(model, steps, x)
        with steps:
            backward_in_pieces(model, steps, pieces)
        assert all(map(torch.equal, gradients(model), expected))


def test_one_that_is_dropped_is_given_up(mesh):
    model, x = sharded(mesh=mesh), batches_of(0)[0]
    model(x).backward()
    expected = gradients(model)
    steps = model.backward_pass(is_last=False)
    forward_in_pieces(model, steps, x)
    steps.__enter__()
    del steps
    model(x).backward()
    assert all(map(torch.equal, gradients(model), expected))


def test_reset_gives_up(mesh):
    model, x = sharded(mesh=mesh), batches_of(0)[0]
    steps = model.backward_pass()
    steps.begin_forward(model)
    model.reset_iter_state()
    with pytest.raises(flatshard.ConfigError, match="not given up"):
        steps.begin_forward(model.layers[0])
    model(x).backward()


def test_what_is_out_of_order_is_named(mesh):
    model, x = sharded(mesh=mesh), batches_of(0)[0]
    steps = model.backward_pass()
    with pytest.raises(ValueError, match="fully_shard wrapped, got a Linear"):
        steps.begin_forward(model.embed)
    with pytest.raises(
        flatshard.ConfigError, match="after open_backward|no forward in it"
    ):
        steps.begin_backward(model)
    steps.begin_forward(model)
    with pytest.raises(RuntimeError, match="Model was called while a backward_pass"):
        model(x)
    with pytest.raises(flatshard.ConfigError, match="to run once"):
        steps.begin_forward(model)
    with pytest.raises(flatshard.ConfigError, match="to be over"):
        steps.__enter__()
    steps.end_forward(model)
    with steps:
        with pytest.raises(flatshard.ConfigError, match="one open backward at a time"):
            model.backward_pass().__enter__()
        steps.begin_backward(model)
        steps.end_backward(model)


def test_graphs_of_blocks_are_refused(mesh, graphs_on_cpu):
    model = on_device(example.Model())
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, cuda_graph=True)
    fully_shard(model, mesh=mesh)
    with pytest.raises(NotImplementedError, match="cuda_graph=True"):
        model.backward_pass()
