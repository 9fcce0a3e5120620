"""Score centering takes the whole drift out, or the launch refuses it: by the exact expectation of the gradient.

A batch of two trajectories of two tokens over a vocabulary of three has 81 outcomes. Each goes through what a run
does with it: weights, filters and the loss's masks as the trainer makes them, the workers' reader of the sampler's
top tokens, and the workers' loss around verl's. The advantages do not depend on the tokens, so the mean of the gradient
under the sampler is drift and nothing else.
"""

from itertools import product

import pytest
import torch
from tensordict import TensorDict
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu
from verl.workers.config import PolicyLossConfig

from tests.support.micro_batches import nested
from tests.support.problems import check_run
from verl_ext.base.errors import ConfigError
from verl_ext.base.names import TOP_TOKEN_IDS, TOP_TOKEN_LOG_PROBS
from verl_ext.core.corrections import CORRECTIONS
from verl_ext.core.filters import BATCH_FILTERS, FilterBatch
from verl_ext.core.measure import gather
from verl_ext.core.tokens import Lag, Tokens
from verl_ext.features.stability import stability_config
from verl_ext.features.table import loss_settings, read_features
from verl_ext.trainer.step import leave_out
from verl_ext.workers.top_tokens import TopTokenReader
from verl_ext.workers.worker_loss import LossSettings, build_worker_loss

B, T, V = 2, 2, 3
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
CENTERED = (
    "stability=score_centering",
    f"{ROLLOUT}.name=vllm",
    "data.train_batch_size=2",
    f"{ACTOR}.ppo_mini_batch_size=2",
    "stability.router_agreement=true",
    "trainer.v1.trainer_mode=separate_async",
)
UNCENTERED = "stability.score_centering=false"
# A filter's settings with which it drops some of the tokens here, and not all.
FILTERS = {
    "low_agreement": "{threshold: 0.5}",
    "low_probability": "{threshold: 0.2}",
    "off_policy_negative": "{delta: 0.1}",
    "too_stale": "{versions: 1}",
}
# Settings with which a correction weighs some of the tokens here otherwise than others.
SETTINGS = {
    "tis": ("stability.tis.cap=1.2",),
    "icepop": ("stability.icepop.alpha=0.8", "stability.icepop.beta=1.4"),
    "kpop": ("stability.kpop.phi=0.02",),
    "geo_mask": ("stability.geo_mask.low=0.9", "stability.geo_mask.high=1.1"),
    "opsm": ("stability.opsm.delta=0.1",),
}
TOKEN_WEIGHTS = {name for name, method in CORRECTIONS.items() if not (method.in_update or method.per_sequence)}
REFUSED = {
    **{
        name: (f"stability.correction={name}", *SETTINGS.get(name, ()))
        for name in sorted(set(CORRECTIONS) - TOKEN_WEIGHTS)
    },
    **{f"filter {name}": (f"stability.filters.{name}={FILTERS.get(name, '{}')}",) for name in BATCH_FILTERS},
    "kept": ("stability.correction=icepop", *SETTINGS["icepop"], "stability.denominator=kept"),
    "rollout_is=token": (f"{CORRECTION}.rollout_is=token",),
    "rollout_is=sequence": (f"{CORRECTION}.rollout_is=sequence",),
    "rollout_rs": (f"{CORRECTION}.rollout_rs=token_k1", f"{CORRECTION}.rollout_rs_threshold=0.7_1.4"),
    "two steps": (f"{ACTOR}.ppo_mini_batch_size=1",),
    "two epochs": (f"{ACTOR}.ppo_epochs=2",),
}
ALLOWED = {"filter zero_variance", "filter too_stale", "filter low_agreement"}
for name in ALLOWED:
    REFUSED.pop(name)


class Engine:
    """Calls as verl's: with the logits of each token, and with what came of them."""

    def __init__(self, logits):
        self.logits = logits

    def forward_backward_batch(self, data, loss_function, forward_only=False):
        offsets, found = data["input_ids"].offsets(), {}
        if tu.get_non_tensor_data(data, "distillation_use_topk", default=False):
            found = loss_function(student_logits=self.logits[None], data=data)
        output = {name: torch.nested.nested_tensor_from_jagged(value[0], offsets) for name, value in found.items()}
        if "log_probs" not in output:  # verl's own, of the token that follows
            rows = torch.arange(len(self.logits))
            l_own = self.logits.log_softmax(1)[rows, data["input_ids"].values().roll(-1)]
            output["log_probs"] = torch.nested.nested_tensor_from_jagged(l_own, offsets)
        loss, _ = loss_function(model_output=output, data=data, dp_group=None)
        return loss


