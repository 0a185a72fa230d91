"""PPO: laws that cross notebooks, bad input, and the numbers of Stable-Baselines3 (stored; recomputed under the `peers` marker)."""
import copy
import dataclasses
import functools
import math
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foxhunt.core import UserError, generator
from foxhunt.data.windows import TRAIN, synthetic_table
from foxhunt.market.env import make_market
from foxhunt.market.oracle import oracle
from foxhunt.models.mlp import ActorCritic
from foxhunt.params import PPO, Env
from foxhunt.train import ppo
from foxhunt.train.dqn import adam, adam_state, load_adam, seeded
from foxhunt.train.ppo import LOSSES, PPOTrainer, Rollout, explained_variance, gae, normalise, ppo_loss, rebuild, update
from foxhunt.train.replay import GymLanes, walk_split

GOLDEN = Path(__file__).parent / "golden" / "agents_ppo_sb3.safetensors"
RULES = Env(episode_bars=50)
TINY = PPO(hidden=(16,), lanes=16, epochs=6, rollout=8, minibatch=50, passes=2)


@pytest.fixture(scope="module")
def market(): return make_market(synthetic_table(600, kind="sinusoid"), TRAIN, RULES)


def net(dtype=torch.float32): return seeded(lambda: ActorCritic(4, (16,), 3), 0, "t").to(dtype)


def mini(n=32, seed=0, dtype=torch.float32):
    g = generator(seed, "mini")
    x = lambda *s: torch.randn(*s, generator=g, dtype=dtype)
    return Rollout(x(n, 4), torch.randint(3, (n,), generator=g), x(n) * 0.1 - 1.1, x(n), x(n))


def flat(model): return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.unit
def test_ppo_forward_pass_shape():
    logits, value = ActorCritic(256, (64, 64), 11)(torch.zeros(7, 256))
    assert logits.shape == (7, 11) and value.shape == (7,)


@pytest.mark.unit
@pytest.mark.parametrize("by_hand", (False, True))
@pytest.mark.parametrize("n", (1, 2, 32))
def test_every_parameter_gets_a_gradient(n, by_hand):
    model = net()
    with torch.no_grad(): model.policy_rest[-1].bias.add_(torch.tensor([0.0, 0.5, 1.0]))
    _, parts = update(model, adam(model, 1e-3), mini(n), torch.zeros(()), by_hand=by_hand)
    assert torch.isfinite(parts).all() and len(parts) == len(LOSSES) + 1
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.unit
@pytest.mark.parametrize("by_hand", (False, True))
def test_update_waits_for_nothing(by_hand):
    with torch.device("meta"):
        model = ActorCritic(4, (16,), 3)
        _, parts = update(model, torch.optim.SGD(model.parameters(), lr=0.1), Rollout(*(x.to("meta") for x in mini())), torch.zeros(()), by_hand=by_hand)
    assert parts.is_meta


@pytest.mark.unit
def test_good_actions_become_likelier_and_clipping_stops():
    logp, one = torch.zeros(2, requires_grad=True), torch.ones(2)
    loss, _ = ppo_loss(logp, torch.zeros(2), one, one, torch.tensor([1.0, -1.0]), one)
    g, = torch.autograd.grad(loss, logp)
    assert g[0] < 0 < g[1]
    far = torch.tensor([0.5, -0.5], requires_grad=True)                           # already moved by more than 20 %
    loss, parts = ppo_loss(far, torch.zeros(2), one, one, torch.tensor([1.0, -1.0]), one)
    assert torch.autograd.grad(loss, far)[0].abs().max() == 0 and parts[LOSSES.index("clip_fraction")] == 1


@pytest.mark.unit
def test_normalise_survives_one_and_constant():
    assert normalise(torch.tensor([3.0])).item() == 3.0
    assert torch.isfinite(normalise(torch.full((4,), 2.0))).all()


@pytest.mark.unit
def test_explained_variance_is_of_the_returns():
    x = torch.tensor([0.0, 1.0, 2.0])
    assert explained_variance(x, x) == 1 and math.isnan(explained_variance(x, torch.ones(3))) or torch.isinf(explained_variance(x, torch.ones(3)))


