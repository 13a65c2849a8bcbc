"""The version is in pyproject.toml, and every other place has the same. So has the
range of torch's versions that were tried.

usage: versions_test.py BUILD_FOLDER     with PYTHONPATH at its python/
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import flatshard

build = Path(sys.argv[1])
root = Path(__file__).resolve().parents[2]
version = re.search(
    r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), re.M
).group(1)

said = subprocess.run(
    [build / "flatshard", "--version"], capture_output=True, text=True, check=True
).stdout
assert said == f"flatshard {version}\n", said
assert flatshard.__version__ == version, flatshard.__version__
package = (build / "flatshardConfigVersion.cmake").read_text()
assert f'set(PACKAGE_VERSION "{version}")' in package, package
newest = re.search(r"^## \[?([\d.]+)", (root / "CHANGELOG.md").read_text(), re.M)
assert newest and newest.group(1) == version, newest


# -- torch ---------------------------------------------------------------------

least, above = re.search(
    r'"torch>=([\d.]+),<([\d.]+)"', (root / "pyproject.toml").read_text()
).groups()


def configure(torch_version):
    """Returns CMake's output for a torch of this version."""
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        (folder / "version.py").write_text(f"__version__ = '{torch_version}'\n")
        (folder / "only_torch.cmake").write_text(
            f"file(READ {root}/pyproject.toml _pyproject)\n"
            f"include({root}/cmake/torch.cmake)\n"
        )
        done = subprocess.run(
            ["cmake", f"-DFLATSHARD_TORCH_DIR={folder}", "-P", "only_torch.cmake"],
            cwd=folder,
            capture_output=True,
            text=True,
        )
    return " ".join((done.stdout + done.stderr).split())


refusal = f"expected torch >= {least} and < {above}, got "
for untried in ("2.10.2", "2.10.0+cpu", above + ".0", above + ".0.dev20270101+cu130"):
    said = configure(untried)
    assert refusal + untried in said, said
for tried in (least + ".0", least + ".1+cpu", "2.15.9"):
    said = configure(tried)
    assert f"torch {tried} at" in said and refusal not in said, said
