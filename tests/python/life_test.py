"""The life of a unit: its legal moves, and the error of each other one."""

from pathlib import Path

import pytest
import torch
from torch import nn

import flatshard
from flatshard._fsdp.life import MOVES, Life, LifeCycle, table
from flatshard._tensor.places import state_of

from bench.harness.options import fully_shard
from tests.python.device import on_device
from tests.python.models import Mlp
from tests.python.training import shard, train

PAGE = Path(__file__).parents[2] / "docs/internals/autograd.md"
ILLEGAL = [
    (name, life)
    for name, move in MOVES.items()
    for life in Life
    if life not in move.legal
]


def test_the_page_has_the_table_of_moves():
    print("\n".join(table()))
    assert "\n".join(table()) in PAGE.read_text()


@pytest.mark.parametrize("name, life", ILLEGAL)
def test_each_illegal_move_raises_its_error(name, life):
    cycle, move = LifeCycle(life), MOVES[name]
    with pytest.raises(move.error) as raised:
        cycle.move(name, unit="layers.7", kind="Block")
    text = move.when_away if life is Life.AWAY and move.when_away else move.text
    assert str(raised.value) == text.format(
        unit="layers.7", kind="Block", life=life.value
    )
    assert cycle.now is life


def test_each_error_is_of_one_move():
    texts = [t for m in MOVES.values() for t in (m.text, m.when_away) if t]
    assert len(set(texts)) == len(texts)


def test_legal_moves_lead_to_the_next_life():
    for name, move in MOVES.items():
        for before, after in move.legal.items():
            cycle = LifeCycle(before)
            cycle.move(name)
            assert cycle.now is after
            assert cycle.keeps_rows == (after is Life.TRAINED)


def test_a_unit_goes_through_its_life(mesh, rank):
    model = shard(Mlp(), fully_shard, mesh=mesh)
    unit = state_of(model)
    lives = [unit.life.now]
    train(model, rank)
    lives.append(unit.life.now)
    model.to("meta")
    lives.append(unit.life.now)
    assert lives == [Life.SHARDED, Life.TRAINED, Life.AWAY]
    assert unit.life.keeps_rows and unit.core is None


def layers():
    return on_device(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


def test_a_unit_that_ran_alone_cannot_run_in_a_larger_model(mesh):
    model = layers()
    flatshard.fully_shard(model[0], mesh=mesh)
    model[0](on_device(torch.ones(2, 4))).sum().backward()
    flatshard.fully_shard(model, mesh=mesh)
    with pytest.raises(RuntimeError, match="unit 0 ran, .* as part of a smaller model"):
        model(on_device(torch.ones(2, 4)))


def test_a_unit_that_is_away_cannot_be_captured(mesh):
    model = layers()
    flatshard.fully_shard(model, mesh=mesh)
    model.to("meta")
    with pytest.raises(
        RuntimeError, match="on another device; call it before they are"
    ):
        flatshard.make_graphed_callables(model, (torch.ones(2, 4, device="meta"),))


def test_experts_that_are_away_cannot_join_a_unit(world):
    if world % 2:
        pytest.skip("experts are on two ranks")
    meshes = flatshard.moe_meshes(ep=2)
    model = layers()
    flatshard.fully_shard(model[0], mesh=meshes.experts)
    model[0].to("meta")
    with pytest.raises(RuntimeError, match="Linear was moved to another device before"):
        flatshard.fully_shard(model, mesh=meshes.dp)
