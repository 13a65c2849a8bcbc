"""Private names of FSDP2 that libraries use, and that Flatshard does not have."""

import sys

_PARAM = "torch.distributed.fsdp._fully_shard._fsdp_param"
# name: (what uses it, the setting to leave out)
_OF_MODULES = {
    "_get_fsdp_state": ("Axolotl's tiled MLP", "leave out tiled_mlp"),
}
_OF_STATES = {
    "_state_ctx": (
        "torch.distributed.pipelining",
        "pipeline parallelism is not supported, so set its degree to 1",
    ),
    "_fsdp_param_group": ("Axolotl's tiled MLP", "leave out tiled_mlp"),
}


def _refused(name, used_by, remedy):
    def read(self):
        raise NotImplementedError(
            f"flatshard.as_fsdp2: {name} is private to FSDP2, and Flatshard does not have "
            f"it. It is used by {used_by}: {remedy}"
        )

    return property(read)


def refuse(module_class, state_class):
    for cls, names in ((module_class, _OF_MODULES), (state_class, _OF_STATES)):
        for name, (used_by, remedy) in names.items():
            setattr(cls, name, _refused(name, used_by, remedy))


class PatchedFSDPParam:
    """Finds patches of FSDP2's FSDPParam. They have no effect on Flatshard."""

    def __init__(self):
        self.cls = sys.modules[_PARAM].FSDPParam
        self.methods = dict(vars(self.cls))

    def check(self):
        """Raises NotImplementedError if the class was patched."""
        now = sys.modules[_PARAM].FSDPParam
        names = [n for n, v in vars(now).items() if self.methods.get(n) is not v]
        if now is self.cls and not [n for n in names if callable(vars(now)[n])]:
            return
        raise NotImplementedError(
            f"flatshard.as_fsdp2: FSDPParam of FSDP2 was patched ({', '.join(names)}), "
            "which has no effect on Flatshard. Axolotl does so for adapter: qlora with "
            "FSDP2: use adapter: lora without load_in_4bit"
        )
