"""What a preset leaves out, it leaves out whole, and what remains acts: each preset, engine and situation."""

import pickle
import re
from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from tests.support.examples import slow_cases
from tests.unit.features.test_settings_act import (
    OTHER_SETTINGS,
    SHARED,
    changed,
    effects,
    given_to_verl,
    leaves,
    quick_conversion,  # noqa: F401 (a fixture of this module too)
)
from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import choose
from verl_ext.base.metrics.verls import VERL
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.loss_batch import LossBatch, call_method
from verl_ext.core.measure import gather, put_together
from verl_ext.core.tokens import Tokens
from verl_ext.features.bypass import ENTROPY
from verl_ext.features.fit import fit, fit_run
from verl_ext.features.losses import loss_has_ratio
from verl_ext.features.settings import BATCH_SKIP
from verl_ext.features.stability import default_node
from verl_ext.features.table import OFF_VALUES
from verl_ext.features.verl_config import bypasses, is_asynchronous, key_of, parse_override, replay_mode
from verl_ext.launch.compose import stability_choices
from verl_ext.trainer.guard_actions import build_guard

ACTOR = "actor_rollout_ref.actor"
BYPASS = "algorithm.rollout_correction.bypass_mode=true"
CORRECTED = "algorithm.rollout_correction.rollout_is=token"
ENGINES = {
    "fsdp2": ("recipe=cpu_smoke",),
    "megatron": ("recipe=cpu_megatron",),
    "veomni": ("recipe=cpu_veomni",),
    "unknown": ("recipe=cpu_smoke", f"{ACTOR}.strategy=fsdp_turbo"),
}
PADDED = {"fsdp2": "fsdp_config", "megatron": "megatron", "veomni": "veomni"}  # the node of pad_to_length
SITUATIONS = {
    "plain": (),
    "bypass": (BYPASS,),
    "distillation": ("distillation.enabled=true",),
    "not packed": ("actor_rollout_ref.model.use_remove_padding=false",),
    "padded": (f"{ACTOR}.{{node}}.pad_to_length=true",),
    "rollout_is": (CORRECTED,),
    "rollout_is and bypass": (CORRECTED, BYPASS),
    "colocate_async": ("trainer.v1.trainer_mode=colocate_async",),
    "separate_async": ("trainer.v1.trainer_mode=separate_async",),
}
PAIRS = [pair for pair in product(ENGINES, SITUATIONS) if pair != ("unknown", "padded")]
# log k of answers: nearly equal engines, engines far apart in one direction, and in both.
LOG_K = torch.tensor([[0.01, -0.02, 0.02, -0.01], [9.0] * 4, [-9.0] * 4, [9.0, -9.0, 9.0, -9.0]])
L_INFER = -9.5 - LOG_K.clamp(max=0).neg() + 9.0 * (LOG_K < -1)  # so that both log-probs are below 0
READINGS = 20  # of the guard: enough for its growth


@pytest.fixture
def fitted(compose):
    """fitted(engine, situation, preset) -> the features of the run; None if it is refused."""

    def fit(engine, situation, preset):
        overrides = [*launch(engine, situation), f"stability={preset}"]
        try:
            return fit_run(compose(*overrides), overrides, read_model=False)
        except ConfigError:
            return None

    return fit


@pytest.fixture(scope="module")
def whole(compose):
    """whole(preset) -> the features of a run that can have all of it."""

    @cache
    def fit(preset):
        overrides = [*launch("fsdp2", "colocate_async"), f"stability={preset}"]
        return fit_run(compose(*overrides), overrides, read_model=False)

    return fit


def launch(engine, situation):
    return [*ENGINES[engine], *(one.format(node=PADDED.get(engine)) for one in SITUATIONS[situation])]


def weights_of(chosen, run):
    """Returns the weights that a correction gives the tokens of LOG_K in a run."""
    mask, l_old = torch.ones_like(LOG_K, dtype=torch.bool), L_INFER + LOG_K
    if chosen.method.in_update:
        lag = torch.full_like(LOG_K, 2, dtype=torch.long) if is_asynchronous(run.config) else None
        batch = LossBatch(l_old, l_old, LOG_K.sign(), mask, l_infer=L_INFER, lag=lag)
        return call_method(chosen, batch, gives=("weight",)).weight
    tokens = Tokens.from_padded(L_INFER, l_old, mask)
    as_mask = bypasses(run.config) and loss_has_ratio(run.config)
    weight, _ = gather(tokens, {chosen.name: vars(chosen.settings)}, as_mask=as_mask)
    return weight.view(LOG_K.shape)


def largest_weight(run, corrections):
    product_of = torch.ones_like(LOG_K)
    for chosen in corrections:
        product_of *= weights_of(chosen, run)
    return product_of.max().item()


def logged(run):
    """Returns the metrics that a run logs before its update while its gap grows, and those of verl that it has."""
    guard, names = build_guard(run.stability), {metric.name for metric in VERL.metrics if "*" not in metric.name}
    if bypasses(run.config) and not OmegaConf.select(run.config, ENTROPY):
        names.discard("actor/entropy")
    for step in range(1, READINGS + 1):
        log_k = LOG_K * (0.001 * 1.1**step)
        tokens = Tokens.from_padded(L_INFER, L_INFER + log_k, torch.ones_like(LOG_K, dtype=torch.bool))
        corrections = run.stability.corrections()
        metrics = put_together([gather(tokens, corrections)[1]], corrections).metrics
        # A mask that is blind: it drops fewer tokens while the gap grows.
        metrics |= {"correction/dropped": 0.1 / step} if "correction/dropped" in metrics else {}
        guard.begin(step)
        foreseen, _ = guard.foresee(metrics)
        names |= metrics.keys() | foreseen.keys()
    return names