class Drift:
    """The setting of a run, and the mean of its update's gradient under the sampler."""

    def __init__(self, config, actor_config):
        self.config, self.stability = config, stability_config(config.stability)
        generator = torch.Generator().manual_seed(3)
        # The logits of a trajectory's prompt token and of its first response token predict the response.
        self.logits = torch.randn(B, T + 1, V, generator=generator)
        other = self.logits[:, :T] + 0.5 * torch.randn(B, T, V, generator=generator)
        self.log_q, self.log_p = other.log_softmax(-1), self.logits[:, :T].log_softmax(-1)
        self.advantages = torch.tensor([[1.3, 1.3], [-0.7, -0.7]])
        settings = LossSettings.from_dict(loss_settings(read_features(config, self.stability)))
        loss = PolicyLossConfig(loss_mode="vanilla")
        self.loss, _ = build_worker_loss(actor_config(loss, loss_agg_mode="token-mean"), settings)
        self.use = settings.top_tokens

    def mean(self):
        """[B, T, V], of the gradient with respect to the logits."""
        total = torch.zeros(B, T, V, dtype=torch.float64)
        for outcome in product(range(V), repeat=B * T):
            tokens = torch.tensor(outcome).view(B, T)
            log_q = self.log_q.gather(-1, tokens[..., None])[..., 0]
            total += log_q.double().sum().exp() * self._gradient(tokens, log_q).double()
        return total

    def _gradient(self, sampled, l_infer):
        l_old = self.log_p.gather(-1, sampled[..., None])[..., 0]
        mask, fields = self._trainers(sampled, l_infer, l_old)
        if not mask.any():
            return torch.zeros(B, T, V)
        logits = self.logits.clone().requires_grad_()
        fields |= {
            "prompts": torch.zeros(B, 1, dtype=torch.long),
            "responses": sampled,
            "input_ids": torch.cat([torch.zeros(B, 1, dtype=torch.long), sampled], 1),
            "response_mask": mask.long(),
            "old_log_probs": l_old,
            "rollout_log_probs": l_infer,
            "advantages": self.advantages,
            TOP_TOKEN_IDS: torch.arange(V).expand(B, T, V).int(),
            TOP_TOKEN_LOG_PROBS: self.log_q,
        }
        data = TensorDict({name: nested(list(value)) for name, value in fields.items()}, batch_size=B)
        tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=int(mask.sum()), global_batch_size=B)
        engine = Engine(logits.flatten(0, 1))
        reader = TopTokenReader(engine)
        reader.use = self.use or reader.use
        loss = engine.forward_backward_batch(data, self.loss)
        return torch.autograd.grad(loss, logits)[0][:, :T]

    def _trainers(self, sampled, l_infer, l_old):
        """[B, T] mask of what is left, and fields: what the trainer makes of the batch."""
        ones = torch.ones(B, T, dtype=torch.bool)
        agreement = torch.tensor([1.0, 0.2, 0.9, 0.8])
        versions = torch.tensor([0, 2])
        lag = Lag(newest=versions, oldest=versions)
        tokens = Tokens.from_padded(l_infer, l_old, ones)
        tokens = Tokens(tokens.l_infer, tokens.l_old, tokens.mask, tokens.offsets, agreement=agreement, lag=lag)
        weight, _ = gather(tokens, self.stability.corrections())
        fields = {} if weight is None else {"rollout_is_weights": weight.view(B, T)}
        batch = FilterBatch(
            tokens,
            keys=["a_0_0", "a_1_0"],
            rewards_B=torch.tensor([1.0, 0.0]),
            advantages_N=self.advantages.flatten(),
            responses_N=sampled.flatten(),
            max_response_length=T,
            eos_ids=frozenset({0}),
            decode=lambda ids: "".join("aab"[min(i, 2)] for i in ids),
            encode=lambda text: [{"a": 0, "b": 2}[letter] for letter in text],
        )
        mask = leave_out(batch, weight, self.stability).keep_N.view(B, T)
        ours = self.config.algorithm.rollout_correction
        if ours.rollout_is or ours.rollout_rs:
            given = {
                name: ours[name]
                for name in ("rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold")
            }
            found, kept, _ = compute_rollout_correction_and_rejection_mask(l_old, l_infer, mask.float(), **given)
            fields |= {} if found is None else {"rollout_is_weights": found.batch["rollout_is_weights"]}
            mask = kept.bool()
        return mask, fields


@pytest.fixture
def drift(compose, actor_config):
    """drift(override, ..., checked=True) -> the largest entry of the mean gradient."""

    def run(*overrides, checked=True):
        config = compose(*CENTERED, *overrides)
        if checked:
            check_run(read_features(config, stability_config(config.stability), read_model=False))
        return Drift(config, actor_config).mean().abs().max().item()

    return run


@pytest.mark.parametrize("names", [(), ("tis",), ("icepop",), ("kpop",)])
def test_of_token_weights_no_drift_is_left(names, drift):
    settings = [override for name in names for override in SETTINGS[name]]
    overrides = (f"stability.correction=[{','.join(names)}]" if names else "stability.correction=none", *settings)
    assert drift(*overrides, UNCENTERED) > 1e-2
    assert drift(*overrides) < 1e-6


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_a_filter_that_does_not_see_the_tokens_leaves_no_drift(name, drift):
    filters = f"stability.filters.{name.removeprefix('filter ')}={FILTERS.get(name.removeprefix('filter '), '{}')}"
    assert drift(filters, UNCENTERED) > 1e-2
    assert drift(filters) < 1e-6


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_mean_does_not_know_of_is_refused(name, drift):
    with pytest.raises(ConfigError, match=r"stability\.score_centering=true") as error:
        drift(*REFUSED[name])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name", ["geo_mask", "filter overlong", "filter low_probability", "kept", "rollout_is=token", "rollout_rs"]
)
def test_what_is_refused_would_leave_drift(name, drift):
    assert drift(*REFUSED[name], checked=False) > 1e-3
