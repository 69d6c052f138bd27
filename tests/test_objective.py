"""The contracts of the objective, compared with exact fractions and with values computed by hand."""

import random
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gvpo_trl.objective import AGGREGATIONS, SHAPING_MODES, aggregate_loss, outcome_advantages, shape_advantages

NAN = float("nan")


def exact_advantages(rewards: list[Fraction | None], group_size: int) -> list[Fraction | None]:
    """Return the advantages Â as fractions, with `None` for an unscorable row."""
    out: list[Fraction | None] = []
    for start in range(0, len(rewards), group_size):
        group = rewards[start : start + group_size]
        scored = [reward for reward in group if reward is not None]
        mean = sum(scored, Fraction(0)) / len(scored) if scored else None
        out += [None if reward is None else reward - mean for reward in group]
    return out


def exact_shaped(advantage: Fraction | None, action: int, failed: int, penalty: Fraction, mode: str) -> Fraction:
    """Return the shaped advantage of one token, by the table of the paper."""
    if advantage is None or not action:
        return Fraction(0)
    if not failed or mode == "none":
        return advantage
    if advantage == 0:
        return -penalty
    if advantage > 0:
        return Fraction(0)
    return advantage - penalty if mode == "additive" else (1 + penalty) * advantage


def random_case(rng: random.Random):
    group_size, groups, length = rng.choice([1, 2, 3, 4, 7, 8]), rng.randint(1, 3), rng.randint(1, 6)
    rows = group_size * groups
    denominator = rng.choice([1, 2, 3, 5, 6, 7, 10])
    tied = rng.random() < 0.25
    shared = Fraction(rng.randint(0, denominator), denominator)
    rewards = [
        None if rng.random() < 0.1 else shared if tied else Fraction(rng.randint(0, denominator), denominator)
        for _ in range(rows)
    ]
    actions = [[int(rng.random() < 0.7) for _ in range(length)] for _ in range(rows)]
    failed = [[int(a and rng.random() < 0.5) for a in row] for row in actions]
    penalty = Fraction(rng.randint(0, 8), rng.choice([5, 10, 3]))
    return rewards, group_size, actions, failed, penalty


def as_tensor(rewards, dtype=torch.float64):
    return torch.tensor([NAN if reward is None else float(reward) for reward in rewards], dtype=dtype)


@pytest.mark.parametrize("mode", SHAPING_MODES)
def test_two_thousand_random_cases_equal_exact_fractions(mode):
    rng = random.Random(20260101)
    ties = 0
    for _ in range(2000):
        rewards, group_size, actions, failed, penalty = random_case(rng)
        exact = exact_advantages(rewards, group_size)
        advantages = outcome_advantages(as_tensor(rewards), group_size)
        shaped = shape_advantages(
            advantages, torch.tensor(actions), torch.tensor(failed), penalty=float(penalty), mode=mode
        )
        assert shaped.dtype == torch.float64
        for row, want in enumerate(exact):
            got = advantages[row].item()
            assert (got != got) if want is None else abs(got - float(want)) <= 1e-12
            if want is not None:
                assert (got == 0.0) == (want == 0), "the zero test is exact"
                ties += want == 0
            for t, (action, fail) in enumerate(zip(actions[row], failed[row], strict=True)):
                target = exact_shaped(want, action, fail, penalty, mode)
                assert abs(shaped[row, t].item() - float(target)) <= 1e-12
                assert (shaped[row, t].item() == 0.0) == (target == 0)
    assert ties > 1000, "too few of the random cases are ties"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("group_size", [2, 3, 5, 7, 8, 16])
def test_equal_rewards_are_exactly_zero(dtype, group_size):
    rewards = torch.full((2 * group_size,), 1 / 3, dtype=dtype)
    assert outcome_advantages(rewards, group_size).eq(0.0).all()


def test_zero_test_is_exact_in_float32():
    rng = random.Random(7)
    for _ in range(2000):
        rewards, group_size, *_ = random_case(rng)
        advantages = outcome_advantages(as_tensor(rewards, torch.float32), group_size)
        assert advantages.dtype == torch.float32
        for got, want in zip(advantages.tolist(), exact_advantages(rewards, group_size), strict=True):
            if want is not None:
                assert (got == 0.0) == (want == 0)
                assert got == pytest.approx(float(want), abs=1e-6)


def test_a_reward_that_equals_the_mean_of_different_ones_is_zero():
    # (1/3 + 2/3 + 1/2 + 1/2) / 4 = 1/2
    advantages = outcome_advantages(torch.tensor([1 / 3, 2 / 3, 0.5, 0.5]), 4)
    assert advantages[2:].tolist() == [0.0, 0.0]
    assert advantages[:2].tolist() == pytest.approx([-1 / 6, 1 / 6], abs=1e-7)


