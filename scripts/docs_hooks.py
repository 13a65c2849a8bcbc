"""For mkdocs: links to files outside of docs/ become the file's name, since a site does
not have them."""

import os
import re

LINK = re.compile(r"\[([^\]]+)\]\(([^)#\s:]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown, page, **_):
    folder = os.path.dirname(os.path.join("docs", page.file.src_uri))

    def outside(link):
        text, target, _ = link.groups()
        path = os.path.normpath(os.path.join(folder, target))
        if path.startswith("docs/"):
            return link[0]
        name = f"`{path}`"
        return (
            name
            if text.strip("`") in (path, os.path.basename(path))
            else f"{text} ({name})"
        )

    return LINK.sub(outside, markdown)
