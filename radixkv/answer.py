"""Answer: what the engine says about one request, gathered and turned into text."""

from __future__ import annotations

from radixkv.engine import Engine
from radixkv.errors import EngineDeadError, QueueTimeoutError, RequestAbortedError
from radixkv.outputs import Delta, Output
from radixkv.sample_answer import SampleAnswer
from radixkv.sched.batch import SequenceOutput, Usage
from radixkv.sequence import Request
from radixkv.text import Tokenizer
from radixkv.token_logprobs import TokenLogprobs


class Answer:
    """Takes the outputs of one request, of all its samples (or beams), until it ``is_done``."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.error: BaseException | None = None
        """Why the request failed: the first error of a sample is the request's."""
        self.scores: tuple[float, ...] = ()
        """Log-probabilities of prompt positions from ``logprob_start`` on, once it is done."""
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        num_prompt = len(request.prompt_ids)
        self._samples = [
            SampleAnswer(index, num_prompt, tokenizer, request.sampling)
            for index in range(request.num_samples)
        ]

    @property
    def is_done(self) -> bool:
        return self.error is not None or all(sample.finish_reason is not None for sample in self._samples)

    def raise_unless_answered(self) -> None:
        """Raise its error, ``QueueTimeoutError`` where it was not computed at all, or ``RequestAbortedError``
        where not to its end: such an answer is no result."""
        if self.error is not None:
            raise self.error
        reasons = {sample.finish_reason for sample in self._samples}
        if "abort" in reasons:
            raise RequestAbortedError(f"request {self.request.request_id} of this call was aborted")
        if "timeout" in reasons:
            raise QueueTimeoutError("this call waited longer than queue_timeout_s for its start")

    @property
    def has_several_samples(self) -> bool:
        return len(self._samples) > 1

    @property
    def usage(self) -> Usage:
        """Of all samples together, those included that ``best_of`` leaves out: the prompt counts once."""
        return Usage.of_request(sample.usage for sample in self._samples)

    @property
    def is_ranked_at_its_end(self) -> bool:
        """Whether only the end tells which samples are returned, and in which order."""
        return len(self._samples) > self.request.sampling.n and self.request.beam is None

    def take(self, output: SequenceOutput) -> Delta | None:
        """What is new of one sample; ``None`` where that one is done already, or has failed. Where a stop
        string is found, the delta has a finish reason that ``output`` has not: see ``take_output``."""
        sample = self._samples[output.sample_index]
        if sample.finish_reason is not None or self.error is not None:
            return None
        if output.error is not None:
            shared = output.error
            self.error = shared.again() if isinstance(shared, EngineDeadError) else shared
            return None
        delta = sample.take(output)
        if output.finish_reason is not None:
            self.take_last(output)
        return delta

    def take_last(self, output: SequenceOutput) -> None:
        """What only a sample's last output brings along."""
        self.scores = output.logprobs
        self._prompt_logprobs = output.prompt_logprobs

    def fail(self, error: BaseException) -> None:
        """End it with ``error``: nothing more can be said."""
        self.error = error

    def output(self) -> Output:
        """All of it; only where it is done without an error."""
        assert self.is_done and self.error is None
        chosen = self._samples
        if self.is_ranked_at_its_end:
            chosen = sorted(chosen, key=lambda sample: -sample.mean_logprob)[: self.request.sampling.n]
        samples = tuple([sample.sample(place) for place, sample in enumerate(chosen)])
        first = samples[0]
        return Output(
            text=first.text,
            token_ids=first.token_ids,
            finish_reason=first.finish_reason,
            usage=self.usage,
            stop_reason=first.stop_reason,
            logprobs=first.logprobs,
            cumulative_logprob=first.cumulative_logprob,
            prompt_logprobs=self._prompt_logprobs,
            samples=samples,
        )


def take_output(engine: Engine, answer: Answer, output: SequenceOutput) -> Delta | None:
    """Hand ``output`` to ``answer``; finish the sample in the engine if a stop string ended it, and abort the
    request if one of its samples failed. Call it between two steps."""
    delta = answer.take(output)
    if answer.error is not None and answer.has_several_samples and not engine.is_dead:
        engine.abort(output.request_id)
    if delta is not None and delta.finish_reason is not None and output.finish_reason is None:
        last = engine.finish(output.request_id, output.sample_index)
        if last is not None:
            answer.take_last(last)
    return delta
