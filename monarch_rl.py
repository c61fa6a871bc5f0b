#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["torch==2.13.0", "transformers==5.20.2", "torchmonarch==0.7.0"]
# ///
"""monarch_rl: an asynchronous RL system for language models, in one file that teaches itself.

    python monarch_rl.py                      the whole tour, about two minutes on a Linux laptop
    python monarch_rl.py --stage service      stages 1 to 6
    python monarch_rl.py --only async_rl      one stage
    python monarch_rl.py --list               the stages, with line numbers

Each stage shows a problem, the rule that solves it, and measures both in the same run.

                prompts                    rollouts                    batch
      Sampler ------------> Generators ----------------> ReplayBuffer ---------> Trainer
      (Gate)                (a Service of replicas)      (groups, versions)         |
         ^                      ^                              |                    | publish
         |                      | pull                         |                    v
         +---- tickets back ----|------------------------------+              WeightWriter
                                |                                                   |
                           WeightReader <-------- Arena (slots, leases) <-----------+

      control plane: actor messages, small          data plane: shared memory or RDMA, bulk

    1 hello_actor     state in its own process; one call at a time, in order; two actors overlap
    2 actor_mesh      many members, one call: who runs and who answers
    3 rdma_transfer   pass the handle, pull the bytes; the owner's Python takes no part
    4 controllers     find a singleton by name
    5 supervision     whose failure is it? the owner replaces a dead process
    6 service         every request answered exactly once while replicas fail, hang and die
    7 weight_sync     never torn, the trainer never waits, about one memory copy
    8 sync_rl         the RL loop, one thing at a time
    9 async_rl        two loops and a buffer: the same reward in less time, lag bounded

Left out, and what to use instead: paged attention and continuous batching (vLLM, SGLang); tensor,
pipeline and expert parallel training (torchtitan, Megatron); LoRA (peft); sandboxes for tools;
launchers for Slurm and Kubernetes (Monarch's job API). Each would hide the part that is taught.

The words, each with an example:

    version    optimizer steps behind a set of weights; 0 = untrained                     7
    lag        the trainer's version when it trains on a sample minus the sample's        2
    episode    one conversation: user, assistant, user, assistant       "abc" "abc" "dfa" "dfa"
    group      the episodes sampled from one prompt; rewards are compared inside it       8
    rollout    what one call of a generator returns: groups of episodes              16 x 8
    ticket     permission to generate one group; given back if the group is dropped       1
    slot       one copy of all weights in shared memory                             256 MiB
    lease      the slot that a generator says it is reading                               3
    replica    one of several interchangeable actors, in a process of its own             0
"""

from __future__ import annotations

# -- plumbing: before Monarch starts --------------------------------------------------------------
import os, signal

if __name__ == "__main__":  # Ctrl-C during the imports below
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse, dataclasses, glob, importlib.metadata, json, re, sys, tempfile
import asyncio, collections, concurrent.futures, ctypes, mmap, pickle, threading, time, zlib
import math, operator, random, statistics, textwrap, traceback
from dataclasses import dataclass

# Every process inherits these, and each must be set before Monarch or the C library reads it.
for _name, _value in {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "200ms",  # 10 s unless told
    # A poll under way when its process dies waits so long for the reply: 30 s unless told.
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    # Copies above 1 MiB bypass the cache and so do not read their destination: 6.8 -> 11 GB/s.
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x100000",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",  # Monarch's RDMA asks for it on GPUs
    "TOKENIZERS_PARALLELISM": "false",  # its thread pool would fight for our cores
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
}.items():
    os.environ.setdefault(_name, _value)
# Workers import this file by its name, from whatever folder the run was started in.
_folder = os.path.dirname(os.path.abspath(__file__))
os.environ["PYTHONPATH"] = f"{_folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"


class Lazy:
    """A module that is imported at its first use: torch costs 1.4 s of CPU in every process that
    uses it, transformers 2.3 s more, and most processes of stages 1 to 6 use neither."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


torch, transformers = Lazy("torch"), Lazy("transformers")

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError  # not public
from monarch.actor import Actor, ActorError, concurrent_endpoint, current_rank, endpoint
from monarch.actor import get_or_spawn_controller, this_host, this_proc
from monarch.rdma import RDMABuffer, get_rdma_backend

MIB = 1 << 20


def knob(default, what: str, rule=str, choices: str = ""):
    """A field of Config and the flag of the same name; choices: a name in this file."""
    metadata = {"what": what, "rule": rule, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


def at_least(least: int):
    def whole_number(text: str) -> int:
        if not re.fullmatch(r"[+-]?\d+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
        return int(text)

    return whole_number


@dataclass(frozen=True)
class Config:
    """Everything a run can be told, passed to every actor's constructor. A module global would
    not do: a worker imports its own copy of this file and never sees what the controller sets."""

    task: str = knob("repeat", "what the policy learns", choices="TASKS")
    model: str = knob("tiny", "a folder or hub id of a causal LM, or the built-in tiny one")
    steps: int = knob(450, "optimizer steps of async_rl, half as many in sync_rl; too few learn "
                      "too little for the checks", at_least(1))
    generators: int = knob(2, "replicas of the generator service", at_least(1))
    max_lag: int = knob(2, "K: nothing older than K versions is trained on", at_least(0))
    loss: str = knob("ppo", "what an update minimises", choices="LOSSES")
    seed: int = knob(0, "of sampling, initial weights and prompts", at_least(0))
    device: str = knob("cpu", "where policies compute", choices="DEVICES")
    model_mb: int = knob(256, "MiB of weights in weight_sync", at_least(1))
    log: str = knob("", "file for one JSON line per training step")


DEVICES = ("cpu", "cuda")


# -- plumbing: the report -------------------------------------------------------------------------


@dataclass(frozen=True)
class Stage:
    """One banner, one section, one demo, one claim."""

    number: int
    name: str
    claim: str
    demo: object  # async (Report, Config) -> None
    line: int


STAGES: dict[str, Stage] = {}  # filled by the decorator below while Python reads this file


def stage(number: int, name: str, claim: str):
    """Registers the demo that closes a section."""

    def register(demo):
        STAGES[name] = Stage(number, name, claim, demo, demo.__code__.co_firstlineno)
        return demo

    return register


def line_of(mark: str) -> int:
    """The number of the line that ends with the comment `# mark`. Some short comments below are
    only such marks, for the `try:` lines of the demos."""
    with open(__file__, encoding="utf-8") as source:
        return next(n for n, line in enumerate(source, 1) if line.endswith(f"# {mark}\n"))


class Report:
    """The only thing that prints: output of workers arrives late and out of order. What it prints
    it also keeps, for --json."""

    OPERATORS = {"==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt,
                 ">=": operator.ge}

    def __init__(self):
        self.stages: list[dict] = []
        self.live = sys.stdout.isatty()

    def open(self, stage: Stage) -> None:
        self.started = time.monotonic()
        self.now = {"name": stage.name, "number": stage.number, "claim": stage.claim, "ok": True,
                    "seconds": 0.0, "checks": [], "figures": {}}
        self.stages.append(self.now)
        head = f"[{stage.number}/{len(STAGES)}] {stage.name}: "
        self._print(textwrap.fill(head + f"{stage.claim}  (line {stage.line})", 96,
                                  subsequent_indent=" " * 7))

    def _print(self, text: str) -> None:
        print(("\r\x1b[K" if self.live else "") + text, flush=True)  # over a live line, if any

    def say(self, *lines: str) -> None:
        for line in lines:
            self._print(f"       {line}".rstrip())

    def progress(self, text: str, keep: bool) -> None:
        """One live line on a terminal; in a pipe only the lines to keep."""
        if keep:
            self.say(text)
        elif self.live:
            print(f"\r\x1b[K       {text}", end="", flush=True)

    def table(self, heads: list[str], *rows: list) -> None:
        """Columns as wide as their widest cell, words to the left, numbers to the right."""
        cells = [heads, *([show(cell) for cell in row] for row in rows)]
        widths = [max(map(len, column)) for column in zip(*cells)]
        words = [isinstance(c, str) and not re.fullmatch(r"[\d.]+%?", c) for c in rows[0]]
        for row in cells:
            pairs = zip(row, widths, words)
            self.say("   ".join(c.ljust(w) if left else c.rjust(w) for c, w, left in pairs))

    def figure(self, **figures: float | int | str) -> None:
        """Figures for --json; their names end in their unit."""
        self.now["figures"].update(figures)

    def check(self, what: str, got, relation: str, want) -> None:
        """Compares what was measured with what was expected; a failure makes the exit status 1."""
        ok, wanted = bool(self.OPERATORS[relation](got, want)), f"{relation} {show(want)}"
        self.now["checks"].append({"what": what, "got": show(got), "want": wanted, "ok": ok})
        self.now["ok"] = self.now["ok"] and ok
        expected = "" if ok and relation == "==" else f"  ({wanted})"
        self._print(f"{'    ok' if ok else '  FAIL'} {what}: {show(got)}{expected}")

    def died(self, error: BaseException) -> None:
        why = f"{type(cause(error)).__name__}: {cause(error)}".split("\n")[0]
        self.check("errors that ended the stage", why, "==", "none")
        traceback.print_exception(type(error), error, error.__traceback__, file=sys.stderr)

    def close(self) -> None:
        self.now["seconds"] = round(time.monotonic() - self.started, 2)
        self.say(f"{len(self.now['checks'])} checks, {self.now['seconds']:.1f} s", "")

    def write_json(self, path: str, args: dict, machine: dict) -> None:
        whole = {"version": 1, "args": args, "machine": machine, "stages": self.stages}
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            json.dump(whole, file, indent=1)
        os.replace(f"{path}.tmp", path)  # readers see the old file or the whole new one


def show(value) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:{'.2g' if 0 < abs(value) < 0.1 else '.2f' if abs(value) < 100 else '.0f'}}"


def cause(error: BaseException) -> BaseException:
    """The exception that an endpoint raised, out of the ActorErrors that carried it here."""
    while isinstance(error, ActorError):
        error = error.exception
    return error


def since(start: float) -> float:
    """Seconds since a time.monotonic()."""
    return time.monotonic() - start


# == 1. HELLO ACTOR ===============================================================================
# Problem. Threads share an object; each reads it, pauses, writes it back. Updates vanish, without
#   an error, and not every time.
# Rule. Put the object into an actor: an instance that lives in one process and is reached only
#   through messages. Its endpoints run one at a time, in the order in which a caller sent them, so
#   none ever sees another one half done. Two actors share nothing, and overlap.
# Cost. A message: about 0.3 ms inside a process, 0.7 ms to another one.
# Not here. Endpoints that may overlap (`concurrent_endpoint`, section 6).
# Source. Hewitt, Bishop, Steiger 1973; Monarch's `Actor`.


class Tally(Actor):
    """A counter, and a diary of the order in which its endpoint ran."""

    def __init__(self):
        self.total, self.diary = 0, []

    @endpoint  # add
    async def add(self, n: int) -> None:
        """The n-th addition. Pauses between reading and writing, for which threads are punished."""
        seen = self.total
        await asyncio.sleep(0.0005)
        self.total = seen + 1
        self.diary.append(n)

    @endpoint
    async def read(self) -> tuple[int, int, list[int]]:
        """(process id, total, diary)"""
        return os.getpid(), self.total, self.diary

    @endpoint
    async def work(self, duration_s: float) -> tuple[float, float]:
        """Keeps this actor busy; (start, end) on the monotonic clock, one for all processes."""
        start = time.monotonic()
        await asyncio.sleep(duration_s)
        return start, time.monotonic()


def total_of_threads(num_threads: int, num_adds: int) -> int:
    """What threads reach that do to a plain object what Tally.add does."""
    box = {"total": 0}

    def add(n: int) -> None:
        seen = box["total"]
        time.sleep(0.0005)
        box["total"] = seen + 1

    with concurrent.futures.ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(add, range(num_adds)))
    return box["total"]


async def overlap_ms(first, second) -> float:
    """For how long two calls ran at the same time."""
    (a, b), (c, d) = await first, await second
    return max(0.0, min(b, d) - max(a, c)) * 1e3


@stage(1, "hello_actor", "an actor's state lives in its own process; calls to one actor run one "
       "at a time in the order sent; two actors overlap")
async def demo_hello_actor(report: Report, cfg: Config) -> None:
    procs = this_host().spawn_procs(per_host={"worker": 2})
    near = this_proc().spawn("near", Tally)  # in this process
    far = procs.spawn("far", Tally)  # one in each of two others
    one, other = far.slice(worker=0), far.slice(worker=1)
    places = {"controller": os.getpid()}
    for name, actor in [("actor, this process", near), ("actor 0", one), ("actor 1", other)]:
        places[name] = (await actor.read.call_one())[0]
    report.table(["who", "process", "device"], *([k, v, cfg.device] for k, v in places.items()))
    report.check("processes behind these four", len(set(places.values())), "==", 3)
    lost = 200 - total_of_threads(num_threads=4, num_adds=200)
    calls = [one.add.call_one(n) for n in range(200)]  # all sent before the first is answered
    for call in calls:
        await call
    _, total, diary = await one.read.call_one()
    report.table(["200 additions that read, pause, write", "lost"],
                 ["by 4 threads on one object", lost],
                 ["by one actor, 200 calls in flight", 200 - total])
    report.check("additions that threads lost", lost, ">", 0)
    report.check("additions that the actor lost", 200 - total, "==", 0)
    report.check("calls that ran out of order", sum(a != b for a, b in enumerate(diary)), "==", 0)
    same = await overlap_ms(one.work.call_one(0.2), one.work.call_one(0.2))
    both = await overlap_ms(one.work.call_one(0.2), other.work.call_one(0.2))
    report.check("overlap of two 200 ms calls to one actor, ms", same, "==", 0)
    report.check("overlap of two 200 ms calls to two actors, ms", both, ">", 100)
    report.say(f"try: make `add` (line {line_of('add')}) a concurrent_endpoint: it loses too")
    await procs.stop()


# == 2. ACTOR MESH ================================================================================
# Problem. A run has many generators and a trainer many ranks. A loop that calls them one by one
#   waits for the sum of their times; a variable set in the controller reaches none of them.
# Rule. Spawn a mesh: the same actor in every process of a process mesh. One call fans out. Five
#   ways to say it differ in who runs and who answers; what members must know is sent to them.
# Cost. None over a single call. Answers of `call` come as a ValueMesh, one value per member.
# Not here. Meshes over several hosts.      Source. Monarch's meshes and adverbs.


class Member(Actor):
    """One of several; knows its rank, counts only for itself."""

    scale = 1  # a class attribute: every process has its own

    def __init__(self):
        self.rank, self.runs = current_rank().rank, 0

    @endpoint
    async def ping(self) -> int:
        self.runs += 1
        return self.rank

    @endpoint
    async def runs_since(self) -> int:
        """How often `ping` ran here since this was last asked."""
        runs, self.runs = self.runs, 0
        return runs

    @endpoint
    async def scale_seen(self, sent: int | None = None) -> int:
        if sent is not None:
            Member.scale = sent
        return Member.scale


async def who_ran(mesh) -> str:
    """The ranks where `ping` ran. Messages of one sender arrive in the order sent, so this comes
    after the calls it asks about, after a broadcast too."""
    return " ".join(str(point.rank) for point, runs in await mesh.runs_since.call() if runs)


@stage(2, "actor_mesh", "one call reaches every member; call, call_one, choose, broadcast and "
       "slice differ in who runs and who answers")
async def demo_actor_mesh(report: Report, cfg: Config) -> None:
    procs = this_host().spawn_procs(per_host={"rank": 4})
    mesh = procs.spawn("member", Member)
    seen = {}  # how -> (who ran, who answered)
    every = " ".join(str(rank) for _, rank in await mesh.ping.call())  # a ValueMesh: (point, value)
    seen["mesh.ping.call()"] = (await who_ran(mesh), every)
    one = await mesh.slice(rank=2).ping.call_one()
    seen["mesh.slice(rank=2).ping.call_one()"] = (await who_ran(mesh), f"{one}")
    chosen = await mesh.ping.choose()
    seen["mesh.ping.choose()"] = (await who_ran(mesh), f"{chosen}")
    mesh.ping.broadcast()  # returns None at once; nobody answers
    seen["mesh.ping.broadcast()"] = (await who_ran(mesh), "-")
    some = " ".join(str(rank) for _, rank in await mesh.slice(rank=slice(1, 3)).ping.call())
    seen["mesh.slice(rank=slice(1, 3)).ping.call()"] = (await who_ran(mesh), some)
    report.table(["call", "ranks that ran", "ranks that answered"],
                 *([how, *who] for how, who in seen.items()))
    expected = [("0 1 2 3",) * 2, ("2",) * 2, (f"{chosen}",) * 2, ("0 1 2 3", "-"), ("1 2",) * 2]
    wrong = sum(a != b for a, b in zip(seen.values(), expected))
    report.check("rows that differ from what the words mean", wrong, "==", 0)
    try:
        await mesh.ping.call_one()
        refused = "answered"
    except ValueError:
        refused = "ValueError"
    report.check("call_one on four members", refused, "==", "ValueError")
    Member.scale = 10  # changes this process only
    unsent = sum(scale == 10 for _, scale in await mesh.scale_seen.call())
    sent = sum(scale == 10 for _, scale in await mesh.scale_seen.call(10))
    report.table(["how 4 members learn that scale = 10", "members that see it"],
                 ["a variable set in the controller", unsent], ["sent with a call", sent])
    report.check("members that see the controller's variable", unsent, "==", 0)
    report.check("members that see what was sent", sent, "==", 4)
    report.say("try: replace `mesh.ping.broadcast()` by `await mesh.ping.choose()` in this demo")
    await procs.stop()


# == 3. RDMA TRANSFER =============================================================================
# Problem. Weights are gigabytes. An actor message is pickled, copied, queued and unpickled, and is
#   answered only when the owner's Python has time.
# Rule. Two roads. Control travels in messages. Bulk is registered once as an RDMABuffer; its handle
#   (half a kilobyte) travels in a message, and who holds the handle moves the bytes by one-sided
#   reads and writes. The owner's Python takes no part.
# Cost. The owner must keep the memory alive and is not told when a reader is done (section 7 is
#   about that). Memory must be contiguous: `.flatten()` of a strided view is a copy, and bytes
#   written into a copy vanish.
# Not here. GPU memory: with an RDMA card the same handle covers it. Without a card Monarch moves
#   the bytes over TCP: the same contract, less speed.      Source. Monarch's RDMABuffer.


def checksum(tensor) -> int:
    """CRC-32 of a CPU tensor's bytes."""
    return zlib.crc32(tensor.numpy())


