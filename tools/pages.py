"""Writes the parts of docs/ that follow from the code: `python tools/pages.py`.

They are between `<!-- made by tools.MODULE.FUNCTION -->` and `<!-- end -->`. The function returns Markdown.
"""

import re
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE = re.compile(r"^(<!-- made by (tools\.\w+)\.(\w+) -->\n\n).*?(?=^<!-- end -->$)", flags=re.DOTALL | re.MULTILINE)


def filled(markdown: str) -> str:
    """Returns a page's text with these parts made anew."""
    return MADE.sub(lambda found: f"{found[1]}{getattr(import_module(found[2]), found[3])()}\n\n", markdown)


def table(rows: Iterable[Iterable[str]]) -> str:
    """Returns a table in Markdown; the first row has the titles."""
    titles, *others = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    head, *body = (f"| {' | '.join(row)} |" for row in (titles, *others))
    return "\n".join((head, "|---" * len(titles) + "|", *body))


def main() -> None:
    sys.path.insert(0, str(ROOT))
    for file in sorted((ROOT / "docs").glob("*.md")):
        old = file.read_text(encoding="utf-8")
        if (new := filled(old)) != old:
            file.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
