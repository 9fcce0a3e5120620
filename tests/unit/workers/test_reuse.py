"""Without compute_log_prob, l_old is l_theta of the update: losses, gradients and metrics are those of two passes."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from verl.workers.config import PolicyLossConfig

from tests.support.examples import at_most
from verl_ext.core.measure import measure
from verl_ext.core.tokens import Tokens
from verl_ext.workers.first_pass import FirstPass, verls_gap
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

LOSSES = ("vanilla", "gspo", "cispo", "sapo", "geo_mean", "dppo_tv", "dppo_kl", "gpg", "dro", "kl_cov", "clip_cov")
OURS = (
    {"loss_mode": "icepop", "alpha": 0.8, "beta": 1.25},
    {"loss_mode": "llds"},
    {"loss_mode": "opsm", "delta": 0.05},
)
MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
CORRECTIONS = (
    {},
    {"icepop": {"alpha": 0.8, "beta": 1.25}},
    {"tis": {"cap": 1.2}},
    {"mis": {"cap": 1.5, "weight": "one"}, "geo_mask": {"low": 0.9, "high": 1.1}},
    {"kpop": {"phi": 0.01}},
)
PARTS = ([0, 1, 2, 3], [0, 2], [1, 3])  # the rows of micro-batches


def two_passes(batch, corrections):
    """The batch with what compute_log_prob and the trainer add to it; the measurements."""
    l_old, l_infer, mask = (batch.padded(name) for name in ("log_prob", "rollout_log_probs", "response_mask"))
    tokens = Tokens.from_padded(l_infer, l_old, mask.bool())
    measured = measure(tokens, corrections)
    batch.rows["old_log_probs"] = [leaf.detach().clone() for leaf in batch.leaves]
    if measured.weight is not None:
        rows = measured.weight.view(mask.shape)
        batch.rows["rollout_is_weights"] = [row[: len(leaf)] for row, leaf in zip(rows, batch.leaves, strict=True)]
    return batch, measured


def updated(loss, batch, parts):
    """Each part's loss and metrics, and the gradient of all."""
    torch.manual_seed(0)  # Clip-Cov takes tokens at random
    found = []
    for rows in parts:
        value, metrics = loss(model_output=(part := batch.part(rows))[0], data=part[1])
        value.backward()
        found.append((value.item(), {name: each for name, each in metrics.items()}))
    return found, batch.take_gradients()


# The fixtures are functions without a state.
@settings(at_most(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    loss=st.sampled_from([*({"loss_mode": name, "dro_beta": 0.1} for name in LOSSES), *OURS]),
    mode=st.sampled_from(MODES),
    corrections=st.sampled_from(CORRECTIONS),
    inside=st.sampled_from([{}, {"opsm": {"delta": 0.05}}, {"m2po": {"threshold": 0.04}}]),
    split=st.booleans(),
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.05, 0.3, 30.0]),
)
def test_gradients_and_metrics_are_those_of_two_passes(
    loss, mode, corrections, inside, split, seed, scale, make_batch, actor_config
):
    parts = PARTS[1:] if split else PARTS[:1]
    config = actor_config(PolicyLossConfig(loss_mode="vanilla"), loss_agg_mode=mode)
    common = {"policy_loss": loss, "corrections": inside}
    before, measured = two_passes(make_batch(seed, scale=scale), corrections)
    plain, _ = build_worker_loss(config, LossSettings.from_dict(common))
    expected, gradient = updated(plain, before, parts)

    after = make_batch(seed, scale=scale)
    del after.rows["old_log_probs"]
    wanted = LossSettings.from_dict(
        common | {"reuses": True, "first_pass": {"corrections": corrections, "as_mask": False}}
    )
    one = FirstPass(wanted.first_pass)
    reusing, active = build_worker_loss(config, wanted, first_pass=one)
    found, ours = updated(reusing, after, parts)
    assert active["reuses"] and torch.equal(ours, gradient)
    for (value, metrics), (expected_value, expected_metrics) in zip(found, expected, strict=True):
        assert value == expected_value and metrics.keys() == expected_metrics.keys()
    _, reported = one.judge()
    for name, value in measured.metrics.items():
        assert reported[name] == pytest.approx(value, rel=1e-6, abs=1e-12), name


def test_a_batch_of_several_steps_has_its_l_old_and_weights_already(make_batch, actor_config):
    corrections = {"tis": {"cap": 1.2}}
    batch, _ = two_passes(make_batch(3), corrections)
    batch.rows["old_log_probs"] = [row + 0.1 for row in batch.rows["old_log_probs"]]  # a step has been taken since
    config = actor_config()
    expected = updated(build_worker_loss(config, LossSettings())[0], batch, PARTS[:1])
    wanted = LossSettings.from_dict({"reuses": True, "first_pass": {"corrections": corrections}})
    one = FirstPass(wanted.first_pass)
    one.measures = False  # as the gate sets it without the trainer's request
    found = updated(build_worker_loss(config, wanted, first_pass=one)[0], batch, PARTS[:1])
    assert found[0][0][0] == expected[0][0][0] and torch.equal(found[1], expected[1])


def test_verls_own_metrics_of_the_gap_are_those_of_its_trainer(make_batch):
    """Against `calculate_debug_metrics`, which reads l_old from the batch."""
    from verl.protocol import DataProto
    from verl.utils.debug.metrics import calculate_debug_metrics

    batch, measured = two_passes(make_batch(5), {})
    names = ("rollout_log_probs", "old_log_probs", "response_mask")
    fields = {name: batch.padded(name) for name in names}
    verls = calculate_debug_metrics(DataProto.from_dict({**fields, "responses": fields["response_mask"]}))
    found = verls_gap(measured)
    assert found == pytest.approx({name: verls[name] for name in found}, rel=1e-5)
    assert {name.rpartition("_")[2] for name in found} == {"max", "mean", "std"}
