"""The tree of units below a root: their order, their names, and whether they fit."""

from dataclasses import fields

from flatshard._fsdp.collect import modules_of_unit
from flatshard._fsdp.options import ModelOptions


def walk(root):
    """Returns the units below `root`, parents first; their parents' numbers; and the
    names of each module, by id."""
    units, parents, module_names = [], [], {}
    _visit(root, "", -1, units, parents, module_names)
    # A list of modules is one unit, also where some of them are outside of `root`.
    for unit in units:  # which grows
        for number, reference in enumerate(unit.modules):
            module = reference()
            if module is not None and id(module) not in module_names:
                name = f"{unit.name}[{number}]"
                _visit(module, name, -1, units, parents, module_names)
    return units, parents, module_names


def _visit(module, name, enclosing, units, parents, module_names):
    module_names.setdefault(id(module), []).append(name)
    state = module.__dict__.get("_flatshard")
    if state is not None and state not in units:
        parents.append(enclosing)
        enclosing = len(units)
        state.name = name or "root"
        units.append(state)
    elif state is not None:
        enclosing = units.index(state)
    for key, child in module.named_children():
        full = f"{name}.{key}" if name else key
        _visit(child, full, enclosing, units, parents, module_names)


def names_of(p, module_names):
    """Returns the names of a parameter in the model."""
    return [
        f"{prefix}.{name}" if prefix else name
        for module, name in p.sites
        for prefix in module_names[id(module())]
    ]


def inner_modules(units):
    """Pairs of a unit and a module that it holds and that no unit was made of."""
    found = []
    for unit in units:
        wrapped = [m for r in unit.modules if (m := r()) is not None]
        inner = modules_of_unit(
            [child for m in wrapped for child in m.children()],
            lambda m: m.__dict__.get("_flatshard") is not None,
        )
        found += [(unit, module) for module in inner]
    return found


def check_units(units, parents, state):
    """Checks that the units of a model fit together.

    Args:
        units: parents first.
        parents: the number of each one's parent, -1 for the root.
        state: the root's.

    Raises:
        ValueError, NotImplementedError, RuntimeError: they do not; the text names a unit.
    """
    has_graphs = any(unit.cuda_graph for unit in units)
    for unit, parent in zip(units, parents):
        if parent >= 0 and units[parent].cuda_graph:
            raise ValueError(
                f"cuda_graph: unit {units[parent].name} holds unit {unit.name}, "
                "which is gathered inside of its forward; give only the inner one "
                "cuda_graph=True"
            )
        if parent >= 0 and unit.shared_streams is not None:
            raise ValueError(
                f"share_comm_ctx: unit {unit.name} is part of a model, whose streams it "
                "has; give the outermost module instead"
            )
        if has_graphs and unit.core.offloads:
            raise NotImplementedError(
                f"cuda_graph is not supported in a model with CPUOffloadPolicy, "
                f"which unit {unit.name} has"
            )
        if unit.slices is not None:
            raise RuntimeError(
                f"unit {unit.name} is on {unit.mesh}, which was flattened together with "
                "other dimensions, so their ranks have different experts: apply "
                "fully_shard to the module around it, on the flattened mesh, or, if these "
                "are no experts, flatten after the last fully_shard"
            )
        if unit.cuda_graph and unit.main_grads:
            raise NotImplementedError(
                f"cuda_graph is not supported for unit {unit.name}, whose modules "
                "write gradients to main_grad (fuse_wgrad_accumulation): a replay "
                "runs nothing of them on the host; leave one of them out"
            )
        unit.life.check("root", unit.name)
        if unit.model_options is not None and unit.model_options != state.model_options:
            _check_model_options(unit, state)
        if unit.copy_engines != state.copy_engines:
            raise ValueError(
                f"copy_engines: unit {unit.name} and the root differ; choose one "
                "for all units of a model"
            )
        if unit.mesh is not state.mesh:
            raise ValueError(
                f"unit {unit.name} is on mesh {unit.mesh}, the root on "
                f"{state.mesh}: expected one mesh for all units of a model"
            )


def _check_model_options(unit, root):
    """Raises an error when a part of the model has other options than the root."""
    for field in fields(ModelOptions):
        given = getattr(unit.model_options, field.name)
        has = getattr(root.model_options or ModelOptions(), field.name)
        if given not in (field.default, has):
            raise ValueError(
                f"{field.name}={given!r} of unit {unit.name} has no effect: it is an option "
                f"of the whole model, which has {has!r}; use configure(model, "
                "ModelOptions(...)) with the outermost module"
            )
