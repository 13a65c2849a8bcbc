"""The core's table of named strategies (flatshard/layout/strategy.h)."""

from typing import NamedTuple

from flatshard import _C


class Strategy(NamedTuple):
    """One row. Where each part is stored: a letter for the outer and one for the inner
    mesh axes, R for Replicate, P for Partial, S for Shard."""

    name: str
    other_name: str
    with_replicas: str
    parameter: str
    gradient: str
    optimizer: str

    @property
    def needs_outer_axis(self):
        return not self.with_replicas

    @property
    def placements(self):
        return self.parameter, self.gradient, self.optimizer


_TABLE = [Strategy(*row) for row in _C.strategies()]
_BY_NAME = {name: row for row in _TABLE for name in (row.name, row.other_name) if name}
# The names that fully_shard accepts. The outer axis of a mesh is a separate argument.
NAMES = [
    name
    for row in _TABLE
    if not row.needs_outer_axis
    for name in (row.name, row.other_name)
]


def find_strategy(name, option="strategy"):
    """Returns the row of either name.

    Args:
        name: e.g. "zero3" or "optim_grads_params".
        option: what the error calls it.

    Raises:
        ValueError: there is none of that name, or it is about an outer axis.
    """
    if name not in NAMES:
        raise ValueError(f"{option}: expected one of {', '.join(NAMES)}, got {name!r}")
    return _BY_NAME[name]


def of_core(name):
    """Returns the row of a name that the core has, such as "hsdp"."""
    return _BY_NAME[name]


def by_placements():
    """Placements of one mesh axis, or of two, to (strategy, outer)."""
    found = {}
    for row in _TABLE:
        if row.needs_outer_axis:
            continue
        found[tuple(letters[1] for letters in row.placements)] = row.name, "replicate"
        two = _BY_NAME[row.with_replicas]
        found[two.placements] = row.name, "replicate"
    found[_BY_NAME["hfsdp"].placements] = "zero3", "optim"
    return found
