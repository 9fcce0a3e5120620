"""Two turns and a tool between them, on the real stack: recipes/cpu_tool."""

import pytest

pytestmark = pytest.mark.e2e

TRAJECTORIES = 8 * 4
TOOL_TOKENS = 8  # <user>, six characters, <assistant>


@pytest.fixture
def command(command, request):
    """The shared runs' arguments with the tool recipe in the place of cpu_smoke."""
    folder = request.config.rootpath / "recipes" / "cpu_tool"

    def arguments(*overrides, **options):
        # Run.steps looks for the metrics under cpu_smoke's name.
        ours = (f"tool_folder={folder}", "trainer.experiment_name=cpu_smoke")
        line = command(*ours, *overrides, **options)
        return ["recipe=cpu_tool" if argument == "recipe=cpu_smoke" else argument for argument in line]

    return arguments


def test_a_tools_output_stands_between_two_turns_and_is_not_measured(train):
    run = train("stability=icepop", "stability.router_agreement=true")
    assert run.code == 0, run.tail
    assert len(run.steps) == 2
    for step in run.steps:
        # 4: the prompt, a turn, the tool, another turn. 2: no call.
        assert step["training/num_turns/max"] == 4
        calls = TRAJECTORIES * (step["training/num_turns/mean"] - 2) / 2
        assert calls > TRAJECTORIES / 2
        # One token off in the second turn, it would be 0.02 (0.06 over that turn alone).
        assert 0 < step["vllm_kl/k3"] < 1e-3
        assert step["vllm_kl/prob_diff_max"] < 0.1
        # verl computes the same over its own mask.
        assert step["vllm_kl/k1"] == pytest.approx(step["rollout_corr/kl"], rel=1e-3, abs=1e-6)
        assert step["router/tokens"] == pytest.approx(TRAJECTORIES * step["response_length/mean"] - calls * TOOL_TOKENS)
        assert 0.9 < step["router/agreement"] < 1
        assert step["correction/dropped"] == 0
        assert step["guard/skipped"] == 0
        assert step["actor/grad_norm"] > 0
