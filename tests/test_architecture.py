"""The shape of the package as rules over its source: who imports whom, who may write what, what is too long.

Long because the rules and the faults that prove them stand side by side. Each rule is a function from
``Sources`` (module name to text) to faults, so that a test can plant a small fault in memory and see the
rule catch it. A new module needs a rank in ``RANKS``; docs/design.md has the picture.
"""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
Sources = Mapping[str, str]
Rule = Callable[[Sources], list[str]]

RANKS = {
    "errors": 0, "beam_params": 0, "token_logprobs": 0, "types": 0, "plain": 0, "config": 0, "sampling": 0,
    "histogram": 0, "namespace": 0, "urgency": 0,
    "kv.page_pool": 1, "kv.radix_tree": 1, "kv.null_tree": 1, "kv.page_table": 1, "kv.page_copy": 1,
    "kv.invariant": 1, "kv.slot_logprobs": 1, "kv.match": 1, "kv.explanation": 1, "kv.finding": 1,
    "kv.eviction_memory": 1, "kv.eviction_queue": 1,
    "kv.eviction_policy": 1, "kv.eviction_order": 1, "kv.events": 1, "kv.token_bytes": 1,
    "kv.pins": 1, "kv.tail_copy": 1, "kv.hold": 1, "kv.arguments": 1,
    "sequence": 2,
    "kv.manager": 3, "sched.policy": 3, "sched.batch": 3, "sched.batch_builder": 3,
    "sched.draws": 3, "sched.prefix_groups": 3, "sched.sampling_rows": 3, "sched.counters": 3,
    "sched.limits": 3, "sched.sharing": 3, "sched.waiting": 3,
    "sched.scheduler": 4, "sched.candidates": 4, "sched.admission": 4,
    "sched.forking": 4, "sched.beam_group": 4, "sched.live_request": 4, "sched.running": 4,
    "sched.sequence_outputs": 4, "sched.*": 3,
    "executor.base": 5, "executor.kv_store": 5, "executor.sampler": 5, "executor.attention.*": 5,
    "executor.*": 6,
    "adapters": 7,
    "engine": 7, "text": 7, "prompts": 7, "outputs": 7, "explain": 7, "interrupt": 7, "run": 7, "settings": 7,
    "turns": 7, "beam_job": 7,
    "detokenizer": 7, "stop_strings": 7, "byte_run": 7,
    "text_stream": 7, "answer": 7, "service": 7, "opening": 7, "jobs": 7,
    "mailbox": 7, "task_book": 7, "engine_thread": 7, "stream_task": 7, "job_task": 7, "generation": 7,
    "transcript": 7,
    "sample_answer": 7,
    "llm": 8, "async_llm": 8, "chat": 8, "async_chat": 8, "chat_stream": 8, "testing.*": 8, "bench.*": 8,
    "program.*": 9, "server.*": 9, "cli": 9, "__main__": 9,
    # A package's face re-exports its own folder; nobody inside imports from it.
    "kv": 4, "sched": 5, "executor.attention": 6, "executor": 7, "testing": 9, "bench": 9, "program": 9,
    "server": 9, "": 10,
}  # fmt: skip
"""Module, without the leading ``radixkv.``, to rank; the first pattern that fits counts."""

TORCH_PLACES = ("radixkv.executor.*", "radixkv.testing.*", "radixkv.bench.peer")
"""The last one is a benchmark's rival, not ours."""
TORCH_MODULES = ("torch", "transformers", "safetensors", "tokenizers", "huggingface_hub", "gguf", "peft")
RANKS_0_TO_4_MAY_IMPORT = ("numpy", "sortedcontainers")
POOL_VERBS = ("allocate", "incref", "decref")
POOL_CALLERS = ("radixkv.kv.manager", "radixkv.kv.page_pool", "radixkv.bench.micro_tree")
"""The last one measures pool and tree without a manager."""
MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
EXCUSE = "long because"
KNOWN_HOSTS = ("www.apache.org", "arxiv.org", "docs.python.org")
OUR_FOLDERS = ("radixkv", "tests", "examples", "bench", "docs")
TEXT_FILES = ("*.py", "*.md", "*.toml", "*.txt", "scripts/*", ".ci/*")


@functools.cache
def read_package() -> dict[str, str]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path.read_text(
            "utf-8"
        )
        for path in sorted((ROOT / "radixkv").rglob("*.py"))
    }


def rank_of(module: str) -> int | None:
    name = module.removeprefix("radixkv").removeprefix(".")
    for pattern, rank in RANKS.items():
        if name == pattern or (pattern and fnmatch(name, pattern)):
            return rank
    return None


def is_package(module: str, sources: Sources) -> bool:
    return any(other.startswith(module + ".") for other in sources)


