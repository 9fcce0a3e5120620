"""The workers' loss around verl's real `ppo_loss`: parity where nothing is on, and each feature against an oracle."""

import math
from unittest import mock

import pytest
import torch
from omegaconf import OmegaConf
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from tests.support.closeness import close
from tests.support.loss_oracles import m2po_oracle
from tests.unit.workers.test_base_losses import gradient
from verl_ext.base.errors import ConfigError
from verl_ext.core.corrections import CORRECTIONS, register_correction
from verl_ext.core.loss_batch import LossChange
from verl_ext.core.losses import name_clipped
from verl_ext.features.feature import RunFeatures
from verl_ext.features.stability import stability_config
from verl_ext.features.table import loss_settings
from verl_ext.workers.first_pass import FirstPass
from verl_ext.workers.losses import apply_base, current_batch
from verl_ext.workers.top_tokens import CENTERING
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

BASES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean", "dppo_tv", "dppo_kl", "gpg", "dro")
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
DELTA = 0.05
OPSM = {"opsm": {"delta": DELTA}}
TERM = 1.0  # the size of what the losses here are means of: terms of both signs


def build(config, **settings):
    return build_worker_loss(config, LossSettings.from_dict(settings))[0]


def run(loss, parts):
    """Sum of the losses of the parts, each backpropagated, and the metrics of the last."""
    total = 0.0
    for model_output, data in parts:
        value, metrics = loss(model_output=model_output, data=data)
        value.backward()
        total += value.item()
    return total, metrics


def kept(batch, delta=DELTA):
    """OPSM's [B, T] mask in float64, from the definition."""
    l_infer, l_theta, mask = (batch.padded(name) for name in ("rollout_log_probs", "log_prob", "response_mask"))
    divergence = ((l_infer.double() - l_theta) * mask).sum(1) / mask.sum(1).clamp(min=1)
    return ((batch.padded("advantages") >= 0) | (divergence <= delta)[:, None]).float()


def with_weights(batch, weights):
    """`batch` with jagged rollout_is_weights from a padded tensor."""
    batch.rows["rollout_is_weights"] = [row[: len(leaf)] for row, leaf in zip(weights, batch.leaves, strict=True)]
    return batch


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kl", [None, "low_var_kl"])
def test_with_nothing_on_it_is_verls_loss(mode, kl, make_batch, actor_config):
    batch = make_batch(0)
    config = actor_config(loss_agg_mode=mode, use_kl_loss=kl is not None, kl_loss_type=kl or "k1")
    expected, verl_metrics = run(lambda **call: ppo_loss(config=config, **call), [batch.whole()])
    gradient = batch.take_gradients()
    found, metrics = run(build(config), [batch.whole()])
    assert found == expected
    assert torch.equal(batch.take_gradients(), gradient)
    ours = {f"actor/clipped_{part}/{side}" for part in ("share", "mass") for side in ("high", "low")}
    assert metrics.keys() == verl_metrics.keys() | ours


@pytest.mark.parametrize("bounds", [(None, None), (0.05, 0.3)])
@pytest.mark.parametrize("seed", range(3))
def test_the_sides_of_the_clip_add_up_to_verls(seed, bounds, make_batch, actor_config):
    batch = make_batch(seed, lengths=(9, 17, 8, 15), scale=0.6)
    config = actor_config(clip_ratio=0.1, clip_ratio_low=bounds[0], clip_ratio_high=bounds[1])
    _, metrics = run(build(config), [batch.whole()])
    found = {name: metric.aggregate() for name, metric in metrics.items() if "clip" in name}
    low, high = (0.1 if bound is None else bound for bound in bounds)
    fields = ("old_log_probs", "log_prob", "advantages", "response_mask")
    tokens = zip(*(batch.padded(name).double().flatten().tolist() for name in fields), strict=True)
    clipped, count = {"high": [], "low": []}, 0
    for old, theta, advantage, m in tokens:
        count += m
        side = "high" if advantage > 0 else "low"
        if m and (math.exp(theta - old) > 1 + high if advantage > 0 else math.exp(theta - old) < 1 - low):
            clipped[side].append(math.exp(old))
    assert all(clipped.values())
    assert found["actor/pg_clipfrac"] == pytest.approx(sum(map(len, clipped.values())) / count)
    name_clipped(found)
    for side, p_old in clipped.items():
        assert found[f"actor/clipped_share/{side}"] == pytest.approx(len(p_old) / count)
        assert found[f"actor/clipped_probability/{side}"] == pytest.approx(sum(p_old) / len(p_old), rel=1e-5)
    again = dict(found)
    name_clipped(again)
    assert again == found


