"""Tensor parallelism of layers and of experts, as Megatron-FSDP names it."""

from flatshard._tensor.tensor_parallel import is_tensor_parallel


def check_tensor_parallel(module, tp_dim, device_mesh, expt_mesh):
    """Refuses a `tp_dim` that no mesh has, and parameters that are not sharded over it.

    Args:
        device_mesh, expt_mesh: DeviceMeshes, or None.

    Raises:
        ValueError, NotImplementedError: naming the argument or the parameter.
    """
    if tp_dim is None:
        return
    meshes = [mesh for mesh in (device_mesh, expt_mesh) if mesh is not None]
    with_tp = [mesh[tp_dim] for mesh in meshes if tp_dim in (mesh.mesh_dim_names or ())]
    if not with_tp:
        raise ValueError(
            f"tp_dim: expected device_mesh or expt_device_mesh to have a dimension "
            f"{tp_dim!r}, they have {[mesh.mesh_dim_names for mesh in meshes]}"
        )
    for name, p in module.named_parameters():
        if is_tensor_parallel(p):
            if all(p.device_mesh != mesh for mesh in with_tp):
                raise ValueError(
                    f"tp_dim: parameter {name} is a DTensor over {p.device_mesh}, "
                    f"expected {with_tp[0]}"
                )
        elif getattr(p, "tensor_model_parallel", False):
            raise NotImplementedError(
                f"tp_dim: parameter {name} has the attribute tensor_model_parallel but is "
                "not a DTensor. This is not supported; distribute it over device_mesh"
                f"[{tp_dim!r}], as parallelize_module does"
            )
