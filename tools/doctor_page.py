"""Rewrites the checks in docs/doctor.md from their docstrings: `python tools/doctor_page.py docs/doctor.md`."""

import sys
from pathlib import Path

from verl_ext.doctor import diagnose  # noqa: F401 (registers the checks)
from verl_ext.doctor.checks import CHECKS

START, END = "<!-- checks -->\n", "<!-- /checks -->"


def table() -> str:
    """Returns a row for each check: its name, and the first paragraph of its docstring."""
    about = {name: " ".join((check.__doc__ or "").partition("\n\n")[0].split()) for name, check in CHECKS.items()}
    rows = [f"| `{name}` | {text} |" for name, text in about.items()]
    return "\n".join(["| check | what it finds |", "|---|---|", *rows, ""])


def main(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    path.write_text(f"{before}{START}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
