"""Data that a rollout returns with its tokens: one change to verl's agent loop, its client and its vLLM server.

    narrow      Expert ids of one byte stay one byte. verl makes them int16 before it writes them to TransferQueue.
    share       Only a share of the trajectories bring their expert ids, which are by far the largest field of a batch.
    turns       A turn brings the expert ids of its own tokens, and their checksum; that of the whole trajectory is a
                field of the batch. vLLM returns the ids of all turns, every time.
    top_tokens  The K most likely tokens at each place, as two fields next to `responses`. verl asks for none.
    answers     What the answer shows by itself (`core.answers`), as a field of four numbers: its server among them.

The environment variable VERL_EXT_AGENT_LOOP, such as `narrow:1,top_tokens:32`, chooses the extras in each process;
without it verl stays as it is. The launch sets it to what the run's features need (`request`), and `install_changes`
reads it.

The functions are in the order in which an answer passes them: vLLM's server, the client that an agent loop calls, the
worker that runs the agent loop, and the fields that this worker writes. The pure ones are at the bottom.

The launch computes nothing here, so torch is imported only where it is used.

Shape legend: n tokens of one answer, m tokens with expert ids, L layers, K experts per token or top tokens of a place.
"""

from __future__ import annotations

import inspect
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from wrapt import register_post_import_hook

from verl_ext.base.errors import ConfigError, HookError
from verl_ext.base.names import ANSWER_FACTS, ROLLOUT_ROUTES, ROUTE_SUM, TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
from verl_ext.base.patching import PatchError, Undo, actor_class, apply_all, expect, expect_lookup, moved, wrap
from verl_ext.core import torch

if TYPE_CHECKING:
    from torch import Tensor

    from verl_ext.core.top_tokens import Call

VARIABLE = "VERL_EXT_AGENT_LOOP"
BY_HAND = ("narrow", "turns", "answers")  # the extras that the user may switch off, or on
CHANGE = "agent_loop"
SERVER = "verl.workers.rollout.vllm_rollout.vllm_async_server"
CLIENT = "verl.workers.rollout.llm_server"
AGENT_LOOP = "verl.experimental.agent_loop.agent_loop"

ROWS_HELD = "verl_ext_rows_held"  # in the extra_args of a request, and in the extra_fields of an answer that was cut
TOP_TOKENS_ASKED = "verl_ext_top_tokens"  # in the extra_args of a request
PLACE = f"ray_kwargs.ray_init.runtime_env.env_vars.{VARIABLE}"  # the variable's place in a run's config
MANAGER = "actor_rollout_ref.rollout.agent.agent_loop_manager_class"
# Extras that only verl's AgentLoopWorker asks for or writes. First those that a run cannot do without, with the remedy.
NEED_WORKERS = {
    "share": ("stability.router_agreement_share below 1", "set stability.router_agreement_share=1"),
    "top_tokens": (
        "the sampler's most likely tokens",
        "set stability.top_tokens.k=0 and stability.score_centering=false, and sample with top_p=1 and top_k=-1",
    ),
}
WITH_WORKERS = {"turns": "the checksum of routes (router/checked)", "answers": "answers/* and the gap by server"}
MEDIA = ("image_data", "video_data", "audio_data")

# Parameters of a request, other than temperature, top-k and top-p, that change the distribution -> the neutral value.
DISTRIBUTION_CHANGES = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
}


@dataclass(frozen=True)
class Extras:
    """The extra data that a rollout is asked to return.

    Attributes:
        narrow: expert ids in uint8 are sent in uint8.
        share: the share of the trajectories that bring their expert ids.
        turns: expert ids that the agent loop's process holds are not sent again; all have a checksum.
        top_tokens: the number of tokens at each place.
        answers: each trajectory brings its facts.
    """

    narrow: bool = False
    share: float = 1.0
    turns: bool = False
    top_tokens: int = 0
    answers: bool = False

    def __str__(self) -> str:
        return ",".join(f"{field.name}:{+getattr(self, field.name)}" for field in fields(self))  # +True is 1


