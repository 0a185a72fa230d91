"""Order books from real and made files: exact levels, MBO and MBP-10 of one market alike, bounded memory."""
import dataclasses
import subprocess, sys

import databento_dbn as dbn
import numpy as np
import pandas as pd
import pytest

from _dbn import T0, definition, header, mbp10, write
from _realdata import real
from foxhunt.core import UserError
from foxhunt.data.book import CROSSED, LEVELS, ONE_SIDED, TRAIN, VAL, OrderBook, book_events, book_window_ends, book_windows, load_book, make_book, relabel, synthetic_book, synthetic_levels


def test_real_mbp10_levels_are_exact():
    (levels, ts, ids, names), = book_events(real("glbx/test_data.mbp-10.dbn.zst"))
    assert levels[0, :4].tolist() == [3702.75, 13, 3702.25, 19] and set(ids.tolist()) == {5482} and set(names) == {"ESH1"} and len(ts) == 4
    asks, bids = levels[:, 0::4], levels[:, 2::4]
    assert (np.diff(asks) > 0).all() and (np.diff(bids) < 0).all() and (asks % 0.25 == 0).all()


def test_real_mbo_gives_a_book():
    out = list(book_events(real("glbx/test_data.mbo.dbn.zst")))
    assert all(np.isnan(l[:, 0]).all() for l, *_ in out)                    # four bids of a snapshot: no ask yet


def market(n: int, seed: int):
    "A random stream of orders: MBO messages, and the ten best levels after each exchange event from a book that is summed anew every time."
    rng = np.random.default_rng(seed); orders, messages, books, t = {}, [], [], T0
    messages.append(dbn.MBOMsg(1, 7, t, 0, dbn.UNDEF_PRICE, 0, dbn.Action.CLEAR, dbn.Side.NONE, t, flags=0))
    for i in range(n):
        t += int(rng.integers(1, 10**7)); id = int(rng.integers(1, 400)); act = "ACM"[rng.choice(3, p=(0.55, 0.25, 0.2))]
        if act == "A" and id in orders: act = "M"
        if act in "CM" and id not in orders: act = "A"
        side = orders[id][0] if id in orders else "AB"[rng.integers(2)]; price = 100_000_000_000 + (int(rng.integers(1, 25)) if side == "A" else -int(rng.integers(0, 25))) * 250_000_000
        size = int(rng.integers(1, 20)); last = rng.random() < 0.7 or i == n - 1
        s = dbn.Side.ASK if side == "A" else dbn.Side.BID
        if rng.random() < 0.3:                                              # a trade and its fill before the change: they must not count
            messages += [dbn.MBOMsg(1, 7, t, 0, price, 3, dbn.Action.TRADE, s, t), dbn.MBOMsg(1, 7, t, id, price, 3, dbn.Action.FILL, s, t)]
        if act == "C": price, size = orders[id][1], min(size, orders[id][2]); left = orders[id][2] - size; orders[id] = (side, price, left)
        else: orders[id] = (side, price, size)
        if orders[id][2] == 0: del orders[id]
        messages.append(dbn.MBOMsg(1, 7, t, id, price, size, {"A": dbn.Action.ADD, "C": dbn.Action.CANCEL, "M": dbn.Action.MODIFY}[act], s, t, flags=128 if last else 0))
        if not last: continue
        pairs = []
        for want, sign in (("A", 1), ("B", -1)):
            total = {}
            for sd, p, z in orders.values():
                if sd == want: total[p] = total.get(p, 0) + z
            pairs.append([(p, total[p]) for p in sorted(total, key=lambda p: sign * p)[:LEVELS]])
        books.append((t, pairs))
    return messages, books