def test_advantages_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5, NAN, 1.0, NAN, 0.0], dtype=torch.float64)
    advantages = outcome_advantages(rewards, 4)
    assert advantages[:4].tolist() == [0.5, -0.5, 0.0, 0.0]
    assert advantages[[5, 7]].tolist() == [0.5, -0.5]
    assert advantages[[4, 6]].isnan().all()


def test_a_group_without_a_scorable_row_is_nan_throughout():
    advantages = outcome_advantages(torch.tensor([NAN, NAN, 1.0, 0.0]), 2)
    assert advantages[:2].isnan().all()
    assert advantages[2:].tolist() == [0.5, -0.5]


def test_whole_numbers_and_no_rows():
    assert outcome_advantages(torch.tensor([1, 0]), 2).tolist() == [0.5, -0.5]
    assert outcome_advantages(torch.tensor([]), 8).shape == (0,)


@pytest.mark.parametrize(
    ("rewards", "group_size", "words"),
    [
        (torch.zeros(2, 2), 2, r"\(2, 2\)"),
        (torch.zeros(6), 4, "group_size=4"),
        (torch.zeros(6), 0, "group_size=0"),
        (torch.tensor([1.0, float("inf")]), 2, "infinite"),
    ],
)
def test_outcome_advantages_rejects(rewards, group_size, words):
    with pytest.raises(ValueError, match=words):
        outcome_advantages(rewards, group_size)


def test_shaping_by_hand():
    advantages = torch.tensor([0.5, 0.0, -0.5, NAN], dtype=torch.float64)
    actions = torch.tensor([[1, 1, 0]] * 4)
    failed = torch.tensor([[0, 1, 0]] * 4)
    expected = {
        "multiplicative": [[0.5, 0, 0], [0, -0.2, 0], [-0.5, -0.6, 0], [0, 0, 0]],
        "additive": [[0.5, 0, 0], [0, -0.2, 0], [-0.5, -0.7, 0], [0, 0, 0]],
        "none": [[0.5, 0.5, 0], [0, 0, 0], [-0.5, -0.5, 0], [0, 0, 0]],
    }
    for mode, rows in expected.items():
        assert shape_advantages(advantages, actions, failed, mode=mode).tolist() == rows


def test_equal_rewards_and_one_failed_step():
    """In a group of equal rewards only the failed step gets an advantage (trl#5588)."""
    advantages = outcome_advantages(torch.full((8,), 1 / 3), 8)
    actions = torch.tensor([[1, 1, 0, 1, 1]] * 8)
    failed = torch.zeros_like(actions)
    failed[5, 3:] = 1
    shaped = shape_advantages(advantages, actions, failed, penalty=0.2)
    expected = torch.zeros(8, 5)
    expected[5, 3:] = -0.2
    assert torch.equal(shaped, expected)


def test_penalty_per_token():
    actions, failed = torch.tensor([[1, 1, 1]]), torch.tensor([[1, 1, 0]])
    penalty = torch.tensor([[0.1, 0.4, 9.0]], dtype=torch.float64)
    tie, loss = torch.zeros(1, dtype=torch.float64), -torch.ones(1, dtype=torch.float64)
    assert shape_advantages(tie, actions, failed, penalty).tolist() == [[-0.1, -0.4, 0.0]]
    assert shape_advantages(loss, actions, failed, penalty).tolist() == [[-1.1, -1.4, -1.0]]


def test_a_scalar_tensor_is_a_penalty():
    ones = torch.ones(1, 1)
    assert shape_advantages(torch.zeros(1), ones, ones, torch.tensor(0.5)).tolist() == [[-0.5]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"advantages": torch.zeros(2, 1)}, r"\(2, 1\)"),
        ({"advantages": torch.zeros(3)}, r"\(3,\)"),
        ({"action_mask": torch.ones(2)}, r"\(2,\)"),
        ({"failed_mask": torch.zeros(2, 4)}, r"\(2, 4\)"),
        ({"failed_mask": torch.tensor([[0, 1, 0], [0, 0, 0]])}, "outside action_mask"),
        ({"penalty": -0.2}, "penalty=-0.2"),
        ({"penalty": NAN}, "penalty=nan"),
        ({"penalty": float("inf")}, "penalty=inf"),
        ({"penalty": torch.tensor([[0.1, -0.1, 0.1]] * 2)}, "negative"),
        ({"penalty": torch.tensor([0.1, 0.1])}, r"shape \(2,\)"),
        ({"mode": "both"}, "mode='both'"),
    ],
)
def test_shape_advantages_rejects(arguments, words):
    good = {
        "advantages": torch.zeros(2),
        "action_mask": torch.tensor([[1, 0, 1], [1, 1, 1]]),
        "failed_mask": torch.zeros(2, 3),
    }
    shape_advantages(**good)
    with pytest.raises(ValueError, match=words):
        shape_advantages(**(good | arguments))


