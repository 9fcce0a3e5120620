"""The settings of a planted gap."""

import pytest

from verl_ext.base.errors import ConfigError
from verl_ext.core import fake_quant
from verl_ext.features.settings import FORMATS, NONE
from verl_ext.features.stability import stability_config


def read(**settings):
    return stability_config({"fake_quantization": settings}).fake_quantization


def test_the_formats_are_those_that_weights_can_be_rounded_to():
    assert set(FORMATS) == {NONE, *fake_quant.FORMATS}


def test_it_is_off_by_default_and_says_what_it_rounds():
    assert not read().active
    assert str(read(format="fp4")) == "fp4, group 32"
    assert str(read(format="int4", group="channel", head=True, router=True)) == "int4, group channel, router, head"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"format": "fp3"}, "format=fp3 is not known; choose one of: none, fp8, int8, int4, fp4"),
        ({"format": "fp4", "group": 0}, "group=0 must be tensor, channel, or a number of inputs, at least 2"),
        ({"format": "fp4", "group": 1}, "group=1 must be"),
        ({"format": "fp4", "group": "row"}, "group=row must be"),
        ({"format": "fp4", "group": 2.5}, "group=2.5 must be"),
        ({"format": "fp4", "group": True}, "group=True must be"),
        ({"size": 3}, "size is not known"),
    ],
)
def test_bad_values_name_the_setting(settings, said):
    with pytest.raises(ConfigError) as error:
        read(**settings)
    assert str(error.value).startswith(f"stability.fake_quantization.{said}") and "\n" not in str(error.value)
