"Accounting laws of the environment, against a scalar ledger that shares no code with it."
import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from foxhunt.core import UserError, generator
from foxhunt.data.windows import TEST, TRAIN, VAL, synthetic_table
from foxhunt.market.contracts import CONTRACTS
from foxhunt.market.env import (BODY, CLOSE, GAP, LIMIT, check_observation, make_market, make_step, mix32, observe, reset, state_at, state_observation,
                                step, unrealised_profit)
from foxhunt.params import Env

ENV = Env(episode_bars=100_000)


def table_of(open_, close, symbol="ES", segment=None, session=None, features=None):
    "A training table of given prices in the units of a real contract."
    n, c = len(close), CONTRACTS[symbol]
    base = synthetic_table(bars=max(n, 64), n_features=4)
    cut = {k: getattr(base, k)[:n] for k in ("features", "ts", "contract", "session_frac", "last_in_session", "filled")}
    return dataclasses.replace(
        base, **cut | {"features": cut["features"] if features is None else features}, open=np.asarray(open_, float), close=np.asarray(close, float),
        high=np.maximum(open_, close), low=np.minimum(open_, close), split=np.zeros(n, np.int8), contracts=(symbol,), tick=np.array([c.tick]),
        multiplier=np.array([float(c.multiplier)]), cost=np.array([c.cost]), segment=np.zeros(n, int) if segment is None else segment,
        session=np.zeros(n, int) if session is None else session)


def random_prices(n, symbol, seed):
    "Opens away from the last close, all on the tick grid."
    rng, tick = np.random.default_rng(seed), CONTRACTS[symbol].tick
    start = {"EURUSD": 110_000, "6E": 22_000, "ES": 20_000, "NQ": 70_000, "ZN": 7_000}[symbol]
    moves = rng.integers(-6, 7, (n, 2)).cumsum().reshape(n, 2) + start
    return moves[:, 0] * tick, moves[:, 1] * tick


class Account:
    "One order at a time: a flip is a close and an open."
    def __init__(self, mult, cost): self.mult, self.cost, self.position, self.entry, self.cash, self.traded = mult, cost, 0, 0.0, 0.0, 0

    def order(self, qty, price):
        self.cash -= abs(qty) * self.cost; self.traded += abs(qty)
        if self.position * qty < 0:
            closed, side = min(abs(self.position), abs(qty)), 1 if self.position > 0 else -1
            self.cash += closed * side * (price - self.entry) * self.mult
            self.position -= closed * side; qty += closed * side
        if qty:
            self.entry = (self.entry * abs(self.position) + price * abs(qty)) / (abs(self.position) + abs(qty)); self.position += qty

    def equity(self, price): return self.cash + self.position * (price - self.entry) * self.mult


@pytest.mark.parametrize("fill", ["next_open", "close"])
@pytest.mark.parametrize("symbol", list(CONTRACTS))
def test_all_position_pairs_equal_the_scalar_ledger(symbol, fill):
    env = dataclasses.replace(ENV, fill=fill)
    t = table_of(*random_prices(40, symbol, 3), symbol)
    m = make_market(t, TRAIN, env, state_bars=2)
    pairs = torch.cartesian_prod(torch.arange(11), torch.arange(11))
    state = state_at(m, torch.full((121,), 10))
    accounts = [Account(m.multiplier[0].item(), m.cost[0].item()) for _ in range(121)]
    for k, actions in enumerate((pairs[:, 0], pairs[:, 1], pairs[:, 1])):
        state, out = step(m, env, state, actions)
        price = (t.open[11 + k] if fill == "next_open" else t.close[10 + k]).item()
        for i, a in enumerate(accounts):
            a.order(actions[i].item() - 5 - a.position, price)
            assert out.position[i] == a.position
            assert abs(a.equity(t.close[11 + k]) - state.equity[i].item()) < 1e-9
            assert abs(a.cash - state.cash[i].item()) < 1e-9
            assert abs(a.position * (t.close[11 + k] - a.entry) * a.mult - out.unrealised[i].item()) < 1e-9


