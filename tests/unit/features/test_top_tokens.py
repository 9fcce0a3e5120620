"""Requirements of top tokens, truncated sampling and score centering, checked before Ray starts."""

from functools import partial

import pytest

from tests.support.fixing import assert_fixed
from tests.support.problems import check_run
from verl_ext.base.errors import ConfigError
from verl_ext.features.feature import Need
from verl_ext.features.stability import stability_config
from verl_ext.features.table import apply_engine_settings, loss_settings, read_features, table_lines
from verl_ext.upstream.agent_loop import VARIABLE, parse_extras

ROLLOUT = "actor_rollout_ref.rollout"
ACTOR = "actor_rollout_ref.actor"
SGLANG = f"{ROLLOUT}.name=sglang"
MTP = "actor_rollout_ref.model.mtp"
K = "stability.top_tokens.k"
MAX = f"{ROLLOUT}.engine_kwargs.vllm.max_logprobs"
ASKED = ("stability=icepop", f"{K}=32")
KEPT = ("stability=icepop", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=64")
ONE_UPDATE = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=64")
CENTERED = ("stability=score_centering", *ONE_UPDATE)


@pytest.fixture
def check(compose, models):
    """check(override, ...) -> the config, checked and set."""

    def run(*overrides):
        config = compose(f"actor_rollout_ref.model.path={models}/moe", f"{ROLLOUT}.name=vllm", *overrides)
        stability = stability_config(config.stability)
        check_run(read_features(config, stability))
        apply_engine_settings(read_features(config, stability))
        return config

    return run


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["stability=icepop", f"{ROLLOUT}.top_p=0.9"], f"set {ROLLOUT}.top_k=512, or {ROLLOUT}.top_p=1"),
        ([*KEPT, f"{K}=32"], f"keep more tokens than {K}=32; set {K}=64"),
        (
            ["stability=tis", f"{ROLLOUT}.top_k=1"],
            f"and so is the gradient; set {ROLLOUT}.top_p=1 and {ROLLOUT}.top_k=-1",
        ),
        (["stability=none", "stability.metrics=true", f"{ROLLOUT}.top_k=1"], "keep one token"),
        ([*KEPT, f"{ACTOR}.use_kl_loss=true"], "compares it with a reference over the whole vocabulary"),
        ([*KEPT, "algorithm.use_kl_in_reward=true"], ", or algorithm.use_kl_in_reward=False"),
        ([*ASKED, f"{ROLLOUT}.name=hf"], f"verl returns none with {ROLLOUT}.name=hf"),
        (
            [*CENTERED, SGLANG, f"{K}=200", f"{ROLLOUT}.disaggregation.enabled=true"],
            f"the first token of a response has at most 128 of them; set {ROLLOUT}.disaggregation.enabled=false",
        ),
        (
            [*KEPT, SGLANG, f"+{ROLLOUT}.engine_kwargs.sglang.rl_on_policy_target=fsdp"],
            f"to bfloat16; set {ROLLOUT}.engine_kwargs.sglang.rl_on_policy_target=null",
        ),
        (
            [*KEPT, SGLANG, "actor_rollout_ref.model.mtp.enable=true", f"{MTP}.enable_rollout=true"],
            f"keeps other tokens when it verifies; set {MTP}.enable_rollout=false",
        ),
        ([*KEPT, SGLANG, f"{K}=32"], f"keep more tokens than {K}=32; set {K}=64"),
        (["stability=icepop", SGLANG, f"{ROLLOUT}.top_p=0.9"], f"set {ROLLOUT}.top_k=512, or {ROLLOUT}.top_p=1"),
        ([*ASKED, f"+{MAX}=20"], f"{MAX}=20 allows fewer; set {MAX}=32"),
        ([*KEPT, f"+{MAX}=20"], f"the 64 most likely tokens ({ROLLOUT}.top_k=64): {MAX}=20"),
        ([*ASKED, "actor_rollout_ref.model.use_fused_kernels=true"], "set actor_rollout_ref.model.use_fused_kernels="),
        ([*ASKED, f"{ACTOR}.fsdp_config.pad_to_length=true"], f"set {ACTOR}.fsdp_config.pad_to_length=False"),
        (["stability=icepop", f"{K}=1000000"], f"vocabulary has 151936; set {K}=151936"),
        (["stability=icepop", f"{K}=-1"], f"{K}=-1 must be a number of tokens, or 0"),
        (
            ["stability=none", "stability.batch_skip={metric:vllm_kl/head,threshold:0.1}"],
            f"stability.batch_skip.metric: vllm_kl/head is not logged: the rollout returns no top tokens; set {K}=32",
        ),
        (
            ["stability=none", "stability.guard.rules={r:{signal:vllm_kl/head,above:1,action:warn}}"],
            f"rules.r: vllm_kl/head is not logged: the rollout returns no top tokens; set {K}=32",
        ),
        (
            [*ASKED, "stability.batch_skip.metric=vllm_kl/head", "algorithm.rollout_correction.bypass_mode=true"],
            "vllm_kl/head is not logged: algorithm.rollout_correction.bypass_mode=True leaves compute_log_prob out",
        ),
        (["stability=score_centering", f"{ACTOR}.ppo_mini_batch_size=32"], f"set {ACTOR}.ppo_mini_batch_size="),
        ([*CENTERED, f"{ACTOR}.ppo_epochs=2"], f"set {ACTOR}.ppo_epochs=1"),
        ([*CENTERED, f"{ACTOR}.policy_loss.loss_mode=gspo"], "loss_mode=gspo; set"),
        ([*CENTERED, "algorithm.rollout_correction.bypass_mode=true"], "rollout_correction.bypass_mode=False"),
        ([*CENTERED, "stability.correction=mis"], "not of each response: stability.correction=mis; choose tis, icepop"),
        ([*CENTERED, "stability.correction=icepop", "stability.denominator=kept"], "set stability.denominator=full"),
        (
            [*CENTERED, "algorithm.rollout_correction.rollout_is=token"],
            "does not know verl's own weights: algorithm.rollout_correction.rollout_is=token; set algorithm.",
        ),
        (
            [*CENTERED, "algorithm.rollout_correction.rollout_rs=token_k1"],
            "set algorithm.rollout_correction.rollout_rs=",
        ),
        ([*CENTERED, "stability.filters={overlong: {}}"], "a filter would drop: stability.filters.overlong; leave the"),
        (
            [*CENTERED, "stability.correction=tis_sequence"],
            "stability.correction=tis_sequence; choose tis, icepop, kpop or ipo",
        ),
        (
            [*CENTERED, f"{ROLLOUT}.top_k=50", f"{ROLLOUT}.logprobs_mode=raw_logprobs"],
            f"set {ROLLOUT}.logprobs_mode=processed_logprobs",
        ),
        (
            [
                *CENTERED,
                "stability.correction=icepop",
                "stability.guard.rules={r:{signal:vllm_kl/k3,above:1,action:tighten}}",
            ],
            "would keep using the wide band: a rule with action=tighten",
        ),
    ],
)
def test_what_cannot_work_names_the_remedy(check, overrides, message):
    run = partial(check, *overrides)
    with pytest.raises(ConfigError) as error:
        run()
    assert message in str(error.value) and "\n" not in str(error.value)
    assert_fixed(error.value, run)