def test_where_nothing_is_clipped_no_probability_is_logged():
    metrics = {f"actor/clipped_{part}/{side}": 0.0 for part in ("share", "mass") for side in ("high", "low")}
    name_clipped(metrics)
    assert metrics == {"actor/clipped_share/high": 0.0, "actor/clipped_share/low": 0.0}


def test_a_corrections_drops_are_not_those_of_the_loss(make_batch, actor_config):
    """k is made in the worker, and the weights of what acts beside such a loss are multiplied with its own."""
    batch = make_batch(5, lengths=(6, 9, 4, 8), masked_row=None)
    mask = batch.padded("response_mask").bool()
    k = torch.ones_like(batch.padded("log_prob"))
    k[0, 0], k[1, 0] = 0.1, 9.0  # outside IcePop's band, one on either side
    old, log_k = batch.rows["old_log_probs"], k.log()
    batch.rows["rollout_log_probs"] = [row - log_k[index, : len(row)] for index, row in enumerate(old)]
    drops = kept(batch)
    assert 0 < ((drops == 0) & mask).sum() < mask.sum()
    config = actor_config(PolicyLossConfig(loss_mode="gpg"))
    loss = build(config, policy_loss={"loss_mode": "icepop", "base": "gpg"}, corrections=OPSM)
    found, metrics = run(loss, [batch.whole()])
    tokens = mask.sum().item()
    for side in ("low", "high"):
        assert metrics[f"actor/icepop/dropped_{side}"].aggregate() == pytest.approx(1 / tokens)
    weight = drops.double() * torch.where((k >= 0.5) & (k <= 5), k, 0).double()
    l_theta, advantages = batch.padded("log_prob").double(), batch.padded("advantages").double()
    close(found, -(weight * advantages * l_theta * mask).sum() / tokens, scale=TERM)


CENTERS = {"centers": True, "truncated": False, "corrections": {}}


def with_terms(part, terms):
    """The micro-batch with a term of each response token, where the engine's reader of top tokens puts it."""
    model_output, data = part
    prompts = [len(row) for row in data["prompts"].unbind()]
    rows = [
        torch.cat([torch.zeros(prompt - 1), term, torch.zeros(1)]) for prompt, term in zip(prompts, terms, strict=True)
    ]
    return model_output | {CENTERING: torch.nested.as_nested_tensor(rows, layout=torch.jagged)}, data


@pytest.mark.parametrize("mode", MODES)
def test_what_centers_the_score_is_added_with_the_advantage(mode, make_batch, actor_config):
    """loss = verl's + aggregate of A * term; no token's own weight, which the term has in it."""
    batch = make_batch(3, lengths=(6, 9, 4, 8), masked_row=None)
    config = actor_config(PolicyLossConfig(loss_mode="gpg"), loss_agg_mode=mode)
    plain, _ = run(build(config), [batch.whole()])
    batch.take_gradients()
    terms = [torch.randn(len(leaf), generator=torch.Generator().manual_seed(len(leaf))) for leaf in batch.leaves]
    for term in terms:
        term.requires_grad_()
    found, metrics = run(build(config, top_tokens=CENTERS), [with_terms(batch.whole(), terms)])

    mask = batch.padded("response_mask").double()
    padded = torch.nn.utils.rnn.pad_sequence([term.detach() for term in terms], batch_first=True).double()
    factor = batch.padded("advantages").double()
    info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": 4}
    expected = agg_loss(loss_mat=factor * padded, loss_mask=mask, loss_agg_mode=mode, **info)
    close(found - plain, expected, scale=TERM)
    close(metrics["actor/score_centering"].aggregate(), expected, scale=TERM)
    leaf = padded.clone().requires_grad_()
    agg_loss(loss_mat=factor * leaf, loss_mask=mask, loss_agg_mode=mode, **info).backward()
    gradient = torch.nn.utils.rnn.pad_sequence([term.grad for term in terms], batch_first=True)
    close(gradient, leaf.grad, scale=float(leaf.grad.abs().max()))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("base", BASES)
