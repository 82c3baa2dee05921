"""Who owns which KV page: a free list and one reference count a page."""

from collections.abc import Iterable

from graphrunner.core.errors import OutOfPagesError

DUMMY_PAGE = 0
"""Reserved: padding reads and writes it, nobody owns it."""


class PageAllocator:
    """Hands out page numbers 1 .. num_pages - 1. Every call is O(1) a page.

    A page is free (count 0) or has one reference for each owner: a request that reads it, the prefix cache.

    Args:
        num_pages: pages in the pool, the reserved page 0 included.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 2, f"num_pages={num_pages}: page 0 is reserved, so at least 2 are needed"
        self.num_pages = num_pages
        # A stack: the page freed last is the likeliest to be warm. Low numbers come out first on a fresh pool.
        self._free = list(range(num_pages - 1, DUMMY_PAGE, -1))
        self._num_refs = [0] * num_pages

    def cut(self, num_pages: int) -> None:
        """There are only `num_pages` after all. Nobody may own one yet."""
        assert num_pages <= self.num_pages and not any(self._num_refs), f"cut({num_pages}) of a pool in use"
        del self._free[: self.num_pages - num_pages]
        del self._num_refs[num_pages:]
        self.num_pages = num_pages

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """The pages that nobody owns."""
        return tuple(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be owned at all."""
        return self.num_pages - 1

    def num_refs(self, page: int) -> int:
        """How many owners `page` has."""
        return self._num_refs[page]

    def allocate(self, count: int) -> list[int]:
        """Take `count` pages, each with one reference; all of them or none.

        Raises:
            OutOfPagesError: fewer are free.
        """
        assert count >= 0, f"allocate({count})"
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages wanted, {len(self._free)} of {self.capacity} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            assert self._num_refs[page] == 0, f"page {page} was free with {self._num_refs[page]} owners"
            self._num_refs[page] = 1
        return pages

    def retain(self, page: int) -> int:
        """Add an owner to a page that has one; returns the new count."""
        assert self._num_refs[page] > 0, f"page {page} is free and cannot be shared"
        self._num_refs[page] += 1
        return self._num_refs[page]

    def release(self, page: int) -> int:
        """Take an owner away; the page is free when none is left. Returns the new count."""
        assert page != DUMMY_PAGE, "the dummy page has no owner"
        assert self._num_refs[page] > 0, f"page {page} is freed twice"
        self._num_refs[page] -= 1
        if self._num_refs[page] == 0:
            self._free.append(page)
        return self._num_refs[page]

    def free(self, pages: Iterable[int]) -> None:
        """Give back pages that have exactly one owner, the caller."""
        for page in pages:
            assert self._num_refs[page] == 1, f"page {page} has {self._num_refs[page]} owners, not 1"
            self.release(page)

    def check_invariants(self) -> None:
        """Assert that free pages and owned pages partition the pool."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert DUMMY_PAGE not in free and self._num_refs[DUMMY_PAGE] == 0, "the dummy page was handed out"
        for page in range(1, self.num_pages):
            assert (page in free) == (self._num_refs[page] == 0), f"page {page}: {self._num_refs[page]} owners"
