"""DQN: laws that cross notebooks, bad input, and the numbers of Stable-Baselines3 (stored; recomputed under the `peers` marker)."""
import copy
import dataclasses
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foxhunt.core import UserError, generator
from foxhunt.data.windows import TRAIN, synthetic_table
from foxhunt.market.env import make_market
from foxhunt.market.oracle import oracle
from foxhunt.models.mlp import QNetwork, parameters
from foxhunt.params import DQN, Env
from foxhunt.train.dqn import STATS, DQNTrainer, act, adam, adam_state, dqn_loss, dqn_targets, load_adam, rebuild, seeded, target_weight, update
from foxhunt.train.replay import Batch, GymLanes, MarketLanes, SumTree, dense_replay, index_replay, walk_split

GOLDEN = Path(__file__).parent / "golden" / "agents_dqn_sb3.safetensors"
RULES = Env(episode_bars=50)
TINY = DQN(hidden=(16,), lanes=16, epochs=6, updates_per_epoch=10, batch=16, replay_size=1600, learn_starts=64)


@pytest.fixture(scope="module")
def market(): return make_market(synthetic_table(600, kind="sinusoid"), TRAIN, RULES)


def batch(n=32, inputs=6, actions=3, seed=0, dtype=torch.float32):
    g = generator(seed, "batch")
    x = lambda *s: torch.randn(*s, generator=g, dtype=dtype)
    return Batch(x(n, inputs), torch.randint(actions, (n,), generator=g), x(n), x(n, inputs), 0.9 * (torch.rand(n, generator=g) < 0.8).to(dtype), torch.ones(n, dtype=dtype), torch.arange(n))


def pair(dueling=False, dtype=torch.float32):
    net = seeded(lambda: QNetwork(6, (16, 16), 3, dueling), 0, "t").to(dtype)
    return net, copy.deepcopy(net).requires_grad_(False)


def flat(*nets): return torch.cat([p.detach().flatten() for net in nets for p in net.parameters()])


# --- network ---------------------------------------------------------------------------------------------------------

@pytest.mark.unit
def test_dqn_forward_pass_shape():
    net = QNetwork(256, (512, 512, 512, 256), 11)
    assert parameters(net) == 791_051 and net(torch.zeros(3, 256)).shape == (3, 11)


@pytest.mark.unit
@pytest.mark.parametrize("dueling", (False, True))
def test_every_parameter_gets_a_gradient(dueling):
    net, slow = pair(dueling)
    error, stats = update(net, slow, adam(net, 1e-3), batch())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in net.parameters())
    assert all(p.grad is None for p in slow.parameters())
    assert error.shape == (32,) and stats.shape == (len(STATS),) and torch.isfinite(stats).all()


@pytest.mark.unit
def test_target_shares_no_storage():
    trainer = DQNTrainer(GymLanes(lambda: __import__("gymnasium").make("CartPole-v1")), dataclasses.replace(TINY, lanes=1))
    assert not {p.data_ptr() for p in trainer.model.parameters()} & {p.data_ptr() for p in trainer.target.parameters()}


# --- update rules ----------------------------------------------------------------------------------------------------

@pytest.mark.unit
@pytest.mark.parametrize("kw", (dict(), dict(double=False), dict(joint=True)))
def test_update_waits_for_nothing(kw):
    "No `.item()`, no tensor in a Python condition: the update runs on the meta device, where nothing has a value."
    with torch.device("meta"):
        net = QNetwork(6, (16,), 3); slow = copy.deepcopy(net).requires_grad_(False)
        b = Batch(*(x.to("meta") for x in batch()))
        _, stats = update(net, slow, torch.optim.SGD(net.parameters(), lr=0.1), b, tau=0.1, **kw)
    assert stats.is_meta


@pytest.mark.unit
def test_joint_forward_gives_the_same_step():
    (a, sa), (b, sb) = pair(), pair()
    oa, ob = adam(a, 1e-3), adam(b, 1e-3)
    for i in range(5): update(a, sa, oa, batch(seed=i), tau=0.1); update(b, sb, ob, batch(seed=i), tau=0.1, joint=True)
    torch.testing.assert_close(flat(a, sa), flat(b, sb), rtol=1e-5, atol=1e-6)


def hundred(step, dtype=torch.float64):
    net, slow = pair(dtype=dtype); opt = adam(net, 1e-3)
    for i in range(100): step(net, slow, opt, batch(seed=i, dtype=dtype), tau=torch.tensor(target_weight(DQN(target="hard", target_every=10), i + 1), dtype=dtype))
    return flat(net, slow)


