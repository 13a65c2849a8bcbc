"""scripts/check_layers finds each kind of break."""

import contextlib
import importlib.machinery
import importlib.util
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.dont_write_bytecode = True
SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "check_layers"
loader = importlib.machinery.SourceFileLoader("check_layers", str(SCRIPT))
spec = importlib.util.spec_from_loader("check_layers", loader)
check_layers = importlib.util.module_from_spec(spec)
loader.exec_module(check_layers)


class CheckLayers(unittest.TestCase):
    @contextlib.contextmanager
    def tree(self, **files):
        """Makes a tree of {folder__name: text}; `_dot_` stands for a dot."""
        with tempfile.TemporaryDirectory() as root:
            for name, text in files.items():
                path = Path(root, "flatshard", *name.split("__"))
                path = path.with_name(path.name.replace("_dot_", "."))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            yield root

    def check(self, **files):
        with self.tree(**files) as root:
            return check_layers.check(root)

    def check_names(self, *paths, twice=()):
        files = {path.replace(".", "_dot_"): "" for path in paths}
        with self.tree(**files) as root:
            return check_layers.check_names(root, dict.fromkeys(twice, "a reason"))

    def test_downward_is_fine(self):
        self.assertEqual(
            self.check(
                unit__a_dot_cpp='#include "flatshard/group/b.h"\n'
                "#include <ATen/core/Tensor.h>\n#include <vector>\n",
                group__CMakeLists_dot_txt="flatshard_library(group SOURCES b.cpp"
                " DEPS buffer)",
            ),
            [],
        )

    def test_upward_include(self):
        found = self.check(nn__linear_dot_h='\n#include "flatshard/unit/unit.h"\n')
        self.assertEqual(len(found), 1)
        self.assertTrue(found[0].startswith("flatshard/nn/linear.h:2: nn may"))
        self.assertIn("not flatshard/unit/unit.h", found[0])

    def test_models_know_no_sharding(self):
        for folder in ("comm", "buffer", "group", "unit"):
            for single in ("ops", "nn", "moe", "models"):
                text = f'#include "flatshard/{folder}/a.h"'
                self.assertTrue(self.check(**{f"{single}__a_dot_cpp": text}))

    def test_too_many_files(self):
        files = {f"moe__kernels__a{i}_dot_h": "" for i in range(40)}
        files |= {f"moe__a{i}_dot_h": "" for i in range(21)}
        found = self.check(**files)
        self.assertEqual(len(found), 1)
        self.assertTrue(found[0].startswith("flatshard/moe:0: 61 files"))
        files.popitem()
        self.assertEqual(self.check(**files), [])

    def test_rooms_of_a_group(self):
        self.assertEqual(
            self.check(
                train__run__a_dot_cpp='#include "flatshard/train/tools/b.h"',
                train__run__CMakeLists_dot_txt="flatshard_library(train_run SOURCES"
                " a.cpp DEPS train_tools core)",
            ),
            [],
        )
        found = self.check(
            train__config__a_dot_cpp='#include "flatshard/train/run/trainer.h"'
        )
        self.assertEqual(len(found), 1)
        self.assertIn("train/config may include", found[0])
        found = self.check(
            train__tools__CMakeLists_dot_txt="flatshard_library(train_tools SOURCES"
            " a.cpp DEPS train_run)"
        )
        self.assertIn("not train_run", found[0])

    def test_a_group_has_no_files(self):
        found = self.check(train__a_dot_cpp="int a;")
        self.assertEqual(found, ["flatshard/train/a.cpp:0: train has folders only"])
        self.assertTrue(self.check(train__misc__a_dot_cpp="int a;"))

    def test_sideways_include(self):
        self.assertTrue(
            self.check(unit__a_dot_cpp='#include "flatshard/models/llama.h"')
        )

    def test_torch_in_a_pure_folder(self):
        found = self.check(layout__a_dot_cpp="#include <c10/util/Exception.h>")
        self.assertIn("layout must not use torch", found[0])

    def test_torch_in_a_folder_that_says_pure(self):
        found = self.check(
            data__CMakeLists_dot_txt="flatshard_library(\n  data PURE SOURCES a)",
            data__a_dot_cpp="#include <torch/torch.h>",
        )
        self.assertIn("data must not use torch", found[0])

    def test_pure_folder_must_say_so(self):
        found = self.check(
            core__CMakeLists_dot_txt="flatshard_library(core SOURCES a.cpp)"
        )
        self.assertIn("mark it PURE", found[0])

    def test_upward_deps(self):
        text = "# DEPS cli\nflatshard_library(\n  comm SOURCES a.cpp DEPS core unit)"
        found = self.check(comm__CMakeLists_dot_txt=text)
        self.assertEqual(len(found), 1)
        self.assertIn("CMakeLists.txt:2: comm may link", found[0])

    def test_upward_link(self):
        text = "target_link_libraries(flatshard_comm PUBLIC flatshard_unit)"
        self.assertTrue(self.check(comm__CMakeLists_dot_txt=text))

    def test_an_encoding_in_code_for_any(self):
        text = "float8::Recipe r;"
        for name in ("unit__unit_dot_h", "optim__optimizer_dot_cpp"):
            found = self.check(**{name: text})
            self.assertEqual(len(found), 1)
            self.assertIn("names float8", found[0])
        self.assertEqual(self.check(group__plane_dot_h=text), [])

    def test_umbrella_header(self):
        self.assertTrue(self.check(unit__a_dot_cpp='#include "flatshard/flatshard.h"'))

    def test_relative_include(self):
        self.assertTrue(self.check(unit__a_dot_cpp='#include "unit.h"'))

    def test_unknown_folder(self):
        self.assertTrue(self.check(misc__a_dot_cpp="int a;"))

    def test_a_header_and_its_sources_share_a_name(self):
        self.assertEqual(
            self.check_names("nn__a.h", "nn__a.cpp", "nn__a.cu", "nn__a.cuh"), []
        )

    def test_a_name_in_two_folders(self):
        for second in ("moe__a.h", "moe__a.cpp", "nn__kernels__a.cu"):
            found = self.check_names("nn__a.h", second)
            self.assertEqual(len(found), 1)
            self.assertIn("a is in flatshard/", found[0])
            self.assertEqual(self.check_names("nn__a.h", second, twice="a"), [])

    def test_an_exception_is_for_two_folders(self):
        three = ("nn__a.h", "moe__a.h", "unit__a.h")
        self.assertEqual(len(self.check_names(*three, twice="a")), 1)

    def test_a_stale_exception(self):
        for paths in ((), ("nn__a.h",), ("nn__a.h", "nn__a.cpp")):
            found = self.check_names(*paths, twice="a")
            self.assertEqual(len(found), 1)
            self.assertIn("take it out of TWICE", found[0])

    def test_the_program_checks_names(self):
        with self.tree(nn__a_dot_h="", moe__a_dot_h="") as root:
            done = subprocess.run(
                [sys.executable, SCRIPT, root], capture_output=True, text=True
            )
        self.assertEqual(done.returncode, 1)
        self.assertIn("the base name a is in flatshard/moe and", done.stderr)

    def test_table_has_no_cycle(self):
        for folder, known in check_layers.ALLOWED.items():
            for other in known - {folder}:
                self.assertNotIn(folder, check_layers.ALLOWED[other])


if __name__ == "__main__":
    unittest.main(verbosity=0)