def folder_of(module: str, sources: Sources) -> str:
    return module if is_package(module, sources) else module.rpartition(".")[0]


def top_folder(module: str) -> str:
    """``kv`` for ``radixkv.kv.manager``; empty for what lies directly in radixkv/."""
    parts = module.split(".")
    return parts[1] if len(parts) > 2 else ""


def walk_imports(module: str, sources: Sources) -> Iterator[tuple[str, int, bool]]:
    """``(module imported, line, needed at run time)``; names from a package resolve to its modules."""
    tree = ast.parse(sources[module])
    type_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = folder_of(module, sources).split(".")
                base = ".".join(parts[: len(parts) - node.level + 1] + ([base] if base else []))
            full = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in sources else base for name in full]
        for name in names:
            yield name, getattr(node, "lineno", 0), id(node) not in type_only


def own(name: str) -> bool:
    return name == "radixkv" or name.startswith("radixkv.")


def every_module_has_a_rank(sources: Sources) -> list[str]:
    return [
        f"{module}: no rank. Add it to RANKS in tests/test_architecture.py and to docs/design.md"
        for module in sources
        if rank_of(module) is None
    ]


def imports_point_down(sources: Sources) -> list[str]:
    faults = []
    for module in sources:
        rank = rank_of(module)
        for name, line, _ in walk_imports(module, sources):
            if not own(name):
                continue
            target = rank_of(name)
            if name not in sources:
                faults.append(f"{module}:{line} imports {name}, which does not exist")
            elif rank is not None and target is not None:
                same_folder = top_folder(module) == top_folder(name)
                if target > rank or (target == rank and not same_folder):
                    faults.append(
                        f"{module}:{line} (rank {rank}) imports {name} (rank {target}): only lower ranks, "
                        f"and its own folder up to its own rank"
                    )
    return faults


def no_import_cycles(sources: Sources) -> list[str]:
    needs = {
        module: {name for name, _, at_run_time in walk_imports(module, sources) if at_run_time and own(name)}
        for module in sources
        if not is_package(module, sources)
    }
    left = dict(needs)
    while True:
        free = [module for module, names in left.items() if not (names & left.keys())]
        if not free:
            break
        for module in free:
            del left[module]
    return [
        f"{module} is part of, or behind, an import cycle: {sorted(needs[module] & left.keys())}"
        for module in left
    ]


def heavy_imports_stay_in_their_folders(sources: Sources) -> list[str]:
    faults = []
    allowed = {*sys.stdlib_module_names, *RANKS_0_TO_4_MAY_IMPORT}
    for module in sources:
        rank = rank_of(module)
        for name, line, _ in walk_imports(module, sources):
            top = name.partition(".")[0]
            if top in TORCH_MODULES and not any(fnmatch(module, place) for place in TORCH_PLACES):
                faults.append(f"{module}:{line} imports {name}; only {', '.join(TORCH_PLACES)} may")
            elif rank is not None and rank <= 4 and not own(name) and top not in allowed:
                faults.append(
                    f"{module}:{line} imports {name}; ranks 0-4 may not (see RANKS_0_TO_4_MAY_IMPORT)"
                )
    return faults


def product_never_imports_testing_or_bench(sources: Sources) -> list[str]:
    return [
        f"{module}:{line} imports {name}; testing and bench are imported by no product module"
        for module in sources
        if not re.match(r"radixkv\.(testing|bench|cli)\b", module)
        for name, line, _ in walk_imports(module, sources)
        if re.match(r"radixkv\.(testing|bench)\b", name)
    ]


def walk_targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement writes to, tuples unpacked."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    while targets:
        target = targets.pop()
        if isinstance(target, ast.Tuple | ast.List):
            targets += target.elts
        else:
            yield target


def counts_are_written_in_the_pool(sources: Sources) -> list[str]:
    faults = []
    for module, text in sources.items():
        if module == "radixkv.kv.page_pool":
            continue
        for node in ast.walk(ast.parse(text)):
            for target in walk_targets(node):
                inner = target.value if isinstance(target, ast.Subscript) else target
                if isinstance(inner, ast.Attribute) and inner.attr == "ref_count":
                    faults.append(
                        f"{module}:{target.lineno} writes {ast.unparse(target)}; only page_pool.py may"
                    )
            private = isinstance(node, ast.Attribute) and node.attr in ("_count", "_ref_count")
            if private and ast.unparse(node) not in ("self._count", "self._ref_count"):
                faults.append(f"{module}: uses {ast.unparse(node)}; the pool has ref_count to read")
    return faults


def pool_verbs_are_called_in_the_manager(sources: Sources) -> list[str]:
    return [
        f"{module}:{node.lineno} calls {ast.unparse(node.func)}(); only kv/manager.py may"
        for module, text in sources.items()
        if module not in POOL_CALLERS
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in POOL_VERBS
    ]