def test_mbo_and_mbp10_of_one_market_make_one_table(tmp_path):
    messages, books = market(1500, 3)
    write(tmp_path / "o.dbn.zst", messages, "mbo", {"ESH4": 7}); (tmp_path / "m").mkdir(); (tmp_path / "o").mkdir()
    (tmp_path / "o.dbn.zst").rename(tmp_path / "o" / "o.dbn.zst")
    pad = lambda side, i, k: side[i][k] if i < len(side) else (dbn.UNDEF_PRICE, 0)[k]
    msgs = [dbn.MBP10Msg(1, 7, t, 0, 0, dbn.Action.MODIFY, dbn.Side.NONE, 0, t, levels=[dbn.BidAskPair(pad(bids, i, 0), pad(asks, i, 0), pad(bids, i, 1), pad(asks, i, 1)) for i in range(LEVELS)]) for t, (asks, bids) in books]
    write(tmp_path / "m" / "m.dbn", msgs, "mbp-10", {"ESH4": 7})
    for chunk in (64, 1 << 16):
        made = [make_book(tmp_path / k, tmp_path / f"{k}-book", chunk=chunk, horizon=5, smooth=3) for k in "om"]; a, b = (load_book(tmp_path / f"{k}-book") for k in "om")
        assert made[0]["events"] == len(books) and made[0]["unknown_orders"] == 0
        for k in ("ts", "mid", "book", "flags", "split", "labels", "run"): np.testing.assert_array_equal(getattr(a, k), getattr(b, k), err_msg=k)
    assert (a.flags & ONE_SIDED).any()                                      # the first events have one side only


def test_fills_applied_as_changes_would_cross_the_book():
    "What the rule protects from: an aggressive order eats the best ask; its fills, taken as additions, leave phantom orders."
    book = OrderBook()
    for step in (("A", "A", 100, 5, 1), ("A", "A", 101, 5, 2), ("A", "B", 99, 5, 3)): book.apply(*step)
    assert not book.apply("T", "B", 100, 5, 0) and not book.apply("F", "A", 100, 5, 1) and book.apply("C", "A", 100, 5, 1)
    assert [x * 1e9 for x in book.levels()[:4:2]] == [101, 99]


def test_pre_open_books_are_flagged_and_kept_out_of_windows(tmp_path):
    x = synthetic_levels(2000); x.pop("pressure"); f = pd.DataFrame(x | {"ts_event": pd.to_datetime(x["ts_event"], utc=True)})
    pre = slice(300, 443); f.loc[300:442, [c for c in f if c.startswith("bid_px")]] += 94 * 0.25; f.loc[900, "ask_px_00"] = np.nan; f.loc[900, "ask_sz_00"] = 0
    f.to_parquet(tmp_path / "b.parquet"); made = make_book(tmp_path / "b.parquet", tmp_path / "out"); t = load_book(tmp_path / "out")
    assert made["flags"]["crossed"] == 143 and (t.flags[pre] & CROSSED).all() and t.flags[900] & ONE_SIDED and np.isnan(t.mid[900]) and np.isfinite(t.book).all()
    ends = book_window_ends(t, TRAIN, 64); rows = ends[:, None] + np.arange(-63, 1)
    assert len(ends) and not t.flags[rows].any() and not np.isin(900, rows)
    assert not (t.labels[t.flags != 0] >= 0).any() and not (t.labels[280:443] >= 0)[-143 - 10:].any()      # no label from a book beyond


def test_outrights_only_and_one_root(tmp_path):
    (tmp_path / "p").mkdir()
    for i, (symbol, id) in enumerate({"ESH4": 1, "ESH4-ESM4": 2, "NQH4": 3}.items()): write(tmp_path / "p" / f"{i}.dbn", mbp10(200, id), "mbp-10", {symbol: id}, stype_in="parent", names=["ES.FUT", "NQ.FUT"])
    r = make_book(tmp_path / "p", tmp_path / "out", root="ES"); assert list(r["instruments"]) == ["1"] and r["spreads"] == {"ESH4-ESM4": 200} and r["other_roots"] == {"NQ": 200}
    both = make_book(tmp_path / "p", tmp_path / "out"); t = load_book(tmp_path / "out")
    assert list(both["instruments"]) == ["1", "3"] and (np.diff(t.instrument) != 0).sum() == 1
    ends = book_window_ends(t, VAL, 16); assert (t.instrument[ends] == t.instrument[ends - 15]).all()


