"""Decides whether CUDA code is built, and finds the nvcc that builds it.

CMake, scripts/bootstrap and the wheel's build backend all ask this file, so that they
decide alike. It needs no package, and any Python from 3.10 on runs it.

usage: cuda_choice.py decide TORCH_FOLDER    prints "on|off;nvcc;reason" for CMake
       cuda_choice.py install TORCH_FOLDER PYTHON   fetches nvcc when it is needed
FLATSHARD_CUDA=auto|on|off is the user's wish. CUDA_HOME names the toolkit to use
instead of /usr/local/cuda.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# nvcc, its middle end, the headers that it includes automatically, and CUDA's runtime.
PACKAGES = (
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
    "nvidia-cuda-crt",
    "nvidia-cuda-runtime",
    "nvidia-cuda-cccl",
)
CPU_ONLY = "FLATSHARD_CUDA=off builds for CPUs only"


@dataclass
class Choice:
    """`build`: whether to build CUDA code. If `nvcc` is None, it is installed first."""

    build: bool
    nvcc: Path | None
    reason: str

    @property
    def lacks_nvcc(self):
        return self.build and self.nvcc is None


def torch_cuda(torch):
    """Returns the CUDA version of the torch package in folder `torch`, or None."""
    found = re.search(
        r"^cuda: Optional\[str\] = '([\d.]+)'", (torch / "version.py").read_text(), re.M
    )
    return found and found.group(1)


def has_gpu():
    """Returns whether this machine has an NVIDIA GPU. Under WSL only nvidia-smi shows
    it."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    except OSError:
        return False
    return said.returncode == 0 and said.stdout.startswith("GPU ")


def fetched_folder(cuda):
    """Returns where scripts/bootstrap puts nvcc, in addition to .venv."""
    return ROOT / f".cuda-{cuda}"


def candidates(torch, cuda):
    """Returns every nvcc that may be there, the user's choice first."""
    if os.environ.get("CUDA_HOME"):
        yield Path(os.environ["CUDA_HOME"]) / "bin/nvcc"
    if in_path := shutil.which("nvcc"):
        yield Path(in_path)
    if not os.environ.get("CUDA_HOME"):
        yield Path("/usr/local/cuda/bin/nvcc")
    # pip puts what a build backend asks for into another folder than torch.
    sites = [fetched_folder(cuda), torch.parent, *map(Path, sys.path)]
    for site in dict.fromkeys(sites):
        yield site / f"nvidia/cu{cuda.split('.')[0]}/bin/nvcc"


def cuda_version(nvcc):
    """Returns the version of CUDA that `nvcc` reports, or None when it does not run."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True)
    except OSError:
        return None
    found = re.search(r"release (\d+\.\d+)", said.stdout)
    return found and found.group(1)


def find_nvcc(torch, cuda):
    """Returns (the first nvcc of the major version of torch's CUDA or None, the
    others)."""
    others = []
    for nvcc in candidates(torch, cuda):
        version = cuda_version(nvcc)
        if version and version.split(".")[0] == cuda.split(".")[0]:
            return nvcc, others
        if version:
            others.append(f"{nvcc} of CUDA {version}")
    return None, others


def requirements(cuda):
    """Returns the packages that pip installs to have nvcc. Empty for a CUDA whose
    packages differ."""
    if int(cuda.split(".")[0]) < 13:
        return []
    minor = ".".join(cuda.split(".")[:2])
    return [f"{name}=={minor}.*" for name in PACKAGES]


def decide(torch, wish=None):
    wish = (wish or os.environ.get("FLATSHARD_CUDA") or "auto").lower()
    if wish not in ("auto", "on", "off"):
        sys.exit(f"flatshard: expected FLATSHARD_CUDA=auto, on or off, got {wish}")
    if wish == "off":
        return Choice(False, None, "FLATSHARD_CUDA=off")
    cuda = torch_cuda(torch)
    if not cuda:
        if wish == "on":
            sys.exit(
                "flatshard: FLATSHARD_CUDA=on expected a torch with CUDA, got one "
                f"without in {torch}; install another, or set FLATSHARD_CUDA=off"
            )
        return Choice(False, None, "this torch has no CUDA")
    nvcc, others = find_nvcc(torch, cuda)
    if nvcc:
        return Choice(True, nvcc, f"nvcc of torch's CUDA {cuda}: {nvcc}")
    got = ", ".join(others) or "no nvcc"
    if wish == "on" or has_gpu():
        why = "FLATSHARD_CUDA=on" if wish == "on" else "this machine has a GPU"
        return Choice(
            True, None, f"{why}, expected nvcc of torch's CUDA {cuda}, got {got}"
        )
    return Choice(
        False,
        None,
        f"no GPU here, and {got} where torch has CUDA {cuda}; "
        "FLATSHARD_CUDA=on builds CUDA code all the same",
    )


def how_to_install(cuda):
    """Returns the command that brings a missing nvcc, for one line of an error."""
    packages = requirements(cuda)
    if not packages:
        return f"install the CUDA {cuda} toolkit and set CUDA_HOME to its folder"
    return "pip install " + " ".join(f"'{package}'" for package in packages)


def install(torch, python):
    """Fetches nvcc from the package index when the build needs one."""
    choice = decide(torch)
    if not choice.lacks_nvcc:
        return
    cuda = torch_cuda(torch)
    packages = requirements(cuda)
    if not packages:
        sys.exit(f"flatshard: {choice.reason}; {how_to_install(cuda)}. {CPU_ONLY}.")
    folder = fetched_folder(cuda)
    print(f"flatshard: {choice.reason}; installing it into {folder} (0.3 GB)")
    # The folder is renamed at the end, because the remains of an interrupted
    # installation would look like a complete one.
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip = [python, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "--no-deps", "--target", partial, *packages], stdin=subprocess.DEVNULL
    )
    if done.returncode:
        shutil.rmtree(partial, ignore_errors=True)
        sys.exit(f"flatshard: pip could not install nvcc, see above. {CPU_ONLY}.")
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    if decide(torch).lacks_nvcc:
        sys.exit(f"flatshard: the nvcc in {folder} does not run. {CPU_ONLY}.")


def main(what, torch, *rest):
    torch = Path(torch)
    if what == "install":
        install(torch, *rest)
        return
    choice = decide(torch, *rest)
    if choice.lacks_nvcc:
        cuda = torch_cuda(torch)
        sys.exit(f"flatshard: {choice.reason}; {how_to_install(cuda)}. {CPU_ONLY}.")
    state = "on" if choice.build else "off"
    print(state, choice.nvcc or "", choice.reason.replace(";", ","), sep=";")


if __name__ == "__main__":
    main(*sys.argv[1:])