def node_is_named_in_the_tree_only(sources: Sources) -> list[str]:
    faults = []
    for module, text in sources.items():
        if module == "radixkv.kv.radix_tree":
            continue
        for node in ast.walk(ast.parse(text)):
            names = [getattr(node, "id", None), getattr(node, "attr", None)]
            if isinstance(node, ast.ImportFrom):
                names += [alias.name for alias in node.names]
            if "Node" in names:
                faults.append(
                    f"{module}:{getattr(node, 'lineno', 0)} names Node; it never leaves radix_tree.py"
                )
    return faults


def no_module_level_state(sources: Sources) -> list[str]:
    faults = []
    for module, text in sources.items():
        tree = ast.parse(text)
        faults += [
            f"{module}:{n.lineno} has a global statement" for n in ast.walk(tree) if isinstance(n, ast.Global)
        ]
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(
                node.value, ast.List | ast.Dict | ast.Set
            ):
                for target in walk_targets(node):
                    name = ast.unparse(target)
                    if name != "__all__" and name.strip("_") != name.strip("_").upper():
                        faults.append(f"{module}:{node.lineno} {name} is mutable state of a module; "
                                      f"a constant table has an UPPER_CASE name")  # fmt: skip
    return faults


def nothing_is_long_without_an_excuse(sources: Sources) -> list[str]:
    faults = []
    for module, text in sources.items():
        tree = ast.parse(text)
        things: list[tuple[str, int, int, ast.Module | ast.FunctionDef | ast.AsyncFunctionDef]] = [
            (module, len(text.splitlines()), MAX_FILE_LINES, tree)
        ]
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                things.append((f"{module}:{node.lineno} {node.name}", length, MAX_FUNCTION_LINES, node))
        faults += [
            f"{name}: {length} lines, over {limit}; split it, or excuse it in its docstring: '{EXCUSE} ...'"
            for name, length, limit, node in things
            if length > limit and EXCUSE not in (ast.get_docstring(node) or "").lower()
        ]
    return faults


def no_text_of_one_machine(sources: Sources) -> list[str]:
    """Takes any text files, by name."""
    faults = []
    for name, text in sources.items():
        for number, line in enumerate(text.splitlines(), 1):
            if re.search(r"(?<![\w./~$}\"*-])/(home|root|work|opt|mnt|media|srv|Users|tmp)/\w", line):
                faults.append(f"{name}:{number} names a path of one machine: {line.strip()}")
            if re.search(r"\.\./shared\b", line) and name != ".ci/run":
                faults.append(f"{name}:{number} names a folder beside the repository; only .ci/run may")
            hosts = re.findall(r"https?://([^/\s\"'<>)`:]+)", line)
            faults += [f"{name}:{number} names the host {host}" for host in hosts if host not in KNOWN_HOSTS]
    return faults


RULES: tuple[Rule, ...] = (
    every_module_has_a_rank, imports_point_down, no_import_cycles, heavy_imports_stay_in_their_folders,
    product_never_imports_testing_or_bench, counts_are_written_in_the_pool,
    pool_verbs_are_called_in_the_manager, node_is_named_in_the_tree_only, no_module_level_state,
    nothing_is_long_without_an_excuse,
)  # fmt: skip


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package_keeps_the_rule(rule: Rule) -> None:
    faults = rule(read_package())
    assert not faults, "\n" + "\n".join(faults)


def test_tests_and_examples_are_not_long_without_an_excuse() -> None:
    paths = [
        path for folder in ("tests", "examples", "bench") for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    faults = nothing_is_long_without_an_excuse(
        {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in paths}
    )
    assert not faults, "\n" + "\n".join(faults)


def our_text_files() -> Iterator[Path]:
    """Environments, caches and build outputs are not looked into."""
    for folder in [ROOT, *(ROOT / name for name in OUR_FOLDERS)]:
        for pattern in TEXT_FILES:
            found = folder.glob(pattern) if folder == ROOT else folder.rglob(pattern)
            yield from (path for path in found if path.is_file() and path != Path(__file__).resolve())


def test_no_file_names_one_machine() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in our_text_files()}
    assert {"README.md", ".ci/run", "scripts/demo", "radixkv/kv/manager.py"} <= texts.keys()
    faults = no_text_of_one_machine(texts)
    assert not faults, "\n" + "\n".join(faults)


def test_the_picture_names_every_module() -> None:
    """So that docs/design.md cannot fall behind. The benchmarks are one line there."""
    picture = (ROOT / "docs" / "design.md").read_text("utf-8")
    sources = read_package()
    missing = [
        module
        for module in sources
        if not is_package(module, sources) and top_folder(module) != "bench"
        if f"{module.rpartition('.')[2]}.py" not in picture
    ]
    assert not missing, f"docs/design.md does not name {missing}"


