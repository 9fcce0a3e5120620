"""Expert ids of a byte stay a byte on the way to the training workers.

vLLM returns the experts of each token in uint8 for models of up to 256 experts (its RoutedExpertsManager). verl makes
int16 of them before it writes them to TransferQueue (AgentLoopOutput.as_dict): twice the bytes to send, to store, and
to send again to each worker. What reads them there takes any integer dtype. Ids of a wider dtype are left to verl.

Off in a process unless its environment has VERL_EXT_NARROW_ROUTING=1, so that plain verl runs as it is. `request` puts
it into the environment of a run's Ray processes; the agent loop's are those that matter.
"""

import inspect
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from wrapt import register_post_import_hook

from verl_ext.upstream.patching import PatchError, Undo, expect, moved, wrap
from verl_ext.upstream.runtime_env import ask

VARIABLE = "VERL_EXT_NARROW_ROUTING"
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"


def requested() -> bool:
    return os.environ.get(VARIABLE) == "1"


def request(config: Any) -> None:
    """Ask for it in all Ray processes of a run, unless the run's own runtime_env or the launching shell decides."""
    ask(config, VARIABLE, os.environ.get(VARIABLE, "1"), keep=True)


def install() -> None:
    """Where it is requested, patch verl's agent loop as soon as this process imports it."""
    if requested():
        register_post_import_hook(narrow, AGENT_LOOP)


def narrow(agent_loop: Any) -> Undo:
    """Let `AgentLoopOutput.as_dict` keep uint8 ids; twice applied is once applied.

    Raises:
        PatchError: as_dict does something else than verl 0.9.1's with the ids.
    """
    output_class = expect("narrow_routing", agent_loop, "AgentLoopOutput")
    verls = inspect.unwrap(expect("narrow_routing", output_class, "as_dict"))  # also where ours is around it already
    _compare(agent_loop, verls)
    return wrap("narrow_routing", output_class, "as_dict", as_dict)


def as_dict(verls: Callable[[Any], dict[str, Any]], output: Any) -> dict[str, Any]:
    """The fields of an AgentLoopOutput, as verl's own `as_dict` makes them but for the dtype of ids in uint8."""
    ids = output.routed_experts
    if not isinstance(ids, np.ndarray) or ids.dtype != np.uint8:
        return verls(output)
    # Hidden from verl's own, which would convert them and then copy them: 44 ms of the agent loop's event loop for
    # 32k tokens, 48 layers and top-8, instead of 12 in all.
    fields = verls(output.model_copy(update={"routed_experts": None}))
    fields["routed_experts"] = whole_sequence(ids, len(fields["prompts"]) + len(fields["responses"]))
    return fields


def whole_sequence(ids_nLK: np.ndarray, tokens: int) -> Tensor:
    """[tokens, L, K] from the rows of the tokens that were forwarded; zeros behind them, as in verl's as_dict.

    A copy, because Ray hands the array out read-only, in memory that it would otherwise keep for it.
    """
    missing = np.zeros((max(0, tokens - len(ids_nLK)), *ids_nLK.shape[1:]), ids_nLK.dtype)
    return torch.from_numpy(np.concatenate([ids_nLK[:tokens], missing]))


def _compare(agent_loop: Any, original: Any) -> None:
    """Refuse the patch unless it changes nothing but the dtype, on sequences with too few, enough and too many rows."""
    for rows in (1, 3, 5):
        ids: Any = np.arange(256 - 4 * rows, 256, dtype=np.uint8).reshape(rows, 2, 2)
        try:
            output = agent_loop.AgentLoopOutput(
                prompt_ids=[1, 2],
                response_ids=[3],
                response_mask=[1],
                routed_experts=ids,
                metrics=agent_loop.AgentLoopMetrics(),
            )
            verls, mine = original(output), as_dict(original, output)
            same = verls.keys() == mine.keys() and torch.equal(
                verls["routed_experts"], mine["routed_experts"].to(torch.int16)
            )
        except Exception as error:
            raise _unexpected(f"{type(error).__name__}: {error}") from error
        if not same or verls["routed_experts"].dtype != torch.int16:
            found = {name: (value.dtype, tuple(value.shape)) for name, value in verls.items() if torch.is_tensor(value)}
            raise _unexpected(f"{rows} rows of uint8 ids for 3 tokens become {found}")


def _unexpected(what: str) -> PatchError:
    return moved("narrow_routing", f"AgentLoopOutput.as_dict carries routed_experts in another way ({what})")
