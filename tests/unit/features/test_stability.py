from unittest import mock

import pytest
from omegaconf import OmegaConf

from tests.support.fixing import assert_fixed
from tests.support.problems import read_settings
from verl_ext.base.errors import ConfigError
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.features.settings import StabilityConfig
from verl_ext.features.stability import default_node


def build(**settings):
    return read_settings(OmegaConf.create(settings))


def test_everything_is_off_by_default():
    assert build() == StabilityConfig()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"correction": "icepopp"}, "stability.correction=icepopp is not known; choose one of: none, tis"),
        ({"icepop": {"alpha": 6.0}}, "stability.icepop.alpha=6 must be below beta=5"),
        ({"icepop": {"alpha": -0.1}}, "stability.icepop.alpha=-0.1 must be at least 0"),
        ({"icepop": {"alpha": float("nan")}}, "stability.icepop.alpha=nan must be at least 0"),
        ({"batch_skip": {"threshold": -1}}, "stability.batch_skip.threshold=-1 must be at least 0"),
        ({"batch_skip": {"metric": "k3"}}, "stability.batch_skip.metric=k3 is not known"),
        ({"correction": ["icepop", "geo"]}, "stability.correction=geo is not known"),
        ({"correction": ["icepop", "tis"]}, "icepop and tis each weigh a token by its ratio"),
        ({"correction": ["kpop", "mis"]}, "stability.mis.weight=one"),
        ({"correction": ["icepop", "icepop"]}, "names a correction twice"),
        ({"correction": "opsm"}, "stability.opsm.delta must be given: it has no default; set stability.opsm.delta=0.1"),
        (
            {"correction": ["icepop", "opsm"], "opsm": {"delta": 0.1}, "denominator": "kept"},
            "use stability.filters.off_policy_negative",
        ),
        ({"denominator": "kept"}, "stability.correction=none drops none there"),
        ({"denominator": "kept", "correction": "tis"}, "stability.correction=tis drops none there"),
        ({"denominator": "kept", "correction": ["tis_sequence"]}, "stability.correction=tis_sequence drops none"),
        ({"icepop": {"beta": 2.0}}, "stability.icepop is set, and stability.correction=none does not use it"),
        ({"correction": {"icepop": {"alpha": 0.9}}}, "must be a name or a list of names"),
        ({"correction": 5}, "stability.correction=5 must be a name or a list of names"),
        ({"filters": [{"overlong": {}}]}, "must be a name or a list of names"),
        ({"filters": ["overlong", "overlong"]}, "names a filter twice"),
        ({"icepop": {"alpha": "abc"}}, "stability.icepop.alpha"),
        ({"denominator": "half"}, "stability.denominator=half is not known; choose one of: full, kept"),
        ({"kl_denominator": "ref"}, "stability.kl_denominator=ref is not known"),
        ({"tis": {"cap": 0.0}}, "stability.tis.cap=0 must be above 0"),
        ({"kpop": {"phi": float("nan")}}, "stability.kpop.phi=nan must be above 0"),
        ({"geo_mask": {"low": 1.1, "high": 1.0}}, "stability.geo_mask.low=1.1 must be below high=1"),
        ({"mis": {"weight": "two"}}, "stability.mis.weight=two is not known; choose one of: ratio, one"),
        ({"correction": "opsm", "opsm": {"delta": float("inf")}}, "stability.opsm.delta=inf must be a finite number"),
        ({"filters": ["overlonger"]}, "stability.filters=overlonger is not known"),
        ({"filters": {"low_probability": {}}}, "stability.filters.low_probability.threshold must be given"),
        ({"filters": {"low_agreement": {"threshold": 0.5}}}, "set stability.router_agreement=true"),
        (
            {"router_agreement_share": 0.5},
            "stability.router_agreement_share=0.5 needs the routers' agreement; set stability.router_agreement=true",
        ),
        ({"router_agreement": True, "router_agreement_share": 0}, "_share=0 must be above 0 and at most 1"),
        ({"router_agreement": True, "router_agreement_share": 1.5}, "_share=1.5 must be above 0 and at most 1"),
        ({"router_agreement": True, "router_agreement_share": float("nan")}, "_share=nan must be above 0"),
        (
            {"router_agreement": True, "router_agreement_share": 0.5, "filters": {"low_agreement": {"threshold": 0.5}}},
            "stability.filters.low_agreement reads the routers' agreement of every token, and "
            "stability.router_agreement_share=0.5 compares only some trajectories; set "
            "stability.router_agreement_share=1",
        ),
        ({"plugins": ["no_such_module"]}, "stability.plugins: no_such_module cannot be imported"),
        ({"corection": "icepop"}, "stability.corection is not known; similar names: correction"),
        ({"metrics": "always"}, "stability.metrics=always must be true or false"),
        ({"cascade_attention": "maybe"}, "stability.cascade_attention=maybe is not known"),
    ],
)
def test_bad_values_name_the_setting(settings, message):
    def run(*fix):
        node = OmegaConf.create({"stability": settings})
        read_settings(OmegaConf.merge(node, OmegaConf.from_dotlist(list(fix))).stability)

    with pytest.raises(ConfigError) as error:
        run()
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert_fixed(error.value, run)


