"The Gymnasium face of one lane."
import warnings

import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from foxhunt.core import UserError
from foxhunt.data.windows import TRAIN, synthetic_table
from foxhunt.market.env import make_market
from foxhunt.market.gym import TradingEnv
from foxhunt.params import Env


@pytest.mark.parametrize("rules", [Env(episode_bars=20), Env(episode_bars=20, max_position=1, fill="close"), Env(ruin=50.0)])
def test_gymnasium_accepts_it(rules):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        check_env(TradingEnv(make_market(synthetic_table(bars=600), TRAIN, rules), rules), skip_render_check=True)


def test_episodes_end_once_and_sum_to_the_equity():
    rules = Env(episode_bars=30)
    market = make_market(synthetic_table(bars=600), TRAIN, rules)
    env = TradingEnv(market, rules)
    for seed in (0, None, None):
        env.reset(seed=seed); total, done, steps = 0.0, False, 0
        while not done:
            before = env.state
            _, r, term, trunc, info = env.step(int(env.np_random.integers(11))); total += r * market.reward_scale; steps += 1; done = term or trunc
        assert steps <= 30 and trunc and env.state is None
        with pytest.raises(UserError, match="reset"): env.step(5)
        assert abs(total - r * market.reward_scale - before.equity.item()) < 1e-3 * market.reward_scale


def test_the_market_can_be_stepped_by_a_vector_of_gyms():
    import gymnasium
    rules = Env(episode_bars=10)
    market = make_market(synthetic_table(bars=600), TRAIN, rules)
    envs = gymnasium.vector.SyncVectorEnv([lambda: TradingEnv(market, rules)] * 3)
    obs, _ = envs.reset(seed=[1, 2, 3])
    assert obs.shape == (3, 256) and not np.array_equal(obs[0], obs[1])
    for _ in range(25): obs, reward, *_ = envs.step(np.array([0, 5, 10]))
    assert np.isfinite(obs).all() and reward.shape == (3,)
