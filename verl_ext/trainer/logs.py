"""The files of a run's metrics and of the guard's events, which stand beside each other.

verl's file logger empties its file whenever it is opened. A resumed run goes on in it instead.
"""

import os
from dataclasses import asdict
from pathlib import Path

import orjson
from omegaconf import DictConfig
from verl.utils import tracking

from verl_ext.guard.state import Event
from verl_ext.run_files import EVENTS, TRAJECTORIES
from verl_ext.trainer.line_file import LineFile
from verl_ext.upstream.patching import patch


def metrics_path(project: str, experiment: str) -> Path:
    """Where verl 0.9.1's file logger writes."""
    if path := os.getenv("VERL_FILE_LOGGER_PATH"):
        return Path(path)
    return Path(os.path.expanduser(os.getenv("VERL_FILE_LOGGER_ROOT", ".")), project, f"{experiment}.jsonl")


def events_path(config: DictConfig) -> Path:
    """The metrics file's path with .guard.jsonl for .jsonl."""
    return metrics_path(config.trainer.project_name, config.trainer.experiment_name).with_suffix(EVENTS)


def trajectories_path(config: DictConfig) -> Path:
    """The metrics file's path with .trajectories.jsonl for .jsonl."""
    path = metrics_path(config.trainer.project_name, config.trainer.experiment_name)
    return path.with_suffix(TRAJECTORIES)


class EventLog:
    """One JSON line a decision: step, rule, signal, value, threshold, action, reason."""

    def __init__(self, path: Path, *, resume: bool):
        self._file = LineFile(path, resume=resume)

    def write(self, event: Event) -> None:
        self._file.write(orjson.dumps(asdict(event)) + b"\n")

    def close(self) -> None:
        self._file.close()


def keep_metrics(*, resume: bool) -> None:
    """Give verl's file logger a file that a resumed run goes on in, and that a full disk cannot break."""

    class KeepingFileLogger(tracking.FileLogger):
        def __init__(self, project_name: str, experiment_name: str):
            self.filepath = metrics_path(project_name, experiment_name)
            print(f"verl_ext: metrics go to {self.filepath.absolute()}", flush=True)
            self.fp = LineFile(self.filepath, resume=resume)  # verl's log() writes whole lines

    patch("keep_metrics", tracking, "FileLogger", KeepingFileLogger)
