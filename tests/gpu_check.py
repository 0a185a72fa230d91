"""Predictions and promises against a real GPU: `python tests/gpu_check.py --out bench/gpu_check.json` (`make gpu-check`).

Needs the compute rooms only: torch, numpy, safetensors, tqdm, nvidia-ml-py. At most 8 minutes on a GPU. Prints its tables whatever they show;
a section that fails is recorded and the next one runs. Without a GPU: says so, writes {"skipped": reason}, exits 0.
`--device cpu --quick` walks through every section on the CPU, with small models, to test this script itself.
"""
import argparse, contextlib, dataclasses, gc, json, math, os, select, signal, statistics, subprocess, sys, tempfile, time, traceback, warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch

from foxhunt.bench.epochs import crossover
from foxhunt.core import jsonable, machine, synchronize, write_json
from foxhunt.hardware.audit import audit, build, cast_floats, named_tensors, training_step
from foxhunt.hardware.memory import CARDS, MIB, MasterWeights, card_from_device
from foxhunt.params import DQN, PPO, TFT, TLOB, Mamba2, Params, Train
from foxhunt.train.registry import MODELS, spec, synthetic, workload

LIMIT_S, NEEDED_S, LAST_S = 8 * 60, 30, 10      # of the whole check; without so many left no section begins; kept for writing the result
SMALL = Params(train=Train(dqn=DQN(hidden=(32, 32), lanes=8, updates_per_epoch=2, learn_starts=16, replay_size=2_000, batch=16, epochs=2),
                           ppo=PPO(hidden=(16,), lanes=8, rollout=8, minibatch=32, passes=1, epochs=2), mamba2=Mamba2(lookback=16, d_model=16, n_layers=1, d_state=8, head=8, stride=64, batch=8, epochs=2),
                           tft=TFT(lookback=8, hidden=8, heads=2, stride=64, batch=8, epochs=2), tlob=TLOB(hidden=16, n_layers=1, stride=256, batch=8, epochs=2)))
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def table(title: str, rows: list[dict]) -> None:
    "Aligned columns."
    print(f"\n== {title}")
    if not rows: print("(nothing)"); return
    keys = list(dict.fromkeys(k for r in rows for k in r if k != "samples"))
    show = lambda v: "" if v is None else f"{v:,.4g}" if isinstance(v, float) else str(v)[:60]
    cells = [keys, *[[show(r.get(k)) for k in keys] for r in rows]]; width = [max(len(c[i]) for c in cells) for i in range(len(keys))]
    for c in cells: print("  ".join(x.ljust(n) for x, n in zip(c, width)).rstrip())
    sys.stdout.flush()


class Skip(Exception):
    "A section that this device cannot run; the text says why."


class TimeIsUp(BaseException):
    "The minutes of the whole check are over: no section's own `except Exception` may swallow it."


