"""tools/bench_transfer.py, through the real TransferQueue, as small as it goes."""

import re
import subprocess
import sys

import pytest

from tests import ROOT


@pytest.mark.e2e
def test_measuring_carries_ids_through_a_real_transfer_queue():
    small = ["--model", "DeepSeek-V3", "--tokens", "1000", "--megabytes", "2", "--units", "1", "--clients", "1"]
    command = [sys.executable, "tools/bench_transfer.py", *small, "--rounds", "1", "--repeats", "2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "1 of 1: 1 unit(s), 1 client(s): put " in done.stderr
    assert "4 trajectories of 1,000 tokens" in done.stdout
    row = next(line for line in done.stdout.splitlines() if re.match(r"│ 1 +│ 1 ", line))
    assert all(float(number) > 0 for number in re.findall(r"(\d+\.\d+) \(", row)) and row.count("(") >= 5
