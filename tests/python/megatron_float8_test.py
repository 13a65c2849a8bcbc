"""FP8 options of Megatron-FSDP, both versions: what they all-gather, and when."""

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import Float8Policy, megatron
from flatshard.diagnostics import take_trace
from flatshard.megatron import FullyShardFP8Policy, FullyShardMixedPrecisionPolicy, v2
from tests.python.float8_models import Block, Mlp, shard, train
from tests.python.training import distance, full_state

ROWS, COLUMNS = 1, 2
# The padding of parts that are split evenly over three ranks; cases that must be
# distinguished differ by half.
PADDING = 0.2


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    monkeypatch.setenv("FLATSHARD_TRACE_STEPS", "1")


class HalfRecomputing(Block):
    """Its first matmul runs again in the backward."""

    def first(self, x):
        return torch.relu(self.up(self.norm(x)))

    def forward(self, x):
        return x + self.down(checkpoint(self.first, x, use_reentrant=False))


def policy(recipe, **options):
    fp8 = FullyShardFP8Policy(True, recipe, emulate=True, **options)
    return megatron.MixedPrecisionPolicy(fp8=fp8)


def first_version(mesh, fp8, block=Block, **options):
    torch.manual_seed(0)
    return megatron.fully_shard_model(
        Mlp(block=block).bfloat16(),
        [Block],
        device_mesh=mesh,
        mixed_precision_policy=fp8,
        **options,
    )


def second_version(mesh, fp8, block=Block):
    torch.manual_seed(0)
    model = Mlp(block=block).bfloat16()
    which = v2.Placements(["dp"], [Shard(0)], [Shard(0)], [Shard(0)])
    with v2.fully_shard_context():
        for unit in model.units():
            v2.fully_shard(unit, mesh, which, fp8)
        v2.fully_shard(model, mesh, which)
    return model


def step(model, rank, microbatches=1):
    """Returns the actions of each microbatch of the second step. That step uses the
    order of the first."""
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        take_trace(model)
        found = []
        for number in range(microbatches):
            model.loss(torch.Generator().manual_seed(rank + 10 * number)).backward()
            found.append([a for a in take_trace(model) if a.unit.startswith("blocks")])
        optimizer.step()
        optimizer.zero_grad()
    return found


def gathered(actions, phase, plane, part=None):
    return sum(
        a.nbytes
        for a in actions
        if a.kind == "gather"
        and (a.phase, a.plane) == (phase, plane)
        and part in (None, a.part)
    )


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_both_versions_are_float8_policies(recipe, mesh, rank):
    stored = "stored" if recipe == "mxfp8" else "auto"
    plain = Float8Policy(recipe, column_plane=stored, emulate=True)
    torch.manual_seed(0)
    model = Mlp().bfloat16().float()  # values as there
    expected = train(shard(model, mesh, plain), [rank])
    for make in (first_version, second_version):
        other = make(mesh, policy(recipe))
        assert set(flatshard.float8.describe(other).float8) == {
            f"blocks.{n}.{layer}.weight" for n in (0, 1) for layer in ("up", "down")
        }
        assert all(p.dtype == torch.float32 for p in other.parameters())
        assert train(other, [rank]) == expected
        assert distance(full_state(other), full_state(model)) == 0


def test_names_of_the_policy(mesh):
    a = FullyShardMixedPrecisionPolicy(
        fp8_param_gather=True, fp8_recipe="blockwise", keep_fp8_transpose_cache=True
    )
    b = FullyShardMixedPrecisionPolicy(fp8=FullyShardFP8Policy(True, "blockwise", True))
    assert a == b and a.main_params_dtype is None and a.fp8 == b.fp8
    assert (b.fp8_param_gather, b.fp8_recipe) == (True, "blockwise")
    assert b.keep_fp8_transpose_cache
    off = FullyShardMixedPrecisionPolicy(fp8_recipe="blockwise")
    assert not flatshard.float8.describe(second_version(mesh, off)).float8


def test_F3_fine_grained_gathers_can_be_turned_on_and_off(mesh, rank, world):
    """Runs with a recomputation of one layer, and columns that are stored."""
    found = {}
    for option in (None, True, False):
        options = {"enable_fine_grained_param_gather": option}
        model = first_version(mesh, policy("mxfp8"), HalfRecomputing, **options)
        (actions,) = step(model, rank)
        # The last block keeps its rows for the backward.
        found[option] = [a for a in actions if a.unit == "blocks.0"]
    # The data all-gathered in the forward are the same, in more pieces or fewer.
    rows = gathered(found[False], "forward", ROWS)
    columns = gathered(found[False], "backward", COLUMNS)
    if world == 1:
        return  # they are stored
    half = gathered(found[None], "backward", ROWS)
    assert half * 2 == pytest.approx(rows, rel=PADDING)
    for option, again in ((None, half), (True, half), (False, rows)):
        actions = found[option]
        assert gathered(actions, "forward", ROWS) == pytest.approx(rows, rel=PADDING)
        assert gathered(actions, "forward", COLUMNS) == 0
        assert gathered(actions, "backward", COLUMNS) == pytest.approx(
            columns, rel=PADDING
        )
        assert gathered(actions, "backward", ROWS) == pytest.approx(again, rel=PADDING)
        whole = [
            a.part < 0 for a in actions if a.kind == "gather" and a.plane in (1, 2)
        ]
        assert {None: any(whole), True: not any(whole), False: all(whole)}[option]


