#!/usr/bin/env python3
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = ["torch==2.14.1", "transformers==5.24.0", "torchmonarch==0.7.0"]
# ///
"""monarch_rl: an asynchronous RL system for language models, in one file that you can finish.

A generator samples while the trainer learns. Samples are never more than K versions old, weights
are never half updated, and a generator or reward worker that dies costs time only. To see it:

    python monarch_rl.py                      the tour: all stages, about 90 seconds on two cores
    python monarch_rl.py --stage weight_sync  stages 1 to 7
    python monarch_rl.py --train --model FOLDER_OR_HUB_ID --task FILE.jsonl    your own run

    prompts -> Generator -> list[Episode] -> RewardWorker -> Group -> ReplayBuffer -> batch
                   ^                                                                    |
                   |                                                                    v
              WeightReader <------ Arena: slots, leases <------ WeightWriter <------ Trainer

Small things travel as messages, which the main process sends. Weights are large, and travel through
shared memory. A stage shows its rule at work, and most show first what fails without it:

     1 hello_actor     state in one process, one call at a time: no addition is lost
     2 actor_mesh      one call reaches every member of a mesh
     3 rdma_transfer   pass a handle, pull the bytes; the owner's Python takes no part
     4 controllers     actors that never met find one singleton by its name
     5 supervision     exception, death, standstill, endless work: who hears of each, and how soon
     6 service         every request is answered once, although replicas raise, die and stand still
     7 weight_sync     never torn, and a sync costs one memory copy
     8 reshard         from one sharding to another, each byte that is needed is written once
     9 rollout         what was recorded while sampling is what the trainer recomputes
    10 losses          which estimator follows the true gradient, and how noisily
    11 sync_rl         the loop, one thing at a time
    12 async_rl        two loops and a buffer, with bounded staleness, under faults

Read it from top to bottom, in an afternoon. Part I is the whole system on one host; Part II is for
your own model and data. After a section, run its stage, and make the change that its last line
proposes: the stage fails.

Words. An *episode* is one conversation. A *group* is the episodes sampled from one prompt; their
rewards are compared with each other. A *rollout* is what one request to a generator brings back. A
*version* numbers the weights: each training step makes the next one. *Staleness* is the trainer's
version minus the version that sampled a token.

Left out, and what has it: paged attention and continuous batching (vLLM, SGLang); tensor, pipeline
and expert parallelism (torchtitan, Megatron); LoRA (peft); sandboxes; trainers over several hosts;
experiment trackers. It runs on Linux with Python 3.11 to 3.13, and has not been run on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import contextvars
import copy
import ctypes
import difflib
import fcntl
import functools
import importlib
import importlib.util
import itertools
import inspect
import json
import math
import mmap
import multiprocessing
import operator
import os
import random
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import typing
import unicodedata
import warnings
import zlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import cloudpickle
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch.actor import Actor, ActorError, MeshFailure, ProcMesh, concurrent_endpoint
from monarch.actor import (
    current_rank,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from monarch.rdma import RDMABuffer
from tabulate import tabulate

THIS_FILE = Path(__file__).resolve()


class Lazy:
    """A module that is imported at its first use: torch takes a second in each process."""

    def __init__(self, name: str) -> None:
        self.module_name = name

    def __getattr__(self, name: str) -> Any:
        found = getattr(importlib.import_module(self.module_name), name)
        setattr(self, name, found)
        return found


if typing.TYPE_CHECKING:
    import torch
    import torch.distributed.tensor as dtensor
    import transformers
else:
    torch = Lazy("torch")
    dtensor = Lazy("torch.distributed.tensor")
    transformers = Lazy("transformers")

# -- plumbing: flags, stages, report ---------------------------------------------------------------


class UsageError(Exception):
    """The command asks for what cannot be: printed as one line, exit status 2."""


def flag(default: Any, text: str, choices: Iterable[str] = ()) -> Any:
    """A field of Config, with the help of its flag."""
    return field(
        default=default, metadata={"help": text, "choices": tuple(choices) or None}
    )


@dataclass(frozen=True)
class Config:
    """Everything that a command can be told: the field `max_staleness` is --max-staleness."""

    stage: str = flag("", "run all stages up to this one")
    only: str = flag("", "run this stage alone")
    list: bool = flag(False, "list the stages and their lines")
    train: bool = flag(False, "train --model on --task: one run, and nothing else")
    evaluate: int = flag(0, "pass@k of --model on --task, with so many samples a prompt")
    export: str = flag("", "write the model to this folder, after the run")
    model: str = flag("", "folder or hub id of a causal language model; or a tiny one")
    task: str = flag("repeat", "repeat, count or pattern; FILE.jsonl; FILE.py:CLASS")
    reward: str = flag("", "FILE.py:FUNCTION(prompt, response, answer)")
    dtype: str = flag("float32", "of forward passes", ("float32", "bfloat16"))
    device: str = flag("", "cpu or cuda; default: cuda if there is one")
    seed: int = flag(0, "of prompts, sampling and fresh models")
    steps: int = flag(100, "updates of the policy")
    prompts_per_step: int = flag(16, "groups in a batch")
    group_size: int = flag(8, "samples of each prompt")
    max_new_tokens: int = flag(0, "of a response; default: what the task needs")
    temperature: float = flag(1.0, "of sampling")
    tokens_per_pass: int = flag(8192, "tokens, with padding, in one training pass")
    generators: int = flag(2, "processes that sample")
    reward_workers: int = flag(1, "processes that compute rewards")
    trainers: int = flag(1, "ranks of the trainer (FSDP2)")
    max_staleness: int = flag(2, "K, in versions; 0: synchronous")
    order: str = flag("ready", "of groups in training", ("ready", "fifo"))
    pull: str = flag(
        "rollout", "when weights are pulled: before each", ("rollout", "token")
    )
    loss: str = flag("ppo", "section 10", ("reinforce", "ppo", "decoupled", "cispo"))
    advantage: str = flag("group", "section 10", ("group", "leave_one_out", "none"))
    passes: int = flag(1, "updates from each batch")
    clip_low: float = flag(0.2, "of the importance ratio, below 1")
    clip_high: float = flag(0.2, "of the importance ratio, above 1")
    kl: float = flag(0.0, "weight of the divergence from the first version (k2)")
    entropy: float = flag(0.0, "weight of an entropy bonus")
    lr: float = flag(0.0, "learning rate; default: 1e-6, for the tiny policy 1e-3")
    sft_steps: int = flag(0, "supervised steps on right answers before RL")
    reward_deadline: float = flag(60.0, "seconds that one group's rewards may take")
    mask_truncated: bool = flag(False, "do not train on responses without an end")
    eval_every: int = flag(0, "steps between evaluations; 0: first and last only")
    eval_prompts: int = flag(256, "held-out prompts of an evaluation")
    log: str = flag("", "a line of JSON for every step, in this file")
    json: str = flag("", "checks and figures of the command, in this file")


@dataclass(frozen=True)
class Stage:
    """One concept: its claim, its demo, and the one-line change that makes the claim false."""

    name: str
    claim: str
    instead: str  # replaces the statement on the line that ends with `# mechanism: NAME`
    demo: Callable[[Report, Config], Awaitable[None]]


STAGES: dict[str, Stage] = {}


def stage(claim: str, instead: str) -> Callable[..., Any]:
    """Registers `demo_NAME` as the stage NAME. Stages run in the order of the file."""

    def register(demo: Callable[[Report, Config], Awaitable[None]]) -> Any:
        name = demo.__name__.removeprefix("demo_")
        STAGES[name] = Stage(name, claim, instead, demo)
        return demo

    return register


class Report:
    """Prints what is found, and keeps it for --json.

    folder: of this command, removed at its end. pool: processes, which stages share (section 6).
    """

    RELATIONS = types.MappingProxyType(
        {"==": operator.eq, ">": operator.gt, "<": operator.lt, "<=": operator.le}
    )

    def __init__(self, folder: Path, pool: Pool) -> None:
        self.folder = folder
        self.pool = pool
        self.stages: list[dict[str, Any]] = []

    def say(self, text: str) -> None:
        """Prints a line under the head of the stage."""
        print(f"       {text}", flush=True)

    def table(self, rows: list[dict[str, Any]]) -> None:
        """Prints records as a table, with their keys as its head."""
        shown = tabulate(rows, headers="keys", tablefmt="plain", floatfmt=".3g")
        for line in shown.splitlines():
            self.say(line)

    def check(self, what: str, value: Any, relation: str, bound: Any) -> None:
        """Compares a measured value with what the claim says it is."""
        holds = bool(self.RELATIONS[relation](value, bound))
        self.stages[-1]["checks"].append({"what": what, "ok": holds})
        shown = f"{value:.3g}" if isinstance(value, float) else value
        print(
            f"    {'ok' if holds else 'FAIL'} {what}: {shown}  ({relation} {bound:.3g})",
            flush=True,
        )

    def figure(self, **values: Any) -> None:
        """Keeps figures of this stage."""
        self.stages[-1]["figures"].update(values)


# ==== PART I: the system ==========================================================================

# == 1. HELLO ACTOR ================================================================================
# Problem. Threads share an object. Each reads it, pauses, and writes back what it made of it.
#   Updates vanish, without an error, and not every time.
# Rule. Put the object into an actor: an instance that lives in one process and is reached only by
#   messages. Messages wait in the actor's mailbox, and its endpoints run one at a time.
# Cost. A message and its answer take the time of thousands of function calls.
#
#     main process                              process of the actor
#     counter.add.call_one()   -- message -->   waits in the mailbox until earlier calls are done
#     await ...                <-- answer --    add() has run from its first line to its last


class Counter(Actor):
    """A counter. `@endpoint` marks the methods that messages may call."""

    def __init__(self) -> None:
        self.total = 0

    @endpoint  # mechanism: hello_actor
    async def add(self, pause_s: float = 0.0005) -> int:
        """Adds one, with a pause between reading and writing. Returns the id of its process."""
        total = self.total
        # Here another thread, or another coroutine, would read the same total.
        await asyncio.sleep(pause_s)
        self.total = total + 1
        return os.getpid()

    @endpoint
    async def take(self) -> int:
        """The additions since the last call of this."""
        total = self.total
        self.total = 0
        return total


async def median_ms(call: Callable[[], Awaitable[Any]], times: int = 21) -> float:
    """The median time of an awaited call, in milliseconds."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        await call()
        found.append((time.perf_counter() - start) * 1e3)
    return statistics.median(found)


async def lost_by_threads(num_additions: int) -> int:
    """How many additions are lost when threads do what Counter.add does."""
    box = {"total": 0}

    def add() -> None:
        total = box["total"]
        time.sleep(0.0005)
        box["total"] = total + 1

    await asyncio.gather(*[asyncio.to_thread(add) for _ in range(num_additions)])
    return num_additions - box["total"]


@stage(
    "an actor's state lives in one process, and its calls run one at a time",
    instead="@concurrent_endpoint",
)
async def demo_hello_actor(report: Report, cfg: Config) -> None:
    """Loses additions with threads, and none with an actor."""
    report.check("additions of 200 lost by threads", await lost_by_threads(200), ">", 0)

    # A process on this host, and an actor in it. `spawn` returns a reference at once. `call_one`
    # sends a message, and returns something to await for the answer.
    procs = this_host().spawn_procs(per_host={"worker": 1})
    counter = procs.spawn("counter", Counter)
    process_ids = await asyncio.gather(*[counter.add.call_one() for _ in range(200)])
    lost = 200 - await counter.take.call_one()
    report.check("additions of 200 lost by the actor", lost, "==", 0)
    report.check("processes in which they ran", len({*process_ids}), "==", 1)
    message_ms = await median_ms(counter.take.call_one)
    report.say(f"a message to another process and its answer: {message_ms:.2f} ms")
    report.figure(message_ms=message_ms)
    await procs.stop()


# == 2. ACTOR MESH =================================================================================
# Problem. A run has many generators, and a trainer many ranks. To call one after another takes as
#   long as all of them together.
# Rule. Actors that are spawned together are a mesh, an array with named dimensions. A call of a
#   mesh is one message that all members get. The adverb says who runs, and who answers:
#
#     mesh.add.call(...)                    every member runs; the answers come with their places
#     mesh.add.broadcast(...)               every member runs; nobody answers
#     mesh.add.choose(...)                  one member runs, drawn at random
#     mesh.slice(worker=2).add.call_one()   this member runs
#
# Cost. `call` is as slow as its slowest member, and fails if one fails. `broadcast` does not even
#   say that something failed.


@stage(
    "one call reaches every member of a mesh; its adverb says who runs and who answers",
    instead="mesh = members.slice(worker=0)",
)
async def demo_actor_mesh(report: Report, cfg: Config) -> None:
    """Calls a mesh of four by each adverb, and counts who ran."""
    procs = this_host().spawn_procs(per_host={"worker": 4})
    members = procs.spawn("counters", Counter)
    mesh = members  # mechanism: actor_mesh
    pause_s = 0.1

    async def num_ran() -> int:
        totals = await members.take.call()
        return sum(total for _, total in totals.items())

    async def loop() -> None:
        for worker in range(4):
            await members.slice(worker=worker).add.call_one(pause_s)

    await members.take.call()  # the first call waits until all processes have started
    rows = []
    ran_by: dict[str, int] = {}
    sends = {
        "call_one, in a loop": loop,
        "call": lambda: mesh.add.call(pause_s),
        "choose": lambda: mesh.add.choose(pause_s),
    }
    for adverb, send in sends.items():
        start = time.perf_counter()
        await send()
        took_ms = (time.perf_counter() - start) * 1e3
        ran_by[adverb] = await num_ran()
        rows.append({"adverb": adverb, "members that ran": ran_by[adverb], "ms": took_ms})
    report.table(rows)
    # There is no answer to wait for: this returns before anybody has run.
    mesh.add.broadcast(pause_s)
    report.check("members of 4 that ran under `call`", ran_by["call"], "==", 4)
    report.check("members of 4 that ran under `choose`", ran_by["choose"], "==", 1)
    # This question waits in each mailbox behind the broadcast.
    report.check("members of 4 that ran under `broadcast`", await num_ran(), "==", 4)
    await procs.stop()


# == 3. RDMA TRANSFER ==============================================================================
# Problem. Weights are gigabytes. A message is pickled, copied, queued and unpickled, and its
#   answer waits until the owner's Python has time.
# Rule. Two roads. Control travels in messages. Bulk stays where it is: its owner registers the
#   memory once, as an RDMABuffer, and sends the handle in a message. The receiver moves the bytes.
#   The operation is one-sided: no Python of the owner runs.
# Cost. The owner must keep the memory alive, and does not hear when a reader is done. Section 7 is
#   about that.
#
#     owner                                           reader
#     memory = torch.zeros(...)
#     RDMABuffer(memory)  ---- handle, a message ---->  handle.read_into(mine)   pulls the bytes
#                                                       handle.write_from(mine)  pushes bytes
#
# RDMA is remote direct memory access: a network card reads the memory of another machine without
# that machine's processor. A handle says which process has the bytes, where, and how many. Without
# such a card Monarch does the same over TCP, by threads in Rust: slower, by the same contract.


class Owner(Actor):
    """Owns memory that others want."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)

    @endpoint
    async def handle(self) -> RDMABuffer:
        """The new road: where the bytes are."""
        with warnings.catch_warnings(action="ignore"):  # that there is no card for it
            return RDMABuffer(self.memory)

    @endpoint
    async def as_message(self) -> torch.Tensor:
        """The old road: the bytes themselves."""
        return self.memory

    @endpoint
    async def compute(self) -> float:
        """Keeps this process's Python busy for about a second; returns when it was done."""
        # One call into C: no other Python code of the process runs meanwhile.
        sum(range(10**8))
        return time.time()


@stage(
    "a handle of half a kilobyte moves any number of bytes while the owner's Python is busy",
    instead="mine.copy_(await owner.as_message.call_one())",
)
async def demo_rdma_transfer(report: Report, cfg: Config) -> None:
    """Moves 1 and 32 MiB by both roads, and then 32 MiB from an owner that is busy."""
    procs = this_host().spawn_procs(per_host={"worker": 1})
    rows = []
    handle_bytes = 0
    for num_mib in (1, 32):
        owner = procs.spawn(f"owner_{num_mib}", Owner, num_mib << 20)
        handle = await owner.handle.call_one()
        mine = torch.zeros(num_mib << 20, dtype=torch.uint8)
        message_ms = await median_ms(owner.as_message.call_one, 3)
        pull = functools.partial(handle.read_into, mine)
        pull_ms = await median_ms(pull, 3)
        handle_bytes = len(cloudpickle.dumps(handle))
        row = {"MiB": num_mib, "handle bytes": handle_bytes}
        rows.append(row | {"message ms": message_ms, "pull ms": pull_ms})
    report.table(rows)
    report.check("bytes of the handle to 32 MiB", handle_bytes, "<", 1024)

    expected = await owner.as_message.call_one()
    mine.zero_()
    busy = asyncio.ensure_future(owner.compute.call_one())
    await asyncio.sleep(0.2)  # now the owner is inside of `sum`
    await handle.read_into(mine)  # mechanism: rdma_transfer
    pulled_s = time.time()
    computed_s = await busy
    report.check("s from the pull's end to the owner's", computed_s - pulled_s, ">", 0)
    report.check("bytes that differ", int((mine != expected).sum()), "==", 0)
    await procs.stop()


# == 4. CONTROLLERS ================================================================================
# Problem. Actors in many processes have to meet, at one log of what happened, say. Two creators
#   would make two half-filled logs.
# Rule. Ask by name. `get_or_spawn_controller(name, Class)` gives every caller the same actor: the
#   first request for a name creates it, in the main process, and later ones find it.
# Cost. One more message for each lookup; all callers share one process.
#
# In the rest of the file only the main process looks it up, and passes it to the workers: one that
# is killed in the middle of a lookup would take the registry of names with it.


@dataclass(frozen=True)
class Span:
    """A stretch of work. Times are seconds since 1970: one clock for all processes of a host."""

    who: str  # "trainer_0"
    what: str  # "step"
    start_s: float
    end_s: float


