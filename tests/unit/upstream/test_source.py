"""A made-up package, read without being imported."""

import pytest

from verl_ext.upstream.source import Source, mentioned, parameters

FILES = {
    "__init__.py": (
        "raise RuntimeError('imported')\n"
        "from . import parts\n"
        "from .parts import *\n"
        "from .parts.deep import Deep as Renamed\n"
    ),
    "parts/__init__.py": "from .deep import Deep\nfrom torch import nn\n",
    "parts/deep.py": (
        "from pkg.base import Base\n"
        "if True:\n    NUMBER = 1\n"
        "try:\n    import fast\nexcept ImportError:\n    fast = None\n"
        "class Deep(Base):\n"
        "    kind: str = 'deep'\n"
        "    def __init__(self, size, *more, colour=None, **others): self.engine = size\n"
        "    async def own(self, a, /, b): return await self.inherited(a, key='text', other=b)\n"
    ),
    "base.py": "class Base:\n    def inherited(self, a): ...\n",
}


@pytest.fixture
def source(tmp_path):
    for name, text in FILES.items():
        file = tmp_path / "pkg" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return Source(tmp_path / "pkg")


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("pkg.parts.deep.Deep", "size, *more, colour, **others"),
        ("pkg.parts.deep.Deep.own", "self, a, b"),
        ("pkg.parts.Deep.own", "self, a, b"),
        ("pkg.Deep.own", "self, a, b"),
        ("pkg.Renamed.inherited", "self, a"),
        ("pkg.Deep.kind", ""),
        ("pkg.parts.deep.NUMBER", ""),
        ("pkg.parts.deep.fast", ""),
        ("pkg.parts.nn", ""),
        ("pkg.parts", ""),
        ("pkg", ""),
    ],
)
def test_what_is_there_and_what_it_takes(source, name, taken):
    assert parameters(source.find(name)) == taken


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pkg.parts.deep.Shallow", "pkg.parts.deep.Shallow is missing"),
        ("pkg.Deep.gone", "pkg.Deep.gone is missing"),
        ("pkg.parts.gone.Deep", "pkg.parts.gone is missing"),
        ("pkg.parts.deep.NUMBER.real", "pkg.parts.deep.NUMBER is no class"),
        ("other.Deep", "other is missing"),
    ],
)
def test_what_is_missing_is_named(source, name, said):
    with pytest.raises(LookupError) as found:
        source.find(name)
    assert found.value.args == (said,)


def test_what_a_body_names(source):
    assert {"inherited", "key", "text", "b"} <= mentioned(source.find("pkg.Deep.own"))
    assert "engine" in mentioned(source.find("pkg.Deep")) and "gone" not in mentioned(source.find("pkg.Deep"))
    assert mentioned(None) == set()
