"""Write what recipe=cpu_tool trains on: a MoE with random weights, the quick start's tokenizer, and sums as data."""

import argparse
import importlib.util
import random
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3MoeForCausalLM

QUICK_START = Path(__file__).parents[1] / "cpu_smoke" / "make_assets.py"
DATA_SOURCE = "verl_ext/sums"
LARGEST_SUM = 5  # answers are one token, and the sums few enough to show learning within twenty steps


def build_model(tokenizer: "PreTrainedTokenizerFast", seed: int = 0) -> "Qwen3MoeForCausalLM":
    """Returns a Qwen3-MoE of about 3.4 M parameters in bfloat16, with random weights; its vocabulary is exactly the
    tokenizer's, as in the quick start."""
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
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state as it was
        torch.manual_seed(seed)
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)


def build_rows(count: int, seed: int, split: str) -> list[dict]:
    """Returns `count` sums such as `1+2=` as rows of verl's RL dataset, drawn evenly from all up to LARGEST_SUM."""
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


def quick_start() -> ModuleType:
    """Returns the module recipes/cpu_smoke/make_assets.py, changed to write our model and our rows."""
    spec = importlib.util.spec_from_file_location("cpu_tool_quick_start", QUICK_START)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build_model, module.build_rows = build_model, build_rows  # type: ignore[attr-defined]
    return module


def make_assets(out: Path, force: bool = False) -> list[Path]:
    """Writes `model/` (not warmed up), `train.parquet` and `val.parquet` under `out`; returns those written now."""
    return quick_start().make_assets(out, force, warm=0)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the model, tokenizer and data of recipe=cpu_tool.")
    folder = Path(".quickstart/tool_assets")
    parser.add_argument("--out", type=Path, default=folder, help="where to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write existing files again")
    arguments = parser.parse_args()
    for path in make_assets(arguments.out, arguments.force):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
