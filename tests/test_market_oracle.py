"The oracle is a ceiling: exact where the answer is known, never beaten, reached by its own path."
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from foxhunt.data.windows import TRAIN, synthetic_table
from foxhunt.market.env import BODY, COST, GAP, LIMIT, bar_record, make_market
from foxhunt.market.oracle import best_positions, best_values, oracle
from foxhunt.params import Env


def arrays(price, fill, mult=50.0, cost=2.5, m=5):
    n = len(price); one = np.ones(n)
    r = bar_record(np.r_[price[:1], price[:-1]], price, mult * one, cost * one, m * one, np.zeros(n, int), np.full(n, n), fill)
    return r[:, GAP], r[:, BODY], r[:, COST], r[:, LIMIT]


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_known_answers(fill):
    wave = 100 - 2 * np.cos(2 * np.pi * np.arange(401) / 40)
    assert best_values(*arrays(wave, fill), 5, end_flat=True)[0][0, 5] == pytest.approx(19_500, abs=1e-8)
    assert best_values(*arrays(wave, fill, cost=101.0), 5, end_flat=True)[0][0, 5] == pytest.approx(0, abs=1e-9)
    walk = 100 + np.cumsum(np.random.default_rng(0).normal(0, 0.25, 5000))
    assert best_values(*arrays(walk, fill), 5, end_flat=True)[0][0, 5] == pytest.approx(196901.38813700053, abs=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.booleans())
def test_never_beaten_and_reached_by_its_own_path(seed, end_flat):
    rng = np.random.default_rng(seed); n = 60
    gap, body, cost, limit = rng.normal(0, 9, n), rng.normal(0, 9, n), rng.uniform(0, 6, n), rng.choice([-1.0, 0.0, 2.0, 5.0], n)     # -1: nobody traded
    value, after = best_values(gap, body, cost, limit, 5, end_flat)
    profit = lambda p: (p[:-1] * gap[1:] + p[1:] * body[1:] - cost[1:] * np.abs(np.diff(p))).sum() - end_flat * cost[-1] * abs(p[-1])
    assert profit(best_positions(after, cost, limit)) == pytest.approx(value[0, 5], abs=1e-8)
    for _ in range(30):
        p = np.clip(rng.integers(-5, 6, n), -abs(limit), abs(limit)); p[0] = 0
        for t in np.flatnonzero(limit[1:] < 0) + 1: p[t] = p[t - 1]
        assert profit(p) <= value[0, 5] + 1e-9
    mirrored = best_values(-gap, -body, cost, limit, 5, end_flat)[0]
    assert mirrored == pytest.approx(value[:, ::-1], abs=1e-9)                   # negated prices, negated positions


def test_value_falls_with_costs_and_rises_with_room():
    t = synthetic_table(bars=600, kind="random_walk")
    profit = lambda **k: oracle(make_market(t, TRAIN, e := Env(**k)), e).profit
    costs = [profit(slippage_ticks=s) for s in (0.0, 1.0, 2.0, 4.0)]
    rooms = [profit(max_position=p) for p in (1, 2, 5)]
    assert costs == sorted(costs, reverse=True) and costs[-1] >= 0
    assert rooms[1] == pytest.approx(2 * rooms[0]) and rooms[2] == pytest.approx(5 * rooms[0])   # no price impact: profit scales with size
    assert profit(flat_at_close=True) <= profit() + 1e-9


def test_runs_do_not_see_each_other():
    t = synthetic_table(bars=600, kind="sinusoid", contracts=2)
    env = Env(); both = oracle(make_market(t, TRAIN, env), env, state_bars=11)
    alone = []
    for c in (0, 1):
        rows = t.contract == c
        alone.append(oracle(make_market(dataclasses.replace(t, split=np.where(rows, t.split, -1).astype(np.int8)), TRAIN, env), env, state_bars=11).profit)
    assert both.profit == pytest.approx(sum(alone))
