"""Who computes tokens next.

The fairness policy
    Decode rows come first, one token each (for the other way round see below); what is left of a step's token budget
    goes to prompts. That prompt budget is split in two halves:
    - one half goes by age: to the request that has waited longest, where one level of priority counts as much as
      `AGEING_STEPS` steps of waiting;
    - the other half goes to the shortest remaining prompt of the best priority.
    What one half cannot use, the other gets. It follows that
    - a short prompt is never stuck behind a long one: whatever stands before it by age, half of each step is for the
      shortest;
    - nothing starves: a request that came `AGEING_STEPS * (levels + 1)` steps later, at a priority that is better by
      `levels`, never stands before it by age, so only finitely many do, and whoever is first by age gets at least half
      of the prompt budget of each step (all of every second one when the budget is one token).
    A request that is first by age and for which there are no pages holds back every later one, else small ones could
    keep it out for ever; until it fits, the running ones finish and give their pages back.

    When pages run out, the request of the worst priority that arrived last gives up its own and is computed again
    later. It keeps its place by age.

Prompts first (`SchedulerConfig.prompts_first`)
    Where nobody watches tokens arrive, the order is turned round: prompts get the whole budget, split as above, and the
    decode rows go along where all of them have room beside the prompts; else all of them wait for the next step. The
    rows then start to decode together, each later step with all of them.
    - Decode rows do not starve: they wait for `most_steps_waited` steps in a row at most, then come first in one step.
      Mostly the wait ends of itself, when all rows are taken or no pages are left and those let in are computed; the
      limit is for an endless stream of requests that end with their first token and so give row and pages back.
    - Prompts do not starve: the one step is all that they cede, and in it they get what decode rows leave, as above.
    - Nobody is preempted while decode rows wait: before each step every row has the page of its next token, and a row
      that waits needs no other. So a step of prompts alone never undoes what an earlier one did.
    - Admission and preemption do not chase each other: a request, new or resumed, is let in only where one page for
      each running one is left over, so all rows can pass their next page border before any loses its place. One that
      finds nobody running is let in without, so there always is one that goes on.
    - Priorities order prompts and victims; decode rows wait alike, whatever theirs. A row may end while it waits
      (abort, stop string): it gives back row and pages as ever. Its tokens on the way under overlap stay counted, and
      drafts made for it stay good, as nothing of the row moves.
"""

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush

from graphrunner.core.request import Request

AGEING_STEPS = 64
"""Steps of waiting that weigh as much as one level of priority."""

OrderKey = tuple[int, int, int]
Order = Callable[[Request, int], OrderKey]


def by_age(request: Request, remaining_len: int) -> OrderKey:
    """Sort key of the half that goes by age; constant while a request lives."""
    return request.priority * AGEING_STEPS + request.queued_step, request.arrival_index, 0


def by_length(request: Request, remaining_len: int) -> OrderKey:
    """Sort key of the half that goes to the shortest remaining prompt."""
    return request.priority, remaining_len, request.arrival_index


def split_budget(num_tokens: int, step_id: int) -> tuple[int, int]:
    """(by age, by length) shares of a prompt budget; an odd token changes sides every step."""
    by_age_share = (num_tokens + (step_id & 1)) // 2
    return by_age_share, num_tokens - by_age_share


def most_steps_waited(max_num_running: int, max_model_len: int, token_budget: int) -> int:
    """How many steps of prompts decode rows wait for, where prompts go first: those that fill each row's context."""
    return -(-max_num_running * max_model_len // token_budget)


def choose_victim(running: Iterable[Request]) -> Request:
    """The running request that gives up its pages: worst priority, then latest arrival."""
    return max(running, key=lambda request: (request.priority, request.arrival_index))


class WaitingQueue:
    """Requests without pages, in both orders of the policy. Adding and removing cost O(log n), looking O(1)."""

    def __init__(self) -> None:
        self._live: dict[Request, int] = {}  # request -> its ticket; heap entries with another ticket are stale
        self._num_tickets = 0
        self._heaps: dict[Order, list[tuple[OrderKey, int, Request]]] = {by_age: [], by_length: []}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, request: object) -> bool:
        return request in self._live

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live)

    def add(self, request: Request) -> None:
        """Enter a new or a preempted request."""
        assert request not in self._live, f"request {request.request_id} is queued twice"
        self._num_tickets += 1
        self._live[request] = self._num_tickets
        for order, heap in self._heaps.items():
            heappush(heap, (order(request, request.num_tokens), self._num_tickets, request))

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._live[request]
        for heap in self._heaps.values():
            if len(heap) > 2 * len(self._live) + 16:  # stale entries keep requests alive
                heap[:] = [entry for entry in heap if self._live.get(entry[2]) == entry[1]]
                heapify(heap)

    def first(self, order: Order) -> Request | None:
        """The request that is first in `order`; it stays in the queue."""
        heap = self._heaps[order]
        while heap and self._live.get(heap[0][2]) != heap[0][1]:
            heappop(heap)
        return heap[0][2] if heap else None
