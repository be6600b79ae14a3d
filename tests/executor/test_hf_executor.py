"""HFExecutor: which rows get logits, what comes back, what is shared, what is counted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from paged_runs import plain_logits

from radixkv.errors import ConfigError, NonFiniteLogitsError, UnsupportedModelError
from radixkv.executor import hf
from radixkv.executor.base import ModelExecutor
from radixkv.executor.hf import HFExecutor
from radixkv.executor.hook import HOOK_NAME, plain_attention, use_paged_attention
from radixkv.executor.load_check import TOLERANCE
from radixkv.executor.loaded_model import LoadedModel, spec_from_config
from radixkv.executor.packed import PackedLinear, TimedLinear
from radixkv.executor.probe_batch import ProbeSeq, probe_batch
from radixkv.testing.tiny_models import FAMILIES, VOCAB_SIZE, tiny_model
from radixkv.types import TokenIds

PAGE_SIZE = 8


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama")


def make(loaded: LoadedModel, **options: object) -> HFExecutor:
    settings = {"num_pages": 20, "page_size": PAGE_SIZE, "attention": "reference", **options}
    return HFExecutor(loaded, **settings)  # type: ignore[arg-type]


def prompt(seed: int, length: int) -> TokenIds:
    return np.random.default_rng(seed).integers(0, VOCAB_SIZE, length).astype(np.int32)


def two_seqs(score: tuple[int, ...] = ()) -> list[ProbeSeq]:
    return [
        ProbeSeq(70, prompt(0, 12), 0, 11, np.array([4, 1], np.int32), score),
        ProbeSeq(71, prompt(1, 9), 0, 8, np.array([2], np.int32)),
    ]


def test_it_is_a_model_executor(loaded: LoadedModel) -> None:
    executor: ModelExecutor = make(loaded, num_pages=9)
    assert (executor.num_pages, executor.page_size) == (9, PAGE_SIZE)
    assert executor.spec is loaded.spec


def test_greedy_continuation_equals_the_plain_one() -> None:
    loaded = tiny_model("qwen2")
    executor = make(loaded)
    token_ids, pages = prompt(3, 10).tolist(), np.array([7, 0, 5, 3, 9], np.int32)
    expected = list(token_ids)
    start = 0
    for _ in range(24):
        seq = ProbeSeq(1, np.array(token_ids, np.int32), start, len(token_ids), pages)
        result = executor.execute(probe_batch(PAGE_SIZE, [seq], vocab_size=VOCAB_SIZE))
        start = len(token_ids)
        token_ids.append(int(result.sampled_ids[0]))
        expected.append(int(plain_logits(loaded, np.array(expected, np.int32))[-1].argmax()))
    assert token_ids == expected
    assert len(set(token_ids[10:])) > 3, "a run of one token would prove little"


def test_only_sample_rows_pass_the_head(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault seen: logits taken of every row, then picked."""
    executor = make(loaded)
    rows: list[int] = []
    right = executor._prepared.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return right(hidden)

    monkeypatch.setattr(executor._prepared, "logits", counted)
    executor.execute(probe_batch(PAGE_SIZE, two_seqs(), vocab_size=VOCAB_SIZE))
    assert rows == [2]


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
def test_scores_are_log_probabilities_of_the_raw_logits(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, chunk_rows: int
) -> None:
    monkeypatch.setattr(hf, "SCORE_CHUNK_BYTES", 4 * VOCAB_SIZE * chunk_rows)
    executor = make(loaded)
    seqs = two_seqs(score=(2, 3, 4, 7, 9))
    result = executor.execute(probe_batch(PAGE_SIZE, seqs, vocab_size=VOCAB_SIZE))
    ids = seqs[0].token_ids
    expected = torch.log_softmax(plain_logits(loaded, ids), dim=-1)
    wanted = [float(expected[p, ids[p + 1]]) for p in (2, 3, 4, 7, 9)]
    assert result.score_logprobs.dtype == np.float32
    np.testing.assert_allclose(result.score_logprobs, wanted, atol=1e-4)


def test_no_rows_to_score_give_an_empty_array(loaded: LoadedModel) -> None:
    result = make(loaded).execute(probe_batch(PAGE_SIZE, two_seqs(), vocab_size=VOCAB_SIZE))
    assert result.score_logprobs.shape == (0,)
    assert result.sampled_ids.shape == (2,) and result.sampled_ids.dtype == np.int32


def test_b048_broken_kv_of_one_request_names_that_request(loaded: LoadedModel) -> None:
    """NaN in one sequence's page: the other one's logits are fine and it is not named.

    Fault seen: every request of the batch named.
    """
    executor = make(loaded)
    executor.store.data[:, :, 4, 0] = float("nan")
    seqs = [
        ProbeSeq(71, prompt(1, 9), 0, 8, np.array([2], np.int32)),
        ProbeSeq(70, prompt(0, 12), 10, 11, np.array([4, 1], np.int32)),
    ]
    with pytest.raises(NonFiniteLogitsError, match=r"requests 70$") as caught:
        executor.execute(probe_batch(PAGE_SIZE, seqs, vocab_size=VOCAB_SIZE))
    assert caught.value.request_ids == (70,)


def test_a_bad_score_names_its_request(loaded: LoadedModel) -> None:
    executor = make(loaded)
    executor.store.data[:, :, 4, 0] = float("nan")
    seq = ProbeSeq(70, prompt(0, 13), 9, 12, np.array([4, 1], np.int32), score=(9, 10))
    batch = probe_batch(PAGE_SIZE, [seq], vocab_size=VOCAB_SIZE)
    object.__setattr__(batch, "sample_rows", batch.sample_rows[:0])
    object.__setattr__(batch, "sample_seqs", batch.sample_seqs[:0])
    with pytest.raises(NonFiniteLogitsError, match=r"requests 70$"):
        executor.execute(batch)


