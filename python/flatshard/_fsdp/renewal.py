"""How a unit gets another core where its parameters have changed, or moved."""

import torch

from flatshard._fsdp.collect import TRAINABLE
from flatshard._fsdp.core import make_core
from flatshard._fsdp.parameter import FROZEN_LATER, TRAINED, whole_parameter
from flatshard._tensor.memory import local_of
from flatshard._tensor.pieces import piece_of
from flatshard._tensor.shard_values import same_cuts
from flatshard._tensor.sharded_tensor import become
from flatshard._tensor.writes import writes


def _take_requires_grad(unit):
    for p in unit.parameters:
        if p.shard.requires_grad:
            p.apart = TRAINED
        elif p.trainable:
            p.apart = FROZEN_LATER
        p.trainable = p.shard.requires_grad


def check_may_renew(unit):
    for changed in unit.misfits():
        _check_may_change(unit, changed)


def renew(unit):
    """Makes the core for the dtypes and the requires_grad that the parameters have now,
    of a unit without a Root. The shards stay the same objects. Collective where a rank
    gets other rows.

    A unit that trained keeps the rows of each rank, since optimizers have states for
    them. So the parameters of a group are trained or frozen together: the core has
    gradients for all of them where one is trained.
    """
    unit.life.check("renew", unit.name)
    if not unit.life.keeps_rows:
        _take_requires_grad(unit)
    unfrozen = {p.apart for p in unit.parameters if p.apart and p.shard.requires_grad}
    for p in unit.parameters:
        # The core can train it, while integers are kept in addition to what it trains.
        fits = p.dtype in TRAINABLE
        p.trainable = p.trainable or (p.apart in unfrozen and fits)
    _make_core_again(unit)
    unit.make_grads()


def leave(unit):
    """Frees the core and its memory, because the parameters moved to another device."""
    for p in unit.parameters:
        p.whole, p.rows = _whole_again(p), None
    unit.life.move("leave", unit.name)
    unit.core = None


def check_is_home(unit):
    """Raises RuntimeError while parameters are on another device."""
    for p in unit.parameters:
        device = local_of(p.shard).device
        if device.type == "meta":
            unit.parameters.check_have_values()
        home = unit.parameters.home
        if device != home:
            raise RuntimeError(
                f"parameter {p.title} is on {device}, expected {home}, where "
                f"fully_shard put it: call model.to('{home.type}') before the next "
                "forward"
            )


def _whole_again(p):
    trains = p.shard.requires_grad
    return whole_parameter(p.whole.shape, p.dtype, trains, p.dim, p.whole)


def _make_core_again(unit):
    former = [(p, local_of(p.shard)) for p in unit.parameters if not p.on_meta]
    for p in unit.parameters:
        if p.shard.dtype != p.shown_dtype:
            p.dtype = p.shard.dtype
        p.whole = _whole_again(p)
    writes.remove(unit.parameters.shards)
    values = [p.stored(torch.empty_like(p.whole)) for p in unit.parameters]
    made = unit.sharding
    unit.core = make_core(
        unit.parameters, values, made.mp_policy, made.mesh, made.core_options
    )
    unit.life.move("renew", unit.name)
    shards = {id(p): data for p, data in unit.cut()}
    for p, piece in former:
        data = shards[id(p)]
        if data is p.shard:
            continue  # the core has no values
        with torch.no_grad():
            if not same_cuts(p.shard, data):
                piece = piece_of(data, p.shard.detach())
            local_of(data).copy_(piece)
    for p in unit.parameters:
        if p.on_meta:
            p.rows = shards[id(p)]
            unit.note_place(p)
            continue
        grad = p.shard.grad
        if grad is not None and grad.dtype != shards[id(p)].dtype:
            p.shard.grad = None
            become(p.shard, shards[id(p)])
            p.shard.grad = grad.to(p.shard.dtype)
        else:
            become(p.shard, shards[id(p)])
        unit.note_place(p)
    unit.apply_to_core()
    unit.watch_shards()
    writes.note_unit(unit)


def _check_may_change(unit, changed):
    what, now = "requires_grad", changed.shard.requires_grad
    if changed.shard.dtype != changed.shown_dtype:
        what, now = "the dtype", changed.shard.dtype
    why = why_fixed(unit, changed)
    if why is None and what == "the dtype" and changed.float8:
        why = "whose modules have FP8 weights"
    if why is not None:
        raise NotImplementedError(
            f"{what} of parameter {changed.title} was changed to {now} after fully_shard, "
            f"which is not supported for a unit {why}: change it before fully_shard"
        )


def why_fixed(unit, p):
    """Returns the reason why the unit cannot get another core, or None."""
    if unit.parameters.joined:
        return "whose parameters are sharded over a part of the model's mesh"
    if p.extension is not None:
        return "that all-gathers tensors of a subclass"
    if unit.sharding.main_grads:
        return "whose modules write to main_grad"
    return None


def follow_changes(units):
    """Applies changes of `requires_grad` and dtypes since the last forward, as the next
    forward would. For callers that read the core's groups in between. Collective."""
    for unit in units:
        if unit.root is None and not unit.life.keeps_rows and not unit.fits():
            check_may_renew(unit)
            renew(unit)
    for root in dict.fromkeys(unit.root for unit in units if unit.root is not None):
        if not all(unit.fits() for unit in root.units):
            root.renew()
