"""Settings of speculative decoding; names as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from graphrunner.core.draft_tree import MAX_TREE_NODES, DraftTree, TreeGrowth, tree_from_paths
from graphrunner.core.errors import ConfigError
from graphrunner.core.sampling_params import MAX_SPECULATIVE_TOKENS

_DEFAULT_COUNT = 4
_DEFAULT_STEPS = 5
_LOOKUP_DEFAULTS = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
_WITHOUT_LOOKUP = ("draft_model", "eagle", "mtp", "frozen_kv_mtp")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and how many are verified.

    A field's help text stands under it; the command line and docs/speculative.md print it.
    """

    method: str = "ngram"
    """A name of `graphrunner.speculative.registry`, or the import path of a module with `create_proposer`."""
    num_speculative_tokens: int | None = None
    """Most draft tokens a request and round, 1 to 16. None is 4; with mtp as many as there are heads, with a tree as
    many as it has guesses."""
    model: str | None = None
    """Hub id, folder or file of the draft; None takes the one shipped for the target, where the method has one."""
    speculative_token_tree: str | None = None
    """eagle: which guesses to verify besides the likeliest: "[(0,), (1,), (0, 0)]" is the two likeliest next tokens and
    the likeliest one after the first of them. At most 7; None is one guess after the other."""
    speculative_eagle_topk: int | None = None
    """eagle: how many guesses after each guess are considered, 2 to 7; the `num_speculative_tokens` likeliest of all
    (at most 7, here the default) are verified, as a tree. None is one guess after the other."""
    speculative_num_steps: int | None = None
    """eagle, with `speculative_eagle_topk`: levels of the tree, 1 to 7. None is 5, or as many as there are drafts."""
    prompt_lookup_min: int = _LOOKUP_DEFAULTS["prompt_lookup_min"]
    """ngram: fewest tokens that must repeat before what followed them is proposed."""
    prompt_lookup_max: int = _LOOKUP_DEFAULTS["prompt_lookup_max"]
    """ngram: most tokens that are compared; the longest repeat wins."""
    adaptive: bool = True
    """Verify fewer drafts, or none, where measured step times and recent acceptance say that more would cost time."""
    disable_by_batch_size: int | None = None
    """Propose nothing while at least this many requests decode; None leaves it to `adaptive`."""

    def __post_init__(self) -> None:
        for name, default in _LOOKUP_DEFAULTS.items():
            _check_int(name, getattr(self, name), 1, MAX_SPECULATIVE_TOKENS)
            if self.method in _WITHOUT_LOOKUP and getattr(self, name) != default:
                problem = f"is for method ngram: method {self.method} looks nothing up"
                raise ConfigError(f"speculative_config.{name}", getattr(self, name), problem)
        if self.num_speculative_tokens is not None:
            _check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_SPECULATIVE_TOKENS)
        if self.speculative_token_tree is not None:
            self._take_tree()
        self._check_growth()
        if self.prompt_lookup_min > self.prompt_lookup_max:
            problem = f"must not exceed prompt_lookup_max={self.prompt_lookup_max}"
            raise ConfigError("speculative_config.prompt_lookup_min", self.prompt_lookup_min, problem)
        if not isinstance(self.method, str) or not self.method:
            raise ConfigError("speculative_config.method", self.method, "must be a name, as ngram")
        if self.model is not None and not isinstance(self.model, str):
            raise ConfigError("speculative_config.model", self.model, "must be a hub id or a path")
        if self.method == "ngram" and self.model is not None:
            problem = "method ngram has no draft: leave it out, or name the draft's method (eagle, mtp, draft_model)"
            raise ConfigError("speculative_config.model", self.model, problem)
        if not isinstance(self.adaptive, bool):
            raise ConfigError("speculative_config.adaptive", self.adaptive, "must be true or false")
        if self.disable_by_batch_size is not None:
            _check_int("disable_by_batch_size", self.disable_by_batch_size, 1, 1 << 31)

    @property
    def num_drafts(self) -> int:
        """Most drafts a request and round."""
        return self.num_speculative_tokens or _DEFAULT_COUNT

    @property
    def draft_tree(self) -> DraftTree | TreeGrowth | None:
        """`speculative_token_tree`, read, or what `speculative_eagle_topk` says; None without either."""
        if self.speculative_eagle_topk is not None:
            return TreeGrowth(self.num_drafts, self._num_levels, self.speculative_eagle_topk)
        return None if self.speculative_token_tree is None else tree_from_paths(self.speculative_token_tree)

    @property
    def _num_levels(self) -> int:
        return self.speculative_num_steps or min(_DEFAULT_STEPS, self.num_drafts)

    def _check_growth(self) -> None:
        """Check the tree that grows; without another number it has as many drafts as can be found and verified."""
        topk, steps = self.speculative_eagle_topk, self.speculative_num_steps
        if topk is None:
            if steps is not None:
                problem = "needs speculative_eagle_topk: without a tree there are as many steps as drafts"
                raise ConfigError("speculative_config.speculative_num_steps", steps, problem)
            return
        _check_int("speculative_eagle_topk", topk, 2, MAX_TREE_NODES)
        if self.method != "eagle" or self.speculative_token_tree is not None:
            problem = "is for method eagle, and stands instead of a speculative_token_tree"
            raise ConfigError("speculative_config.speculative_eagle_topk", topk, problem)
        most = MAX_TREE_NODES if self.num_speculative_tokens is None else self.num_speculative_tokens
        _check_int("num_speculative_tokens", most, 1, MAX_TREE_NODES)
        if steps is not None:
            _check_int("speculative_num_steps", steps, 1, most)
        if self.num_speculative_tokens is None:
            largest = TreeGrowth(most, steps or _DEFAULT_STEPS, topk)
            object.__setattr__(self, "num_speculative_tokens", min(most, largest.num_candidates))
        tree = self.draft_tree
        assert isinstance(tree, TreeGrowth)
        if tree.num_candidates < tree.num_nodes:
            problem = f"must be at most {tree.num_candidates}, all guesses of so few levels: or give a larger topk"
            raise ConfigError("speculative_config.num_speculative_tokens", tree.num_nodes, problem)

    def _take_tree(self) -> None:
        """Check the tree; it says how many drafts there are."""
        field, given = "speculative_config.speculative_token_tree", self.speculative_token_tree
        try:
            tree = tree_from_paths(self.speculative_token_tree or "")
        except ValueError as error:
            raise ConfigError(field, given, str(error)) from None
        if self.method != "eagle":
            problem = f"method {self.method} makes no trees; eagle does"
            raise ConfigError(field, given, problem)
        if self.num_speculative_tokens not in (None, len(tree.parents)):
            problem = f"the tree has {len(tree.parents)} drafts: leave this out, or give the same number"
            raise ConfigError("speculative_config.num_speculative_tokens", self.num_speculative_tokens, problem)
        object.__setattr__(self, "num_speculative_tokens", len(tree.parents))

    @classmethod
    def from_mapping(cls, given: Mapping[str, object]) -> "SpeculativeConfig":
        """From `speculative_config={...}`. Raises ConfigError, which names the field."""
        known = [field.name for field in fields(cls)]
        for name, value in given.items():
            if name not in known:
                raise ConfigError(f"speculative_config.{name}", value, f"unknown; known: {', '.join(known)}")
        return cls(**given)  # type: ignore[arg-type]


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"speculative_config.{name}", value, f"must be an integer from {low} to {high}")
