"""Settings that cannot work stop with one line before Ray starts."""

from functools import partial

import pytest
from omegaconf import OmegaConf

from tests.support.fixing import assert_fixed, assert_refused
from tests.support.problems import check_run, features_of
from verl_ext.base.errors import ConfigError, errors_of
from verl_ext.core.losses import Llds
from verl_ext.features import rescoring
from verl_ext.features.feature import RunFeatures
from verl_ext.features.stability import stability_config
from verl_ext.features.table import apply_engine_settings, loss_settings
from verl_ext.features.verl_config import BYPASS, check_folder
from verl_ext.launch.files import file_problems
from verl_ext.upstream.agent_loop import VARIABLE, Extras, parse_extras


def check(compose, *overrides):
    config = compose(*overrides)
    check_run(features_of(config))
    return config


ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{role}" for role in ("actor", "rollout", "model"))
LOSS, CHECKPOINT, CORRECTION = f"{ACTOR}.policy_loss", f"{ACTOR}.checkpoint", "algorithm.rollout_correction"
VLLM, OVERLONG = f"{ROLLOUT}.engine_kwargs.vllm", "reward.reward_kwargs.overlong_buffer_cfg"
NO_LOG_PROBS, LOG_PROBS = (f"{ROLLOUT}.calculate_log_probs={value}" for value in (False, True))
NOT_MEASURED = "stability.metrics=false stability.batch_skip.threshold=null"
ROLLBACK, UNDO = (
    f"stability.guard.rules={{r:{{signal:critic/score/mean,below:0,action:{action}}}}}"
    for action in ("rollback", "undo")
)
SAVED = f"stability=icepop {ROLLBACK} trainer.save_freq=5"
MEGATRON, FSDP_1 = "model_engine=megatron", f"{ACTOR}.strategy=fsdp"
MEGATRON_FSDP, PIPELINE = f"{ACTOR}.megatron.use_megatron_fsdp", "pipeline_model_parallel_size"
ENGINES = "is for actor_rollout_ref.actor.strategy=fsdp2, megatron and veomni, and this run has fsdp"
AGREEMENT = "stability=none stability.router_agreement=true"
HEAD = "stability=none stability.float32_head=true"
ROUNDED, CANARY = "stability.fake_quantization", "stability.sync_canary"
PROCESSED = "logprobs_mode=processed_logprobs"
MODE, SCORED_AGAIN = "trainer.v1.trainer_mode", "stability=none stability.rescoring.every=5"
GAP = "the gap is not measured"
ANOTHER = "or choose another preset"

