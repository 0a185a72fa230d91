"Laws of metrics, splits and significance that need more than one notebook."
import dataclasses, math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import stats

from foxhunt.data.windows import TEST, TRAIN, UNUSED, VAL, synthetic_table, window_ends
from foxhunt.evaluate.forecast import ENOUGH, block_interval, by_moment, judged
from foxhunt.evaluate import metrics
from foxhunt.evaluate.metrics import cagr, class_scores, confusion, drawdown, per_session, pinball, sharpe
from foxhunt.evaluate.significance import deflated_sharpe, iqm, moments, probabilistic_sharpe, seed_summary
from foxhunt.evaluate.splits import fold_table, look, seal, walk_forward
from foxhunt.train.forecast import q_risk

profits = st.lists(st.floats(-1e4, 1e4).map(lambda x: round(x, 2)), min_size=3, max_size=40).map(np.array)


@given(profits, st.floats(0.01, 1000))
@settings(max_examples=60, deadline=None)
def test_sharpe_has_no_unit_and_a_sign(x, scale):
    a, b, c = sharpe(x, least=0), sharpe(x * scale), sharpe(-x, least=0)
    if math.isnan(a.value): assert math.isnan(c.value); return
    assert a.low <= a.value <= a.high and (c.value, c.low, c.high) == (-a.value, -a.high, -a.low)
    assert b.value == pytest.approx(a.value, rel=1e-6)


@pytest.mark.parametrize("n", [3, 10, metrics.ENOUGH - 1, metrics.ENOUGH, 250])
def test_a_short_record_gets_no_interval(n):
    "Below `ENOUGH` sessions the interval is overconfident (the notebook shows how much), so none is given; the ratio itself stays."
    s = sharpe(np.random.default_rng(n).standard_t(4, n)); assert math.isfinite(s.value) and s.n == n
    assert math.isfinite(s.low) == math.isfinite(s.high) == (n >= metrics.ENOUGH)


@given(profits)
@settings(max_examples=60, deadline=None)
def test_drawdown_by_brute_force(x):
    e = np.r_[0.0, np.cumsum(x)]
    d = drawdown(np.cumsum(x), 1e6)
    assert d.depth == pytest.approx(max(e[i] - e[j] for i in range(len(e)) for j in range(i, len(e))))
    assert 0 <= d.longest <= len(x) and d.peak <= d.trough


@pytest.mark.parametrize("flat", [np.zeros(100), np.full(100, 0.1 + 0.2), np.full(100, -7.0), np.array([]), np.array([5.0])])
def test_nothing_to_measure_is_nan(flat):
    assert math.isnan(sharpe(flat).value) and math.isnan(probabilistic_sharpe(moments(flat)))


def test_doubling_in_a_calendar_year_is_100_percent():
    assert cagr(100_000, 100_000, 1.0) == pytest.approx(1.0) and cagr(100_000, 300_000, 2.0) == pytest.approx(1.0)


def test_sessions_keep_every_cent():
    p, s = np.random.default_rng(0).normal(0, 9, 500), np.random.default_rng(1).integers(0, 30, 500)
    assert per_session(p, s)[1].sum() == pytest.approx(p.sum())


@pytest.mark.peers
def test_forecast_scores_agree_with_references():
    sk = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    y, f = rng.normal(size=300), np.sort(rng.normal(size=(300, 3)), axis=1)
    for j, tau in enumerate((0.1, 0.5, 0.9)): assert pinball(y, f, (0.1, 0.5, 0.9))[:, j].mean() == pytest.approx(sk.mean_pinball_loss(y, f[:, j], alpha=tau))
    t, p = rng.integers(0, 3, 300), rng.integers(0, 3, 300)
    s = class_scores(confusion(t, p, 3))
    assert np.array_equal(confusion(t, p, 3), sk.confusion_matrix(t, p))
    assert s["f1"] == pytest.approx(sk.f1_score(t, p, average=None)) and s["mcc"] == pytest.approx(sk.matthews_corrcoef(t, p))
    assert s["f1_weighted"] == pytest.approx(sk.f1_score(t, p, average="weighted")) and s["accuracy"] == pytest.approx(sk.accuracy_score(t, p))


