"""When trajectories are written, and that a failure to write them ends no run."""

from typing import Any

from torch import Tensor
from transfer_queue import KVBatchMeta

from verl_ext.core.tokens import Tokens
from verl_ext.settings.trajectories import TrajectoryDump
from verl_ext.trainer.line_file import say
from verl_ext.trainer.trajectories import TrajectoryLog, write_step


class Dump:
    """Trajectories of every so many steps; of a step with several updates, the first one's."""

    def __init__(self, log: TrajectoryLog, settings: TrajectoryDump):
        self._log: TrajectoryLog | None = log
        self._settings = settings
        self._last_step = -1

    def write(
        self, batch: KVBatchMeta, tokens: Tokens, weight: Tensor | None, tokenizer: Any, *, step: int, skipped: str
    ) -> None:
        """See `write_step`."""
        if self._log is None or step % self._settings.every or step == self._last_step:
            return
        self._last_step = step
        try:
            write_step(self._log, self._settings, batch, tokens, weight, tokenizer, step=step, skipped=skipped)
        except Exception as error:  # whatever a tokenizer may do: what is only to be looked at must not end a run
            self.close()
            say(f"no more trajectories are written, the run goes on: {error!r}")

    def close(self) -> None:
        """Nothing is written from then on."""
        log, self._log = self._log, None
        if log is not None:
            log.close()