def parse_extras(text: str) -> dict[str, Any]:
    """Returns the fields of `Extras` in a text such as `narrow:0,top_tokens:32`.

    Raises:
        ConfigError: it names something else, or gives a value that is not a number.
    """
    kinds: dict[str, Callable[[float], Any]] = {field.name: type(field.default) for field in fields(Extras)}
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition(":")
        try:
            found[name] = kinds[name](float(value))
        except (KeyError, ValueError) as error:
            switches = " or ".join(f"{VARIABLE}={switch}:0" for switch in BY_HAND)
            raise ConfigError(
                f"{VARIABLE}={text} has {part!r}, which is not NAME:NUMBER with one of {', '.join(kinds)}",
                otherwise=f"set {switches}, or leave it out",
            ) from error
    return found


# The extras of this process since it last called `install_changes`, and the choice of the trajectories that bring
# expert ids: None for all.
_extras = Extras()
_sampling: Systematic | None = None


def request(config: Any, wanted: Extras) -> None:
    """Makes all Ray processes of a run start with the wanted extras; vLLM's own processes inherit their environment.

    Values of BY_HAND that the launching shell sets are kept, and so are those of the run's own
    runtime_env, which take precedence. Ray takes the environment when it starts or when the run connects to it. A
    session that is already open keeps its own.
    """
    from omegaconf import OmegaConf

    if wanted == Extras():
        return
    given = parse_extras(os.environ.get(VARIABLE, "")) | parse_extras(str(OmegaConf.select(config, PLACE) or ""))
    wanted = replace(wanted, **{name: value for name, value in given.items() if name in BY_HAND})
    OmegaConf.update(config, PLACE, str(wanted), force_add=True)


def install_changes() -> None:
    """Changes verl's modules as soon as this process imports them, if its environment asks for any extra.

    After a fork, another call reads the environment of the new process. No module is changed twice.
    """
    global _extras, _sampling
    _extras = Extras(**parse_extras(os.environ.get(VARIABLE, "")))
    _sampling = Systematic(_extras.share, random.Random().random()) if _extras.share < 1 else None
    if _extras.turns or _extras.top_tokens:
        register_post_import_hook(change_server, SERVER)
    if _remembers():
        register_post_import_hook(change_client, CLIENT)
    if _extras != Extras():
        register_post_import_hook(change_agent_loop, AGENT_LOOP)


def _remembers() -> bool:
    """Returns True if the answers of a trajectory are kept while an agent loop works on it."""
    return bool(_extras.turns or _extras.top_tokens or _extras.answers)


def without_workers(extras: Extras) -> tuple[list[tuple[str, str]], list[str]]:
    """Returns what a run lacks whose agent loop manager does not run verl's AgentLoopWorker: what stops it, each with a
    remedy, and what is left out."""
    asked = {field.name for field in fields(Extras) if getattr(extras, field.name) != field.default}
    needed = [both for name, both in NEED_WORKERS.items() if name in asked]
    return needed, [what for name, what in WITH_WORKERS.items() if name in asked]


def check_manager(manager: Any) -> None:
    """Prints what a run leaves out because its agent loop manager does not run verl's AgentLoopWorker.

    verl asks of a manager only that it fills TransferQueue (`TaskRunnerV1.init_agent_loop_manager`, 0.9.1). The
    log-probabilities and expert ids that it writes are read as those of verl's.

    Raises:
        HookError: the run cannot do without what the worker brings.
    """
    from verl.experimental.agent_loop import AgentLoopWorker

    worker = getattr(manager, "agent_loop_workers_class", None)
    worker = actor_class(worker) if hasattr(worker, "__ray_metadata__") else worker
    if isinstance(worker, type) and issubclass(worker, AgentLoopWorker):
        return
    needed, left_out = without_workers(_extras)
    foreign = f"{MANAGER}={type(manager).__module__}.{type(manager).__qualname__} does not run verl's AgentLoopWorker"
    for what, remedy in needed:
        raise HookError(f"{foreign}, which {what} needs", otherwise=remedy)
    if left_out:
        print(f"verl_ext: {foreign}: without {' and '.join(left_out)}", flush=True)


