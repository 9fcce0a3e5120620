"""Measures a step whose update computes the old log-probs itself, against verl's two passes, and checks its gradients.

Both go through verl's FSDP2 engine on one rank: its `infer_batch` and `train_batch`, with TIS on the gap to a rollout
that is 0.05 nats away. The learning rate is 0, so that every step has the same weights.
"""

from functools import partial
from typing import Any

import torch
from measuring import added_bytes, alternating

from gpu.models import config_of
from gpu.record import TIMES, Place, Record
from gpu.verl_engine import PROMPT, RESPONSE, TINY_TOKENS, TOKENS, make_batch, one_rank, verl_engine
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens

AIM = 0.8  # of the time: by operations 3 / 4, an update being three forward passes
MEMORY_AIM = 1.03  # of what verl's update adds
GAP = 0.05  # nats, the standard deviation of log k
CORRECTIONS = {"tis": {"cap": 2.0}}


def run(record: Record, place: Place) -> None:
    with one_rank(), record.trying("qwen3_moe"):
        bench(record, place)


def bench(record: Record, place: Place) -> None:
    config = config_of("qwen3_moe", tiny=place.tiny)
    engine = verl_engine(config, torch.float32 if place.tiny else torch.bfloat16, place.device)
    for group in engine.optimizer.param_groups:
        group["lr"] = 0.0
    steps = Steps(engine, TINY_TOKENS if place.tiny else TOKENS, config.vocab_size, place.device)
    gradients = []
    for step in (steps.two_passes, steps.one_pass):
        step()
        gradients.append([grad.full_tensor().double().clone() for grad in steps.gradients()])
    worst = max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-12)) for a, b in zip(*gradients, strict=True))
    moves = any(bool(grad.any()) for grad in gradients[0])
    same = moves and worst <= (1e-5 if place.tiny else 0.05)
    record.check("gradients of one pass = of two", same, f"{worst:.2g} apart")

    spent = alternating({"two passes": steps.two_passes, "one pass": steps.one_pass}, place.repeats, place.device)
    record.times(spent)
    record.ratio(spent, "one pass", "two passes", at_most=None if place.tiny else AIM)
    if place.device != "cpu":
        added = {name: added_bytes(call, place.device) for name, call in steps.updates.items()}
        for name, count in added.items():
            record.figure(f"{name}: memory added", [count / 1e9], "GB")
        record.figure(
            "memory: ours / verl's", [added["our update"] / added["verl's update"]], TIMES, at_most=MEMORY_AIM
        )


class Steps:
    """The two ways to take a step of one batch."""

    def __init__(self, engine: Any, tokens: int, vocabulary: int, device: str):
        from verl.workers.config import FSDPActorConfig

        from verl_ext.workers.actor import without_entropy_gradient
        from verl_ext.workers.first_pass import FirstPass, FirstPassSettings
        from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

        self.engine = engine
        count = tokens // (PROMPT + RESPONSE)
        settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": count}
        self.scored = make_batch(tokens, vocabulary, device, **settings)
        l_old = self.score()
        noise = torch.randn(l_old.shape, generator=torch.Generator().manual_seed(2)).to(device)
        advantages = torch.ones(count, device=device)
        advantages[1::2] = -1
        fields = {
            "rollout_log_probs": l_old + GAP * noise,
            "advantages": advantages.unsqueeze(1).expand(-1, RESPONSE).contiguous(),
        }
        mask = torch.ones_like(l_old, dtype=torch.bool)
        weight = measure(Tokens.from_padded(fields["rollout_log_probs"], l_old, mask), CORRECTIONS).weight
        before = fields | {"old_log_probs": l_old, "rollout_is_weights": weight.view_as(l_old)}
        self.given = make_batch(tokens, vocabulary, device, before, calculate_entropy=False, **settings)
        self.late = make_batch(tokens, vocabulary, device, fields, **settings)
        actor = FSDPActorConfig(strategy="fsdp2", rollout_n=1, ppo_micro_batch_size_per_gpu=count)
        self.first_pass = FirstPass(FirstPassSettings(CORRECTIONS, CORRECTIONS, as_mask=False))
        self.verls, _ = build_worker_loss(actor, LossSettings())
        self.ours, _ = build_worker_loss(actor, LossSettings(reuses=True), first_pass=self.first_pass)
        without_entropy_gradient(engine)
        verls_update = partial(engine.train_batch, self.given, self.verls)
        self.updates = {"verl's update": verls_update, "our update": self.one_pass}

    def score(self) -> torch.Tensor:
        """Returns compute_log_prob's log-probs of the responses, [sequences, RESPONSE]."""
        rows = self.engine.infer_batch(self.scored)["model_output"]["log_probs"].unbind()
        return torch.stack([row[PROMPT - 1 : PROMPT + RESPONSE - 1] for row in rows]).to(self.scored.device).float()

    def two_passes(self) -> None:
        self.score()
        self.engine.train_batch(self.given, self.verls)

    def one_pass(self) -> None:
        self.first_pass.begin_update(narrowed=False, limits=())
        self.engine.train_batch(self.late, self.ours)
        self.first_pass.judge()

    def gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self.engine.module.parameters() if parameter.grad is not None]