def test_q_risk_has_no_unit():
    y, f = (torch.from_numpy(np.random.default_rng(i).normal(size=n)) for i, n in enumerate((50, (50, 3))))
    assert q_risk(100 * f, 100 * y, (0.1, 0.5, 0.9)) == pytest.approx(q_risk(f, y, (0.1, 0.5, 0.9)))
    mine = 2 * pinball(y.numpy(), f.numpy(), (0.1, 0.5, 0.9)).sum(0) / y.abs().sum().item()
    assert list(q_risk(f, y, (0.1, 0.5, 0.9)).values()) == pytest.approx(mine)             # torch and numpy say the same


@pytest.mark.parametrize("n, block", [(710, 138), (2264, 276), (710, 40)])
def test_block_intervals_cover_what_they_say(n, block):
    "AR(1) noise of mean zero at the sizes of the pipeline: 4,000 series, standard error 0.35 %."
    e = np.random.default_rng(n + block).normal(size=(n, 4000)); x = np.zeros_like(e)
    for i in range(n): x[i] = 0.8 * x[i - 1] + e[i]
    found = [block_interval(one, block) for one in x.T]
    assert 0.92 <= np.mean([d.low <= 0 <= d.high for d in found]) <= 0.98


@pytest.mark.parametrize("n, block", [(40, 1), (47, 7), (12, 5)])
def test_block_interval_is_the_t_interval_of_block_means(n, block):
    x = np.random.default_rng(0).normal(size=n); d = block_interval(x, block)
    means = np.array([b.mean() for b in np.split(x, [i * n // (n // block) for i in range(1, n // block)])])
    low, high = stats.t.interval(0.95, len(means) - 1, x.mean(), stats.sem(means))
    assert (d.value, d.low, d.high) == pytest.approx((x.mean(), low, high))


@pytest.mark.parametrize("blocks", [1, 2, ENOUGH - 1, ENOUGH])
def test_few_blocks_are_never_sure(blocks):
    losses = {"m": 0.5 + 1e-3 * np.random.default_rng(0).normal(size=20 * blocks), "last": np.ones(20 * blocks)}
    said = judged("m", losses, 20)
    assert said["blocks"] == blocks and ("m beats" in said["verdict"]) == (blocks >= ENOUGH)
    few = "1 independent block is too few" if blocks == 1 else f"{blocks} independent blocks are too few"
    assert (few in said["verdict"]) == ("m shows no edge over the best simple rule (last)" in said["verdict"]) == (blocks < ENOUGH)


@pytest.mark.parametrize("shift, begins, ends", [
    (0.2, "m shows no edge over the best simple rule (last): its loss is 20.0% higher", "beyond chance (the 95% interval of the difference excludes zero)"),
    (0.001, "m shows no edge over the best simple rule (last): its loss is 0.1% higher", "may be chance (the 95% interval of the difference includes zero)"),
    (-0.2, "m beats the best simple rule (last): its loss is 20.0% lower", "beyond chance (the 95% interval of the difference excludes zero)")])
def test_a_verdict_is_one_plain_sentence(shift, begins, ends):
    noise = 0.1 * np.random.default_rng(0).normal(size=400)
    said = judged("m", {"m": 1 + shift + noise - noise.mean(), "last": np.ones(400)}, 10)["verdict"]
    assert said.startswith(begins) and said.endswith(ends) and said.count(": ") == 1


@pytest.mark.parametrize("shift", [0, 7])   # ns between the copies' time stamps: one moment, or neighbours
@pytest.mark.parametrize("copies", [2, 4])
@pytest.mark.parametrize("who", ["contract", "instrument"])
def test_copies_of_a_contract_are_no_evidence(who, copies, shift):
    n, rng = 400, np.random.default_rng(0); model, rule = 0.9 + 0.3 * rng.normal(size=(20, 1)).repeat(20, 1).ravel(), np.ones(n)
    def said(k):
        ts = np.concatenate([np.arange(n) * 60 + i * shift for i in range(k)]); order = rng.permutation(k * n)          # rows in any order
        table = SimpleNamespace(**{"ts": ts[order], who: np.repeat(np.arange(k), n)[order]})
        losses, block = by_moment(table, np.arange(k * n), {"m": np.tile(model, k)[order], "last": np.tile(rule, k)[order]}, 20)
        return judged("m", losses, block)
    once, many = said(1), said(copies); a, b = once["against"]["last"], many["against"]["last"]
    assert once["blocks"] == many["blocks"] == 20 and once["verdict"] == many["verdict"] and (b.value, b.low, b.high) == pytest.approx((a.value, a.low, a.high))
    stacked = block_interval(np.tile(model - rule, copies), 20)
    assert stacked.high - stacked.low < 0.8 * (b.high - b.low)


def test_a_rule_without_loss_leaves_nothing_to_gain(recwarn):
    for mine in (0.0, 0.1):
        said = judged("m", {"m": np.full(400, mine), "last": np.zeros(400), "other": np.ones(400)}, 10)
        assert math.isnan(said["skill"]) and said["verdict"] == "m shows no edge over the best simple rule (last): the rule's loss is zero, so there is nothing to gain"
    assert not recwarn.list


@pytest.mark.parametrize("net, says", [
    ({s: 500.0 + s for s in range(12)}, "above every simple rule: net 506, the interquartile mean of 12 seeds (95 % interval "),
    ({0: -50.0, 1: 80.0, 2: 10.0}, "no edge found: net 13, the interquartile mean of 3 seeds (95 % interval ")])
def test_seeds_in_one_sentence(net, says):
    "The oracle is a ceiling, not a rule that was beaten."
    text = seed_summary(net, {"long": 100.0, "oracle": 9000.0})["text"]
    assert text.startswith(says) and "against long 100 (oracle 9,000)" in text and ("3 seeds are too few for a claim" in text) == (len(net) < 10)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 6), st.integers(0, 60), st.integers(0, 30), st.booleans())
def test_folds_never_reach_into_a_test_piece(folds, purge, embargo, rolling):
    t = synthetic_table(bars=1500, contracts=2)
    splits = walk_forward(t, folds, purge=purge, embargo=embargo, rolling=rolling, val=0.2)
    for s in splits:
        for c in (0, 1):
            rows = {k: np.flatnonzero((s == k) & (t.contract == c)) for k in (TRAIN, VAL, TEST)}
            assert rows[VAL].min() - rows[TRAIN].max() > purge + embargo - 1 and rows[TEST].min() - rows[VAL].max() > purge + embargo - 1
        horizon = max(purge, 1)
        ends = window_ends(dataclasses.replace(t, split=s), TRAIN, 8, horizon)
        assert (s[ends + horizon] == TRAIN).all()                                  # no training label is a validation or test bar
    test = np.concatenate([np.flatnonzero(s == TEST) for s in splits])
    assert len(test) == len(set(test.tolist())) == 1500                             # the later half of both contracts, once each


def test_changing_the_future_changes_no_fold_before_it():
    t = synthetic_table(bars=1000)
    s = walk_forward(t, 3, purge=20)[0]
    border = t.ts[s == TEST].min()
    late = dataclasses.replace(t, features=np.where((t.ts >= border)[:, None], 9, t.features).astype(np.float32))
    past = (s == TRAIN) | (s == VAL)
    assert np.array_equal(fold_table(t, s).features[past], fold_table(late, s).features[past])


def test_sealed_rows_cannot_be_trained_on(tmp_path):
    t = synthetic_table(bars=1000)
    rest = seal(t, tmp_path / "h.json")
    opened, looks = look(t, tmp_path / "h.json", "once")
    sealed = opened.split == TEST
    assert looks == 1 and sealed.sum() == 150 and len(rest) == 850
    for s in walk_forward(rest, 3): assert len(s) == 850 and not np.isin(rest.ts[s != UNUSED], t.ts[sealed]).any()
    assert fold_table(rest, walk_forward(rest, 3)[2]).features.shape == (850, 23)


def test_more_trials_need_more_evidence():
    m = moments(np.random.default_rng(0).normal(0.1, 1, 500))
    p = [deflated_sharpe(m, n) for n in (1, 2, 10, 100, 1000)]
    assert p == sorted(p, reverse=True) and p[0] == probabilistic_sharpe(m)


def test_iqm_ignores_the_outer_quarters():
    assert iqm(np.array([-1e9, 1, 2, 3, 4, 5, 6, 1e9])) == 3.5
