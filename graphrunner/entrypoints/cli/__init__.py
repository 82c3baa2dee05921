"""Owns: the command line: flags from the configuration, one file a command.
May import: everything; what is slow to import only inside the command that needs it.
Must not contain: device work, HTTP handlers, engine logic."""
