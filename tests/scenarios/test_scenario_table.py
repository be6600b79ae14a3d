"""The table of scenarios is whole and up to date."""

from __future__ import annotations

from scenario_list import SCENARIOS, WAITING
from scenario_table import DOCUMENT, document, scenario_tests


def test_each_scenario_has_a_test_or_a_reason() -> None:
    tested = {test.scenario for test in scenario_tests()}
    assert tested <= SCENARIOS.keys(), f"no scenario has the number of {tested - SCENARIOS.keys()}"
    assert len(SCENARIOS) == 100
    left = {name for name in SCENARIOS if name not in tested}
    assert left == WAITING.keys(), f"without test and reason, or with both: {left ^ WAITING.keys()}"
    assert all(WAITING.values())


def test_each_scenario_test_says_which_fault_it_noticed() -> None:
    silent = [f"{test.file}::{test.name}" for test in scenario_tests() if not test.fault]
    assert not silent


def test_the_document_is_up_to_date() -> None:
    same = DOCUMENT.read_text(encoding="utf-8") == document()
    assert same, "run python tests/scenarios/scenario_table.py"
