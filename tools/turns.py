"""Makes a training run wait for a signal before each step; tools/bench_step.py preloads this module.

The environment names two pipes: the run writes a byte to TURN_ASKED, and continues when it has read one from
TURN_GIVEN. The wait is logged as `timing_s/turn`, and is part of `timing_s/step`.
"""

import os

from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.debug import marked_timer

verls_on_step_begin = PPOTrainer.on_step_begin


def on_step_begin(self: PPOTrainer) -> None:
    with marked_timer("turn", self.timing_raw):
        with open(os.environ["TURN_ASKED"], "wb", buffering=0) as asked:
            asked.write(b".")
        with open(os.environ["TURN_GIVEN"], "rb", buffering=0) as given:
            given.read(1)
    verls_on_step_begin(self)


PPOTrainer.on_step_begin = on_step_begin  # in this process, and in all that are forked from it
