"""Toy markets where the best policy is known: both agents must find it (short versions of the sinusoid are in test_agents_*.py)."""
import dataclasses

import pytest
import torch

from foxhunt.data.windows import TRAIN, VAL, synthetic_table
from foxhunt.market.env import make_market
from foxhunt.market.oracle import oracle
from foxhunt.params import DQN, PPO, Env
from foxhunt.train.dqn import DQNTrainer
from foxhunt.train.ppo import PPOTrainer
from foxhunt.train.replay import walk_split

AGENTS = {"dqn": (DQNTrainer, DQN(hidden=(64, 64), epochs=40, updates_per_epoch=80, batch=128)), "ppo": (PPOTrainer, PPO(epochs=40))}
pytestmark = [pytest.mark.slow, pytest.mark.integration]


def learned(agent, table, rules=Env(), split=TRAIN, **changes):
    "Positions (t,), profit and the oracle's profit of a greedy walk after training."
    make, config = AGENTS[agent]
    trainer = make(make_market(table, TRAIN, rules), dataclasses.replace(config, **changes), rules, seed=0)
    for _ in range(trainer.cfg.epochs): trainer.run_epoch()
    market = make_market(table, split, rules)
    return *walk_split(market, rules, trainer.policy), oracle(market, rules, state_bars=11, end_flat=False).profit


@pytest.mark.parametrize("kind", ("sinusoid", "drift", "visible"))
@pytest.mark.parametrize("agent", AGENTS)
def test_95_percent_of_the_oracle(agent, kind):
    more = {"dqn": dict(updates_per_epoch=200, gamma=0.5), "ppo": dict(passes=10, epochs=60, entropy_coef=0.003)}[agent] if kind == "visible" else {}
    _, profit, best = learned(agent, synthetic_table(4000, kind=kind), **more)
    assert profit >= 0.95 * best > 0


@pytest.mark.parametrize("agent", AGENTS)
def test_nothing_to_earn_means_flat(agent):
    "A random walk with costs of more than a bar's move: unseen bars are left alone."
    held, profit, _ = learned(agent, synthetic_table(20_000, kind="random_walk"), dataclasses.replace(Env(), cost_scale=20.0), split=VAL)
    assert held.abs().double().mean() <= 0.05 and profit <= 0


@pytest.mark.parametrize("agent", AGENTS)
def test_negated_returns_negate_the_policy(agent):
    "The mirror of a drifting market is held short where the market is held long."
    up = synthetic_table(2000, kind="drift")
    down = dataclasses.replace(up, open=2 * up.close[0] - up.open, close=2 * up.close[0] - up.close, features=-up.features)
    long, gain, best = learned(agent, up); short, loss, _ = learned(agent, down)
    assert long[50:].double().mean() > 4 and short[50:].double().mean() < -4 and min(gain, loss) >= 0.9 * best
