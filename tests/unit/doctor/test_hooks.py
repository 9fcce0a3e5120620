"""Which hooks attach, and the errors of the run's own checks."""

import re

import pytest

from tests import ROOT
from verl_ext.doctor.findings import CHECKS
from verl_ext.doctor.hooks import needs_critic, needs_reference
from verl_ext.settings.losses import TARGET

ROLLOUT = "actor_rollout_ref.rollout"
LOSS = "actor_rollout_ref.actor.policy_loss"


def levels(found):
    return {finding.level for finding in found}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ["stability=icepop"],
            ["mismatch metrics", "correction: icepop, alpha 0.5, beta 5", "batch skip: vllm_kl/k3 > 0.1"],
        ),
        (["stability=opsm"], ["correction: opsm, delta 0.1, stale_only False (worker_loss"]),
        (["stability=llds_loss"], ["policy loss: llds, base vanilla, coef 0.1"]),
        (["stability=filters"], ["batch filter"]),
        (["stability=qae", "algorithm.adv_estimator=qae"], ["advantages: qae"]),
        (["stability.guard.mini_batch.policy_kl=0.1"], ["mini-batch gate"]),
        (["stability.cascade_attention=off"], ["cascade attention: off"]),
        (["stability=r3", "actor_rollout_ref.model.path={models}/moe"], ["router agreement", "routing replay: R3"]),
    ],
)
def test_the_features_of_a_run(findings, models, overrides, expected):
    found = findings("hooks", *(override.format(models=models) for override in overrides))
    assert levels(found) == {"ok"}
    assert all(any(finding.found.startswith(name) for finding in found) for name in expected)


def test_nothing_switched_on_is_a_note(findings):
    assert levels(findings("hooks", "stability=none")) == {"note"}


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ([f"{ROLLOUT}.calculate_log_probs=False"], [f"{ROLLOUT}.calculate_log_probs=True"]),
        (["trainer.use_v1=False"], ["trainer.use_v1=True"]),
        ([f"{ROLLOUT}.top_p=0.9"], [f"{ROLLOUT}.top_k=512", f"{ROLLOUT}.top_k=101"]),  # a small vocabulary
        (["algorithm.rollout_correction.rollout_is=token"], ["algorithm.rollout_correction.rollout_is=null"]),
        (
            ["trainer.use_v1=False", f"{ROLLOUT}.calculate_log_probs=False"],
            ["trainer.use_v1=True", f"{ROLLOUT}.calculate_log_probs=True"],
        ),
        (["stability.router_agreement=true"], ["stability.router_agreement=false"]),  # of a dense model
        (["stability.icepop.alpha=6"], []),
        ([f"{LOSS}.loss_mode=llds", f"{LOSS}._target_=my.Config"], [f"{LOSS}._target_={TARGET}"]),
        (["stability.correction=opsm"], ["stability.opsm.delta=0.1"]),
        (["stability.correction=[icepop,mis]"], ["stability.mis.weight=one"]),
        (["stability.correction=[icepop,tis]"], []),
    ],
)
def test_an_error_of_the_runs_own_checks_and_its_remedy(findings, overrides, fix):
    found = findings("hooks", "stability=icepop", *overrides)
    assert levels(found) == {"error"}
    assert [override for finding in found for override in finding.fix] == fix
    if fix:
        assert levels(findings("hooks", "stability=icepop", *overrides, *fix)) == {"ok"}


def test_verls_own_validation_is_told(findings):
    assert levels(findings("verl's validation", "stability=icepop")) == {"ok"}
    found = findings("verl's validation", "stability=icepop", "data.train_batch_size=3")
    assert levels(found) == {"error"} and "train_batch_size" in found[0].found


@pytest.mark.parametrize(
    ("precision", "said"), [("fp16", "use precision=fp16_megatron"), ("fp32", "precision=bf16 or fp32")]
)
def test_a_precision_of_fsdp_on_megatron(context, precision, said):
    run = context("model_engine=megatron", f"precision={precision}")
    (finding,) = CHECKS["verl's validation"](run)
    assert finding.level == "error" and said in finding.why
    assert not list(CHECKS["dtype of both engines"](run))


def test_verls_validation_waits_for_our_errors(findings):
    assert not findings("verl's validation", "stability=icepop", "trainer.use_v1=False")


def test_overrides_that_do_not_compose_are_an_error(installed):
    found = installed("config", failure="Could not override 'a.b'")
    assert [(finding.level, finding.found) for finding in found] == [("error", "Could not override 'a.b'")]


def test_each_check_says_where_its_claim_was_read():
    assert all("Source:" in check.__doc__ for check in CHECKS.values())


def test_each_check_has_a_row_in_the_docs():
    docs = (ROOT / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(.+?)` \|", docs.partition("<!-- checks -->")[2], re.MULTILINE) == sorted(
        CHECKS, key=lambda name: docs.index(f"\n| `{name}` |")
    )


@pytest.mark.filterwarnings("ignore:Disabled critic")
def test_verls_validation_is_asked_about_the_roles_that_verl_would_start(compose):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy

    config = compose()
    for enabled in (None, True, False):
        for estimator in ("gae", "grpo"):
            config.critic.enable, config.algorithm.adv_estimator = enabled, estimator
            assert needs_critic(config) == need_critic(config)
    for in_reward in (True, False):
        for in_loss in (True, False):
            config.algorithm.use_kl_in_reward, config.actor_rollout_ref.actor.use_kl_loss = in_reward, in_loss
            assert needs_reference(config) == need_reference_policy(config)
