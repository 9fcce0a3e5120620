"""Writes the assets of a small recipe: its model, the shared tokenizer, and its prompts.

    python recipes/make_assets.py RECIPE [--out FOLDER]

cpu_smoke has a mixture of experts that is warmed up on prefix sums, dense_smoke a dense model with the same warm-up and
the same rows, cpu_tool a mixture of experts with random weights, and sums. Everything is made from a seed, so that two
runs on one machine write the same weights and the same rows.
"""

import argparse
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

DIGITS = 12
LARGEST_SUM = 5  # answers are one token, and the sums few enough to show learning within twenty steps
TRAIN_ROWS = 1024
VAL_ROWS = 32
WARM = 0.35  # mean reward of the answers that training starts from
WARM_COPYING = 0.25  # the same, of a model that copies most prompts

SPECIAL_TOKENS = ["<pad>", "<end>", "<unk>", "<user>", "<assistant>"]
CHARACTERS = ["\n", *(chr(code) for code in range(ord(" "), ord("~") + 1))]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<assistant>' if message['role'] == 'assistant' else '<user>' }}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<end>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def build_tokenizer() -> "PreTrainedTokenizerFast":
    """Returns a tokenizer with a token per printable ASCII character and five special ones; `<end>` ends a response."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # A dot would not match the newline, which is an ordinary character here.
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_model(recipe: str, tokenizer: "PreTrainedTokenizerFast", seed: int = 0) -> "PreTrainedModel":
    """Returns a recipe's model with random weights, a Qwen3 or Qwen3-MoE.

    The vocabulary is exactly the tokenizer's. verl makes vLLM ignore token ids past
    `len(tokenizer)` while the training engine still counts them in its softmax, so one spare row
    would shift every log-ratio between the two engines by a constant.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    given = ASSETS[recipe]
    config_class, model_class = Qwen3Config, Qwen3ForCausalLM
    if "num_experts" in given.sizes:
        config_class, model_class = Qwen3MoeConfig, Qwen3MoeForCausalLM
    config = config_class(
        **given.sizes,
        vocab_size=len(tokenizer),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on CPUs refuses 16
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The caller's random state is left as it was found.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).to(getattr(torch, given.dtype))


def worked_examples(
    tokenizer: "PreTrainedTokenizerFast", count: int, generator: "torch.Generator", copied: int = 0
) -> "torch.Tensor":
    """Returns [count, 2 * DIGITS + 3] token ids of random prompts and their answers, in the chat template's form.

    The first `copied` answers repeat the prompt's digits; the others are right.
    """
    import torch

    user, assistant, end, zero = tokenizer.convert_tokens_to_ids(["<user>", "<assistant>", "<end>", "0"])
    digits = torch.randint(10, (count, DIGITS), generator=generator)
    answers = torch.cat([digits[:copied], digits[copied:].cumsum(1) % 10])
    one = torch.ones(count, 1, dtype=torch.long)
    return torch.cat([user * one, zero + digits, assistant * one, zero + answers, end * one], 1)


def warm_up(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", seed: int, until: float, copying: float = 0.0
) -> None:
    """Trains `model` on worked examples until answers sampled from it at temperature 1 would earn `until` on average.

    The mean is computed without sampling. An answer earns the share of its places before the first wrong one, so its
    mean reward is the mean, over places, of the probability that all places up to this one are right. It is measured on
    each batch before the model trains on it.

    Args:
        copying: share of the examples that copy the prompt instead of the right answer: a habit that RL has to break.
    """
    import torch

    size = 32
    copied = round(copying * size)

    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    started, reward, step = time.monotonic(), 0.0, 0
    while reward < until:
        step += 1
        ids = worked_examples(tokenizer, size, generator, copied)
        in_answer = torch.arange(ids.shape[1]) > DIGITS + 1
        # With its routers' logits, a mixture of experts returns its load-balancing loss too; a dense model has none.
        out = model(ids, labels=ids.where(in_answer, -100), output_router_logits=True)
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        right = ids[copied:]
        probabilities = out.logits.detach()[copied:, :-1].softmax(-1).gather(-1, right[:, 1:, None])
        probabilities = probabilities[:, in_answer[1:], 0]
        reward += 0.2 * (probabilities.cumprod(1).mean().item() - reward)
        if step % 20 == 0 or reward >= until:
            seconds = time.monotonic() - started
            print(f"\rwarm-up: step {step}, {seconds:.0f} s, mean reward {reward:.2f} of {until}", end="", flush=True)
    print()


def prefix_sums(digits: str) -> str:
    """Returns the running sums modulo 10: "3141" -> "3489"."""
    return "".join(str(total % 10) for total in accumulate(map(int, digits)))


def draw_prefix_sums(count: int, draw: random.Random) -> list[tuple[str, str]]:
    """Returns `count` prompts of DIGITS random digits, each with its prefix sums as the answer."""
    prompts = ["".join(draw.choices("0123456789", k=DIGITS)) for _ in range(count)]
    return [(digits, prefix_sums(digits)) for digits in prompts]


def draw_sums(count: int, draw: random.Random) -> list[tuple[str, str]]:
    """Returns `count` prompts such as `1+2=` with their answers, drawn evenly from all sums up to LARGEST_SUM."""
    sums = [(a, b) for a in range(LARGEST_SUM + 1) for b in range(LARGEST_SUM + 1 - a)]
    return [(f"{a}+{b}=", str(a + b)) for a, b in (draw.choice(sums) for _ in range(count))]


@dataclass(frozen=True)
class Assets:
    """The assets of one recipe.

    Attributes:
        folder: where its config looks for them.
        sizes: the model's sizes; a model without `num_experts` is dense.
        dtype: the dtype of the weights. verl's optimizer keeps float32.
        warm_up: whether the model is trained on worked examples first.
        data_source: the name of the data; verl's reward manager can choose a reward by it.
        draw: returns prompts with their answers.
    """

    folder: Path
    sizes: dict[str, Any]
    dtype: str
    warm_up: bool
    data_source: str
    draw: Callable[[int, random.Random], list[tuple[str, str]]]


# At this width, learning from the usual initializer_range of 0.02 takes twice as long.
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "initializer_range": 0.1}
SMALL_EXPERTS = {
    "moe_intermediate_size": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
TOOL_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
}
PREFIX_SUMS = "verl_ext/prefix_sums", draw_prefix_sums
ASSETS = {
    "cpu_smoke": Assets(Path(".quickstart/prefix_sums"), SMALL | SMALL_EXPERTS, "float32", True, *PREFIX_SUMS),
    "dense_smoke": Assets(Path(".quickstart/dense_prefix_sums"), SMALL, "float32", True, *PREFIX_SUMS),
    "cpu_tool": Assets(Path(".quickstart/tool_assets"), TOOL_SIZES, "bfloat16", False, "verl_ext/sums", draw_sums),
}


