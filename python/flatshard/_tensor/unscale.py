"""torch.amp.GradScaler over shards."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# GradScaler calls it with a list of gradients, and ShardedTensor recognizes it.
unscale = torch._amp_foreach_non_finite_check_and_unscale_


def unscale_gradients(gradients, found_inf, inverse_scale):
    """Runs the operation of GradScaler on gradients. All ranks get the same
    `found_inf`.

    DTensor asks only the first gradient over which ranks to agree, and does not accept
    plain tensors among them.
    """
    local = [g._local_tensor if isinstance(g, DTensor) else g for g in gradients]
    unscale(local, found_inf, inverse_scale)
    groups = {}
    for gradient in gradients:
        if isinstance(gradient, DTensor):
            mesh = gradient.device_mesh
            for dim, placement in enumerate(gradient.placements):
                if not placement.is_replicate():
                    groups[mesh, dim] = mesh.get_group(dim)
    for group in groups.values():
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
