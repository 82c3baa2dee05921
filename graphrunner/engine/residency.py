"""What an engine holds on its device: brought there at start-up, given back by `sleep`, restored by `wake`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from graphrunner.config.engine_config import CacheConfig, SchedulerConfig
from graphrunner.core.errors import ConfigError, EngineStateError
from graphrunner.core.sleep_level import SleepLevel
from graphrunner.engine.graph_forecast import GraphForecast
from graphrunner.engine.largest_step import rehearse_prompts, run_largest_steps
from graphrunner.engine.memory_plan import DeviceMemory, estimated_graph_bytes, plan_device_pages
from graphrunner.engine.model_runner import ModelRunner
from graphrunner.kvcache.pool import KVPool
from graphrunner.runner.base_graph_runner import BaseGraphRunner
from graphrunner.telemetry.log import get_logger
from graphrunner.telemetry.startup import StartupClock
from graphrunner.weights.offload import ModelMemory

log = get_logger(__name__)


class Residency:
    """Weights, graphs and KV pages, in the order in which they may be measured: the pages take what is left.

    Args:
        cache, limits: the settings.
        memory: of the loaded model.
        pool: opened for the dummy page only, where the device lets it grow.
        model_runner: with nothing recorded.
        reload: reads the checkpoint into the model's tensors.
    """

    def __init__(
        self,
        cache: CacheConfig,
        limits: SchedulerConfig,
        memory: ModelMemory,
        pool: KVPool,
        model_runner: ModelRunner,
        reload: Callable[[], None],
    ) -> None:
        self.pool = pool
        self._cache, self._limits = cache, limits
        self._memory = memory
        self._model_runner = model_runner
        self._reload = reload
        self._level: SleepLevel | None = None
        self._problem = ""
        self._is_closed = False

    @property
    def is_asleep(self) -> bool:
        """Whether `wake` must be called before anything can run."""
        return self._level is not None

    def check_ready(self) -> None:
        """Raise EngineStateError when nothing can run."""
        self.check_awake()
        if self._problem:
            raise EngineStateError(f"the weights are not whole ({self._problem}): reload them first")

    def check_open(self) -> None:
        """Raise EngineStateError after `close`."""
        if self._is_closed:
            raise EngineStateError("the engine is closed: make another")

    def check_awake(self) -> None:
        """Raise EngineStateError while asleep, and after `close`."""
        self.check_open()
        if self.is_asleep:
            raise EngineStateError("the engine is asleep: wake it first")

    def settle(self, clock: StartupClock, rehearsal: AbstractContextManager[None] | None = None) -> None:
        """Record graphs, then size the pool from what is free.

        Args:
            rehearsal: inside, kernels are compiled and not run; None compiles them as they are met.

        Raises:
            ConfigError: the settings leave no room for KV pages.
        """
        device, runners = self.pool.device, self._model_runner.graph_runners
        step_bytes = 0
        if rehearsal is not None:
            self._rehearse(rehearsal)
            device.trim()
            clock.lap("kernels")
        if device.has_own_memory:
            gc.collect()  # recordings do not, and what garbage holds of the device would be held all through
            step_bytes = device.peak_bytes(lambda: run_largest_steps(self._model_runner, self._limits))
            device.trim()
            clock.lap("largest step")
        num_late = sum(len(list(runner.all_keys())) for runner in runners if runner.is_lazy)
        for runner in runners:
            forecast = GraphForecast(device.used_bytes, len(list(runner.all_keys())))
            _capture([runner], forecast.recorded)
            device.trim()
            clock.lap(f"capture, {runner.name}", forecast.estimated_bytes if device.has_own_memory else None)
        if device.has_own_memory and self.pool.can_grow:
            self._size_pool(step_bytes + estimated_graph_bytes(num_late, step_bytes))
            clock.lap("KV pages", self.pool.num_bytes)

    def sleep(self, level: SleepLevel) -> None:
        """Give the device's memory back. Nothing may be running. Asleep already: stays as it is."""
        self.check_open()
        if self.is_asleep:
            return
        self._level = level
        self._give_back()

    def wake(self) -> None:
        """Restore what `sleep` gave back. Awake already: nothing happens.

        Raises:
            EngineStateError: the device has not the memory any more, and the engine is still asleep; or it is closed.
            ModelLoadError: the weights were dropped and cannot be read; the engine is still asleep.
        """
        self.check_open()
        if self._level is None:
            return
        try:
            self._memory.restore()
            if self._level is SleepLevel.DROP:
                self._reload()
            self.pool.reopen()
            if self.pool.device.has_own_memory:
                gc.collect()
            _capture(self._model_runner.graph_runners)
            self.pool.commit(self.pool.num_pages)
        except (MemoryError, torch.OutOfMemoryError) as cause:
            self._give_back()
            free, reason = self.pool.device.free_bytes() >> 20, str(cause).partition("\n")[0]
            problem = f"the device has not the memory to wake up, {free} MiB are free: {reason}"
            raise EngineStateError(problem) from cause
        except BaseException:  # a checkpoint that cannot be read; Ctrl-C: half awake is nothing to go on with
            self._give_back()
            raise
        self._level = None

    def reload_weights(self) -> None:
        """Read the checkpoint again, in place. Graphs stay. Nothing may be running.

        Raises:
            ModelLoadError: it cannot be read; nothing runs until a reload succeeds, nor after any other error.
        """
        self.check_awake()
        try:
            self._reload()
        except BaseException as error:  # half of them may be new
            self._problem = str(error) or type(error).__name__
            raise
        self._problem = ""

    def close(self) -> None:
        """Give graphs and pages back. Idempotent."""
        self._is_closed = True
        self._model_runner.close()
        self.pool.release()

    def _rehearse(self, rehearsal: AbstractContextManager[None]) -> None:
        try:
            with rehearsal:
                run_largest_steps(self._model_runner, self._limits)
                for runner in self._model_runner.graph_runners:
                    runner.rehearse()
                rehearse_prompts(self._model_runner, self._limits)
        except Exception as cause:
            log.warning("kernels are compiled one by one, as they are met: %s: %s", type(cause).__name__, cause)

    def _give_back(self) -> None:
        self.pool.device.synchronize()  # the last step may have run ahead of its requests' end
        self._model_runner.release_graphs()
        self.pool.release()
        if self._level is SleepLevel.DROP:
            self._memory.drop_loaded()
        else:
            self._memory.move_to_host()
        self.pool.device.trim()

    def _size_pool(self, activation_bytes: int) -> None:
        device, pool = self.pool.device, self.pool
        committed = pool.committed_bytes(1)
        memory = DeviceMemory(device.total_bytes(), device.used_bytes(), committed, activation_bytes)
        num_pages = plan_device_pages(self._cache, memory, pool.fitting_pages)
        try:
            pool.commit(num_pages)
        except MemoryError as cause:
            share = self._cache.gpu_memory_utilization
            raise ConfigError("gpu_memory_utilization", share, f"{num_pages} KV pages: {cause}") from cause


def _capture(runners: Sequence[BaseGraphRunner], on_recorded: Callable[[int], None] = lambda count: None) -> None:
    """Record under a progress bar on stderr, when that is a terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(transient=True, disable=not console.is_terminal, console=console) as progress:
        task = progress.add_task("capturing", total=None)

        def show(name: str, num_done: int, num_all: int) -> None:
            progress.update(task, description=name, completed=num_done, total=num_all)
            on_recorded(num_done)

        for runner in runners:
            runner.capture(show)
