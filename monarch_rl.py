#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch==2.14.1", "transformers==5.24.0", "torchmonarch==0.7.0"]
# ///
"""monarch_rl: an asynchronous RL system for language models, in a single file.

A generator samples while the trainer learns. Samples are at most K weight versions old
(--max-staleness), no response mixes two versions, and a generator that dies only delays the run:

    python monarch_rl.py                      the tour: all stages, 3 minutes on two cores
    python monarch_rl.py --stage weight_sync  stages 1 to 7, up to weight_sync
    python monarch_rl.py --train --model FOLDER_OR_HUB_ID --task FILE.jsonl    your own run

    prompts -> Generator -> list[Episode] -> RewardWorker -> Group -> ReplayBuffer -> batch
                   ^                                                                    |
                   |                                                                    v
              WeightReader <------ Arena: slots, leases <------ WeightWriter <------ Trainer

Messages pass through the main process, weights through shared memory. Each concept is a stage,
which checks one rule by measurement, and prints a one-line edit that violates it:

     1 hello_actor     state in one process, one call at a time: no addition is lost
     2 actor_mesh      one call reaches every member of a mesh
     3 rdma_transfer   pass a handle, pull the bytes; the owner's Python takes no part
     4 controllers     actors that never met find one singleton by its name
     5 supervision     exception, crash, hang, infinite loop: who detects each, and how fast
     6 service         every request is answered once, although replicas crash and hang
     7 weight_sync     no read mixes versions; a sync costs one memory copy
     8 reshard         resharding writes every needed byte exactly once
     9 rollout         the trainer recomputes the log-probabilities that sampling recorded
    10 losses          which estimator follows the true gradient, and how noisily
    11 sync_rl         the loop, one thing at a time
    12 async_rl        two loops and a buffer, with bounded staleness, under faults
    13 recovery, 14 critic, 15 reward_model, 16 hosts

Three ways to read. *An hour*: the introductions, pictures and demos of Part I. *An
afternoon* of three hours: all of Part I (1 to 12), the system on one host. *A weekend*: everything;
Part II adds your own model and data, and stages 13 to 16.

Terms. The *policy* is the model that learns. An *episode* is one conversation with it, which a
*rollout* samples and a *reward* rates. A *group* is the episodes of one prompt. A *version* numbers
the weights: each step makes the next. *Staleness* is the trainer's version minus the version that
sampled. An *arena* has *slots*, one version each; readers *lease* them.

Left out: paged attention and continuous batching (vLLM, SGLang); tensor, pipeline and expert
parallelism, and trainers over several hosts (torchtitan, Megatron); LoRA (peft); a transformer from
scratch (nanoGPT); robotics and Gymnasium (CleanRL, SB3); sandboxes (OpenEnv, verifiers); trackers
(read the --log file). For Linux on x86-64.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import copy
import ctypes
import fcntl
import gc
import inspect
import json
import math
import mmap
import multiprocessing.connection
import os
import pickle
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import unicodedata
import warnings
import weakref
import zipfile
import zlib
from asyncio import CancelledError, TaskGroup, ensure_future, gather
from asyncio import get_running_loop, sleep, wait, wait_for
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from functools import cache, partial
from importlib import import_module
from itertools import chain, count, groupby, islice, pairwise
from math import ceil
from os import environ
from pathlib import Path
from statistics import fmean, median
from typing import Any, Literal, TextIO, get_args, get_type_hints

if __name__ == "__main__":
    environ.setdefault("MONARCH_FILE_LOG", "error")  # else megabytes of logs in /tmp
import monarch.actor
import torch
import torch.distributed as dist
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, ProcMesh
from monarch.actor import concurrent_endpoint, current_rank, endpoint
from monarch.actor import get_or_spawn_controller, this_host, this_proc
from monarch.rdma import RDMABuffer
from tabulate import tabulate  # comes with torchmonarch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

THIS_FILE = Path(__file__).resolve()
Record = dict[str, Any]
Weights = dict[str, Tensor]  # by name
STAGES: dict[str, Stage] = {}  # by name, in the order of the file


class UsageError(Exception):
    """A wrong command: one line on stderr, and exit status 2."""


@dataclass(frozen=True)
class Config:
    """Each field is also a flag: --max-staleness, for example."""

    seed: int = 0  # random seed of prompts, sampling and models
    prompts_per_step: int = 16  # the groups in a batch
    group_size: int = 8  # the samples of each prompt
    max_new_tokens: int = 0  # of a response; 0: set by the task (Part II)
    temperature: float = 1.0  # divides the logits, also in training
    tokens_per_micro_batch: int = 8192  # most tokens of a training pass, padded, or one row more
    generators: int = 2  # the processes that sample
    reward_workers: int = 1  # the processes that compute rewards
    max_staleness: int = 2  # K, in versions; 0: synchronous
    loss: Literal["reinforce", "ppo", "decoupled"] = "ppo"  # see section 10
    advantage: Literal["group", "leave_one_out", "none", "critic"] = "group"  # sections 10, 14
    epochs: int = 1  # updates from each batch
    clip_low: float = 0.2  # clips importance ratios below 1 - clip_low
    clip_high: float = 0.2  # clips importance ratios above 1 + clip_high
    entropy: float = 0.0  # the weight of an entropy bonus
    lr: float = 0.0  # learning rate; 0: 1e-6, or 1e-3 for the tiny policy (Part II)
    eval_prompts: int = 256  # the held-out prompts of an evaluation


@dataclass(frozen=True)
class Stage:
    """One concept, and the one-line edit that makes its claim false."""

    name: str
    claim: str  # the first line of the demo's docstring
    instead: str  # the line that replaces the one marked `# mechanism: NAME`
    demo: Callable[[Report], Awaitable[None]]


def stage(instead: str) -> Callable[..., Any]:
    """Decorates `demo_NAME`: registers it as the stage NAME."""

    def register(demo: Any) -> Any:
        name = demo.__name__.removeprefix("demo_")
        claim = demo.__doc__.splitlines()[0].rstrip(".")
        STAGES[name] = Stage(name, claim, instead, demo)
        return demo

    return register


@dataclass
class Report:
    """Prints measurements; keeps tables and checks for --json."""

    cfg: Config
    folder: Path  # for temporary files
    pool: Pool  # starts processes: section 6
    stages: list[Record] = field(default_factory=list)  # `run_stages` appends the running one

    def say(self, text: str) -> None:
        print(f"       {text}")

    def table(self, rows: list[Record]) -> None:
        """Prints rows as a table. Their keys are the column heads."""
        self.stages[-1]["rows"] += rows
        shown = tabulate(rows, headers="keys", tablefmt="plain", floatfmt=".3g")
        for line in shown.splitlines():
            self.say(line)

    def check(self, what: str, value: Any, relation: str, bound: Any) -> None:
        """Prints whether `value relation bound` holds."""
        relations = {"==": value == bound, "<": value < bound, ">": value > bound}
        holds = bool(relations[relation])
        record = {"what": what, "value": value, "relation": relation, "bound": bound, "ok": holds}
        self.stages[-1]["checks"].append(record)
        result = "ok" if holds else "FAIL"
        print(f"    {result} {what}: {value:.3g}  ({relation} {bound:.3g})")

    def failed(self) -> list[str]:
        return [s["name"] for s in self.stages if not all(c["ok"] for c in s["checks"])]


# ==== PART I: the system ====

# == 1. HELLO ACTOR ====
# Problem. Threads read a shared object, pause, and write back a new value. Updates are sometimes
#   lost, without an error.
# Rule. Put the object into an actor: an instance that lives in one process and is reached only by
#   messages, which it handles one at a time.
# Cost. A message and its answer take the time of thousands of function calls.
#
#   main process                        process of the actor
#   total.add.call_one() -- message --> waits in the mailbox until earlier calls are done
#   await ...            <-- answer --  add() has run to its end


class Accumulator(Actor):
    """A running total. `@endpoint` marks the methods that messages call, one at a time.

    The calls of a `@concurrent_endpoint` may overlap.
    """

    def __init__(self) -> None:
        self.total = 0

    @endpoint  # mechanism: hello_actor
    async def add(self) -> None:
        total = self.total
        # An overlapping call would read the same total during the pause.
        await sleep(0.0005)
        self.total = total + 1

    @endpoint
    async def take(self) -> int:
        """Returns the additions since the last call."""
        total = self.total
        self.total = 0
        return total

    @endpoint
    async def where(self) -> str:
        return f"host {socket.gethostname()}, process {os.getpid()}"


async def lost_by_threads(num_additions: int) -> int:
    """Returns how many additions vanish when threads do what `Accumulator.add` does."""
    shared = {"total": 0}

    def add() -> None:
        total = shared["total"]
        time.sleep(0.0005)
        shared["total"] = total + 1

    await gather(*[asyncio.to_thread(add) for _ in range(num_additions)])
    return num_additions - shared["total"]


@stage(instead="@concurrent_endpoint")
async def demo_hello_actor(report: Report) -> None:
    """An actor's state lives in one process, and its calls run one at a time."""
    report.check("additions of 200 lost by threads", await lost_by_threads(200), ">", 0)

    # Starts a process on this host, and an actor in it. `spawn` returns a reference at once;
    # `call_one` sends a message, and returns an awaitable for the answer.
    procs = this_host().spawn_procs(per_host={"worker": 1})
    total = procs.spawn("total", Accumulator)
    report.say(f"this is process {os.getpid()}; the actor: {await total.where.call_one()}")
    await gather(*[total.add.call_one() for _ in range(200)])
    lost = 200 - await total.take.call_one()
    report.check("additions of 200 lost by the actor", lost, "==", 0)

    start = time.perf_counter()
    for _ in range(100):
        await total.take.call_one()
    seconds = time.perf_counter() - start
    report.say(f"a message and its answer: {seconds * 1e4:.0f} us, the mean of 100")
    await procs.stop()


# == 2. ACTOR MESH ====
# Problem. Calling many generators, or many ranks, one after another takes the sum of their times.
# Rule. Actors that are spawned together are a mesh, an array with named dimensions. The adverb of
#   a call, or a slice, selects which members run and answer:
#
#   mesh.add.call(...)                    runs on every member; returns a mesh of their answers
#   mesh.add.broadcast(...)               runs on every member; returns no answer
#   mesh.add.choose(...)                  runs on one member, drawn at random
#   mesh.slice(worker=2).add.call_one()   runs on member 2
#
# Cost. `call` waits for the slowest member, and raises if any does. An exception under
#   `broadcast` ends the actor.


@stage(instead="await members.slice(worker=0).add.call()")
async def demo_actor_mesh(report: Report) -> None:
    """One call reaches every member of a mesh; its adverb says which members run and answer."""
    procs = this_host().spawn_procs(per_host={"worker": 4})
    members = procs.spawn("members", Accumulator)

    async def totals() -> list[int]:
        """Returns the additions of each member. Pending additions run first."""
        answers = await members.take.call()
        return list(answers.values())

    await members.add.call()  # mechanism: actor_mesh
    report.check("members of 4 that ran under `call`", sum(await totals()), "==", 4)
    members.add.broadcast()  # does not wait for the members
    report.check("members of 4 that ran under `broadcast`", sum(await totals()), "==", 4)
    await members.add.choose()
    report.check("members of 4 that ran under `choose`", sum(await totals()), "==", 1)

    await members.slice(worker=2).add.call_one()
    num_changed = sum(total > 0 for total in await totals())
    report.check("members of 4 whose total changed", num_changed, "==", 1)
    await procs.stop()


# == 3. RDMA TRANSFER ====
# Problem. Weights are gigabytes. A message is pickled, copied, queued and unpickled, and its
#   answer waits until the owner's Python has time.
# Rule. Control travels in messages. Bulk data stays where it is: its owner registers the memory
#   once, as an RDMABuffer, and sends a handle: whose memory it is, where, and how large. The
#   receiver moves the bytes. This is one-sided: no Python of the owner runs.
# Cost. The owner must keep the memory alive, and is not notified when a reader finishes.
#
#   owner                            reader
#   memory = torch.zeros(...)
#   RDMABuffer(memory) -- handle --> handle.read_into(mine)   pulls the bytes
#                                    handle.write_from(mine)  pushes bytes
#
# RDMA is remote direct memory access: a network card reads another machine's memory without
# its processor. Without such a card Monarch's Rust code uses TCP. Section 16: RDMA between hosts.


class Owner(Actor):
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)

    @endpoint
    async def handle(self) -> RDMABuffer:
        return RDMABuffer(self.memory)

    @endpoint
    async def as_message(self) -> Tensor:
        return self.memory

    @endpoint
    async def compute(self) -> float:
        """Holds the GIL for a second or more. Returns the time at the end."""
        sum(range(10**8))  # one call into C: no other Python code of the process runs
        return time.time()


@stage(instead="mine.copy_(await owner.as_message.call_one())")
async def demo_rdma_transfer(report: Report) -> None:
    """A handle of half a kilobyte moves any number of bytes while the owner's Python is busy."""
    procs = this_host().spawn_procs(per_host={"worker": 1})
    rows = []
    for mib in (1, 32):
        owner = procs.spawn(f"owner_{mib}", Owner, mib << 20)
        handle = await owner.handle.call_one()
        expected = await owner.as_message.call_one()
        mine = torch.zeros_like(expected)
        await handle.read_into(mine)  # the first read also connects

        # Moves the same bytes in a message, and by the handle.
        start = time.perf_counter()
        await owner.as_message.call_one()
        middle = time.perf_counter()
        await handle.read_into(mine)
        end = time.perf_counter()
        message_ms = (middle - start) * 1e3
        rows.append({"MiB": mib, "message, ms": message_ms, "handle, ms": (end - middle) * 1e3})
    report.table(rows)
    report.check("bytes of the handle", len(pickle.dumps(handle)), "<", 1024)

    # Pulls 32 MiB while the owner cannot run Python.
    mine.zero_()
    busy = ensure_future(owner.compute.call_one())
    await sleep(0.2)  # now the owner is inside `sum`
    await handle.read_into(mine)  # mechanism: rdma_transfer
    pulled_s = time.time()
    report.check("s from the pull to the end of `compute`", await busy - pulled_s, ">", 0)
    report.check("bytes that differ", int((mine != expected).sum()), "==", 0)
    await procs.stop()


# == 4. CONTROLLERS ====
# Problem. Actors in many processes share one object, such as a log. Two creators would make two
#   half-filled logs.
# Rule. Ask by name. `get_or_spawn_controller(name, Class)` gives every caller the same actor: the
#   first request creates it, in the main process.
# Cost. One more message for each lookup; one process answers all calls.


class Journal(Actor):
    """Keeps lines of any process in order of arrival."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    @endpoint
    async def add(self, line: str) -> None:
        self.lines.append(line)

    @endpoint
    async def read(self) -> list[str]:
        return self.lines


class Witness(Actor):
    @endpoint
    async def report(self) -> None:
        journal = await get_or_spawn_controller("journal", Journal)  # mechanism: controllers
        # `current_rank` says which member of the mesh this is: 0, 1 or 2.
        await journal.add.call_one(f"witness {current_rank().rank} was here")


@stage(instead='journal = this_proc().spawn("journal", Journal)')
async def demo_controllers(report: Report) -> None:
    """Actors that never met find one singleton by its name."""
    procs = this_host().spawn_procs(per_host={"worker": 3})
    await procs.spawn("witnesses", Witness).report.call()
    journal = await get_or_spawn_controller("journal", Journal)
    lines = await journal.read.call_one()
    report.check("witnesses of 3 in the journal of this process", len(set(lines)), "==", 3)
    await procs.stop()


# == 5. SUPERVISION ====
# Problem. Processes raise, crash, hang, or loop forever, and their callers wait. But a worker that
#   is silent for ten minutes may be busy.
# Rule. An exception goes to the caller. When a process crashes or hangs, its owner, here the main
#   process, kills it, and may replace it (section 6). A slow worker still answers pings.
#
#   failure              its caller            its owner detects it by
#   an endpoint raises   gets the exception    nothing: the actor lives on
#   the process crashes  waits, then an error  its end (until_dead), in milliseconds
#   it hangs (stopped)   waits, then an error  an unanswered ping, after `unresponsive_s`
#   an infinite loop     waits                 nothing: it needs a deadline (Part II: rewards)
#
# Cost. A thread in each worker, and two pings a second. A healthy worker is killed if its C code
#   holds the GIL for longer than `unresponsive_s`, 30 s.
#
# Monarch polls, too, and calls `__supervise__` of the spawning actor, seconds after a hang.


class Worker(Actor):
    """An actor that computes in a thread, so that it can answer a ping meanwhile.

    Subclasses have plain methods. `run` runs them, one after another; `setup` is the first.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        # A Unix process group: kill_group kills children in it; Ctrl-C does not reach it.
        os.setpgid(0, 0)

    @concurrent_endpoint
    async def ping(self) -> int:
        """Returns the process id."""
        return os.getpid()

    @concurrent_endpoint
    async def run(self, what: Any, *args: Any) -> Any:
        """Runs a method, given by its name, or a function that takes this worker, in the thread."""
        method = getattr(type(self), what) if isinstance(what, str) else what
        # Calls method(self, *args) with a copy of the context variables, which current_rank reads.
        in_context: Any = contextvars.copy_context().run
        return await get_running_loop().run_in_executor(
            self.thread, in_context, method, self, *args
        )

    def setup(self, *args: Any) -> Any:
        """Does the slow part of a start: in `__init__` it would delay answers to pings."""


