"""The files that --input names."""

import os

import pytest
from flatshard._data.failures import Failure
from flatshard._data.input_files import (
    check_unchanged,
    find_input_files,
    is_beside_data,
)

from tests.data.corpora import write

FILES = {
    "b.py": "bb",
    "a.txt": "a",
    "x/c.py": "ccc",
    "x/y/d.py": "dddd",
    "x/y/e.txt": "",
    "x/.hidden/f.py": "f",
    ".g.py": "g",
}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, FILES)


def names(folder, *inputs):
    found = find_input_files([os.path.join(folder, path) for path in inputs])
    return [file.name for file in found.files]


def problem(folder, *inputs):
    with pytest.raises(Failure) as caught:
        names(folder, *inputs)
    assert caught.value.code == "io"
    return str(caught.value)


@pytest.mark.parametrize(
    ("glob", "wanted"),
    [
        ("*.py", "b.py"),
        ("**/*.py", "b.py x/c.py x/y/d.py"),
        ("x/**/*.py", "c.py y/d.py"),
        ("x/*/?.py", "y/d.py"),
        ("**/[cd].*", "x/c.py x/y/d.py"),
        ("x/.*/*.py", ".hidden/f.py"),
        ("x/**", "c.py y/d.py y/e.txt"),
        ("", "a.txt b.py x/c.py x/y/d.py x/y/e.txt"),
        ("x/", "c.py y/d.py y/e.txt"),
        (".g.py", ".g.py"),
    ],
)
def test_globs_folders_and_files(folder, glob, wanted):
    assert names(folder, glob) == wanted.split()


def test_relative_globs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    for glob in ("**/*.py", "./**/*.py"):
        found = find_input_files([glob]).files
        assert [file.name for file in found] == ["b.py", "x/c.py", "x/y/d.py"]


def test_each_file_once(folder):
    found = names(folder, "x/c.py", "x/**/*.py", "./x/c.py")
    assert found == ["c.py", "y/d.py"]


def test_sizes(folder):
    assert find_input_files([str(folder / "x/c.py")]).files[0].nbytes == 3


def test_links_are_followed_once(folder, tmp_path_factory):
    other = write(
        tmp_path_factory.mktemp("other"), {"part/h.py": "h", "part/i.py": "i"}
    )
    links = {
        "x/part": other / "part",
        "x/twice": other / "part",
        "x/loop": "..",
        "x/a-link": "y",
        "x/a.py": "c.py",
    }
    for name, to in links.items():
        (folder / name).symlink_to(to)
    (other / "part/loop").symlink_to("..")
    for glob in ("x/**/*.py", "x/**", "x"):
        found = [name for name in names(folder, glob) if name.endswith(".py")]
        assert found == ["c.py", "part/h.py", "part/i.py", "y/d.py"], glob
    assert names(folder, "x/*/*.py") == ["part/h.py", "part/i.py", "y/d.py"]
    found = find_input_files([str(folder / "x")])
    assert found.num_links == 4
    loops = [name for name, why in found.skipped if "folder that it is in" in why]
    assert loops == ["loop", "part/loop"]


def test_a_link_to_nothing_is_an_error(folder):
    (folder / "x/z.py").symlink_to("gone.py")
    for glob in ("x", "x/*.py", "**/*.py"):
        text = problem(folder, glob)
        assert "cannot follow" in text and "x/z.py" in text
        assert "restore what the link names" in text
    assert names(folder, "x/y/*.py") == ["d.py"]
    assert "is a link to nothing" in problem(folder, "x/z.py")


def test_files_beside_the_data_are_named(folder):
    more = {"x/README.md": "r", "x/LICENSE": "l", "only/README.md": "r"}
    more["x/corpus/meta.json"] = '{\n  "format": "flatshard-corpus"\n}'
    write(folder, more)
    found = find_input_files([str(folder / "x")])
    assert len(found.files) == 3
    assert sorted(found.skipped) == [
        (".hidden", "hidden"),
        ("LICENSE", "beside the data"),
        ("README.md", "beside the data"),
        ("corpus", "a tokenized dataset"),
    ]
    # A pattern that names them, and a name.
    assert names(folder, "x/*.md") == ["README.md"]
    assert names(folder, "x/LICENSE") == ["LICENSE"]
    text = problem(folder, "only")
    assert "matches no file with data (README.md is beside the data" in text


def test_a_file_that_changes_is_noticed(folder):
    files = find_input_files([str(folder / "x")]).files
    check_unchanged(files)
    write(folder, {"x/c.py": "longer than it was"})
    with pytest.raises(Failure, match=r"x/c\.py changed while it was read"):
        check_unchanged(files)
    (folder / "x/c.py").unlink()
    with pytest.raises(Failure, match=r"x/c\.py changed while it was read"):
        check_unchanged(files)


def test_no_match_is_an_error_that_names_the_input(folder):
    for path in ("*.rs", "nothing.txt", "x/*/*.rs"):
        text = problem(folder, path)
        assert path in text and "matches no file" in text
    assert "there is no folder" in problem(folder, "nowhere/*.py")
    os.mkfifo(folder / "pipe")
    assert "is a pipe or a device" in problem(folder, "pipe")
    with pytest.raises(Failure, match="at least one file, folder or glob"):
        find_input_files([])


def test_names_beside_the_data():
    for name in (
        "README.md readme README_de.md LICENSE LICENSE-APACHE Licence.txt .gitattributes "
        "dataset_infos.json a.sha256"
    ).split():
        assert is_beside_data(name), name
    for name in (
        "a.md licenses.jsonl readme.jsonl notice.json notices.txt license-texts.jsonl"
    ).split():
        assert not is_beside_data(name), name
