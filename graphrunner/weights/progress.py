"""The progress bar of loading, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with (bytes read so far, bytes in all, name of the tensor just read).
OnProgress = Callable[[int, int, str], None]


@contextmanager
def progress_bar(title: str, *, is_shown: bool = True) -> Iterator[OnProgress | None]:
    """A rich progress bar for `iterate_weights(on_progress=...)`; yields None when it is not to be shown."""
    if not is_shown:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=None)

        def on_progress(done_bytes: int, total_bytes: int, name: str) -> None:
            progress.update(task, completed=done_bytes, total=total_bytes)

        yield on_progress