@pytest.mark.parametrize(("engine", "situation"), slow_cases(PAIRS))
def test_what_remains_of_a_preset_acts_and_what_is_left_out_cannot(compose, fitted, whole, engine, situation):
    for preset in stability_choices():
        if (run := fitted(engine, situation, preset)) is None:
            continue
        where = (engine, situation, preset)
        check_corrections(run, whole(preset), where)
        check_rules(run, where)
        check_settings(run, where)
        overrides = [*launch(engine, situation), f"stability={preset}"]
        check_reasons(compose(*overrides), overrides, run.stability.left_out or {}, where)


def check_corrections(run, whole, where):
    """Each correction changes weights, and together they give none that is above those of the whole preset, or of one
    of them alone."""
    chosen = run.stability.correction
    for one in chosen:
        assert (weights_of(one, run) != 1).any(), (*where, one.name)
    alone = [choose(CORRECTIONS[one.name], {"delta": 0.1} if one.name == "opsm" else None, "") for one in chosen]
    bounds = [largest_weight(whole, whole.stability.correction), *(largest_weight(run, [one]) for one in alone)]
    assert largest_weight(run, chosen) <= max(bounds), where


def check_rules(run, where):
    """Each rule's signal is logged."""
    if signals := {rule.signal for rule in run.stability.rules if rule.name != BATCH_SKIP}:
        assert signals <= logged(run), where


def check_settings(run, where):
    """Each setting that differs from the default has an effect."""
    if not run.demands:
        return
    config, before, verls = run.config, effects(run.config), pickle.dumps(run.config)
    for setting, value in settings_of(OmegaConf.to_container(config.stability)):
        if value == USUAL.get(setting) or value in OFF_VALUES or setting in (*OTHER_SETTINGS, *SHARED):
            continue
        with changed(config, setting, USUAL.get(setting)):
            try:
                acts = effects(config) != before or given_to_verl(config) != given_to_verl(pickle.loads(verls))
            except ConfigError:
                continue
        assert acts, (*where, setting)


def settings_of(node):
    """Yields the settings of a stability node with their values, rules as a whole."""
    rules = node["guard"].pop("rules", None)
    yield "stability.guard.rules", rules
    tree = OmegaConf.create({"stability": node})
    yield from ((name, OmegaConf.select(tree, name)) for name in leaves(node, "stability"))


USUAL = dict(settings_of(default_node()))


def check_reasons(config, overrides, left_out, where):
    """What is left out is refused for the same reason where the user asks for it."""
    for together, why in left_out.items():
        each = re.split(r" (?=[\w.]+=)", together)
        if asked := [f"{key_of(one)}=asked" for one in each if one.startswith("stability.")]:
            refused = fit(pickle.loads(pickle.dumps(config)), [*overrides, *asked], read_model=False).problems
            assert why in [problem.found for problem in refused], where
        for one in each:
            OmegaConf.update(config, *parse_override(one), merge=False, force_add=True)


def router_rows(lengths, packed):
    """Returns (answer, token) of each row that Megatron's routers see; None for padding."""
    if packed:
        return [(b, t) for b, length in enumerate(lengths) for t in range(length)]
    return [(b, t) if t < length else None for t in range(max(lengths)) for b, length in enumerate(lengths)]


@pytest.mark.parametrize("lengths", [[5, 5], [6, 6, 6], [3, 7, 1]])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_replay_that_remains_on_megatron_gives_each_token_its_own_experts(fitted, monkeypatch, situation, lengths):
    utils = pytest.importorskip("verl.utils.megatron.router_replay_utils")
    from verl.models.mcore import util

    targets = []
    router = SimpleNamespace(set_target_indices=lambda rows, replay_mask=None: targets.append(rows))
    monkeypatch.setattr(utils, "iter_model_routers", lambda model: [(1, router)])
    monkeypatch.setattr(utils, "scatter_to_sequence_parallel_region", lambda rows: rows)
    for name in ("tensor_model_parallel_world_size", "context_parallel_world_size"):
        monkeypatch.setattr(util.mpu, f"get_{name}", lambda: 1)
    monkeypatch.setattr(util.mpu, "get_context_parallel_rank", lambda: 0)
    answers = [torch.tensor([[[100 * b + t]] for t in range(length)]) for b, length in enumerate(lengths)]
    for preset in ("moe", "quantized", "r3", "r2"):
        run = fitted("megatron", situation, preset)
        if run is None or replay_mode(run.config) == "disabled":
            continue
        routes = torch.nested.as_nested_tensor(answers, layout=torch.jagged)
        utils.set_router_replay_data(routes, None, SimpleNamespace(fp8=None, num_layers=1), model=object())
        rows = router_rows(lengths, run.config.actor_rollout_ref.model.use_remove_padding)
        replayed = targets.pop().flatten().tolist()
        assert len(replayed) == len(rows)
        assert all(row is None or replayed[i] == 100 * row[0] + row[1] for i, row in enumerate(rows)), preset


@pytest.mark.parametrize("situation", SITUATIONS)
def test_a_replay_that_remains_on_veomni_has_the_packed_tokens_that_its_engine_demands(fitted, situation):
    for preset in ("moe", "quantized", "r3", "r2"):
        run = fitted("veomni", situation, preset)
        replays = run is not None and replay_mode(run.config) != "disabled"
        assert not replays or run.config.actor_rollout_ref.model.use_remove_padding
