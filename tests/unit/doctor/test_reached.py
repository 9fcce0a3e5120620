"""A method is followed as far as settings decide; what they do not decide is never an error."""

import ast
from textwrap import dedent, indent

import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl_ext.doctor.reached import refused_by

CONFIG = {"n": 4, "mode": "sync", "off": None, "sizes": {"batch": 6, "mini": 4}, "names": ["a", "b"], "needed": "???"}


BASE = """
    class B:
        def reset(self): self.limit = unknown()
        def check(self, config): assert config.n == 8
        def maybe(self, config):
            if config.mode: return
"""


def followed(body, config=CONFIG, bases=(), method="__init__", **known):
    """Returns (text, settings, whether it stops) of what a method with this body refuses."""
    texts = [f"class C:\n    def __init__(self, config, other=None):\n{indent(dedent(body), ' ' * 8)}", *bases]
    classes = [node for text in texts for node in ast.parse(dedent(text)).body if isinstance(node, ast.ClassDef)]
    values = {"config": OmegaConf.create(config), **known}
    return [(one.said, one.settings, one.stops) for one in refused_by(classes, (method,), values, {"config": ""})]


@pytest.mark.parametrize(
    ("body", "said", "settings"),
    [
        ("assert config.n == 8, 'eight'", "eight", ["n"]),
        ("assert config.n == 8", "assert config.n == 8", ["n"]),
        ("assert config.sizes.batch % config['sizes']['mini'] == 0, f'{config.sizes.batch=}'", "6", None),
        ("if config.mode in ('sync', 'async') and not config.off: raise ValueError('mode')", "mode", ["mode", "off"]),
        ("if unknown(config) or config.n: raise ValueError('n')", "n", ["n"]),
        ("batch = config.sizes.get('batch', 1)\nassert batch < 4, 'batch'", "batch", ["sizes.batch"]),
        ("self.config = config\nif self.config.n > 3: self.check()", None, None),
        ("size = config.get('gone', 9)\nassert size < 9, 'gone'", "gone", ["gone"]),
        ("size = config.off or 2\nassert size > 2, 'off'", "off", ["off"]),
        ("names = set(config.names) - {'a'}\nassert not names, f'not {names}'", "not b", None),
        ("if config.n != 4: pass\nelif not config.off: raise NotImplementedError", "NotImplementedError", None),
        ("with open(config.mode) as file:\n    assert len(config.names) == 1, 'one'", "one", ["names"]),
        ("assert isinstance(config.n, str), 'text'", "text", ["n"]),
        ("kind = config.mode.upper()\nassert kind == 'ASYNC', kind", "SYNC", None),
        ("assert 1 < config.n < 4, 'between'", "between", ["n"]),
        ("for each in range(9): break\nassert config.n == 8, 'eight'", "eight", ["n"]),
    ],
)
def test_what_is_decided_is_told(body, said, settings):
    found = followed(body)
    if said is None:
        assert found == []
        return
    ((text, read, stops),) = found
    assert said in text and stops
    assert settings is None or list(read) == settings


@pytest.mark.parametrize(
    "body",
    [
        "assert config.n == 4",
        "assert unknown(config)",
        "assert config.gone == 1",  # a class may have a default
        "assert config.needed == 1",
        "assert config.n == other.n",
        "if unknown(): return\nassert config.n == 8",
        "n = config.n\nif unknown(): n = 8\nassert n == 8",
        "for n in range(9): config = other\nassert config.n == 8",
        "try:\n    assert config.n == 8\nexcept AssertionError: pass",
        "value = unknown() or 8\nassert value == 4",
        "assert config.n > 'text'",
        "self.check = config.n\nself.reset()\nif self.limit: raise ValueError",
        "if config.n == 8: raise ValueError('eight')",
        "with open_dict(config):\n    config.n = 8\nassert config.n == 8",
        "if unknown(): config.sizes.batch = 8\nassert config.get('sizes').batch == 8",
        "config['n'] = 8\nassert config.n == 8",
        "sizes = config.sizes\nsizes.update(batch=8)\nassert sizes.batch == 8",
        "names = config.names\nassert isinstance(names, list)",
        "self.check(other)",
    ],
)
def test_what_is_not_decided_is_no_error(body):
    assert followed(body, bases=[BASE]) == []


