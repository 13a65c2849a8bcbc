"""What the scripts say when something is missing: one line, a status that is not 0,
and nothing that the next call would trip over."""

import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = ("scripts", "cmake", "requirements.txt", "pyproject.toml")


class Scripts(unittest.TestCase):
    """Each on a copy of the scripts, whose .venv is a stand-in that runs this Python."""

    def setUp(self):
        self.root = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        for name in FILES:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, self.root / name)

    def program(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)

    def make_venv(self, name=".venv", installed=True):
        self.program(f"{name}/bin/python", f'exec "{sys.executable}" "$@"')
        if installed:
            torch = self.root / name / "lib/python3/site-packages/torch"
            (torch / "lib").mkdir(parents=True)
            (torch / "version.py").touch()
            (torch / "lib/libtorch_cpu.so").touch()
            shutil.copy(
                ROOT / "requirements.txt", self.root / name / "requirements.installed"
            )

    def call(self, *command, **environment):
        """The status, and the lines that `command` prints of Flatshard's."""
        kept = ("PATH", "HOME", "LANG")
        env = {k: os.environ[k] for k in kept if k in os.environ}
        env["PIP_CONFIG_FILE"] = os.devnull
        env["PATH"] = f"{self.root}/bin:{env['PATH']}"
        done = subprocess.run(
            command,
            cwd=self.root,
            env={**env, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout + done.stderr

    def expect(self, problem, *command, **environment):
        status, said = self.call(*command, **environment)
        self.assertNotEqual(status, 0, said)
        lines = [line for line in said.splitlines() if problem in line]
        self.assertEqual(len(lines), 1, said)
        self.assertTrue(lines[0].startswith("flatshard: "), said)
        return said

    def test_torch_out_of_range(self):
        for version in ("2.10.0", "2.16.0", "nightly", "2.11"):
            said = self.expect(
                f"TORCH={version}: expected a version of torch",
                "scripts/build",
                TORCH=version,
            )
            self.assertEqual(len(said.splitlines()), 1, said)
        self.assertFalse(list(self.root.glob(".venv*")))

    def test_torch_that_does_not_exist(self):
        self.make_venv(".venv-torch-2.12.99", installed=False)
        (self.root / "wheels").mkdir()
        (self.root / "wheels/torch-2.12.0-py3-none-any.whl").touch()
        for _ in range(2):
            self.expect(
                "pip knows no such version of torch",
                "scripts/bootstrap",
                TORCH="2.12.99",
                PIP_NO_INDEX="1",
                PIP_FIND_LINKS=str(self.root / "wheels"),
            )

    def test_no_network(self):
        # A version that nobody has, whatever runs this test.
        self.make_venv(".venv-torch-2.12.99", installed=False)
        for _ in range(2):
            self.expect(
                "pip reached no package index",
                "scripts/bootstrap",
                TORCH="2.12.99",
                PIP_INDEX_URL="http://127.0.0.1:9/simple",
            )
        self.assertFalse(list(self.root.glob(".venv*/requirements.installed")))

    def test_a_broken_venv_is_made_anew(self):
        self.make_venv()
        self.assertEqual(self.call("scripts/bootstrap")[0], 0)
        shutil.rmtree(self.root / ".venv/lib/python3/site-packages/torch")
        # What a whole `python3 -m venv` would take seconds for.
        self.program("bin/python3", 'mkdir -p "$3/bin"; exit 1')
        for _ in range(2):
            said = self.expect("'python3 -m venv .venv' failed", "scripts/bootstrap")
        self.assertIn(".venv is not whole; making it anew", said)
        (self.root / "bin/python3").unlink()
        self.make_venv()
        self.assertEqual(self.call("scripts/bootstrap")[0], 0)

    def test_a_full_disk_in_the_middle_of_a_build(self):
        self.make_venv()
        full = "echo 'cc1plus: fatal error: No space left on device' >&2; exit 1"
        configures = '[ "$1" != --build ] && exit 0'
        self.program("bin/cmake", f"{configures}\n{full}")
        self.expect("the disk that holds", "scripts/build")
        self.program("bin/cmake", full)
        self.expect("the disk that holds", "scripts/build")
        self.program("bin/cmake", "exit 0")
        self.assertEqual(self.call("scripts/build")[0], 0)

    def test_a_build_that_fails_shows_the_compilers_words(self):
        self.make_venv()
        self.program(
            "bin/cmake",
            '[ "$1" != --build ] && exit 0\n'
            "echo '[1/9] Building CXX object objects/flatshard/unit/CMakeFiles/x.o'\n"
            "echo 'FAILED: x.o'; echo 'x.cpp:1: error: no'; exit 1",
        )
        said = self.expect("the build failed", "scripts/build")
        self.assertIn("x.cpp:1: error: no", said)


if __name__ == "__main__":
    unittest.main()
