#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["torch==2.13.0", "transformers==5.20.2", "torchmonarch==0.7.0"]
# ///
"""monarch_rl: an asynchronous RL system for language models, in one file that teaches itself.

    python monarch_rl.py                      the whole tour, under three minutes on a laptop
    python monarch_rl.py --stage service      stages 1 to 6
    python monarch_rl.py --only async_rl      one stage
    python monarch_rl.py --checkpoint DIR     the tour; if cut off, the same command goes on
    python monarch_rl.py --list               the stages, with line numbers
    python monarch_rl.py --report PAGE.html   and a page: from synchronous to asynchronous
    python monarch_rl.py --worker ADDRESS     serves this host to runs with --hosts (DOCS 8)

Each stage shows a problem, the rule that solves it, and measures both in the same run.

              prompts             episodes            rewards                    batch
      Sampler --------> Generators --------> Judges ---------> ReplayBuffer ---------> Trainer
      (Gate)            (a Service)          (a Service)       (groups, versions)         |
         ^                   ^                                       |                    | publish
         |                   | pull                                  |                    v
         +--- tickets back --|---------------------------------------+              WeightWriter
                             |                                                            |
                        WeightReader <---------- Arena (slots, leases) <------------------+

      control plane: actor messages, small          data plane: shared memory or RDMA, bulk

    1 hello_actor     state in its own process; one call at a time, in order; two actors overlap
    2 actor_mesh      many members, one call: who runs and who answers
    3 rdma_transfer   pass the handle, pull the bytes; the owner's Python takes no part
    4 controllers     find a singleton by name
    5 supervision     whose failure is it? the owner replaces a dead process
    6 service         every request answered exactly once while replicas fail, hang and die
    7 weight_sync     never torn, the trainer waits for no reader, about one memory copy
    8 reshard         every needed byte from one sharding to another, once
    9 sync_rl         the RL loop, one thing at a time
   10 async_rl        two loops and a buffer: the same reward in less time, lag bounded

Left out, and what to use instead: paged attention and continuous batching (vLLM, SGLang); tensor,
pipeline and expert parallel training (torchtitan, Megatron); LoRA (peft); sandboxes for tools;
launchers for Slurm and Kubernetes (Monarch's job API). Each would hide the part that is taught.

The words, each with an example:

    version    of weights: a step, or the start of a run, makes the next; 0 = before RL      7
    lag        the trainer's version when it trains on a sample minus the sample's        2
    episode    one conversation: user, assistant, user, assistant       "abc" "abc" "dfa" "dfa"
    group      the episodes sampled from one prompt; rewards are compared inside it       8
    rollout    what one call of a generator returns: groups of episodes              16 x 8
    ticket     to generate one group; back when that is trained on, dropped or lost       1
    slot       one copy of all weights in shared memory                              64 MiB
    publish    what the trainer does to make a version available; generators pull it      7
    lease      the slot that a generator says it is reading                               3
    torn       of weights: some tensors of one version, some of another             6, 6, 7
    replica    one of several interchangeable actors, in a process of its own             0
    judge      a replica that runs the reward function, and may be killed for it          0
    run id     of one trainer's life: after a restart another one              3141592653589
"""

from __future__ import annotations

# -- plumbing: before Monarch starts --------------------------------------------------------------
import os, signal  # two first, for Ctrl-C during the imports below

if __name__ == "__main__": signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import argparse, asyncio, collections, concurrent.futures, contextlib, copy, ctypes, functools
import importlib.metadata, inspect, io, itertools, json, math, mmap, operator, pathlib, pickle
import random, re, runpy, socket, statistics, subprocess, sys, tempfile, textwrap, threading, time
import types, typing, urllib.parse, zipfile, zlib

# Every process inherits these; Monarch and the C library read them early. What was set before wins.
os.environ.update(dict(HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY="200ms",  # 10 s unless told
    # A poll under way when its process dies waits so long for the reply: 30 s unless told.
    HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE="5s", GLOO_SOCKET_IFNAME="lo",
    # Copies above 128 KiB bypass the cache, and so do not read what they overwrite (section 7).
    GLIBC_TUNABLES="glibc.cpu.x86_non_temporal_threshold=0x20000",
    PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",  # Monarch's RDMA asks for it on GPUs
    # Several processes share the cores, so none starts threads; and some would be chatty.
    OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", TRANSFORMERS_VERBOSITY="error",
    HF_HUB_VERBOSITY="error", HF_HUB_DISABLE_PROGRESS_BARS="1", PYTHONSAFEPATH="1") | os.environ)
# Spawned processes import this file by its name, not what is so called where the run started.
os.environ["PYTHONPATH"] = f"{os.path.dirname(__file__)}:{os.getenv('PYTHONPATH', '')}".strip(":")


class Lazy(types.ModuleType):
    """A module that is imported at its first use: torch costs 1.4 s of CPU in every process that
    uses it, transformers 2.3 s more, and most processes of stages 1 to 6 use neither."""

    def __getattr__(self, name: str): return getattr(importlib.import_module(self.__name__), name)


torch, transformers, fsdp = Lazy("torch"), Lazy("transformers"), Lazy("torch.distributed.fsdp")
dtensor, dcp = Lazy("torch.distributed.tensor"), Lazy("torch.distributed.checkpoint.state_dict")

import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.supervision import SupervisionError  # not public
from monarch.actor import Actor, ActorError, attach_to_workers, concurrent_endpoint, current_rank
from monarch.actor import enable_transport, endpoint, get_or_spawn_controller, this_host, this_proc
from monarch.rdma import RDMABuffer, get_rdma_backend

MIB = 1 << 20


class Config(typing.NamedTuple):
    """Everything a run can be told, passed to every actor's constructor: a worker imports its own
    copy of this file and sees no global set elsewhere. A field is a flag, a comment its --help."""

    task: str = "repeat"  # what is learned: repeat, count, pattern, or FILE.py:CLASS
    model: str = "tiny"  # folder or hub id of a causal LM, or the built-in tiny one
    steps: int = 200  # training steps in async_rl, half in sync_rl; with few, checks fail
    generators: int = 2  # replicas of the generator service
    trainers: int = 1  # ranks over which the trainer is sharded with FSDP2
    max_lag: int = 2  # K, in versions: nothing older is trained on
    loss: str = "ppo"  # what an update minimises: reinforce, ppo, decoupled, cispo, dppo
    baseline: str = "group"  # what a reward is compared with: group, none, batch, leave_one_out
    passes: int = 1  # updates per batch
    lr: float = 0.0  # learning rate; 0: 1e-3 for tiny, 1e-6 for others
    kl: float = 0.0  # weight of the divergence from the policy before RL
    entropy: float = -1.0  # weight of an entropy bonus; -1: 0.01 for tiny, 0 for others
    pull: str = "rollout"  # new weights come before a rollout, or before a token
    seed: int = 0  # of sampling, initial weights and prompts
    device: str = "cpu"  # where policies compute: cpu, cuda
    model_mb: int = 64  # MiB of weights in weight_sync and in reshard
    json: str = ""  # file for everything that was measured
    log: str = ""  # file for a JSON line per training step
    trace: str = ""  # file for who did what and when, as Perfetto reads it (DOCS 9)
    report: str = ""  # file for a page: async_rl at bounds 0 to 8, about a minute more (DOCS 9)
    checkpoint: str = ""  # folder for the newest two checkpoints, from which a run goes on
    save_every: int = 50  # steps between checkpoints
    hosts: str = ""  # tcp://ADDRESS:PORT,... of workers that sync_rl and async_rl run on


# -- plumbing: the report -------------------------------------------------------------------------

# One banner, one section, one claim, one demo: a coroutine demo_<name of the stage>(Report, Config)
# that closes the section; its docstring is the claim, and what to try. STAGES lists them.
Stage = collections.namedtuple("Stage", "number name claim hint demo line")


class Report:
    """The only thing that prints: workers' output comes late. Keeps checks, figures for --json."""

    OPERATORS = {"==": operator.eq, "<": operator.lt, "<=": operator.le, ">": operator.gt}
    # on a terminal, what clears a live line before the next is printed over it
    live = "\r\x1b[K" if sys.stdout.isatty() else ""

    async def run(self, stages: list[Stage], cfg: Config) -> None:
        """Head, demo and foot of each; an exception in a demo is a failed check."""
        self.stages = []
        for n, name, claim, hint, demo, line in stages:
            start, top = time.monotonic(), f"[{n}/{len(STAGES)}] {name}: {claim}  (line {line})"
            self.now = dict(name=name, number=n, claim=claim, checks=[], figures={})
            self.say(textwrap.fill(top, 96, subsequent_indent=" " * 7), indent="")
            try: await demo(self, cfg)
            except Exception as error:  # whatever it is: counted, told, and the next stage runs
                self.check("errors that ended the stage", repr(cause(error))[:300], "==", "none")
                sys.excepthook(*sys.exc_info())
            checks, seconds = self.now["checks"], round(since(start), 2)
            self.stages.append({**self.now, "ok": all(c["ok"] for c in checks), "seconds": seconds})
            self.say(*textwrap.wrap(hint, 89), f"{len(checks)} checks, {seconds:.1f} s", "")

    def say(self, *lines: str, indent: str = " " * 7, end: str = "\n") -> None:
        if self.live: signal.setitimer(signal.ITIMER_REAL, 3.0)  # then `main` shows the time
        for line in lines: print(f"{self.live}{indent}{line}".rstrip(), end=end, flush=True)

    def table(self, heads: list[str], *rows: list) -> None:
        """Columns as wide as their widest cell, words to the left, numbers to the right."""
        cells = [heads, *([show(cell) for cell in row] for row in rows)]
        words = [isinstance(c, str) and not re.fullmatch(r"[\d.]*%?", c) for c in rows[0]]
        forms = [f"{'<' if w else '>'}{max(map(len, c))}" for w, c in zip(words, zip(*cells))]
        self.say(*("   ".join(map(format, row, forms)) for row in cells))

    # Figures for --json; their names end in their unit.
    def figure(self, **figures: float | int | str) -> None: self.now["figures"].update(figures)

    def check(self, what: str, got, relation: str, want) -> None:
        """Compares what was measured with what was expected; a failure makes the exit status 1."""
        ok, wanted = bool(self.OPERATORS[relation](got, want)), f"{relation} {show(want)}"
        self.now["checks"].append({"what": what, "got": show(got), "want": wanted, "ok": ok})
        expected = "" if ok and relation == "==" else f"  ({wanted})"
        self.say(f"{'    ok' if ok else '  FAIL'} {what}: {show(got)}{expected}", indent="")


def show(value) -> str:
    if not isinstance(value, float): return str(value)
    return f"{value:{'.2g' if 0 < abs(value) < 0.1 else '.2f' if abs(value) < 100 else '.0f'}}"


# The exception that an endpoint raised, out of the ActorErrors that carried it here.
def cause(error): return cause(error.exception) if isinstance(error, ActorError) else error


async def outcome(call, *args, deadline_s: float | None = None):
    """What the caller sees: the answer, or the name of the exception that it gets instead."""
    try: return await asyncio.wait_for(call(*args), deadline_s)
    except (ActorError, SupervisionError, ValueError, asyncio.TimeoutError) as error:
        return type(cause(error)).__name__


def since(start: float) -> float: return time.monotonic() - start  # seconds since a monotonic()


# -- plumbing: hosts ------------------------------------------------------------------------------

# A worker (--worker) waits for connections. For each it starts a Monarch host of its own, at a new
# port, and says where; then each side hears from the other ten times a second. With the connection
# end that host and its processes. (At an old port messages come back, which ends their sender.)

SILENCE_S = 8.0  # after which the other side counts as lost


def versions() -> dict[str, str]:
    """What two hosts must have in common."""
    crc = zlib.crc32(pathlib.Path(__file__).read_bytes())
    found = {n: importlib.metadata.version(n) for n in ("torch", "transformers", "torchmonarch")}
    return found | {"python": sys.version[:4], "monarch_rl.py": f"{crc:08x}"}


def name_and_port(address: str) -> tuple[str, int]:
    where = urllib.parse.urlsplit(address)
    if where.scheme == "tcp" and where.hostname and where.port: return where.hostname, where.port
    raise ValueError("not of the form tcp://ADDRESS:PORT; 0.0.0.0 is every network")


def connect(address: str) -> tuple:
    """A file of lines from and to a worker, my own address there. Raises OSError, ValueError."""
    with socket.create_connection(name_and_port(address), 4.0) as connection:
        lines = connection.makefile("rw")  # which keeps it open
        for name, theirs in json.loads(lines.readline()).items():
            if theirs != (mine := versions().get(name)):
                raise ValueError(f"it has {name} {theirs}, this host has {mine}")
        connection.settimeout(SILENCE_S)
        return lines, connection.getsockname()[0]


class Link(threading.Thread):
    """The connection to a worker, made again whenever it is lost; says so."""

    def __init__(self, address: str):
        super().__init__(daemon=True)
        # door: the address of its Monarch host; "" if it is lost. signals: (pid, number) to send
        self.address, self.door, self.signals = address, "", []
        self.start()

    def run(self) -> None:
        for attempt in itertools.count():
            with contextlib.suppress(OSError, ValueError), connect(self.address)[0] as lines:
                print("[]", file=lines, flush=True)
                while line := lines.readline():
                    if attempt and not self.door: Report().say(f"{self.address}: back")
                    self.door, signals, self.signals = json.loads(line), self.signals, []
                    print(json.dumps(signals), file=lines, flush=True)
            if self.door: Report().say(f"{self.address}: lost")
            self.door = ""
            time.sleep(0.5)


link_of = functools.cache(Link)


def url(name: str, port: int) -> str: return f"tcp://{f'[{name}]' if ':' in name else name}:{port}"


def door_to(address: str) -> str:
    """Changes when that host is lost, and again when it is back. "" is this host, and stays."""
    return link_of(address).door if address else "here"


async def host_mesh(address: str):
    """The host to spawn processes on: this one, or a worker's, for which it waits."""
    while not door_to(address): await asyncio.sleep(0.05)
    if not address: return this_host()
    return attach_to_workers(ca="trust_all_connections", workers=[door_to(address)])


def serve(address: str) -> None:
    """--worker: until somebody ends this process."""
    for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda *_: leave(0))
    at = name_and_port(address)
    server = socket.create_server(at, family=socket.AF_INET6 if ":" in at[0] else socket.AF_INET)
    print(f"{address} is open: whoever reaches it can run any code here, as this user", flush=True)
    while True: threading.Thread(target=attend, args=server.accept()[:1], daemon=True).start()


def attend(client: socket.socket) -> None:
    """One connection to a worker."""
    client.settimeout(SILENCE_S)
    name = client.getsockname()[0]
    with socket.create_server((name, 0), family=client.family) as free: port = free.getsockname()[1]
    # prctl: SIGKILL when its parent ends
    code = ("import ctypes; ctypes.CDLL(None).prctl(1, 9); import monarch.actor as m; "
            f"m.run_worker_loop_forever(address={url(name, port)!r}, ca='trust_all_connections')")
    with client.makefile("rw") as lines, contextlib.suppress(OSError, ValueError):
        print(json.dumps(versions()), file=lines, flush=True)
        if not lines.readline(): return  # only asked
        host = subprocess.Popen([sys.executable, "-c", code])
        with contextlib.ExitStack() as at_the_end:
            at_the_end.callback(lambda: kill([*descendants(host.pid), host.pid]))
            while host.poll() is None:
                print(json.dumps(url(name, port)), file=lines, flush=True)
                for pid, number in json.loads(lines.readline()):
                    kill({pid} & {*descendants(host.pid)}, number)
                time.sleep(0.1)


# == 1. HELLO ACTOR ===============================================================================
# Problem. Threads share an object; each reads it, pauses, writes it back. Updates vanish, without
#   an error, and not every time.
# Rule. Put the object into an actor: an instance that lives in one process and is reached only
#   through messages. Its endpoints run one at a time, in the order in which a caller sent them, so
#   none ever sees another one half done. Two actors share nothing, and overlap.
# Cost. A message: about 0.3 ms inside a process, 0.7 ms to another one.
# Not here. Endpoints that may overlap (section 6).      Source. Hewitt, Bishop, Steiger 1973.


# What an addition tells: the rank of the actor among those spawned with it, its process id, the
# total after it, and when it began and ended, on the monotonic clock, which is one for a host.
Added = collections.namedtuple("Added", "rank process total start end")


class Tally(Actor):
    """A counter. Section 2 makes a mesh of it, section 4 a singleton."""

    def __init__(self): self.rank, self.total = current_rank().rank, 0

    @endpoint
    async def add(self, pause_s: float = 0.0005) -> Added:
        """Adds one, with a pause between reading and writing, for which threads are punished."""
        start, seen = time.monotonic(), self.total
        await asyncio.sleep(pause_s)
        self.total = seen + 1
        return Added(self.rank, os.getpid(), self.total, start, time.monotonic())

    @endpoint
    async def take(self) -> int:
        """The additions since this was last asked."""
        total, self.total = self.total, 0
        return total


async def demo_hello_actor(report: Report, cfg: Config) -> None:
    """an actor's state lives in its own process; calls to one actor run one at a time in the order
    sent; two actors overlap
    try: make `add` a concurrent_endpoint: it loses too"""
    procs, box = this_host().spawn_procs(per_host={"worker": 2}), collections.Counter()

    def add() -> None:  # to a plain object what Tally.add does to its actor
        seen = box["total"]
        time.sleep(0.0005)
        box["total"] = seen + 1

    await asyncio.gather(*[asyncio.to_thread(add) for _ in range(200)])
    report.check("additions of 200 that threads lost", 200 - box["total"], ">", 0)
    tallies = procs.spawn("tally", Tally)  # one in each process
    one, other = tallies.slice(worker=0), tallies.slice(worker=1)
    # All are sent before the first is answered.
    calls = await asyncio.gather(*[one.add.call_one() for _ in range(200)])
    report.check("additions of 200 that the actor lost", 200 - await one.take.call_one(), "==", 0)
    early = sum(after.start < before.end for before, after in itertools.pairwise(calls))
    report.check("calls that began before the one sent before had ended", early, "==", 0)
    a, b = await asyncio.gather(*[actor.add.call_one(pause_s=0.2) for actor in (one, other)])
    report.check("overlap of two actors, s", min(a.end, b.end) - max(a.start, b.start), ">", 0.1)
    report.check("processes, this one included", len({os.getpid(), a.process, b.process}), "==", 3)
    await procs.stop()


# == 2. ACTOR MESH ================================================================================
# Problem. A run has many generators and a trainer many ranks. A loop that calls them one by one
#   waits for the sum of their times; a variable set in the main process reaches none of them.
# Rule. Spawn a mesh: the same actor in every process of a process mesh. One call fans out. Five
#   ways to say it differ in who runs and who answers; what members must know is sent to them.
# Cost. None over a single call. Answers of `call` come as a ValueMesh, one value per member.
# Not here. Meshes over several hosts (DOCS 8).      Source. Monarch's meshes and adverbs.