class Timeline(Actor):
    """Who did what, and when. Workers send it their spans; the demos compute busy shares of it."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=100_000)

    @endpoint
    async def add(self, spans: list[Span]) -> None:
        """Takes note of what somebody did."""
        self.spans.extend(spans)

    @endpoint
    async def take(self, who: str = "") -> list[Span]:
        """The spans of workers whose name begins like this."""
        return [span for span in self.spans if span.who.startswith(who)]


class Witness(Actor):
    """Has been given no reference to anything."""

    @endpoint
    async def report(self) -> None:
        """Finds the timeline by its name, and notes a span."""
        find = functools.partial(get_or_spawn_controller, "timeline", Timeline)
        timeline = await find()  # mechanism: controllers
        span = Span(f"witness_{current_rank().rank}", "report", time.time(), time.time())
        await timeline.add.call_one([span])


@stage(
    "actors that never met find one singleton by its name",
    instead='timeline = this_proc().spawn("timeline", Timeline)',
)
async def demo_controllers(report: Report, cfg: Config) -> None:
    """Has three processes report to a timeline that none of them was told of."""
    procs = this_host().spawn_procs(per_host={"worker": 3})
    await procs.spawn("witnesses", Witness).report.call()
    timeline = await get_or_spawn_controller("timeline", Timeline)
    spans = await timeline.take.call_one("witness")
    report.check("witnesses of 3 in the timeline of this process", len(spans), "==", 3)
    await procs.stop()


# == 5. SUPERVISION ================================================================================
# Problem. Processes raise, die, stand still, and work for ever. If nobody is responsible, a caller
#   waits for ever. But a worker that has not answered for ten minutes may be well, and busy.
# Rule. An exception belongs to the caller; the actor lives on. A process belongs to its owner, who
#   kills and replaces it. Each trouble has a detector of its own, and none of them is "it is slow":
#
#     what happens         its caller            its owner hears by
#     an endpoint raises   gets the exception    nothing: the actor lives on
#     the process dies     waits, then an error  a pidfd, in milliseconds
#     it stands still      waits, then an error  pings without an answer, after `unresponsive_s`
#     it works for ever    waits                 nothing: only a deadline helps
#
# Cost. A thread in each worker, and at most two pings a second. A worker whose C code holds the GIL
#   for longer than `unresponsive_s` is killed although it is well: 30 s in runs, 2 s in demos.
#
# Monarch supervises, too: it asks its processes every 2 s, gives one that does not answer 5 s more
# (ENVIRONMENT, at the end of the file), and calls `__supervise__` of the actor that spawned it.


class Worker(Actor):
    """An actor that computes in a thread of its own, so that it can answer a ping meanwhile.

    Subclasses have plain methods, and messages run them through `call`, one after another. The
    first one is `setup`: what is slow, or can fail, belongs there.
    """

    def __init__(self, name: str, timeline: Timeline | None = None) -> None:
        self.name = name
        self.timeline = timeline
        self.spans: list[Span] = []  # not yet sent to the timeline
        self.thread = ThreadPoolExecutor(1)
        # The head of a process group: its children end with it, and Ctrl-C does not reach it.
        os.setpgid(0, 0)

    @concurrent_endpoint  # runs beside other calls of this actor
    async def ping(self) -> int:
        """Answers with the id of this process."""
        return os.getpid()

    @concurrent_endpoint
    async def call(self, method: str, *args: Any) -> Any:
        """Runs a method in the thread, and returns what it returns."""
        run = (
            contextvars.copy_context().run
        )  # a thread would not know which actor it belongs to
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self.thread, run, self._timed, method, args)
        if self.timeline and self.spans and time.time() - self.spans[0].end_s > 0.2:
            self.timeline.add.broadcast(self.spans)
            self.spans = []
        return result

    def _timed(self, method: str, args: tuple[Any, ...]) -> Any:
        start_s = time.time()
        try:
            return getattr(self, method)(*args)
        finally:
            self.spans.append(Span(self.name, method, start_s, time.time()))

    def import_models(self) -> None:
        """Takes the time now that the first use of a model would take."""
        importlib.import_module("transformers.models.qwen2.modeling_qwen2")
        importlib.import_module("transformers.models.auto.modeling_auto")

    def setup(self, *args: Any) -> Any:
        """Loads what later calls need. Returns what its owner has to know."""

    def cpu_s(self) -> float:
        """Seconds of CPU time that this process has used."""
        return time.process_time()

    def release(self) -> None:
        """The last call, before another actor uses this process."""


def cause_of(error: BaseException) -> str:
    """The last line of an error; for one that an actor raised, what it raised."""
    lines = str(error).strip().splitlines() or [""]
    return (
        lines[-1]
        if isinstance(error, ActorError)
        else f"{type(error).__name__}: {lines[-1]}"
    )


def when_it_ends(process_id: int, then: Callable[[], None]) -> Callable[[], None]:
    """Has `then` called when the process ends. Returns a function that stops watching.

    A pidfd is a file descriptor of a process; it becomes readable when the process ends.
    """
    loop = asyncio.get_running_loop()
    pidfd = os.pidfd_open(process_id)
    watching = contextlib.ExitStack()
    watching.callback(os.close, pidfd)
    watching.callback(loop.remove_reader, pidfd)

    def has_ended() -> None:
        watching.close()
        then()

    loop.add_reader(pidfd, has_ended)
    return watching.close


async def until_unresponsive(worker: Any, unresponsive_s: float) -> str:
    """Pings the worker twice a second. Returns the reason when it is no longer well."""
    while True:
        ping = worker.ping.call()
        try:
            await asyncio.wait_for(ping, unresponsive_s)  # mechanism: supervision
        except TimeoutError:
            return f"has not answered a ping for {unresponsive_s:g} s"
        except Exception as error:  # Monarch's, of several types: the process has gone
            return cause_of(error)
        await asyncio.sleep(0.5)


# -- measurement -----------------------------------------------------------------------------------


class Supervisor(Actor):
    """Owns processes, and notes when Monarch says that something has happened to one of them."""

    def __init__(self) -> None:
        self.heard_s: dict[str, float] = {}

    @endpoint
    async def start(self, trouble: str) -> Any:
        """A worker in a process that this actor owns. Both have the name of the trouble."""
        return (
            this_host().spawn_procs(name=trouble).spawn(trouble, TroubledWorker, trouble)
        )

    async def __supervise__(self, failure: MeshFailure) -> bool:
        """Monarch calls this; it must be `async def`. True: the failure ends here."""
        self.heard_s.setdefault(failure.mesh_name.split("-")[0], time.time())
        return True

    @endpoint
    async def take(self) -> dict[str, float]:
        """When it heard of which trouble."""
        return self.heard_s


class TroubledWorker(Worker):
    """Gets into the trouble after which it is named, or waits until that is done to it."""

    def work(self) -> None:
        """Raises, works for ever, or sleeps."""
        if self.name == "exception":
            raise ValueError("a bad request")
        while self.name == "endless":
            pass
        time.sleep(3600)


async def who_hears(trouble: str, supervisor: Any) -> dict[str, float]:
    """Gets a worker into trouble, and returns after how many seconds who heard of it."""
    worker = await supervisor.start.call_one(trouble)
    process_id = await worker.ping.call_one()
    heard_s: dict[str, float] = {}
    start_s = time.time()
    call = asyncio.ensure_future(worker.call.call_one("work"))
    call.add_done_callback(lambda _: heard_s.update(caller=time.time()))
    when_it_ends(process_id, lambda: heard_s.update(pidfd=time.time()))
    ping = asyncio.ensure_future(until_unresponsive(worker, 2.0))
    ping.add_done_callback(lambda _: heard_s.update(ping=time.time()))
    if trouble in ("death", "standstill"):
        await asyncio.sleep(0.5)
        start_s = time.time()
        os.kill(process_id, signal.SIGKILL if trouble == "death" else signal.SIGSTOP)
    await asyncio.sleep(8)
    heard_s["supervise"] = (await supervisor.take.call_one()).get(trouble, 0)
    # A ping that fails because the process is known to be dead has found nothing out.
    if ping.done() and not ping.result().startswith("has not answered"):
        del heard_s["ping"]
    found = {who: round(when_s - start_s, 2) for who, when_s in heard_s.items() if when_s}
    ping.cancel()
    call.cancel()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)
    return found


@stage(
    "exception, death, standstill, endless work: each has its detector, and slowness is none",
    instead="await ping",
)
async def demo_supervision(report: Report, cfg: Config) -> None:
    """Gets four workers into trouble while a caller waits for each, and shows who hears when."""
    supervisor = this_proc().spawn("supervisor", Supervisor)
    troubles = ("exception", "death", "standstill", "endless")
    found = await asyncio.gather(
        *[who_hears(trouble, supervisor) for trouble in troubles]
    )
    heard = dict(zip(troubles, found, strict=True))
    report.say("seconds until each heard of it, or - if not within 8 s")
    rows = []
    for trouble, by in heard.items():
        row = {who: by.get(who, "-") for who in ("caller", "supervise", "pidfd", "ping")}
        rows.append({"trouble": trouble, **row})
    report.table(rows)
    report.check(
        "who heard of the exception: its caller alone", len(heard["exception"]), "==", 1
    )
    report.check("deaths that the pidfd told", int("pidfd" in heard["death"]), "==", 1)
    report.check(
        "standstills that the ping told", int("ping" in heard["standstill"]), "==", 1
    )
    report.check("detectors that told of endless work", len(heard["endless"]), "==", 0)


# == 6. SERVICE ====================================================================================
# Problem. A call shares the fate of the actor that it was sent to. If one of four is lost, a
#   quarter of the requests are lost, and each caller has to know who is left.
# Rule. The caller asks a service. It owns replicas, which are interchangeable, and gives a request
#   to the one with the fewest in flight. An attempt has one of three outcomes:
#     1. The replica answers. The caller gets the answer, once.
#     2. The replica is lost (section 5). It is replaced, and another one gets the request.
#     3. The replica raises. Another one tries; if that raises too, the request is at fault, and the
#        exception is the caller's.
# Cost. A request may run twice, so it must be harmless to repeat.
#
#     caller --- request("root", 4) ---> Service ---> replica 0   is lost: it is replaced
#                                            \------> replica 1   answers
#            <------- 2.0 -----------------------------/
#
# The service is a plain object of the main process. As an actor it would pickle each request and
# each answer once more, which costs half of the main process's CPU time.

# -- 6a. Processes ---------------------------------------------------------------------------------
#
# A process that has imported torch and a model class has cost 4 s of CPU time. A new actor in such
# a process is ready after 16 ms. So processes outlive their actors: they go back to a pool.


@dataclass
class Processes:
    """Processes of one mesh: one, or one for each rank of a trainer."""

    mesh: ProcMesh
    ids: list[int]

    async def kill(self) -> None:
        """Ends them, and the processes that they have started."""
        for process_id in self.ids:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process_id, signal.SIGKILL)
        await self.mesh.stop()  # of a stopped process it would not return


class Pool:
    """Processes without an actor. One of them, the spare, has imported what replicas need."""

    def __init__(self) -> None:
        self.idle: list[Processes] = []
        self.num_started = 0
        self.making_spare: asyncio.Task[None] | None = None

    async def take(self, num_ranks: int) -> Processes:
        """Idle processes, or new ones."""
        for processes in self.idle:
            is_alive = all(
                os.path.exists(f"/proc/{process_id}") for process_id in processes.ids
            )
            if is_alive and len(processes.ids) == num_ranks:
                self.idle.remove(processes)
                return processes
        return await self._start(num_ranks)

    async def _start(self, num_ranks: int, imports: bool = False) -> Processes:
        self.num_started += 1
        name = f"process{self.num_started}"
        mesh = this_host().spawn_procs(per_host={"rank": num_ranks}, name=name)
        worker = mesh.spawn(f"{name}_first", Worker, name)
        answers = await worker.ping.call()
        if imports:
            await worker.call.call("import_models")
        await worker.stop()
        return Processes(mesh, [process_id for _, process_id in answers.items()])

    def keep_spare(self) -> None:
        """Sees to it that a process is idle, so that a lost replica is replaced at once."""
        is_making = self.making_spare and not self.making_spare.done()
        if not is_making and not self.idle:
            self.making_spare = asyncio.ensure_future(self._make_spare())

    async def _make_spare(self) -> None:
        self.idle.append(await self._start(1, imports=True))

    async def close(self) -> None:
        """Ends all idle processes."""
        if self.making_spare:
            await asyncio.wait([self.making_spare])
        await asyncio.gather(*[processes.kill() for processes in self.idle])


# -- 6b. Replicas and requests ---------------------------------------------------------------------


class ReplicaLost(RuntimeError):
    """The replica that had the request was lost: three times, or for good."""


@dataclass
class Replica:
    """A worker in processes of its own, and what the service knows of it."""

    name: str  # "generator_0"
    processes: Processes
    worker: Any  # the actor, or a mesh with an actor for each rank
    lost: asyncio.Future[str]  # the reason, once it is lost
    in_flight: dict[str, float] = field(default_factory=dict)  # requests, and since when

    def lose(self, reason: str) -> None:
        """Tells all that wait for this replica. The first reason counts."""
        if not self.lost.done():
            self.lost.set_result(reason)

    @contextlib.asynccontextmanager
    async def watched(self, unresponsive_s: float) -> AsyncIterator[None]:
        """Inside of this, death and standstill of the replica are noticed (section 5)."""
        watches = []
        for process_id in self.processes.ids:
            try:
                watches.append(when_it_ends(process_id, lambda: self.lose("has died")))
            except ProcessLookupError:
                self.lose("has died")
        ping = asyncio.ensure_future(until_unresponsive(self.worker, unresponsive_s))
        ping.add_done_callback(lambda _: ping.cancelled() or self.lose(ping.result()))
        try:
            yield
        finally:
            ping.cancel()
            for stop_watching in watches:
                stop_watching()


@dataclass
class Loss:
    """A replica that was lost. Times are seconds since 1970."""

    name: str
    reason: str
    noticed_s: float
    replaced_s: float | None = None


@dataclass(eq=False)
class Service:
    """Replicas of one worker class, and the requests to them."""

    worker_class: type[Worker]
    num_replicas: int
    pool: Pool
    setup_args: tuple[
        Any, ...
    ] = ()  # a replica begins with setup(its number, *setup_args)
    num_ranks: int = 1
    unresponsive_s: float = 30.0  # a replica that answers no ping for so long is killed
    replaces: bool = True  # if not, requests raise ReplicaLost after a loss
    replicas: dict[int, Replica] = field(
        default_factory=dict
    )  # the ready ones, by number
    losses: list[Loss] = field(default_factory=list)
    num_failed: int = 0  # attempts that were lost or raised
    error: Exception | None = None  # why there will be no replica
    changed: asyncio.Condition = field(default_factory=asyncio.Condition)  # of the above
    keepers: list[asyncio.Task[None]] = field(default_factory=list)

    async def begin(self) -> list[Any]:
        """Starts all replicas, and returns what their first `setup` returned, in their order."""
        results = []
        for number in range(self.num_replicas):
            results.append(asyncio.get_running_loop().create_future())
            self.keepers.append(asyncio.ensure_future(self._keep(number, results[-1])))
        return await asyncio.gather(*results)

    async def request(self, method: str, *args: Any) -> Any:
        """Has a replica run worker.method(*args), and returns the answer.

        Waits for a ready replica, and for its answer. Raises what the method raised (ActorError),
        or ReplicaLost after three losses.
        """
        num_losses = 0
        raised_by: Replica | None = None
        while True:
            replica = await self._pick(raised_by)
            try:
                return await self._ask(replica, method, *args)
            except ReplicaLost:  # outcome 2
                num_losses += 1
                if num_losses == 3 or not self.replaces:
                    raise
            except ActorError:  # outcome 3
                if raised_by or self.num_replicas == 1:
                    raise
                raised_by = replica  # mechanism: service

    async def _pick(self, not_this: Replica | None) -> Replica:
        """A ready replica with the fewest requests in flight; another than `not_this`, if any."""

        def well() -> list[Replica]:
            return [
                replica for replica in self.replicas.values() if not replica.lost.done()
            ]

        async with self.changed:
            await self.changed.wait_for(lambda: self.error or well())
        if self.error:
            raise self.error
        others = [replica for replica in well() if replica is not not_this]
        return min(others or well(), key=lambda replica: len(replica.in_flight))

    async def _ask(self, replica: Replica, method: str, *args: Any) -> Any:
        """One attempt: the answer of rank 0, or what it raised, or ReplicaLost."""
        what = f"{method} {time.monotonic_ns()}"
        replica.in_flight[what] = time.time()
        call = asyncio.ensure_future(replica.worker.call.call(method, *args))
        try:
            await asyncio.wait([call, replica.lost], return_when=asyncio.FIRST_COMPLETED)
            if replica.lost.done():
                raise ReplicaLost(f"{replica.name} {replica.lost.result()}")
            return next(iter(call.result().values()))
        except Exception as error:
            self.num_failed += 1
            if isinstance(error, (ActorError, ReplicaLost)):
                raise
            # Monarch's, of several types: the process cannot be reached.
            replica.lose(cause_of(error))
            raise ReplicaLost(f"{replica.name} {cause_of(error)}") from error
        finally:
            call.cancel()
            del replica.in_flight[what]

    async def _keep(self, number: int, first_result: asyncio.Future[Any]) -> None:
        """Has a replica of this number ready, and after its loss another one.

        Ends when it is cancelled, or when there can be no other one.
        """
        loss: Loss | None = None
        while not self.error:
            replica = await self._spawn(number)
            try:
                # Imports keep the GIL for seconds, so there is more patience with a setup.
                async with replica.watched(max(30.0, self.unresponsive_s)):
                    result = await self._ask(replica, "setup", number, *self.setup_args)
                if not first_result.done():
                    first_result.set_result(result)
                if loss:
                    loss.replaced_s = time.time()
                    self.pool.keep_spare()
                async with replica.watched(self.unresponsive_s):
                    await self._set(number, replica)
                    await replica.lost
            except ReplicaLost:
                pass  # in its setup
            except (
                Exception
            ) as error:  # of its setup: that of another one would raise it, too
                replica.lose(cause_of(error))
                self.error = error
            finally:
                if replica.lost.done() or number not in self.replicas:
                    await self._set(number, None)
                    await replica.processes.kill()
            loss = Loss(replica.name, replica.lost.result(), time.time())
            self.losses.append(loss)
            if not self.replaces:
                self.error = self.error or ReplicaLost(f"{loss.name} {loss.reason}")
        if not first_result.done():
            first_result.set_exception(self.error)
        await self._set(
            number, None
        )  # wakes all who wait for a replica: they get the error

    async def _spawn(self, number: int) -> Replica:
        """A worker that is not set up yet."""
        name = f"{self.worker_class.__name__.lower()}_{number}"
        timeline = await get_or_spawn_controller("timeline", Timeline)
        processes = await self.pool.take(self.num_ranks)
        actor_name = f"{name}_{time.monotonic_ns()}"
        worker = processes.mesh.spawn(actor_name, self.worker_class, name, timeline)
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return Replica(name, processes, worker, lost)

    async def _set(self, number: int, replica: Replica | None) -> None:
        """Makes this the ready replica of that number, or says that there is none."""
        async with self.changed:
            self.replicas.pop(number, None)
            if replica:
                self.replicas[number] = replica
            self.changed.notify_all()

    async def close(self) -> None:
        """Ends the replicas. Those that have nothing to do leave their processes to the pool."""
        ready = list(self.replicas.values())
        for keeper in self.keepers:
            keeper.cancel()
        await asyncio.gather(*self.keepers, return_exceptions=True)
        for replica in ready:
            if replica.in_flight or replica.lost.done():
                await replica.processes.kill()
            else:
                await self._ask(replica, "release")
                await replica.worker.stop()
                self.pool.idle.append(replica.processes)


class RootWorker(Worker):
    """Computes square roots, and writes a diary of what it began and what it finished."""

    def setup(self, number: int, diary: str) -> None:
        """diary: a file that all replicas append to, a line at a time."""
        self.number = number
        self.diary = diary

    def root(self, number: float) -> float:
        """The square root. Replica 1 raises for some numbers; for a negative one all of them do."""
        self._write(f"began {number}")
        time.sleep(0.002)
        if self.number == 1 and 100 <= number < 200:
            raise RuntimeError("a bad replica")
        result = math.sqrt(number)
        self._write(f"finished {number}")
        return result

    def _write(self, line: str) -> None:
        with open(self.diary, "a") as file:
            file.write(line + "\n")


@stage(
    "every request is answered once, although replicas raise, die and stand still",
    instead="raise",
)
async def demo_service(report: Report, cfg: Config) -> None:
    """Sends 400 requests to four replicas; one raises, one is killed, one is stopped."""
    diary = report.folder / "diary"
    service = Service(RootWorker, 4, report.pool, (str(diary),), unresponsive_s=2.0)
    await service.begin()
    try:
        await service.request("root", -1)
    except ActorError as error:
        report.say(
            f"a bad request: its caller gets `{cause_of(error)}`, and no replica is blamed"
        )
    num_failed_before = service.num_failed
    struck_s: dict[str, float] = {}

    async def ask(number: int) -> float | None:
        await asyncio.sleep(number * 0.002)
        if number in (100, 200):
            victim = service.replicas[2 if number == 100 else 3]
            struck_s[victim.name] = time.time()
            how = signal.SIGKILL if number == 100 else signal.SIGSTOP
            os.kill(victim.processes.ids[0], how)
        try:
            return await service.request("root", number)
        except (ActorError, ReplicaLost):
            return None

    answers = await asyncio.gather(*[ask(number) for number in range(400)])
    while len(service.replicas) < 4:  # the last replacement is on its way
        await asyncio.sleep(0.05)
    lines = diary.read_text().splitlines()
    finished = {line for line in lines if line.startswith("finished")}
    num_right = sum(answer == math.sqrt(number) for number, answer in enumerate(answers))
    num_failed = service.num_failed - num_failed_before
    rows = []
    for loss in service.losses:
        notice_ms = (loss.noticed_s - struck_s[loss.name]) * 1e3
        replace_ms = (loss.replaced_s - loss.noticed_s) * 1e3
        row = {"replica": loss.name, "what": loss.reason}
        rows.append(row | {"noticed, ms": notice_ms, "replaced, ms": replace_ms})
    report.table(rows)
    report.check("requests of 400 with the right answer", num_right, "==", 400)
    report.check("requests of 400 that some replica finished", len(finished), "==", 400)
    report.check(
        "failed attempts, each a lost request without a service", num_failed, ">", 0
    )
    report.check("replicas that were replaced", len(service.losses), "==", 2)
    killed = rows[0]
    report.figure(requests=400, answered_once=num_right)
    report.figure(notice_ms=killed["noticed, ms"], replace_ms=killed["replaced, ms"])
    await service.close()


# == 7. WEIGHT SYNC ================================================================================
# Problem. The trainer rewrites its weights while generators read them. A reader that looks during
#   the write has some tensors of version 6 and some of version 7: torn weights. There is no error,
#   only samples of a policy that nobody has trained.
# Rule. The trainer fills a slot of shared memory that nobody reads, and then makes it the latest. A
#   reader leases the latest slot, and reads it until it leases another.
# Cost. One copy of the weights per version, and memory for readers + 2 slots.
# Read on. `Arena.lease` and `Arena.free_slot` are the idea; the rest is bytes.
#
# The usual way is a broadcast in a process group: all members call the same operation, and it ends
# when the bytes are there. It couples both sides. Below, a dot is waiting, X is the broadcast, P is
# the copy into a slot, f a pull. (Drawn as in NCCL, where all wait for the last one. In gloo the
# trainer serves each generator when that comes: it waits as drawn, but generator 0 does not.)
#
#     trainer       step 7 ........XXXX step 8 ........XXXX     step 7 step 8 step 9 step 10
#       a thread                                                       PPPP   PPPP   PPPP
#     generator 0   rollout .......XXXX rollout .......XXXX     rollout f rollout f rollout f
#     generator 1   long rollout...XXXX long rollout...XXXX     long rollout f long rollout f
#
# -- 7a. What lies in a slot -----------------------------------------------------------------------


class WeightMismatch(ValueError):
    """The two sides do not have the same weights in mind. Nothing has been taken over."""


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in a slot."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int  # bytes from the start of the slot
    num_bytes: int

    def view(self, slot: torch.Tensor) -> torch.Tensor:
        """This tensor in a slot, [slot bytes] uint8, without a copy."""
        return (
            slot[self.offset : self.offset + self.num_bytes]
            .view(self.dtype)
            .view(self.shape)
        )


Manifest = tuple[TensorSpec, ...]


def manifest_of(
    tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None
) -> Manifest:
    """The layout of these tensors, in their order. Both sides compute it, and compare.

    dtype: of floating-point tensors in the slot; None: their own.
    """
    specs = []
    offset = 0
    for name, tensor in tensors.items():
        in_slot = dtype if dtype and tensor.is_floating_point() else tensor.dtype
        num_bytes = tensor.numel() * in_slot.itemsize
        specs.append(TensorSpec(name, tuple(tensor.shape), in_slot, offset, num_bytes))
        offset += math.ceil(num_bytes / 64) * 64  # each tensor begins with a cache line
    return tuple(specs)


# -- 7b. The arena: slots and leases ---------------------------------------------------------------
#
# The arena of two readers, while version 8 is being written:
#
#     header   version 7   latest slot 2   lease of reader 0: slot 2   lease of reader 1: slot 1
#
#     slots    slot 0   version 8 is being written into it
#              slot 1   version 6   reader 1 reads it
#              slot 2   version 7   the latest; reader 0 reads it
#              slot 3   version 5   free
#
# Readers + 2 slots are enough: each reader holds one at most, one is the latest, one is written.
#
# Why no read is torn. The header changes under a lock. A slot that is to be written is neither the
# latest nor leased, and only the latest can be newly leased; so nobody can begin to read it before
# `commit`. A reader keeps its lease until its next one, so nobody writes what it reads.
#
# The kernel gives the lock back when its holder dies. The lease of a dead reader belongs to its
# number: the successor with that number overwrites it. A process that is *stopped* in the 5
# microseconds in which it has the lock holds up the others until its owner kills it (section 5).


@dataclass(frozen=True)
class ArenaHandle:
    """How another process of this host finds the arena, and what it must expect there."""

    path: str  # /proc/<process of the writer>/fd/<number>
    manifest: Manifest
    slot_bytes: int
    num_readers: int


class Arena:
    """One process's mapping of the shared memory: a page of 8-byte words, then the slots."""

    HEADER_BYTES = 4096
    VERSION = 0  # words of the header
    LATEST = 1  # a slot
    LEASES = 2  # this and the following, one of each reader: a slot
    NOTHING = -1

    def __init__(self, handle: ArenaHandle) -> None:
        # A lock belongs to an open file, so each process opens the file for itself.
        self.file = open(handle.path, "r+b", buffering=0)
        self.num_readers = handle.num_readers
        self.num_slots = handle.num_readers + 2
        memory = mmap.mmap(
            self.file.fileno(), self.HEADER_BYTES + self.num_slots * handle.slot_bytes
        )
        self.words = memoryview(memory)[: self.HEADER_BYTES].cast("q")
        whole = torch.frombuffer(memory, dtype=torch.uint8)
        self.slots = whole[self.HEADER_BYTES :].view(self.num_slots, handle.slot_bytes)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """The header is read and changed under this lock."""
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def lease(self, reader: int) -> tuple[int, int]:
        """(version, slot) of the latest weights; nobody writes them until this reader's next lease.

        Both are NOTHING if there are none yet.
        """
        with self.locked():
            slot = self.words[self.LATEST]
            self.words[self.LEASES + reader] = slot  # mechanism: weight_sync
            return self.words[self.VERSION], slot

    def free_slot(self) -> int:
        """For the writer: a slot that is neither the latest nor leased."""
        with self.locked():
            leases = self.words[self.LEASES : self.LEASES + self.num_readers].tolist()
            taken = {self.words[self.LATEST], *leases}
        return min(set(range(self.num_slots)) - taken)

    def commit(self, version: int, slot: int) -> None:
        """For the writer, when the slot is complete: makes it the latest."""
        with self.locked():
            self.words[self.VERSION] = version
            self.words[self.LATEST] = slot