class Check:
    "The run: device, parameters, results by section."

    def __init__(self, a: argparse.Namespace):
        self.quick, self.device = a.quick, torch.device(a.device if a.device != "cuda" else "cuda:0")
        self.cuda = self.device.type == "cuda"
        self.models = [spec(m).name for m in a.models.split(",")] if a.models else list(MODELS)
        self.params, self.start, self.result = SMALL if a.quick else Params(), time.perf_counter(), {}
        self.card = CARDS["RTX 3050 Ti Laptop"]
        if self.cuda: torch.cuda.set_device(self.device)      # memory statistics, streams and graphs are those of the current device

    def left(self) -> float: return LIMIT_S - (time.perf_counter() - self.start)

    def section(self, name: str, fn) -> None:
        "Run one section; its failure is part of the result. Long ones are left out when the time is nearly over."
        start = time.perf_counter()
        if self.left() < NEEDED_S: self.result[name] = {"skipped": f"{LIMIT_S} s are nearly over"}; print(f"\n== {name}: skipped, time is nearly over"); return
        def ring(*_) -> None: raise TimeIsUp
        before = signal.signal(signal.SIGALRM, ring); signal.setitimer(signal.ITIMER_REAL, self.left() - LAST_S, 1.0)      # and again, should the first be lost in a callback
        try: rows = fn(); signal.setitimer(signal.ITIMER_REAL, 0); out = {"ok": all(r.get("ok") is not False for r in rows), "rows": rows}; table(name, rows)
        except Skip as e: out = {"skipped": str(e)}; print(f"\n== {name}: skipped: {e}")
        except TimeIsUp: out = {"ok": False, "error": f"cut off: {LIMIT_S} s are over"}; print(f"\n== {name}: cut off, time is over")
        except Exception as e: out = {"ok": False, "error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()}; print(f"\n== {name}: FAILED: {type(e).__name__}: {str(e)[:300]}")
        finally: signal.setitimer(signal.ITIMER_REAL, 0); signal.signal(signal.SIGALRM, before)
        self.result[name] = out | {"seconds": time.perf_counter() - start}
        with contextlib.suppress(Exception): self.release()

    def each(self, fn) -> list[dict]:
        "One row per model; a model's failure is its row."
        rows = []
        for m in self.models:
            try: got = fn(m)
            except Skip: raise
            except Exception as e: got = {"ok": False, "error": f"{type(e).__name__}: {' '.join(str(e).split())[:200]}"}
            rows += [{"model": m} | r for r in (got if isinstance(got, list) else [got])]
            self.release()
        return rows

    def work(self, name: str): return workload(name, self.params)

    def release(self) -> None:
        gc.collect()
        if self.cuda:
            torch.cuda.synchronize()
            with contextlib.suppress(AttributeError): torch._C._cuda_clearCublasWorkspaces()   # torch keeps them as allocated memory
            torch.cuda.empty_cache()

    def need_cuda(self) -> None:
        if not self.cuda: raise Skip("needs CUDA")

    @contextlib.contextmanager
    def four_gb(self):
        "As little memory as a 4 GB card leaves to torch."
        if not self.cuda: yield; return
        total = torch.cuda.get_device_properties(self.device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(self.card.capacity / total, 1.0), self.device)
        try: yield
        finally: torch.cuda.set_per_process_memory_fraction(1.0, self.device)

    # --- before anything runs on the device: forks cannot follow CUDA's backward threads ---

    def predictions(self) -> list[dict]:
        "Recordings of all cases, the audit on pretend GPU 0 and 1, and a planted mix-up that it must find."
        from foxhunt.bench.budget import Case, batch_of, record_all
        cases = [Case(m, p, b) for m in self.models for p, b in ((p, batch_of(m, self.params)) for p in (("fp32",) if self.quick else ("fp32", "amp", "bf16", "fp16")))]
        cases += [Case(m, "fp32", 2 * batch_of(m, self.params)) for m in self.models]
        self.traces = record_all(cases, self.params); self.audits = {}

        def one(m: str) -> dict:
            found = [audit(lambda: self.work(m), i) for i in (0, 1)]; planted = audit(lambda: self.planted(m), 0)
            self.audits[m] = found
            return {"mixups": sum(len(r.mixups) for r in found), "waits_in_step": len(found[0].places[1].syncs), "planted_found": bool(planted.mixups), "events": len(self.traces[Case(m, "fp32", batch_of(m, self.params))].events),
                    "ok": all(r.ok for r in found) and bool(planted.mixups)}
        return self.each(one)

    def planted(self, m: str):
        "A workload whose loss adds a host tensor."
        w = self.work(m)
        return dataclasses.replace(w, loss=lambda net, b: w.loss(net, b) + torch.ones(2, device="cpu").sum(0, keepdim=True).expand(3).sum() * 0 + (next(net.parameters()).flatten()[:3] * torch.ones(3, device="cpu")).sum())

    # --- on the device ---

    def facts(self) -> list[dict]:
        f = machine() | {"device": str(self.device)}
        if self.cuda:
            p = torch.cuda.get_device_properties(self.device); card = card_from_device(self.device.index or 0); self.measured_card = card
            f |= {"gpu": p.name, "capability": f"{p.major}.{p.minor}", "memory_mib": p.total_memory / MIB, "context_mib": card.context / MIB, "cudnn": torch.backends.cudnn.version()}
        return [{"fact": k, "value": v} for k, v in f.items()]

    def reality(self) -> list[dict]:
        "What the audit promised: the five places on the real device, and the planted mix-up fails there too."
        def one(m: str) -> dict:
            w, d, where = self.work(m), self.device, []
            net = build(w, d); opt = w.optimizer(net); batch = w.batch(w.batch_size, d)
            training_step(w, net, opt, batch)
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                if self.cuda: torch.cuda.set_sync_debug_mode("warn")
                try: training_step(w, net, opt, batch)
                finally:
                    if self.cuda: torch.cuda.set_sync_debug_mode("default")
            waits = sum("synchroniz" in str(x.message) for x in said) if self.cuda else None
            net.eval()
            with torch.no_grad(): out = [w.infer(net, batch), w.step(net, w.batch(1, d)) if w.step else ()]
            net.load_state_dict({k: v.cpu() for k, v in net.state_dict().items()})
            where = [n for n, t in named_tensors([net, batch, out]) if t.device.type != d.type]
            fails = None
            if self.cuda:
                bad = self.planted(m)
                try: training_step(bad, net, opt, batch); fails = False
                except RuntimeError: fails = True
            promised = getattr(self, "audits", {}).get(m)
            return {"elsewhere": len(where), "waits_in_step": waits, "waits_predicted": len(promised[0].places[1].syncs) if promised else None, "planted_fails": fails, "audit_agrees": None if promised is None else all(not r.mixups for r in promised) == (not where), "ok": not where and fails is not False}
        return self.each(one)

    def updates(self, m: str, precision: str, n: int = 3) -> None:
        "As the prediction records them."
        w = self.work(m); dtype = HALF.get(precision, torch.float32)
        net = build(w, self.device, dtype); opt = w.optimizer(net)
        if precision in HALF: opt = MasterWeights(opt)
        if precision == "amp":
            plain = w.loss
            def loss(net, b):
                with torch.autocast(self.device.type, torch.bfloat16): out = plain(net, b)
                return out
            w = dataclasses.replace(w, loss=loss)
        for _ in range(n): training_step(w, net, opt, cast_floats(w.batch(w.batch_size, self.device), dtype))
        synchronize(self.device)

    def memory(self) -> list[dict]:
        "Predicted against measured peaks, and back to the baseline after each model."
        from foxhunt.bench.budget import Case, batch_of, footprint
        if not hasattr(self, "traces"): raise RuntimeError("no predictions: see that section")
        card = dataclasses.replace(self.card, workspace=getattr(self, "measured_card", self.card).workspace)
        def one(m: str) -> list[dict]:
            rows = []
            for c in (c for c in self.traces if c.model == m and c.batch == batch_of(m, self.params)):
                f = footprint(self.traces[c], c, c.batch, card); self.release()
                row = {"precision": c.precision, "batch": c.batch, "predicted_allocated_mib": f.allocated / MIB, "predicted_reserved_mib": f.reserved / MIB}
                if self.cuda:
                    base = torch.cuda.memory_allocated(); base_reserved = torch.cuda.memory_reserved(); torch.cuda.reset_peak_memory_stats()
                try: self.updates(m, c.precision)
                except Exception as e: rows.append(row | {"ok": False, "error": f"{type(e).__name__}: {str(e)[:200]}"}); continue
                if self.cuda:
                    a, r = torch.cuda.max_memory_allocated() - base, torch.cuda.max_memory_reserved() - base_reserved; self.release(); after = torch.cuda.memory_allocated() - base
                    row |= {"allocated_mib": a / MIB, "reserved_mib": r / MIB, "allocated_error": f.allocated / a - 1, "reserved_error": f.reserved / r - 1, "left_after_bytes": after,
                            "within_5_and_10_percent": abs(f.allocated / a - 1) <= 0.05 and abs(f.reserved / r - 1) <= 0.10, "ok": after == 0}
                rows.append(row)
            return rows
        with self.four_gb(): return self.each(one)

    def largest(self) -> list[dict]:
        "The predicted largest batch on 4 GB fits, and a quarter more does not."
        self.need_cuda()
        from foxhunt.bench.budget import LIMIT, Case, batch_of, largest_of
        from foxhunt.hardware.batch_size import try_batch
        def one(m: str) -> dict:
            b = batch_of(m, self.params); card = dataclasses.replace(self.card, workspace=self.measured_card.workspace)
            top = largest_of(self.traces[Case(m, "fp32", b)], self.traces[Case(m, "fp32", 2 * b)], (b, 2 * b), card, margin=0.0)
            if not top or top == LIMIT: return {"predicted": top, "fits": None, "quarter_more_fits": None}
            first = try_batch(self.work(m), int(top * 0.95), self.device); more = try_batch(self.work(m), top * 5 // 4, self.device)
            return {"predicted": top, "fits": first.fits, "quarter_more_fits": more.fits, "ok": first.fits and not more.fits}
        with self.four_gb(): return self.each(one)

    def stopwatch(self, run, device: torch.device, n: int, warm: int = 3, budget_s: float = 3.0) -> list[float]:
        "Milliseconds, the device synchronised before both readings of the clock."
        for _ in range(warm): run()
        times, begin = [], time.perf_counter()
        while len(times) < n and (len(times) < 3 or time.perf_counter() - begin < budget_s):
            synchronize(device); start = time.perf_counter(); run(); synchronize(device); times.append(1e3 * (time.perf_counter() - start))
        return times

    def timed(self, m: str, device: torch.device, n: int) -> dict:
        w = self.work(m); net = build(w, device); opt = w.optimizer(net)
        update = self.stopwatch(lambda: training_step(w, net, opt, w.batch(w.batch_size, device)), device, n)
        net.eval(); infer = {}
        with torch.inference_mode():
            for b in (1, 8) if self.quick else (1, 8, 64, 256):
                data = w.batch(b, device); infer[b] = self.stopwatch(lambda: w.infer(net, data), device, n, budget_s=1.0)
        return {"update": update, "infer": infer}

    def benchmark(self) -> list[dict]:
        "Milliseconds of an update and of inference by batch on the device."
        self.times = {}
        def one(m: str) -> dict:
            t = self.times[m] = self.timed(m, self.device, 5 if self.quick else 100); s = sorted(t["update"])
            return {"n": len(s), "update_ms": statistics.median(s), "p95_ms": s[math.ceil(0.95 * len(s)) - 1], **{f"infer_{b}_ms": statistics.median(x) for b, x in t["infer"].items()}, "samples": t, "ok": True}
        return self.each(one)

    def cpu_against_gpu(self) -> list[dict]:
        "The same work on this machine's CPU; where the GPU begins to win."
        self.need_cuda()
        def one(m: str) -> dict:
            c, g = self.timed(m, torch.device("cpu"), 10), self.times[m]; med = statistics.median
            return {"cpu_update_ms": med(c["update"]), "gpu_update_ms": med(g["update"]), "speed_up": med(c["update"]) / med(g["update"]), "updates_per_s": 1e3 / med(g["update"]),
                    **{f"infer_{b}_speed_up": med(c["infer"][b]) / med(g["infer"][b]) for b in g["infer"]}, "gpu_wins_inference_from_batch": crossover(*({b: med(x) for b, x in side["infer"].items()} for side in (c, g))), "samples": c, "ok": True}
        return self.each(one)

    def same_values(self) -> list[dict]:
        "CPU and device compute the same forward and loss from the same weights and batch."
        def one(m: str) -> dict:
            w = self.work(m); host = build(w, torch.device("cpu")).eval(); net = build(w, self.device).eval(); net.load_state_dict(host.state_dict()); b = w.batch(8, torch.device("cpu"))
            with torch.no_grad(): x, y = w.infer(host, b), w.infer(net, moved(b, self.device))
            d = max_difference(x, y); scale = max(float(t.abs().max()) for _, t in named_tensors(x))
            return {"difference": d, "scale": scale, "ok": d <= 1e-3 * max(scale, 1.0)}
        return self.each(one)

    def modes(self) -> list[dict]:
        "Eager, compiled and CUDA graph: the same results, and their times at batch 8."
        def one(m: str) -> list[dict]:
            w = self.work(m); net = build(w, self.device).eval(); b = w.batch(8, self.device); n = 5 if self.quick else 50; rows = []
            with torch.no_grad():
                want = w.infer(net, b); ms = self.stopwatch(lambda: w.infer(net, b), self.device, n, budget_s=1.0)
                rows.append({"mode": "eager", "ms": statistics.median(ms), "difference": 0.0, "samples": ms, "ok": True})
                for mode, make in (("compiled", self.compiled), ("graph", self.graphed)):
                    if self.left() < 60: rows.append({"mode": mode, "skipped": "time is nearly over"}); continue
                    try:
                        start = time.perf_counter(); run = make(lambda x: w.infer(net, x), b); first = time.perf_counter() - start
                        d = max_difference(want, run()); ms = self.stopwatch(run, self.device, n, budget_s=1.0)
                        rows.append({"mode": mode, "ms": statistics.median(ms), "first_s": first, "difference": d, "speed_up": rows[0]["ms"] / statistics.median(ms), "samples": ms, "ok": d <= 2e-3 * max(1.0, max(float(t.abs().max()) for _, t in named_tensors(want)))})
                    except Skip as e: rows.append({"mode": mode, "skipped": str(e)})
                    except Exception as e: rows.append({"mode": mode, "ok": False, "error": f"{type(e).__name__}: {str(e)[:200]}"})
            return rows
        return self.each(one)

    def compiled(self, fn, b):
        torch._dynamo.reset()
        run = torch.compile(fn, backend="inductor" if self.cuda else "eager", dynamic=False); run(b)   # on the CPU only the tracing is tried
        return lambda: run(b)

    def graphed(self, fn, b):
        self.need_cuda()
        side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3): fn(b)
        torch.cuda.current_stream().wait_stream(side); g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g): out = fn(b)
        def run(): g.replay(); return out
        return run

    def checkpoints(self) -> list[dict]:
        "One epoch on the device; weights and resume state go to the CPU and back, and training goes on there."
        from foxhunt.train.checkpoint import load_state, load_weights, save_state, save_weights
        small = dataclasses.replace(SMALL, train=dataclasses.replace(SMALL.train)); host = torch.device("cpu")
        def one(m: str) -> dict:
            s = spec(m); t = synthetic(s.kind); a = s.trainer(t, small, 0, self.device); a.run_epoch()
            with tempfile.TemporaryDirectory() as d:
                save_weights(Path(d) / "w.safetensors", a.weights(), {"model": m} | jsonable(a.describe())); save_state(Path(d) / "resume", a.state_dict())
                there, _ = load_weights(Path(d) / "w.safetensors", host); back, _ = load_weights(Path(d) / "w.safetensors", self.device)
                state, _ = load_state(Path(d) / "resume"); b = s.trainer(t, small, 0, host); b.load_state_dict(state)
                same = all(torch.equal(v.cpu(), there[k]) and torch.equal(v, back[k]) and v.device.type == self.device.type for k, v in a.weights().items()) and all(torch.equal(v.cpu(), there[k]) for k, v in b.weights().items())
                x, y = a.run_epoch(), b.run_epoch()
                c = s.trainer(t, small, 0, self.device); save_state(Path(d) / "host", b.state_dict()); c.load_state_dict(load_state(Path(d) / "host")[0]); z = c.run_epoch()
            return {"same_bits": same, "device_loss": x["loss"], "cpu_loss": y["loss"], "back_on_device_loss": z["loss"], "ok": same and all(map(math.isfinite, (x["loss"], y["loss"], z["loss"])))}
        return self.each(one)

    def side_by_side(self) -> list[dict]:
        "All models at once, each in a process, against one after another (seed 004 claims 30-40 % faster); ABBA order."
        n = 3 if self.quick else 60; models = self.models[:2] if self.quick else self.models
        crew = {m: subprocess.Popen([sys.executable, __file__, "--worker", m, "--device", str(self.device), *(["--quick"] if self.quick else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for m in models}
        def ask(m: str) -> None: crew[m].stdin.write(f"{n}\n"); crew[m].stdin.flush()
        def hear(m: str) -> float:
            if not select.select([crew[m].stdout], [], [], max(1.0, min(120.0, self.left() - 15)))[0]: raise RuntimeError(f"the worker of {m} does not answer")
            line = crew[m].stdout.readline()
            if not line: raise RuntimeError(f"the worker of {m} died: {crew[m].stderr.read()[-300:]}")
            return float(line)
        try:
            for m in models: hear(m)   # warm
            def alone() -> dict:
                start, each = time.perf_counter(), {}
                for m in models: ask(m); each[m] = hear(m)
                return {"how": "one after another", "s": time.perf_counter() - start, "each": each}
            def together() -> dict:
                start = time.perf_counter()
                for m in models: ask(m)
                each = {m: hear(m) for m in models}
                return {"how": "side by side", "s": time.perf_counter() - start, "each": each}
            rows = [alone(), together(), together(), alone()]
        finally:
            for p in crew.values():
                with contextlib.suppress(Exception): p.stdin.close(); p.wait(20)
                if p.poll() is None: p.kill()
        one, both = (statistics.mean(r["s"] for r in rows if r["how"] == h) for h in ("one after another", "side by side"))
        return [*rows, {"how": f"side by side takes {1 - both / one:.0%} less time; seed 004 reports 30-40 % less, with int8 training that does not exist", "s": both, "less_time": 1 - both / one, "updates_each": n}]


def moved(x, device):
    "Nested tensors on another device."
    from torch.utils import _pytree as pytree
    return pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), x)


def max_difference(x, y) -> float: return max(float((a.float().cpu() - b.float().cpu()).abs().max()) for (_, a), (_, b) in zip(named_tensors(x), named_tensors(y)))


def worker(a: argparse.Namespace) -> int:
    "Train one model on request: a number of updates per line of input, the seconds as answer."
    c = Check(a); w = c.work(a.worker); net = build(w, c.device); opt = w.optimizer(net)
    def run(n: int) -> float:
        synchronize(c.device); start = time.perf_counter()
        for _ in range(n): training_step(w, net, opt, w.batch(w.batch_size, c.device))
        synchronize(c.device); return time.perf_counter() - start
    print(run(3), flush=True)
    for line in sys.stdin: print(run(int(line)), flush=True)
    return 0


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--out", type=Path, default=None, help="JSON of raw samples"); p.add_argument("--device", default="cuda", help="cuda, or cpu to walk through the script"); p.add_argument("--models", default="", help="comma separated; default: all")
    p.add_argument("--quick", action="store_true", help="small models, few samples"); p.add_argument("--worker", default="", help=argparse.SUPPRESS)
    a = p.parse_args(argv)
    if a.device.startswith("cuda") and not torch.cuda.is_available():
        reason = "this torch has no CUDA" if torch.version.cuda is None else "torch finds no CUDA device"
        print(f"gpu-check: skipped: {reason}")
        if a.out: write_json(a.out, {"skipped": reason})
        return 0
    if a.worker: return worker(a)
    c = Check(a)
    for name in ("predictions", "facts", "reality", "memory", "largest", "benchmark", "cpu_against_gpu", "same_values", "checkpoints", "side_by_side", "modes"):
        c.section(name, getattr(c, name))
        if a.out: write_json(a.out, {"device": str(c.device), "quick": c.quick, "models": c.models, "machine": machine(), "seconds": time.perf_counter() - c.start, "limit_s": LIMIT_S, "sections": c.result})
    failed = [k for k, v in c.result.items() if v.get("ok") is False]
    print(f"\n{len(c.result) - len(failed)} of {len(c.result)} sections without a failure in {time.perf_counter() - c.start:.0f} s" + (f"; look at {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__": sys.exit(main())
