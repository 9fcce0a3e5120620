"""Retokenisation drift: token ids that their own text does not encode to."""

from collections.abc import Callable, Sequence
from itertools import groupby


def first_drift(
    ids: Sequence[int],
    generated: Sequence[bool],
    decode: Callable[[list[int]], str],
    encode: Callable[[str], list[int]],
) -> int | None:
    """Where encode(decode(ids)) first differs from the ids of a response; None where it gives them all back.

    Each run of generated tokens is encoded by itself: what is in between was tokenised by the agent loop. Where a run
    encodes to itself and more, the index is the run's end, which may be the response's.

    Args:
        ids: the response's token ids.
        generated: of the same length, true on tokens the model generated.
        decode, encode: of the rollout's tokenizer, special tokens kept by the one and not added by the other.
    """
    start = 0
    for is_generated, group in groupby(generated):
        run = list(ids[start : start + len(list(group))])
        if is_generated:
            again = encode(decode(run))
            if again != run:
                pairs = enumerate(zip(run, again, strict=False))
                return start + next((i for i, (a, b) in pairs if a != b), min(len(run), len(again)))
        start += len(run)
    return None
