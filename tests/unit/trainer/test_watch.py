"""The watch on the rollout's actors, with Ray's own actors in a local Ray; and the report of a slow step."""

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf

from tests.stack.own_manager import OwnManager
from verl_ext.base.errors import WorkerDiedError
from verl_ext.trainer import watch
from verl_ext.trainer.watch import SlowStep, Watch


class Engine:
    errored = False


class Strange:
    @property
    def errored(self):
        raise RuntimeError("of another vLLM")


@ray.remote(num_cpus=0)
class Server:
    def __init__(self):
        self.engine = Engine()

    def break_engine(self):
        self.engine.errored = True

    def change_engine(self):
        self.engine = Strange()

    def busy(self, seconds):
        time.sleep(seconds)


def slept(seconds):
    for _ in range(10 * seconds):
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        # Ray chooses the mode itself, then its own cache agrees; what it writes to the environment goes with the test.
        patch.setenv("RAY_AUTH_MODE", "")
        patch.delenv("RAY_AUTH_MODE")
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


pytestmark = pytest.mark.slow

# An actor takes a second to start: tests that ask the same of one share it.


@pytest.fixture(scope="module")
def server(cluster):
    return Server.remote()


@pytest.fixture(scope="module")
def broken(cluster):
    """An actor whose engine has died."""
    server = Server.remote()
    ray.get(server.break_engine.remote())
    return server


@pytest.fixture(scope="module")
def dead(cluster):
    server = Server.remote()
    ray.get(server.busy.remote(0))
    ray.kill(server)
    return server


def test_what_lives_is_left_alone(server):
    with Watch({"rollout server": lambda: [server]}, "checkpoints", every_s=0.1):
        ray.get(server.busy.remote(1.0))
    assert not [thread for thread in threading.enumerate() if thread.name == "verl_ext watch"]


def test_an_engine_that_cannot_be_asked_is_left_alone(cluster):
    server = Server.remote()
    ray.get(server.change_engine.remote())
    with Watch({"rollout server": lambda: [server]}, "checkpoints", every_s=0.1):
        ray.get(server.busy.remote(1.0))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ray.exceptions.OutOfMemoryError("95 %"), "rollout server 0 has been killed by Ray: the node's memory ran out"),
        (ray.exceptions.ActorUnavailableError("for now", None), ""),
        (ray.exceptions.ActorDiedError(), "rollout server 0 has died"),
    ],
)
def test_what_ray_says_of_an_actor_in_words(server, monkeypatch, error, said):
    def get(ref):
        raise error

    monkeypatch.setattr(watch.ray, "get", get)
    monkeypatch.setattr(watch, "AGAIN_S", 0.01)
    seconds = 30.0 if said else 2.0  # an actor that cannot be reached is asked to the end
    assert watch._died({"rollout server": [server]}, seconds) == said


def test_an_actor_that_cannot_be_reached_is_asked_again(server, monkeypatch):
    answers = iter([ray.exceptions.ActorUnavailableError("for now", None), ray.exceptions.ActorDiedError()])

    def get(ref):
        raise next(answers)

    monkeypatch.setattr(watch.ray, "get", get)
    assert watch._died({"training worker": [server]}, 30.0) == "training worker 0 has died"


def test_an_error_is_blamed_on_who_does_not_need_to_be_asked_before(dead):
    watched = Watch({}, "checkpoints", busy={"training worker": lambda: [dead]}, every_s=0.1)
    with pytest.raises(WorkerDiedError, match=r"^training worker 0 has died\. The checkpoints"), watched:
        raise RuntimeError("gloo: connection reset by peer")


def test_an_engine_that_has_died_ends_a_wait_in_ray_get(cluster, broken):
    busy = Server.remote()
    with (
        pytest.raises(WorkerDiedError, match=r"the engine of rollout server 1 has died.*resume_mode=auto"),
        Watch({"rollout server": lambda: [busy, broken]}, "checkpoints", every_s=0.1),
    ):
        ray.get(busy.busy.remote(60))
    ray.kill(busy)


@pytest.mark.parametrize("wait", [slept, Future().result], ids=["a loop of Python's own", "a lock, as TransferQueue's"])
def test_an_actor_that_has_died_ends_any_wait(dead, wait):
    with (
        pytest.raises(WorkerDiedError, match="agent loop worker 0 has died"),
        Watch({"agent loop worker": lambda: [dead]}, "checkpoints", every_s=0.1),
    ):
        wait(60)


def test_what_a_death_has_led_to_is_told_as_the_death(broken):
    with (
        pytest.raises(WorkerDiedError, match="the engine of rollout server 0"),
        Watch({"rollout server": lambda: [broken]}, "checkpoints"),
    ):
        raise RuntimeError("no trajectories")


