"""Which tests stand for which module, and which changes change nothing."""

from __future__ import annotations

_LEDGER = ["kv/test_manager.py", "kv/test_machine.py"]
PLAN: dict[str, list[str]] = {
    "kv/page_pool": ["kv/test_page_pool.py", "regress/test_sizes_nobody_has.py"],
    "kv/page_table": ["kv/test_page_table.py"],
    "kv/hold": _LEDGER,
    "kv/tail_copy": _LEDGER,
    "kv/pins": [
        "kv/test_manager.py",
        "kv/test_scenarios_accounting.py",
        "regress/test_unpin_of_anothers_receipt.py",
    ],
    "kv/arguments": ["kv/test_manager.py", "kv/test_radix_tree.py", "regress/test_ledger_took_anything.py"],
    "kv/eviction_memory": ["kv/test_radix_tree.py", "kv/test_scenarios_accounting.py", "kv/test_machine.py"],
    "sched/limits": ["sched/test_limits.py", "sched/test_scheduler.py"],
    "sched/draws": ["sched/test_draws.py", "sched/test_scheduler.py", "test_engine.py"],
    "sched/prefix_groups": ["sched/test_prefix_groups.py"],
    "sched/sampling_rows": ["sched/test_sampling_rows.py"],
    "sched/batch_builder": ["sched/test_batch_builder.py", "sched/test_scheduler.py"],
    "sched/sharing": ["sched/test_sharing.py", "test_scenarios_engine_fairness.py"],
    "sched/waiting": ["sched/test_policy.py", "sched/test_scheduler.py", "test_scenarios_engine_fairness.py"],
    "sched/candidates": [
        "sched/test_policy.py",
        "sched/test_scheduler.py",
        "test_scenarios_engine_fairness.py",
    ],
}
"""Module to test files, quickest first."""

EQUIVALENT: set[tuple[str, str, str]] = {
    ("kv/page_pool", "BYTES_PER_PAGE = 12", "12 -> 13"),
    ("kv/page_pool", "self._stack = np.arange(number - 1, -1, -1, dtype=np.int32)", "1 -> 2"),
    ("kv/page_pool", "if len(pages):", "if True"),
    ("kv/page_pool", "if len(pages) == 0:", "if False"),
    ("kv/page_pool", "if len(freed):", "if True"),
    ("kv/page_pool", "if len(pages) > 1:", "if True"),
    ("kv/page_pool", "if len(pages) > 1:", "Gt -> GtE"),
}
"""``(module, line, change)`` that cannot be told from the original: not counted. docs/mutants.md says why."""
