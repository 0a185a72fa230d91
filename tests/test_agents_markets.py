"""Toy markets where the best policy is known: both agents must find it, in short (a few seconds each) and in long (slow). Short versions of the sinusoid are in test_agents_*.py."""
import dataclasses

import gymnasium as gym
import numpy as np
import pytest
import torch

from foxhunt.core import generator
from foxhunt.data.windows import TRAIN, VAL, synthetic_table
from foxhunt.market.env import BODY, COST, GAP, LIMIT, make_market, state_at, step
from foxhunt.market.oracle import oracle
from foxhunt.params import DQN, PPO, Env
from foxhunt.train.dqn import DQNTrainer, full_targets
from foxhunt.train.ppo import PPOTrainer
from foxhunt.train.replay import GymLanes, first_episodes, walk_split

AGENTS = {"dqn": (DQNTrainer, DQN(hidden=(64, 64), epochs=40, updates_per_epoch=80, batch=128)), "ppo": (PPOTrainer, PPO(epochs=40))}
SHORT = {"dqn": (DQNTrainer, DQN(hidden=(64, 64), lanes=32, epochs=12, updates_per_epoch=80, batch=128, learn_starts=256, gamma=0.5)),
         "ppo": (PPOTrainer, PPO(lanes=32, epochs=30, rollout=14, passes=8, minibatch=128, target_kl=0.05, entropy_coef=0.003, gamma=0.5))}
pytestmark = pytest.mark.integration


def learned(agent, table, rules=Env(), split=TRAIN, agents=AGENTS, **changes):
    "Positions (t,), profit and the oracle's profit of a greedy walk after training."
    make, config = agents[agent]
    trainer = make(make_market(table, TRAIN, rules), dataclasses.replace(config, **changes), rules, seed=0)
    for _ in range(trainer.cfg.epochs): trainer.run_epoch()
    market = make_market(table, split, rules)
    return *walk_split(market, rules, trainer.policy), oracle(market, rules, state_bars=11, end_flat=False).profit


@pytest.mark.parametrize("agent, kind, share", [("dqn", "drift", 0.95), ("ppo", "drift", 0.95), ("ppo", "visible", 0.95), ("dqn", "visible", 0.93)])
def test_short_share_of_the_oracle(agent, kind, share):
    "420 training bars. DQN on the visible return reaches 0.933 to 0.947 (seeds 0 to 2) in this time: 95 % is for the long version."
    _, profit, best = learned(agent, synthetic_table(600, n_features=4, kind=kind), agents=SHORT)
    assert profit >= share * best > 0


@pytest.mark.parametrize("agent", SHORT)
def test_short_negated_returns_negate_the_policy(agent):
    up = synthetic_table(600, n_features=4, kind="drift")
    down = dataclasses.replace(up, open=2 * up.close[0] - up.open, close=2 * up.close[0] - up.close, features=-up.features)
    (long, *_), (short, *_) = (learned(agent, t, agents=SHORT) for t in (up, down))
    assert long[50:].double().mean() > 4 and short[50:].double().mean() < -4


@pytest.mark.parametrize("agent, most", [("dqn", 1.0), ("ppo", 0.05)])
def test_short_nothing_to_earn_means_nearly_flat(agent, most):
    "A random walk with costs of many bars' moves, unseen bars. PPO is flat (seeds 0 to 2). In this time DQN is for seeds 1 and 2, but with seed 0 opens one contract of five and keeps it (mean 0.96): flat is for the long version."
    more = {"dqn": dict(epochs=10, updates_per_epoch=60, gamma=0.3), "ppo": dict(epochs=20, rollout=28, minibatch=256, entropy_coef=0.0, gamma=0.3)}[agent]
    held, profit, best = learned(agent, synthetic_table(2000, n_features=1), dataclasses.replace(Env(), cost_scale=40.0), VAL, SHORT, **more)
    assert held.abs().double().mean() <= most and profit <= 0.1 * best


def test_short_ppo_balances_the_pole():
    "20,480 steps; seeds 0 to 2 reach 500, 500 and 339. DQN needs 13 s for 110 to 286: its proof is in 51_dqn alone."
    cart, cfg = lambda: gym.make("CartPole-v1"), PPO(epochs=40, lanes=8, rollout=64, minibatch=128, passes=8, gamma=0.99, entropy_coef=0.0, target_kl=None)
    trainer = PPOTrainer(GymLanes(cart, lanes=8, seed=0, steps_per_epoch=64), cfg, seed=0)
    for _ in range(cfg.epochs): trainer.run_epoch()
    assert first_episodes(GymLanes(cart, lanes=10, seed=1000), trainer.policy).mean() > 150


def test_full_targets_obey_the_limits():
    "Brute force by two real steps: flat at the close, small outside the main hours, and bars in which nobody traded."
    rules, table = Env(flat_at_close=True, main_hours=(0.1, 0.9), outside_position=2), synthetic_table(600, kind="sinusoid")
    filled = np.zeros(600, bool); filled[[102, 150, 151, 241]] = True
    market = make_market(dataclasses.replace(table, filled=filled), TRAIN, rules)
    bars = torch.tensor([20, 22, 23, 100, 101, 102, 148, 149, 150, 214, 215, 236, 237, 238, 239, 240, 241])
    assert {-1.0, 0.0, 2.0, 5.0} == set(market.record[bars + 1, LIMIT].tolist())
    after = torch.randn(len(bars), 11, generator=generator(0, "F")); y = full_targets(market, bars, after, 0.9)
    for i, bar in enumerate(bars):
        now, then = market.record[bar + 1], market.record[bar + 2]
        for a in range(-5, 6):
            lanes = state_at(market, bar.repeat(11))._replace(position=torch.full((11,), a))
            lanes, one = step(market, rules, lanes, torch.full((11,), a + 5))
            _, two = step(market, rules, lanes, torch.arange(11))
            before = (a * now[GAP] - now[COST] * (one.position - a).abs()) / market.reward_scale      # the old position's gap, the cost of a cut
            value = two.reward - two.position * then[BODY] / market.reward_scale + after[i, two.position + 5]
            torch.testing.assert_close(y[i, a + 5].double(), (one.reward - before + 0.9 * value).max().double(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("sinusoid", "drift", "visible"))
@pytest.mark.parametrize("agent", AGENTS)
def test_95_percent_of_the_oracle(agent, kind):
    more = {"dqn": dict(updates_per_epoch=200, gamma=0.5), "ppo": dict(passes=10, epochs=60, entropy_coef=0.003)}[agent] if kind == "visible" else {}
    _, profit, best = learned(agent, synthetic_table(4000, kind=kind), **more)
    assert profit >= 0.95 * best > 0


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_nothing_to_earn_means_flat(agent):
    "A random walk with costs of more than a bar's move: unseen bars are left alone."
    held, profit, _ = learned(agent, synthetic_table(20_000, kind="random_walk"), dataclasses.replace(Env(), cost_scale=20.0), split=VAL)
    assert held.abs().double().mean() <= 0.05 and profit <= 0


@pytest.mark.slow
@pytest.mark.parametrize("agent", AGENTS)
def test_negated_returns_negate_the_policy(agent):
    "The mirror of a drifting market is held short where the market is held long."
    up = synthetic_table(2000, kind="drift")
    down = dataclasses.replace(up, open=2 * up.close[0] - up.open, close=2 * up.close[0] - up.close, features=-up.features)
    long, gain, best = learned(agent, up); short, loss, _ = learned(agent, down)
    assert long[50:].double().mean() > 4 and short[50:].double().mean() < -4 and min(gain, loss) >= 0.9 * best
