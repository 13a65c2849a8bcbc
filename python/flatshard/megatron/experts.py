"""Places experts on a separate mesh, and names groups of ranks as Megatron-FSDP
does."""

import torch.distributed as dist

from flatshard.moe.expert_parallel import is_spread


def expert_modules(unit):
    """Returns the outermost modules below `unit` that have only parameters of experts:
    parameters that Megatron-Core marks by `allreduce = False`, and what
    flatshard.expert_parallel spread."""
    found = []
    for child in unit.children():
        parameters = list(child.parameters())
        if parameters and (is_spread(child) or all(map(_is_marked, parameters))):
            found.append(child)
        else:
            found += expert_modules(child)
    return found


def _is_marked(p):
    return getattr(p, "allreduce", True) is False


def check_experts(expt_mesh, experts, outer):
    if not experts:
        raise ValueError(
            "expt_device_mesh: found no modules of experts in the units: their parameters "
            "have allreduce = False, or flatshard.expert_parallel has sharded them"
        )
    if outer != "replicate":
        raise NotImplementedError(
            "expt_device_mesh is not supported with outer_dp_sharding_strategy='optim': "
            "the experts' optimizer state cannot be sharded over dp_outer_dim as well"
        )
    if expt_mesh.ndim > 2:
        raise ValueError(
            "expt_device_mesh: expected the dimension that shards experts, or a dimension "
            f"of replicas and it, got {expt_mesh.ndim} dimensions; choose a part of it"
        )


def check_group(name, group, mesh):
    """Checks that a group has the ranks of the mesh. Megatron-FSDP would communicate on it;
    here the mesh decides which ranks do, on separate communicators of the core.

    Args:
        mesh: the part of expt_device_mesh whose ranks `group` is to have, or None.
    """
    if group is None:
        return
    if mesh is None:
        raise ValueError(
            f"{name}: expected expt_device_mesh too, to define where it is used"
        )
    ranks = sorted(dist.get_process_group_ranks(group))
    expected = sorted(mesh.mesh.flatten().tolist())
    if ranks != expected:
        raise ValueError(
            f"{name}: expected a group of the ranks of expt_device_mesh, {expected}, got "
            f"{ranks}"
        )
