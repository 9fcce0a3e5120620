"""The probe on the real stack: for each pair of engines one start and several looks, each with a cause planted in the
training engine."""

import json

import pytest

from tests.stack.probing import CAUSES
from tests.stack.running import SMALL, run
from verl_ext.launch.command_line import compose
from verl_ext.probe.command import probe_overrides
from verl_ext.probe.readings import Stage
from verl_ext.probe.verdict import ProbeResult

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

MEGATRON = "actor_rollout_ref.actor.megatron"
ENGINES = {
    "FSDP2, vLLM": (SMALL[0], "precision=fp32"),
    "Megatron, SGLang": (
        "recipe=cpu_megatron_sglang",
        f"{MEGATRON}.dtype=float32",
        "actor_rollout_ref.rollout.dtype=float32",
        f"{MEGATRON}.pipeline_model_parallel_size=2",  # each stage has two of the four layers
        "trainer.n_gpus_per_node=2",
        "ray_kwargs.ray_init.num_gpus=2",
    ),
}


@pytest.fixture(scope="module", params=ENGINES)
def found(request, assets, tmp_path_factory):
    """Name of the planted cause -> what the probe found."""
    stack = request.getfixturevalue("sglang_stack" if "SGLang" in request.param else "stack")
    folder = tmp_path_factory.mktemp("probe")
    recipe, *settings = ENGINES[request.param]
    own = [recipe, *SMALL[1:], *settings, f"assets={assets}", "stability=none"]
    overrides = [*own, *probe_overrides(compose(own)[0], 8, folder), f"+probe_out={folder}/probe.json"]
    finished = run(["-m", "tests.stack.probing", *overrides], folder, stack)
    assert finished.code == 0, finished.tail
    return json.loads((folder / "probe.json").read_text())


def test_engines_that_compute_the_same_agree(found):
    told = ProbeResult.read(found["nothing"]).conclusion
    assert (told.cause, told.start) == ("none", "")
    pairs = {(pair["one"], pair["other"]): pair for pair in found["nothing"]["pairs"]}
    assert set(pairs) == {("decode", "train"), ("decode", "prefill"), ("prefill", "train"), ("decode", "replayed")}
    assert all(pair["k3"] < 1e-9 for pair in pairs.values())
    places = found["nothing"]["places"]
    assert (places[0]["point"], places[-1]["point"], len(places)) == ("embedding", "norm", 2 + 4 * 4)
    assert all(place["error"] < 1e-5 for place in places)


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "nothing"])
def test_a_planted_cause_is_found_at_its_place(found, cause):
    told = ProbeResult.read(found[cause]).conclusion
    assert told.start == CAUSES[cause][1]
    if cause != "router in bf16":  # which is routing, where it takes another expert for any token
        assert told.cause == "arithmetic", told.sentence


def test_a_sync_of_the_same_weights_changes_nothing_and_an_update_arrives(found):
    sync, update = (Stage(**one) for one in found["stages"])
    assert (sync.name, sync.train_moved) == ("sync", 0.0)
    assert sync.rollout_moved < 1e-6  # a batch of another make-up, in float32
    assert (update.name, update.before) == ("update", sync.after)
    assert update.train_moved > 1e-4
    assert update.rollout_moved == pytest.approx(update.train_moved, rel=1e-2)
    assert max(sync.after, update.after) < 1e-9
