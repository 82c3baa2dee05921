"""A layer's launches are told apart by their place, and charged once."""

from verify_step import LAYER_MARK, Place, layer_places


def test_places_of_a_layer_are_means_over_its_repetitions() -> None:
    layer = [(0, 2000, LAYER_MARK), (1000, 3000, "product"), (3500, 4000, "product")]
    events = [(0, 500, "embedding")]
    events += [(base + start, base + end, name) for base in (1000, 6000) for start, end, name in layer]
    events.append((11000, 12000, LAYER_MARK))
    assert layer_places(events) == [Place(LAYER_MARK, 2.0, 2.0), Place("product", 1.0, 2.0), Place("product", 0.5, 0.5)]


def test_steps_without_layers_have_no_places() -> None:
    assert layer_places([]) == layer_places([(0, 1, "cpu_linear")]) == []
