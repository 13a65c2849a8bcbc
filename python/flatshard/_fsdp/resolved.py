"""The parameters of a fully_shard call, with their options: where each is split, in which
dtype it is all-gathered, and what modules see."""

import weakref
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard._fsdp.arguments import param_dtype_of
from flatshard._fsdp.cuts import check_places, places_in
from flatshard._fsdp.extension import Extension, is_extended
from flatshard._fsdp.parameter import (
    FROZEN,
    TRAINED,
    Parameter,
    plain_like,
    whole_parameter,
)
from flatshard._tensor.mesh import device_of
from flatshard._tensor.same_values import digest
from flatshard._tensor.tensor_parallel import (
    TensorParallel,
    is_tensor_parallel,
    plain_value,
)
from flatshard.float8.policy import choose_weights
from flatshard.torch_versions import hooks_of_tensor


@dataclass(frozen=True)
class Resolved:
    """One parameter, for which no option is left open.

    Attributes:
        parameter: Parameter.
        value: full value, as the core stores it.
        mesh: part of the model's mesh over which it is sharded; None: mesh of the unit.
    """

    parameter: Parameter
    value: torch.Tensor
    mesh: DeviceMesh | None

    @property
    def is_own(self):
        """Returns whether the core of the unit has it, and not a part or an Extension."""
        p = self.parameter
        return self.mesh is None and (p.trainable or p.extension is None)


def resolve(asked, found, shard_placement_fn):
    """Returns a Resolved for each of `found`, the parameters of collect_parameters.

    Raises:
        ValueError, NotImplementedError: a parameter with which an argument does not go.
    """
    mesh = asked.device_mesh
    places = check_places(places_in(found, shard_placement_fn, mesh), found, asked)
    reasons = choose_weights(
        asked.options.fp8, found, asked.mp_policy.param_dtype, device_of(mesh)
    )
    resolved = []
    for (tensor, name, sites), reason, place in zip(found, reasons, places):
        p = _parameter(asked, tensor, name, sites, reason, place)
        value = p.stored(p.whole if p.extension else plain_value(tensor))
        resolved.append(Resolved(p, value, place.mesh))
    return resolved


def _check_max_norm(sites, full_name):
    for module, name in sites:
        embedding = module()
        is_embedding = isinstance(embedding, (nn.Embedding, nn.EmbeddingBag))
        if is_embedding and name == "weight" and embedding.max_norm is not None:
            raise NotImplementedError(
                f"parameter {full_name}: max_norm={embedding.max_norm} of an embedding is "
                "not supported on several ranks, because its forward writes to the rows "
                "that this rank looked up, and other ranks look up others; set max_norm "
                "to None and call weight.data.renorm_(2, 0, max_norm) after each step"
            )


def _parameter(asked, tensor, full_name, sites, reason, place):
    """Returns the entry of one parameter in a unit. `reason`: why it is not FP8, or
    ""."""
    options, mp_policy, mesh = asked.options, asked.mp_policy, asked.device_mesh
    if mesh.size() > 1:
        _check_max_norm(sites, full_name)
    by_subclass = is_extended(tensor)
    parallel = None
    if is_tensor_parallel(tensor):
        parallel = TensorParallel(tensor, mesh, full_name)
    value = plain_value(tensor)
    former = plain_like(tensor, by_subclass or parallel is not None)
    as_chunks = place.dim or by_subclass or parallel is not None
    p = Parameter(
        sites,
        whole_parameter(
            value.shape, tensor.dtype, tensor.requires_grad, place.dim, former
        ),
        dim=place.dim,
        granularity="chunk" if as_chunks else options.granularity,
        parallel=parallel,
        trainable=tensor.requires_grad,
        apart=TRAINED if tensor.requires_grad else FROZEN,
        dtype=tensor.dtype,
        param_dtype=param_dtype_of(mp_policy, tensor, full_name),
        on_meta=tensor.is_meta,
        label=full_name,
        float8=not reason,
        why_not_float8=reason,
        hooks=hooks_of_tensor(tensor),
        former=weakref.ref(tensor),
    )
    if by_subclass:
        p.extension = Extension(p, tensor, mesh, mp_policy)
    elif options.check_same_values and mesh.size() > 1 and not tensor.is_meta:
        p.digest = digest(value)
    return p
