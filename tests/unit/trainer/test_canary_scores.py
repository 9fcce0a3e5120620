"""The canary's tokens on verl: the choice of tokens, and that both engines score the same ones."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict
from verl.utils.tensordict_utils import list_of_dict_to_tensordict

from tests.support.store import Rows, nested
from verl_ext.base.errors import ConfigError, HookError
from verl_ext.base.methods import build
from verl_ext.features.settings import SyncCanarySettings
from verl_ext.trainer import canary_scores
from verl_ext.trainer.canary_scores import PARTITION, CanaryTrajectories, has_other_inputs
from verl_ext.trainer.sync_canary import CanaryRun

PROMPTS = [[7, 8], [9], [5, 6, 7], [4]]
RESPONSES = [list(range(20)), [4, 5], [6], [8, 9, 10, 11]]
MASK = [[1] * 20, [1, 1], [1], [1, 0, 1, 1]]  # the last has a tool's token in it


def value(ids):
    """Returns the score of each token on every engine here: its id and its place, a hundredth of each."""
    return [-(token + 0.01 * place) for place, token in enumerate(ids)]


class Workers:
    """The training engine, which returns the next token's score at each token's place."""

    def __init__(self, store):
        self._dispatch_info = {"actor": [0]}
        self.store, self.moved, self.asked = store, 0.0, []

    def compute_log_prob(self, batch):
        self.asked.append(batch)
        for key in batch.keys:
            row = self.store.of(batch.partition_id)[key]
            ids = [*row["prompts"].tolist(), *row["responses"].tolist()]
            row["log_probs"] = torch.tensor([*value(ids)[1:], 0.0]) + self.moved * torch.arange(len(ids))


class Server:
    """verl's server, which returns the log-probabilities of all prompt tokens but the first, and a dummy."""

    def __init__(self, moved=0.0):
        self.moved, self.generate = moved, SimpleNamespace(remote=self.answer)

    def answer(self, prompt_ids, sampling_params, request_id):
        assert sampling_params == {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0}
        rows = [[each + self.moved * place] for place, each in enumerate(value(prompt_ids)[1:])]
        return SimpleNamespace(extra_fields={"prompt_logprobs": [*rows, [0.0]]})


@pytest.fixture
def store(monkeypatch):
    store = Rows({}).install(monkeypatch)
    monkeypatch.setattr(canary_scores, "tq", store)
    monkeypatch.setattr("ray.get", lambda answers, timeout: answers)
    return store


def put(store, keys, prompts, responses, mask, padding=()):
    sampled = [value([*prompt, *response])[len(prompt) :] for prompt, response in zip(prompts, responses, strict=True)]
    fields = {
        "prompts": nested(*prompts),
        "responses": nested(*responses),
        "response_mask": nested(*mask),
        "rollout_log_probs": nested(*sampled),
    }
    tags = [{"is_padding": number in padding} for number in range(len(keys))]
    return store.kv_batch_put(keys, "train", TensorDict(fields, batch_size=len(keys)), tags)


@pytest.fixture
def batch(store):
    """One answer to each of four prompts, the second a padding row."""
    return put(store, [f"u{number}_0_0" for number in range(4)], PROMPTS, RESPONSES, MASK, padding=[1])


