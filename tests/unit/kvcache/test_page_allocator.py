"""Pages: one owner at a time, or counted ones."""

import pytest

from graphrunner.core.errors import OutOfPagesError
from graphrunner.kvcache.page_allocator import DUMMY_PAGE, PageAllocator


def test_hands_out_every_page_but_the_dummy() -> None:
    allocator = PageAllocator(5)
    pages = allocator.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4] and DUMMY_PAGE not in pages
    assert allocator.capacity == 4 and allocator.num_free == 0


def test_all_or_nothing() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(2)
    with pytest.raises(OutOfPagesError, match="3 pages wanted, 2 of 4 free"):
        allocator.allocate(3)
    assert allocator.num_free == 2
    assert allocator.allocate(0) == []


def test_shared_page_is_free_after_its_last_owner() -> None:
    allocator = PageAllocator(3)
    (page,) = allocator.allocate(1)
    assert allocator.retain(page) == 2
    assert allocator.release(page) == 1
    assert allocator.num_free == 1
    assert allocator.release(page) == 0
    assert allocator.num_free == 2
    allocator.check_invariants()


def test_free_gives_pages_back() -> None:
    allocator = PageAllocator(4)
    allocator.free(allocator.allocate(3))
    assert allocator.num_free == 3
    allocator.check_invariants()


@pytest.mark.parametrize(
    "misuse",
    [
        lambda allocator, page: (allocator.release(page), allocator.release(page)),
        lambda allocator, page: (allocator.free([page]), allocator.free([page])),
        lambda allocator, page: allocator.free([page, page]),
        lambda allocator, page: (allocator.retain(page), allocator.free([page])),
        lambda allocator, page: allocator.retain(page + 1),
        lambda allocator, page: allocator.release(DUMMY_PAGE),
        lambda allocator, page: allocator.allocate(-1),
        lambda allocator, page: PageAllocator(1),
    ],
    ids=[
        "release twice",
        "free twice",
        "free a list twice",
        "free shared",
        "share free",
        "free dummy",
        "< 0",
        "no page",
    ],
)
def test_misuse_is_loud(misuse) -> None:
    allocator = PageAllocator(4)
    (page,) = allocator.allocate(1)
    with pytest.raises(AssertionError):
        misuse(allocator, page)
