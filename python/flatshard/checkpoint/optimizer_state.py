"""Optimizers of Python's in checkpoints: their options, and their state as tensors."""

import collections
import fnmatch
import json
import weakref

import torch

from flatshard import _C
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import is_laid_out_like
from flatshard._tensor.places import unit_of
from flatshard.optim.core_optimizer import CoreOptimizer


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}

# The role of the scales of codes, as of exp_avg, ends in it.
_SCALE = ".scale"

# The zeros of an optimizer for parameters without a state, by parameter. A writer keeps
# the addresses of saved tensors.
_zeros: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def as_list(optimizer):
    """Returns the optimizers that a caller passed: none, one or several.

    Raises:
        TypeError: several, not all of them of flatshard.optim.
    """
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    optimizers = list(optimizer)
    for one in optimizers:
        if len(optimizers) > 1 and not isinstance(one, CoreOptimizer):
            raise TypeError(
                "checkpoint: expected one optimizer, or several of flatshard.optim, got a "
                f"{type(one).__module__}.{type(one).__name__} among "
                f"{len(optimizers)}; use flatshard.optim.AdamW, or save their states with "
                "torch.distributed.checkpoint"
            )
    return optimizers


def are_cores(optimizers):
    """Returns whether the core has the states of all of them."""
    return all(isinstance(one, CoreOptimizer) for one in optimizers)


def core_optimizer(root, optimizers, states):
    if not optimizers:
        return None
    if not are_cores(optimizers):
        return _C.TensorStates([unit.core for unit in root.units], states)
    if len(optimizers) == 1:
        return optimizers[0].core
    return _C.SeveralOptimizers([one.core for one in optimizers])


def states_of(root, optimizers):
    """Returns the state of an optimizer of torch's by unit and parameter: {name: local
    tensor}, and how often the parameter was updated (1 where the optimizer does not
    count). A parameter without a state has zeros, and was not updated.

    Returns:
        states, updates.
    """
    states, updates = [], []
    if are_cores(optimizers):
        return states, updates
    (optimizer,) = optimizers
    _check_sharded(optimizer)
    # A unit also keeps parameters that the program tied to others. The others have their
    # names.
    of_names = collections.Counter()
    for unit in root.units:
        own = [_state_of(optimizer, p) for p in unit.parameters]
        trained = [i for i, p in enumerate(unit.parameters) if p.trainable]
        kinds = next((own[i][0] for i in trained if own[i][0]), {})
        for i in trained:
            tensors, steps = own[i]
            own[i] = tensors or _zeros_for(optimizer, unit.parameters[i], kinds), steps
            for name in unit.parameters[i].names:
                of_names[name] = max(of_names[name], steps)
        states.append([tensors for tensors, _ in own])
    for unit in root.units:
        updates.append(
            [max(of_names[name] for name in p.names) for p in unit.parameters]
        )
    return states, updates


def _zeros_for(optimizer, p, kinds):
    local = local_of(p.stored_shard)
    known = _zeros.setdefault(optimizer, {}).setdefault(p.shard, {})
    for name, like in kinds.items():
        if name not in known or known[name].shape != local.shape:
            known[name] = torch.zeros_like(local, dtype=like.dtype)
    return {name: known[name] for name in kinds}


def _state_of(optimizer, p):
    tensors, steps = {}, 0
    for name, value in optimizer.state.get(p.shard, {}).items():
        if name == "step":
            steps = int(value)
        elif is_laid_out_like(value, p.shard):
            tensors[name] = local_of(value)
        elif value is not None:
            shape = f" of shape {tuple(value.shape)}" if torch.is_tensor(value) else ""
            raise ValueError(
                f"checkpoint: state {name} of {p.names[0]} is a "
                f"{type(value).__name__}{shape}; expected a tensor like the parameter, "
                "or `step`. torch.distributed.checkpoint saves other state"
            )
    return tensors, steps if steps or not tensors else 1


