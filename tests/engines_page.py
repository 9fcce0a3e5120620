"""The page of features by engine: `python -m tests.engines_page > docs/engines.md`.

A row is a feature that a user switches on, a column is a training engine with a rollout engine. "refused" comes from
the features' own checks of a config with these engines and the feature on. "whole run" is a run of tests/stack that has
it on, "test" a test with the mark `shows`. `--tests` prints the runs and tests behind each cell instead.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import hydra
import transformers
from omegaconf import DictConfig, OmegaConf

from recipes.make_assets import build_tokenizer
from tests import ROOT
from tests.stack.running import ASYNC_BUFFER
from tests.support import quick_compose
from tests.support.launches import launches
from tests.support.problems import check_run
from verl_ext.base.errors import ConfigError
from verl_ext.base.methods import Method
from verl_ext.core.advantages import ESTIMATORS
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.filters import BATCH_FILTERS
from verl_ext.features.bypass import BYPASS
from verl_ext.features.feature import Need, RunFeatures
from verl_ext.features.losses import BASES, LOSS, LOSSES, UNBIASED, loss_mode, uses_unbiased_kl
from verl_ext.features.settings import BATCH_SKIP, KL_DENOMINATORS, MiniBatchLimits
from verl_ext.features.stability import stability_config
from verl_ext.features.sync_canary import canary_settings
from verl_ext.features.table import read_features
from verl_ext.features.verl_config import (
    MODE,
    MODEL,
    REPLAY,
    ROLLOUT,
    cuts,
    replay_mode,
    rollout_name,
    strategy_of,
)
from verl_ext.guard.rules import ACTIONS
from verl_ext.launch import compose
from verl_ext.probe.overrides import probe_overrides
from verl_ext.routing.engines import ACTOR

HEAD = """# What runs on which engines

Each feature on each pair of training and rollout engines. Nothing here has run on a GPU yet: the whole runs are on CPU
cores, with the [stand-ins](../verl_ext/cpu) that CPU cores need.