# The overrides of a launch, and what its error says.
REFUSED = [
    (f"stability=icepop {NO_LOG_PROBS}", f"set {LOG_PROBS}"),
    (
        f"stability=icepop {CORRECTION}.rollout_is=token",
        f"{CORRECTION}.rollout_is=token and stability.correction=icepop both weight the loss",
    ),
    (f"stability=icepop {LOSS}.loss_mode=icepop", "set stability.correction=none"),
    ("stability=icepop trainer.use_v1=False", "set trainer.use_v1=True"),
    (
        "recipe=cpu_megatron stability=icepop trainer.total_training_steps=20",
        "lr_warmup_steps=20 must be below trainer.total_training_steps=20 with",
    ),
    (f"stability=icepop {ROLLBACK}", "rules.r: action=rollback has no checkpoint to go back to"),
    (f"{SAVED} trainer.max_actor_ckpt_to_keep=1", "set trainer.max_actor_ckpt_to_keep=2, or more"),
    (f"{SAVED} {CHECKPOINT}.save_contents=[hf_model]", "action=rollback would not load model and optimizer"),
    (f"{SAVED} {CHECKPOINT}.async_save=true", f"set {CHECKPOINT}.async_save=false"),
    (f"{SAVED} +trainer.remove_previous_ckpt_in_save=true", "set trainer.remove_previous_ckpt_in_save=false"),
    (f"stability=icepop stability.guard.mini_batch.grad_norm=1 {FSDP_1}", f"grad_norm {ENGINES}"),
    (f"stability=icepop {UNDO} {FSDP_1}", f"action=undo {ENGINES}"),
    (
        f"stability=icepop stability.guard.after_update.trajectories=4 {MEGATRON} {MEGATRON_FSDP}=true",
        f"set {MEGATRON_FSDP}=false",
    ),
    (
        f"stability=icepop {ROLLOUT}.logprobs_mode=raw_logprobs {ROLLOUT}.temperature=0.7",
        f"leaves out {ROLLOUT}.temperature=0.7",
    ),
    (f"stability=icepop +{VLLM}.logprobs_mode=raw_logits", f"set {VLLM}.{PROCESSED}"),
    (f"stability=icepop {ROLLOUT}.logprobs_mode=raw_logits", f"set {ROLLOUT}.{PROCESSED}"),
    (f"stability=icepop {LOSS}.loss_mode=bypass_mode", f"cannot weight {LOSS}.loss_mode=bypass_mode"),
    (f"stability=opsm {LOSS}.loss_mode=bypass_mode", f"correction=opsm cannot weight {LOSS}.loss_mode=bypass_mode"),
    (f"stability=icepop_loss {LOSS}.loss_mode=gspo", f"loss_mode=icepop and {LOSS}.base=gspo"),
    (f"stability=none {LOSS}.loss_mode=opsm", f"{LOSS}.delta must be given"),
    (f"stability=llds_loss {LOSS}.loss_mode=opsm", f"{LOSS}.coef is not known; its settings are: delta"),
    (
        f"stability=llds_loss {LOSS}._target_=my.LldsConfig",
        f"set {LOSS}._target_=verl_ext.workers.loss_config.build_loss_config",
    ),
    (f"stability=opsm_loss {LOSS}.delta=null", f"{LOSS}.delta must be given"),
    (f"stability=llds_loss {LOSS}.base=nothing", f"{LOSS}.base=nothing cannot be built upon"),
    (f"stability=none {ACTOR}.use_kl_loss=true {ACTOR}.kl_loss_type=unbiased {NO_LOG_PROBS}", f"set {LOG_PROBS}"),
    (f"stability=none {ACTOR}.kl_loss_type=unbiased", f"set {ACTOR}.use_kl_loss=true"),
    (
        "stability=icepop stability.kl_denominator=old",
        f"unbiased KL; set stability.kl_denominator=infer, or {ACTOR}.kl_loss_type=unbiased",
    ),
    ("stability=icepop stability.kl_denominator=old", "stability.kl_denominator=old has no effect"),
    ("stability=dapo", f"{OVERLONG}.len=4096 must be above 0 and at most"),
    (f"stability=dapo data.max_response_length=8192 ~{OVERLONG}.log", f"set ++{OVERLONG}.log=False"),
    (f"stability=llds_loss {LOSS}.coef=abc", f"{LOSS}.coef=abc must be a number"),
    ("stability=qae algorithm.qae=3", "algorithm.qae=3 must be a mapping"),
    ("stability=qae algorithm.qae.k=2", "algorithm.qae.k=2 must be between 0 and 1"),
    (f"{LOSS}.loss_mode=icepop {NO_LOG_PROBS}", f"set {LOG_PROBS}"),
    (f"stability=icepop_loss {CORRECTION}.rollout_is=sequence", f"set {CORRECTION}.rollout_is=null"),
    (f"{AGREEMENT} model_engine=torchtitan", f"no adapter for {ACTOR}.strategy=torchtitan"),
    (f"{AGREEMENT} {ROLLOUT}.{PIPELINE}=2", f"{PIPELINE}=2"),
    (f"{AGREEMENT} {ROLLOUT}.name=trtllm", f"set {ROLLOUT}.name=vllm"),
    (
        f"stability=none stability.cascade_attention=off {ROLLOUT}.name=sglang",
        "set stability.cascade_attention=default",
    ),
    (
        f"stability=none stability.cascade_attention=on +{VLLM}.disable_cascade_attn=True",
        "contradicts stability.cascade_attention=on",
    ),
    (f"{HEAD} {ROLLOUT}.name=trtllm", "set stability.float32_head=false"),
    (
        f"{HEAD} +{VLLM}.hf_overrides.head_dtype=model",
        "hf_overrides.head_dtype=model contradicts stability.float32_head=true",
    ),
    (f"{HEAD} {MODEL}.use_fused_kernels=true", f"set {MODEL}.use_fused_kernels=False"),
    (f"{HEAD} {ROLLOUT}.quantization=fp8", "set stability.float32_head=false"),
    ("stability=none stability.filters={too_stale:{versions:2}}", f"older than the policy, and with {MODE}=sync"),
    ("stability=none stability.filters={too_stale:{versions:2}}", "stability.filters.too_stale acts on"),
    (SCORED_AGAIN, f"older than the policy, and {MODE}=sync"),
    (SCORED_AGAIN, "stability.rescoring.every=5 scores rollouts again"),
    (f"{SCORED_AGAIN} {MODE}=colocate_async", "trainer_mode=colocate_async keeps no copy of the weights"),
    (f"{SCORED_AGAIN} {MODE}=colocate_async", "only in separate_async; set stability.rescoring=null"),
    ("stability=icepop stability.rescoring.versions=4", "stability.rescoring.versions=4 has no effect"),
    (
        "stability=icepop stability.rescoring.versions=4",
        "nothing is rescored; set stability.rescoring.versions=1, or stability.rescoring.every=10",
    ),
    (
        "stability=icepop stability.trajectories.max_tokens=9",
        "no trajectory is written; set stability.trajectories.max_tokens=4096",
    ),
    (f"stability=icepop {ROUNDED}.router=true", f"{ROUNDED}.router=true has no effect: nothing is rounded"),
    (f"stability=icepop {ROUNDED}.router=true", f"set {ROUNDED}.router=false, or {ROUNDED}.format=fp4"),
    (f"stability=none {ROUNDED}={{format:none,head:true}}", f"nothing is rounded; set {ROUNDED}.head=false"),
    (f"stability=icepop {ROUNDED}.group=16", f"set {ROUNDED}.group=32, or"),
    (f"stability=icepop {CANARY}.every=4", "no weight sync is checked"),
    (
        f"stability=icepop {MODE}=separate_async {CANARY}={{trajectories:0,every:4}}",
        f"no weight sync is checked; set {CANARY}.every=1",
    ),
    (
        "stability=icepop stability.batch_skip={threshold:null,metric:vllm_kl/k1}",
        "no batch is skipped by it; set stability.batch_skip.metric=vllm_kl/k3",
    ),
    ("stability=none stability.guard.stop_after=5", f"{GAP}; set stability.guard.stop_after=10"),
    ("stability=none stability.guard.level=0.05", f"{GAP}; set stability.guard.level=null"),
    (
        f"stability=llds_loss {NOT_MEASURED} stability.guard.boundary.window=9",
        f"guard.boundary.window=9 has no effect: {GAP}",
    ),
    ("stability=none stability.guard.slow_step_s=5", "no feature of stability.* is on; set"),
    ("stability=none stability.plugins=[json]", "no feature of stability.* is on; set stability.plugins=[]"),
    ("stability=none stability.kl_denominator=old", "acts only with the unbiased KL"),
    (
        f"{AGREEMENT} {BYPASS}=true {MEGATRON} {ACTOR}.megatron.{PIPELINE}=2",
        "router_agreement=true compares the experts of compute_log_prob on",
    ),
    (f"stability=dppo_tv {BYPASS}=false", f"set {BYPASS}=true, {ANOTHER}"),
    (f"stability=dppo_tv {NOT_MEASURED} {BYPASS}=false", f"set {BYPASS}=true, {ANOTHER}"),
    (f"stability=dppo_tv {LOSS}.loss_mode=vanilla", f"set {LOSS}.loss_mode=dppo_tv, {ANOTHER}"),
    (
        "stability=qae algorithm.adv_estimator=grpo",
        "algorithm.adv_estimator=grpo does not use it; set algorithm.adv_estimator=qae",
    ),
    ("stability=none +algorithm.qae.k=0.3", "algorithm.qae is set, and algorithm.adv_estimator=gae"),
    (f"stability=icepop {LOSS}.coef=0.3", f"{LOSS}.loss_mode=vanilla does not use it"),
    (f"stability=icepop {LOSS}.base=gspo", f"{LOSS}.loss_mode=vanilla does not use it"),
]


