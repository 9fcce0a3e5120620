"""Tests of attached hooks, of errors from the run's and verl's own checks, and of code that a look at a config never
runs."""

import copy
import io
import json
import pickle
import subprocess
import sys
import types
from dataclasses import replace
from importlib.metadata import PackageNotFoundError

import pytest
from omegaconf import OmegaConf
from rich.console import Console
from transformers import LlamaConfig

from recipes.make_assets import build_tokenizer
from verl_ext.base.errors import Problem, errors_of
from verl_ext.cli import main
from verl_ext.doctor import hooks
from verl_ext.doctor.checks import CHECKS, Context, run_checks
from verl_ext.doctor.command import print_findings
from verl_ext.doctor.hooks import built_settings, fit_presets, refused_quickly, settings_classes, unknown_targets
from verl_ext.features.losses import TARGET
from verl_ext.features.verl_config import needs_critic, needs_reference
from verl_ext.launch.gpus import named

ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
LOSS = "actor_rollout_ref.actor.policy_loss"


def levels(found):
    return {finding.level for finding in found}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            "stability=icepop",
            ["mismatch metrics", "correction: icepop, alpha 0.5, beta 5", "batch skip: vllm_kl/k3 > 0.1"],
        ),
        ("stability=opsm", ["correction: opsm, delta 0.1, stale_only False (worker_loss"]),
        ("stability=llds_loss", ["policy loss: llds, base vanilla, coef 0.1"]),
        ("stability=filters", ["batch filter"]),
        ("stability=qae algorithm.adv_estimator=qae", ["advantages: qae"]),
        ("stability.guard.mini_batch.policy_kl=0.1", ["mini-batch gate"]),
        ("stability.cascade_attention=off", ["cascade attention: off"]),
        ("stability=r3 actor_rollout_ref.model.path={models}/moe", ["router agreement", "routing replay: R3"]),
    ],
)
def test_the_features_of_a_run(findings, models, overrides, expected):
    found = findings("hooks", *overrides.format(models=models).split())
    assert levels(found) == {"ok"}
    assert all(any(finding.found.startswith(name) for finding in found) for name in expected)


def test_nothing_switched_on_is_a_note(findings):
    assert levels(findings("hooks", "stability=none")) == {"note"}


MANAGER = f"++{ROLLOUT}.agent.agent_loop_manager_class=somebody.Manager"


@pytest.mark.parametrize(
    ("overrides", "level", "said"),
    [
        (["stability=none"], "note", "agent_loop_workers"),
        (["stability=icepop"], "note", "answers/*"),
        (["stability=r3", "actor_rollout_ref.model.path={models}/moe"], "note", "router/checked"),
        (["stability=icepop", "stability.top_tokens.k=8"], "warning", "stability.top_tokens.k=0"),
    ],
)
def test_a_manager_of_ones_own_is_not_imported(findings, models, overrides, level, said):
    given = [override.format(models=models) for override in overrides]
    (found,) = findings("agent loop manager", MANAGER, *given)
    assert found.level == level and "somebody.Manager was not imported" in found.found and said in found.why
    assert findings("agent loop manager", *given) == []