def random_bytes(num_bytes: int, seed: int):
    """[num_bytes] uint8 on the CPU."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=rng)


class Owner(Actor):
    """Owns memory and hands out handles to it."""

    def __init__(self):
        self.memory = {}  # num_bytes -> [num_bytes] uint8, kept alive here for the readers

    @endpoint
    async def register(self, num_bytes: int) -> tuple[RDMABuffer, int]:
        self.memory[num_bytes] = random_bytes(num_bytes, seed=num_bytes)
        return RDMABuffer(self.memory[num_bytes]), checksum(self.memory[num_bytes])

    @endpoint
    async def as_message(self, num_bytes: int):
        return self.memory[num_bytes]

    @endpoint
    async def checksum(self, num_bytes: int) -> int:
        return checksum(self.memory[num_bytes])

    @endpoint
    async def sit(self, duration_s: float) -> float:
        """Blocks this process's Python; returns when it ended, on the monotonic clock."""
        time.sleep(duration_s)
        return time.monotonic()


class Mover(Actor):
    """Moves bytes by each road; every endpoint returns (seconds, when it ended, checksum)."""

    def __init__(self, owner):
        self.owner = owner
        self.room = torch.zeros(64 * MIB, dtype=torch.uint8)  # touched now: first touches are slow

    @endpoint
    async def ask(self, num_bytes: int) -> tuple[float, float, int]:
        start = time.monotonic()
        received = await self.owner.as_message.call_one(num_bytes)
        return since(start), time.monotonic(), checksum(received)

    @endpoint
    async def pull(self, num_bytes: int, handle: RDMABuffer) -> tuple[float, float, int]:
        start, room = time.monotonic(), self.room[:num_bytes]
        await handle.read_into(room)
        return since(start), time.monotonic(), checksum(room)

    @endpoint
    async def push(self, num_bytes: int, handle: RDMABuffer) -> tuple[float, float, int]:
        fresh = random_bytes(num_bytes, seed=num_bytes + 1)
        start = time.monotonic()
        await handle.write_from(fresh)
        return since(start), time.monotonic(), checksum(fresh)


@stage(3, "rdma_transfer", "a handle of about half a kilobyte moves any number of bytes, and the "
       "owner's Python takes no part in the read")
async def demo_rdma_transfer(report: Report, cfg: Config) -> None:
    owner_procs, mover_procs = (this_host().spawn_procs(per_host={"one": 1}) for _ in range(2))
    owner = owner_procs.spawn("owner", Owner)
    mover = mover_procs.spawn("mover", Mover, owner)
    backend, rows, wrong = get_rdma_backend(), [], 0
    report.say(f"backend: {backend}" + (", no RDMA card found" if backend == "tcp" else ""))
    for num_bytes in [1 << 10, 1 << 10, 64 << 10, MIB, 16 * MIB, 64 * MIB]:  # the first warms up
        handle, expected = await owner.register.call_one(num_bytes)
        message = await mover.ask.call_one(num_bytes)
        pull = await mover.pull.call_one(num_bytes, handle)
        push = await mover.push.call_one(num_bytes, handle)
        landed = await owner.checksum.call_one(num_bytes)
        wrong += (message[2] != expected) + (pull[2] != expected) + (push[2] != landed)
        rows.append([f"{num_bytes >> 10} KiB", len(pickle.dumps(handle)),
                     *(road[0] * 1e3 for road in (message, pull, push))])
    report.table(["moved", "handle bytes", "message ms", "pull ms", "push ms"], *rows[1:])
    busy = owner.sit.call_one(2.0)  # for two seconds the owner's Python does nothing else
    pull = await mover.pull.call_one(num_bytes, handle)
    message = await mover.ask.call_one(num_bytes)
    free_at, wrong = await busy, wrong + (pull[2] != landed) + (message[2] != landed)
    report.table(["64 MiB from an owner busy for 2 s", "ms"],
                 ["message", message[0] * 1e3], ["pull", pull[0] * 1e3])
    report.figure(handle_bytes=rows[-1][1], message_ms=rows[-1][2], pull_ms=rows[-1][3],
                  push_ms=rows[-1][4], backend=backend)
    report.check(f"wrong checksums in {3 * len(rows) + 2} transfers", wrong, "==", 0)
    report.check("largest handle, bytes", max(row[1] for row in rows), "<", 1024)
    report.check("pull ended before its owner was free by, s", free_at - pull[1], ">", 0)
    report.check("message ended after its owner was free by, s", message[1] - free_at, ">", 0)
    report.say("try: register a copy, `self.memory[num_bytes].clone()`: pushes vanish, unseen")
    await asyncio.gather(owner_procs.stop(), mover_procs.stop())


# == 4. CONTROLLERS ===============================================================================
# Problem. Actors in many processes have to meet, at one metrics store, say. Whoever creates it must
#   hand it to everyone else, and two creators make two half-filled stores.
# Rule. Ask by name: `get_or_spawn_controller(name, Class)` gives every caller the same actor and
#   creates it at most once, however many ask at the same moment.
# Cost. A look-up per process. The singleton lives in the controller's process.
# Not here. Singletons that survive that process.      Source. Monarch's get_or_spawn_controller.


@dataclass(frozen=True)
class Span:
    """What an actor did, for the timeline of section 9."""

    who: str  # "generator 0"
    what: str  # "generate" or "step"
    start: float  # monotonic seconds; all processes of a host share that clock
    end: float


class Metrics(Actor):
    """The run's shared notebook; every process finds it by name."""

    def __init__(self):
        self.made_at = time.monotonic_ns()
        self.totals: collections.Counter = collections.Counter()
        self.history: collections.deque = collections.deque(maxlen=20_000)  # the last few minutes

    @endpoint
    async def count(self, name: str) -> int:
        """Adds one; tells which Metrics this is."""
        self.totals[name] += 1
        return self.made_at

    @endpoint
    async def note(self, span: Span) -> None:
        """What an actor did; sent with `broadcast`, so that it does not wait."""
        self.totals[f"busy {span.who}"] += span.end - span.start
        self.history.append(span)

    @endpoint
    async def read(self) -> collections.Counter:
        return self.totals

    @endpoint
    async def spans(self, start: float, end: float) -> list[Span]:
        return [span for span in self.history if span.end > start and span.start < end]


class Clerk(Actor):
    """Writes 25 rows to a store: to one of its own, or to the one found by name."""

    @endpoint
    async def write(self, name: str) -> int:
        own = this_proc().spawn("own", Metrics)
        store = await get_or_spawn_controller(name, Metrics) if name else own
        return [await store.count.call_one("rows") for _ in range(25)][-1]


@stage(4, "controllers", "actors that never met find the same singleton by name, and it is created "
       "once")
async def demo_controllers(report: Report, cfg: Config) -> None:
    procs = this_host().spawn_procs(per_host={"clerk": 4})
    clerks = procs.spawn("clerk", Clerk)
    stores, rows = [], []
    for name in ["", "demo of section 4"]:
        stores.append(len({which for _, which in await clerks.write.call(name)}))
        found = await get_or_spawn_controller(name or "nobody's", Metrics)  # after them: they race
        rows.append((await found.read.call_one())["rows"])
    report.table(["4 processes write 25 rows each, at once", "stores", "rows found, of 100"],
                 ["each makes a store", stores[0], rows[0]],
                 ["each asks for it by name", stores[1], rows[1]])
    report.check("stores when each makes one", stores[0], "==", 4)
    report.check("stores when each asks by name", stores[1], "==", 1)
    report.check("rows in the store found by name", rows[1], "==", 100)
    report.say("try: let each clerk ask for a name of its own, f'{name} {os.getpid()}'")
    await procs.stop()


# == 5. SUPERVISION ===============================================================================
# Problem. Processes die, and some only stop. If nobody is responsible, every later call fails or
#   waits for ever.
# Rule. An exception belongs to the caller; the actor lives on. A dead process belongs to the actor
#   that spawned it: its `__supervise__` is told, and it spawns another. A stopped process tells
#   nobody, so calls carry a deadline, and missing it counts as death.
# Cost. A poll every 200 ms. A deadline that is too short kills the slow.
# Not here. Who restarts the owner. Processes spawned by the controller itself: their death ends it.
# Source. Erlang's supervisors (Armstrong 2003).


class Worker(Actor):
    """Somebody to fail."""

    @endpoint
    async def pid(self) -> int:
        return os.getpid()

    @endpoint
    async def fail(self) -> None:
        raise ValueError("a bad request")


# Who owns whom, and where news of a death goes:
#
#     controller process                                 worker process
#       Supervisor  --spawn_procs, spawn-->                Worker
#           ^  ^                                             |  dies
#           |  +---- __supervise__ (Monarch's poll) ---------+
#           +------- on_exit (pidfd, at once, this host) ----+


class Supervisor(Actor):
    """Owns one worker process and replaces it."""

    def __init__(self, deadline_s: float):
        self.deadline_s = deadline_s
        self.told = asyncio.Event()  # set by __supervise__
        self.procs = None

    async def __supervise__(self, failure) -> bool:
        self.told.set()
        return True  # handled; False would pass it on to whoever owns me

    @endpoint
    async def spawn(self) -> float:
        """(Re)places the worker; seconds until it answers."""
        start = time.monotonic()
        if self.procs is not None:
            kill_process(self.pid)  # SIGKILL ends stopped processes too
            await self.procs.stop()
        self.procs = this_host().spawn_procs(per_host={"worker": 1})
        self.worker = self.procs.spawn("worker", Worker)
        self.pid, self.told = await self.worker.pid.call_one(), asyncio.Event()
        on_exit(self.pid, self.told.set)  # watch
        return since(start)

    @endpoint
    async def provoke(self, trigger: str) -> tuple[str, bool, float]:
        """(what the caller saw, whether this owner was told, seconds until the first of them)"""
        start, saw, found_s = time.monotonic(), "nothing", 0.0
        try:
            if trigger == "exception, call_one":
                await self.worker.fail.call_one()
            elif trigger == "exception, broadcast":
                self.worker.fail.broadcast()
                await asyncio.wait_for(self.told.wait(), self.deadline_s)
            elif trigger == "SIGSTOP":
                os.kill(self.pid, signal.SIGSTOP)
                await asyncio.wait_for(self.worker.pid.call_one(), self.deadline_s)
            else:
                os.kill(self.pid, signal.SIGKILL)
                await asyncio.wait_for(self.told.wait(), self.deadline_s)
                found_s = since(start)
                await asyncio.wait_for(self.worker.pid.call_one(), 10.0)  # until Monarch knows too
        except (ActorError, SupervisionError, asyncio.TimeoutError) as error:
            saw = type(cause(error)).__name__
        found_s = found_s or since(start)
        await asyncio.sleep(0.5)  # two polls, so that "not told" means something
        return saw, self.told.is_set(), found_s

    @endpoint
    async def answered(self, num_calls: int) -> int:
        """How many calls to the worker are answered. An actor that raised under broadcast is dead
        though its process lives, and a message to a dead actor would end its sender: not sent."""
        count = 0
        for _ in range(num_calls):
            try:
                await asyncio.wait_for(self.worker.pid.call_one(), 0.1)
                count += 1
            except (SupervisionError, asyncio.TimeoutError):
                pass  # counted by not being counted
        return count


