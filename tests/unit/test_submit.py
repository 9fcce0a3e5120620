"""The request sent to Ray's job API; a real head takes it in tests/stack/test_clusters.py."""

import json
import os
import shlex
import types

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from ray._private.utils import update_envs

from tests.support.examples import at_most
from verl_ext import submit
from verl_ext.base.errors import ConfigError
from verl_ext.cli import main


def job(*overrides, **options):
    return submit.build_job(overrides, **({"run_dir": "/shared/run"} | options))


def test_everything_the_run_writes_goes_to_its_folder():
    made = job("recipe=cpu_smoke", "data.prompt_key=a b")
    assert shlex.split(made.entrypoint)[:5] == [
        "python",
        "-m",
        "verl_ext.main_ppo",
        "recipe=cpu_smoke",
        "data.prompt_key=a b",
    ]
    assert "trainer.default_local_dir=/shared/run/checkpoints" in made.entrypoint
    assert "hydra.run.dir=/shared/run/hydra" in made.entrypoint
    assert made.runtime_env["env_vars"]["VERL_FILE_LOGGER_PATH"] == "/shared/run/metrics.jsonl"
    assert json.loads(made.metadata[submit.OVERRIDES]) == ["recipe=cpu_smoke", "data.prompt_key=a b"]
    assert "working_dir" not in made.runtime_env


@pytest.mark.parametrize("plus", ["", "+", "++"])
def test_what_the_user_sets_stands(plus):
    made = job(
        "hydra.run.dir=/x",
        f"{plus}trainer.default_local_dir=/elsewhere",
        f"{plus}ray_kwargs.ray_init.num_cpus=null",
        env=["VERL_FILE_LOGGER_PATH=/y"],
    )
    assert made.entrypoint.count("default_local_dir") == made.entrypoint.count("num_cpus") == 1
    assert "++ray_kwargs.ray_init.num_gpus=null" in made.entrypoint
    assert all(place in made.elsewhere for place in ("checkpoints to /elsewhere", "output to /x", "metrics to /y"))
    assert job("recipe=x").elsewhere == ""


def test_the_size_of_a_cluster_is_its_own():
    with pytest.raises(ConfigError, match=r"ray_init\.num_gpus=3 is refused by a running cluster"):
        job("++ray_kwargs.ray_init.num_gpus=3")


def test_a_folder_that_is_not_there_is_not_sent(tmp_path):
    with pytest.raises(ConfigError, match="gone does not exist"):
        job(working_dir=str(tmp_path / "gone"))
    assert job(working_dir="s3://bucket/code.zip").runtime_env["working_dir"] == "s3://bucket/code.zip"