def create_arena(manifest: Manifest, num_readers: int) -> tuple[ArenaHandle, Arena]:
    """An arena in memory of this process, which others can map while this process lives."""
    last = manifest[-1]
    slot_bytes = math.ceil((last.offset + last.num_bytes) / mmap.PAGESIZE) * mmap.PAGESIZE
    descriptor = os.memfd_create(
        "weights"
    )  # a file without a name: it ends with its last user
    os.ftruncate(descriptor, Arena.HEADER_BYTES + (num_readers + 2) * slot_bytes)
    path = f"/proc/{os.getpid()}/fd/{descriptor}"
    handle = ArenaHandle(path, manifest, slot_bytes, num_readers)
    arena = Arena(handle)
    for word in range(Arena.LEASES + num_readers):
        arena.words[word] = Arena.NOTHING
    arena.slots.zero_()  # the kernel makes pages at their first use, which costs more than a copy
    return handle, arena


# -- 7c. The writer and the readers ----------------------------------------------------------------


class WeightWriter:
    """The trainer's side. `publish` copies beside whatever follows, in a thread.

    tensors: by name; their memory moves into one block with the layout of a slot, so that a publish
    is a single memory copy. On a GPU, or with another dtype, each is copied by itself.
    """

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        num_readers: int,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.tensors = tensors
        manifest = manifest_of(tensors, dtype)
        self.handle, self.arena = create_arena(manifest, num_readers)
        self.block: torch.Tensor | None = None
        if manifest == manifest_of(tensors) and not any(
            t.is_cuda for t in tensors.values()
        ):
            self.block = torch.zeros(self.handle.slot_bytes, dtype=torch.uint8)
            for spec in manifest:
                view = spec.view(self.block)
                view.copy_(tensors[spec.name].detach())
                tensors[spec.name].data = view
        self.thread = ThreadPoolExecutor(1)
        self.copying: Future[None] | None = None

    def publish(self, version: int) -> None:
        """Begins to make the tensors the latest version. Waits for the copy before.

        Nobody may change them until `wait` has returned.
        """
        self.wait()
        self.copying = self.thread.submit(self._copy, version)

    def wait(self) -> None:
        """Returns when nothing is being copied. Raises what the copy raised."""
        copying = self.copying
        self.copying = None  # a copy that failed is told once
        if copying:
            copying.result()

    def _copy(self, version: int) -> None:
        slot = self.arena.free_slot()
        self.write(self.arena.slots[slot])
        self.arena.commit(version, slot)  # the last thing: from now on readers can get it

    def write(self, slot: torch.Tensor) -> None:
        """Fills a slot, [slot bytes] uint8, with the tensors as they are now."""
        if self.block is not None:
            # copy_ reads what it overwrites, as any store does that goes through the cache. memmove
            # of a large block does not, so it takes a third less time.
            ctypes.memmove(slot.data_ptr(), self.block.data_ptr(), self.block.nbytes)
            return
        with torch.no_grad():
            for spec in self.handle.manifest:
                spec.view(slot).copy_(self.tensors[spec.name])