def on_exit(pid: int, callback) -> None:
    """Calls back in this event loop as soon as a process of this host ends. Monarch's poll tells
    too, of processes anywhere, but later, and seconds later if it had just asked that process."""
    loop, fd = asyncio.get_running_loop(), os.pidfd_open(pid)
    loop.add_reader(fd, lambda: (loop.remove_reader(fd), os.close(fd), callback()))


def kill_process(pid: int) -> None:
    """Also ends stopped processes. Pid 0, which would mean all of our group, is nobody."""
    try:
        if pid:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it was quicker


TRIGGERS = {  # trigger: (what its caller sees, is the owner told)
    "exception, call_one": ("ValueError", False),
    "exception, broadcast": ("nothing", True),
    "SIGKILL": ("SupervisionError", True),
    "SIGSTOP": ("TimeoutError", False),
}


@stage(5, "supervision", "an exception belongs to the caller; a dead process belongs to whoever "
       "spawned it, who replaces it in under a second")
async def demo_supervision(report: Report, cfg: Config) -> None:
    supervisor = this_proc().spawn("supervisor", Supervisor, 0.3)
    await supervisor.spawn.call_one()
    rows, surprises, unreplaced, replaced, ms = [], 0, 0, 0, {}
    for trigger, expected in TRIGGERS.items():
        saw, told, found_s = await supervisor.provoke.call_one(trigger)
        surprises += (saw, told) != expected
        lives = trigger == "exception, call_one"
        if trigger.startswith("SIG"):
            unreplaced += await supervisor.answered.call_one(5)
        respawn_s = 0.0 if lives else await supervisor.spawn.call_one()
        now = await supervisor.answered.call_one(5)
        replaced += now
        ms[trigger] = (found_s * 1e3, respawn_s * 1e3)
        rows.append([trigger, saw, "yes" if told else "no", found_s * 1e3, respawn_s * 1e3, now])
    report.table(["trigger", "caller sees", "owner told", "after ms", "replaced ms",
                  "answers of 5"], *rows)
    detect_ms, respawn_ms = ms["SIGKILL"]
    report.figure(detect_ms=detect_ms, respawn_ms=respawn_ms)
    report.check("triggers that behaved otherwise", surprises, "==", 0)
    report.check("answers of 10 calls to a killed and a stopped worker", unreplaced, "==", 0)
    report.check("answers of 20 calls after the owner's cure", replaced, "==", 20)
    report.check("SIGKILL found and worker replaced, ms", detect_ms + respawn_ms, "<", 1000)
    report.say(f"try: remove line {line_of('watch')}: Monarch's poll tells the owner, but later")
    await supervisor.stop()


# == 6. SERVICE ===================================================================================
# Problem. A caller that picks a replica itself shares that replica's fate: one stopped replica of
#   four loses a quarter of the requests.
# Rule. The caller asks the service, the service asks a replica: a healthy one with the fewest
#   requests in flight, in turn. Every attempt has a deadline. A replica that dies, misses it or
#   keeps raising is replaced, and the request goes to another. If two replicas raise on the same
#   request, the request is to blame and the exception is its caller's.
# Cost. A hop inside this process. A request may run twice; it is answered once.
# Not here. Sessions, priorities, autoscaling (Ray Serve has them).
# Source. Least-loaded round robin, as in any load balancer; "let it crash", as in Erlang.


LEAVING = threading.Event()  # set when this process is about to end: nothing is replaced any more


class NoReplica(RuntimeError):
    """No healthy replica within the deadline."""


# The life of a replica, and what moves it on:
#
#     spawning --setup() answers--> healthy --dies, misses a deadline, keeps raising--> lost
#        ^                                                                                |
#        +------------- _replace: kill what is left, spawn the next generation -----------+
#
# A request never waits for a particular replica: when one is lost, its future `lost` wakes every
# attempt that hangs on it, and each of them picks another.


@dataclass
class Replica:
    """One process of a service; only the service that owns it touches this record."""

    id: int
    generation: int = 0  # how often it was spawned
    healthy: bool = False
    in_flight: int = 0  # requests
    errors: int = 0  # in a row, on requests that another replica then answered
    pid: int = 0
    procs: object = None
    actor: object = None
    lost: object = None  # asyncio.Future, resolved when this generation is given up


class Service(Actor):
    """Replicas of one actor class behind one name.

    The class takes (replica_id, *args) and has an endpoint `setup()` that makes it ready to serve
    and returns its process id. A replacement joins through the same `setup()`."""

    MAX_ERRORS = 3  # in a row until a replica that raises is replaced
    MAX_ATTEMPTS = 3  # per request: a request that kills who runs it must not kill them all
    SETUP_DEADLINE_S = 120.0  # imports on a loaded machine take seconds, large models minutes

    def __init__(self, name: str, replica_class: type, num_replicas: int, deadline_s: float, *args):
        """deadline_s: seconds for one attempt at a request."""
        self.name, self.replica_class, self.args = name, replica_class, args
        self.deadline_s = deadline_s
        self.replicas = [Replica(i) for i in range(num_replicas)]
        self.turn, self.stopping = 0, False
        self.recovered = asyncio.Event()  # set whenever a replica becomes healthy
        self.log: list[tuple[int, str, float]] = []  # (replica id, why, seconds until healthy)
        self.failover_s: list[float] = []  # of requests that needed a second attempt, in all
        self.tasks: set[asyncio.Task] = set()

    @concurrent_endpoint
    async def start(self) -> None:
        spawns = asyncio.gather(*(self._spawn(replica) for replica in self.replicas))
        await asyncio.wait_for(spawns, self.SETUP_DEADLINE_S)

    @concurrent_endpoint
    async def route(self, method: str, *args):
        """Runs method(*args) on a healthy replica and answers exactly once. Raises what the request
        itself is to blame for, or NoReplica. (A plain endpoint would run one request at a time.)"""
        start, raised, error = time.monotonic(), [], None
        for _ in range(self.MAX_ATTEMPTS):  # attempts
            replica = await self._pick(raised)
            try:
                answer = await self._attempt(replica, method, args)
            except ActorError as caught:
                raised.append(replica)
                error = cause(caught)
                if len(raised) == min(2, len(self.replicas)):
                    raise error  # a second replica agrees
            except (SupervisionError, asyncio.TimeoutError) as caught:
                error = caught
                stopped = isinstance(caught, asyncio.TimeoutError)
                self._evict(replica, "missed its deadline" if stopped else "died")
            else:
                self._blame(raised, replica)
                if error:
                    self.failover_s.append(since(start))
                return answer
        raise error

    async def _attempt(self, replica: Replica, method: str, args: tuple):
        """Waits for the answer, the deadline, or the news that the replica is lost."""
        replica.in_flight += 1
        call = asyncio.ensure_future(getattr(replica.actor, method).call_one(*args))
        try:
            await asyncio.wait({call, replica.lost}, timeout=self.deadline_s,
                               return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
            raise SupervisionError("lost") if replica.lost.done() else asyncio.TimeoutError()
        finally:
            replica.in_flight -= 1
            call.cancel()  # an answer that comes too late finds nobody

    async def _pick(self, raised: list[Replica]) -> Replica:
        """The next replica that has not raised on this request; woken by `_spawn`."""
        end = time.monotonic() + self.SETUP_DEADLINE_S
        while True:
            # Fewest in flight first, so that a slow replica gets less; among equals in turn, or an
            # idle service would send everything to replica 0.
            fit = [r for r in self.replicas if r.healthy and r not in raised]
            if fit:
                self.turn += 1
                n = len(self.replicas)
                return min(fit, key=lambda r: (r.in_flight, (r.id - self.turn) % n))
            self.recovered.clear()
            try:
                await asyncio.wait_for(self.recovered.wait(), max(0.0, end - time.monotonic()))
            except asyncio.TimeoutError:
                raise NoReplica(f"{self.name}: none within {self.SETUP_DEADLINE_S:.0f} s") from None

    def _blame(self, raised: list[Replica], answered: Replica) -> None:
        """The request was good, so it is the replicas that raised on it which are not."""
        answered.errors = 0
        for replica in raised:
            replica.errors += 1
            if replica.errors >= self.MAX_ERRORS:
                self._evict(replica, "kept raising")

    def _evict(self, replica: Replica, why: str) -> None:
        if not replica.healthy or self.stopping or LEAVING.is_set():
            return  # being replaced already, or not wanted
        replica.healthy = False
        replica.lost.set_result(why)  # wakes every attempt at it
        task = asyncio.ensure_future(self._replace(replica, why))
        self.tasks.add(task)  # the event loop holds tasks only weakly
        task.add_done_callback(self.tasks.discard)

    async def _replace(self, replica: Replica, why: str) -> None:
        """Ends when the replica is healthy or the service stops. Kills first: a stopped process
        would go on later, under the same reader number and with old weights."""
        start = time.monotonic()
        while not (replica.healthy or self.stopping or LEAVING.is_set()):
            kill_process(replica.pid)
            replica.pid = 0  # the number may soon be somebody else's
            try:
                await asyncio.wait_for(replica.procs.stop(), self.deadline_s)
                await asyncio.wait_for(self._spawn(replica), self.SETUP_DEADLINE_S)
            except (ActorError, SupervisionError, asyncio.TimeoutError, OSError) as error:
                self.log.append((replica.id, f"setup failed: {cause(error)}", since(start)))
                await asyncio.sleep(0.5)  # a setup that always fails must not spin
        self.log.append((replica.id, why, since(start)))

    async def _spawn(self, replica: Replica) -> None:
        replica.generation += 1
        name = f"{self.name}_{replica.id}_{replica.generation}"
        replica.procs = this_host().spawn_procs(per_host={"replica": 1}, name=name)
        replica.actor = replica.procs.spawn(name, self.replica_class, replica.id, *self.args)
        replica.pid = await replica.actor.setup.call_one()
        replica.lost = asyncio.get_running_loop().create_future()
        on_exit(replica.pid, lambda now=replica.generation: self._ended(replica, now))
        replica.errors, replica.healthy = 0, True
        self.recovered.set()

    async def __supervise__(self, failure) -> bool:
        """A process of mine died; of one on another host this is how I know."""
        for replica in self.replicas:
            if failure.mesh_name.startswith(f"{self.name}_{replica.id}_{replica.generation}-"):
                self._evict(replica, "died")
        return True  # of replicas that I have replaced, too: what they do is nobody's trouble now

    def _ended(self, replica: Replica, generation: int) -> None:
        if generation == replica.generation:  # else I ended it myself, to replace it
            self._evict(replica, "died")

    @concurrent_endpoint
    async def status(self, wait_s: float = 0.0) -> dict:
        """A snapshot, taken when all replicas are healthy or wait_s have passed."""
        end = time.monotonic() + wait_s
        while not all(r.healthy for r in self.replicas) and time.monotonic() < end:
            await asyncio.sleep(0.01)
        return {"pids": [r.pid for r in self.replicas], "log": list(self.log),
                "healthy": sum(r.healthy for r in self.replicas),
                "spawned": sum(r.generation for r in self.replicas),
                "failover_s": list(self.failover_s)}

    @concurrent_endpoint
    async def close(self) -> None:
        self.stopping = True
        for task in self.tasks:
            task.cancel()  # a replacement under way must not outlive this
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(r.procs.stop() for r in self.replicas if r.procs))


class Doubler(Actor):
    """A replica for the demo; number 1 has bad spells: 14 of every 40 requests in a row."""

    def __init__(self, replica_id: int):
        self.replica_id, self.seen = replica_id, 0

    @endpoint
    async def setup(self) -> int:
        return os.getpid()

    @endpoint
    async def double(self, number: int) -> int:
        self.seen += 1
        if number < 0:
            raise ValueError(f"{number} is negative")
        if self.replica_id == 1 and self.seen % 40 > 25:
            raise RuntimeError("a bad spell")
        await asyncio.sleep(0.002)
        return 2 * number


async def lost_by_hand(num_requests: int) -> int:
    """Requests lost by a caller that takes four replicas in turn, of which one is stopped."""
    procs = this_host().spawn_procs(per_host={"replica": 4})
    pool = procs.spawn("pool", Doubler, 0)
    victim = await pool.slice(replica=3).setup.call_one()
    os.kill(victim, signal.SIGSTOP)
    calls = [pool.slice(replica=i % 4).double.call_one(i) for i in range(num_requests)]
    answers = await asyncio.gather(*(asyncio.wait_for(call, 1.0) for call in calls),
                                   return_exceptions=True)
    os.kill(victim, signal.SIGCONT)  # so that it can be stopped politely
    await procs.stop()
    return sum(isinstance(answer, asyncio.TimeoutError) for answer in answers)


async def median_us(call) -> float:
    """Microseconds of one awaited call."""
    times = []
    for _ in range(100):
        start = time.perf_counter()
        await call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


@stage(6, "service", "with replicas that fail, hang and die, every request is answered exactly "
       "once")
