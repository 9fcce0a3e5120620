"""Rows of earlier turns are held, through verl's own client and agent loop worker; for vLLM see tests/stack."""

import asyncio
import zlib
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from verl.experimental.agent_loop import agent_loop as verls_agent_loop
from verl.workers.rollout import llm_server
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from tests.support.agent_loop_worker import asked_for, changed, client_of
from tests.support.agent_loop_worker import run as run_in_worker
from tests.support.route_sum import route_sum
from verl_ext.base.names import ROUTE_SUM
from verl_ext.base.patching import PatchError
from verl_ext.upstream import agent_loop
from verl_ext.upstream.agent_loop import Extras, Turn, common_length, parse_extras

LAYERS, TOP_K = 2, 3


def rows_of(tokens):
    """Returns [tokens - 1, L, K], each row made from the tokens up to its own; the last token is not forwarded."""
    seeds = [zlib.crc32(bytes(tokens[: end + 1])) for end in range(len(tokens) - 1)]
    rows = [np.random.default_rng(seed).integers(0, 256, (LAYERS, TOP_K), np.uint8) for seed in seeds]
    return np.array(rows, np.uint8).reshape(-1, LAYERS, TOP_K)


class vLLMHttpServer:  # noqa: N801 (verl's name)
    """Answers as verl's server does, one (tokens, stop reason) after another, through an actor's handle.

    `routed` changes the rows of the answer with this number, as an engine that routes the same tokens otherwise.
    """

    def __init__(self, *answers, routed=lambda number, rows: rows):
        self.answers, self.sent, self.asked, self.routed = iter(answers), [], [], routed

    async def generate(self, prompt_ids, sampling_params, request_id, **_):
        assert sampling_params.get("extra_args") in (None, {"another": 1})
        self.asked.append(sampling_params)
        tokens, stop = next(self.answers)
        for _ in range(3):  # another call may come between
            await asyncio.get_running_loop().run_in_executor(None, int)
        rows = self.routed(len(self.asked) - 1, rows_of([*prompt_ids, *tokens])) if tokens else None
        return TokenOutput(token_ids=list(tokens), routed_experts=rows, stop_reason=stop, extra_fields={"a": 1})

    def handle(self):
        async def remote(**arguments):
            output = await self.generate(**arguments)
            self.sent.append(0 if output.routed_experts is None else len(output.routed_experts))
            return output

        return SimpleNamespace(generate=SimpleNamespace(remote=remote))


@pytest.fixture(scope="module", autouse=True)
def held():
    verls = vLLMHttpServer.generate
    server = agent_loop.change_server, SimpleNamespace(vLLMHttpServer=vLLMHttpServer)
    client = agent_loop.change_client, llm_server
    with changed(server, client, (agent_loop.change_agent_loop, verls_agent_loop), turns=True):
        yield
    assert vLLMHttpServer.generate is verls


def run(loop):
    """Returns what an agent loop returns in verl's worker."""
    return run_in_worker(loop, lambda outputs: outputs)


def calls(server, *prompts, kind=LLMServerClient, **arguments):
    """Returns the rows that one trajectory's calls with these prompts return."""
    return [output.routed_experts for output in run(loop_of(server, prompts, kind, arguments))]


def loop_of(server, prompts, kind=LLMServerClient, arguments=MappingProxyType({})):

    async def loop(sampling_params, **_):
        client = client_of(server.handle(), kind)
        return [
            await client.generate("a", prompt_ids=prompt, sampling_params=sampling_params, **arguments)
            for prompt in prompts
        ]

    return loop


def fields_of(prompt, response, rows):
    """Returns the batch's fields of an agent loop's output."""
    settings = {"response_mask": [1] * len(response), "metrics": verls_agent_loop.AgentLoopMetrics()}
    output = verls_agent_loop.AgentLoopOutput(prompt_ids=prompt, response_ids=response, routed_experts=rows, **settings)
    return output.as_dict()


def written(server, *prompts, keep=None, change=lambda rows: rows, kind=LLMServerClient, **arguments):
    """Returns the batch's fields of a trajectory that ends with the last of these calls, cut to `keep` tokens."""

    def write(outputs):
        prompt, (*_, last) = prompts[-1], outputs
        response = last.token_ids[: None if keep is None else max(0, keep - len(prompt))]
        rows = change(last.routed_experts)[: len(prompt) + len(response)]
        return fields_of(prompt, response, rows)

    return run_in_worker(loop_of(server, prompts, kind, arguments), write)