class WeightReader:
    """A generator's side: `pull` makes its tensors the latest version.

    On a CPU the tensors become views of the slot, so nothing is copied. On a GPU they are filled.
    Raises WeightMismatch if the writer's tensors are others, or if the writer has gone.
    """

    def __init__(
        self, handle: ArenaHandle, reader: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        for theirs, mine in itertools.zip_longest(handle.manifest, manifest_of(tensors)):
            if theirs != mine:
                raise WeightMismatch(f"the writer has {theirs}, the reader {mine}")
        if not 0 <= reader < handle.num_readers:
            raise WeightMismatch(f"there is no reader {reader} of {handle.num_readers}")
        try:
            self.arena = Arena(handle)
        except OSError as error:
            raise WeightMismatch("the writer has ended") from error
        self.handle = handle
        self.reader = reader
        self.tensors = tensors
        self.slot = Arena.NOTHING  # which the tensors are, or were filled from
        # Made once: to make the views of a slot takes longer than all the rest of a pull.
        self.views = [
            [spec.view(slot) for spec in handle.manifest] for slot in self.arena.slots
        ]

    def pull(self) -> int:
        """Makes the tensors the latest version, which is returned; -1 if there is none yet."""
        version, slot = self.arena.lease(self.reader)
        if slot not in (self.slot, Arena.NOTHING):
            self.slot = slot
            for tensor, view in zip(self.tensors.values(), self.views[slot], strict=True):
                if tensor.is_cuda:
                    tensor.data.copy_(view)
                else:
                    tensor.data = view
        return version


# -- measurement -----------------------------------------------------------------------------------


def blocks_of(num_mib: int) -> dict[str, torch.Tensor]:
    """Weights of so many MiB, in 32 tensors."""
    return {f"block{i}": torch.zeros(num_mib << 13) for i in range(32)}


class ReaderWorker(Worker):
    """Reads weights of which each version is filled with one number."""

    def setup(self, number: int, handle: ArenaHandle, num_mib: int) -> None:
        """Attaches to the arena as the reader of this number."""
        self.tensors = blocks_of(num_mib)
        self.reader = WeightReader(handle, number, self.tensors)

    def pull(self) -> float:
        """One pull: its milliseconds."""
        start = time.perf_counter()
        self.reader.pull()
        return (time.perf_counter() - start) * 1e3

    def count_torn(self, num_reads: int, keeps_lease: bool) -> int:
        """Pulls and reads so often. A read is torn if two of its numbers differ."""
        num_torn = 0
        for _ in range(num_reads):
            numbers = {self.reader.pull()}
            if not keeps_lease:
                self.reader.arena.words[Arena.LEASES + self.reader.reader] = Arena.NOTHING
            for tensor in self.tensors.values():
                numbers.update(extreme.item() for extreme in tensor.aminmax())
                time.sleep(
                    0.0005
                )  # a generator reads its weights for as long as it samples
            num_torn += len(numbers) > 1
        return num_torn


async def count_torn(service: Service, writer: WeightWriter, keeps_lease: bool) -> int:
    """Publishes one version after the other while the readers make 60 reads in all."""

    def publish(version: int) -> None:
        for tensor in writer.tensors.values():
            tensor.fill_(version)
        writer.publish(version)
        writer.wait()

    version = 1000
    publish(version)
    requests = []
    for replica in service.replicas.values():
        num_reads = 60 // service.num_replicas
        requests.append(
            replica.worker.call.call_one("count_torn", num_reads, keeps_lease)
        )
    reading = asyncio.gather(*[asyncio.ensure_future(request) for request in requests])
    while not reading.done():
        version += 1
        publish(version)
        await asyncio.sleep(0)
    return sum(reading.result())


async def measure_slots(service: Service, writer: WeightWriter) -> dict[str, float]:
    """Medians over 15 versions: publish over memmove, and what trainer and generator wait for."""
    block = writer.block
    scratch = torch.ones_like(block)
    matrix = torch.ones(512, 512)
    ratios = []
    trainer_ms = []
    pull_ms = []
    for version in range(15):
        start = time.perf_counter()
        ctypes.memmove(scratch.data_ptr(), block.data_ptr(), block.nbytes)
        memmove_s = time.perf_counter() - start
        start = time.perf_counter()
        writer.publish(2 * version)
        writer.wait()
        ratios.append((time.perf_counter() - start) / memmove_s)
        writer.publish(2 * version + 1)
        end = time.perf_counter() + 4 * memmove_s
        while time.perf_counter() < end:
            matrix @ matrix  # the next forward and backward pass
        start = time.perf_counter()
        writer.wait()  # before the optimizer changes the weights
        trainer_ms.append((time.perf_counter() - start) * 1e3)
        pulls = [
            replica.worker.call.call_one("pull") for replica in service.replicas.values()
        ]
        pull_ms += await asyncio.gather(*pulls)
    return {
        "x memmove": statistics.median(ratios),
        "trainer waits ms": statistics.median(trainer_ms),
        "generator waits ms": statistics.median(pull_ms),
    }


@stage(
    "a generator never samples from half-updated weights, and a sync is one memory copy",
    instead="pass",
)
async def demo_weight_sync(report: Report, cfg: Config) -> None:
    """Publishes 64 MiB to 1, 2 and 4 readers, with and without leases."""
    num_mib = 64
    torch.set_num_threads(1)
    report.say(f"{num_mib} MiB of weights; torn reads of 60")
    rows = []
    num_torn = {"with": 0, "without": 0}
    for num_readers in (1, 2, 4):
        writer = WeightWriter(blocks_of(num_mib), num_readers)
        setup_args = (writer.handle, num_mib)
        service = Service(ReaderWorker, num_readers, report.pool, setup_args)
        await service.begin()
        found = await measure_slots(service, writer)
        report.figure(**{f"publish_over_memmove_{num_readers}": found["x memmove"]})
        report.figure(pull_ms=found["generator waits ms"])
        for leases in ("without", "with"):
            if num_readers == 2 or leases == "with":
                torn = await count_torn(service, writer, leases == "with")
                num_torn[leases] += torn
                road = f"{num_readers} readers, {leases} leases"
                measured = found if leases == "with" else {}
                rows.append({"road": road, "torn": torn, **measured})
        await service.close()
    report.table(rows)
    report.check("torn reads of 60 without leases", num_torn["without"], ">", 0)
    report.check("torn reads of 180 with leases", num_torn["with"], "==", 0)
    report.figure(torn_reads=num_torn["with"])
    report.figure(torn_reads_without_leases=num_torn["without"])


# == 8. RESHARD ====================================================================================
# Problem. The trainer's ranks cut the weights in one way, say by rows, and the generator's ranks in
#   another, say by columns. To gather the whole on one rank, and to cut it anew, moves every byte
#   several times, and needs memory for the whole.
# Rule. Describe what a rank has as a box of the whole tensor. Through a slot, each trainer rank
#   writes its boxes and each generator rank views its own: the slot is the whole, and no rank holds
#   it. Between machines one move is made where a box of one side meets a box of the other.
# Cost. A box by columns is not contiguous, so it is copied row by row.
#
# By example, a matrix of 5 x 23; two trainer ranks have rows, two generator ranks columns. As in
# torch.chunk all pieces are equally long except the last ones, which may be shorter, or empty:
#
#     trainer rank 0     rows 0-2, all columns       writes this box into the slot
#     trainer rank 1     rows 3-4, all columns       writes this box into the same slot
#     generator rank 0   all rows, columns 0-11      views this box of the slot
#     generator rank 1   all rows, columns 12-22     views this box of the slot

Index = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: in each dimension a range, from `start` to just before `end`."""

    start: Index
    end: Index

    @property
    def region(self) -> tuple[slice, ...]:
        """What to index the whole tensor with to get the box."""
        return tuple(slice(*ends) for ends in zip(self.start, self.end, strict=True))

    @property
    def size(self) -> int:
        """Its elements; 0 for an empty box."""
        lengths = [max(0, part.stop - part.start) for part in self.region]
        return math.prod(lengths)

    def overlap(self, other: Box) -> Box:
        """The part that both have."""
        start = [max(pair) for pair in zip(self.start, other.start, strict=True)]
        end = [min(pair) for pair in zip(self.end, other.end, strict=True)]
        return Box(tuple(start), tuple(end))


def box_of(shape: Index, mesh_shape: Index, placements: Any, coordinate: Index) -> Box:
    """What the rank at this coordinate of a mesh has of a tensor, by the rules of DTensor.

    placements: for each dimension of the mesh, Shard(dim of the tensor) or Replicate().
    """
    start = [0] * len(shape)
    end = list(shape)
    for placement, num_ranks, rank in zip(
        placements, mesh_shape, coordinate, strict=True
    ):
        if placement.is_replicate():
            continue
        if not placement.is_shard():
            raise WeightMismatch(
                f"{placement}: its ranks have summands, or strides, and not boxes"
            )
        dim = placement.dim
        length = math.ceil((end[dim] - start[dim]) / num_ranks)
        start[dim] = min(start[dim] + rank * length, end[dim])
        end[dim] = min(start[dim] + length, end[dim])
    return Box(tuple(start), tuple(end))


def plan(sources: list[Box], targets: list[Box]) -> list[tuple[int, int, Box]]:
    """(source rank, target rank, box): moves that give each target its box, each element once.

    It is for ranks that share no memory. Of sources with the same box, the first sends it.
    """
    moves = []
    for target, wanted in enumerate(targets):
        for source, held in enumerate(sources):
            shared = held.overlap(wanted)  # mechanism: reshard
            if shared.size and held not in sources[:source]:
                moves.append((source, target, shared))
    return moves


class ShardedWriter(WeightWriter):
    """One rank of a trainer of several ranks. All write their boxes into the same slot.

    It shares `publish` and `wait` with WeightWriter. tensors: DTensors. dtype: of the slot.
    """

    def __init__(
        self, tensors: dict[str, Any], num_readers: int, dtype: torch.dtype | None = None
    ) -> None:
        # A group of its own: the copy of a version runs beside the next step's collectives.
        self.group = torch.distributed.new_group(backend="gloo")
        self.rank = torch.distributed.get_rank()
        told: list[Any] = [None]
        if self.rank == 0:
            told[0], self.arena = create_arena(manifest_of(tensors, dtype), num_readers)
        torch.distributed.broadcast_object_list(told, 0, self.group)
        self.handle = told[0]
        if self.rank > 0:
            self.arena = Arena(self.handle)
        self.tensors = tensors
        self.written_bytes = 0
        self.thread = ThreadPoolExecutor(1)
        self.copying = None

    def _copy(self, version: int) -> None:
        slot = torch.tensor([self.arena.free_slot() if self.rank == 0 else 0])
        torch.distributed.broadcast(slot, 0, self.group)
        failure: Exception | None = None
        try:
            self.write(self.arena.slots[int(slot)])
        except Exception as error:
            failure = error
        # Waits until all have written, and tells each rank whether one of them has failed.
        num_failed = torch.tensor([int(failure is not None)])
        torch.distributed.all_reduce(num_failed, group=self.group)
        if num_failed > 0:
            raise failure or RuntimeError("the copy of another rank has failed")
        if self.rank == 0:
            self.arena.commit(version, int(slot))

    def write(self, slot: torch.Tensor) -> None:
        """Writes this rank's boxes. Of ranks that have the same box, the first one writes it."""
        for spec in self.handle.manifest:
            tensor = self.tensors[spec.name]
            mesh = tensor.device_mesh
            is_first = True
            for placement, rank in zip(
                tensor.placements, mesh.get_coordinate(), strict=True
            ):
                is_first = is_first and (placement.is_shard() or rank == 0)
            box = box_of(
                spec.shape, mesh.shape, tensor.placements, tuple(mesh.get_coordinate())
            )
            if is_first and box.size:
                target = spec.view(slot)[box.region]
                target.copy_(tensor.to_local().detach())
                self.written_bytes += target.nbytes


def form_group(meeting_file: str, rank: int, num_ranks: int) -> None:
    """Makes this process a member of a gloo process group. Waits until all have come."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{meeting_file}", rank=rank, world_size=num_ranks
    )


# -- measurement -----------------------------------------------------------------------------------


def example(version: int) -> torch.Tensor:
    """The matrix of the example, in which no two elements are equal."""
    return (torch.arange(5 * 23) + 1000.0 * version).view(5, 23)


class ShardWorker(Worker):
    """A rank of a trainer by rows."""

    def setup(self, number: int, meeting_file: str, num_ranks: int) -> ArenaHandle:
        """Forms the group, and makes the arena together."""
        form_group(meeting_file, current_rank().rank, num_ranks)
        self.mesh = torch.distributed.init_device_mesh("cpu", (num_ranks,))
        self.weights = {"matrix": self._rows(0)}
        self.writer = ShardedWriter(self.weights, 1)
        return self.writer.handle

    def _rows(self, version: int) -> Any:
        return dtensor.distribute_tensor(example(version), self.mesh, [dtensor.Shard(0)])

    def publish(self, version: int) -> tuple[int, int]:
        """The bytes that this rank has written; and those it would receive by a gather."""
        mine = self._rows(version).to_local()
        self.weights["matrix"].to_local().copy_(mine)
        self.writer.publish(version)
        self.writer.wait()
        return self.writer.written_bytes, example(version).nbytes - mine.nbytes

    def release(self) -> None:
        """Leaves the process group."""
        torch.distributed.destroy_process_group()


@stage(
    "from one sharding to another, each byte that is needed is written once",
    instead="shared = wanted",
)
async def demo_reshard(report: Report, cfg: Config) -> None:
    """Two ranks by rows publish; two ranks by columns read their boxes of the slot."""
    rows = [box_of((5, 23), (2,), [dtensor.Shard(0)], (rank,)) for rank in range(2)]
    columns = [box_of((5, 23), (2,), [dtensor.Shard(1)], (rank,)) for rank in range(2)]
    num_moved = 0
    for source, target, box in plan(rows, columns):
        where = ", ".join(f"{part.start}:{part.stop}" for part in box.region)
        report.say(
            f"without shared memory: rank {source} sends [{where}] to rank {target}"
        )
        num_moved += box.size
    report.check("elements moved, of 115 that are needed", num_moved, "==", 115)

    setup_args = (str(report.folder / "shards"), 2)
    service = Service(ShardWorker, 1, report.pool, setup_args, num_ranks=2)
    (handle,) = await service.begin()
    answers = await service.replicas[0].worker.call.call("publish", 1)
    arena = Arena(handle)
    version, slot = arena.lease(0)
    whole = handle.manifest[0].view(arena.slots[slot])
    num_wrong = 0
    for box in columns:
        num_wrong += int((whole[box.region] != example(version)[box.region]).sum())
    report.check("elements that differ from the trainer's", num_wrong, "==", 0)
    written_bytes = sum(written for _, (written, _) in answers.items())
    gathered_bytes = sum(received for _, (_, received) in answers.items()) + whole.nbytes
    report.check("bytes written / bytes needed", written_bytes / whole.nbytes, "==", 1)
    report.say(
        f"a gather and one write: {gathered_bytes / whole.nbytes:.1f} times the bytes"
    )
    report.figure(written_over_needed=written_bytes / whole.nbytes)
    report.figure(gather_over_needed=gathered_bytes / whole.nbytes)
    await service.close()


# == 9. ROLLOUT ====================================================================================
# Problem. In RL the same network runs in two programs. The generator samples token by token, with a
#   cache of what attention has computed before. The trainer scores whole conversations at once. If
#   they disagree about what was sampled, or how likely it was, the gradient is that of samples that
#   nobody drew. No error says so.
# Rule. Record while sampling, and reconstruct nothing afterwards. Of each sampled token:
#     its id               a later turn continues the exact ids of earlier ones; text is for people
#     its log-probability  in fp32, under the distribution that it was drawn from
#     its version          of the weights; and new weights mean a new cache
# Cost. Three more numbers per token. A new cache is one pass over what has been said.
#
# -- 9a. Tasks and prompts -------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """What the user says in one turn, as messages of a chat template, and what would be right."""

    messages: tuple[dict[str, str], ...]  # {"role": "user", "content": "abc"}
    answer: Any


@dataclass(frozen=True)
class Prompt:
    """A conversation to be had. Its number is also that of its group."""

    number: int
    turns: tuple[Turn, ...]

    @property
    def is_held_out(self) -> bool:
        """One prompt in ten, by a checksum of its text, is evaluated and never trained on."""
        text = json.dumps([turn.messages for turn in self.turns])
        return zlib.crc32(text.encode()) % 10 == 0


def user_turn(text: str, answer: Any) -> Turn:
    """A turn in which the user says this."""
    return Turn(({"role": "user", "content": text},), answer)


class Task:
    """What the policy is asked, and what its responses are worth."""

    max_new_tokens = 256  # of one response, unless --max-new-tokens says otherwise

    def prompt(self, number: int) -> Prompt:
        """The prompt of this number, 0, 1, 2 ...: always the same one."""
        raise NotImplementedError

    def score(self, prompt: Prompt, responses: list[str]) -> Any:
        """The reward of each turn, or one number for all. They add up to 1 if all is right."""
        raise NotImplementedError


LETTERS = "abcdefghijklmnop"


class LetterTask(Task):
    """For the tiny policy, which hears and says letters, in a ring of sixteen.

    To each letter of the user the right response has the letters that lie so many places on: [0]
    repeats what the user says, [1, 2, 3] makes "bcd" of "a".
    """

    max_new_tokens = 4  # three letters and an end; a fourth letter is one too many

    def __init__(self, seed: int, places_on: list[int]) -> None:
        self.seed = seed
        self.places_on = places_on

    def prompt(self, number: int) -> Prompt:
        """Two turns of random letters."""
        rng = random.Random(f"{self.seed} {number}")
        turns = []
        for _ in range(2):
            text = "".join(rng.choices(LETTERS, k=3 // len(self.places_on)))
            answer = ""
            for letter in text:
                for places in self.places_on:
                    answer += LETTERS[(LETTERS.index(letter) + places) % 16]
            turns.append(user_turn(text, answer))
        return Prompt(number, tuple(turns))

    def score(self, prompt: Prompt, responses: list[str]) -> list[float]:
        """Of each turn the share of letters that are right; a surplus one counts as wrong."""
        rewards = []
        for turn, response in zip(prompt.turns, responses, strict=True):
            num_right = sum(a == b for a, b in zip(turn.answer, response, strict=False))
            rewards.append(num_right / max(len(turn.answer), len(response)) / 2)
        return rewards


TASKS = {"repeat": [0], "count": [1, 2, 3], "pattern": [8]}


def letter_task(cfg: Config) -> Task:
    """The task of this name."""
    return LetterTask(cfg.seed, TASKS[cfg.task])


# -- 9b. What is recorded --------------------------------------------------------------------------
#
# Episodes are rows of tokens, and no row is tokenized again. Here are two of them. (<u> and <a>
# begin a turn of the user and of the assistant, <e> ends one; u is a letter of the user; a to g
# were sampled.)
#
#     ids       <u> u u u <e> <a>  a b c <e>  <u> u u u <e> <a>  d e f <e>
#     turn_of    0  0 0 0  0   0   1 1 1  1    0  0 0 0  0   0   2 2 2  2
#
#     ids       <u> u u u <e> <a>  a <e>  <u> u u u <e> <a>  d e f  g
#     turn_of    0  0 0 0  0   0   1  1    0  0 0 0  0   0   2 2 2  2
#
# A response has at most four tokens here, so the last one was truncated after g: it has no end.


@dataclass
class Episode:
    """One conversation, token by token. Plain lists: it travels in messages as it is."""

    prompt: Prompt
    ids: list[int] = field(default_factory=list)
    turn_of: list[int] = field(
        default_factory=list
    )  # 0: not sampled; else the turn, from 1
    logprobs: list[float] = field(default_factory=list)  # 0.0 where not sampled
    versions: list[int] = field(default_factory=list)  # -1 where not sampled
    responses: list[str] = field(default_factory=list)  # of each turn
    truncated: list[bool] = field(
        default_factory=list
    )  # of each turn: it has no end token
    rewards: list[float] | None = None  # of each turn; None: nobody could tell

    def add(
        self, ids: list[int], turn: int, logprobs: list[float], versions: list[int]
    ) -> None:
        """Appends tokens of one turn."""
        self.ids += ids
        self.turn_of += [turn] * len(ids)
        self.logprobs += logprobs
        self.versions += versions

    def add_prompt(self, ids: list[int]) -> None:
        """Appends tokens that were not sampled."""
        self.add(ids, 0, [0.0] * len(ids), [-1] * len(ids))


# -- 9c. The policy --------------------------------------------------------------------------------


def tiny_policy(seed: int, merges: list[tuple[str, str]]) -> tuple[Any, Any]:
    """(tokenizer, model) with which everything here runs at the speed of a laptop.

    A Qwen2 of 30 thousand parameters, with real attention and a real cache, and a token per letter.
    merges: pairs of letters that have a token of their own, too, as in real tokenizers.
    """
    tokens = ["<user>", "<assistant>", "<end>", *LETTERS]
    tokens += [first + second for first, second in merges]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    tokenizer = transformers.Qwen2Tokenizer(
        {token: i for i, token in enumerate(tokens)},
        merges,
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
        attn_implementation="eager",  # attention in plain torch: the fastest for so small a model
    )
    torch.manual_seed(seed)
    return tokenizer, transformers.Qwen2ForCausalLM(config)


def pretrained(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """(tokenizer, model) of a folder or hub id. Raises UsageError if it cannot be trained."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    if not tokenizer.chat_template:
        raise UsageError(f"--model {name}: its tokenizer has no chat template")
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        name, dtype=dtype, output_loading_info=True
    )
    lacking = [*loaded["missing_keys"], *loaded["mismatched_keys"]]
    if lacking:
        raise UsageError(
            f"--model {name}: {len(lacking)} weights are missing, such as {lacking[0]}"
        )
    return tokenizer, model


class Policy:
    """A causal language model, its tokenizer, and what its chat template means in tokens.

    dtype: of the parameters. Forward passes compute in cfg.dtype, whatever the parameters are.
    """

    def __init__(self, cfg: Config, task: Task, dtype: torch.dtype) -> None:
        if cfg.model:
            self.tokenizer, model = pretrained(cfg.model, dtype)
        else:
            self.tokenizer, model = tiny_policy(cfg.seed, [])
        self.device = torch.device(cfg.device or "cpu")
        self.model = model.to(
            self.device, dtype
        ).eval()  # without dropout, which samples lack
        self.dtype = getattr(torch, cfg.dtype)
        self.temperature = cfg.temperature
        config = model.config.get_text_config()
        self.context = getattr(config, "max_position_embeddings", None) or 1 << 20
        self.max_new_tokens = cfg.max_new_tokens or min(
            task.max_new_tokens, self.context // 2
        )
        if self.max_new_tokens >= self.context:
            raise UsageError(f"--max-new-tokens: the context has {self.context} tokens")
        self.takes_positions = (
            "position_ids" in inspect.signature(model.forward).parameters
        )
        self.control_tokens = self.tokenizer.get_added_vocab()
        self.end_ids = self._end_ids()

    def _end_ids(self) -> list[int]:
        """Every token that ends a response: of the template, the tokenizer, and the model."""
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        opened = self._render(chat[:1], True) + "b"
        whole = self._render(chat, False)
        closing = self._tokenize(whole[len(opened) :]) if whole.startswith(opened) else []
        ends = [i for i in closing[:1] if i in self.control_tokens.values()]
        of_model = self.model.generation_config.eos_token_id
        ends += of_model if isinstance(of_model, list) else [of_model]
        ends.insert(1, self.tokenizer.eos_token_id)
        ends = [end for end in dict.fromkeys(ends) if end is not None]
        if not ends:
            raise UsageError(
                "the tokenizer has no token that ends a response (eos_token)"
            )
        return ends

    def _render(self, messages: Any, add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )

    def _tokenize(self, text: str, is_plain: bool = False) -> list[int]:
        encoded = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=is_plain
        )
        return encoded["input_ids"]

    def prompt_ids(self, prompt: Prompt, turn: int) -> list[int]:
        """The ids that a turn, from 0, appends to the conversation.

        The first turn is what the chat template makes of its messages. A later one is what it adds
        behind the last response, the end of that response included. Raises UsageError if the
        template rewrites earlier turns, so that nothing can be appended.
        """
        messages = list(prompt.turns[0].messages)
        before = ""
        for later in prompt.turns[1 : turn + 1]:
            before = self._render(messages, True) + "response"
            messages += [{"role": "assistant", "content": "response"}, *later.messages]
        whole = self._render(messages, True)
        if not whole.startswith(before):
            raise UsageError(
                "the chat template rewrites earlier turns: use tasks of one turn"
            )
        text = whole[len(before) :]
        ids = []
        # What people say is plain text, also if it looks like a control token.
        for content in [
            message["content"].strip() for message in prompt.turns[turn].messages
        ]:
            if any(token in content for token in self.control_tokens):
                of_template, _, text = text.partition(content)
                ids += self._tokenize(of_template) + self._tokenize(
                    content, is_plain=True
                )
        return ids + self._tokenize(text)

    def answer_ids(self, text: str) -> list[int]:
        """The ids of a right response, with its end."""
        return [*self._tokenize(text, is_plain=True), self.end_ids[0]]

    def text_of(self, ids: list[int]) -> str:
        """A response as people read it."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def forward(self, ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Logits of ids [B, T], at the positions in `logits_to_keep`."""
        parameters = dict(self.model.named_parameters())
        if next(iter(parameters.values())).dtype == self.dtype:
            return self.model(input_ids=ids, **inputs).logits
        cast = {name: parameter.to(self.dtype) for name, parameter in parameters.items()}
        inputs["input_ids"] = ids
        return torch.func.functional_call(self.model, cast, kwargs=inputs).logits


# -- 9d. Sampling ----------------------------------------------------------------------------------