async def demo_service(report: Report, cfg: Config) -> None:
    lost = await lost_by_hand(400)
    service = this_proc().spawn("doublers", Service, "doubler", Doubler, 4, 0.5)
    await service.start.call_one()
    pids, asked = (await service.status.call_one())["pids"], []
    for i in range(400):
        asked.append(asyncio.ensure_future(service.route.call_one("double", i)))
        if i in (100, 200):
            os.kill(pids[i // 100 + 1], signal.SIGKILL if i == 100 else signal.SIGSTOP)
        await asyncio.sleep(0.001)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    once = sum(answer == 2 * i for i, answer in enumerate(answers))
    before = await service.status.call_one(10.0)
    try:
        bad = str(await service.route.call_one("double", -1))
    except ActorError as error:
        bad = type(cause(error)).__name__
    after = await service.status.call_one(10.0)
    report.table(["400 requests to 4 replicas", "answered once"],
                 ["by hand, in turn; replica 3 is stopped", 400 - lost],
                 ["Service; 1 has bad spells, 2 is killed, 3 is stopped", once])
    report.table(["replica", "replaced, because it", "healthy again after ms"],
                 *([replica, why, s * 1e3] for replica, why, s in after["log"]))
    procs = this_host().spawn_procs(per_host={"replica": 1})
    direct_us = await median_us(procs.spawn("direct", Doubler, 0).setup.call_one)
    routed_us = await median_us(lambda: service.route.call_one("setup"))
    failover_ms = max(before["failover_s"], default=0.0) * 1e3
    report.say(f"a call takes {direct_us:.0f} us directly, {routed_us:.0f} us through the service,",
               f"and {failover_ms:.0f} ms at worst if a replica is lost on the way")
    report.figure(requests=400, answered_once=once, failover_ms=failover_ms,
                  route_overhead_us=routed_us - direct_us)
    report.check("requests lost by hand", lost, ">", 0)
    report.check("requests of 400 that the service answered exactly once", once, "==", 400)
    whys = {why for _, why, _ in after["log"]}
    report.check("kinds of failure it replaced replicas for", len(whys), "==", 3)
    report.check("a bad request raises at its caller", bad, "==", "ValueError")
    report.check("replicas replaced for it", after["spawned"] - before["spawned"], "==", 0)
    report.check("healthy replicas of 4 at the end", after["healthy"], "==", 4)
    report.say(f"try: range(1) in `route` (line {line_of('attempts')}): a request gets one attempt")
    await asyncio.gather(procs.stop(), service.close.call_one())


# == 7. WEIGHT SYNC ===============================================================================
# Problem. The trainer rewrites its weights while generators read them. A reader that looks during
#   the write holds some tensors of version 6 and some of version 7: no error, only worse rewards.
# Rule. The writer fills a slot that nobody reads, then changes one word. A reader announces the
#   slot that this word names, looks at the word again, and only then reads; the writer leaves
#   announced slots alone. Readers copy nothing: their parameters point into the slot.
# Cost. Two slots more than readers, in host memory. If no slot is free, a version is skipped.
# Not here. Other hosts, GPU copy streams, checksums, overlap with the next step (DOCS 2).
# Source. Hazard pointers: Maged Michael, IEEE TPDS 15(6), 2004.
#
#     trainer     step n | copy into a free slot | latest = (n, slot) | step n+1 ...
#     generator   ... decodes with n-1 ...................... | lease, look again, flip | n ...


class WeightMismatch(ValueError):
    """The two sides of a sync do not mean the same tensors."""


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in a slot."""

    name: str  # as in named_parameters: tied weights appear once
    shape: tuple[int, ...]
    dtype: str  # "bfloat16"
    offset: int  # bytes from the start of the slot, a multiple of 64
    num_bytes: int


@dataclass(frozen=True)
class Manifest:
    """What a slot holds. Both sides compare it before a byte moves: a name that one side lacks, or
    another dtype of equal size, would otherwise be nonsense without an error."""

    specs: tuple[TensorSpec, ...]
    slot_bytes: int

    @staticmethod
    def of(tensors: dict) -> Manifest:
        """The layout of these name -> tensor, in their order, aligned to cache lines."""
        specs, offset = [], 0
        for name, t in tensors.items():
            specs.append(TensorSpec(name, tuple(t.shape), str(t.dtype)[6:], offset, t.nbytes))
            offset += -(-t.nbytes // 64) * 64
        return Manifest(tuple(specs), max(1, -(-offset // mmap.PAGESIZE)) * mmap.PAGESIZE)

    def require(self, tensors: dict) -> None:
        """Raises WeightMismatch, naming the tensor, unless these are the tensors described."""
        names = {spec.name for spec in self.specs}
        if names != set(tensors):
            raise WeightMismatch(f"only one side has {sorted(names ^ set(tensors))[:3]}")
        for spec in self.specs:
            here = (tuple(tensors[spec.name].shape), str(tensors[spec.name].dtype)[6:])
            if here != (spec.shape, spec.dtype):
                raise WeightMismatch(f"{spec.name}: {spec.shape} {spec.dtype} there, {here} here")


@dataclass(frozen=True)
class ArenaHandle:
    """How another process of this host finds the arena; small enough for any message."""

    path: str  # /proc/<pid>/fd/<n>: a file without a name, gone with its last mapping
    manifest: Manifest
    num_slots: int
    num_readers: int


# The arena of two readers, while version 8 is being written:
#
#     words   latest = (7, slot 2)      lease 0 = slot 2      lease 1 = slot 1
#             +-----------+-----------+-----------+-----------+
#     slots   | 0: v8 ... | 1: v6     | 2: v7     | 3: v5     |
#             +-----------+-----------+-----------+-----------+
#               written     reader 1    latest,     free: the next publish takes it
#                           reads it    reader 0


class Arena:
    """One process's mapping of the shared memory: 8-byte words, then slots.

    word 0        latest: version * MAX_SLOTS + slot. One word, so that both change at once
    word 1 + r    the lease of reader r: a slot
    NOTHING       in either: nothing published, nothing leased

    Words lie 64 bytes apart, so that no two share a cache line."""

    MAX_SLOTS, NOTHING, HEADER_BYTES = 1024, -1, 65536

    def __init__(self, handle: ArenaHandle, fd: int):
        self.handle, self.lock = handle, threading.Lock()
        self.memory = mmap.mmap(fd, self.num_bytes(handle))
        self.words = (ctypes.c_int64 * (self.HEADER_BYTES // 8)).from_buffer(self.memory)
        whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        whole[:: mmap.PAGESIZE].sum()  # map all pages now: a first touch costs 5-25 copies
        slots = whole[self.HEADER_BYTES :].view(handle.num_slots, handle.manifest.slot_bytes)
        self.slots = [self._views(slot) for slot in slots]  # [slot][name] -> view

    @classmethod
    def create(cls, manifest: Manifest, num_readers: int) -> Arena:
        """Slots: one per reader, the latest, and one to write into. ValueError if that is more than
        the header has words for."""
        if num_readers + 2 > cls.MAX_SLOTS:
            raise ValueError(f"{num_readers} readers; an arena serves {cls.MAX_SLOTS - 2}")
        fd = os.memfd_create("monarch_rl")  # no entry in /dev/shm, and none of its size limit
        path, num_slots = f"/proc/{os.getpid()}/fd/{fd}", num_readers + 2  # slots
        handle = ArenaHandle(path, manifest, num_slots, num_readers)
        os.ftruncate(fd, cls.num_bytes(handle))
        arena = cls(handle, fd)
        for view in (view for slot in arena.slots for view in slot.values()):
            view.zero_()  # fresh pages cost more than the copies into them: have them now
        for word in range(1 + num_readers):
            arena[word] = cls.NOTHING
        return arena

    @classmethod
    def attach(cls, handle: ArenaHandle) -> Arena:
        """Maps an arena of another process, which must be alive now but not later."""
        fd = os.open(handle.path, os.O_RDWR)
        try:
            return cls(handle, fd)
        finally:
            os.close(fd)  # the mapping stays

    @classmethod
    def num_bytes(cls, handle: ArenaHandle) -> int:
        return cls.HEADER_BYTES + handle.num_slots * handle.manifest.slot_bytes

    def __getitem__(self, word: int) -> int:
        return self.words[8 * word]  # an aligned 8-byte load: never half of an old value

    def __setitem__(self, word: int, value: int) -> None:
        self.words[8 * word] = value

    def fence(self) -> None:
        """Completes my stores before my next loads, the one order that x86 breaks for ordinary
        accesses; taking a lock is a full fence there. (memmove's non-temporal stores are ordered
        by the sfence with which glibc ends them. ARM would need more.)"""
        with self.lock:
            pass

    def _views(self, slot) -> dict:
        """slot: [slot_bytes] uint8"""
        return {s.name: slot[s.offset : s.offset + s.num_bytes].view(getattr(torch, s.dtype))
                .view(s.shape) for s in self.handle.manifest.specs}


class WeightWriter:
    """The trainer's side: owns the arena; alone writes slots and `latest`."""

    def __init__(self, tensors: dict, num_readers: int):
        self.arena = Arena.create(Manifest.of(tensors), num_readers)
        self.slot = 0  # the last one written
        self.skipped = 0  # versions for which no slot was free

    def free_slot(self) -> int | None:
        """The next slot that is neither latest nor leased."""
        handle = self.arena.handle
        self.arena.fence()  # whoever leased before it could see the last `latest` is seen here
        busy = {self.arena[1 + reader] for reader in range(handle.num_readers)}  # leased slots
        if self.arena[0] != Arena.NOTHING:
            busy.add(self.arena[0] % Arena.MAX_SLOTS)
        order = [(self.slot + 1 + i) % handle.num_slots for i in range(handle.num_slots)]
        return next((slot for slot in order if slot not in busy), None)

    def publish(self, version: int, tensors: dict) -> bool:
        """Makes these the latest weights. Never waits: if no slot is free it returns False, and the
        trainer goes on. Raises WeightMismatch."""
        self.arena.handle.manifest.require(tensors)
        slot = self.free_slot()
        if slot is None:
            self.skipped += 1
            return False
        for name, view in self.arena.slots[slot].items():
            copy_bytes(view, tensors[name])
        self.slot = slot
        self.arena[0] = version * Arena.MAX_SLOTS + slot  # last: now readers may look
        return True


def copy_bytes(view, tensor) -> None:
    """tensor -> view, same shape and dtype. memmove where possible: Tensor.copy_ reads what it is
    about to overwrite, which costs a third of the speed."""
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        ctypes.memmove(view.data_ptr(), tensor.data_ptr(), view.nbytes)
    else:
        view.copy_(tensor.detach())


class WeightReader:
    """A generator's side: `pull` makes its tensors the newest weights."""

    def __init__(self, handle: ArenaHandle, reader: int, tensors: dict):
        """reader: 0 .. num_readers-1, mine alone. Raises WeightMismatch and changes nothing."""
        handle.manifest.require(tensors)
        self.arena, self.word = Arena.attach(handle), 1 + reader
        self.tensors, self.version = tensors, -1
        self.arena[self.word] = Arena.NOTHING  # whoever was reader before me is dead

    def lease(self) -> tuple[int, int]:
        """(version, slot) of the newest weights, safe to read until the next lease. Something must
        be published. Goes round again only if a version was published in between."""
        # Why this is enough. Suppose the writer takes my slot for its next version. It does so only
        # after it has made another slot the latest, and then looked at the leases. If it looked
        # after step 1, it saw mine and took another slot. If it looked before step 1, the latest
        # had already changed, so step 3 sees that and I begin again, having read nothing yet.
        while True:
            latest = self.arena[0]
            self.arena[self.word] = latest % Arena.MAX_SLOTS  # 1. announce
            self.arena.fence()  # 2. now the writer can see it
            if self.arena[0] == latest:  # 3. look again
                return divmod(latest, Arena.MAX_SLOTS)

    def pull(self) -> int:
        """Returns the version that the tensors are now (-1: none). They are the slot itself, so the
        lease lasts until the next pull; on a GPU they are a copy, made under the lease."""
        if self.arena[0] == Arena.NOTHING or self.arena[0] // Arena.MAX_SLOTS == self.version:
            return self.version
        self.version, slot = self.lease()
        for name, view in self.arena.slots[slot].items():
            if self.tensors[name].device.type == "cpu":
                self.tensors[name].data = view  # no copy
            else:
                self.tensors[name].data.copy_(view)
        return self.version


def weights_of(module) -> dict:
    """name -> tensor of all that must arrive: parameters, and buffers that belong to checkpoints.
    Tied weights are one entry here, and stay tied: modules share the Parameter object."""
    saved = module.state_dict()
    buffers = {name: buffer for name, buffer in module.named_buffers() if name in saved}
    return {**dict(module.named_parameters()), **buffers}


def bench_tensors(num_mb: int, seed: int) -> dict:
    """290 bf16 tensors of uneven sizes like those of a small language model, num_mb MiB in all."""
    rng = random.Random(seed)
    shares = [rng.lognormvariate(0, 1.5) for _ in range(290)]
    numels = [1 + int(num_mb * MIB / 2 * share / sum(shares)) for share in shares]
    return {f"tensor.{i}": torch.zeros(n, dtype=torch.bfloat16) for i, n in enumerate(numels)}


class BenchTrainer(Actor):
    """A trainer whose every weight byte is its version, so that readers can tell."""

    STAMPS = 120  # bytes are version % 120; int8 holds that

    def __init__(self, num_mb: int, num_readers: int, seed: int):
        torch.set_num_threads(1)
        self.version, self.tensors = 0, bench_tensors(num_mb, seed)
        self.writer = WeightWriter(self.tensors, num_readers)
        self.blocks = [torch.ones(num_mb * MIB, dtype=torch.uint8) for _ in range(2)]

    def _next_version(self) -> None:
        self.version += 1
        for tensor in self.tensors.values():
            tensor.view(torch.int8).fill_(self.version % self.STAMPS)

    @endpoint
    async def handle(self) -> ArenaHandle:
        return self.writer.arena.handle

    @endpoint
    async def next_version(self) -> float:
        """Also copies as many bytes in one block, as the measure: seconds of that memmove."""
        self._next_version()
        to, source = self.blocks
        start = time.perf_counter()
        ctypes.memmove(to.data_ptr(), source.data_ptr(), to.nbytes)
        return time.perf_counter() - start

    @endpoint
    async def publish(self) -> float:
        start = time.perf_counter()
        self.writer.publish(self.version, self.tensors)
        return time.perf_counter() - start

    @endpoint
    async def publish_for(self, duration_s: float) -> tuple[int, int]:
        """Publishes version after version, without a pause: (versions, versions skipped)."""
        start, first, skipped = time.monotonic(), self.version, self.writer.skipped
        while since(start) < duration_s:
            self._next_version()
            self.writer.publish(self.version, self.tensors)
        return self.version - first, self.writer.skipped - skipped

    @endpoint
    async def as_message(self) -> dict:
        return self.tensors

    @endpoint
    async def as_buffer(self) -> RDMABuffer:
        return RDMABuffer(self.blocks[0])


class BenchGenerator(Actor):
    """A generator that checks every byte of its weights."""

    def __init__(self, num_mb: int, seed: int, handle: ArenaHandle, trainer):
        torch.set_num_threads(1)
        self.tensors, self.trainer = bench_tensors(num_mb, seed), trainer
        self.reader = WeightReader(handle, current_rank().rank, self.tensors)
        self.room = torch.zeros(num_mb * MIB, dtype=torch.uint8)

    @endpoint
    async def pull(self) -> float:
        start = time.perf_counter()
        self.reader.pull()
        return time.perf_counter() - start

    @endpoint
    async def read_for(self, duration_s: float, leases: bool) -> tuple[int, int]:
        """(reads, torn reads). A read is a pull and then four passes over all bytes, as in decoding
        four tokens; it is torn if any byte is not the version pulled."""
        start, reads, torn = time.monotonic(), 0, 0
        while since(start) < duration_s:
            version = self.reader.pull()
            if not leases:
                self.reader.arena[self.reader.word] = Arena.NOTHING  # the rule, taken away
            ends = [t.view(torch.int8).aminmax() for _ in range(4) for t in self.tensors.values()]
            reads += 1
            torn += {int(end) for pair in ends for end in pair} != {version % BenchTrainer.STAMPS}
        return reads, torn

    @endpoint
    async def receive(self, buffer: RDMABuffer | None) -> float:
        """Seconds for all weights by one-sided read, or without a buffer in an actor message."""
        start = time.perf_counter()
        await (buffer.read_into(self.room) if buffer else self.trainer.as_message.call_one())
        return time.perf_counter() - start


@dataclass
class WeightBench:
    """A trainer in one process, generators in two others."""

    num_mb: int
    seed: int

    async def __aenter__(self) -> WeightBench:
        num_mb, seed = self.num_mb, self.seed
        self.procs = [this_host().spawn_procs(per_host={"one": n}) for n in (1, 2)]
        self.trainer = self.procs[0].spawn("trainer", BenchTrainer, num_mb, 2, seed)
        handle = await self.trainer.handle.call_one()
        self.generators = self.procs[1].spawn("generators", BenchGenerator, num_mb, seed, handle,
                                              self.trainer)
        await self.sync(2)
        return self

    async def __aexit__(self, *_) -> None:
        await asyncio.gather(*(procs.stop() for procs in self.procs))

    async def sync(self, num_generators: int) -> dict[str, float]:
        """Seconds of a memmove, a publish, the slowest pull, and both with their calls."""
        generators = self.generators.slice(one=slice(0, num_generators))
        memmove_s = await self.trainer.next_version.call_one()
        start = time.perf_counter()
        publish_s = await self.trainer.publish.call_one()
        pull_s = max(seconds for _, seconds in await generators.pull.call())
        sync_s = time.perf_counter() - start
        return {"memmove": memmove_s, "publish": publish_s, "pull": pull_s, "sync": sync_s}

    async def attack(self, leases: bool, duration_s: float = 2.0) -> list[int]:
        """[versions, skipped, reads, torn] while the trainer publishes without a pause."""
        writing = self.trainer.publish_for.call_one(duration_s)
        reading = [both for _, both in await self.generators.read_for.call(duration_s, leases)]
        return [*await writing, sum(r for r, _ in reading), sum(t for _, t in reading)]


@stage(7, "weight_sync", "a generator never samples from half-updated weights, the trainer never "
       "waits, and a sync costs about one memory copy, however many generators there are")
async def demo_weight_sync(report: Report, cfg: Config) -> None:
    small_mb = min(cfg.model_mb, 16)  # hundreds of reads need a small model
    async with WeightBench(small_mb, cfg.seed) as bench:
        safe = await bench.attack(leases=True)
        torn = await bench.attack(leases=False)
    heads = ["versions", "skipped", "reads", "torn"]
    report.table([f"{small_mb} MiB in 290 tensors, 2 generators", *heads],
                 ["without leases", *torn], ["with leases", *safe])
    async with WeightBench(cfg.model_mb, cfg.seed) as bench:
        alone, runs = [[await bench.sync(n) for _ in range(9)] for n in (1, 2)]
        ms = {name: statistics.median([run[name] for run in runs]) * 1e3 for name in runs[0]}
        ms["sync_one"] = statistics.median([run["sync"] for run in alone]) * 1e3
        one, buffer = bench.generators.slice(one=0), await bench.trainer.as_buffer.call_one()
        ms["rdma"] = statistics.median([await one.receive.call_one(buffer) for _ in range(3)]) * 1e3
        ms["message"] = await one.receive.call_one(None) * 1e3
    names = {"memmove": "memmove of as many bytes", "publish": "publish, in the trainer",
             "pull": "pull, in the slower of 2 generators",
             "sync": "sync, 2 generators and all calls", "sync_one": "sync, 1 generator",
             "rdma": f"RDMABuffer ({get_rdma_backend()}), 1 generator, median of 3",
             "message": "pickled actor message, 1 generator, once"}
    report.table([f"{cfg.model_mb} MiB, medians of {len(runs)}", "ms", "x memmove"],
                 *([names[k], value, value / ms["memmove"]] for k, value in ms.items()))
    report.figure(model_mb=cfg.model_mb, **{f"{name}_ms": value for name, value in ms.items()},
                  sync_over_memmove=ms["sync"] / ms["memmove"], reads=safe[2], torn_reads=safe[3],
                  torn_reads_without_leases=torn[3], trainer_waits=safe[1])
    report.check(f"torn reads without leases, of {torn[2]}", torn[3], ">", 0)
    report.check(f"torn reads with leases, of {safe[2]}", safe[3], "==", 0)
    report.check("verified reads", safe[2], ">", 0)
    report.check("versions that found no free slot", safe[1], "==", 0)
    report.check("sync / memmove", ms["sync"] / ms["memmove"], "<", 3)
    report.check("sync of 2 generators / sync of 1", ms["sync"] / ms["sync_one"], "<", 2)
    report.say(f"try: num_readers + 1 slots (line {line_of('slots')}): versions find none free")


# == 8. SYNC RL ===================================================================================
# Problem. In RL the policy makes its own training set, so the same network runs in two programs:
#   one decodes token by token with a cache, the other scores whole sequences for a gradient. If
#   they disagree about a probability, or about what was sampled, the gradient is nobody's.
# Rule. One loop: pull, sample, score, step, publish. Every sampled token keeps the log-probability
#   it was sampled with; the trainer recomputes it, and the two agree. Only sampled tokens carry
#   loss. A new turn starts from the exact ids of the turns before.
# Cost. Each side waits while the other works (section 9).
# Not here. Value networks, reward models, tools.
# Source. REINFORCE (Williams 1992), PPO (Schulman 2017), group advantage (GRPO, Shao 2024).

GROUPS_PER_BATCH = 16  # prompts per optimizer step
GROUP_SIZE = 8  # episodes per prompt; of fewer the mean is a poor baseline
CLIP = 0.2  # how far a token's probability may move, as a ratio, before its gradient stops
MAX_GRAD_NORM = 1.0
LETTERS = "abcdefghijklmnop"


@dataclass(frozen=True)
class Prompt:
    """One conversation to be had."""

    id: int  # also the group id of its episodes
    turns: tuple[tuple[str, str], ...]  # (what the user says, what the answer should be)


@dataclass(frozen=True)
class Task:
    """What is to be learned."""

    instruction: str  # for pretrained models; the tiny policy sees examples instead
    num_turns: int
    ask: object  # (random.Random) -> what the user says
    answer: object  # (what the user says) -> the right answer

    def turns(self, rng: random.Random) -> tuple[tuple[str, str], ...]:
        asked = [self.ask(rng) for _ in range(self.num_turns)]
        return tuple((text, self.answer(text)) for text in asked)


def score(prompt: Prompt, answers: list[str]) -> float:
    """The reward: share of right characters, averaged over turns; 1.0 only if all is right."""
    shares = [sum(a == b for a, b in zip(right, said)) / max(len(right), len(said))
              for (_, right), said in zip(prompt.turns, answers)]
    return sum(shares) / len(shares)


def word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(3))


def shift(letters: str, by: int) -> str:
    return "".join(LETTERS[(LETTERS.index(letter) + by) % len(LETTERS)] for letter in letters)


TASKS = {
    "repeat": Task("Repeat exactly what I say.", 2, word, lambda said: said),
    "count": Task("I say one letter from a to p; say the next three, a follows p.", 3,
                  lambda rng: rng.choice(LETTERS),
                  lambda said: "".join(shift(said, by) for by in (1, 2, 3))),
    "pattern": Task("For each of my letters, a to p, say the one eight places on, a follows p.", 2,
                    word, lambda said: shift(said, 8)),
}


def fixed_prompts(task: str) -> list[Prompt]:
    """Distinct prompts that no run trains on, the same for all seeds and processes: the first 256
    are held out for figures, the other 256 decide when a warm start is over."""
    rng, turns = random.Random(f"held out: {task}"), {}
    while len(turns) < 256 + 256:
        turns.setdefault(TASKS[task].turns(rng))
    return [Prompt(-1 - i, t) for i, t in enumerate(turns)]


def heldout(task: str) -> list[Prompt]:
    return fixed_prompts(task)[:256]


class Sampler:
    """Draws prompts to train on."""

    def __init__(self, cfg: Config):
        self.task, self.rng, self.next_id = TASKS[cfg.task], random.Random(cfg.seed), 0
        self.never = {prompt.turns for prompt in fixed_prompts(cfg.task)}

    def draw(self, num_prompts: int) -> list[Prompt]:
        prompts: list[Prompt] = []
        while len(prompts) < num_prompts:
            turns = self.task.turns(self.rng)
            if turns not in self.never:
                prompts.append(Prompt(self.next_id, turns))
                self.next_id += 1
        return prompts


# Two rows of a Rollout. u: the user's words; <a> begins and <e> ends the assistant's turn; letters
# are sampled; a dot is a hole. Row two ends its first answer early, and its last one not at all.
#
#     ids        <u> u u u <e> <a>  a b c <e>   .   <u> u u u <e> <a>  d e f <e>
#                <u> u u u <e> <a>  a <e> .  .  .   <u> u u u <e> <a>  d e f g
#     sampled     .  . . .  .   .   1 1 1  1    .    .  . . .  .   .   1 1 1 1
#     position    0  1 2 3  4   5   6 7 8  9    .   10 ...             (holes are skipped)
#
# With holes all rows have their turns in the same columns, so one batch and one cache do for rows
# of any length, and no row is ever shifted or tokenized again.


@dataclass(frozen=True)
class Rollout:
    """Episodes as tensors, B rows of T columns. A row is a conversation in order, with holes where
    another row's turn is longer; a hole is masked and has no position."""

    ids: torch.Tensor  # [B, T] int64
    mask: torch.Tensor  # [B, T] int64, 1 = token, 0 = hole
    sampled: torch.Tensor  # [B, T] bool, what the policy chose; nothing else carries loss
    logprobs: torch.Tensor  # [B, T] float32, with which it was chosen; 0 elsewhere
    rewards: torch.Tensor  # [B] float32
    group_ids: torch.Tensor  # [B] int64; rows of a group need not be neighbours
    versions: torch.Tensor  # [B] int64, of the weights that sampled the row
    prompts: list[Prompt]  # [B]
    answers: list[list[str]]  # [B][turn]

    @staticmethod
    def join(parts: list[tuple[Rollout, list[int]]]) -> Rollout:
        """The given rows of the given rollouts as one batch."""
        width = max(rollout.ids.shape[1] for rollout, _ in parts)
        joined = {}
        for name in ("ids", "mask", "sampled", "logprobs", "rewards", "group_ids", "versions"):
            rows = [getattr(rollout, name)[rows] for rollout, rows in parts]
            pad = torch.nn.functional.pad
            rows = [pad(r, (0, width - r.shape[1])) if r.dim() == 2 else r for r in rows]
            joined[name] = torch.cat(rows)
        return Rollout(**joined, prompts=[r.prompts[row] for r, rows in parts for row in rows],
                       answers=[r.answers[row] for r, rows in parts for row in rows])

    def exact(self) -> float:
        """Share of episodes in which every answer is right."""
        return float((self.rewards == 1.0).float().mean())


class Policy:
    """A causal language model, its tokenizer, and the chat template that makes ids of speech."""

    def __init__(self, cfg: Config):
        torch.set_num_threads(1)  # several processes share the cores
        torch.manual_seed(cfg.seed)
        self.cfg, self.task = cfg, TASKS[cfg.task]
        if cfg.model == "tiny":
            self.tokenizer = tiny_tokenizer()
            self.model = tiny_model(len(self.tokenizer))
        else:
            dtype = torch.float32 if cfg.device == "cpu" else torch.bfloat16
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(cfg.model, dtype=dtype)
        self.model.to(cfg.device).eval()  # dropout would make the two programs disagree
        self.stop_id = self.tokenizer.eos_token_id
        self.tokenizer.pad_token = self.tokenizer.eos_token  # fills holes; never looked at
        self.max_new_tokens = 4 if cfg.model == "tiny" else 12  # three letters and the end
        self.around = self._around()

    def _around(self) -> list[tuple[str, str]]:
        """What the chat template puts around the user's words, in the first turn and in later ones.
        So only the new turn is tokenized: ids made text and ids again need not be the ids that
        were sampled."""
        chat = [{"role": "user", "content": "FIRST"}, {"role": "assistant", "content": "SAID"},
                {"role": "user", "content": "LATER"}]
        render = self.tokenizer.apply_chat_template
        first = render(chat[:1], tokenize=False, add_generation_prompt=True).split("FIRST")
        whole = render(chat, tokenize=False, add_generation_prompt=True)
        more = whole.split("SAID")[1].split("LATER")
        if self.cfg.model != "tiny":
            first[0] += self.task.instruction + "\n"
        return [(first[0], first[1]), (more[0], more[1])]

    def turn_ids(self, texts: list[str], first: bool) -> tuple:
        """What the user says: ([B, L] int64 ids, [B, L] int64 mask). Holes are on the left, so that
        all rows end together and sampling can begin."""
        head, tail = self.around[0 if first else 1]
        whole = [head + text + tail for text in texts]
        out = self.tokenizer(whole, add_special_tokens=False, padding=True, padding_side="left",
                             return_tensors="pt")
        return out["input_ids"], out["attention_mask"]

    def text(self, ids: list[int]) -> str:
        """Sampled ids as text; a '+' at the end says that the policy did not end its turn."""
        ended = self.stop_id in ids
        said = self.tokenizer.decode(ids[: ids.index(self.stop_id)] if ended else ids)
        return said.strip() + ("" if ended else "+")

    def log_softmax(self, ids, mask):
        """[B, T] ids -> [B, T-1, V] float32, the log-probabilities of what follows each column. In
        bf16 the probabilities would miss summing to 1 by 1e-3."""
        out = self.model(input_ids=ids, attention_mask=mask, position_ids=positions(mask))
        return out.logits[:, :-1].float().log_softmax(-1)


def positions(mask):
    """[B, T] mask -> [B, T] int64: how many tokens stand before; holes do not count."""
    return (mask.cumsum(1) - 1).clamp(min=0)


def tiny_tokenizer():
    """A token per letter, three special ones, and a chat template."""
    tokenizers = importlib.import_module("tokenizers")
    special = ["<user>", "<assistant>", "<end>"]
    vocabulary = {token: i for i, token in enumerate([*special, *LETTERS])}
    raw = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    raw.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    raw.decoder = tokenizers.decoders.Fuse()
    raw.add_special_tokens(special)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<end>",
        chat_template="{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}")


