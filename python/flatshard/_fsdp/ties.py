"""Parameters that an inner unit has sharded, and that modules of an outer unit have, too."""

import weakref
from dataclasses import dataclass

from flatshard._fsdp.former import former_name
from flatshard._fsdp.state_dicts import watch_state_dicts
from flatshard._fsdp.wrapping import wrap_class
from flatshard._tensor.places import set_state, units_in
from flatshard.torch_versions import parameters_of


@dataclass
class Tie:
    """A module that has parameters of a unit.

    Attributes:
        parameters: [(name in the module, Parameter of the unit)].
        joins: it has no others, so it becomes a module of the unit. Otherwise its forward
            has to read them where the unit is unsharded, or not at all.
    """

    module: object
    unit: object
    parameters: list
    joins: bool

    def make(self):
        """Puts the shards into the module."""
        for name, p in self.parameters:
            p.sites.append((weakref.ref(self.module), name))
            parameters_of(self.module)[name] = p.shard
        watch_state_dicts(self.module, self.unit)
        if self.joins:
            self.unit.modules.append(weakref.ref(self.module))
            set_state(self.module, self.unit)
            wrap_class(self.module, False)


def find_ties(modules, owned):
    """Returns the Ties of modules in `owned` and units below `modules`, and the ids of
    their parameters as they were before fully_shard.

    Args:
        modules: those given to fully_shard.
        owned: modules_of_unit(modules).
    """
    met = [
        module
        for module in owned
        if any(p is not None and former_name(p) for p in parameters_of(module).values())
    ]
    if not met:
        return [], set()
    shared = {
        id(former): (unit, p)
        for unit in units_in(*modules)
        for p in unit.parameters
        if _can_tie(unit, p) and (former := p.former and p.former()) is not None
    }
    ties, ids = [], set()
    for module in met:
        if any(module is m for m in modules):
            continue
        own = [(n, p) for n, p in parameters_of(module).items() if p is not None]
        found = [(n, *shared[id(p)]) for n, p in own if id(p) in shared]
        units = {id(unit): unit for _, unit, _ in found}
        alone = len(found) == len(own) and not list(module.children())
        for unit in units.values():
            parameters = [(n, p) for n, u, p in found if u is unit]
            ties.append(Tie(module, unit, parameters, alone and len(units) == 1))
        ids.update(id(p) for _, p in own if id(p) in shared)
    return ties, ids


def _can_tie(unit, p):
    sharding = unit.sharding
    modules_write = sharding.options.cuda_graph or sharding.main_grads
    is_part = sharding.slices is not None or unit.core is None
    never_ran = unit.root is None
    return never_ran and not (modules_write or is_part or p.float8 or p.shown)
