"""The files that --input names."""

import ctypes
import json
import os
import stat
from dataclasses import dataclass, field, replace
from typing import Any

from flatshard._data.failures import Unreadable, cannot_read, expect

_STEMS = ("readme", "license", "licence", "copying", "notice", "citation")
_NAMES = {
    *("dataset_infos.json", "dataset_info.json", "dataset_dict.json"),
    *("croissant.json", "_success", "_metadata", "_common_metadata", "thumbs.db"),
    *("desktop.ini", "sha256sums", "sha512sums", "sha1sums", "md5sums"),
}
_SUFFIXES = (".md5", ".sha1", ".sha256", ".sha512", ".crc")
_libc = ctypes.CDLL(None)  # fnmatch of the shell's globs


@dataclass
class InputFile:
    """A file to read."""

    path: str
    name: str  # relative to its input; the split hashes it
    nbytes: int = 0  # on disk
    modified: int = 0
    listed: bool = False  # in a folder or by a glob, not named explicitly
    is_link: bool = False  # it, or a folder on the way to it, is a link
    format: Any = None  # see formats.py
    compression: str = ""  # "gzip", "zstd" or ""
    num_documents: int = 1  # that are not empty


@dataclass
class FoundFiles:
    """The files, and what was left out: (name, reason)."""

    files: list[InputFile] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    num_links: int = 0  # that were followed

    def describe_skipped(self, most=10):
        shown = ", ".join(f"{name} ({reason})" for name, reason in self.skipped[:most])
        more = len(self.skipped) - most
        return f"{shown} and {more} more" if more > 0 else shown


def is_beside_data(name):
    """Returns whether a file of this name accompanies data."""
    name = name.lower()
    if name.startswith(".") or name in _NAMES or name.endswith(_SUFFIXES):
        return True

    # LICENSE-APACHE and README_de.md, and not licenses.jsonl or notice.jsonl.
    def is_end(rest):
        if not rest or rest[0] in "-_":
            return ".json" not in rest
        return rest in (".md", ".txt", ".rst", ".cff", ".html", ".bib")

    return any(name.startswith(s) and is_end(name[len(s) :]) for s in _STEMS)


def _is_beside_dataset(folder, name):
    """Returns whether a file of a folder of `datasets` has none of its rows."""
    try:
        with open(os.path.join(folder, "state.json"), "rb") as file:
            parts = json.load(file)["_data_files"]
        return name not in [part["filename"] for part in parts]
    except (OSError, ValueError, LookupError, TypeError):
        return False


def _real_path(path):
    try:
        return os.path.realpath(path or ".", strict=True)
    except OSError as error:
        raise Unreadable(
            f"cannot follow {path}: {error.strerror}; restore what the link names, or "
            "remove the link"
        ) from error


def _is_corpus(folder):
    try:
        with open(os.path.join(folder, "meta.json"), "rb") as file:
            return b'"flatshard-corpus"' in file.readlines(200)[1]
    except (OSError, IndexError):
        return False


@dataclass
class _Folder:
    path: str
    relative: str = ""  # to the fixed part of the pattern
    at: int = 0  # the component for its entries
    is_link: bool = False


class _Walker:
    """Walks a pattern's components. Links to folders are kept for later, so that a file
    that a path without links reaches has the name of that path."""

    def __init__(self, components, found):
        self.components, self.found = components, found
        self.takes_all = not components[-1].strip("*")
        self.visited = set()
        self.files = []
        self.pending = []

    def walk(self, base):
        self.pending.append(_Folder(base))
        for folder in self.pending:  # which grows
            self.walk_folder(folder)

    def skip(self, name, reason):
        self.found.skipped.append((name, reason))

    def walk_folder(self, folder):
        key = (_real_path(folder.path), folder.at)
        if key in self.visited:
            return
        self.visited.add(key)
        component = self.components[folder.at]
        is_any, is_last = component == "**", folder.at + 1 == len(self.components)
        if is_any and not is_last:
            self.walk_folder(replace(folder, at=folder.at + 1))
        try:
            entries = list(os.scandir(folder.path or "."))
        except OSError as error:
            reason = f"cannot read folder {folder.path}: {error.strerror}"
            raise Unreadable(reason) from error
        # By name, so that the order is the same on every machine.
        for entry in sorted(entries, key=lambda entry: os.fsencode(entry.name)):
            name = os.path.join(folder.relative, entry.name)
            # Only a pattern that starts with a dot finds hidden names, as in a shell.
            if entry.name.startswith(".") and not component.startswith("."):
                if self.takes_all:
                    self.skip(name, "hidden")
                continue
            names = os.fsencode(component), os.fsencode(entry.name)
            if not is_any and _libc.fnmatch(*names, 0) != 0:
                continue
            by_link = entry.is_symlink()
            inner = _Folder(
                os.path.join(folder.path, entry.name),
                name,
                folder.at if is_any else folder.at + 1,
                folder.is_link or by_link,
            )
            if by_link:
                _real_path(inner.path)  # a link to nothing is an error
            if os.path.isdir(inner.path):
                if is_any or not is_last:
                    self.enter(inner, by_link)
            elif is_last:
                self.add(inner, by_link)

    def enter(self, folder, by_link):
        if _is_corpus(folder.path):
            self.skip(folder.relative, "a tokenized dataset")
        elif not by_link:
            self.walk_folder(folder)
        else:
            inside = _real_path(os.path.dirname(folder.path))
            if f"{inside}/".startswith(f"{_real_path(folder.path)}/"):
                self.skip(folder.relative, "a link to a folder that it is in")
            else:
                self.found.num_links += 1
                self.pending.append(folder)

    def add(self, file, by_link):
        folder, name = os.path.split(file.path)
        if not os.path.isfile(file.path):
            self.skip(file.relative, "no regular file")
        elif self.takes_all and (
            is_beside_data(name) or _is_beside_dataset(folder, name)
        ):
            self.skip(file.relative, "beside the data")
        else:
            self.found.num_links += by_link
            found = _input_file(file.path, file.relative, file.is_link)
            self.files.append(replace(found, listed=True))


