"""verl's FSDP2 engine on one rank, around a model that is built on the device instead of read from a disk, and the
batches that it reads."""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast

from gpu import attention
from gpu.models import build

PROMPT, RESPONSE = 128, 384  # tokens of each sequence
TOKENS, TINY_TOKENS = 8192, 512  # of a micro-batch


@contextmanager
def one_rank() -> Iterator[None]:
    """Context in which verl's engines of one rank can be built and run, with our attention among rows of one length."""
    import verl_ext.plugins.verl  # noqa: F401  (verl's platform for CPUs; a plugin that is not installed is not found)

    attention.register(PROMPT + RESPONSE)
    with tempfile.TemporaryDirectory() as folder:
        start_one_rank(Path(folder))
        yield
        torch.distributed.destroy_process_group()


def start_one_rank(folder: Path) -> None:
    """Starts torch.distributed, which the engine asks about its ranks."""
    for backend in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{backend}_SOCKET_IFNAME", "lo")  # a machine without network may not know its own name
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    backends = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    torch.distributed.init_process_group(backends, rank=0, world_size=1, init_method=f"file://{folder}/store")


def verl_engine(config: PretrainedConfig, dtype: torch.dtype, device: str) -> Any:
    """Returns an initialized FSDPEngineWithLMHead."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    name = str(dtype).removeprefix("torch.")
    experts = config._experts_implementation

    def made(*args: Any, config: PretrainedConfig, **settings: Any) -> Any:
        config._experts_implementation = experts  # which no file of a config holds
        return build(config, dtype, device)

    with tempfile.TemporaryDirectory() as folder:  # the engine reads the config and a tokenizer
        config.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        engine = FSDPEngineWithLMHead(
            model_config=HFModelConfig(
                path=folder,
                use_remove_padding=True,
                enable_gradient_checkpointing=False,
                override_config={"attn_implementation": config._attn_implementation},
            ),
            engine_config=FSDPEngineConfig(
                strategy="fsdp2",
                dtype=name,
                mixed_precision={"param_dtype": name, "reduce_dtype": name, "buffer_dtype": name},
                use_torch_compile=False,  # of the entropy: a minute of compiling
                use_dynamic_bsz=False,
            ),
            optimizer_config=FSDPOptimizerConfig(lr=1e-6, total_training_steps=10),
            checkpoint_config=CheckpointConfig(),
        )
        with mock.patch.object(AutoModelForCausalLM, "from_pretrained", made):
            engine.initialize()
    return engine


def make_batch(
    tokens: int, vocabulary: int, device: str, fields: Mapping[str, torch.Tensor] | None = None, **settings: Any
) -> TensorDict:
    """Returns random sequences of PROMPT + RESPONSE tokens, with all fields that verl's engine reads of a micro-batch.

    Args:
        fields: more of them, [sequences, *].
    """
    from verl.utils import tensordict_utils as tu

    count, length = tokens // (PROMPT + RESPONSE), PROMPT + RESPONSE
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(vocabulary, (count, length), generator=generator).to(device)
    ones = torch.ones(count, RESPONSE, dtype=torch.long, device=device)
    found = {
        "input_ids": rows,
        "position_ids": torch.arange(length, device=device).expand(count, -1),
        "prompts": rows[:, :PROMPT],
        "responses": rows[:, PROMPT:],
        "response_mask": ones,
        "loss_mask": ones,
        **(fields or {}),
    }
    jagged = {name: torch.nested.as_nested_tensor(list(each), layout=torch.jagged) for name, each in found.items()}
    data = TensorDict(jagged, batch_size=count)
    defaults = {"calculate_entropy": True, "use_remove_padding": True, "temperature": 1.0, "global_batch_size": count}
    tu.assign_non_tensor(data, **defaults | settings)
    return data


def tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of two words: nothing here is text."""
    words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<pad>")
