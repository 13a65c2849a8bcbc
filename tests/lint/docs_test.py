"""Everything that pages name exists: files, links, and a readable glossary.

usage: docs_test.py
"""

import ast
import re
import shutil
import subprocess
import tomllib
import unittest
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Folders that paths in pages may be relative to.
STARTS = (".", "flatshard", "python/flatshard", "docs", "tests")
FILE = re.compile(r"`([a-z0-9_./]+/[a-z0-9_]+\.(?:h|cpp|cu|py|toml|sh))`")
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")


# The fields that the page uses of kubeflow.org/v1 PyTorchJob and of a pod, with their
# types: (type, values), a list of one schema, or a dict of fields whose names end with !
# where they are required.
# Source: the custom resource definition of kubeflow/training-operator 1.9, and the API of
# Kubernetes 1.31.
TEXT = (str, None)
COUNT = (int, None)
POD = {
    "spec!": {
        "containers!": [
            {
                "name!": (str, {"pytorch"}),  # the operator looks for it
                "image!": TEXT,
                "command": [TEXT],
                "resources": {"limits": {"nvidia.com/gpu": COUNT}},
                "volumeMounts": [{"name!": TEXT, "mountPath!": TEXT}],
            }
        ],
        "volumes": [
            {
                "name!": TEXT,
                "persistentVolumeClaim": {"claimName!": TEXT},
                "emptyDir": {"medium": (str, {"", "Memory"})},
            }
        ],
    }
}
REPLICAS = {
    "replicas": COUNT,
    "restartPolicy": (str, {"Always", "OnFailure", "Never", "ExitCode"}),
    "template!": POD,
}
PYTORCH_JOB = {
    "apiVersion!": (str, {"kubeflow.org/v1"}),
    "kind!": (str, {"PyTorchJob"}),
    "metadata!": {"name!": TEXT},
    "spec!": {
        "nprocPerNode": TEXT,
        "runPolicy": {"backoffLimit": COUNT},
        "pytorchReplicaSpecs!": {"Master": REPLICAS, "Worker": REPLICAS},
    },
}


def misfits(value, schema, where="job"):
    """Yields where `value` differs from `schema`."""
    if isinstance(schema, tuple):
        kind, values = schema
        if type(value) is not kind or (values and value not in values):
            yield f"{where}: expected {kind.__name__} {values or ''}, got {value!r}"
    elif type(value) is not type(schema):
        yield f"{where}: expected a {type(schema).__name__}, got {value!r}"
    elif isinstance(schema, list):
        for i, item in enumerate(value):
            yield from misfits(item, schema[0], f"{where}[{i}]")
    else:
        fields = {name.rstrip("!"): inner for name, inner in schema.items()}
        for name in schema:
            if name.endswith("!") and name[:-1] not in value:
                yield f"{where}: lacks {name[:-1]}"
        for name, inner in value.items():
            if name in fields:
                yield from misfits(inner, fields[name], f"{where}.{name}")
            else:
                yield f"{where}: has no field {name}"


def anchor(heading):
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return "#" + text.replace(" ", "-")


def section_of(text, section):
    """The words below a heading, up to the next one of its level or a higher one."""
    found, level, is_code = [], 0, False
    for line in text.splitlines():
        is_code ^= line.lstrip().startswith("```")
        head = None if is_code else re.match(r"(#+) (.*)", line)
        if head and level and len(head[1]) <= level:
            break
        if head and anchor(head[2]) == section:
            level = len(head[1])
        elif level:
            found += line.split()
    return " ".join(found)


def blocks(language):
    """Yields the blocks of code in a language, with their pages."""
    for page in PAGES:
        for block in re.findall(
            rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S
        ):
            yield page, block