def walk(prices, actions, env=ENV, symbol="ES", **kw):
    "One lane from bar 1; returns states and outputs after each action."
    m = make_market(table_of(*prices, symbol, **kw), TRAIN, env, state_bars=2)
    s, seen = state_at(m, torch.tensor([1])), []
    for a in actions: s, o = step(m, env, s, torch.tensor([a])); seen.append((s, o))
    return m, seen


def test_flip_realises_the_smaller_side_only():
    "nautilus_trader 1083: -3 to +2 at +10 ticks realises 3 contracts and opens 2 at the fill."
    tick = 0.25
    close = np.array([4000.0] * 3 + [4000 + 10 * tick] * 4); opens = close.copy()
    free = dataclasses.replace(ENV, cost_scale=0.0, slippage_ticks=0.0)
    m, seen = walk((opens, close), [2, 7, 7], free)                     # -3, then +2, then hold
    state = seen[1][0]
    assert state.cash.item() == pytest.approx(-3 * 10 * 12.5, abs=1e-9)
    assert state.entry.item() == pytest.approx(4002.5) and state.position.item() == 2
    assert seen[2][0].equity.item() == pytest.approx(-375, abs=1e-9)


def test_resize_pays_for_the_change_only():
    "TorchTrade 274: 1, 3, 2 contracts trade 1 + 2 + 1, the entry is weighted when adding and kept when reducing."
    opens = np.array([100.0, 100, 100, 104, 108, 108, 108]); close = opens.copy()
    m, seen = walk((opens, close), [6, 8, 7])
    cost = m.cost[0].item()
    paid = [s.equity.item() - (s.cash.item() + o.unrealised.item()) for s, o in seen]
    assert max(map(abs, paid)) < 1e-9
    entry = (100 + 2 * 104) / 3
    assert [s.entry.item() for s, _ in seen] == pytest.approx([100, entry, entry])
    assert seen[-1][0].equity.item() == pytest.approx((1 * 4 + 3 * 4) * 50 - 4 * cost, abs=1e-9)


@pytest.mark.parametrize("symbol,move,money", [("ES", 1.0, 50), ("NQ", 1.0, 20), ("NQ", 10.0, 200), ("6E", 0.0001, 12.5), ("ZN", 1.0, 1000), ("EURUSD", 0.0001, 12.5)])
def test_one_contract_earns_what_the_exchange_says(symbol, move, money):
    base = 1.1 if symbol in ("6E", "EURUSD") else 100.0
    close = np.array([base] * 3 + [base + move] * 3); opens = np.array([base] * 3 + [base] * 3); opens[4:] += move
    _, seen = walk((opens, close), [6, 6], dataclasses.replace(ENV, cost_scale=0.0, slippage_ticks=0.0), symbol)
    assert seen[-1][0].equity.item() == pytest.approx(money, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 10), min_size=1, max_size=25), st.sampled_from(list(CONTRACTS)), st.sampled_from(["next_open", "close"]), st.integers(0, 999))
def test_any_path_equals_the_scalar_ledger(actions, symbol, fill, seed):
    env = dataclasses.replace(ENV, fill=fill)
    prices = random_prices(len(actions) + 3, symbol, seed)
    m, seen = walk(prices, actions, env, symbol)
    a = Account(m.multiplier[0].item(), m.cost[0].item())
    reward = 0.0
    for k, (act, (s, o)) in enumerate(zip(actions, seen)):
        a.order(act - 5 - a.position, float(prices[0][k + 2] if fill == "next_open" else prices[1][k + 1]))
        reward += o.reward.item() * m.reward_scale
        if o.truncated: break
        assert abs(s.equity.item() - a.equity(prices[1][k + 2])) < 1e-9 and abs(s.cash.item() - a.cash) < 1e-9
        assert abs(reward - s.equity.item()) < 1e-5 * m.reward_scale * (k + 1)          # rewards are float32


def test_slippage_is_always_adverse():
    "TorchTrade's U(1-s, 1+s): half of the fills improve. Here every path loses slippage x traded exactly."
    prices = random_prices(60, "ES", 0)
    actions = np.random.default_rng(0).integers(0, 11, 50)
    runs = {s: walk(prices, actions, dataclasses.replace(ENV, slippage_ticks=s))[1][-1][0] for s in (0.0, 1.0, 3.0)}
    traded = np.abs(np.diff(np.r_[0, actions - 5])).sum()
    for s in (1.0, 3.0): assert runs[0.0].equity.item() - runs[s].equity.item() == pytest.approx(s * 12.5 * traded, abs=1e-6)