def tiny_model(vocab_size: int):
    """30 k parameters, Qwen2's architecture: real attention and a real cache at laptop speed."""
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=vocab_size, hidden_size=40, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=True, attn_implementation="eager"))


class Decoder:
    """Converses, one token per row and step, with a KV cache."""

    def __init__(self, policy: Policy, num_rows: int, seed: int, greedy: bool):
        self.policy, self.greedy, self.device = policy, greedy, policy.cfg.device
        self.rng = torch.Generator(self.device).manual_seed(seed)
        self.columns = [torch.zeros(num_rows, 0, dtype=dtype, device=self.device)
                        for dtype in (torch.int64, torch.int64, torch.bool, torch.float32)]
        self.cache = None  # keys and values of every column but the newest

    def _append(self, *new) -> None:
        """ids, mask, sampled, logprobs: [B, L] each"""
        self.columns = [torch.cat([old, more], 1) for old, more in zip(self.columns, new)]

    def hear(self, texts: list[str], repeats: int, first: bool) -> None:
        """The user's turn, each text for `repeats` rows. Where the template begins it with the
        token that ends the assistant's, rows that sampled it get a hole: they have it already."""
        ids, mask = (t.repeat_interleave(repeats, 0).to(self.device)
                     for t in self.policy.turn_ids(texts, first))
        if not first:
            begin = mask.argmax(1, True)  # [B, 1], the column of each row's first token
            twice = (ids.gather(1, begin) == self.policy.stop_id) & ~self.alive[:, None]
            mask.scatter_(1, begin, (~twice).long())
        self._append(ids, mask, torch.zeros_like(ids).bool(), torch.zeros_like(ids).float())

    def speak(self) -> list[list[int]]:
        """The assistant's turn, until every row has ended it; the ids that each row sampled."""
        start = self.columns[0].shape[1]
        self.alive = torch.ones(len(self.columns[0]), dtype=torch.bool, device=self.device)
        for _ in range(self.policy.max_new_tokens):
            logp = self._next()
            token = (logp.argmax(-1, True) if self.greedy
                     else torch.multinomial(logp.exp(), 1, generator=self.rng))
            on = self.alive[:, None]  # [B, 1]; rows that have ended get a hole
            self._append(token * on, on.long(), on, logp.gather(1, token) * on)
            self.alive = self.alive & (token[:, 0] != self.policy.stop_id)
            if not self.alive.any():
                break
        ids, _, sampled, _ = (column[:, start:].tolist() for column in self.columns)
        return [[i for i, kept in zip(*row) if kept] for row in zip(ids, sampled)]

    def _next(self):
        """[B, V] float32 log-probabilities of the next token; feeds what the cache lacks."""
        ids, mask, _, _ = self.columns
        new = ids.shape[1] - (self.cache.get_seq_length() if self.cache is not None else 0)
        out = self.policy.model(input_ids=ids[:, -new:], attention_mask=mask, use_cache=True,
                                position_ids=positions(mask)[:, -new:], logits_to_keep=1,
                                past_key_values=self.cache)
        self.cache = out.past_key_values
        return out.logits[:, -1].float().log_softmax(-1)


