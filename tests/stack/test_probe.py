"""The probe on the real stack. Each pair of engines is started once, for several looks, each with a cause planted in
the training engine. One more start is for a LoRA."""

import json

import pytest

from tests.stack.probing import BATCHES, CAUSES
from tests.stack.running import SMALL, run
from verl_ext.diagnosis.probed import FLOORS, Stage
from verl_ext.launch.command_line import compose
from verl_ext.probe.overrides import OUT, probe_overrides
from verl_ext.probe.sweep import GroupGap
from verl_ext.probe.verdict import ProbeResult
from verl_ext.upstream.fake_quantization import EVERYTHING

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
    recipe, *settings = ENGINES[request.param]
    return looks((recipe, *SMALL[1:], *settings), assets, tmp_path_factory.mktemp("probe"), stack, layers="fp4")


def looks(launch, assets, folder, stack, batches=1, layers=""):
    own = [*launch, f"assets={assets}", "stability=none"]
    overrides = [*own, *probe_overrides(compose(own).config, 8, folder, batches, layers), f"+{OUT}={folder}/probe.json"]
    finished = run(["-m", "tests.stack.probing", *overrides], folder, stack)
    assert finished.code == 0, finished.tail
    return json.loads((folder / "probe.json").read_text())


def test_engines_that_compute_the_same_agree(found):
    result = ProbeResult.read(found["nothing"])
    assert result.has("probe_gap.none") and result.start == "" and result.causes == ()
    pairs = {(pair["one"], pair["other"]): pair for pair in found["nothing"]["pairs"]}
    from_decode = {("decode", other) for other in ("train", "prefill", "replayed", "packed")}
    assert set(pairs) == {*from_decode, ("prefill", "train"), *FLOORS}
    assert all(pair["k3"] < 1e-9 for pair in pairs.values())
    places = found["nothing"]["places"]
    assert (places[0]["point"], places[-1]["point"], len(places)) == ("embedding", "norm", 2 + 4 * 4)
    assert all(place["error"] < 1e-5 for place in places)
    assert {place[f"{engine}_dtype"] for place in places for engine in ("rollout", "train")} == {"float32"}
    assert found["nothing"]["head"] == ["float32", "float32"]


@pytest.mark.parametrize("cause", [cause for cause in CAUSES if cause != "nothing"])
def test_a_planted_cause_is_found_at_its_place(found, cause):
    result = ProbeResult.read(found[cause])
    _, start, mark = CAUSES[cause]
    assert result.start == start and (mark is None or result.has(mark)), result.sentences()


def test_the_dtype_of_the_logits_is_what_each_engine_computed_them_in(found):
    (planted,) = (found[cause] for cause in found if "head in bf16" in cause)
    assert planted["head"] == ["float32", "bfloat16"]


def test_a_sync_of_the_same_weights_changes_nothing_and_an_update_arrives(found):
    sync, update = (Stage(**one) for one in found["stages"])
    assert (sync.name, sync.train_moved) == ("sync", 0.0)
    assert sync.rollout_moved < 1e-6  # a batch of another make-up, in float32
    assert (update.name, update.before) == ("update", sync.after)
    assert update.train_moved > 1e-4
    assert update.rollout_moved == pytest.approx(update.train_moved, rel=1e-2)
    assert max(sync.after, update.after) < 1e-9


def test_each_group_of_weights_is_rounded_by_itself(found):
    base, *groups = (GroupGap(**one) for one in found["layers"])
    k3 = {one.group: one.k3 for one in groups}
    layers = [f"layer {number}" for number in range(4)]
    assert set(k3) == {EVERYTHING, "all attention", "all experts", "all routers", "all heads", *layers}
    assert base.k3 < 1e-9 < 1e-6 < min(k3.values()), "nothing rounded: the engines agree"
    assert k3[EVERYTHING] > max(k3[name] for name in layers)
    modules = {one.group: one.modules for one in groups}
    attention = {f"model.layers.2.self_attn.{name}_proj" for name in "qkvo"}
    assert set(modules["layer 2"]) == {*attention, "model.layers.2.mlp.experts"}
    assert modules["all heads"] == ["lm_head"]


@pytest.fixture(scope="module")
def found_of_lora(assets, stack, dense_lora, tmp_path_factory):
    """The probe's results for a new LoRA: as it is, without it in the rollout, and over batches without an update."""
    launch = (*SMALL, "precision=fp32", *dense_lora)
    return looks(launch, assets, tmp_path_factory.mktemp("lora"), stack, BATCHES)


def test_a_lora_that_the_rollout_lacks_is_named(found_of_lora):
    there, lost = (ProbeResult.read(found_of_lora[name]) for name in ("nothing", "no adapter"))
    assert there.has("probe_gap.none")
    base = {(pair.one, pair.other): pair.k3 for pair in there.pairs}["decode", "base"]
    assert base > 1e-4, "B is not zero: a LoRA that is left out shows"
    assert lost.has("probe_adapter.closes"), lost.sentences()
    assert [cause.name for cause in lost.causes] == ["lost_sync"]


def test_a_gap_that_grows_with_the_same_weights_is_named(found_of_lora):
    same, growing = (
        ProbeResult.read(found_of_lora["nothing"] | {"batches": found_of_lora[name]})
        for name in ("same weights", "growing")
    )
    assert len(same.batches) == len(growing.batches) == BATCHES
    assert same.has("probe_batches.steady") and growing.has("probe_batches.grows")
