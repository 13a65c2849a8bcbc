"""Drops graphs before the communicators that they captured: NCCL ends none that a graph
refers to."""

import atexit
import functools
import weakref

from flatshard.torch_versions import call_before_groups_end

_models: weakref.WeakSet = weakref.WeakSet()


def drop_before_groups(graphs):
    """Calls `graphs.reset()`, of a model, before a process group ends. Later steps watch
    and capture again."""
    _models.add(graphs)
    _watch_groups()


@functools.cache
def _watch_groups():
    call_before_groups_end(_drop)


@atexit.register
def _drop():
    for graphs in list(_models):
        graphs.reset()