def test_ranks_0_to_4_and_the_faces_load_no_torch() -> None:
    """One process imports them all, least first, and looks after each."""
    sources = read_package()
    modules = [m for m in sources if (rank := rank_of(m)) is not None and rank <= 4] + [
        "radixkv",
        "radixkv.kv",
    ]
    program = (
        "import importlib, sys\n"
        f"for module in {modules!r}:\n"
        "    importlib.import_module(module)\n"
        f"    heavy = [name for name in {TORCH_MODULES!r} if name in sys.modules]\n"
        "    if heavy: sys.exit(f'{module} loads {heavy}')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


CLEAN: Sources = {
    "radixkv": "",
    "radixkv.errors": "",
    "radixkv.sequence": "from radixkv.errors import E\n",
    "radixkv.kv": "",
    "radixkv.kv.page_pool": "",
    "radixkv.kv.radix_tree": "class Node: pass\n",
    "radixkv.kv.manager": "import numpy\nfrom radixkv.kv import page_pool\npool.incref(x)\n",
    "radixkv.sched": "",
    "radixkv.sched.scheduler": "from .policy import order\n",
    "radixkv.sched.policy": "import math\n",
    "radixkv.testing": "",
    "radixkv.testing.canary_store": "import torch\n",
}

FAULTS: tuple[tuple[Rule, str, str, str], ...] = (
    (every_module_has_a_rank, "radixkv.kv.new_thing", "", "no rank"),
    (imports_point_down, "radixkv.errors", "from radixkv.sequence import Sequence", "rank 0"),
    (imports_point_down, "radixkv.kv.page_pool", "import radixkv.kv.manager", "rank 1"),
    (imports_point_down, "radixkv.kv.manager", "def f():\n    from radixkv.sched import policy", "rank 3"),
    (imports_point_down, "radixkv.sched.policy", "from radixkv.kv import anything", "radixkv.kv (rank 4)"),
    (imports_point_down, "radixkv.sched.policy", "from ..sched.scheduler import x", "rank 4"),
    (imports_point_down, "radixkv.sched.policy", "import radixkv.nowhere", "does not exist"),
    (no_import_cycles, "radixkv.sched.policy", "from radixkv.sched.scheduler import x", "cycle"),
    (heavy_imports_stay_in_their_folders, "radixkv.kv.manager", "def f():\n    import torch.nn", "torch.nn"),
    (heavy_imports_stay_in_their_folders, "radixkv.sched.policy", "import tqdm", "ranks 0-4 may not"),
    (product_never_imports_testing_or_bench, "radixkv.sequence", "import radixkv.testing", "testing"),
    (counts_are_written_in_the_pool, "radixkv.kv.manager", "pool.ref_count[ids] += 1", "pool.ref_count[ids]"),
    (counts_are_written_in_the_pool, "radixkv.kv.manager", "a, pool.ref_count = 1, 2", "pool.ref_count"),
    (counts_are_written_in_the_pool, "radixkv.kv.manager", "self.pool._count[3] = 0", "self.pool._count"),
    (pool_verbs_are_called_in_the_manager, "radixkv.sched.policy", "kv.pool.decref(ids)", "kv.pool.decref"),
    (node_is_named_in_the_tree_only, "radixkv.kv.manager", "from radixkv.kv.radix_tree import Node", "Node"),
    (node_is_named_in_the_tree_only, "radixkv.kv.manager", "def f(n: radix_tree.Node): ...", "Node"),
    (no_module_level_state, "radixkv.sequence", "cache = {}", "cache"),
    (no_module_level_state, "radixkv.sequence", "def f():\n    global x\n    x = 1", "global"),
    (nothing_is_long_without_an_excuse, "radixkv.errors", "x = 1\n" * 401, "401 lines"),
    (nothing_is_long_without_an_excuse, "radixkv.errors", "def f():\n" + "    x = 1\n" * 60, "61 lines"),
    (no_text_of_one_machine, "README.md", "see /ho" + "me/me/data", "path of one machine"),
    (no_text_of_one_machine, "README.md", "in ../sha" + "red/data", "beside the repository"),
    (no_text_of_one_machine, "README.md", "from http://10.0.0.1:80/simple", "10.0.0.1"),
)  # fmt: skip


@pytest.mark.parametrize(("rule", "module", "text", "message"), FAULTS)
def test_each_rule_catches_its_fault(rule: Rule, module: str, text: str, message: str) -> None:
    assert rule(CLEAN) == []
    faults = rule({**CLEAN, module: text})
    assert faults and message in "\n".join(faults)


def test_an_excuse_excuses() -> None:
    text = f'"""{EXCUSE} it is a table."""\n' + "x = 1\n" * 401
    assert nothing_is_long_without_an_excuse({"radixkv.errors": text}) == []
