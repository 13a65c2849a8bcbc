"""Random operations on sharded tensors give the same values as on one process.

Each rank draws the full tensor from one state of the generator, the state of the
mesh's first rank, and keeps its rows. So rows differ between ranks, replicas agree, and
the number of ranks makes no difference.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

from flatshard._tensor.shard_calls import on_whole
from flatshard._tensor.shard_values import base_of, is_cut, own_rows, tensors_in
from flatshard._tensor.sharded_tensor import ShardedTensor


def run(func, traits, args, kwargs):
    """Runs operations that draw random numbers."""
    shards = [t for t in tensors_in((args, kwargs)) if isinstance(t, ShardedTensor)]
    first = shards[0]
    generator = traits.bind(args, kwargs).get("generator")
    generator = generator or _default_generator(base_of(first)._local_tensor.device)
    with _state_of_first_rank(first._spec.mesh, generator):
        result = on_whole(func, traits, args, kwargs)
    if traits.written or not is_cut(first):
        return result

    def cut(tensor):
        if not isinstance(tensor, torch.Tensor) or tensor.shape != first.shape:
            return tensor
        rows = own_rows(tensor._local_tensor, first).clone()
        spec = first._spec
        return ShardedTensor.of_rows(rows, spec.mesh, spec.placements, first.shape)

    return tuple(map(cut, result)) if isinstance(result, tuple) else cut(result)


@contextmanager
def _state_of_first_rank(mesh, generator):
    """Draws from it. Generators that were in that state advance; the generators of other
    ranks stay as they are. Collective."""
    before = generator.get_state()
    state = before.clone().to(mesh.device_type)
    for dim in range(mesh.ndim):
        dist.broadcast(state, group=mesh.get_group(dim), group_src=0)
    state = state.cpu()
    differs = not torch.equal(state, before)
    if differs:
        generator.set_state(state)
    try:
        yield
    finally:
        if differs:
            generator.set_state(before)


def _default_generator(device):
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device()]
    return torch.default_generator