def places(node, *above, only=object):
    """Yields the path of every setting and of every node of settings; `only` those whose default has this type."""
    for name, value in node.items():
        if isinstance(value, only):
            yield (*above, name)
        if isinstance(value, dict):
            yield from places(value, *above, name, only=only)


def nested(path, value):
    for name in reversed(path):
        value = {name: value}
    return value


WRONG = (5, 0.5, True, "", "text", [], [1], [[1]], {"text": {"text": 1}}, {1: [1]}, None, float("nan"), float("inf"))


def refusal_of(node):
    """Returns the errors that refuse a `stability` node, one line each; [] if the node is taken."""
    try:
        read_settings(OmegaConf.create({"stability": node}).stability)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


@pytest.mark.parametrize("path", [(), *places(default_node())], ids=".".join)
def test_a_value_of_any_type_is_taken_or_refused_by_name(path):
    for said in (line for value in WRONG for line in refusal_of(nested(path, value))):
        assert ".".join(("stability", *path[:1])) in said
        assert "\n" not in said


@pytest.mark.parametrize("value", [5, 0.5, True, "text", [1], ["text"]])
@pytest.mark.parametrize("path", [(), *places(default_node(), only=dict)], ids=".".join)
def test_a_node_that_is_no_mapping_is_refused_by_its_name(path, value):
    with pytest.raises(ConfigError) as error:
        read_settings(nested(path, value))
    assert str(error.value).startswith(".".join(("stability", *path)) + "=")


def test_yamls_own_reading_of_on_and_off_is_understood():
    assert build(cascade_attention=True).cascade_attention == "on"
    assert read_settings(OmegaConf.create("cascade_attention: off")).cascade_attention == "off"


def test_one_filter_needs_no_list():
    assert build(filters="overlong").filter_chain() == [("overlong", {})]


def test_corrections_come_with_their_settings_in_order():
    config = build(correction=["geo_mask", "icepop", "opsm"], opsm={"delta": 0.1}, icepop={"beta": 3.0})
    assert list(config.corrections().items()) == [
        ("geo_mask", {"low": 0.999, "high": 1.002}),
        ("icepop", {"alpha": 0.5, "beta": 3.0}),
    ]
    assert config.correction_names == ("geo_mask", "icepop", "opsm")
    assert build(correction=["none"]).correction_names == build(correction=[]).correction_names == ()


@pytest.mark.parametrize("correction", ["icepop", "kpop", "mis", "geo_mask", ["geo_mask", "tis"]])
def test_what_a_correction_drops_may_leave_the_denominator(correction):
    assert build(denominator="kept", correction=correction).denominator == "kept"


def test_mis_as_a_mask_goes_with_a_ratio():
    assert list(build(correction=["icepop", "mis"], mis={"weight": "one"}).corrections()) == ["icepop", "mis"]


def test_filters_are_a_list_of_names_or_a_mapping_in_order():
    assert build(filters=["zero_variance", "overlong"]).filter_chain() == [("zero_variance", {}), ("overlong", {})]
    mapping = {"low_probability": {"threshold": 0.1}, "overlong": None}
    assert build(filters=mapping).filter_chain() == [("low_probability", {"threshold": 0.1}), ("overlong", {})]


@pytest.mark.parametrize("setting", ["correction", "filters"])
def test_an_unknown_method_names_the_setting_that_brings_ones_own(setting):
    with pytest.raises(ConfigError, match=f"^stability.{setting}=mine is not known") as error:
        build(**{setting: "mine"})
    assert str(error.value).count("stability.plugins") == 1


MISTAKES = {
    "import no_such_module": "no_such_module",
    "def f(:": "line 3",
    "undefined": "NameError.*line 3",
    "register_correction('mine', reads=('log_k',))": "correction mine reads",
    "register_correction('icepop', reads=('k',))(print)": "icepop is registered already",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_plugin_with_a_mistake_is_named_in_one_line_however_often_it_is_imported(tmp_path, monkeypatch, mistake):
    own = "register_correction('own_one', reads=('k',))(lambda k: k)"
    (tmp_path / "my_mistake.py").write_text(
        f"from verl_ext.core.corrections import register_correction\n{own}\n{mistake}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with mock.patch.dict(CORRECTIONS):
        for _ in range(2):
            with pytest.raises(ConfigError, match=rf"^stability\.plugins: my_mistake .*{MISTAKES[mistake]}") as error:
                build(plugins=["my_mistake"])
            assert "\n" not in str(error.value)


def test_a_plugin_module_brings_its_own_filter(tmp_path, monkeypatch):
    (tmp_path / "my_filters.py").write_text(
        "from verl_ext.core.filters import register_batch_filter\n"
        "@register_batch_filter('everything')\n"
        "def everything(batch):\n    return batch.tokens.mask\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        config = build(plugins=["my_filters"], filters=["everything"])
        assert config.filter_chain() == [("everything", {})]
    finally:
        from verl_ext.core.filters import BATCH_FILTERS

        BATCH_FILTERS.pop("everything", None)