# vLLM's server: leaves out the rows that the client holds, and returns the top tokens.


def change_server(server: Any) -> Undo:
    """Makes verl's vLLM server return what the extra_args of a request ask for.

    Raises:
        PatchError: the server takes other arguments, or makes the request or reads the answer in another way.
    """
    changes: list[Callable[[], Undo]] = []
    if _extras.turns:
        owner = expect(CHANGE, server, "vLLMHttpServer")
        takes = "self, prompt_ids, sampling_params, ..."
        changes += [lambda: wrap("agent_loop", owner, "generate", generate_in_server, takes)]
    if _extras.top_tokens:
        given = "output, num_prompt_logprobs, result_dict"
        changes += [
            lambda: wrap("agent_loop", server, "SamplingParams", ask_for_top_tokens),
            lambda: wrap("agent_loop", server, "extract_prompt_logprobs", take_top_tokens, given),
        ]
    return apply_all(*changes)


async def generate_in_server(
    verls: Callable, server: Any, prompt_ids: Any, sampling_params: dict[str, Any], *rest: Any, **named: Any
) -> Any:
    """Wraps verl's `generate`: leaves out the rows that the client holds, and adds the checksum of the others."""
    extra = dict(sampling_params.get("extra_args") or {})
    held = extra.pop(ROWS_HELD, None)
    if held is None:
        return await verls(server, prompt_ids, sampling_params, *rest, **named)
    output = await verls(server, prompt_ids, {**sampling_params, "extra_args": extra or None}, *rest, **named)
    if output.routed_experts is not None:
        output.routed_experts = output.routed_experts[held:]
        output.extra_fields |= sums_of_answer(prompt_ids, output, held)
    return output


def sums_of_answer(prompt_ids: Sequence[int], output: Any, held: int) -> dict[str, int]:
    """Returns the number of rows that the server leaves out, and the checksum of those that it sends."""
    tokens = [*prompt_ids, *output.token_ids]
    return {ROWS_HELD: held, ROUTE_SUM: int(row_terms(output.routed_experts, tokens, held).sum())}


def ask_for_top_tokens(vllms: Callable[..., Any], **arguments: Any) -> Any:
    """Wraps vLLM's SamplingParams: adds the top tokens if the request asks for it.

    They come flat, without a dictionary per token. Their text is left out, because verl needs it only
    for stop strings.

    Raises:
        HookError: the agent loop asks for a distribution that the training engine cannot know.
    """
    found = vllms(**arguments)
    if found.extra_args and (k := found.extra_args.pop(TOP_TOKENS_ASKED, 0)):
        refuse_changes(partial(getattr, found), DISTRIBUTION_CHANGES)
        found.logprobs, found.flat_logprobs = k, True
        if not found.stop:
            found.detokenize = False
    return found


def refuse_changes(value_of: Callable[[str, Any], Any], changes: Mapping[str, Any]) -> None:
    """Raises HookError if a request changes the distribution; `value_of` takes a parameter's name and neutral value."""
    for name, usual in changes.items():
        if (value := value_of(name, usual)) and value != usual:
            raise HookError(
                f"a request has {name}={value}, so the sampler's top tokens are of another distribution than the "
                "training engine's",
                otherwise=f"leave {name} out of the agent loop's sampling parameters, or set stability.top_tokens.k=0",
            )


def take_top_tokens(
    verls: Callable[..., None], *, output: Any, num_prompt_logprobs: int | None, result_dict: dict
) -> None:
    """Wraps verl's `extract_prompt_logprobs`, the only place with both vLLM's answer and the fields that verl returns.

    Raises:
        HookError: the answer has another number of places than of tokens.
    """
    verls(output=output, num_prompt_logprobs=num_prompt_logprobs, result_dict=result_dict)
    answer = output.outputs[0]
    if not hasattr(answer.logprobs, "start_indices") or not answer.token_ids:  # not asked for, or no token generated
        return
    sampled, ids, log_q = unpack_top_tokens(answer.logprobs, answer.token_ids)
    result_dict[TOP_TOKEN_IDS], result_dict[TOP_TOKEN_LOG_PROBS] = ids, log_q
    # As with logprobs=0: verl reads the value of the sampled token, and would make K objects at each place.
    answer.logprobs = [{token: value} for token, value in zip(answer.token_ids, sampled, strict=True)]


