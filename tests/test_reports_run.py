"The report templates execute on what their verbs leave, small; with the tables that their readers look for."
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.slow]
ROOT = Path(__file__).resolve().parents[1]
TINY = """seed: 0
features: {state_bars: 3}
train:
  dqn: {epochs: 2, updates_per_epoch: 4, lanes: 16, hidden: [8], batch: 16, replay_size: 2000, learn_starts: 64}
  ppo: {epochs: 2, lanes: 16, hidden: [8], rollout: 16, minibatch: 64, passes: 1}
  mamba2: {epochs: 1, lookback: 8, stride: 64, d_model: 8, n_layers: 1, d_state: 4, head: 4}
  tft: {epochs: 1, hidden: 4, heads: 1, lookback: 8, horizon: 2, stride: 64}
"""


def foxhunt(cwd, *args):
    r = subprocess.run([sys.executable, "-c", "from foxhunt.cli import main; main()", *map(str, args)], cwd=cwd, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500)
    assert r.returncode in (0, 1), r.stderr[-2000:]
    return r


def report(cwd, name, **given):
    "Execute a template; the text of its HTML."
    foxhunt(cwd, "report", ROOT / "nbs" / "reports" / f"{name}.ipynb", f"{name}.ipynb", *(x for k, v in given.items() for x in ("-p", f"{k}={v}")))
    return (cwd / f"{name}.html").read_text()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    d = tmp_path_factory.mktemp("reports"); (d / "params.yaml").write_text(TINY)
    return d


def test_benchmark_decision_and_memory(place):
    for m in ("dqn", "ppo", "mamba2", "tft"):
        html = report(place, "benchmark", model=m, epochs=4, out_json=f"bench/{m}.json", metrics_json=f"metrics/{m}.json", budget_s=3, seconds=0.05)
        few = json.loads((place / "metrics" / f"{m}.json").read_text())
        assert few["epoch_s"] == json.loads((place / "bench" / f"{m}.json").read_text())["models"][m]["epoch"]["summary"]["mean"] and "P99" in html
    html = report(place, "decision", bench_json="bench", out_json="decision.json")
    assert all(x in html for x in ("g4dn.xlarge", "50,000", "local", "12.62")) and json.loads((place / "decision.json").read_text())
    foxhunt(place, "budget", "--models", "dqn,ppo", "--bench", "bench/dqn.json", "--bench", "bench/ppo.json", "--json", "budget.json")
    html = report(place, "memory", budget_json="budget.json")
    assert all(x in html for x in ("6.07", "int8", "headroom"))


def test_readiness(place):
    foxhunt(place, "readiness", "--models", "ppo", "--out", "readiness.json")
    (place / "gpu.csv").write_text("time,gpu_percent,memory_used_mib\n" + "".join(f"2026-01-05T00:00:{i:02d}+00:00,{i},{3 + i}\n" for i in range(30)))
    html = report(place, "readiness", readiness_json="readiness.json", monitor_csv="gpu.csv")
    assert "There is no recording" not in html and "causal" in html.lower() and "30/40" in html
