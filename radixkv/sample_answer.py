"""SampleAnswer: what the engine says about one sample of a request, gathered and turned into text."""

from __future__ import annotations

from radixkv.outputs import Delta, Sample
from radixkv.sampling import SamplingParams
from radixkv.sched.batch import SequenceOutput, Usage
from radixkv.sequence import FinishReason
from radixkv.text import Tokenizer
from radixkv.text_stream import TextStream
from radixkv.token_logprobs import TokenLogprobs


class SampleAnswer:
    """Takes the outputs of one sample, in order, until it has a ``finish_reason``."""

    def __init__(
        self, sample_index: int, num_prompt: int, tokenizer: Tokenizer | None, sampling: SamplingParams
    ):
        self.sample_index = sample_index
        self.usage = Usage(num_prompt, 0, 0)
        self.finish_reason: FinishReason | None = None
        self.cumulative_logprob: float | None = None
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._pieces: list[str] = []
        self._stream = TextStream(tokenizer, sampling)
        self._wants_logprobs = sampling.logprobs is not None
        """``best_of`` has them computed, too."""

    def take(self, output: SequenceOutput) -> Delta:
        """What is new. Where a stop string is found in it, it is the last."""
        pieces = []
        for token_id in output.new_token_ids:
            self._token_ids.append(token_id)
            pieces.append(self._stream.push(token_id))
        logprobs = output.token_logprobs if self._wants_logprobs else ()
        self._logprobs += logprobs
        self.usage = output.usage
        self.cumulative_logprob = output.cumulative_logprob
        self.finish_reason = output.finish_reason
        if self.finish_reason is not None:
            pieces.append(self._stream.end())
        if self._stream.stopped_by is not None and self.finish_reason in (None, "length"):
            self.finish_reason = "stop"
        self._pieces += pieces
        return self._delta("".join(pieces), output.new_token_ids, logprobs)

    def _delta(self, text: str, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        return Delta(
            text=text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            usage=self.usage,
            stop_reason=self.stop_reason,
            sample_index=self.sample_index,
            logprobs=logprobs,
        )

    @property
    def stop_reason(self) -> str | int | None:
        """With ``stop``: the stop string or the token that ended it."""
        if self.finish_reason != "stop":
            return None
        return self._stream.stopped_by if self._stream.stopped_by is not None else self._token_ids[-1]

    @property
    def mean_logprob(self) -> float:
        """Of its tokens; the higher, the likelier the model finds it."""
        assert self.cumulative_logprob is not None
        return self.cumulative_logprob / max(len(self._token_ids), 1)

    def sample(self, sample_index: int) -> Sample:
        """All of it, under this index; only where it is done."""
        assert self.finish_reason is not None
        return Sample(
            sample_index=sample_index,
            text="".join(self._pieces),
            token_ids=tuple(self._token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            usage=self.usage,
            logprobs=tuple(self._logprobs),
            cumulative_logprob=self.cumulative_logprob,
        )
