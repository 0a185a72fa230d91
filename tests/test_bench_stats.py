"Laws of the epoch-time statistics that need many series."
import math

import numpy as np
import pytest

from foxhunt.bench.stats import ar1, drift, forecast, intervals, lag1, outliers, summarize, t_quantile, warm_up


@pytest.mark.parametrize("n", [50, 200])
@pytest.mark.parametrize("rho", [0.0, 0.3, 0.6])
def test_intervals_cover_what_they_say(rho, n):
    mean, half, _ = intervals(ar1(n, rho, np.random.default_rng(7), 2000))
    assert 0.92 <= (abs(mean) <= half).mean() <= 0.97


def test_intervals_scale_and_shift_with_the_samples():
    x = ar1(60, 0.4, np.random.default_rng(0))[0]
    m, h, n = intervals(x); m2, h2, n2 = intervals(1000 * x + 5000)
    assert np.allclose([1000 * m + 5000, 1000 * h, n], [m2, h2, n2])


def test_t_quantile_agrees_with_scipy_over_the_whole_range():
    t = pytest.importorskip("scipy.stats").t
    df = np.concatenate([np.linspace(1, 3, 40), np.geomspace(3, 1e6, 60)])
    for p in (0.9, 0.975, 0.995): assert np.allclose(t_quantile(p, df), t.ppf(p, df), rtol=1e-6)


def test_a_drifting_series_is_not_steady_and_gets_no_promise():
    rng = np.random.default_rng(1)
    for sign in (1, -1):
        s = summarize(1 + 0.01 * rng.standard_normal(100) + sign * 0.002 * np.arange(100))
        assert not s.steady_state and s.low is None and forecast(s, 100).low is None and np.sign(s.slope) == sign


def test_a_stall_moves_the_raw_mean_and_is_flagged_wherever_it_is():
    rng = np.random.default_rng(2)
    for at in (30, 50, 79):
        x = 1 + 0.01 * rng.standard_normal(80); x[at] = 8.0
        s = summarize(x)
        assert at in s.outliers and s.mean > 1.05 and abs(s.p50 - 1) < 0.01 and abs(s.trimmed_mean - 1) < 0.01 and s.used + s.warm_up == s.n


def test_warm_up_is_bounded_and_only_leading():
    x = np.ones(40) + 0.001 * np.random.default_rng(3).standard_normal(40)
    x[:3] = 5; x[20] = 9
    assert warm_up(x) == 3 and warm_up(np.r_[np.full(30, 9.0), x]) <= 70 // 4
    assert 20 in summarize(x).outliers        # a later stall is no warm-up


@pytest.mark.parametrize("x", [[0.1] * 60, [1e-7] * 7, [3600.0] * 5])
def test_constant_series_have_no_spread_and_no_nan(x):
    s = summarize(x)
    assert s.steady_state and math.isclose(s.mean, x[0]) and s.low <= s.mean * (1 + 1e-9) and s.high - s.low < 1e-9 * s.mean and not s.outliers


def test_long_series_are_averaged_before_their_slopes_are_taken():
    x = 1 + 1e-5 * np.arange(5000) + 0.001 * np.random.default_rng(4).standard_normal(5000)
    d = drift(x)
    assert abs(d.slope / 1e-5 - 1) < 0.02 and not d.steady


def test_refuses_what_is_no_time():
    with pytest.raises(ValueError, match="sample 1 is not finite"): summarize([1.0, math.inf, 1.0])
    with pytest.raises(ValueError, match="at least 5"): lag1(np.ones(3))
    assert not outliers([1.0, 2.0]).any()


@pytest.mark.parametrize("n", [5, 9, 10, 20, 50, 300])
def test_clean_series_have_no_stalls_and_real_ones_are_found(n):
    rng = np.random.default_rng(n); clean = 1 + 0.05 * rng.standard_normal((600, n))
    assert np.mean([outliers(x).any() for x in clean]) < (0.075 if n >= 10 else 1e-9)     # 5 %, and three deviations of 600 draws
    for at in (0, n // 2, n - 1):
        x = clean[0].copy(); x[at] *= 3
        assert outliers(x)[at] == (n >= 10)


def test_a_fast_sample_is_no_stall_and_a_drift_hides_none():
    x = 1 + 0.01 * np.random.default_rng(5).standard_normal(40); x[7] = 0.1
    assert not outliers(x)[7]
    y = x + 0.05 * np.arange(40); y[20] += 1
    assert not drift(y).steady and outliers(y)[20] and not outliers(y)[[0, 39]].any()
