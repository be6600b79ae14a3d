"""Short words for the scenarios: whole requests on a LedgerMachine, which checks everything on the way."""

from __future__ import annotations

import numpy as np
from ledger_model import Row
from machine import LedgerMachine

from radixkv.types import Namespace, TokenIds

PAGE_SIZES = (1, 4, 16, 64)
FIRST_OUTPUT = 5000
"""Sampled tokens are 5000, 5001 and so on; prompts stay below."""


def run_of(start: int, num_tokens: int) -> TokenIds:
    """``num_tokens`` ids counting up from ``start``."""
    return np.arange(start, start + num_tokens, dtype=np.int32)


def joined(*parts: TokenIds) -> TokenIds:
    return np.concatenate(parts).astype(np.int32)


def go_on(machine: LedgerMachine, row: Row, num_output: int, chunk: int | None = None) -> None:
    """Steps of one row alone until it has ``num_output`` tokens; the last of them is not computed."""
    while row.seq.num_output < num_output:
        left = row.seq.num_tokens - row.seq.num_computed
        assert machine.reserve(row, min(left, chunk or left)), "out of pages"
        machine.forward([FIRST_OUTPUT + row.seq.num_output])


def serve(
    machine: LedgerMachine,
    prompt: TokenIds,
    num_output: int = 1,
    *,
    chunk: int | None = None,
    namespace: Namespace = (),
) -> Row:
    """Admit a prompt and run it until it has ``num_output`` tokens. It stays: release it."""
    row = machine.start(prompt, namespace)
    go_on(machine, row, num_output, chunk)
    return row


def serve_whole(
    machine: LedgerMachine, prompt: TokenIds, num_output: int = 1, *, namespace: Namespace = ()
) -> int:
    """``serve`` and finish; returns how many tokens of the prompt were cached."""
    row = serve(machine, prompt, num_output, namespace=namespace)
    machine.release(row)
    assert row.seq.num_cached is not None
    return row.seq.num_cached


def num_idle(machine: LedgerMachine) -> int:
    return int(machine.kv.stats()["num_pages_idle"])


def num_free(machine: LedgerMachine) -> int:
    return int(machine.kv.stats()["num_pages_free"])


def pages_for(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size)