@pytest.mark.unit
def test_traced_equals_eager():
    a, b = hundred(update), hundred(torch.compile(update, backend="aot_eager"))
    assert (a - b).norm() / a.norm() <= 1e-5


@pytest.mark.slow
@pytest.mark.unit
def test_compiled_equals_eager():
    a, b = hundred(update), hundred(torch.compile(update))
    assert (a - b).norm() / a.norm() <= 1e-5


@pytest.mark.unit
def test_importance_weights_multiply_the_loss():
    q, a, y = torch.randn(8, 3, generator=generator(0, "q")), torch.zeros(8, dtype=torch.long), torch.zeros(8)
    w = torch.zeros(8); w[3] = 1.0
    loss, error = dqn_loss(q, a, y, w, huber=100.0)
    torch.testing.assert_close(loss, 0.5 * q[3, 0] ** 2 / 8)
    torch.testing.assert_close(error, q[:, 0])          # raw: priorities do not see the weights


# --- replay ----------------------------------------------------------------------------------------------------------

@pytest.mark.unit
@pytest.mark.parametrize("n", (1, 2, 7, 64, 1000, 4097))
def test_sum_tree_finds_every_leaf(n):
    tree = SumTree(n)
    tree.set(torch.arange(n), torch.ones(n))
    found = tree.find((torch.arange(n, dtype=torch.float64) + 0.5) / n)
    assert torch.equal(found, torch.arange(n))


@pytest.mark.unit
def test_sum_tree_sums_do_not_drift():
    tree, g = SumTree(500), generator(0, "drift")
    for _ in range(300):
        index = torch.randint(500, (64,), generator=g)
        tree.set(index, torch.rand(64, generator=g).double()[torch.unique(index, return_inverse=True)[1]] ** 8)
    assert torch.equal(tree.sums, tree.leaf.sum(-1))


@pytest.mark.unit
def test_memory_of_a_million_transitions():
    index = index_replay(1_000_000, 64, lambda key: None)
    one = dense_replay(200, 100, 256)                                             # 200 transitions
    assert index.nbytes * 20 <= 1_000_000 * one.nbytes / 200 and index.nbytes / len(index.columns["reward"].flatten()) <= 30


@pytest.mark.integration
def test_pairs_never_span_episodes(market):
    trainer = DQNTrainer(market, dataclasses.replace(TINY, n_step=4, replay_size=320), RULES)
    for _ in range(4): trainer.run_epoch()                                       # wraps around several times
    r = trainer.replay; c = r.columns
    every = r.fetch(torch.arange(len(r)), torch.ones(len(r)))
    assert torch.equal(c["next_bar"], c["bar"] + 1)
    assert (c["truncated"] & c["terminated"]).sum() == 0 and c["truncated"].sum() > 0
    assert torch.isfinite(every.obs).all() and ((every.discount > 0) | (every.discount == 0)).all()
    shown = every.next_obs[:, -3] * 5                                             # the position in the next observation
    assert ((shown - shown.round()).abs() < 1e-5).all() and (every.discount >= TINY.gamma ** 4 - 1e-6).all()


# --- trainer ---------------------------------------------------------------------------------------------------------

def same(a, b):
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.checkpoint
@pytest.mark.parametrize("kw", (dict(), dict(prioritized=True, n_step=3, dueling=True), dict(replay="dense", target="hard", target_every=7)))
def test_dqn_resume_through_files_is_exact(market, tmp_path, kw):
    from foxhunt.train.checkpoint import load_state, save_state
    make = lambda: DQNTrainer(market, dataclasses.replace(TINY, **kw), RULES, seed=3)
    whole, half, rest = make(), make(), make()
    for _ in range(4): whole.run_epoch()
    for _ in range(2): half.run_epoch()
    save_state(tmp_path / "s", half.state_dict())
    rest.load_state_dict(load_state(tmp_path / "s")[0])
    for _ in range(2): rest.run_epoch()
    assert same(whole.state_dict(), rest.state_dict())


@pytest.mark.checkpoint
@pytest.mark.slow
def test_dqn_resume_in_a_new_process(tmp_path):
    code = """
import sys, torch; sys.path.insert(0, {here!r})
from test_agents_dqn import *
from foxhunt.train.checkpoint import load_state, save_state
t = DQNTrainer(make_market(synthetic_table(600, kind="sinusoid"), TRAIN, RULES), TINY, RULES, seed=3)
if {load!r}: t.load_state_dict(load_state({load!r})[0])
for _ in range({epochs}): t.run_epoch()
save_state({save!r}, t.state_dict())
"""
    def go(epochs, save, load=""):
        subprocess.run([sys.executable, "-c", code.format(here=str(Path(__file__).parent), epochs=epochs, save=str(tmp_path / save), load=load and str(tmp_path / load))], check=True)
    go(4, "whole"); go(2, "half"); go(2, "rest", "half")
    from foxhunt.train.checkpoint import load_state
    assert same(load_state(tmp_path / "whole")[0], load_state(tmp_path / "rest")[0])


