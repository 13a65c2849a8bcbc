"""A hook of mkdocs: CONTRIBUTING.md is a page of the site, too. Links to other files
outside of docs/ become the file's name, since a site does not have them."""

import os
import re
from pathlib import Path

from mkdocs.structure.files import File

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")
# {page of the site: file at the root of the repository}
PAGES_OF_ROOT = {"dev/contributing.md": "CONTRIBUTING.md"}


def on_files(files, config, **_):
    root = Path(config.docs_dir).parent
    for page, path in PAGES_OF_ROOT.items():
        files.append(File.generated(config, page, content=(root / path).read_text()))
    return files


def on_page_markdown(markdown, page, **_):
    site_folder = os.path.dirname(os.path.join("docs", page.file.src_uri))
    is_of_root = page.file.src_uri in PAGES_OF_ROOT
    folder = "" if is_of_root else site_folder
    pages = {path: f"docs/{page}" for page, path in PAGES_OF_ROOT.items()}

    def on_site(link):
        text, target, anchor = link.groups()
        path = os.path.normpath(os.path.join(folder, target))
        path = pages.get(path, path)
        if path.startswith("docs/"):
            return f"[{text}]({os.path.relpath(path, site_folder)}{anchor or ''})"
        name = f"`{path}`"
        return (
            name
            if text.strip("`") in (path, os.path.basename(path))
            else f"{text} ({name})"
        )

    return LINK.sub(on_site, markdown)
