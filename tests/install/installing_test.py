"""Tests the choice of torch, nvcc and CUDA code of an installation, without torch and
without a compiler: torch_fit.py, cuda_choice.py and wheel_metadata.py.

usage: installing_test.py
"""

import contextlib
import io
import os
import sys
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "cmake"), str(ROOT / "python/flatshard")]
import build_backend  # noqa: E402
import cuda_choice  # noqa: E402
import torch_fit  # noqa: E402
import wheel_metadata  # noqa: E402


class Folder(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)

    def torch(self, version, cuda):
        """A site-packages folder with such a torch; gives the package."""
        package = self.folder / "site/torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "version.py").write_text(
            "from typing import Optional\n"
            f"__version__ = '{version}'\ndebug = False\n"
            f"cuda: Optional[str] = {cuda and repr(cuda)}\n"
        )
        return package

    def nvcc(self, folder, version):
        path = self.folder / folder / "nvcc"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            f"#!/bin/sh\necho 'Cuda tools, release {version}, V{version}'\n"
        )
        path.chmod(0o755)
        return path


class TorchFit(Folder):
    def misfit(self, built, torch):
        build = SimpleNamespace(VERSION="0.2.0", TORCH=built[0], CUDA=built[1])
        return torch_fit.misfit(build, torch and (Path("/site/torch"), *torch))

    def test_fits(self):
        cuda = ("2.11.0+cu130", "13.0")
        for torch in (cuda, ("2.11.1+cu130", "13.0"), ("2.11.0+cu132", "13.2")):
            self.assertIsNone(self.misfit(cuda, torch))
        for torch in (cuda, ("2.11.0+cpu", "")):
            self.assertIsNone(self.misfit(("2.11.0+cpu", ""), torch))

    def test_names_the_wheel_that_fits(self):
        python = "cp%d%d" % sys.version_info[:2]
        for torch, wheel in {
            ("2.12.1+cu130", "13.0"): "cu130torch2.12",
            ("2.1.0+cu130", "13.0"): "cu130torch2.1",
            ("2.110.0+cu130", "13.0"): "cu130torch2.110",
            ("2.11.0+cpu", ""): "cputorch2.11",
            ("2.11.0+cu128", "12.8"): "cu128torch2.11",
        }.items():
            said = self.misfit(("2.11.0+cu130", "13.0"), torch)
            self.assertIn(f"install flatshard-0.2.0+{wheel}-{python}-{python}-", said)
            self.assertIn("expected torch 2.11.* with CUDA 13, got torch", said)

    def test_no_torch(self):
        said = self.misfit(("2.11.0+cu130", "13.0"), None)
        end = "torch is not installed; pip install 'torch==2.11.*'"
        self.assertTrue(said.endswith(end), said)

    def test_reads_the_torch_that_an_import_would_take(self):
        self.torch("2.12.0+cpu", None)
        (self.folder / "site/torch/__init__.py").touch()
        saved = sys.modules.pop("torch", None)
        self.addCleanup(lambda: saved and sys.modules.update(torch=saved))
        with mock.patch.object(sys, "path", [str(self.folder / "site"), *sys.path]):
            folder, version, cuda = torch_fit.installed_torch()
        self.assertEqual((version, cuda), ("2.12.0+cpu", ""))
        self.assertEqual(folder, self.folder / "site/torch")


class CudaChoice(Folder):
    """FLATSHARD_CUDA, GPUs and toolkits decide. Nothing is run but stand-ins."""

    def decide(self, wish="auto", gpu=False, torch=("2.11.0+cu130", "13.0"), **env):
        package = self.torch(*torch)
        env = {"PATH": str(self.folder / "bin"), "CUDA_HOME": "/none", **env}
        with (
            mock.patch.dict(os.environ, env, clear=True),
            mock.patch.object(cuda_choice, "has_gpu", lambda: gpu),
            mock.patch.object(cuda_choice, "ROOT", self.folder),
            mock.patch.object(sys, "path", [str(self.folder / "normal")]),
        ):
            return cuda_choice.decide(package, wish)

    def test_off_is_a_choice_with_a_reason(self):
        self.assertEqual(self.decide("off", gpu=True).reason, "FLATSHARD_CUDA=off")
        choice = self.decide()
        self.assertFalse(choice.build)
        self.assertIn("no GPU here", choice.reason)
        choice = self.decide(gpu=True, torch=("2.11.0+cpu", None))
        self.assertEqual(
            (choice.build, choice.reason), (False, "this torch has no CUDA")
        )

    def test_a_gpu_or_on_wants_nvcc(self):
        for choice in (self.decide("on"), self.decide(gpu=True)):
            self.assertTrue(choice.lacks_nvcc)
            self.assertIn(
                "expected nvcc of torch's CUDA 13.0, got no nvcc", choice.reason
            )

    def test_takes_nvcc_of_the_major_version_that_torch_has(self):
        old = self.nvcc("bin", "12.8")
        choice = self.decide("on")
        self.assertTrue(choice.lacks_nvcc)
        self.assertIn(f"got {old} of CUDA 12.8", choice.reason)
        self.assertFalse(self.decide().build)
        places = (
            "normal/nvidia/cu13/bin",  # pip's isolated build
            "site/nvidia/cu13/bin",  # next to torch
            ".cuda-13.0/nvidia/cu13/bin",  # scripts/bootstrap
            "toolkit/bin",
        )
        for place in places:
            new = self.nvcc(place, "13.1")
            choice = self.decide(CUDA_HOME=str(self.folder / "toolkit"))
            self.assertEqual((choice.build, choice.nvcc), (True, new))

    def test_what_is_installed(self):
        packages = cuda_choice.requirements("13.0")
        self.assertEqual(len(packages), 5)
        self.assertIn("nvidia-cuda-nvcc==13.0.*", packages)
        self.assertEqual(cuda_choice.requirements("12.8"), [])
        self.assertIn("CUDA_HOME", cuda_choice.how_to_install("12.8"))

    def test_mistakes_are_named(self):
        for wish, torch, said in (
            ("yes", ("2.11.0+cu130", "13.0"), "auto, on or off, got yes"),
            ("on", ("2.11.0+cpu", None), "expected a torch with CUDA, got one without"),
        ):
            with self.assertRaisesRegex(SystemExit, said):
                self.decide(wish, torch=torch)

    def test_installs_once_and_wholly(self):
        """Runs with a pip that does its work, and one that fails."""
        package = self.torch("2.11.0+cu130", "13.0")
        place = self.nvcc("pip_has", "13.0")
        python = self.folder / "python"
        env = {"PATH": os.environ["PATH"], "CUDA_HOME": "/none", "FLATSHARD_CUDA": "on"}

        def install(script):
            python.write_text(f"#!/bin/bash\n{script}\n")
            python.chmod(0o755)
            with (
                mock.patch.dict(os.environ, env, clear=True),
                mock.patch.object(cuda_choice, "ROOT", self.folder),
                mock.patch.object(cuda_choice.shutil, "which", lambda name: None),
                contextlib.redirect_stdout(io.StringIO()) as said,
            ):
                cuda_choice.install(package, python)
            return said.getvalue()

        fails = 'while [ "$1" != --target ]; do shift; done; mkdir -p "$2"; exit 1'
        with self.assertRaisesRegex(SystemExit, "FLATSHARD_CUDA=off builds for CPUs"):
            install(fails)
        self.assertFalse(list(self.folder.glob(".cuda*")))
        works = (
            'while [ "$1" != --target ]; do shift; done\n'
            'mkdir -p "$2/nvidia/cu13/bin" && '
            f'cp {place} "$2/nvidia/cu13/bin/" && echo "$@" >{self.folder}/asked'
        )
        self.assertIn("installing it into", install(works))
        self.assertIn("nvidia-nvvm==13.0.*", (self.folder / "asked").read_text())
        self.assertEqual(install("exit 1"), "")  # it exists