def test_opsm_masks_the_gradient_of_every_base_loss(base, weighted, make_batch, actor_config):
    batch = make_batch(3, lengths=(6, 9, 4, 8), masked_row=None)
    mask = kept(batch)
    assert 0 < mask.sum() < mask.numel()
    torch.manual_seed(0)
    weights = torch.rand(4, 9) if weighted else torch.ones(4, 9)
    if weighted:
        with_weights(batch, weights)
    config = actor_config(PolicyLossConfig(loss_mode=base, dro_beta=0.1))
    _, metrics = run(build(config, corrections=OPSM), [batch.whole()])
    found = batch.take_gradients()

    info = {"dp_size": 1, "batch_num_tokens": int(batch.padded("response_mask").sum()), "global_batch_size": 4}
    config.global_batch_info.update(info)
    _, padded = gradient(base, batch, mask * weights, config)
    expected = torch.cat([row[: len(own)] for row, own in zip(padded, batch.leaves, strict=True)])
    close(found, expected)
    assert metrics["actor/opsm/dropped"].aggregate() == pytest.approx(
        1 - (mask * batch.padded("response_mask")).sum().item() / info["batch_num_tokens"]
    )


def test_a_correction_of_ones_own_acts_in_the_update(make_batch, actor_config):
    batch = make_batch(0)
    with mock.patch.dict(CORRECTIONS):

        @register_correction("likely", reads=("l_infer",), in_update=True)
        def likely(found, *, least: float):
            kept = found.require("l_infer") >= math.log(least)
            return LossChange(weight=kept.float(), metrics={"kept": kept[found.mask].float().mean().item()})

        stability = stability_config({"correction": "likely", "likely": {"least": 0.2}})
        with pytest.raises(ConfigError, match=r"stability\.likely\.least must be given"):
            stability_config({"correction": "likely"})
        loss, active = build_worker_loss(
            actor_config(), LossSettings.from_dict(loss_settings(RunFeatures(OmegaConf.create(), stability)))
        )
    assert active["corrections"] == {"likely": {"least": 0.2}}
    run(build(actor_config()), [batch.whole()])
    gradient = batch.take_gradients()
    _, metrics = run(loss, [batch.whole()])
    kept = torch.cat(batch.rows["rollout_log_probs"]) >= math.log(0.2)
    mask = torch.cat(batch.rows["response_mask"]).bool()
    assert 0 < (kept & mask).sum() < mask.sum()
    assert torch.equal(batch.take_gradients(), gradient * kept)
    share = (kept & mask).sum().item() / mask.sum().item()
    assert metrics["actor/likely/kept"].aggregate() == pytest.approx(share)


def planted(batch, odd):
    """`batch` with `odd` in every field where the response mask is 0."""
    outside = [mask == 0 for mask in batch.rows["response_mask"]]
    for name in batch.rows.keys() - {"response_mask", "log_prob"}:
        rows = zip(batch.rows[name], outside, strict=True)
        batch.rows[name] = [torch.where(masked, odd, row) for row, masked in rows]
    return batch


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize("base", BASES)
def test_nan_outside_the_mask_changes_no_base_loss(base, mode, make_batch, actor_config):
    weights = torch.rand(4, 7, generator=torch.Generator().manual_seed(0))
    plain, changed = (with_weights(make_batch(1), weights) for _ in range(2))
    verls = "geo_mean_weighted" if base == "geo_mean" else base
    config, verls_config = (
        actor_config(PolicyLossConfig(loss_mode=name, dro_beta=0.1), loss_agg_mode=mode) for name in (base, verls)
    )
    expected, _ = run(lambda **call: ppo_loss(config=verls_config, **call), [plain.whole()])
    found, metrics = run(build(config), [planted(changed, math.nan).whole()])
    assert found == expected
    assert torch.equal(changed.take_gradients(), plain.take_gradients())
    assert all(math.isfinite(metric.aggregate()) for metric in metrics.values())


def split_cases():
    """(name, ActorConfig fields, policy loss, settings): whatever has to give the same sum over any split."""
    return [
        ("opsm", {}, {"loss_mode": "vanilla"}, {"corrections": OPSM}),
        ("opsm_seq", {"loss_agg_mode": "seq-mean-token-mean"}, {"loss_mode": "gspo"}, {"corrections": OPSM}),
        ("geo_mean", {}, {"loss_mode": "geo_mean"}, {"corrections": OPSM}),
        ("llds", {}, {"loss_mode": "llds", "coef": 2.0}, {}),
        ("llds_geo_mean", {}, {"loss_mode": "llds", "gate": "response", "base": "geo_mean"}, {}),
        ("opsm_loss", {}, {"loss_mode": "opsm", "delta": DELTA, "base": "cispo"}, {}),
        ("kl", {"use_kl_loss": True, "kl_loss_type": "unbiased", "kl_loss_coef": 0.5}, {"loss_mode": "vanilla"}, {}),
    ]


