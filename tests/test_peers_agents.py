"""Agents beside Stable-Baselines3: the comparison itself, small; needs the peers extra."""
import pytest

from foxhunt.data.windows import TRAIN, synthetic_table
from foxhunt.market.env import make_market
from foxhunt.params import Env
from foxhunt.peers.agents import dqn_rows, env_rows, ppo_rows, replay_bytes, same_return, update_rows

ONCE = dict(rounds=1, inner=1, tries=1, least=0.0)
KEYS = {"work", "size", "mode", "peer", "peer_ms", "ours_ms", "ratio"}
LIMIT = {"products_ms", "limit"}                      # of the rows of training
pytestmark = pytest.mark.peers


@pytest.fixture(scope="module")
def sides():
    pytest.importorskip("stable_baselines3")
    return make_market(synthetic_table(1024), TRAIN, Env()), Env()


def test_rows_of_every_comparison(sides):
    rows = update_rows(8, *sides, **ONCE)[0] + dqn_rows(*sides, steps=128, **ONCE)[0] + ppo_rows(*sides, **ONCE)[0] + env_rows(*sides, lanes=64, **ONCE)[0]
    assert [(r["work"], r["mode"]) for r in rows] == [("dqn-update", "fp32"), ("dqn-update", "best"), ("dqn-end-to-end", "fp32"), ("ppo-same", "fp32"), ("ppo-same", "best"), ("ppo-default", "fp32"), ("ppo-default", "best"), ("env", "fp32"), ("env, accounting only", "fp32")]
    assert all(set(r) - LIMIT == KEYS and r["ratio"] == pytest.approx(r["peer_ms"] / r["ours_ms"]) for r in rows)


def test_a_million_transitions_take_a_twentieth(sides):
    held = replay_bytes(*sides, n=10_000)
    assert held["stable-baselines3"] >= 20 * held["foxhunt"]


def test_many_lanes_reach_the_same_return():
    got = same_return(share=0.5, most=40, bars=400, lrs=(1e-3,))
    assert all(v["share"] >= 0.5 for v in got.values()) and got["foxhunt"]["seconds"] > 0
