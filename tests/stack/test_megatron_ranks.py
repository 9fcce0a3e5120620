"""Routes that verl's real Megatron engine gathers over two ranks."""

import os
import subprocess
import sys

import pytest

from tests.stack.megatron_ranks import PARALLEL


@pytest.mark.e2e
@pytest.mark.timeout(300)
def test_routes_gathered_over_two_ranks_of_verls_engine_are_in_order(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.stack.megatron_ranks", str(rank), str(tmp_path / "store")],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)[-4000:]
    for name in PARALLEL:
        assert sum(f"checked: {name}\n" in output for output in outputs) == 1, outputs
