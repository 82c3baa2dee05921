"""The benchmark's tables end up in its page, and only there."""

from pathlib import Path

from speculative_report import table, write_page

RESULT = {
    "num_drafts": 4,
    "device": "a card",
    "text": [
        {
            "method": "ngram", "kind": "chat", "mean_accepted_length": 1.5, "acceptance_by_position": [0.5, 0.25],
            "tokens_per_round": 2.5, "tokens_per_s": 120.0, "plain_tokens_per_s": 100.0, "speedup": 1.2,
            "equal_outputs": 1.0,
        },
        {"method": "mtp", "error": "no time was left"},
    ],
    "shape": {
        "acceptance": 0.7,
        "is_8b": True,
        "rows": [
            {
                "batch": 1, "tokens_per_s": 210.0, "plain_tokens_per_s": 100.0, "speedup": 2.1,
                "mean_accepted_length": 1.7, "widths": {1: 3, 5: 9}, "host_us": 91.0,
            }
        ],
    },
}  # fmt: skip


def test_page_is_rewritten_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin -->\nold\n<!-- figures: end -->\nafter\n")
    for _ in range(2):
        write_page([RESULT], page)
    text = page.read_text()
    assert text.startswith("before\n<!-- figures: begin -->\n") and text.endswith("<!-- figures: end -->\nafter\n")
    assert "old" not in text and text.count("| ngram | chat | 1.50 | 2.50 | 0.50 0.25 | 120 | 100 | 1.20 | 100% |") == 1
    assert "mtp is not run: no time was left" in text
    assert "| 1 | 210 | 100 | 2.10 | 1.70 | 1: 3, 5: 9 | 91 |" in list(table(RESULT))
    real = (Path(__file__).resolve().parents[3] / "docs" / "speculative.md").read_text()
    assert real.count("<!-- figures: begin -->") == real.count("<!-- figures: end -->") == 1
