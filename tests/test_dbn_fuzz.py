"""Damaged files: with a manifest every damage is refused; without one no crash, no hang, rows lost only at a clean record boundary, a flip confined to its record."""
import gzip, shutil

import databento_dbn as dbn
import numpy as np
import pandas as pd
import pytest
import zstandard

from _dbn import bars, definition, header, manifest, mbp10, trades, write
from foxhunt.core import UserError
from foxhunt.data.bars import read_bars
from foxhunt.data.book import load_book, make_book, synthetic_levels
from foxhunt.data.dbn import dbn_files, frame, read_frame, read_header, read_ohlcv, records
from foxhunt.data.store import write_parquet
from foxhunt.market.contracts import contract

SIX = contract("6E")
BODIES = {"ohlcv-1m": lambda: b"".join(map(bytes, bars(30))), "trades": lambda: b"".join(map(bytes, trades(30))), "mbp-10": lambda: mbp10(12),
          "definition": lambda: b"".join(map(bytes, [definition(1001 + i, f"6E{m}4") for i, m in enumerate("HMU")]))}


def damages(good: bytes, n: int, seed: int):
    "(name, first touched byte, bytes): `n` seeded damages of a file, half of them flips of one bit."
    rng = np.random.default_rng(seed)
    for i in range(n):
        b, at = bytearray(good), int(rng.integers(len(good)))
        kind = ("flip", "cut", "flip", "zeros", "flip", "grow", "flip", "lose")[i % 8]
        if kind == "flip": b[at] ^= 1 << int(rng.integers(8))
        elif kind == "cut": b = b[:at]
        elif kind == "zeros": b[at:at + 16] = bytes(len(b[at:at + 16]))
        elif kind == "grow": b += rng.bytes(int(rng.integers(1, 60))); at = len(good)
        else: b = b[:at] + b[at + int(rng.integers(1, 80)):]
        yield kind, at, bytes(b)


def read_all(path, schema, show=True):
    "Every record of the file as bytes, one by one; or None when it is refused in one line that names the file."
    try:
        got = list(records(path, schema)); head = read_header(path)
        for part in got[:1] if show else (): frame(part, schema, head.version)      # whatever is delivered can be shown
        return [r.tobytes() for part in got for r in part]
    except UserError as e:
        assert str(path.name) in str(e) and "\n" not in str(e)
        return None


@pytest.mark.parametrize("schema", BODIES)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_plain_files_without_a_manifest(schema, version, tmp_path):
    if schema == "definition" and version < 3: pytest.skip("older definitions have other records")
    path = write(tmp_path / "f.dbn", BODIES[schema](), schema, version=version); raw = path.read_bytes(); start = read_header(path).size
    good = read_all(path, schema); size = len(good[0]); refused = 0
    for i, (kind, at, broken) in enumerate(damages(raw, 130, version * 10 + len(schema))):
        path.write_bytes(broken); got = read_all(path, schema, show=i % 4 == 0)
        if got is None: refused += 1; continue
        hit = (at - start) // size if at >= start else None
        if broken == raw: assert got == good
        elif kind == "cut": assert got == good[:len(got)] and (len(broken) - start) % size == 0        # rows are lost only where a record ends
        elif kind == "flip" and hit is not None: assert [g for i, g in enumerate(got)][:hit] == good[:hit] and got[len(got) - (len(good) - hit - 1):] == good[hit + 1:] and len(good) - len(got) in (0, 1)
        elif kind == "flip": assert got == good                                                       # in the header: it may rename, never change a record
        elif kind in ("grow", "lose"): assert kind == "lose" or len(broken) - len(raw) >= size
    assert refused >= 26


@pytest.mark.parametrize("schema", ["ohlcv-1m", "trades", "mbp-10"])
def test_compressed_files_without_a_manifest(schema, tmp_path):
    "Databento compresses with a checksum: no damage of the compressed bytes passes."
    path = write(tmp_path / "f.dbn.zst", BODIES[schema](), schema); raw = path.read_bytes(); good = read_all(path, schema)
    for kind, at, broken in damages(raw, 100, 5):
        path.write_bytes(broken); got = read_all(path, schema)
        assert got is None or got == good, (kind, at)                       # a flip in an unused header bit may leave the content whole


def test_compressed_files_without_a_checksum_never_crash(tmp_path):
    raw = zstandard.ZstdCompressor(write_checksum=False).compress(header("ohlcv-1m") + BODIES["ohlcv-1m"]()); path = tmp_path / "f.dbn.zst"; path.write_bytes(raw); good = read_all(path, "ohlcv-1m")
    for kind, at, broken in damages(raw, 100, 6):
        path.write_bytes(broken); got = read_all(path, "ohlcv-1m")
        assert got is None or len(got) == len(good) or kind in ("zeros", "lose")       # the frame states its length


def test_mixed_recordings_without_a_manifest(tmp_path):
    "No schema in the header: records are found by their own lengths, and one that cannot be stops the reading."
    body = [m for pair in zip(bars(30), trades(30)) for m in pair] + [dbn.SystemMsg(1, "end")]; path = write(tmp_path / "f.dbn", body, None); raw = path.read_bytes()
    good = {s: read_all(path, s) for s in ("ohlcv-1m", "trades")}
    for kind, at, broken in damages(raw, 120, 7):
        path.write_bytes(broken)
        for s in good:
            got = read_all(path, s)
            if got is None or kind == "lose": continue
            if kind in ("flip", "cut"): assert sum(g not in good[s] for g in got) <= 1 and len(good[s]) - len(got) <= (1 if kind == "flip" else len(good[s]))