def test_no_profit_over_a_roll_and_the_lane_restarts():
    "quantiacs 7: 100 points between two contracts are not earned."
    close = np.r_[np.full(20, 4000.0), np.full(20, 4100.0)]
    free = dataclasses.replace(ENV, cost_scale=0.0, slippage_ticks=0.0)
    m = make_market(table_of(close, close, segment=np.repeat([0, 1], 20)), TRAIN, free, state_bars=2)
    s, total, ends = state_at(m, torch.tensor([1])), 0.0, []
    for _ in range(30):
        s, o = step(m, free, s, torch.tensor([10])); total += o.reward.item()
        if o.truncated: ends.append(o.bar.item())
        assert not (o.bar == 20).any()                                    # the first bar of the new contract is never stepped to
    assert total == 0.0 and ends and set(ends) <= {19, 39}


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_flat_at_close_earns_no_night(fill):
    close = np.repeat(100.0 + 50.0 * np.arange(4), 10); opens = close.copy()              # 50 points between sessions, none inside
    env = dataclasses.replace(ENV, flat_at_close=True, fill=fill, cost_scale=0.0, slippage_ticks=0.0)
    t = table_of(opens, close, session=np.repeat(np.arange(4), 10)); t = dataclasses.replace(t, last_in_session=np.arange(40) % 10 == 9)
    m = make_market(t, TRAIN, env, state_bars=2)
    s, held = state_at(m, torch.tensor([1])), []
    for _ in range(38): s, o = step(m, env, s, torch.tensor([10])); held.append((o.bar.item(), o.position.item(), o.reward.item()))
    assert all(r == 0 for *_, r in held) and sum(p == 5 for _, p, _ in held) > 25
    assert make_market(t, TRAIN, dataclasses.replace(env, flat_at_close=False), 2).record[:, [GAP, BODY]].abs().max() == 50 * 50


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_a_session_that_breaks_off_is_not_known_beforehand(fill):
    "Without its closing bar a session ends unseen: the position is out at the next open (or its close), and what comes later changes nothing before."
    close = np.full(40, 100.0); env = dataclasses.replace(ENV, flat_at_close=True, fill=fill)
    t = dataclasses.replace(table_of(close, close, session=np.repeat(np.arange(4), 10)), last_in_session=(np.arange(40) % 10 == 9) & (np.arange(40) != 19))
    longer = dataclasses.replace(t, session=np.where(np.arange(40) == 20, 1, t.session))          # bar 20 still belonged to the session
    whole, other = (make_market(x, TRAIN, env, state_bars=2) for x in (t, longer))
    assert torch.equal(whole.record[:20], other.record[:20])
    s, held = state_at(whole, torch.tensor([1])), {}
    for _ in range(38): s, o = step(whole, env, s, torch.tensor([10])); held[o.bar.item()] = o.position.item()
    out = 20 if fill == "next_open" else 21
    assert held[18] == held[19] == 5 and held[out] == 0 and held[out + 1] == 5


