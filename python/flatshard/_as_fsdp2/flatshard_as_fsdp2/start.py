"""Starts the swap of a process: when Python starts, or by `install()`."""

import functools
import importlib
import sys

from flatshard_as_fsdp2 import (
    accelerate_prepare,
    bitsandbytes_weights,
    closing,
    names,
    options,
    shard,
)
from flatshard_as_fsdp2.imports import AfterImport

# The patches of libraries: one file for each.
LIBRARIES = {
    library.MODULE: library.patch
    for library in (accelerate_prepare, bitsandbytes_weights)
}


def from_environment():
    """Arms a process below `python -m flatshard.as_fsdp2`."""
    found = options.from_environment()
    if found is None:
        return

    def arm(package):
        names.replace_on_use(
            package, functools.partial(shard.names_of_flatshard, found)
        )
        names.refuse_fsdp1(package)

    AfterImport({names.FSDP2: arm, **LIBRARIES})
    closing.report_at_end(found.require)


def install(found):
    """Swaps in a process that has imported Flatshard.

    Raises:
        RuntimeError: modules have imported names of FSDP2 before, or another swap did.
    """
    if names.FSDP2 in sys.modules and _is_swapped(sys.modules[names.FSDP2]):
        raise RuntimeError(
            "flatshard.as_fsdp2: FSDP2's names are Flatshard's already; call install() "
            "only once, and not in a program that python -m flatshard.as_fsdp2 started "
            "(pass options to that command)"
        )
    package = importlib.import_module(names.FSDP2)
    own = names.own_names(package)
    before = names.taken_by(own)
    if before:
        raise RuntimeError(
            "flatshard.as_fsdp2: these modules imported FSDP2's names before install(): "
            f"{', '.join(sorted(before))}. Call install() before they are imported"
        )
    names.replace_now(package, shard.names_of_flatshard(found, own))
    names.refuse_fsdp1(package)
    AfterImport(LIBRARIES)
    closing.report_at_end(found.require)


def _is_swapped(package):
    return "fully_shard" not in vars(package) or (
        vars(package)["fully_shard"].__module__.split(".")[0] == "flatshard"
    )
