"""What cannot move the weights is not computed, and the loss and its gradients stay those of TRL."""

from contextlib import contextmanager

import pytest
import torch
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training import FAIL, finish, make_trainer

SOLVED, PART = [finish(2, 0)], [FAIL, finish(1, 1)]
TIED = [finish(1, 1)]


def _gradients(trainer, batch, compute):
    trainer.model.zero_grad()
    loss = compute(trainer.model, batch)
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in trainer.model.named_parameters()}


def _theirs(trainer):
    return lambda model, batch: GRPOTrainer._compute_loss(trainer, model, batch)


def _ours(trainer):
    return trainer._compute_loss


def _assert_same(trainer, batch):
    want, wanted = _gradients(trainer, batch, _theirs(trainer))
    got, gotten = _gradients(trainer, batch, _ours(trainer))
    assert got.item() == pytest.approx(want.item(), abs=1e-6)
    for name in wanted:
        torch.testing.assert_close(gotten[name], wanted[name], atol=1e-6, rtol=1e-4, msg=name)


@contextmanager
def _calls(trainer):
    """What the model is called with."""
    seen, forward = [], trainer.model.forward

    def recorded(*args, **kwargs):
        seen.append(kwargs)
        return forward(*args, **kwargs)

    trainer.model.forward = recorded
    yield seen
    trainer.model.forward = forward


@pytest.mark.parametrize("loss_type", ["grpo", "dr_grpo", "dapo", "bnpo", "cispo"])
def test_loss_and_gradients_are_trls(tmp_path, loss_type):
    trainer = make_trainer(tmp_path, [SOLVED, PART, TIED, PART], loss_type=loss_type)
    _assert_same(trainer, trainer.one_batch())


@pytest.mark.parametrize("options", [{"entropy_coef": 0.01}, {"top_entropy_quantile": 0.5}])
def test_so_they_are_where_other_terms_move_rows(tmp_path, options):
    trainer = make_trainer(tmp_path, [TIED, PART, TIED, TIED], **options)
    batch = trainer.one_batch()
    _assert_same(trainer, batch)
    with _calls(trainer) as seen:
        trainer._compute_loss(trainer.model, batch)
    assert len(seen[0]["input_ids"]) == 4


def test_a_kl_term_moves_every_row(tmp_path):
    trainer = make_trainer(tmp_path, [TIED, PART, TIED, TIED])
    batch = trainer.one_batch()
    trainer.beta = 0.1
    batch["ref_per_token_logps"] = torch.full(batch["completion_ids"].shape, -2.0)
    _assert_same(trainer, batch)
    with _calls(trainer) as seen:
        trainer._compute_loss(trainer.model, batch)
    assert len(seen[0]["input_ids"]) == 4


def test_old_logprobs_of_observations_do_not_reach_the_ratio(tmp_path):
    trainer = make_trainer(tmp_path, [SOLVED, PART, TIED, PART], steps_per_generation=2, gradient_accumulation_steps=1)
    trainer.model.train()
    batch = trainer.one_batch()
    assert batch["old_per_token_logps"] is not None
    observed = (batch["tool_mask"] * batch["completion_mask"]) == 0
    batch["old_per_token_logps"] = batch["old_per_token_logps"].masked_fill(observed, -200.0)  # exp(200) overflows
    loss, gradients = _gradients(trainer, batch, _ours(trainer))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


def _batch_of_trl(trainer, monkeypatch):
    """The batch with old and reference log-probabilities scored as TRL scores them."""
    with monkeypatch.context() as patch:
        patch.setattr(
            type(trainer), "_get_per_token_logps_and_entropies", GRPOTrainer._get_per_token_logps_and_entropies
        )
        return trainer.one_batch()