@pytest.mark.parametrize("split", [[[0], [1], [2], [3]], [[0, 3], [1, 2]], [[2], [0, 1, 3]]])
@pytest.mark.parametrize(
    ("fields", "policy_loss", "settings"), [c[1:] for c in split_cases()], ids=[c[0] for c in split_cases()]
)
def test_the_split_into_micro_batches_does_not_matter(split, fields, policy_loss, settings, make_batch, actor_config):
    batch = make_batch(3, lengths=(6, 9, 4, 8))
    loss = build(actor_config(**fields), policy_loss=policy_loss, **settings)
    whole, _ = run(loss, [batch.whole()])
    gradient = batch.take_gradients()
    assert gradient.count_nonzero() > 5
    total, _ = run(loss, [batch.part(indices) for indices in split])
    close(total, whole, scale=TERM)
    close(batch.take_gradients(), gradient)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    ("fields", "policy_loss", "settings"), [c[1:] for c in split_cases()], ids=[c[0] for c in split_cases()]
)
def test_what_stands_outside_the_mask_has_no_effect(odd, fields, policy_loss, settings, make_batch, actor_config):
    plain, changed = make_batch(3, lengths=(6, 9, 4, 8)), planted(make_batch(3, lengths=(6, 9, 4, 8)), odd)
    loss = build(actor_config(**fields), policy_loss=policy_loss, **settings)
    (expected, expected_metrics), (found, metrics) = (run(loss, [batch.whole()]) for batch in (plain, changed))
    assert found == expected
    assert torch.equal(changed.take_gradients(), plain.take_gradients())
    for name, value in expected_metrics.items():
        assert metrics[name] == value or metrics[name].aggregate() == value.aggregate(), name


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("denominator", "field"), [("infer", "rollout_log_probs"), ("old", "old_log_probs")])
def test_unbiased_kl_joins_the_loss_under_verls_names(mode, denominator, field, make_batch, actor_config):
    batch = make_batch(1)
    fields = {"use_kl_loss": True, "kl_loss_type": "unbiased", "kl_loss_coef": 0.3, "loss_agg_mode": mode}
    found, metrics = run(build(actor_config(**fields), kl_denominator=denominator), [batch.whole()])
    gradient = batch.take_gradients()
    plain, _ = run(build(actor_config(loss_agg_mode=mode)), [batch.whole()])
    plain_gradient = batch.take_gradients()

    theta = batch.padded("log_prob").double().requires_grad_()
    ref, sampled = batch.padded("ref_log_prob").double(), batch.padded(field).double()
    x = torch.exp(ref - theta)
    mask = batch.padded("response_mask").bool()
    info = {"batch_num_tokens": int(mask.sum()), "global_batch_size": 4}
    term = agg_loss(torch.exp(theta - sampled) * (x - torch.log(x) - 1), mask, mode, **info)
    (0.3 * term).backward()
    expected = torch.cat([row[: len(own)] for row, own in zip(theta.grad, batch.leaves, strict=True)])
    close(metrics["kl_loss"].aggregate(), term)
    assert metrics["kl_coef"] == 0.3
    close(found, plain + 0.3 * term.item(), scale=TERM)
    close(gradient - plain_gradient, expected, scale=gradient.abs().max().item())


@pytest.mark.parametrize("base", [*BASES, "clip_cov", "kl_cov"])
def test_a_mini_batch_without_tokens_has_zero_gradients(base, make_batch, actor_config):
    batch = make_batch(0, lengths=(3, 2))
    batch.rows["response_mask"] = [mask * 0 for mask in batch.rows["response_mask"]]
    config = actor_config(
        PolicyLossConfig(loss_mode=base, dro_beta=0.1), use_kl_loss=True, kl_loss_type="unbiased", entropy_coeff=0.1
    )
    loss, metrics = run(build(config, corrections=OPSM), [batch.whole()])
    assert loss == 0
    assert torch.equal(batch.take_gradients(), torch.zeros(5))
    assert all(math.isfinite(m.aggregate() if hasattr(m, "aggregate") else m) for m in metrics.values())