def test_rays_own_word_for_a_death_is_kept(dead):
    with pytest.raises(ray.exceptions.ActorDiedError), Watch({"agent loop worker": lambda: [dead]}, "checkpoints"):
        ray.get(dead.busy.remote(0))


def test_a_trainer_that_fails_by_itself_fails_by_that(cluster):
    with pytest.raises(KeyError), Watch({}, "checkpoints", every_s=0.1):
        raise KeyError


def test_a_look_at_a_slow_step_that_fails_leaves_the_look_at_who_lives(broken, capsys):
    looks = []

    def actors():
        looks.append(len(looks))
        return [broken] if len(looks) > 3 else []

    slow_step = SlowStep(lambda: looks["no such step"], after_s=0.1)
    with (
        pytest.raises(WorkerDiedError, match="the engine of rollout server 0"),
        Watch({"rollout server": actors}, "checkpoints", slow_step, every_s=0.1),
    ):
        slept(60)
    assert capsys.readouterr().out.count("cannot tell whether a step is slow: TypeError") == 1


class WithLocalWorkers(OwnManager):
    agent_loop_workers = ("not an actor",)


@pytest.fixture
def watch_with(cluster):
    """watch_with(manager, rollout servers) -> the watch of a trainer with these."""

    def make(manager, *servers):
        trainer = SimpleNamespace(
            config=OmegaConf.create({"trainer": {"default_local_dir": "checkpoints"}}),
            global_steps=1,
            actor_rollout_wg=SimpleNamespace(workers=list(servers)),
            _rollout_server_managers=lambda: [SimpleNamespace(server_handles=list(servers))],
        )
        watched = watch.watch_of(trainer, manager, slow_step_s=0.2)
        watched._every_s = 0.1
        return watched

    return make


def fail_once_told(capsys, lines):
    """Adds what is printed to `lines`; fails once a slow step is told, however long the first look at Ray takes."""
    for _ in range(60):
        lines += capsys.readouterr().out.splitlines()
        if any("step 1 has been running for" in line for line in lines):
            break
        slept(1)
    raise ValueError("the real error")


@pytest.mark.parametrize(
    ("manager", "said"),
    [
        (OwnManager(None), "'OwnManager' object has no attribute 'agent_loop_workers'"),
        (WithLocalWorkers(None), "not an actor"),
    ],
)
def test_an_error_of_a_run_with_a_manager_of_ones_own_comes_out(server, watch_with, capsys, manager, said):
    lines: list[str] = []
    with pytest.raises(ValueError, match=r"^the real error$"), watch_with(manager, server):
        fail_once_told(capsys, lines)
    lines += capsys.readouterr().out.splitlines()
    (unwatched,) = [line for line in lines if "not watched: agent loop worker (" in line]
    assert said in unwatched
    assert any("step 1 has been running for" in line for line in lines)


def test_with_a_manager_of_ones_own_a_server_that_has_died_still_ends_a_wait(broken, watch_with):
    with pytest.raises(WorkerDiedError, match="the engine of rollout server 0"), watch_with(OwnManager(None), broken):
        slept(60)


def test_an_error_comes_out_where_nobody_can_be_asked(watch_with):
    trainer_lost = watch_with(OwnManager(None))
    trainer_lost._busy = {"training worker": lambda: 1 / 0}
    with pytest.raises(ValueError, match="the real error"), trainer_lost:
        raise ValueError("the real error")


class Run:
    """A run whose steps are watched every second; records when a report came, and for which step."""

    def __init__(self, after_s):
        self.number, self.now, self.reports = 0, 0.0, []
        self.slow_step = SlowStep(lambda: self.number, after_s)

    def step(self, seconds):
        self.number += 1
        for _ in range(seconds):
            if said := self.slow_step.look(self.now):
                self.reports.append((self.number, round(self.now)))
                self.said = said
            self.now += 1


def test_a_step_is_told_past_the_setting_and_whenever_the_time_has_doubled():
    run = Run(10)
    run.step(100)
    assert run.reports == [(1, 11), (1, 23), (1, 47), (1, 95)]
    assert run.said.startswith("step 1 has been running for 2 minutes; ")


def test_a_step_is_told_past_three_times_what_they_usually_take():
    run = Run(10)
    for seconds in (20, 5, 37):  # the first is reported at 11, the last would be at 3 x 12.5
        run.step(seconds)
    assert run.reports == [(1, 11)]
    run.step(70)
    assert run.reports[1:] == [(4, 62 + 61)]
    assert "(usually 20 s)" in run.said


@pytest.mark.parametrize("after_s", [None, 1000])
def test_nothing_is_told_of_a_step_that_is_not_slow(after_s):
    run = Run(after_s)
    run.step(900)
    assert run.reports == []