async def demo_actor_mesh(report: Report, cfg: Config) -> None:
    """one call reaches every member; call, call_one, choose, broadcast and slice differ in who runs
    and who answers
    try: replace `[mesh.add.broadcast()]` by `[await mesh.add.choose()]` in this demo"""
    procs = this_host().spawn_procs(per_host={"rank": 4})
    mesh = procs.spawn("tally", Tally)

    async def row(how: str, answers) -> list[str]:
        # Messages of one sender arrive in the order sent: this one after the call it asks about.
        ran = [point.rank for point, total in await mesh.take.call() if total]
        return [how, " ".join(map(str, ran)), " ".join(str(a.rank) if a else "-" for a in answers)]

    # `call` answers with a ValueMesh, pairs of point and value; `broadcast` with None, at once.
    rows = [await row("mesh.add.call()", (await mesh.add.call()).values()),
        await row("mesh.slice(rank=2).add.call_one()", [await mesh.slice(rank=2).add.call_one()]),
        await row("mesh.add.choose()", [await mesh.add.choose()]),
        await row("mesh.add.broadcast()", [mesh.add.broadcast()])]
    report.table(["call", "ranks that ran", "ranks that answered"], *rows)
    expected = [["0 1 2 3"] * 2, ["2"] * 2, [rows[2][2]] * 2, ["0 1 2 3", "-"]]
    wrong = sum(who != right for (_, *who), right in zip(rows, expected))
    report.check("rows that differ from what the words mean", wrong, "==", 0)
    report.check("call_one on four members", await outcome(mesh.add.call_one), "==", "ValueError")
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


def checksum(tensor) -> int: return zlib.crc32(tensor.numpy())  # CRC-32 of a CPU tensor's bytes


class Owner(Actor):
    """Owns memory and hands out handles to it."""

    @endpoint
    async def register(self, num_bytes: int) -> RDMABuffer:
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)  # kept alive here for the readers
        return RDMABuffer(self.memory)

    @endpoint
    async def as_message(self): return self.memory

    @endpoint
    async def sit(self, duration_s: float) -> float:
        """Blocks this process's Python; returns when it ended, on the monotonic clock."""
        time.sleep(duration_s)
        return time.monotonic()


async def demo_rdma_transfer(report: Report, cfg: Config) -> None:
    """a handle of about half a kilobyte moves any number of bytes, and the owner's Python takes no
    part in the read
    try: register a copy, `self.memory.clone()`: pushes vanish, unseen"""
    procs, backend = this_host().spawn_procs(per_host={"owner": 1}), get_rdma_backend()
    owner, rows, wrong = procs.spawn("owner", Owner), [], 0
    # The first warms up. In the last the owner's Python does nothing else for two seconds.
    for kib, busy_s in [(1, 0), (1, 0), (1 << 10, 0), (64 << 10, 0), (64 << 10, 2)]:
        handle = await owner.register.call_one(kib << 10)
        pushed = torch.randint(0, 256, (kib << 10,), dtype=torch.uint8)
        pulled, busy = torch.ones_like(pushed), owner.sit.call_one(busy_s)  # ones: touched by now
        await handle.write_from(pushed)
        start = time.monotonic()
        await handle.read_into(pulled)
        pulled_at, message = time.monotonic(), await owner.as_message.call_one()
        answered_at, free_at = time.monotonic(), await busy
        wrong += not checksum(pushed) == checksum(pulled) == checksum(message)
        ms = (answered_at - pulled_at) * 1e3, (pulled_at - start) * 1e3
        rows.append([f"{kib} KiB", busy_s, len(pickle.dumps(handle)), *ms])
    report.table([f"by {backend}", "busy, s", "handle bytes", "message ms", "pull ms"], *rows[1:])
    figures = zip(["handle_bytes", "message_ms", "pull_ms"], rows[-2][2:])  # of 64 MiB
    report.figure(backend=backend, **dict(figures))
    report.check(f"times of {len(rows)} that bytes were wrong", wrong, "==", 0)
    report.check("largest handle, bytes", max(row[2] for row in rows), "<", 1024)
    report.check("pull ended before its owner was free by, s", free_at - pulled_at, ">", 0)
    report.check("message ended after its owner was free by, s", answered_at - free_at, ">", 0)
    await procs.stop()


# == 4. CONTROLLERS ===============================================================================
# Problem. Actors in many processes have to meet, at one metrics store, say. Whoever creates it must
#   hand it to everyone else, and two creators make two half-filled stores.
# Rule. Ask by name: `get_or_spawn_controller(name, Class)` gives every caller the same actor and
#   creates it at most once, however many ask at the same moment.
# Cost. A look-up per process. The singleton lives in the main process.
# Not here. Singletons that survive that process.      Source. Monarch's get_or_spawn_controller.


class Clerk(Actor):
    """Writes to the store (a Tally, which counts rows) of this name, or to one of its own."""

    @endpoint
    async def write(self, name: str) -> int:
        """The number of rows then: 1 for exactly one clerk of each store."""
        store = await get_or_spawn_controller(name or f"store of {os.getpid()}", Tally)
        return (await store.add.call_one()).total


async def demo_controllers(report: Report, cfg: Config) -> None:
    """actors that never met find the same singleton by name, and it is created once
    try: let each clerk ask for a name of its own, f'{name} {os.getpid()}'"""
    procs, name = this_host().spawn_procs(per_host={"clerk": 4}), "demo of section 4"
    clerks = procs.spawn("clerk", Clerk)
    own, shared = await clerks.write.call(""), await clerks.write.call(name)  # all four at once
    report.check("stores of 4 clerks without a common name", [*own.values()].count(1), "==", 4)
    report.check("stores of 4 clerks with one", [*shared.values()].count(1), "==", 1)
    await procs.stop()


# == 5. SUPERVISION ===============================================================================
# Problem. Processes die, and some only stop. If nobody is responsible, every later call fails or
#   waits for ever.
# Rule. An exception belongs to a caller that waits; the actor lives on. A dead process belongs to
#   the actor that spawned it: its `__supervise__` is told, and it spawns another. A stopped process
#   tells nobody, so calls carry a deadline, and missing it counts as death.
# Cost. A poll every 200 ms. Too short a deadline kills the slow. With torch a start takes seconds.
# Not here. Who restarts the owner; death of what the main process spawned, which ends it.
# Source. Erlang's supervisors (Armstrong 2003).

LEAVING = threading.Event()  # set when this process is about to end: nothing is replaced any more


# What happened, for --trace and --report: what, from when to when (seconds since 1970; the same, if
# it took no time), and to whom. A worker's go to its owner with its next answer.
Event = collections.namedtuple("Event", "what start end actor")
EVENTS = collections.deque(maxlen=200_000)  # some 40 MiB, of the newest


def note(what: str, start: float, actor=""): EVENTS.append(Event(what, start, time.time(), actor))
# Of replicas of this service: why each was lost; from then until it was replaced.
def losses(name): return [e for e in EVENTS.copy() if re.fullmatch(f"{name} .* lost", e.actor)]


class Replica:
    """A process with one actor in it, or several ranks that live and die together."""

    # answer: of setup(); section 6 counts requests in_flight, and errors in a row
    answer, in_flight, errors = None, 0, 0

    def __init__(self, owner: Supervisor, replica_id: int, address: str, mesh):
        self.id, self.name = replica_id, f"{owner.name}_{replica_id}_{time.monotonic_ns()}"
        self.address, self.door = address, door_to(address)
        self.procs = mesh.spawn_procs(per_host={"rank": owner.num_ranks}, name=self.name)
        self.actor = self.procs.spawn(self.name, owner.replica_class, replica_id, *owner.args)
        # pids: of its ranks, once they run; lost: becomes (why, monotonic time), wakes who waits
        self.pids, self.lost = [], asyncio.Future()

    def send(self, number: int) -> None:  # a signal, to all its processes
        if self.address: link_of(self.address).signals.extend((pid, number) for pid in self.pids)
        else: kill(self.pids, number)
        if number == signal.SIGKILL: self.pids = []  # these numbers may soon be somebody else's

    async def end(self, deadline_s: float) -> None:
        """By SIGKILL: a polite end takes Python a second; what is stopped would go on some day."""
        if self.door != door_to(self.address): return  # it went with its host
        self.send(signal.SIGKILL)
        await asyncio.wait_for(self.procs.stop(), deadline_s)


class Worker(Actor):
    """The actor in a replica: what a supervisor owns. (`--worker` is something else, a host.)"""

    def __init__(self, replica_id: int = 0, cfg: Config | None = None):
        self.replica_id, self.cfg, self.rank = replica_id, cfg, current_rank().rank

    @endpoint  # one for all methods; they are coroutines
    async def do(self, method: str, *args): return await getattr(self, method)(*args)

    async def timed(self, method: str, *args) -> tuple[object, list[Event]]:
        """Calls a method: its answer, and what has happened here since the last such call."""
        start, answer = time.time(), await getattr(self, method)(*args)
        note(method, start)
        return answer, [EVENTS.popleft() for _ in range(len(EVENTS))]

    async def pid(self) -> int: return os.getpid()

    async def setup(self): """Makes it ready to serve. What it returns, `Replica.answer` keeps."""


class Supervisor(Actor):
    """Owns replicas of one class of workers."""

    SETUP_DEADLINE_S = 120.0  # imports on a loaded machine take seconds, large models minutes

    def __init__(self, name: str, replica_class: type, num_replicas: int, deadline_s: float, *args,
                 hosts=("",), num_ranks=1, max_attempts=3, max_in_flight=1000):
        """deadline_s: for one attempt at a request, or at ending a replica before it is replaced.
        hosts: addresses, by turns; "" is this one. max_attempts: per request; one that kills who
        runs it must not kill them all. max_in_flight: to a replica; with 1 none harms another."""
        self.name, self.replica_class, self.args = name, replica_class, args
        self.hosts = [*itertools.islice(itertools.cycle(hosts), num_replicas)]
        self.deadline_s, self.num_ranks, self.max_attempts = deadline_s, num_ranks, max_attempts
        self.max_in_flight, self.replicas = max_in_flight, {}  # replicas: by id, the newest of each

    async def _spawn(self, replica_id: int) -> None:
        """(Re)places a replica, and ends the old one first; done when it is healthy."""
        host, old = self.hosts[replica_id], self.replicas.get(replica_id)
        if old: await old.end(self.deadline_s)
        new = self.replicas[replica_id] = Replica(self, replica_id, host, await host_mesh(host))
        if host: asyncio.ensure_future(self._watch(new))
        new.pids = await self._call(new, self.SETUP_DEADLINE_S, "pid")
        for pid in () if host else new.pids: on_exit(pid, lambda: self._lose(new, "died"))
        new.answer = await self._call(new, self.SETUP_DEADLINE_S, "setup")

    async def _call(self, replica: Replica, deadline_s: float, *args) -> list:
        """The answers of all its ranks. Raises asyncio.TimeoutError if the replica is lost or the
        deadline passes before they come; what comes later is ignored."""
        call = asyncio.ensure_future(replica.actor.do.call("timed", *args))
        await asyncio.wait({call, replica.lost}, timeout=deadline_s, return_when="FIRST_COMPLETED")
        if call.cancel(): raise asyncio.TimeoutError(f"{args[0]}: no answer")
        answers, events = zip(*call.result().values())
        for rank, event in ((rank, event) for rank, some in enumerate(events) for event in some):
            EVENTS.append(event._replace(actor=f"{self.name} {replica.id}.{rank}{event.actor}"))
        return [*answers]

    async def _watch(self, replica: Replica) -> None:
        """Of what happens to a whole host Monarch says nothing."""
        while replica.door == door_to(replica.address): await asyncio.sleep(0.1)
        self._lose(replica, "host lost")

    # Such a message was for a host that is lost; False would end this actor.
    def _handle_undeliverable_message(self, message) -> bool: return True

    async def __supervise__(self, failure) -> bool:
        """Monarch's poll: a process of mine died, or its actor."""
        for replica in self.replicas.values():
            if failure.mesh_name.startswith(f"{replica.name}-"): self._lose(replica, "died")
        return True  # handled; False would pass it on to whoever owns me

    def _lose(self, replica: Replica, why: str) -> None:
        if not (replica.lost.done() or LEAVING.is_set()):  # the first to notice says why
            replica.lost.set_result((why, time.monotonic()))


def on_exit(pid: int, callback) -> None:
    """Calls back, in this event loop, when a process of this host ends; sooner than the poll."""
    loop, fd = asyncio.get_running_loop(), os.pidfd_open(pid)
    loop.add_reader(fd, lambda: (loop.remove_reader(fd), os.close(fd), callback()))


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:  # which also ends stopped ones
    for pid in pids:
        with contextlib.suppress(ProcessLookupError): os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Of a process of this host. A zombie, which has ended unnoticed by its parent, is dead."""
    try: return pathlib.Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] not in b"ZX"
    except (FileNotFoundError, ProcessLookupError): return False


class Roots(Worker):
    """Somebody to fail, here and in section 6: below 0, and as replica 1 at numbers 100 to 199."""

    async def root(self, number: int) -> float:
        if self.replica_id == 1 and 100 <= number < 200: raise RuntimeError("a bad spell")
        await asyncio.sleep(0.002)
        return math.sqrt(number)  # of -1: ValueError


# [what happens, what its caller sees, is the owner told]
TRIGGERS = [["raises, call_one", "ValueError", "no"], ["raises, broadcast", "nothing", "yes"],
            ["SIGKILL", "SupervisionError", "yes"], ["SIGSTOP", "TimeoutError", "no"]]


class Trial(Supervisor):
    """Owns one replica, to which everything happens that TRIGGERS names."""

    @endpoint
    async def suffer(self, trigger: str) -> list:
        """A row of the demo's table, of a new worker."""
        await self._spawn(0)
        victim, saw, start = self.replicas[0], "nothing", time.monotonic()
        if trigger.startswith("SIG"):
            os.kill(victim.pids[0], signal.Signals[trigger])
            await asyncio.sleep(0.1)  # on a busy machine a stopping process may still answer
        # After a broadcast the actor is dead, in a living process: messages would end their sender.
        if trigger == "raises, broadcast": victim.actor.do.broadcast("root", -1)
        # Of a death Monarch tells callers, of a stop nobody does.
        else: saw = await outcome(victim.actor.do.call_one, "root", -1,
                                  deadline_s=0.3 if trigger == "SIGSTOP" else 10.0)
        told, _ = await asyncio.wait({victim.lost}, timeout=1.0)  # five polls: "no" means something
        told_ms, cure = (victim.lost.result()[1] - start) * 1e3 if told else "", time.monotonic()
        if told or saw == "TimeoutError": await self._spawn(0)  # else it lives on
        return [saw, "yes" if told else "no", told_ms, round(since(cure) * 1e3),
                await outcome(self.replicas[0].actor.do.call_one, "root", 4, deadline_s=10.0)]


async def demo_supervision(report: Report, cfg: Config) -> None:
    """an exception belongs to the caller; a dead process belongs to whoever spawned it, who
    replaces it in under a second
    try: remove `on_exit` in `_spawn`: Monarch's poll tells the owner, but later"""
    trial = this_proc().spawn("trial", Trial, "worker", Roots, 1, 10.0)
    rows = [[trigger, *await trial.suffer.call_one(trigger)] for trigger, *_ in TRIGGERS]
    report.table(["trigger", "caller sees", "owner told", "in ms", "cure ms", "next call"], *rows)
    report.figure(detect_ms=rows[2][3], respawn_ms=rows[2][4])  # of SIGKILL
    report.check("triggers that did otherwise", sum(r[:3] not in TRIGGERS for r in rows), "==", 0)
    report.check("answers of 4 calls after the cure", [r[5] for r in rows].count(2.0), "==", 4)
    report.check("SIGKILL found and worker replaced, ms", sum(rows[2][3:5]), "<", 1000)
    await trial.stop()


# == 6. SERVICE ===================================================================================
# Problem. A call shares the fate of the replica that it was sent to. Monarch's `choose` picks one
#   without looking: one stopped replica of four loses a quarter of the requests.
# Rule. The caller asks the service, the service asks a replica: a healthy one with the fewest
#   requests in flight, in turn. Every attempt has a deadline. A replica that dies, misses it or
#   keeps raising is replaced, and the request goes to another. If two replicas raise on the same
#   request, the request is to blame and the exception is its caller's.
# Cost. A hop inside this process. A request may run up to three times; it is answered once.
# Not here. Sessions, priorities, autoscaling (Ray Serve).   Source. "Let it crash", as in Erlang.


class NoReplica(RuntimeError): """No healthy replica for SETUP_DEADLINE_S, or closed."""


class Service(Supervisor):
    """Replicas behind one name. If the one that runs a request is lost, another one runs it."""

    MAX_ERRORS = 3  # in a row until a replica that raises is replaced
    turn, keepers = 0, ()  # requests so far; a task per replica, from start until close

    @concurrent_endpoint
    async def start(self) -> None:
        """Makes all replicas; done when all are healthy. Called again, it replaces them all."""
        for keeper in self.keepers: keeper.cancel()
        for replica in self.replicas.values(): replica.answer = None
        self.keepers = [asyncio.ensure_future(self._keep(i)) for i in range(len(self.hosts))]
        await self._gather(math.inf)

    async def _keep(self, replica_id: int) -> None:
        """waits for a loss / woken by `_lose` / produces the next replica / ends with `close`, or
        if the first one cannot be made, though its host is there"""
        why, when = "", 0.0  # of the loss that the next replica makes good; none yet
        while self.keepers:
            try:
                await self._spawn(replica_id)
                if why: note(why, time.time() - since(when), f"{self.name} {replica_id} lost")
                why, when = await self.replicas[replica_id].lost
            except (ActorError, SupervisionError, asyncio.TimeoutError, OSError, ValueError) as bad:
                await asyncio.sleep(0.5)  # a setup that always fails must not spin
                if not why and door_to(self.hosts[replica_id]): raise
                why, when = why or f"setup failed: {cause(bad)}", when or time.monotonic()

    async def _gather(self, wait_s: float) -> list[Replica]:
        """The healthy replicas, once all are whose host is there, or wait_s have passed."""
        end = time.monotonic() + wait_s
        while time.monotonic() < end and len(self._healthy()) < len([*filter(door_to, self.hosts)]):
            await asyncio.sleep(0.005)
        return self._healthy()

    @concurrent_endpoint
    async def route(self, method: str, *args, deadline_s: float = 0.0):
        """Runs method(*args) on all ranks of a healthy replica, and answers as rank 0 does. Raises
        what the request itself is to blame for, NoReplica, or SupervisionError: no attempt is left.
        (A plain endpoint would run one request at a time.)"""
        raised = None  # the replica that raised first
        for _ in range(self.max_attempts):
            replica = await self._pick(raised)
            replica.in_flight += 1
            try: answers = await self._call(replica, deadline_s or self.deadline_s, method, *args)
            except Exception as found: error = found
            else: break
            finally: replica.in_flight -= 1
            # a rank that loses another one raises; is it that?
            if self.num_ranks > 1: await asyncio.wait({replica.lost}, timeout=0.2)
            late = isinstance(error, asyncio.TimeoutError)
            if late or isinstance(error, SupervisionError) or replica.lost.done():
                self._lose(replica, "missed its deadline" if late else "died")
                error = SupervisionError(f"{replica.name} is lost")
            elif raised or len(self.hosts) == 1: raise cause(error)  # two raise, or the only one
            else: raised = replica  # or the request is bad: another replica will tell
        else: raise cause(error)
        replica.errors = 0
        if raised:  # the request was good, so it is the replica that is not
            raised.errors += 1
            if raised.errors >= self.MAX_ERRORS: self._lose(raised, "kept raising")
        return answers[0]

    def _healthy(self) -> list[Replica]:
        for keeper in filter(asyncio.Future.done, self.keepers): keeper.result()  # raises why
        return [r for r in self.replicas.values() if r.answer and not r.lost.done()]

    async def _pick(self, raised: Replica | None) -> Replica:
        """The next replica, but not the one that has raised on this request. Waits for one."""
        end = time.monotonic() + self.SETUP_DEADLINE_S
        while not (fit := [r for r in self._healthy()
                           if r is not raised and r.in_flight < self.max_in_flight]):
            if {*self._healthy()} - {raised}: end = time.monotonic() + self.SETUP_DEADLINE_S  # busy
            if time.monotonic() > end or not self.keepers: raise NoReplica(f"{self.name}: all lost")
            await asyncio.sleep(0.005)
        # A slow replica gets less. Among equals in turn, or an idle service would use one replica.
        self.turn += 1
        return min(fit, key=lambda r: (r.in_flight, (r.id - self.turn) % len(self.hosts)))

    @concurrent_endpoint
    async def status(self, wait_s: float = 0.0) -> dict:
        """A snapshot, once all replicas whose host is there are healthy, or wait_s have passed."""
        well = await self._gather(wait_s)
        return {"pids": sum((r.pids for r in well), []),
                "answers": {(r.id, r.address): r.answer for r in well}}

    @concurrent_endpoint
    async def strike(self, number: int) -> None: self._healthy()[0].send(number)  # a signal, to one

    @concurrent_endpoint
    async def close(self) -> None:
        keepers, self.keepers = self.keepers, ()
        for keeper in keepers: keeper.cancel()  # else a replacement under way would go on
        await asyncio.gather(*keepers, return_exceptions=True)
        await asyncio.gather(*(r.end(self.SETUP_DEADLINE_S) for r in self.replicas.values()))


