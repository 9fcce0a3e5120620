"""The doctor on the example launches of verl, from a machine that is not the run's."""

import pytest

from tests.support.example_launches import LAUNCHES, NOT_COMPOSED, SAMPLE
from verl_ext import cli
from verl_ext.base.errors import Problem
from verl_ext.doctor import diagnose
from verl_ext.doctor.checks import installed_versions
from verl_ext.launch.gpus import named

OF_THE_MACHINE = ("packages", "plugins", "upstream", "imports", "not here", "model files", "files", "trl", "gpu")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def look():
    """look(launch, *overrides) -> the findings on it, with a preset."""
    versions = installed_versions()

    def findings(launch, *overrides):
        arguments = [*LAUNCHES[launch], "stability=moe", *overrides]
        return diagnose.diagnose(arguments, named("H100"), versions=versions)

    return findings


MENDED = (NOT_COMPOSED[0], "rollout_correction_run_qwen2_5_7b_fsdp_multi_rs", "sapo_trainer_run_qwen3_30b_a3b_fsdp")


@pytest.mark.parametrize("launch", [*SAMPLE, *MENDED, "router_replay_run_qwen3_30b_a3b_megatron"])
def test_a_launch_with_what_the_doctor_would_set_has_no_error(look, launch):
    found = look(launch)
    assert sum(one.level != "ok" and one.check in OF_THE_MACHINE for one in found) <= 2
    overrides, left = diagnose.mend(found, lambda overrides: look(launch, *overrides))
    assert [one.found for one in left if one.level == "error"] == []
    assert {one.level for one in look(launch, *overrides)} & {"error"} == set()


@pytest.mark.parametrize("launch", SAMPLE)
def test_the_plan_of_a_launch_is_a_plan_or_a_line_for_each_problem(launch, capsys):
    code = cli.main(["plan", "--gpu", "H100", "--json", *LAUNCHES[launch], "stability=moe"])
    said = capsys.readouterr()
    lines = said.err.splitlines()
    refused = code == 2 and lines and all(line.startswith("verl-ext plan: ") for line in lines)
    assert code in (0, 1) or (refused and not said.out)


def test_errors_are_fixed_before_warnings():
    """What a launch with errors is warned of may be wrong once they are fixed."""
    broken = [Problem("a", fix=("x=1",)), Problem("b", fix=("y=1",), level="warning")]
    left = {("x=1",): [Problem("c", fix=("z=1",), level="warning")], ("x=1", "z=1"): []}
    chosen, rest = diagnose.mend(broken, lambda overrides: left[tuple(overrides)])
    assert {override: finding.found for override, finding in chosen.items()} == {"x=1": "a", "z=1": "c"} and not rest
