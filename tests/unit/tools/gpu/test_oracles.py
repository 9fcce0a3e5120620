"""The mathematics on a GPU's tensors, or on a CPU's where there is no GPU, against the oracles in float64.

`bash tools/gpu.sh oracles` runs this file without a conftest.py and without hypothesis.
"""

import math
import os
from dataclasses import is_dataclass, replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import verl_ext.core.filters  # noqa: F401 (registers them)
from tests.support import filter_oracles, loss_oracles, measure_oracle
from tests.support.closeness import close
from verl_ext.core import corrections, losses
from verl_ext.core.filters import get_batch_filter
from verl_ext.core.measure import measure
from verl_ext.core.top_tokens import log_probs_at

pytestmark = pytest.mark.gpu
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LARGE = DEVICE == "cuda"
each_seed = pytest.mark.parametrize("seed", range(3))


def on_device(value):
    """Returns a tensor, or a dataclass with all of its tensors, on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if not is_dataclass(value):
        return value
    return replace(value, **{name: on_device(field) for name, field in vars(value).items()})


@pytest.mark.parametrize("corrections", measure_oracle.CHOICES, ids=lambda chosen: "+".join(chosen or ["none"]))
def test_measure(corrections):
    batch = measure_oracle.random_batch(rows=8, longest=5000 if LARGE else 200)
    tokens = on_device(measure_oracle.pack(batch))
    found = measure(tokens, corrections)
    expected = measure_oracle.oracle(batch, corrections, with_entropy=True)
    assert found.metrics == pytest.approx(expected, rel=1e-5, abs=1e-11)
    if corrections:
        weights = torch.zeros(len(tokens.mask), dtype=torch.float64)
        for token in measure_oracle.records(batch, corrections)[0]:
            weights[token["place"]] = token["w"]
        close(found.weight, weights)


@each_seed
def test_log_probabilities_at_given_tokens_and_their_gradient(seed):
    rows, vocabulary = (300, 150_000) if LARGE else (7, 50)
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(rows, vocabulary, generator=generator)
    ids = torch.randint(0, vocabulary, (rows, 33), generator=generator)
    factors = torch.randn(rows, 33, generator=generator)
    here = logits.clone().to(DEVICE).requires_grad_()
    found = log_probs_at(here, ids.to(DEVICE))
    (found * factors.to(DEVICE)).sum().backward()
    exact = logits.double().requires_grad_()
    expected = exact.log_softmax(1).gather(1, ids)
    (expected * factors).sum().backward()
    close(found, expected)
    close(here.grad, exact.grad)


@each_seed
def test_opsm(seed):
    batch = loss_oracles.random_batch(seed)
    l_infer, l_old, l_theta, advantages, mask = map(on_device, loss_oracles.tensors(batch))
    divergence = sum(corrections.sequence_divergence(l_infer, l_old, l_theta, mask))
    expected = loss_oracles.opsm_oracle(batch[0], batch[2], batch[3], batch[4], 0.1)
    close(corrections.opsm_mask(divergence, advantages, 0.1), expected)


@pytest.mark.parametrize("gate", ["action", "response"])
@each_seed
def test_llds(seed, gate):
    batch = loss_oracles.random_batch(seed)
    _, l_old, l_theta, advantages, mask = map(on_device, loss_oracles.tensors(batch))
    leaf = l_theta.clone().requires_grad_()
    penalty = losses.llds_penalty(leaf, l_old, advantages, mask, gate)
    penalty.sum().backward()
    expected, gradient = loss_oracles.llds_oracle(batch[2], batch[1], batch[3], batch[4], gate)
    close(penalty, expected)
    close(leaf.grad, gradient)


@each_seed
def test_unbiased_kl(seed):
    l_infer, l_old, l_theta, _, mask = map(on_device, loss_oracles.tensors(loss_oracles.random_batch(seed)))
    leaf = l_theta.clone().requires_grad_()
    kl = losses.unbiased_kl(leaf, l_old, l_infer, mask)
    kl.sum().backward()
    triples = zip(*(values.flatten().tolist() for values in (l_theta, l_old, l_infer)), strict=True)
    pairs = torch.tensor([loss_oracles.kl_oracle(*triple) for triple in triples], dtype=torch.float64)
    expected, gradient = (pairs * mask.cpu().flatten().unsqueeze(1)).T
    close(kl.flatten(), expected)
    close(leaf.grad.flatten(), gradient)


def random_rows(seed):
    """Draws rows for `filter_oracles.make_batch`, with values whose sums are exact."""
    generator = torch.Generator().manual_seed(seed)

    def one_of(*values):
        return values[int(torch.randint(len(values), (), generator=generator))]

    def token():
        return {
            "id": one_of(filter_oracles.EOS, 5, 6),
            "m": one_of(0, 1, 1),
            "infer": one_of(-3.0, -1.0, -0.5, -0.25),
            "old": one_of(-3.0, -1.0, -0.5, -0.25),
            "advantage": one_of(-1.0, 0.0, 1.0),
            "agreement": one_of(0.0, 0.25, 0.75, 1.0),
        }

    return [[token() for _ in range(one_of(0, 1, 3, 4))] for _ in range(20)]


@pytest.mark.parametrize(
    ("name", "settings", "oracle"),
    [
        ("low_agreement", {"threshold": 0.5}, filter_oracles.low_agreement_tokens),
        ("low_probability", {"threshold": 0.3}, filter_oracles.low_probability_tokens),
        ("off_policy_negative", {"delta": 0.1}, filter_oracles.off_policy_negative_tokens),
    ],
)
@each_seed
def test_a_filter(seed, name, settings, oracle):
    rows = random_rows(seed)
    keep = get_batch_filter(name).function(on_device(filter_oracles.make_batch(rows)), **settings)
    assert keep.tolist() == oracle(rows, **settings)


@each_seed
def test_the_overlong_filter(seed):
    rows = random_rows(seed)
    of_rows = filter_oracles.overlong_rows(rows)
    expected = [whole for whole, row in zip(of_rows, rows, strict=True) for _ in row]
    keep = get_batch_filter("overlong").function(on_device(filter_oracles.make_batch(rows)))
    assert keep.tolist() == expected


LOSS_SETTINGS = {
    "icepop": {"alpha": 0.5, "beta": 5.0},
    "opsm": {"delta": 0.1},
    "llds": {"coef": 0.5, "gate": "response"},
}


@pytest.mark.parametrize("mode", LOSS_SETTINGS)
@each_seed
def test_a_policy_loss(seed, mode):
    pytest.importorskip("verl")
    pytest.importorskip("tensordict")
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import FSDPActorConfig

    import verl_ext.workers.losses  # noqa: F401  (registers them)
    from tests.support import policy_loss_oracles as oracles
    from verl_ext.core.loss_batch import LossBatch
    from verl_ext.workers.loss_config import build_loss_config
    from verl_ext.workers.losses import provide

    old, new, advantages, mask, k = oracles.loss_batch(seed)
    l_infer = old + torch.tensor([[0.6], [-0.6], [0.1]])
    leaf = new.detach().double().requires_grad_()
    if mode == "icepop":
        expected, gradient = oracles.icepop_loss_oracle(old, new, advantages, mask, k, 0.5, 5.0)
    else:
        expected = {
            "opsm": lambda: oracles.opsm_loss_oracle(leaf, old, advantages, mask, l_infer, 0.1),
            "llds": lambda: oracles.llds_loss_oracle(leaf, old, advantages, mask, 0.5),
        }[mode]()[0]
        (gradient,) = torch.autograd.grad(expected, leaf)

    theta = new.detach().to(DEVICE).requires_grad_()
    tensors = {"l_old": old, "advantages": advantages, "mask": mask, "l_infer": l_infer, "k": k}
    batch = LossBatch(theta, **{name: tensor.to(DEVICE) for name, tensor in tensors.items()})
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        policy_loss=build_loss_config(loss_mode=mode, **LOSS_SETTINGS[mode]),
    )
    with provide(batch):
        loss, _ = get_policy_loss_fn(mode)(
            old_log_prob=batch.l_old,
            log_prob=theta,
            advantages=batch.advantages,
            response_mask=batch.mask,
            config=config,
        )
    loss.backward()
    close(loss, expected, scale=1.0)
    close(theta.grad, gradient)


def mean_k3(ones, others, masks):
    values = [
        math.expm1(a - b) - (a - b)
        for rows in zip(ones, others, masks, strict=True)
        for a, b, m in zip(*rows, strict=True)
        if m
    ]
    return math.fsum(values) / len(values)


def test_the_gates_signals_are_means_of_a_mini_batch_in_two_micro_batches(tmp_path):
    pytest.importorskip("verl")
    pytest.importorskip("tensordict")
    from gpu.verl_engine import start_one_rank

    import verl_ext.plugins.verl  # noqa: F401  (verl's platform for CPUs)
    from verl_ext.core.loss_batch import LossBatch
    from verl_ext.features.settings import MiniBatchLimits
    from verl_ext.workers.gate import Gate

    with mock.patch.dict(os.environ):
        start_one_rank(tmp_path)
        try:
            for seed in range(3):
                batch = loss_oracles.random_batch(seed)
                l_infer, l_old, l_theta, advantages, mask = map(on_device, loss_oracles.tensors(batch))
                engine = SimpleNamespace(
                    train_batch=lambda data, loss_function: None,
                    optimizer_step=lambda: None,
                    lr_scheduler_step=lambda: None,
                )
                gate = Gate(SimpleNamespace(engine=engine, train_mini_batch=lambda data: None))
                gate.limits = MiniBatchLimits(policy_kl=1.0, vllm_kl=1.0)
                for rows in (slice(0, 2), slice(2, None)):
                    tensors = (one[rows] for one in (l_theta, l_old, advantages, mask))
                    gate.observe(LossBatch(*tensors, l_infer=l_infer[rows]))
                signals = gate._agree()
                for name, other in (("policy_kl", batch[1]), ("vllm_kl", batch[0])):
                    close(signals[name], mean_k3(batch[2], other, batch[4]), name=name)
        finally:
            torch.distributed.destroy_process_group()
