"""The `n` outputs of a request as sequences of their own: their ids and seeds."""

_MASK64 = (1 << 64) - 1
_SEED_MASK = (1 << 62) - 1


def sequence_ids(request_id: str, n: int) -> list[str]:
    """One id an output; a single output has the request's own."""
    return [request_id] if n == 1 else [f"{request_id}#{k}" for k in range(n)]


def sequence_seeds(seed: int, n: int) -> list[int]:
    """One seed an output: the first keeps the request's own."""
    return [_mixed(_mixed(seed) + k) if k else seed for k in range(n)]


def _mixed(seed: int) -> int:
    """A seed that has nothing to do with its neighbours. Source: the finaliser of splitmix64 (Steele et al. 2014)."""
    mixed = (seed + 0x9E3779B97F4A7C15) & _MASK64
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (mixed ^ (mixed >> 31)) & _SEED_MASK
