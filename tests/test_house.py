"""The house itself: doors that open one way, notebooks and package in step, stages that know what they depend on."""
import ast, difflib, json, re, sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "foxhunt"
ROOMS = ["core", "params", "data", "market", "models", "hardware", "train", "evaluate", "bench", "deploy", "peers", "report", "cli"]
COMPUTE = {"core", "params", "market", "models", "hardware", "train", "bench"}
COMPUTE_TOO = {"foxhunt.data.windows", "foxhunt.data.book"}          # tables of arrays that trainers receive
ADAPTERS = {"foxhunt.market.gym"}                                     # imports gymnasium, and nothing imports it
LIGHT = {"torch", "numpy", "safetensors", "tqdm", "foxhunt"}
NOTEBOOKS = sorted(p for p in (ROOT / "nbs").rglob("*.ipynb") if ".ipynb_checkpoints" not in p.parts)
MODULES = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in sorted(PACKAGE.rglob("*.py")) if p.name not in ("__init__.py", "_modidx.py")}


def room(module: str) -> str: return module.split(".")[1]


def imports(tree: ast.AST, module: str, lazy: bool) -> set[str]:
    "Modules that `tree` imports: everywhere when `lazy`, else only what runs at import time."
    found, package = set(), module.split(".")[:-1]
    def visit(node, inside):
        if isinstance(node, ast.Import) and (lazy or not inside): found.update(a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and (lazy or not inside):
            base = ".".join([*package[: len(package) - node.level + 1], *([node.module] if node.module else [])]) if node.level else node.module
            for a in node.names: found.add(f"{base}.{a.name}" if f"{base}.{a.name}" in MODULES else base)
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING": return     # for readers and editors only
        for child in ast.iter_child_nodes(node): visit(child, inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))
    visit(tree, False)
    return found


TREES = {m: ast.parse(p.read_text()) for m, p in MODULES.items()}
EAGER = {m: imports(t, m, lazy=False) for m, t in TREES.items()}
ALL = {m: imports(t, m, lazy=True) for m, t in TREES.items()}


@pytest.mark.parametrize("module", MODULES)
def test_doors_open_one_way(module):
    for other in (o for o in ALL[module] if o in MODULES):
        assert ROOMS.index(room(other)) <= ROOMS.index(room(module)), f"{module} reaches back into {other}"
        assert room(other) != "peers" or room(module) in ("peers", "cli"), f"{module} needs the peers extra"


def closure(module: str, edges: dict[str, set[str]]) -> set[str]:
    seen, todo = set(), [module]
    while todo:
        m = todo.pop()
        if m in seen: continue
        seen.add(m); todo += [o for o in edges.get(m, ()) if o in MODULES]
    return seen


@pytest.mark.parametrize("module", [m for m in MODULES if (room(m) in COMPUTE or m in COMPUTE_TOO) and m not in ADAPTERS])
def test_compute_rooms_run_on_a_bare_gpu_machine(module):
    for m in closure(module, EAGER):
        heavy = {o.split(".")[0] for o in EAGER[m]} - LIGHT - set(sys.stdlib_module_names)
        assert not heavy, f"{module} -> {m} imports {sorted(heavy)} at import time"


def test_packages_import_nothing():
    for p in PACKAGE.rglob("__init__.py"):
        assert not re.search(r"^\s*(import|from)\s", p.read_text(), re.M), p


def test_every_module_has_a_notebook_and_equals_its_export(tmp_path):
    from nbdev.export import nb_export
    for nb in NOTEBOOKS: nb_export(nb, lib_path=tmp_path / "foxhunt")
    fresh = {p.relative_to(tmp_path): p for p in tmp_path.rglob("*.py") if p.name != "__init__.py"}
    kept = {p.relative_to(ROOT): p for p in MODULES.values()}
    assert not kept.keys() - fresh.keys(), f"modules without a notebook: {sorted(map(str, kept.keys() - fresh.keys()))}"
    assert not fresh.keys() - kept.keys(), f"notebooks never exported: {sorted(map(str, fresh.keys() - kept.keys()))}; run make export"
    body = lambda text: re.sub(r"(File to edit: |# %% )\S+", r"\1", text)     # the path depends on where the export went
    for name, p in fresh.items():
        diff = list(difflib.unified_diff(body(kept[name].read_text()).splitlines(), body(p.read_text()).splitlines(), "package", "notebook", lineterm="", n=0))
        assert not diff, f"{name} differs from its notebook; run make export\n" + "\n".join(diff[:20])


