"""bench/attention_probe.py: what it times is what it says; its times are not tested here."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from radixkv.bench import attention_probe
from radixkv.errors import ConfigError
from radixkv.executor.attention_timing import AttentionTiming, TimedStep

SMALL = replace(attention_probe.SPEC, num_layers=2, num_query_heads=2, num_kv_heads=1, head_dim=8)


@pytest.mark.parametrize("attention", ["cpu", "reference"])
def test_every_step_that_is_asked_for_is_in_the_table_and_in_the_file(
    attention: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_probe, "SPEC", SMALL)
    file = tmp_path / "out.json"
    asked = ["--only", "decode 32", "--repeats", "1", "--attention", attention, "--json", str(file)]
    assert attention_probe.main(asked) == 0
    times = json.loads(file.read_text(encoding="utf-8"))
    assert list(times) == [
        "decode 32, shared 1,104",
        "decode 32, nothing shared",
        "decode 32, nothing shared, scattered",
    ]
    printed = capsys.readouterr().out.splitlines()
    assert [line[:40].strip() for line in printed[1:]] == list(times)
    for took in times.values():
        assert took["run_ms"] > 0 and took["matmul_ms"] > 0
        assert (took["num_pieces"] > 0) == (attention == "cpu")  # the other has none


def test_without_repeats_there_is_no_best(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        attention_probe.main(["--repeats", "0"])
    assert "at least 1, got 0" in capsys.readouterr().err


def test_the_step_is_a_batch_of_shared_and_own_pages() -> None:
    timing = AttentionTiming(SMALL, num_pages=40, page_size=4, attention="cpu")
    step = TimedStep("", 16, ((6, 6), (100, 2), (9, 1)), False)
    batch = timing._batch(step)
    assert batch.seq_lens.tolist() == [22, 116, 25]
    assert (batch.query_indptr[1:] - batch.query_indptr[:-1]).tolist() == [6, 2, 1]
    (group,) = batch.prefix_groups
    assert (group.first_seq, group.num_seqs, group.num_pages) == (0, 3, 4)
    assert batch.page_indices[:6].tolist() == [0, 1, 2, 3, 4, 5]
    scattered = timing._batch(replace(step, scattered=True, num_shared=0))
    assert scattered.prefix_groups == ()
    assert sorted(scattered.page_indices.tolist()) != scattered.page_indices.tolist()


def test_the_products_are_those_of_the_step() -> None:
    """Two for each part: the shared pages, the decodes together, each chunk by blocks of rows."""
    timing = AttentionTiming(SMALL, num_pages=40, page_size=4, attention="cpu")
    step = TimedStep("", 16, ((300, 300), (9, 1), (5, 1)), False)
    shapes = [tuple(product().shape) for product in timing._products(step)]
    assert shapes == [
        (1, 604, 16), (1, 604, 8),
        (2, 2, 7), (2, 2, 8),
        (1, 512, 256), (1, 512, 8),
        (1, 88, 300), (1, 88, 8),
    ]  # fmt: skip


def test_an_attention_that_nobody_has_is_refused() -> None:
    timing = AttentionTiming(SMALL, num_pages=40, page_size=4, attention="none")
    with pytest.raises(ConfigError, match="one of cpu, reference, got 'none'"):
        timing.measure(TimedStep("", 0, ((6, 6),), False), 1)
