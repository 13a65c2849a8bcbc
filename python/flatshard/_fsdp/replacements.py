"""Optimizers of parameters that modules showed at another time, and parameters and
modules that somebody replaced after fully_shard."""

import weakref

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatshard._fsdp.collect import full_name, named_places
from flatshard._fsdp.former import former_name, num_marked
from flatshard._fsdp.parameter import parameter_of_whole, subclass_of
from flatshard._fsdp.renewal import check_may_renew, renew
from flatshard._tensor.even_shard import EvenShard
from flatshard._tensor.memory import address_of, local_of
from flatshard._tensor.places import unit_of
from flatshard._tensor.sharded_tensor import ShardedTensor
from flatshard.torch_versions import (
    has_accumulation_hooks,
    in_functional_call,
    parameters_of,
)

# -- optimizers of parameters that modules showed at another time ----------------------

# For each optimizer, its number of parameters and the number sharded then.
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = (
    weakref.WeakKeyDictionary()
)


def _before_step(optimizer, args, kwargs):
    groups = optimizer.param_groups
    seen = sum(len(group["params"]) for group in groups), num_marked()
    if _checked.get(optimizer) == seen:
        return
    for parameters in [group["params"] for group in groups]:
        parameters[:] = [_to_train(optimizer, p) for p in parameters]
    _checked[optimizer] = seen


def _to_train(optimizer, parameter):
    """Returns the tensor to put in place of an optimizer's `parameter`. An optimizer that
    was created between a forward and its backward has unsharded parameters. They are
    replaced before its first step."""
    if (name := former_name(parameter)) is not None:
        raise RuntimeError(
            f"{type(optimizer).__name__} was created before fully_shard: it contains "
            f"parameter {name} as it was then, and would not train the model; create "
            "the optimizer from model.parameters() after the last fully_shard"
        )
    unsharded = parameter_of_whole(parameter)
    if unsharded is None:
        return parameter
    if optimizer.state.get(parameter):
        raise RuntimeError(
            f"{type(optimizer).__name__} was created between a forward and its backward, "
            f"with a state for the unsharded parameter {unsharded.names[0]}; create it "
            "before the forward or after the backward, or call reshard() before"
        )
    return unsharded.shard


register_optimizer_step_pre_hook(_before_step)

# -- before the first forward ----------------------------------------------------------


def follow_modules(units, names):
    """Brings the units' parameters in line with what the modules show now, or changes
    nothing and raises the reason.

    A DTensor in the place of a shard becomes the shard, since optimizers may refer to it.
    A place that shows another shard of its unit is tied to that. A parameter that no
    module has any more is still all-gathered, and no checkpoint has it. Collective when
    something was replaced.

    Args:
        names: the names of each module of the model, by id.
    """
    found = [_places_now(unit, names) for unit in units]
    _check_shared(found, names)
    for unit, sites, shards in found:
        for p in unit.parameters:
            p.sites = sites[p.index]
            if shards[p.index] is not p.shard:
                unit.replace(p, shards[p.index])
        trains = torch.is_grad_enabled()
        suits = unit.fits() if trains else unit.parameters.can_evaluate()
        if not unit.life.keeps_rows and not suits:
            check_may_renew(unit)
            renew(unit)
        for p in unit.parameters:
            if not p.sites:
                unit.core.drop(p.index)
        unit.gather_extended()
        unit.make_grads()


def _places_now(unit, names):
    """Returns the unit, and of each of its parameters where it is and what is to be its
    shard."""
    sites = [[] for _ in unit.parameters]
    shards = [p.shard for p in unit.parameters]
    changed = []
    for p in unit.parameters:
        for module, key in p.sites:
            owner = module()
            if owner is None or id(owner) not in names:
                continue  # not in the model any more
            found = parameters_of(owner).get(key)
            if p.is_face(found):
                sites[p.index].append((module, key))
            elif found is not None:
                changed.append((p, (module, key), found))
    for p, site, found in changed:
        index = next((i for i, shard in enumerate(shards) if shard is found), None)
        if index is None:
            name = _name_at(site, names)
            _refuse_functional_call(name)
            _check_held(p, found, name, names)
            _check_taken(p, found, name, sites[p.index])
            index = p.index
            shards[index] = found
        sites[index].append(site)
    return unit, sites, shards


def _name_at(site, names):
    return full_name(names[id(site[0]())][0], site[1])


def _check_shared(found, names):
    """Refuses values that two parameters share since one was replaced: each would have a
    separate copy, and one of them would never be updated.

    Args:
        found: the results of _places_now.
    """
    owners = {}  # by the memory of the shard
    for unit, sites, shards in found:
        for p in unit.parameters:
            if not sites[p.index] or p.extension is not None:
                continue
            shard = shards[p.index]
            local = local_of(shard)
            # The storage object is unique also for shards without rows.
            memory = address_of(shard), local.storage_offset(), local.shape, shard.shape
            is_new = shard is not p.shard
            own = unit, _name_at(sites[p.index][0], names), is_new
            other, name, was_new = owners.setdefault(memory, own)
            if own == (other, name, was_new) or not (is_new or was_new):
                continue
            raise ValueError(
                f"parameter {name} of unit {other.name} and parameter {own[1]} of unit "
                f"{unit.name} share values since one was replaced after fully_shard, and "
                f"each would have a separate copy. {_TIE}"
            )


_TIE = "To share it, tie it before fully_shard and wrap one module that contains both places"


