"""The entry point's answer to wrong settings, and to errors from the run."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import ray.exceptions
from omegaconf import OmegaConf
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from tests import ROOT
from verl_ext import start
from verl_ext.base import changes
from verl_ext.base.errors import ConfigError, GuardStopError
from verl_ext.launch.packages import package_folder

WRONG = {
    ("stability=icepop", "stability.icepop.alpha=6"): "verl_ext: error: stability.icepop.alpha=6 must be below beta=5",
    ("stability=icepopp",): "verl_ext: error: stability=icepopp is not known; similar: icepop",
    ("stability=icepop", "stability.guard.stop_afte=3"): "stability.guard.stop_afte is not known; similar names",
    ("stability=icepop", "trainer.totl_epochs=3"): (
        "verl_ext: error: trainer.totl_epochs is not a setting of this verl; similar: trainer.total_epochs"
    ),
    ("stabilty=moe",): "verl_ext: error: stabilty is not a setting of this verl; similar: stability",
    ("--stability=moe",): "verl_ext: error: --stability=moe has dashes, and an override has none; write stability=moe",
    ("algorithm.adv_estimator=grop", "trainer.logger=[wanbd]"): (
        "verl_ext: error: algorithm.adv_estimator=grop is not known; similar: grpo; set algorithm.adv_estimator=grpo\n"
        "verl_ext: error: trainer.logger=wanbd is not known; similar: wandb"
    ),
    ("stability=icepop", "trainer.use_v1=false"): "trainer.use_v1=False has no hooks for stability.*",
    ("recipe=cpu_smok",): "verl_ext: error: recipe=cpu_smok is not known; similar: cpu_smoke",
    ("reward_model.reward_manager=dapo", "max_turns=2"): "max_turns is not a setting of this verl; leave it out",
    ("data.val_files=no.parquet",): "verl_ext: error: data.val_files=no.parquet does not exist",
    # The routers of the model would be looked at before the guard's rules.
    (
        *("stability=icepop", "stability.router_agreement=true"),
        "stability.guard.rules={r:{signal:vllm_kl/k3,above:1,action:rollback}}",
    ): "stability.guard.rules.r: action=rollback has no checkpoint to go back to",
}
NO_FILES = (
    *("data.train_files=[]", "data.val_files=[]", "reward.custom_reward_function.path=null"),
    *("trainer.v1.sampler.custom_sampler.path=null", "actor_rollout_ref.model.path=a/b"),
)
LAUNCHES = """
import contextlib, io, json, runpy, sys
found = []
for arguments in json.loads(sys.argv[1]):
    sys.argv[1:] = arguments
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.suppress(SystemExit):
        runpy.run_module("verl_ext.main_ppo", run_name="__main__", alter_sys=True)
    found.append([said.getvalue(), sorted({"torch", "transformers", "ray", "verl", "vllm"} & {*sys.modules})])