@pytest.mark.unit
def test_gae_never_crosses_an_end():
    "What happens after an end cannot change the advantages before it."
    g = generator(0, "gae")
    x = [torch.randn(20, 5, generator=g, dtype=torch.float64) for _ in range(3)]
    for which in (0, 1):
        flags = [torch.zeros(20, 5, dtype=torch.bool) for _ in range(2)]; flags[which][9] = True
        a, _ = gae(*x, *flags, 0.99, 0.95)
        y = [v.clone() for v in x]
        for v in y: v[10:] += 100
        b, _ = gae(*y, *flags, 0.99, 0.95)
        assert torch.equal(a[:10], b[:10]) and not torch.equal(a[10:], b[10:])


def hundred(step, dtype=torch.float64, **rules):
    model = net(dtype); opt, flag = adam(model, 1e-3), torch.zeros(())
    for i in range(100): flag, _ = step(model, opt, mini(seed=i, dtype=dtype), flag, **rules)
    return flat(model), opt.state[model.first.weight]["step"].item()


STOPS = pytest.mark.parametrize("rules", ({}, dict(target_kl=0.05)), ids=("to the end", "stopped by KL"))


def check_same_hundred(step, rules, within):
    (a, n), (b, m) = hundred(update, **rules), hundred(step, **rules)
    assert n == m and (n == 100 or rules and 3 < n < 97) and (a - b).norm() / a.norm() <= within