# The client: asks for the extras, and remembers the answers of a trajectory and their servers.


@dataclass
class TrajectoryState:
    """The answers of one trajectory, kept while an agent loop works on it.

    Attributes:
        turns: request id -> its last turn; None if each turn brings all rows.
        calls: the answers with top tokens; None if none are asked for, as in validation.
        complete: every row that an agent loop has received is in one of `turns`.
        servers: the addresses of the servers that were asked.
        version: the newest version of the weights that sampled tokens of it, as the server numbers them.
        fresh: the number of tokens that this version sampled.
    """

    turns: dict[Any, Turn] | None
    calls: list[Call] | None
    complete: bool = True
    servers: set[str] = field(default_factory=set)
    version: int = -1
    fresh: int = 0

    def count(self, output: Any) -> None:
        """Counts the tokens of a server's answer. verl's client asks again after each interruption (`llm_server.py` of
        verl 0.9.1), and keeps only the first and the last version."""
        version = output.extra_fields.get("global_steps")
        if version is not None and version >= self.version:
            self.fresh = len(output.token_ids) + (self.fresh if version == self.version else 0)
            self.version = version


_trajectory: ContextVar[TrajectoryState | None] = ContextVar("verl_ext_trajectory", default=None)


def change_client(client: Any) -> Undo:
    """Makes the client that agent loops call ask for top tokens, hold rows, and remember its servers.

    Raises:
        PatchError: the client takes other arguments.
    """
    changes: list[Callable[[], Undo]] = []
    owner = expect(CHANGE, client, "LLMServerClient")
    if _extras.turns or _extras.top_tokens or _extras.answers:
        takes = "self, request_id, prompt_ids, sampling_params, ..."
        changes += [lambda: wrap("agent_loop", owner, "generate", generate_in_client, takes)]
    if _extras.answers:
        changes += [lambda: wrap("agent_loop", owner, "_acquire_server", acquire_server, "self, request_id, ...")]
    return apply_all(*changes)


async def acquire_server(verls: Callable, client: Any, request_id: Any, **named: Any) -> tuple[str, Any]:
    """Wraps verl's `_acquire_server`, which chooses the server of a call."""
    address, handle = await verls(client, request_id, **named)
    if (trajectory := _trajectory.get()) is not None:
        trajectory.servers.add(address)
    return address, handle


async def generate_in_client(verls: Callable, client: Any, request_id: Any, **arguments: Any) -> Any:
    """Wraps verl's `generate`: asks for the top tokens and for the rows that are not held yet, and returns all rows.

    A held row has the experts that were chosen when the token was sampled. vLLM's answer to a later turn has the
    experts that were chosen when its KV cache was last computed. The two are the same unless the cache was recomputed,
    after an eviction or with a later step's weights.
    """
    if (trajectory := _trajectory.get()) is None:
        return await verls(client, request_id, **arguments)
    prompt, calls, turns = list(arguments["prompt_ids"]), trajectory.calls, trajectory.turns
    if any(arguments.get(name) is not None for name in MEDIA):
        turns = None  # the engine's tokens differ from the prompt's
        trajectory.complete = False
    before = None if turns is None else turns.get(request_id)

    asked = {}
    if turns is not None:
        asked[ROWS_HELD] = 0 if before is None else before.held(prompt)
    if calls is not None:
        asked[TOP_TOKENS_ASKED] = _extras.top_tokens
    if asked:
        sampling = dict(arguments["sampling_params"])
        sampling["extra_args"] = {**(sampling.get("extra_args") or {}), **asked}
        arguments["sampling_params"] = sampling

    output = await verls(client, request_id, **arguments)
    trajectory.count(output)
    if calls is not None:
        ids, log_q = output.extra_fields.pop(TOP_TOKEN_IDS, None), output.extra_fields.pop(TOP_TOKEN_LOG_PROBS, None)
        if ids is not None:
            from verl_ext.core.top_tokens import Call

            calls.append(Call(prompt, list(output.token_ids), ids, log_q))
    if turns is not None:
        cut, total, memory = output.extra_fields.pop(ROWS_HELD, 0), output.extra_fields.pop(ROUTE_SUM, None), None
        if before is not None and cut:
            total = before.sum_of(cut) + total
            output.routed_experts, memory = before.joined(cut, output.routed_experts)
        if output.routed_experts is not None:
            if turns.get(request_id) is not before:  # of a concurrent call
                trajectory.complete = False
            if before is not None and cut < before.held(before.tokens):  # the prompt continues from an earlier token
                trajectory.complete = False
            turns[request_id] = Turn([*prompt, *output.token_ids], output.routed_experts, memory, total)
    return output