@pytest.mark.parametrize(("overrides", "said"), REFUSED)
def test_a_combination_that_cannot_work_names_the_remedy(compose, models, overrides, said):
    run = partial(check, compose, f"{MODEL}.path={models}/moe", f"{ROLLOUT}.name=vllm", *overrides.split())
    assert_refused(run, said)


@pytest.mark.parametrize(
    "overrides",
    [
        ["stability=none", "stability.guard={level:0,stop_after:null,slow_step_s:null}", "stability.breakdown=false"],
        ["stability=none", "stability.sync_canary.trajectories=0", "stability.replay=disabled"],
        ["stability=icepop", "stability.rescoring={every:0,versions:1}", "stability.trajectories.max_tokens=4096"],
        ["stability=dppo_tv", *NOT_MEASURED.split()],
        ["stability=dppo_tv", f"{LOSS}.loss_mode=dppo_kl"],
        ["stability=dppo_tv", f"{BYPASS}=false", "stability.expects=null"],
    ],
)
def test_what_holds_anyway_is_accepted(compose, overrides):
    check(compose, "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.model.path=some/model", *overrides)


ROUTING = ("stability=none", "stability.router_agreement=true", "actor_rollout_ref.rollout.name=vllm")


def test_rescoring_where_verl_copies_weights(compose, models):
    separate = ("trainer.v1.trainer_mode=separate_async", "stability.rescoring.every=5")
    check(compose, f"actor_rollout_ref.model.path={models}/moe", "actor_rollout_ref.rollout.name=vllm", *separate)
    config = compose(*separate)
    for setting, value, said in (
        ("algorithm.rollout_correction.bypass_mode", True, "verl copies no weights with algorithm.rollout_correction"),
        ("actor_rollout_ref.actor.strategy", "torchtitan", "verl copies no weights with actor.strategy=torchtitan"),
    ):
        changed = config.copy()
        OmegaConf.update(changed, setting, value)
        (problem,) = errors_of(rescoring.problems(RunFeatures(changed, stability_config(config.stability))))
        assert f"rescoring.every=5: {said}" in problem.found and problem.fix == ("stability.rescoring=null",)


