"Several seeds with one command: each run is the one that its seed makes alone, and the sentence has its interval."
import json
import os
import subprocess
import sys

import pytest
from safetensors.torch import load_file

pytestmark = pytest.mark.integration
TINY = """seed: 0
features: {state_bars: 3}
train:
  dqn: {epochs: 2, updates_per_epoch: 4, lanes: 16, hidden: [8], batch: 16, replay_size: 2000, learn_starts: 64}
"""


def foxhunt(cwd, *args):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", "from foxhunt.cli import main; main()", *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)


def test_seeds_are_single_runs_side_by_side(tmp_path):
    from foxhunt.data.windows import save_table, synthetic_table
    (tmp_path / "params.yaml").write_text(TINY); save_table(synthetic_table(400, 4), tmp_path / "feat")
    r = foxhunt(tmp_path, "seeds", "dqn", "--features", "feat", "--out", "runs", "--n", "3", "--workers", "2", "--device", "cpu"); assert r.returncode == 0, r.stderr
    alone = foxhunt(tmp_path, "train", "dqn", "--features", "feat", "--out", "alone", "--seed", "1", "--device", "cpu"); assert alone.returncode == 0, alone.stderr
    weights = [load_file(tmp_path / "runs" / f"seed_{s}" / "dqn_final_epoch2.safetensors") for s in range(3)]
    single = load_file(tmp_path / "alone" / "dqn_final_epoch2.safetensors")
    same = lambda a, b: all((a[k] == b[k]).all() for k in a)
    assert same(weights[1], single) and not same(weights[0], weights[1]) and not same(weights[1], weights[2])
    found = json.loads((tmp_path / "runs" / "seeds.json").read_text()); nets = [run["net"] for run in found["runs"].values()]
    assert list(found["runs"]) == ["0", "1", "2"] and found["split"] == "val" and found["interval"]["seeds"] == 3
    assert min(nets) <= found["interval"]["low"] <= found["interval"]["value"] <= found["interval"]["high"] <= max(nets)
    assert found["text"] in r.stdout and "3 seeds are too few for a claim" in found["text"]
