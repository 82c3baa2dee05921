"""A core process with a scripted engine in it: `python scripted_core.py [--load-s S] [--fail TEXT] [--num-steps N]`."""

import argparse
import time

from scripted_engine import FakeEngine
from stepping_engine import SteppingEngine

from graphrunner.config.engine_config import EngineConfig
from graphrunner.core.errors import ModelLoadError
from graphrunner.entrypoints.core_process.core_main import main


def build(config: EngineConfig) -> FakeEngine:
    time.sleep(arguments.load_s)
    if arguments.fail == "memory":
        raise MemoryError
    if arguments.fail is not None:
        raise ModelLoadError(arguments.fail)
    return FakeEngine() if arguments.num_steps is None else SteppingEngine(num_steps=arguments.num_steps)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--fail")
    parser.add_argument("--num-steps", type=int)
    arguments = parser.parse_args()
    main(build)
