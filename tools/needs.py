"""Lists what each of our hooks needs from verl, and what a verl lacks. It reads the sources, and imports or runs none.

    python tools/needs.py                  the installed verl
    python tools/needs.py PATH/TO/verl     a checkout of verl's repository

`verl_ext/base/needs.py` compares; a launch with `stability.any_version=true` does the same.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from verl_ext.base import changes
from verl_ext.base.needs import broken, imports, source_of
from verl_ext.cpu import changes as cpu

HOOKS = tuple(hook for hook in (*changes.TABLE, *changes.HOOKS, *cpu.TABLE, *cpu.HOOKS) if hook.needs)


def main(arguments: Sequence[str]) -> int:
    spec = None if arguments else find_spec("verl")
    verl = source_of(Path(arguments[0] if arguments else spec.origin if spec and spec.origin else "verl"))
    if verl.tree("verl") is None:
        print(f"no verl in {verl.folder}: give a checkout of its repository, or install it", file=sys.stderr)
        return 2
    version = (verl.folder / "version" / "version").read_text(encoding="utf-8").strip()
    lacking = broken(verl, [*HOOKS, *imports()])
    print(f"verl {version}: {len(lacking)} hooks lack something" if lacking else f"verl {version}: every hook fits")
    for name, lacks in lacking.items():
        print(f"{name}", *(f"    {what}" for what in lacks), sep="\n")
    return 1 if lacking else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