@pytest.mark.parametrize(
    ("versions", "oldest", "told"), [(1, 8, True), (7, 8, False), (7, "null", True), (1, "many", False)]
)
def test_trajectories_that_no_kept_version_scores_are_told(compose, versions, oldest, told):
    config = compose(
        f"{MODE}=separate_async",
        f"stability.rescoring={{every:5,versions:{versions}}}",
        f"trainer.v1.sampler.max_off_policy_threshold={oldest}",
    )
    found = [*rescoring.problems(RunFeatures(config, stability_config(config.stability)))]
    assert [problem.level for problem in found] == ["note"] * told


def test_routing_of_a_dense_model_is_refused(compose, models):
    run = partial(check, compose, *ROUTING, f"actor_rollout_ref.model.path={models}/dense")
    with pytest.raises(ConfigError, match=r"dense is a dense model; set stability.router_agreement=false") as error:
        run()
    assert_fixed(error.value, run)


@pytest.mark.parametrize("setting", ["actor_rollout_ref.model.path", "actor_rollout_ref.model.tokenizer_path"])
@pytest.mark.parametrize("path", ["/no/such/model", "./no", ".no/such/model", "no/such/model"])
def test_a_model_path_that_does_not_exist_is_named(compose, setting, path):
    assert f"{setting}={path} does not exist" in [each.found for each in file_problems(compose(f"{setting}={path}"))]


@pytest.mark.parametrize("path", ["Qwen/Qwen3-30B-A3B", "gpt2", "hdfs://a/b/c"])
def test_a_model_of_the_hub_or_elsewhere_is_left_to_verl(compose, path):
    config = compose(f"actor_rollout_ref.model.path={path}")
    check_folder(config.actor_rollout_ref.model)
    assert not any("model.path" in each.found for each in file_problems(config))


@pytest.mark.parametrize("overrides", [("stability=icepop",), ROUTING])
def test_a_model_folder_without_a_config_is_named(compose, overrides, tmp_path):
    with pytest.raises(ConfigError, match=rf"model\.path={tmp_path} has no config\.json"):
        check(compose, *overrides, f"actor_rollout_ref.model.path={tmp_path}")


