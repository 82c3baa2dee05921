"""The last step of building a `ForwardBatch`: what its attention backend prepares for it."""

from dataclasses import replace

from graphrunner.core.forward_batch import ForwardBatch


def with_metadata(batch: ForwardBatch) -> ForwardBatch:
    """The batch with its attention metadata set. Host work, outside of any graph."""
    return replace(batch, attention_metadata=batch.attention.prepare_metadata(batch))
