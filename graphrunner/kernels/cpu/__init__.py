"""Owns: the C++ kernels of the CPU, their build into the user's cache, and the Python surface `ops`.
May import: kernels.reference, config, telemetry, core.
Must not contain: model code, attention metadata; a build at import (the first call builds).
"""