# The agent loop's worker: begins and ends a trajectory, and writes it as the fields of a batch.


def change_agent_loop(agent_loop: Any) -> Undo:
    """Makes a trajectory remember its calls, and write the wanted fields.

    Methods of the worker cannot be wrapped, because Ray copied them into its own class when that was defined.

    Raises:
        PatchError: the worker runs its agent loop in another way, or the output writes other fields than verl 0.9.1's.
    """
    output = expect(CHANGE, agent_loop, "AgentLoopOutput")
    verls_as_dict = inspect.unwrap(expect(CHANGE, output, "as_dict"))  # also where ours is around it already
    if _extras.narrow:
        _compare(agent_loop, verls_as_dict)
    changes: list[Callable[[], Undo]] = [lambda: wrap("agent_loop", output, "as_dict", as_dict)]
    if _remembers():
        worker = expect(CHANGE, agent_loop, "AgentLoopWorker")
        expect_lookup(CHANGE, expect(CHANGE, worker, "_run_agent_loop"), "rollout_trace_attr")
        changes += [lambda: wrap("agent_loop", agent_loop, "rollout_trace_attr", trajectory_context)]
    return apply_all(*changes)


@contextmanager
def trajectory_context(verls: Callable, *arguments: Any, validate: bool, **settings: Any) -> Iterator[None]:
    """Wraps verl's `rollout_trace_attr`, inside which a worker runs an agent loop and writes its output in one task."""
    asks = _extras.top_tokens and not validate
    token = _trajectory.set(TrajectoryState(turns={} if _extras.turns else None, calls=[] if asks else None))
    try:
        with verls(*arguments, validate=validate, **settings):
            yield
    finally:
        _trajectory.reset(token)


def as_dict(verls: Callable[[Any], dict[str, Any]], output: Any) -> dict[str, Any]:
    """Returns the fields of an AgentLoopOutput: verl's, with the extras that are wanted."""
    rows, total = output.routed_experts, 0
    trajectory = _trajectory.get()
    narrow = _extras.narrow and isinstance(rows, np.ndarray) and rows.dtype == np.uint8  # wider ids are left to verl
    if rows is not None and _sampling is not None and not _sampling.take():
        # All trajectories of a batch have the same fields in TransferQueue, so [0, L, K] takes the place of the ids.
        none = whole_sequence(rows, 0) if narrow else _no_rows(verls, output)
        written = verls(output.model_copy(update={"routed_experts": None})) | {ROLLOUT_ROUTES: none}
    elif narrow:
        written = _narrow_fields(verls, output)
    else:
        written = verls(output)
    if rows is not None and _extras.turns:
        if trajectory is not None and trajectory.turns and len(written[ROLLOUT_ROUTES]):
            total = sum_of_output(trajectory, rows, [*output.prompt_ids, *output.response_ids])
        written[ROUTE_SUM] = torch.tensor([total])
    if trajectory is not None and trajectory.calls is not None:
        from verl_ext.core.top_tokens import top_tokens_of

        ids, log_q = top_tokens_of(trajectory.calls, output.prompt_ids, output.response_ids, _extras.top_tokens)
        written |= {TOP_TOKEN_IDS: ids, TOP_TOKEN_LOG_PROBS: log_q}
    if _extras.answers:
        from verl_ext.core.answers import answer_facts

        servers, fresh = ((), 0) if trajectory is None else (trajectory.servers, trajectory.fresh)
        written[ANSWER_FACTS] = torch.tensor(answer_facts(servers, output.response_ids, fresh))
    return written


