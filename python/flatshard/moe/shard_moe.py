"""`shard_moe`: a transformers model with experts, sharded by one call; and its meshes."""

from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard._fsdp.fully_shard import fully_shard
from flatshard._fsdp.options import ModelOptions, ShardOptions
from flatshard._tensor.mesh import default_device_mesh, flattened, joined_meshes
from flatshard.moe.expert_parallel import expert_parallel, experts_in


@dataclass(frozen=True)
class MoeMeshes:
    """Meshes of a model with experts, see `moe_meshes`.

    Attributes:
        dp: the mesh of all parameters except the experts. With replicas, they are its first
            dimension.
        experts: of the parameters of experts: size / ep ranks, and replicas.
        ep: one dimension, of the ranks that share the experts of a layer.
    """

    dp: DeviceMesh
    experts: DeviceMesh
    ep: DeviceMesh


def moe_meshes(dp_mesh: DeviceMesh | None = None, *, ep: int) -> MoeMeshes:
    """Divides the ranks of a mesh for a model with experts. Collective.

        meshes = flatshard.moe_meshes(ep=4)
        flatshard.expert_parallel(model, meshes.ep)
        for layer in model.model.layers:
            fully_shard(layer.mlp.experts, mesh=meshes.experts)
            fully_shard(layer, mesh=meshes.dp)
        fully_shard(model, mesh=meshes.dp)

    Args:
        dp_mesh: DeviceMesh over all ranks. One dimension, or two: replicas over the
            first (HSDP). None: one dimension of all ranks.
        ep: number of ranks that share the experts of a layer; divides the size of the
            last dimension of `dp_mesh`.

    Raises:
        ValueError: a mesh or a number that does not fit.
    """
    dp_mesh = default_device_mesh() if dp_mesh is None else dp_mesh
    _check_mesh(dp_mesh, ep)
    ranks = dp_mesh.mesh
    edp = ranks.shape[-1] // ep
    names = ("edp", "ep") if dp_mesh.ndim == 1 else ("replicate", "edp", "ep")
    mesh = DeviceMesh(
        dp_mesh.device_type,
        ranks.reshape(*ranks.shape[:-1], edp, ep),
        mesh_dim_names=names,
    )
    dp = flattened(mesh["edp", "ep"])
    if dp_mesh.ndim == 1:
        return MoeMeshes(dp, mesh["edp"], mesh["ep"])
    whole = joined_meshes([mesh["replicate"], dp])
    return MoeMeshes(whole, mesh["replicate", "edp"], mesh["ep"])


def shard_moe(
    model: nn.Module,
    dp_mesh: DeviceMesh | None = None,
    *,
    ep: int,
    overlap: bool = False,
    units: list[nn.Module] | None = None,
    options: ShardOptions | None = None,
    **fully_shard_options: Any,
) -> nn.Module:
    """Shards a transformers model with experts, each rank with 1 / `ep` of the experts.

    Does what `expert_parallel` and `fully_shard` of each layer and of the model do with
    meshes that fit: experts are sharded over size / ep ranks, all other parameters over
    all ranks of `dp_mesh`. Collective.

    Args:
        model: Mixtral or Qwen3-MoE of transformers, or another model whose experts are
            3-D parameters `gate_up_proj` and `down_proj`; before fully_shard. May be on
            the meta device.
        dp_mesh, ep: see `moe_meshes`; `ep` divides the number of experts as well.
        overlap: True: steps may run by overlap_microbatches.
        units: modules that `fully_shard` makes units of. None: the model's decoder layers,
            by `_no_split_modules` of transformers.
        options: ShardOptions of all units. Experts ignore fp8, cuda_graph and
            grads_in_place.
        fully_shard_options: further arguments of fully_shard for all units, such as
            mp_policy. `model_options` decides how tokens are copied, as for
            parameters.

    Returns:
        `model`. It is an FSDPModule from now on.

    Raises:
        ValueError: an argument that cannot work, naming it.
    """
    meshes = moe_meshes(dp_mesh, ep=ep)
    options = options or ShardOptions()
    layers = _layers(model) if units is None else list(units)
    copies = (fully_shard_options.get("model_options") or ModelOptions()).copy_engines
    expert_parallel(model, meshes.ep, overlap=overlap, copy_engines=copies)
    if ep > 1:
        of_experts = replace(options, fp8=None, cuda_graph=False, grads_in_place=None)
        for _, experts in experts_in(model):
            fully_shard(
                experts, mesh=meshes.experts, options=of_experts, **fully_shard_options
            )
    for layer in layers:
        fully_shard(layer, mesh=meshes.dp, options=options, **fully_shard_options)
    fully_shard(model, mesh=meshes.dp, options=options, **fully_shard_options)
    return model


def _check_mesh(mesh, ep):
    if not isinstance(mesh, DeviceMesh) or mesh.ndim not in (1, 2):
        raise ValueError(
            f"dp_mesh: expected a DeviceMesh of 1 or 2 dimensions, got {mesh!r}"
        )
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"dp_mesh: expected a mesh of all {dist.get_world_size()} ranks, got "
            f"{mesh.size()}; use expert_parallel and fully_shard with custom meshes"
        )
    ranks = mesh.size(mesh.ndim - 1)
    if type(ep) is not int or ep < 1 or ranks % ep:
        raise ValueError(
            f"ep: expected a number that divides the {ranks} ranks of dp_mesh's last "
            f"dimension, got {ep!r}"
        )


def _layers(model):
    classes = set(getattr(model, "_no_split_modules", None) or ())
    found = [m for m in model.modules() if type(m).__name__ in classes]
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} does not declare which modules are its layers "
            "(_no_split_modules); give units"
        )
    return found
