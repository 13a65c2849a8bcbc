"""Drops graphs before the communicators that they captured: NCCL ends none that a graph
refers to."""

import atexit
import functools
import weakref

from flatshard.torch_versions import call_before_groups_end

_roots: weakref.WeakSet = weakref.WeakSet()


def drop_before_groups(root):
    """Drops the graphs of a Root before a process group ends. Later steps watch and
    capture again."""
    _roots.add(root)
    _watch_groups()


@functools.cache
def _watch_groups():
    call_before_groups_end(_drop)


@atexit.register
def _drop():
    for root in list(_roots):
        root.core.reset_graphs()
