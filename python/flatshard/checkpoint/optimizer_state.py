"""Optimizers of Python's in checkpoints: their options, and their state as tensors."""

import fnmatch
import json
import weakref

import torch

from flatshard import _C
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import is_laid_out_like
from flatshard._tensor.places import unit_of
from flatshard.optim import AdamW


# The zeros of an optimizer for parameters without a state, by parameter. A writer keeps
# the addresses of saved tensors.
_zeros: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def core_optimizer(root, optimizer, states):
    if optimizer is None:
        return None
    if isinstance(optimizer, AdamW):
        return optimizer.core
    return _C.TensorStates([unit.core for unit in root.units], states)


def states_of(root, optimizer):
    """Returns the optimizer's state by unit and parameter: {name: local tensor}, and
    how often the parameter was updated (1 where the optimizer does not count). A unit
    counts
    once: a parameter that was updated less often has the unit's number, and zeros
    without a state.

    Returns:
        states, updates, and the own number of those that were updated less often, by
        name.
    """
    states, updates, fewer = [], [], {}
    if optimizer is None or isinstance(optimizer, AdamW):
        return states, updates, fewer
    _check_sharded(optimizer)
    # A unit also keeps parameters that the program tied to others, which have their names.
    updated = set()
    for unit in root.units:
        own = [_state_of(optimizer, p) for p in unit.parameters]
        trained = [i for i, p in enumerate(unit.parameters) if p.trainable]
        most = max((own[i][1] for i in trained), default=0)
        kinds = next((own[i][0] for i in trained if own[i][0]), {})
        for i in trained:
            (tensors, steps), p = own[i], unit.parameters[i]
            if steps < most:
                fewer[p.names[0]] = steps
            else:
                updated.update(p.names)
            own[i] = tensors or _zeros_for(optimizer, p, kinds), most
        states.append([tensors for tensors, _ in own])
        updates.append([steps for _, steps in own])
    fewer = {name: steps for name, steps in fewer.items() if name not in updated}
    return states, updates, fewer


def _zeros_for(optimizer, p, kinds):
    local = local_of(p.shard)
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


def describe_optimizer(optimizer, fewer):
    """Returns the optimizer's options, and `fewer` of states_of, as JSON."""
    groups = []
    for group in optimizer.param_groups:
        options = {}
        for name, value in group.items():
            if name == "params":
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
    counts = any("step" in state for state in optimizer.state.values())
    described = {"counts_steps": counts, "param_groups": groups, "fewer": fewer}
    return json.dumps(described)


def check_options(optimizer, groups, path):
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{path}: the checkpoint's optimizer has {len(groups)} parameter groups, "
            f"this one {len(optimizer.param_groups)}"
        )


def take_options(optimizer, groups):
    for group, stored in zip(optimizer.param_groups, groups):
        for name, value in stored.items():
            if name not in group:
                continue
            if torch.is_tensor(group[name]):
                group[name].fill_(value)
            elif isinstance(group[name], tuple):
                group[name] = tuple(value)
            else:
                group[name] = value


def make_states(optimizer, stored, described, exclude):
    """Gives the optimizer state tensors where the checkpoint has values for them.

    Args:
        described: the result of describe_optimizer at the save.
    """
    counts = described.get("counts_steps", True)
    fewer = described.get("fewer", {})
    roles = {
        role: dtypes
        for role, dtypes in stored["dtypes"].items()
        if role not in ("weight", "buffer")
    }
    _check_sharded(optimizer)
    state = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        unit, index = unit_of(parameter)
        names = unit.parameters[index].names
        own = dict(optimizer.state.get(parameter, {}))
        if not any(fnmatch.fnmatchcase(n, e) for n in names for e in exclude):
            own_steps = next((fewer[n] for n in names if n in fewer), None)
            found = [
                role
                for role, of in roles.items()
                if own_steps != 0 and any(name in of for name in names)
            ]
            own = {
                role: own[role] if role in own else torch.zeros_like(parameter)
                for role in found
            }
            if own and counts:
                steps = next(
                    stored["updates"][n] for n in names if n in stored["updates"]
                )
                own["step"] = torch.tensor(float(own_steps or steps))
        if own:
            state[number] = own
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