def test_the_same_in_verl_is_nan(make_batch, actor_config):
    batch = make_batch(0, lengths=(3, 2))
    batch.rows["response_mask"] = [mask * 0 for mask in batch.rows["response_mask"]]
    model_output, data = batch.whole()
    assert ppo_loss(actor_config(), model_output, data)[0].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_log_probs_enter_in_float32(dtype, make_batch, actor_config):
    batch = make_batch(2)
    for leaf in batch.leaves:
        leaf.data = leaf.data.to(dtype).float()
    config = actor_config(use_kl_loss=True, kl_loss_type="unbiased")
    exact, _ = run(build(config, corrections=OPSM), [batch.whole()])
    half, _ = run(build(config, corrections=OPSM), [batch.whole(dtype)])
    assert half == exact


@pytest.mark.parametrize("gap", [100.0, -100.0])
def test_log_ratios_of_a_hundred_stay_finite(gap, make_batch, actor_config):
    batch = make_batch(2)
    for leaf in batch.leaves:
        leaf.data += gap
    config = actor_config(use_kl_loss=True, kl_loss_type="unbiased")
    loss, _ = run(build(config, corrections=OPSM, policy_loss={"loss_mode": "llds"}), [batch.whole()])
    assert math.isfinite(loss)
    assert batch.take_gradients().isfinite().all()


@pytest.fixture
def seen(monkeypatch):
    """The batches that the policy loss `test_reader` is given."""
    monkeypatch.setattr(core_algos, "POLICY_LOSS_REGISTRY", dict(core_algos.POLICY_LOSS_REGISTRY))
    found = []

    @register_policy_loss("test_reader")
    def reader(**call):
        found.append(current_batch())
        return apply_base("vanilla", **call)

    return found


def test_the_inputs_reach_a_registered_loss_padded(make_batch, actor_config, seen):
    batch = make_batch(0)
    run(build(actor_config(PolicyLossConfig(loss_mode="test_reader"))), [batch.whole()])
    mask = batch.padded("response_mask")
    assert torch.equal(seen[0].l_infer, batch.padded("rollout_log_probs") * mask)
    assert torch.equal(seen[0].entropy, batch.padded("entropy") * mask)
    with pytest.raises(
        ConfigError,
        match=r"the loss reads router_agreement.*the field router_agreement.*the batch has: l_infer, k, entropy",
    ):
        seen[0].require("router_agreement")
    with pytest.raises(ConfigError, match=r"launch with verl_ext\.main_ppo"):
        current_batch()


def test_k_is_the_engines_ratio_and_zero_where_it_is_nan(make_batch, actor_config, seen):
    batch = make_batch(0)
    pairs = [(-1.0, -0.5, math.exp(0.5)), (-2.0, -2.0, 1.0), (math.nan, -1.0, 0.0)]
    limit = 20.0  # of the log-ratio
    pairs += [(-1.0, -31.0, math.exp(-limit)), (-math.inf, -1.0, math.exp(limit)), (-1.0, -math.inf, math.exp(-limit))]
    row = max(range(len(batch.leaves)), key=lambda index: len(batch.leaves[index]))
    assert len(batch.leaves[row]) >= len(pairs)
    batch.rows["response_mask"][row][:] = 1
    for position, (l_infer, l_old, _) in enumerate(pairs):
        batch.rows["rollout_log_probs"][row][position], batch.rows["old_log_probs"][row][position] = l_infer, l_old
    run(build(actor_config(PolicyLossConfig(loss_mode="test_reader"))), [batch.whole()])
    torch.testing.assert_close(seen[0].k[row, : len(pairs)], torch.tensor([k for *_, k in pairs]))
    assert torch.equal(seen[0].k != 0, seen[0].mask & ~batch.padded("rollout_log_probs").isnan())


def test_a_batch_without_rollout_log_probs_says_so(make_batch, actor_config):
    batch = make_batch(0)
    del batch.rows["rollout_log_probs"]
    model_output, data = batch.whole()
    with pytest.raises(ConfigError, match="must have the field rollout_log_probs"):
        build(actor_config(), corrections=OPSM)(model_output=model_output, data=data)