def sum_of(fields):
    ids = [*fields["prompts"].tolist(), *fields["responses"].tolist()]
    return route_sum(fields["routed_experts"], ids)


def done(*tokens):
    return tokens, "completed"


tokens = st.lists(st.integers(0, 3), max_size=6)


@given(st.lists(st.tuples(tokens, tokens, st.integers(0, 4)), min_size=1, max_size=5))
def test_every_turn_returns_what_it_would_have_and_earlier_arrays_stay(turns):
    """A turn: the generated tokens, the tokens put behind them, and how many the loop first cuts from the end."""
    prompt, prompts = [7, 8], []
    for generated, added, cut in turns:
        prompts.append(prompt)
        prompt = [*prompt, *generated]
        prompt = [*prompt[: max(1, len(prompt) - cut)], *added]
    server = vLLMHttpServer(*(done(*generated) for generated, _, _ in turns))
    found = calls(server, *prompts)
    for rows, before, (generated, _, _) in zip(found, prompts, turns, strict=True):
        if generated:
            assert rows.dtype == np.uint8 and np.array_equal(rows, rows_of([*before, *generated]))
        else:
            assert rows is None


@given(st.lists(st.tuples(tokens, tokens, st.integers(0, 4)), min_size=1, max_size=5), st.integers(0, 8))
def test_the_sum_of_a_trajectory_is_that_of_its_rows_and_tokens(turns, dropped):
    prompt, prompts = [7, 8], []
    for generated, added, cut in turns:
        prompts.append(prompt)
        prompt = [*prompt, *generated]
        prompt = [*prompt[: max(1, len(prompt) - cut)], *added]
    answers = [done(*generated) for generated, _, _ in turns[:-1]] + [done(1, 2, 3)]
    fields = written(vLLMHttpServer(*answers), *prompts, keep=len(prompts[-1]) + max(1, 3 - dropped))
    assert fields["routed_experts_sum"].tolist() == [sum_of(fields)] != [0]


@pytest.mark.parametrize("fault", ["a row moves", "an id changes", "held rows are others"])
def test_the_sum_is_that_of_the_server_whatever_happens_to_the_rows_behind_it(fault, monkeypatch):
    def change(rows):
        rows = rows.copy()
        if fault == "a row moves":
            rows[[1, 2]] = rows[[2, 1]]
        if fault == "an id changes":
            rows[3, 1, 0] += 1
        return rows

    if fault == "held rows are others":
        monkeypatch.setattr(
            Turn, "joined", lambda turn, count, new: (np.concatenate([turn.rows_mLK[:count] + 1, new]), None)
        )
    fields = written(vLLMHttpServer(done(1, 2), done(3, 4)), [7, 8], [7, 8, 1, 2, 9], change=change)
    whole = torch.from_numpy(rows_of([7, 8, 1, 2, 9, 3, 4]))
    assert fields["routed_experts_sum"].tolist() == [route_sum(whole, [7, 8, 1, 2, 9, 3, 4])] != [sum_of(fields)]


@dataclass(frozen=True)
class Call:
    """A call of an agent loop; the engine gives the row number `otherwise` (None: no row) other experts than usual."""

    request: str
    prompt: list[int]
    answer: list[int]
    otherwise: int | None
    image: bool


@dataclass(frozen=True)
class Attempts:
    """The calls of an agent loop, and which of their answers it returns: its first `keep` tokens, its rows copied."""

    calls: list[Call]
    returned: int
    keep: int
    copied: bool

    def each_in_its_own_request(self):
        calls = [replace(call, request=str(number), image=False) for number, call in enumerate(self.calls)]
        return replace(self, calls=calls, copied=False)


