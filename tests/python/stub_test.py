"""`_C.pyi` has the types of the extension."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/python_stubs"


def test_the_stub_is_the_extensions(world):
    if world > 1:
        pytest.skip("one rank is enough")
    ran = subprocess.run(
        [sys.executable, SCRIPT, "--check"], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