def test_environment_is_given_or_taken_from_here(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    made = job(env=["VERL_PLATFORM=cpu", "WANDB_API_KEY", "A=b=c"])
    assert {"VERL_PLATFORM": "cpu", "WANDB_API_KEY": "secret", "A": "b=c"}.items() <= made.runtime_env[
        "env_vars"
    ].items()
    with pytest.raises(ConfigError, match="--env NOT_SET has no value on this machine"):
        job(env=["NOT_SET"])


def set_by_ray(value, variables):
    """Returns the value that Ray gives to a process on a node with these variables."""
    with pytest.MonkeyPatch.context() as patch:
        for name in variables:
            patch.setenv(name, "of the node")
        patch.setenv("SECRET", "before")
        update_envs({"SECRET": value})
        return os.environ["SECRET"]


def substrings(text):
    return {text[start:end] for start in range(len(text)) for end in range(start + 1, len(text) + 1)}


@given(st.text("$${}aA1_ -\\'é", max_size=8))
@example("pa$word")
@example("pa${WORD}")
@example("$$")
@example("pa$")
def test_a_variable_has_exactly_its_value_in_every_process_or_is_refused(value):
    """Any part of the value may be the name of a variable that the node has."""
    nodes = [(), tuple(substrings(value))]
    try:
        made = job(env=[f"SECRET={value}"])
    except ConfigError:
        assert any(set_by_ray(value, node) != value for node in nodes) or "${}" in value
    else:
        assert made.runtime_env["env_vars"]["SECRET"] == value
        assert all(set_by_ray(value, node) == value for node in nodes)


@pytest.mark.parametrize("item", ["HF_TOKEN=pa$word", "HF_TOKEN"])
def test_a_value_that_ray_would_change_is_refused_by_its_name_alone(command, capsys, monkeypatch, item):
    monkeypatch.setenv("HF_TOKEN", "pa${word}")
    assert command("run", "--run-dir", "/r", "--dry-run", "--env", item) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "--env HF_TOKEN" in captured.err
    assert "word" not in captured.out + captured.err


def test_packages_come_by_pip_or_in_an_image():
    assert job(pip=["verl-ext==0.1.0"]).runtime_env["pip"] == ["verl-ext==0.1.0"]
    assert job(image="registry/verl:1").runtime_env["image_uri"] == "registry/verl:1"
    assert job(working_dir=".").runtime_env["working_dir"] == "."
    with pytest.raises(ConfigError, match="exclude each other"):
        job(pip=["a"], image="b")


def test_a_relative_run_folder_is_refused():
    with pytest.raises(ConfigError, match="--run-dir=runs/1 must be an absolute path"):
        job(run_dir="runs/1")


ODD = "ab/=,.:;#~(){}[]\\'\" \tü-1"


ANY = st.characters(codec="utf-8", exclude_characters="$\0")


@given(st.text(st.sampled_from(ODD), max_size=12) | st.text(ANY, max_size=12))
@example("runs/lr=1e-6")
@example("a,b")
@example(" leading and trailing ")
@at_most(30)
def test_any_run_folder_passes_the_shell_and_hydra(name):
    made = job("a=1", run_dir=f"/{name}")
    parsed = [OverridesParser.create().parse_override(word) for word in shlex.split(made.entrypoint)[4:]]
    values = {one.key_or_group: OmegaConf.create({"value": one.value()}).value for one in parsed}
    folder = submit.PurePosixPath(f"/{name}")
    assert values["trainer.default_local_dir"] == str(folder / "checkpoints")
    assert values["hydra.run.dir"] == str(folder / "hydra")
    assert made.runtime_env["env_vars"]["VERL_FILE_LOGGER_PATH"] == str(folder / "metrics.jsonl")


@pytest.mark.parametrize("run_dir", ["/runs/${x}", "/runs/$USER", "/runs/\udcff"])
def test_a_run_folder_that_would_become_another_is_refused(run_dir):
    with pytest.raises(ConfigError, match=r"--run-dir=/runs/.* must "):
        job(run_dir=run_dir)


@pytest.fixture
def command(monkeypatch):
    monkeypatch.setenv("RAY_AUTH_MODE", "")  # what the command writes there is taken back with this
    monkeypatch.delenv("RAY_AUTH_MODE")
    return lambda *arguments: main(["submit", *arguments])


def test_dry_run_prints_the_job_and_needs_no_cluster(command, capsys):
    assert command("run", "--run-dir", "/r", "--dry-run", "recipe=cpu_smoke", "~trainer.project_name") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["entrypoint"].startswith("python -m verl_ext.main_ppo recipe=cpu_smoke '~trainer.project_name'")


def test_an_override_that_the_launch_would_refuse_is_refused_before_anything_is_printed(command, capsys):
    wrong = ("stabilty=moe", "trainer.nndes=3", "+trainer.nnodes=3", "~data.x", "stability.guard.foo=1")
    assert command("run", "--run-dir", "/r", "--dry-run", "recipe=cpu_smoke", "stability=moe", *wrong) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == len(wrong)
    assert "verl-ext submit: trainer.nndes is not a setting of this verl; similar: trainer.nnodes" in captured.err
    assert command("run", "--run-dir", "/r", "--dry-run", "recipe=cpu_smoke", "trainer.nnodes=[3") == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_plugin_may_be_only_on_the_nodes(command):
    plugin = "stability.plugins=[not_on_this_machine]"
    assert command("run", "--run-dir", "/r", "--dry-run", "recipe=cpu_smoke", "stability=icepop", plugin) == 0


def test_a_script_is_submitted_as_the_launch_that_it_has(command, capsys, tmp_path):
    (tmp_path / "run.sh").write_text("N=2\npython3 -m verl.trainer.main_ppo trainer.nnodes=$N data.seed=$SEED")
    given = ("run", "--run-dir", "/r", "--dry-run", str(tmp_path / "run.sh"), "stability=moe")
    assert command(*given) == 2 and "values that are not known here: $SEED" in capsys.readouterr().err
    assert command(*given, "data.seed=3") == 0
    entrypoint = json.loads(capsys.readouterr().out)["entrypoint"]
    assert entrypoint.startswith("python -m verl_ext.main_ppo trainer.nnodes=2 data.seed=3 stability=moe ")


def test_dry_run_hides_the_values_of_the_environment(command, capsys, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-1")
    assert command("run", "--run-dir", "/r", "--dry-run", "--env", "WANDB_API_KEY", "--env", "HF_TOKEN=secret-2") == 0
    captured = capsys.readouterr()
    variables = json.loads(captured.out)["runtime_env"]["env_vars"]
    assert variables["WANDB_API_KEY"] == variables["HF_TOKEN"] == "(hidden)"
    assert variables["VERL_FILE_LOGGER_PATH"] == "/r/metrics.jsonl"
    assert "secret" not in captured.out + captured.err


def test_what_is_remembered_of_a_job_has_no_values_of_the_environment():
    made = job("recipe=x", env=["HF_TOKEN=secret"])
    assert "secret" not in f"{made.metadata} {made.entrypoint} {made.elsewhere}"


@pytest.mark.parametrize("item", ["=secret", ""])
def test_a_variable_without_a_name_is_refused_and_not_repeated(command, capsys, item):
    assert command("run", "--run-dir", "/r", "--dry-run", "--env", item) == 2
    error = capsys.readouterr().err
    assert "--env needs a name" in error and "secret" not in error


def test_options_stand_anywhere_and_what_follows_the_dashes_passes(command, capsys):
    arguments = (
        "run",
        "recipe=cpu_smoke",
        "--dry-run",
        "+a=1",
        "--run-dir",
        "/d",
        "--detach",
        "+b=2",
        "--",
        "--cfg",
        "job",
    )
    assert command(*arguments) == 0
    words = shlex.split(json.loads(capsys.readouterr().out)["entrypoint"])[3:]
    assert words[:3] == ["recipe=cpu_smoke", "+a=1", "+b=2"]
    assert words[-2:] == ["--cfg", "job"], "Hydra takes no override behind a flag"


def test_an_option_that_is_not_there_is_refused(command, capsys):
    with pytest.raises(SystemExit) as exit:
        command("run", "--run-dir", "/d", "recipe=q", "--detatch")
    assert exit.value.code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "address",
    [
        "foo",
        "ray://head:10001",
        "head:8265",
        *(
            f"http://{place}"
            for place in ("[", "[::1", "host:port", "host:99999", "a b", "*", ":8265", "a..b", "/path")
        ),
        f"https://{'a' * 64}:8265",
        "https://127.0.0.1:-1",
    ],
)
def test_an_address_that_is_not_the_dashboards(command, capsys, address):
    assert command("status", "--address", address, "job") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and f"--address {address} is not" in error and "http://HOST:8265" in error


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--address", "http://127.0.0.1:9"),
        ("run", "--address", "http://127.0.0.1:9", "--run-dir", "/r", "recipe=cpu_smoke"),
        ("stop", "job", "--address", "http://127.0.0.1:9"),
    ],
)
def test_no_head_is_one_line_that_says_how_to_start_one(command, capsys, arguments):
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "no Ray head answers at http://127.0.0.1:9: start one with `ray start --head`" in error


