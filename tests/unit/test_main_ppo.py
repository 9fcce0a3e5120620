"""What the entry point makes of errors from the run."""

import pytest
import ray.exceptions
from ray.core.generated.common_pb2 import ActorDiedErrorContext

from verl_ext import main_ppo
from verl_ext.errors import ConfigError, GuardStopError


@pytest.fixture(autouse=True)
def no_ray(monkeypatch):
    monkeypatch.setattr(main_ppo.ray, "shutdown", lambda: None)


@pytest.mark.parametrize(("error", "code"), [(ConfigError("a\nb"), 1), (GuardStopError("a b"), main_ppo.STOPPED)])
def test_an_error_of_the_users_is_one_line_and_a_stop_has_its_own_exit_code(error, code, capsys):
    with pytest.raises(SystemExit) as exit:
        main_ppo.stop(error)
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
    said = main_ppo._who_died(str(ray.exceptions.ActorDiedError(context)))
    cause = "The actor is dead. Worker exit detail: End of file"
    assert said == f"name abcWorkerDict_0:0, pid 123, ip 10.0.0.7 ({cause})"
    assert main_ppo._who_died(str(ray.exceptions.ActorDiedError())) == (
        "The actor died unexpectedly before finishing this task"
    )
