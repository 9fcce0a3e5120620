"""Compares the mathematics on the GPU's tensors with the tests' oracles in float64 and plain Python."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import is_dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import verl_ext.core.filters  # noqa: F401 (registers them)
from gpu.record import Place, Record
from tests.support import filter_oracles, loss_oracles, measure_oracle
from verl_ext.core import losses
from verl_ext.core.filters import get_batch_filter
from verl_ext.core.measure import measure
from verl_ext.core.top_tokens import log_probs_at

CLOSE = 1e-5  # of the scale of a tensor: float32, and its sums
SEEDS = range(3)
FILTERS: tuple[tuple[str, dict[str, float], Callable[..., list[bool]]], ...] = (
    ("low_agreement", {"threshold": 0.5}, filter_oracles.low_agreement_tokens),
    ("low_probability", {"threshold": 0.3}, filter_oracles.low_probability_tokens),
    ("off_policy_negative", {"delta": 0.1}, filter_oracles.off_policy_negative_tokens),
)


def run(record: Record, place: Place) -> None:
    cases: dict[str, Callable[[Record, Place], None]] = {
        "measure and the corrections": check_measure,
        "loss terms": check_loss_terms,
        "batch filters": check_filters,
        "the sampler's head": check_heads,
    }
    if find_spec("verl") and find_spec("tensordict"):
        cases |= {"policy losses": check_policy_losses, "gate": check_gate}
    else:
        record.note("policy losses and gate are not run: they need verl and tensordict")
    for name, check in cases.items():
        with record.trying(name):
            check(record, place)


def on(device: str, value: Any) -> Any:
    """Returns a tensor, or a dataclass with all of its tensors, on the device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if not is_dataclass(value):
        return value
    return replace(value, **{name: on(device, field) for name, field in vars(value).items()})


def close(record: Record, name: str, found: Any, expected: Any, scale: float | None = None) -> None:
    a, b = (torch.as_tensor(values, dtype=torch.float64).detach().cpu() for values in (found, expected))
    allowed = CLOSE * (b.abs().max().item() if scale is None else scale)
    apart = (a - b).abs().max().item() if a.shape == b.shape else math.nan
    record.check(name, apart <= allowed, f"{apart:.2g} apart, {allowed:.2g} are allowed")


def check_measure(record: Record, place: Place) -> None:
    batch = measure_oracle.random_batch(rows=8, longest=200 if place.tiny else 5000)
    tokens = on(place.device, measure_oracle.pack(batch))
    for corrections in measure_oracle.CHOICES:
        name = " + ".join(corrections or ["no correction"])
        expected = measure_oracle.oracle(batch, corrections, with_entropy=True)
        found = measure(tokens, corrections)
        record.check(f"{name}: names of the metrics", found.metrics.keys() == expected.keys())
        off = {
            metric: abs(found.metrics[metric] - value) / max(abs(value), 1e-6)
            for metric, value in expected.items()
            if metric in found.metrics
        }
        worst = max(off, key=lambda metric: off[metric])
        record.check(f"{name}: metrics", off[worst] <= CLOSE, f"{worst} is {off[worst]:.2g} off")
        if corrections:
            weights = torch.zeros(len(tokens.mask), dtype=torch.float64)
            for token in measure_oracle.records(batch, corrections)[0]:
                weights[token["place"]] = token["w"]
            close(record, f"{name}: weights", found.weight, weights)


def check_heads(record: Record, place: Place) -> None:
    """Checks log-probabilities at given tokens, and their gradient, against log_softmax in float64."""
    rows, vocabulary = (7, 50) if place.tiny else (300, 150_000)
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        logits = 4 * torch.randn(rows, vocabulary, generator=generator)
        ids = torch.randint(0, vocabulary, (rows, 33), generator=generator)
        factors = torch.randn(rows, 33, generator=generator)
        here = logits.clone().to(place.device).requires_grad_()
        found = log_probs_at(here, ids.to(place.device))
        (found * factors.to(place.device)).sum().backward()
        exact = logits.double().requires_grad_()
        expected = exact.log_softmax(1).gather(1, ids)
        (expected * factors).sum().backward()
        close(record, f"log-probabilities of heads, batch {seed}", found, expected)
        close(record, f"their gradient, batch {seed}", here.grad, exact.grad)


