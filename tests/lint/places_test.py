"""Places of sources are found by function and tokens, wherever the function is."""

import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import places  # noqa: E402

CPP = """
namespace flatshard {
struct Slot {
  int size() const { return count_ * kSize; }
  int count_ = 0;
};
/// A comment with count_ * kSize.
Pool::~Pool() { release(a, b); }
FLATSHARD_HOST_DEVICE inline int encode(int a, int b) { return std::max(a, b); }
template <typename T>
std::vector<T>& Pool::of(const T& a, int b) {
  const auto f = [&](int b) { return release(a, b); };
  return f(b), release(a, 2);
}
}  // namespace flatshard
"""
PYTHON = """
LIMITS = {"a": 1}
class Reader:
    @property
    def size(self):
        def inner(a, b):
            if a:
                return release(a, b)
        return inner
"""


class Places(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = Path(folder.name)

    def write(self, path, text):
        path = self.root / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def find(self, name, old):
        """Returns (file, text of the line) of each place."""
        index = places.Index(self.root)
        for place in index.find(name, old):
            text = place.path.read_text()
            line = text[text.rfind("\n", 0, place.begin) + 1 :].split("\n")[0]
            yield place.path.name, line.strip()

    def test_names(self):
        self.write("flatshard/a.cpp", CPP)
        self.write("python/b.py", PYTHON)
        for name, old in {
            "Slot::size": "count_ * kSize",
            "Slot": "int count_",
            "Pool::~Pool": "release(a, b)",
            "encode": "std::max(a, b)",
            "Pool::of": "release(a, 2)",
            "Reader.size.inner": "release(a, b)",
            "Reader.size": "return inner",
            "LIMITS": '"a": 1',
        }.items():
            self.assertEqual(len(list(self.find(name, old))), 1, name)
        self.assertEqual(list(self.find("Slot::size", "release(a, b)")), [])
        self.assertEqual(list(self.find("Line::size", "count_ * kSize")), [])

    def test_a_function_that_moved_and_was_wrapped(self):
        self.write(
            "flatshard/other/b.cpp",
            CPP.replace("release(a, b)", "release(\n    a,\n    b)"),
        )
        found = list(self.find("Pool::~Pool", "release(a, b);"))
        self.assertEqual(found, [("b.cpp", "Pool::~Pool() { release(")])

    def test_functions_of_one_name(self):
        self.write("flatshard/a.cpp", CPP)
        self.write("flatshard/b.cpp", CPP.replace("Pool", "Heap").replace("max", "min"))
        self.assertEqual(len(list(self.find("encode", "max"))), 1)
        self.assertEqual(len(list(self.find("of", "release(a, 2)"))), 2)
        self.assertEqual(len(list(self.find("Heap::of", "release(a, 2)"))), 1)

    def test_words_are_whole(self):
        self.write("flatshard/a.cpp", "int f() { return size_of + size_; }")
        self.assertEqual(len(list(self.find("f", "size_"))), 1)

    def test_lines_are_indented_as_the_first(self):
        path = self.write("python/b.py", PYTHON)
        index = places.Index(self.root)
        (place,) = index.find("inner", "if a:\n return")
        new = places.replaced(path.read_text(), place, "if b:\n    pass\nreturn")
        self.assertIn(
            "            if b:\n                pass\n            return rel", new
        )

    def test_a_character_of_several_bytes(self):
        self.write(
            "flatshard/a.cpp",
            "// \u00e9\u00e9\u00e9\nint f() { return a; }\nint g() { return a; }",
        )
        self.assertEqual(len(list(self.find("g", "return a"))), 1)


if __name__ == "__main__":
    unittest.main()