| cell | meaning |
|---|---|
| whole run | Ray, both engines and verl's trainer made steps with the feature on ([tests/stack](../tests/stack)) |
| test | a test covers the feature on this engine, without a whole run |
| same code | a whole run of another pair has it; it computes with numbers that each pair delivers in the same form |
| refused | the launch stops, with the reason of this number [below](#why-it-is-refused) |
| not run | the checks accept it, but no run or test has it on this engine |

Most runs train in float32 and sample in bfloat16, because products in bfloat16 take ten times as long on a CPU core
without instructions for them. The rows of a precision count only runs that have it in both engines.

Features that act only on the controller, such as a guard rule or an estimator, have further tests without an engine,
which are not counted here. A guard rule counts if a run has it on its command line, as the runs do that make it fire.

`python -m tests.engines_page > docs/engines.md` generates this page from the features' checks and from the tests, and a
test compares them. With `--tests` it prints the runs and tests behind each cell."""
WHOLE, TEST, SAME, REFUSED, UNTRIED = "whole run", "test", "same code", "refused", "not run"
SHOWS = "shows"  # the mark of a test that covers rows of this page


class Pair(NamedTuple):
    """A column: a training engine, a rollout engine, and the overrides that choose them."""

    train: str
    rollout: str
    overrides: tuple[str, ...]

    @property
    def title(self) -> str:
        names = {"fsdp2": "FSDP2", "megatron": "Megatron", "veomni": "VeOmni", "vllm": "vLLM", "sglang": "SGLang"}
        return f"{names[self.train]}, {names[self.rollout]}"


SEQUENCE_RANKS = {  # settings of Ulysses, and of context parallelism
    "fsdp2": "fsdp_config.ulysses_sequence_parallel_size",
    "megatron": "megatron.context_parallel_size",
    "veomni": "veomni.ulysses_parallel_size",
}
PAIRS = (
    Pair("fsdp2", "vllm", ("recipe=cpu_smoke",)),
    Pair("fsdp2", "sglang", ("recipe=cpu_sglang",)),
    Pair("megatron", "vllm", ("recipe=cpu_megatron",)),
    Pair("megatron", "sglang", ("recipe=cpu_megatron_sglang",)),
    Pair("veomni", "vllm", ("recipe=cpu_veomni",)),
)
COLUMNS = "".join(f" | {pair.title}" for pair in PAIRS)


class Run(NamedTuple):
    """A composed config.

    Attributes:
        given: the overrides that it was composed of.
        module: what `python -m` runs.
    """

    features: RunFeatures
    given: tuple[str, ...]
    module: str

    @property
    def config(self) -> DictConfig:
        return self.features.config

    @property
    def stability(self) -> Any:
        return self.features.stability

    def has(self, setting: str, value: Any = True) -> bool:
        return OmegaConf.select(self.config, setting) == value


class Row(NamedTuple):
    """One thing that a user switches on.

    Attributes:
        overrides: the overrides that switch it on, and those that it needs.
        is_on: whether a run has it on.
        check: raises ConfigError if it is refused.
        group: its kind, in words; rows of a group with the same cells are one line.
        same_code: it touches no engine, only the numbers that every pair delivers: a run of one pair shows it.
    """

    name: str
    overrides: tuple[str, ...]
    is_on: Callable[[Run], bool]
    check: Callable[[Run], object] = lambda run: check_run(run.features)
    group: str = ""
    same_code: bool = False


def rows(pair: Pair) -> dict[str, list[Row]]:
    """Returns section -> its rows, as a run on these engines switches them on."""
    return {
        "Corrections": list(_corrections()),
        "Policy losses": list(_losses()),
        "Advantages and filters": [*_estimators(), *_filters()],
        "Guard": list(_guard()),
        "Routing": list(_routing()),
        "The sampler's top tokens": list(_top_tokens()),
        "Everything else": list(_others()),
        "Presets of several features": list(_presets()),
        "verl's own": list(_verls(pair)),
    }


ICEPOP = "stability.correction=icepop"
AGREEMENT = "stability.router_agreement=true"
ASYNC = (f"{MODE}=colocate_async", ASYNC_BUFFER)
METRICS = "stability.metrics=true"
KL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type={UNBIASED}")


def _required(method: Method) -> dict[str, Any]:
    """Returns the settings that have no default, each with a value that it can have."""
    return {one.name: one.metadata.get("for example", 1) for one in fields(method.settings) if one.default is MISSING}


def _overrides(method: Method, node: str) -> tuple[str, ...]:
    """Returns the same settings as overrides; `node` is the node that they are in."""
    return tuple(f"{node}.{name}={value}" for name, value in _required(method).items())


def _corrections() -> Iterator[Row]:
    def names(name: str) -> Callable[[Run], bool]:
        return lambda run: name in run.stability.correction_names

    for name, method in CORRECTIONS.items():
        overrides = (f"stability.correction={name}", *_overrides(method, f"stability.{name}"))
        yield Row(f"`{name}`", overrides, names(name), same_code=True)
    kept = "denominator=kept"
    yield Row(
        f"`{kept}`", (ICEPOP, f"stability.{kept}"), lambda run: run.stability.denominator == "kept", same_code=True
    )


def _losses() -> Iterator[Row]:
    def chooses(name: str, *, corrected: bool) -> Callable[[Run], bool]:
        return lambda run: loss_mode(run.config) == name and (not corrected or bool(run.stability.correction))

    def assumes(policy: str) -> Callable[[Run], bool]:
        return lambda run: uses_unbiased_kl(run.config) and run.stability.kl_denominator == policy

    for name, loss in LOSSES.items():
        overrides = (f"{LOSS}.loss_mode={name}", *_overrides(loss, LOSS))
        yield Row(f"`{name}`", overrides, chooses(name, corrected=False), group="ours", same_code=True)
    for name in BASES:
        if name == "geo_mean_weighted":  # what the workers compute for geo_mean
            continue
        overrides = (ICEPOP, f"{LOSS}.loss_mode={name}")
        yield Row(
            f"`{name}`", overrides, chooses(name, corrected=True), group="verl's with a correction", same_code=True
        )
    for policy in KL_DENOMINATORS:
        overrides = (*KL, f"stability.kl_denominator={policy}")
        yield Row(f"l_{policy}", overrides, assumes(policy), group=f"`kl_loss_type={UNBIASED}` over", same_code=True)


def _estimators() -> Iterator[Row]:
    def chooses(name: str) -> Callable[[Run], bool]:
        return lambda run: run.has("algorithm.adv_estimator", name)

    for name, estimator in ESTIMATORS.items():
        overrides = (f"algorithm.adv_estimator={name}", *_overrides(estimator, f"algorithm.{name}"))
        yield Row(f"`{name}`", overrides, chooses(name), group="advantages", same_code=True)


def _filters() -> Iterator[Row]:
    def names(name: str) -> Callable[[Run], bool]:
        return lambda run: any(chosen.name == name for chosen in run.stability.filters)

    for name, method in BATCH_FILTERS.items():
        settings = ",".join(f"{one}:{value}" for one, value in _required(method).items())
        needs = (AGREEMENT,) * method.needs_agreement + ASYNC * method.needs_lag
        overrides = (f"stability.filters={{{name}:{{{settings}}}}}", *needs)
        yield Row(f"`{name}`", overrides, names(name), group="filters", same_code=True)


CONTROLLERS = ("warn", "tighten", "skip", "stop")  # actions that no worker takes part in


def _guard() -> Iterator[Row]:
    def acts(action: str) -> Callable[[Run], bool]:
        return lambda run: any(rule.action == action and rule_given(run, rule.name) for rule in run.stability.rules)

    def limits(name: str) -> Callable[[Run], bool]:
        return lambda run: getattr(run.stability.guard.mini_batch, name) is not None

    yield Row("`batch_skip`", ("stability.batch_skip.threshold=0.1",), lambda run: rule_given(run, BATCH_SKIP))
    for action in ACTIONS:
        rule = f"stability.guard.rules={{gap:{{signal:vllm_kl/k3,above:0.1,action:{action}}}}}"
        yield Row(
            f"`{action}`",
            (ICEPOP, "trainer.save_freq=1", rule),
            acts(action),
            group="a rule's action",
            same_code=action in CONTROLLERS,
        )
    for limit in fields(MiniBatchLimits):
        overrides = (METRICS, f"stability.guard.mini_batch.{limit.name}=0.1")
        yield Row(f"`{limit.name}`", overrides, limits(limit.name), group="limits of `mini_batch`")
    again = "after_update.trajectories"
    overrides = (METRICS, f"stability.guard.{again}=8")
    yield Row(f"`{again}`", overrides, lambda run: run.stability.guard.after_update.trajectories > 0)


def rule_given(run: Run, name: str) -> bool:
    """Checks that the command line has this rule: that of a preset is there in every run, and fires in few."""
    settings = (f"stability.{BATCH_SKIP}.",) if name == BATCH_SKIP else ("stability.guard.rules",)
    return any(one.lstrip("+").startswith(settings) and name in one for one in run.given)


def _routing() -> Iterator[Row]:
    def replays(mode: str, *, compared: bool) -> Callable[[Run], bool]:
        return lambda run: replay_mode(run.config) == mode and (run.stability.router_agreement or not compared)

    share = "stability.router_agreement_share=0.5"
    yield Row("router agreement", (AGREEMENT,), lambda run: run.stability.router_agreement)
    yield Row("router agreement on a share", (AGREEMENT, share), lambda run: run.stability.router_agreement_share < 1)
    for mode in ("R2", "R3"):
        replay = (METRICS, f"{REPLAY}={mode}")
        yield Row(mode, replay, replays(mode, compared=False))
        yield Row(f"{mode} with router agreement", (*replay, AGREEMENT), replays(mode, compared=True))


def _top_tokens() -> Iterator[Row]:
    cut = (f"{ROLLOUT}.top_p=0.9", f"{ROLLOUT}.top_k=32", f"{ROLLOUT}.logprobs_mode=processed_logprobs")
    yield Row("`top_tokens.k`", (METRICS, "stability.top_tokens.k=8"), lambda run: run.stability.top_tokens.k > 0)
    yield Row("sampling by top-p and top-k", (METRICS, *cut), lambda run: cuts(run.config))
    yield Row("score centering", ("stability.score_centering=true",), lambda run: run.stability.score_centering)


def _others() -> Iterator[Row]:
    def sets_cascade(value: str) -> Callable[[Run], bool]:
        return lambda run: run.stability.cascade_attention == value

    def measures_servers(run: Run) -> bool:
        ranks = run.config.trainer.n_gpus_per_node * run.config.trainer.nnodes
        several = ranks > OmegaConf.select(run.config, f"{ROLLOUT}.tensor_model_parallel_size")
        measured = Need.MEASURED_BATCHES in run.features.needs and not run.has(BYPASS)
        return several and measured and run.stability.breakdown

    rescoring, canary = "stability.rescoring.every=1", "stability.sync_canary.trajectories=8"
    dump, rounded = "stability.trajectories.per_step=2", "stability.fake_quantization.format=fp4"
    yield Row("`metrics`", (METRICS,), lambda run: bool(run.features.demands))
    two_servers = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=1")
    yield Row("the gap by server", (METRICS, *two_servers), measures_servers, same_code=True)
    yield Row("rescoring", (f"{MODE}=separate_async", rescoring), lambda run: run.stability.rescoring.every > 0)
    yield Row("sync canary", (canary,), lambda run: (canary_settings(run.features).trajectories or 0) > 0)
    check = "stability.sync_check={}"
    yield Row("sync check", (check,), lambda run: run.stability.sync_check is not None)
    yield Row("trajectories", (dump,), lambda run: run.stability.trajectories.per_step > 0)
    yield Row("fake quantization", (rounded,), lambda run: run.stability.fake_quantization.active)
    yield Row("`float32_head`", ("stability.float32_head=true",), lambda run: run.stability.float32_head)
    for value in ("off", "on"):
        yield Row(f"`cascade_attention={value}`", (f"stability.cascade_attention={value}",), sets_cascade(value))

    def is_probed(run: Run) -> bool:
        return run.module.endswith(".probing")

    yield Row("`verl-ext probe`", (), is_probed, lambda run: probe_overrides(run.config, 16, Path()))


def _presets() -> Iterator[Row]:
    def has(preset: str) -> Callable[[Run], bool]:
        return lambda run: preset in run.given

    named = {*CORRECTIONS, *ESTIMATORS, *(f"{name}_loss" for name in LOSSES), "none", "filters", "score_centering"}
    for name in compose.stability_choices():
        if name not in named:
            yield Row(f"`{name}`", (f"stability={name}",), has(f"stability={name}"), group="`stability=`")


def _verls(pair: Pair) -> Iterator[Row]:
    def has(setting: str, value: Any = True) -> Callable[[Run], bool]:
        return lambda run: run.has(setting, value)

    def computes_in(short: str, dtype: str) -> Callable[[Run], bool]:
        setting, given = f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", short
        if pair.train == "megatron":
            setting, given = f"{ACTOR}.megatron.dtype", dtype
        return lambda run: (
            run.has(f"{ROLLOUT}.dtype", dtype)
            and (OmegaConf.select(run.config, setting, throw_on_missing=False) or "bf16") == given
        )

    for mode in ("sync", "colocate_async", "separate_async"):
        yield Row(f"`{mode}`", (ICEPOP, f"{MODE}={mode}"), has(MODE, mode), group="`trainer_mode`")
    for short, dtype in (("bf16", "bfloat16"), ("fp16", "float16"), ("fp32", "float32")):
        overrides = (f"precision={short}",)
        if pair.train == "megatron":
            overrides = (f"{ACTOR}.megatron.dtype={dtype}", f"{ROLLOUT}.dtype={dtype}")
        yield Row(f"`{short}` in both engines", (ICEPOP, *overrides), computes_in(short, dtype))
    ranks = tuple(f"{MODEL}.{name}" for name in ("lora_rank", "lora.rank"))
    yield Row(
        *("LoRA", (ICEPOP, f"{ranks[pair.train == 'megatron']}=8")),
        lambda run: any(OmegaConf.select(run.config, rank) for rank in ranks),
    )
    for name, setting in (
        ("bypass mode", BYPASS),
        ("several turns", f"{ROLLOUT}.multi_turn.enable"),
        ("packed sequences", f"{MODEL}.use_remove_padding"),
        ("dynamic batches", f"{ACTOR}.use_dynamic_bsz"),
        ("KL to the reference in the loss", f"{ACTOR}.use_kl_loss"),
        ("KL to the reference in the reward", "algorithm.use_kl_in_reward"),
    ):
        yield Row(name, (ICEPOP, f"{setting}=true"), has(setting))
    ranks_of_trainer = "trainer.n_gpus_per_node"
    yield Row("two training ranks", (ICEPOP, f"{ranks_of_trainer}=2"), has(ranks_of_trainer, 2))
    split = f"{ACTOR}.{SEQUENCE_RANKS[pair.train]}"
    yield Row("a sequence over two ranks", (ICEPOP, f"{split}=2"), has(split, 2))


class Cell(NamedTuple):
    """The known state of a row on a pair of engines.

    Attributes:
        reason: the reason of a refusal.
        tests: the tests that cover it.
    """

    word: str
    reason: str = ""
    tests: tuple[str, ...] = ()


def cells() -> dict[str, dict[tuple[str, str], list[Cell]]]:
    """Returns section -> group and name of a row -> its cell for each of PAIRS.

    Raises:
        AssertionError: a row's overrides leave it off, or a test's mark names a row or an engine that does not exist.
    """
    launched, shown, same_code = launches(), marked_tests(), set()
    # Files that every config reads are read once.
    compose._groups_in_defaults = quick_compose.groups_in_defaults
    for reader in (transformers.AutoConfig, transformers.AutoTokenizer):
        reader.from_pretrained = cache(reader.from_pretrained)
    known = {(name, engine) for pair in PAIRS for name in names_of(pair) for engine in pair[:2]}
    assert set(shown) <= known, set(shown) - known
    found: dict[str, dict[tuple[str, str], list[Cell]]] = defaultdict(lambda: defaultdict(list))
    with TemporaryDirectory() as folder, hydra.initialize_config_dir(str(compose.VERL_CONFIGS), version_base=None):
        write_model(Path(folder))
        runs = {launch: composed(launch.overrides, launch.module) for launch in launched}
        for pair in PAIRS:
            of_pair = {launch: run for launch, run in runs.items() if is_of(run, pair)}
            for section, its_rows in rows(pair).items():
                for row in its_rows:
                    whole = dict.fromkeys(launch.test for launch, run in of_pair.items() if row.is_on(run))
                    tests = [test for engine in pair[:2] for test in shown.get((row.name.strip("`"), engine), ())]
                    found[section][row.group, row.name].append(_cell(pair, row, folder, list(whole), tests))
                    if row.same_code:
                        same_code.add((section, row.group, row.name))
    for section, *row in same_code:
        of_row = found[section][tuple(row)]
        if any(cell.word == WHOLE for cell in of_row):
            of_row[:] = [cell._replace(word=SAME) if cell.word == UNTRIED else cell for cell in of_row]
    return found


def names_of(pair: Pair) -> list[str]:
    """Returns the names of the rows, as a mark has them."""
    return [row.name.strip("`") for its_rows in rows(pair).values() for row in its_rows]


def _cell(pair: Pair, row: Row, folder: str, whole: list[str], tests: list[str]) -> Cell:
    if whole:
        return Cell(WHOLE, tests=tuple(whole))
    if reason := refusal(pair, row, folder):
        return Cell(REFUSED, reason)
    return Cell(TEST if tests else UNTRIED, tests=tuple(tests))


def composed(overrides: tuple[str, ...], module: str) -> Run:
    config = quick_compose.compose("ppo_trainer", compose.prepare(overrides))
    return Run(read_features(config, stability_config(config.stability)), overrides, module)


def is_of(run: Run, pair: Pair) -> bool:
    return (strategy_of(run.config), rollout_name(run.config)) == pair[:2]


def refusal(pair: Pair, row: Row, folder: str) -> str:
    """Returns the reason why these engines refuse a feature, without the remedy; "" if they accept it."""
    base = (*pair.overrides, f"assets={folder}", f"{MODEL}.path={folder}", "data.max_response_length=8192")
    try:
        run = composed((*base, *row.overrides), "verl_ext.main_ppo")
        row.check(run)
    except ConfigError as error:
        return " ".join(str(error).partition("; ")[0].split())
    assert is_of(run, pair), pair.title
    assert row.is_on(run) or not row.overrides, f"{row.name}, {pair.title}: {row.overrides} do not switch it on"
    return ""


def write_model(folder: Path) -> None:
    """Writes a config and a tokenizer, which the checks read."""
    transformers.Qwen3MoeConfig(num_experts=8).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def marked_tests() -> dict[tuple[str, str], list[str]]:
    """Returns (name of a row, engine) -> the tests whose mark names both."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        text = file.read_text(encoding="utf-8")
        for node in ast.parse(text).body if f"mark.{SHOWS}" in text else ():
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{SHOWS}":
                    (engine,) = (ast.literal_eval(word.value) for word in mark.keywords)
                    for row in map(ast.literal_eval, mark.args):
                        found[row, engine].append(node.name)
    return found


def page() -> str:
    """Returns the whole page."""
    reasons: dict[str, int] = {}
    sections = [HEAD]
    for section, its_rows in cells().items():
        lines = [f"## {section}\n", f"| {COLUMNS} |", "|---" * (len(PAIRS) + 1) + "|"]
        shown = {row: tuple(_shown(cell, reasons) for cell in found) for row, found in its_rows.items()}
        lines += [f"| {label} | {' | '.join(words)} |" for label, words in joined(shown)]
        sections.append("\n".join(lines))
    notes = "\n".join(f"{number}. {reason}" for reason, number in reasons.items())
    return "\n\n".join([*sections, f"## Why it is refused\n\n{notes}"]) + "\n"


def joined(shown: dict[tuple[str, str], tuple[str, ...]]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields the lines of a table; rows of a group with the same cells are one line."""
    for group, words in dict.fromkeys((group, words) for (group, _), words in shown.items()):
        alike = [name for (of, name), its in shown.items() if (of, its) == (group, words)]
        names = ", ".join(alike)
        yield (f"{group}: {names}" if group else names), words


def _shown(cell: Cell, reasons: dict[str, int]) -> str:
    if not cell.reason:
        return cell.word
    return f"{cell.word} ({reasons.setdefault(cell.reason, len(reasons) + 1)})"


def print_tests() -> None:
    for section, its_rows in cells().items():
        for (group, name), found in its_rows.items():
            for pair, cell in zip(PAIRS, found, strict=True):
                row = f"{section}: {group}{': ' * bool(group)}{name}"
                print(f"{row} | {pair.title} | {cell.word} | {cell.reason or ', '.join(cell.tests)}")


if __name__ == "__main__":
    print_tests() if "--tests" in sys.argv else print(page(), end="")
