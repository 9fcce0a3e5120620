"""The subcommand: what it prints, and its exit codes."""

import json
import os
import re
import sys

import pytest

from tests.unit.doctor.test_installation import CPU_RECIPES
from verl_ext.base.errors import Problem
from verl_ext.cli import main
from verl_ext.doctor.checks import LEVELS, fixes
from verl_ext.doctor.command import how_to_apply
from verl_ext.doctor.diagnose import diagnose
from verl_ext.launch.gpus import named
from verl_ext.launch.packages import has_module

ROLLOUT = "actor_rollout_ref.rollout"
RUN = [
    f"{ROLLOUT}.name=vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    f"{ROLLOUT}.n=8",
    "algorithm.adv_estimator=grpo",
    "stability=icepop",
    "trainer.device=cpu",  # a run for this machine, whatever its packages for GPUs are
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
]


@pytest.fixture
def doctor(models, capfd, monkeypatch, tmp_path):
    """doctor(*arguments) -> (exit code, stdout) on a complete run, whatever plugins the environment leaves out.

    Standard error is `doctor.stderr`.
    """
    (data := tmp_path / "data.parquet").touch()
    here = [f"actor_rollout_ref.model.path={models}/fitting", f"data.train_files={data}", f"data.val_files=[{data}]"]
    for variable in ("VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)

    def call(*arguments):
        code = main(["doctor", *RUN, *here, *arguments])
        captured = capfd.readouterr()
        call.stderr = captured.err
        return code, captured.out

    return call


def test_a_run_that_is_as_it_should_be(doctor):
    code, out = doctor("--strict")
    assert code == 0
    assert "correction: icepop" in out and "error: 0, warning: 0" in out
    assert "fixes findings" not in out


def test_code_of_the_current_folder_is_found_with_trust_as_the_run_finds_it(doctor, tmp_path, monkeypatch):
    (tmp_path / "my_optim.py").write_text("from verl.workers.config import FSDPOptimizerConfig as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    target = "actor_rollout_ref.actor.optim._target_=my_optim.Mine"
    _, out = doctor(target, "--trust", "--json")
    assert [each["level"] for each in json.loads(out) if each["check"] == "verl's validation"] == ["ok"]


def test_what_the_fixes_leave_is_named(doctor):
    _, out = doctor("stability.icepop.alpha=6", "+actor_rollout_ref.actor.no_such=true", "trainer.logger=[wanbd]")
    fixes, _, left = out.partition("fixes findings")[2].partition("errors that are left: 2")
    assert "delete from the launch: actor_rollout_ref.actor.no_such\n" in fixes and "~" not in fixes
    assert "stability.icepop.alpha" in left and "wanbd" in left and "no_such" not in left


@pytest.mark.parametrize("recipe", CPU_RECIPES)
def test_a_recipe_for_cpus_has_no_error(models, monkeypatch, recipe):
    for variable in ("VERL_USE_EXTERNAL_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    for engine, module in {"megatron": "megatron.bridge", "sglang": "sglang", "veomni": "veomni"}.items():
        if engine in recipe and not has_module(module):
            pytest.skip(f"bash tools/setup_cpu.sh {engine}")
    model = f"actor_rollout_ref.model.path={models}/moe"
    found = diagnose([f"recipe={recipe}", model, "stability=moe"], None)
    assert [finding for finding in found if finding.level == "error" and finding.check != "files"] == [], (
        "no data is made"
    )


def of(doctor, text, *overrides):
    """Returns (check, level, fix) of the findings that have this text."""
    found = json.loads(doctor("--json", *overrides)[1])
    return [(each["check"], each["level"], each["fix"]) for each in found if text in each["found"]]


WARM_UP = "actor_rollout_ref.actor.optim.lr_warmup_steps"


@pytest.mark.parametrize(
    ("overrides", "text", "check", "level", "fix"),
    [
        # told once, by the run's own check
        (f"{ROLLOUT}.top_p=0.9", "top_p=0.9", "hooks", "error", [f"{ROLLOUT}.top_k=512"]),
        # without a feature too
        (
            f"model_engine=megatron trainer.total_training_steps=10 {WARM_UP}=10",
            WARM_UP,
            "hooks",
            "error",
            [f"{WARM_UP}=0"],
        ),
        # a variable that may not be set
        ("trainer.experiment_name=", "trainer.experiment_name=", "config", "warning", []),
        # a field that a worker's class does not take
        (f"+{ROLLOUT}.no_such=5", f"{ROLLOUT}.no_such", "verl's settings", "error", [f"~{ROLLOUT}.no_such"]),
        (
            "+actor_rollout_ref.model.no_such=1",
            "model.no_such",
            "verl's settings",
            "error",
            ["~actor_rollout_ref.model.no_such"],
        ),
    ],
)
def test_one_finding_and_its_fix(doctor, overrides, text, check, level, fix):
    assert of(doctor, text, *overrides.split()) == [(check, level, fix)]


def test_a_warning_is_an_error_when_strict(doctor):
    assert doctor(f"{ROLLOUT}.temperature=0.7")[0] == 0
    assert doctor(f"{ROLLOUT}.temperature=0.7", "--strict")[0] == 1


def test_an_error_is_told_with_its_fix(doctor):
    code, out = doctor("trainer.use_v1=False")
    assert code == 1
    assert "   trainer.use_v1=True\n" in out


def test_what_fix_prints_makes_the_findings_go_away(doctor):
    wrong = [f"{ROLLOUT}.temperature=0.7", f"{ROLLOUT}.dtype=float16"]
    wrong += [f"{ROLLOUT}.enable_chunked_prefill=false", f"{ROLLOUT}.max_num_batched_tokens=512"]
    code, out = doctor("--fix", *wrong)
    assert code == 1
    lines = out.splitlines()
    assert sorted(lines) == [
        f"{ROLLOUT}.dtype=bfloat16",
        f"{ROLLOUT}.max_num_batched_tokens=1024",
        "stability.float32_head=true",
    ]
    assert doctor("--strict", "--fix", *wrong, *lines) == (0, "")


def test_fix_sets_a_setting_that_is_missing(doctor):
    """Only a fix that switches something off has nothing to do where the setting is missing."""
    missing = ("stability.correction=none", "actor_rollout_ref.actor.policy_loss.loss_mode=opsm")
    code, out = doctor("--fix", *missing)
    assert (code, out) == (1, "actor_rollout_ref.actor.policy_loss.delta=0.1\n"), doctor.stderr
    assert doctor("--fix", *missing, out.strip())[0] == 0, doctor.stderr


@pytest.mark.parametrize(
    ("given", "fixes", "told"),
    [
        ("trainer.nodes=2", ["~trainer.nodes", "trainer.nnodes=2"], "instead of adding ~: trainer.nodes"),
        ("+trainer.mine=5", ["~trainer.mine"], None),  # which verl.trainer.main_ppo takes back too
        ("stability=icepop trainer.nodes=2", ["~trainer.nodes", "trainer.nnodes=2"], None),  # verl_ext.main_ppo's
        ("stabilty=moe", ["~stabilty", "stability=moe"], "need python -m verl_ext.main_ppo"),
        ("trainer.nnodes=0", ["trainer.nnodes=1"], None),
    ],
)
def test_what_verls_own_entry_point_does_not_take_is_told(given, fixes, told):
    said = [*how_to_apply(fixes, given.split())]
    assert len(said) == bool(told) and all(told in one for one in said)


@pytest.mark.parametrize("sign", ["", "+"])
def test_fix_moves_an_old_overlong_buffer_whole(doctor, sign):
    """verl's reward manager dapo reads `log` and `max_resp_len` without a default."""
    old, new = f"{sign}reward_model.overlong_buffer", "++reward.reward_kwargs.overlong_buffer_cfg"
    given = ("reward.reward_manager.name=dapo", f"{old}.enable=True", f"{old}.len=64")
    _, out = doctor("--fix", *given)
    needed = {f"{new}.{one}" for one in ("enable=True", "len=64", "log=False", "penalty_factor=1.0")}
    assert needed | {"++reward.reward_kwargs.max_resp_len=512"} <= {*out.split()}
    assert "must be set" not in doctor.stderr


def test_fix_tells_on_stderr_what_no_override_fixes(doctor):
    code, out = doctor("--fix", "stability.icepop.alpha=6")
    assert (code, out) == (1, "")
    assert doctor.stderr.startswith("verl-ext doctor: error, hooks: ") and "stability.icepop.alpha=6" in doctor.stderr


def test_fix_names_a_warning_that_it_has_no_fix_for(doctor):
    """`hybrid_engine=False` in a synchronous run: the user has to choose GPUs for the rollout."""
    code, out = doctor("--fix", "actor_rollout_ref.hybrid_engine=False")
    assert (code, out) == (0, "")
    (line,) = doctor.stderr.splitlines()
    assert line.startswith("verl-ext doctor: warning, rollout placement: ") and "hybrid_engine" in line


def test_nothing_of_verls_own_is_printed_beside_the_findings(doctor):
    doctor()
    assert "UserWarning" not in doctor.stderr and "[validate_config]" not in doctor.stderr


def test_nothing_is_fetched(doctor, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    doctor()
    assert os.environ["HF_HUB_OFFLINE"] == "1"


def test_a_long_value_is_told_whole(doctor):
    path = "/no/such/" + "x" * 150
    _, out = doctor(f"data.train_files={path}")
    assert "…" not in out and "x" * 150 in "".join(re.findall(r"[\w/]+", out.partition("train_files=")[2]))


def test_json_is_all_findings(doctor):
    code, out = doctor("--json", f"{ROLLOUT}.temperature=0.7")
    found = json.loads(out)
    assert code == 0
    assert {finding["level"] for finding in found} <= set(LEVELS)
    (temperature,) = [finding for finding in found if finding["check"] == "temperature"]
    assert temperature["level"] == "warning" and temperature["fix"] == ["stability.float32_head=true"]
    assert temperature["cause"] == "temperature"
    assert not any(finding["cause"] for finding in found if finding["level"] == "ok")


def test_a_finding_is_named_as_a_report_names_its_cause(doctor):
    _, out = doctor(f"{ROLLOUT}.temperature=0.7")
    assert "cause: The engines apply different temperatures" in " ".join(out.replace("│", "").split())


def test_overrides_may_stand_on_both_sides_of_a_flag(doctor):
    code, out = doctor(f"{ROLLOUT}.temperature=0.7", "--fix", f"{ROLLOUT}.temperature=1")
    assert (code, out) == (0, "")


@pytest.mark.parametrize("override", ["stability=nothing", "no.such.setting=1", "actor_rollout_ref.rollout"])
def test_overrides_that_do_not_compose_are_an_error(override, capsys):
    assert main(["doctor", "--json", override]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {finding["check"] for finding in found if finding["level"] == "error"} == {"config"}
    assert "packages" in {finding["check"] for finding in found}


@pytest.mark.parametrize("arguments", [["--gpu", "abacus"], ["--no-such-flag"], ["--fix", "--json"]])
def test_wrong_usage(arguments):
    with pytest.raises(SystemExit) as exit:
        main(["doctor", *arguments])
    assert exit.value.code == 2


def test_help_explains_levels_and_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    out = capsys.readouterr().out
    assert all(level in out for level in LEVELS) and "exit code" in out and "examples:" in out


@pytest.mark.parametrize(
    ("name", "capability"),
    [("a100", (8, 0)), ("NVIDIA A100-SXM4-80GB", (8, 0)), ("H200", (9, 0)), ("NVIDIA L20", (8, 9)), ("abacus", None)],
)
def test_a_gpu_by_its_name(name, capability):
    gpu = named(name)
    assert (gpu and gpu.capability) == capability


def test_of_two_fixes_that_of_the_worse_finding_is_printed():
    found = [Problem("w", fix=("a.b=1",), level="warning"), Problem("e", fix=("++a.b=2", "c.d=3"))]
    assert list(fixes(found)) == ["++a.b=2", "c.d=3"]


SEARCH_R1 = [
    f"{ROLLOUT}.n_val=5",
    "+trainer.val_before_train=true",
    "max_turns=2",
    "actor_rollout_ref.actor.fsdp_config.grad_offload=true",
    "critic.model.fsdp_config.param_offload=true",
    "critic.model.fsdp_config.grad_offload=true",
    "reward_model.rm_coef=5",
]


def test_all_settings_of_an_older_verl_are_told_at_once(doctor):
    code, out = doctor("--json", *SEARCH_R1, f"{ROLLOUT}.temperature=0.7")
    found = json.loads(out)
    errors = [each for each in found if each["check"] == "config"]
    fixes = {fix for each in errors for fix in each["fix"]}
    taken_back = {f"~{override.partition('=')[0]}" for override in SEARCH_R1 if override[0] not in "+m"}
    assert code == 1 and fixes == {f"++{ROLLOUT}.val_kwargs.n=5", "++critic.fsdp.param_offload=True", *taken_back}
    (gone,) = [each["found"] for each in errors if "max_turns" in each["found"]]
    assert (
        "reward_model.rm_coef" in gone
        and "actor.fsdp_config.grad_offload" in gone
        and "critic.model.fsdp_config.grad_offload" in gone
    )
    assert any("val_before_train is in the config already" in each["found"] for each in errors)
    assert any(each["check"] == "temperature" for each in found), "the rest of the launch is checked too"


def test_a_new_place_that_the_launch_sets_itself_keeps_its_value(doctor):
    _, out = doctor("--json", f"{ROLLOUT}.n_agent=5", f"{ROLLOUT}.n=3")
    assert not [fix for each in json.loads(out) if each["check"] == "config" for fix in each["fix"]]


def test_a_value_that_hydra_cannot_read_is_told_with_its_setting(doctor):
    _, out = doctor("--json", "trainer.default_local_dir=A=/b")
    (config,) = [each for each in json.loads(out) if each["check"] == "config"]
    assert "trainer.default_local_dir=A=/b" in config["found"] and "quotes" in config["why"]


def test_a_fix_takes_a_field_only_from_where_it_is(doctor):
    """The critic's settings are of the same class as the actor's."""
    _, out = doctor("--fix", "+actor_rollout_ref.actor.fsdp_config.no_such=true")
    assert out.splitlines() == ["~actor_rollout_ref.actor.fsdp_config.no_such"]


def test_an_old_setting_of_a_class_moves_to_its_new_place(doctor):
    _, out = doctor("--fix", f"+{ROLLOUT}.val_temperature=0.5")
    assert set(out.splitlines()) == {f"~{ROLLOUT}.val_temperature", f"++{ROLLOUT}.val_kwargs.temperature=0.5"}


def test_a_model_on_the_machine_of_the_run_is_no_error_here(doctor):
    path, away = "actor_rollout_ref.model.path=/nowhere/here", ("--gpu", "H100", "trainer.device=cuda")
    for overrides in ([], ["actor_rollout_ref.model.tokenizer_path=/nowhere"]):
        _, out = doctor("--json", *away, path, *overrides)
        assert not [each for each in json.loads(out) if each["level"] == "error" and "nowhere" in each["found"]]
        assert [each for each in json.loads(out) if each["check"] == "hooks" and each["level"] == "ok"]
    _, out = doctor("--json", path)
    assert [each for each in json.loads(out) if each["level"] == "error" and "/nowhere/here" in each["found"]]


def test_padding_of_the_last_mini_batch_is_a_note(doctor):
    actor = "actor_rollout_ref.actor"
    sizes = ["data.train_batch_size=100", f"{actor}.ppo_mini_batch_size=64", f"{actor}.use_dynamic_bsz=true"]
    sizes.append(f"{actor}.loss_agg_mode=token-mean")
    assert [level for _, level, _ in of(doctor, "ppo_mini_batch_size=64", *sizes) if level != "ok"] == ["note"]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("~trainer.no_such", "~trainer.no_such: nothing to delete"),
        ("hydra.run.dir=/tmp/x", ""),  # Hydra's own, and right
        (f"{ROLLOUT}.n_val=null", f"{ROLLOUT}.n_val is not a setting"),
    ],
)
def test_what_hydra_refuses_beside_another_setting(doctor, override, said):
    _, out = doctor("--json", override, "max_turns=2")
    found = [each for each in json.loads(out) if each["check"] == "config"]
    told = {each["found"].partition(" of this verl")[0] for each in found}
    assert told == {*filter(None, [said]), "max_turns is not a setting"}
    assert not any(each["fix"] for each in found), "no value is moved: null is none"


def test_a_setting_whose_value_is_not_known_is_not_judged_by_its_default(capsys, tmp_path):
    script = tmp_path / "run.sh"
    text = f"python3 -m verl.trainer.main_ppo {' '.join(RUN[:5])} data.train_files=$(f) data.train_batch_size=$(g)"
    script.write_text(f"{text} actor_rollout_ref.actor.ppo_mini_batch_size=2048")
    main(["doctor", "--gpu", "H100", "--json", str(script)])
    found = json.loads(capsys.readouterr().out)
    assert not any("data.train_files" in one["found"] for one in found)
    assert {one["level"] for one in found if "train_batch_size" in one["found"]} == {"note"}
    assert not any("train_batch_size" in one for row in found for one in row["fix"])


def test_another_entry_point_is_judged_as_far_as_verls_configs_tell(capsys):
    def look(entry, *settings):
        main(["doctor", "--gpu", "H100", "--json", "--", "python3", "-m", entry, *here, *settings])
        return json.loads(capsys.readouterr().out)

    here = [*RUN[:5], "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "data.train_batch_size=0"]
    found = look(
        "mine.train", "--config-name=mine", "mine.tools.a=1", "+mine.b.c=1", "trainer.mine.b=1", "trainer.no_such=1"
    )
    (note,) = (one["found"] for one in found if "of its own" in one["found"])
    assert note.endswith(": mine, trainer.mine") and "mine.train is not" in next(
        one["found"] for one in found if one["check"] == "config"
    )
    assert [one["check"] for one in found if one["level"] == "error"] == ["config"]
    verls = look("verl.experimental.fully_async_policy.fully_async_main", "async_training.require_batches=2")
    assert not any(one["level"] == "error" or "of its own" in one["found"] for one in verls)
    sizeless = look(
        "mine.train", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=null"
    )
    (missing,) = (one for one in sizeless if "ppo_micro_batch" in one["found"] and one["level"] != "note")
    assert (missing["check"], missing["level"], missing["fix"]) == ("sizes", "warning", [])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-m verl.trainer.main_ppo actor_rollout_ref.actor.policy_loss=gspo", "policy_loss=gspo replaces"),
        ("-m verl.trainer.main_ppo data.train_files=/data/folder", "data.train_files=/data/folder"),
        ("-m verl.trainer.main_ppo_sync actor_rollout_ref.model.path=a/b", "no module verl.trainer.main_ppo_sync"),
    ],
)
def test_what_no_run_of_verl_can_do_is_an_error(capsys, words, said):
    main(["doctor", "--gpu", "H100", "--json", "--", "python3", *words.split(), *RUN[:5]])
    errors = [one["found"] for one in json.loads(capsys.readouterr().out) if one["level"] == "error"]
    assert any(said in one for one in errors)


def test_a_setting_that_nothing_reads_is_named_although_its_value_is_not_known(capsys, tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {' '.join(RUN[:5])} custom_reward_function.path=$(f)")
    main(["doctor", "--gpu", "H100", "--json", str(script)])
    found = {one["check"]: one for one in json.loads(capsys.readouterr().out)}["old reward settings"]
    assert found["level"] == "warning" and "custom_reward_function.path" in found["found"] and not found["fix"]
