"""docs/add-a-proposer.md, word for word, is examples/toy_proposer.py, and it works."""

import re
from pathlib import Path

from engine_driver import generate, greedy, prompts_of

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_the_example() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "add-a-proposer.md").read_text(), re.S)
    source = (ROOT / "examples" / "toy_proposer.py").read_text()
    assert [line for block in blocks for line in block.splitlines() if line] == list(filter(None, source.splitlines()))
    assert len(source.splitlines()) < 60


def test_same_tokens_and_some_drafts_stand(make_llm, solo) -> None:
    llm = make_llm(speculative_config={"method": "toy_proposer", "num_speculative_tokens": 3, "adaptive": False})
    prompts = [*prompts_of([9, 20]), [5, 6, 7] * 8]
    assert generate(llm, prompts, greedy(40)) == [solo(prompt, 40) for prompt in prompts]
    assert sum(step.num_drafts for step in llm.steps) > 0
    shared = prompts[0] + solo(prompts[0], 30)
    assert generate(llm, [shared], greedy(20)) == [solo(shared, 20)]
    assert sum(step.num_accepted for step in llm.steps) > 0