@pytest.mark.parametrize("pad_to_multiple_of", [None, 64])
def test_old_and_reference_logprobs_are_trls_on_actions_and_cost_no_others(tmp_path, monkeypatch, pad_to_multiple_of):
    trainer = make_trainer(
        tmp_path,
        [SOLVED, PART, TIED, PART],
        model=tiny_model(tiny_tokenizer()),
        steps_per_generation=2,
        gradient_accumulation_steps=1,
        per_device_train_batch_size=2,
        pad_to_multiple_of=pad_to_multiple_of,
    )
    trainer.beta, trainer.ref_model = 0.1, tiny_model(tiny_tokenizer(), seed=1)
    add_fused_lm_head(trainer.ref_model)
    trainer.script = lambda number, row: [SOLVED, PART, TIED, PART][number]
    want = _batch_of_trl(trainer, monkeypatch)
    with _calls(trainer) as seen:
        got = trainer.one_batch()
    actions = (got["completion_mask"] * got["tool_mask"]).bool()
    assert 0 < actions.sum() < got["completion_mask"].sum()
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        torch.testing.assert_close(got[name][actions], want[name][actions])
        assert not got[name][~actions].any()
    scored = torch.cat([call["labels"] for call in seen]) != -100
    width = actions.shape[1]
    assert len(seen) == 2  # rows come in micro-batches
    assert torch.equal(scored[:, -width:], actions)
    assert not scored[:, :-width].any()
    _, theirs = _gradients(trainer, want, _ours(trainer))
    _, ours = _gradients(trainer, got, _ours(trainer))
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name])


def test_only_actions_are_labels(tmp_path):
    trainer = make_trainer(tmp_path, [SOLVED, PART, TIED, PART])
    batch = trainer.one_batch()
    with _calls(trainer) as seen:
        trainer._compute_loss(trainer.model, batch)
    scored = seen[0]["labels"] != -100
    width = batch["completion_ids"].shape[1]
    rows = batch["advantages"].ne(0).any(dim=1)
    assert torch.equal(scored[:, -width:], (batch["completion_mask"] * batch["tool_mask"]).bool()[rows])
    assert not scored[:, :-width].any()
    assert seen[0]["attention_mask"][:, -width:].sum() > scored.sum()  # observations are read all the same


def test_rows_that_move_nothing_are_left_out(tmp_path):
    trainer = make_trainer(tmp_path, [[finish(2, 0)], [finish(0, 2)], TIED, TIED])
    batch = trainer.one_batch()
    assert batch["advantages"].ne(0).any(dim=1).tolist() == [True, True, False, False]
    with _calls(trainer) as seen:
        _assert_same(trainer, batch)
    assert [len(call["input_ids"]) for call in seen] == [4, 2]


def test_a_micro_batch_that_moves_nothing_runs_no_forward(tmp_path):
    trainer = make_trainer(tmp_path, [TIED] * 4)
    batch = trainer.one_batch()
    with _calls(trainer) as seen:
        _assert_same(trainer, batch)
    assert len(seen) == 1  # TRL's own


def test_momentum_goes_on_where_nothing_is_computed(tmp_path):
    weights = {}
    for skip in (True, False):
        trainer = make_trainer(
            tmp_path / str(skip),
            model=tiny_model(tiny_tokenizer()),
            skip_idle_rows=skip,
            max_steps=3,
            learning_rate=1e-2,
        )
        turns = iter([[SOLVED, PART, TIED, PART], [TIED] * 4, [TIED] * 4])
        scripts = {}

        def script(number, row, scripts=scripts, turns=turns):
            if number == 0:
                scripts["now"] = next(turns)
            return scripts["now"][number]

        trainer.script = script
        trainer.train()
        weights[skip] = [p.detach().clone() for p in trainer.model.parameters()]
    for with_skip, without in zip(weights[True], weights[False], strict=True):
        torch.testing.assert_close(with_skip, without, atol=1e-6, rtol=1e-5)


def test_evaluation_leaves_no_row_out(tmp_path):
    trainer = make_trainer(tmp_path, [TIED] * 4)
    batch = trainer.one_batch()
    trainer.model.eval()
    with _calls(trainer) as seen, torch.no_grad():
        trainer._compute_loss(trainer.model, batch)
    assert len(seen[0]["input_ids"]) == 4