def cause_of(error: BaseException) -> str:
    """Returns the last line of an error, with its type."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, ActorError):  # its last line says what the actor raised
        return lines[-1]
    return f"{type(error).__name__}: {lines[-1]}"


def kill_group(leader: int) -> None:
    """Kills a process and its group."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def until_dead(pid: int) -> str:
    """Waits until a process ends: its pidfd, a file descriptor, becomes readable."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return "has died"
    loop = get_running_loop()
    has_ended = asyncio.Event()
    loop.add_reader(pidfd, has_ended.set)
    try:
        await has_ended.wait()
        return "has died"
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


async def until_unresponsive(worker: Any, unresponsive_s: float) -> str:
    """Pings the worker until it does not answer, and returns the reason."""
    while True:
        ping = ensure_future(worker.ping.call())
        try:
            # After Ctrl-Z and `fg` the first wait has timed out; the second gets the answer.
            for _ in range(2):
                await wait([ping], timeout=unresponsive_s / 2)  # mechanism: supervision
            if not ping.done():
                return f"has not answered a ping for {unresponsive_s:g} s"
            ping.result()
        except Exception as error:  # a failed ping: the process ends
            return cause_of(error)
        finally:
            ping.cancel()
        await sleep(0.5)


# -- measurement ---


class FaultyWorker(Worker):
    def work(self, fault: str) -> None:
        if fault == "exception":
            raise ValueError("a bad request")
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            pass


class Parent(Actor):
    """Spawns a child in another process."""

    def __init__(self) -> None:
        self.detected_s: float | None = None

    @endpoint
    async def spawn_child(self, name: str) -> FaultyWorker:
        procs = this_host().spawn_procs(name=name)
        return procs.spawn(name, FaultyWorker)

    async def __supervise__(self, failure: Any) -> bool:
        """Returns whether the failure of a child is handled here."""
        self.detected_s = time.time()
        return True

    @endpoint
    async def detected(self) -> float | None:
        return self.detected_s


async def detection_times(fault: str) -> dict[str, float]:
    """Makes a child fail. Returns the seconds until each observer detected it, if within 9 s."""
    parent = this_proc().spawn(f"parent_{fault}", Parent)
    child = await parent.spawn_child.call_one(fault)
    pid = await child.ping.call_one()
    seconds: dict[str, float] = {}
    start_s = time.time()

    async def observe(who: str, news: Awaitable[Any]) -> None:
        try:
            result = await news
        except Exception as error:
            result = error
        # A ping also fails when the process has ended; only a missing answer detects a hang.
        if who != "ping" or "has not answered" in str(result):
            seconds[who] = time.time() - start_s

    observers = [
        ensure_future(observe("caller", child.run.call_one("work", fault))),
        ensure_future(observe("pidfd", until_dead(pid))),
        ensure_future(observe("ping", until_unresponsive(child, 4.0))),
    ]
    await sleep(9)
    detected_s = await parent.detected.call_one()
    if detected_s:
        seconds["__supervise__"] = detected_s - start_s
    for task in observers:
        task.cancel()
    kill_group(pid)
    return seconds


@stage(instead="await wait([ping])")
async def demo_supervision(report: Report) -> None:
    """Exceptions, crashes and hangs are detected; an infinite loop is not."""
    faults = ("exception", "crash", "hang", "infinite loop")
    times = dict(zip(faults, await gather(*[detection_times(fault) for fault in faults])))
    report.say("seconds until each observer detected it; empty: not within 9 s")
    report.table([{"fault": fault, **seconds} for fault, seconds in times.items()])
    report.check("observers of the exception", len(times["exception"]), "==", 1)
    report.check("crashes detected by the pidfd", int("pidfd" in times["crash"]), "==", 1)
    report.check("hangs detected by the ping", int("ping" in times["hang"]), "==", 1)
    to_parent = int("__supervise__" in times["crash"])
    report.check("crashes reported to `__supervise__`", to_parent, "==", 1)
    report.check("observers of the infinite loop", len(times["infinite loop"]), "==", 0)


# == 6. SERVICE ====
# Problem. A call fails with its actor. If one of four actors is lost, a quarter of the calls fail,
#   and each caller must know which are left.
# Rule. A service owns interchangeable replicas, and gives a request to the one with the fewest in
#   flight, so that few wait behind a long rollout. An attempt has one of three outcomes:
#   1. The replica answers. The caller gets the answer, once.
#   2. The replica is lost (section 5). It is replaced; another one gets the request, twice at most.
#   3. The request raises. The exception goes to the caller: another replica would raise it, too.
# Cost. A request may run again, from its start: repeats must be harmless.
# The core is `request` and `_ask`. By example, replica 2 is killed: `until_dead` returns, `_ask`
# raises ReplicaLost, and `request` asks another. `_supervise` calls `_live` for a new process.
#
#   service = Service(RootWorker, 4, pool)   # four replicas of a Worker
#   await service.begin()                    # all are ready
#   await service.request("root", 4)         # 2.0, from one of them


class ReplicaLost(RuntimeError):
    """Raised when a replica is lost."""


@dataclass
class Replica:
    """One actor per rank, and the requests in flight."""

    name: str  # "generator_0"
    processes: Processes
    worker: Any  # a reference to the actors
    in_flight: dict[Any, float] = field(default_factory=dict)  # start times (Part II), by call
    result: Any = None  # the return value of `setup`
    is_ready: bool = False  # `setup` has returned (Part II reuses such processes)
    lost: asyncio.Future[str] = field(default_factory=asyncio.Future)  # "generator_0 has died"

    def lose(self, reason: str) -> None:
        """Marks this replica as lost; keeps the first reason."""
        if not self.lost.done():
            self.lost.set_result(f"{self.name} {reason}")

    @asynccontextmanager
    async def watched(self, unresponsive_s: float) -> AsyncIterator[None]:
        """Calls `lose` if a process crashes or hangs in this context."""

        async def watch(detector: Awaitable[str]) -> None:
            self.lose(await detector)

        # One detector for hangs, and one per process for crashes.
        detectors = [*self.processes.deaths(), until_unresponsive(self.worker, unresponsive_s)]
        watches = [ensure_future(watch(detector)) for detector in detectors]
        try:
            yield
        finally:
            for task in watches:
                task.cancel()


@dataclass
class Service:
    """Replicas of one worker class, and the requests to them."""

    worker_class: type[Worker]
    num_replicas: int
    pool: Pool
    setup_args: tuple[Any, ...] = ()  # setup(number of the replica, *setup_args)
    num_ranks: int = 1  # per replica (trainers: several)
    unresponsive_s: float = 30.0  # a replica that answers no ping for so long is killed
    replaces: bool = True  # if not, requests raise ReplicaLost after a loss
    replicas: dict[int, Replica] = field(default_factory=dict)  # ready ones, by number
    num_lost: int = 0  # replicas so far
    error: Exception | None = None  # why no more replicas are started
    supervisors: list[asyncio.Task[None]] = field(default_factory=list)  # one per replica

    async def begin(self) -> None:
        for number in range(self.num_replicas):
            self.supervisors.append(ensure_future(self._supervise(number)))
        await self.until_ready(self.num_replicas)

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if not replica.lost.done()]

    async def until_ready(self, num_replicas: int) -> None:
        """Waits until num_replicas are ready. Raises self.error."""
        while len(self.ready()) < num_replicas and not self.error:
            await sleep(0.005)
        if self.error:
            raise self.error

    async def request(self, what: Any, *args: Any) -> Any:
        """Returns an answer. Raises ActorError, ReplicaLost after three losses, or self.error."""
        num_losses = 0
        while True:
            await self.until_ready(1)
            replica = min(self.ready(), key=lambda replica: len(replica.in_flight))
            try:
                return await self._ask(replica, what, *args)
            except ReplicaLost:
                num_losses += 1  # mechanism: service
                # The request itself may be what kills replicas.
                if num_losses == 3:
                    raise

    async def _ask(self, replica: Replica, what: Any, *args: Any) -> Any:
        """Makes one attempt. Returns the answer of rank 0; raises ActorError or ReplicaLost."""
        call = ensure_future(replica.worker.run.call(what, *args))
        replica.in_flight[call] = time.time()
        try:
            # Waits for the answer or a loss. The loss is checked first: it explains an error.
            await wait([call, replica.lost], return_when=asyncio.FIRST_COMPLETED)
            if not replica.lost.done():  # so `call` is done
                try:
                    return next(iter(call.result().values()))
                except ActorError:  # raised by the request itself
                    raise
                except Exception as error:  # any other type: the process has ended
                    replica.lose(cause_of(error))
            raise ReplicaLost(replica.lost.result())
        finally:
            call.cancel()  # the worker is not interrupted
            del replica.in_flight[call]

    async def _supervise(self, number: int) -> None:
        """Runs one replica after another, until `close` or self.error."""
        num_failed_starts = 0
        while not self.error:
            try:
                await self._live(number)
                num_failed_starts = 0
            except Exception as error:  # a failed start: no process, or an error or loss in `setup`
                num_failed_starts += 1
                raised = isinstance(error, ActorError)  # in another process it would raise again
                if raised or num_failed_starts == 3 or not self.replaces:
                    self.error = self.error or error

    async def _live(self, number: int) -> None:
        """Starts one replica, and runs it until it is lost. Raises the error of a failed start."""
        name = f"{self.worker_class.__name__.lower()}_{number}"
        processes = await self.pool.start(self.num_ranks)
        # The time tells replacements apart.
        worker = processes.mesh.spawn(f"{name}_{time.monotonic_ns()}", self.worker_class)
        replica = Replica(name, processes, worker)
        try:
            # 30 s: imports may hold the GIL for seconds.
            async with replica.watched(30.0):
                replica.result = await self._ask(replica, "setup", number, *self.setup_args)
            # Now the replica gets requests.
            replica.is_ready = True
            self.replicas[number] = replica
            async with replica.watched(self.unresponsive_s):
                await wait([replica.lost])  # so `close` does not cancel `lost`
            if not self.replaces:
                self.error = ReplicaLost(replica.lost.result())
        finally:  # it was lost, `setup` raised, or `close` cancelled this task
            self.replicas.pop(number, None)
            if replica.lost.done():
                self.num_lost += 1
            await self.pool.end(replica)

    async def close(self) -> None:
        self.error = self.error or ReplicaLost("closed")  # for waiting requests
        for supervisor in self.supervisors:
            supervisor.cancel()
        await gather(*self.supervisors, return_exceptions=True)


# -- processes ---


@dataclass
class Processes:
    """The processes of one replica, one for each rank."""

    mesh: ProcMesh
    ids: list[int]

    def deaths(self) -> list[Awaitable[str]]:
        """Returns one awaitable per process, which waits until it ends."""
        return [until_dead(pid) for pid in self.ids]

    async def kill(self) -> None:
        for pid in self.ids:
            kill_group(pid)
        # After the kill, because `stop` blocks on a process that hangs.
        await self.mesh.stop()


class Pool:
    """Starts and ends the processes of replicas. Part II reuses processes and sets the fields."""

    bootstrap: Callable[[], None] | None = None  # runs first in each process
    command: Any = None  # starts a process; by default Monarch's own

    async def start(self, num_ranks: int) -> Processes:
        """Returns new processes, one for each rank."""
        name = f"process_{time.monotonic_ns()}"
        how = {"bootstrap": self.bootstrap, "bootstrap_command": self.command}
        mesh = this_host().spawn_procs({"rank": num_ranks}, name=name, **how)
        # A temporary actor returns the process ids, before the replica's actor can fail.
        worker = mesh.spawn(f"{name}_first", Worker)
        ids = await worker.ping.call()
        await worker.stop()
        return Processes(mesh, list(ids.values()))

    async def end(self, replica: Replica) -> None:
        """Ends the processes of a replica, lost or not."""
        await replica.processes.kill()


# -- measurement ---


class RootWorker(Worker):
    def root(self, number: float) -> float:
        time.sleep(0.002)
        return math.sqrt(number)


@stage(instead="raise")
async def demo_service(report: Report) -> None:
    """Every request is answered once, although replicas crash and hang."""
    service = Service(RootWorker, 4, report.pool, unresponsive_s=2.0)
    await service.begin()
    # After 0.2 s replica 2 is killed, and after 0.3 s replica 3 is stopped.
    for number, how in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        victim = service.replicas[number].processes.ids[0]
        get_running_loop().call_later(number / 10, os.kill, victim, how)

    async def is_right(number: int) -> bool:
        await sleep(number * 0.002)
        try:
            return await service.request("root", number) == math.sqrt(number)
        except (ActorError, ReplicaLost):
            return False

    # Sends a request every 2 ms, for 0.8 s.
    num_right = sum(await gather(*[is_right(number) for number in range(400)]))
    await service.until_ready(4)
    report.check("requests of 400 with the right answer", num_right, "==", 400)
    report.check("replicas that were replaced", service.num_lost, "==", 2)
    await service.close()


# == 7. WEIGHT SYNC ====
# Problem. The trainer rewrites its weights while generators read them. A read during the write has
#   some tensors of version 6 and some of version 7: torn weights, and no error.
# Rule. The trainer fills a slot of shared memory that nobody reads, and then makes it the latest. A
#   reader leases the latest slot, and reads it until it leases another.
# Cost. One copy of the weights per version, and memory for readers + 2 slots.
# The core is `Arena.lease` and `Arena.free_slot`.
#
# Left, a first solution, `dist.broadcast`: it begins when all members have called it, so the
# trainer waits for the last rollout. Right, slots in host memory (CPU staging): the trainer waits
# for no reader. Dots are waiting, X the broadcast, P the copy into a slot, f a pull.
#
#   trainer       step 7 ........XXXX step 8 ........XXXX     step 7 step 8 step 9 step 10
#     a thread                                                       PPPP   PPPP   PPPP
#   generator 0   rollout .......XXXX rollout .......XXXX     rollout f rollout f rollout f
#   generator 1   longest rolloutXXXX longest rolloutXXXX     longest rollout f longest rollout
#
# -- 7a. The arena: slots and leases ---
#
#   the trainer                a generator
#   slot = arena.free_slot()   version, slot = arena.lease(reader)
#   fill(slot)                 sample with the weights in the slot
#   arena.commit(7, slot)      version, slot = arena.lease(reader)   # the next one
#
# With two readers, while version 8 is being written:
#
#   header   latest: version 7, slot 2   leases: slot 2 (reader 0), slot 1 (reader 1)
#
#   slots    slot 0   version 8 is being written into it
#            slot 1   version 6   reader 1 reads it
#            slot 2   version 7   the latest; reader 0 reads it
#            slot 3   version 5   free
#
# Readers + 2 slots are enough: each reader holds one at most, one is the latest, one is written.
#
# Why no read is torn. The header changes under a lock. The writer fills a slot that is neither the
# latest nor leased, and readers lease only the latest; so nobody reads that slot before `commit`. A
# reader keeps its lease until its next one, so the writer spares its slot. By example, without
# leases a reader begins version 8 in slot 0. Version 9 spares this latest slot and goes to slot 1,
# but version 10 goes to slot 0: the rest of the read is torn.
#
# The kernel releases the lock of a holder that dies. The replacement of a dead reader has the same
# number, and overwrites its lease.


@dataclass(frozen=True)
class ArenaHandle:
    """Tells another process where the arena is and what it holds."""

    path: str  # /proc/PID/fd/N
    layout: Layout  # of each slot: 7c
    num_readers: int


class Arena:
    """One process's mapping of the shared memory: a page of 8-byte words, then the slots."""

    HEADER_BYTES = 4096
    LATEST = 0  # this word holds version * slots + slot, 7 * 4 + 2 = 30; at first -1 * 4 + 3 = -1
    LEASES = 1  # from here on, the slot that each reader leases
    NOTHING = -1  # no lease, slot or version

    def __init__(self, handle: ArenaHandle) -> None:
        # A lock belongs to an open file, so each process opens it for itself.
        self.file = open(handle.path, "r+b", buffering=0)
        self.num_readers = handle.num_readers
        self.num_slots = handle.num_readers + 2
        # Maps the whole file, so that loads and stores reach all processes without a call.
        memory = mmap.mmap(self.file.fileno(), 0)
        self.words = memoryview(memory)[: self.HEADER_BYTES].cast("q")  # signed 8-byte integers
        everything = torch.frombuffer(memory, dtype=torch.uint8)
        # [slots, bytes of a slot]
        self.slots = everything[self.HEADER_BYTES :].view(self.num_slots, -1)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the header, which `Arena` changes only inside this context."""
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def lease(self, reader: int) -> tuple[int, int]:
        """Leases the latest slot until the next call. Returns (version, slot); version -1: none."""
        with self.locked():
            version, slot = divmod(self.words[self.LATEST], self.num_slots)
            self.words[self.LEASES + reader] = slot  # mechanism: weight_sync
            return version, slot

    def free_slot(self) -> int:
        """Returns a slot that is neither the latest nor leased."""
        with self.locked():
            leases = self.words[self.LEASES : self.LEASES + self.num_readers].tolist()
            taken = {self.words[self.LATEST] % self.num_slots, *leases}
        return min(set(range(self.num_slots)) - taken)

    def commit(self, version: int, slot: int) -> None:
        """Makes a complete slot the latest."""
        # One word holds both, so a killed writer stores both or neither.
        with self.locked():
            self.words[self.LATEST] = version * self.num_slots + slot


# -- 7b. The writer and the readers ---


class WeightWriter:
    """Publishes the trainer's weights."""

    copying: Future[None] | None = None

    def __init__(self, tensors: Weights, num_readers: int) -> None:
        self.tensors = tensors
        self.handle, self.arena = create_arena(layout_of(tensors), num_readers)
        self.thread = ThreadPoolExecutor(1)
        # The tensors become views of one block, as large as slots[0]: a publish is one copy.
        self.block = move_into_block(tensors, self.handle.layout, self.arena.slots[0])

    def publish(self, version: int) -> None:
        """Begins to copy in a thread. Call `wait` before the optimizer changes the tensors."""
        self.wait()
        self.copying = self.thread.submit(self._copy, version)

    def wait(self) -> None:
        """Waits for the end of the copy, and raises its error."""
        copying = self.copying
        self.copying = None
        if copying:
            copying.result()

    def _copy(self, version: int) -> None:
        slot = self.arena.free_slot()
        self.write(self.arena.slots[slot])
        self.arena.commit(version, slot)

    def write(self, slot: Tensor) -> None:
        """Fills a slot, [slot bytes] uint8, with the tensors as they are now."""
        # ctypes releases the GIL, so that the trainer's thread goes on.
        ctypes.memmove(slot.data_ptr(), self.block.data_ptr(), self.block.nbytes)


class WeightReader:
    """Points a generator's tensors into a slot. Nothing is copied."""

    def __init__(self, handle: ArenaHandle, reader: int, tensors: Weights) -> None:
        # Both sides must agree on each tensor's name, shape, dtype and place.
        if handle.layout != layout_of(tensors):
            raise ValueError("the writer has other tensors than the reader")
        self.arena = Arena(handle)
        self.reader = reader  # its number, from 0
        self.tensors = tensors
        self.pulled = (Arena.NOTHING, 0)  # version, slot
        # Views of all tensors, per slot: making them takes longer than the rest of a pull.
        self.views = [[spec.view(slot) for spec in handle.layout] for slot in self.arena.slots]

    def pull(self, at_least: int = Arena.NOTHING) -> int:
        """Waits for a version >= at_least, points the tensors at the latest, and returns it."""
        version, slot = self.arena.lease(self.reader)
        while version < at_least:
            # The path exists while the writer's arena does.
            if not os.path.exists(self.arena.file.name):
                raise RuntimeError(f"version {at_least} never came: the writer has ended")
            time.sleep(0.001)
            version, slot = self.arena.lease(self.reader)
        if (version, slot) != self.pulled:  # else the tensors have it already
            self.pulled = (version, slot)
            self.read(slot)
        return version

    def read(self, slot: int) -> None:
        """Points the tensors at a leased slot."""
        for tensor, view in zip(self.tensors.values(), self.views[slot], strict=True):
            tensor.data = view


# -- 7c. What lies in a slot ---


@dataclass(frozen=True)
class TensorSpec:
    """The place of one tensor in a slot."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes from the start of the slot
    num_bytes: int

    def view(self, slot: Tensor) -> Tensor:
        """Returns this tensor in a slot, [slot bytes] uint8, without a copy."""
        part = slot[self.offset : self.offset + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


Layout = tuple[TensorSpec, ...]


def layout_of(tensors: Weights, dtype: torch.dtype | None = None) -> Layout:
    """Returns the layout of tensors in a slot.

    dtype: type of all tensors. Default: unchanged (Part II: --dtype).
    """
    specs = []
    offset = 0
    for name, tensor in tensors.items():
        in_slot = dtype or tensor.dtype
        num_bytes = tensor.numel() * in_slot.itemsize
        specs.append(TensorSpec(name, tuple(tensor.shape), in_slot, offset, num_bytes))
        # The next tensor begins on a cache line: `view(dtype)` needs aligned offsets.
        offset += ceil(num_bytes / 64) * 64
    return tuple(specs)


def move_into_block(tensors: Weights, layout: Layout, slot: Tensor) -> Tensor:
    """Makes the tensors views of one block, [slot bytes] uint8 on their device. Returns it."""
    first = next(iter(tensors.values()))
    block = torch.zeros_like(slot, device=first.device)
    for spec in layout:
        view = spec.view(block)
        view.copy_(tensors[spec.name].detach())
        tensors[spec.name].data = view
    return block


def create_arena(layout: Layout, num_readers: int) -> tuple[ArenaHandle, Arena]:
    """Returns a handle, which is valid while its arena lives, and the arena."""
    last = layout[-1]
    slot_bytes = ceil((last.offset + last.num_bytes) / mmap.PAGESIZE) * mmap.PAGESIZE
    # A file in memory, in no folder: unlike one in /dev/shm it cannot be left behind.
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, Arena.HEADER_BYTES + (num_readers + 2) * slot_bytes)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    handle = ArenaHandle(path, layout, num_readers)
    arena = Arena(handle)
    weakref.finalize(arena, os.close, descriptor)  # memory is freed with its last mapping
    for word in range(Arena.LEASES + num_readers):
        arena.words[word] = Arena.NOTHING
    # Touches all pages now: in a publish, page faults would cost more than the copy.
    arena.slots.zero_()
    return handle, arena


# -- measurement ---


def blocks(num_blocks: int) -> Weights:
    """Returns weights, 2 MiB in each block."""
    return {f"block{i}": torch.zeros(1 << 19) for i in range(num_blocks)}


class ReaderWorker(Worker):
    """Reads weights that are filled with the number of their version."""

    def setup(self, number: int, make_reader: Callable[..., WeightReader], num_blocks: int) -> None:
        self.reader = make_reader(number, blocks(num_blocks))

    def read(self, num_reads: int, num_versions: int, keeps_lease: bool) -> int:
        """Returns how many reads were torn. A read spans num_versions publishes, as rollouts do."""
        num_torn = 0
        arena = self.reader.arena
        for _ in range(num_reads):
            version = self.reader.pull(at_least=0)
            if not keeps_lease:  # clears the lease
                arena.words[Arena.LEASES + self.reader.reader] = Arena.NOTHING
            # The tensor copied last shows an early commit. Later, the others show an overwrite.
            *others, last = self.reader.tensors.values()
            is_torn = bool((last != version).any())
            while arena.words[Arena.LATEST] // arena.num_slots < version + num_versions:
                time.sleep(0.0005)
            for tensor in others:
                is_torn |= bool((tensor != version).any())
            num_torn += is_torn
        return num_torn


def publish_filled(writer: WeightWriter, version: int) -> None:
    for tensor in writer.tensors.values():
        tensor.fill_(version)
    writer.publish(version)
    writer.wait()


def measure_publish(writer: WeightWriter) -> float:
    """Returns the median of publish time / memmove time, taken alternately."""
    scratch = torch.ones_like(writer.block)
    ratios = []
    for _ in range(15):
        start = time.perf_counter()
        ctypes.memmove(scratch.data_ptr(), writer.block.data_ptr(), scratch.nbytes)
        copied = time.perf_counter()
        writer.publish(0)
        writer.wait()
        published = time.perf_counter()
        ratios.append((published - copied) / (copied - start))
    return median(ratios)


async def measure_reads(report: Report, num_readers: int, keeps_lease: bool) -> Record:
    """Publishes 64 MiB as fast as possible beside 32 reads. Returns a row of the table."""
    writer = WeightWriter(blocks(32), num_readers)
    make_reader = partial(WeightReader, writer.handle)
    service = Service(ReaderWorker, num_readers, report.pool, (make_reader, 32))
    await service.begin()
    publish_ratio = measure_publish(writer)
    # All replicas read at once; a read spans 2 publishes.
    args = ("read", 32 // num_readers, 2, keeps_lease)
    replicas = service.replicas.values()
    reading = gather(*[replica.worker.run.call_one(*args) for replica in replicas])
    version = 0
    while not reading.done():
        version += 1
        publish_filled(writer, version)
        await sleep(0)  # lets the event loop receive answers
    await service.close()
    return {
        "readers": f"{num_readers}, {'with' if keeps_lease else 'without'} leases",
        "publish / memmove": publish_ratio,
        "torn of 32": sum(reading.result()),
    }


@stage(instead="pass")
async def demo_weight_sync(report: Report) -> None:
    """A generator never samples from half-updated weights, and a sync is one memory copy."""
    without = await measure_reads(report, 2, keeps_lease=False)
    rows = [await measure_reads(report, n, keeps_lease=True) for n in (1, 2, 4)]
    report.table([without, *rows])
    report.check("torn reads of 32 without leases", without["torn of 32"], ">", 0)
    report.check("torn reads of 96 with leases", sum(row["torn of 32"] for row in rows), "==", 0)
    slowest = max(row["publish / memmove"] for row in rows)
    report.check("largest publish time / time of one memory copy", slowest, "<", 2)


# == 8. RESHARD ====
# Problem. A large model's trainer has several ranks, each with a shard of every weight, say rows. A
#   reader wants the whole, or another sharding, say columns. Gathering the whole on one rank copies
#   the data twice, and may exceed its memory.
# Rule. A rank's shard is a box of the whole tensor. Each trainer rank writes its boxes into the
#   same slot, and a reader can view any box of it. If several ranks hold a box, one writes it.
# Cost. A box of columns is not contiguous, so a rank writes it row by row.
#
# Trainers of Part II shard rows. Only the demo reads columns.
#
# By example, a matrix of 5 x 23. The last shard may be smaller, or empty:
#
#   trainer rank 0   rows 0-2, all columns     writes this box into the slot
#   trainer rank 1   rows 3-4, all columns     writes this one into the same slot
#   reader rank 0    all rows, columns 0-11    views this box of the slot
#   reader rank 1    all rows, columns 12-22   views this one

Shape = tuple[int, ...]
Box = tuple[slice, ...]  # of a tensor, in each dimension: `tensor[box]` is a view of it


def box_of(shape: Shape, mesh_shape: Shape, placements: Any, coordinate: Shape) -> Box:
    """Returns the box of a DTensor that the rank at this coordinate of a DeviceMesh holds.

    placements: for each dimension of the mesh, Shard(dim of the tensor) or Replicate().
    """
    box = [slice(0, length) for length in shape]
    for placement, num_ranks, rank in zip(placements, mesh_shape, coordinate):
        if placement.is_replicate():
            continue
        outer = box[placement.dim]
        length = ceil((outer.stop - outer.start) / num_ranks)
        start = min(outer.start + rank * length, outer.stop)
        box[placement.dim] = slice(start, min(start + length, outer.stop))
    return tuple(box)


class ShardedWriter(WeightWriter):
    """Publishes one rank's shards of DTensors. dtype: as in `layout_of`."""

    def __init__(self, tensors: Record, num_readers: int, dtype: torch.dtype | None = None) -> None:
        # The copy runs beside the collectives of the next step, so it needs its own process group.
        self.group: Any = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        # Rank 0 makes the arena (shapes are global), and the others map it.
        handles: list[Any] = [None]
        if self.rank == 0:
            handles[0], self.arena = create_arena(layout_of(tensors, dtype), num_readers)
        dist.broadcast_object_list(handles, 0, self.group)
        self.handle = handles[0]
        if self.rank > 0:
            self.arena = Arena(self.handle)
        self.tensors = tensors
        self.written_bytes = 0
        self.thread = ThreadPoolExecutor(1)

    def _copy(self, version: int) -> None:
        slot = torch.tensor([self.arena.free_slot()])
        dist.broadcast(slot, 0, self.group)  # rank 0 decides: leases may change meanwhile
        self.write(self.arena.slots[int(slot)])
        dist.barrier(self.group)  # all ranks have written
        if self.rank == 0:
            self.arena.commit(version, int(slot))

    def write(self, slot: Tensor) -> None:
        """Writes this rank's boxes. If ranks share a box, the first writes it."""
        for spec in self.handle.layout:
            tensor = self.tensors[spec.name]
            mesh = tensor.device_mesh
            coordinate = tuple(mesh.get_coordinate())
            # Where a dimension replicates, only rank 0 along it writes.
            by_dim = zip(tensor.placements, coordinate)
            if any(rank > 0 for placement, rank in by_dim if placement.is_replicate()):
                continue  # mechanism: reshard
            target = spec.view(slot)[box_of(spec.shape, mesh.shape, tensor.placements, coordinate)]
            target.copy_(tensor.to_local().detach().to(target.dtype))
            self.written_bytes += target.nbytes


# -- measurement ---


def example() -> Weights:
    """Returns a matrix of different elements, and a vector to replicate."""
    return {"matrix": torch.arange(1.0, 116.0).view(5, 23), "vector": torch.ones(23)}


class ShardWorker(Worker):
    def setup(self, number: int, meeting_file: str) -> ArenaHandle:
        from torch.distributed import tensor as dtensor

        place = f"file://{meeting_file}"
        dist.init_process_group("gloo", place, rank=current_rank().rank, world_size=2)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        placements = {"matrix": dtensor.Shard(0), "vector": dtensor.Replicate()}
        tensors = {}
        for name, tensor in example().items():
            tensors[name] = dtensor.distribute_tensor(tensor, mesh, [placements[name]])
        self.writer = ShardedWriter(tensors, 1)
        return self.writer.handle

    def publish(self) -> int:
        self.writer.publish(1)
        self.writer.wait()
        return self.writer.written_bytes


@stage(instead="pass")
async def demo_reshard(report: Report) -> None:
    """Resharding writes every needed byte exactly once."""
    from torch.distributed.tensor import Shard

    meeting_file = str(report.folder / "shards")
    service = Service(ShardWorker, 1, report.pool, (meeting_file,), num_ranks=2)
    await service.begin()
    handle = service.replicas[0].result
    written_bytes = await service.replicas[0].worker.run.call("publish")

    # Joins the columns of two readers to the whole.
    arena = Arena(handle)
    _, slot = arena.lease(0)
    expected = example()
    num_wrong = 0
    needed_bytes = 0
    for spec in handle.layout:
        tensor = spec.view(arena.slots[slot])
        needed_bytes += tensor.nbytes
        boxes = [box_of(spec.shape, (2,), [Shard(-1)], (rank,)) for rank in range(2)]
        columns = torch.cat([tensor[box] for box in boxes], -1)
        num_wrong += int((columns != expected[spec.name]).sum())
    report.check("elements that differ", num_wrong, "==", 0)
    written = sum(written_bytes.values()) / needed_bytes
    report.check("bytes written / bytes needed", written, "==", 1)
    await service.close()


# == 9. ROLLOUT ====
# Problem. In RL the same network runs in two programs. The generator samples token by token, with a
#   KV cache. The trainer computes the log-probabilities of whole conversations at once. If they
#   disagree about what was sampled, or how likely it was, the gradient is wrong, without an error.
# Rule. Record while sampling, and reconstruct nothing afterwards. For each sampled token:
#   its id               later turns append to it; tokenized again, the text of a, b may be ab
#   its log-probability  in fp32, under the distribution that it was drawn from
# Cost. Three numbers per token: id, log-probability, and turn (9b).
# `rollout` and `respond` sample, `Episode` records, `Policy.token_logprobs` recomputes.
#
# -- 9a. Tasks and prompts ---


@dataclass(frozen=True)
class Turn:
    """One turn of the user or the environment: chat messages, and the right answer."""

    messages: tuple[dict[str, str], ...]  # {"role": "user", "content": "abc"}
    answer: Any
    is_reply: bool = False  # from an environment


