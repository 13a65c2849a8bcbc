"""Each script of bench/ shows its options, and each command that a page or a docstring
names has options that the script accepts. Nothing is measured."""

import argparse
import contextlib
import functools
import importlib
import io
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"
SCRIPTS = sorted(path.name for path in BENCH.glob("*.py"))
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md")
COMMAND = re.compile(r"(?:python3 |torchrun [^\n]*?)?(bench/\w+\.py\b.*)", re.DOTALL)
# In an empty folder, so that a block runs no program: its commands are written down, a
# line each with its words quoted.
RECORD = """
PATH=
record() { printf '%q ' "$@"; echo; }
python3() { record "$@"; }
torchrun() { record "$@"; }
"""


class Parsed(Exception):
    """The command line was read: nothing further is run."""


def parse(script, options):
    """Reads a command line by a script's own parser; returns an error or None."""
    from harness.command_line import Parser

    parse_args = Parser.parse_args

    def parse_only(parser):
        parse_args(parser)
        raise Parsed

    said = io.StringIO()
    with (
        mock.patch.object(Parser, "parse_args", parse_only),
        mock.patch.object(sys, "argv", [script, *options]),
        contextlib.redirect_stdout(said),
        contextlib.redirect_stderr(said),
    ):
        try:
            runpy.run_path(str(BENCH / script), run_name="__main__")
        except Parsed:
            return None
        except SystemExit as ended:
            if ended.code == 0:
                return None
    return f"{script} {shlex.join(options)}: {said.getvalue().strip()}"


@functools.cache
def has_flatshard():
    try:
        importlib.import_module("flatshard")
    except ImportError:
        return False
    return True


def script_of(words):
    """Returns the script and its options of a command, or None."""
    for i, word in enumerate(words):
        if word.startswith("bench/") and word.endswith(".py"):
            return word.removeprefix("bench/"), words[i + 1 :]
    return None


def split_blocks(text):
    """Returns the blocks without a language, and the text outside all blocks."""
    blocks, outside, fence = [], [], None
    for line in text.splitlines(keepends=True):
        if line.startswith("```"):
            fence = line.strip() if fence is None else None
            if fence == "```":
                blocks.append("")
        elif fence is None:
            outside.append(line)
        elif fence == "```":
            blocks[-1] += line
    return blocks, "".join(outside)


def commands(text):
    """Yields the words of the commands of blocks, and of those in backticks."""
    blocks, outside = split_blocks(text)
    for block in blocks:
        if "bench/" in block:
            run = ["bash", "-c", RECORD + block]
            with tempfile.TemporaryDirectory() as empty:
                done = subprocess.run(run, capture_output=True, text=True, cwd=empty)
            yield from map(shlex.split, done.stdout.splitlines())
    for quoted in re.findall(r"`([^`]+)`", outside):
        if found := COMMAND.fullmatch(quoted.strip()):
            words = shlex.split(found[1])
            # The bare name is not a command; N is any number.
            yield ["1" if w == "N" else w for w in words] + ["--help"][len(words) - 1 :]


def docstring_commands(text):
    """Yields the words of the commands that a script's docstring has."""
    for line in text.split('"""')[1].replace("\\\\\n", " ").splitlines():
        if re.match(r"(PYTHONPATH=\S+ )?(python3|torchrun|bench/)", line):
            yield shlex.split(line)


class BenchTest(unittest.TestCase):
    def setUp(self):
        path = mock.patch.object(sys, "path", [str(BENCH), *sys.path])
        path.start()
        self.addCleanup(path.stop)

    def expect(self, script, options):
        with self.subTest(script=script, options=options):
            self.assertIn(script, SCRIPTS)
            if script.startswith("python_") and not has_flatshard():
                self.skipTest("needs the extension, in PYTHONPATH=build/python")
            self.assertIsNone(parse(script, options))

    def test_scripts_import_fully_shard_without_the_root_in_their_path(self):
        if not has_flatshard():
            self.skipTest("needs the extension, in PYTHONPATH=build/python")
        program = (
            "from harness.peers import shard_function; shard_function('flatshard')"
        )
        # `python3 bench/script.py` does the same: its folder is the first of the path.
        program = f"import sys; sys.path[0] = {str(BENCH)!r}; {program}"
        line = [sys.executable, "-c", program]
        done = subprocess.run(line, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)

    def test_long_settings_give_short_names_that_differ(self):
        from harness.programs import file_name

        self.assertEqual(file_name("8B, ZeRO-3", 2, "lr=1e+4"), "8B-ZeRO-3-2-lr=1e+4")
        variants = importlib.import_module("variants")
        chosen = [f"model.init_from=/{'models/' * 50}{i}" for i in range(2)]
        with tempfile.TemporaryDirectory() as folder:
            args = argparse.Namespace(
                program="false", config="", set=[], warmup=1, steps=1, out=Path(folder)
            )
            with contextlib.redirect_stdout(io.StringIO()):
                for each in chosen:
                    found = variants.row_of(args, 2, "1B", [each])
                    self.assertIn("false ended with 1", found["error"])
            self.assertEqual(len(list(Path(folder).glob("*.log"))), 2)

    def test_each_script_shows_its_options(self):
        for script in SCRIPTS:
            self.expect(script, ["--help"])

    def test_each_command_of_a_page_has_options_that_exist(self):
        found = 0
        for page in (path for name in PAGES for path in sorted(ROOT.glob(name))):
            for words in commands(page.read_text()):
                command = script_of(words)
                if command:
                    found += 1
                    self.expect(*command)
        self.assertGreater(found, 30)

    def test_each_command_of_a_docstring_has_options_that_exist(self):
        for script in SCRIPTS:
            lines = list(docstring_commands((BENCH / script).read_text()))
            self.assertTrue(lines, script)
            for words in lines:
                self.expect(*script_of(words))


if __name__ == "__main__":
    unittest.main()
