"""The build backend of `pip install .` is scikit-build-core, after a check of the tools
that the build needs. pip shows in one line what is missing. It fetches nvcc if CUDA
code is requested and no toolkit of torch's CUDA is installed (cuda_choice.py)."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import cuda_choice
import wheel_metadata
from scikit_build_core.build import *  # noqa: F403
from scikit_build_core import build as backend

# A header, and the Debian package that has it.
HEADERS = {
    "nlohmann/json.hpp": "nlohmann-json3-dev",
    "toml++/toml.h": "libtomlplusplus-dev",
    "CLI/CLI.hpp": "libcli11-dev",
    "boost/beast/http.hpp": "libboost-dev",
    "xxhash.h": "libxxhash-dev",
}


def missing_packages():
    """Debian's names of what a compilation would not find."""
    missing = []
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        missing.append("python3-dev")
    compiler = (os.environ.get("CXX") or "c++").split()
    if not shutil.which(compiler[0]):
        return [*missing, "g++", *HEADERS.values()]
    probe = "".join(
        f"#if !__has_include(<{header}>)\nlacks {package}\n#endif\n"
        for header, package in HEADERS.items()
    )
    said = subprocess.run(
        [*compiler, "-std=c++20", "-E", "-P", "-x", "c++", "-"],
        input=probe,
        capture_output=True,
        text=True,
    )
    lines = said.stdout.splitlines()
    return missing + [s.split()[1] for s in lines if s.startswith("lacks ")]


def check_packages():
    missing = missing_packages()
    if missing:
        sys.exit(
            "flatshard: some packages are missing. Type this, then repeat: sudo "
            "apt-get install -y --no-install-recommends " + " ".join(missing)
        )


def get_requires_for_build_wheel(config_settings=None):
    check_packages()
    requires = list(backend.get_requires_for_build_wheel(config_settings))
    torch = wheel_metadata.torch_folder()
    choice = cuda_choice.decide(torch)
    print(f"flatshard CUDA: {choice.reason}")
    if choice.lacks_nvcc:
        requires += cuda_choice.requirements(cuda_choice.torch_cuda(torch))
    return requires


get_requires_for_build_editable = get_requires_for_build_wheel


# Checked again, because pip skips the requirements with --no-build-isolation.
def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    check_packages()
    return backend.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    check_packages()
    return backend.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    wheel_metadata.for_wheel = False
    return backend.build_sdist(sdist_directory, config_settings)
