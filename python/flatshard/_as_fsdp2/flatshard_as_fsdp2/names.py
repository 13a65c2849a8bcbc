"""Makes FSDP2's public names resolve to objects of Flatshard."""

import functools
import sys
import threading

FSDP2 = "torch.distributed.fsdp"
NAMES = (
    "CPUOffloadPolicy",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
)
# They export the same names and bind them when they are imported.
FORMER = (
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
# Of these only the function is replaced: torch.compile and replicate() work with the
# classes of FSDP2.
PRIVATE = (f"{FSDP2}._fully_shard", f"{FSDP2}._fully_shard._fully_shard")


def replace_on_use(package, find_new):
    """Lets the names of `package` resolve to `find_new()`'s from their first use on.

    Args:
        package: torch.distributed.fsdp, just imported. torch is not complete yet, so
            Flatshard cannot be imported.
        find_new: function of a dict of torch's objects by name that returns the objects of
            Flatshard. Modules that it imports get torch's objects.
    """
    names = vars(package)
    own = {name: names.pop(name) for name in NAMES if name in names}
    former = names.pop("__getattr__", None)
    lock, importing = threading.RLock(), []

    def __getattr__(name):
        if name not in own:
            if former is not None:
                return former(name)
            raise AttributeError(
                f"module {package.__name__!r} has no attribute {name!r}"
            )
        with lock:
            if importing:
                return own[name]
            if name not in names:
                importing.append(name)
                try:
                    replace_now(package, find_new(own))
                finally:
                    importing.clear()
        return names[name]

    names["__getattr__"] = __getattr__
    _replace_private(package)


def replace_now(package, new):
    """Sets the names of `package`, and of the modules that export them as well."""
    vars(package).update(new)
    for name in FORMER:
        module = sys.modules.get(name)
        if module is not None:
            vars(module).update({k: v for k, v in new.items() if k in vars(module)})
    for name in PRIVATE:
        if name in sys.modules:
            sys.modules[name].fully_shard = new["fully_shard"]


def _replace_private(package):
    """Lets the function of the private modules resolve on use, too."""

    def fully_shard(*args, **keywords):
        return package.fully_shard(*args, **keywords)

    fully_shard.state = lambda module: package.fully_shard.state(module)
    for name in PRIVATE:
        if name in sys.modules:
            sys.modules[name].fully_shard = fully_shard


def own_names(package):
    return {name: vars(package)[name] for name in NAMES if name in vars(package)}


def taken_by(own):
    """Returns the names of modules that have imported one of torch's objects already."""
    found = []
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("torch", "flatshard", "flatshard_as_fsdp2"):
            continue
        values = list(getattr(module, "__dict__", {}).values())
        if any(value is mine for value in values for mine in own.values()):
            found.append(name)
    return found


def refuse_fsdp1(package):
    """Makes FullyShardedDataParallel raise, because it would train without Flatshard."""
    cls = package.FullyShardedDataParallel

    @functools.wraps(cls.__init__)
    def __init__(self, *args, **kwargs):
        raise NotImplementedError(
            "flatshard.as_fsdp2: this program uses FullyShardedDataParallel (FSDP1), "
            "which Flatshard does not replace. Choose FSDP2: set fsdp_version: 2 in "
            "accelerate's or Axolotl's configuration, fsdp_config={'version': 2} in "
            "TrainingArguments, or ModelParallelStrategy in Lightning"
        )

    cls.__init__ = __init__
