"""Wheels that hold nothing but a pointer to what is installed for this Python: from
them pip fills an isolated environment without an index and without copies.

usage: pointer_wheels.py FOLDER NAME...
"""

import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

folder = Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
for name in sys.argv[2:]:
    try:
        number = version(name)
    except PackageNotFoundError:
        number = "99"  # a program of the system
    module = name.replace("-", "_")
    info = f"{module}-{number}.dist-info"
    files = {
        f"{module}_is_there.pth": sysconfig.get_paths()["purelib"] + "\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: flatshard\n"
        "Root-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD"
    files[record] = "".join(f"{path},,\n" for path in [*files, record])
    wheel = folder / f"{module}-{number}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
