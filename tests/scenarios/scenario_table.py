"""docs/scenarios.md from the tests themselves.

python tests/scenarios/scenario_table.py    writes it anew
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from scenario_list import SCENARIOS, WAITING

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "scenarios.md"
_NAME = re.compile(r"test_(b\d+b?)_")
_HEAD = """# Scenarios

A hundred situations that have broken systems of this kind. Each has a test that carries its number
(`test_b048_...`) and was seen failing against a fault planted by hand, or stands here with the reason why it
waits. Where size matters a test runs at pages of 1, 4, 16 and 64 tokens.

Written by `python tests/scenarios/scenario_table.py` from the tests' docstrings; a test compares.
"""


@dataclass(frozen=True)
class ScenarioTest:
    """A test that carries a scenario's number."""

    scenario: str
    name: str
    file: str
    fault: str
    """What its docstring says behind ``Fault seen:``; empty where it says nothing."""


def scenario_tests() -> Iterator[ScenarioTest]:
    """All of them, by file and line."""
    ids = {name.lower(): name for name in SCENARIOS}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        file = str(path.relative_to(ROOT / "tests"))
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            if found := _NAME.match(node.name):
                fault = _fault(ast.get_docstring(node) or "") or _fault(_comments(source, node))
                yield ScenarioTest(ids.get(found[1], found[1]), node.name, file, fault)


def _comments(source: str, node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    lines = source.splitlines()[node.lineno : node.end_lineno]
    return "\n".join(line.strip().lstrip("# ") for line in lines if line.strip().startswith("#"))


def _fault(text: str) -> str:
    found = re.search(r"Faults? seen:((.|\n(?!\n))*)", text)
    return " ".join(found[1].split()).rstrip(".") if found else ""


def document() -> str:
    """The whole text."""
    tests: dict[str, list[ScenarioTest]] = {}
    for test in scenario_tests():
        tests.setdefault(test.scenario, []).append(test)
    num_waiting = sum(name not in tests for name in SCENARIOS)
    lines = [_HEAD, f"{len(SCENARIOS) - num_waiting} of {len(SCENARIOS)} are tested, {num_waiting} wait."]
    part = ""
    for name, (its_part, content) in SCENARIOS.items():
        if its_part != part:
            part = its_part
            lines += ["", f"## {part}", "", "| | what happens | tests and the faults seen |", "|---|---|---|"]
        lines.append(f"| {name} | {content} | {_cell(tests.get(name, []), name)} |")
    return "\n".join(lines) + "\n"


def _cell(tests: list[ScenarioTest], name: str) -> str:
    if not tests:
        return f"waits: {WAITING.get(name, '')}"
    entries: list[str] = []
    for test in tests:
        fault = test.fault.replace("|", "\\|")
        entries.append(f"`{test.name}` ({test.file}): {fault}")
    return "<br>".join(entries)


def main() -> None:
    DOCUMENT.write_text(document(), encoding="utf-8")


if __name__ == "__main__":
    main()
