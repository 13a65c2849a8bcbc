"""ShardOptions, ModelOptions and configure, and the keywords that they replaced."""

import pytest
import torch
from torch import nn

import flatshard
from flatshard import Float8Policy, ModelOptions, ShardOptions, configure, fully_shard
from flatshard._fsdp.linear import InPlaceLinear
from tests.python.device import DEVICE
from tests.python.models import Mlp
from tests.python.training import full_state, train


def shard(model, mesh, **options):
    for block in model.units():
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def test_options_of_the_model_reach_its_root(mesh):
    model = configure(Mlp(), ModelOptions(prefetch=2, buffers_on_demand=False))
    shard(model, mesh)
    model.loss(torch.Generator()).backward()
    root = model._flatshard.root
    assert root.graphs.buffers_on_demand is False
    assert model._flatshard.sharding.model_options.prefetch == 2


def test_configure_after_fully_shard(mesh):
    model = shard(Mlp(), mesh)
    configure(model, ModelOptions(buffers_on_demand=False))
    with pytest.raises(ValueError, match="copy_engines='all', but .* call configure b"):
        configure(model, ModelOptions(copy_engines="all"))
    model.loss(torch.Generator())
    assert model._flatshard.root.graphs.buffers_on_demand is False
    with pytest.raises(RuntimeError, match="before its first forward"):
        configure(model, ModelOptions())


def test_copies_are_chosen_before(mesh):
    model = shard(configure(Mlp(), ModelOptions(copy_engines="all")), mesh)
    assert all(
        unit._flatshard.sharding.copy_engines for unit in [model, *model.units()]
    )
    assert not shard(Mlp(), mesh)._flatshard.sharding.copy_engines or DEVICE == "cuda"


def test_former_keywords_work_and_warn(mesh, rank):
    torch.manual_seed(0)
    model = Mlp()
    for block in model.units():
        with pytest.warns(FutureWarning, match=r"ShardOptions\(grads_in_place=...\)"):
            fully_shard(block, mesh=mesh, grads_in_place=False)
    with pytest.warns(FutureWarning, match=r"ModelOptions\(prefetch=...\)"):
        fully_shard(model, mesh=mesh, prefetch=2)
    assert not any(isinstance(m, InPlaceLinear) for m in model.blocks.modules())
    torch.manual_seed(0)
    other = configure(Mlp(), ModelOptions(prefetch=2))
    for block in other.units():
        fully_shard(block, mesh=mesh, options=ShardOptions(grads_in_place=False))
    fully_shard(other, mesh=mesh)
    assert train(model, rank) == train(other, rank)
    for a, b in zip(full_state(model).values(), full_state(other).values()):
        assert torch.equal(a, b)


def test_former_names_work_and_warn(mesh):
    with pytest.warns(
        FutureWarning, match="slots_on_demand is deprecated .* buffers_on_demand"
    ):
        options = ModelOptions(slots_on_demand=False)
    assert options == ModelOptions(buffers_on_demand=False)
    with pytest.warns(FutureWarning, match=r"ModelOptions\(buffers_on_demand=...\)"):
        model = fully_shard(Mlp(), mesh=mesh, slots_on_demand=False)
    assert model._flatshard.sharding.model_options == options
    steps = model.backward_pass()
    with pytest.warns(FutureWarning, match="late_wgrads is deprecated .* delay_wgrads"):
        steps.late_wgrads(1)
    with pytest.warns(FutureWarning, match="use num_delayed_wgrads"):
        assert steps.num_late_wgrads == 0


def test_what_cannot_work_is_named(mesh):
    def wrap(**options):
        return fully_shard(Mlp(), mesh=mesh, **options)

    with pytest.raises(TypeError, match="unexpected keyword argument 'grads_inplace'"):
        wrap(grads_inplace=True)
    with pytest.raises(TypeError, match="fp8 in addition to options"):
        wrap(options=ShardOptions(), fp8=Float8Policy("rowwise"))
    with pytest.raises(TypeError, match="options: expected ShardOptions, got dict"):
        wrap(options={})
    with pytest.raises(ValueError, match="options: outer: expected 'replicate' or"):
        ShardOptions(outer="zero")
    with pytest.raises(ValueError, match="options: cuda_graph: expected True or False"):
        ShardOptions(cuda_graph=1)
    with pytest.raises(
        ValueError, match="granularity='chunk' has no effect .*'no_shard'"
    ):
        wrap(strategy="no_shard", options=ShardOptions(granularity="chunk"))
    with pytest.raises(NotImplementedError, match="granularity 'chunk' is not .* fp8"):
        ShardOptions(granularity="chunk", fp8=Float8Policy("rowwise"))
    with pytest.raises(ValueError, match="ModelOptions: prefetch: expected a number"):
        ModelOptions(prefetch=-1)
    with pytest.raises(TypeError, match="configure: expected a ModelOptions, got dict"):
        configure(nn.Linear(2, 2), {})
    with pytest.raises(TypeError, match="configure: expected a module"):
        configure("model", ModelOptions())


def test_a_part_that_contradicts_the_model_is_named(mesh):
    model = Mlp()
    configure(model.blocks[0], ModelOptions(prefetch=3))
    shard(model, mesh)
    with pytest.raises(ValueError, match="prefetch=3 of unit blocks.0 has no effect"):
        model.loss(torch.Generator())
    assert flatshard.ModelOptions() == ModelOptions()
