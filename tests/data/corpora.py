"""Creates and reads datasets."""

import contextlib
import gzip
import io
import json

import pytest

from flatshard import import_tokens, prepare
from flatshard._data.failures import Failure


def write(folder, files):
    """Writes texts or bytes by their names."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def options_of(module, folder, inputs, more):
    arguments = ["--output", str(folder / "out"), "--input", *map(str, inputs)]
    for name, value in more.items():
        option = f"--{name.replace('_', '-')}"
        arguments += [option] if value is True else [f"{option}={value}"]
    return module.parse(arguments)


def made(folder, *inputs, **more):
    """Returns the Survey and meta.json of a dataset at folder/out, after replacing
    it."""
    options = options_of(prepare, folder, inputs, {"force": True, **more})
    survey, meta, _ = prepare.prepare(options)
    return survey, meta


def problem(folder, *inputs, module=prepare, code="format", **more):
    """Returns the text of the error, and checks that no dataset remains."""
    function = getattr(module, module.__name__.rpartition(".")[2])
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(Failure) as caught:
        function(options_of(module, folder, inputs, more))
    assert caught.value.code == code, caught.value
    assert {path.name for path in folder.iterdir()} == before
    return str(caught.value)


def imported(folder, *inputs, **more):
    defaults = {"tokenizer": "none", "vocab_size": 100, "end_of_document": 9}
    more = {**defaults, "validation_fraction": 0, "force": True, **more}
    lines, _ = import_tokens.import_tokens(
        options_of(import_tokens, folder, inputs, more)
    )
    return lines


def output_of(module, *arguments):
    """Returns what a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        module.main([str(argument) for argument in arguments])
    return out.getvalue()


def read_meta(folder):
    return json.loads((folder / "meta.json").read_text())


def split_of(folder, name="train"):
    """Returns the documents of a split as lists of tokens, each with its end, and their
    masks, or None."""
    import array

    meta = read_meta(folder)
    (split,) = [split for split in meta["splits"] if split["name"] == name]
    tokens = array.array("H" if meta["dtype"] == "uint16" else "I")
    mask, masked = b"", "trained_tokens" in split
    for shard in range(len(split["shard_tokens"])):
        tokens.frombytes((folder / f"{name}-{shard:05}.bin").read_bytes())
        if masked:
            mask += (folder / f"{name}-{shard:05}.mask.bin").read_bytes()
    begins = array.array("Q", (folder / f"{name}.documents.bin").read_bytes())
    ranges = list(zip(begins, begins[1:], strict=False))
    masks = [list(mask[a:b]) for a, b in ranges] if masked else None
    return [tokens[a:b].tolist() for a, b in ranges], masks


def texts(folder, name="train"):
    """Returns the documents of a split of byte tokens, without their ends."""
    found, _ = split_of(folder, name)
    assert all(document[-1] == 256 for document in found)
    return [bytes(document[:-1]) for document in found]


def gzipped(data):
    return gzip.compress(data.encode() if isinstance(data, str) else data, mtime=0)
