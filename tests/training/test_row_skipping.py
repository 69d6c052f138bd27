"""Rows that cannot move the weights are not computed, and the loss and its gradients equal TRL's."""

from contextlib import contextmanager

import pytest
import torch
from trl import GRPOTrainer

from gvpo_trl.training.row_skipping import fingerprint
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
    """Yield a list of the arguments of each call of the model."""
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


def test_old_logprobs_of_skipped_rows_do_not_reach_the_ratio(tmp_path):
    script = [[finish(2, 0)], [finish(0, 2)], TIED, TIED]
    trainer = make_trainer(tmp_path, script, steps_per_generation=2, gradient_accumulation_steps=1)
    trainer.model.train()
    batch = trainer.one_batch()
    skipped = ~batch["advantages"].ne(0).any(dim=1)
    assert skipped.tolist() == [False, False, True, True] * 2
    overflowing = batch["old_per_token_logps"].masked_fill(skipped.unsqueeze(1), -200.0)
    batch["old_per_token_logps"] = overflowing
    loss, gradients = _gradients(trainer, batch, _ours(trainer))
    assert loss.isfinite()
    assert all(gradient.isfinite().all() for gradient in gradients.values())


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


def test_a_trl_whose_loss_is_not_known_skips_no_row(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("gvpo_trl.trainer.KNOWN_LOSSES", {"another"})
    trainer = make_trainer(tmp_path, [[finish(2, 0)], [finish(0, 2)], TIED, TIED])
    assert "no row is skipped" in caplog.text
    with _calls(trainer) as seen:
        trainer._compute_loss(trainer.model, trainer.one_batch())
    assert [len(call["input_ids"]) for call in seen] == [4]


def _loss():
    def loss(model):
        return model * 2

    return loss


def _loss_with_words():
    def loss(model):
        """Say something."""
        # and more
        return (  # in another layout
            model * 2
        )

    return loss


def _loss_with_a_term():
    def loss(model):
        return model * 2 + 1

    return loss


def test_a_fingerprint_changes_with_the_code_and_not_with_its_words():
    assert fingerprint([_loss()]) == fingerprint([_loss_with_words()])
    assert fingerprint([_loss()]) != fingerprint([_loss_with_a_term()])
    assert fingerprint([_loss(), _loss()]) != fingerprint([_loss()])
    assert fingerprint([len]) is None, "a function without a source has no fingerprint"
