#!/usr/bin/env python3
# /// script
# requires-python = ">=3.10,<3.14"
# dependencies = ["torch==2.14.1", "transformers==5.20.2", "torchmonarch==0.7.0"]
# ///
"""monarch_rl: an asynchronous RL system for language models, in one file that teaches itself.

    python monarch_rl.py                      the whole tour, under four minutes on two cores
    python monarch_rl.py --stage service      stages 1 to 6
    python monarch_rl.py --only async_rl      one stage; this one trains a policy
    python monarch_rl.py --list               the stages, and the lines where they begin
    python monarch_rl.py --help               your model, your task, your GPUs, your hosts

It needs Linux on x86-64 or aarch64; a laptop will do, and on a Mac a container. Each stage states a
claim about such a system and checks it. Most also show it fail without the rule that makes it true;
and each names the line that you can change to see that for yourself.

           tickets         prompts          episodes       groups                batch
      Gate ------> Sampler ------> Generator ------> Judge ------> ReplayBuffer ------> Trainer
       ^                          (a Service)     (a Service)                              |
       |                               ^                                                   |
       |                          WeightReader                                       WeightWriter
       |                               |                                                   |
       |                               +---------- Arena: slots, leases <------------------+
       |                                                                                   |
       +--- tickets come back to the Gate when the trainer has stepped on their groups ----+

      Small things travel as messages between actors (the control plane). The weights, which are
      large, travel through shared memory or by RDMA (the data plane). "The words", below, says what
      each word of the picture means.

    1 hello_actor     state in a process of its own; one call at a time, in order
    2 actor_mesh      many members, one call: who runs, and who answers
    3 rdma_transfer   pass the handle, pull the bytes; the owner's Python takes no part
    4 controllers     find a singleton by its name
    5 supervision     whose failure is it? The owner replaces a dead process
    6 service         every request is answered, though replicas raise, die and stand still
    7 weight_sync     weights that never mix two versions, at the cost of about one memory copy
    8 reshard         between two ways of cutting up weights, every needed byte once
    9 rollout         ids and log-probabilities noted while sampling are what the trainer finds
   10 losses          which estimator points where the true gradient points, and how noisily
   11 sync_rl         the RL loop, one thing at a time
   12 recovery        a run that was cut off goes on as if it had not been
   13 async_rl        two loops and a buffer: both sides work, and lag is bounded
   14 critic          with one answer per prompt, a learned value is the baseline
   15 reward_model    a policy exploits a learned reward, and what holds it
   16 hosts           a version crosses to each host once; a lost host costs what it had begun

How to read it. Each section begins with a lead, the comment under its banner. There are four ways:

    an hour       this page, and the leads of sections 3, 7, 11 and 13: comments only
    an afternoon  these; the pictures in parts 7b and 13a (headings `# -- 7b.` and `# -- 13a.`); the
                  leads and demos of sections 1 to 3, 5, 6 and 11, with what these stages print; and
                  the five functions that all of it is about: ServiceActor.route (6), Arena.lease
                  and WeightReader.pull (7), TrainState.step (11), AsyncLoops._training_loop (13)
    two days      all leads and pictures, and sections 5 to 7, 9, 11 and 13 whole. Skip each part
                  headed `# -- measurement`, which makes the numbers, or `# -- plumbing`, which any
                  program needs. A part ends at the next `# --` or `# ==`, or at a demo
    a week        all of it, some 35 hours for a careful first reader

Go on from here with `# == 1. HELLO ACTOR`: in between is plumbing, which Python needs first. After
section 13 you have the whole system on one host; 14 adds a second network, 15 trains on a reward
that is learned, and 16 adds other hosts. DOCS.md says at length why each part is as it is.

The docstring of a loop gives short answers, with slashes between them: what it consumes / what it
waits for / who wakes it / what it produces / when it ends. An answer that is plain is left out.

Left out, and what to use instead: paged attention (vLLM, SGLang); tensor, pipeline and expert
parallel training (torchtitan, Megatron); LoRA (peft); sandboxes for tools; launchers for Slurm and
Kubernetes (recipes in DOCS 8). Each would hide the part that is taught here.

The words:

    actor     An object in a process of its own, which others reach by messages (section 1).
    RDMA      Remote direct memory access: one process reads or writes memory of another one,
              which takes no part in it (section 3).
    policy    The language model that is trained: given a text, it has a probability for each token
              that may come next.
    episode   One conversation between a user and the policy. Example, where the task is to repeat
              what the user says: the user says "abc", the policy answers "abc", the user says
              "dfa", the policy answers "dfb" (one letter is wrong, so its reward is less than 1).
    group     The episodes sampled from one prompt, here eight. Their rewards are compared with
              each other, and the better ones are made likelier.
    rollout   What one request to a generator brings back: the episodes of some groups.
    version   A number for one state of the weights. Every training step makes the next one.
    lag       How old a sample is when it is trained on. Sampled with version 5, trained on when
              the trainer is at version 7: the lag is 2.
    publish   The trainer makes a version available. Generators pull it when they like.
    slot      A place in shared memory for one copy of all weights. All slots of a trainer, with
              a few words about them, are its arena. WeightWriter fills slots, WeightReader reads.
    lease     A reader's note "I am reading slot 3", for the writer to see.
    torn      Of weights that were read: some tensors are of version 6 and some of version 7.
    ticket    The permission to generate one group. There are few, so little is under way. The
              Gate hands them out. A ticket comes back when the trainer has made its step on
              that group, or when the group is dropped or lost.
    sampler   Draws prompts, always the same one for the same number.
    replica   One of several interchangeable actors, each in a process of its own.
    service   What owns replicas and gives requests to them; callers see no replica (section 6).
    judge     A replica that runs the reward function, which is somebody else's code.
    replay buffer
              Where groups with rewards wait until there are enough for a batch.
    estimator A loss with a baseline. Its gradient, computed on samples, estimates the true one:
              that of the mean reward over all possible answers (section 10).
    baseline  What a reward is compared with: the mean of the group, or a value, which is the reward
              that a second network, the critic, expects at that token (sections 10 and 14).
    reward model
              A network that has learned from examples what people prefer, and judges in place of
              a function (section 15).
    run id    A number for one life of the trainer. After a restart there is another version 7,
              which must not be taken for the first one.
"""

from __future__ import annotations

# -- plumbing: before Monarch starts ---------------------------------------------------------------
# One process of a run is started by you: the main process. All others come from it, or on another
# host from the program that waits there (section 16). The workers among them import this file under
# its name, and find the classes of the actors in it.
#
# So importing this file must do nothing but define things. Whatever has an effect (environment
# variables, signal handlers, printing) happens in `main`, which no worker runs. There are three
# exceptions, and all only if the file is run: the handler and the refusal below, which must come
# before `main` can run, and the template for workers, which the next part explains.
import os
import signal
import sys
import time

VERSION = "1.0"
FIRST_LINE_S = time.monotonic()  # when this file began to run; the report counts from here

# The processors, as the system names them, on whose order of loads and stores section 7 relies.
PROCESSORS = ("x86_64", "aarch64")


def end_where_it_cannot_run() -> None:
    """On another system or processor: ends this process, with a line that says why.

    It comes before the imports: other systems lack some of Python's modules, and a part of Monarch.
    """
    lacks = ""
    # A memfd is a file in memory (section 7), a pidfd a file descriptor for a process (section 5).
    if sys.platform != "linux":
        lacks = f"{sys.platform}, without Linux's memfd and pidfd; a Linux container has them"
    elif os.uname().machine not in PROCESSORS:
        lacks = f"{os.uname().machine}, and weight sync relies on the order of loads and stores"
    if lacks:
        sys.stderr.write(f"monarch_rl: Linux on x86-64 or aarch64: this is {lacks}\n")
        sys.exit(2)


if __name__ == "__main__":
    # Ctrl-C during the imports below ends the command at once, without a traceback. 130 is the exit
    # status that shells give to a command that Ctrl-C has ended: 128, and 2 for SIGINT.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    end_where_it_cannot_run()

import argparse
import array
import asyncio
import bisect
import collections
import concurrent.futures
import contextlib
import copy
import ctypes
import dataclasses
import datetime
import decimal
import difflib
import errno
import fcntl
import functools
import gc
import hashlib
import hmac
import html
import importlib
import importlib.metadata
import importlib.util
import io
import ipaddress
import itertools
import json
import math
import mmap
import operator
import pathlib
import pickle
import random
import re
import runpy
import secrets
import selectors
import shlex
import shutil
import socket
import stat
import statistics
import subprocess
import sysconfig
import tempfile
import textwrap
import threading
import traceback
import types
import urllib.parse
import warnings
import zipfile
import zlib
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Generic, ParamSpec, TypeVar

# -- plumbing: a template for workers --------------------------------------------------------------
# A worker is a process that does the work of a run: it trains, generates or judges (section 5). To
# import torch and transformers takes 4 s of CPU, and the trainer and each generator need both. So
# one process imports them once, and does nothing else: the template. A worker with a model is a
# fork of it: a copy that takes 10 ms, whose memory is shared until either side writes there, and
# which has only Monarch and this file left to import (0.3 s).
#
# Monarch starts a process by a command, and watches what that has started. It cannot be told to
# take a fork instead. So a worker with a model begins as two processes:
#
#     1. The main process starts the template, which imports torch and then waits.
#     2. Monarch, asked for a worker, starts a shell in its place: the stand-in of that worker. The
#        shell writes its process id into the template's standard input, a pipe that it opens by
#        path (`arguments`, in 5a), and then does nothing more than wait until the template ends.
#     3. The template reads the id, and forks. The fork takes over the environment variables that
#        Monarch gave to the stand-in, and goes on as Monarch's own command would: it is the worker.
#
# From then on Monarch watches the stand-in, which it started itself and takes for the worker.
# Everybody else watches the worker. So when one of the two ends, the other must end too, or Monarch
# would believe that a dead worker lives. And nobody may outlive the main process:
#
#     what ends          what ends with it      because of
#     the main process   the template           the system (end_with_parent)
#     the template       its workers            the system (end_with_parent)
#     the template       all stand-ins          themselves: they wait for the template's end
#     a worker           its stand-in           the template (end_pair)
#     a stand-in         its worker             the template (end_pair)
#
# Only a process with a single thread can be forked safely. The copy has no other thread, but it has
# the locks that others held, and nobody to open them. Monarch starts threads when it is imported,
# so the template must not import it. That is why these functions stand before that import.

TEMPLATE_FLAG = "--template"  # by which a process knows that it is one
# When a process starts, a line with a name and its id is added to a file. These two environment
# variables of the process say which file, and which name (Starts, in section 5).
STARTS_FILE = "MONARCH_RL_STARTS_FILE"
STARTS_NAME = "MONARCH_RL_STARTS_NAME"
WORKER_MODULE = "monarch._src.actor.bootstrap_main"  # what Monarch runs in each process it starts
# An environment variable of a process on another host: in which life of that host it was started. A
# life is the time from a start of the host until it is lost (Host.life, in section 5).
LIFE_VARIABLE = "MONARCH_RL_LIFE"

# What trainers and generators import if the policy is the tiny one of this tour. Those of other
# models need most of it too.
SLOW_IMPORTS = (
    "torch",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.qwen2.tokenization_qwen2",
)


def end_with_parent() -> None:
    """From now on the system ends this process, by SIGKILL, when its parent ends.

    More exactly: when the thread of the parent ends that has started this process.
    """
    set_signal_of_parents_death = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)


def serve_as_template(lifeline: int) -> None:
    """What the template does.

    lifeline: the descriptor of the template's end of a pipe. The system closes it when the template
    ends. The stand-ins read from the other end, and so notice that. The loop (answers as on the
    first page): waits for ids of stand-ins, and for the ends of these and of workers / woken by
    those who write ids, and by the system / produces workers / ends with the main process.
    """
    os.setpgid(0, 0)  # Ctrl-C on the terminal is for the main process
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system forgets workers that have ended
    gc.disable()  # to look for garbage would take a tenth of the imports' time, and find none
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    # Nor will workers look for garbage among these objects. To look at one writes a mark into it,
    # and the system would have to copy the page that it shares with the template.
    gc.freeze()
    gc.enable()
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is not sys.stdin:
                end_pair(key, selector)
                continue
            lines = os.read(0, 4096).split()  # an id each; several may have come
            if not lines:
                return  # the main process has ended
            for line in lines:
                fork_for(int(line), selector, lifeline)


def fork_for(stand_in_id: int, selector: selectors.BaseSelector, lifeline: int) -> None:
    """Makes the worker of this stand-in, and has both watched."""
    template_id = os.getpid()
    try:
        # A pidfd is a file descriptor for a process: it becomes readable when the process ends.
        stand_in = os.pidfd_open(stand_in_id)
    except ProcessLookupError:
        return  # it has ended meanwhile
    try:
        variables = variables_of(stand_in_id)
    except (ProcessLookupError, FileNotFoundError):
        variables = {}
    if STARTS_FILE not in variables:  # it has ended since, and its environment is gone
        os.close(stand_in)
        return
    worker_id = os.fork()
    if worker_id == 0:
        selector.close()
        os.close(lifeline)
        become_worker(variables, template_id)
    note_start(variables, worker_id)
    try:
        worker = os.pidfd_open(worker_id)
    except ProcessLookupError:  # it has ended already
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(stand_in, signal.SIGKILL)
        os.close(stand_in)
        return
    selector.register(stand_in, selectors.EVENT_READ, worker)
    selector.register(worker, selectors.EVENT_READ, stand_in)


def end_pair(key: selectors.SelectorKey, selector: selectors.BaseSelector) -> None:
    """One of a worker and its stand-in has ended, so the other one must."""
    # One `select` may report both ends. Then the first report has closed both descriptors, and at
    # the second there is nothing left to do. By then the number of the closed descriptor may be
    # that of a new one, of another pair. So this looks for the very key that was reported, not for
    # its number.
    registered_now = selector.get_map().get(key.fd)
    if registered_now is not key:
        return
    for descriptor in (key.fd, key.data):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
        selector.unregister(descriptor)
        os.close(descriptor)


def variables_of(process_id: int) -> dict[str, str]:
    """The environment variables with which a process was started. OSError: it has ended."""
    found = {}
    for line in pathlib.Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0"):
        name, equals_sign, value = os.fsdecode(line).partition("=")
        if equals_sign:  # else it is the empty piece behind the last variable
            found[name] = value
    return found


def note_start(variables: dict[str, str], worker_id: int) -> None:
    """Writes the worker's id into a file: there its owner, the main process, reads it.

    The owner needs the file only until the worker itself has told its id (Starts, in section 5).
    """
    # Without the main process there is no such file, and soon no template either.
    with contextlib.suppress(OSError), open(variables[STARTS_FILE], "a", encoding="ascii") as file:
        file.write(f"{variables[STARTS_NAME]} {worker_id}\n")


def become_worker(variables: dict[str, str], template_id: int) -> None:
    """In the fork: becomes what Monarch wanted to start. It does not return.

    variables: of the environment of its stand-in.
    """
    end_with_parent()
    # If the template ended before end_with_parent was called, another process is the parent now.
    if os.getppid() != template_id:
        os._exit(1)
    os.setpgid(0, 0)  # as Monarch does for each process that it starts
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Standard input is still the template's pipe, and a worker must not read ids out of it.
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(variables)
    sys.argv = sys.argv[:1]  # without the template's arguments: Monarch's command has none
    runpy.run_module(WORKER_MODULE, run_name="__main__", alter_sys=True)
    os._exit(0)


if __name__ == "__main__" and sys.argv[1:2] == [TEMPLATE_FLAG]:
    serve_as_template(lifeline=int(sys.argv[-1]))
    os._exit(0)

# -- plumbing: Monarch, and modules that are imported late -----------------------------------------
import monarch.actor
from monarch._rust_bindings.monarch_hyperactor.config import reload_config_from_env
from monarch._rust_bindings.monarch_hyperactor.host_mesh import BootstrapCommand
from monarch._rust_bindings.monarch_hyperactor.supervision import MeshFailure, SupervisionError
from monarch.actor import (
    Actor,
    ActorError,
    Endpoint,
    ProcMesh,
    attach_to_workers,
    concurrent_endpoint,
    current_rank,
    current_size,
    enable_transport,
    endpoint,
    get_or_spawn_controller,
    this_host,
    this_proc,
)
from monarch.rdma import RDMABuffer, get_rdma_backend


class Lazy(types.ModuleType):
    """A module that is imported at its first use.

    torch costs 1.6 s of CPU in a process that imports it, and transformers 2.4 s more. Most
    processes of stages 1 to 6 use neither. So `torch` below is an object that imports the real
    torch when the first of its attributes is asked for, such as `torch.zeros`.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.__name__), name)


if TYPE_CHECKING:  # what type checkers and editors see
    import numpy
    import torch
    import torch.distributed.checkpoint.state_dict as dcp
    import torch.distributed.device_mesh as device_mesh
    import torch.distributed.fsdp as fsdp
    import torch.distributed.tensor as dtensor
    import torch.utils.checkpoint as checkpointing
    import transformers
    import transformers.distributed.tensor_parallel as tensor_parallel
else:
    numpy = Lazy("numpy")
    torch = Lazy("torch")
    dcp = Lazy("torch.distributed.checkpoint.state_dict")
    device_mesh = Lazy("torch.distributed.device_mesh")
    fsdp = Lazy("torch.distributed.fsdp")
    dtensor = Lazy("torch.distributed.tensor")
    checkpointing = Lazy("torch.utils.checkpoint")
    transformers = Lazy("transformers")
    tensor_parallel = Lazy("transformers.distributed.tensor_parallel")

MIB = 1 << 20  # bytes

# What `main` sets for itself, and so for every process that it starts. Importing this file sets
# nothing; whoever uses it as a library calls `prepare_environment` first. What the first three are
# for is best understood after section 5, which says how a dead process is noticed.
ENVIRONMENT = {
    # How often Monarch looks whether a process still lives: every 10 s unless told. More often than
    # this would cost memory: each look asks each process, and of each message that wants a reply
    # Monarch keeps 2 KiB for good (measured in DOCS 6). It would also gain little, for a pidfd
    # tells of the end of a process in milliseconds.
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "2s",
    # How long a look waits for the reply of a process that dies meanwhile: 30 s unless told.
    "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "5s",
    # How long a process may take to start: 30 s unless told. Those with a model wait until the
    # template has imported, which on a busy machine may take longer than that.
    "HYPERACTOR_MESH_PROC_SPAWN_MAX_IDLE": "120s",
    # Copies above 128 KiB bypass the cache, and so do not read what they overwrite (section 7).
    # The C library reads this when a process starts. (On aarch64 it knows no such limit, and passes
    # over the name.)
    "GLIBC_TUNABLES": "glibc.cpu.x86_non_temporal_threshold=0x20000",
    # Several processes share the cores, so each computes in one thread, except trainers and
    # generators of a large model (--threads).
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # The network interface of gloo, by which torch moves tensors between processes on CPUs. `lo`
    # reaches this host alone. A trainer over several hosts takes another (section 16).
    "GLOO_SOCKET_IFNAME": "lo",
    # Monarch asks for this when it registers GPU memory for RDMA.
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    # Remarks and progress bars that would stand between the lines of the report.
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # Processes import this file by its name, and not another one of that name in the folder where
    # the command was started (Python 3.11 and later).
    "PYTHONSAFEPATH": "1",
}


def prepare_environment() -> None:
    """Sets ENVIRONMENT for this process and those that it will start.

    What you have set yourself stays as it is; PYTHONPATH gets this file's folder in front of it.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    # Workers find this file by its folder, wherever the command was started.
    folder = os.path.dirname(os.path.abspath(__file__))
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{folder}:{before}".strip(":")
    # Monarch has read its variables already, when it was imported above. Now it reads them again.
    reload_config_from_env()


# -- plumbing: what a run can be told --------------------------------------------------------------


def setting(
    default: Any,
    meaning: str,
    least: float | None = None,
    choices: str = "",
    kind: type | None = None,
    is_kept: bool = False,
) -> Any:
    """A field of Config, with what --help says of it.

    default: False makes a flag without a value. meaning: its line of --help. least: the smallest
    value that is allowed, if there is one. choices: the only values that are allowed, separated by
    spaces; "": any. kind: of the value; None: that of the default.

    is_kept: must a run that goes on from a checkpoint (section 12) keep the value? True: a run with
    another value would be another run, so another value is refused, in one line. False: another
    value counts from the next step on.
    """
    kind = kind or type(default)
    metadata = {"meaning": meaning, "least": least, "choices": choices.split(), "kind": kind}
    return field(default=default, metadata={**metadata, "is_kept": is_kept})


def flag_of(name: str) -> str:
    """The flag of a field of Config."""
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Config:
    """Everything that a run can be told; each field is a flag.

    It is passed to the constructor of every actor that needs it. A global variable would not do:
    each worker is a process of its own with its own copy of this module, and would see the default.
    At a first reading pass over the fields: the sections named above them say what each does.
    """

    # What is trained, and how long.
    task: str = setting(
        "repeat", "repeat, echo, count, pattern, users, FILE.py:CLASS, FILE.jsonl", is_kept=True
    )
    model: str = setting(
        "tiny", "folder or hub id of a causal LM, or the built-in tiny one", is_kept=True
    )
    steps: int = setting(200, "training steps in async_rl, half as many in sync_rl", least=1)
    batch_groups: int = setting(16, "prompts per training step, each with a group", least=1)
    group_size: int = setting(8, "episodes per prompt: the mean of few is a poor baseline", least=1)
    generators: int = setting(2, "replicas of the generator service", least=1)
    # Generators can be added while a run goes on (Service.resize, section 6). Room for them must be
    # there from the start, for each may need a slot (section 7).
    max_generators: int | None = setting(
        None,
        "most that there can be; None: one more than there are",
        least=1,
        kind=int,
    )
    judges: int = setting(2, "replicas of the judge service", least=1)
    max_new_tokens: int | None = setting(
        None,
        "tokens of an answer at most; None: what the task says",
        least=1,
        kind=int,
    )
    temperature: float = setting(
        1.0, "logits are divided by it, in sampling and in training", least=0.01
    )
    trainers: int = setting(1, "ranks over which the trainer is sharded with FSDP2", least=1)
    trainer_hosts: int = setting(1, "hosts that share these ranks: the first of --hosts", least=1)
    tensor_parallel: int = setting(
        1, "ranks of a generator, among which its layers are cut", least=1
    )
    # How. Section 13, which also says why in_flight has these defaults.
    max_lag: int = setting(2, "K: nothing older than so many versions is trained on", least=0)
    order: str = setting(
        "ready",
        "ready: late groups are dropped; window: the trainer waits",
        choices="ready window",
    )
    in_flight: float | None = setting(
        None, "batches under way at most; None: K + 1, or K + 1/2 with window", least=1, kind=float
    )
    request_groups: int | None = setting(
        None, "groups in a request; None: the more generators, the fewer", least=1, kind=int
    )
    # Sections 10 and 14.
    loss: str = setting(
        "ppo",
        "what an update minimises (section 10)",
        choices="reinforce ppo decoupled gspo cispo dppo",
    )
    baseline: str = setting(
        "group", "what a reward is compared with", choices="group none batch leave_one_out critic"
    )
    turn_lambda: float = setting(0.8, "critic: lambda of GAE from turn to turn, 0 to 1", least=0)
    token_lambda: float = setting(1.0, "critic: the same from token to token, in a turn", least=0)
    critic_lr: float | None = setting(
        None, "learning rate of the critic; None: 3e-3 for tiny, else 1e-5", least=0, kind=float
    )
    clip_low: float = setting(
        0.2, "ppo, decoupled, gspo: how far a ratio may fall below 1", least=0
    )
    clip_high: float = setting(0.2, "ppo, decoupled, gspo: how far it may rise above 1", least=0)
    max_weight: float = setting(
        2.0, "cispo, decoupled: larger weights of a token are cut off", least=0
    )
    # Sections 11 and 15.
    length_penalty: float = setting(
        0.0, "reward that a turn loses per token beyond --free-tokens", least=0
    )
    free_tokens: int = setting(0, "tokens of a turn that cost nothing", least=0)
    reward: str = setting(
        "task", "who judges: the task, or a reward model", choices="task model", is_kept=True
    )
    preferences: str = setting("", "FILE.jsonl, from which the reward model learns", is_kept=True)
    ask_every: int = setting(0, "steps until it learns again, from the task; 0: never", least=0)
    # Section 11.
    passes: int = setting(1, "updates per batch", least=1)
    lr: float | None = setting(
        None, "learning rate; None: 1e-3 for tiny, else 1e-6", least=0, kind=float
    )
    kl: float = setting(0.0, "weight of the divergence from the policy before RL", least=0)
    entropy: float | None = setting(
        None, "weight of an entropy bonus; None: 0.01 for tiny, else 0", least=0, kind=float
    )
    pull: str = setting("rollout", "new weights come before each of these", choices="rollout token")
    sft_steps: int = setting(
        0, "supervised steps on right answers, before RL", least=0, is_kept=True
    )
    sft_lr: float = setting(
        1e-5, "their learning rate; about 1e-3 for fresh weights", least=0, is_kept=True
    )
    seed: int = setting(0, "of sampling, initial weights and prompts", least=0, is_kept=True)
    device: str = setting("cpu", "where policies compute", choices="cpu cuda")
    no_graphs: bool = setting(False, "on a GPU, have no CUDA graphs of the token step (section 9)")
    dtype: str | None = setting(
        None,
        "policies compute in it; None: float32 on cpu, bfloat16 on cuda",
        choices="float32 bfloat16",
        kind=str,
    )
    recompute: bool = setting(False, "backward computes each layer again: slower, with less memory")
    threads: int | None = setting(
        None,
        "per trainer, generator; None: 1 for tiny, else a share of cores",
        least=1,
        kind=int,
    )
    # Section 5.
    stuck_after: float = setting(
        120.0, "seconds a worker other than a judge may make no progress", least=1
    )
    judge_stuck_after: float = setting(5.0, "seconds that a reward may take", least=0.5)
    # Sections 7 and 8; then 16.
    model_mb: int = setting(64, "MiB of weights in weight_sync and in reshard", least=1)
    hosts: str = setting("", "tcp://ADDRESS:PORT,... of other hosts, on which --worker runs")
    secret: str = setting("", "file with a secret, the same for --worker and for --hosts")
    relay_fanout: int = setting(0, "hosts that read from one; 0: all read from the first", least=0)
    # What is written. Nothing is, unless you ask for it.
    json: str = setting("", "file for everything that was measured")
    log: str = setting("", "file for a JSON line per training step")
    trace: str = setting("", "file for who did what and when, as Perfetto reads it")
    report: str = setting("", "file for a page; async_rl also runs at five bounds on lag for it")
    compare: str = setting("", "file of an earlier --json, to lay beside this run on the page")
    checkpoint: str = setting("", "folder for checkpoints, from which a run goes on")
    save_every: int = setting(50, "steps between two checkpoints", least=1)
    export: str = setting("", "folder for the trained model, as transformers reads it")
    export_dtype: str | None = setting(
        None,
        "of exported weights; None: that of the model's folder",
        choices="float32 bfloat16",
        kind=str,
    )
    evaluate: int = setting(0, "samples per held-out prompt to evaluate; 0: not at all", least=0)


# -- plumbing: files that are written --------------------------------------------------------------
# A disk may be full, a folder may be read-only, or go away while a run is under way. Then whoever
# asked for the file gets one line, and not a traceback through this program, in which nothing is
# wrong. And what was whole before stays so:
#
#     --log                             a line is added, or nothing
#     --json, --trace, --report         written into PATH.unfinished, which then gets the name PATH
#     --checkpoint                      the same (section 12)
#     --export                          the same (in the part behind section 16)
#
# Without a checkpoint a run cannot go on after a power cut, so a checkpoint that cannot be written
# ends the stage. Without one of the other files the run is worth as much as before: it goes on, and
# only the exit status is 1.

CANNOT_WRITE = "cannot write "  # how the text of a NotWritten begins


class NotWritten(OSError):
    """The system refused to write something; the text, all that it has, says what, and why."""


@contextlib.contextmanager
def writing(path: str, unfinished: str = "") -> Iterator[None]:
    """If the body cannot write because of the system, this raises NotWritten.

    path: what is to be written. unfinished: a file or a folder that is removed whenever the body
    raises, for what has been written of it may be what fills the disk.
    """
    try:
        yield
    except Exception as error:
        if os.path.isdir(unfinished):
            shutil.rmtree(unfinished, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.remove(unfinished)
        reason = reason_of_system(error)
        if not reason:
            raise
        raise NotWritten(f"{CANNOT_WRITE}{path}: {reason}") from error


def reason_of_system(error: BaseException) -> str:
    """Why the system refused, as "No space left on device"; "": the error is not of the system.

    torch raises an exception of its own while it handles that of the system. An exception of
    safetensors, which is written in Rust, has the number of the system's error only in its text.
    """
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    if in_text:
        return os.strerror(int(in_text.group(1)))
    found: BaseException | None = error
    while found is not None and not isinstance(found, OSError):
        found = found.__cause__ or found.__context__
    return (found.strerror or str(found)) if found else ""


def flush_to_disk(path: str) -> None:
    """Returns when the disk has it: of a file its content, of a folder its names."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:  # also after an error: a removed file keeps its space while a descriptor is open
        os.close(descriptor)


def written_first(path: str) -> str:
    """The path where a file is written first. Afterwards the file is renamed to `path`.

    It is the path itself for what cannot be renamed: a device, a pipe, or a file that has no name
    in any folder (`unnamed_file`, below).
    """
    real = os.path.realpath(path)  # if it is a link to a file, it shall stay one
    is_special = os.path.exists(path) and not os.path.isfile(real)
    return path if is_special else f"{real}.unfinished"


def write_file(path: str, text: str) -> None:
    """Writes all of a file, or leaves what stood there before."""
    place = written_first(path)
    if place == path:
        with writing(path):
            pathlib.Path(path).write_text(text, encoding="utf-8")
        return
    real = place.removesuffix(".unfinished")
    with writing(path, unfinished=place):
        pathlib.Path(place).write_text(text, encoding="utf-8")
        flush_to_disk(place)
        os.replace(place, real)
        flush_to_disk(os.path.dirname(real))


def append_line(path: str, line: str) -> None:
    """Adds a line to a file, or nothing: never half a line, to which the next would be joined."""
    with writing(path), open(path, "ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        left = f"{line}\n".encode()
        try:
            # A write may take only a part. On a full disk the next one raises, and says why.
            while left:
                left = left[file.write(left) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe has no size
                file.truncate(size)
            raise


# -- plumbing: the report --------------------------------------------------------------------------
# One banner, one section, one claim, one demo: a coroutine demo_<name of the stage> that closes the
# section. The decorator `stage` enters it into STAGES, in the order of the file.
#
# What a stage prints, from top to bottom:
#
#     [7/16] weight_sync: the claim, in a sentence  (the line of the file where its section begins)
#            a table or a few lines of what was measured (first without the rule, if that is shown)
#         ok what is checked: what was found  (what it must be, if that is not plain)
#            try: what to change in which line to see the claim fail
#            how many checks, how many seconds
#
# The line that makes a claim true ends with a comment "mechanism: NAME". Each stage ends with a
# hint that tells how to change that line. Do it, and that stage fails: so you see what the line is
# for. The tests make the same changes, and expect just that stage to fail. Some lines have such a
# comment, but no hint names them. Only the tests change these, for no demo could show in seconds
# what they do.


@dataclass(frozen=True)
class Stage:
    """One entry of --list."""

    number: int
    name: str  # of --stage and --only
    claim: str  # what the demo proves, or fails
    hint: str  # what to change in the file to see the claim fail
    mechanism: str  # the name in the comment of the line that the hint means
    demo: Callable[..., Awaitable[None]]
    needs_lab: bool  # is the demo given a Lab, the running actors of RL (section 11)?
    # Must messages travel by TCP? The other stages use Unix sockets, which stay on this machine. A
    # process has to decide for one of the two.
    needs_tcp: bool


STAGES: dict[str, Stage] = {}  # by name; complete when this file has been imported
Demo = TypeVar("Demo", bound=Callable[..., Awaitable[None]])


def stage(
    claim: str,
    hint: str,
    mechanism: str,
    needs_lab: bool = False,
    needs_tcp: bool = False,
) -> Callable[[Demo], Demo]:
    """A decorator for demos, which enters the demo below it into STAGES.

    The parameters are fields of Stage.
    """

    def enter(demo: Demo) -> Demo:
        name = demo.__name__.removeprefix("demo_")
        STAGES[name] = Stage(
            number=len(STAGES) + 1,
            name=name,
            claim=claim,
            hint=hint,
            mechanism=mechanism,
            demo=demo,
            needs_lab=needs_lab,
            needs_tcp=needs_tcp,
        )
        return demo

    return enter


@functools.cache
def line_with(text: str) -> int:
    """The number of the first line of this file that ends with this text; 0 if there is none.

    So the line numbers that a run prints are right also after you have changed the file.
    """
    lines = pathlib.Path(__file__).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if line.endswith(text):
            return number
    return 0


def line_of_section(stage: Stage) -> int:
    """The number of the line with the banner of its section."""
    title = f"# == {stage.number}. {stage.name.upper().replace('_', ' ')} "
    return line_with(title.ljust(100, "="))


def visible(text: str) -> str:
    r"""Text with its control characters written out, such as \x1b; ends of lines remain.

    A policy can say anything, and a task, a worker or another host can quote it. A terminal obeys
    some characters: they move the cursor, rename the window, turn the order of letters round.
    """
    # [1:-1] takes the quotes off what repr returns.
    return "".join(ch if ch.isprintable() or ch == "\n" else repr(ch)[1:-1] for ch in text)


def folded(text: str, width: int, num_spaces: int) -> str:
    """Text in lines of this width, those behind the first indented. A path stays in one piece."""
    return textwrap.fill(
        text,
        width,
        subsequent_indent=" " * num_spaces,
        break_long_words=False,
        break_on_hyphens=False,
    )


class Terminal:
    """Prints lines of 80 columns, and on a terminal, while all is silent, what is under way."""

    WIDTH = 80  # columns, of a terminal that nobody has widened
    INDENT = " " * 7
    CLEAR_LINE = "\r\x1b[K"  # on a terminal: what erases the live line
    QUIET_S = 1.0  # after so much silence a live line shows what is under way

    def __init__(self) -> None:
        # A dumb terminal, such as an editor's, would print the code that erases a line.
        self.is_terminal = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self.last_print_s = time.monotonic()
        self.activity = ""  # what is under way, for the live line
        self.stage_start_s = time.monotonic()

    def say(self, *lines: str, indent: str = INDENT) -> None:
        """Prints lines; folds those that are too long for a terminal."""
        for line in lines:
            text = indent + visible(line).rstrip(" ")
            if len(text) > self.WIDTH:
                own_indent = len(text) - len(text.lstrip())
                text = folded(text, self.WIDTH, max(len(self.INDENT), own_indent))
            self._put(text)

    def _put(self, text: str, end: str = "\n") -> None:
        """Prints a line as it is, in the place of the live line if there is one."""
        clear = self.CLEAR_LINE if self.is_terminal else ""
        print(clear + text.rstrip(" "), end=end, flush=True)
        self.last_print_s = time.monotonic()

    def say_live(self, line: str) -> None:
        """On a terminal, a line that the next one replaces; elsewhere nothing."""
        if self.is_terminal:
            self._put((self.INDENT + visible(line))[: self.WIDTH - 1], end="")

    def doing(self, what: str) -> None:
        """Notes what is under way from now on. The clock shows it if that takes a while."""
        self.activity = what

    async def keep_clock(self) -> None:
        """Shows the time since the stage began, and what is under way, when all is silent.

        waits for silence / produces a live line / ends when it is cancelled
        """
        while True:
            await asyncio.sleep(0.5)
            if since(self.last_print_s) > self.QUIET_S:
                self.say_live(f"{since(self.stage_start_s):.0f} s: {self.activity}")


class Report(Terminal):
    """Prints what the stages have to say, and keeps what they measured.

    In a run nothing else prints, because what workers print comes late and out of order. A stage
    has checks, figures and tables: checks decide whether it holds, tables are printed, and --json
    has all three.
    """

    RELATIONS: ClassVar = {
        "==": operator.eq,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
    }
    END_WITHIN_S = 60.0

    def __init__(self) -> None:
        super().__init__()
        self.stages: list[dict[str, Any]] = []  # what --json has of each, the present one last
        self.sweep: list[dict[str, Any]] = []  # runs at several bounds on lag, for --report
        self.ends: list[Callable[[], Awaitable[object]]] = []  # of what this stage has started
        self.unwritten: list[str] = []  # flags whose files could not be written

    def at_end(self, end: Callable[[], Awaitable[object]]) -> None:
        """Has this called when the stage is over, also if it fails.

        A demo says so of whatever it starts: else processes, and their memory, would stay.
        """
        self.ends.append(end)

    async def end_all(self) -> None:
        """Ends what this stage has started, the last first. Raises the first error of these.

        What does not end within END_WITHIN_S, such as a process that has got a SIGSTOP, counts as
        an error, too.
        """
        errors = []
        while self.ends:
            end = self.ends.pop()
            try:
                await asyncio.wait_for(end(), self.END_WITHIN_S)
            except Exception as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def note_unwritten(self, flag: str, error: NotWritten) -> None:
        """Says, once, that the file of this flag cannot be written. `finish` says it again."""
        if flag not in self.unwritten:
            self.unwritten.append(flag)
            self.say(f"{flag}: {error}")

    def table(self, rows: Sequence[Any]) -> None:
        """Prints records as a table, and keeps them for --json.

        rows: records of one class, or dicts with the same keys. Each field becomes a column, with
        its name as the head; words stand to the left in it, numbers to the right.
        """
        entries = []
        for row in rows:
            entries.append(row if isinstance(row, dict) else dataclasses.asdict(row))
        room = self.WIDTH - len(self.INDENT)
        lines = lines_of_table(entries, folds_heads=False, gap=2)
        if max(len(line) for line in lines) > room:
            lines = lines_of_table(entries, folds_heads=True, gap=2)
        if max(len(line) for line in lines) > room:
            lines = lines_of_table(entries, folds_heads=True, gap=1)
        for line in lines:
            self._put(self.INDENT + visible(line))
        self.stages[-1]["tables"].append(entries)

    def figure(self, **figures: float | int | str | None) -> None:
        """Keeps values for --json. A name says its unit, if there is one; None: not known."""
        self.stages[-1]["figures"].update(figures)

    def check(
        self,
        what: str,
        got: Any,
        relation: str,
        want: Any,
    ) -> None:
        """Compares what was measured with what the claim says.

        A failure makes the exit status of the command 1, and so does None, such as a mean of no
        values. What is checked are counts, bytes and differences, which are the same on a busy
        machine. How long something took is shown, and fails nothing. Where a claim is about time,
        it is whether two things overlapped, or a ratio of times, which a busy machine stretches
        alike.
        """
        holds = self.RELATIONS[relation]
        ok = got is not None and bool(holds(got, want))
        wanted = f"{relation} {show(want)}"
        found = {"what": what, "got": show(got), "want": wanted, "ok": ok}
        self.stages[-1]["checks"].append(found)
        expected = "" if ok and relation == "==" else f"  ({wanted})"  # "0  (== 0)" says it twice
        self.say(f"{what}: {show(got)}{expected}", indent="    ok " if ok else "  FAIL ")

    def curve(self, of_run: dict[str, Any]) -> None:
        """Keeps for --json how a run went (curve_of)."""
        if self.stages:  # else nobody asks: the run was not made by a stage
            self.stages[-1]["curves"].append(of_run)

    def keep_sweep(self, runs: list[dict[str, Any]]) -> None:
        """Keeps runs at several bounds on lag, for the page's slider, and no longer as curves."""
        self.sweep = runs
        del self.stages[-1]["curves"][-len(runs) :]

    def enter_losses(self, events: list[Event]) -> None:
        """Adds to each run which replicas were lost meanwhile. events: of Telemetry (section 4)."""
        losses = [event for event in events if event.actor.endswith(" lost")]
        for found in self.stages:
            for curve in found["curves"]:
                enter_losses_of_run(losses, curve)

    def _begin(self, name: str, number: int | None, claim: str) -> None:
        entry = {"name": name, "number": number, "claim": claim}
        self.stages.append({**entry, "checks": [], "figures": {}, "tables": [], "curves": []})
        self.stage_start_s = time.monotonic()

    def begin_stage(self, stage: Stage) -> None:
        """Prints its head: number, name, claim, and the line where its section begins."""
        self._begin(stage.name, stage.number, stage.claim)
        self.doing("starting processes")
        line = line_of_section(stage)
        head = f"[{stage.number}/{len(STAGES)}] {stage.name}: {stage.claim}  (line {line})"
        self.say(head, indent="")

    def begin_command(self, name: str) -> None:
        """Prints the head of what is no stage: --evaluate or --export by itself."""
        self._begin(name, None, "")
        self.doing("loading the model")
        self.say(name, indent="")

    def end_command(self, seconds: float) -> None:
        """Prints its foot."""
        ok = all(check["ok"] for check in self.stages[-1]["checks"])
        self.stages[-1].update(ok=ok, seconds=round(seconds, 2))
        self.say(f"{seconds:.1f} s", "")

    def take_over(self, found: dict[str, Any]) -> None:
        """Adds what --json of another process has of a stage."""
        self.stages.append(found)

    def end_stage(self, stage: Stage, seconds: float) -> None:
        """Prints its foot: the hint, and how long it took."""
        line = line_with(f"# mechanism: {stage.mechanism}")
        hint = f"try: in line {line}, {stage.hint}; then --only {stage.name}"
        checks = self.stages[-1]["checks"]
        self.say(hint, f"{len(checks)} checks, {seconds:.1f} s", "")
        ok = all(check["ok"] for check in checks)
        self.stages[-1].update(ok=ok, seconds=round(seconds, 2))


def enter_losses_of_run(losses: list[Event], curve: dict[str, Any]) -> None:
    """Adds to a run the losses that came while it went on."""
    for event in losses:
        second = event.start_s - curve["began_s"]
        if 0 <= second <= max(curve["seconds"], default=0.0):
            curve["lost"].append(
                {
                    "second": round(second, 3),
                    "replica": event.actor.removesuffix(" lost"),
                    "why": event.what,
                    "replaced_after_s": round(event.end_s - event.start_s, 3),
                }
            )


def lines_of_table(entries: list[dict[str, Any]], folds_heads: bool, gap: int) -> list[str]:
    """The lines of a table.

    folds_heads: may a head of several words stand on several lines? Then a column is as wide as
    its values, or its longest word. gap: spaces between two columns.
    """
    columns = []
    for name in entries[0]:
        values = [entry[name] for entry in entries]
        shown = [show(value) for value in values]
        head = [name.replace("_", " ")]
        if folds_heads:
            words = head[0].split()
            head = textwrap.wrap(head[0], max(len(text) for text in words + shown))
        columns.append((head, shown, any(isinstance(value, str) for value in values)))
    height = max(len(head) for head, _, _ in columns)
    lines = [""] * (height + len(entries))
    for head, shown, is_words in columns:
        cells = [""] * (height - len(head)) + head + shown
        width = max(len(cell) for cell in cells)
        for i, cell in enumerate(cells):
            filled = cell.ljust(width) if is_words else cell.rjust(width)
            lines[i] += filled + " " * gap
    return [line.rstrip() for line in lines]


@contextlib.contextmanager
def excusing(report: Report, flag: str) -> Iterator[None]:
    """If the body cannot write the file of this flag, the run goes on without it."""
    try:
        yield
    except NotWritten as error:
        report.note_unwritten(flag, error)


def as_json(found: Any, indent: int | None = None) -> str:
    """JSON that any program can read: a number that is not finite becomes null.

    Python would write NaN and Infinity, which JSON has not.
    """
    return json.dumps(finite(found), indent=indent, allow_nan=False)


def finite(found: Any) -> Any:
    """The same, with None in place of numbers that are not finite."""
    if isinstance(found, float):
        return found if math.isfinite(found) else None
    if isinstance(found, dict):
        return {name: finite(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [finite(value) for value in found]
    return found


def show(value: Any) -> str:
    """A number as it is printed: 0.0034, 0.52, 17.30, 1234. What is not known (None) is a dash."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if 0 < abs(value) < 0.1:
        return f"{value:.2g}"
    return f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"


# -- plumbing: times, and errors of actors ---------------------------------------------------------
# What demos use to measure, and to say what a caller has seen.


def since(start: float) -> float:
    """Seconds that have passed since `start`, a time.monotonic()."""
    return time.monotonic() - start


def began_s() -> float:
    """When the command began to run this file, as time.monotonic() has it.

    The start of the process would not do: if a shell becomes Python by `exec`, it is the shell's.
    """
    # In the main process this file is there twice: first as `__main__`, the program, which then
    # imports it as `monarch_rl`, the name by which workers find its classes (last lines).
    return getattr(sys.modules["__main__"], "FIRST_LINE_S", FIRST_LINE_S)


def cause(error: BaseException) -> BaseException:
    """The exception that an endpoint raised, out of the ActorErrors that carried it here.

    An endpoint is a method of an actor that messages may call (section 1). Monarch wraps what it
    raises into an ActorError, whose text begins with other things. If the endpoint was called by
    another endpoint, there are several around each other.
    """
    while isinstance(error, ActorError):
        error = error.exception
    return error


async def outcome(call: Callable[[], Awaitable[Any]], deadline_s: float | None = None) -> Any:
    """What a caller sees: the answer, or the name of the exception that it gets instead."""
    try:
        return await asyncio.wait_for(call(), deadline_s)
    except Exception as error:
        return type(cause(error)).__name__


async def median_ms(call: Callable[[], Awaitable[Any]], num_calls: int = 50) -> float:
    """Milliseconds from a call to its answer, the median of some calls."""
    took_ms = []
    for _ in range(num_calls):
        start = time.monotonic()
        await call()
        took_ms.append(since(start) * 1e3)
    return statistics.median(took_ms)


def unnamed_file(name: str) -> str:
    """A path to an empty file in memory, which other processes of this host can open.

    It stands in no folder, and is gone when this process closes it or ends, even by kill -9.
    """
    return f"/proc/{os.getpid()}/fd/{os.memfd_create(name)}"


def close_unnamed_file(path: str) -> None:
    """For the process that made it: the last part of the path is its file descriptor."""
    os.close(int(pathlib.Path(path).name))


# == 1. HELLO ACTOR ================================================================================
# Problem. Several threads share an object. Each reads it, pauses, and writes back what it made of
#   it. Updates vanish, without an error, and not every time.
# Rule. Put the object into an actor: an instance that lives in one process and is reached only by
#   messages. The methods that messages may call are its endpoints. Messages wait in the actor's
#   mailbox. Endpoints run one at a time, in the order in which a caller sent the messages, so none
#   ever sees another one half done. Two actors share nothing, and work at the same time.
# Cost. A message and its answer take the time of thousands of function calls; the demo shows both.
# Not here. Endpoints that may overlap (section 6).      Source. Hewitt, Bishop, Steiger 1973.
#
#     main process                            process of the actor
#     tally.add.call_one()   -- message -->   waits in the mailbox until earlier ones are done
#     await ...              <-- answer --    add() has run from its first line to its last


@dataclass(frozen=True)
class Addition:
    """What Tally.add answers."""

    rank: int  # of the actor, among those that were spawned together: 0, 1, ...
    process_id: int
    start_s: float  # by the monotonic clock, which is one for all processes of a host
    end_s: float


class Tally(Actor):
    """A counter, of which section 2 makes a mesh.

    `@endpoint` marks what messages may call; anything else is an ordinary method, for the actor
    itself. To spawn actors is to make them, in processes of their own. `current_rank()` is the
    place of an actor among those that were spawned together, and `current_rank().rank` is that
    place as a single number: 0, 1, 2 and so on.
    """

    def __init__(self) -> None:
        self.rank = current_rank().rank
        self.total = 0

    @endpoint  # mechanism: one at a time
    async def add(self, pause_s: float = 0.0005) -> Addition:
        """Adds one, with a pause between reading the total and writing it.

        During that pause another thread, or another coroutine, would read the same total, and one
        of the two additions would be lost. Here the next message waits until this method is done.
        """
        start_s = time.monotonic()
        seen = self.total
        await asyncio.sleep(pause_s)
        self.total = seen + 1
        return Addition(
            rank=self.rank,
            process_id=os.getpid(),
            start_s=start_s,
            end_s=time.monotonic(),
        )

    @endpoint
    async def take(self) -> int:
        """The number of additions since this was last asked, which also sets it back to 0."""
        total = self.total
        self.total = 0
        return total


async def additions_lost_by_threads(num_additions: int) -> int:
    """Does with a plain object and threads what Tally.add does with an actor and messages.

    Each of the threads reads, pauses and writes. All that read the same total write the same sum.
    """
    box = {"total": 0}

    def add() -> None:
        seen = box["total"]
        time.sleep(0.0005)
        box["total"] = seen + 1

    await asyncio.gather(*[asyncio.to_thread(add) for _ in range(num_additions)])
    return num_additions - box["total"]


@stage(
    "an actor's state lives in its own process; calls to one actor run one at a time in the "
    "order sent; two actors overlap",
    hint="write `@concurrent_endpoint`: the actor loses additions too",
    mechanism="one at a time",
)
async def demo_hello_actor(report: Report, cfg: Config) -> None:
    """Loses additions with threads, and none with an actor; then lets two actors overlap."""
    lost = await additions_lost_by_threads(200)
    report.check("additions of 200 that threads lost", lost, ">", 0)

    # Two processes, without an actor yet, along one dimension, which gets the name "worker" here.
    procs = this_host().spawn_procs(per_host={"worker": 2})
    report.at_end(procs.stop)
    # Then an actor in each of them. This returns at once, with a reference to both actors; `slice`
    # narrows it to the one at this place of the dimension. (A reference, to one or to several, has
    # the type of the actor, here Tally.) `call_one`, below, sends a message to that one and returns
    # something to await for the answer. The message is on its way before anybody awaits.
    tallies = procs.spawn("tally", Tally)
    one = tallies.slice(worker=0)
    other = tallies.slice(worker=1)

    # All 200 messages are sent before an answer is awaited.
    additions = await asyncio.gather(*[one.add.call_one() for _ in range(200)])
    lost = 200 - await one.take.call_one()
    report.check("additions of 200 that the actor lost", lost, "==", 0)
    # Answers come in the order of the calls, so neighbours in this list were sent one after the
    # other. The actor takes both times itself, by a clock that all processes here share.
    num_early = 0
    for earlier, later in itertools.pairwise(additions):
        num_early += later.start_s < earlier.end_s
    report.check("calls that began while the previous one still ran", num_early, "==", 0)

    # Two actors at the same time, each for half a second. If they were one actor, the second call
    # would begin when the first had ended, and the overlap would be below 0.
    a, b = await asyncio.gather(one.add.call_one(0.5), other.add.call_one(0.5))
    last_start_s = max(a.start_s, b.start_s)
    first_end_s = min(a.end_s, b.end_s)
    overlap_s = first_end_s - last_start_s
    report.check("s for which both of two calls of 0.5 s ran", overlap_s, ">", 0)
    process_ids = {os.getpid(), a.process_id, b.process_id}
    report.check("processes, this one included", len(process_ids), "==", 3)

    message_ms = await median_ms(one.take.call_one)
    start = time.monotonic()
    for _ in range(1000):
        since(start)  # any function will do, such as this one
    function_ms = since(start) * 1e3 / 1000
    function_us = function_ms * 1e3
    report.say(
        f"a message to another process and its answer: {show(message_ms)} ms; "
        f"a call of a function: {show(function_us)} us"
    )
    report.figure(message_ms=message_ms)
    # You can now keep state in one place, and change it from many, without a lock.


# == 2. ACTOR MESH =================================================================================
# Problem. A run has many generators, and a trainer many ranks. A loop that calls them one by one
#   waits for the sum of their times, and a variable set in the main process reaches none of them.
# Rule. Spawn a mesh: the same actor in every process of a group. A reference to the mesh stands for
#   all its members, and one call reaches them all. How one calls says who runs and who answers:
#
#     mesh.add.call()           every member runs, every member answers
#     mesh.add.call_one()       the only member; a ValueError if there are several
#     mesh.add.choose()         one member runs and answers; Monarch draws which
#     mesh.add.broadcast()      every member runs, nobody answers
#     mesh.slice(rank=2)        the same mesh, narrowed to one member; then one of the above
#
#   What members must know is sent to them: with a call, or to their constructor. A member's number
#   in its mesh is its rank.
# Cost. A call of all members waits for the slowest of them. The demo measures it beside call_one.
# Not here. Meshes over several hosts (section 16).
# Source. Monarch, which calls these ways to call adverbs.


@dataclass(frozen=True)
class AdverbRow:
    """What one way of calling did, on a mesh of four."""

    call: str  # as it is written in Python
    ranks_that_ran: str  # such as "0 1 2 3"
    ranks_that_answered: str  # "-" if nobody did


async def adverb_row(mesh: Tally, call: str, answers: Sequence[Addition]) -> AdverbRow:
    """Asks every member whether it has just run.

    This question comes after the call that it asks about, because messages from one sender to one
    actor arrive in the order sent. So no sleep is needed, also after a call that nobody answers.
    """
    totals = await mesh.take.call()
    # `call` returns a ValueMesh: for each member its point, which knows its rank, and its answer.
    ran = []
    for point, total in totals.items():
        if total > 0:
            ran.append(str(point.rank))
    answered = [str(answer.rank) for answer in answers]
    return AdverbRow(
        call=call,
        ranks_that_ran=" ".join(ran),
        ranks_that_answered=" ".join(answered) or "-",
    )


@stage(
    "one call reaches every member; call, call_one, choose, broadcast and slice differ in who "
    "runs and who answers",
    hint="write `await mesh.add.choose()`: in the last row only one member runs",
    mechanism="every member, no answer",
)
async def demo_actor_mesh(report: Report, cfg: Config) -> None:
    """Calls a mesh of four in each way, and asks its members who has run."""
    procs = this_host().spawn_procs(per_host={"rank": 4})
    report.at_end(procs.stop)
    mesh = procs.spawn("tally", Tally)

    answers = list((await mesh.add.call()).values())
    every = await adverb_row(mesh, "mesh.add.call()", answers)
    answer = await mesh.slice(rank=2).add.call_one()
    second = await adverb_row(mesh, "mesh.slice(rank=2).add.call_one()", [answer])
    answer = await mesh.add.choose()
    chosen = await adverb_row(mesh, "mesh.add.choose()", [answer])
    # Nothing to await: it has sent its messages when it returns, and knows no more.
    mesh.add.broadcast()  # mechanism: every member, no answer
    told = await adverb_row(mesh, "mesh.add.broadcast()", [])

    rows = [every, second, chosen, told]
    report.table(rows)
    # For each row who must have run, and who must have answered. Which member `choose` draws is
    # Monarch's affair; but the one that answered must be the only one that ran.
    drawn = str(answer.rank)
    wanted = [("0 1 2 3", "0 1 2 3"), ("2", "2"), (drawn, drawn), ("0 1 2 3", "-")]
    num_wrong = 0
    for row, ran_and_answered in zip(rows, wanted, strict=True):
        num_wrong += (row.ranks_that_ran, row.ranks_that_answered) != ran_and_answered
    report.check("rows that differ from what the words mean", num_wrong, "==", 0)
    # `call_one` on a mesh of several is a mistake, and says so instead of drawing a member.
    found = await outcome(mesh.add.call_one)
    report.check("call_one on four members", found, "==", "ValueError")

    one_ms = await median_ms(mesh.slice(rank=0).take.call_one)
    four_ms = await median_ms(mesh.take.call)
    report.say(f"ms to call one member {show(one_ms)}, all four {show(four_ms)}")
    report.figure(call_one_ms=one_ms, call_four_ms=four_ms)
    # You can now tell many processes something at once, and choose who answers.


# == 3. RDMA TRANSFER ==============================================================================
# Problem. Weights are gigabytes. An actor message is pickled, copied, queued and unpickled, and is
#   answered only when the owner's Python has time.
# Rule. Two roads. Control travels in messages. Bulk stays where it is: its owner registers the
#   memory once as an RDMABuffer and sends a handle, of half a kilobyte, in a message. Whoever has
#   the handle moves the bytes, by a read or a write that is one-sided: no code of the owner runs.
# Cost. The owner must keep the memory alive, and is not told when a reader is done (section 7 is
#   about that). An RDMABuffer wants memory in one piece. A tensor that is not, such as a column of
#   a matrix, can only be sent as a copy; and who pushes bytes there fills the copy, not the matrix.
# Not here. GPU memory, which the same handle covers where there is an RDMA card.
# Source. Monarch; libibverbs, Linux's library for RDMA cards.
#
# A handle says where the bytes are: which process has them, at what address, how many there are,
# and a key with which a card, if there is one, lets others in. It holds none of the bytes.
#
# RDMA is remote direct memory access: a network card reads and writes the memory of another machine
# without that machine's processor. For that the card must know where the memory lies, and that it
# stays there, which is what registering tells it. Without such a card Monarch does the same over
# TCP: threads of its own in the owner's process, written in Rust, read the memory. They are slower
# than a card, but the contract is the same: the owner's Python takes no part, be it busy or stuck.
#
#     owner                                           reader
#     memory = torch.zeros(...)
#     RDMABuffer(memory)  ---- handle, a message ---->  handle.read_into(mine)   pulls the bytes
#                                                       handle.write_from(mine)  pushes bytes there


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a uint8 tensor on the CPU: a number that differs if almost any byte differs."""
    return zlib.crc32(tensor.numpy().data)


class Owner(Actor):
    """Owns memory and hands out handles to it."""

    # The latch is two bytes, by which Python of this process can be made to wait until somebody
    # opens it (`sit_until_latch_opens`). One says that it is open, the other that Python waits.
    OPEN = 0
    STUCK = 1

    def __init__(self) -> None:
        self.memory = torch.zeros(0, dtype=torch.uint8)
        self.latch = torch.zeros(2, dtype=torch.uint8)

    @endpoint
    async def register(self, num_bytes: int) -> RDMABuffer:
        """Makes new memory, and answers with a handle to it."""
        # The attribute keeps the memory alive. A handle does not: it only knows the address.
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8)
        return RDMABuffer(self.memory)

    @endpoint
    async def register_latch(self) -> RDMABuffer:
        """A handle to the latch."""
        return RDMABuffer(self.latch)

    @endpoint
    async def as_message(self) -> torch.Tensor:
        """The slow road: the bytes themselves."""
        return self.memory

    @endpoint
    async def sit_until_latch_opens(self, give_up_s: float) -> bool:
        """Holds up all Python of this process until somebody opens the latch.

        The actor answers no messages meanwhile, so only a one-sided write can open it. Nor does any
        other thread run Python, for this one keeps the lock that a thread needs to do so, the GIL.
        Returns False if nobody has opened it for give_up_s seconds.
        """
        # A thread that wants the GIL waits for its turn, which comes after the switch interval, or
        # when the lock is given back. `time.sleep` and torch give it back. What is called here does
        # not: calls by PyDLL keep it, and so does a look at the latch's bytes by ctypes.
        interval_s = sys.getswitchinterval()
        sys.setswitchinterval(2 * give_up_s)
        latch = (ctypes.c_uint8 * 2).from_address(self.latch.data_ptr())
        start = time.monotonic()
        latch[self.STUCK] = 1
        while latch[self.OPEN] == 0 and since(start) < give_up_s:
            ctypes.PyDLL(None).usleep(1000)
        sys.setswitchinterval(interval_s)
        return latch[self.OPEN] == 1


@dataclass(frozen=True)
class TransferRow:
    """How long the same bytes took on the two roads."""

    KiB: int
    handle_bytes: int  # pickled
    message_ms: float
    pull_ms: float
    num_wrong: int  # fetches, of both roads, that brought other bytes than were pushed


async def transfer(owner: Owner, kib: int) -> TransferRow:
    """Pushes random bytes through a handle, then fetches them on both roads.

    kib: how many units of 1024 bytes.
    """
    num_bytes = 1024 * kib
    handle = await owner.register.call_one(num_bytes)
    pushed = torch.randint(256, [num_bytes], dtype=torch.uint8)
    await handle.write_from(pushed)

    # Ones, so that every page of this memory exists before the clock starts: the system makes a
    # page only when it is first written, and that takes longer than copying into it.
    pulled = torch.ones_like(pushed)
    start = time.monotonic()
    await handle.read_into(pulled)
    pull_ms = since(start) * 1e3

    start = time.monotonic()
    message = await owner.as_message.call_one()
    message_ms = since(start) * 1e3
    should_be = checksum(pushed)
    num_wrong = sum(checksum(found) != should_be for found in (pulled, message))
    return TransferRow(
        KiB=kib,
        handle_bytes=len(pickle.dumps(handle)),
        message_ms=message_ms,
        pull_ms=pull_ms,
        num_wrong=num_wrong,
    )


@stage(
    "a handle of less than a kilobyte moves one KiB or 64 MiB, and the owner's Python takes no "
    "part in it",
    hint="await `owner.as_message.call_one()`: it waits for an owner that waits for us",
    mechanism="one-sided read",
)
async def demo_rdma_transfer(report: Report, cfg: Config) -> None:
    """Sends the same bytes on both roads; then reads from an owner whose Python is stuck."""
    procs = this_host().spawn_procs(per_host={"owner": 1})
    report.at_end(procs.stop)
    owner = procs.spawn("owner", Owner)
    await transfer(owner, kib=1)  # not in the table: the first one also opens connections
    rows = []
    for kib in (1, 1024, 64 * 1024):
        report.doing(f"fetches of {kib} KiB, by message and by handle")
        rows.append(await transfer(owner, kib))
    report.table(rows)
    num_wrong = sum(row.num_wrong for row in rows)
    report.check(f"of {2 * len(rows)} fetches, those with wrong bytes", num_wrong, "==", 0)
    report.check("largest handle, bytes", max(row.handle_bytes for row in rows), "<", 1024)

    # Does the owner's Python take part? Now it is stuck, until a write through a handle opens its
    # latch. Whatever comes back before the latch is opened came without the owner's Python. Three
    # things are sent, in this order: a call that makes the owner stick, a message, which waits
    # behind that call, and a one-sided read.
    handle = await owner.register.call_one(MIB)
    latch = await owner.register_latch.call_one()
    stuck = asyncio.ensure_future(owner.sit_until_latch_opens.call_one(20.0))
    message = asyncio.ensure_future(owner.as_message.call_one())
    pulled = torch.ones(MIB, dtype=torch.uint8)
    state = torch.zeros(2, dtype=torch.uint8)
    while state[Owner.STUCK] == 0:
        await latch.read_into(state)  # one-sided too
    await handle.read_into(pulled)  # mechanism: one-sided read
    num_answered = int(message.done())
    # The pull has ended. Was the owner stuck all the while? It was when the pull began, as the loop
    # above has seen. Only two things can free it: the latch, which is opened here, after the pull,
    # or its own patience of 20 s. It answers True if it was the latch. Then it was stuck until now,
    # and so its Python had no part in the pull.
    await latch.write_from(torch.ones(2, dtype=torch.uint8))
    was_still_stuck = await stuck
    num_pulled = 1 if was_still_stuck else 0
    report.check("messages that the stuck owner has answered", num_answered, "==", 0)
    report.check("pulls of 1 MiB that ended while it was stuck", num_pulled, "==", 1)
    report.check("bytes of that message, after the latch", len(await message), "==", MIB)

    backend = get_rdma_backend()  # ibverbs with an RDMA card, tcp without
    large = rows[-1]
    report.figure(
        backend=backend,
        message_ms=large.message_ms,
        pull_ms=large.pull_ms,
    )
    # You can now move gigabytes between processes, and keep messages small.


# == 4. CONTROLLERS ================================================================================
# Problem. Actors in many processes have to meet, at one log of what happened, say. Whoever creates
#   it must hand it to everybody else, and two creators make two half-filled logs.
# Rule. Ask by name. `get_or_spawn_controller(name, Class)` gives every caller the same actor. One
#   process, that of the main program, creates it; it answers one request after the other, so the
#   first request for a name creates the actor, and all later ones find it.
# Cost. A message each time somebody asks. The actor lives in the main program's process, and ends
#   with it. While it works, other Python code there waits: that of one process runs in turn.
# Not here. Actors that outlive that process.      Source. Monarch's get_or_spawn_controller.
#
# The actor that is found so in this file is Telemetry. From here on workers tell it what they do,
# and `--trace` and `--report` show it. Nothing else depends on it: if it is gone, a run goes on.
#
# The demo shows that any process may ask. Runs of this file make less use of it than that: there
# only the main process asks, and gives what it has found to the workers that it makes (Worker.setup
# in section 5). The reason: Monarch returns what it cannot deliver to the actor that sent it, and
# that ends the sender, unless it says that it does not mind. If a worker is killed while it asks by
# name, the answer returns to Monarch's registry of names, which does mind: it ends, and with it the
# main process, in which it lives, and the run (seen with this version of Monarch; DOCS 1). Events
# are sent to Telemetry without a wish for an answer, so there is none that could return.


@dataclass(frozen=True)
class Event:
    """Something that happened to an actor."""

    what: str  # such as "step"
    actor: str  # such as "trainer 0.0": replica 0 of that service, its rank 0
    start_s: float  # seconds since 1970, by the clock of the actor's host
    end_s: float  # the same, if it took no time


class Telemetry(Actor):
    """Collects events from all processes.

    It keeps only the newest ones, so that its memory stays bounded however long a run takes.
    """

    MAX_EVENTS = 200_000  # some 60 MiB

    def __init__(self) -> None:
        self.events: collections.deque[Event] = collections.deque(maxlen=self.MAX_EVENTS)

    @endpoint
    async def record(self, events: list[Event]) -> int:
        """Takes events, and answers how many it has now."""
        self.events.extend(events)
        return len(self.events)

    @endpoint
    async def read(self, from_s: float = 0.0) -> list[Event]:
        """The events that began at this time or later. from_s: seconds since 1970."""
        return [event for event in self.events if event.start_s >= from_s]


async def telemetry(name: str = "telemetry") -> Telemetry:
    """A reference to the Telemetry of this name: the same actor for whoever asks, anywhere."""
    return await get_or_spawn_controller(name, Telemetry)  # mechanism: by name


class Recorder:
    """One actor's road to Telemetry. At a first reading go on with `Witness`.

    It keeps events for a moment and sends them together: a message for each would cost more than
    what many of them report.
    """

    SEND_AFTER_S = 0.2

    def __init__(self, actor: str) -> None:
        self.actor = actor
        self.store: Telemetry | None = None
        # Threads may append to it. It is bounded, for maybe nobody ever says where to send them.
        self.events: collections.deque[Event] = collections.deque(maxlen=10_000)
        self.sending: asyncio.Task[None] | None = None

    def send_to(self, store: Telemetry | None) -> None:
        """From now on events are sent there. None: they are kept."""
        self.store = store

    def note(
        self,
        what: str,
        start_s: float,
        actor: str = "",
    ) -> None:
        """Something that began at start_s, in seconds since 1970, and ends now.

        A thread may call this, too. What it notes waits for the next send_soon, because only the
        event loop can send.
        """
        event = Event(
            what=what,
            actor=actor or self.actor,
            start_s=start_s,
            end_s=time.time(),
        )
        self.events.append(event)

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Notes how long the body of the `with` took."""
        start_s = time.time()
        yield
        self.note(what, start_s)
        self.send_soon()

    def send_soon(self) -> None:
        """Sees to it that what was noted is sent."""
        if self.sending is None or self.sending.done():
            self.sending = asyncio.ensure_future(self._send())

    async def _send(self) -> None:
        """One message for all events of the last moment. If Telemetry is gone, so are they."""
        await asyncio.sleep(self.SEND_AFTER_S)
        if self.store is None:
            return
        # One by one, for a thread may append at any moment: what comes too late is sent next time.
        events = []
        while self.events:
            events.append(self.events.popleft())
        self.store.record.broadcast(events)  # nobody waits for an answer


class Witness(Actor):
    """Reports one event, to the Telemetry of a name that it is told."""

    @endpoint
    async def report(self, name: str) -> int:
        """How many events that Telemetry then has. name: "" for one that only I know."""
        store = await telemetry(name or f"store of process {os.getpid()}")
        now_s = time.time()
        event = Event(
            what="seen",
            actor="witness",
            start_s=now_s,
            end_s=now_s,
        )
        return await store.record.call_one([event])


@stage(
    "actors that never met find the same singleton by name, and it is created once",
    hint="ask for f'{name} {os.getpid()}': each process has a store of its own",
    mechanism="by name",
)
async def demo_controllers(report: Report, cfg: Config) -> None:
    """Lets four actors in four processes ask at once: for one name, and each for another."""
    procs = this_host().spawn_procs(per_host={"witness": 4})
    report.at_end(procs.stop)
    witnesses = procs.spawn("witness", Witness)
    # All four ask at once. A Telemetry that then has 1 event has just been created.
    apart = list((await witnesses.report.call("")).values())
    together = list((await witnesses.report.call("demo of section 4")).values())
    report.check("actors created by 4 that each ask for another name", apart.count(1), "==", 4)
    report.check("actors created by 4 that ask for the same name", together.count(1), "==", 1)
    report.check("events that this one has in the end", max(together), "==", 4)
    # You can now find an actor from anywhere, without being given a reference to it.


# == 5. SUPERVISION ================================================================================
# Problem. Processes die, some stand still, and some work for ever. If nobody is responsible, every
#   later call fails, or waits for ever. But a worker that has not answered for ten minutes may be
#   well: its step takes that long.
# Rule. Whose failure is it? An exception belongs to the caller that waits for the answer; the actor
#   lives on. A process belongs to the actor that spawned it, its owner, who replaces it when it
#   falls ill. There are three illnesses, and how long a call takes tells of none of them; so each
#   has a detector of its own, and no call of a worker that is set up has a deadline:
#
#     what happens         its caller sees   its owner is told by              and then
#     endpoint raises      the exception     nobody                            the actor lives on
#       nobody waits       nothing           Monarch, in milliseconds          it is replaced
#     process dies         ReplicaLost       a pidfd, in milliseconds          it is replaced
#     it stands still      ReplicaLost       its pulse, silent for 3 s         killed, and replaced
#     it works for ever    ReplicaLost       its progress, after a limit       killed, and replaced
#     it works for long    the answer        nobody                            the actor lives on
#   (A replica is one of several workers that do the same; ReplicaLost is an exception of 5b.)
# Cost. A thread in every worker. A replacement takes about half a second (`cure ms` in the demo),
#   with a big model minutes.
# Not here. Who restarts the owner: here all owners live in the main process, and end with it.
# Source. Supervisors of Erlang (Armstrong 2003); pidfd_open(2).
#
# 1. Death. A pidfd is a file descriptor for a process. It becomes readable when the process ends,
# and so an event loop hears of it at once. Monarch has a detector too: it hears when an actor ends,
# asks every 2 s whether a process still lives, and calls `__supervise__` of the owner: a method by
# which an actor says that it wants to hear of such things. We need it for the second row of the
# table: if an endpoint raises and nobody waits for its answer (`broadcast`), the exception has no
# caller to go to, and Monarch ends the actor. Its process lives, so no pidfd tells.
#
# 2. Standstill. A thread in each worker counts a word in shared memory up, ten times a second: the
# pulse. The owner looks at it four times a second. A process that was stopped, or that gets no
# memory, does not move it. One that is busy does: Python lets other threads run every 5 ms, and
# what computes in C mostly lets go of the GIL, the lock that a thread must hold to run Python.
# Mostly: to load a file, or to match a regular expression, C code may hold it for many seconds. The
# pulse is silent then, though the process works. So the owner looks at one more thing, the time for
# which the system has let the process compute. As long as that grows, it does not stand still.
# (Before a worker can say where its pulse is, there is less to look at: see Starts.)
#
# 3. Endless work. Another word moves with everything that a worker has got done: a token, a part of
# a batch, an episode judged. If a worker has requests and this word does not move for a limit, the
# worker is stuck. The limit is for one such piece of work. A request that waits behind another one
# sees the progress of that one, and a step of an hour is well if each of its parts is short.

# -- 5a. Hosts, and the signs of life of a process -------------------------------------------------
# At a first reading go on with `class PulseHandle`. From there on: where a process shows that it
# lives (PulseHandle and, in the process itself, Pulse), what can be seen of it at one look (Signs),
# and what its owner makes of its looks (Watch). Before it: how processes are started (Template,
# Starts), where (Host), and how one is told from others, for the system gives the id of a process
# that has ended to a new one (open_process).

# Set by the main process when it is about to end all others. From then on nothing is replaced.
LEAVING = threading.Event()


# To import torch and transformers takes seconds. One process does it once, the template, and
# workers with a model are forks of it. Monarch starts and watches only a shell in place of each,
# its stand-in. The plumbing at the top of this file draws them; here is what starts them.

# What a shell does first that starts a worker, or stands in for one.
# For the shell: echo "$MONARCH_RL_STARTS_NAME $$" >> "$MONARCH_RL_STARTS_FILE"
NOTE_START = f'echo "${STARTS_NAME} $$" >> "${STARTS_FILE}"'

# States of a process, in the letters of the system.
ENDED = "ZX"
STOPPED = "T"  # by SIGSTOP


class Template:
    """Starts the process of which workers with a model are forks, and says how to get one."""

    # Three commands for the shell: it notes its process id (Starts), writes it into "$0", which is
    # the standard input of the template, and reads from "$1". That is a pipe into which nobody
    # writes, and whose other end the template holds open. So the shell waits until the template
    # ends. (`arguments` names the two files.)
    STAND_IN = f'{NOTE_START} && echo $$ > "$0" && read nothing < "$1"'

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        # Our end of that pipe, a descriptor, from which all stand-ins read. The template has the
        # other end, its lifeline.
        self.reading_end: int | None = None

    def start(self) -> None:
        """Starts it, if it was not started already. It imports while others go on."""
        if self.process is None:
            self.reading_end, lifeline = os.pipe()
            command = [sys.executable, "-m", "monarch_rl", TEMPLATE_FLAG, str(lifeline)]
            self.process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[lifeline])
            os.close(lifeline)

    def pid(self) -> int | None:
        """Its process id; None: there is none that could fork, or it has ended or was stopped."""
        if self.process is None:
            return None
        state, *_ = status_of(self.process.pid)
        return None if state in ENDED or state == STOPPED else self.process.pid

    def arguments(self, pid: int) -> list[str]:
        """What the shell is to run in place of a worker, so that the worker is a fork of it."""
        # $0 is the standard input of the template, $1 the end of the pipe: both by way of /proc.
        template_stdin = f"/proc/{pid}/fd/0"
        pipe_end = f"/proc/{os.getpid()}/fd/{self.reading_end}"
        return ["-c", self.STAND_IN, template_stdin, pipe_end]


TEMPLATE = Template()  # only the main process starts it; elsewhere it stays as it is here


class Starts:
    """The processes of one replica of this host, until they have said where their pulse is.

    Until then their owner could not say which they are, for it is Monarch that starts them. If one
    was stopped in these first moments, nobody would notice. So a shell (a stand-in, or one that
    becomes the worker) first of all notes its id in a file in memory; for a fork the template does
    that. With the id their owner can ask the system whether the process was stopped, and no more.
    """

    # A shell that becomes the worker once it has noted its id, which stays the same.
    ITSELF = f'{NOTE_START}; exec "$0" "$@"'

    def __init__(self, name: str, is_fork: bool) -> None:
        """name: of the mesh, under which they note their ids.

        is_fork: from the template, if there is one. Else the worker imports for itself.
        """
        self.name = name
        self.template_pid = TEMPLATE.pid() if is_fork else None

    def command(self) -> BootstrapCommand:
        """What Monarch is to start."""
        arguments = ["-c", self.ITSELF, sys.executable, "-m", WORKER_MODULE]
        if self.template_pid is not None:
            arguments = TEMPLATE.arguments(self.template_pid)
        variables = {STARTS_FILE: starts_file(), STARTS_NAME: self.name}
        # Of the command: its file, another name for it, arguments, environment variables to add.
        return BootstrapCommand("/bin/sh", None, arguments, variables)

    def pids(self) -> list[int]:
        """Those that have begun. The last line may be half-written still."""
        *lines, _ = pathlib.Path(starts_file()).read_text(encoding="ascii").split("\n")
        notes = [line.rsplit(" ", 1) for line in lines]  # a name may have spaces
        return [int(pid) for name, pid in notes if name == self.name]

    def is_held_up(self) -> bool:
        """Was one of them stopped, or the template, which is to make one?"""
        pids = self.pids()
        if self.template_pid is not None:
            pids.append(self.template_pid)
        return any(status_of(pid)[0] == STOPPED for pid in pids)


@functools.cache
def starts_file() -> str:
    """The path of the file in which all processes that start note their ids.

    There is one file for all, with some 40 bytes for each start. It stays open until this process
    ends, and the path is good until then: its last part is the number of the descriptor. If each
    replica had a file, and that was closed with the replica, the number would go to the next file
    that is opened, and a process that starts late would write its id into that one.
    """
    return unnamed_file("starts")


# A life of a host is the time from its start until it is lost, and has a name. Only the other hosts
# of section 16 can have several; this machine has one.
THIS_MACHINE = "here"


def my_life() -> str:
    """The life of the host on which this process runs."""
    return os.environ.get(LIFE_VARIABLE, THIS_MACHINE)


class Host:
    """Where processes can be started: this machine.

    Section 16 has other kinds of Host, which do the same on other machines. Those can be lost, and
    that is what `life`, `is_here`, `still_has` and `present` are about. For this machine these
    never change their answers, so until then only `spawn`, `watch`, `signs` and `signal` matter.
    """

    address = ""  # of this machine there is none

    def life(self) -> str:
        """A name for the time since the host was started; "" while it is lost.

        After a loss it is another name, so that whoever remembers the old one sees that all
        processes of that time are gone. This machine has one life: if it is lost, so are we.
        """
        return THIS_MACHINE

    def is_here(self) -> bool:
        """Can processes be started there now?"""
        return self.life() != ""

    def still_has(self, life: str) -> bool:
        """May processes that were started in this life still run there?"""
        return self.life() == life

    async def present(self) -> Host:
        """Where a replica that belongs here is started now: here.

        In section 16 one Host may stand for several machines, and answers with those not lost.
        """
        return self

    def expect_models(self) -> None:
        """Workers with a model will be started here: what they import is imported from now on."""
        TEMPLATE.start()

    async def spawn(self, starts: Starts, num_ranks: int) -> ProcMesh:
        """Starts processes, one for each rank, in a mesh with the name that `starts` has.

        OSError: all processes are being ended. One that began now might be left behind.
        """
        if LEAVING.is_set():  # mechanism: nobody begins any more
            raise OSError("this command is being ended")
        shape = {"rank": num_ranks}
        command = starts.command()
        return this_host().spawn_procs(per_host=shape, name=starts.name, bootstrap_command=command)

    def watch(self, pulses: list[PulseHandle], on_end: Callable[[str], None]) -> None:
        """Calls back, in this event loop and with the reason, when one of these processes ends.

        `add_reader` asks the event loop to call a function when a descriptor becomes readable. For
        a pidfd that is once, when its process ends. Raises OSError if one is gone already.
        """
        loop = asyncio.get_running_loop()

        def has_ended(descriptor: int) -> None:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            on_end("died")

        for pulse in pulses:
            descriptor = open_process(pulse)
            loop.add_reader(descriptor, has_ended, descriptor)

    def signs(self, pulse: PulseHandle) -> Signs | None:
        """What can be seen of this process now; None: nothing new since the last look."""
        return read_signs(pulse)

    def signal(self, pulses: list[PulseHandle], number: int) -> None:
        """Sends a signal to processes. SIGKILL also ends those that stand still."""
        for pulse in pulses:
            with contextlib.suppress(ProcessLookupError):
                descriptor = open_process(pulse)
                try:
                    signal.pidfd_send_signal(descriptor, number)  # `signal`, the module
                finally:
                    os.close(descriptor)


def open_process(pulse: PulseHandle) -> int:
    """A pidfd of this process. ProcessLookupError: it has ended.

    The system gives the id of a process that has ended to another one. What is killed by its id
    alone may be somebody else; a pidfd stays that of the process for which it was opened.
    """
    descriptor = os.pidfd_open(pulse.pid)
    if start_of(pulse.pid) != pulse.started:  # mechanism: nobody else
        os.close(descriptor)
        raise ProcessLookupError(f"process {pulse.pid} is another one by now")
    return descriptor


def start_of(pid: int) -> int:
    """When this process of this host started, as the system counts it; -1: it is gone.

    One that has ended is not gone before its parent has noticed that.
    """
    entries = status_of(pid)
    if len(entries) < 20:  # of a process that is gone there is only the state
        return -1
    # The twentieth entry: proc_pid_stat(5) has it as the 22nd, for the id and the name come first.
    twentieth = 19  # counted from 0
    return int(entries[twentieth])


def kill(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Sends a signal to those of these processes that still run.

    Ids are used again, so the caller has to know whose they are now.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.kill(pid, number)


def status_of(pid: int) -> list[str]:
    """What the system says of a process of this host: its state, its parent, and so on.

    The state is a letter: "T" it was stopped, "Z" it has ended and its parent has not noticed yet,
    "X" it has gone; any other: it runs, or waits for something.
    """
    try:
        stat = pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="latin-1")
    except (FileNotFoundError, ProcessLookupError):
        return ["X"]
    # "12 (any name) S 1 ...": it stands behind the last parenthesis (proc_pid_stat(5)).
    _, _, behind_name = stat.rpartition(") ")
    return behind_name.split()


def is_alive(pid: int) -> bool:
    """Does this process of this host run?"""
    state, *_ = status_of(pid)
    return state not in ENDED


def descendants(root: int) -> list[int]:
    """Process ids of the children of a process, of theirs, and so on, as far as they run."""
    children = collections.defaultdict(list)
    for folder in pathlib.Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        entries = status_of(pid)
        if len(entries) > 1:  # else it has ended meanwhile, and has no parent any more
            _, parent, *_ = entries
            children[int(parent)].append(pid)
    found = [root]
    for pid in found:  # which grows meanwhile
        found += children[pid]
    return [pid for pid in found[1:] if is_alive(pid)]


@dataclass(frozen=True)
class PulseHandle:
    """Where a process shows that it lives: the first thing that its owner asks it for."""

    pid: int
    path: str  # of its file in memory, for processes of the same host
    # When it started, as the system counts it: a process that gets its id later has another number.
    # None: nobody has noted it. Then `open_process` raises, so this process gets no signal.
    started: int | None = None
    life: str = THIS_MACHINE  # of the host on which it runs


class Pulse:
    """A worker's own side of its pulse: two words of 8 bytes in shared memory.

    Whoever reads them asks nothing of the worker, so they can be read whatever state it is in.
    """

    BEATS = 0  # the first word: moves as long as a thread of this process can run
    PROGRESS = 1  # the second: moves when something got done
    BEAT_EVERY_S = 0.1

    def __init__(self) -> None:
        self.handle = PulseHandle(
            pid=os.getpid(),
            path=unnamed_file("pulse"),
            started=start_of(os.getpid()),
            life=my_life(),
        )
        with open(self.handle.path, "r+b") as file:
            file.truncate(mmap.PAGESIZE)
            self.memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        self.words = memoryview(self.memory).cast("q")
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        """The thread: waits for the clock / produces beats / ends with its process."""
        while True:
            self.words[self.BEATS] += 1
            time.sleep(self.BEAT_EVERY_S)

    def advance(self) -> None:
        """Something got done: a token, a part of a batch, an episode.

        Any thread may call it. If two do at once, one of them may be lost: it only matters that the
        word moves.
        """
        self.words[self.PROGRESS] += 1


@dataclass(frozen=True)
class Signs:
    """What can be seen of a process at one look, without asking it."""

    state: str  # a letter, as status_of has it
    cpu_ticks: int  # for which its threads have computed so far; a tick is 10 ms
    beats: int  # of its pulse
    progress: int


def read_signs(pulse: PulseHandle) -> Signs:
    """Looks at a process of this host."""
    words = [0, 0]
    # It may end at any moment, and its file with it. Then its state tells.
    with contextlib.suppress(OSError), open(pulse.path, "rb", buffering=0) as file:
        words = memoryview(file.read(16)).cast("q").tolist()
    status = status_of(pulse.pid)
    # The twelfth and thirteenth entry, the state included, are the ticks for which the process has
    # computed itself, and for which the system has worked for it.
    state = status[0]
    ticks = [int(number) for number in status[11:13]]
    return Signs(
        state=state,
        cpu_ticks=sum(ticks),
        beats=words[Pulse.BEATS],
        progress=words[Pulse.PROGRESS],
    )


LOOK_EVERY_S = 0.25  # an owner looks at all its processes


def num_looks(limit_s: float) -> int:
    """How many looks fit into a limit.

    Looks are counted, not seconds: an owner that was itself stopped has not looked meanwhile, and
    so accuses nobody when it goes on.
    """
    return math.ceil(limit_s / LOOK_EVERY_S)


class Watch:
    """What an owner has seen of one process, look by look."""

    def __init__(self, pulse: PulseHandle) -> None:
        self.pulse = pulse
        self.last: Signs | None = None  # at the last look
        self.num_silent = 0  # looks in a row at which it seemed to stand still

    def look(self, now: Signs) -> bool:
        """Compares with the last look. Returns whether the process has got something done."""
        last = self.last
        self.last = now
        if last is None:  # the first look: there is nothing to compare with
            return False
        is_beating = now.beats != last.beats
        # A process that was stopped just now may have computed until then.
        is_computing = now.cpu_ticks != last.cpu_ticks and now.state != STOPPED
        is_well = is_beating or is_computing  # mechanism: silent but at work
        self.num_silent = 0 if is_well else self.num_silent + 1
        return now.progress != last.progress


# -- 5b. Workers, and their replicas ---------------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Tells a worker which one it is."""

    service: str  # the name of the service that owns it, such as "generator"
    replica_id: int  # 0, 1, ...: the same for a replica and for whatever replaces it
    # These two matter from section 16 on. Until then there is one host, and local_id = replica_id.
    host: int = 0  # number of its host
    local_id: int = 0  # its number among the replicas of this service on that host


class Worker(Actor):
    """What a supervisor owns: an actor in a process of its own.

    It may also be several, one per process, which live and die together: the ranks of one worker,
    such as a trainer that is sharded over GPUs. They compute together, as a process group. To form
    that (`form_group`, section 7) all must know one place, a file or an address: rank 0 makes it
    (`meeting_place`), and `setup` tells all.
    """

    has_model: ClassVar[bool] = False  # does it need torch and transformers?

    def __init__(self, place: Place) -> None:
        self.place = place
        self.rank = current_rank().rank
        self.recorder = Recorder(f"{place.service} {place.replica_id}.{self.rank}")
        self.pulse = Pulse()  # subclasses call its `advance` whenever they got something done
        self.own_place = ""  # a meeting place that this rank has made; "" until it is asked for one
        self.meets_at = ""  # the meeting place of all ranks, that of rank 0; "" before `setup`

    @endpoint
    async def find_pulse(self) -> PulseHandle:
        """Where its pulse is, and its process id.

        A supervisor asks this before anything else. From then on it can kill a process that hangs
        in `setup`, and notices if one dies or stands still there.
        """
        return self.pulse.handle

    @endpoint
    async def meeting_place(self) -> str:
        """A place where the ranks can meet, always the same one; that of rank 0 counts."""
        if not self.own_place:
            self.own_place = self.make_meeting_place()
        return self.own_place

    def make_meeting_place(self) -> str:
        """A file in memory, for ranks of this host: they may look into it as long as they live.

        So nobody removes it: it ends with this process.
        """
        return unnamed_file("meeting place")

    @endpoint
    async def setup(self, store: Telemetry | None = None, meeting_place: str = "") -> Any:
        """Makes it ready to serve. store: where its events go; None: nowhere.

        meeting_place: if there are several ranks, where they meet: the place that rank 0 made.

        A constructor should be cheap: Monarch runs it when the actor is spawned, and nobody waits
        for it. What takes long, or can fail, belongs into `prepare`, which is awaited here.
        """
        self.recorder.send_to(store)
        self.meets_at = meeting_place
        return await self.prepare()

    async def prepare(self) -> Any:
        """Here subclasses import, load and attach. What it returns goes to the supervisor."""

    def _handle_undeliverable_message(self, message: Any) -> bool:
        """Monarch calls this when a message of this actor could not be delivered and came back.

        Such a message is an answer to somebody, or events for Telemetry, who has died meanwhile.
        True says that all is well. False, the default, would end this actor.
        """
        return True


@dataclass(frozen=True)
class Loss:
    """That a replica was lost."""

    replica_id: int
    # why                    because
    # "died"                 a process of it has ended, or the actor in it
    # "stood still"          its pulse was silent, and it did not compute either
    # "made no progress"     it had requests, and got nothing done for the limit
    # "did not start"        it did not say within its deadline where its pulse is
    # "setup too slow"       it was not ready within its deadline
    # "setup failed: ..."    it could not be made, and its host is away (section 6)
    # "kept raising"         it raised on three requests in a row that others answered (section 6)
    # "ended itself"         it raised when it was asked about itself (section 6)
    # "host lost"            its host is away (section 16)
    # "taken away"           on purpose (section 6), so it counts as no loss
    why: str
    noticed_s: float  # seconds since 1970, by the clock of this host
    replaced_s: float | None = None  # when the next one was ready; None: not yet


class ReplicaLost(RuntimeError):
    """The replica was lost before it had answered."""


class NobodyToBlame(RuntimeError):
    """What an endpoint raises if its replica is well, and something else prevents an answer.

    Only section 6 asks for the difference. There a replica gets a mark if it raises on a request
    that another one answers, and three marks have it replaced. For this exception it gets none.
    """


class NotNow(NobodyToBlame):
    """It cannot serve at the moment, such as a generator whose weights have not come yet."""


# The life of a replica, and who moves it on:
#
#     spawned --- its pid is known ---> runs --- setup has answered ---> ready
#             Supervisor._find               Supervisor._set_up
#
# From each of these three states `lose` makes it lost, for one of the reasons of a Loss. Nothing
# leads back from there: the process is killed, if it still runs, and another Replica takes the
# place.


class Replica:
    """One worker, as its owner sees it.

    If it is lost, its successor will be another Replica with the same id. So late news of this one
    cannot be taken for news of that one. (Marks and retiring can wait for section 6.)
    """

    MAX_MARKS = 3  # in a row, until a replica that raises is replaced
    END_WITHIN_S = 30.0  # for Monarch to notice that its processes ended: mostly milliseconds

    def __init__(
        self,
        place: Place,
        host: Host,
        procs: ProcMesh,
        actor: Any,
        starts: Starts,
        host_life: str | None = None,
    ) -> None:
        """host_life: that of the host when its processes were started; None: the present one."""
        self.place = place
        self.host = host
        self.host_life = host.life() if host_life is None else host_life
        self.procs = procs
        self.actor = actor  # a reference to the worker
        self.name = starts.name  # of its mesh: in Monarch's failures this tells whose they are
        self.starts = starts
        self.pids: list[int] = []  # of its ranks; known when they run
        self.watches: list[Watch] = []  # the same
        self.num_held_up = 0  # looks in a row, before they run, at which one of them was stopped
        self.num_fruitless = 0  # looks in a row at which it had requests, and got nothing done
        self.answers: list[Any] = []  # of setup, one per rank; empty until it is ready
        # Becomes a Loss when it is lost, and so wakes everybody who waits for this replica.
        self.lost: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        self.num_in_flight = 0  # requests it works on
        self.num_marks = 0  # in a row, for requests on which it raised and another one did not
        self.is_retired = False  # it gets no new requests

    def runs_in(self, pulses: list[PulseHandle]) -> None:
        """Its processes are these."""
        self.pids = [pulse.pid for pulse in pulses]
        self.watches = [Watch(pulse) for pulse in pulses]

    def has_set_up(self, answers: list[Any]) -> None:
        """It is ready."""
        self.answers = answers

    def retire(self) -> None:
        """It counts as ready no more, though it is well: it leaves on purpose (section 6)."""
        self.is_retired = True

    def is_ready(self) -> bool:
        """May it have a request? If it has been set up, and is neither lost nor retired."""
        return bool(self.answers) and not self.is_retired and not self.lost.done()

    def is_idle(self) -> bool:
        """Has it answered all its requests?"""
        return self.num_in_flight == 0

    def lose(self, why: str) -> None:
        """Marks it as lost. Several may notice; the first of them says why.

        Not while all processes are being ended (LEAVING): nobody replaces them then.
        """
        if not self.lost.done() and not LEAVING.is_set():
            loss = Loss(
                replica_id=self.place.replica_id,
                why=why,
                noticed_s=time.time(),
            )
            self.lost.set_result(loss)

    def look(self, spec: ServiceSpec) -> None:
        """Looks at its processes once, and loses it if one is ill: 1 to 3. spec: has the limits."""
        if self.host.life() != self.host_life:  # only in section 16
            self.lose("host lost")  # mechanism: host lost
        self._look_at_start(spec)  # illness 2, before there is a pulse
        is_news = False
        has_moved = False
        for watch in self.watches:
            signs = self.host.signs(watch.pulse)
            if signs is None:  # another host has sent nothing since the last look (section 16)
                continue
            is_news = True
            has_moved |= watch.look(signs)  # one rank that gets on is enough: others wait for it
            if signs.state in ENDED:  # 1. death, if the pidfd has not told
                self.lose("died")
            # 2. Standstill.
            if watch.num_silent >= num_looks(spec.standstill_s):  # mechanism: standstill
                self.lose("stood still")
        # 3. Endless work. A look that shows nothing new says nothing about progress.
        if is_news:
            self.num_fruitless += 1
        if has_moved or self.is_idle() or not self.answers:  # a setup has a deadline
            self.num_fruitless = 0
        # `>`, not `>=`: the first look may come right after the request began, so n looks are sure
        # to span only n - 1 pauses. (A silent look is a comparison with the one before it.)
        if self.num_fruitless > num_looks(spec.stuck_after_s):  # mechanism: endless work
            self.lose("made no progress")

    def _look_at_start(self, spec: ServiceSpec) -> None:
        """Before there is a pulse, all that can be seen is whether a process was stopped."""
        is_held_up = not self.watches and self.starts.is_held_up()
        self.num_held_up = self.num_held_up + 1 if is_held_up else 0
        if self.num_held_up >= num_looks(spec.standstill_s):  # mechanism: held up
            self.lose("stood still")

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Counts a request as in flight while it is. That a request ends is progress, too."""
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
            self.num_fruitless = 0

    def is_lost_for(self, why: str) -> bool:
        """Was it lost for this reason?"""
        return self.lost.done() and self.lost.result().why == why

    def has_answered(self) -> None:
        """It has answered a request, so it is well."""
        self.num_marks = 0

    def mark(self) -> None:
        """It raised on a request that another one has answered."""
        self.num_marks += 1
        if self.num_marks >= self.MAX_MARKS:
            self.lose("kept raising")

    def send_signal(self, number: int) -> None:
        """To the processes of all its ranks, if their host has not been lost since."""
        if self.host.still_has(self.host_life):
            self.host.signal([watch.pulse for watch in self.watches], number)

    async def end(self) -> None:
        """Ends its processes, mostly within milliseconds. TimeoutError: it took END_WITHIN_S.

        By SIGKILL: a polite end takes Python a second or two, and what stands still would never end
        politely. On another host, before its process ids are known, only Monarch's own, polite end
        is left. After the SIGKILL Monarch still has to notice that they are gone: that takes time.
        """
        if not self.host.still_has(self.host_life):
            return  # its processes ended with that life of their host
        # Without a pulse we know only the ids that its processes noted. Such an id may be somebody
        # else's by now, so of these only processes that descend from this one are killed.
        if not self.watches:
            kill(set(self.starts.pids()) & set(descendants(os.getpid())))
        self.send_signal(signal.SIGKILL)
        self.pids = []
        self.watches = []
        # On one machine this asks what `still_has` did. In section 16 some machines of a host may
        # be lost. The others had their signal; for the lost ones Monarch would wait in vain.
        if self.host.life() != self.host_life:
            return
        # ValueError: they could not be made, so there are none. RuntimeError: they were killed
        # while Monarch was making them. It waits for them for half a minute before it raises that.
        with contextlib.suppress(ValueError, RuntimeError):  # mechanism: killed in the making
            await asyncio.wait_for(self.procs.stop(), self.END_WITHIN_S)


@dataclass(frozen=True)
class ServiceSpec:
    """What a supervisor should own."""

    name: str  # such as "generator"
    replica_class: type[Worker]
    # For the constructor of each replica, after its Place.
    args: tuple[Any, ...]
    num_replicas: int  # at the start; section 6 can change it
    max_replicas: int | None = None  # at most; None: there is no limit
    # For how long a process may show no life: many times the pause between two beats.
    standstill_s: float = 3.0
    # For how long a replica that has requests may make no progress: many times what the largest
    # piece of its work takes, such as a part of a batch.
    stuck_after_s: float = 120.0
    # Processes of one replica.
    num_ranks: int = 1
    # On which replicas are started, in turn.
    hosts: tuple[Host, ...] = (Host(),)
    # How long a replica may take to become ready: imports on a busy machine take seconds, big
    # models minutes. A deadline is right here: a setup moves no word of progress, and waits for
    # nobody else's work (only the setup of a relay does, section 16).
    setup_deadline_s: float = 120.0
    # Of section 6. A request that kills whoever runs it must not go on to kill all replicas, so
    # there is a largest number of attempts.
    max_attempts: int = 3
    # Requests at one replica at a time. With 1, no request is lost because another one, at the same
    # replica, has killed it. 1000 is as good as no limit.
    max_in_flight: int = 1000

    def place(self, replica_id: int) -> Place:
        """Replicas go round the hosts: of two hosts the first has 0, 2, 4, the other 1, 3, 5."""
        local_id, host = divmod(replica_id, len(self.hosts))
        return Place(
            service=self.name,
            replica_id=replica_id,
            host=host,
            local_id=local_id,
        )


# -- 5c. The owner ---------------------------------------------------------------------------------


class Supervisor(Actor):
    """Owns the replicas of one class of workers.

    It spawns them itself, because Monarch calls `__supervise__` of no other actor than the one that
    has spawned a process.
    """

    # How long a process may take to say that it runs. With a model it waits for the template.
    START_WITHIN_S = 120.0

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.replicas: dict[int, Replica] = {}  # by replica id, the newest of each
        self.looking: asyncio.Task[None] | None = None  # runs while there are replicas

    async def _spawn(self, replica_id: int) -> Replica:
        """Makes the replica with this id, or replaces it, and returns when it is ready.

        What it raises, and why:

            ActorError             its setup raised; inside is what it raised
            ReplicaLost            it was lost before it was ready
            TimeoutError           the one before it does not end
            OSError, ValueError    a process, or the host, has gone
        """
        # 1. What is left of the one before goes: a process that stands still could wake up.
        if replica_id in self.replicas:
            await self.replicas[replica_id].end()
        # 2. A process, and an actor in it. On this machine both calls return before anything has
        # happened.
        place = self.spec.place(replica_id)
        host = await self.spec.hosts[place.host].present()
        life = host.life()
        # No name is used twice: by it the ids that processes noted, and Monarch's news of a
        # failure, are told from those of the replica before.
        name = f"{self.spec.name}_{replica_id}_{time.monotonic_ns()}"
        starts = Starts(name, self.spec.replica_class.has_model)
        procs = await host.spawn(starts, self.spec.num_ranks)
        actor = procs.spawn(name, self.spec.replica_class, place, *self.spec.args)
        new = Replica(place, host, procs, actor, starts, life)
        self.replicas[replica_id] = new
        if self.looking is None or self.looking.done():
            self.looking = asyncio.ensure_future(self._look())
        # 3. Its first answers: it runs; it is ready.
        await self._within(self.START_WITHIN_S, self._find(new), new, "did not start")
        await self._within(self.spec.setup_deadline_s, self._set_up(new), new, "setup too slow")
        return new

    async def _within(
        self, limit_s: float, first_answer: Awaitable[None], new: Replica, why: str
    ) -> None:
        """Waits for one of its first answers. If that takes too long, it is lost: `why` says so."""
        try:
            await asyncio.wait_for(first_answer, limit_s)
        except asyncio.TimeoutError:
            new.lose(why)
            raise ReplicaLost(f"{new.name}: {why}") from None

    async def _find(self, new: Replica) -> None:
        """Waits until it says where its pulse is. From then on its processes are watched by pulse.

        One that was stopped earlier is found by the id that was noted for it (Starts).
        """
        pulses = await self._call(new, "find_pulse", ())
        new.runs_in(pulses)
        new.host.watch(pulses, new.lose)

    async def _set_up(self, new: Replica) -> None:
        """Waits until it is ready."""
        store = await telemetry()
        meeting_place = ""
        if self.spec.num_ranks > 1:  # they will form a process group, and meet at a place of rank 0
            meeting_place, *_ = await self._call(new, "meeting_place", ())
        new.has_set_up(await self._call(new, "setup", (store, meeting_place)))

    async def _look(self) -> None:
        """The owner's loop: waits for the clock / produces losses / ends when there is no replica.

        Between two looks it sleeps, however late it was, so a slow owner just looks less often.
        """
        while self.replicas:
            for replica in self.replicas.values():
                if not replica.lost.done():  # else its process id may be somebody else's by now
                    replica.look(self.spec)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _call(
        self,
        replica: Replica,
        method: str,
        args: tuple[Any, ...],
    ) -> list[Any]:
        """Calls a worker, and returns the answers of all its ranks, rank 0 first.

        Raises ActorError, around what the endpoint raised. Raises ReplicaLost if the replica was
        lost; an answer that comes after that is ignored.
        """
        call = asyncio.ensure_future(getattr(replica.actor, method).call(*args))
        try:
            with replica.at_work():
                # Sleeps until the first of these: the answer comes, the replica is lost.
                await asyncio.wait({call, replica.lost}, return_when="FIRST_COMPLETED")
            is_answered = call.done()
        finally:
            call.cancel()  # if there is no answer yet; also if this call is cancelled itself
        if not is_answered:
            why = replica.lost.result().why
            raise ReplicaLost(f"{replica.name}, {method}: {why}")
        try:
            return list(call.result().values())
        except SupervisionError as error:  # Monarch knew of the death before the pidfd did
            replica.lose("died")
            raise ReplicaLost(f"{replica.name}, {method}: it died") from error

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Monarch calls this when a process that I spawned has died, or the actor in it.

        It is no endpoint, so it does not wait for its turn: it runs while an endpoint awaits
        something. Of most deaths the pidfd has told before. Then the replica is lost already, and
        this changes nothing.
        """
        # Monarch calls a mesh by the name that we gave it, a dash, and a number of its own.
        for replica in self.replicas.values():
            if failure.mesh_name.startswith(f"{replica.name}-"):
                replica.lose("died")
        return True  # handled; False would pass it on to whoever owns me

    def _handle_undeliverable_message(self, message: Any) -> bool:
        return True  # as in Worker


# -- measurement -----------------------------------------------------------------------------------
# A worker gets into each kind of trouble, one after the other. What does its caller see, is its
# owner told, and after how long does it work again? And it is busy for longer than it may stand
# still, in three ways. That is no trouble, and nobody may take it for one.
#
# The columns of the table: what the caller saw, an exception or the answer; what the owner was
# told, and after how many ms; how long the cure took, which is a new process, or nothing; and what
# the next call answers, which should be the root of 4. A run on two cores, in ms (the limits here
# are 1 s and 4 s):
#
#     what happened      raises   nobody waits   SIGKILL   SIGSTOP   works for ever
#     told after              -              8        12      1078             4166
#     cure                    0            408       401       424              583


class Roots(Worker):
    """A worker that can be made to fail, here and in section 6. It computes square roots.

    Asked for the root of a negative number, it raises; that request is bad. As replica 1 it also
    raises for the numbers from 100 to 199, as a worker does whose machine is not well: those
    requests are good, the replica is not.
    """

    def __init__(self, place: Place, diary: str = "") -> None:
        super().__init__(place)
        self.diary = diary  # a file in which it notes what it does; "": none

    @endpoint
    async def root(self, number: int) -> float:
        """The square root of a number. Raises ValueError below 0."""
        self._write(f"begun {number}\n")
        await asyncio.sleep(0.002)
        if self.place.replica_id == 1 and 100 <= number < 200:
            raise RuntimeError("a bad spell")
        answer = math.sqrt(number)
        self._write(f"done {number}\n")
        return answer

    def _write(self, line: str) -> None:
        """One short write at the end of the file, so lines of several processes do not mix."""
        if self.diary:
            with open(self.diary, "a", encoding="utf-8") as file:
                file.write(line)

    @endpoint
    async def toil(self, how: str, wanted_s: float) -> float:
        """Is busy for about wanted_s, in one of three ways. Returns how long it was, in seconds."""
        start = time.monotonic()
        if how == "C, without the GIL":
            time.sleep(wanted_s)  # lets go of the GIL, as torch does while it computes
        elif how == "C, holding the GIL":
            # `sum` adds up a range in C, without a pause. The first one shows how fast that is
            # here, so that the second can be made to take about wanted_s.
            sum(range(10**7))
            sum(range(int(10**7 * wanted_s / since(start))))
        while since(start) < wanted_s:  # "Python": all of it is here
            pass
        return since(start)


@dataclass(frozen=True)
class TroubleRow:
    """What became of a worker that got into trouble, or was just busy."""

    what_happened: str
    caller_saw: str
    owner_was_told: str
    after_ms: float | None  # None: not told
    cure_ms: float  # until the replacement was ready; about 0 if none was needed
    next_call: Any  # what root(4) answers afterwards


# What happens -> what its caller should see, and what the owner should be told. An exception
# reaches the owner only if no caller waits for it.
TROUBLES = {
    "raises": ("ValueError", "nothing"),
    "raises, nobody waits": ("nothing", "died"),
    "SIGKILL": ("ReplicaLost", "died"),
    "SIGSTOP": ("ReplicaLost", "stood still"),
    "works for ever": ("ReplicaLost", "made no progress"),
}
BUSY = ("C, without the GIL", "Python", "C, holding the GIL")


class Trial(Supervisor):
    """Owns one worker, to which all of that happens."""

    @endpoint
    async def suffer(self, trouble: str) -> TroubleRow:
        """Lets a fresh worker get into this trouble, which is one of TROUBLES, and out of it."""
        victim = await self._spawn(0)
        # 1. It happens.
        struck_s = time.time()
        caller_saw = await self._get_into(victim, trouble)
        # 2. Is the owner told? It has a second, many times what a pidfd and Monarch's news of an
        # actor's end take, so that a "nothing" means something.
        await asyncio.wait({victim.lost}, timeout=1.0)
        return await self._cured(victim, trouble, caller_saw, struck_s)

    async def _get_into(self, victim: Replica, trouble: str) -> str:
        """Lets it happen. Returns what the caller of this worker sees."""
        if trouble == "raises, nobody waits":
            victim.actor.root.broadcast(-1)  # this ends the actor
            return "nothing"
        if trouble.startswith("SIG"):
            kill(victim.pids, signal.Signals[trouble])
        # The root of -1 raises a ValueError in a worker that runs. So if the caller sees
        # ReplicaLost after a signal, its owner has told it so, and no worker has answered.
        request = functools.partial(self._call, victim, "root", (-1,))
        if trouble == "works for ever":
            request = functools.partial(self._call, victim, "toil", ("Python", math.inf))
        # What no detector has found after 20 s will never be found.
        return str(await outcome(request, 20.0))

    @endpoint
    async def be_busy(self, how: str, wanted_s: float) -> TroubleRow:
        """Keeps a worker busy, in one of the ways of BUSY."""
        worker = self.replicas[0]
        start_s = time.time()
        answer = await outcome(lambda: self._call(worker, "toil", (how, wanted_s)), 20.0)
        if isinstance(answer, list):  # of its ranks, of which there is one
            answer = f"{answer[0]:.1f} s of work"
        return await self._cured(worker, how, answer, start_s)

    async def _cured(
        self,
        victim: Replica,
        what_happened: str,
        caller_saw: str,
        struck_s: float,
    ) -> TroubleRow:
        """Replaces the worker if it was lost, and asks the one that is there now."""
        told = "nothing"
        after_ms = None
        if victim.lost.done():
            loss = victim.lost.result()
            told = loss.why
            after_ms = (loss.noticed_s - struck_s) * 1e3
        start = time.monotonic()
        if told != "nothing":  # mechanism: replace
            await self._spawn(0)
        cure_ms = since(start) * 1e3
        worker = self.replicas[0].actor
        next_call = await outcome(lambda: worker.root.call_one(4), deadline_s=10.0)
        return TroubleRow(
            what_happened=what_happened,
            caller_saw=caller_saw,
            owner_was_told=told,
            after_ms=after_ms,
            cure_ms=cure_ms,
            next_call=next_call,
        )


@stage(
    "an exception belongs to the caller, an ill process to its owner: dead, standing still and "
    "working for ever are three illnesses with three detectors, and none takes work for illness",
    hint="write `is_well = is_beating`: who holds the GIL for a while is killed for it",
    mechanism="silent but at work",
)
async def demo_supervision(report: Report, cfg: Config) -> None:
    """Lets all of TROUBLES happen to a worker, one after the other, and then keeps it busy."""
    spec = ServiceSpec(
        name="worker",
        replica_class=Roots,
        args=(),
        num_replicas=1,
        # A third, and a thirtieth, of what they are in a run, so that this is over soon. The second
        # leaves work of 1.5 s the time that it takes on a busy machine.
        standstill_s=1.0,
        stuck_after_s=4.0,
    )
    limits = (
        f"{spec.standstill_s:.0f} s without a pulse, {spec.stuck_after_s:.0f} s without progress"
    )
    report.say(f"limits: {limits} (about 15 s)")
    # An owner is an actor too: Monarch tells of a death the actor that has spawned the process.
    # This one lives in the main process.
    trial = this_proc().spawn("trial", Trial, spec)
    report.at_end(trial.stop)
    rows = []
    for trouble in TROUBLES:
        report.doing(f"a worker, and what happens to it: {trouble}")
        rows.append(await trial.suffer.call_one(trouble))
    ill = {row.what_happened: row for row in rows}
    busy = []
    for how in BUSY:
        report.doing(f"a worker that is busy: {how}")
        busy.append(await trial.be_busy.call_one(how, 1.5 * spec.standstill_s))
    report.table([*rows, *busy])
    report.figure(
        detect_ms=ill["SIGKILL"].after_ms,
        respawn_ms=ill["SIGKILL"].cure_ms,
        standstill_ms=ill["SIGSTOP"].after_ms,
        stuck_ms=ill["works for ever"].after_ms,
    )
    num_otherwise = 0
    for row in rows:
        num_otherwise += (row.caller_saw, row.owner_was_told) != TROUBLES[row.what_happened]
    report.check("troubles of 5 that were seen otherwise", num_otherwise, "==", 0)
    num_cured = sum(row.next_call == 2.0 for row in rows)
    report.check("right answers of 5 calls after the cure", num_cured, "==", len(TROUBLES))
    num_replaced = sum(row.owner_was_told != "nothing" for row in busy)
    report.check("workers of 3 replaced for being busy", num_replaced, "==", 0)
    # You can now say of every failure who hears of it, and who has to do something.


# == 6. SERVICE ====================================================================================
# Problem. A call shares the fate of the replica that it was sent to. Monarch's `choose` draws one
#   without looking: if one of four stands still, a quarter of the requests are lost.
# Rule. The caller asks the service, and the service asks a replica: a ready one with the fewest
#   requests in flight, in turn among equals. An attempt has one of three outcomes:
#     1. The replica answers. The caller gets the answer, once.
#     2. The replica is lost: it fell ill (section 5), or was given up (3.). Another one tries.
#     3. The replica raises. Is the request bad, or the replica? Another one will tell. If that one
#        raises too, the request is to blame and the exception is its caller's. If that one answers,
#        the first replica has a mark; three marks in a row, and it is replaced.
# Cost. One more message, within the main process: about a millisecond (the demo has a figure for
#   it, `route_overhead_us`; it is the difference of two single requests, so only its order of
#   magnitude counts). A request whose replica was lost or raised runs again, so it must be harmless
#   to repeat: two attempts may both do their work. Only one is answered.
# Not here. Sessions, priorities, autoscaling (Ray Serve).   Source. "Let it crash", as in Erlang.
#
#     caller --- route(Roots.root, 4) ---> ServiceActor      (Roots.root, of section 5, is an
#                                              |              endpoint: it computes a square root)
#                                              | root(4) ---> replica 0    is lost: its keeper
#                                              |                           makes another
#                                              | root(4) ---> replica 1    answers
#            <------- 2.0 ---------------------+
#
# What runs in it, beside the looks of section 5: a `route` or `ask` per request; a keeper per
# replica, which sleeps until that is lost, makes another one, and sleeps again; and calls of start,
# resize and status, which wait until all are ready. A loss wakes whoever waits for that replica
# (Replica.lost). All other changes are told by the ChangeNotice below. The drawing again, in time:
# there are two replicas, and replica 0 dies in the middle of a request.
#
#     route of that request    sleeps in _call; wakes because the replica is lost; picks the other
#     keeper of replica 0      sleeps; wakes because it is lost; makes another, which takes seconds
#     route of other requests  pick replica 1 as long as replica 0 is not ready
#     keeper of replica 0      replica 0 is ready: notify; whoever waits for a replica picks it now

# -- 6a. As many replicas as there should be -------------------------------------------------------
# At a first reading this part can wait: the three outcomes are in 6b, in `ServiceActor.route`.
#
# The number of replicas may change while requests go on. With n replicas the ids are 0 to n - 1:
# the highest leave, and who is added later gets their ids again. By example, from one to three,
# then to two:
#
#     resize(3)   keepers of 1 and 2 begin; each gets requests as soon as it is ready
#     resize(2)   replica 2 gets no new requests, and answers those that it has; then it is ended.
#                 Its keeper has ended before, so nobody replaces it, or counts it as lost


class ChangeNotice:
    """Wakes coroutines that wait for something to become true.

    Whoever changes the state that they wait for calls `notify`. Each waiter then wakes, looks for
    itself whether its condition holds, and goes on waiting if not. So there is one notice for all
    conditions. No lock is needed: in one event loop nothing else runs between a look and the next
    `await`.
    """

    def __init__(self) -> None:
        self.event = asyncio.Event()

    def notify(self) -> None:
        """Wakes all that wait now."""
        # `set` ends the `wait` of each of them: it will return when the event loop comes to it, and
        # asyncio does not look at the event again before. So the event can be cleared at once, and
        # whoever begins to wait later waits for the next notice.
        self.event.set()
        self.event.clear()

    async def wait(self) -> None:
        """Sleeps until the next notice."""
        await self.event.wait()

    async def wait_for(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Sleeps until the condition holds. False: it still does not, after timeout_s."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._until(condition), timeout_s)
        return condition()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self.wait()


class NoReplica(RuntimeError):
    """No replica that may try became ready within the setup deadline; or all are closed."""


class RequestLost(RuntimeError):
    """All attempts at this request were used up, the last one by the loss of its replica."""


@dataclass(frozen=True)
class ServiceStatus:
    """What a service says of itself. Checks read this, and never a trace."""

    # Of ready replicas: their process ids, and what their setup answered, a value per rank.
    pids: list[int]
    answers: dict[Place, list[Any]]
    # Those that were lost and have been replaced, in the order in which they were replaced.
    lost_replicas: list[Loss]
    # Given to callers since the service began.
    num_answers: int
    # Attempts that ended with a lost replica or an exception.
    num_failed_attempts: int


class ReplicaKeeper(Supervisor):
    """Keeps as many replicas as there should be: each id has a keeper, a task that runs `_keep`.

    Endpoints run one at a time (section 1). These must not: while one request waits for a replica,
    others have to be served. A `concurrent_endpoint` may begin while others wait at an `await`.
    """

    RETRY_SETUP_S = 0.5  # a setup that always fails must not spin
    MAX_LOST_AT_FIRST = 5  # lost before any was ready: then it is no bad luck

    def __init__(self, spec: ServiceSpec) -> None:
        super().__init__(spec)
        self.recorder = Recorder(spec.name)
        self.changed = ChangeNotice()  # a replica became ready, free or lost, or all are closed
        self.keepers: dict[int, asyncio.Task[None]] = {}  # by id, of the replicas that are kept
        self.lost_replicas: list[Loss] = []
        self.num_replicas = spec.num_replicas  # that there should be
        self.num_closings = 0  # calls of `close` so far; a start during which it grows gives up
        self.resizing = asyncio.Lock()

    @concurrent_endpoint
    async def start(self) -> None:
        """Makes all replicas at the same time. Returns when all are ready whose host is here.

        Called again, it replaces them all; requests that they have go to the next ones. Raises what
        the setup of one of them raised; NoReplica if all are closed meanwhile.
        """
        num_closings = self.num_closings
        async with self.resizing:
            await self._stop_keepers()
            for replica in self.replicas.values():
                replica.lose("taken away")
            if num_closings == self.num_closings:  # mechanism: closed meanwhile
                self._begin_to_keep(range(self.num_replicas))
            await self.changed.wait_for(lambda: not self.keepers or self._is_complete())
            if not self.keepers:
                raise NoReplica(f"{self.spec.name} is closed")

    def _begin_to_keep(self, replica_ids: Iterable[int]) -> None:
        for replica_id in replica_ids:
            keeper = asyncio.ensure_future(self._keep(replica_id))
            keeper.add_done_callback(lambda _: self.changed.notify())
            self.keepers[replica_id] = keeper

    async def _keep(self, replica_id: int) -> None:
        """The keeper of one replica id: makes a replica, and another one whenever it is lost.

        waits for a loss / woken by Replica.lose / produces the next replica / ends with `close`,
        another `start` or `resize`, or when the first one cannot be made on a host that is here
        """
        # The loss that the next replica makes good; None: there was no ready one to lose yet.
        loss: Loss | None = None
        num_failures = 0  # before any was ready
        while True:
            try:
                replica = await self._spawn(replica_id)
            except (ActorError, ReplicaLost, asyncio.TimeoutError, OSError, ValueError) as error:
                # What each of these means, `_spawn` says. If this was to replace another replica,
                # it is tried again, without end. If it was the first with this id, the error may be
                # a mistake of whoever has started the service. `_first_has_failed` decides: it
                # raises the error, or returns a Loss if the host is to blame, or None to try again.
                # The pause comes before that decision: a host may be lost, and its loss be known
                # only a moment after the error that follows from it.
                await asyncio.sleep(self.RETRY_SETUP_S)
                if loss is None:
                    num_failures += 1
                    loss = self._first_has_failed(replica_id, error, num_failures)
                    self.changed.notify()  # without its host there may be enough replicas now
                continue
            if loss is not None:  # it took the place of one that was lost
                self.lost_replicas.append(dataclasses.replace(loss, replaced_s=time.time()))
                self.recorder.note(loss.why, loss.noticed_s, f"{self.spec.name} {replica_id} lost")
                self.recorder.send_to(await telemetry())
                self.recorder.send_soon()
            self.changed.notify()
            # Mostly it sleeps here. `shield`: if this keeper is cancelled, `lost` must not be, for
            # others wait for it, too.
            loss = await asyncio.shield(replica.lost)
            self.changed.notify()

    def _first_has_failed(
        self, replica_id: int, error: Exception, num_failures: int
    ) -> Loss | None:
        """What follows if the first replica of this id could not be made.

        1. Its host is away, or was so meanwhile (section 16). That counts as a loss, which the
           keeper makes good when the host is back.
        2. Its setup raised, or was too slow. That is a mistake, such as a wrong path: it is raised.
        3. It was lost otherwise before it was ready. Then this returns None, and the keeper tries
           again; after MAX_LOST_AT_FIRST times it is a mistake, too.

        What is raised ends the keeper, and `_ready` tells whoever waits.
        """
        made = self.replicas.get(replica_id)  # None: not even a process was asked for
        host = made.host if made else self._host_of(replica_id)
        life = host.life()
        was_away = made is not None and made.host_life != life
        if life == "" or was_away:  # it is away now, or was lost after the replica was made
            return Loss(
                replica_id=replica_id,
                why=f"setup failed: {cause(error)}",
                noticed_s=time.time(),
            )
        is_too_slow = made is not None and made.is_lost_for("setup too slow")
        is_mistake = isinstance(error, ActorError) or is_too_slow
        if is_mistake or num_failures >= self.MAX_LOST_AT_FIRST:
            raise error
        return None

    def _host_of(self, replica_id: int) -> Host:
        """The host on which it belongs."""
        return self.spec.hosts[self.spec.place(replica_id).host]

    def _ready(self) -> list[Replica]:
        """The replicas that are ready.

        Raises what ended a keeper, or the looking, if one has ended: a service does not go on as if
        nothing was the matter when it can no longer replace anybody. Keepers of replicas that are
        just being added are not asked. They have ids from num_replicas on, and if one of them
        fails, `_add` raises that to whoever has asked for more.
        """
        for replica_id, keeper in self.keepers.items():
            if keeper.done() and replica_id < self.num_replicas:
                keeper.result()
        if self.looking is not None and self.looking.done():
            self.looking.result()
        return [replica for replica in self.replicas.values() if replica.is_ready()]

    def _is_complete(self) -> bool:
        """Is there a ready replica wherever there should and can be one?"""
        return self._has_all(range(self.num_replicas))

    def _has_all(self, replica_ids: Iterable[int]) -> bool:
        """Is each of these ready, or its host not here?"""
        ready_ids = {replica.place.replica_id for replica in self._ready()}
        missing = [replica_id for replica_id in replica_ids if replica_id not in ready_ids]
        return not any(self._host_of(replica_id).is_here() for replica_id in missing)

    @concurrent_endpoint
    async def close(self) -> None:
        """Ends all replicas. Requests that wait for one, or are at one, raise NoReplica.

        For a request at its last attempt it is RequestLost, and for an `ask` ReplicaLost.
        """
        self.num_closings += 1
        await self._stop_keepers()
        self.changed.notify()
        replicas = self.replicas
        self.replicas = {}
        for replica in replicas.values():
            replica.lose("taken away")
        await asyncio.gather(*[replica.end() for replica in replicas.values()])
        async with self.resizing:  # waits for a `start` or `resize` under way: it notices, and ends
            pass

    async def _stop_keepers(self) -> None:
        """Before replicas are ended: a keeper would take that for a loss, and replace them."""
        keepers = self.keepers
        self.keepers = {}
        await asyncio.gather(*[end_task(keeper) for keeper in keepers.values()])


class ResizableKeeper(ReplicaKeeper):
    """Keeps another number of replicas whenever it is told to."""

    @concurrent_endpoint
    async def resize(self, num_replicas: int, patience_s: float | None) -> int:
        """Adds replicas, or takes some away. Returns, when that is done, how many there are.

        Of two calls the second waits for the first. patience_s: for requests at a replica that
        leaves; after that another one gets them, which costs an attempt. None: they are waited for,
        however long they take.

        Raises ValueError if there cannot be so many; what the first setup of an added one raised,
        and then there are as many as before; NoReplica if all are closed while one is added.
        """
        most = self.spec.max_replicas or math.inf
        if not 1 <= num_replicas <= most:
            raise ValueError(f"{self.spec.name}: room for 1 to {most} replicas, not {num_replicas}")
        async with self.resizing:
            if not self.keepers:  # the next start makes so many
                self.num_replicas = num_replicas
            elif num_replicas > self.num_replicas:
                await self._add(range(self.num_replicas, num_replicas))
            else:
                await self._take_away(num_replicas, patience_s)
            return self.num_replicas

    async def _add(self, replica_ids: range) -> None:
        """Makes these beside those that there are. Each takes requests as soon as it is ready."""
        self._begin_to_keep(replica_ids)
        keepers = [self.keepers[replica_id] for replica_id in replica_ids]

        # A keeper ends if its first replica could not be made: then none of these is to stay. (For
        # keepers that `start` has begun `_ready` raises what ended them. It does not look at
        # these.)
        def is_decided() -> bool:
            return any(keeper.done() for keeper in keepers) or self._has_all(replica_ids)

        await self.changed.wait_for(is_decided)
        if not self.keepers:
            raise NoReplica(f"{self.spec.name} is closed")
        for keeper in keepers:
            if keeper.done():
                await self._take_away(replica_ids.start, 0.0)
                keeper.result()  # raises
        self.num_replicas = replica_ids.stop

    async def _take_away(self, num_replicas: int, patience_s: float | None) -> None:
        """Takes away all replicas but num_replicas of them.

        It waits until those that stay are ready, for one of them may just be being replaced.
        """
        self.num_replicas = num_replicas
        await self.changed.wait_for(lambda: self._is_complete() or not self.keepers)
        leaving = [replica_id for replica_id in self.keepers if replica_id >= num_replicas]
        await asyncio.gather(*[self._dismiss(replica_id, patience_s) for replica_id in leaving])

    async def _dismiss(self, replica_id: int, patience_s: float | None) -> None:
        """Lets one answer what it has been asked, and ends it."""
        if replica_id in self.keepers:
            await end_task(self.keepers.pop(replica_id))
        replica = self.replicas.get(replica_id)
        if replica is None:  # it was not spawned yet, or all are closed
            return
        replica.retire()  # no new requests from here on
        await self.changed.wait_for(replica.is_idle, patience_s)  # mechanism: answered first
        replica.lose("taken away")  # so who still waits for an answer asks another one
        if self.replicas.pop(replica_id, None) is not None:  # else `close` ends it
            await replica.end()


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancels a task, and returns when it has ended.

    One `cancel` may not be enough. If what the task awaits by `wait_for` is done at that moment,
    Python before 3.12 returns that, and forgets the cancellation.
    """
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=0.1)


# -- 6b. Requests ----------------------------------------------------------------------------------


class ServiceActor(ResizableKeeper):
    """The service itself: gives requests to replicas, and their answers to callers."""

    def __init__(self, spec: ServiceSpec) -> None:
        super().__init__(spec)
        self.num_picks = 0
        self.num_answers = 0
        self.num_failed_attempts = 0

    @concurrent_endpoint
    async def route(
        self,
        method: str,
        args: tuple[Any, ...],
    ) -> Any:
        """Runs a request on a ready replica, on all its ranks, and returns the answer of rank 0.

        method: the name of the endpoint. Raises what the endpoint raised, if two replicas did, or
        nobody else may try; NoReplica; RequestLost; and what ended a keeper.
        """
        first_to_raise: Replica | None = None  # on this request
        to_blame: Replica | None = None  # the same replica; None if it raised NobodyToBlame
        # A replica that is lost, or raises, costs an attempt; waiting for a free one costs none.
        for number in range(self.spec.max_attempts):  # mechanism: another attempt
            is_last = number == self.spec.max_attempts - 1
            replica = await self._pick(other_than=first_to_raise)
            try:
                answer = await self._attempt(replica, method, args)
            except ReplicaLost:  # outcome 2: its keeper replaces it; another one tries
                self.num_failed_attempts += 1
                continue
            except ActorError as error:  # outcome 3
                self.num_failed_attempts += 1
                if first_to_raise is not None or is_last or not self._can_ask_another():
                    raise cause(error) from error  # two have raised, or nobody else will try
                first_to_raise = replica
                to_blame = None if isinstance(cause(error), NobodyToBlame) else replica
                continue
            replica.has_answered()
            # If meanwhile no other replica is left to ask, `_pick` may choose the same one again.
            # That it now answers proves nothing against it.
            if to_blame is not None and to_blame is not replica:
                to_blame.mark()  # the request was good, so that replica is not
            self.num_answers += 1
            return answer  # outcome 1
        raise RequestLost(f"{self.spec.name}: {method} failed {self.spec.max_attempts} times")

    async def _attempt(
        self,
        replica: Replica,
        method: str,
        args: tuple[Any, ...],
    ) -> Any:
        """One attempt: the answer of rank 0.

        Raises ReplicaLost, or ActorError if the endpoint raised and the replica is well.
        """
        try:
            answers = await self._call(replica, method, args)
        except ActorError:
            if self.spec.num_ranks > 1:
                # For the death of the only rank `_call` raises ReplicaLost. But of several ranks
                # one may die, and another one raise because of that, a moment before its owner is
                # told. A pidfd tells in milliseconds; 0.2 s is many times that, and no caller minds
                # it after an error.
                await asyncio.wait({replica.lost}, timeout=0.2)
            if replica.lost.done():
                raise ReplicaLost(f"{replica.name} is lost") from None
            raise
        finally:
            self.changed.notify()  # there is room at it for another request
        return answers[0]

    @concurrent_endpoint
    async def ask(self, replica_id: int, method: str, request: tuple[Any, ...]) -> Any:
        """Asks one certain replica about itself. Returns the answer of rank 0.

        Raises ReplicaLost, also if it is not ready; and what the endpoint raised. Then it is
        replaced, too: about itself no other one can tell better.
        """
        replica = self.replicas.get(replica_id)
        if replica is None or not replica.is_ready():
            raise ReplicaLost(f"{self.spec.name} {replica_id} is not ready")
        try:
            return await self._attempt(replica, method, request)
        except ActorError as error:
            replica.lose("ended itself")
            raise cause(error) from error

    def _can_ask_another(self) -> bool:
        """Is there to be a second replica, on a host that is here?"""
        is_here = [self._host_of(number).is_here() for number in range(self.num_replicas)]
        return sum(is_here) > 1

    async def _pick(self, other_than: Replica | None) -> Replica:
        """Chooses the replica for an attempt, and waits for one if need be.

        If all that may try are busy, this waits on, for they will not be busy for ever. If there is
        none at all, one may be on its way: this waits as long as a setup may take, and then raises
        NoReplica. If the service is closed, it raises that at once.
        """
        while self.keepers:
            may_try = self._may_try(other_than)
            free = [one for one in may_try if one.num_in_flight < self.spec.max_in_flight]
            if free:
                # No `await` until `_call` counts this request in: no other one gets this place.
                self.num_picks += 1
                return min(free, key=self._order)
            if may_try:
                # Woken when one has ended a request, was lost, or became ready; or all are closed.
                await self.changed.wait()
                continue
            may_go_on = await self.changed.wait_for(
                lambda: bool(self._may_try(other_than)) or not self.keepers,
                self.spec.setup_deadline_s,
            )
            if not may_go_on:
                raise NoReplica(f"{self.spec.name}: all replicas that could try are lost")
        raise NoReplica(f"{self.spec.name} is closed")

    def _may_try(self, other_than: Replica | None) -> list[Replica]:
        """The ready replicas, but neither the one that raised on this request nor its replacement.

        A replacement is in the same place, and may suffer from what made the first one raise. If
        that place is the only one by now (after `resize`, or a lost host), all are asked.
        """
        if other_than is None or not self._can_ask_another():
            return self._ready()
        raised = other_than.place.replica_id
        return [one for one in self._ready() if one.place.replica_id != raised]

    def _order(self, replica: Replica) -> tuple[int, int]:
        """The smallest comes first: the one with the fewest requests in flight.

        So a slow replica gets less work. Among equals it is the one whose turn it is, or an idle
        service would always use the same one. Turns go round: of three replicas, pick number 4 is
        the turn of 1, for 4 % 3 = 1; then 2 comes one turn later, and 0 two turns later.
        """
        turns_until = (replica.place.replica_id - self.num_picks) % self.num_replicas
        return replica.num_in_flight, turns_until

    @concurrent_endpoint
    async def status(self, wait_s: float = 0.0) -> ServiceStatus:
        """Its state, when all replicas that can be ready are ready, or else after wait_s."""
        await self.changed.wait_for(self._is_complete, wait_s)
        ready = self._ready()
        return ServiceStatus(
            pids=[pid for replica in ready for pid in replica.pids],
            answers={replica.place: replica.answers for replica in ready},
            lost_replicas=list(self.lost_replicas),
            num_answers=self.num_answers,
            num_failed_attempts=self.num_failed_attempts,
        )

    @concurrent_endpoint
    async def strike(self, number: int, replica_id: int | None = None) -> None:
        """Sends a signal to a replica, for demonstrations. replica_id None: to the first one."""
        if replica_id is None:
            replica_id = self._ready()[0].place.replica_id
        self.replicas[replica_id].send_signal(number)


Arguments = ParamSpec("Arguments")
Reply = TypeVar("Reply")


def name_of(endpoint: Endpoint[..., Any]) -> str:
    """The name of an endpoint: "root", of Roots.root."""
    return endpoint._method.__name__  # type: ignore[attr-defined]  # Monarch has no public way


class Service:
    """What users of a service have: typed calls to its actor.

    Each method is one message to the endpoint of the same name of ServiceActor, where it is said
    what it does. What this class adds are types: an endpoint is named by itself, as in
    service.route(Roots.root, 4), and not by a string. So an editor finds where it is used, and a
    type checker compares the request with its parameter.
    """

    def __init__(self, spec: ServiceSpec) -> None:
        self.spec = spec
        self.num_replicas = spec.num_replicas  # as this object last heard
        self.actor = this_proc().spawn(spec.name, ServiceActor, spec)

    async def route(
        self,
        endpoint: Endpoint[Arguments, Reply],
        *request: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Reply:
        """Runs an endpoint on some replica.

        request: what the endpoint takes, here at most one record or number. (That it may be
        several, or keywords, stands in the signature because type checkers ask for it.) Raises what
        the endpoint raised (its __cause__ is the ActorError, which has the worker's traceback);
        NoReplica; RequestLost. It takes as long as the work takes. A caller with less time uses
        asyncio.wait_for.
        """
        if keywords:
            raise TypeError("a request has no keywords")
        method = name_of(endpoint)
        return await self._ask(self.actor.route.call_one(method, request))

    async def ask(
        self,
        replica_id: int,
        endpoint: Endpoint[Arguments, Reply],
        *request: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Reply:
        """Asks one certain replica about itself. What it raises is that of ServiceActor.ask.

        The other parameters are those of `route`.
        """
        if keywords:
            raise TypeError("a request has no keywords")
        return await self._ask(self.actor.ask.call_one(replica_id, name_of(endpoint), request))

    async def start(self) -> None:
        """Returns when all replicas that can be are ready: those whose host is here."""
        await self._ask(self.actor.start.call_one())

    async def resize(self, num_replicas: int, patience_s: float | None = None) -> None:
        """Adds replicas, or takes some away, while requests go on. Returns when that is done.

        The parameters and what it raises are those of ResizableKeeper.resize.
        """
        answer = self.actor.resize.call_one(num_replicas, patience_s)
        self.num_replicas = await self._ask(answer)

    async def status(self, wait_s: float = 0.0) -> ServiceStatus:
        """A snapshot. For wait_s it waits until all replicas are ready that can be."""
        return await self._ask(self.actor.status.call_one(wait_s))

    async def strike(self, number: int, replica_id: int | None = None) -> None:
        """Sends a signal to a replica, for demonstrations; None: to the first."""
        await self._ask(self.actor.strike.call_one(number, replica_id))

    async def close(self) -> None:
        """Ends all replicas, and returns when they have ended."""
        await self._ask(self.actor.close.call_one())

    async def _ask(self, answer: Awaitable[Reply]) -> Reply:
        """Raises what the service's actor raised, and not the ActorError around it."""
        try:
            return await answer
        except ActorError as error:
            raise cause(error) from error


# -- measurement -----------------------------------------------------------------------------------
# How many of 400 requests are answered while replicas get into trouble, with Monarch's `choose` and
# with the service? A fault comes with the request of a certain number, not at a certain time, so
# that a run on a slow machine meets the same faults.
#
# An answer given twice would not show at the caller: whoever awaits gets one answer. So the
# replicas write down what they do, each request when it begins and when it is done, in one file.
# There a request that was run without need shows, and so does one that was answered without work.
#
# So three things are counted:
#
#     answers, at the callers and at the service   400 of each: every request is answered, once
#     different requests that replicas finished    400: no answer was given without the work
#     attempts that replicas began                 400, and one more for each that failed, at most:
#                                                  none was run twice without need


@dataclass(frozen=True)
class StormRow:
    """What came of 400 requests to four replicas, one every 2 ms."""

    how: str
    answered_right: int
    fastest_ms: float
    slowest_ms: float


async def storm(
    how: str,
    ask: Callable[[int], Awaitable[float]],
    faults: Mapping[int, Callable[[], Awaitable[None]]],
    deadline_s: float | None = None,
) -> StormRow:
    """Sends 400 requests and looks at the answers.

    ask: the request for the root of a number. faults: for some numbers, what is done just before
    the request of that number. deadline_s: after that time a caller gives up; None: never.
    """
    took_ms: list[float] = []

    async def request(number: int) -> bool:
        await asyncio.sleep(number * 0.002)
        if number in faults:
            await faults[number]()
        start = time.monotonic()
        answer = await outcome(lambda: ask(number), deadline_s)
        took_ms.append(since(start) * 1e3)
        return answer == math.sqrt(number)

    right = await asyncio.gather(*[request(number) for number in range(400)])
    return StormRow(
        how=how,
        answered_right=sum(right),
        fastest_ms=min(took_ms),
        slowest_ms=max(took_ms),
    )


async def storm_on_a_mesh() -> StormRow:
    """With Monarch's `choose`, while one of four replicas stands still.

    Callers give up after a second; without that they would wait for ever.
    """
    procs = this_host().spawn_procs(per_host={"replica": 4})
    pool = procs.spawn("pool", Roots, Place(service="pool", replica_id=0))
    victim = await pool.slice(replica=3).find_pulse.call_one()

    async def stop() -> None:
        os.kill(victim.pid, signal.SIGSTOP)

    faults = {0: stop}
    try:
        return await storm("choose; #3 stops", pool.root.choose, faults, deadline_s=1.0)
    finally:
        os.kill(victim.pid, signal.SIGCONT)  # so that it can be ended politely
        await procs.stop()


@stage(
    "with replicas that raise, die and stand still, every request is answered, and never twice",
    hint="write `range(1)`: a request has one attempt",
    mechanism="another attempt",
)
async def demo_service(report: Report, cfg: Config) -> None:
    """Sends 400 requests while replicas fail: to a mesh with `choose`, and to a service."""
    report.say("400 requests, once to a mesh with choose, once to a service (about 6 s)")
    report.doing("400 requests to a mesh, with choose")
    chosen = await storm_on_a_mesh()
    report.doing("400 requests to a service, while replicas fail")
    diary = unnamed_file("diary")  # in which replicas note what they do; it survives them
    spec = ServiceSpec(
        name="root",
        replica_class=Roots,
        args=(diary,),
        num_replicas=4,
        standstill_s=1.0,  # a third of what it is in a run
        # A request may meet all that happens here: a replica that raises, one that is replaced for
        # that, one that dies, one that stands still.
        max_attempts=5,
    )
    service = Service(spec)
    report.at_end(service.close)
    await service.start()
    # First 20 requests that are bad themselves: all replicas raise, and none is replaced for it.
    bad = []
    for _ in range(20):
        bad.append(await outcome(lambda: service.route(Roots.root, -1)))
    before = await service.status(60.0)
    # Then 400 good ones. Replica 1 raises by itself, on those from 100 to 199.
    faults = {
        100: functools.partial(service.strike, signal.SIGKILL, 2),
        200: functools.partial(service.strike, signal.SIGSTOP, 3),
    }
    ask = functools.partial(service.route, Roots.root)
    served = await storm("Service; #1 raises, #2 dies, #3 stops", ask, faults)
    after = await service.status(60.0)
    report.table([chosen, served])

    # Lines of the diary are "begun 17" and "done 17"; those of the bad requests end with "-1".
    lines = pathlib.Path(diary).read_text(encoding="utf-8").splitlines()
    good = [line for line in lines if not line.endswith("-1")]
    num_begun = sum(line.startswith("begun") for line in good)
    num_finished = len({line for line in good if line.startswith("done")})
    num_answers = after.num_answers - before.num_answers
    num_failed = after.num_failed_attempts - before.num_failed_attempts
    report.say(f"at the replicas {num_begun} attempts began; {num_failed} failed")
    # failover_ms: of the request that waited longest, mostly until #3 was known to stand still.
    # route_overhead_us: the fastest request to the service took so much longer than the fastest to
    # the mesh. These are two single requests, so only the order of magnitude counts.
    overhead_us = (served.fastest_ms - chosen.fastest_ms) * 1e3
    report.figure(failover_ms=served.slowest_ms, route_overhead_us=overhead_us)
    report.check("requests of 400 lost with choose", 400 - chosen.answered_right, ">", 0)
    report.check("requests of 400 lost by the service", 400 - served.answered_right, "==", 0)
    report.check("answers that the service gave", num_answers, "==", 400)
    report.check("requests that replicas finished", num_finished, "==", 400)
    # It may also be below 0: what waits at a replica that is lost fails, and has never begun.
    num_needless = num_begun - num_failed - 400
    report.check("attempts beyond one per request and failure", num_needless, "<=", 0)
    kinds = sorted({loss.why for loss in after.lost_replicas})
    expected = ["died", "kept raising", "stood still"]
    report.check("why replicas were replaced", kinds, "==", expected)
    report.check("bad requests of 20 that raise at their caller", bad.count("ValueError"), "==", 20)
    report.check("replicas replaced for them", len(before.lost_replicas), "==", 0)
    # You can now call workers that fail, and write the callers as if they did not.


# == 7. WEIGHT SYNC ================================================================================
# Problem. The trainer rewrites its weights while generators read them. A reader that looks during
#   the write holds some tensors of version 6 and some of version 7: torn weights. There is no
#   error, only samples of a policy that nobody has trained.
# Rule. The trainer fills a slot that nobody reads, and then changes one word (8 bytes of shared
#   memory), `latest`, that names it. A generator takes a lease of that slot in three steps: it
#   1. looks at `latest`, 2. announces the slot that it names, and 3. looks at `latest` again. Only
#   if that still says the same, it reads. The trainer leaves announced slots alone.
# Cost. One copy of the weights per version, and memory for two slots more than there are readers.
#   (Readers on GPUs need no slots, but the trainer's copy may have to wait for theirs: 7d.)
# Not here. From GPU to GPU without host memory. (Only what changed is sent between hosts, section
#   16: on one host, to find out what that is takes longer than a copy.)
# Source. Hazard pointers, Michael 2004.
#
# The usual way is a broadcast in a process group: processes that all call the same operation, which
# then moves bytes between them (gloo, in torch, over sockets; NCCL between GPUs). It couples both
# sides, for it begins when the members have come and ends when they are done. So there are two
# kinds of waiting: for the last to come, who may be in the middle of a long answer; and for the
# transfer. Below, X is the broadcast, a dot is waiting, P is a copy into a slot, f is `pull`:
#
#     trainer       step 7 ........XXXX step 8 ........XXXX     step 7 step 8 step 9 step 10
#       a thread                                                       PPPP   PPPP   PPPP
#     generator 0   rollout .......XXXX rollout .......XXXX     rollout f rollout f rollout f
#     generator 1   long rollout...XXXX long rollout...XXXX     long rollout f long rollout f
#
# (The broadcast is drawn as in NCCL, where each member passes on what it gets from the one before,
# so that all wait for all. In gloo the trainer serves each generator when that comes: it waits as
# drawn, but generator 0 does not wait for generator 1.)
#
# On a CPU a generator's parameters are the slot itself, so it copies nothing. The trainer's copy
# runs in a thread beside its next forward and backward pass, which only read the weights. Before
# the optimizer changes them, it waits for the copy.


class WeightMismatch(ValueError):
    """The two sides do not mean the same weights, or a rule of the arena would be broken.

    When it is raised, the weights that readers have are what they were before.
    """


def require(holds: Any, otherwise: str) -> None:
    """Raises WeightMismatch with the text `otherwise`, unless the first argument is true."""
    if not holds:
        raise WeightMismatch(otherwise)


# -- 7a. Layout: where each tensor lies in a slot --------------------------------------------------
# Both sides compute the layout for themselves, from their own tensors, and compare. A difference in
# a name, a shape, a dtype or a tie is found before a byte moves.
#
# By example: a model of two matrices and a vector, bf16. The second matrix is tied to the first,
# that is, one tensor has two names:
#
#     name             shape      tied_to          offset   num_bytes
#     embed.weight     (19, 40)   embed.weight          0        1520
#     lm_head.weight   (19, 40)   embed.weight          0        1520     not stored a second time
#     norm.weight      (40,)      norm.weight        1536          80     1536 = 24 cache lines
#     at the end of the slot: a checksum for each name, also a tied one, 8 bytes; then the version

# Processors read and write memory in lines, and most have lines of this size. Some have lines of
# 128 bytes, such as those of a Mac, on which this runs in a container: on them two words share a
# line, which costs time and breaks nothing.
CACHE_LINE_BYTES = 64


@dataclass(frozen=True)
class TensorSpec:
    """Where one tensor lies in a slot: a row of the table above."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # such as "bfloat16"
    tied_to: str  # the first name of the same tensor: its own name, unless it is tied
    offset: int  # bytes from the start of the slot, a multiple of CACHE_LINE_BYTES
    num_bytes: int

    def same_tensor_as(self, other: TensorSpec) -> bool:
        """Could one be copied into the other? They may lie at different offsets."""
        return dataclasses.replace(self, offset=0) == dataclasses.replace(other, offset=0)


@dataclass(frozen=True)
class Manifest:
    """What a slot holds: tensors, then a checksum of each, then which version it is."""

    specs: tuple[TensorSpec, ...]
    slot_bytes: int  # a multiple of a memory page

    def stored_specs(self) -> list[TensorSpec]:
        """The specs without those that are stored under an earlier name."""
        return [spec for spec in self.specs if spec.tied_to == spec.name]

    def num_bytes(self) -> int:
        """Of all tensors, without what lies between them."""
        return sum(spec.num_bytes for spec in self.stored_specs())


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number: 70 and 64 give 128."""
    return math.ceil(number / multiple) * multiple


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor: all of it, unless it is a DTensor.

    A DTensor is a tensor that is cut over several processes (section 8). What this process has of
    it is a plain tensor inside, with which it computes; that one is returned. Its public method,
    `to_local`, will not do: it makes another tensor that shows the same memory, and if a reader
    (7d) lets that one show a slot instead, the DTensor goes on computing with the old memory.
    """
    return getattr(tensor, "_local_tensor", tensor)  # an attribute that only DTensors have


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """All that must arrive, by name: parameters and persistent buffers, tied ones under each name.

    These are the tensors themselves, not copies: who changes them changes the module.
    """
    return dict(module.state_dict(keep_vars=True))


def manifest_of(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None = None) -> Manifest:
    """The layout of these tensors, in their order.

    dtype: of parameters in the slot, if they are floating-point; None: the one that they have.
    Buffers keep their own.
    """
    specs = []
    stored: dict[Any, TensorSpec] = {}  # by the memory that a tensor occupies
    end = 0
    for name, tensor in tensors.items():
        is_cast = isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point()
        stored_dtype = dtype if dtype and is_cast else tensor.dtype
        # Tied tensors share their memory. An empty tensor, or one of which this rank has nothing,
        # has the address 0, and is tied to none. So its `id` stands for its address: no other
        # tensor has that number.
        where = local(tensor).data_ptr()
        if where == 0:
            where = id(tensor)
        memory = (where, tensor.shape, tensor.stride(), tensor.dtype)
        first = stored.get(memory)
        spec = TensorSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=str(stored_dtype).removeprefix("torch."),
            tied_to=first.name if first else name,
            offset=first.offset if first else end,
            num_bytes=tensor.numel() * stored_dtype.itemsize,
        )
        specs.append(spec)
        if first is None:
            stored[memory] = spec
            end += round_up(spec.num_bytes, CACHE_LINE_BYTES)
    # A checksum takes 8 bytes, for CRC-32 is kept as an int64: torch can compare those. So does the
    # version behind them.
    slot_bytes = round_up(end + 8 * len(specs) + 8, mmap.PAGESIZE)
    return Manifest(specs=tuple(specs), slot_bytes=slot_bytes)


# -- 7b. The arena: slots, words, and the lease ----------------------------------------------------
#
# The arena of two readers, while version 8 is being written:
#
#     words   latest = (version 7, slot 2)     lease of 0 = slot 2     lease of 1 = slot 1
#
#     slots   slot 0      version 8 is being written into it
#             slot 1      version 6      reader 1 reads it
#             slot 2      version 7      the latest; reader 0 reads it
#             slot 3      version 5      free
#
# Readers + 2 slots are enough: each reader holds one at most, one is the latest, one is written.
# (Readers on GPUs need fewer: 7d.)
#
# By example, with one reader and so three slots, in which a slow reader comes and goes:
#
#     the writer publishes 1    into slot 0: all are free         latest = (1, slot 0)
#     the reader pulls          leases slot 0, and begins to read
#     the writer publishes 2    into slot 1, not the latest 0     latest = (2, slot 1)
#     the writer publishes 3    into slot 2, for 0 is leased      latest = (3, slot 2)
#     the writer publishes 4    into slot 1, for 0 is leased      latest = (4, slot 1)
#     the reader pulls          leases slot 1: it skips versions 2 and 3, and slot 0 is free
#
# Why three steps. In `lease` a reader 1. looks at `latest`, 2. announces the slot that it names,
# and 3. looks again. Suppose the writer takes that slot for its next version. It does so only after
# it has made another slot the latest, and has then looked at the leases:
#
#     it looked after step 2     it saw the lease, and took another slot
#     it looked before step 2    `latest` had moved even before that look, so in step 3 the reader
#                                sees that, and starts over; it has read nothing of the slot yet
#
# A version never comes back, so "unchanged" means that nothing happened in between. Step 1 only
# says what to announce. After it come step 2, step 3 and the reading. In another order it breaks:
#
#     3, then 2                between them the writer may make another slot the latest, look at the
#                              leases, and write into what the reader then reads: torn
#     reading, then 3          the same, while it reads: it would learn of it when it is too late
#     2 without its fence      the processor may do 3 before others can see 2: as if exchanged
#
# (The demo shows what happens without step 2. The other three are too rare for it, because the
# moment in which they do harm is so short: tests go through every order of events.)
#
# How long a lease lasts does not matter, nor how many slots there are: the writer writes only into
# a slot that no word of a living process names. Every word is changed by `put`, which begins with a
# fence: all that its process did before comes first, for everybody. So when others see that a
# reader's word names another slot, or none, its last read of the old slot is over; and when they
# see `latest` name a slot, the bytes of that slot are there.
#
# In which order others see what I do. At a first reading go on with `class ArenaHandle`: the rest
# of this part only says what a fence is made of, and why one is needed at all. The proof above says
# "before" and "after", but a processor does not keep to the order of the program. It does not wait
# for memory: it puts a store aside until the place in memory can be had, and goes on with what
# follows; and of two loads the one whose bytes are near is done first. The process itself cannot
# tell, for its own loads find its own stores. Another process can. Of two accesses to different
# words, may the later one take effect before the earlier one?
#
#     earlier, later   x86-64   Arm   where that would tear weights
#     store, load      yes      yes   my lease, my second look; the writer's `latest`, its look
#     store, store     no (*)   yes   the bytes of a slot, the word `latest` that names it
#     load, store      no       yes   a reader's last bytes of a slot, the lease of its next one
#     load, load       no       yes   the word `latest`, the bytes of the slot that it names
#
# (*) But for the streaming stores by which memmove copies large blocks. It puts a fence behind them
# itself (see WeightWriter._write).
#
# On both, a store that depends on what a load finds is never seen before the load is done. If it
# were, and the load then found something else, the store could not be taken back. So the writer
# needs nothing between its look at the leases and its stores into the slot that it chooses.
#
# Where an order matters there must be a fence: what stands before it takes effect before what
# stands behind it, whatever it is. That is full order, and there are two halves of it. An acquire
# is a load that takes effect before all that stands behind it, such as that by which one takes a
# lock. A release is a store that takes effect after all that stands before it, such as that by
# which one gives a lock back. So what is done under a lock stays between the two. But what stands
# outside may move in, at either end. In the left one of these two programs A and B may both move
# in, and there B may pass A. In the right one each of them stops at one of the two in the middle, a
# release and then an acquire, and on both processors these two keep their order:
#
#     taken and given back once        twice
#     store A   may move down          store A   stays above the first release
#     acquire                          acquire
#     release                          release   } the two in the middle
#     load B    may move up            acquire   }
#                                      release
#                                      load B    stays below the second acquire
#
# On x86-64 once is enough: the instruction that takes a lock is a fence by itself (Intel SDM vol.
# 3, 9.2.3.9). On Arm a release and then an acquire keep their order (Arm Architecture Reference
# Manual, B2.3), so the lock is taken twice. Python has no fences, but it has locks. Where this file
# runs they are semaphores of the C library, whose sem_trywait acquires and whose sem_post releases.
# For Arm this was tried in a model of its rules (the tests run this code in every order that they
# allow), and never on such a machine. Appendix B of DOCS has the protocol access by access.


@dataclass(frozen=True)
class ArenaHandle:
    """How another process of this host finds the arena: small enough for any message."""

    pid: int  # of the writer: the memory is its file /proc/<pid>/fd/<descriptor>
    descriptor: int
    run_id: int  # another one whenever a writer starts
    manifest: Manifest
    num_slots: int
    num_readers: int  # that may attach
    num_copying: int  # of them: those that hold a slot only while they copy it


class Arena:
    """One process's mapping of the shared memory: words of 8 bytes, then slots.

    Every word except the run id holds two numbers, so that both change at once: version 7 in
    slot 2 is the word 7 * 1024 + 2. CPython reads and writes an item of `words`, a memoryview, with
    one memcpy of 8 bytes (in memoryobject.c), which compilers make one instruction. Of 8 aligned
    bytes it is done in one piece (Intel SDM vol. 3, 9.1.1; Arm ARM, B2.2.1): nobody sees a half.

    Each word has a cache line of its own, 64 bytes. Else a store to one would take that line away
    from the processor that reads another.
    """

    # Which word is which.
    LATEST = 0  # version * MAX_SLOTS + slot
    RUN = 1  # the run id of the writer
    LEASES = 2  # this and the following, one of each reader: its process id * MAX_SLOTS + slot

    MAX_SLOTS = 1024
    MAX_READERS = 900
    NUM_WORDS = 1024  # the last ones are for ranks of a trainer (section 8), and hosts (section 16)
    HEADER_BYTES = NUM_WORDS * CACHE_LINE_BYTES
    # In any word: nothing published, nothing leased. Divided by MAX_SLOTS it reads as version -1
    # in slot 1023, and as a lease of process -1; there is neither such a slot nor such a process.
    NOTHING = -1
    # A reader that gives its lease back wakes nobody, for that would cost a system call each time.
    # So a writer that waits for a slot, in `free_slot`, looks again after this time.
    LOOK_AGAIN_S = 0.0002

    def __init__(self, handle: ArenaHandle, descriptor: int) -> None:
        self.handle = handle
        self.lock = threading.Lock()  # excludes nobody: `fence` needs one
        # The mapping is shared: what one process writes there, the others see.
        num_bytes = self.HEADER_BYTES + handle.num_slots * handle.manifest.slot_bytes
        self.memory = mmap.mmap(descriptor, num_bytes)  # ValueError if the file is shorter
        every_8_bytes = memoryview(self.memory)[: self.HEADER_BYTES].cast("q")
        self.words = every_8_bytes[:: CACHE_LINE_BYTES // 8]
        self.whole = torch.frombuffer(self.memory, dtype=torch.uint8)
        # [num_slots, slot_bytes] uint8: slot s lies at byte 65536 + s * slot_bytes
        self.slots = self.whole[self.HEADER_BYTES :].view(handle.num_slots, -1)
        self.views: dict[int, dict[str, torch.Tensor]] = {}  # by slot, as far as asked for

    def tensors(self, slot: int) -> dict[str, torch.Tensor]:
        """The tensors of a slot by name, as views of its memory."""
        if slot not in self.views:
            views = {}
            for spec in self.handle.manifest.specs:
                content = self.slots[slot, spec.offset : spec.offset + spec.num_bytes]
                views[spec.name] = content.view(getattr(torch, spec.dtype)).view(spec.shape)
            self.views[slot] = views
        return self.views[slot]

    def stored_checksums(self, slot: int) -> torch.Tensor:
        """[tensors] int64: a view of what the writer left at the end of the slot."""
        num_bytes = 8 * len(self.handle.manifest.specs)
        return self.slots[slot, -num_bytes - 8 : -8].view(torch.int64)

    def computed_checksums(self, slot: int) -> torch.Tensor:
        """[tensors] int64: of what the slot holds now."""
        views = self.tensors(slot).values()
        return torch.tensor([checksum(view.flatten().view(torch.uint8)) for view in views])

    def put(self, word: int, value: int) -> None:
        """Changes a word that other processes read: on this host nobody does it in another way.

        Two promises. If another process finds the new value, and then has a fence of its own, it
        also finds everything that this process has written before. And once this has returned, any
        process that looks finds the new value.
        """
        self.fence()  # mechanism: fence before a word
        self.words[word] = value
        self.fence()  # mechanism: fence behind a word

    def fence(self) -> None:
        """All that stands before it takes effect before all that stands behind it: see above."""
        for _ in range(2):  # mechanism: twice
            with self.lock:
                pass

    def latest(self) -> tuple[int, int]:
        """(version, slot) of the newest weights; version -1 if there are none yet."""
        version, slot = divmod(self.words[self.LATEST], self.MAX_SLOTS)
        return version, slot

    def newest_version(self) -> int:
        """The version of the newest weights; -1 if there are none yet."""
        version, _ = self.latest()
        return version

    def commit(self, version: int, slot: int) -> None:
        """For the writer, when the slot is complete: makes it the latest, for all readers."""
        # The version at the end of the slot (7a). Only a relay reads it (section 16).
        stamps_of(self)[slot] = version
        # `tell` is `put`, and wakes those who sleep until this word changes (they stand below).
        tell(self, self.LATEST, version * self.MAX_SLOTS + slot)

    def announce(self, reader: int, slot: int) -> None:
        """For a reader: writes the slot that it is about to read into its word.

        The process id goes along, so that the writer can tell the lease of a dead reader from that
        of a slow one.
        """
        self.put(self.LEASES + reader, os.getpid() * self.MAX_SLOTS + slot)

    def give_back(self, reader: int) -> None:
        """For a reader that reads nothing any more, or has not begun."""
        self.put(self.LEASES + reader, self.NOTHING)

    def free_slot(self) -> int:
        """For the writer: a slot that is neither the latest nor leased by somebody alive.

        It waits for one only if readers copy, and then for the end of such a copy.
        """
        while True:
            slot = self._look_for_free_slot()
            if slot is not None:
                return slot
            require(self.handle.num_copying, "arena: no free slot")
            time.sleep(self.LOOK_AGAIN_S)

    def _look_for_free_slot(self) -> int | None:
        _, latest = self.latest()
        pids: dict[int, list[int]] = collections.defaultdict(list)  # by slot, of its readers
        for reader in range(self.handle.num_readers):
            pid, slot = divmod(self.words[self.LEASES + reader], self.MAX_SLOTS)
            pids[slot].append(pid)
        others = [slot for slot in range(self.handle.num_slots) if slot != latest]
        # First those that nobody leases. Only if there are none it matters who lives. To ask that
        # takes 0.02 ms for each reader, and 0.2 ms while another thread of this process runs Python
        # (2026-11-24), as that of a trainer does; a copy of 64 MiB takes some 6 ms (DOCS 2).
        for slot in sorted(others, key=lambda slot: len(pids[slot])):
            if not any(is_alive(pid) for pid in pids[slot]):  # what has ended leases nothing
                return slot
        return None

    def leases(self) -> list[tuple[int, int]]:
        """(process id, slot) of every reader that has a lease now, and lives."""
        found = []
        for reader in range(self.handle.num_readers):
            lease = self.words[self.LEASES + reader]
            pid, slot = divmod(lease, self.MAX_SLOTS)
            if is_alive(pid):  # the lease of a process that has ended is nobody's
                found.append((pid, slot))
        return found

    def lease(self, reader: int) -> tuple[int, int]:
        """(version, slot) of the newest weights; while my word names that slot nobody writes it.

        Why its three steps are enough, and in this order, stands above. If nothing was published
        yet, the answer is (-1, 1023): there is no such slot, so to announce it does no harm.
        """
        while True:
            version, slot = self.latest()  # 1. look
            # 2. Announce that slot. When this returns, all others can see it.
            self.announce(reader, slot)  # mechanism: announce
            if self.latest() == (version, slot):  # 3. look again  # mechanism: look again
                return version, slot


# At a first reading go on with `create_arena`. What stands in between is for those who wait for a
# word of an arena: in the measurement of this section, and in sections 8 and 16.
def stamps_of(arena: Arena) -> torch.Tensor:
    """[num_slots] int64: which version each slot holds, a view of its last 8 bytes.

    A relay (section 16) copies slots from another host, and does not always know which version it
    has leased there. The version crosses with the other bytes of the slot, and so tells it.
    """
    return arena.slots[:, -8:].view(torch.int64)[:, 0]


# A generator waits for no version: it looks at `latest` between two rollouts. But ranks of a
# sharded trainer wait for each other's words (section 8), and so do the generators of the bench
# below. They sleep in the kernel, by a futex (from "fast user-space mutex"): a process sleeps at an
# address of shared memory, and another one wakes all who sleep there.
SYS_FUTEX = {"x86_64": 202, "aarch64": 98}  # the number of the system call, by processor
FUTEX_WAIT = 0  # sleep, if the word is still what I say
FUTEX_WAKE = 1  # wake so many who sleep there
EVERYBODY = 2**31 - 1
SLEEP_AT_MOST = (ctypes.c_long * 2)(0, 100_000_000)  # seconds and nanoseconds; then look again


def futex(
    arena: Arena,
    word: int,
    operation: int,
    value: int,
) -> None:
    """The system call of that name, for a word of an arena. Other Python threads run meanwhile.

    FUTEX_WAIT returns when it is woken, after SLEEP_AT_MOST, on a signal, or at once if the word is
    not `value`. FUTEX_WAKE ignores the time. The C library has no function for futex, so this goes
    through `syscall`, which takes the number of any system call.
    """
    ctypes.CDLL(None).syscall(
        ctypes.c_long(SYS_FUTEX[os.uname().machine]),
        ctypes.c_void_p(arena.whole.data_ptr() + word * CACHE_LINE_BYTES),
        ctypes.c_long(operation),
        ctypes.c_long(value),
        ctypes.byref(SLEEP_AT_MOST),
    )


def tell(arena: Arena, word: int, value: int) -> None:
    """Changes a word, and wakes whoever waits for that."""
    arena.put(word, value)
    futex(arena, word, FUTEX_WAKE, EVERYBODY)


def wait_until(arena: Arena, word: int, least: int) -> int:
    """Returns a word when it is at least so much. It must be one that `tell` changes.

    Before the kernel lets me sleep it compares the word with what I found, under a lock that is
    needed to wake me. So a change that comes before I sleep is not missed, but for two cases. It
    compares only the lower 4 bytes, and as each version adds 1024 to a word, these are the same
    again after 2**32 / 1024, some 4 million versions. And who changes a word may die before it
    wakes me. So a sleep ends after 0.1 s, and I look again. If the one that should change the word
    is dead, I look again for ever: it is for those who own the two of us to notice, and to end me.
    """
    while True:
        found = arena.words[word]
        if found >= least:
            return found
        futex(arena, word, FUTEX_WAIT, found & 0xFFFFFFFF)


def create_arena(manifest: Manifest, num_readers: int, num_copying: int = 0) -> Arena:
    """An arena for so many readers; the process that calls this is its writer.

    num_copying: of them, those that copy, for which no slots are needed.

    The memory has no name in any file system. So it is gone when nobody has it open, even after
    kill -9, and the size of /dev/shm is no limit.
    """
    most = Arena.MAX_READERS
    require(num_readers <= most, f"arena: {num_readers} readers are too many")
    num_pointing = num_readers - num_copying  # those whose tensors are views of a slot (7d)
    num_slots = num_pointing + 2  # mechanism: one is always free
    descriptor = os.memfd_create("monarch_rl")
    os.ftruncate(descriptor, Arena.HEADER_BYTES + num_slots * manifest.slot_bytes)
    handle = ArenaHandle(
        pid=os.getpid(),
        descriptor=descriptor,
        run_id=time.time_ns(),
        manifest=manifest,
        num_slots=num_slots,
        num_readers=num_readers,
        num_copying=num_copying,
    )
    arena = Arena(handle, descriptor)
    # Bytes of 255 make NOTHING of every word. They also make every page of memory exist now: the
    # first write to a page costs several times what copying into it costs (DOCS 2).
    arena.whole.fill_(255)
    arena.put(Arena.RUN, handle.run_id)
    return arena


def attach_arena(
    handle: ArenaHandle,
    tensors: dict[str, torch.Tensor],
    dtype: torch.dtype | None = None,
) -> Arena:
    """The same arena, mapped into another process of this host, which has these tensors.

    dtype: if this process writes: what parameters are cast to in the slot.

    Raises WeightMismatch if the two sides differ in a name, a shape, a dtype or a tie. Without this
    comparison another dtype of the same size, say, would be read as nonsense, unseen.
    """
    there = {spec.name: spec for spec in handle.manifest.specs}
    here = {spec.name: spec for spec in manifest_of(tensors, dtype).specs}
    for name in [*here, *there]:
        theirs = there.get(name)
        ours = here.get(name)
        is_same = theirs and ours and theirs.same_tensor_as(ours)
        require(is_same, f"{name}: {theirs} there, {ours} here")
    return map_arena(handle)


def map_arena(handle: ArenaHandle) -> Arena:
    """The same arena, for a process that has no tensors. WeightMismatch: it is gone."""
    path = f"/proc/{handle.pid}/fd/{handle.descriptor}"
    try:
        with open(path, "r+b", buffering=0) as file:
            arena = Arena(handle, file.fileno())  # a mapping outlives its file
    except (OSError, ValueError) as error:
        raise WeightMismatch(f"arena: its writer, process {handle.pid}: {error}") from error
    # The process id may be that of another process by now, and the file another file.
    is_same_run = arena.words[Arena.RUN] == handle.run_id
    require(is_same_run, f"arena: it is not that of run {handle.run_id}")
    return arena


# -- 7c. The writer --------------------------------------------------------------------------------
#
#     Trainer.step   forward, backward | wait | optimizer | start | forward, backward | wait ...
#     the thread                                          | copy into a free slot, commit |
#
# Why the copy may run beside the next forward and backward pass: these read the weights, and so
# does the copy. Only the optimizer changes them, and it waits.
#
# A model's tensors lie wherever they were made. To copy 64 MiB in 290 pieces takes 1.5 times as
# long as in one (DOCS 2): Python needs 4 microseconds for each, and a short copy goes through the
# cache. So the trainer moves its parameters together, as in a slot, and one memmove copies all:
#
#     a slot              | embed.weight |-| norm.weight |-|    - is up to the next cache line
#     moved together      | embed.weight |-| norm.weight |-|    one block
#     as they were made   | embed.weight | something else ... | norm.weight |    two blocks
#
# At a first reading go on with `class WeightWriter`. Its idea is `_copy`: pick a free slot, fill
# it, commit it. All else in this part says which memory is copied where, to make that faster.


@dataclass(frozen=True)
class Match:
    """A part of a slot, and the part of a tensor that belongs there, of the same shape."""

    name: str  # of the tensor
    in_slot: torch.Tensor
    mine: torch.Tensor
    # This is all that this process has of the tensor. A rank of section 8 may have several parts of
    # one, which are called boxes there.
    is_only_box: bool


@dataclass(frozen=True)
class Block:
    """Memory that one memmove copies: a tensor, or some that are neighbours on both sides."""

    target: int  # its address in a slot
    source: int  # its address where the tensors are
    num_bytes: int

    def meets(self, following: Block) -> bool:
        """Does the other follow me on both sides, with nothing but padding between us?"""
        distance_in_slot = following.target - self.target  # from my first byte to its first
        distance_in_memory = following.source - self.source
        padding = distance_in_slot - self.num_bytes
        is_padding_only = 0 <= padding < CACHE_LINE_BYTES
        return distance_in_memory == distance_in_slot and is_padding_only

    def joined(self, following: Block) -> Block:
        """Both in one, and what lies between them."""
        num_bytes = following.target - self.target + following.num_bytes
        return dataclasses.replace(self, num_bytes=num_bytes)


@dataclass(frozen=True)
class CopyPlan:
    """What fills a slot."""

    matches: list[Match]  # that it was made of
    places: list[tuple[Any, ...]]  # where their tensors lay at that time, by lies_at
    blocks: list[Block]
    others: list[Match]  # that memmove cannot copy: on a GPU, only some columns, of another dtype
    num_bytes: int  # of blocks and others, without gaps


def move_together(tensors: dict[str, torch.Tensor]) -> None:
    """Moves the parameters among these tensors into one block of memory, to lie as in a slot.

    They stay the same objects, so modules, ties and optimizers notice nothing. Two kinds of tensors
    stay where they are, and are copied one by one:

        parameters of another dtype than the first   torch.save refuses memory of two dtypes
        buffers                                      copy.deepcopy of a model copies for each buffer
                                                     all memory that it is a view of: the block;
                                                     of a parameter only its own elements

    Only one tensor's memory is needed twice: each old tensor is freed when it has moved, and a page
    of the block takes memory only when it is written.
    """
    parameters = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.nn.Parameter):
            parameters[name] = tensor
    manifest = manifest_of(tensors)
    dtype = next(iter(parameters.values())).dtype
    # The last spec may be tied to an earlier one, so the block ends with whichever ends last.
    end = max(spec.offset + round_up(spec.num_bytes, dtype.itemsize) for spec in manifest.specs)
    block = torch.empty(end // dtype.itemsize, dtype=dtype)
    for spec in manifest.specs:  # also the tied ones: each of their names must see the new place
        parameter = parameters.get(spec.name)
        if parameter is not None and parameter.dtype == dtype:
            start = spec.offset // dtype.itemsize
            room = block[start : start + parameter.numel()].view(spec.shape)
            room.copy_(parameter.detach())
            parameter.data = room


class Side:
    """What writer and reader have in common: which part of a slot belongs to which tensor."""

    def __init__(self, arena: Arena, tensors: dict[str, torch.Tensor]) -> None:
        self.arena = arena
        self.tensors = tensors  # this side's own, by name
        self.copied_bytes = 0  # in all, into slots or out of them
        self.matches: dict[int, list[Match]] = {}  # by slot, as far as used

    def matches_with(self, slot: int) -> list[Match]:
        """The matches of all tensors with a slot.

        They are made once per slot: its views stay where they are, and the tensors stay the same
        objects (`pull` changes what memory they show).
        """
        if slot not in self.matches:
            found = []
            for name, view in self.arena.tensors(slot).items():
                found += self.match(name, view, self.tensors[name])
            self.matches[slot] = found
        return self.matches[slot]

    def match(
        self,
        name: str,
        view: torch.Tensor,
        tensor: torch.Tensor,
    ) -> list[Match]:
        """What belongs where, of one tensor: here all of it, in section 8 boxes of it."""
        return [
            Match(
                name=name,
                in_slot=view,
                mine=tensor,
                is_only_box=True,
            )
        ]

    def switch_to(self, tensors: dict[str, torch.Tensor]) -> None:
        """Uses other tensors from now on, of the same manifest."""
        self.tensors = tensors
        self.matches = {}


def lies_at(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What tells where in memory a tensor is, and how it lies there."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class WeightWriter(Side):
    """The trainer's side. It owns the arena, and copies in a thread."""

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        num_readers: int,
        dtype: torch.dtype | None = None,
        with_checksums: bool = False,
        arena: Arena | None = None,
        note: Callable[[str, float], None] | None = None,
        num_copying: int = 0,
    ) -> None:
        """Creates the arena, unless another rank has.

        tensors: the trainer's own, which the optimizer changes in place. num_readers: generators
        that may attach. dtype: what the copy casts parameters to; None: no cast. with_checksums:
        for readers that compare. arena: the one of another rank (section 8). note: a function that
        is told of each copy, and when it began. num_copying: of the readers, those that copy.
        """
        if arena is None:
            arena = create_arena(manifest_of(tensors, dtype), num_readers, num_copying)
        super().__init__(arena, tensors)
        # What is tied to an earlier name needs no copy of its own.
        stored = self.arena.handle.manifest.stored_specs()
        self.stored_bytes = {spec.name: spec.num_bytes for spec in stored}
        self.with_checksums = with_checksums
        self.note = note
        self.plans: dict[int, CopyPlan] = {}  # by slot, as far as used
        self.version = -1  # the newest that was begun
        self.thread = concurrent.futures.ThreadPoolExecutor(1)
        self.copying: concurrent.futures.Future[None] | None = None  # the newest, under way or done
        self.stream: torch.cuda.Stream | None = None
        if any(tensor.is_cuda for tensor in tensors.values()):
            self._prepare_for_gpu()

    def start(self, version: int) -> None:
        """Begins to make the tensors, as they are now, the latest version.

        It returns while a thread copies. Until `wait` has returned nobody may change the tensors.
        """
        self.wait()
        require(version > self.version, f"version {version} after version {self.version}")
        self.version = version
        if self.stream:
            # On a GPU: after the kernels that write the tensors, and beside those that follow.
            self.stream.wait_stream(torch.cuda.current_stream())
        self.copying = self.thread.submit(self._copy, version)

    def wait(self) -> float:
        """Returns when the copy is complete and the tensors may change: seconds that it waited.

        Raises what the copy raised. So does every later `start` and `wait`: after a copy that
        failed this writer publishes nothing more.
        """
        start = time.monotonic()
        if self.copying is not None:
            self.copying.result()
        return since(start)

    def publish(self, version: int) -> None:
        """`start` and `wait` in one, for who has nothing else to do meanwhile."""
        self.start(version)
        self.wait()

    def _copy(self, version: int) -> None:
        """What the thread does: fill a free slot, then make it the latest.

        If it raises, nothing was committed, and readers keep what they have.
        """
        start_s = time.time()
        slot = self.arena.free_slot()
        self._write(slot)
        self.arena.commit(version, slot)  # the last thing: now readers may look
        if self.note:
            self.note("publish", start_s)

    def _write(self, slot: int) -> None:
        """Fills a slot with the tensors as they are now."""
        plan = self._plan_for(slot)
        for block in plan.blocks:
            # Before an ordinary store the processor loads the cache line that it will overwrite.
            # memmove, above the threshold in ENVIRONMENT, uses stores that do not: this saves a
            # third of the traffic to memory. Such stores may become visible after later ones, even
            # on x86-64: memmove ends with a fence for them. Without it a reader could see the new
            # `latest` before the bytes. And ctypes lets other Python threads run meanwhile.
            ctypes.memmove(block.target, block.source, block.num_bytes)
        with torch.no_grad(), torch.cuda.stream(self.stream):  # on a CPU it is None: no effect
            for match in plan.others:
                match.in_slot.copy_(match.mine, non_blocking=True)
        self.copied_bytes += plan.num_bytes
        if self.stream:
            self.stream.synchronize()
        if self.with_checksums:
            self.arena.stored_checksums(slot).copy_(self.arena.computed_checksums(slot))

    def _plan_for(self, slot: int) -> CopyPlan:
        """The one that was made for the slot, if the tensors are still what they were then."""
        matches = self.matches_with(slot)
        places = [lies_at(match.mine) for match in matches]
        plan = self.plans.get(slot)
        # After `switch_to` the matches are another list. (`!=` would compare the tensors in them.)
        if plan is None or plan.matches is not matches or plan.places != places:
            plan = self._new_plan(matches, places)
            self.plans[slot] = plan
        return plan

    def _new_plan(self, matches: list[Match], places: list[tuple[Any, ...]]) -> CopyPlan:
        blocks: list[Block] = []
        others = []
        num_bytes = 0
        is_after_box = False
        for match in matches:
            room = match.in_slot
            mine = match.mine
            same_shape = room.shape == mine.shape
            require(same_shape, f"{match.name}: it has another shape than at the start")
            if match.name not in self.stored_bytes:
                continue
            num_bytes += room.nbytes
            is_plain = room.is_contiguous() and mine.is_contiguous() and room.dtype == mine.dtype
            if mine.is_cuda or not is_plain:
                others.append(match)
                continue
            block = Block(target=room.data_ptr(), source=mine.data_ptr(), num_bytes=room.nbytes)
            # Joined blocks are copied with what lies between them: between whole tensors of a slot
            # padding. But a rank of a sharded trainer (section 8) writes only a part of a tensor, a
            # box. What lies beside that may be another rank's, so a box is never joined.
            is_box = room.nbytes < self.stored_bytes[match.name]
            if blocks and not is_box and not is_after_box and blocks[-1].meets(block):
                block = blocks.pop().joined(block)
            blocks.append(block)
            is_after_box = is_box
        return CopyPlan(
            matches=matches,
            places=places,
            blocks=blocks,
            others=others,
            num_bytes=num_bytes,
        )

    def _prepare_for_gpu(self) -> None:
        """Makes a stream of its own for copies, and pins the arena.

        Pinned memory stays where it is, so the GPU can write there by itself. Into other memory the
        driver copies by way of a buffer of its own, and holds up this process meanwhile.
        """
        self.stream = torch.cuda.Stream()
        runtime: Any = torch.cuda.cudart()
        whole = self.arena.whole
        torch.cuda.check_error(runtime.cudaHostRegister(whole.data_ptr(), whole.nbytes, 0))


# -- 7d. The reader --------------------------------------------------------------------------------
# Readers on GPUs copy what a slot holds, and then hold it no longer. So no slots are counted for
# them: with such readers alone an arena has two, the latest and one to write into. A reader may
# still be copying that second one, which was the latest when it began. Then the writer waits until
# this copy is done, which waits for nobody. If its reader stands still, that is found, the reader
# is killed (section 5), and its lease is nobody's.


class WeightReader(Side):
    """A generator's side: `pull` makes its tensors the newest weights, in one of two ways.

    To point, which is the default: the tensors become views of the slot. No byte is copied, and the
    lease lasts until the next pull.

    To copy, which is the only way on GPUs: the bytes go into the memory that the tensors have.
    Compiled code wants that too, because it holds the addresses of its weights. The lease is given
    back after the copy, so an arena needs no slots for readers that copy.
    """

    def __init__(
        self,
        handle: ArenaHandle,
        reader: int,
        tensors: dict[str, torch.Tensor],
        copies: bool = False,
        compares: bool = False,
    ) -> None:
        """Attaches to the arena. Raises WeightMismatch if these tensors do not fit it.

        No stage compares, and none copies on a CPU. To compare is for those who do not trust that
        nobody else writes into the arena, or who change this file: it finds bytes that are not what
        the writer has left there. To copy is for compiled code.

        reader: a number from 0 to num_readers - 1 that no other reader has. copies: as above.
        compares: before it changes anything, `pull` asks whether the writer lives, and compares the
        checksums, which the writer must have been told to make. This implies copies.
        """
        require(0 <= reader < handle.num_readers, f"arena: it has no reader {reader}")
        super().__init__(attach_arena(handle, tensors), tensors)
        self.reader = reader
        self.compares = compares
        self.copies = copies or compares or any(tensor.is_cuda for tensor in tensors.values())
        self.version = -1  # which one the tensors are; -1: they are as before the first pull
        self.arena.give_back(reader)  # whoever was this reader before me is dead

    def pull(self) -> int:
        """Makes the tensors the newest version, which it returns; -1: none has been published.

        Raises WeightMismatch, and then the tensors are what they were before.

        For a moment my word names the new slot while my tensors are still views of the old one,
        which the writer may now fill. That is harmless, for I read neither until this returns.
        """
        # Versions of one arena only grow. If they do not, somebody else writes into it.
        newest = self.arena.newest_version()
        require(newest >= self.version, f"arena: version {newest}, after version {self.version}")
        if self.compares:
            pid = self.arena.handle.pid
            require(is_alive(pid), f"arena: its writer, process {pid}, has ended")
        if newest == self.version:
            return self.version
        version, slot = self.lease()  # this gives back the slot before
        try:
            self._take(slot)
        finally:
            if self.copies:  # it reads nothing of the slot any more
                self.arena.give_back(self.reader)  # mechanism: lease until copied
        self.version = version
        return version

    def lease(self) -> tuple[int, int]:
        """(version, slot) of the newest weights, which stay in that slot."""
        return self.arena.lease(self.reader)

    def _take(self, slot: int) -> None:
        """Makes the tensors what a slot holds."""
        if self.compares:
            self._compare(slot)
        for match in self.matches_with(slot):
            # If it has several boxes of a tensor (section 8), no single view shows them all.
            if match.is_only_box and not self.copies:
                match.mine.data = match.in_slot
            else:
                # On a GPU this returns when the bytes have been read, for it is asked to wait.
                match.mine.data.copy_(match.in_slot, non_blocking=False)
                self.copied_bytes += match.in_slot.nbytes

    def _compare(self, slot: int) -> None:
        """Raises WeightMismatch if the bytes of the slot are not those that the writer left."""
        differs = self.arena.stored_checksums(slot) != self.arena.computed_checksums(slot)
        names = list(self.arena.tensors(slot))
        wrong = [names[i] for i in differs.nonzero().flatten().tolist()]
        require(not wrong, f"{', '.join(wrong)}: the checksum is wrong")


# -- plumbing: process groups, for the comparison here and for trainers of several ranks -----------


def form_group(meeting_place: str, rank: int, num_ranks: int) -> None:
    """Makes this process a member of a process group: gloo for CPU tensors, NCCL for GPUs.

    meeting_place: the same for all ranks, where they find each other: an unnamed_file, or, of ranks
    on several hosts (section 16), a store of torch's, tcp://ADDRESS:PORT.
    """
    is_file = not meeting_place.startswith("tcp://")
    torch.distributed.init_process_group(
        init_method=f"file://{meeting_place}" if is_file else meeting_place,
        rank=rank,
        world_size=num_ranks,
    )


# -- measurement -----------------------------------------------------------------------------------


# Four roads from a trainer to its generators, all in processes of their own: the slots of this
# section, the same slots without leases, a broadcast, and one-sided reads of the trainer's live
# weights. In a round one version takes a road, and that is timed. In a race the trainer also goes
# on publishing while generators read, and what they read is searched for a second version.
#
# Times are shown, and decide nothing, for a busy machine changes them. That a sync costs about one
# copy is counted in bytes: those that all processes have copied, over those of one version. And
# beside each time stands that of a memmove of as many bytes, taken a moment before in the same
# process, so that the ratio of the two means the same on every machine.
#
# Both kinds of waiting of a broadcast show in the column "trainer held": for how long the trainer's
# Python stood still. (The broadcast here is gloo's. It serves each generator when it comes, so in
# the row with a late one the punctual one is held no longer than in the row above it.)
#
#     row                             trainer held, of a run on two cores
#     "gloo broadcast, 2"             37 ms: it waits for the transfer
#     "gloo broadcast, 2, one late"   67 ms: 50 ms until the late one comes, in which the other one
#                                     is served, and 17 ms in which the late one is served
#     "slots, 2"                      0.06 ms: for nobody (the sync took 1.2 times as long as a
#                                     memmove, in a thread)
#
# What is not in it: if forward and backward are shorter than the copy, the trainer waits for its
# own thread. In section 11 that is `stall_s`.


@dataclass(frozen=True)
class SyncRoad:
    """How a version gets from the trainer to generators, and how many of them take part.

    "slots"            The trainer publishes; a generator waits for that, pulls and reads.
    "no leases"        The same, but it gives its lease back before it reads: torn if the slot is
                       written meanwhile.
    "gloo broadcast"   All take part in a broadcast, and wait for each other.
    "RDMABuffer"       A generator reads the trainer's own weights: torn if they change meanwhile.
    """

    kind: str
    num_generators: int
    late_s: float = 0.0  # how late the first of the generators comes
    is_race: bool = False  # meanwhile the trainer goes on publishing, without a pause

    def name(self) -> str:
        """Its row in the table."""
        late = ", one late" if self.late_s else ""
        return f"{self.kind}, {self.num_generators}{late}"


@dataclass(frozen=True)
class Made:
    """A version that the trainer has made, for a round."""

    version: int
    memmove_s: float  # the yardstick: one copy of as many bytes, right before, under the same load


@dataclass(frozen=True)
class Sent:
    """What the trainer says of a round."""

    start_s: float  # when the sync began, by the monotonic clock
    held_s: float  # for how long this Python stood still


@dataclass(frozen=True)
class Received:
    """What a generator says of it."""

    end_s: float  # when it had the version, by the monotonic clock
    held_s: float
    is_torn: bool  # in a race: what it read was of several versions


class Bench(Worker):
    """A rank of the bench: rank 0 is the trainer; the others are generators, which attach later.

    The weights are 290 bf16 tensors of uneven sizes, as of a model with 24 layers. Every byte of a
    version is its number modulo 120, so that a reader can tell which versions it has read.
    """

    NUM_TENSORS = 290
    version = 0
    fetched_bytes = 0  # through an RDMABuffer

    @endpoint
    async def make_weights(
        self,
        meeting_place: str,
        num_mb: int,
        seed: int,
    ) -> ArenaHandle | None:
        """Makes room for them. The trainer also publishes 50 versions, and answers with its handle.

        meeting_place: of the process group. num_mb: MiB of weights. seed: of the sizes of tensors.
        """
        form_group(meeting_place, self.rank, 5)
        # For the broadcast. Also the ranks that are not in this smaller group have to make it.
        self.trainer_and_two: Any = torch.distributed.new_group([0, 1, 2])
        self.block = torch.empty(num_mb * MIB, dtype=torch.uint8)
        # 289 cuts at random places make 290 tensors. 32 elements are a cache line, so tensors that
        # begin at multiples of 32 lie as in a slot: as those of a trainer, after `move_together`.
        places = range(32, num_mb * MIB // 2, 32)
        cuts = sorted(random.Random(seed).sample(places, self.NUM_TENSORS - 1))
        parts = self.block.view(torch.bfloat16).tensor_split(cuts)
        self.tensors = {str(i): part for i, part in enumerate(parts)}
        if self.rank > 0:
            return None
        self.writer = WeightWriter(self.tensors, num_readers=4)
        self._publish(50)
        return self.writer.arena.handle

    @endpoint
    async def live_weights(self) -> RDMABuffer:
        """A handle of the memory in which the trainer changes its weights. Nothing protects it."""
        return RDMABuffer(self.block)

    @endpoint
    async def attach(self, handle: ArenaHandle, live: RDMABuffer) -> float:
        """A generator attaches: ms until it has the newest version. live: for one-sided reads."""
        self.live = live
        start = time.monotonic()
        self.reader = WeightReader(handle, self.rank - 1, self.tensors)
        self.reader.pull()
        return since(start) * 1e3

    @endpoint
    async def publish(self, num_versions: int) -> int:
        """The trainer publishes so many versions. Answers with the newest that readers find."""
        self._publish(num_versions)
        return self.writer.arena.newest_version()

    def _publish(self, num_versions: int) -> None:
        for _ in range(num_versions):
            self._make_next_version()
            self.writer.publish(self.version)

    def _make_next_version(self) -> None:
        self.writer.wait()
        self.version += 1
        self.block.fill_(self.version % 120)

    @endpoint
    async def copied_bytes(self) -> int:
        """Bytes that this process has copied so far, into slots or out of them."""
        if self.rank > 0:
            return self.reader.copied_bytes + self.fetched_bytes
        self.writer.wait()
        return self.writer.copied_bytes

    @endpoint
    async def make_version(self) -> Made:
        """The trainer makes a version, and does not send it yet."""
        self._make_next_version()
        # The yardstick: a copy of as many bytes, into the slot that the sync will use next.
        arena = self.writer.arena
        room = arena.slots[arena.free_slot()]
        start = time.monotonic()
        ctypes.memmove(room.data_ptr(), self.block.data_ptr(), self.block.nbytes)
        return Made(version=self.version, memmove_s=since(start))

    @endpoint
    async def send(self, road: SyncRoad) -> Sent:
        """The trainer sends the version that it has made on this road."""
        start = time.monotonic()
        if road.kind == "gloo broadcast":
            torch.distributed.broadcast(self.block, 0, group=self.trainer_and_two)
        elif road.kind != "RDMABuffer":  # in which it takes no part
            self.writer.start(self.version)
        held_s = since(start)
        if road.is_race:
            self._publish(12)
        return Sent(start_s=start, held_s=held_s)

    @endpoint
    async def receive(self, road: SyncRoad, version: int) -> Received:
        """A generator gets this version; in a race it then reads it, as if it decoded tokens."""
        if self.rank == 1:
            time.sleep(road.late_s)
        start = time.monotonic()
        weights = [self.block]
        if road.kind == "gloo broadcast":
            torch.distributed.broadcast(self.block, 0, group=self.trainer_and_two)
        elif road.kind == "RDMABuffer":
            await self.live.read_into(self.block)
            self.fetched_bytes += self.block.nbytes
        else:
            wait_until(self.reader.arena, Arena.LATEST, version * Arena.MAX_SLOTS)
            # Only now the clock starts: until then it was not held up, for it could have decoded
            # with the version that it has.
            start = time.monotonic()
            self.reader.pull()
            weights = list(self.tensors.values())
            if road.kind == "no leases":  # the fault: it gives back what it goes on reading
                self.reader.arena.give_back(self.reader.reader)
        end = time.monotonic()
        versions = set()
        if road.is_race:
            for tensor in weights * 4:  # four times over all weights, as in decoding four tokens
                # All bytes of a version are its number modulo 120, so of weights that are not torn
                # the smallest byte is also the largest.
                low, high = tensor.view(torch.int8).aminmax()
                versions.update((int(low), int(high)))
        # To answer takes CPU time that a generator which is not done may need. So all answer later.
        await asyncio.sleep(0.01)
        return Received(
            end_s=end,
            held_s=end - start,
            is_torn=len(versions) > 1,
        )


@dataclass(frozen=True)
class SyncRow:
    """What a road costs: medians, in ms."""

    road: str  # and for how many generators
    # From the beginning until the last generator has the version. With an RDMABuffer that includes
    # two messages: the trainer's answer that it is ready, and the call that makes the generator
    # read.
    ms: float
    x_memmove: float  # those ms, over the ms of a memmove of as many bytes
    # Bytes that all processes have copied, over the bytes of a version. None for a broadcast, which
    # sends through sockets: what is copied there this program cannot count.
    copies: float | None
    trainer_held: float  # for how long its Python stood still
    gen_held: float  # of the generator that was held longest
    torn: int  # reads, in races
    reads: int


class SyncBench:
    """Sends versions on roads, and makes a row of the table of each road."""

    def __init__(self, ranks: Bench, num_mb: int) -> None:
        self.ranks = ranks
        self.trainer = ranks.slice(rank=0)
        self.generators = [ranks.slice(rank=rank) for rank in range(1, 5)]
        self.model_bytes = num_mb * MIB

    async def round(self, road: SyncRoad) -> tuple[Made, Sent, list[Received]]:
        """One round on this road: what the trainer says of it, and what the generators say.

        Mostly generators are asked before the trainer sends: they wait for the version, or for the
        trainer in the broadcast. A generator that reads live weights waits for nothing. So it is
        asked only when the trainer is done, except in a race, in which it is to read while the
        trainer writes.
        """
        made = await self.trainer.make_version.call_one()
        sent = None
        if road.kind == "RDMABuffer" and not road.is_race:
            sent = await self.trainer.send.call_one(road)
        receiving = []
        for i, generator in enumerate(self.generators[: road.num_generators]):
            version = made.version
            # In a race the trainer publishes 12 versions more (`send`). Each generator waits for
            # another one of these, and so leases another slot.
            if road.is_race:
                version += i + 1
            receiving.append(generator.receive.call_one(road, version))
        if sent is None:
            sent = await self.trainer.send.call_one(road)
        return made, sent, list(await asyncio.gather(*receiving))

    async def row(self, num_rounds: int, road: SyncRoad) -> SyncRow:
        """Measures a road: races first, for reads that are torn, then rounds for the times."""
        num_torn = 0
        num_races = 0 if road.late_s else num_rounds
        race = dataclasses.replace(road, is_race=True)
        for _ in range(num_races):
            _, _, received = await self.round(race)
            num_torn += sum(one.is_torn for one in received)
        before = await self._copied_bytes()
        rounds = [await self.round(road) for _ in range(num_rounds)]
        copied = await self._copied_bytes() - before

        # The clock runs from when the trainer begins until the last generator has the version.
        took_s = []
        memmove_s = []
        trainer_s = []
        generator_s = []
        for made, sent, received in rounds:
            last_end = max(one.end_s for one in received)
            took_s.append(last_end - sent.start_s)
            memmove_s.append(made.memmove_s)
            trainer_s.append(sent.held_s)
            generator_s.append(max(one.held_s for one in received))
        is_copied = road.kind != "gloo broadcast"
        return SyncRow(
            road=road.name(),
            ms=statistics.median(took_s) * 1e3,
            x_memmove=statistics.median(took_s) / statistics.median(memmove_s),
            copies=copied / num_rounds / self.model_bytes if is_copied else None,
            trainer_held=statistics.median(trainer_s) * 1e3,
            gen_held=statistics.median(generator_s) * 1e3,
            torn=num_torn,
            reads=num_races * road.num_generators,
        )

    async def _copied_bytes(self) -> int:
        """By all processes so far."""
        found = await self.ranks.copied_bytes.call()
        return sum(found.values())

    async def num_published_beside_a_stopped_reader(self, num_versions: int) -> int:
        """By how much `latest` moves, while a generator stands still that holds its lease."""
        pid = (await self.generators[0].find_pulse.call_one()).pid
        before = await self.trainer.publish.call_one(1)
        os.kill(pid, signal.SIGSTOP)
        try:
            after = await self.trainer.publish.call_one(num_versions)
        finally:
            os.kill(pid, signal.SIGCONT)
        return after - before


# Pairs of a number of rounds and a road. The slower roads get fewer rounds.
SYNC_ROADS = [
    (7, SyncRoad(kind="no leases", num_generators=2)),
    (7, SyncRoad(kind="slots", num_generators=1)),
    (7, SyncRoad(kind="slots", num_generators=2)),
    (7, SyncRoad(kind="slots", num_generators=4)),
    (3, SyncRoad(kind="slots", num_generators=2, late_s=0.05)),
    (3, SyncRoad(kind="gloo broadcast", num_generators=2)),
    (3, SyncRoad(kind="gloo broadcast", num_generators=2, late_s=0.05)),
    (2, SyncRoad(kind="RDMABuffer", num_generators=1)),
]


@stage(
    "a generator never samples from half-updated weights, on a CPU the trainer waits for no "
    "reader, and a sync is one copy of the weights, for 1, 2 and 4 generators",
    hint="announce nothing, `pass`: the trainer overwrites what is read",
    mechanism="announce",
)
async def demo_weight_sync(report: Report, cfg: Config) -> None:
    """Sends versions on all roads, and searches what was read for a second version."""
    num_mb = cfg.model_mb
    report.say(f"290 tensors, {num_mb} MiB; seed {cfg.seed} (at 64 MiB about 20 s)")
    procs = this_host().spawn_procs(per_host={"rank": 5})
    report.at_end(procs.stop)
    ranks = procs.spawn("bench", Bench, Place(service="bench", replica_id=0))
    meeting_place = unnamed_file("meeting place")
    handles = await ranks.make_weights.call(meeting_place, num_mb, cfg.seed)
    bench = SyncBench(ranks, num_mb)
    # Only now, after 50 versions, do generators attach. The trainer takes no part in that.
    live = await bench.trainer.live_weights.call_one()
    handle = handles.item(rank=0)
    assert handle is not None, "rank 0 is the trainer, which answers with a handle"
    late_ms = []
    for generator in bench.generators:
        late_ms.append(await generator.attach.call_one(handle, live))
    rows = []
    for num_rounds, road in SYNC_ROADS:
        report.doing(f"{num_rounds} rounds of: {road.name()}")
        rows.append(await bench.row(num_rounds, road))
    num_published = await bench.num_published_beside_a_stopped_reader(12)
    close_unnamed_file(meeting_place)

    report.table(rows)
    # In the order of SYNC_ROADS. The one that is left out is slots, of which one reader is late.
    unsafe, one, two, four, _, group, late_group, direct = rows
    report.say(
        f"all in ms; a memmove of {num_mb} MiB takes {show(two.ms / two.x_memmove)}. held: for how "
        "long this side's Python stood still; late: by 50 ms. The trainer was held by slots for "
        f"{show(two.trainer_held)}, by a broadcast for {show(group.trainer_held)}, and with one "
        f"late for {show(late_group.trainer_held)}.",
        f"Joining after version 50 took a generator {max(late_ms):.1f} ms at most.",
    )
    megabytes = num_mb * MIB / 1e6
    safe = [one, two, four]
    num_torn = sum(row.torn for row in safe)
    report.figure(
        memmove_ms=two.ms / two.x_memmove,
        sync_over_memmove_1=one.x_memmove,
        sync_over_memmove=two.x_memmove,
        sync_over_memmove_4=four.x_memmove,
        trainer_held_ms=two.trainer_held,
        trainer_held_by_group_ms=group.trainer_held,
        trainer_held_by_late_group_ms=late_group.trainer_held,
        gloo_gb_per_s=megabytes / group.ms,  # MB per ms
        rdma_gb_per_s=megabytes / direct.gen_held,
        late_join_ms=max(late_ms),
        torn_reads=num_torn,
    )
    num_reads = sum(row.reads for row in safe)
    report.check(f"torn reads without leases, of {unsafe.reads}", unsafe.torn, ">", 0)
    report.check(f"torn reads of live weights, of {direct.reads}", direct.torn, ">", 0)
    report.check(f"torn reads through slots, of {num_reads}", num_torn, "==", 0)
    copies = [row.copies for row in safe]
    report.check("copies that a sync took with 1, 2, 4 generators", copies, "==", [1.0, 1.0, 1.0])
    report.check("versions published beside a reader that stood still", num_published, "==", 12)
    # You can now hand weights to any number of readers on a host. On CPUs neither side waits.


# == 8. RESHARD ====================================================================================
# Problem. A trainer of several ranks cuts each weight one way (FSDP: by rows), a generator of
#   several ranks cuts it another way (tensor parallel: by columns). The usual way is to gather: all
#   ranks first get the whole tensor, and then cut it. Each of N ranks has 1/N of it, and gets the
#   other (N - 1)/N, so N - 1 whole tensors move. And then the generator still has to get its part.
#   Besides, plans that take sizes to divide evenly lose what is left over, such as the last of 23
#   columns on 2 ranks.
#   (FSDP, in torch, gives each rank of a trainer a part of every weight. A weight of which a rank
#   has a part is a DTensor; its placement says how it is cut, as Cut below does.)
# Rule. Say which boxes of the whole tensor each rank has. On one host a slot holds whole tensors:
#   each trainer rank writes its boxes into it, each generator rank views its own, and nothing moves
#   between ranks. Between hosts, where a box of one side meets a box of the other, there is one
#   move, and all moves from one rank to another travel as one parcel.
# Cost. A view by columns is not contiguous: writing it takes longer, as the demo shows. Parcels
#   take the memory of what they carry.
# Not here. Expert parallel layouts; tensors of which each rank has a summand instead of a part
#   (Partial placements: a trainer adds these up first).
# Source. DTensor placements; cross-mesh resharding (Zhuang, MLSys 2023).
#
# By example: a matrix of 5 x 23, of a trainer of two ranks by rows, of a generator by columns.
#
#     trainer rank 0     rows 0-2, all columns       writes this box into the slot
#     trainer rank 1     rows 3-4, all columns       writes this box into the same slot
#     generator rank 0   all rows, columns 0-11      views this box of the slot
#     generator rank 1   all rows, columns 12-22     views this box of the slot

# -- 8a. Boxes -------------------------------------------------------------------------------------

Index = tuple[int, ...]  # a place in a tensor, or a size: a number for each dimension


@dataclass(frozen=True)
class Box:
    """A cuboid of a whole tensor that one rank has: of a matrix, a rectangle.

    Above, trainer rank 1 has the box with start (3, 0), end (5, 23) and local (0, 0).
    """

    start: Index  # of its first element, in the whole
    end: Index  # behind its last element
    local: Index  # where its first element lies in the memory of its rank

    def size(self) -> Index:
        """Its length in each dimension."""
        pairs = zip(self.start, self.end, strict=True)
        return tuple(end - start for start, end in pairs)

    def place_of(self, offset: Index) -> Index:
        """From a place in the whole tensor to the place of the same element in the rank's part."""
        steps = zip(offset, self.start, self.local, strict=True)
        return tuple(i - start + here for i, start, here in steps)


@dataclass(frozen=True)
class Stretch:
    """Consecutive numbers in a list of indices.

    In the list 4 5 6 9 there are two of them: one has start 4, end 7, place 0; the other has start
    9, end 10, place 3.
    """

    start: int
    end: int  # behind the last
    place: int  # of the first of them, in the list


@dataclass(frozen=True)
class Cut:
    """How a tensor is cut, and which rank is meant.

    Ranks stand in a mesh, and a placement says for each dimension of the mesh what is done along
    it: Shard(0) cuts the tensor's rows among the ranks, Replicate() gives all of them the same.

    _StridedShard is FSDP's cut of a dimension that tensor parallelism has cut before, into
    `split_factor` parts. By example, tensor parallelism has cut 12 rows into 0-5 and 6-11. FSDP
    cuts both parts in two, and gives its rank 0 the rows 0-2 and 6-8. In the mesh FSDP stands
    first, so here its cut is applied first, and gives 0-2 and 6-8; the Shard that follows picks
    from these 0-2 for the first tensor-parallel rank, and 6-8 for the second. In general, each FSDP
    rank has a piece of every part, and Shard picks those that lie in the rank's own part.
    """

    mesh_shape: tuple[int, ...]  # such as (2, 4): two rows of four ranks
    placements: tuple[dtensor.Placement, ...]  # one for each dimension of the mesh
    coordinates: Index  # of the rank in the mesh, such as (1, 3)


def cut_of(tensor: torch.Tensor) -> Cut:
    """How this process's DTensor is cut, and which of the ranks this process is.

    A plain tensor counts as one that a mesh of no dimensions leaves whole.
    """
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is None:
        return Cut(mesh_shape=(), placements=(), coordinates=())
    coordinates = mesh.get_coordinate()
    assert coordinates is not None, "this process is no member of the mesh"
    assert isinstance(tensor, dtensor.DTensor)
    return Cut(
        mesh_shape=tuple(mesh.shape),
        placements=tuple(tensor.placements),
        coordinates=tuple(coordinates),
    )


@functools.cache
def boxes(shape: Index, cut: Cut) -> list[Box]:
    """The boxes that this rank has of a tensor of this shape.

    This applies the rules of DTensor's Shard, _StridedShard and Replicate to the indices of each
    dimension.
    """
    # Which indices of each dimension the rank has: at first all of them. Each dimension of the mesh
    # then cuts one dimension of the tensor, and the rank keeps its part. By example, on 2 ranks:
    #
    #     23 columns, Shard                       rank 0: 0-11           rank 1: 12-22
    #     12 rows, _StridedShard, split_factor 2
    #       which makes the parts                 0-5 and 6-11
    #       and cuts each of them in two          rank 0: 0-2 and 6-8    rank 1: 3-5 and 9-11
    indices = [torch.arange(length) for length in shape]
    steps = zip(cut.placements, cut.mesh_shape, cut.coordinates, strict=True)
    for placement, num_ranks, coordinate in steps:
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim")  # noqa: B009  # Shard and _StridedShard have one
        num_parts = getattr(placement, "split_factor", 1)  # only _StridedShard has one
        mine = []
        for part in indices[dim].chunk(num_parts):
            # As torch.chunk: all shards have this length but the last ones, which may be empty.
            length = math.ceil(len(part) / num_ranks)  # mechanism: uneven shards
            mine.append(part[coordinate * length : (coordinate + 1) * length])
        indices[dim] = torch.cat(mine)

    # Indices that follow each other make a stretch, and one stretch of each dimension makes a box.
    # Mostly there is one stretch per dimension, and so one box.
    found = []
    for stretches in itertools.product(*[stretches_of(index) for index in indices]):
        found.append(
            Box(
                start=tuple(stretch.start for stretch in stretches),
                end=tuple(stretch.end for stretch in stretches),
                local=tuple(stretch.place for stretch in stretches),
            )
        )
    return found


def stretches_of(index: torch.Tensor) -> list[Stretch]:
    """The stretches of consecutive numbers in a list. index: [n] int64, rising."""
    is_break = index.diff() != 1  # [n - 1]: between which neighbours one ends
    ends = [*(is_break.nonzero().flatten() + 1).tolist(), len(index)]
    stretches = []
    first = 0
    for end in ends:
        if end > first:  # else the list is empty: the rank has nothing of the tensor
            start = int(index[first])
            last = int(index[end - 1])
            stretches.append(Stretch(start=start, end=last + 1, place=first))
        first = end
    return stretches


# -- 8b. Sharded writers and readers: one slot, many hands -----------------------------------------
#
# The ranks of a trainer write so (--trainers), and those of a generator read so (--tensor-parallel;
# both in section 11). Who waits for whom, in a trainer of two ranks; time goes to the right:
#
#     rank 0       update 7 | forward, backward ................................ | wait | update 8
#       a thread            | names slot 2, writes its boxes | waits for rank 1 | latest = 7 |
#     rank 1       update 7 | forward, backward ................................ | wait | update 8
#       a thread            | waits for the name | writes its boxes | says so |


def region(offset: Index, size: Index) -> tuple[slice, ...]:
    """What to index a tensor with, to get a box of it."""
    pairs = zip(offset, size, strict=True)
    return tuple(slice(i, i + length) for i, length in pairs)


def box_matches(
    name: str,
    view: torch.Tensor,
    tensor: torch.Tensor,
) -> list[Match]:
    """Which part of the whole tensor in a slot belongs to which part of what this rank has.

    view: the whole tensor, in the slot. tensor: the DTensor of this rank, or a plain one.
    """
    mine = local(tensor)
    held = boxes(tuple(tensor.shape), cut_of(tensor))
    is_only_box = len(held) == 1
    matches = []
    for box in held:
        part = mine if is_only_box else mine[region(box.local, box.size())]
        in_slot = view[region(box.start, box.size())]
        matches.append(
            Match(
                name=name,
                in_slot=in_slot,
                mine=part,
                is_only_box=is_only_box,
            )
        )
    return matches


def rank_word(rank: int) -> int:
    """Which word of the arena is that of this rank: the last one is that of rank 0."""
    return Arena.NUM_WORDS - 1 - rank


class ShardWriter(WeightWriter):
    """One rank of a sharded trainer. All ranks write their boxes into the same slot.

    The ranks talk through the last words of the arena, a word for each, of the form version *
    MAX_SLOTS + slot. The word of rank 0 says what is to be written; that of another rank says what
    it has written.
    """

    # In a word: that rank's copy has raised. It is larger than the word of any version, so it also
    # wakes those who wait for a later one.
    FAILED = 1 << 62

    def __init__(
        self,
        tensors: dict[str, torch.Tensor],
        num_readers: int,
        rank: int,
        num_ranks: int,
        handle: ArenaHandle | None = None,
        **options: Any,
    ) -> None:
        """Creates the arena (rank 0), or attaches to it (the others).

        tensors: DTensors, or plain ones, which are the same on all ranks. handle: of the arena of
        rank 0, for all other ranks. options: dtype, note and num_copying, as in WeightWriter.
        """
        arena = attach_arena(handle, tensors, options.get("dtype")) if handle else None
        super().__init__(tensors, num_readers, arena=arena, **options)
        self.rank = rank
        self.num_ranks = num_ranks

    @classmethod
    def join(
        cls,
        tensors: dict[str, torch.Tensor],
        num_readers: int,
        rank: int,
        num_ranks: int,
        **options: Any,
    ) -> ShardWriter:
        """The writer of this rank. All ranks of a process group call this at the same time.

        Rank 0 makes the arena, and tells the others its handle. options: as above.
        """
        writer = None
        handle = None
        if rank == 0:
            writer = cls(tensors, num_readers, rank, num_ranks, **options)
            handle = writer.arena.handle
        if num_ranks > 1:
            told = [handle]
            torch.distributed.broadcast_object_list(told, 0)
            handle = told[0]
        return writer or cls(tensors, num_readers, rank, num_ranks, handle, **options)

    def match(
        self,
        name: str,
        view: torch.Tensor,
        tensor: torch.Tensor,
    ) -> list[Match]:
        """The boxes of this rank, unless another rank writes the same."""
        return box_matches(name, view, tensor) if self._is_first_copy(tensor) else []

    def _is_first_copy(self, tensor: torch.Tensor) -> bool:
        """Does this rank write it? Of several ranks that have the same, the first one does."""
        cut = cut_of(tensor)
        if not cut.placements:  # a plain tensor, such as a buffer: all ranks have it
            return self.rank == 0
        pairs = zip(cut.placements, cut.coordinates, strict=True)
        # Along each dimension of the mesh that replicates it must be number 0.
        return all(i == 0 for placement, i in pairs if placement.is_replicate())

    def _copy(self, version: int) -> None:
        start_s = time.time()
        try:
            if self.rank == 0:
                self._copy_as_rank_0(version)
            else:
                self._copy_as_another(version)
        except Exception:
            # Whoever waits for my word would wait for ever: it gets a word that says so. (A rank
            # that dies says nothing. Then the whole replica is lost, and all its ranks are killed.)
            self._say(self.FAILED)
            raise
        if self.note:
            self.note("publish", start_s)

    def _copy_as_rank_0(self, version: int) -> None:
        """The upper half of the drawing: names the slot, and commits when all have written."""
        slot = self.arena.free_slot()
        self._say(version * Arena.MAX_SLOTS + slot)  # the others may begin
        self._write(slot)
        self._await_others(version, slot)
        self.arena.commit(version, slot)

    def _await_others(self, version: int, slot: int) -> None:
        """Returns when all others have written into that slot.

        slot: only SpanWriter looks at it (section 16).
        """
        for rank in range(1, self.num_ranks):
            self._word_of(rank, version)  # mechanism: wait for all

    def _copy_as_another(self, version: int) -> None:
        """The lower half of the drawing: writes into the slot that rank 0 has named."""
        word = self._word_of(0, version)  # waits for the name of the slot
        self._write(word % Arena.MAX_SLOTS)
        self._say(word)  # I have written

    def _say(self, word: int) -> None:
        """Tells the other ranks, in this rank's word."""
        tell(self.arena, rank_word(self.rank), word)

    def _word_of(self, rank: int, version: int) -> int:
        """Waits until that rank has come to this version, and returns its word."""
        least = version * Arena.MAX_SLOTS
        word = wait_until(self.arena, rank_word(rank), least)
        require(word != self.FAILED, f"arena: the copy of rank {rank} failed")
        return word


class ShardReader(WeightReader):
    """One rank of a sharded generator: its DTensors become views of its boxes."""

    def match(
        self,
        name: str,
        view: torch.Tensor,
        tensor: torch.Tensor,
    ) -> list[Match]:
        """The boxes of this rank."""
        return box_matches(name, view, tensor)


# -- 8c. Between hosts: plans and parcels ----------------------------------------------------------
# At a first reading go on with section 9. Three things stand here:
#
#     plans     which part of which rank belongs where in another one. Runs use them if the trainer
#               is on several hosts (16g)
#     pieces    in which all is read that hosts read of each other: section 16 uses them
#     parcels   in which what a plan moves can travel. Only the demo uses these, beside the slots:
#               to another host section 16 sends slots, or parts of them. Parcels are what one needs
#               if slots would be too large for one host
#
#     rank of the source                                rank of the target
#     tensors --copy--> parcel of (0, 1)  --one read--> its parcel of (0, 1) --copy--> tensors
#
# A plan says what goes into the parcels. By example, for a matrix "w" of 5 x 23, of a trainer that
# is cut by rows and a generator that is cut by columns:
#
#     source 0 has   rows 0-2, all columns          target 0 needs   all rows, columns 0-11
#     source 1 has   rows 3-4, all columns          target 1 needs   all rows, columns 12-22
#
#     move: source 0 -> target 1, offset (0, 12), size (3, 11), read_at (0, 12), write_at (0, 0)
#     move: source 1 -> target 1, offset (3, 12), size (2, 11), read_at (0, 12), write_at (3, 0)

Layout = list[list[Box]]  # by rank, the boxes that it has


def layout(
    shape: Index, mesh_shape: tuple[int, ...], placements: tuple[dtensor.Placement, ...]
) -> Layout:
    """The boxes of every rank of a mesh, for a tensor of this shape."""
    found = []
    for coordinates in itertools.product(*[range(length) for length in mesh_shape]):
        cut = Cut(
            mesh_shape=mesh_shape,
            placements=placements,
            coordinates=coordinates,
        )
        found.append(boxes(shape, cut))
    return found


@dataclass(frozen=True)
class Move:
    """Elements of a tensor that one rank of the source has and one rank of the target needs."""

    name: str  # of the tensor
    source: int  # rank
    target: int  # rank
    # The first of them has three places: in the whole, and in what either rank has of it.
    offset: Index  # in the whole
    size: Index
    read_at: Index  # in what the source rank has
    write_at: Index  # in what the target rank has


def whole_shape(side: Layout) -> Index:
    """Where the boxes of all ranks end: the shape of the whole tensor, unless that is empty."""
    ends = [box.end for held in side for box in held]
    by_dimension = zip(*ends, strict=True)
    return tuple(max(lengths) for lengths in by_dimension)


def overlap(have: Box, need: Box) -> Box | None:
    """The cuboid that two boxes share; None if they share nothing.

    Its `local` is the place of its first element in the memory of the rank that has `have`.
    In each dimension it begins where the later one begins, and ends where the earlier one ends.
    """
    starts = zip(have.start, need.start, strict=True)
    ends = zip(have.end, need.end, strict=True)
    start = tuple(max(pair) for pair in starts)
    end = tuple(min(pair) for pair in ends)
    shared = Box(start=start, end=end, local=have.place_of(start))
    has_elements = all(length > 0 for length in shared.size())  # below 0 where they lie apart
    return shared if has_elements else None


def plan(
    name: str,
    source: Layout,
    target: Layout,
    sent: collections.Counter[int] | None = None,
) -> list[Move]:
    """Moves that give every target rank its boxes, each element once.

    If several source ranks have the same box, the one with the least to send so far is read.
    sent: how many elements each source rank sends by earlier plans, which this one adds to. Raises
    WeightMismatch if nobody has some element, or if the two sides are not cut from tensors of the
    same shape.
    """
    sent = collections.Counter() if sent is None else sent
    # Two sides that are cut from tensors of different shapes would give nonsense.
    there = whole_shape(source)
    here = whole_shape(target)
    require(there == here, f"{name}: {there} there, {here} here")

    owners: dict[Box, list[int]] = {}  # the source ranks that have a box
    for rank, held in enumerate(source):
        for box in held:
            owners.setdefault(box, []).append(rank)

    # Different boxes of the source do not overlap (equal ones are one entry of `owners`), and so
    # neither do moves into the same box. If the sizes of these moves add up to the size of the box,
    # then each of its elements is written exactly once.
    moves = []
    for target_rank, needed in enumerate(target):
        for need in needed:
            missing = math.prod(need.size())
            for move in moves_into(name, need, target_rank, owners, sent):
                moves.append(move)
                missing -= math.prod(move.size)
            require(missing == 0, f"{name}: {missing} elements of {need} are nowhere")
    return moves


def moves_into(
    name: str,
    need: Box,
    target: int,
    owners: dict[Box, list[int]],
    sent: collections.Counter[int],
) -> Iterator[Move]:
    """One move from each box of the source that meets this box of the target."""
    for have, ranks in owners.items():
        shared = overlap(have, need)
        if shared is None:
            continue
        source = min(ranks, key=lambda rank: sent[rank])
        sent[source] += math.prod(shared.size())
        yield Move(
            name=name,
            source=source,
            target=target,
            offset=shared.start,
            size=shared.size(),
            read_at=shared.local,
            write_at=need.place_of(shared.start),
        )


# One RDMABuffer over everything is read by one thread of Monarch's. Several buffers of this size
# that are read at the same time cross faster (DOCS 8 has the numbers).
PIECE_BYTES = 4 * MIB
# How many are read at the same time. Eight cross as fast as all of them do (DOCS 8 has these
# numbers, too). More would do harm. The owner makes a copy of each piece that it is asked for, and
# keeps it until the cable has taken it: for all pieces together, a copy of the whole slot. And each
# piece waits for those before it: the deadline of the last would have to grow with the model.
PIECES_UNDER_WAY = 8
# How long a read of a piece may take. It is two messages, the request and the piece, and Monarch
# gives each of them 30 s. However large the model is, at most seven others of its reader share the
# cable with it. So all is well if 8 x 4 MiB cross in 30 s: 1.1 MB/s for each reader on that cable.
PIECE_DEADLINE_S = 60


class Unreachable(RuntimeError):
    """A one-sided read or write failed, or took too long: its owner has gone, or the way there."""


async def answered(transfer: Awaitable[None]) -> None:
    """Awaits a one-sided read or write. Raises Unreachable if it fails.

    Monarch raises a plain Exception for whatever goes wrong on the way, so nothing but this wait
    stands in the `try`. A mistake of ours, such as a room that is too small, is raised where the
    transfer is made, before it is awaited here; and so the two cannot be taken for each other.
    """
    try:
        await transfer
    except Exception as error:
        raise Unreachable(str(error)) from error


def pieces_of(memory: torch.Tensor, piece_bytes: int = PIECE_BYTES) -> list[RDMABuffer]:
    """Handles that together cover this memory. memory: [num_bytes] uint8."""
    return [RDMABuffer(piece) for piece in memory.split(piece_bytes)]


async def read_pieces(
    pieces: Sequence[RDMABuffer],
    rooms: Sequence[torch.Tensor],
    arrived: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Reads memory of which `pieces_of` made the handles, PIECES_UNDER_WAY of them at a time.

    rooms: for each handle, as many bytes to read into. arrived: is told of each piece, how many
    bytes it has. If a read fails, no other one is begun. When this returns, or raises Unreachable,
    none is under way any more: nothing writes into a room behind the caller's back. (If it is
    cancelled, reads that are under way go on, and the rooms must not be used again.)
    """
    left = collections.deque(zip(pieces, rooms, strict=True))

    async def read_what_is_left() -> None:
        while left:
            there, here = left.popleft()
            try:
                await answered(there.read_into(here, timeout=PIECE_DEADLINE_S))
            except Exception:
                left.clear()
                raise
            arrived(here.nbytes)

    readers = [read_what_is_left() for _ in range(PIECES_UNDER_WAY)]  # mechanism: pieces under way
    for result in await asyncio.gather(*readers, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


class Parcel:
    """All that one rank has for another, in one buffer.

    Both sides make a parcel from the same moves, so they agree on the order of its parts: the
    widest dtype first, so that each part begins at a multiple of the size of its elements.
    """

    def __init__(
        self,
        moves: list[Move],
        tensors: dict[str, torch.Tensor],
        source: int,
        target: int,
        is_sender: bool,
    ) -> None:
        """Makes an empty parcel.

        moves: those of all ranks; the parcel takes the ones from source to target. tensors: those
        of this side, by name. is_sender: is this side the source?
        """
        # Views of what this rank has. A copy from them packs, a copy into them unpacks.
        parts = []
        for move in moves:
            if (move.source, move.target) == (source, target):
                start = move.read_at if is_sender else move.write_at
                parts.append(local(tensors[move.name])[region(start, move.size)])
        parts.sort(key=lambda part: -part.itemsize)
        self.parts = parts
        self.is_sender = is_sender
        sizes = [part.nbytes for part in parts]
        self.buffer = torch.zeros(sum(sizes), dtype=torch.uint8)
        self.packed = []
        for room, part in zip(self.buffer.split(sizes), parts, strict=True):
            self.packed.append(room.view(part.dtype).view(part.shape))

    def copy(self) -> None:
        """Packs the parcel at the sender, unpacks it at the receiver. It may run in a thread."""
        for packed, part in zip(self.packed, self.parts, strict=True):
            if self.is_sender:
                packed.copy_(part)
            else:
                part.copy_(packed)


async def receive(parcels: list[Parcel], handles: list[list[RDMABuffer]]) -> None:
    """Reads parcels one after the other, and unpacks each in a thread while it reads the next.

    handles: of each parcel of the senders, what `pieces_of` made of its buffer.
    """
    unpacking = []
    for parcel, handle in zip(parcels, handles, strict=True):
        await read_pieces(handle, parcel.buffer.split(PIECE_BYTES))
        unpacking.append(asyncio.get_running_loop().run_in_executor(None, parcel.copy))
    await asyncio.gather(*unpacking)


# -- measurement -----------------------------------------------------------------------------------


# A trainer of two ranks and a generator of two ranks, in two processes that have one of each. On
# five roads, of three kinds, versions go from one to the other, seven on each; then all elements of
# the last one are compared.
#
# The sizes are odd on purpose: 1025 columns on two ranks are 513 and 512, and the numbers of rows
# differ from matrix to matrix. The columns "sent" and "written" count bytes, over those that the
# generator needs: a gather sends everything twice, parcels send it once, and through slots nothing
# is sent, because each rank writes what it has, and reads what it needs, in memory that both share.


@dataclass(frozen=True)
class ReshardRoad:
    """How a version travels from a trainer of two ranks to a generator of two ranks."""

    kind: str  # "gather", "parcels", "slots"
    source: str  # how the trainer is cut: "rows" or "columns"
    target: str  # how the generator is cut


@dataclass(frozen=True)
class Lap:
    """What one rank says of a round."""

    memmove_s: float  # the yardstick: one copy of as many bytes, right before, under the same load
    start_s: float  # by the monotonic clock
    end_s: float
    sent_bytes: int  # to this rank on the way


class Cutter(Worker):
    """One rank of a trainer and one rank of a generator, as where both share GPUs.

    The trainer has every matrix twice, cut by rows and cut by columns, and so has the generator.
    One arena serves both, because a manifest knows the whole tensors, and not how they are cut. An
    element of version v is its index modulo 120, plus v, so that a stale one shows, and one that is
    in the wrong place. What a process has in its two roles:

        as trainer rank     trainer["rows"], trainer["columns"], writer; sending[r]: its parcel for
                            generator rank r
        as generator rank   generator[...], reader; reading[r]: its parcel from trainer rank r, and
                            handles_to_me[r]: where that rank has packed it
    """

    version = 0

    @endpoint
    async def join(self, meeting_place: str, shapes: dict[str, Index]) -> None:
        """Makes the tensors of these shapes, the arena, and the parcels."""
        form_group(meeting_place, self.rank, 2)
        self.mesh = device_mesh.init_device_mesh("cpu", (2,))
        cuts = {"rows": dtensor.Shard(0), "columns": dtensor.Shard(1)}
        # The tensors of both, by how they are cut, and then by name.
        self.trainer: dict[str, dict[str, torch.Tensor]] = {}
        self.generator: dict[str, dict[str, torch.Tensor]] = {}
        for by, cut in cuts.items():
            self.trainer[by] = self._make(shapes, cut)
            self.generator[by] = self._make(shapes, cut)
        self.writer = ShardWriter.join(self.trainer["rows"], 2, self.rank, 2)
        handle = self.writer.arena.handle
        self.reader = ShardReader(handle, self.rank, self.generator["rows"])
        self._make_parcels(shapes, cuts["rows"], cuts["columns"])

    def _make(self, shapes: dict[str, Index], cut: dtensor.Shard) -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for name, shape in shapes.items():
            values = (torch.arange(math.prod(shape)) % 120).bfloat16().view(shape)
            tensors[name] = dtensor.distribute_tensor(values, self.mesh, [cut])
        return tensors

    def _make_parcels(
        self, shapes: dict[str, Index], by_rows: dtensor.Shard, by_columns: dtensor.Shard
    ) -> None:
        """From by rows to by columns: a parcel to send to each rank, one to receive from each."""
        moves: list[Move] = []
        sent: collections.Counter[int] = collections.Counter()
        for name, shape in shapes.items():
            source = layout(shape, (2,), (by_rows,))
            target = layout(shape, (2,), (by_columns,))
            moves += plan(name, source, target, sent)
        have = self.trainer["rows"]
        want = self.generator["columns"]
        self.sending = []
        self.reading = []
        for other in (0, 1):
            self.sending.append(Parcel(moves, have, self.rank, other, is_sender=True))
            self.reading.append(Parcel(moves, want, other, self.rank, is_sender=False))
        # Each rank tells the others where they can read what it has for them.
        my_handles = [pieces_of(parcel.buffer) for parcel in self.sending]
        handles: list[Any] = [None, None]  # [source][target]
        torch.distributed.all_gather_object(handles, my_handles)
        self.handles_to_me = [of_source[self.rank] for of_source in handles]

    @endpoint
    async def travel(self, road: ReshardRoad) -> Lap:
        """The trainer makes its next version, which then travels to the generator."""
        self.version += 1
        for tensors in self.trainer.values():
            for tensor in tensors.values():
                local(tensor).add_(1)
        # The yardstick copies the last slot into the one before it, 3 into 2. These two of the four
        # are never in use here. The writer takes the lowest slot that is neither the latest nor
        # leased, and before the next version is made both readers have pulled the latest, so they
        # lease no other. So the writer takes slot 0, then 1, then 0 again, and so on.
        *_, target, source = self.writer.arena.slots
        start = time.monotonic()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        memmove_s = since(start)

        torch.distributed.barrier()  # the starting line
        start = time.monotonic()
        have = self.trainer[road.source]
        want = self.generator[road.target]
        sent_bytes = 0
        if road.kind == "gather":
            sent_bytes = self._gather(have, want, road.target)
        elif road.kind == "parcels":
            sent_bytes = await self._parcels()
        else:
            self._slots(have, want)
        end = time.monotonic()
        return Lap(
            memmove_s=memmove_s,
            start_s=start,
            end_s=end,
            sent_bytes=sent_bytes,
        )

    def _gather(
        self, have: dict[str, torch.Tensor], want: dict[str, torch.Tensor], target: str
    ) -> int:
        """The usual way: the trainer's ranks tell each other everything, cut that, and pass it on.

        Returns the bytes that were sent. Passing on is counted, but takes no time here, because
        trainer and generator are one process.
        """
        dim = 0 if target == "rows" else 1
        sent_bytes = 0
        for name, there in have.items():
            assert isinstance(there, dtensor.DTensor)
            whole = there.full_tensor()
            here = local(want[name])
            here.copy_(whole.chunk(2, dim)[self.rank])
            from_other_ranks = whole.nbytes - local(there).nbytes
            sent_bytes += from_other_ranks + here.nbytes
        return sent_bytes

    async def _parcels(self) -> int:
        """Returns the bytes that were sent. To be called before `_slots`, never after it.

        `_slots` points the generator's tensors at a slot. The parcels hold views of the memory that
        they had before.
        """
        for parcel in self.sending:
            parcel.copy()
        torch.distributed.barrier()
        await receive(self.reading, self.handles_to_me)
        return sum(parcel.buffer.nbytes for parcel in self.reading)

    def _slots(self, have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
        self.writer.wait()
        self.writer.switch_to(have)
        self.reader.switch_to(want)
        self.writer.publish(self.version)
        while self.reader.pull() < self.version:
            time.sleep(0.0005)

    @endpoint
    async def written_bytes(self) -> int:
        """Bytes that this rank has written into slots so far."""
        return self.writer.copied_bytes

    @endpoint
    async def num_wrong(self, by: str) -> int:
        """How many tensors of the generator differ from those of a trainer that is cut alike."""
        num_wrong = 0
        for name, tensor in self.generator[by].items():
            num_wrong += not torch.equal(local(tensor), local(self.trainer[by][name]))
        return num_wrong


@dataclass(frozen=True)
class ReshardRow:
    """What a road costs."""

    trainer_to_generator: str  # how each side is cut, and the road
    # Median of the rounds, until both generator ranks have the version.
    ms: float
    # Those ms, over the ms of a memmove of as many bytes.
    x_memmove: float
    # Bytes that ranks sent each other, and bytes that they wrote into slots, over those of a model.
    sent_over_needed: float
    written_over_needed: float
    # Tensors of 16 that are not what they should be: 8 at each of both generator ranks.
    wrong: int


async def reshard_row(ranks: Cutter, road: ReshardRoad, needed_bytes: int) -> ReshardRow:
    """Measures a road, seven rounds of it; times are medians."""
    took_s = []
    memmove_s = []
    sent_bytes = 0
    before = sum((await ranks.written_bytes.call()).values())
    for _ in range(7):
        laps = list((await ranks.travel.call(road)).values())  # of both ranks
        first_beginning = min(lap.start_s for lap in laps)
        last_end = max(lap.end_s for lap in laps)
        took_s.append(last_end - first_beginning)
        memmove_s.append(laps[0].memmove_s)
        sent_bytes += sum(lap.sent_bytes for lap in laps)
    written_bytes = sum((await ranks.written_bytes.call()).values()) - before
    all_needed_bytes = needed_bytes * len(took_s)
    return ReshardRow(
        trainer_to_generator=f"{road.source} to {road.target}, {road.kind}",
        ms=statistics.median(took_s) * 1e3,
        x_memmove=statistics.median(took_s) / statistics.median(memmove_s),
        sent_over_needed=sent_bytes / all_needed_bytes,
        written_over_needed=written_bytes / all_needed_bytes,
        wrong=sum((await ranks.num_wrong.call(road.target)).values()),
    )


RESHARD_ROADS = [
    ReshardRoad(kind="gather", source="rows", target="columns"),
    ReshardRoad(kind="parcels", source="rows", target="columns"),
    ReshardRoad(kind="slots", source="rows", target="columns"),
    ReshardRoad(kind="slots", source="columns", target="rows"),
    ReshardRoad(kind="slots", source="rows", target="rows"),
]


@stage(
    "from sharding A to sharding B every needed byte is written once",
    hint="round down, `len(part) // num_ranks`: a plan (8c) finds a column that nobody has",
    mechanism="uneven shards",
)
async def demo_reshard(report: Report, cfg: Config) -> None:
    """Sends versions from one way to cut to another on five roads, and counts bytes."""
    num_rows = cfg.model_mb * MIB // (8 * 2 * 1025)  # 8 matrices of 1,025 columns of 2 bytes
    shapes = {f"layer.{i}": (num_rows + i, 1025) for i in range(8)}
    needed_bytes = sum(2 * math.prod(shape) for shape in shapes.values())
    report.say("a trainer and a generator of two ranks each (at 64 MiB about 10 s)")
    procs = this_host().spawn_procs(per_host={"rank": 2})
    report.at_end(procs.stop)
    ranks = procs.spawn("cutter", Cutter, Place(service="cutter", replica_id=0))
    meeting_place = unnamed_file("meeting place")
    await ranks.join.call(meeting_place, shapes)
    rows = []
    for road in RESHARD_ROADS:
        report.doing(f"{road.source} to {road.target}, {road.kind}")
        rows.append(await reshard_row(ranks, road, needed_bytes))
    close_unnamed_file(meeting_place)
    report.table(rows)
    # "same" is the road of section 7, on which both sides are cut alike: what does another cost?
    gather, parcels, there, back, same = rows
    slower = max(there.x_memmove, back.x_memmove)
    report.figure(
        reshard_over_same=slower / same.x_memmove,
        reshard_over_memmove=slower,
        gather_over_reshard=gather.ms / there.ms,
        moved_over_needed=parcels.sent_over_needed,
    )
    report.check("tensors of 80 that are wrong", sum(row.wrong for row in rows), "==", 0)
    written = [row.written_over_needed for row in (there, back, same)]
    report.check("bytes written to a slot / needed", written, "==", [1.0, 1.0, 1.0])
    report.check("bytes that parcels sent / needed", parcels.sent_over_needed, "==", 1.0)
    report.check("bytes that a gather sent / needed", gather.sent_over_needed, ">", 1.0)
    # You can now cut trainer and generators as each likes best, and still copy weights once.


# == 9. ROLLOUT ====================================================================================
# Problem. In RL the policy makes its own training set, so the same network runs in two programs.
#   The generator samples token by token; it keeps what attention has computed for earlier tokens
#   (their keys and values) in a cache. The trainer scores whole conversations at once, for a
#   gradient. If the two disagree about what was sampled, or how likely it was, the gradient is that
#   of samples that nobody drew. No error says so.
# Rule. Record while sampling, and reconstruct nothing afterwards. Of each token:
#     the ids      a new turn starts from the exact ids of the turns before; text is for people
#     the version  of the weights that chose each token
#     the log-probability of each token, in fp32, under the distribution that it was drawn from
#   And throw the cache away when new weights come: it was computed by the old ones.
# Cost. Four numbers per token beside its id: version, log-probability, turn, and whether this place
#   of the table has a token at all, for its rows, the conversations, differ in length. A new cache
#   costs one pass over what was said so far.
# Not here. Memory for keys and values in pages, so that a short row of the cache takes less room
#   than a long one (vLLM, SGLang).
# Source. Mistakes of public RL code, collected in DOCS 5. The demo measures disagreement as k3, an
#   estimate of the KL divergence, which tells how far apart two distributions are (Schulman 2020).

# -- 9a. Tasks and prompts -------------------------------------------------------------------------
# A task draws conversations, plays the user, and says how good the answers were. Those that are
# built in (TASKS, below) are small enough to be learned in a minute, and need what real ones need:
# several turns, a reward per turn, prompts that are never trained on.


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation, as a task draws it."""

    user: str  # what the user says, such as "abc"
    right: str  # what would be the right answer


@dataclass(frozen=True)
class Prompt:
    """A conversation to be had, once or several times."""

    id: int  # also the group id of its episodes; below 0 if it is never trained on
    turns: tuple[Turn, ...]


class Task:
    """What is to be learned.

    For a task of your own, write a subclass into a file and say --task FILE.py:CLASS; or write
    prompts and answers into a file, and say --task FILE.jsonl (DOCS 7). A subclass must have
    `conversation` alone. Most have `score`, too, because that of Task compares letters; and `user`,
    if what the user says depends on the answers. The other methods are for special cases, which
    their docstrings name. The main process calls `numbered` and `set_aside`, which call
    `conversation`; a generator `open`, whose Session calls `user`; a judge (section 11) `rewards`,
    which calls `score`. In its warm start (11a) a trainer calls all of them.
    """

    system = ""  # the system's message, which comes first; "": that of the chat template, if any
    instruction = ""  # for pretrained models; the tiny policy learns from examples what to do
    letters = "abcdefghijklmnop"  # a token each: all that the tiny policy can hear and say
    num_turns = 2
    max_new_tokens = 4  # sampled in a turn, its end included
    # The tiny policy has a token for each letter. A pretrained tokenizer may need as many as this
    # for one letter, so with such a policy max_new_tokens is multiplied by it.
    tokens_per_letter = 3

    def conversation(self, rng: random.Random) -> tuple[Turn, ...]:
        """Draws a conversation of num_turns. With an rng in the same state it is the same one."""
        raise NotImplementedError

    def numbered(self, number: int, seed: int) -> tuple[Turn, ...]:
        """The conversation of this number. The same number and seed always give the same one."""
        return self.conversation(random.Random(f"{seed} {number}"))

    def set_aside(self) -> list[tuple[Turn, ...]]:
        """Different conversations that are never trained on, 512 at most; the same for all seeds.

        512 are two sets of 256, as Sampler divides them: a share of right answers among so many is
        sure to a few hundredths. A small task has few different conversations, of which something
        must be left to train on: at most half of those that 2,000 draws find are set aside.
        """
        rng = random.Random("held out")
        drawn = [self.conversation(rng) for _ in range(2000)]
        different = list(dict.fromkeys(drawn))  # each once, in the order of their first appearance
        return different[: min(512, len(different) // 2)]

    def open(self, turns: tuple[Turn, ...]) -> Session:
        """Begins an episode. A task that keeps something between turns returns its own Session."""
        return Session(self, turns)

    def user(self, turns: tuple[Turn, ...], said: list[str]) -> str | None:
        """What the user says after these answers. It may depend on them; None: the user leaves."""
        return turns[len(said)].user

    def rewards(
        self,
        turns: tuple[Turn, ...],
        said: list[str],
        is_truncated: list[bool],
    ) -> list[float]:
        """The rewards, as judges ask for them: those of `score`, which may be a coroutine.

        is_truncated: of each of num_turns, whether its answer was stopped at max_new_tokens; False
        for a turn that was not had. A task that minds overrides this method instead of `score`.
        """
        return self.score(turns, said)

    def score(self, turns: tuple[Turn, ...], said: list[str]) -> list[float]:
        """A reward for each of num_turns; only if all is right do they add up to 1.

        If this raises, or returns something else than such a list, the episode counts as not
        judged, which is not the same as a reward of 0. It may be a coroutine (`async def`), if it
        waits for somebody else. Here a reward is the share of letters that are right, for each turn
        an equal part of 1.
        """
        rewards = []
        for number, turn in enumerate(turns):
            text = said[number] if number < len(said) else ""  # a conversation may have ended early
            pairs = zip(text, turn.right, strict=False)
            num_right = sum(letter == right for letter, right in pairs)
            length = max(len(text), len(turn.right), 1)
            rewards.append(num_right / length / self.num_turns)
        return rewards


class Session:
    """One episode of a task, in the generator that has it: from its begin until it is closed.

    This one keeps nothing, so what its user says follows from what was said. An environment that
    has a state, such as a game or a machine on which commands are run, is opened in the constructor
    of a subclass. However the request ends, `close` is called once; only a killed process calls
    nothing. By example, a game of chess of 3 turns, with 1/3 for each legal move:

        task.open(turns)              a session begins, one for each episode of a request
        session.user([])              -> "e4?"            what the policy hears first, of 3 turns
        session.user(["e5"])          -> "Nf3?"           what it hears after its first answer
        session.user(["e5", "x"])     -> None             over: the policy made no legal move
        session.rewards(["e5", "x"], [False, False, False])
                                      -> [1/3, 0.0, 0.0]  one per turn, had or not; or None: a judge
                                                          is to say
        session.close()
    """

    def __init__(self, task: Task, turns: tuple[Turn, ...]) -> None:
        self.task = task
        self.turns = turns

    def user(self, said: list[str]) -> str | None:
        """What the user says after these answers. After a None it is not asked again."""
        return self.task.user(self.turns, said)

    def rewards(self, said: list[str], is_truncated: list[bool]) -> list[float] | None:
        """The rewards of the turns, at the end, if the environment knows them.

        None: a judge is to say, from what was said alone.
        """
        return None

    def close(self) -> None:
        """The episode is over, or the request for it has failed."""


class Shift(Task):
    """The answer to a letter is the letters that lie so many places on, in a ring of sixteen.

    places_on [0] repeats what the user says; [1, 2, 3] makes "bcd" of "a", and "abc" of "p".
    """

    def __init__(
        self,
        instruction: str,
        places_on: list[int],
        num_turns: int = 2,
    ) -> None:
        self.instruction = instruction
        self.places_on = places_on
        self.num_turns = num_turns

    def conversation(self, rng: random.Random) -> tuple[Turn, ...]:
        """Random letters, with the answers that the rule makes of them."""
        num_letters = 3 // len(self.places_on)  # of the user, so that answers have three
        turns = []
        for _ in range(self.num_turns):
            text = "".join(rng.choices(self.letters, k=num_letters))
            right = "".join(self._answer_to(letter) for letter in text)
            turns.append(Turn(user=text, right=right))
        return tuple(turns)

    def _answer_to(self, letter: str) -> str:
        at = self.letters.index(letter)
        answer = ""
        for places in self.places_on:
            answer += self.letters[(at + places) % len(self.letters)]
        return answer

    def rewards(
        self,
        turns: tuple[Turn, ...],
        said: list[str],
        is_truncated: list[bool],
    ) -> list[float]:
        """As in Task. An answer of n letters without an end earns n / (n + 1) of that.

        That is as if its end were one more letter, and wrong. Without it an answer that
        --max-new-tokens has cut off just behind its last right letter would be all right, though
        the policy has not learned to end it.
        """
        rewards = self.score(turns, said)
        for number, text in enumerate(said):
            if is_truncated[number]:
                rewards[number] *= len(text) / (len(text) + 1)
        return rewards


TASKS: dict[str, Task] = {  # section 14 adds `users`, whose users grade the answers themselves
    "repeat": Shift("Repeat exactly what I say.", [0]),
    "count": Shift("I say a letter, a to p; say the next three (a follows p).", [1, 2, 3], 3),
    "pattern": Shift("For each letter, a to p, say the one 8 places on (a follows p).", [8]),
    "echo": Shift("Repeat exactly what I say.", [0], 1),  # `repeat`, in a single turn
}


def task_of(name: str) -> Task:
    """The task of this name: a built-in one, FILE.jsonl, or FILE.py:CLASS."""
    # FileTask, task_errors and class_in_file stand below, under `plumbing`.
    if name.endswith(".jsonl"):
        return FileTask(name)
    path, _, class_name = name.rpartition(":")
    if not path:
        return TASKS[name]
    with task_errors():
        return class_in_file(path, class_name)()


class Sampler:
    """Draws prompts by their number: the same one for the same number and seed, in any process.

    So which prompts come next is one number, which a checkpoint can hold.

    Up to 512 conversations are set aside and never trained on, the same for all seeds. Half of them
    are `heldout`, for the figures that are reported, the other half `validation`, which decides
    when a warm start (section 11) ends.
    """

    def __init__(self, task_name: str, seed: int) -> None:
        self.task = task_of(task_name)
        self.seed = seed
        with task_errors():
            kept = self.task.set_aside()
            self.set_aside = set(kept)
        prompts = []
        for i, turns in enumerate(kept):
            prompts.append(Prompt(id=-1 - i, turns=turns))
        self.heldout = prompts[::2]
        self.validation = prompts[1::2]

    def prompt(self, number: int) -> Prompt | None:
        """The prompt of this number. None: its conversation is one of those that are set aside."""
        with task_errors():
            turns = self.task.numbered(number, self.seed)
        if turns in self.set_aside:
            return None
        return Prompt(id=number, turns=turns)

    def stream(self) -> Iterator[Prompt]:
        """The prompts of the numbers 0, 1, 2, ... that are not set aside. It never ends."""
        for number in itertools.count():
            prompt = self.prompt(number)
            if prompt is not None:
                yield prompt

    def first(self, num_prompts: int) -> list[Prompt]:
        """The first so many of them."""
        return list(itertools.islice(self.stream(), num_prompts))


# -- plumbing: a class in somebody's file, and errors in it ----------------------------------------
# (You can skip this part and the next one: the section goes on with 9b.)
#
# The methods of a task are somebody else's code, and run in several processes. When one raises, its
# author wants to see the line, wherever it was; and nobody wants to see it once per episode.
#
#     raised in                     by                   what follows
#     importing, __init__           the main process     one line, exit status 2, before all else
#     set_aside, numbered           the main process     at the start the same; later the stage ends
#     open, user, Session           a generator          the request raises; a stage ends, or, if
#                                                        asynchronous, groups are lost
#     rewards, score                a judge              the episode is not judged; the run goes on
#
# The exception itself stays where it was raised: its class may be one that cannot travel between
# processes, or that only the task's file knows. What travels is a text with the lines to look at.


class TaskError(RuntimeError):
    """Somebody's task has raised.

    Its text is all that it has: what was raised, and a line for each place in files of the task. So
    it travels from any process to the main process, which need not know the exception's class.
    """


@contextlib.contextmanager
def task_errors() -> Iterator[None]:
    """What a task raises in the body of the `with` becomes a TaskError."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise TaskError(told_of(error)) from error


def told_of(error: BaseException) -> str:
    """What was raised, and where: at most seven lines.

        ValueError: no number in "abc"
          /home/me/sums.py:12, in score: return [value(said[0])]
          /home/me/numbers.py:5, in value: raise ValueError(...)

    Left out are this file and what is installed: of a traceback of forty lines, mostly those in
    which somebody can mend something are left.
    """
    if isinstance(error, TaskError):
        return str(error)
    message = " ".join(str(error).split())
    lines = [f"{type(error).__name__}: {message[:300]}"]
    if isinstance(error, SyntaxError):  # found before any of it ran
        lines.append(f"{error.filename}:{error.lineno}: {(error.text or '').strip()[:100]}")
        return "\n  ".join(lines)
    folders = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    installed = (*folders, "<", __file__)  # "<frozen importlib>" and such begin with "<"
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith(installed):
            place = f"{frame.filename}:{frame.lineno}, in {frame.name}"
            lines.append(f"{place}: {(frame.line or '')[:100]}")
    return "\n  ".join(lines[:1] + lines[1:][-6:])


def place_of(told: str) -> str:
    """What is alike in two errors of one mistake: the exception's name, and where it was raised.

    What it says may differ from episode to episode: it often quotes what was said.
    """
    what, _, places = told.partition("\n")
    name, _, _ = what.partition(":")
    return f"{name}\n{places}"


Tell = Callable[..., None]  # is given lines, each of them a text, and shows them to somebody


def tell_nobody(*lines: str) -> None:
    """Where nobody listens."""


class TellOnce:
    """Tells errors. There may be one per episode, so each different TaskError is told once."""

    def __init__(self, tell: Tell) -> None:
        self.tell = tell
        self.told: set[str] = set()  # place_of each TaskError

    def say(self, before: str, error: Exception) -> None:
        """before: what to say before the error, in the same line."""
        place = place_of(str(error))
        if place in self.told:
            return
        if isinstance(error, TaskError):
            self.told.add(place)
        self.tell(*f"{before}{error}".splitlines())


def class_in_file(path: str, name: str) -> type[Task]:
    """The class of this name. Its file may import others of its folder.

    It becomes a module like any other, so that dataclasses and pickle find its classes; and its
    folder is the last in which Python looks, so that nothing there hides an installed module: a
    file called `queue.py` must not be what torch gets when it imports its queue.
    """
    file = pathlib.Path(path).resolve()
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module_name = f"task_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    found = getattr(module, name, None)
    if not isinstance(found, type) or not issubclass(found, Task):
        raise TypeError(f"{path} has no class {name} that is a Task")
    return found


# -- plumbing: a task in a file of prompts and answers ---------------------------------------------
# (The section goes on with 9b.) A line of such a file, in the manner of GSM8K (here on two lines):
#
#     {"prompt": "Tom has 3 apples and buys 4. How many has he?",
#      "answer": "He has 3 + 4 = 7 apples. #### 7"}
#
# A prompt is on one of two sides: trained on, or held out. It is held out if its hash, a number
# from 0 to 1, is below 0.1. That is about a tenth of the prompts, and of a small file at least the
# two with the lowest hashes. A hash follows from the prompt alone: a prompt stays on its side for
# all seeds, on every machine, and mostly also when lines are added, and a prompt that stands there
# twice is on one side. A large file has more held-out prompts than are needed: 512 are used, which
# `set_aside` returns and Sampler halves, and the others are neither trained on nor tested with.
#
#     prompt              hash, as a share     side
#     "Tom has 3 ..."     0.41                 trained on
#     "How far is ..."    0.07                 held out, because it is below 0.1
#     "Tom has 3 ..."     0.41                 trained on, as above
#
# What is left is trained on in epochs. With 180 lines number 0 to 179 are the first epoch, 180 to
# 359 the second. Each epoch has an order of its own, in which every line comes once. The order
# follows from seed and epoch, so a number names the same line in every process, and a run that goes
# on from a checkpoint needs no more than the next number to go on in the middle of an epoch.

MIN_HELD_OUT = 2  # prompts, also of a small file: one of `heldout`, and one of `validation`
# A number as people write it: -3, 1,234.50, .5, 6e23, $12. (In a verbose pattern blanks mean
# nothing, and # begins a comment.)
NUMBER = re.compile(
    r"""
    (?P<sign> (?<!\w)[-\u2212])?  [$€£]?   # behind a letter or a digit it would be a dash
    (?P<digits>
        (?<![\w^])                         # behind a letter: part of a name; behind ^: an exponent
        (?: \d{1,3}(?:,\d{3})+(?!\d)       # 1,234,567
          | \d+ )                          # 1234567
        (?:\.\d+)?                         # and .50 behind either
      | (?<![\w.])\.\d+                    # .5 alone
    )
    (?P<exponent> [eE][-+]?\d{1,3}(?!\w) )?
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Line:
    """A line of the file, read."""

    system: str  # "" if it has no message of the system's
    prompt: str
    answer: str


def hash_share(prompt: str) -> float:
    """From 0 to 1, the same for the same prompt in every process: by SHA-256."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


class FileTask(Task):
    """The prompts of a file, with an answer each: one turn, and a reward of 1 or 0.

    Training prompts come in a shuffled order, another one in each epoch. In an epoch each line
    comes once.
    """

    num_turns = 1
    max_new_tokens = 256
    tokens_per_letter = 1  # max_new_tokens counts tokens here, of any tokenizer

    def __init__(self, path: str) -> None:
        """Reads it all. ValueError: names the first line that cannot be used."""
        lines = lines_of(path)
        self.system = lines[0].system if lines else ""
        # The prompts, each once, by their hashes. Taking the first of them instead of all below 0.1
        # would move prompts from one side to the other whenever the file grows.
        shares = {line.prompt: hash_share(line.prompt) for line in lines}
        by_share = sorted(shares, key=lambda prompt: shares[prompt])
        num_in_tenth = sum(share < 0.1 for share in shares.values())
        held_out = set(by_share[: max(MIN_HELD_OUT, num_in_tenth)])
        if len(by_share) <= len(held_out):
            raise ValueError(
                f"{len(by_share)} different prompts, at least {MIN_HELD_OUT + 1} needed"
            )
        self.training = [line for line in lines if line.prompt not in held_out]
        by_prompt = {line.prompt: line for line in lines}  # of equal prompts the last
        self.held_out = [by_prompt[prompt] for prompt in by_share if prompt in held_out]

    def numbered(self, number: int, seed: int) -> tuple[Turn, ...]:
        """A line of the training prompts."""
        epoch, place = divmod(number, len(self.training))
        order = shuffled(len(self.training), f"{seed} {epoch}")
        return self._turns(self.training[order[place]])

    def set_aside(self) -> list[tuple[Turn, ...]]:
        """The 512 with the lowest hashes of those held out, or all if there are fewer."""
        return [self._turns(line) for line in self.held_out[:512]]

    def _turns(self, line: Line) -> tuple[Turn, ...]:
        return (Turn(user=line.prompt, right=line.answer),)

    def score(self, turns: tuple[Turn, ...], said: list[str]) -> list[float]:
        """1 if the answer is found in what was said."""
        text = said[0] if said else ""  # the prompt may not have fitted into the context
        return [float(is_answer(text, turns[0].right))]


@functools.lru_cache(maxsize=4)
def shuffled(num: int, seed: str) -> list[int]:
    """The numbers below num in an order that follows from the seed.

    The last orders are kept, or each prompt of an epoch would shuffle all of it again. There are
    several because prompts of an earlier epoch may be drawn again after a loss (section 12).
    """
    order = list(range(num))
    random.Random(seed).shuffle(order)
    return order


Read = TypeVar("Read")


def read_lines(path: str, read_one: Callable[[str], Read]) -> list[Read]:
    """All lines of a file but empty ones. ValueError: names the first that cannot be used."""
    found = []
    for number, content in enumerate(pathlib.Path(path).read_bytes().splitlines(), 1):
        try:
            text = content.decode("utf-8-sig").strip()
            if text:
                found.append(read_one(text))
        except (ValueError, RecursionError) as error:  # JSONDecodeError is a ValueError
            raise ValueError(f"line {number}: {error}") from error
    return found


def lines_of(path: str) -> list[Line]:
    """All lines of a task in a file. ValueError: names the first that cannot be used."""
    systems: list[str] = []  # of the lines that have been read

    def read_like_the_first(text: str) -> Line:
        line = read_line(text)
        systems.append(line.system)  # so the first line is compared with itself
        if line.system != systems[0]:
            raise ValueError("another system message than in the lines before")
        return line

    return read_lines(path, read_like_the_first)


def read_line(text: str) -> Line:
    """A line of a file. ValueError: says what it lacks."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    # Numbers come as they are written: 1.50 is the answer "1.50".
    found = json.loads(text, parse_int=str, parse_float=str, parse_constant=refuse)
    if not isinstance(found, dict):
        raise ValueError('not of the form {"prompt": ..., "answer": ...}')
    for name in ("prompt", "answer"):
        if name not in found:
            raise ValueError(f"no {name!r}")
    system = ""
    prompt = found["prompt"]
    if isinstance(prompt, list):
        system, prompt = read_messages(prompt)
    for name, value in (("prompt", prompt), ("answer", found["answer"])):
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"{name!r} is neither text nor a number")
        value.encode()  # half a character, which JSON can have, raises a ValueError
    return Line(system=system, prompt=prompt, answer=found["answer"])


def read_messages(messages: list[Any]) -> tuple[str, Any]:
    """(system message, prompt) of a prompt that is a list of chat messages."""
    try:
        roles = [message["role"] for message in messages]
        contents = [message["content"] for message in messages]
    except (TypeError, KeyError):
        raise ValueError('a message has not the form {"role": ..., "content": ...}') from None
    if roles == ["user"]:
        contents.insert(0, "")
    elif roles != ["system", "user"]:
        raise ValueError(
            f"messages of {roles}; there may be one of the system's, and then one user's"
        )
    system, prompt = contents
    if not isinstance(system, str):
        raise ValueError("the system's message is no text")
    return system, prompt


def is_answer(text: str, answer: str) -> bool:
    """Is the answer found in a text, by the rules of DOCS 7?

    1. Of both only the marked part counts, if there is one, as marked_part finds it.
    2. If the answer is a number, the last number of the text must be equal to it.
    3. If not, both must be the same words, whatever their case.

    The answer "3 + 4 = 7 #### 7" is found in "He has 7." and in "#### 7.0 apples", and not in "7 of
    10", whose last number is 10. The answer "Paris" is found in "paris.", not in "Paris, France".
    """
    wanted = marked_part(answer)
    found = marked_part(text)
    number = NUMBER.match(wanted)
    # Behind the number there may be one word, its unit: "7 apples", "70%".
    if number is not None and re.fullmatch(r"\s*[^\s\d]*", wanted[number.end() :]):
        numbers = list(NUMBER.finditer(found))
        return bool(numbers) and value_of(numbers[-1]) == value_of(number)
    return words_of(found) == words_of(wanted)


def marked_part(text: str) -> str:
    """What LaTeX's last box holds; or else the line behind the last ####; or else all of it."""
    _, box, behind = text.rpartition("\\boxed{")
    if box:
        depth = 1
        for place, letter in enumerate(behind):
            depth += {"{": 1, "}": -1}.get(letter, 0)
            if depth == 0:
                return behind[:place].strip()
    _, mark, behind = text.rpartition("####")
    return behind.strip().partition("\n")[0] if mark else text.strip()


def value_of(number: re.Match[str]) -> decimal.Decimal:
    """The value of a number, exactly: 1.50 is 1.5, and 0.1 is no binary fraction."""
    digits = number["digits"].replace(",", "")
    sign = "-" if number["sign"] else ""
    return decimal.Decimal(f"{sign}{digits}{number['exponent'] or ''}")


def words_of(text: str) -> str:
    """A text without its case, its line breaks and a full stop at its end."""
    return " ".join(text.split()).casefold().removesuffix(".")


# -- 9b. What is recorded --------------------------------------------------------------------------
#
# Conversations are rows of a table with a column per token. Each begins in the first column, and
# shorter ones have holes behind their end. No row is tokenized again. Here are two of them. (<u>
# and <a> begin a turn of the user's and of the assistant's, <e> ends one; u is a letter of the
# user's; a to g were sampled; a dot is a hole.)
#
#     row 0   ids       <u> u u u <e> <a>  a b c <e>  <u> u u u <e> <a>  d e f <e>
#             turn_ids   0  0 0 0  0   0   1 1 1  1    0  0 0 0  0   0   2 2 2  2
#     row 1   ids       <u> u u u <e> <a>  a <e>  <u> u u u <e> <a>  d e f  g   .  .
#             turn_ids   0  0 0 0  0   0   1  1    0  0 0 0  0   0   2 2 2  2   0  0
#
# An answer has at most four tokens here, so row 1 was stopped after g, without an <e>. After the
# last turn that stays so. After an earlier one an <e> follows that was not sampled, with turn_id 0:
# the chat template, the text that stands around what is said (9c), begins a later turn with it.


@dataclass(frozen=True)
class Tokens:
    """What stands in the conversations: [B, T] each, for B rows of T columns."""

    # int64: the number of the token in the vocabulary. In a hole it means nothing.
    ids: torch.Tensor
    # int64: 1 is a token, 0 a hole.
    mask: torch.Tensor
    # int64: in which turn, 1, 2, ..., the policy chose this token; 0: it did not.
    turn_ids: torch.Tensor
    # float32: the log-probability with which it was chosen. It means nothing where turn_ids is 0.
    logprobs: torch.Tensor
    # int64: the version of the weights that chose it. It means nothing where turn_ids is 0.
    versions: torch.Tensor

    @staticmethod
    def combine(
        parts: Sequence[Tokens],
        how: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> Tokens:
        """Makes each of the five tensors from the same one of all parts."""
        return Tokens(
            ids=how([part.ids for part in parts]),
            mask=how([part.mask for part in parts]),
            turn_ids=how([part.turn_ids for part in parts]),
            logprobs=how([part.logprobs for part in parts]),
            versions=how([part.versions for part in parts]),
        )

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Tokens:
        """Changes each of the five tensors in the same way."""
        return Tokens(
            ids=change(self.ids),
            mask=change(self.mask),
            turn_ids=change(self.turn_ids),
            logprobs=change(self.logprobs),
            versions=change(self.versions),
        )

    @staticmethod
    def joined(parts: list[Tokens]) -> Tokens:
        """The rows of all parts. Where a part has fewer columns, holes are added on its right."""
        width = max(part.ids.shape[1] for part in parts)

        def widened(tensor: torch.Tensor) -> torch.Tensor:
            num_more = width - tensor.shape[1]
            return torch.nn.functional.pad(tensor, (0, num_more))

        return Tokens.combine([part.each(widened) for part in parts], torch.cat)

    def without_empty_columns(self) -> Tokens:
        """[B, longest row] each: the same rows, without columns that are nothing but holes.

        For the trainer, which needs no mask then: in a causal model no token looks at what follows
        it, so what stands behind the end of a row changes nothing in it.
        """
        longest = max(self.mask.sum(1).tolist(), default=0)
        return self.each(lambda tensor: tensor[:, :longest])

    def is_sampled(self) -> torch.Tensor:
        """[B, T] bool: the tokens that the policy chose. Nothing else ever carries loss."""
        return self.turn_ids > 0


@dataclass(frozen=True)
class Rollout:
    """Episodes, each of them a row. The rows of a group need not be neighbours."""

    tokens: Tokens
    # [B, turns] float32: the reward of each turn; nan: not judged, or not yet.
    rewards: torch.Tensor
    # [B] int64: equal numbers belong to one group, which has one prompt.
    group_ids: torch.Tensor
    # [B] bool: the conversation did not fit into the model's context, and carries no loss.
    is_cut: torch.Tensor
    # [B, turns] bool: the answer of this turn was stopped, by max_new_tokens, before it had an end.
    is_truncated: torch.Tensor
    # Of each row, the conversation that was to be had.
    prompts: list[Prompt]
    # Of each row, what the policy said in each turn, as text: such as ["abc", "defg"].
    said: list[list[str]]

    def select(self, rows: list[int]) -> Rollout:
        """The episodes with these numbers."""
        return Rollout(
            tokens=self.tokens.each(lambda tensor: tensor[rows]),
            rewards=self.rewards[rows],
            group_ids=self.group_ids[rows],
            is_cut=self.is_cut[rows],
            is_truncated=self.is_truncated[rows],
            prompts=[self.prompts[row] for row in rows],
            said=[self.said[row] for row in rows],
        )

    @staticmethod
    def join(parts: list[Rollout]) -> Rollout:
        """The episodes of all parts."""
        return Rollout(
            tokens=Tokens.joined([part.tokens for part in parts]),
            rewards=torch.cat([part.rewards for part in parts]),
            group_ids=torch.cat([part.group_ids for part in parts]),
            is_cut=torch.cat([part.is_cut for part in parts]),
            is_truncated=torch.cat([part.is_truncated for part in parts]),
            prompts=[prompt for part in parts for prompt in part.prompts],
            said=[said for part in parts for said in part.said],
        )

    def judged(self) -> Rollout:
        """The episodes that could be judged."""
        is_judged = self.rewards.isfinite().all(1)  # [B]
        return self.select(is_judged.nonzero().flatten().tolist())

    def num_per_turn(self) -> torch.Tensor:
        """[B, turns] int64: how many tokens the policy chose in each turn."""
        turns = torch.arange(1, self.rewards.shape[1] + 1)
        is_of_turn = self.tokens.turn_ids[:, :, None] == turns  # [B, T, turns]
        return is_of_turn.sum(1)

    def sampled(self) -> torch.Tensor:
        """[B, T] bool: as Tokens.is_sampled."""
        return self.tokens.is_sampled()


# How it travels. A rollout has nine tensors, and in a message each of them would be pickled as a
# file of its own, again at every hop. Packed it is one string of bytes, which nobody on the way
# opens. (DOCS 10 has what a tensor in a message costs.)

Record = TypeVar("Record")


class TensorPickler(pickle.Pickler):
    """Pickles a tensor as its dtype, its shape and its bytes.

    Not for bf16, which numpy lacks, nor for what needs a gradient.
    """

    def reducer_override(self, value: Any) -> Any:
        """Pickle asks this of every object. NotImplemented: it shall do as it always does."""
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        content = value.contiguous().numpy().tobytes()
        return tensor_of_bytes, (value.dtype, tuple(value.shape), content)


def tensor_of_bytes(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> torch.Tensor:
    """The tensor again."""
    if not content:  # torch makes no tensor of no bytes
        return torch.empty(shape, dtype=dtype)
    # Of `content` itself, which nobody may change, torch would make a tensor with a warning.
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)


@dataclass(frozen=True)
class Packed(Generic[Record]):
    """A record with tensors of the CPU, as it travels."""

    content: bytes  # a pickle

    @staticmethod
    def of(record: Record) -> Packed[Record]:
        """Packs it."""
        content = io.BytesIO()
        TensorPickler(content, protocol=pickle.HIGHEST_PROTOCOL).dump(record)
        return Packed(content=content.getvalue())

    def unpacked(self) -> Record:
        """A new record, which is equal."""
        return pickle.loads(self.content)


# -- 9c. The policy --------------------------------------------------------------------------------
# Generators and the trainer both have one of these, built alike.


class Policy:
    """A causal language model, its tokenizer, and the chat template that makes ids of speech."""

    def __init__(
        self,
        cfg: Config,
        dtype: torch.dtype | None = None,
        is_empty: bool = False,
    ) -> None:
        """Builds it as the Config says.

        dtype: of the parameters; None: the one to compute in. is_empty: the model has all shapes
        and no content, on the device "meta", for who gets the content from somebody else.
        """
        torch.manual_seed(cfg.seed)
        self.cfg = cfg
        self.task = task_of(cfg.task)
        is_tiny = cfg.model == "tiny"
        dtype = dtype or dtype_of(cfg)
        self.tokenizer: Any
        self.model: Any
        with torch.device("meta") if is_empty else contextlib.nullcontext():
            if is_tiny:
                self.tokenizer, self.model = tiny_policy(self.task.letters)
            else:
                self.tokenizer, self.model = pretrained_policy(cfg.model, dtype, is_empty)
        set_dtype(self.model, dtype)
        if not is_empty:
            self.model.to(cfg.device)
        # In mode `eval`, also while it is trained: dropout would draw other masks in each program,
        # and they would disagree.
        self.model.eval()
        self.end_id: int = self.tokenizer.eos_token_id  # ends a turn
        self.tokenizer.pad_token = self.tokenizer.eos_token  # fills holes, which nobody looks at
        # A task counts letters as tokens; a pretrained tokenizer may need several for a letter.
        tokens_per_letter = 1 if is_tiny else self.task.tokens_per_letter
        of_task = self.task.max_new_tokens * tokens_per_letter
        self.max_new_tokens: int = cfg.max_new_tokens or of_task
        self.context: int = self.model.config.max_position_embeddings  # tokens
        has_instruction = self.task.instruction and not is_tiny
        self._read_template(f"{self.task.instruction}\n" if has_instruction else "")

    def _read_template(self, instruction: str) -> None:
        """Finds what the chat template puts around the user's words, in the first turn and later.

        With these texts each turn can be tokenized by itself. Templates expect a whole conversation
        as text instead, but ids that are made into text and tokenized again need not be the ids
        that were sampled.
        """
        # The template is rendered once, for a conversation in which everybody says SAID, and the
        # result is cut there. That of the tiny policy:
        #   <user> SAID <end><assistant> SAID <end><user> SAID <end><assistant>
        # So what comes before a later turn is "<end><user>". If the policy has sampled its <end>,
        # Episode.hear (9d) leaves that one out.
        roles = ["user", "assistant", "user"]
        chat = [{"role": role, "content": "SAID"} for role in roles]
        if self.task.system:
            chat.insert(0, {"role": "system", "content": self.task.system})
        whole = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        # `_` stands behind the first user's words, `after` behind the last user's. Of the two
        # `after` is used, because there the answer is still to come.
        before_first, _, before_later, after = whole.split("SAID")
        self.before_first = before_first + instruction
        self.before_later = before_later
        self.after = after

    def in_template(self, text: str, is_first_turn: bool) -> str:
        """The user's words with what the chat template puts around them."""
        before = self.before_first if is_first_turn else self.before_later
        return before + text + self.after

    def ids_of(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each of these texts.

        The episodes of a group often hear the same, so each text is tokenized once.
        """
        different = list(dict.fromkeys(texts))
        if not different:
            return []
        found = self.tokenizer(different, add_special_tokens=False)["input_ids"]
        ids_of_text = dict(zip(different, found, strict=True))
        return [ids_of_text[text] for text in texts]

    def text_of(self, ids: list[int]) -> str:
        """Sampled ids up to the end of the turn, or all if it has none, as text."""
        if self.end_id in ids:
            ids = ids[: ids.index(self.end_id)]
        return self.tokenizer.decode(ids).strip()


def dtype_name(cfg: Config) -> str:
    """The type of number that policies compute in: "float32" or "bfloat16".

    It is that of --dtype. If it is not given: on GPUs bf16 is several times as fast, on most CPUs
    it is not.
    """
    return cfg.dtype or ("float32" if cfg.device == "cpu" else "bfloat16")


def dtype_of(cfg: Config) -> torch.dtype:
    """The same, as torch has it."""
    return getattr(torch, dtype_name(cfg))


def set_dtype(model: Any, dtype: torch.dtype) -> None:
    """Gives all parameters this dtype, and all floating-point buffers fp32.

    Buffers are such things as the frequencies of rotary positions. Trainer and generator must have
    the same ones. A trainer has its model in fp32. To compute in bf16 it uses FSDP (section 11), on
    one rank too, for FSDP casts parameters before each pass, and leaves buffers in fp32. So a
    generator in bf16 leaves them so, too.
    """
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.float()


def pretrained_policy(name: str, dtype: torch.dtype, is_empty: bool) -> tuple[Any, Any]:
    """(tokenizer, model) of a folder or hub id. The other parameters are those of Policy."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    auto = transformers.AutoModelForCausalLM
    if not is_empty:
        return tokenizer, auto.from_pretrained(name, dtype=dtype)
    config = transformers.AutoConfig.from_pretrained(name)
    return tokenizer, auto.from_config(config, dtype=dtype)


def tiny_policy(letters: str, has_pairs: bool = False) -> tuple[Any, Any]:
    """(tokenizer, model): a policy with which everything here runs at laptop speed.

    The tokenizer has a token per letter and three special ones. The model has 30 thousand
    parameters and is of Qwen2's kind, with real attention and a real cache. has_pairs: there is
    also a token for each pair of letters, as tokenizers of real models have for frequent pairs.
    Only the measurement of this section asks for that: with a token per letter, text would give
    back the ids from which it was made, which real tokenizers do not promise.
    """
    tokens = ["<user>", "<assistant>", "<end>", *letters]
    merges: Any = list(itertools.product(letters, letters)) if has_pairs else []
    tokens += [first + second for first, second in merges]
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}<assistant>"
    tokenizer = transformers.Qwen2Tokenizer(
        {token: i for i, token in enumerate(tokens)},
        merges,
        extra_special_tokens=["<user>", "<assistant>"],
        unk_token="<end>",
        eos_token="<end>",
        chat_template=template,
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
    # "eager" is attention written out in PyTorch: for so small a model it is the fastest.
    auto = transformers.AutoModelForCausalLM
    return tokenizer, auto.from_config(config, attn_implementation="eager")


def score_tokens(
    model: Any,
    ids: torch.Tensor,
    chosen: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """The trainer's view: one forward pass over whole conversations.

    ids: [B, T] int64, best without empty columns; chosen: [B, T - 1] bool, true at N places.
    Returns [N, vocabulary] float32: at each of these places the log-probabilities of what comes
    next. In fp32 also for a model in bf16: the demo shows what a softmax in bf16 does to them.
    temperature: that with which the tokens were sampled. With another one these would be the
    probabilities of another policy.
    """
    # Logits are the largest tensors here. So they are computed for those columns alone in which a
    # row has a chosen place, which leaves out most of what users say.
    is_needed = chosen.any(0)  # [T - 1] bool
    columns = is_needed.nonzero().flatten()  # [C] int64: the numbers of these columns
    out = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=columns)
    chosen_of_them = chosen[:, columns]  # [B, C] bool, true at the same N places
    logits = out.logits[chosen_of_them]  # of [B, C, vocabulary]: [N, vocabulary]
    return (logits.float() / temperature).log_softmax(-1)


def trainer_logprobs(model: Any, tokens: Tokens, temperature: float = 1.0) -> torch.Tensor:
    """[N] float32: the trainer's log-probabilities of all sampled tokens, row by row."""
    chosen = tokens.is_sampled()[:, 1:]  # the token of column t is predicted in column t - 1
    every = score_tokens(model, tokens.ids, chosen, temperature)
    sampled_ids = tokens.ids[:, 1:][chosen]  # [N]
    return every.gather(1, sampled_ids[:, None]).squeeze(1)


def k3(recorded: torch.Tensor, recomputed: torch.Tensor) -> torch.Tensor:
    """[N] log-probabilities each -> [N] float64: exp(d) - 1 - d with d = recomputed - recorded.

    The tokens were drawn from p, whose log-probabilities are `recorded`; q has those `recomputed`.
    KL(p, q) is the mean of log p - log q over such tokens, that is, of -d. But -d has both signs,
    so of a few tokens its mean may be near 0 though p and q differ. Now exp(d) = q / p has the mean
    1: as tokens come with probability p, that mean is the sum of p * q / p = q over all tokens. So
    exp(d) - 1 has the mean 0, and may be added to -d: no mean changes. The sum is never negative,
    and 0 only where d is, so even a few tokens tell.
    By example, a token with p = 0.50 and q = 0.40 has d = -0.22, and 0.80 - 1 + 0.22 = 0.023.
    (Schulman 2020; there k1 is -d, and k2 is d**2 / 2.)
    """
    d = (recomputed - recorded).detach().double()
    return d.exp() - 1 - d


# -- 9d. Episodes ----------------------------------------------------------------------------------
# An episode is a conversation while it is had. Each has a session of its own, which plays its user.
# What a generator does with the prompts of a request:
#
#     with begin_episodes():     opens the sessions: connections to environments, say
#         while not all_over():
#             decoder.step()     gets each speaking episode on by a token (9e):
#                 user_says, hear    when it has a turn to hear
#                 say                when a token was sampled
#         rollout_of()           asks each session for rewards: most know none, a judge will say
#     the end of the `with`      closes all sessions, whatever has happened


class RandomNumbers:
    """Those of a request, at least 0 and below 1: one per episode and token to be sampled.

    So what an episode samples depends on no other episode, and not on when others come and go.
    """

    def __init__(self, num_episodes: int, seed: int) -> None:
        self.num_episodes = num_episodes
        self.rng = random.Random(seed)
        self.of_tokens: list[list[float]] = []  # a list per token, with an entry per episode

    def number_for(self, episode: int, token: int) -> float:
        """That of the episode with this number, for the token with this number."""
        while len(self.of_tokens) <= token:
            self.of_tokens.append([self.rng.random() for _ in range(self.num_episodes)])
        return self.of_tokens[token][episode]


class Episode:
    """A conversation while it is had: what was heard and said, and how each token came about."""

    def __init__(
        self,
        policy: Policy,
        prompt: Prompt,
        session: Session,
        number_for: Callable[[int], float] | None = None,
    ) -> None:
        """session: plays the user.

        number_for: the random number for a token; None: the likeliest token is taken.
        """
        self.policy = policy
        self.prompt = prompt
        self.session = session
        self.number_for = number_for
        # One entry per token: what they mean stands in Tokens.
        self.ids: list[int] = []
        self.turn_ids: list[int] = []  # those of an answer are added when it ends
        # One entry per token that was sampled.
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        # One entry per turn in which it spoke.
        self.said: list[str] = []
        self.is_truncated: list[bool] = []
        self.turn = 0  # the present one, from 1
        self.turn_start = 0  # tokens before its answer
        self.is_speaking = False  # its answer goes on
        self.is_over = False
        self.is_cut = False  # it is over because the next turn would not fit
        self.error: TaskError | None = None  # it is over because its session has raised this

    def user_says(self) -> str | None:
        """The user's next words, in the template. None: there are none, and it is over."""
        text = None  # it stays None if anything below raises
        try:
            with task_errors():
                words = self.session.user(self.said)
                if words is not None:
                    words.encode()  # what is no text raises here, and not for the whole batch
                    text = self.policy.in_template(words, is_first_turn=self.turn == 0)
        except TaskError as error:  # other episodes of the batch have nothing to do with it
            self.error = error
        self.is_over = text is None
        return text

    def hear(self, ids: list[int]) -> None:
        """Takes these words as tokens. If they leave no room for an answer, it is over."""
        self.turn += 1
        # Many templates begin a later turn of the user's with the token that ends the assistant's.
        # Who has sampled it does not hear it again.
        if self.ids and self.ids[-1] == ids[0] == self.policy.end_id:
            ids = ids[1:]
        self.turn_start = len(self.ids) + len(ids)
        if self.turn_start + self.policy.max_new_tokens > self.policy.context:
            self.is_cut = True
            self.is_over = True
            return
        self.ids += ids
        self.turn_ids += [0] * len(ids)
        self.is_speaking = True

    def next_number(self) -> float:
        """The random number for its next token."""
        return self.number_for(len(self.logprobs)) if self.number_for else 0.0

    def say(self, token: int, logprob: float, version: int) -> None:
        """Notes a sampled token, which may end the answer."""
        self.ids.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        has_ended = token == self.policy.end_id
        if has_ended or len(self.ids) - self.turn_start == self.policy.max_new_tokens:
            self._end_turn(self.policy.text_of(self.ids[self.turn_start :]), not has_ended)
            self.is_over = self.turn == self.policy.task.num_turns

    def answer(self, text: str, ids: list[int]) -> None:
        """Says this, if it has a turn, instead of sampling: it is to be learned (section 11).

        Versions and log-probabilities are zeros, which nobody reads.
        """
        if self.is_speaking:
            self.ids += ids
            self.logprobs += [0.0] * len(ids)
            self.versions += [0] * len(ids)
            self._end_turn(text, is_truncated=False)

    def _end_turn(self, text: str, is_truncated: bool) -> None:
        """It has said this."""
        self.turn_ids += [self.turn] * (len(self.ids) - self.turn_start)
        self.said.append(text)
        self.is_truncated.append(is_truncated)
        self.is_speaking = False

    def close(self) -> None:
        """Ends it with its request, maybe before its last turn. A decoder then drops it."""
        self.is_speaking = False
        self.is_over = True
        with task_errors():
            self.session.close()


@contextlib.contextmanager
def begin_episodes(
    policy: Policy,
    prompts: list[Prompt],
    group_size: int,
    seed: int,
    greedy: bool,
) -> Iterator[list[Episode]]:
    """Episodes of these prompts, group_size of each, for the body of the `with`.

    seed: of the random numbers. greedy: the likeliest token is taken instead. Those of a group are
    neighbours. Whoever joins or selects rows of a Rollout need not keep that.
    """
    numbers = RandomNumbers(len(prompts) * group_size, seed)
    # An ExitStack calls back when its `with` ends, the last first. So it closes all that were
    # opened, however this ends: also if the next one cannot be opened, if the decoder runs out of
    # memory, and if closing another one raises. Only a killed process closes nothing; then the
    # system ends its connections, and the environment sees that.
    with contextlib.ExitStack() as until_end:
        episodes: list[Episode] = []
        with task_errors():
            for number in range(len(prompts) * group_size):
                prompt = prompts[number // group_size]
                number_for = functools.partial(numbers.number_for, number)
                session = policy.task.open(prompt.turns)
                episode = Episode(policy, prompt, session, None if greedy else number_for)
                until_end.callback(episode.close)
                episodes.append(episode)
        yield episodes


def all_over(episodes: list[Episode]) -> bool:
    """Whether all of them are over. Raises what a session has raised."""
    for episode in episodes:
        if episode.error is not None:
            raise episode.error
    return all(episode.is_over for episode in episodes)


def rollout_of(episodes: list[Episode]) -> Rollout:
    """The record of episodes that do not speak, with what their sessions know of rewards."""
    num_turns = episodes[0].policy.task.num_turns
    rewards: list[list[float]] = []
    is_truncated: list[list[bool]] = []
    with task_errors():
        for episode in episodes:
            in_all_turns = [False] * num_turns
            in_all_turns[: len(episode.is_truncated)] = episode.is_truncated
            is_truncated.append(in_all_turns)
            found = episode.session.rewards(episode.said, in_all_turns)
            unknown = [math.nan] * num_turns
            rewards.append(unknown if found is None else finite_rewards(found, num_turns))
    return Rollout(
        tokens=tokens_of(episodes),
        rewards=torch.tensor(rewards),
        group_ids=torch.tensor([episode.prompt.id for episode in episodes]),
        is_cut=torch.tensor([episode.is_cut for episode in episodes]),
        is_truncated=torch.tensor(is_truncated),
        prompts=[episode.prompt for episode in episodes],
        said=[episode.said for episode in episodes],
    )


def tokens_of(episodes: list[Episode]) -> Tokens:
    """The table of their tokens. Where an episode was cut, no token counts as chosen."""
    lengths = torch.tensor([len(episode.ids) for episode in episodes])
    is_token = torch.arange(int(lengths.max())) < lengths[:, None]  # [B, longest]
    turn_ids = filled_in(is_token, [episode.turn_ids for episode in episodes])
    # Computed before the turn_ids of cut episodes become 0 (below), because the logprobs and
    # versions of these episodes have entries for these places, too.
    is_sampled = turn_ids > 0
    is_cut = torch.tensor([episode.is_cut for episode in episodes])
    logprobs = [episode.logprobs for episode in episodes]
    return Tokens(
        ids=filled_in(is_token, [episode.ids for episode in episodes]),
        mask=is_token.long(),
        turn_ids=turn_ids * ~is_cut[:, None],
        logprobs=filled_in(is_sampled, logprobs, torch.float32),
        versions=filled_in(is_sampled, [episode.versions for episode in episodes]),
    )


def filled_in(
    places: torch.Tensor,
    entries: list[Any],
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A table with these entries in these places, and zeros elsewhere.

    places: [B, T] bool. entries: of each row a list, one for each of its places.
    """
    dtype = dtype or torch.int64  # a default in the signature would import torch with this file
    row_by_row = tensor_of(list(itertools.chain.from_iterable(entries)), dtype)
    return torch.zeros(places.shape, dtype=dtype).masked_scatter(places, row_by_row)


def tensor_of(numbers: Sequence[float], dtype: torch.dtype | None = None) -> torch.Tensor:
    """The same as torch.tensor(numbers, dtype=dtype), which takes three times as long.

    dtype: None is int64.
    """
    dtype = dtype or torch.int64
    code = {torch.int64: "q", torch.float32: "f", torch.float64: "d"}[dtype]
    room = array.array(code, numbers)
    return torch.frombuffer(room, dtype=dtype) if room else torch.zeros(0, dtype=dtype)


def finite_rewards(found: Sequence[float], num_turns: int) -> list[float]:
    """What a task gave as rewards. ValueError: it is something else than num_turns finite numbers.

    TypeError: it is not even a list of what can be a number.
    """
    numbers = [float(reward) for reward in found]
    if len(numbers) != num_turns or not math.isfinite(sum(numbers)):
        raise ValueError(f"these are not {num_turns} finite rewards: {str(found)[:60]}")
    return numbers


# -- 9e. The decoder -------------------------------------------------------------------------------
# An episode hears, speaks, hears, speaks, until it is over. The episodes are rows of one batch,
# whoever asked for them, and a step of the decoder samples a token for each that speaks:
#
#     1. pull: are there new weights? If so, the cache is thrown away
#     2. episodes that wait come in; those whose turn has ended go out, hear, and come in again
#     3. a forward pass over the tokens that the cache lacks, mostly the last one of each row. When
#        rows have come in, each kind of row has a pass of its own, for they lack different numbers
#        of tokens: rows that go on lack one (Y, below), rows that come back have heard some (X),
#        and new ones have nothing in the cache (Z). Then the rows of these passes are joined
#     4. log-probabilities of the next token, over the whole vocabulary
#     5. a token is sampled for each row whose turn goes on. Its episode notes the id, the turn,
#        the log-probability and the version
#
# So answers may be of any length. Here X ends its turn with its third token, hears "bc", and goes
# on; Y speaks all the time; Z is of a request that came meanwhile. These are the rows after the
# third step and after the fourth. After each step all rows end with the same column, and shorter
# ones have holes on their left (a dot):
#
#     third    X   <u> d   <e> <a> d   f   <e>
#              Y   <u> g   <e> <a> h   i   j
#     fourth   X   <u> d   <e> <a> d   f   <e> <u> b   c   <e> <a> p
#              Y   .   .   .   .   .   <u> g   <e> <a> h   i   j   k
#              Z   .   .   .   .   .   .   .   .   <u> k   <e> <a> m
#
# To come in and to go out copies the cache, so it is not done for every row alone: it is done when
# a request waits, or a quarter of the rows have ended their turns. While fewer than a quarter have,
# these are computed with the others, and what comes of them is ignored. They soon lack no token,
# and then each step gives them a hole behind their last one. When they come back these holes stand
# in their middle. That does no harm: the mask says where holes are, nothing attends to them, and
# positions do not count them. Of 64 rows, 56 may say 8 tokens and 8 say 200:
# that makes 64 x 8 + 8 x 192 tokens, where a batch that nobody leaves computes 64 x 200.


def version_0() -> int:
    """What `pull` is in a decoder whose weights do not change."""
    return 0


class RowCache:
    """The keys and values of some episodes. A row of it is one of them."""

    def __init__(self, model: Any, episodes: list[Episode]) -> None:
        """Nothing is computed yet."""
        self.model = model
        self.episodes = episodes
        self.num_computed = [0] * len(episodes)  # tokens of each
        # [R, columns] int64: 1 is a token, 0 a hole.
        self.mask = torch.zeros(len(episodes), 0, dtype=torch.int64, device=model.device)
        self.cache: Any = transformers.DynamicCache(config=model.config)

    def catch_up(self) -> torch.Tensor:
        """Computes what it lacks. Returns [R, vocabulary]: the logits behind the last column."""
        ids = self._lacking()
        self.num_computed = [len(episode.ids) for episode in self.episodes]
        if self.mask.shape[1] > 0:
            return self._compute(ids)
        # Of a new cache rows may be alike, such as those of a group, which hear the same words. So
        # each different row, D of them, is computed once, and then copied to all that are like it.
        # Later rows of a group differ, for each has sampled something of its own.
        different, which = ids.unique(dim=0, return_inverse=True)  # [D, n]; [R]: a number below D
        self.mask = self.mask[: len(different)]  # [D, 0]: a new cache has no columns
        logits = self._compute(different)  # [D, vocabulary]; mask and cache have D rows now
        self.mask = self.mask[which]  # [R, n]
        self.cache.batch_select_indices(which)  # R rows, too
        return logits[which]

    def _lacking(self) -> torch.Tensor:
        """[R, n] int64: the tokens that were not computed yet, and -1 in holes on their left."""
        pairs = list(zip(self.episodes, self.num_computed, strict=True))
        width = max(len(episode.ids) - num_computed for episode, num_computed in pairs)
        row_by_row: list[int] = []
        for episode, num_computed in pairs:
            num_holes = width - len(episode.ids) + num_computed
            if num_holes:
                row_by_row += [-1] * num_holes
            row_by_row += episode.ids[num_computed:]
        return tensor_of(row_by_row).view(-1, width).to(self.mask.device)

    def _compute(self, ids: torch.Tensor) -> torch.Tensor:
        """A forward pass over further columns. ids: as _lacking has them."""
        mask = torch.cat([self.mask, (ids >= 0).long()], 1)
        # The position of a token is the number of tokens before it: holes do not count.
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        logits = self.forward(ids.clamp(min=0), mask, positions[:, self.mask.shape[1] :])
        self.mask = mask
        return logits

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """[R, vocabulary]: the logits behind the last of n further columns.

        ids, positions: [R, n] int64. mask: [R, columns + n] int64, of the earlier columns too.
        """
        out = self.model(
            ids,
            attention_mask=mask,
            past_key_values=self.cache,
            position_ids=positions,
            logits_to_keep=1,
        )
        return out.logits[:, -1]

    def part(self, which: list[int]) -> RowCache:
        """Some of the rows. which: their numbers, at least one, smallest first."""
        if len(which) == len(self.episodes):
            return self
        self.settle()
        rows = torch.tensor(which, device=self.mask.device)
        mask = self.mask[rows]
        # Columns on the left in which all of these rows have holes are left out.
        has_token = mask.any(0).long()  # [columns]: 1 if one of these rows has a token there
        first = int(has_token.argmax())  # of equal numbers argmax finds the first
        num_columns = mask.shape[1] - first
        layers = []
        for layer in self.cache.layers:
            keys = layer.keys[rows, :, -num_columns:]
            values = layer.values[rows, :, -num_columns:]
            layers.append(layer_like(layer, keys, values, num_columns))
        return self._with(
            episodes=[self.episodes[row] for row in which],
            num_computed=[self.num_computed[row] for row in which],
            mask=mask[:, first:],
            layers=layers,
        )

    @staticmethod
    def joined(parts: list[RowCache]) -> RowCache:
        """All rows of at least one part. On the left of narrower ones there are holes."""
        if len(parts) == 1:
            return parts[0]
        for part in parts:
            part.settle()
        mask = joined_on_the_right([part.mask for part in parts], 1)
        layers = []
        for number, layer in enumerate(parts[0].cache.layers):
            every = [part.cache.layers[number] for part in parts]
            keys = joined_on_the_right([one.keys for one in every], 2)
            values = joined_on_the_right([one.values for one in every], 2)
            layers.append(layer_like(layer, keys, values, mask.shape[1]))
        return parts[0]._with(
            episodes=[episode for part in parts for episode in part.episodes],
            num_computed=[number for part in parts for number in part.num_computed],
            mask=mask,
            layers=layers,
        )

    def _with(
        self,
        episodes: list[Episode],
        num_computed: list[int],
        mask: torch.Tensor,
        layers: list[Any],
    ) -> RowCache:
        """Another one of the same kind, with these rows."""
        found = copy.copy(self)
        found._become(episodes, num_computed, mask, transformers.Cache(layers=layers))
        return found

    def _become(
        self,
        episodes: list[Episode],
        num_computed: list[int],
        mask: torch.Tensor,
        cache: Any,
    ) -> None:
        """For a copy that was made just now, and shares all else with this one."""
        self.episodes = episodes
        self.num_computed = num_computed
        self.mask = mask
        self.cache = cache

    def settle(self) -> None:
        """Is called before rows are moved. Section 9f has something to do then."""


def layer_like(layer: Any, keys: torch.Tensor, values: torch.Tensor, num_columns: int) -> Any:
    """A layer of a cache of transformers, of the same kind, for so many columns.

    keys, values: [rows, heads, columns, size]. In a layer with sliding-window attention a token
    sees a fixed number of the last columns, so the layer of the cache has no others. It must be
    told how many there were in all (cumulative_length), to cut the mask at the right place.
    """
    layer = copy.copy(layer)
    layer.keys = keys
    layer.values = values
    if layer.is_sliding:
        layer.cumulative_length = num_columns
    return layer


def joined_on_the_right(tensors: list[torch.Tensor], dim: int) -> torch.Tensor:
    """The rows of all. On the left of narrower ones there are zeros. dim: of the columns."""
    shape = list(tensors[0].shape)
    shape[0] = sum(tensor.shape[0] for tensor in tensors)
    shape[dim] = max(tensor.shape[dim] for tensor in tensors)
    room = tensors[0].new_zeros(shape)
    row = 0
    for tensor in tensors:
        num_rows = tensor.shape[0]
        num_columns = tensor.shape[dim]
        rows_of_mine = room[row : row + num_rows]
        rows_of_mine.narrow(dim, shape[dim] - num_columns, num_columns).copy_(tensor)
        row += num_rows
    return room


class Decoder:
    """Has episodes, of any number of requests, and samples a token for each of them per step.

    A serving engine would be another class with its three methods: `add` takes episodes, `step`
    gets all of them on, and `episodes` says which are not over.
    """

    def __init__(self, policy: Policy, pull: Callable[[], int] = version_0) -> None:
        """pull: makes the policy's weights those to sample with now, and returns their version.

        It is called before every token.
        """
        self.policy = policy
        self.pull = pull
        self.version: int | None = None  # of the weights that made the cache
        self.cache = self.new_cache([])  # of episodes that speak, or have ended their turn
        self.waiting: list[Episode] = []  # of these nothing is computed

    def new_cache(self, episodes: list[Episode]) -> RowCache:
        """An empty one, for these."""
        return RowCache(self.policy.model, episodes)

    def add(self, episodes: list[Episode]) -> None:
        """These take part from the next step on."""
        self.waiting += episodes

    def episodes(self) -> list[Episode]:
        """All that are not over."""
        return [one for one in self.cache.episodes + self.waiting if not one.is_over]

    def step(self) -> None:
        """Samples a token for each episode that speaks, after they have heard what there is.

        What a session raises ends its episode, and stays there for the request that began it.
        Whatever else is raised, the next step computes everything anew.
        """
        try:
            with torch.inference_mode():
                # This is between two tokens, the only moment at which weights may change.
                self._take_new_weights()
                parts = self._parts()
                logits = [part.catch_up() for part in parts]
                self.cache = RowCache.joined(parts) if parts else self.new_cache([])
                self.waiting = []
                if parts:
                    self._sample(self.log_distribution(torch.cat(logits)))
        except Exception:
            self.throw_cache_away()  # a part of it may be half computed
            raise

    def _take_new_weights(self) -> None:
        """Pulls. Tokens from here on carry the new version, earlier ones keep theirs."""
        version = self.pull()
        if version != self.version:
            self.version = version
            # Keys and values of earlier tokens were made by the old weights. Read by the new ones
            # they give probabilities that no version of the policy has.
            self.throw_cache_away()  # mechanism: a cache per version

    def throw_cache_away(self) -> None:
        """The next step computes the keys and values of all tokens again."""
        self.waiting = self.cache.episodes + self.waiting
        self.cache = self.new_cache([])

    def _parts(self) -> list[RowCache]:
        """The rows to be computed now, as one part or, when some come in or go out, up to three.

        Going on: their turns go on, and they lack the token that was sampled last. Returning: their
        turns have ended, and their users have said more. New: nothing of them is computed yet.
        """
        episodes = self.cache.episodes  # one for each row
        silent = [row for row, episode in enumerate(episodes) if not episode.is_speaking]
        if not self.waiting and 4 * len(silent) < len(episodes):
            return [self.cache]  # nobody comes in or goes out: silent rows are computed too
        going_on = [row for row, episode in enumerate(episodes) if episode.is_speaking]
        # Here users speak, to all whose turn it is not. Who has heard something speaks from now on.
        self._hear([*episodes, *self.waiting])
        returning = [row for row in silent if episodes[row].is_speaking]
        new = [episode for episode in self.waiting if episode.is_speaking]
        parts = [self.cache.part(which) for which in (going_on, returning) if which]
        if new:
            parts.append(self.new_cache(new))
        return parts

    def _hear(self, episodes: list[Episode]) -> None:
        """Those that are not over, and do not speak, hear what their users say."""
        hearing = []
        texts = []
        for episode in episodes:
            if episode.is_speaking or episode.is_over:
                continue
            text = episode.user_says()
            if text is not None:
                hearing.append(episode)
                texts.append(text)
        for episode, ids in zip(hearing, self.policy.ids_of(texts), strict=True):
            episode.hear(ids)

    def log_distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """[R, vocabulary] float32: the log-probabilities to sample from, and to record.

        At --temperature, as in score_tokens. With a change that only one side makes, such as top-p,
        another policy would be sampled from than the one that is trained.
        """
        return (logits.float() / self.policy.cfg.temperature).log_softmax(-1)

    def _sample(self, logp: torch.Tensor) -> None:
        """Samples a token for each row in the cache. logp: [R, vocabulary] float32.

        Episodes that do not speak do not get theirs.
        """
        assert self.version is not None, "it has pulled"
        tokens = self._chosen(logp)
        logprobs = logp.gather(1, tokens[:, None]).squeeze(1)
        rows = zip(self.cache.episodes, tokens.tolist(), logprobs.tolist(), strict=True)
        for episode, token, logprob in rows:
            if episode.is_speaking:
                episode.say(token, logprob, self.version)

    def _chosen(self, logp: torch.Tensor) -> torch.Tensor:
        """[R] int64: the token of each row, by its episode's random number, or the likeliest."""
        is_greedy = [episode.number_for is None for episode in self.cache.episodes]
        if all(is_greedy):
            return logp.argmax(-1)
        # A line as long as 1 is cut into pieces, one for each token, as long as its probability.
        # The random number is a place on that line.
        ends = logp.exp().double().cumsum(-1)  # [R, vocabulary]: of the pieces
        numbers = tensor_of([episode.next_number() for episode in self.cache.episodes], ends.dtype)
        places = numbers[:, None].to(ends.device) * ends[:, -1:]  # the line is not exactly 1 long
        drawn = torch.searchsorted(ends, places, right=True).squeeze(1)
        if not any(is_greedy):
            return drawn
        return torch.where(torch.tensor(is_greedy, device=logp.device), logp.argmax(-1), drawn)


def generate(
    policy: Policy,
    prompts: list[Prompt],
    group_size: int,
    seed: int = 0,
    greedy: bool = True,
    pull: Callable[[], int] = version_0,
    decoder_class: Callable[..., Decoder] = Decoder,
) -> Rollout:
    """Has each conversation group_size times, with a decoder of its own.

    greedy: take the likeliest token instead of sampling. Rewards are nan, not judged yet, if the
    session knows none. Raises TaskError if a session raises.
    """
    decoder = decoder_class(policy, pull)
    with begin_episodes(policy, prompts, group_size, seed, greedy) as episodes:
        decoder.add(episodes)
        while not all_over(episodes):
            decoder.step()
        return rollout_of(episodes)


# -- 9f. The token step on a GPU -------------------------------------------------------------------
# (You can skip this part, and go on with the measurement: it makes 9e faster, and changes nothing
# in what is sampled. None of it has run on a GPU. On a CPU the same code runs without a graph, and
# more slowly than 9e: a test compares its tokens, log-probabilities and versions with those of 9e.)
#
# One token for each of some rows is little work for a GPU. For a small model it is a few hundred
# kernels (functions that run there), and Python may need longer to ask for them than they take. A
# CUDA graph is the cure: the kernels of a token are recorded once, and from then on one call
# repeats all of them. But it repeats them as they were: same shapes, same addresses. So:
#
#     1. what was heard is computed as in 9e, into a RowCache
#     2. its keys and values are copied to a fixed place, with room for R rows, a power of two, and
#        W columns, a multiple of 256. What is not used of that is masked
#     3. for each token its ids, positions and mask are written to a fixed place, and the graph for
#        this R and W is repeated
#     4. keys and values are copied back when the W columns are full, before rows come in or go out,
#        and before several columns are computed at once
#
# All else is as in 9e. New weights are copied to where the old ones are, on GPUs (7d), where the
# graph finds them.

HIDDEN = -1e9  # is added to the attention score of a column that nobody may see
WIDTH_STEP = 256  # columns: fewer graphs than with small ones, and less is masked than with large


class StaticStep:
    """The forward pass for one token of each row, on fixed addresses."""

    def __init__(self, model: Any, cache: Any, num_rows: int, width: int) -> None:
        """cache: a StaticCache for num_rows rows and width columns."""
        self.model = model
        self.cache = cache
        self.width = width
        self.ids = torch.zeros(num_rows, 1, dtype=torch.int64, device=model.device)
        self.positions = torch.zeros_like(self.ids)
        shape = (num_rows, 1, 1, width)  # for any head, and one token
        self.mask = torch.full(shape, HIDDEN, dtype=model.dtype, device=model.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Any = None  # [R, vocabulary]: where the graph leaves them

    def capture(self, pool: Any) -> Any:
        """Records the kernels. Returns the memory in which they compute, for other graphs too.

        pool: what this returned for another step; None: this is the first one.
        """
        try:
            # The first passes choose kernels and get memory, neither of which can be recorded.
            beside = torch.cuda.Stream()
            beside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(beside):
                for _ in range(2):
                    self._compute()
            torch.cuda.current_stream().wait_stream(beside)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=pool):
                self.logits = self._compute()
            return self.graph.pool()
        except RuntimeError as error:
            shape = f"{len(self.ids)} rows and {self.width} columns"
            raise RuntimeError(f"no CUDA graph for {shape} (try --no-graphs): {error}") from error

    def load(self, rows: RowCache) -> None:
        """Takes the keys and values of these rows, which hold none until they are unloaded."""
        num_rows, num_columns = rows.mask.shape
        self.mask.fill_(HIDDEN)
        for mine, theirs in zip(self.cache.layers, rows.cache.layers, strict=True):
            mine.cumulative_length.fill_(num_columns)  # the next token goes there
            mine.keys.zero_()
            mine.values.zero_()
            mine.keys[:num_rows, :, :num_columns] = theirs.keys
            mine.values[:num_rows, :, :num_columns] = theirs.values
            # Or they would be in memory twice. A view of no rows would keep them, a clone does not.
            replace_in(theirs, theirs.keys[:0].clone(), theirs.values[:0].clone())

    def unload(self, rows: RowCache) -> None:
        """Gives them back, with the columns that were computed here."""
        num_rows, num_columns = rows.mask.shape
        for mine, theirs in zip(self.cache.layers, rows.cache.layers, strict=True):
            keys = mine.keys[:num_rows, :, :num_columns].clone()
            values = mine.values[:num_rows, :, :num_columns].clone()
            replace_in(theirs, keys, values)

    def run(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Computes one column more. The parameters are those of RowCache.forward."""
        num_rows, num_columns = mask.shape
        self.ids[:num_rows] = ids
        self.positions[:num_rows] = positions
        self.mask[:num_rows, 0, 0, :num_columns] = (1 - mask) * HIDDEN
        if self.graph is None:
            return self._compute()[:num_rows]
        self.graph.replay()
        return self.logits[:num_rows]

    def _compute(self) -> torch.Tensor:
        """[R, vocabulary]: what a graph records."""
        out = self.model(
            self.ids,
            attention_mask=self.mask,
            past_key_values=self.cache,
            position_ids=self.positions,
        )
        return out.logits[:, -1]


class StaticSteps:
    """The steps of a model, of each shape that was needed so far, and the memory that they share.

    A generator has one for all its requests: to record a graph takes as long as many tokens. As the
    memory is shared, two decoders may not use it in turns.
    """

    def __init__(self, model: Any, captures: bool) -> None:
        """captures: record graphs, which needs a GPU."""
        self.model = model
        self.captures = captures
        self.steps: dict[tuple[int, int], StaticStep] = {}  # by number of rows, and of columns
        # Of each layer the room for keys and for values, as one row of numbers.
        self.memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_tokens = 0  # for which it has room
        self.pool: Any = None  # the memory in which graphs compute

    def step_for(self, rows: RowCache) -> StaticStep:
        """The step for one column more of these rows."""
        num_rows, num_columns = rows.mask.shape
        num_rows = 1 << (num_rows - 1).bit_length()  # the next power of two
        width = WIDTH_STEP * (num_columns // WIDTH_STEP + 1)
        if num_rows * width > self.num_tokens:
            self._make_room(rows.cache.layers, num_rows * width)
        if (num_rows, width) not in self.steps:
            cache = self._cache_of(rows.cache.layers, num_rows, width)
            step = StaticStep(self.model, cache, num_rows, width)
            if self.captures:
                self.pool = step.capture(self.pool)
            self.steps[num_rows, width] = step
        return self.steps[num_rows, width]

    def _make_room(self, layers: Sequence[Any], num_tokens: int) -> None:
        """Gets memory for more tokens. Graphs know the old addresses, so they go.

        layers: of any cache of this model, for their shapes [rows, heads, columns, size].
        """
        self.steps.clear()
        self.pool = None  # with its last graph torch frees it, and refuses to record into it
        self.memory.clear()
        for layer in layers:  # heads x size numbers for each row and column
            keys = layer.keys.new_zeros(num_tokens * layer.keys[0, :, 0].numel())
            values = layer.values.new_zeros(num_tokens * layer.values[0, :, 0].numel())
            self.memory.append((keys, values))
        self.num_tokens = num_tokens

    def _cache_of(self, layers: Sequence[Any], num_rows: int, width: int) -> Any:
        """A StaticCache of this shape, which lies at the beginning of the memory."""
        cache: Any = transformers.StaticCache(config=self.model.config, max_cache_len=width)
        for mine, like, (keys, values) in zip(cache.layers, layers, self.memory, strict=True):
            mine.lazy_initialization(like.keys[:1], like.values[:1])  # for one row
            replace_in(
                mine,
                beginning_of(keys, num_rows, mine.keys),
                beginning_of(values, num_rows, mine.values),
            )
        return cache


def beginning_of(memory: torch.Tensor, num_rows: int, row: torch.Tensor) -> torch.Tensor:
    """[num_rows, heads, columns, size]: the beginning of memory. row: the shape of one row."""
    return memory[: num_rows * row.numel()].view(num_rows, *row.shape[1:])


def replace_in(layer: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Gives a layer of a cache of transformers other keys and values."""
    layer.keys = keys
    layer.values = values


class StaticRowCache(RowCache):
    """A RowCache that computes single columns by static steps."""

    def __init__(self, model: Any, episodes: list[Episode], steps: StaticSteps) -> None:
        super().__init__(model, episodes)
        self.steps = steps
        self.step: StaticStep | None = None  # the one that has the keys and values now

    def forward(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
    ) -> torch.Tensor:
        """Several columns, such as all that was heard: as in RowCache. One: by a static step."""
        num_columns = self.mask.shape[1]
        if ids.shape[1] > 1 or num_columns == 0:
            self.settle()
            return super().forward(ids, mask, positions)
        if self.step is None or num_columns == self.step.width:
            self.settle()
            self.step = self.steps.step_for(self)
            self.step.load(self)
        return self.step.run(ids, mask, positions)

    def settle(self) -> None:
        """Gets the keys and values, if a step has them."""
        if self.step is not None:
            self.step.unload(self)
            self.step = None


class StaticDecoder(Decoder):
    """A Decoder whose passes over one column are StaticSteps."""

    def __init__(
        self,
        steps: StaticSteps,
        policy: Policy,
        pull: Callable[[], int] = version_0,
    ) -> None:
        self.steps = steps  # first, because Decoder.__init__ calls new_cache, which needs it
        super().__init__(policy, pull)

    def new_cache(self, episodes: list[Episode]) -> RowCache:
        """An empty one. The steps, and their graphs, stay."""
        return StaticRowCache(self.policy.model, episodes, self.steps)


def decoder_for(policy: Policy) -> Callable[..., Decoder]:
    """What makes a generator's decoder: on a GPU StaticDecoder.

    A layer with sliding-window attention moves its keys as the window moves, and is left to the
    Decoder.
    """
    if policy.cfg.device == "cpu" or policy.cfg.no_graphs:
        return Decoder
    cache: Any = transformers.StaticCache(config=policy.model.config, max_cache_len=WIDTH_STEP)
    if any(layer.is_sliding for layer in cache.layers):
        return Decoder
    is_on_gpu = policy.model.device.type == "cuda"  # False in tests, which only name a GPU
    steps = StaticSteps(policy.model, captures=is_on_gpu)
    return functools.partial(StaticDecoder, steps)


# -- measurement -----------------------------------------------------------------------------------
# Four ways to break the rule, which public code has done, too (DOCS 5 describes them): three
# decoders, and text in place of ids. For each decoder the trainer recomputes the log-probabilities
# that the generator has recorded. The two are compared by their k3, which should be 0, except for
# rounding.


class KeepsOldCache(Decoder):
    """Goes on with the keys and values of the old weights when new ones have come."""

    def throw_cache_away(self) -> None:
        """Does nothing of the kind."""


class RoundsProbabilities(Decoder):
    """Takes the softmax in bf16, in which large models compute."""

    def log_distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """In bf16, and then as fp32, which brings nothing back."""
        return logits.bfloat16().log_softmax(-1).float()


class SamplesTopP(Decoder):
    """Samples only from the likeliest tokens, those that together have a probability of 0.9.

    The generation settings of most models do so. What it records is the probability among these.
    """

    def log_distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """Those of the likeliest tokens, made to add up to 1; all others -inf."""
        every = logits.float().log_softmax(-1)
        logp, order = every.sort(-1, descending=True)
        p = logp.exp()
        before = p.cumsum(-1) - p  # the probability of all likelier ones together
        kept = logp.masked_fill(before > 0.9, -math.inf)
        kept = kept.log_softmax(-1)  # so that they add up to 1 again
        return torch.empty_like(kept).scatter(-1, order, kept)  # in the order of the vocabulary


@dataclass(frozen=True)
class AgreementRow:
    """How what was recorded compares with what the trainer finds."""

    what_the_trainer_compares_with: str
    mean_k3: float
    tokens: int


def agreement(what: str, decoder_class: type[Decoder], cfg: Config) -> AgreementRow:
    """Measures a decoder whose policy changes twice while it converses, as if a trainer published.

    Each token is then recomputed with the weights of the version that it names. what: for the row.
    """
    policy = Policy(cfg)
    states = []  # the weights of versions 0, 1 and 2
    for version in range(3):
        other = Policy(dataclasses.replace(cfg, seed=cfg.seed + version))
        state = other.model.state_dict()
        # Twice as large as fresh weights, so that some tokens are much likelier than others.
        states.append({name: 2 * tensor for name, tensor in state.items()})
    pulls = itertools.count()

    def pull() -> int:
        version = min(next(pulls) // 3, 2)  # another one after every third token
        policy.model.load_state_dict(states[version])
        return version

    prompts = Sampler(cfg.task, cfg.seed).first(32)
    rollout = generate(
        policy, prompts, 4, seed=cfg.seed, greedy=False, pull=pull, decoder_class=decoder_class
    )
    tokens = rollout.tokens.without_empty_columns()
    sampled = tokens.is_sampled()
    off = torch.zeros(int(sampled.sum()), dtype=torch.float64)  # [N]: k3 of each sampled token
    for version, state in enumerate(states):
        policy.model.load_state_dict(state)
        with torch.no_grad():
            recomputed = trainer_logprobs(policy.model, tokens)
        mine = tokens.versions[sampled] == version
        off[mine] = k3(tokens.logprobs[sampled], recomputed)[mine]
    return AgreementRow(
        what_the_trainer_compares_with=what,
        mean_k3=float(off.mean()),
        tokens=len(off),
    )


def num_ids_that_differ(num_answers: int, seed: int) -> int:
    """Turns sampled answers into text and tokenizes them again, as a next turn from text would do.

    Answers have four tokens, which are letters or pairs of letters. Sampling "a" and then "b" gives
    two ids and the text "ab"; of that text the tokenizer makes the one id of the pair.
    """
    tokenizer, _ = tiny_policy(Task.letters, has_pairs=True)
    rng = random.Random(seed)
    num_differ = 0
    for _ in range(num_answers):
        sampled = [rng.randrange(3, len(tokenizer)) for _ in range(4)]  # 0 to 2 are special
        again = tokenizer(tokenizer.decode(sampled), add_special_tokens=False)["input_ids"]
        for was, becomes in itertools.zip_longest(sampled, again[:4]):
            num_differ += was != becomes
    return num_differ


@stage(
    "what is recorded while sampling is what the trainer finds again: a version per token, and "
    "log-probabilities under the sampling policy; and ids, for text does not give them back",
    hint="write `pass`: the old cache stays",
    mechanism="a cache per version",
)
async def demo_rollout(report: Report, cfg: Config) -> None:
    """Measures the right decoder and three wrong ones, and counts ids that text changes."""
    tiny = Config(seed=cfg.seed)  # the tiny policy, whatever --model says
    report.say(f"a policy whose weights change twice while it converses; seed {cfg.seed}")
    report.doing("sampling with four decoders")
    right = agreement("what was recorded", Decoder, tiny)
    wrong = [
        agreement("a cache kept across new weights", KeepsOldCache, tiny),
        agreement("probabilities from a softmax in bf16", RoundsProbabilities, tiny),
        agreement("samples of top-p 0.9", SamplesTopP, tiny),
    ]
    report.table([right, *wrong])
    num_differ = num_ids_that_differ(500, cfg.seed)
    report.say(f"answers as text, tokenized again: {num_differ} of 2000 ids are others")
    report.figure(k3_recorded=right.mean_k3, retokenised_share=num_differ / 2000)
    report.check("k3 of what was recorded", right.mean_k3, "<=", 1e-10)
    smallest = min(row.mean_k3 for row in wrong)
    report.check("smallest k3 of the three that break the rule", smallest, ">", 1e-6)
    report.check("ids that differ after a trip through text", num_differ, ">", 0)
    # You can now sample with one program and train with another, and know that they agree.


# == 10. LOSSES ====================================================================================
# Problem. What should be made larger is the mean reward J of the policy: the sum over all answers
#   of p times the reward R. Its gradient is the mean of R grad log p over sampled answers, as is
#   shown below. So samples are enough, but what they give is noisy. And if they come from an older
#   policy, it is the gradient of something else.
# Rule. Five things are done about that, each for a reason of its own:
#     a baseline   In place of R stands the advantage A: how much better the answer was than
#                  expected. If what is subtracted from R does not depend on the answer, the mean
#                  of the gradient stays right (below), and its noise shrinks. So it is with
#                  `leave_one_out`, which subtracts the mean of the other answers to the prompt.
#                  `group` subtracts the mean of all of them, the answer itself included, which only
#                  makes the gradient a little shorter; and it divides by their deviation, which
#                  tilts it, that is, turns it away from the true one: the demo shows by how much.
#     a ratio      r = p now / p when it was sampled weighs each token: samples of the old policy
#                  are counted as often as the present one would have drawn them. One weight for
#                  the whole answer, the product of the ratios of its tokens, would be exact. For a
#                  long answer it is mostly next to 0, or huge, so each token has its own ratio
#                  alone, and large ones are cut off. That leaves some tilt, with less noise.
#     a clip       a token that has moved far enough gets no more gradient. It does not correct a
#                  direction; it limits how far one batch can push.
#     a bound      on what any one token weighs: a ratio has none by itself. A token that was drawn
#                  with probability 0.000001, and is at 0.01 now, has a ratio of 10,000.
#     a price      of length: what is paid for right answers alone says nothing against long ones.
# Cost. Ratios make noise: a few tokens may have most of the weight. A clip silences tokens.
# Not here. Value networks as baselines (section 14).
# Source. REINFORCE (Williams 1992), PPO (Schulman 2017), dual clip (Ye 2020), GRPO (Shao 2024),
#   RLOO (Ahmadian 2024), GSPO (Zheng 2025), decoupled PPO (AReaL, Fu 2025), CISPO (MiniMax-M1,
#   2025), DPPO (divergence PPO, Qi 2026).
#
# Where the gradient comes from. Of J, the sum of p R over all answers, only p depends on the
# weights, and grad log p = grad p / p. (An answer's log p is the sum over its tokens.) So
#
#     grad J = sum of R grad p = sum of p (R grad log p) = mean of R grad log p over samples
#
# The last step only reads the sum in another way: among samples an answer comes with probability p.
# And why a baseline b does no harm: it adds to this the mean of -b grad log p, which is -b times
# the sum of grad p, the gradient of the sum of p. That sum is always 1, so its gradient is 0.
#
# At lag 0 every ratio is 1, and the value of ppo, decoupled and gspo is minus the mean of the
# advantages. Those of a group add up to 0, so if its answers are equally long, those of its tokens
# do, and the value is 0, whatever the answers were. Only its gradient, A grad log p, means
# something. So a loss that does not fall says nothing; watch the reward, held-out answers, the
# entropy and k3.

# Why the mean of the group is the baseline. The answers to one prompt tell how hard that prompt is,
# and this needs no second network. A baseline that does not know the prompt praises a right answer
# as much where three of four are right as where it is the only one. By example, two groups of four:
#
#     group   rewards     advantages with `group`   with `leave_one_out`   with `batch`
#     easy    1 1 1 0      0.6  0.6  0.6 -1.7        0.3  0.3  0.3 -1       1  1  1 -1
#     hard    0 0 0 1     -0.6 -0.6 -0.6  1.7       -0.3 -0.3 -0.3  1      -1 -1 -1  1


@dataclass(frozen=True)
class Credit:
    """For each turn of each answer: what it is praised or blamed for. [..., B, turns] each."""

    advantage: torch.Tensor  # float32: how much better it was than expected
    # bool: is there something to learn? Not if the answer had no such turn, and not if all answers
    # with which it was compared, itself included, are alike. With `none`, which compares nothing,
    # only the first counts.
    has_signal: torch.Tensor


ALIKE = 1e-6  # returns are in fp32: those that differ by less differ by rounding


def credit_for(
    returns: torch.Tensor,
    group_ids: torch.Tensor,
    baseline: str = "group",
    was_had: torch.Tensor | None = None,
) -> Credit:
    """Compares each answer with others, turn by turn.

    returns: [..., B, turns], the sum of the rewards from a turn on: what is said in a turn can
    change these, and no reward before it. group_ids: [..., B] int64. was_had: [..., B, turns] bool:
    did the answer have this turn? One that ended before, or did not fit into the context, must not
    be a 0 in the mean of the others. None: all did.

    With `group` and `batch` advantages are in standard deviations (GRPO), else in units of the
    reward. Groups are found by id: by position, one lost row would mix all groups behind it.
    """
    counts = torch.ones_like(returns).double() if was_had is None else was_had.double()
    returns = returns.double() * counts
    if baseline == "none":
        return Credit(advantage=returns.float(), has_signal=counts > 0)
    # [..., B, B]: in row i, 1 for each answer with which answer i is compared. A product with this
    # matrix takes sums over these.
    peers = (group_ids[..., :, None] == group_ids[..., None, :]).double()
    if baseline == "batch":
        peers = torch.ones_like(peers)
    mean = (peers @ returns) / (peers @ counts).clamp(min=1)
    centred = (returns - mean) * counts
    deviation = ((peers @ centred**2) / (peers @ counts).clamp(min=1)).sqrt()
    has_signal = (deviation > ALIKE) & (counts > 0)
    if baseline == "leave_one_out":
        # Without itself: an answer in its own mean would shrink its own advantage.
        itself = torch.eye(peers.shape[-1], dtype=torch.float64)
        others = peers * (1 - itself)
        expected = (others @ returns) / (others @ counts).clamp(min=1)
        advantage = (returns - expected) * counts
    else:
        # The small number keeps the noise of a group that hardly differs from becoming large.
        advantage = centred / (deviation + 1e-4)
    # No signal, no advantage: all are alike but for rounding, or no other answer had this turn.
    return Credit(advantage=(advantage * has_signal).float(), has_signal=has_signal)


def priced(
    rewards: torch.Tensor,
    num_tokens: torch.Tensor,
    penalty: float,
    num_free: int,
) -> torch.Tensor:
    """[..., B, turns]: rewards, less what long turns cost.

    num_tokens: of the same shape, those that were sampled in each turn. penalty: for each of them
    beyond num_free.
    """
    return rewards - penalty * (num_tokens - num_free).clamp(min=0)  # mechanism: price of length


@dataclass(frozen=True)
class Sampled:
    """N sampled tokens, as a loss sees them: [N] float32 each.

    (In the measurement below, SmallWorld uses it with other shapes.)

    Where the first three fields are equal, that is at lag 0 and before the first update, all losses
    have the same gradient, that of `reinforce`.
    """

    logp: torch.Tensor  # log-probability under the policy in training; the gradient flows here
    # The same when it was sampled, under whatever version that was. Not recomputed with the old
    # weights: only what was recorded is the probability with which it was really drawn.
    recorded: torch.Tensor
    near: torch.Tensor  # the same under the policy before the first update with this batch
    advantage: torch.Tensor
    answer: torch.Tensor  # int64: to which answer it belongs, a number from 0 on


@dataclass(frozen=True)
class TokenLoss:
    """What a loss says of them."""

    loss: torch.Tensor  # [N] float32
    is_outside: torch.Tensor  # [N] bool: has moved too far already, and so has no gradient


# The loss of a batch is the mean over those of its sampled tokens that have a signal. So a long
# answer weighs as much as its tokens do, and a batch with one telling group makes as long a step as
# one with sixteen: answers of which nothing can be learned do not make it shorter.
#
# In the formulas r is the ratio, p now / p recorded, and A the advantage. The gradient of each loss
# is -A w grad log p with a weight w, until it stops:
#
#     reinforce   loss -A log p                           w = 1                      never stops
#     ppo         loss -min(A r, A clip(r)), where clip cuts r off at 1 - clip_low and 1 + clip_high
#                 w = r        stops if A > 0 and r > 1 + clip_high, if A < 0 and r < 1 - clip_low,
#                              and, which is a bound, if A < 0 and r > 3
#     decoupled   loss v times that of ppo with s in place of r, where p near is that before the
#                 first update with this batch, s = p now / p near, and
#                 v = p near / p recorded, but max_weight at most
#                 w = v s      stops as ppo does, by s
#     gspo        loss that of ppo with g in place of r, where g is the geometric mean of r over the
#                 tokens of the answer
#                 w = g        stops as ppo does, by g
#     cispo       loss -A w log p                         w = r, max_weight at most  never stops
#     dppo        loss -A w log p + PULL_BACK (log r)**2  w = r, 3 at most
#                              stops when p has moved by MAX_SHIFT the way A pushes it
#
# In cispo and dppo no gradient flows through w. dppo's second summand is a gentle pull back to the
# samples, for tokens that its limit does not stop. There are two bounds, because there are two
# reasons for them: max_weight, a flag, is how far a sample is trusted to stand for several; and 3,
# the bound for bad tokens (in dppo for all tokens), is explained below.

# By example, a good token (A = 1) that was sampled with probability 0.50. At 0.55 r is 1.1, and the
# loss of ppo, -r, has a gradient: the token becomes likelier still. At 0.65 r is 1.3, beyond 1.2,
# and the loss -min(1.3, 1.2) is a constant, without a gradient. A bad token (A = -1) at 0.65 has
# the loss -min(-1.3, -1.2) = 1.3: its gradient stays, and makes it less likely. So a clip stops a
# token only on its way out, and never on its way back. What is stopped is counted: `clipped` in the
# log is the share of stopped tokens among those with an advantage, which have a gradient to lose.
# If it is large, the samples are too old or the steps too long.
#
# So a clip sets no limit on the way back. Suppose that a bad token is a hundred times as likely now
# as when it was sampled. Its gradient is then a hundred times as long as that of another token; and
# as the gradient of a batch is shortened as a whole (section 11), of the other tokens' part hardly
# anything is left. Lag makes such tokens, and so does a generator that rounds otherwise. Therefore
# a bad token with a ratio above 3 has no gradient. The price: this batch does not make it less
# likely. Later ones can: if the policy now says it often, it comes in newer samples, whose ratio is
# near 1, and there it has the usual gradient.


@dataclass(frozen=True)
class Limits:
    """What bounds the effect of a token. In dppo that is most_back, and the constants below."""

    # How far its probability may move, as a ratio, before its gradient stops: down to
    # 1 - --clip-low, up to 1 + --clip-high.
    clip_low: float
    clip_high: float
    # What a ratio may weigh at most, or a few tokens would outweigh all others: --max-weight.
    max_weight: float
    # Above this ratio ppo's loss of a bad token is a constant (dual clip, Ye 2020).
    most_back: float = 3.0


def limits_of(cfg: Config) -> Limits:
    """Those that the command line gives."""
    return Limits(
        clip_low=cfg.clip_low,
        clip_high=cfg.clip_high,
        max_weight=cfg.max_weight,
    )


USUAL_LIMITS = limits_of(Config())
# Beyond this a ratio is cut off: exp(89) is inf in fp32, and inf * 0 in its gradient is nan.
MAX_RATIO = 1e9
MAX_SHIFT = 0.2  # how far the probability of a token may move, as a difference
PULL_BACK = 0.05  # weight of the squared log-ratio in dppo: a small pull back to the samples


def ratio_of(logp: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """How many times as likely each token is now as it was before."""
    return (logp - before).clamp(max=math.log(MAX_RATIO)).exp()


def nowhere(tokens: Sampled) -> torch.Tensor:
    """For a loss without a clip: no token is outside."""
    return torch.zeros_like(tokens.logp, dtype=torch.bool)


def reinforce_loss(tokens: Sampled, limits: Limits) -> TokenLoss:
    """The gradient of the mean reward, if the samples have lag 0. It does not look at their lag."""
    return TokenLoss(loss=-tokens.advantage * tokens.logp, is_outside=nowhere(tokens))


def ppo_loss(tokens: Sampled, limits: Limits) -> TokenLoss:
    """A ratio, a clip, and a bound.

    Once a good token has become 1 + clip_high times as likely, or a bad one 1 - clip_low times, the
    batch says no more about it. It does not matter whether this trainer moved it or the lag did.
    """
    lowest = 1 - limits.clip_low
    highest = 1 + limits.clip_high
    ratio = ratio_of(tokens.logp, tokens.recorded)
    clipped = ratio.clamp(lowest, highest)
    is_good = tokens.advantage > 0
    is_too_far_back = ~is_good & (ratio > limits.most_back)
    is_outside = torch.where(is_good, ratio > highest, ratio < lowest) | is_too_far_back
    # The smaller of both. Once the token is outside, it is the clipped one: a constant, which has
    # no gradient.
    gain = torch.min(tokens.advantage * ratio, tokens.advantage * clipped)
    # A constant, too. (The measurement below has a most_back of infinity, which is no number to
    # compute with.)
    bounded = tokens.advantage * min(limits.most_back, MAX_RATIO)
    gain = torch.where(is_too_far_back, bounded, gain)  # mechanism: bound
    return TokenLoss(loss=-gain, is_outside=is_outside)


def decoupled_loss(tokens: Sampled, limits: Limits) -> TokenLoss:
    """Asks two questions apart from each other (AReaL, Fu 2025).

    How old are the samples? The answer is a weight. How far have the updates with this batch gone?
    The answer is a clip, which does something only with more than one update per batch (--passes).
    """
    clipped = ppo_loss(dataclasses.replace(tokens, recorded=tokens.near), limits)
    weight = ratio_of(tokens.near, tokens.recorded).clamp(max=limits.max_weight)
    return TokenLoss(loss=weight * clipped.loss, is_outside=clipped.is_outside)


def gspo_loss(tokens: Sampled, limits: Limits) -> TokenLoss:
    """As ppo, but all tokens of an answer have the same ratio: the geometric mean of theirs.

    A reward is for a whole answer, and so is this ratio. The ratio of one token says little about
    the answer, and the mean has less noise (GSPO, Zheng 2025). It is nearer to 1, the more so the
    longer answers are: in the paper, whose answers have hundreds of tokens, the clips are 0.0003
    and 0.0004. Here --clip-low and --clip-high count, as for ppo. Their default of 0.2 is meant for
    short answers; with long ones, set them.
    """
    mean = mean_over_answers(tokens.logp - tokens.recorded, tokens.answer)
    # Its value is the mean, for the first two summands cancel each other; its gradient is that of
    # the token's own log-probability, for only the first has one.
    log_ratio = tokens.logp - tokens.logp.detach() + mean.detach()
    # ppo takes the difference of two log-probabilities. Here it is known: as if it had been log
    # ratio now, and 0 when it was sampled.
    zeros = torch.zeros_like(log_ratio)
    return ppo_loss(dataclasses.replace(tokens, logp=log_ratio, recorded=zeros), limits)


def mean_over_answers(numbers: torch.Tensor, answer: torch.Tensor) -> torch.Tensor:
    """Of each token, the mean over the answer to which it belongs. All are of the same shape."""
    num_answers = int(answer.max()) + 1 if answer.numel() else 0
    sums = numbers.new_zeros(num_answers).index_add(0, answer.flatten(), numbers.flatten())
    lengths = answer.flatten().bincount(minlength=num_answers).clamp(min=1)
    return (sums / lengths)[answer]


def cispo_loss(tokens: Sampled, limits: Limits) -> TokenLoss:
    """Cuts off the weight, not the gradient, so that every token counts (MiniMax-M1, 2025)."""
    ratio = ratio_of(tokens.logp.detach(), tokens.recorded)
    weight = ratio.clamp(max=limits.max_weight)  # mechanism: ratio
    loss = -tokens.advantage * weight * tokens.logp
    return TokenLoss(loss=loss, is_outside=nowhere(tokens))


def dppo_loss(tokens: Sampled, limits: Limits) -> TokenLoss:
    """As ppo, but distance is a difference of probabilities instead of a ratio.

    For a rare token a ratio of 2 is nothing: from 0.001 to 0.002 the policy hardly changes. For a
    frequent one 1.2 is much. (After DPPO, Qi 2026.) A token that was very rare may have any ratio
    and still be within the limit; so a token weighs most_back at most.
    """
    shift = (tokens.logp.exp() - tokens.recorded.exp()).detach()
    weight = ratio_of(tokens.logp.detach(), tokens.recorded).clamp(max=limits.most_back)
    is_good = tokens.advantage > 0
    is_outside = torch.where(is_good, shift > MAX_SHIFT, shift < -MAX_SHIFT)
    log_ratio = tokens.logp - tokens.recorded
    loss = PULL_BACK * log_ratio**2 - tokens.advantage * weight * tokens.logp
    return TokenLoss(loss=loss * ~is_outside, is_outside=is_outside)


LOSSES: dict[str, Callable[[Sampled, Limits], TokenLoss]] = {
    "reinforce": reinforce_loss,
    "ppo": ppo_loss,
    "decoupled": decoupled_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "dppo": dppo_loss,
}

# -- measurement -----------------------------------------------------------------------------------
# A policy so small that all its answers can be listed: 4 prompts, and answers of 3 tokens, each one
# of 4 symbols, so 64 answers per prompt. Its parameters are a table: a logit for each prompt,
# beginning of an answer, and next symbol. So the true J and the true gradient are sums that can be
# computed, and what a loss makes of samples can be held beside them.
#
# Two numbers describe an estimator, which is a loss with a baseline. Tilt: 1 - cosine of the angle
# between the mean of its gradients and the true one; 0 points where the truth points, 2 away from
# it. Noise: the standard deviation of the gradient of one batch, over the length of the mean.

NUM_PROMPTS = 4
NUM_ANSWERS = 8  # sampled to each prompt of a batch
NUM_SYMBOLS = 4
LENGTH = 3


class SmallWorld:
    """Prompts, answers and rewards, and what can be computed exactly of a policy over them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = torch.Generator().manual_seed(seed)
        every = itertools.product(range(NUM_SYMBOLS), repeat=LENGTH)
        self.answers = torch.tensor(list(every))  # [64, 3]: all of them
        # [64, 3]: for each token of each answer, the row of the table from which it is drawn. That
        # is the number of the answer's beginning so far: 0 for none, 1 to 4 for one token, 5 to 20
        # for two. It is computed from the beginning that is a token shorter: behind beginning b, of
        # which there are four, symbol s gives 4 b + s + 1. The answer (2, 3, 0) has 0, then
        # 4 x 0 + 2 + 1 = 3, then 4 x 3 + 3 + 1 = 16.
        beginnings = [torch.zeros(len(self.answers), dtype=torch.int64)]
        for t in range(LENGTH - 1):
            beginnings.append(beginnings[t] * NUM_SYMBOLS + self.answers[:, t] + 1)
        self.beginnings = torch.stack(beginnings, 1)
        self.num_beginnings = int(self.beginnings.max()) + 1
        self.right = torch.randint(NUM_SYMBOLS, (NUM_PROMPTS, LENGTH), generator=self.rng)
        is_right = self.answers[None] == self.right[:, None]  # [prompts, 64, 3]
        self.rewards = is_right.float().mean(-1)  # [prompts, 64]: the share of right tokens
        groups = torch.arange(NUM_PROMPTS).repeat_interleave(NUM_ANSWERS)
        self.prompts = groups  # [32]: of each answer of a batch, its prompt, which is its group id

    def first_policy(self) -> torch.Tensor:
        """[prompts, beginnings, symbols] float32: logits to begin with.

        They are random, except for a liking of the right answers that grows from prompt to prompt.
        Prompt 0 is hard, prompt 3 is easy: a baseline that knows the prompt has something to do.
        """
        shape = (NUM_PROMPTS, self.num_beginnings, NUM_SYMBOLS)
        table = 0.7 * torch.randn(shape, generator=self.rng)
        for prompt in range(NUM_PROMPTS):
            for t in range(LENGTH):
                rows = self.beginnings[:, t].unique()
                table[prompt, rows, self.right[prompt, t]] += prompt
        return table

    def logp(self, table: torch.Tensor) -> torch.Tensor:
        """[prompts, 64, 3]: log-probabilities of each token of each answer."""
        return table.log_softmax(-1)[:, self.beginnings, self.answers]

    def true_gradient(self, table: torch.Tensor) -> torch.Tensor:
        """The gradient of J, which is the sum over all answers of probability times reward."""
        mine = table.clone().requires_grad_()
        p = self.logp(mine).sum(-1).exp()  # [prompts, 64]
        mean_reward = (p * self.rewards).sum(-1).mean()
        (gradient,) = torch.autograd.grad(mean_reward, mine)
        return gradient

    def divergence(self, old: torch.Tensor, new: torch.Tensor) -> float:
        """KL(old, new), exactly: 0 if the two policies are the same.

        It is the mean, over answers of the old policy, of log p old - log p new. With natural
        logarithms its unit is the nat. At 0.1 nats log p of an answer is less by 0.1, in the mean.
        """
        before = self.logp(old).sum(-1)  # [prompts, 64]
        after = self.logp(new).sum(-1)
        of_prompt = (before.exp() * (before - after)).sum(-1)
        return float(of_prompt.mean())

    def sample(self, table: torch.Tensor, num_batches: int) -> torch.Tensor:
        """[batches, 32] int64: sampled answers by their numbers, eight to each prompt."""
        p = self.logp(table).sum(-1).exp()
        found = torch.multinomial(
            p, num_batches * NUM_ANSWERS, replacement=True, generator=self.rng
        )
        by_batch = found.view(NUM_PROMPTS, num_batches, NUM_ANSWERS).transpose(0, 1)
        return by_batch.reshape(num_batches, -1)

    def as_sampled(
        self,
        answers: torch.Tensor,
        old: torch.Tensor,
        logp: torch.Tensor,
        baseline: str,
    ) -> Sampled:
        """What a trainer has of answers that `old` has sampled.

        answers: [..., 32] int64. logp: [..., 32, 3], under the policy of the trainer.
        """
        returns = self.rewards[self.prompts, answers][..., None]
        credit = credit_for(returns, self.prompts.expand_as(answers), baseline)
        number = torch.arange(answers.numel()).view(*answers.shape, 1)
        return Sampled(
            logp=logp,
            recorded=self.logp(old)[self.prompts, answers],
            near=logp.detach(),
            advantage=credit.advantage.expand_as(logp),
            answer=number.expand_as(logp),
        )

    def gradients(
        self,
        loss: str,
        baseline: str,
        old: torch.Tensor,
        now: torch.Tensor,
        num_batches: int,
    ) -> torch.Tensor:
        """[batches, parameters]: the gradients, uphill, of so many batches.

        Each is the one that a trainer whose policy is `now` computes from 32 answers of `old`.
        """
        answers = self.sample(old, num_batches)  # [batches, 32]
        # A copy of the table for each batch, so that one backward pass gives all gradients.
        tables = now.expand(num_batches, *now.shape).clone().requires_grad_()
        every = tables.log_softmax(-1)  # [batches, prompts, beginnings, symbols]
        # Of each token, its place in each of these dimensions. Together they pick [batches, 32, 3].
        batch = torch.arange(num_batches)[:, None, None]  # [batches, 1, 1]
        prompt = self.prompts[:, None]  # [32, 1]
        beginning = self.beginnings[answers]  # [batches, 32, 3]
        symbol = self.answers[answers]  # [batches, 32, 3]
        logp = every[batch, prompt, beginning, symbol]
        tokens = self.as_sampled(answers, old, logp, baseline)
        num_answers = answers.shape[1]
        # The sum over an answer's tokens, so that log p is that of the answer. The trainer divides
        # by the number of tokens with a signal instead: another length, the same direction.
        total = LOSSES[loss](tokens, USUAL_LIMITS).loss.sum() / num_answers
        (downhill,) = torch.autograd.grad(total, tables)
        return -downhill.flatten(1)

    def later_policy(self, table: torch.Tensor, num_steps: int) -> torch.Tensor:
        """What a trainer makes of a policy in so many steps along gradients of single batches."""
        for _ in range(num_steps):
            step = self.gradients("reinforce", "leave_one_out", table, table, 1)
            table = table + 0.7 * (step / step.norm()).view_as(table)
        return table

    def pushed_nats(self, loss: str, old: torch.Tensor, num_updates: int) -> float:
        """How far so many updates with one and the same batch take the policy away from `old`."""
        self.rng.manual_seed(self.seed)  # the same batch for all losses
        answers = self.sample(old, 1)
        table = old.clone().requires_grad_()
        optimizer = torch.optim.Adam([table], 0.1)
        for _ in range(num_updates):
            logp = self.logp(table)[self.prompts, answers]
            tokens = self.as_sampled(answers, old, logp, "group")
            # Before the first of these updates the policy was `old`, which is what was recorded.
            tokens = dataclasses.replace(tokens, near=tokens.recorded)
            LOSSES[loss](tokens, USUAL_LIMITS).loss.mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return self.divergence(old, table.detach())


@dataclass(frozen=True)
class EstimatorRow:
    """A loss with a baseline, beside the truth: tilt and noise, at lag 0 and 8 steps later."""

    loss: str
    baseline: str
    tilt: float
    noise: float
    tilt_at_a_lag: float
    noise_at_a_lag: float


NUM_BATCHES = 2000


def estimator_row(
    world: SmallWorld,
    loss: str,
    baseline: str,
    old: torch.Tensor,
    now: torch.Tensor,
) -> EstimatorRow:
    """Measures this loss and baseline on samples of `old`, for a trainer at `old` and at `now`.

    All rows of the table have the same samples, so what differs between them is the estimator.
    """
    world.rng.manual_seed(world.seed)
    tilt = []
    noise = []
    for policy in (old, now):
        gradients = world.gradients(loss, baseline, old, policy, NUM_BATCHES)
        mean = gradients.mean(0)
        truth = world.true_gradient(policy).flatten()
        tilt.append(1 - float(torch.cosine_similarity(mean, truth, dim=0)))
        squared = (gradients - mean).square().sum(1)  # [batches]: distance from the mean
        noise.append(float(squared.mean().sqrt() / mean.norm()))
    return EstimatorRow(
        loss=loss,
        baseline=baseline,
        tilt=tilt[0],
        noise=noise[0],
        tilt_at_a_lag=tilt[-1],
        noise_at_a_lag=noise[-1],
    )


ESTIMATORS = [
    ("reinforce", "none"),
    ("reinforce", "batch"),
    ("reinforce", "group"),
    ("reinforce", "leave_one_out"),
    ("ppo", "leave_one_out"),
    ("decoupled", "leave_one_out"),
    ("gspo", "leave_one_out"),
    ("cispo", "leave_one_out"),
    ("dppo", "leave_one_out"),
]


def largest_difference_at_lag_0(world: SmallWorld, table: torch.Tensor) -> float:
    """The largest difference of a loss's gradient from that of reinforce, on the same batch."""
    state = world.rng.get_state()
    of_reinforce = world.gradients("reinforce", "group", table, table, 1)
    largest = 0.0
    for loss in LOSSES:
        world.rng.set_state(state)  # `gradients` draws samples: the same ones for each loss
        gradient = world.gradients(loss, "group", table, table, 1)
        largest = max(largest, float((gradient - of_reinforce).abs().max()))
    return largest


def share_of_one_token(
    world: SmallWorld,
    table: torch.Tensor,
    loss: str,
    limits: Limits = USUAL_LIMITS,
) -> float:
    """One bad token was sampled with probability 0.000001. How much of a batch's gradient is its?

    The length of its own gradient, over that of the gradient of 1024 answers, all others of lag 0.
    """
    world.rng.manual_seed(world.seed)
    answers = world.sample(table, 32)  # [32, 32]
    mine = table.clone().requires_grad_()
    logp = world.logp(mine)[world.prompts, answers]  # [32, 32, 3]
    tokens = world.as_sampled(answers, table, logp, "group")
    is_bad = tokens.advantage < 0
    place = tuple(is_bad.nonzero()[0].tolist())  # of the first bad token
    recorded = tokens.recorded.clone()
    recorded[place] = math.log(1e-6)
    found = LOSSES[loss](dataclasses.replace(tokens, recorded=recorded), limits).loss
    (whole,) = torch.autograd.grad(found.sum(), mine, retain_graph=True)
    (alone,) = torch.autograd.grad(found[place], mine)
    return float(alone.norm() / whole.norm())


# -- measurement: of length ------------------------------------------------------------------------
# A task is paid for its three right letters wherever they stand in an answer, of at most
# twelve tokens. The longer the answer, the likelier they are in it, and nothing says that it could
# end when they are. The policy is a table again, with a logit for each prompt, place and symbol.

MOST_TOKENS = 12
NUM_LETTERS = 16  # and one more symbol, which ends an answer


@dataclass(frozen=True)
class RambleRow:
    """What 200 steps of RL make of the length of answers: means of the first and last 10."""

    penalty: float  # reward that a token beyond the fourth costs
    first_tokens: float
    last_tokens: float
    first_score: float  # share of the right letters that are in the answer
    last_score: float


def draw_answers(p: torch.Tensor, rng: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """[64, 12] each: a symbol for every place, and whether the answer had ended before it.

    p: [64, 12, symbols], probabilities.
    """
    drawn = torch.multinomial(p.flatten(0, 1), 1, generator=rng).view(p.shape[:2])
    is_end = drawn == NUM_LETTERS
    num_ends_before = is_end.cumsum(1) - is_end.long()
    return drawn, num_ends_before > 0


def ramble(penalty: float, seed: int) -> RambleRow:
    """Trains a policy on this task. penalty: as of --length-penalty."""
    rng = torch.Generator().manual_seed(seed)
    right = torch.stack([torch.randperm(NUM_LETTERS, generator=rng)[:3] for _ in range(8)])
    table = torch.zeros(8, MOST_TOKENS, NUM_LETTERS + 1)  # prompts, places, symbols
    table[:, :, NUM_LETTERS] = math.log(NUM_LETTERS / 4)  # at first an end has a probability of 0.2
    optimizer = torch.optim.Adam([table.requires_grad_()], 0.05)
    group_ids = torch.arange(8).repeat_interleave(8)
    lengths = []
    scores = []
    for _ in range(200):
        every = table.log_softmax(-1)[group_ids]  # [64, 12, symbols]
        drawn, has_ended = draw_answers(every.detach().exp(), rng)
        length = (~has_ended).sum(1, keepdim=True)  # [64, 1]
        letters = drawn.masked_fill(has_ended, -1)
        is_same = letters[:, :, None] == right[group_ids][:, None, :]  # [64, places, right ones]
        score = is_same.any(1).float().mean(1, keepdim=True)  # [64, 1]: share of 3 that is anywhere
        # An answer is one turn here, so its return is its reward, which is given to all its tokens.
        credit = credit_for(priced(score, length, penalty, num_free=4), group_ids)
        logp = every.gather(2, drawn[:, :, None]).squeeze(2)
        tokens = Sampled(
            logp=logp,
            recorded=logp.detach(),
            near=logp.detach(),
            advantage=credit.advantage.expand(-1, MOST_TOKENS),
            answer=torch.arange(64)[:, None].expand(-1, MOST_TOKENS),
        )
        loss = ppo_loss(tokens, USUAL_LIMITS).loss[~has_ended]
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
        lengths.append(float(length.float().mean()))
        scores.append(float(score.mean()))
    return RambleRow(
        penalty=penalty,
        first_tokens=statistics.fmean(lengths[:10]),
        last_tokens=statistics.fmean(lengths[-10:]),
        first_score=statistics.fmean(scores[:10]),
        last_score=statistics.fmean(scores[-10:]),
    )


def tell_share_of_one_token(report: Report, world: SmallWorld, table: torch.Tensor) -> None:
    """Reports what one token can do to a batch."""
    unbounded = dataclasses.replace(USUAL_LIMITS, most_back=math.inf)
    without = share_of_one_token(world, table, "ppo", unbounded)
    shares = {loss: share_of_one_token(world, table, loss) for loss in LOSSES}
    texts = [f"{loss} {show(found)}" for loss, found in shares.items()]
    report.say(
        "a bad token that was sampled with probability 0.000001, its share of a batch's gradient:",
        f"  ppo without a bound {show(without)}; with it:",
        f"  {', '.join(texts)}",
    )
    # Almost all of the gradient of 1024 answers; and at most a twentieth of it.
    report.check("share of one token in the gradient, ppo without a bound", without, ">", 0.9)
    report.check("the largest share with it, of all losses", max(shares.values()), "<=", 0.05)
    report.figure(share_without_bound=without)


def tell_tilt_at_a_lag(report: Report, rows: Mapping[tuple[str, str], EstimatorRow]) -> None:
    """Reports which losses take away tilt that the lag has made, and which add some.

    A ratio takes tilt away: it weighs samples as the present policy would draw them. A clip by the
    recorded probabilities may add some: tokens that the lag has moved far have no gradient, so the
    mean is over the other tokens alone, and need not point where the mean over all of them does.
    rows: by loss and baseline.
    """
    without = rows["reinforce", "leave_one_out"].tilt_at_a_lag
    less = []
    more = []
    for (loss, baseline), row in rows.items():
        if loss != "reinforce" and baseline == "leave_one_out":
            change = f"{loss} {show(row.tilt_at_a_lag / without)}"
            if row.tilt_at_a_lag < without:
                less.append(change)
            else:
                more.append(change)
    report.say(
        "tilt at a lag / that of reinforce, leave_one_out:",
        f"  less: {', '.join(less) or 'none'}; more: {', '.join(more) or 'none'}",
    )


def tell_length(report: Report, seed: int) -> None:
    """Reports what a price of length does."""
    report.say("paid for the right letters anywhere, without and with a price of length:")
    free = ramble(0.0, seed)
    costly = ramble(1 / MOST_TOKENS, seed)
    report.table([free, costly])
    ratio = costly.last_tokens / free.last_tokens
    report.check("tokens of an answer, with a price / without", ratio, "<=", 0.5)
    lost = free.last_score - costly.last_score
    report.check("share of right letters that the price costs", lost, "<=", 0.02)
    report.figure(length_with_price_over_without=ratio)


@stage(
    "the mean of the other answers as a baseline takes away noise and no direction; a ratio "
    "without a clip takes away some of the tilt that a lag makes; a clip bounds how far a batch "
    "can push, no token outweighs a batch, and a price keeps answers short",
    hint="write `ratio * 0 + 1`: the lag tilts the gradient as if nothing was done about it",
    mechanism="ratio",
)
async def demo_losses(report: Report, cfg: Config) -> None:
    """Holds each loss and baseline beside the true gradient, at lag 0 and at a lag of 8."""
    world = SmallWorld(cfg.seed)
    old = world.first_policy()
    # `old` samples, and `now` is trained: 8 steps later, so at a lag of 8.
    now = world.later_policy(old, num_steps=8)
    moved = show(world.divergence(old, now))
    report.say(
        f"all 64 answers to 4 prompts are known, and so is the true gradient; seed {cfg.seed}",
        f"at a lag of 8 steps the policy has moved by {moved} nats",
    )
    rows = []
    for loss, baseline in ESTIMATORS:
        rows.append(estimator_row(world, loss, baseline, old, now))
    report.table(rows)
    by_name = {(row.loss, row.baseline): row for row in rows}
    tell_tilt_at_a_lag(report, by_name)
    # What a clip is for: with the gradient of one batch alone, how far can updates go?
    pushed = {loss: world.pushed_nats(loss, old, 100) for loss in LOSSES}
    texts = [f"{loss} {show(nats)}" for loss, nats in pushed.items()]
    report.say("100 updates with one batch move it by so many nats:", f"  {', '.join(texts)}")
    without = by_name["reinforce", "none"]
    group = by_name["reinforce", "group"]
    left_out = by_name["reinforce", "leave_one_out"]
    cispo = by_name["cispo", "leave_one_out"]
    report.figure(
        noise_none=without.noise,
        noise_leave_one_out=left_out.noise,
        tilt_group=group.tilt,
        tilt_lag_reinforce=left_out.tilt_at_a_lag,
        tilt_lag_cispo=cispo.tilt_at_a_lag,
        pushed_reinforce_nats=pushed["reinforce"],
        pushed_ppo_nats=pushed["ppo"],
    )
    difference = largest_difference_at_lag_0(world, old)
    report.check("lag 0: largest difference of a gradient from reinforce", difference, "<", 1e-6)
    # With and without a baseline the mean should point where the truth points, but for chance:
    # the mean of n gradients misses the true one by about noise / sqrt(n) of its length, so that is
    # about the angle between both. 1 - cosine of a small angle is half its square, so tilt by
    # chance is noise**2 / (2 n). Much more than that would be a real tilt.
    over_chance = 0.0
    for row in (without, left_out):
        by_chance = row.noise**2 / (2 * NUM_BATCHES)
        over_chance = max(over_chance, row.tilt / by_chance)
    what = "lag 0: tilt, none and leave_one_out / tilt by chance"
    report.check(what, over_chance, "<", 3)  # by chance it is 1, give or take
    quieter = left_out.noise / without.noise
    report.check("lag 0: noise with a baseline / without", quieter, "<", 0.8)
    # With one --seed each of these numbers is the same in every run on one machine. The limits
    # leave room for other seeds.
    corrected = cispo.tilt_at_a_lag / left_out.tilt_at_a_lag
    report.check("lag 8: tilt with a ratio / without", corrected, "<", 0.9)
    bounded = pushed["ppo"] / pushed["reinforce"]
    report.check("how far 100 updates push, with a clip / without", bounded, "<", 0.2)
    tell_share_of_one_token(report, world, old)
    tell_length(report, cfg.seed)
    # You can now say what a loss does with a sample that is old, and what that costs.


# == 11. SYNC RL ===================================================================================
# Problem. The parts of RL run in different programs: sampling, judging, updating. They need each
#   other's results in the right order, with the right weights, for thousands of steps.
# Rule. One loop, one thing at a time: pull, sample, judge, step, publish. Generators pull before
#   they sample, so every sample has lag 0. The reward function is somebody else's code: it runs in
#   judges, which may be killed, and "not judged" is not a reward of 0. All books of a run have one
#   owner, the Ledger: where is every group that was started?
# Cost. Each side waits while the other works (section 13).
# Not here. What happens when the trainer is lost (section 12).
# Source. GRPO (Shao 2024); FSDP2 for trainers of several ranks, Megatron-LM for generators of such.
#
# A step of the loop. On the left, who does it:
#
#     main process   1. draws 16 prompts; their groups count as started in the Ledger
#     generators     2. pull the newest weights, and sample 8 answers to each prompt
#     judges         3. give each answer its rewards
#     main process   4. joins all of it to a batch
#     trainer        5. scores the batch, makes one update, and publishes the new weights
#     main process   6. counts the groups as trained, and prints a line now and then
#
# The main process runs plain objects: a Cluster (11h), which has the actors and calls them; a Run
# (11i), which has the Ledger; and a Training (11j), which does the above with both.

# -- 11a. The warm start ---------------------------------------------------------------------------
# (You can skip this part at a first reading: the heart of the section is 11b. What it uses of
# judges, JudgeReply, request_of and rewards_of, stands in 11g.)
#
# From random weights RL has nothing to make likelier: all answers are wrong. So the tiny policy
# first takes supervised steps, which show it right answers, until it is bad but not hopeless. A
# model of your own takes as many as --sft-steps says, and a pretrained one may need none.
#
# A supervised step makes right answers likelier. That is what an update of RL does with answers
# that somebody else has given, each with a reward of 1: its loss is the mean of -1 * log p over
# their tokens. So a right answer is put into the same table as a sampled one, and what trains on
# the one trains on the other.

WARM_BATCH = 64  # conversations per supervised step
WARM_DRAWN = 5  # batches that are drawn at once: it takes less time to tokenize many texts together
WARM_RATE = 2e-3  # until the first right answers
WARM_LAST_RATE = 6e-4  # after them: slow, so that it does not jump past the place to stop at
WARM_NOISE = 0.1  # share of letters that are random, or the policy would become too certain
WARM_UNTIL = 0.11  # of validation prompts right: much room to learn, and something to learn from
WARM_STEPS = 1000  # then the task is too hard for it


def warm_start(policy: Policy, advance: Callable[[], None] = lambda: None) -> None:
    """Trains the policy on mostly right answers. RuntimeError if the task is too hard for it.

    advance: is called after every step, so that whoever owns this process sees that it gets on.
    """
    # Its prompts are drawn apart from those of RL, whose samplers have seeds from 0 on.
    sampler = Sampler(policy.cfg.task, seed=-1 - policy.cfg.seed)
    batches = warm_batches(policy, sampler)
    optimizer = torch.optim.AdamW(policy.model.parameters(), WARM_RATE, weight_decay=0.0)
    share = 0.0
    look_every = 3  # steps
    looked_at = sampler.validation[:WARM_BATCH]  # at first few: enough to see that the end is near
    for step in range(WARM_STEPS):
        logp = trainer_logprobs(policy.model, next(batches))
        (-logp.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        advance()
        if step % look_every == 0:
            share = exact_share(policy, looked_at)
        if share > 0 and look_every > 1:
            look_every = 1  # from here on it may rise by 0.05 a step
            looked_at = sampler.validation
            share = exact_share(policy, looked_at)
            for group in optimizer.param_groups:
                group.update(lr=WARM_LAST_RATE)
        if share >= WARM_UNTIL:  # mechanism: warm start
            return
    errors = judged_alone(policy, sampler.validation).errors
    why = f"; of those that could not be judged the first: {errors[0]}" if errors else ""
    told = f"warm start: {share:.2f} exact after {WARM_STEPS} steps, not {WARM_UNTIL}"
    raise RuntimeError(told + why)


def warm_batches(policy: Policy, sampler: Sampler) -> Iterator[Tokens]:
    """What the warm start learns from, packed, a batch at a time and without end."""
    prompts = sampler.stream()
    rng = random.Random(policy.cfg.seed)
    while True:
        drawn = list(itertools.islice(prompts, WARM_DRAWN * WARM_BATCH))
        answers = right_answers(policy, drawn, rng, WARM_NOISE)
        for first in range(0, len(drawn), WARM_BATCH):
            rows = list(range(first, first + WARM_BATCH))
            tokens = answers.select(rows).tokens.without_empty_columns()
            yield tokens.each(lambda tensor: tensor.to(policy.cfg.device))


def right_answers(
    policy: Policy,
    prompts: list[Prompt],
    rng: random.Random | None = None,
    noise: float = 0.0,
) -> Rollout:
    """Conversations in which the policy says what is right, as if it had sampled that.

    rng, noise: draws this share of the letters at random. Of each episode the reward is 1.
    """
    episodes = []
    for prompt in prompts:
        episodes.append(Episode(policy, prompt, Session(policy.task, prompt.turns)))
    for turn in range(policy.task.num_turns):
        texts = [policy.in_template(prompt.turns[turn].user, turn == 0) for prompt in prompts]
        said = []
        for prompt in prompts:
            said.append(with_noise(prompt.turns[turn].right, policy.task.letters, rng, noise))
        answers = policy.ids_of([text + policy.tokenizer.eos_token for text in said])
        heard = policy.ids_of(texts)
        for episode, words, text, ids in zip(episodes, heard, said, answers, strict=True):
            if not episode.is_over:
                episode.hear(words)
            episode.answer(text, ids)
    rewards = torch.zeros(len(prompts), policy.task.num_turns)
    rewards[:, -1] = 1.0  # the sum of the rewards from a turn on is then 1 for each turn
    return dataclasses.replace(rollout_of(episodes), rewards=rewards)


def with_noise(text: str, letters: str, rng: random.Random | None, noise: float) -> str:
    """The text, with this share of its letters drawn at random. rng: None for the text itself."""
    if rng is None:
        return text
    changed = ""
    for letter in text:
        is_random = rng.random() < noise
        changed += rng.choice(letters) if is_random else letter
    return changed


def supervised(cfg: Config) -> Config:
    """The Config with which a step on right answers is a supervised one."""
    return dataclasses.replace(
        cfg,
        steps=cfg.sft_steps,
        lr=cfg.sft_lr,
        loss="reinforce",
        baseline="none",  # all are right, so a comparison of them would leave nothing
        passes=1,
        kl=0.0,
        entropy=0.0,
        temperature=1.0,
        length_penalty=0.0,
    )


def exact_share(policy: Policy, prompts: list[Prompt]) -> float:
    """The share of these prompts that the policy answers exactly, when it takes the likeliest.

    What cannot be judged is not exact.
    """
    reply = judged_alone(policy, prompts)
    return sum(is_exact(sum(of_turns)) for of_turns in reply.rewards) / len(prompts)


def judged_alone(policy: Policy, prompts: list[Prompt]) -> JudgeReply:
    """The rewards of the likeliest answers, without generators and judges.

    For a trainer in its warm start. There a reward function that hangs or dies takes the trainer
    along.
    """
    rollout = generate(policy, prompts, group_size=1)
    if rollout.rewards.isfinite().all():  # the sessions know them
        return JudgeReply(rewards=rollout.rewards.tolist(), errors=[])
    judging = rewards_of(policy.task, request_of(rollout))
    # `judging` is a coroutine, which needs an event loop. The thread of the caller has one, but
    # that is just running the caller: it could not go on with anything else before this returns.
    # So another thread gets a loop of its own, and the caller waits for that thread.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, judging).result()


def is_exact(reward: float) -> bool:
    """Is all of an episode right? Its rewards then add up to 1, but for rounding."""
    return reward > 0.999


# -- 11b. One update -------------------------------------------------------------------------------
# The heart of the file is TrainState.step and _backward: score the batch, compare with what was
# recorded, and make the better answers likelier. Around that are three things: parts, because a
# large batch does not fit into memory at once; ranks; and numbers that tell how it went.
#
#     batch of 128 episodes --parts_of--> part 0, part 1, ...   each a forward and a backward pass
#     each part: score_part -> log-probabilities of its tokens -> a loss (section 10) -> gradient
#     all parts: clip the gradient, wait for the copy of the last version, update

MAX_GRAD_NORM = 1.0  # a longer gradient is shortened to this: one odd batch must not do much harm
MAX_LOGITS = 1 << 27  # that a forward pass of the trainer may make: half a GiB in fp32
# How far generator and trainer may differ, in k3, for they round differently. In fp32 the tiny
# policy stays below 1e-10, which section 9 checks; this limit is for any model, and the sums of a
# large one are longer.
MAX_K3 = {"float32": 1e-6, "bfloat16": 1e-2}


@dataclass(frozen=True)
class StepStats:
    """What a training step knows about itself.

    Means are over the sampled tokens of the batch. With --passes, which trains on a batch several
    times, some are of one pass and some of all:

        before the first update    mismatch_k3, ess, clipped_at_lag_0
        of the last pass           loss, entropy, clipped, kl, grad_norm
        of all passes              skipped, stall_s
    """

    # Of the weights after the step.
    version: int
    # Mean over episodes of the sum of their turns, mostly 0 to 1. It should rise, unsteadily.
    reward: float
    # In versions: 0 if the batch was sampled by the weights that this step begins with.
    lag_mean: float
    lag_max: int
    # Says nothing about learning (section 10).
    loss: float
    # k3 of recorded and recomputed log-probabilities, over tokens of lag 0; None: there are none.
    # Above MAX_K3, which depends on --dtype, they disagree, and what is learned is wrong.
    mismatch_k3: float | None
    # Effective sample size, as a share: 1 if all tokens weigh the same, near 0 if a few of them
    # have all the weight, as when samples are too old. A mean over tokens with weights w is as
    # noisy as one over (sum of w)**2 / sum of w**2 tokens of equal weight. Divided by the number of
    # tokens, that is (mean of w)**2 / mean of w**2.
    ess: float
    # Of the choice of a token, in nats. It falls as the policy becomes certain; at 0 there is
    # nothing left to compare.
    entropy: float
    # Of the tokens with an advantage, the share that had moved too far, and so had no gradient.
    clipped: float
    # The same, of those of lag 0, before the first update: what rounding alone has moved. None:
    # there were none.
    clipped_at_lag_0: float | None
    # Share of episodes without a signal in any turn: they and those with which they were compared
    # were all alike, or the context cut them. Of these there is nothing to learn.
    no_signal: float
    # Divergence from the policy before RL, nats per token; 0 without --kl.
    kl: float
    # The length of the gradient before it was clipped.
    grad_norm: float
    # Sampled tokens in the batch.
    num_tokens: int
    # Updates left out because that length was not finite.
    skipped: int
    # Seconds for which the update waited for copies of the version before.
    stall_s: float
    # Seconds of the whole step.
    step_s: float
    # These two are of a critic (section 14); None: there is none. The share of the variance of
    # returns that it foresaw, before it trained on the batch: 1 is all, 0 is as good as a constant.
    explained_variance: float | None = None
    # What it minimises: half the mean square of its errors, in its last pass over the batch.
    value_loss: float | None = None


@dataclass(frozen=True)
class Valued(Rollout):
    """A batch of which it is known how much better than expected each token was.

    The advantages come from a critic (section 14); those of other batches from `credit_for`.
    """

    advantage: torch.Tensor  # [B, T] float32; it means nothing where no token was sampled


@dataclass(frozen=True)
class Part:
    """Rows of a batch for one forward pass, with N sampled tokens."""

    ids: torch.Tensor  # [b, t] int64, packed
    chosen: torch.Tensor  # [b, t - 1] bool: where the next token was sampled
    recorded: torch.Tensor  # [N] float32, see section 10
    advantage: torch.Tensor  # [N] float32
    has_signal: torch.Tensor  # [N] bool, as in Credit
    answer: torch.Tensor  # [N] int64, as in Sampled: each turn of each row is an answer
    is_fresh: torch.Tensor  # [N] bool: of lag 0


@dataclass(frozen=True)
class Work:
    """A batch, as this rank works on it."""

    parts: list[Part]
    num_tokens: int  # sampled, in the parts of all ranks
    num_with_signal: int  # of these
    no_signal: float  # as in StepStats

    def objective(self, cfg: Config, part: Part, found: TokenLoss, for_all: torch.Tensor) -> Any:
        """What a part adds to the objective, which an update makes smaller: a scalar.

        for_all: [N], what each token adds, with or without a signal: the terms for entropy and
        divergence. The loss is a mean over the tokens with a signal. If its sum was divided by the
        number of all tokens, steps would get shorter as more and more groups have only right
        answers, and so no signal.
        """
        mean = (found.loss * part.has_signal).sum() / self.num_with_signal
        mean = mean + for_all.sum() / self.num_tokens
        # These are sums over the tokens of this rank, divided by the numbers of those of all ranks.
        # So the gradient of the batch is the sum of what the ranks find. FSDP takes their mean
        # instead, which is that sum divided by the number of ranks: this takes it back.
        return mean * cfg.trainers


class TrainState:
    """The weights in training and all that an update needs.

    It is no actor, so tests run it in their own process; Trainer is the actor around it. Weights,
    gradients and moments are in fp32, whatever --dtype says: a change of a millionth is lost when
    it is added to a bf16 number. A moment is what AdamW remembers of the gradients so far. With
    several ranks each has a part of every weight, gradient and moment (FSDP2, fully sharded data
    parallelism), and scores a part of each batch.
    """

    def __init__(
        self,
        cfg: Config,
        policy: Policy,
        rank: int = 0,
        meeting_place: str = "",
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """policy: with fp32 weights; empty on all ranks but 0, which get theirs from rank 0.

        meeting_place: an unnamed_file for the process group, if `needs_group` asks for one. Then
        all ranks call this at once. advance: is called after every part of a batch, as in
        `warm_start`.
        """
        self.cfg = cfg
        self.advance = advance
        self.model = policy.model
        self.rank = rank
        self.version = -1  # of the weights; 0 is before RL
        # With --kl: a frozen copy of the policy before RL, to stay near.
        self.reference: Any = None
        if cfg.kl:
            self.reference = copy.deepcopy(self.model).requires_grad_(False)
        if cfg.recompute:
            compute_layers_again(self.model)
        if needs_group(cfg):
            form_group(meeting_place, rank, cfg.trainers)
            for model in (self.model, self.reference):
                if model is not None:
                    give_to_fsdp(model, cfg, rank)
        self.prepare_optimizer(cfg)

    def prepare_optimizer(self, cfg: Config) -> None:
        """Makes a fresh optimizer and schedule, for a run with this Config."""
        self.cfg = as_on(self.cfg, cfg)  # the run's Config, but for this rank's own device
        assert not cfg.kl or self.reference is not None, "it began without --kl: no reference"
        self.model.zero_grad()  # a step that raised may have left a part of a gradient
        self.entropy_bonus = entropy_bonus(cfg)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            learning_rate(cfg),
            weight_decay=0.0,
            fused=True,
        )
        share = functools.partial(share_of_rate, cfg)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, share)

    def count_on(self, version: int) -> None:
        """Counts on after the weights of `version` were loaded: its own version never goes back.

        That happens when a run begins, and when one goes back to a checkpoint (section 12). Readers
        of an arena refuse a version that goes back. So a trainer at 57 that becomes what it was at
        50 is at 58 then.
        """
        self.version = max(self.version + 1, version)

    def step(self, batch: Rollout, wait_for_copy: Callable[[], float]) -> StepStats:
        """Trains on a batch. wait_for_copy: returns when the weights may change: seconds waited."""
        start = time.monotonic()
        work = work_of(self, batch)
        near: list[torch.Tensor] | None = None  # of each part, before the first update
        means: list[dict[str, float]] = []  # of each pass
        grad_norm = 0.0
        stall_s = 0.0
        num_skipped = 0
        for _ in range(self.cfg.passes):
            # 1. The gradient of all parts. The weights are read here, and the copy reads them, too.
            mean, logps = self._backward(work, near)
            means.append(mean)
            near = near or logps
            grad_norm = clip_gradient(self.model)
            # 2. The update: when the copy of the last version is complete, and not before.
            stall_s += wait_for_copy()
            num_skipped += not self._update(grad_norm)
        self.schedule.step()  # after a skipped update too: what is planned is a number of steps
        lag = (self.version - batch.tokens.versions) * batch.sampled()  # [B, T]
        self.version += 1
        return StepStats(
            version=self.version,
            reward=float(batch.rewards.sum(1).mean()),
            lag_mean=int(lag.sum()) / work.num_tokens,
            lag_max=int(lag.max()),
            loss=share_of(means[-1], "loss", "with_signal") or 0.0,
            mismatch_k3=share_of(means[0], "fresh_k3", "fresh"),
            ess=means[0]["weight"] ** 2 / max(means[0]["weight_squared"], 1e-9),
            entropy=means[-1]["entropy"],
            clipped=share_of(means[-1], "outside", "pushed") or 0.0,
            clipped_at_lag_0=share_of(means[0], "fresh_outside", "fresh_pushed"),
            no_signal=work.no_signal,
            kl=means[-1]["kl"],
            grad_norm=grad_norm,
            num_tokens=work.num_tokens,
            skipped=num_skipped,
            stall_s=stall_s,
            step_s=since(start),
        )

    def _update(self, grad_norm: float) -> bool:
        """Changes the weights. False: it has not, because the gradient was not finite."""
        is_finite = math.isfinite(grad_norm)
        if is_finite:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return is_finite

    def _backward(
        self,
        work: Work,
        near: list[torch.Tensor] | None,
    ) -> tuple[dict[str, float], list[torch.Tensor]]:
        """Adds up the gradient of all parts.

        near: of each part, what the first pass over the batch found; None: this is the first.
        Returns two things: by name, the mean over the sampled tokens of all ranks of entropy, of kl
        and of each column of columns_for_log; and the log-probabilities of each part, for `near`.
        """
        sums: dict[str, float] = collections.defaultdict(float)
        logps = []
        for i, part in enumerate(work.parts):
            # What was recorded is never recomputed here. If it was, lag and errors would be gone
            # from the comparison, and nobody would see them.
            logp, entropy = score_part(self.model, part, self.entropy_bonus, self.cfg.temperature)
            logps.append(logp.detach())
            tokens = Sampled(
                logp=logp,
                recorded=part.recorded,
                near=near[i] if near else logps[i],
                advantage=part.advantage,
                answer=part.answer,
            )
            found = LOSSES[self.cfg.loss](tokens, limits_of(self.cfg))
            reference = self.reference if self.cfg.kl else None  # supervised steps have kl 0
            kl = divergence(reference, logp, part, self.cfg.temperature)
            for_all = -self.entropy_bonus * entropy  # [N]
            for_all = for_all + self.cfg.kl * kl  # mechanism: divergence
            work.objective(self.cfg, part, found, for_all).backward()
            columns = columns_for_log(tokens, found, part)
            columns.update(entropy=entropy, kl=kl)
            for name, column in columns.items():
                sums[name] += float(column.detach().double().sum())
            self.advance()
        return self._means_over_ranks(sums, work.num_tokens), logps

    def _means_over_ranks(self, sums: dict[str, float], num_tokens: int) -> dict[str, float]:
        """sums: over the tokens of this rank, by name; the same names on all ranks."""
        values = torch.tensor(list(sums.values()), dtype=torch.float64)
        if self.cfg.trainers > 1:
            torch.distributed.all_reduce(values)  # adds up those of all ranks
        means = (values / num_tokens).tolist()
        return dict(zip(sums, means, strict=True))


def clip_gradient(model: Any) -> float:
    """Shortens the gradient to MAX_GRAD_NORM. Returns how long it was."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    is_sharded = hasattr(norm, "full_tensor")  # with several ranks it is a DTensor
    return float(norm.full_tensor() if is_sharded else norm)


def divergence(
    reference: Any,
    logp: torch.Tensor,
    part: Part,
    temperature: float,
) -> torch.Tensor:
    """[N]: how far each token has moved from the reference, a model; 0 if that is None.

    It is k2, half the square of d = log p - log q, where q is the reference. As a loss it has the
    right gradient, which k1 and k3, good as estimates, have not. (`k3` of section 9 has log q -
    log p as its d: the same formula, with the sign of d turned round.) The KL divergence is the sum
    of p d. Its gradient is the sum of (grad p) d and p (grad d). The second of these is p times
    grad log p, which is grad p, and has the sum 0. The first is p d grad log p: so the gradient is
    the mean of d grad log p over samples.
    Now take the gradients of the three, with samples held fixed (a test compares them):

        k1 = d                   grad log p                   its mean is 0: it pulls nowhere
        k2 = d**2 / 2            d grad log p                 right
        k3 = exp(-d) - 1 + d     (1 - q / p) grad log p       that of KL(q, p), not of KL(p, q)

    All that is so for tokens of lag 0. Older ones were drawn from an older policy, and are not
    weighted here: then k2 still pulls each token towards the reference, by as much as it has moved
    away, but what is pulled most is what the older policy said most often.
    """
    if reference is None:
        return 0 * logp
    reference_logp, _ = score_part(reference, part, 0.0, temperature)
    return (logp - reference_logp) ** 2 / 2


# -- 11c. A batch in parts -------------------------------------------------------------------------
# What TrainState works on. Credit is given first, over the whole batch: answers are compared with
# each other, wherever they will be scored. Then the rows are dealt out. By example, with two ranks
# and two forward passes on each:
#
#     tokens of 8 rows, longest first    12  11   9   8   6   5   5   3
#     rank 0                             12       9     | 6       5        part 0 | part 1
#     rank 1                                 11       8 |     5       3    part 0 | part 1


def returns_of(cfg: Config, batch: Rollout) -> torch.Tensor:
    """[B, turns]: the sum of the rewards from a turn on, in which long turns have cost something.

    A turn is to be praised or blamed for what comes after it, too: rewards 0.2, 0.5 of two turns
    make returns 0.7, 0.5. Long turns cost something only here, in what is learned from: the rewards
    that are shown, and whether an answer is exact, are those of the task.
    """
    rewards = priced(batch.rewards, batch.num_per_turn(), cfg.length_penalty, cfg.free_tokens)
    return rewards.flip(1).cumsum(1).flip(1)  # flipped, added up from the left, and flipped back


def credit_of(cfg: Config, batch: Rollout) -> Credit:
    """What each token of a batch is praised or blamed for: [B, T]; elsewhere it means nothing."""
    if isinstance(batch, Valued):
        return Credit(advantage=batch.advantage, has_signal=batch.sampled())
    # A row that was cut by the context has no sampled token at all.
    was_had = batch.num_per_turn() > 0  # mechanism: turns that were had
    of_turns = credit_for(returns_of(cfg, batch), batch.group_ids, cfg.baseline, was_had)
    # Each token has the credit of its turn. Turns count from 1; where no token was sampled this
    # takes the first turn.
    turn = (batch.tokens.turn_ids - 1).clamp(min=0)
    return Credit(
        advantage=of_turns.advantage.gather(1, turn),
        has_signal=of_turns.has_signal.gather(1, turn) & batch.sampled(),
    )


def work_of(state: TrainState, batch: Rollout) -> Work:
    """What there is to do with a batch."""
    assert isinstance(batch, Valued) == has_critic(state.cfg), "has a critic seen the batch?"
    credit = credit_of(state.cfg, batch)
    return Work(
        parts=list(parts_of(state, batch, credit)),
        num_tokens=max(1, int(batch.sampled().sum())),
        num_with_signal=max(1, int(credit.has_signal.sum())),
        no_signal=1 - float(credit.has_signal.any(1).float().mean()),
    )


def rows_of_parts(
    cfg: Config, rank: int, batch: Rollout, vocab_size: int
) -> Sequence[torch.Tensor]:
    """The rows that this rank scores, cut into parts: for each forward pass the numbers of some.

    There are as many parts as it takes for each to make about MAX_LOGITS, but no more than this
    rank has rows. The batch has at least a row per rank.
    """
    tokens = batch.tokens
    # Longest rows first, dealt out to the ranks like cards, so that all have as much to do.
    longest_first = tokens.mask.sum(1).argsort(descending=True, stable=True)
    mine = longest_first[rank :: cfg.trainers]
    # As many parts on every rank, because FSDP gathers weights with all ranks at once and one rank
    # would wait for ever. So this counts the whole batch, holes included, which all ranks have.
    num_logits = tokens.ids.numel() * vocab_size // cfg.trainers
    num_parts = math.ceil(num_logits / MAX_LOGITS)
    # No part may be empty: each rank has so many rows at least (check_numbers sees to that), and
    # tensor_split deals them evenly.
    num_parts = min(num_parts, len(longest_first) // cfg.trainers)
    return mine.tensor_split(num_parts)


def parts_of(state: TrainState, batch: Rollout, credit: Credit) -> Iterator[Part]:
    """What this rank scores of a batch. credit: [B, T], of its tokens."""
    cfg = state.cfg
    num_turns = batch.rewards.shape[1]
    for rows in rows_of_parts(cfg, state.rank, batch, state.model.config.vocab_size):
        # Rows of a part are about as long as each other, so it has few holes. (rows=rows: so the
        # lambda keeps the rows of this round of the loop, whenever it is called.)
        of_rows = batch.tokens.each(lambda tensor, rows=rows: tensor[rows]).without_empty_columns()
        of_rows = of_rows.each(lambda tensor: tensor.to(cfg.device))
        width = of_rows.ids.shape[1]
        advantage = credit.advantage[rows, 1:width].to(cfg.device)
        has_signal = credit.has_signal[rows, 1:width].to(cfg.device)
        first_answer = torch.arange(len(rows), device=cfg.device)[:, None] * num_turns  # [b, 1]
        # [b, t - 1]: row * num_turns + turn, both from 0 (turn_ids count from 1).
        answer = first_answer + of_rows.turn_ids[:, 1:] - 1
        chosen = of_rows.is_sampled()[:, 1:]  # the token of column t is predicted at t - 1
        yield Part(
            ids=of_rows.ids,
            chosen=chosen,
            recorded=of_rows.logprobs[:, 1:][chosen],
            advantage=advantage[chosen],
            has_signal=has_signal[chosen],
            answer=answer[chosen],
            is_fresh=of_rows.versions[:, 1:][chosen] == state.version,
        )


def score_part(
    model: Any,
    part: Part,
    entropy_bonus: float,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the sampled tokens, [N] each: log-probability, and entropy of the choice in nats.

    Both at this temperature. Without a bonus for it the entropy has no gradient, which saves
    memory.
    """
    every = score_tokens(model, part.ids, part.chosen, temperature)  # [N, vocabulary]
    sampled_ids = part.ids[:, 1:][part.chosen]  # [N]
    logp = every.gather(1, sampled_ids[:, None]).squeeze(1)
    if not entropy_bonus:
        every = every.detach()
    # Where a probability is 0 its logarithm is -inf, and their product must be 0.
    surprise = -every.clamp(min=-100)
    entropy = (every.exp() * surprise).sum(-1)
    return logp, entropy


def columns_for_log(
    tokens: Sampled,
    found: TokenLoss,
    part: Part,
) -> dict[str, torch.Tensor]:
    """[N] each, by name: what the log tells of tokens. Nothing of it goes into the gradient."""
    weight = ratio_of(tokens.near, tokens.recorded)  # how much likelier a token is by now
    is_pushed = tokens.advantage != 0
    return {
        "loss": found.loss * part.has_signal,
        "with_signal": part.has_signal,
        "pushed": is_pushed,
        "outside": found.is_outside & is_pushed,
        "fresh_pushed": part.is_fresh & is_pushed,
        "fresh_outside": found.is_outside & part.is_fresh & is_pushed,
        "fresh": part.is_fresh,
        "fresh_k3": k3(tokens.recorded, tokens.near) * part.is_fresh,
        "weight": weight,
        "weight_squared": weight**2,
    }


def share_of(means: dict[str, float], counted: str, among: str) -> float | None:
    """The mean of a column over the tokens that another one counts. None: there are none.

    means: over all tokens. By example, if half of all are of lag 0, "fresh" is 0.5, and "fresh_k3",
    to which the others add nothing, is half of the mean over those of lag 0.
    """
    return means[counted] / means[among] if means[among] else None


# -- measurement: of both programs, before anything is trained -------------------------------------


@dataclass(frozen=True)
class Examination:
    """What must hold at lag 0, before anything is trained, or nothing is learned.

    mean_k3, off_from_1 and num_without_gradient are of some rows of the batch, which is enough; the
    others are of all.
    """

    # k3 of recorded and recomputed log-probabilities: do generator and trainer agree?
    mean_k3: float
    # The largest distance from 1 that the probabilities of a next token add up to.
    off_from_1: float
    # Recorded log-probabilities above 0, which none can be.
    num_above_0: int
    # Parameters to which no gradient comes: a part of the model would not learn.
    num_without_gradient: int
    # The largest sum of a group's advantages, with the baseline `group`: 0 if groups are found.
    group_sum: float
    # Different answers in the batch: if all are alike there is nothing to compare.
    num_different: int


def examine(state: TrainState, batch: Rollout) -> Examination:
    """Scores the longest rows of a batch, as many as one forward pass takes; changes no weight."""
    part = next(parts_of(state, batch, credit_of(state.cfg, batch)))
    logp, _ = score_part(state.model, part, 0.0, state.cfg.temperature)
    logp.sum().backward()
    num_without = 0
    for parameter in state.model.parameters():
        has_gradient = parameter.grad is not None and bool(parameter.grad.any())
        num_without += not has_gradient
    state.optimizer.zero_grad()
    with torch.no_grad():
        every = score_tokens(state.model, part.ids, part.chosen, state.cfg.temperature)
    same_group = batch.group_ids[:, None] == batch.group_ids  # [B, B]
    group_sums = same_group.float() @ credit_for(batch.rewards, batch.group_ids).advantage
    return Examination(
        mean_k3=float(k3(part.recorded, logp).mean()),
        off_from_1=float((every.exp().sum(1) - 1).abs().max()),
        num_above_0=int((batch.tokens.logprobs > 0).sum()),
        num_without_gradient=num_without,
        group_sum=float(group_sums.abs().max()),
        num_different=len({tuple(said) for said in batch.said}),
    )


# -- plumbing: what flags leave open ---------------------------------------------------------------
# (You can skip this part, the next one and 11d, and go on with the workers, 11e.)


def max_generators(cfg: Config) -> int:
    """How many generators there can be at the same time: --max-generators.

    Each may hold a slot of the arena, and these exist from the start, for the first write to a page
    costs several copies (DOCS 2). So room costs memory: without --max-generators there is room for
    one more than --generators.
    """
    return cfg.max_generators or cfg.generators + 1


def trainers_per_host(cfg: Config) -> int:
    """How many ranks of the trainer are on each of its hosts."""
    return cfg.trainers // cfg.trainer_hosts


def generators_per_host(cfg: Config) -> int:
    """How many generators a host has at most: they are placed on the hosts in turn."""
    # Without --hosts the split makes [""]: one host, this machine. (The same holds below.)
    return math.ceil(max_generators(cfg) / len(cfg.hosts.split(",")))


# Each relay, the reader of another host (section 16), may lease so many slots of the trainer's
# arena at a time: the one that it reads, and the one that it has tried last.
LEASES_PER_RELAY = 2


def num_readers_of_trainer(cfg: Config) -> int:
    """How many leases the trainer's arena has: of the generators of its host, and of relays."""
    num_relays = len(cfg.hosts.split(",")) - cfg.trainer_hosts
    # All of them, or as many as --relay-fanout allows: then the others read from relays.
    num_here = min(num_relays, cfg.relay_fanout or num_relays)
    return generators_per_host(cfg) + LEASES_PER_RELAY * num_here


def has_critic(cfg: Config) -> bool:
    """Is there a critic beside the trainer (section 14)?"""
    return cfg.baseline == "critic"


def device_of(cfg: Config, place: Place, rank: int) -> str:
    """On what device a worker computes: "cpu", or "cuda:0" and so on.

    rank: among those of this host. ValueError: there are too few. Of the GPUs of a host,

        trainer ranks        have the first ones, one each
        critic ranks (14)    have the next ones, if then one is left; else those of the trainer
        all others           share those that are left, in turn; if none is, all of them

    With two ranks each of trainer and critic, 8 GPUs are 0 1, 2 3, and 4 to 7 for the generators; 4
    GPUs are 0 1, 0 1, and 2 3. On a host without a trainer generators share all. (The others are
    generators, and the workers of a reward model.)
    """
    if cfg.device == "cpu":
        return "cpu"
    every = [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    num_trainers = trainers_per_host(cfg)
    is_apart = len(every) > 2 * num_trainers  # a critic has GPUs of its own
    if place.service in ("trainer", "critic"):
        number = rank + (num_trainers if place.service == "critic" and is_apart else 0)
        if number >= len(every):
            raise ValueError(f"{len(every)} GPUs, each trainer needs one")
        return every[number]
    if not every:
        raise ValueError("no GPU on this host")
    num_taken = num_trainers * (2 if has_critic(cfg) and is_apart else 1)
    others = every[num_taken:] if place.host < cfg.trainer_hosts else every
    others = others or every
    num_ranks = cfg.tensor_parallel if place.service == "generator" else 1
    if num_ranks > len(others):  # NCCL wants a GPU for each member of a group
        raise ValueError(f"{len(others)} GPUs for generators of {num_ranks} ranks")
    return others[(place.local_id * num_ranks + rank) % len(others)]


def num_threads(cfg: Config) -> int:
    """With how many threads a trainer or a generator computes on CPUs: --threads.

    If it is not given the cores of this host are divided among them. The tiny policy is too small:
    splitting its work takes longer than the work.
    """
    if cfg.threads is not None:
        return cfg.threads
    num_cores = len(os.sched_getaffinity(0))
    num_hosts = len(cfg.hosts.split(","))
    num_training = trainers_per_host(cfg) * (2 if has_critic(cfg) else 1)
    num_generators = math.ceil(cfg.generators / num_hosts)  # on one host, at most
    num_here = num_training + num_generators * cfg.tensor_parallel
    if cfg.reward == "model":
        num_here += 1 + cfg.judges  # its trainer, and those that score (section 15)
    return 1 if cfg.model == "tiny" else max(1, num_cores // num_here)


def num_copying_per_host(cfg: Config) -> int:
    """Readers of an arena that copy: on GPUs all generators of its host, on CPUs none."""
    return 0 if cfg.device == "cpu" else generators_per_host(cfg)


def learning_rate(cfg: Config) -> float:
    """That of --lr. If it is not given: a tiny model learns fast, a pretrained one forgets fast."""
    if cfg.lr is not None:
        return cfg.lr
    return 1e-3 if cfg.model == "tiny" else 1e-6


def entropy_bonus(cfg: Config) -> float:
    """That of --entropy, a weight.

    If it is not given the tiny policy has one: without it a wrong letter on which a whole group
    agrees is never tried otherwise. In a large vocabulary it would feed tokens that are never
    right.
    """
    if cfg.entropy is not None:
        return cfg.entropy
    return 0.01 if cfg.model == "tiny" else 0.0


def num_steps_of(cfg: Config, run: str) -> int:
    """How many steps the run of a stage, sync_rl or async_rl, has."""
    return cfg.steps if run == "async_rl" else math.ceil(cfg.steps / 2)


# Steps in which only a critic learns (section 14): what it says first is noise. (Of three runs that
# were tried without them one ended worse, and one better: DOCS 5.)
CRITIC_ALONE = 7


def share_of_rate(cfg: Config, num_done: int) -> float:
    """What share of the learning rate counts: 1, which falls to 0 in the last quarter of --steps.

    With a constant rate a run may end in a dip. By example, with --steps 100 it is 1 up to step 75,
    0.4 at step 90, and 0 at 100. A run of sync_rl ends after half of --steps, here 50, so its rate
    stays the full one. With a critic it is 0 in the first steps.
    """
    if has_critic(cfg) and num_done < CRITIC_ALONE:
        return 0.0
    share_left = max(0.0, 1 - num_done / cfg.steps)
    return min(1.0, 4 * share_left)


# -- plumbing: a model that FSDP computes with -----------------------------------------------------
# FSDP2 has the fp32 weights of a trainer, cut into parts if there are several ranks, and takes
# care of what the model computes with. Its unit is a decoder layer:
#
#     before a layer computes     its parts come from all ranks, in --dtype: now it is whole
#     after it has computed       the whole one is thrown away
#     in the backward pass        the same; and its gradient goes to the parts, added up in fp32
#
# So at any time one layer is whole (two in the backward pass, where FSDP fetches the next one while
# one is computed), and with it what lies around the layers: the embedding and the last matrix. A
# generator's weights are the same ones, cast the same way, so both round alike.


def as_on(here: Config, cfg: Config) -> Config:
    """A run's Config, for a rank. here: its own, with its device, and how many ranks there are.

    A device is one such as cuda:1. And of a trainer over hosts (section 16) there are fewer ranks
    than were asked for while one of these hosts is lost.
    """
    return dataclasses.replace(
        cfg, device=here.device, trainers=here.trainers, trainer_hosts=here.trainer_hosts
    )


def needs_group(cfg: Config) -> bool:
    """Does a trainer need FSDP, and so a process group, be it of one rank?"""
    return cfg.trainers > 1 or dtype_name(cfg) != "float32"


def num_parameters(model: Any) -> int:
    """How many numbers are trained; tied ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def decoder_layers(model: Any) -> list[Any]:
    """Its layers, which are alike and follow each other: of its lists of modules the largest."""
    lists = [part for part in model.modules() if isinstance(part, torch.nn.ModuleList)]
    return list(max(lists, key=num_parameters, default=[]))


def compute_layers_again(model: Any) -> None:
    """For --recompute: of each decoder layer only the input is kept for the backward pass.

    There its forward pass is run once more. (`checkpoint` is torch's word for that; it has nothing
    to do with those in files. That of transformers works in mode `train` only.)
    """
    for layer in decoder_layers(model):
        again = functools.partial(
            checkpointing.checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False
        )
        layer.forward = again  # mechanism: recompute


def give_to_fsdp(model: Any, cfg: Config, rank: int) -> None:
    """Makes FSDP units of a model: its layers, and then the rest. All ranks call it at once.

    Only rank 0 has content; the models of the others are on "meta", shapes without memory. They are
    cut first, and then get memory for their parts alone, which rank 0 fills, one whole tensor at a
    time. So none of them ever has all of it. A rank that is alone keeps the content that it has.
    """
    whole = model.state_dict() if rank == 0 else {}
    device, _, _ = cfg.device.partition(":")
    mesh = device_mesh.init_device_mesh(device, (cfg.trainers,))
    precision = fsdp.MixedPrecisionPolicy(param_dtype=dtype_of(cfg), reduce_dtype=torch.float32)
    for unit in [*decoder_layers(model), model]:
        # After a forward pass it is cut again. Else it would stay whole until a backward pass,
        # which may never follow, and a checkpoint can be loaded into parts only.
        fsdp.fully_shard(unit, mesh=mesh, mp_policy=precision, reshard_after_forward=True)
    if cfg.trainers == 1:
        return
    if rank > 0:
        model.to_empty(device=cfg.device)
    dcp.set_model_state_dict(model, whole, options=loading(cfg))
    for buffer in model.buffers():  # also those that are in no checkpoint
        torch.distributed.broadcast(buffer, 0)


def loading(cfg: Config) -> dcp.StateDictOptions:
    """How FSDP takes whole tensors in: rank 0 has them, and sends them to the others."""
    return dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=cfg.trainers > 1)


# -- 11d. What is saved of a trainer ---------------------------------------------------------------
# (You can skip this part until section 12, and go on with the workers, 11e.)
#
# Every run begins with a checkpoint, that of version 0, which is the policy before RL. So one
# trainer can serve one run after the other, and a trainer that replaces a lost one can become what
# that was: that is why reading checkpoints belongs here. (If there was a run before, what this one
# begins with is published under the number after its last: readers refuse versions that go back.)
# Section 12 makes more checkpoints, and says how a run goes on from one.
#
# Others may have something to save as well: a critic (section 14), or a reward model (section 15).
# Each writes a file, and the trainer puts what stands there into its own. So there is one file per
# checkpoint, and what is in it is of the same step.


def checkpoint_of(state: TrainState, with_optimizer: bool) -> dict[str, Any]:
    """What a checkpoint has of a trainer: weights, moments and schedule. All ranks call it at once.

    They are whole tensors on the CPU of rank 0, however many ranks there are. So a run can go on
    from it with another number of ranks.
    """
    options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
    optimizers = state.optimizer if with_optimizer else []
    weights, moments = dcp.get_state_dict(state.model, optimizers, options=options)
    return {
        "version": state.version,
        "weights": weights,
        "moments": moments,
        "schedule": state.schedule.state_dict() if with_optimizer else None,
    }


def follow_flags(state: TrainState) -> None:
    """After a checkpoint's optimizer and schedule were loaded: takes the rate of these flags.

    From the checkpoint comes how many steps were made. With more --steps than it was made with, or
    another --lr, each further step has the rate that it would have had with these from the start.
    """
    full = learning_rate(state.cfg)
    state.schedule.base_lrs[:] = [full for _ in state.schedule.base_lrs]
    share = share_of_rate(state.cfg, state.schedule.last_epoch)
    for group in state.optimizer.param_groups:
        group.update(initial_lr=full, lr=full * share)  # mechanism: rate of these flags


def copy_moments(optimizer: torch.optim.Optimizer) -> None:
    """Gives it memory of its own for its moments: torch has left them in the file that was read.

    Otherwise a file in memory would stay as long as the moments do.
    """
    for moments in optimizer.state.values():
        for name, tensor in moments.items():
            moments[name] = tensor.clone()


def become(
    state: TrainState,
    found: dict[str, Any],
    base: dict[str, Any],
    cfg: Config,
) -> None:
    """Makes a trainer what a checkpoint says, for a run with this Config.

    found: the checkpoint. base: the one of version 0, whose weights the reference gets. On ranks
    other than 0 neither has tensors, and all ranks call this at once.
    """
    state.prepare_optimizer(cfg)
    options = loading(cfg)
    # The copies are for torch, which puts its own tensors into the dicts that it is given.
    dcp.set_model_state_dict(state.model, dict(found["weights"]), options=options)
    if found["schedule"] is not None:
        moments = found["moments"]
        dcp.set_optimizer_state_dict(state.model, state.optimizer, moments, options=options)
        copy_moments(state.optimizer)
        state.schedule.load_state_dict(found["schedule"])
        follow_flags(state)
    if state.reference is not None:
        dcp.set_model_state_dict(state.reference, dict(base["weights"]), options=options)
    state.count_on(found["version"])


CHECKPOINT_FORMAT = 4


class OtherRun(ValueError):
    """A checkpoint is whole, but of another run."""


def about(cfg: Config) -> dict[str, Any]:
    """What a checkpoint must have been made with for this run to go on from it."""
    kept = [entry.name for entry in dataclasses.fields(Config) if entry.metadata["is_kept"]]
    return {"format": CHECKPOINT_FORMAT, **{name: getattr(cfg, name) for name in kept}}


def other_flags(found: dict[str, Any], cfg: Config) -> str:
    """The flags without which a run cannot go on from a checkpoint; "": it can, with these.

    found: the checkpoint's "about". If the checkpoint is older than a flag, it counts as
    made with the flag's default.
    """
    flags = []
    for name, mine in about(cfg).items():
        its = found.get(name, getattr(Config, name, None))
        if its != mine:
            flags.append(f"{flag_of(name)} {shlex.quote(str(its))}")
    return " ".join(flags)


def require_same_run(path: str, found: dict[str, Any], cfg: Config) -> None:
    """Raises OtherRun if a run with this Config cannot go on from there. found: as above."""
    its_format = found.get("format")
    if its_format != CHECKPOINT_FORMAT:
        formats = f"has format {its_format}, and this file reads {CHECKPOINT_FORMAT}"
        raise OtherRun(f"{path} {formats}: take the file that wrote it, or another --checkpoint")
    flags = other_flags(found, cfg)
    if flags:
        raise OtherRun(f"{path} was made with {flags}: give that, or another --checkpoint")


# Errors of the system that say nothing about a file: it may not be read, there is too little
# memory, there are too many open files, or the disk of another machine does not answer.
PASSING_ERRORS = (
    errno.EACCES,
    errno.EPERM,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
    errno.ESTALE,
    errno.ETIMEDOUT,
)


def read_checkpoint(path: str, cfg: Config | None) -> dict[str, Any]:
    """What Trainer.save has written into this file.

    cfg: of the run that is to go on from it; None: of any run. Nothing in it is executed. Raises
    OtherRun if it is whole, and another ValueError, which says why, if what is there is no
    checkpoint. MemoryError, or an OSError of PASSING_ERRORS: it may be as good as ever.

    Its tensors are mapped: each lies in the file, and is read when it is used. So to become what a
    checkpoint says takes no more memory than to be trained. As long as somebody has one of these
    tensors, nobody may write into the file.
    """
    try:
        with open(path, "rb") as file:
            # torch.load compares no checksums; the zip file that it reads has them.
            damaged = zipfile.ZipFile(file).testzip()
            if damaged:
                raise ValueError(f"damaged in {damaged}")
        found = torch.load(path, weights_only=True, mmap=True)
        made_with = dict(found["about"])
    except MemoryError:
        raise  # the file may be as good as ever
    except Exception as error:  # whatever a strange file does to these libraries
        if isinstance(error, OSError) and error.errno in PASSING_ERRORS:
            raise
        # Where Python raises MemoryError, torch has only this text.
        if isinstance(error, RuntimeError) and "allocate memory" in str(error):
            raise MemoryError(str(error)) from error
        why = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{path} is no checkpoint, or damaged: {why}") from error
    if cfg is not None:
        require_same_run(path, made_with, cfg)
    return found


def without_tensors(found: dict[str, Any]) -> dict[str, Any]:
    """The same checkpoint, or part of one, for ranks that get no tensors."""
    less = {**found, "weights": {}, "moments": {}}
    less.pop("reward", None)  # of a reward model (section 15), which has one rank
    if "critic" in found:
        less["critic"] = without_tensors(found["critic"])
    return less


def read_together(path: str, cfg: Config, rank: int) -> dict[str, Any]:
    """What read_checkpoint returns, for all ranks of a trainer, which call it at once.

    Only rank 0 gets the tensors. If it raises there, all ranks raise the same.
    """
    if cfg.trainers == 1:
        return read_checkpoint(path, cfg)
    found: dict[str, Any] = {}
    told: list[Any] = [None]
    if rank == 0:
        try:
            found = read_checkpoint(path, cfg)
            told = [without_tensors(found)]
        except (ValueError, MemoryError, OSError) as error:
            told = [error]
    torch.distributed.broadcast_object_list(told, 0)
    if isinstance(told[0], Exception):
        raise told[0]
    return found or told[0]


# -- 11e. The workers ------------------------------------------------------------------------------
# Three kinds of processes: the trainer, generators, judges. An endpoint takes one argument at most,
# and gives one answer; what has several parts is a record. Besides weights, events, and what 5b
# asks of every worker, this is all that passes between the main process and them. (A run begins
# with `meeting_place`, `begin`, `load` and `published`. Its loop needs `rollout`, `judge` and
# `step` alone; the others are for checks and checkpoints.)
#
#     Trainer     meeting_place                -> str             a file for its ranks to meet in
#                 begin        BeginRequest    -> ArenaHandle     makes optimizer and arena, once
#                 load         LoadRequest     -> str             becomes what a checkpoint says
#                 supervise    SuperviseRequest -> float          a supervised step; its loss
#                 save         SaveRequest     -> None            writes a checkpoint
#                 step         Packed Rollout  -> StepStats       trains on a batch, and publishes
#                 published                    -> int             when the newest can be pulled
#                 readers                      -> list[int]       who leases a slot, as process ids
#                 examine      Packed Rollout  -> Examination     scores a part of it, no more
#     Generator   rollout      RolloutRequest  -> Packed RolloutReply    pulls, and converses
#     Judge       judge        JudgeRequest    -> JudgeReply      scores conversations


class TrainerLost(NobodyToBlame):
    """The trainer, or its critic, was lost. There may be another one, which has not begun."""


@dataclass(frozen=True)
class BeginRequest:
    """The first request that a trainer gets."""

    meeting_place: str  # where the ranks of a trainer find each other
    is_warm: bool  # should the tiny policy take its warm start?
    num_readers: int  # of the arena


@dataclass(frozen=True)
class SuperviseRequest:
    """A supervised step, before RL."""

    prompts: list[Prompt]  # whose right answers are learned
    is_first: bool  # of --sft-steps: it begins with a fresh optimizer


@dataclass(frozen=True)
class SaveRequest:
    """To write a checkpoint."""

    path: str  # of a file that the trainer can write
    state: str  # of the run, saved beside; "" for the weights alone
    parts: tuple[str, ...] = ()  # files with what others have to be saved beside (14, 15)


@dataclass(frozen=True)
class LoadRequest:
    """To begin a run, or to go on with it."""

    checkpoint: str  # its path
    base: str  # that of version 0; "": it is the same one, or there is no reference
    cfg: Config  # of the run


@dataclass(frozen=True)
class Seat:
    """Where a rank computes."""

    device: str
    life: str  # of its host


class RankedWorker(Worker):
    """A worker with a network, which may be sharded over several ranks.

    Calls go to all ranks at once, and the answer of rank 0 counts.
    """

    has_model = True

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place)
        self.cfg = cfg
        # How many ranks there are, and on how many hosts: mostly as many as the Config says.
        shape = current_size()
        self.num_hosts = shape.get("hosts", 1)
        self.num_ranks = math.prod(shape.values())

    async def prepare(self) -> Seat:
        """Builds what it computes with. Answers with where that is."""
        local_rank = self.rank % (self.num_ranks // self.num_hosts)
        device = device_of(self.cfg, self.place, local_rank)
        torch.set_num_threads(num_threads(self.cfg))
        self.cfg = dataclasses.replace(
            self.cfg, device=device, trainers=self.num_ranks, trainer_hosts=self.num_hosts
        )
        if device != "cpu":
            torch.cuda.set_device(device)  # FSDP2 and streams ask for the present one
        self.build()
        return Seat(device=device, life=my_life())

    def build(self) -> None:
        """Here subclasses make their network, with content on rank 0 only."""


class Trainer(RankedWorker):
    """Steps and publishes: the actor around a TrainState and a ShardWriter."""

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place, cfg)
        self.state: TrainState | None = None
        self.writer: ShardWriter | None = None  # None until it has begun

    def build(self) -> None:
        """The policy."""
        self.policy = Policy(self.cfg, torch.float32, is_empty=self.rank > 0)

    @endpoint
    async def begin(self, request: BeginRequest) -> ArenaHandle:
        """Begins, and answers where it publishes. One that has begun already only answers."""
        if self.writer is None:
            advance = self.pulse.advance
            if request.is_warm and self.cfg.model == "tiny" and self.rank == 0:
                warm_start(self.policy, advance)  # the other ranks get what comes of it
            meeting_place = request.meeting_place
            self.state = TrainState(self.cfg, self.policy, self.rank, meeting_place, advance)
            if self.cfg.device == "cpu" and not needs_group(self.cfg):
                # (FSDP has its own memory, and memmove does not copy from a GPU.)
                move_together(weights_of(self.policy.model))
            self.writer = self.new_writer(
                weights_of(self.policy.model),
                request.num_readers,
                dtype=dtype_of(self.cfg),
                note=self._note_copy,
                num_copying=num_copying_per_host(self.cfg),
            )
        return self.writer.arena.handle

    def new_writer(
        self, weights: dict[str, torch.Tensor], num_readers: int, **options: Any
    ) -> ShardWriter:
        """What it publishes these with. All ranks call it at once. options: as of ShardWriter."""
        return ShardWriter.join(weights, num_readers, self.rank, self.num_ranks, **options)

    def _note_copy(self, what: str, start_s: float) -> None:
        """Copies run in a thread, beside the steps: they have a row of their own in a trace."""
        self.recorder.note(what, start_s, f"{self.recorder.actor} copies")

    def _begun(self) -> tuple[TrainState, ShardWriter]:
        """What a trainer has that has begun; TrainerLost if it has not.

        Then the request was meant for the trainer before this one, which was lost.
        """
        if self.state is None or self.writer is None:
            raise TrainerLost("this trainer has not begun")
        return self.state, self.writer

    @endpoint
    async def supervise(self, request: SuperviseRequest) -> float:
        """A supervised step, on all ranks at once. Answers with its loss, and publishes nothing.

        The next run does not begin with its moments: to load a checkpoint makes a fresh optimizer.
        """
        state, writer = self._begun()
        if request.is_first:
            state.prepare_optimizer(supervised(self.cfg))
        answers = right_answers(self.policy, request.prompts)
        return state.step(answers, writer.wait).loss

    @endpoint
    async def save(self, request: SaveRequest) -> None:
        """Writes a checkpoint."""
        state, _ = self._begun()
        found = checkpoint_of(state, with_optimizer=bool(request.state))
        if self.rank > 0:
            return
        for part in request.parts:
            found.update(read_part(part))
        found.update(about=about(self.cfg), state=request.state)
        # Into an open file: given a path, torch would not tell why it cannot write there.
        with writing(request.path, request.path), open(request.path, "wb") as file:
            torch.save(found, file)

    @endpoint
    async def load(self, request: LoadRequest) -> str:
        """Becomes what a checkpoint says, and publishes that. Answers with the run's part of it."""
        state, writer = self._begun()
        writer.wait()
        cfg = as_on(self.cfg, request.cfg)
        found = read_together(request.checkpoint, cfg, self.rank)
        base = read_together(request.base, cfg, self.rank) if request.base else found
        become(state, found, base, cfg)
        writer.start(state.version)
        return found["state"]

    @endpoint
    async def published(self) -> int:
        """The version of this trainer. It answers when generators can pull that version."""
        state, writer = self._begun()
        writer.wait()
        return state.version

    @endpoint
    async def step(self, batch: Packed[Rollout]) -> StepStats:
        """Trains on a batch.

        When it answers a thread is copying the result. The next update will wait for that.
        """
        state, writer = self._begun()
        with self.recorder.span("step"):
            stats = state.step(batch.unpacked(), writer.wait)
            writer.start(state.version)
        return stats

    @endpoint
    async def readers(self) -> list[int]:
        """Process ids of the generators that lease a slot of its arena now."""
        _, writer = self._begun()
        return [pid for pid, _ in writer.arena.leases()]

    @endpoint
    async def examine(self, batch: Packed[Rollout]) -> Examination:
        """Scores a part of a batch, and trains on nothing."""
        state, _ = self._begun()
        return examine(state, batch.unpacked())


def read_part(path: str) -> dict[str, Any]:
    """What somebody else on this host has written, for the checkpoint of all. It is mapped, too."""
    try:
        return torch.load(path, weights_only=True, mmap=True)
    except (FileNotFoundError, PermissionError) as error:  # a critic's file ends with its process
        raise TrainerLost("the critic was lost before the checkpoint was written") from error


# -- 11f. Generators -------------------------------------------------------------------------------
# A generator pulls the newest weights, and converses. Its requests share a batch where they can: a
# step of the decoder samples a token for the episodes of all of them. By example, while requests a
# to c come one after the other, and version 8 is published before c:
#
#     a    there is no batch yet: version 7 is pulled, and the episodes of a begin
#     b    7 is still the newest: the episodes of b join those of a
#     c    8 is the newest, and the batch has 7: c waits until it is empty, and then pulls

PATIENCE_S = 30.0  # for a version that is on its way to a generator


@dataclass(frozen=True)
class RolloutRequest:
    """To have some conversations."""

    # Of each host, the arena to read; None: not there now. Until section 16 there is one host.
    arenas: tuple[ArenaHandle | None, ...]
    min_version: int  # waits until that one can be pulled
    prompts: list[Prompt]
    group_size: int
    # It travels along: run again under the same weights, a request samples the same.
    seed: int
    greedy: bool
    is_in_flight: bool  # takes new weights before every token
    is_alone: bool  # shares its batch with no other request


@dataclass(frozen=True)
class RolloutReply:
    """The answer to a RolloutRequest."""

    rollout: Rollout  # not judged yet
    busy_s: float  # of a generator's work; seconds that requests share count for one of them only


class SharedWork:
    """How long a generator was at work, which its requests share."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self.begun_s: list[float] = []  # when those under way began, in seconds since 1970
        self.noted_s = 0.0  # up to when work has been noted

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """While a request has episodes."""
        start_s = time.time()
        self.begun_s.append(start_s)
        try:
            yield
        finally:
            self.begun_s.remove(start_s)

    def note(self) -> float:
        """Notes work when a request ends, and returns how many seconds it was.

        It counts from the later of two moments: work was last noted; the oldest request under way
        began. So all answers together are as long as this generator was at work, however many
        requests shared that. By example, a is under way from second 0 to 10, and b from 4 to 16.
        When a ends 10 s are noted, and when b ends the 6 s since then: 16 s in all. If b begins at
        12 only, it notes 4 s.
        """
        begin_s = max(min(self.begun_s), self.noted_s)  # mechanism: shared work counts once
        self.recorder.note("rollout", begin_s)
        self.recorder.send_soon()
        self.noted_s = time.time()
        return self.noted_s - begin_s


class Generator(Worker):
    """Pulls the newest weights, and converses: the actor around a Decoder and a WeightReader."""

    has_model = True

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place)
        self.cfg = cfg
        self.reader: WeightReader | None = None
        # For the episodes that it has now:
        self.takes_newest = False  # before every token
        self.is_closed = False  # no request may join them
        # For all requests:
        self.entrance = asyncio.Lock()  # requests go through it in the order in which they came
        self.work = SharedWork(self.recorder)

    async def prepare(self) -> str:
        """Builds the policy. Answers with the device on which it computes."""
        device = device_of(self.cfg, self.place, self.rank)
        torch.set_num_threads(num_threads(self.cfg))
        self.policy = Policy(dataclasses.replace(self.cfg, device=device))
        if device != "cpu":
            torch.cuda.set_device(device)  # graphs are recorded on the present one
        self.decoder = self.new_decoder()
        return device

    def new_decoder(self) -> Decoder:
        """What it has its episodes in."""
        return decoder_for(self.policy)(self.policy, self._version_now)

    @concurrent_endpoint
    async def rollout(self, request: RolloutRequest) -> Packed[RolloutReply]:
        """Has the conversations of a request."""
        return await self.converse(request)

    async def converse(self, request: RolloutRequest) -> Packed[RolloutReply]:
        """Has the conversations of a request, in one batch with those of other requests.

        Each request makes steps until its own episodes are over. A step samples a token for those
        of all requests. After each step the other requests have their turn, and new ones come in.
        """
        async with self.entrance:
            await self._enter(request)
        # Nobody else can enter before the first `await` below.
        args = (request.prompts, request.group_size, request.seed, request.greedy)
        with self.work.under_way(), begin_episodes(self.policy, *args) as episodes:
            self.decoder.add(episodes)
            while not all_over(episodes):
                self.decoder.step()
                await asyncio.sleep(0)
            reply = RolloutReply(rollout=rollout_of(episodes), busy_s=self.work.note())
        return Packed.of(reply)

    async def _enter(self, request: RolloutRequest) -> None:
        """Waits until its episodes may join those that are here.

        It may wait for a version that is being copied, or is on its way to this host. If the
        trainer is lost meanwhile, that never comes. On the trainer's host this is seen, and raises
        TrainerLost. Elsewhere NotNow is raised after a while, and the request is made again.
        """
        start = time.monotonic()
        while not self._try_to_enter(request):
            # Who waits here gets nothing done, and would be taken for ill (section 5): so its word
            # of progress is moved.
            self.pulse.advance()  # mechanism: waiting is no illness
            if self.decoder.episodes():
                start = time.monotonic()  # it waits for these
            elif since(start) > PATIENCE_S:
                raise NotNow(f"version {request.min_version} has not come")
            await asyncio.sleep(0 if self.decoder.episodes() else 0.001)

    def _try_to_enter(self, request: RolloutRequest) -> bool:
        """May the request's episodes join those that are here? If none are, this pulls for it.

            the version it asks for is not there    it waits; if it never comes, _no_arena says
                                                    what is raised
            nobody is here                          this pulls, and it comes in
            those here have the newest version      it joins them, if _may_join says so, too
            those here have an older one,           it waits until they are over; otherwise somebody
            or one of a trainer before              would always be here, and nothing newer pulled

        All tokens of a request are of one version, which stays leased until the next pull. Only
        requests with is_in_flight take new versions as they come, and so always have the newest.
        """
        handle = request.arenas[self.place.host]
        is_empty = not self.decoder.episodes()
        if is_empty or self.reader is None:
            self.reader = self._reader_of(handle)
        arena = self.reader.arena
        newest = arena.newest_version()
        is_same_arena = handle is not None and handle.run_id == arena.handle.run_id
        # Whoever asks knows that the trainer has made this version. It may still be being copied;
        # or those here have the arena of a trainer before, which says nothing about this one.
        if newest < request.min_version:
            if is_same_arena and not is_alive(arena.handle.pid):  # mechanism: it never comes
                raise self._no_arena()
            return False
        if is_empty:
            self.takes_newest = request.is_in_flight
            self.is_closed = request.is_alone
            self._pull(self.reader)  # mechanism: pull
            return True
        has_newest = self.takes_newest or self.reader.version == newest
        return is_same_arena and has_newest and self._may_join(request)

    def _may_join(self, request: RolloutRequest) -> bool:
        """May it join those that are here, if they have the newest version of the same arena?

        The last digits of a sum depend on how many rows a batch has. Where these shall not depend
        on when others come, a request is_alone.
        """
        is_anybody_alone = self.is_closed or request.is_alone
        is_same_kind = self.takes_newest == request.is_in_flight
        return is_same_kind and not is_anybody_alone

    def _version_now(self) -> int:
        """What the decoder calls before every token."""
        self.pulse.advance()
        assert self.reader is not None, "episodes come in after a pull"
        return self._pull(self.reader) if self.takes_newest else self.reader.version

    def _reader_of(self, handle: ArenaHandle | None) -> WeightReader:
        """A reader of this arena. A new trainer has another arena, and needs another reader."""
        if handle is None:
            raise NotNow("this host has no arena")  # its relay is being replaced (section 16)
        if self.reader is None or self.reader.arena.handle.run_id != handle.run_id:
            weights = weights_of(self.policy.model)
            try:
                return self.new_reader(handle, weights)
            except WeightMismatch as error:
                if is_alive(handle.pid):
                    raise
                # The handle is of a trainer that has ended, and this generator, which was replaced
                # too, is too late to attach to its arena.
                raise self._no_arena() from error
        return self.reader

    def new_reader(self, handle: ArenaHandle, weights: dict[str, torch.Tensor]) -> WeightReader:
        """What it pulls these weights with."""
        return WeightReader(handle, self.place.local_id, weights)

    def _no_arena(self) -> NobodyToBlame:
        """What to raise when the process has ended whose arena this host reads."""
        if self.place.host >= self.cfg.trainer_hosts:
            return NotNow("the relay of this arena has ended")
        return TrainerLost("the trainer of this arena has ended")

    def _pull(self, reader: WeightReader) -> int:
        """Pulls, and notes it for the trace if there was something new."""
        before = reader.version
        start_s = time.time()
        version = reader.pull()
        if version != before:
            self.recorder.note("pull", start_s)
        return version


# -- plumbing: a generator of several ranks --------------------------------------------------------
# (You can skip this part, and go on with the judges, 11g.)
#
# With --tensor-parallel N a generator is N processes of one host, its ranks, and each of them has a
# part of every decoder layer (Megatron-LM, Shoeybi 2019). By example, of two ranks:
#
#     matrix         rank 0 views      rank 1 views       with it a rank computes
#     q, k, v        the upper half    the lower half     what half of the heads attend to
#     o              the left half     the right half     what its heads add to each hidden number
#     gate, up       the upper half    the lower half     half of the numbers inside the MLP
#     down           the left half     the right half     what these add to each hidden number
#     all else       the whole         the whole          the same as the other one
#
# (A row of the weight makes one number of what comes out, a column takes one of what comes in.
# Hidden numbers are those that go from layer to layer.) Behind o, and behind down, all ranks add up
# what they have, and that is all that passes between them in a layer. Keys and values are those of
# a rank's own heads.
#
# The halves are boxes of section 8. Each rank views its own in the slot, whatever ranks of the
# trainer have written there, so to pull costs as little as with one rank: nothing is copied. (On
# GPUs, where weights are copied, a rank copies its boxes alone.)
#
# Rank 0 leads. It alone has episodes, hears users, and samples: were all to do so, each user would
# be asked N times, and sums that differ in their last digit could make ranks draw two tokens. It
# tells the others which tokens to compute with. And it alone has a lease, which holds for all:
#
#     rank 0     "stop" | 1. meet | leases slot 2 | "take slot 2" | views it | 2. meet | "a step"
#     rank 1     ends its step    |                hears that     | views it | 2. meet | computes
#
# From 1. on nobody reads the slot before, and from 2. on all view the new one. So nobody reads a
# slot that rank 0 has left, or computes under another version than rank 0, and an arena has as many
# slots as with generators of one rank.
#
# To the service they are one replica: if one is lost, all of them are replaced. If a rank cannot go
# on, the others would wait for its part of the next sum for ever. So it ends its process.

# How the plan of a model in transformers calls these two ways to cut a matrix.
CUT_STYLES = ("colwise", "rowwise")
# What else a plan may say. These are left whole: an embedding and the last matrix, which are often
# tied and need not divide evenly; and the norms of each head, for which the plan says only how they
# are trained.
WHOLE_STYLES = ("embedding_rowwise", "colwise_gather_output", "replicated_with_grad_allreduce")


def cuts_of(model: Any, num_ranks: int) -> dict[str, str]:
    """Which modules of a model are cut, and how; a "*" in a name is any number.

    ValueError: transformers has no plan for this kind of model, or one that asks for more than is
    known here, such as for experts; or its heads cannot be divided evenly.
    """
    plan: dict[str, str] = dict(model.tp_plan or {})
    cuts = {name: style for name, style in plan.items() if style in CUT_STYLES}
    unknown = sorted(set(plan.values()) - {*CUT_STYLES, *WHOLE_STYLES})
    if unknown or not cuts:
        raise ValueError(f"this kind of model cannot be cut: {', '.join(unknown) or 'no plan'}")
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if num_heads % num_ranks:
        raise ValueError(f"{num_heads} heads of keys and values, for {num_ranks} ranks")
    return cuts


class Team:
    """The ranks of a generator, for one of them. Rank 0 tells, and the others hear it in order."""

    # A generator that has no request hears nothing for as long as training takes. So there is no
    # limit in practice. That a rank was lost is found by its owner (section 5), which kills all.
    PATIENCE = datetime.timedelta(days=365)

    def __init__(self, meeting_place: str, rank: int, num_ranks: int) -> None:
        """All ranks call this at once. meeting_place: as in form_group."""
        form_group(meeting_place, rank, num_ranks)
        self.num_ranks = num_ranks
        # Words go through a group of their own, so that no sum can be taken for one.
        self.words: Any = torch.distributed.new_group(backend="gloo", timeout=self.PATIENCE)

    def cut(self, model: Any, device: str) -> None:
        """Makes DTensors of the parameters of a model's layers. This rank keeps its part of each.

        Modules compute with that part, and those that `cuts_of` names "rowwise" add up what all
        ranks have. device: "cpu" or "cuda".
        """
        mesh = device_mesh.init_device_mesh(device, (self.num_ranks,))
        tensor_parallel.apply_tensor_parallelism(model, mesh, cuts_of(model, self.num_ranks))

    def tell(self, order: Any) -> None:
        """For rank 0. It returns when the others have heard it."""
        torch.distributed.broadcast_object_list([order], 0, group=self.words)

    def hear(self) -> Any:
        """For the others: waits for what rank 0 tells next."""
        told: list[Any] = [None]
        torch.distributed.broadcast_object_list(told, 0, group=self.words)
        return told[0]

    def meet(self) -> None:
        """Returns when all ranks have come here."""
        torch.distributed.barrier(group=self.words)


@contextlib.contextmanager
def ending_process() -> Iterator[None]:
    """What the body raises ends this process: the other ranks would wait for its part of a sum."""
    try:
        yield
    except Exception:
        # If another rank was lost, that raises here, and this process is killed in a moment. Then
        # there is nothing to tell.
        time.sleep(1.0)
        traceback.print_exc()
        os._exit(1)


# What rank 0 tells:


@dataclass(frozen=True)
class AttachOrder:
    """To read from this arena."""

    handle: ArenaHandle


@dataclass(frozen=True)
class StopOrder:
    """To come to `meet`. Who hears it has ended the step before."""


@dataclass(frozen=True)
class TakeOrder:
    """To make the weights those of a slot, and then to come to `meet`."""

    slot: int


@dataclass(frozen=True)
class PartOrder:
    """Rows whose next tokens are computed together."""

    rows: list[int] | None  # of the cache, smallest first; None: they are new
    ids: list[list[int]]  # of each row, the tokens that were not computed yet


@dataclass(frozen=True)
class StepOrder:
    """To compute these, and to keep no other rows."""

    parts: list[PartOrder]


class LeadingReader(ShardReader):
    """The reader of rank 0: what it pulls, all ranks pull."""

    def __init__(
        self, team: Team, handle: ArenaHandle, reader: int, tensors: dict[str, torch.Tensor]
    ) -> None:
        super().__init__(handle, reader, tensors)
        self.team = team
        with ending_process():
            team.tell(AttachOrder(handle=handle))

    def lease(self) -> tuple[int, int]:
        """As in section 7, when no rank reads the slot before any more."""
        with ending_process():
            self.team.tell(StopOrder())
            self.team.meet()
        return super().lease()

    def _take(self, slot: int) -> None:
        """Makes the tensors of all ranks what a slot holds."""
        with ending_process():
            self.team.tell(TakeOrder(slot=slot))  # mechanism: all ranks take it
            super()._take(slot)
            self.team.meet()  # after this the lease may be given back, as on GPUs


class FollowingReader(ShardReader):
    """The reader of another rank. It leases nothing.

    It has the number of rank 0's reader, and so the same word for a lease, which it clears when it
    is made (section 7). This takes no lease away: rank 0 has its first one only after all have met.
    """

    def take(self, slot: int) -> None:
        """Makes the tensors what a slot holds, which rank 0 has leased."""
        self._take(slot)


class LeadingDecoder(Decoder):
    """The decoder of rank 0."""

    def __init__(self, team: Team, policy: Policy, pull: Callable[[], int]) -> None:
        super().__init__(policy, pull)
        self.team = team

    def step(self) -> None:
        """As in section 9, on all ranks."""
        with ending_process():
            super().step()

    def _parts(self) -> list[RowCache]:
        """The same, and the others hear of it."""
        row_of = {id(episode): row for row, episode in enumerate(self.cache.episodes)}
        parts = super()._parts()
        told = []
        for part in parts:
            ids = []
            for episode, num_computed in zip(part.episodes, part.num_computed, strict=True):
                ids.append(episode.ids[num_computed:])
            is_new = id(part.episodes[0]) not in row_of
            rows = None if is_new else [row_of[id(episode)] for episode in part.episodes]
            told.append(PartOrder(rows=rows, ids=ids))
        self.team.tell(StepOrder(parts=told))
        return parts


@dataclass(frozen=True)
class Echo:
    """Of an episode what the other ranks have: enough for a RowCache."""

    ids: list[int]


class Follower:
    """Another rank than 0: its weights, and the keys and values of its heads."""

    def __init__(self, team: Team, policy: Policy, reader: int) -> None:
        """reader: the number of rank 0's reader."""
        self.team = team
        self.policy = policy
        self.reader_number = reader
        self.reader: FollowingReader | None = None
        self.cache = RowCache(policy.model, [])

    def follow(self) -> None:
        """The loop: waits for rank 0 / produces its parts of sums / ends with its process."""
        with ending_process():
            if self.policy.cfg.device != "cpu":
                torch.cuda.set_device(self.policy.cfg.device)  # each thread has a present one
            while True:
                self._carry_out(self.team.hear())

    def _carry_out(self, order: Any) -> None:
        if isinstance(order, StepOrder):
            with torch.inference_mode():
                self._compute(order)
        elif isinstance(order, AttachOrder):
            weights = weights_of(self.policy.model)
            self.reader = FollowingReader(order.handle, self.reader_number, weights)
        else:
            if isinstance(order, TakeOrder):
                assert self.reader is not None, "it was told to attach before"
                self.reader.take(order.slot)
            self.team.meet()

    def _compute(self, order: StepOrder) -> None:
        """What `Decoder.step` does to the cache, in the same order: so the rows stay rank 0's."""
        parts = []
        for told in order.parts:
            if told.rows is None:
                echoes: list[Any] = [Echo(ids=[]) for _ in told.ids]
                part = RowCache(self.policy.model, echoes)
            else:
                part = self.cache.part(told.rows)
            for echo, ids in zip(part.episodes, told.ids, strict=True):
                echo.ids.extend(ids)
            parts.append(part)
        for part in parts:
            part.catch_up()  # the logits are for rank 0 to sample from
        self.cache = RowCache.joined(parts) if parts else RowCache(self.policy.model, [])


class ShardedGenerator(Generator):
    """One rank of a generator. Requests come to all of them, and rank 0 answers."""

    def new_decoder(self) -> Decoder:
        """The leading one; and the others begin to follow."""
        self.team = Team(self.meets_at, self.rank, self.cfg.tensor_parallel)
        device, _, _ = self.policy.cfg.device.partition(":")
        self.team.cut(self.policy.model, device)
        if self.rank == 0:
            return LeadingDecoder(self.team, self.policy, self._version_now)
        self.follower = Follower(self.team, self.policy, self.place.local_id)
        threading.Thread(target=self.follower.follow, daemon=True).start()
        return Decoder(self.policy, self._version_now)  # it gets no episodes

    def new_reader(self, handle: ArenaHandle, weights: dict[str, torch.Tensor]) -> WeightReader:
        """One that pulls for all ranks."""
        return LeadingReader(self.team, handle, self.place.local_id, weights)

    async def converse(self, request: RolloutRequest) -> Any:
        """On rank 0 as in Generator. The others say nothing, and do what that one tells them."""
        return await super().converse(request) if self.rank == 0 else None


# -- 11g. Judges -----------------------------------------------------------------------------------
# A reward function is somebody else's code. A rollout's way to its rewards, and what may go wrong:
#
#     what happens                              where            what else may happen
#     Episodes whose sessions knew no           judge_unknown    All are known: no judge is asked.
#     rewards are sent to be judged.
#     They are shared out among all judges.     judge_all        A judge is lost: each of its
#                                                                episodes is sent again, alone.
#     Each judge scores one after the other,    rewards_of       The function raises: its rewards
#     or waits for several at once.                              are nan, the error is told once.


@dataclass(frozen=True)
class JudgeRequest:
    """To say how good answers are."""

    prompts: list[Prompt]  # of each episode
    said: list[list[str]]
    is_truncated: list[list[bool]]  # of each episode and turn: was it stopped before its end?

    def share(self, at: slice) -> JudgeRequest:
        """The request for some of them."""
        return JudgeRequest(
            prompts=self.prompts[at], said=self.said[at], is_truncated=self.is_truncated[at]
        )


@dataclass(frozen=True)
class JudgeReply:
    """The answer to a JudgeRequest."""

    rewards: list[list[float]]  # of each turn of each episode; nan: not judged
    # Why some were not judged, as told_of says it. For its share a judge tells a mistake once.
    errors: list[str]


class Judge(Worker):
    """Runs a task's reward function.

    That is somebody else's code: it may hang, or end its process. Here it runs in a process that
    can be killed, and takes nobody along, because a judge has one request at a time. Its limit,
    --judge-stuck-after, is for one episode, and not for a request.
    """

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place)
        self.cfg = cfg

    async def prepare(self) -> None:
        """Makes the task."""
        self.task = task_of(self.cfg.task)

    @endpoint
    async def judge(self, request: JudgeRequest) -> JudgeReply:
        """Rewards, as rewards_of has them."""
        with self.recorder.span("judge"):
            return await rewards_of(self.task, request, self.pulse.advance)


def request_of(rollout: Rollout) -> JudgeRequest:
    """The request to judge all its episodes."""
    return JudgeRequest(
        prompts=rollout.prompts,
        said=rollout.said,
        is_truncated=rollout.is_truncated.tolist(),
    )


# If `score` is a coroutine, so many episodes wait at the same time in one judge, for another
# server, say. That server may be small.
JUDGED_AT_ONCE = 16


async def rewards_of(
    task: Task,
    request: JudgeRequest,
    advance: Callable[[], None] = lambda: None,
) -> JudgeReply:
    """The rewards of each turn of each episode. advance: is called after every episode.

    An episode is not judged, and its rewards are nan and not 0, if the function raises, or answers
    something else than num_turns finite numbers.

    One that is a coroutine runs for several episodes at once. A plain one cannot: while it computes
    nothing else runs here, and one episode comes after the other. Then more judges help.
    """
    room = asyncio.Semaphore(JUDGED_AT_ONCE)
    errors: dict[str, str] = {}  # by place_of

    async def judged(prompt: Prompt, said: list[str], is_truncated: list[bool]) -> list[float]:
        async with room:
            try:
                rewards = await rewards_of_one(task, prompt, said, is_truncated)
            except (Exception, SystemExit) as error:  # whatever it raises: the caller tells
                rewards = [math.nan] * task.num_turns
                told = told_of(error)
                errors.setdefault(place_of(told), told)
        advance()
        return rewards

    episodes = zip(request.prompts, request.said, request.is_truncated, strict=True)
    rewards = await asyncio.gather(*[judged(*episode) for episode in episodes])
    return JudgeReply(rewards=rewards, errors=list(errors.values()))


async def rewards_of_one(
    task: Task,
    prompt: Prompt,
    said: list[str],
    is_truncated: list[bool],
) -> list[float]:
    """The rewards of each turn of an episode. Raises what the task raises, or finite_rewards."""
    found: Any = task.rewards(prompt.turns, said, is_truncated)
    if isinstance(found, Awaitable):  # it is `async def`
        found = await found
    return finite_rewards(found, task.num_turns)


LEAST_SHARE = 64  # episodes; however small a request is, it costs this process 1.5 ms (DOCS 10)


async def judge_all(judges: Service, request: JudgeRequest) -> JudgeReply:
    """Has all episodes of a request judged.

    They are shared out among the judges, LEAST_SHARE or more to each if there are so many. A small
    rollout is one message; where several come at the same time, each goes to another judge. If one
    is lost, each episode that it was asked for is asked for again, alone. Then only the one that
    kills its judge again stays without a reward.
    """
    num_episodes = len(request.prompts)
    num_shares = max(1, num_episodes // LEAST_SHARE)
    num_requests = min(num_shares, judges.num_replicas)
    rewards: list[list[float]] = [[]] * num_episodes
    errors: list[str] = []

    async def judge(at: slice) -> None:
        share = request.share(at)
        try:
            reply = await judges.route(Judge.judge, share)
        except RequestLost:
            if len(share.prompts) == 1:
                rewards[at] = [[math.nan] * len(share.prompts[0].turns)]
            else:
                places = range(num_episodes)[at]  # the episodes that this slice means
                await asyncio.gather(*[judge(slice(i, i + 1)) for i in places])
        else:
            rewards[at] = reply.rewards
            errors.extend(reply.errors)

    # With two requests, each has every second episode. So those of a group, which take about
    # equally long, go to both judges.
    shares = [slice(first, None, num_requests) for first in range(num_requests)]
    await asyncio.gather(*[judge(share) for share in shares])
    return JudgeReply(rewards=rewards, errors=errors)


async def judge_unknown(judges: Service, rollout: Rollout, errors: TellOnce) -> Rollout:
    """All episodes; those are judged whose sessions knew no rewards. errors: is told of any.

    A session knows all rewards of its episode or none. Rows without any are the ones to ask for.
    """
    rewards = rollout.rewards.clone()
    unknown = rewards.isnan().all(1).nonzero().flatten().tolist()
    if not unknown:
        return rollout
    reply = await judge_all(judges, request_of(rollout.select(unknown)))
    for error in reply.errors:
        errors.say("an episode was not judged: ", TaskError(error))
    rewards[unknown] = torch.tensor(reply.rewards)
    return dataclasses.replace(rollout, rewards=rewards)


# -- 11h. The cluster ------------------------------------------------------------------------------
# Three services (section 6), and one object through which the main process calls them:
#
#     main process         Cluster, Run, Training: plain objects
#       Service "trainer"    1 replica of --trainers ranks, which live and die together
#       Service "generator"  --generators replicas of --tensor-parallel ranks, mostly one
#       Service "judge"      --judges replicas, a process each, one request at a time


def specs_of(
    cfg: Config, hosts: tuple[Host, ...], trainer_class: type[Trainer]
) -> dict[str, ServiceSpec]:
    """What services an RL run needs, by name."""
    # A large model needs a larger --stuck-after, and it takes longer to load, too.
    setup_deadline_s = max(ServiceSpec.setup_deadline_s, cfg.stuck_after)
    trainer = ServiceSpec(
        name="trainer",
        replica_class=trainer_class,
        args=(cfg,),
        num_replicas=1,
        num_ranks=cfg.trainers,
        hosts=hosts[:1],
        stuck_after_s=cfg.stuck_after,
        setup_deadline_s=setup_deadline_s,
        max_attempts=1,  # a step may not be made twice without being noticed
    )
    generator = ServiceSpec(
        name="generator",
        replica_class=Generator if cfg.tensor_parallel == 1 else ShardedGenerator,
        args=(cfg,),
        num_ranks=cfg.tensor_parallel,
        num_replicas=cfg.generators,
        max_replicas=max_generators(cfg),
        hosts=hosts,
        stuck_after_s=cfg.stuck_after,
        setup_deadline_s=setup_deadline_s,
    )
    judge = ServiceSpec(
        name="judge",
        replica_class=Judge,
        args=(cfg,),
        num_replicas=cfg.judges,  # with two, one may hang and the other works
        hosts=hosts,
        stuck_after_s=cfg.judge_stuck_after,
        max_attempts=1,  # judge_all asks again itself, for each episode alone
        max_in_flight=1,
    )
    return {spec.name: spec for spec in (trainer, generator, judge)}


def seed_of(cfg: Config, prompts: list[Prompt]) -> int:
    """The seed with which the answers to these prompts are sampled.

    It follows from the first of them. So a run that goes on, or a request that is made again,
    samples what it would have sampled.
    """
    rng = random.Random(f"{cfg.seed} {prompts[0].id}")
    return rng.getrandbits(48)


class SamplingCalls:
    """The first half of Cluster: what a cluster asks of its generators and judges.

    The other half follows, and inherits from this one: it starts and ends workers, and asks the
    trainer. Its constructor sets the attributes that are named here. They are two classes only
    because one would be too long to read.
    """

    cfg: Config
    generators: Service
    judges: Service
    errors: TellOnce
    handle: ArenaHandle | None
    first_version: int

    async def rollout(
        self,
        prompts: list[Prompt],
        group_size: int | None = None,
        greedy: bool = False,
        min_version: int = 0,
        is_alone: bool = False,
        by_task: bool = False,
    ) -> RolloutReply:
        """Asks a generator for conversations, and the judges for rewards that it does not know.

        group_size: None: that of --group-size. min_version: the generator waits until it can pull
        this one. is_alone: in a batch of its own. by_task: as in `judged`. Rewards are nan where an
        episode could not be judged. Raises what `route` raises.
        """
        request = RolloutRequest(
            arenas=await self.arenas(),
            min_version=max(min_version, self.first_version),
            prompts=prompts,
            group_size=group_size or self.cfg.group_size,
            seed=seed_of(self.cfg, prompts),
            greedy=greedy,
            is_in_flight=self.cfg.pull == "token" and not greedy,
            is_alone=is_alone,
        )
        packed = await self.generators.route(Generator.rollout, request)
        reply = packed.unpacked()
        return dataclasses.replace(reply, rollout=await self.judged(reply.rollout, by_task))

    async def judged(self, rollout: Rollout, by_task: bool) -> Rollout:
        """All episodes, with rewards.

        by_task: those of the task are wanted, not those that are trained on. Here they are the
        same; with a reward model (section 15) they are not.
        """
        return await judge_unknown(self.judges, rollout, self.errors)

    async def arenas(self) -> tuple[ArenaHandle | None, ...]:
        """For each host, the arena that its generators read: here the trainer's own."""
        return (self.handle,)


# Each run must begin with the same policy, though the trainer has trained since: so a cluster knows
# a file `base`, the policy before RL, saved once by the first trainer. And if a trainer is lost
# another one must become what it was: that is in the file `newest`, or, if a run has saved nothing,
# in the base. To load has four steps: the trainer begins; if there is no base, it is saved; the
# trainer becomes what a checkpoint says, or the base; generators are told the arena, and the first
# version that counts. What a cluster remembers of its trainer:
#
#     name           what it is                                 who sets it; what it is before
#     handle         the arena of the present trainer,          `load`; None
#                    which generators read
#     first_version  at which the present run began; older      `load`; 0
#                    ones, maybe still in the arena, are of
#                    another run, and of no use for this one
#     base           the weights before RL, as a checkpoint,    the first `load`, and `rebase`; ""
#                    with which every run begins
#     newest         the checkpoint that the next trainer       `load` and `remember`; ""
#                    becomes, if this one is lost; "" is base
#
# Sections 13 to 16 have subclasses. Methods that do next to nothing here are there for these.


class Cluster(SamplingCalls):
    """The actors of RL, and typed calls to them. It leads no run: it serves one after the other."""

    trainer_class: ClassVar[type[Trainer]] = Trainer  # sections 15 and 16 have others
    judge_class: ClassVar[type[Judge] | None] = None  # None: Judge; the demo of 15 has another one

    def __init__(self, cfg: Config, is_warm: bool = True, tell: Tell = tell_nobody) -> None:
        """is_warm: the tiny policy takes its warm start. tell: is told of errors in rewards."""
        self.cfg = cfg
        self.is_warm = is_warm
        self.errors = TellOnce(tell)
        self.hosts = self.hosts_of(cfg)
        specs = specs_of(cfg, self.hosts, self.trainer_class)
        trainer = dataclasses.replace(specs["trainer"], hosts=(self.trainer_host(),))
        judge = dataclasses.replace(specs["judge"], replica_class=self.judge_class or Judge)
        self.trainer = Service(trainer)
        self.generators = Service(specs["generator"])
        self.judges = Service(judge)
        self.services = [self.trainer, self.generators, self.judges]
        self.handle: ArenaHandle | None = None
        self.first_version = 0
        self.base = ""
        self.newest = ""
        self.owner_of_base: object = None  # see `rebase`
        self.owner_of_newest: object = None  # see `remember`

    def hosts_of(self, cfg: Config) -> tuple[Host, ...]:
        """The hosts of a run, that of the trainer first. Here: this machine alone."""
        return (Host(),)

    def trainer_host(self) -> Host:
        """Where the trainer is: on the first of them."""
        return self.hosts[0]

    @property
    def num_generators(self) -> int:
        """How many there are now, those included that are just being replaced."""
        return self.generators.num_replicas

    async def start(self) -> None:
        """Starts all processes at the same time, because imports take long, and loads version 0."""
        self.hosts[0].expect_models()
        await asyncio.gather(*[service.start() for service in self.services])
        await with_retries(self, lambda: self.load(""))

    async def close(self) -> None:
        """Ends all processes."""
        await asyncio.gather(*[service.close() for service in self.services])

    # Calls to the trainer. They raise TrainerLost if it is lost, and else what it raised.
    async def _ask_trainer(
        self,
        endpoint: Endpoint[Arguments, Reply],
        *request: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Reply:
        """Calls an endpoint of the trainer on all its ranks. Returns the answer of rank 0."""
        try:
            return await self.trainer.route(endpoint, *request, **keywords)
        except RequestLost as error:
            raise TrainerLost("the trainer was lost") from error

    async def load(self, path: str) -> str:
        """Makes the trainer what a checkpoint says; "": the policy before RL.

        So runs begin, and new trainers take the place of lost ones. Returns the run's part of it.
        """
        # 1. The trainer begins, if it has not; the very first one with a warm start.
        begin = BeginRequest(
            meeting_place=await self._ask_trainer(Trainer.meeting_place),
            is_warm=self.is_warm and not self.base,  # later ones get the weights of the first
            num_readers=num_readers_of_trainer(self.cfg),
        )
        handle = await self._ask_trainer(Trainer.begin, begin)
        # 2. The weights of the very first one are version 0 for all runs and all later trainers.
        if not self.base:
            path_of_base = unnamed_file("version 0")
            try:
                await self.save(path_of_base, "")
            except TrainerLost:
                close_unnamed_file(path_of_base)  # the next trainer gets another one
                raise
            self.base = path_of_base
        # 3. It becomes what the checkpoint says, and publishes that. --kl needs the base, too.
        base = self.base if path and self.cfg.kl else ""  # mechanism: only what is needed
        async with self.at_trainer(path or self.base, base) as (of_run, of_base):
            load = LoadRequest(checkpoint=of_run, base=of_base, cfg=self.cfg)
            state = await self._become(load, is_fresh=not path)
        await self.arena_changed(handle)
        # 4. From here on generators use the arena of this trainer, and no older version.
        self.first_version = await self.published()
        self.handle = handle
        self.newest = path
        return state

    @contextlib.asynccontextmanager
    async def at_trainer(self, *paths: str) -> AsyncIterator[list[str]]:
        """The paths of these files on the trainer's host, while the body runs: here the same ones.

        One that is "" stays so.
        """
        yield list(paths)

    async def _become(self, load: LoadRequest, is_fresh: bool) -> str:
        """Whoever is trained becomes what a checkpoint says. Returns the run's part of it.

        is_fresh: it is the policy before RL, a checkpoint with no part but the trainer's.
        """
        return await self._ask_trainer(Trainer.load, load)

    async def arena_changed(self, handle: ArenaHandle) -> None:
        """A trainer publishes there now. Here nobody needs to do anything about that."""

    async def save(self, path: str, state: str) -> None:
        """Writes a checkpoint into this file. state: the run's part of it; "": weights alone."""
        parts = await self.other_parts() if state else ()  # of a run, those of others belong to it
        request = SaveRequest(path=path, state=state, parts=parts)
        await self._ask_trainer(Trainer.save, request)

    async def other_parts(self) -> tuple[str, ...]:
        """Files with what others than the trainer have to save: here nobody has."""
        return ()

    async def after_checkpoint(self) -> None:
        """A checkpoint of a run was saved, and more steps follow: nothing would be lost now.

        Section 16 has use for such a moment.
        """

    def remember(self, path: str, owner: object) -> None:
        """If the trainer is lost outside of a run, the next one becomes what this checkpoint says.

        owner: the Checkpoints that has it. If it is in memory, it goes when nobody refers to owner.
        """
        self.newest = path
        self.owner_of_newest = owner

    async def rebase(self, path: str, owner: object) -> None:
        """After --sft-steps: every run begins with this checkpoint. owner: as in `remember`."""
        if path != self.base:  # equal if this is called again, after the trainer was lost in `load`
            close_unnamed_file(self.base)
            self.base = path
            self.owner_of_base = owner
        await self.load("")

    async def published(self) -> int:
        """The trainer's version. Returns when generators can pull it."""
        return await self._ask_trainer(Trainer.published)

    async def step(self, batch: Rollout) -> StepStats:
        """One training step."""
        return await self._ask_trainer(Trainer.step, Packed.of(batch))

    async def supervise(self, request: SuperviseRequest) -> float:
        """One supervised step. Returns its loss."""
        return await self._ask_trainer(Trainer.supervise, request)

    async def examine(self, batch: Rollout) -> Examination:
        """Scores a part of a batch, and trains on nothing."""
        return await self._ask_trainer(Trainer.examine, Packed.of(batch))


async def sample(cluster: Cluster, prompts: list[Prompt], version: int) -> list[RolloutReply]:
    """Samples under this version or a newer one. The prompts are split over all generators.

    The same prompts, weights and number of generators give the same samples, bit for bit, whatever
    else is asked for: each part has a batch and a seed of its own.
    """
    num = min(cluster.num_generators, len(prompts))
    parts = []
    for first in range(num):
        some = prompts[first::num]
        parts.append(cluster.rollout(some, min_version=version, is_alone=True))
    return await asyncio.gather(*parts)


async def evaluate(
    cluster: Cluster,
    prompts: list[Prompt],
    waits_for_newest: bool = True,
) -> float:
    """The share of these prompts that is answered exactly, when the likeliest tokens are taken.

    What could not be judged counts as not exact. It is one request, so one generator answers all
    prompts under one version. waits_for_newest: under the version that the trainer has now, or a
    later one.
    """
    version = await cluster.published() if waits_for_newest else 0
    found = await cluster.rollout(
        prompts,
        group_size=1,
        greedy=True,
        min_version=version,
        by_task=True,
    )
    rewards = found.rollout.rewards.sum(1).tolist()  # nan is not exact
    return sum(is_exact(reward) for reward in rewards) / len(prompts)


async def with_retries(cluster: Cluster, call: Callable[[], Awaitable[Reply]]) -> Reply:
    """Makes a call of a cluster outside of a run, and makes it again if the trainer is lost.

    Before that the next trainer becomes what Cluster.newest says: what was last loaded or saved.
    """
    for _ in range(3):
        try:
            return await call()
        except TrainerLost:
            with contextlib.suppress(TrainerLost):
                await cluster.load(cluster.newest)
    return await call()  # what is raised the fourth time is for the caller


async def placement(cluster: Cluster) -> list[dict[str, str]]:
    """A row per host, for a table: on which of its devices the replicas of a service compute.

    With --kl also where the reference is.
    """
    rows = [{"host": host.address or "this host"} for host in cluster.hosts]
    lives = [host.life() for host in cluster.hosts]
    for service in cluster.services:
        devices: dict[str, list[str]] = collections.defaultdict(list)  # by the life of a host
        for place, ranks in (await service.status()).answers.items():
            for answer in ranks:
                is_seat = isinstance(answer, Seat)
                life = answer.life if is_seat else lives[place.host]
                device = answer.device if is_seat else answer
                devices[life].append(device or "cpu")  # a judge, which needs none, answers None
        for life, row in zip(lives, rows, strict=True):
            row[service.spec.name] = ", ".join(devices[life])
    if cluster.cfg.kl:
        for row in rows:
            row["reference"] = "in trainer" if row["trainer"] else ""
    return rows


# -- 11i. A run ------------------------------------------------------------------------------------
# Of a Ledger this section needs `start`, and `settle` as trained or lost; of a Run `begin`, `draw`,
# `count`, `count_sent`, `add_step` and `is_over`. All else is for sections 12 and 13.
#
# Where a group can be. Each arrow is a call of Ledger.start, Ledger.settle or, for the last one in
# the upper row, Ledger.undo. (Ledger.go_on enters what was lost with a run.)
#
#     drawn ---start---> in flight ---trained---> trained ---the trainer is lost---> undone
#                           |  |
#                           |  +------dropped---> dropped    too old when a batch was taken, or
#                           |                                sampled or asked for under a trainer
#                           |                                that was lost meanwhile
#                           +---------lost------> lost       no answer, not judged, at the trainer
#                                                            when that was lost, or in flight when
#                                                            the run was
#
# By example, 48 groups are started. A batch of 16 is trained on, 2 groups are dropped, 1 is lost:
# the books say started 48, trained 16, dropped 2, lost 1, and so 29 must be in flight. Then the
# trainer is lost, before the first checkpoint, and while it had no batch: trained 0, undone 16, and
# 29 still in flight.


class Ledger:
    """Where every group of a run is: started = trained + undone + dropped + lost + in flight.

    Whoever moves a group says so here, and nobody else counts. After a run it must add up, or some
    group was forgotten: its ticket (section 13) would never come back.
    """

    # Groups, 20 batches of the usual size. If so many more are lost than trained on, a run does not
    # get on: a loss now and then never comes to so many, a reward function that always raises does.
    # (That is for what is wrong from the start: after 1,000 trained groups 1,321 must be lost. Only
    # an asynchronous run asks this. A synchronous one ends when next to nothing of one batch could
    # be judged, `sample_batch`.)
    MAX_FRUITLESS = 320

    def __init__(self) -> None:
        self.changed = ChangeNotice()
        self.counts = {
            "started": 0,
            "trained": 0,
            "undone": 0,  # trained on by a trainer that was lost, and not in any checkpoint used
            "dropped": 0,  # too old for a batch, or of a trainer that was lost (section 13)
            "lost": 0,  # no answer, too little of it judged, or lost with the trainer or the run
        }
        self.in_flight: set[int] = set()  # ids: in a generator, at a judge, in the buffer, ...
        self.counts_before = dict(self.counts)  # those of them that earlier processes have counted
        self.trained_by_step: list[list[int]] = []  # ids, of each step
        self.draw_again: list[int] = []  # prompts whose groups were lost with a trainer or a run

    def start(self, group_ids: list[int]) -> None:
        """They were drawn, and are on their way to a generator."""
        self.counts["started"] += len(group_ids)
        self.in_flight.update(group_ids)

    def settle(
        self,
        fate: str,
        group_ids: list[int],
        with_trainer: bool = False,
    ) -> None:
        """They are in flight no more. Wakes whoever waits for tickets or groups.

        fate: "trained", "dropped" or "lost". with_trainer: the loss of the trainer cost them, so
        their prompts are drawn again.
        """
        self.in_flight.difference_update(group_ids)
        self.counts[fate] += len(group_ids)
        if fate == "trained":
            self.trained_by_step.append(group_ids)
        if with_trainer:
            self.draw_again = group_ids + self.draw_again
        self.changed.notify()

    def is_fruitless(self) -> bool:
        """Were so many groups lost that the run does not get on?"""
        return self.num_since("lost") - self.num_since("trained") > self.MAX_FRUITLESS

    def num_since(self, fate: str) -> int:
        """How many groups have had this fate in this process."""
        return self.counts[fate] - self.counts_before[fate]

    def num_missing(self) -> int:
        """Groups that were started and are nowhere. If it is not 0, somebody did not tell."""
        settled = sum(self.counts[fate] for fate in ("trained", "undone", "dropped", "lost"))
        return self.counts["started"] - settled - len(self.in_flight)

    def next_to_draw_again(self) -> int | None:
        """Takes out the first prompt that is to be drawn again. None: there is none."""
        return self.draw_again.pop(0) if self.draw_again else None

    # These two are for section 12.

    def go_on(
        self,
        counts: dict[str, int],
        was_in_flight: list[int],
        draw_again: list[int],
        trained_by_step: list[list[int]],
    ) -> None:
        """Becomes what a checkpoint says. What was in flight then is lost, and drawn again."""
        self.counts = counts
        self.counts["lost"] += len(was_in_flight)
        self.counts_before = dict(counts)
        self.trained_by_step = trained_by_step
        self.draw_again = was_in_flight + draw_again

    def undo(self, num_steps: int) -> None:
        """The trainer is back at a checkpoint: the last so many steps are undone."""
        group_ids: list[int] = []
        for _ in range(num_steps):
            group_ids = self.trained_by_step.pop() + group_ids
        self.counts["trained"] -= len(group_ids)
        self.counts["undone"] += len(group_ids)
        self.draw_again = group_ids + self.draw_again


@dataclass(frozen=True)
class StepRow:
    """A line of --log."""

    run: str  # such as "async"
    step: int  # from 1
    # Seconds since the run began.
    seconds: float
    # Seconds for which generators have worked since then (except on evaluations), and for which
    # they were there, those of all of them added up.
    busy_s: float
    generator_s: float
    # Share of held-out prompts answered exactly, by the last evaluation that has come back; None:
    # none has.
    heldout: float | None
    # How many sampled tokens of the batch had lag 0, 1, 2, ...
    lags: list[int]
    # Share of the answers in the batch that were stopped before they had an end.
    truncated: float
    # Share of the episodes that could not be judged, of all that came back so far in the run. They
    # are in no batch: the reward is that of the others.
    unjudged: float
    # What the user was to say in the batch's first episode (a tool or an environment may say
    # something else), and what the policy answered; three dots where that was stopped.
    heard: str
    said: str
    stats: StepStats


@dataclass(frozen=True)
class SpeedRow:
    """How fast the first steps of a run were."""

    run: str
    s: float  # seconds for these steps
    steps: int
    steps_per_s: float
    tokens_per_s: float  # sampled and trained on
    # Share of the time for which they worked: 1 is all the time. Of generators, the mean.
    generators_busy: float
    trainer_busy: float
    # Mean over the last tenth of these steps.
    reward: float


class Run:
    """All that a run is besides the trainer's state.

    What must be saved of it is plain data (as_json), and so it can be a part of a checkpoint.
    """

    def __init__(self, label: str, num_steps: int, sampler: Sampler) -> None:
        self.label = label
        self.num_steps = num_steps
        self.sampler = sampler
        self.ledger = Ledger()
        self.rows: list[StepRow] = []  # of the steps that the trainer has made
        # Steps that it was told to make: those of `rows`, one at work, one that waits (section 13).
        self.num_sent = 0
        self.num_before = 0  # steps that were made when this process took it over
        self.num_returns = 0  # to a checkpoint, because the trainer was lost
        self.version = 0  # of the trainer, when it has made the steps of `rows`
        self.next_number = 0  # of the prompt to draw next
        self.busy_s = 0.0  # of generators
        self.generator_s = 0.0  # as in StepRow; how many there are may change
        self.counted_until_s = 0.0  # the second of the run up to which generator_s is added up
        self.num_judged = 0  # episodes that came back, and were judged
        self.num_unjudged = 0  # that came back, and could not be
        self.num_cut = 0  # episodes that did not fit into the context
        self.began = time.monotonic()

    def begin(self, version: int) -> None:
        """Its clock starts. version: at which the trainer is now."""
        self.version = version
        self.began = time.monotonic()

    def count_sent(self) -> None:
        """The trainer is told to make another step."""
        self.num_sent += 1

    def version_of_next_batch(self) -> int:
        """The version at which the trainer will begin the batch that is sent to it next.

        Steps that it was told to make, and has not answered yet, come before that.
        """
        return self.version + self.num_sent - len(self.rows)

    def draw(self, num_prompts: int) -> list[Prompt]:
        """The next prompts; their groups count as started."""
        prompts: list[Prompt] = []
        while len(prompts) < num_prompts:
            number = self.ledger.next_to_draw_again()
            if number is None:
                number = self.next_number
                self.next_number += 1
            prompt = self.sampler.prompt(number)
            if prompt is not None:
                prompts.append(prompt)
        self.ledger.start([prompt.id for prompt in prompts])
        return prompts

    def count(self, found: RolloutReply) -> Rollout:
        """Enters a reply into the books. Returns the part of it that can be trained on."""
        self.busy_s += found.busy_s
        self.num_cut += int(found.rollout.is_cut.sum())
        judged = found.rollout.judged()
        self.num_judged += len(judged.said)
        self.num_unjudged += len(found.rollout.said) - len(judged.said)
        return judged

    def add_step(
        self,
        stats: StepStats,
        batch: Rollout,
        heldout: float | None,
        num_generators: int,
    ) -> StepRow:
        """Enters a step that the trainer has made with this batch.

        heldout: as in StepRow. num_generators: that there are now.
        """
        # Before `settle`, which gives tickets back: requests made with these name this version.
        self.version += 1
        assert stats.version == self.version, "the trainer is at another version than was expected"
        seconds = since(self.began)
        self.generator_s += num_generators * (seconds - self.counted_until_s)
        self.counted_until_s = seconds
        self.ledger.settle("trained", batch.group_ids.unique().tolist())
        lags = (stats.version - 1 - batch.tokens.versions)[batch.sampled()]
        num_answers = sum(len(said) for said in batch.said)  # 0 if all were cut in their first turn
        row = StepRow(
            run=self.label,
            step=len(self.rows) + 1,
            seconds=seconds,
            busy_s=self.busy_s,
            generator_s=self.generator_s,
            heldout=heldout,
            lags=lags.bincount().tolist(),
            truncated=int(batch.is_truncated.sum()) / max(1, num_answers),
            unjudged=self.num_unjudged / max(1, self.num_unjudged + self.num_judged),
            heard=as_heard(batch.prompts[0]),
            said=as_shown(batch.said[0], batch.is_truncated[0].tolist()),
            stats=stats,
        )
        self.rows.append(row)
        return row

    def end_after(self, num_steps: int) -> None:
        """Changes after how many steps it ends. At most so many have been sent."""
        self.num_steps = num_steps

    def is_over(self) -> bool:
        """Has the trainer made all steps?"""
        return len(self.rows) >= self.num_steps

    # These three are for section 12.

    def as_json(self) -> str:
        """The run's part of a checkpoint."""
        state = {
            "next_number": self.next_number,
            "busy_s": self.busy_s,
            "generator_s": self.generator_s,
            "num_judged": self.num_judged,
            "num_unjudged": self.num_unjudged,
            "num_cut": self.num_cut,
            "counts": self.ledger.counts,
            "in_flight": sorted(self.ledger.in_flight),
            "draw_again": self.ledger.draw_again,
            "trained_by_step": self.ledger.trained_by_step,
            "rows": [dataclasses.asdict(row) for row in self.rows],
        }
        return json.dumps(state)

    def go_on(self, saved: str) -> None:
        """Becomes what as_json wrote, in a process that has just begun."""
        found = json.loads(saved)
        for row in found["rows"]:
            stats = StepStats(**row.pop("stats"))
            self.rows.append(StepRow(**row, stats=stats))
        self.num_sent = len(self.rows)
        self.num_before = len(self.rows)
        self.next_number = found["next_number"]  # mechanism: prompts go on
        self.busy_s = found["busy_s"]
        self.generator_s = found["generator_s"]
        self.counted_until_s = self.rows[-1].seconds
        self.num_judged = found["num_judged"]
        self.num_unjudged = found["num_unjudged"]
        self.num_cut = found["num_cut"]
        self.ledger.go_on(
            found["counts"], found["in_flight"], found["draw_again"], found["trained_by_step"]
        )
        self.began = time.monotonic() - self.rows[-1].seconds

    def go_back(self, num_steps: int, group_ids: list[int], version: int) -> None:
        """The trainer was lost, with these groups, and is back at the state after num_steps.

        version: at which it is there.
        """
        self.num_returns += 1
        self.version = version
        self.ledger.settle("lost", group_ids, with_trainer=True)
        self.ledger.undo(len(self.rows) - num_steps)
        self.rows = self.rows[:num_steps]
        self.num_sent = num_steps


def speed_of(run: Run, num_steps: int) -> SpeedRow:
    """How fast the first num_steps of a run were."""
    rows = run.rows[:num_steps]
    seconds = rows[-1].seconds
    return SpeedRow(
        run=run.label,
        s=seconds,
        steps=num_steps,
        steps_per_s=num_steps / seconds,
        tokens_per_s=sum(row.stats.num_tokens for row in rows) / seconds,
        generators_busy=rows[-1].busy_s / rows[-1].generator_s,
        trainer_busy=sum(row.stats.step_s for row in rows) / seconds,
        reward=mean_reward(rows[9 * num_steps // 10 :]),
    )


def as_heard(prompt: Prompt) -> str:
    """What the user is to say in an episode, as a line for people."""
    turns = [" ".join(turn.user.split()) for turn in prompt.turns]
    return " ".join(turns)[:100]


def as_shown(said: list[str], is_truncated: list[bool]) -> str:
    """The answers of an episode as a line for people."""
    shown = []
    for text, is_stopped in zip(said, is_truncated, strict=False):
        line = " ".join(text.split())  # it may have several, and none may pass for one of ours
        shown.append(f"{line}..." if is_stopped else line)
    return " ".join(shown)[:100]


def rows_since(run: Run) -> list[StepRow]:
    """Steps made since it began, or went on: those before may have had other flags."""
    return run.rows[run.num_before :]


def mean_reward(rows: list[StepRow]) -> float:
    """Of the batches of these steps."""
    return statistics.fmean(row.stats.reward for row in rows)


NO_LOSS = 0.01  # at lag 0, with advantages that add up to 0, the loss is smaller than this


def alarms(rows: list[StepRow]) -> Iterator[str]:
    """What it means when a number of the last step is not healthy, or only seems not to be."""
    stats = rows[-1].stats
    # The same limit for all, for alarms know no --dtype: that of MAX_K3 for bf16.
    if stats.mismatch_k3 is not None and stats.mismatch_k3 > 0.01:
        yield "mismatch_k3 > 0.01: trainer and generator disagree about the same weights"
    if stats.ess < 0.3:
        yield "ess < 0.3: few samples carry all the weight; too old, or steps too long"
    if stats.clipped > 0.5:
        yield "clipped > 0.5: most tokens had moved too far, and got no gradient (section 10)"
    if stats.lag_max == 0 and abs(stats.loss) < NO_LOSS:
        # This only seems ill, which is why it is said. The lines of a run have no loss, --log has.
        yield "loss near 0 at lag 0, in --log: with ppo it is by construction (section 10)"
    if stats.entropy < 0.002:
        yield "entropy < 0.002: the policy has no alternatives left to compare"
    if rows[-1].unjudged > 0.1:
        yield "unjudged > 0.1: reward is of the episodes that could be judged, not of all"
    rewards = [row.stats.reward for row in rows[-20:]]
    if rewards == [0.0] * 20:
        yield "reward 0 in 20 batches: all wrong, nothing to learn from"
    if rewards == [1.0] * 20:
        yield "reward 1 in 20 batches: all right, nothing to learn from"


# -- 11j. Training: a run on a cluster -------------------------------------------------------------
# (The loop itself is `train_sync`, at the end of this part: you may read it first.)
#
# The lines that a run prints, column by column (DOCS 9 has each at length):
#
#     step       training steps made            reward     mean of the batch, mostly 0 to 1
#     exact      held-out prompts that were answered exactly, by the last evaluation that came back
#     lag, max   mean and largest lag of the batch, in versions
#     k3         recorded against recomputed, over tokens of lag 0; "-": there were none
#     nats       entropy per token, with natural logarithms: at 0 nothing new is tried any more
#     gen        share of the time so far for which generators worked; train: the trainer
#     tok/s      sampled and trained on, so far
#     heard      what the user was to say in one episode; said: what the policy answered


class Training:
    """A run on a cluster: what is done before it, after each step, and afterwards.

    This one begins at version 0, saves nothing, and ends when the trainer is lost. Section 12 has a
    subclass that saves and goes on, for which is_pause_due, newest, in_pause and folder are here.
    """

    EVALUATE_EVERY = 25  # steps
    # Steps in a row of which no gradient was finite, in any pass: then the run ends. One may be an
    # odd batch; as nothing changes in such a step, after ten of them there is no hope for the next.
    MAX_SKIPPED = 10
    HEAD = "      step reward exact  lag max    k3 nats  gen train tok/s  heard > said"
    INDENT = " " * 4  # of these lines, which need the room

    def __init__(
        self,
        cluster: Cluster,
        run: Run,
        report: Report,
        folder: str = "",
    ) -> None:
        """folder: for checkpoints; this class has none."""
        self.cluster = cluster
        self.run = run
        self.report = report
        self.folder = folder
        self.cfg = cluster.cfg
        self.heldout: float | None = None
        self.evaluations: list[asyncio.Task[None]] = []
        self.alarms_told: set[str] = set()
        self.has_shown = False  # a line of a step

    # `async with training:` begins the run, and awaits or cancels its evaluations at its end.
    async def __aenter__(self) -> Training:
        await self.begin()
        return self

    async def __aexit__(self, error_type: type[BaseException] | None, *_: Any) -> None:
        if error_type is not None:
            for evaluation in self.evaluations:
                evaluation.cancel()
        await asyncio.gather(*self.evaluations, return_exceptions=True)
        self.report.curve(curve_of(self.run))

    async def begin(self) -> None:
        """The trainer becomes what it was before RL."""
        await self.cluster.load("")
        self.run.begin(self.cluster.first_version)

    def is_pause_due(self) -> bool:
        """Must all steps that were sent be made before another one is sent?"""
        return False

    def newest(self) -> str:
        """The path of its newest checkpoint; "": there is none, as always in this class."""
        return ""

    async def in_pause(self) -> None:
        """Called when no step is under way."""

    async def trainer_lost(self, error: TrainerLost, group_ids: list[int]) -> None:
        """Called then; raises if the run cannot go on. group_ids: of groups lost with it."""
        raise error

    def step_done(self, stats: StepStats, batch: Rollout) -> None:
        """Enters a step into the books, writes it to --log, and looks whether all is well."""
        row = self.run.add_step(stats, batch, self.heldout, self.cluster.num_generators)
        self.report.doing(f"run {self.run.label}, step {row.step} of {self.run.num_steps}")
        if self.cfg.log:
            line = dataclasses.asdict(row)
            line.update(line.pop("stats"))  # the fields of stats stand beside the others
            with excusing(self.report, "--log"):
                append_line(self.cfg.log, as_json(line))
        for meaning in alarms(self.run.rows):
            if meaning not in self.alarms_told:  # once per run
                self.alarms_told.add(meaning)
                self.report.say(f"{self.run.label} {row.step}: {meaning}")
        skipped = [one.stats.skipped for one in self.run.rows[-self.MAX_SKIPPED :]]  # by step
        if skipped == [self.cfg.passes] * self.MAX_SKIPPED:
            raise RuntimeError(f"in {self.MAX_SKIPPED} steps in a row no gradient was finite")
        if row.step % self.EVALUATE_EVERY == 0:
            self.evaluations.append(asyncio.ensure_future(self._evaluate()))
        self._show(row)

    async def _evaluate(self) -> None:
        """Evaluates beside the steps. If that fails, the figure stays what it was."""
        heldout = self.run.sampler.heldout
        try:
            self.heldout = await evaluate(self.cluster, heldout, waits_for_newest=False)
        except Exception as error:  # whatever it is, it costs no step
            self.report.say(*f"{self.run.label}: an evaluation failed: {error}".splitlines())

    def _show(self, row: StepRow) -> None:
        """Prints a line for the first step, and one after every eighth part of --steps.

        On a terminal there is another one, for every tenth step, which the next one overwrites.
        """
        every = max(1, self.cfg.steps // 8)
        is_kept = row.step == 1 or row.step % every == 0
        is_live = self.report.is_terminal and row.step % 10 == 0
        if not is_kept and not is_live:
            return
        stats = row.stats
        speed = speed_of(self.run, row.step)
        exact = "-" if row.heldout is None else f"{row.heldout:.2f}"
        mismatch = "-" if stats.mismatch_k3 is None else f"{stats.mismatch_k3:.0e}"
        line = (
            f"{row.run:5s}{row.step:5d}{stats.reward:7.2f}{exact:>6s}"
            f"{stats.lag_mean:5.1f}{stats.lag_max:4d}{mismatch:>6s}{stats.entropy:5.2f}"
            f"{speed.generators_busy:5.2f}{speed.trainer_busy:6.2f}{speed.tokens_per_s:6.0f}"
            f"  {row.heard} > {row.said}"
        )
        if not self.has_shown:
            self.has_shown = True
            self.report.say(self.HEAD, indent=self.INDENT)
        if is_kept:
            width = self.report.WIDTH - len(self.INDENT)
            self.report.say(line[:width], indent=self.INDENT)
        else:
            self.report.say_live(line)

    def largest_lag(self) -> int:
        """The largest lag of a token in the steps that this command has made; 0: it made none."""
        return max((row.stats.lag_max for row in rows_since(self.run)), default=0)

    def largest_k3(self) -> float | None:
        """The largest mean k3 of tokens of lag 0 in a step of this command; None: there is none."""
        found = []
        for row in rows_since(self.run):
            if row.stats.mismatch_k3 is not None:
                found.append(row.stats.mismatch_k3)
        return max(found, default=None)

    def tell_learning(
        self,
        before: float,
        after: float,
        mismatch_k3: float | None,
    ) -> float:
        """Reports what was learned. Returns the reward gained, last tenth of the steps over first.

        before, after: held-out exact. mismatch_k3: the largest one.
        """
        limit = MAX_K3[dtype_name(self.cfg)]
        self.report.check("largest k3 of both programs", mismatch_k3, "<=", limit)
        num_prompts = len(self.run.sampler.heldout)
        what = f"held-out exact, {num_prompts} prompts of {self.cfg.task}"
        self.report.say(f"{what}: {before:.3f} -> {after:.3f}")
        tenth = max(1, len(self.run.rows) // 10)
        first = mean_reward(self.run.rows[:tenth])
        last = mean_reward(self.run.rows[-tenth:])
        self.report.figure(
            heldout_before=before,
            heldout_after=after,
            mismatch_k3=mismatch_k3,
            reward_first=first,
            reward_last=last,
            lag_max=self.largest_lag(),
        )
        return last - first


def curve_of(run: Run, most: int = 400) -> dict[str, Any]:
    """How a run went: an entry of `curves`, which --json has for each stage, and the page draws.

    most: of its steps, evenly spread and the last among them, are kept.
    """
    num_lags = max((len(row.lags) for row in run.rows), default=0)
    lags = [0] * num_lags
    for row in run.rows:
        for lag, num_tokens in enumerate(row.lags):
            lags[lag] += num_tokens
    every = max(1, math.ceil(len(run.rows) / most))
    first = (len(run.rows) - 1) % every  # so that the last one is kept
    kept = run.rows[first::every]
    return {
        "run": run.label,
        "steps": len(run.rows),
        "began_s": time.time() - since(run.began),  # since 1970
        "seconds": [round(row.seconds, 3) for row in kept],  # since then, at the end of each step
        "reward": [round(row.stats.reward, 4) for row in kept],
        "lag_max": [row.stats.lag_max for row in kept],
        "lags": lags,  # how many tokens of all steps had lag 0, 1, 2, ...
        "lost": [],  # replicas: Report.enter_losses
    }


def expect(training: Training, what: str, got: float, relation: str, want: float) -> None:
    """Checks what tells of learning, which only the tiny policy can promise.

    What a model of your own learns depends on that model, its task and its rate, and what is
    learned from a reward model depends on the reward model as well. Both are only shown.
    """
    if training.cfg.model == "tiny" and training.cfg.reward == "task":
        training.report.check(what, got, relation, want)
    else:
        training.report.say(f"{what}: {show(got)}")


async def train_sync(training: Training) -> None:
    """The synchronous loop: sample, step, publish, one after the other.

    The Training knows what to do when the trainer is lost. If a request to the generators is lost
    for good, that is, with every replica that tried it, the run ends: the same request would be
    lost again.
    """
    run = training.run
    async with training:
        while not run.is_over():
            try:
                batch = await sample_batch(training.cluster, run)
                run.count_sent()
                stats = await training.cluster.step(batch)
                training.step_done(stats, batch)
                await training.in_pause()
            except TrainerLost as error:
                await training.trainer_lost(error, sorted(run.ledger.in_flight))


async def sample_batch(cluster: Cluster, run: Run) -> Rollout:
    """A batch that was sampled under the trainer's newest version, so its lag is 0.

    RuntimeError: too little of it could be judged.
    """
    prompts = run.draw(cluster.cfg.batch_groups)
    parts = await sample(cluster, prompts, run.version)
    batch = Rollout.join([run.count(part) for part in parts])
    # A group of which nothing could be judged is not in the batch. One of which a single episode
    # was judged stays in it, with nothing to be compared with. (In an asynchronous run that one is
    # lost as well, Flow.least_rows, and another group takes its place. Here there is no other.)
    judged = set(batch.group_ids.tolist())
    unjudged = [prompt.id for prompt in prompts if prompt.id not in judged]
    run.ledger.settle("lost", unjudged)
    if len(batch.said) < cluster.cfg.trainers:
        raise RuntimeError(f"of {len(prompts)} groups {len(judged)} could be judged")
    return batch


class Lab:
    """What the demos of RL are given: running actors.

    Starting them takes 6 s, mostly imports. So the RL stages of one command share them, as the runs
    of one user would. They share nothing else: every run begins with the policy before RL.
    """

    def __init__(self, report: Report, cluster: Cluster, training_class: type[Training]) -> None:
        self.report = report
        self.cluster = cluster
        self.training_class = training_class
        self.is_running = False
        self.has_failed = False  # to start
        self.own_run: Training | None = None  # for --evaluate, --export: the last with a folder
        self.imports_s = since(began_s())  # until here the command has imported, and read its flags
        # When it began to start actors; None before that, and after the first rollout was told.
        self.start_s: float | None = None

    async def start(self) -> None:
        """Starts the actors, the first time that it is called."""
        if self.has_failed:
            raise RuntimeError("the actors of RL could not be started, in a stage before")
        if not self.is_running:
            self.is_running = True
            self.start_s = time.monotonic()
            self.report.say("starting trainer, generators and judges (about 6 s)")
            self.report.doing("starting trainer, generators and judges")
            try:
                await asyncio.gather(self.cluster.start(), self._import_torch())
            except Exception:
                self.has_failed = True
                await self.close()
                raise
            self.report.table(await placement(self.cluster))

    def tell_first_rollout(self) -> None:
        """Called behind the first rollout of a stage: says how long a user waits for one.

        That is from the beginning of the command, without the stages before the first one of RL.
        """
        if self.start_s is not None:
            took_s = self.imports_s + since(self.start_s)
            self.start_s = None
            self.report.say(f"first rollout after {took_s:.1f} s")
            self.report.figure(first_rollout_s=took_s)

    async def _import_torch(self) -> None:
        """Imports torch here, which this process needs from the first rollout on.

        Even in a thread an import lets hardly anything else in this process run. So it begins when
        the judges are ready, and only trainer and generators are to come.
        """
        await self.cluster.judges.status(60.0)
        await asyncio.to_thread(importlib.import_module, "torch")

    async def close(self) -> None:
        """Ends them, if they were started."""
        if self.is_running:
            self.is_running = False
            await self.cluster.close()

    def training(
        self,
        label: str,
        num_steps: int,
        folder: str = "",
    ) -> Training:
        """A run that has not begun.

        folder: for its checkpoints, below the folder of --checkpoint. If either is not given they
        are kept in memory.
        """
        sampler = Sampler(self.cluster.cfg.task, self.cluster.cfg.seed)
        run = Run(label, num_steps, sampler)
        training = self.training_class(self.cluster, run, self.report, folder)
        if folder and (training.cfg.evaluate or training.cfg.export):
            self.own_run = training
        return training

    def last_run(self) -> Training:
        """The run of the last stage that had one; asked for once, because then it is forgotten."""
        training = self.own_run
        assert training is not None, "the stage had no run"
        self.own_run = None
        return training


@stage(
    "trainer and generator give the same log-probabilities for the same weights; reward rises; "
    "every sample has lag 0",
    hint="write `pass`: generators never pull",
    mechanism="pull",
    needs_lab=True,
)
async def demo_sync_rl(report: Report, cfg: Config, lab: Lab) -> None:
    """Compares both programs on a batch, trains synchronously, and evaluates before and after."""
    cluster = lab.cluster
    report.say(f"seed {cfg.seed}")
    await with_retries(cluster, lambda: cluster.load(""))
    # Before anything is trained: one batch of lag 0, scored by both programs. If one of these
    # checks fails, no training will learn what it should.
    training = lab.training("sync", num_steps_of(cfg, "sync_rl"), "sync_rl")
    sampler = training.run.sampler
    prompts = sampler.first(cfg.batch_groups)
    parts = await with_retries(cluster, lambda: sample(cluster, prompts, cluster.first_version))
    lab.tell_first_rollout()
    first = Rollout.join([part.rollout.judged() for part in parts])
    if not first.said:
        raise RuntimeError(f"of {len(prompts)} groups none could be judged")
    before = await with_retries(cluster, lambda: evaluate(cluster, sampler.heldout))
    found = await with_retries(cluster, lambda: cluster.examine(first))
    limit = MAX_K3[dtype_name(cfg)]
    report.check("k3 of both programs", found.mean_k3, "<=", limit)
    report.check("probabilities, how far from a sum of 1", found.off_from_1, "<", 1e-4)
    report.check("log-probabilities above 0", found.num_above_0, "==", 0)
    report.check("parameters without a gradient", found.num_without_gradient, "==", 0)
    report.check("advantages, largest sum of a group", found.group_sum, "<", 1e-4)
    expect(training, "answers that differ", found.num_different, ">", len(first.said) // 10)

    await train_sync(training)
    # The same batch, scored by what the trainer has become: now it is far from lag 0. If its k3 was
    # still as small, k3 would not show a lag, and the small ones above would prove nothing.
    stale = await with_retries(cluster, lambda: cluster.examine(first))
    after = await with_retries(cluster, lambda: evaluate(cluster, sampler.heldout))
    # If the run was already over, this command made no step; then the first batch tells the k3.
    largest_k3 = training.largest_k3() if rows_since(training.run) else found.mean_k3
    gained = training.tell_learning(before, after, largest_k3)
    late = f"k3 of the first batch, {training.run.num_steps} steps too late"
    expect(training, late, stale.mean_k3, ">", 1e-4)
    report.check("lag, largest of the steps of this command", training.largest_lag(), "==", 0)
    expect(training, "reward gained, last tenth over first", gained, ">", 0.1)
    # You can now train a policy, and know for each number whether it means that things go well.


# == 12. RECOVERY ==================================================================================
# Problem. A run takes days, and something ends it on the way: a trainer that dies, a machine that
#   loses its power in the middle of a write, a reward function that never returns. If it is begun
#   again from the weights alone it learns something else, for more than weights was going on.
# Rule. Save all that the next step depends on, together: weights, the optimizer's moments, the
#   learning rate's schedule, which prompts come next. The seeds of sampling follow from those. A
#   checkpoint is complete on the disk before it gets its name, and two are kept, so at any moment
#   there is a good one. What was under way when the run was cut off is drawn again. So no prompt
#   is left out because of the cut, and in the steps that the run has in the end none counts twice:
#   what was trained on after the checkpoint is undone with the weights that came of it.
#
#   In a synchronous run, with the same flags, these are all the causes of what comes next: a run
#   that goes on equals one that was never cut off, bit for bit. In an asynchronous run the order in
#   which groups come, which depends on the machine, is a cause too. To save it would not be enough:
#   it would have to be forced on the generators again. So such a run goes on with all that was
#   learned until the checkpoint, and with all prompts that were still to come, but in another
#   order. (Cut off or not, it leaves out prompts whose groups come too late, section 13.)
# Cost. A write every so many steps; the steps since the newest checkpoint are made again.
# Not here. Checkpoints over several machines' disks (torch.distributed.checkpoint).
# Source. The order write, fsync, rename, fsync of the folder: Pillai 2014.
#
#     step 50                     step 57            then
#     checkpoint: weights 50,     the trainer dies   a trainer begins and becomes what step 50 was;
#       moments, schedule, rows 1-50,                the groups of steps 51 to 57 are `undone`:
#       the next prompt: some 800                    their prompts are drawn again, in that order


# What a run keeps, and what it takes back, when the trainer dies after step 57, with a checkpoint
# of step 50. Two batches, b58 and b59, are at the trainer then: in an asynchronous run (section 13)
# the next batch already waits there while the trainer works on one. In a synchronous run there is
# one.
#
#     rows of the run       51 to 57 are taken back, and made again (--log has both)
#     groups of 51 to 57    112 were trained on: now they count as undone
#     groups of b58, b59    32 count as lost
#     prompts of all these  144 are drawn again, before new ones, in the same order
#     next number to draw   stays: so the loss leaves no prompt out, and no other prompt comes twice

# What lies in the folder, and what a run goes on from if it is cut off there:
#
#     step-50, step-100                     100
#     step-50, step-100, unfinished         100    150 is being written, or lies there half written
#     step-50, step-100, step-150           150    it was flushed, and has got its name
#     step-100, step-150                    150    the third newest was removed
#     step-100, step-150 (cannot be read)   100    the other is called step-150.pt.damaged-1 then
#     two that cannot be read               none   one line says so, and the command ends, so that
#                                                  no new run begins over the one that was there
#
# Besides the checkpoint there are the flags of the command that goes on. Each counts from the next
# step on; or it is refused, in a line that names it:
#
#     --task, --model, --seed, --reward,    refused, for the steps before would not be steps of this
#     --preferences, --sft-steps, --sft-lr  run: `is_kept` in Config
#     --steps                               the rate of each further step is what it would have been
#                                           with so many from the start (share_of_rate); fewer than
#                                           were made are refused
#     all others                            count. With another --generators the bits differ from
#                                           then on: each generator has its part of the prompts,
#                                           and samples it with a seed of its own


class Checkpoints:
    """A run's newest two checkpoints: in a folder, or in memory, and then they go with it."""

    def __init__(self, folder: str = "", paths: Sequence[str] = ()) -> None:
        """folder: "" for memory. paths: of checkpoints in memory, newest first, now its own."""
        self.folder = folder
        self.paths = list(paths)  # newest first
        # All files in memory, which are to be closed: the checkpoints, and those that are none,
        # for they are half written, or cannot be read.
        self.in_memory = set(paths)
        if folder:
            found = sorted(pathlib.Path(folder).glob("step-*.pt"), reverse=True)
            self.paths = [str(path) for path in found]

    def __del__(self) -> None:
        """The memory goes when nobody refers to this object any more."""
        for path in self.in_memory:
            close_unnamed_file(path)

    def look(self, cfg: Config | None) -> tuple[str, dict[str, str]]:
        """The newest that can be read, and why newer ones cannot, by path. "": there are none.

        cfg: as in read_checkpoint. Raises OtherRun for a whole one of another run: only damaged
        ones are passed over. Other ValueError: there are some, and none can be read. To begin again
        is for people to decide.
        """
        damaged: dict[str, str] = {}
        for path in self.paths:
            try:
                read_checkpoint(path, cfg)
            except OtherRun:
                raise
            except ValueError as error:
                damaged[path] = str(error)
            else:
                return path, damaged
        if damaged:
            whys = "; ".join(damaged.values())
            raise ValueError(f"{whys}. None is left: move them away to begin again")
        return "", damaged

    def newest(self, cfg: Config | None, say: Callable[[str], None]) -> str:
        """As `look`, for a run, to which the folder belongs: damaged ones are moved aside.

        say: is told of each. Under its old name it would be the newest again at the next start, and
        a step that is made again would overwrite what somebody may still be able to mend.
        """
        path, damaged = self.look(cfg)
        for bad, why in damaged.items():
            self.paths.remove(bad)
            moved = self._move_aside(bad)  # "now called ...; ", or ""
            say(f"{why}; {moved}used instead: {path}")
        return path

    def _move_aside(self, path: str) -> str:
        """Gives it another name, which no other file has. Returns a few words that say so."""
        if not self.folder or not os.path.exists(path):
            return ""  # in memory it is nobody's work; or somebody has removed it
        number = 1
        while os.path.exists(f"{path}.damaged-{number}"):
            number += 1
        aside = f"{path}.damaged-{number}"
        with writing(aside):
            os.replace(path, aside)
        return f"now called {aside}; "

    def room(self) -> str:
        """Where to write the next one: over a file that is no checkpoint, if there is one.

        Of a path only the last folder is made. A lock in the folder above it keeps other commands
        out (`lock_folder`). If that folder has gone away, so has the lock, and in a new one
        of that name this run might not be alone.
        """
        if self.folder:
            with writing(self.folder), contextlib.suppress(FileExistsError):
                os.mkdir(self.folder)
            return f"{self.folder}/unfinished"
        no_checkpoints = self.in_memory.difference(self.paths)
        path = no_checkpoints.pop() if no_checkpoints else unnamed_file("checkpoint")
        self.in_memory.add(path)
        return path

    def keep(self, room: str, step: int) -> None:
        """Makes what was written there the newest, when it is on the disk, and not before.

        Without the first flush the disk might have the name before the content. Without the second
        it might lose the name.
        """
        path = room
        if self.folder:
            path = f"{self.folder}/step-{step:08d}.pt"
            with writing(path, unfinished=room):
                flush_to_disk(room)
                os.replace(room, path)
                flush_to_disk(self.folder)
        others = [other for other in self.paths if other != path]
        self.paths = [path, *others[:1]]
        for old in others[1:]:
            if self.folder:
                with contextlib.suppress(OSError):  # it has gone, or the disk is read-only now
                    os.remove(old)
            else:
                self.in_memory.remove(old)
                close_unnamed_file(old)


class Interrupted(BaseException):
    """Ctrl-C, when the step under way has been saved.

    It is no Exception, so nothing catches it on its way to `main`, which ends the process.
    """


class SafeTraining(Training):
    """A run that saves itself, and goes on from what was saved.

    It does so when the trainer is lost, and also when everything was lost and the same command is
    given again.
    """

    MAX_LOSSES = 5  # of the trainer without a checkpoint in between: more is no accident

    def __init__(
        self,
        cluster: Cluster,
        run: Run,
        report: Report,
        folder: str = "",
        checkpoints: Checkpoints | None = None,
        save_every: int | None = None,
    ) -> None:
        """folder: of this run, in the folder of --checkpoint; without either, memory is used.

        checkpoints: instead of those. save_every: steps, instead of --save-every.
        """
        super().__init__(cluster, run, report, folder)
        path = f"{self.cfg.checkpoint}/{folder}" if folder and self.cfg.checkpoint else ""
        self.checkpoints = checkpoints or Checkpoints(path)
        self.save_every = save_every or self.cfg.save_every
        self.num_losses = 0  # of the trainer, since the newest checkpoint
        self.is_interrupted = False
        self.handler_before: Any = None  # of Ctrl-C

    async def begin(self) -> None:
        """Begins at version 0, or goes on after the newest checkpoint."""
        saved = await self._load_newest()
        self.run.begin(self.cluster.first_version)
        if saved:
            self.run.go_on(saved)
            self._say_where()
        if self.checkpoints.folder and not self.run.is_over():
            self.handler_before = signal.signal(signal.SIGINT, self._interrupt)

    async def __aexit__(self, error_type: type[BaseException] | None, *rest: Any) -> None:
        if self.handler_before is not None:
            signal.signal(signal.SIGINT, self.handler_before)
        await super().__aexit__(error_type, *rest)

    def _interrupt(self, *_: Any) -> None:
        """The first Ctrl-C lets a step end and be saved. A second one ends the process at once."""
        self.is_interrupted = True
        signal.signal(signal.SIGINT, self.handler_before)

    async def _load_newest(self) -> str:
        """Loads the newest checkpoint into the trainer. Returns the run's part of it."""
        while True:
            path = self.checkpoints.newest(self.cfg, self.report.say)
            try:
                saved = await self.cluster.load(path)
            except TrainerLost as error:  # the trainer that was to load it
                self._count_loss(error)
            else:
                self.cluster.remember(path, self.checkpoints)
                return saved

    def _count_loss(self, error: TrainerLost) -> None:
        """Raises RuntimeError if the trainer was lost too often since the newest checkpoint."""
        self.num_losses += 1
        if self.num_losses > self.MAX_LOSSES:
            raise RuntimeError(f"again and again: {error}") from error

    def newest(self) -> str:
        """The path of the newest checkpoint; after the last step, that of the trained model."""
        return self.checkpoints.paths[0] if self.checkpoints.paths else ""

    def _say_where(self) -> None:
        """Says after which step the run goes on."""
        num_steps = len(self.run.rows)
        self.report.say(f"{self.run.label}: goes on after step {num_steps}")

    def is_save_due(self) -> bool:
        """After every save_every steps, at the end, and after Ctrl-C.

        It counts steps that were sent to the trainer. In a synchronous run these are the steps that
        it has made. In an asynchronous one (section 13) nothing more is sent until they are: see
        is_pause_due. So whoever saves, `in_pause`, finds as many rows as steps were sent.
        """
        step = self.run.num_sent
        is_last = step == self.run.num_steps
        return step % self.save_every == 0 or is_last or self.is_interrupted

    def is_pause_due(self) -> bool:
        """As in Training: to be saved."""
        return self.is_save_due()

    async def in_pause(self) -> None:
        """Saves the run, if it is time to.

        What the trainer writes and what this process knows go into one file, so that they cannot be
        of different steps.
        """
        if not self.is_save_due():
            return
        step = len(self.run.rows)
        try:
            room = self.checkpoints.room()
            await self.cluster.save(room, self.run.as_json())
            self.checkpoints.keep(room, step)
        except NotWritten as error:
            if self.is_interrupted:  # whoever wants to end it does not want the next stage
                raise Interrupted(f"interrupted; {error}") from error
            raise
        self.cluster.remember(self.checkpoints.paths[0], self.checkpoints)
        self.num_losses = 0
        if self.is_interrupted:
            raise Interrupted(f"interrupted; the same command goes on after step {step}")
        if not self.run.is_over():
            await self.cluster.after_checkpoint()

    async def trainer_lost(self, error: TrainerLost, group_ids: list[int]) -> None:
        """Goes back to the newest checkpoint: the trainer, and this process's books with it.

        The books are not read from there. This process still knows them, and what has happened to
        groups since then stays true; only steps are undone.
        """
        self._count_loss(error)
        saved = await self._load_newest()
        num_steps = len(json.loads(saved)["rows"]) if saved else 0
        self.run.go_back(num_steps, group_ids, self.cluster.first_version)
        self._say_where()


# -- measurement -----------------------------------------------------------------------------------
# Three accidents: a run that is cut off, a checkpoint that is damaged, and a reward function that
# hangs.
#
# A run of 12 steps is cut off, and goes on three times from what is left: from the weights alone,
# from weights and moments, and from all of it. Each time it is compared with a run that was not cut
# off, after the last step: the largest difference of any weight, and of any moment. For the whole
# checkpoint both must be 0.0, not small. In each of the other two rows the larger of both must not
# be 0, or this would show nothing.


class HangingTask(Shift):
    """The task `repeat`, with a reward function that never returns if it hears "hang"."""

    def score(self, turns: tuple[Turn, ...], said: list[str]) -> list[float]:
        """As in Shift, but for that one answer."""
        while said == ["hang"]:
            time.sleep(1.0)
        return super().score(turns, said)


class HangingJudge(Judge):
    """A judge with that task."""

    async def prepare(self) -> None:
        """Makes that task, whatever the Config says."""
        self.task = HangingTask("", [0])


async def judge_that_hangs(report: Report) -> None:
    """Has 16 episodes judged, of which one makes its judge hang, and checks what that costs."""
    spec = ServiceSpec(
        name="hanging judge",
        replica_class=HangingJudge,
        args=(Config(),),
        num_replicas=2,
        stuck_after_s=1.0,
        max_attempts=1,
        max_in_flight=1,
    )
    judges = Service(spec)
    report.at_end(judges.close)
    await judges.start()
    turns = (Turn(user="a", right="a"), Turn(user="a", right="a"))
    prompts = [Prompt(id=i, turns=turns) for i in range(16)]
    said = [["a", "a"] for _ in prompts[1:]] + [["hang"]]
    is_truncated = [[False, False] for _ in prompts]
    together = JudgeRequest(prompts=prompts, said=said, is_truncated=is_truncated)
    # Three requests have the episode that hangs in them, and each kills a judge:
    #   1. this one, for all 16 episodes; with max_attempts=1 the service does not try it again
    #   2. the first one of judge_all, also for all 16, which are too few to share out (LEAST_SHARE)
    #   3. after that loss judge_all asks for each of the 16 alone: the one for this episode
    found = await outcome(lambda: judges.route(Judge.judge, together))
    reply = await judge_all(judges, together)
    status = await judges.status(60.0)
    num_alone = sum(math.isnan(of_first_turn) for of_first_turn, _ in reply.rewards)
    report.say(f"a reward function hangs on 1 of 16 episodes; the request for all: {found}")
    report.check("episodes not judged, each asked for alone, of 16", num_alone, "==", 1)
    num_losses = len(status.lost_replicas)
    report.check("judges killed for it, in 3 attempts", num_losses, "==", 3)


Checkpoint = dict[str, Any]  # as checkpoint_of makes it


def difference_row(what: str, left: Checkpoint, right: Checkpoint) -> dict[str, Any]:
    """The largest difference between weights, and between moments, of two checkpoints."""
    weights = []
    for name, tensor in left["weights"].items():
        weights.append((tensor, right["weights"][name]))
    moments = []
    for name, state in left["moments"]["state"].items():
        others = right["moments"]["state"][name]
        moments += [(state[kind], others[kind]) for kind in state if kind != "step"]  # a count
    row: dict[str, Any] = {"what went on": what}
    for kind, pairs in (("weights", weights), ("moments", moments)):
        differences = [float((one - other).abs().max()) for one, other in pairs]
        row[kind] = max(differences)
    return row


class CutOff:
    """Cuts a synchronous run off, and lets it go on.

    A checkpoint is all that is left: every process of the run is killed, and what the main process
    knew of it is thrown away.
    """

    NUM_STEPS = 12
    SAVE_EVERY = 3

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab = lab
        self.cluster = lab.cluster
        self.cfg = lab.cluster.cfg
        self.rng = random.Random(seed)

    def training(self, label: str, paths: Sequence[str] = ()) -> SafeTraining:
        """A run that has not begun. paths: of the checkpoints from which it may go on."""
        run = Run(label, self.NUM_STEPS, Sampler(self.cfg.task, self.cfg.seed))
        kept = Checkpoints(paths=paths)
        return SafeTraining(self.cluster, run, self.lab.report, "", kept, self.SAVE_EVERY)

    async def end_of(self, training: SafeTraining) -> Checkpoint:
        """Runs it to its end. Returns the checkpoint of the last step."""
        await train_sync(training)
        return read_checkpoint(training.checkpoints.paths[0], self.cfg)

    async def strike(self) -> SafeTraining:
        """Begins a run, and kills it at a random moment of a random step. Returns what is left."""
        training = self.training("cut")
        step = 2 * self.SAVE_EVERY + self.rng.randint(1, self.SAVE_EVERY - 1)
        running = asyncio.ensure_future(train_sync(training))
        await until_step(step, training.run, running)
        # Somewhere within the next step, or on a fast machine within the one after it.
        await asyncio.sleep(self.rng.random() * 0.05)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for service in self.cluster.services:
            kill((await service.status()).pids)
        self.lab.report.say(f"all killed after step {step}; replacing them takes seconds")
        self.lab.report.doing("waiting for new workers")
        for service in self.cluster.services:
            await service.status(60.0)
        return training

    def copy_without(self, parts: Sequence[str], path: str) -> str:
        """A copy of a checkpoint that lacks some parts of it: "moments", "prompts"."""
        found = read_checkpoint(path, self.cfg)
        if "moments" in parts:
            found.update(moments={}, schedule=None)
        if "prompts" in parts:
            found["state"] = json.dumps({**json.loads(found["state"]), "next_number": 0})
        copy_path = unnamed_file("checkpoint")
        torch.save(found, copy_path)
        return copy_path


async def until_step(
    step: int,
    run: Run,
    running: asyncio.Task[None],
) -> bool:
    """Waits until a run has made so many steps. False: it has ended before that.

    Raises what ended it. running: the task in which the run runs.
    """
    while len(run.rows) < step and not running.done():
        await asyncio.sleep(0.002)
    if running.done():
        running.result()
    return not running.done()


@stage(
    "a synchronous run that is cut off, here at a random moment, goes on as if it had not been, "
    "bit for bit; of 16 episodes judged together, only the one that hangs its judge has "
    "no reward",
    hint="write `0`: the run draws its first prompts again, and learns something else",
    mechanism="prompts go on",
    needs_lab=True,
)
async def demo_recovery(report: Report, cfg: Config, lab: Lab) -> None:
    """Cuts a run off and lets it go on, damages a checkpoint, and lets a judge hang."""
    report.say(f"synchronous runs of {CutOff.NUM_STEPS} steps; seed {cfg.seed} (about 10 s)")
    cut_off = CutOff(lab, cfg.seed)
    whole = await cut_off.end_of(cut_off.training("whole"))
    cut = await cut_off.strike()
    newest, older = cut.checkpoints.paths
    # The cut run goes on three times, each time from a checkpoint that has more in it.
    rows = []
    for what, missing in (
        ("weights", ["moments", "prompts"]),
        ("weights, moments", ["prompts"]),
        ("weights, moments, prompts", []),
    ):
        training = cut_off.training("cut", [cut_off.copy_without(missing, newest)])
        rows.append(difference_row(what, whole, await cut_off.end_of(training)))
    report.say("largest difference from the run that was not cut, after its last step:")
    report.table(rows)
    *incomplete, everything = [max(row["weights"], row["moments"]) for row in rows]
    report.check("difference, smaller one of the incomplete two", min(incomplete), ">", 0)
    report.check("difference", everything, "==", 0.0)
    report.doing("a judge that hangs")
    report.figure(resume_difference=everything)

    # A checkpoint that was damaged, or cut off while it was written, is passed over, and said.
    with open(newest, "r+b") as file:
        file.truncate(os.path.getsize(newest) // 2)
    told: list[str] = []
    used = cut.checkpoints.newest(cut_off.cfg, told.append)
    report.check("lines about a damaged checkpoint", len(told), "==", 1)
    num_passed_over = [newest, older].index(used)
    report.check("checkpoints passed over before one was used", num_passed_over, "==", 1)
    await judge_that_hangs(report)
    # You can now leave a run alone for a week.


# == 13. ASYNC RL ==================================================================================
# Problem. In the synchronous loop one side always waits for the other. Let both run all the time,
#   and samples grow old: when the trainer sees one, the policy that made it may be many versions
#   behind, and nothing bounds how many.
# Rule. Two loops and a buffer. The rollout loop: take tickets, have groups sampled for them, which
#   go into the buffer. The training loop: take a batch, step, publish. The tickets of a batch come
#   back when its step is made. Tickets limit what is under way to K + 1 batches, where K is the
#   bound on lag (--max-lag): one that the trainer works on, and K behind it, of which the last will
#   be K versions old when its turn comes. That alone does not bound lag, for a group that takes
#   long is overtaken by others; so a group more than K versions old is dropped when a batch is
#   taken. Its ticket comes back, too; otherwise a run would have fewer and fewer tickets, and stop.
# Cost. Lag: samples are off-policy, that is, of an older policy than the one in training, and the
#   loss has to bear it (section 10).
# Not here. Finishing a rollout that another generator has begun.
# Source. IMPALA (Espeholt 2018), AReaL (Fu 2025).
#
# There are two ways to keep the bound, and each has its price. To drop what came too late: the work
# for it is lost, and it is the long answers that are lost, for they take longest. Or to wait, so
# that few groups overtake a late one: nothing is lost, and the trainer stands still for stragglers.
# Here it is a choice (13a). The stage measures both, in simulated time.
#
# Lag, by example, with K = 1, so two batches of tickets (v is the trainer's version):
#     v = 5   batch a is sampled under 5, batch b too; no ticket is left
#     v = 5   the trainer steps on a (lag 0): v = 6, and a's tickets admit batch c, under 6 (its
#             generator waits until the copy of 6 is complete)
#     v = 6   the trainer steps on b (lag 1): v = 7, and b's tickets admit d
#     v = 7   c is late, d comes first: the trainer steps on d (lag 0): v = 8
#     v = 8   now c comes, sampled under 6. Its lag would be 2: it is dropped
#
# A generator dies, message by message (sections 5 to 7). The trainer hears nothing of it:
#     kernel -> owner              a pidfd is readable: `lose` wakes whoever waits for that replica
#     route -> another generator   the same prompts and the same seed, on the same tickets
#     _keep -> a new process       "find_pulse", then "setup": with the tiny policy about a second
#     route -> the new generator   it attaches to the arena as the same reader, and pulls


# -- 13a. Tickets, and the order in which groups are taken -----------------------------------------
#
# --order says what is done about a group that is overtaken. In what follows P groups are a batch
# (16), T tickets are out at most, and K is the bound on lag.
#
#     ready     The trainer is given what is there, the oldest first, and never waits for a certain
#               group. What has become too old is dropped. T = (K + 1) P. The long answers are the
#               late ones, so what is trained on is shorter than what was generated.
#     window    Groups have serial numbers, in the order in which they are started. One may be taken
#               if its serial number is less than W above that of the oldest group that is not
#               there yet. So few pass it, none becomes too old, and nothing is dropped. For a very
#               late one the trainer waits. T = (K + 1) P - P / 2, which is P / 2 tickets fewer than
#               `ready` has. For each of these one more group may pass, as is shown below: W = P / 2
#               + 1. (For K = 0 T = P and W = 1: no group may pass another.)
#
# Why the window keeps the bound. By example first, with K = 2, P = 16, T = 40 and W = 9. A group g
# is started when the trainer is at version v. Before g is taken, others may be:
#
#     older ones       39 at most: with that of g 40 tickets are out, and there are no more
#     younger ones      8 at most: those with serial numbers up to 8 above that of g
#     together         47: two batches and 15 groups, which are no third batch without g. So g is in
#                      the third at the latest. The two before it make a version each, so the
#                      trainer is at v + 2 when it comes to g, at most: a lag of 2
#
# In letters: T - 1 older and W - 1 younger ones fill (T + W - 2) // P batches. That is K if
#
#     W = (K + 1) P + 1 - T
#
# (And g is not sampled under a version older than v, for its generator waits until it can pull v.)
# With K = 2 and T = 48 nobody may pass (W = 1). Fewer tickets make a wider window. --in-flight sets
# T for both orders, in batches. Fewer also mean less lag, and more waiting where generators are the
# slower side.
#
# By example, with batches of 4 and W = 3; a letter is a group that is there, a dot one that is
# missing, and groups that were taken are left out:
#
#     serial numbers   10 11 12 13 14 15 16
#                       a  b  .  d  e  f  g    12 is the oldest missing one: 10, 11, 13 and 14 may
#                                              be taken. They are four, and become a batch.
#                             .        f  g    15 and 16 are beyond the window: the trainer waits
#                             c        f  g    12 has come. The next missing one is 17: 12, 15 and
#                                              16 may be taken, three, and a fourth is waited for.


@dataclass(frozen=True)
class Flow:
    """How much may be under way, and in what order it is taken: what follows from the flags."""

    max_lag: int  # K
    batch_groups: int  # P
    num_tickets: int  # T
    # W; None: any group may pass any other.
    window: int | None = None
    # Judged episodes that a group must have: where there are several, one has nothing to be
    # compared with.
    least_rows: int = 2

    @staticmethod
    def without_bound(cfg: Config) -> Flow:
        """To see what happens without the rule, whatever the flags say."""
        most = 10**6  # versions, and batches: more than any run has
        return Flow(
            max_lag=most,
            batch_groups=cfg.batch_groups,
            num_tickets=most * cfg.batch_groups,
            least_rows=min(2, cfg.group_size),
        )

    @staticmethod
    def of(cfg: Config, max_lag: int) -> Flow:
        """max_lag: instead of --max-lag. ValueError: no window is left for so many tickets."""
        batch_groups = cfg.batch_groups
        most = (max_lag + 1) * batch_groups
        if cfg.in_flight is not None:
            num_tickets = round(cfg.in_flight * batch_groups)
        elif cfg.order == "window" and max_lag > 0:
            num_tickets = most - batch_groups // 2  # so half a batch may pass a late group
        else:
            num_tickets = most
        window = None
        if cfg.order == "window":
            window = most + 1 - num_tickets
            if window < 1:
                most_batches = f"at most {max_lag + 1} batches can be under way"
                raise ValueError(f"with --order window and K = {max_lag} {most_batches}")
        return Flow(
            max_lag=max_lag,
            batch_groups=batch_groups,
            num_tickets=num_tickets,
            window=window,
            least_rows=min(2, cfg.group_size),
        )


class Gate:
    """Hands out tickets, one per group. Those that are out are the groups in flight.

    The Ledger knows these groups, so the Gate keeps no count of its own: a group that is settled in
    the Ledger has given its ticket back.
    """

    def __init__(self, ledger: Ledger, num_tickets: int) -> None:
        self.ledger = ledger
        self.num_tickets = num_tickets

    def num_free(self) -> int:
        """Tickets that are not out. Ledger.settle notifies whoever waits for them.

        Whoever draws prompts for them before the next `await` has them, because nothing else runs
        until then.
        """
        return self.num_tickets - len(self.ledger.in_flight)


@dataclass(frozen=True)
class Group:
    """A group that waits for the trainer."""

    rollout: Rollout  # the whole answer of a generator
    rows: list[int]  # those of this group
    id: int  # of its prompt; one that is drawn again has the same id, and another serial number
    serial: int  # 0 for the first group that was started, 1 for the next
    run_id: int  # of the trainer whose weights sampled it
    oldest_version: int  # the smallest of its sampled tokens


class ReplayBuffer:
    """Groups on their way to the trainer. Samples pass from loop to loop only here.

    call      from       to         which groups
    expect    -          awaited    those that a generator has been asked for
    put       awaited    groups     those that can be trained on
    put       awaited    lost       the others of that request
    lose      awaited    lost       those of a request that has failed
    give_up   awaited    dropped    those that were asked for under a trainer that is lost
    take      groups     a batch    the oldest that may be taken
    take      groups     dropped    those that are too old, or were sampled with the weights of
                                    a trainer that is lost
    """

    def __init__(self, ledger: Ledger, flow: Flow) -> None:
        self.ledger = ledger
        self.flow = flow
        self.num_started = 0
        self.awaited: dict[int, int] = {}  # id -> serial, of the groups that generators work on
        self.groups: list[Group] = []  # that are ready
        self.taken: set[int] = set()  # ids: the trainer has these, or their step is made
        self.lost_run_id: int | None = None  # of a trainer that a generator has found to have ended

    def expect(self, group_ids: list[int]) -> None:
        """These have been started now."""
        for group_id in group_ids:
            self.awaited[group_id] = self.num_started
            self.num_started += 1

    def lose(self, group_ids: list[int]) -> None:
        """These never come. Wakes `take`, also when there are none of them."""
        self._never_come("lost", group_ids)

    def give_up(self, group_ids: list[int]) -> None:
        """These never come, because the trainer is lost under which they were asked for."""
        self._never_come("dropped", group_ids, with_trainer=True)

    def _never_come(self, fate: str, group_ids: list[int], with_trainer: bool = False) -> None:
        for group_id in group_ids:
            del self.awaited[group_id]
        self.ledger.settle(fate, group_ids, with_trainer)

    def has_ended(self, run_id: int) -> None:
        """Notes that the trainer of this run id has ended. Wakes `take`: it raises TrainerLost."""
        self.lost_run_id = run_id
        self.ledger.changed.notify()

    def put(self, rollout: Rollout, asked_for: list[int], run_id: int) -> None:
        """Takes the groups of a rollout that can be trained on; the others count as lost.

        A group with too few judged episodes has nothing to compare, and one without a sampled
        token has nothing to learn from. asked_for: the ids of all groups of the request.
        """
        sampled = rollout.sampled()  # [B, T] bool
        rows_of: dict[int, list[int]] = {}
        for row, group_id in enumerate(rollout.group_ids.tolist()):
            rows_of.setdefault(group_id, []).append(row)
        for group_id, rows in rows_of.items():
            if len(rows) < self.flow.least_rows or not sampled[rows].any():
                continue
            versions = rollout.tokens.versions[rows][sampled[rows]]
            group = Group(
                rollout=rollout,
                rows=rows,
                id=group_id,
                serial=self.awaited.pop(group_id),
                run_id=run_id,
                oldest_version=int(versions.min()),
            )
            self.groups.append(group)
        self.lose([group_id for group_id in asked_for if group_id in self.awaited])

    def is_usable(self, group: Group, version: int) -> bool:
        """May the trainer, when it is at this version, be given this group? At most K old."""
        return version - group.oldest_version <= self.flow.max_lag  # mechanism: lag bound

    def _drop(self, run_id: int, version: int, first_version: int) -> None:
        """Takes out what the trainer may not be given, and gives the tickets of these back."""
        too_old = []
        of_lost_weights = []  # sampled under a trainer that is lost, or a step that is undone
        usable = []
        for group in self.groups:
            if group.run_id != run_id or group.oldest_version < first_version:
                of_lost_weights.append(group.id)
            elif not self.is_usable(group, version):
                too_old.append(group.id)
            else:
                usable.append(group)
        self.groups = usable
        if too_old:
            self.ledger.settle("dropped", too_old)
        if of_lost_weights:  # nobody has trained on them, so they are dropped, and not undone
            self.ledger.settle("dropped", of_lost_weights, with_trainer=True)

    def _in_order(self) -> list[Group]:
        """The groups that may be taken now, in this order."""
        if self.flow.window is None:
            return sorted(self.groups, key=lambda group: (group.oldest_version, group.serial))
        oldest_awaited = min(self.awaited.values(), default=self.num_started)
        end = oldest_awaited + self.flow.window  # mechanism: window
        in_window = [group for group in self.groups if group.serial < end]
        return sorted(in_window, key=lambda group: group.serial)

    async def take(self, run_id: int, version: int, first_version: int = 0) -> Rollout:
        """A batch for a trainer of this run id, when it is at this version.

        first_version: the first one that it published after its run began, or last went back to a
        checkpoint. Older versions are of steps that are undone, and what was sampled under them is
        dropped. TrainerLost: a generator has found that the trainer has ended, which nothing else
        tells while no step is under way (RolloutLoop._next_trainer).
        waits for enough groups that may be taken / woken by `put`, `lose`, `give_up`, `has_ended`
        """
        while True:
            if run_id == self.lost_run_id:  # mechanism: told by generators
                raise TrainerLost("the trainer was lost while nobody waited for its answer")
            self._drop(run_id, version, first_version)
            taken = self._in_order()[: self.flow.batch_groups]
            if len(taken) == self.flow.batch_groups:
                taken_ids = {group.id for group in taken}
                self.groups = [group for group in self.groups if group.id not in taken_ids]
                # Those of earlier batches are forgotten when they are in flight no longer.
                self.taken = (self.taken & self.ledger.in_flight) | taken_ids
                return joined(taken)
            self._require_none_forgotten()
            await self.ledger.changed.wait()

    def _require_none_forgotten(self) -> None:
        """RuntimeError: a group is in flight, and nowhere. Its ticket would never come back.

        A run would wait for it for ever: before its last step at the latest, which needs every
        group that the books count as under way.
        """
        known = self.awaited.keys() | self.taken | {group.id for group in self.groups}
        forgotten = self.ledger.in_flight - known
        if forgotten:
            raise RuntimeError(f"{len(forgotten)} groups in flight that nobody works on, or has")


def joined(groups: list[Group]) -> Rollout:
    """Their rows. Those of one rollout are taken out of it together, which is less work."""
    rows_of: dict[int, list[int]] = {}
    rollouts: dict[int, Rollout] = {}
    for group in groups:
        key = id(group.rollout)
        rollouts[key] = group.rollout
        rows_of.setdefault(key, []).extend(group.rows)
    return Rollout.join([rollouts[key].select(rows) for key, rows in rows_of.items()])


# -- 13b. The loops --------------------------------------------------------------------------------
#
# How large a request is. A whole batch per request would keep few generators at work: with K = 2
# there are tickets for three batches, of which a busy trainer holds one or two. So all tickets are
# divided over G generators, three requests for each of them: T / (3 G) groups, at least one, and no
# more than a batch. So a generator that ends a request has another one there already, and the third
# makes up for tickets that are with the trainer. With 48 tickets:
#
#     generators            1    2    4    8
#     groups per request   16    8    4    2
#
# What the size trades: a large request is a large batch for the generator, which computes it in
# hardly more time than a small one, and it is few messages. But it comes back only when its longest
# conversation has ended; and where requests are few, a generator may have two of them while another
# one has none.


class RolloutLoop:
    """The loop that turns tickets into groups in the buffer.

    consumes tickets / waits for them, and for generators that have less than they may have / woken
    by Ledger.settle and by the end of a request / produces requests, each of which puts groups into
    the buffer / ends when it is cancelled, or when a request raises what ends the run
    """

    NUM_REQUESTS = 3  # of each generator

    def __init__(self, training: Training, flow: Flow, gate: Gate, buffer: ReplayBuffer) -> None:
        self.cluster = training.cluster
        self.run = training.run
        self.ledger = training.run.ledger
        self.flow = flow
        self.gate = gate
        self.buffer = buffer
        self.requests: set[asyncio.Task[None]] = set()
        self.failures: list[BaseException] = []  # of requests that have raised: they end the run
        self.errors = TellOnce(training.report.say)

    async def run_for_ever(self) -> None:
        """The loop."""
        while True:
            await self.ledger.changed.wait_for(lambda: bool(self.failures) or self._may_ask())
            if self.failures:
                raise self.failures[0]
            prompts = self.run.draw(min(self._num_wanted(), self.request_groups()))
            self.buffer.expect([prompt.id for prompt in prompts])
            request = asyncio.ensure_future(self._request(prompts))
            self.requests.add(request)
            request.add_done_callback(self._ended)

    def _ended(self, request: asyncio.Task[None]) -> None:
        """A request has ended."""
        self.requests.discard(request)
        error = None if request.cancelled() else request.exception()
        if error is not None:
            self.failures.append(error)
        self.ledger.changed.notify()

    def _may_ask(self) -> bool:
        """May another request be made?"""
        # Three requests for each generator, of a batch each at most. Mostly there are fewer tickets
        # than that. Where there are very many, as without a bound on lag, more requests would only
        # wait in the queues of the generators.
        most = self.NUM_REQUESTS * self.cluster.num_generators * self.flow.batch_groups
        return self._num_wanted() > 0 and len(self.buffer.awaited) < most

    def _num_wanted(self) -> int:
        """How many groups the run still needs, as far as there are tickets for them."""
        # By steps, not by groups that were trained on: those before it went on from a checkpoint
        # may have had another --batch-groups.
        num_needed = (self.run.num_steps - len(self.run.rows)) * self.flow.batch_groups
        num_not_started = num_needed - len(self.ledger.in_flight)
        return min(self.gate.num_free(), num_not_started)

    def request_groups(self) -> int:
        """For how many groups a request asks, if there are as many tickets."""
        if self.cluster.cfg.request_groups is not None:
            return self.cluster.cfg.request_groups
        # With K = 0 all tickets come back at once, and a share for each generator is best.
        per_generator = self.NUM_REQUESTS if self.flow.max_lag > 0 else 1
        num_requests = per_generator * self.cluster.num_generators
        share = math.ceil(self.flow.num_tickets / num_requests)  # mechanism: requests fit the fleet
        return min(share, self.flow.batch_groups)

    async def _request(self, prompts: list[Prompt]) -> None:
        """A request, from its tickets until each group of it is in the buffer, or lost.

        Tickets come back when a step is made, and what is asked for with them is to be sampled
        under the version of this step. The trainer may still be copying that version. So the
        request names it, and the generator waits until it can be pulled.
        """
        group_ids = [prompt.id for prompt in prompts]
        assert self.cluster.handle is not None  # the trainer has begun before the loops do
        run_id = self.cluster.handle.run_id
        try:
            found = await self.cluster.rollout(prompts, min_version=self.run.version)
        except TrainerLost:
            await self._next_trainer(run_id)
            self.buffer.give_up(group_ids)
        except Exception as error:  # no replica, no judge, or what the request raised
            self.errors.say(f"{len(prompts)} groups lost: ", error)
            # Whatever is the matter needs a moment. With its tickets the loop would ask again at
            # once, so they come back after that. (NoReplica ends the run: nobody asks again.)
            await asyncio.sleep(0.0 if isinstance(error, NoReplica) else 0.5)
            self.buffer.lose(group_ids)
            if isinstance(error, NoReplica) or self.ledger.is_fruitless():
                raise
        else:
            self.buffer.put(self.run.count(found), group_ids, run_id)
            if self.ledger.is_fruitless():
                raise RuntimeError("most groups are lost: too few of their episodes are judged")

    async def _next_trainer(self, run_id: int) -> None:
        """A generator has found that this trainer has ended. Waits until there is another one.

        How a generator finds that: it was replaced itself, and cannot attach to the arena; or it
        waits for a version that was still being copied. Why it has to be told: the training loop
        learns of a loss by the answer to a step. It may just have sent none, because it waits for
        groups, and without a trainer no group will come. When all steps are made this returns at
        once, for then nobody needs another trainer.
        """
        self.buffer.has_ended(run_id)
        while not self.run.is_over():
            handle = self.cluster.handle
            if handle is not None and handle.run_id != run_id:
                return
            await asyncio.sleep(0.1)


@dataclass(frozen=True)
class SentStep:
    """A batch that was sent to the trainer, and is not answered yet."""

    answer: asyncio.Task[StepStats]
    batch: Rollout


# The batches that were sent to the trainer, `sent`, as a run goes on:
#
#     [] --a is sent--> [a] --b is sent--> [a, b] --a is answered--> [b] --c is sent--> [b, c] ...
#     [a, b] --a raises TrainerLost--> _go_back: so does b; the groups of both are lost --> []


class AsyncLoops:
    """The two loops of an asynchronous run, and what they share."""

    def __init__(self, training: Training, flow: Flow) -> None:
        self.training = training
        self.cluster = training.cluster
        self.run = training.run
        self.ledger = training.run.ledger
        self.flow = flow
        self.gate = Gate(self.ledger, self.flow.num_tickets)  # mechanism: tickets
        self.buffer = ReplayBuffer(self.ledger, self.flow)
        self.rollouts = RolloutLoop(training, self.flow, self.gate, self.buffer)
        # While the trainer works on a batch, the next one already waits there, so that the trainer
        # never waits for the main process. That batch grows older by a version, which
        # Run.version_of_next_batch counts in when a batch is taken. With K = 0 it would be too old.
        self.max_sent = 2 if flow.max_lag > 0 else 1
        self.sent: collections.deque[SentStep] = collections.deque()

    async def run_to_end(self) -> None:
        """Runs until all steps are made, or a loop raises. Then it shuts down in this order.

            the rollout loop is cancelled, so nobody asks for tickets again
            requests that wait for a generator get their answer, and put it into the buffer
            requests and steps without an answer are cancelled
            what a loop has raised is raised here

        After an exception it does not wait for answers. Groups that lie in the buffer at the end
        stay in the books as groups in flight.
        """
        async with self.training:
            rollout_loop = asyncio.ensure_future(self.rollouts.run_for_ever())
            training_loop = asyncio.ensure_future(self._training_loop())
            loops = [rollout_loop, training_loop]
            try:
                ended, _ = await asyncio.wait(loops, return_when="FIRST_COMPLETED")
                rollout_loop.cancel()
                if not any(loop.exception() for loop in ended):
                    await self.ledger.changed.wait_for(lambda: not self.buffer.awaited)
            finally:  # also when this itself is cancelled
                tasks = [*loops, *self.rollouts.requests, *[step.answer for step in self.sent]]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*ended)  # raises what a loop has raised

    def _run_id(self) -> int:
        """Of the present trainer, which has begun before the loops do."""
        assert self.cluster.handle is not None
        return self.cluster.handle.run_id

    def _may_send(self) -> bool:
        """May a batch be sent to the trainer now, maybe before it has answered the last one?"""
        if self.run.num_sent >= self.run.num_steps:
            return False
        if not self.sent:
            return True
        return len(self.sent) < self.max_sent and not self.training.is_pause_due()

    # A batch is sent ahead, so there are two things to wait for at once: groups, and the answer to
    # an earlier batch. To wait for groups alone could last for ever, for the tickets of the batches
    # at the trainer come back only when it has answered. If the trainer is lost while it has a
    # batch, its answer raises TrainerLost; if it has none, `take` does, once a generator has told.

    async def _training_loop(self) -> None:
        """The training loop.

        consumes groups / waits for the buffer, then for the trainer / woken by ReplayBuffer.put,
        then by the trainer's answer / produces versions / ends when all steps are made
        """
        while self.sent or not self.run.is_over():
            try:
                await self._send_batches()
                if self.sent:
                    await self._enter_step()
                if not self.sent:
                    await self.training.in_pause()
            except TrainerLost as error:
                await self._go_back(error)

    async def _send_batches(self) -> None:
        """Sends the trainer as many batches as it may have; fewer if a step ends meanwhile.

        While it waits for a batch b, one of four things happens: there are enough groups, and b is
        sent; a step a ends, and its tickets admit new groups; that step raises TrainerLost; or the
        buffer does, because a generator has told it so.
        """
        while self._may_send():
            version = self.run.version_of_next_batch()
            first_version = self.training.cluster.first_version
            take = asyncio.ensure_future(self.buffer.take(self._run_id(), version, first_version))
            under_way = [step.answer for step in self.sent]
            try:
                await asyncio.wait([take, *under_way], return_when="FIRST_COMPLETED")
            finally:
                take.cancel()  # if it has a batch, this does nothing
            if not take.done():  # a step has ended, or raised TrainerLost: _enter_step finds out
                return
            batch = take.result()
            answer = asyncio.ensure_future(self.cluster.step(batch))
            self.sent.append(SentStep(answer=answer, batch=batch))
            self.run.count_sent()

    async def _enter_step(self) -> None:
        """Waits for the answer to the oldest step that was sent, and enters it into the books.

        The tickets of a batch come back only here, when the step is made. Take the example in the
        lead of this section, at v = 5: if the tickets of batch a came back when a is sent, c would
        always be sampled under 5, one version older than the example says. Two answers may come at
        the same moment, and in any order; they are entered in the order of the steps.
        """
        stats = await self.sent[0].answer  # raises TrainerLost
        step = self.sent.popleft()
        self.training.step_done(stats, step.batch)

    async def _go_back(self, error: TrainerLost) -> None:
        """Goes back to the newest checkpoint, when the trainer is lost with the batches it had."""
        await asyncio.gather(*[step.answer for step in self.sent], return_exceptions=True)
        lost = []
        for step in self.sent:
            lost += step.batch.group_ids.unique().tolist()
        self.sent.clear()
        await self.training.trainer_lost(error, lost)


# -- measurement: in simulated time ----------------------------------------------------------------
#
# The loops are the real ones here, with gate, buffer and books. Generators and the trainer only let
# time pass, and the clock of their event loop waits for nothing: it jumps to the next moment at
# which somebody wakes. So a long run takes a second, and its figures are the same on every machine.
#
# Two questions are answered with it. Do the loops keep any number of generators at work? And what
# do both orders cost when answers are of very uneven lengths?
#
# By example, two generators take 30 ms for a group, and are asked for 8 groups each; the trainer
# takes 100 ms for a step:
#
#     simulated time   0 ms      240 ms                        340 ms
#     generators       begin     have their 8 groups, begin    work
#     trainer          waits     has a batch of 16, steps      answers: version 1
#     the clock        jumps from 0 to 240, and from there to 340: two looks at the timers
#
# It tells of the loops alone. What messages, copies and a busy machine cost it leaves out: that is
# what the real runs, below, are for. Both questions are asked in `fleet_rows` and `order_rows`, to
# which you may skip: before them stand that clock, and generators and a trainer without a model.


class JumpingSelector(selectors.SelectSelector):
    """What an event loop sleeps in until the next timer. This one moves the clock instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """timeout: seconds until the next timer. None: there is none, and nobody would wake."""
        if timeout is None:
            raise RuntimeError("all wait, and nobody will wake them")
        self.now_s += max(0.0, timeout)
        return super().select(0)


class SimulatedTime(asyncio.SelectorEventLoop):
    """An event loop in which nobody waits."""

    def __init__(self) -> None:
        self.jumping = JumpingSelector()
        super().__init__(self.jumping)

    def time(self) -> float:
        """Seconds since it began, of simulated time."""
        return self.jumping.now_s


@dataclass(frozen=True)
class World:
    """What is simulated."""

    num_generators: int
    group_s: float  # seconds that a generator works on a group, in the mean
    step_s: float  # seconds of a training step
    copy_s: float = 0.0  # seconds from its answer until its version can be pulled
    # False: every group takes equally long, and a generator makes one after the other. True:
    # lengths have a heavy tail (Pareto, exponent 1.5, one in 125 is more than 25 times the
    # shortest), and a generator makes all that it was asked for at the same time.
    is_uneven: bool = False
    seed: int = 0

    def length_of(self, prompt_id: int) -> float:
        """Seconds that a generator needs for the group of this prompt."""
        if not self.is_uneven:
            return self.group_s
        # The mean of this distribution is 3.
        return self.group_s / 3 * random.Random(f"{self.seed} {prompt_id}").paretovariate(1.5)

    def ideal_steps_per_s(self, batch_groups: int) -> float:
        """If the slower side, the trainer or all generators together, worked all the time."""
        generators = self.num_generators / (batch_groups * self.group_s)
        return min(generators, 1 / self.step_s)


class SimulatedCluster(Cluster):
    """What the loops need of a cluster: generators and a trainer that let time pass."""

    def __init__(self, cfg: Config, world: World) -> None:
        # Cluster's own __init__ is not called, for it would make services. Here is all that the
        # loops and `simulate` look at.
        self.cfg = cfg
        self.world = world
        self.first_version = 0
        # When each version can be pulled: copy_s after its step was answered, the first at once.
        self.complete_s = [0.0]
        no_tensors = Manifest(specs=(), slot_bytes=0)
        self.handle = ArenaHandle(
            pid=0,
            descriptor=0,
            run_id=1,
            manifest=no_tensors,
            num_slots=0,
            num_readers=0,
            num_copying=0,
        )
        self.trainer_is_free = asyncio.Lock()
        # A generator that works on even groups has one request at a time.
        num_at_once = 10**6 if world.is_uneven else 1
        self.generators_free = []
        for _ in range(world.num_generators):
            self.generators_free.append(asyncio.Semaphore(num_at_once))
        self.num_asked = [0] * world.num_generators  # requests that each has now
        self.lengths: dict[int, float] = {}  # of the groups that were started

    @property
    def num_generators(self) -> int:
        """As many as the world has.

        None comes and none goes in simulated time: that is a matter of services, which are not
        here.
        """
        return self.world.num_generators

    def newest_version(self) -> int:
        """That can be pulled now."""
        now_s = asyncio.get_running_loop().time()
        return bisect.bisect_right(self.complete_s, now_s) - 1

    async def rollout(
        self,
        prompts: list[Prompt],
        group_size: int | None = None,
        greedy: bool = False,
        min_version: int = 0,
        is_alone: bool = False,
        by_task: bool = False,
    ) -> RolloutReply:
        """By the generator that has the fewest requests."""
        lengths = {prompt.id: self.world.length_of(prompt.id) for prompt in prompts}
        self.lengths.update(lengths)
        busy_s = max(lengths.values()) if self.world.is_uneven else sum(lengths.values())
        generator = self.num_asked.index(min(self.num_asked))
        self.num_asked[generator] += 1
        async with self.generators_free[generator]:
            missing_s = self.complete_s[min_version] - asyncio.get_running_loop().time()
            await asyncio.sleep(max(0.0, missing_s))
            version = self.newest_version()
            await asyncio.sleep(busy_s)
        self.num_asked[generator] -= 1
        return RolloutReply(rollout=one_token_each(prompts, version), busy_s=busy_s)

    async def step(self, batch: Rollout) -> StepStats:
        """One after the other, each of them for step_s."""
        async with self.trainer_is_free:
            await asyncio.sleep(self.world.step_s)
        version = len(self.complete_s)  # after this step
        self.complete_s.append(asyncio.get_running_loop().time() + self.world.copy_s)
        lags = (version - 1 - batch.tokens.versions).float()
        # Three figures are set. The others are of no use here, and stay 0.
        figures: dict[str, Any] = {entry.name: 0 for entry in dataclasses.fields(StepStats)}
        figures["version"] = version
        figures["lag_max"] = int(lags.max())
        figures["lag_mean"] = float(lags.mean())
        return StepStats(**figures)


def one_token_each(prompts: list[Prompt], version: int) -> Rollout:
    """Two episodes per prompt, in which one token was sampled under this version."""
    rows = [prompt for prompt in prompts for _ in range(2)]
    ones = torch.ones(len(rows), 1, dtype=torch.int64)
    tokens = Tokens(
        ids=ones,
        mask=ones,
        turn_ids=ones,
        logprobs=torch.zeros(len(rows), 1),
        versions=ones * version,
    )
    return Rollout(
        tokens=tokens,
        rewards=torch.zeros(len(rows), 1),
        group_ids=torch.tensor([prompt.id for prompt in rows]),
        is_cut=torch.zeros(len(rows), dtype=torch.bool),
        is_truncated=torch.zeros(len(rows), 1, dtype=torch.bool),
        prompts=rows,
        said=[["a"]] * len(rows),
    )


class SimulatedTraining(Training):
    """Keeps the books of a run, and tells nobody."""

    async def begin(self) -> None:
        """Nothing has to be loaded."""
        self.run.begin(0)

    def step_done(self, stats: StepStats, batch: Rollout) -> None:
        """Enters a step into the books."""
        self.run.add_step(stats, batch, None, self.cluster.num_generators)


@dataclass(frozen=True)
class Simulation:
    """A run that was simulated."""

    training: SimulatedTraining
    cluster: SimulatedCluster

    LAST_STEPS = 5  # are left out of times: towards its end a run asks for fewer and fewer groups

    def num_timed(self) -> int:
        """Steps over which times are measured."""
        return self.training.run.num_steps - self.LAST_STEPS

    def seconds(self) -> float:
        """Until the last of these steps was answered, before its copy; in simulated time."""
        return self.cluster.complete_s[self.num_timed()] - self.cluster.world.copy_s

    def steps_per_s(self) -> float:
        """In simulated time."""
        return self.num_timed() / self.seconds()

    def trainer_idle(self) -> float:
        """Share of the time for which it had nothing to do.

        It waits for a batch: generators are slower, or the order makes it wait for a late group.
        """
        return 1 - self.num_timed() * self.cluster.world.step_s / self.seconds()

    def mean_lags(self) -> list[float]:
        """The mean lag of each step."""
        return [row.stats.lag_mean for row in self.training.run.rows]

    def length_share(self) -> float:
        """Mean length of the groups that were trained on, over that of all that were started."""
        lengths = self.cluster.lengths
        trained_ids = itertools.chain(*self.training.run.ledger.trained_by_step)
        trained = [lengths[group_id] for group_id in trained_ids]
        return statistics.fmean(trained) / statistics.fmean(lengths.values())


def simulate(
    cfg: Config, world: World, num_steps: int = 30, is_synchronous: bool = False
) -> Simulation:
    """Runs the loops in simulated time. It needs a thread without an event loop."""
    loop = SimulatedTime()

    async def run() -> Simulation:
        cluster = SimulatedCluster(cfg, world)
        books = Run("simulated", num_steps, Sampler("repeat", seed=0))
        training = SimulatedTraining(cluster, books, Report())
        if is_synchronous:
            await train_sync(training)
        else:
            await AsyncLoops(training, Flow.of(cfg, cfg.max_lag)).run_to_end()
        return Simulation(training=training, cluster=cluster)

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


@dataclass(frozen=True)
class FleetRow:
    """How many steps per second there are with so many generators."""

    generators: int
    ideal: float  # if the slower side worked all the time
    k_2: float
    of_ideal: float  # the share: k_2 / ideal
    k_0: float
    sync: float  # in the synchronous loop


def fleet_rows() -> list[FleetRow]:
    """A generator takes 30 ms for a group, the trainer 100 ms for a step of 16 groups."""
    rows = []
    for num_generators in (1, 2, 4, 8):
        world = World(num_generators=num_generators, group_s=0.03, step_s=0.1)
        ideal = world.ideal_steps_per_s(Config.batch_groups)
        k_2 = simulate(Config(max_lag=2), world).steps_per_s()
        row = FleetRow(
            generators=num_generators,
            ideal=ideal,
            k_2=k_2,
            of_ideal=k_2 / ideal,
            k_0=simulate(Config(max_lag=0), world).steps_per_s(),
            sync=simulate(Config(max_lag=0), world, is_synchronous=True).steps_per_s(),
        )
        rows.append(row)
    return rows


@dataclass(frozen=True)
class OrderRow:
    """What an order does when answers are of very uneven lengths."""

    order: str
    tickets: int
    request: int  # groups
    lag_mean: float
    lag_max: int
    trainer_idle: float  # share of the time
    length: float  # mean of the groups that were trained on, over that of all
    dropped: int  # groups


def order_rows(num_steps: int = 100, seed: int = 0) -> list[OrderRow]:
    """Both orders, with more and with fewer tickets, and with large requests.

    A step takes as long as a mean group. But a generator works on all its groups at the same time,
    so generators have time to spare.
    """
    rows = []
    world = World(num_generators=2, group_s=3.0, step_s=3.0, is_uneven=True, seed=seed)
    for order, in_flight, request_groups in (
        ("ready", 3.0, 8),
        ("ready", 3.0, 1),
        ("ready", 2.0, 1),
        ("window", 3.0, 1),
        ("window", 2.5, 1),
    ):
        cfg = Config(max_lag=2, order=order, in_flight=in_flight, request_groups=request_groups)
        found = simulate(cfg, world, num_steps)
        row = OrderRow(
            order=order,
            tickets=Flow.of(cfg, cfg.max_lag).num_tickets,
            request=request_groups,
            lag_mean=statistics.fmean(found.mean_lags()),
            lag_max=found.training.largest_lag(),
            trainer_idle=found.trainer_idle(),
            length=found.length_share(),
            dropped=found.training.run.ledger.counts["dropped"],
        )
        rows.append(row)
    return rows


def tell_simulated(report: Report, fleets: list[FleetRow], orders: list[OrderRow]) -> None:
    """Reports both tables."""
    report.say("simulated, 30 ms a group, 100 ms a step of 16 groups; steps per s; k 0: K = 0")
    report.table(fleets)
    least = min(row.of_ideal for row in fleets)
    report.check("simulated: steps of ideal, least of 1 to 8 generators", least, ">", 0.9)
    least = min(row.k_0 / row.sync for row in fleets)
    report.check("simulated: K = 0 over synchronous, the least", least, ">", 0.99)
    report.say("simulated, K = 2, lengths with a heavy tail; length: trained / generated:")
    report.table(orders)
    report.check("simulated: largest lag", max(row.lag_max for row in orders), "<=", 2)
    # Where nothing is dropped, a run starts no group that it does not train on, so `length` is 1.
    num_dropped = sum(row.dropped for row in orders if row.order == "window")
    report.check("simulated: dropped, window", num_dropped, "==", 0)


# -- measurement: with faults ----------------------------------------------------------------------

# Four runs. `loose`, without the rule, to see the lag grow. `async`, with it; in its second half
# three faults strike. `come`, in which generators are added and taken away. `sync`, synchronous, as
# long as the first half of `async`, with which it is compared.
#
# How much faster the asynchronous run is depends on the machine, and is shown. It need not be
# faster at all: on two cores both sides work at the same time, and slow each other down. What is
# checked is the share of the time for which the trainer works, over that share in the synchronous
# run, taken over the same number of steps before any fault. Lag and books are counted.

FAULTS = {
    "generator": signal.SIGKILL,
    "judge": signal.SIGSTOP,
    "trainer": signal.SIGKILL,
}


@dataclass(frozen=True)
class FaultRow:
    """What became of a fault."""

    fault: str  # the signal, and of which service one was struck
    noticed: str  # how, as in Loss.why
    after_ms: float
    replaced_after_ms: float  # from then on


class Faults:
    """Strikes the services of a run, one after the other, and finds out what became of it."""

    def __init__(self, cluster: Cluster) -> None:
        self.services = {service.spec.name: service for service in cluster.services}
        self.struck_s: dict[str, float] = {}  # seconds since 1970, by service
        self.num_lost_before = 0  # replicas that were lost before any was struck

    async def run_to_end(self, loops: AsyncLoops, first_step: int) -> SpeedRow:
        """Runs the loops, and strikes after 10, 40 and 70 % of the steps that follow first_step.

        Returns the speed of the run until first_step, when nobody had been struck yet.
        """
        run = loops.run
        before = await num_lost(self.services.values())
        running = asyncio.ensure_future(loops.run_to_end())
        try:
            await until_step(first_step, run, running)
            speed = speed_of(run, first_step)
            self.num_lost_before = await num_lost(self.services.values()) - before
            # A generator dies, a judge stands still, the trainer dies; one after the other.
            for name, percent in zip(FAULTS, (10, 40, 70), strict=True):
                step = first_step + (run.num_steps - first_step) * percent // 100
                is_running = await until_step(step, run, running)
                if is_running and run.num_sent < run.num_steps:  # a step is left to be disturbed
                    self.struck_s[name] = time.time()
                    await self.services[name].strike(FAULTS[name])
            await running
        finally:
            await end_task(running)
        return speed

    async def rows(self) -> list[FaultRow]:
        """How each fault was noticed and made good; a fault that was not has no row."""
        rows = []
        for name, struck_s in self.struck_s.items():
            loss = await self._made_good(name, struck_s)
            if loss is None or loss.replaced_s is None:
                continue
            replaced_s = loss.replaced_s
            row = FaultRow(
                fault=f"{FAULTS[name].name}, one {name}",
                noticed=loss.why,
                after_ms=(loss.noticed_s - struck_s) * 1e3,
                replaced_after_ms=(replaced_s - loss.noticed_s) * 1e3,
            )
            rows.append(row)
        return rows

    async def _made_good(self, name: str, struck_s: float) -> Loss | None:
        """The loss of a replica of this service after struck_s, once there is another one.

        A standstill takes seconds to be noticed, so the run may have ended before. None: nothing
        was noticed within 20 s.
        """
        end = time.monotonic() + 20.0
        while True:
            status = await self.services[name].status(60.0)
            later = [loss for loss in status.lost_replicas if loss.noticed_s > struck_s]
            if later or time.monotonic() > end:
                return later[0] if later else None
            await asyncio.sleep(0.1)


@dataclass(frozen=True)
class ResizeRow:
    """That generators were added to a run, or taken away."""

    generators: str  # before and after, such as "1 -> 3"
    seconds: float  # until it was done: one that leaves first answers what it was asked
    steps_meanwhile: int  # that the run made in this time


async def resized(cluster: Cluster, run: Run, number: int) -> ResizeRow:
    """Resizes the service of generators to this number."""
    generators = f"{cluster.num_generators} -> {number}"
    start = time.monotonic()
    num_steps = len(run.rows)
    await cluster.generators.resize(number)
    return ResizeRow(
        generators=generators,
        seconds=since(start),
        steps_meanwhile=len(run.rows) - num_steps,
    )


async def num_lost(services: Iterable[Service]) -> int:
    """How many replicas these have lost so far, without those that were taken away on purpose.

    A service should not count those as lost. `tell_who_came` checks that; this does not rely on it.
    """
    found = 0
    for service in services:
        losses = (await service.status(60.0)).lost_replicas
        found += sum(loss.why != "taken away" for loss in losses)
    return found


@dataclass(frozen=True)
class ResizedRun:
    """What became of a run in which generators came and went."""

    training: Training
    rows: list[ResizeRow]
    before: ServiceStatus  # of the generators
    after: ServiceStatus
    readers: list[int]  # process ids of those that hold a lease


async def come_and_go(lab: Lab) -> None:
    """Checks that it costs a run nothing when generators come and go.

    If a replica is lost meanwhile, the run does not show that, and is made again: twice at most.
    """
    report = lab.report
    num_runs = 0
    while True:
        before = await num_lost(lab.cluster.services)
        found = await resized_run(lab)
        num_runs += 1
        if num_runs == 3 or await num_lost(lab.cluster.services) == before:
            break
        report.say("a replica was lost in the run in which generators come and go: made again")
    report.table(found.rows)
    tell_who_came(report, found)
    cfg = lab.cluster.cfg
    report.check("largest lag of that run", found.training.largest_lag(), "<=", cfg.max_lag)
    # On GPUs generators copy and keep no lease. With --hosts relays hold leases, too.
    if cfg.device == "cpu" and not cfg.hosts:
        strangers = set(found.readers) - set(found.after.pids)
        num_known = len(found.readers) - len(strangers)
        report.check("generators that lease a slot", num_known, "==", cfg.generators)
        report.check("other processes that lease a slot", len(strangers), "==", 0)


async def resized_run(lab: Lab) -> ResizedRun:
    """A run that begins with one generator, gets two more, and loses one on purpose.

    So it is with --generators 2, the default. In general it goes from 1 to as many as there is room
    for (max_generators), and from these to --generators. The run goes on until that is done, and
    then for a few steps.
    """
    cluster = lab.cluster
    cfg = cluster.cfg
    training = lab.training("come", sys.maxsize)
    run = training.run
    before = await cluster.generators.status(60.0)
    rows = [await resized(cluster, run, 1)]
    loops = AsyncLoops(training, Flow.of(cfg, cfg.max_lag))
    running = asyncio.ensure_future(loops.run_to_end())
    try:
        for number in (max_generators(cfg), cfg.generators):
            await until_step(len(run.rows) + 2, run, running)
            rows.append(await resized(cluster, run, number))
        run.end_after(run.num_sent + 2)
        await running
    finally:
        await end_task(running)
    # A request for each, so that all have leased something since.
    await sample(cluster, run.sampler.first(max(cfg.batch_groups, cfg.generators)), run.version)
    after = await cluster.generators.status()
    return ResizedRun(
        training=training,
        rows=rows,
        before=before,
        after=after,
        readers=await cluster.trainer.route(Trainer.readers),
    )


def tell_who_came(report: Report, found: ResizedRun) -> None:
    """Checks that this cost nothing."""
    num_failed = found.after.num_failed_attempts - found.before.num_failed_attempts
    report.check("requests that failed while generators came and went", num_failed, "==", 0)
    num_gone = len(found.after.lost_replicas) - len(found.before.lost_replicas)
    report.check("generators that left on purpose, counted as lost", num_gone, "==", 0)
    ledger = found.training.run.ledger
    astray = ledger.counts["lost"] + ledger.counts["undone"] + ledger.num_missing()
    report.check("groups of that run lost, undone or not accounted for", astray, "==", 0)


def tell_speed(
    report: Report,
    sync: SpeedRow,
    fast: SpeedRow,
    training: Training,
    num_lost_before: int,
) -> None:
    """Reports how fast the asynchronous run was until the faults, beside the synchronous one.

    The ratio that this stage is about is the first that is checked: how much more of the time the
    trainer is busy. Those for --json say what limits the speed.

    num_lost_before: replicas that it has lost until then. To replace them takes time, too.
    """
    report.table([sync, fast])
    # In the synchronous run both sides work in turn: of each second generators need g, the trainer
    # t. If they worked at the same time all the time, max(g, t) would do.
    in_turn = sync.generators_busy + sync.trainer_busy
    at_once = max(sync.generators_busy, sync.trainer_busy)
    ideal_speedup = in_turn / at_once
    speedup = sync.s / fast.s
    rows = training.run.rows
    # stall_s: for which a step waited until the copy of the version before it was complete.
    stall_s = sum(row.stats.stall_s for row in rows)
    stall = stall_s / sum(row.stats.step_s for row in rows)
    good = [row.seconds for row in rows if row.heldout is not None and row.heldout >= 0.95]
    report.figure(
        async_speedup=speedup,
        speedup_of_ideal=speedup / ideal_speedup,
        bottleneck_busy_share=max(fast.generators_busy, fast.trainer_busy),
        trainer_stall_share=stall,
        seconds_to_95=good[0] if good else None,
    )
    if num_lost_before > 0:
        report.say(f"before any fault was made {num_lost_before} replicas were lost: no comparison")
    elif training.cfg.max_lag > 0:  # with K = 0 nothing is sent ahead, and both sides take turns
        more = fast.trainer_busy / sync.trainer_busy
        report.check("trainer busy, asynchronous / synchronous", more, ">", 1)
    report.check("share of its steps that the trainer waited for copies", stall, "<", 0.1)


def tell_lag(report: Report, loose: Training, training: Training) -> None:
    """Reports how old samples were. loose: a run without the rule."""
    bound = training.cfg.max_lag
    rows = []
    by_rule = {"no tickets, no drop": loose, f"tickets and drop, K = {bound}": training}
    for rule, found in by_rule.items():
        lags = [row.stats.lag_mean for row in rows_since(found.run)]
        mean = statistics.fmean(lags) if lags else None
        rows.append({"lag, in versions": rule, "mean": mean, "max": found.largest_lag()})
    report.table(rows)
    # Without the rule generators run ahead, and lag grows. These steps are too few to exceed a
    # large --max-lag; then a lag above 10 shows it well enough.
    report.check("largest lag without the rule", loose.largest_lag(), ">", min(bound, 10))
    report.check("largest lag", training.largest_lag(), "<=", bound)


def tell_faults(report: Report, noticed: list[FaultRow], num_struck: int) -> None:
    """Reports what became of the faults."""
    if noticed:
        report.table(noticed)
    for row in noticed:
        if row.fault.endswith("generator"):
            took_s = (row.after_ms + row.replaced_after_ms) / 1e3
            report.figure(generator_replaced_s=took_s)
    report.check("faults noticed and made good", len(noticed), "==", num_struck)


def tell_books(report: Report, loops: AsyncLoops) -> None:
    """Reports what became of all groups, and checks that none was forgotten."""
    run = loops.run
    counts = run.ledger.counts
    num_in_flight = len(run.ledger.in_flight)
    texts = [f"{fate} {count}" for fate, count in counts.items()]
    report.say(f"groups: {', '.join(texts)}, in flight at the end {num_in_flight}")
    report.say(f"episodes not judged: {run.num_unjudged}; cut by the context: {run.num_cut}")
    report.figure(**counts, in_flight=num_in_flight, unjudged=run.num_unjudged)
    found = len(loops.buffer.awaited) + len(loops.buffer.groups)
    report.check("groups started, not accounted for", run.ledger.num_missing(), "==", 0)
    num_nowhere = num_in_flight - found
    report.check("groups in flight, but in no loop nor the buffer", num_nowhere, "==", 0)
    batch_groups = loops.flow.batch_groups
    # In this process: what was counted before it went on may have been under other flags.
    num_groups = (run.num_steps - run.num_before) * batch_groups
    report.check("groups trained on", run.ledger.num_since("trained"), "==", num_groups)
    most = run.num_returns * loops.training.cfg.save_every * batch_groups
    num_undone = run.ledger.num_since("undone")
    report.check("groups undone by the loss of the trainer", num_undone, "<=", most)


@stage(
    "both sides work at the same time, so the trainer works more of the time; lag never exceeds "
    "the bound; faults cost no step but those since the checkpoint",
    hint="write `return True`, and `10**6` for the tickets of Gate in the line that ends with "
    "`mechanism: tickets`: nothing bounds lag",
    mechanism="lag bound",
    needs_lab=True,
)
async def demo_async_rl(report: Report, cfg: Config, lab: Lab) -> None:
    """Runs without the rule, with faults, with generators that come and go, and in turn."""
    cluster = lab.cluster
    # Steps to compare with the synchronous run. The faults come after them.
    num_compared = max(1, cfg.steps // 2)
    report.say(f"seed {cfg.seed}; with the tiny policy about half a minute")
    report.say("this stage strikes its run with three faults, and makes three other runs")
    # 1. Without the rule: there are tickets for all, and nothing is ever too old.
    loose = lab.training("loose", min(40, num_compared))
    heldout = loose.run.sampler.heldout
    await with_retries(cluster, lambda: cluster.load(""))
    report.doing("evaluating held-out prompts")
    before = await with_retries(cluster, lambda: evaluate(cluster, heldout))
    lab.tell_first_rollout()
    await AsyncLoops(loose, Flow.without_bound(cfg)).run_to_end()

    # 2. With it, and with faults.
    training = lab.training("async", num_steps_of(cfg, "async_rl"), "async_rl")
    loops = AsyncLoops(training, Flow.of(cfg, cfg.max_lag))
    faults = Faults(cluster)
    fast = await faults.run_to_end(loops, num_compared)
    after = await with_retries(cluster, lambda: evaluate(cluster, heldout))
    noticed = await faults.rows()

    # 3. Generators come and go.
    await come_and_go(lab)

    # 4. The synchronous run.
    peer = lab.training("sync", num_compared)
    await train_sync(peer)

    tell_speed(report, speed_of(peer.run, num_compared), fast, training, faults.num_lost_before)
    tell_lag(report, loose, training)
    tell_books(report, loops)
    tell_faults(report, noticed, len(faults.struck_s))
    # k3 is known of tokens of lag 0 alone, and all of the synchronous run are.
    training.tell_learning(before, after, peer.largest_k3())
    expect(training, "held-out exact, gained", after - before, ">", 0)

    # 5. Simulated runs.
    report.doing("runs of up to 8 generators in simulated time")
    fleets = await asyncio.to_thread(fleet_rows)
    tell_simulated(report, fleets, await asyncio.to_thread(order_rows))
    # You can now keep both sides at work, and say how old a sample can be.


# == 14. CRITIC ====================================================================================
# Problem. A group compares the answers to one prompt with each other. Often there is only one
#   answer: a user does not have the same conversation eight times, a machine on which commands were
#   run cannot be set back, or eight answers cost too much. What is left to compare with is the
#   batch, and that mixes how good an answer was with whom it was given to.
# Rule. Learn what is to be expected. A second network, the critic, reads a conversation up to a
#   token and says what return, the sum of rewards, is still to come: the value V. The advantage of
#   a token is how much more came after it than V had said.
# Cost. A network as large as the policy, with moments of its own; the demo measures the time. In
#   the first seven steps the critic learns alone. Where a prompt can be answered eight times, a
#   group does without all that: the demo has both side by side.
# Not here. A body shared with the policy; a discount for later rewards; a clip for values.
# Source. GAE, generalized advantage estimation (Schulman 2016).
#
# A batch comes to the critic before it comes to the trainer. Here are two batches, a and b. The
# main process does not wait for the step on a before it sends b (section 13), and the critic learns
# from a batch beside the step on it. So the trainer waits for the critic only if learning from one
# batch and reading the next takes longer than a step:
#
#     main process             critic                         trainer
#       a ------------------>    advise: V, advantages
#       a, advantages <------    |
#         `----------------------------------------------->    step on a
#       learn -------------->    trains on a                   |
#       b ------------------>    advise                        |
#       b, advantages <------    |                             |
#         `----------------------------------------------->    b waits there
#       learn -------------->    trains on b                   step on b

# -- 14a. Values and advantages --------------------------------------------------------------------
# What came after a token can be counted as it was: that is right on average, and noisy, for luck is
# in it. Or V at the next token is believed in its place: that is calm, and wrong where V is. A
# number from 0 to 1, lambda, mixes the two. With 1 all that came counts; with 0 only the next
# reward and the next V do. There is one from turn to turn (--turn-lambda), and one from token to
# token inside of a turn (--token-lambda).
#
# By example, an episode of two turns, with a reward of 0.9 at its end. Before the first token the
# critic expects 0.4, and after the first answer, which was good, 0.7. With lambda 0.8 between turns
# and 1 inside of one, from the last token back to the first:
#
#     token   turn    V   next V   reward   error = reward + next V - V   advantage
#     a          1   0.4     0.5      0.0                          0.1    0.1 + 1.0 * 0.36 = 0.46
#     b          1   0.5     0.7      0.0                          0.2    0.2 + 0.8 * 0.20 = 0.36
#     c          2   0.7     0.0      0.9                          0.2                       0.20
#
# What V should have said is V + advantage, and that is what the critic learns: for token a it is
# 0.4 + 0.46 = 0.86, where the return was 0.9. So it learns partly from its own later values, and
# these must not be far off.
#
# The critic could share the policy's layers, with a head of its own. Then one forward pass would do
# for both. But each would pull these layers its way, and how much either may pull would be one more
# number to find. As it is, the critic can learn on another core or GPU while the trainer makes its
# step.

# How often it learns from each batch: it must learn faster than the policy changes. With one pass
# the policy of the demo earned a quarter less, and with the usual deviation, below, a third less
# (means of three seeds: DOCS 5).
CRITIC_PASSES = 2
# The standard deviation of a tiny network's first weights. The usual 0.02 suits wide layers; with a
# width of 40 what the network says would hardly depend on what it reads.
SCALAR_STD = 0.05


def scalar_network(cfg: Config, is_empty: bool = False) -> Any:
    """A network of the policy's shape that has a number for each token in place of logits.

    With a pretrained model it begins with that model's body. With the tiny policy it is fresh: what
    that policy learned in its warm start tells little of rewards. The last layer is zero, so at
    first all numbers are 0. is_empty: as in Policy.
    """
    torch.manual_seed(cfg.seed)
    auto = transformers.AutoModelForTokenClassification
    network: Any
    with torch.device("meta") if is_empty else contextlib.nullcontext():
        if cfg.model == "tiny":
            _, model = tiny_policy(task_of(cfg.task).letters)
            config = copy.deepcopy(model.config)  # only its shape is needed
            config.update({"num_labels": 1, "initializer_range": SCALAR_STD})
            network = auto.from_config(config, attn_implementation="eager")
        elif is_empty:
            config = transformers.AutoConfig.from_pretrained(cfg.model, num_labels=1)
            network = auto.from_config(config)
        else:
            network = auto.from_pretrained(cfg.model, num_labels=1, dtype=torch.float32)
    for module in network.modules():
        if isinstance(module, torch.nn.Linear) and module.out_features == 1:
            for parameter in module.parameters():
                torch.nn.init.zeros_(parameter)
    set_dtype(network, torch.float32)
    if not is_empty:
        network.to(cfg.device)
    return network.eval()  # as in Policy


def critic_rate(cfg: Config) -> float:
    """Its learning rate, --critic-lr; if that is not given, one that suits its size."""
    if cfg.critic_lr is not None:
        return cfg.critic_lr
    return 3e-3 if cfg.model == "tiny" else 1e-5


def estimate_advantages(
    values: torch.Tensor,
    returns: torch.Tensor,
    turn_ids: torch.Tensor,
    turn_lambda: float,
    token_lambda: float,
) -> torch.Tensor:
    """[B, T] float32: the advantages of sampled tokens, as in the example; elsewhere 0.

    values: [B, T] float32, V before each sampled token. returns: [B, T] float32, of each sampled
    token the sum of the rewards from its turn on. turn_ids: [B, T] int64, as in Tokens.
    """
    advantage = torch.zeros_like(values)
    # Of each row, what is known of the sampled token that comes next in it: [B]. Behind the last
    # one there is none, and nothing to come.
    next_value = torch.zeros(len(values))
    next_return = torch.zeros(len(values))
    next_advantage = torch.zeros(len(values))
    next_turn = torch.zeros(len(values), dtype=torch.int64)
    for t in reversed(range(values.shape[1])):
        turn = turn_ids[:, t]
        is_sampled = turn > 0
        ends_turn = turn != next_turn
        # The whole reward of a turn is paid at its last token: the return from this turn on, less
        # that from the next turn in which the policy spoke. Say it spoke in turns 1 and 3 alone,
        # and the rewards of turns 1, 2 and 3 are 0.2, 0.1 and 0.6. Then the returns are 0.9, 0.7
        # and 0.6, and turn 1 is paid 0.9 - 0.6 = 0.3: its own reward and that of turn 2.
        reward = torch.where(ends_turn, returns[:, t] - next_return, 0.0)
        error = reward + next_value - values[:, t]
        share = torch.where(ends_turn, turn_lambda, token_lambda)
        found = error + share * next_advantage
        advantage[:, t] = torch.where(is_sampled, found, 0.0)
        # A row whose token here was not sampled keeps what it knows, for the sampled one before.
        next_value = torch.where(is_sampled, values[:, t], next_value)
        next_return = torch.where(is_sampled, returns[:, t], next_return)
        next_advantage = torch.where(is_sampled, found, next_advantage)
        next_turn = torch.where(is_sampled, turn, next_turn)
    return advantage


def in_deviations(advantage: torch.Tensor, is_sampled: torch.Tensor) -> torch.Tensor:
    """[B, T]: the advantages, less their mean over sampled tokens, in standard deviations.

    Else the gradient would become small as the critic becomes good, and the entropy bonus, which
    stays as it is, would outweigh it. (Tried: the policy then earned half as much, DOCS 5.)
    """
    mine = advantage[is_sampled].double()
    if not len(mine):
        return advantage
    centred = advantage - mine.mean()
    scaled = centred / (mine.std(correction=0) + 1e-4)
    return (scaled * is_sampled).float()


@dataclass(frozen=True)
class Advice:
    """What a critic says of a batch."""

    advantage: torch.Tensor  # [B, T] float32, for Valued
    explained_variance: float | None  # as in StepStats; None: all returns are alike


def explained_variance(returns: torch.Tensor, values: torch.Tensor) -> float | None:
    """The share of the returns' variance that the values account for; None: there is none.

    Both are [N], of the sampled tokens of a batch.
    """
    whole = float(returns.double().var(correction=0)) if len(returns) else 0.0
    if whole < 1e-12:
        return None
    return 1 - float((returns - values).double().var(correction=0)) / whole


class CriticState:
    """The critic in training: its network, and all that an update needs.

    As TrainState it is no actor, and has a part of each weight if there are several ranks.
    """

    def __init__(
        self,
        cfg: Config,
        network: Any,
        rank: int = 0,
        meeting_place: str = "",
        advance: Callable[[], None] = lambda: None,
    ) -> None:
        """network: of scalar_network; empty on all ranks but 0. The rest: as TrainState."""
        self.cfg = cfg
        self.network = network
        self.rank = rank
        self.advance = advance
        self.batch: Rollout | None = None  # that it has advised on, and not yet learned from
        self.targets = torch.zeros(0)  # [B, T] float32: what it should have said of that one
        if cfg.recompute:
            compute_layers_again(network)
        if needs_group(cfg):
            form_group(meeting_place, rank, cfg.trainers)
            give_to_fsdp(network, cfg, rank)
        self.prepare_optimizer()

    def prepare_optimizer(self) -> None:
        """Makes a fresh optimizer."""
        self.network.zero_grad()  # as in TrainState
        rate = critic_rate(self.cfg)
        parameters = self.network.parameters()
        self.optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0, fused=True)

    def advise(self, batch: Rollout) -> Advice:
        """Says how much better than expected each token of a batch was.

        It has not learned from this batch then: else it would expect what it has seen.
        """
        tokens = batch.tokens
        is_sampled = batch.sampled()
        values = self._values(batch)
        turn = (tokens.turn_ids - 1).clamp(min=0)
        returns = returns_of(self.cfg, batch).gather(1, turn).float()  # [B, T], of tokens
        found = estimate_advantages(
            values, returns, tokens.turn_ids, self.cfg.turn_lambda, self.cfg.token_lambda
        )
        self.batch = batch
        self.targets = values + found
        return Advice(
            advantage=in_deviations(found, is_sampled),
            explained_variance=explained_variance(returns[is_sampled], values[is_sampled]),
        )

    def learn(self) -> float:
        """Trains on the batch that it has advised on. Returns the loss of its last pass."""
        assert self.batch is not None, "it advises once before it learns once"
        num_tokens = max(1, int(self.batch.sampled().sum()))
        loss = torch.zeros(1, dtype=torch.float64)
        for _ in range(CRITIC_PASSES):
            loss.zero_()
            for rows in self._rows(self.batch):
                part = self._part(self.batch, rows)
                targets = self.targets[rows, 1 : part.ids.shape[1]].to(part.ids.device)
                errors = (self._score(part) - targets)[part.is_sampled()[:, 1:]]  # [N]
                half_square = errors.square().sum() / 2 / num_tokens
                # FSDP takes the mean over the ranks, as in TrainState.
                (half_square * self.cfg.trainers).backward()
                loss += half_square.detach().double().cpu()
                self.advance()
            if math.isfinite(clip_gradient(self.network)):
                self.optimizer.step()  # mechanism: critic learns
            self.optimizer.zero_grad()
        self.batch = None
        if self.cfg.trainers > 1:
            torch.distributed.all_reduce(loss)
        return float(loss)

    def _rows(self, batch: Rollout) -> Sequence[torch.Tensor]:
        """The numbers of the rows that this rank reads, for each forward pass some.

        They are divided as for the trainer. A critic has no logits and could take more at once; it
        is not worth a second limit.
        """
        vocab_size = self.network.config.vocab_size
        return rows_of_parts(self.cfg, self.rank, batch, vocab_size)

    def _part(self, batch: Rollout, rows: torch.Tensor) -> Tokens:
        """What stands in these rows, packed, on the device."""
        of_rows = batch.tokens.each(lambda tensor: tensor[rows]).without_empty_columns()
        return of_rows.each(lambda tensor: tensor.to(self.cfg.device))

    def _score(self, part: Tokens) -> torch.Tensor:
        """[b, t - 1] float32: V before each token but the first. It has read what comes before."""
        found = self.network(input_ids=part.ids[:, :-1], use_cache=False)
        return found.logits.squeeze(-1).float()

    def _values(self, batch: Rollout) -> torch.Tensor:
        """[B, T] float32: V before each sampled token, elsewhere 0; the same on all ranks."""
        values = torch.zeros(batch.tokens.ids.shape)
        for rows in self._rows(batch):
            part = self._part(batch, rows)
            with torch.no_grad():
                values[rows, 1 : part.ids.shape[1]] = self._score(part).cpu()
            self.advance()
        if self.cfg.trainers > 1:
            torch.distributed.all_reduce(values)  # each rank had zeros in the rows of the others
        return values * batch.sampled()

    def part_of_checkpoint(self) -> dict[str, Any]:
        """Its weights and moments, as checkpoint_of has those of the trainer."""
        options = dcp.StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights, moments = dcp.get_state_dict(self.network, self.optimizer, options=options)
        return {"weights": weights, "moments": moments}

    def become(self, found: dict[str, Any] | None) -> None:
        """Makes it what a checkpoint says; None: one that has learned nothing. All ranks at once.

        found: on ranks other than 0 it has no tensors, as in the function `become`.
        """
        self.batch = None
        self.prepare_optimizer()
        options = loading(self.cfg)
        if found is None:
            is_first = self.rank == 0
            weights = scalar_network(self.cfg).state_dict() if is_first else {}
            dcp.set_model_state_dict(self.network, weights, options=options)
            return
        dcp.set_model_state_dict(self.network, dict(found["weights"]), options=options)
        moments = found["moments"]
        dcp.set_optimizer_state_dict(self.network, self.optimizer, moments, options=options)
        copy_moments(self.optimizer)
        for group in self.optimizer.param_groups:
            group.update(lr=critic_rate(self.cfg))  # of these flags, not of those it was saved with


# -- 14b. The critic as an actor -------------------------------------------------------------------
#
# A service of its own, "critic", with as many ranks as the trainer. What passes between it and the
# main process:
#
#     Critic    meeting_place                    -> str              as of the trainer
#               begin        str                 -> None             joins its process group, once
#               load         LoadRequest         -> None             becomes what a checkpoint says
#               save                             -> str              a file with its part of one
#               advise       Packed Rollout      -> Packed Advice    V, and the advantages
#               learn                            -> float            trains on that batch; its loss
#
# The critic is what it is because of all batches before, so a run cannot go on with a fresh one, as
# it cannot with a fresh trainer. Its part of a checkpoint stands in the same file: both cannot be
# of different steps. If it is lost, its calls raise TrainerLost, and the run goes back to the
# newest checkpoint:
#
#     step 57, learn   the critic dies. If the trainer has made its step on that batch, that is
#                      undone with the others since step 50 (section 12)
#     load             another critic begins, and becomes what step 50 was; so does the trainer


class Critic(RankedWorker):
    """The actor around a CriticState."""

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place, cfg)
        self.state: CriticState | None = None  # None until it has begun
        self.file = ""  # with its part of a checkpoint; "" until it was asked for one

    def build(self) -> None:
        """The network."""
        self.network = scalar_network(self.cfg, is_empty=self.rank > 0)

    @endpoint
    async def begin(self, meeting_place: str) -> None:
        """Begins, if it has not."""
        if self.state is None:
            advance = self.pulse.advance
            self.state = CriticState(self.cfg, self.network, self.rank, meeting_place, advance)

    def _begun(self) -> CriticState:
        """As of the trainer."""
        if self.state is None:
            raise TrainerLost("this critic has not begun")
        return self.state

    @endpoint
    async def load(self, request: LoadRequest) -> None:
        """Becomes what a checkpoint says; a fresh critic without one, or if it has no critic.

        If a run that had no critic goes on with one, the policy follows what the critic says at
        once: the steps in which a critic learns alone are the first ones of a run.
        """
        state = self._begun()
        found: dict[str, Any] = {}
        if request.checkpoint:
            found = read_together(request.checkpoint, request.cfg, self.rank)
        state.become(found.get("critic"))

    @endpoint
    async def save(self) -> str:
        """Writes its part of a checkpoint into a file, from which the trainer reads it.

        Both are on the same host. The file is in memory, and is closed with this process.
        """
        found = self._begun().part_of_checkpoint()
        if self.rank == 0:
            self.file = self.file or unnamed_file("critic")
            torch.save({"critic": found}, self.file)
        return self.file

    @endpoint
    async def advise(self, batch: Packed[Rollout]) -> Packed[Advice]:
        """Says how much better than expected each token of a batch was."""
        with self.recorder.span("advise"):
            return Packed.of(self._begun().advise(batch.unpacked()))

    @endpoint
    async def learn(self) -> float:
        """Trains on the batch that it was asked about last. Answers with its loss."""
        with self.recorder.span("learn"):
            return self._begun().learn()


class CriticCluster(Cluster):
    """The actors of RL, with a critic among them if --baseline says so."""

    def __init__(self, cfg: Config, is_warm: bool = True, tell: Tell = tell_nobody) -> None:
        super().__init__(cfg, is_warm, tell)
        self.critic: Service | None = None
        self.critic_turn = asyncio.Lock()  # held from the advice on a batch until it was learned
        if has_critic(cfg):
            like_trainer = specs_of(cfg, self.hosts, self.trainer_class)["trainer"]
            spec = dataclasses.replace(like_trainer, name="critic", replica_class=Critic)
            self.critic = Service(spec)
            self.services.insert(1, self.critic)

    async def _ask_critic(
        self,
        endpoint: Endpoint[Arguments, Reply],
        *request: Arguments.args,
        **keywords: Arguments.kwargs,
    ) -> Reply:
        """Calls an endpoint of the critic on all its ranks. TrainerLost: it is lost."""
        assert self.critic is not None, "--baseline critic"
        try:
            return await self.critic.route(endpoint, *request, **keywords)
        except RequestLost as error:
            raise TrainerLost("the critic was lost") from error

    async def _become(self, load: LoadRequest, is_fresh: bool) -> str:
        """As in Cluster. Where that begins with the policy before RL, it has a fresh critic."""
        state = await super()._become(load, is_fresh)
        if self.critic is not None:
            await self._ask_critic(Critic.begin, await self._ask_critic(Critic.meeting_place))
            if is_fresh:
                load = dataclasses.replace(load, checkpoint="")
            await self._ask_critic(Critic.load, load)  # mechanism: critic goes on
        return state

    async def other_parts(self) -> tuple[str, ...]:
        """As in Cluster. What the critic has written goes into the same checkpoint."""
        return (await self._ask_critic(Critic.save),) if self.critic is not None else ()

    async def step(self, batch: Rollout) -> StepStats:
        """One training step, as in the picture.

        waits for the critic, and then for the trainer / woken by their answers. The lock is held
        until the critic has learned, so it has learned from this batch before it reads the next.
        The trainer's answer is awaited without it, so the next batch can be sent ahead.
        """
        if self.critic is None:
            return await super().step(batch)
        tasks: list[asyncio.Future[Any]] = []
        try:
            async with self.critic_turn:
                packed = await self._ask_critic(Critic.advise, Packed.of(batch))
                advice = packed.unpacked()
                valued = Valued(**vars(batch), advantage=advice.advantage)  # one field more
                step = asyncio.ensure_future(super().step(valued))
                learning = asyncio.ensure_future(self._ask_critic(Critic.learn))
                tasks = [step, learning]
                await asyncio.wait({learning})  # raises nothing: whichever was lost is raised below
            stats, value_loss = await asyncio.gather(step, learning)
        finally:
            # Usually both have ended, and this does nothing. If gather has raised the error of one,
            # or this call was cancelled, the other one may still run, and nobody waits for it.
            for task in tasks:
                task.cancel()
        return dataclasses.replace(
            stats, explained_variance=advice.explained_variance, value_loss=value_loss
        )


# -- 14c. Users who cannot be asked twice ----------------------------------------------------------
#
# A task that needs a critic. It can be trained on as any other: --task users --baseline critic
# --group-size 1. A user says three letters and wants to hear them, twice. The first thing that a
# user says is a digit, the scale on which this user grades: a conversation in which all is wrong is
# worth -0.7 to one who says 0, -0.5 to one who says 1, and so on up to 0.7. One in which all is
# right is worth 1 to everybody. In between, its worth rises evenly with the share of letters that
# are right. Before the second turn a user says + or -, for the answer to the first. By example, a
# user with a 6, to whom wrong answers are worth 0.5:
#
#     the user says    6abc          +dfa
#     is answered           abc           dfb     5 of 6 letters: 0.5 + 0.5 * 5/6 = 0.92
#
# So the same answers are worth very different things, and what makes the difference stands in the
# first token. The batch's mean does not know it. The critic learns it, and also what a - means.

SCALES = "01234567"


class LiveUsers(Task):
    """Users of whom each grades on a scale of their own, at the end, and is asked once."""

    instruction = "A digit, + or - is no letter. Repeat the letters that I say."
    letters = Task.letters + SCALES + "+-"

    def conversation(self, rng: random.Random) -> tuple[Turn, ...]:
        """What the user says if all answers are right."""
        turns = []
        for number in range(self.num_turns):
            text = "".join(rng.choices(Task.letters, k=3))
            mark = "+" if number else rng.choice(SCALES)
            turns.append(Turn(user=mark + text, right=text))
        return tuple(turns)

    def open(self, turns: tuple[Turn, ...]) -> Session:
        """The user of this conversation."""
        return LiveUser(self, turns)


class LiveUser(Session):
    """One of these users."""

    def user(self, said: list[str]) -> str | None:
        """The letters of the turn, behind a mark for what was said before."""
        turn = self.turns[len(said)]
        if said and said[-1] != self.turns[len(said) - 1].right:
            return "-" + turn.right
        return turn.user

    def rewards(self, said: list[str], is_truncated: list[bool]) -> list[float] | None:
        """Nothing until the end; there the share of right letters, on this user's scale."""
        num_right = 0
        num_letters = 0
        for number, turn in enumerate(self.turns):
            text = said[number] if number < len(said) else ""  # it may have been cut
            pairs = zip(text, turn.right, strict=False)
            num_right += sum(letter == right for letter, right in pairs)
            num_letters += max(len(text), len(turn.right))
        share = num_right / num_letters
        worst = (2 * SCALES.index(self.turns[0].user[0]) - 7) / 10  # -0.7, -0.5, ... 0.7
        grade = worst + (1 - worst) * share
        return [0.0] * (len(self.turns) - 1) + [grade]


TASKS["users"] = LiveUsers()

# -- measurement: baselines, and users who differ --------------------------------------------------
# Each baseline has 64 episodes a step, in groups of one or eight. A run takes place in one process,
# without actors, which would only make it slower; there are two such processes, and each makes one
# run after the other. All runs of a task begin with the same policy, after one warm start. A seed
# is of prompts, of samples and of the critic's first weights. Live users in groups of eight are
# shown for comparison: by what the task means, nobody can have the same conversation eight times.
#
# How to read the table. It has a row per run: its task, its baseline, answers per prompt, its seed.
# With `none` a reward is compared with nothing. `batch` compares a conversation with what all users
# gave, so it praises whatever was said to those who grade kindly, right or wrong. `critic` compares
# it with what such a user gives. `group` compares it with the same user: that is exact, and nothing
# had to be learned for it. On `repeat` all prompts are equally hard, so there is little for a
# critic to know. `explained` is the share of the returns' variance that the critic foresaw. A high
# one says that the critic works, and not that the policy does: on `users` most of what differs is
# how a user grades, and that can be foreseen even if no answer gets better.


@dataclass(frozen=True)
class LoneRun:
    """What came of a run in one process."""

    task: str
    baseline: str
    answers: int  # per prompt
    seed: int
    reward: float  # mean of the last ten steps
    exact: float  # share of held-out prompts, after the last step
    explained: float | None  # variance, mean of the last ten steps; None: there is no critic
    cpu_s: float  # without the warm start


LONE_EPISODES = 64  # per step
LONE_STEPS = 36  # with a critic the policy learns in 29 of them (CRITIC_ALONE)
LEAST_REWARD = 0.05  # a smaller one of `batch` counts as this where something is divided by it


def lone_config(task: str, baseline: str, group_size: int, seed: int) -> Config:
    """Of such a run."""
    return Config(
        task=task,
        baseline=baseline,
        group_size=group_size,
        batch_groups=LONE_EPISODES // group_size,
        steps=LONE_STEPS,
        passes=2,
        lr=3e-3,
        seed=seed,
    )


async def lone_run(policy: Policy, cfg: Config, advance: Callable[[], None]) -> LoneRun:
    """Trains a policy synchronously, all in this process. advance: is called after each part."""
    start_s = time.process_time()
    state = TrainState(cfg, policy, advance=advance)
    state.count_on(0)
    critic = CriticState(cfg, scalar_network(cfg), advance=advance) if has_critic(cfg) else None
    sampler = Sampler(cfg.task, cfg.seed)
    stream = sampler.stream()
    rewards = []
    explained = []
    for _ in range(cfg.steps):
        prompts = list(itertools.islice(stream, cfg.batch_groups))
        seed = seed_of(cfg, prompts)
        batch = generate(
            policy, prompts, cfg.group_size, seed, greedy=False, pull=lambda: state.version
        )
        if batch.rewards.isnan().any():  # the sessions do not know them
            reply = await rewards_of(policy.task, request_of(batch))
            batch = dataclasses.replace(batch, rewards=torch.tensor(reply.rewards))
        rewards.append(float(batch.rewards.sum(1).mean()))
        if critic is not None:
            advice = critic.advise(batch)
            explained.append(advice.explained_variance or 0.0)
            critic.learn()
            batch = Valued(**vars(batch), advantage=advice.advantage)
        state.step(batch, lambda: 0.0)
    return LoneRun(
        task=cfg.task,
        baseline=cfg.baseline,
        answers=cfg.group_size,
        seed=cfg.seed,
        reward=statistics.fmean(rewards[-10:]),
        exact=exact_share(policy, sampler.heldout),
        explained=statistics.fmean(explained[-10:]) if explained else None,
        cpu_s=time.process_time() - start_s,
    )


@dataclass(frozen=True)
class LoneRequest:
    """To make such a run."""

    cfg: Config
    weights: Packed[dict[str, torch.Tensor]]  # of the policy at its beginning


class LoneLearner(Worker):
    """A process that makes such runs."""

    has_model = True

    async def prepare(self) -> None:
        """It has one core."""
        torch.set_num_threads(1)

    @endpoint
    async def warm_up(self, cfg: Config) -> Packed[dict[str, torch.Tensor]]:
        """The weights of a policy after its warm start."""
        policy = Policy(cfg, torch.float32)
        warm_start(policy, self.pulse.advance)
        return Packed.of({name: it.detach() for name, it in policy.model.named_parameters()})

    @endpoint
    async def learn(self, request: LoneRequest) -> LoneRun:
        """Makes a run."""
        policy = Policy(request.cfg, torch.float32)
        # Not strict: a tied tensor has two names here, and was sent under one of them.
        policy.model.load_state_dict(request.weights.unpacked(), strict=False)
        return await lone_run(policy, request.cfg, self.pulse.advance)


async def lone_runs(report: Report, seed: int) -> list[LoneRun]:
    """All runs of the table, in its order."""
    spec = ServiceSpec(
        name="learner", replica_class=LoneLearner, args=(), num_replicas=2, max_in_flight=1
    )
    report.doing("runs on two tasks, in two processes")
    learners = Service(spec)
    report.at_end(learners.close)
    Host().expect_models()
    await learners.start()

    async def of_task(task: str, kinds: list[tuple[str, int, int]]) -> list[LoneRun]:
        """kinds: for each run its baseline, answers per prompt, and seed."""
        first = lone_config(task, "batch", 1, seed)
        weights = await learners.route(LoneLearner.warm_up, first)
        requests = []
        for baseline, answers, of_run in kinds:
            cfg = lone_config(task, baseline, answers, of_run)
            request = LoneRequest(cfg=cfg, weights=weights)
            requests.append(learners.route(LoneLearner.learn, request))
        return await asyncio.gather(*requests)

    kinds = [("batch", 1, seed), ("critic", 1, seed), ("group", 8, seed)]
    others = [("batch", 1, seed + 1), ("critic", 1, seed + 1)]
    others += [("batch", 1, seed + 2), ("critic", 1, seed + 2)]
    found = await asyncio.gather(
        of_task("users", [("none", 1, seed), *kinds, *others]), of_task("repeat", kinds)
    )
    await learners.close()  # its memory is needed now
    return [run for of_one in found for run in of_one]


def tell_lone_runs(report: Report, runs: list[LoneRun]) -> None:
    """Reports what the critic brought, and what it costs."""
    report.table(runs)
    by_seed: dict[int, dict[str, LoneRun]] = collections.defaultdict(dict)
    for run in runs:
        if run.task == "users" and run.answers == 1:
            by_seed[run.seed][run.baseline] = run
    pairs = [(of_seed["critic"], of_seed["batch"]) for of_seed in by_seed.values()]
    # Where nothing is learned a reward is about 0, by which nothing can be divided.
    ratios = [critic.reward / max(batch.reward, LEAST_REWARD) for critic, batch in pairs]
    explained = [critic.explained or 0.0 for critic, _ in pairs]
    costs = [critic.cpu_s / batch.cpu_s for critic, batch in pairs]
    report.say(f"the critic takes {statistics.fmean(costs):.2f} times the CPU of `batch`, in a run")
    for run in runs:  # where eight answers can be had: is a critic better than a group?
        if run.baseline == "group":
            # Of the runs on its task the first one with a critic has the same seed.
            alone = next(one for one in runs if (one.task, one.baseline) == (run.task, "critic"))
            report.say(
                f"group of 8 / critic, on `{run.task}`: reward {show(run.reward)} / "
                f"{show(alone.reward)}, CPU {show(run.cpu_s)} / {show(alone.cpu_s)} s"
            )
    report.figure(
        critic_over_batch=min(ratios),
        critic_explained=min(explained),
        critic_cpu_over_batch=statistics.fmean(costs),
    )
    # A half more in each of three seeds is more than luck; and a critic that has learned nothing
    # explains about 0 of the variance.
    what = f"live users: reward, critic / batch, least of {len(pairs)} seeds"
    report.check(what, min(ratios), ">", 1.5)
    what = f"live users: explained variance, least of {len(pairs)} seeds"
    report.check(what, min(explained), ">", 0.3)


async def run_with_actors(report: Report, seed: int) -> None:
    """Trains asynchronously, with a critic among the actors that is killed on the way."""
    cfg = Config(
        task="users",
        baseline="critic",
        group_size=1,
        batch_groups=LONE_EPISODES,
        save_every=6,
        generators=1,
        judges=1,
        seed=seed,
    )
    num_steps = 16
    # Without a warm start the policy stays bad. Here only the critic is looked at: it learns how
    # users grade, is lost, and is replaced.
    cluster = CriticCluster(cfg, is_warm=False, tell=report.say)
    assert cluster.critic is not None, "the Config says so"
    report.at_end(cluster.close)
    await cluster.start()
    report.table(await placement(cluster))
    run = Run("critic", num_steps, Sampler(cfg.task, cfg.seed))
    training = SafeTraining(cluster, run, report)
    loops = AsyncLoops(training, Flow.of(cfg, cfg.max_lag))
    running = asyncio.ensure_future(loops.run_to_end())
    try:
        await until_step(9, run, running)
        await cluster.critic.strike(signal.SIGKILL)
        await running
    finally:
        await end_task(running)
    lost = (await cluster.critic.status(60.0)).lost_replicas
    rows = run.rows
    num_advised = sum(row.stats.value_loss is not None for row in rows)
    report.check("critics lost and replaced", len(lost), "==", 1)
    report.check("steps made with a critic", num_advised, "==", num_steps)
    report.check("largest lag of these", training.largest_lag(), "<=", cfg.max_lag)
    report.check("groups started, not accounted for", run.ledger.num_missing(), "==", 0)
    explained = rows[-1].stats.explained_variance
    report.check("explained variance of the last step", explained, ">", 0.3)


@stage(
    "with one answer per prompt there is no group to compare with; where users differ, a learned "
    "value as the baseline earns more than the mean of the batch",
    hint="write `pass`: the critic never learns, and expects the same of everybody",
    mechanism="critic learns",
)
async def demo_critic(report: Report, cfg: Config) -> None:
    """Compares baselines where a group cannot be had and where it can, and trains with actors."""
    seeds = f"seeds {cfg.seed} to {cfg.seed + 2}"
    report.say(f"{LONE_STEPS} steps of {LONE_EPISODES} episodes a run, {seeds} (about 25 s)")
    tell_lone_runs(report, await lone_runs(report, cfg.seed))

    await run_with_actors(report, cfg.seed)
    # You can now train where every prompt has one answer, and say what a critic costs.


# == 15. REWARD MODEL ==============================================================================
# Problem. For most of what people want there is no reward function. So a network learns to guess
#   from examples which of two answers people prefer, and the policy is trained on its guess. The
#   guess is good where the examples were. The policy goes where the guess is highest, and that is
#   soon elsewhere: the learned reward rises, and people like the answers less and less.
# Rule. Two things keep the policy where the guess is good. The divergence from the policy before RL
#   has a price (--kl): so the policy stays near the answers that people were asked about. Or people
#   are asked again, now and then, about what the policy says by then, and the network learns on,
#   from the new answers and from the old ones: so the examples follow the policy.
# Cost. Two more kinds of workers, with a network each. With --kl the policy gains less than it
#   could. Fresh preferences cost people's time.
# Not here. Other hosts; a reward for a part of an answer; judges that are language models.
# Source. Bradley and Terry 1952; Christiano 2017; the overoptimisation of Gao 2022.
#
#     rollout -> RewardModel 0, 1: a Service beside that of the judges -> a score for each answer
#                    |  WeightReader                                        |
#                Arena of its own: slots, leases                         Trainer: as in section 11,
#                    |  WeightWriter                                        beside it the reference
#                RewardTrainer <- pairs <- people <- two answers to a prompt
#
# The reference, the frozen policy of --kl, could be an actor, too. It stays a copy beside the
# trainer, because an actor would compute the same, about a third of a step (DOCS 5), and cost
# messages on top. Only with a GPU of its own would it pay, for then it could work on the next batch
# while the trainer is at this one. The judges of section 11 stay: they evaluate, and say what
# people prefer (15e).

# -- 15a. Preferences ------------------------------------------------------------------------------
# What people say about two answers to a prompt. Of a model of your own it comes in a file, a line
# for each pair (here on two lines):
#
#     {"prompt": "Name a river.", "chosen": "The Rhine.",
#      "rejected": "Rivers are long, and there are many of them."}
#
# Held out are the lines whose prompt has a hash below 0.1, and at least one. If two prompts or more
# of --task FILE.jsonl (9a) have such a hash, those that are held out there are held out here, too.
#
# As tokens, a pair is two rows of a table: each has the prompt, and behind it one of the answers.
# (In a task of several turns an answer is all that the policy said in a conversation.)

MIN_PREFERENCES = 8  # lines of a file: of fewer there is nothing to learn, and nothing to hold out


@dataclass(frozen=True)
class Preference:
    """A line of --preferences: two answers to a prompt, of which somebody prefers one."""

    prompt: str
    chosen: str
    rejected: str


def preferences_of(path: str) -> list[Preference]:
    """All preferences of a file. ValueError: names the first line that cannot be used."""
    found = read_lines(path, read_preference)
    if len(found) < MIN_PREFERENCES:
        raise ValueError(f"{len(found)} preferences, at least {MIN_PREFERENCES} needed")
    return found


def read_preference(text: str) -> Preference:
    """A line of such a file. ValueError: says what it lacks."""
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError('not of the form {"prompt": ..., "chosen": ..., "rejected": ...}')
    for name in ("prompt", "chosen", "rejected"):
        value = found.get(name)
        if not isinstance(value, str) or not value.strip():
            raise ValueError(f"no text as {name!r}")
        value.encode()  # half a character, which JSON can have, raises a ValueError
    if found["chosen"] == found["rejected"]:
        raise ValueError("'chosen' and 'rejected' are the same")
    return Preference(prompt=found["prompt"], chosen=found["chosen"], rejected=found["rejected"])


def divided(preferences: list[Preference]) -> tuple[list[Preference], list[Preference]]:
    """(those to learn from, those held out)."""
    by_share = sorted(preferences, key=lambda one: hash_share(one.prompt))
    held_out = [one for one in by_share if hash_share(one.prompt) < 0.1] or by_share[:1]
    prompts = {one.prompt for one in held_out}
    return (
        [one for one in preferences if one.prompt not in prompts],
        [one for one in preferences if one.prompt in prompts],
    )


@dataclass(frozen=True)
class Answers:
    """B answers as tokens, each behind what was said before: what a reward model looks at.

    P pairs are the same with one more dimension: [P, 2, T], the answer that was chosen first.
    """

    ids: torch.Tensor  # [B, T] int64, of pairs [P, 2, T]; in a hole 0
    is_sampled: torch.Tensor  # the same, bool: is it a token of an answer?

    @staticmethod
    def of(tokens: Tokens) -> Answers:
        """The same tokens as they were sampled: nothing is tokenized again."""
        packed = tokens.without_empty_columns()
        return Answers(ids=packed.ids, is_sampled=packed.is_sampled())

    def select(self, rows: list[int]) -> Answers:
        """Those with these numbers; of pairs, these pairs."""
        return Answers(ids=self.ids[rows], is_sampled=self.is_sampled[rows])

    def in_pairs(self, chosen: list[int], rejected: list[int]) -> Answers:
        """[P, 2, T]: pairs of rows, of which these are the chosen ones, and these the others."""
        rows = torch.tensor([chosen, rejected], dtype=torch.int64).T  # [P, 2]
        return Answers(ids=self.ids[rows], is_sampled=self.is_sampled[rows])

    def without_empty_columns(self) -> Answers:
        """The same up to the last token of any answer: what stands behind it counts for nothing."""
        columns = self.is_sampled.flatten(0, -2).any(0).nonzero()  # [number of them, 1]
        width = int(columns.max()) + 1 if len(columns) else 1
        return Answers(ids=self.ids[..., :width], is_sampled=self.is_sampled[..., :width])

    def in_rows(self) -> Answers:
        """[2 P, T]: pairs as rows, chosen and rejected in turn."""
        return Answers(ids=self.ids.flatten(0, -2), is_sampled=self.is_sampled.flatten(0, -2))

    @staticmethod
    def joined(parts: Sequence[Answers]) -> Answers:
        """Those of all parts. Where a part has fewer columns, holes are added on its right."""
        width = max(part.ids.shape[-1] for part in parts)
        ids = []
        is_sampled = []
        for part in parts:
            num_more = width - part.ids.shape[-1]
            ids.append(torch.nn.functional.pad(part.ids, (0, num_more)))
            is_sampled.append(torch.nn.functional.pad(part.is_sampled, (0, num_more)))
        return Answers(ids=torch.cat(ids), is_sampled=torch.cat(is_sampled))


def pairs_of(
    policy: Policy,
    preferences: list[Preference],
    advance: Callable[[], None] = lambda: None,
) -> Answers:
    """[P, 2, T]: these preferences in the chat template. Those beyond the context are left out.

    advance: is called after each of them.
    """
    episodes = []
    for one in preferences:
        turns = (Turn(user=one.prompt, right=one.chosen),)
        prompt = Prompt(id=0, turns=turns)
        both = []
        [words] = policy.ids_of([policy.in_template(one.prompt, is_first_turn=True)])
        for text in (one.chosen, one.rejected):
            [ids] = policy.ids_of([text + policy.tokenizer.eos_token])
            episode = Episode(policy, prompt, Session(policy.task, turns))
            episode.hear(words)
            episode.answer(text, ids)
            both.append(episode)
        if not any(episode.is_cut or len(episode.ids) > policy.context for episode in both):
            episodes += both
        advance()
    if not episodes:
        none = torch.zeros(0, 2, 1, dtype=torch.int64)
        return Answers(ids=none, is_sampled=none > 0)
    rows = list(range(len(episodes)))
    return Answers.of(tokens_of(episodes)).in_pairs(rows[::2], rows[1::2])


# -- 15b. The model, and what it learns ------------------------------------------------------------
# A reward model is a body like the policy's, with a head that makes one number of the last hidden
# state of each token. The score of an answer is their mean over its sampled tokens. With a sum the
# length would count, and wrongly. Most answers are not liked, and lose more comparisons than they
# win. So most tokens are seen more often in rejected answers than in chosen ones, and get a number
# below 0. The longer such an answer is, the lower is its sum, and one without any letter would
# score best of those that nobody likes (DOCS 5 has what that does to a run).
#
# Bradley and Terry: the probability that one answer is preferred is sigmoid(its score - the other
# one's). So the loss of a pair is -log sigmoid(chosen - rejected), and only differences matter: 0
# is nothing special, and every lesson may move all scores together. A group is compared with its
# own mean, so such a move does no harm there. Without a baseline it counts as a reward for every
# answer; and a critic, which has learned from earlier batches, takes it for answers that have
# become better, or worse.
#
# Pairs from which it has not learned tell how good it is. Its accuracy is the share of them in
# which it gives the chosen answer the higher score. A coin has 0.5. That is about answers like
# those in these pairs, and nothing else. Once the policy says other things, it must be measured
# anew.
#
# By example, scores 1.0 and 0.2: the first is preferred with probability sigmoid(0.8) = 0.69. If it
# was, the loss is 0.37; if the other one was, 1.17.

REWARD_RATE = {"tiny": 1e-3, "other": 1e-5}  # learning rates: fresh weights, and pretrained ones

# The score is this times the mean. The head begins at zero, and with this factor scores differ
# while its weights are still small; a larger learning rate would change the body faster, too. With
# 4 an answer of three letters and an end has the score that their sum would be.
SHARPNESS = 4.0
REWARD_EPOCHS = 4  # over the first pairs
REWARD_BATCH = 32  # pairs of an update
OLD_PER_NEW = 3  # old pairs that are learned again with each new one
MAX_OLD = 20_000  # pairs that are kept; beyond that the oldest go
MAX_SCORED = 1 << 14  # tokens of a forward pass


def reward_scores(network: Any, answers: Answers) -> torch.Tensor:
    """[B] float32: the score of each answer; 0 where nothing was sampled."""
    device = next(network.parameters()).device
    logits = network(input_ids=answers.ids.to(device), use_cache=False).logits  # [B, T, 1]
    is_sampled = answers.is_sampled.to(device)
    mean = (logits.squeeze(-1) * is_sampled).sum(1) / is_sampled.sum(1).clamp(min=1)
    return SHARPNESS * mean


def in_portions(answers: Answers) -> Iterator[Answers]:
    """As many at a time as a forward pass takes; of pairs, too."""
    num_tokens = answers.ids[0].numel()
    num_rows = len(answers.ids)
    num_at_once = max(1, MAX_SCORED // num_tokens)
    for first in range(0, num_rows, num_at_once):
        yield answers.select(list(range(first, min(first + num_at_once, num_rows))))


class RewardState:
    """A reward model in training. It is no actor, so tests run it in their own process."""

    def __init__(self, cfg: Config, advance: Callable[[], None] = lambda: None) -> None:
        """advance: is called after every forward pass, as in TrainState."""
        self.cfg = cfg
        self.advance = advance
        self.network = scalar_network(cfg)
        rate = REWARD_RATE["tiny" if cfg.model == "tiny" else "other"]
        self.optimizer = torch.optim.AdamW(self.network.parameters(), rate, weight_decay=0.0)
        self.version = 0  # of its weights; it never goes back, for the readers of its arena
        self.num_lessons = 0  # that led to them; goes back when an earlier state is loaded
        # [P, 2, T]: the pairs so far, the newest first; None before the first lesson.
        self.old: Answers | None = None

    def learn(self, fresh: Answers, num_epochs: int) -> None:
        """A lesson: trains on these pairs, and on OLD_PER_NEW times as many old ones.

        Without the old ones it would forget what they say about answers that the policy gave
        before, and may give again. Everything random in it follows from the seed and the number of
        the lesson.
        """
        rng = random.Random(f"lesson {self.cfg.seed} {self.num_lessons}")
        pairs = fresh
        if self.old is not None:
            num_old = min(OLD_PER_NEW * len(fresh.ids), len(self.old.ids))
            drawn = rng.sample(range(len(self.old.ids)), num_old)
            pairs = Answers.joined([fresh, self.old.select(drawn)])  # mechanism: old pairs
        for _ in range(num_epochs):
            order = list(range(len(pairs.ids)))
            rng.shuffle(order)
            for first in range(0, len(order), REWARD_BATCH):
                self._update(pairs.select(order[first : first + REWARD_BATCH]))
        every = [fresh] if self.old is None else [fresh, self.old]
        newest = list(range(min(MAX_OLD, sum(len(part.ids) for part in every))))
        self.old = Answers.joined(every).select(newest)
        self.num_lessons += 1
        self.version += 1

    def _update(self, pairs: Answers) -> None:
        """An update with these pairs: the loss is the mean over them."""
        for portion in in_portions(pairs.without_empty_columns()):
            both = reward_scores(self.network, portion.in_rows()).view(-1, 2)
            chosen, rejected = both.unbind(1)
            loss = -torch.nn.functional.logsigmoid(chosen - rejected).sum()
            (loss / len(pairs.ids)).backward()
            self.advance()
        clip_gradient(self.network)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def as_saved(self) -> dict[str, Any]:
        """All that its next lesson depends on."""
        return {
            "num_lessons": self.num_lessons,
            "weights": self.network.state_dict(),
            "moments": self.optimizer.state_dict(),
            "old": {} if self.old is None else dataclasses.asdict(self.old),
        }

    def become(self, found: dict[str, Any]) -> None:
        """Becomes what `as_saved` returned, as its next version."""
        self.num_lessons = found["num_lessons"]
        self.network.load_state_dict(found["weights"])
        self.optimizer.load_state_dict(found["moments"])
        copy_moments(self.optimizer)
        self.old = Answers(**found["old"]) if found["old"] else None
        self.version += 1


# -- 15c. The workers ------------------------------------------------------------------------------
#
#     RewardTrainer   read    list[Preference]       -> Packed Answers     pairs, as tokens
#                     begin   the path of a file     -> PublishedReward    becomes what it says
#                     learn   Packed LearnRequest    -> PublishedReward    a lesson
#                     save    the path of a file     -> nothing            writes what it is
#     RewardModel     score   Packed ScoreRequest    -> ScoreReply         pulls, and scores
#
# Its weights travel as those of the policy do (section 7), and for the same reasons: those that
# score pull when they get around to it, nobody waits for them, and none ever scores with half of a
# lesson. Each answer names the version that gave it, so that one can see which lessons were used.
#
# The trainer of the reward model can be lost at any moment, as the other one can. It writes what it
# is after every lesson, into a file of the main process. What follows from a loss:
#
#     RewardModel       another one scores; its successor reads the newest from the arena
#     RewardTrainer     its successor becomes what the newest file says, and has the lesson that was
#                       under way once more. Others judge on meanwhile from the old arena, whose
#                       memory lasts as long as a process has it mapped
#     both              the new RewardModel finds no arena, and raises RewardLost. Another one that
#                       has the old arena mapped scores. If there is none, the trainer is made to
#                       begin, and the request is made again
#     Trainer           the run goes back to a checkpoint (section 12), which has both, and so the
#                       reward model goes back as well


class RewardLost(NobodyToBlame):
    """The trainer of the reward model was lost. There may be another one, which has not begun."""


@dataclass(frozen=True)
class PublishedReward:
    """Where the newest reward model can be read."""

    handle: ArenaHandle
    version: int  # a reader finds this one there, or a later one


@dataclass(frozen=True)
class LearnRequest:
    """A lesson."""

    pairs: Answers  # [P, 2, T]
    num_epochs: int


class RewardTrainer(RankedWorker):
    """Trains the reward model, and publishes it: the actor around a RewardState, of one rank."""

    def __init__(self, place: Place, cfg: Config, num_readers: int) -> None:
        super().__init__(place, cfg)
        self.num_readers = num_readers
        self.has_begun = False

    def build(self) -> None:
        """The network and the arena."""
        # For its tokenizer and chat template; the model is empty.
        self.policy = Policy(dataclasses.replace(self.cfg, device="cpu"), is_empty=True)
        self.state = RewardState(self.cfg, self.pulse.advance)
        if self.cfg.device == "cpu":
            move_together(weights_of(self.state.network))
        num_copying = 0 if self.cfg.device == "cpu" else self.num_readers
        weights = weights_of(self.state.network)
        self.writer = WeightWriter(weights, self.num_readers, num_copying=num_copying)

    @endpoint
    async def read(self, preferences: list[Preference]) -> Packed[Answers]:
        """These preferences as tokens: it has the tokenizer, and the main process has not."""
        return Packed.of(pairs_of(self.policy, preferences, self.pulse.advance))

    @endpoint
    async def begin(self, path: str) -> PublishedReward:
        """Becomes what a file says, of `save` or a checkpoint of a run, and publishes that.

        "": stays as it is.
        """
        if path:
            # mmap: of a run's checkpoint only what is used here is read.
            found = torch.load(path, weights_only=True, mmap=True)
            self.state.become(found["reward"])
        self.has_begun = True
        return self._publish()

    @endpoint
    async def learn(self, request: Packed[LearnRequest]) -> PublishedReward:
        """Has a lesson, and publishes what came of it."""
        self._require_begun()
        lesson = request.unpacked()
        with self.recorder.span("lesson"):
            self.state.learn(lesson.pairs, lesson.num_epochs)
        return self._publish()

    @endpoint
    async def save(self, path: str) -> None:
        """Writes what it is into a file."""
        self._require_begun()
        torch.save({"about": about(self.cfg), "reward": on_cpu(self.state.as_saved())}, path)

    def _require_begun(self) -> None:
        """RewardLost: the request was meant for the one before this, which was lost."""
        if not self.has_begun:
            raise RewardLost("this trainer of the reward model has not begun")

    def _publish(self) -> PublishedReward:
        """Makes its weights the newest. It waits for the copy: there is nothing else to do."""
        if self.state.version > self.writer.version:
            self.writer.publish(self.state.version)
        return PublishedReward(handle=self.writer.arena.handle, version=self.state.version)


def on_cpu(found: Any) -> Any:
    """The same with its tensors on the CPU: who reads the file may have no such GPU."""
    if isinstance(found, torch.Tensor):
        return found.cpu()
    if isinstance(found, dict):
        return {name: on_cpu(part) for name, part in found.items()}
    return found


@dataclass(frozen=True)
class ScoreRequest:
    """To score answers."""

    published: PublishedReward  # under this version, or a later one
    answers: Answers


@dataclass(frozen=True)
class ScoreReply:
    """The answer to a ScoreRequest."""

    scores: list[float]
    version: int  # of the reward model that gave them


class RewardModel(RankedWorker):
    """Scores answers: a judge with a network, of one rank.

    It runs no code of others, so it needs no limit for an episode; but it can be killed as well,
    and then another one scores.
    """

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place, cfg)
        self.reader: WeightReader | None = None

    def build(self) -> None:
        """The network, whose weights it pulls."""
        self.network = scalar_network(self.cfg)

    @endpoint
    async def score(self, request: Packed[ScoreRequest]) -> ScoreReply:
        """Pulls the newest reward model, and scores with it."""
        wanted = request.unpacked()
        with self.recorder.span("score"):
            reader = self._reader_of(wanted.published.handle)
            version = reader.pull()  # mechanism: newest reward model
            found: list[float] = []
            for portion in in_portions(wanted.answers):
                with torch.no_grad():
                    found += reward_scores(self.network, portion).tolist()
                self.pulse.advance()
        least = wanted.published.version
        require(version >= least, f"reward model {version} has judged, and {least} was published")
        return ScoreReply(scores=found, version=version)

    def _reader_of(self, handle: ArenaHandle) -> WeightReader:
        """A reader of this arena. A new trainer has another arena, and needs another reader."""
        if self.reader is None or self.reader.arena.handle.run_id != handle.run_id:
            weights = weights_of(self.network)
            try:
                self.reader = WeightReader(handle, self.place.local_id, weights)
            except WeightMismatch as error:
                if is_alive(handle.pid):
                    raise
                raise RewardLost("the trainer of this reward model has ended") from error
        return self.reader


# -- 15d. The cluster, with a reward model beside the judges ---------------------------------------
# A step of a synchronous run, after which people are asked, and the next one:
#
#     generators      sample 128 answers
#     RewardModel     pulls, and scores them            version 7 of the reward model
#     Trainer         makes a step, and publishes       version 20 of the policy
#     judges          say what the answers earn, of
#                     which the main process makes
#                     64 pairs
#     RewardTrainer   has a lesson of these and 192     version 8 of the reward model
#                     old pairs, and publishes
#     generators      pull, and sample 128 answers      version 20 of the policy
#     RewardModel     pulls, and scores them            version 8 of the reward model
#
# So there are two arenas. The generators read one, the RewardModels the other.


def reward_specs(cfg: Config, hosts: tuple[Host, ...]) -> dict[str, ServiceSpec]:
    """What services a reward model needs, by name; all on the first host."""
    trainer = ServiceSpec(
        name="reward_trainer",
        replica_class=RewardTrainer,
        args=(cfg, cfg.judges),
        num_replicas=1,
        hosts=hosts[:1],
        stuck_after_s=cfg.stuck_after,
        setup_deadline_s=max(ServiceSpec.setup_deadline_s, cfg.stuck_after),
        max_attempts=1,  # a lesson may not be had twice without being noticed
    )
    model = dataclasses.replace(
        trainer,
        name="reward_model",
        replica_class=RewardModel,
        args=(cfg,),
        num_replicas=cfg.judges,
        max_attempts=ServiceSpec.max_attempts,
    )
    return {spec.name: spec for spec in (trainer, model)}


class RewardCluster(CriticCluster):
    """The actors of RL and those of a reward model, which gives the rewards that are trained on.

    Evaluations still ask the task's own judges, and so do preferences of the task.
    """

    MAX_LOSSES = 5  # of the reward model's trainer, in one call
    LOST_TOO_OFTEN = "the trainer of the reward model is lost again and again"

    def __init__(self, cfg: Config, is_warm: bool = True, tell: Tell = tell_nobody) -> None:
        super().__init__(cfg, is_warm, tell)
        specs = reward_specs(cfg, self.hosts)
        self.reward_trainer = Service(specs["reward_trainer"])
        self.reward_models = Service(specs["reward_model"])
        self.services += [self.reward_trainer, self.reward_models]
        # The reward model changes in two ways: by a lesson (`learn`), and when a run begins or goes
        # back (`load`). After each change its trainer writes down what it is, so that one that
        # begins after a loss can become that. `_change` does all this.
        self.published_reward: PublishedReward | None = None  # where its newest weights are
        self.saved_rewards = Checkpoints()  # what it was after the newest two changes, in memory
        self.changing_reward = asyncio.Lock()  # held by a change, and while a loss is mended
        # What it is at the beginning of every run; None before its first lesson.
        self.base_reward: Checkpoints | None = None
        self.judged_under: int | None = None  # the version of the reward model that judged last

    async def load(self, path: str) -> str:
        """As in Cluster; and the reward model becomes what it was then."""
        state = await super().load(path)
        path_of_reward = path  # mechanism: it goes back as well
        if not path and self.base_reward:
            path_of_reward = self.base_reward.paths[0]
        await self._change(lambda: self.reward_trainer.route(RewardTrainer.begin, path_of_reward))
        return state

    async def learn(self, pairs: Answers, num_epochs: int = 1) -> None:
        """A lesson of the reward model."""
        request = Packed.of(LearnRequest(pairs=pairs, num_epochs=num_epochs))
        await self._change(lambda: self.reward_trainer.route(RewardTrainer.learn, request))

    async def other_parts(self) -> tuple[str, ...]:
        """As in Cluster; what the reward model is belongs to a checkpoint, too."""
        return (*await super().other_parts(), self.saved_rewards.paths[0])

    async def _change(self, call: Callable[[], Awaitable[PublishedReward]]) -> None:
        """Makes a call that changes the reward model, and writes down what it is then.

        If its trainer is lost before that was written, the next one becomes what it was before the
        call, which is then made again. Raises RuntimeError if it is lost too often.
        """
        async with self.changing_reward:
            for _ in range(self.MAX_LOSSES):
                try:
                    published = await call()
                    room = self.saved_rewards.room()
                    await self.reward_trainer.route(RewardTrainer.save, room)
                except (RequestLost, RewardLost):
                    await self._restore()
                else:
                    self.saved_rewards.keep(room, 0)
                    self.published_reward = published
                    return
        raise RuntimeError(self.LOST_TOO_OFTEN)

    async def _restore(self) -> None:
        """The trainer of the reward model becomes what was last written down."""
        path = self.saved_rewards.paths[0] if self.saved_rewards.paths else ""
        with contextlib.suppress(RequestLost):  # then the next call raises RewardLost
            self.published_reward = await self.reward_trainer.route(RewardTrainer.begin, path)

    async def _restore_after(self, published: PublishedReward) -> None:
        """As `_restore`, unless another caller has done that already.

        published: what the caller had when it found the loss. A `_restore` publishes another one.
        """
        async with self.changing_reward:
            if self.published_reward is published:
                await self._restore()

    async def judged(self, rollout: Rollout, by_task: bool) -> Rollout:
        """All episodes with rewards. What an answer scores is the reward of its last turn."""
        if by_task:
            return await super().judged(rollout, by_task)
        # A conversation that did not fit into the context has no answer to score: it stays nan.
        rewards = torch.full_like(rollout.rewards, math.nan)
        rows = rollout.sampled().any(1).nonzero().flatten().tolist()
        if rows:
            scores = await self.scores_of(Answers.of(rollout.select(rows).tokens))
            rewards[rows] = 0.0
            rewards[rows, -1] = torch.tensor(scores)
        return dataclasses.replace(rollout, rewards=rewards)

    async def read(self, preferences: list[Preference]) -> Answers:
        """These preferences as tokens. That changes nothing, so after a loss it is done again."""
        for _ in range(self.MAX_LOSSES):
            with contextlib.suppress(RequestLost):
                packed = await self.reward_trainer.route(RewardTrainer.read, preferences)
                return packed.unpacked()
        raise RuntimeError(self.LOST_TOO_OFTEN)

    async def scores_of(self, answers: Answers) -> list[float]:
        """What the newest reward model says of each of these answers."""
        for _ in range(self.MAX_LOSSES):
            published = self.published_reward
            assert published is not None, "the cluster was started"
            request = ScoreRequest(published=published, answers=answers)
            try:
                reply = await self.reward_models.route(RewardModel.score, Packed.of(request))
            except RewardLost:  # a model that has just begun finds no arena
                await self._restore_after(published)
            else:
                self.judged_under = reply.version
                return reply.scores
        raise RuntimeError(self.LOST_TOO_OFTEN)

    def begin_runs_with(self, kept: Checkpoints) -> None:
        """From now on the reward model is this at the beginning of every run."""
        self.base_reward = kept


# -- 15e. Who is asked, and when -------------------------------------------------------------------
# Without a file the task's own judges play the people: they compare two answers of the policy, and
# are wrong once in ten times. Where both earn the same, a coin decides. So one can see how far a
# learned reward goes where the true one is known. (To ask real people while a run goes on is left
# out: it takes a page for them, and days. Theirs are the pairs of --preferences.)
#
#     before the first run    NUM_ASKED pairs: two answers each to prompts that are drawn apart
#     every --ask-every       from the newest batch PAIRS_PER_GROUP pairs of each group; then a
#                             lesson, and what is sampled from then on is judged by what came of it

ASKED_AT_ONCE = 64  # prompts of a request, with two answers each
NUM_ASKED = 1000
NUM_CHECKED = 100  # further prompts, to see how good the reward model is then
PAIRS_PER_GROUP = 4
WRONG = 0.1  # share of comparisons in which people are wrong


def pairs_of_rows(rollout: Rollout) -> list[tuple[int, int]]:
    """Rows of one group, two and two, PAIRS_PER_GROUP of each at most."""
    rows_of: dict[int, list[int]] = {}
    for row, group_id in enumerate(rollout.group_ids.tolist()):
        rows_of.setdefault(group_id, []).append(row)
    found = []
    for rows in rows_of.values():
        of_group = list(zip(rows[::2], rows[1::2], strict=False))
        found += of_group[:PAIRS_PER_GROUP]
    return found


def preferred(judged: Rollout, rng: random.Random | None) -> Answers:
    """[P, 2, T]: pairs of these answers, as people choose. judged: with rewards of the task.

    rng: None: without mistakes, and without the pairs of which both earn the same.
    """
    rewards = judged.rewards.sum(1).tolist()
    chosen: list[int] = []
    rejected: list[int] = []
    for one, other in pairs_of_rows(judged):
        is_better = rewards[one] > rewards[other]
        is_equal = rewards[one] == rewards[other]
        if rng is None and is_equal:
            continue
        if rng is not None and rng.random() < (0.5 if is_equal else WRONG):
            is_better = not is_better
        chosen.append(one if is_better else other)
        rejected.append(other if is_better else one)
    return Answers.of(judged.tokens).in_pairs(chosen, rejected)


def unjudged(rollout: Rollout) -> Rollout:
    """The same episodes, for somebody else to judge."""
    return dataclasses.replace(rollout, rewards=torch.full_like(rollout.rewards, math.nan))


async def two_answers(cluster: RewardCluster, prompts: list[Prompt]) -> Rollout:
    """Two answers of the policy to each of these prompts, with the rewards of the task."""
    version = await cluster.published()
    parts = []
    for first in range(0, len(prompts), ASKED_AT_ONCE):
        some = prompts[first : first + ASKED_AT_ONCE]
        call = cluster.rollout(some, 2, min_version=version, is_alone=True, by_task=True)
        parts.append(call)
    replies = await asyncio.gather(*parts)
    return Rollout.join([reply.rollout.judged() for reply in replies])


async def accuracy(cluster: RewardCluster, pairs: Answers) -> float | None:
    """The share of these pairs of which the chosen answer scores higher. None: there are none."""
    if not len(pairs.ids):
        return None
    found = await cluster.scores_of(pairs.in_rows())
    right = [one > other for one, other in zip(found[::2], found[1::2], strict=True)]
    return statistics.fmean(right)


async def teach(cluster: RewardCluster, report: Report) -> None:
    """The first lesson: the reward model with which every run begins.

    With --checkpoint it is kept there, in the folder reward. A command that finds it has no such
    lesson.
    """
    cfg = cluster.cfg
    kept = Checkpoints(f"{cfg.checkpoint}/reward" if cfg.checkpoint else "")
    path = kept.newest(cfg, report.say)
    if path:
        report.say(f"the reward model has learned before, and reads no preferences: {path}")
    else:
        await with_retries(cluster, lambda: first_lesson(cluster, report))
        room = kept.room()
        with writing(room, unfinished=room):
            shutil.copyfile(cluster.saved_rewards.paths[0], room)
        kept.keep(room, 0)
    cluster.begin_runs_with(kept)
    await with_retries(cluster, lambda: cluster.load(""))


async def first_lesson(cluster: RewardCluster, report: Report) -> None:
    """Has it learn from --preferences, or from what people say of the policy's answers."""
    cfg = cluster.cfg
    if cfg.preferences:
        learned, held_out = divided(preferences_of(cfg.preferences))
        pairs = await cluster.read(learned)
        fresh = await cluster.read(held_out)
    else:
        prompts = Sampler(cfg.task, seed=-2 - cfg.seed).first(NUM_ASKED + NUM_CHECKED)
        answers = await two_answers(cluster, prompts[:NUM_ASKED])
        pairs = preferred(answers, random.Random(f"people {cfg.seed}"))
        fresh = preferred(await two_answers(cluster, prompts[NUM_ASKED:]), None)
    if not len(pairs.ids):
        raise ValueError("no preference to learn from fits into the context of the model")
    await cluster.learn(pairs, REWARD_EPOCHS)
    share = await accuracy(cluster, fresh)
    report.say(
        f"the reward model has learned from {len(pairs.ids)} preferences; of {len(fresh.ids)} "
        f"others it says {show(share)} rightly"
    )
    report.figure(reward_accuracy=share, preferences=len(pairs.ids))


class RewardTraining(SafeTraining):
    """A run in which people are asked again, every --ask-every steps."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batch: Rollout | None = None  # of the newest step
        self.num_asked = 0  # pairs

    def step_done(self, stats: StepStats, batch: Rollout) -> None:
        """As in Training."""
        super().step_done(stats, batch)
        self.batch = batch

    def is_ask_due(self) -> bool:
        """Not before the first step, and not after the last. It counts as is_save_due does."""
        step = self.run.num_sent
        if not self.cfg.ask_every or not 0 < step < self.run.num_steps:
            return False
        return step % self.cfg.ask_every == 0  # mechanism: fresh preferences

    def is_pause_due(self) -> bool:
        """Also when people are to be asked."""
        return super().is_pause_due() or self.is_ask_due()

    async def in_pause(self) -> None:
        """Asks, and then saves: a checkpoint of this step has the reward model after the lesson."""
        if self.is_ask_due() and self.batch is not None:
            await self._ask(self.batch)
        await super().in_pause()

    async def _ask(self, batch: Rollout) -> None:
        """Asks about the newest answers, and has the reward model learn from what people say."""
        assert isinstance(self.cluster, RewardCluster), "it has a reward model"
        by_people = await self.cluster.judged(unjudged(batch), by_task=True)
        rng = random.Random(f"people {self.cfg.seed} {self.run.num_sent}")
        pairs = preferred(by_people.judged(), rng)
        if not len(pairs.ids):  # their judges could judge nothing
            self.report.say(f"{self.run.label} {self.run.num_sent}: nobody had a preference")
            return
        self.num_asked += len(pairs.ids)
        await self.cluster.learn(pairs)


# -- measurement: people with a taste --------------------------------------------------------------
# Three runs of the task `echo`, with people who like something else than what the policy was warmed
# up with: exactly one letter a, in an answer of at least three letters. Say people prefer "bab" to
# "bob", and "pan" to "pin": a network that has learned that letters a are good is right about all
# of these. Then it sees "aaaa", which nobody has asked about.
#
# The runs differ in what holds the learned reward: nothing, the price of the divergence, or fresh
# preferences. They have the same actors, one after the other, and begin with the same policy and
# the same reward model. No run is trained on the true reward; people answer by it, and the table
# shows it.
#
# How to read the table, a row per run (RewardRow, below, has all its columns). First the true
# reward: `true` in the first steps, `best` in the best ones, `ends at` in the last. Then the
# learned one, all that one would see in earnest: `learned` in the best steps, `rises to` in the
# last. In the run that nothing holds it rises most, and the true one ends lowest. Two columns would
# warn. `kl` is how far the policy has gone from where the examples were. `after` is the share of
# new comparisons, of what the policy says at the end, about which the reward model is right. With
# the price it is small: little harm, as the policy stays near. With fresh preferences it is large.

REWARD_STEPS = 100  # of each run
REWARD_PRICE = 0.5  # --kl, in the second one
REWARD_ASK_EVERY = 3  # steps, in the third one
NUM_COMPARED = 256  # prompts, with two answers each, for the accuracy
BEST_OF = 5  # steps in a row, over which the best true reward is a mean


class Taste(Shift):
    """What these people like."""

    def rewards(
        self,
        turns: tuple[Turn, ...],
        said: list[str],
        is_truncated: list[bool],
    ) -> list[float]:
        """1 if they like the answer, else 0; whether it was stopped does not matter to them."""
        text = said[0] if said else ""
        return [float(len(text) >= 3 and text.count("a") == 1)]


class TasteJudge(Judge):
    """A judge with their taste, whatever the Config says."""

    async def prepare(self) -> None:
        """Makes that task."""
        self.task = Taste("", [0], num_turns=1)


class DriftTrainer(Trainer):
    """A trainer of one rank that can tell how far it has gone from its reference.

    It has a reference in every run of the demo, because the cluster is made with --kl, whatever
    --kl a run itself has.
    """

    @endpoint
    async def drift(self, batch: Packed[Rollout]) -> float:
        """KL(policy, reference) in nats per answer, estimated from samples of lag 0 (k1)."""
        state, _ = self._begun()
        answers = batch.unpacked()
        total = 0.0
        with torch.no_grad():
            for part in parts_of(state, answers, credit_of(state.cfg, answers)):
                logp, _ = score_part(state.reference, part, 0.0, self.cfg.temperature)
                total += float((part.recorded - logp).sum())
        return total / len(answers.said)


class TasteCluster(RewardCluster):
    """The actors of the demo."""

    judge_class = TasteJudge
    trainer_class = DriftTrainer

    def go_on_with(self, cfg: Config) -> None:
        """Runs that begin from now on have this Config."""
        self.cfg = cfg


class WatchedTraining(RewardTraining):
    """A run that keeps its batches, so that people can say afterwards what they think of them."""

    EVALUATE_EVERY = sys.maxsize  # never: the table has the true reward

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batches: list[Rollout] = []
        self.versions: set[int | None] = set()  # of the reward model

    def step_done(self, stats: StepStats, batch: Rollout) -> None:
        """As before."""
        super().step_done(stats, batch)
        self.batches.append(batch)
        assert isinstance(self.cluster, RewardCluster), "it has a reward model"
        self.versions.add(self.cluster.judged_under)

    def _show(self, row: StepRow) -> None:
        """Shows no steps: the table tells."""


async def liked_share(cluster: Cluster, batch: Rollout) -> float:
    """The true reward of a batch: the share of its answers that people like."""
    judged = await cluster.judged(unjudged(batch), by_task=True)
    return float(judged.rewards.sum(1).mean())


def best_window(values: list[float], num: int) -> slice:
    """The place of those `num` values in a row whose mean is the largest."""
    firsts = range(len(values) - num + 1)
    best = max(firsts, key=lambda first: statistics.fmean(values[first : first + num]))
    return slice(best, best + num)


@dataclass(frozen=True)
class RewardRow:
    """What became of a run."""

    held_by: str
    # The true reward, a share: mean of the first ten steps; of the best BEST_OF; of the last ten.
    true: float
    best: float
    ends_at: float
    # The learned reward, where the true one was best, and in the last ten. 0 is nothing special.
    learned: float
    rises_to: float
    # Divergence from the policy before RL, in nats per answer, at the end.
    kl: float
    # Of pairs of answers of which people like one, the share in which the reward model scores that
    # one higher. `before` is for answers of the policy before all runs, with the first reward
    # model; `after` for those at the end of this run. None: all answers are alike.
    before: float | None
    after: float | None
    # Preferences from which the reward model has learned.
    asked: int
    # Versions of the reward model that have judged in this run.
    models: int


async def fresh_accuracy(cluster: TasteCluster) -> tuple[float | None, Rollout]:
    """(accuracy on fresh answers of the policy as it is now, these answers)."""
    prompts = Sampler(cluster.cfg.task, seed=-3 - cluster.cfg.seed).first(NUM_COMPARED)
    answers = await two_answers(cluster, prompts)
    return await accuracy(cluster, preferred(answers, None)), answers


async def held_run(
    cluster: TasteCluster,
    report: Report,
    held_by: str,
    cfg: Config,
    before: float | None,
) -> RewardRow:
    """A run with this Config, and what became of it. before: the accuracy before all runs."""
    cluster.go_on_with(cfg)
    run = Run(held_by, REWARD_STEPS, Sampler(cfg.task, cfg.seed))
    training = WatchedTraining(cluster, run, report)
    await train_sync(training)
    after, answers = await fresh_accuracy(cluster)
    liked = [liked_share(cluster, batch) for batch in training.batches]
    true = await asyncio.gather(*liked)
    best = best_window(true, BEST_OF)
    return RewardRow(
        held_by=held_by,
        true=statistics.fmean(true[:10]),
        best=statistics.fmean(true[best]),
        ends_at=statistics.fmean(true[-10:]),
        learned=mean_reward(run.rows[best]),
        rises_to=mean_reward(run.rows[-10:]),
        kl=await cluster.trainer.route(DriftTrainer.drift, Packed.of(answers)),
        before=before,
        after=after,
        asked=NUM_ASKED + training.num_asked,
        models=len(training.versions),
    )


@stage(
    "a policy exploits a learned reward: that rises while the true one falls; a price on the "
    "divergence from the reference holds the policy, and so do fresh preferences",
    hint="write `return False`: nobody is asked again",
    mechanism="fresh preferences",
)
async def demo_reward_model(report: Report, cfg: Config) -> None:
    """Trains on a learned reward three times, and watches the true one."""
    report.say(f"seed {cfg.seed}; a policy that repeats, people who like one a; about 40 s")
    free = Config(
        task="echo", seed=cfg.seed, steps=REWARD_STEPS, generators=1, reward="model", kl=0.0
    )
    with_price = dataclasses.replace(free, kl=REWARD_PRICE)
    asking = dataclasses.replace(free, ask_every=REWARD_ASK_EVERY)
    # Its trainer has a reference, whether a run needs it or not.
    cluster = TasteCluster(dataclasses.replace(asking, kl=REWARD_PRICE), tell=report.say)
    report.at_end(cluster.close)
    await cluster.start()
    report.table(await placement(cluster))
    await teach(cluster, report)
    before, _ = await fresh_accuracy(cluster)
    nothing = await held_run(cluster, report, "nothing", free, before)
    price = await held_run(cluster, report, f"kl {REWARD_PRICE}", with_price, before)
    fresh = await held_run(cluster, report, f"ask every {REWARD_ASK_EVERY}", asking, before)
    num_losses = await num_lost([cluster.reward_models, cluster.reward_trainer])
    report.table([nothing, price, fresh])
    for name, row in {"nothing": nothing, "kl": price, "fresh": fresh}.items():
        report.figure(
            **{
                f"true_{name}": row.ends_at,
                f"learned_{name}": row.rises_to - row.learned,
                f"kl_{name}_nats": row.kl,
            }
        )
    fall = nothing.best - nothing.ends_at
    report.check("true reward lost since its best, held by nothing", fall, ">", 0.25)
    rise = nothing.rises_to - nothing.learned
    report.check("learned reward gained since then, held by nothing", rise, ">", 0)
    report.check("true reward at the end, held by the divergence", price.ends_at, ">", 0.3)
    report.check("true reward at the end, held by fresh preferences", fresh.ends_at, ">", 0.3)
    num_models = 1 + (REWARD_STEPS - 1) // REWARD_ASK_EVERY
    what = "versions of the reward model that judged in that run"
    report.check(what, fresh.models, "==", num_models)
    report.check("reward models and trainers of them that were lost", num_losses, "==", 0)
    # You can now train on what people say, and know what to watch while you do.


# == 16. HOSTS =====================================================================================
# Problem. Generators on other machines cannot map the trainer's memory. Between them is a cable:
#   one of 10 Gbit/s carries 1.25 GB in a second, and a copy within a host may do ten times that.
#   And a machine can be lost with all that is on it.
# Rule. On each other host runs a relay, which is one more reader of the trainer's arena. It leases
#   a slot by the protocol of section 7, with one-sided reads and writes in place of loads and
#   stores, and publishes in an arena of its own host, where generators read as at home. A version
#   crosses once per host: all of it, or what has changed in it where that takes less time. If the
#   trainer itself is on several hosts, a relay on each reads what it lacks, without a lease. A lost
#   host is a Host whose life has ended: its replicas are lost, and come back with it.
# Cost. A program that waits on every host, and two slots more in an arena for each relay that
#   leases from it (16c says why two). If only what has changed is to cross (16b): memory at the
#   trainer's host, at most half of what its slots take; and a search for changes after each copy,
#   which keeps a thread busy for three to four times as long as the copy did (DOCS A).
# Not here. Encryption. A critic or a reward model on several hosts. Cards for RDMA were not there
#   to be tried: what is said of them follows from their rules, and all else was seen over TCP.
# Source. attach_to_workers of Monarch.
#
# A warning. Whoever can reach the ports that Monarch opens can run any code on these hosts, as your
# user. So they need a private network; the secret below guards the way in, and not these ports.
#
# The words. A host is a machine; to the code it is an object of the class Host (section 5), here of
# RemoteHost. A worker is in this section the program `monarch_rl.py --worker`: one waits on each
# host. (Actors of the class Worker, section 5, go by their kind: trainer, generator, relay.)
# A Monarch host is a process that the worker starts for a run; it starts the processes of actors.
#
#     this command             host A                            host B
#       Link A  <-- lines -->    worker
#       Link B  <-- lines ------------------------------------>    worker
#                                Monarch host of the run           Monarch host of the run
#                                  Trainer, Generator 0              Generator 1, Relay
#                                  Arena of the trainer <-- reads -- Relay --> Arena of host B

# -- 16a. Links ------------------------------------------------------------------------------------
# A worker waits for connections. For each one that begins a run it starts a Monarch host, which
# ends with the connection. That host listens at a port of its own, each time a new one: Monarch
# tries for 30 s to deliver a message, so at the old port the next Monarch host would get what was
# meant for actors of the one before. Over the connection they speak in lines, all but one of JSON:
#
#     worker  versions, nonce   of torch and others: they must be those of the run
#     run     nonce, proof      that the run knows the secret
#     worker  proof             that the worker knows it. Without --secret both proofs are left out
#     run     begin             from here on there is a Monarch host
#
# (The next plumbing says how they prove it, and what a nonce is.) Then, ten times a second:
#
#     worker  host      "tcp://10.0.0.2:40123": I am here, and so is this Monarch host
#             signs     {"4711": {...}}: what was seen of the processes named in the turn before
#     run     signals   [[4711, 860, 9]]: send 9 to process 4711, if it is the one begun at 860
#             pulses    [[4711, PATH], ...]: look at process 4711, whose pulse is at PATH
#
# Whoever hears nothing for SILENCE_S takes the other side for lost. What follows then:
#
#     the link        its Monarch address becomes "", and it tries to connect twice a second
#     RemoteHost      life() is "" from now on
#     the owner       finds that at its next look: the replicas there are lost, "host lost". Their
#                     keepers wake, and each waits until the host is here
#     route           requests that were under way there go to replicas on other hosts
#     the worker      is back, with another Monarch host: life() is another address
#     keepers         make their replicas again, there

SILENCE_S = 8.0  # within this time a stranger must have proved that it knows the secret, too
BEAT_S = 0.1
RECONNECT_S = 0.5
# Threads of a worker: one for each run that it serves, and two for each stranger. More strangers
# have to wait, so they cannot use up the files that may be open, mostly 1024, which a run needs,
# too.
MAX_THREADS = 64
PACKAGES = ("torch", "transformers", "torchmonarch")


def versions() -> dict[str, str]:
    """What two hosts must have in common."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    found["python"] = f"{sys.version_info.major}.{sys.version_info.minor}"
    found["monarch_rl.py"] = f"{zlib.crc32(pathlib.Path(__file__).read_bytes()):08x}"
    return found


def name_and_port(address: str) -> tuple[str, int]:
    """Of tcp://NAME:PORT. ValueError: it is not of that form."""
    where = urllib.parse.urlsplit(address)
    if where.scheme == "tcp" and where.hostname and where.port:
        return where.hostname, where.port
    raise ValueError("not of the form tcp://ADDRESS:PORT; 0.0.0.0 is every network")


def url(name: str, port: int) -> str:
    """The other way round. An address of IPv6 stands in brackets."""
    return f"tcp://[{name}]:{port}" if ":" in name else f"tcp://{name}:{port}"


@dataclass(frozen=True)
class Connection:
    """To a worker of the same versions."""

    lines: Any  # a file, to read lines from and to write lines to
    my_name: str  # the address of this host, as that one sees it


def connect(address: str, secret_file: str = "") -> Connection:
    """Connects to a worker.

    OSError: nobody answers. ValueError: it has other versions, or does not know the secret.
    """
    secret = read_secret(secret_file)
    with socket.create_connection(name_and_port(address), 4.0) as connection:
        lines = connection.makefile("rw")  # which keeps it open
        with patience(connection, SILENCE_S):
            greet(lines, secret)
        connection.settimeout(SILENCE_S)
        my_name, *_ = connection.getsockname()
        return Connection(lines=lines, my_name=my_name)


def greet(lines: Any, secret: bytes) -> None:
    """The run's side of what comes before `begin`. ValueError: this is not our worker."""
    theirs = hear_stranger(lines)
    for name, mine in versions().items():
        if theirs[name] != mine:
            raise ValueError(f"it has {name} {theirs[name]}, this host has {mine}")
    if theirs["nonce"] and not secret:
        raise ValueError("it asks for a secret: give --secret FILE")
    if not theirs["nonce"] and secret:  # anybody could have taken its place
        raise ValueError("it was started without --secret, so it cannot prove that it knows it")
    if secret:
        nonce = secrets.token_hex(32)
        nonces = [str(theirs["nonce"]), nonce]
        proof = proof_of(secret, "run", nonces)
        print(json.dumps({"nonce": nonce, "proof": proof}), file=lines, flush=True)
        if not is_proved(hear_stranger(lines), secret, "worker", nonces):
            raise ValueError("it does not have the same secret")


class Link(threading.Thread):
    """The connection to a worker, made again whenever it is lost.

    It is a thread, so that the worker is answered in time also while the event loop is busy. Ten
    times a second they go round:

        event loop   `watch` adds a process to `pulses`; `send` adds a signal to `signals`
        thread       hears a line, and answers it: these signals are to be sent, and all these
                     processes looked at. Now `signals` is empty, and `asked` is a copy of `pulses`
        worker       sends the signals, and looks at the processes
        thread       hears the next line: what the worker saw of those in `asked` goes to `signs`
        event loop   `take_signs` takes it out

    Each of these changes is made under a lock, which is held for microseconds. When the host is
    lost, one change makes `monarch_address` "" and empties all the others. So a signal to a process
    of the lost life, or what was seen of it, never comes to a process of the next life that happens
    to have the same id.
    """

    def __init__(self, address: str, say: Callable[[str], None], secret_file: str) -> None:
        super().__init__(daemon=True)
        self.address = address
        self.secret_file = secret_file
        self.say = say
        # The thread alone uses these two.
        self.was_here = False  # the worker, before: then it is said to be "back" next time
        self.refusal = ""  # why there was no connection, as told last: the same is not told twice
        self.is_closed = False
        self.lock = threading.Lock()  # for all that follows
        self.monarch_address = ""  # of the Monarch host there; "" while it is lost
        self.signals: list[tuple[int, int | None, int]] = []  # id, start and number, to send there
        # By process id: whom the worker is to look at; whom it was asked about last; and what it
        # saw, until somebody takes it.
        self.pulses: dict[int, PulseHandle] = {}
        self.asked: dict[int, PulseHandle] = {}
        self.signs: dict[int, Signs] = {}
        self.start()

    def run(self) -> None:
        """What the thread does."""
        while not self.is_closed:
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                self._listen(self._connect())
            if self.monarch_address and not self.is_closed:
                self.say(f"{self.address}: lost")
            self._end_life()
            time.sleep(RECONNECT_S)

    def _connect(self) -> Any:
        """The lines of a new connection. ValueError: there is none; why is printed, once."""
        try:
            return connect(self.address, self.secret_file).lines
        except ValueError as error:  # such as: a worker with another secret has come back
            if str(error) != self.refusal:
                self.refusal = str(error)
                self.say(f"{self.address}: {error}")
            raise

    def close(self) -> None:
        """Ends the connection, and with it the Monarch host there."""
        self.is_closed = True

    def watch(self, pulses: list[PulseHandle]) -> None:
        """For the event loop: has the worker look at these processes, if their host still lives."""
        with self.lock:
            if not self.monarch_address:
                return
            for pulse in pulses:
                self.signs.pop(pulse.pid, None)  # of an earlier process with this id
                self.pulses[pulse.pid] = pulse

    def take_signs(self, pulse: PulseHandle) -> Signs | None:
        """For the event loop: what the worker saw last of this process; None: nothing since."""
        with self.lock:
            return self.signs.pop(pulse.pid, None)

    def send(self, pulses: list[PulseHandle], number: int) -> None:
        """For the event loop: has the worker send a signal. While it is lost there is nobody."""
        with self.lock:
            if self.monarch_address:  # mechanism: signals of one life
                self.signals += [(pulse.pid, pulse.started, number) for pulse in pulses]

    def _listen(self, lines: Any) -> None:
        """Listens to the worker until the connection ends. A silence of SILENCE_S ends it, too."""
        with lines:
            print("begin", file=lines, flush=True)
            while line := next_line(lines):
                if self.is_closed:
                    return
                if self.was_here and not self.monarch_address:
                    self.say(f"{self.address}: back")
                self.was_here = True
                answer = self._take_turn(json.loads(line))
                print(json.dumps(answer), file=lines, flush=True)

    def _take_turn(self, told: dict[str, Any]) -> dict[str, Any]:
        """Keeps what the worker has told. Returns what it is told in turn."""
        with self.lock:
            self.monarch_address = told["host"]
            for name, fields in told["signs"].items():
                self._keep_signs(int(name), Signs(**fields))
            self.asked = dict(self.pulses)
            signals = self.signals
            self.signals = []
            pulses = [[pulse.pid, pulse.path] for pulse in self.asked.values()]
            return {"signals": signals, "pulses": pulses}

    def _keep_signs(self, pid: int, seen: Signs) -> None:
        """Keeps what was seen of a process. One that has ended is looked at no more.

        What was seen is dropped if it is of another process than the one watched now: the worker
        is asked about process 4711; that ends; a new process gets this id, and `watch` is called
        for it; the answer comes, about the old one.
        """
        if self.pulses.get(pid) is not self.asked.get(pid):  # mechanism: signs of whom was asked
            return
        self.signs[pid] = seen
        if seen.state in ENDED:
            self.pulses.pop(pid, None)

    def _end_life(self) -> None:
        """The host is lost: forgets whatever was about its processes."""
        with self.lock:
            self.monarch_address = ""
            self.signals = []
            self.pulses = {}
            self.asked = {}
            self.signs = {}


@functools.cache
def link_to(host: RemoteHost) -> Link:
    """The link to this host: the same one for whoever asks in this process."""
    return Link(host.address, Report().say, host.secret_file)


@dataclass(frozen=True)
class RemoteHost(Host):
    """A machine on which a worker runs."""

    address: str
    secret_file: str = ""  # its path and not the secret: this object travels in messages

    def life(self) -> str:
        """The address of the Monarch host there, which is another one after a loss."""
        return link_to(self).monarch_address

    def expect_models(self) -> None:
        """Does nothing: actors there have no template (section 5), each imports what it needs."""

    async def present(self) -> Host:
        """Itself, when it is here."""
        while not self.is_here():
            await asyncio.sleep(BEAT_S)
        return self

    async def spawn(self, starts: Starts, num_ranks: int) -> ProcMesh:
        """Starts processes there. OSError: it was lost just now.

        Unlike those of this machine they note their ids nowhere. So one that is stopped before its
        first answer cannot be told from one that is slow, and is given up after START_WITHIN_S.
        """
        if not self.is_here():
            raise OSError("the host was lost")
        mesh = attach_to_workers(ca="trust_all_connections", workers=[self.life()])
        return mesh.spawn_procs(per_host={"rank": num_ranks}, name=starts.name)

    def watch(self, pulses: list[PulseHandle], on_end: Callable[[str], None]) -> None:
        """Asks the worker there for the signs of these processes. on_end is never called.

        Of processes of this machine a pidfd tells that, and no pidfd reaches another host. That a
        process has ended is found in its signs, or told by Monarch's own detector; and that
        the host is lost is found in its life (Replica.look).
        """
        link_to(self).watch(pulses)

    def signs(self, pulse: PulseHandle) -> Signs | None:
        """What the worker there saw last; None: no line has come since the last look.

        A look that finds None counts for nothing. So a network that is cut for a moment makes
        nobody seem to stand still.
        """
        return link_to(self).take_signs(pulse)

    def signal(self, pulses: list[PulseHandle], number: int) -> None:
        """The worker there sends it, at its next line."""
        link_to(self).send(pulses, number)


def is_loopback(name: str) -> bool:
    """Can only this machine reach it? Of names, only localhost is trusted to mean that."""
    with contextlib.suppress(ValueError):  # it is a name, and no address
        return ipaddress.ip_address(name).is_loopback
    return name == "localhost"


def serve(address: str, secret_file: str) -> None:
    """What --worker does, until somebody ends this process."""
    check_door(address, secret_file)
    secret = read_secret(secret_file)
    name, port = name_and_port(address)
    family = socket.AF_INET6 if ":" in name else socket.AF_INET
    server = socket.create_server((name, port), family=family)
    who = "knows the secret, or reaches a run's ports," if secret else "reaches it"
    print(f"{address} is open: whoever {who} can run any code here, as this user", flush=True)
    while True:
        while threading.active_count() >= MAX_THREADS:  # mechanism: room for runs
            time.sleep(BEAT_S)
        try:
            client, _ = server.accept()
        except OSError:  # too many are open, or it has hung up: that ends no run
            time.sleep(BEAT_S)
            continue
        threading.Thread(target=attend, args=(client, secret), daemon=True).start()


def attend(client: socket.socket, secret: bytes) -> None:
    """Serves one connection to this worker, in a thread."""
    client.settimeout(SILENCE_S)
    # KeyError: a line lacks what it should have. Any of these ends this connection; the worker goes
    # on with the others.
    wrong = (OSError, ValueError, KeyError, TypeError)
    with contextlib.suppress(*wrong), client, client.makefile("rw") as lines:
        with patience(client, SILENCE_S):
            if not admit(lines, secret) or next_line(lines, STRANGER_CHARS) != "begin\n":
                return  # a stranger, or it was only asked who it is
        address = free_address(client)
        host = start_monarch_host(address)
        try:
            beat(host, address, lines)
        finally:
            if host.poll() is None:  # else its id may be that of somebody else by now
                kill([*descendants(host.pid), host.pid])
                host.wait()


def admit(lines: Any, secret: bytes) -> bool:
    """The worker's side of what comes before `begin`: does the run know the secret?

    The worker sends its proof only to a run that has proved itself, because with a proof one can
    try secrets at home until one fits. All others get an empty one.
    """
    nonce = secrets.token_hex(32) if secret else ""
    print(json.dumps({**versions(), "nonce": nonce}), file=lines, flush=True)
    if not secret:
        return True
    told = hear_stranger(lines)
    nonces = [nonce, str(told["nonce"])]
    is_known = is_proved(told, secret, "run", nonces)
    proof = proof_of(secret, "worker", nonces) if is_known else ""
    print(json.dumps({"proof": proof}), file=lines, flush=True)
    return is_known


def free_address(client: socket.socket) -> str:
    """An address on the network of that connection, with a port that nobody uses now.

    If another program takes the port before the Monarch host does, that host ends, and the run
    connects again.
    """
    name, *_ = client.getsockname()
    with socket.create_server((name, 0), family=client.family) as server:
        _, port, *_ = server.getsockname()
        return url(name, port)


def start_monarch_host(address: str) -> subprocess.Popen[bytes]:
    """A process in which Monarch can start others."""
    # prctl(1, 9): the system sends it SIGKILL when this worker ends, however that happens.
    code = (
        "import ctypes; ctypes.CDLL(None).prctl(1, 9); import monarch.actor as m; "
        f"m.run_worker_loop_forever(address={address!r}, ca='trust_all_connections')"
    )
    variables = {**os.environ, LIFE_VARIABLE: address}  # for all that it starts
    return subprocess.Popen([sys.executable, "-c", code], env=variables)


def beat(host: subprocess.Popen[bytes], address: str, lines: Any) -> None:
    """The worker's side of the lines, after `begin`: tells, hears, signals, sleeps, and looks.

    So what it tells was seen at the end of the turn before, of those that were asked about then.
    waits for the run's lines / produces a line each time / ends when the run or the host does
    """
    signs: dict[int, dict[str, Any]] = {}  # by process id
    while host.poll() is None:
        print(json.dumps({"host": address, "signs": signs}), file=lines, flush=True)
        asked = json.loads(next_line(lines))
        for pid, started, number in asked["signals"]:
            if pid in descendants(host.pid):  # nobody but those that this worker has started
                Host().signal([PulseHandle(pid=pid, path="", started=started)], number)
        time.sleep(BEAT_S)
        signs = {}
        for pid, path in asked["pulses"]:
            seen = read_signs(PulseHandle(pid=pid, path=path))
            signs[pid] = dataclasses.asdict(seen)


# -- plumbing: a secret that two hosts share -------------------------------------------------------
# How a worker and a run find out, as they connect, that they belong together. Nothing that follows
# depends on it: you can go on with 16b.
#
# Both sides have a file with the same secret, and neither sends it. Each makes a nonce, a random
# number that is used for one connection only, and sends that. Then each sends an HMAC: a hash of
# the secret, of which side it is, and of both nonces. Nobody can compute it without the secret, so
# it is a proof; and who has overheard it cannot use it again, for the next connection has other
# nonces. What is said after that is neither encrypted nor signed.

# How many characters of a line are read, if whoever sends it has proved nothing yet; and if it has:
# enough for the signs of ten thousand processes.
STRANGER_CHARS = 4096
LINE_CHARS = 1 << 22
# Whoever has overheard a proof can try secrets until one fits, so no word of a dictionary will do.
LEAST_SECRET_BYTES = 16


def check_door(address: str, secret_file: str) -> None:
    """May a worker listen there? ValueError: not without a secret."""
    name, _ = name_and_port(address)
    if not secret_file and not is_loopback(name):
        raise ValueError("others than this machine can reach it: give --secret FILE")


def read_secret(path: str) -> bytes:
    """The secret in this file, without spaces around it; empty if the path is "": there is none.

    ValueError: it is no file, others can read it, or it is too short.
    """
    if not path:
        return b""
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        raise ValueError("it is no file")
    if mode & 0o077:  # what a group or all others may do with it
        raise ValueError("others than its owner have access to it: chmod 600 it")
    secret = pathlib.Path(path).read_bytes().strip()
    if len(secret) < LEAST_SECRET_BYTES:
        raise ValueError(f"it has {len(secret)} bytes; at least {LEAST_SECRET_BYTES} at random")
    return secret


def proof_of(secret: bytes, side: str, nonces: list[str]) -> str:
    """The proof that this side knows the secret. nonces: of the worker, of the run.

    The name of the side is in it, so that nobody can send back the proof that it was just told as
    its own. RFC 2104 has HMAC.
    """
    words = json.dumps([side, *nonces]).encode()
    return hmac.new(secret, words, "sha256").hexdigest()


def is_proved(told: dict[str, Any], secret: bytes, side: str, nonces: list[str]) -> bool:
    """Does this line prove that its sender knows the secret?

    The comparison takes as long for every wrong proof. Else its time would tell how many letters
    were right.
    """
    right = proof_of(secret, side, nonces)
    return hmac.compare_digest(str(told["proof"]).encode(), right.encode())


def next_line(lines: Any, most: int = LINE_CHARS) -> str:
    """The next line, "" at the end. ValueError: it is longer than that many characters."""
    line = lines.readline(most)
    if len(line) == most:
        raise ValueError(f"a line of {most} characters or more")
    return line


def hear_stranger(lines: Any) -> dict[str, Any]:
    """A line of one who has not proved anything yet. ValueError: no dict in JSON, or too long."""
    line = next_line(lines, STRANGER_CHARS)
    if not line:
        raise ValueError("it has hung up")
    try:
        told = json.loads(line)
    except RecursionError:  # thousands of brackets, one in the other
        told = None
    if not isinstance(told, dict):
        raise ValueError("it does not speak this protocol")
    return told


@contextlib.contextmanager
def patience(connection: socket.socket, longest_s: float) -> Iterator[None]:
    """Hangs up if the body takes longer than that.

    The socket's own time-out begins anew with each byte, so a stranger who sends one every few
    seconds could keep us for ever.
    """

    def hang_up() -> None:
        with contextlib.suppress(OSError):  # the other side has done so
            connection.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(longest_s, hang_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# -- 16b. Only what changed ------------------------------------------------------------------------
# This is of use for weights that are published in bf16. (The tiny policy of this tour is published
# in fp32. There each step changes the lower half of every number, so what a step has made always
# crosses whole.) With a large model the trainer keeps its weights in fp32, and publishes them in
# bf16. Near 0.02 two neighbouring numbers of bf16 are 0.0001 apart, and at a learning rate of 1e-6,
# as RL has it, AdamW moves a weight by about 1e-6. So of a hundred weights one to three are rounded
# to another number than before, and the others stay what they were in bf16. (The demo counts them:
# "changed" in its table.) On one host that is of no use, for to find out what has changed takes
# longer than a copy. But between hosts the cable is what costs. So the trainer keeps beside each
# slot its delta: what differs from the version before. A relay that has the version before reads
# the delta in place of the slot, unless the cable is so fast that the slot arrives earlier.
#
# A slot is cut into the pieces of section 8, and each piece is taken as a row of words of 16 bits,
# whatever it holds. Of each piece the delta has
#
#     words before   5 3 3 8 1 0 0 7 ... | 2 2 9 1 4 4 0 6 ...     in blocks of 256 words
#     words now      5 3 4 8 1 0 6 7 ... | 2 2 9 1 4 4 0 6 ...
#
#     counts         2, 0, ...     how many words of each block have changed: 2 bytes per block
#     values         4, 6, ...     what they are now: 2 bytes each
#     places         2, 6, ...     where they stand in their block: 1 byte each
#     a checksum     of all words as they are now
#
# If one word in a hundred has changed, that is 1.9 % of the bytes: for the 512 of a block there are
# 2 for its count, and 3 for each of 2.56 words. In two cases a piece crosses whole. If its delta
# would be more than half of its bytes, none is made, because to unpack one costs time, too. And if
# the piece has another checksum than it should have, once its delta is unpacked, it is read again,
# whole.
#
# A search takes time on the trainer's host, and may be for nothing. It may find that nearly all
# pieces must cross whole. Or it takes so long that the copy of the next version, which is made by
# the same thread, has to wait for it. After such a search the trainer rests: the next REST versions
# are not searched, and their deltas say of every piece that it is to be read whole.
#
# When a delta is made:
#
#     Trainer.step   forward, backward | wait | optimizer | forward, backward        | wait ...
#     the thread                                          | copy 8 | delta of 8      | copy 9 ...
#     `latest`                                                     8 from here on
#
# Generators of the trainer's host wait for no delta, because `latest` names version 8 before its
# delta is begun. Nor does the optimizer: a delta is made of two slots, and reads no parameter. Both
# slots stay what they are meanwhile. For a slot is written, by this thread and by the other ranks
# of this host, only when this thread has chosen it, and it chooses none until the delta is made. A
# relay that sees version 8 before its delta is there looks again until it is.

WORDS_PER_BLOCK = 256  # so a place in a block is one byte
WHOLE = -1  # in place of the number of bytes: this piece has no delta
IN_VAIN = 0.9  # of all pieces: if so many have no delta, what the others save is not worth a search
REST = 15  # versions: where searches are of no use, or take too long, one version in 16 has one


def half_words(memory: torch.Tensor) -> Any:
    """[num_bytes / 2] uint16 for numpy, the same memory. memory: [num_bytes] uint8.

    numpy finds what differs in a quarter of the time that torch takes (DOCS 8).
    """
    return memory.numpy().view("uint16")


def sum_of(piece: torch.Tensor) -> int:
    """A checksum: the sum of all words of 64 bits, modulo 2**64. piece: [num_bytes] uint8.

    It is there for mistakes of this file. It need not find torn deltas: while a slot is leased its
    delta stays, too, and the version of a delta is written last. The sum differs if one change is
    missing; and if one went to a wrong place, unless both places held the same number before. A CRC
    would notice more, such as words that have been exchanged, and takes longer than all the rest.
    """
    return int(piece.view(torch.int64).sum())


def changes_of(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor | None:
    """Counts, values and places of what has changed, [num_bytes] uint8; None: more than half.

    before, now: [num_bytes] uint8, a piece of one version and of the next.
    """
    words = half_words(now)
    differs = words != half_words(before)
    num_changed = numpy.count_nonzero(differs)
    if not num_changed:
        return now[:0]
    num_blocks = math.ceil(len(words) / WORDS_PER_BLOCK)
    if 2 * num_blocks + 3 * num_changed > now.nbytes // 2:
        return None
    [changed] = numpy.nonzero(differs)
    counts = numpy.bincount(changed // WORDS_PER_BLOCK, minlength=num_blocks)
    places = changed % WORDS_PER_BLOCK
    parts = [counts.astype("uint16"), words[changed], places.astype("uint8")]
    return torch.from_numpy(numpy.concatenate([part.view("uint8") for part in parts]))


def change(piece: torch.Tensor, changes: torch.Tensor) -> None:
    """Turns a piece of the version before into that of the new one. changes: from `changes_of`."""
    if not len(changes):
        return
    words = half_words(piece)
    starts = numpy.arange(0, len(words), WORDS_PER_BLOCK)  # of the blocks
    values_at = 2 * len(starts)
    counts = changes[:values_at].numpy().view("uint16")
    places_at = values_at + 2 * int(counts.sum())
    values = changes[values_at:places_at].numpy().view("uint16")
    places = changes[places_at:].numpy()
    starts_of_changed = numpy.repeat(starts, counts)  # for each changed word, that of its block
    words[starts_of_changed + places] = values


class Delta:
    """What turns the version before into the one that a slot holds now.

    One side fills it, in memory of its own; the other reads it over the cable, and unpacks it. A
    relay that other relays read from (16e) has both sides: what it has read it passes on.
    """

    def __init__(self, slot_bytes: int) -> None:
        """An empty one, for slots of this size.

        The system finds memory for a page of it when that is first written. So a delta that was
        never large takes little.
        """
        num_pieces = math.ceil(slot_bytes / PIECE_BYTES)
        self.version = torch.full([1], -1)  # to which it leads
        self.numbers = torch.full([2 * num_pieces], -1)  # these two, so that they cross in one read
        self.sizes = self.numbers[:num_pieces]  # bytes of each piece's changes, or WHOLE
        self.sums = self.numbers[num_pieces:]  # of each piece
        # The changes of one piece after the other, each from a multiple of 8 bytes on.
        self.changes = torch.empty(slot_bytes // 2 + 8 * num_pieces, dtype=torch.uint8)
        # They cross in parts of this size: a 512th of a slot, but at least 64 KiB, and at most a
        # piece. The last part is read whole, even if changes fill only its beginning. So a part is
        # small, but not so small that there are very many.
        self.part_bytes = min(PIECE_BYTES, max(MIB // 16, round_up(slot_bytes // 512, 8)))

    def clear(self) -> None:
        """All pieces are to be read whole."""
        self.sizes.fill_(WHOLE)

    def write(self, slot: torch.Tensor, before: torch.Tensor) -> None:
        """Fills it, but for its version, which `tell` adds when it may be read.

        slot, before: [slot_bytes] uint8, the new version and the one before. If this raises, what
        was written until then is right, and the other pieces are read whole.
        """
        self.clear()
        end = 0
        pieces = zip(before.split(PIECE_BYTES), slot.split(PIECE_BYTES), strict=True)
        for i, (old, new) in enumerate(pieces):
            changes = changes_of(old, new)
            if changes is not None:
                self.changes[end : end + len(changes)] = changes
                self.sums[i] = sum_of(new)
                self.sizes[i] = len(changes)
                end += round_up(len(changes), 8)

    def tell(self, version: int, arena: Arena) -> None:
        """Says to which version it leads. Whoever reads that finds the delta complete.

        arena: that of the slot. Its fences see to the order: the version is written last.
        """
        arena.fence()
        self.version.fill_(version)
        arena.fence()

    def num_whole(self) -> int:
        """How many pieces are to be read whole."""
        return self.sizes.tolist().count(WHOLE)

    def num_bytes(self) -> int:
        """Of all changes."""
        return sum(round_up(max(size, 0), 8) for size in self.sizes.tolist())

    def unpack(self, slot: torch.Tensor) -> list[int]:
        """Makes the new version of the old. Returns the numbers of pieces to be read whole.

        slot: [slot_bytes] uint8, which holds the version before.
        """
        missing = []
        start = 0
        for i, piece in enumerate(slot.split(PIECE_BYTES)):
            size = int(self.sizes[i])
            if size == WHOLE:
                missing.append(i)
                continue
            change(piece, self.changes[start : start + size])
            start += round_up(size, 8)
            if sum_of(piece) != int(self.sums[i]):  # mechanism: checksum of a piece
                missing.append(i)
        return missing


class RelayedWriter(ShardWriter):
    """A writer with readers on other hosts. Rank 0 makes the deltas."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.deltas: list[Delta] = []  # by slot; none before a relay has asked for them
        self.newest: tuple[int, torch.Tensor] | None = None  # version and slot of the newest delta
        self.num_resting = 0  # so many versions are not searched, and then one is
        # The newest delta, under way or done; None before the first.
        self.making: concurrent.futures.Future[None] | None = None
        self.offer: Offer | None = None  # None before a relay has asked

    def start(self, version: int) -> None:
        """As in WeightWriter; then the thread makes a delta."""
        super().start(version)
        if self.deltas:
            self._submit()

    def wait(self) -> float:
        """As in WeightWriter. It waits for no delta, but raises what the newest one has raised."""
        waited_s = super().wait()
        if self.making and self.making.done():
            self.making.result()
        return waited_s

    def _submit(self) -> None:
        """Has the thread make a delta of the version that is there, or is being copied.

        The thread does one job after the other. So the last copy and the last delta have ended when
        this one is begun. It is given both, to see how:

            copy 8 | delta of 8, given copy 8 and delta of 7 | copy 9 | delta of 9, given copy 9 ...
        """
        self.making = self.thread.submit(self._make_delta, self.copying, self.making)

    def _make_delta(
        self,
        copy: concurrent.futures.Future[None] | None,
        last_delta: concurrent.futures.Future[None] | None,
    ) -> None:
        """Makes the delta of the newest version.

            copy has failed          there is no such version: raises that, and makes no delta
            last_delta has failed    makes this one, for relays wait for it; then raises that

        `wait` looks at the newest delta only. If it looked while delta 7 was being made, and that
        failed later, nobody would hear of it. So delta 8 raises it again, and each one after it,
        until `wait` does.
        """
        if copy:
            copy.result()
        version, number = self.arena.latest()
        delta = self.deltas[number]
        try:
            self._search(version, number, delta)
        finally:
            delta.tell(version, self.arena)  # also if that has failed: relays wait for it
        if last_delta:
            last_delta.result()

    def _search(self, version: int, number: int, delta: Delta) -> None:
        """Fills the delta of this slot, or lets it say that all is to be read whole.

        Nobody reads it yet. number: of the slot, which holds this version.
        """
        start_s = time.time()
        delta.clear()
        slot = self.arena.slots[number]
        before_version, before = self.newest or (None, slot)  # None: this is the first
        self.newest = (version, slot)
        if before_version != version - 1:  # one was skipped, or this is the first
            return
        if self.num_resting:
            self.num_resting -= 1
            return
        delta.write(slot, before)
        is_in_vain = delta.num_whole() >= IN_VAIN * len(delta.sizes)
        has_held_up = self.version > version  # the next one has been begun, and waits for this
        if is_in_vain or has_held_up:
            self.num_resting = REST
        if self.note:
            self.note("delta", start_s)

    def for_relay(self, reader: int) -> RemoteHandle:
        """What the relay with this first lease needs. Only rank 0 calls it (RelayedTrainer.remote).

        When the first relay asks, deltas begin: of the version that is there, or is being copied,
        and of all that follow. (That first one says that all is to be read whole: what the version
        before it was, nobody has kept.) Each later relay gets the same, and leases of its own.
        """
        if not self.deltas:
            slot_bytes = self.arena.handle.manifest.slot_bytes
            self.deltas = [Delta(slot_bytes) for _ in self.arena.slots]
            if self.copying:  # else no version was ever begun, and `start` submits the first
                self._submit()
        if self.offer is None:
            self.offer = Offer(self.arena, self.deltas)
        return self.offer.for_relay(reader)


class QuickerWay:
    """Which way a relay takes to the next version: by "changes", or "whole".

    Which one is quicker depends on the cable, on the cores of both hosts and on how much changes.
    Of each way it knows the last NUM_TIMES times, and compares the shortest of them: by accident a
    version may take longer, but hardly less than it needs. What is quicker may change during a run.
    So the slower way is tried again, when the quicker one has been in use for TRY_AFTER times as
    long as that will take.

    By example: "changes" takes 0.1 s, and "whole" took 0.5 s. After 15 s of "changes", which are
    150 versions, one goes "whole". So to try costs a thirtieth of the time at most.
    """

    WAYS = ("changes", "whole")
    TRY_AFTER = 30
    NUM_TIMES = 3  # so a way that has become slower is left after three versions

    def __init__(self) -> None:
        self.times_s: dict[str, collections.deque[float]] = {}  # by way, the last of them
        for way in self.WAYS:
            self.times_s[way] = collections.deque(maxlen=self.NUM_TIMES)
        self.last = ""  # the way that was taken last
        self.spent_s = 0.0  # on that way, since it was last changed

    def choose(self) -> str:
        """The way to be taken."""
        untried = [way for way in self.WAYS if not self.times_s[way]]
        if untried:
            return untried[0]
        quicker, slower = sorted(self.WAYS, key=lambda way: min(self.times_s[way]))
        is_due = self.spent_s > self.TRY_AFTER * min(self.times_s[slower])
        return slower if is_due else quicker

    def took(self, way: str, seconds: float) -> None:
        """That way has brought a version."""
        self.times_s[way].append(seconds)
        if way != self.last:
            self.last = way
            self.spent_s = 0.0
        self.spent_s += seconds


# -- 16c. Leases from another host -----------------------------------------------------------------
# A relay does what WeightReader and WeightWriter do, one after the other: it leases a slot of the
# trainer's arena, copies it into a slot of its own, and makes that one the latest of its host.
#
#     1. look      read the word `latest`: version 7, slot 2       a one-sided read of 8 bytes
#     2. lease     write slot 2 into my first lease                a one-sided write of 8 bytes
#                  look again: if `latest` still names slot 2, that slot is mine to read, go on at 4
#     3. lease     `latest` has moved, to slot 0: write slot 0 into my second lease
#                  look once more: if it still names slot 0, that slot is mine, else slot 2 is
#     4. read      one of two ways
#        changes     if I have version 6: copy it into another slot of mine, read the delta of the
#                    slot that is leased, change what it says, and read the pieces it leaves out
#        whole       read all pieces of the slot that is leased, eight at a time
#     5. commit    now the generators of this host can pull that version, as if it was made here
#
# A reader of section 7 begins again if `latest` has moved when it looks again. A relay that did so
# might never read anything: its looks cross a cable, and a trainer of small steps may publish
# between any two of them. So it has two leases, and does not begin again. "Mine to read" means that
# the trainer does not write into that slot until I lease another one. Why it holds:
#
# The last look names the slot that I have leased last. The trainer writes into no slot that is the
# latest. So it must make another one the latest first, and that comes after my look. Only then does
# it look for a free slot, and my lease has been there since before my look.
#
# The last look names another slot. This is the worst case, in which the first lease comes too late
# for the trainer to see it before it begins version 9:
#
#     `latest`    7 in slot 2 | 8 in slot 0                                 | 9 in slot 2
#     trainer     writes 8    | writes 9 into slot 2                        | writes 10
#     relay         look: 2           lease 2    look: 0    lease 0           look: 2
#
# Between the last two looks `latest` has moved, so in that time the trainer has completed a
# version, here 9. It makes one after the other. So what it had begun before my first lease could be
# seen is complete by then; and what it begins later, it begins when it can see that lease. So
# nobody writes into slot 2. It may hold a newer version than in step 1.
#
# (This needs a trainer that completes each version before it begins the next. A relay that other
# relays read from, 16e, is a trainer to them, and may give up a version that is half written. So it
# writes the next one into the same slot: no other is half written.)
#
# If the last look names a third slot, nobody has told me which version slot 2 holds by now, and so
# which delta would lead there: it is read whole. Which version it was is seen then, for that stands
# at the end of each slot (stamps_of), and crosses with it.


@dataclass(frozen=True)
class RemoteDelta:
    """RDMABuffers of the three tensors of a Delta that have these names."""

    version: RDMABuffer
    numbers: RDMABuffer
    changes: list[RDMABuffer]  # in parts of Delta.part_bytes


@dataclass(frozen=True)
class RemoteHandle:
    """What a reader on another host needs: RDMABuffers of the words and slots of an arena."""

    handle: ArenaHandle
    latest: RDMABuffer
    leases: list[RDMABuffer]  # its own words, LEASES_PER_RELAY of them
    slots: list[list[RDMABuffer]]  # the pieces of each slot
    deltas: list[RemoteDelta]  # of each slot; none if the writer makes none


def remote_handle(arena: Arena, reader: int, deltas: Sequence[Delta] = ()) -> RemoteHandle:
    """The process that owns the arena makes this. It is of use as long as that process lives.

    reader: the number of its first lease; the second is the next one. deltas: of the writer.
    """
    return RemoteHandle(
        handle=arena.handle,
        latest=RDMABuffer(header_words(arena)[Arena.LATEST]),
        leases=lease_handles(arena, reader),
        slots=[pieces_of(slot) for slot in arena.slots],
        deltas=[remote_delta(delta) for delta in deltas],
    )


def header_words(arena: Arena) -> torch.Tensor:
    """[words, 1] int64: each word of its header, as memory of its own."""
    every_8_bytes = arena.whole[: Arena.HEADER_BYTES].view(torch.int64)
    return every_8_bytes.view(-1, CACHE_LINE_BYTES // 8)[:, :1]


def lease_handles(arena: Arena, reader: int) -> list[RDMABuffer]:
    """Handles of the two lease words of a relay. reader: the number of the first."""
    first = Arena.LEASES + reader
    return [RDMABuffer(word) for word in header_words(arena)[first : first + LEASES_PER_RELAY]]


class Offer:
    """What all relays that read from one arena need.

    Handles of its slots are made once, for all of them: Monarch registers memory for each handle
    and keeps that, so a set for each relay would add up.
    """

    def __init__(self, arena: Arena, deltas: Sequence[Delta]) -> None:
        self.arena = arena
        self.remote = remote_handle(arena, 0, deltas)

    def for_relay(self, reader: int) -> RemoteHandle:
        """For the relay whose first lease has this number."""
        return dataclasses.replace(self.remote, leases=lease_handles(self.arena, reader))


def remote_delta(delta: Delta) -> RemoteDelta:
    """The process that has the delta makes this."""
    return RemoteDelta(
        version=RDMABuffer(delta.version),
        numbers=RDMABuffer(delta.numbers),
        changes=pieces_of(delta.changes, delta.part_bytes),
    )


class RelayedTrainer(Trainer):
    """A trainer with readers on other hosts."""

    def new_writer(
        self, weights: dict[str, torch.Tensor], num_readers: int, **options: Any
    ) -> ShardWriter:
        """One that makes deltas for them."""
        return RelayedWriter.join(weights, num_readers, self.rank, self.num_ranks, **options)

    @endpoint
    async def remote(self, reader: int) -> RemoteHandle | None:
        """For the relay that has this lease of the arena, and the next. Rank 0 answers."""
        _, writer = self._begun()
        if self.rank > 0:
            return None
        assert isinstance(writer, RelayedWriter)
        return writer.for_relay(reader)


@dataclass(frozen=True)
class Traffic:
    """What a relay has carried, and how it fares."""

    relay_id: int  # its own: a relay that takes the place of another one has a new id
    num_versions: int  # that it has brought
    read_bytes: int  # of slots and deltas
    model_bytes: int  # of one version
    num_second_leases: int  # how often `latest` had moved in step 2
    num_failures: int  # how often it has begun again, because a read or a write failed
    num_in_row: int  # of these failures, those since something last went well
    last_failure: str  # what was said of the last of these; "": there was none
    silent_s: float  # since the trainer's memory answered last, if an answer is due: mostly ms
    behind_s: float | None  # since it saw a version that it does not have; None: it has the newest
    arrived_bytes: int  # of that version, so far
    due_bytes: int  # of that version, in all, as far as is known
    num_deltas: int  # versions of which it has read a delta
    num_refused: int  # pieces whose delta led to another checksum: they were read whole
    took_s: float  # from when it saw its newest version until it had it


class Crossing:
    """What crosses to a relay: it reads and writes words, and counts for Traffic what has arrived.

    Crossing            by itself it brings nothing
      RemoteWords       words of an arena on another host: looks at them, and leases slots
        RemoteReader    and brings its versions into an arena of this host (16d)
      Completer         brings what an arena of this host still lacks (16g)
    """

    LOOK_EVERY_S = 0.005  # a look is a one-sided read; over TCP it is work for both hosts
    # For a word to cross and the answer to come back. That takes milliseconds; on a bad line TCP
    # sends what was lost again, after 0.2 s, then 0.4 s and so on: six times in this time.
    WORD_DEADLINE_S = 15

    def __init__(self, advance: Callable[[], None]) -> None:
        """advance: is called when something has arrived."""
        self.advance = advance
        # When the last answer came, or, if there was none yet, when the first question was asked.
        # None: no answer is due, so the trainer cannot be said to be silent.
        self.heard_s: float | None = None
        self.model_bytes = 0
        self.num_versions = 0
        self.read_bytes = 0
        self.num_second_leases = 0
        self.num_deltas = 0
        self.num_refused = 0
        self.seen_s: float | None = None  # when it first saw a version that it has not
        self.took_s = 0.0
        self.arrived_bytes = 0
        self.due_bytes = 0

    async def fetch_if_new(self) -> None:
        """Brings one version, if there is one that it has not. Subclasses say how.

        This one does nothing. A host of the trainer to which it has not come back (16h) has a relay
        with nothing to bring, and that relay has this class itself.
        """

    async def _cross(self, transfer: Callable[..., Awaitable[None]], word: torch.Tensor) -> None:
        """Reads a word, or writes one."""
        if self.heard_s is None:  # from here on an answer is due
            self.heard_s = time.monotonic()
        await answered(transfer(word, timeout=self.WORD_DEADLINE_S))
        self.heard_s = time.monotonic()

    def _has_seen(self) -> None:
        """There is a version that it has not."""
        if self.seen_s is None:
            self.seen_s = time.monotonic()
        self.arrived_bytes = 0
        self.due_bytes = 0

    def _has_arrived(self, num_bytes: int) -> None:
        """A piece is here."""
        self.heard_s = time.monotonic()
        self.arrived_bytes += num_bytes
        self.read_bytes += num_bytes
        self.advance()

    def _has_version(self) -> None:
        """All of the version that it has seen is here."""
        assert self.seen_s is not None
        self.took_s = since(self.seen_s)
        self.seen_s = None
        self.num_versions += 1


class RemoteWords(Crossing):
    """The words of an arena on another host: looks at `latest`, and leases slots."""

    def __init__(self, remote: RemoteHandle, advance: Callable[[], None]) -> None:
        super().__init__(advance)
        self.remote = remote
        self.latest_word = torch.zeros(1, dtype=torch.int64)
        self.lease_word = torch.zeros(1, dtype=torch.int64)

    async def _lease(self, latest: int) -> int:
        """Steps 2 and 3: a slot into which nobody writes until the relay leases another one.

        latest: as it was read in step 1.

        A lease must be there before the next look. In section 7 a fence sees to that. Here it is
        `write_from`, which over TCP returns when the other side has answered that the word is
        written. (A test races a trainer against a relay.) A write that failed may still arrive
        later, but never after the next one, for messages of one sender keep their order. Of cards
        for RDMA the InfiniBand specification says that a read is carried out after the writes that
        were sent before it on the same connection. If Monarch sends both on the same one, the lease
        holds there as well; that could not be tried, so what is shown here is TCP.

        A lease has the process id of its reader, and of a process on another host the trainer
        cannot ask whether it lives. So here it is the trainer's own id. Such a lease is never given
        back, only replaced by the next one; therefore the arena has a slot for each. If this relay
        dies, its successor has the same two words.
        """
        leased = []
        # Once for the first lease; and once more for the second, unless the first one holds.
        for lease in self.remote.leases:  # mechanism: second lease
            slot = latest % Arena.MAX_SLOTS
            leased.append(slot)
            self.lease_word.fill_(self.remote.handle.pid * Arena.MAX_SLOTS + slot)
            await self._cross(lease.write_from, self.lease_word)  # mechanism: lease of the relay
            latest = await self._look()
            if latest % Arena.MAX_SLOTS == slot:
                return slot
            if len(leased) == 1:  # `latest` has moved, so the second lease is needed
                self.num_second_leases += 1
        return leased[0]  # mechanism: never begins again

    async def _look(self) -> int:
        """The word of the trainer's arena that names the latest version and its slot."""
        await self._cross(self.remote.latest.read_into, self.latest_word)
        return int(self.latest_word)


# -- 16d. The relay --------------------------------------------------------------------------------
# An actor on another host that takes these five steps whenever there is a version that it has not.
# If a step fails, mostly the trainer was lost, or the way to it. The relay then begins again with
# step 1. If that fails three times in a row it ends itself, and its service makes another one.


class RemoteReader(RemoteWords):
    """What a relay reads with: brings versions of the trainer's arena into the relay's own."""

    def __init__(
        self,
        remote: RemoteHandle,
        arena: Arena,
        advance: Callable[[], None],
        way: QuickerWay,
        passes_on: bool = False,
    ) -> None:
        """remote: of the trainer's arena. advance: as in Crossing.

        passes_on: do other relays read from this arena?
        """
        super().__init__(remote, advance)
        self.arena = arena
        self.model_bytes = arena.handle.manifest.num_bytes()
        self.way = way
        self.version_word = torch.zeros(1, dtype=torch.int64)
        self.unfinished: int | None = None  # the slot of a version that was given up half-way
        # By slot, the delta that led to it. Other relays may read it much later. If there are none,
        # it is used once and one object serves for all slots.
        slot_bytes = arena.handle.manifest.slot_bytes
        self.passes_on = passes_on
        self.deltas = [Delta(slot_bytes)] * len(arena.slots)
        if passes_on:
            self.deltas = [Delta(slot_bytes) for _ in arena.slots]

    async def fetch_if_new(self) -> None:
        """Brings one version, if there is one that it has not, by the steps of 16c."""
        latest = await self._look()  # 1. look
        mine = self.arena.newest_version()
        if latest // Arena.MAX_SLOTS == mine:
            return
        start = time.monotonic()
        self._has_seen()
        slot = await self._lease(latest)  # 2. and 3. lease
        free = self.unfinished  # mechanism: nothing stays half written
        if free is None:
            free = self.arena.free_slot()
        self.unfinished = free
        # 4. read. A delta helps if I have the version before, and if the last look named the slot
        # that is leased: else nobody has told which version that slot holds.
        version, named = divmod(int(self.latest_word), Arena.MAX_SLOTS)
        is_next = mine >= 0 and version == mine + 1 and named == slot
        has_delta = is_next and bool(self.remote.deltas)  # mechanism: delta of the next version
        way = self.way.choose() if has_delta else "whole"
        missing = list(range(len(self.remote.slots[slot])))
        self.deltas[free].clear()
        if way == "changes":
            missing = await self._read_delta(slot, version, free)
        await self._read_whole(slot, free, missing)
        self._commit(free)  # 5. commit
        is_partial = len(missing) < len(self.remote.slots[slot])
        if is_partial:
            self.num_deltas += 1
        # Two times would mislead `choose`: that of the first version of all, whose reads are slower
        # than later ones; and that of a delta which left out every piece, so that all were read.
        says_nothing = way == "changes" and not is_partial
        if mine >= 0 and not says_nothing:
            self.way.took(way, since(start))
        if self.passes_on:
            await self._pass_on(slot, free, is_unread=has_delta and way == "whole")

    def _commit(self, free: int) -> None:
        """Now the readers of this host can have what is in this slot."""
        self.arena.commit(int(stamps_of(self.arena)[free]), free)
        self.unfinished = None
        self._has_version()

    async def _pass_on(self, slot: int, free: int, is_unread: bool) -> None:
        """Gives relays that read from this one the delta of the version that has just arrived.

        They may want it also if this relay has read the version whole. is_unread: so it was, and
        the delta beside the leased slot is still to be read.
        """
        version = self.arena.newest_version()
        delta = self.deltas[free]
        try:
            if is_unread:
                await self._read_changes(self.remote.deltas[slot], delta, version)
        except Unreachable:
            delta.clear()
            raise
        finally:
            delta.tell(version, self.arena)

    async def _read_whole(self, slot: int, free: int, numbers: list[int]) -> None:
        """Reads the pieces of these numbers, from the slot that is leased into a free one."""
        pieces = [self.remote.slots[slot][i] for i in numbers]
        rooms = self.arena.slots[free].split(PIECE_BYTES)
        wanted = [rooms[i] for i in numbers]
        self.due_bytes = self.arrived_bytes + sum(room.nbytes for room in wanted)
        await read_pieces(pieces, wanted, self._has_arrived)

    async def _read_delta(self, slot: int, version: int, free: int) -> list[int]:
        """Makes of my newest version the next. Returns the numbers of pieces to be read whole.

        slot: which one is leased, and holds that version. free: of my own.
        """
        _, newest = self.arena.latest()
        room = self.arena.slots[free]
        delta = self.deltas[free]
        # To copy some GB takes a second, and to unpack as well. Both are done in threads, because
        # meanwhile the main process asks this one how it fares. The copy goes on beside the reads.
        copying = asyncio.to_thread(room.copy_, self.arena.slots[newest])
        copied = asyncio.ensure_future(copying)
        try:
            await self._read_changes(self.remote.deltas[slot], delta, version)
        finally:
            self.heard_s = None  # until it is unpacked nothing is asked, so no answer is due
            await copied  # also after a failure: else it would write into a slot that is used again
        missing = await asyncio.to_thread(delta.unpack, room)
        self.heard_s = time.monotonic()
        self.num_refused += len(missing) - delta.num_whole()
        return missing

    async def _read_changes(self, remote: RemoteDelta, delta: Delta, version: int) -> None:
        """Waits until the trainer has made the delta that leads to this version, and reads it."""
        await self._cross(remote.version.read_into, self.version_word)
        while int(self.version_word) != version:  # mechanism: the delta is there
            await asyncio.sleep(self.LOOK_EVERY_S)
            await self._cross(remote.version.read_into, self.version_word)
        await self._cross(remote.numbers.read_into, delta.numbers)
        self._has_arrived(delta.numbers.nbytes)
        num_parts = math.ceil(delta.num_bytes() / delta.part_bytes)
        rooms = delta.changes.split(delta.part_bytes)[:num_parts]
        self.due_bytes = self.arrived_bytes + sum(room.nbytes for room in rooms)
        await read_pieces(remote.changes[:num_parts], rooms, self._has_arrived)


@dataclass(frozen=True)
class RelayPlan:
    """What relays are to know, the same for all that read from the same arenas."""

    source: Service  # whose arena they read: the trainer, or relays (16e)
    first_reader: int  # the number of the first lease that relays have in such an arena
    num_siblings: int  # relays that read from the same arena, at the most
    num_readers: int  # of a relay's own arena: generators of its host, and leases of relays
    num_copying: int  # of these readers, those for which no slot is needed (create_arena)
    passes_on: bool = False  # do other relays read from that arena?


class VersionCarrier(Worker):
    """What relays have in common: the loop, and what they say of themselves."""

    # The pause after a failure. Mostly the trainer was lost, and another relay is about to begin.
    RETRY_S = 0.5
    # It gives up after so many failures in a row. Monarch, when it could not deliver a message for
    # 30 s, delivers no other one between these two processes. So to try on would be of no use; the
    # next relay is another process.
    MAX_FAILURES = 3

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self.relay_id = time.time_ns()
        self.num_failures = 0
        self.num_in_row = 0
        self.last_failure = ""

    def begin_to_follow(self, crossing: Crossing) -> None:
        """From now on it brings versions with this."""
        self.crossing = crossing
        self.following = asyncio.ensure_future(self._follow())

    async def _follow(self) -> None:
        """The relay's loop: looks every few ms / produces versions / ends with its process.

        It also ends when it gives up, and by any other exception, which then is a mistake in this
        file. Nobody awaits it; so `traffic` raises what has ended it, and then the service puts
        another relay in the place of this one.
        """
        while True:
            await asyncio.sleep(self.crossing.LOOK_EVERY_S)
            try:
                await self.crossing.fetch_if_new()
                self.num_in_row = 0
            except Unreachable as error:  # mechanism: failures are told apart
                self.num_in_row += 1
                self.num_failures += 1
                self.last_failure = str(error)
                if self.num_in_row == self.MAX_FAILURES:
                    raise
                await asyncio.sleep(self.RETRY_S)

    @endpoint
    async def traffic(self) -> Traffic:
        """What it has carried so far, and how it fares. Raises what has ended `_follow`."""
        if self.following.done():
            self.following.result()
        now = self.crossing
        return Traffic(
            relay_id=self.relay_id,
            num_versions=now.num_versions,
            read_bytes=now.read_bytes,
            model_bytes=now.model_bytes,
            num_second_leases=now.num_second_leases,
            num_failures=self.num_failures,
            num_in_row=self.num_in_row,
            last_failure=self.last_failure,
            silent_s=0.0 if now.heard_s is None else since(now.heard_s),
            behind_s=None if now.seen_s is None else since(now.seen_s),
            arrived_bytes=now.arrived_bytes,
            due_bytes=now.due_bytes,
            num_deltas=now.num_deltas,
            num_refused=now.num_refused,
            took_s=now.took_s,
        )


class Relay(VersionCarrier):
    """One per other host. It reads the trainer's arena and writes one for the generators there."""

    def __init__(self, place: Place, plan: RelayPlan) -> None:
        super().__init__(place)
        self.plan = plan
        # For a tree: which relay of the level above this one reads from, and its number among all
        # that do. In the picture of 16e relay 4 is the third of its level, replica 2, and two read
        # from each relay. So its parent is relay 2 // 2 = 1, of which it is number 0. In level 0
        # all read from the trainer, and `parent` is 0 and not used.
        self.parent, number = divmod(place.replica_id, plan.num_siblings)
        self.first_lease = plan.first_reader + LEASES_PER_RELAY * number
        self.offer: Offer | None = None  # None before a relay has asked

    async def prepare(self) -> ArenaHandle:
        """Makes an arena for this host. Answers with its handle."""
        remote = await self.find_source()
        manifest = remote.handle.manifest
        plan = self.plan
        arena = create_arena(manifest, plan.num_readers, plan.num_copying)
        advance = self.pulse.advance
        self.reader = RemoteReader(remote, arena, advance, self.make_way(), plan.passes_on)
        self.begin_to_follow(self.reader)
        return arena.handle

    async def find_source(self) -> RemoteHandle:
        """What this relay reads."""
        found = await self.plan.source.route(RelayedTrainer.remote, self.first_lease)
        assert found is not None, "rank 0 has answered"
        return found

    def make_way(self) -> QuickerWay:
        """What chooses its way from one version to the next."""
        return QuickerWay()

    @endpoint
    async def remote(self, reader: int) -> RemoteHandle:
        """For a relay that reads from this one, as in RelayedTrainer."""
        if self.offer is None:
            self.offer = Offer(self.reader.arena, self.reader.deltas)
        return self.offer.for_relay(reader)


# -- 16e. A tree of relays -------------------------------------------------------------------------
# With many hosts the trainer's own cable becomes what costs: it carries each version once for each
# relay, and each relay has two slots in the trainer's arena. With --relay-fanout 2 only two relays
# read from the trainer, two others from each of these, and so on. Then a version leaves each host
# twice at the most, and comes to the hosts of each level later than to those above them. (The demo
# has one other host, so no tree: tests have one of three relays.)
#
#     trainer --> relay 0 --> relay 2         level 0: relays 0 and 1
#            |           +--> relay 3         level 1: relays 2 to 5
#            +--> relay 1 --> relay 4         level 2: relays 6 to 13
#                        +--> relay 5
#
# A relay has everything that others read of a trainer: an arena, and beside each slot its delta,
# which is passed on as it came. What has changed is searched once, at the trainer. Each relay
# chooses its own way, for its cable may be a slow one where that of the relay above is not.
#
# If a host is lost, relays below it end as well, for they can read nothing. Their successors wait
# until it is back. Until then their hosts have no weights, and requests go to hosts that have some.


WAITS_FOR_HOST_S = 30 * 24 * 3600.0  # as good as for ever: it may come back at any time


class FarRelay(Relay):
    """A relay that reads from another relay."""

    async def find_source(self) -> RemoteHandle:
        """The relay above it. While that one is lost or not ready, its keeper makes another."""
        while True:
            try:
                return await self.plan.source.ask(self.parent, Relay.remote, self.first_lease)
            except ReplicaLost:
                await asyncio.sleep(BEAT_S)
                self.pulse.advance()  # to wait is no standstill


class RelayTree:
    """All relays of a run, in levels. Without other hosts there is no level."""

    def __init__(self, cfg: Config, trainer: Service, hosts: tuple[Host, ...]) -> None:
        """hosts: all but the trainer's, a relay for each, in this order."""
        self.hosts = hosts
        self.fanout = cfg.relay_fanout or max(1, len(hosts))  # else all read from the trainer
        self.levels: list[Service] = []
        self.starting: dict[int, asyncio.Task[None]] = {}  # of each level but the first, its start
        num_placed = 0
        while num_placed < len(hosts):
            level = self._level(cfg, trainer, num_placed)
            self.levels.append(level)
            num_placed += level.num_replicas

    def _level(self, cfg: Config, trainer: Service, num_placed: int) -> Service:
        """The next level. num_placed: relays that are in levels above it."""
        depth = len(self.levels)
        hosts = self.hosts[num_placed : num_placed + self.fanout ** (depth + 1)]
        is_last = num_placed + len(hosts) == len(self.hosts)
        num_generators = generators_per_host(cfg)
        plan = RelayPlan(
            source=self.levels[-1] if self.levels else trainer,
            first_reader=num_generators,  # whose leases are the first in every arena
            num_siblings=self.fanout,
            num_readers=num_generators + (0 if is_last else LEASES_PER_RELAY * self.fanout),
            num_copying=num_copying_per_host(cfg),
            passes_on=not is_last,
        )
        spec = ServiceSpec(
            name=f"relay_{depth}" if depth else "relay",
            replica_class=FarRelay if depth else Relay,
            args=(plan,),
            num_replicas=len(hosts),
            hosts=hosts,
            stuck_after_s=cfg.stuck_after,
            # Its setup asks the trainer, which answers when it has made its step, and that may take
            # long. Below the first level it waits for a relay, whose host may have to come back.
            setup_deadline_s=WAITS_FOR_HOST_S if depth else 3600.0,
        )
        return Service(spec)

    async def start(self) -> None:
        """Starts all of them, or replaces them. Returns when those of the first level are ready.

        Nobody waits for the others: the host of a relay from which they are to read may be lost.
        """
        for depth, level in enumerate(self.levels):
            if depth == 0:
                await level.start()
            elif depth not in self.starting or self.starting[depth].done():
                self.starting[depth] = asyncio.ensure_future(level.start())

    async def close(self) -> None:
        """Ends all of them. Who asks ends before who answers."""
        for level in reversed(self.levels):
            await level.close()
        # The starts end with NoReplica now, if they were still waiting: nobody needs to hear of it.
        await asyncio.gather(*self.starting.values(), return_exceptions=True)

    async def ask(self, relay: int, endpoint: Endpoint[[], Reply]) -> Reply:
        """Asks one certain relay. Raises what Service.ask does."""
        for level in self.levels:
            if relay < level.num_replicas:
                return await level.ask(relay, endpoint)
            relay -= level.num_replicas
        raise IndexError("there is no such relay")

    async def arenas(self) -> list[ArenaHandle | None]:
        """That of each relay; None: it is being replaced.

        Raises what the start of a level has raised: nobody else awaits those below the first.
        """
        for start in self.starting.values():
            if start.done():
                start.result()
        found: list[ArenaHandle | None] = []
        for level in self.levels:
            found += await arenas_of(level)
        return found


async def arenas_of(relays: Service) -> list[ArenaHandle | None]:
    """Of each relay of a service, the arena of its host; None: it is being replaced."""
    status = await relays.status()
    by_relay = {place.replica_id: answers[0] for place, answers in status.answers.items()}
    return [by_relay.get(relay) for relay in range(relays.num_replicas)]


# -- 16f. Checkpoints ------------------------------------------------------------------------------
# The main process keeps the checkpoints, in files of its host, and the trainer, which may be on
# another one, can read and write files of that host only. So a checkpoint crosses as weights do, by
# one-sided reads and writes, and messages have handles only. It goes through a window: a room in
# the memory of the main process for eight pieces, as many as cross at the same time. (The window of
# --order in section 13 is another thing.) The demo loses no trainer, but its run begins with
# checkpoints that cross; tests lose a trainer while one does.
#
#     main process                           trainer
#     file `path` --> window  <==reads==     file in memory, `there` --> Trainer.load
#     file `path` <-- window  <==writes==    file in memory, `there` <-- Trainer.save
#
# (A double line is a one-sided transfer.) It is always the trainer that moves the bytes, and the
# main process waits for the answer to a request. If the trainer is lost half-way, the service ends
# that request as soon as it finds the loss (section 6). A read or write that the main process made
# itself may wait until its deadline, a minute. However large a checkpoint is, the main process
# has room for eight pieces of it in memory, and handles for these.


class Window:
    """Memory of the main process through which a file crosses, 32 MiB of it at a time."""

    def __init__(self) -> None:
        self.memory = torch.empty(PIECES_UNDER_WAY * PIECE_BYTES, dtype=torch.uint8)
        self.bytes = self.memory.numpy().data  # the same memory, as files read and write it
        self.pieces = pieces_of(self.memory)

    async def close(self) -> None:
        """From here on nobody can read or write it, and Monarch keeps it no longer."""
        for piece in self.pieces:
            await answered(piece.drop())  # mechanism: windows are dropped


@dataclass(frozen=True)
class FilePart:
    """A part of a file, to be moved through a window."""

    path: str  # of the trainer's file, as `make_file` has answered
    start: int  # its first byte
    num_bytes: int  # at most: the last part of a file may be shorter
    window: list[RDMABuffer]


async def write_pieces(
    pieces: Sequence[RDMABuffer],
    parts: Sequence[torch.Tensor],
    moved: Callable[[int], None],
) -> None:
    """What `read_pieces` is for reads, for PIECES_UNDER_WAY pieces at most: all go at once.

    parts: for each piece, what goes into it. moved: is told of each, how many bytes it has. When
    this returns, or raises Unreachable, none is under way any more.
    """

    async def write(there: RDMABuffer, here: torch.Tensor) -> None:
        await answered(there.write_from(here, timeout=PIECE_DEADLINE_S))
        moved(here.nbytes)

    writers = [write(there, here) for there, here in zip(pieces, parts, strict=True)]
    for result in await asyncio.gather(*writers, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


class HostsTrainer(RelayedTrainer):
    """A trainer that receives checkpoints from the main process, and sends it others.

    Rank 0 does it; the other ranks are called as well, because calls go to all, and do nothing.
    """

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place, cfg)
        self.files: list[str] = []  # those that are crossing: paths of files in memory
        self.room = torch.empty(0, dtype=torch.uint8)  # as large as a window, while one crosses

    @endpoint
    async def make_file(self) -> str:
        """Makes an empty file in memory, of rank 0. Answers with its path."""
        if self.rank > 0:
            return ""
        self.room = torch.empty(PIECES_UNDER_WAY * PIECE_BYTES, dtype=torch.uint8)
        self.files.append(unnamed_file("checkpoint"))
        return self.files[-1]

    @endpoint
    async def close_files(self) -> None:
        """Gives back the memory of these files: they have crossed, or are needed no longer."""
        while self.files:
            close_unnamed_file(self.files.pop())
        self.room = torch.empty(0, dtype=torch.uint8)

    @endpoint
    async def take(self, part: FilePart) -> None:
        """Reads what is in the window, and writes it into the file."""
        if self.rank > 0:
            return
        with self._moving(part) as file:
            # The last piece is read whole, though the part may end within it. The rest of that
            # piece is not written.
            num_pieces = math.ceil(part.num_bytes / PIECE_BYTES)
            pieces = part.window[:num_pieces]
            rooms = self.room.split(PIECE_BYTES)[:num_pieces]
            await read_pieces(pieces, rooms, self._has_moved)  # mechanism: one-sided reads
            file.write(self.room.numpy().data[: part.num_bytes])

    @endpoint
    async def give(self, part: FilePart) -> int:
        """Writes what is in the file into the window. Answers with how many bytes that are."""
        if self.rank > 0:
            return 0
        with self._moving(part) as file:
            num_bytes = file.readinto(self.room.numpy().data[: part.num_bytes])
            if num_bytes:
                parts = self.room[:num_bytes].split(PIECE_BYTES)
                await write_pieces(part.window[: len(parts)], parts, self._has_moved)
        return num_bytes

    @contextlib.contextmanager
    def _moving(self, part: FilePart) -> Iterator[io.BufferedRandom]:
        """The file, at the beginning of the part.

        TrainerLost: the trainer that made the file was lost, and this is the next one; or the main
        process cannot be reached from here.
        """
        if part.path not in self.files:
            raise TrainerLost("this trainer has not begun a checkpoint")
        with open(part.path, "r+b") as file:
            file.seek(part.start)
            try:
                yield file
            except Unreachable as error:
                raise TrainerLost(f"the trainer cannot reach the main process: {error}") from error

    def _has_moved(self, num_bytes: int) -> None:
        """A piece has crossed."""
        self.pulse.advance()


class SendingCluster(CriticCluster):
    """A cluster whose trainer may be on another host, so that checkpoints have to cross."""

    trainer_class = HostsTrainer

    @contextlib.asynccontextmanager
    async def at_trainer(self, *paths: str) -> AsyncIterator[list[str]]:
        """As in Cluster: paths under which the trainer can read these files, while the body runs.

        It may be on another host, so they are sent into files in its memory.
        """
        async with self._crossing() as window:
            there = []
            for path in paths:
                there.append(await self._send(path, window) if path else "")
            yield there

    async def save(self, path: str, state: str) -> None:
        """As in Cluster, but the trainer writes it into `there`, which crosses to `path`."""
        async with self._crossing() as window:
            there = await self._ask_trainer(HostsTrainer.make_file)
            await super().save(there, state)  # by the trainer, on its host
            with writing(path, unfinished=path), open(path, "wb") as file:
                await self._fetch(there, file, window)

    @contextlib.asynccontextmanager
    async def _crossing(self) -> AsyncIterator[Window]:
        """A window, while the body runs. What the trainer has made for it is closed behind it."""
        await self._ask_trainer(HostsTrainer.close_files)  # of a crossing that was cut off
        window = Window()
        try:
            yield window
        finally:
            await window.close()
            with contextlib.suppress(TrainerLost):  # then its files are gone, too
                await self._ask_trainer(HostsTrainer.close_files)

    async def _send(self, path: str, window: Window) -> str:
        """Sends a file to the trainer. Returns its path there."""
        there = await self._ask_trainer(HostsTrainer.make_file)
        start = 0
        with open(path, "rb") as file:
            while num_bytes := file.readinto(window.bytes):
                handles = window.pieces  # mechanism: messages have handles
                part = FilePart(path=there, start=start, num_bytes=num_bytes, window=handles)
                await self._ask_trainer(HostsTrainer.take, part)
                start += num_bytes
        return there

    async def _fetch(self, there: str, file: io.BufferedWriter, window: Window) -> None:
        """Writes what the trainer has under that path into a file."""
        most = len(window.bytes)
        num_bytes = most
        while num_bytes == most:  # the last part is shorter, or empty
            start = file.tell()
            part = FilePart(path=there, start=start, num_bytes=most, window=window.pieces)
            num_bytes = await self._ask_trainer(HostsTrainer.give, part)
            file.write(window.bytes[:num_bytes])


# -- 16g. What crosses between hosts of a trainer --------------------------------------------------
# A model may be too large for the GPUs of one host. With --trainers 4 --trainer-hosts 2 the first
# two hosts have two ranks each, and FSDP cuts every weight by rows among all four. So the ranks of
# one host have half of the rows, and its generators need all of them. Each of these hosts has an
# arena, into which its own ranks write, and a relay that completes it: it reads what the ranks of
# the other hosts have written into theirs, and nothing else. So every byte that a host lacks
# crosses to it once. By example, of version 8 and a weight of 12 rows (which slot of an arena is
# free, each host finds for itself):
#
#     host A                                        host B
#     rank 0   writes rows 0-2 into slot 2 of A     rank 2   writes rows 6-8 into slot 0 of B
#     rank 1   writes rows 3-5 into slot 2 of A     rank 3   writes rows 9-11 into slot 0 of B
#     relay A  reads rows 6-11 of slot 0 of B       relay B  reads rows 0-5 of slot 2 of A
#              into the same place of slot 2                 into the same place of slot 0
#
# What a host lacks, and who has it, is a plan of section 8 in which hosts stand for ranks. Rows of
# a tensor are one stretch of bytes, which lies at the same offset in every slot; so nothing needs
# to be packed into parcels. What such a trainer consists of, and in which process it is:
#
#     each rank       SpanTrainer   the actor. Its SpanRank knows where this rank is among others
#     of the trainer  SpanWriter    what it publishes with
#     each relay of   HomeRelay     the actor
#     such a host     Completer     reads what its host lacks, which a Completion says
#     main process    HostSpan      the Host that the trainer is on, of several machines. `span_of`
#                                   makes it; of its processes `of_life` picks those of one machine
#                     HomeRelays    the service of the relays
#                     Board         keeps the Completions, one for each relay
#
# Completer, Completion and SpanWriter follow here; the others, which bring them together, in 16h.
#
# In 8b the ranks of one host tell each other, by words of their arena, how far they are. Here the
# relay takes part in that. Five words of the arena of host A change in this order as version 8 is
# made; all come to say "version 8, slot 2". (Rank 0 leads on host A, and rank 2 on host B.)
#
#     word of rank 0    rank 0 has chosen the slot, and rank 1 may write into it
#     word of rank 1    rank 1 has written its boxes
#     `written`         all ranks of this host have. Relays of other hosts wait for this
#     `completed`       relay A has read the rest
#     `latest`          rank 0 has committed the version, and readers may have it
#
# Relay A needs no lease for what it reads of host B, although in section 7 every reader has one.
# For B cannot write into that slot before relay A is done, however long that takes. B needs the
# slot again for version 10, which it begins after it has committed 9. For 9 it needs A's rows of 9.
# A writes these after it has committed 8, that is, after relay A has read all of 8 from B. Time
# runs down:
#
#     host A                            host B                                   `written`  `latest`
#                                       has written its rows of 8 into slot 0        8          7
#     relay A begins to read them       commits 8. Slot 0 is the latest              8          8
#          ...                          writes its rows of 9 into another slot       9          8
#     relay A has read all of 8
#     commits 8, writes its rows of 9
#                                       relay B reads these, and B commits 9         9          9
#                                       only now slot 0 is free, for 10
#
# The two columns on the right are words of B. As long as relay A may look for version 8, one of the
# two names it; so it looks at both. A relay that takes the place of another one begins the version
# again, because `completed` still names the version before.


def moves_between_hosts(
    names: Iterable[str], tensors: dict[str, torch.Tensor], num_hosts: int
) -> list[Move]:
    """What the ranks of each host have written, and other hosts lack.

    names: of the tensors that are stored. tensors: DTensors of a mesh in which the ranks of a host
    follow each other; plain ones are passed over, for all hosts have them. Source and target of a
    move are numbers of hosts. Slots on both sides have whole tensors, so what is moved lies at the
    same place of source and target.
    """
    moves = []
    sent: collections.Counter[int] = collections.Counter()
    for name in names:
        shape = tuple(tensors[name].shape)
        cut = cut_of(tensors[name])
        if not cut.placements or not math.prod(shape):
            continue
        by_rank = layout(shape, cut.mesh_shape, cut.placements)
        ranks_per_host = len(by_rank) // num_hosts
        # What a host has is what its ranks have together, and in a slot a box lies where it lies in
        # the whole tensor.
        source: Layout = []
        for first in range(0, len(by_rank), ranks_per_host):
            held = itertools.chain(*by_rank[first : first + ranks_per_host])
            source.append([dataclasses.replace(box, local=box.start) for box in held])
        origin = (0,) * len(shape)
        whole = Box(start=origin, end=shape, local=origin)
        for move in plan(name, source, [[whole]] * num_hosts, sent):
            if move.source != move.target:  # mechanism: only what it lacks
                moves.append(move)
    return moves


def pieces_in(slot: int, arena: Arena, moves: list[Move]) -> list[torch.Tensor]:
    """The memory of a slot in which the elements of these moves lie: [num_bytes] uint8 each.

    arena: that of their source or of their target; it is the same place in both.
    """
    pieces: list[torch.Tensor] = []
    for move in moves:
        part = arena.tensors(slot)[move.name][region(move.offset, move.size)]
        require(part.is_contiguous(), f"{move.name}: a trainer over hosts must be cut by rows")
        pieces += part.flatten().view(torch.uint8).split(PIECE_BYTES)
    return pieces


@dataclass(frozen=True)
class HostParts:
    """What relays of other hosts need to know of a host with ranks of the trainer."""

    life: str  # of the host
    handle: ArenaHandle  # of its arena
    written: RDMABuffer  # of the word `written`, see above
    latest: RDMABuffer  # of the word `latest`
    pieces: list[list[RDMABuffer]]  # by slot, what its ranks write, in the order of the moves


@dataclass(frozen=True)
class Completion:
    """What the relay of a host with ranks has to do."""

    life: str  # of that host
    handle: ArenaHandle  # of the arena to be completed
    ranks_per_host: int
    sources: list[HostParts]  # the other hosts with ranks; none: nothing is missing
    moves: list[list[Move]]  # from each of them


class SpanWriter(RelayedWriter):
    """One rank of a trainer on several hosts.

    `rank` and `num_ranks` are meant of its host: the ranks of each host count from 0, and 0 leads.
    """

    def _say(self, word: int) -> None:
        """As in ShardWriter. If the copy has failed, `written` says so to the other hosts."""
        super()._say(word)
        if word == self.FAILED and self.rank == 0:
            tell(self.arena, written_word(self.num_ranks), word)

    def _await_others(self, version: int, slot: int) -> None:
        """Returns when the ranks of this host have written, and its relay has read the rest."""
        super()._await_others(version, slot)
        word = version * Arena.MAX_SLOTS + slot
        tell(self.arena, written_word(self.num_ranks), word)
        found = wait_until(self.arena, completed_word(self.num_ranks), word)  # mechanism: complete
        require(found != self.FAILED, "arena: the copy on another host failed")

    def parts(self, moves: list[Move]) -> HostParts:
        """For the relays of other hosts. moves: to any one other host; all lack the same rows."""
        pieces = []
        for slot in range(self.arena.handle.num_slots):
            pieces.append([RDMABuffer(piece) for piece in pieces_in(slot, self.arena, moves)])
        words = header_words(self.arena)
        return HostParts(
            life=my_life(),
            handle=self.arena.handle,
            written=RDMABuffer(words[written_word(self.num_ranks)]),
            latest=RDMABuffer(words[Arena.LATEST]),
            pieces=pieces,
        )


# Which words of the arena these are. Counted from the last one backwards: the words of the ranks of
# a host, of rank 0 first (rank_word, in 8b); `written`; `completed`.
def written_word(ranks_per_host: int) -> int:
    """Which word says that the ranks of this host have written their boxes."""
    return Arena.NUM_WORDS - 1 - ranks_per_host


def completed_word(ranks_per_host: int) -> int:
    """Which word says that the relay of this host has read the rest."""
    return Arena.NUM_WORDS - 2 - ranks_per_host


class Completer(Crossing):
    """What the relay of a host with ranks does: it completes each version that rank 0 names."""

    def __init__(self, task: Completion, arena: Arena, advance: Callable[[], None]) -> None:
        """arena: that of the task, mapped here."""
        super().__init__(advance)
        self.model_bytes = arena.handle.manifest.num_bytes()
        self.task = task
        self.arena = arena
        self.mine = completed_word(task.ranks_per_host)

    async def fetch_if_new(self) -> None:
        """Completes the version that the leading rank has named, unless that is done."""
        word = self.arena.words[rank_word(0)]
        # It is complete; or none has been begun; or this host's own copy has failed.
        if word in (self.arena.words[self.mine], Arena.NOTHING, SpanWriter.FAILED):
            return
        self._has_seen()
        version, slot = divmod(word, Arena.MAX_SLOTS)
        readings = []
        for source, moves in zip(self.task.sources, self.task.moves, strict=True):
            readings.append(self._read(source, version, pieces_in(slot, self.arena, moves)))
        # `gather` returns when all of them have ended, also if one raises. So when the next version
        # is begun, no read writes into this slot any more.
        results = await asyncio.gather(*readings, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        if all(results):
            self._has_version()
        else:
            word = SpanWriter.FAILED
        tell(self.arena, self.mine, word)
        self.heard_s = None  # no answer is due until the next version

    async def _read(self, source: HostParts, version: int, rooms: list[torch.Tensor]) -> bool:
        """Reads what that host has of a version. False: its ranks could not write it."""
        slot = await self._slot_of(source, version)
        if slot is None:
            return False
        self.due_bytes += sum(room.nbytes for room in rooms)
        await read_pieces(source.pieces[slot], rooms, self._has_arrived)
        return True

    async def _slot_of(self, source: HostParts, version: int) -> int | None:
        """Waits until the ranks of that host have written this version. Returns its slot there.

        None: their copy has failed.
        """
        room = torch.zeros(1, dtype=torch.int64)
        while True:
            for word in (source.written, source.latest):  # mechanism: both words
                await self._cross(word.read_into, room)
                if int(room) == SpanWriter.FAILED:
                    return None
                found, slot = divmod(int(room), Arena.MAX_SLOTS)
                if found == version:  # mechanism: the same version
                    return slot
            await asyncio.sleep(self.LOOK_EVERY_S)


# -- 16h. Where a trainer over hosts is ------------------------------------------------------------
# To the service (section 6) a trainer on hosts A and B is one replica, on one Host. That is a
# HostSpan, which stands for both machines. By example, with four ranks:
#
#     all is well                      ranks 0 and 1 are on A, 2 and 3 on B
#     B is lost                        The replica is lost as a whole. Its ranks on A would wait for
#                                      those on B for ever, so they are killed. After 5 s, in which
#                                      B may come back, another replica is made, of ranks 0 and 1 on
#                                      A. It goes on from the newest checkpoint
#     or A is lost                     the same the other way round: ranks 0 and 1 are on B
#     the lost host is back            It has no rank, so its generators have no arena to read, and
#                                      requests go to others
#     the next checkpoint is saved     Now all hosts are here, so `after_checkpoint` (16i) makes the
#                                      trainer again, on A and B. That takes as long as a start, and
#                                      costs no step: none was made since the checkpoint
#
# The hosts that are left need memory for twice as much of the model. If they lack it, the run ends
# with the error that says so, and goes on when the same command is given again with all hosts.


@dataclass(frozen=True)
class HostSpan(Host):
    """Several machines that a trainer is on, with as many ranks on each.

    A replica needs all of its ranks, so its life ends with that of any member. But a new one can be
    made on the members that are left: so the span is here as long as one of them is.
    """

    members: tuple[RemoteHost, ...]
    ranks_per_host: int

    # How long it waits for members that are missing; then it goes on without them. So a network
    # that was cut for a moment does not leave the trainer with fewer ranks.
    WAITS_FOR_ALL_S: ClassVar[float] = 5.0

    def life(self) -> str:
        """The lives of all members; "" while one of them is lost."""
        lives = [member.life() for member in self.members]
        return " ".join(lives) if all(lives) else ""

    def is_here(self) -> bool:
        """Is any of them?"""
        return any(member.is_here() for member in self.members)

    def still_has(self, life: str) -> bool:
        """May processes of that life still run on one of them?"""
        lives = life.split()
        return any(member.life() in lives for member in self.members)

    async def present(self) -> Host:
        """Those that are here: when all are, or after WAITS_FOR_ALL_S, when any is."""
        start = time.monotonic()
        while not self.life():
            if not self.is_here():
                start = time.monotonic()  # the wait for all begins when the first one is here
            elif since(start) > self.WAITS_FOR_ALL_S:
                break
            await asyncio.sleep(BEAT_S)
        here = tuple(member for member in self.members if member.is_here())
        return dataclasses.replace(self, members=here)  # mechanism: those that are left

    async def spawn(self, starts: Starts, num_ranks: int) -> ProcMesh:
        """Starts ranks_per_host processes on each. OSError: one of them was lost just now."""
        lives = [member.life() for member in self.members]
        if not all(lives):
            raise OSError("a host was lost")
        mesh = attach_to_workers(ca="trust_all_connections", workers=lives)
        return mesh.spawn_procs(per_host={"rank": self.ranks_per_host}, name=starts.name)

    def watch(self, pulses: list[PulseHandle], on_end: Callable[[str], None]) -> None:
        """Asks each for the signs of its own processes."""
        for member in self.members:
            member.watch(of_life(pulses, member.life()), on_end)

    def signs(self, pulse: PulseHandle) -> Signs | None:
        """What its own host saw last; None also if that is lost."""
        seen = [member.signs(pulse) for member in self.members if member.life() == pulse.life]
        return seen[0] if seen else None

    def signal(self, pulses: list[PulseHandle], number: int) -> None:
        """Each host sends it to its own processes."""
        for member in self.members:
            member.signal(of_life(pulses, member.life()), number)


def of_life(pulses: list[PulseHandle], life: str) -> list[PulseHandle]:
    """Those of processes that were started in this life of a host."""
    return [pulse for pulse in pulses if pulse.life == life]


def span_of(cfg: Config, hosts: Sequence[Host]) -> Host:
    """Where the trainer is: on the first host, or on the first few. hosts: of the run."""
    members = tuple(host for host in hosts[: cfg.trainer_hosts] if isinstance(host, RemoteHost))
    if len(members) < 2:
        return hosts[0]
    return HostSpan(members=members, ranks_per_host=trainers_per_host(cfg))


class SpanRank:
    """One rank of a trainer that may be on several hosts: where it stands among the others.

    A part of SpanTrainer, and of RowRank in the measurement.
    """

    def __init__(self, rank: int, num_ranks: int, num_hosts: int) -> None:
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_hosts = num_hosts
        self.per_host = num_ranks // num_hosts
        self.host, self.local_rank = divmod(rank, self.per_host)
        # Both are empty on one host, and before `new_writer`.
        self.parts: list[HostParts] = []  # by host
        self.moves: list[Move] = []  # between any two hosts; only leading ranks know them

    def open_meeting_place(self) -> str:
        """For rank 0: opens a store, and returns its url. Over it all ranks find each other.

        It serves names and values by TCP. On one host a file does (section 5).
        """
        name, _ = name_and_port(my_life())
        distributed: Any = torch.distributed  # type checkers do not find what it has from C++
        # multi_tenant: rank 0 joins at the same address, and shares this store instead of
        # beginning another one at a port that is taken.
        self.store = distributed.TCPStore(
            name, 0, is_master=True, wait_for_workers=False, multi_tenant=True
        )
        return url(name, self.store.port)

    def leave_loopback(self) -> None:
        """Has gloo talk over this host's network: ranks of other hosts cannot reach loopback.

        Gloo reads the variable when the process group is made, so this must come before.
        """
        if self.num_hosts > 1:
            name, _ = name_and_port(my_life())
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(name)

    def new_writer(
        self, weights: dict[str, torch.Tensor], num_readers: int, **options: Any
    ) -> ShardWriter:
        """What it publishes these with. All ranks of the process group call it at once.

        Over hosts: the leading rank of each makes an arena, and what others need to know of it goes
        to all ranks of all hosts. options: as of ShardWriter.
        """
        if self.num_hosts == 1:
            return RelayedWriter.join(weights, num_readers, self.rank, self.num_ranks, **options)
        args = (weights, num_readers, self.local_rank, self.per_host)
        leading = SpanWriter(*args, **options) if self.local_rank == 0 else None
        mine = None
        if leading:
            names = [spec.name for spec in leading.arena.handle.manifest.stored_specs()]
            self.moves = moves_between_hosts(names, weights, self.num_hosts)
            another = (self.host + 1) % self.num_hosts
            # Every other host lacks all that this one writes; so parts for one will do for all.
            mine = leading.parts(self._moves(self.host, another))
        of_ranks: list[Any] = [None] * self.num_ranks
        torch.distributed.all_gather_object(of_ranks, mine)
        self.parts = of_ranks[:: self.per_host]  # what the leading ranks have given
        handle = self.parts[self.host].handle
        is_same = self.parts[0].handle.manifest == handle.manifest
        require(is_same, "arena: the hosts of the trainer have different tensors")
        return leading or SpanWriter(*args, handle, **options)

    def _moves(self, source: int, target: int) -> list[Move]:
        """Those from one host to another."""
        return [move for move in self.moves if (move.source, move.target) == (source, target)]

    def completions(self, writer: ShardWriter) -> list[Completion]:
        """For each host that has ranks, what its relay has to do. Only rank 0 answers with them."""
        if self.rank > 0:
            return []
        if self.num_hosts == 1:
            alone = Completion(
                life=my_life(),
                handle=writer.arena.handle,
                ranks_per_host=self.per_host,
                sources=[],
                moves=[],
            )
            return [alone]
        found = []
        for host, parts in enumerate(self.parts):
            others = [other for other in range(self.num_hosts) if other != host]
            found.append(
                Completion(
                    life=parts.life,
                    handle=parts.handle,
                    ranks_per_host=self.per_host,
                    sources=[self.parts[other] for other in others],
                    moves=[self._moves(other, host) for other in others],
                )
            )
        return found


class SpanTrainer(HostsTrainer):
    """A trainer that may be on several hosts."""

    def __init__(self, place: Place, cfg: Config) -> None:
        super().__init__(place, cfg)
        self.span = SpanRank(self.rank, self.num_ranks, self.num_hosts)

    def build(self) -> None:
        """As in Trainer."""
        self.span.leave_loopback()
        super().build()

    def make_meeting_place(self) -> str:
        """Over hosts: where a store of rank 0 is."""
        if self.num_hosts == 1:
            return super().make_meeting_place()
        return self.span.open_meeting_place() if self.rank == 0 else ""

    def new_writer(
        self, weights: dict[str, torch.Tensor], num_readers: int, **options: Any
    ) -> ShardWriter:
        """Over hosts: each has an arena. Relays that lease read that of rank 0, and no other."""
        if self.span.host > 0:
            num_readers = generators_per_host(self.cfg)  # and no relays
        return self.span.new_writer(weights, num_readers, **options)

    @endpoint
    async def completions(self) -> list[Completion]:
        """What the relays of its hosts have to do."""
        _, writer = self._begun()
        return self.span.completions(writer)


class Board(Actor):
    """In the main process: where a relay of the trainer's hosts, when it begins, asks what to do.

    It does not ask the trainer. A relay that takes the place of another one would wait for ever:
    the trainer may be waiting for a version that the other one has not completed, and that this one
    is to complete; until then it answers nobody.
    """

    def __init__(self) -> None:
        self.tasks: dict[str, Completion] = {}  # by the life of the host

    @endpoint
    async def put(self, tasks: list[Completion]) -> None:
        """Those of a new trainer, in place of all others."""
        self.tasks = {task.life: task for task in tasks}

    @endpoint
    async def task_of(self, life: str) -> Completion | None:
        """For the relay of a host in this life. None: the trainer has no rank there."""
        return self.tasks.get(life)


class HomeRelay(VersionCarrier):
    """The relay of one of the trainer's hosts.

    If the trainer has no rank there, because the host was lost and is back, it brings nothing.
    """

    def __init__(self, place: Place, board: Board) -> None:
        super().__init__(place)
        self.board = board

    async def prepare(self) -> None:
        """Begins to complete the arena of this host, if it has one that lacks something."""
        task = await self.board.task_of.call_one(my_life())
        crossing = Crossing(self.pulse.advance)
        if task is not None and task.sources:
            try:
                crossing = Completer(task, map_arena(task.handle), self.pulse.advance)
            except WeightMismatch:
                if is_alive(task.handle.pid):
                    raise
                # The trainer was lost meanwhile, and its arena with it. So this relay brings
                # nothing. When there is another trainer, other relays begin.
        self.begin_to_follow(crossing)


class HomeRelays(Service):
    """The relays of the trainer's hosts. There are some if these hosts are several."""

    def __init__(self, hosts: Sequence[Host], stuck_after_s: float) -> None:
        self.board = this_proc().spawn("board", Board)
        spec = ServiceSpec(
            name="home relay",
            replica_class=HomeRelay,
            args=(self.board,),
            num_replicas=len(hosts),
            hosts=tuple(hosts),
            stuck_after_s=stuck_after_s,
        )
        super().__init__(spec)

    async def begin(self, tasks: list[Completion]) -> None:
        """Starts them, or replaces them, for a new trainer. Returns when all are ready."""
        await self.board.put.call_one(tasks)
        await self.start()


# -- plumbing: the network interface of an address -------------------------------------------------
# Gloo asks for the name of an interface, and what is known is an address (leave_loopback).


def interface_of(name: str) -> str:
    """The network interface that has this address, such as "eth0". OSError: there is none."""
    if is_loopback(name):
        return "lo"
    if ":" in name:  # if_inet6 has lines of an address in 32 digits, four numbers, and a name
        digits = ipaddress.ip_address(name).exploded.replace(":", "")
        for line in pathlib.Path("/proc/net/if_inet6").read_text().splitlines():
            if line.startswith(digits):
                return line.split()[-1]
    for _, interface in socket.if_nameindex():
        if address_of(interface) == name:
            return interface
    raise OSError(f"no network interface has the address {name}")


def address_of(interface: str) -> str:
    """The address of IPv4 that an interface has, the first one; "": it has none."""
    get_address = 0x8915  # SIOCGIFADDR of netdevice(7)
    request = interface.encode().ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        try:
            found = fcntl.ioctl(asker, get_address, request)
        except OSError:
            return ""
    return socket.inet_ntoa(found[20:24])


# -- 16i. The cluster ------------------------------------------------------------------------------
# No request waits for an answer of a relay. So nobody would notice that one is in trouble, and the
# generators of its host would sample from older and older weights. The main process therefore asks
# each relay every second how it fares. Within 10 s it prints a line about each kind of trouble (how
# the lines begin, `RelayNews._troubles` says):
#
#     kind        what has happened                          what is done about it
#     silent      the trainer's memory does not answer:      the relay tries three times, then
#                 the trainer is lost, or the way to it      another one does; a new trainer has
#                                                            new relays
#     failed      some reads fail, and others do not         the relay begins the version again
#     slow        a version takes longer than 5 s            nothing: it arrives. Told only once
#     waits       the delta of a version is not there, or    nothing: it is made late, or the
#                 on other hosts ranks have not written      trainer will be found lost
#     refused     a delta led to another checksum            its piece was read whole. Told once
#     (its end)   it has given up, or has a mistake in it    the service makes another one


def last_line(text: str) -> str:
    """The last line of what Monarch says about an error: the cause stands there."""
    _, _, line = text.rpartition("\n")
    return line[:100]


class RelayNews:
    """What the main process has heard of the relays of one host, and tells of it.

    Each kind of trouble is told once. When a version has arrived that trouble is over, and may be
    told again; but not the kinds in ONCE, which would come back with every version.
    """

    ONCE = frozenset({"slow", "refused"})
    # Trouble that is shorter is not told. Mostly a lost trainer has been replaced by then, and its
    # relays too, and lines about that come from others.
    TELL_AFTER_S = 5.0

    def __init__(self, address: str) -> None:
        self.address = address
        self.relays: dict[int, Traffic] = {}  # what each said last, by its id; the newest last
        self.num_mistakes = 0  # errors of their own
        self.told: set[str] = set()  # kinds of trouble, and ends, that were told

    def hear(self, now: Traffic) -> list[str]:
        """Takes in what the relay says of itself. Returns the lines to be told, mostly none."""
        before = self.relays.get(now.relay_id)
        self.relays[now.relay_id] = now
        lines = []
        has_carried = now.num_versions > (before.num_versions if before else 0)
        if has_carried and self.told - self.ONCE:
            lines.append("goes on, a version has arrived")
            self.told &= self.ONCE
        for kind, line in self._troubles(now).items():
            if kind not in self.told:
                self.told.add(kind)
                lines.append(line)
        return [f"relay of {self.address}: {line}" for line in lines]

    def _troubles(self, now: Traffic) -> dict[str, str]:
        """A line for each kind of trouble that it is in."""
        found = {}
        failures = f"failures in a row: {now.num_in_row}"
        if now.num_in_row:
            failures += f", the last: {last_line(now.last_failure)}"
        if now.silent_s > self.TELL_AFTER_S:
            found["silent"] = f"no answer from the memory that it reads for 5 s; {failures}"
        elif now.behind_s is not None and now.behind_s > self.TELL_AFTER_S:
            if now.num_in_row:
                found["failed"] = f"begins a version again; {failures}"
            if now.due_bytes:
                share = now.arrived_bytes / now.due_bytes
                found["slow"] = f"a version takes long, {share:.0%} of it in {now.behind_s:.0f} s"
            elif not now.num_in_row:
                found["waits"] = f"waits for what it is to read, for {now.behind_s:.0f} s"
        if now.num_refused:
            found["refused"] = "a delta did not lead to what was published: it was read whole"
        return found

    def has_failed(self, error: Exception) -> list[str]:
        """A relay has ended by itself. Returns the lines to be told."""
        if isinstance(error, Unreachable):
            why = f"it has given up, {last_line(str(error))}"
        else:
            self.num_mistakes += 1
            why = f"a mistake in it, {repr(error)[:100]}"
        if why in self.told:  # the next one had the same
            return []
        self.told.add(why)
        return [f"relay of {self.address}: {why}; another one takes its place"]


class HostsCluster(SendingCluster):
    """The actors of RL on several hosts.

    The trainer is on the first of them, or on the first few, and generators and judges go round
    all. Each host has a relay. Only if the trainer is on one host, that host needs none.
    """

    trainer_class = SpanTrainer

    WATCH_EVERY_S = 1.0  # a message to each relay, and back

    def __init__(self, cfg: Config, is_warm: bool = True, tell: Tell = tell_nobody) -> None:
        super().__init__(cfg, is_warm, tell)
        for host in self.hosts:
            host.life()  # connects
        self.tell = tell
        of_trainer = self.hosts[: cfg.trainer_hosts]
        others = self.hosts[cfg.trainer_hosts :]
        self.homes: HomeRelays | None = None  # None: the trainer is on one host, and needs none
        self.home_arenas: dict[str, ArenaHandle] = {}  # of the trainer, by the life of the host
        if cfg.trainer_hosts > 1:
            self.homes = HomeRelays(of_trainer, cfg.stuck_after)
        self.relays = RelayTree(cfg, self.trainer, others)
        with_relay = self.hosts if self.homes else others
        self.news = [RelayNews(host.address) for host in with_relay]  # by relay, homes first
        self.watches: list[asyncio.Task[None]] = []  # of each relay, once they have been started

    def hosts_of(self, cfg: Config) -> tuple[Host, ...]:
        """Those of --hosts."""
        addresses = cfg.hosts.split(",")
        return tuple(RemoteHost(address=one, secret_file=cfg.secret) for one in addresses)

    def trainer_host(self) -> Host:
        """The first, or with --trainer-hosts the first few in one."""
        return span_of(self.cfg, self.hosts)

    async def close(self) -> None:
        """Ends all processes, and the links, with which the Monarch hosts end.

        Who asks ends before who answers: watches ask the relays, and these ask the trainer.
        """
        for watch in self.watches:
            await end_task(watch)
        await self.relays.close()
        if self.homes:
            await self.homes.close()
        await super().close()
        for host in self.hosts:
            link_to(host).close()

    async def arena_changed(self, handle: ArenaHandle) -> None:
        """Starts all relays, or replaces them: each reads the arena of one trainer."""
        if handle == self.handle or not self.news:  # without another host there is no relay
            return
        try:
            if self.homes:
                tasks = await self._ask_trainer(SpanTrainer.completions)
                await self.homes.begin(tasks)
                self.home_arenas = {task.life: task.handle for task in tasks}
            await self.relays.start()
        except RequestLost as error:
            raise TrainerLost("the trainer was lost before the relays had begun") from error
        if not self.watches:
            self.watches = [asyncio.ensure_future(self._watch(i)) for i in range(len(self.news))]

    async def _watch(self, relay: int) -> None:
        """Looks after one relay: waits for the clock / produces lines / ends with `close`."""
        while True:
            await asyncio.sleep(self.WATCH_EVERY_S)
            await self._ask_relay(relay)

    async def _ask_relay(self, relay: int) -> None:
        """Asks a relay how it fares, and tells what is to be told.

        If it raises, it has ended by itself, and its service replaces it. ReplicaLost: there is
        none, because its host is lost, or its successor is being made, and others tell that.
        """
        news = self.news[relay]
        num_homes = self.homes.num_replicas if self.homes else 0
        try:
            if self.homes and relay < num_homes:
                traffic = await self.homes.ask(relay, HomeRelay.traffic)
            else:
                traffic = await self.relays.ask(relay - num_homes, Relay.traffic)
        except ReplicaLost:
            return
        except Exception as error:  # whatever has ended that relay
            lines = news.has_failed(error)
        else:
            lines = news.hear(traffic)
        if lines:  # to print nothing would count as a line, and hide the clock
            self.tell(*lines)

    async def relay_figures(self) -> dict[str, int]:
        """Sums over all relays so far, of what each said when it was last asked, for --json."""
        for relay in range(len(self.news)):
            await self._ask_relay(relay)
        said = [traffic for news in self.news for traffic in news.relays.values()]
        return {
            "relay_versions": sum(traffic.num_versions for traffic in said),
            "relay_deltas": sum(traffic.num_deltas for traffic in said),
            "relay_refused": sum(traffic.num_refused for traffic in said),
            "relay_second_leases": sum(traffic.num_second_leases for traffic in said),
            "relay_failures": sum(traffic.num_failures for traffic in said),
            "relay_mistakes": sum(news.num_mistakes for news in self.news),
        }

    async def rollout(
        self,
        prompts: list[Prompt],
        group_size: int | None = None,
        greedy: bool = False,
        min_version: int = 0,
        is_alone: bool = False,
        by_task: bool = False,
    ) -> RolloutReply:
        """As in Cluster, and again as long as the generators that tried had no arena to read."""
        asked_under = self.handle
        while True:
            try:
                return await super().rollout(
                    prompts, group_size, greedy, min_version, is_alone, by_task
                )
            except NotNow:
                await asyncio.sleep(BEAT_S)
            # There is another trainer by now. It went on from a checkpoint, so the version that was
            # asked for may be many steps ahead of it. Any version that it has made itself will do;
            # and no other is taken, for Cluster.rollout asks for `first_version` at least.
            if self.handle != asked_under:
                min_version = 0
            elif self.handle and self.handle.pid not in (await self.trainer.status()).pids:
                raise TrainerLost("the trainer was lost, and its arenas with it")

    async def arenas(self) -> tuple[ArenaHandle | None, ...]:
        """For each host, the arena that its generators read: that of the trainer, or of a relay.

        While a relay is being replaced its host has none. Mostly it has one again before its
        generators are back, because they import more. If not, a generator raises NotNow, and the
        service gives the request to another one. The same happens on a host of the trainer that was
        lost and is back: until the trainer has ranks there again, it has no arena.
        """
        of_trainer = [self.handle]
        if self.homes:
            hosts = self.hosts[: self.cfg.trainer_hosts]
            of_trainer = [self.home_arenas.get(host.life()) for host in hosts]
        return (*of_trainer, *await self.relays.arenas())

    async def after_checkpoint(self) -> None:
        """If a host of the trainer has been lost, and is back, the trainer begins again on all.

        TrainerLost then has the run go on from the newest checkpoint, as after any loss. That was
        saved just now, so no step is made twice.
        """
        status = await self.trainer.status()
        num_ranks = sum(len(answers) for answers in status.answers.values())
        is_fewer = 0 < num_ranks < self.cfg.trainers  # 0: it is just being replaced
        if is_fewer and self.trainer_host().life():  # mechanism: all again
            self.tell("the trainer begins again, on all its hosts")
            await self.trainer.start()
            raise TrainerLost("the trainer begins again on all its hosts")


# -- measurement -----------------------------------------------------------------------------------
# Two workers on loopback addresses are two hosts that happen to be one machine. Three things are
# measured across them. (What is checked stands at the end, in `tell_span`, `tell_deltas` and
# `demo_hosts`. At a first reading skip to these.) First a synchronous run: half-way the second host
# is lost with a generator, a judge and the relay on it; two steps later it is back. Not one step
# may be lost, for the trainer is on the first host.
#
# Of deltas that run says next to nothing, for it publishes fp32, of which every number changes in
# each step. (Only version 1 crosses as a delta: it is version 0, published once more as a run
# begins.) So, second, a Stepper takes AdamW steps on one weight of 16 million elements, along
# random gradients (in a run of yours more may change, or less), and a CheckedRelay reads it, the
# way that it is told. Both say the CRC of each version. Five versions make a row.
#
# Third, a trainer with a rank on each host (RowRank): do relays read just what a host lacks?


class LocalWorkers:
    """Workers on this machine, each on a loopback address and a port of its own."""

    def __init__(self, num_hosts: int) -> None:
        self.processes: dict[str, subprocess.Popen[str]] = {}
        for i in range(num_hosts):
            with socket.create_server((f"127.0.0.{i + 2}", 0)) as server:
                name, port = server.getsockname()
            self.start(url(name, port))

    def start(self, address: str) -> None:
        """Starts a worker, or starts it again."""
        command = [sys.executable, os.path.abspath(__file__), "--worker", address]
        process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE)
        self.processes[address] = process

    def lose(self, address: str) -> None:
        """Kills a worker. Its connection ends with it, so the link hears of it at once.

        Of a machine that loses its power it would hear after SILENCE_S.
        """
        self.processes[address].kill()
        self.processes[address].wait()

    def close(self) -> None:
        """Ends all of them, politely."""
        for process in self.processes.values():
            process.terminate()
            process.wait()


async def until_replaced(service: Service, host: Host) -> list[Loss]:
    """Waits until the host is back, and a replica that was lost there has a successor.

    Returns the losses made good. The service looks four times a second. If it has noticed none when
    the host has been back for 2 s, the list is empty, and a check of the demo fails.
    """
    while not host.is_here():
        await asyncio.sleep(BEAT_S)
    end = time.monotonic() + 2.0
    while True:
        status = await service.status(60.0)
        if status.lost_replicas or time.monotonic() > end:
            return status.lost_replicas
        await asyncio.sleep(BEAT_S)


class Stepper(Worker):
    """A trainer of one large weight: AdamW in fp32 steps along random gradients, bf16 is published.

    Its elements are as large as in language models (a standard deviation of 0.02). How many of them
    change in bf16 depends on that, and on the learning rate.
    """

    def __init__(self, place: Place, num_elements: int) -> None:
        super().__init__(place)
        self.num_elements = num_elements

    async def prepare(self) -> None:
        """Publishes version 0."""
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(self.num_elements) * 0.02)
        self.optimizer = torch.optim.AdamW([self.weight], weight_decay=0.0)
        self.writer = RelayedWriter(
            {"weight": self.weight},
            num_readers=LEASES_PER_RELAY,
            rank=0,
            num_ranks=1,
            dtype=torch.bfloat16,
        )
        self.writer.publish(0)

    @endpoint
    async def remote(self, reader: int) -> RemoteHandle:
        """As in RelayedTrainer."""
        return self.writer.for_relay(reader)

    @endpoint
    async def step(self, rate: float) -> None:
        """Steps, and publishes."""
        _, self.slot_before = self.writer.arena.latest()
        self.optimizer.zero_grad()
        (self.weight * torch.randn(self.num_elements)).sum().backward()  # a random gradient
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.writer.publish(self.writer.version + 1)

    @endpoint
    async def compare(self) -> tuple[float, int]:
        """The share of elements that the last step has changed, and a CRC of the newest slot."""
        arena = self.writer.arena
        _, slot = arena.latest()
        words = arena.slots.view(torch.int16)
        num_changed = int((words[slot] != words[self.slot_before]).sum())
        return num_changed / self.num_elements, checksum(arena.slots[slot])


class GivenWay(QuickerWay):
    """Always the way that it was given, so that both can be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.given = "changes"

    def give(self, way: str) -> None:
        """Sets the way that is taken from now on."""
        self.given = way

    def choose(self) -> str:
        """The way that was given."""
        return self.given


class CheckedRelay(Relay):
    """A relay that takes the way that it is told, and says what has arrived."""

    def make_way(self) -> QuickerWay:
        """One whose way `take` sets."""
        self.way = GivenWay()
        return self.way

    @endpoint
    async def take(self, way: str) -> None:
        """From now on this way."""
        self.way.give(way)

    @endpoint
    async def crc(self) -> int:
        """Of its newest slot."""
        arena = self.reader.arena
        _, slot = arena.latest()
        return checksum(arena.slots[slot])


@dataclass(frozen=True)
class DeltaRow:
    """What it costs between two hosts to publish after steps of this size: medians, then sums."""

    rate: float  # the learning rate
    way: str  # one of QuickerWay.WAYS
    changed: float  # elements of bf16 that the step has changed, over all elements
    crossed: float  # bytes read by the relay, over the bytes of the model
    ms: float  # from when the relay saw the version until its host had it
    differ: int  # versions that are not bit for bit what was published
    refused: int  # pieces that had another checksum when their delta was unpacked


class ChangeBench:
    """A Stepper on one host, and on another one a relay that reads its arena."""

    NUM_VERSIONS = 5  # of a row

    def __init__(self, here: Host, away: Host, num_elements: int = 16_000_000) -> None:
        self.stepper = Service(self.spec("stepper", Stepper, here, num_elements))
        plan = RelayPlan(
            source=self.stepper,
            first_reader=0,
            num_siblings=1,
            num_readers=1,
            num_copying=0,
        )
        self.relay = Service(self.spec("its relay", CheckedRelay, away, plan))

    def spec(self, name: str, replica_class: type[Worker], host: Host, *args: Any) -> ServiceSpec:
        """One replica, on that host."""
        return ServiceSpec(
            name=name,
            replica_class=replica_class,
            args=args,
            num_replicas=1,
            hosts=(host,),
        )

    async def start(self) -> None:
        """Returns when the relay has version 0."""
        await self.stepper.start()
        await self.relay.start()
        await self.arrival(1)

    async def close(self) -> None:
        """Who asks ends first."""
        await self.relay.close()
        await self.stepper.close()

    async def arrival(self, num_versions: int) -> Traffic:
        """Waits until the relay has carried so many versions."""
        while True:
            traffic = await self.relay.route(Relay.traffic)
            if traffic.num_versions >= num_versions:
                return traffic
            await asyncio.sleep(0.05)

    async def row(self, rate: float, way: str) -> DeltaRow:
        """Publishes some versions, each when the one before has arrived."""
        await self.relay.route(CheckedRelay.take, way)
        changed = []
        crossed = []
        took_ms = []
        num_differ = 0
        first = before = await self.relay.route(Relay.traffic)
        for _ in range(self.NUM_VERSIONS):
            await self.stepper.route(Stepper.step, rate)
            now = await self.arrival(before.num_versions + 1)
            share, published = await self.stepper.route(Stepper.compare)
            num_differ += published != await self.relay.route(CheckedRelay.crc)
            changed.append(share)
            crossed.append((now.read_bytes - before.read_bytes) / now.model_bytes)
            took_ms.append(1000 * now.took_s)
            before = now
        return DeltaRow(
            rate=rate,
            way=way,
            changed=statistics.median(changed),
            crossed=statistics.median(crossed),
            ms=statistics.median(took_ms),
            differ=num_differ,
            refused=before.num_refused - first.num_refused,
        )


class RowRank(Worker):
    """A rank of a trainer over hosts, of one weight of which each rank has some rows."""

    def __init__(self, place: Place, num_rows: int) -> None:
        super().__init__(place)
        self.num_rows = num_rows
        shape = current_size()
        self.span = SpanRank(self.rank, math.prod(shape.values()), shape["hosts"])

    def make_meeting_place(self) -> str:
        """As of SpanTrainer."""
        return self.span.open_meeting_place() if self.rank == 0 else ""

    async def prepare(self) -> None:
        """Begins to publish version 0. Relays complete it, which are started when this is done."""
        self.span.leave_loopback()
        form_group(self.meets_at, self.rank, self.span.num_ranks)
        mesh = device_mesh.init_device_mesh("cpu", (self.span.num_ranks,))
        whole = torch.arange(self.num_rows)[:, None].repeat(1, 1025)
        self.rows = dtensor.distribute_tensor(whole, mesh, [dtensor.Shard(0)])
        self.writer = self.span.new_writer({"weight": self.rows}, 0)
        self.writer.start(0)

    @endpoint
    async def completions(self) -> list[Completion]:
        """As of SpanTrainer."""
        return self.span.completions(self.writer)

    @endpoint
    async def step(self) -> int:
        """Publishes one more version. Answers with how many arenas do not hold the whole of it."""
        self.writer.wait()
        local(self.rows).add_(1)
        self.writer.publish(self.writer.version + 1)
        # Here each rank is alone on its host, so it leads there, and `publish` has waited until the
        # relay has completed the arena.
        _, slot = self.writer.arena.latest()
        found = self.writer.arena.tensors(slot)["weight"]
        is_wrong = torch.tensor([not torch.equal(found, self.rows.full_tensor())], dtype=torch.int)
        torch.distributed.all_reduce(is_wrong)
        return int(is_wrong)


async def tell_span(report: Report, span: HostSpan) -> None:
    """What crosses between hosts of which each has one rank of a trainer."""
    report.doing("a trainer with a rank on each host")
    spec = ServiceSpec(
        name="rows",
        replica_class=RowRank,
        args=(2001,),
        num_replicas=1,
        num_ranks=len(span.members),
        hosts=(span,),
    )
    ranks = Service(spec)
    report.at_end(ranks.close)
    relays = HomeRelays(span.members, spec.stuck_after_s)
    report.at_end(relays.close)
    await ranks.start()
    await relays.begin(await ranks.route(RowRank.completions))
    num_wrong = 0
    for _ in range(10):
        num_wrong += await ranks.route(RowRank.step)
    num_hosts = len(span.members)
    found = [await relays.ask(relay, HomeRelay.traffic) for relay in range(num_hosts)]
    # n hosts need n times the model. What they have written themselves is, together, one model.
    one = found[0]
    lacked_bytes = (num_hosts - 1) * one.num_versions * one.model_bytes
    crossed = sum(traffic.read_bytes for traffic in found) / lacked_bytes
    report.say(
        f"a trainer with a rank on each of {num_hosts} hosts: "
        f"{one.num_versions} versions of {one.model_bytes} bytes"
    )
    report.check("bytes that its relays read / bytes that its hosts lacked", crossed, "==", 1.0)
    report.check("arenas that do not hold the whole version", num_wrong, "==", 0)
    report.figure(span_bytes_over_lacked=crossed)


async def tell_deltas(report: Report, here: Host, away: Host) -> None:
    """What crosses if one element in a hundred changes, and if all do."""
    report.doing("versions that cross whole, and by what changed")
    bench = ChangeBench(here, away)
    report.at_end(bench.close)
    await bench.start()
    few = await bench.row(1e-6, "changes")
    whole = await bench.row(1e-6, "whole")
    nearly_all = await bench.row(1e-2, "changes")
    rows = [few, whole, nearly_all]
    report.table(rows)
    report.check("bytes that cross / bytes of the model, at a rate of 1e-6", few.crossed, "<", 0.05)
    crossed = nearly_all.crossed
    report.check("the same, when nearly all elements change", crossed, "<=", 1.02)
    differ = sum(row.differ for row in rows)
    report.check("versions that are not what was published", differ, "==", 0)
    refused = sum(row.refused for row in rows)
    report.check("pieces whose delta led to another checksum", refused, "==", 0)
    report.figure(
        delta_bytes_over_model=few.crossed,
        delta_ms_over_whole=few.ms / whole.ms,
    )


@stage(
    "another host costs one copy of what changed; a lost host costs its work in progress",
    hint="do nothing, `pass`: its replicas are never replaced",
    mechanism="host lost",
    needs_tcp=True,
)
async def demo_hosts(report: Report, cfg: Config) -> None:
    """Trains across two hosts, loses one, gets it back, and counts what crossed between them."""
    num_steps = 16
    workers = LocalWorkers(2)
    report.at_end(functools.partial(asyncio.to_thread, workers.close))
    first, second = workers.processes
    report.say(f"two workers on this machine, {first} and {second}; about 40 s")
    own = Config(seed=cfg.seed, hosts=f"{first},{second}", steps=num_steps)
    cluster = HostsCluster(own, is_warm=False, tell=report.say)  # it need not learn
    report.at_end(cluster.close)
    first_host, away = cluster.hosts  # the second is the one that will be lost
    assert isinstance(first_host, RemoteHost) and isinstance(away, RemoteHost)
    run = Run("hosts", num_steps, Sampler(own.task, own.seed))
    training = SafeTraining(cluster, run, report)
    await cluster.start()
    report.table(await placement(cluster))
    running = asyncio.ensure_future(train_sync(training))
    try:
        # 1. Half of the steps, with both hosts.
        await until_step(num_steps // 2, run, running)
        traffic = await cluster.relays.ask(0, Relay.traffic)
        await cluster.relay_figures()  # it counts what this relay has carried, while it is there
        # 2. Two steps without the second host. 3. The others; meanwhile it comes back.
        workers.lose(second)
        await until_step(num_steps // 2 + 2, run, running)
        workers.start(second)
        await running
    finally:
        await end_task(running)
    # 4. Does it sample again, from the weights of the trainer?
    report.doing("waiting for the second host")
    lost = await until_replaced(cluster.relays.levels[0], away)
    lost += await until_replaced(cluster.generators, away)
    version = await cluster.published()
    again = await sample(cluster, run.sampler.first(own.batch_groups), version)
    found = await cluster.examine(Rollout.join([reply.rollout.judged() for reply in again]))

    copies = traffic.read_bytes / traffic.num_versions / traffic.model_bytes
    report.say(
        f"the relay has carried {traffic.num_versions} versions of {traffic.model_bytes} bytes"
    )
    report.check("bytes per version and host / bytes of the model", copies, "<", 1.1)
    whys = [loss.why for loss in lost]
    report.check("why relay and generator were replaced", whys, "==", ["host lost", "host lost"])
    report.check("steps made", len(run.rows), "==", num_steps)
    report.check("groups started, not accounted for", run.ledger.num_missing(), "==", 0)
    limit = MAX_K3[dtype_name(own)]
    report.check("largest k3, of samples of both hosts", training.largest_k3(), "<=", limit)
    report.check("k3 of samples of both, when it is back", found.mean_k3, "<=", limit)
    report.figure(bytes_per_version_over_model=copies, **await cluster.relay_figures())
    await tell_deltas(report, first_host, away)
    await tell_span(report, HostSpan(members=(first_host, away), ranks_per_host=1))
    # You can now add hosts, lose them, and train a model that is too large for one.


# -- plumbing: a model of your own, before and after RL --------------------------------------------
# The story is over: section 16 was the last. Of what follows a learner may still want pass@k (the
# comment above EVALUATION_ROWS), the table of memory, and `run_stages` and `main`, which run all.
#
# Three flags do something else with a model. (DOCS 7 has a whole course of it.)
#
#     --sft-steps   supervised steps before all runs, so that RL has something to begin with
#     --evaluate    how good the model of a folder, or that of a checkpoint, is: after a run, or by
#                   itself, without training
#     --export      the trained model, in a folder that transformers can read: as --evaluate
#
# With --checkpoint saved, this is what lies there after a run of both stages, and who reads it:
#
#     saved/sft/step-00000100.pt         the weights after 100 supervised steps: every later command
#                                        with these flags begins with them
#     saved/sync_rl/step-00000050.pt     a run goes on from the newest one (section 12)
#     saved/sync_rl/step-00000100.pt
#     saved/async_rl/step-00000150.pt
#     saved/async_rl/step-00000200.pt    the trained model: --evaluate and --export take this one
#
# If the trainer is lost during supervised steps, all of them are taken again, from the first: they
# are few, and nothing has been built on them yet.

SFT_LINES = 8  # lines in which the loss of all supervised steps is shown


async def take_sft_steps(cluster: Cluster, report: Report) -> None:
    """Makes the policy after --sft-steps the one with which every run begins.

    With --checkpoint it is kept there, in the folder sft. A command that finds it takes no such
    steps, so what a run has begun with, and what --kl compares it with, stays the same.
    """
    cfg = cluster.cfg
    # Without --checkpoint it is kept in memory, as long as somebody refers to `kept`: the Cluster
    # does, from `rebase` on.
    kept = Checkpoints(f"{cfg.checkpoint}/sft" if cfg.checkpoint else "")
    path = kept.newest(cfg, report.say)
    if path:
        report.say(f"the supervised steps were taken before: {path}")
    else:
        room = kept.room()
        await with_retries(cluster, lambda: supervise(cluster, report, room))
        kept.keep(room, cfg.sft_steps)
        path = kept.paths[0]
    # The trainer becomes what the file says, as at the beginning of a run, with a fresh optimizer.
    # Else the moments of AdamW from supervised steps would act on the first steps of RL.
    await with_retries(cluster, lambda: cluster.rebase(path, kept))
    heldout = Sampler(cfg.task, cfg.seed).heldout
    share = await with_retries(cluster, lambda: evaluate(cluster, heldout))
    report.say(f"held-out exact after {cfg.sft_steps} supervised steps: {share:.3f}")
    report.figure(heldout_after_sft=share)


async def supervise(cluster: Cluster, report: Report, room: str) -> None:
    """Takes the steps, each on as many conversations as a step of RL has.

    room: the path of the file into which the weights are written after the last one.

    This process draws the prompts, apart from those of RL as in the warm start, and every rank of
    the trainer gets all of them: from these it takes its own rows, as from a batch of RL.
    """
    cfg = cluster.cfg
    prompts = Sampler(cfg.task, seed=-1 - cfg.seed).stream()
    every = max(1, cfg.sft_steps // SFT_LINES)
    loss = 0.0
    for step in range(1, cfg.sft_steps + 1):
        batch = list(itertools.islice(prompts, cfg.batch_groups * cfg.group_size))
        request = SuperviseRequest(prompts=batch, is_first=step == 1)
        loss = await cluster.supervise(request)
        if step == 1 or step % every == 0 or step == cfg.sft_steps:
            report.say(f"supervised step {step:5d}: loss {loss:.3f} nats per token")
    report.figure(sft_loss=loss)
    await cluster.save(room, "")


def folder_of_run(checkpoint: str) -> str:
    """The folder of the run whose model is meant by --checkpoint: that of async_rl, if it is there.

    ValueError: there is none.
    """
    for name in ("async_rl", "sync_rl"):
        folder = pathlib.Path(checkpoint, name)
        if any(folder.glob("step-*.pt")):
            return str(folder)
    raise ValueError(f"no checkpoint of async_rl or sync_rl in {checkpoint}")


def config_of(path: str, cfg: Config) -> Config:
    """A Config that also says what a checkpoint was made with: its model, its task, and so on.

    So these flags need not be given again. OtherRun: one of them is given, and differs. What is
    given as its default cannot be told from what is not given: for a checkpoint of --seed 7,
    `--seed 1` is an error, but with `--seed 0`, the default, this goes on with 7.
    """
    found = torch.load(path, weights_only=True, mmap=True)["about"]
    given = {name: getattr(cfg, name) for name in about(cfg) if name != "format"}
    left_open = {name for name, value in given.items() if value == getattr(Config, name)}
    of_run = {name: value for name, value in found.items() if name in left_open}
    cfg = dataclasses.replace(cfg, **of_run)
    require_same_run(path, found, cfg)
    return cfg


def export_model(cfg: Config, path: str) -> str:
    """Writes the model of a checkpoint to the folder of --export. Returns a line that says so.

    It needs no actor: the weights of a checkpoint are whole tensors under the names that the model
    has for them, however many ranks wrote it.
    """
    saved = read_checkpoint(path, cfg)
    # The model of the folder, for all that is no weight: its config, and its settings of
    # generation. A name that is missing, or one too many, raises.
    policy = Policy(dataclasses.replace(cfg, device="cpu"), torch.float32)
    policy.model.load_state_dict(saved["weights"])
    dtype = policy.model.config.dtype or torch.float32
    if cfg.model == "tiny":
        tokenizer = policy.tokenizer
    else:
        # As they came: a Policy changes what its tokenizer pads with, and may change the dtype.
        tokenizer = transformers.AutoTokenizer.from_pretrained(cfg.model)
        dtype = transformers.AutoConfig.from_pretrained(cfg.model).dtype or torch.float32
    if cfg.export_dtype:
        dtype = getattr(torch, cfg.export_dtype)
    policy.model.to(dtype)  # after the last step, so that nothing was rounded on the way
    write_whole(cfg.export, policy.model, tokenizer)
    num_millions = policy.model.num_parameters() / 1e6
    num_steps = len(json.loads(saved["state"])["rows"])
    kind = f"{show(num_millions)} million parameters, {str(dtype).removeprefix('torch.')}"
    loads = f'AutoModelForCausalLM.from_pretrained("{cfg.export}")'
    return f"exported, after step {num_steps} ({kind}): {loads}"


def write_whole(folder: str, model: Any, tokenizer: Any) -> None:
    """Writes a model and its tokenizer into this folder, all of it or nothing.

    They are written into another folder, which gets this name when the disk has them. So who finds
    a folder of this name can load it: after a full disk or a power cut there is none, and not half
    a model.
    """
    path = pathlib.Path(folder)
    unfinished = path.with_name(f"{path.name}.unfinished")
    with writing(folder, unfinished=str(unfinished)):
        if unfinished.exists():  # left by somebody who was cut off
            shutil.rmtree(unfinished)
        unfinished.mkdir()  # transformers would make those above it, too, if they have gone away
        model.save_pretrained(unfinished)
        tokenizer.save_pretrained(unfinished)
        for written in [*unfinished.rglob("*"), unfinished]:
            flush_to_disk(str(written))
        os.replace(unfinished, path)  # an empty folder may have been there
        flush_to_disk(str(path.parent))


# An evaluation asks each held-out prompt once for its likeliest answer, and --evaluate N times for
# a sampled one. Of N samples c are right. Then pass@k, the probability that of k samples at least
# one is right, is 1 - C(N - c, k) / C(N, k): of all ways to take k of these N, the share that does
# not miss every right one. That is unbiased, which 1 - (1 - c / N) ** k is not (Chen 2021).
#
# By example, of 4 samples 1 is right:
#
#     pass@1   1 - C(3, 1) / C(4, 1) = 1 - 3/4 = 0.25
#     pass@2   1 - C(3, 2) / C(4, 2) = 1 - 3/6 = 0.50    the other way: 1 - (3/4) ** 2 = 0.44
#     pass@4   1 - C(3, 4) / C(4, 4) = 1 - 0/1 = 1.00    the other way: 1 - (3/4) ** 4 = 0.68
#
# pass@1 tells how well the policy does, and pass@N what RL has to work with: where a reward is 0 or
# 1, a prompt of which no sample is right teaches nothing. Each figure is a mean over prompts,
# because they, and not the samples, are what was drawn at random from all that could have been
# asked: samples of one prompt resemble each other, and counting them all would make the error look
# too small.

# Conversations of a request: few enough to fit into a generator at once, so that an evaluation is
# many requests, and no generator is without work.
EVALUATION_ROWS = 64
NUM_SHOWN = 20  # prompts of which a sampled answer is printed


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    # Its standard error: how far it may be from the mean over all prompts that there could be.
    # None: there is one prompt only.
    error: float | None


def estimate(values: list[float]) -> Estimate:
    """values: one for each prompt."""
    error = None
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
    return Estimate(mean=statistics.fmean(values), error=error)


def pass_at(k: int, num_samples: int, num_right: int) -> float:
    """The probability that k of these samples, drawn without putting back, have a right one."""
    num_wrong = num_samples - num_right
    return 1 - math.comb(num_wrong, k) / math.comb(num_samples, k)


async def ask_all(
    cluster: Cluster, prompts: list[Prompt], num_samples: int, greedy: bool
) -> Rollout:
    """So many conversations from each prompt, under one version.

    They are asked for in requests of a bounded size. A generator has two of them at a time, one in
    work and one that waits, so that it need not wait for the next.
    """
    version = await cluster.published()
    room = asyncio.Semaphore(2 * cluster.num_generators)

    async def of_some(some: list[Prompt]) -> Rollout:
        async with room:
            found = await cluster.rollout(
                some, num_samples, greedy, min_version=version, by_task=True
            )
        return found.rollout

    size = max(1, EVALUATION_ROWS // num_samples)
    firsts = range(0, len(prompts), size)
    parts = [of_some(prompts[first : first + size]) for first in firsts]
    return Rollout.join(await asyncio.gather(*parts))


@dataclass(frozen=True)
class Evaluation:
    """What was found out about one set of weights."""

    figures: dict[str, Estimate]  # by name
    samples: list[str]  # of each of the first NUM_SHOWN prompts: the reward, and what was said


async def evaluation(cluster: Cluster, prompts: list[Prompt], num_samples: int) -> Evaluation:
    """Of the weights that the trainer has now."""
    greedy = await ask_all(cluster, prompts, 1, greedy=True)
    sampled = await ask_all(cluster, prompts, num_samples, greedy=False)
    figures = {"greedy_exact": estimate([float(right) for right in is_right(greedy)])}
    # Of each prompt the numbers of its rows: rows that are neighbours need not belong together.
    rows: dict[int, list[int]] = {prompt.id: [] for prompt in prompts}
    for row, group_id in enumerate(sampled.group_ids.tolist()):
        rows[group_id].append(row)
    right = is_right(sampled)
    num_right = []  # of each prompt
    for prompt in prompts:
        num_right.append(sum(right[row] for row in rows[prompt.id]))
    # k = 1, 2, 4, 8 and so on, and N itself.
    powers = {1 << i for i in range(num_samples.bit_length())}
    for k in sorted({*powers, num_samples}):
        passed = [pass_at(k, num_samples, of_prompt) for of_prompt in num_right]
        figures[f"pass_at_{k}"] = estimate(passed)
    columns = {
        "tokens": sampled.sampled().sum(1).float(),
        "truncated": sampled.is_truncated.any(1).float(),
        "not_judged": (~sampled.rewards.isfinite().all(1)).float(),
    }
    for name, column in columns.items():
        means = [float(column[rows[prompt.id]].mean()) for prompt in prompts]
        figures[name] = estimate(means)
    samples = []
    for prompt in prompts[:NUM_SHOWN]:
        row = rows[prompt.id][0]
        answers = [" ".join(text.split()) for text in sampled.said[row]]
        samples.append(f"{float(sampled.rewards[row].sum()):.2f} {' / '.join(answers)}")
    return Evaluation(figures=figures, samples=samples)


def is_right(rollout: Rollout) -> list[bool]:
    """Of each episode: is all of it right? What was not judged is not."""
    return [is_exact(reward) for reward in rollout.rewards.sum(1).tolist()]


async def tell_evaluations(report: Report, cluster: Cluster, sides: dict[str, str]) -> None:
    """Evaluates several sets of weights of one model, and shows them side by side.

    sides: by name, the path of a checkpoint; "": the policy with which every run begins.
    """
    cfg = cluster.cfg
    prompts = Sampler(cfg.task, cfg.seed).heldout
    found: dict[str, Evaluation] = {}
    # One after the other, on the same actors: the trainer becomes one, publishes, and so on.
    for side, path in sides.items():
        await with_retries(cluster, functools.partial(cluster.load, path))
        found[side] = await with_retries(
            cluster, functools.partial(evaluation, cluster, prompts, cfg.evaluate)
        )
    rows = []
    for name in next(iter(found.values())).figures:
        row: dict[str, Any] = {f"{len(prompts)} held-out prompts": name.replace("_", " ")}
        for side, one in found.items():
            figure = one.figures[name]
            row[side] = figure.mean
            row[f"{side}_error"] = figure.error
            # For --json, under names such as after_pass_at_4 and after_pass_at_4_error.
            report.figure(**{f"{side}_{name}": figure.mean, f"{side}_{name}_error": figure.error})
        rows.append(row)
    report.table(rows)
    width = 62 // len(found)  # characters, so that all sides stand in one line
    shown = []
    for number, prompt in enumerate(prompts[:NUM_SHOWN]):
        heard = " / ".join(" ".join(turn.user.split()) for turn in prompt.turns)
        row = {"the_user_says": heard[:26]}
        for side, one in found.items():
            row[f"{side}: reward, answer"] = one.samples[number][:width]
        shown.append(row)
    report.table(shown)


async def after_training(report: Report, lab: Lab) -> None:
    """What --evaluate and --export do with the run of a stage, when that has ended.

    They take the newest checkpoint of the run, which is that of its last step, and not the weights
    that the trainer has now: after its run async_rl trains another one, to compare with.
    """
    cluster = lab.cluster
    if not cluster.cfg.evaluate and not cluster.cfg.export:
        return
    training = lab.last_run()
    if cluster.cfg.evaluate:
        sides = {"before": "", "after": training.newest()}
        await tell_evaluations(report, cluster, sides)
    if cluster.cfg.export:
        # In a thread, for it may take a minute, and the actors want to be looked after meanwhile.
        with excusing(report, "--export"):
            report.say(await asyncio.to_thread(export_model, cluster.cfg, training.newest()))


async def run_without_training(report: Report, command: Command) -> None:
    """Does what --evaluate and --export say, for a model or a checkpoint, and trains nothing."""
    start = time.monotonic()
    clock = asyncio.ensure_future(report.keep_clock())
    report.begin_command("evaluate" if command.cfg.evaluate else "export")
    report.say(*command.passed_over)
    for side, path in command.sides.items():
        report.say(f"{side}: {path or command.cfg.model}")
    try:
        if command.cfg.evaluate:
            await evaluate_alone(report, command)
        if command.cfg.export:
            with excusing(report, "--export"):
                report.say(export_model(command.cfg, command.sides["checkpoint"]))
    except Exception as error:
        tell_end(report, error, "command")
    await tell_trace(report, command.cfg)
    clock.cancel()
    report.end_command(since(start))


async def evaluate_alone(report: Report, command: Command) -> None:
    """Starts actors for an evaluation, and ends them."""
    cfg = command.cfg
    # Without a checkpoint the tiny policy is what its warm start makes of it.
    is_warm = not cfg.checkpoint
    cluster_class = HostsCluster if cfg.hosts else Cluster
    cluster = cluster_class(cfg, is_warm, tell=report.say)
    report.say("starting trainer, generators and judges (about 6 s)")
    try:
        await cluster.start()
        await tell_evaluations(report, cluster, command.sides)
    finally:
        await cluster.close()


# -- plumbing: the memory of this host -------------------------------------------------------------
# What a run needs is computed before it starts: a run that is killed for memory says nothing, and
# may be killed after hours. It is computed for two moments, because a run needs most either before
# the generators first pull, when each still has a network of its own, or later, when memory has its
# checkpoints. These are bytes of host memory per parameter of the model. The words in capitals are
# the constants below; c, in the code `number_bytes`, is 4 in fp32 and 2 in bf16:
#
#                  before the first pull   later
#     arena        c for each slot         the same
#     trainer      FP32, or TRAINED        TRAINED. On GPUs it needs none, before and later
#                  (see below)
#     generators   c for each rank         none: they read the arena in place. On GPUs never any
#     checkpoints  FP32: version 0         the same. Without --checkpoint they are in memory, so
#                                          SAVED for each of NUM_IN_MEMORY on top
#     saving       none                    SAVED, where rank 0 first collects it, from FSDP or a GPU
#     critic       as the trainer          TRAINED, and SAVED for the file in memory from which the
#                                          trainer reads its part of a checkpoint. That part is in
#                                          each checkpoint in memory as well: SAVED
#
# A trainer needs TRAINED before the first pull in two cases. After --sft-steps it has been trained.
# With --checkpoint it may have to go on, when the command is given again, and then it loads its
# moments before anybody pulls. So a run that would fit only until it is cut off is refused.
#
# To read a checkpoint needs nothing on top, because the file is mapped. (Measured with 29 million
# parameters: while a trainer becomes what a checkpoint says, it has 16.0 bytes for each, which is
# TRAINED. When it read the whole file first, it had 28.0.)
#
# With --kl the trainer has FP32 more, for the reference. Each process needs PROCESS_BYTES on top,
# whatever the model is. Two things are not counted. One depends on the lengths of answers. The
# other is needed for a while after a loss: the network of a new generator until that pulls, and the
# arena of a lost trainer until no generator reads it. (`reward_needs` says what a reward model
# needs.)
#
# By example, 10 ** 9 parameters in fp32, 2 generators (3 at most, so 5 slots), without --checkpoint
# and without a critic. In GB:
#
#     before the first pull    arena 20 + trainer  4 + generators 12 + checkpoints  4    = 40
#     later                    arena 20 + trainer 16                 + checkpoints 40    = 76
#     so the run needs         76 + 1.8 for five processes, of which three are generators
#
# And the same run with --checkpoint:
#
#     before the first pull    arena 20 + trainer 16 + generators 12 + checkpoints  4    = 52
#     later                    arena 20 + trainer 16                 + checkpoints  4    = 40
#     so the run needs         52 + 1.8

FP32 = 4  # bytes of a number
SAVED = 3 * FP32  # bytes of a parameter in a checkpoint: its weight, and two moments of AdamW
TRAINED = 4 * FP32  # of one that is trained: these three, and the gradient
NUM_IN_MEMORY = 3  # checkpoints of a run: the newest two, and the one that is being written
PROCESS_BYTES = 350 * MIB  # that a process has for itself when it has imported torch, transformers


def memory_needs(cfg: Config, num_parameters: int, trains: bool) -> dict[str, int]:
    """Bytes that a run needs on this host, by what needs them, when it needs most.

    trains: else it is an evaluation alone, of a model, or of a checkpoint with its moments.
    """
    number_bytes = dtype_of(cfg).itemsize
    is_on_gpu = cfg.device != "cpu"
    # Of the trainer's arena. Readers that copy, on GPUs, need no slots of their own.
    num_slots = num_readers_of_trainer(cfg) - num_copying_per_host(cfg) + 2
    arena = number_bytes * num_slots
    reference = FP32 if cfg.kl else 0
    num_critics = 1 if trains and has_critic(cfg) else 0
    num_networks = 1 + num_critics  # that are trained
    at_first = TRAINED if cfg.checkpoint or cfg.sft_steps else FP32
    before = {
        "arena": arena,
        "trainer": 0 if is_on_gpu else at_first + reference,
        "critic": 0 if is_on_gpu else at_first * num_critics,
        "generators": 0 if is_on_gpu else number_bytes * max_generators(cfg) * cfg.tensor_parallel,
        "checkpoints": FP32,
    }
    in_memory = SAVED * NUM_IN_MEMORY * num_networks
    trainer = TRAINED if trains else at_first
    critic = SAVED if is_on_gpu else SAVED + TRAINED
    later = {
        "arena": arena,
        "trainer": 0 if is_on_gpu else trainer + reference,
        "critic": critic * num_critics,
        "checkpoints": FP32 if cfg.checkpoint or not trains else FP32 + in_memory,
        "saving": SAVED if is_on_gpu or needs_group(cfg) else 0,
    }
    most = max(before, later, key=lambda needs: sum(needs.values()))
    if cfg.reward == "model":
        most.update(reward_needs(cfg))
    needs = {what: per_parameter * num_parameters for what, per_parameter in most.items()}
    # The main process has imported them as well; judges need less.
    num_processes = 1 + cfg.trainers * num_networks + max_generators(cfg) * cfg.tensor_parallel
    if cfg.reward == "model":
        num_processes += 1 + cfg.judges
    return {**needs, "processes": num_processes * PROCESS_BYTES}


def reward_needs(cfg: Config) -> dict[str, int]:
    """Bytes per parameter of a reward model, by what needs them. It is in fp32."""
    # The first lesson comes before the first pull, so each of those that judge still has a network
    # of its own then.
    networks = TRAINED + FP32 * cfg.judges
    num_slots = 2 if cfg.device != "cpu" else cfg.judges + 2
    # As it was before all runs; the newest two, and the one being written.
    num_saved = 1 + NUM_IN_MEMORY
    in_runs = 0 if cfg.checkpoint else SAVED * NUM_IN_MEMORY  # its part of their checkpoints
    return {
        "reward model": FP32 * num_slots + (networks if cfg.device == "cpu" else 0),
        "saved reward models": SAVED * num_saved + in_runs,
    }


def free_in_cgroup(folder: pathlib.Path) -> float:
    """Bytes that the processes of this cgroup may still take; infinity: it has no limit.

    A cgroup is a set of processes, such as those of a container, that share limits (cgroups(7)).
    """
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        counts = (folder / "memory.stat").read_text().split()
    except FileNotFoundError:
        return math.inf
    if limit == "max":
        return math.inf
    # Files that were read count as used, and go when memory is needed. Shared memory, which counts
    # among them, stays.
    by_name = dict(zip(counts[::2], counts[1::2], strict=True))
    cached = int(by_name["file"]) - int(by_name["shmem"])
    return int(limit) - used + cached


def free_memory() -> float:
    """Bytes that processes of this host can still take, as far as the system lets us."""
    text = pathlib.Path("/proc/meminfo").read_text()
    _, _, behind = text.partition("MemAvailable:")
    kib, *_ = behind.split()
    found = [1024.0 * int(kib)]
    # The line of cgroups of version 2 begins with "0::"; behind it is our path among them. The
    # limits of all that lie above it hold as well.
    root = pathlib.Path("/sys/fs/cgroup")
    for line in pathlib.Path("/proc/self/cgroup").read_text().splitlines():
        if line.startswith("0::"):
            mine = root / line.removeprefix("0::").strip("/")
            above = [folder for folder in mine.parents if folder.is_relative_to(root)]
            found += [free_in_cgroup(folder) for folder in (mine, *above)]
    return min(found)


def what_memory_lacks(cfg: Config, num_parameters: int, trains: bool) -> str:
    """A line that says why this run does not fit into the memory of this host; "": it does."""
    gib = 1 << 30
    needs = memory_needs(cfg, num_parameters, trains)
    whole = sum(needs.values())
    free = free_memory()
    if whole <= free:
        return ""
    parts = [f"{what} {num_bytes / gib:.1f}" for what, num_bytes in needs.items() if num_bytes]
    return (
        f"needs {whole / gib:.1f} GiB of host memory ({', '.join(parts)}), "
        f"this host has {free / gib:.1f} free"
    )


# -- plumbing: the command line --------------------------------------------------------------------
# Some commands:
#
#     --only async_rl --task count --steps 300          another task
#     --only async_rl --task mine.py:Mine               a task of your own
#     --only async_rl --task FILE.jsonl --model FOLDER  prompts and answers of your own
#     --only async_rl --model FOLDER --device cuda      a model of your own
#     --only async_rl --checkpoint saved                goes on when it is given again
#     --only async_rl --export better                   writes the trained model
#     --evaluate 16 --model better                      how good that is
#     --only weight_sync --model-mb 1024 --json f.json  a measurement
#
# Exit status: 0 all checks hold; 1 a check failed, the run died, or a file could not be written; 2
# wrong usage; 130 Ctrl-C (of a worker 0).


@dataclass(frozen=True)
class Command:
    """What the command line says."""

    cfg: Config
    stages: list[Stage]
    lists: bool  # --list
    worker: str | None  # the address of --worker
    # What --evaluate is to show without training, and --export to write: by name, the path of a
    # checkpoint, or "" for --model as it is. Empty: stages are run.
    sides: dict[str, str]
    passed_over: list[str]  # why newer checkpoints than that one cannot be read
    beside: dict[str, Any] | None  # what the file of --compare has

    def has_tcp(self) -> bool:
        """Does this process use TCP for Monarch's messages, and not Unix sockets?

        It does with --hosts, and for a stage that needs it if that is the only one.
        """
        is_alone = len(self.stages) == 1 and self.stages[0].needs_tcp
        return bool(self.cfg.hosts) or is_alone


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that says in one line what is wrong, without the usage above it."""

    def error(self, message: str) -> Any:
        """What argparse calls then. It does not return."""
        self.exit(2, f"monarch_rl: {visible(message)}\n")

    def flags(self, argv: list[str] | None) -> argparse.Namespace:
        """What these arguments say. Of a flag that there is not, tells which one may be meant."""
        found, unknown = self.parse_known_args(argv)
        if unknown:
            flag, *_ = unknown[0].split("=")
            self.error(f"there is no {flag}{nearest(flag, self._option_string_actions)}")
        return found


def nearest(text: str, names: Iterable[str]) -> str:
    """What to add to an error: the name most like this text; "" if none is like it."""
    found = difflib.get_close_matches(text, names, n=1, cutoff=0.7)
    return f"; did you mean {found[0]}?" if found else ""


def terminal_width(otherwise: int) -> int:
    """Columns of the terminal. otherwise: what to take if the output goes somewhere else."""
    columns, _ = shutil.get_terminal_size((otherwise, 24))
    return min(columns, otherwise)


def stage_named(text: str) -> str:
    """The name of the stage that --stage or --only mean. text: a name or a number.

    ArgumentTypeError: there is none. Then --list has them all.
    """
    by_number = {str(stage.number): stage.name for stage in STAGES.values()}
    name = by_number.get(text, text)
    if name not in STAGES:
        why = f"there is no stage {text!r}{nearest(text, STAGES)}"
        raise argparse.ArgumentTypeError(f"{why} (--list has all)")
    return name


def make_parser() -> Parser:
    """The flags that choose stages, and a flag for each field of Config."""
    parser = Parser(
        usage="%(prog)s flags [their defaults]",
        description=(__doc__ or "").split("\n", 1)[0],
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, 2, 29, terminal_width(100)),
    )
    last = list(STAGES)[-1]
    which = parser.add_mutually_exclusive_group()
    stage_flags = {"--stage": f"run 1 to it [{last}]", "--only": "run this stage"}
    for flag, meaning in stage_flags.items():
        which.add_argument(
            flag,
            help=meaning,
            type=stage_named,
            metavar="STAGE",
        )
    which.add_argument("--list", action="store_true", help="print the stages and their lines")
    which.add_argument("--version", action="version", version=f"monarch_rl {VERSION}")
    which.add_argument(
        "--worker",
        nargs="?",
        const="tcp://127.0.0.1:26600",
        metavar="ADDRESS",
        help="serve this host to runs with --hosts [%(const)s]",
    )
    add_settings(parser)
    return parser


def add_settings(parser: Parser) -> None:
    """A flag for each field of Config."""
    for entry in dataclasses.fields(Config):
        flag = flag_of(entry.name)
        meaning = f"{entry.metadata['meaning']} [{entry.default}]"
        if entry.default is False:
            parser.add_argument(flag, action="store_true", help=meaning)
            continue
        kind = entry.metadata["kind"]
        parser.add_argument(
            flag,
            type=kind,
            default=entry.default,
            choices=entry.metadata["choices"] or None,
            metavar=kind.__name__,
            help=meaning,
        )


def parse(argv: list[str] | None) -> Command:
    """Finds everything that can be wrong with the arguments before a process is started."""
    parser = make_parser()
    found = parser.flags(argv)
    for entry in dataclasses.fields(Config):
        value = getattr(found, entry.name)
        least = entry.metadata["least"]
        # Not `value < least`, for a value of nan must fail too.
        if least is not None and value is not None and not value >= least:
            parser.error(f"{flag_of(entry.name)} must be at least {least}")
    names = [entry.name for entry in dataclasses.fields(Config)]
    cfg = Config(**{name: getattr(found, name) for name in names})
    last = STAGES[found.stage].number if found.stage else len(STAGES)
    stages = list(STAGES.values())[:last]
    if found.only:
        stages = [STAGES[found.only]]
    sides: dict[str, str] = {}
    passed_over: list[str] = []
    is_about_a_model = bool(cfg.evaluate or (cfg.export and cfg.checkpoint))
    if is_about_a_model and not found.stage and not found.only:
        with blaming(parser, "--checkpoint"):
            cfg, sides, passed_over = what_to_evaluate(cfg)
        stages = []
    check_together(parser, cfg, stages, sides)
    check_numbers(parser, cfg)
    beside = read_comparison(parser, cfg.compare)
    try_all(parser, cfg, stages, found.worker)
    check_reward(parser, cfg, stages)
    with blaming(parser, "--checkpoint"):
        if cfg.checkpoint and stages:
            lock_folder(cfg.checkpoint)  # last, for it makes the folder
    return Command(
        cfg=cfg,
        stages=stages,
        lists=found.list,
        worker=found.worker,
        sides=sides,
        passed_over=passed_over,
        beside=beside,
    )


def what_to_evaluate(cfg: Config) -> tuple[Config, dict[str, str], list[str]]:
    """For a command without training: its Config, Command.sides and Command.passed_over."""
    if not cfg.checkpoint:
        return cfg, {"model": ""}, []
    path, damaged = Checkpoints(folder_of_run(cfg.checkpoint)).look(None)
    sides = {"checkpoint": path}
    if cfg.model != "tiny":  # it was named, so it is to be seen beside what became of it
        sides = {"model": "", **sides}
    return config_of(path, cfg), sides, list(damaged.values())


def check_together(parser: Parser, cfg: Config, stages: list[Stage], sides: dict[str, str]) -> None:
    """Finds flags that do not go together."""
    if cfg.compare and not cfg.report:
        parser.error("--compare goes with --report")
    bounds = [cfg.max_lag]
    if cfg.report and STAGES["async_rl"] in stages:
        bounds += SWEEP_BOUNDS  # at each of which `sweep` makes a run
    with blaming(parser, f"--in-flight {cfg.in_flight}"):
        for max_lag in bounds:
            Flow.of(cfg, max_lag)
    if cfg.sft_steps and cfg.model == "tiny":
        parser.error("--sft-steps is for a --model of your own; tiny has its warm start")
    is_trained = last_training(stages) is not None
    if cfg.evaluate and not sides and not is_trained:
        parser.error("--evaluate is of stages sync_rl and async_rl, or goes without a stage")
    if cfg.export and "checkpoint" not in sides and not is_trained:
        parser.error("--export is of stages sync_rl and async_rl, or goes with --checkpoint alone")


def check_numbers(parser: Parser, cfg: Config) -> None:
    """Finds numbers that do not go together."""
    if max_generators(cfg) < cfg.generators:
        parser.error("--max-generators must be at least --generators")
    if cfg.group_size == 1 and cfg.baseline in ("group", "leave_one_out"):
        parser.error("--group-size 1 leaves no group: take --baseline critic, batch or none")
    if max(cfg.turn_lambda, cfg.token_lambda) > 1:
        parser.error("--turn-lambda and --token-lambda must be at most 1")
    # Of a group whose answers could not all be judged two are enough (Flow.least_rows).
    num_rows = cfg.batch_groups * min(2, cfg.group_size)
    if num_rows < cfg.trainers:
        parser.error(f"--trainers {cfg.trainers}: a batch may have only {num_rows} episodes")


def check_reward(parser: Parser, cfg: Config, stages: list[Stage]) -> None:
    """Finds what is wrong with a reward model. stages: without any none is made."""
    if cfg.reward == "task":
        if cfg.preferences or cfg.ask_every:
            parser.error("--preferences and --ask-every go with --reward model")
        return
    if cfg.ask_every and cfg.group_size == 1:
        parser.error("--ask-every compares answers of a group: --group-size must be at least 2")
    if cfg.hosts:
        parser.error("--reward model is of one host: it does not go with --hosts")
    with blaming(parser, f"--preferences {cfg.preferences}"):
        if cfg.preferences and stages:
            try_preferences(cfg)
    with blaming(parser, "--checkpoint"):
        if cfg.checkpoint:
            Checkpoints(f"{cfg.checkpoint}/reward").look(cfg)


def last_training(stages: list[Stage]) -> Stage | None:
    """The last of these stages that has a run of its own, whose model one may want."""
    found = [stage for stage in stages if stage.name in ("sync_rl", "async_rl")]
    return found[-1] if found else None


@contextlib.contextmanager
def blaming(parser: Parser, flag: str) -> Iterator[None]:
    """What the body raises is that flag's fault, whatever somebody's file or model raises."""
    try:
        yield
    except (Exception, SystemExit) as error:
        what = "" if isinstance(error, TaskError) else f"{type(error).__name__}: "
        parser.error(f"{flag}: {what}{' '.join(str(error).split())}")


# -- plumbing: what is tried before a run ----------------------------------------------------------
# Wrong usage is found before any process is started, by trying: the task draws a prompt, the model
# is loaded once, files are opened, hosts are called. It gets one line that says what is wrong.


def try_all(parser: Parser, cfg: Config, stages: list[Stage], worker: str | None) -> None:
    """Finds out what cannot work, each thing by trying it."""
    with blaming(parser, f"--task {cfg.task} ({', '.join(TASKS)}, FILE.py:CLASS or FILE.jsonl)"):
        try_task(cfg)
    with blaming(parser, "--device cuda"):
        if not cfg.hosts:  # else the hosts will tell
            device_of(cfg, Place(service="trainer", replica_id=0), cfg.trainers - 1)
    lacks = ""
    with blaming(parser, f"--model {cfg.model}"):
        # To export alone starts no process.
        starts_processes = bool(stages or cfg.evaluate)
        if cfg.model != "tiny" and not cfg.hosts and starts_processes:
            shapes = Policy(cfg, is_empty=True).model
            lacks = what_memory_lacks(cfg, num_parameters(shapes), trains=bool(stages))
    if lacks:
        parser.error(lacks)
    try_model(parser, cfg)
    with blaming(parser, f"--tensor-parallel {cfg.tensor_parallel}"):
        if cfg.tensor_parallel > 1:
            cuts_of(Policy(cfg, is_empty=True).model, cfg.tensor_parallel)
    with blaming(parser, f"--export {cfg.export}"):
        if cfg.export:
            try_export(cfg)
    with blaming(parser, "--checkpoint"):
        if cfg.checkpoint:
            try_checkpoints(cfg, stages)
    try_hosts(parser, cfg, worker)
    with blaming(parser, "--json, --log, --trace, --report"):
        files = [path for path in (cfg.json, cfg.trace, cfg.report) if path]
        # Each of these is first written under another name, so both names are tried.
        files += [written_first(path) for path in files]
        if cfg.log:  # to which lines are added, under its own name
            files.append(cfg.log)
        try_files(files)


def try_checkpoints(cfg: Config, stages: list[Stage]) -> None:
    """Can runs go on from what lies in the folder of --checkpoint? Raises ValueError if not."""
    names = ["sync_rl", "async_rl"]
    if cfg.sft_steps:
        names.append("sft")
    for name in names:
        path, _ = Checkpoints(f"{cfg.checkpoint}/{name}").look(cfg)
        if not path or STAGES.get(name) not in stages:
            continue
        state = torch.load(path, weights_only=True, mmap=True)["state"]
        num_made = len(json.loads(state)["rows"])
        if num_made > num_steps_of(cfg, name):
            planned = f"with --steps {cfg.steps} {name} has {num_steps_of(cfg, name)}"
            raise ValueError(
                f"{path} is of step {num_made}, {planned}: give more, or another folder"
            )


def try_hosts(parser: Parser, cfg: Config, worker: str | None) -> None:
    """Is the secret one, do the workers of --hosts know it, and does --worker need it?"""
    if cfg.secret and not cfg.hosts and not worker:
        parser.error("--secret goes with --worker or --hosts")
    if cfg.relay_fanout and not cfg.hosts:
        parser.error("--relay-fanout goes with --hosts")
    if cfg.trainer_hosts > 1:
        if cfg.trainer_hosts > len(cfg.hosts.split(",")):
            parser.error(f"--trainer-hosts {cfg.trainer_hosts}: --hosts names fewer")
        if cfg.trainers % cfg.trainer_hosts:
            parser.error(f"--trainers {cfg.trainers} cannot be shared by {cfg.trainer_hosts} hosts")
        if has_critic(cfg):
            parser.error("--baseline critic is of one host: it does not go with --trainer-hosts")
    with blaming(parser, f"--secret {cfg.secret}"):
        read_secret(cfg.secret)
    addresses = cfg.hosts.split(",") if cfg.hosts else []
    for address in addresses:
        with blaming(parser, f"--hosts {address}"):
            connect(address, cfg.secret)
    with blaming(parser, f"--worker {worker}"):
        if worker:
            check_door(worker, cfg.secret)


def lock_folder(folder: str) -> None:
    """Keeps other commands from training into this folder, until this process ends.

    Two of them would take each other's checkpoints for their own. ValueError: another one has it.
    OSError: nothing can be written there, or in a folder of a run in it. (What else it holds is not
    ours: a disk has a folder lost+found, into which nobody may write.)
    """
    os.makedirs(folder, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)  # it stays open; the system gives the lock back
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"another command trains into {folder}") from None
    tempfile.TemporaryFile(dir=folder).close()
    for name in ("sync_rl", "async_rl", "sft", "reward"):
        if os.path.isdir(f"{folder}/{name}"):
            tempfile.TemporaryFile(dir=f"{folder}/{name}").close()


def try_model(parser: Parser, cfg: Config) -> None:
    """Can the model be loaded, and has its kind a form with a number for each token?"""
    if cfg.model == "tiny":
        return
    with blaming(parser, f"--model {cfg.model}"):  # "meta": what was loaded is not kept
        Policy(dataclasses.replace(cfg, device="meta"), torch.bfloat16)
    # Transformers has such a form of most models, and not of all. It is built without weights, for
    # what is tried here is only whether it can be.
    for flag, is_given in {
        "--baseline critic": has_critic(cfg),
        "--reward model": cfg.reward == "model",
    }.items():
        with blaming(parser, f"{flag} with --model {cfg.model}"):
            if is_given:
                scalar_network(cfg, is_empty=True)


def try_task(cfg: Config) -> None:
    """Can prompts be drawn, with as many turns as the task says?"""
    sampler = Sampler(cfg.task, cfg.seed)
    prompt = sampler.validation[0]  # IndexError: it draws too few different conversations
    if len(prompt.turns) != sampler.task.num_turns:
        raise ValueError(f"a conversation has {len(prompt.turns)} turns, not num_turns")
    if cfg.model == "tiny" and isinstance(sampler.task, FileTask):
        try_letters(sampler)


def try_letters(sampler: Sampler) -> None:
    """Has the tiny policy a token for all that is said in these conversations?

    What it has no token for it hears as the end of a turn. A file of prompts in words, without
    --model, would be trained on without an error, and nothing would be learned.
    """
    letters = set()
    for prompt in sampler.heldout + sampler.validation:
        for turn in prompt.turns:
            letters.update(turn.user, turn.right)
    unknown = letters - set(sampler.task.letters)
    if unknown:
        raise ValueError(f"the tiny policy has no token for {min(unknown)!r}: give a --model")


def try_preferences(cfg: Config) -> None:
    """Can all lines be read, and are there some to learn from? Raises ValueError if not."""
    preferences = preferences_of(cfg.preferences)
    learned, _ = divided(preferences)
    if not learned:
        raise ValueError("all of them have the same prompt: none is left to learn from")
    if cfg.model == "tiny":
        letters = set()
        for one in preferences:
            letters.update(one.prompt, one.chosen, one.rejected)
        unknown = letters - set(task_of(cfg.task).letters)
        if unknown:
            raise ValueError(f"the tiny policy has no token for {min(unknown)!r}: give a --model")


def try_export(cfg: Config) -> None:
    """Can a folder be made there, and is nothing in it that would be lost?"""
    path = pathlib.Path(cfg.export)
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise FileExistsError("it is there, and is no empty folder")
    tempfile.TemporaryDirectory(dir=path.absolute().parent).cleanup()
    if cfg.model != "tiny":
        # transformers does not write settings of generation that contradict each other.
        with contextlib.suppress(OSError):  # it has none
            settings = transformers.GenerationConfig.from_pretrained(cfg.model)
            settings.validate(strict=True)


def read_comparison(parser: Parser, path: str) -> dict[str, Any] | None:
    """What --json of an earlier command has written. None: --compare is not given."""
    if not path:
        return None
    with blaming(parser, f"--compare {path}"):
        measured = read_measured(path)
        try:
            page_of(measured, [], measured)  # on both sides
        except Exception as error:  # whatever is missing in it
            raise ValueError("not what --json writes, or written by another version") from error
        return measured


def try_files(paths: list[str]) -> None:
    """Can each of these files be written? A file that was not there is removed again."""
    for path in paths:
        is_there = os.path.exists(path)
        with open(path, "a" if is_there else "x", encoding="utf-8"):
            if not is_there:
                os.remove(path)


# -- plumbing: running the stages ------------------------------------------------------------------


def lab_for(report: Report, cfg: Config) -> Lab:
    """A Lab with the Cluster and the Training that these flags need."""
    cluster_class = CriticCluster
    training_class = SafeTraining
    if cfg.reward == "model":
        cluster_class = RewardCluster
        training_class = RewardTraining
    if cfg.hosts:
        cluster_class = HostsCluster
    return Lab(report, cluster_class(cfg, tell=report.say), training_class)


async def run_stages(report: Report, command: Command) -> None:
    """Runs stages, one after the other.

    An exception in a demo is a failed check of its stage, and the next stage runs.
    """
    cfg = command.cfg
    lab = lab_for(report, cfg)
    clock = asyncio.ensure_future(report.keep_clock())
    # The actors of RL end with the last stage that needs them.
    with_lab = [stage for stage in command.stages if stage.needs_lab]
    last_with_lab = with_lab[-1] if with_lab else None
    for stage in command.stages:
        if stage.needs_tcp and not command.has_tcp():
            await run_as_own_command(stage, report, cfg)
            continue
        start = time.monotonic()
        report.begin_stage(stage)
        try:
            await run_stage(stage, report, cfg, lab)
            if stage is last_training(command.stages):
                await after_training(report, lab)
        except Exception as error:
            tell_end(report, error)
        if stage is last_with_lab:
            report.at_end(lab.close)
        try:
            await report.end_all()
        except Exception as error:
            tell_end(report, error)
        report.end_stage(stage, since(start))
    await tell_trace(report, cfg)
    has_runs = any(found["curves"] for found in report.stages)
    if has_runs and (cfg.json or cfg.report):
        with contextlib.suppress(ActorError):  # if Telemetry is gone, no loss is marked
            report.enter_losses(await read_events())
    clock.cancel()
    if len(command.stages) == len(STAGES):
        tell_tour(report)


def tell_tour(report: Report) -> None:
    """Says in three lines what the whole tour has measured, and what to do next."""
    checks = []
    figures: dict[str, Any] = {}
    for found in report.stages:
        checks += found["checks"]
        if found["name"] in ("weight_sync", "async_rl"):
            figures.update(found["figures"])
    num_ok = sum(check["ok"] for check in checks)
    known = {name: show(figures.get(name)) for name in TOUR_FIGURES}
    for line in TOUR_END:
        report.say(line.format(num_ok=num_ok, num_checks=len(checks), **known), indent="")


# Figures of stages weight_sync and async_rl, and what is said of them at the end of the tour.
TOUR_FIGURES = (
    "sync_over_memmove",
    "torn_reads",
    "lag_max",
    "heldout_before",
    "heldout_after",
)
TOUR_END = (
    "{num_ok} of {num_checks} checks hold. A sync took {sync_over_memmove} memmoves, and "
    "{torn_reads} reads were torn.",
    "Lag was {lag_max} at most; exact answers: {heldout_before} before RL, {heldout_after} after "
    "it.",
    "Next: --only async_rl --model FOLDER --task FILE.jsonl --report PAGE.html",
)


# When an error in somebody's task ends a stage, a check fails, and what it has got begins with
# these words. Such an error is told in full: what workers said last, which is shown after other
# failures, would add nothing.
IN_THE_TASK = "in the task: "


def tell_end(report: Report, error: Exception, of_what: str = "stage") -> None:
    """Tells what ended a stage, or a command, as a failed check; on stderr, where it was raised."""
    what = f"errors that ended the {of_what}"
    why = cause(error)
    if isinstance(why, TaskError):
        first, *_ = str(why).splitlines()
        report.check(what, IN_THE_TASK + first, "==", "none")
        sys.stderr.write(visible(f"{why}\n"))
    elif isinstance(why, NotWritten):
        report.check(what, str(why), "==", "none")
    else:
        report.check(what, repr(why)[:300], "==", "none")
        sys.stderr.write(visible("".join(traceback.format_exception(error))))


def is_explained(found: dict[str, Any]) -> bool:
    """Has a stage, as --json has it, ended with an error in the task, or for want of a disk?"""
    told_whole = (IN_THE_TASK, CANNOT_WRITE)
    return any(check["got"].startswith(told_whole) for check in found["checks"])


async def run_stage(
    stage: Stage,
    report: Report,
    cfg: Config,
    lab: Lab,
) -> None:
    """Runs the demo of a stage, with what it needs."""
    if not stage.needs_lab:
        await stage.demo(report, cfg)
        return
    await lab.start()
    if cfg.sft_steps and lab.cluster.owner_of_base is None:  # also if they failed a stage before
        await take_sft_steps(lab.cluster, report)
    if isinstance(lab.cluster, RewardCluster) and lab.cluster.base_reward is None:
        await teach(lab.cluster, report)
    await stage.demo(report, cfg, lab)
    if isinstance(lab.cluster, HostsCluster):
        report.figure(**await lab.cluster.relay_figures())
    if cfg.report and stage.name == "async_rl":
        await sweep(report, cfg, lab)


async def run_as_own_command(stage: Stage, report: Report, cfg: Config) -> None:
    """Runs a stage that needs the other transport: as a process of its own.

    That one prints, head and foot too. What it measured is taken over.
    """
    report.doing(f"{stage.name}, as a command of its own")
    result = unnamed_file("result")  # its figures, as --json has them
    command = [sys.executable, os.path.abspath(__file__), "--only", stage.name]
    process = await asyncio.create_subprocess_exec(
        *command, "--seed", str(cfg.seed), "--json", result, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None, "it was asked for"
    async for line in process.stdout:
        report.say(line.decode().rstrip("\n"), indent="")
    await process.wait()
    written = pathlib.Path(result).read_text(encoding="utf-8")
    if written:
        report.take_over(json.loads(written)["stages"][0])
    else:  # it has ended before its end
        report.begin_stage(stage)
        report.check("exit status", process.returncode, "==", 0)
        report.end_stage(stage, 0.0)


def leave(status: int, line: str = "") -> None:
    """Ends this process, and before it all that it has started, and with them their memory.

    status: the exit status. line: what to say of it on the terminal. It may be called from a signal
    handler.
    """
    if LEAVING.is_set():  # a second Ctrl-C, or news of somebody who was just killed
        time.sleep(1.0)
        return
    LEAVING.set()
    end = time.monotonic() + 10.0
    num_quiet = 0  # looks in a row that found nobody: a process may be on its way while we look
    # Children of children, too: a worker with a model is a child of the template, not of us.
    while num_quiet < 5 and time.monotonic() < end:
        found = descendants(os.getpid())
        num_quiet = 0 if found else num_quiet + 1
        kill(found)
        time.sleep(0.02)
    if line:
        # In a thread, for a write may wait: for a terminal that was stopped with Ctrl-S, or for the
        # end of another write, in which a signal has found this very thread.
        words = f"monarch_rl: {visible(line)}\n"
        telling = threading.Thread(target=sys.stderr.write, args=(words,), daemon=True)
        telling.start()
        telling.join(2.0)  # mechanism: nobody may read it
    os._exit(status)


def main(argv: list[str] | None = None) -> None:
    """The command. argv: its arguments; None: those of this process."""
    prepare_environment()
    command = parse(argv)
    # What needs no actors.
    if command.lists:
        width = terminal_width(1000)
        for stage in STAGES.values():
            start = f"{stage.number:2d}  {stage.name:<14s} line {line_of_section(stage):<5} "
            print(folded(start + stage.claim, width, len(start)))
        return
    if command.worker:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: leave(0))
        serve(command.worker, command.cfg.secret)  # never returns
    # How messages travel. Other hosts must be able to answer, so this one needs an address that
    # they can reach: the one from which it reaches them.
    cfg = command.cfg
    if cfg.hosts:
        first, *_ = cfg.hosts.split(",")
        enable_transport(url(connect(first, cfg.secret).my_name, 0))
    elif command.has_tcp():
        enable_transport("tcp://127.0.0.1:0")
    noise = keep_noise()
    signal.signal(signal.SIGINT, lambda *_: leave(130, "interrupted"))
    # For a death that no owner has handled, which would be a mistake in this file. Monarch's own
    # hook ends the process as well, but leaves others behind.
    monarch.actor.unhandled_fault_hook = lambda failure: leave(1, f"an actor died: {failure}")
    report = Report()
    try:
        run = run_without_training if command.sides else run_stages
        asyncio.run(run(report, command))
    except Interrupted as error:
        leave(130, str(error))
    except BrokenPipeError:  # `monarch_rl.py | head` has read enough
        leave(1)
    finish(report, command, noise)


def keep_noise() -> Any:
    """Keeps off the terminal what is not said to you. Returns the file in which it is."""
    # Descriptor 2, which our processes inherit, becomes an unnamed file: Monarch reports there what
    # the demos provoke. sys.stderr keeps the terminal.
    noise = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stderr = os.fdopen(os.dup(2), "w", buffering=1)
    os.dup2(noise.fileno(), 2)
    # Without a card Monarch warns that bytes travel by TCP. Stage 3 says which way they travel.
    warnings.filterwarnings("ignore", message="No ibverbs RDMA hardware")
    return noise


def finish(report: Report, command: Command, noise: Any) -> None:
    """Writes --json and --report, says what has failed, and leaves.

    noise: the file of what workers said.
    """
    cfg = command.cfg
    cores = len(os.sched_getaffinity(0))
    measured = {
        "version": JSON_VERSION,
        "args": dataclasses.asdict(cfg),
        "machine": {**versions(), "version": VERSION, "cores": cores},
        "stages": report.stages,
    }
    if cfg.json:
        with excusing(report, "--json"):
            write_file(cfg.json, as_json(measured, indent=1))
    if cfg.report:
        page = page_of(finite(measured), report.sweep, command.beside)
        with excusing(report, "--report"):
            write_file(cfg.report, page)
    failed = [found["name"] for found in report.stages if not found["ok"]] + report.unwritten
    unexplained = [found for found in report.stages if not found["ok"] and not is_explained(found)]
    if failed and not unexplained:  # the workers said the same, at length
        leave(1, f"failed: {', '.join(failed)}")
    if failed:
        noise.seek(0)
        last_words = "".join(f"  | {line}" for line in noise.readlines()[-20:])
        names = ", ".join(failed)
        leave(1, f"failed: {names}; what the workers said last:\n{last_words}")
    leave(0)


# -- plumbing: what --trace and --report write -----------------------------------------------------
# Both show what Telemetry has collected: a trace of the command, for Perfetto (without stage 16
# where that runs as a command of its own, as in the whole tour); and a page, for which stage 13
# makes five more asynchronous runs, one at each of five bounds on lag. A slider on the page goes
# from one to another.


def write_trace(path: str, events: list[Event]) -> None:
    """Writes a file in Chrome's trace format, which Perfetto opens.

    It has a row per actor, one for the copies that run beside a trainer's steps, and one per
    replica that was lost, for the time for which it was missing.
    """
    actors = dict.fromkeys(event.actor for event in events)  # each of them once
    numbers = {actor: i for i, actor in enumerate(actors)}
    entries: list[dict[str, Any]] = []
    for actor, number in numbers.items():
        name = {"name": actor}
        entries.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": name})
    for event in events:
        entries.append(
            {
                "ph": "X",
                "pid": 0,
                "tid": numbers[event.actor],
                "name": event.what,
                "ts": event.start_s * 1e6,  # microseconds
                "dur": (event.end_s - event.start_s) * 1e6,
            }
        )
    write_file(path, as_json({"traceEvents": entries}))


async def tell_trace(report: Report, cfg: Config) -> None:
    """Writes --trace, if it is asked for, at the end of a command."""
    if cfg.trace:
        with excusing(report, "--trace"):
            write_trace(cfg.trace, await read_events())


async def read_events(from_s: float = 0.0) -> list[Event]:
    """What Telemetry has, of this time and later. from_s: seconds since 1970."""
    store = await telemetry()
    return await store.read.call_one(from_s)


SWEEP_BOUNDS = (0, 1, 2, 4, 8)  # on lag


async def sweep(report: Report, cfg: Config, lab: Lab) -> None:
    """A run at each bound on lag, in each a generator killed half-way, for the page's slider."""
    cluster = lab.cluster
    runs = []
    rows = []
    for bound in SWEEP_BOUNDS:
        training = lab.training(f"K = {bound}", math.ceil(cfg.steps * 2 / 3))
        run = training.run
        heldout = run.sampler.heldout
        await with_retries(cluster, lambda: cluster.load(""))
        before = await evaluate(cluster, heldout)
        start_s = time.time()  # the page shows what has happened since
        loops = AsyncLoops(training, Flow.of(cfg, bound))
        running = asyncio.ensure_future(loops.run_to_end())
        try:
            if await until_step(run.num_steps // 2, run, running):
                await cluster.generators.strike(signal.SIGKILL)
            await running
        finally:
            await end_task(running)
        await cluster.generators.status(60.0)  # the next run begins with all of them
        after = await evaluate(cluster, heldout)
        await asyncio.sleep(2 * Recorder.SEND_AFTER_S)  # until the last events have come
        speed = speed_of(run, run.num_steps)
        lag = training.largest_lag()
        columns = dataclasses.asdict(speed)
        del columns["run"], columns["steps"]  # the bound says the one, and the other is the same
        rows.append({"bound": bound, "lag": lag, "exact": after, **columns})
        runs.append(run_for_page(training, rows[-1], before, await read_events(start_s)))
    report.table(rows)
    num_above = sum(row["lag"] > row["bound"] for row in rows)
    report.check("runs of 5 with a lag above the bound", num_above, "==", 0)
    report.keep_sweep(runs)


def run_for_page(
    training: Training,
    row: dict[str, Any],
    before: float,
    events: list[Event],
) -> dict[str, Any]:
    """What the page has of one run. row: of the printed table; before: held-out exact."""
    return {
        "max_lag": row["bound"],
        "generators": training.cluster.num_generators,
        "before": before,
        "after": row["exact"],
        "row": row,
        "groups": training.run.ledger.counts,
        "samples": training.cfg.group_size * training.cfg.batch_groups * training.run.num_steps,
        "rows": [dataclasses.asdict(row) for row in training.run.rows],
        # Short, for there are tens of thousands: what, begin, end, actor.
        "events": [[event.what, event.start_s, event.end_s, event.actor] for event in events],
    }


# -- plumbing: the page ----------------------------------------------------------------------------
# --report shows a whole command on one page, which needs no network: what each stage found, what a
# weight sync cost, how a plan cuts a tensor, how runs went, and what was lost meanwhile. All that
# is made here is plain HTML, and is there without JavaScript, too. Only the timeline with its
# slider needs a script. With --compare, what an earlier command has measured stands beside it.
#
# What is shown may come from somebody's task, or file: it goes through `as_text` and stays text.

JSON_VERSION = 2  # of what --json writes


def read_measured(path: str) -> dict[str, Any]:
    """What --json of a command has written. ValueError: it is something else."""
    measured = json.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    if not isinstance(measured, dict) or measured.get("version") != JSON_VERSION:
        raise ValueError(f"not what --json writes in its version {JSON_VERSION}")
    return measured


def page_of(
    measured: dict[str, Any],
    sweep: list[dict[str, Any]],
    beside: dict[str, Any] | None,
) -> str:
    """The page.

    measured: what --json has of this command. sweep: runs at several bounds on lag, if there were
    any. beside: what --json has of another command, to compare with.
    """
    stages = {found["name"]: found for found in measured["stages"]}
    parts = {"This command": overview_part(measured)}
    if beside is not None:
        name = pathlib.Path(measured["args"].get("compare") or "another command").name
        parts[f"Beside {name}"] = comparison_part(measured, beside)
    if "weight_sync" in stages:
        parts["Weight sync"] = sync_part(stages["weight_sync"])
    if "reshard" in stages:
        parts["Resharding"] = plan_part()
    for name, found in stages.items():
        if found.get("curves"):
            parts[f"Runs of {name}"] = runs_part(found)
    if sweep:
        # There is no "<" in it, so whatever was said in these runs cannot end the script.
        runs = as_json(sweep).replace("<", "\\u003c")
        table = html_table([run["row"] for run in sweep], "runs at five bounds on lag")
        words = SWEEP_PART.replace("TABLE", table).replace("= RUNS;", f"= {runs};")
        parts["From synchronous to asynchronous"] = words
    parts["All that was measured"] = "".join(stage_part(found) for found in stages.values())

    links = []
    sections = []
    for number, (title, part) in enumerate(parts.items()):
        links.append(f'<a href="#part{number}">{as_text(title)}</a>')
        sections.append(f'<section id="part{number}"><h2>{as_text(title)}</h2>{part}</section>')
    nav = f'<nav aria-label="parts of this page">{" ".join(links)}</nav>'
    return f"{PAGE_HEAD}{nav}<main>{''.join(sections)}</main></html>\n"


def as_text(value: Any) -> str:
    """A value as the report prints it, in HTML; whatever it says stays text."""
    return html.escape(visible(show(value)))


def number_of(value: Any) -> float | None:
    """A figure, or what a check found, as a number; None: it is something else."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def html_table(rows: Sequence[dict[str, Any]], about: str) -> str:
    """A table, in a box of its own that can be scrolled, also with the keyboard.

    rows: each with the same keys, which are the heads. about: what it is, for who cannot see it.
    """
    if not rows:
        return ""
    lines = [""] * (1 + len(rows))
    for name in rows[0]:
        values = [row[name] for row in rows]
        is_words = any(number_of(value) is None for value in values if value is not None)
        kind = "word" if is_words else "number"
        lines[0] += f'<th scope="col" class="{kind}">{as_text(name.replace("_", " "))}'
        for i, value in enumerate(values, 1):
            lines[i] += f'<td class="{kind}">{as_text(value)}'
    body = "".join(f"<tr>{line}" for line in lines)
    box = f'<div class="box" tabindex="0" role="region" aria-label="{as_text(about)}">'
    return f"{box}<table>{body}</table></div>"


def verdict_of(found: dict[str, Any]) -> str:
    """How a stage has ended, in words."""
    num_checks = len(found["checks"])
    num_failed = sum(not check["ok"] for check in found["checks"])
    if found["ok"]:
        return f"ok, {num_checks} checks"
    return f"FAILED, {num_failed} of {num_checks} checks"


def overview_part(measured: dict[str, Any]) -> str:
    """What was run, when and on what, and how each stage ended."""
    command = shlex.join(["monarch_rl.py", *sys.argv[1:]])
    told = {
        "command": command,
        "ended at": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "seed": measured["args"].get("seed"),
        **measured["machine"],
    }
    facts = [{"this command": name, "value": show(value)} for name, value in told.items()]
    rows = []
    for found in measured["stages"]:
        ended = {"how it ended": verdict_of(found), "seconds": found["seconds"]}
        rows.append({"stage": found["name"], **ended})
    return html_table(rows, "stages") + html_table(facts, "this command")


def stage_part(found: dict[str, Any]) -> str:
    """All that --json has of a stage, folded up unless a check failed."""
    checks = []
    for check in found["checks"]:
        checks.append(
            {
                "verdict": "ok" if check["ok"] else "FAIL",
                "check": check["what"],
                "found": check["got"],
                "must be": check["want"],
            }
        )
    figures = [{"figure": name, "value": value} for name, value in found["figures"].items()]
    tables = [html_table(rows, f"measured in {found['name']}") for rows in found["tables"]]
    state = "" if found["ok"] else " open"
    title = f"{found['name']}: {verdict_of(found)}"
    head = f"<summary>{as_text(title)}</summary><p>{as_text(found['claim'])}</p>"
    body = html_table(checks, "checks") + "".join(tables) + html_table(figures, "figures")
    return f"<details{state}>{head}{body}</details>"


def difference(here: dict[str, Any], there: dict[str, Any], about: str) -> str:
    """A table of the values that differ. here, there: the same things by name."""
    rows = []
    for name in {**here, **there}:
        value = show(here.get(name))
        other = show(there.get(name))
        if value != other:
            rows.append({about: name, "this": value, "beside": other})
    return html_table(rows, f"{about} that differ") or f"<p>Every {about} is the same.</p>"


def figures_of(found: dict[str, Any]) -> dict[str, Any]:
    """Whatever a stage found, by name: seconds, figures, and what checks got."""
    figures = {"seconds": found["seconds"], **found["figures"]}
    for check in found["checks"]:
        figures[check["what"]] = check["got"]
    return figures


def figures_of_both(found: dict[str, Any], other: dict[str, Any]) -> str:
    """A table of what a stage found in two commands."""
    rows = []
    there = figures_of(other)
    for name, value in figures_of(found).items():
        left = number_of(value)
        right = number_of(there.get(name))
        times = None if left is None or not right else left / right
        columns = {"this": value, "beside": there.get(name), "ratio": times}
        rows.append({"found": name.replace("_", " "), **columns})
    return html_table(rows, f"{found['name']} of both")


# Flags that say where to write: between two commands they differ, and mean nothing.
WRITTEN_TO = ("json", "log", "trace", "report", "compare")


def flags_of(measured: dict[str, Any]) -> dict[str, Any]:
    """What a command was told, without these flags."""
    return {name: value for name, value in measured["args"].items() if name not in WRITTEN_TO}


def comparison_part(measured: dict[str, Any], beside: dict[str, Any]) -> str:
    """Two commands, laid side by side, as far as both have the same stages."""
    parts = [
        difference(flags_of(measured), flags_of(beside), "flag"),
        difference(measured["machine"], beside["machine"], "part of the machine"),
    ]
    others = {found["name"]: found for found in beside["stages"]}
    of_both = [found for found in measured["stages"] if found["name"] in others]
    if not of_both:
        parts.append("<p>The two have no stage in common.</p>")
    for found in of_both:
        other = others[found["name"]]
        parts.append(f"<h3>{as_text(found['name'])}</h3>")
        if found["name"] == "weight_sync":
            both = []
            for pair in itertools.zip_longest(sync_bars(found), sync_bars(other, ", beside")):
                both += [bar for bar in pair if bar is not None]
            parts.append(bars(both, "weight sync of both"))
        curves = curves_of(found, "reward") + curves_of(other, "reward", is_beside=True)
        parts.append(plot(curves, "Reward of each step, over seconds; the other one dashed"))
        parts.append(figures_of_both(found, other))
    return "".join(parts)


# -- plumbing: pictures of the page ----------------------------------------------------------------
# Each is an SVG, a drawing that stands in the page as text: bars, grids, curves and histograms.
# Whoever cannot see it gets its label, and what it shows stands in a table as well.


def svg(kind: str, size: str, about: str, drawn: Iterable[str]) -> str:
    """A drawing. kind: its class in CSS; size: its attributes for width and height."""
    head = f'<svg class="{kind}" {size} role="img" aria-label="{as_text(about)}">'
    return f"{head}{''.join(drawn)}</svg>"


@dataclass(frozen=True)
class Bar:
    """Of a picture: how much something takes, as a bar."""

    name: str
    value: float  # above 0
    note: str  # stands under the bar
    kind: str  # its color


def bars(rows: Sequence[Bar], about: str) -> str:
    """Bars, as long as what they stand for, or as its logarithm if that differs much.

    Their widths are percentages and their words have a size of their own, so that words stay
    readable in a narrow window.
    """
    if not rows:
        return ""
    longest = max(row.value for row in rows)
    shortest = min(row.value for row in rows)
    is_log = longest > 10 * shortest

    def share(value: float) -> str:
        if is_log:
            start = shortest / 2
            return f"{100 * math.log(value / start) / math.log(longest / start):.1f}%"
        return f"{100 * value / longest:.1f}%"

    drawn = []
    high = 56 * len(rows)
    for tick in (1, 10, 100):
        if not shortest / 2 < tick <= longest:
            continue
        drawn.append(f'<line x1="{share(tick)}" x2="{share(tick)}" y1="0" y2="{high}"/>')
        drawn.append(f'<text x="{share(tick)}" y="{high + 16}" text-anchor="end">{tick} x</text>')
    for number, row in enumerate(rows):
        y = 56 * number
        fill = f'style="fill:var(--{row.kind})"'
        drawn.append(f'<text class="name" y="{y + 14}">{as_text(row.name)}</text>')
        drawn.append(f'<rect y="{y + 19}" width="{share(row.value)}" height="12" {fill}/>')
        drawn.append(f'<text y="{y + 45}">{as_text(row.note)}</text>')
    told = "; ".join(f"{row.name}: {row.note}" for row in rows)
    words = "The scale is logarithmic." if is_log else "The scale begins at 0."
    drawing = svg("bars", f'width="100%" height="{high + 20}"', f"{about}. {told}", drawn)
    return f"<figure><figcaption>{words}</figcaption>{drawing}</figure>"


def sync_bars(found: dict[str, Any], suffix: str = "") -> list[Bar]:
    """A bar for each road of stage weight_sync."""
    rows: list[Bar] = []
    if not found["tables"]:  # the stage ended before
        return rows
    for row in found["tables"][0]:
        note = f"{show(row['ms'])} ms, {show(row['x_memmove'])} x memmove"
        kind = "other" if suffix else "publish"
        if row["torn"]:
            note += f", {row['torn']} of {row['reads']} torn"
            kind = "lost"
        rows.append(Bar(name=row["road"] + suffix, value=row["x_memmove"], note=note, kind=kind))
    return rows


def sync_part(found: dict[str, Any]) -> str:
    """What a version cost on each road."""
    rows = sync_bars(found)
    if not rows:
        return "<p>The stage ended before it had measured anything.</p>"
    words = "From the start of a publish until the last generator has the version, in copies of "
    words += "as many bytes by memmove. The number behind a road is how many generators there are. "
    words += "Red, torn: reads that hold two versions."
    return f"<p>{words}</p>{bars(rows, 'weight sync')}"


Cells = dict[Index, tuple[int, bool]]  # by its place, an element's rank, and: does it move?


def plan_part() -> str:
    """A plan, drawn: six trainer ranks, of which two have the same rows, and two by columns."""
    shape = (6, 4)
    source = layout(shape, (2, 3), (dtensor.Replicate(), dtensor.Shard(0)))
    target = layout(shape, (2,), (dtensor.Shard(1),))
    moves = plan("w", source, target)
    read: set[tuple[int, Index]] = set()  # pairs of a rank and a place
    parts: list[Cells] = [{}, {}]  # of each target rank
    for move in moves:
        for place in places(move.offset, move.size):
            read.add((move.source, place))
            parts[move.target][place] = (move.source, True)
    num_held = sum(math.prod(box.size()) for held in source for box in held)
    num_moved = sum(math.prod(move.size) for move in moves)
    drawn = []
    for replica in (0, 1):
        cells: Cells = {}
        for rank in range(3 * replica, 3 * replica + 3):
            [box] = source[rank]
            for place in places(box.start, box.size()):
                cells[place] = (rank, (rank, place) in read)
        drawn.append(grid(shape, cells, f"trainer, copy {replica + 1}: its ranks have rows"))
    for rank, part in enumerate(parts):
        drawn.append(grid(shape, part, f"generator rank {rank}: from which rank each comes"))
    words = "A tensor of 6 x 4 elements, as section 8 plans it. Six trainer ranks hold each of its "
    words += f"elements twice, {num_held} in all, and {len(moves)} moves write {num_moved}: "
    words += "of two copies one is read. What is not read is not filled."
    rows = []
    for move in moves:
        row = dataclasses.asdict(move)
        del row["name"]
        rows.append({**row, "elements": math.prod(move.size)})
    return f'<p>{words}</p><div class="four">{"".join(drawn)}</div>{html_table(rows, "moves")}'


def places(start: Index, size: Index) -> Iterator[Index]:
    """Every place of a cuboid."""
    sides = zip(start, size, strict=True)
    return itertools.product(*[range(first, first + length) for first, length in sides])


def grid(shape: Index, cells: Cells, about: str) -> str:
    """A drawing of a matrix, of which some elements are there."""
    num_rows, num_columns = shape
    drawn = []
    for (row, column), (rank, is_moved) in cells.items():
        at = f'x="{4 + column * 50}" y="{4 + row * 26}"'
        middle = f'x="{27 + column * 50}" y="{20 + row * 26}"'
        fill = f"var(--rank{rank})" if is_moved else "none"
        drawn.append(f'<rect {at} width="46" height="22" style="fill:{fill}"/>')
        drawn.append(f'<text {middle} text-anchor="middle">r{rank}</text>')
    size = f'viewBox="0 0 {8 + num_columns * 50} {8 + num_rows * 26}"'
    return f"<figure><figcaption>{about}</figcaption>{svg('grid', size, about, drawn)}</figure>"


RED_DOT = '<svg width="24" height="12"><circle cx="12" cy="7" r="5"/></svg>'
CURVE_KINDS = ("step", "rollout", "publish", "judge", "delta")  # colors of curves


@dataclass(frozen=True)
class Curve:
    """A line of a plot."""

    name: str
    kind: str  # its color
    is_dashed: bool
    points: list[tuple[float, float]]  # second, value
    lost_s: list[float]  # when something was lost


def curves_of(found: dict[str, Any], what: str, is_beside: bool = False) -> list[Curve]:
    """A curve for each run of a stage that has made steps."""
    curves = []
    for number, run in enumerate(found.get("curves", [])):
        pairs = zip(run["seconds"], run[what], strict=True)
        points = [(second, value) for second, value in pairs if value is not None]
        if points:
            curves.append(
                Curve(
                    name=run["run"] + (", beside" if is_beside else ""),
                    kind=CURVE_KINDS[number % len(CURVE_KINDS)],
                    is_dashed=is_beside,
                    points=points,
                    lost_s=[loss["second"] for loss in run["lost"]],
                )
            )
    return curves


def value_at(second: float, points: list[tuple[float, float]]) -> float:
    """Of the line through these points, at this second."""
    earlier = [point for point in points if point[0] <= second] or points[:1]
    later = [point for point in points if point[0] > second] or points[-1:]
    start_s, start = earlier[-1]
    end_s, end = later[0]
    share = (second - start_s) / (end_s - start_s) if end_s > start_s else 0.0
    return start + share * (end - start)


def plot(curves: list[Curve], about: str) -> str:
    """Curves over seconds, with a dot where something was lost; "" if there are none."""
    if not curves:
        return ""
    longest = max(curve.points[-1][0] for curve in curves) or 1.0
    values = [value for curve in curves for _, value in curve.points]
    least = min(0.0, *values)
    most = max(0.0, *values) if any(values) else 1.0  # all are 0: the scale must have a length

    def at(second: float, value: float) -> tuple[str, str]:
        height = 150 * (value - least) / (most - least)
        return f"{46 + 368 * second / longest:.1f}", f"{164 - height:.1f}"

    drawn = []
    keys = []
    for value in (least, (least + most) / 2, most):
        _, y = at(0.0, value)
        drawn.append(f'<line x1="46" x2="414" y1="{y}" y2="{y}"/>')
        drawn.append(f'<text x="40" y="{y}" dy="4" text-anchor="end">{show(value)}</text>')
    drawn.append('<text x="46" y="186">0 s</text>')
    drawn.append(f'<text x="414" y="186" text-anchor="end">{show(float(longest))} s</text>')
    for curve in curves:
        corners = " ".join(",".join(at(*point)) for point in curve.points)
        dashes = ' stroke-dasharray="5 4"' if curve.is_dashed else ""
        stroke = f'style="stroke:var(--{curve.kind})"{dashes}'
        drawn.append(f'<polyline points="{corners}" {stroke}/>')
        line = f'<svg width="24" height="8"><polyline points="0,4 24,4" {stroke}/></svg>'
        keys.append(f"<span>{line} {as_text(curve.name)}</span>")
        for second in curve.lost_s:
            x, y = at(second, value_at(second, curve.points))
            drawn.append(f'<circle cx="{x}" cy="{y}" r="5"/>')
    if any(curve.lost_s for curve in curves):
        keys.append(f"<span>{RED_DOT} a replica was lost</span>")
    key = f'<p class="key">{"".join(keys)}</p>'
    drawing = svg("plot", 'viewBox="0 0 420 192"', about, drawn)
    return f"<figure><figcaption>{as_text(about)}</figcaption>{key}{drawing}</figure>"


def histogram(counts: list[int], about: str) -> str:
    """How many per cent of all have the value 0, 1, 2, ..."""
    wide = 280 / max(6, len(counts))
    every = 1 + len(counts) // 12  # only every so many bars have words, else these overlap
    shares = [100 * count / max(1, sum(counts)) for count in counts]
    drawn = []
    for number, share in enumerate(shares):
        x = 10 + number * wide
        y = 130 - share
        drawn.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.9 * wide:.1f}" height="{share:.1f}"/>'
        )
        if number % every == 0:
            middle = f'x="{x + 0.45 * wide:.1f}" text-anchor="middle"'
            drawn.append(f'<text {middle} y="{y - 5:.1f}">{share:.0f}</text>')
            drawn.append(f'<text {middle} y="146">{number}</text>')
    drawing = svg("plot", 'viewBox="0 0 300 150"', about, drawn)
    return f"<figure><figcaption>{as_text(about)}</figcaption>{drawing}</figure>"


def runs_part(found: dict[str, Any]) -> str:
    """Rewards and lag of the runs of a stage, and what was lost meanwhile."""
    rows = []
    lost = []
    histograms = []
    for run in found["curves"]:
        rewards = run["reward"]
        num_tokens = sum(run["lags"])
        weighed = sum(lag * count for lag, count in enumerate(run["lags"]))
        rows.append(
            {
                "run": run["run"],
                "steps": run["steps"],
                "seconds": max(run["seconds"], default=0.0),
                "first reward": rewards[0] if rewards else None,
                "last reward": rewards[-1] if rewards else None,
                "mean lag": weighed / num_tokens if num_tokens else None,
                "largest lag": len(run["lags"]) - 1 if num_tokens else None,
                "lost": len(run["lost"]),
            }
        )
        lost += [{"run": run["run"], **loss} for loss in run["lost"]]
        if num_tokens:
            about = f"{run['run']}: lag of tokens trained on, in versions (per cent of tokens)"
            histograms.append(histogram(run["lags"], about))
    plots = plot(curves_of(found, "reward"), "Reward of each step, over seconds")
    plots += plot(
        curves_of(found, "lag_max"), "Largest lag of each step, in versions, over seconds"
    )
    drawn = f'<div class="two">{plots}</div>'
    drawn += f'<div class="four">{"".join(histograms)}</div>'
    return drawn + html_table(rows, "runs") + html_table(lost, "replicas that were lost")


# -- plumbing: the text of the page ----------------------------------------------------------------
# HTML, CSS and JavaScript, and not what this file is about. The script draws the timeline of the
# runs of `sweep`, at the bound on lag that the slider shows.


PAGE_HEAD = r"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>monarch_rl: what a run has measured</title>
<style>
:root { color-scheme: light dark; --ink: #1c2330; --pale: #5c6675; --paper: #fff; --line: #d5dae2;
  --rollout: #1f77b4; --judge: #9467bd; --step: #e07b00; --publish: #12805c; --delta: #8a6d3b;
  --pull: #7fc4f5; --other: #868f9a; --lost: #d62728; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaf0; --pale: #a2acba; --paper: #14181f;
  --line: #343c48; --rollout: #4aa3e0; --judge: #b796dc; --step: #ff9f3d; --publish: #3cc795;
  --delta: #c9a55c; --pull: #a9d8fa; --other: #6d7682; --lost: #ff6b6b; } }
body { margin: 0 auto; padding: 1rem; max-width: 68rem; font: 1rem/1.45 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.4rem; margin: 0 } h2 { font-size: 1rem; margin: 1.4rem 0 .3rem }
p, td, th, label, li { color: var(--pale) } p { margin: .3rem 0 } b, output { color: var(--ink) }
input[type=range] { width: 100%; height: 2rem; accent-color: var(--step) }
.ends { display: flex; justify-content: space-between; color: var(--pale); font-size: .85rem }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .5rem }
dl div { border: 1px solid var(--line); border-radius: .4rem; padding: .4rem .6rem }
dt { color: var(--pale); font-size: .8rem } dd { margin: 0; font-size: 1.15rem }
svg { display: block; width: 100%; background: var(--paper) } svg text { fill: var(--pale) }
.key span { display: inline-block; margin-right: .9rem } .key i { display: inline-block;
  width: .8rem; height: .8rem; margin-right: .3rem; vertical-align: -.05rem }
pre { overflow-x: auto; margin: 0 } .two { display: grid; gap: 0 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)) }
h3 { font-size: .9rem; margin: .8rem 0 .2rem }
section { margin-bottom: 2rem }
nav a { display: inline-block; margin: .2rem .9rem .2rem 0 }
a { color: var(--link) }
:root { --link: #0a58a8;
  --rank0: #9ecae9; --rank1: #ffbf79; --rank2: #a8d8b9;
  --rank3: #d5e8f6; --rank4: #ffe3c2; --rank5: #dcf0e3 }
@media (prefers-color-scheme: dark) { :root { --link: #8ec5ff;
  --rank0: #24567d; --rank1: #7a480d; --rank2: #1f6b4f;
  --rank3: #1d3347; --rank4: #46300f; --rank5: #193b2e } }
:focus-visible { outline: 3px solid var(--link); outline-offset: 2px }
.box { overflow-x: auto; margin: .5rem 0; font-size: .9rem }
table { border-collapse: collapse }
.box th, .box td { padding: .2rem .4rem; border-bottom: 1px solid var(--line); text-align: left }
.box .number { text-align: right; font-variant-numeric: tabular-nums }
.box td { color: var(--ink) }
summary { cursor: pointer; padding: .3rem 0 }
details p { margin-left: 1rem }
figure { margin: .5rem 0 }
figcaption { color: var(--ink); font-size: .9rem }
svg text { font-size: 13px }
svg line { stroke: var(--line) }
svg rect { fill: var(--step) }
svg polyline { fill: none; stroke-width: 2 }
svg.bars { max-width: 44rem; overflow: visible }
svg.bars text { paint-order: stroke; stroke: var(--paper); stroke-width: 3px }
svg.bars .name { fill: var(--ink) }
svg.plot { max-width: 36rem }
.four svg.plot { max-width: 18rem }
.four svg.plot text { font-size: 17px }
svg circle { fill: var(--lost); stroke: var(--paper) }
svg.grid { max-width: 16rem }
svg.grid text { fill: var(--ink) }
svg.grid rect { stroke: var(--other) }
.key svg { display: inline-block; width: 24px }
.four { display: grid; gap: 0 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 11rem), 1fr)) }
</style>
<h1>monarch_rl: what a run has measured</h1>
"""

SWEEP_PART = r"""
<p>Measured runs, as long as each other, from the same weights. K is how many versions old a sample
  may be when it is trained on. With K = 0 each side waits for the other; a larger K fills the gaps,
  and its price is lag. In each run a generator was killed half-way.</p>
<noscript><p>With JavaScript a timeline with a slider stands here, too.</p></noscript>
<div id="live" hidden>
<label for="bound">Bound on lag: <output id="shown"></output></label>
<input type="range" id="bound" min="0" value="0" step="1">
<div class="ends"><span>K = 0, fully synchronous</span><span id="last"></span></div>
<dl id="numbers" aria-live="polite"></dl>
<h3>Who did what</h3>
<p class="key" id="key"></p>
<svg id="timeline" role="img"></svg>
<label for="from">From second <output id="second"></output></label>
<input type="range" id="from" min="0" max="1000" value="0">
<label>Shown: <select id="width">
<option value="1">1 s</option><option value="3" selected>3 s</option>
  <option value="10">10 s</option><option value="1e9">the whole run</option></select></label>
<ul id="faults"></ul>
<div class="two">
<div><h3>Share of the time at work: trainer (orange), generators (blue)</h3>
  <svg id="work" role="img"></svg></div>
<div><h3>Reward of each step, over seconds</h3><svg id="reward" role="img"></svg></div>
<div><h3>Lag of the tokens trained on, in versions</h3><svg id="lag" role="img"></svg></div>
<div><h3>Heard &gt; said, first steps and last</h3>
  <pre id="said" tabindex="0" role="region" aria-label="heard and said"></pre></div>
</div>
</div>
TABLE
<script>
document.getElementById("live").hidden = false;
const RUNS_OF_PAGE = RUNS;
const $ = id => document.getElementById(id), sum = some => some.reduce((a, b) => a + b, 0);
// What came from elsewhere (names, reasons of losses) goes into markup as text.
const safe = words => String(words).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
const names = {rollout: "generate", judge: "judge", step: "train", publish: "publish",
  delta: "find what changed", pull: "pull (thin: well under 1 ms)", other: "other",
  lost: "lost, until replaced"};
const kind = e => e.actor.endsWith(" lost") ? "lost"
  : Object.hasOwn(names, e.what) ? e.what : "other";
// Times count from the first rollout. An actor has a lane, in which its copies and losses are
// drawn, too; each rank from 1 on has a lane of its own.
const runs = RUNS_OF_PAGE.map(run => {
  const events = run.events.map(([what, start, end, actor]) => ({what, start, end, actor}));
  const began = events.filter(e => kind(e) == "rollout").map(e => e.start);
  const zero = began.reduce((a, b) => Math.min(a, b), Infinity);
  events.forEach(e => { e.start -= zero; e.end -= zero; e.kind = kind(e);
    const rank = /\.[1-9]\d*/.exec(e.actor) || "";
    e.lane = e.actor.split(".")[0].replace(/ (lost|copies)$/, "") + rank; });
  const seconds = run.rows.at(-1).seconds;
  const shown = events.filter(e => e.start < seconds && e.end > 0);
  const lags = [];
  run.rows.forEach(row => row.lags.forEach((n, i) => lags[i] = (lags[i] || 0) + n));
  return {...run, seconds, lags, events: shown, lanes: [...new Set(shown.map(e => e.lane))].sort()};
});
const longest = Math.max(...runs.map(run => run.seconds));
const fill = kind => `style="fill:var(--${kind})"`;
const text = (x, y, words, end = "start") =>
  `<text x="${x}" y="${y}" font-size="12" text-anchor="${end}">${safe(words)}</text>`;
const percent = share => (100 * share).toFixed(0) + " %";
// The seconds between from and to in which these lanes were at work at this kind.
const busy = (run, lane, kind, from, to) => sum(run.events.map(e =>
  lane.test(e.lane) && e.kind == kind
  ? Math.max(0, Math.min(e.end, to) - Math.max(e.start, from)) : 0));
const shares = (run, from, to) => [busy(run, /^trainer 0$/, "step", from, to),
  busy(run, /^generator/, "rollout", from, to) / run.generators].map(s => s / (to - from));
function plot(id, curves, words) {  // curves: [kind, [[x, y in 0..1]], opacity]
  const width = 420, height = 190;
  const x = v => 34 + v * (width - 40), y = v => 8 + (1 - v) * (height - 30);
  const grid = [0, .5, 1].map(v => `<line x1="34" x2="${width - 6}" y1="${y(v)}" y2="${y(v)}"
    style="stroke:var(--line)"/>` + text(28, y(v) + 4, v, "end"));
  const lines = curves.map(([kind, points, opacity]) => `<polyline fill="none" stroke-width="2"
    opacity="${opacity}" style="stroke:var(--${kind})" points="` +
    points.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") + `"/>`);
  $(id).setAttribute("viewBox", `0 0 ${width} ${height}`);
  $(id).setAttribute("aria-label", words);
  $(id).innerHTML = [...grid, ...lines, text(34, height - 4, "0 s"),
    text(width - 6, height - 4, longest.toFixed(0) + " s", "end")].join("");
}
function drawNumbers(run) {
  const [train, work] = shares(run, 0, run.seconds);
  const lag = sum(run.lags.map((n, i) => (n || 0) * i)) / sum(run.lags);
  $("numbers").innerHTML = [["seconds for " + run.rows.length + " steps", run.seconds.toFixed(1)],
    ["samples trained on per s", (run.samples / run.seconds).toFixed(0)],
    ["generators at work", percent(work)], ["trainer at work", percent(train)],
    ["lag, mean and largest", `${lag.toFixed(2)}, ${run.lags.length - 1}`],
    ["groups dropped, too old", run.groups.dropped + " of " + run.groups.started],
    ["held-out exact", `${run.before.toFixed(3)} → ${run.after.toFixed(3)}`]]
    .map(([what, value]) => `<div><dt>${what}</dt><dd>${value}</dd></div>`).join("");
}
function drawTimeline(run, from, to) {
  const wide = $("timeline").clientWidth || 900, left = wide < 500 ? 0 : 96, high = 36;
  const x = t => left + (t - from) / (to - from) * (wide - left);
  const lanes = run.lanes.map((lane, i) => text(0, i * high + (left ? 22 : 10), lane) +
    `<line x1="0" x2="${wide}" y1="${i * high + high - 4}" y2="${i * high + high - 4}"
    style="stroke:var(--line)"/>`);
  const seen = run.events.filter(e => e.end > from && e.start < to);
  seen.sort((a, b) => (a.kind == "pull") - (b.kind == "pull"));  // thin ones on top
  const bars = seen.map(e => {
    const a = Math.max(x(e.start), left), b = Math.min(x(e.end), wide);
    const low = ["publish", "delta", "lost"].includes(e.kind);
    const what = e.kind == "other" ? e.what
      : e.kind == "lost" ? e.what + ", replaced" : names[e.kind];
    return `<rect class="${e.kind}" x="${a.toFixed(1)}" width="${Math.max(b - a, 1).toFixed(1)}"
      ${fill(e.kind)} y="${run.lanes.indexOf(e.lane) * high + (low ? 26 : 13)}"
      height="${low ? 5 : 12}"><title>${safe(e.actor)}: ${safe(what)},
      ${(1000 * (e.end - e.start)).toFixed(1)} ms</title></rect>`; });
  $("timeline").setAttribute("viewBox", `0 0 ${wide} ${run.lanes.length * high}`);
  $("timeline").setAttribute("aria-label",
    `${run.lanes.length} actors from ${from.toFixed(1)} s to ${to.toFixed(1)} s`);
  $("timeline").innerHTML = lanes.join("") + bars.join("");
  $("faults").innerHTML = run.events.filter(e => e.kind == "lost").map(e => `<li>${safe(e.lane)}
    ${safe(e.what)} at ${e.start.toFixed(1)} s, replaced after
    ${(e.end - e.start).toFixed(1)} s</li>`).join("");
}
// Three pictures: how busy trainer and generators were, in 24 parts of the run (half: of a part);
// the reward, with that of other runs pale; and what share of the tokens had each lag.
function drawCurves(run) {
  const bins = [...Array(24).keys()].map(i => i * run.seconds / 24), half = run.seconds / 48;
  const side = which => bins.map(b => [(b + half) / longest,
    Math.min(1, shares(run, b, b + 2 * half)[which])]);
  plot("work", [["step", side(0), 1], ["rollout", side(1), 1]],
    "trainer and generators at work, over seconds");
  const others = runs.filter(r => r != run).map(r => ["other", r, .35]);
  plot("reward", [...others, ["step", run, 1]].map(([kind, r, opacity]) =>
    [kind, r.rows.map(row => [row.seconds / longest, row.stats.reward]), opacity]),
    "reward of this run, and of the others in grey");
  const most = Math.max(9, run.lags.length), top = Math.max(...run.lags), tokens = sum(run.lags);
  const share = n => percent(n / tokens), wide = 380 / most;
  $("lag").setAttribute("viewBox", "0 0 420 190");
  $("lag").setAttribute("aria-label", run.lags.map((n, i) => `lag ${i}: ${share(n)}`).join(", "));
  $("lag").innerHTML = run.lags.map((n, i) => `<rect x="${34 + i * wide}" width="${360 / most}"
    y="${168 - 140 * n / top}" height="${140 * n / top}" ${fill("step")}/>` +
    text(34 + (i + .45) * wide, 162 - 140 * n / top, share(n), "middle") +
    text(34 + (i + .45) * wide, 184, i, "middle")).join("");
  const some = [...run.rows.slice(0, 4), null, ...run.rows.slice(-4)];
  $("said").textContent = some.map(r =>
    r ? `${String(r.step).padStart(4)}  ${r.heard} > ${r.said}` : "   ...").join("\n");
}
function draw() {
  const run = runs[$("bound").value], span = Math.min(+$("width").value, run.seconds);
  const from = (run.seconds - span) * $("from").value / 1000;
  $("shown").value = `K = ${run.max_lag}`; $("second").value = from.toFixed(1);
  $("bound").setAttribute("aria-valuetext", `K = ${run.max_lag}`);
  drawNumbers(run); drawTimeline(run, from, from + span); drawCurves(run);
}
$("bound").max = runs.length - 1;
$("last").textContent = `K = ${runs.at(-1).max_lag}`;
const has = kind => runs.some(run => run.events.some(e => e.kind == kind));
$("key").innerHTML = Object.keys(names).filter(has).map(kind =>
  `<span><i style="background:var(--${kind})"></i>${names[kind]}</span>`).join("");
for (const id of ["bound", "from", "width"]) $(id).addEventListener("input", draw);
addEventListener("resize", draw);
draw();
</script>"""


if __name__ == "__main__":
    # This file is imported once more, as the module monarch_rl. For a class travels as the name of
    # its module and its own name, and in a worker `__main__` is another program, which has no such
    # class.
    importlib.import_module("monarch_rl").main()