@pytest.mark.parametrize("nb", NOTEBOOKS, ids=lambda p: str(p.relative_to(ROOT / "nbs")))
def test_notebooks_are_clean_and_open_with_a_contract(nb):
    book = json.loads(nb.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) >= (4, 5) and all(c.get("id") for c in book["cells"]), "cells need ids (nbformat 4.5)"
    assert all(c.get("execution_count") is None for c in book["cells"] if c["cell_type"] == "code"), "run make export"
    assert all(set(c["metadata"]) <= {"tags"} for c in book["cells"]), "run make export"
    sources = ["".join(c["source"]) for c in book["cells"]]
    if any(re.search(r"^#\|\s*default_exp", s, re.M) for s in sources):
        assert re.match(r"# .+\n+> .+", sources[0]), "open with a title and a one-line contract"
    assert not any("#| export" in s and '__name__ == "__main__"' in s for s in sources)
    outputs = [o for c in book["cells"] for o in c.get("outputs", [])]
    assert not any(o.get("output_type") == "error" for o in outputs), "an output is a traceback"
    said = "".join("".join(o.get("text", [])) + "".join(o.get("data", {}).get("text/plain", [])) for o in outputs)
    assert not re.search(r"\d+%\|", said), "an output is a progress bar that stands still"
    assert not re.search(r"/tmp/|ipykernel_", said), "an output names a place on one machine"