def left_padded(
    rows: list[list[int]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [B, T] and mask [B, T], 1 where there is a token. Padding is on the left."""
    width = max(len(row) for row in rows)
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


class Decoder:
    """The cache of a batch, and what is needed to go on by one token."""

    def __init__(self, policy: Policy, rows: list[list[int]]) -> None:
        """Computes the cache of these rows of ids; equal rows are computed once."""
        self.policy = policy
        self.cache = transformers.DynamicCache(config=policy.model.config)
        unique = list(dict.fromkeys(tuple(row) for row in rows))
        ids, self.mask = left_padded([list(row) for row in unique], policy.device)
        self.logits = self._forward(ids)
        place = {row: i for i, row in enumerate(unique)}
        self.select([place[tuple(row)] for row in rows])

    def _forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits [B, V] of the token after the last."""
        inputs: dict[str, Any] = {"attention_mask": self.mask, "cache": self.cache}
        if self.policy.takes_positions:
            inputs["position_ids"] = (self.mask.cumsum(1) - 1).clamp(min=0)[
                :, -ids.shape[1] :
            ]
        return self.policy.forward(ids, use_cache=True, logits_to_keep=1, **inputs)[:, -1]

    def select(self, rows: list[int]) -> None:
        """Keeps these rows, in this order; a row may be kept several times."""
        index = torch.tensor(rows, device=self.mask.device)
        self.cache.reorder_cache(index)
        self.mask = self.mask[index]
        self.logits = self.logits[index]

    def append(self, tokens: list[int]) -> None:
        """One more token for each row."""
        ids = torch.tensor(tokens, device=self.mask.device)[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(ids)], 1)
        self.logits = self._forward(ids)

    def draw(self, rng: torch.Generator | None) -> Iterator[tuple[int, float]]:
        """For each row a token and its log-probability. rng None: the likeliest token."""
        logp = (self.logits.float() / self.policy.temperature).log_softmax(-1)
        if rng is None:
            token = logp.argmax(-1, keepdim=True)
        else:
            # A line, cut into pieces as long as the probabilities, and a random place on it.
            ends = logp.exp().double().cumsum(-1)
            place = torch.rand(
                len(ends), 1, dtype=ends.dtype, device=ends.device, generator=rng
            )
            token = torch.searchsorted(ends, place * ends[:, -1:], right=True)
        chosen = logp.gather(1, token)
        return zip(token.flatten().tolist(), chosen.flatten().tolist(), strict=True)


@dataclass
class Response:
    """What is being sampled for one episode."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


def respond(
    policy: Policy,
    episodes: list[Episode],
    turn: int,
    rng: torch.Generator | None,
    pull: Callable[[], int],
) -> None:
    """Samples a response for each episode, in one batch. A row that has ended leaves the batch.

    pull: called before each token; makes the weights the newest, and returns their version.
    """
    responses = [Response() for _ in episodes]
    rows = list(range(len(episodes)))  # which episode each row of the batch belongs to
    version: int | None = None
    for _ in range(policy.max_new_tokens):
        newest = pull()
        if newest != version:  # mechanism: rollout
            decoder = Decoder(
                policy, [episodes[row].ids + responses[row].ids for row in rows]
            )
            version = newest
        else:
            decoder.append([responses[row].ids[-1] for row in rows])
        going_on = []
        for place, (token, logprob) in enumerate(decoder.draw(rng)):
            response = responses[rows[place]]
            response.ids.append(token)
            response.logprobs.append(logprob)
            response.versions.append(newest)
            if token not in policy.end_ids:
                going_on.append(place)
        if not going_on:
            break
        if len(going_on) < len(rows):
            rows = [rows[place] for place in going_on]
            decoder.select(going_on)
    for episode, response in zip(episodes, responses, strict=True):
        episode.add(response.ids, turn + 1, response.logprobs, response.versions)
        episode.truncated.append(response.ids[-1] not in policy.end_ids)
        episode.responses.append(policy.text_of(response.ids))


def rollout(
    policy: Policy,
    prompts: list[Prompt],
    group_size: int,
    seed: int | None,
    pull: Callable[[], int],
) -> list[Episode]:
    """Has each conversation group_size times. seed None: with the likeliest tokens.

    A conversation that does not fit into the context is left out.
    """
    rng = None
    if seed is not None:
        rng = torch.Generator(policy.device).manual_seed(seed)
    episodes = [Episode(prompt) for prompt in prompts for _ in range(group_size)]
    with torch.inference_mode():
        for turn in range(max(len(prompt.turns) for prompt in prompts)):
            speaking = [
                episode for episode in episodes if turn < len(episode.prompt.turns)
            ]
            prompted(policy, speaking, turn)
            longest = policy.context - policy.max_new_tokens
            left_out = {id(episode) for episode in speaking if len(episode.ids) > longest}
            speaking = [episode for episode in speaking if id(episode) not in left_out]
            episodes = [episode for episode in episodes if id(episode) not in left_out]
            if speaking:
                respond(policy, speaking, turn, rng, pull)
    return episodes


def prompted(policy: Policy, episodes: list[Episode], turn: int) -> None:
    """Appends what the user says in this turn; the same for all episodes of a prompt."""
    ids_of: dict[int, list[int]] = {}
    for episode in episodes:
        number = episode.prompt.number
        if number not in ids_of:
            ids_of[number] = policy.prompt_ids(episode.prompt, turn)
        ids = ids_of[number]
        if turn > 0 and episode.ids[-1] == ids[0]:
            ids = ids[1:]  # the end of the response has been sampled already
        episode.add_prompt(ids)


# -- 9e. What the trainer sees ---------------------------------------------------------------------


def token_logprobs(
    policy: Policy, ids: torch.Tensor, is_sampled: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities [N] and entropies [N] of the sampled tokens, in one forward pass.

    ids: [B, T], padded on the right. is_sampled: [B, T - 1], of the tokens from the second on.
    """
    columns = is_sampled.any(0).nonzero().flatten()
    logits = policy.forward(ids[:, :-1], use_cache=False, logits_to_keep=columns)
    logp = (logits[is_sampled[:, columns]].float() / policy.temperature).log_softmax(
        -1
    )  # [N, V]
    chosen = logp.gather(1, ids[:, 1:][is_sampled][:, None]).squeeze(1)
    # In a bfloat16 run a word may have log-probability -inf, and 0 * -inf would be nan.
    return chosen, -(logp.exp() * logp.clamp(min=-100)).sum(-1)


def k3(recorded: torch.Tensor, recomputed: torch.Tensor) -> torch.Tensor:
    """[N] log-probabilities each -> [N] float64: exp(d) - 1 - d with d = recomputed - recorded.

    Its mean over sampled tokens estimates the KL divergence of the two. So does the mean of -d, but
    that has both signs; exp(d) - 1 has the mean 0, and with it no summand is negative. By example,
    a token with probability 0.50, recomputed as 0.40: d = -0.22, and 0.80 - 1 + 0.22 = 0.023.
    (Schulman 2020, who calls -d k1, and d**2 / 2 k2.)
    """
    d = (recomputed - recorded).detach().double()
    return d.exp() - 1 - d


def scored(policy: Policy, episodes: list[Episode]) -> tuple[torch.Tensor, torch.Tensor]:
    """[N] log-probabilities of sampled tokens: as they were recorded, and by the trainer's pass."""
    recorded = []
    recomputed = []
    for episode in episodes:
        is_sampled = torch.tensor([episode.turn_of[1:]]) > 0
        with torch.no_grad():
            logp, _ = token_logprobs(policy, torch.tensor([episode.ids]), is_sampled)
        recomputed.append(logp)
        recorded.append(torch.tensor(episode.logprobs[1:])[is_sampled[0]])
    return torch.cat(recorded), torch.cat(recomputed)


@stage(
    "what was recorded while sampling is what the trainer recomputes",
    instead="if version is None:",
)
async def demo_rollout(report: Report, cfg: Config) -> None:
    """Samples 64 conversations with weights that change meanwhile, and recomputes them."""
    cfg = replace(
        cfg, model="", task="repeat", device="cpu", dtype="float32", temperature=1.0
    )
    task = letter_task(cfg)
    policy = Policy(cfg, task, torch.float32)
    prompts = [task.prompt(number) for number in range(16)]
    weights = [
        {n: p + 0.1 * v for n, p in policy.model.state_dict().items()} for v in range(2)
    ]
    num_pulls = 0

    def pull() -> int:
        """Brings new weights in the middle of each response."""
        nonlocal num_pulls
        num_pulls += 1
        version = num_pulls // 2 % 2
        policy.model.load_state_dict(weights[version])
        return version

    episodes = rollout(policy, prompts, 4, seed=0, pull=pull)
    # Each token is compared with a pass by the weights of its version.
    found = torch.zeros(0, dtype=torch.float64)
    for version in range(2):
        policy.model.load_state_dict(weights[version])
        of_version = torch.tensor(
            [v == version for e in episodes for v in e.versions if v >= 0]
        )
        recorded, recomputed = scored(policy, episodes)
        found = torch.cat([found, k3(recorded, recomputed)[of_version]])
    rounded = recomputed.bfloat16().float()
    # A fresh policy samples any token. If there are tokens for pairs, text gives back other ids.
    tokenizer, _ = tiny_policy(0, list(itertools.product(LETTERS, LETTERS)))
    rng = random.Random(0)
    num_changed = 0
    for _ in range(64):
        ids = rng.choices(range(3, len(tokenizer)), k=4)
        num_changed += tokenizer(tokenizer.decode(ids))["input_ids"] != ids
    report.table(
        [
            {
                "the trainer takes": "recorded ids, a cache per version",
                "k3": float(found.mean()),
            },
            {
                "the trainer takes": "log-probabilities in bfloat16",
                "k3": float(k3(recomputed, rounded).mean()),
            },
        ]
    )
    report.check("k3 of recorded and recomputed", float(found.mean()), "<", 1e-10)
    report.check(
        "responses of 64 that come back from text as other ids", num_changed, ">", 0
    )
    report.figure(k3=float(found.mean()))


# == 10. LOSSES ====================================================================================
# Problem. What should grow is J, the mean reward of the policy. Samples give its gradient, but
#   noisily; and samples of an older policy give the gradient of something else.
# Rule. Three remedies, each for a reason of its own:
#     a baseline   removes noise. In place of the reward stands the advantage A: how much better the
#                  response was than others to the same prompt.
#     a ratio      r = p now / p when sampled removes bias: samples of an old policy count as often
#                  as the present one would have drawn them.
#     a clip       bounds the push. It corrects no direction; it limits how far one batch can move
#                  a token.
# Cost. Ratios make noise, for a few tokens may have most of the weight. A clip silences tokens.
#
# Where the gradient comes from. J is the sum of p R over all responses; grad log p = grad p / p:
#
#     grad J = sum of R grad p = sum of p (R grad log p) = mean of R grad log p over samples
#
# Why a baseline b does no harm. It adds the mean of -b grad log p, which is -b times the sum of
# grad p, the gradient of the sum of p. That sum is always 1, so its gradient is 0.
#
# Why the loss prints 0. With r = 1 the loss of a token is -A, and the advantages of a group add up
# to 0. So its value says nothing; only its gradient does. Watch the reward and held-out accuracy.


def advantages(rewards: torch.Tensor, kind: str) -> torch.Tensor:
    """Rewards [..., G] of groups -> advantages [..., G].

    By example, the groups 1 1 1 0 (an easy prompt) and 0 0 0 1 (a hard one):

        none            1     1     1     0         0     0     0     1
        leave_one_out   0.33  0.33  0.33 -1        -0.33 -0.33 -0.33  1     (RLOO, Ahmadian 2024)
        group           0.58  0.58  0.58 -1.73     -0.58 -0.58 -0.58  1.73  (GRPO, Shao 2024)

    leave_one_out subtracts the mean of the *others*, which does not depend on the response itself.
    group subtracts the mean of all, and divides by their deviation.
    """
    if kind == "none":
        return rewards
    centred = rewards - rewards.mean(-1, keepdim=True)
    if kind == "leave_one_out":
        num = rewards.shape[-1]
        return centred * num / max(num - 1, 1)
    return centred / (rewards.std(-1, correction=0, keepdim=True) + 1e-4)


# A loss takes tensors [N], with an element for each sampled token, and returns [N]. For each token:
#     logp        its log-probability now, with a gradient
#     recorded    when it was sampled, by an older policy
#     near        before the first update on this batch; in that update it is logp.detach()
#     A           the advantage of its response

MAX_RATIO = 2.0  # what one sample may count for, in decoupled and cispo
MAX_BAD_RATIO = 3.0  # beyond this a token with A < 0 has no gradient: see ppo


def ratio_of(logp: torch.Tensor, recorded: torch.Tensor) -> torch.Tensor:
    """The ratio p now / p when sampled, without overflow."""
    return (logp - recorded).clamp(max=20).exp()


def reinforce(logp: Any, recorded: Any, near: Any, A: Any, cfg: Config) -> torch.Tensor:
    """Williams 1992. No ratio: right for fresh samples only."""
    return -A * logp


def ppo(logp: Any, recorded: Any, near: Any, A: Any, cfg: Config) -> torch.Tensor:
    """Schulman 2017, with the dual clip of Ye 2020.

    By example, a good token (A = 1) that was sampled with probability 0.50. At 0.55 r is 1.1, and
    the loss -r has a gradient: the token becomes likelier still. At 0.65 r is 1.3, and the loss
    -min(1.3, 1.2) is a constant, without a gradient. A *bad* token (A = -1) at 0.65 has the loss
    -min(-1.3, -1.2) = 1.3, and keeps its gradient. So a clip stops a token on its way out, and
    never on its way back. That is why a bad token needs a bound of its own: one that is a hundred
    times as likely now as when it was sampled would outweigh all others in the batch.
    """
    ratio = ratio_of(logp, recorded)
    clipped = ratio.clamp(1 - cfg.clip_low, 1 + cfg.clip_high)
    gain = torch.min(A * ratio, A * clipped)  # mechanism: losses
    return -torch.where(A < 0, gain.clamp(min=MAX_BAD_RATIO * A), gain)


def decoupled(logp: Any, recorded: Any, near: Any, A: Any, cfg: Config) -> torch.Tensor:
    """AReaL (Fu 2025): clips what this batch does, and weighs by how old the sample was.

    With one pass over a batch logp is near, so its clip never acts.
    """
    return ratio_of(near, recorded).clamp(max=MAX_RATIO) * ppo(logp, near, near, A, cfg)


def cispo(logp: Any, recorded: Any, near: Any, A: Any, cfg: Config) -> torch.Tensor:
    """MiniMax-M1 (2025): REINFORCE, weighed by a truncated ratio that has no gradient."""
    weight = ratio_of(logp, recorded).clamp(max=MAX_RATIO).detach()
    return -A * weight * logp


LOSSES: dict[str, Callable[..., torch.Tensor]] = {
    "reinforce": reinforce,
    "ppo": ppo,
    "decoupled": decoupled,
    "cispo": cispo,
}

# -- 10b. The learner ------------------------------------------------------------------------------


@dataclass
class Batch:
    """Episodes as tensors: B rows, T columns, N sampled tokens, row by row."""

    ids: torch.Tensor  # [B, T], padded on the right
    is_sampled: torch.Tensor  # [B, T - 1], of the tokens from the second on
    recorded: torch.Tensor  # [N] log-probabilities
    advantage: torch.Tensor  # [N]


def advantages_of(episodes: list[Episode], kind: str) -> list[list[float]]:
    """Of each episode, of each turn: what its rewards from that turn on say, within its group."""
    groups: dict[int, list[int]] = {}
    for place, episode in enumerate(episodes):
        groups.setdefault(episode.prompt.number, []).append(place)
    found: list[list[float]] = [[] for _ in episodes]
    for places in groups.values():
        rewards = torch.tensor([episodes[place].rewards for place in places]).T
        returns = rewards.flip(0).cumsum(0).flip(0)  # [turns, G]
        of_turns = advantages(returns, kind).T.tolist()
        for place, advantage in zip(places, of_turns, strict=True):
            found[place] = advantage
    return found


def without_truncated(episode: Episode) -> Episode:
    """The same, with truncated responses as if they had not been sampled."""
    cut = {turn for turn, is_cut in enumerate(episode.truncated, 1) if is_cut}
    return replace(
        episode, turn_of=[0 if turn in cut else turn for turn in episode.turn_of]
    )


def collate(
    episodes: list[Episode], advantage: list[list[float]], device: torch.device
) -> Batch:
    """Makes tensors of episodes, and of the advantage of each of their turns."""
    width = max(len(episode.ids) for episode in episodes)
    ids = []
    is_sampled = []
    recorded = []
    of_tokens = []
    for episode, of_turns in zip(episodes, advantage, strict=True):
        padding = [0] * (width - len(episode.ids))
        ids.append(episode.ids + padding)
        is_sampled.append([turn > 0 for turn in episode.turn_of[1:] + padding])
        for turn, logprob in zip(episode.turn_of, episode.logprobs, strict=True):
            if turn > 0:
                recorded.append(logprob)
                of_tokens.append(of_turns[turn - 1])
    return Batch(
        torch.tensor(ids, device=device),
        torch.tensor(is_sampled, device=device),
        torch.tensor(recorded, device=device),
        torch.tensor(of_tokens, device=device),
    )


def num_sampled(episodes: list[Episode]) -> int:
    """Their sampled tokens."""
    return sum(turn > 0 for episode in episodes for turn in episode.turn_of)


def rows_of_passes(
    episodes: list[Episode], tokens_per_pass: int, rank: int, num_ranks: int
) -> list[list[int]]:
    """Which episodes a rank takes in each of its passes, as places in the list.

    Sorted by length, so that there is little padding, and dealt to the ranks like cards. All ranks
    make as many passes, because FSDP gathers each layer on all of them at once.
    """
    order = sorted(range(len(episodes)), key=lambda place: -len(episodes[place].ids))
    rows_per_pass = max(2, tokens_per_pass // len(episodes[order[0]].ids))
    num_passes = math.ceil(len(order) / rows_per_pass / num_ranks)
    mine = order[rank::num_ranks]
    ends = [len(mine) * i // num_passes for i in range(num_passes + 1)]
    return [mine[start:end] for start, end in itertools.pairwise(ends)]


@dataclass
class StepStats:
    """What the first update on a batch says. Means are over the tokens of rank 0."""

    num_tokens: int
    loss: float  # near 0 in a healthy run: section 10
    entropy: float  # nats per token; at 0 the policy no longer tries anything
    k3: float  # between recorded and recomputed log-probabilities
    clipped: float  # share of tokens whose ratio is outside of the clip's range
    grad_norm: float  # before it is cut to 1
    seconds: float


class Learner:
    """A policy, its optimizer, and its updates. Parameters, gradients and moments are in fp32.

    In bfloat16 an update at a rate of 1e-6 would move one weight in fifty: the rest is rounded off.
    rank, num_ranks: of a trainer of several ranks, which all call the same methods.
    """

    def __init__(
        self, policy: Policy, cfg: Config, rank: int = 0, num_ranks: int = 1
    ) -> None:
        self.policy = policy
        self.cfg = cfg
        self.rank = rank
        self.num_ranks = num_ranks
        self.reference = frozen_copy(policy) if cfg.kl else None
        if num_ranks > 1:
            shard(policy.model, num_ranks, policy.dtype)
        self.optimizer = self._new_optimizer(cfg.lr)

    def _new_optimizer(self, lr: float) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.policy.model.parameters(), lr, weight_decay=0.0)

    def step(self, episodes: list[Episode]) -> StepStats:
        """cfg.passes updates on the same episodes. Returns what the first one found.

        Episodes with the advantage 0, as in a group of equal rewards, have no gradient. Without an
        entropy bonus or a divergence they are left out, but their tokens stay in the denominator.
        """
        cfg = self.cfg
        if cfg.mask_truncated:
            episodes = [without_truncated(episode) for episode in episodes]
        advantage = advantages_of(episodes, cfg.advantage)
        num_tokens = num_sampled(episodes)
        chosen = [place for place, of_turns in enumerate(advantage) if any(of_turns)]
        if cfg.entropy or cfg.kl or len(chosen) < 2 * self.num_ranks:
            chosen = list(range(len(episodes)))
        episodes = [episodes[place] for place in chosen]
        advantage = [advantage[place] for place in chosen]
        near: list[torch.Tensor] = []  # of each part, before the first update

        def objective(part: int, batch: Batch, logp: Any, entropy: Any) -> Any:
            if part == len(near):
                near.append(logp.detach())
            loss = LOSSES[cfg.loss](
                logp, batch.recorded, near[part], batch.advantage, cfg
            )
            loss = loss - cfg.entropy * entropy
            if self.reference:
                loss = loss + cfg.kl * divergence(self.reference, batch, logp)
            return loss

        found = [
            self._update(self.optimizer, episodes, advantage, num_tokens, objective)
            for _ in range(cfg.passes)
        ]
        return found[0]

    def supervise(self, task: Task, num_steps: int) -> None:
        """Supervised steps on right responses, at twice the rate of RL: the warm start."""
        optimizer = self._new_optimizer(2 * self.cfg.lr)
        prompts = training_prompts(task)
        for _ in range(num_steps):
            batch = itertools.islice(prompts, 4 * self.cfg.prompts_per_step)
            episodes = [right_episode(self.policy, prompt) for prompt in batch]
            advantage = [[1.0] * len(episode.responses) for episode in episodes]
            num_tokens = num_sampled(episodes)
            self._update(
                optimizer, episodes, advantage, num_tokens, lambda *found: -found[-2]
            )
        if self.reference:
            self.reference.model.load_state_dict(full_state(self.policy.model))

    def _update(
        self,
        optimizer: torch.optim.Optimizer,
        episodes: list[Episode],
        advantage: list[list[float]],
        num_tokens: int,
        objective: Callable[[int, Batch, Any, Any], Any],
    ) -> StepStats:
        """One update, in as many forward and backward passes as cfg.tokens_per_pass asks for.

        objective: (number of the pass, batch, log-probabilities, entropies) -> losses, all [N].
        """
        start = time.perf_counter()
        sums = torch.zeros(5, dtype=torch.float64)
        per_pass = self.cfg.tokens_per_pass
        parts = rows_of_passes(episodes, per_pass, self.rank, self.num_ranks)
        for part, rows in enumerate(parts):
            mine = [episodes[row] for row in rows]
            of_mine = [advantage[row] for row in rows]
            batch = collate(mine, of_mine, self.policy.device)
            logp, entropy = token_logprobs(self.policy, batch.ids, batch.is_sampled)
            loss = objective(part, batch, logp, entropy)
            # FSDP takes the mean of the ranks' gradients; what is wanted is their sum.
            (loss.sum() / max(num_tokens, 1) * self.num_ranks).backward()
            sums += self._sums(batch, loss.detach(), logp.detach(), entropy.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), 1.0)
        grad_norm = float(
            getattr(norm, "full_tensor", lambda: norm)()
        )  # FSDP has a part of it
        if math.isfinite(grad_norm):
            optimizer.step()
        optimizer.zero_grad()
        num_mine, *totals = sums.tolist()
        means = [total / max(num_mine, 1) for total in totals]
        return StepStats(num_tokens, *means, grad_norm, time.perf_counter() - start)

    def _sums(self, batch: Batch, loss: Any, logp: Any, entropy: Any) -> torch.Tensor:
        """[5], over tokens: 1, and what the fields of StepStats from `loss` to `clipped` are of."""
        ratio = ratio_of(logp, batch.recorded)
        clipped = (ratio < 1 - self.cfg.clip_low) | (ratio > 1 + self.cfg.clip_high)
        of_tokens = (ratio * 0 + 1, loss, entropy, k3(batch.recorded, logp), clipped)
        return torch.stack([values.sum().double().cpu() for values in of_tokens])


def training_prompts(task: Task) -> Iterator[Prompt]:
    """The prompts of a task in their order, without those that are held out."""
    for number in itertools.count():
        prompt = task.prompt(number)
        if not prompt.is_held_out:
            yield prompt


def right_episode(policy: Policy, prompt: Prompt) -> Episode:
    """The conversation in which every response is the right one."""
    episode = Episode(prompt)
    for turn, asked in enumerate(prompt.turns):
        ids = policy.prompt_ids(prompt, turn)
        episode.add_prompt(
            ids[1:] if turn > 0 else ids
        )  # the end is part of the response
        ids = policy.answer_ids(str(asked.answer))
        episode.add(ids, turn + 1, [0.0] * len(ids), [-1] * len(ids))
        episode.responses.append(str(asked.answer))
        episode.truncated.append(False)
    return episode


def full_state(model: torch.nn.Module) -> dict[str, Any]:
    """The weights by name, whole also where each rank has only a part of them."""
    states = importlib.import_module("torch.distributed.checkpoint.state_dict")
    whole = states.StateDictOptions(full_state_dict=True)
    return states.get_model_state_dict(model, options=whole)


def frozen_copy(policy: Policy) -> Policy:
    """The policy as it is now, for good."""
    frozen = copy.copy(policy)
    frozen.model = copy.deepcopy(policy.model).requires_grad_(False)
    return frozen


def divergence(reference: Policy, batch: Batch, logp: torch.Tensor) -> torch.Tensor:
    """[N]: k2, half the square of d = log p - log q, where q is the reference.

    As an estimate k3 is better, but as a loss k2 has the right gradient. With the samples fixed:

        k1 = d                   grad log p                   its mean is 0: it pulls nowhere
        k2 = d**2 / 2            d grad log p                 that of KL(p, q)
        k3 = exp(-d) - 1 + d     (1 - q / p) grad log p       that of KL(q, p)
    """
    with torch.no_grad():
        of_reference, _ = token_logprobs(reference, batch.ids, batch.is_sampled)
    return (logp - of_reference).square() / 2


def shard(model: torch.nn.Module, num_ranks: int, dtype: torch.dtype) -> None:
    """FSDP2: each rank keeps a part of every weight. A layer is whole only while it computes."""
    fsdp = importlib.import_module("torch.distributed.fsdp")
    mesh = torch.distributed.init_device_mesh("cpu", (num_ranks,))
    precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    lists = [
        module for module in model.modules() if isinstance(module, torch.nn.ModuleList)
    ]
    for unit in [*max(lists, key=len), model]:
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=precision)


