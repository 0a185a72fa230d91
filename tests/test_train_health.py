"Health: a verdict for any history, robust where it should be and blind to nothing."
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foxhunt.train.health import blocks, score, theil_sen, trend, verdict

pytestmark = pytest.mark.unit
rng = np.random.default_rng(1)


@settings(max_examples=80, deadline=None)
@given(st.lists(st.floats(allow_nan=True, allow_infinity=True) | st.none(), min_size=1, max_size=60), st.sampled_from(["", "dqn", "ppo"]))
def test_any_history_gets_a_verdict(values, kind):
    v = verdict([{"epoch": i + 1, "loss": x, "value_loss": x, "grad_norm": x, "q_max": x, "q_bound": 1.0} for i, x in enumerate(values)], kind)
    if any(x is not None and not math.isfinite(x) for x in values): assert not v.stable and any("not finite" in w for w in v.warnings)


@settings(max_examples=60, deadline=None)
@given(st.integers(4, 200), st.floats(0.01, 100), st.integers(0, 10))
def test_trend_has_no_unit(n, unit, seed):
    x = np.exp(-np.arange(n) / n) + 0.05 * np.random.default_rng(seed).standard_normal(n)
    assert trend(x).direction == trend(unit * x).direction


def test_theil_sen_is_exact_on_a_line_and_covers():
    assert theil_sen(3 * np.arange(10) + 1)[0] == 3
    hits = sum(lo <= 0.1 <= hi for _, lo, hi in (theil_sen(0.1 * np.arange(20) + rng.standard_normal(20)) for _ in range(400)))
    assert 0.91 <= hits / 400 <= 0.99


def test_a_quarter_of_spikes_changes_nothing():
    x = np.exp(-np.arange(200) / 60)
    y = x.copy(); y[rng.choice(200, 40, replace=False)] = 1e6
    assert trend(y).direction == trend(x).direction == "converging" and abs(trend(y).last - trend(x).last) < 0.02


def test_seed_documents_case():
    x = np.linspace(0.224702, 0.273441, 500) + 0.01 * rng.standard_normal(500)
    v = verdict([{"loss": float(a), "grad_norm": 0.5} for a in x], "dqn")
    assert v.trend == "diverging" and not v.stable and v.warnings[0].startswith("Loss diverging: increased from 0.2")


def test_rising_loss_with_settled_q_is_named_but_stable_and_q_bound_is_not_excused():
    rows = [{"loss": 0.1 + 0.003 * i, "grad_norm": 1.0, "q_max": 5 * (1 - math.exp(-i / 10)), "q_bound": 20.0} for i in range(100)]
    v = verdict(rows, "dqn"); assert v.stable and "increased" in v.warnings[0]
    assert not verdict([r | {"q_bound": 4.0} for r in rows], "dqn").stable
    assert not verdict(rows, "tft").stable                     # the excuse is DQN's alone


def test_blocks_keep_order_and_size():
    assert list(blocks([3.0, 1.0])) == [3.0, 1.0] and len(blocks(range(500))) == 20 and list(blocks(range(40))) == [0.5 + 2 * i for i in range(20)]


def test_first_epochs_without_an_update_are_no_fault():
    assert verdict([{"loss": None, "grad_norm": None}] * 2 + [{"loss": 1 / (i + 1), "grad_norm": 1.0} for i in range(20)], "dqn").stable


def test_what_was_not_measured_is_not_judged():
    v = verdict([{"epoch": i + 1, "loss": None, "grad_norm": None, "reward": 0.1} for i in range(12)], "dqn")
    assert (v.trend, v.stable, v.converged) == ("unknown", False, False) and v.warnings == ("Nothing to judge: no loss was measured",)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), None])
def test_diverged_never_wins(bad): assert score(bad) == math.inf and score(-5.0, stable=False) == math.inf and score(0.5) == 0.5
