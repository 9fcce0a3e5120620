"""Write what recipe=dense_smoke trains on: a small dense Qwen3; warm-up, tokenizer and data of recipes/cpu_smoke."""

import argparse
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

QUICK_START = Path(__file__).parents[1] / "cpu_smoke" / "make_assets.py"


def build_model(tokenizer: "PreTrainedTokenizerFast", seed: int = 0) -> "Qwen3ForCausalLM":
    """Builds a model as deep and wide as the quick start's, with as many parameters per token and random weights in
    float32. Its vocabulary is exactly the tokenizer's for the same reason."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # vLLM's attention on CPUs refuses 16
        initializer_range=0.1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # leave the caller's random state as it was
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def quick_start() -> ModuleType:
    """Returns the module recipes/cpu_smoke/make_assets.py, changed to write our model."""
    spec = importlib.util.spec_from_file_location("dense_smoke_quick_start", QUICK_START)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.build_model = build_model  # type: ignore[attr-defined]
    return module


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the dense smoke test's model, tokenizer and data.")
    folder = Path(".quickstart/dense_prefix_sums")
    parser.add_argument("--out", type=Path, default=folder, help="where to write (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="write existing files again")
    arguments = parser.parse_args()
    for path in quick_start().make_assets(arguments.out, arguments.force):
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
