"""Write what the CPU quick start trains on: a small MoE model, its tokenizer, and sums as data.

Everything is made from a seed, so that two runs write the same weights and the same rows.
"""

import argparse
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

DATA_SOURCE = "verl_ext/sums"
LARGEST_SUM = 5  # an answer is one token, and few enough sums that twenty steps show it learning
TRAIN_ROWS = 1024
VAL_ROWS = 32

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
    """One token per printable ASCII character, and five special ones; `<end>` ends a response."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + CHARACTERS)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    # A dot would not match the newline, which is a character like any other here.
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


def build_model(tokenizer: "PreTrainedTokenizerFast", seed: int = 0) -> "Qwen3MoeForCausalLM":
    """A Qwen3-MoE of about 3.4 M parameters in bfloat16, with random weights.

    The vocabulary is exactly the tokenizer's. verl makes vLLM ignore token ids past
    `len(tokenizer)` while the training engine still counts them in its softmax, so one spare row
    would shift every log-ratio between the two engines by a constant.
    """
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    # The caller's random state is left as it was found.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def build_rows(count: int, seed: int, split: str) -> list[dict]:
    """`count` sums such as `1+2=` as rows of verl's RL dataset, drawn evenly from all that fit."""
    sums = [(a, b) for a in range(LARGEST_SUM + 1) for b in range(LARGEST_SUM + 1 - a)]
    draw = random.Random(seed)
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": f"{a}+{b}="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"split": split, "index": index},
        }
        for index, (a, b) in enumerate(draw.choice(sums) for _ in range(count))
    ]


def write_model(folder: Path, seed: int) -> None:
    tokenizer = build_tokenizer()
    build_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_rows(file: Path, rows: list[dict]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def make_assets(out: Path, force: bool = False, seed: int = 0) -> list[Path]:
    """Write `model/`, `train.parquet` and `val.parquet` under `out`; return the ones written now.

    What is already there stays, unless `force`. Each appears under its name only when it is complete,
    so that an interrupted run leaves nothing that a later one would mistake for finished.
    """
    writers = {
        out / "model": lambda path: write_model(path, seed),
        out / "train.parquet": lambda path: write_rows(path, build_rows(TRAIN_ROWS, seed, "train")),
        out / "val.parquet": lambda path: write_rows(path, build_rows(VAL_ROWS, seed + 1, "val")),
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
    parser = argparse.ArgumentParser(description="Write the CPU quick start's model, tokenizer and data.")
    folder = Path(".quickstart/assets")
    parser.add_argument("--out", type=Path, default=folder, help="where to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write again what is already there")
    arguments = parser.parse_args()
    written = make_assets(arguments.out, arguments.force)
    for path in written:
        print(f"wrote {path}")
    if not written:
        print(f"{arguments.out} is complete; --force writes it again")


if __name__ == "__main__":
    main()
