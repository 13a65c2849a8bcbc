"""The scripts report a missing part with one line and a status that is not 0. They
leave nothing that the next call would trip over."""

import hashlib
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
    """Each test uses a copy of the scripts, with a stand-in for .venv that runs this
    Python."""

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
        """Returns the status, and the lines that Flatshard's scripts print."""
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
        # A version that does not exist, whatever runs this test.
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
        # A real `python3 -m venv` would need seconds.
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

    def test_a_build_prints_how_to_have_its_program(self):
        self.make_venv()
        self.program("bin/cmake", "exit 0")
        self.program("build/flatshard", "exit 0")
        for targets in ([], ["flatshard"]):
            status, said = self.call("scripts/build", *targets)
            self.assertEqual(status, 0, said)
            self.assertIn(f'export PATH="{self.root}/build:$PATH"', said)
        path = f"{self.root}/build:{self.root}/bin:{os.environ['PATH']}"
        self.assertNotIn("export PATH", self.call("scripts/build", PATH=path)[1])

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

    def demo(self, *arguments, gpus=0, cuda="13.0", **environment):
        """Returns the arguments of `scripts/demo` for `flatshard train`, on a machine
        with `gpus`."""
        if not (self.root / ".venv").exists():
            self.make_venv()
        self.program(
            ".venv/bin/python",
            f'[[ "$*" == *device_count* ]] && echo {gpus} && exit\n'
            f'[[ "$*" == *stdlib* ]] && echo {self.root}/library && exit\n'
            f'exec "{sys.executable}" "$@"',
        )
        (self.root / "library").mkdir(exist_ok=True)
        (self.root / "library/text.py").write_bytes(b"#" * 5_000_000)
        (self.root / "build/python/flatshard").mkdir(parents=True, exist_ok=True)
        (self.root / "build/python/flatshard/_build.py").write_text(
            f'CUDA = "{cuda}"\n'
        )
        self.program("scripts/bootstrap", "exit 0")
        self.program("scripts/build", "exit 0")
        self.program("bin/nvidia-smi", f"exit {int(gpus == 0)}")
        self.program(
            "build/flatshard",
            'for run in outputs/demo/run outputs/demo/moe; do mkdir -p "$run"\n'
            'echo \'{"validation_loss": 1.5}\' >"$run/metrics.jsonl"; done\n'
            '[ "$1" = train ] && echo "${*:2}" >asked\nexit 0',
        )
        status, said = self.call("scripts/demo", *arguments, **environment)
        asked = self.root / "asked"
        return status, said, asked.read_text() if asked.exists() else ""

    @unittest.skipIf(list(Path("/dev").glob("nvidia[0-9]*")), "has GPUs of its own")
    def test_the_demo_takes_what_the_machine_has(self):
        cpus = "--device cpu --nproc 2"
        for gpus, ranks in ((1, 1), (3, 3)):
            status, said, asked = self.demo(gpus=gpus)
            self.assertEqual(status, 0, said)
            self.assertIn(f"--device cuda --nproc {ranks} ", asked)
            local = {1: 8, 3: 3}[gpus]
            self.assertIn(f"training.local_batch_size={local} ", asked)
            self.assertIn(f"training.global_batch_size={max(8, local * gpus)}", asked)
        status, said, asked = self.demo("--experts", gpus=6)
        self.assertIn("parallelism.expert_parallel_degree=2", asked)
        for call in (
            {},
            {"gpus": 2, "DEVICE": "cpu"},
            {"gpus": 2, "cuda": ""},  # reported, and not a surprise
        ):
            status, said, asked = self.demo(**call)
            self.assertEqual((status, asked), (0, f"examples/demo.toml {cpus}\n"), said)
            self.assertIn("two CPU processes", said)
            for person in ("text", "Hugging Face model", "PyTorch module"):
                self.assertRegex(said, rf"With a? ?{person},")
        self.assertIn("this build has no CUDA code", said)

    def test_the_demo_refuses_a_device_that_is_not_there(self):
        for device, problem in (("cuda", "expected a GPU"), ("gpu", "cpu or cuda")):
            status, said, asked = self.demo(DEVICE=device)
            self.assertEqual((status, asked), (1, ""), said)
            self.assertIn(f"DEVICE={device}", said)
            self.assertIn(problem, said)

    def test_a_wheel_for_a_python_that_is_not_there(self):
        for version, problem in (
            ("3.12.1", "expected a version of Python such as PYTHON=3.12"),
            ("/usr/bin/python3", "expected a version of Python such as PYTHON=3.12"),
            ("3.99", "expected python3.99 in PATH, or one of pyenv's"),
        ):
            self.expect(problem, "scripts/wheel", FLATSHARD_PYTHON_VERSION=version)
        self.assertFalse(list(self.root.glob(".venv*")))

    def test_a_folder_of_wheels_is_an_index(self):
        dist = self.root / "dist"
        dist.mkdir()
        self.expect("expected flatshard-*.whl", "scripts/wheel_index", "dist")
        name = "flatshard-0.2.0+cu130torch2.11-cp312-cp312-linux_x86_64.whl"
        (dist / name).write_bytes(b"a wheel")
        status, said = self.call("scripts/wheel_index", "dist")
        self.assertEqual(status, 0, said)
        digest = hashlib.sha256(b"a wheel").hexdigest()
        page = (dist / "flatshard/index.html").read_text()
        href = f"../{name.replace('+', '%2B')}#sha256={digest}"
        self.assertIn(f'<a href="{href}">{name}</a>', page)
        self.assertIn('<a href="flatshard/">', (dist / "index.html").read_text())


if __name__ == "__main__":
    unittest.main()