@pytest.mark.parametrize(
    ("overrides", "fix"),
    [
        ("trainer.use_v1=False", "trainer.use_v1=True"),
        (f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=512 {ROLLOUT}.top_k=101"),  # a small vocabulary
        (f"stability.correction=icepop {CORRECTION}.rollout_is=token", f"{CORRECTION}.rollout_is=null"),
        (
            f"trainer.use_v1=False {ROLLOUT}.temperature=0.7 {ROLLOUT}.logprobs_mode=raw_logprobs",
            f"trainer.use_v1=True {ROLLOUT}.logprobs_mode=processed_logprobs",
        ),
        ("stability.router_agreement=true", "stability.router_agreement=false"),  # of a dense model
        ("stability.icepop.alpha=6", ""),
        (f"{LOSS}.loss_mode=llds {LOSS}._target_=my.Config", f"{LOSS}._target_={TARGET}"),
        ("stability.correction=opsm", "stability.opsm.delta=0.1"),
        ("stability.correction=[icepop,mis]", "stability.mis.weight=one"),
        ("stability.correction=[icepop,tis]", ""),
    ],
)
def test_an_error_of_the_runs_own_checks_and_its_remedy(findings, overrides, fix):
    given = ("stability=icepop", *overrides.split())
    found, fixes = findings("hooks", *given), []
    assert levels(found) == {"error"}
    while new := [override for finding in found for override in finding.fix]:  # a fix can uncover another error
        fixes += new
        found = findings("hooks", *given, *fixes)
    assert fixes == fix.split() and levels(found) == ({"ok"} if fix else {"error"})


def test_what_is_left_out_of_a_preset_is_a_note(findings):
    found = findings("hooks", "stability=icepop", "algorithm.rollout_correction.rollout_is=token")
    (left_out,) = (finding for finding in found if finding.level == "note")
    assert left_out.found == "left out: now stability.correction=none" and "both weight the loss" in left_out.why
    found = findings("hooks", "stability=icepop", f"{ROLLOUT}.calculate_log_probs=False")
    assert [finding.found for finding in found if finding.level == "note"] == [
        f"set: now {ROLLOUT}.calculate_log_probs=True"
    ]


def test_verls_own_validation_is_told(findings):
    assert levels(findings("verl's validation", "stability=icepop")) == {"ok"}
    found = findings("verl's validation", "actor_rollout_ref.actor.ppo_micro_batch_size=1")
    assert levels(found) == {"error"} and "[actor] You have set both" in found[0].found


@pytest.mark.parametrize(
    "overrides",
    [
        ("data.train_batch_size=0",),
        ("data.train_batch_size=null",),
        ("trainer.nnodes=0",),
        ("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",),
        (
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null",
            f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=null",
            "actor_rollout_ref.actor.use_kl_loss=true",
        ),
        ("actor_rollout_ref.actor.ppo_max_token_len_per_gpu=0", "actor_rollout_ref.actor.use_dynamic_bsz=true"),
    ],
)
def test_one_wrong_size_is_one_error(context, overrides):
    run = context(*overrides)
    (found,) = errors_of(run_checks(run, ("hooks", "names", "sizes", "verl's settings", "verl's validation")))
    assert found.check == "sizes" and overrides[0].partition("=")[0] in found.found


@pytest.mark.parametrize(
    ("precision", "said"), [("fp16", "use precision=fp16_megatron"), ("fp32", "precision=bf16 or fp32")]
)
def test_a_precision_of_fsdp_on_megatron(context, precision, said):
    run = context("model_engine=megatron", f"precision={precision}")
    (finding,) = CHECKS["verl's settings"](run)
    assert finding.level == "error" and said in finding.why
    assert not list(CHECKS["dtype of both engines"](run))


@pytest.mark.parametrize(
    ("raised", "fields", "level"),
    [
        (PackageNotFoundError("vllm"), {}, "note"),  # on the run's machine, `imports` reports it
        (ImportError("libcuda.so.1"), {"gpu": named("H100"), "other_machine": True}, "note"),
        (ImportError("libcuda.so.1"), {"gpu": named("H100")}, "error"),
        (ValueError("lora_rank must be less than or equal to 512"), {}, "error"),
    ],
)
def test_a_lora_is_not_refused_where_vllm_is_not_installed(findings, monkeypatch, raised, fields, level):
    import verl.workers.rollout  # noqa: F401

    def get_vllm_max_lora_rank(rank):
        raise raised

    package = "verl.workers.rollout.vllm_rollout"
    module = types.ModuleType(f"{package}.utils")
    module.get_vllm_max_lora_rank = get_vllm_max_lora_rank
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    monkeypatch.setitem(sys.modules, f"{package}.utils", module)
    (finding,) = findings("verl's validation", "actor_rollout_ref.model.lora_rank=1024", **fields)
    assert finding.level == level and (raised.args[0] in finding.why) == (level == "note")
    assert levels(findings("verl's validation", **fields)) == {"ok"}


def test_without_ray_the_settings_classes_alone_decide(findings, monkeypatch):
    """An environment that has verl's files and none of its packages."""
    batch, mini = "data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=32"
    (whole,) = findings("verl's validation", batch, mini)
    said = ValueError(whole.found)

    def no_ray(*args, **kwargs):
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr("verl.utils.config.validate_config", no_ray)
    elsewhere = {"gpu": named("H100"), "other_machine": True}
    monkeypatch.setattr(hooks, "refused_quickly", lambda config, **roles: said)
    (found,) = findings("verl's validation", batch, mini, **elsewhere)
    assert (found.level, found.fix) == ("error", ("actor_rollout_ref.actor.ppo_mini_batch_size=16",))
    assert (found.found, found.fix) == (whole.found, whole.fix)
    monkeypatch.setattr(hooks, "refused_quickly", lambda config, **roles: AttributeError("of a hollow module"))
    assert levels(findings("verl's validation", batch, mini, **elsewhere)) == {"note"}


def test_megatron_with_the_settings_of_fsdp(findings):
    megatron, size = "actor_rollout_ref.actor.strategy=megatron", "megatron.tensor_model_parallel_size"
    (finding,) = findings("verl's settings", megatron)
    assert (finding.level, finding.fix) == ("error", ("model_engine=megatron",)) and size in finding.found
    warm_up = "actor_rollout_ref.actor.optim.lr_warmup_steps=10"
    assert not findings("resumed schedule", megatron, warm_up), "which is Megatron's"
    assert levels(findings("verl's validation", megatron, *finding.fix)) == {"ok"}
    (finding,) = findings("sizes", megatron)
    assert finding.level == "note" and size in finding.found
    assert levels(findings("sizes", megatron, "model_engine=megatron")) == {"ok"}


def test_verls_validation_waits_for_our_errors(findings):
    assert not findings("verl's validation", "stability=icepop", "trainer.use_v1=False")
    assert not findings("verl's validation", "actor_rollout_ref.actor.loss_agg_mode=token_mean")  # which `names` has


def test_each_check_says_where_its_claim_was_read():
    assert all("Source:" in check.__doc__ for check in CHECKS.values())


@pytest.mark.filterwarnings("ignore:Disabled critic")
def test_verls_validation_is_asked_about_verls_roles(compose):
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


ACTOR = "actor_rollout_ref.actor"
# Overrides, and whether verl takes them.
CASES = [
    (["recipe=qwen3_30b_a3b", "stability=icepop"], True),
    (["recipe=qwen3_30b_a3b_megatron", "precision=fp16_megatron"], True),
    (["recipe=qwen3_30b_a3b", "stability=llds_loss"], True),
    (["recipe=qwen3_30b_a3b", "stability=llds_loss", f"{ACTOR}.policy_loss.coef=-1"], False),
    (["recipe=cpu_smoke", "algorithm.adv_estimator=gae", "critic.ppo_micro_batch_size_per_gpu=1"], True),
    (["recipe=qwen3_30b_a3b", f"{ACTOR}.loss_agg_mode=nonsense"], False),
    (["recipe=qwen3_30b_a3b", f"{ACTOR}.use_dynamic_bsz=false"], False),
    (["recipe=qwen3_30b_a3b", f"+{ACTOR}.no_such_field=1"], False),
    (["recipe=qwen3_30b_a3b", f"{ROLLOUT}.val_kwargs.do_sample=true", f"{ROLLOUT}.temperature=0"], False),
]
CODE = """
import json, pickle, sys
from verl_ext.doctor.hooks import refused_quickly
from verl_ext.features.verl_config import needs_critic, needs_reference
said = []
for config in pickle.load(sys.stdin.buffer):
    config.critic.model = None  # as `built_settings` leaves it
    roles = {"use_reference_policy": needs_reference(config), "use_critic": needs_critic(config)}
    said.append(refused_quickly(config, **roles) is None)
left = [name for name in sys.modules if name.partition(".")[0] in ("verl", "torch", "transformers")]
left += [name for name in sys.modules if name == "verl_ext.workers.loss_config"]
print(json.dumps([said, left]))
"""


@pytest.fixture(scope="module")
def quick(compose):
    """The findings of all cases, and the modules left in sys.modules, from an interpreter without verl."""
    given = pickle.dumps([compose(*overrides) for overrides, _ in CASES])
    out = subprocess.check_output([sys.executable, "-c", CODE], input=given)
    return json.loads(out.splitlines()[-1])


def test_it_says_what_verl_says_and_leaves_nothing_behind(quick):
    assert quick == [[passes for _, passes in CASES], []]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("overrides", "passes"), CASES)