@pytest.mark.parametrize("fill", ["next_open", "close"])
def test_nobody_trades_where_nobody_traded(fill):
    "A bar that was put in shows a price at which nobody sold: whatever a policy asks for there, and whatever the limits force, waits."
    filled = np.random.default_rng(5).random(600) < 0.4
    t = dataclasses.replace(synthetic_table(bars=600), filled=filled, last_in_session=~filled & (np.arange(600) % 240 == 239))
    env = dataclasses.replace(ENV, fill=fill, flat_at_close=True, main_hours=(0.1, 0.9), outside_position=2, episode_bars=50)
    m = make_market(t, TRAIN, env); s = reset(m, env, 64, 1); gen = generator(0, "actions"); kept = moved = 0
    for _ in range(300):
        old = s.position; s, o = step(m, env, s, torch.randint(0, 11, (64,), generator=gen))
        still = torch.as_tensor(filled[m.rows[(o.bar - int(fill == "close")).numpy()]])
        assert torch.equal(o.position[still], old[still])
        kept += still.sum().item(); moved += (o.position != old)[~still].sum().item()
    assert kept > 5_000 and moved > 5_000
    assert not make_market(synthetic_table(bars=600), TRAIN, env).thin


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 9_999), fill=st.sampled_from(["next_open", "close"]), share=st.floats(0.1, 0.9))
def test_bars_without_a_trade_add_no_profit(seed, fill, share):
    "Filling is a way to write a series down: the best that hindsight could earn is the same with and without, to the cent."
    from foxhunt.market.oracle import oracle
    env = dataclasses.replace(ENV, fill=fill); opens, close = random_prices(120, "ES", seed)
    hole = np.random.default_rng(seed).geometric(1 - share, 120) - 1; hole[-1] = 0
    at = np.repeat(np.arange(120), hole + 1); new = np.r_[False, at[1:] == at[:-1]]                     # each bar, then those that fill the hole behind it
    bare = make_market(table_of(opens, close), TRAIN, env, state_bars=1)
    full = make_market(dataclasses.replace(table_of(np.where(new, close[at], opens[at]), close[at]), filled=new), TRAIN, env, state_bars=1)
    assert oracle(full, env).profit == pytest.approx(oracle(bare, env).profit, abs=1e-6)


def test_main_hours_limit_the_position():
    env = dataclasses.replace(ENV, main_hours=(0.25, 0.75), outside_position=1)
    t = synthetic_table(bars=600)
    m = make_market(t, TRAIN, env)
    outside = (t.session_frac[m.rows] < 0.25) | (t.session_frac[m.rows] > 0.75)
    s = state_at(m, torch.tensor([10]))
    for _ in range(300):
        s, o = step(m, env, s, torch.tensor([0]))
        assert o.position.item() == (-1 if outside[o.bar.item()] else -5)


def test_ledger_holds_in_float64_and_decides_ruin_like_the_scalar_one():
    "TorchTrade 293: a float32 ledger ends at 99.99975 what should have held 100."
    prices = random_prices(600, "EURUSD", 7)
    env = dataclasses.replace(ENV, ruin=400.0)
    m = make_market(table_of(*prices, "EURUSD"), TRAIN, env, state_bars=2)
    lanes = 32
    s = state_at(m, torch.full((lanes,), 1))
    accounts, alive, ruined = [Account(125_000, m.cost[0].item()) for _ in range(lanes)], np.ones(lanes, bool), 0
    gen = generator(0, "ruin")
    for k in range(400):
        actions = torch.randint(0, 11, (lanes,), generator=gen)
        s, o = step(m, env, s, actions)
        for i in np.flatnonzero(alive):
            accounts[i].order(actions[i].item() - 5 - accounts[i].position, prices[0][k + 2].item())
            assert bool(o.terminated[i]) == (accounts[i].equity(prices[1][k + 2]) <= -400.0)
            if o.terminated[i]: alive[i] = False; ruined += 1
    assert ruined > lanes / 2


def test_restart_is_clean_and_reproducible():
    "FinRL 1042, TorchTrade 278 and 273: episode 2 starts where it should, seeds reach the starts, lanes differ."
    env = dataclasses.replace(ENV, episode_bars=20)
    m = make_market(synthetic_table(bars=1000), TRAIN, env)
    def starts(seed, extra):
        s, seen = reset(m, env, 8, seed), []
        for k in range(60):
            for _ in range(extra): torch.randint(0, 11, (8,))                     # more policy samples from the global generator
            before = s
            s, o = step(m, env, s, torch.full((8,), k % 11))
            seen.append(torch.where(o.truncated, s.bar, -1))                      # where each new episode starts
            assert torch.equal(o.bar, before.bar + 1)                             # no transition spans two episodes
        return reset(m, env, 8, seed).bar, torch.stack(seen)
    (a0, a), (b0, b), (c0, c) = starts(1, 0), starts(1, 5), starts(999, 0)
    assert torch.equal(a, b) and torch.equal(a0, b0) and not torch.equal(a, c) and not torch.equal(a0, c0)
    fresh = a[a >= 0]
    assert len(a0.unique()) > 4 and len(fresh) >= 24 and len(fresh.unique()) > 12 and torch.isin(fresh, m.starts).all()
    zero = torch.zeros(len(fresh))
    first = state_observation(m, env, state_at(m, fresh))
    assert torch.equal(first, observe(m, fresh, zero, zero))                      # flat, nothing unrealised, whatever came before


