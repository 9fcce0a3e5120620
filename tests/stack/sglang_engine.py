"""Runs as a process of test_sglang_engine.py: compares SGLang's engine with transformers, in float32, on one model.

    python -m tests.stack.sglang_engine TASK FOLDER

FOLDER has `model/`. The results for the tests are printed as a line of JSON.
"""

import asyncio
import base64
import copy
import json
import os
import sys
import uuid
from types import SimpleNamespace

import numpy as np
import torch

from tests.stack.small_models import NEAR_TIE
from verl_ext.core.fake_quant import fake_quantized
from verl_ext.upstream import fake_quantization

FP4 = {"format": "fp4", "group": 16, "router": False, "head": False}
TOKENS = 24  # that each prompt is answered with
START = [20, 21, 22]
# The third begins as the first does: SGLang takes what they share from its prefix cache.
PROMPTS = ([*START, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14], [*START, 5, 6, 30])


def start(folder, **arguments):
    import verl.workers.rollout.sglang_rollout.async_sglang_server  # noqa: F401  with the plugin's changes
    from sglang.srt.entrypoints.engine import Engine

    engine = type("Engine", (Engine,), arguments.pop("processes", {}))
    settings = {
        "device": "cpu",
        "attention_backend": "torch_native",
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "max_total_tokens": 4096,
        "max_running_requests": 8,
        "mem_fraction_static": 0.3,
        "disable_cuda_graph": True,
        "enable_return_routed_experts": True,
        "random_seed": 1,
    }
    return engine(model_path=f"{folder}/model", **settings | arguments)


def reference(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32, attn_implementation="eager")


@torch.no_grad()
def experts_of(model, tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """[n - 1, L, K], sorted, of all of these n tokens but the last; and [n - 1], whether they are decided.

    Where the last expert chosen and the first one left out are as good as equal, rounding decides, in each engine for
    itself. Then this token's later layers may differ too, and all tokens after it.
    """
    scores = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    top_k = model.config.num_experts_per_tok
    best = torch.stack(scores, 1)[:-1].topk(top_k + 1)
    decided_nL = best.values[..., top_k - 1] - best.values[..., top_k] > NEAR_TIE
    return best.indices[..., :top_k].sort(-1)[0], decided_nL.all(1).int().cumprod(0).bool()


@torch.no_grad()
def compare(engine, model) -> dict[str, float]:
    """Returns the largest difference of the answers' log-probs, and the share of (token, layer) with equal experts,
    among the tokens whose experts are decided; and their share."""
    layers, top_k = model.config.num_hidden_layers, model.config.num_experts_per_tok
    sampling = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = engine.generate(
        input_ids=[list(prompt) for prompt in PROMPTS],
        sampling_params=sampling,
        return_logprob=True,
        return_routed_experts=True,
    )
    apart, same, decided, cached = [], [], [], 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        meta = answer["meta_info"]
        cached += meta["cached_tokens"]
        l_infer, tokens, *_ = zip(*meta["output_token_logprobs"], strict=True)
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0]
        places = torch.arange(len(prompt) - 1, len(prompt) + TOKENS - 1)
        expected = logits.double().log_softmax(-1)[places, torch.tensor(tokens)]
        experts, decided_n = experts_of(model, [*prompt, *tokens])
        decided.append(decided_n)
        apart.append((torch.tensor(l_infer).double() - expected).abs()[decided_n[places]])
        found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).copy()
        found_nLK = torch.from_numpy(found).view(-1, layers, top_k).sort(-1)[0]
        same.append((found_nLK == experts).all(-1)[decided_n].flatten())
    apart, same, decided = (torch.cat(parts).double() for parts in (apart, same, decided))
    return {
        "apart": float(apart.max()),
        "same_experts": float(same.mean()),
        "decided": float(decided.mean()),
        "cached": cached,
    }


