"""What the model's own files say."""

import math
from collections.abc import Iterable

from verl_ext.doctor.context import Context
from verl_ext.doctor.findings import Finding, check

LARGE = 0.01  # nats; 1% in every ratio of a model that never learnt to avoid the padding


@check("vocabulary")
def vocabulary(context: Context) -> Iterable[Finding]:
    """Rows of the vocabulary that no token of the tokenizer has.

    Source: `monkey_patch_compute_logits` of verl/workers/rollout/vllm_rollout/utils.py (0.9.1) masks ids from
    `len(tokenizer)` on in vLLM; verl/workers/engine/fsdp/transformer_impl.py has no such mask. Training then sees less
    probability, by what the model gives to those ids: log(vocab_size / len(tokenizer)) where they are as likely as any
    other (0.24 was measured for 128 rows and 101 tokens, with random weights), next to nothing where the model has
    learnt that they never come.
    """
    if not context.with_vllm or context.model_config is None or context.tokenizer_length is None:
        return
    rows = getattr(context.model_config.get_text_config(), "vocab_size", None)
    tokens = context.tokenizer_length
    if rows is None:
        return
    if rows < tokens:
        why = "ids past the vocabulary have no embedding; use the model's own tokenizer"
        yield Finding("warning", f"vocab_size={rows}, len(tokenizer)={tokens}", why)
    elif rows == tokens:
        yield Finding("ok", f"vocab_size={rows}, as many as the tokenizer has")
    else:
        gap = math.log(rows / tokens)
        yield Finding(
            "warning" if gap > LARGE else "note",
            f"vocab_size={rows}, len(tokenizer)={tokens}",
            f"verl masks the ids between in vLLM and not in training: about {gap:.2g} nats in every log-ratio, for a "
            "model that has not learnt to avoid them",
        )