def _check_sharded(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if unit_of(parameter) is None:
                raise ValueError(
                    "checkpoint: the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that fully_shard did not shard; its "
                    "state cannot be saved"
                )


def describe_optimizers(optimizers):
    """Returns the options of the optimizers as JSON."""
    kept = {"params"}  # a load does not change them
    for optimizer in optimizers:
        if isinstance(optimizer, CoreOptimizer):
            kept.add(optimizer.creation_option)
    groups = []
    for group in _groups_of(optimizers):
        options = {}
        for name, value in group.items():
            if name in kept:
                continue
            value = value.item() if torch.is_tensor(value) else value
            try:
                options[name] = json.loads(json.dumps(value))
            except TypeError:
                raise ValueError(
                    f"checkpoint: option {name} of a parameter group is a "
                    f"{type(value).__name__}; expected numbers, texts or lists"
                ) from None
        groups.append(options)
    counts = [
        state["step"]
        for optimizer in optimizers
        for state in optimizer.state.values()
        if "step" in state
    ]
    described = {
        "optimizers": [type(optimizer).__name__ for optimizer in optimizers],
        "counts_steps": bool(counts),
        "steps": _kind_of_steps(counts),
        "param_groups": groups,
        "first_parameters": [
            next(iter(names), None) for names in _names_of(optimizers)
        ],
    }
    return json.dumps(described)


def _names_of(optimizers):
    """Returns the names of the sharded parameters of each group."""
    places = [[unit_of(p) for p in group["params"]] for group in _groups_of(optimizers)]
    return [
        [place[0].parameters[place[1]].names[0] for place in group if place is not None]
        for group in places
    ]


def _kind_of_steps(counts):
    """Returns the name of the dtype of counts that are tensors, else None."""
    dtypes = {count.dtype for count in counts if torch.is_tensor(count)}
    return next((name for name, dtype in _DTYPES.items() if dtype in dtypes), None)


def _groups_of(optimizers):
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def check_options(optimizers, described, path):
    """Raises an error for options of a checkpoint that `optimizers` do not accept.

    Args:
        described: the result of describe_optimizers at the save.
    """
    names = [type(optimizer).__name__ for optimizer in optimizers]
    saved = described.get("optimizers", names)
    if len(names) > 1 and names != saved:
        raise ValueError(
            f"{path}: the checkpoint has the optimizers {', '.join(saved)}, got "
            f"{', '.join(names)}; pass the same ones in the same order"
        )
    own, groups = _groups_of(optimizers), described["param_groups"]
    if len(groups) != len(own):
        raise ValueError(
            f"{path}: the checkpoint's optimizer has {len(groups)} parameter groups, "
            f"this one {len(own)}"
        )
    group_of = {
        name: i for i, names in enumerate(_names_of(optimizers)) for name in names
    }
    for i, name in enumerate(described.get("first_parameters", ())):
        if group_of.get(name, i) != i:
            raise ValueError(
                f"{path}: parameter {name} is in parameter group {i} of the checkpoint, "
                f"and in {group_of[name]} here; pass the same optimizers and groups in "
                "the same order"
            )
    stored = iter(groups)
    for optimizer in optimizers:
        if isinstance(optimizer, CoreOptimizer):
            optimizer.check_options(
                [{**group, **next(stored)} for group in optimizer.param_groups]
            )


def take_options(optimizers, groups):
    for group, stored in zip(_groups_of(optimizers), groups):
        for name, value in stored.items():
            if name not in group:
                continue
            if torch.is_tensor(group[name]):
                group[name].fill_(value)
            elif isinstance(group[name], tuple) and value is not None:
                group[name] = tuple(value)
            else:
                group[name] = value


def make_states(optimizer, stored, described, exclude):
    """Gives the optimizer state tensors where the checkpoint has values for them, of the
    dtypes that the checkpoint has. They need not be the parameters' dtypes. int8 states of
    flatshard.optim.AdamW become float32.

    Args:
        described: the result of describe_optimizers at the save.
    """
    counts = described.get("counts_steps", True)
    # Former checkpoints have the number of a unit, and the own number of a parameter that
    # was updated less often.
    updates = {**stored["updates"], **described.get("fewer", {})}
    roles = {
        role: dtypes
        for role, dtypes in stored["dtypes"].items()
        if role not in ("weight", "buffer")
    }
    _check_sharded(optimizer)
    state = collections.defaultdict(dict)
    parameters = [(p, g) for g in optimizer.param_groups for p in g["params"]]
    for parameter, group in parameters:
        unit, index = unit_of(parameter)
        names, shard = unit.parameters[index].names, unit.parameters[index].stored_shard
        own = dict(optimizer.state.get(parameter, {}))
        if not any(fnmatch.fnmatchcase(n, e) for n in names for e in exclude):
            steps = next((updates[n] for n in names if n in updates), None)
            found = {
                role: _DTYPES[next(of[name] for name in names if name in of)]
                for role, of in roles.items()
                if steps != 0 and any(name in of for name in names)
            }
            for role in [r for r in found if r + _SCALE in found]:
                found[role] = torch.float32
                del found[role + _SCALE]
            former, own = own, {}
            for role, dtype in found.items():
                own[role] = former.get(role)
                if own[role] is None or own[role].dtype != dtype:
                    own[role] = torch.zeros_like(
                        shard, dtype=dtype, requires_grad=False
                    )
            if own and counts:
                kind = described.get("steps", "F32")
                own["step"] = _steps(steps, kind, shard, group)
        if own:
            state[parameter] = own
    optimizer.state = state


def _steps(number, kind, shard, group):
    """Returns the number of a parameter's updates as its optimizer counts them.

    Args:
        kind: the result of _kind_of_steps at the save.
    """
    if kind is None:
        return number
    on_device = group.get("capturable") or group.get("fused")
    device = local_of(shard).device if on_device else "cpu"
    return torch.tensor(number, dtype=_DTYPES[kind], device=device)
