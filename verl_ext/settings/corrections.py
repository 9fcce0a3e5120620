"""The settings of each correction, `stability.NAME`: one dataclass a method, validated when built."""

import math
from dataclasses import dataclass

from verl_ext.errors import ConfigError, require_choice


def check_band(low: float, high: float, prefix: str, names: tuple[str, str] = ("alpha", "beta")) -> None:
    """Raise ConfigError unless 0 <= low < high; `prefix` is the settings' place in the config."""
    if not low >= 0:
        raise ConfigError(f"{prefix}.{names[0]}={low:g} must be at least 0: it bounds a probability ratio")
    if not low < high:
        raise ConfigError(f"{prefix}.{names[0]}={low:g} must be below {prefix}.{names[1]}={high:g}")


def _check_positive(value: float, setting: str) -> None:
    if not 0 < value < math.inf:
        raise ConfigError(f"{setting}={value:g} must be above 0 and finite")


@dataclass
class Tis:
    """The cap C on the mismatch ratio k."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_positive(self.cap, "stability.tis.cap")


@dataclass
class TisSequence:
    """The cap C on the product of a sequence's k."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        _check_positive(self.cap, "stability.tis_sequence.cap")


@dataclass
class IcePop:
    """Bounds of the mismatch ratio k inside which a token keeps its weight, both inclusive."""

    alpha: float = 0.5
    beta: float = 5.0

    def __post_init__(self) -> None:
        check_band(self.alpha, self.beta, "stability.icepop")


@dataclass
class KPop:
    """The largest binary KL between the engines, in nats, at which a token keeps its weight."""

    phi: float = 0.1

    def __post_init__(self) -> None:
        _check_positive(self.phi, "stability.kpop.phi")


@dataclass
class Mis:
    """The product of a sequence's k past which it is dropped; kept tokens weigh the product (`ratio`) or 1 (`one`)."""

    cap: float = 2.0
    weight: str = "ratio"

    def __post_init__(self) -> None:
        _check_positive(self.cap, "stability.mis.cap")
        require_choice("stability.mis.weight", self.weight, ("ratio", "one"))


@dataclass
class GeoMask:
    """Bounds of the geometric mean of a sequence's k, both inclusive (NeMo-RL's seq-mask-tis documents these)."""

    low: float = 0.999
    high: float = 1.002

    def __post_init__(self) -> None:
        check_band(self.low, self.high, "stability.geo_mask", ("low", "high"))


@dataclass
class Opsm:
    """Mean of l_infer - l_theta, in nats a token, past which a sequence of negative advantage is dropped.

    The paper gives no value; a report finds 0.05 to 0.2 reasonable (Trinity-RFT PR 420).
    """

    delta: float | None = None

    def __post_init__(self) -> None:
        if self.delta is not None and not math.isfinite(self.delta):
            raise ConfigError(f"stability.opsm.delta={self.delta:g} must be a finite number of nats a token")


METHODS: dict[str, type] = {
    "tis": Tis,
    "tis_sequence": TisSequence,
    "icepop": IcePop,
    "kpop": KPop,
    "mis": Mis,
    "geo_mask": GeoMask,
    "opsm": Opsm,
}
