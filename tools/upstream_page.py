"""The page of all changes: `python tools/upstream_page.py > docs/upstream.md`."""

from collections.abc import Iterable

from needs import HOOKS

from verl_ext.base.changes import TABLE, Change

HEAD = """# Changes to verl and vLLM

Made by `python tools/upstream_page.py` from [verl_ext/base/changes.py](../verl_ext/base/changes.py) and
[tools/needs.py](../tools/needs.py); a test holds them together.

Nothing is forked. Subclasses, arguments, and what is registered where verl offers it (losses, estimators, a platform,
a checkpoint engine) are not listed here. Listed is everything else that changes verl, vLLM, torch, transformers or
Python while they run, with the versions that it was written for. What is changed has to be there, most of it with the
same parameters; else a `PatchError` names what moved. `verl-ext doctor` says which changes fit the installed
versions; whether another still works, the test in its row tells.
"""
COLUMNS = ("change", "what", "why", "when", "written for", "a test that notices")

NEEDS = """
## What each hook needs of verl

Of verl as it stands: that something is there, that it takes these parameters (`...` for more that may follow), and
behind a colon what its body has to name for our part to be called. Each file also needs what it imports of verl.

```bash
python tools/needs.py                  # of the installed verl
python tools/needs.py PATH/TO/verl     # of a checkout: which hooks this version breaks, and by what
```

It reads the sources, and neither imports nor runs them. That all is there does not prove that it still means the same:
the tests above do. The verl versions that were read so, and those that were run: [support.md](support.md).
"""


def page() -> str:
    needs = [(f"[{hook.name}](../verl_ext/{hook.file})", _lines(hook.needs)) for hook in HOOKS]
    return "\n".join([HEAD, *_table(COLUMNS, map(_cells, TABLE)), NEEDS, *_table(("hook", "needs"), needs)]) + "\n"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _lines(needs: tuple[str, ...]) -> str:
    return "<br>".join(f"`{need}`" for need in needs)


def _cells(change: Change) -> tuple[str, ...]:
    name = f"[{change.name}](../verl_ext/{change.file})"
    return name, change.target, change.why, change.when, change.written_for, f"`{change.test}`"


if __name__ == "__main__":
    print(page(), end="")