def test_R21_fine_grained_gathers_reach_the_units(mesh):
    for option, parts in ((None, "recomputed"), (True, "module"), (False, "unit")):
        options = {"enable_fine_grained_param_gather": option}
        model = first_version(mesh, policy("tensorwise"), **options)
        fp8 = model.blocks[0].__dict__["_flatshard"].sharding.options.fp8
        assert fp8.gather_parts == parts and not fp8.keep_column_plane


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("strategy", [2, 3])
def test_F16_the_transpose_cache(recipe, strategy, mesh, rank, world):
    losses, made = [], []
    for keep in (False, True):
        model = first_version(
            mesh,
            policy(recipe),
            keep_fp8_transpose_cache=keep,
            zero_dp_strategy=strategy,
        )
        microbatches = step(model, rank, 3)
        made.append(
            [
                sum(
                    a.kind in ("gather", "derive") and a.plane == COLUMNS
                    for a in actions
                )
                for actions in microbatches
            ]
        )
        if world > 1 and strategy == 3:
            rows = [gathered(actions, "forward", ROWS) for actions in microbatches]
            assert rows[0] == rows[1] == rows[2] > 0
        losses.append(train(model, [rank]))
    assert losses[0] == losses[1]
    # Stored planes are all-gathered once in any case.
    rest = recipe == "mxfp8" and strategy == 2
    assert made[0] == ([2, 0, 0] if rest else [2, 2, 2])
    assert made[1] == [2, 0, 0]


def test_the_cache_of_the_policy_and_of_the_argument_are_one(mesh, rank):
    seen = []
    for model in (
        first_version(mesh, policy("tensorwise"), keep_fp8_transpose_cache=True),
        first_version(mesh, policy("tensorwise", keep_transpose_cache=True)),
        second_version(mesh, policy("tensorwise", keep_transpose_cache=True)),
    ):
        actions = step(model, rank, 2)
        seen.append([Counter(a.kind for a in of_one) for of_one in actions])
    assert seen[0] == seen[1] == seen[2]


def test_after_a_write_and_an_evaluation_the_cache_is_made_anew(mesh, rank):
    cached = first_version(mesh, policy("rowwise", keep_transpose_cache=True))
    plain = first_version(mesh, policy("rowwise"))
    losses = []
    for model in (cached, plain):
        train(model, [rank], steps=1)
        model.loss(torch.Generator().manual_seed(rank)).backward()
        with torch.no_grad():
            model.loss(torch.Generator().manual_seed(rank))
            model.blocks[0].up.weight.mul_(0.5)
        losses.append(train(model, [rank, rank], steps=2))
    assert losses[0] == losses[1]
    assert distance(full_state(cached), full_state(plain)) == 0


@pytest.mark.parametrize(
    "options, error, problem",
    [
        (
            {"keep_fp8_transpose_cache": True},
            ValueError,
            "keep_fp8_transpose_cache: there are no FP8 weights; .*fp8_param_gather=True",
        ),
        (
            {"enable_fine_grained_param_gather": "yes"},
            ValueError,
            "enable_fine_grained_param_gather: expected True, False or None, got 'yes'",
        ),
        (
            {"mixed_precision_policy": policy("delayed")},
            NotImplementedError,
            "fp8_recipe='delayed' is not supported, .*'tensorwise'",
        ),
        (
            {"mixed_precision_policy": policy(None)},
            ValueError,
            "fp8_recipe: expected 'tensorwise', .*, got None",
        ),
        (
            {"mixed_precision_policy": policy("tensorwise")},
            ValueError,
            "fp8_param_gather: expected a Block in torch.bfloat16, got torch.float32",
        ),
    ],
)
def test_what_cannot_be_is_named(options, error, problem, mesh):
    model = Mlp()
    with pytest.raises(error, match=problem):
        megatron.fully_shard_model(model, [Block], device_mesh=mesh, **options)
    assert not hasattr(model.blocks[0].up.weight, "placements")
    with pytest.raises(
        ValueError, match="fp8: expected a FullyShardFP8Policy, got str"
    ):
        megatron.MixedPrecisionPolicy(fp8="tensorwise")
    for name in ("keep_column_plane", "emulate"):
        with pytest.raises(ValueError, match=f"fp8: {name}: expected True or False"):
            Float8Policy("tensorwise", **{name: 1})
