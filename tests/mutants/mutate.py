"""Mutation testing of kv/ and sched/: each mutant is one small change of one module; its tests must notice.

    python tests/mutants/mutate.py kv/page_pool kv/pins     these modules; all of PLAN without names
    python tests/mutants/mutate.py --json out.json          and write down who survived

A driver of its own, because mutmut and cosmic-ray start the tests anew, imports included, for each mutant:
a day instead of an hour here. This one forks a process that has the third-party modules loaded, gives it the
mutated source through an import hook, and runs that module's test files (``PLAN``) up to the first failure,
under a time limit. Nothing is written to the sources.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.machinery
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType

from mutant_plan import EQUIVALENT, PLAN

ROOT = Path(__file__).parents[2]
LIMIT_S = 60
_COMPARE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_BINARY: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """What may stand in the place of ``node``, each with a word for it."""
    if isinstance(node, ast.Compare):
        for place, op in enumerate(node.ops):
            if (other := _COMPARE.get(type(op))) is not None:
                changed = copy.deepcopy(node)
                changed.ops[place] = other()
                yield f"{type(op).__name__} -> {other.__name__}", changed
    elif isinstance(node, ast.BoolOp):
        changed_bool = copy.deepcopy(node)
        changed_bool.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield "and <-> or", changed_bool
    elif isinstance(node, (ast.BinOp, ast.AugAssign)):
        if (binary := _BINARY.get(type(node.op))) is not None and not _is_text(node):
            changed_binary = copy.deepcopy(node)
            changed_binary.op = binary()
            yield f"{type(node.op).__name__} -> {binary.__name__}", changed_binary
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
        yield f"without {type(node.op).__name__}", copy.deepcopy(node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield f"{node.value} -> {not node.value}", ast.Constant(not node.value)
        elif isinstance(node.value, (int, float)):
            yield f"{node.value} -> {node.value + 1}", ast.Constant(node.value + 1)
    elif isinstance(node, ast.If):
        for value in (True, False):
            changed_if = copy.deepcopy(node)
            changed_if.test = ast.Constant(value)
            yield f"if {value}", changed_if
    elif isinstance(node, ast.Return) and node.value is not None:
        yield "return None", ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call dropped", ast.Pass()
    elif isinstance(node, ast.Break):
        yield "break -> continue", ast.Continue()
    elif isinstance(node, ast.Continue):
        yield "continue -> break", ast.Break()


def _is_text(node: ast.BinOp | ast.AugAssign) -> bool:
    return any(isinstance(child, ast.JoinedStr) for child in ast.walk(node))


class _Replace(ast.NodeTransformer):
    def __init__(self, target: ast.AST, new: ast.AST) -> None:
        self._target, self._new = target, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self._new, node) if node is self._target else self.generic_visit(node)


def _sites(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes that run: no annotations, no messages of errors and of invariants, no ``TYPE_CHECKING``."""
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop()
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "exc") or isinstance(node, ast.JoinedStr):
                continue
            values: list[object] = value if isinstance(value, list) else [value]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
                values = values[:1] if name == "args" else []
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Constant) and name == "target":
                continue
            todo += [child for child in values if isinstance(child, ast.AST)]


def mutants(source: str) -> Iterator[tuple[int, str, CodeType]]:
    """Line, what is changed, and the module's code with that change."""
    tree = ast.parse(source)
    sites = sorted(
        (node for node in _sites(tree) if isinstance(node, (ast.stmt, ast.expr))),
        key=lambda node: (node.lineno, node.col_offset),
    )
    for site in sites:
        for word, new in _changes(site):
            memo: dict[int, object] = {}
            changed = copy.deepcopy(tree, memo)
            target = memo[id(site)]
            assert isinstance(target, ast.AST)
            whole = _Replace(target, new).visit(changed)
            assert isinstance(whole, ast.Module)
            ast.fix_missing_locations(whole)
            yield site.lineno, word, compile(whole, "<mutant>", "exec")


class _Loader(importlib.abc.Loader):
    def __init__(self, code: CodeType) -> None:
        self._code = code

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


class _Finder(importlib.abc.MetaPathFinder):
    """Gives the mutated code for one module, and nothing for the others."""

    def __init__(self, name: str, code: CodeType) -> None:
        self._name, self._code = name, code

    def find_spec(
        self, fullname: str, path: object, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        return importlib.machinery.ModuleSpec(fullname, _Loader(self._code))


def is_noticed(module: str, code: CodeType | None, tests: Sequence[str]) -> bool:
    """Whether the tests fail, or take too long, with ``code`` in the place of ``module``."""
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        import pytest

        if code is not None:
            sys.meta_path.insert(0, _Finder(f"radixkv.{module.replace('/', '.')}", code))
        options = ["-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--no-header"]
        os._exit(int(pytest.main([*options, *(str(ROOT / "tests" / test) for test in tests)])) != 0)
    _, status = os.waitpid(child, 0)
    return status != 0


def run(module: str, tests: Sequence[str]) -> tuple[int, list[tuple[int, str]]]:
    """How many mutants there are, and the line and the change of those that nobody noticed."""
    path = ROOT / "radixkv" / f"{module}.py"
    if is_noticed(module, None, tests):
        raise SystemExit(f"the tests of {module} fail without any change")
    survivors: list[tuple[int, str]] = []
    num_mutants = 0
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for line, word, code in mutants(source):
        if (module, lines[line - 1].strip(), word) in EQUIVALENT:
            continue
        num_mutants += 1
        if not is_noticed(module, code, tests):
            survivors.append((line, word))
            print(f"  {module}.py:{line}: {word}: {lines[line - 1].strip()}", flush=True)
    return num_mutants, survivors


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="mutate", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="kv/NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
    import hypothesis  # noqa: F401  loaded once, for all children
    import numpy  # noqa: F401
    import pytest  # noqa: F401
    import sortedcontainers  # noqa: F401

    results: dict[str, object] = {}
    total = killed = 0
    for module in args.modules or PLAN:
        begin = time.monotonic()
        num, survivors = run(module, PLAN[module])
        total, killed = total + num, killed + num - len(survivors)
        share = 100 * (num - len(survivors)) / max(num, 1)
        seconds = time.monotonic() - begin
        print(
            f"{module}: {num - len(survivors)} of {num} noticed, {share:.1f} %, {seconds:.0f} s", flush=True
        )
        results[module] = {"mutants": num, "survivors": survivors}
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"all: {killed} of {total} noticed, {100 * killed / max(total, 1):.1f} %")
    return 0


if __name__ == "__main__":
    sys.exit(main())
