"""Executors of runs: one interface, modelled on `concurrent.futures.Executor`.

`completed` gives calls to an executor, a few at a time, and returns them as they end.
"""

import multiprocessing
import os
import signal
import threading
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from contextlib import contextmanager
from typing import Any, TypeVar

from twinserve.errors import worded
from twinserve.sim.setup.config import SettingsError

Key = TypeVar("Key")


MOST = 1000  # seeds, processes


class Workers(Executor):
    """An executor whose calls can be cancelled.

    window  calls to submit at once, so that no worker waits for the next one
    """

    window: int

    @abstractmethod
    def stop(self) -> None:
        """Cancel all calls at once, without their results."""

    def restart(self) -> None:
        """Make the executor usable again after a BrokenExecutor."""


class InThisProcess(Workers):
    """Run each call when submitted."""

    window = 1

    def submit(self, fn: Callable, /, *args, **kwargs) -> Future:
        future: Future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future

    def stop(self) -> None:
        pass


class LocalProcesses(Workers):
    """Processes on this machine. Spawned: forked ones would inherit a progress bar's threads."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.window = 2 * workers + 2
        self._others = set(multiprocessing.active_children())
        self._pool: ProcessPoolExecutor | None = None

    def submit(self, fn: Callable, /, *args, **kwargs) -> Future:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._workers, context, _begin)
        return self._pool.submit(fn, *args, **kwargs)

    def restart(self) -> None:
        self.stop()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait, cancel_futures=cancel_futures)
        self._pool = None

    def stop(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - self._others:
            worker.terminate()


def _begin() -> None:
    """Watch the parent in a worker, which would otherwise wait for ever after the parent is killed.
    The parent alone handles Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a worker"

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class RayWorkers(Workers):
    """A Ray cluster: that of RAY_ADDRESS, else one on this machine with `workers` processes that
    ends with this process. Raises SettingsError if Ray is missing or cannot be reached."""

    def __init__(self, workers: int) -> None:
        try:
            import ray
        except ImportError:
            raise SettingsError(
                "--executor ray needs Ray, which is not installed; pip install 'twinserve[ray]'"
            ) from None
        address = os.environ.get("RAY_ADDRESS")
        where: dict[str, Any] = {"address": address} if address else {"num_cpus": workers}
        if not address:
            where["include_dashboard"] = False
        before = signal.getsignal(signal.SIGTERM)
        try:
            ray.init(**where, log_to_driver=False, logging_level="error")
        except (ConnectionError, RuntimeError, ValueError, OSError) as error:
            raise SettingsError(
                f"--executor ray: no cluster at {address or 'this machine'} "
                f"({worded(error)}); check RAY_ADDRESS and `ray status`"
            ) from None
        signal.signal(signal.SIGTERM, before)  # Ray has put its own there
        self._ray = ray
        self._tasks: dict[Callable, Any] = {}
        self._calls: set[Any] = set()
        self.window = 2 * max(1, int(ray.cluster_resources().get("CPU", workers))) + 2

    def submit(self, fn: Callable, /, *args, **kwargs) -> Future:
        if fn not in self._tasks:
            # a call that takes its process down would do so again
            self._tasks[fn] = self._ray.remote(max_retries=0, num_cpus=1)(fn)
        call = self._tasks[fn].remote(*args, **kwargs)
        self._calls.add(call)
        future = call.future()
        future.add_done_callback(lambda _: self._calls.discard(call))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            for call in list(self._calls):
                self._ray.cancel(call, force=True)
        self._ray.shutdown()

    def stop(self) -> None:
        self.shutdown(wait=False, cancel_futures=True)


def check_count(name: str, given: int | None) -> None:
    """Raise SettingsError, with the flag, for a number outside 1 to `MOST`. None: the default."""
    if given is not None and not (isinstance(given, int) and 1 <= given <= MOST):
        raise SettingsError(f"{name} {given}: must be from 1 to {MOST}")


def local(workers: int | None, calls: int) -> Workers:
    """Return an executor for `calls`. workers: processes; None: one a core; 1: this one."""
    workers = min(workers or os.cpu_count() or 1, calls)
    return InThisProcess() if workers < 2 else LocalProcesses(workers)


def processes(workers: int | None, calls: int) -> Workers:
    """Return an executor outside this process, so that a crash ends no other call."""
    return LocalProcesses(max(1, min(workers or os.cpu_count() or 1, calls)))


@contextmanager
def at_work(workers: Workers) -> Iterator[Workers]:
    """Shut the executor down at the end; cancel its calls after an error."""
    try:
        yield workers
    except BaseException:
        workers.stop()
        raise
    workers.shutdown()


def completed(
    workers: Workers, work: Callable, calls: Mapping[Key, Sequence]
) -> Iterator[tuple[Key, Future]]:
    """Yield work(*arguments) of every call as they end, in any order, then shut `workers` down.

    A call that ends its worker process gives BrokenExecutor. The calls that ran at the same time
    are called again one by one, so that only this one is lost.
    """
    todo = deque(calls)
    running: dict[Future, Key] = {}
    try:
        while todo or running:
            try:
                while todo and len(running) < workers.window:
                    running[workers.submit(work, *calls[todo[0]])] = todo[0]
                    todo.popleft()
            except BrokenExecutor:
                if not running:  # an idle worker ended; else those that run say so as well
                    workers.restart()
                    continue
            broken = []
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                key = running.pop(future)
                if isinstance(future.exception(), BrokenExecutor):
                    broken.append(key)
                else:
                    yield key, future
            if broken:
                workers.restart()
                yield from _alone(workers, work, calls, [*broken, *running.values()])
                running.clear()
    except BaseException:
        workers.stop()
        raise
    workers.shutdown()


def _alone(
    workers: Workers, work: Callable, calls: Mapping[Key, Sequence], suspects: Sequence[Key]
) -> Iterator[tuple[Key, Future]]:
    for key in suspects:
        future = workers.submit(work, *calls[key])
        wait([future])
        if isinstance(future.exception(), BrokenExecutor):
            workers.restart()
        yield key, future
