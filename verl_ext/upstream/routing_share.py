"""The experts of a share of the trajectories alone go to the training workers.

Expert ids are by far the largest field of a batch, and a share of the trajectories tells the routers' agreement nearly
as well. Where verl's agent loop makes the fields of a trajectory, the others' ids, and weights, are left out before
anything converts or copies them. They are rows without tokens, [0, L, K]: all trajectories of a batch have the same
fields in TransferQueue.

Off in a process unless its environment has VERL_EXT_ROUTING_SHARE=S; `request` puts it into the environment of a run's
Ray processes, of which the agent loops' matter.
"""

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from wrapt import register_post_import_hook

from verl_ext.fields import ROLLOUT_ROUTES
from verl_ext.upstream.narrow_routing import AGENT_LOOP
from verl_ext.upstream.patching import Undo, expect, wrap
from verl_ext.upstream.runtime_env import ask

VARIABLE = "VERL_EXT_ROUTING_SHARE"


class Systematic:
    """Takes every 1/share-th of what comes by, from a random start on (Cochran, Sampling Techniques, 3rd ed., ch. 8).

    Of any n in a row, n times the share are taken, rounded up or down, where independent draws would leave a small
    batch without any. A worker's trajectories complete about in the order of their lengths, so that short and long ones
    are taken alike. Each process has a start of its own; none of it touches Python's global random state, which agent
    loops and tools may have seeded.
    """

    def __init__(self, share: float, start: float):
        self._share, self._due = share, start

    def take(self) -> bool:
        self._due += self._share
        due = self._due >= 1
        self._due -= due
        return due


def request(config: Any, share: float) -> None:
    """Ask for it in all Ray processes of a run."""
    ask(config, VARIABLE, str(share))


def install() -> None:
    """Where it is requested, patch verl's agent loop as soon as this process imports it; around what reads the ids."""
    if share := os.environ.get(VARIABLE):
        sampling = Systematic(float(share), random.Random().random())
        register_post_import_hook(partial(in_agent_loop, sampling=sampling), AGENT_LOOP)


def in_agent_loop(agent_loop: Any, sampling: Systematic) -> Undo:
    output_class = expect("routing_share", agent_loop, "AgentLoopOutput")
    return wrap("routing_share", output_class, "as_dict", partial(as_dict, sampling=sampling))


def as_dict(verls: Callable[[Any], dict[str, Any]], output: Any, sampling: Systematic) -> dict[str, Any]:
    """The fields of an AgentLoopOutput; of one that is not sampled, `routed_experts` is empty: [0, L, K] of the
    dtype that the others have."""
    rows = output.routed_experts
    if rows is None or sampling.take():
        return verls(output)
    one_token: dict[str, Any] = {"prompt_ids": [0], "response_ids": [0], "response_mask": [0]}
    one_token |= {"response_logprobs": None, "multi_modal_data": None, "extra_fields": {}, "routed_experts": rows[:0]}
    alike = verls(output.model_copy(update=one_token))  # whatever becomes of the others' ids
    empty = alike[ROLLOUT_ROUTES][:0].clone()
    return verls(output.model_copy(update={"routed_experts": None})) | {ROLLOUT_ROUTES: empty}
