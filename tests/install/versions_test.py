"""The version stands in pyproject.toml, and everything that says it says the same.

usage: versions_test.py BUILD_FOLDER     with PYTHONPATH at its python/
"""

import re
import subprocess
import sys
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
