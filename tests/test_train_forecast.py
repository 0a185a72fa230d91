"Forecasters: no leak, no silent NaN, equal work whatever the batch, and known structure is found."
import dataclasses
import math

import numpy as np
import pytest
import torch

from foxhunt import params as P
from foxhunt.core import UserError
from foxhunt.data.windows import TEST, TRAIN, VAL, synthetic_table
from foxhunt.train.forecast import (ForecastTrainer, Forecasts, baselines, closed_before, compare, config_of, make_windows, pinball, predict, rebuild, scores, seasonal, targets, volatility)

replace = dataclasses.replace
TFT = P.TFT(epochs=2, lookback=8, horizon=3, stride=4, hidden=8, heads=2, batch=32)
MAMBA = P.Mamba2(epochs=2, lookback=8, horizon=3, stride=4, d_model=16, n_layers=1, d_state=8, head=8, batch=32)
TLOB = P.TLOB(epochs=1, stride=64, hidden=16, n_layers=1)


@pytest.fixture(scope="module")
def table(): return synthetic_table(800, 4, seed=1, contracts=3)


@pytest.fixture(scope="module")
def book():
    from foxhunt.data.book import synthetic_book
    return synthetic_book(4_000)


@pytest.mark.unit
def test_windows_stay_inside(table):
    w = make_windows(table, TFT)
    closed = np.cumsum(closed_before(table))
    for s in (TRAIN, VAL, TEST):
        ends = w.ends[s]; span = ends[:, None] + np.arange(1 - 8, 4)
        assert len(ends) and (table.split[span] == s).all() and (table.contract[span] == table.contract[ends][:, None]).all() and (closed[ends] == closed[ends + 3]).all()
    assert not set(np.concatenate([w.ends[TRAIN][:, None] + np.arange(1 - 8, 4)]).ravel()) & set((w.ends[TEST][:, None] + np.arange(1 - 8, 4)).ravel())


@pytest.mark.unit
@pytest.mark.parametrize("cfg", [TFT, MAMBA], ids=["tft", "mamba2"])
def test_future_never_reaches_a_forecast(cfg, table):
    t = ForecastTrainer(table, cfg); t.run_epoch(); row = int(t.windows.ends[TEST][20])
    after = np.arange(len(table)) > row
    changed = replace(table, features=np.where(after[:, None], -5, table.features).astype(np.float32), close=np.where(after, table.close * 1.02, table.close), open=np.where(after, 1.0, table.open))
    a, b = (predict(t.model, x, "test", t.describe()) for x in (table, changed))
    seen = a.ends <= row
    assert seen.any() and torch.equal(a.predicted[seen], b.predicted[seen])


@pytest.mark.unit
def test_targets_are_log_returns(table):
    scale = volatility(table); y = targets(table, 3, scale)
    for i in (10, 300, 900, 1700):
        for j in (1, 2, 3):
            if np.isfinite(y[i, j - 1]): assert y[i, j - 1] == pytest.approx(math.log(table.close[i + j] / table.close[i]) / scale[table.contract[i]] / math.sqrt(j), rel=1e-4, abs=1e-6)
    assert np.isnan(targets(table, 900, scale)[:, 799:]).all() and np.isnan(y[-1]).all() and np.isnan(y[799]).all()   # past a contract's end


@pytest.mark.unit
def test_bad_input_is_named(table):
    for col, row in ((0, 5), (3, 411)):
        f = table.features.copy(); f[row, col] = np.inf
        with pytest.raises(UserError, match=f"row {row}, f{col}: inf"): ForecastTrainer(replace(table, features=f), TFT)
    close = table.close.copy(); close[50] = -37.6
    with pytest.raises(UserError, match="row 50: close is -37.6.*SYN0 cannot be forecast"): ForecastTrainer(replace(table, close=close), TFT)
    with pytest.raises(UserError, match="no window of 5000"): ForecastTrainer(table, replace(TFT, lookback=5000))


@pytest.mark.unit
@pytest.mark.parametrize("cfg", [TFT, MAMBA], ids=["tft", "mamba2"])
def test_batches_do_not_matter_for_a_forecast(cfg, table):
    t = ForecastTrainer(table, cfg); t.model.eval()
    n = len(predict(t.model, table, "val", t.describe(), stride=5))
    a, b, c = (predict(t.model, table, "val", t.describe(), batch=k, stride=5) for k in (n - 1, 1, 10_000))   # n % batch == 1
    assert a.predicted.shape == (n, 3, 3) == b.predicted.shape and torch.allclose(a.predicted, b.predicted, atol=1e-5) and torch.allclose(a.predicted, c.predicted, atol=1e-5)