def test_what_verl_says(compose, overrides, passes):
    from verl.utils.config import validate_config

    config = compose(*overrides)
    config.critic.model = None
    roles = {"use_reference_policy": needs_reference(config), "use_critic": needs_critic(config)}
    try:
        validate_config(config, **roles)
    except Exception:
        assert not passes
    else:
        assert passes
    assert refused_quickly(config, **roles) is not None, "verl is imported here, and asked itself"


CRITIC, MODEL = "critic", "actor_rollout_ref.model"
RUN = [
    "actor_rollout_ref.rollout.name=vllm",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=1",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
    "algorithm.adv_estimator=grpo",
]
EVIL = """
import pathlib

def make(*args, **kwargs):
    pathlib.Path({mark!r}).touch()

class IcePopLossConfig:
    def __init__(self, **kwargs):
        make()

make()
"""


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that exists once code of the package `evil` has run; the package can be imported at any time."""
    mark = tmp_path / "executed"
    package = tmp_path / "site" / "evil"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(EVIL.format(mark=str(mark)))
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.delitem(sys.modules, "evil", raising=False)
    yield mark
    sys.modules.pop("evil", None)


@pytest.fixture
def doctor(models, capfd):
    """doctor(*arguments) -> the findings of the command line, by check."""

    def call(*arguments):
        main(["doctor", "--json", *RUN, f"{MODEL}.path={models}/fitting", *arguments])
        return by_check(json.loads(capfd.readouterr().out))

    return call


@pytest.fixture(scope="module")
def composed(compose, models):
    return compose(*RUN, "stability=icepop", f"{MODEL}.path={models}/fitting")


@pytest.fixture
def look(composed):
    """look({setting: value}, *checks, trust=False) -> the findings on a run with these settings, by check."""

    def call(settings, *checks, trust=False):
        context = Context({}, config=with_settings(copy.deepcopy(composed), settings), trust=trust)
        fit_presets(context)
        return by_check([vars(finding) for finding in run_checks(context, checks)])

    return call


def with_settings(config, settings):
    for key, value in settings.items():
        OmegaConf.update(config, key, value, force_add=True)
    return config


def by_check(findings):
    found = {}
    for finding in findings:
        found.setdefault(finding["check"], []).append(finding)
    return found


def test_plugins_are_imported_by_trust_alone(doctor, mark):
    arguments = ["stability=icepop", "stability.plugins=[evil]"]
    found = doctor(*arguments)
    assert not mark.exists()
    (note,) = found["code"]
    assert note["level"] == "note" and "stability.plugins=['evil']" in note["found"] and "--trust" in note["why"]
    assert not {"hooks", "verl's validation"} & set(found), "reported as not checked"
    assert "truncated sampling" in found, "the other checks are made"
    assert "hooks" in doctor(*arguments, "--trust")
    assert mark.exists()


def test_plan_imports_no_plugins(mark, capsys):
    arguments = ["plan", "recipe=qwen3_30b_a3b", "stability.plugins=[evil]"]
    assert main(arguments) == 2
    assert not mark.exists()
    error = capsys.readouterr().err
    assert error.startswith("verl-ext plan: stability.plugins=['evil'] would be imported; --trust") and "\n" in error
    main([*arguments, "--trust"])
    assert mark.exists()


# What hydra.utils.instantiate would call, in every place that verl's validation builds.
CALLS = [
    (LOSS, {LOSS: {"_target_": "evil.make"}}),
    (f"{LOSS}.x", {f"{LOSS}.x": {"_target_": "os.system", "command": "true"}}),
    (f"{ACTOR}.optim", {f"{ACTOR}.optim._target_": "evil.make"}),
    (f"{ACTOR}.optim.betas.1", {f"{ACTOR}.optim.betas": [0.9, {"_target_": "evil.make"}]}),
    (ACTOR, {f"{ACTOR}._target_": "${oc.env:EVIL}"}),
    (f"{ACTOR}.optim", {f"{ACTOR}.optim": "${data.evil}", "data.evil": {"_target_": "evil.make"}}),
    (f"{ACTOR}.x", {f"{ACTOR}.x": {"_target_": ["evil.make"]}}),
    (
        f"{ACTOR}.model_config",
        {f"{ACTOR}.model_config": {"_target_": "verl.workers.config.HFModelConfig", "external_lib": "evil"}},
    ),
    (CRITIC, {"algorithm.adv_estimator": "gae", f"{CRITIC}._target_": "evil.make"}),
]


@pytest.mark.parametrize(("place", "settings"), CALLS)
def test_every_target_but_a_settings_class_is_found(mark, monkeypatch, place, settings):
    monkeypatch.setenv("EVIL", "evil.make")
    built = built_settings(with_settings(OmegaConf.create({}), settings))
    assert [found for found, _ in unknown_targets(built)] == [place]
    assert not mark.exists()


@pytest.mark.parametrize(
    ("places", "settings"),
    [
        ([LOSS, f"{ACTOR}.optim"], {f"{LOSS}._target_": "evil.make", f"{ACTOR}.optim._target_": "${oc.env:EVIL}"}),
        ([f"{LOSS}.x"], {f"{LOSS}.x": {"_target_": "evil.make"}}),
        ([CRITIC], {"algorithm.adv_estimator": "gae", f"{CRITIC}._target_": "evil.make"}),
    ],
)
def test_no_target_but_a_settings_class_is_called(look, mark, monkeypatch, places, settings):
    monkeypatch.setenv("EVIL", "evil.make")
    found = look(settings, "code", "hooks", "verl's validation")
    assert not mark.exists()
    assert sorted(finding["found"].partition("._target_=")[0] for finding in found["code"]) == sorted(places)
    assert {finding["level"] for finding in found["code"]} == {"warning"}
    assert "verl's validation was not checked" in found["code"][0]["why"]
    unknown = found.get("verl's settings", ())  # a field that the class does not have
    assert all(each["level"] == "error" for each in unknown)


def test_with_trust_a_target_is_called_as_the_run_does(look, mark):
    look({f"{ACTOR}.optim._target_": "evil.make"}, "verl's validation", trust=True)
    assert mark.exists()


def test_a_critic_is_validated_without_its_model(look, mark):
    critic = {"algorithm.adv_estimator": "gae", f"{CRITIC}.model.external_lib": "evil"}
    critic |= {f"{CRITIC}.ppo_micro_batch_size_per_gpu": 1}
    found = look(critic)
    assert not mark.exists() and "code" not in found and found["verl's validation"][0]["level"] == "ok"
    found = look(critic | {f"{CRITIC}.ppo_micro_batch_size": 1}, "verl's validation")
    assert "[critic] You have set both" in found["verl's validation"][0]["found"], "the rest of it is looked at"


def test_what_only_a_run_uses_is_left_alone(look, mark):
    found = look(
        {
            f"{MODEL}.external_lib": "evil",
            f"{MODEL}.custom_chat_template": "{{ x.__class__ }}",
            "reward.custom_reward_function.path": "pkg://evil",
            "data.custom_cls.path": "pkg://evil",
            "hydra.callbacks.x._target_": "evil.make",
            "hydra.job_logging": {"handlers": {"x": {"()": "evil.make"}}},
        }
    )
    assert not mark.exists() and {finding["level"] for finding in found["hooks"]} == {"ok"}


@pytest.mark.parametrize("target", ["os.system", "evil.IcePopLossConfig", None])
def test_only_our_class_builds_the_settings_of_our_losses(look, mark, target):
    loss = {"_target_": target, "loss_mode": "icepop", "command": f"touch {mark}"}
    (error, *_) = look({"stability.correction": "none", LOSS: loss}, "hooks")["hooks"]
    assert not mark.exists()
    assert error["level"] == "error" and f"_target_={target} is another class; set {LOSS}._target_=" in error["found"]


PRIMARY = "hydra:\n  searchpath: [{entry}]\ndefaults: [ppo_trainer, _self_]\n"


@pytest.mark.parametrize("entry", ["pkg://evil", "pkg://evil/conf", "'${x}'"])
@pytest.mark.parametrize("command", ["doctor", "plan"])
def test_packages_of_the_search_path_are_not_imported(tmp_path, mark, capsys, command, entry):
    (tmp_path / "mine.yaml").write_text("x: pkg://evil\n" + PRIMARY.format(entry=entry))
    assert main([command, f"--config-path={tmp_path}", "--config-name=mine"])
    captured = capsys.readouterr()
    assert not mark.exists()
    assert "would be imported; --trust" in " ".join((captured.out + captured.err).replace("│", " ").split())


def test_packages_of_the_search_path_on_the_command_line(doctor, mark):
    found = doctor("hydra.searchpath=[pkg://verl.trainer.config,pkg://evil]")
    assert not mark.exists() and "hydra.searchpath=['pkg://evil'] would be imported" in found["config"][0]["found"]


@pytest.fixture
def model(tmp_path, mark, monkeypatch):
    """A model folder whose config has its own class, in a file next to it."""
    folder = tmp_path / "model"
    LlamaConfig(vocab_size=8).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (folder / "config.json").write_text(json.dumps(config))
    source = f"import pathlib\nfrom transformers import LlamaConfig\npathlib.Path({str(mark)!r}).touch()\n"
    source += "class EvilConfig(LlamaConfig):\n    model_type = 'evil'\n"
    (folder / "configuration_evil.py").write_text(source)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    return folder


def test_a_models_own_code_is_run_by_trust_alone(look, mark, model):
    settings = {f"{MODEL}.path": str(model), f"{MODEL}.trust_remote_code": True}
    found = look(settings)
    assert not mark.exists()
    (note,) = found["code"]
    assert note["level"] == "note" and "trust_remote_code=True" in note["found"] and "--trust" in note["why"]
    assert {finding["level"] for finding in found["hooks"]} == {"ok"}, "what needs no file of the model is checked"
    assert "model files" not in found and "vocabulary" not in found
    assert "code" not in look(settings, trust=True)
    assert mark.exists()


def test_trust_remote_code_without_such_code_changes_nothing(look):
    found = look({f"{MODEL}.trust_remote_code": True}, "code", "vocabulary")
    assert "code" not in found and found["vocabulary"][0]["level"] == "ok"


def test_a_model_that_may_not_run_its_own_code_is_an_error(look, mark, model):
    found = look({f"{MODEL}.path": str(model), "stability.router_agreement": True}, "hooks")
    assert not mark.exists()
    assert "its own code, which actor_rollout_ref.model.trust_remote_code=true allows" in found["hooks"][0]["found"]
    assert found["hooks"][0]["fix"] == ()


def test_a_model_with_layers_of_its_own_asks_no_question(look, mark, model, monkeypatch):
    """The config is the library's, but the model is not: transformers would ask in the terminal if its code may run."""
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    config = {"model_type": "vit", "num_experts": 8, "num_experts_per_tok": 2, "hidden_size": 8}
    config |= {"auto_map": {"AutoModelForCausalLM": "configuration_evil.EvilConfig"}}
    (model / "config.json").write_text(json.dumps(config))
    found = look({f"{MODEL}.path": str(model), "stability.router_agreement": True}, "hooks")
    assert not mark.exists()
    assert found["hooks"][0]["level"] == "error" and "cannot be built here" in found["hooks"][0]["found"]