@pytest.mark.parametrize(
    ("body", "mends"),
    [
        ("assert config.n == 8", ("n", 8)),
        ("assert config.n >= 8", ("n", 8)),
        ("assert config.n > 8", ("n", 9)),
        ("if config.n != 8: raise ValueError", ("n", 8)),
        ("if config.n <= 4: raise ValueError", ("n", 5)),
        ("if config.mode:\n    if config.n < 8: raise ValueError", ("n", 8)),
        ("assert not config.on", ("on", False)),
        ("if config.on: raise ValueError", ("on", False)),
        ("assert config.n != 4", None),  # which other one?
        ("assert config.mode in ('async',)", None),
        ("assert config.n == config.sizes.batch", ("n", 6)),
        ("if config.n < 5: raise ValueError", ("n", 5)),
        ("if config.n >= 8: pass\nelse: raise ValueError", ("n", 8)),
        ("self.maybe(config)\nraise ValueError", None),  # what a method returns at is no condition here
    ],
)
def test_what_would_mend_it_is_told(body, mends):
    nodes = ast.parse(f"class C:\n    def __init__(self, config):\n{indent(body, ' ' * 8)}\n{dedent(BASE)}").body
    (found,) = refused_by(nodes, ["__init__"], {"config": OmegaConf.create(CONFIG | {"on": True})}, {"config": ""})
    assert found.mends == mends


def test_methods_of_the_class_and_of_its_bases_are_followed():
    base = """
        class B:
            def __init__(self, config):
                self.size = config.n
                assert config.mode != 'sync', 'base'
            def check(self):
                if unknown(): return
                self.size = 9
            def last(self):
                assert self.size < 4, 'last'
    """
    found = followed("super().__init__(config)\nself.last()\nself.check()\nself.last()", bases=[base])
    assert [said for said, *_ in found] == ["base", "last"]  # after `check`, the size is not known


def test_a_warning_is_told_behind_a_condition_and_stops_nothing():
    body = "logger.warning('always')\nif config.n: logger.warning('%d is ignored', config.n)\nassert not config.n, 'n'"
    assert [(said, stops) for said, _, stops in followed(body)] == [("4 is ignored", False), ("n", True)]


def test_errors_are_told_until_one_is_raised():
    body = (
        "assert config.n == 1, 'n'\nassert config.off, 'off'\nif config.n: raise ValueError('end')\nassert 0, 'after'"
    )
    assert [said for said, *_ in followed(body)] == ["n", "off", "end"]


numbers = st.integers(-3, 9)
parts = st.sampled_from(["config.a", "config.b", "config.c", "2", "unknown", "None"])
tests = st.recursive(
    st.builds("{} {} {}".format, parts, st.sampled_from(["==", "<", ">=", "is", "is not"]), parts),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["and", "or"]), inner),
        st.builds("(not {})".format, inner),
    ),
    max_leaves=6,
)


@given(tests, st.fixed_dictionaries({name: st.none() | numbers for name in "abc"}), numbers)
def test_a_refusal_is_what_python_would_raise(test, config, unknown):
    """Whatever the unknown value is: an error that is told is raised."""
    if followed(f"assert {test}", config):
        try:
            holds = eval(test, {"config": OmegaConf.create(config), "unknown": unknown})
        except TypeError:  # Python stops before the error, at a comparison with None
            return
        assert not holds


@pytest.mark.parametrize(
    ("function", "condition", "said"),
    [
        ("def load(module, path): open(path)", "config.n", "load needs off"),
        ("def load(module, path): open(path)", "config.off", None),
        ("def load(module, path): open(path)", "True", None),  # no setting asks for it
        ("def load(module, path=None): open(path)", "config.n", None),
        ("def load(module, path): open(path or '.')", "config.n", None),
        ("def load(module, path: str | None): open(path)", "config.n", None),
    ],
)
def test_a_setting_that_a_branch_needs_must_not_be_null(function, condition, said):
    tree = ast.parse(f"class C:\n    def __init__(self, config):\n        if {condition}: load(1, config.off)").body[0]
    given = {"config": OmegaConf.create(CONFIG)}
    found = refused_by([tree], ("__init__",), given, {"config": ""}, lambda name: ast.parse(function).body[0])
    assert [one.said for one in found] == ([said] if said else [])
