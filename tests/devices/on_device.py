"""The conformance suite of executors with one worker of the host and one of a device, also without pytest.

    python -m tests.devices.on_device cuda:0      # a line of JSON per test: its name, its outcome, seconds

A device gives the host's values up to the rounding of its own products, so outputs are compared within `NEAR`.
"""

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.helpers.executor_suite import ExecutorConformance

from actmat.engine.executors.base import Executor
from actmat.engine.executors.threads import ThreadExecutor
from actmat.engine.inputs import Inputs
from actmat.engine.observer import Writer
from actmat.engine.resources import Resources

NEAR = 1e-3
"""Largest relative difference of a tensor that is stored in float32 or half precision."""


class OneDevice(ExecutorConformance):
    """Threads on the host and on `device`, whose bytes are the host's if it is simulated (`cpu:0`)."""

    workers = 2
    device = "cpu:0"

    def make(self, inputs: Inputs, writers: Sequence[Writer | None], resources: Resources) -> Executor:
        return ThreadExecutor(inputs, writers, Resources(1, resources.memory, self.device))


def main(device: str) -> None:
    """Run every test on the device and print its outcome."""
    tests = OneDevice()
    OneDevice.device, OneDevice.near = device, 0.0 if device.startswith("cpu") else NEAR
    for name in sorted(n for n in dir(tests) if n.startswith("test_")):
        began, outcome = time.perf_counter(), "passed"
        with tempfile.TemporaryDirectory() as folder:
            try:
                getattr(tests, name)(Path(folder))
            except Exception as error:  # noqa: BLE001 - a test that fails is a result
                traceback.print_exc()
                outcome = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps({"test": name, "outcome": outcome, "seconds": time.perf_counter() - began}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