def generate(policy: Policy, prompts: list[Prompt], group_size: int, version: int, seed: int,
             greedy: bool = False) -> Rollout:
    """Has each conversation group_size times, and scores it."""
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    decoder, answers = Decoder(policy, len(rows), seed, greedy), [[] for _ in rows]
    with torch.no_grad():
        for turn in range(policy.task.num_turns):
            decoder.hear([prompt.turns[turn][0] for prompt in prompts], group_size, turn == 0)
            for said, ids in zip(answers, decoder.speak()):
                said.append(policy.text(ids))
    return Rollout(*(column.cpu() for column in decoder.columns), prompts=rows, answers=answers,
                   rewards=torch.tensor([score(p, said) for p, said in zip(rows, answers)]),
                   group_ids=torch.tensor([prompt.id for prompt in rows]),
                   versions=torch.full((len(rows),), version))


def warm_start(policy: Policy) -> dict[str, float]:
    """Supervised steps on noisy answers, until the policy is bad but not hopeless: from random
    weights RL has nothing to reinforce. Returns exact shares before and after, held out."""
    sampler, rng = Sampler(policy.cfg), random.Random(policy.cfg.seed)
    prompts, check = heldout(policy.cfg.task), fixed_prompts(policy.cfg.task)[256:]
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=3e-4, weight_decay=0.0)
    chance, exact = generate(policy, prompts, 1, 0, 0, greedy=True).exact(), 0.0
    for num_steps in range(1000):
        ids, mask, spoken = noisy_answers(policy, sampler.draw(64), rng)
        logp = policy.log_softmax(ids, mask).gather(2, ids[:, 1:, None]).squeeze(-1)
        (-logp[spoken[:, 1:]].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if num_steps % 5 == 0 or exact > 0.02:  # near the end it rises by 0.05 a step
            exact = generate(policy, check, 1, 0, 0, greedy=True).exact()
        if exact >= 0.11:
            break  # seldom right: room to learn, and something to learn from
    else:
        raise RuntimeError(f"warm start: {exact:.2f} exact after {num_steps} steps, 0.11 wanted")
    warm = generate(policy, prompts, 1, 0, 0, greedy=True).exact()
    right = [policy.tokenizer([answer for _, answer in p.turns])["input_ids"] for p in prompts]
    said = [[policy.text([*ids, policy.stop_id]) for ids in turns] for turns in right]
    best = sum(score(p, answers) == 1 for p, answers in zip(prompts, said)) / len(prompts)
    return {"chance": chance, "warm": warm, "best": best}


def noisy_answers(policy: Policy, prompts: list[Prompt], rng: random.Random) -> tuple:
    """([B, T] ids, [B, T] mask, [B, T] bool, the answers' tokens); one letter in ten is wrong."""
    columns = []
    for turn, pairs in enumerate(zip(*(prompt.turns for prompt in prompts))):
        ids, mask = policy.turn_ids([said for said, _ in pairs], turn == 0)
        columns.append((ids, mask, torch.zeros_like(ids).bool()))
        if turn:
            mask[:, 0] = 0  # the <end> of the last answer stands there already
        noisy = ["".join(rng.choice(LETTERS) if rng.random() < 0.1 else c for c in right)
                 for _, right in pairs]
        ids = torch.tensor([[*ids, policy.stop_id] for ids in policy.tokenizer(noisy)["input_ids"]])
        columns.append((ids, torch.ones_like(ids), torch.ones_like(ids).bool()))
    return tuple(torch.cat(parts, 1) for parts in zip(*columns))


# Why groups. The gradient of the expected reward is E[A grad log pi], whatever A is reduced
# by, as long as that does not depend on the answer. The mean over answers to the same prompt costs
# no second network and removes what is due to the prompt: that a prompt is easy does not teach that
# all its answers are good. (The own answer is in that mean, which shrinks A by 1 / GROUP_SIZE.)


def advantages(rewards, group_ids):
    """[B] float32: how much better an episode was than its group, in standard deviations (GRPO).
    Groups are found by id: found by position, one lost row would mix all later groups."""
    same = (group_ids[:, None] == group_ids).double()  # [B, B]
    same /= same.sum(1, keepdim=True)  # times a [B] it averages, in each row, over the row's group
    centred = rewards.double() - same @ rewards.double()
    spread = (same @ centred**2).sqrt()
    return (centred / (spread + 1e-4)).float()  # a group without spread teaches nothing: 0


# Losses: ([N] pi, [N] mu, [N] advantage) -> ([N] loss, [N] bool: too far off, so without gradient).
# pi and mu are log-probabilities of N sampled tokens: under the policy in training, and as recorded
# when the token was sampled. Where the two are equal, so are the gradients of all losses.


def reinforce_loss(pi, mu, advantage):
    return -advantage * pi, torch.zeros_like(pi).bool()


def ppo_loss(pi, mu, advantage):
    # Once a token has become 1 + CLIP times as likely (or 1 - CLIP times, if it was bad), the batch
    # says nothing more about it: its samples came from a policy that is too far away by now.
    ratio = (pi - mu).exp()
    outside = torch.where(advantage > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
    return -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)), outside


LOSSES = {"reinforce": reinforce_loss, "ppo": ppo_loss}


def k3(recorded, recomputed) -> float:
    """Mean of exp(d) - 1 - d over [N] log-probabilities: an estimate of the KL divergence that is
    never negative (the third of Schulman's estimators, 2020)."""
    d = (recomputed - recorded).double()
    return float((d.exp() - 1 - d).mean())


@dataclass(frozen=True)
class StepStats:
    """What one training step knows about itself."""

    version: int  # after it
    reward: float  # mean over the batch
    lag_mean: float  # versions
    lag_max: int
    loss: float
    mismatch_k3: float  # recorded against recomputed, rows of lag 0 only; -1: there were none
    ess: float  # effective sample size of the importance weights, as a share
    entropy: float  # nats per sampled token
    clipped: float  # share of sampled tokens without gradient
    grad_norm: float
    num_tokens: int  # sampled
    skipped: int  # 1 if the gradient was not finite and the update was left out


class Trainer(Actor):
    """Owns the weights: warm-starts, steps, publishes."""

    def __init__(self, cfg: Config):
        self.cfg, self.version = cfg, 0

    @endpoint
    async def setup(self) -> None:
        """Builds the policy and warm-starts the tiny one."""
        self.policy = Policy(self.cfg)
        self.metrics = await get_or_spawn_controller("metrics", Metrics)
        self.found = warm_start(self.policy) if self.cfg.model == "tiny" else {}
        self.initial = {k: v.clone() for k, v in self.policy.model.state_dict().items()}
        self._new_optimizer()

    @endpoint
    async def survey(self) -> dict[str, dict[str, float]]:
        """What warm starts measured: this policy's, and one for each other task, thrown away."""
        others = {task: Policy(dataclasses.replace(self.cfg, task=task))
                  for task in TASKS if task != self.cfg.task}
        return {self.cfg.task: self.found, **{k: warm_start(p) for k, p in others.items()}}

    def _new_optimizer(self) -> None:
        rate = 1e-3 if self.cfg.model == "tiny" else 1e-6  # pretrained weights move in small steps
        self.optimizer = torch.optim.AdamW(self.policy.model.parameters(), lr=rate,
                                           weight_decay=0.0, fused=True)

    @endpoint
    async def arena(self) -> ArenaHandle:
        """The same for everyone who asks; the first to ask has the weights published."""
        if not hasattr(self, "writer"):
            self.writer = WeightWriter(weights_of(self.policy.model), self.cfg.generators)
            self.writer.publish(self.version, weights_of(self.policy.model))
        return self.writer.arena.handle

    def _publish(self) -> int:
        self.version += 1
        self.writer.publish(self.version, weights_of(self.policy.model))
        return self.version

    @endpoint
    async def reset(self) -> int:
        """Back to the weights before RL and a new optimizer, as the next version."""
        self.policy.model.load_state_dict(self.initial)
        self._new_optimizer()
        return self._publish()

    @endpoint
    async def step(self, batch: Rollout) -> StepStats:
        """Trains on a batch and publishes the result before it answers."""
        start = time.monotonic()
        # `mu` is what the generator recorded, not what this model says of the old weights: only the
        # recorded value is the probability with which the token was really drawn.
        every, pi, mu, advantage, same = self._score(batch)
        per_token, outside = LOSSES[self.cfg.loss](pi, mu, advantage)
        loss = per_token.mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), MAX_GRAD_NORM)
        finite = math.isfinite(float(norm))
        if finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        lag, every, pi = self.version - batch.versions, every.detach(), pi.detach()
        weight = (pi - mu).exp()
        stats = StepStats(
            version=self._publish(), reward=float(batch.rewards.mean()), skipped=int(not finite),
            loss=float(loss.detach()), lag_mean=float(lag.float().mean()), lag_max=int(lag.max()),
            mismatch_k3=k3(mu[same], pi[same]) if same.any() else -1.0, grad_norm=float(norm),
            ess=float(weight.sum() ** 2 / (weight**2).sum() / len(weight)), num_tokens=len(mu),
            entropy=float(-(every.exp() * every).sum(-1).mean()),
            clipped=float(outside.float().mean()))
        self.metrics.note.broadcast(Span("trainer", "step", start, time.monotonic()))
        return stats

    def _score(self, batch: Rollout) -> tuple:
        """Of the batch's N sampled tokens: [N, V] log-probabilities of all tokens, then [N] each:
        of the sampled one, as recorded, advantage, bool: lag 0. Column t is predicted at t-1."""
        ids, sampled = batch.ids.to(self.cfg.device), batch.sampled[:, 1:].to(self.cfg.device)
        rows = [advantages(batch.rewards, batch.group_ids), batch.versions == self.version]
        columns = [batch.logprobs[:, 1:], *(row[:, None].expand_as(sampled) for row in rows)]
        every = self.policy.log_softmax(ids, batch.mask.to(self.cfg.device))[sampled]
        pi = every.gather(1, ids[:, 1:][sampled][:, None]).squeeze(1)
        return every, pi, *(column.to(self.cfg.device)[sampled] for column in columns)

    @endpoint
    async def compare(self, batch: Rollout) -> dict[str, float]:
        """Looks for the mistakes that make RL fail without an error; changes nothing."""
        every, pi, mu, advantage, _ = self._score(batch)
        reinforce_loss(pi, mu, advantage)[0].mean().backward()
        idle = [q.grad is None or not q.grad.any() for q in self.policy.model.parameters()]
        self.optimizer.zero_grad()
        every, pi = every.detach(), pi.detach()
        by_row = advantages(batch.rewards, batch.group_ids)
        means = [abs(by_row[batch.group_ids == g].mean()) for g in batch.group_ids.unique()]
        return {"k3": k3(mu, pi), "worst": float((pi - mu).abs().max()),
                "sums": float((every.exp().sum(-1) - 1).abs().max()), "highest": float(mu.max()),
                "idle": sum(idle), "group_mean": float(max(means))}


