"""What the scheduler asks of a prefix cache, and the cache that keeps nothing."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from graphrunner.kvcache.page_allocator import PageAllocator


class PrefixCache(ABC):
    """Finds KV pages of earlier sequences that start with the same tokens, in whole pages.

    Calls for one request, in order: `match`, `acquire` of what is wanted of it, any number of `insert` while it runs,
    then `insert_and_release` or `release`, once. Pages that a request allocated itself are given back here too, since
    only the cache knows whether they are shared by then.
    """

    @abstractmethod
    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Pages that hold the longest known prefix, never all of `token_ids`: one token is left to compute.

        Changes nothing; the pages may be evicted until they are acquired.
        """

    @abstractmethod
    def acquire(self, pages: Sequence[int]) -> None:
        """Add the caller as an owner of matched pages, which then cannot be evicted."""

    @abstractmethod
    def release(self, pages: Sequence[int]) -> None:
        """Take the caller away as an owner of `pages`, a request's whole list in order."""

    @abstractmethod
    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Share the full pages of a request that goes on running.

        Args:
            token_ids: tokens whose KV is computed; what is past the last full page is ignored.
            pages: the request's pages, in order.
        """

    @abstractmethod
    def insert_and_release(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Share the full pages of a request that ends here, and release all of its pages. Arguments as in `insert`."""

    @abstractmethod
    def evict(self, num_pages: int) -> int:
        """Free up to `num_pages` pages that only the cache owns, least recently used first; returns how many."""

    @property
    @abstractmethod
    def num_evictable(self) -> int:
        """Pages that `evict` could free."""

    @property
    @abstractmethod
    def num_cached_pages(self) -> int:
        """Pages the cache owns, alone or with others."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything. For changed weights call it when nothing runs: what runs may insert its pages again."""

    @abstractmethod
    def check_invariants(self) -> None:
        """Assert that the cache's own account agrees with the allocator's."""


class NoPrefixCache(PrefixCache):
    """Never finds anything; pages go straight back to the allocator."""

    def __init__(self, allocator: PageAllocator) -> None:
        self._allocator = allocator

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """No pages."""
        return []

    def acquire(self, pages: Sequence[int]) -> None:
        """Nothing can have matched."""
        assert not pages, f"pages {list(pages)} did not come from this cache"

    def release(self, pages: Sequence[int]) -> None:
        """Free them; they have no other owner."""
        self._allocator.free(reversed(pages))

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep nothing."""

    def insert_and_release(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Keep nothing, free all."""
        self.release(pages)

    def evict(self, num_pages: int) -> int:
        """Nothing to free."""
        return 0

    @property
    def num_evictable(self) -> int:
        """Always 0."""
        return 0

    @property
    def num_cached_pages(self) -> int:
        """Always 0."""
        return 0

    def reset(self) -> None:
        """Nothing to forget."""

    def check_invariants(self) -> None:
        """Nothing to check."""
