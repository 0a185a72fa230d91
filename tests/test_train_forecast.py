"Forecasters: no leak, no silent NaN, equal work whatever the batch, and known structure is found."
import dataclasses
import math

import numpy as np
import pytest
import torch

from foxhunt import params as P
from foxhunt.core import UserError
from foxhunt.data.windows import TEST, TRAIN, VAL, synthetic_table
from foxhunt.train import forecast
from foxhunt.train.health import TrainingError
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
    flat = (table.contract == 1) & (table.split == TRAIN)
    with pytest.raises(UserError, match="^SYN1: the price does not move in the training split[^\n]*$"): ForecastTrainer(replace(table, close=np.where(flat, 1.1, table.close)), TFT)


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
    held = [g for g in t.opt.param_groups if any(names[p] not in free for p in g["params"])]
    assert held and all(g["weight_decay"] == MAMBA.weight_decay > 0 for g in held)
    assert {n for p, n in names.items() if n not in free} >= {n for p, n in names.items() if n.endswith("proj.weight")} != set()


@pytest.mark.unit
@pytest.mark.parametrize("precision, dtype", [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_precision_reaches_the_matrices(precision, dtype, table):
    t, seen = ForecastTrainer(table, replace(TFT, precision=precision, epochs=1, stride=40)), {True: set(), False: set()}
    t.model.attention.query.register_forward_hook(lambda m, x, out: seen[m.training].add(out.dtype))   # inside no full-precision island
    t.run_epoch()
    assert seen == {True: {dtype}, False: {dtype}}                                         # in training and in validation


@pytest.mark.unit
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_clipped_in_their_own_unit(precision, table):
    "The norm of the report is that before clipping, without fp16's loss scale; the step sees gradients of norm `clip`."
    def update(clip, precision=precision):
        t = ForecastTrainer(table, replace(TFT, precision=precision, clip=clip, dropout=0.0)); norm = t._update(torch.from_numpy(t.windows.ends[TRAIN][:32]))[1].item()
        return norm, torch.cat([p.grad.flatten() for p in t.model.parameters()]).norm().item()
    exact = update(1e9, "fp32")[0]; norm, left = update(1e-3)
    assert 1e-2 < exact < 1e2 and norm == pytest.approx(exact, rel=0.1) and left == pytest.approx(1e-3, rel=1e-3)
    assert update(1e9)[1] == pytest.approx(norm, rel=1e-3)                                 # a wide clip leaves them alone


@pytest.mark.unit
def test_every_epoch_has_an_order_of_its_own(table):
    t, seen = ForecastTrainer(table, TFT), []; at = t.windows.at
    object.__setattr__(t.windows, "at", lambda e: (seen.append(e.tolist()) if t.model.training else None, at(e))[1])
    orders = []
    for _ in range(2): t.run_epoch(); orders.append([i for b in seen for i in b]); seen.clear()
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1]) == t.windows.ends[TRAIN].tolist() and orders[0] != sorted(orders[0])


@pytest.mark.unit
def test_only_a_better_number_is_the_best(table, monkeypatch):
    t = ForecastTrainer(table, replace(TFT, patience=3, stride=40)); told = []
    def judged(v):
        monkeypatch.setattr(forecast, "validate", lambda *a: v)
        with torch.no_grad(): next(t.model.parameters()).fill_(float(t.epoch + 1))         # so that weights tell their epoch
        t.epoch += 1; t._judge(); told.append((t.best, t.bad_epochs, next(iter(t.weights().values())).unique().tolist(), t.describe().get("best_epoch")))
    for v in (math.nan, 0.5, math.nan, 0.5, 0.4, math.inf): judged(v)
    assert told == [(math.inf, 1, [1.0], None), (0.5, 0, [2.0], 2), (0.5, 1, [2.0], 2), (0.5, 2, [2.0], 2), (0.4, 0, [5.0], 5), (0.4, 1, [5.0], 5)]
    again = ForecastTrainer(table, t.cfg); again.load_state_dict(t.state_dict()); assert again.describe() == t.describe()
    assert "best_epoch" not in ForecastTrainer(table, TFT).describe()


