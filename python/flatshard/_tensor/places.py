"""The unit that each sharded parameter, and each module, belongs to."""

import weakref

from torch.utils.weak import WeakIdKeyDictionary

_places = WeakIdKeyDictionary()


def unit_of(parameter):
    """Returns (UnitState, index in its core) of a sharded parameter, or None."""
    place = _places.get(parameter)
    if place is None or place[0]() is None:
        return None
    return place[0](), place[1]


def parameter_of(shard):
    """Returns the unit's Parameter that has this shard, or None."""
    place = unit_of(shard)
    return None if place is None else place[0].parameters[place[1]]


def set_unit(parameter, unit, index):
    _places[parameter] = weakref.ref(unit), index


def forget_unit(parameter):
    _places.pop(parameter)


def state_of(module):
    """Returns the UnitState of a module that fully_shard wrapped, or None."""
    return module.__dict__.get("_flatshard")


def set_state(module, unit):
    module.__dict__["_flatshard"] = unit


def units_in(*modules):
    """Returns the units of `modules` and of the modules inside them, each once."""
    found = (state_of(inner) for module in modules for inner in module.modules())
    return list(dict.fromkeys(unit for unit in found if unit is not None))
