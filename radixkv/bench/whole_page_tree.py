"""WholePageTree: a radix tree that finds whole pages only, to show what matching to the token is worth."""

from __future__ import annotations

from radixkv.kv.match import Match
from radixkv.kv.radix_tree import RadixTree
from radixkv.types import Namespace, TokenIds


class WholePageTree(RadixTree):
    """Everything but what it finds is as in ``RadixTree``; T1 to T5 hold."""

    def peek(self, token_ids: TokenIds, namespace: Namespace = ()) -> int:
        found = super().peek(token_ids, namespace)
        return found - found % self.page_size

    def lookup(self, token_ids: TokenIds, namespace: Namespace = ()) -> Match:
        return self._whole(super().lookup(token_ids, namespace))

    def match(
        self, token_ids: TokenIds, namespace: Namespace = (), priority: int = 0, *, is_retry: bool = False
    ) -> Match:
        return self._whole(super().match(token_ids, namespace, priority, is_retry=is_retry))

    def _whole(self, match: Match) -> Match:
        num_tokens = len(match.page_ids) * self.page_size
        return match._replace(partial_page=None, partial_tokens=0, num_tokens=num_tokens)