def check_loss_terms(record: Record, place: Place) -> None:
    for seed in SEEDS:
        batch = loss_oracles.random_batch(seed)
        l_infer, l_old, l_theta, advantages, mask = (values.to(place.device) for values in loss_oracles.tensors(batch))
        parts = losses.sequence_divergence(l_infer, l_old, l_theta, mask)
        opsm = loss_oracles.opsm_oracle(batch[0], batch[2], batch[3], batch[4], 0.1)
        close(record, f"opsm, batch {seed}", losses.opsm_mask(parts.whole, advantages, 0.1), opsm)
        for gate in ("action", "response"):
            leaf = l_theta.clone().requires_grad_()
            penalty = losses.llds_penalty(leaf, l_old, advantages, mask, gate)
            penalty.sum().backward()
            expected, gradient = loss_oracles.llds_oracle(batch[2], batch[1], batch[3], batch[4], gate)
            close(record, f"llds by {gate}, batch {seed}", penalty, expected)
            close(record, f"llds by {gate}, batch {seed}: gradient", leaf.grad, gradient)
        leaf = l_theta.clone().requires_grad_()
        kl = losses.unbiased_kl(leaf, l_old, l_infer, mask)
        kl.sum().backward()
        triples = zip(*(values.flatten().tolist() for values in (l_theta, l_old, l_infer)), strict=True)
        pairs = torch.tensor([loss_oracles.kl_oracle(*triple) for triple in triples], dtype=torch.float64)
        pairs *= mask.cpu().flatten().unsqueeze(1)
        for name, found, of in (("unbiased kl", kl, 0), ("unbiased kl: gradient", leaf.grad, 1)):
            close(record, f"{name}, batch {seed}", found.flatten(), pairs[:, of])
        old, current = torch.randn(2, 7, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        factor = losses.router_shift_factor(
            losses.router_deviation(old.to(place.device), current.to(place.device)), 0.3
        )
        close(record, f"router shift, batch {seed}", factor, (-(current - old).abs().mean(1)).exp().clamp(min=0.3))


def check_filters(record: Record, place: Place) -> None:
    for seed in SEEDS:
        rows = random_rows(seed)
        batch = on(place.device, filter_oracles.make_batch(rows))
        for name, settings, expected in FILTERS:
            keep = get_batch_filter(name).function(batch, **settings)
            record.check(f"{name}, batch {seed}", keep.tolist() == expected(rows, **settings))
        of_rows = filter_oracles.overlong_rows(rows)
        expected = [whole for whole, row in zip(of_rows, rows, strict=True) for _ in row]
        record.check(f"overlong, batch {seed}", get_batch_filter("overlong").function(batch).tolist() == expected)


def random_rows(seed: int) -> list[list[dict[str, Any]]]:
    """Draws rows for `filter_oracles.make_batch`, with values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values: float) -> float:
        return values[int(torch.randint(len(values), (), generator=generator))]

    def token() -> dict[str, Any]:
        return {
            "id": int(one_of(filter_oracles.EOS, 5, 6)),
            "m": int(one_of(0, 1, 1)),
            "infer": one_of(-3.0, -1.0, -0.5, -0.25),
            "old": one_of(-3.0, -1.0, -0.5, -0.25),
            "advantage": one_of(-1.0, 0.0, 1.0),
            "agreement": one_of(0.0, 0.25, 0.75, 1.0),
        }

    return [[token() for _ in range(int(one_of(0, 1, 3, 4)))] for _ in range(20)]


def check_policy_losses(record: Record, place: Place) -> None:
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    import verl_ext.workers.losses  # noqa: F401  (registers them)
    from tests.support import policy_loss_oracles as oracles
    from verl_ext.workers.loss_config import build_loss_config
    from verl_ext.workers.losses import LossInputs, provide

    def settings_of(mode: str, **settings: Any) -> Any:
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
        sizes = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1}
        return FSDPActorConfig(**sizes, **clip, policy_loss=build_loss_config(loss_mode=mode, **settings))

    for seed in SEEDS:
        old, new, advantages, mask, k = oracles.loss_batch(seed)
        l_infer = old + torch.tensor([[0.6], [-0.6], [0.1]])
        deviation = torch.rand(old.shape, generator=torch.Generator().manual_seed(seed)) * 0.4
        leaf = new.detach().double().requires_grad_()
        icepop, gradient = oracles.icepop_loss_oracle(old, new, advantages, mask, k, 0.5, 5.0)
        expected: dict[str, tuple[Any, Any]] = {"icepop": (icepop, gradient)}
        for mode, whole in (
            ("opsm", oracles.opsm_loss_oracle(leaf, old, advantages, mask, l_infer, 0.1)[0]),
            ("llds", oracles.llds_loss_oracle(leaf, old, advantages, mask, 0.5)[0]),
            ("router_shift", oracles.router_shift_loss_oracle(leaf, old, advantages, mask, deviation, 0.8)[0]),
        ):
            expected[mode] = whole.detach(), torch.autograd.grad(whole, leaf)[0]
        given: dict[str, dict[str, Any]] = {
            "icepop": {"alpha": 0.5, "beta": 5.0},
            "opsm": {"delta": 0.1},
            "llds": {"coef": 0.5, "gate": "response"},
            "router_shift": {},
        }
        for mode, (value, gradient) in expected.items():
            theta = new.detach().to(place.device).requires_grad_()
            inputs = LossInputs(
                l_infer=l_infer.to(place.device), router_deviation=deviation.to(place.device), k=k.to(place.device)
            )
            with provide(inputs):
                loss, _ = get_policy_loss_fn(mode)(
                    old_log_prob=old.to(place.device),
                    log_prob=theta,
                    advantages=advantages.to(place.device),
                    response_mask=mask.to(place.device),
                    config=settings_of(mode, **given[mode]),
                )
            loss.backward()
            close(record, f"{mode}, batch {seed}", loss, value, scale=1.0)
            close(record, f"{mode}, batch {seed}: gradient", theta.grad, gradient)


def check_gate(record: Record, place: Place) -> None:
    """Checks the signals by which the gate decides, on one rank: means of a mini-batch in two micro-batches."""
    import verl_ext.plugins.verl  # noqa: F401  (verl's platform for CPUs)
    from gpu.verl_engine import start_one_rank
    from verl_ext.features.settings import MiniBatchGate
    from verl_ext.workers.gate import Gate

    with tempfile.TemporaryDirectory() as folder:
        start_one_rank(Path(folder))
        try:
            for seed in SEEDS:
                batch = loss_oracles.random_batch(seed)
                l_infer, l_old, l_theta, _, mask = (t.to(place.device) for t in loss_oracles.tensors(batch))
                engine = SimpleNamespace(train_batch=lambda data, loss_function: None, optimizer_step=lambda: None)
                gate = Gate(SimpleNamespace(engine=engine, train_mini_batch=lambda data: None))
                gate.limits = MiniBatchGate(policy_kl=1.0, vllm_kl=1.0)
                for rows in (slice(0, 2), slice(2, None)):
                    gate.observe(l_theta[rows], l_old[rows], l_infer[rows], mask[rows])
                signals = gate._agree()
                for name, other in (("policy_kl", batch[1]), ("vllm_kl", batch[0])):
                    close(record, f"{name}, batch {seed}", signals[name], mean_k3(batch[2], other, batch[4]))
        finally:
            torch.distributed.destroy_process_group()


def mean_k3(ones: list[list[float]], others: list[list[float]], masks: list[list[bool]]) -> float:
    values = [
        math.expm1(a - b) - (a - b)
        for rows in zip(ones, others, masks, strict=True)
        for a, b, m in zip(*rows, strict=True)
        if m
    ]
    return math.fsum(values) / len(values)