class Client:
    """The jobs of a cluster, as Ray's client reports them."""

    def __init__(self, **statuses):
        self.jobs = {
            name: types.SimpleNamespace(
                submission_id=name,
                status=status,
                start_time=1000 * index,
                end_time=61000 + 1000 * index,
                metadata={submit.RUN_DIR: f"/runs/{name}"} if name != "foreign" else None,
                entrypoint="python -m verl_ext.main_ppo",
                runtime_env={"working_dir": "gcs://package.zip"},
                driver_exit_code=3 if status == "FAILED" else None,
                message="first\nsecond",
            )
            for index, (name, status) in enumerate(statuses.items())
        }
        self.submitted = []

    def list_jobs(self):
        return list(self.jobs.values())

    def get_job_info(self, job_id):
        return self.jobs[job_id]

    def get_job_logs(self, job_id):
        return f"log of {job_id}\n"

    async def tail_job_logs(self, job_id):
        yield f"log of {job_id}\n"

    def stop_job(self, job_id):
        self.jobs[job_id].status = "STOPPED"

    def submit_job(self, **job):
        self.submitted.append(job)
        return "done"


@pytest.fixture
def client(monkeypatch):
    made = Client(old="SUCCEEDED", done="SUCCEEDED", failed="FAILED", running="RUNNING", foreign="RUNNING")
    monkeypatch.setattr(submit, "connect", lambda address: made)
    return made


