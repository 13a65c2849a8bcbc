"""Shards of parameters that came on the meta device: there is memory, and no values."""

import weakref

import torch

from flatshard._tensor.memory import address_of

# For parameters that came on the meta device: the address of the memory of a shard ->
# its unit, which holds whether there are values yet.
of_meta: dict[int, weakref.ref] = {}


def mark_of_meta(storages, state):
    of_meta.update(dict.fromkeys(storages, weakref.ref(state)))
    weakref.finalize(state, lambda: [of_meta.pop(s, None) for s in storages])


def where_it_is(tensor, attribute):
    """Returns the metadata of a tensor on meta, for a shard without values, else None.
    Memory exists before the values do."""
    storage = address_of(tensor)
    state = of_meta[storage]() if storage in of_meta else None
    if state is None:
        return None
    if state.initialized:
        del of_meta[storage]
        return None
    answers = {
        "device": torch.device("meta"),
        "is_meta": True,
        "is_cpu": False,
        "is_cuda": False,
    }
    return answers.get(attribute)