@pytest.mark.checkpoint
def test_dqn_checkpoint_rebuilds(market):
    trainer = DQNTrainer(market, dataclasses.replace(TINY, dueling=True), RULES)
    trainer.run_epoch()
    net = rebuild(trainer.describe()); net.load_state_dict(trainer.weights())
    obs = trainer.world.observe(trainer.world.key())
    with torch.no_grad(): assert torch.equal(net(obs).argmax(-1), trainer.policy(obs))


@pytest.mark.checkpoint
def test_saved_adam_carries_no_device_settings():
    net, slow = pair(); opt = adam(net, 1e-3)
    update(net, slow, opt, batch())
    state = adam_state(opt, net)
    assert {k for v in state.values() for k in v} == {"step", "exp_avg", "exp_avg_sq"}
    other, slow2 = pair(); opt2 = adam(other, 1e-3)
    other.load_state_dict(net.state_dict()); load_adam(opt2, other, state)
    for n, o, s in ((net, opt, slow), (other, opt2, slow)): update(n, s, o, batch(seed=1))
    assert torch.equal(flat(net), flat(other))


@pytest.mark.integration
def test_policy_draws_do_not_move_the_market(market):
    a, b = DQNTrainer(market, TINY, RULES, seed=5), DQNTrainer(market, TINY, RULES, seed=5)
    torch.rand(1000, generator=b.explore)                                         # more policy samples
    starts = lambda t: [t.world.step(torch.zeros(16, dtype=torch.long)).key["bar"] for _ in range(120)]
    assert all(torch.equal(x, y) for x, y in zip(starts(a), starts(b)))


@pytest.mark.integration
def test_dqn_learns_the_sine():
    rules, seed = Env(), 1
    market = make_market(synthetic_table(1200, kind="sinusoid", seed=seed), TRAIN, rules)
    trainer = DQNTrainer(market, DQN(hidden=(64, 64), lanes=32, epochs=8, updates_per_epoch=40, learn_starts=256), rules, seed=seed)
    history = [trainer.run_epoch() for _ in range(8)]
    _, profit = walk_split(market, rules, trainer.policy)
    assert profit >= 0.95 * oracle(market, rules, state_bars=11, end_flat=False).profit
    assert all(h["q_max"] <= h["q_bound"] for h in history)


@pytest.mark.unit
def test_acting_traced_equals_eager():
    g = generator(0, "act"); q, u, other = torch.randn(64, 11, generator=g), torch.rand(64, generator=g), torch.randint(11, (64,), generator=g)
    a = act(q, torch.tensor(0.3), u, other)
    assert torch.equal(a, torch.compile(act, backend="aot_eager", fullgraph=True)(q, torch.tensor(0.3), u, other)) and 0.1 < (a != q.argmax(-1)).float().mean() < 0.5


@pytest.mark.unit
@pytest.mark.parametrize("double", (False, True))
def test_an_update_uses_the_targets_and_the_weights(double):
    "A slow network of its own and uneven importance weights: errors and loss are those of the pure functions."
    net, _ = pair(); slow = seeded(lambda: QNetwork(6, (16, 16), 3), 1, "slow").requires_grad_(False)
    b = batch(); b = b._replace(weight=torch.rand(32, generator=generator(0, "w")))
    with torch.no_grad():
        y = {d: dqn_targets(b.reward, b.discount, slow(b.next_obs), net(b.next_obs) if d else None) for d in (False, True)}
        loss, error = dqn_loss(net(b.obs), b.action, y[double], b.weight)
        even, _ = dqn_loss(net(b.obs), b.action, y[double], torch.ones(32))
    assert not torch.allclose(y[False], y[True]) and not torch.isclose(loss, even)            # the example tells them apart
    got, stats = update(net, slow, adam(net, 1e-3), b, double=double)
    torch.testing.assert_close((got, stats[0]), (error, loss))


