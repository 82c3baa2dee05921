"""Prompts of three kinds: chat, stories, and texts whose answer repeats the question."""

_REPORT = (
    "The Amber Line is a tram line that links the harbour with the university hospital. It opened in 1987 with nine "
    "stops and was extended in 2004 to the airport. The line carries 41,000 passengers on a working day. Trams run "
    "every six minutes until nine in the evening and every fifteen minutes afterwards. The depot is in the district of "
    "Norrvik, next to the old rope factory. In 2019 the city ordered twenty new trams, which have low floors and room "
    "for wheelchairs."
)
_RECIPE = (
    "Soak 200 grams of dried chickpeas overnight. Drain them, cover them with fresh water and cook them for an hour. "
    "Keep a cup of the cooking water. Blend the chickpeas with the juice of two lemons, three spoons of sesame paste, "
    "a clove of garlic and a pinch of salt. Add the cooking water spoon by spoon until the paste is smooth."
)

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "What should I look at when I buy a used bicycle?",
        "Explain to a ten-year-old why the sky is blue.",
        "How do I get a red wine stain out of a white shirt?",
    ),
    "story": (
        "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
        "Write a short story about two neighbours who share one key.",
        "Write a short story about a train that is never late.",
    ),
    "summary": (
        f"Copy the most important sentences of this text as a summary, word by word:\n\n{_REPORT}",
        f"Write this recipe as numbered steps, using the words of the text:\n\n{_RECIPE}",
        f"Repeat this text exactly:\n\n{_REPORT}",
    ),
}