# -- measurement: a policy of which everything is known --------------------------------------------
# It is a table [4, 16]: 4 prompts, 16 responses of one token. So J and its gradient can be computed
# from all responses, and estimates can be compared with it.


def true_gradient(table: torch.Tensor, rewards: torch.Tensor) -> torch.Tensor:
    """The gradient [4 * 16] of the mean reward, from all responses and their probabilities."""
    table = table.clone().requires_grad_()
    mean_reward = (table.softmax(-1) * rewards).sum(-1).mean()
    return torch.autograd.grad(mean_reward, table)[0].flatten()


def estimates(
    how: tuple[str, str], old: Any, now: Any, rewards: Any, num_batches: int, rng: Any
) -> torch.Tensor:
    """[num_batches, 4 * 16]: gradients, each from 8 responses to each prompt, sampled by `old`.

    how: a loss, and a kind of advantage.
    """
    loss, kind = how
    drawn = torch.multinomial(old.softmax(-1), num_batches * 8, True, generator=rng)
    drawn = drawn.view(4, num_batches, 8).transpose(0, 1)  # [batches, prompts, 8]
    tables = now.expand(num_batches, 4, 16).clone().requires_grad_()
    logp = tables.log_softmax(-1).gather(2, drawn)
    recorded = old.log_softmax(-1).expand(num_batches, 4, 16).gather(2, drawn)
    advantage = advantages(rewards.expand(num_batches, 4, 16).gather(2, drawn), kind)
    losses = LOSSES[loss](logp, recorded, logp.detach(), advantage, Config())
    return -torch.autograd.grad(losses.sum() / 32, tables)[0].flatten(1)


def bias_and_deviation(found: torch.Tensor, truth: torch.Tensor) -> dict[str, float]:
    """Of estimates [batches, 64]: degrees from their mean to the truth; spread over the mean."""
    mean = found.mean(0)
    cosine = torch.cosine_similarity(mean, truth, dim=0).clamp(max=1)
    spread = (found - mean).square().sum(1).mean().sqrt() / mean.norm()
    return {"degrees off": math.degrees(math.acos(cosine)), "deviation": float(spread)}


def push(
    loss: str, old: torch.Tensor, rewards: torch.Tensor, rng: torch.Generator
) -> float:
    """How far (KL) 100 updates on one and the same batch move the policy."""
    drawn = torch.multinomial(old.softmax(-1), 8, True, generator=rng)
    table = old.clone().requires_grad_()
    optimizer = torch.optim.Adam([table], 0.1)
    recorded = old.log_softmax(-1).gather(1, drawn)
    advantage = advantages(rewards.gather(1, drawn), "group")
    for _ in range(100):
        logp = table.log_softmax(-1).gather(1, drawn)
        optimizer.zero_grad()
        LOSSES[loss](logp, recorded, recorded, advantage, Config()).mean().backward()
        optimizer.step()
    difference = old.log_softmax(-1) - table.detach().log_softmax(-1)
    return float((old.softmax(-1) * difference).sum(-1).mean())


@stage(
    "a baseline removes noise, a ratio removes the bias of staleness, a clip bounds the push",
    instead="gain = A * ratio",
)
async def demo_losses(report: Report, cfg: Config) -> None:
    """Compares 2,000 estimates of each kind with the true gradient, and pushes with each loss."""
    rng = torch.Generator().manual_seed(0)
    rewards = torch.rand(4, 16, generator=rng).square()
    fresh = torch.randn(4, 16, generator=rng) + torch.arange(4)[:, None] * rewards
    now = fresh
    for _ in range(8):  # eight updates later, what `fresh` samples is stale
        step = estimates(("reinforce", "leave_one_out"), now, now, rewards, 1, rng).view(
            4, 16
        )
        now = now + 0.7 * step / step.norm()
    rows = []
    for staleness, policy, loss, kind in (
        (0, fresh, "reinforce", "none"),
        (0, fresh, "reinforce", "group"),
        (0, fresh, "reinforce", "leave_one_out"),
        (8, now, "reinforce", "leave_one_out"),
        (8, now, "cispo", "leave_one_out"),
    ):
        found = estimates((loss, kind), fresh, policy, rewards, 2000, rng)
        row = {"staleness": staleness, "loss": loss, "advantage": kind}
        rows.append(row | bias_and_deviation(found, true_gradient(policy, rewards)))
    report.table(rows)
    pushes = {loss: push(loss, fresh, rewards, rng) for loss in LOSSES}
    shown = ", ".join(f"{loss} {nats:.2f}" for loss, nats in pushes.items())
    report.say(f"100 updates on one batch move the policy by, in nats: {shown}")
    noise = {row["advantage"]: row["deviation"] for row in rows[:3]}
    bias = {row["loss"]: row["degrees off"] for row in rows[3:]}
    smaller = noise["leave_one_out"] / noise["none"]
    report.check("deviation with a baseline / without", smaller, "<", 0.8)
    report.check(
        "degrees off with a ratio / without", bias["cispo"] / bias["reinforce"], "<", 0.9
    )
    clipped = pushes["ppo"] / pushes["reinforce"]
    report.check("push with a clip / without", clipped, "<", 0.2)
    report.figure(deviation_ratio=smaller, push_ratio=clipped)


# == 11. SYNC RL ===================================================================================
# Problem. Sampling, scoring and updating run in different programs. They need each other's results
#   in the right order, with the right weights, for thousands of steps.
# Rule. One loop, one thing at a time. Generators pull before they sample, so staleness is 0. "Not
#   scored" is not a reward of 0. One object counts where every group is that was started.
# Cost. Each side waits while the other works (section 12).
#
#     main process   1. draws prompts; their groups count as started
#     generators     2. pull the newest weights, and sample a group of responses to each prompt
#     rewards        3. give each response its reward
#     trainer        4. makes an update, and publishes the new weights
#     main process   5. counts the groups as trained

# -- 11a. The actors of a run ----------------------------------------------------------------------

Asked = list[
    tuple[Prompt, list[str]]
]  # of each episode of a group: its prompt and its responses


@dataclass
class Scores:
    """The rewards of a group: of each episode, of each turn; None where there are none, and why."""

    rewards: list[list[float] | None]
    errors: list[str] = field(default_factory=list)


def score_group(task: Task, asked: Asked) -> Scores:
    """Calls task.score for each episode of a group."""
    return Scores([task.score(prompt, responses) for prompt, responses in asked])


def one_thread() -> Executor:
    """Runs a reward function that can be trusted."""
    return ThreadPoolExecutor(1)


@dataclass(frozen=True)
class Environment:
    """Where prompts and rewards come from: functions, which each process calls for itself."""

    make_task: Callable[[Config], Task] = letter_task
    score_group: Callable[[Task, Asked], Scores] = score_group
    make_executor: Callable[[], Executor] = one_thread


class Trainer(Worker):
    """Learns, and publishes."""

    def setup(
        self, number: int, cfg: Config, env: Environment, meeting_file: str
    ) -> ArenaHandle:
        """Loads the policy, makes the supervised steps, and publishes version 0."""
        torch.set_num_threads(num_threads(cfg))
        rank = current_rank().rank
        if cfg.trainers > 1:
            form_group(meeting_file, rank, cfg.trainers)
        task = env.make_task(cfg)
        self.policy = Policy(cfg, task, torch.float32)
        self.learner = Learner(self.policy, cfg, rank, cfg.trainers)
        self.learner.supervise(task, cfg.sft_steps)
        writer_class = WeightWriter if cfg.trainers == 1 else ShardedWriter
        weights = dict(self.policy.model.named_parameters())
        self.writer = writer_class(weights, cfg.generators, getattr(torch, cfg.dtype))
        # The copy of a version runs beside the next step, until that changes the weights.
        self.learner.optimizer.register_step_pre_hook(lambda *_: self.writer.wait())
        self.version = 0
        self.writer.publish(0)
        self.writer.wait()
        return self.writer.handle

    def step(self, episodes: list[Episode], waits: bool) -> StepStats:
        """One batch: updates, and a new version. waits: until readers can have it."""
        stats = self.learner.step(episodes)
        self.version += 1
        self.writer.publish(self.version)
        if waits:
            self.writer.wait()
        return stats

    def export(self, folder: str) -> None:
        """Writes a folder that transformers loads."""
        state = full_state(self.policy.model)
        if self.learner.rank == 0:
            self.policy.model.save_pretrained(folder, state_dict=state)
            self.policy.tokenizer.save_pretrained(folder)

    def release(self) -> None:
        """Leaves the process group."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


class Generator(Worker):
    """Samples with the newest weights."""

    def setup(self, number: int, cfg: Config, env: Environment) -> None:
        """Loads the policy; its weights come with the first pull."""
        torch.set_num_threads(num_threads(cfg))
        self.number = number
        self.cfg = cfg
        self.policy = Policy(cfg, env.make_task(cfg), getattr(torch, cfg.dtype))
        self.reader: WeightReader | None = None

    def rollout(
        self,
        handle: ArenaHandle,
        prompts: list[Prompt],
        group_size: int,
        seed: int | None,
    ) -> list[Episode]:
        """The episodes of these prompts. The handle says where the trainer's weights are now."""
        if self.reader is None or self.reader.handle != handle:
            weights = dict(self.policy.model.named_parameters())
            self.reader = WeightReader(handle, self.number, weights)
        version = self.reader.pull()  # mechanism: sync_rl
        pull = self.reader.pull if self.cfg.pull == "token" else lambda: version
        return rollout(self.policy, prompts, group_size, seed, pull)


@functools.cache
def task_of_process(env: Environment, cfg: Config) -> Task:
    """The task, made once in each process."""
    return env.make_task(cfg)


def score_here(env: Environment, cfg: Config, asked: Asked) -> Scores:
    """What the executor of a reward worker runs, in its thread or process."""
    return env.score_group(task_of_process(env, cfg), asked)


class RewardWorker(Worker):
    """Has the reward function run by an executor."""

    def setup(self, number: int, cfg: Config, env: Environment) -> None:
        """Nothing is started before there is something to score."""
        self.cfg = cfg
        self.env = env
        self.executor: Executor | None = None

    def score(self, groups: list[Asked]) -> list[Scores]:
        """The rewards of each group. One that takes too long, or kills its process, has none."""
        found = []
        for asked in groups:
            self.executor = self.executor or self.env.make_executor()
            try:
                future = self.executor.submit(score_here, self.env, self.cfg, asked)
                found.append(future.result(self.cfg.reward_deadline))
            except (TimeoutError, BrokenExecutor) as error:
                reason = f"no reward within {self.cfg.reward_deadline:g} s"
                if isinstance(error, BrokenExecutor):
                    reason = "the process of the reward function has died"
                found.append(Scores([None] * len(asked), [reason]))
                self.release()
        return found

    def release(self) -> None:
        """Ends the executor; a process ends with all that it has started."""
        if self.executor:
            self.executor.shutdown(wait=False, cancel_futures=True)
            self.executor = None