def test_true_last_observation_at_a_truncation():
    env = dataclasses.replace(ENV, episode_bars=5)
    m = make_market(synthetic_table(bars=400), TRAIN, env)
    s = reset(m, env, 4, 0); first = s.bar
    for k in range(5): s, o = step(m, env, s, torch.full((4,), 8))
    assert o.truncated.all() and not o.terminated.any()
    assert torch.equal(o.bar, first + 5) and (o.position == 3).all() and (s.position == 0).all()
    last = observe(m, o.bar, o.position, o.unrealised)
    assert torch.equal(last[:, :253].reshape(4, 11, 23)[:, -1], m.features[first + 5]) and torch.allclose(last[:, 253], torch.tensor(0.6))


def test_an_order_on_the_last_bar_is_not_filled():
    m = make_market(synthetic_table(bars=400), TEST, ENV)
    assert (m.starts + 1 < m.run_end[m.starts]).all()                             # no episode starts where nothing can follow
    s, o = step(m, ENV, state_at(m, torch.tensor([m.bars - 2])), torch.tensor([10]))
    assert o.truncated.all() and o.bar.item() == m.bars - 1 and (s.bar < m.bars - 1).all()


def test_observation_is_causal_and_a_leak_would_be_seen():
    t = synthetic_table(bars=600)
    m = make_market(t, TRAIN, dataclasses.replace(ENV, reward_scale=10.0))
    bars = torch.arange(10, 300); zero = torch.zeros(len(bars))
    seen = observe(m, bars, zero, zero)
    for column in (0, 22):
        f = t.features.copy(); f[300:, column] += 1
        other = make_market(dataclasses.replace(t, features=f), TRAIN, dataclasses.replace(ENV, reward_scale=10.0))
        assert torch.equal(seen, observe(other, bars, zero, zero)) and not torch.equal(observe(m, bars + 1, zero, zero), observe(other, bars + 1, zero, zero))


def test_what_is_not_finite_is_named():
    t = synthetic_table(bars=400)
    for value in (np.nan, np.inf):
        f = t.features.copy(); f[55, 7] = value
        with pytest.raises(UserError, match="row 55 of the table: f7 is"): make_market(dataclasses.replace(t, features=f), TRAIN)
    c = t.close.copy(); c[9] = np.nan
    with pytest.raises(UserError, match="row 9 of the table: close is nan"): make_market(dataclasses.replace(t, close=c), TRAIN)
    m = make_market(t, TRAIN)
    obs = observe(m, torch.tensor([20, 30]), torch.zeros(2), torch.tensor([0.0, float("nan")]))
    with pytest.raises(UserError, match="lane 1, bar 30: unrealised is nan"): check_observation(obs, torch.tensor([20, 30]), m.feature_names)
    flat = dataclasses.replace(t, open=np.full(400, 1.1), close=np.full(400, 1.1), features=np.zeros_like(t.features))
    m = make_market(flat, TRAIN)                                                   # constant price: finite everywhere
    s = reset(m, ENV, 4, 0)
    for k in range(5): s, o = step(m, ENV, s, torch.full((4,), 2 * k))
    assert torch.isfinite(state_observation(m, ENV, s)).all() and torch.isfinite(o.reward).all()


def test_next_open_cannot_use_the_close_it_decided_on():
    "The sign of the bar that has just closed earns nothing on a martingale with either rule; known one bar early it earns a fortune."
    opens, close = random_prices(20_000, "ES", 11)
    free = dataclasses.replace(ENV, cost_scale=0.0, slippage_ticks=0.0)
    m = make_market(table_of(opens, close, features=np.zeros((20_000, 4), np.float32)), TRAIN, free, state_bars=2)
    sign = torch.sign(m.close[1:-1] - m.close[:-2])
    body, gap = m.record[2:, BODY], m.record[2:, GAP]
    held = torch.cat([torch.zeros(1, dtype=torch.float64), sign[:-1]])
    pnl = held * gap + sign * body
    t_stat = lambda x: (x.mean() / x.std() * len(x) ** 0.5).item()
    assert abs(t_stat(pnl)) < 3.5 and t_stat(sign[1:] * (m.close[2:-1] - m.close[1:-2])) > 50


