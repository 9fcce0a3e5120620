"""One run of the grid: where it lies, and whether it has been done with the settings of today."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_ext import __version__
from verl_ext.report.files import is_regular, open_regular, written_whole

if TYPE_CHECKING:
    from verl_ext.lab.arms import Arm

METRICS, DONE, LOG = "metrics.jsonl", "done.json", "errors.log"
OF_A_RUN = ("metrics.*", DONE, LOG)  # what a run writes, and the next one in its folder takes away


@dataclass(frozen=True)
class Cell:
    """One arm with one seed."""

    arm: "Arm"
    seed: int
    steps: int

    def __str__(self) -> str:
        return f"{self.arm.name}, seed {self.seed}"

    @property
    def settings(self) -> dict[str, Any]:
        """Two runs with the same settings are the same run."""
        overrides = list(self.arm.overrides)
        return {"overrides": overrides, "seed": self.seed, "steps": self.steps, "version": __version__}

    def folder(self, out: Path) -> Path:
        return out / self.arm.name / f"seed{self.seed}"

    def settings_done(self, out: Path) -> dict[str, Any] | None:
        """The settings with which the run in its folder was done; None where none was."""
        try:
            with open_regular(self.folder(out) / DONE) as file:
                done = json.load(file)
        except (OSError, ValueError):  # none yet, or not ours
            return None
        return done.get("settings") if isinstance(done, dict) else None

    def begin(self, out: Path) -> Path:
        """Its folder, without what an earlier run left there."""
        folder = self.folder(out)
        folder.mkdir(parents=True, exist_ok=True)
        for file in (file for pattern in OF_A_RUN for file in folder.glob(pattern)):
            if is_regular(file) or file.is_symlink():
                file.unlink()
        return folder

    def mark_done(self, out: Path, seconds: float) -> None:
        with written_whole(self.folder(out) / DONE) as file:
            file.write(json.dumps({"settings": self.settings, "seconds": round(seconds, 1)}, indent=2).encode())


def cells_of(arms: "Sequence[Arm]", seeds: Sequence[int]) -> list[Cell]:
    """Every arm with every seed: the first one's, which warm up the seeds' models beside each other, then seed by seed,
    so that after an interruption the arms can be compared."""
    from verl_ext.lab.arms import setup_of

    steps = setup_of(arms[0], seeds[0]).config.trainer.total_training_steps
    first, *others = arms
    return [
        *(Cell(first, seed, steps) for seed in seeds),
        *(Cell(arm, seed, steps) for seed in seeds for arm in others),
    ]


def left_to_do(cells: list[Cell], out: Path) -> tuple[list[Cell], dict[str, list[str]]]:
    """The runs that are not done yet, and for the arms done with other settings, which have changed."""
    left: list[Cell] = []
    changed: dict[str, list[str]] = {}
    for cell in cells:
        before = cell.settings_done(out)
        if before == cell.settings:
            continue
        left.append(cell)
        if before is not None:
            keys = [key for key, value in cell.settings.items() if before.get(key) != value]
            changed[cell.arm.name] = list(dict.fromkeys([*changed.get(cell.arm.name, []), *keys]))
    return left, changed
