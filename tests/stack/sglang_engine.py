"""What a process of test_sglang_engine.py runs: SGLang's engine beside transformers, in float32, on one model.

    python -m tests.stack.sglang_engine TASK FOLDER

FOLDER has `model/`. What the tests compare is printed as a line of JSON.
"""

import base64
import json
import sys

import numpy as np
import torch

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
def compare(engine, model) -> dict[str, float]:
    """The largest difference of the answers' log-probs, and the share of (token, layer) with the same experts."""
    layers, top_k = model.config.num_hidden_layers, model.config.num_experts_per_tok
    sampling = {"temperature": 1.0, "max_new_tokens": TOKENS, "ignore_eos": True}
    answers = engine.generate(
        input_ids=[list(prompt) for prompt in PROMPTS],
        sampling_params=sampling,
        return_logprob=True,
        return_routed_experts=True,
    )
    apart, same, cached = [], [], 0
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        meta = answer["meta_info"]
        cached += meta["cached_tokens"]
        l_infer, tokens, *_ = zip(*meta["output_token_logprobs"], strict=True)
        output = model(torch.tensor([[*prompt, *tokens]]), output_router_logits=True)
        places = torch.arange(len(prompt) - 1, len(prompt) + TOKENS - 1)
        expected = output.logits[0].double().log_softmax(-1)[places, torch.tensor(tokens)]
        apart.append((torch.tensor(l_infer).double() - expected).abs().max())
        found = np.frombuffer(base64.b64decode(meta["routed_experts"]), np.int32).copy()
        found_nLK = torch.from_numpy(found).view(-1, layers, top_k).sort(-1)[0]
        chosen_nLK = torch.stack([scores.topk(top_k)[1] for scores in output.router_logits], 1)[:-1].sort(-1)[0]
        same.append((found_nLK == chosen_nLK).all(-1).flatten())
    return {"apart": float(max(apart)), "same_experts": float(torch.cat(same).float().mean()), "cached": cached}


def without_copy(*args, **kwargs):
    """SGLang's scheduler as it is, without the copy of captured ids."""
    from sglang.srt.managers.scheduler import run_scheduler_process
    from sglang.srt.state_capturer.base import TopkCaptureOutput

    TopkCaptureOutput.copy_to_cpu = TopkCaptureOutput.copy_to_cpu.__wrapped__
    run_scheduler_process(*args, **kwargs)


# Tasks


def as_transformers(folder):
    """First, again with the prefix cache filled, and after other weights were sent."""
    engine, model = start(folder), reference(folder)
    found = {"first": compare(engine, model), "again": compare(engine, model)}
    torch.manual_seed(3)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    found["before"] = compare(engine, model)
    engine.update_weights_from_tensor(by_name(model), flush_cache=True)
    found["after"] = compare(engine, model)
    engine.shutdown()
    return found


def by_name(model):
    """Weights by the names of a checkpoint, where each expert has its own."""
    from tests.stack.megatron_engine import by_name

    return list(by_name(model).items())


def overlapped(folder):
    engine = start(folder, processes={"run_scheduler_process_func": staticmethod(without_copy)})
    found = compare(engine, reference(folder))
    engine.shutdown()
    return found


def failing(folder):
    """The scheduler finds less than no memory for its cache; this process gets its SIGQUIT."""
    start(folder, max_total_tokens=None, mem_fraction_static=-1.0)


if __name__ == "__main__":
    task, folder = sys.argv[1:]
    print("found:", json.dumps(globals()[task](folder)), flush=True)
