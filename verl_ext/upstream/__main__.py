"""The page of all changes: `python -m verl_ext.upstream > docs/upstream.md`."""

from verl_ext.upstream.changes import TABLE, Change

HEAD = """# Changes to verl and vLLM

Made by `python -m verl_ext.upstream` from [verl_ext/upstream/changes.py](../verl_ext/upstream/changes.py); a test holds
the two together.

Nothing is forked. Subclasses, arguments, and what is registered where verl offers it (losses, estimators, a platform,
a checkpoint engine) are not listed here. Listed is everything else that changes verl, vLLM, torch, transformers or
Python while they run, with the versions that it was written for. What is changed has to be there, most of it with the
same parameters; else a `PatchError` names what moved. `verl-ext doctor` says which changes fit the installed
versions; whether another still works, the test in its row tells.
"""
COLUMNS = ("change", "what", "why", "when", "written for", "a test that notices")


def page() -> str:
    head, *rows = (f"| {' | '.join(row)} |" for row in (COLUMNS, *map(_cells, TABLE)))
    return "\n".join([HEAD, head, "|---" * len(COLUMNS) + "|", *rows]) + "\n"


def _cells(change: Change) -> tuple[str, ...]:
    name = f"[{change.name}](../verl_ext/{change.file})"
    return name, change.target, change.why, change.when, change.written_for, f"`{change.test}`"


if __name__ == "__main__":
    print(page(), end="")
