"""A device that stops at a step. Loaded by service children through an entry point that the tests write.

NNBURST_TEST_STOP names the step: prepare, restore, supported, execute, burst, plan; NNBURST_TEST_FIFO the pipe that is
told when it is reached. NNBURST_TEST_HOW says what happens there: "wait", "spin", which holds the interpreter lock for
ever, or "exit", which ends the process with status 7 and tells nothing.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from typing import Any

from nnburst.burst import BurstCallback, BurstContext, BurstExecutorWithCache, Kernel
from nnburst.devices import Device, PreparedModel
from nnburst.errors import ErrorStatus
from nnburst.memory import Memory
from nnburst.model import NO_TIMING, Capabilities, MeasureTiming, Model, Request


def stop_at(step: str) -> None:
    if os.environ.get("NNBURST_TEST_STOP") != step:
        return
    if os.environ.get("NNBURST_TEST_HOW") == "exit":
        os._exit(7)
    with open(os.environ["NNBURST_TEST_FIFO"], "wb", buffering=0) as fifo:
        fifo.write(b"!")
    if os.environ.get("NNBURST_TEST_HOW") == "spin":
        sum(range(10**15))  # one call into C that never lets go of the interpreter lock
    threading.Event().wait()


class HookExecutor(BurstExecutorWithCache):
    def __init__(self) -> None:
        self.memories: dict[int, Memory] = {}

    def is_cache_entry_present(self, slot: int) -> bool:
        return slot in self.memories

    def add_cache_entry(self, memory: Memory, slot: int) -> None:
        self.memories[slot] = memory

    def remove_cache_entry(self, slot: int) -> None:
        self.memories.pop(slot, None)

    def bind(self, request: Request, slots: Sequence[int], measure: MeasureTiming) -> Kernel:
        return lambda: stop_at("plan")


class HookModel(PreparedModel):
    def execute_synchronously(self, request: Request, *_: Any) -> Any:
        stop_at("execute")
        return ErrorStatus.NONE, (), NO_TIMING

    def configure_execution_burst(self, callback: BurstCallback, *rest: Any) -> BurstContext:
        stop_at("burst")
        return super().configure_execution_burst(callback, *rest)

    def burst_executor(self) -> BurstExecutorWithCache:
        return HookExecutor()


class HookDevice(Device):
    @property
    def name(self) -> str:
        return "test-hooks"

    @property
    def version_string(self) -> str:
        return "1"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities()

    def get_supported_operations(self, model: Model) -> tuple[bool, ...]:
        stop_at("supported")
        return (True,) * len(model.main.operations)

    def get_number_of_cache_files_needed(self) -> tuple[int, int]:
        return 1, 1

    def prepare_model_from_cache(self, *_: Any) -> PreparedModel:
        stop_at("restore")
        return HookModel()

    def prepare_model(self, model: Model, *_: Any) -> PreparedModel:
        stop_at("prepare")
        logging.getLogger("test-hooks").warning("this device has warned")
        logging.getLogger("test-hooks").info("this device has informed")
        return HookModel()
