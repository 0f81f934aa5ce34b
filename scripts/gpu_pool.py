"""Tasks in processes of their own: each process takes the next task until there is none."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

NOT_REACHED, NOT_DONE = "not reached in time", "not done in time"
LATE = ([NOT_REACHED], [NOT_DONE])  # the failures of a task for which there was no time
Found = dict[str, object]  # what a task says: at least "task" and "failures"
# Between asking the processes to end and their end, in seconds.
GRACE = 5.0


def run(names: Iterable[str], command: Sequence[str], count: int, seconds: float) -> list[Found]:
    """What `count` processes find out about tasks, of which each reads names, one at a time.

    A task whose process ends has failed, and so has one that is not done after so many seconds.
    """
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in names:
        waiting.put(name)
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(count) as pool:
        lists = pool.map(lambda _: list(_worker(waiting, command, end)), range(count))
        return [found for one in lists for found in one]


def _worker(waiting: queue.SimpleQueue, command: Sequence[str], end: float) -> Iterable[Found]:
    """Hand tasks to a process; to a new one where it ended in the middle of one."""
    process = None
    while True:
        try:
            name = waiting.get_nowait()
        except queue.Empty:
            break
        if time.monotonic() >= end:
            yield _failed(name, NOT_REACHED)
            continue
        if process is None:
            process, timer = _start(command, end)
        found = _ask(process, name)
        if found is None or found.pop("last", False):
            code = process.wait()
            timer.cancel()
            late = time.monotonic() >= end
            reason = NOT_DONE if late else f"its process ended with {code}"
            process = None
        yield found or _failed(name, reason)
    if process is not None:
        process.stdin.close()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        timer.cancel()


def _start(command: Sequence[str], end: float) -> tuple[subprocess.Popen, threading.Timer]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **pipes)
    timer = threading.Timer(max(0.0, end - time.monotonic()), process.kill)
    timer.daemon = True
    timer.start()
    return process, timer


def _ask(process: subprocess.Popen, name: str) -> Found | None:
    """The answer of a process; None if it ends without one. What else it prints is dropped."""
    try:
        process.stdin.write(name + "\n")
        process.stdin.flush()
    except OSError:
        return None
    for line in iter(process.stdout.readline, ""):
        if line.startswith('{"task"'):
            return json.loads(line)
    return None


def _failed(name: str, reason: str) -> Found:
    return {"task": name, "failures": [reason]}


def answer(tasks: dict[str, Callable[[], Found]], healthy: Callable[[], bool]) -> None:
    """Of a process: do the tasks that it is asked for, and print what is found on a line each.

    Where the process is no longer healthy afterwards, this was its last one.
    """
    for line in sys.stdin:
        name, begin = line.rstrip("\n"), time.monotonic()
        try:
            found = tasks[name]()
        except Exception as error:
            traceback.print_exc()
            found = {"failures": [said(error)]}
        found |= {"seconds": round(time.monotonic() - begin, 1)}
        found |= {} if healthy() else {"last": True}
        print(json.dumps({"task": name, **found}), flush=True)
        if "last" in found:
            return


def said(error: Exception) -> str:
    """The kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
