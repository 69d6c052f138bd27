"""Turns are sampled with the trainer's settings and no others."""

import logging
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig

from gvpo_trl import GVPOTrainer
from gvpo_trl.generation.sampling import ClosedBlock
from gvpo_trl.generation.transformers import TransformersGenerate
from gvpo_trl.generation.vllm import EngineSource, Sampling, engine_context_length
from gvpo_trl.rollout.types import TurnRequest
from tests.support.tiny import tiny_model, tiny_tokenizer
from tests.support.training import ScriptedTrainer, finish, make_trainer, tasks

PROMPT = [5 + (7 * n) % 200 for n in range(20)]
REQUESTS = [TurnRequest(trajectory=row, ids=PROMPT, max_new_tokens=1) for row in range(64)]


def sampled(own: dict, **ours) -> list:
    """Sample one token for each of 64 rows from a model whose own generation configuration is `own`."""
    torch.manual_seed(0)
    model = tiny_model(tiny_tokenizer()).eval()
    for name, value in own.items():
        setattr(model.generation_config, name, value)
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} | ours
    turns = TransformersGenerate(model, GenerationConfig(**settings), [2], 0)(REQUESTS)
    restored = {name: getattr(model.generation_config, name) for name in own}
    assert restored == own, "the model's own configuration is restored"
    return turns


@pytest.mark.parametrize(
    "own", [{"min_p": 0.99}, {"typical_p": 0.01}, {"repetition_penalty": 50.0}, {"top_k": 1}, {"epsilon_cutoff": 0.9}]
)
def test_what_the_models_own_configuration_adds_is_switched_off_and_named(own, caplog):
    logging.Logger.warning_once.cache_clear()
    plain, other = sampled({}, min_p=1e-3), sampled(own, min_p=1e-3)
    assert [turn.ids for turn in other] == [turn.ids for turn in plain]
    assert len({turn.ids[0] for turn in other}) > 10
    (name,) = own
    assert f"{name}=" in caplog.text


def test_a_configuration_on_an_adapters_wrapper_is_switched_off_as_well():
    adapter = LoraConfig(r=4, task_type="CAUSAL_LM", target_modules="all-linear")
    model = get_peft_model(tiny_model(tiny_tokenizer()), adapter).eval()
    own = [GenerationConfig(min_p=0.99, do_sample=True), model.get_base_model().generation_config]
    model.generation_config = own[0]
    turns = TransformersGenerate(model, GenerationConfig(do_sample=True, top_k=0), [2], 0)(REQUESTS)
    assert len({turn.ids[0] for turn in turns}) > 10
    assert [model.generation_config, model.get_base_model().generation_config] == own


def test_settings_that_change_nothing_are_not_worth_a_warning(caplog):
    logging.Logger.warning_once.cache_clear()
    sampled({"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0})
    assert "generation_config" not in caplog.text


def test_recorded_log_probabilities_are_those_of_our_distribution():
    (own_value,) = {turn.logprobs[0] for turn in sampled({"min_p": 0.99}, top_k=1)}
    assert own_value == 0.0, "only one token is left, with probability 1"
    probabilities = {turn.ids[0]: turn.logprobs[0] for turn in sampled({"min_p": 0.99})}
    model = tiny_model(tiny_tokenizer()).eval()
    with torch.no_grad():
        scores = model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(dim=-1)
    for token, logprob in probabilities.items():
        assert logprob == pytest.approx(scores[token].item(), abs=1e-4)


def test_without_a_cache_every_token_is_sampled_with_the_whole_history(tmp_path):
    trainer = make_trainer(tmp_path, generation_kwargs={"use_cache": False})
    requests = [TurnRequest(trajectory=row, ids=ids, max_new_tokens=8) for row, ids in enumerate((PROMPT, PROMPT[:9]))]
    with trainer.generation_session() as generate:
        turns = generate(requests)
    for request, turn in zip(requests, turns, strict=True):
        with torch.no_grad():
            scores = trainer.model(torch.tensor([request.ids + turn.ids])).logits[0, len(request.ids) - 1 : -1]
        expected = scores.log_softmax(dim=-1)[range(len(turn.ids)), turn.ids]
        assert turn.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_dropout_is_off_while_turns_are_sampled(tmp_path):
    adapter = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    trainer = make_trainer(tmp_path, peft_config=adapter, generation_kwargs={"do_sample": False})
    trainer.model.train()
    odd = next(module for module in trainer.model.modules() if isinstance(module, torch.nn.Dropout))
    odd.eval()
    modes = [module.training for module in trainer.model.modules()]
    requests = [TurnRequest(trajectory=row, ids=PROMPT, max_new_tokens=12) for row in range(2)]
    with trainer.generation_session() as generate:
        first, second = generate(requests)
    with trainer.generation_session() as generate:
        third, _ = generate(requests)
    assert first.ids == second.ids == third.ids
    assert [module.training for module in trainer.model.modules()] == modes


def test_temperature_zero_is_greedy_in_an_evaluation(tmp_path):
    trainer = make_trainer(tmp_path, temperature=0)
    assert trainer.args.temperature == 0
    requests = [TurnRequest(trajectory=row, ids=PROMPT, max_new_tokens=12) for row in range(4)]
    with trainer.generation_session() as generate:
        turns = generate(requests)
    assert len({tuple(turn.ids) for turn in turns}) == 1
    with torch.no_grad():
        best = trainer.model(torch.tensor([PROMPT])).logits[0, -1].argmax().item()
    assert turns[0].ids[0] == best
    metrics = make_trainer(tmp_path, temperature=0, max_turns=1, max_turn_length=5, num_generations_eval=1).evaluate(
        trainer.train_dataset
    )
    assert torch.tensor(metrics["eval_loss"]).isfinite()


def test_minus_one_is_no_limit_of_top_k_as_with_vllm():
    assert [turn.ids for turn in sampled({}, top_k=-1)] == [turn.ids for turn in sampled({})]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"generation_kwargs": {"do_sample": False}},
        {"top_k": 1},
        {"generation_kwargs": {"top_k": 1}},
        {"min_p": 1.0},
    ],
)
def test_greedy_sampling_is_refused_in_training(tmp_path, options):
    trainer = make_trainer(tmp_path, **options)
    with pytest.raises(ValueError, match=r"same turns in every trajectory.*temperature above 0"):
        trainer.train()


