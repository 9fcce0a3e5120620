"""Requirements of top tokens, truncated sampling and score centering, checked before Ray starts."""

from functools import partial

import pytest

from tests.support.fixing import assert_refused
from tests.support.problems import features_of
from verl_ext.features.feature import Need
from verl_ext.features.table import loss_settings, table_lines
from verl_ext.upstream.agent_loop import VARIABLE, parse_extras

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
SGLANG = f"{ROLLOUT}.name=sglang"
MTP = "actor_rollout_ref.model.mtp"
K = "stability.top_tokens.k"
MAX = f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"
CORRECTION, FUSED = "algorithm.rollout_correction", "actor_rollout_ref.model.use_fused_kernels"
ASKED = f"stability=icepop {K}=32"
KEPT = f"stability=icepop {ROLLOUT}.top_p=0.9 {ROLLOUT}.top_k=64"
TIGHTEN = "stability.guard.rules={r:{signal:vllm_kl/k3,above:1,action:tighten}}"
CENTERED = f"stability=score_centering data.train_batch_size=64 {ACTOR}.ppo_mini_batch_size=64"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (f"stability=icepop {ROLLOUT}.top_p=0.9", f"set {ROLLOUT}.top_k=512, or {ROLLOUT}.top_p=1"),
        (f"{KEPT} {K}=32", f"keep more tokens than {K}=32; set {K}=64"),
        (f"stability=tis {ROLLOUT}.top_k=1", f"set {ROLLOUT}.top_p=1 and {ROLLOUT}.top_k=-1"),
        (f"stability=none stability.metrics=true {ROLLOUT}.top_k=1", "keep one token"),
        (f"{KEPT} {ACTOR}.use_kl_loss=true", "a reference over the whole vocabulary"),
        (f"{KEPT} algorithm.use_kl_in_reward=true", ", or algorithm.use_kl_in_reward=False"),
        (f"{ASKED} {ROLLOUT}.name=hf", f"verl returns none with {ROLLOUT}.name=hf"),
        (
            f"{CENTERED} {SGLANG} {K}=200 {ROLLOUT}.disaggregation.enabled=true",
            f"has at most 128 of them; set {ROLLOUT}.disaggregation.enabled=false",
        ),
        (
            f"{KEPT} {SGLANG} +{ROLLOUT}.engine_kwargs.sglang.rl_on_policy_target=fsdp",
            f"to bfloat16; set {ROLLOUT}.engine_kwargs.sglang.rl_on_policy_target=null",
        ),
        (f"{KEPT} {SGLANG} {MTP}.enable=true {MTP}.enable_rollout=true", f"set {MTP}.enable_rollout=false"),
        (f"{KEPT} {SGLANG} {K}=32", f"keep more tokens than {K}=32; set {K}=64"),
        (f"stability=icepop {SGLANG} {ROLLOUT}.top_p=0.9", f"set {ROLLOUT}.top_k=512, or {ROLLOUT}.top_p=1"),
        (f"{ASKED} +{MAX}=20", f"{MAX}=20 allows fewer; set {MAX}=32"),
        (f"{KEPT} +{MAX}=20", f"the 64 most likely tokens ({ROLLOUT}.top_k=64): {MAX}=20"),
        (f"{ASKED} {FUSED}=true", f"set {FUSED}="),
        (f"{ASKED} {ACTOR}.fsdp_config.pad_to_length=true", f"set {ACTOR}.fsdp_config.pad_to_length=False"),
        (f"stability=icepop {K}=1000000", f"vocabulary has 151936; set {K}=151936"),
        (f"stability=icepop {K}=-1", f"{K}=-1 must be a number of tokens, or 0"),
        (
            "stability=none stability.batch_skip={metric:vllm_kl/head,threshold:0.1}",
            f"stability.batch_skip.metric: vllm_kl/head is not logged: the rollout returns no top tokens; set {K}=32",
        ),
        (
            "stability=none stability.guard.rules={r:{signal:vllm_kl/head,above:1,action:warn}}",
            f"rules.r: vllm_kl/head is not logged: the rollout returns no top tokens; set {K}=32",
        ),
        (
            f"{ASKED} stability.batch_skip.metric=vllm_kl/head {CORRECTION}.bypass_mode=true",
            f"vllm_kl/head is not logged: {CORRECTION}.bypass_mode=True leaves compute_log_prob out",
        ),
        (f"stability=score_centering {ACTOR}.ppo_mini_batch_size=32", f"set {ACTOR}.ppo_mini_batch_size="),
        (f"{CENTERED} {ACTOR}.ppo_epochs=2", f"set {ACTOR}.ppo_epochs=1"),
        (f"{CENTERED} {ACTOR}.policy_loss.loss_mode=gspo", "loss_mode=gspo; set"),
        (f"{CENTERED} {CORRECTION}.bypass_mode=true", "rollout_correction.bypass_mode=False"),
        (f"{CENTERED} stability.correction=mis", "not of each response: stability.correction=mis; choose tis, icepop"),
        (f"{CENTERED} stability.correction=icepop stability.denominator=kept", "set stability.denominator=full"),
        (f"{CENTERED} {CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is=token; set algorithm."),
        (f"{CENTERED} {CORRECTION}.rollout_rs=token_k1", f"set {CORRECTION}.rollout_rs="),
        (
            f"{CENTERED} stability.filters={{overlong:{{}}}}",
            "a filter would drop: stability.filters.overlong; leave the",
        ),
        (
            f"{CENTERED} stability.correction=tis_sequence",
            "stability.correction=tis_sequence; choose tis, icepop, kpop or ipo",
        ),
        (
            f"{CENTERED} {ROLLOUT}.top_k=50 {ROLLOUT}.logprobs_mode=raw_logprobs",
            f"set {ROLLOUT}.logprobs_mode=processed_logprobs",
        ),
        (
            f"{CENTERED} stability.correction=icepop {TIGHTEN}",
            "would keep using the wide band: a rule with action=tighten",
        ),
    ],
)
def test_what_cannot_work_names_the_remedy(checked, overrides, message):
    error = assert_refused(partial(checked, *overrides.split()), message)
    assert len(error.problems) == 1


