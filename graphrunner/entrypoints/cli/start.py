"""The first lines of the command: as little as possible comes before Ctrl-C is in good hands."""

import signal
import sys

EXIT_INTERRUPTED = 130


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback at any moment."""
    # While modules load there is nothing to clean up, and no place where a KeyboardInterrupt could be caught well.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        from graphrunner.entrypoints.cli.main import app

        signal.signal(signal.SIGINT, signal.default_int_handler)
    else:
        from graphrunner.entrypoints.cli.main import app
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