bits = st.lists(st.integers(0, 1), max_size=3)  # few tokens, so that calls have them in common
attempts = st.builds(
    lambda *parts: Attempts(parts[0], parts[1] % len(parts[0]), *parts[2:]),
    st.lists(
        st.builds(
            Call,
            st.sampled_from("ab"),
            bits.map(lambda added: [7, 8, *added]),
            bits.filter(len),
            st.none() | st.integers(0, 6),
            st.sampled_from([False] * 7 + [True]),
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
)


def written_by(attempts, *, at_once=False, change=lambda rows: rows):
    """Returns the batch's fields of the answer that the agent loop returns, and the checksum of that answer's rows."""
    calls = attempts.calls

    def routed(number, rows):
        if calls[number].otherwise is not None:
            rows[calls[number].otherwise % len(rows)] ^= 1
        return rows

    async def loop(sampling_params, **_):
        client = client_of(server.handle())
        asked = [
            client.generate(
                call.request,
                prompt_ids=call.prompt,
                sampling_params=sampling_params,
                image_data=["an image"] if call.image else None,
            )
            for call in calls
        ]
        return await asyncio.gather(*asked) if at_once else [await each for each in asked]

    def write(outputs):
        prompt, answer = calls[attempts.returned].prompt, outputs[attempts.returned]
        response = answer.token_ids[: attempts.keep]
        rows = answer.routed_experts[: len(prompt) + len(response)]
        total = route_sum(rows, [*prompt, *response])
        rows = change(rows.copy() if attempts.copied else rows)
        return fields_of(prompt, response, rows), total

    server = vLLMHttpServer(*(done(*call.answer) for call in calls), routed=routed)
    return run_in_worker(loop, write)


@given(attempts, st.booleans())
def test_the_sum_is_that_of_the_turn_that_gave_the_rows_or_none(attempts, at_once):
    fields, total = written_by(attempts, at_once=at_once)
    assert fields["routed_experts_sum"].tolist() in ([total], [0])


@given(attempts)
def test_a_change_behind_the_server_is_found_though_turns_of_other_requests_have_the_tokens(attempts):
    def change(rows):
        rows[-1, 0, 0] ^= 1
        return rows

    fields, total = written_by(attempts.each_in_its_own_request(), change=change)
    assert fields["routed_experts_sum"].tolist() == [total] != [sum_of(fields)]


def test_rows_of_other_tokens_have_no_sum():
    fields = written(vLLMHttpServer(done(1, 2), done(3)), [7, 8], [7, 8, 1, 2], image_data=["an image"])
    assert fields["routed_experts_sum"].tolist() == [0]


def test_rows_that_are_held_do_not_travel():
    server = vLLMHttpServer(done(1, 2), done(3), done(4, 5))
    calls(server, [7, 8, 9], [7, 8, 9, 1, 2, 50, 51], [7, 8, 9, 1, 60])
    # 4 rows of 5 tokens; 3 more of 8, with that of the token 2; of the third prompt, the first 4 tokens are known.
    assert server.sent == [4, 3, 2]


def test_a_response_that_a_weight_sync_interrupts_has_a_sum_though_verl_copies_its_rows(no_waiting):
    server = vLLMHttpServer(((1, 2), "aborted"), ((), "aborted"), ((3,), "aborted"), done(4, 5))
    fields = written(server, [7, 8], kind=FullyAsyncLLMServerClient)
    assert fields["responses"].tolist() == [1, 2, 3, 4, 5]
    assert fields["routed_experts_sum"].tolist() == [sum_of(fields)] != [0]


def test_a_response_that_a_weight_sync_interrupts_has_all_rows_once(no_waiting):
    server = vLLMHttpServer(((1, 2), "aborted"), ((), "aborted"), done(3, 4), done(5))
    found = calls(server, [7, 8], [7, 8, 1, 2, 3, 4, 9], kind=FullyAsyncLLMServerClient)
    assert np.array_equal(found[0], rows_of([7, 8, 1, 2, 3, 4]))
    assert np.array_equal(found[1], rows_of([7, 8, 1, 2, 3, 4, 9, 5]))
    assert server.sent == [3, 0, 2, 2]


def test_calls_that_go_on_from_the_same_turn_do_not_write_over_each_other():
    server = vLLMHttpServer(done(1), done(2), done(3), done(4))

    async def loop(sampling_params, **_):
        client = client_of(server.handle())
        for prompt in ([7, 8], [7, 8, 1]):  # from the second on there is memory behind the rows
            await client.generate("a", prompt_ids=prompt, sampling_params=sampling_params)
        both = ([7, 8, 1, 2, 30], [7, 8, 1, 2, 40])
        return await asyncio.gather(
            *(client.generate("a", prompt_ids=prompt, sampling_params=sampling_params) for prompt in both)
        )

    one, other = run(loop)
    assert np.array_equal(one.routed_experts, rows_of([7, 8, 1, 2, 30, *one.token_ids]))
    assert np.array_equal(other.routed_experts, rows_of([7, 8, 1, 2, 40, *other.token_ids]))


def test_another_trajectory_holds_nothing_and_images_hold_nothing():
    server = vLLMHttpServer(done(1), done(2), done(3), done(4))
    calls(server, [7, 8])
    calls(server, [7, 8, 1])
    calls(server, [7, 8], [7, 8, 1], image_data=["an image"])
    assert server.sent == [2, 3, 2, 3]


def test_a_manager_of_ones_own_gets_all_rows_of_every_turn():
    """Outside of verl's AgentLoopWorker there is no trajectory whose rows could be held."""
    server = vLLMHttpServer(done(1, 2), done(3))
    outputs = asyncio.run(loop_of(server, [[7, 8], [7, 8, 1, 2, 9]])({"temperature": 1.0}))
    assert server.sent == [3, 5] and not any(ROUTE_SUM in output.extra_fields for output in outputs)
    assert np.array_equal(outputs[0].routed_experts, rows_of([7, 8, 1, 2]))
    assert np.array_equal(outputs[1].routed_experts, rows_of([7, 8, 1, 2, 9, 3]))


def test_what_the_agent_loop_passes_on_is_left_and_the_mark_is_taken_away():
    server = vLLMHttpServer(done(1), done(2))

    async def loop(sampling_params, **_):
        client, sampling = client_of(server.handle()), {"temperature": 1.0, "extra_args": {"another": 1}}
        for prompt in ([7, 8], [7, 8, 1]):
            output = await client.generate("a", prompt_ids=prompt, sampling_params=sampling)
        return sampling, output.extra_fields

    sampling, extra_fields = run(loop)
    assert sampling == {"temperature": 1.0, "extra_args": {"another": 1}}
    assert extra_fields == {"a": 1, "min_global_steps": None, "max_global_steps": None}


def test_memory_is_taken_anew_at_doubled_length_alone():
    turn, taken = Turn([1, 2], np.zeros((1, LAYERS, TOP_K), np.uint8)), 0
    for _ in range(200):
        before = turn.memory
        rows, memory = turn.joined(len(turn.rows_mLK), np.ones((1, LAYERS, TOP_K), np.uint8))
        taken += memory is not before
        turn = Turn([*turn.tokens, 3], rows, memory)
    assert len(turn.rows_mLK) == 201 and taken <= 8


def test_the_last_token_has_no_row_whatever_the_engine_returned():
    turn = Turn([1, 2, 3], np.zeros((4, LAYERS, TOP_K), np.uint8))
    assert turn.held([1, 2, 3, 4]) == 2 and turn.held([1, 2]) == 2 and turn.held([1, 5]) == 1 and turn.held([]) == 0


@given(tokens, tokens)
def test_common_is_where_they_first_differ(one, other):
    same = common_length(one, other)
    assert one[:same] == other[:same]
    assert same == min(len(one), len(other)) or one[same] != other[same]


def test_a_server_that_takes_other_arguments_is_refused():
    class Other:
        async def generate(self, prompt):
            pass

    with asked_for(turns=True), pytest.raises(PatchError, match="VERL_EXT_AGENT_LOOP=turns:0"):
        agent_loop.change_server(SimpleNamespace(vLLMHttpServer=Other))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["recipe=cpu_tool", "stability.router_agreement=true"], True),
        (["recipe=cpu_tool", "stability.router_agreement=true", "actor_rollout_ref.rollout.name=sglang"], True),
        (["recipe=cpu_smoke", "stability.router_agreement=true"], True),
        (["recipe=cpu_tool", "stability.router_agreement=false"], False),
        (["recipe=cpu_tool", "actor_rollout_ref.rollout.enable_rollout_routing_replay=true"], True),
    ],
)
def test_a_launch_asks_for_it_where_a_rollout_returns_routing(compose, overrides, expected):
    from verl_ext.features.stability import stability_config
    from verl_ext.features.table import apply_engine_settings, read_features

    config = compose("stability=icepop", *overrides)
    apply_engine_settings(read_features(config, stability_config(config.stability)))
    place = f"ray_kwargs.ray_init.runtime_env.env_vars.{agent_loop.VARIABLE}"
    assert Extras(**parse_extras(OmegaConf.select(config, place) or "")).turns is expected
