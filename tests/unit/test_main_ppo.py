"""The entry point's answer to wrong settings, and to errors from the run."""

import io
import json
import subprocess
import sys

import pytest
import ray.exceptions
from omegaconf import OmegaConf
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from verl_ext import start
from verl_ext.base.errors import ConfigError, GuardStopError

WRONG = {
    ("stability=icepop", "stability.icepop.alpha=6"): "verl_ext: error: stability.icepop.alpha=6 must be below beta=5",
    ("stability=icepopp",): "verl_ext: error: stability=icepopp is not known; choose one of",
    ("stability=icepop", "stability.guard.stop_afte=3"): "stability.guard.stop_afte is not known; similar names",
    ("stability=icepop", "trainer.totl_epochs=3"): "Could not override 'trainer.totl_epochs'",
    ("stability=icepop", "trainer.use_v1=false"): "trainer.use_v1=False has no hooks for stability.*",
    # The routers of the model would be looked at before the guard's rules.
    (
        *("stability=icepop", "stability.router_agreement=true"),
        "stability.guard.rules={r:{signal:vllm_kl/k3,above:1,action:rollback}}",
    ): "stability.guard.rules.r: action=rollback has no checkpoint to go back to",
}
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
