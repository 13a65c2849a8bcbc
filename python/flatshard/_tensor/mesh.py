"""The core's Mesh of a DeviceMesh.

Flatshard makes separate communicators through the store of the default process group,
that no public function returns: one for all-gathers and one for reductions, so that
neither waits for the other nor for the program's own collectives. Only the ranks of the
mesh participate. They exist until the process ends.
"""

import atexit
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from flatshard import _C

_meshes: dict[object, _C.Mesh] = {}


def default_device_mesh():
    """Returns a mesh of one dimension over all ranks, on this process's accelerator or
    the CPU.

    Starts the default process group when there is none, as FSDP2 does.
    """
    if not dist.is_initialized():
        _start_processes()
    backend = dist.get_backend()
    kind = "cuda" if "nccl" in backend and torch.cuda.is_available() else "cpu"
    return init_device_mesh(kind, (dist.get_world_size(),))


def _start_processes():
    # A launcher such as torchrun sets these.
    missing = [
        name
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        if name not in os.environ
    ]
    if missing:
        raise ValueError(
            "fully_shard: there is no process group, and the environment lacks "
            f"{', '.join(missing)} to make one: start the program with a launcher, "
            "torchrun --nproc-per-node N program.py, or call "
            "torch.distributed.init_process_group before fully_shard. One process without "
            "a launcher: init_process_group(store=HashStore(), rank=0, world_size=1)"
        )
    dist.init_process_group()


def core_mesh(device_mesh):
    """Returns the core's mesh over the ranks of `device_mesh`. Collective over them, or
    over the ranks of model_mesh.

    Args:
        device_mesh: 1 or 2 dimensions; may be part of a larger one. Of two, the
            first is the outer one.
    """
    return model_mesh(device_mesh)[0]


def model_mesh(device_mesh):
    """Returns (part, full): core_mesh(device_mesh), and the core's mesh that it is a
    part of.

    A dimension that was flattened together with others (`mesh["edp", "ep"]._flatten(
    "dp")`) is an axis of the flattened one's mesh. So parameters on "edp" and
    parameters on "dp" can belong to one model. Otherwise both are the same.
    """
    if device_mesh.ndim not in (1, 2):
        raise ValueError(
            f"mesh: fully_shard expects a 1D or 2D DeviceMesh but got {device_mesh}; "
            "choose a part of it, such as mesh['dp']"
        )
    names, all_names = _dimensions(device_mesh)
    if names is None:
        made = _made_once(device_mesh)
        return made, made
    root = root_of(device_mesh)[all_names]
    whole = _made_once(root, all_names)
    if names == all_names:
        return whole, whole
    key = whole, names
    if key not in _meshes:
        _meshes[key] = whole.sub_mesh(list(names))
    return _meshes[key], whole


def core_mesh_of_all(device_mesh):
    """Returns the core's mesh of one axis over all ranks of `device_mesh`. Collective."""
    name = "_".join(device_mesh.mesh_dim_names or ("ranks",))
    ranks = tuple(device_mesh.mesh.flatten().tolist())
    key = (len(ranks),), ranks, device_mesh.device_type, name
    if key not in _meshes:
        _meshes[key] = _make((name,), key)
    return _meshes[key]


def core_mesh_of_dimensions(device_mesh, names):
    """Returns the core's mesh with an axis for each dimension of `device_mesh`, named by
    `names`. Collective."""
    return _made_once(device_mesh, names)


def root_of(device_mesh):
    """Returns the DeviceMesh that `device_mesh` is a part of, by init_device_mesh."""
    return device_mesh._get_root_mesh()


def ranks_of(device_mesh):
    """Returns the ranks of `device_mesh`, in ascending order."""
    return sorted(device_mesh.mesh.flatten().tolist())


def root_names(device_mesh, names=None):
    """Returns the root mesh's dimensions that the dimensions `names` of `device_mesh`
    consist of. None: all of them. Empty where the meshes have no names."""
    own = (device_mesh.mesh_dim_names or ()) if names is None else names
    root = root_of(device_mesh)
    runs = _flattened(root) if root.mesh_dim_names is not None else {}
    return {name for one in own for name in runs.get(one, (one,))}


def mesh_of_roots(device_mesh, names):
    """Returns the DeviceMesh of those dimensions of the root mesh of `device_mesh` whose
    names are in `names`, in the root mesh's order."""
    root = root_of(device_mesh)
    return root[tuple(name for name in root.mesh_dim_names if name in names)]


def slices_of(part, whole):
    """Returns (number, which): the number of groups of ranks like `part` in the mesh
    `whole`, and this rank's among them; the last axis fastest. None: they are the
    same."""
    if part is whole:
        return None
    own = {name for name, _ in part.axes}
    number, which = 1, 0
    for (name, size), coordinate in zip(whole.axes, whole.coordinates):
        if name not in own:
            number, which = number * size, which * size + coordinate
    return number, which