def test_what_is_visible_can_be_earned():
    "FinRL 1248: with the next return in the observation a policy must be able to reach the oracle, else no learner can."
    from foxhunt.market.oracle import oracle
    free = dataclasses.replace(ENV, cost_scale=0.0, slippage_ticks=0.0)
    m = make_market(synthetic_table(bars=1500, kind="visible"), TRAIN, free)
    s, earned = state_at(m, torch.tensor([10])), 0.0
    while True:
        next_move = state_observation(m, free, s)[:, 230]                          # feature 0 of the last bar
        s, o = step(m, free, s, (5 + 5 * torch.sign(next_move)).long()); earned += o.reward.item() * m.reward_scale
        if o.truncated: break
    assert earned >= 0.95 * oracle(m, free, state_bars=11).profit


@pytest.mark.device
def test_step_never_looks_at_a_value():
    "On the meta device tensors have no values: a host read, a branch on data or a tensor on another device would raise."
    m = make_market(synthetic_table(bars=400), TRAIN, ENV, device="meta")
    s = reset(m, ENV, 16, 0)
    for _ in range(2):
        s, o = step(m, ENV, s, torch.full((16,), 6, device="meta"))
        obs = observe(m, s.bar, s.position, unrealised_profit(m, s))
    assert obs.shape == (16, 256) and all(x.device.type == "meta" for x in (*s, *o, obs)) and o.reward.dtype == torch.float32 and s.equity.dtype == torch.float64


def test_mix32_is_the_same_as_in_plain_integers():
    def plain(x):
        x = ((x ^ (x >> 16)) * 0x21F0AAAD) % 2**32; x = ((x ^ (x >> 15)) * 0x735A2D97) % 2**32
        return x ^ (x >> 15)
    x = torch.tensor([0, 1, 2, 77, 2**31 - 1, 2**31, 2**32 - 1])
    assert mix32(x).tolist() == [plain(v) for v in x.tolist()]


def test_wrong_fill_rule_is_refused():
    m = make_market(synthetic_table(bars=400), TRAIN, ENV)
    other = dataclasses.replace(ENV, fill="close")
    with pytest.raises(ValueError, match="made for fill = next_open"): step(m, other, reset(m, other, 2, 0), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UserError, match="no bar in split 5"): make_market(synthetic_table(bars=400), 5, ENV)
    with pytest.raises(UserError, match="no run of 401 bars"): make_market(synthetic_table(bars=400), VAL, ENV, state_bars=400)


@pytest.mark.slow
def test_compiled_equals_eager():
    env = dataclasses.replace(ENV, episode_bars=30)
    m = make_market(synthetic_table(bars=1000), TRAIN, env)
    eager, fast = make_step(m, env), make_step(m, env, compile=True)
    a = b = reset(m, env, 64, 5); gen = generator(0, "compiled")
    for _ in range(100):
        action = torch.randint(0, 11, (64,), generator=gen)
        (a, x), (b, y) = eager(a, action), fast(b, action)
        for u, v in zip((*a, *x), (*b, *y)): assert torch.allclose(u, v, rtol=1e-12, atol=1e-9) if u.is_floating_point() else torch.equal(u, v)


@pytest.mark.gpu
@pytest.mark.device
def test_gpu_walks_like_the_cpu():
    env = dataclasses.replace(ENV, episode_bars=30)
    t = synthetic_table(bars=1000)
    cpu, gpu = (make_market(t, TRAIN, env, device=d) for d in ("cpu", "cuda"))
    a, b = reset(cpu, env, 256, 3), reset(gpu, env, 256, 3); gen = generator(0, "gpu")
    for _ in range(100):
        action = torch.randint(0, 11, (256,), generator=gen)
        (a, x), (b, y) = step(cpu, env, a, action), step(gpu, env, b, action.cuda())
        for u, v in zip((*a, *x), (*b, *y)): assert torch.allclose(u, v.cpu(), rtol=1e-12, atol=1e-9) if u.is_floating_point() else torch.equal(u, v.cpu())
    assert torch.allclose(state_observation(cpu, env, a), state_observation(gpu, env, b).cpu(), atol=1e-6)