async def storm(ask, faults: dict[int, tuple], deadline_s: float | None = None) -> list:
    """400 callers of `ask`, one every 2 ms: [roots answered, ms of the fastest, of the slowest].
    faults: caller's number -> (process id, signal), sent before that call."""
    async def request(number: int) -> tuple[bool, float]:
        await asyncio.sleep(number * 0.002)
        if number in faults: os.kill(*faults[number])
        start, answer = time.monotonic(), await outcome(ask, "root", number, deadline_s=deadline_s)
        return answer == math.sqrt(number), since(start) * 1e3

    answered, ms = zip(*await asyncio.gather(*map(request, range(400))))
    return [sum(answered), min(ms), max(ms)]


async def demo_service(report: Report, cfg: Config) -> None:
    """though replicas fail, hang and die, every request is answered exactly once
    try: range(1) in `route`: a request gets one attempt"""
    procs = this_host().spawn_procs(per_host={"replica": 4})
    pool = procs.spawn("pool", Roots, 0)
    victim = await pool.slice(replica=3).do.call_one("pid")
    chosen = await storm(pool.do.choose, {0: (victim, signal.SIGSTOP)}, deadline_s=1.0)
    os.kill(victim, signal.SIGCONT)  # so that it can be stopped politely
    await procs.stop()
    service = this_proc().spawn("roots", Service, "root", Roots, 4, 0.5)
    await service.start.call_one()
    bad = [await outcome(service.route.call_one, "root", -1) for _ in range(20)]
    first, early = await service.status.call_one(10.0), len(losses("root"))
    faults = {100: (first["pids"][2], signal.SIGKILL), 200: (first["pids"][3], signal.SIGSTOP)}
    served = await storm(service.route.call_one, faults)
    _, kinds = await service.status.call_one(10.0), sorted({loss.what for loss in losses("root")})
    report.table(["400 requests to 4 replicas", "answered once", "fastest ms", "slowest ms"],
                 ["choose; #3 stops", *chosen], ["Service; #1 raises, #2 dies, #3 stops", *served])
    report.figure(requests=400, answered_once=served[0], failover_ms=served[2],
                  route_overhead_us=(served[1] - chosen[1]) * 1e3)
    report.check("requests lost with choose", 400 - chosen[0], ">", 0)
    report.check("requests of 400 that the service answered exactly once", served[0], "==", 400)
    report.check("kinds of failure", kinds, "==", ["died", "kept raising", "missed its deadline"])
    report.check("bad requests of 20 that raise at their caller", bad.count("ValueError"), "==", 20)
    report.check("replicas replaced for them", early, "==", 0)
    await service.close.call_one()


# == 7. WEIGHT SYNC ===============================================================================
# Problem. The trainer rewrites its weights while generators read them. A reader that looks during
#   the write holds some tensors of version 6 and some of version 7: no error, only worse rewards.
# Rule. The writer fills a slot that nobody reads, then changes one word. A reader announces the
#   slot that this word names, looks at the word again, and only then reads; the writer leaves
#   announced slots alone. On CPUs readers copy nothing: parameters are the slot. Another host
#   has one relay, which reads by the same rule and publishes in that host's own slots.
# Cost. Two slots more than readers, in host memory.
# Not here. GPUDirect; sending only what changed (DOCS 2).   Source. Hazard pointers, Michael 2004.
#
#     trainer      forward, backward | wait | step 7 | forward, backward    | wait | step 8 | ...
#       a thread                              | copy 7 | latest = 7 |              | copy 8 | ...
#     generator    ... decodes with 6 ............................ | pull | decodes with 7 ...


class WeightMismatch(ValueError): """What the two sides mean differs. Nothing has changed yet."""


def demand(holds, otherwise: str) -> None:
    if not holds: raise WeightMismatch(otherwise)


# Where one tensor lies in a slot, such as ("lm_head.weight", (19, 40), "bfloat16", "embed.weight",
# 64, 1520). tied_to: the first name of the same memory, which is stored once; mostly the own name.
# offset: bytes from the start of the slot, a multiple of 64.
TensorSpec = collections.namedtuple("TensorSpec", "name shape dtype tied_to offset num_bytes")

# A TensorSpec per name; the size of a slot, which holds the tensors and then a checksum of each.
Manifest = collections.namedtuple("Manifest", "specs slot_bytes")

# How another process of this host finds the arena; small enough for any message. pid, fd: of the
# writer, as /proc/<pid>/fd/<fd>, a file without a name, gone when nobody has it open. run_id:
# another one whenever a writer starts. manifest: what each of the num_slots slots holds.
ArenaHandle = collections.namedtuple("ArenaHandle", "pid fd run_id manifest num_slots num_readers")


