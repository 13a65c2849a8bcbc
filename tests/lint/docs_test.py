"""What pages name is there: files, links, and a glossary that one can read.

usage: docs_test.py
"""

import re
import subprocess
import unittest
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PAGES = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
# Folders that paths in pages begin at.
STARTS = (".", "flatshard", "python/flatshard", "docs", "tests")
FILE = re.compile(r"`([a-z0-9_./]+/[a-z0-9_]+\.(?:h|cpp|cu|py|toml|sh))`")
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s]*)?\)")


def anchor(heading):
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower())
    return "#" + text.replace(" ", "-")


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
            ("reference/errors", "## Building a model", "## Exit codes", 25),
        ):
            page = (ROOT / f"docs/{name}.md").read_text()
            tables = page[page.index(begin) : page.index(end)]
            texts = re.findall(r"^\| .*?`([^`]+)` \|", tables, re.M)
            self.assertGreater(len(texts), at_least)
            for text in texts:
                self.assertTrue(text in code, f"{name}: {text}")

    def test_scripts_and_manifests_of_pages_are_whole(self):
        page = (ROOT / "docs/guides/cluster.md").read_text()
        scripts = re.findall(r"^```bash\n(.*?)^```$", page, re.M | re.S)
        self.assertEqual(len(scripts), 2)
        for script in scripts:
            done = subprocess.run(["bash", "-n"], input=script, text=True)
            self.assertEqual(done.returncode, 0, script)
        (manifest,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S)
        job = yaml.safe_load(manifest)
        self.assertEqual(job["kind"], "PyTorchJob")
        for name in ("Master", "Worker"):
            pod = job["spec"]["pytorchReplicaSpecs"][name]["template"]["spec"]
            mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
            self.assertEqual(mounts, {volume["name"] for volume in pod["volumes"]})

    def test_the_glossary_has_at_most_forty_nouns(self):
        text = (ROOT / "docs/internals/overview.md").read_text()
        rows = text[text.index("## The nouns") :].split("\n")[4:]
        nouns = [n for row in rows if row for n in row.split("|")[1].split(",")]
        self.assertLessEqual(len(nouns), 40)
        self.assertGreater(len(nouns), 20)


if __name__ == "__main__":
    unittest.main(verbosity=0)
