"""MkDocs loads this file as a hook (mkdocs.yml): it adds the pages outside docs/ and fixes links.

On a code host, a page links to any file of the repository, relative to its own folder. The site has docs/ at its top
and the other pages in their folders below it: docs/guard.md becomes guard.md, recipes/slurm/README.md keeps its name. A
link to a file that is no page goes to the repository's web address, `repo_url` of mkdocs.yml. Without an address, only
the link's text is kept.
"""

import posixpath
import re
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
BRANCH = "HEAD"
FENCE = re.compile(r"^(```.*?^```$)", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\[\]]*)\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")


def outside() -> list[str]:
    """Returns the pages that are not in docs/, by their paths in the repository."""
    names = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    return [*names, *(file.relative_to(ROOT).as_posix() for file in sorted((ROOT / "recipes").rglob("README.md")))]


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    from mkdocs.structure.files import File

    for name in outside():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    name = page.file.src_uri
    pages = {file.src_uri for file in files}
    return linked(markdown, name if name in outside() else f"docs/{name}", pages, config.repo_url)


def linked(markdown: str, origin: str, pages: Collection[str], address: str | None) -> str:
    """Returns a page's text with its links as the site has them.

    Args:
        origin: the page's path in the repository.
        pages: the paths of all pages of the site.
        address: the repository's web address, without a slash at its end.
    """
    here = posixpath.dirname(site_path(origin))

    def link(match: re.Match[str]) -> str:
        image, text, path, anchor = match.groups(default="")
        if not path:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), path))
        for one in (target, f"{target}/README.md"):
            if site_path(one) in pages:
                return f"{image}[{text}]({posixpath.relpath(site_path(one), here or '.')}{anchor})"
        if not (ROOT / target).exists():
            return match[0]  # MkDocs reports it
        if not address:
            return text
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{image}[{text}]({address}/{kind}/{BRANCH}/{target}{anchor})"

    parts = FENCE.split(markdown)
    parts[::2] = [LINK.sub(link, part) for part in parts[::2]]
    return "".join(parts)


def site_path(path: str) -> str:
    return path.removeprefix("docs/")
