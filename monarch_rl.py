#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch==2.14.1", "transformers==5.24.0", "torchmonarch==0.7.0"]
# ///
"""monarch_rl: an asynchronous RL system for language models, in one file that you can finish.

A generator samples while the trainer learns. Samples are at most K (--max-staleness) versions old,
weights are never half updated, and a lost generator costs time only:

    python monarch_rl.py                      the tour: all stages, 2.5 minutes on two cores
    python monarch_rl.py --stage weight_sync  stages 1 to 7
    python monarch_rl.py --train --model FOLDER_OR_HUB_ID --task FILE.jsonl    your own run

    prompts -> Generator -> list[Episode] -> RewardWorker -> Group -> ReplayBuffer -> batch
                   ^                                                                    |
                   |                                                                    v
              WeightReader <------ Arena: slots, leases <------ WeightWriter <------ Trainer

Messages pass through the main process, weights through shared memory. Each concept is a stage,
which measures its rule, and prints the change of one line that breaks it:

     1 hello_actor     state in one process, one call at a time: no addition is lost
     2 actor_mesh      one call reaches every member of a mesh
     3 rdma_transfer   pass a handle, pull the bytes; the owner's Python takes no part
     4 controllers     actors that never met find one singleton by its name
     5 supervision     exception, death, standstill, endless work: who hears of each, and how soon
     6 service         every request is answered once, although replicas die and stand still
     7 weight_sync     never torn, and a sync costs one memory copy
     8 reshard         from one sharding to another, each byte that is needed is written once
     9 rollout         what was recorded while sampling is what the trainer recomputes
    10 losses          which estimator follows the true gradient, and how noisily
    11 sync_rl         the loop, one thing at a time
    12 async_rl        two loops and a buffer, with bounded staleness, under faults
    13 recovery, 14 critic, 15 reward_model, 16 hosts

Read it from top to bottom. Part I (1 to 12) is the whole system on one host; Part II goes on with
your own data, and 13 to 16. After a section, run its stage, and make its change: a check fails.

Terms. An *episode* is one conversation. A *group* is the episodes of one prompt; their rewards are
compared. A *version* numbers the weights: each step makes the next. *Staleness* is the
trainer's version minus the sampling version. A *slot* holds one version; readers *lease* it.

Left out: paged attention and continuous batching (vLLM, SGLang); tensor, pipeline and expert
parallelism (torchtitan, Megatron); LoRA (peft); sandboxes; trainers over several hosts; trackers.
For Linux, with Python 3.11 to 3.13. It has not been run on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextvars
import copy
import ctypes
import difflib
import fcntl
import gc
import html
import inspect
import json
import math
import mmap
import multiprocessing
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
import urllib.request
import warnings
import weakref
import zipfile
import zlib
from asyncio import CancelledError, TaskGroup, ensure_future, gather
from asyncio import get_running_loop, sleep, wait, wait_for
from collections import Counter, defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from decimal import Decimal
from functools import cache, partial
from importlib import import_module
from itertools import count, groupby, islice, pairwise, zip_longest
from math import ceil
from os import environ
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

if __name__ == "__main__":
    environ.setdefault("MONARCH_FILE_LOG", "error")  # else megabytes in /tmp
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError
from monarch.actor import Actor, ActorError, ProcMesh
from monarch.actor import concurrent_endpoint, current_rank, endpoint
from monarch.actor import get_or_spawn_controller, this_host, this_proc
from monarch.rdma import RDMABuffer
from tabulate import tabulate

THIS_FILE = Path(__file__).resolve()
Record = dict[str, Any]
STAGES: dict[str, Stage] = {}  # by name, in the order of the file


class Lazy:
    """A module that is imported at its first use: torch takes a second."""

    def __init__(self, name: str) -> None:
        self.module_name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(import_module(self.module_name), name)
        setattr(self, name, found)
        return found


if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint.state_dict as dcp
    import torch.distributed.tensor as dtensor
    import transformers
    from torch import Tensor
else:
    torch = Lazy("torch")
    dist = Lazy("torch.distributed")
    dcp = Lazy("torch.distributed.checkpoint.state_dict")
    dtensor = Lazy("torch.distributed.tensor")
    transformers = Lazy("transformers")


class UsageError(Exception):
    """A wrong command: one line, exit status 2."""


@dataclass(frozen=True)
class Config:
    """The flags: `max_staleness` is --max-staleness, with its comment in --help."""

    stage: str = ""  # run all stages up to this one
    only: str = ""  # run this stage alone
    list: bool = False  # list the stages and their lines
    train: bool = False  # train --model on --task
    evaluate: int = 0  # pass@k, with so many samples of each prompt
    export: str = ""  # write the model to this folder
    model: str = ""  # a folder or a hub id of a causal model; default: a tiny one
    task: str = "repeat"  # repeat, count or pattern; a FILE.jsonl; a FILE.py:CLASS
    reward: str = ""  # a FILE.py:FUNCTION(prompt, response, answer), or model
    dtype: Literal["", "float32", "bfloat16"] = ""  # of the passes; on GPUs bfloat16
    device: Literal["", "cpu", "cuda"] = ""  # default: cuda, if each trainer has one
    seed: int = 0  # of the prompts, the sampling and fresh models
    steps: int = 100  # updates of the policy
    prompts_per_step: int = 16  # the groups in a batch
    group_size: int = 8  # the samples of each prompt
    max_new_tokens: int = 0  # of a response; by default what the task needs
    temperature: float = 1.0  # of the sampling
    tokens_per_micro_batch: int = 8192  # the tokens, with padding, of a micro-batch
    generators: int = 2  # the processes that sample
    reward_workers: int = 1  # the processes that compute rewards
    trainers: int = 1  # the ranks of the trainer (FSDP2)
    hosts: str = ""  # the --worker folder; its hosts run generators
    worker: str = ""  # offer this machine to --hosts in this folder
    max_staleness: int = 2  # K, in versions; 0: synchronous
    loss: Literal["reinforce", "ppo", "decoupled"] = "ppo"  # see section 10
    advantage: Literal["group", "leave_one_out", "none", "critic"] = "group"  # baseline
    epochs: int = 1  # updates from each batch
    clip_low: float = 0.2  # of the importance ratio, below 1
    clip_high: float = 0.2  # of the importance ratio, above 1
    kl: float = 0.0  # the weight of the divergence from the first version
    entropy: float = 0.0  # the weight of an entropy bonus
    lr: float = 0.0  # the default is 1e-6, for the tiny policy 1e-3
    sft_steps: int = 0  # supervised steps on the right answers before RL
    reward_deadline: float = 60.0  # the seconds that the rewards of a group may take
    preferences: str = ""  # a FILE.jsonl: prompt, chosen, rejected
    ask_every: int = 0  # the groups between calls of the task's prefer; 0: none
    checkpoint: str = ""  # a folder from which the same command resumes
    save_every: int = 20  # the steps between checkpoints
    eval_every: int = 0  # the steps between evaluations; 0: only the first and last
    eval_prompts: int = 256  # the held-out prompts of an evaluation
    log: str = ""  # a line of JSON for every step, in this file
    json: str = ""  # checks and figures of the command, in this file
    report: str = ""  # a page of the command, in this file


@dataclass(frozen=True)
class Stage:
    """One concept: its claim, its demo, and the one-line change that makes the claim false."""

    name: str
    claim: str  # the first line of the demo's docstring
    instead: str  # the statement that replaces the one marked `# mechanism: NAME`
    demo: Callable[[Report], Awaitable[None]]


def stage(instead: str) -> Callable[..., Any]:
    def register(demo: Any) -> Any:
        name = demo.__name__.removeprefix("demo_")
        claim = demo.__doc__.splitlines()[0].rstrip(".")
        STAGES[name] = Stage(name, claim, instead, demo)
        return demo

    return register


def line_with(text: str) -> int:
    """The number of the first line of this file that has the text."""
    return THIS_FILE.read_text().partition(text)[0].count("\n") + 1


def title_of(stage: Stage) -> str:
    place = f"[{[*STAGES].index(stage.name) + 1}/{len(STAGES)}]"
    line = line_with(f". {stage.name.replace('_', ' ').upper()} ===")
    return f"{place} {stage.name}: {stage.claim}  (line {line})"


class Report:
    """Prints what is found, and keeps it for --json."""

    def __init__(self, cfg: Config, folder: Path, pool: Pool) -> None:
        self.cfg = cfg
        self.folder = folder
        self.pool = pool
        self.stages: list[Record] = []

    def say(self, text: str) -> None:
        print(f"       {text}")

    def table(self, rows: list[Record]) -> None:
        shown = tabulate(rows, headers="keys", tablefmt="plain", floatfmt=".3g")
        for line in shown.splitlines():
            self.say(line)

    def check(self, what: str, value: Any, relation: str, bound: Any) -> None:
        relations = {"==": value == bound, "<": value < bound, ">": value > bound}
        holds = bool(relations[relation])
        self.stages[-1]["checks"].append({"what": what, "ok": holds})
        result = "ok" if holds else "FAIL"
        print(f"    {result} {what}: {value:.3g}  ({relation} {bound:.3g})")

    def figure(self, **values: Any) -> None:
        self.stages[-1]["figures"].update(values)

    def failed(self) -> list[str]:
        return [s["name"] for s in self.stages if not all(c["ok"] for c in s["checks"])]


# ==== PART I: the system ====

# == 1. HELLO ACTOR ====
# Problem. Threads share an object. Each reads it, pauses, and writes back a new value. Updates
#   vanish, without an error, and not every time.
# Rule. Put the object into an actor: an instance that lives in one process and is reached only by
#   messages. Messages wait in the actor's mailbox, and its endpoints run one at a time.
# Cost. A message and its answer take the time of thousands of function calls.
#
#   main process                              process of the actor
#   counter.add.call_one()   -- message -->   waits in the mailbox until earlier calls are done
#   await ...                <-- answer --    add() has run from its first line to its last


class Accumulator(Actor):
    """A counter. `@endpoint` marks the methods that messages may call, one at a time.

    The calls of a `@concurrent_endpoint` may overlap.
    """

    def __init__(self) -> None:
        self.total = 0

    @endpoint  # mechanism: hello_actor
    async def add(self, pause_s: float = 0.0005) -> None:
        """Adds one."""
        total = self.total
        # During the pause, another thread or coroutine would read the same total.
        await sleep(pause_s)
        self.total = total + 1

    @endpoint
    async def take(self) -> int:
        """The additions since the last call."""
        total = self.total
        self.total = 0
        return total


async def lost_by_threads(num_additions: int) -> int:
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
    lost = await lost_by_threads(200)
    report.check("additions of 200 lost by threads", lost, ">", 0)

    # A process on this host, and an actor in it. `spawn` returns a reference at once. `call_one`
    # sends a message, and returns an awaitable for the answer.
    procs = this_host().spawn_procs(per_host={"worker": 1})
    counter = procs.spawn("counter", Accumulator)
    await gather(*[counter.add.call_one() for _ in range(200)])
    lost = 200 - await counter.take.call_one()
    report.check("additions of 200 lost by the actor", lost, "==", 0)
    await procs.stop()


# == 2. ACTOR MESH ====
# Problem. A run has many generators, and a trainer many ranks. Calling them one after another takes
#   the sum of their times.
# Rule. Actors that are spawned together are a mesh, an array with named dimensions. The adverb of
#   a call says which members run, and which answer:
#
#   mesh.add.call(...)                    every member runs; returns a mesh of their answers
#   mesh.add.broadcast(...)               every member runs; nobody answers
#   mesh.add.choose(...)                  one member runs, drawn at random
#   mesh.slice(worker=2).add.call_one()   this member runs
#
# Cost. `call` is as slow as its slowest member, and fails if one fails. `broadcast` reports no
#   failure.


@stage(instead="mesh = members.slice(worker=0)")
async def demo_actor_mesh(report: Report) -> None:
    """One call reaches every member of a mesh; its adverb says which members run and answer."""
    procs = this_host().spawn_procs(per_host={"worker": 4})
    members = procs.spawn("counters", Accumulator)
    mesh = members  # mechanism: actor_mesh

    async def num_ran() -> int:
        """The calls of `add` since the last `take`, which queues behind them."""
        totals = await members.take.call()
        return sum(totals.values())

    await num_ran()  # the first call waits until all processes have started
    await mesh.add.call()
    report.check("members of 4 that ran under `call`", await num_ran(), "==", 4)
    mesh.add.broadcast()  # returns before any member has run
    report.check("members of 4 that ran under `broadcast`", await num_ran(), "==", 4)
    await procs.stop()


# == 3. RDMA TRANSFER ====
# Problem. Weights are gigabytes. A message is pickled, copied, queued and unpickled, and its
#   answer waits until the owner's Python has time.
# Rule. Control travels in messages. Bulk data stays where it is: its owner registers the memory
#   once, as an RDMABuffer, and sends the handle in a message. The receiver moves the bytes. The
#   operation is one-sided: no Python of the owner runs.
# Cost. The owner must keep the memory alive, and does not learn when a reader is done (section 7).
#
#   owner                                           reader
#   memory = torch.zeros(...)
#   RDMABuffer(memory)  ---- handle, a message ---->  handle.read_into(mine)   pulls the bytes
#                                                     handle.write_from(mine)  pushes bytes
#
# RDMA is remote direct memory access: a network card reads the memory of another machine without
# that machine's processor. Without such a card Monarch does the same over TCP, by threads in Rust.


class Owner(Actor):
    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)

    @endpoint
    async def handle(self) -> RDMABuffer:
        warnings.simplefilter("ignore")  # there is no network card
        return RDMABuffer(self.memory)

    @endpoint
    async def as_message(self) -> Tensor:
        return self.memory

    @endpoint
    async def compute(self) -> float:
        """Keeps this process's Python busy for about a second. Returns the time at its end."""
        sum(range(10**8))  # one call into C: no other Python code of the process runs
        return time.time()


@stage(instead="mine.copy_(await owner.as_message.call_one())")
async def demo_rdma_transfer(report: Report) -> None:
    """A handle of half a kilobyte moves any number of bytes while the owner's Python is busy."""
    procs = this_host().spawn_procs(per_host={"worker": 1})
    owner = procs.spawn("owner", Owner, 32 << 20)
    handle = await owner.handle.call_one()
    report.check("bytes of the handle", len(pickle.dumps(handle)), "<", 1024)

    expected = await owner.as_message.call_one()
    mine = torch.zeros_like(expected)
    busy = ensure_future(owner.compute.call_one())
    await sleep(0.2)  # now the owner is inside of `sum`
    await handle.read_into(mine)  # mechanism: rdma_transfer
    pulled_s = time.time()
    report.check("s that `compute` outlasted the pull", await busy - pulled_s, ">", 0)
    report.check("bytes that differ", int((mine != expected).sum()), "==", 0)
    await procs.stop()


# == 4. CONTROLLERS ====
# Problem. Actors in many processes have to meet, for example at one log. Two creators would make
#   two half-filled logs.
# Rule. Ask by name. `get_or_spawn_controller(name, Class)` gives every caller the same actor: the
#   first request for a name creates it, in the main process, and later ones find it.
# Cost. One more message for each lookup; one process answers all calls.


@dataclass(frozen=True)
class Span:
    """A stretch of work. Times are seconds since 1970: one clock for all processes of a host."""

    who: str  # "trainer_0"
    start_s: float
    end_s: float


class Timeline(Actor):
    """Who worked, and when. Workers send it their spans."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=100_000)

    @endpoint
    async def add(self, spans: list[Span]) -> None:
        self.spans.extend(spans)

    @endpoint
    async def read(self, who: str = "") -> list[Span]:
        """The spans of workers whose name begins with `who`."""
        return [span for span in self.spans if span.who.startswith(who)]


class Witness(Actor):
    @endpoint
    async def report(self) -> None:
        find = get_or_spawn_controller
        timeline = await find("timeline", Timeline)  # mechanism: controllers
        span = Span(f"witness_{current_rank().rank}", time.time(), time.time())
        await timeline.add.call_one([span])


@stage(instead='timeline = this_proc().spawn("timeline", Timeline)')
async def demo_controllers(report: Report) -> None:
    """Actors that never met find one singleton by its name."""
    procs = this_host().spawn_procs(per_host={"worker": 3})
    await procs.spawn("witnesses", Witness).report.call()
    timeline = await get_or_spawn_controller("timeline", Timeline)
    spans = await timeline.read.call_one("witness")
    report.check("witnesses of 3 in the timeline of this process", len(spans), "==", 3)
    await procs.stop()


# == 5. SUPERVISION ====
# Problem. Processes raise, die, stand still, or work for ever, and their callers wait. But a worker
#   that has been silent for ten minutes may just be busy.
# Rule. An exception goes to the caller. The owner of a process, here the main process, kills and
#   replaces it. Death and standstill have a detector each. Slow work still answers pings:
#
#   failure              its caller            its owner learns of it by
#   an endpoint raises   gets the exception    nothing: the actor lives on
#   the process dies     waits, then an error  a pidfd, in milliseconds
#   it stands still      waits, then an error  unanswered pings, after `unresponsive_s`
#   it works for ever    waits                 nothing: only a deadline helps
#
# Cost. A thread in each worker, and two pings a second. A healthy worker is killed if its C code
#   holds the GIL for longer than `unresponsive_s`: 30 s, some demos 2 s.
#
# Monarch supervises, too, but slowly: it polls every 2 s, waits 5 s for an answer, fails
# waiting calls, and calls `__supervise__` of the actor that spawned the process.


class Worker(Actor):
    """An actor that computes in a thread, so that it can answer a ping meanwhile.

    Subclasses have plain methods. `run` runs them, one after another; `setup` is the first.
    """

    def __init__(self, name: str, timeline: Timeline | None = None) -> None:
        self.name = name
        self.timeline = timeline
        self.spans: list[Span] = []  # not yet sent to the timeline
        self.thread = ThreadPoolExecutor(1)
        # Messages may have objects of the user's modules. These come last.
        sys.path.append(environ.get("MONARCH_RL_TASK", ""))
        # Its own process group: kill_group ends its children, and Ctrl-C does not reach it.
        os.setpgid(0, 0)

    @concurrent_endpoint
    async def ping(self) -> int:
        return os.getpid()

    @concurrent_endpoint
    async def run(self, what: Any, *args: Any) -> Any:
        """Runs a method, or a function of this worker, in the thread. what: its name, or itself."""
        # The context tells the thread which actor it belongs to.
        run: Any = contextvars.copy_context().run
        loop = get_running_loop()
        return await loop.run_in_executor(self.thread, run, self._timed, what, args)

    def _timed(self, what: Any, args: tuple[Any, ...]) -> Any:
        method = getattr(type(self), what) if isinstance(what, str) else what
        start_s = time.time()
        try:
            return method(self, *args)
        finally:
            self.spans.append(Span(self.name, start_s, time.time()))
            if self.timeline and time.time() - self.spans[0].end_s > 0.2:
                self.timeline.add.broadcast(self.spans)
                self.spans = []

    def setup(self, *args: Any) -> Any:
        """What is slow, or can fail: here, to import what most workers need."""
        import_module("transformers.models.qwen2.modeling_qwen2")
        import_module("transformers.models.auto.modeling_auto")

    def release(self) -> None:
        """The last call, before another actor uses this process."""
        # Monarch keeps this object, and so all that it refers to.
        for name in vars(self).keys() - {"name", "spans", "timeline"}:
            delattr(self, name)
        free_gpu()


def cause_of(error: BaseException) -> str:
    """The last line of an error, with its type."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, ActorError):  # its last line says what the actor raised
        return lines[-1]
    return f"{type(error).__name__}: {lines[-1]}"