def without_copy(*args, **kwargs):
    """SGLang's scheduler as it is, without the copy of captured ids."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.state_capturer.base import TopkCaptureOutput

    TopkCaptureOutput.copy_to_cpu = TopkCaptureOutput.copy_to_cpu.__wrapped__
    run_scheduler_process(*args, **kwargs)


def serving(engine, response_length=TOKENS):
    """One of verl's servers around this engine, with the plugin's changes."""
    from verl.workers.rollout.sglang_rollout import async_sglang_server

    from tests.support.sglang_server import server

    return server(async_sglang_server, engine.tokenizer_manager, prompt_length=8, response_length=response_length)


TOP_TOKENS = 8
LONG, SYNCS = 160, 6  # tokens of a response that is interrupted, and how often
SAMPLING: dict[str, dict] = {
    "all": {"temperature": 1.0},
    "temperature": {"temperature": 0.7, "top_p": 1.0, "top_k": -1},
    "top_k": {"temperature": 0.7, "top_k": 5},
    "both": {"temperature": 1.0, "top_k": 7, "top_p": 0.2},
}
MARGIN = 1e-3  # of a mass from top_p: nearer ones are decided by rounding


@torch.no_grad()
def compare_top_tokens(engine, server, model, sampling) -> dict[str, float]:
    """Compares what verl's server returns with transformers' logits in float64: the largest difference of log-probs, of
    the sampled tokens and of the top tokens, and the number of places at which something else was kept. Places whose
    experts are not decided are left out."""
    from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
    from verl_ext.upstream.agent_loop import TOP_TOKENS_ASKED

    asked = {"logprobs": True, "ignore_eos": True, "extra_args": {TOP_TOKENS_ASKED: TOP_TOKENS}} | sampling
    found = {"own": 0.0, "top": 0.0, "other_kept": 0, "places": 0, "kept": 0}
    for prompt in PROMPTS:
        answer = engine.loop.run_until_complete(server.generate(list(prompt), dict(asked), uuid.uuid4().hex))
        tokens = answer.token_ids
        ids, log_q = (answer.extra_fields[name] for name in (TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS))
        assert len(tokens) == len(ids) == TOKENS
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
        logits = logits[: int(experts_of(model, [*prompt, *tokens])[1][len(prompt) - 1 :].sum())]
        for place, p in enumerate((logits / sampling["temperature"]).softmax(-1)):
            mass, order = 0.0, p.argsort(descending=True)[: sampling.get("top_k", -1) % (len(p) + 1)]
            kept = []
            for token in order.tolist():
                if mass > sampling.get("top_p", 1.0):
                    break
                if kept and abs(mass - sampling.get("top_p", 1.0)) < MARGIN and len(kept) < sampling.get("top_k", 0):
                    kept = []  # rounding decides
                    break
                kept.append(token)
                mass += float(p[token])
            if not kept:
                continue
            q = torch.zeros_like(p)
            q[kept] = p[kept] / mass
            expected = q.log()[torch.from_numpy(ids[place]).long()]
            given = torch.from_numpy(log_q[place]).double()
            same = given.isfinite() & expected.isfinite()
            found["places"] += 1
            found["kept"] += int(given.isfinite().sum())
            found["other_kept"] += int(not torch.equal(given.isfinite(), expected.isfinite()))
            found["top"] = max(found["top"], float((given - expected)[same].abs().max()))
            found["own"] = max(found["own"], abs(answer.log_probs[place] - float(q.log()[tokens[place]])))
    return found


def compare_turns(server, model, run) -> dict[str, float]:
    """Runs two turns through verl's server; the second brings only new rows. Returns how many rows of both have the
    model's experts, and how many rows there are, where experts are decided."""
    from verl_ext.upstream.agent_loop import ROWS_HELD, Turn

    same, rows = 0, 0
    for prompt in PROMPTS:
        asked = {"logprobs": True, "ignore_eos": True, "max_new_tokens": TOKENS // 2}
        first = run(server.generate(list(prompt), dict(asked), uuid.uuid4().hex))
        turn = Turn([*prompt, *first.token_ids], first.routed_experts)
        other = (turn.tokens[-2] + 1) % model.config.vocab_size
        longer = [*turn.tokens[:-2], other, 41, 42]  # the agent loop cuts a turn, and a tool answers
        held = turn.held(longer)
        second = run(server.generate(longer, asked | {"extra_args": {ROWS_HELD: held}}, uuid.uuid4().hex))
        assert second.extra_fields[ROWS_HELD] == held == len(longer) - 3
        assert len(second.routed_experts) == len(longer) + len(second.token_ids) - 1 - held
        joined, _ = turn.joined(held, second.routed_experts)
        chosen_nLK, decided_n = experts_of(model, [*longer, *second.token_ids])
        agree_nL = (torch.from_numpy(joined).sort(-1)[0] == chosen_nLK).all(-1)[decided_n]
        same += int(agree_nL.sum())
        rows += agree_nL.numel()
    return {"same_experts": same / rows, "rows": rows}


def ask(engine, function, *arguments):
    """Calls a function in the engine's scheduler."""
    from verl_ext.upstream.engine_calls import ask_schedulers

    asked = ask_schedulers(engine.tokenizer_manager, f"{function.__module__}:{function.__name__}", *arguments)
    ((answer,),) = engine.loop.run_until_complete(asked)
    return answer


def compare_states(engine, model) -> dict[str, float]:
    """Compares the states that the probe asks for: the largest relative error of any point's states, how many points
    and tokens there are, and the largest difference of the prompts' log-probs. SGLang has the prompts' beginning in its
    prefix cache."""
    from tests.stack.small_models import states
    from verl_ext.probe.readings import head_dtypes
    from verl_ext.routing.recorder import joined_passes
    from verl_ext.upstream.engine_states import begin, end, read_states

    ask(engine, begin)
    apart, expected = [], []
    for prompt in PROMPTS:
        sampling = {"temperature": 1.0, "max_new_tokens": 1}
        asked = {"return_logprob": True, "logprob_start_len": 0}
        (answer,) = engine.generate(input_ids=[list(prompt)], sampling_params=sampling, **asked)
        given = torch.tensor([value for value, *_ in answer["meta_info"]["input_token_logprobs"][1:]]).double()
        ids = torch.tensor(prompt)
        with torch.no_grad():
            l_all = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
        apart.append(float((given - l_all.gather(1, ids[1:, None])[:, 0]).abs().max()))
        expected.append(states(model, ids))
    passes = read_states(ask(engine, end))
    assert head_dtypes(passes) == ["float32"]
    found = joined_passes(passes)
    assert set(found) == set(expected[0]), set(found) ^ set(expected[0])
    errors = []
    for point, rows in found.items():
        reference = torch.cat([of_one[point] for of_one in expected])
        errors.append(float((rows - reference).norm() / reference.norm()))
    return {"apart": max(apart), "error": max(errors), "points": len(found), "tokens": len(found["norm"])}


# Tasks


def as_transformers(folder):
    """Compares three times: at first, with the prefix cache filled, and after sending other weights."""
    engine, model = start(folder), reference(folder)
    found = {"first": compare(engine, model), "again": compare(engine, model), "states": compare_states(engine, model)}
    torch.manual_seed(3)
    model = perturbed(model)
    found["before"] = compare(engine, model)
    engine.update_weights_from_tensor(by_name(model), flush_cache=True)
    found["after"] = compare(engine, model)
    ask(engine, round_weights)
    engine.update_weights_from_tensor(by_name(model), flush_cache=True)
    found["rounded"] = compare(engine, rounded(model))
    found["unrounded"] = compare(engine, model)
    found["report"] = ask(engine, fake_quantization.report)
    engine.shutdown()
    return found


def round_weights(model_runner):
    fake_quantization.round_while_loading(model_runner.model, FP4)


def rounded(model):
    model = copy.deepcopy(model)
    for name, weight in model.named_parameters():
        if name.endswith(("_proj.weight", "gate_up_proj", "down_proj")):
            weight.data = fake_quantized(weight.data, FP4["format"], FP4["group"])
    return model


def by_name(model):
    from tests.stack import small_models

    return list(small_models.by_name(model).items())


def served(folder):
    """Returns the results of verl's server: top tokens by kind of sampling, and the routing of two turns."""
    engine, model = start(folder), reference(folder)
    server = serving(engine)
    found = {name: compare_top_tokens(engine, server, model, sampling) for name, sampling in SAMPLING.items()}
    found["turns"] = compare_turns(server, model, engine.loop.run_until_complete)
    engine.shutdown()
    return found


def retracted(folder):
    """Sends more requests at once than fit into the cache: all prompts twice, through verl's server."""
    from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
    from verl_ext.upstream.agent_loop import TOP_TOKENS_ASKED

    engine, model = start(folder, max_total_tokens=96, schedule_conservativeness=0.01), reference(folder)
    server = serving(engine)
    # Without ignore_eos, which has room kept for each whole response.
    asked = {"logprobs": True, "extra_args": {TOP_TOKENS_ASKED: TOP_TOKENS}}

    async def all_at_once():
        prompts = PROMPTS * 2
        return prompts, await asyncio.gather(
            *(server.generate(list(prompt), dict(asked), uuid.uuid4().hex) for prompt in prompts)
        )

    found = {"retractions": 0, "apart": 0.0, "top_apart": 0.0, "other_experts": 0, "places": 0}
    with torch.no_grad():
        for prompt, answer in zip(*engine.loop.run_until_complete(all_at_once()), strict=True):
            tokens = torch.tensor(answer.token_ids)
            assert 0 < len(tokens) == len(answer.log_probs) == len(answer.extra_fields[TOP_TOKEN_IDS])
            logits = model(torch.tensor([[*prompt, *answer.token_ids]])).logits[0, len(prompt) - 1 : -1]
            expected = logits.double().log_softmax(-1)
            own = torch.tensor(answer.log_probs).double() - expected.gather(1, tokens[:, None])[:, 0]
            ids, log_q = (torch.from_numpy(answer.extra_fields[name]) for name in (TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS))
            routes = torch.from_numpy(answer.routed_experts).sort(-1)[0]
            experts, decided_n = experts_of(model, [*prompt, *answer.token_ids])
            places = int(decided_n[len(prompt) - 1 :].sum())  # from the first on
            found["retractions"] += answer.num_preempted
            found["places"] += places
            if places:
                top = (log_q - expected.gather(1, ids.long()))[:places]
                found["apart"] = max(found["apart"], float(own[:places].abs().max()))
                found["top_apart"] = max(found["top_apart"], float(top.abs().max()))
            found["other_experts"] += int((routes != experts)[decided_n].sum())
    engine.shutdown()
    return found


def interrupted(folder):
    """Interrupts responses by weight syncs, through verl's client of the asynchronous modes, in a cache that is too
    small for them."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    from tests.support.agent_loop_worker import client_of

    engine, versions = start(folder, max_total_tokens=400, schedule_conservativeness=0.01), [reference(folder)]
    server, parts = serving(engine, response_length=LONG), [[] for _ in range(8)]
    server.global_steps = 0

    async def respond(number):
        async def remote(**asked):
            output = await server.generate(**asked)
            parts[number].append((asked["prompt_ids"], output))
            return output

        client = client_of(SimpleNamespace(generate=SimpleNamespace(remote=remote)), FullyAsyncLLMServerClient)
        prompt = list(PROMPTS[number % len(PROMPTS)])
        sampling = {"logprobs": True, "max_tokens": LONG}
        return prompt, await client.generate(str(number), prompt_ids=prompt, sampling_params=sampling)

    async def run():
        responses = [asyncio.create_task(respond(number)) for number in range(len(parts))]
        while not all(response.done() for response in responses) and len(versions) < SYNCS:
            await asyncio.sleep(0.3 + (len(versions) > 1))  # verl's client waits for 1 s before it goes on
            await server.abort_all_requests()
            versions.append(perturbed(versions[-1]))
            await engine.tokenizer_manager.update_weights_from_tensor(weights_request(versions[-1]), None)
            server.global_steps = len(versions) - 1
            await server.resume_generation()
        return await asyncio.gather(*responses)

    answers = engine.loop.run_until_complete(run())
    engine.shutdown()
    found = {"parts": max(map(len, parts)), "apart": 0.0, "other_experts": 0, "rows": 0, "decided": 0, "missing": 0}
    for pieces, (prompt, answer) in zip(parts, answers, strict=True):
        sequence, end = [*prompt, *answer.token_ids], len(prompt)
        assert len(answer.log_probs) == len(answer.token_ids)
        found["missing"] += len(sequence) - 1 - len(answer.routed_experts)
        routes = torch.from_numpy(answer.routed_experts).sort(-1)[0]
        for before, piece in pieces:
            if not piece.token_ids:
                continue
            assert len(before) == end
            start_at, end = (0 if end == len(prompt) else end - 1), end + len(piece.token_ids)
            model = versions[piece.extra_fields["global_steps"]]
            with torch.no_grad():
                l_all = model(torch.tensor([sequence[:end]])).logits[0, len(before) - 1 : -1].double().log_softmax(-1)
            own = l_all.gather(1, torch.tensor(piece.token_ids)[:, None])[:, 0]
            given = torch.tensor(answer.log_probs[len(before) - len(prompt) : end - len(prompt)]).double()
            expected, decided_n = experts_of(model, sequence[:end])
            apart = (given - own).abs()[decided_n[len(before) - 1 :]]
            found["apart"] = max(found["apart"], float(apart.max()) if len(apart) else 0.0)
            expected, decided_n = expected[start_at:], decided_n[start_at:]
            given = routes[start_at : end - 1]
            same = given.shape == expected.shape and torch.equal(given[decided_n], expected[decided_n])
            found["other_experts"] += 0 if same else len(expected)
            found["rows"] += len(expected)
            found["decided"] += int(decided_n.sum())
    return found


def perturbed(model):
    """A copy with other weights."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    return other


def weights_request(model):
    """Builds the request that `Engine.update_weights_from_tensor` sends to the tokenizer manager."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
    from sglang.srt.utils import MultiprocessingSerializer

    weights = [MultiprocessingSerializer.serialize(by_name(model))]
    return UpdateWeightsFromTensorReqInput(serialized_named_tensors=weights, flush_cache=True)


def parallel(folder):
    """Tensor parallel on two ranks, which SGLang takes on a machine of one NUMA node if each is given its cores."""
    os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1"
    engine = start(folder, tp_size=2)
    found = compare(engine, reference(folder))
    engine.shutdown()
    return found


def overlapped(folder):
    engine = start(folder, processes={"run_scheduler_process_func": staticmethod(without_copy)})
    found = compare(engine, reference(folder))
    engine.shutdown()
    return found


def failing(folder):
    """Starts a scheduler that finds no memory for its cache; this process gets its SIGQUIT."""
    start(folder, max_total_tokens=None, mem_fraction_static=-1.0)


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    print("found:", json.dumps(globals()[task](folder)), flush=True)