@pytest.mark.parametrize(
    ("overrides", "k", "use"),
    [
        (ASKED, 32, {"truncated": False, "centers": False}),
        (KEPT, 64, {"truncated": True, "centers": False}),
        (f"{KEPT} {K}=80", 80, {"truncated": True}),
        (CENTERED, 128, {"centers": True, "corrections": {}}),
        (f"{CENTERED} {ROLLOUT}.top_k=50", 50, {"truncated": True, "centers": True}),
        (f"{CENTERED} stability.correction=tis", 128, {"corrections": {"tis": {"cap": 2.0, "floor": 0.0}}}),
    ],
)
def test_what_needs_top_tokens_turns_them_on(checked, overrides, k, use):
    config = checked(*overrides.split())
    run = features_of(config)
    (line,) = [one for one in table_lines(run) if one.name == "sampler's top tokens"]
    assert line.setting.split()[0] == str(k) and {Need.TOP_TOKENS, Need.MEASURED_BATCHES, Need.OUR_LOSS} <= run.needs
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs == k
    assert parse_extras(config.ray_kwargs.ray_init.runtime_env.env_vars[VARIABLE])["top_tokens"] == k
    assert use.items() <= loss_settings(run)["top_tokens"].items()


@pytest.mark.parametrize(("overrides", "k"), [(ASKED, 32), (KEPT, 64), (CENTERED, 128)])
def test_sglang_is_asked_for_them_too_and_has_no_limit(checked, overrides, k):
    config = checked(*overrides.split(), SGLANG)
    assert parse_extras(config.ray_kwargs.ray_init.runtime_env.env_vars[VARIABLE])["top_tokens"] == k
    assert "max_logprobs" not in str(config.actor_rollout_ref.rollout.engine_kwargs)
    settings = loss_settings(features_of(config))
    assert settings["top_tokens"]["truncated"] is (overrides == KEPT)


def test_raw_log_probs_of_sglang_need_none(checked):
    """They stay as SGLang returns them, over all tokens, as vLLM's do; the doctor warns."""
    config = checked("stability=icepop", SGLANG, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.logprobs_mode=raw_logprobs")
    assert Need.TOP_TOKENS not in features_of(config).needs


def test_where_nothing_needs_it_there_is_none(checked, compose):
    config = checked("stability=icepop")
    assert Need.TOP_TOKENS not in features_of(config).needs
    assert "max_logprobs" not in (config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {})
    assert "top_tokens:0" in str(config.ray_kwargs)
    plain = compose("stability=none", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.name=vllm")
    assert features_of(plain).demands == ()  # the run is verl's own


def test_more_than_vllm_is_asked_for_is_left_to_the_user(checked):
    assert checked(*ASKED.split(), f"+{MAX}=-1").actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs == -1