class Docs(unittest.TestCase):
    def test_files_that_pages_name_exist(self):
        for page in PAGES:
            for name in FILE.findall(page.read_text()):
                there = any((ROOT / start / name).exists() for start in STARTS)
                self.assertTrue(there, f"{page.name}: no file {name}")

    def test_links_lead_somewhere(self):
        for page in PAGES:
            for path, section in LINK.findall(page.read_text()):
                target = (page.parent / path) if path else page
                self.assertTrue(target.exists(), f"{page.name}: no {path}")
                if section and target.suffix == ".md":
                    headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
                    found = {anchor(heading) for heading in headings}
                    self.assertIn(section, found, f"{page.name}: {path}{section}")

    def test_texts_of_errors_are_those_of_the_code(self):
        code = "".join(
            path.read_text()
            for folder in ("flatshard", "python/flatshard", "scripts")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".cpp", ".h", ".py", "") and path.is_file()
        )
        # Texts of several lines are literals after each other.
        code = re.sub(r'"\s*\n\s*[fR]?"', "", code)
        for name, begin, end, at_least in (
            ("guides/troubleshooting", "## Errors about", "## Ranks differ", 8),
            ("reference/errors", "## Building a model", "## Exit codes", 20),
        ):
            page = (ROOT / f"docs/{name}.md").read_text()
            tables = page[page.index(begin) : page.index(end)]
            texts = re.findall(r"^- .*?`([^`]+)`: ", tables, re.M)
            self.assertGreater(len(texts), at_least)
            for text in texts:
                self.assertTrue(text in code, f"{name}: {text}")

    def test_keys_of_configs_exist(self):
        keys, section = set(), ""
        for line in (ROOT / "docs/reference/config.md").read_text().splitlines():
            if head := re.match(r"## \[(\w+)\]", line):
                section = head[1]
            elif key := re.match(r"### `(\w+)`: ", line):
                keys.add(f"{section}.{key[1]}")
        checked = 0
        for page, block in blocks("toml"):
            config = tomllib.loads(block)
            if "base" in config:  # the table of a GPU
                continue
            for name, values in config.items():
                for key in values:
                    self.assertIn(f"{name}.{key}", keys, page.name)
                    checked += 1
        self.assertGreater(checked, 50)

    def test_python_of_pages_is_python_and_names_what_exists(self):
        package = ROOT / "python/flatshard"
        for page, block in blocks("python"):
            try:
                tree = ast.parse(block)
            except SyntaxError as error:
                self.fail(f"{page.name}: {error}:\n{block}")
            for node in ast.walk(tree):
                if not isinstance(node, ast.ImportFrom) or not node.module:
                    continue
                first, *path = node.module.split(".")
                if first != "flatshard":
                    continue
                file = package.joinpath(*path).with_suffix(".py")
                folder = package.joinpath(*path)
                if not path or not file.exists():
                    file = folder / "__init__.py"
                text = file.read_text()
                for alias in node.names:
                    if not (folder / f"{alias.name}.py").exists():
                        self.assertRegex(text, rf"\b{alias.name}\b", page.name)

    def test_questions_are_answered_where_their_page_says(self):
        page = ROOT / "tests/lint/questions.md"
        asked = set()
        readers = page.read_text().split("\n## ")[1:]
        self.assertEqual(len(readers), 3)
        for reader in readers:
            rows = re.findall(
                r'^- (.*\?) \[.*\]\((.*?\.md)(#.*?)\): "(.*)"$', reader, re.M
            )
            self.assertEqual(len(rows), 10, reader[:40])
            for question, name, section, words in rows:
                found = section_of((page.parent / name).read_text(), section)
                self.assertTrue(found, f"{name} has no section {section}")
                self.assertTrue(words in found, f"{name}{section}: {words}")
                asked.add(question)
        self.assertEqual(len(asked), 30)

    def test_scripts_of_the_cluster_page_pass_shellcheck(self):
        page = (ROOT / "docs/guides/cluster.md").read_text()
        scripts = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
        self.assertEqual(len(scripts), 2)
        shellcheck = shutil.which("shellcheck")
        for script in scripts:
            self.assertTrue(script.startswith("#!/bin/bash\n#SBATCH "), script)
            command = [shellcheck, "-"] if shellcheck else ["bash", "-n"]
            done = subprocess.run(command, input=script, text=True)
            self.assertEqual(done.returncode, 0, script)

    def test_the_manifest_fits_its_schema(self):
        page = (ROOT / "docs/guides/cluster.md").read_text()
        (manifest,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
        job = yaml.safe_load(manifest)
        self.assertEqual(list(misfits(job, PYTORCH_JOB)), [])
        for name in ("Master", "Worker"):
            pod = job["spec"]["pytorchReplicaSpecs"][name]["template"]["spec"]
            mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
            self.assertEqual(mounts, {volume["name"] for volume in pod["volumes"]})
        # A number in place of nprocPerNode's text, and a field that does not exist.
        job["spec"] = job["spec"] | {"nprocPerNode": 8, "nodes": 4}
        self.assertEqual(len(list(misfits(job, PYTORCH_JOB))), 2)

    def test_cards_are_whole(self):
        cards = sorted((ROOT / "examples/cards").glob("*.yaml"))
        self.assertGreater(len(cards), 2)
        for path in cards:
            card = yaml.safe_load(path.read_text())
            self.assertTrue({"title", "command", "measured"} <= card.keys(), path)
            self.assertIn(f"outputs/cards/{path.stem}", card["command"])
            if card["measured"]:
                named = {
                    "date",
                    "commit",
                    "machine",
                    "ms_per_step",
                    "peak_gib",
                    "losses",
                }
                self.assertTrue(named <= card["measured"].keys(), path)

    def test_written_pages_have_at_most_thirty_seven_thousand_words(self):
        # Without the bars of tables. scripts/docs_reference writes the two others.
        made = {ROOT / "docs/reference" / name for name in ("config.md", "cli.md")}
        pages = set((ROOT / "docs").rglob("*.md")) - made
        word = re.compile(r"\S*\w\S*")
        words = sum(len(word.findall(page.read_text())) for page in pages)
        self.assertLessEqual(words, 37_000)
        readme = (ROOT / "README.md").read_text()
        self.assertLessEqual(readme.count("\n"), 130)

    def test_no_prose_line_is_longer_than_140_columns(self):
        for page in PAGES:
            fence = False
            for number, line in enumerate(page.read_text().splitlines(), 1):
                fence ^= line.lstrip().startswith("```")
                command = re.fullmatch(r"`[^`]*`\.?", line)
                if not fence and not line.startswith(("|", "#")) and not command:
                    self.assertLessEqual(len(line), 140, f"{page.name}:{number}")

    def test_the_glossary_has_at_most_forty_nouns(self):
        text = (ROOT / "docs/internals/overview.md").read_text()
        rows = re.findall(r"^- (.*?) \(`", text[text.index("## The nouns") :], re.M)
        nouns = [noun for row in rows for noun in row.split(", ")]
        self.assertLessEqual(len(nouns), 40)
        self.assertGreater(len(nouns), 20)


if __name__ == "__main__":
    unittest.main(verbosity=0)
