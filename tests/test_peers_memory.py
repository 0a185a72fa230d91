"torch-kitsune's memory prediction beside ours and the truth."
import sys

import pytest

from foxhunt.core import UserError
from foxhunt.peers.memory import CATEGORIES, memory_rows


def test_a_missing_library_is_one_clear_line(monkeypatch):
    for name in [m for m in sys.modules if m.split(".")[0] == "kitsune"]: monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "kitsune", None)
    with pytest.raises(UserError, match="kitsune cannot be imported .*make setup-peers"): memory_rows(["ppo"])


@pytest.mark.peers
def test_beside_the_truth():
    rows, notes = memory_rows(["ppo"], batch=64)
    assert [r["mode"] for r in rows] == list(CATEGORIES) and all(r["size"] == "ppo, batch 64" for r in rows) and "profiler" in notes["truth"]
    by = {r["mode"]: r for r in rows}
    assert all(abs(r["ours_error"]) <= 0.02 for r in rows)
    assert abs(by["parameters"]["peer_error"]) < 0.01                     # arithmetic both must have
    assert all(abs(r["ours_error"]) <= abs(r["peer_error"]) + 1e-3 for r in rows)


@pytest.mark.peers
def test_a_prediction_that_fails_leaves_its_reason(monkeypatch):
    from foxhunt.peers import memory
    def fail(w, n): raise TypeError("forward() takes 2 positional arguments")
    monkeypatch.setattr(memory, "kitsune", fail)
    rows, _ = memory_rows(["ppo"], batch=8)
    assert all(r["peer_mib"] is None and "TypeError: forward() takes 2" in r["note"] and r["ours_mib"] for r in rows)
