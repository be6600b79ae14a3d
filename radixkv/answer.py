"""Answer: what the engine says about one request, gathered and turned into text."""

from __future__ import annotations

from radixkv.engine import Engine
from radixkv.outputs import Delta, Output
from radixkv.sched.batch import SequenceOutput, Usage
from radixkv.sequence import FinishReason, Request
from radixkv.text import Tokenizer
from radixkv.text_stream import TextStream


class Answer:
    """Takes the outputs of one request, in order, until it ``is_done``."""

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.usage = Usage(len(request.prompt_ids), 0, 0)
        self.error: BaseException | None = None
        """Why the request failed."""
        self.prompt_logprobs: tuple[float, ...] = ()
        """Of prompt positions from ``logprob_start`` on, once it is done."""
        self._finish_reason: FinishReason | None = None
        self._pieces: list[str] = []
        self._stream = TextStream(tokenizer, request.sampling)

    @property
    def is_done(self) -> bool:
        return self._finish_reason is not None

    def take(self, output: SequenceOutput) -> Delta:
        """What is new. Where a stop string is found in it, it is the last: the request is to be finished."""
        pieces = []
        for token_id in output.new_token_ids:
            self.token_ids.append(token_id)
            pieces.append(self._stream.push(token_id))
        self.usage = output.usage
        self._finish_reason = output.finish_reason
        if self._finish_reason is not None:
            pieces.append(self._stream.end())
            self.take_last(output)
        if self._stream.stopped_by is not None and self._finish_reason in (None, "length"):
            self._finish_reason = "stop"
        self._pieces += pieces
        return Delta(
            text="".join(pieces),
            token_ids=output.new_token_ids,
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
            usage=self.usage,
        )

    def fail(self, error: BaseException) -> None:
        """End it with ``error``: nothing more can be said."""
        self._finish_reason, self.error = "error", error

    def take_last(self, output: SequenceOutput) -> None:
        """What only a request's last output brings along."""
        self.error = output.error
        self.prompt_logprobs = output.logprobs

    @property
    def _stop_reason(self) -> str | int | None:
        if self._finish_reason != "stop":
            return None
        return self._stream.stopped_by if self._stream.stopped_by is not None else self.token_ids[-1]

    def output(self) -> Output:
        """All of it; only where it is done without an error."""
        assert self._finish_reason is not None and self.error is None
        return Output(
            text="".join(self._pieces),
            token_ids=tuple(self.token_ids),
            finish_reason=self._finish_reason,
            usage=self.usage,
            stop_reason=self._stop_reason,
        )


def take_output(engine: Engine, answer: Answer, output: SequenceOutput) -> Delta:
    """Hand ``output`` to ``answer``, and finish the request in the engine if a stop string ended it. Call it
    between two steps."""
    delta = answer.take(output)
    if delta.finish_reason is not None and output.finish_reason is None:
        last = engine.finish(output.request_id)
        if last is not None:
            answer.take_last(last)
    return delta
