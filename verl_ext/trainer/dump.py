"""When trajectories are written, and that a failure to write them ends no run."""

from collections.abc import Callable
from typing import Any

from transfer_queue import KVBatchMeta

from verl_ext.settings.trajectories import TrajectoryDump
from verl_ext.trainer.in_blocks import InBlocks
from verl_ext.trainer.line_file import say
from verl_ext.trainer.trajectories import Chosen, TrajectoryLog, choose, write_step


class Dump:
    """Trajectories of every so many steps; of a step with several updates, the first one's."""

    def __init__(self, log: TrajectoryLog, settings: TrajectoryDump):
        self._log: TrajectoryLog | None = log
        self._settings = settings
        self._last_step = -1
        self._chosen: list[Chosen] = []

    def look_at(self, batch: InBlocks, step: int) -> None:
        """Choose those of a batch that has been measured, where this step's are written."""
        if self._log is None or step % self._settings.every or step == self._last_step:
            return
        self._last_step = step
        self._unless_it_fails(lambda: self._chosen.extend(choose(batch, self._settings.per_step, step)))

    def write(self, batch: KVBatchMeta, tokenizer: Any, *, skipped: str) -> None:
        """Write what was chosen; see `write_step`."""
        log, step, chosen = self._log, self._last_step, self._chosen
        self._chosen = []
        if log is not None and chosen:
            about = {"step": step, "skipped": skipped}
            self._unless_it_fails(lambda: write_step(log, self._settings, batch, chosen, tokenizer, **about))

    def _unless_it_fails(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # whatever a tokenizer may do: what is only to be looked at must not end a run
            self.close()
            say(f"no more trajectories are written, the run goes on: {error!r}")

    def close(self) -> None:
        """Nothing is written from then on."""
        log, self._log = self._log, None
        if log is not None:
            log.close()