@pytest.mark.parametrize("module", MODULES)
def test_public_names_have_docstrings(module):
    "What a module offers says what it is; methods may leave it to their class."
    body = TREES[module].body
    public = next((ast.literal_eval(n.value) for n in body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"), [])
    bare = [n.name for n in body if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and n.name in public and not ast.get_docstring(n)]
    assert not bare, f"{module}: no docstring on {', '.join(bare)}"


def test_the_project_stands_alone():
    for p in [*PACKAGE.rglob("*.py"), *NOTEBOOKS, *(ROOT / "tests").rglob("*.py"), ROOT / "Makefile", ROOT / "README.md", ROOT / "dvc.yaml"]:
        if p not in (Path(__file__), ROOT / "tests" / "_realdata.py"): assert not re.search(r"/work/|/\.library|[\"']shared[\"']|shared/(notes|cases|data|seeds|golden|DESIGN)", p.read_text()), f"{p} names a folder of one machine"


# --- stages and what they depend on ---

def verbs() -> dict[str, set[str]]:
    "Each verb of the command line to the modules that it can reach; the registry's models are chosen by name."
    tree = TREES["foxhunt.cli"]; functions = {n.name: n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    def reach(name, seen):
        found = {o for o in imports(functions[name], "foxhunt.cli", lazy=True) if o in MODULES}
        for call in (n.func.id for n in ast.walk(functions[name]) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
            if call in functions and call not in seen: found |= reach(call, seen | {call})
        return found
    return {name: reach(name, {name}) for name in functions}


def stages():
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe")
    for file in ("dvc.yaml", "bench/dvc.yaml"):
        if not (ROOT / file).exists(): continue
        for name, stage in yaml.load((ROOT / file).read_text())["stages"].items():
            if "foreach" in stage:
                items = stage["foreach"]; items = {i: i for i in items} if isinstance(items, list) else items      # a list's items are their own keys
                for key, item in items.items(): yield file, f"{name}@{key}", stage["do"], key, item
            elif "matrix" in stage: yield file, name, stage, None, None
            else: yield file, name, stage, None, None


def expand(text: str, key, item) -> str:
    text = text.replace("${key}", str(key)).replace("${item}", str(item))
    return re.sub(r"\$\{item\.(\w+)\}", lambda m: str(item[m[1]]), text) if isinstance(item, dict) else text


# what a verb imports only for models of another kind, or only when asked to
NOT_FOR = {"agent": {"foxhunt.data.book", "foxhunt.evaluate.forecast", "foxhunt.train.forecast"}, "forecaster": {"foxhunt.data.book", "foxhunt.evaluate.backtest"}, "book": {"foxhunt.evaluate.backtest"}}
ONLY_WITH = {"--monitor": {"foxhunt.hardware.monitor"}}


TIMELESS = {"epochs", "lr", "gamma", "checkpoint_every", "horizon", "smooth"}     # parameters that do not change how long an epoch takes


def test_benchmarks_depend_on_every_size_and_on_no_learning_rate():
    yaml = pytest.importorskip("ruamel.yaml").YAML(typ="safe")
    train = yaml.load((ROOT / "params.yaml").read_text())["train"]
    bench = yaml.load((ROOT / "dvc.yaml").read_text())["stages"]["bench"]
    for name, item in bench["foreach"].items():
        names = {expand(p, name, item) for p in bench["do"]["params"]}
        assert {p for p in names if p.startswith("train.")} == {f"train.{name}.{k}" for k in train[name].keys() - TIMELESS}, name


def test_stages_whose_notebook_loads_parameters_name_them():
    "Else a changed parameter leaves an executed report `up to date`."
    for file, name, stage, *_ in stages():
        notebooks = re.findall(r"nbs/reports/\w+\.ipynb", str(stage["cmd"]))
        if any("params.load(" in (ROOT / n).read_text() for n in notebooks): assert any("train." in p for p in stage.get("params", [])), f"{file} {name}: it loads params.yaml, and names no parameter"


def test_stages_depend_on_the_modules_they_use():
    if not (ROOT / "dvc.yaml").exists() or "foxhunt.cli" not in MODULES: pytest.skip("no pipeline yet")
    from foxhunt.train.registry import MODELS, spec
    MODULES_OF = {m: [o for o in spec(m).modules if room(o) in ("models", "train")] for m in MODELS}
    chooses = {"foxhunt.train.registry", "foxhunt.train.forecast"}     # they import a model by its name, when asked for it
    per_model, reached, missing = {m for ms in MODULES_OF.values() for m in ms}, verbs(), []
    for file, name, stage, key, item in stages():
        commands = stage["cmd"] if isinstance(stage["cmd"], list) else [stage["cmd"]]
        deps = {expand(d if isinstance(d, str) else next(iter(d)), key, item).removeprefix("../") for d in stage.get("deps", [])}
        for command in (expand(c, key, item) for c in commands):
            m = re.search(r"\bfoxhunt ([a-z]+)(?: ([a-z0-9]+))?", command)
            if not m: continue
            assert m[1] in reached, f"{name}: foxhunt has no verb {m[1]}"
            if m[1] == "report":     # papermill runs the notebook: what it imports itself decides, the executor does not
                source = "".join("".join(c["source"]) + "\n" for c in json.loads((ROOT / command.split()[2]).read_text())["cells"] if c["cell_type"] == "code")
                named = {f"foxhunt.{x}" for x in re.findall(r"^(?:from|import) foxhunt\.([\w.]+)", source, re.M)} | {f"foxhunt.{x.strip()}" for line in re.findall(r"^from foxhunt import (.+)", source, re.M) for x in line.split(",")}
                need = set(named)
                if "run_benchmark" in source or "bench_model" in source: need |= {c for x in (*named, *MODULES_OF.get(key, ())) for c in closure(x, EAGER)}     # it trains: all that sets its time
                missing += [f"{file} {name}: {MODULES[x].relative_to(ROOT)}" for x in need - {"foxhunt.core"} if str(MODULES[x].relative_to(ROOT)) not in deps]
                continue
            need, roots = set(), set(reached[m[1]])
            for flag, modules in ONLY_WITH.items(): roots -= set() if flag in command else modules
            if m[2] in MODELS: roots -= NOT_FOR[spec(m[2]).kind]
            edges = ALL | {k: EAGER[k] for k in chooses | ({"foxhunt.data.book"} if m[1] in ("train", "evaluate") else set())}     # they load a book, they do not make one
            for module in roots: need |= closure(module, edges)
            if m[2] in MODULES_OF: need = (need - (per_model - set(MODULES_OF[m[2]]))) | {c for mm in MODULES_OF[m[2]] for c in closure(mm, edges)}
            if m[1] in ("audit", "bench", "budget", "readiness"): need |= {c for mm in per_model for c in closure(mm, edges)}     # they go through all models
            for module in need - {"foxhunt.cli"}:
                path = str(MODULES[module].relative_to(ROOT))
                if path not in deps and not any(path.startswith(d.rstrip("/") + "/") for d in deps): missing.append(f"{file} {name}: {path}")
    assert not missing, "deps lack modules that the verb uses:\n" + "\n".join(sorted(missing))


def test_readme_tells_the_result_that_is_committed():
    text = (ROOT / "README.md").read_text().replace("\u2212", "-")
    for name, label in (("dqn", "DQN"), ("ppo", "PPO")):
        m = json.loads((ROOT / "metrics" / f"{name}.json").read_text())
        assert f"{label} {m['net']:+,.0f}" in text, f"README: {label} earned {m['net']:+,.0f} in metrics/{name}.json"
        interval = f"{m['sharpe_low']:.1f} to {m['sharpe_high']:.1f})"
        assert text.split(f"{label} {m['net']:+,.0f} (")[1].split(", ")[0].endswith(interval), f"README: {label}'s Sharpe interval is {interval} in metrics/{name}.json"
    assert f"throughout {m['long']:+,.0f}" in text and f"oracle {m['oracle']:,.0f}" in text
