"The GPU script walks through all its sections on the CPU; without a GPU it says that it is skipped."
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("gpu_check.py")


def run(*args): return subprocess.run([sys.executable, str(SCRIPT), *map(str, args)], capture_output=True, text=True, timeout=300)


def test_every_section_runs_on_the_cpu(tmp_path):
    r = run("--device", "cpu", "--quick", "--models", "ppo", "--out", tmp_path / "g.json")
    assert r.returncode == 0, r.stdout + r.stderr[-2000:]
    got = json.loads((tmp_path / "g.json").read_text())["sections"]
    assert {k for k, v in got.items() if v.get("skipped") == "needs CUDA"} == {"largest", "cpu_against_gpu"}, got
    assert all(v["ok"] for v in got.values() if "skipped" not in v) and len(got) == 11
    assert got["predictions"]["rows"][0]["planted_found"] and got["checkpoints"]["rows"][0]["same_bits"] and got["benchmark"]["rows"][0]["samples"]["update"]
    assert [r["how"].startswith("one") for r in got["side_by_side"]["rows"]] == [True, False, False, True, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_skipped(tmp_path):
    r = run("--out", tmp_path / "g.json")
    assert r.returncode == 0 and "skipped" in r.stdout and list(json.loads((tmp_path / "g.json").read_text())) == ["skipped"]


def test_a_section_that_does_not_end_is_cut_off(monkeypatch, capsys):
    "Time is looked at while a section runs, not only before it; what it swallows by `except Exception` does not keep it alive."
    import argparse, importlib.util, time
    loaded = importlib.util.spec_from_file_location("gpu_check", SCRIPT); g = importlib.util.module_from_spec(loaded); loaded.loader.exec_module(g)
    check = g.Check(argparse.Namespace(quick=True, device="cpu", models="ppo"))
    monkeypatch.setattr(g.Check, "left", lambda self: g.LAST_S + 0.3)
    def hangs():
        for _ in range(100):
            try: time.sleep(0.1)
            except Exception: pass
        return []
    monkeypatch.setattr(g, "NEEDED_S", 0); begin = time.perf_counter()
    check.section("hangs", hangs)
    assert time.perf_counter() - begin < 5 and check.result["hangs"]["ok"] is False and "cut off" in check.result["hangs"]["error"]
    check.section("next", lambda: [{"ok": True}]); assert check.result["next"]["ok"]
    time.sleep(1.2)                                                 # no alarm is left over
