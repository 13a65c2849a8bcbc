"""Checks the contents of a wheel, and that nothing of torch's or NVIDIA's is in it:
wheel_test.sh runs it.

usage: wheel_contents.py WHEEL
"""

import re
import subprocess
import sys
import tempfile
import zipfile
from importlib.metadata import version
from pathlib import Path

path = Path(sys.argv[1])
wheel = zipfile.ZipFile(path)
names = set(wheel.namelist())
minor = ".".join(version("torch").split(".")[:2])

# It fits one minor version of torch. Its name and its metadata for pip contain that.
name, label, python, *_ = path.name.split("-")
assert name == "flatshard" and re.fullmatch(rf".+\+(cpu|cu\d+)torch{minor}", label), (
    path
)
info = f"flatshard-{label}.dist-info"
metadata = wheel.read(f"{info}/METADATA").decode().splitlines()
requires = [s.split(": ")[1] for s in metadata if s.startswith("Requires-Dist:")]
needed = [r.replace(" ", "") for r in requires if "extra" not in r]
assert needed == [f"torch=={minor}.*"], requires

# The package's files, the extension, the program and the script that starts it.
package = Path("python/flatshard")
wanted = {
    str(file.relative_to("python"))
    for kind in ("*.py", "*.pyi", "py.typed")
    for file in package.rglob(kind)
}
script = f"flatshard-{label}.data/scripts/flatshard"
wanted |= {"flatshard/_build.py", "flatshard/bin/flatshard", script}
wanted |= {"flatshard/_corpus.so"}
names = {name for name in names if ".dist-info/" not in name and name[-1] != "/"}
extension = {name for name in names if name.startswith("flatshard/_C.cpython")}
assert names - extension == wanted, names ^ wanted
assert len(extension) == 1, extension
assert wheel.read(script).startswith(b"#!python\n")

# The libraries that they need are from the system or from pip's packages. The program
# finds the latter next to its package.
SYSTEM = (
    r"(libstdc\+\+|libm|libgcc_s|libc|libpthread|libdl|librt|libgcov|ld-linux.*)\.so.*"
)
INSTALLED = r"lib(torch|c10)\w*\.so|lib(cudart|cublasLt|nccl)\.so\.\d+"
with tempfile.TemporaryDirectory() as folder:
    for name in ("flatshard/bin/flatshard", *extension):
        file = wheel.extract(name, folder)
        said = subprocess.run(
            ["readelf", "-d", file], capture_output=True, text=True, check=True
        ).stdout
        libraries = re.findall(r"\(NEEDED\).*\[(.+)\]", said)
        rest = [s for s in libraries if not re.fullmatch(f"{SYSTEM}|{INSTALLED}", s)]
        assert "libc10.so" in libraries and not rest, (name, libraries)
        paths = re.findall(r"\((?:RUNPATH|RPATH)\).*\[(.*)\]", said)
        paths = [s for s in ":".join(paths).split(":") if s]
        if name in extension:  # torch is loaded before it
            assert not paths, paths
        else:
            assert paths[0] == "$ORIGIN/../../torch/lib", paths
            assert all(s.startswith("$ORIGIN/../../") for s in paths), paths
