"""The commands of the program. They run the same Python code."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from flatshard import import_tokens, prepare
from tests.data.conftest import BUILD
from tests.data.corpora import texts, write


@pytest.fixture
def program():
    path = shutil.which("flatshard", path=str(BUILD))
    if not path:
        pytest.skip(f"no program in {BUILD}")

    def run(*arguments, **more):
        command = [path, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, **more)

    return run


def test_prepare_is_the_module(program, tmp_path):
    write(tmp_path, {"in/a.txt": "some text", "in/b.jsonl": '{"body": "more"}'})
    arguments = ["--input", tmp_path / "in", "--text-field", "body", "--output"]
    arguments += [tmp_path / "out", "--validation-fraction", "0"]
    done = program("data", "prepare", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith(program("data", "info", tmp_path / "out").stdout)
    assert texts(tmp_path / "out") == [b"some text", b"more"]
    shown = program("data", "show", tmp_path / "out", "--seq-len", 20).stdout
    assert "s[[ome text<|endoftext|>]]" in shown
    # An error is one line, with the program's exit code.
    done = program("data", "prepare", *arguments)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch("error: usage error: .* exists; give --force .*\n", done.stderr)
    done = program("data", "prepare", *arguments, "--force")
    assert done.returncode == 0
    # With the module only.
    run = [sys.executable, BUILD / "python/flatshard/_run.py", "prepare"]
    same = subprocess.run([*run, *arguments, "--force"], capture_output=True, text=True)
    assert same.stdout == done.stdout


def test_import_is_the_module(program, tmp_path):
    write(tmp_path, {"train.bin": b"a\0b\0\1\0"})
    arguments = ["--input", tmp_path / "train.bin", "--output", tmp_path / "out"]
    more = ["--tokenizer", "none", "--vocab-size", 99, "--end-of-document", 1]
    done = program("data", "import", *arguments, *more, "--validation-fraction", 0)
    wanted = f"train.bin: raw uint16, 3 tokens, 1 documents\nwrote {tmp_path / 'out'}\n"
    assert done.returncode == 0 and done.stdout.startswith(wanted)
    assert done.stdout.endswith(program("data", "info", tmp_path / "out").stdout)


@pytest.mark.parametrize(
    ("command", "module"), [("prepare", prepare), ("import", import_tokens)]
)
def test_the_program_and_the_module_have_the_same_options(
    program, capsys, command, module
):
    text = program("data", command, "--help").stdout
    # Options, and not the texts that mention others.
    listed = re.findall(r"^ +(-[^ ]+)", text, re.MULTILINE)
    wanted = {name for names in listed for name in names.split(",")}
    with pytest.raises(SystemExit):
        module.parse(["--none", "--input", "a", "--output", "b", "--tokenizer", "c"])
    parser = module.parser()
    found = {name for action in parser._actions for name in action.option_strings}
    assert wanted - {"--python"} == found


def test_errors_in_the_arguments(program, tmp_path):
    for arguments in ((), ("-i", "x", "-o", "y", "--nothing")):
        assert program("data", "prepare", *arguments).returncode == 2
    run = [sys.executable, BUILD / "python/flatshard/_run.py", "prepare"]
    done = subprocess.run([*run, "--nothing"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ")


def test_nobody_reads_the_summary(program, tmp_path):
    write(tmp_path, {"a.txt": "some text"})
    reader, writer = os.pipe()
    os.close(reader)
    arguments = [tmp_path / "a.txt", "--output", tmp_path / "out"]
    path = shutil.which("flatshard", path=str(BUILD))
    done = subprocess.run(
        [path, "data", "prepare", "--input", *map(str, arguments)], stdout=writer
    )
    os.close(writer)
    assert done.returncode == 141 and (tmp_path / "out/meta.json").exists()


def test_a_python_without_packages(program, tmp_path):
    write(tmp_path, {"in/a.txt": "some text", "python": "", "tokenizer.json": "{}"})
    # An interpreter without site packages. Byte tokens need none of them.
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' -S -I \"$@\"\n")
    python.chmod(0o755)
    arguments = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    arguments += ["--python", python]
    done = program("data", "prepare", *arguments)
    assert done.returncode == 0, done.stderr
    more = ["--tokenizer", tmp_path / "tokenizer.json", "--force"]
    done = program("data", "prepare", *arguments, *more)
    assert "needs the Python package 'tokenizers'; install it with: " in done.stderr
    assert done.returncode == 1 and (tmp_path / "out/meta.json").exists()
