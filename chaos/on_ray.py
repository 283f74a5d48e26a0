"""Merges on a Ray cluster of two nodes, whose workers, second node or driver are killed.

    python -m chaos --ray --runs 20

The merge has 60 tensors. A fault strikes when a random number of them is done, by the journal. A killed worker or node
costs the merge nothing but time; after the driver is killed, the same command goes on. The files must be those of an
undisturbed merge on the cluster, and the weights those of one by threads.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from actmat.checkpoints.writing.staging import JOURNAL_NAME, sibling
from chaos.sorts import contents, leftovers, save_checkpoints, weights

LABEL = "model, ray"
KINDS = ("worker", "node", "driver")
"""What is killed."""
TENSORS, WIDTH = 60, 256
NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "memory": 4 << 30}
ENVIRONMENT = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on 127.0.0.1 only
    "RAY_raylet_start_wait_time_s": "300",  # a busy machine is no defect
    "RAY_agent_register_timeout_ms": "300000",
}
LONGEST = 300.0
"""Seconds of one merge."""
DRIVER = [sys.executable, "-c", "from actmat.cli.main import main; main()"]


class RayChaos:
    """A cluster of two nodes on this machine, and the files of an undisturbed merge."""

    def __init__(self, root: Path) -> None:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from ray._private import services
        from ray.cluster_utils import Cluster

        services.get_node = _patient(services.get_node)
        self.root = root
        rng, names = torch.Generator().manual_seed(0), [f"model.layers.{i}.up_proj.weight" for i in range(TENSORS)]
        save_checkpoints(root, {name: torch.randn(WIDTH, WIDTH, generator=rng) for name in names}, rng)
        before = signal.getsignal(signal.SIGTERM)
        self.cluster: Any = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
        self.second = self.cluster.add_node(**NODE)
        self.cluster.wait_for_nodes()
        signal.signal(signal.SIGTERM, before)  # Ray puts one of its own there
        code, said = self.end(self.start(root / "threads", "threads"))
        assert code == 0, said
        code, said = self.end(self.start(root / "out"))
        assert code == 0, said
        self.expected = contents(root / "out")
        assert weights(self.expected) == weights(contents(root / "threads"))
        shutil.rmtree(root / "out")

    def close(self) -> None:
        """End the cluster."""
        self.cluster.shutdown()

    def start(self, out: Path, executor: str = "") -> subprocess.Popen[str]:
        """A driver."""
        argv = ["merge", "-b", str(self.root / "base"), "-e", str(self.root / "one"), "-e", str(self.root / "two")]
        argv += [
            "-m",
            "ties",
            "--out",
            str(out),
            "--quiet",
            "--set",
            f"executor={executor or f'ray={self.cluster.address}'}",
        ]
        return subprocess.Popen([*DRIVER, *argv], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    @staticmethod
    def end(driver: subprocess.Popen[str]) -> tuple[int, str]:
        """Exit code and errors of a driver; one that hangs is killed."""
        try:
            _, said = driver.communicate(timeout=LONGEST)
        except subprocess.TimeoutExpired:
            driver.kill()
            return driver.wait(), f"it hung for {LONGEST:.0f} s"
        return driver.returncode, said

    def done(self) -> int:
        """Tensors that are in the journal of the unfinished merge."""
        try:
            return (sibling(self.root / "out", "partial") / JOURNAL_NAME).read_bytes().count(b"\n")
        except OSError:
            return 0

    def workers(self) -> list[int]:
        """Processes of the cluster that merge; each is a child of a node's daemon, which is a child of this process.

        Not the agents of a daemon, which ends with them.
        """
        daemons = set(_children(os.getpid()))
        found = (p for d in daemons for p in _children(d))
        titles = {p: _title(p) for p in found}
        return sorted(p for p, t in titles.items() if t.startswith("ray::") and "IDLE" not in t and "Agent" not in t)

    def strike(self, kind: str, driver: subprocess.Popen[str], rng: random.Random) -> None:
        """Kill one of a kind."""
        if kind == "driver":
            driver.kill()
        elif kind == "node":
            self.cluster.remove_node(self.second, allow_graceful=False)
        elif found := self.workers():
            os.kill(rng.choice(found), signal.SIGKILL)

    def run(self, kind: str, rng: random.Random) -> tuple[int, list[str]]:
        """Disturb a merge once, or a worker or a driver up to twice; number of faults, and what is wrong."""
        out, problems, faults = self.root / "out", list[str](), 0
        driver = self.start(out)
        for _ in range(1 if kind == "node" else rng.randint(1, 2)):
            number = rng.randrange(TENSORS)
            if not _wait(lambda n=number: self.done() >= n and bool(self.workers()), driver):  # type: ignore[misc]
                break
            self.strike(kind, driver, rng)
            faults += 1
            if kind == "driver":
                self.end(driver)
                driver = self.start(out)
        code, said = self.end(driver)
        if code != 0:
            problems.append(f"exit code {code}: {said[-2000:]}")
        elif contents(out) != self.expected:
            found = contents(out)
            problems.append(f"other bytes: {sorted(n for n in self.expected if found.get(n) != self.expected[n])}")
        if left := leftovers(self.root):
            problems.append(f"left: {left}")
        if kind == "node":
            self.second = self.cluster.add_node(**NODE)
        shutil.rmtree(out, ignore_errors=True)
        return faults, [f"{LABEL}, {kind}: {p}" for p in problems]


def _patient(request: Callable[..., Any]) -> Callable[..., Any]:
    """A request for a node that is starting, which Ray gives up after 30 seconds: a busy machine is no defect."""

    def asked(*arguments: Any) -> Any:
        deadline = time.monotonic() + LONGEST
        while True:
            try:
                return request(*arguments)
            except RuntimeError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.5)

    return asked


def _wait(is_due: Callable[[], bool], driver: subprocess.Popen[str]) -> bool:
    """Wait for a moment; False if the driver ends before."""
    deadline = time.monotonic() + LONGEST
    while driver.poll() is None and time.monotonic() < deadline:
        if is_due():
            return True
        time.sleep(0.005)
    return False


def _children(process: int) -> list[int]:
    try:
        tasks = list(Path(f"/proc/{process}/task").iterdir())
        return [int(p) for task in tasks for p in (task / "children").read_text().split()]
    except OSError:
        return []


def _title(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().decode("utf-8", "replace")
    except OSError:
        return ""