def test_relabel_changes_labels_and_nothing_else():
    t = synthetic_book(3000); far = relabel(t, 40)
    assert far.meta["horizon"] == 40 and far.meta["threshold"] > t.meta["threshold"] and far.book is t.book and (far.labels != t.labels).any()
    assert book_windows(t, np.array([200]), 128).shape == (1, 128, 40)


@pytest.mark.parametrize("horizon, smooth", [(10, 10), (40, 10), (25, 5)])
def test_relabel_takes_its_threshold_from_training_rows_alone(horizon, smooth):
    "Wild prices in validation and test change neither the threshold nor a training label."
    t = synthetic_book(3000); late = t.split != TRAIN
    wild = dataclasses.replace(t, mid=np.where(late, t.mid * (1 + 0.5 * np.sin(np.arange(t.rows))), t.mid))
    a, b = relabel(t, horizon, smooth), relabel(wild, horizon, smooth)
    assert a.meta["threshold"] == b.meta["threshold"] > 0 and np.array_equal(a.labels[~late], b.labels[~late])
    assert (a.labels[late] != b.labels[late]).any()                                        # the change was seen


def test_messages_of_the_book(tmp_path):
    write(tmp_path / "d.dbn", [definition(1, "ESH4")], "definition"); (tmp_path / "x.csv").write_text("a")
    for src, says in ((tmp_path / "none", "no such file"), (tmp_path / "d.dbn", "needs mbp-10 or mbo"), (tmp_path / "x.csv", "not a DBN file"), (write(tmp_path / "few.dbn", mbp10(9), "mbp-10"), "9 book events; labels need")):
        with pytest.raises(UserError, match=says): make_book(src, tmp_path / "out")
    (tmp_path / "mine").mkdir(); (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="holds other files"): make_book(write(tmp_path / "m.dbn", mbp10(100), "mbp-10"), tmp_path / "mine")


def peaks(pairs, chunk=1 << 16) -> list[tuple[int, int]]:
    "Events and peak resident MiB after each `make_book`, one after the other in a process of its own (VmHWM: getrusage would inherit this process's)."
    code = """import sys; from foxhunt.data.book import make_book
for src, out in zip(sys.argv[2::2], sys.argv[3::2]):
    r = make_book(src, out, chunk=int(sys.argv[1])); print(r['events'], next(int(l.split()[1]) // 1024 for l in open('/proc/self/status') if l.startswith('VmHWM')))"""
    done = subprocess.run([sys.executable, "-c", code, str(chunk), *map(str, sum(pairs, ()))], capture_output=True, text=True, check=True)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


def big(path, events: int, block: int = 50_000):
    "A long MBP-10 file from repeated blocks of the synthetic market, written block by block."
    recs = np.frombuffer(mbp10(block), np.dtype(dbn.MBP10Msg._dtypes)).copy()
    with open(path, "wb") as f:
        f.write(header("mbp-10", {"ESH4": 1001}))
        for i in range(events // block):
            recs["ts_event"] = recs["ts_recv"] = T0 + i * 3600 * 10**9 + np.arange(block) * 10**6; f.write(recs.tobytes())      # a block an hour
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_file(tmp_path):
    (n1, small), (n2, large) = peaks([(big(tmp_path / f"{n}.dbn", n, 20_000), tmp_path / f"{n}") for n in (40_000, 160_000)], 8192)
    assert (n1, n2) == (40_000, 160_000) and large < 1000 and large - small < 25, (small, large)            # 120,000 events more hold 37 MiB of levels


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_million_events_stay_below_a_gigabyte(tmp_path):
    (n, mib), = peaks([(big(tmp_path / "m.dbn", 1_000_000), tmp_path / "out")]); assert n == 1_000_000 and mib < 1000, mib