class BuildBackend(Folder):
    """Tests the answers that pip gets before it builds."""

    def requires(self, compiler, headers=None, **env):
        """Returns the requirements with a compiler that finds no header but
        `headers`."""
        program = self.folder / "compiler"
        folder = headers or self.folder / "empty"
        folder.mkdir(exist_ok=True)
        program.write_text(
            f'#!/bin/sh\nexec {compiler} -nostdinc -isystem {folder} "$@"\n'
        )
        program.chmod(0o755)
        env = {"CXX": str(program), "PATH": os.environ["PATH"], **env}
        package = self.torch("2.11.0+cu130", "13.0")
        with (
            mock.patch.dict(os.environ, {"CUDA_HOME": "/none", **env}, clear=True),
            mock.patch.object(wheel_metadata, "torch_folder", lambda: package),
            mock.patch.object(cuda_choice, "find_nvcc", lambda *a: (None, [])),
            mock.patch.object(build_backend.backend, *self.nothing()),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            return build_backend.get_requires_for_build_wheel()

    def nothing(self):
        return "get_requires_for_build_wheel", lambda settings: []

    def test_one_line_installs_what_is_missing(self):
        headers = (
            "nlohmann-json3-dev libtomlplusplus-dev libcli11-dev libboost-dev "
            "libxxhash-dev"
        )
        line = f"apt-get install -y --no-install-recommends {headers}"
        with self.assertRaisesRegex(SystemExit, f"sudo {line}$"):
            self.requires("c++")
        line = line.replace("nlohmann", "g[+][+] nlohmann")
        with self.assertRaisesRegex(SystemExit, f"sudo {line}$"):
            self.requires("c++", CXX="no-such-compiler")
        (self.folder / "include/CLI").mkdir(parents=True)
        (self.folder / "include/CLI/CLI.hpp").touch()
        with self.assertRaises(SystemExit) as error:
            self.requires("c++", self.folder / "include")
        self.assertNotIn("libcli11-dev", str(error.exception))

    def test_nvcc_is_a_requirement_where_none_is_found(self):
        with mock.patch.object(build_backend, "missing_packages", list):
            wanted = self.requires("c++", FLATSHARD_CUDA="on")
            self.assertIn("nvidia-cuda-nvcc==13.0.*", wanted)
            self.assertEqual(self.requires("c++", FLATSHARD_CUDA="off"), [])


class Metadata(Folder):
    def test_a_wheel_requires_the_minor_version_that_it_is_built_with(self):
        for version, minor in (("2.11.0+cu130", "2.11"), ("2.14.1", "2.14")):
            package = self.torch(version, "13.0")
            with mock.patch.object(wheel_metadata, "torch_folder", lambda: package):
                requires = wheel_metadata.dynamic_metadata("dependencies")
                with mock.patch.dict(os.environ, {"FLATSHARD_CUDA": "off"}):
                    version = wheel_metadata.dynamic_metadata("version")
            self.assertEqual(requires, [f"torch=={minor}.*"])
            self.assertRegex(version, rf"^\d+\.\d+\.\d+\+cputorch{minor}$")
            self.assertEqual(wheel_metadata.label(package, True), f"cu130torch{minor}")

    def test_its_label_is_the_one_that_the_check_names(self):
        package = self.torch("2.13.0+cu130", "13.0")
        for with_cuda, cuda in ((True, "13.0"), (False, "")):
            self.assertEqual(
                wheel_metadata.label(package, with_cuda),
                torch_fit.label("2.13.0+cu130", cuda),
            )


if __name__ == "__main__":
    unittest.main()
