"""`_C.pyi` has the types of the extension."""

import subprocess
import sys
from pathlib import Path

import pytest

from flatshard import _C

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/python_stubs"


def test_the_stub_is_the_extensions(world):
    if world > 1:
        pytest.skip("one rank is enough")
    pinned = f"torch=={_C.torch_version.split('+')[0]}\n"
    if pinned not in (ROOT / "requirements.txt").read_text():
        pytest.skip("pybind11 of another torch may write signatures in another form")
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