def test_the_engines_micro_batch_stays_as_it_was(make_batch, actor_config):
    batch = make_batch(0, batch_num_tokens=0)
    model_output, data = batch.whole()
    keys = set(data.keys())
    build(actor_config(), corrections=OPSM)(model_output=model_output, data=data)
    assert set(data.keys()) == keys
    assert tu.get(data, "batch_num_tokens") == 0


def test_what_is_active_is_returned_and_verls_config_left_alone(actor_config):
    config = actor_config(PolicyLossConfig(loss_mode="geo_mean"), use_kl_loss=True, kl_loss_type="unbiased")
    _, active = build_worker_loss(config, LossSettings.from_dict({"corrections": {"opsm": {"delta": 0.1}}}))
    assert active["corrections"] == {"opsm": {"delta": 0.1, "stale_only": False}}
    assert active["kl"] == "unbiased, over l_infer"
    assert active["policy_loss"]["loss_mode"] == "geo_mean"
    assert config.use_kl_loss and config.policy_loss.loss_mode == "geo_mean"
    _, active = build_worker_loss(
        config, LossSettings.from_dict({"policy_loss": {"loss_mode": "llds", "base": "gspo"}})
    )
    assert active["corrections"] == {}
    assert active["policy_loss"].items() >= {"loss_mode": "llds", "base": "gspo", "coef": 0.1, "gate": "action"}.items()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"corrections": {"opsm": {}}}, "stability.opsm.delta must be given"),
        ({"corrections": {"opsm": {"delta": None}}}, "stability.opsm.delta must be given"),
        (
            {"policy_loss": {"loss_mode": "llds", "lambda": 1}},
            "policy_loss.lambda is not known; its settings are: coef, gate",
        ),
        ({"policy_loss": {"loss_mode": "llds", "gate": "token"}}, "gate=token is not known"),
        ({"policy_loss": {"loss_mode": "llds", "base": "llds"}}, "base=llds cannot be built upon"),
        ({"policy_loss": {"loss_mode": "llds", "base": "bypass_mode"}}, "base=bypass_mode cannot be built upon"),
        ({"policy_loss": {"loss_mode": "opsm"}}, r"policy_loss.delta must be given"),
        ({"policy_loss": {"loss_mode": "llds", "coef": -1}}, "coef=-1 must be at least 0"),
    ],
)
def test_settings_that_cannot_work_name_themselves(settings, message, actor_config):
    with pytest.raises(ConfigError, match=message):
        build_worker_loss(actor_config(), LossSettings.from_dict(settings))


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
@pytest.mark.parametrize("base", ["vanilla", "geo_mean", "sapo"])
def test_dropped_trajectories_leave_the_mean_over_sequences(base, mode, make_batch, actor_config):
    config = actor_config(PolicyLossConfig(loss_mode=base), loss_agg_mode=mode)
    whole, scaled = (make_batch(0, **settings) for settings in ({}, {"filter_scale": 2.0}))
    losses = [run(build(config), [batch.whole()])[0] for batch in (whole, scaled)]
    by_sequences = base != "vanilla" or mode != "token-mean"
    close(losses[1], losses[0] * (2 if by_sequences else 1), scale=TERM)


ICEPOP = {"icepop": {"alpha": 0.8, "beta": 1.25}}
IPO = {"ipo": {"eps": 0.05}}
KEEPS = {  # of float64 l_theta and l_infer
    "icepop": lambda theta, infer: ((theta - infer).exp() >= 0.8) & ((theta - infer).exp() <= 1.25),
    "ipo": lambda theta, infer: (theta.exp() - infer.exp()).abs() <= 0.05,
}


def in_bypass(batch):
    """`batch` as verl's trainer leaves it there."""
    batch.rows["old_log_probs"] = batch.rows["rollout_log_probs"]
    return batch


def columns(batch):
    """l_theta, l_infer, A and m of all tokens, [N] float64."""
    names = ("log_prob", "rollout_log_probs", "advantages", "response_mask")
    return (torch.cat(batch.leaves if n == "log_prob" else batch.rows[n]).detach().double() for n in names)