def test_the_settings_classes_are_those_of_the_composed_configs(compose, composed):
    for config in (composed, compose("model_engine=megatron")):
        assert unknown_targets(built_settings(config)) == []
    assert not {name for name in settings_classes() if "HFModelConfig" in name or "Rollout" in name}


def test_what_a_config_says_is_printed_as_text(look, capsys):
    finding, *_ = look({"data.train_files": "\x1b]0;[bold]", "data.val_files": []}, "not here")["not here"]
    print_findings([Problem(**finding)])
    out = capsys.readouterr().out
    assert r"\x1b]0;[bold]" in out and "\x1b" not in out


@pytest.mark.parametrize("width", [30, 40, 60, 80, 120])
def test_findings_fit_any_terminal(monkeypatch, width):
    found = Problem("stability.icepop.alpha=6 must be below beta=5", "the run would stop", level="error", check="hooks")
    files = Problem("not on this machine: data.train_files=/a/folder/with/a/long/name/train.parquet", level="note")
    out = io.StringIO()
    monkeypatch.setattr("verl_ext.doctor.command.wide_console", lambda: Console(width=width, file=out))
    print_findings([files, replace(found, check="a check with a long name"), found])
    said = out.getvalue()
    assert max(map(len, said.splitlines())) <= width and said.index("error") < said.index("note")
    words = {*said.replace("\u2502", " ").split()}
    assert {*found.found.split(), *found.why.split(), *files.found.split()[:-1]} <= words, "no word is cut"