def test_status_lists_our_runs_the_newest_first(client, command, capsys):
    assert [row[0] for row in submit.rows(client)] == ["running", "failed", "done", "old"]
    assert submit.rows(client)[0][3:] == ("1.0", "/runs/running")
    assert command("status") == 0
    assert "/runs/failed" in capsys.readouterr().out
    assert command("status", "nothing") == 2
    assert "there is no run nothing" in capsys.readouterr().err


def test_status_shows_what_others_wrote_as_it_is(client, command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    folder = "/runs/[/exp]/[math]/:smile:/\x1b[31m\x9b2J\u202e"
    client.jobs["failed"].metadata[submit.RUN_DIR] = folder
    client.jobs["failed"].message = "\x1b[2Jgone [bold]\nsecond\x07"
    assert command("status", "failed") == 0
    out = capsys.readouterr().out
    assert r"/runs/[/exp]/[math]/:smile:/\x1b[31m\x9b2J\u202e" in out
    assert r"\x1b[2Jgone [bold]" + "\n" + r"second\x07" + "\n" in out
    assert command("logs", "failed", "--follow") == 3
    assert r"failed FAILED: \x1b[2Jgone [bold]" in capsys.readouterr().err


def test_following_ends_with_the_drivers_exit_code(client, command, capsys):
    assert command("logs", "failed", "--follow") == 3
    captured = capsys.readouterr()
    assert captured.out == "log of failed\n"
    assert "failed FAILED: first" in captured.err
    assert command("logs", "done", "--follow") == 0


def test_stop_waits_for_the_end(client, command, capsys):
    assert command("stop", "running") == 0
    assert "running STOPPED" in capsys.readouterr().err


def test_resume_submits_the_same_job_again(client, command, capsys):
    assert command("resume", "failed") == 0
    (again,) = client.submitted
    assert again["entrypoint"] == client.jobs["failed"].entrypoint
    assert again["runtime_env"] == client.jobs["failed"].runtime_env
    assert again["metadata"] == {submit.RUN_DIR: "/runs/failed"}
    assert command("resume", "running") == 2
    assert "running is RUNNING; stop it first" in capsys.readouterr().err
    assert command("resume", "foreign") == 2


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["resume", "--help"]])
def test_help(command, capsys, arguments):
    with pytest.raises(SystemExit) as exit:
        command(*arguments)
    assert exit.value.code == 0
