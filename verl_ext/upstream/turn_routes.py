"""Of a turn's expert ids, those of the turns before it stay where they are: Ray carries each token's once.

vLLM returns the ids of all tokens from the first on, at every turn, and verl's agent loop keeps what the last turn of a
trajectory returned. Here the client that agent loops call remembers the tokens of a trajectory and their rows, and asks
for the rows behind them; verl's server cuts the others off in its own process; the client puts both together, so that
the agent loop sees what it always saw. What is remembered ends with the trajectory.

A row that was held is what the routers chose when the token was sampled. vLLM's answer to a later turn has what its KV
cache was last computed with: the same, unless that was computed anew, after an eviction or with a later step's weights.

Off in a process unless its environment has VERL_EXT_TURN_ROUTES=1; `request` puts it into the environment of a run's
Ray processes.

Shape legend: m tokens with a row, L layers, K experts a token, or twice that where their weights travel too.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any

import numpy as np
from wrapt import register_post_import_hook

from verl_ext.upstream.patching import Undo, expect, expect_lookup, patch, wrap
from verl_ext.upstream.runtime_env import ask

VARIABLE = "VERL_EXT_TURN_ROUTES"
CHANGE = "turn_routes"
ASKED = "verl_ext_rows_held"  # in the extra_args of a request, and in the extra_fields of an answer that was cut
MEDIA = ("image_data", "video_data", "audio_data")
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
CLIENT = "verl.workers.rollout.llm_server"
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"


class Turn:
    """What a trajectory has after a call.

    Args:
        tokens: of the prompt and what was generated.
        rows_mLK: of the first m of them.
        memory: longer than the rows, which it begins with, where the next turn's can be written behind them.
    """

    def __init__(self, tokens: Sequence[int], rows_mLK: np.ndarray, memory: np.ndarray | None = None):
        self.tokens, self.rows_mLK, self.memory = list(tokens), rows_mLK, memory

    def held(self, prompt: Sequence[int]) -> int:
        """How many rows are of the prompt's first tokens; the last one generated was not forwarded, and has none."""
        return min(common(self.tokens, prompt), len(self.rows_mLK), len(self.tokens) - 1)

    def joined(self, held: int, new_nLK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[held + n, L, K], and the memory that it stands in: of a trajectory, each row is written about twice."""
        total, memory = held + len(new_nLK), self.memory
        if held < len(self.rows_mLK) or memory is None or len(memory) < total:
            memory = np.empty((2 * total, *new_nLK.shape[1:]), new_nLK.dtype)
            memory[:held] = self.rows_mLK[:held]
        self.memory = None  # of two calls that go on from here, one can write behind the rows
        memory[held:total] = new_nLK
        return memory[:total], memory


# By request id, of the trajectory that an agent loop is at work on.
_turns: ContextVar[dict[Any, Turn] | None] = ContextVar("verl_ext_turns", default=None)


def request(config: Any) -> None:
    """Ask for it in all Ray processes of a run, unless the run's own runtime_env or the launching shell decides."""
    ask(config, VARIABLE, os.environ.get(VARIABLE, "1"), keep=True)


def install() -> None:
    """Where it is requested, patch verl's modules as soon as this process imports them."""
    if os.environ.get(VARIABLE) == "1":
        register_post_import_hook(in_server, SERVER)
        register_post_import_hook(in_client, CLIENT)
        register_post_import_hook(in_agent_loop, AGENT_LOOP)


def in_server(server: Any) -> Undo:
    """Let verl's vLLM server leave out the rows that a request says are held.

    Raises:
        PatchError: it takes other arguments.
    """
    owner = expect(CHANGE, server, "vLLMHttpServer")
    verls = expect(CHANGE, owner, "generate", "self, prompt_ids, sampling_params, ...")

    @wraps(verls)
    async def generate(self: Any, prompt_ids: Any, sampling_params: dict[str, Any], *rest: Any, **named: Any) -> Any:
        extra = dict(sampling_params.get("extra_args") or {})
        held = extra.pop(ASKED, 0)
        if not held:
            return await verls(self, prompt_ids, sampling_params, *rest, **named)
        output = await verls(self, prompt_ids, {**sampling_params, "extra_args": extra or None}, *rest, **named)
        if output.routed_experts is not None:
            output.routed_experts = output.routed_experts[held:]
            output.extra_fields[ASKED] = held
        return output

    # Not by `wrap`: Ray asks whether the method is a coroutine function.
    return patch("turn_routes", owner, "generate", generate)


def in_client(client: Any) -> Undo:
    """Let the client that agent loops call hold rows.

    Raises:
        PatchError: it takes other arguments.
    """
    expect(CHANGE, client, "LLMServerClient.generate", "self, request_id, prompt_ids, sampling_params, ...")
    return wrap("turn_routes", client.LLMServerClient, "generate", generate)


async def generate(verls: Callable, client: Any, request_id: Any, **arguments: Any) -> Any:
    """verl's, in which the rows that this trajectory has do not travel again."""
    turns = _turns.get()
    # With images the engine's tokens are others than the prompt's.
    if turns is None or any(arguments.get(name) is not None for name in MEDIA):
        return await verls(client, request_id, **arguments)
    before, prompt = turns.get(request_id), list(arguments["prompt_ids"])
    held = 0 if before is None else before.held(prompt)
    if held:
        sampling = dict(arguments["sampling_params"])
        sampling["extra_args"] = {**(sampling.get("extra_args") or {}), ASKED: held}
        arguments["sampling_params"] = sampling
    output = await verls(client, request_id, **arguments)
    cut, memory = output.extra_fields.pop(ASKED, 0), None
    if before is not None and cut:
        output.routed_experts, memory = before.joined(cut, output.routed_experts)
    if output.routed_experts is not None:
        turns[request_id] = Turn([*prompt, *output.token_ids], output.routed_experts, memory)
    return output


def in_agent_loop(agent_loop: Any) -> Undo:
    """Let what is remembered of a trajectory begin and end with it.

    Raises:
        PatchError: the worker runs its agent loop in another way.
    """
    worker = expect(CHANGE, agent_loop, "AgentLoopWorker")
    expect_lookup(CHANGE, expect(CHANGE, worker, "_run_agent_loop"), "rollout_trace_attr")
    return wrap("turn_routes", agent_loop, "rollout_trace_attr", trajectory)


@contextmanager
def trajectory(verls: Callable, *arguments: Any, **settings: Any) -> Iterator[None]:
    """verl's `rollout_trace_attr`, inside which a worker runs an agent loop."""
    token = _turns.set({})
    try:
        with verls(*arguments, **settings):
            yield
    finally:
        _turns.reset(token)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # as between most turns; and quick
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])