def meshes_around(device_mesh, part, whole, other_names):
    """Returns one DeviceMesh for each axis of `whole` that `part`, the core's mesh of
    `device_mesh`, lacks and that is none of `other_names`."""
    own = {name for name, _ in part.axes} | set(other_names)
    root = root_of(device_mesh)
    return [root[name] for name, _ in whole.axes if name not in own]


def _made_once(device_mesh, names=()):
    """Returns one for all meshes of the same ranks, and for those with these
    `names`."""
    key = (*_key(device_mesh), *names)
    if key not in _meshes:
        _meshes[key] = _make(names or device_mesh.mesh_dim_names, key)
    return _meshes[key]


def _key(device_mesh):
    ranks = device_mesh.mesh
    return tuple(ranks.shape), tuple(ranks.flatten().tolist()), device_mesh.device_type


def _dimensions(device_mesh):
    """Returns the root mesh's dimensions that `device_mesh` consists of, and the
    dimensions of the mesh that it is a part of. Returns (None, None) where nothing was
    flattened."""
    # DeviceMesh has no public name for its root and for what was flattened.
    root = root_of(device_mesh)
    own, names = device_mesh.mesh_dim_names, root.mesh_dim_names
    runs = _flattened(root) if own is not None and names is not None else {}
    if not all(name in names or name in runs for name in own or ()):
        return None, None
    found = {name for one in own or () for name in runs.get(one, (one,))}
    around = max((r for r in runs.values() if found & set(r)), key=len, default=())
    if not around:
        return None, None
    all_names = tuple(n for n in names if n in found or n in around)
    # The core replicates over the first axis and shards over the others.
    if len(own) == 2 and runs.get(own[0], (own[0],)) != all_names[:1]:
        return None, None
    return tuple(n for n in names if n in found), all_names


def _flattened(root):
    """Returns {name: names} of the meshes that were made of adjacent dimensions of
    `root`, of more than one rank each. Adjacent dimensions of one rank are included."""
    runs = {}
    names = root.mesh_dim_names
    for name, mesh in root._flatten_mapping.items():
        for begin in range(len(names)):
            for end in range(begin + 2, len(names) + 1):
                run = names[begin:end]
                is_longer = len(run) > len(runs.get(name, ()))
                if is_longer and torch.equal(
                    root[run].mesh.flatten(), mesh.mesh.flatten()
                ):
                    runs[name] = run
    return runs


def flattened(device_mesh):
    """Returns the mesh of one dimension over all ranks of a mesh with names. torch's
    documentation has users call `_flatten`, too."""
    return device_mesh._flatten()


def joined_meshes(device_meshes):
    """Returns the mesh of the dimensions of several meshes of one root. torch has no
    public way for a mesh of a dimension and a flattened one."""
    return DeviceMesh._concatenate(device_meshes)


def device_of(device_mesh):
    return _device_of_type(device_mesh.device_type)


def _device_of_type(device_type):
    if device_type == "cpu":
        return torch.device("cpu")
    if device_type != "cuda":
        raise ValueError(f"mesh: expected device type cpu or cuda, got {device_type}")
    return torch.device("cuda", torch.cuda.current_device())


def default_timeout_s():
    """Returns the timeout of the default process group, in seconds."""
    backend = dist.Backend(dist.get_backend())
    return dist.distributed_c10d._get_default_timeout(backend).total_seconds()


def _make(names, key):
    device = _device_of_type(key[2])
    if device.type == "cuda" and not _C.with_cuda:
        raise RuntimeError(
            "mesh: a CUDA mesh needs Flatshard built with CUDA; rebuild with "
            "FLATSHARD_CUDA=on (python -m flatshard.doctor shows what this build has)"
        )
    shape, ranks = key[:2]
    if dist.get_rank() not in ranks:
        raise ValueError(
            f"mesh: rank {dist.get_rank()} is not in it, its ranks are {list(ranks)}; "
            "only they call fully_shard"
        )
    if len(ranks) == 1 and len(shape) == 1:
        return _C.Mesh.single(device)
    names = names or ("outer", "dp")[-len(shape) :]
    digest = hashlib.sha1(repr(key).encode()).hexdigest()[:16]
    name = f"flatshard/{digest}"
    options = _C.MeshOptions(name=name, timeout_s=default_timeout_s())
    return _C.Mesh.create(
        list(zip(names, shape)),
        ranks.index(dist.get_rank()),
        dist.distributed_c10d._get_default_store(),
        device,
        options,
    )


# Seconds for other threads that wait for the GIL.
_LAST_TURN = 0.05


@atexit.register
def _close():
    if not _meshes:
        return
    # Before the interpreter finalizes torch; the ranks leave together.
    _meshes.clear()
    # Gloo's threads need the GIL to free the tensors of the program's last
    # collective. Once the interpreter is ending they never get it, and torch 2.11
    # ends the process there ("terminate called without an active exception").
    time.sleep(_LAST_TURN)
