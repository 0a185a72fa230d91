"""Sequence models beside their peers: the comparison itself, small; needs the peers extra where it says so."""
import sys

import pytest
import torch

from foxhunt.core import UserError
from foxhunt.peers.race import compare, fastest, peer, quiet, race
from foxhunt.peers.sequence import SEQUENCE, MambaSize, TFTSize, mamba_foxhunt, mamba_rows, mamba_transformers, tft_foxhunt, tft_neuralforecast, tft_pytorch_forecasting, tft_rows

TINY = TFTSize(hidden=16, heads=2, lookback=6, horizon=3, past=2)
KEYS = ["work", "size", "mode", "peer", "peer_ms", "ours_ms", "ratio"]
ONCE = dict(rounds=1, inner=1, tries=1, least=0.0)


@pytest.mark.parametrize("library, make", (("neuralforecast", lambda: tft_neuralforecast(TINY)), ("pytorch_forecasting", lambda: tft_pytorch_forecasting(TINY)), ("transformers", lambda: mamba_transformers(MambaSize(), 64))))
def test_a_missing_library_is_one_clear_line(library, make, monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == library]: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)                # `import` of a None entry fails, as if it were not installed
    with pytest.raises(UserError, match=f"{library} cannot be imported .*make setup-peers"): make()


def test_importing_the_module_needs_no_peer():
    import subprocess
    code = "import sys, foxhunt.peers.sequence; print(sorted({'neuralforecast', 'pytorch_forecasting', 'transformers', 'lightning'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_our_contenders_have_the_size_of_the_comparison():
    assert tft_foxhunt(TFTSize()).parameters == 8_498_013 and mamba_foxhunt(MambaSize()).parameters == 1_728_352
    c = tft_foxhunt(TINY); assert c.forward(c.model, c.batch(3)).shape == (3, 3, 3)


def test_a_race_counts_every_contender_alike_and_survives_a_mode_that_does_not_run():
    calls = []
    r = race({n: (lambda n=n: calls.append(n)) for n in "ab"}, rounds=4, inner=2)
    assert calls.count("a") == calls.count("b") == 4 * 3 and set(r.ms) == {"a", "b"} and (r.others is None or 0 <= r.others <= 1)
    def broken(): raise RuntimeError("no primitive")
    with pytest.raises(RuntimeError, match="none of bf16 runs"): fastest({"bf16": broken})
    with pytest.raises(UserError, match="known: mamba2, tft"): compare(SEQUENCE, ("dqn",))


@pytest.mark.peers
def test_tft_rows_of_both_libraries():
    for name in ("neuralforecast", "pytorch_forecasting"): pytest.importorskip(name)
    torch.manual_seed(0); want = torch.rand(1); torch.manual_seed(0)
    with quiet(): sizes = [make(TINY) for make in (tft_neuralforecast, tft_pytorch_forecasting)]
    assert torch.equal(torch.rand(1), want)                         # whatever seed they set
    for c in sizes: assert c.forward(c.model, c.batch(4)).shape == (4, 3, 3)
    rows, notes = tft_rows((1, 2), TINY, best=(2,), **ONCE)
    assert {(r["work"], r["size"], r["mode"], r["peer"]) for r in rows} == {(w, f"batch {b}", m, p) for w, b, m in (("tft-train", 1, "fp32"), ("tft-train", 2, "fp32"), ("tft-train", 2, "best"), ("tft-forward", 1, "fp32"), ("tft-forward", 2, "fp32")) for p in ("neuralforecast", "pytorch-forecasting")}
    for r in rows: assert list(r)[:7] == KEYS and set(r) <= {*KEYS, "products_ms", "limit"} and r["ratio"] == r["peer_ms"] / r["ours_ms"] > 0
    assert len(notes["parameters"]) == 3


@pytest.mark.peers
def test_mamba_rows():
    pytest.importorskip("transformers")
    rows, notes = mamba_rows((2,), MambaSize(width=16, layers=2, head=8, state=8, length=12), chunks=(4, 8), **ONCE)
    assert [(r["work"], r["mode"]) for r in rows] == [("mamba2-train", "fp32"), ("mamba2-train", "best"), ("mamba2-forward", "fp32"), ("mamba2-step", "fp32"), ("mamba2-step", "best")]
    assert all(list(r)[:7] == KEYS and set(r) <= {*KEYS, "products_ms", "limit"} and r["peer"] == "transformers" for r in rows)
    assert notes["parameters"]["foxhunt"] == notes["parameters"]["transformers"] - 16      # its embedding of one token