print(json.dumps(found))
"""


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(ray, "shutdown", lambda: None)


def test_a_wrong_setting_is_reported_before_verl_ray_and_torch_are_imported(tmp_path):
    """All cases share one new interpreter, because `fresh_python` has imported these libraries already."""
    launches = json.dumps([["recipe=cpu_smoke", *overrides] for overrides in WRONG])
    out = subprocess.check_output([sys.executable, "-c", LAUNCHES, launches], cwd=tmp_path, text=True)
    for message, (said, imported) in zip(WRONG.values(), json.loads(out.splitlines()[-1]), strict=True):
        assert message in said and imported == []


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """The folder of a verl of another version, of which a launch may only read the config."""
    folder = tmp_path_factory.mktemp("checkout")
    verl = package_folder("verl")
    shutil.copytree(verl / "trainer" / "config", folder / "verl" / "trainer" / "config")
    for name, text in {
        "__init__.py": "raise ImportError('verl was imported')",
        "version/version": "0.10.0.dev",
    }.items():
        (folder / "verl" / name).parent.mkdir(exist_ok=True)
        (folder / "verl" / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("overrides", "refused", "unfit"),
    [
        (["stability=icepop"], True, False),
        (["stability=icepop", "stability.any_version=true"], False, True),
        (["algorithm.adv_estimator=qae"], True, False),
        ([], False, False),  # verl's own
    ],
    ids=["a feature", "at one's own risk", "an estimator of ours", "no feature"],
)
def test_another_verl_is_refused_before_it_is_imported(checkout, tmp_path, overrides, refused, unfit):
    command = [sys.executable, "-m", "verl_ext.main_ppo", "recipe=cpu_smoke", *NO_FILES, *overrides]
    environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{ROOT}", "HYDRA_FULL_ERROR": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    if refused:
        (line,) = done.stderr.splitlines()
        assert all(name in line for name in ("verl 0.10.0.dev", "install verl==0.9.1", "stability.any_version=true"))
    else:
        assert "verl was imported" in done.stderr
    named = {line.split()[1] for line in done.stdout.splitlines() if " does not fit verl 0.10.0.dev: " in line}
    assert ({"stability_trainers", "the"} <= named) is unfit


def test_every_hook_that_was_written_for_another_engine_is_named_and_the_launch_continues(compose, monkeypatch, capsys):
    others = {"vllm": "0.33.0"}
    monkeypatch.setattr(start, "unsupported", lambda config: others)
    start.check_versions(compose("stability=none"))
    config = compose("stability=icepop", "actor_rollout_ref.rollout.name=vllm")
    with pytest.raises(ConfigError, match=r"^this run would import vllm 0\.33\.0, .*; install vllm>=0\.24,<0\.32 "):
        start.check_versions(config)
    assert capsys.readouterr().out == ""
    OmegaConf.update(config, "stability.any_version", True)
    start.check_versions(config)
    first, *lines = capsys.readouterr().out.splitlines()
    assert "vllm 0.33.0" in first and {line.split()[1] for line in lines} == {
        change.name for change in changes.TABLE if "vllm" in change.versions
    }


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a b"), 1), (GuardStopError("a b"), start.STOPPED)])
def test_an_error_of_the_users_in_a_worker_is_one_line_too(error, code, monkeypatch, capsys):
    def fail(*_):
        raise ray.exceptions.RayTaskError("TaskRunner.run", "its traceback", error).as_instanceof_cause()

    monkeypatch.setattr(start, "run", fail)
    with pytest.raises(SystemExit) as exit:
        start.run_or_stop(OmegaConf.create(), start.stability_task_runner)
    assert exit.value.code == code
    assert capsys.readouterr().err == "verl_ext: error: a b\n"


def test_another_error_of_a_worker_stays_what_it_is(monkeypatch):
    def fail(*_):
        raise ray.exceptions.RayTaskError("TaskRunner.run", "its traceback", KeyError("x")).as_instanceof_cause()

    monkeypatch.setattr(start, "run", fail)
    with pytest.raises(KeyError):
        start.run_or_stop(OmegaConf.create(), start.stability_task_runner)


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a\nb"), 1), (GuardStopError("a b"), start.STOPPED)])
def test_an_error_of_the_users_is_one_line_and_a_stop_has_its_own_exit_code(error, code, capsys):
    with pytest.raises(SystemExit) as exit:
        start.stop(error)
    assert exit.value.code == code
    assert capsys.readouterr().err == "verl_ext: error: a b\n"


def test_what_verl_refuses_is_one_line_without_a_class_name(compose, monkeypatch):
    config = compose("recipe=cpu_smoke", "data.train_batch_size=3")
    with pytest.raises(ConfigError) as refused:
        start._validate(config)
    assert "train_batch_size" in str(refused.value) and "Error" not in str(refused.value)


def test_who_died_is_said_without_the_rest_of_rays_message():
    context = ActorDiedErrorContext(
        class_name="create_colocated_worker_cls.<locals>.WorkerDict",
        actor_id=b"0" * 16,
        pid=123,
        name="abcWorkerDict_0:0",
        node_ip_address="10.0.0.7",
        error_message="The actor is dead. Worker exit detail: End of file. Some common causes include: (1)",
    )
    said = start._who_died(str(ray.exceptions.ActorDiedError(context)))
    cause = "The actor is dead. Worker exit detail: End of file"
    assert said == f"name abcWorkerDict_0:0, pid 123, ip 10.0.0.7 ({cause})"
    assert start._who_died(str(ray.exceptions.ActorDiedError())) == (
        "The actor died unexpectedly before finishing this task"
    )


def test_a_line_of_the_console_goes_out_at_once_into_a_file_too(monkeypatch, tmp_path):
    """Python buffers 8 KB, and a run that hangs prints less than that."""
    file = tmp_path / "console.log"
    with file.open("wb") as written, io.TextIOWrapper(written) as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        monkeypatch.setattr(sys, "argv", ["main_ppo"])
        seen = []
        start.start(lambda: (print("step 5 has been running for 10 s"), seen.append(file.read_text())))
        monkeypatch.undo()
    assert seen == ["step 5 has been running for 10 s\n"]
