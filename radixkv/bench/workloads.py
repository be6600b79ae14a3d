"""Workload: the prompts of one benchmark run, as token ids, with what is wanted of them.

Prefix and questions are tokenised apart and joined as ids, and the words that lead every question belong to
the prefix, so that the length of what prompts share is exact.
"""

from __future__ import annotations

import gzip
import json
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from radixkv.bench.word_problems import LEAD, as_example, as_question, make_problems
from radixkv.errors import ConfigError
from radixkv.types import TokenIds

Encode: TypeAlias = Callable[[str], Sequence[int]]
"""Text to token ids, nothing added."""

NUM_EXAMPLES = 8
_WORDS = (
    "amber", "bridge", "copper", "dawn", "engine", "forest", "garden", "harbour", "island", "journey",
    "kettle", "ladder", "meadow", "needle", "ocean", "pepper", "quarry", "river", "summer", "timber",
    "umbrella", "valley", "winter", "yellow", "zebra", "anchor", "basket", "candle", "desert", "eagle",
    "feather", "glacier", "hammer", "insect", "jacket", "kitchen", "lantern", "mirror", "north", "orchard",
    "pencil", "quiet", "rocket", "silver", "tunnel", "uncle", "village", "window", "yard", "apple",
    "butter", "circle", "drum", "elbow", "flour", "grain", "honey", "iron", "jungle", "king", "letter",
    "moon", "night", "orange", "paper", "queen", "road", "salt", "tower", "under", "violin", "water",
    "young", "arrow", "bottle", "cloud", "doctor", "evening", "finger", "guitar", "hotel", "ice", "joke",
    "knife", "lemon", "market",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Workload:
    """Requests submitted all at once, in this order, each answered with exactly ``max_tokens`` tokens."""

    name: str
    prefix_ids: TokenIds
    """Shared by all prompts; may be empty."""
    question_ids: tuple[TokenIds, ...]
    max_tokens: int
    answers: tuple[int | None, ...]
    """What each question's answer is, where that is known."""

    @property
    def prompts(self) -> list[TokenIds]:
        return [np.concatenate([self.prefix_ids, question]) for question in self.question_ids]

    @property
    def num_requests(self) -> int:
        return len(self.question_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_requests * len(self.prefix_ids) + sum(map(len, self.question_ids))


def cut_prefix(workload: Workload, num_tokens: int) -> Workload:
    """The same workload behind the first ``num_tokens`` tokens of its prefix.

    Raises ``ConfigError`` where the prefix is shorter than that.
    """
    if not 0 <= num_tokens <= len(workload.prefix_ids):
        raise ConfigError(f"the prefix must be cut to 0..{len(workload.prefix_ids)} tokens, got {num_tokens}")
    return replace(workload, prefix_ids=workload.prefix_ids[:num_tokens].copy())


def arithmetic_workload(encode: Encode, *, num_questions: int, max_tokens: int, seed: int = 0) -> Workload:
    """Eight worked word problems, then one open one per request. Everything follows from ``seed``."""
    _at_least_one(num_questions, max_tokens)
    problems = make_problems(NUM_EXAMPLES + num_questions, random.Random(seed))
    examples, questions = problems[:NUM_EXAMPLES], problems[NUM_EXAMPLES:]
    return Workload(
        name=f"arithmetic word problems, {NUM_EXAMPLES}-shot, seed {seed}",
        prefix_ids=_ids(encode("".join(as_example(problem) for problem in examples) + LEAD)),
        question_ids=tuple(_ids(encode(as_question(problem))) for problem in questions),
        max_tokens=max_tokens,
        answers=tuple(problem.answer for problem in questions),
    )


def gsm8k_workload(folder: Path, encode: Encode, *, num_questions: int, max_tokens: int) -> Workload | None:
    """GSM8K (Cobbe et al., 2021), 8-shot, out of ``folder``; ``None`` where ``folder`` does not hold it.

    Expected: ``gsm8k/fewshot_train_*.jsonl`` and ``gsm8k/test_*.jsonl``, packed with gzip or not, one object
    with ``question`` and ``answer`` a line. Raises ``ConfigError`` where there are too few questions.
    """
    _at_least_one(num_questions, max_tokens)
    examples = _read_rows(folder / "gsm8k", "fewshot_train_*.jsonl*")[:NUM_EXAMPLES]
    questions = _read_rows(folder / "gsm8k", "test_*.jsonl*")
    if len(examples) < NUM_EXAMPLES or not questions:
        return None
    if num_questions > len(questions):
        raise ConfigError(f"GSM8K here has {len(questions)} questions, {num_questions} are wanted")
    questions = questions[:num_questions]
    shots = []
    for row in examples:
        working, _, answer = re.sub(r"<<[^>]*>>", "", row["answer"]).partition("####")
        shots.append(
            f"{LEAD} {row['question']}\nAnswer: {working.strip()} The answer is {answer.strip()}.\n\n"
        )
    return Workload(
        name=f"GSM8K, {NUM_EXAMPLES}-shot",
        prefix_ids=_ids(encode("".join(shots) + LEAD)),
        question_ids=tuple(_ids(encode(f" {row['question']}\nAnswer:")) for row in questions),
        max_tokens=max_tokens,
        answers=tuple(_gsm8k_answer(row["answer"]) for row in questions),
    )


def unrelated_workload(
    encode: Encode, *, num_prompts: int, num_tokens: int, max_tokens: int, seed: int = 0
) -> Workload:
    """Prompts of ``num_tokens`` tokens each, random common words, no two with the same first token.

    Raises ``ConfigError`` where there are more prompts than first tokens to tell them apart.
    """
    _at_least_one(num_prompts, max_tokens)
    rng = random.Random(seed)
    prompts: list[TokenIds] = []
    seen: set[int] = set()
    for word in rng.sample(_WORDS, len(_WORDS)):
        if len(prompts) == num_prompts:
            break
        text = " ".join([word, *rng.choices(_WORDS, k=num_tokens)])
        ids = _ids(encode(text))[:num_tokens]
        if len(ids) == num_tokens and int(ids[0]) not in seen:
            seen.add(int(ids[0]))
            prompts.append(ids)
    if len(prompts) < num_prompts:
        raise ConfigError(f"only {len(prompts)} unrelated prompts can be made, {num_prompts} are wanted")
    return Workload(
        name=f"unrelated prompts, seed {seed}",
        prefix_ids=_ids([]),
        question_ids=tuple(prompts),
        max_tokens=max_tokens,
        answers=(None,) * num_prompts,
    )


def says_answer(text: str, answer: int) -> bool:
    """Whether the first "The answer is N" in ``text`` names ``answer``."""
    found = re.search(r"[Tt]he answer is \$?(-?[\d,]+)", text)
    return found is not None and found[1].replace(",", "") == str(answer)


def _gsm8k_answer(text: str) -> int | None:
    number = text.partition("####")[2].strip().replace(",", "")
    return int(number) if re.fullmatch(r"-?\d+", number) else None


def _read_rows(folder: Path, pattern: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for path in sorted(folder.glob(pattern)):
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        rows.extend(json.loads(line) for line in raw.decode("utf-8").splitlines() if line.strip())
    return rows


def _ids(tokens: Sequence[int]) -> TokenIds:
    return np.asarray(tokens, dtype=np.int32)


def _at_least_one(num_requests: int, max_tokens: int) -> None:
    for name, value in (("questions", num_requests), ("max_tokens", max_tokens)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