def test_an_interpolation_of_nothing_is_an_error(look, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    found = look({"stability.icepop.alpha": "${oc.env:NOT_SET}", "data.train_files": "${oc.env:NOT_SET}"})
    assert found["hooks"][0]["level"] == "error" and "NOT_SET" in found["hooks"][0]["found"]
    found = look({"actor_rollout_ref.rollout.calculate_log_probs": "${oc.env:NOT_SET}"}, "hooks")
    assert found["hooks"][0]["level"] == "error" and "NOT_SET" in found["hooks"][0]["found"]


def test_a_check_that_fails_takes_no_other_with_it(look):
    found = look({"actor_rollout_ref.rollout.max_model_len": "abc"}, "lengths", "truncated sampling")
    assert found["lengths"][0]["level"] == "error" and "ValueError" in found["lengths"][0]["found"]
    assert found["truncated sampling"][0]["level"] == "ok"


def test_what_a_config_says_is_printed_as_text_by_plan(capsys):
    assert main(["plan", "data.x=='\x1b]0;[bold]'"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "\x1b" not in error and r"\x1b]0;[bold]" in error


def test_no_text_of_the_config_is_offered_as_a_fix(look):
    rollout = "actor_rollout_ref.rollout"
    lengths = {f"{rollout}.{name}": "9; touch y" for name in ("max_model_len", "max_num_batched_tokens")}
    assert look(lengths | {f"{rollout}.enable_chunked_prefill": False}, "lengths")["lengths"][0]["fix"] == ()
    ours = {f"{ACTOR}.policy_loss._target_": TARGET, **{f"{ACTOR}.policy_loss.{name}": 1 for name in ("coef", "gate")}}
    (finding, *_) = look(ours | {f"{ACTOR}.policy_loss.loss_mode": "x; touch y"}, "hooks")["hooks"]
    assert "touch" in finding["found"] and finding["fix"] == (f"{ACTOR}.policy_loss.loss_mode=llds",)
    for setting in (f"{ACTOR}.fsdp_config.dtype", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype"):
        found = look({setting: "x; touch y"}, "training dtype", "dtype of both engines")
        assert found and not [check for check, findings in found.items() if "touch" in str(findings[0]["fix"])]


def test_a_setting_that_is_added_and_deleted(findings):
    node = "actor_rollout_ref.rollout.agent.mine"
    assert not findings("config", f"+{node}.a=1", f"~{node}")