def num_threads(cfg: Config) -> int:
    """Of torch, in each process. Threads that outnumber the cores wait for each other by spinning.

    Two threads in each of four processes on two cores make a run 12 times slower.
    """
    return max(1, len(os.sched_getaffinity(0)) // (cfg.generators + cfg.trainers))


# -- 11b. A run ------------------------------------------------------------------------------------


@dataclass
class Group:
    """The episodes of one prompt that have rewards."""

    episodes: list[Episode]

    @property
    def version(self) -> int:
        """The oldest version that has sampled a token of it."""
        versions = [v for episode in self.episodes for v in episode.versions if v >= 0]
        return min(versions)


class RunError(RuntimeError):
    """The run cannot go on. The text says why, and what to look at."""


class Actors:
    """The three services of a run, and typed calls to them.

    folder: for a file in which ranks meet. unresponsive_s: see Service.
    """

    def __init__(
        self,
        cfg: Config,
        env: Environment,
        pool: Pool,
        folder: Path,
        unresponsive_s: float = 30.0,
    ) -> None:
        self.cfg = cfg
        self.pool = pool
        meeting_file = str(folder / f"meeting_{time.monotonic_ns()}")
        service = functools.partial(Service, pool=pool, unresponsive_s=unresponsive_s)
        self.trainer = service(
            Trainer,
            1,
            setup_args=(cfg, env, meeting_file),
            num_ranks=cfg.trainers,
            replaces=False,
        )
        self.generators = service(Generator, cfg.generators, setup_args=(cfg, env))
        self.reward_workers = service(
            RewardWorker, cfg.reward_workers, setup_args=(cfg, env)
        )
        self.services = [self.trainer, self.generators, self.reward_workers]

    async def begin(self) -> None:
        """Starts all workers at the same time, and then a spare process."""
        results = await asyncio.gather(*[service.begin() for service in self.services])
        (self.handle,) = results[0]
        self.pool.keep_spare()

    async def close(self) -> None:
        """Ends them."""
        await asyncio.gather(*[service.close() for service in self.services])

    async def cpu_s(self) -> float:
        """Seconds of CPU time that all workers and this process have used so far."""
        replicas = [r for service in self.services for r in service.replicas.values()]
        answers = await asyncio.gather(
            *[r.worker.call.call_one("cpu_s") for r in replicas]
        )
        return sum(answers) + time.process_time()

    async def rollout(
        self, prompts: list[Prompt], group_size: int, seed: int | None
    ) -> list[Episode]:
        """What one generator samples; see `rollout` in section 9."""
        request = (self.handle, prompts, group_size, seed)
        return await self.generators.request("rollout", *request)

    async def score(self, groups: list[list[Episode]]) -> list[Scores]:
        """The rewards of these groups, which the reward workers share among them."""
        asked = [[(e.prompt, e.responses) for e in episodes] for episodes in groups]
        size = math.ceil(len(asked) / self.cfg.reward_workers)
        requests = []
        for start in range(0, len(asked), size):
            requests.append(
                self.reward_workers.request("score", asked[start : start + size])
            )
        found = await asyncio.gather(*requests)
        return [scores for answer in found for scores in answer]

    async def step(self, groups: list[Group], waits: bool) -> StepStats:
        """One update of the trainer."""
        episodes = [episode for group in groups for episode in group.episodes]
        return await self.trainer.request("step", episodes, waits)


@dataclass
class Accounting:
    """Where all groups are: started = trained + dropped + lost + in flight."""

    started: int = 0
    trained: int = 0
    dropped: int = 0  # too old when a batch was taken, or left at the end of the run
    lost: int = 0  # no rewards, or too long for the context, or their request failed

    @property
    def in_flight(self) -> int:
        """Being sampled or scored, in the buffer, or in the batch that is trained on."""
        return self.started - self.trained - self.dropped - self.lost


class Run:
    """What a run knows of itself: prompts drawn, groups counted, versions, a row for each step."""

    def __init__(self, cfg: Config, actors: Actors, task: Task) -> None:
        self.cfg = cfg
        self.actors = actors
        self.accounting = Accounting()
        self.prompts = training_prompts(task)
        self.held_out = held_out_prompts(task, cfg.eval_prompts)
        self.version = 0  # of the trainer
        self.rows: list[dict[str, Any]] = []
        self.errors: dict[str, int] = {}  # of rewards and requests: how often
        self.num_too_long = 0  # episodes that did not fit into the context
        self.num_fruitless = 0  # requests in a row that brought no reward

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts. Their groups count as started."""
        self.accounting.started += num_prompts
        return [next(self.prompts) for _ in range(num_prompts)]

    async def sample(self, prompts: list[Prompt]) -> list[Group]:
        """One request: groups with rewards. Prompts that come to nothing count as lost."""
        groups: list[Group] = []
        try:
            seed = zlib.crc32(f"{self.cfg.seed} {prompts[0].number}".encode())
            episodes = await self.actors.rollout(prompts, self.cfg.group_size, seed)
            self.num_too_long += len(prompts) * self.cfg.group_size - len(episodes)
            groups = await self.with_rewards(episodes)
        except (ReplicaLost, ActorError) as error:
            self.count_error(cause_of(error))
        self.accounting.lost += len(prompts) - len(groups)
        self.num_fruitless = 0 if groups else self.num_fruitless + 1
        return groups

    async def with_rewards(self, episodes: list[Episode]) -> list[Group]:
        """Groups of episodes that got rewards; a group with a single one of several is left out."""
        by_prompt: dict[int, list[Episode]] = {}
        for episode in episodes:
            by_prompt.setdefault(episode.prompt.number, []).append(episode)
        sampled = list(by_prompt.values())
        groups = []
        found = await self.actors.score(sampled)
        for members, scores in zip(sampled, found, strict=True):
            for error in scores.errors:
                self.count_error(error)
            for episode, rewards in zip(members, scores.rewards, strict=True):
                episode.rewards = rewards
            scored = [episode for episode in members if episode.rewards is not None]
            if len(scored) >= min(2, len(members)):
                groups.append(Group(scored))
        return groups

    def count_error(self, error: str) -> None:
        """Of a reward, or of a request."""
        self.errors[error] = self.errors.get(error, 0) + 1

    def raise_if_fruitless(self) -> None:
        """Raises RunError after 20 requests in a row without a single reward."""
        if self.num_fruitless >= 20:
            reason = [*self.errors][-1] if self.errors else "no prompt fits the context"
            raise RunError(f"20 requests in a row brought no reward: {reason}")

    async def step(self, groups: list[Group], waits: bool) -> None:
        """Trains on a batch, counts it, and adds a row."""
        stats = await self.actors.step(groups, waits)
        staleness = max(self.version - group.version for group in groups)
        self.version += 1
        self.accounting.trained += len(groups)
        episodes = [episode for group in groups for episode in group.episodes]
        first = episodes[0]
        asked = first.prompt.turns[-1].messages[-1]["content"]
        row = {
            "step": self.version,
            "time": time.time(),
            "reward": statistics.fmean(sum(e.rewards) for e in episodes),
            "staleness": staleness,
            "truncated": statistics.fmean(any(e.truncated) for e in episodes),
            "sample": f"{asked!r} -> {first.responses[-1]!r} ({sum(first.rewards):.2f})",
            "tokens_per_s": stats.num_tokens / stats.seconds,
            "too_long": self.num_too_long,
            "not_scored": sum(self.errors.values()),
        }
        self.rows.append(row | asdict(stats) | asdict(self.accounting))

    async def judged(
        self, prompts: list[Prompt], group_size: int, seed: int | None
    ) -> list[Group]:
        """Groups of these prompts, with rewards, which count for nothing else."""
        size = max(1, min(64, math.ceil(len(prompts) / self.cfg.generators)))
        requests = []
        for start in range(0, len(prompts), size):
            some = prompts[start : start + size]
            requests.append(self.actors.rollout(some, group_size, seed))
        answers = await asyncio.gather(*requests)
        return await self.with_rewards([e for answer in answers for e in answer])

    async def evaluate(self) -> float | None:
        """Held-out accuracy: the share of prompts whose likeliest responses earn all of 1."""
        groups = await self.judged(self.held_out, 1, seed=None)
        num_right = sum(sum(group.episodes[0].rewards) > 0.999 for group in groups)
        return num_right / len(self.held_out) if self.held_out else None


def held_out_prompts(task: Task, num_prompts: int) -> list[Prompt]:
    """The first held-out prompts of a task, each once. A small task has fewer."""
    found: dict[Any, Prompt] = {}
    for number in range(50 * num_prompts):
        prompt = task.prompt(number)
        if prompt.is_held_out:
            text = json.dumps([turn.messages for turn in prompt.turns])
            found.setdefault(text, prompt)
        if len(found) == num_prompts:
            break
    return list(found.values())


async def train_sync(run: Run, num_steps: int) -> None:
    """The loop, one thing at a time: sample and score, then train."""
    cfg = run.cfg
    size = math.ceil(cfg.prompts_per_step / cfg.generators)
    while num_steps > 0:
        prompts = run.draw(cfg.prompts_per_step)
        requests = []
        for start in range(0, len(prompts), size):
            requests.append(run.sample(prompts[start : start + size]))
        answers = await asyncio.gather(*requests)
        groups = [group for answer in answers for group in answer]
        run.raise_if_fruitless()
        if groups:
            await run.step(groups, waits=True)  # generators can have the new version now
            num_steps -= 1


# -- measurement -----------------------------------------------------------------------------------


def for_demo(cfg: Config, report: Report) -> Config:
    """The tiny policy on `repeat`. The first demo leaves its warm start in a folder."""
    warm = report.folder / "warm"
    return replace(
        cfg,
        model=str(warm) if warm.exists() else "",
        sft_steps=0 if warm.exists() else 60,
        task="repeat",
        device="cpu",
        dtype="float32",
        lr=1e-3,
        entropy=0.01,
    )


async def begin_demo(cfg: Config, report: Report) -> Run:
    """The actors of a demo, and its run."""
    actors = Actors(cfg, Environment(), report.pool, report.folder, unresponsive_s=2.0)
    await actors.begin()
    if cfg.sft_steps:
        await actors.trainer.request("export", str(report.folder / "warm"))
    return Run(cfg, actors, letter_task(cfg))


async def busy_share(who: str, start_s: float, end_s: float) -> float:
    """The share of a stretch of time in which workers of this kind were at work."""
    timeline = await get_or_spawn_controller("timeline", Timeline)
    spans = await timeline.take.call_one(who)
    busy_s = sum(max(0.0, min(s.end_s, end_s) - max(s.start_s, start_s)) for s in spans)
    return busy_s / (end_s - start_s)


@stage(
    "the loop, one thing at a time: both programs agree, and the reward rises",
    instead="version = 0",
)
async def demo_sync_rl(report: Report, cfg: Config) -> None:
    """100 synchronous steps with the tiny policy."""
    cfg = for_demo(cfg, report)
    start_s = time.time()
    run = await begin_demo(cfg, report)
    before = await run.evaluate()
    report.say(
        f"actors ready, and held-out accuracy {before:.3f}, after {time.time() - start_s:.1f} s"
    )
    start_s = time.time()
    await train_sync(run, 100)
    end_s = time.time()
    after = await run.evaluate()
    shown = ("step", "reward", "staleness", "loss", "k3")
    report.table([{name: row[name] for name in shown} for row in run.rows[::33]])
    report.say(
        "loss is near 0 all the time, for the advantages of a group add up to 0: section 10"
    )
    k3_max = max(row["k3"] for row in run.rows)
    report.check("largest k3 of recorded and recomputed", k3_max, "<", 1e-10)
    report.check("largest staleness", max(row["staleness"] for row in run.rows), "==", 0)
    report.check(
        f"held-out accuracy of {len(run.held_out)} prompts", after, ">", before + 0.2
    )
    report.check("groups in flight at the end", run.accounting.in_flight, "==", 0)
    await run.actors.close()
    report.figure(
        steps_per_s=100 / (end_s - start_s),
        trainer_busy_share=await busy_share("trainer", start_s, end_s),
        heldout_before=before,
        heldout_after=after,
    )


# == 12. ASYNC RL ==================================================================================
# Problem. In the synchronous loop one side always waits for the other. If both run all the time,
#   samples grow old: the policy that made them is many versions behind, and nothing bounds it.
# Rule. Two loops and a buffer. The first has groups sampled, so that at most (K + 1) batches are
#   in flight. The second takes a batch, and trains. A group older than K versions is dropped.
# Cost. Staleness: the loss has to bear it (section 10). And to drop costs the work that was done.
#
# Why (K + 1) batches: one is trained on, and K wait; the last of them is K versions old when its
# turn comes. Why that alone is no bound: a slow group is overtaken by others. By example, with
# K = 1 (v is the trainer's version):
#
#     v = 5   batches a and b are sampled under 5; two batches are in flight
#     v = 5   the trainer steps on a (staleness 0): v = 6; batch c begins, under 6
#     v = 6   the trainer steps on b (staleness 1): v = 7; batch d begins, under 7
#     v = 7   c is late, and d comes first: the trainer steps on d (staleness 0): v = 8
#     v = 8   now c comes, of 6. It would be trained on with a staleness of 2: it is dropped
#
# --order chooses between two ways to keep the bound, and each has its price:
#     ready   takes what is there. What became too old is dropped, and that is the long responses:
#             the policy is trained on shorter ones than it produces.
#     fifo    takes groups in the order in which they were started. Of (K + 1) batches in flight at
#             most K can be before any group, so none becomes too old while it waits its turn;
#             the trainer waits for stragglers instead.


class ReplayBuffer:
    """Groups that wait for the trainer, and the bound on what is in flight.

    Everything that changes it happens in the main process's event loop, so it needs no lock; the
    condition wakes the two loops.
    """

    def __init__(self, run: Run, max_staleness: int) -> None:
        self.run = run
        self.max_staleness = max_staleness
        self.limit = (max_staleness + 1) * run.cfg.prompts_per_step  # groups in flight
        self.order: list[int] = []  # numbers of groups that were started and not taken
        self.ready: dict[int, Group] = {}  # by their number
        self.changed = asyncio.Condition()

    async def room(self, num_groups: int) -> None:
        """Waits until so many groups more may be in flight."""
        async with self.changed:
            await self.changed.wait_for(
                lambda: self.run.accounting.in_flight + num_groups <= self.limit
            )

    def start(self, prompts: list[Prompt]) -> None:
        """Their groups have been started."""
        self.order += [prompt.number for prompt in prompts]

    async def put(self, prompts: list[Prompt], groups: list[Group]) -> None:
        """A request for these prompts has brought these groups; others of them are lost."""
        for group in groups:
            self.ready[group.episodes[0].prompt.number] = group
        for prompt in prompts:
            if prompt.number not in self.ready:
                self.order.remove(prompt.number)
        await self.wake()

    async def wake(self) -> None:
        """Something that somebody waits for may have changed."""
        async with self.changed:
            self.changed.notify_all()

    async def take(self, size: int, version: int) -> list[Group]:
        """Waits for a batch of so many groups, for a trainer that will be at `version`."""
        async with self.changed:
            while True:
                self._drop_old(version)
                numbers = self.order[:size]
                if self.run.cfg.order == "ready":
                    numbers = list(self.ready)[:size]
                if len(numbers) == size and all(
                    number in self.ready for number in numbers
                ):
                    self.order = [
                        number for number in self.order if number not in numbers
                    ]
                    return [self.ready.pop(number) for number in numbers]
                await self.changed.wait()

    def _drop_old(self, version: int) -> None:
        for number, group in list(self.ready.items()):
            if version - group.version > self.max_staleness:  # mechanism: async_rl
                del self.ready[number]
                self.order.remove(number)
                self.run.accounting.dropped += 1
                self.changed.notify_all()  # there is room now


class AsyncRun:
    """The two loops. It owns their buffer and their tasks."""

    def __init__(self, run: Run, max_staleness: int) -> None:
        cfg = run.cfg
        self.run = run
        self.buffer = ReplayBuffer(run, max_staleness)
        self.num_ahead = min(1, max_staleness - 1)  # batches that wait at the trainer
        # A request costs 8 ms and 1 ms a group, so it is large: a whole batch, if there are as
        # many batches as generators. More generators share the batches that are not at the trainer.
        num_batches = max(1, max_staleness)
        if cfg.generators > num_batches:
            num_batches = max(1, max_staleness - self.num_ahead)
        share = num_batches * cfg.prompts_per_step // cfg.generators
        self.request_size = max(1, min(cfg.prompts_per_step, share))
        self.requests: set[asyncio.Task[None]] = set()
        self.failure: asyncio.Future[Any]  # a request that has failed, if one has

    async def train(self, num_steps: int) -> None:
        """Runs both loops until so many steps are made. Groups that are left then are dropped."""
        generating = asyncio.ensure_future(self._generate())
        learning = asyncio.ensure_future(self._learn(num_steps))
        self.failure = asyncio.get_running_loop().create_future()
        waits = [generating, learning, self.failure]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if self.failure.done():
                self.failure.result().result()  # raises what nobody has foreseen
            if generating.done():
                generating.result()  # it ends by an exception only
            await learning
        finally:
            generating.cancel()
            learning.cancel()
            await asyncio.gather(
                generating, learning, *self.requests, return_exceptions=True
            )
        self.run.accounting.dropped += len(self.buffer.ready)

    async def _generate(self) -> None:
        """The first loop.

        Consumes prompts. Waits for room in the buffer. Produces requests, each of which puts its
        groups into the buffer. Ends when it is cancelled, or when nothing can be scored.
        """
        while True:
            await self.buffer.room(self.request_size)
            prompts = self.run.draw(self.request_size)
            self.buffer.start(prompts)
            request = asyncio.ensure_future(self._request(prompts))
            self.requests.add(request)
            request.add_done_callback(self._finish)
            self.run.raise_if_fruitless()

    def _finish(self, request: asyncio.Task[None]) -> None:
        self.requests.discard(request)
        has_failed = not request.cancelled() and request.exception()
        if has_failed and not self.failure.done():
            self.failure.set_result(request)

    async def _request(self, prompts: list[Prompt]) -> None:
        groups = await self.run.sample(prompts)
        await self.buffer.put(prompts, groups)

    async def _learn(self, num_steps: int) -> None:
        """The second loop.

        Consumes batches. Waits for one, and for the trainer. Produces versions, and room in the
        buffer. Ends after so many steps.
        """
        at_trainer: deque[asyncio.Task[None]] = deque()
        first = self.run.version
        for number in range(num_steps):
            batch = await self.buffer.take(self.run.cfg.prompts_per_step, first + number)
            at_trainer.append(asyncio.ensure_future(self.run.step(batch, waits=False)))
            if len(at_trainer) > self.num_ahead:
                await at_trainer.popleft()
                await self.buffer.wake()
        await asyncio.gather(*at_trainer)


# -- measurement -----------------------------------------------------------------------------------


async def measure(run: Run, training: Awaitable[None], num_steps: int) -> dict[str, Any]:
    """Speed and busy shares of so many steps."""
    start_s = time.time()
    start_cpu_s = await run.actors.cpu_s()
    await training
    seconds = time.time() - start_s
    cpu_s = await run.actors.cpu_s() - start_cpu_s
    num_cores = len(os.sched_getaffinity(0))
    return {
        "steps/s": num_steps / seconds,
        "trainer busy": await busy_share("trainer", start_s, start_s + seconds),
        "generators busy": await busy_share("generator", start_s, start_s + seconds)
        / run.cfg.generators,
        "of CPU limit": cpu_s / seconds / num_cores,
    }


async def strike(run: Run, service: Service, at_step: int, number: signal.Signals) -> str:
    """Sends a signal to the process of replica 0 of a service, when this step has been made."""
    while run.version < at_step:
        await asyncio.sleep(0.01)
    replica = service.replicas[0]
    os.kill(replica.processes.ids[0], number)
    return replica.name


@stage(
    "two loops and a buffer: both sides work, staleness is bounded, a fault costs time only",
    instead="if False:",
)
async def demo_async_rl(report: Report, cfg: Config) -> None:
    """60 synchronous steps, 140 asynchronous ones, 60 under faults, and 30 without a bound."""
    cfg = for_demo(cfg, report)
    bound = cfg.max_staleness
    run = await begin_demo(cfg, report)
    before = await run.evaluate()
    sync = await measure(run, train_sync(run, 60), 60)
    together = await measure(run, AsyncRun(run, bound).train(140), 140)
    after = await run.evaluate()
    report.table([{"loop": "synchronous", **sync}, {"loop": "asynchronous", **together}])
    report.say(f"held-out accuracy {before:.3f}, after 200 steps {after:.3f}")

    generators = run.actors.generators
    reward_workers = run.actors.reward_workers
    strikes = [
        asyncio.ensure_future(strike(run, generators, run.version + 10, signal.SIGKILL)),
        asyncio.ensure_future(
            strike(run, reward_workers, run.version + 30, signal.SIGSTOP)
        ),
    ]
    await AsyncRun(run, bound).train(60)
    await asyncio.gather(*strikes)
    for loss in [*generators.losses, *reward_workers.losses]:
        then = "not replaced"
        if loss.replaced_s:
            then = f"another took over {loss.replaced_s - loss.noticed_s:.2f} s later"
        report.say(f"{loss.name} {loss.reason}; {then}")
    with_rule = [row["staleness"] for row in run.rows]
    await AsyncRun(run, 10).train(30)
    without_rule = [row["staleness"] for row in run.rows[len(with_rule) :]]
    counts = run.accounting
    found = {
        name: getattr(counts, name) for name in ("started", "trained", "dropped", "lost")
    }
    report.say(", ".join(f"{name} {value}" for name, value in found.items()))

    report.check("largest staleness", max(with_rule), "<=", bound)
    report.check(
        "largest staleness with eleven batches in flight", max(without_rule), ">", bound
    )
    num_lost = len(generators.losses) + len(reward_workers.losses)
    report.check("workers lost and replaced", num_lost, "==", 2)
    report.check(
        "groups lost, or in flight at the end", counts.lost + counts.in_flight, "==", 0
    )
    report.check("held-out accuracy after 200 steps", after, ">", before + 0.2)
    report.figure(
        steps_per_s=together["steps/s"],
        sync_steps_per_s=sync["steps/s"],
        of_cpu_limit=together["of CPU limit"],
        trainer_busy_share=together["trainer busy"],
        heldout_before=before,
        heldout_after=after,
        staleness_max=max(with_rule),
        staleness_max_without_rule=max(without_rule),
        in_flight=counts.in_flight,
        **found,
    )
    await run.actors.close()


# ==== PART II: further ============================================================================
# The system is complete. What follows makes it yours: your model, your data, your reward function.

# == YOUR OWN MODEL AND DATA =======================================================================
# Problem. A reward function is somebody else's code: it raises, hangs, forks, uses signals, and
#   returns what it likes. Data has lines that are wrong. A run must not end by either.
# Rule. It runs in the main thread of a process of its own, which can be killed with all that it has
#   started. An episode without a reward is left out of its group; it does not count as 0.
# Cost. That process, and a message to it for each group.
#
# -- tasks -----------------------------------------------------------------------------------------

WORDS = """apple banana bridge candle castle cloud copper desert dragon eagle ember feather
    forest garden harbor hammer island jacket kettle ladder lemon lion market meadow mirror
    mountain ocean orange paper pencil pepper piano planet rabbit river rocket silver spider
    table window""".split()


class WordTask(Task):
    """`repeat`, `count` and `pattern` for a chat model, which hears and says words."""

    def __init__(self, seed: int, kind: str) -> None:
        self.seed = seed
        self.kind = kind
        self.max_new_tokens = 24 if kind == "count" else 6

    def prompt(self, number: int) -> Prompt:
        """Random words, or numbers."""
        rng = random.Random(f"{self.seed} {number}")
        one, other, of_one, of_other = rng.sample(WORDS, 4)
        if self.kind == "repeat":
            asked = f"I will say a word, and you repeat it. Say nothing else. {one}"
            return Prompt(number, (user_turn(asked, one), user_turn(other, other)))
        if self.kind == "count":
            first = rng.randint(1, 20)
            numbers = [str(first + i) for i in range(rng.randint(3, 6))]
            asked = f"Count from {first} to {numbers[-1]}. Write only the numbers, with commas."
            return Prompt(number, (user_turn(asked, ", ".join(numbers)),))
        rule = (
            f"When I say {one}, you say {of_one}. When I say {other}, you say {of_other}."
        )
        said, answer = rng.choice([(one, of_one), (other, of_other)])
        chat = (("user", rule), ("assistant", "OK."), ("user", said))
        messages = tuple({"role": role, "content": content} for role, content in chat)
        return Prompt(number, (Turn(messages, answer),))

    def score(self, prompt: Prompt, responses: list[str]) -> list[float]:
        """Of each turn 1 for exactly the answer, and at most half for its words among others."""
        rewards = []
        for turn, response in zip(prompt.turns, responses, strict=True):
            right = re.findall(r"\w+", turn.answer)
            said = re.findall(r"\w+", response.lower())
            num_right = sum(a == b for a, b in zip(right, said, strict=False))
            share = num_right / max(len(right), len(said)) / 2
            reward = 1.0 if response.strip() == turn.answer else share
            rewards.append(reward / len(prompt.turns))
        return rewards


def prompt_of(number: int, record: Any, where: str) -> Prompt:
    """A prompt from {"prompt": text or messages, "answer": ...}, or from a Prompt."""
    if isinstance(record, Prompt):
        return replace(record, number=number)
    record = record if isinstance(record, dict) else {"prompt": record}
    messages = record.get("prompt")
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    is_right = (
        isinstance(messages, list)
        and messages
        and all(
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in messages
        )
    )
    if not is_right:
        raise UsageError(f'{where}: "prompt" is neither a text nor a list of messages')
    return Prompt(number, (Turn(tuple(messages), record.get("answer")),))


class FileTask(Task):
    """The lines of a FILE.jsonl, in another order in each epoch."""

    def __init__(self, path: str, seed: int) -> None:
        self.seed = seed
        self.prompts: list[Prompt] = []
        try:
            lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--task {path}: {error}") from error
        for place, line in enumerate(lines, 1):
            if line.strip():
                self.prompts.append(self._read(line, f"--task {path}, line {place}"))
        if all(prompt.is_held_out for prompt in self.prompts):
            raise UsageError(f"--task {path}: {len(self.prompts)} prompts are too few")

    def _read(self, line: str, where: str) -> Prompt:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{where}: not JSON: {error}") from error
        if not isinstance(record, dict):
            raise UsageError(f'{where}: not an object with "prompt" and "answer"')
        return prompt_of(len(self.prompts), record, where)

    def prompt(self, number: int) -> Prompt:
        """Each prompt once in every epoch."""
        epoch, place = divmod(number, len(self.prompts))
        return replace(self.prompts[self._order(epoch)[place]], number=number)

    @functools.lru_cache(maxsize=2)  # noqa: B019 a task lives as long as its process
    def _order(self, epoch: int) -> list[int]:
        return random.Random(f"{self.seed} {epoch}").sample(
            range(len(self.prompts)), len(self.prompts)
        )

    def score(self, prompt: Prompt, responses: list[str]) -> list[float]:
        """1 or 0: see `is_answer`."""
        pairs = zip(prompt.turns, responses, strict=True)
        return [float(is_answer(response, turn.answer)) for turn, response in pairs]


def is_answer(response: str, answer: Any) -> bool:
    """Whether a response gives this answer: as the same text, or as the same last number.

    What counts is what follows a </think>, or the last ####, or is in the last boxed{...} of LaTeX.
    Case, blanks and a full stop at the end do not count.
    """

    def normal(text: str) -> str:
        return unicodedata.normalize("NFC", text).strip().strip(".").strip().casefold()

    final = response.rsplit("</think>", 1)[-1].rsplit("####", 1)[-1]
    boxed = re.findall(r"\\boxed\{([^{}]*)\}", final)
    final = boxed[-1] if boxed else final
    wanted = normal(str(answer))
    if normal(final) == wanted:
        return True
    numbers = [
        found.replace(",", "") for found in re.findall(r"-?\d[\d,]*(?:\.\d+)?", final)
    ]
    try:
        return bool(numbers) and float(numbers[-1]) == float(wanted.replace(",", ""))
    except ValueError:
        return False


def load_python(spec: str, of_flag: str) -> Any:
    """What FILE.py:NAME names; its folder can be imported from, also by child processes."""
    path, _, name = spec.rpartition(":")
    file = Path(path).resolve()
    if not path.endswith(".py") or not file.is_file():
        raise UsageError(
            f"{of_flag} {spec}: there is no file {path!r}; give FILE.py:NAME"
        )
    sys.path.append(str(file.parent))
    is_free = importlib.util.find_spec(file.stem) is None or file.stem not in sys.modules
    found = importlib.util.spec_from_file_location(
        file.stem if is_free else f"own_{file.stem}", file
    )
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module
    try:
        found.loader.exec_module(module)
        return getattr(module, name)
    except Exception as error:
        raise UsageError(f"{of_flag} {spec}: {place_of(error)}") from error


class OwnTask(Task):
    """A task with prompts, or rewards, from a file of the user's."""

    def __init__(self, task: Any, reward: Callable[..., Any] | None) -> None:
        self.task = task
        self.reward = reward
        self.max_new_tokens = getattr(task, "max_new_tokens", Task.max_new_tokens)

    def prompt(self, number: int) -> Prompt:
        """What the user's task returns: a Prompt, or a record as in a FILE.jsonl."""
        return prompt_of(number, self.task.prompt(number), f"prompt({number})")

    def score(self, prompt: Prompt, responses: list[str]) -> Any:
        """What the user's function returns for each turn; or the user's task, for all of them."""
        if self.reward is None:
            return self.task.score(prompt, responses)
        rewards = []
        for turn, response in zip(prompt.turns, responses, strict=True):
            text = turn.messages[0]["content"]
            asked = text if len(turn.messages) == 1 else list(turn.messages)
            rewards.append(self.reward(asked, response, turn.answer))
        return rewards[0] if len(rewards) == 1 else rewards


def own_task(cfg: Config) -> Task:
    """The task of --task and --reward. Raises UsageError."""
    if not cfg.model:
        return letter_task(cfg)
    if cfg.task in TASKS:
        task: Any = WordTask(cfg.seed, cfg.task)
    elif cfg.task.endswith(".jsonl"):
        task = FileTask(cfg.task, cfg.seed)
    else:
        task = load_python(cfg.task, "--task")()
    reward = load_python(cfg.reward, "--reward") if cfg.reward else None
    return OwnTask(task, reward)


# -- rewards from code that is not ours ------------------------------------------------------------


def score_own_group(task: Task, asked: Asked) -> Scores:
    """Calls task.score for each episode. It may return a coroutine; a group's run together."""
    results: list[Any] = []
    for prompt, responses in asked:
        try:
            results.append(task.score(prompt, responses))
        except (Exception, SystemExit) as error:
            results.append(error)
    if any(inspect.isawaitable(result) for result in results):
        results = asyncio.run(all_of(results))
    scores = Scores([])
    for (prompt, _), result in zip(asked, results, strict=True):
        rewards = None
        try:
            rewards = rewards_from(result, len(prompt.turns))
        except (Exception, SystemExit) as error:
            scores.errors.append(place_of(error))
        scores.rewards.append(rewards)
    return scores


async def all_of(results: list[Any]) -> list[Any]:
    """The results of those that are coroutines; what they raise is their result."""

    async def one(result: Any) -> Any:
        return await result if inspect.isawaitable(result) else result

    return await asyncio.gather(
        *[one(result) for result in results], return_exceptions=True
    )


def rewards_from(result: Any, num_turns: int) -> list[float] | None:
    """What `score` returned, as a reward for each turn. A single number is for the last turn."""
    if isinstance(result, BaseException):
        raise result
    if result is None:
        return None
    if hasattr(result, "tolist"):  # of torch or numpy
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        result = [0.0] * (num_turns - 1) + [result]
    rewards = [float(reward) for reward in result]
    if len(rewards) != num_turns:
        raise ValueError(f"score returned {len(rewards)} rewards for {num_turns} turns")
    if not all(abs(reward) < 1e30 for reward in rewards):  # also false for nan
        raise ValueError(f"score returned {rewards}, which is not finite")
    return rewards


def place_of(error: BaseException) -> str:
    """An error, and the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename != str(THIS_FILE)] or frames
    where = f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
    return f"{where}{type(error).__name__}: {error}"


class OwnProcess(ProcessPoolExecutor):
    """A process whose main thread runs the user's code. It and its children end together."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        super().__init__(1, mp_context=spawn, initializer=lead_process_group)
        self.process_id = self.submit(os.getpid).result()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Kills the process, whatever it is doing, and its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process_id, signal.SIGKILL)
        super().shutdown(wait=wait, cancel_futures=cancel_futures)