class Generator(Actor):
    """A replica of the generator service: pulls the newest weights, then converses."""

    def __init__(self, replica_id: int, cfg: Config, trainer):
        self.replica_id, self.cfg, self.trainer = replica_id, cfg, trainer

    @endpoint
    async def setup(self) -> int:
        """How a replica joins, at the start and in mid-run: at the newest version."""
        self.policy = Policy(self.cfg)
        self.metrics = await get_or_spawn_controller("metrics", Metrics)
        handle = await self.trainer.arena.call_one()
        self.reader = WeightReader(handle, self.replica_id, weights_of(self.policy.model))
        self.reader.pull()
        return os.getpid()

    @endpoint
    async def rollout(self, prompts: list[Prompt], group_size: int, seed: int,
                      greedy: bool) -> Rollout:
        """Under one version of the weights: the lease lasts until the next pull."""
        start, version = time.monotonic(), self.reader.pull()
        rollout = generate(self.policy, prompts, group_size, version, seed, greedy)
        span = Span(f"generator {self.replica_id}", "generate", start, time.monotonic())
        self.metrics.note.broadcast(span)
        return rollout


class Fleet:
    """The actors of an RL run, and what one asks of them."""

    ROLLOUT_DEADLINE_S = 60.0  # rollouts of the tiny policy take 20 ms; real ones seconds

    def __init__(self, cfg: Config):
        self.cfg, self.sampler, self.seeds = cfg, Sampler(cfg), random.Random(cfg.seed)

    async def __aenter__(self) -> Fleet:
        self.metrics = await get_or_spawn_controller("metrics", Metrics)
        self.procs = this_host().spawn_procs(per_host={"trainer": 1})
        self.trainer = self.procs.spawn("trainer", Trainer, self.cfg)
        self.generators = this_proc().spawn(
            "generators", Service, "generator", Generator, self.cfg.generators,
            self.ROLLOUT_DEADLINE_S, self.cfg, self.trainer)
        # both at once: importing takes longer than anything else
        await asyncio.gather(self.trainer.setup.call_one(), self.generators.start.call_one())
        return self

    async def __aexit__(self, *_) -> None:
        await asyncio.gather(self.generators.close.call_one(), self.procs.stop())

    async def rollout(self, prompts: list[Prompt], group_size: int = GROUP_SIZE,
                      greedy: bool = False) -> Rollout:
        """One request to the service. Its seed goes along: a retry samples the same, if no new
        weights have come in between."""
        seed = self.seeds.getrandbits(48)
        return await self.generators.route.call_one("rollout", prompts, group_size, seed, greedy)

    async def batch(self) -> Rollout:
        """A whole batch, split over all generators."""
        prompts, n = self.sampler.draw(GROUPS_PER_BATCH), self.cfg.generators
        parts = [prompts[i::n] for i in range(min(n, len(prompts)))]
        rollouts = await asyncio.gather(*(self.rollout(part) for part in parts))
        return Rollout.join([(r, list(range(len(r.prompts)))) for r in rollouts])

    async def heldout_exact(self) -> float:
        """Of the newest weights, greedy, over prompts never trained on."""
        return (await self.rollout(heldout(self.cfg.task), group_size=1, greedy=True)).exact()


class History:
    """What a run did, step by step."""

    def __init__(self, fleet: Fleet, report: Report, label: str, every: int):
        self.fleet, self.report, self.label, self.every = fleet, report, label, every
        self.steps: list[StepStats] = []
        self.clock: list[float] = []  # seconds from the start to the end of each step
        self.samples: list[list] = []  # rows for a table

    async def begin(self) -> None:
        self.started, self.busy_before = time.monotonic(), await self.fleet.metrics.read.call_one()

    async def add(self, stats: StepStats, batch: Rollout) -> None:
        self.steps.append(stats)
        self.clock.append(since(self.started))
        step, seconds = len(self.steps), self.clock[-1]
        keep = step % self.every == 0
        if keep or step == 1:
            asked = " ".join(said for said, _ in batch.prompts[0].turns)
            self.samples.append([f"{step}", asked, " ".join(batch.answers[0]),
                                 float(batch.rewards[0]), int(batch.versions[0])])
        if keep or (self.report.live and step % 10 == 0):
            idle = " ".join(f"{who[:3]} {share:.0%}" for who, share in (await self.idle()).items())
            rate = sum(s.num_tokens for s in self.steps) / seconds
            self.report.progress(
                f"{self.label} {step:4d} version {stats.version:4d} reward {stats.reward:.2f} lag "
                f"{stats.lag_mean:.1f} max {stats.lag_max} {rate:.0f} tokens/s idle: {idle}", keep)
        if self.fleet.cfg.log:
            row = {"run": self.label.strip(), "step": step, "seconds": seconds} | vars(stats)
            with open(self.fleet.cfg.log, "a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")

    async def idle(self) -> dict[str, float]:
        """Share of the run so far that each side spent waiting."""
        busy, wall = await self.fleet.metrics.read.call_one(), since(self.started)
        busy.subtract(self.busy_before)
        trainer = busy.pop("busy trainer", 0.0)
        generators = sum(s for who, s in busy.items() if who.startswith("busy"))
        return {"generators": 1 - generators / wall / self.fleet.cfg.generators,
                "trainer": 1 - trainer / wall}

    def reward(self, steps: slice) -> float:
        part = self.steps[steps]
        return sum(s.reward for s in part) / len(part)

    @property
    def lags(self) -> tuple[float, int]:
        """(mean, max) in versions"""
        means = [s.lag_mean for s in self.steps]
        return sum(means) / len(means), max(s.lag_max for s in self.steps)


async def train_sync(fleet: Fleet, num_steps: int, history: History) -> None:
    """Sample, step, publish, one after the other."""
    await history.begin()
    for _ in range(num_steps):
        batch = await fleet.batch()  # generators pull before they sample, so lag is 0
        await history.add(await fleet.trainer.step.call_one(batch), batch)


def check_start(report: Report, found: dict[str, float], rollout: Rollout) -> None:
    """What must hold before any training: the mistakes that no exception reports."""
    report.check("log-probabilities, recorded and recomputed, differ by", found["worst"], "<", 1e-4)
    report.check("probabilities miss summing to 1 by", found["sums"], "<", 1e-5)
    report.check("highest log-probability", found["highest"], "<=", 0)
    report.check("parameters without a gradient", found["idle"], "==", 0)
    report.check("largest mean advantage of a group", found["group_mean"], "<", 1e-4)
    distinct = len({tuple(said) for said in rollout.answers}) / len(rollout.answers)
    report.check("share of conversations that are distinct", distinct, ">", 0.2)


@stage(8, "sync_rl", "trainer and generator give the same log-probabilities for the same weights; "
       "reward rises; every sample has lag 0")