def kill_group(leader: int) -> None:
    """Kills a process with its children, unless it is dead already."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


async def until_dead(pid: int) -> str:
    """Waits for the end of a process by a pidfd, a file that becomes readable then."""
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
        ping = worker.ping.call()
        try:
            await wait_for(ping, unresponsive_s)  # mechanism: supervision
        except TimeoutError:
            return f"has not answered a ping for {unresponsive_s:g} s"
        except Exception as error:  # of several types: the process has ended
            return cause_of(error)
        await sleep(0.5)


# -- measurement ---


class FaultyWorker(Worker):
    def work(self) -> None:
        """Fails as the name of the worker says."""
        if self.name == "exception":
            raise ValueError("a bad request")
        if self.name == "death":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.name == "standstill":
            os.kill(os.getpid(), signal.SIGSTOP)
        while True:
            pass


async def detection_times(trouble: str) -> dict[str, float]:
    """Makes a worker fail. Returns the seconds until each observer heard of it."""
    procs = this_host().spawn_procs(name=trouble)
    worker = procs.spawn(trouble, FaultyWorker, trouble)
    pid = await worker.ping.call_one()
    heard_s: dict[str, float] = {}
    start_s = time.time()

    async def hear(who: str, news: Awaitable[Any]) -> Any:
        found = await gather(news, return_exceptions=True)
        heard_s[who] = time.time() - start_s
        return found

    hearing = [
        ensure_future(hear("caller", worker.run.call_one("work"))),
        ensure_future(hear("pidfd", until_dead(pid))),
        ensure_future(hear("ping", until_unresponsive(worker, 2.0))),
    ]
    await sleep(8)
    ping = hearing[-1]
    if ping.done() and "has not answered" not in str(ping.result()):
        del heard_s["ping"]
    for task in hearing:
        task.cancel()
    kill_group(pid)
    return heard_s


@stage(instead="await ping")
async def demo_supervision(report: Report) -> None:
    """Exceptions, deaths and standstills are detected; slow or endless work is not."""
    troubles = ("exception", "death", "standstill", "endless")
    found = await gather(*[detection_times(trouble) for trouble in troubles])
    heard = dict(zip(troubles, found))
    report.say("seconds until each observer heard; empty: not within 8 s")
    report.table([{"failure": trouble, **by} for trouble, by in heard.items()])
    report.check("observers of the exception", len(heard["exception"]), "==", 1)
    report.check("deaths seen by the pidfd", int("pidfd" in heard["death"]), "==", 1)
    report.check("standstills seen by the ping", int("ping" in heard["standstill"]), "==", 1)
    report.check("observers of endless work", len(heard["endless"]), "==", 0)


# == 6. SERVICE ====
# Problem. A call fails with its actor. If one of four actors is lost, so is a quarter of the calls,
#   and each caller has to know which actors are left.
# Rule. The caller asks a service. A service owns interchangeable replicas, and gives a request to
#   the one with the fewest in flight. An attempt has one of three outcomes:
#   1. The replica answers. The caller gets the answer, once.
#   2. The replica is lost (section 5). It is replaced, and another one gets the request.
#   3. The request raises. The exception is the caller's: elsewhere it would raise, too.
# Cost. A request may run twice, so it must be harmless to repeat.
#
#   caller --- request("root", 4) ---> Service ---> replica 0   is lost: it is replaced
#                                          \------> replica 1   answers
#          <------- 2.0 -----------------------------/

# -- 6a. Processes ---
#
# Importing torch and a model class costs 4 s of CPU time. A new actor in a process that has done so
# is ready after 16 ms. So processes outlive their actors, and go back to a pool.


@dataclass
class Processes:
    """The processes of one mesh, one for each rank."""

    mesh: ProcMesh
    ids: list[int]

    def deaths(self) -> list[Awaitable[str]]:
        """Each waits for the death of one process, and returns the reason."""
        return [until_dead(pid) for pid in self.ids]

    async def kill(self) -> None:
        for pid in self.ids:
            kill_group(pid)
        # Without the kill it would wait for a stopped process for ever.
        await self.mesh.stop()


class Pool:
    """Processes without an actor. A spare is one that has imported what replicas need."""

    def __init__(self) -> None:
        self.idle: list[Processes] = []
        self.making_spare: asyncio.Task[None] | None = None

    async def take(self, num_ranks: int) -> Processes:
        """Idle processes, or new ones. Dead ones are detected later (section 5)."""
        for processes in self.idle:
            if len(processes.ids) == num_ranks:
                self.idle.remove(processes)
                return processes
        return await self._start(num_ranks)

    async def _start(self, num_ranks: int, imports: bool = False) -> Processes:
        name = f"process_{time.monotonic_ns()}"
        mesh = this_host().spawn_procs(per_host={"rank": num_ranks}, name=name)
        worker = mesh.spawn(f"{name}_first", Worker, name)
        answers = await worker.ping.call()
        if imports:
            await worker.run.call("setup")
        await worker.stop()
        return Processes(mesh, list(answers.values()))

    def keep_spare(self) -> None:
        """Starts a process for the next loss, unless one is idle."""
        is_making = self.making_spare and not self.making_spare.done()
        if not self.idle and not is_making:
            self.making_spare = ensure_future(self._make_spare())

    async def _make_spare(self) -> None:
        with suppress(SupervisionError):  # without a spare, a replacement takes longer
            self.idle.append(await self._start(1, imports=True))

    async def close(self) -> None:
        if self.making_spare:
            await wait([self.making_spare])
        await gather(*[processes.kill() for processes in self.idle])


# -- 6b. Replicas and requests ---


class ReplicaLost(RuntimeError):
    """The replica that had the request was lost."""


@dataclass
class Replica:
    name: str  # "generator_0"
    processes: Processes
    worker: Any  # an actor for each rank
    in_flight: dict[Any, float] = field(default_factory=dict)  # start times of requests
    result: Any = None  # of its setup
    lost: asyncio.Future[str] = field(default_factory=asyncio.Future)  # the reason
    noticed_s: float = 0.0  # when the loss was noticed, in seconds since 1970
    replaced_s: float = 0.0  # when its successor was ready

    def lose(self, reason: str) -> None:
        if not self.lost.done():
            self.noticed_s = time.time()
            self.lost.set_result(reason)

    @asynccontextmanager
    async def watched(self, unresponsive_s: float) -> AsyncIterator[None]:
        """Inside this context, death and standstill are noticed."""

        async def watch(detector: Awaitable[str]) -> None:
            self.lose(await detector)

        detectors = self.processes.deaths()
        detectors.append(until_unresponsive(self.worker, unresponsive_s))
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
    setup_args: tuple[Any, ...] = ()  # of setup(number of the replica, *setup_args)
    num_ranks: int = 1
    unresponsive_s: float = 30.0  # a replica that answers no ping for so long is killed
    replaces: bool = True  # if not, requests raise ReplicaLost after a loss
    replicas: dict[int, Replica] = field(default_factory=dict)  # after their setup
    failures: list[Replica] = field(default_factory=list)
    error: Exception | None = None  # why there will be no other replica
    supervisors: list[asyncio.Task[None]] = field(default_factory=list)

    async def begin(self) -> None:
        """Starts all replicas, and waits for them."""
        for number in range(self.num_replicas):
            self.supervisors.append(ensure_future(self._supervise(number)))
        await self.until_ready(self.num_replicas)

    def ready(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if not replica.lost.done()]

    async def until_ready(self, num_replicas: int) -> None:
        while len(self.ready()) < num_replicas and not self.error:
            await sleep(0.005)
            for supervisor in self.supervisors:
                if supervisor.done():
                    supervisor.result()  # raises what `_retire` raised
        if self.error:
            raise self.error

    async def request(self, what: Any, *args: Any) -> Any:
        """A replica's answer. Raises ActorError, ReplicaLost after three losses, or self.error."""
        num_losses = 0
        while True:
            await self.until_ready(1)
            replica = min(self.ready(), key=lambda replica: len(replica.in_flight))
            try:
                return await self._ask(replica, what, *args)
            except ReplicaLost:
                num_losses += 1  # mechanism: service
                if num_losses == 3:
                    raise

    async def _ask(self, replica: Replica, what: Any, *args: Any) -> Any:
        """One attempt: the answer of rank 0, ActorError or ReplicaLost."""
        call = ensure_future(replica.worker.run.call(what, *args))
        replica.in_flight[call] = time.time()
        try:
            await wait([call, replica.lost], return_when=asyncio.FIRST_COMPLETED)
        finally:
            call.cancel()  # if it is not done
            del replica.in_flight[call]
        if not replica.lost.done():
            try:
                return next(iter(call.result().values()))
            except ActorError:  # the request itself has raised it
                raise
            except Exception as error:  # of several types: the process has ended
                replica.lose(cause_of(error))
        raise ReplicaLost(f"{replica.name} {replica.lost.result()}")

    async def _supervise(self, number: int) -> None:
        """Repeats spawn, setup, watch, `_retire`. Three failures in a row end it."""
        loss: Replica | None = None
        num_failed = 0
        while not self.error:
            try:
                replica = await self._spawn(number)
            except Exception as error:  # there is no process
                num_failed += 1
                if num_failed == 3:
                    self.error = error
                continue
            try:
                # Imports hold the GIL for seconds, hence the patience.
                async with replica.watched(max(30.0, self.unresponsive_s)):
                    replica.result = await self._ask(replica, "setup", number, *self.setup_args)
                if loss:
                    loss.replaced_s = time.time()
                    loss = None
                    self.pool.keep_spare()
                num_failed = 0
                self.replicas[number] = replica
                async with replica.watched(self.unresponsive_s):
                    await wait([replica.lost])  # or until `close` cancels this
            except ReplicaLost as error:  # in its setup, for lack of memory perhaps
                num_failed += 1
                if num_failed == 3:
                    self.error = error
            except Exception as error:  # of the setup: others would raise it, too
                replica.lose(cause_of(error))
                self.error = error
            finally:
                await self._retire(number, replica)
            loss = loss or replica
            self.failures.append(replica)
            if not self.replaces and not self.error:
                self.error = ReplicaLost(f"{replica.name} {replica.lost.result()}")

    async def _spawn(self, number: int) -> Replica:
        """A replica before its setup."""
        name = f"{self.worker_class.__name__.lower()}_{number}"
        timeline = await get_or_spawn_controller("timeline", Timeline)
        processes = await self.pool.take(self.num_ranks)
        actor_name = f"{name}_{time.monotonic_ns()}"
        worker = processes.mesh.spawn(actor_name, self.worker_class, name, timeline)
        return Replica(name, processes, worker)

    async def _retire(self, number: int, replica: Replica) -> None:
        """At `close` an idle replica of one rank goes back to the pool. All others are killed."""
        can_return = self.replicas.pop(number, None) and self.num_ranks == 1
        if can_return and not replica.in_flight and not replica.lost.done():
            with suppress(ActorError, ReplicaLost, TimeoutError):
                await wait_for(self._ask(replica, "release"), 10)
                await replica.worker.stop()
                self.pool.idle.append(replica.processes)
                return
        await replica.processes.kill()

    async def close(self) -> None:
        for supervisor in self.supervisors:
            supervisor.cancel()
        await gather(*self.supervisors, return_exceptions=True)


class RootWorker(Worker):
    def setup(self, number: int) -> None:
        """Imports nothing."""

    def root(self, number: float) -> float:
        time.sleep(0.002)
        return math.sqrt(number)


@stage(instead="raise")
async def demo_service(report: Report) -> None:
    """Every request is answered once, although replicas die and stand still."""
    service = Service(RootWorker, 4, report.pool, unresponsive_s=2.0)
    await service.begin()
    injected_s = {}
    for number, how in ((2, signal.SIGKILL), (3, signal.SIGSTOP)):
        victim = service.replicas[number]
        injected_s[victim.name] = time.time() + number / 10
        loop = get_running_loop()
        loop.call_later(number / 10, os.kill, victim.processes.ids[0], how)

    async def is_right(number: int) -> bool:
        await sleep(number * 0.002)
        try:
            return await service.request("root", number) == math.sqrt(number)
        except (ActorError, ReplicaLost):
            return False

    num_right = sum(await gather(*[is_right(number) for number in range(400)]))
    await service.until_ready(4)
    rows: list[Record] = []
    for loss in service.failures:
        row: Record = {"replica": loss.name, "what": loss.lost.result()}
        row["noticed, ms"] = (loss.noticed_s - injected_s[loss.name]) * 1e3
        row["replaced, ms"] = (loss.replaced_s - loss.noticed_s) * 1e3
        rows.append(row)
    report.table(rows)
    report.check("requests of 400 with the right answer", num_right, "==", 400)
    report.check("replicas that were replaced", len(service.failures), "==", 2)
    killed = rows[0]
    report.figure(notice_ms=killed["noticed, ms"], replace_ms=killed["replaced, ms"])
    report.figure(requests=400, answered_once=num_right)
    await service.close()


