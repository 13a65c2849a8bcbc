"""The inputs of a dataset. They and their errors are found before anything is tokenized."""

import os
from dataclasses import dataclass

from flatshard._data import core
from flatshard._data.failures import Failure, expect
from flatshard._data.formats import FORMATS, decide_formats, read_documents
from flatshard._data.input_files import FoundFiles, find_input_files


@dataclass
class Survey:
    """The files with documents, and counts of their texts."""

    found: FoundFiles  # files that hold documents, with their numbers
    num_empty: int = 0  # documents that were left out
    nbytes: int = 0  # of all texts, in UTF-8
    hash: str = ""  # of the texts and the files' names

    @property
    def files(self):
        return self.found.files

    @property
    def num_documents(self):
        return sum(file.num_documents for file in self.files)

    def describe_files(self):
        """Returns "3 of rows (2 JSON, 1 Parquet), 1 of plain text, 1 compressed, 2 links
        followed, 0 skipped"."""
        counts = dict.fromkeys(FORMATS, 0)
        for file in self.files:
            counts[file.format.name] += 1
        titles = {name: FORMATS[name].title for name in FORMATS if FORMATS[name].title}
        rows = ", ".join(
            f"{counts[name]} {title}"
            for name, title in titles.items()
            if counts[name] or name in ("json", "parquet")
        )
        compressed = sum(bool(file.compression) for file in self.files)
        parts = [
            f"{sum(counts[name] for name in titles)} of rows ({rows})",
            f"{counts['text']} of plain text",
            f"{counts['bytes']} of bytes" if counts["bytes"] else "",
            f"{compressed} compressed" if compressed else "",
            f"{self.found.num_links} links followed",
            f"{len(self.found.skipped)} skipped",
        ]
        return ", ".join(filter(None, parts))


def survey_inputs(inputs, wanted, options):
    """Finds the files of `inputs` and reads them once."""
    survey = Survey(find_input_files(inputs))
    found, num_found = survey.found, len(survey.files)
    decide_formats(found, wanted)
    hash = len(found.files)
    for file in found.files:
        hash = core.mix(hash, os.fsencode(file.name))
        file.num_documents = 0
        for _, text in read_documents(file, options):
            if not text:
                survey.num_empty += 1
                continue
            file.num_documents += 1
            survey.nbytes += len(text)
            hash = core.mix(hash, text)
    survey.hash = f"{hash:016x}"
    empty = [file.name for file in found.files if not file.num_documents]
    found.skipped += [(name, "without documents") for name in empty]
    found.files = [file for file in found.files if file.num_documents]
    expect(
        found.files,
        f"--input: none of {num_found} files has a document, so the dataset would be "
        f"empty: {found.describe_skipped()}",
        Failure,
    )
    return survey


def choose_validation(files, fraction):
    """Returns a byte for each document of `files`: 1 for validation, if the hash of its
    name falls below `fraction`. With two or more, each split gets one at
    least."""
    chosen, ends = bytearray(), [(2.0, 0), (-1.0, 0)]
    for file in files:
        has_rows = bool(file.format is None or file.format.title)
        for row in range(file.num_documents):
            draw = core.draw(f"{file.name}#{row}" if has_rows else file.name)
            if draw < ends[0][0]:
                ends[0] = draw, len(chosen)
            if draw > ends[1][0]:
                ends[1] = draw, len(chosen)
            chosen.append(draw < fraction)
    if len(chosen) >= 2 and fraction > 0:
        if not any(chosen):
            chosen[ends[0][1]] = 1
        elif all(chosen):
            chosen[ends[1][1]] = 0
    return chosen