def _input_file(path, name, is_link):
    status = os.stat(path)
    return InputFile(path, name, status.st_size, status.st_mtime_ns, is_link=is_link)


def _has_wildcard(text):
    return any(c in text for c in "*?[")


def _expand(path, found):
    if os.path.isfile(path):
        is_link = os.path.islink(path)
        found.num_links += is_link
        return [_input_file(path, os.path.basename(path), is_link)]
    base, pattern = "", []
    if os.path.isdir(path):
        base, pattern = path, ["**"]
    elif _has_wildcard(path):
        base = "/" if path.startswith("/") else ""
        for part in filter(None, path.split("/")):
            if pattern or _has_wildcard(part):
                pattern.append(part)
            else:
                base = os.path.join(base, part)
    files, num_skipped = [], len(found.skipped)
    if pattern and (not base or os.path.isdir(base)):
        walker = _Walker(pattern, found)
        walker.walk(base)
        files = walker.files
    # The error is not "no file" when the file exists and is out of reach.
    exists = True
    try:
        status = os.stat((base or ".") if pattern else path)
        is_file = bool(pattern) or stat.S_ISREG(status.st_mode)
        text = (
            f"--input '{path}' is a pipe or a device; expected a file, a folder or a "
        )
        expect(is_file, text + "glob", Unreadable)
    except PermissionError as error:
        raise cannot_read(f"--input '{path}'", error) from error
    except OSError:
        exists = False
    text = f"--input '{path}' is a link to nothing; restore what it names"
    expect(exists or not os.path.islink(path), text, Unreadable)
    hint = f" (there is no folder {base})" if pattern and base and not exists else ""
    if len(found.skipped) > num_skipped:
        name, reason = found.skipped[-1]
        hint += f" with data ({name} is {reason}; a file that --input names itself is "
        hint += "taken)"
    expect(files, f"--input '{path}' matches no file{hint}", Unreadable)
    return sorted(files, key=lambda file: os.fsencode(file.name))


def find_input_files(inputs):
    """Returns the regular files that `inputs` name, each once.

    An input is a file, a folder (all files below it), or a glob: `*`, `?` and `[abc]`
    within a name, `**` for any number of folders. Hidden files are left out unless a
    pattern starts with a dot. In folders, and in globs that end with `*` or `**`, files
    that are not data are left out. Links are followed: a file or folder that several
    paths reach is read once, by a path without links if there is one.

    Order: inputs as given, within one by name."""
    expect(inputs, "--input: expected at least one file, folder or glob")
    found = FoundFiles()
    files = [file for path in inputs for file in _expand(path, found)]
    seen, taken = set(), set()
    for is_link in (False, True):
        for at, file in enumerate(files):
            real = _real_path(file.path)
            if file.is_link == is_link and real not in seen:
                seen.add(real)
                taken.add(at)
    for at, file in enumerate(files):
        if at in taken:
            found.files.append(file)
        elif file.is_link:
            found.skipped.append((file.name, "a link to a file that is included"))
    return found


def check_unchanged(files):
    for file in files:
        try:
            now = _input_file(file.path, file.name, file.is_link)
        except OSError:
            now = InputFile(file.path, file.name, -1)
        expect(
            (now.nbytes, now.modified) == (file.nbytes, file.modified),
            f"{file.path} changed while it was read; prepare the dataset again when the "
            "file is complete",
            Unreadable,
        )