@pytest.mark.integration
def test_the_trainer_feeds_priorities_beta_and_learning_rate(market, monkeypatch):
    cfg = dataclasses.replace(TINY, prioritized=True, anneal=True, lr=1e-2, beta=0.4)
    trainer, betas, seen = DQNTrainer(market, cfg, RULES), [], []
    sample, step = trainer.replay.sample, trainer._update
    monkeypatch.setattr(trainer.replay, "sample", lambda b, gen, beta: betas.append(beta) or sample(b, gen, beta))
    def spied(*args, **kw): seen.append(trainer.opt.param_groups[0]["lr"].item()); return step(*args, **kw)
    trainer._update = spied
    for _ in range(cfg.epochs): trainer.run_epoch()
    mass = trainer.replay.tree.leaf[trainer.replay.tree.leaf > 0]
    assert mass.unique().numel() > 10                                                        # priorities come back from the errors
    assert betas == sorted(betas) and 0.4 <= betas[0] < 0.7 and betas[-1] == 1.0               # importance weights are whole at the end
    last = len(trainer.lr) - 1
    assert seen == trainer.lr[[min(cfg.epochs * cfg.updates_per_epoch - len(seen) + 1 + i, last) for i in range(len(seen))]].tolist() and seen[-1] < seen[0]


@pytest.mark.integration
def test_mistakes_are_named(market):
    with pytest.raises(UserError, match="needs more than n_step"): DQNTrainer(market, dataclasses.replace(TINY, replay_size=16, learn_starts=16), RULES)
    with pytest.raises(UserError, match="saved replay is"):
        DQNTrainer(market, dataclasses.replace(TINY, lanes=8), RULES).load_state_dict(DQNTrainer(market, TINY, RULES).state_dict() | dict(epoch=0))


# --- devices ---------------------------------------------------------------------------------------------------------

@pytest.mark.device
def test_dqn_builds_on_the_default_device():
    with torch.device("meta"): net = QNetwork(256, (512, 512, 512, 256), 11)
    assert all(p.is_meta for p in net.parameters()) and net(torch.empty(4, 256, device="meta")).is_meta


@pytest.mark.device
def test_dqn_refuses_two_devices(market):
    with pytest.raises(UserError, match="make both on one device"): DQNTrainer(market, TINY, RULES, device="cuda")