def test_wrong_page_size_is_refused_with_both_numbers(loaded: LoadedModel) -> None:
    with pytest.raises(ConfigError, match="pages of 4 tokens, the store 8"):
        make(loaded).execute(
            probe_batch(4, [ProbeSeq(0, prompt(0, 4), 0, 4, np.array([1], np.int32))], vocab_size=97)
        )


def test_stats_add_up_and_count_steps_and_rows(loaded: LoadedModel) -> None:
    executor = make(loaded)
    assert executor.stats()["seconds_total"] == 0.0
    for _ in range(3):
        executor.execute(probe_batch(PAGE_SIZE, two_seqs(), vocab_size=VOCAB_SIZE))
    stats = executor.stats()
    assert (stats["num_steps"], stats["num_rows"]) == (3, 3 * 19)
    parts = [stats[f"seconds_{name}"] for name in ("copies", "matmul", "attention", "rest", "sampling")]
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) == pytest.approx(stats["seconds_total"])
    assert stats["store"]["num_pages"] == 20


def test_executors_share_one_prepared_model(loaded: LoadedModel) -> None:
    """Prepared once, checked once per backend; each has its own store and counts."""
    first, second = make(loaded), make(loaded, num_pages=5, page_size=4)
    assert first._prepared is second._prepared is loaded.prepared
    seconds = dict(loaded.load_report)
    third = make(loaded)
    assert loaded.load_report == seconds
    batch = probe_batch(PAGE_SIZE, two_seqs(), vocab_size=VOCAB_SIZE)
    first.execute(batch)
    assert second.stats()["num_steps"] == 0 and not bool(third.store.data.any())
    assert third.execute(batch).sampled_ids.tolist() == first.execute(batch).sampled_ids.tolist()


@pytest.mark.parametrize("pack", [True, False])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_and_plain_weights_agree(family: str, pack: bool) -> None:
    """Both paths are forced, whatever the probe would say."""
    original, changed = tiny_model(family), tiny_model(family)
    executor = make(changed, pack=pack)
    kinds = {type(m) for m in changed.model.modules() if type(m) in (PackedLinear, TimedLinear)}
    assert kinds == {PackedLinear if pack else TimedLinear}
    assert executor.stats()["packed"] is pack
    seqs = two_seqs()
    got = executor.logits(probe_batch(PAGE_SIZE, seqs, vocab_size=VOCAB_SIZE))
    with torch.inference_mode():
        expected = [
            original.model(torch.as_tensor(s.token_ids[: s.stop]).long()[None]).logits[0] for s in seqs
        ]
    torch.testing.assert_close(got, torch.cat(expected), atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_stays_within_the_stated_bound(family: str, dtype: str) -> None:
    loaded = tiny_model(family, dtype=dtype)
    executor = make(loaded)
    assert executor.store.dtype == getattr(torch, dtype)
    seqs = two_seqs()
    got = executor.logits(probe_batch(PAGE_SIZE, seqs, vocab_size=VOCAB_SIZE))
    expected = torch.cat([plain_logits(loaded, seq.token_ids[: seq.stop]) for seq in seqs])
    bound = TOLERANCE[executor.store.dtype] * max(1.0, float(expected.abs().max()))
    assert float((got - expected).abs().max()) < bound


def test_final_soft_cap_is_honoured() -> None:
    executor = make(tiny_model("gemma2", final_logit_softcapping=0.5))
    logits = executor.logits(probe_batch(PAGE_SIZE, two_seqs(), vocab_size=VOCAB_SIZE))
    assert 0.4 < float(logits.abs().max()) <= 0.5


def test_registering_twice_is_fine_and_plain_runs_leave_no_trace(loaded: LoadedModel) -> None:
    executor = make(loaded)
    batch = probe_batch(PAGE_SIZE, two_seqs(), vocab_size=VOCAB_SIZE)
    before = executor.logits(batch)
    use_paged_attention(loaded.model)
    with plain_attention(loaded.model, "sdpa"):
        assert loaded.model.config._attn_implementation == "sdpa"
    assert loaded.model.config._attn_implementation == HOOK_NAME
    assert torch.equal(executor.logits(batch), before)


def test_a_plain_call_of_a_prepared_model_says_what_to_do(loaded: LoadedModel) -> None:
    make(loaded)
    with pytest.raises(UnsupportedModelError, match="plain_attention"):
        loaded.model(torch.tensor([[1, 2, 3]]), use_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_spec_follows_the_configuration(family: str) -> None:
    loaded = tiny_model(family)
    spec = loaded.spec
    assert spec.family == family and spec.vocab_size == VOCAB_SIZE and spec.num_query_heads == 4
    assert spec.num_kv_heads == (4 if family == "gpt2" else 2)
    assert spec.head_dim == (16 if family in ("qwen3", "gemma3_text") else 8)
    assert spec.max_positions == 512 and spec.eos_token_ids == (1,)
    assert spec_from_config(loaded.model.config, eos_token_ids=[5, 3, 5]).eos_token_ids == (3, 5)


def test_tiny_models_are_the_same_every_time_and_leave_the_random_state() -> None:
    torch.manual_seed(123)
    state = torch.random.get_rng_state()
    one, two, other = tiny_model("qwen2"), tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    weights = [dict(m.model.named_parameters())["lm_head.weight"] for m in (one, two, other)]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])
    with pytest.raises(ConfigError, match="family must be one of llama"):
        tiny_model("nothing")
