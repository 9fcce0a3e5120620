"""Effects of each regime on the rollout's engine."""

import pytest
import torch

from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import build, choose
from verl_ext.lab.regimes import REGIMES, History, Regimes, regimes_named


def planted(**settings):
    """Returns these regimes, each with its settings by name."""
    return Regimes(tuple(choose(REGIMES[name], given, f"lab.{name}") for name, given in settings.items()))


def history(updates, keeps=lambda update, now: True):
    """Returns a history in which the weights after update n hold the value n."""
    found = History(keeps)
    weights = {"0.up": torch.zeros(2, 4, 4)}
    for update in range(updates + 1):
        weights["0.up"].fill_(update)  # as an optimizer does, where they are
        found.add(weights)
    return found


def seen(regimes, updates):
    """Returns the updates that the rollout's weights hold, part by part."""
    engine = regimes.engine(history(updates, regimes.keeps))
    return [int(part["0.up"][0, 0, 0]) for part in engine.parts]


def test_without_a_regime_the_rollout_has_the_newest_weights():
    assert int(planted().engine(history(7)).parts[0]["0.up"][0, 0, 0]) == 7


@pytest.mark.parametrize(
    ("regimes", "by_update"),
    [
        (planted(stale=dict(lag=3)), {0: [0], 2: [0], 3: [0], 10: [7]}),
        (planted(stale=dict(lag=0, every=4)), {0: [0], 3: [0], 4: [4], 7: [4], 8: [8]}),
        (planted(stale=dict(lag=1, every=2)), {4: [3], 5: [3], 6: [5]}),
        (planted(stale=dict(lag=1, span=2)), {1: [0, 0, 0], 5: [2, 3, 4]}),
        (planted(missed_sync=dict(update=5)), {5: [5], 6: [5], 1100: [5]}),
        (planted(missed_sync=dict(update=5, count=2)), {6: [5], 7: [5], 8: [8]}),
    ],
)
def test_old_weights(regimes, by_update):
    assert {update: seen(regimes, update) for update in by_update} == by_update


@pytest.mark.parametrize(
    ("regimes", "kept"),
    [
        (planted(), [0, 1100]),
        (planted(stale=dict(lag=1, span=1)), [0, 1098, 1099, 1100]),
        (planted(missed_sync=dict(update=5)), [0, 5, 1100]),
        (planted(missed_sync=dict(update=5), stale=dict(lag=1)), [0, 5, 1099, 1100]),
    ],
)
def test_only_weights_that_a_regime_needs_are_kept(regimes, kept):
    assert sorted(history(1100, regimes.keeps).versions) == kept


def test_only_old_weights_on_purpose_say_how_old_they_are():
    """A missed sync leaves no lag, as in the tags of a real run: they name the version that should have arrived."""
    newest_and_oldest = {
        update: planted(stale={"lag": 1, "span": 2}).engine(history(update)).lag for update in (0, 2, 9)
    }
    assert newest_and_oldest == {0: (0, 0), 2: (1, 2), 9: (1, 3)}
    assert planted(missed_sync={"update": 1}).engine(history(9)).lag is None


def test_what_is_rounded():
    generator = torch.Generator().manual_seed(0)
    names = ("0.qkv", "0.out", "0.up", "0.down", "0.router", "head", "embedding", "norm", "positions")
    weights = {name: torch.randn(64, 64, generator=generator) for name in names}
    now = History(lambda update, now: False)
    now.add(weights)
    for router, head in ((False, False), (True, True)):
        engine = planted(quantized={"router": router, "head": head}).engine(now)
        changed = {name for name in names if not torch.equal(engine.parts[0][name], weights[name])}
        assert changed == {*names[:4], *(("0.router", "head") if router else ())}


def test_a_mixture_is_all_of_them():
    engine = planted(stale={"lag": 2}, truncated={"top_p": 0.5}, wrong_temperature={"temperature": 2}).engine(
        history(9)
    )
    assert (int(engine.parts[0]["0.up"][0, 0, 0]), engine.top_p, engine.temperature) == (7, 0.5, 2)


def test_names():
    assert regimes_named("exact") == []
    assert regimes_named("stale+bf16") == ["stale", "bf16"]
    with pytest.raises(ConfigError, match="the regime stael is not known; choose one of: exact, stale"):
        regimes_named("stael")


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("stale", {"lag": -1}, "lab.stale.lag=-1 must be at least 0"),
        ("kernels", {"bits": 0}, "lab.kernels.bits=0 must be from 1 to 24"),
        ("quantized", {"format": "fp2"}, "lab.quantized.format=fp2 is not known"),
        ("quantized", {"group": 0}, "lab.quantized.group=0 must be"),
        ("truncated", {"top_p": 0}, "lab.truncated.top_p=0 must be above 0"),
        ("wrong_temperature", {"temperature": 0}, "lab.wrong_temperature.temperature=0 must be above 0"),
        ("partial_sync", {"layers": -2}, "lab.partial_sync.layers=-2"),
        ("raw_log_probs", {"temperature": 0}, "lab.raw_log_probs.temperature=0"),
        ("wrong_weights", {"kind": "other"}, "lab.wrong_weights.kind=other"),
        ("respelled", {"share": 1.0}, "lab.respelled.share=1 must be between"),
    ],
)
def test_bad_settings(name, given, said):
    with pytest.raises(ConfigError, match=said):
        build(REGIMES[name].settings, given, f"lab.{name}")
