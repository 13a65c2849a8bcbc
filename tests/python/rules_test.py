"""The table of operations on sharded tensors."""

from pathlib import Path

import torch

from flatshard._tensor import rules, shard_reductions
from flatshard._tensor.rules import TABLE, Kind
from flatshard._tensor.shard_calls import on_whole, traits_of
from flatshard._tensor.shard_operations import WAYS, ways_of

PAGE = Path(__file__).parents[2] / "docs/guides/python.md"
aten = torch.ops.aten


def test_the_page_has_the_table_of_operations():
    print("\n".join(rules.table()))
    assert "\n".join(rules.table()) in PAGE.read_text()


def test_operations_of_the_table_exist():
    names = {*TABLE, *rules.OVERWRITING}
    missing = [name for name in names if not hasattr(aten, name)]
    assert not missing, f"torch {torch.__version__} has no aten::{missing}"


def test_ways_are_those_of_the_rows():
    found = {name for rule in TABLE.values() for name in rule.forward}
    for rule in vars(rules).values():
        if isinstance(rule, rules.Rule):
            found.update(rule.forward)
    assert found == set(WAYS)


def test_each_reduction_has_its_parts():
    reductions = {name for name, rule in TABLE.items() if "reduce" in rule.forward}
    assert reductions == set(shard_reductions.PARTS)


def test_what_has_no_row_has_a_kind_by_its_tags():
    expected = {
        aten.add.Tensor: Kind.ELEMENTWISE,
        aten.sum.dim_IntList: Kind.REDUCTION,
        aten.t.default: Kind.VIEW,
        aten.t_.default: Kind.VIEW,
        aten.normal_.default: Kind.RANDOM,
        aten._foreach_add.List: Kind.ROWS,
        aten.resize_.default: Kind.REFUSE,
        aten.mm.default: Kind.OTHER,
        aten.equal.default: Kind.OTHER,
    }
    found = {op: rules.rule_of(op, traits_of(op)).kind for op in expected}
    assert found == expected
    assert all(ways_of(op)[-1] is on_whole for op in expected)