@pytest.mark.unit
def test_a_forecast_that_is_not_a_number_is_named(table):
    t = ForecastTrainer(table, TFT); t.model.eval(); meta = t.describe(); ends = t.windows.ends[TEST]
    with torch.no_grad(): t.model.static.tables[0].weight[2, 0] = math.nan                  # what the model knows of SYN1 alone
    row = predict(ForecastTrainer(table, TFT).model, table, "test", meta).ends; row = row[table.contract[row] == 1][0]
    assert table.contract[ends[0]] == 0
    with pytest.raises(TrainingError, match=f"window ending at row {row} is not finite"): predict(t.model, table, "test", meta)


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
    assert set(r) == {"scores", "best_rule", "skill"} and r["skill"] == pytest.approx(1 - r["scores"]["tlob"]["loss"] / min(r["scores"][n]["loss"] for n in ("last", "linear", "seasonal")))
    assert math.isfinite(m["loss"]) and set(r["scores"]) == {"tlob", "last", "linear", "seasonal"} and sum(map(sum, r["scores"]["tlob"]["confusion"])) == r["scores"]["tlob"]["n"]


@pytest.mark.checkpoint
def test_weights_of_a_book_model_carry_its_scaler(book, tmp_path):
    from foxhunt.data.book import level_matrix, synthetic_levels
    from foxhunt.train.checkpoint import save_weights
    from foxhunt.train.registry import load_model
    t = ForecastTrainer(book, TLOB); t.run_epoch(); save_weights(tmp_path / "tlob_epoch_1.safetensors", t.weights(), {"epoch": 1} | t.describe())
    model, meta = load_model(tmp_path / "tlob_epoch_1.safetensors"); center, scale = (np.array(meta["book_scaler"][k]) for k in ("center", "scale"))
    raw = level_matrix(synthetic_levels(4_000)); assert center.shape == scale.shape == (40,) and len(raw) == len(book.book)
    assert np.abs((raw - center) / scale - book.book).max() < 1e-5 < np.abs(raw - book.book).max()
    ends = t.windows.ends[TEST][:4]; x = torch.from_numpy((raw - center) / scale).float()[torch.from_numpy(ends)[:, None] + torch.arange(-127, 1)]
    with torch.no_grad(): assert torch.allclose(model(x), t.model.eval()(t.windows.at(torch.from_numpy(ends)).inputs[0]), atol=1e-4)
    bare = replace(book, meta={k: v for k, v in book.meta.items() if k != "scaler"}); assert "book_scaler" not in ForecastTrainer(bare, TLOB).describe()


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
def test_seasonal_beyond_a_day_takes_last_week():
    "A horizon of 30 hours, in a market that never closes: the returns after yesterday's bar were not known yet, those of a week ago were."
    t = synthetic_table(800, 3, seed=2); hour = 3600 * 10**9; i = np.arange(800)
    t = replace(t, ts=i * hour, session=np.zeros(800, np.int64), interval_ns=hour); ends = np.arange(200, 760); unit = np.ones((len(ends), 30))
    a = seasonal(t, ends, 30, unit)
    assert np.allclose(a, np.log(t.close[ends[:, None] - 168 + np.arange(1, 31)] / t.close[ends - 168][:, None]), atol=1e-12) and a.any()
    for e in (200, 400, 700): assert np.array_equal(seasonal(replace(t, close=np.where(i > e, t.close * 2, t.close)), np.array([e]), 30, unit[:1])[0], a[e - 200])
    assert np.allclose(seasonal(t, ends, 24, unit)[:, -1], np.log(t.close[ends] / t.close[ends - 24]), atol=1e-12)   # a day, all of it known: yesterday's


@pytest.mark.unit
def test_rules_measure_their_errors_before_the_test_split(table):
    meta = ForecastTrainer(table, TFT).describe(); rng = np.random.default_rng(0)
    def width(split):
        x = replace(table, close=np.where(table.split == split, table.close * np.exp(rng.normal(0, 0.05, len(table))), table.close))
        return {n: (f.predicted.double().diff(dim=-1)[:, :, :], f.target) for n, f in baselines(x, "test", meta).items()}
    plain, later, before = width(-9), width(TEST), width(VAL)
    for n in plain:
        assert torch.allclose(plain[n][0], later[n][0], atol=2e-3, rtol=1e-4) and (later[n][1] - plain[n][1]).abs().mean() > 10, n   # float32 beside point forecasts of some thousands
        assert not torch.allclose(plain[n][0], before[n][0], rtol=0.5), n                  # they are the errors of the validation split
    assert torch.equal(baselines(table, "test", meta)["last"].predicted, baselines(replace(table, close=np.where(table.split == TEST, table.close * 2, table.close)), "test", meta)["last"].predicted)


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
