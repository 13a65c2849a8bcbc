#!python
"""The program `flatshard` of a wheel: checks the installed torch, then becomes the
program. No Python runs in it afterwards."""

import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace


def first_with(folders, name):
    """Returns the file `name` in the first of `folders` that has it."""
    for folder in folders:
        if (path := Path(folder) / name).exists():
            return path
    sys.exit(f"flatshard: expected {name} in {list(folders)}; install flatshard again")


def library_folders(torch):
    """Returns where torch's libraries are, and NVIDIA's that torch loads."""
    return [torch / "lib", *sorted(torch.parent.glob("nvidia/*/lib"))]


def main():
    spec = find_spec("flatshard")  # which does not import it
    if spec is None:
        sys.exit(f"flatshard: {sys.executable} has no package flatshard; install it")
    folders = list(spec.submodule_search_locations)
    path = first_with(folders, "torch_fit.py")
    fit = SimpleNamespace(**runpy.run_path(str(path)))
    torch = fit.installed_torch()
    problem = fit.misfit(fit.build_info(folders), torch)
    if problem:
        sys.exit(f"flatshard: {problem}")
    program = first_with(folders, "bin/flatshard")
    # The program looks for torch next to its package. It may be elsewhere.
    if not os.path.samefile(torch[0].parent, program.parents[2]):
        paths = [str(folder) for folder in library_folders(torch[0])]
        if old := os.environ.get("LD_LIBRARY_PATH"):
            paths.append(old)
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
    # Tokenizers need it, since they run in Python.
    os.environ.setdefault("FLATSHARD_PYTHON", sys.executable)
    os.execv(program, [str(program), *sys.argv[1:]])


if __name__ == "__main__":
    main()
