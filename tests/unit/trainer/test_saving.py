"""What a checkpoint that cannot be written ends with, and what else goes wrong while one is."""

from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from verl_ext.trainer.checkpoints import CheckpointError
from verl_ext.trainer.resuming import _written

FOLDER = Path("checkpoints/global_step_3")


def in_a_worker(cause):
    return RayTaskError("save_checkpoint", "Traceback", cause)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(30, "Read-only file system"), r"OSError: \[Errno 30\] Read-only file system"),
        (in_a_worker(PermissionError(13, "Permission denied")), r"PermissionError: \[Errno 13\] Permission denied"),
        (in_a_worker(RuntimeError("PytorchStreamWriter failed writing file data/0\nmore")), "writing file data/0"),
        (OSError(), r"OSError: \)"),
    ],
)
def test_it_is_one_line_that_names_the_checkpoint_and_how_to_go_on(error, said):
    with (
        pytest.raises(CheckpointError, match=rf"global_step_3 cannot be written \(.*{said}") as raised,
        _written(FOLDER),
    ):
        raise error
    assert "resume_mode=auto" in str(raised.value) and "more" not in str(raised.value)


@pytest.mark.parametrize("error", [in_a_worker(RuntimeError("gloo: connection reset")), in_a_worker(AssertionError())])
def test_what_is_no_matter_of_writing_stays_what_it_is(error):
    with pytest.raises(RayTaskError) as raised, _written(FOLDER):
        raise error
    assert raised.value is error