@pytest.mark.unit
def test_contracts_are_matched_by_name(table):
    "A model of SYN0 and SYN2 sees them as itself in any table, and a stranger as unknown; scales follow the names."
    t = ForecastTrainer(table, TFT); meta = t.describe()
    order = np.argsort(-table.contract, kind="stable"); back = replace(table, **{k: getattr(table, k)[order] for k in ("features", "ts", "open", "high", "low", "close", "session", "session_frac", "last_in_session", "split")},
                    contract=2 - table.contract[order], segment=2 - table.contract[order], contracts=table.contracts[::-1])
    a, b = (predict(t.model, x, "test", meta) for x in (table, back))
    key = lambda f, x: {(x.contracts[x.contract[e]], int(x.ts[e])): f.predicted[i] for i, e in enumerate(f.ends)}
    ka, kb = key(a, table), key(b, back); assert ka.keys() == kb.keys() and all(torch.allclose(ka[k], kb[k], atol=1e-6) for k in ka)
    stranger = replace(table, contracts=("NEW", "SYN1", "SYN2")); w = make_windows(stranger, TFT, contracts=table.contracts)
    assert set(w.static[torch.from_numpy(table.contract == 0)].tolist()) == {0}


@pytest.mark.unit
def test_decay_groups(table):
    t = ForecastTrainer(table, MAMBA); names = {p: n for n, p in t.model.named_parameters()}
    free = {names[p] for g in t.opt.param_groups if g["weight_decay"] == 0 for p in g["params"]}
    assert sum(len(g["params"]) for g in t.opt.param_groups) == len(names)
    for part in ("A_log", "dt_bias", "D"): assert any(part in n for n in free), part
    assert all(p.ndim >= 2 for p, n in names.items() if n not in free)


ALL = pytest.mark.parametrize("cfg", [TFT, MAMBA, TLOB, replace(TLOB, mixer=True)], ids=["tft", "mamba2", "tlob", "mlplob"])


@pytest.mark.integration
@ALL
@pytest.mark.parametrize("n", [31, 32, 5])
def test_accumulation_equals_the_large_batch(cfg, n, table, book):
    def grads(accumulate):
        t = ForecastTrainer(book if isinstance(cfg, P.TLOB) else table, replace(cfg, accumulate=accumulate, dropout=0.0)); t.gradients(torch.from_numpy(t.windows.ends[TRAIN][:n])); return torch.cat([p.grad.flatten() for p in t.model.parameters()])
    a, b = grads(1), grads(4)
    assert torch.allclose(a, b, rtol=1e-4, atol=2e-6 * max(1.0, a.abs().max().item()))


@pytest.mark.integration
@ALL
def test_checkpointed_gradients_are_the_same(cfg, table, book):
    def grads(on):
        t = ForecastTrainer(book if isinstance(cfg, P.TLOB) else table, replace(cfg, grad_checkpoint=on)); torch.manual_seed(1); t.gradients(torch.from_numpy(t.windows.ends[TRAIN][:16])); return torch.cat([p.grad.flatten() for p in t.model.parameters()])
    assert torch.allclose(grads(False), grads(True), rtol=1e-4, atol=1e-6)


@pytest.mark.integration
def test_memory_that_runs_out_changes_nothing_but_the_pace(table, monkeypatch):
    a, b = (ForecastTrainer(table, replace(TFT, dropout=0.0)) for _ in range(2)); at, tries = b.windows.at, []
    def short(ends):
        tries.append(len(ends))
        if len(ends) > 8: raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return at(ends)
    object.__setattr__(b.windows, "at", short)
    ends = torch.from_numpy(a.windows.ends[TRAIN][:32]); a.gradients(ends); b.gradients(ends)
    assert b.micro == 8 and tries[:2] == [32, 16] and tries[2:] == [8] * 4
    for p, q in zip(a.model.parameters(), b.model.parameters()): assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-6)
    def broken(ends): raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    object.__setattr__(b.windows, "at", broken)
    with pytest.raises(RuntimeError, match="mat1"): b.gradients(ends)                      # only memory is retried


@pytest.mark.unit
def test_rebuild_from_json(table, book):
    import json
    for cfg, x in ((TFT, table), (MAMBA, table), (TLOB, book), (replace(TLOB, mixer=True), book)):
        t = ForecastTrainer(x, cfg); meta = json.loads(json.dumps(t.describe()))
        assert config_of(meta) == cfg and {k: v.shape for k, v in rebuild(meta).state_dict().items()} == {k: v.shape for k, v in t.model.state_dict().items()}


@pytest.mark.integration
def test_book_end_to_end(book):
    t = ForecastTrainer(book, TLOB); m = t.run_epoch(); meta = t.describe()
    r = compare(t.model, book, "test", meta, stride=50)
    assert math.isfinite(m["loss"]) and set(r["scores"]) == {"tlob", "last", "linear", "seasonal"} and sum(map(sum, r["scores"]["tlob"]["confusion"])) == r["scores"]["tlob"]["n"]