def _no_rows(verls: Callable[[Any], dict[str, Any]], output: Any) -> Tensor:
    """Returns [0, L, K] in the dtype that verl gives to expert ids; it does not share their memory."""
    one_token: dict[str, Any] = {"prompt_ids": [0], "response_ids": [0], "response_mask": [0]}
    one_token |= {"response_logprobs": None, "multi_modal_data": None, "extra_fields": {}}
    one_token |= {"routed_experts": output.routed_experts[:0]}
    return verls(output.model_copy(update=one_token))[ROLLOUT_ROUTES][:0].clone()


def _narrow_fields(verls: Callable[[Any], dict[str, Any]], output: Any) -> dict[str, Any]:
    """Returns verl's fields, with expert ids in uint8."""
    # The ids are hidden from verl's as_dict, which would convert and then copy them: 44 ms of the agent loop's event
    # loop for 32k tokens, 48 layers and top-8, instead of 12 in all.
    written = verls(output.model_copy(update={"routed_experts": None}))
    tokens = len(written["prompts"]) + len(written["responses"])
    return written | {ROLLOUT_ROUTES: whole_sequence(output.routed_experts, tokens)}


def _compare(agent_loop: Any, verls_as_dict: Any) -> None:
    """Raises PatchError unless narrow ids change only the dtype, for too few, enough and too many rows."""
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
            verls, mine = verls_as_dict(output), _narrow_fields(verls_as_dict, output)
            same = verls.keys() == mine.keys() and torch.equal(
                verls["routed_experts"], mine["routed_experts"].to(torch.int16)
            )
        except Exception as error:
            raise _unexpected(f"{type(error).__name__}: {error}") from error
        if not same or verls["routed_experts"].dtype != torch.int16:
            found = {name: (value.dtype, tuple(value.shape)) for name, value in verls.items() if torch.is_tensor(value)}
            raise _unexpected(f"{rows} rows of uint8 ids for 3 tokens become {found}")


def _unexpected(what: str) -> PatchError:
    return moved(CHANGE, f"AgentLoopOutput.as_dict carries routed_experts in another way ({what})")


# Pure from here on.


def whole_sequence(ids_mLK: np.ndarray, tokens: int) -> Tensor:
    """Returns [tokens, L, K]: the rows of the tokens that were forwarded, and zeros behind them, as verl's as_dict.

    This is a copy, because Ray's array is read-only and would keep Ray's memory in use.
    """
    missing = np.zeros((max(0, tokens - len(ids_mLK)), *ids_mLK.shape[1:]), ids_mLK.dtype)
    return torch.from_numpy(np.concatenate([ids_mLK[:tokens], missing]))


class Systematic:
    """Takes every 1/share-th of a series, from a random start on (Cochran, Sampling Techniques, 3rd ed., ch. 8).

    Of any n in a row, n times the share are taken, rounded up or down. With independent draws, a small batch could have
    none. A worker's trajectories complete roughly in the order of their lengths, so short and long ones are taken
    alike. Each process has its own start. Python's global random state is not touched, because agent loops and tools
    may have seeded it.
    """

    def __init__(self, share: float, start: float):
        self._share, self._due = share, start

    def take(self) -> bool:
        self._due += self._share
        due = self._due >= 1
        self._due -= due
        return due