def lead_process_group() -> None:
    """Makes this process the head of a group that ends with the process that started it."""
    os.setpgid(0, 0)
    multiprocessing.set_start_method("fork", force=True)  # Monarch has chosen another
    parent = os.pidfd_open(os.getppid())

    def end_with_parent() -> None:
        select.select([parent], [], [])
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()


# -- a run of one's own ----------------------------------------------------------------------------


async def narrate(run: Run) -> None:
    """Prints what a run does: a line for each step, a sample now and then, and who is waited for.

    Also evaluates every cfg.eval_every steps, beside the run. Ends after the last step.
    """
    num_told = 0
    last_s = time.time()
    with open(run.cfg.log or os.devnull, "a") as log:
        while num_told < run.cfg.steps:
            await asyncio.sleep(0.01)
            if num_told < len(run.rows):
                row = run.rows[num_told]
                num_told += 1
                log.write(json.dumps(row) + "\n")
                log.flush()
                await tell(run, row)
                last_s = time.time()
            elif time.time() - last_s > 30:
                last_s = time.time()
                print(f"         waiting: {who_is_waited_for(run.actors)}", flush=True)


async def tell(run: Run, row: dict[str, Any]) -> None:
    """Prints the line of a step; a sample every ten steps, and an evaluation when it is due."""
    print(step_line(row), flush=True)
    step = row["step"]
    if step % 10 == 1:
        print(f"         {row['sample']}", flush=True)
    if run.cfg.eval_every and step % run.cfg.eval_every == 0 and step < run.cfg.steps:
        accuracy = await run.evaluate()
        print(f"         held-out accuracy {show(accuracy)}", flush=True)


def show(accuracy: float | None) -> str:
    """A held-out accuracy, which a task of few prompts does not have."""
    return "-" if accuracy is None else f"{accuracy:.3f}"


def step_line(row: dict[str, Any]) -> str:
    """What a person wants to see of a step."""
    line = (
        f"step {row['step']:4}  reward {row['reward']:.3f}  staleness {row['staleness']}"
    )
    line += f"  k3 {row['k3']:.1e}  entropy {row['entropy']:.2f}"
    line += f"  {row['tokens_per_s']:.0f} tokens/s"
    for name in ("dropped", "lost", "truncated", "too_long", "not_scored"):
        if row[name]:
            line += f"  {name} {row[name]:.3g}"
    return line


def who_is_waited_for(actors: Actors) -> str:
    """The requests in flight, oldest first; and where the worker of an old one stands."""
    waits: list[tuple[float, str, int]] = []
    for replica in [r for service in actors.services for r in service.replicas.values()]:
        process_id = replica.processes.ids[0]
        for what, since_s in replica.in_flight.items():
            waits.append((since_s, f"{replica.name} {what.split()[0]}", process_id))
    if not waits:
        return "for a worker to be ready"
    waits.sort()
    now_s = time.time()
    text = ", ".join(
        f"{what} for {now_s - since_s:.0f} s" for since_s, what, _ in waits[:4]
    )
    oldest_s, what, process_id = waits[0]
    if now_s - oldest_s > 120:
        command = ["py-spy", "dump", "--pid", str(process_id)]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            dump = subprocess.run(command, capture_output=True, text=True, timeout=10)
            text += f"; {what} stands at\n{dump.stdout}"
    return text


async def run_own(cfg: Config, report: Report) -> int:
    """--train, --evaluate and --export: one run, and nothing beside it."""
    is_named = cfg.task in TASKS and not cfg.reward
    env = Environment(own_task, score_own_group, one_thread if is_named else OwnProcess)
    task = own_task(cfg)
    actors = Actors(cfg, env, report.pool, report.folder)
    run = Run(cfg, actors, task)
    what = f"{cfg.trainers} trainer, {cfg.generators} generators, {cfg.reward_workers} rewards"
    print(f"{cfg.model or 'the tiny policy'} on {cfg.task}: starting {what}", flush=True)
    start_s = time.time()
    await actors.begin()
    print(f"ready after {time.time() - start_s:.1f} s", flush=True)
    found: dict[str, Any] = {}
    try:
        if cfg.train:
            found = await train_own(run)
        if cfg.evaluate:
            found["evaluation"] = await evaluate_own(run, cfg.evaluate)
        if cfg.export:
            await actors.trainer.request("export", cfg.export)
            print(f"the model is in {cfg.export}")
    finally:
        await actors.close()
    if cfg.json:
        Path(cfg.json).write_text(json.dumps({"stages": [], "train": found}, indent=1))
    return 0


async def train_own(run: Run) -> dict[str, Any]:
    """Trains, between two evaluations. Returns the figures of --json."""
    cfg = run.cfg
    before = await run.evaluate()
    print(f"held-out accuracy {show(before)}, of {len(run.held_out)} prompts", flush=True)
    start_s = time.time()
    narrator = asyncio.ensure_future(narrate(run))
    try:
        if cfg.max_staleness == 0:
            await train_sync(run, cfg.steps)
        else:
            await AsyncRun(run, cfg.max_staleness).train(cfg.steps)
        seconds = time.time() - start_s
        await narrator
    finally:
        narrator.cancel()
    after = await run.evaluate()
    print(
        f"held-out accuracy {show(before)} -> {show(after)} in {seconds:.0f} s",
        flush=True,
    )
    for error, times in run.errors.items():
        print(f"not scored {times} times: {error}")
    losses = [loss for service in run.actors.services for loss in service.losses]
    return {
        "steps": run.version,
        "seconds": seconds,
        "heldout_before": before,
        "heldout_after": after,
        **asdict(run.accounting),
        "in_flight": run.accounting.in_flight,
        "workers_replaced": len(losses),
        "staleness_max": max(row["staleness"] for row in run.rows),
        "k3_max": max(row["k3"] for row in run.rows),
        "tokens_per_s": sum(row["num_tokens"] for row in run.rows) / seconds,
    }


async def evaluate_own(run: Run, num_samples: int) -> dict[str, float]:
    """pass@k of the held-out prompts: how likely it is that one of k samples is all right."""
    groups = await run.judged(run.held_out, num_samples, seed=0)
    found = {"greedy": await run.evaluate()}
    k = 1
    while k <= num_samples:
        chances = []
        for group in groups:
            n = len(group.episodes)
            num_right = sum(sum(episode.rewards) > 0.999 for episode in group.episodes)
            if n >= k:
                chances.append(1 - math.comb(n - num_right, k) / math.comb(n, k))
        found[f"pass@{k}"] = statistics.fmean(chances) if chances else None
        k *= 2
    shown = "  ".join(f"{name} {show(value)}" for name, value in found.items())
    print(f"of {len(run.held_out)} held-out prompts: {shown}", flush=True)
    return found


# == THE COMMAND LINE ==============================================================================

ENVIRONMENT = {
    # How soon Monarch notices what a pidfd and a ping have not (section 5).
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "2s",
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "5s",
    # Threads of torch that outnumber the cores wait for each other by spinning: 12 times slower.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "PYTHONWARNINGS": "ignore",
}


def line_with(text: str) -> int:
    """The number of the first line of this file that contains the text."""
    for number, line in enumerate(THIS_FILE.read_text().splitlines(), 1):
        if text in line:
            return number
    raise ValueError(f"no line has {text!r}")


def banner_of(stage: Stage) -> int:
    """The line where its section begins."""
    return line_with(f". {stage.name.replace('_', ' ').upper()} ===")


async def run_stage(report: Report, stage: Stage, cfg: Config) -> bool:
    """Runs a stage; says whether all of its checks hold. An exception is one that does not."""
    place = f"[{[*STAGES].index(stage.name) + 1}/{len(STAGES)}]"
    print(f"\n{place} {stage.name}: {stage.claim}  (line {banner_of(stage)})", flush=True)
    found: dict[str, Any] = {"name": stage.name, "checks": [], "figures": {}}
    report.stages.append(found)
    start = time.monotonic()
    try:
        await stage.demo(report, cfg)
    except Exception as error:
        traceback.print_exc()
        report.check(f"errors that ended the stage ({cause_of(error)})", 1, "==", 0)
    found["seconds"] = round(time.monotonic() - start, 2)
    changed = line_with("# mechanism: " + stage.name)
    report.say(f"try: line {changed}, `{stage.instead}`; then --only {stage.name}")
    report.say(f"{len(found['checks'])} checks, {found['seconds']:.1f} s")
    return all(check["ok"] for check in found["checks"])


async def run_stages(cfg: Config, report: Report) -> int:
    """Runs the stages that were asked for, and sums up."""
    names = [*STAGES]
    if cfg.stage:
        names = names[: names.index(cfg.stage) + 1]
    if cfg.only:
        names = [cfg.only]
    print(f"{len(names)} stages", flush=True)
    start = time.monotonic()
    failed = [name for name in names if not await run_stage(report, STAGES[name], cfg)]
    num_checks = sum(len(stage["checks"]) for stage in report.stages)
    seconds = time.monotonic() - start
    print(f"\n{len(names)} stages, {num_checks} checks, {seconds:.0f} s", flush=True)
    print(f"failed: {', '.join(failed)}" if failed else "all checks hold", flush=True)
    if cfg.json:
        Path(cfg.json).write_text(
            json.dumps({"stages": report.stages, "train": {}}, indent=1)
        )
    return int(bool(failed))


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong, and what is nearest to it."""

    def error(self, message: str) -> typing.NoReturn:
        """Exits with status 2."""
        raise UsageError(message)


def read_flags(argv: list[str] | None) -> Config:
    """The flags of a command, checked. Raises UsageError."""
    parser = Parser(
        "monarch_rl.py", allow_abbrev=False, description=__doc__.splitlines()[0]
    )
    for each in fields(Config):
        name = "--" + each.name.replace("_", "-")
        text = f"{each.metadata['help']} ({each.default})"
        if isinstance(each.default, bool):
            parser.add_argument(name, action="store_true", help=each.metadata["help"])
        else:
            choices = each.metadata["choices"]
            kind = type(each.default)
            parser.add_argument(
                name, type=kind, default=each.default, choices=choices, help=text
            )
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = ["--" + each.name.replace("_", "-") for each in fields(Config)]
        near = difflib.get_close_matches(unknown[0], flags, 1)
        raise UsageError(
            f"unknown: {unknown[0]}" + (f"; did you mean {near[0]}?" if near else "")
        )
    cfg = Config(**vars(known))
    for name in (cfg.stage, cfg.only):
        if name and name not in STAGES:
            near = difflib.get_close_matches(name, STAGES, 1) or ["--list"]
            raise UsageError(f"there is no stage {name}; did you mean {near[0]}?")
    return checked(cfg)


AT_LEAST_1 = """steps prompts_per_step group_size tokens_per_pass generators reward_workers
    trainers passes eval_prompts reward_deadline"""
NOT_NEGATIVE = "max_staleness max_new_tokens lr kl entropy sft_steps eval_every evaluate"


def checked(cfg: Config) -> Config:
    """The configuration with the defaults that depend on others. Raises UsageError."""
    for least, names in ((1, AT_LEAST_1), (0, NOT_NEGATIVE)):
        for name in names.split():
            if getattr(cfg, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}")
    if cfg.temperature <= 0:
        raise UsageError("--temperature must be above 0: else all samples are the same")
    if cfg.advantage != "none" and cfg.group_size < 2:
        raise UsageError(f"--advantage {cfg.advantage} needs --group-size 2 or more")
    if (cfg.reward or cfg.task not in TASKS) and not cfg.model:
        raise UsageError("--task and --reward of your own need a --model")
    if cfg.task not in TASKS and not (cfg.task.endswith(".jsonl") or ".py:" in cfg.task):
        names = ", ".join(TASKS)
        raise UsageError(f"--task {cfg.task}: give {names}, FILE.jsonl or FILE.py:CLASS")
    is_path = cfg.model.startswith((".", "/", "~")) or cfg.model.count("/") > 1
    if is_path and not Path(cfg.model).is_dir():
        raise UsageError(f"--model {cfg.model}: there is no such folder")
    return replace(cfg, lr=cfg.lr or (1e-6 if cfg.model else 1e-3))


def prepare_environment() -> None:
    """What Monarch, torch and the workers read from the environment."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    paths = [str(THIS_FILE.parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths).strip(os.pathsep)  # for workers
    reload_config_from_env()
    warnings.simplefilter("ignore")
    # A death ends no command: the owner of the process hears of it (section 5).
    monarch.actor.unhandled_fault_hook = lambda failure: None


async def run_command(cfg: Config) -> int:
    """Runs what was asked for; a signal ends it in order. Returns the exit status."""
    task = asyncio.current_task()
    received: list[int] = []

    def end(number: int) -> None:
        received.append(number)
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, end, number)
    pool = Pool()
    try:
        with tempfile.TemporaryDirectory(prefix="monarch_rl_") as folder:
            report = Report(Path(folder), pool)
            if cfg.train or cfg.evaluate or cfg.export:
                return await run_own(cfg, report)
            return await run_stages(cfg, report)
    except asyncio.CancelledError:
        print(f"ended by {signal.Signals(received[0]).name}", flush=True)
        return 128 + received[0]
    finally:
        await pool.close()


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status: 0 all well, 1 a failure, 2 wrong usage, 128 + n after signal n."""
    try:
        cfg = read_flags(argv)
        if cfg.list:
            for stage in STAGES.values():
                print(f"line {banner_of(stage):5}  {stage.name:15} {stage.claim}")
            return 0
        prepare_environment()
        if cfg.train or cfg.evaluate or cfg.export:
            has_gpu = torch.cuda.is_available()
            cfg = replace(cfg, device=cfg.device or ("cuda" if has_gpu else "cpu"))
        return asyncio.run(run_command(cfg))
    except UsageError as error:
        print(f"monarch_rl.py: {error}", file=sys.stderr)
        return 2
    except (RunError, ReplicaLost, ActorError) as error:
        cause = cause_of(error)
        print(f"monarch_rl.py: {cause.removeprefix('monarch_rl.')}", file=sys.stderr)
        return 2 if "UsageError: " in cause else 1


if __name__ == "__main__":
    import monarch_rl  # so that workers find the classes under this name

    sys.exit(monarch_rl.main())
