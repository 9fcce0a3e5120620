import pytest
from omegaconf import OmegaConf

from verl_ext.config import StabilityConfig, stability_config
from verl_ext.errors import ConfigError


def build(**settings):
    return stability_config(OmegaConf.create(settings))


def test_everything_is_off_by_default():
    assert build() == StabilityConfig()
    assert not build().active


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": "icepopp"}, "stability.correction=icepopp is not known; choose one of: none, icepop"),
        (
            {"icepop": {"alpha": 6.0}},
            "stability.icepop.alpha=6 must be below stability.icepop.beta=5",
        ),
        ({"icepop": {"alpha": -0.1}}, "stability.icepop.alpha=-0.1 must be at least 0"),
        ({"icepop": {"alpha": float("nan")}}, "stability.icepop.alpha=nan must be at least 0"),
        ({"batch_skip": {"threshold": -1}}, "stability.batch_skip.threshold=-1 must be at least 0"),
        ({"batch_skip": {"metric": "k3"}}, "stability.batch_skip.metric=k3 is not known"),
        ({"cascade_attention": "maybe"}, "stability.cascade_attention=maybe is not known"),
    ],
)
def test_bad_values_name_the_setting(settings, message):
    with pytest.raises(ConfigError) as error:
        build(**settings)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_yamls_own_reading_of_on_and_off_is_understood():
    assert build(cascade_attention=True).cascade_attention == "on"
    assert stability_config(OmegaConf.create("cascade_attention: off")).cascade_attention == "off"


@pytest.mark.parametrize(
    ("settings", "active", "needs_log_probs"),
    [
        ({"correction": "icepop"}, True, True),
        ({"metrics": True}, True, True),
        ({"batch_skip": {"threshold": 0.0}}, True, True),
        ({"router_agreement": True}, True, False),
        ({"cascade_attention": "off"}, True, False),
    ],
)
def test_what_is_active(settings, active, needs_log_probs):
    config = build(**settings)
    assert (config.active, config.needs_log_probs) == (active, needs_log_probs)