@pytest.mark.gpu
@pytest.mark.device
def test_dqn_uses_cuda_device(market):
    there = make_market(synthetic_table(600, kind="sinusoid"), TRAIN, RULES, device="cuda")
    trainer = DQNTrainer(there, TINY, RULES, device="cuda", seed=3)
    for _ in range(2): trainer.run_epoch()
    assert all(p.is_cuda for p in trainer.model.parameters()) and trainer.replay.columns["bar"].is_cuda
    here = DQNTrainer(market, TINY, RULES, seed=3)
    here.load_state_dict(trainer.state_dict()); here.run_epoch()                  # saved on CUDA, steps on the CPU
    back = DQNTrainer(there, TINY, RULES, device="cuda", seed=3)
    back.load_state_dict(here.state_dict()); back.run_epoch()
    obs = here.world.observe(here.world.key())
    back.model.load_state_dict(here.weights())
    with torch.no_grad(): torch.testing.assert_close(back.model(obs.cuda()).cpu(), here.model(obs), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.device
def test_dqn_steps_agree_across_devices(market):
    "From one saved state, the same twenty batches on both."
    there = make_market(synthetic_table(600, kind="sinusoid"), TRAIN, RULES, device="cuda")
    a = DQNTrainer(there, TINY, RULES, device="cuda", seed=3); a.run_epoch(); a.run_epoch()
    b = DQNTrainer(market, TINY, RULES, seed=3); b.load_state_dict(a.state_dict())
    n = a.world.inputs
    for i in range(20):
        data = batch(inputs=n, actions=11, seed=i)
        update(a.model, a.target, a.opt, Batch(*(x.cuda() for x in data)), tau=0.1); update(b.model, b.target, b.opt, data, tau=0.1)
    torch.testing.assert_close(flat(a.model, a.target).cpu(), flat(b.model, b.target), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.device
def test_dqn_update_never_synchronises_and_graphs():
    torch.cuda.set_sync_debug_mode("error")
    try:
        net, slow = (m.cuda() for m in pair()); slow.requires_grad_(False)
        opt, b = adam(net, 1e-3), Batch(*(x.cuda() for x in batch()))
        side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3): update(net, slow, opt, b, tau=0.1)
        torch.cuda.current_stream().wait_stream(side)
    finally: torch.cuda.set_sync_debug_mode("default")
    graph, before = torch.cuda.CUDAGraph(), flat(net).clone()
    with torch.cuda.graph(graph): update(net, slow, opt, b, tau=0.1)
    twin, tslow = copy.deepcopy(net), copy.deepcopy(slow); topt = adam(twin, 1e-3); load_adam(topt, twin, adam_state(opt, net))
    for _ in range(100): graph.replay(); update(twin, tslow, topt, b, tau=0.1)
    assert not torch.equal(flat(net), before)
    torch.testing.assert_close(flat(net), flat(twin), rtol=1e-4, atol=1e-5)


# --- the numbers of Stable-Baselines3 --------------------------------------------------------------------------------

def sb3_numbers():
    "One gradient step of Stable-Baselines3's own DQN.train on a fixed batch: its target, loss, and the weights before and after three steps."
    import gymnasium as gym
    import stable_baselines3.dqn.dqn as sb3
    from stable_baselines3.common.buffers import ReplayBufferSamples
    from stable_baselines3.common.logger import configure
    class World(gym.Env):
        observation_space, action_space = gym.spaces.Box(-9, 9, (6,)), gym.spaces.Discrete(3)
        def reset(self, seed=None, options=None): return np.zeros(6, np.float32), {}
        def step(self, a): return np.zeros(6, np.float32), 0.0, False, False, {}
    agent = sb3.DQN("MlpPolicy", World(), learning_rate=1e-3, gamma=0.9, buffer_size=100, seed=0, device="cpu", policy_kwargs=dict(net_arch=[16, 16]))
    agent.set_logger(configure(None, []))
    b, col = batch(), lambda x: x.float()[:, None]
    done = (b.discount == 0)
    samples = ReplayBufferSamples(b.obs, b.action[:, None], b.next_obs, col(done), col(b.reward), None)
    agent.replay_buffer.sample = lambda *a, **k: samples
    with torch.no_grad():
        g = generator(0, "sb3")
        for p in agent.q_net_target.parameters(): p.add_(0.1 * torch.randn(p.shape, generator=g))     # so that the two nets differ
    out = {"q": agent.q_net(b.obs).detach(), "next_target": agent.q_net_target(b.next_obs).detach(), "obs": b.obs, "next_obs": b.next_obs,
           "action": b.action, "reward": b.reward, "done": done.float()}
    for where, net in (("online", agent.q_net), ("target", agent.q_net_target)): out |= {f"{where}.{i}": p.detach().clone() for i, p in enumerate(net.parameters())}
    seen, plain = {}, sb3.F.smooth_l1_loss
    def spy(current, target): seen.setdefault("target", target[:, 0].clone()); seen.setdefault("loss", plain(current, target).detach()); return plain(current, target)
    sb3.F.smooth_l1_loss = spy
    try: agent.train(3, batch_size=32)
    finally: sb3.F.smooth_l1_loss = plain
    return out | {"y": seen["target"], "loss": seen["loss"]} | {f"after.{i}": p.detach().clone() for i, p in enumerate(agent.q_net.parameters())}


def check_against(s):
    y = dqn_targets(s["reward"], 0.9 * (1 - s["done"]), s["next_target"])
    torch.testing.assert_close(y, s["y"], atol=1e-6, rtol=0)
    loss, _ = dqn_loss(s["q"], s["action"], y, torch.ones(32))
    torch.testing.assert_close(loss, s["loss"], atol=1e-6, rtol=0)
    net, slow = pair()
    with torch.no_grad():
        for name, n in (("online", net), ("target", slow)):
            for i, p in enumerate(n.parameters()): p.copy_(s[f"{name}.{i}"])
    opt = adam(net, 1e-3)
    b = Batch(s["obs"], s["action"], s["reward"], s["next_obs"], 0.9 * (1 - s["done"]), torch.ones(32), torch.arange(32))
    for _ in range(3): update(net, slow, opt, b, double=False)
    for i, p in enumerate(net.parameters()): torch.testing.assert_close(p.detach(), s[f"after.{i}"], atol=1e-5, rtol=0)


@pytest.mark.unit
def test_dqn_is_stable_baselines_on_stored_tensors(): check_against(load_file(GOLDEN))


@pytest.mark.peers
def test_dqn_is_stable_baselines_recomputed():
    pytest.importorskip("stable_baselines3")
    now = sb3_numbers(); check_against(now)
    if not GOLDEN.exists(): GOLDEN.parent.mkdir(exist_ok=True); save_file(now, GOLDEN)
    stored = load_file(GOLDEN)
    for k, v in now.items(): torch.testing.assert_close(v, stored[k], atol=1e-5, rtol=0)
