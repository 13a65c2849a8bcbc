"""Checks that the installed torch fits this Flatshard, and names the wheel that does.

The extension and the program fit one minor version of torch, and one major version of
CUDA. Nothing here imports torch or the package, so that the check comes first.
"""

import importlib.util
import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace


def build_info(folders):
    """Returns VERSION, TORCH and CUDA of the package in `folders`, from its _build.py."""
    for folder in folders:
        path = Path(folder) / "_build.py"
        if path.exists():
            return SimpleNamespace(**runpy.run_path(str(path)))
    raise ImportError(f"expected flatshard/_build.py in {list(folders)}; install again")


def installed_torch():
    """Returns (folder, version, CUDA version or "") of the torch that an import would
    load, or None."""
    spec = importlib.util.find_spec("torch")
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / "version.py"
        if path.exists():
            text = path.read_text()
            version = re.search(r"^__version__ = '([^']+)'", text, re.M)
            cuda = re.search(r"^cuda\b.*= '([\d.]+)'", text, re.M)
            if version:
                return Path(folder), version.group(1), cuda.group(1) if cuda else ""
    return None


def minor(version):
    """Returns `2.11` of 2.11.0+cu130."""
    return ".".join(version.split(".")[:2])


def label(torch, cuda):
    """Returns the part of a wheel's version that names what it fits: cu130torch2.11."""
    device = "cu" + cuda.replace(".", "") if cuda else "cpu"
    return f"{device}torch{minor(torch)}"


def wheel_name(version, torch, cuda):
    """Returns the wheel of Flatshard `version` for this Python and such a torch."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    return f"flatshard-{version}+{label(torch, cuda)}-{python}-{python}-*.whl"


def misfit(build, torch):
    """Returns what is wrong with `torch`, an installed_torch(), and what to install.
    None when it fits. A build without CUDA fits a torch with CUDA, too."""
    device = f" with CUDA {build.CUDA.split('.')[0]}" if build.CUDA else ""
    needed = f"torch {minor(build.TORCH)}.*{device}"
    this = f"flatshard {build.VERSION}+{label(build.TORCH, build.CUDA)}"
    pin = f"pip install 'torch=={minor(build.TORCH)}.*'"
    if torch is None:
        return f"{this} needs {needed}, but torch is not installed; {pin}"
    folder, version, cuda = torch
    same_cuda = not build.CUDA or cuda.split(".")[0] == build.CUDA.split(".")[0]
    if minor(version) == minor(build.TORCH) and same_cuda:
        return None
    got = f"torch {version} with {'CUDA ' + cuda if cuda else 'no CUDA'} in {folder}"
    other = wheel_name(build.VERSION, version, cuda)
    return f"{this} expected {needed}, got {got}; install {other}, or {pin}"