class Turn:
    """The tokens and expert ids of a trajectory after a call.

    Args:
        tokens: the prompt and the generated tokens.
        rows_mLK: the rows of the first m tokens.
        memory: an array that begins with the rows and is longer, so that the next turn's rows fit behind them; or None.
        total: the checksum of the rows, made where they were captured; None if it did not come.
    """

    def __init__(
        self, tokens: Sequence[int], rows_mLK: np.ndarray, memory: np.ndarray | None = None, total: int | None = None
    ):
        self.tokens, self.rows_mLK, self.memory, self.total = list(tokens), rows_mLK, memory, total

    def sum_of(self, count: int) -> int:
        """Returns the checksum of the first `count` rows, as int64: that of all rows less the terms of the others."""
        total = (self.total or 0) - int(row_terms(self.rows_mLK[count:], self.tokens, count).sum())
        return (total + 2**63) % 2**64 - 2**63

    def held(self, prompt: Sequence[int]) -> int:
        """Returns how many rows belong to the prompt's first tokens. The last generated token was not forwarded, so it
        has no row."""
        return min(common_length(self.tokens, prompt), len(self.rows_mLK), len(self.tokens) - 1)

    def joined(self, held: int, new_nLK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns [held + n, L, K] and the memory that holds it. Over a trajectory, each row is written about twice."""
        total, memory = held + len(new_nLK), self.memory
        if held < len(self.rows_mLK) or memory is None or len(memory) < total:
            memory = np.empty((2 * total, *new_nLK.shape[1:]), new_nLK.dtype)
            memory[:held] = self.rows_mLK[:held]
        self.memory = None  # of two calls that continue from here, one can write behind the rows
        memory[held:total] = new_nLK
        return memory[:total], memory


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the number of first tokens that both have in common."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:  # true for most turns, and quick
        return shorter
    return next(index for index in range(shorter) if one[index] != other[index])


def row_terms(rows_nLK: np.ndarray, tokens: Sequence[int], first: int) -> Tensor:
    """Returns [n] int64 (`core.routing.route_terms`): the terms of the rows of a sequence's tokens from `first` on."""
    from verl_ext.core.routing import route_terms

    last = first + len(rows_nLK)
    ids_nLK = torch.from_numpy(np.asarray(rows_nLK).astype(np.int16))  # a copy: Ray's arrays are read-only
    return route_terms(ids_nLK, torch.tensor(tokens[first:last], dtype=torch.int64), torch.arange(first, last))


def sum_of_output(trajectory: TrajectoryState, rows: Any, tokens: Sequence[int]) -> int:
    """Returns the checksum, as int64, of the rows that an agent loop returns with these tokens; 0 if it is not known.

    The rows are in the memory of the turn that gave them. If they were copied, as verl does with those of an
    interrupted answer, only their tokens are left. Two requests can have the same tokens and different experts, so all
    turns with these tokens must have the same checksum.
    """
    turns, count = list((trajectory.turns or {}).values()), min(len(rows), len(tokens))
    own = [turn for turn in turns if isinstance(rows, np.ndarray) and np.may_share_memory(rows, turn.rows_mLK)]
    if not own and not trajectory.complete:
        return 0
    sums = {
        turn.sum_of(count)
        for turn in own or turns
        if turn.total is not None and len(turn.rows_mLK) >= count <= common_length(turn.tokens, tokens)
    }
    return sums.pop() if len(sums) == 1 else 0


@dataclass(slots=True)
class Value:
    """The part of vLLM's Logprob that verl reads."""

    logprob: float


def unpack_top_tokens(flat: Any, token_ids: Any) -> tuple[list[Value], np.ndarray, np.ndarray]:
    """Returns vLLM's FlatLogprobs at n places (at least one) as the sampled tokens' values, ids [n, K] int32 and log q
    [n, K] float32.

    Raises:
        HookError: the number of places is not the number of tokens, or places have different lengths.
    """
    n, entries = len(token_ids), len(flat.logprobs)
    width = entries // n
    if len(flat) != n or width * n != entries or width < 2:
        raise HookError(
            f"vLLM returned {entries} log-probabilities at {len(flat)} places for {n} tokens, where each place has the "
            "sampled token's and the top tokens'",
            fix=("stability.top_tokens.k=0",),
        )
    # Narrow types, because top tokens are most of a token's size. Not half precision: q (log q - log p) is of first
    # order in the rounding of log q, which does not cancel in the sum, and 2^-11 of it is more than a healthy KL.
    log_q = np.asarray(flat.logprobs, np.float32).reshape(n, width)
    ids = np.asarray(flat.token_ids, np.int32).reshape(n, width)
    return [Value(value) for value in log_q[:, 0].tolist()], ids[:, 1:], log_q[:, 1:]
