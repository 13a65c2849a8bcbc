"""The tree of units below a root: their order, their names, and whether they fit."""

import weakref
from dataclasses import fields

from flatshard._fsdp.collect import full_name, modules_of_unit
from flatshard._fsdp.inner_outputs import InnerOutputs
from flatshard._fsdp.options import ModelOptions
from flatshard._fsdp.replacements import refuse_plain
from flatshard._tensor.places import state_of
from flatshard._tensor.same_values import compare
from flatshard.torch_versions import without_dispatch_modes


class Tree:
    """Weak references to the outermost module of a model and to its units, because the
    units refer to the Root."""

    def __init__(self, module, units):
        self._module = weakref.ref(module)
        self._units = [weakref.ref(unit) for unit in units]
        self.of_several = [weakref.ref(u) for u in units if len(u.modules) > 1]
        self.inner_outputs = InnerOutputs(inner_modules(units))
        self.has_values = False  # all units, and equal ones on the ranks

    @property
    def module(self):
        return self._module()

    @property
    def units(self):
        return [unit for ref in self._units if (unit := ref()) is not None]

    def check_values(self):
        """Checks that parameters have values, equal on all ranks. Called before the first
        forward or unshard. Collective."""
        units = self.units
        for unit in units:
            unit.parameters.check_have_values()
        with without_dispatch_modes():  # one that counts collectives
            compare(units)
        for unit in units:
            unit.parameters.forget_digests()
        self.has_values = True

    def check_trained(self):
        """Refuses trained parameters that are not sharded, and makes the tensors that
        trained shards replaced raise errors. Called before the first forward with
        gradients."""
        refuse_plain(self.module, self.units)
        for unit in self.units:
            unit.parameters.retire_trained_formers()

    def begin_forward(self):
        for ref in self.of_several:
            if (unit := ref()) is not None:
                unit.modules.running.clear()

    def close(self):
        self.inner_outputs.close()


def walk(root):
    """Returns the units below `root`, parents first; their parents' numbers; and the
    names of each module, by id."""
    units, parents, module_names = [], [], {}
    _visit(root, "", -1, units, parents, module_names)
    # A list of modules is one unit, also where some of them are outside `root`.
    for unit in units:  # which grows
        for number, reference in enumerate(unit.modules):
            module = reference()
            if module is not None and id(module) not in module_names:
                name = f"{unit.name}[{number}]"
                _visit(module, name, -1, units, parents, module_names)
    return units, parents, module_names


def _visit(module, name, enclosing, units, parents, module_names):
    module_names.setdefault(id(module), []).append(name)
    state = state_of(module)
    if state is not None and state not in units:
        parents.append(enclosing)
        enclosing = len(units)
        state.name = name or "root"
        units.append(state)
    elif state is not None:
        enclosing = units.index(state)
    for key, child in module.named_children():
        inner = full_name(name, key)
        _visit(child, inner, enclosing, units, parents, module_names)


def names_of(p, module_names):
    """Returns the names of a parameter in the model."""
    return [
        full_name(prefix, name)
        for module, name in p.sites
        for prefix in module_names[id(module())]
    ]


def inner_modules(units):
    """Returns pairs of a unit and a module in it that no unit was made of."""
    found = []
    for unit in units:
        wrapped = [m for r in unit.modules if (m := r()) is not None]
        children = [child for m in wrapped for child in m.children()]
        inner = modules_of_unit(children, state_of)
        found += [(unit, module) for module in inner]
    return found


def check_units(units, parents, state):
    """Checks that the units of a model fit together.

    Args:
        units: parents first.
        parents: the number of each one's parent, -1 for the root.
        state: of the root.

    Raises:
        ValueError, NotImplementedError, RuntimeError: they do not; the text names a unit.
    """
    has_graphs = any(unit.sharding.options.cuda_graph for unit in units)
    for unit, parent in zip(units, parents):
        if parent >= 0 and units[parent].sharding.options.cuda_graph:
            raise ValueError(
                f"cuda_graph: unit {units[parent].name} contains unit {unit.name}, "
                "and all-gathers it inside its forward; give only the inner one "
                "cuda_graph=True"
            )
        if parent >= 0 and unit.policy.shared_streams is not None:
            raise ValueError(
                f"share_comm_ctx: unit {unit.name} is part of a model and uses its "
                "streams; give the outermost module instead"
            )
        if has_graphs and unit.core.offloads:
            raise NotImplementedError(
                f"cuda_graph is not supported in a model with CPUOffloadPolicy, "
                f"which unit {unit.name} has"
            )
        if unit.sharding.slices not in (None, (1, 0)):
            raise RuntimeError(
                f"unit {unit.name} is on {unit.sharding.mesh}. It was flattened together "
                "with other dimensions, so their ranks have different experts: apply "
                "fully_shard to the module around it, on the flattened mesh, or, if these "
                "are not experts, flatten after the last fully_shard"
            )
        if unit.sharding.options.cuda_graph and unit.sharding.main_grads:
            raise NotImplementedError(
                f"cuda_graph is not supported for unit {unit.name}, because its modules "
                "write gradients to main_grad (fuse_wgrad_accumulation) and a replay "
                "runs none of their code on the host; leave one of them out"
            )
        unit.life.check("root", unit.name)
        own, of_root = unit.sharding, state.sharding
        if own.model_options != of_root.model_options:
            _check_model_options(unit.name, own, of_root)
        if own.copy_engines != of_root.copy_engines:
            raise ValueError(
                f"copy_engines: unit {unit.name} and the root differ; choose one "
                "for all units of a model"
            )
        kinds = own.device_mesh.device_type, of_root.device_mesh.device_type
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"mesh: unit {unit.name} is on {own.device_mesh}, the root on "
                f"{of_root.device_mesh}: expected meshes of one device type, got "
                f"{kinds[0]} and {kinds[1]}"
            )


def _check_model_options(name, own, of_root):
    """Raises an error when a part of the model has other options than the root."""
    for field in fields(ModelOptions):
        given = getattr(own.model_options, field.name)
        has = getattr(of_root.model_options, field.name)
        if given not in (field.default, has):
            raise ValueError(
                f"{field.name}={given!r} of unit {name} has no effect: it is an option "
                f"of the full model, and the model has {has!r}; use configure(model, "
                "ModelOptions(...)) with the outermost module"
            )
