"""Metrics files as verl's file logger writes them."""

import json
from pathlib import Path

Rows = list[tuple[int, dict]]


def write(file: Path, rows: Rows, tail: str = "") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps({"step": step, "data": data}) + "\n" for step, data in rows) + tail)
    return file


def train(*steps: int, value: float = 0.0) -> Rows:
    return [(step, {"a": step + value}) for step in steps]