@pytest.mark.parametrize(
    ("overrides", "k", "use"),
    [
        (ASKED, 32, {"truncated": False, "centers": False}),
        (KEPT, 64, {"truncated": True, "centers": False}),
        ((*KEPT, f"{K}=80"), 80, {"truncated": True}),
        (CENTERED, 128, {"centers": True, "corrections": {}}),
        ((*CENTERED, f"{ROLLOUT}.top_k=50"), 50, {"truncated": True, "centers": True}),
        ((*CENTERED, "stability.correction=tis"), 128, {"corrections": {"tis": {"cap": 2.0, "floor": 0.0}}}),
    ],
)
def test_what_needs_top_tokens_turns_them_on(check, overrides, k, use):
    config = check(*overrides)
    stability = stability_config(config.stability)
    run = read_features(config, stability)
    (line,) = [one for one in table_lines(run) if one.name == "sampler's top tokens"]
    assert line.setting.split()[0] == str(k) and {Need.TOP_TOKENS, Need.MEASURED_BATCHES, Need.OUR_LOSS} <= run.needs
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs == k
    assert parse_extras(config.ray_kwargs.ray_init.runtime_env.env_vars[VARIABLE])["top_tokens"] == k
    assert use.items() <= loss_settings(read_features(config, stability))["top_tokens"].items()


@pytest.mark.parametrize(("overrides", "k"), [(ASKED, 32), (KEPT, 64), (CENTERED, 128)])
def test_sglang_is_asked_for_them_too_and_has_no_limit(check, overrides, k):
    config = check(*overrides, SGLANG)
    assert parse_extras(config.ray_kwargs.ray_init.runtime_env.env_vars[VARIABLE])["top_tokens"] == k
    assert "max_logprobs" not in str(config.actor_rollout_ref.rollout.engine_kwargs)
    settings = loss_settings(read_features(config, stability_config(config.stability)))
    assert settings["top_tokens"]["truncated"] is (overrides is KEPT)


def test_raw_log_probs_of_sglang_need_none(check):
    """They stay as SGLang returns them, over all tokens, as vLLM's do; the doctor warns."""
    config = check("stability=icepop", SGLANG, f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.logprobs_mode=raw_logprobs")
    assert Need.TOP_TOKENS not in read_features(config, stability_config(config.stability)).needs


def test_where_nothing_needs_it_there_is_none(check, compose):
    config = check("stability=icepop")
    assert Need.TOP_TOKENS not in read_features(config, stability_config(config.stability)).needs
    assert "max_logprobs" not in (config.actor_rollout_ref.rollout.engine_kwargs.get("vllm") or {})
    assert "top_tokens:0" in str(config.ray_kwargs)
    plain = compose("stability=none", f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.name=vllm")
    assert read_features(plain, stability_config(plain.stability)).demands == ()  # the run is verl's own


def test_more_than_vllm_is_asked_for_is_left_to_the_user(check):
    assert check(*ASKED, f"+{MAX}=-1").actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs == -1