@pytest.mark.unit
def test_scores_by_hand():
    f = Forecasts(np.arange(2), torch.tensor([[[0.0, 1.0]], [[0.0, 1.0]]]), torch.tensor([[2.0], [-2.0]]), np.ones((2, 1)), (0.25, 0.75))
    s = scores(f)   # errors: 2, -2 below; 1, -3 above
    assert s["loss"] == pytest.approx(np.mean([0.25 * 2, 0.75 * 2, 0.75 * 1, 0.25 * 3])) and s["coverage"] == {"0.25": 0.5, "0.75": 0.5}
    assert s["q_risk"]["0.25"] == pytest.approx(2 * (0.25 * 2 + 0.75 * 2) / 4)
    c = scores(Forecasts(np.arange(3), torch.eye(3) * 9, torch.tensor([0, 1, 1]), np.zeros((3, 0)), ()))
    assert c["confusion"] == [[1, 0, 0], [0, 1, 1], [0, 0, 0]] and c["accuracy"] == pytest.approx(2 / 3) and c["f1"] == pytest.approx((1 + 2 / 3 + 0) / 3)


@pytest.mark.unit
def test_seasonal_knows_only_the_past(table):
    ends = make_windows(table, TFT).ends[TEST]; unit = volatility(table)[table.contract[ends]][:, None] * np.sqrt([1, 2, 3])
    a = seasonal(table, ends, 3, unit); i = int(np.flatnonzero(a.any(1))[0])
    b = seasonal(replace(table, close=np.where(np.arange(len(table)) > ends[i], table.close * 2, table.close)), ends, 3, unit)
    assert np.array_equal(a[i], b[i])
    e, r = ends[i], int(np.flatnonzero((table.ts == table.ts[ends[i]] - 86_400 * 10**9) & (table.contract == table.contract[ends[i]]))[0])
    assert a[i, 1] == pytest.approx(math.log(table.close[r + 2] / table.close[r]) / unit[i, 1])


@pytest.mark.unit
def test_linear_baseline_is_the_least_squares_solution():
    t = synthetic_table(3_000, 3, kind="visible"); meta = ForecastTrainer(t, replace(TFT, horizon=1)).describe()
    f = baselines(t, "test", meta)["linear"]
    assert (f.predicted[:, 0, 1] - f.target[:, 0]).abs().median() < 0.02        # the next return is a feature: it is found


def noisy_table(bars, share=0.8, seed=3):
    "The next return is `share` of what feature 0 says, the rest is noise: Bayes loss = mean normal density at the quantiles x sqrt(1 - share^2)."
    t = synthetic_table(bars, 3, seed=seed); rng = np.random.default_rng(seed); z, e = rng.standard_normal((2, bars))
    r = 1e-4 * (share * z + math.sqrt(1 - share**2) * e); f = t.features.copy(); f[:, 0] = z
    return replace(t, features=f, close=np.exp(np.cumsum(np.r_[0, r[:-1]])), open=np.exp(np.cumsum(np.r_[0, r[:-1]])))


@pytest.mark.slow
@pytest.mark.integration
@pytest.mark.parametrize("cfg", [replace(TFT, hidden=16, epochs=5, lr=1e-2), replace(MAMBA, d_model=32, epochs=8, lr=5e-3)], ids=["tft", "mamba2"])
def test_known_structure_within_a_tenth_of_bayes(cfg):
    t = noisy_table(12_000); cfg = replace(cfg, horizon=1, stride=1, dropout=0.0)
    trainer = ForecastTrainer(t, cfg)
    for _ in range(cfg.epochs): trainer.run_epoch()
    f = predict(trainer.model, t, "test", trainer.describe()); s = scores(f)
    density = np.mean([math.exp(-x * x / 2) / math.sqrt(2 * math.pi) for x in (-1.28155, 0, 1.28155)])
    bayes = density * 0.6 * 1e-4 / f.unit[0, 0]
    assert s["loss"] < 1.10 * bayes, (s["loss"], bayes)
    assert all(abs(s["coverage"][q] - float(q)) < 0.05 for q in ("0.1", "0.5", "0.9"))
    last = pinball(torch.quantile(f.target, torch.tensor([0.1, 0.5, 0.9])).expand(len(f), 1, 3), f.target, (0.1, 0.5, 0.9)).mean()
    assert s["loss"] < 0.75 * last


@pytest.mark.gpu
@pytest.mark.device
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu(precision, table, book):
    for cfg, x in ((TFT, table), (MAMBA, table), (TLOB, book)):
        a = ForecastTrainer(x, replace(cfg, precision=precision, dropout=0.0), device="cuda"); b = ForecastTrainer(x, replace(cfg, dropout=0.0))
        for k, v in a.weights().items(): assert torch.equal(v.cpu(), b.weights()[k])            # the same start on every device
        m, n = a.run_epoch(), b.run_epoch()
        assert m["loss"] == pytest.approx(n["loss"], rel=1e-3 if precision == "fp32" else 0.1)
        f = predict(a.model, x, "test", a.describe()); assert f.predicted.device.type == "cpu" and f.predicted.isfinite().all()