def manifest_of(tensors: dict, dtype=None) -> Manifest:
    """The layout of these name -> tensor, in their order; floating-point as this dtype."""
    specs, offset, stored = [], 0, {}  # stored: memory -> (its first name, offset)
    for name, t in tensors.items():
        kind = dtype if dtype and t.is_floating_point() else t.dtype
        num_bytes = t.numel() * kind.itemsize
        # no address: it is empty, or this rank has nothing of it
        memory = local(t).data_ptr() or id(t), t.shape, t.stride(), t.dtype
        tied_to, at = stored.setdefault(memory, (name, offset))
        specs.append(TensorSpec(name, tuple(t.shape), str(kind)[6:], tied_to, at, num_bytes))
        offset += -(-num_bytes // 64) * 64 if tied_to == name else 0
    return Manifest(tuple(specs), -(-(offset + 8 * len(specs)) // mmap.PAGESIZE) * mmap.PAGESIZE)


def local(tensor):
    """What this process has of a tensor: all, unless it is a DTensor (section 8)."""
    # with gradients a DTensor answers with a new view of it
    with torch.no_grad(): return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# name -> tensor of all that must arrive: parameters and buffers, tied ones under each name.
def weights_of(module) -> dict: return dict(module.state_dict(keep_vars=True))


# The arena of two readers, while version 8 is being written:
#     words   latest = (7, slot 2)      lease 0 = slot 2      lease 1 = slot 1
#             +-----------+-----------+-----------+-----------+
#     slots   | 0: v8 ... | 1: v6     | 2: v7     | 3: v5     |
#             +-----------+-----------+-----------+-----------+
#               written     reader 1    latest,     free
#                           reads it    reader 0


class Arena:
    """One process's mapping of the shared memory: 8-byte words, 64 bytes apart, so that no two
    share a cache line; then slots.

    LATEST      version * MAX_SLOTS + slot. One word, so that both change at once
    RUN         the run id of the writer
    LEASES ...  one of each reader: its process id * MAX_SLOTS + slot
    NOTHING     in any of them: nothing published, nothing leased; reads as version -1"""

    # 1024 words: LATEST, RUN, one of each of 900 readers, and from the end on section 8's
    MAX_SLOTS, MAX_READERS, NOTHING, HEADER_BYTES = 1024, 900, -1, 65536
    LATEST, RUN, LEASES = 0, 1, 2

    def __init__(self, handle: ArenaHandle, fd: int):
        self.handle, self.lock = handle, threading.Lock()
        num_bytes = self.HEADER_BYTES + handle.num_slots * handle.manifest.slot_bytes
        self.memory = mmap.mmap(fd, num_bytes)  # ValueError if the file is shorter
        # An aligned 8-byte load or store each: never half of an old value.
        self.words = memoryview(self.memory)[: self.HEADER_BYTES].cast("q")[::8]
        self.whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.slots = self.whole[self.HEADER_BYTES :].view(handle.num_slots, -1)
        self.tensors = functools.cache(lambda slot: {  # name -> view of that slot
            s.name: self.slots[slot, s.offset : s.offset + s.num_bytes]
            .view(getattr(torch, s.dtype)).view(s.shape) for s in handle.manifest.specs})

    @classmethod
    def create(cls, manifest: Manifest, num_readers: int) -> Arena:
        """Slots: one per reader, the latest, and one to write into: one is always free."""
        demand(num_readers <= cls.MAX_READERS, f"arena: {num_readers} readers are too many")
        # memory without a name, so that no kill leaves any, and /dev/shm is no limit
        fd, num_slots = os.memfd_create("monarch_rl"), num_readers + 2
        handle = ArenaHandle(os.getpid(), fd, time.time_ns(), manifest, num_slots, num_readers)
        os.ftruncate(fd, cls.HEADER_BYTES + num_slots * manifest.slot_bytes)
        arena = cls(handle, fd)
        arena.whole.fill_(255)  # NOTHING in all words, and no page fresh: that costs 5-25 copies
        arena.words[cls.RUN] = handle.run_id
        return arena

    @classmethod
    def attach(cls, handle: ArenaHandle, tensors: dict) -> Arena:
        """Maps another process's arena, for these tensors; that process may end later. Raises
        WeightMismatch: another dtype of equal size, say, would be nonsense, unseen."""
        there, here = ({spec.name: spec._replace(offset=0) for spec in manifest.specs}
                       for manifest in (handle.manifest, manifest_of(tensors)))
        for name, theirs in (dict.fromkeys(here) | there).items():
            demand(theirs == here.get(name), f"{name}: {theirs} there, {here.get(name)} here")
        try:
            with open(f"/proc/{handle.pid}/fd/{handle.fd}", "r+b", buffering=0) as file:
                arena = cls(handle, file.fileno())  # mapped, so the file may be closed
        except (OSError, ValueError) as error:
            raise WeightMismatch(f"arena: its writer, process {handle.pid}: {error}") from error
        # the process or its file may be another one by now
        demand(arena.words[cls.RUN] == handle.run_id, f"arena: not of run {handle.run_id}")
        return arena

    def fence(self) -> None:
        """My stores become visible before my next loads run. A processor may keep a store in a
        buffer while later loads go ahead (x86 breaks no other order); taking a lock empties it."""
        with self.lock: pass

    def checksums(self, slot: int) -> tuple:
        """([tensors] int64, as stored by the writer, a view; the same, of what the slot holds)"""
        found = [checksum(t.flatten().view(torch.uint8)) for t in self.tensors(slot).values()]
        return self.slots[slot, -8 * len(found) :].view(torch.int64), torch.tensor(found)

    # The latest version; -1 if there is none yet.
    def newest(self) -> int: return self.words[self.LATEST] // self.MAX_SLOTS

    def free_slot(self) -> int:
        """For the writer: a slot that is neither latest nor leased by somebody alive."""
        self.fence()  # whoever leased before it could see the last `latest` is seen here
        leases = self.words[self.LEASES : self.LEASES + self.handle.num_readers]
        # NOTHING is the lease of no process, and the latest in a slot that no arena has
        busy = {word % self.MAX_SLOTS for word in leases if is_alive(word // self.MAX_SLOTS)}
        free = {*range(self.handle.num_slots)} - busy - {self.words[self.LATEST] % self.MAX_SLOTS}
        demand(free, "arena: no free slot")
        return min(free)

    # For the writer, when the slot is complete: now readers may look.
    def commit(self, version, slot): self.words[self.LATEST] = version * self.MAX_SLOTS + slot


class WeightWriter:
    """The trainer's side: owns the arena. A copy runs in a thread, beside the trainer's next
    forward and backward pass; the trainer waits for it before it changes its tensors."""

    def __init__(self, tensors: dict, num_readers: int, dtype=None, checksums=False, arena=None):
        """tensors: name -> the trainer's own, changed in place. dtype: cast to it in the copy.
        checksums: for readers that check. arena: another rank's, or a new one."""
        self.tensors, self.version, self.checksums = tensors, -1, checksums
        self.arena = arena or Arena.create(manifest_of(tensors, dtype), num_readers)
        self.stream, self.thread = None, concurrent.futures.ThreadPoolExecutor(1)
        self.copying = self.thread.submit(int)  # the copy under way; now one that has ended
        if any(tensor.is_cuda for tensor in tensors.values()):
            self.stream = torch.cuda.Stream()
            pin, whole = torch.cuda.cudart().cudaHostRegister, self.arena.whole
            # else copies from the GPU would be staged, and block
            torch.cuda.check_error(pin(whole.data_ptr(), whole.nbytes, 0))

    def start(self, version: int) -> None:
        """Begins to make the tensors, as they are now, the latest version."""
        self.wait()
        demand(version > self.version, f"version {version} after version {self.version}")
        self.version = version
        # after the kernels that write the tensors, beside those that follow
        if self.stream: self.stream.wait_stream(torch.cuda.current_stream())
        self.copying = self.thread.submit(self._copy, version)

    def wait(self) -> float:
        """Until the copy is complete and the tensors may change: seconds that took. Raises what
        the copy raised, and so does every later call: no version can follow."""
        start = time.monotonic()
        self.copying.result()
        return since(start)

    def publish(self, version: int) -> None:
        self.start(version)
        self.wait()

    # What to copy between a slot's view of a tensor and mine: all of it (section 8: boxes).
    def parts(self, view, tensor) -> list[tuple]: return [(view, tensor)]

    def _copy(self, version: int) -> None:  # in the thread
        slot = self.arena.free_slot()
        self._write(slot)
        self.arena.commit(version, slot)

    def _write(self, slot: int) -> None:
        start, views = time.time(), self.arena.tensors(slot)
        with torch.no_grad(), torch.cuda.stream(self.stream):
            for name in (s.name for s in self.arena.handle.manifest.specs if s.name == s.tied_to):
                for view, mine in self.parts(views[name], self.tensors[name]):
                    demand(view.shape == mine.shape, f"{name}: another shape than at the start")
                    plain = view.is_contiguous() and mine.is_contiguous() and not mine.is_cuda
                    if plain and view.dtype == mine.dtype:  # copy_ reads what it will overwrite
                        ctypes.memmove(view.data_ptr(), mine.data_ptr(), view.nbytes)
                    else: view.copy_(mine, non_blocking=True)
        if self.stream: self.stream.synchronize()
        if self.checksums: torch.Tensor.copy_(*self.arena.checksums(slot))
        note("publish", start, " copies")


class WeightReader:
    """A generator's side: `pull` makes its tensors the newest weights."""

    parts = WeightWriter.parts

    def __init__(self, handle: ArenaHandle, reader: int, tensors, in_place=False, check=False):
        """reader: 0 .. num_readers-1, mine alone. in_place: copies, as to GPUs and to the addresses
        with which code was compiled, instead of pointing into the slot. check: copies if the writer
        lives and the checksums that it must add are right. Raises WeightMismatch."""
        demand(0 <= reader < handle.num_readers, f"arena: it has no reader {reader}")
        self.arena, self.word = Arena.attach(handle, tensors), Arena.LEASES + reader
        self.tensors, self.version, self.check = tensors, -1, check
        self.in_place = in_place or check or any(t.is_cuda for t in tensors.values())
        self.arena.words[self.word] = Arena.NOTHING  # whoever was reader before me is dead

    def lease(self) -> tuple[int, int]:
        """(version, slot) of the newest weights, safe to read while my word names that slot."""
        # Why this is enough. Suppose the writer takes my slot for its next version. It does so only
        # after it has made another slot the latest, and then looked at the leases. If it looked
        # after step 2, it saw mine and took another slot. If it looked before step 2, the latest
        # had already changed, so step 3 sees that and I begin again, having read nothing yet.
        while True:
            latest = self.arena.words[Arena.LATEST]
            version, slot = divmod(latest, Arena.MAX_SLOTS)
            self.arena.words[self.word] = os.getpid() * Arena.MAX_SLOTS + slot  # 1. announce
            self.arena.fence()  # 2. now the writer can see it
            if self.arena.words[Arena.LATEST] == latest: return version, slot  # 3. look again

    def pull(self) -> int:
        """Returns the version that the tensors are now (-1: none). They are the slot itself, so the
        lease lasts until the next pull. Raises WeightMismatch; then they are what they were."""
        newest, pid = self.arena.newest(), self.arena.handle.pid
        demand(newest >= self.version, f"arena: version {newest}, after version {self.version}")
        demand(not self.check or is_alive(pid), f"arena: its writer, process {pid}, ended")
        if newest == self.version: return self.version
        start, (version, slot) = time.time(), self.lease()
        views = self.arena.tensors(slot)
        if self.check:
            wrong = [*itertools.compress(views, torch.ne(*self.arena.checksums(slot)))]
            demand(not wrong, f"{', '.join(map(str, wrong))}: its checksum is wrong")
        for name, view in views.items():
            parts = self.parts(view, self.tensors[name])
            for part, mine in parts:  # several cannot be one view of the slot: copied
                mine.data = mine.data.copy_(part) if self.in_place or len(parts) > 1 else part
        self.version = version
        note("pull", start)
        return version


PIECE_BYTES = 4 * MIB  # as one RDMABuffer, what is large would cross at a third of the speed


# Handles to all of a [num_bytes] uint8 tensor.
def pieces_of(tensor) -> tuple: return tuple(map(RDMABuffer, tensor.split(PIECE_BYTES)))


async def read_pieces(pieces: tuple[RDMABuffer, ...], room) -> None:
    """Into room, as long as what they cover. If it raises, no read is under way any more."""
    reads = [there.read_into(here) for there, here in zip(pieces, room.split(PIECE_BYTES))]
    for error in filter(None, await asyncio.gather(*reads, return_exceptions=True)): raise error


# What a reader of another host needs, the handle of an arena and RDMABuffers over it, a few hundred
# bytes each: the word `latest`, its own word, and the pieces of each slot.
RemoteHandle = collections.namedtuple("RemoteHandle", "handle latest lease slots")


def remote_handle(arena: Arena, reader: int) -> RemoteHandle:
    """Made by the arena's process, and of use as long as that lives."""
    words = arena.whole[: Arena.HEADER_BYTES].view(torch.int64).view(-1, 8)[:, :1]
    return RemoteHandle(arena.handle, RDMABuffer(words[Arena.LATEST]),
        RDMABuffer(words[Arena.LEASES + reader]), [*map(pieces_of, arena.slots)])


class Relay(Worker):
    """One per other host: reads the trainer's arena, one-sided, so that the trainer's Python takes
    no part, and writes an arena for the readers of its own host."""

    def __init__(self, replica_id: int, trainer, endpoint: str, num_readers: int):
        """trainer, endpoint: whom to ask, and how; num_readers: of my arena."""
        self.replica_id, self.num_readers = replica_id, num_readers
        self.ask = getattr(trainer, endpoint).call_one
        self.latest_word, self.lease_word = torch.zeros(2, 1, dtype=torch.int64)

    async def setup(self) -> ArenaHandle:
        """From now on versions come into my arena."""
        self.remote = await self.ask("remote", self.replica_id)
        self.arena = Arena.create(self.remote.handle.manifest, self.num_readers)
        self.following = asyncio.ensure_future(self._follow())
        return self.arena.handle

    async def _follow(self) -> None:
        """waits for nobody, but looks / produces versions / ends with this process"""
        # The protocol of WeightReader.lease, one-sided: a write that is answered is seen by all.
        # The trainer cannot ask whether I live, so I lease in its name; my successor has this word.
        while True:
            await asyncio.sleep(0.005)  # a look costs both hosts half a millisecond of CPU
            with contextlib.suppress(Exception):  # a trainer that is gone
                n, latest = Arena.MAX_SLOTS, await self._look()
                if latest // n == self.arena.newest(): continue
                self.lease_word.fill_(self.remote.handle.pid * n + latest % n)
                await self.remote.lease.write_from(self.lease_word)  # 1. announce, 2. answered
                if await self._look() != latest: continue  # 3. look again; it moved
                slot = self.arena.free_slot()
                await read_pieces(self.remote.slots[latest % n], self.arena.slots[slot])
                self.arena.commit(latest // n, slot)

    async def _look(self) -> int:
        await self.remote.latest.read_into(self.latest_word)
        return int(self.latest_word)


# A file without a name, in which the ranks of a process group find each other, and nobody else.
def meeting_place() -> str: return f"/proc/{os.getpid()}/fd/{os.memfd_create('meeting')}"


def form_group(place: str, rank: int, num_ranks: int) -> None:
    """A process group: gloo for CPU tensors, NCCL for those of GPUs."""
    store = torch.distributed.FileStore(place, num_ranks)
    torch.distributed.init_process_group(store=store, rank=rank, world_size=num_ranks)


class Rank(Worker):
    """Takes part in measurements, here and in section 8. end: its writer or reader of the arena;
    block, of rank 0: as many bytes as a version; step(): makes the trainer's next version."""

    version = 0

    async def take_part(self, road: str, *args) -> tuple:
        """A round: for how many seconds rank 0 copied its block into a slot with memmove, then when
        my part began, what it returned, and when it ended, on the monotonic clock."""
        self.step()
        start = time.monotonic()
        if self.rank == 0:
            room = self.end.arena.slots[self.end.arena.free_slot()]
            ctypes.memmove(room.data_ptr(), self.block.data_ptr(), self.block.nbytes)
        copy_s, version = since(start), torch.tensor(self.version)
        torch.distributed.all_reduce(version, torch.distributed.ReduceOp.MAX)  # waits for all
        self.version, start = int(version), time.monotonic()
        return copy_s, start, await getattr(self, road)(*args), time.monotonic()


async def measure(ranks, num_rounds: int, road: str, *args) -> tuple[float, float, tuple]:
    """(ms from first beginning to last end, ms of a memmove: medians; answers, [round][rank])"""
    rounds = [(await ranks.do.call("take_part", road, *args)).values() for _ in range(num_rounds)]
    copies, starts, results, ends = zip(*(zip(*of_round) for of_round in rounds))
    took_s, median = map(operator.sub, map(max, ends), map(min, starts)), statistics.median
    return median(took_s) * 1e3, median(copy_s for copy_s, *_ in copies) * 1e3, results


class Bench(Rank):
    """The trainer, rank 0, and generators that join late. Every byte of the weights, 290 bf16
    tensors of uneven sizes, is their version modulo 120, so that a reader can tell."""

    async def join(self, place: str, num_mb: int, seed: int, num_generators: int) -> tuple | None:
        """The trainer publishes 50 versions; its arena, and a handle of the weights it writes."""
        form_group(place, self.rank, 1 + num_generators)
        self.three = torch.distributed.new_group([0, 1, 2])  # the trainer and two generators
        self.block = torch.empty(num_mb * MIB, dtype=torch.uint8)  # no memory until written
        cuts = sorted(random.Random(seed).sample(range(32, len(self.block) // 2, 32), 289))
        self.tensors = dict(enumerate(self.block.view(torch.bfloat16).tensor_split(cuts)))
        if self.rank: return None
        self.end = WeightWriter(self.tensors, num_generators)
        for _ in range(50): self.step(publish=True)
        return self.end.arena.handle, RDMABuffer(self.block)

    async def remote(self, reader: int): return remote_handle(self.end.arena, reader)

    async def attach(self, handle: ArenaHandle, live: RDMABuffer | None = None) -> float:
        """A generator joins: ms until it has the newest version of an arena."""
        self.live, start = live, time.monotonic()
        self.end = WeightReader(handle, self.rank - 1, self.tensors)
        self.end.pull()
        return since(start) * 1e3

    def step(self, publish: bool = False) -> None:
        if self.rank: return  # only the trainer makes versions
        self.end.wait()
        self.version += 1
        self.block.fill_(self.version % 120)
        if publish: self.end.publish(self.version)

    async def sync(self, road: str, num_generators: int) -> float:
        """This version, from the trainer to the first generators: seconds for which my Python was
        held up; a generator's not while it looks for the version, of which nobody tells it."""
        start, self.weights = time.monotonic(), [self.block] * (0 < self.rank <= num_generators)
        # through an RDMABuffer the trainer takes no part
        if self.rank > num_generators or (road, self.rank) == ("RDMABuffer", 0): return 0.0
        if road == "gloo broadcast": torch.distributed.broadcast(self.block, 0, group=self.three)
        elif road == "RDMABuffer": await self.live.read_into(self.block)
        elif self.rank == 0: self.end.start(self.version)
        else:
            while self.end.arena.newest() < self.version: time.sleep(0.0005)
            start, self.weights = time.monotonic(), self.tensors.values()
            self.end.pull()
            if road == "no leases": self.end.arena.words[self.end.word] = Arena.NOTHING
        return since(start)

    async def race(self, road: str, num_generators: int) -> int:
        """The trainer publishes 13 versions without a pause. Meanwhile a generator syncs and reads
        all bytes four times, as in decoding four tokens: 1 if they were of several versions."""
        self.version += self.rank  # each waits for another one, and so leases another slot
        await self.sync(road, num_generators)
        for _ in range(12): self.step(publish=True)
        got = {int(e) for _ in range(4) for t in self.weights for e in t.view(torch.int8).aminmax()}
        return int(len(got) > 1)


# What a road costs: medians in ms, but for the ratio (ms / memmove), and reads that were torn.
Row = collections.namedtuple("Row", "road ms ratio trainer generator torn reads memmove")


async def row(ranks, num_rounds: int, road: str, num_generators: int) -> Row:
    # This first: a relay's first read of each piece is slow, and then it has seen all slots.
    *_, torn = await measure(ranks, num_rounds, "race", road, num_generators)
    ms, memmove, held_s = await measure(ranks, num_rounds, "sync", road, num_generators)
    trainer, *generators = (statistics.median(of_rank) * 1e3 for of_rank in zip(*held_s))
    return Row(f"{road}, {num_generators}", ms, ms / memmove, trainer, max(generators),
               sum(map(sum, torn)), num_generators * num_rounds, memmove)


async def demo_weight_sync(report: Report, cfg: Config) -> None:
    """a generator never samples from half-updated weights, the trainer waits for no reader, and a
    sync costs about one memory copy, however many generators there are
    try: num_readers + 1 slots in `Arena.create`: a version finds none free"""
    report.say(f"290 tensors, {cfg.model_mb} MiB; seed {cfg.seed} (at 64 MiB about 25 s)")
    procs, relay_procs = [this_host().spawn_procs(per_host={"rank": n}) for n in (5, 1)]
    place, ranks = meeting_place(), procs.spawn("bench", Bench)
    arena = (await ranks.do.call("join", place, cfg.model_mb, cfg.seed, 4)).item(rank=0)
    late_ms = max([await ranks.slice(rank=i).do.call_one("attach", *arena) for i in range(1, 5)])
    rows = [await row(ranks, *road) for road in [  # rounds, name, generators
        (7, "no leases", 2), (7, "slots", 1), (7, "slots", 2), (7, "slots", 4),
        (3, "gloo broadcast", 2), (2, "RDMABuffer", 1)]]
    relay = relay_procs.spawn("relay", Relay, 0, ranks.slice(rank=0), "do", 2)
    await ranks.slice(rank=slice(1, 3)).do.call("attach", await relay.do.call_one("setup"))
    rows.append(await row(ranks, 7, "relay", 2))
    await asyncio.gather(procs.stop(), relay_procs.stop())
    report.table([f"{cfg.model_mb} MiB, generators", "ms", "x memmove", "trainer held ms",
                  "generator held ms", "torn reads"], ["memmove", rows[2].memmove, 1.0, "", "", ""],
                 *([*r[:5], f"{r.torn} of {r.reads}"] for r in rows))
    unsafe, one, two, four, group, direct, relayed = rows
    reads, torn = map(sum, zip(*((r.reads, r.torn) for r in (one, two, four, relayed))))
    mb, relay_ms = cfg.model_mb * MIB / 1e6, relayed.ms - two.ms  # what a relay adds
    report.figure(memmove_ms=two.memmove, pull_ms=four.generator, sync_over_memmove_1=one.ratio,
                  sync_over_memmove=two.ratio, sync_over_memmove_4=four.ratio, reads=reads,
                  trainer_held_ms=two.trainer, trainer_held_by_group_ms=group.trainer,
                  relay_gb_per_s=mb / relay_ms, gloo_gb_per_s=mb / group.ms, torn_reads=torn,
                  rdma_gb_per_s=mb / direct.ms, torn_reads_unsafe=unsafe.torn, late_join_ms=late_ms)
    report.check(f"torn reads without leases, of {unsafe.reads}", unsafe.torn, ">", 1)
    report.check(f"torn reads of live weights, of {direct.reads}", direct.torn, ">", 0)
    report.check(f"torn reads through slots, of {reads}", torn, "==", 0)
    # 5 ms: what does not depend on size, on a busy machine; the limits leave room for its noise
    report.check("sync with 4 generators / (memmove + 5 ms)", four.ms / (four.memmove + 5), "<", 3)
    report.check("sync of 4 generators / sync of 1", four.ms / one.ms, "<", 3)
    report.check("trainer held up, slots / broadcast", two.trainer / group.trainer, "<", 0.5)
    report.check("relay / one RDMABuffer, in GB/s", direct.ms / relay_ms, ">", 1)
    report.check("ms to join after version 50, slowest of 4", late_ms, "<", 1000)


# == 8. RESHARD ===================================================================================
# Problem. A trainer cuts each weight one way (FSDP: by rows), a generator another way (tensor
#   parallel: by columns). Gathering the whole first moves twice what is needed, or more, and plans
#   that take sizes to divide evenly lose what is left over.
# Rule. Say which boxes of the whole tensor each rank has. Where boxes of the two sides meet, there
#   is one move. On one host there is nothing to move: a slot holds whole tensors, each trainer rank
#   writes its boxes, each generator rank views its own. Between hosts all that one rank has for
#   another can travel as one parcel. (Here it is shown; stages 9 and 10 relay whole slots.)
# Cost. Rows of a view by columns are not adjacent. Parcels take the memory of what they carry.
# Not here. Expert parallel layouts; Partial placements (a trainer reduces them first).
# Source. DTensor placements; cross-mesh resharding (Zhuang, MLSys 2023).


# A cuboid of a tensor: its start and end in the whole; local: its start in what its rank has.
Box = collections.namedtuple("Box", "start end local", defaults=[(), (), ()])  # those of a scalar

# Elements of a tensor that one rank (of the source's side) has and another (of the target's) needs:
# where the first one lies in the whole, how many, where it lies in what each of the two has.
Move = collections.namedtuple("Move", "name source target offset size read_at write_at")

# Half a plan, by example: a matrix "w", 5 x 23, of a trainer by rows, of a generator by columns.
#
#     source 0 has   Box((0, 0), (3, 23), (0, 0))     target 0 needs   Box((0, 0), (5, 12), (0, 0))
#     source 1 has   Box((3, 0), (5, 23), (0, 0))     target 1 needs   Box((0, 12), (5, 23), (0, 0))
#
#     Move("w", source 0, target 1, offset (0, 12), size (3, 11), read_at (0, 12), write_at (0, 0))
#     Move("w", source 1, target 1, offset (3, 12), size (2, 11), read_at (0, 12), write_at (3, 0))


def region(offset: tuple, size: tuple): return tuple(slice(i, i + n) for i, n in zip(offset, size))


@functools.cache
def boxes(shape: tuple, mesh_shape: tuple, placements: tuple, at: tuple) -> list[Box]:
    """What the rank with these coordinates in the mesh has of a tensor that is placed so: the rules
    of DTensor's Shard, _StridedShard and Replicate, applied to the indices of each dimension."""
    indices = [torch.arange(n) for n in shape]
    for placement, num_ranks, i in zip(placements, mesh_shape, at):
        if not placement.is_replicate():
            parts = indices[placement.dim].chunk(getattr(placement, "split_factor", 1))
            # torch.chunk: all shards but the last ones have ceil(n / ranks); those may be empty
            indices[placement.dim] = torch.cat([
                part[torch.arange(len(part)) // -(-len(part) // num_ranks) == i] for part in parts])
    return [Box(*zip(*runs)) for runs in itertools.product(*map(runs_of, indices))]


def runs_of(index) -> list[tuple[int, int, int]]:
    """[n] rising -> of each run of consecutive ones: (its start, its end, its place in the n)"""
    cuts = [0, *((index.diff() != 1).nonzero()[:, 0] + 1).tolist(), len(index)]
    return [(int(index[i]), int(index[j - 1]) + 1, i) for i, j in itertools.pairwise(cuts) if i < j]


def layout(shape: tuple, mesh: tuple, placements: tuple) -> list[list[Box]]:
    """The boxes of every rank of a mesh of that shape."""
    return [boxes(shape, mesh, placements, at) for at in itertools.product(*map(range, mesh))]


def plan(name: str, source: list[list[Box]], target: list[list[Box]], sent=None) -> list[Move]:
    """Moves that give each target rank its boxes, every element once. Of ranks that have the same,
    the one read is the one with the least to send so far. Raises WeightMismatch if nobody has it,
    or if the two sides are not cut from tensors of the same shape."""
    # where the boxes of all ranks end: the shape of the whole, unless that is empty
    there, here = ([*map(max, zip(*(b.end for b in sum(side, []))))] for side in (source, target))
    demand(there == here, f"{name}: {there} there, {here} here")
    copies = {box: [i for i, held in enumerate(source) if box in held] for box in sum(source, [])}
    moves, sent = [], collections.Counter() if sent is None else sent  # elements, by source rank
    for rank, need in ((rank, need) for rank, needed in enumerate(target) for need in needed):
        missing = math.prod(map(operator.sub, need.end, need.start))
        for have, ranks in copies.items():
            low = tuple(map(max, have.start, need.start))
            size = tuple(min(ends) - i for i, *ends in zip(low, have.end, need.end))
            if min(size, default=1) <= 0: continue
            best = min(ranks, key=sent.__getitem__)
            at = [tuple(i - o + k for i, o, k in zip(low, b.start, b.local)) for b in (have, need)]
            moves.append(Move(name, best, rank, low, size, *at))
            sent[best] += math.prod(size)
            missing -= math.prod(size)
        demand(missing == 0, f"{name}: {missing} elements of {need} are nowhere")
    return moves


def placed(tensor) -> tuple[tuple, tuple, tuple]:
    """How a DTensor is cut, and where this process is in its mesh: the last three arguments of
    `boxes`. A plain tensor is one that a mesh of no dimensions leaves whole."""
    mesh = getattr(tensor, "device_mesh", None)
    return (mesh.shape, tensor.placements, tuple(mesh.get_coordinate())) if mesh else ((), (), ())


def box_parts(view, tensor) -> list[tuple]:
    """[(part of the slot's view of a whole tensor, the same of what this process has of it)]"""
    mine, held = local(tensor), boxes(tensor.shape, *placed(tensor))
    return [(part := view[tuple(map(slice, box.start, box.end))],
             mine if len(held) == 1 else mine[region(box.local, part.shape)]) for box in held]


# Who waits for whom, in a trainer of two ranks; time goes to the right:
#
#     rank 0       step 7 | forward, backward .................................... | wait | step 8
#       a thread          | names slot 2, writes its boxes | waits for word of 1 | latest = 7 |
#     rank 1       step 7 | forward, backward .................................... | wait | step 8
#       a thread          | waits for the name | writes its boxes | its word = 7 |


class ShardWriter(WeightWriter):
    """One rank of a sharded trainer: all write their boxes into the same slot, as drawn above."""

    # The word -1 - rank holds version and slot: of rank 0 what to write, of another what it wrote.
    FAILED = 1 << 62  # that rank's copy raised

    def __init__(self, tensors, num_readers: int, rank: int, num_ranks: int, handle=None):
        """tensors: DTensors, or plain ones, the same on all ranks. handle: for all but rank 0."""
        super().__init__(tensors, num_readers, arena=handle and Arena.attach(handle, tensors))
        self.rank, self.words = rank, self.arena.words
        self.others = () if rank else range(1, num_ranks)  # whose boxes rank 0 waits for

    @classmethod
    def join(cls, tensors, num_readers: int, rank: int, num_ranks: int) -> ShardWriter:
        """Of all ranks of a process group: the arena is rank 0's, and it tells the others."""
        writer = None if rank else cls(tensors, num_readers, rank, num_ranks)
        handle = [writer and writer.arena.handle]
        if num_ranks > 1: torch.distributed.broadcast_object_list(handle, 0)
        return writer or cls(tensors, num_readers, rank, num_ranks, *handle)

    def parts(self, view, tensor) -> list[tuple]:
        _, cuts, at = placed(tensor)  # without cuts: of a buffer, say, every rank has a copy
        copies = [i for cut, i in zip(cuts, at) if cut.is_replicate()] if cuts else [self.rank]
        return [] if any(copies) else box_parts(view, tensor)  # the first copy is written

    def _copy(self, version: int) -> None:
        try:
            if not self.rank: self.words[-1] = version * Arena.MAX_SLOTS + self.arena.free_slot()
            word = self._word_of(0, version)
            self._write(word % Arena.MAX_SLOTS)
            for rank in self.others: self._word_of(rank, version)
            self.words[-1 - self.rank if self.rank else Arena.LATEST] = word  # rank 0 commits
        except Exception:  # whoever waits for my word must not wait forever
            self.words[-1 - self.rank] = self.FAILED
            raise

    def _word_of(self, rank: int, version: int) -> int:
        """Waits until that rank has come to this version."""
        while (word := self.words[-1 - rank]) // Arena.MAX_SLOTS < version: time.sleep(0.0002)
        demand(word != self.FAILED, f"arena: the copy of rank {rank} failed")
        return word


# One rank of a sharded generator: its DTensors become views of its boxes.
class ShardReader(WeightReader): parts = staticmethod(box_parts)


class Parcel:
    """All that one rank has for another, in one buffer, the widest dtype first: all are aligned."""

    def __init__(self, moves: list[Move], tensors: dict, pair: tuple[int, int], sending: bool):
        """moves: of all ranks, the same on both sides; pair: (source, target) of this one."""
        parts = sorted((local(tensors[m.name])[region(m.read_at if sending else m.write_at, m.size)]
                        for m in moves if (m.source, m.target) == pair), key=lambda p: -p.itemsize)
        self.buffer = torch.zeros(sum(part.nbytes for part in parts), dtype=torch.uint8)
        rooms = self.buffer.split([part.nbytes for part in parts])
        packed = [room.view(part.dtype).view(part.shape) for room, part in zip(rooms, parts)]
        self.pairs = [*zip(packed, parts)] if sending else [*zip(parts, packed)]  # (to, from)

    def copy(self) -> None:  # packs, or unpacks; may run in a thread
        for to, source in self.pairs: to.copy_(source)


async def receive(parcels: list[Parcel], handles: list[tuple]) -> None:
    """Reads parcels; each is unpacked in a thread while the next is read."""
    unpacking = []
    for parcel, handle in zip(parcels, handles):
        await read_pieces(handle, parcel.buffer)
        unpacking.append(asyncio.get_running_loop().run_in_executor(None, parcel.copy))
    await asyncio.gather(*unpacking)


class Cutter(Rank):
    """One rank of a trainer and one of a generator, as where both share GPUs: each has every matrix
    by rows, [0], and by columns, [1]. An element of version v is its index modulo 120, plus v."""

    async def join(self, place: str, shapes: dict[str, tuple[int, int]]) -> None:
        form_group(place, self.rank, 2)
        mesh, cuts = dtensor.init_device_mesh("cpu", (2,)), [(dtensor.Shard(i),) for i in (0, 1)]
        self.have, self.got = ([{name: dtensor.distribute_tensor(
            (torch.arange(math.prod(shape)) % 120).bfloat16().view(shape), mesh, cut)
            for name, shape in shapes.items()} for cut in cuts] for _ in (0, 1))
        self.end = ShardWriter.join(self.have[0], 2, self.rank, 2)
        self.reader = ShardReader(self.end.arena.handle, self.rank, self.got[0])
        # block: a slot never written, for both leases name the latest; spans: [source][target]
        sent, self.spans, self.block = collections.Counter(), [None] * 2, self.end.arena.slots[-1]
        moves = [move for name, shape in shapes.items() for move in plan(
            name, *(layout(shape, (2,), cut) for cut in cuts), sent)]
        self.sending = [Parcel(moves, self.have[0], (self.rank, i), True) for i in (0, 1)]
        self.reading = [Parcel(moves, self.got[1], (i, self.rank), False) for i in (0, 1)]
        torch.distributed.all_gather_object(self.spans, [pieces_of(p.buffer) for p in self.sending])

    def step(self) -> None:
        self.version += 1
        for tensor in [*self.have[0].values(), *self.have[1].values()]: local(tensor).add_(1)

    # The roads, by the dimensions along which both sides are cut. Each returns bytes sent to me.

    async def gather(self, source: int, target: int) -> int:
        """The usual way: the trainer's ranks tell each other all, cut that, and pass it on."""
        for name, there in self.have[source].items():
            local(self.got[target][name]).copy_(there.full_tensor().chunk(2, target)[self.rank])
        return 2 * sum(local(tensor).nbytes for tensor in self.got[target].values())

    async def parcels(self, *_) -> int:
        """By rows to by columns. Not after `slots`, which points the tensors elsewhere."""
        for parcel in self.sending: parcel.copy()
        torch.distributed.barrier()
        await receive(self.reading, [of_source[self.rank] for of_source in self.spans])
        return sum(parcel.buffer.nbytes for parcel in self.reading)

    async def slots(self, source: int, target: int) -> int:
        """The generator looks every half millisecond until it has this version."""
        self.end.tensors, self.reader.tensors = self.have[source], self.got[target]
        self.end.publish(self.version)
        while self.reader.pull() < self.version: time.sleep(0.0005)
        return 0

    async def num_right(self, by: int) -> int:
        """The tensors of this generator that are what a trainer cut like it has."""
        return sum(torch.equal(local(t), local(self.have[by][k])) for k, t in self.got[by].items())


async def demo_reshard(report: Report, cfg: Config) -> None:
    """from sharding A to sharding B every needed byte moves exactly once
    try: `len(part) // num_ranks` in `boxes`, rounded down: `plan` finds a column missing"""
    shapes = {f"layer.{i}": (cfg.model_mb * MIB // (8 * 2 * 1025) + i, 1025) for i in range(8)}
    needed = sum(2 * math.prod(shape) for shape in shapes.values())  # bytes
    report.say("a trainer and a generator of two ranks each (at 64 MiB about 10 s)")
    procs, place = this_host().spawn_procs(per_host={"rank": 2}), meeting_place()
    ranks, rows, wrong = procs.spawn("cutter", Cutter), [], 80
    await ranks.do.call("join", place, shapes)
    by = "rows", "columns"  # 0, 1: how the trainer has it cut, and how the generator wants it
    roads = [("gather", 0, 1), ("parcels", 0, 1), ("slots", 0, 1), ("slots", 1, 0), ("slots", 0, 0)]
    for road, a, b in roads:
        # the first round touches pages, and connects: the median hides it
        ms, memmove_ms, (*_, moved) = await measure(ranks, 7, road, a, b)
        wrong -= sum((await ranks.do.call("num_right", b)).values())
        rows.append([f"{by[a]} to {by[b]}, {road}", ms, ms / memmove_ms, sum(moved) / needed or ""])
    await procs.stop()
    report.table(["trainer to generator", "ms", "x memmove", "bytes sent / needed"], *rows)
    gather, parcels, there, back, same = rows
    slower = max(there[2], back[2])  # x memmove: it was measured in the same rounds
    report.figure(reshard_over_same=slower / same[2], reshard_over_memmove=slower,
                  gather_over_reshard=gather[1] / there[1], moved_over_needed=parcels[3])
    report.check("tensors of 80 that are wrong", wrong, "==", 0)
    report.check("bytes that parcels moved / needed", parcels[3], "==", 1.0)
    report.check("gather / slots, in time", gather[1] / there[1], ">", 1)
    report.check("another layout / the same, in x memmove", slower / same[2], "<", 5)


# == 9. SYNC RL ===================================================================================
# Problem. In RL the policy makes its own training set, so the same network runs in two programs:
#   one decodes token by token with a cache, the other scores whole sequences for a gradient. If
#   they disagree about a probability, or about what was sampled, the gradient is nobody's.
# Rule. One loop: pull, sample, judge, step, publish. Every sampled token keeps the version and the
#   log-probability that it was sampled with; the loss compares with these, and at lag 0 the trainer
#   finds the same. Only sampled tokens carry loss. A new turn starts from the exact ids of the
#   turns before. A reward function is somebody else's code: it runs where it can be killed; not
#   judged is not 0. Every n steps all that the run needs is saved, whole or not at all.
# Cost. Each side waits while the other works (section 10).
# Not here. Value networks, reward models, sandboxes for tools.
# Source. REINFORCE (Williams 1992), PPO (Schulman 2017), group advantage (GRPO, Shao 2024).

GROUPS_PER_BATCH = 16  # prompts per training step
GROUP_SIZE = 8  # episodes per prompt; of fewer the mean is a poor baseline
MAX_GRAD_NORM = 1.0
MAX_K3 = {"cpu": 1e-6, "cuda": 1e-2}  # between the two programs, by rounding: in fp32, in bf16
MAX_LOGITS = 1 << 27  # that a forward pass of the trainer may make: half a GiB in fp32

# A conversation to be had: an id, which is also the group id of its episodes, and of each turn what
# the user says and what would be right, as in (("abc", "abc"), ("dfa", "dfa")).
Prompt = collections.namedtuple("Prompt", "id turns")


class Task:
    """What is to be learned. For one of your own write a subclass into a file and say --task
    FILE.py:CLASS (DOCS 7). `user` runs in generators, `score` in judges."""

    instruction = ""  # for pretrained models; the tiny policy sees examples instead
    letters = "abcdefghijklmnop"  # a token each: all that the tiny policy can hear and say
    num_turns, max_new_tokens = 2, 4  # tokens of a turn: a letter each, and the end

    def conversation(self, rng: random.Random) -> tuple[tuple[str, str], ...]:
        """Draws the turns of a Prompt."""

    def user(self, turns, said: list[str]) -> str | None:
        """The user's words after these answers, on which they may depend; None ends it here."""
        return turns[len(said)][0]

    def score(self, turns, said: list[str]) -> list[float]:
        """A reward per turn; only right ones add up to 1. Here: shares of right letters."""
        return [sum(map(operator.eq, right, text)) / max(len(right), len(text)) / self.num_turns
                for (_, right), text in itertools.zip_longest(turns, said, fillvalue="")]


class Shift(Task):
    """Answers to a letter are those so many places on: [1, 2, 3] makes "bcd" of a, "abc" of p."""

    def __init__(self, instruction: str, places_on: list[int], num_turns: int = 2):
        self.instruction, self.places_on, self.num_turns = instruction, places_on, num_turns

    def conversation(self, rng: random.Random) -> tuple[tuple[str, str], ...]:
        ring, num_letters = 2 * self.letters, 3 // len(self.places_on)
        texts = ["".join(rng.choices(self.letters, k=num_letters)) for _ in range(self.num_turns)]
        return tuple((text, "".join(ring[ring.index(letter) + by] for letter in text
                                    for by in self.places_on)) for text in texts)


TASKS = {"repeat": Shift("Repeat exactly what I say.", [0]),
         "count": Shift("I say a letter, a to p; say the next three (a follows p).", [1, 2, 3], 3),
         "pattern": Shift("For each letter, a to p, say the one 8 places on (a follows p).", [8])}


def task_of(name: str) -> Task:
    """A built-in one, or an object of somebody's class."""
    path, _, kind = name.rpartition(":")
    return runpy.run_path(path)[kind]() if path else TASKS[name]


class Sampler:
    """Draws prompts to train on, but none of up to 512 that are set aside, the same for all seeds
    and processes: `heldout` for figures; `validation` decides when a warm start is over."""

    def __init__(self, cfg: Config):
        # num_drawn: all that the next prompt depends on, beside the seed
        self.task, self.seed, self.num_drawn = task_of(cfg.task), cfg.seed, 0
        rng = random.Random("held out")
        some = [*dict.fromkeys(self.task.conversation(rng) for _ in range(2000))]  # distinct
        kept = [Prompt(-1 - i, turns) for i, turns in enumerate(some[: min(512, len(some) // 2)])]
        self.heldout, self.validation, self.never = kept[::2], kept[1::2], {p.turns for p in kept}

    def draw(self, num_prompts: int) -> list[Prompt]:
        prompts = []
        while len(prompts) < num_prompts:
            turns = self.task.conversation(random.Random(f"{self.seed} {self.num_drawn}"))
            if turns not in self.never: prompts.append(Prompt(self.num_drawn, turns))
            self.num_drawn += 1
        return prompts


class Rollout(collections.namedtuple("Rollout", "ids mask turns logprobs versions rewards "
                                     "group_ids prompts answers")):
    """Episodes as tensors, B rows of T columns. A row is a conversation in order, with holes where
    another row's turn is longer; a hole is masked and has no position. So all rows have their turns
    in the same columns: one batch and one cache do for rows of any length, and no row is ever
    shifted or tokenized again. Two rows (u: the user's words; <a> begins and <e> ends the
    assistant's turn; letters are sampled; a dot is a hole):

        ids        <u> u u u <e> <a>  a b c <e>   .   <u> u u u <e> <a>  d e f <e>
                   <u> u u u <e> <a>  a <e> .  .  .   <u> u u u <e> <a>  d e f g
        turns       .  . . .  .   .   1 1 1  1    .    .  . . .  .   .   2 2 2 2
        position    0  1 2 3  4   5   6 7 8  9    .   10 ...             (holes are skipped)

    ids, mask: [B, T] int64; mask 1 = token, 0 = hole. turns: [B, T] int64, in which turn the policy
    chose the token; 0 = it did not, and nothing else carries loss. logprobs: [B, T] float32, with
    which it was chosen. versions: [B, T] int64, of the weights that chose it. rewards: [B, turns]
    float32. group_ids: [B] int64; a group's rows need not be neighbours. answers: [B][turn]."""

    @staticmethod
    def join(parts: list[tuple[Rollout, list[int]]]) -> Rollout:
        """The given rows of the given rollouts as one batch."""
        width, pad = max(r.ids.shape[1] for r, _ in parts), torch.nn.functional.pad
        *columns, rewards, ids = zip(*([field[rows] for field in r[:-2]] for r, rows in parts))
        wide = (torch.cat([pad(c, (0, width - c.shape[1])) for c in column]) for column in columns)
        talks = ((r.prompts[row], r.answers[row]) for r, rows in parts for row in rows)
        return Rollout(*wide, torch.cat(rewards), torch.cat(ids), *map(list, zip(*talks)))


def packed(mask, *columns) -> list:
    """[B, T] each -> [B, longest row] each: holes only at the ends, where none is looked at."""
    kept = mask.argsort(dim=1, descending=True, stable=True)[:, : int(mask.sum(1).max())]
    return [column.gather(1, kept) for column in columns]


class Policy:
    """A causal language model, its tokenizer, and the chat template that makes ids of speech."""

    def __init__(self, cfg: Config):
        torch.manual_seed(cfg.seed)
        self.cfg, self.task, tiny = cfg, task_of(cfg.task), cfg.model == "tiny"
        if tiny: self.tokenizer, self.model = tiny_policy(self.task.letters)
        else:
            dtype = torch.float32 if cfg.device == "cpu" else torch.bfloat16
            self.tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
            self.model = transformers.AutoModelForCausalLM.from_pretrained(cfg.model, dtype=dtype)
        self.model.to(cfg.device).eval()  # dropout would make the two programs disagree
        self.stop_id = self.tokenizer.eos_token_id
        self.tokenizer.pad_token = self.tokenizer.eos_token  # fills holes; never looked at
        # Pretrained tokenizers may need several tokens for a letter.
        self.max_new_tokens = self.task.max_new_tokens * (1 if tiny else 3)
        self.context = self.model.config.max_position_embeddings  # tokens
        # What the chat template puts around the user's words. So only the new turn is tokenized:
        # ids made text and ids again need not be the ids that were sampled.
        chat = [{"role": role, "content": "SAID"} for role in ("user", "assistant", "user")]
        whole = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        self.head, _, self.later_head, self.tail = whole.split("SAID")
        self.head += "" if tiny else f"{self.task.instruction}\n"

    def text(self, ids: list[int]) -> str:
        """Sampled ids, up to the end of the turn, as text; a '+' says that there was no end."""
        end = ids.index(self.stop_id) if self.stop_id in ids else None
        return self.tokenizer.decode(ids[:end]).strip() + ("+" if end is None else "")


def log_softmax(model, ids, chosen):
    """[B, T] packed ids, [B, T-1] bool -> [N, V] float32, the log-probabilities of what follows at
    N places. In bf16 the probabilities would miss summing to 1 by 1e-3."""
    return model(input_ids=ids[:, :-1], use_cache=False).logits[chosen].float().log_softmax(-1)


def tiny_policy(letters: str) -> tuple:
    """A tokenizer with a token per letter and three special ones, which merges no pairs of bytes,
    and 30 k parameters of Qwen2's kind: real attention and a real cache at laptop speed."""
    tokens = ["<user>", "<assistant>", "<end>", *letters]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    tokenizer = transformers.Qwen2Tokenizer(
        {token: i for i, token in enumerate(tokens)}, [], extra_special_tokens=tokens[:2],
        unk_token="<end>", eos_token="<end>", chat_template=template)
    return tokenizer, transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=len(tokens),
        hidden_size=40, intermediate_size=80, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, tie_word_embeddings=True, attn_implementation="eager"))


class Decoder:
    """Converses, one token per row and step, with a KV cache."""

    def __init__(self, policy: Policy, num_rows: int, group_size=1, seed=0, greedy=True, pull=int):
        """pull: makes the policy's weights those to sample with, and tells their version."""
        self.policy, self.group_size, self.greedy, self.pull = policy, group_size, greedy, pull
        self.turn, self.version = 0, -2  # turn counts from 1; -1 is that of no weights
        self.rng = torch.Generator(policy.cfg.device).manual_seed(seed)
        none = torch.zeros(num_rows, 0, dtype=torch.int64, device=policy.cfg.device)
        self.columns = [none, none, none, none.float(), none]  # ids to versions, see Rollout
        # [B] bool: whose turn goes on; whose conversation is over; whose next turn had no room
        self.alive, self.over, self.cut = none.any(1), none.any(1), none.any(1)

    def append(self, ids, mask, turn: int, logprobs=0.0) -> None:
        """ids, mask, logprobs: [B, L] each; turn: in which the policy chose them, or 0."""
        new = ids, mask, mask * turn, mask * logprobs, mask * self.version
        self.columns = [torch.cat([old, more], 1) for old, more in zip(self.columns, new)]

    def hear(self, texts: list[str | None]) -> None:
        """The user's turn, a text per row; None ends the row's conversation, and so does a turn
        that leaves no room in the model's context. Where the template begins it with the token that
        ends the assistant's, rows that sampled it get a hole: they have it already."""
        policy, device = self.policy, self.policy.cfg.device
        self.turn += 1
        self.over |= torch.tensor([text is None for text in texts], device=device)
        some = {text: i for i, text in enumerate(dict.fromkeys(text or "" for text in texts))}
        head = policy.head if self.turn == 1 else policy.later_head
        out = policy.tokenizer([head + text + policy.tail for text in some], return_tensors="pt",
                               add_special_tokens=False, padding=True, padding_side="left")
        # [B, L] each, with holes on the left, so that all rows end together and sampling can begin
        which = torch.tensor([some[text or ""] for text in texts])
        ids, mask = (out[name][which].to(device) for name in ("input_ids", "attention_mask"))
        begin = mask.argmax(1, True)  # [B, 1], the column of each row's first token
        twice = (ids.gather(1, begin) == policy.stop_id) & ~self.alive[:, None] & (self.turn > 1)
        mask.scatter_(1, begin, (~twice).long())
        length = self.columns[1].sum(1) + mask.sum(1) + policy.max_new_tokens
        self.cut |= (length > policy.context) & ~self.over
        self.over |= self.cut
        self.append(ids, mask * ~self.over[:, None], 0)

    def speak(self) -> list[str]:
        """The assistant's turn, until every row has ended it; what each row said."""
        model, stop = self.policy.model, self.policy.stop_id
        start, self.alive = self.columns[0].shape[1], ~self.over
        while self.alive.any() and self.columns[0].shape[1] - start < self.policy.max_new_tokens:
            if (version := self.pull()) != self.version:
                # From here on tokens carry this version, earlier ones theirs. The cache is old.
                self.version, self.cache = version, transformers.DynamicCache(config=model.config)
            # The rows of a group begin alike: what they hear first is computed once.
            repeats = 1 if self.turn > 1 or self.columns[0].shape[1] > start else self.group_size
            ids, mask = (column[::repeats] for column in self.columns[:2])
            new = ids.shape[1] - self.cache.get_seq_length()  # columns that the cache lacks
            # Holes have no position.
            out = model(ids[:, -new:], attention_mask=mask, past_key_values=self.cache,
                        position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -new:], logits_to_keep=1)
            if repeats > 1: self.cache.batch_repeat_interleave(repeats)
            logp = out.logits[:, -1].float().log_softmax(-1).repeat_interleave(repeats, 0)  # [B, V]
            token = (logp.argmax(-1, True) if self.greedy
                     else torch.multinomial(logp.exp(), 1, generator=self.rng))
            on = self.alive[:, None]  # [B, 1]; rows that have ended get a hole
            self.append(token.where(on, stop), on.long(), self.turn, logp.gather(1, token))
            self.alive = self.alive & (token[:, 0] != stop)
        return [self.policy.text(row) for row in self.columns[0][:, start:].tolist()]


def generate(policy: Policy, prompts, group_size: int, seed=0, greedy=True, pull=int) -> tuple:
    """Has each conversation group_size times: (Rollout, without rewards yet, and how many did not
    fit into the model's context: they end early and carry no loss)."""
    rows = [prompt for prompt in prompts for _ in range(group_size)]
    decoder, said = Decoder(policy, len(rows), group_size, seed, greedy, pull), [[] for _ in rows]
    with torch.inference_mode():
        for _ in range(policy.task.num_turns):
            decoder.hear([policy.task.user(p.turns, so_far) for p, so_far in zip(rows, said)])
            for so_far, text, over in zip(said, decoder.speak(), decoder.over.tolist()):
                if not over: so_far.append(text)
        decoder.columns[2][decoder.cut] = 0
    return Rollout(*(column.cpu() for column in decoder.columns), None,
                   torch.tensor([prompt.id for prompt in rows]), rows, said), int(decoder.cut.sum())


def warm_start(policy: Policy) -> None:
    """Supervised steps until the policy is bad but not hopeless: from random weights RL has nothing
    to reinforce. In the answers that it learns from, one letter in ten is wrong."""
    sampler, rng, task = Sampler(policy.cfg), random.Random(policy.cfg.seed), policy.task
    found, optimizer = 0.0, torch.optim.AdamW(policy.model.parameters(), 6e-4, weight_decay=0.0)
    for num_steps in range(1000):
        decoder = Decoder(policy, 64)  # says what it is given
        for pairs in zip(*(prompt.turns for prompt in sampler.draw(64))):
            decoder.hear([said for said, _ in pairs])
            noisy = ["".join(rng.choice(task.letters) if rng.random() < 0.1 else c for c in right)
                     + "<end>" for _, right in pairs]
            out = policy.tokenizer(noisy, return_tensors="pt", padding=True).to(policy.cfg.device)
            decoder.append(out["input_ids"], out["attention_mask"], decoder.turn)
        ids, turns = packed(decoder.columns[1], decoder.columns[0], decoder.columns[2])
        # -100: not to be learned
        policy.model(ids, labels=ids.where(turns > 0, -100), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if num_steps % 5 == 0 or found > 0.02:  # near the end it rises by 0.05 a step
            answers = generate(policy, sampler.validation, 1)[0].answers
            found = statistics.fmean(sum(task.score(prompt.turns, said)) > 0.999
                                     for prompt, said in zip(sampler.validation, answers))
        if found >= 0.11: return  # seldom right: room to learn, and something to learn from
    raise RuntimeError(f"warm start: {found:.2f} exact after {num_steps + 1} steps, not 0.11")


# Why a baseline. The gradient of the expected reward is E[A grad log pi], whatever A is reduced
# by, as long as that does not depend on the answer. The mean over answers to the same prompt costs
# no second network and removes what is due to the prompt: that a prompt is easy does not teach that
# all its answers are good. (An answer is in its own mean, which shrinks A; not with leave_one_out.)
BASELINES = ["group", "none", "batch", "leave_one_out"]


def advantages(returns, group_ids, baseline: str = "group"):
    """[B, turns] rewards from a turn on -> [B, turns] float32, how much better they were than
    expected; with `group` and `batch` in standard deviations (GRPO), else as they are (RLOO).
    Groups are found by id: found by position, one lost row would mix all later groups."""
    same = (group_ids[:, None] == group_ids).double()  # [B, B]
    if baseline == "none": return returns
    if baseline == "batch": same.fill_(1)
    if baseline == "leave_one_out": same.fill_diagonal_(0)
    same /= same.sum(1, keepdim=True).clamp(min=1)  # times a [B] it averages, row by row
    centred = returns.double() - same @ returns.double()
    deviation = (same @ centred**2).sqrt() + 1e-4  # a group without any teaches nothing: 0
    return (centred if baseline == "leave_one_out" else centred / deviation).float()


# Losses: [N] each, pi, mu, near, advantage -> (loss, bool: too far off, so without gradient). The
# log-probabilities of N sampled tokens: pi under the policy in training; mu as recorded when the
# token was sampled; near under the policy as it was before the first update with this batch. Where
# the three are equal, so are the gradients of all losses. (pi > 0 holds nowhere: none is too far.)
CLIP = 0.2  # how far a token's probability may move, as a ratio, before its gradient stops
MAX_WEIGHT = 2.0  # larger importance weights are cut off, or a few tokens would outweigh all others
MAX_SHIFT = 0.2  # how far a token's probability may move, as a difference


def reinforce_loss(pi, mu, near, advantage): return -advantage * pi, pi > 0


def ppo_loss(pi, mu, near, advantage):
    # Once a token has become 1 + CLIP times as likely (or 1 - CLIP times, if it was bad), the batch
    # says nothing more about it: its samples came from a policy that is too far away by now.
    ratio = (pi - mu).exp()
    outside = torch.where(advantage > 0, ratio > 1 + CLIP, ratio < 1 - CLIP)
    return -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)), outside


def decoupled_loss(pi, mu, near, advantage):
    # How old the samples are is one question, how far these updates go another (AReaL).
    loss, outside = ppo_loss(pi, near, near, advantage)
    return loss * (near - mu).exp().clamp(max=MAX_WEIGHT), outside


def cispo_loss(pi, mu, near, advantage):
    # The weight is cut off, not the gradient: every token counts (MiniMax-M1).
    return -advantage * (pi.detach() - mu).exp().clamp(max=MAX_WEIGHT) * pi, pi > 0


def dppo_loss(pi, mu, near, advantage):
    # As ppo, by the difference: for a rare token a ratio of 2 is nothing, for a frequent one 1.2 is
    # much. Inside, a small pull back to where the sample came from.
    shift = (pi.exp() - mu.exp()).detach()
    outside = torch.where(advantage > 0, shift > MAX_SHIFT, shift < -MAX_SHIFT)
    return (0.05 * (pi - mu) ** 2 - advantage * (pi - mu).exp()) * ~outside, outside


LOSSES = {name[:-5]: loss for name, loss in globals().items() if name.endswith("_loss")}


def k3(recorded, recomputed):
    """[N] log-probabilities -> [N] float64, exp(d) - 1 - d: their mean is an estimate of the KL
    divergence that is never negative (Schulman 2020, who calls -d k1 and d**2 / 2 k2)."""
    d = (recomputed - recorded).detach().double()
    return d.exp() - 1 - d


# What one training step knows about itself, of its batch on all ranks. version: after it; lag: of
# tokens, in versions; mismatch_k3: recorded against recomputed, tokens of lag 0 only, -1 if there
# are none; ess: effective sample size of the importance weights; clipped: tokens without gradient;
# both as shares of the num_tokens sampled; entropy in nats per token; kl: to the reference, k2, in
# nats per token; grad_norm before clipping; skipped: updates left out because that was not finite;
# stall_s: waits for copies, of step_s; it and skipped: all passes; k3, ess: first; rest: last.
StepStats = collections.namedtuple("StepStats", """version reward lag_mean lag_max loss mismatch_k3
    ess entropy clipped kl grad_norm num_tokens skipped stall_s step_s""")


class TrainerLost(RuntimeError):
    """The trainer has died or hung; there may be another one, which has not begun."""


def about(cfg: Config) -> dict:
    """What a checkpoint must have been made by for this run to go on from it."""
    return {"format": 1, "task": cfg.task, "model": cfg.model, "seed": cfg.seed}


def read_checkpoint(path: str | bytes, cfg: Config) -> dict:
    """What `Trainer.save` gave; nothing in it is executed. A ValueError says what is wrong."""
    try:  # torch.load compares no checksums
        with open(path, "rb") if isinstance(path, str) else io.BytesIO(path) as file:
            if damaged := zipfile.ZipFile(file).testzip(): raise ValueError(f"damaged in {damaged}")
            file.seek(0)
            found = torch.load(file, weights_only=True)
        if found["about"] == about(cfg): return found
        raise ValueError(f"made with {found['about']}, this run has {about(cfg)}")
    except Exception as error:  # whatever a strange file does to these
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"{path!s:.200}: no checkpoint for this run: {why}") from error


class Vault:
    """A run's newest two checkpoints, in a folder, or in memory, in files without a name."""

    def __init__(self, folder: str = ""):
        self.folder = folder
        if folder: os.makedirs(folder, exist_ok=True)
        paths = sorted(pathlib.Path(folder).glob("step-*.pt"), reverse=True) if folder else []
        self.kept = [(str(path), None) for path in paths]  # (path, or file in memory), newest first

    def newest(self, cfg: Config, say) -> str:
        """The path of the newest that can be read; "" if there are none; ValueError if none can."""
        for path, _ in self.kept:
            try: return read_checkpoint(path, cfg) and path
            except ValueError as error:
                if path == self.kept[-1][0]: raise
                say(f"not used: {error}")
        return ""

    def room(self) -> tuple:
        """Where to write the next one; in a folder over one that was cut off. (path, file)"""
        if self.folder: return f"{self.folder}/unfinished", None
        file = open(os.memfd_create("checkpoint"), "rb")
        return f"/proc/{os.getpid()}/fd/{file.fileno()}", file

    def keep(self, room: tuple, step: int) -> None:
        """It is complete: when it is on the disk, and not before, it becomes the newest."""
        with open(room[0], "rb") as file: os.fsync(file.fileno())
        if self.folder:
            room = str(pathlib.Path(room[0]).replace(f"{self.folder}/step-{step:08d}.pt")), None
            folder = os.open(self.folder, os.O_RDONLY)
            os.fsync(folder)  # the new name too
            os.close(folder)
        others = [old for old in self.kept if old[0] != room[0]]
        self.kept = [room, *others[:1]]  # a file without a name goes when nobody has it open
        for path, _ in others[1:] if self.folder else (): os.remove(path)


# Rows of a batch for one forward pass. ids: [b, t], packed; chosen: [b, t-1] bool, where the next
# one was sampled; of these N tokens [N] each: mu (see LOSSES), advantage, fresh: bool, of lag 0.
Part = collections.namedtuple("Part", "ids chosen mu advantage fresh")


class Trainer(Worker):
    """Owns the weights: warm-starts, steps, publishes. With several ranks each owns a part of every
    weight, gradient and moment (FSDP2) and scores a part of each batch; calls go to all of them."""

    version, writer, optimizer, schedule, bonus = -1, None, [], None, 0.0

    async def setup(self) -> str:
        self.cfg = self.cfg._replace(device=device_of(self.cfg, "trainer", self.rank))
        self.policy = Policy(self.cfg)
        if self.cfg.device != "cpu": torch.cuda.set_device(self.cfg.device)  # FSDP2 and streams ask
        # whole tensors, on the CPU of rank 0, however many ranks there are
        self.whole = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        return self.cfg.device

    async def meet(self) -> str: return meeting_place()

    async def begin(self, place: str, warm: bool) -> ArenaHandle:
        """Where it publishes. place: where the ranks meet. One that has begun only answers."""
        cfg, model = self.cfg, self.policy.model
        if not self.writer:
            if warm and cfg.model == "tiny": warm_start(self.policy)
            self.reference = copy.deepcopy(model).requires_grad_(False) if cfg.kl else None
            if cfg.trainers > 1:  # all ranks have the same weights until now
                form_group(place, self.rank, cfg.trainers)
                mesh = dtensor.init_device_mesh(cfg.device.split(":")[0], (cfg.trainers,))
                for each in filter(None, (model, self.reference)):
                    # else one that had no backward pass stays whole, which `load` cannot fill
                    fsdp.fully_shard(each, mesh=mesh, reshard_after_forward=True)
            # generators of this host, and then a relay of each other one
            num_readers = generators_per_host(cfg) + len(hosts_of(cfg)) - 1
            self.writer = ShardWriter.join(weights_of(model), num_readers, self.rank, cfg.trainers)
        return self.writer.arena.handle

    async def remote(self, relay: int) -> RemoteHandle:
        if not self.writer: raise TrainerLost
        return remote_handle(self.writer.arena, generators_per_host(self.cfg) + relay)

    async def save(self, path: str, state: str) -> bytes:
        """Writes a checkpoint, or without a path returns it; without a state only the weights."""
        if not self.writer: raise TrainerLost  # this was meant for the one before
        optimizer, schedule = (self.optimizer, self.schedule.state_dict()) if state else ([], None)
        weights, moments = dcp.get_state_dict(self.policy.model, optimizer, options=self.whole)
        if self.rank: return b""
        with open(path, "wb") if path else io.BytesIO() as file:
            torch.save(dict(about=about(self.cfg), version=self.version, state=state,
                            weights=weights, moments=moments, schedule=schedule), file)
            return b"" if path else file.getvalue()

    async def load(self, path: str | bytes, start: str | bytes, cfg: Config) -> tuple[int, str]:
        """Becomes what a checkpoint says, for a run with this Config, and publishes that: version,
        state of the run. start: of version 0. After a ValueError nothing has changed."""
        await self.published()
        found, model = read_checkpoint(path, cfg), self.policy.model
        trained, first = found["schedule"], read_checkpoint(start, cfg)["weights"] if cfg.kl else {}
        self.cfg = cfg._replace(device=self.cfg.device)
        rate = cfg.lr or (1e-3 if cfg.model == "tiny" else 1e-6)
        # Without a bonus a wrong letter that a whole group agrees on is never tried otherwise.
        self.bonus = cfg.entropy if cfg.entropy >= 0 else 0.01 * (cfg.model == "tiny")
        self.optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.0, fused=True)
        # In the last quarter the rate falls to 0, for with a constant one a run may end in a dip.
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda done: min(1.0, 4 * max(0.0, 1 - done / cfg.steps)))
        dcp.set_state_dict(model, self.optimizer if trained else [], options=self.whole,
                           model_state_dict=found["weights"], optim_state_dict=found["moments"])
        if trained: self.schedule.load_state_dict(trained)
        if first: dcp.set_model_state_dict(self.reference, first, options=self.whole)
        self.version = max(self.version + 1, found["version"])
        self.writer.start(self.version)
        return self.version, found["state"]

    async def published(self) -> int:
        """This trainer's version, when generators can pull it."""
        if not self.writer: raise TrainerLost
        self.writer.wait()
        return self.version

    async def step(self, batch: Rollout) -> StepStats:
        """Trains on a batch; a thread copies the result, for which the next update waits."""
        start, cfg, model, stall_s, skipped = time.monotonic(), self.cfg, self.policy.model, 0.0, 0
        chosen, parts, near = batch.turns > 0, [*self._parts(batch)], {}
        lag, num_tokens = (self.version - batch.versions) * chosen, max(1, int(chosen.sum()))
        for _ in range(cfg.passes):
            sums = torch.zeros(8, dtype=torch.float64)
            for i, part in enumerate(parts):
                # `mu` is what the generator recorded, not what old weights would give here:
                # only the recorded value is the probability with which the token was really drawn.
                pi, entropy = self._score(model, part)
                near.setdefault(i, pi.detach())  # of the first pass
                per_token, outside = LOSSES[cfg.loss](pi, part.mu, near[i], part.advantage)
                # k2: its gradient is that of the KL divergence, which k1's and k3's are not
                kl = (pi - self._score(self.reference, part)[0]) ** 2 / 2 if cfg.kl else 0 * pi
                # The mean over all tokens, given that FSDP takes the mean of the ranks' gradients.
                total = (per_token + cfg.kl * kl - self.bonus * entropy).sum()
                (total * cfg.trainers / num_tokens).backward()
                sums += torch.stack([column.detach().double().sum().cpu() for column in (
                    part.fresh, k3(part.mu, near[i]) * part.fresh, per_token, entropy, outside, kl,
                    (near[i] - part.mu).exp(), (near[i] - part.mu).exp() ** 2)])
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
            norm = float(norm.full_tensor() if cfg.trainers > 1 else norm)  # of all ranks
            stall_s += self.writer.wait()
            if math.isfinite(norm): self.optimizer.step()
            else: skipped += 1
            self.optimizer.zero_grad()
        self.schedule.step()  # after a skipped update too: what is planned is the number of steps
        self.version += 1
        self.writer.start(self.version)
        if cfg.trainers > 1: torch.distributed.all_reduce(sums)  # the others' tokens
        young, drift, loss, entropy, clipped, kl, weight, squares = (sums / num_tokens).tolist()
        return StepStats(version=self.version, reward=float(batch.rewards.sum(1).mean()),
            lag_mean=int(lag.sum()) / num_tokens, lag_max=int(lag.max()), loss=loss,
            mismatch_k3=drift / young if young else -1.0, ess=weight**2 / max(squares, 1e-9),
            entropy=entropy, clipped=clipped, kl=kl, grad_norm=norm, num_tokens=num_tokens,
            skipped=skipped, stall_s=stall_s, step_s=since(start))

    def _parts(self, batch: Rollout):
        """This rank's rows, in as many forward passes as MAX_LOGITS makes of them, long with long.
        Raises TrainerLost in one that has not begun: they were meant for the one before."""
        if not self.writer: raise TrainerLost
        returns = batch.rewards.flip(1).cumsum(1).flip(1)  # what comes after a token is due to it
        table = advantages(returns, batch.group_ids, self.cfg.baseline)
        columns = (batch.mask, batch.ids, batch.turns, batch.logprobs,
                   table.gather(1, (batch.turns - 1).clamp(min=0)), batch.versions == self.version)
        num_logits = batch.ids.numel() * self.policy.model.config.vocab_size // self.cfg.trainers
        by_length = batch.mask.sum(1).argsort(descending=True, stable=True)
        # as many parts on every rank, or they would hang, and none empty
        num_parts = min(-(-num_logits // MAX_LOGITS), len(by_length) // self.cfg.trainers)
        for rows in by_length[self.rank :: self.cfg.trainers].tensor_split(num_parts):
            ids, turns, *others = packed(*(c[rows].to(self.cfg.device) for c in columns))
            chosen = turns[:, 1:] > 0  # column t is predicted at t - 1
            yield Part(ids, chosen, *(column[:, 1:][chosen] for column in others))

    def _score(self, model, part: Part) -> tuple:
        """Of the sampled tokens, [N] each: log-probability, and entropy in nats."""
        every = log_softmax(model, part.ids, part.chosen)  # [N, V]
        pi = every.gather(1, part.ids[:, 1:][part.chosen][:, None]).squeeze(1)
        every = every if self.bonus else every.detach()
        return pi, -(every.exp() * every.clamp(min=-100)).sum(-1)  # where p is 0, log p is -inf

    async def examine(self, batch: Rollout) -> list[tuple]:
        """What must hold, or nothing is learned: (what, found, relation, wanted)."""
        model, part, ids = self.policy.model, next(self._parts(batch)), batch.group_ids
        pi, _ = self._score(model, part)
        pi.sum().backward()
        still = sum(p.grad is None or not p.grad.any() for p in model.parameters())
        self.optimizer.zero_grad()
        with torch.no_grad(): off = log_softmax(model, part.ids, part.chosen).exp().sum(1) - 1
        centre = (ids[:, None] == ids).float() @ advantages(batch.rewards, ids)
        return [("k3 of both sides", float(k3(part.mu, pi).mean()), "<=", MAX_K3[pi.device.type]),
                ("probabilities, how far from a sum of 1", float(off.abs().max()), "<", 1e-4),
                ("log-probabilities above 0", int((batch.logprobs > 0).sum()), "==", 0),
                ("parameters without a gradient", still, "==", 0),
                ("advantages, largest sum of a group", float(centre.abs().max()), "<", 1e-4),
                ("conversations that differ", len({*map(str, batch.answers)}), ">", len(ids) // 10)]


# Addresses, "" is this host; the first is the trainer's. And how many generators one has, at most.
def hosts_of(cfg: Config) -> tuple: return tuple(cfg.hosts.split(","))
def generators_per_host(cfg: Config) -> int: return math.ceil(cfg.generators / len(hosts_of(cfg)))


def device_of(cfg: Config, role: str, i: int) -> str:
    """Trainer ranks have the first GPUs of the first host; ValueError if it has not so many.
    Generators share the other GPUs of their host, or all if there are no others."""
    if cfg.device == "cpu": return "cpu"
    every, num_hosts = [f"cuda:{n}" for n in range(torch.cuda.device_count())], len(hosts_of(cfg))
    if role == "trainer" and i < len(every): return every[i]
    if role == "trainer": raise ValueError(f"{len(every)} GPUs, each trainer needs one")
    others = every[cfg.trainers if i % num_hosts == 0 else 0 :] or every
    return others[i // num_hosts % len(others)]


class Generator(Worker):
    """A replica of the generator service: pulls the newest weights, then converses."""

    reader = None

    async def setup(self) -> str:
        device = device_of(self.cfg, "generator", self.replica_id)
        self.policy = Policy(self.cfg._replace(device=device))
        return device

    async def rollout(self, arenas, version, prompts, group_size, seed, greedy, in_flight) -> tuple:
        """Under one version (leased until the next pull) or, in flight, the newest at each token;
        waits for `version`. arenas: by host. Also how many episodes were cut off, and seconds."""
        start, (place, host) = time.monotonic(), divmod(self.replica_id, len(arenas))
        if not arenas[host]: raise RuntimeError("this host has no relay")
        if not self.reader or self.reader.arena.handle.run_id != arenas[host].run_id:
            self.reader = WeightReader(arenas[host], place, weights_of(self.policy.model))
        while self.reader.arena.newest() < version: await asyncio.sleep(0.001)
        version = self.reader.pull()
        pull = self.reader.pull if in_flight else lambda: version
        return *generate(self.policy, prompts, group_size, seed, greedy, pull), since(start)


class Judge(Worker):
    """Runs a task's reward function. That is somebody else's code: it may hang, or end its process.
    So it runs here, one request at a time, where it can be killed, and takes nobody along."""

    async def setup(self) -> None: self.task = task_of(self.cfg.task)

    async def rewards(self, prompts: list[Prompt], answers: list[list]) -> list[list[float]]:
        """Of each turn of each episode; nan, not 0, if that raises or is no number: not judged."""
        rewards = [[math.nan] * self.task.num_turns for _ in prompts]
        for row, prompt, said in zip(itertools.count(), prompts, answers):
            with contextlib.suppress(Exception, SystemExit):  # whatever it is, its caller counts it
                found = [*map(float, self.task.score(prompt.turns, said))]
                if len(found) == self.task.num_turns: rewards[row] = found
        return rewards


class Fleet:
    """The actors of an RL run, and what one asks of them."""

    def __init__(self, cfg: Config):
        self.cfg, self.sampler, self.start, self.handle = cfg, Sampler(cfg), Vault(), None
        self.recover = functools.partial(self.load, "", cfg)  # History.start puts its own here
        self.hosts, self.busy_s, self.num_unjudged, self.num_cut = hosts_of(cfg), 0.0, 0, 0
        # The numbers are replicas, and seconds after which a silent one counts as hung: steps and
        # rollouts of the tiny policy take some 30 ms. Two judges: one may hang, the other works.
        hosts, slow = self.hosts, 1 if cfg.model == "tiny" else 20
        for address in hosts: door_to(address)  # makes its Link, before threads of services ask

        def spawn(*args, **limits): return this_proc().spawn(args[0], Service, *args, **limits)

        self.trainer = spawn("trainer", Trainer, 1, 10 * slow, cfg, hosts=hosts[:1],
                             num_ranks=cfg.trainers, max_attempts=1)
        self.generators = spawn("generator", Generator, cfg.generators, 5 * slow, cfg, hosts=hosts)
        self.judges = spawn("judge", Judge, 2, 2 * slow, cfg, hosts=hosts, max_attempts=1,
                            max_in_flight=1)
        self.relays = spawn("relay", Relay, len(hosts) - 1, 10, self.trainer, "route",
                            generators_per_host(cfg), hosts=hosts[1:])
        self.services = [self.trainer, self.generators, self.judges, self.relays]

    async def __aenter__(self) -> Fleet:
        # all at once, for importing takes longest; relays need a trainer that has begun, see `load`
        await asyncio.gather(*(service.start.call_one() for service in self.services[:3]))
        await self.surely("published")
        return self

    async def placement(self) -> list[list[str]]:
        """A table: on which hosts, and which of their devices, the replicas are."""
        found = [(await service.status.call_one())["answers"] for service in self.services[:3]]
        rows = [[address or "this host", *(
            ", ".join(d or "cpu" for (_, at), a in answers.items() if at == address for d in a)
            for answers in found)] for address in self.hosts]
        return [["host", "trainer", "generators", "judges"], *rows]

    async def __aexit__(self, *_) -> None:
        await asyncio.gather(*(service.close.call_one() for service in self.services))

    async def save(self, vault: Vault, step: int, state: str = "") -> None:
        """A checkpoint; no other one may be under way."""
        room = vault.room()  # where the trainer of another host cannot write
        found = await self.ask("save", "" if self.cfg.hosts else room[0], state)
        if found: pathlib.Path(room[0]).write_bytes(found)
        vault.keep(room, step)

    async def load(self, path: str, cfg: Config) -> str:
        """The trainer, maybe a new one, becomes that of a checkpoint, or with "" of version 0, for
        a run with this Config. Returns the state that was saved there."""
        first = not self.start.kept  # so this trainer makes the weights with which all runs begin
        handle = await self.ask("begin", await self.ask("meet"), first, deadline_s=120.0)
        if first: await self.save(self.start, 0)
        base = self.start.kept[0][0]
        files = [pathlib.Path(f).read_bytes() if cfg.hosts else f for f in (path or base, base)]
        self.version, state = await self.ask("load", *files, cfg)
        try:
            if handle != self.handle: await self.relays.start.call_one()
        except ActorError as error: raise TrainerLost(f"relays: {cause(error)}") from error
        # From here on generators use the arenas of this trainer, and no older version.
        self.handle, self.oldest = handle, self.version
        return state

    async def ask(self, method: str, *args, **kwargs):
        """All ranks of the trainer; the answer of rank 0. Raises TrainerLost, or what it raised."""
        try: return await self.trainer.route.call_one(method, *args, **kwargs)
        except (ActorError, SupervisionError) as error:
            error = cause(error)
            raise TrainerLost if isinstance(error, (SupervisionError, TrainerLost)) else error

    async def surely(self, method: str, *args):
        """As `ask`, also outside of a run: if the trainer is lost, the next one recovers."""
        for _ in range(3):
            with contextlib.suppress(TrainerLost): return await self.ask(method, *args)
            with contextlib.suppress(TrainerLost): await self.recover()
        return await self.ask(method, *args)  # more is no accident

    async def rollout(self, prompts, group_size=GROUP_SIZE, greedy=False, version=0) -> Rollout:
        """One request to generators, one to judges; without the episodes that could not be judged.
        The seed goes along: a retry samples the same, if no new weights have come in between.
        version: the oldest to use, of those that this trainer has made."""
        arenas, rng = [self.handle], random.Random(f"{self.cfg.seed} {prompts[0].id}")
        if self.hosts[1:]:
            relays = (await self.relays.status.call_one(5.0))["answers"]  # one may be replaced now
            arenas += [relays.get(relay, [None])[0] for relay in enumerate(self.hosts[1:])]
        rollout, num_cut, busy_s = await self.generators.route.call_one(
            "rollout", arenas, max(version, self.oldest), prompts, group_size, rng.getrandbits(48),
            greedy, self.cfg.pull == "token" and not greedy)
        self.busy_s, self.num_cut = self.busy_s + busy_s, self.num_cut + num_cut
        rewards = torch.tensor(await self.judge(rollout.prompts, rollout.answers))
        judged = rewards.isfinite().all(1).nonzero()[:, 0].tolist()
        self.num_unjudged += len(rewards) - len(judged)
        if not judged: raise RuntimeError(f"none of {len(rewards)} episodes could be judged")
        return Rollout.join([(rollout._replace(rewards=rewards), judged)])

    async def judge(self, prompts: list[Prompt], answers: list[list]) -> list[list[float]]:
        """Rewards per episode; nan if it could not be judged. If a request for many is lost with
        its judge, each is asked for alone: only what kills its judge again stays without."""
        try: return await self.judges.route.call_one("rewards", prompts, answers)
        except (ActorError, SupervisionError) as error:
            if not isinstance(cause(error), SupervisionError): raise
        if len(prompts) == 1: return [[math.nan] * self.sampler.task.num_turns]
        alone = [self.judge([prompt], [said]) for prompt, said in zip(prompts, answers)]
        return [reward for rewards in await asyncio.gather(*alone) for reward in rewards]

    async def batch(self) -> Rollout:
        """A whole batch under the trainer's newest version, split over all generators."""
        version = await self.surely("published")
        prompts, n = self.sampler.draw(GROUPS_PER_BATCH), min(self.cfg.generators, GROUPS_PER_BATCH)
        parts = (self.rollout(prompts[i::n], version=version) for i in range(n))
        return Rollout.join([(r, [*range(len(r.prompts))]) for r in await asyncio.gather(*parts)])

    async def evaluate(self, newest: bool = True) -> float:
        """Greedy, over prompts never trained on: the share that is all right. One request, so one
        generator and one version, whatever the trainer does meanwhile. newest: waits for its."""
        version = await self.surely("published") if newest else 0
        rollout = await self.rollout(self.sampler.heldout, 1, True, version)
        return float((rollout.rewards.sum(1) > 0.999).float().mean())


# Of the groups of History.count, those that are nowhere yet: started = trained + dropped + lost +
# undone + under way. Undone: trained on, by a trainer lost before its next checkpoint.
def under_way(count: dict) -> int: return 2 * count["started"] - sum(count.values())


# What a number of StepStats says when it is so for so many steps in a row: told once per run.
ALARMS = [("skipped", ">", 0, 10, "10 gradients in a row were not finite"),  # ends the run
          ("mismatch_k3", ">", 0.01, 1, "trainer and generator disagree about the same weights"),
          ("ess", "<", 0.3, 1, "few samples carry all the weight: too old, or steps too long"),
          ("clipped", ">", 0.5, 1, "most tokens have left the trust region before they were used"),
          ("entropy", "<", 0.002, 1, "the policy has no alternatives left to compare"),
          ("reward", "==", 0.0, 20, "all wrong in 20 batches: nothing to learn from"),
          ("reward", "==", 1.0, 20, "all right in 20 batches: nothing to learn from")]


class History:
    """What a run has done, step by step, and the checkpoints from which it can go on."""

    # exact: `heldout`; nats: entropy; gen, train (busy shares), tok/s: since the start; -: unknown
    HEAD = "      step reward exact  lag max     k3  ess nats clip  gen train tok/s  heard > said"
    LINE = ("{run:5s}{step:5d}{reward:7.2f}{0:>6s}{lag_mean:5.1f}{lag_max:4d}{1:>7s}"
            "{ess:5.2f}{entropy:5.2f}{clipped:5.2f}{3:5.2f}{4:6.2f}{2:6.0f}  {said}")

    def __init__(self, fleet: Fleet, report: Report, label: str, num_steps: int, saved: str = ""):
        """saved: the folder inside --checkpoint; "": in memory."""
        self.fleet, self.report, self.label, self.num_steps = fleet, report, label, num_steps
        # heldout: exact, or -1; rows: lines of --log; evaluating: tasks; told: meanings of alarms
        self.cfg, self.heldout, self.losses, self.interrupted = fleet.cfg, -1.0, 0, False
        self.rows, self.evaluating, self.told = [], [], set()
        self.count = collections.Counter(started=0, trained=0, dropped=0, lost=0, undone=0)
        self.vault = Vault(saved and self.cfg.checkpoint and f"{self.cfg.checkpoint}/{saved}")

    # A column of all rows: a field of StepStats, heldout, or seconds and busy_s, running totals.
    def __getitem__(self, name: str) -> list: return [row[name] for row in self.rows]

    async def start(self) -> None:
        """The run begins, or goes on after the newest checkpoint in its folder. If it has one, the
        first Ctrl-C from now on waits for the end of a step and saves that."""
        # once: a second one ends at once
        def interrupt(*_): self.interrupted, _ = True, signal.signal(signal.SIGINT, self.before)

        if (self.cfg.loss, self.cfg.passes) == ("decoupled", 1):
            self.report.say("decoupled with one pass: its clip can never fire; see --passes")
        self.report.say(self.HEAD)
        self.started, self.fleet.busy_s = time.monotonic(), 0.0
        self.before, self.fleet.recover = signal.getsignal(signal.SIGINT), self.restore
        await self.restore()
        if self.vault.folder and self.sent < self.num_steps: signal.signal(signal.SIGINT, interrupt)

    async def restore(self) -> None:
        """The trainer, which may be a new one, and this become what they were at the newest
        checkpoint. If another process made that, sampling goes on from there too."""
        self.losses += 1
        # without a checkpoint in between; more is no accident
        if self.losses > 5: raise RuntimeError("the trainer is lost again and again")
        fleet, say = self.fleet, self.report.say
        try: state = await fleet.load(self.vault.newest(self.cfg, say), self.cfg)
        except TrainerLost: return await self.restore()  # another one
        rows, count, num_drawn = json.loads(state or "[[], {}, 0]")
        if rows and not self.rows:
            self.started, fleet.busy_s = time.monotonic() - rows[-1]["seconds"], rows[-1]["busy_s"]
            self.count.update(count)
            self.count["lost"] += under_way(self.count)
            fleet.sampler.num_drawn = num_drawn
        if rows or self.rows: say(f"{self.label}: the trainer goes on after step {len(rows)}")
        self.rows[:], self.sent = rows, len(rows)  # sent: steps that the trainer has or is to make
        undone = self.count["trained"] - GROUPS_PER_BATCH * len(rows)
        self.count.update(trained=-undone, undone=undone)

    def is_due(self, step: int) -> bool:
        """Is there to be a checkpoint of this step?"""
        return step % self.cfg.save_every == 0 or step == self.num_steps or self.interrupted

    async def save(self) -> None:
        step, books = len(self.rows), [self.rows, self.count, self.fleet.sampler.num_drawn]
        await self.fleet.save(self.vault, step, json.dumps(books))
        self.losses = 0
        if self.interrupted: leave(130, f"interrupted; the same command goes on after step {step}")
        if step == self.num_steps:
            signal.signal(signal.SIGINT, self.before)
            await asyncio.gather(*self.evaluating)

    async def _evaluate(self) -> None:
        with contextlib.suppress(ActorError, SupervisionError, RuntimeError):  # else without it
            self.heldout = await self.fleet.evaluate(newest=False)

    def add(self, stats: StepStats, batch: Rollout) -> None:
        """Logs a step, and shows it now and then, with what was said in one of its episodes."""
        step = len(self.rows) + 1
        lags = (stats.version - 1 - batch.versions)[batch.turns > 0].bincount().tolist()
        said = " ".join([*(text for text, _ in batch.prompts[0].turns), ">", *batch.answers[0]])
        self.rows.append(dict(run=self.label, step=step, seconds=since(self.started), lags=lags,
            busy_s=self.fleet.busy_s, heldout=self.heldout, said=said[:200]) | stats._asdict())
        with open(self.cfg.log or os.devnull, "a") as f: f.write(json.dumps(self.rows[-1]) + "\n")
        for name, relation, limit, num_steps, meaning in ALARMS:
            hits = [Report.OPERATORS[relation](row[name], limit) for row in self.rows[-num_steps:]]
            if sum(hits) == num_steps and meaning not in self.told:
                self.told.add(meaning)
                text = f"{self.label} {step}: {name} {show(self.rows[-1][name])}: {meaning}"
                if name == "skipped": raise RuntimeError(text)
                self.report.say(text)
        if step % 25 == 0: self.evaluating.append(asyncio.ensure_future(self._evaluate()))
        keep = step == 1 or step % max(1, self.cfg.steps // 8) == 0
        if keep or self.report.live and step % 10 == 0:  # live: a line on a terminal
            exact = "-" if self.heldout < 0 else f"{self.heldout:.2f}"
            k3 = "-" if stats.mismatch_k3 < 0 else f"{stats.mismatch_k3:.0e}"
            line = self.LINE.format(exact, k3, *self.speed(step)[3:6], **self.rows[-1])
            self.report.say(line[:92], end="\n" if keep else "")

    def speed(self, n: int) -> list:
        """Of n steps: s, n, steps/s, tokens/s, busy shares of both sides, reward of the last 10%"""
        s, tokens = self["seconds"][n - 1], sum(self["num_tokens"][:n])
        busy = [self["busy_s"][n - 1] / self.cfg.generators / s, sum(self["step_s"][:n]) / s]
        return [s, n, n / s, tokens / s, *busy, statistics.fmean(self["reward"][9 * n // 10 : n])]

    def report_learning(self, before: float, after: float, mismatch: float) -> float:
        """Held-out exact before, after; k3, or -1: unknown, which fails. Returns reward gained."""
        tenth, some = max(1, len(self.rows) // 10), f"{len(self.fleet.sampler.heldout)} prompts"
        first, last = (statistics.fmean(self["reward"][::way][:tenth]) for way in (1, -1))
        self.report.check("largest k3 of both sides", abs(mismatch), "<=", MAX_K3[self.cfg.device])
        self.report.say(f"held-out exact, {some} of {self.cfg.task}: {before:.3f} -> {after:.3f}")
        self.report.figure(heldout_before=before, heldout_after=after, reward_first=first,
                           reward_last=last, mismatch_k3=mismatch, lag_max=max(self["lag_max"]))
        return last - first


async def train_sync(history: History) -> History:
    """Sample, step, publish, one after the other."""
    await history.start()
    while len(history.rows) < history.num_steps:
        try:
            batch = await history.fleet.batch()  # pulled before sampled, so lag is 0
            history.add(await history.fleet.ask("step", batch), batch)
            history.count.update(started=GROUPS_PER_BATCH, trained=GROUPS_PER_BATCH)
            if history.is_due(len(history.rows)): await history.save()
        except TrainerLost: await history.restore()
    return history


async def demo_sync_rl(report: Report, cfg: Config) -> None:
    """trainer and generator give the same log-probabilities for the same weights; reward rises;
    every sample has lag 0
    try: `self.reader.version` for `self.reader.pull()` in Generator.rollout: no weights come"""
    report.say(f"seed {cfg.seed}; starting takes about 15 s")
    async with Fleet(cfg) as fleet:
        report.table(*await fleet.placement())
        first, before = await fleet.batch(), await fleet.evaluate()
        for what, *found in await fleet.surely("examine", first): report.check(what, *found)
        history = await train_sync(History(fleet, report, "sync", -(-cfg.steps // 2), "sync_rl"))
        stale, after = (await fleet.surely("examine", first))[0][1], await fleet.evaluate()
    gain = history.report_learning(before, after, max(history["mismatch_k3"]))
    report.check(f"k3 of the first batch, {len(history.rows)} steps too late", stale, ">", 1e-4)
    report.check("lag, largest of all steps", max(history["lag_max"]), "==", 0)
    report.check("reward gained, last tenth over first", gain, ">", 0.1)


# == 10. ASYNC RL =================================================================================
# Problem. In the synchronous loop one side always waits. Let both run, and samples grow old: when
#   the trainer sees one, the policy that made it is many versions behind, without a bound.
# Rule. Two loops and a buffer: rollouts (admit, generate, put) and training (take, step, publish).
#   A ticket per group keeps what is under way to K + 1 batches. Tickets alone do not bound lag, for
#   stragglers are overtaken: a group more than K versions old when a batch is taken is dropped, and
#   its ticket given back. Without the refund the run turns synchronous, then stops. A trainer that
#   dies goes on from its checkpoint; groups made with the lost one's weights are dropped.
# Cost. Lag: samples are off-policy. The ratio to what was recorded corrects it, within a clip.
# Not here. Finishing another's rollout.    Source. IMPALA (Espeholt 2018), AReaL (Fu 2025).

# Lag, by example, with K = 1 (two batches of tickets; v = the trainer's version):
#     v = 5   batch a is generated under 5, batch b too; the gate is closed
#     v = 5   the trainer steps on a (lag 0) -> v = 6, and a's tickets admit batch c, under 6
#     v = 6   the trainer steps on b (lag 1) -> v = 7, b's tickets admit d
#     v = 7   c is late, d comes first: d is trained on (lag 0) -> v = 8
#     v = 8   now c arrives, generated under 6: lag 2 > K. It is dropped; its tickets admit another

# A generator dies, message by message (sections 5 to 7). The trainer gets none of them:
#     kernel -> owner              a pidfd is readable: `_lose` sets `lost`, which wakes who waits:
#     _call -> route -> another    the same prompts and seed, on the same tickets: no step is lost
#     _keep -> a new process       "pid", then "setup", seconds of it imports: now it is healthy
#     route -> the new generator   it attaches, clears the dead one's lease (void by now), and pulls


class Gate:
    """Tickets, one per group. It needs no lock: from a look to the next `await` no other runs."""

    def __init__(self, max_lag: int, count: collections.Counter):
        self.size, self.count, self.bell = (max_lag + 1) * GROUPS_PER_BATCH, count, asyncio.Event()

    async def admit(self, most: int) -> int:
        """Takes as many tickets as there are; waits while there are none; woken by `settle`."""
        while (num := min(most, self.size - under_way(self.count))) < 1: await self.bell.wait()
        self.count["started"] += num
        return num

    def settle(self, how: str, num_groups: int) -> None:
        """Gives tickets back; how: trained, dropped or lost. Wakes all that wait, to look again."""
        self.count[how] += num_groups
        self.bell.set()
        self.bell.clear()


class ReplayBuffer:
    """Groups that wait for the trainer, as they came. Samples pass from loop to loop only here."""

    def __init__(self, gate: Gate, max_lag: int):
        self.gate, self.max_lag, self.groups = gate, max_lag, []  # groups: see `put`

    def put(self, rollout: Rollout, num_groups: int, run_id: int) -> None:
        """Groups with fewer than two judged episodes, or without a sampled token, are lost."""
        groups = [(rollout.group_ids == g).nonzero()[:, 0] for g in rollout.group_ids.unique()]
        groups = [rows.tolist() for rows in groups if len(rows) > 1 and rollout.turns[rows].any()]
        for rows in groups:  # the oldest token counts
            oldest = int(rollout.versions[rows][rollout.turns[rows] > 0].min())
            self.groups.append((rollout, rows, run_id, oldest))
        self.gate.settle("lost", num_groups - len(groups))  # none, mostly; wakes `take`

    async def take(self, run_id: int, version: int) -> Rollout:
        """The first groups that a trainer of this run id may see at this version, as one batch;
        drops all that none may. waits for enough of them / woken by `put`"""
        while True:
            fresh = [g for g in self.groups if g[2] == run_id and version - g[3] <= self.max_lag]
            self.gate.settle("dropped", len(self.groups) - len(fresh))  # refund
            self.groups = fresh
            if len(fresh) >= GROUPS_PER_BATCH:
                return Rollout.join([fresh.pop(0)[:2] for _ in range(GROUPS_PER_BATCH)])
            await self.gate.bell.wait()


class AsyncRun:
    """The two kinds of loops. The run ends when the trainer has made its steps."""

    def __init__(self, history: History, max_lag: int):
        self.history, self.fleet, self.gate = history, history.fleet, Gate(max_lag, history.count)
        self.buffer = ReplayBuffer(self.gate, max_lag)
        # away: groups in requests not back; steps: tasks, the trainer's step now, one sent ahead
        self.away, self.done, self.steps = 0, False, collections.deque()

    async def run(self) -> None:
        """Shutdown:  training ends (or any loop raises)
                     -> done: no loop asks for tickets again
                     -> loops that wait for a generator get their answer and put it
                     -> loops that wait for a ticket, and steps not answered, are cancelled
                     -> what raised is raised here, at once; what lies in the buffer is counted"""
        await self.history.start()
        loops = [self._training] + [self._rollouts] * (2 * self.fleet.cfg.generators)  # none idles
        tasks = [asyncio.ensure_future(loop()) for loop in loops]
        (ended, _), self.done = await asyncio.wait(tasks, return_when="FIRST_COMPLETED"), True
        while self.away and not any(task.exception() for task in ended): await asyncio.sleep(0.005)
        for task in (*tasks, *self.steps): task.cancel()
        await asyncio.gather(*tasks, *self.steps, return_exceptions=True)
        await asyncio.gather(*ended)

    async def _rollouts(self) -> None:
        """consumes tickets / waits for the gate, a generator, a judge / woken by Gate.settle, the
        answers / produces groups in the buffer / ends when the run is done"""
        while not self.done:
            num = await self.gate.admit(GROUPS_PER_BATCH)
            self.away += num
            prompts, run_id = self.fleet.sampler.draw(num), self.fleet.handle.run_id
            try: self.buffer.put(await self.fleet.rollout(prompts), num, run_id)
            except (ActorError, SupervisionError, RuntimeError) as error:  # after all retries
                self.gate.settle("lost", num)
                self.history.report.say(f"{num} groups lost: {cause(error)}")
                # 320 more groups lost than trained on: nobody gets anywhere
                spare = 320 + self.gate.count["trained"] - self.gate.count["lost"]
                if isinstance(cause(error), NoReplica) or spare < 0: raise  # the run ends
                await asyncio.sleep(0.5)  # a trainer that is not back yet, for example
            finally: self.away -= num

    async def _training(self) -> None:
        """consumes groups / waits for the buffer, then for the trainer / woken by ReplayBuffer.put,
        by the answer / produces versions / ends when all steps are made"""
        # While the trainer works on a batch, one more waits there, and grows older by a version.
        # With K = 0 it would be too old then; and nothing is sent ahead of a checkpoint.
        fleet, history, steps, ahead = self.fleet, self.history, self.steps, self.buffer.max_lag > 0
        while steps or history.sent < history.num_steps:
            try:
                while not steps or len(steps) <= ahead and not history.is_due(history.sent):
                    take = asyncio.create_task(self.buffer.take(fleet.handle.run_id, fleet.version))
                    await asyncio.wait({take, *steps}, return_when="FIRST_COMPLETED")
                    if take.cancel(): break  # a step has ended first, maybe without a trainer
                    fleet.version += 1  # at which the trainer will see the next batch
                    history.sent += 1
                    steps.append(asyncio.ensure_future(self._step(take.result())))
                await steps.popleft()
                if not steps and history.is_due(history.sent): await history.save()
            except TrainerLost:
                await asyncio.gather(*steps, return_exceptions=True)  # the other one is lost too
                steps.clear()
                self.gate.settle("lost", (history.sent - len(history.rows)) * GROUPS_PER_BATCH)
                await history.restore()

    async def _step(self, batch: Rollout) -> None:
        stats = await self.fleet.ask("step", batch)
        self.gate.settle("trained", GROUPS_PER_BATCH)  # only now: lag counts versions
        self.history.add(stats, batch)


def report_run(report: Report, run: AsyncRun, fast: list, peer: History, loose: History) -> None:
    """How the run compares. fast: its `speed` until the faults; peer: synchronous, as many steps,
    the same actors, a thread per process; loose: without a bound. And where all groups went."""
    history, fleet, bound, timed = run.history, run.fleet, run.buffer.max_lag, peer.num_steps
    sync, count, in_flight = peer.speed(timed), history.count, run.away + len(run.buffer.groups)
    # At best, of the shares of time that the sides need in turn only the longer one is left.
    speedup, ideal = sync[0] / fast[0], sum(sync[4:6]) / max(sync[4:6])
    stall = sum(history["stall_s"]) / sum(history["step_s"])
    good = next((row["seconds"] for row in history.rows if row["heldout"] >= 0.95), -1.0)  # never
    as_good = next((speed for n in range(-(-timed // 2), len(history.rows) + 1)
                    if (speed := history.speed(n))[-1] >= sync[-1]), [math.inf] * 7)  # else never
    report.table(["", "s", "steps", "steps/s", "tokens/s", "gen busy", "train busy", "reward then"],
                 ["sync", *sync], ["async", *fast], ["async, as good", *as_good])
    # K = 0 is synchronous, and hosts may be lost in one run and not in the other.
    if bound and not fleet.cfg.hosts:
        report.check("seconds to the same reward, sync / async", sync[0] / as_good[0], ">", 1)
    report.check("share of its steps that the trainer waited for copies", stall, "<", 0.1)
    rows = [[how, most, statistics.fmean(h["lag_mean"]), max(h["lag_max"])] for how, most, h in (
        ("no tickets, no drop", "none", loose), ("tickets and drop", f"K = {bound}", history))]
    report.table(["lag, in versions", "bound", "mean", "max"], *rows)
    report.check("largest lag without the rule", rows[0][-1], ">", min(bound, 10))
    report.check("largest lag", rows[1][-1], "<=", bound)
    report.table(["groups", *count, "in flight at the end"], ["", *count.values(), in_flight])
    report.check("groups started, not accounted for", under_way(count) - in_flight, "==", 0)
    report.check("groups trained on", count["trained"], "==", history.num_steps * GROUPS_PER_BATCH)
    report.say(f"episodes not judged: {fleet.num_unjudged}; cut by the context: {fleet.num_cut}")
    report.figure(async_speedup=speedup, speedup_of_ideal=speedup / ideal, sync_s=sync[0],
                  async_s=fast[0], bottleneck_busy_share=max(fast[4:6]), trainer_stall_share=stall,
                  seconds_to_95=good, **count, in_flight=in_flight, unjudged=fleet.num_unjudged)


FAULTS = {"generators": signal.SIGKILL, "judges": signal.SIGSTOP, "trainer": signal.SIGKILL}


async def demo_async_rl(report: Report, cfg: Config) -> None:
    """the same reward in less wall time; lag never exceeds the bound; a generator killed mid-run
    costs no step
    try: no bound on lag in `ReplayBuffer.take`, and `max_lag + 100` in Gate"""
    report.say(f"seed {cfg.seed}; about a minute, of which starting takes 15 s")
    timed, struck, faults = max(1, cfg.steps // 2), {}, []  # steps to compare; then come the faults
    async with Fleet(cfg) as fleet:
        report.table(*await fleet.placement())
        before, loose = await fleet.evaluate(), History(fleet, report, "loose", min(40, timed))
        await AsyncRun(loose, max_lag=10**6).run()  # without the rule
        run = AsyncRun(History(fleet, report, "async", cfg.steps, "async_rl"), cfg.max_lag)
        history, running = run.history, asyncio.ensure_future(run.run())
        for part, (name, number) in enumerate(FAULTS.items()):
            step = timed + (cfg.steps - timed) * (3 * part + 1) // 10
            while len(history.rows) < step and not running.done(): await asyncio.sleep(0.002)
            if running.done(): running.result()  # raises what ended it
            speed = history.speed(timed)
            if history.sent < cfg.steps:  # else nobody would notice
                struck[name] = time.time()
                await getattr(fleet, name).strike.call_one(number)
        await running
        after = await fleet.evaluate()
        peer = await train_sync(History(fleet, report, "sync", timed))  # as far, at the same rates
        if cfg.report: await recipe()["sweep"](report, fleet, before)
        for name, at in struck.items():
            await getattr(fleet, name).status.call_one(60.0)
            faults += [[f"{FAULTS[name].name}, one of {name}", e.what, (e.start - at) * 1e3,
                (e.end - e.start) * 1e3] for e in losses(name.rstrip("s")) if e.start > at][:1]
    report_run(report, run, speed, peer, loose)
    report.table(["fault", "noticed", "after ms", "replaced after ms"], *faults or [["-"] * 4])
    report.check("faults noticed and cured", len(faults), "==", len(struck))
    history.report_learning(before, after, max(peer["mismatch_k3"]))  # k3 of lag 0: of peer
    report.check("held-out exact, gained", after - before, ">", 0)


# -- plumbing: the command line -------------------------------------------------------------------
# Exit status: 0 all checks hold, 1 a check failed or the run died, 2 wrong usage, 130 Ctrl-C.

demos = [(name[5:], run) for name, run in globals().items() if name.startswith("demo_")]
STAGES = {name: Stage(n, name, *re.split(" (?=try: )", " ".join(run.__doc__.split())), run,
                      run.__code__.co_firstlineno) for n, (name, run) in enumerate(demos, 1)}


# Finds everything that can be wrong with the arguments before a process is spawned.
def parse(argv: list[str] | None) -> tuple[argparse.Namespace, Config, list[Stage]]:
    parser = argparse.ArgumentParser(
        usage="%(prog)s flags [their defaults]", description=__doc__[:92], allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 22, 100))
    parser.error = lambda message: parser.exit(2, f"monarch_rl: {message}\n")  # one line
    by_number = {str(stage.number): stage.name for stage in STAGES.values()}
    known = dict(type=lambda text: by_number.get(text, text), choices=[*STAGES], metavar="STAGE")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--stage", default=[*STAGES][-1], help="run 1 to it [async_rl]", **known)
    which.add_argument("--only", help="run this stage", **known)
    which.add_argument("--list", action="store_true", help="print the stages and their lines")
    which.add_argument("--worker", nargs="?", const="tcp://127.0.0.1:26600", metavar="ADDRESS",
                       help="serve this host to runs with --hosts [%(const)s]")
    meaning = dict(re.findall(r"(\w+): .*  # (.*)", inspect.getsource(Config)))
    names = dict(loss=LOSSES, baseline=BASELINES, pull=["rollout", "token"], device=["cpu", "cuda"])
    for name, value in Config()._asdict().items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value,
          choices=names.get(name), metavar=type(value).__name__, help=f"{meaning[name]} [{value}]")
    for name, value in vars(args := parser.parse_args(argv)).items():
        low = dict(max_lag=0, seed=0, lr=0, kl=0, entropy=-1).get(name, 1)
        if type(value) in (int, float) and not value >= low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}")
    cfg = Config(*(getattr(args, name) for name in Config._fields))
    stages = [STAGES[args.only]] if args.only else [*STAGES.values()][: STAGES[args.stage].number]
    if cfg.report and stages[-1].name != "async_rl": parser.error("--report is of stage async_rl")
    attempts = {  # which raise why not
        "Linux on x86-64": lambda: ["linux x86_64"].index(f"{sys.platform} {os.uname().machine}"),
        f"--task {cfg.task} ({', '.join(TASKS)}, or FILE.py:CLASS)":
            lambda: (some := Sampler(cfg)).validation[0].turns[some.task.num_turns - 1],
        "--device cuda": lambda: cfg.hosts or device_of(cfg, "trainer", cfg.trainers - 1),
        f"--model {cfg.model}": lambda: cfg.model == "tiny" or Policy(cfg._replace(device="meta")),
        "--checkpoint": lambda: [Vault(f"{cfg.checkpoint}/{stage}").newest(cfg, say=str)
                                 for stage in ("sync_rl", "async_rl") if cfg.checkpoint],
        **{f"--hosts {a}": functools.partial(connect, a) for a in hosts_of(cfg) if cfg.hosts},
        f"--worker {args.worker}": lambda: args.worker and name_and_port(args.worker),
        "--trace, --report": lambda: (cfg.trace or cfg.report) and recipe(),
        "--json, --log, --trace, --report": lambda: [os.remove(open(path, "x").name) for path in
            (cfg.json, cfg.log, cfg.trace, cfg.report) if path and not os.path.isfile(path)]}
    for flag, attempt in attempts.items():
        try: attempt()
        except (Exception, SystemExit) as error:  # whatever somebody's file raises
            parser.error(f"{flag}: {type(error).__name__}: {' '.join(str(error).split())}")
    return args, cfg, stages


def recipe() -> dict:
    """What writes the files of --trace and --report, by name: it teaches no RL, and is DOCS 9."""
    docs = pathlib.Path(__file__).with_name("DOCS.md").read_text(encoding="utf-8")
    code, page = re.findall("```(?:python|html)\n(.*?)```", docs.split("### The page")[1], re.S)[:2]
    exec(compile(code, "DOCS 9", "exec"), found := {"PAGE": page})
    return found


def descendants(root: int = 0) -> list[int]:
    """Process ids of our children, or another's, and theirs, and so on, while they run."""
    found, parents = [root or os.getpid()], {}
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):  # 12 (a name) S 1 ...
        with contextlib.suppress(OSError):  # it has ended
            parents[int(stat.parent.name)] = int(stat.read_bytes().rpartition(b") ")[2].split()[1])
    for one in found: found += [pid for pid, parent in parents.items() if parent == one]  # grows
    return [pid for pid in found[1:] if is_alive(pid)]


def leave(status: int, line: str = "") -> None:
    """Ends now, from wherever we are; our processes too, and with them their nameless memory."""
    if LEAVING.is_set(): return time.sleep(1.0)  # a second Ctrl-C, or news of one that was killed
    LEAVING.set()
    quiet, end = 0, time.monotonic() + 10.0  # quiet: looks in a row that found nobody
    while quiet < 5 and time.monotonic() < end:  # a process may be on its way while we look
        quiet = 0 if (pids := descendants()) else quiet + 1
        kill(pids)
        time.sleep(0.02)
    sys.stderr.write(f"monarch_rl: {line}\n" if line else "")
    os._exit(status)


def main(argv: list[str] | None = None) -> None:
    args, cfg, stages = parse(argv)
    rows = (f"{s.number:2d}  {s.name:<14s} line {s.line:<5} {s.claim}" for s in STAGES.values())
    if args.list: return print(*rows, sep="\n")
    if args.worker: serve(args.worker)
    if cfg.hosts: enable_transport(url(connect(hosts_of(cfg)[0])[1], 0))
    # File descriptor 2, which our processes inherit, becomes a file without a name: Monarch reports
    # there what the demos provoke. sys.stderr keeps the terminal.
    noise = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(noise.fileno(), 2)
    signal.signal(signal.SIGINT, lambda *_: leave(130, "interrupted"))
    monarch.actor.unhandled_fault_hook = lambda failure: leave(1, f"an actor died: {failure}")
    report = Report()
    signal.signal(signal.SIGALRM, lambda *_: report.say(time.strftime("%H:%M:%S"), end=""))
    try: asyncio.run(report.run(stages, cfg))
    except BrokenPipeError: leave(1)  # `monarch_rl.py | head` has read enough
    machine = versions() | {"cores": len(os.sched_getaffinity(0))}
    whole = {"version": 1, "args": vars(args), "machine": machine, "stages": report.stages}
    if cfg.json: pathlib.Path(cfg.json).write_text(json.dumps(whole, indent=1), encoding="utf-8")
    if cfg.trace: recipe()["trace"](cfg.trace)
    if failed := [found["name"] for found in report.stages if not found["ok"]]:
        noise.seek(0)
        last_words = "".join(f"  | {line}" for line in noise.readlines()[-20:])
        leave(1, f"failed: {', '.join(failed)}; what the workers said last:\n{last_words}")
    leave(0)


if __name__ == "__main__":
    # By name: only classes of a module are pickled by reference, and the same in every process.
    importlib.import_module("monarch_rl").main()
