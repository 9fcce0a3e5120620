"""verl's replay buffer, polled ten times a second.

verl checks every 2 s whether the rollout is done. That is short for a real rollout, but half of a step here.
"""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync


class FastPollReplayBuffer(ReplayBuffer):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, poll_interval=0.1, **kwargs)


class FastPollReplayBufferAsync(ReplayBufferAsync):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, poll_interval=0.1, **kwargs)