LOSS = torch.tensor([[1.0, 2.0, NAN, 6.0], [4.0, NAN, NAN, NAN], [NAN, NAN, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("how", "max_length", "value"),
    [
        ("smtm", None, (9 / 3 + 4 / 1 + 0) / 3),
        ("smtm", 10, (9 / 3 + 4 / 1 + 0) / 3),
        ("smts", None, (9 + 4 + 0) / 3),
        ("smts", 10, (9 + 4 + 0) / 3 / 10),
        ("token-mean", None, 13 / 4),
        ("token-mean", 10, 13 / 4),
    ],
)
def test_aggregation_by_hand(how, max_length, value):
    assert aggregate_loss(LOSS, MASK, how, max_length).item() == pytest.approx(value, abs=1e-12)


def test_smtm_differs_from_token_mean_on_unequal_lengths():
    """The two aggregations differ on trajectories of different lengths (rllm PR#513)."""
    loss, mask = torch.tensor([[1.0, 1.0, 1.0], [5.0, 0.0, 0.0]]), torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert aggregate_loss(loss, mask, "smtm").item() == 3.0  # (1 + 5) / 2
    assert aggregate_loss(loss, mask, "token-mean").item() == 2.0  # 8 / 4


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_gradient_reaches_action_tokens_alone_and_is_finite(how):
    loss = LOSS.clone().requires_grad_()
    aggregate_loss(loss, MASK, how).backward()
    assert loss.grad.isfinite().all()
    assert (loss.grad != 0).equal(MASK.bool())


@pytest.mark.parametrize("how", AGGREGATIONS)
def test_no_action_token_at_all_is_a_loss_of_zero(how):
    assert aggregate_loss(LOSS, torch.zeros_like(MASK), how).item() == 0.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"how": "mean"}, "how='mean'"),
        ({"action_mask": torch.ones(3, 5)}, r"\(3, 5\)"),
        ({"per_token_loss": torch.zeros(3)}, r"\(3,\)"),
        ({"max_length": 0}, "max_length=0"),
    ],
)
def test_aggregate_loss_rejects(arguments, words):
    good = {"per_token_loss": LOSS, "action_mask": MASK, "how": "smtm"}
    with pytest.raises(ValueError, match=words):
        aggregate_loss(**(good | arguments))


# Properties

EIGHTHS = st.integers(0, 8).map(lambda n: n / 8)
PROPERTY = settings(max_examples=150, deadline=None)


@st.composite
def shaping_cases(draw):
    rows, length = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    advantages = draw(st.lists(st.integers(-4, 4).map(lambda n: n / 4), min_size=rows, max_size=rows))
    cells = st.lists(st.sampled_from([(0, 0), (1, 0), (1, 1)]), min_size=length, max_size=length)
    table = torch.tensor(draw(st.lists(cells, min_size=rows, max_size=rows)))  # (B, T, 2)
    return torch.tensor(advantages, dtype=torch.float64), table[..., 0], table[..., 1]


@PROPERTY
@given(st.lists(EIGHTHS, min_size=4, max_size=4), st.permutations(range(4)))
def test_order_in_a_group_does_not_matter(rewards, order):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    assert torch.equal(outcome_advantages(rewards, 4)[order], outcome_advantages(rewards[order], 4))


@PROPERTY
@given(st.lists(EIGHTHS, min_size=4, max_size=4), st.integers(-8, 8))
def test_adding_a_constant_to_a_group_changes_nothing(rewards, shift):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    moved = outcome_advantages(rewards + shift, 4)
    assert torch.allclose(moved, outcome_advantages(rewards, 4), atol=1e-12, rtol=0)
    assert torch.equal(moved == 0, outcome_advantages(rewards, 4) == 0)


@PROPERTY
@given(shaping_cases(), st.integers(0, 8), st.integers(0, 8), st.sampled_from(SHAPING_MODES))
def test_a_larger_penalty_never_raises_an_advantage(case, one, other, mode):
    small, large = sorted((one / 8, other / 8))
    assert (shape_advantages(*case, large, mode) <= shape_advantages(*case, small, mode)).all()


@PROPERTY
@given(shaping_cases(), st.sampled_from(SHAPING_MODES))
def test_shaping_lowers_failed_steps_alone(case, mode):
    advantages, actions, failed = case
    shaped = shape_advantages(*case, 0.2, mode)
    plain = advantages.unsqueeze(1) * actions
    assert torch.equal(shaped[failed == 0], plain[failed == 0])
    assert (shaped <= plain).all()
    if mode == "none":
        assert torch.equal(shaped, plain)


@PROPERTY
@given(shaping_cases(), st.sampled_from(AGGREGATIONS), st.floats(-1e6, 1e6) | st.just(NAN))
def test_tokens_that_are_no_actions_never_matter(case, how, junk):
    _, actions, _ = case
    loss = torch.arange(actions.numel(), dtype=torch.float64).view(actions.shape)
    spoiled = loss.masked_fill(actions == 0, junk)
    assert torch.equal(aggregate_loss(spoiled, actions, how), aggregate_loss(loss, actions, how))