@pytest.mark.parametrize("name", ["f.dbn", "f.dbn.zst"])
@pytest.mark.parametrize("schema", BODIES)
def test_with_a_manifest_every_damage_is_refused(name, schema, tmp_path):
    path = write(tmp_path / name, BODIES[schema](), schema); raw = path.read_bytes(); manifest(tmp_path)
    assert dbn_files(tmp_path) == dbn_files(path)
    for kind, at, broken in damages(raw, 40, 8):
        if broken == raw: continue
        path.write_bytes(broken)
        for src in (tmp_path, path):
            with pytest.raises(UserError, match="manifest.json"): read_frame(src, schema)


def test_a_damaged_manifest_is_refused(tmp_path):
    write(tmp_path / "f.dbn", BODIES["trades"](), "trades"); manifest(tmp_path); m = tmp_path / "manifest.json"; raw = m.read_bytes(); passed = 0
    for kind, at, broken in damages(raw, 80, 9):
        m.write_bytes(broken)
        try: read_frame(tmp_path, "trades"); passed += 1
        except UserError: pass
    assert passed <= 25                                                     # damage that leaves name, size and hash as they are (the job's id, blanks)


@pytest.mark.parametrize("where", range(0, 16))
def test_wrong_lengths_and_versions(where, tmp_path):
    path = write(tmp_path / "f.dbn", BODIES["ohlcv-1m"](), "ohlcv-1m"); raw = bytearray(path.read_bytes()); start = read_header(path).size; good = read_all(path, "ohlcv-1m")
    for value in (0, 1, 13, 15, 255):
        for at in (3, 4 + where % 4, start, start + 56 * where, start + 56 * where + 1):
            b = bytearray(raw); b[at] = value; path.write_bytes(b); got = read_all(path, "ohlcv-1m")
            if b == raw: assert got == good
            elif at == 3: assert got is None or got == good                  # another version: refused, or the same bars (their layout never changed)
            elif at < start or (at - start) % 56 == 0: assert got is None
            else: assert got is None or got == good[:where] + good[where + 1:]


# --- bars: what the later checks see ---

def text_bars(tmp_path):
    "60 sound bars as DBN, Parquet and CSV; their frame."
    f = read_ohlcv(write(tmp_path / "b.dbn", bars(60), "ohlcv-1m"))[0].drop(columns="symbol")
    write_parquet(f, tmp_path / "b.parquet")
    f.drop(columns="instrument_id").to_csv(tmp_path / "b.csv", index=False); (tmp_path / "b.csv.gz").write_bytes(gzip.compress((tmp_path / "b.csv").read_bytes(), mtime=0))
    return f


def as_rows(f): return set(f[["ts_event", "open", "high", "low", "close", "volume"]].itertuples(index=False, name=None))


@pytest.mark.parametrize("name, n", [("b.dbn", 12), ("b.csv", 24), ("b.csv.gz", 16), ("b.parquet", 32), *(pytest.param(k, n, marks=pytest.mark.slow) for k, n in (("b.dbn", 400), ("b.csv", 600), ("b.csv.gz", 400), ("b.parquet", 800)))])
def test_damaged_bars_are_refused_or_confined(name, n, tmp_path):
    text_bars(tmp_path); path = tmp_path / name; raw = path.read_bytes(); good = read_bars(path, SIX)[0]; refused = 0
    for kind, at, broken in damages(raw, n, 11):
        path.write_bytes(broken)
        try: got, quality = read_bars(path, SIX)
        except UserError as e: refused += 1; assert "\n" not in str(e); continue
        assert (got.low <= got[["open", "close"]].min(axis=1)).all() and (got.high >= got[["open", "close"]].max(axis=1)).all() and got.ts_event.is_monotonic_increasing
        lost, new = as_rows(good) - as_rows(got), as_rows(got) - as_rows(good)
        if name in ("b.dbn", "b.csv") and kind == "flip": assert len(lost) <= 2 and len(new) <= 2        # a flipped line end joins two lines of a text
        if name == "b.dbn" and kind == "cut": assert not new
        if name == "b.csv" and kind == "cut" and new: assert len(new) == 1 and quality["no_final_newline"]["count"] == 1      # half a line, named in the report
    assert refused >= n // 4


def test_a_damaged_book_never_crashes_and_leaves_no_folder(tmp_path):
    x = synthetic_levels(300); x.pop("pressure"); write_parquet(pd.DataFrame(x | {"ts_event": pd.to_datetime(x["ts_event"], utc=True)}), tmp_path / "b.parquet")
    write(tmp_path / "b.dbn", mbp10(300), "mbp-10")
    for name in ("b.parquet", "b.dbn"):
        path = tmp_path / name; raw = path.read_bytes()
        for kind, at, broken in damages(raw, 24, 12):
            path.write_bytes(broken); shutil.rmtree(tmp_path / "out", ignore_errors=True)
            try: make_book(path, tmp_path / "out")
            except UserError as e: assert not (tmp_path / "out").exists() and "\n" not in str(e); continue
            t = load_book(tmp_path / "out"); assert np.isfinite(t.book).all() and ((t.labels == -1) | (t.flags == 0)).all()
        assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]