@pytest.mark.unit
@pytest.mark.parametrize("n", (1, 2, 50))
@pytest.mark.parametrize("hidden", ((5,), (8, 6), (4, 6, 8)))
def test_written_gradients_are_those_of_autograd(hidden, n):
    "Networks of any depth, moved far enough that a part of the items is clipped; entropy and value with weights of their own."
    model, data, rules = seeded(lambda: ActorCritic(4, hidden, 3), 0, "g").double(), mini(n, dtype=torch.float64), dict(clip_range=0.1, value_coef=0.7, entropy_coef=0.3)
    with torch.no_grad(): model.policy_rest[-1].weight.mul_(100)
    made = []
    for by_hand in (False, True):
        model.zero_grad()
        _, parts = update(model, torch.optim.SGD(model.parameters(), lr=0.0), data, torch.zeros(()), max_grad_norm=1e9, by_hand=by_hand, **rules)
        made.append([parts, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(*made, rtol=1e-11, atol=1e-14)
    assert n < 50 or 0.1 < made[0][0][LOSSES.index("clip_fraction")] < 1


@STOPS
@pytest.mark.unit
def test_written_gradients_make_the_same_hundred_steps(rules): check_same_hundred(functools.partial(update, by_hand=True), rules, 1e-9)


@STOPS
@pytest.mark.unit
def test_traced_equals_eager(rules): check_same_hundred(torch.compile(update, backend="aot_eager"), rules, 1e-5)


@STOPS
@pytest.mark.slow
@pytest.mark.unit
def test_compiled_equals_eager(rules): check_same_hundred(torch.compile(update), rules, 1e-5)


@pytest.mark.unit
def test_acting_traced_equals_eager():
    logits, u = mini(64).obs, torch.rand(64, 4, generator=generator(0, "u"))
    for eager, traced in zip(ppo.act(logits, u), torch.compile(ppo.act, backend="aot_eager", fullgraph=True)(logits, u)): torch.testing.assert_close(eager, traced)


@pytest.mark.unit
def test_the_trainers_kl_stop_survives_compilation(market):
    "As many steps of the optimizer, and the same weights, with a stop on the way."
    made = []
    for compiled in (False, True):
        t = PPOTrainer(market, dataclasses.replace(TINY, target_kl=0.002, lr=3e-3), RULES, seed=1); t.by_hand = False
        if compiled: t._update = torch.compile(update, backend="aot_eager")
        for _ in range(2): t.run_epoch()
        made.append((t.opt.state[t.model.first.weight]["step"].item(), flat(t.model)))
    (n, a), (m, b) = made
    assert 0 < n == m < 2 * t.rollouts * TINY.passes * -(-t.steps * TINY.lanes // TINY.minibatch) and (a - b).norm() / a.norm() <= 1e-5


@pytest.mark.unit
@pytest.mark.parametrize("by_hand", (False, True))
def test_kl_stop_leaves_everything_as_it_is(by_hand):
    update = functools.partial(ppo.update, by_hand=by_hand)
    model = net(); opt = adam(model, 1e-2)
    update(model, opt, mini(), torch.zeros(()), target_kl=10.0)
    before, steps = flat(model), opt.state[model.first.weight]["step"].clone()
    flag, _ = update(model, opt, mini(), torch.ones(()), target_kl=10.0)
    assert torch.equal(before, flat(model)) and flag == 1 and opt.state[model.first.weight]["step"] == steps
    update(model, opt, mini(), torch.zeros(()), target_kl=10.0)                   # the next rollout starts afresh
    assert not torch.equal(before, flat(model))


def same(a, b):
    if isinstance(a, dict): return a.keys() == b.keys() and all(same(v, b[k]) for k, v in a.items())
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.checkpoint
def test_ppo_resume_through_files_is_exact(market, tmp_path):
    from foxhunt.train.checkpoint import load_state, save_state
    make = lambda: PPOTrainer(market, TINY, RULES, seed=3)
    whole, half, rest = make(), make(), make()
    for _ in range(4): whole.run_epoch()
    for _ in range(2): half.run_epoch()
    save_state(tmp_path / "s", half.state_dict())
    rest.load_state_dict(load_state(tmp_path / "s")[0])
    for _ in range(2): rest.run_epoch()
    assert same(whole.state_dict(), rest.state_dict())


@pytest.mark.checkpoint
def test_ppo_checkpoint_rebuilds(market):
    trainer = PPOTrainer(market, TINY, RULES); trainer.run_epoch()
    model = rebuild(trainer.describe()); model.load_state_dict(trainer.weights())
    obs = trainer.world.observe(trainer.world.key())
    with torch.no_grad(): assert torch.equal(model.actor(obs).argmax(-1), trainer.policy(obs))


@pytest.mark.integration
def test_ppo_learns_the_sine():
    rules = Env()
    market = make_market(synthetic_table(1200, kind="sinusoid", seed=1), TRAIN, rules)
    trainer = PPOTrainer(market, PPO(lanes=32, epochs=16, rollout=14, passes=8, minibatch=128, target_kl=0.05), rules, seed=1)
    history = [trainer.run_epoch() for _ in range(16)]
    _, profit = walk_split(market, rules, trainer.policy)
    assert profit >= 0.95 * oracle(market, rules, state_bars=11, end_flat=False).profit
    assert history[-1]["explained_variance"] > history[0]["explained_variance"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_no_seed_has_to_be_lucky_for_the_sine(seed):                                  # the run of 52_ppo
    rules = Env(); market = make_market(synthetic_table(1500, kind="sinusoid"), TRAIN, rules)
    trainer = PPOTrainer(market, PPO(lanes=32, epochs=16, rollout=17, passes=8, minibatch=128, target_kl=0.05), rules, seed=seed)
    for _ in range(16): trainer.run_epoch()
    assert walk_split(market, rules, trainer.policy)[1] >= 0.95 * oracle(market, rules, state_bars=11, end_flat=False).profit


@pytest.mark.integration
def test_ppo_epoch_covers_the_split(market):
    trainer = PPOTrainer(market, TINY, RULES)
    bars = trainer.rollouts * trainer.steps * 16
    assert len(market.starts) <= bars < len(market.starts) + 16 * trainer.rollouts + 16


@pytest.mark.device
def test_ppo_builds_on_the_default_device():
    with torch.device("meta"): model = ActorCritic(256, (64, 64), 11)
    assert all(p.is_meta for p in model.parameters()) and model(torch.empty(4, 256, device="meta"))[0].is_meta


@pytest.mark.device
def test_ppo_refuses_two_devices(market):
    with pytest.raises(UserError, match="make both on one device"): PPOTrainer(market, TINY, RULES, device="cuda")


@pytest.mark.gpu
@pytest.mark.device
def test_ppo_uses_cuda_device(market):
    there = make_market(synthetic_table(600, kind="sinusoid"), TRAIN, RULES, device="cuda")
    trainer = PPOTrainer(there, TINY, RULES, device="cuda", seed=3)
    for _ in range(2): trainer.run_epoch()
    here = PPOTrainer(market, TINY, RULES, seed=3)
    here.load_state_dict(trainer.state_dict()); here.run_epoch()                  # saved on CUDA, steps on the CPU
    obs = here.world.observe(here.world.key())
    trainer.model.load_state_dict(here.weights())
    with torch.no_grad(): torch.testing.assert_close(trainer.model(obs.cuda())[0].cpu(), here.model(obs)[0], atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.device
@pytest.mark.parametrize("by_hand", (False, True))
def test_ppo_steps_agree_across_devices(by_hand):
    "From one state, the same twenty minibatches on both."
    here = net(); there = copy.deepcopy(here).cuda(); a, b = adam(here, 1e-3), adam(there, 1e-3)
    for i in range(20):
        update(here, a, mini(seed=i), torch.zeros(()), target_kl=10.0, by_hand=by_hand)
        update(there, b, Rollout(*(x.cuda() for x in mini(seed=i))), torch.zeros((), device="cuda"), target_kl=10.0, by_hand=by_hand)
    torch.testing.assert_close(flat(there).cpu(), flat(here), atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.device
def test_ppo_update_graphs_with_its_stop():
    "A hundred replays are a hundred eager steps, a reached stop included."
    model = net().cuda(); opt, data, flag = adam(model, 1e-3), Rollout(*(x.cuda() for x in mini())), torch.zeros((), device="cuda")
    side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3): update(model, opt, data, flag, target_kl=0.05)
    torch.cuda.current_stream().wait_stream(side)
    graph, twin = torch.cuda.CUDAGraph(), copy.deepcopy(model); topt = adam(twin, 1e-3); load_adam(topt, twin, adam_state(opt, model))
    with torch.cuda.graph(graph): after, _ = update(model, opt, data, flag, target_kl=0.05); flag.copy_(after)
    stopped = torch.zeros((), device="cuda")
    for _ in range(100): graph.replay(); stopped, _ = update(twin, topt, data, stopped, target_kl=0.05)
    assert flag.item() == stopped.item() == 1
    torch.testing.assert_close(flat(model), flat(twin), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.device
def test_acting_in_a_graph_draws_anew():
    "Two replays of a captured policy give different samples, and neither writes over the other's copy."
    model, obs, gen = net().cuda(), mini(64).obs.cuda(), torch.Generator("cuda")
    go = lambda: ppo.act(model.actor(obs), torch.rand(64, 3, generator=gen, device="cuda"))
    graph = torch.cuda.CUDAGraph(); graph.register_generator_state(gen)
    with torch.no_grad():
        go()
        with torch.cuda.graph(graph): action, logp = go()
    graph.replay(); first = action.clone(); kept = first.clone()
    graph.replay(); torch.cuda.synchronize()
    assert not torch.equal(first, action) and torch.equal(first, kept)


# --- the numbers of Stable-Baselines3 --------------------------------------------------------------------------------

def sb3_numbers():
    "Advantages from Stable-Baselines3's RolloutBuffer and losses from its PPO.train, on fixed inputs with a termination and a truncation."
    import gymnasium as gym
    from stable_baselines3 import PPO as Peer
    from stable_baselines3.common.buffers import RolloutBuffer
    from stable_baselines3.common.logger import configure
    t, l, gamma, lam = 12, 3, 0.97, 0.9
    g = generator(0, "sb3 ppo")
    x = lambda *s: torch.randn(*s, generator=g)
    reward, value, last, final = x(t, l), x(t, l), x(l), x(t, l)
    term, trunc = torch.zeros(t, l, dtype=torch.bool), torch.zeros(t, l, dtype=torch.bool)
    term[4, 0] = trunc[6, 1] = term[11, 2] = True
    spaces = gym.spaces.Box(-9, 9, (4,)), gym.spaces.Discrete(3)
    buffer = RolloutBuffer(t, *spaces, device="cpu", gae_lambda=lam, gamma=gamma, n_envs=l)
    obs, action, logp = x(t, l, 4), torch.randint(3, (t, l), generator=g), x(t, l) * 0.1 - 1.1
    done = term | trunc
    starts = torch.cat([torch.ones(1, l, dtype=torch.bool), done[:-1]]).numpy()
    shown = reward + gamma * final * trunc                                        # as OnPolicyAlgorithm.collect_rollouts does
    for i in range(t): buffer.add(obs[i].numpy(), action[i].numpy(), shown[i].numpy(), starts[i], value[i], logp[i])
    buffer.compute_returns_and_advantage(last, done[-1].numpy())
    class World(gym.Env):
        observation_space, action_space = spaces
        def reset(self, seed=None, options=None): return np.zeros(4, np.float32), {}
        def step(self, a): return np.zeros(4, np.float32), 0.0, False, False, {}
    agent = Peer("MlpPolicy", World(), n_steps=36, batch_size=36, n_epochs=1, gamma=gamma, gae_lambda=lam, ent_coef=0.01, seed=0, device="cpu", policy_kwargs=dict(net_arch=[16]))
    agent.set_logger(configure(None, []))
    out = {k: torch.tensor(v) for k, v in dict(adv=buffer.advantages, ret=buffer.returns).items()}
    agent.rollout_buffer = buffer
    seen, plain = {}, agent.policy.evaluate_actions
    def spy(o, a):
        v, lp, e = plain(o, a); seen.update(value=v.detach().flatten(), now=lp.detach(), entropy=e.detach()); return v, lp, e
    agent.policy.evaluate_actions = spy
    order = np.random.RandomState(0).permutation(36)                              # the order in which `get` will hand the rows out
    np.random.seed(0)
    agent.train()
    log = agent.logger.name_to_value
    swap = lambda a: a.transpose(0, 1).reshape(36)[torch.tensor(order)]
    losses = torch.tensor([log["train/loss"], log["train/policy_gradient_loss"], log["train/value_loss"], -log["train/entropy_loss"], log["train/approx_kl"], log["train/clip_fraction"]])
    return out | seen | dict(reward=reward, values=value, last=last, final=final, term=term, trunc=trunc, logp=swap(logp), adv_rows=swap(out["adv"]), ret_rows=swap(out["ret"]),
                             losses=losses.float(), explained=torch.tensor(float(log["train/explained_variance"])))


def check_against(s):
    after = torch.cat([s["values"][1:], s["last"][None]])                          # the next row's value, where the episode goes on
    next_value = torch.where(s["trunc"], s["final"], after)
    adv, ret = gae(s["reward"], s["values"], next_value, s["term"], s["trunc"], 0.97, 0.9)
    torch.testing.assert_close(adv, s["adv"], atol=1e-6, rtol=0); torch.testing.assert_close(ret, s["ret"], atol=1e-6, rtol=0)
    _, parts = ppo_loss(s["now"], s["logp"], s["entropy"], s["value"], s["adv_rows"], s["ret_rows"])
    torch.testing.assert_close(parts, s["losses"], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(explained_variance(s["values"], s["ret"]), s["explained"], atol=1e-5, rtol=0)


@pytest.mark.unit
def test_ppo_is_stable_baselines_on_stored_tensors(): check_against(load_file(GOLDEN))


@pytest.mark.peers
def test_ppo_is_stable_baselines_recomputed():
    pytest.importorskip("stable_baselines3")
    now = sb3_numbers(); check_against(now)
    if not GOLDEN.exists(): save_file({k: v.contiguous() for k, v in now.items()}, GOLDEN)
    stored = load_file(GOLDEN)
    for k, v in now.items(): torch.testing.assert_close(v, stored[k], atol=1e-5, rtol=0)


class Count(gym.Env):
    "Observes the steps made so far; cut after 8."
    observation_space, action_space = gym.spaces.Box(0, 9, (1,)), gym.spaces.Discrete(2)
    def reset(self, seed=None, options=None): self.t = 0; return self.seen(), {}
    def step(self, action): self.t += 1; return self.seen(), 0.0, False, self.t >= 8, {}
    def seen(self): return np.array([self.t], np.float32)


@pytest.mark.unit
def test_a_cut_episode_is_worth_what_its_own_last_observation_is_worth():
    "The critic says the step count: behind the cut lies 8, behind the restart 0."
    cfg = PPO(hidden=(4,), rollout=16, gae_lambda=1e-9, gamma=0.5, epochs=3, scale_returns=False)
    t = PPOTrainer(GymLanes(Count, steps_per_epoch=16), cfg); t.model.value = lambda obs: obs[..., 0]
    ret = t.collect()[0].ret
    torch.testing.assert_close(ret[[6, 7, 8, 15]], torch.tensor([3.5, 4.0, 0.5, 4.0]))       # gamma times the next value


@pytest.mark.unit
def test_the_schedule_reaches_the_optimizer(market):
    t = PPOTrainer(market, dataclasses.replace(TINY, lr=1e-2, anneal=True), RULES)
    for _ in range(3): t.run_epoch()
    last = 3 * t.rollouts - 1
    assert t.opt.param_groups[0]["lr"].item() == t.lr[last].item() < t.lr[0].item()