@pytest.fixture
def groups(store):
    """Three answers to each of five prompts, next to each other; the first two begin alike."""
    keys = [f"u{prompt}_{answer}_0" for prompt in range(5) for answer in range(3)]
    prompts = [[90 + prompt] for prompt in range(5) for _ in range(3)]
    responses = [[1, 2, 3, *[10 * answer // 2] * 9] for _ in range(5) for answer in range(1, 4)]
    return put(store, keys, prompts, responses, [[1] * 12] * 15)


def test_both_engines_score_the_same_tokens(store, batch):
    """The tokens are all but the last of each response, without tool output and padding rows."""
    scores = CanaryTrajectories(batch, 2, multiple=1)
    expected = value([*PROMPTS[0], *RESPONSES[0]])[2:-1]  # of the response [6] nothing is left
    assert scores.l_infer_N.tolist() == pytest.approx(expected)
    workers = Workers(store)
    assert scores.score_in_workers(workers).tolist() == pytest.approx(expected)
    assert [scored.tolist() for scored in scores.score_in_servers([Server(), Server()])] == [
        pytest.approx(expected)
    ] * 2
    (asked,) = workers.asked
    assert asked.partition_id == PARTITION and asked.keys == ["u0_0_0", "u2_0_0"]
    assert not asked.extra_info["calculate_entropy"] and not asked.extra_info["compute_loss"]


def test_a_tools_tokens_are_not_scored(store, batch):
    scores = CanaryTrajectories(batch, 3, multiple=1)
    assert scores.l_infer_N.tolist() == pytest.approx([*value([*PROMPTS[0], *RESPONSES[0]])[2:-1], -8.01, -10.03])
    assert torch.equal(scores.score_in_servers([Server()])[0], scores.score_in_workers(Workers(store)))


def test_the_answers_are_of_as_many_prompts_as_possible(store, groups):
    scores = CanaryTrajectories(groups, 5, multiple=1)
    scores.score_in_workers(workers := Workers(store))
    assert workers.asked[0].keys == [f"u{prompt}_0_0" for prompt in range(5)]
    assert scores.prompt_N.tolist() == [prompt for prompt in range(5) for _ in range(11)]


def test_a_prefix_that_several_answers_share_is_scored_once(store, groups):
    scores = CanaryTrajectories(groups, 15, multiple=1)
    assert len(scores.ids) == 15
    assert [scores.prompt_N.tolist().count(prompt) for prompt in range(5)] == [11 + 8 + 8] * 5
    assert torch.equal(scores.score_in_servers([Server()])[0], scores.score_in_workers(Workers(store)))
    assert torch.equal(scores.l_infer_N, scores.score_in_servers([Server()])[0])


def test_the_ranks_share_them_evenly_or_the_run_stops(store, batch):
    with pytest.raises(HookError, match=r"a multiple of 2 trajectories .* only 3") as error:
        CanaryTrajectories(batch, 3, multiple=2)  # four, and one of the batch's is padding
    assert error.value.fix == ("stability.sync_canary.trajectories=0", "stability.sync_canary.every=1")


def test_of_text_the_other_inputs_are_empty():
    def batch(*inputs):
        return list_of_dict_to_tensordict([{"multi_modal_inputs": each} for each in inputs])

    assert has_other_inputs(batch({}, {"pixel_values": torch.zeros(3)}))
    assert not has_other_inputs(batch({}, {})) and not has_other_inputs(TensorDict({}, batch_size=2))


@pytest.mark.parametrize("comparable", [True, False])
def test_the_first_sync_is_compared_with_the_rollout_itself_where_its_log_probs_are_comparable(
    store, groups, comparable
):
    run, workers = CanaryRun(SyncCanarySettings(5), comparable), Workers(store)
    found = []
    for step, (train, rollout) in enumerate([(0.1, 0.0), (0.2, 0.2)], 1):
        if run.waits:
            run.choose(groups, workers, multiple=1)
        workers.moved = train
        run.after_update(step, workers)
        found.append([(event.step, event.action) for event in run.after_sync(step, [Server(rollout)]).events])
    assert found == ([[(1, "warn")], [(2, "recover")]] if comparable else [[], []])
    assert run.metrics["sync/moved"] > 0


def test_syncs_between_are_not_looked_at(store, groups):
    """The first three syncs are checked in any case."""
    run, workers = CanaryRun(SyncCanarySettings(5, every=4), comparable=True), Workers(store)
    run.choose(groups, workers, multiple=1)
    checked = []
    for step in range(1, 10):
        run.after_update(step, workers)
        run.after_sync(step, [Server()])
        checked += [step] if run.metrics else []
    assert checked == [1, 2, 3, 4, 8] and len(workers.asked) == 1 + len(checked)


def test_the_canary_waits_for_a_batch_with_enough_prompts(store, batch, capsys):
    """Filters may leave few. What such a batch sampled is older than the weights that are scored first."""
    run, workers = CanaryRun(SyncCanarySettings(4), True), Workers(store)
    for _ in range(2):
        run.choose(batch, workers, multiple=1)  # one of three answers has a single token, which is left out as the last
        run.after_update(1, workers)
        assert run.waits and not run.after_sync(1, [Server()]).events and run.metrics == {}
    assert capsys.readouterr().out.count("on; this one has answers to 2") == 1
    assert not store.of(PARTITION)
    four = put(store, [f"v{number}_0_0" for number in range(4)], PROMPTS, [[1, 2, 3]] * 4, [[1] * 3] * 4)
    run.choose(four, workers, multiple=1)
    assert not run.waits and not workers.asked
    for step in (2, 3):
        run.after_update(step, workers)
        run.after_sync(step, [Server()])
    assert run.metrics["sync/moved"] == 0


@pytest.mark.parametrize("trajectories", [1, 3])
def test_fewer_trajectories_than_prompts_that_show_anything_are_refused(trajectories):
    with pytest.raises(ConfigError, match=rf"trajectories={trajectories} must be 0, null for the default, or at least"):
        build(SyncCanarySettings, {"trajectories": trajectories}, "stability.sync_canary")


def test_a_canary_that_is_on_by_default_and_cannot_score_is_off_with_a_reason(store, batch, capsys):
    workers = Workers(store)
    with pytest.raises(HookError):
        CanaryRun(SyncCanarySettings(4), True).choose(batch, workers, multiple=2)
    run = CanaryRun(SyncCanarySettings(4), True, required=False)
    run.choose(batch, workers, multiple=2)
    assert not run.waits
    for step in (1, 2):
        run.after_update(step, workers)
        assert not run.after_sync(step, [Server()]).events and run.metrics == {}
    said = capsys.readouterr().out
    assert said.count("verl_ext: weight syncs are not checked: stability.sync_canary: the workers score") == 1
    assert not workers.asked