def vllm_engine(**changes):
    """Return a stand-in for TRL's `VLLMGeneration` that lists its weight syncs in `synced`."""
    engine = {
        "mode": "colocate",
        "llm": SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=500))),
        "vllm_client": SimpleNamespace(get_server_info=lambda: {"model_config": {"max_model_len": 300}}),
        "tensor_parallel_size": 1,
        "structured_outputs_regex": None,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "logprobs": 0,
        "max_completion_length": 50,
        "generation_kwargs": {},
        "synced": [],
    }
    engine = SimpleNamespace(**(engine | changes))
    engine.sync_weights = lambda: engine.synced.append(1)
    engine.enable_sleep_mode = False
    return engine


def test_temperature_zero_reaches_vllm():
    place = {"process": 0, "local_process": 0, "processes": 1}
    sampling = Sampling(EngineSource(engine=vllm_engine(), end_ids=[2], greedy=True, **place))
    assert sampling(REQUESTS[0])["temperature"] == 0.0


@pytest.mark.parametrize(("mode", "limit"), [("colocate", 500), ("server", 300)])
@pytest.mark.parametrize("configured", [None, 100, 4000])
def test_what_vllm_takes_bounds_a_trajectory(tmp_path, mode, limit, configured):
    engine = vllm_engine(mode=mode)
    assert engine_context_length(engine, is_main=True) == limit
    trainer = make_trainer(tmp_path, max_context_length=configured)
    trainer.use_vllm, trainer.vllm_generation = True, engine
    assert trainer.rollout_context().max_context_length == min(limit, configured or limit)


def test_vllm_has_the_weights_of_now_before_the_first_request(tmp_path):
    trainer, engine = make_trainer(tmp_path), vllm_engine()
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, engine, -1
    trainer.script = None
    for _ in range(2):
        trainer.generation_session()
    assert engine.synced == [1], "the weights are synchronized once per step"
    trainer.state.global_step = 1
    trainer.generation_session()
    assert engine.synced == [1, 1]


class Reloading(ScriptedTrainer):
    """Notes how often vLLM had been given the weights when each rollout begins."""

    def generation_session(self, end_ids=None):
        GVPOTrainer.generation_session(self, end_ids)
        self.__dict__.setdefault("given", []).append(len(self.vllm_generation.synced))
        return super().generation_session(end_ids)


def test_vllm_gets_the_weights_anew_where_the_number_of_steps_does_not_tell_that_they_changed(tmp_path):
    """A second training counts its steps from 0 again, and the best checkpoint is loaded after the last step."""
    trainer = make_trainer(
        tmp_path,
        [[finish(1, 0)], [finish(0, 1)]],
        trainer_class=Reloading,
        eval_dataset=tasks(1),
        eval_strategy="steps",
        eval_steps=1,
        num_generations_eval=1,
    )
    trainer.use_vllm, trainer.vllm_generation, trainer._last_loaded_step = True, vllm_engine(), -1
    trainer.vllm_importance_sampling_correction = False
    trainer.train()
    trainer.evaluate()
    assert trainer.given == [1, 2, 3], "for a step, for the evaluation after it, and for the one after the training"
    trainer.train()
    assert trainer.given[3:] == [4, 5]


class CountingDecoder:
    """A byte tokenizer that counts the ids it decodes."""

    def __init__(self):
        self.decoded = 0

    def decode(self, ids, **options):
        self.decoded += len(ids)
        return "".join(map(chr, ids))

    def batch_decode(self, rows):
        return [self.decode(row) for row in rows]


@pytest.mark.parametrize("text", ["`", "```\n", "~", "x `y` "])
def test_the_work_of_looking_for_a_closed_block_grows_with_the_turn(text):
    def work(length):
        tokenizer = CountingDecoder()
        criterion = ClosedBlock(tokenizer, prompt_length=0)
        ids = torch.tensor([[ord(letter) for letter in (text * length)[:length]]])
        for end in range(1, length + 1):
            criterion(ids[:, :end], None)
        return tokenizer.decoded

    assert work(4000) < 2.5 * work(2000)