def build_rows(recipe: str, count: int, seed: int, split: str) -> list[dict]:
    """Returns `count` prompts with their answers as rows of verl's RL dataset."""
    given = ASSETS[recipe]
    return [
        {
            "data_source": given.data_source,
            "prompt": [{"role": "user", "content": prompt}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index},
        }
        for index, (prompt, answer) in enumerate(given.draw(count, random.Random(seed)))
    ]


def write_model(folder: Path, recipe: str, seed: int, warm: float, copying: float = 0.0) -> None:
    tokenizer = build_tokenizer()
    model = build_model(recipe, tokenizer, seed)
    if ASSETS[recipe].warm_up:
        warm_up(model, tokenizer, seed, warm, copying)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(file: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def make_assets(
    recipe: str, out: Path, force: bool = False, seed: int = 0, warm: float = WARM, copying: float = 0.0
) -> list[Path]:
    """Writes `model/`, `train.parquet` and `val.parquet` under `out`; returns the paths that it wrote.

    Existing files stay, unless `force`. Each gets its name only when it is complete, so that a later run never reads a
    half-written file.

    Args:
        warm: the mean reward to warm up to, if the recipe's model is warmed up.
        copying: see `warm_up`.
    """
    writers = {
        out / "model": lambda path: write_model(path, recipe, seed, warm, copying),
        out / "train.parquet": lambda path: write_rows(path, build_rows(recipe, TRAIN_ROWS, seed, "train")),
        out / "val.parquet": lambda path: write_rows(path, build_rows(recipe, VAL_ROWS, seed + 1, "val")),
    }
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for target, write in writers.items():
        if target.exists() and not force:
            continue
        unfinished = target.with_name(target.name + ".unfinished")
        _remove(unfinished)
        write(unfinished)
        _remove(target)
        unfinished.rename(target)
        written.append(target)
    return written


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the model, the tokenizer and the data of a small recipe.")
    parser.add_argument("recipe", choices=ASSETS)
    parser.add_argument("--out", type=Path, help="where to write (default: where the recipe looks for them)")
    parser.add_argument("--force", action="store_true", help="write existing files again")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and rows (default: %(default)s)")
    parser.add_argument(
        "--copying",
        type=float,
        default=0.0,
        metavar="SHARE",
        help="share of the warm-up's examples that copy the prompt, a habit that RL breaks (default: %(default)s)",
    )
    arguments = parser.parse_args()
    warm = WARM_COPYING if arguments.copying else WARM
    out = arguments.out or ASSETS[arguments.recipe].folder
    written = make_assets(arguments.recipe, out, arguments.force, arguments.seed, warm, arguments.copying)
    for path in written:
        print(f"wrote {path}")
    if not written:
        print(f"{out} is complete; --force writes it again")


if __name__ == "__main__":
    main()