def _refuse_functional_call(name):
    if in_functional_call():
        raise NotImplementedError(
            f"functional_call put another tensor in the place of parameter {name}. This is "
            "not supported, because the unit computes with its shards. Write to the "
            "parameter, under no_grad by copy_(), or apply functional_call to a model "
            "without fully_shard, or to a module without fully_shard in the forward of "
            "its unit"
        )


def _check_held(p, found, name, names):
    """Refuses the shard of another unit in the place of p's shard."""
    if (place := unit_of(found)) is None:
        return
    other, held = place[0], place[0].parameters[place[1]]
    unit, title = "another model", held.title
    if held.sites and id(held.sites[0][0]()) in names:
        unit, title = f"unit {other.name}", _name_at(held.sites[0], names)
    raise ValueError(
        f"parameter {name} of unit {unit_of(p.shard)[0].name} was replaced after "
        f"fully_shard by parameter {title} of {unit}. {_TIE}"
    )


def _check_taken(p, found, name, kept):
    if kept:
        raise ValueError(
            f"parameter {name} was replaced after fully_shard, but {kept[0][1]}, tied to "
            "it, was not; replace both by one parameter"
        )
    what = f"parameter {name} was replaced after fully_shard by "
    remedy = (
        "; put a DTensor there that is sharded by rows, distribute_tensor(values, mesh, "
        "[Shard(0)]), write to the parameter itself, under no_grad by copy_(), or "
        "replace it before fully_shard"
    )
    if type(found) not in (DTensor, ShardedTensor, EvenShard):
        kind = "plain tensor" if type(found) is nn.Parameter else type(found).__name__
        raise ValueError(f"{what}a {kind}, expected a DTensor{remedy}")
    if kind := subclass_of(found):
        raise NotImplementedError(
            f"{what}a DTensor of a {kind}, a subclass that the shard would treat as a "
            f"plain tensor{remedy}"
        )
    dims = [_dim_of(placement) for placement in p.shard.placements]
    expected = ["Replicate()" if dim is None else f"Shard({dim})" for dim in dims]
    for attribute, a, b, fits in (
        ("shape", tuple(found.shape), tuple(p.shard.shape), None),
        ("mesh", found.device_mesh, p.shard.device_mesh, None),
        ("device", found.device.type, local_of(p.stored_shard).device.type, None),
        ("placements", found.placements, f"({', '.join(expected)})", _fits(found, p)),
    ):
        if not (a == b if fits is None else fits):
            raise ValueError(f"{what}one of {attribute} {a}, expected {b}{remedy}")


def _dim_of(placement):
    """Returns the dimension that a placement shards, or None. The _StridedShard of tensor
    parallelism reports that it is not a Shard."""
    return getattr(placement, "dim", None)


def _fits(found, p):
    """Returns whether `found` can replace p: rows split elsewhere are redistributed."""
    own, mesh = p.shard.placements, p.shard.device_mesh
    return len(found.placements) == len(own) and all(
        mesh.size(dim) == 1  # all of it, whatever it is called
        or (_dim_of(a) == _dim_of(b) and not a.is_partial())
        for dim, (a, b) in enumerate(zip(found.placements, own))
    )


# -- later -------------------------------------------------------------------------------


def refuse_replaced(units):
    """Raises an error when a module shows another tensor than its unit put there."""
    for unit in units:
        for p in unit.parameters:
            for module, key in p.sites:
                owner = module()
                if owner is None:
                    continue
                found = parameters_of(owner).get(key)
                if not p.is_face(found):
                    _refuse_functional_call(p.names[0])
                    what = "removed" if found is None else "replaced"
                    raise RuntimeError(
                        f"parameter {p.names[0]} was {what} after the first forward; "
                        "write to it instead, under no_grad by copy_(), or by "
                        "load_state_dict()"
                    )


def refuse_exchanged(root):
    """Raises an error for a module that was put around the parameters of another one: only
    modules that fully_shard saw get unsharded parameters."""
    for name, module, _, parameter in named_places(root):
        place = unit_of(parameter) if isinstance(parameter, DTensor) else None
        if place is None:
            continue
        p = place[0].parameters[place[1]]
        if all(site() is not module for site, _ in p.sites):
            raise RuntimeError(
                f"the {type(module).__name__} that has parameter {name} was added to "
                "the model after fully_shard, around a parameter that was sharded in "
                f"another module of unit {place[0].name}: it would see the shard. "
                "Replace modules before fully_shard, or change the module in place"
            )


def refuse_plain(root, units):
    """Raises an error for a parameter to train that no unit has: the ranks' copies
    would diverge. A hook on its accumulated gradient may reduce it."""
    places = [place for unit in units for place in unit.parameters.ignored]
    ignored = {(id(module()), key) for module, key in places}
    parameters = [p for unit in units for p in unit.parameters.all]
    own = {id(tensor) for p in parameters for tensor in p.faces()}  # some unsharded
    for name, module, key, parameter in named_places(root):
        if (
            parameter.requires_grad
            and not isinstance(parameter, DTensor)
            and id(parameter) not in own
            and (id(module), key) not in ignored
            and not has_accumulation_hooks(parameter)
        ):
            raise RuntimeError(
                f"parameter {name} was added to the model after fully_shard, so it is "
                "not sharded and its gradients are not reduced. Add it before "
                "fully_shard, apply fully_shard to its module before the first "
                "forward, freeze it, or reduce its gradient in a hook of "
                "register_post_accumulate_grad_hook()"
            )