@dataclass(frozen=True)
class Prompt:
    """A conversation without its responses. `number` also identifies its group."""

    number: int
    turns: tuple[Turn, ...]
    held_out: bool | None = None  # Part II; None: by a checksum

    @property
    def is_held_out(self) -> bool:
        """Whether to hold out this prompt: one in ten, by a checksum, so equal texts agree."""
        if self.held_out is not None:
            return self.held_out
        text = json.dumps([turn.messages for turn in self.turns if not turn.is_reply])
        return zlib.crc32(text.encode()) % 10 == 0


def user_turn(text: str, answer: Any) -> Turn:
    return Turn(({"role": "user", "content": text},), answer)


class Task:
    """Defines the prompts and the rewards of a run."""

    max_new_tokens = 0  # of a response; 0: min(256, half the context) (Part II)
    # An environment's reply(prompt, responses) returns the next turn, or None; the prompt has all
    # turns so far. The same arguments must give the same reply: a request may be repeated.
    reply: Callable[[Prompt, list[str]], Turn | None] | None = None

    def prompt(self, number: int) -> Prompt:
        """Returns a prompt, the same for the same number. Numbers count from 0."""
        raise NotImplementedError

    def grade(self, answer: Any, response: str) -> float:
        """Returns how right a response is, from 0 to 1."""
        raise NotImplementedError

    def score(self, prompt: Prompt, responses: list[str]) -> Any:
        """Returns a reward per turn, in total 1 if all are right (Part II: or a str, an error)."""
        pairs = zip(prompt.turns, responses)
        return [self.grade(turn.answer, response) / len(responses) for turn, response in pairs]


LETTERS = "abcdefghijklmnop"


@dataclass
class LetterTask(Task):
    """Two turns of three letters, which the policy repeats."""

    seed: int
    max_new_tokens = 4  # three letters and an end

    def prompt(self, number: int) -> Prompt:
        rng = random.Random(f"{self.seed} {number}")
        turns = []
        for _ in range(2):
            letters = "".join(rng.choices(LETTERS, k=3))
            turns.append(user_turn(letters, letters))
        return Prompt(number, tuple(turns))

    def grade(self, answer: str, response: str) -> float:
        """Returns the share of right letters. Extra letters count as errors."""
        num_right = sum(a == b for a, b in zip(answer, response))
        return num_right / max(len(answer), len(response))


@dataclass
class RetryTask(Task):
    """An environment without rewards: it asks again for missing letters.

    By example: asked "abc", a policy says "ad"; asked "bc", it says "cb": none is missing.
    """

    seed: int

    def prompt(self, number: int) -> Prompt:
        return Prompt(number, LetterTask(self.seed).prompt(number).turns[:1])

    def reply(self, prompt: Prompt, responses: list[str]) -> Turn | None:
        asked = prompt.turns[-1].messages[0]["content"]
        missing = "".join(letter for letter in asked if letter not in responses[-1])
        is_over = not missing or len(responses) == 4  # at most four tries
        return None if is_over else user_turn(missing, missing)


# -- 9b. What is recorded ---
#
# An episode. <u> and <a> begin a turn of the user and of the assistant, and <e> ends one. The user
# says u u u twice. The policy answers a, then d e f g, which is truncated: a response has at most
# four tokens, its end included.
#
#   ids       <u> u u u <e> <a>  a <e>  <u> u u u <e> <a>  d e f  g
#   turn_of    0  0 0 0  0   0   1  1    0  0 0 0  0   0   2 2 2  2


@dataclass
class Episode:
    """One conversation, in plain lists. ids, turn_of and logprobs: [T] each."""

    prompt: Prompt
    version: int = 0  # of the weights that sampled its first turn
    ids: list[int] = field(default_factory=list)
    turn_of: list[int] = field(default_factory=list)  # from 1; 0: not sampled
    logprobs: list[float] = field(default_factory=list)  # 0.0: not sampled
    responses: list[str] = field(default_factory=list)  # of each turn
    truncated: list[bool] = field(default_factory=list)  # of each turn: has no end
    rewards: list[float] = field(default_factory=list)  # of each turn, once scored

    def add(self, token: int, turn: int, logprob: float) -> None:
        self.ids.append(token)
        self.turn_of.append(turn)
        self.logprobs.append(logprob)

    def add_prompt(self, ids: list[int]) -> None:
        """Appends unsampled tokens; does not repeat an end token that was sampled."""
        # A later turn begins with the previous response's end: <e> <u> u u u <e> <a>. A sampled
        # end is not repeated. A truncated response has no end, even if its last token is equal.
        is_truncated = self.truncated[-1:] == [True]
        if self.ids[-1:] == ids[:1] and not is_truncated:
            ids = ids[1:]
        for token in ids:
            self.add(token, 0, 0.0)

    def add_reply(self, reply: Turn) -> None:
        reply = replace(reply, is_reply=True)
        self.prompt = replace(self.prompt, turns=(*self.prompt.turns, reply))


# -- 9c. The policy ---