def test_routing_of_an_moe_is_asked_of_the_rollout(compose, models):
    config = check(compose, *ROUTING, f"actor_rollout_ref.model.path={models}/moe")
    assert not config.actor_rollout_ref.rollout.enable_rollout_routing_replay
    apply_engine_settings(features_of(config))
    assert config.actor_rollout_ref.rollout.enable_rollout_routing_replay


def test_a_missing_tokenizer_is_named(compose, models):
    with pytest.raises(ConfigError, match=r"no_tokenizer has no tokenizer.*tokenizer_path"):
        check(compose, "stability=icepop", f"actor_rollout_ref.model.path={models}/no_tokenizer")


@pytest.mark.parametrize(
    ("engine", "argument", "value"),
    [("vllm", "hf_overrides.head_dtype", "float32"), ("sglang", "enable_fp32_lm_head", True)],
)
def test_float32_head_becomes_the_rollouts_argument(compose, models, engine, argument, value):
    model = f"actor_rollout_ref.model.path={models}/moe"
    config = check(compose, "stability.float32_head=true", f"actor_rollout_ref.rollout.name={engine}", model)
    run = features_of(config)
    apply_engine_settings(run)
    assert OmegaConf.select(config, f"actor_rollout_ref.rollout.engine_kwargs.{engine}.{argument}") == value
    assert loss_settings(run)["float32_head"] is True


@pytest.mark.parametrize(("setting", "disabled"), [("on", False), ("off", True)])
def test_cascade_attention_becomes_vllms_argument(compose, models, setting, disabled):
    config = check(
        compose,
        f"stability.cascade_attention={setting}",
        "actor_rollout_ref.rollout.name=vllm",
        f"actor_rollout_ref.model.path={models}/moe",
    )
    apply_engine_settings(features_of(config))
    assert config.actor_rollout_ref.rollout.engine_kwargs.vllm.disable_cascade_attn is disabled


def test_the_workers_loss_is_told_of_opsm_and_of_the_kl(compose):
    config = compose("stability=deepseek_v32", "stability.opsm.delta=0.2", "stability.kl_denominator=old")
    settings = loss_settings(features_of(config))
    gate = {"vllm_kl": None, "policy_kl": None, "grad_norm": None}
    opsm = {"delta": 0.2, "stale_only": False}
    nothing = {"undo": False, "after_update": 0}
    assert settings == {"corrections": {"opsm": opsm}, "kl_denominator": "old", "mini_batch": gate} | nothing


def test_nothing_is_set_where_nothing_is_asked_for(compose):
    config, untouched = compose("stability=icepop"), compose("stability=icepop")
    apply_engine_settings(features_of(config))
    environment = config.ray_kwargs.ray_init.runtime_env
    assert Extras(**parse_extras(environment.env_vars[VARIABLE])) == Extras(answers=True)
    OmegaConf.update(untouched, "ray_kwargs.ray_init.runtime_env.env_vars", environment.env_vars, force_add=True)
    assert config == untouched


def test_loss_mode_alone_names_the_loss(compose):
    from verl.utils.config import omega_conf_to_dataclass

    given = ("stability=none", f"{LOSS}.loss_mode=llds", f"{LOSS}.coef=0.5")
    config = compose(*given, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1")
    check_run(features_of(config, read_model=False))
    apply_engine_settings(features_of(config))
    built = omega_conf_to_dataclass(config.actor_rollout_ref.actor).policy_loss
    assert (built.loss_mode, built.base, built.settings) == ("llds", "vanilla", Llds(coef=0.5))


def test_every_worker_imports_the_plugins_by_verls_own_setting(compose):
    external = "actor_rollout_ref.model.external_lib"
    for given, expected in ([], ["json"]), ([f"{external}=csv"], ["csv", "json"]), ([f"{external}=[json]"], ["json"]):
        config = compose("stability=icepop", "stability.plugins=[json]", *given)
        apply_engine_settings(features_of(config))
        assert config.actor_rollout_ref.model.external_lib == expected