async def demo_sync_rl(report: Report, cfg: Config) -> None:
    report.say(f"seed {cfg.seed}; starting a trainer and {cfg.generators} generators: about 15 s")
    async with Fleet(cfg) as fleet:
        if cfg.model == "tiny":
            found = await fleet.trainer.survey.call_one()
            report.table(["256 held-out prompts, exact", "chance", "warm-started", "best possible"],
                         *([task, *row.values()] for task, row in found.items()))
            room = min(row["best"] - row["warm"] for row in found.values())
            report.check("room to learn, least of the tasks", room, ">", 0.5)
        first = await fleet.batch()
        check_start(report, await fleet.trainer.compare.call_one(first), first)
        history, before = History(fleet, report, "sync ", every=50), await fleet.heldout_exact()
        await train_sync(fleet, max(1, cfg.steps // 2), history)
        stale, after = await fleet.trainer.compare.call_one(first), await fleet.heldout_exact()
    num_steps, tenth = len(history.steps), max(1, len(history.steps) // 10)
    mismatch = max(s.mismatch_k3 for s in history.steps)
    report.table(["recorded against recomputed log-probabilities", "k3, nats"],
                 [f"the first batch, {num_steps} steps too late", stale["k3"]],
                 ["every batch, by the weights that sampled it", mismatch])
    gain = history.reward(slice(-tenth, None)) - history.reward(slice(tenth))
    report.say(f"{num_steps} steps in {history.clock[-1]:.1f} s, held-out exact {before:.3f} -> "
               f"{after:.3f}")
    report.figure(mismatch_k3=mismatch, stale_k3=stale["k3"], heldout_before=before,
                  heldout_after=after, reward_first=history.reward(slice(tenth)),
                  reward_last=history.reward(slice(-tenth, None)), lag_max=history.lags[1],
                  sync_steps_per_s=num_steps / history.clock[-1])
    report.check("k3 of samples that are too old", stale["k3"], ">", 1e-4)
    report.check("k3 of samples, largest of all steps", mismatch, "<=", 1e-6)
    report.check("lag, largest of all steps", history.lags[1], "==", 0)
    report.check("reward gained, last tenth over first", gain, ">", 0.1)
    report.say("try: `self.reader.version` for `self.reader.pull()` in Generator.rollout: it lags")


# == 9. ASYNC RL ==================================================================================
# Problem. In the synchronous loop one side always waits. Let both run, and samples grow old: when
#   the trainer sees one, the policy that made it is many versions behind, without a bound.
# Rule. Two loops and a buffer: rollouts (admit, generate, put) and training (take, step, publish).
#   A ticket per group keeps what is under way to K + 1 batches. Tickets alone do not bound lag, for
#   stragglers are overtaken: a group more than K versions old when a batch is taken is dropped, and
#   its ticket given back. Without the refund the run turns synchronous, then stops.
# Cost. Lag: samples are off-policy. The clip against the recorded probability corrects for it.
# Not here. New weights during a rollout; judges in processes of their own (DOCS 5).
# Source. IMPALA (Espeholt 2018), AReaL (Fu 2025).


# Lag, by example, with K = 1 (two batches of tickets; v = the trainer's version):
#
#     v = 5   batch a is generated under 5, batch b too; the gate is closed
#     v = 5   the trainer steps on a (lag 0) -> v = 6, and a's tickets admit batch c, under 6
#     v = 6   the trainer steps on b (lag 1) -> v = 7, b's tickets admit d
#     v = 7   c is late, d comes first: d is trained on (lag 0) -> v = 8
#     v = 8   now c arrives, generated under 6: lag 2 > K. It is dropped; its tickets admit another


class Gate:
    """Tickets, one per group: started = trained + dropped + lost + under way."""

    def __init__(self, max_lag: int):
        self.limit = (max_lag + 1) * GROUPS_PER_BATCH  # tickets
        self.count = collections.Counter(started=0, trained=0, dropped=0, lost=0)
        self.changed = asyncio.Condition()

    def under_way(self) -> int:
        return self.count["started"] - sum(self.count[k] for k in ("trained", "dropped", "lost"))

    async def admit(self, num_groups: int) -> None:
        """Takes tickets; waits while too much is under way; woken by `settle`."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.under_way() + num_groups <= self.limit)
            self.count["started"] += num_groups

    async def settle(self, how: str, num_groups: int) -> None:
        """Gives tickets back; how: trained, dropped or lost."""
        async with self.changed:
            self.count[how] += num_groups
            self.changed.notify_all()


class ReplayBuffer:
    """Groups that wait for the trainer, oldest first. Here, and only here, the two loops meet."""

    def __init__(self, gate: Gate, max_lag: int):
        self.gate, self.max_lag = gate, max_lag
        self.groups: list[tuple] = []  # (rollout, its rows of the group, version)
        self.arrived = asyncio.Condition()

    async def put(self, rollout: Rollout) -> None:
        rows = collections.defaultdict(list)  # group id -> rows
        for row, group_id in enumerate(rollout.group_ids.tolist()):
            rows[group_id].append(row)
        async with self.arrived:
            self.groups += [(rollout, r, int(rollout.versions[r].min())) for r in rows.values()]
            self.arrived.notify_all()

    async def take(self, num_groups: int, version: int) -> Rollout:
        """The oldest groups that a trainer at this version may see, as one batch. Drops what is too
        old; waits until there is enough; woken by `put`."""
        async with self.arrived:
            while True:
                fresh = [g for g in self.groups if version - g[2] <= self.max_lag]  # bound
                dropped, self.groups = len(self.groups) - len(fresh), fresh
                await self.gate.settle("dropped", dropped)  # refund
                if len(fresh) >= num_groups:
                    break
                await self.arrived.wait()
            taken, self.groups = fresh[:num_groups], fresh[num_groups:]
        return Rollout.join([(rollout, rows) for rollout, rows, _ in taken])


class AsyncRun:
    """The two loops. The run ends when the trainer has made its steps."""

    def __init__(self, fleet: Fleet, num_steps: int, max_lag: int, history: History):
        self.fleet, self.num_steps, self.history = fleet, num_steps, history
        self.gate = Gate(max_lag)
        self.buffer = ReplayBuffer(self.gate, max_lag)
        self.away = 0  # groups in requests that are not back
        self.at_trainer: collections.deque[asyncio.Task] = collections.deque()  # steps
        self.done = False

    async def run(self, version: int, before_step: dict) -> None:
        """version: the trainer's now. before_step: {step: async function to call first}.

        Shutdown:  training ends (or any loop raises)
                     -> done: no loop admits again
                     -> loops that wait for a generator get their answer and put it
                     -> loops that wait for a ticket, and steps not answered, are cancelled
                     -> what raised is raised here; what lies in the buffer is counted"""
        await self.history.begin()
        training = asyncio.ensure_future(self._training(version, before_step))
        # at most two requests per generator; with few tickets the gate lets fewer through
        num_loops = 2 * self.fleet.cfg.generators
        loops = [asyncio.ensure_future(self._rollouts()) for _ in range(num_loops)]
        await asyncio.wait([training, *loops], return_when=asyncio.FIRST_COMPLETED)
        self.done = True
        while self.away and not all(loop.done() for loop in loops):
            await asyncio.sleep(0.005)
        ended, tasks = [task for task in [training, *loops] if task.done()], [training, *loops]
        for task in [*tasks, *self.at_trainer]:
            task.cancel()
        await asyncio.gather(*tasks, *self.at_trainer, return_exceptions=True)
        for task in ended:
            task.result()

    async def _rollouts(self) -> None:
        """consumes tickets / waits for the gate, then for a generator / woken by Gate.settle, then
        by the answer / produces groups in the buffer / ends when the run is done"""
        while not self.done:
            await self.gate.admit(GROUPS_PER_BATCH)
            self.away += GROUPS_PER_BATCH
            try:
                rollout = await self.fleet.rollout(self.fleet.sampler.draw(GROUPS_PER_BATCH))
                await self.buffer.put(rollout)
            except (ActorError, SupervisionError) as error:  # after the service's own retries
                await self.gate.settle("lost", GROUPS_PER_BATCH)
                self.history.report.say(f"{GROUPS_PER_BATCH} groups lost: {cause(error)}")
                if isinstance(cause(error), NoReplica):
                    raise  # there is nobody left to generate: the run ends with this cause
            finally:
                self.away -= GROUPS_PER_BATCH

    async def _training(self, version: int, before_step: dict) -> None:
        """consumes groups / waits for the buffer, then for the trainer / woken by ReplayBuffer.put,
        then by the answer / produces versions / ends after num_steps"""
        for step in range(1, self.num_steps + 1):
            if step in before_step:
                await before_step[step]()
            # While the trainer works on a batch, the next waits there, and no more: it grows older
            # by a version. With K = 0 there are tickets for one batch only.
            while len(self.at_trainer) > min(1, self.buffer.max_lag):
                await self.at_trainer.popleft()
            batch = await self.buffer.take(GROUPS_PER_BATCH, version)
            self.at_trainer.append(asyncio.ensure_future(self._step(batch)))
            version += 1  # at which the trainer will see the next batch
        await asyncio.gather(*self.at_trainer)

    async def _step(self, batch: Rollout) -> None:
        stats = await self.fleet.trainer.step.call_one(batch)
        await self.gate.settle("trained", GROUPS_PER_BATCH)  # only now: lag counts versions
        await self.history.add(stats, batch)


def timeline(spans: list[Span], start: float, end: float, width: int = 76) -> list[str]:
    """A row per actor: the first letter of what it did in most of a slice of time, or a dot."""
    slice_s, rows = (end - start) / width, []
    for who in sorted({span.who for span in spans}):
        busy = [collections.Counter() for _ in range(width)]
        for span in (span for span in spans if span.who == who):
            for i in range(width):
                left = start + i * slice_s
                overlap_s = min(span.end, left + slice_s) - max(span.start, left)
                busy[i][span.what[0]] += max(0.0, overlap_s)
        row = "".join(max(b, key=b.get) if sum(b.values()) > slice_s / 2 else "." for b in busy)
        rows.append(f"{who:<12s} {row}")
    return rows


@stage(9, "async_rl", "the same reward in less wall time; lag never exceeds the bound; a generator "
       "killed mid-run costs no step")
async def demo_async_rl(report: Report, cfg: Config) -> None:
    report.say(f"seed {cfg.seed}; starting a trainer and {cfg.generators} generators: about 10 s")
    timed = max(1, cfg.steps * 4 // 5)  # steps to compare; then a generator is killed
    async with Fleet(cfg) as fleet:
        before = await fleet.heldout_exact()
        loose = History(fleet, report, "loose", every=10**9)
        await AsyncRun(fleet, min(60, timed), 10**6, loose).run(0, {})  # without the rule
        version, killed = await fleet.trainer.reset.call_one(), {}
        history = History(fleet, report, "async", every=max(1, cfg.steps // 8))

        async def kill() -> None:
            killed.update(idle=await history.idle(), at=time.monotonic())
            os.kill((await fleet.generators.status.call_one())["pids"][0], signal.SIGKILL)

        run = AsyncRun(fleet, cfg.steps, cfg.max_lag, history)
        await run.run(version, {min(timed + 3, cfg.steps): kill})  # step `timed` has ended then
        after = await fleet.heldout_exact()
        spans = await fleet.metrics.spans.call_one(killed["at"] - 0.3, killed["at"] + 0.3)
        status = await fleet.generators.status.call_one(60.0)
        k3_now = (await fleet.trainer.compare.call_one(await fleet.batch()))["k3"]
        await fleet.trainer.reset.call_one()
        peer = History(fleet, report, "sync ", every=max(1, cfg.steps // 4))
        await train_sync(fleet, timed, peer)
        peer_idle = await peer.idle()
    report.table(["step", "user said", "policy said (+: did not stop)", "reward", "version"],
                 *history.samples)
    report.say("", "0.6 s around the kill: g generate, s step, . wait",
               *timeline(spans, killed["at"] - 0.3, killed["at"] + 0.3), " " * 51 + "^ SIGKILL")
    runs = {"sync": (peer, peer_idle), "async": (history, killed["idle"])}
    report_speed(report, cfg.max_lag, timed, runs)
    report_lag(report, cfg, run, loose)
    report.say(f"held-out exact, 256 prompts, task {cfg.task}: {before:.3f} -> {after:.3f}")
    tenth = max(1, cfg.steps // 10)
    report.figure(heldout_before=before, heldout_after=after, mismatch_k3=k3_now,
                  reward_first=history.reward(slice(tenth)),
                  reward_last=history.reward(slice(-tenth, None)),
                  replaced_after_ms=max((s for *_, s in status["log"]), default=0.0) * 1e3)
    report.check("k3 of recorded and recomputed log-probabilities", k3_now, "<=", 1e-6)
    report.check(f"steps made, with a kill after {timed}", len(history.steps), "==", cfg.steps)
    report.check("healthy generators at the end", status["healthy"], "==", cfg.generators)
    report.check("held-out exact, gained", after - before, ">", 0)
    report.say(f"try: 100 times the tickets (line {line_of('tickets')}) and no bound on lag "
               f"(line {line_of('bound')})")


def report_speed(report: Report, max_lag: int, timed: int, runs: dict) -> None:
    """The two ways to run: equal numbers of trained samples, the same actors, a thread each."""
    rows = {}
    for how, (history, idle) in runs.items():
        tokens = sum(s.num_tokens for s in history.steps[:timed])
        tenth = slice(timed - max(1, timed // 10), timed)
        seconds, shares = history.clock[timed - 1], [f"{share:.0%}" for share in idle.values()]
        rows[how] = [seconds, timed / seconds, tokens / seconds, *shares, history.reward(tenth)]
    report.say("", f"{timed * GROUPS_PER_BATCH * GROUP_SIZE} trained samples each, no start-up")
    report.table(["run", "seconds", "steps/s", "tokens/s", "generators idle", "trainer idle",
                  "reward then"], *([how, *row] for how, row in rows.items()))
    speedup = rows["sync"][0] / rows["async"][0]
    report.figure(async_speedup=speedup, sync_s=rows["sync"][0], async_s=rows["async"][0],
                  sync_reward=rows["sync"][-1], async_reward=rows["async"][-1])
    if max_lag:  # with K = 0 the asynchronous run is a synchronous one
        report.check("sync seconds / async seconds", speedup, ">", 1)
    report.check("reward lost to lag", rows["sync"][-1] - rows["async"][-1], "<", 0.1)


def report_lag(report: Report, cfg: Config, run: AsyncRun, loose: History) -> None:
    """Where all groups went, and how old they were."""
    count, in_flight = run.gate.count, run.away + len(run.buffer.groups)
    report.table(["lag, in versions", "bound", "mean", "max"],
                 ["no tickets, no drop", "none", *loose.lags],
                 ["tickets and drop", f"K = {cfg.max_lag}", *run.history.lags])
    report.table(["groups", *count, "in flight at the end"], ["", *count.values(), in_flight])
    report.figure(**count, in_flight=in_flight, lag_mean=run.history.lags[0],
                  lag_max=run.history.lags[1], lag_max_without_bound=loose.lags[1])
    report.check("largest lag without the rule", loose.lags[1], ">", min(cfg.max_lag, 10))
    report.check("largest lag", run.history.lags[1], "<=", cfg.max_lag)
    report.check("groups started, not accounted for", run.gate.under_way() - in_flight, "==", 0)


# -- plumbing: the command line -------------------------------------------------------------------
# Exit status: 0 all checks hold, 1 a check failed or the run died, 2 wrong usage, 130 Ctrl-C.


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        """One line, exit 2."""
        print(f"monarch_rl: {message}", file=sys.stderr)
        sys.exit(2)


def stage_name(text: str) -> str:
    by_number = {str(stage.number): stage.name for stage in STAGES.values()}
    if by_number.get(text, text) not in STAGES:
        raise argparse.ArgumentTypeError(f"no stage {text!r}; stages: {', '.join(STAGES)}")
    return by_number.get(text, text)


def build_parser() -> Parser:
    parser = Parser(prog="monarch_rl.py", description=__doc__.split("\n")[0], allow_abbrev=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stage", type=stage_name, metavar="NAME", help="run stages 1 to NAME")
    which.add_argument("--only", type=stage_name, metavar="NAME", help="run this stage")
    which.add_argument("--list", action="store_true", help="print the stages")
    for field in dataclasses.fields(Config):
        known = globals().get(field.metadata["choices"])  # a name, because TASKS comes after Config
        parser.add_argument(
            "--" + field.name.replace("_", "-"), default=field.default, type=field.metadata["rule"],
            choices=list(known) if known else None, metavar=None if known else field.name.upper(),
            help=f"{field.metadata['what']} (default: {str(field.default) or 'none'})")
    parser.add_argument("--json", default="", metavar="FILE", help="everything that was measured")
    return parser


def parse(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Finds everything that can be wrong with the arguments before a process is spawned."""
    parser = build_parser()
    args = parser.parse_args(argv)
    for flag, path in [("--json", args.json), ("--log", args.log)]:
        place = path if os.path.exists(path) else os.path.dirname(path) or "."
        if path and (os.path.isdir(path) or not os.access(place, os.W_OK)):
            parser.error(f"{flag} {path}: cannot be written")
    if (sys.platform, os.uname().machine) != ("linux", "x86_64"):
        parser.error("this version needs Linux on x86-64: see `Arena` and DOCS, appendix B")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    if args.model != "tiny":
        try:
            transformers.AutoConfig.from_pretrained(args.model)
        except (OSError, ValueError):
            parser.error(f"--model {args.model}: no folder with a model, no hub id that loads here")
    names = [f.name for f in dataclasses.fields(Config)]
    return args, Config(**{name: getattr(args, name) for name in names})


def machine_facts() -> dict:
    """Where the figures were measured."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    packages = ("torch", "transformers", "torchmonarch")
    return {"cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1),
            "system": f"{os.uname().sysname} {os.uname().machine}",
            "python": sys.version.split()[0],
            **{package: importlib.metadata.version(package) for package in packages}}


def descendants() -> list[int]:
    """Process ids of our children, their children, and so on, without those that have ended."""
    found, parents = [os.getpid()], {}
    for path in glob.glob("/proc/[0-9]*/stat"):
        try:
            with open(path, encoding="utf-8") as file:
                pid, _, rest = file.read().partition(" (")  # 12 (a name) S 1 ...
            state, parent = rest.rpartition(") ")[2].split()[:2]
        except OSError:
            continue  # it ended between the listing and the look
        if state != "Z":
            parents[int(pid)] = int(parent)
    for mine in found:  # grows while it is read
        found += [pid for pid, parent in parents.items() if parent == mine]
    return found[1:]


def leave(status: int, line: str = "") -> None:
    """Ends now, from wherever we are: kills our processes, stopped ones too. Their shared memory
    has no name and goes with them."""
    if LEAVING.is_set():  # a second Ctrl-C, or the news of a process that the first one killed
        return time.sleep(1.0)
    LEAVING.set()
    quiet = 0  # looks in a row that found nobody; a process may be on its way while we look
    while quiet < 5:
        pids = descendants()
        for pid in pids:
            kill_process(pid)
        quiet = 0 if pids else quiet + 1
        time.sleep(0.02)
    if line:
        print(f"monarch_rl: {line}", file=sys.stderr, flush=True)
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        pass  # `monarch_rl.py | head` has read enough
    os._exit(status)


def quiet_stderr():
    """Sends file descriptor 2, which our processes inherit, to a file without a name: Monarch
    reports there what the demos provoke. sys.stderr keeps the terminal. Returns the file."""
    noise = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(noise.fileno(), 2)
    return noise


async def run_stages(names: list[str], report: Report, cfg: Config) -> None:
    for name in names:
        report.open(STAGES[name])
        try:
            await STAGES[name].demo(report, cfg)
        except Exception as error:  # reported as a failed check; the next stage starts afresh
            report.died(error)
        report.close()


def main(argv: list[str] | None = None) -> None:
    args, cfg = parse(sys.argv[1:] if argv is None else argv)
    if args.list:
        for stage in STAGES.values():
            print(f"{stage.number:2d}  {stage.name:<14s} line {stage.line:<5d} {stage.claim}")
        return
    last = list(STAGES).index(args.stage) if args.stage else len(STAGES)
    names = [args.only] if args.only else list(STAGES)[: last + 1]
    noise, report, facts = quiet_stderr(), Report(), machine_facts()
    signal.signal(signal.SIGINT, lambda *_: leave(130, "interrupted"))
    monarch.actor.unhandled_fault_hook = lambda failure: leave(1, f"an actor died: {failure}")
    if cfg.generators > facts["cores"]:
        report.say(f"note: {cfg.generators} generators and a trainer on {facts['cores']} cores", "")
    try:
        asyncio.run(run_stages(names, report, cfg))
    except BrokenPipeError:
        leave(1)
    if args.json:
        report.write_json(args.json, vars(args), facts)
    failed = [found["name"] for found in report.stages if not found["ok"]]
    if failed:
        noise.seek(0)
        last_words = "".join(f"  | {line}" for line in noise.readlines()[-20:])
        leave(1, f"failed: {', '.join(failed)}; what the workers said last:\n{last_words}")
    leave(0)


if __name__ == "__main__":
    # By name: the classes of a script are pickled by value, those of a module by reference, and
    # only by reference has every process the same ones.
    import monarch_rl

    monarch_rl.main()