def tiny_policy(seed: int) -> tuple[Any, Any]:
    """Returns (tokenizer, model): a Qwen2 of 30 thousand parameters, with a token per letter."""
    import transformers  # takes a second; only processes with a policy need it

    # A prompt: <user>abc<end><assistant>.
    tokens = ["<user>", "<assistant>", "<end>", *LETTERS]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    tokenizer = transformers.Qwen2Tokenizer(
        {token: i for i, token in enumerate(tokens)},
        [],  # no merges
        extra_special_tokens=["<user>", "<assistant>"],
        unk_token="<end>",
        eos_token="<end>",
        chat_template=template + "{% if add_generation_prompt %}<assistant>{% endif %}",
    )
    config = transformers.Qwen2Config(
        vocab_size=len(tokens),
        hidden_size=40,
        intermediate_size=80,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(seed)
    auto = transformers.AutoModelForCausalLM
    return tokenizer, auto.from_config(config, attn_implementation="eager")


RESPONSE = {"role": "assistant", "content": "response"}  # stands for any response


class Policy:
    """A causal language model, its tokenizer, and the way from chat messages to token ids."""

    def __init__(self, cfg: Config) -> None:
        self.tokenizer, model = tiny_policy(cfg.seed)
        self.model = model.eval()  # without dropout
        self.device = model.device
        self.context: int = model.config.max_position_embeddings  # tokens of a conversation
        self.temperature = cfg.temperature
        self.max_new_tokens = cfg.max_new_tokens
        self.end_ids = [self.tokenizer.eos_token_id]
        self.learns_entropy = cfg.entropy > 0

    def render(self, messages: Any, add_generation_prompt: bool) -> str:
        """Returns the text of a conversation, by the chat template."""
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def prompt_ids(self, prompt: Prompt, turn: int) -> list[int]:
        """Returns the ids that a turn (here from 0) appends: all that follow the last response."""
        before, text = self.render_turn(prompt.turns[: turn + 1])
        return self.tokenize(text.removeprefix(before))

    def render_turn(self, turns: tuple[Turn, ...]) -> tuple[str, str]:
        """Returns the text up to the last response, which has no end yet, and the whole text.

        Turns "abc" and "def": "<user>abc<end><assistant>response", and the same followed by
        "<end><user>def<end><assistant>".
        """
        earlier = [message for past in turns[:-1] for message in (*past.messages, RESPONSE)]
        # The template would add an end token to RESPONSE.
        before = (self.render(earlier[:-1], True) + RESPONSE["content"]) if earlier else ""
        return before, self.render([*earlier, *turns[-1].messages], True)

    def response_text(self, episode: Episode, turn: int) -> str:
        """Returns the newest response (turn from 1) as text, for rewards; training reads ids."""
        ids = episode.ids[episode.turn_of.index(turn) :]
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def decoder(self, rows: list[list[int]]) -> Decoder:
        """Returns a Decoder (Part II: another on GPUs)."""
        return Decoder(self, rows)

    def forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Returns logits of ids [B, T]. logits_to_keep: positions, or the number of last ones."""
        return self.model(ids, **inputs).logits

    def token_logprobs(self, ids: Tensor, is_sampled: Tensor) -> tuple[Tensor, Tensor]:
        """Returns log-probabilities [N] and entropies [N] of the sampled tokens, row by row.

        ids: [B, T], padded on the right.
        is_sampled: [B, T], False in the first column.
        """
        # No mask: the padding is on the right, which no sampled token attends to. Logits, the
        # largest tensor of a pass, are computed only where some row has sampled.
        columns = is_sampled[:, 1:].any(0).nonzero().flatten()  # [C]
        logits = self.forward(ids[:, :-1], use_cache=False, logits_to_keep=columns)  # [B, C, V]
        # Position t predicts token t + 1: the mask of those tokens, [B, C], selects [N, V].
        return self.logprobs_of(logits[is_sampled[:, columns + 1]], ids[is_sampled])

    def logprobs_of(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns [N] log-probabilities of targets, and [N] entropies. logits: [N, V]."""
        logp = (logits.float() / self.temperature).log_softmax(-1)  # [N, V]
        chosen = logp.gather(1, targets[:, None]).squeeze(1)
        # Without a bonus in the loss, the entropy needs no gradient, which would take memory.
        with torch.set_grad_enabled(self.learns_entropy):
            # The sum of -p log p. Unclamped, a logit of -inf has the gradient 0 * inf: NaN.
            return chosen, torch.special.entr(logp.clamp(min=-80).exp()).sum(-1)


# -- 9d. Sampling ---


class Decoder:
    """KV cache and next-token logits of a batch of rows of ids.

    The cache keeps keys and values of all tokens so far, so each token passes through
    the model once. Equal rows share the first pass, over whole prompts: the prefill.

    decoder = Decoder(policy, [[5, 6], [5, 6], [7]])   # two rows in the cache, then three
    tokens = decoder.sample(rng)                       # (token, logprob) for each row
    decoder.append([[8], [9], [8]])                    # logits of the next ones
    """

    def __init__(self, policy: Policy, rows: list[list[int]]) -> None:
        from transformers import DynamicCache

        self.policy = policy
        self.cache: Any = DynamicCache(config=policy.model.config)
        unique = [list(row) for row in dict.fromkeys(tuple(row) for row in rows)]
        self.mask = torch.zeros(len(unique), 0, dtype=torch.long, device=policy.device)
        self.append(unique)
        self.select([unique.index(row) for row in rows])

    def append(self, rows: list[list[int]]) -> None:
        """Feeds rows of ids. Shorter rows are padded on the left, where the mask [B, T] is 0.

        The newest token of each row is in the last column.
        """
        width = max(len(row) for row in rows)
        padded = [[-1] * (width - len(row)) + row for row in rows]  # -1: padding
        ids = torch.tensor(padded, device=self.mask.device)
        self.mask = torch.cat([self.mask, (ids >= 0).long()], 1)
        # Padding does not count: mask 0 0 1 1 1 has positions 0 0 0 1 2.
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        self.logits = self.next_logits(ids.clamp(min=0), positions)

    def next_logits(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Returns logits [B, V] of the tokens that follow ids [B, T]."""
        logits = self.policy.forward(
            ids,
            attention_mask=self.mask,
            position_ids=positions,
            cache=self.cache,
            use_cache=True,
            logits_to_keep=1,
        )
        return logits[:, -1]

    def select(self, rows: list[int]) -> None:
        """Keeps these rows, in this order; a row may be repeated."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]
        self.logits = self.logits[index]

    def sample(self, rng: torch.Generator | None) -> list[tuple[int, float]]:
        """Returns for each row a token and its log-probability. rng None: the likeliest token."""
        logits = self.logits.float()  # mechanism: rollout
        logp = (logits / self.policy.temperature).log_softmax(-1)
        if rng is None:
            token = logp.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(logp.exp(), 1, generator=rng)
        # [B, 1] each
        return list(zip(token[:, 0].tolist(), logp.gather(1, token)[:, 0].tolist()))


def respond(
    policy: Policy, episodes: list[Episode], turn: int, rng: torch.Generator | None
) -> None:
    """Samples a response for each episode, in one batch.

    Without cache and batch, for one episode::

        for _ in range(policy.max_new_tokens):
            logits = policy.forward(torch.tensor([episode.ids]))[0, -1]  # [V]
            logp = (logits / policy.temperature).log_softmax(-1)
            token = int(torch.multinomial(logp.exp(), 1))
            episode.add(token, turn, float(logp[token]))
            if token in policy.end_ids:
                break

    turn: from 1.
    """
    rows = episodes  # episodes that still sample
    # Each turn reads the conversation again, because rows have left the last decoder.
    decoder = policy.decoder([episode.ids for episode in rows])
    for number in range(policy.max_new_tokens):
        if number > 0:
            decoder.append([episode.ids[-1:] for episode in rows])
        # Records each token as it is drawn.
        unfinished = []
        for place, (token, logprob) in enumerate(decoder.sample(rng)):
            rows[place].add(token, turn, logprob)
            if token not in policy.end_ids:
                unfinished.append(place)
        # Finished rows leave; a GraphDecoder keeps them.
        if not unfinished:
            break
        if len(unfinished) < len(rows):
            rows = [rows[place] for place in unfinished]
            decoder.select(unfinished)
    for episode in episodes:
        episode.responses.append(policy.response_text(episode, turn))
        episode.truncated.append(episode.ids[-1] not in policy.end_ids)


def new_episodes(prompts: list[Prompt], group_size: int) -> list[Episode]:
    return [Episode(prompt) for prompt in prompts for _ in range(group_size)]


@torch.inference_mode()
def rollout(
    policy: Policy, episodes: list[Episode], seed: int | None, version: int = 0
) -> list[Episode]:
    """Samples all turns that have no response. Returns the episodes that fit the context.

    seed: random seed. None: greedy decoding.
    version: version of the policy's weights, for the record.
    """
    rng = None
    if seed is not None:
        rng = torch.Generator(policy.device).manual_seed(seed)
    longest = policy.context - policy.max_new_tokens
    for turn in range(max(len(episode.prompt.turns) for episode in episodes)):
        prompt = None
        ids: list[int] = []
        responding = []
        for episode in episodes:
            # Skips episodes that are past this turn, were too long for an earlier one, or ended.
            if len(episode.responses) != turn or turn == len(episode.prompt.turns):
                continue
            # The oldest version counts: later turns may be sampled by newer weights.
            if turn == 0:
                episode.version = version
            # Adjacent episodes may share a Prompt: its ids are made once.
            if episode.prompt is not prompt:
                prompt = episode.prompt
                ids = policy.prompt_ids(prompt, turn)
            episode.add_prompt(ids)
            if len(episode.ids) <= longest:
                responding.append(episode)
        if responding:
            respond(policy, responding, turn + 1, rng)
    return [e for e in episodes if len(e.responses) == len(e.prompt.turns)]


# -- 9e. Agreement of both programs ---


def k3(old_logprobs: Tensor, logprobs: Tensor) -> Tensor:
    """Returns the k3 estimator of each token: exp(d) - 1 - d, with d = logprobs - old_logprobs.

    Its mean over samples estimates KL(old, new) (joschu.net/blog/kl-approx.html); each is >= 0.
    By example, 0.50 is recomputed as 0.40: d = -0.223, and 0.8 - 1 + 0.223 = 0.023.

    Shape: [N] each -> [N] float64
    """
    d = (logprobs - old_logprobs).detach().double()
    return d.exp() - 1 - d


def padded(rows: list[list[Any]], device: torch.device) -> Tensor:
    """Returns a tensor [B, T] of B rows, with zeros on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)


def tensors_of(episodes: list[Episode], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ids [B, T], is_sampled [B, T], and recorded log-probabilities [N]."""
    ids = padded([episode.ids for episode in episodes], device)
    is_sampled = padded([episode.turn_of for episode in episodes], device) > 0
    logprobs = padded([episode.logprobs for episode in episodes], device)
    return ids, is_sampled, logprobs[is_sampled]


@torch.no_grad()
def recompute_logprobs(policy: Policy, episodes: list[Episode]) -> tuple[Tensor, Tensor]:
    """Returns recorded and recomputed log-probabilities, [N] each."""
    ids, is_sampled, recorded = tensors_of(episodes, policy.device)
    recomputed, _ = policy.token_logprobs(ids, is_sampled)
    return recorded, recomputed


def num_asked_again(episodes: list[Episode]) -> int:
    """Counts letters that a turn asks for although the previous response has them."""
    num_again = 0
    for episode in episodes:
        for response, turn in zip(episode.responses, episode.prompt.turns[1:]):
            num_again += sum(letter in response for letter in turn.answer)
    return num_again


@stage(instead="logits = self.logits.bfloat16()")
async def demo_rollout(report: Report) -> None:
    """The trainer recomputes the log-probabilities that sampling recorded."""
    cfg = Config(seed=report.cfg.seed, max_new_tokens=4)
    task = LetterTask(cfg.seed)
    policy = Policy(cfg)
    fixed = new_episodes([task.prompt(number) for number in range(16)], 4)
    recorded, recomputed = recompute_logprobs(policy, rollout(policy, fixed, seed=0))
    # k3 is about d * d / 2: rounding gives 1e-14 in fp32, 1e-5 in bfloat16.
    exact = float(k3(recorded, recomputed).mean())
    rounded = float(k3(recorded.bfloat16(), recomputed).mean())
    report.check("k3 of recorded and recomputed", exact, "<", 1e-10)
    report.check("the same, if recorded in bfloat16", rounded, ">", 1e-10)

    # An environment's turns depend on the responses: a letter once said is not asked again.
    environment = RetryTask(cfg.seed)
    episodes = new_episodes([environment.prompt(number) for number in range(16)], 1)
    seeds = count()
    for episode in episodes:
        rollout(policy, [episode], next(seeds))
        while reply := environment.reply(episode.prompt, episode.responses):
            episode.add_reply(reply)
            rollout(policy, [episode], next(seeds))
    report.check("letters asked again by an environment", num_asked_again(episodes), "==", 0)
    report.check("the same, by turns fixed in advance", num_asked_again(fixed), ">", 0)


# == 10. LOSSES ====
# Problem. J, the mean reward of the policy, should grow. Samples give its gradient, but noisily;
#   and samples of an older policy give a biased gradient.
# Rule. Three remedies:
#   a baseline   lowers noise. The advantage A replaces the reward: how much better the response
#                was than others to the same prompt.
#   a ratio      r = p now / p when sampled lowers bias: samples of an old policy are weighted as
#                if the current policy had drawn them.
#   a clip       bounds the push: how far one batch can move a token's probability.
# Cost. Ratios add noise: a few tokens may have most of the weight. Clipped tokens get no gradient.
# The core is `advantages` and `ppo`; they meet in `token_losses`.
#
# J = sum of p R over responses: probability times reward. As grad log p = grad p / p,
#
#   grad J = sum of R grad p = sum of p (R grad log p) = mean of R grad log p over samples
#
# A baseline b from other samples adds no bias: the mean of b grad log p is b grad (sum of p), and
# that sum is 1.
#
# From responses to tokens. log p of a response is the sum of log p of its tokens, so each token
# gets the gradient A grad log p with the advantage of its response. The ratio of a response, the
# product of its tokens' ratios, would explode with its length. The losses take the ratio of each
# token alone, which ignores how likely the tokens before it have become.
#
# The defaults are GRPO with a second clip (see `ppo`), without its KL term (Part II: --kl), and
# with the mean over all tokens of a batch as its loss (DAPO, Yu 2025).


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """Returns advantages [..., G] of rewards [..., G] of groups.

    By example, four responses:

        none            1     1     1     0
        leave_one_out   0.33  0.33  0.33 -1      (RLOO, Ahmadian 2024)
        group           0.58  0.58  0.58 -1.73   (GRPO, Shao 2024)

    leave_one_out subtracts the mean of the *others*: G / (G - 1) times `centred`. group divides by
    the standard deviation: all prompts get the same scale, which adds a bias.
    """
    if kind == "none":
        return rewards
    rewards = rewards - rewards[..., :1]  # so that equal rewards give exact zeros
    centred = rewards - rewards.mean(-1, keepdim=True)
    if kind == "leave_one_out":
        return centred * rewards.shape[-1] / max(rewards.shape[-1] - 1, 1)
    if kind == "group":
        return centred / (rewards.std(-1, correction=0, keepdim=True) + 1e-4)
    raise ValueError(f"unknown kind of advantage: {kind}")


# A loss maps tensors [N], an element for each sampled token, to [N], elementwise:
#   logp           its log-probability now, with a gradient
#   old_logprobs   when it was sampled, by an older policy
#   prox_logprobs  under the weights before this batch (proximal policy: see `decoupled`)
#   A              the advantage of its response (a critic: its own)

MAX_RATIO = 2.0  # maximum weight of a sample in decoupled
MAX_BAD_RATIO = 3.0  # beyond this a token with A < 0 has no gradient: see ppo


def ratio_of(logp: Tensor, old_logprobs: Tensor) -> Tensor:
    """Returns the ratio r, without overflow."""
    return (logp - old_logprobs).clamp(max=20).exp()


def reinforce(logp: Any, old_logprobs: Any, prox_logprobs: Any, A: Any, cfg: Config) -> Tensor:
    """Returns -A log p (Williams 1992). Its mean gradient is -grad J if samples are fresh."""
    return -A * logp


def ppo(logp: Any, old_logprobs: Any, prox_logprobs: Any, A: Any, cfg: Config) -> Tensor:
    """Returns the clipped loss (Schulman 2017) with a dual clip (Ye 2020).

    By example, a good token (A = 1) that was sampled with probability 0.50. At 0.55 r is 1.1, and
    the loss -r has a gradient. At 0.65 r is 1.3, and the loss -min(1.3, 1.2) is a constant. A *bad*
    token (A = -1) at 0.65 has the loss -min(-1.3, -1.2) = 1.3, whose gradient grows with r, so
    beyond r = 3 it is cut to 0.
    """
    ratio = ratio_of(logp, old_logprobs)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    surrogate = torch.min(A * ratio, A * clipped)  # mechanism: losses
    return -torch.where(A < 0, surrogate.clamp(min=MAX_BAD_RATIO * A), surrogate)


def decoupled(logp: Any, old_logprobs: Any, prox_logprobs: Any, A: Any, cfg: Config) -> Tensor:
    """Returns the loss of AReaL (Fu 2025): one ratio weighs a sample, another is clipped.

    The weight, prox / old, is a constant. The clip applies to now / prox, which is 1 until the
    first update. With `ppo` a stale token may start beyond the clip, without a gradient.
    """
    weight = ratio_of(prox_logprobs, old_logprobs).clamp(max=MAX_RATIO)
    return weight * ppo(logp, prox_logprobs, prox_logprobs, A, cfg)


LOSSES = {"reinforce": reinforce, "ppo": ppo, "decoupled": decoupled}

# -- 10a. The learner ---


@dataclass
class Batch:
    """A micro-batch of episodes: B rows, T columns, N sampled tokens, row by row."""

    num_tokens: int  # sampled in all episodes of a step: the denominator of the loss
    ids: Tensor  # [B, T]
    is_sampled: Tensor  # [B, T]
    old_logprobs: Tensor  # [N]
    advantage: Tensor  # [N]
    prox_logprobs: Tensor | None = None  # [N], from the first update on


@dataclass
class StepStats:
    """Statistics of one update. Means are over sampled tokens that were trained."""

    num_tokens: int  # trained or not
    loss: float  # ppo: near 0, as A sums to 0 in a group; its gradient is not
    entropy: float  # nats per token; at 0 the policy is deterministic
    k3: float  # between recorded and recomputed log-probabilities
    grad_norm: float  # before clipping to 1
    seconds: float


class Learner:
    """A policy, its optimizer, and its updates. Parameters, gradients and moments are in fp32.

    In bfloat16 most updates at a rate of 1e-6 would be lost to rounding.
    """

    def __init__(self, policy: Policy, cfg: Config) -> None:
        self.policy = policy
        self.cfg = cfg
        self.weights = list(policy.model.parameters())
        self.optimizer = torch.optim.Adam(self.weights, cfg.lr, fused=True)  # in one kernel

    def step(self, episodes: list[Episode]) -> StepStats:
        """Makes cfg.epochs updates on these episodes.

        Returns statistics of the first update, which starts at the published weights.
        """
        batches = self.micro_batches(episodes, self.advantages(episodes))
        stats = [self.update(batches) for _ in range(self.cfg.epochs)]
        return stats[0]

    def advantages(self, episodes: list[Episode]) -> list[list[float]]:
        """Returns the advantage of each token of each episode; 0 where it was not sampled.

        A turn is worth its rewards to go, its own and later ones: with [0.5, 0.2], 0.7 and 0.2. It
        is compared with the same turn of other episodes in the group. If no other has the turn,
        a baseline leaves 0.
        """
        per_token = []
        for group in groups_of(episodes):
            by_turn = [[0.0] for _ in group]  # by_turn[i][turn]; turn 0: not sampled
            for turn in range(1, 1 + max(len(episode.rewards) for episode in group)):
                # Episodes with this turn have all earlier ones.
                members = [i for i, episode in enumerate(group) if turn <= len(episode.rewards)]
                to_go = torch.tensor([sum(group[i].rewards[turn - 1 :]) for i in members])
                gains = advantages(to_go, self.cfg.advantage).tolist()
                for i, gain in zip(members, gains):
                    by_turn[i].append(gain)
            for episode, values in zip(group, by_turn):
                per_token.append([values[turn] for turn in episode.turn_of])
        return per_token

    def update(self, batches: list[Batch]) -> StepStats:
        """Makes one update from all micro-batches."""
        start = time.perf_counter()
        per_token = []
        for batch in batches:
            logp, entropy = self.policy.token_logprobs(batch.ids, batch.is_sampled)  # [N] each
            # In the first update this is the policy before the batch.
            if batch.prox_logprobs is None:
                batch.prox_logprobs = logp.detach()
            loss = self.token_losses(batch, logp, entropy)
            # The mean over the tokens of the step, in parts: gradients add up.
            (loss.sum() / batch.num_tokens).backward()
            per_token.append(torch.stack([loss, entropy, k3(batch.old_logprobs, logp)]).detach())
        # Clips the norm of the gradients to 1, and returns the norm before.
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self.weights, 1.0))
        # One NaN would spoil all weights, so such an update is skipped.
        if math.isfinite(grad_norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        # [3, N] -> three means
        loss_mean, entropy_mean, k3_mean = torch.cat(per_token, dim=1).mean(1).tolist()
        seconds = time.perf_counter() - start
        num_tokens = batches[0].num_tokens
        return StepStats(num_tokens, loss_mean, entropy_mean, k3_mean, grad_norm, seconds)

    def token_losses(self, batch: Batch, logp: Tensor, entropy: Tensor) -> Tensor:
        """Returns the loss of each token, [N]."""
        tensors = (logp, batch.old_logprobs, batch.prox_logprobs, batch.advantage)
        losses = LOSSES[self.cfg.loss](*tensors, self.cfg)
        # A bonus for entropy keeps the policy from becoming deterministic too soon.
        return losses - self.cfg.entropy * entropy

    def micro_batches(self, episodes: list[Episode], advantage: list[list[float]]) -> list[Batch]:
        """Packs episodes into micro-batches, sorted by length to save padding."""
        num_tokens = sum(turn > 0 for episode in episodes for turn in episode.turn_of)
        rows = self.rows_to_train(advantage)
        rows.sort(key=lambda row: -len(episodes[row].ids))
        device = self.policy.device
        batches = []
        for part in self.partition(rows, episodes):
            ids, is_sampled, old_logprobs = tensors_of([episodes[row] for row in part], device)
            gains = padded([advantage[row] for row in part], device)[is_sampled]  # [N]
            batches.append(Batch(num_tokens, ids, is_sampled, old_logprobs, gains))
        return batches

    def rows_to_train(self, advantage: list[list[float]]) -> list[int]:
        """Returns the rows that have a gradient: some advantage, or an entropy bonus."""
        everything = list(range(len(advantage)))
        if self.cfg.entropy:
            return everything
        # If all advantages are 0, keeps all rows, for statistics.
        return [row for row in everything if any(advantage[row])] or everything

    def partition(self, rows: list[int], episodes: list[Episode]) -> list[list[int]]:
        """Cuts rows, the longest first, into micro-batches.

        By example, rows of these lengths at 1000 tokens: 500 400 | 300 300 200 | 150 50 50 50
        """
        parts = []
        while rows:
            # Rows are padded to the longest.
            longest = len(episodes[rows[0]].ids)
            num_rows = max(1, self.cfg.tokens_per_micro_batch // longest)
            parts.append(rows[:num_rows])
            rows = rows[num_rows:]
        return parts


Group = list[Episode]  # of one prompt


def groups_of(episodes: list[Episode]) -> list[Group]:
    """Splits a list in which the episodes of each prompt are adjacent."""
    groups = groupby(episodes, lambda episode: episode.prompt.number)
    return [list(members) for _, members in groups]


# -- measurement ---


@dataclass
class Bandit:
    """A contextual bandit: 4 prompts, and 16 responses of one token each.

    A policy is a table [4, 16] of logits. grad J is computed exactly, and compared with
    estimates from samples.
    """

    rewards: Tensor  # [4, 16]
    old: Tensor  # [4, 16]: the policy that sampled
    samples: Tensor  # [batches, 4, 8]: responses

    def true_gradient(self, now: Tensor) -> Tensor:
        """Returns grad J [4, 16]."""
        table = now.clone().requires_grad_()
        mean_reward = (table.softmax(-1) * self.rewards).sum(-1).mean()
        return torch.autograd.grad(mean_reward, table)[0]

    def estimates(self, now: Tensor, loss: str, kind: str, cfg: Config = Config()) -> Tensor:
        """Returns gradients [batches, 4, 16], each from one batch of samples."""
        shape = (len(self.samples), 4, 16)
        tables = now.expand(shape).clone().requires_grad_()  # one copy for each batch
        # [batches, 4, 8]: log-probability now and when sampled, and advantage of each sample.
        logp = tables.log_softmax(-1).gather(2, self.samples)
        old_logprobs = self.old.log_softmax(-1).expand(shape).gather(2, self.samples)
        advantage = advantages(self.rewards.expand(shape).gather(2, self.samples), kind)
        losses = LOSSES[loss](logp, old_logprobs, logp.detach(), advantage, cfg)
        # Loss i depends only on table i: the gradient of the sum holds that of each loss.
        mean_losses = losses.mean((1, 2))  # [batches]
        return -torch.autograd.grad(mean_losses.sum(), tables)[0]

    def compare(self, now: Tensor, loss: str, kind: str) -> Record:
        """Returns the angle of the mean estimate to the true gradient, and the noise."""
        estimates = self.estimates(now, loss, kind)
        mean = estimates.mean(0)
        truth = self.true_gradient(now)
        cosine = (mean * truth).sum() / mean.norm() / truth.norm()
        deviation = (estimates - mean).square().sum((1, 2)).mean().sqrt()
        return {
            "loss": loss,
            "advantage": kind,
            "degrees off": math.degrees(math.acos(cosine)),
            "relative deviation": float(deviation / mean.norm()),
        }

    def kl_to_old(self, cfg: Config) -> float:
        """Returns how far (KL, in nats) 100 updates of ppo on the first batch move the policy."""
        first = replace(self, samples=self.samples[:1])
        now = self.old
        for _ in range(100):
            now = now + 2 * first.estimates(now, "ppo", "group", cfg)[0]  # learning rate 2
        difference = self.old.log_softmax(-1) - now.log_softmax(-1)
        return float((self.old.softmax(-1) * difference).sum(-1).mean())


@stage(instead="surrogate = A * ratio")
async def demo_losses(report: Report) -> None:
    """A baseline lowers noise, a ratio lowers the bias of staleness, a clip bounds the push."""
    # 2,000 batches of 8 samples for each of the 4 prompts.
    rng = torch.Generator().manual_seed(0)
    rewards = torch.rand(4, 16, generator=rng).square()
    old = torch.randn(4, 16, generator=rng)
    samples = torch.multinomial(old.softmax(-1), 2000 * 8, True, generator=rng)
    bandit = Bandit(rewards, old, samples.view(4, 2000, 8).transpose(0, 1))
    # A policy that is 8 steps ahead of the one that sampled.
    now = old
    for _ in range(8):
        step = bandit.true_gradient(now)
        now = now + 0.5 * step / step.norm()
    fresh = [bandit.compare(old, "reinforce", kind) for kind in ("none", "leave_one_out")]
    # Here prox is now, so `decoupled` has the gradient of `reinforce` times the ratio, at most 2.
    stale = [bandit.compare(now, loss, "leave_one_out") for loss in ("reinforce", "decoupled")]
    rows = [{"staleness": 0, **row} for row in fresh]
    report.table(rows + [{"staleness": 8, **row} for row in stale])

    without_baseline, with_baseline = fresh
    quieter = with_baseline["relative deviation"] / without_baseline["relative deviation"]
    report.check("deviation with a baseline / without", quieter, "<", 0.8)
    without_ratio, with_ratio = stale
    straighter = with_ratio["degrees off"] / without_ratio["degrees off"]
    report.check("degrees off with a ratio / without", straighter, "<", 0.9)
    no_clip = Config(clip_low=1.0, clip_high=math.inf)
    push = bandit.kl_to_old(Config()) / bandit.kl_to_old(no_clip)
    report.check("push with a clip / without", push, "<", 0.2)


# == 11. SYNC RL ====
# Problem. Sampling, scoring and updating run in different processes, which need each other's
#   results in the right order, with the right weights.
# Rule. One loop, one thing at a time. Generators wait for the newest version before they sample,
#   and no step is made meanwhile, so staleness is 0. `Progress` counts every group.
# Cost. Each side waits while the other works (section 12).
#
# In one process ten lines suffice, after `from monarch_rl import *`:
#
#   cfg, task = demo_config(Config()), LetterTask(0)
#   policy = Policy(cfg)
#   learner = Learner(policy, cfg)
#   prompts = training_prompts(task)
#   for step in range(300):
#       episodes = new_episodes(list(islice(prompts, 16)), group_size=8)
#       episodes = rollout(policy, episodes, seed=step)
#       for episode in episodes:
#           episode.rewards = task.score(episode.prompt, episode.responses)
#       learner.step(episodes)
#
# With processes, who calls whom:
#
#   train_sync                  main process: draws prompts
#     Run.sample                  counts groups that get lost
#       Run.sample_and_score
#         Service.request ----> Generator.rollout      one of the generators
#                                 WeightReader.pull      the newest weights
#                                 rollout, respond       turns, tokens
#                                   Decoder.sample         one token for each row
#         Service.request ----> RewardWorker.ask       a reward for each response
#     Run.step
#       Service.request ------> Trainer.step
#                                 Learner.step           updates
#                                 WeightWriter.publish   version + 1
#
# -- 11a. The loop ---


async def train_sync(run: Run, num_steps: int) -> None:
    """Makes num_steps steps: samples, scores, and trains."""
    groups: list[Group] = []
    while num_steps > 0:
        prompts = run.draw(run.cfg.prompts_per_step)
        groups += await run.sample(prompts, num_parts=run.cfg.generators)
        # Lost groups make a batch smaller. Below min_groups, more prompts are drawn.
        if len(groups) >= run.min_groups:
            await run.step(groups)
            groups = []
            num_steps -= 1


async def scatter_gather(
    items: list[Any], num_parts: int, request: Callable[..., Any]
) -> list[Any]:
    """Splits items, calls `request` on all parts at once, and joins the answers."""
    # 5 items in 2 parts are 2 and 3.
    ends = [len(items) * i // num_parts for i in range(num_parts + 1)]
    parts = [items[start:end] for start, end in pairwise(ends)]
    answers = await gather(*[request(part) for part in parts if part])
    return [result for answer in answers for result in answer]


# -- 11b. The actors of a run ---

Conversations = list[tuple[Prompt, list[str]]]  # of one group: (prompt, responses)


# Each worker process calls one of these functions. Part II passes others.


def make_learner(cfg: Config) -> tuple[Learner, WeightWriter]:
    policy = Policy(cfg)
    return Learner(policy, cfg), WeightWriter(dict(policy.model.named_parameters()), cfg.generators)


def make_policy(cfg: Config, number: int) -> Policy:
    # Part II: a GPU by the generator's number.
    return Policy(cfg)


def make_scorer(cfg: Config) -> Callable[[str, list[Conversations]], list[Any]]:
    """Returns f; f("score", groups) calls task.score(prompt, responses) of each episode."""
    task = LetterTask(cfg.seed)
    return lambda method, groups: [
        [getattr(task, method)(*pair) for pair in group] for group in groups
    ]


class Trainer(Worker):
    def setup(
        self, number: int, cfg: Config, make_learner: Callable[..., Any], version: int
    ) -> ArenaHandle:
        """Publishes the first weights, as `version`. Returns where generators find them."""
        self.learner, self.writer = make_learner(cfg)
        # The copy overlaps the next step, and ends before that step changes the weights.
        self.learner.optimizer.register_step_pre_hook(lambda *_: self.writer.wait())
        self.version = version
        self.writer.publish(version)
        self.writer.wait()
        return self.writer.handle

    def step(self, episodes: list[Episode]) -> StepStats:
        """Trains on a batch, and begins to publish the next version."""
        stats = self.learner.step(episodes)
        self.version += 1
        self.writer.publish(self.version)
        return stats


class Generator(Worker):
    def setup(
        self,
        number: int,
        cfg: Config,
        make_policy: Callable[[Config, int], Policy],
        make_reader: Callable[..., WeightReader],
    ) -> None:
        """Loads the policy. The arena may not exist yet."""
        self.number = number
        self.policy = make_policy(cfg, number)
        self.make_reader = make_reader
        self.reader: WeightReader | None = None

    def rollout(
        self, handle: ArenaHandle, at_least: int, episodes: list[Episode], seed: int | None
    ) -> list[Episode]:
        """Samples the next turns with weights of version `at_least` or newer."""
        if self.reader is None:
            weights = dict(self.policy.model.named_parameters())
            self.reader = self.make_reader(handle, self.number, weights)
        version = self.reader.pull(at_least)  # mechanism: sync_rl
        return rollout(self.policy, episodes, seed, version)


class RewardWorker(Worker):
    def setup(self, number: int, cfg: Config, make_scorer: Callable[[Config], Any]) -> None:
        self.call_task = make_scorer(cfg)

    def ask(self, method: str, groups: list[Conversations]) -> list[Any]:
        """Returns the result of a task method for each episode: "score", in Part II "reply"."""
        return self.call_task(method, groups)


# -- 11c. A run ---


def numbers_of(groups: list[Group]) -> set[int]:
    return {group[0].prompt.number for group in groups}


@dataclass
class Progress:
    """Counters of a run, and the state of its groups.

    started = trained + dropped + lost + in flight
    """

    rows: list[Record] = field(default_factory=list)  # of each step
    heldout: list[Any] = field(default_factory=list)  # (version, accuracy) pairs
    num_drawn: int = 0  # next prompt number, not a count
    # Numbers of prompts at a generator, reward worker, buffer or trainer.
    in_flight: set[int] = field(default_factory=set)
    # dropped: too old, left at the end (Part II: equal rewards); lost: no rewards, too long, failed
    ended: dict[str, int] = field(default_factory=lambda: dict(trained=0, dropped=0, lost=0))

    def end(self, how: str, numbers: set[int]) -> None:
        """Moves groups from `in_flight` to a count of `ended`."""
        self.in_flight -= numbers
        self.ended[how] += len(numbers)

    def counts(self) -> dict[str, int]:
        started = sum(self.ended.values()) + len(self.in_flight)
        return {"started": started, **self.ended, "in_flight": len(self.in_flight)}


class Run:
    """The three services of a run, and its progress."""

    min_groups = 1  # of a step; each rank of a trainer needs one

    def __init__(
        self,
        cfg: Config,
        pool: Pool,
        progress: Progress | None = None,
        unresponsive_s: float = 30.0,
    ) -> None:
        self.cfg = cfg
        self.pool = pool
        self.progress = progress or Progress()
        service = partial(Service, pool=pool, unresponsive_s=unresponsive_s)
        # A lost trainer has lost the newest weights, so it is not replaced.
        self.trainer = service(
            Trainer, 1, setup_args=(cfg, make_learner, self.version), replaces=False
        )
        self.generators = service(
            Generator, cfg.generators, setup_args=(cfg, make_policy, WeightReader)
        )
        self.reward_workers = service(
            RewardWorker, cfg.reward_workers, setup_args=(cfg, make_scorer)
        )
        self.errors: Counter[str] = Counter()  # why groups and episodes were lost
        self.num_too_long = 0  # episodes beyond the context
        self.set_task(LetterTask(cfg.seed))

    def set_task(self, task: Task) -> None:
        self.task = task
        self.prompts = training_prompts(task, self.progress.num_drawn)
        self.held_out = held_out_prompts(task, self.cfg.eval_prompts)

    @property
    def version(self) -> int:
        """The version of the trainer's weights: one per step."""
        return len(self.progress.rows)

    @property
    def services(self) -> list[Service]:
        return [self.trainer, self.generators, self.reward_workers]

    async def begin(self) -> None:
        await gather(*[service.begin() for service in self.services])
        await self.trainer.until_ready(1)  # raises if it is lost already
        self.handle = self.trainer.replicas[0].result

    async def close(self) -> None:
        await gather(*[service.close() for service in self.services])

    def draw(self, num_prompts: int) -> list[Prompt]:
        """Returns the next prompts. Their groups are in flight."""
        # Without a trainer, rollouts may fail, and a loop would draw forever.
        if not self.trainer.ready():
            raise ReplicaLost("the trainer was lost")
        prompts = []
        for prompt in islice(self.prompts, num_prompts):
            prompts.append(prompt)
            # max: a resumed run (Part II) first draws smaller numbers again.
            self.progress.num_drawn = max(self.progress.num_drawn, prompt.number + 1)
            self.progress.in_flight.add(prompt.number)
        return prompts

    async def sample(self, prompts: list[Prompt], num_parts: int = 1) -> list[Group]:
        """Returns groups to train on. Prompts without rewards count as lost."""
        part = partial(self.sample_and_score, group_size=self.cfg.group_size, seed=self.cfg.seed)
        groups = await scatter_gather(prompts, num_parts, part)
        # Counts once all parts end: a resumed run (Part II) draws an unfinished batch again.
        self.progress.end("lost", {prompt.number for prompt in prompts} - numbers_of(groups))
        return groups

    async def sample_and_score(
        self, prompts: list[Prompt], group_size: int, seed: int | None
    ) -> list[Group]:
        """Returns groups of scored episodes, or none if a request fails."""
        # To bound KV caches, a request has at most 64 prompts and 512 rows, or one group.
        size = max(1, min(64, 512 // group_size))
        try:
            episodes = await scatter_gather(
                prompts,
                max(1, ceil(len(prompts) / size)),
                lambda some: self.request_rollout(new_episodes(some, group_size), seed),
            )
            sampled = groups_of(episodes)
            conversations = [[(e.prompt, e.responses) for e in members] for members in sampled]
            score = partial(self.reward_workers.request, "ask", "score")
            scores = await scatter_gather(conversations, self.cfg.reward_workers, score)
        except (ReplicaLost, ActorError) as error:
            self.note_error(cause_of(error))
            return []
        groups = []
        for members, rewards in zip(sampled, scores, strict=True):
            scored = []
            for episode, reward in zip(members, rewards):
                if isinstance(reward, str):  # Part II: an error
                    self.note_error(reward)
                else:
                    episode.rewards = reward
                    scored.append(episode)
            # A group of one has no baseline (`evaluate` needs none).
            if len(scored) >= min(2, group_size):
                groups.append(scored)
        return groups

    async def request_rollout(self, episodes: list[Episode], seed: int | None) -> list[Episode]:
        """Makes one request. Returns the episodes that fit the context."""
        # A repeated request has the same seed. The seeds of a run differ, and are < 2^63.
        if seed is not None:
            turn = len(episodes[0].responses)
            seed = seed % 10**9 * 1_000_000_007 + turn * 500_000_003 + episodes[0].prompt.number
        sampled = await self.generators.request(
            "rollout", self.handle, self.version, episodes, seed
        )
        self.num_too_long += len(episodes) - len(sampled)
        return sampled

    async def step(self, groups: list[Group]) -> None:
        """Trains on a batch. Counts the groups, and adds a row."""
        stats = await self.trainer.request("step", list(chain(*groups)))
        row = self.describe(groups, stats)
        self.progress.end("trained", numbers_of(groups))
        self.progress.rows.append(row | self.progress.counts())

    def note_error(self, reason: str) -> None:
        self.errors[reason] += 1

    def describe(self, groups: list[Group], stats: StepStats) -> Record:
        """Returns the row of the new step. All episodes of a group have one version."""
        episodes = list(chain(*groups))
        return {
            "step": self.version + 1,
            "reward": fmean(sum(episode.rewards) for episode in episodes),
            "staleness": self.version - min(group[0].version for group in groups),
            **asdict(stats),
        }

    async def evaluate(self) -> float | None:
        """Returns the share of held-out prompts whose greedy responses get the full reward, 1.

        None if no prompt could be scored.
        """
        groups = await self.sample_and_score(self.held_out, 1, seed=None)
        num_right = sum(sum(group[0].rewards) > 0.999 for group in groups)
        # A prompt that could not be scored counts as wrong.
        accuracy = num_right / len(self.held_out) if groups else None
        self.progress.heldout.append((self.version, accuracy))
        return accuracy


def training_prompts(task: Task, first: int = 0) -> Iterator[Prompt]:
    """Yields the prompts of a task from this number on, without held-out ones."""
    for number in count(first):
        prompt = task.prompt(number)
        if not prompt.is_held_out:
            yield prompt


def held_out_prompts(task: Task, num_prompts: int) -> list[Prompt]:
    """Returns at most num_prompts held-out prompts of a task, each once."""
    by_text: dict[str, Prompt] = {}
    # About 3,000 are held out. A file may hold out fewer, or none.
    for number in range(30_000):
        prompt = task.prompt(number)
        if prompt.is_held_out:
            by_text.setdefault(str([turn.messages for turn in prompt.turns]), prompt)
        if len(by_text) == num_prompts:
            break
    return list(by_text.values())


# -- measurement ---


def demo_config(cfg: Config) -> Config:
    return replace(cfg, max_new_tokens=4, lr=1e-3, entropy=0.01)


async def begin_demo(report: Report) -> Run:
    """Returns a run whose policy has a held-out accuracy near 0.07 (seed 0)."""
    run = Run(demo_config(report.cfg), report.pool, unresponsive_s=2.0)
    await run.begin()
    # A head start: 60 supervised steps (Part II), published as version 0.
    await run.trainer.request(warm_start, 60)
    return run


@stage(instead="version = 0")
async def demo_sync_rl(report: Report) -> None:
    """In a synchronous loop both programs agree, and the accuracy rises."""
    run = await begin_demo(report)
    before = await run.evaluate() or 0.0
    await train_sync(run, 100)
    after = await run.evaluate() or 0.0
    k3_max = max(row["k3"] for row in run.progress.rows)
    report.check("largest k3 of recorded and recomputed", k3_max, "<", 1e-10)
    report.check("largest staleness", max(row["staleness"] for row in run.progress.rows), "==", 0)
    report.check(f"held-out accuracy of {len(run.held_out)}", after, ">", before + 0.2)
    await run.close()


# == 12. ASYNC RL ====
# Problem. In the synchronous loop one side always waits for the other. If both run all the time,
#   samples grow old without a bound.
# Rule. Two loops and a buffer. The first requests groups, so that at most K + 1 batches are in
#   flight. The second takes a batch, and trains. A group older than K versions is dropped.
# Cost. Stale samples, which the loss must correct (section 10). Dropped groups are wasted work.
#
#   generate                                         learn
#     draw    waits for room: at most K + 1            take   waits for a batch;
#             batches are in flight                           drops groups older than K
#     sample, score --> ReplayBuffer: groups ready --> step   version + 1, published
#       ^                                                |
#       +------------- room for another batch -----------+
#
# Why K + 1 batches: one trains and K follow; the last is K versions old when it is used. That alone
# is no bound: other groups overtake a slow one. By example, with K = 1 and the trainer at v:
#
#   v = 5   batches a and b begin; two are in flight
#   v = 5   a step on a (staleness 0): v = 6; batch c begins
#   v = 6   a step on b (staleness 1): v = 7; batch d begins
#   v = 7   c is late, and d comes first: a step on d (staleness 0): v = 8
#   v = 8   c comes, of version 6. Its staleness would be 2, so it is dropped
#
# Groups with long responses come late, and are dropped more often: a bias toward short ones.
#
# -- 12a. Two loops ---


async def train_async(run: Run, max_staleness: int, num_steps: int, num_batches: int = 0) -> None:
    """Makes num_steps steps while `generate` samples."""
    async with generating(run, max_staleness, num_batches) as buffer:
        await learn(buffer, num_steps)


async def generate(buffer: ReplayBuffer, tasks: TaskGroup) -> None:
    """Draws prompts when there is room, and starts a request for them. Ends when cancelled."""
    while True:
        prompts = await buffer.draw()
        # Not awaited: the next `draw` waits for room only.
        tasks.create_task(buffer.sample_into(prompts))


async def learn(buffer: ReplayBuffer, num_steps: int) -> None:
    for _ in range(num_steps):
        batch = await buffer.take()
        # Updates, and begins to publish. Then the batch is no longer in flight.
        await buffer.run.step(batch)
        await buffer.wake()


@asynccontextmanager
async def generating(
    run: Run, max_staleness: int, num_batches: int = 0
) -> AsyncIterator[ReplayBuffer]:
    """Runs `generate` inside this context. At its end, awaits groups in flight and drops them.

    If the body or `generate` raises, the other is cancelled.

    num_batches: maximum in flight. Default: K + 1.
    """
    buffer = ReplayBuffer(run, max_staleness, num_batches or max_staleness + 1)
    try:
        async with TaskGroup() as tasks:
            producer = tasks.create_task(generate(buffer, tasks))
            yield buffer
            # Ends new requests. The TaskGroup waits for the rest.
            producer.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the first error, not ExceptionGroup
    run.progress.end("dropped", numbers_of(buffer.ready))


# -- 12b. The buffer ---


class ReplayBuffer:
    """A queue of groups with bounded staleness. Each group is used at most once.

    One event loop runs all methods, so they need no thread lock.
    """

    def __init__(self, run: Run, max_staleness: int, num_batches: int) -> None:
        self.run = run
        self.max_staleness = max_staleness
        self.batch_size = max(run.min_groups, run.cfg.prompts_per_step)
        # While one batch trains, K are sampled: a request to each generator, at most a batch long.
        # K = 2, batches of 16 and 2 generators: requests of 16 prompts.
        share = max_staleness * self.batch_size // run.cfg.generators
        self.request_size = max(1, min(self.batch_size, share))
        self.max_in_flight = num_batches * self.batch_size  # groups
        self.ready: list[Group] = []
        self.changed = asyncio.Condition()

    async def draw(self) -> list[Prompt]:
        """Waits for room for a request, then draws its prompts."""
        async with self.changed:
            await self.changed.wait_for(self.has_room)
        return self.run.draw(self.request_size)

    def has_room(self) -> bool:
        return len(self.run.progress.in_flight) + self.request_size <= self.max_in_flight

    async def sample_into(self, prompts: list[Prompt]) -> None:
        """Samples, scores, and adds the groups. Lost groups also free room."""
        self.ready.extend(await self.run.sample(prompts))
        await self.wake()

    async def wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def take(self) -> list[Group]:
        """Waits for a batch that is not too old for the trainer's next step."""
        async with self.changed:
            await self.changed.wait_for(self.has_batch)
            return [self.ready.pop(0) for _ in range(self.batch_size)]

    def has_batch(self) -> bool:
        """Drops groups that are too old, and returns whether a batch is left."""
        for group in list(self.ready):
            if self.run.version - group[0].version > self.max_staleness:  # mechanism: async_rl
                self.ready.remove(group)
                self.run.progress.end("dropped", numbers_of([group]))
                self.changed.notify_all()  # there is room now
        return len(self.ready) >= self.batch_size


# -- measurement ---


async def inject_fault(run: Run, service: Service, at_step: int, how: signal.Signals) -> None:
    """Waits for a step, and sends a signal to the first replica."""
    while run.version < at_step:
        await sleep(0.01)
    os.kill(service.replicas[0].processes.ids[0], how)


@stage(instead="if False:")
async def demo_async_rl(report: Report) -> None:
    """Two loops and a buffer: staleness is bounded, and lost workers are replaced."""
    max_staleness = max(1, report.cfg.max_staleness)
    run = await begin_demo(report)
    before = await run.evaluate() or 0.0
    start_s = time.monotonic()
    await train_sync(run, 60)
    middle_s = time.monotonic()
    await train_async(run, max_staleness, 140)
    sync_speed = 60 / (middle_s - start_s)
    async_speed = 140 / (time.monotonic() - middle_s)
    report.table([{"sync, steps/s": sync_speed, "async, steps/s": async_speed}])
    after = await run.evaluate() or 0.0
    report.check("held-out accuracy after 200 steps", after, ">", before + 0.2)

    # 60 steps with two faults, and twice as many batches in flight as the bound allows, so that
    # groups grow too old.
    await gather(
        inject_fault(run, run.generators, 210, signal.SIGKILL),
        inject_fault(run, run.reward_workers, 230, signal.SIGSTOP),
        train_async(run, max_staleness, 60, 2 * max_staleness + 2),
    )
    rows = run.progress.rows
    report.check("largest staleness", max(row["staleness"] for row in rows), "==", max_staleness)
    report.check("groups dropped", run.progress.ended["dropped"], ">", 0)
    num_lost = run.generators.num_lost + run.reward_workers.num_lost
    report.check("workers lost and replaced", num_lost, "==", 2)
    counts = run.progress.counts()
    report.check("groups lost or still in flight", counts["lost"] + counts["in_flight"], "==", 0)
    await run.close()


# ==== PART II: further ====
# Part II adds your models, data, runs and GPUs, harder rewards, and more hosts.


@dataclass(frozen=True)
class Flags(Config):
    stage: str = ""  # run all stages up to this one
    only: str = ""  # run this stage alone
    train: bool = False  # train --model on --task
    evaluate: int = 0  # k of pass@k: any of k samples is right
    export: str = ""  # write the model to this folder
    model: str = ""  # folder or hub id; default: a tiny one
    task: str = "repeat"  # with --model: FILE.jsonl, FILE.py:CLASS
    reward: str = ""  # FILE.py:FUNCTION(prompt, response, answer), or "model"
    dtype: Literal["", "float32", "bfloat16"] = ""  # of forward passes; on GPUs bfloat16
    device: Literal["", "cpu", "cuda"] = ""  # default: cuda, if each trainer has a GPU
    steps: int = 100  # training steps
    max_turns: int = 8  # of a conversation with an environment
    equal_rewards: Literal["keep", "drop"] = "keep"  # groups of equal rewards (DAPO: drop)
    truncated: Literal["keep", "mask"] = "keep"  # truncated episodes (DAPO: mask)
    trainers: int = 1  # ranks of the trainer (FSDP2)
    hosts: str = ""  # shared folder of worker hosts, for generators
    worker: str = ""  # shared folder: this machine is a worker host
    kl: float = 0.0  # weight of the divergence from version 0
    sft_steps: int = 0  # supervised steps before RL
    reward_deadline: float = 60.0  # seconds to score a group
    preferences: str = ""  # FILE.jsonl: prompt, chosen, rejected
    activations: Literal["keep", "recompute"] = "keep"  # of layers: memory or time
    checkpoint: str = ""  # folder from which the same command resumes
    save_every: int = 20  # steps between checkpoints
    eval_every: int = 0  # 0: only before and after
    log: str = ""  # file: JSON lines, one per step
    samples: str = ""  # file: JSON lines, one per episode
    json: str = ""  # file: checks and figures


# == YOUR OWN DATA ====
# Problem. Templates differ, data has wrong lines, reward functions raise, hang and leave children.
# Rule. A wrong line of --task ends the command before a process starts. The task scores in
#   a process that is killed after a deadline. Killing a generator would end its rollouts. Training
#   skips episodes without a reward: 0 would punish them.
# Cost. More processes per reward worker: one computes, one guards it.
#
# By example, {"prompt": "17 + 25 = ?", "answer": 42} in sums.jsonl:
#
#   task = user_task(Flags(model="M", task="sums.jsonl"))
#   prompt = task.prompt(0)   in the main process
#   task.score(prompt, ["<think>40?</think> It is 42."])   [1.0], in the reward process

# -- a model of your own ---


def place_of(error: BaseException) -> str:
    """Names the user's last line of code: "/r.py, line 7: KeyError: 'answer'"."""
    place = ""
    # Skips libraries, imports and this file.
    for frame in traceback.extract_tb(error.__traceback__):
        if not re.search(f"/lib/python|^<frozen|^{re.escape(str(THIS_FILE))}$", frame.filename):
            place = f"{frame.filename}, line {frame.lineno}: "
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return place + text[:300]


def called(where: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Turns errors and exits of a call into UsageError."""
    try:
        return call(*args, **options)
    except BaseException as error:
        raise UsageError(f"{where}: {place_of(error)}") from error


def pretrained(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Returns (tokenizer, model). Raises UsageError if weights do not match."""
    import transformers

    where = f"--model {name}"
    tokenizer = called(where, transformers.AutoTokenizer.from_pretrained, name)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, loaded = called(where, load, name, dtype=dtype, **how)
    for kind, names in loaded.items():
        if "keys" in kind and names:  # missing_keys, ...
            raise UsageError(f"{where}: {kind}: {[*names][:3]}")
    return tokenizer, model


CUT = "\ufdd0"  # noncharacter; `prompt_ids` cuts messages there


class HubPolicy(Policy):
    def __init__(self, cfg: Flags, dtype: torch.dtype) -> None:
        super().__init__(cfg)  # the tiny policy
        if cfg.model:
            self.tokenizer, self.model = pretrained(cfg.model, dtype)
        self.model.to(cfg.device or "cpu")
        self.device = self.model.device
        # Casts the tiny policy. Buffers stay: rotary positions need float32.
        for weight in self.model.parameters():
            weight.data = weight.data.to(dtype)
        config = self.model.config.get_text_config()
        self.context = getattr(config, "max_position_embeddings", None) or 1 << 20
        rope = getattr(config, "rope_parameters", None) or {}
        # Past its original length Phi-3 rotates keys differently: cached keys would be wrong.
        if rope.get("rope_type") == "longrope":
            self.context = min(self.context, rope["original_max_position_embeddings"])
        self.max_new_tokens = cfg.max_new_tokens or min(256, self.context // 2)
        if self.max_new_tokens >= self.context:
            raise UsageError(f"--max-new-tokens: the context has {self.context} tokens")
        self.has_chunks = False  # logits in chunks; `verify` decides
        self.has_graphs = self.device.type == "cuda"
        self.graph: Any = None
        if not self.tokenizer.chat_template:
            raise UsageError("--model: no chat template: use an -Instruct model")
        self._read_template()

    def _read_template(self) -> None:
        text = self.render([{"role": "user", "content": "question"}, RESPONSE], False)
        # Special tokens and those of the template could forge a turn; <think> and "\n" cannot.
        emitted = self.tokenize(text)
        self.control_tokens = {
            token.content: i
            for i, token in self.tokenizer.added_tokens_decoder.items()
            if (token.special or i in emitted) and not re.fullmatch(r"\s+|</?think>", token.content)
        }
        # "...assistant\nresponse<|im_end|>\n" -> "<|im_end|>\n" -> its first token
        _, response, closing = text.rpartition(RESPONSE["content"])
        first = self.tokenize(closing)[:1] if response else []
        ends = [end for end in first if end in self.control_tokens.values()]
        # An id, a list of ids, or None.
        for end in (self.tokenizer.eos_token_id, self.model.generation_config.eos_token_id):
            if end is not None:
                ends += end if isinstance(end, list) else [end]
        if not ends:
            raise UsageError("the tokenizer has no end token (eos_token)")
        self.end_ids = ends

    def render(self, messages: Any, add_generation_prompt: bool) -> str:
        return called("the chat template", super().render, messages, add_generation_prompt)

    def prompt_ids(self, prompt: Prompt, turn: int) -> list[int]:
        """Returns the ids that a turn appends. Raises UsageError if user text would change."""
        *earlier, last = prompt.turns[: turn + 1]
        before, text = self.render_turn((*earlier, last))
        if not text.startswith(before):
            raise UsageError("this chat template changes earlier turns: use one turn")
        messages = []
        for message in last.messages:
            content = message["content"]
            # Templates may strip /no_think (system) and thoughts (assistant).
            must_appear = message["role"] not in ("system", "assistant")
            if must_appear and content.strip() not in text:
                raise UsageError(f"the template changes or drops: {message}")
            # "<|im_end|>" in a message would end the turn. "<" and "|im_end|>", tokenized
            # separately, do not.
            for token in self.control_tokens:
                content = content.replace(token, token[0] + CUT + token[1:])
            messages.append({**message, "content": content})
        _, cut = self.render_turn((*earlier, Turn(tuple(messages), None)))
        pieces = cut.removeprefix(before).split(CUT)
        return [i for piece in pieces for i in self.tokenize(piece)]

    def response_text(self, episode: Episode, turn: int) -> str:
        """Returns text; beside a thought, special tokens stay. The prompt may end with <think>."""
        start = episode.turn_of.index(turn)
        prompt = self.tokenizer.decode(episode.ids[:start][-9:])  # enough for "<think>\n"
        opening = "<think>" if prompt.rstrip().endswith("<think>") else ""
        ids = [token for token in episode.ids[start:] if token not in self.end_ids]
        text = opening + self.tokenizer.decode(ids)
        return text if re.search(THOUGHT, text) else super().response_text(episode, turn)

    def decoder(self, rows: list[list[int]]) -> Decoder:
        """Returns a GraphDecoder on GPUs: that of the last call, if large enough."""
        prefilled = super().decoder(rows)
        if not self.has_graphs:
            return prefilled
        num_rows, width = prefilled.mask.shape
        # Rows and columns only grow, so recordings are rare.
        wanted = (num_rows, ceil((width + self.max_new_tokens) / 256) * 256)
        kept = self.graph.mask.shape if self.graph else (0, 0)
        shape = tuple(max(pair) for pair in zip(wanted, kept))
        try:
            if shape != kept:
                self.graph = None
                self.graph = GraphDecoder(prefilled, *shape)
            return self.graph.begin(prefilled)
        except Exception as error:  # a layer without keys, a failed recording
            print(f"decoding without a CUDA graph: {error}")
            self.has_graphs = False
            return prefilled

    def token_logprobs(self, ids: Tensor, is_sampled: Tensor) -> tuple[Tensor, Tensor]:
        if self.has_chunks:
            return chunked_logprobs(self, ids, is_sampled)
        return super().token_logprobs(ids, is_sampled)


# -- a task in words ---

WORDS = """apple banana bridge candle castle cloud copper desert dragon eagle ember feather
    forest garden harbor hammer island jacket kettle ladder lemon lion market meadow mirror
    mountain ocean orange paper pencil pepper piano planet rabbit river rocket silver spider
    table window""".split()


@dataclass
class WordTask(Task):
    seed: int
    max_new_tokens = 6

    def prompt(self, number: int) -> Prompt:
        word, other = random.Random(f"{self.seed} {number}").sample(WORDS, 2)
        text = f"I will say a word, and you repeat it. Say nothing else. {word}"
        return Prompt(number, (user_turn(text, word), user_turn(other, other)))

    def grade(self, answer: str, response: str) -> float:
        if response.strip() == answer:
            return 1.0
        # If the first of n words is right: 1 / (2 * n), 1 / 2 for "Apple."
        words = re.findall(r"\w+", response.lower())
        return (words[:1] == [answer]) / max(1, len(words)) / 2


# -- prompts from a file ---


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    text = called(str(path), path.read_text, "utf-8-sig")  # without a byte order mark
    if not text.strip():
        raise UsageError(f"{path}: no lines")
    # splitlines also cuts at U+2028, which JSON allows.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line


def prompt_of(number: int, record: Any, where: str, is_graded: bool = False) -> Prompt:
    """Returns a Prompt, from {"prompt": text or messages, "answer": ...} or its JSON."""
    if isinstance(record, Prompt):
        return replace(record, number=number)
    try:
        record = json.loads(record) if isinstance(record, str) else record
        if "prompt" not in record:
            raise ValueError(f"no prompt in {record!s:.80}")
        messages = record["prompt"]
        if isinstance(messages, str):
            messages = user_turn(messages, None).messages
        if not all(isinstance(each["content"], str) for each in messages):
            raise ValueError("content must be text")
        # Roles of the non-blank messages. `encode` raises for "\ud800".
        roles = [each["role"] for each in messages if each["content"].encode().strip()]
        if not roles or roles[-1] in ("assistant", "human", "gpt"):
            raise ValueError(f"no question at its end: roles {roles}")
        answer = record.get("answer")
        # "*" has an empty final part, so an empty response would be right.
        if is_graded and not (isinstance(answer, (str, int, float)) and final_part(str(answer))):
            raise ValueError(f"no answer of text or numbers among {[*record]}: use --reward")
        held_out = record.get("held_out")
        if not isinstance(held_out, bool | None):
            raise ValueError("held_out must be true or false")
    except Exception as error:
        raise UsageError(f'{where}: not {{"prompt": ..., "answer": ...}}: {error!r}') from error
    return Prompt(number, (Turn(tuple(messages), answer),), held_out)


# \boxed{\frac{\sqrt{3}}{2}} has three levels of braces.
BOX = r"""(?x) \\boxed \{ (
    (?: [^{}]  # any character but a brace, or
    | \{ (?: [^{}]  # in braces, or
        | \{ [^{}]* \} )* \}  # in braces in braces
    )* ) \}"""
# Marks of Qwen, Magistral, gpt-oss, GSM8K:
THOUGHT = r"<think>|\[THINK\]|<\|channel\|>"
ANSWER = r"</think>|\[/THINK\]|<\|channel\|>final<\|message\|>|####"
# 7, -3.50, 1e-5; none beside / or ^: 1/2, cm^2, s^-1. Decimal refuses huge exponents.
NUMBER = r"(?<![\d./^])(?<![/^][-.])-?\d*\.?\d+(?:e[-+]?\d{1,3})?(?![\d.]*[/^][-.\d])"


def final_part(text: str) -> str:
    r"""Returns the answer in a text: "<think>7</think> So #### \boxed{1,042}." -> "1042"."""
    # The text after the last mark, without an unclosed thought; of it the last box, if any.
    text = re.split(THOUGHT, re.split(ANSWER, text)[-1])[0]
    text = [text, *re.findall(BOX, text)][-1]
    # One code point per accented letter; "-" for minus; \text{m} -> m; 1,000, 1{,}000 -> 1000.
    text = unicodedata.normalize("NFC", text).replace("\u2212", "-")
    text = re.sub(r"\\text\{([^{}]*)\}|(\{,\}|\\,|,\\!|,)(?=\d{3})", r"\1", text).casefold()
    # "**(B)**." -> "b"; but ".5" keeps its point
    return text.strip().lstrip(" \r\n$(*{").rstrip(" \r\n.$)*}")


class FileTask(Task):
    """Prompts are shuffled once, then repeated."""

    def __init__(self, path: str, seed: int, is_graded: bool = True) -> None:
        lines = lines_of(Path(path))
        self.prompts = [prompt_of(0, line, where, is_graded) for where, line in lines]
        random.Random(seed).shuffle(self.prompts)

    def prompt(self, number: int) -> Prompt:
        return replace(self.prompts[number % len(self.prompts)], number=number)

    def grade(self, answer: Any, response: str) -> float:
        if answer is None:
            raise ValueError("no answer")
        wanted = final_part(str(answer))
        final = final_part(response)
        # "It is Paris" is wrong for Paris; "It is 42 km" is right for 42.
        if not re.fullmatch(NUMBER, wanted):
            return float(wanted == final)
        numbers = [Decimal(number) for number in re.findall(NUMBER, final)]
        return float(numbers[-1:] == [Decimal(wanted)])


# -- the user's code ---


def load_python(spec: str) -> Any:
    """Returns NAME of FILE.py:NAME."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if not path.endswith(".py"):
        raise UsageError(
            f'{spec}: not FILE.py:NAME; a data set, as --task: ds.to_json("FILE.jsonl")'
        )
    if not file.is_file():
        raise UsageError(f"{spec}: no file {file}")
    sys.path.append(str(file.parent))  # last, so it hides no module
    # Workers import answers' classes there. --task, loaded last, overrides --reward.
    environ["MONARCH_RL_TASK"] = str(file.parent)
    module = called(spec, import_module, file.stem)
    # For a random.py, Python's module is imported.
    if getattr(module, "__file__", "") != str(file):
        raise UsageError(f"{spec}: rename it: a module has its name")
    return called(spec, getattr, module, name)


@dataclass
class UserTask(Task):
    task: Any  # an object with `prompt` and `score`
    reward: Callable[..., Any] | None

    def __post_init__(self) -> None:
        self.max_new_tokens = getattr(self.task, "max_new_tokens", Task.max_new_tokens)
        self.reply = getattr(self.task, "reply", None)

    def prompt(self, number: int) -> Prompt:
        where = f"prompt({number})"
        return prompt_of(number, called(where, lambda: self.task.prompt(number)), where)

    def score(self, prompt: Prompt, responses: list[str]) -> Any:
        if self.reward is None:
            return self.task.score(prompt, responses)
        rewards = []  # not scaled to total 1
        for turn, response in zip(prompt.turns, responses):
            messages = list(turn.messages)
            question = messages if len(messages) > 1 else messages[0]["content"]
            rewards.append(self.reward(question, response, turn.answer))
        return rewards


def user_task(cfg: Flags) -> Task:
    """Returns the task of --task, or of the tiny policy."""
    return make_task(cfg.task, cfg.reward, cfg.seed) if cfg.model else LetterTask(cfg.seed)


@cache
def make_task(name: str, reward: str, seed: int) -> Task:
    scorer = None
    if reward not in ("", "model"):
        scorer = load_python(reward)
        where = f"--reward {reward}: not (prompt, response, answer)"
        called(where, lambda: inspect.signature(scorer).bind(1, 2, 3))
    if name == "repeat":
        return UserTask(WordTask(seed), scorer)
    if name.endswith(".jsonl"):
        return UserTask(FileTask(name, seed, is_graded=not reward), scorer)
    return UserTask(called(name, load_python(name)), scorer)


# -- the reward process ---


@dataclass
class UserProcess:
    """Runs `call_task` in a process that is killed with its children after a deadline.

    A plain function scores one group per deadline; coroutines score up to 64 groups at once.
    """

    cfg: Flags
    executor: Any = None
    pid: int | None = None  # also its process group; None: no process

    def __call__(self, method: str, groups: list[Conversations]) -> list[Any]:
        results: list[Any] = []
        while len(results) < len(groups):
            results += self.call(method, groups[len(results) :][:64])  # at least one
        return results

    def call(self, method: str, groups: list[Conversations]) -> list[Any]:
        limit_s = self.cfg.reward_deadline
        try:
            if not self.pid:
                # A forked child would inherit locks of this worker's threads.
                spawn = multiprocessing.get_context("spawn")
                self.executor = ProcessPoolExecutor(1, spawn, guard)
                self.pid = self.executor.submit(os.getpid).result(60)
                # Else `shutdown` may wait for the rest of a result.
                self.executor._result_queue._writer.close()
            # A variable for the future would make a cycle with its error, and keep `self`.
            # 2 s more than `awaited` gives a coroutine.
            return self.executor.submit(call_task, self.cfg, method, groups).result(limit_s + 2)
        except Exception as error:  # too late, or the process died
            reason = f"no {method} (--reward-deadline {limit_s:g}): {place_of(error)}"
        self.kill()
        if len(groups) > 1:  # one by one: only the cause gets no score
            return [self.call(method, [group])[0] for group in groups]
        return [[reason] * len(groups[0])]

    def kill(self) -> None:
        if self.pid:
            kill_group(self.pid)
            self.executor.shutdown()  # removes its semaphores
        self.pid = None

    __del__ = kill  # when its worker ends


def guard() -> None:
    """Forks. The child computes. When it or the worker ends, the parent kills the rest."""
    os.setpgid(0, 0)  # `kill_group(worker)` spares this process
    # PR_SET_CHILD_SUBREAPER: adopts orphans.
    ctypes.CDLL(None).prctl(36, 1)
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        # As in a script, programs import from their folder, and may set a start method.
        environ.pop("PYTHONSAFEPATH", None)
        multiprocessing.set_start_method(None, force=True)
        return
    worker: Any = multiprocessing.parent_process()
    multiprocessing.connection.wait([worker.sentinel, os.pidfd_open(child)])
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while pids := children.read_text().split():  # until no orphan comes
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        os.wait()
    os._exit(0)


RUNNER = asyncio.Runner()  # one event loop: HTTP clients that a task keeps are bound to it


def call_task(cfg: Flags, method: str, groups: list[Conversations]) -> list[Any]:
    """Returns results of groups; stops after one without coroutines."""
    results: list[Any] = []
    for group in groups:
        results.append([result_of(cfg, method, *episode) for episode in group])
        if not is_awaitable(results[-1]):
            break
    # Plain calls come first: their own asyncio.run would fail inside a running loop.
    results = RUNNER.run(awaited(results, cfg.reward_deadline))
    return [
        [converted(method, result, prompt) for (prompt, _), result in zip(group, each)]
        for group, each in zip(groups, results)
    ]


def result_of(cfg: Flags, method: str, prompt: Prompt, responses: list[str]) -> Any:
    try:
        # The user's code may change a prompt.
        return getattr(user_task(cfg), method)(copy.deepcopy(prompt), responses)
    except BaseException as error:  # SystemExit, too
        return error


def is_awaitable(result: Any) -> bool:
    if isinstance(result, list):
        return any(is_awaitable(each) for each in result)
    return inspect.isawaitable(result)


async def awaited(result: Any, limit_s: float) -> Any:
    """Awaits a coroutine or a list; exceptions become results."""
    if isinstance(result, list):
        return await gather(*[awaited(each, limit_s) for each in result])
    try:
        async with asyncio.timeout(limit_s):
            return await result if inspect.isawaitable(result) else result
    except BaseException as error:
        return error


def converted(method: str, result: Any, prompt: Prompt) -> Any:
    """Returns the rewards of an episode, its next turn, or the reason for neither."""
    try:
        if isinstance(result, BaseException):
            raise result
        if method == "score":
            return rewards_from(result, len(prompt.turns))
        if result is None or isinstance(result, Turn):
            return result
        turn = prompt_of(0, {"prompt": result}, "reply").turns[0]
        # The right answer stays that of the turn before.
        return replace(turn, answer=prompt.turns[-1].answer)
    except BaseException as error:
        return place_of(error)


def rewards_from(result: Any, num_turns: int) -> list[float]:
    # A single number is the reward of the last turn.
    if not isinstance(result, (list, tuple)):
        result = [0.0] * (num_turns - 1) + [result]
    for part in result:
        if isinstance(part, BaseException):
            raise part
    rewards = [float(reward) for reward in result if hasattr(reward, "__float__")]
    # Sums must be finite in float32.
    are_finite = all(abs(reward) < 1e30 for reward in rewards)
    if not len(rewards) == len(result) == num_turns or not are_finite:
        raise ValueError(f"{result!r:.80}: not {num_turns} finite numbers")
    return rewards


# == 13. RECOVERY ====
# Problem. A run takes days; a machine or the trainer fails sooner. Weights are not enough: Adam's
#   moments would be 0, and prompts skipped or drawn twice.
# Rule. A checkpoint is one file: weights and moments in fp32, which prompts were drawn and which
#   were in flight, and the log. It gets its name once it is synced to disk. No random state is
#   saved: prompts' numbers are the seeds.
# Cost. Three files, two and the next, of 12 bytes per parameter (a weight, two moments).
#
# By example, a checkpoint after step 40, and a crash during step 47:
#
#   weights, moments    of step 40: steps 41 to 46 are made again
#   prompts in flight   at step 40: sampled again, before others
#   synchronous         on CPUs equal bit for bit, with as many generators (seeds) and cores (sums)


@dataclass
class SavedProgress(Progress):
    requeued: list[int] = field(default_factory=list)  # resampled first


class RunError(RuntimeError):
    """Ends a run."""


# -- 13a. The loops ---


async def with_restarts(
    checkpoints: Checkpoints,
    make_run: Callable[[SavedProgress], Run],
    work: Callable[[Any], Awaitable[Any]],
) -> Any:
    """Returns work(run). After a loss, a new run goes on from the newest checkpoint."""
    num_losses: Counter[int] = Counter()  # by the step of the checkpoint
    while True:
        path, progress = await asyncio.to_thread(checkpoints.newest)
        run = make_run(progress)
        run.prompts = requeued_first(run.task, progress.requeued, run.prompts)
        first = run.version
        try:
            await run.begin()
            if path:
                await run.trainer.request(restore, path)
            return await work(run)
        except (ReplicaLost, ActorError, SupervisionError) as error:
            # A signal may cause an error instead of CancelledError.
            task: Any = asyncio.current_task()
            if task.cancelling():
                raise CancelledError from error
            await sleep(1)  # the trainer's crash is noticed after its effects on generators
            num_losses[first] += 1
            # If the trainer lives, ActorError would recur.
            trainer_is_lost = isinstance(run.trainer.error, ReplicaLost)
            is_bug = isinstance(error, ActorError) and not trainer_is_lost
            if is_bug or num_losses[first] == 5:
                raise
            print(f"{cause_of(error)}: going on from the newest checkpoint")
        finally:
            await run.close()


def requeued_first(task: Task, requeued: list[int], new: Iterator[Prompt]) -> Iterator[Prompt]:
    # Pops in place: the next checkpoint has the rest.
    while requeued:
        yield task.prompt(requeued.pop(0))
    yield from new


async def train_saved(
    run: Run, checkpoints: Checkpoints, evaluate: Callable[[], Awaitable[Any]]
) -> None:
    """Trains until cfg.steps. Saves at intervals; with --checkpoint also when it ends."""
    cfg: Any = run.cfg

    async def pause(step: int) -> None:
        if step % (cfg.eval_every or math.inf) == 0:  # n % inf is n
            await evaluate()
        if step % cfg.save_every == 0 or (cfg.checkpoint and step == cfg.steps):
            await checkpoints.save(run)

    # Runs either loop one step at a time.
    sampling = generating(run, cfg.max_staleness) if cfg.max_staleness else nullcontext()
    async with sampling as buffer:
        train = partial(learn, buffer) if buffer else partial(train_sync, run)
        try:
            while run.version < cfg.steps:
                await train(1)
                await pause(run.version)
        except (Exception, CancelledError) as error:
            # A lost trainer has no weights. If one rank has raised, the others wait for it.
            is_stuck = cfg.trainers > 1 and isinstance(error, ActorError)
            can_save = cfg.checkpoint and run.trainer.ready() and not is_stuck
            if can_save and await checkpoints.save(run):
                print(f"saved after step {run.version}")
            raise


async def finished(work: Awaitable[Any]) -> Any:
    """Awaits the work even if the caller is cancelled."""
    task = ensure_future(work)
    try:
        return await asyncio.shield(task)
    finally:
        await wait([task])


# -- 13b. The files ---


class Checkpoints:
    """The newest two checkpoints of a run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # The kernel unlocks it however this process ends.
        self.lock = open(folder / "lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--checkpoint {folder}: another run uses it") from None

    def paths(self) -> list[Path]:
        """Returns the newest first."""
        return sorted(self.folder.glob(f"step_{'[0-9]' * 8}.pt"), reverse=True)

    def newest(self) -> tuple[str, SavedProgress]:
        """Returns the newest intact checkpoint, if any."""
        for path in self.paths():
            try:
                return str(path), read_progress(path)
            except zipfile.BadZipFile as error:
                print(f"{path} is damaged: {error}")
                path.rename(path.with_suffix(".damaged"))
            except Exception as error:  # the file may be intact
                raise RunError(f"{path}: {cause_of(error)}") from error
        return "", SavedProgress()

    async def save(self, run: Run) -> bool:
        """Writes a checkpoint. Returns whether it could."""
        path = self.folder / f"step_{run.version:08}.pt"
        try:
            state = progress_state(run.progress)
            await finished(run.trainer.request(write_checkpoint, str(path), state))
        except ActorError as error:
            print(f"step {run.version} is not saved: {cause_of(error)}")
            return False
        # Deletes older and unfinished checkpoints.
        for old in [*self.paths()[2:], *self.folder.glob("step_*.new")]:
            old.unlink()
        return True


def progress_state(progress: Any) -> Record:
    """Requeues groups in flight, in a copy."""
    requeued = sorted(progress.in_flight | {*progress.requeued})
    return asdict(replace(progress, requeued=requeued, in_flight=set()))


def read_progress(path: Path) -> SavedProgress:
    """Raises BadZipFile if damaged."""
    with zipfile.ZipFile(path) as archive:
        if damaged := archive.testzip():
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
    # With mmap, no weights are loaded.
    return SavedProgress(**torch.load(path, mmap=True, map_location="cpu")["progress"])


def write_checkpoint(trainer: Trainer, path: str, progress: Record) -> None:
    from torch.distributed.checkpoint import state_dict

    require_finite(trainer)
    learner = trainer.learner
    state: Record = {"progress": progress}
    state["weights"], state["moments"] = state_dict.get_state_dict(
        learner.policy.model,
        learner.optimizer,
        # Rank 0 gets it, on its CPU.
        options=state_dict.StateDictOptions(
            full_state_dict=True, cpu_offload=dist.is_initialized()
        ),
    )
    # Part I's learner has no critic.
    critic = getattr(learner, "critic", None)
    if critic:
        state["critic"] = critic.network.state_dict(), critic.optimizer.state_dict()
    if current_rank().rank == 0:
        write_durably(Path(path), state)


def require_finite(trainer: Trainer) -> None:
    """Raises RunError if weights are NaN, or too large for finite logits."""
    norm = float(torch.nn.utils.get_total_norm(trainer.learner.weights))
    # q * k multiplies four weights (two of norm layers): (1e9)^4 < 3.4e38, fp32's limit. NaN fails.
    if not norm < 1e9:
        raise RunError(f"the weights have diverged after step {trainer.version}: lower --lr")


def export(trainer: Trainer, folder: str) -> None:
    """Writes a folder for transformers. All ranks take part."""
    require_finite(trainer)
    policy = trainer.learner.policy
    state = whole_state(policy)
    if current_rank().rank > 0:
        return
    policy.model.save_pretrained(folder, state_dict=state)
    policy.tokenizer.save_pretrained(folder)


def write_durably(path: Path, content: Record | str) -> None:
    """Replaces a file: it always has the old or the new content."""
    beside = path.with_name(path.name + ".new")
    try:
        with open(beside, "wb") as file:
            if isinstance(content, str):
                file.write(content.encode())
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except RuntimeError as error:  # torch.save hides the OSError in its context
        raise error.__context__ or error from None
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)  # syncs the name
    os.fsync(folder)
    os.close(folder)


def restore(trainer: Trainer, path: str) -> None:
    """Loads a checkpoint in each rank, and publishes the weights."""
    from torch.distributed.checkpoint import state_dict

    learner: Any = trainer.learner
    state = torch.load(path, mmap=True, map_location="cpu")
    options = state_dict.StateDictOptions(full_state_dict=True)
    model = learner.policy.model
    state_dict.set_model_state_dict(model, state.pop("weights"), options=options)
    load = state_dict.set_optimizer_state_dict
    if trainer.version:  # moments of version 0 are zeros, with step 1
        load(model, learner.optimizer, state["moments"], options=options)  # mechanism: recovery
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.cfg.lr  # the flag may have changed
    if state.get("critic") and learner.critic:
        network, moments = state["critic"]
        learner.critic.network.load_state_dict(network)
        learner.critic.optimizer.load_state_dict(moments)
    trainer.writer.publish(trainer.version)
    trainer.writer.wait()


# -- measurement ---


def weights_of(trainer: Trainer) -> Tensor:
    return torch.nn.utils.parameters_to_vector(trainer.learner.weights).detach()


async def train_killed(report: Report, cfg: Config, at_step: int) -> Tensor:
    """Returns the trained weights. Kills the trainer after at_step, if not 0."""
    checkpoints = Checkpoints(report.folder / f"run_{at_step}")

    async def work(run: Run) -> Tensor:
        training = train_saved(run, checkpoints, run.evaluate)
        if run.version == 0 and at_step:
            training = gather(training, inject_fault(run, run.trainer, at_step, signal.SIGKILL))
        await training
        return await run.trainer.request(weights_of)

    return await with_restarts(checkpoints, partial(Run, cfg, report.pool), work)


@stage(instead="pass")
async def demo_recovery(report: Report) -> None:
    """A run whose trainer crashes goes on from a checkpoint, bit for bit."""
    cfg = demo_config(Flags(seed=report.cfg.seed, steps=12, save_every=4, max_staleness=0))
    step = random.randint(5, 10)
    expected = await train_killed(report, cfg, 0)
    resumed = await train_killed(report, cfg, step)
    largest = (resumed - expected).abs().max().item()
    report.check("largest difference of a weight", largest, "==", 0)


# == YOUR OWN RUN ====
# Problem. The next command needs the weights, flags and log of this one.
# Rule. --train, --evaluate and --export share the folder of --checkpoint:
#
#   flags.json    flags of the newest --train
#   model/        version 0 of --model, after SFT
#   step_*.pt     the newest two checkpoints (section 13)
#
# Cost. One more copy of the model.


async def run_user_command(report: Report, cfg: Flags) -> Record:
    folder = Path(cfg.checkpoint or report.folder / "run").resolve()
    checkpoints = Checkpoints(folder)
    # `cfg` still has the user's flags. Below, model/ replaces --model.
    work = partial(do_command, checkpoints, cfg)
    model = folder / "model"
    if model.is_dir():
        cfg = replace(cfg, model=str(model), sft_steps=0)
    num_tokens = cfg.max_new_tokens or user_task(cfg).max_new_tokens
    cfg = replace(cfg, device=device_of(cfg), max_new_tokens=num_tokens)
    print(f"{cfg.model or 'the tiny policy'} on {cfg.task}: processes load it")
    hosts = HostPool(Path(cfg.hosts), cfg.generators) if cfg.hosts else None
    return await with_restarts(checkpoints, partial(UserRun, cfg, report, hosts), work)


async def do_command(checkpoints: Checkpoints, flags: Flags, run: UserRun) -> Record:
    """Runs a command. flags: the user's, saved once the run has begun."""
    cfg = run.cfg
    if cfg.train:
        saved = {name: value for name, value in asdict(flags).items() if name not in OF_COMMAND}
        write_durably(checkpoints.folder / "flags.json", json.dumps(saved, indent=1))
    # A resumed run takes version 0 as --model, for --kl.
    model = checkpoints.folder / "model"
    if cfg.checkpoint and cfg.model and run.version == 0 and not model.is_dir():
        await run.trainer.request(export, f"{model}.new")
        await asyncio.to_thread(os.sync)  # before the folder gets its name
        os.replace(f"{model}.new", model)
    figures = await train_and_evaluate(run, checkpoints) if cfg.train else {}
    if cfg.evaluate:
        figures["evaluation"] = await evaluate_pass_at_k(run, cfg.evaluate)
    if cfg.export:
        await run.trainer.request(export, cfg.export)
    newest = checkpoints.folder / f"step_{run.version:08}.pt"
    if cfg.train and cfg.checkpoint and not newest.exists():
        raise RunError(f"step {run.version} is not saved")
    return figures


async def train_and_evaluate(run: UserRun, checkpoints: Checkpoints) -> Record:
    progress = run.progress
    if run.version:
        print(f"going on after step {run.version} of {run.cfg.steps}")
    # Version 0; after a resume also one whose evaluation a signal cut.
    interval = run.cfg.eval_every or math.inf
    if run.version % interval == 0 and run.version not in dict(progress.heldout):
        await evaluate_pass_at_k(run)
    await train_saved(run, checkpoints, partial(evaluate_pass_at_k, run))
    if progress.heldout[-1][0] != run.version:
        await evaluate_pass_at_k(run)
    return {
        "steps": run.version,
        **progress.counts(),
        "heldout": progress.heldout,
        "workers_replaced": sum(service.num_lost for service in run.services),
    }


async def evaluate_pass_at_k(run: UserRun, num_samples: int = 0) -> dict[str, float | None]:
    """Prints held-out accuracy (greedy, pass@1, pass@k) and the mean reward."""
    accuracies = {"greedy": await run.evaluate(), "reward": run.mean_reward}
    right = []
    if num_samples:
        for group in await run.sample_and_score(run.held_out, num_samples, seed=0):
            # Prompts with an unscored sample are left out.
            if len(group) == num_samples:
                right.append([sum(episode.rewards) > 0.999 for episode in group])
    if right:
        accuracies["pass@1"] = fmean(fmean(group) for group in right)
        accuracies[f"pass@{num_samples}"] = fmean(any(group) for group in right)
    shown = [f" {name} {value:.3f}" for name, value in accuracies.items() if value is not None]
    if accuracies["reward"] and not accuracies["greedy"]:
        shown.append(" (right: a reward of 1)")
    print(f"of {len(run.held_out)} held-out prompts:", *shown or [" none scored (DOCS 06)"])
    return accuracies


# -- the run ---


class UserRun(Run):
    cfg: Flags
    num_equal = 0  # groups of equal rewards in a row

    def __init__(
        self, cfg: Flags, report: Report, hosts: HostPool | None, progress: SavedProgress
    ) -> None:
        super().__init__(cfg, report.pool, progress)
        learner = partial(user_learner, meeting_file=f"{report.folder}/{time.monotonic_ns()}")
        self.trainer = replace(
            self.trainer, setup_args=(cfg, learner, self.version), num_ranks=cfg.trainers
        )
        self.min_groups = cfg.trainers
        reader: Any = BlockReader if cfg.device == "cuda" else WeightReader
        if hosts:
            reader = partial(relayed_reader, hosts.outlet, reader)
        # The GPUs of a worker host are for generators only.
        load = partial(load_policy, dtype=dtype_of(cfg), num_before=0 if hosts else cfg.trainers)
        self.generators = replace(
            self.generators, pool=hosts or self.pool, setup_args=(cfg, load, reader)
        )
        self.reward_workers = replace(self.reward_workers, setup_args=(cfg, user_scorer))
        self.set_task(user_task(cfg))
        # Ends a run: 20 requests in a row without reward; a new one: 8, or an evaluation.
        at_first = 12 if len(self.held_out) < 8 or cfg.reward == "model" else 19
        self.num_fruitless = 0 if cfg.train and progress.heldout else at_first
        if (cfg.train or cfg.sft_steps) and all(
            self.task.prompt(number).is_held_out for number in range(1000)
        ):
            raise UsageError("all prompts of the task are held out")

    async def begin(self) -> None:
        self.reporting = ensure_future(report_waiting(self))
        self.log = open((self.cfg.train and self.cfg.log) or os.devnull, "w", buffering=1)
        for row in self.progress.rows:
            write_line(self.log, row)
        await super().begin()

    async def close(self) -> None:
        self.reporting.cancel()
        await super().close()

    async def sample_and_score(self, prompts: list[Prompt], *args: Any, **how: Any) -> list[Group]:
        groups = await super().sample_and_score(prompts, *args, **how)
        if self.cfg.samples:
            with open(self.cfg.samples, "a") as file:
                for episode in chain(*groups):
                    write_line(file, sample_row(episode))
        rewards = [sum(episode.rewards) for episode in chain(*groups)]
        self.mean_reward = fmean(rewards) if rewards else None
        self.num_fruitless = 0 if groups else self.num_fruitless + bool(prompts)
        if self.num_fruitless == 20:
            reason = ["no prompt fits the context", *self.errors][-1]
            raise RunError(f"request after request brought no reward: {reason}")
        return groups

    async def sample(self, prompts: list[Prompt], num_parts: int = 1) -> list[Group]:
        groups = await super().sample(prompts, num_parts)
        mixed = [group for group in groups if not has_equal_rewards(group)]
        self.num_equal = 0 if mixed else self.num_equal + len(groups)
        # After 100 in a row they are kept: a solved task has no others.
        if self.cfg.equal_rewards == "keep" or self.num_equal >= 100:
            return groups
        self.progress.end("dropped", numbers_of(groups) - numbers_of(mixed))
        return mixed

    async def request_rollout(self, episodes: list[Episode], seed: int | None) -> list[Episode]:
        """Returns whole conversations. With an environment, each turn is a request."""
        ended: list[Episode] = []
        while episodes:
            sampled = await self.request_accepted(episodes, seed)
            if not self.task.reply:
                return sampled
            conversations = [[(e.prompt, e.responses)] for e in sampled]  # a group each
            ask = partial(self.reward_workers.request, "ask", "reply")
            replies = await scatter_gather(conversations, self.cfg.reward_workers, ask)
            episodes = []
            for episode, (reply,) in zip(sampled, replies, strict=True):
                if isinstance(reply, str):  # the reason why there is none
                    self.note_error(reply)
                elif reply and len(episode.responses) < self.cfg.max_turns:
                    episode.add_reply(reply)
                    episodes.append(episode)
                else:
                    ended.append(episode)
        return sorted(ended, key=lambda e: e.prompt.number)  # groups adjacent

    async def request_accepted(self, episodes: list[Episode], seed: int | None) -> list[Episode]:
        """If a request raises, halves it, so that only a bad prompt is lost."""
        try:
            return await super().request_rollout(episodes, seed)
        except ActorError as error:
            groups = groups_of(episodes)
            if len(groups) == 1:
                messages = episodes[0].prompt.turns[-1].messages
                self.note_error(f"{messages!r:.80}: {cause_of(error)}")
                return []
        return await scatter_gather(
            groups, 2, lambda half: self.request_accepted([*chain(*half)], seed)
        )

    def note_error(self, reason: str) -> None:
        if reason not in self.errors and len(self.errors) < 5:
            print(f"not scored: {reason}")
        super().note_error(reason)

    async def step(self, groups: list[Group]) -> None:
        await finished(self.step_and_log(groups))  # a cancelled step still gets its row

    async def step_and_log(self, groups: list[Group]) -> None:
        await super().step(groups)
        row = self.progress.rows[-1]
        write_line(self.log, row)
        print(step_line(self.progress.rows, self.cfg.steps))
        await self.trainer.request(require_finite)

    def describe(self, groups: list[Group], stats: StepStats) -> Record:
        episodes = list(chain(*groups))
        first = episodes[0]
        sample = []
        for turn, response, reward in zip(first.prompt.turns, first.responses, first.rewards):
            sample.append(f"{turn.messages[-1]['content']!r} -> {response!r} ({reward:.2f})")
        return super().describe(groups, stats) | {
            "time": time.time(),
            "truncated": fmean(any(e.truncated) for e in episodes),
            "response_tokens": stats.num_tokens / sum(len(e.responses) for e in episodes),
            "equal_rewards": fmean(has_equal_rewards(group) for group in groups),
            "sample": ", ".join(sample),
            "tokens_per_s": stats.num_tokens / stats.seconds,
            "too_long": self.num_too_long,
            "not_scored": sum(self.errors.values()),
        }


def has_equal_rewards(group: Group) -> bool:
    return len({str(episode.rewards) for episode in group}) == 1


def sample_row(episode: Episode) -> Record:
    messages = []
    for turn, response in zip(episode.prompt.turns, episode.responses):
        messages += [*turn.messages, {"role": "assistant", "content": response}]
    return {
        "messages": messages,
        "rewards": episode.rewards,
        "truncated": episode.truncated,
        "version": episode.version,
        "held_out": episode.prompt.is_held_out,
    }


def write_line(file: TextIO, row: Record) -> None:
    """Writes a line of JSON, with null for NaN."""
    finite = json.loads(json.dumps(row), parse_constant=lambda name: None)
    file.write(json.dumps(finite) + "\n")


async def report_waiting(run: Run) -> None:
    """Prints busy workers if 30 s pass without a step."""
    while True:
        num_steps = run.version
        await sleep(30)
        if num_steps < run.version:
            continue
        replicas = [replica for service in run.services for replica in service.ready()]
        line = f"           {len(replicas)} workers ready"
        for replica in replicas:
            for start_s in islice(replica.in_flight.values(), 1):  # of its oldest request
                line += f"; {replica.name} busy for {time.time() - start_s:.0f} s"
        print(line)


def step_line(rows: list[Record], num_steps: int) -> str:
    """Returns the newest step's line; steps 1, 11, 21 show a sample."""
    row = rows[-1]
    line = (
        f"step {row['step']:4}/{num_steps}  reward {row['reward']:.3f}"
        f"  staleness {row['staleness']}  k3 {row['k3']:.1e}  entropy {row['entropy']:.2f}"
        f"  grad {row['grad_norm']:.2g}  {row['tokens_per_s']:.0f} tokens/s"
    )
    for name in ("dropped", "lost", "truncated", "too_long", "not_scored"):
        if row[name]:
            line += f"  {name} {row[name]:.3g}"
    # A median ignores rare evaluations and resumes.
    step_s = median([b["time"] - a["time"] for a, b in pairwise(rows[-11:])] or [0])
    minutes = step_s * (num_steps - row["step"]) / 60
    if minutes > 1:
        line += f"  {minutes:.0f} min left"
    return line if row["step"] % 10 != 1 else f"{line}\n           {row['sample']}"


# -- parts of workers ---


class UserLearner(Learner):
    """Adds a critic for advantages (14), and penalty(batch, logp) [N] to losses (15)."""

    cfg: Flags

    def __init__(self, policy: Policy, cfg: Flags, rank: int = 0, penalty: Any = None) -> None:
        super().__init__(policy, cfg)
        self.rank = rank
        self.num_ranks = cfg.trainers
        self.critic = Critic(policy, cfg) if cfg.advantage == "critic" else None
        self.penalty = penalty

    def update(self, batches: list[Batch]) -> StepStats:
        """Casts the weights once for all micro-batches. FSDP casts by itself."""
        model: Any = self.policy.model
        dtype = dtype_of(self.cfg)
        if self.num_ranks > 1 or model.dtype == dtype:
            return super().update(batches)
        # Copies replace the fp32 weights: one cast for all backward passes.
        copies = {name: weight.to(dtype) for name, weight in model.named_parameters()}
        with torch.nn.utils.stateless._reparametrize_module(model, copies, tie_weights=True):
            return super().update(batches)

    def advantages(self, episodes: list[Episode]) -> list[list[float]]:
        per_token = self.critic(episodes) if self.critic else super().advantages(episodes)
        if self.cfg.truncated == "mask":
            for values, episode in zip(per_token, episodes):
                if any(episode.truncated):
                    values[:] = [0.0] * len(values)
        return per_token

    def token_losses(self, batch: Batch, logp: Tensor, entropy: Tensor) -> Tensor:
        losses = super().token_losses(batch, logp, entropy)
        return losses + self.penalty(batch, logp) if self.penalty else losses

    def rows_to_train(self, advantage: list[list[float]]) -> list[int]:
        rows = super().rows_to_train(advantage)
        keeps_all = self.penalty or len(rows) < self.num_ranks  # each rank needs one
        return list(range(len(advantage))) if keeps_all else rows

    def partition(self, rows: list[int], episodes: list[Episode]) -> list[list[int]]:
        # FSDP gathers a layer on all ranks at once, so every rank cuts where `longest` is cut.
        # Two ranks, lengths 9 8 7 6 5: `longest` is 9 | 7, rank 0 has 9 | 7 5, rank 1 8 | 6.
        mine = iter(rows[self.rank :: self.num_ranks])
        longest = rows[:: self.num_ranks][: len(rows) // self.num_ranks]
        parts = [list(islice(mine, len(part))) for part in super().partition(longest, episodes)]
        parts[-1] += mine
        return parts


def whole_state(policy: Policy) -> Record:
    """Returns whole tensors on each rank. All ranks take part."""
    from torch.distributed.checkpoint import state_dict

    options = state_dict.StateDictOptions(full_state_dict=True)
    return state_dict.get_model_state_dict(policy.model, options=options)


def user_learner(cfg: Flags, meeting_file: str) -> tuple[Learner, WeightWriter]:
    """Makes the learner and the writer of a trainer rank."""
    rank = current_rank().rank
    dtype = dtype_of(cfg)
    policy = load_policy(cfg, rank, torch.float32)
    verify(policy)
    if cfg.activations == "recompute":
        recompute_activations(policy)
    if cfg.trainers > 1:
        backend = "cpu:gloo,cuda:nccl" if cfg.device == "cuda" else "gloo"
        place = f"file://{meeting_file}"
        dist.init_process_group(backend, place, rank=rank, world_size=cfg.trainers)
        shard(policy.model, cfg.trainers, dtype)
    # Another learner: the run's critic begins as a copy of version 0.
    sft(UserLearner(policy, cfg, rank), training_prompts(user_task(cfg)), cfg.sft_steps)
    penalty = None
    if cfg.kl:
        reference = HubPolicy(cfg, dtype)  # version 0, in the dtype of forward passes
        reference.model.load_state_dict(whole_state(policy))
        reference.has_chunks = policy.has_chunks
        penalty = partial(divergence, reference, cfg.kl)
    learner = UserLearner(policy, cfg, rank, penalty)
    weights = dict(policy.model.named_parameters())
    make_writer = ShardedWriter if cfg.trainers > 1 else BlockWriter
    writer = make_writer(weights, cfg.generators, dtype)
    if cfg.device == "cuda":
        pin(writer.arena)
    return learner, writer


def load_policy(cfg: Flags, number: int, dtype: torch.dtype, num_before: int = 0) -> HubPolicy:
    """Loads the policy of trainer rank or generator `number`, on GPU num_before + number."""
    # More threads than cores would wait for each other.
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, num_cores // (cfg.generators + cfg.trainers)))
    if cfg.device == "cuda":
        use_gpu(num_before + number)
    return HubPolicy(cfg, dtype)


def verify(policy: HubPolicy) -> None:
    """Raises UsageError if rollout and trainer's pass disagree, in fp32. Sets has_chunks."""
    probe = copy.copy(policy)
    probe.max_new_tokens = 4
    probe.temperature = 4.0  # peaked distributions hide errors
    prompts = [Prompt(number, (user_turn("a " * number, ""),)) for number in (1, 8)]
    where = "--model: rollouts"
    episodes = called(where, rollout, probe, new_episodes(prompts, 2), 0)
    # Chunks first; they are wrong for models that scale or cap their logits.
    for has_chunks in (policy.model.get_output_embeddings() is not None, False):
        policy.has_chunks = probe.has_chunks = has_chunks
        logprobs = called(where, recompute_logprobs, probe, episodes)
        if float(k3(*logprobs).max()) < 1e-6:  # NaN fails
            return
    raise UsageError(f"{where} and the trainer's pass disagree")


def shard(model: torch.nn.Module, num_ranks: int, dtype: torch.dtype) -> None:
    """Applies FSDP2: ranks keep parts of weights, and gather a layer to use it."""
    from torch.distributed import fsdp

    device: Any = next(model.parameters()).device.type
    mesh = dist.device_mesh.init_device_mesh(device, (num_ranks,))
    precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    # The layers are the longest list of modules.
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    for unit in [*max(lists, key=len), model]:
        sharded: Any = fsdp.fully_shard(unit, mesh=mesh, mp_policy=precision)
        # A sum, because losses are divided by the global token count.
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM


def user_scorer(cfg: Flags) -> Callable[[str, list[Conversations]], list[Any]]:
    by_task = UserProcess(cfg)
    if cfg.reward != "model":
        return by_task
    model = RewardModel(cfg)

    def scorer(method: str, groups: list[Conversations]) -> list[Any]:
        # A request is held out if its first prompt is. Evaluations use the task's reward.
        if method == "reply" or groups[0][0][0].is_held_out:
            return by_task(method, groups)
        return [model(group) for group in groups]

    return scorer


# -- supervised steps ---


def episode_with(policy: Policy, prompt: Prompt, responses: list[str]) -> Episode:
    """Returns an episode as if these plain texts were sampled."""
    episode = Episode(prompt, responses=responses)
    for turn, response in enumerate(responses):
        episode.add_prompt(policy.prompt_ids(prompt, turn))
        tokens = policy.tokenizer(response, add_special_tokens=False, split_special_tokens=True)
        for token in tokens["input_ids"] + policy.end_ids[:1]:
            episode.add(token, turn + 1, 0.0)
    return episode


def right_episodes(policy: Policy, prompts: Iterator[Prompt]) -> Iterator[Episode]:
    """Yields episodes of right responses that fit the context."""
    for prompt in prompts:
        if any(turn.answer is None for turn in prompt.turns):
            raise UsageError("--sft-steps: a prompt has no answer")
        with suppress(UsageError):  # refused by the template
            episode = episode_with(policy, prompt, [str(turn.answer) for turn in prompt.turns])
            if len(episode.ids) <= policy.context:
                yield episode


def sft(learner: Learner, prompts: Iterator[Prompt], num_steps: int) -> None:
    """Runs REINFORCE on right responses, with A = 1 and new moments."""
    student = copy.copy(learner)
    student.policy = copy.copy(learner.policy)
    student.policy.temperature = 1.0
    student.cfg = replace(learner.cfg, loss="reinforce", entropy=0.0)
    student.optimizer = torch.optim.Adam(learner.weights, 2 * learner.cfg.lr)  # SFT has less noise
    size = 4 * learner.cfg.prompts_per_step
    # At least one prompt in ten must fit.
    right = right_episodes(learner.policy, islice(prompts, 10 * size * num_steps))
    for _ in range(num_steps):
        episodes = list(islice(right, size))
        if not episodes:
            raise UsageError("--sft-steps: too few prompts fit the context")
        ones = [[1.0] * len(episode.ids) for episode in episodes]
        student.update(student.micro_batches(episodes, ones))


def warm_start(trainer: Trainer, num_steps: int) -> None:
    sft(trainer.learner, training_prompts(LetterTask(trainer.learner.cfg.seed)), num_steps)
    trainer.writer.publish(trainer.version)  # no reader has pulled version 0
    trainer.writer.wait()


# -- saved flags ---

# These flags are not saved.
OF_COMMAND = "stage only train evaluate export hosts worker checkpoint log samples json".split()


def with_saved_flags(given: Record, parser: argparse.ArgumentParser) -> Record:
    """Adds the flags of --checkpoint, parsed like given ones."""
    folder = given.get("checkpoint", "")
    file = Path(folder, "flags.json")
    if not folder:
        return given
    if not file.exists():
        if "train" in given and given.keys() & {"model", "task"}:
            return given
        raise UsageError(
            f"{folder}: nothing saved there; a new run: --train, with --model or --task"
        )
    flags = called(str(file), lambda: json.loads(file.read_text("utf-8-sig")).items())
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in flags]
    saved = vars(called(str(file), parser.parse_known_args, arguments)[0])
    flags = saved | given
    if "train" in given:
        for name in given.keys() & {"model", "sft_steps", "task", "reward"}:
            if given[name] != saved.get(name):
                raise UsageError(f"{name}: {folder} has {saved.get(name)!r}; use a new folder")
    inherited = flags.items() - given.items() - asdict(Flags()).items()
    print(f"{file}:", *[f"--{name.replace('_', '-')}={value}" for name, value in sorted(inherited)])
    return flags


# == WARM PROCESSES ====
# Problem. Imports cost a new process 4 s of CPU time.
# Rule. A process whose actor has ended takes the next actor.
# Cost. Memory of idle processes.


# PR_SET_PDEATHSIG: the process dies with its parent. Monarch sets it late, after its imports.
START = """import ctypes, os, runpy, signal
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
signal.signal(signal.SIGINT, signal.SIG_DFL)
if os.getppid() == {}:  # else its parent is gone
    runpy.run_module("monarch._src.actor.bootstrap_main", None, "__main__", True)"""


def prepare_process() -> None:
    # The user's folder, or "", the current one.
    sys.path.append(environ.get("MONARCH_RL_TASK", ""))
    # A batch system sends SIGTERM to workers, too, but a save needs them. getpid is a handler
    # without effect; the user's programs would inherit SIG_IGN.
    libc = ctypes.CDLL(None)
    for number in ENDING:
        libc.signal(number, libc.getpid)


class WarmPool(Pool):
    bootstrap = staticmethod(prepare_process)

    def __init__(self) -> None:
        self.idle: list[Processes] = []
        self.command = monarch.actor.default_bootstrap_cmd()
        self.command.args = ["-c", START.format(os.getpid())]

    async def start(self, num_ranks: int) -> Processes:
        if num_ranks == 1 and self.idle:
            return self.idle.pop()
        return await super().start(num_ranks)

    async def end(self, replica: Replica) -> None:
        is_idle = replica.is_ready and not replica.in_flight and not replica.lost.done()
        if is_idle and len(replica.processes.ids) == 1:
            with suppress(Exception):
                await wait_for(replica.worker.run.call(release), 10)
                await replica.worker.stop()
                self.idle.append(replica.processes)
                return
        await replica.processes.kill()

    async def close(self) -> None:
        await gather(*[processes.kill() for processes in self.idle])


def release(worker: Worker) -> None:
    # Monarch does not free actors.
    vars(worker).clear()
    gc.collect()
    torch.cuda.empty_cache()


# == ON GPUS ====
# Problem. Copies of single tensors into pageable memory use little of a bus's 55 GB/s (PCIe 5).
#   Python starts hundreds of kernels per token, and the GPU waits. The logits of 8,192 tokens over
#   a vocabulary of 150,000 take several times 5 GB in fp32.
# Rule. Move one block, not 300 tensors. Record the kernels of a token once, then replay them.
#   Compute logits in chunks, and again in the backward pass.
# Cost. A block of weights in a trainer of one rank and each generator; a cache of fixed length.
#
#   trainer     weights --cast--> block --one copy, beside the next step--> slot
#   generator   slot --one copy--> block, of which its weights are views
#
# Trainer rank r uses GPU r, generator i GPU trainers + i (--hosts: GPU i), modulo their number.


def device_of(cfg: Flags) -> str:
    has_gpus = torch.cuda.is_available() and torch.cuda.device_count() >= cfg.trainers
    return cfg.device or ("cuda" if has_gpus else "cpu")


def dtype_of(cfg: Any) -> torch.dtype:
    default = "bfloat16" if cfg.device == "cuda" else "float32"
    return getattr(torch, cfg.dtype or default)


def use_gpu(number: int) -> None:
    gpu = number % (torch.cuda.device_count() or 1)
    torch.cuda.set_device(gpu)
    free, total = torch.cuda.mem_get_info()
    print(f"process {os.getpid()}: {free / 1e9:.0f} of {total / 1e9:.0f} GB free on GPU {gpu}")


def pin(arena: Arena) -> None:
    cudart: Any = torch.cuda.cudart()
    address = arena.slots.data_ptr()
    error = int(cudart.cudaHostRegister(address, arena.slots.nbytes, 0))
    if error:
        print(f"the arena is not pinned (CUDA error {error}), so its copies are slower")
        with suppress(RuntimeError):  # the next kernel reports the error, too
            torch.zeros(1, device="cuda")
    else:
        weakref.finalize(arena, cudart.cudaHostUnregister, address)


class BlockWriter(WeightWriter):
    """`publish` casts the weights into a block, in any dtype. The weights may change then."""

    def __init__(self, tensors: Weights, num_readers: int, dtype: torch.dtype) -> None:
        self.sources = [tensor.detach() for tensor in tensors.values()]
        copies = {name: tensor.detach().to(dtype) for name, tensor in tensors.items()}
        super().__init__(copies, num_readers)
        if self.block.is_cuda:
            self.stream = torch.cuda.Stream()

    def publish(self, version: int) -> None:
        self.wait()  # the copy of the version before still reads the block
        # On a GPU, the cast is queued between two steps.
        torch._foreach_copy_([*self.tensors.values()], self.sources)  # pyright: ignore
        if self.block.is_cuda:
            self.stream.wait_stream(torch.cuda.current_stream())
        super().publish(version)

    def write(self, slot: Tensor) -> None:
        """Returns when the slot is filled: `commit` follows."""
        if self.block.is_cpu:
            super().write(slot)
            return
        with torch.cuda.stream(self.stream):
            slot.copy_(self.block)


class BlockReader(WeightReader):
    """Copies a slot into a block on a GPU, of which the weights are views."""

    def __init__(self, handle: ArenaHandle, reader: int, tensors: Weights) -> None:
        super().__init__(handle, reader, tensors)
        self.block = move_into_block(tensors, handle.layout, self.arena.slots[0])
        pin(self.arena)

    def read(self, slot: int) -> None:
        self.block.copy_(self.arena.slots[slot])


class GraphDecoder(Decoder):
    """Decodes by a CUDA graph, which replays the kernels of one token.

    Shapes and addresses are fixed: finished rows stay in the batch, and BlockReader writes new
    weights in place.
    """

    def __init__(self, prefilled: Decoder, num_rows: int, length: int) -> None:
        from transformers.cache_utils import Cache, StaticLayer

        self.policy = weakref.proxy(prefilled.policy)  # the owner: no cycle
        self.mask = prefilled.mask.new_ones(num_rows, length)
        self.positions = torch.zeros_like(self.mask[:, :1])
        self.ids = torch.zeros_like(self.positions)
        # Sliding windows have all columns, too: the mask hides the old.
        layers: list[Any] = [StaticLayer(length) for _ in prefilled.cache.layers]
        for fixed, grown in zip(layers, prefilled.cache.layers):
            parts = (grown.keys, grown.values)
            fixed.lazy_initialization(*[part[:1].expand(num_rows, -1, -1, -1) for part in parts])
        self.cache = Cache(layers=layers)
        self._pass()  # warms up the libraries
        self.graph = torch.cuda.CUDAGraph()
        # The stream is on this GPU, and is left if the capture fails. Other threads may use CUDA.
        how: Any = {"stream": torch.cuda.Stream(), "capture_error_mode": "thread_local"}
        with torch.cuda.stream(how["stream"]), torch.cuda.graph(self.graph, **how):
            self.recorded = self._pass()

    def begin(self, prefilled: Decoder) -> Decoder:
        """Takes over the rows of a decoder. The causal mask hides later columns."""
        num_rows, width = prefilled.mask.shape
        self.cache.reset()  # a masked NaN would still spoil a sum
        for fixed, grown in zip(self.cache.layers, prefilled.cache.layers):
            # A sliding window keeps only its last columns.
            columns = slice(width - grown.keys.shape[2], width)
            fixed.keys[:num_rows, :, columns] = grown.keys  # [B, heads, columns, size]
            fixed.values[:num_rows, :, columns] = grown.values
            fixed.cumulative_length.fill_(width)  # the next column
        self.mask.fill_(1)
        self.mask[:num_rows, :width] = prefilled.mask
        self.positions.zero_()
        self.positions[:num_rows] = prefilled.mask.sum(1, keepdim=True) - 1
        self.logits = prefilled.logits
        self.rows = torch.arange(num_rows, device=self.mask.device)  # unfinished rows
        return self

    def _pass(self) -> Tensor:
        """Advances all rows. Returns their next logits, [B, V]."""
        self.positions.add_(1)
        return self.next_logits(self.ids, self.positions)

    def append(self, rows: list[list[int]]) -> None:
        # The kernels read and write where they were recorded.
        self.ids[self.rows] = torch.tensor(rows, device=self.ids.device)
        self.graph.replay()
        self.logits = self.recorded[self.rows]

    def select(self, rows: list[int]) -> None:
        self.rows = self.rows[rows]


def recompute_activations(policy: Policy) -> None:
    """Keeps only the inputs of layers; the backward pass computes each layer again."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in policy.model.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            # transformers needs training mode, which has dropout.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


def chunked_logprobs(policy: Policy, ids: Tensor, is_sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Computes Policy.token_logprobs in chunks of tokens.

    The model's forward calls the head, which here returns [N, 2]: FSDP gathers it only there.
    """
    columns = is_sampled[:, 1:].any(0).nonzero().flatten()
    targets = ids[is_sampled]  # [N]
    head: Any = policy.model.get_output_embeddings()
    logits_of = head.forward
    # 2^24 logits are 64 MiB in fp32; on a GPU, where small products are slow, 2^27.
    size = (1 << (27 if ids.is_cuda else 24)) // len(head.weight) + 1

    def of_chunk(hidden: Tensor, some: Tensor) -> Tensor:
        """Returns log-probabilities and entropies, [n, 2], of [n, H] and [n]."""
        return torch.stack(policy.logprobs_of(logits_of(hidden), some), 1)

    def in_chunks(hidden: Tensor) -> Tensor:
        """Returns [N, 2] of [B, columns, H]. The backward pass computes chunks again."""
        chunks = []
        parts = hidden[is_sampled[:, columns + 1]].split(size)
        for part, some in zip(parts, targets.split(size)):
            chunks.append(checkpoint(of_chunk, part, some, use_reentrant=False))
        return torch.cat(chunks)

    head.forward = in_chunks
    try:
        pairs = policy.forward(ids[:, :-1], use_cache=False, logits_to_keep=columns)
    finally:
        del head.forward  # the class has the original
    return pairs[:, 0], pairs[:, 1]


# == 14. CRITIC ====
# Problem. A user does not have the same conversation eight times, so there is no group. The mean of
#   the batch ignores what is known: how this user rates.
# Rule. A second network, the critic, predicts V, the sum of later rewards, before each token. The
#   advantage of a token is the actual sum minus V (GAE, lambda 1), normalized over the batch.
# Cost. A network as large as the policy; --trainers must be 1.
#
# By example, two turns, not normalized:
#
#   token  turn  reward    V  later rewards  advantage
#   a         1          0.4            0.9        0.5
#   b         1     0.0  0.5            0.9        0.4
#   c         2     0.9  0.7            0.9        0.2


def value_network(policy: Policy, cfg: Flags) -> tuple[Any, Any]:
    """Returns a copy of the policy with one output per token, at first 0, and an optimizer."""
    from transformers import AutoModelForTokenClassification

    config = copy.deepcopy(policy.model.config)
    config.num_labels = 1
    network = called("no value network", AutoModelForTokenClassification.from_config, config)
    # Copies the policy's body. The head is the last layer; its bias is 0 already.
    network.base_model.load_state_dict(policy.model.base_model.state_dict())
    *_, head = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
    torch.nn.init.zeros_(head.weight)
    network.to(policy.device).eval()
    return network, torch.optim.Adam(network.parameters(), 1e-5 if cfg.model else 3e-3)


def gains(episode: Episode, values: list[float]) -> list[float]:
    """Returns the advantage of each sampled token, 0 for others. values: V before each."""
    pairs = zip(episode.turn_of, values)
    return [sum(episode.rewards[turn - 1 :]) - V if turn else 0.0 for turn, V in pairs]


class Critic:
    def __init__(self, policy: Policy, cfg: Flags) -> None:
        self.network, self.optimizer = value_network(policy, cfg)
        self.cfg = cfg

    def __call__(self, episodes: list[Episode]) -> list[list[float]]:
        """Returns the advantage of each token. Trains the critic on the same batch."""
        device = self.network.device
        ids, is_sampled, _ = tensors_of(episodes, device)  # [B, T] each
        size = max(1, self.cfg.tokens_per_micro_batch // ids.shape[1])
        with torch.no_grad():
            values = torch.cat([self.values(part) for part in ids.split(size)])
        advantage = padded([gains(e, row) for e, row in zip(episodes, values.tolist())], device)
        # V + advantage: the later rewards.
        self.learn(ids, is_sampled, values + advantage, size)
        advantage[is_sampled] = advantages(advantage[is_sampled], "group")  # over the batch
        return [row[: len(e.ids)] for e, row in zip(episodes, advantage.tolist())]

    def values(self, ids: Tensor) -> Tensor:
        """Returns V before each token, [B, T]: the output at the token before it."""
        values = self.network(ids[:, :-1], use_cache=False).logits.squeeze(-1)
        return torch.nn.functional.pad(values, (1, 0))

    def learn(self, ids: Tensor, is_sampled: Tensor, targets: Tensor, size: int) -> None:
        """Makes two updates, so that V follows the policy. size: rows of a micro-batch."""
        for _ in range(2):
            for rows in torch.arange(len(ids)).split(size):
                # [N]; the mean squared error over the batch, accumulated in parts
                errors = (self.values(ids[rows]) - targets[rows])[is_sampled[rows]]
                (errors.square().sum() / is_sampled.sum()).backward()
            self.optimizer.step()  # mechanism: critic
            self.optimizer.zero_grad()


# -- measurement ---


def lone_run(
    learner: Learner, prompts: Iterator[Prompt], num_steps: int
) -> Iterator[list[Episode]]:
    """Samples and trains in this process. The caller sets the rewards."""
    for step in range(num_steps):
        drawn = list(islice(prompts, learner.cfg.prompts_per_step))
        episodes = new_episodes(drawn, learner.cfg.group_size)
        episodes = rollout(learner.policy, episodes, step)
        yield episodes
        learner.step(episodes)


def train_with(worker: Worker, policy: Policy, cfg: Flags) -> float:
    """Returns the share of right letters late in training on one turn of LetterTask.

    The reward is this share plus a mood: -1.5 for a first letter a, up to 1.5 for p.
    """
    task = LetterTask(cfg.seed)
    shares = []
    # All have number 0, so they are one group: its baseline is the mean of the batch.
    prompts = (Prompt(0, prompt.turns[:1]) for prompt in training_prompts(task))
    for episodes in lone_run(UserLearner(policy, cfg), prompts, cfg.steps):
        for episode in episodes:
            right = episode.prompt.turns[0].answer
            shares.append(task.grade(right, episode.responses[0]))
            episode.rewards = [shares[-1] + LETTERS.index(right[0]) / 5 - 1.5]
    return fmean(shares[-1000:])


@stage(instead="pass")
async def demo_critic(report: Report) -> None:
    """With one response per prompt, a learned value is a better baseline than the batch's mean."""
    cfg = Flags(
        seed=report.cfg.seed,
        steps=40,
        prompts_per_step=128,
        group_size=1,
        max_new_tokens=4,
        epochs=2,
        lr=3e-3,
    )
    policy = Policy(cfg)
    sft(Learner(policy, demo_config(report.cfg)), training_prompts(LetterTask(cfg.seed)), 60)
    service = Service(Worker, 2, report.pool)
    await service.begin()
    train = partial(service.request, train_with, policy)
    critic, batch = await gather(train(replace(cfg, advantage="critic")), train(cfg))
    report.check("right letters, critic - batch", critic - batch, ">", 0.15)
    await service.close()


# == 15. REWARD MODEL ====
# Problem. Most of what people want has no reward function. A network can learn which of two
#   responses they prefer, but is right only about responses like those compared. If people want
#   exactly one a, a network that counts each a is right about "bab" and "bob", but prefers "aaaa".
# Rule. Penalize the policy's divergence from version 0 (--kl), near which the network is right.
# Cost. Two more networks, and the learned score rises less.
#
# Bradley and Terry (1952): a response with score s is preferred to one with score t with
# probability sigmoid(s - t); the loss of a comparison is -log of it. By example, 1.0 is preferred
# to 0.2 with probability sigmoid(0.8) = 0.69: the loss is 0.37, in reverse 1.17.


def read_preferences(path: Path) -> list[tuple[Prompt, list[str]]]:
    """Returns (prompt, [chosen, rejected]) of each line."""
    preferences = []
    for where, line in lines_of(path):
        prompt = prompt_of(0, line, where)
        record = json.loads(line)
        texts = [record.get("chosen"), record.get("rejected")]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{where}: needs texts as chosen and rejected")
        preferences.append((prompt, texts))
    return preferences


class RewardModel:
    """Learns from comparisons, then scores groups."""

    def __init__(self, cfg: Flags) -> None:
        self.cfg = cfg
        self.policy = HubPolicy(cfg, torch.float32)
        self.network, self.optimizer = value_network(self.policy, cfg)
        self.policy.model.to("meta")  # frees its weights
        pairs: list[Group] = []  # chosen, rejected
        for prompt, texts in read_preferences(Path(cfg.preferences)):
            pairs.append([episode_with(self.policy, prompt, [text]) for text in texts])
        rng = random.Random(cfg.seed)
        for _ in range(4):  # epochs
            rng.shuffle(pairs)
            self.learn(pairs)

    def scores(self, episodes: list[Episode]) -> Tensor:
        """Returns scores [B], means over sampled tokens."""
        ids, is_sampled, _ = tensors_of(episodes, self.policy.device)  # [B, T] each
        numbers = self.network(ids, use_cache=False).logits.squeeze(-1)  # [B, T]
        return (numbers * is_sampled).sum(1) / is_sampled.sum(1)

    def learn(self, pairs: list[Group]) -> None:
        # Two rows a pair, chosen and rejected; at most 32 pairs.
        rows = list(chain(*pairs))
        longest = max(len(e.ids) for e in rows)
        size = 2 * max(1, min(32, self.cfg.tokens_per_micro_batch // (2 * longest)))
        for start in range(0, len(rows), size):
            chosen, rejected = self.scores(rows[start : start + size]).view(-1, 2).T  # each [pairs]
            (-torch.nn.functional.logsigmoid(chosen - rejected).mean()).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def __call__(self, conversations: Conversations) -> list[list[float]]:
        """Returns the rewards of a group: a score for the last turn."""
        group = [episode_with(self.policy, *each) for each in conversations]
        with torch.inference_mode():
            scores = self.scores(group).tolist()
        return [rewards_from(score, len(e.responses)) for e, score in zip(group, scores)]


def divergence(reference: Policy, weight: float, batch: Batch, logp: Tensor) -> Tensor:
    """Returns weight * k2 of each token, [N]: k2 = (log p - log q)^2 / 2, where q is the reference.

    Its gradient (log p - log q) grad log p is that of KL(p, q), in the mean over samples of p.
    """
    with torch.no_grad():
        log_q, _ = reference.token_logprobs(batch.ids, batch.is_sampled)
    return weight * (logp - log_q).square() / 2  # mechanism: reward_model


# -- measurement ---


@dataclass
class TasteTask(Task):
    """People like a response of three or four letters with exactly one a."""

    letters: LetterTask

    def prompt(self, number: int) -> Prompt:
        return Prompt(number, self.letters.prompt(number).turns[:1])

    def grade(self, answer: Any, response: str) -> float:
        return float(len(response) >= 3 and response.count("a") == 1)

    def compare(self, group: Group, file: Any) -> None:
        """Writes comparisons of episodes 0 and 1, up to 6 and 7, without ties."""
        for start in range(0, 8, 2):
            responses = [episode.responses[0] for episode in group[start : start + 2]]
            rejected, chosen = sorted(responses, key=partial(self.grade, ""))
            if self.grade("", rejected) < self.grade("", chosen):
                record = {"prompt": group[0].prompt.turns[0].messages}
                print(json.dumps(record | {"chosen": chosen, "rejected": rejected}), file=file)


def train_on_taste(worker: Worker, cfg: Flags, policy: Policy, task: TasteTask) -> Record:
    penalty = partial(divergence, copy.deepcopy(policy), cfg.kl) if cfg.kl else None
    model = RewardModel(cfg)
    liked = []  # a share, by step
    learned = []  # mean score
    learner = UserLearner(policy, cfg, penalty=penalty)
    for episodes in lone_run(learner, training_prompts(task), cfg.steps):
        for group in groups_of(episodes):
            rewards: Any = model([(e.prompt, e.responses) for e in group])
            for episode, reward in zip(group, rewards):
                episode.rewards = reward
        liked.append(fmean(task.grade("", e.responses[0]) for e in episodes))
        learned.append(fmean(e.rewards[0] for e in episodes))
    return {
        "kl": cfg.kl,
        "liked, best": max(liked),
        "liked, end": liked[-1],
        "learned, rise": learned[-1] - learned[0],
    }


@stage(instead="return torch.zeros_like(logp)")
async def demo_reward_model(report: Report) -> None:
    """A policy exploits a learned reward. A KL penalty prevents this."""
    file = str(report.folder / "preferences")
    cfg: Any = demo_config(
        Flags(seed=report.cfg.seed, steps=60, prompts_per_step=8, group_size=16, preferences=file)
    )
    task = TasteTask(LetterTask(cfg.seed))
    policy = Policy(cfg)
    sft(Learner(policy, cfg), training_prompts(task), 60)
    prompts = list(islice(training_prompts(task), 250))  # 16 responses each, 8 in pairs
    with open(file, "w") as lines:
        for group in groups_of(rollout(policy, new_episodes(prompts, 16), cfg.seed)):
            task.compare(group, lines)
    service = Service(Worker, 2, report.pool)
    await service.begin()
    kinds = (cfg, replace(cfg, kl=0.4))
    rows = await gather(*[service.request(train_on_taste, kind, policy, task) for kind in kinds])
    report.table(rows)
    free, with_kl = rows
    fall = free["liked, best"] - free["liked, end"]
    report.check("fall of the liked share, without a remedy", fall, ">", 0.25)
    report.check("liked share at the end, with --kl", with_kl["liked, end"], ">", 0.3)
    await service.close()


# == 16. HOSTS ====
# Terms. A *worker host* runs a *Monarch host*, a process that starts generators, each with an
#   *agent* for pings. The first generator has the *relay*, a thread that asks the *outlet*, an
#   actor in the main process, for weights.
# Problem. Shared memory and signals end at the edge of a machine. A failed host reports nothing,
#   and remote processes outlive a failed command.
# Rule. The relay pulls the latest version (section 3) into an arena of its host (section 7), which
#   its generators read. If a host answers no ping, its generators are replaced. A Monarch host
#   without pings is killed, and a new one started.
# Cost. At most one transfer per version and host, and the work of a lost host.
#
#   machine of the command          worker host
#   Trainer -> Arena <- Outlet <--- relay -> Arena <- WeightReader, Generator
#                +---- RDMABuffer ---->+
#
# `--worker FOLDER` writes a URL into the shared folder that `--hosts` reads.

# -- 16a. One transfer per version and host ---

HOST_FOLDER = "MONARCH_RL_HOST_FOLDER"  # of the environment: a local folder


def relay(outlet: Any, handle: ArenaHandle, number: int, arena: Arena) -> None:
    """Copies versions into this host's arena, with the lease of reader `number`."""
    version = Arena.NOTHING
    handle = replace(handle, layout=())  # unused, and large
    try:
        while True:
            lease = outlet.lease.call_one(handle, number, version, environ[HOST_FOLDER])
            version, weights = lease.get()  # blocks
            if weights:
                slot = arena.free_slot()
                weights.read_into(arena.slots[slot], timeout=600).get()
                arena.commit(version, slot)
            time.sleep(0.01)
    finally:
        # Ends this process and its host, where others would read old weights.
        os._exit(1)


class Outlet(Actor):
    """Leases slots of the trainer's arena to relays."""

    def __init__(self) -> None:
        self.handle: ArenaHandle | None = None
        self.num_transfers: Counter[tuple[int, str]] = Counter()  # by version and host

    @endpoint
    async def lease(
        self, handle: ArenaHandle, reader: int, newest: int, host: str
    ) -> tuple[int, RDMABuffer | None]:
        """Returns the latest version, and its slot if not `newest`."""
        if handle != self.handle:
            self.handle = handle
            self.arena = Arena(handle)
            self.buffers = [RDMABuffer(slot) for slot in self.arena.slots]
        version, slot = self.arena.lease(reader)  # mechanism: hosts
        if version == newest:
            return version, None
        self.num_transfers[version, host] += 1
        return version, self.buffers[slot]

    @endpoint
    async def traffic(self) -> Counter[tuple[int, str]]:
        return self.num_transfers


def relayed_reader(
    outlet: Outlet,
    reader_class: type[WeightReader],
    handle: ArenaHandle,
    number: int,
    tensors: Weights,
) -> WeightReader:
    """Returns a reader of this host's arena. The first call creates it, and the relay."""
    # One file per trainer arena has the handle of the local one.
    with open(Path(environ[HOST_FOLDER], handle.path.replace("/", "_")), "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not os.fstat(file.fileno()).st_size:  # the first call
            host_handle, arena = create_arena(handle.layout, handle.num_readers)
            pickle.dump(host_handle, file)
            # In this context the thread may send messages.
            args = (relay, outlet, handle, number, arena)
            threading.Thread(target=contextvars.copy_context().run, args=args).start()
        file.seek(0)
        return reader_class(pickle.load(file), number, tensors)


# -- 16b. On a worker host ---

SILENCE_S = 5.0  # a host that has answered is lost after this silence


def start_python(program: str, **variables: str) -> subprocess.Popen[bytes]:
    """Starts a program that ends with this process, by PR_SET_PDEATHSIG."""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env=environ | variables,
        preexec_fn=partial(ctypes.CDLL(None).prctl, 1, signal.SIGKILL),
    )


def this_url() -> str:
    """Returns this machine's URL, "tcp://node7", without a port."""
    address = environ.get("MONARCH_RL_ADDRESS") or socket.gethostname()
    if "HYPERACTOR_TLS_CERT" in environ:  # both sides have certificates of one CA
        return f"tls://{address}"
    print("tcp://, not tls://: anyone who reaches these ports can run code here")
    return f"tcp://{address}"


def serve_worker(folder: str, url: str) -> None:
    """Runs one Monarch host after another, until a signal."""
    for number in ENDING:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    note = Path(folder, url.rpartition("/")[-1] + ".url")
    try:
        while True:
            run_host(note, url)
    finally:
        note.unlink(missing_ok=True)


def run_host(note: Path, url: str) -> None:
    # A new port: Monarch cannot attach to a lost URL again.
    with socket.create_server((note.stem, 0)) as server:
        url += f":{server.getsockname()[-1]}"
    # Monarch 0.7 accepts no other `ca`. At tls:// it checks certificates.
    program = f"""from monarch.actor import run_worker_loop_forever
run_worker_loop_forever(address={url!r}, ca="trust_all_connections")"""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Pings touch this file. The first may take 300 s longer.
        pinged = Path(folder) / "pinged"
        pinged.touch()
        os.utime(pinged, (0, time.time() + 300))
        host = start_python(program, **{HOST_FOLDER: folder, "TMPDIR": folder})
        write_durably(note, url)
        while host.poll() is None:
            time.sleep(0.1)
            try:
                silent_s = time.time() - pinged.stat().st_mtime
            except FileNotFoundError:  # `end_host` ran
                silent_s = math.inf
            if silent_s > SILENCE_S:
                host.kill()


def urls_in(folder: Path) -> list[str]:
    return [note.read_text() for note in folder.glob("*.url")]


# -- 16c. Processes on other hosts ---


class HostAgent(Actor):
    """Tells run_host that the command is alive."""

    @concurrent_endpoint
    async def ping(self) -> int:
        # Raises if the host is ending.
        os.utime(Path(environ[HOST_FOLDER], "pinged"))
        return os.getpid()

    @concurrent_endpoint
    async def end_host(self) -> None:
        Path(environ[HOST_FOLDER], "pinged").unlink(missing_ok=True)


@dataclass
class HostProcess(Processes):
    """A process on a worker host. No signal reaches it, so `kill` ends its Monarch host."""

    agent: Any
    lost: asyncio.Future[str]  # the reason, for all processes of the host

    def deaths(self) -> list[Awaitable[str]]:
        # Cancelling a watch must not cancel the shared future.
        return [until_unresponsive(self.agent, SILENCE_S), asyncio.shield(self.lost)]

    async def kill(self) -> None:
        if not self.lost.done():
            self.lost.set_result("was on a host that is lost")
        self.agent.end_host.broadcast()


class HostPool(Pool):
    """Starts processes on worker hosts, at most ceil(n / hosts) on each."""

    def __init__(self, folder: Path, num_processes: int) -> None:
        self.folder = folder
        self.num_processes = num_processes
        self.silent: set[str] = set()  # URLs
        self.started: Counter[str] = Counter()
        self.lost: dict[str, Any] = defaultdict(asyncio.Future)
        self.outlet = this_proc().spawn(f"outlet_{time.monotonic_ns()}", Outlet)

    async def start(self, num_ranks: int) -> HostProcess:
        deadline = time.monotonic() + 12 * SILENCE_S
        while True:
            urls = {*urls_in(self.folder)} - self.silent
            if time.monotonic() > deadline:  # others take over for hosts that did not return
                urls -= {url for url in urls if self.lost[url].done()}
            for url in urls:
                has_room = self.started[url] < self.num_processes / len(urls)
                if has_room and not self.lost[url].done():
                    self.started[url] += 1
                    return await self._start_on(url)
            if self.silent and not urls:
                raise RunError("no host answers: are ports open, and certificates of one CA?")
            await sleep(0.1)

    async def _start_on(self, url: str) -> HostProcess:
        host = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=[url])
        mesh = host.spawn_procs({"rank": 1})
        agent = mesh.spawn("agent", HostAgent)
        try:
            pid = await wait_for(agent.ping.call_one(), 12 * SILENCE_S)  # imports take long
        except Exception:  # the machine may be gone, and its note left
            print(f"no answer from {url}")
            self.silent.add(url)
            return await self.start(1)
        return HostProcess(mesh, [pid], agent, self.lost[url])


# -- measurement ---


@stage(instead="version, slot = divmod(self.arena.words[0], self.arena.num_slots)")
async def demo_hosts(report: Report) -> None:
    """A host costs at most one transfer per version. No read is torn, though a host is lost."""
    folder = Path(tempfile.mkdtemp(dir=report.folder))
    serve = "__import__({!r}).serve_worker({!r}, 'tcp://127.0.0.{}')"  # what --worker runs
    workers = [start_python(serve.format(THIS_FILE.stem, str(folder), n)) for n in (2, 3)]
    while len(urls_in(folder)) < 2:
        await sleep(0.01)

    pool = HostPool(folder, 4)
    writer = WeightWriter(blocks(4), 4)
    make_reader = partial(relayed_reader, pool.outlet, WeightReader, writer.handle)
    service = Service(ReaderWorker, 4, pool, (make_reader, 4))

    async def publish() -> None:
        for version in count():
            publish_filled(writer, version)
            await sleep(0)

    publishing = ensure_future(publish())
    await service.begin()
    read = partial(service.request, "read", 25, 1, True)  # 25 leased reads of 1 publish
    reading = gather(read(), read())
    await sleep(0.1)
    await service.replicas[0].processes.kill()  # a host of two replicas
    answers = await reading
    await service.until_ready(4)
    answers += await gather(read(), read())

    num_transfers = await pool.outlet.traffic.call_one()
    publishing.cancel()
    report.check("torn reads of 100", sum(answers), "==", 0)
    report.check("replicas lost with their host", service.num_lost, ">", 1)
    report.check("transfers of a version to a host", max(num_transfers.values()), "==", 1)
    await service.close()
    for worker in workers:
        worker.terminate()
        worker.wait()


# == THE COMMAND LINE ====
# Inherited variables. Existing values are kept.
ENVIRONMENT = {
    # How often Monarch polls actors, and how long they may be silent.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "2s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "5s",
    # How long the main process may be suspended (Ctrl-Z).
    "HYPERACTOR_MESSAGE_DELIVERY_TIMEOUT": "1d",
    "HYPERACTOR_MESH_SUPERVISION_WATCHDOG_TIMEOUT": "1d",
    "HYPERACTOR_MESH_ORPHAN_TIMEOUT": "1d",
    "OMP_NUM_THREADS": "1",  # processes share the cores
    "PYTHONSAFEPATH": "1",  # a math.py here does not replace Python's
    "PYTHONWARNINGS": "ignore",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
}
# Signals that end a command; not SIGHUP under nohup.
ENDING = [
    number
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(number) != signal.SIG_IGN
]
# Names of TRL.
RENAMED = """
    learning-rate --lr
    num-generations --group-size
    per-device-train-batch-size --prompts-per-step
    gradient-accumulation-steps --tokens-per-micro-batch
    max-completion-length --max-new-tokens
    max-steps --steps
    num-train-epochs --steps
    num-iterations --epochs
    beta --kl
    epsilon --clip-low
    save-steps --save-every
    eval-steps --eval-every
    bf16 --dtype
    model-name-or-path --model
    dataset-name --task
    reward-funcs --reward
    output-dir --checkpoint
    resume-from-checkpoint --checkpoint
    gradient-checkpointing --activations
    mask-truncated-completions --truncated
    log-completions --samples
    report-to --log
    config @FILE
"""


def read_flags(argv: list[str] | None) -> Flags:
    """Raises UsageError or ArgumentError."""
    # The comments of two classes' fields are the help.
    classes = re.findall(r"(?s)\nclass (?:Config|Flags)\b.*?\n\n\n", THIS_FILE.read_text())
    texts = dict(re.findall(r"(\w+): .*  # (.*)", "".join(classes)))

    # "@FILE": the lines of a file. Without a usage, errors are one line.
    parser = argparse.ArgumentParser(
        usage=argparse.SUPPRESS, allow_abbrev=False, exit_on_error=False, fromfile_prefix_chars="@"
    )
    for each in fields(Flags):
        options: Any = {"action": "store_true"}
        if not isinstance(each.default, bool):
            is_stage = each.name in ("stage", "only")
            choices = STAGES if is_stage else get_args(get_type_hints(Flags)[each.name]) or None
            options = {"type": type(each.default), "choices": choices}
        # Omitted flags get saved values, or else the defaults.
        parser.add_argument(
            f"--{each.name.replace('_', '-')}",
            default=argparse.SUPPRESS,
            help=f"{texts[each.name]} ({each.default})",
            **options,
        )
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0].replace("_", "-")
        ours = re.findall(rf"    {re.escape(name[2:])} (\S+)", RENAMED)
        raise UsageError(f"unknown: {unknown[0]}; see {[*ours, '--help'][0]}")

    given = vars(known)
    for name in given.keys() & {"model", "task", "reward", "preferences"}:
        # "repeat" is a name; "rewards.py:score" is a path.
        is_file = re.search(r"\.(jsonl|py:\w+)$", given[name])
        if is_file or (name == "model" and os.path.isdir(given[name])):
            given[name] = os.path.realpath(given[name])
    cfg = Flags(**with_saved_flags(given, parser))
    for mistake in chain(mistakes_in(cfg), mistaken_paths(cfg)):
        raise UsageError(mistake)
    return replace(cfg, lr=cfg.lr or (1e-6 if cfg.model else 1e-3))


async def run_stages(report: Report, cfg: Flags) -> Record:
    """Runs stages. An exception is a failed check."""
    for stage in [STAGES[cfg.only]] if cfg.only else STAGES.values():
        print(f"\n{[*STAGES].index(stage.name) + 1}. {stage.name}: {stage.claim}")
        result: Record = {"name": stage.name, "checks": [], "rows": []}
        report.stages.append(result)
        try:
            await stage.demo(report)
        except Exception as error:
            traceback.print_exc()
            report.check(f"errors that ended the stage ({cause_of(error)})", 1, "==", 0)
        before = THIS_FILE.read_text().partition("# mechanism: " + stage.name)[0]
        number = before.count("\n") + 1
        report.say(f"try: line {number}, `{stage.instead}`; then --only {stage.name}")
        if stage.name == cfg.stage:
            break
    print(f"\nstages with a failed check: {report.failed() or 'none'}")
    return {}


def mistakes_in(cfg: Flags) -> Iterator[str]:
    for each in fields(Flags):
        if isinstance(each.default, (int, float)):
            # 0 is valid for K, and where the default is < 1.
            value = getattr(cfg, each.name)
            least = "at least" if each.default < 1 or each.name == "max_staleness" else "above"
            if not 0 <= value < math.inf or (value == 0 and least == "above"):
                yield f"--{each.name.replace('_', '-')}: {least} 0, and finite"
    inputs = real_paths(*{cfg.model, cfg.task, cfg.reward, cfg.preferences} - {"repeat", "model"})
    rules = {
        "--group-size: at least 2, for this --advantage": (
            cfg.group_size > 1 or cfg.advantage in ("none", "critic")
        ),
        "--trainers: 1 with a critic": cfg.trainers == 1 or cfg.advantage != "critic",
        "--preferences and --reward model: both or neither": (
            (cfg.reward == "model") == bool(cfg.preferences)
        ),
        "--model: needs --train, --evaluate or --export": (
            cfg.train or cfg.evaluate or cfg.export or not cfg.model
        ),
        "--reward, and a --task other than repeat: with --model": (
            cfg.model or (cfg.task == "repeat" and not cfg.reward)
        ),
        "torchrun: use --trainers alone": "TORCHELASTIC_RUN_ID" not in environ,
        "--device cuda: fewer GPUs than trainers": (
            cfg.device != "cuda" or device_of(replace(cfg, device="")) == "cuda"
        ),
        "--json: a file": os.path.isfile(cfg.json) or not os.path.exists(cfg.json),
        "an output is also an input": (
            inputs.isdisjoint(real_paths(cfg.log, cfg.samples, cfg.json, cfg.export))
        ),
    }
    yield from [requirement for requirement, is_met in rules.items() if not is_met]


def real_paths(*paths: str) -> set[str]:
    """Returns absolute paths: for "a.py:score" that of a.py."""
    return {os.path.realpath(path.rsplit(":", 1)[0]) for path in paths if path}


def mistaken_paths(cfg: Flags) -> Iterator[str]:
    # "org/name" is a hub id, "./name" and "/a/b" are folders.
    is_saved = cfg.checkpoint and Path(cfg.checkpoint, "model").is_dir()
    is_folder = cfg.model.startswith((".", "/", "~")) and not is_saved
    model = f"{cfg.model}/config.json" if is_folder else ""
    for path in (cfg.preferences, cfg.hosts, model):
        if path and not Path(path).exists():
            yield f"{path}: no such path"
    try:
        for folder in (cfg.export, cfg.checkpoint):
            if folder:
                os.makedirs(folder, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        for file in (cfg.log, cfg.samples, cfg.json):
            open(file or os.devnull, "a").close()
        if cfg.json:  # written at the end; an old one would mislead
            os.remove(cfg.json)
    except OSError as error:
        yield str(error)


async def run_command(cfg: Flags) -> int:
    command = run_user_command if cfg.train or cfg.evaluate or cfg.export else run_stages
    loop = get_running_loop()
    received: list[int] = []
    pool = WarmPool()
    with tempfile.TemporaryDirectory(prefix="monarch_rl_") as folder:
        report = Report(cfg, Path(folder), pool)
        work = ensure_future(command(report, cfg))

        # Later signals are ignored.
        def end(number: int) -> None:
            received.append(number)
            work.cancel()
            for each in ENDING:
                loop.remove_signal_handler(each)
                signal.signal(each, signal.SIG_IGN)
            with suppress(OSError):
                print("ending; a step is finished first")

        for number in ENDING:
            loop.add_signal_handler(number, end, number)
        try:
            figures = await work
            if cfg.json:
                text = json.dumps({"stages": report.stages, "train": figures}, indent=1)
                write_durably(Path(cfg.json), text)
        except (CancelledError, OSError):  # OSError: the terminal is closed
            if not received:
                raise
        finally:
            await pool.close()
    if received:
        with suppress(OSError):
            print(f"ended by {signal.Signals(received[0]).name}")
        return 128 + received[0]
    return 1 if report.failed() else 0


def set_environment() -> None:
    environ.update(ENVIRONMENT | environ)
    path = environ.get("PYTHONPATH", "")
    environ["PYTHONPATH"] = f"{THIS_FILE.parent}:{path}".rstrip(":")
    environ["TMPDIR"] = tempfile.gettempdir()  # one that exists
    warnings.simplefilter("ignore")
    reload_config_from_env()  # Monarch read it when imported


def main(argv: list[str] | None = None) -> int:
    """Runs a command. Exit status: 1 failed, 2 wrong usage, 128 + n after signal n."""
    try:
        if asyncio._get_running_loop():
            raise UsageError("in a notebook: !python monarch_rl.py --help")
        cfg = read_flags(argv)
        output: Any = sys.stdout
        output.reconfigure(line_buffering=True, errors="replace")
        set_environment()
        if cfg.worker:  # exits
            serve_worker(cfg.worker, this_url())
        if cfg.hosts:
            monarch.actor.enable_transport(this_url() + ":0")
        monarch.actor.unhandled_fault_hook = lambda failure: None  # the default exits
        return asyncio.run(run_command(cfg))
    except (UsageError, argparse.ArgumentError) as error:
        print(f"monarch_rl.py: {error}", file=sys.stderr)
        return 2
    except (RunError, ReplicaLost, ActorError, SupervisionError, OSError) as error:
        cause = cause_of(error)
        print(f"monarch_rl.py: {cause}", file=sys.stderr)
        # An ActorError has its cause as text.
        return 2 if "UsageError: " in cause else 1


if __name__ == "__main__":
    # Workers find classes under the file's name. `python -P` has no path to it.
    sys.path.append(str(THIS_FILE.parent))
    sys.exit(import_module(THIS_FILE.stem).main())
