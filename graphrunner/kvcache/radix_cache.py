"""Prefix cache: a radix tree whose letters are whole pages of token ids.

The tree is one dictionary. Its root is the dummy page; a page is a node, and

    (page of the parent, the page_size tokens that follow) -> page

is an edge. Looking a prompt up is one dictionary access a page, and no node is ever split.

Note [pages are evicted child first]
    Evictable pages (the cache is their only owner) stand in a dictionary in the order in which they became so, which
    makes eviction "take the first": least recently used, O(1). It is right only because a child always stands before
    its parent:
    - a request owns a prefix of a path, so who owns a child owns its parent;
    - a request releases its pages from the last to the first;
    - a child is attached only under a page that its inserter owns at that moment.
    So the parent's last owner leaves after the child's. `insert` keeps the third rule by stopping at a page that
    another request was first to share; `insert_and_release` keeps it by owning such pages until it is done.

Source: RadixAttention (SGLang, arXiv 2312.07104, section 3), at page granularity.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from graphrunner.kvcache.page_allocator import DUMMY_PAGE, PageAllocator
from graphrunner.kvcache.prefix_cache import PrefixCache

_Edge = tuple[int, tuple[int, ...]]


class RadixCache(PrefixCache):
    """Keeps computed pages until their room is needed.

    Args:
        allocator: owner of the pool; the cache holds one reference to each page it keeps.
        page_size: tokens a page.
    """

    def __init__(self, allocator: PageAllocator, page_size: int) -> None:
        assert page_size >= 1, f"page_size={page_size}"
        self._allocator = allocator
        self._page_size = page_size
        self._page_at: dict[_Edge, int] = {}
        self._edge_to: dict[int, _Edge] = {}
        # Least recently used first, children before parents. Not a plain dict: that one scans over what was taken
        # from its front.
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def num_evictable(self) -> int:
        """Pages that only the cache owns."""
        return len(self._evictable)

    @property
    def num_cached_pages(self) -> int:
        """Pages in the tree."""
        return len(self._edge_to)

    def match(self, token_ids: Sequence[int]) -> list[int]:
        """Pages of the longest known prefix that leaves at least one token over."""
        found: list[int] = []
        parent = DUMMY_PAGE
        for tokens in self._full_pages(token_ids, len(token_ids) - 1):
            page = self._page_at.get((parent, tokens))
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def acquire(self, pages: Sequence[int]) -> None:
        """Own matched pages; they leave the evictable ones."""
        for page in pages:
            assert page in self._edge_to, f"page {page} is not in the cache"
            self._allocator.retain(page)
            self._evictable.pop(page, None)

    def release(self, pages: Sequence[int]) -> None:
        """Let go of `pages`, last first; see Note [pages are evicted child first]."""
        for page in reversed(pages):
            self._release_one(page)

    def insert(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Share full pages, up to the first that another request has shared in a page of its own."""
        parent = DUMMY_PAGE
        for tokens, page in zip(self._full_pages(token_ids, len(token_ids)), pages, strict=False):
            known = self._page_at.get((parent, tokens))
            if known is None:
                self._attach((parent, tokens), page)
            elif known != page:
                return
            parent = page

    def insert_and_release(self, token_ids: Sequence[int], pages: Sequence[int]) -> None:
        """Share what is new, drop what is double, release everything."""
        twins: dict[int, int] = {}  # index of the page -> the page the tree already had for those tokens
        parent = DUMMY_PAGE
        for index, tokens in enumerate(self._full_pages(token_ids, len(token_ids))):
            known = self._page_at.get((parent, tokens))
            if known is None:
                known = pages[index]
                self._attach((parent, tokens), known)
            elif known != pages[index]:
                self.acquire((known,))
                twins[index] = known
            parent = known
        for index in range(len(pages) - 1, -1, -1):
            self._release_one(pages[index])
            if index in twins:
                self._release_one(twins[index])

    def evict(self, num_pages: int) -> int:
        """Free the least recently used evictable pages."""
        count = min(num_pages, len(self._evictable))
        for _ in range(count):
            page, _ = self._evictable.popitem(last=False)
            del self._page_at[self._edge_to.pop(page)]
            num_refs = self._allocator.release(page)
            assert num_refs == 0, f"evicted page {page} still has {num_refs} owners"
        return count

    def reset(self) -> None:
        """Give up every page; those in use stay with their requests."""
        pages = list(self._edge_to)
        self._page_at.clear()
        self._edge_to.clear()
        self._evictable.clear()
        for page in pages:
            self._allocator.release(page)

    def check_invariants(self) -> None:
        """Assert that edges, owners and the eviction order are consistent."""
        mirrored = {page: edge for edge, page in self._page_at.items()}
        assert mirrored == self._edge_to, "the two halves of the tree differ"
        place = {page: index for index, page in enumerate(self._evictable)}
        for page, (parent, _) in self._edge_to.items():
            num_refs = self._allocator.num_refs(page)
            assert num_refs >= 1, f"cached page {page} is free"
            assert (page in place) == (num_refs == 1), f"page {page} has {num_refs} owners, evictable: {page in place}"
            assert parent == DUMMY_PAGE or parent in self._edge_to, f"page {page} hangs under {parent}, which is gone"
            if parent in place:
                assert page in place and place[page] < place[parent], f"page {parent} would go before its child {page}"

    def _full_pages(self, token_ids: Sequence[int], limit: int) -> Iterator[tuple[int, ...]]:
        size = self._page_size
        return (tuple(token_ids[start : start + size]) for start in range(0, limit - size + 1, size))

    def _attach(self, edge: _Edge, page: int) -> None:
        assert page not in self._edge_to, f"page {page} is in the tree already"
        self._page_at[edge] = page
        self._edge_to[page] = edge
        self._allocator.retain(page)

    def _release_one(self, page: int) -> None:
        if self._allocator.release(page) == 1 and page in self._edge_to:
            self._evictable[page] = None