# == 7. WEIGHT SYNC ====
# Problem. The trainer rewrites its weights while generators read them. A read during the write has
#   some tensors of version 6 and some of version 7: torn weights, and no error.
# Rule. The trainer fills a slot of shared memory that nobody reads, and then makes it the latest. A
#   reader leases the latest slot, and reads it until it leases another.
# Cost. One copy of the weights per version, and memory for readers + 2 slots.
# Read on. `Arena.lease` and `Arena.free_slot` are the idea; the rest is memory layout.
#
# Left, the usual broadcast in a process group couples both sides: the trainer waits for the last
# rollout. Right, slots. Dots are waiting, X the broadcast, P the copy into a slot, f a pull.
#
#   trainer       step 7 ........XXXX step 8 ........XXXX     step 7 step 8 step 9 step 10
#     a thread                                                       PPPP   PPPP   PPPP
#   generator 0   rollout .......XXXX rollout .......XXXX     rollout f rollout f rollout f
#   generator 1   longest rolloutXXXX longest rolloutXXXX     longest rollout f longest rollout
#
# -- 7a. What lies in a slot ---


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in a slot."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes from the start of the slot
    num_bytes: int

    def view(self, slot: Tensor) -> Tensor:
        """This tensor in a slot, [slot bytes] uint8, without a copy."""
        part = slot[self.offset : self.offset + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


Layout = tuple[TensorSpec, ...]
Weights = dict[str, "Tensor"]  # by name


def layout_of(tensors: Weights, dtype: torch.dtype | None = None) -> Layout:
    """The layout of tensors in a slot. dtype: of floating-point tensors in the slot."""
    specs = []
    offset = 0
    for name, tensor in tensors.items():
        in_slot = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * in_slot.itemsize
        specs.append(TensorSpec(name, tuple(tensor.shape), in_slot, offset, num_bytes))
        offset += ceil(num_bytes / 64) * 64  # each tensor begins with a cache line
    return tuple(specs)


# -- 7b. The arena: slots and leases ---
#
# With two readers, while version 8 is being written:
#
#   header   version 7   latest slot 2   lease of reader 0: slot 2   lease of reader 1: slot 1
#
#   slots    slot 0   version 8 is being written into it
#            slot 1   version 6   reader 1 reads it
#            slot 2   version 7   the latest; reader 0 reads it
#            slot 3   version 5   free
#
# Readers + 2 slots are enough: each reader holds one at most, one is the latest, one is written.
#
# Why no read is torn. The header changes under a lock. The slot that is written is neither the
# latest nor leased, and only the latest can be newly leased; so nobody reads it before `commit`. A
# reader keeps its lease until its next one, so nobody writes what it reads.
#
# The kernel releases the lock of a holder that dies. A dead reader's successor has its number, and
# overwrites its lease. A process that is stopped inside the lock (5 microseconds) blocks the others
# until its owner kills it.


@dataclass(frozen=True)
class ArenaHandle:
    """How another process finds the arena, and what is in it."""

    path: str
    layout: Layout
    slot_bytes: int
    num_readers: int


class Arena:
    """One process's mapping of the shared memory: a page of 8-byte words, then the slots."""

    HEADER_BYTES = 4096
    VERSION = 0  # words of the header
    LATEST = 1  # a slot
    LEASES = 2  # from here on, the slot that each reader leases
    NOTHING = -1

    def __init__(self, handle: ArenaHandle) -> None:
        # A lock belongs to an open file, so each process opens it for itself.
        self.file = open(handle.path, "r+b", buffering=0)
        self.num_readers = handle.num_readers
        self.num_slots = handle.num_readers + 2
        memory = mmap.mmap(self.file.fileno(), 0)  # all of it
        self.words = memoryview(memory)[: self.HEADER_BYTES].cast("q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots = whole[self.HEADER_BYTES :].view(self.num_slots, handle.slot_bytes)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The header is read and changed inside of this."""
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def lease(self, reader: int) -> tuple[int, int]:
        """Leases the latest (version, slot) until the next call; NOTHING before a commit."""
        with self.locked():
            slot = self.words[self.LATEST]
            self.words[self.LEASES + reader] = slot  # mechanism: weight_sync
            return self.words[self.VERSION], slot

    def free_slot(self) -> int:
        """A slot that is neither the latest nor leased."""
        with self.locked():
            leases = self.words[self.LEASES : self.LEASES + self.num_readers].tolist()
            taken = {self.words[self.LATEST], *leases}
        return min(set(range(self.num_slots)) - taken)

    def commit(self, version: int, slot: int) -> None:
        """Makes a slot, which is complete, the latest."""
        with self.locked():
            self.words[self.VERSION] = version
            self.words[self.LATEST] = slot


def create_arena(layout: Layout, num_readers: int) -> tuple[ArenaHandle, Arena]:
    """An arena, which other processes can map while this one lives."""
    last = layout[-1]
    num_pages = ceil((last.offset + last.num_bytes) / mmap.PAGESIZE)
    slot_bytes = num_pages * mmap.PAGESIZE
    descriptor = os.memfd_create("weights")
    os.ftruncate(descriptor, Arena.HEADER_BYTES + (num_readers + 2) * slot_bytes)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    handle = ArenaHandle(path, layout, slot_bytes, num_readers)
    arena = Arena(handle)
    weakref.finalize(arena, os.close, descriptor)  # the memory goes with its last user
    for word in range(Arena.LEASES + num_readers):
        arena.words[word] = Arena.NOTHING
    arena.slots.zero_()  # makes the pages now: in a publish that would cost more than the copy
    return handle, arena


# -- 7c. The writer and the readers ---


def move_into_block(tensors: Weights, handle: ArenaHandle) -> Tensor:
    """Makes the tensors views of one block, [slot bytes] uint8, with the layout of a slot."""
    device = next(iter(tensors.values())).device
    block = torch.zeros(handle.slot_bytes, dtype=torch.uint8, device=device)
    for spec in handle.layout:
        view = spec.view(block)
        view.copy_(tensors[spec.name].detach())
        tensors[spec.name].data = view
    return block


class WeightWriter:
    """The trainer's side. `publish` copies in a background thread.

    The tensors move into one block with the layout of a slot, so a publish is one memory copy.
    """

    copying: Future[None] | None = None

    def __init__(self, tensors: Weights, num_readers: int) -> None:
        self.tensors = tensors
        self.handle, self.arena = create_arena(layout_of(tensors), num_readers)
        self.block = move_into_block(tensors, self.handle)
        self.thread = ThreadPoolExecutor(1)

    def publish(self, version: int) -> None:
        """Begins to copy. Nobody may change the tensors until `wait` has returned."""
        self.wait()
        self.copying = self.thread.submit(self._copy, version)

    def wait(self) -> None:
        """Returns when nothing is being copied. Raises what the copy raised, once."""
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
        # For a large block it takes a third less time than copy_.
        ctypes.memmove(slot.data_ptr(), self.block.data_ptr(), self.block.nbytes)


class WeightReader:
    """A generator's side: `pull` makes its tensors the latest version.

    They become views of the slot, so nothing is copied.
    """

    def __init__(self, handle: ArenaHandle, reader: int, tensors: Weights) -> None:
        for theirs, mine in zip_longest(handle.layout, layout_of(tensors)):
            if theirs != mine:
                raise ValueError(f"the writer has {theirs}, the reader {mine}")
        self.arena = Arena(handle)
        self.reader = reader
        self.tensors = tensors
        self.slot = Arena.NOTHING
        # Made once: this takes longer than the rest of a pull.
        self.views: list[list[Tensor]] = []
        for slot in self.arena.slots:
            self.views.append([spec.view(slot) for spec in handle.layout])

    def pull(self, at_least: int = Arena.NOTHING) -> int:
        """Makes the tensors the latest version, and returns it. Waits until it is >= at_least."""
        version, slot = self.arena.lease(self.reader)
        while version < at_least:
            time.sleep(0.001)
            version, slot = self.arena.lease(self.reader)
        if slot != self.slot:  # the same slot has the same weights
            self.slot = slot
            self.read(slot)
        return version

    def read(self, slot: int) -> None:
        """Makes the tensors views of a slot, which is leased."""
        for tensor, view in zip(self.tensors.values(), self.views[slot], strict=True):
            tensor.data = view


# -- measurement ---


def blocks(num_blocks: int) -> Weights:
    """Weights, 2 MiB in each block."""
    return {f"block{i}": torch.zeros(1 << 19) for i in range(num_blocks)}


class ReaderWorker(Worker):
    """Reads weights of which each version is filled with one number."""

    def setup(self, number: int, make_reader: Callable[..., WeightReader], num_blocks: int) -> None:
        self.reader = make_reader(number, blocks(num_blocks))

    def read(self, num_reads: int, num_versions: int, keeps_lease: bool) -> tuple[int, float]:
        """(torn reads, median ms of a pull). A read is torn if two of its numbers differ.

        As a rollout does, each read lasts until so many newer versions have come.
        """
        words = self.reader.arena.words
        num_torn = 0
        pull_ms = []
        for _ in range(num_reads):
            start = time.perf_counter()
            version = self.reader.pull(at_least=0)
            pull_ms.append((time.perf_counter() - start) * 1e3)
            if not keeps_lease:
                words[Arena.LEASES + self.reader.reader] = Arena.NOTHING
            numbers: set[Any] = {version}
            for tensor in self.reader.tensors.values():
                numbers.update(extreme.item() for extreme in tensor.aminmax())
                while words[Arena.VERSION] < version + num_versions:
                    time.sleep(0.0005)
            num_torn += len(numbers) > 1
        return num_torn, median(pull_ms)


def publish_filled(writer: WeightWriter, version: int) -> None:
    """Fills the tensors with the number of the version, and publishes them."""
    for tensor in writer.tensors.values():
        tensor.fill_(version)
    writer.publish(version)
    writer.wait()


def measure_publish(writer: WeightWriter) -> float:
    """Median of publish time / memmove time."""
    block = writer.block
    scratch = torch.ones_like(block)
    ratios = []
    for _ in range(15):
        start = time.perf_counter()
        ctypes.memmove(scratch.data_ptr(), block.data_ptr(), block.nbytes)
        copied = time.perf_counter()
        writer.publish(0)
        writer.wait()
        published = time.perf_counter()
        ratios.append((published - copied) / (copied - start))
    return median(ratios)


@stage(instead="pass")
async def demo_weight_sync(report: Report) -> None:
    """A generator never samples from half-updated weights, and a sync is one memory copy."""
    torch.set_num_threads(1)
    rows = []
    num_torn = {"with": 0, "without": 0}
    for num_readers, leases in ((1, "with"), (2, "without"), (2, "with"), (4, "with")):
        writer = WeightWriter(blocks(32), num_readers)
        make_reader = partial(WeightReader, writer.handle)
        service = Service(ReaderWorker, num_readers, report.pool, (make_reader, 32))
        await service.begin()
        row = {"publish x memmove": measure_publish(writer)}
        report.figure(**{f"publish_over_memmove_{num_readers}": row["publish x memmove"]})
        version = 0
        reads = []
        read_args = ("read", 32 // num_readers, 2, leases == "with")
        for replica in service.replicas.values():  # a request would go to one of them
            reads.append(replica.worker.run.call_one(*read_args))
        reading = gather(*reads)
        while not reading.done():
            version += 1
            publish_filled(writer, version)
            await sleep(0)
        row["pull ms"] = max(waited for _, waited in reading.result())
        row["torn of 32"] = sum(torn for torn, _ in reading.result())
        num_torn[leases] += int(row["torn of 32"])
        report.figure(pull_ms=row["pull ms"])
        rows.append({"readers": f"{num_readers}, {leases} leases", **row})
        await service.close()
    report.table(rows)
    report.check("torn reads of 32 without leases", num_torn["without"], ">", 0)
    report.check("torn reads of 96 with leases", num_torn["with"], "==", 0)
    report.figure(torn_reads=num_torn["with"], torn_reads_without_leases=num_torn["without"])


# == 8. RESHARD ====
# Problem. The trainer's ranks shard the weights in one way, say by rows, and the generator's ranks
#   in another, say by columns. To gather the whole, and to shard it anew, moves the bytes twice.
# Rule. A rank's shard is a box of the whole tensor. Each trainer rank writes its boxes into the
#   same slot, and a reader can view any box of it: the slot is the whole, and no rank ever holds
#   it. If several ranks hold a box, as replicas do, one writes it.
# Cost. A box of columns is not contiguous, so it is copied row by row.
#
# By example, a matrix of 5 x 23. The last shard may be smaller, or empty:
#
#   trainer rank 0     rows 0-2, all columns       writes this box into the slot
#   trainer rank 1     rows 3-4, all columns       writes this box into the same slot
#   generator rank 0   all rows, columns 0-11      views this box of the slot
#   generator rank 1   all rows, columns 12-22     views this box of the slot

Index = tuple[int, ...]
Box = tuple[slice, ...]  # of a tensor, in each dimension: `tensor[box]` is a view of it


def box_of(shape: Index, mesh_shape: Index, placements: Any, coordinate: Index) -> Box:
    """The box of a DTensor that the rank at this coordinate of a mesh holds.

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
    """One rank of a trainer of several ranks, with DTensors. All write into the same slot."""

    def __init__(self, tensors: Record, num_readers: int, dtype: torch.dtype | None = None) -> None:
        # A group of its own: the copy runs beside the next step's collectives.
        self.group: Any = dist.new_group(backend="gloo")
        self.rank = dist.get_rank()
        told: list[Any] = [None]
        if self.rank == 0:
            told[0], self.arena = create_arena(layout_of(tensors, dtype), num_readers)
        dist.broadcast_object_list(told, 0, self.group)
        self.handle = told[0]
        if self.rank > 0:
            self.arena = Arena(self.handle)
        self.tensors = tensors
        self.written_bytes = 0
        self.thread = ThreadPoolExecutor(1)

    def _copy(self, version: int) -> None:
        slot = torch.tensor([self.arena.free_slot()])
        dist.broadcast(slot, 0, self.group)  # the choice of rank 0
        self.write(self.arena.slots[int(slot)])
        # Waits until all have written. If one raises, there is no version, and the others raise
        # after the timeout of the group, 30 minutes.
        dist.barrier(self.group)
        if self.rank == 0:
            self.arena.commit(version, int(slot))

    def write(self, slot: Tensor) -> None:
        """Writes this rank's boxes. Of ranks with the same box, the first writes it."""
        for spec in self.handle.layout:
            tensor = self.tensors[spec.name]
            mesh = tensor.device_mesh
            coordinate = tuple(mesh.get_coordinate())
            box = box_of(spec.shape, mesh.shape, tensor.placements, coordinate)
            is_first = True
            for placement, rank in zip(tensor.placements, coordinate):
                if placement.is_replicate() and rank > 0:
                    is_first = False  # mechanism: reshard
            if is_first:
                target = spec.view(slot)[box]
                target.copy_(tensor.to_local().detach())
                self.written_bytes += target.nbytes


def form_group(meeting_file: str, rank: int, num_ranks: int, backend: str = "gloo") -> None:
    """Makes this process a member of a process group. Waits until all have come."""
    dist.init_process_group(
        backend, init_method=f"file://{meeting_file}", rank=rank, world_size=num_ranks
    )


# -- measurement ---


def example() -> Weights:
    """The matrix, in which no two elements are equal, and a vector that each rank has whole."""
    return {"matrix": torch.arange(1.0, 116.0).view(5, 23), "vector": torch.ones(23)}


class ShardWorker(Worker):
    """A rank with a shard of rows."""

    def setup(self, number: int, meeting_file: str, num_ranks: int) -> ArenaHandle:
        form_group(meeting_file, current_rank().rank, num_ranks)
        mesh = dist.device_mesh.init_device_mesh("cpu", (num_ranks,))
        placements = {"matrix": dtensor.Shard(0), "vector": dtensor.Replicate()}
        tensors = {}
        for name, tensor in example().items():
            tensors[name] = dtensor.distribute_tensor(tensor, mesh, [placements[name]])
        self.writer = ShardedWriter(tensors, 1)
        return self.writer.handle

    def publish(self) -> int:
        """Publishes. Returns the bytes that this rank has written."""
        self.writer.publish(1)
        self.writer.wait()
        return self.writer.written_bytes


@stage(instead="pass")
async def demo_reshard(report: Report) -> None:
    """From one sharding to another, each byte that is needed is written once."""
    setup_args = (str(report.folder / "shards"), 2)
    service = Service(ShardWorker, 1, report.pool, setup_args, num_ranks=2)
    await service.begin()
    handle = service.replicas[0].result
    written_bytes = await service.replicas[0].worker.run.call("publish")
    arena = Arena(handle)
    _, slot = arena.lease(0)
    wanted = example()
    num_wrong = 0
    needed_bytes = 0
    for spec in handle.layout:
        whole = spec.view(arena.slots[slot])
        needed_bytes += whole.nbytes
        by_columns = [dtensor.Shard(whole.dim() - 1)]
        boxes = [box_of(spec.shape, (2,), by_columns, (rank,)) for rank in range(2)]
        read = torch.cat([whole[box] for box in boxes], -1)
        num_wrong += int((read != wanted[spec.name]).sum())
    report.check("elements that differ", num_wrong, "==", 0)
    written = sum(written_bytes.values()) / needed_bytes
    report.check("bytes written / bytes needed", written, "==", 1)
    # An all-gather moves 2 + 3 rows, as much as the matrix; then one rank writes all bytes.
    gathered = written + wanted["matrix"].nbytes / needed_bytes
    report.figure(written_over_needed=written, gather_over_needed=gathered)
    await service.close()


# == 9. ROLLOUT ====
# Problem. In RL the same network runs in two programs. The generator samples token by token, with a
#   KV cache. The trainer computes the log-probabilities of whole conversations at once. If they
#   disagree about what was sampled, or how likely it was, the gradient is wrong. No error says so.
# Rule. Record while sampling, and reconstruct nothing afterwards. For each sampled token:
#   its id               later turns continue the exact ids; text is for people
#   its log-probability  in fp32, under the distribution that it was drawn from
# Cost. Two more numbers per token.
#
# -- 9a. Tasks and prompts ---


@dataclass(frozen=True)
class Turn:
    """What the user says in one turn, as chat messages, and the right answer."""

    messages: tuple[dict[str, str], ...]  # {"role": "user", "content": "abc"}
    answer: Any


@dataclass(frozen=True)
class Prompt:
    """A conversation before it is sampled. Its number is also that of its group."""

    number: int
    turns: tuple[Turn, ...]

    @property
    def is_held_out(self) -> bool:
        """One prompt in ten, by a checksum of its text, is never trained on."""
        text = json.dumps([turn.messages for turn in self.turns])
        return zlib.crc32(text.encode()) % 10 == 0


def user_turn(text: str, answer: Any) -> Turn:
    return Turn(({"role": "user", "content": text},), answer)


class Task:
    """What the policy is asked, and what its responses are worth."""

    max_new_tokens = 0  # of a response; 0: min(256, half of the context)

    prompt: Callable[[int], Prompt]  # number (from 0) -> prompt; deterministic
    grade: Callable[[Any, str], float]  # (right answer, response) -> from 0 to 1

    def score(self, prompt: Prompt, responses: list[str]) -> Any:
        """The reward of each turn. If all is right, they add up to 1."""
        pairs = zip(prompt.turns, responses)
        return [self.grade(turn.answer, said) / len(responses) for turn, said in pairs]


LETTERS = "abcdefghijklmnop"


@dataclass
class LetterTask(Task):
    """`repeat` for the tiny policy: two turns of three letters, which it says back."""

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
        """The share of right letters; a surplus letter is wrong."""
        num_right = sum(a == b for a, b in zip(answer, response))
        return num_right / max(len(answer), len(response))


def letter_task(cfg: Config) -> Task:
    return LetterTask(cfg.seed)


# -- 9b. What is recorded ---
#
# Two episodes. <u> and <a> begin a turn of the user and of the assistant, and <e> ends one; u is a
# letter of the user; a to g were sampled. A response has at most four tokens with its end, so the
# last one is truncated.
#
#   ids       <u> u u u <e> <a>  a b c <e>  <u> u u u <e> <a>  d e f <e>
#   turn_of    0  0 0 0  0   0   1 1 1  1    0  0 0 0  0   0   2 2 2  2
#
#   ids       <u> u u u <e> <a>  a <e>  <u> u u u <e> <a>  d e f  g
#   turn_of    0  0 0 0  0   0   1  1    0  0 0 0  0   0   2 2 2  2


@dataclass
class Episode:
    """One conversation, token by token, in plain lists, which travel in messages."""

    prompt: Prompt
    version: int = 0  # of the weights that sampled it
    ids: list[int] = field(default_factory=list)
    turn_of: list[int] = field(default_factory=list)  # from 1; 0: not sampled
    logprobs: list[float] = field(default_factory=list)  # 0.0 where it was not sampled
    responses: list[str] = field(default_factory=list)  # of each turn
    truncated: list[bool] = field(default_factory=list)  # of each turn: has no end
    rewards: list[float] = field(default_factory=list)  # of each turn, once scored

    def add(self, token: int, turn: int, logprob: float) -> None:
        self.ids.append(token)
        self.turn_of.append(turn)
        self.logprobs.append(logprob)

    def add_prompt(self, ids: list[int]) -> None:
        """Appends unsampled tokens; does not repeat an end token that was sampled."""
        has_end = self.ids[-1:] == ids[:1] and not any(self.truncated[-1:])
        for token in ids[has_end:]:
            self.add(token, 0, 0.0)


# -- 9c. The policy ---


def tiny_policy(seed: int) -> tuple[Any, Any]:
    """(tokenizer, model): a Qwen2 of 30 thousand parameters, with a token per letter."""
    tokens = ["<user>", "<assistant>", "<end>", *LETTERS]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    tokenizer = transformers.Qwen2Tokenizer(
        {token: i for i, token in enumerate(tokens)},
        [],
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


def place_of(error: BaseException) -> str:
    """An error in one line, with the place in the user's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    others = [f for f in frames if f.filename != str(THIS_FILE)]
    own = [f for f in others if not re.search("/lib/python|^<frozen", f.filename)]
    places = [f"{f.filename}, line {f.lineno}: " for f in own]
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return "".join(places[-1:]) + text[:300]


def called(where: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """The result of somebody else's code. Its exceptions become UsageErrors."""
    try:
        return call(*args, **options)
    except BaseException as error:
        raise UsageError(f"{where}: {place_of(error)}") from error


def pretrained(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(tokenizer, model) of a folder or hub id. Raises UsageError if anything is missing."""
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    how = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    where = f"--model {name}"
    tokenizer = called(where, transformers.AutoTokenizer.from_pretrained, name)
    model, loaded = called(where, load, name, dtype=dtype, **how)
    wrong = {kind: [*names] for kind, names in loaded.items() if "keys" in kind}
    weights = model.named_parameters()
    wrong["not finite"] = [name for name, p in weights if not p.isfinite().all()]
    num_known = model.get_input_embeddings().num_embeddings
    # Special tokens without an embedding, as for images, come in no text.
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    vocabulary = tokenizer.get_vocab().items()
    wrong["without an embedding"] = [
        word for word, i in vocabulary if i >= num_known and i not in special
    ]
    if not tokenizer.chat_template:
        wrong["without a chat template"] = ["the tokenizer"]
    for kind, names in wrong.items():
        if names:
            raise UsageError(f"{where}: {kind}: {names[:3]}")
    return tokenizer, model


RESPONSE = {"role": "assistant", "content": "response"}  # stands for any response


class Policy:
    """A causal language model, its tokenizer, and what its chat template means in tokens."""

    def __init__(self, cfg: Config, dtype: torch.dtype) -> None:
        if cfg.model:
            self.tokenizer, model = pretrained(cfg.model, dtype)
        else:
            self.tokenizer, model = tiny_policy(cfg.seed)
        self.device = torch.device(cfg.device or "cpu")
        self.model = model.to(self.device).eval()  # without dropout
        for weight in self.model.parameters():
            weight.data = weight.data.to(dtype)  # not buffers: positions need fp32
        # The forward dtype. With several trainers FSDP casts.
        self.dtype = dtype if cfg.trainers > 1 else getattr(torch, cfg.dtype or "float32")
        self.learns_entropy = cfg.entropy > 0
        self.graphs: Any = {} if self.device.type == "cuda" else None  # of decoder_of
        self.has_chunks = False  # log-probabilities by chunked_logprobs
        self.temperature = cfg.temperature
        config = model.config.get_text_config()
        self.context = getattr(config, "max_position_embeddings", None) or 1 << 20
        self.max_new_tokens = cfg.max_new_tokens or min(256, self.context // 2)
        if self.max_new_tokens >= self.context:
            raise UsageError(f"--max-new-tokens: the context has {self.context} tokens")
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters
        self.control_tokens = self.tokenizer.get_added_vocab()
        self.end_ids = self._end_ids()

    def _end_ids(self) -> list[int]:
        """The ends of a response: by the template, the tokenizer, and the model."""
        chat = [{"role": "user", "content": "question"}, RESPONSE]
        _, found, closing = self._render(chat, False).rpartition("response")
        # If a control token follows the response in the template, it ends the response.
        ends = [
            end
            for end in self.tokenize(closing)[:1]
            if found and end in self.control_tokens.values()
        ]
        of_model = self.model.generation_config.eos_token_id
        of_model = of_model if isinstance(of_model, list) else [of_model]
        ends += [self.tokenizer.eos_token_id, *of_model]
        ends = [end for end in ends if end is not None]
        if not ends:
            raise UsageError("the tokenizer has no end token (eos_token)")
        return ends

    def _render(self, messages: Any, add_generation_prompt: bool) -> str:
        how = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
        render = self.tokenizer.apply_chat_template
        return called("the chat template", render, messages, **how)

    def tokenize(self, text: str, is_plain: bool = False) -> list[int]:
        how = {"add_special_tokens": False, "split_special_tokens": is_plain}
        return self.tokenizer(text, **how)["input_ids"]

    def prompt_ids(self, prompt: Prompt, turn: int) -> list[int]:
        """The ids that a turn, from 0, appends to the conversation.

        For later turns: everything after the last response, including its end token.
        Raises UsageError if the template rewrites turns or drops messages.
        """
        earlier: list[Any] = []
        for past in prompt.turns[:turn]:
            earlier += [*past.messages, RESPONSE]
        before = ""
        if turn > 0:
            before = self._render(earlier[:-1], True) + "response"
        messages = list(prompt.turns[turn].messages)
        plain = {}  # so that no text of a user can forge a turn
        for place, message in enumerate(messages):
            words = message["content"].strip()
            if any(token in words for token in self.control_tokens):
                name = f"message{place}of"
                plain[name] = words
                content = message["content"].replace(words, name)
                messages[place] = {**message, "content": content}
        whole = self._render([*earlier, *messages], True)
        for each in messages:
            # A template may take a switch out of these.
            kept = each["role"] not in ("system", "assistant")
            if kept and each["content"].strip() not in whole:
                raise UsageError(f"the template changes or drops: {each}")
        if not whole.startswith(before):
            raise UsageError("this chat template changes earlier turns: use one turn")
        ids = []
        text = whole[len(before) :]
        for part in re.split(f"({'|'.join(plain)})", text) if plain else [text]:
            ids += self.tokenize(plain.get(part, part), is_plain=part in plain)
        return ids

    def forward(self, ids: Tensor, **inputs: Any) -> Tensor:
        """Logits of ids [B, T], at the positions in `logits_to_keep`."""
        if self.model.dtype == self.dtype:
            return self.model(ids, **inputs).logits
        # The parameters stay in fp32; this pass computes with copies.
        cast = {name: p.to(self.dtype) for name, p in self.model.named_parameters()}
        return torch.func.functional_call(self.model, cast, ids, inputs).logits


# -- 9d. Sampling ---


class Decoder:
    """KV cache and next-token logits of a batch of rows of ids. Equal rows are prefilled once."""

    def __init__(self, policy: Policy, rows: list[list[int]]) -> None:
        self.policy = policy
        self.cache: Any = transformers.DynamicCache(config=policy.model.config)
        unique = [list(row) for row in dict.fromkeys(tuple(row) for row in rows)]
        self.mask = torch.zeros(len(unique), 0, dtype=torch.long, device=policy.device)
        self.append(unique)
        self.select([unique.index(row) for row in rows])

    def append(self, rows: list[list[int]]) -> None:
        """Feeds these ids, padded on the left, where the mask [B, T] is 0."""
        width = max(len(row) for row in rows)
        padded = [[-1] * (width - len(row)) + row for row in rows]
        ids = torch.tensor(padded, device=self.mask.device)
        self.mask = torch.cat([self.mask, (ids >= 0).long()], 1)
        inputs = {"attention_mask": self.mask, "cache": self.cache, "use_cache": True}
        if self.policy.takes_positions:
            positions = (self.mask.cumsum(1) - 1).clamp(min=0)
            inputs["position_ids"] = positions[:, -width:]
        logits = self.policy.forward(ids.clamp(min=0), logits_to_keep=1, **inputs)
        self.logits = logits[:, -1]  # [B, V]

    def select(self, rows: list[int]) -> None:
        """Keeps these rows, in this order; a row may be repeated."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]
        self.logits = self.logits[index]

    def draw(self, rng: torch.Generator | None) -> Iterator[Any]:
        """For each row a token and its log-probability. rng None: the likeliest token."""
        logits = self.logits.float()  # mechanism: rollout
        logp = (logits / self.policy.temperature).log_softmax(-1)
        if rng is None:
            token = logp.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(logp.exp(), 1, generator=rng)
        return zip(token[:, 0].tolist(), logp.gather(1, token)[:, 0].tolist())


def respond(
    policy: Policy, episodes: list[Episode], turn: int, rng: torch.Generator | None
) -> None:
    """Samples a response for each episode, in one batch; a row that has ended leaves it.

    turn: its number, from 1.
    """
    rows = episodes
    decoder = decoder_of(policy, [episode.ids for episode in rows])
    for number in range(policy.max_new_tokens):
        if number > 0:
            decoder.append([episode.ids[-1:] for episode in rows])
        going_on = []
        for place, (token, logprob) in enumerate(decoder.draw(rng)):
            rows[place].add(token, turn, logprob)
            if token not in policy.end_ids:
                going_on.append(place)
        if not going_on:
            break
        if len(going_on) < len(rows):
            rows = [rows[place] for place in going_on]
            decoder.select(going_on)
    for episode in episodes:
        said = episode.ids[episode.turn_of.index(turn) :]
        episode.responses.append(policy.tokenizer.decode(said, skip_special_tokens=True))
        episode.truncated.append(said[-1] not in policy.end_ids)


@torch.inference_mode()
def rollout(
    policy: Policy, prompts: list[Prompt], group_size: int, seed: int | None, version: int = 0
) -> list[Episode]:
    """group_size episodes per prompt, less those beyond the context.

    seed None: with the likeliest tokens.
    """
    rng = None
    if seed is not None:
        rng = torch.Generator(policy.device).manual_seed(seed)
    episodes = [Episode(prompt, version) for prompt in prompts for _ in range(group_size)]
    longest = policy.context - policy.max_new_tokens
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        said = {p.number: policy.prompt_ids(p, turn) for p in prompts if turn < len(p.turns)}
        speaking = []
        for episode in episodes:
            ids = said.get(episode.prompt.number)
            if ids is None or len(episode.responses) < turn:
                continue  # finished, or too long
            episode.add_prompt(ids)
            if len(episode.ids) <= longest:
                speaking.append(episode)
        if speaking:
            respond(policy, speaking, turn + 1, rng)
    return [e for e in episodes if len(e.responses) == len(e.prompt.turns)]


# -- 9e. What the trainer sees ---


def token_logprobs(policy: Policy, ids: Tensor, is_sampled: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] and entropies [N] of the sampled tokens.

    ids: [B, T], padded on the right. is_sampled: [B, T - 1], of the tokens from the second on.
    """
    if policy.has_chunks:
        return chunked_logprobs(policy, ids, is_sampled)
    columns = is_sampled.any(0).nonzero().flatten()  # sampled in any row
    logits = policy.forward(ids[:, :-1], use_cache=False, logits_to_keep=columns)
    # [N, V], row by row
    return logprobs_of(logits[is_sampled[:, columns]], ids[:, 1:][is_sampled][:, None], policy)


def logprobs_of(logits: Tensor, chosen: Tensor, policy: Policy) -> tuple[Tensor, Tensor]:
    """Log-probabilities [N] of the chosen tokens [N, 1], and entropies [N]. logits: [N, V]."""
    logp = (logits.float() / policy.temperature).log_softmax(-1)
    found = logp.gather(1, chosen).squeeze(1)
    # Unless the loss has it, the entropy needs no gradient. 0 log 0 is 0, not nan.
    with torch.set_grad_enabled(policy.learns_entropy and logp.requires_grad):
        return found, torch.special.entr(logp.exp()).sum(-1)


def k3(recorded: Tensor, recomputed: Tensor) -> Tensor:
    """[N] log-probabilities each -> [N] float64: exp(d) - 1 - d with d = recomputed - recorded.

    Its mean over sampled tokens estimates the KL divergence (Schulman 2020); each term is >= 0. By
    example, 0.50 is recomputed as 0.40: d = -0.22, and 0.80 - 1 + 0.22 = 0.023.
    """
    d = (recomputed - recorded).detach().double()
    return d.exp() - 1 - d


@torch.no_grad()
def recompute_logprobs(policy: Policy, episodes: list[Episode]) -> tuple[Tensor, Tensor]:
    """[N] log-probabilities each: recorded, and by the trainer's pass."""
    recorded = []
    recomputed = []
    for episode in episodes:
        ids = torch.tensor([episode.ids], device=policy.device)
        is_sampled = torch.tensor([episode.turn_of[1:]], device=policy.device) > 0
        recomputed.append(token_logprobs(policy, ids, is_sampled)[0])
        logprobs = torch.tensor([episode.logprobs[1:]], device=policy.device)
        recorded.append(logprobs[is_sampled])
    return torch.cat(recorded), torch.cat(recomputed)


@stage(instead="logits = self.logits.bfloat16()")
async def demo_rollout(report: Report) -> None:
    """What was recorded while sampling is what the trainer recomputes."""
    cfg = Config(seed=report.cfg.seed, max_new_tokens=4)
    task = letter_task(cfg)
    policy = Policy(cfg, torch.float32)
    prompts = [task.prompt(number) for number in range(16)]
    recorded, recomputed = recompute_logprobs(policy, rollout(policy, prompts, 4, seed=0))
    exact = float(k3(recorded, recomputed).mean())
    rounded = float(k3(recorded.bfloat16(), recomputed).mean())
    report.check("k3 of recorded and recomputed", exact, "<", 1e-10)
    report.check("the same, if recorded in bfloat16", rounded, ">", 1e-10)
    report.figure(k3=exact)


# == 10. LOSSES ====
# Problem. J, the mean reward of the policy, should grow. Samples give its gradient, but noisily;
#   and samples of an older policy give a biased gradient.
# Rule. Three remedies:
#   a baseline   removes noise. The advantage A replaces the reward: how much better the response
#                was than others to the same prompt.
#   a ratio      r = p now / p when sampled removes bias: samples of an old policy are weighted as
#                if the current policy had drawn them.
#   a clip       bounds the push: how far one batch can move a token's probability.
# Cost. Ratios add noise: a few tokens may have most of the weight. Clipped tokens get no gradient.
#
# J = sum of p R: probability times reward. As grad log p = grad p / p,
#
#   grad J = sum of R grad p = sum of p (R grad log p) = mean of R grad log p over samples
#
# A baseline b adds no bias: its term is -b times the gradient of the sum of p, and that sum is 1.
#
# Why the loss prints 0. With r = 1 the ppo loss of a token is -A, and the advantages of a group add
# up to 0 (nearly, where responses differ in length). Its gradient, A grad log p, does not cancel.
# Watch the reward and held-out accuracy instead.


def advantages(rewards: Tensor, kind: str) -> Tensor:
    """Rewards [..., G] of groups -> advantages [..., G].

    By example, an easy prompt and a hard one:

        none            1     1     1     0         0     0     0     1
        leave_one_out   0.33  0.33  0.33 -1        -0.33 -0.33 -0.33  1     (RLOO, Ahmadian 2024)
        group           0.58  0.58  0.58 -1.73     -0.58 -0.58 -0.58  1.73  (GRPO, Shao 2024)

    leave_one_out subtracts the mean of the *others*: n / (n - 1) times `centred`. group divides by
    the standard deviation: all prompts get the same scale.
    """
    if kind == "none":
        return rewards
    rewards = rewards - rewards[..., :1]  # equal ones give exact zeros
    centred = rewards - rewards.mean(-1, keepdim=True)
    if kind == "leave_one_out":
        num = rewards.shape[-1]
        return centred * num / (num - 1)
    return centred / (rewards.std(-1, correction=0, keepdim=True) + 1e-4)


# A loss takes tensors [N], with an element for each sampled token, and returns [N]:
#   logp        its log-probability now, with a gradient
#   recorded    when it was sampled, by an older policy
#   near        under the weights before this batch
#   A           the advantage of its response

MAX_RATIO = 2.0  # maximum weight of a sample in decoupled
MAX_BAD_RATIO = 3.0  # beyond this a token with A < 0 has no gradient: see ppo


def ratio_of(logp: Tensor, recorded: Tensor) -> Tensor:
    """The ratio r, without overflow."""
    return (logp - recorded).clamp(max=20).exp()


def reinforce(logp: Any, recorded: Any, near: Any, A: Any, cfg: Config) -> Tensor:
    """Williams 1992. No ratio: right for fresh samples only."""
    return -A * logp


def ppo(logp: Any, recorded: Any, near: Any, A: Any, cfg: Config) -> Tensor:
    """Schulman 2017, with the dual clip of Ye 2020.

    By example, a good token (A = 1) that was sampled with probability 0.50. At 0.55 r is 1.1, and
    the loss -r has a gradient. At 0.65 r is 1.3, and the loss -min(1.3, 1.2) is a constant. A *bad*
    token (A = -1) at 0.65 has the loss -min(-1.3, -1.2) = 1.3, and keeps its gradient, however
    large r is. So a bad token needs a bound of its own.
    """
    ratio = ratio_of(logp, recorded)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    gain = torch.min(A * ratio, A * clipped)  # mechanism: losses
    return -torch.where(A < 0, gain.clamp(min=MAX_BAD_RATIO * A), gain)


def decoupled(logp: Any, recorded: Any, near: Any, A: Any, cfg: Config) -> Tensor:
    """AReaL (Fu 2025): clips exp(logp - near), which is 1 in the first update on a batch."""
    return ratio_of(near, recorded).clamp(max=MAX_RATIO) * ppo(logp, near, near, A, cfg)


LOSSES: dict[str, Callable[..., Tensor]] = {
    loss.__name__: loss for loss in (reinforce, ppo, decoupled)
}

# -- 10a. The learner ---


@dataclass
class Batch:
    """A micro-batch of episodes: B rows, T columns, N sampled tokens, row by row."""

    num_tokens: int  # sampled, in all micro-batches
    ids: Tensor  # [B, T], padded on the right
    is_sampled: Tensor  # [B, T - 1], of the tokens from the second on
    recorded: Tensor  # [N] log-probabilities
    advantage: Tensor  # [N]
    near: Tensor | None = None  # [N] log-probabilities, from the first update on


def groups_of(episodes: list[Episode]) -> list[list[Episode]]:
    """The episodes of each prompt, which stand next to each other."""
    groups = groupby(episodes, lambda episode: episode.prompt.number)
    return [list(members) for _, members in groups]


def advantages_of(episodes: list[Episode], kind: str) -> list[list[float]]:
    """Of each token of each episode; 0 where it was not sampled."""
    found = []
    for group in groups_of(episodes):
        rewards = torch.tensor([episode.rewards for episode in group]).T
        # [turns, G]: rewards to go, of this turn and later ones
        returns = rewards.flip(0).cumsum(0).flip(0)
        of_turns = advantages(returns, kind).T.tolist()
        for episode, later in zip(group, of_turns):
            by_turn = [0.0, *later]
            found.append([by_turn[turn] for turn in episode.turn_of])
    return found


def padded(rows: list[list[Any]], device: torch.device) -> Tensor:
    """[B, T], with zeros on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True).to(device)


@dataclass
class StepStats:
    """Statistics of one update. Means are over the tokens that rank 0 trains on."""

    num_tokens: int
    loss: float  # with ppo near 0, even in a healthy run: section 10
    entropy: float  # nats per token; at 0 the policy is deterministic
    k3: float  # between recorded and recomputed log-probabilities

    grad_norm: float  # before it is cut to 1
    seconds: float


class Learner:
    """A policy, its optimizer, and its updates. Parameters, gradients and moments are in fp32.

    In bfloat16 most updates at a rate of 1e-6 would be rounded off.

    advantages: of each token of each episode; default: as cfg.advantage says.
    penalty(batch, logp): what is added to the loss of each token.
    """

    def __init__(
        self,
        policy: Policy,
        cfg: Config,
        rank: int = 0,
        num_ranks: int = 1,
        advantages: Callable[..., Any] | None = None,
        penalty: Any = None,
    ) -> None:
        self.policy = policy
        self.cfg = cfg
        self.advantages = advantages or partial(advantages_of, kind=cfg.advantage)
        self.rank = rank
        self.num_ranks = num_ranks
        self.penalty = penalty
        self.weights = list(policy.model.parameters())
        self.optimizer = torch.optim.Adam(self.weights, cfg.lr)

    def step(self, episodes: list[Episode]) -> StepStats:
        """cfg.epochs updates on the same episodes. Returns what the first one found."""
        batches = self._batches(self.cfg, episodes, self.advantages(episodes))
        found = []
        for _ in range(self.cfg.epochs):
            found.append(self._update(self.optimizer, self.cfg, batches, self.penalty))
        return found[0]

    def sft(self, task: Task, num_steps: int) -> None:
        """Supervised warm start at twice the rate: REINFORCE on right responses, with A = 1."""
        cfg = replace(self.cfg, loss="reinforce", entropy=0.0)
        optimizer = torch.optim.Adam(self.weights, 2 * cfg.lr)
        prompts = training_prompts(task)
        for _ in range(num_steps):
            episodes = []
            for prompt in islice(prompts, 4 * cfg.prompts_per_step):
                right = [str(turn.answer) for turn in prompt.turns]
                if any(turn.answer is None for turn in prompt.turns):
                    raise UsageError("--sft-steps: a prompt has no answer")
                episode = episode_with(self.policy, prompt, right)
                if len(episode.ids) <= self.policy.context:
                    episodes.append(episode)
            if not episodes:
                raise UsageError("--sft-steps: no prompt fits the context")
            advantage = [[1.0] * len(episode.ids) for episode in episodes]
            self._update(optimizer, cfg, self._batches(cfg, episodes, advantage), None)

    def _batches(
        self, cfg: Config, episodes: list[Episode], advantage: list[list[float]]
    ) -> list[Batch]:
        """The micro-batches of this rank, each of about cfg.tokens_per_micro_batch.

        Rows are sorted by length, so that there is little padding, and assigned round-robin. All
        ranks get equally many, because FSDP gathers each layer on all ranks at once.
        """
        num_tokens = sum(turn > 0 for episode in episodes for turn in episode.turn_of)
        # Zero advantages have no gradient, except by entropy or a penalty.
        order = [row for row, gains in enumerate(advantage) if any(gains)]
        if cfg.entropy or self.penalty or len(order) < self.num_ranks:
            order = list(range(len(episodes)))
        order.sort(key=lambda row: -len(episodes[row].ids))
        rows_per_pass = max(2, cfg.tokens_per_micro_batch // len(episodes[order[0]].ids))
        num_passes = ceil(len(order) / rows_per_pass / self.num_ranks)
        mine = order[self.rank :: self.num_ranks]
        ends = [len(mine) * i // num_passes for i in range(num_passes + 1)]
        device = self.policy.device
        batches = []
        for start, end in pairwise(ends):
            rows = [episodes[row] for row in mine[start:end]]
            ids = padded([row.ids for row in rows], device)
            is_sampled = padded([row.turn_of for row in rows], device)[:, 1:] > 0
            recorded = padded([row.logprobs for row in rows], device)[:, 1:][is_sampled]
            gains = padded([advantage[row] for row in mine[start:end]], device)[:, 1:][is_sampled]
            batches.append(Batch(num_tokens, ids, is_sampled, recorded, gains))
        return batches

    def _update(
        self, optimizer: torch.optim.Optimizer, cfg: Config, batches: list[Batch], penalty: Any
    ) -> StepStats:
        """One update; gradients add up over `batches`."""
        start = time.perf_counter()
        found = []
        for batch in batches:
            logp, entropy = token_logprobs(self.policy, batch.ids, batch.is_sampled)
            if batch.near is None:
                batch.near = logp.detach()
            loss = LOSSES[cfg.loss](logp, batch.recorded, batch.near, batch.advantage, cfg)
            if cfg.entropy:
                loss = loss - cfg.entropy * entropy
            if penalty:
                loss = loss + penalty(batch, logp)
            # FSDP takes the mean of the ranks' gradients; what is wanted is their sum.
            (loss.sum() / max(batch.num_tokens, 1) * self.num_ranks).backward()
            found.append(torch.stack([loss, entropy, k3(batch.recorded, logp)]).detach())
        grad_norm = float(whole(torch.nn.utils.clip_grad_norm_(self.weights, 1.0)))
        if math.isfinite(grad_norm):  # else the weights stay, and the log shows it
            optimizer.step()
        optimizer.zero_grad()
        of_tokens = torch.cat(found, dim=1)
        means = (of_tokens.sum(1) / max(of_tokens.shape[1], 1)).tolist()
        return StepStats(
            batches[0].num_tokens, *means, grad_norm=grad_norm, seconds=time.perf_counter() - start
        )


def whole(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor; others unchanged."""
    return tensor.full_tensor() if isinstance(tensor, dtensor.DTensor) else tensor


def training_prompts(task: Task, first: int = 0) -> Iterator[Prompt]:
    """The prompts of a task from this number on, without those that are held out."""
    last = first
    for number in count(first):
        prompt = task.prompt(number)
        if not prompt.is_held_out:
            last = number
            yield prompt
        elif number - last > 1000:
            raise UsageError("all prompts of the task are held out")


def episode_with(policy: Policy, prompt: Prompt, responses: list[str]) -> Episode:
    """The episode with these responses, as if they had been sampled."""
    episode = Episode(prompt, responses=responses)
    for turn, response in enumerate(responses):
        ids = policy.prompt_ids(prompt, turn)
        episode.add_prompt(ids)
        for token in policy.tokenize(response, is_plain=True) + policy.end_ids[:1]:
            episode.add(token, turn + 1, 0.0)
    return episode


# -- measurement ---


@dataclass
class Bandit:
    """4 prompts, 16 responses of one token to each. A policy is a table [4, 16] of logits.

    So J and its gradient can be computed from all responses, and estimates compared with it.
    """

    rewards: Tensor  # [4, 16]
    old: Tensor  # [4, 16]: the policy that sampled
    drawn: Tensor  # [batches, 4, 8]: responses

    def true_gradient(self, now: Tensor) -> Tensor:
        """[4, 16]: from all responses and their probabilities."""
        table = now.clone().requires_grad_()
        mean_reward = (table.softmax(-1) * self.rewards).sum(-1).mean()
        return torch.autograd.grad(mean_reward, table)[0]

    def estimates(self, now: Tensor, loss: str, kind: str) -> Tensor:
        """[batches, 4, 16]: gradients, each from one batch."""
        shape = (len(self.drawn), 4, 16)
        tables = now.expand(shape).clone().requires_grad_()  # one copy for each batch
        logp = tables.log_softmax(-1).gather(2, self.drawn)
        recorded = self.old.log_softmax(-1).expand(shape).gather(2, self.drawn)
        advantage = advantages(self.rewards.expand(shape).gather(2, self.drawn), kind)
        losses = LOSSES[loss](logp, recorded, logp.detach(), advantage, Config())
        return -torch.autograd.grad(losses.sum() / (4 * 8), tables)[0]

    def compare(self, now: Tensor, loss: str, kind: str) -> Record:
        """Angle of the mean estimate to the true gradient, and relative standard deviation."""
        found = self.estimates(now, loss, kind)
        mean = found.mean(0)
        truth = self.true_gradient(now)
        cosine = (mean * truth).sum() / mean.norm() / truth.norm()
        spread = (found - mean).square().sum((1, 2)).mean().sqrt()
        return {
            "loss": loss,
            "advantage": kind,
            "degrees off": math.degrees(math.acos(cosine)),
            "deviation": float(spread / mean.norm()),
        }

    def push(self, loss: str) -> float:
        """How far (KL, in nats) 100 updates on the first batch move the policy."""
        first = replace(self, drawn=self.drawn[:1])
        now = self.old
        for _ in range(100):
            now = now + 2 * first.estimates(now, loss, "group")[0]
        difference = self.old.log_softmax(-1) - now.log_softmax(-1)
        return float((self.old.softmax(-1) * difference).sum(-1).mean())


@stage(instead="gain = A * ratio")
async def demo_losses(report: Report) -> None:
    """A baseline lowers noise, a ratio lowers the bias of staleness, a clip bounds the push."""
    rng = torch.Generator().manual_seed(0)
    rewards = torch.rand(4, 16, generator=rng).square()
    old = torch.randn(4, 16, generator=rng)
    drawn = torch.multinomial(old.softmax(-1), 2000 * 8, True, generator=rng)
    bandit = Bandit(rewards, old, drawn.view(4, 2000, 8).transpose(0, 1))
    now = old
    for _ in range(8):
        step = bandit.true_gradient(now)
        now = now + 0.5 * step / step.norm()
    plain = bandit.compare(old, "reinforce", "none")
    group = bandit.compare(old, "reinforce", "group")
    others = bandit.compare(old, "reinforce", "leave_one_out")
    stale = bandit.compare(now, "reinforce", "leave_one_out")
    ratio = bandit.compare(now, "decoupled", "leave_one_out")
    rows = [{"staleness": 0, **found} for found in (plain, group, others)]
    report.table(rows + [{"staleness": 8, **found} for found in (stale, ratio)])
    smaller = others["deviation"] / plain["deviation"]
    report.check("deviation with a baseline / without", smaller, "<", 0.8)
    straighter = ratio["degrees off"] / stale["degrees off"]
    report.check("degrees off with a ratio / without", straighter, "<", 0.9)
    push = bandit.push("ppo") / bandit.push("reinforce")
    report.check("push with a clip / without", push, "<", 0.2)


# == 11. SYNC RL ====
# Problem. Sampling, scoring and updating run in different processes, which need each other's
#   results in the right order, with the right weights.
# Rule. One loop, one thing at a time. Generators pull before they sample, so staleness is 0. An
#   unscored episode is left out. One object accounts for every group that was started.
# Cost. Each side waits while the other works (section 12).
#
#   main process   1. draws prompts
#   generators     2. pull the newest weights, and sample a group for each prompt
#   rewards        3. score each response
#   trainer        4. makes an update, and publishes the new weights

# -- 11a. The actors of a run ---

# Of a group: the prompt and responses of each episode, and its rewards for each turn, or the reason
# why there are none.
Asked = list[tuple[Prompt, list[str]]]
Rewards = list[list[float] | str]


def make_scorer(cfg: Config) -> Callable[[Asked], Rewards]:
    """The reward function, for a group: it calls task.score for each episode."""
    task = letter_task(cfg)
    return lambda asked: [task.score(prompt, responses) for prompt, responses in asked]


def num_threads(cfg: Config) -> int:
    """Of torch, in a trainer or generator. More threads than cores wait by spinning."""
    return max(1, len(os.sched_getaffinity(0)) // (cfg.generators + cfg.trainers))


class Trainer(Worker):
    """Learns, and publishes."""

    def setup(
        self,
        number: int,
        cfg: Config,
        make_learner: Callable[..., Learner],
        meeting_file: str,
        version: int,
    ) -> ArenaHandle:
        torch.set_num_threads(num_threads(cfg))
        rank = current_rank().rank
        cfg = on_device(cfg, rank)
        if cfg.trainers > 1:
            backend = "gloo" if cfg.device in ("", "cpu") else "cpu:gloo,cuda:nccl"
            form_group(meeting_file, rank, cfg.trainers, backend)
        self.policy = Policy(cfg, torch.float32)
        self.learner = make_learner(self.policy, cfg, rank)
        weights = dict(self.policy.model.named_parameters())
        self.writer = writer_of(weights, cfg.generators, getattr(torch, cfg.dtype or "float32"))
        # The copy of a version runs beside the next step, until that changes the weights.
        self.learner.optimizer.register_step_pre_hook(lambda *_: self.writer.wait())
        self.version = version
        self.writer.publish(version)
        self.writer.wait()
        return self.writer.handle

    def step(self, episodes: list[Episode], waits: bool) -> StepStats:
        """One batch: updates, and a new version. waits: until it is committed."""
        stats = self.learner.step(episodes)
        self.version += 1
        self.writer.publish(self.version)
        if waits:
            self.writer.wait()
        return stats


class Generator(Worker):
    """Samples with the newest weights."""

    def setup(self, number: int, cfg: Config, make_reader: Callable[..., WeightReader]) -> None:
        """Loads the policy. The arena may not exist yet."""
        torch.set_num_threads(num_threads(cfg))
        cfg = on_device(cfg, number, cfg.trainers)
        self.number = number
        self.make_reader = make_reader
        self.policy = Policy(cfg, getattr(torch, cfg.dtype or "float32"))
        self.reader: WeightReader | None = None

    def rollout(
        self,
        handle: ArenaHandle,
        at_least: int,
        prompts: list[Prompt],
        group_size: int,
        seed: int | None,
    ) -> list[Episode]:
        """The episodes of these prompts, with weights of at least this version."""
        if self.reader is None:
            weights = dict(self.policy.model.named_parameters())
            self.reader = self.make_reader(handle, self.number, weights)
        version = self.reader.pull(at_least)  # mechanism: sync_rl
        return rollout(self.policy, prompts, group_size, seed, version)


class RewardWorker(Worker):
    """Computes rewards."""

    def setup(self, number: int, cfg: Config, make_scorer: Callable[[Config], Any]) -> None:
        self.score_group = make_scorer(cfg)

    def score(self, groups: list[Asked]) -> list[Rewards]:
        return [self.score_group(asked) for asked in groups]


# -- 11b. A run ---


def make_learner(policy: Policy, cfg: Config, rank: int) -> Learner:
    """The learner of a trainer's rank, after its supervised steps."""
    learner = Learner(policy, cfg, rank, cfg.trainers)
    learner.sft(letter_task(cfg), cfg.sft_steps)
    return learner


@dataclass(frozen=True)
class Factories:
    """Factories for what differs between runs."""

    make_task: Callable[..., Task] = letter_task
    make_learner: Callable[..., Learner] = make_learner
    make_reader: Callable[..., WeightReader] = WeightReader
    make_scorer: Callable[..., Any] = make_scorer


@dataclass(eq=False)
class Group:
    """The episodes of one prompt that have rewards."""

    episodes: list[Episode]

    @property
    def number(self) -> int:
        return self.episodes[0].prompt.number

    @property
    def version(self) -> int:
        return self.episodes[0].version


def numbers_of(groups: list[Group]) -> set[int]:
    return {group.number for group in groups}


class RunError(RuntimeError):
    """The run cannot go on."""


async def scatter_gather(items: list[Any], num_parts: int, ask: Callable[..., Any]) -> list[Any]:
    """Splits items, asks for the answers to all parts at once, and joins them."""
    size = ceil(len(items) / num_parts) if items else 1
    parts = [items[start : start + size] for start in range(0, len(items), size)]
    answers = await gather(*[ask(part) for part in parts])
    return [found for answer in answers for found in answer]


@dataclass
class Progress:
    """How far a run has come, and where its groups are.

    started = trained + dropped + lost + in flight
    """

    rows: list[Record] = field(default_factory=list)  # of each step
    heldout: list[Any] = field(default_factory=list)  # (version, accuracy) pairs
    num_drawn: int = 0  # prompts with smaller numbers have been drawn
    requeued: list[int] = field(default_factory=list)  # to draw first after a resume
    # Prompts with a generator, a reward worker, the buffer, or the trainer.
    in_flight: set[int] = field(default_factory=set)
    # trained; dropped: too old, or left at the end of the run; lost: no rewards, or too long, or
    # their request failed
    ended: Counter[str] = field(default_factory=Counter)

    def end(self, how: str, numbers: set[int]) -> None:
        self.in_flight -= numbers
        self.ended[how] += len(numbers)

    def counts(self) -> dict[str, int]:
        outcomes = {how: self.ended[how] for how in ("trained", "dropped", "lost")}
        started = self.ended.total() + len(self.in_flight)
        return {"started": started, **outcomes, "in_flight": len(self.in_flight)}


class Run:
    """The three services of a run, and its progress. folder: where the trainer's ranks meet."""

    def __init__(
        self,
        cfg: Config,
        pool: Pool,
        generator_pool: Pool,
        folder: Path,
        parts: Factories,
        progress: Progress,
        unresponsive_s: float = 30.0,
    ) -> None:
        self.cfg = cfg
        self.pool = pool
        service = partial(Service, unresponsive_s=unresponsive_s)
        meeting_file = str(folder / f"meeting_{time.monotonic_ns()}")
        self.version = len(progress.rows)  # of the trainer's weights
        args = (cfg, parts.make_learner, meeting_file, self.version)
        # A lost trainer has lost the newest weights, so it ends the run.
        self.trainer = service(Trainer, 1, pool, args, num_ranks=cfg.trainers, replaces=False)
        args = (cfg, parts.make_reader)
        self.generators = service(Generator, cfg.generators, generator_pool, args)
        args = (cfg, parts.make_scorer)
        self.reward_workers = service(RewardWorker, cfg.reward_workers, pool, args)
        self.services = [self.trainer, self.generators, self.reward_workers]
        self.progress = progress
        self.num_begun = self.version  # steps
        self.task = parts.make_task(cfg)
        self.prompts = training_prompts(self.task, progress.num_drawn)
        self.held_out = held_out_prompts(self.task, cfg.eval_prompts)
        self.errors = Counter[str]()
        self.num_too_long = 0  # episodes
        self.num_fruitless = 0  # requests in a row that brought no reward

    async def begin(self) -> None:
        self.reporting = ensure_future(report_waiting(self))
        await gather(*[service.begin() for service in self.services])
        await self.trainer.until_ready(1)  # raises if it is lost
        self.handle = self.trainer.replicas[0].result
        self.pool.keep_spare()

    async def close(self) -> None:
        self.reporting.cancel()
        await gather(*[service.close() for service in self.services])

    def replicas(self) -> list[Replica]:
        return [replica for service in self.services for replica in service.ready()]

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts. Their groups are in flight. Raises RunError and ReplicaLost."""
        if not self.trainer.ready():
            raise ReplicaLost("the trainer was lost")
        if self.num_fruitless >= 20:
            reason = [*self.errors][-1] if self.errors else "no prompt fits the context"
            raise RunError(f"20 requests in a row brought no reward: {reason}")
        progress = self.progress
        prompts = []
        for _ in range(num_prompts):
            if progress.requeued:
                prompts.append(self.task.prompt(progress.requeued.pop(0)))
            else:
                prompts.append(next(self.prompts))
                progress.num_drawn = prompts[-1].number + 1
            progress.in_flight.add(prompts[-1].number)
        return prompts

    async def sample(self, prompts: list[Prompt]) -> list[Group]:
        """Groups to train on. Prompts without rewards count as lost."""
        groups: list[Group] = []
        try:
            # Later the number of a prompt is added.
            seed = self.cfg.seed % 10**9 * 1_000_000_007
            groups = await self.sample_and_score(prompts, self.cfg.group_size, seed)
        except (ReplicaLost, ActorError) as error:
            self.note_error(cause_of(error))
        self.progress.end("lost", {prompt.number for prompt in prompts} - numbers_of(groups))
        self.num_fruitless = 0 if groups else self.num_fruitless + 1
        return groups

    def note_error(self, error: str) -> None:
        if error not in self.errors and len(self.errors) < 5:
            print(f"           not scored: {error}")
        self.errors[error] += 1

    async def sample_and_score(
        self, prompts: list[Prompt], group_size: int, seed: int | None
    ) -> list[Group]:
        """Groups of scored episodes. If only one of several has a reward, none is kept."""

        async def rollout(some: list[Prompt]) -> list[Episode]:
            # At most 64 prompts in one batch, for each row of it has a cache.
            own_seed = None if seed is None else seed + some[0].number
            args = (self.handle, self.version, some, group_size, own_seed)
            return await self.generators.request("rollout", *args)

        episodes = await scatter_gather(prompts, ceil(len(prompts) / 64), rollout)
        self.num_too_long += len(prompts) * group_size - len(episodes)
        sampled = groups_of(episodes)
        asked = [[(e.prompt, e.responses) for e in members] for members in sampled]
        score = partial(self.reward_workers.request, "score")
        groups = []
        found = await scatter_gather(asked, self.cfg.reward_workers, score)
        for members, rewards in zip(sampled, found, strict=True):
            scored = []
            for episode, reward in zip(members, rewards):
                if isinstance(reward, str):
                    self.note_error(reward)
                else:
                    episode.rewards = reward
                    scored.append(episode)
            if len(scored) >= min(2, group_size):
                groups.append(Group(scored))
        return groups

    async def step(self, groups: list[Group], waits: bool) -> None:
        """One update of the trainer. Counts the groups, and adds a row."""
        version = self.num_begun  # the trainer's version before this step
        self.num_begun += 1
        episodes = [episode for group in groups for episode in group.episodes]
        stats = await self.trainer.request("step", episodes, waits)
        first = episodes[0]
        asked = first.prompt.turns[-1].messages[-1]["content"]
        row = {
            "step": version + 1,
            "time": time.time(),
            "reward": fmean(sum(e.rewards) for e in episodes),
            "staleness": version - min(group.version for group in groups),
            "truncated": fmean(any(e.truncated) for e in episodes),
            "sample": f"{asked!r} -> {first.responses[-1]!r} ({sum(first.rewards):.2f})",
            "tokens_per_s": stats.num_tokens / stats.seconds,
            "too_long": self.num_too_long,
            "not_scored": sum(self.errors.values()),
        }
        self.version = version + 1
        self.progress.end("trained", numbers_of(groups))
        self.progress.rows.append(row | asdict(stats) | self.progress.counts())

    async def evaluate(self) -> float | None:
        """The share of held-out prompts whose likeliest responses get the full reward, 1."""
        groups = await self.sample_and_score(self.held_out, 1, seed=None)
        num_right = sum(sum(group.episodes[0].rewards) > 0.999 for group in groups)
        accuracy = None
        if groups:
            accuracy = num_right / len(self.held_out)
        self.progress.heldout.append((self.version, accuracy))
        return accuracy


async def report_waiting(run: Run) -> None:
    """After each 30 s without a step, says which workers live, and how old their requests are."""
    while True:
        num_steps = len(run.progress.rows)
        await sleep(30)
        if num_steps < len(run.progress.rows):
            continue
        print(f"           {len(run.replicas())} workers ready")
        for replica in run.replicas():
            start_s = min(replica.in_flight.values(), default=time.time())
            busy = f"busy for {time.time() - start_s:.0f} s"
            print(f"           {replica.name}, process {replica.processes.ids}: {busy}")


def held_out_prompts(task: Task, num_prompts: int) -> list[Prompt]:
    """The first held-out prompts of a task, each once, or fewer."""
    found: dict[str, Prompt] = {}
    for number in range(50 * num_prompts):
        prompt = task.prompt(number)
        if prompt.is_held_out:
            found.setdefault(str([turn.messages for turn in prompt.turns]), prompt)
        if len(found) == num_prompts:
            break
    return list(found.values())


async def finished(work: Awaitable[Any]) -> Any:
    """The result of the work. If the caller is cancelled meanwhile, the work is finished first."""
    task = ensure_future(work)
    try:
        await wait([task])
    finally:
        await gather(task, return_exceptions=True)
    return task.result()


async def train_sync(run: Run, num_steps: int) -> None:
    """Sample, score, train. A step needs a group for each rank."""
    groups: list[Group] = []
    while num_steps > 0:
        prompts = run.draw(run.cfg.prompts_per_step)
        groups += await scatter_gather(prompts, run.cfg.generators, run.sample)
        if len(groups) >= run.cfg.trainers:
            await finished(run.step(groups, waits=True))
            groups = []
            num_steps -= 1


# -- measurement ---


def demo_config(cfg: Config) -> Config:
    tiny = {"dtype": "float32", "device": "cpu", "trainers": 1, "max_new_tokens": 4}
    return replace(cfg, **tiny, lr=1e-3, entropy=0.01, sft_steps=60)


async def begin_demo(report: Report) -> Run:
    """The tiny policy on `repeat`, after a warm start."""
    places = (report.pool, report.pool, report.folder)
    run = Run(demo_config(report.cfg), *places, Factories(), Progress(), unresponsive_s=2.0)
    await run.begin()
    return run


async def cpu_s(run: Run) -> float:
    """Seconds of CPU time of all workers and this process."""
    calls = [replica.worker.run.call(lambda _: time.process_time()) for replica in run.replicas()]
    of_ranks = [sum(answer.values()) for answer in await gather(*calls)]
    return sum(of_ranks) + time.process_time()


async def measure(run: Run, training: Awaitable[None], num_steps: int) -> dict[str, float]:
    """Speed and busy shares of so many steps."""
    start_s = time.time()
    start_cpu_s = await cpu_s(run)
    await training
    seconds = time.time() - start_s
    num_cores = (await cpu_s(run) - start_cpu_s) / seconds
    timeline = await get_or_spawn_controller("timeline", Timeline)
    spans = await timeline.read.call_one("trainer")
    busy_s = sum(span.end_s - span.start_s for span in spans if span.start_s > start_s)
    return {
        "steps/s": num_steps / seconds,
        "of all CPUs": num_cores / len(os.sched_getaffinity(0)),
        "trainer busy": busy_s / seconds,
    }


@stage(instead="version = 0")
async def demo_sync_rl(report: Report) -> None:
    """The loop, one thing at a time: both programs agree, and the reward rises."""
    run = await begin_demo(report)
    before = await run.evaluate() or 0.0
    await train_sync(run, 100)
    after = await run.evaluate() or 0.0
    k3_max = max(row["k3"] for row in run.progress.rows)
    report.check("largest k3 of recorded and recomputed", k3_max, "<", 1e-10)
    report.check("largest staleness", max(row["staleness"] for row in run.progress.rows), "==", 0)
    report.check(f"held-out accuracy of {len(run.held_out)}", after, ">", before + 0.2)
    report.figure(heldout_before=before, heldout_after=after)
    await run.close()


# == 12. ASYNC RL ====
# Problem. In the synchronous loop one side always waits for the other. If both run all the time,
#   samples grow old: nothing bounds how many versions.
# Rule. Two loops and a buffer. The first requests groups while fewer than K + 1 batches are in
#   flight. The second takes a batch, and trains. A group older than K versions is dropped.
# Cost. Stale samples, which the loss must correct (section 10). Dropped groups are wasted work.
#
# Why K + 1 batches: one trains and K wait; the last is K versions old when it is used. That alone
# is no bound, for other groups overtake a slow one. By example, with K = 1 and the trainer at v:
#
#   v = 5   batches a and b begin; two are in flight
#   v = 5   a step on a (staleness 0): v = 6; batch c begins
#   v = 6   a step on b (staleness 1): v = 7; batch d begins
#   v = 7   c is late, and d comes first: a step on d (staleness 0): v = 8
#   v = 8   c comes, of version 6. Its staleness would be 2, so it is dropped
#
# Dropped groups are mostly long responses, so the policy trains on shorter ones than it produces.
# The other way to keep the bound is to train on groups in the order of their start. At most K
# batches are before any group, so none becomes too old; but the trainer waits for stragglers.


class ReplayBuffer:
    """A queue of groups, each trained on once, with bounded staleness.

    One event loop runs all its methods, so it needs no thread lock.
    """

    def __init__(self, run: Run, bound: int, num_batches: int) -> None:
        self.run = run
        self.bound = bound
        self.batch_size = run.cfg.prompts_per_step
        self.limit = num_batches * self.batch_size  # groups in flight
        # Batches that wait at the trainer. With K = 1, one is trained on and one is sampled.
        self.num_ahead = min(1, bound - 1)
        self.ready: list[Group] = []
        self.changed = asyncio.Condition()

    async def draw(self, num_groups: int) -> list[Prompt]:
        """Waits for room for num_groups, then draws prompts."""
        async with self.changed:
            while len(self.run.progress.in_flight) + num_groups > self.limit:
                await self.changed.wait()
        return self.run.draw(num_groups)

    async def sample_into(self, prompts: list[Prompt]) -> None:
        """One request. Its groups become ready, or are lost."""
        self.ready.extend(await self.run.sample(prompts))
        await self.wake()

    async def wake(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def take(self, version: int) -> list[Group]:
        """Waits for a batch. version: the trainer's, when it begins this batch."""
        async with self.changed:
            self._drop_old(version)
            while len(self.ready) < self.batch_size:
                await self.changed.wait()
                self._drop_old(version)
            return [self.ready.pop(0) for _ in range(self.batch_size)]

    def _drop_old(self, version: int) -> None:
        for group in list(self.ready):
            if version - group.version > self.bound:  # mechanism: async_rl
                self.ready.remove(group)
                self.run.progress.end("dropped", {group.number})
                self.changed.notify_all()  # there is room now


async def generate(buffer: ReplayBuffer, tasks: TaskGroup) -> None:
    """Consumes prompts, waits for room, produces requests; ends when it is cancelled."""
    cfg = buffer.run.cfg
    # A request has a fixed cost, so it is large: each generator's share of K batches, at most one.
    share = buffer.bound * cfg.prompts_per_step // cfg.generators
    size = max(1, min(cfg.prompts_per_step, share))
    while True:
        prompts = await buffer.draw(size)
        tasks.create_task(buffer.sample_into(prompts))


async def learn(buffer: ReplayBuffer, num_steps: int) -> None:
    """Consumes batches, waits for the trainer, frees capacity; ends after num_steps.

    If it is cancelled, it finishes the steps that the trainer has.
    """
    at_trainer = deque[Any]()
    first = buffer.run.version
    try:
        for version in range(first, first + num_steps):
            batch = await buffer.take(version)
            at_trainer.append(ensure_future(buffer.run.step(batch, waits=False)))
            if len(at_trainer) > buffer.num_ahead:
                await wait([at_trainer[0]])
                at_trainer.popleft().result()
                await buffer.wake()
    finally:
        await gather(*at_trainer)
        await buffer.wake()


@asynccontextmanager
async def generating(run: Run, bound: int, num_batches: int = 0) -> AsyncIterator[ReplayBuffer]:
    """Inside this context, groups are sampled. Those that are left at its end are dropped."""
    buffer = ReplayBuffer(run, bound, num_batches or bound + 1)
    try:
        async with TaskGroup() as tasks:  # ends when all requests have ended
            task = tasks.create_task(generate(buffer, tasks))
            yield buffer
            task.cancel()
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    run.progress.end("dropped", numbers_of(buffer.ready))


async def train_async(run: Run, bound: int, num_steps: int, num_batches: int = 0) -> None:
    """Both loops, for so many steps."""
    async with generating(run, bound, num_batches) as buffer:
        await learn(buffer, num_steps)


# -- measurement ---


async def inject_fault(run: Run, service: Service, at_step: int, how: signal.Signals) -> None:
    while run.version < at_step:
        await sleep(0.01)
    os.kill(service.replicas[0].processes.ids[0], how)


@stage(instead="if False:")
async def demo_async_rl(report: Report) -> None:
    """Two loops and a buffer: staleness is bounded, and lost workers are replaced."""
    bound = max(1, report.cfg.max_staleness)
    run = await begin_demo(report)
    before = await run.evaluate() or 0.0
    sync = await measure(run, train_sync(run, 60), 60)
    together = await measure(run, train_async(run, bound, 140), 140)
    after = await run.evaluate() or 0.0
    report.table([{"loop": "synchronous", **sync}, {"loop": "asynchronous", **together}])

    await gather(
        inject_fault(run, run.generators, 210, signal.SIGKILL),
        inject_fault(run, run.reward_workers, 230, signal.SIGSTOP),
        train_async(run, bound, 60, 2 * bound + 2),
    )
    losses = [*run.generators.failures, *run.reward_workers.failures]
    bounded = max(row["staleness"] for row in run.progress.rows)
    await train_async(run, bound + 8, 30)
    unbounded = max(row["staleness"] for row in run.progress.rows)
    counts = run.progress.counts()
    report.check("largest staleness", bounded, "<", bound + 1)
    report.check("largest staleness with the bound raised by 8", unbounded, ">", bound)
    report.check("workers lost and replaced", len(losses), "==", 2)
    report.check("groups lost or still in flight", counts["lost"] + counts["in_flight"], "==", 0)
    report.check("held-out accuracy after 200 steps", after, ">", before + 0.2)
    report.figure(
        steps_per_s=together["steps/s"],
        sync_steps_per_s=sync["steps/s"],
        of_cpu_limit=together["of all CPUs"],
        trainer_busy_share=together["trainer busy"],
        heldout_before=before,
        heldout_after=after,
        staleness_max=bounded,
        staleness_max_without_rule=unbounded,
        **counts,
    )
    await run.close()


# ==== PART II: further ====
# The system is complete. Part II: your own data, long runs, harder rewards, more hosts.

# == YOUR OWN DATA ====
# Problem. A reward function is the user's code: it raises, hangs, forks, sets signal handlers, and
#   returns anything. None of this may end a run.
# Rule. A separate process calls it in the main thread, as handlers need, and is killed with all of
#   its children. An episode without a reward is left out of its group: a 0 would blame the policy.
# Cost. One more process, and two messages per group.

WORDS = """apple banana bridge candle castle cloud copper desert dragon eagle ember feather
    forest garden harbor hammer island jacket kettle ladder lemon lion market meadow mirror
    mountain ocean orange paper pencil pepper piano planet rabbit river rocket silver spider
    table window""".split()


TASKS = ("repeat", "count", "pattern")


class WordTask(Task):
    """The tasks `repeat`, `count` and `pattern`, for a chat model: in whole words."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self.seed = seed
        self.max_new_tokens = 24 if kind == "count" else 6

    def prompt(self, number: int) -> Prompt:
        rng = random.Random(f"{self.seed} {number}")
        one, other, of_one, of_other = rng.sample(WORDS, 4)
        if self.kind == "repeat":
            asked = f"I will say a word, and you repeat it. Say nothing else. {one}"
            return Prompt(number, (user_turn(asked, one), user_turn(other, other)))
        if self.kind == "count":
            first = rng.randint(1, 90)
            numbers = [str(first + i) for i in range(rng.randint(3, 5))]
            asked = f"Count from {first} to {numbers[-1]}. Write only the numbers, with commas."
            return Prompt(number, (user_turn(asked, ", ".join(numbers)),))
        # A solved example, then the question.
        rule = f"When I say {other}, you say {of_other}. When I say {one}, you say"
        shown = user_turn(f"{rule} {of_one}. {other}", "").messages
        shown += ({"role": "assistant", "content": of_other},)
        shown += user_turn(one, "").messages
        return Prompt(number, (Turn(shown, of_one),))

    def grade(self, answer: str, response: str) -> float:
        """1 for the exact answer; else half the share of words at the right place."""
        if response.strip() == answer:
            return 1.0
        right = re.findall(r"\w+", answer)
        said = re.findall(r"\w+", response.lower())
        num_right = sum(a == b for a, b in zip(right, said))
        # A gradient while no response is exact: 2 of 3 words get 0.33.
        return num_right / max(len(right), len(said)) / 2


def prompt_of(number: int, record: Any, where: str) -> Prompt:
    """Converts {"prompt": text or messages, "answer": ...}, its JSON, or a Prompt, to a Prompt."""
    if isinstance(record, Prompt):
        return replace(record, number=number)
    try:
        record = json.loads(record) if isinstance(record, str) else record
        messages = record["prompt"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        said = [each["role"] for each in messages if each["content"].encode().strip()]
        if said[-1:] in ([], ["assistant"]):
            raise ValueError("no question at its end")
    except Exception as error:  # of many types
        raise UsageError(f'{where}: not {{"prompt": text or messages}}: {error!r}') from error
    return Prompt(number, (Turn(tuple(messages), record.get("answer")),))


# The content of \boxed{}, with nested braces.
BOX = r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"
NUMBER = r"-?\d*\.?\d+(?:e[-+]?\d{1,3})?"


def lines_of(path: Path) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each line that is not blank. Raises UsageError."""
    try:
        text = path.read_text("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(f"{path}: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}, line {number}", line


class FileTask(Task):
    """The prompts of a FILE.jsonl, shuffled once, then repeated. Raises UsageError."""

    def __init__(self, path: str, seed: int) -> None:
        lines = lines_of(Path(path))
        self.prompts = [prompt_of(0, line, where) for where, line in lines]
        if not self.prompts:
            raise UsageError(f"--task {path}: no prompts")
        random.Random(seed).shuffle(self.prompts)

    def prompt(self, number: int) -> Prompt:
        return replace(self.prompts[number % len(self.prompts)], number=number)

    def grade(self, answer: Any, response: str) -> float:
        """1.0 if the text after </think>, #### or boxed{, or its last number, is the answer."""
        if answer is None:
            raise ValueError("no answer")
        finals = []
        for text in (str(answer), response):
            final = re.split(r"</think>|####", text)[-1].partition("<think>")[0]
            final = [final, *re.findall(BOX, final)][-1]
            final = unicodedata.normalize("NFC", final).replace("\u2212", "-")
            final = re.sub(r",(?=\d{3})", "", final).casefold()  # 1,000 -> 1000
            finals.append(final.strip().lstrip(" \r\n$(*{").rstrip(" \r\n.$)*}"))
        wanted, final = finals
        if not re.fullmatch(NUMBER, wanted):
            return float(wanted == final)
        numbers = [Decimal(number) for number in re.findall(NUMBER, final)]
        return float(numbers[-1:] == [Decimal(wanted)])


def load_python(spec: str) -> Any:
    """Imports NAME from FILE.py. Adds its folder to sys.path, also for child processes."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if not (path.endswith(".py") and file.is_file()):
        raise UsageError(f"{spec}: not a FILE.py:NAME")
    # After the standard library, which it must not hide; before installed packages.
    packages = [i for i, each in enumerate(sys.path) if each.endswith("-packages")]
    sys.path.insert(min(packages, default=len(sys.path)), str(file.parent))
    environ["MONARCH_RL_TASK"] = str(file.parent)
    module = called(spec, import_module, file.stem)
    if getattr(module, "__file__", "") != str(file):
        raise UsageError(f"{spec}: rename it: a module has its name")
    found = getattr(module, name, None)
    if not callable(found):
        raise UsageError(f"{spec}: not callable")
    return found


class UserTask(Task):
    """The task of --task, with the rewards of --reward if it is a function."""

    def __init__(self, task: Any, reward: Callable[..., Any] | None) -> None:
        self.task = task
        self.reward = reward
        self.max_new_tokens = getattr(task, "max_new_tokens", Task.max_new_tokens)

    def prompt(self, number: int) -> Prompt:
        where = f"prompt({number})"
        return prompt_of(number, called(where, self.task.prompt, number), where)

    def score(self, prompt: Prompt, responses: list[str]) -> Any:
        """What --reward returns for each turn, or else what the task does."""
        if self.reward is None:
            return self.task.score(prompt, responses)
        rewards = []
        for turn, response in zip(prompt.turns, responses):
            text = turn.messages[0]["content"]
            asked = text if len(turn.messages) == 1 else list(turn.messages)
            rewards.append(self.reward(asked, response, turn.answer))
        return rewards[0] if len(rewards) == 1 else rewards


@cache
def user_task(cfg: Config) -> Task:
    """The task of --task and --reward, made once per process. Raises UsageError."""
    if not cfg.model:
        return letter_task(cfg)
    reward = None
    if cfg.reward not in ("", "model"):
        reward = load_python(cfg.reward)
    if cfg.task in TASKS:
        return UserTask(WordTask(cfg.task, cfg.seed), reward)
    if cfg.task.endswith(".jsonl"):
        task = FileTask(cfg.task, cfg.seed)
        answers = [p.turns[0].answer for p in task.prompts]
        if not cfg.reward and not all(isinstance(a, str | int | float) for a in answers):
            raise UsageError(f"--task {cfg.task}: its answers need --reward")
        return UserTask(task, reward)
    return UserTask(called(cfg.task, load_python(cfg.task)), reward)


class UserProcess:
    """A process whose main thread runs the user's code. Its children end with it."""

    def __init__(self, cfg: Config) -> None:
        self.cfg = cfg
        self.executor: ProcessPoolExecutor | None = None  # started with the first group
        self.pid: int | None = None

    def __call__(self, asked: Asked) -> Rewards:
        """The rewards of a group, or why there are none: the deadline, or a dead process."""
        if not self.executor:
            spawn = multiprocessing.get_context("spawn")
            self.executor = ProcessPoolExecutor(1, spawn, lead_process_group)
        try:
            self.pid = self.executor.submit(os.getpid).result()
            future = self.executor.submit(score_group, self.cfg, asked)
            return future.result(self.cfg.reward_deadline)
        except TimeoutError:
            reason = f"no reward within {self.cfg.reward_deadline:g} s"
        except Exception as error:  # or the process died
            reason = f"the reward function: {place_of(error)}"
        if self.pid:
            kill_group(self.pid)
        self.executor.shutdown(wait=False)
        self.executor = None  # the next group gets a new process
        self.pid = None
        return [reason] * len(asked)

    def __del__(self) -> None:
        if self.pid:
            kill_group(self.pid)


def lead_process_group() -> None:
    """Makes this process lead a process group, which is killed when the parent ends."""
    os.setpgid(0, 0)
    environ.pop("PYTHONSAFEPATH", None)
    # With fork, a pool in the user's code finds its functions. Monarch sets another.
    multiprocessing.set_start_method("fork", force=True)
    # When the parent ends, this pipe closes, and the kernel kills the group, whoever has the GIL.
    parent: Any = multiprocessing.parent_process()
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not parent.is_alive():  # it has ended already
        kill_group(0)


def score_group(cfg: Config, asked: Asked) -> Rewards:
    """Calls task.score for each episode. Coroutines of one group run concurrently."""
    task = user_task(cfg)
    results: list[Any] = []
    for prompt, responses in asked:
        try:
            # A copy, for the user's code may change it.
            results.append(task.score(copy.deepcopy(prompt), responses))
        except BaseException as error:
            results.append(error)
    # Not before: a reward function may call asyncio.run, which fails inside a loop.
    results = user_loop().run(awaited(results))
    rewards: Rewards = []
    for (prompt, _), result in zip(asked, results):
        try:
            rewards.append(rewards_from(result, len(prompt.turns)))
        except BaseException as error:
            rewards.append(place_of(error))
    return rewards


@cache
def user_loop() -> asyncio.Runner:
    """One event loop for all groups: an HTTP client of the user lives in one loop only."""
    return asyncio.Runner()


async def awaited(result: Any) -> Any:
    """Awaits a coroutine, or each one in a list. Exceptions become results."""
    if isinstance(result, list):
        return await gather(*[awaited(each) for each in result])
    try:
        return await result if inspect.isawaitable(result) else result
    except BaseException as error:
        return error


def rewards_from(result: Any, num_turns: int) -> list[float]:
    """What `score` returned, as a reward for each turn. A single number is for the last turn."""
    if hasattr(result, "tolist"):  # a tensor of torch, or an array of numpy
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        result = [0.0] * (num_turns - 1) + [result]
    for part in result:
        if isinstance(part, BaseException):
            raise part
    try:
        rewards = [float(reward) for reward in result]
    except (TypeError, ValueError):
        rewards = []
    if len(rewards) != num_turns or not all(abs(reward) < 1e30 for reward in rewards):
        raise ValueError(f"not {num_turns} finite rewards: {result!r:.80}")
    return rewards


# == 13. RECOVERY ====
# Problem. A run takes days; a machine or the trainer fails sooner, or a job's time is over. With
#   the weights alone it goes on as another run: Adam's moments are 0, and prompts are skipped or
#   drawn twice.
# Rule. A checkpoint is one file: the trainer's weights and moments in fp32 (and a critic's), which
#   prompts were drawn and which were in flight, and the log. It is synced to disk before it gets
#   its name: half a file has none. No random state is saved: a prompt's number seeds its samples.
# Cost. Up to three files of 12 bytes per parameter (a weight, two moments). The trainer waits for
#   each. Steps since the newest are made again.
#
# By example, a checkpoint after step 50, and a death during step 57:
#
#   weights, moments     those after step 50; steps 51 to 56 are made again
#   prompts in flight    groups in flight at step 50 are sampled again, before others
#   synchronous          the same prompts, samples and sums: bit for bit the same run
#   asynchronous         the same prompts; the samples and their order differ


class Checkpoints:
    """The newest two checkpoints of a folder. Raises UsageError if another run uses it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        # The kernel unlocks it when this process ends.
        self.lock = open(folder / "lock", "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"--checkpoint {folder}: another run uses it") from None

    def paths(self) -> list[Path]:
        """The newest first."""
        return sorted(self.folder.glob("step_*.pt"), reverse=True)

    def newest(self) -> tuple[str, Progress]:
        """The path of the newest checkpoint that is intact, or "", and its progress."""
        for path in self.paths():
            try:
                return str(path), read_progress(path)
            except OSError:  # the file may be intact
                raise
            except Exception as error:  # of many types: any content
                print(f"{path} is damaged: {error}")
                path.rename(path.with_suffix(".damaged"))
        return "", Progress()

    async def save(self, run: Run) -> bool:
        """The trainer writes a checkpoint. Returns False if it could not."""
        path = self.folder / f"step_{run.version:08}.pt"
        try:
            progress = progress_state(run.progress)
            await finished(run.trainer.request(write_checkpoint, str(path), progress))
        except ActorError as error:
            print(f"step {run.version} is not saved: {cause_of(error)}")
            return False
        for old in self.paths()[2:]:
            old.unlink()
        return True


def progress_state(progress: Progress) -> Record:
    """The progress as a dict. Groups in flight move to `again`. asdict breaks a Counter."""
    requeued = sorted(progress.in_flight | {*progress.requeued})
    return asdict(replace(progress, requeued=requeued, in_flight=set(), ended=dict(progress.ended)))


def read_progress(path: Path) -> Progress:
    """torch.save writes a zip archive. Raises if a checksum in it does not match."""
    with zipfile.ZipFile(path) as archive:
        damaged = archive.testzip()
    if damaged:
        raise ValueError(f"wrong checksum of {damaged}")
    state = torch.load(path, mmap=True, map_location="cpu")["progress"]
    return Progress(**state | {"in_flight": set(), "ended": Counter(state["ended"])})


def write_checkpoint(trainer: Trainer, path: str, progress: Record) -> None:
    """Runs in each rank: all gather the state, and rank 0 writes it."""
    learner: Any = trainer.learner
    full = dcp.StateDictOptions(full_state_dict=True)
    owners = (learner.policy.model, learner.optimizer)
    weights, moments = dcp.get_state_dict(*owners, options=full)
    state = {"progress": progress, "weights": weights, "moments": moments}
    state["advantages"] = {}
    if hasattr(learner.advantages, "state"):  # a critic
        state["advantages"] = learner.advantages.state()
    if learner.rank == 0:
        write_durably(Path(path), state)


def write_durably(path: Path, state: Record) -> None:
    """Replaces a file: after a crash it has the old or the new content."""
    beside = path.with_name("new")  # of a killed process: the next one replaces it
    try:
        with open(beside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except RuntimeError as error:  # hides the error of the file
        raise error.__context__ or error from None
    finally:
        beside.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)  # its name
    os.close(folder)


def restore(trainer: Trainer, path: str) -> None:
    """Runs in each rank: loads weights, moments and critic, and publishes."""
    learner: Any = trainer.learner
    state = torch.load(path, map_location="cpu")
    full = dcp.StateDictOptions(full_state_dict=True)
    model = learner.policy.model
    dcp.set_model_state_dict(model, state["weights"], options=full)
    load = partial(dcp.set_optimizer_state_dict, options=full)
    if trainer.version:  # else there are none
        load(model, learner.optimizer, state["moments"])  # mechanism: recovery
    for group in learner.optimizer.param_groups:
        group["lr"] = learner.cfg.lr  # the flag may have changed
    if state["advantages"] and learner.cfg.advantage == "critic":
        learner.advantages.load(state["advantages"])
    trainer.writer.publish(trainer.version)
    trainer.writer.wait()


async def train_saved(
    run: Run, checkpoints: Checkpoints, evaluate: Callable[[], Awaitable[Any]]
) -> None:
    """Trains until step cfg.steps. Saves and evaluates at multiples of save_every, eval_every.

    With --checkpoint, a run that is cancelled, or that an error ends, is saved. Without it the
    files are for restarts by this command only.
    """
    cfg = run.cfg
    intervals = (cfg.save_every, cfg.eval_every or cfg.steps)

    async def pause(step: int) -> None:
        if step % cfg.save_every == 0 or (cfg.checkpoint and step == cfg.steps):
            await checkpoints.save(run)
        if cfg.eval_every and step % cfg.eval_every == 0:
            await evaluate()

    async with AsyncExitStack() as stack:
        train = partial(train_sync, run)
        if cfg.max_staleness:
            buffer = await stack.enter_async_context(generating(run, cfg.max_staleness))
            train = partial(learn, buffer)
        try:
            while run.version < cfg.steps:
                multiples = [(run.version // n + 1) * n for n in intervals]  # next
                step = min(cfg.steps, *multiples)
                await train(step - run.version)
                await pause(step)
        except (CancelledError, UsageError, RunError):
            if cfg.checkpoint and await checkpoints.save(run):
                print(f"saved after step {run.version}")
            raise


async def with_restarts(
    checkpoints: Checkpoints,
    make_run: Callable[[Progress], Run],
    work: Callable[[Run], Awaitable[Any]],
    load: Callable[[Trainer, str], None] = restore,
) -> Any:
    """Calls work(run), again after a loss. Five losses without a new checkpoint raise the error."""
    losses: Counter[int] = Counter()  # by the step of the checkpoint
    while True:
        path, progress = await asyncio.to_thread(checkpoints.newest)
        run = make_run(progress)
        first = run.version
        try:
            await run.begin()
            if path:
                await run.trainer.request(load, path)
            return await work(run)
        except (ReplicaLost, ActorError, SupervisionError) as error:
            task: Any = asyncio.current_task()
            if task.cancelling():  # a signal came, too
                raise CancelledError from error
            await sleep(1)  # a detector sees a death by then
            losses[first] += 1
            # A generator that pulls from a dead trainer raises, too: no bug.
            is_lost = isinstance(run.trainer.error, ReplicaLost)
            is_bug = isinstance(error, ActorError) and not is_lost
            if losses[first] == 5 or is_bug:
                raise
            print(f"{cause_of(error)}: going on from the newest checkpoint")
        finally:
            await run.close()


# -- measurement ---


def weights_of(trainer: Trainer) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in trainer.learner.weights]


def restore_weights(trainer: Trainer, path: str) -> None:
    restore(trainer, path)
    trainer.learner.optimizer.state.clear()  # Adam's moments


async def train_killed(
    report: Report, cfg: Config, killed_after: int, load: Callable[[Trainer, str], None]
) -> tuple[Progress, list[Tensor]]:
    """Trains. killed_after: the step after which the trainer is killed once, or 0."""
    checkpoints = Checkpoints(report.folder / f"run_{time.monotonic_ns()}")
    places = (report.pool, report.pool, report.folder)

    async def work(run: Run) -> tuple[Progress, list[Tensor]]:
        tasks = [train_saved(run, checkpoints, run.evaluate)]
        if killed_after and run.version == 0:
            tasks.append(inject_fault(run, run.trainer, killed_after, signal.SIGKILL))
        await gather(*tasks)
        return run.progress, await run.trainer.request(weights_of)

    return await with_restarts(checkpoints, partial(Run, cfg, *places, Factories()), work, load)


@stage(instead="pass")
async def demo_recovery(report: Report) -> None:
    """A run whose trainer dies goes on from a checkpoint, bit for bit, and skips no prompt.

    12 synchronous steps: undisturbed; killed at random; killed, and resumed without moments.
    """
    cfg = replace(demo_config(report.cfg), steps=12, save_every=4, max_staleness=0, sft_steps=0)
    step = random.randint(5, 10)
    kinds = {
        "undisturbed": (0, restore),
        f"killed after step {step}": (step, restore),
        "killed, no moments": (step, restore_weights),
    }
    found = {}
    for kind, (killed_after, load) in kinds.items():
        found[kind] = await train_killed(report, cfg, killed_after, load)
    (expected, weights), *_ = found.values()
    rows = []
    for kind, (progress, others) in found.items():
        pairs = zip(weights, others)
        difference = max(float((one - other).abs().max()) for one, other in pairs)
        row = {"trainer": kind, "drawn": progress.num_drawn}
        rows.append({**row, "difference": difference})
    report.table(rows)
    _, killed, forgetful = rows
    moved = abs(killed["drawn"] - expected.num_drawn)
    report.check("largest difference of a weight", killed["difference"], "==", 0)
    report.check("the same without moments", forgetful["difference"], ">", 0)
    report.check("prompts skipped or drawn again", moved, "==", 0)


# == YOUR OWN RUN ====
# --train, --evaluate and --export share the folder of --checkpoint. Its files:
#
#   flags.json    of the newest --train; defaults for the flags that a later command omits
#   model/        version 0, after supervised steps
#   step_*.pt     the newest two checkpoints (section 13)
#   preferences.jsonl   comparisons (section 15)
#   lock          held by the process that uses the folder

# Flags of a command, which flags.json does not keep.
OF_COMMAND = """stage only list train evaluate export hosts worker checkpoint log json
    report""".split()


def with_saved_flags(given: Record) -> Record:
    """Adds the saved flags of --checkpoint. A saved model replaces --model."""
    folder = Path(given.get("checkpoint", "")).resolve()
    if not (given.get("checkpoint") and (folder / "flags.json").is_file()):
        return given
    found = json.loads((folder / "flags.json").read_text())
    saved = {each.name: found[each.name] for each in fields(Config) if each.name in found}
    if (folder / "model").is_dir():
        saved["model"] = str(folder / "model")
        given = {name: value for name, value in given.items() if name != "model"}
    return saved | given


def save_flags(cfg: Config, folder: Path) -> None:
    flags = {name: value for name, value in asdict(cfg).items() if name not in OF_COMMAND}
    for name in ("model", "task", "reward", "preferences"):
        is_folder = name == "model" and os.path.isdir(flags[name])
        if is_folder or re.search(r"\.(jsonl|py:\w+)$", flags[name]):
            flags[name] = os.path.abspath(flags[name])  # for commands in other folders
    (folder / "flags.new").write_text(json.dumps(flags, indent=1))
    os.replace(folder / "flags.new", folder / "flags.json")


def verify(policy: Policy, name: str) -> None:
    """Raises UsageError if a trainer's pass disagrees with a short rollout (section 9)."""
    probe = copy.copy(policy)
    probe.dtype = torch.float32
    probe.graphs = copy.copy(policy.graphs)
    probe.max_new_tokens = 4
    prompts = [Prompt(number, (user_turn("a " * number, ""),)) for number in (1, 8)]
    where = f"--model {name}: rollouts"
    found = called(where, lambda: recompute_logprobs(probe, rollout(probe, prompts, 2, 0)))
    if not float(k3(*found).max()) < 1e-6:
        raise UsageError(f"{where} and the trainer's pass disagree")


def export(trainer: Trainer, folder: str) -> None:
    """Writes a folder that transformers loads: model and tokenizer."""
    model = trainer.policy.model
    state = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    if trainer.learner.rank == 0:
        model.save_pretrained(folder, state_dict=state)
        trainer.policy.tokenizer.save_pretrained(folder)


async def train_and_evaluate(run: Run, checkpoints: Checkpoints) -> Record:
    """Trains until step cfg.steps; evaluates before and after."""
    progress = run.progress
    if progress.rows:
        print(f"going on after step {run.version}")
    first = run.version
    evaluate = partial(evaluate_pass_at_k, run, 0)
    if not progress.heldout:
        await evaluate()
    start_s = time.time()
    try:
        async with TaskGroup() as tasks:  # an error of one ends the other
            tasks.create_task(narrate(run))
            await train_saved(run, checkpoints, evaluate)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    seconds = time.time() - start_s
    versions = [version for version, _ in progress.heldout]
    if versions[-1] != run.version:
        await evaluate()
    accuracies = [accuracy for _, accuracy in progress.heldout]
    found = {"steps": len(progress.rows), "seconds": seconds, **progress.counts()}
    found |= {"heldout_before": accuracies[0], "heldout_after": accuracies[-1]}
    for name in ("staleness", "k3"):
        found[f"{name}_max"] = max(row[name] for row in progress.rows)
    num_tokens = sum(row["num_tokens"] for row in progress.rows[first:])
    found["tokens_per_s"] = num_tokens / seconds
    found["workers_replaced"] = sum(len(service.failures) for service in run.services)
    return found


async def narrate(run: Run) -> None:
    """Prints and logs each step. The log begins with the checkpoint's steps."""
    rows = run.progress.rows
    log_path = run.cfg.log or os.devnull
    with open(log_path, "w", buffering=1) as log:  # one line at a time
        for row in rows:
            log.write(json.dumps(row) + "\n")
        for number in range(len(rows), run.cfg.steps):
            while number == len(rows):
                await sleep(0.01)
            log.write(json.dumps(rows[number]) + "\n")
            print(step_line(rows[number]))


def step_line(row: Record) -> str:
    line = f"step {row['step']:4}  reward {row['reward']:.3f}  staleness {row['staleness']}"
    line += f"  k3 {row['k3']:.1e}  entropy {row['entropy']:.2f}  grad {row['grad_norm']:.2g}"
    line += f"  {row['tokens_per_s']:.0f} tokens/s"
    for name in ("dropped", "lost", "truncated", "too_long", "not_scored"):
        if row[name]:
            line += f"  {name} {row[name]:.3g}"
    return line if row["step"] % 10 != 1 else f"{line}\n           {row['sample']}"


async def evaluate_pass_at_k(run: Run, num_samples: int) -> dict[str, float | None]:
    """Held-out accuracy: greedy, of one sample (pass@1), of any of k (pass@k)."""
    found = {"greedy": await run.evaluate()}
    groups = []
    if num_samples:
        groups = await run.sample_and_score(run.held_out, num_samples, seed=0)
    groups = [group for group in groups if len(group.episodes) == num_samples]
    right = [[sum(e.rewards) > 0.999 for e in group.episodes] for group in groups]
    if right:
        found["pass@1"] = fmean(fmean(group) for group in right)
        found[f"pass@{num_samples}"] = fmean(any(group) for group in right)
    if run.num_too_long:
        print(f"{run.num_too_long} episodes did not fit the context")
    shown = [f" {name} {value:.3f}" for name, value in found.items() if value is not None]
    print(f"of {len(run.held_out)} held-out prompts:", *shown or [" none scored"])
    return found


# == ON GPUS ====
# Problem. What is cheap on a CPU is not on a GPU. A copy of each tensor into ordinary memory moves
#   1 GB/s where the bus has 55. Python starts 500 kernels per token, and the GPU waits for it. The
#   logits of 8,192 tokens over a vocabulary of 150,000 take 5 GB in fp32, several times.
# Rule. Move one block, not 300 tensors. Record the kernels of a token once, then replay them.
#   Compute logits in chunks, and where memory is short activations again in the backward pass.
# Cost. A block of weights on each side, and a cache of fixed length for each shape of a batch.
#
#   trainer     weights --cast--> block --one copy, beside the next step--> slot
#   generator   slot --one copy--> block = its weights; then it gives its lease back
#
# Trainer rank r computes on GPU r, generator i on GPU trainers + i, modulo their number. With one
# trainer and three generators:
#
#   1 GPU    all on 0
#   2 GPUs   trainer 0   generators 1 0 1
#   8 GPUs   trainer 0   generators 1 2 3

# -- devices ---


def device_of(num_gpus: int, number: int, num_trainers: int = 0) -> str:
    """Returns the device of a trainer's rank, or with num_trainers of a generator."""
    return f"cuda:{(num_trainers + number) % num_gpus}" if num_gpus else "cpu"


def on_device(cfg: Config, number: int, num_trainers: int = 0) -> Config:
    """Returns the configuration of one worker, and makes its device the current one."""
    if cfg.device != "cuda":
        return cfg
    # A worker host has no trainers, but perhaps GPUs.
    before = 0 if HOST_FOLDER in environ else num_trainers
    device = device_of(torch.cuda.device_count(), number, before)
    if device != "cpu":
        torch.cuda.set_device(device)
    return replace(cfg, device=device)


def with_device(cfg: Config) -> Config:
    """Resolves --device and --dtype: GPUs if there is one for each rank, and bfloat16 on them."""
    num_gpus = torch.cuda.device_count()
    if cfg.device == "cuda" and num_gpus < cfg.trainers:
        raise UsageError(f"--device cuda: {num_gpus} GPUs for {cfg.trainers} trainers")
    device = cfg.device or ("cuda" if num_gpus >= cfg.trainers else "cpu")
    dtype = cfg.dtype or ("bfloat16" if device == "cuda" else "float32")
    return replace(cfg, device=device, dtype=dtype)


def describe_device(worker: Any) -> str:
    """Returns where a trainer or generator computes, and the memory there."""
    device = worker.policy.device
    if device.type == "cpu":
        return f"{device}, {torch.get_num_threads()} threads"
    memory = [f"{size / 1e9:.0f}" for size in torch.cuda.mem_get_info(device)]
    return f"{device}, {torch.cuda.get_device_name(device)}, {' of '.join(memory)} GB free"


async def print_devices(run: Run) -> None:
    """Prints a line for each rank of the trainer and each generator."""
    for replica in [*run.trainer.ready(), *run.generators.ready()]:
        places = await replica.worker.run.call(describe_device)
        for place in places.values():
            print(f"{replica.name}, process {replica.processes.ids}: {place}")


def free_gpu() -> None:
    """Frees GPU memory that torch keeps for later: other processes need it."""
    if "torch" in sys.modules and torch.cuda.is_initialized():
        gc.collect()  # a policy and its graphs refer to each other
        torch.cuda.empty_cache()


# -- weights as one block ---


def register(arena: Arena) -> None:
    """Pins the slots for CUDA. Copies of memory that is not pinned take three times as long."""
    address = arena.slots.data_ptr()
    cudart: Any = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(address, arena.slots.nbytes, 0))
    if error:  # perhaps a limit on locked memory
        print(f"the arena is not pinned (CUDA error {error}), so its copies are slower")
        with suppress(RuntimeError):  # of the next kernel, which is told of it, too
            torch.zeros(1, device="cuda")
    else:
        weakref.finalize(arena, cudart.cudaHostUnregister, address)


class BlockWriter(WeightWriter):
    """A writer for tensors on a GPU, or with another dtype than the slot's.

    `publish` casts them into a block; then they may change. One copy moves the block into a slot:
    on a CPU a memmove, on a GPU on a stream of its own, beside the next step.
    """

    def __init__(self, tensors: Weights, num_readers: int, dtype: torch.dtype) -> None:
        self.sources = [tensor.detach() for tensor in tensors.values()]
        # Copies become the views of the block. [slot bytes]
        copies = {name: tensor.detach().to(dtype, copy=True) for name, tensor in tensors.items()}
        super().__init__(copies, num_readers)
        if self.block.is_cuda:
            register(self.arena)
            self.stream = torch.cuda.Stream(self.block.device)
            self.cast = torch.cuda.Event()

    def publish(self, version: int) -> None:
        self.wait()  # the copy of the last version still reads the block
        # A GPU casts after the step and before the next one, in the order of the stream.
        torch._foreach_copy_([*self.tensors.values()], self.sources)  # pyright: ignore
        if self.block.is_cuda:
            self.cast.record()
        super().publish(version)

    def write(self, slot: Tensor) -> None:
        """Fills a slot. Returns when the bytes are there: `commit` follows."""
        if self.block.is_cpu:
            super().write(slot)
            return
        # This thread waits for the copy; the stream of the next step does not.
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(self.cast)
            slot.copy_(self.block)


class BlockReader(WeightReader):
    """A reader with tensors on a GPU, which are views of a block there.

    One copy fills the block, and then the lease is given back. A slot is leased while it is read,
    as before, and each reader leases one at most: readers + 2 slots are enough.
    """

    def __init__(self, handle: ArenaHandle, reader: int, tensors: Weights) -> None:
        super().__init__(handle, reader, tensors)
        # The addresses of the weights then stay the same, as a CUDA graph needs.
        self.block = move_into_block(tensors, handle)
        if self.block.is_cuda:
            register(self.arena)

    def read(self, slot: int) -> None:
        """Fills the block, and gives the lease back when its bytes are there."""
        self.block.copy_(self.arena.slots[slot])  # returns after the copy
        with self.arena.locked():
            self.arena.words[Arena.LEASES + self.reader] = Arena.NOTHING
        # From now on a newer version may be written into this slot.
        self.slot = Arena.NOTHING


def writer_of(tensors: Record, num_readers: int, dtype: torch.dtype) -> WeightWriter:
    """Returns the writer for tensors of this kind."""
    first = next(iter(tensors.values()))
    if isinstance(first, dtensor.DTensor):
        return ShardedWriter(tensors, num_readers, dtype)
    if first.is_cpu and first.dtype == dtype:
        return WeightWriter(tensors, num_readers)
    return BlockWriter(tensors, num_readers, dtype)


def reader_of(handle: ArenaHandle, reader: int, tensors: Weights) -> WeightReader:
    """Returns the reader for tensors of this kind."""
    is_cuda = next(iter(tensors.values())).is_cuda
    return (BlockReader if is_cuda else WeightReader)(handle, reader, tensors)


# -- decoding by a graph ---


class GraphDecoder(Decoder):
    """Decodes by a CUDA graph: the kernels of a token are recorded once, and start all at once.

    A graph has fixed shapes and addresses. So the cache has a fixed length; rows that have ended
    stay in the batch; weights change in place. Causality hides the columns that are not used yet.
    Without a GPU, the same passes run without a graph.
    """

    def __init__(self, policy: Policy, prefilled: Decoder, length: int) -> None:
        """length: of the cache, in columns."""
        self.policy = policy
        self.mask = prefilled.mask.new_ones(len(prefilled.mask), length)
        self.positions = torch.zeros_like(self.mask[:, :1])
        self.ids = torch.zeros_like(self.positions)
        # Layers with a sliding window get a whole cache, too; the mask has the window.
        layer: Any = import_module("transformers.cache_utils").StaticLayer
        layers = [layer(length) for _ in prefilled.cache.layers]
        for fixed, grown in zip(layers, prefilled.cache.layers):
            fixed.lazy_initialization(grown.keys, grown.values)
        self.cache = transformers.Cache(layers=layers)
        self.begin(prefilled)
        if policy.device.type == "cuda":
            self._capture()
            self.begin(prefilled)

    def begin(self, prefilled: Decoder) -> None:
        """Takes over the rows of a decoder, as many as before, with other ids."""
        width = prefilled.mask.shape[1]
        self.cache.reset()  # a masked nan would still spoil a sum
        for fixed, grown in zip(self.cache.layers, prefilled.cache.layers):
            # Of a sliding window there are only the last columns.
            columns = slice(width - grown.keys.shape[2], width)
            fixed.keys[:, :, columns] = grown.keys  # [B, heads, columns, size]
            fixed.values[:, :, columns] = grown.values
            fixed.cumulative_length.fill_(width)
        self.mask.fill_(1)
        self.mask[:, :width] = prefilled.mask
        self.positions.copy_(prefilled.mask.sum(1, keepdim=True) - 1)
        self.logits = prefilled.logits
        self.rows = torch.arange(len(self.mask), device=self.mask.device)

    def _capture(self) -> None:
        """Records a pass. Another one runs before, so that libraries allocate what they need."""
        self._pass()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.recorded = self._pass()

    def _pass(self) -> Tensor:
        """The next logits of all rows, [B, V]. The cache and the positions advance."""
        self.positions.add_(1)
        inputs = {"attention_mask": self.mask, "cache": self.cache, "use_cache": True}
        if self.policy.takes_positions:
            inputs["position_ids"] = self.positions
        return self.policy.forward(self.ids, logits_to_keep=1, **inputs)[:, -1]

    def append(self, rows: list[list[int]]) -> None:
        """Feeds one id to each row that goes on."""
        self.ids[self.rows] = torch.tensor(rows, device=self.ids.device)
        if self.ids.is_cuda:
            self.graph.replay()
        else:
            self.recorded = self._pass()
        self.logits = self.recorded[self.rows]

    def select(self, rows: list[int]) -> None:
        """Names the rows that go on."""
        self.rows = self.rows[rows]


def decoder_of(policy: Policy, rows: list[list[int]]) -> Decoder:
    """Returns a decoder of these rows: by a graph, if the policy keeps graphs.

    To record a graph takes as long as ten tokens, so policy.graphs keeps some, by their shape.
    """
    prefilled = Decoder(policy, rows)
    if policy.graphs is None:
        return prefilled
    width = prefilled.mask.shape[1] + policy.max_new_tokens
    shape = (len(rows), ceil(width / 64) * 64)  # rounded up: one length for many prompts
    try:
        if shape in policy.graphs:
            policy.graphs[shape].begin(prefilled)
        else:
            if len(policy.graphs) == 4:
                policy.graphs.clear()  # their caches take memory
            policy.graphs[shape] = GraphDecoder(policy, prefilled, *shape[1:])
        return policy.graphs[shape]
    except (AttributeError, RuntimeError) as error:  # a layer without keys, or a failed capture
        print(f"decoding without a CUDA graph: {error}")
        policy.graphs = None
        return prefilled


# -- memory of a step ---


def chunked_logprobs(policy: Policy, ids: Tensor, is_sampled: Tensor) -> tuple[Tensor, Tensor]:
    """As token_logprobs, but with the logits of some tokens at a time, in both passes.

    The last layer, the head, here returns [N, 2] instead of logits. The model's own forward runs,
    so that FSDP's hooks do, too. `verify` notices a model that changes its logits afterwards.
    """
    columns = is_sampled.any(0).nonzero().flatten()
    chosen = ids[:, 1:][is_sampled][:, None]  # [N, 1]
    head: Any = policy.model.get_output_embeddings()
    # 64 MiB in fp32; on a GPU, where small products are slow, 512 MiB.
    size = (1 << (27 if ids.is_cuda else 24)) // len(head.weight) + 1

    def of_chunk(hidden: Tensor, weight: Tensor, bias: Any, chosen: Tensor) -> Tensor:
        """[n, H] -> [n, 2]: log-probabilities and entropies."""
        logits = torch.nn.functional.linear(hidden, weight, bias)  # [n, V]
        return torch.stack(logprobs_of(logits, chosen, policy), 1)

    def in_chunks(hidden: Tensor) -> Tensor:
        """[B, columns, H] -> [N, 2]. The backward pass computes each chunk again."""
        parts = zip(hidden[is_sampled[:, columns]].split(size), chosen.split(size))
        how = partial(
            import_module("torch.utils.checkpoint").checkpoint, of_chunk, use_reentrant=False
        )
        return torch.cat([how(part, head.weight, head.bias, some) for part, some in parts])

    head.forward = in_chunks
    try:
        found = policy.forward(ids[:, :-1], use_cache=False, logits_to_keep=columns)
    finally:
        del head.forward  # the method of its class is back
    logp, entropy = found.unbind(1)
    return logp, entropy


def recompute_activations(model: Any) -> None:
    """Keeps only the input of each layer; the backward pass computes the rest again."""
    model.activation_checkpointing_enable({"use_reentrant": False})
    layer_class: Any = import_module("transformers.modeling_layers").GradientCheckpointingLayer
    # The layers need training mode for it; what is in them does not, so there is no dropout.
    for layer in model.modules():
        if isinstance(layer, layer_class):
            layer.training = True
            if isinstance(getattr(layer, "dropout", None), float):  # not a module
                layer.dropout = 0.0


class UserLearner(Learner):
    """A learner of a large model: one cast per update; on a GPU less memory, and a fused Adam."""

    def __init__(self, policy: Policy, cfg: Config, *args: Any) -> None:
        super().__init__(policy, cfg, *args)
        if policy.device.type == "cpu":
            return
        self.optimizer = torch.optim.Adam(self.weights, cfg.lr, fused=True)
        # In fp32: weights, gradients and two moments; in the forward dtype: a copy.
        num_bytes = 18 * sum(weight.numel() for weight in self.weights) / self.num_ranks
        if num_bytes > max(torch.cuda.mem_get_info()) / 3:
            recompute_activations(policy.model)

    def _update(self, *args: Any) -> StepStats:
        """An update, with one cast of the weights that all its passes share, backward ones too."""
        policy = self.policy
        if policy.model.dtype == policy.dtype:
            return super()._update(*args)
        # Gradients pass through the copies to the weights in fp32.
        copies = {name: p.to(policy.dtype) for name, p in policy.model.named_parameters()}
        swap: Any = torch.nn.utils.stateless._reparametrize_module
        with swap(policy.model, copies, tie_weights=True):
            return super()._update(*args)


# == 14. CRITIC ====
# Problem. A user does not have the same conversation eight times, so there is no group. Compared
#   with the mean of the batch, any response to a generous user is good.
# Rule. A second network, the critic, predicts V, the sum of later rewards, before each token. The
#   advantage of a token is a target minus V, normalized.
# Cost. A network as large as the policy, and one trainer rank only. Where a prompt can be sampled
#   several times, use a group, which needs none of this.
#
# The target is GAE (Schulman 2016). Later rewards are an unbiased target with noise; V of the next
# token is a biased one with less noise. Lambda weights the former: 1 (no V) in a turn, 0.8 between
# turns. So all tokens of a turn share one target: its reward plus V + 0.8 * advantage at the first
# token of the next turn. By example, two turns:
#
#   token  turn  reward    V  target                       advantage = target - V
#   a         1          0.4  0.0 + 0.7 + 0.8 * 0.2 = 0.86   0.46
#   b         1     0.0  0.5                          0.86   0.36
#   c         2     0.9  0.7                          0.90   0.20

# The first steps train the critic only: with an untrained V the policy collapses.
CRITIC_ALONE = 8


def value_network(policy: Policy, cfg: Config) -> Any:
    """A network like the policy, in fp32, but with one number for each token, at first 0."""
    config = copy.deepcopy(policy.model.config)
    if type(config) not in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        raise UsageError(f"no value network for {config.model_type}")
    config.num_labels = 1
    # With the usual 0.02 a narrow network hardly depends on its input.
    config.initializer_range = 0.05
    torch.manual_seed(cfg.seed)
    auto = transformers.AutoModelForTokenClassification
    if cfg.model:
        network = auto.from_pretrained(cfg.model, config=config, dtype=torch.float32)
    else:
        network = auto.from_config(config)
    # The head is the last layer. Its bias is 0 already.
    *_, head = [layer for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
    torch.nn.init.zeros_(head.weight)
    return network.to(policy.device).eval()


def gae(episode: Episode, values: list[float]) -> list[float]:
    """The advantage of each token, 0 where not sampled. values: V before each token."""
    found = [0.0] * len(episode.ids)
    target = 0.0
    for turn in range(len(episode.rewards), 0, -1):
        target += episode.rewards[turn - 1]
        places = [i for i, t in enumerate(episode.turn_of) if t == turn]
        for place in places:
            found[place] = target - values[place]
        target = values[places[0]] + 0.8 * found[places[0]]
    return found


class Critic:
    """Computes advantages for a Learner, from the episodes of each step."""

    def __init__(self, policy: Policy, cfg: Config) -> None:
        self.network = value_network(policy, cfg)
        lr = 1e-5 if cfg.model else 3e-3
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr)
        self.tokens_per_micro_batch = cfg.tokens_per_micro_batch
        self.num_calls = 0

    def __call__(self, episodes: list[Episode]) -> list[list[float]]:
        """Advantages, normalized over the batch. Then trains the critic on the targets."""
        device = self.network.device
        ids = padded([e.ids for e in episodes], device)  # [B, T]
        is_sampled = padded([e.turn_of for e in episodes], device) > 0
        parts = torch.arange(len(ids)).split(max(1, self.tokens_per_micro_batch // ids.shape[1]))
        with torch.no_grad():
            values = torch.cat([self._values(ids[rows]) for rows in parts])
        gains = [gae(e, row) for e, row in zip(episodes, values.tolist())]
        advantage = padded(gains, device)
        targets = values + advantage
        for _ in range(2):  # two updates per batch, so that V follows the policy
            for rows in parts:
                errors = (self._values(ids[rows]) - targets[rows])[is_sampled[rows]]
                (errors.square().sum() / is_sampled.sum()).backward()
            self.optimizer.step()  # mechanism: critic
            self.optimizer.zero_grad()
        self.num_calls += 1
        scaled = advantages(advantage[is_sampled], "group")  # [N], one group
        advantage[is_sampled] = scaled * (self.num_calls > CRITIC_ALONE)
        rows = zip(episodes, advantage.tolist())
        return [row[: len(episode.ids)] for episode, row in rows]

    def _values(self, ids: Tensor) -> Tensor:
        """[B, T]: V before each token, computed at the one before."""
        found = self.network(ids[:, :-1], use_cache=False).logits.squeeze(-1)
        return torch.nn.functional.pad(found, (1, 0))

    def state(self) -> Record:
        return {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "num_calls": self.num_calls,
        }

    def load(self, state: Record) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.num_calls = state["num_calls"]


# -- measurement ---


def lone_run(learner: Learner, prompts: Iterator[Prompt]) -> Iterator[list[Episode]]:
    """A synchronous run in one process. The caller scores what it yields."""
    cfg = learner.cfg
    for _ in range(cfg.steps):
        drawn = list(islice(prompts, cfg.prompts_per_step))
        seed = drawn[0].number
        episodes = rollout(learner.policy, drawn, cfg.group_size, seed)
        yield episodes
        learner.step(episodes)


def train_with_baseline(worker: Worker, cfg: Config, policy: Policy) -> Record:
    """Trains on one turn of `repeat`. Returns a row of the table.

    The reward is the share of right letters, plus -1.5 to 1.5 by the first letter asked for:
    "acf" -> "acf" gets 1 - 1.5 = -0.5, and "pcf" -> "aaa" gets 0 + 1.5 = 1.5.
    """
    task = letter_task(cfg)
    critic = None
    if cfg.advantage == "critic":
        critic = Critic(policy, cfg)
    learner = Learner(policy, cfg, advantages=critic)
    shares = []
    prompts = (replace(p, turns=p.turns[:1]) for p in training_prompts(task))
    for episodes in lone_run(learner, prompts):
        for episode in episodes:
            right = episode.prompt.turns[0].answer
            share = task.grade(right, episode.responses[0])
            episode.rewards = [share + LETTERS.index(right[0]) / 5 - 1.5]
            shares.append(share)
            if cfg.advantage == "batch":
                episode.prompt = episodes[0].prompt  # makes the batch one group
    return {"baseline": cfg.advantage, "right letters": fmean(shares[-1000:])}


@stage(instead="pass")
async def demo_critic(report: Report) -> None:
    """With one response per prompt, a learned value is a better baseline than the batch's mean."""
    cfg = Config(
        seed=report.cfg.seed,
        steps=40,
        prompts_per_step=128,
        group_size=1,
        max_new_tokens=4,
        epochs=2,
        lr=3e-3,
    )
    policy = Policy(cfg, torch.float32)
    warm_up = replace(cfg, prompts_per_step=16, lr=1e-3)
    Learner(policy, warm_up).sft(letter_task(cfg), num_steps=60)
    service = Service(Worker, 2, report.pool)
    await service.begin()
    runs = []
    for baseline in ("critic", "batch"):
        own = replace(cfg, advantage=baseline)
        runs.append(service.request(train_with_baseline, own, policy))
    rows = await gather(*runs)
    report.table(rows)
    critic, batch = rows
    gain = critic["right letters"] - batch["right letters"]
    report.check("right letters, critic - batch", gain, ">", 0.25)
    await service.close()


# == 15. REWARD MODEL ====
# Problem. For most of what people want there is no reward function. A network can learn which of
#   two responses people prefer, but it is right only about responses like the compared ones. The
#   policy finds others, to which it gives a high reward, and which people like less.
# Rule. Keep the policy where the reward model is right. Either its divergence from the first
#   version has a price (--kl), or people compare new responses now and then (--ask-every).
# Cost. A second network. With a price the policy gains less; comparisons take people's time.
#
# Bradley and Terry (1952): a response with score s is preferred to one with score t with
# probability sigmoid(s - t); the loss of a comparison is -log of it. By example, 1.0 is preferred
# to 0.2 with probability sigmoid(0.8) = 0.69. If it was, the loss is 0.37; if not, 1.17. Only
# differences matter: 101.0 and 100.2 have the same losses.
#
# High accuracy on old comparisons is no safeguard. If people want exactly one a in a response, they
# prefer "bab" to "bob", and "pan" to "pin". A network that counts each a is right about both. Then
# it rates "aaaa" highest, which nobody has compared.

Pair = list[Episode]  # chosen, rejected


def read_preferences(path: Path) -> list[tuple[Prompt, list[str]]]:
    """The prompt, the chosen and the rejected text of each line of a file, if it exists.

    A line: {"prompt": text or messages, "chosen": text, "rejected": text}. Raises UsageError.
    """
    found = []
    for where, line in lines_of(path) if path.is_file() else []:
        prompt = prompt_of(0, line, where)
        record = json.loads(line)
        texts = [record.get("chosen"), record.get("rejected")]
        if not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{where}: needs texts as chosen and rejected")
        found.append((prompt, texts))
    return found


class RewardModel:
    """Scores groups, and learns from preferences. A reward worker owns it.

    prefer(prompt, one, other): a number, above 0.5 if `one` is better.
    fresh_path: a file of new comparisons, for a replacement worker. No weights are saved.
    """

    def __init__(
        self, cfg: Config, prefer: Any = None, fresh_path: Path = Path(os.devnull)
    ) -> None:
        self.cfg = cfg
        self.prefer = prefer
        self.fresh_path = fresh_path
        self.policy = Policy(cfg, torch.float32)
        self.network = value_network(self.policy, cfg)
        self.policy.model.to("meta")  # frees its weights; only the tokenizer is used
        lr = 1e-5 if cfg.model else 1e-3
        self.optimizer = torch.optim.Adam(self.network.parameters(), lr)
        self.rng = random.Random(cfg.seed)
        self.num_groups = 0
        self.known: list[Pair] = []
        for path in (Path(cfg.preferences), fresh_path):
            for prompt, texts in read_preferences(path):
                self.known.append([episode_with(self.policy, prompt, [text]) for text in texts])
        for _ in range(4):  # epochs
            self.learn(self.known)

    def scores(self, episodes: list[Episode]) -> Tensor:
        """[B]: 4 * mean over the sampled tokens. A sum would favor long responses."""
        ids = padded([e.ids for e in episodes], self.policy.device)
        is_sampled = padded([e.turn_of for e in episodes], self.policy.device) > 0
        # Padding is on the right: a causal model does not see it.
        numbers = self.network(ids, use_cache=False).logits.squeeze(-1)  # [B, T]
        return 4 * (numbers * is_sampled).sum(1) / is_sampled.sum(1)

    def learn(self, pairs: list[Pair]) -> None:
        """One pass over the pairs, in random order."""
        longest = max([len(e.ids) for pair in pairs for e in pair], default=1)
        size = max(1, min(32, self.cfg.tokens_per_micro_batch // (2 * longest)))  # pairs
        order = self.rng.sample(pairs, len(pairs))
        for start in range(0, len(order), size):
            both = [e for pair in order[start : start + size] for e in pair]
            chosen, rejected = self.scores(both).view(-1, 2).T  # each [pairs]
            loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def ask(self, group: list[Episode]) -> list[Pair]:
        """Compares episodes 0 and 1, 2 and 3, up to 6 and 7, unless both are equal."""
        pairs = []
        with open(self.fresh_path, "a") as file:
            for one, other in zip(group[0:8:2], group[1:8:2]):
                if one.responses == other.responses:
                    continue
                is_first = self.prefer(one.prompt, one.responses, other.responses) > 0.5
                chosen, rejected = (one, other) if is_first else (other, one)
                record = {
                    "prompt": one.prompt.turns[0].messages,
                    "chosen": chosen.responses[0],
                    "rejected": rejected.responses[0],
                }
                file.write(json.dumps(record) + "\n")
                pairs.append([chosen, rejected])
        return pairs

    def __call__(self, asked: Asked) -> Rewards:
        """The rewards of a group: a score for the last turn."""
        group = [episode_with(self.policy, *said) for said in asked]
        with torch.inference_mode():
            scores = self.scores(group).tolist()
        self.num_groups += 1
        every = self.cfg.ask_every
        if every and self.num_groups % every == 0:
            fresh = self.ask(group)  # mechanism: reward_model
            self.known += fresh
            # Three old pairs for a new one, so that it forgets none.
            self.learn(fresh + self.rng.choices(self.known, k=3 * len(fresh)))
        zeros = [0.0] * (len(group[0].responses) - 1)
        return [[*zeros, score] for score in scores]


def divergence(reference: Policy, weight: float, batch: Batch, logp: Tensor) -> Tensor:
    """[N]: weight times k2 = (log p - log q)^2 / 2, where q is the reference.

    Over samples of p, the mean gradient of k2 is that of KL(p, q). That of log p - log q is 0.
    """
    with torch.no_grad():
        log_q, _ = token_logprobs(reference, batch.ids, batch.is_sampled)
    return weight * (logp - log_q).square() / 2


# -- measurement ---


@dataclass
class TasteTask(Task):
    """People like a response of three or four letters with exactly one a."""

    letters: LetterTask
    rng: random.Random

    def prompt(self, number: int) -> Prompt:
        return Prompt(number, self.letters.prompt(number).turns[:1])

    def grade(self, answer: Any, response: str) -> float:
        return float(len(response) >= 3 and response.count("a") == 1)

    def prefer(self, prompt: Prompt, one: list[str], other: list[str]) -> bool:
        """One answer in ten is wrong. Between equals a coin decides."""
        gain = self.grade("", one[0]) - self.grade("", other[0])
        return self.rng.random() < 0.5 + 0.4 * gain


def train_on_taste(worker: Worker, cfg: Config, policy: Policy, task: TasteTask) -> Record:
    """A row of the table. Skips the 250 prompts of the comparisons."""
    price = None
    if cfg.kl:
        price = partial(divergence, copy.deepcopy(policy), cfg.kl)
    model = RewardModel(cfg, task.prefer)
    liked = []
    learned = []
    prompts = islice(training_prompts(task), 250, None)
    for episodes in lone_run(Learner(policy, cfg, penalty=price), prompts):
        for group in groups_of(episodes):
            rewards: Any = model([(e.prompt, e.responses) for e in group])
            for episode, reward in zip(group, rewards):
                episode.rewards = reward
        liked.append(fmean(task.grade("", e.responses[0]) for e in episodes))
        learned.append(fmean(e.rewards[0] for e in episodes))
    liked = [fmean(liked[i : i + 5]) for i in range(len(liked) - 4)]  # of 5 steps
    return {
        "kl": cfg.kl,
        "ask every": cfg.ask_every,
        "liked, best": max(liked),
        "liked, end": liked[-1],
        "learned, rise": learned[-1] - learned[0],
    }


@stage(instead="fresh = []")
async def demo_reward_model(report: Report) -> None:
    """A policy exploits a learned reward; a price on divergence, or fresh preferences, holds it."""
    cfg = Config(
        seed=report.cfg.seed,
        steps=60,
        prompts_per_step=8,
        group_size=16,
        max_new_tokens=4,
        lr=1e-3,
        entropy=0.01,
        preferences=str(report.folder / "preferences"),
    )
    task = TasteTask(LetterTask(cfg.seed), random.Random(cfg.seed))
    policy = Policy(cfg, torch.float32)
    Learner(policy, cfg).sft(task, num_steps=60)
    drawn = list(islice(training_prompts(task), 250))
    model = RewardModel(cfg, task.prefer, Path(cfg.preferences))
    for group in groups_of(rollout(policy, drawn, 16, drawn[0].number)):
        model.ask(group)
    service = Service(Worker, 3, report.pool)
    await service.begin()
    runs = []
    for own in (cfg, replace(cfg, kl=0.4), replace(cfg, ask_every=2)):
        runs.append(service.request(train_on_taste, own, policy, task))
    rows = await gather(*runs)
    report.table(rows)
    nothing, price, fresh = rows
    fall = nothing["liked, best"] - nothing["liked, end"]
    report.check("fall of the liked share, without a remedy", fall, ">", 0.25)
    report.check("liked share at the end, with --kl", price["liked, end"], ">", 0.3)
    report.check("liked share at the end, with --ask-every", fresh["liked, end"], ">", 0.3)
    await service.close()


# == 16. HOSTS ====
# Problem. Shared memory and signals end at the edge of a machine. A failed host reports nothing,
#   and if the command dies, its processes on other hosts run on.
# Rule. Only generators run on worker hosts, as children of a process, the Monarch host. Unanswered
#   pings detect its loss (section 5); then another one starts. On each host a thread, the relay,
#   pulls versions (section 3) into an arena of that host (section 7). An actor, the outlet, leases
#   slots for relays.
# Cost. One transfer per version and host, an arena on each, and the work of a lost host.
#
#   machine of the command                    worker host
#   Trainer -> Arena <- lease - Outlet <----- relay -> Arena <- WeightReader, Generator
#                +------ bytes, RDMABuffer ---->+
#
# `--worker FOLDER` notes its address in a folder that all machines see; `--hosts FOLDER` reads it.

HOST_FOLDER = "MONARCH_RL_WORKER"  # environment variable: a host's folder
SILENCE_S = 5.0  # a host is lost without a ping
# Signals that end a command; not SIGHUP if nohup has it ignored.
ENDING = [
    number
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    if signal.getsignal(number) != signal.SIG_IGN
]

# PR_SET_PDEATHSIG (1): SIGKILL (9) when the parent ends, as in Monarch's processes.
WITH_PARENT = "import sys, ctypes; ctypes.CDLL(None).prctl(1, 9)\n"
MONARCH_HOST = """from monarch.actor import run_worker_loop_forever as run
run(address=sys.argv[1], ca="trust_all_connections")"""


def this_url() -> str:
    """The protocol and address by which others reach this machine."""
    address = environ.get("MONARCH_RL_ADDRESS") or socket.gethostname()
    if all(environ.get(f"HYPERACTOR_TLS_{name}") for name in ("CERT", "KEY", "CA")):
        return f"tls://{address}"
    print("tcp://, not tls://: anyone who reaches these ports can run code here")
    return f"tcp://{address}"


def serve_worker(folder: str, url: str) -> None:
    """--worker: restarts its Monarch host after each loss, until a signal. url: no port."""
    for number in ENDING:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    note = Path(folder) / url.rpartition("/")[-1]
    try:
        while True:
            run_host(note, url)
    finally:
        note.unlink(missing_ok=True)


def run_host(note: Path, url: str) -> None:
    """Runs a Monarch host until no ping comes for SILENCE_S (at first 305 s)."""
    # A new port: Monarch cannot attach to the address of a lost host again.
    with socket.create_server((note.name, 0)) as server:
        url += f":{server.getsockname()[-1]}"
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        pinged = Path(folder) / "pinged"
        pinged.touch()
        os.utime(pinged, (0, time.time() + 300))  # 300 s more for the first ping
        command = [sys.executable, "-c", WITH_PARENT + MONARCH_HOST, url]
        host = subprocess.Popen(command, env=environ | {HOST_FOLDER: folder, "TMPDIR": folder})
        write_note(note, url.encode())
        while host.poll() is None:
            time.sleep(0.1)
            if not pinged.exists() or time.time() - pinged.stat().st_mtime > SILENCE_S:
                host.kill()


def write_note(note: Path, content: bytes) -> None:
    """Writes a note; no reader finds a half of it."""
    hidden = note.with_name("." + note.name)
    hidden.write_bytes(content)
    hidden.replace(note)


def urls_in(folder: Path) -> list[str]:
    """The addresses of the worker hosts, from the notes in a folder."""
    found = []
    for note in folder.glob("[!.]*"):
        with suppress(FileNotFoundError):
            found.append(note.read_text())
    return found


class HostAgent(Actor):
    """One per process of a Monarch host. A ping touches a file that run_host watches."""

    @concurrent_endpoint
    async def ping(self) -> int:
        os.utime(Path(environ[HOST_FOLDER], "pinged"))  # raises once it is removed
        return os.getpid()

    @concurrent_endpoint
    async def end_host(self) -> None:
        Path(environ[HOST_FOLDER], "pinged").unlink(missing_ok=True)


@dataclass
class HostProcess(Processes):
    """A process on a worker host. All processes of a Monarch host end together."""

    agent: Any
    lost: asyncio.Future[str]  # why, for all processes of the host

    def deaths(self) -> list[Awaitable[str]]:
        return [until_unresponsive(self.agent, SILENCE_S), asyncio.shield(self.lost)]

    async def kill(self) -> None:
        if not self.lost.done():
            self.lost.set_result("was on a host that is lost")
        self.agent.end_host.broadcast()  # if it is dead, missing pings do it


class HostPool(Pool):
    """Processes on worker hosts, on each at most the same number. None is used twice.

    Unused processes get no pings, so their Monarch host ends.
    """

    def __init__(self, folder: Path, num_processes: int) -> None:
        super().__init__()
        self.folder = folder
        self.share = ceil(num_processes / len(urls_in(folder)))
        self.started: Counter[str] = Counter()  # processes of each Monarch host
        self.lost: dict[str, Any] = defaultdict(asyncio.Future)  # of each Monarch host
        self.outlet = this_proc().spawn(f"outlet_{time.monotonic_ns()}", Outlet)

    async def take(self, num_ranks: int) -> HostProcess:
        """Starts a process on a host with less than its share, or waits. Raises RunError."""
        while True:
            for url in urls_in(self.folder):
                if self.started[url] < self.share and not self.lost[url].done():
                    self.started[url] += 1
                    return await self._start_on(url)
            await sleep(0.1)

    async def _start_on(self, url: str) -> HostProcess:
        print(f"starting on {url}")
        host = monarch.actor.attach_to_workers(ca="trust_all_connections", workers=[url])
        mesh = host.spawn_procs({"rank": 1})
        agent = mesh.spawn("agent", HostAgent)
        try:
            pid = await wait_for(agent.ping.call_one(), 4 * SILENCE_S)
        except Exception:
            self.started[url] -= 1
            what = "is its port open, and are both certificates of one CA?"
            raise RunError(f"no answer from {url}: {what}") from None
        return HostProcess(mesh, [pid], agent, self.lost[url])

    def keep_spare(self) -> None:
        """Nothing: a lost host would take its spare with it."""


# -- weights for another host ---


class Outlet(Actor):
    """In the main process: leases slots of the trainer's arena for the relays."""

    def __init__(self) -> None:
        self.handle: ArenaHandle | None = None
        self.moved: Counter[int] = Counter()  # bytes of each version

    @endpoint
    async def lease(
        self, handle: ArenaHandle, reader: int, newest: int
    ) -> tuple[int, RDMABuffer | None]:
        """The latest version and its slot; None if it is `newest`, which the relay has.

        The trainer does not write into this slot before this reader's next call.
        """
        if handle != self.handle:  # that of a new trainer
            self.handle = handle
            self.arena = Arena(handle)
            self.buffers = [RDMABuffer(slot) for slot in self.arena.slots]
        version, slot = self.arena.lease(reader)  # mechanism: hosts
        if version == newest:
            return version, None
        self.moved[version] += self.buffers[slot].size()
        return version, self.buffers[slot]

    @endpoint
    async def traffic(self) -> Counter[int]:
        return self.moved


def relayed_reader(
    outlet: Outlet, handle: ArenaHandle, number: int, tensors: Weights
) -> WeightReader:
    """A reader of this host's copy of an arena. The first reader starts the relay."""
    note = Path(environ[HOST_FOLDER]) / handle.path.replace("/", "_")
    try:
        note.touch(exist_ok=False)
    except FileExistsError:
        while not note.stat().st_size:  # another reader is making the copy
            time.sleep(0.01)
    else:
        own_handle, arena = create_arena(handle.layout, handle.num_readers)
        run: Any = contextvars.copy_context().run  # as in Worker.run
        threading.Thread(target=run, args=(relay, outlet, handle, number, arena)).start()
        write_note(note, pickle.dumps(own_handle))
    return reader_of(pickle.loads(note.read_bytes()), number, tensors)


def relay(outlet: Any, handle: ArenaHandle, number: int, arena: Arena) -> None:
    """Copies new versions into slots, for ever. A failure ends the process."""
    newest = Arena.NOTHING
    try:
        while True:
            version, weights = outlet.lease.call_one(handle, number, newest).get()
            if weights:
                slot = arena.free_slot()
                weights.read_into(arena.slots[slot], timeout=600).get()
                arena.commit(version, slot)
                newest = version
            time.sleep(0.01)
    finally:
        os._exit(1)  # or readers would wait for ever


# -- measurement ---


@stage(instead="version, slot = self.arena.words[: Arena.LEASES]")
async def demo_hosts(report: Report) -> None:
    """Another host costs one copy per version, and a lost host its work in progress.

    Two worker hosts on this machine, each with two readers of 8 MiB. One is killed.
    """
    folder = Path(tempfile.mkdtemp(dir=report.folder))
    code = WITH_PARENT + f"__import__({THIS_FILE.stem!r}).serve_worker(*sys.argv[1:])"
    workers = []
    for url in ("tcp://127.0.0.2", "tcp://127.0.0.3"):
        workers.append(subprocess.Popen([sys.executable, "-c", code, str(folder), url]))
    while len(urls_in(folder)) < 2:
        await sleep(0.01)
    pool = HostPool(folder, 4)
    writer = WeightWriter(blocks(4), 4)
    make_reader = partial(relayed_reader, pool.outlet, writer.handle)
    service = Service(ReaderWorker, 4, pool, (make_reader, 4))

    async def publish() -> None:
        for version in count():
            publish_filled(writer, version)
            await sleep(0)

    publishing = ensure_future(publish())
    await service.begin()
    read = partial(service.request, "read", 25, 1, True)
    reading = gather(read(), read())
    await sleep(0.1)
    await service.replicas[0].processes.kill()  # ends its whole host
    found = await reading
    await service.until_ready(4)
    found += await gather(read(), read())
    moved: Counter[int] = Counter()
    while len(moved) < 50:  # versions
        await sleep(0.1)
        moved = await pool.outlet.traffic.call_one()
    publishing.cancel()

    model_bytes = sum(tensor.nbytes for tensor in writer.tensors.values())
    report.check("torn reads of 100", sum(torn for torn, _ in found), "==", 0)
    per_host = max(moved.values()) / model_bytes / 2  # hosts
    report.check("bytes per version and host / bytes of the model", per_host, "<", 1.05)
    await service.close()
    for worker in workers:
        worker.terminate()
        worker.wait()


# -- the page ---
#
# --report writes one HTML file: a plot (lane) per process and value of a run, and the checks of
# the stages. A slider selects the run.

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>monarch_rl</title>
<style>
:root { color-scheme: light dark; font: 1rem/1.5 system-ui; }
input { width: 100%; }
svg { display: block; height: 2rem; outline: 1px solid gray; }
path { fill: #2a7fd4; }
p, td + td { overflow-wrap: anywhere; }
</style>
<script type="module">  // a module waits for the sections
const runs = document.querySelectorAll("section");
const slider = document.querySelector("input");
slider.max = runs.length - 1;
slider.oninput = () => {
  slider.hidden = false;
  for (const run of runs) run.hidden = run != runs[slider.value];
  slider.ariaValueText = runs[slider.value].firstChild.textContent;
};
if (runs.length > 1) slider.oninput();
</script>
<input type="range" value="0" aria-label="run" hidden>
<p>How busy each process was; values over the steps.
"""


async def record_of(run: Run, title: str, start_s: float) -> Record:
    """What the page shows of a run: all steps, and its processes since start_s."""
    seconds = time.time() - start_s
    await sleep(0.3)
    await cpu_s(run)  # a worker then sends spans older than 0.2 s
    timeline = await get_or_spawn_controller("timeline", Timeline)
    spans = await timeline.read.call_one()
    rows = run.progress.rows
    summary = f"{sum(row['time'] > start_s for row in rows)} steps in {seconds:.1f} s"
    for loss in [loss for service in run.services for loss in service.failures]:
        noticed_s = loss.noticed_s - start_s
        summary += f"; {loss.name} {loss.lost.result()} at {noticed_s:.1f} s"
    spans = [span for span in spans if span.end_s > start_s]
    # 2000 samples over the run, 1 where busy; means of 10 give 200 busy shares.
    busy = {span.who: torch.zeros(2000) for span in spans}
    for span in spans:
        first = max(0, int((span.start_s - start_s) / seconds * 2000))
        busy[span.who][first : int((span.end_s - start_s) / seconds * 2000)] = 1
    lanes = {who: busy[who].view(200, 10).mean(1).tolist() for who in sorted(busy)}
    for name in ("reward", "staleness"):
        lanes[name] = [row[name] for row in rows if math.isfinite(row[name])]
    lanes["held-out accuracy"] = [found for _, found in run.progress.heldout if found is not None]
    return {"title": title, "seconds": seconds, "summary": summary, "lanes": lanes}


async def sweep(report: Report) -> list[Record]:
    """Runs from the same weights, at four bounds on staleness."""
    records = []
    for bound in (0, 1, 2, 4):
        run = await begin_demo(report)
        start_s = time.time()
        await (train_async(run, bound, 60) if bound else train_sync(run, 60))
        records.append(await record_of(run, f"K = {bound}", start_s))
        await run.close()
    return records


def picture(name: str, run: Record, runs: list[Record]) -> str:
    """A lane of a run, as HTML. All runs have the same scales."""
    values = run["lanes"][name]
    scale = [0.0, 1.0]
    for other in runs:
        scale += other["lanes"].get(name, [])
    width = run["seconds"] / max(other["seconds"] for other in runs)
    text = f"{name}: mean {fmean(values):.3g}"
    steps = "".join(f"V{-value:.3f}h1" for value in values)  # y points downwards
    return f"""<p>{text}<svg role="img" aria-label="{text}" width="{width:.1%}"
        viewBox="0 {-max(scale)} {len(values)} {max(scale) - min(scale)}"
        preserveAspectRatio="none"><path d="M0 0{steps}V0"/></svg>"""


def write_page(path: str, stages: list[Record], runs: list[Record]) -> None:
    """stages: as for --json; runs: of `record_of`."""
    page = PAGE
    for run in runs:
        page += f"<section><h2>{run['title']}</h2><p>{html.escape(run['summary'])}"
        for name, values in run["lanes"].items():
            page += picture(name, run, runs) if values else ""
        page += "</section>\n"
    rows = []
    for stage in stages:
        rows.append([stage["name"], STAGES[stage["name"]].claim])
        rows += [["ok" if check["ok"] else "FAIL", check["what"]] for check in stage["checks"]]
    page += tabulate(rows, tablefmt="html")
    Path(path).write_text(page, encoding="utf-8")


# == THE COMMAND LINE ====

# Supervision, threads, no imports from the current folder, no chatter.
ENVIRONMENT = """HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY=2s
    HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE=5s HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE=5s
    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONWARNINGS=ignore PYTHONSAFEPATH=1
    TRANSFORMERS_VERBOSITY=error HF_HUB_DISABLE_PROGRESS_BARS=1
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"""


def read_flags(argv: list[str] | None) -> Config:
    """Parses flags; Config's comments are their help. Raises UsageError or ArgumentError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    _, _, source = THIS_FILE.read_text().partition("class Config")
    names = []
    texts = dict(re.findall(r"(\w+): .*  # (.*)", source.partition("@dataclass")[0]))
    for each in fields(Config):
        options: Any = {"action": "store_true"}
        if not isinstance(each.default, bool):
            choices = get_args(get_type_hints(Config)[each.name]) or None
            options = {"type": type(each.default), "choices": choices}
        text = f"{texts[each.name]} ({each.default})".replace("%", "%%")
        name = "--" + each.name.replace("_", "-")
        names.append(name)
        parser.add_argument(name, default=argparse.SUPPRESS, help=text, **options)
    known, unknown = parser.parse_known_args(argv)
    cfg = Config(**with_saved_flags(vars(known)))
    unknown += [name for name in (cfg.stage, cfg.only) if name and name not in STAGES]
    if unknown:
        near = difflib.get_close_matches(unknown[0], [*names, *STAGES], 1)
        raise UsageError(f"unknown: {unknown[0]}; nearest: {near}")
    mistakes = [*mistakes_in(cfg)] or [*mistaken_paths(cfg)]
    if mistakes:
        raise UsageError(mistakes[0])
    return replace(cfg, lr=cfg.lr or (1e-6 if cfg.model else 1e-3))


def user_learner(policy: Policy, cfg: Config, rank: int) -> Learner:
    """The learner that the flags ask for, at version 0."""
    policy.has_chunks = True
    try:
        verify(policy, cfg.model)
    except UsageError:  # it scales or caps its logits, or it cannot be trained
        policy.has_chunks = False
        verify(policy, cfg.model)
    reference = copy.deepcopy(policy) if cfg.kl else None
    if cfg.trainers > 1:
        shard(policy.model, cfg.trainers, getattr(torch, cfg.dtype or "float32"))
    penalty = partial(divergence, reference, cfg.kl) if reference else None
    critic = Critic(policy, cfg) if cfg.advantage == "critic" else None
    learner = UserLearner(policy, cfg, rank, cfg.trainers, critic, penalty)
    is_copy = Path(cfg.model) == Path(cfg.checkpoint).resolve() / "model"
    # A copy is supervised already.
    if cfg.sft_steps and not (cfg.checkpoint and is_copy):
        learner.sft(user_task(cfg), cfg.sft_steps)
    if reference:  # a copy of version 0, after the supervised steps
        for old, new in zip(reference.model.parameters(), learner.weights, strict=True):
            old.data.copy_(whole(new.detach()))
    return learner


def shard(model: torch.nn.Module, num_ranks: int, dtype: torch.dtype) -> None:
    """FSDP2: each rank keeps a part of every weight; a layer is whole only while it computes."""
    fsdp = import_module("torch.distributed.fsdp")
    device: Any = next(model.parameters()).device.type
    mesh = dist.device_mesh.init_device_mesh(device, (num_ranks,))
    precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    for unit in [*max(lists, key=len), model]:  # the longest list: the layers
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=precision)


def user_scorer(cfg: Config, folder: Path) -> Callable[[Asked], Rewards]:
    """The scorer of --reward. folder: a reward model saves comparisons there."""
    by_task = UserProcess(cfg)
    if cfg.reward != "model":
        return by_task
    task: Any = user_task(cfg)
    prefer = None
    if cfg.ask_every:
        prefer = getattr(task.task, "prefer", None)
    if cfg.ask_every and not (prefer and len(task.prompt(0).turns) == 1):
        raise UsageError("--ask-every: a task with prefer, one turn")
    model = RewardModel(on_device(cfg, 0), prefer, folder / "preferences.jsonl")
    # The task scores held-out prompts, so exploitation of the model becomes visible.
    return lambda asked: (by_task if asked[0][0].is_held_out else model)(asked)


async def use(checkpoints: Checkpoints, run: Run) -> Record:
    """Trains, evaluates, exports and reports, as cfg says."""
    cfg = run.cfg
    start_s = time.time()
    model = checkpoints.folder / "model"
    await print_devices(run)
    if cfg.checkpoint and cfg.model and run.version == 0 and not model.is_dir():
        await run.trainer.request(export, f"{model}.new")
        os.replace(f"{model}.new", model)
    found = await train_and_evaluate(run, checkpoints) if cfg.train else {}
    if cfg.evaluate:
        found["evaluation"] = await evaluate_pass_at_k(run, cfg.evaluate)
    if cfg.export:
        await run.trainer.request(export, cfg.export)
    newest = checkpoints.folder / f"step_{run.version:08}.pt"
    if cfg.train and cfg.checkpoint and not newest.exists():
        raise RunError(f"step {run.version} is not saved")
    if cfg.evaluate and found["evaluation"]["greedy"] is None:
        raise RunError("nothing scored")
    if cfg.report:
        record = await record_of(run, f"K = {cfg.max_staleness}", start_s)
        write_page(cfg.report, [], [record])
    return found


async def run_user_command(report: Report) -> Record:
    """Makes the run of --train, --evaluate and --export. Returns the figures of --json."""
    cfg = report.cfg
    checkpoints = Checkpoints(Path(cfg.checkpoint or report.folder / "run"))
    if cfg.train:
        save_flags(cfg, checkpoints.folder)
    num_tokens = cfg.max_new_tokens or user_task(cfg).max_new_tokens
    cfg = replace(with_device(cfg), max_new_tokens=num_tokens)
    print(f"{cfg.model or 'the tiny policy'} on {cfg.task}: starting")
    generator_pool = report.pool
    make_reader: Callable[..., WeightReader] = reader_of
    if cfg.hosts:
        generator_pool = HostPool(Path(cfg.hosts), cfg.generators)
        make_reader = partial(relayed_reader, generator_pool.outlet)

    score = partial(user_scorer, folder=checkpoints.folder.resolve())
    places = (report.pool, generator_pool, report.folder)
    make_run = partial(Run, cfg, *places, Factories(user_task, user_learner, make_reader, score))
    return await with_restarts(checkpoints, make_run, partial(use, checkpoints))


async def run_stages(report: Report) -> Record:
    """Runs the stages asked for. An exception counts as a failed check."""
    cfg = report.cfg
    names = [*STAGES]
    names = names[: names.index(cfg.stage) + 1] if cfg.stage else names
    for stage in [STAGES[name] for name in ([cfg.only] if cfg.only else names)]:
        print("\n" + title_of(stage))
        found: Record = {"name": stage.name, "checks": [], "figures": {}}
        report.stages.append(found)
        start = time.monotonic()
        try:
            await stage.demo(report)
        except Exception as error:
            traceback.print_exc()
            report.check(f"errors that ended the stage ({cause_of(error)})", 1, "==", 0)
        found["seconds"] = round(time.monotonic() - start, 2)
        changed = line_with("# mechanism: " + stage.name)
        report.say(f"try: line {changed}, `{stage.instead}`; then --only {stage.name}")
        report.say(f"{len(found['checks'])} checks, {found['seconds']:.1f} s")
    if cfg.report:
        write_page(cfg.report, report.stages, await sweep(report))
    num_checks = sum(len(found["checks"]) for found in report.stages)
    seconds = sum(found["seconds"] for found in report.stages)
    print(f"\n{num_checks} checks, {seconds:.0f} s; failed: {report.failed() or 'none'}")
    seen = {}
    for found in report.stages:
        seen |= found["figures"]
    shown = ("torn_reads", "staleness_max", "heldout_after")
    print(*[f"{name} {seen[name]}" for name in shown if name in seen])
    print("Next: --train --model FOLDER --task FILE.jsonl (DOCS 06)")
    return {}


def mistakes_in(cfg: Config) -> Iterator[str]:
    """What is wrong with the flags."""
    for each in fields(Config):
        if isinstance(each.default, (int, float)):
            least = 0 if each.default < 1 or each.name == "max_staleness" else 1e-3
            if not least <= getattr(cfg, each.name) < math.inf:
                yield f"--{each.name.replace('_', '-')} is out of range"
    is_own = cfg.train or cfg.evaluate or cfg.export
    is_special = cfg.reward or cfg.task != "repeat"
    is_learned = cfg.reward == "model"
    has_critic = cfg.advantage == "critic"
    has_group = not has_critic and cfg.advantage != "none"
    asks = bool(cfg.preferences or cfg.ask_every)
    rules = {
        "--group-size 2 or more, for this --advantage": has_group and cfg.group_size < 2,
        "--trainers 2 or more: without a critic": cfg.trainers > 1 and has_critic,
        "--prompts-per-step below --trainers": cfg.prompts_per_step < cfg.trainers,
        "--reward model: --reward-workers 1": is_learned and cfg.reward_workers > 1,
        "--reward model: with --preferences or --ask-every": is_learned != asks,
        "--model: with --train, --evaluate or --export": cfg.model and not is_own,
        "without --model: only --task repeat": is_special and not cfg.model,
        "--task is an output, too": cfg.task in (cfg.log, cfg.json, cfg.report),
    }
    yield from [told for told, is_so in rules.items() if is_so]


def mistaken_paths(cfg: Config) -> Iterator[str]:
    """What cannot be read, or written; folders for output are created."""
    is_path = cfg.model.startswith((".", "/", "~")) or cfg.model.count("/") > 1
    inputs = [cfg.preferences, cfg.hosts, cfg.worker, cfg.model if is_path else ""]
    inputs += [cfg.task] if cfg.task.endswith(".jsonl") else []
    for path in inputs:
        if path and not Path(path).exists():
            yield f"{path}: no such path"
    if cfg.hosts and not urls_in(Path(cfg.hosts)):
        yield "--hosts: no --worker there"
    is_read = cfg.checkpoint and not cfg.train and (cfg.evaluate or cfg.export)
    if is_read and not [*Path(cfg.checkpoint).glob("step_*.pt")]:
        yield "--checkpoint: nothing saved there"
    try:
        for folder in (cfg.export, cfg.checkpoint):
            if folder:
                os.makedirs(folder, exist_ok=True)
                tempfile.TemporaryFile(dir=folder).close()
        for file in (cfg.log, cfg.json, cfg.report):
            if file:
                os.makedirs(os.path.dirname(file) or ".", exist_ok=True)
                open(file, "a").close()
    except OSError as error:
        yield str(error)


async def run_command(cfg: Config) -> int:
    """Runs the command; returns its exit status. A signal ends it and all its processes."""
    task: Any = asyncio.current_task()
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()
        for each in ENDING:  # another one would spoil the save
            loop.remove_signal_handler(each)
            signal.signal(each, signal.SIG_IGN)

    loop = get_running_loop()
    for number in ENDING:
        loop.add_signal_handler(number, end, number)
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory(prefix="monarch_rl_") as folder:
            report = Report(cfg, Path(folder), pool)
            is_own = cfg.train or cfg.evaluate or cfg.export
            train = await (run_user_command(report) if is_own else run_stages(report))
    except CancelledError:
        print(f"ended by {signal.Signals(received[0]).name}")
        return 128 + received[0]
    finally:
        await pool.close()
    if cfg.json:
        found = {"stages": report.stages, "train": train}
        Path(cfg.json).write_text(json.dumps(found, indent=1))
    return 1 if report.failed() else 0


def reopen_closed() -> None:
    """Opens closed standard streams as /dev/null, and restarts to free descriptors 0 to 2."""
    streams = (sys.stdin, sys.stdout, sys.stderr)
    if None in streams:
        nothing = os.open(os.devnull, os.O_RDWR)
        for number, stream in enumerate(streams):
            if stream is None:
                os.dup2(nothing, number)
        os.execv(sys.executable, [sys.executable, *sys.argv])


def hub_answers() -> bool:
    url = environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except Exception as error:
        return hasattr(error, "code")  # an HTTPError is an answer
    return True


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status: 0 all well, 1 failed, 2 wrong usage, 128 + n after signal n."""
    try:
        cfg = read_flags(argv)
        if cfg.list:
            print("\n".join(title_of(stage) for stage in STAGES.values()))
            return 0
        reopen_closed()
        output: Any = sys.stdout
        output.reconfigure(line_buffering=True, errors="replace")  # each line at once
        folder = tempfile.gettempdir()  # an existing one
        if len(folder) > 70:  # too long for sockets
            folder = "/tmp"
        environ["TMPDIR"] = folder
        if cfg.model and not Path(cfg.model).is_dir() and not hub_answers():
            environ["HF_HUB_OFFLINE"] = "1"  # else transformers tries for a minute
        for setting in ENVIRONMENT.split():
            name, _, value = setting.partition("=")
            environ.setdefault(name, value)
        paths = [str(THIS_FILE.parent), environ.get("PYTHONPATH", "")]
        # Workers import this file.
        environ["PYTHONPATH"] = os.pathsep.join(paths).strip(os.pathsep)
        if cfg.worker:
            serve_worker(cfg.worker, this_url())  # ends by a signal only
        if cfg.hosts:
            monarch.actor.enable_transport(this_url() + ":0")
        reload_config_from_env()  # Monarch read the environment on import
        warnings.simplefilter("ignore")
        # A fault does not end the command; the owner handles it (section 5).
        monarch.actor.unhandled_fault_hook = lambda failure: None
        return asyncio.run(run_command(cfg))
    except (UsageError, argparse.ArgumentError, json.JSONDecodeError) as error:
        print(f"monarch_rl.py: {error}", file=sys.stderr)
        return 2
    except (RunError, ReplicaLost, ActorError, SupervisionError, OSError) as error:
        cause = cause_of(error).removeprefix(__name__ + ".")
        print(f"monarch_rl.py: {cause}", file=sys.stderr)
        return 2 if "UsageError: " in cause else 1  # of a worker


if __name__ == "__main__":
    # Workers find the classes under this file's name.
    sys.exit(import_module(THIS_FILE.stem).main())
