"""Pages of the site that lie outside docs/ in the repository, and the links to them.

A page of the repository, such as SECURITY.md, is shown as project/SECURITY.md. Links work in both places: in the
repository as they are written, on the site as they are rewritten here. README.md is the site's first page.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PROJECT_PAGES = (
    *("SECURITY.md", "CHANGELOG.md", "CONTRIBUTING.md"),
    *("benchmarks/NOTES.md", "tests/README.md", "demo/README.md"),
)
HOME = "index.md"
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the repository that lie outside docs/."""
    files.remove(files.src_uris["README.md"])  # the index of docs/ for readers of the repository; the site has its menu
    files.append(File.generated(config, HOME, content=(ROOT / "README.md").read_text()))
    for name in PROJECT_PAGES:
        files.append(File.generated(config, f"project/{name}", content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Rewrites links between pages to where the site has them. A link to a file that it lacks becomes a path."""
    here = page.file.src_uri
    place = _in_repository(here)

    def rewrite(match: re.Match[str]) -> str:
        opening, target, anchor = match[1], match[2], match[3] or ""
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(place), target))
        on_site = _on_site(path)
        if on_site is not None and files.get_file_from_path(on_site) is not None:
            return f"{opening}{posixpath.relpath(on_site, posixpath.dirname(here) or '.')}{anchor})"
        return f"`{path}`"

    return LINK.sub(rewrite, markdown)


def _in_repository(page: str) -> str:
    if page == HOME:
        return "README.md"
    return page.removeprefix("project/") if page.startswith("project/") else f"docs/{page}"


def _on_site(path: str) -> str | None:
    """Returns the page that shows a file of the repository, or None."""
    if path in ("README.md", "docs/README.md", "docs"):
        return HOME
    if path in PROJECT_PAGES:
        return f"project/{path}"
    return path.removeprefix("docs/") if path.startswith("docs/") else None
