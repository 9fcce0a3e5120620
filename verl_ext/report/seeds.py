"""The lines of a comparison: single runs, runs of one setting with several seeds, and runs that the user joined."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from os.path import commonprefix
from pathlib import Path

from verl_ext.base.printable import printable
from verl_ext.report.files import is_regular, open_regular
from verl_ext.report.run import ReportError, Run

Lines = Mapping[str, Sequence[Run]]  # by the name in the table and in the legend

SEED_NAME = re.compile(r"(?:^|[-_./ ])seed[-_= ]?\d+(?=$|[-_./: ])", re.IGNORECASE)  # within a name
CONFIGS = ("files/config.yaml", ".hydra/config.yaml", "config.yaml")  # of W&B, of Hydra, next to the run's file
MOST_CONFIG = 1 << 20  # bytes
KEY = re.compile(rb"( *)['\"]?([\w.]+)['\"]?:")
# Settings that differ between runs of one setting: what names the run, and what W&B notes of the process.
OWN = re.compile(rb"_wandb|(?:.*[_.])?(?:experiment_name|run_name|dir)")
SEED = re.compile(rb"(?:.*[_.])?seed")


def group_runs(runs: Sequence[Run], joined: Lines | None = None, apart: bool = False) -> dict[str, tuple[Run, ...]]:
    """Returns the lines of a comparison, in the order of their first runs; those of `joined` come last.

    Runs are of one setting if their configs differ only in seeds, in names and in folders; without a config of each, if
    their names differ only in `seed` and a number. If all are of one setting, they are compared with each other.

    Args:
        joined: lines that the user named.
        apart: keep all other runs apart.
    """
    joined = joined or {}
    named = dict(zip(unique_names(runs), runs, strict=True))
    folders = Counter(run.sources[0].parent for run in runs if run.sources)
    groups: dict[object, list[str]] = {}
    taken: set[object] = set()
    for name, run in named.items():
        own_folder = bool(run.sources) and folders[run.sources[0].parent] == 1
        config = _config_of(run.sources[0]) if own_folder else None
        setting, seed = config or (SEED_NAME.subn("", name), name)
        groups.setdefault(name if apart or (setting, seed) in taken else setting, []).append(name)
        taken.add((setting, seed))
    found = list(groups.values())
    if len(found) == 1 and not joined:
        found = [[name] for name in named]
    lines: dict[str, tuple[Run, ...]] = {}
    for names in found:
        common = _common_name(names) if len(names) > 1 else ""
        free = common and common not in lines and common not in named
        lines[common if free else names[0]] = tuple(named[name] for name in names)
    if twice := [name for name in joined if name in lines]:
        raise ReportError(f"--group {twice[0]}: another line of the comparison has this name; choose another one")
    return {**lines, **{name: tuple(group) for name, group in joined.items()}}


def unique_names(runs: Sequence[Run]) -> list[str]:
    """Returns a different name for each run: its own, else one with the folders that differ, else one with a number."""
    names = [run.name for run in runs]
    parents = [
        [printable(parent.name) for parent in run.sources[0].resolve().parents] if run.sources else [] for run in runs
    ]
    alike = len(set(names)) == 1
    for depth in range(min(map(len, parents), default=0)):
        if len(set(names)) == len(names):
            return names
        folders = [folders[depth] for folders in parents]
        longer = folders if alike else [f"{folder}/{name}" for folder, name in zip(folders, names, strict=True)]
        if len(set(longer)) > len(set(names)):  # a folder may have the name of its run
            names, alike = longer, False
    if len(set(names)) == len(names):
        return names
    return [f"{name} ({number})" for number, name in enumerate(names, start=1)]


def _config_of(source: Path) -> tuple[object, object] | None:
    """Returns the lines of a run's config without its seeds, and those of the seeds; None without a config."""
    file = next((source.parent / name for name in CONFIGS if is_regular(source.parent / name)), None)
    if file is None:
        return None
    with open_regular(file) as opened:
        text = opened.read(MOST_CONFIG)
    common: list[bytes] = []
    seeds: list[bytes] = []
    part, deeper = common, -1  # the lines below a setting belong to it
    for line in text.splitlines():
        if (found := KEY.match(line)) is not None and len(found[1]) <= deeper:
            part, deeper = common, -1
        if found is not None and deeper < 0 and (SEED.fullmatch(found[2]) or OWN.fullmatch(found[2])):
            part, deeper = seeds if SEED.fullmatch(found[2]) else [], len(found[1])
        part.append(line)
    return (file.name, *common), tuple(seeds)


def _common_name(names: Sequence[str]) -> str:
    """Returns what names of runs with several seeds have in common, without a torn word."""
    bare = {SEED_NAME.sub("", name).strip("-_./ ") for name in names}
    if len(bare) == 1:
        return bare.pop()
    return re.sub(r"(?:[-_./ ]?seed)?[-_./ =]*\d*$", "", commonprefix(list(names)), flags=re.IGNORECASE)  # noqa: RUF071
