"""`python -m graphrunner.entrypoints.core_process`: the engine core; started by the server, never by hand."""

from graphrunner.entrypoints.core_process.core_main import main

main()