@pytest.mark.parametrize(
    ("mode", "as_mask", "corrections"), [("vanilla", True, ICEPOP), ("gpg", False, ICEPOP), ("gpg", False, IPO)]
)
def test_in_the_workers_loss_the_ratio_counts_once(mode, as_mask, corrections, make_batch, actor_config):
    """The clipped objective, unclipped here, has the gradient -M r A grad l_theta / N by the mask; REINFORCE has -k A /
    N by the weight.

    With `ipo`, the latter is prime-rl's loss.
    """
    batch = in_bypass(make_batch(0, scale=0.2))
    settings = LossSettings.from_dict({"first_pass": {"corrections": corrections, "as_mask": as_mask}})
    one = FirstPass(settings.first_pass)
    config = actor_config(PolicyLossConfig(loss_mode=mode), clip_ratio=0.5, clip_ratio_low=0.5, clip_ratio_high=0.5)
    loss, active = build_worker_loss(config, settings, first_pass=one)
    assert active["first_pass"] and active["corrections"] == corrections
    for rows in ([0, 2], [1, 3]):
        model_output, data = batch.part(rows)
        loss(model_output=model_output, data=data)[0].backward()
    theta, infer, A, m = columns(batch)
    k = (theta - infer).exp()
    (name,) = corrections
    kept = KEEPS[name](theta, infer) & (m > 0)
    assert 0 < kept.sum() < m.sum()
    found = batch.take_gradients().double()
    torch.testing.assert_close(found, -(kept * k * A) / m.sum(), rtol=1e-4, atol=1e-7)
    taken, metrics = one.judge()
    assert taken and metrics["correction/dropped"] == pytest.approx(1 - kept.sum().item() / m.sum().item())


@pytest.mark.parametrize("mode", ["dppo_tv", "dppo_kl"])
def test_in_bypass_mode_verls_dppo_is_the_papers(mode, make_batch, actor_config):
    """Eq. 11 and 12 of arXiv 2602.04879: -M r A grad l_theta / N; M drops what moves away past a divergence."""
    bound = {"dppo_tv": 0.15, "dppo_kl": 0.05}[mode]
    batch = in_bypass(make_batch(1, lengths=(9, 9, 9, 9), scale=0.5, masked_row=None))
    clips = dict.fromkeys(("clip_ratio", "clip_ratio_low", "clip_ratio_high"), bound) | {"clip_ratio_c": 1e4}
    _, metrics = run(build(actor_config(PolicyLossConfig(loss_mode=mode), **clips)), [batch.whole()])
    theta, infer, A, m = columns(batch)
    p, q = theta.exp(), infer.exp()
    divergence = (p - q).abs() if mode == "dppo_tv" else q * (infer - theta) + (1 - q) * ((1 - q) / (1 - p)).log()
    away = torch.where(A > 0, p > q, p < q)
    kept = ~(away & (divergence > bound)) & (m > 0)
    assert 0 < kept.sum() < m.sum() and (~away & (divergence > bound) & (m > 0)).any(), "one-sided"
    expected = -(kept * (theta - infer).exp() * A) / m.sum()
    torch.testing.assert_close(batch.take_gradients().double(), expected, rtol=1e-4, atol=1e-7)
    assert metrics["actor/pg_clipfrac"].aggregate() == pytest.approx(1 - kept.sum().item() / m.sum().item())


def test_m2po_beside_tis_masks_what_the_oracle_masks(make_batch, actor_config):
    """-M r A grad l_theta / N with r = exp(l_theta - l_infer), where no ratio of the base loss has moved."""
    batch = make_batch(3, lengths=(6, 9, 4, 8), masked_row=None)
    batch.rows["old_log_probs"] = [leaf.detach().clone() for leaf in batch.leaves]
    theta, infer, A, m = columns(batch)
    weights = torch.nn.utils.rnn.pad_sequence((theta - infer).exp().float().split([6, 9, 4, 8]), batch_first=True)
    with_weights(batch, weights)
    _, metrics = run(build(actor_config(), corrections={"m2po": {"threshold": 0.04}}), [batch.whole()])
    rows = [values.split([6, 9, 4, 8]) for values in (infer, theta, A, m)]
    keep, _ = m2po_oracle(*([row.tolist() for row in values] for values in rows), 0.04)
    kept = torch.tensor([one for row in keep for one in row], dtype=torch.float64)
    assert 0 < (kept * m).sum() < m.sum()
    torch.testing.assert_close(
        batch.take_gradients().double(), -(kept * m * (theta - infer).exp() * A) / m.sum(), rtol=1e-4, atol=1e-7
    )
    assert metrics["actor/m2po/dropped"].aggregate() == pytest.approx(1 - ((kept * m).sum() / m.sum()).item())
