"""The executor of devices, on simulated ones of bounded memory, through the shipped conformance suite and beyond it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from actmat.engine.devices.device import SimulatedDevice
from actmat.engine.executors.base import Executor
from actmat.engine.executors.conformance import ExecutorConformance
from actmat.engine.executors.devices import DeviceExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import SinkSource
from actmat.engine.resources import Resources


class TestOneDevice(ExecutorConformance):
    devices: ClassVar[int] = 1
    workers = 2
    device = "cpu:0"

    def make(self, inputs: Inputs, writers: Sequence[SinkSource], resources: Resources) -> Executor:
        devices = [SimulatedDevice(f"cpu:{n}", 64 << 20) for n in range(self.devices)]
        return DeviceExecutor(inputs, writers, Resources(1, resources.memory, self.device), devices)


class TestTwoDevices(TestOneDevice):
    devices = 2
    device = "cpu:0,1"


class TestThreeDevices(TestOneDevice):
    devices = 3
    device = "cpu:0,1,2"
