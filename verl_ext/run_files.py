"""What a run writes beside its metrics file, as the trainer names it and the report finds it."""

from pathlib import Path

EVENTS = ".guard.jsonl"
TRAJECTORIES = ".trajectories.jsonl"


def older_part(trajectories: Path) -> Path:
    """`run.trajectories.jsonl` -> `run.trajectories.1.jsonl`"""
    return trajectories.with_suffix(".1.jsonl")
