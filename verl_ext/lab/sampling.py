"""The lab's rollout engine: tokens sampled with a cache, their log-probabilities, and the experts that they used.

Shape legend: B prompts, P tokens of a prompt, T of a response, V vocabulary, L layers, K experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from verl_ext.core.head import Head
from verl_ext.lab.model import Cache, Weights, forward
from verl_ext.lab.settings import ModelSettings
from verl_ext.lab.tasks import END


@dataclass(frozen=True)
class Engine:
    """What the rollout computes with.

    Attributes:
        parts: the weights; of several, a response has its first share of tokens from the first, and so on, while the
            cache stays, as with weights that are updated in flight.
        dtype: of weights and arithmetic.
        lag: versions behind the policy that it says of the newest and the oldest of them; None where it says nothing.
        temperature, top_k, top_p: of the distribution that is sampled from; no top_k is 0.
    """

    parts: tuple[Weights, ...]
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    lag: tuple[int, int] | None = None


@dataclass(frozen=True)
class Sampled:
    """What a rollout returns.

    Attributes:
        responses: [B, T] int64, END wherever a response has ended.
        l_infer: [B, T] float32, under the distribution that was sampled from; 0 past the end.
        mask: [B, T] bool, true up to the END that was sampled.
        experts: [B, P + T - 1, L, K] int64, of every token but the last, as vLLM returns them.
        head: of all B T places, none past the end; None where none was asked for.
    """

    responses: Tensor
    l_infer: Tensor
    mask: Tensor
    experts: Tensor
    head: Head | None = None


def sample(
    engine: Engine, model: ModelSettings, prompts: Tensor, length: int, generator: torch.Generator, head: int = 0
) -> Sampled:
    """Sample up to `length` tokens after [B, P] prompts, and return the `head` most likely ones of each place, or all
    of a smaller vocabulary.

    All random numbers are drawn at first: two engines that see the same generator differ by themselves alone.
    """
    vocabulary = engine.parts[0]["head"].shape[0]
    noise = torch.empty(length, len(prompts), vocabulary).exponential_(generator=generator).log_()
    return _decode(engine, model, prompts, length, lambda t, log_probs: (log_probs - noise[t]).argmax(-1), head)


def head_of(sampled: Sampled, rows: slice) -> Head | None:
    """Of these trajectories."""
    if sampled.head is None:
        return None
    B, T = sampled.mask.shape
    ids, log_q = (value.view(B, T, -1)[rows].flatten(0, 1) for value in (sampled.head.ids, sampled.head.log_q))
    return Head(ids, log_q)


def rescore(engine: Engine, model: ModelSettings, prompts: Tensor, responses: Tensor) -> Tensor:
    """[B, T] log-probabilities of tokens that are given, 0 past the end."""
    return _decode(engine, model, prompts, responses.shape[1], lambda t, _: responses[:, t]).l_infer


def _decode(
    engine: Engine,
    model: ModelSettings,
    prompts: Tensor,
    length: int,
    choose: Callable[[int, Tensor], Tensor],
    head: int = 0,
) -> Sampled:
    """Token by token, with a cache; `choose` makes [B] ids of the [B, V] log-probabilities for response token t."""
    B, P = prompts.shape
    # Made out here: what inference_mode makes cannot be trained on.
    responses = torch.full((B, length), END)
    l_infer, mask = torch.zeros(B, length), torch.zeros(B, length, dtype=torch.bool)
    experts = torch.arange(model.top_k).expand(B, P + length - 1, model.layers, model.top_k).clone()
    places = torch.full((B, length, engine.parts[0]["head"].shape[0] if head else 0), -torch.inf)
    with torch.inference_mode():
        parts = [{name: value.to(engine.dtype) for name, value in part.items()} for part in engine.parts]
        cache = Cache(model, B, P + length, engine.dtype)
        going, tokens = torch.ones(B, dtype=torch.bool), prompts
        for t in range(length):
            first = cache.length
            logits, routing = forward(parts[t * len(parts) // length], model, tokens, cache=cache)
            experts[:, first : cache.length] = routing.stacked()
            log_probs = truncated(logits[:, -1] / engine.temperature, engine.top_k, engine.top_p).log_softmax(-1)
            chosen = choose(t, log_probs).where(going, END)
            responses[:, t], mask[:, t] = chosen, going
            l_infer[:, t] = log_probs.gather(1, chosen.unsqueeze(1)).squeeze(1).where(going, 0.0)
            if head:
                places[going, t] = log_probs[going].float()
            going = going & (chosen != END)
            if not going.any():
                break
            tokens = chosen.unsqueeze(1)
    if not head:
        return Sampled(responses, l_infer, mask, experts)
    log_q, ids = places.flatten(0, 1).topk(min(head, places.shape[-1]), -1)
    return Sampled(responses, l_infer, mask, experts, Head(ids, log_q))


def truncated(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    """[B, V] logits, -inf outside the `top_k` largest, and then outside the fewest whose share reaches `top_p`."""
    if top_k:
        least = logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1:
        descending, order = logits.softmax(-1).sort(-1, descending=True)
        above = descending.cumsum(-1) - descending >= top_p  # the larger ones already reach it
        logits = logits.masked_fill(torch.zeros_like(above).scatter(-1, order, above), -torch.inf)
    return logits
