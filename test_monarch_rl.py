"""Tests of monarch_rl.py, for people who change it: functions first, then whole commands.

python -m pytest -q test_monarch_rl.py                    all, some minutes on two cores
python -m pytest -q test_monarch_rl.py -k "not command"   what needs no Monarch
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unicodedata
import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, Mock, create_autospec, patch

import pytest
import torch
import transformers
from pytest import approx, raises
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.convert_slow_tokenizer import bytes_to_unicode

FOLDER = Path(__file__).resolve().parent
FILE = FOLDER / "monarch_rl.py"
DOCS = (FOLDER / "DOCS.md").read_text()
sys.path.insert(0, str(FOLDER))
import monarch_rl as m
from monarch.actor import ActorError

torch.set_num_threads(1)
load = transformers.AutoModelForCausalLM.from_pretrained
PROMPT = m.Prompt(0, (m.user_turn("p", 1),))
CHAT = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
CFG = replace(m.Flags(), device="cpu", lr=1e-3, max_new_tokens=4)
TASK = m.LetterTask(CFG.seed)
MARK = "MONARCH_RL_TEST"  # in the environment of a command and of all that it starts


def changed(folder: Path, stage: str, name: str = "monarch_rl") -> Path:
    """A copy of the file in which the mechanism of a stage is replaced."""
    lines = FILE.read_text().splitlines()
    mark = "# mechanism: " + stage
    (place,) = [i for i, line in enumerate(lines) if line.endswith(mark)]
    lines[place] = re.match(" *", lines[place]).group() + m.STAGES[stage].instead
    file = folder / f"{name}.py"
    file.write_text("\n".join(lines) + "\n")
    return file


def processes(mark: str) -> dict[int, str]:
    """The command lines of processes with this mark, but for helpers of multiprocessing."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                    line = (entry / "cmdline").read_text().replace("\0", " ")
                    found |= {int(entry.name): line} if "tracker" not in line else {}
    return found


class Command:
    """A command that runs in a folder. Its output goes to a file."""

    def __init__(self, folder: Path, words: str, script: str = "", **environment: str) -> None:
        self.mark = uuid.uuid4().hex
        self.file = tempfile.NamedTemporaryFile()
        command = f"{sys.executable} {FILE} {words}"
        script = script.replace("python monarch_rl.py --train ... --checkpoint RUN", command)
        self.process = subprocess.Popen(
            ["bash", "-c", script or f"exec {command}"],
            cwd=folder,
            env=os.environ | {MARK: self.mark} | environment,
            stdin=subprocess.DEVNULL,
            stdout=self.file,
            stderr=subprocess.STDOUT,
        )

    def output(self) -> str:
        return Path(self.file.name).read_text()

    def children(self) -> list[int]:
        return [number for number in processes(self.mark) if number != self.process.pid]

    def until(self, text: str) -> None:
        until(lambda: text in self.output() or self.process.poll() is not None, 200)

    def end(self, status: int = 0) -> str:
        """Its output, once it has ended with this exit status. No process of it may be left."""
        assert self.process.wait(600) == status, self.output()
        until(lambda: not processes(self.mark), 10)
        return self.output()


def logged(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def read(folder: Path, name: str = "out.json") -> Any:
    return json.loads((folder / name).read_text())


def have_same_weights(*folders: Path) -> bool:
    one, other = [load(folder).state_dict() for folder in folders]
    return all(torch.equal(other[name], tensor) for name, tensor in one.items())


def until(holds: Any, seconds: float = 60.0) -> Any:
    end_s = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < end_s
        time.sleep(0.02)
    return found


def refused(told: str) -> Any:
    return raises(m.UsageError, match=told)


cases = pytest.mark.parametrize
fake: Any = SimpleNamespace


@pytest.fixture
def swap(monkeypatch: Any) -> Any:
    """Puts a value in place of one of the module's, which dots may lead to."""
    return lambda name, value, **how: monkeypatch.setattr(f"monarch_rl.{name}", value, **how)


# == weight sync ====


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "b": torch.full((7,), value, dtype=torch.float64)}


def published(writer: Any, version: int) -> None:
    writer.publish(version)
    writer.wait()


def slot_for(arena: Any, latest: int, leases: tuple[int, ...]) -> int:
    arena.words[arena.LATEST] = latest
    for reader, slot in enumerate(leases):
        arena.words[arena.LEASES + reader] = slot
    return arena.free_slot()


@cases("num_readers", [1, 2, 3])
def test_readers_plus_2_slots_suffice_and_one_less_does_not(num_readers: int) -> None:
    _, arena = m.create_arena(m.layout_of(weights(0)), num_readers)
    assert arena.num_slots == num_readers + 2
    slots = range(-1, num_readers + 2)
    for latest, *leases in product(slots, repeat=num_readers + 1):
        free = slot_for(arena, latest, tuple(leases))
        assert free in {*range(arena.num_slots)} - {latest, *leases}
    arena.num_slots -= 1
    with raises(ValueError, match="empty"):
        slot_for(arena, 0, tuple(range(1, num_readers + 1)))


def held(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(value) for tensor in tensors.values() for value in tensor.flatten()}


def test_a_reader_keeps_a_version_until_its_next_pull() -> None:
    mine, theirs = weights(0), weights(0)
    writer = m.WeightWriter(mine, 1)
    reader = m.WeightReader(writer.handle, 0, theirs)
    assert reader.pull() == -1
    for version in range(1, 30):
        for tensor in mine.values():
            tensor.fill_(version)
        published(writer, version)
        if version % 3 == 1:
            assert reader.pull() == version
        assert held(theirs) == {version - (version - 1) % 3}
    del writer
    assert reader.pull(29) == 29
    with raises(RuntimeError, match="version 30 never came"):
        reader.pull(30)


def test_a_pull_that_waits_reads_a_rewritten_slot(swap: Any) -> None:
    mine, theirs = {"a": torch.zeros(3)}, {"a": torch.zeros(3)}
    writer = m.WeightWriter(mine, 1)
    publish = lambda version: (mine["a"].fill_(version), published(writer, version))  # noqa: E731
    swap("pin", Mock())
    swap("time.sleep", lambda _: publish(3))
    reader = m.BlockReader(writer.handle, 0, theirs)
    publish(1)
    assert reader.pull() == 1
    publish(2)
    assert reader.pull(3) == 3 and held(theirs) == {3.0}


A32, B64 = weights(0).values()
OTHERS = {
    "fewer": {"a": A32},
    "more": {"a": A32, "b": B64, "c": B64},
    "shape": {"a": torch.zeros(5, 3), "b": B64},
    "dtype": {"a": A32, "b": torch.zeros(7)},
    "name": {"a": A32, "c": B64},
    "order": {"b": B64, "a": A32},
}


@cases("other", OTHERS.values(), ids=OTHERS)
def test_other_weights_are_refused_and_not_touched(other: dict[str, torch.Tensor]) -> None:
    writer = m.WeightWriter(weights(1), 1)
    published(writer, 1)
    with raises(ValueError, match="the writer has"):
        m.WeightReader(writer.handle, 0, other)
    assert held(other) == {0.0}
    m.WeightReader(writer.handle, 0, weights(0))


def test_a_copy_that_fails_is_no_version_and_its_error_is_raised_once() -> None:
    writer = m.WeightWriter(weights(1), 1)
    writer.write = lambda slot: 1 / 0
    writer.publish(1)
    with raises(ZeroDivisionError):
        writer.publish(2)  # waits for the copy before
    assert writer.arena.words[m.Arena.LATEST] == m.Arena.NOTHING
    del writer.write
    published(writer, 2)
    assert writer.arena.lease(0)[0] == 2


ATTACK = """
import os, random, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch
import monarch_rl as m
torch.set_num_threads(1)
num_reads, num_strikes = int(sys.argv[2]), int(sys.argv[3])
tensors = {"a": torch.zeros(1 << 17, dtype=torch.uint8)}
writer = m.WeightWriter(tensors, 3)
counts = torch.zeros(3, 2).long().share_memory_().numpy()  # of each reader: reads, torn
def start(reader):
    process_id = os.fork()
    if process_id:
        return process_id
    try:
        arena = m.Arena(writer.handle)
        while True:
            version, slot = arena.lease(reader)
            low, high = arena.slots[slot].aminmax()
            counts[reader, 0] += 1
            counts[reader, 1] += int(low) != version % 200 or int(high) != version % 200
    finally:
        os._exit(1)
rng = random.Random(0)
strikes = {signal.SIGKILL: 0, signal.SIGSTOP: 0}
version = 0
writer.publish(version)
writer.wait()
readers = [start(reader) for reader in range(3)]
end = time.monotonic() + 120
while counts[:, 0].sum() < num_reads or sum(strikes.values()) < num_strikes:
    version += 1
    tensors["a"].fill_(version % 200)
    writer.publish(version)
    killed = None
    if rng.random() < 0.02:  # while the copy goes on
        victim, strike = rng.randrange(3), rng.choice([*strikes])
        strikes[strike] += 1
        os.kill(readers[victim], strike)
        if strike == signal.SIGKILL:
            os.waitpid(readers[victim], 0)
            killed = victim
        else:
            goes_on = (readers[victim], signal.SIGCONT)
            threading.Timer(rng.random() * 0.02, os.kill, goes_on).start()
    writer.wait()
    if killed is not None:
        readers[killed] = start(killed)
    if time.monotonic() > end:
        break
for process_id in readers:
    os.kill(process_id, signal.SIGKILL)
print(*counts.sum(0).tolist(), *strikes.values(), version)
"""


def attack(folder: Path, tmp_path: Path, num_reads: int, num_strikes: int) -> list[int]:
    """[reads, torn reads, kills, stops, versions] of readers that are struck at random."""
    program = tmp_path / "attack.py"
    program.write_text(ATTACK)
    args = [sys.executable, str(program), str(folder), str(num_reads), str(num_strikes)]
    return [int(n) for n in subprocess.check_output(args, text=True, timeout=300).split()]


def test_no_read_is_torn_though_readers_are_killed_and_stopped(tmp_path: Path) -> None:
    reads, torn, kills, stops, versions = attack(FOLDER, tmp_path, 100_000, 100)
    assert torn == 0 and reads >= 100_000 and min(kills, stops) >= 30 and versions > 1000
    changed(tmp_path, "weight_sync")  # the same attack tears reads without leases
    assert attack(tmp_path, tmp_path, 50_000, 20)[1] > 0


# == reshard ====


def test_each_element_is_written_once() -> None:
    """By the ranks of random meshes, each of which has the part that DTensor gives it."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    rng = random.Random(0)
    for _ in range(400):
        shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))
        mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        choices = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
        parts = [rng.choice(choices) for _ in mesh]
        whole = torch.rand(shape) + 1
        layout = m.layout_of({"a": whole})
        slot = torch.zeros(layout[0].num_bytes, dtype=torch.uint8)
        writer = fake(handle=fake(layout=layout), written_bytes=0)
        for rank in product(*[range(size) for size in mesh]):
            size, offset = _compute_local_shape_and_global_offset(shape, mesh, [*rank], parts)
            local = whole[tuple(slice(o, o + n) for o, n in zip(offset, size))]
            tensor = Mock(placements=parts, **{"to_local.return_value": local})
            tensor.device_mesh = Mock(shape=mesh, **{"get_coordinate.return_value": rank})
            writer.tensors = {"a": tensor}
            m.ShardedWriter.write(writer, slot)
        assert torch.equal(layout[0].view(slot), whole) and writer.written_bytes == whole.nbytes


# == losses and the learner ====


def test_advantages_have_their_closed_forms() -> None:
    torch.manual_seed(0)
    rewards = torch.rand(20, 6)
    assert torch.equal(m.advantages(rewards, "none"), rewards)
    others = (rewards.sum(1, keepdim=True) - rewards) / 5
    assert torch.allclose(m.advantages(rewards, "leave_one_out"), rewards - others, atol=1e-6)
    group = m.advantages(rewards, "group")
    centred = rewards - rewards.mean(1, keepdim=True)
    assert torch.allclose(group, centred / (centred.square().mean(1, True).sqrt() + 1e-4))
    for kind in ("group", "leave_one_out"):
        equal = torch.linspace(0, 1, 99)[:, None].expand(99, 12)  # the mean of 0.1 is not 0.1
        assert not m.advantages(equal, kind).any()


def gradient(loss: str, logp: Any, recorded: Any, near: Any, gain: Any) -> Any:
    logp = logp.clone().requires_grad_()
    found = m.LOSSES[loss](logp, recorded, near, gain, replace(CFG, clip_high=0.28))
    return torch.autograd.grad(found.sum(), logp)[0]


@cases("loss", list(m.LOSSES))
def test_fresh_samples_give_the_gradient_of_reinforce(loss: str) -> None:
    logp, gain = -torch.rand(50) * 5, torch.randn(50)
    assert torch.allclose(gradient(loss, logp, logp, logp, gain), -gain, atol=1e-6)


# (ratio, advantage) of tokens that have a gradient, and of tokens that have none
MOVES = [(1.25, 1.0), (0.9, 1.0), (0.1, 1.0), (0.9, -1.0), (1.3, -1.0), (2.9, -1.0)]
STOPS = [(1.3, 1.0), (0.75, -1.0), (3.1, -1.0), (1e50, -1.0), (1e50, 1.0)]


def test_the_clip_stops_a_token_on_its_way_out_only() -> None:
    zero = torch.zeros(1)
    for ratio, gain in MOVES + STOPS:
        found = float(gradient("ppo", zero + math.log(ratio), zero, zero, zero + gain))
        assert found == approx(-gain * ratio if (ratio, gain) in MOVES else 0)


def test_decoupled_weighs_by_age_and_clips_what_this_batch_moved() -> None:
    ages, moves = [-60.0, -1.0, 0.0, 0.5, 3.0, 60.0], [-0.5, 0.0, 0.1, 0.5, 3.0, 60.0]
    zero = torch.zeros(1)
    for age, moved, gain in product(ages, moves, [-1.0, 1.0]):
        logp = zero + gain * moved
        found = float(gradient("decoupled", logp, zero - age, zero, zero + gain))
        wanted = -gain * min(math.exp(age), 2) * float(logp.exp()) if moved < 0.5 else 0
        assert found == approx(wanted)


def test_the_policy_before_a_batch_is_that_of_its_first_update() -> None:
    one = learner(loss="decoupled")
    batches = batches_of(one, episodes_of(one))
    for _ in range(2):
        one.update(batches)
    for batch in batches:
        assert torch.allclose(batch.prox_logprobs, batch.old_logprobs, atol=1e-5)


def test_k3_and_the_loss_of_the_divergence() -> None:
    torch.manual_seed(0)
    q = torch.randn(64).log_softmax(-1)
    table = torch.randn(64).requires_grad_()
    logp = table.log_softmax(-1)
    p = logp.detach().exp()  # all tokens, as often as they would be sampled
    kl = (logp.exp() * (logp - q)).sum()
    found = m.k3(logp, q)
    assert (found >= 0).all() and m.k3(logp, logp).max() == 0
    assert float((p * found).sum()) == approx(kl.item(), rel=1e-4)
    reference = fake(token_logprobs=lambda *_: (q, None))
    price = m.divergence(reference, 0.25, fake(ids=None, is_sampled=None), logp)
    (wanted,) = torch.autograd.grad(kl, table, retain_graph=True)
    assert torch.allclose(torch.autograd.grad((4 * p * price).sum(), table)[0], wanted, atol=1e-6)


def learner(kind: Any = m.UserLearner, **flags: Any) -> Any:
    """A learner of the tiny policy, with plain gradient steps: its updates are linear."""
    cfg = replace(CFG, **flags)
    learned = kind(m.HubPolicy(cfg, torch.float32), cfg)
    learned.optimizer = torch.optim.SGD(learned.policy.model.parameters(), 0.5)
    return learned


def parameters(learned: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(learned.weights).detach()


def letters(num: int) -> list[m.Prompt]:
    """Prompts of two turns for the tiny policy."""
    return [*map(TASK.prompt, range(num))]


FIVE = [*letters(4), m.Prompt(4, (m.user_turn("abcdefghij", ""), m.user_turn("a", "")))]


def sampled(policy: Any, prompts: list[m.Prompt], group_size: int, seed: int | None) -> list[Any]:
    return m.rollout(policy, m.new_episodes(prompts, group_size), seed)


def episodes_of(learned: Any) -> list[Any]:
    episodes = sampled(learned.policy, letters(4), 4, 0)
    for place, episode in enumerate(episodes):
        episode.rewards = [place % 4 / 8, place % 3 / 8]
    return episodes


def batches_of(learned: Any, episodes: list[Any]) -> list[Any]:
    return learned.micro_batches(episodes, learned.advantages(episodes))


def advantages_of(episodes: list[Any], kind: Any) -> Any:
    return m.Learner.advantages(fake(cfg=replace(CFG, advantage=kind)), episodes)


def test_an_advantage_is_that_of_what_follows() -> None:
    rewards = [[[0.25, 0.5], [0.0, 1.0]], [[0.5, 0.0], [0.5, 0.25]]]
    turn_of = [[0, 1, 1, 0, 2], [0, 0, 1, 0, 0, 2, 2]]
    episodes = []
    for number, group in enumerate(rewards):
        for turns, reward in zip(turn_of, group):
            episodes.append(m.Episode(letters(2)[number], turn_of=turns, rewards=reward))
    found = advantages_of(episodes, "none")
    assert found[0] == [0, 0.75, 0.75, 0, 0.5] and found[3] == [0, 0, 0.75, 0, 0, 0.25, 0.25]
    # A conversation that an environment has ended earlier: its last turn is compared with nothing.
    ended = m.Episode(letters(2)[1], turn_of=[0, 1], rewards=[1.0])
    for kind in ("group", "leave_one_out"):
        alone, other = advantages_of([episodes[3], ended], kind)
        assert (alone[5:], alone[2], other) == ([0, 0], approx(-other[1]), [0, other[1]])
        assert other[1] > 0.2
    found = advantages_of(episodes, "leave_one_out")  # of two: the difference of both
    assert found[0] == approx([0, -0.25, -0.25, 0, -0.5])
    assert found[1] == approx([0, 0, 0.25, 0, 0, 0.5, 0.5])
    assert found[2] == approx([0, -0.25, -0.25, 0, -0.25])


@cases("loss", ["ppo", "decoupled"])
def test_a_step_in_parts_is_the_step_of_the_whole(loss: str) -> None:
    found = []
    for tokens in (8192, 40):
        one = learner(loss=loss, epochs=3, tokens_per_micro_batch=tokens, entropy=0.01)
        one.penalty = partial(m.divergence, copy.deepcopy(one.policy), 0.1)
        episodes = episodes_of(one)
        updated = Mock()
        one.optimizer.register_step_post_hook(updated)
        stats = one.step(episodes)
        assert updated.call_count == 3
        assert stats.k3 < 1e-9  # of the first update, as the samples are of these weights
        assert (len(batches_of(one, episodes)) > 1) is (tokens == 40)
        found.append((parameters(one), stats))
    (whole, whole_stats), (parts, parts_stats) = found
    start = parameters(learner())
    assert (whole - start).norm() > 1e-3 and (whole - parts).norm() < 1e-3 * (whole - start).norm()
    assert whole_stats.grad_norm == approx(parts_stats.grad_norm, rel=1e-4)
    assert whole_stats.entropy == approx(parts_stats.entropy, rel=1e-4)
    assert 0.9 * math.log(19) < whole_stats.entropy < math.log(19)  # near uniform


def test_a_step_changes_no_weights_while_the_version_before_is_copied() -> None:
    trainer = object.__new__(m.Trainer)
    trainer.setup(0, replace(CFG, generators=1), m.make_learner, 0)
    episodes = episodes_of(trainer.learner)
    goes_on = threading.Event()
    write = trainer.writer.write
    trainer.writer.write = lambda slot: goes_on.wait(30) and write(slot)
    trainer.step(episodes)  # version 1, which is not copied yet
    before = parameters(trainer.learner)
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(trainer.step, episodes)
        wait([second], 1)
        assert torch.equal(parameters(trainer.learner), before)
        goes_on.set()
        second.result(60)
    assert not torch.equal(parameters(trainer.learner), before)


def test_a_step_follows_the_gradient_of_the_mean_over_tokens_cut_to_norm_1() -> None:
    for scale, kind in ((0.1, m.UserLearner), (100.0, m.UserLearner), (100.0, m.Learner)):
        one = learner(kind, loss="reinforce", advantage="none")
        before = parameters(one)
        episodes = episodes_of(one)
        for episode in episodes:
            episode.rewards = [scale * reward for reward in episode.rewards]
        loss = torch.zeros(())
        for episode, advantage in zip(episodes, advantages_of(episodes, "none")):
            is_sampled = torch.tensor(episode.turn_of) > 0
            ids = torch.tensor([episode.ids])
            logp, _ = one.policy.token_logprobs(ids, is_sampled[None])
            loss = loss - (torch.tensor(advantage)[is_sampled] * logp).sum()
        num_tokens = sum(turn > 0 for episode in episodes for turn in episode.turn_of)
        grads = torch.autograd.grad(loss / num_tokens, list(one.policy.model.parameters()))
        wanted = torch.nn.utils.parameters_to_vector(grads)
        norm = float(wanted.norm())
        assert (norm > 1) is (scale == 100)
        assert one.step(episodes).grad_norm == approx(norm, rel=1e-4)
        moved = parameters(one) - before  # at a rate of 0.5
        assert torch.allclose(moved, -0.5 * wanted / max(1, norm), atol=1e-5)


def test_rows_without_an_advantage_are_left_out_and_change_nothing() -> None:
    found = []
    for entropy in (0.0, 1e-30):  # with a bonus no row is left out
        one = learner(entropy=entropy)
        episodes = episodes_of(one)
        for episode in episodes[4:12]:
            episode.rewards = [0.5, 0.5]
        num_rows = sum(len(batch.ids) for batch in batches_of(one, episodes))
        assert num_rows == (8 if entropy == 0 else 16)
        one.step(episodes)
        found.append(parameters(one))
    one = learner()
    for episode in episodes:
        episode.rewards = [0.5, 0.5]
    assert one.step(episodes).grad_norm == 0 and torch.equal(parameters(one), parameters(learner()))
    assert learner(entropy=1.0).step(episodes).grad_norm > 0
    one.penalty = lambda batch, logp: 0 * logp  # trains all rows, too
    assert one.rows_to_train([[0.0], [1.0]]) == [0, 1]
    moved = (found[1] - parameters(learner())).norm()
    assert moved > 1e-3 and (found[0] - found[1]).norm() < 1e-4 * moved


def test_micro_batches_are_cut_by_tokens() -> None:
    one = learner(tokens_per_micro_batch=1000)
    lengths = [500, 400, 300, 300, 200, 150, 50, 50, 50]  # the example of `partition`
    rows: Any = [fake(ids=[0] * length) for length in lengths]
    assert one.partition(list(range(9)), rows) == [[0, 1], [2, 3, 4], [5, 6, 7, 8]]
    for num_tokens, num_ranks, num in product([1000, 1], [1, 2, 3, 4], [4, 5, 8, 9]):
        one.cfg = replace(one.cfg, tokens_per_micro_batch=num_tokens)
        one.num_ranks = num_ranks
        ranks = []
        for one.rank in range(num_ranks):
            ranks.append(one.partition(list(range(num)), rows))
            largest = max(len(part) * lengths[part[0]] for part in ranks[-1])
            assert largest <= 1000 or num % num_ranks
        assert len({len(parts) for parts in ranks}) == 1
        parts = list(chain(*ranks))
        assert all(parts) and sorted(chain(*parts)) == list(range(num))


def test_a_masked_token_spoils_no_gradient() -> None:
    logits = torch.zeros(1, 2, 3)
    logits[:, :, 2] = torch.finfo(torch.float32).min  # divided by the temperature: -inf
    policy = policy_of(temperature=0.7, entropy=0.01)
    policy.forward = lambda *_, **__: logits.requires_grad_()
    ids = torch.tensor([[0, 0, 1]])
    logp, entropy = policy.token_logprobs(ids, torch.tensor([[False, True, True]]))
    (logp - entropy).sum().backward()
    assert logits.grad.isfinite().all()


def test_supervised_steps_are_reinforce() -> None:
    found = []
    for temperature, loss in ((1.0, "reinforce"), (0.5, "decoupled")):
        one = learner(temperature=temperature, loss=loss, entropy=1 - temperature)
        one.optimizer = None
        m.sft(one, m.training_prompts(TASK), 2)
        found.append(parameters(one))
    assert torch.equal(*found) and one.policy.temperature == 0.5


def test_supervised_steps_need_answers_that_fit() -> None:
    policy = policy_of()
    policy.tokenizer.chat_template += NO_B
    pairs = [("b", "a"), ("a", "aa"), ("a", "a"), ("a", None)]
    prompts = [m.Prompt(i, (m.user_turn(*pair),)) for i, pair in enumerate(pairs)]
    policy.context = len(m.episode_with(policy, prompts[2], ["a"]).ids)
    found = m.right_episodes(policy, iter(prompts))
    assert next(found).prompt.number == 2
    with refused("no answer"):
        next(found)


def test_an_update_that_is_not_finite_is_left_out() -> None:
    one = learner()
    before = parameters(one)
    episodes = episodes_of(one)
    with patch.dict(m.LOSSES, ppo=lambda logp, *_: logp * math.inf):
        assert not math.isfinite(one.step(episodes).grad_norm)
    assert torch.equal(parameters(one), before) and one.step(episodes).grad_norm > 0


# == rollout ====

SMALL = "hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 "
SMALL += "num_key_value_heads=2 head_dim=8 max_position_embeddings=128 "
EXPERTS = "linear_num_key_heads=2 linear_num_value_heads=4 linear_key_head_dim=8 "
EXPERTS += "linear_value_head_dim=8 num_experts=4 num_experts_per_tok=2 moe_intermediate_size=16 "
EXPERTS += "shared_expert_intermediate_size=16 layer_types=linear_attention,full_attention"
OPT = "hidden_size=32 ffn_dim=64 num_hidden_layers=2 num_attention_heads=4 word_embed_proj_dim=32"
SHAPES = {  # the name of its configuration, and sizes
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", SMALL),
    "llama": ("Llama", SMALL),
    "gemma3": ("Gemma3Text", SMALL + "sliding_window=8 query_pre_attn_scalar=8"),
    "mistral": ("Mistral", SMALL + "sliding_window=8"),
    "gpt2": ("GPT2", "n_embd=32 n_layer=2 n_head=4 n_positions=128"),
    "opt": ("OPT", OPT + " max_position_embeddings=128"),
    "phi3": ("Phi3", SMALL),
    "bloom": ("Bloom", "hidden_size=32 n_layer=2 n_head=4"),
    "qwen3_next": ("Qwen3Next", SMALL + EXPERTS),
    "lfm2": ("Lfm2", SMALL + "layer_types=conv,full_attention"),
}
UNUSUAL = {  # they cannot have chunks; mamba cannot work at all
    "cohere": ("Cohere", SMALL),
    "granite": ("Granite", SMALL + "logits_scaling=3"),
    "gemma2": ("Gemma2", SMALL + "sliding_window=8 query_pre_attn_scalar=8"),
    "mamba": ("Mamba", "hidden_size=32 num_hidden_layers=2"),
}
BYTES = "".join(bytes_to_unicode().values())
NO_B = "{{ raise_exception('no b') if 'b' in messages[0].content }}"
TEMPLATE = m.tiny_policy(0)[0].chat_template  # <user>abc<end><assistant>


def model_folder(parent: Path, shape: str = "qwen2", characters: str = m.LETTERS) -> Path:
    """A random model of this shape, with a tokenizer of one token per character."""
    with patch.object(m, "LETTERS", characters):
        tokenizer, _ = m.tiny_policy(0)
    name, words = (SHAPES | UNUSUAL)[shape]
    sizes: dict[str, Any] = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), 2)
    for word, value in [pair.split("=") for pair in words.split()]:
        sizes[word] = int(value) if value.isdigit() else value.split(",")
    config = getattr(transformers, name + "Config")(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder = parent / shape
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def policy_of(folder: Path | None = None, **flags: Any) -> Any:
    return m.HubPolicy(replace(CFG, model=str(folder or ""), **flags), torch.float32)


@cases("shape", SHAPES)
def test_what_was_recorded_is_what_is_recomputed(tmp_path: Path, shape: str) -> None:
    policy = policy_of(model_folder(tmp_path, shape), temperature=0.8, max_new_tokens=12)
    episodes = sampled(policy, FIVE, 3, 0)
    assert len(episodes) == 15
    recorded, recomputed = m.recompute_logprobs(policy, episodes)
    assert torch.allclose(recorded, recomputed, atol=2e-3)
    assert m.k3(recorded, recomputed).mean() <= 1e-6
    advantage = [[1.0] * len(episode.ids) for episode in episodes]
    (batch,) = m.Learner(policy, CFG).micro_batches(episodes, advantage)  # one padded batch
    with torch.no_grad():
        together, _ = policy.token_logprobs(batch.ids, batch.is_sampled)
    assert m.k3(batch.old_logprobs, together).mean() <= 1e-6
    for episode in episodes:
        for turn, is_cut in enumerate(episode.truncated, 1):
            turn_ids = [i for i, t in zip(episode.ids, episode.turn_of, strict=True) if t == turn]
            ends = [i in policy.end_ids for i in turn_ids]
            assert not any(ends[:-1]) and ends[-1] is not is_cut
            assert len(turn_ids) == 12 or not is_cut
    policy.temperature = 0.7  # the check finds a trainer that computes another distribution
    assert m.k3(*m.recompute_logprobs(policy, episodes)).mean() > 1e-6


@cases("fault", ["nan", "lm_head", "more", "drops", "no chat template", "disagree"])
def test_a_model_that_cannot_work_is_refused(tmp_path: Path, fault: str) -> None:
    folder = model_folder(tmp_path, "mamba" if fault == "disagree" else "qwen2")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = load(folder)
    if fault == "nan":
        model.get_input_embeddings().weight.data[3, 0] = math.nan
    if fault == "more":
        model.model.more = torch.nn.Linear(2, 2)
    if fault == "drops":
        tokenizer.chat_template = TEMPLATE.replace("content", "content | upper")
    if fault == "no chat template":
        tokenizer.chat_template = None
        (folder / "chat_template.jinja").unlink()
    state = model.state_dict()
    if fault == "lm_head":
        del state["lm_head.weight"]
    model.save_pretrained(folder, state_dict=state)
    tokenizer.save_pretrained(folder)
    with refused(fault):
        m.verify(policy_of(folder))


def test_a_model_is_verified_by_two_lengths_to_a_millionth(swap: Any) -> None:
    for difference in (1.3e-3, 1.5e-3, math.nan):  # k3 is half of its square
        logprobs = torch.zeros(1), torch.full((1,), difference)
        swap("recompute_logprobs", Mock(return_value=logprobs))
        with contextlib.nullcontext() if difference == 1.3e-3 else refused("disagree"):
            m.verify(policy_of())
        _, episodes = m.recompute_logprobs.call_args.args
        assert len({len(episode.ids) for episode in episodes}) > 1


def test_both_programs_compute_the_same_in_bfloat16() -> None:
    cfg = replace(CFG, dtype="bfloat16")
    generator = m.HubPolicy(cfg, torch.bfloat16)
    trained = m.UserLearner(policy_of(), cfg)
    trained.token_losses = lambda batch, logp, _: seen.append(logp) or logp
    seen = []
    (batch,) = batches_of(trained, episodes_of(fake(policy=generator)))
    trained.update([batch])
    assert {weight.dtype for weight in trained.policy.model.parameters()} == {torch.float32}
    one, _ = generator.token_logprobs(batch.ids, batch.is_sampled)
    assert torch.equal(one, seen[0])
    generator.model.to(torch.bfloat16)  # with its buffers: the frequencies of the positions
    assert not torch.equal(generator.token_logprobs(batch.ids, batch.is_sampled)[0], seen[0])


# == prompts ====

ASKS = "{% if add_generation_prompt %}<user>assistant\n{% endif %}"
SYSTEM = "{% if messages[0].role != 'system' %}<user>system\nBe kind.<end>{% endif %}"
EACH = "{% for m in messages %}<user>{{ m.role }}\n{{ m.content | trim }}<end>\n{% endfor %}"
INST = "{% for m in messages %}{% if m.role == 'user' %}<user>[INST] {{ m.content }} [/INST]"
INST += "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
TEXTS = ["a", "", " a\n", "é", "e\u0301 🙂"]
TEXTS += ["<end>", "x <user> y", "\n<assistant>", "[INST] response, message0of"]


@cases("template", [TEMPLATE, EACH + ASKS, SYSTEM + EACH + ASKS, INST])
def test_prompts_are_what_the_template_says(tmp_path: Path, template: str) -> None:
    policy = policy_of(model_folder(tmp_path, characters=BYTES))
    policy.tokenizer.chat_template = template
    controls = set(policy.control_tokens.values())
    for system, text in product(["", "S <end>", "s "], TEXTS):
        messages = [{"role": "system", "content": system}] if system and template != INST else []
        messages.append({"role": "user", "content": text})
        prompt = m.Prompt(0, (m.Turn(tuple(messages), ""), m.user_turn(text, "")))
        said = [*messages, {"role": "assistant", "content": "c"}, *prompt.turns[1].messages]
        right = m.episode_with(policy, prompt, ["c", ""])
        ids = right.ids[:-1]  # without the end of the last response
        first = policy.prompt_ids(prompt, 0)
        for found, chat in ((first, messages), (ids, said)):
            whole = unicodedata.normalize("NFC", policy.render(chat, True))
            assert policy.tokenizer.decode(found) == whole
            if not any(token in system + text for token in policy.control_tokens):
                assert found == policy.tokenizer(whole, add_special_tokens=False)["input_ids"]
            plain = policy.render([{**message, "content": "x"} for message in chat], True)
            wanted = [i for i in policy.tokenize(plain) if i in controls]
            assert [i for i in found if i in controls] == wanted


@cases("special", [False, True])
def test_a_template_reads_tags_but_no_control_tokens(tmp_path: Path, special: bool) -> None:
    policy = policy_of(model_folder(tmp_path, characters=BYTES))
    tokenizer = policy.tokenizer
    tokenizer.add_tokens(["<turn>", "<tool>"])
    tokenizer.add_tokens(["<think>", "</think>"], special_tokens=special)
    tokenizer.add_tokens(["<eot>"], special_tokens=True)
    cuts = EACH.replace("<user>", "<turn>").replace("content", "content.split('</think>')[-1]")
    tokenizer.chat_template = cuts + "{% if '<turn>' in messages[0].content %}b{% endif %}"
    policy._read_template()
    answer = {"role": "assistant", "content": "<think>b</think>c"}
    turn = m.Turn((*m.user_turn("a <tool>", "").messages, answer), "")
    whole = tokenizer.apply_chat_template([*turn.messages], return_dict=False)
    assert policy.prompt_ids(m.Prompt(0, (turn,)), 0) == whole
    forged = m.Prompt(0, (m.user_turn("<turn><eot>", ""),))
    tokenizer.chat_template = cuts
    turn_id, end_id = tokenizer.convert_tokens_to_ids(["<turn>", "<eot>"])
    ids = policy.prompt_ids(forged, 0)
    assert (ids.count(turn_id), ids.count(end_id)) == (1, 0)
    tokenizer.chat_template = EACH.replace("<end>", "")
    policy._read_template()
    assert {*policy.end_ids} == {tokenizer.eos_token_id}  # not "\n"


def test_a_conversation_goes_on_while_its_environment_replies(swap: Any) -> None:
    class Environment(m.RetryTask):
        def reply(self, prompt: Any, responses: list[str]) -> Any:
            reply = super().reply(prompt, responses)
            if prompt.number == 7 and len(responses) == 2:
                raise ValueError("no hint")
            if reply is None or prompt.number % 3 == 0:
                return reply and reply.messages[0]["content"]
            return asyncio.sleep(0, list(reply.messages))

    async def sample(_: str, __: Any, at_least: int, episodes: Any, seed: int) -> Any:
        seeds.append(seed)
        return m.rollout(policy, copy.deepcopy(episodes), seed, len(seeds))

    async def reply(_: str, method: str, conversations: Any) -> Any:
        process = m.UserProcess(CFG)
        process.call = partial(m.call_task, CFG)
        return await asyncio.to_thread(process, method, conversations)

    policy = policy_of()
    task = Environment(CFG.seed)
    swap("user_task", lambda cfg: task)
    run = run_of(replace(CFG, max_turns=3), None)
    run.set_task(task)
    run.generators = fake(request=sample)
    run.reward_workers = fake(request=reply)
    prompts = [*map(task.prompt, range(25))]
    seeds = []
    sampled = asyncio.run(run.request_rollout(m.new_episodes(prompts, 4), 0))
    # Their text is what the template says, although responses are never tokenized.
    usual = {*policy.tokenizer.convert_tokens_to_ids(list(m.LETTERS)), *policy.end_ids}
    plain = [e for e in sampled if {i for i, turn in zip(e.ids, e.turn_of) if turn} <= usual]
    kinds = {tuple(episode.truncated) for episode in plain}
    assert len(kinds) > 2  # some go on after an end, some after none
    for episode in plain:
        chat = []
        for turn, response in zip(episode.prompt.turns, episode.responses, strict=True):
            chat += [*turn.messages, {"role": "assistant", "content": response}]
        end = "<end>" if episode.truncated[-1] else ""
        assert policy.tokenizer.decode(episode.ids) + end == policy.render(chat, False)
    # The same letters are never asked for again, and the answer follows the question.
    assert {len(e.responses) for e in sampled} == {2, 3}
    for episode in sampled:
        first, *later = episode.prompt.turns
        assert all(turn.is_reply for turn in later)
        assert episode.prompt.is_held_out == task.prompt(episode.prompt.number).is_held_out
        assert {turn.answer for turn in later} <= {first.answer}
        for response, turn in zip(episode.responses[:-1], later, strict=True):
            assert not set(response) & set(turn.messages[0]["content"])
    # The oldest version counts, each request has its own seed, and an error costs its episode.
    assert {episode.version for episode in sampled} == {1} and len(set(seeds)) == 3
    assert [e.prompt.number for e in sampled] == sorted(e.prompt.number for e in sampled)
    assert 96 <= len(sampled) < 100
    (reason,) = run.errors
    assert "no hint" in reason and m.k3(*m.recompute_logprobs(policy, sampled)).max() < 1e-10


def test_a_later_turn_repeats_no_end_that_was_sampled() -> None:
    for is_truncated, wanted in ((False, [7, 5, 8]), (True, [7, 5, 5, 8])):
        episode = m.Episode(PROMPT, ids=[7, 5], truncated=[is_truncated])
        episode.add_prompt([5, 8])
        assert episode.ids == wanted


def test_a_seed_gives_the_same_samples_and_none_gives_the_likeliest_tokens() -> None:
    policy = policy_of()
    one, same, other = [
        [episode.ids for episode in sampled(policy, letters(5), 2, seed)] for seed in (1, 1, 2)
    ]
    assert one == same != other
    for episode in sampled(policy, letters(5), 2, None):
        logits = policy.forward(torch.tensor([episode.ids]))[0, :-1]
        pairs = zip(logits.argmax(-1).tolist(), episode.ids[1:], episode.turn_of[1:], strict=True)
        assert all(likeliest == token for likeliest, token, turn in pairs if turn)


def test_a_generator_waits_until_it_can_have_the_version_asked_for() -> None:
    generator = object.__new__(m.Generator)
    generator.setup(0, CFG, m.make_policy, m.WeightReader)
    writer = m.WeightWriter(dict(m.Policy(CFG).model.named_parameters()), 1)
    published(writer, 0)
    new = m.new_episodes(letters(1), 2)
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(generator.rollout, writer.handle, 2, new, 0)
        for version in (1, 2):
            wait([asked], 0.5)
            published(writer, version)
        assert {episode.version for episode in asked.result(60)} == {2}


def test_a_response_may_end_by_template_tokenizer_and_generation_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<user>", "<assistant>", "<turn>"]})
    tokenizer.chat_template = TEMPLATE.replace("<end>", "<turn>")
    tokenizer.save_pretrained(folder)
    model = load(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder)
    assert policy_of(folder, max_new_tokens=0).max_new_tokens == 64  # half of its context
    policy = policy_of(folder)
    of_template = tokenizer.convert_tokens_to_ids("<turn>")
    assert set(policy.end_ids) == {of_template, 2, 5}
    supervised = m.episode_with(policy, letters(1)[0], ["abc", "a"])
    assert supervised.ids[-1] == of_template
    rope = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    model.config.rope_parameters |= {**rope, "original_max_position_embeddings": 24}
    model.save_pretrained(folder)
    assert policy_of(folder).context == 24


def test_a_template_that_rewrites_earlier_turns_is_refused_for_later_ones() -> None:
    policy = policy_of()
    policy.tokenizer.chat_template = "<user>{{ messages[-1].content }}<end><assistant>"
    (prompt,) = letters(1)
    with refused("changes earlier turns"):
        policy.prompt_ids(prompt, 1)
    tool = ({"role": "tool", "content": "Be kind."}, *prompt.turns[0].messages)
    with refused(r"drops: .*Be kind"):
        policy.prompt_ids(m.Prompt(0, (m.Turn(tool, ""),)), 0)


# == services ====


@dataclass
class FakeWorker:
    """An actor in this process: `script` says how a call ends. Its process is a real one."""

    script: Any
    child: Any
    name: str

    def __post_init__(self) -> None:
        self.run = fake(call=self.called)
        self.ping = fake(call=AsyncMock())
        self.stop = AsyncMock()

    async def called(self, what: Any, *args: Any) -> dict[int, Any]:
        result = self.script(self, what if isinstance(what, str) else what.__name__, *args)
        return {0: await result if inspect.isawaitable(result) else result}

    def die(self) -> Any:
        self.child.kill()
        return asyncio.sleep(1000)


@pytest.fixture
def serve(swap: Any) -> Any:
    """Does some work with a service of such workers; none of their processes may be left."""

    async def served(script: Any, work: Any, num_replicas: int = 2, **options: Any) -> Any:
        children = []

        async def start(pool: Any, num_ranks: int) -> Any:
            child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
            children.append(child)
            mesh = fake(stop=lambda: asyncio.sleep(0))
            mesh.spawn = lambda name, _: FakeWorker(script, child, name.rpartition("_")[0])
            return m.Processes(mesh, [child.pid])

        swap("Pool.start", start)
        pool = m.WarmPool()
        service = m.Service(m.Worker, num_replicas, pool, **options)
        try:
            await service.begin()
            return await work(service)
        finally:
            await service.close()
            await pool.close()
            ends = {child.wait(10) for child in children}
            assert ends <= {-signal.SIGKILL, 0}  # 0: somebody else has waited for it

    return lambda *args, **how: asyncio.run(asyncio.wait_for(served(*args, **how), 100))


def test_every_request_has_its_answer_whatever_befalls_the_replicas(serve: Any) -> None:
    rng = random.Random(0)
    befell = {"dies": 0, "stands still": 0}

    def script(worker: Any, method: str, *args: Any) -> Any:
        if method != "double":
            return None
        fate = rng.random()
        if fate > 0.9 and befell["dies"] == 0:  # two losses at most: a third ends a request
            befell["dies"] += 1
            return worker.die()
        if fate < 0.1 and befell["stands still"] == 0:
            befell["stands still"] += 1
            worker.ping.call = lambda: asyncio.sleep(1000)
            return asyncio.sleep(1000)
        return asyncio.sleep(0.01 * rng.random(), 2 * args[0])

    async def work(service: Any) -> list[int]:
        found = []
        for start in range(0, 300, 30):
            numbers = range(start, start + 30)
            found += await asyncio.gather(*[service.request("double", i) for i in numbers])
        await service.until_ready(3)
        assert not any(replica.in_flight for replica in service.replicas.values())
        assert service.num_lost >= befell["dies"] > 0
        return found

    found = serve(script, work, num_replicas=3, unresponsive_s=0.2)
    assert found == [2 * i for i in range(300)] and min(befell.values()) > 0


def test_an_exception_or_three_losses_are_the_callers(serve: Any) -> None:
    def script(worker: Any, method: str, *args: Any) -> Any:
        num_asked[method] += 1
        if method == "bad":
            raise ActorError(ValueError("a bad request"))
        is_deadly = method == "fatal" or (method == "deadly" and num_asked[method] == 1)
        return worker.die() if is_deadly else 7

    async def work(service: Any) -> None:
        with raises(ActorError, match="a bad request"):
            await service.request("bad")
        assert num_asked["bad"] == 1  # no other replica is asked
        assert len(service.replicas) == 2
        assert await service.request("deadly") == 7  # of another one
        with raises(m.ReplicaLost, match=r"worker_\d has died"):
            await service.request("fatal")
        assert num_asked["fatal"] == 3
        while service.num_lost < 4:
            await asyncio.sleep(0.01)
        assert await service.request("harmless") == 7  # and the service lives on

    num_asked: Counter[str] = Counter()
    serve(script, work)


def test_a_request_goes_to_the_replica_with_the_fewest_in_flight(serve: Any) -> None:
    def script(worker: Any, method: str, *args: Any) -> Any:
        if method != "work":
            return None
        served_by.append(worker.name)
        return barrier.wait()

    served_by = []
    barrier = asyncio.Barrier(9)
    work = lambda service: asyncio.gather(*[service.request("work") for _ in range(9)])  # noqa: E731
    serve(script, work, num_replicas=3)
    assert set(Counter(served_by).values()) == {3}


def test_an_answer_of_a_replica_that_is_lost_meanwhile_does_not_count(serve: Any) -> None:
    def script(worker: Any, method: str, *args: Any) -> str:
        if method == "work":
            served_by.append(worker.name)
            if len(served_by) == 1:
                replicas[int(worker.name[-1])].lose("is gone")
        return worker.name

    async def work(service: Any) -> Any:
        replicas.update(service.replicas)
        return await service.request("work")

    served_by = []
    replicas = {}
    assert serve(script, work) == served_by[1] != served_by[0]


def test_a_closed_service_ends_its_requests() -> None:
    service = m.Service(m.Worker, 1, m.Pool())
    asyncio.run(service.close())
    with raises(m.ReplicaLost, match="closed"):
        asyncio.run(asyncio.wait_for(service.request("work"), 10))


@cases("fails", [True, False])
def test_a_setup_that_raises_or_is_lost_thrice_is_fatal(serve: Any, fails: bool, swap: Any) -> None:
    def script(worker: Any, method: str, number: int = 0) -> Any:
        num_setups[number] += method == "setup"
        if fails:
            raise ActorError(ValueError("no such model"))
        return worker.die() if number == 1 else None

    num_setups = [0, 0]
    limits = []
    swap("until_unresponsive", lambda _, s: asyncio.sleep(99, limits.append(s)))
    with raises((m.ReplicaLost, ActorError), match=r"no such|_1 has died"):
        serve(script, None, unresponsive_s=5.0)
    assert max(num_setups) == (1 if fails else 3)
    assert limits.count(30.0) == sum(num_setups)
    lost = m.ReplicaLost("thrice in a row")
    live = AsyncMock(side_effect=[lost, lost, None, lost, lost, lost])
    swap("Service._live", live)
    with raises(m.ReplicaLost, match="thrice"):
        serve(script, None, num_replicas=1)
    assert live.call_count == 6


def test_a_trainer_is_not_replaced(serve: Any) -> None:
    async def work(service: Any) -> None:
        replica = service.replicas[0]
        replica.worker.child.kill()
        await asyncio.wait([replica.lost])
        with raises(m.ReplicaLost, match="worker_0 has died"):
            await service.request("work")

    serve(lambda *_: 7, work, num_replicas=1, replaces=False)
    run = m.Run(CFG, m.Pool())
    assert [service.replaces for service in run.services] == [False, True, True]
    for service in run.services:  # all have begun, and the trainer is lost
        service.num_replicas = 0
    with raises(m.ReplicaLost):
        run.draw(1)  # without a trainer
    run.trainer.error = m.ReplicaLost("trainer_0 has died")
    with raises(m.ReplicaLost, match="trainer_0 has died"):
        asyncio.run(run.begin())


def test_a_process_is_reused_if_it_is_idle_and_released(serve: Any, swap: Any) -> None:
    def script(worker: Any, method: str, *args: Any) -> Any:
        if method == "release" and worker.name == "worker_0":
            raise ActorError(ValueError("cannot release"))
        return worker.die() if method == "release" and worker.name == "worker_2" else None

    async def work(service: Any) -> None:
        replicas = dict(service.replicas)
        replicas[3].in_flight["a request"] = 0.0
        swap("wait_for", lambda work, seconds: wait_for(work, seconds / 10))
        await service.close()
        pool, reused = service.pool, replicas[1].processes
        assert pool.idle == [reused] and replicas[1].worker.stop.called
        for number in (0, 2, 3):
            assert replicas[number].worker.child.wait(10) == -signal.SIGKILL
        pool.idle += [await pool.start(2), await pool.start(1), await pool.start(1)]
        assert [each is reused for each in pool.idle] == [False, True, False]

    wait_for = asyncio.wait_for
    serve(script, work, num_replicas=4)


def test_a_main_process_that_stood_still_takes_no_worker_for_hung() -> None:
    async def answer() -> None:
        await asyncio.sleep(0.01)  # it comes during the standstill,
        await asyncio.sleep(0.01)  # and is read after it

    async def detected() -> set[Any]:
        worker = fake(ping=fake(call=answer))
        detector = asyncio.ensure_future(m.until_unresponsive(worker, 0.4))
        await asyncio.sleep(0.001)
        time.sleep(0.5)
        return (await asyncio.wait([detector], timeout=0.1))[0]

    assert not asyncio.run(detected())


def test_a_process_that_has_just_died_is_noticed() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    assert asyncio.run(asyncio.wait_for(m.until_dead(process.pid), 5)) == "has died"


# == the loops ====

SMALL_RUN = replace(CFG, prompts_per_step=4, generators=3, group_size=2)


class FakeServices:
    """Samples and trains after random delays; loses some groups."""

    def __init__(self, seed: int = 0, loses: bool = False) -> None:
        self.rng = random.Random(seed)
        self.loses = loses
        self.version = 0
        self.num_lost = 0
        self.k3 = 0.0
        self.trainer = asyncio.Lock()  # it makes one step after the other
        self.prompts: list[Any] = []  # of the groups that were trained on

    def ready(self) -> list[Any]:
        return [self]

    async def request(self, what: Any, *args: Any) -> Any:
        return await getattr(self, what)(*args) if isinstance(what, str) else None

    async def rollout(self, _: Any, at_least: int, asked: list[Any], *__: Any) -> list[Any]:
        assert at_least == self.version
        version = self.version
        await asyncio.sleep(min(0.1, 0.0005 * self.rng.paretovariate(0.7)))
        if self.loses and self.rng.random() < 0.05:
            raise m.ReplicaLost("generator_0 has died")
        found = []
        for prompt in {episode.prompt.number: episode.prompt for episode in asked}.values():
            if not (self.loses and self.rng.random() < 0.1):
                row = (version, [1, 2], [0, 1], [0.0, -1.0], ["a"], [False])
                found += [m.Episode(prompt, *row) for _ in range(2)]
        return found

    async def ask(self, method: str, groups: list[Any]) -> list[Any]:
        lost = [self.loses and self.rng.random() < 0.1 for _ in groups]
        return [["no reward" if gone else [0.0], [1.0]] for gone in lost]

    async def step(self, episodes: list[Any]) -> Any:
        async with self.trainer:
            await asyncio.sleep(0.001 * self.rng.random())
            self.version += 1
        self.prompts += [episode.prompt for episode in episodes]
        return m.StepStats(1, 0.0, 0.0, self.k3, 0.0, 1.0)


def run_of(cfg: Any, services: Any, progress: Any = None) -> Any:
    report = fake(pool=m.Pool(), folder=Path())
    run = m.UserRun(cfg, report, None, progress or m.SavedProgress())
    run.trainer = run.generators = run.reward_workers = services
    run.handle = None
    run.log = open(os.devnull, "w")
    return run


@cases("staleness", [0, 1, 2, 4])
@cases("loses", [False, True])
def test_staleness_is_bounded_and_groups_add_up(staleness: int, loses: bool) -> None:
    largest: list[int] = []
    for seed in range(3):
        run = run_of(SMALL_RUN, FakeServices(seed, loses))
        run.num_fruitless = 0  # many are lost
        loop = m.train_async(run, staleness, 60) if staleness else m.train_sync(run, 60)
        asyncio.run(asyncio.wait_for(loop, 120))
        counts = run.progress.counts()
        rows = run.progress.rows
        largest.append(max(row["staleness"] for row in rows))
        assert max(row["in_flight"] for row in rows) <= staleness * 4  # the batch has ended
        assert (run.version, counts["in_flight"]) == (60, 0)
        if staleness or not loses:  # a synchronous batch may lack groups that were lost
            assert counts["trained"] == 240
        assert counts["started"] == counts["trained"] + counts["dropped"] + counts["lost"]
        # Every prompt that was drawn, and no other, has ended.
        drawn = itertools.islice(m.training_prompts(run.task), counts["started"])
        assert [prompt.number for prompt in drawn][-1] == run.progress.num_drawn - 1
        assert (counts["lost"] > 0) is loses
    assert max(largest) == staleness


def test_a_request_has_at_most_64_prompts_and_512_rows_and_its_own_seed() -> None:
    services: Any = FakeServices()
    services.ask = AsyncMock(side_effect=lambda _, groups: [["no reward", [1.0]] for _ in groups])
    rollout = services.rollout
    run = run_of(CFG, services)
    seeds = []
    for num_samples, most in {1: 64, 8: 64, 16: 32, 1000: 1}.items():
        services.rollout = AsyncMock(side_effect=rollout)
        groups = asyncio.run(run.sample_and_score(letters(128), num_samples, num_samples))
        requests = [call.args for call in services.rollout.call_args_list]
        sizes = [len({episode.prompt.number for episode in asked}) for _, _, asked, _ in requests]
        assert (max(sizes), sum(sizes)) == (most, 128)
        seeds += [seed for *_, seed in requests]
        # One episode of a larger group is left out.
        assert [len(group) for group in groups] == [1] * (128 if num_samples == 1 else 0)
    assert len(set(seeds)) == len(seeds)
    assert asyncio.run(run.sample_and_score([], 2, 0)) == []  # as without held-out prompts


def test_a_buffer_is_a_queue_with_requests_that_the_generators_share() -> None:
    for staleness, generators, size in ((1, 2, 8), (4, 1, 16), (1, 64, 1)):
        cfg = replace(CFG, prompts_per_step=1, generators=generators)  # for 16 ranks
        run = fake(cfg=cfg, version=0, min_groups=16)
        buffer = m.ReplayBuffer(run, staleness, 2)
        assert buffer.request_size == size
    buffer.ready = [[m.Episode(m.Prompt(number, ()))] for number in range(20)]
    assert [group[0].prompt.number for group in asyncio.run(buffer.take())] == [*range(16)]


def test_no_held_out_prompt_is_ever_trained_on(swap: Any) -> None:
    run = run_of(SMALL_RUN, FakeServices())
    asyncio.run(m.train_async(run, 2, 60))
    asyncio.run(m.train_sync(run, 20))
    supervised = Mock(wraps=m.episode_with)
    swap("episode_with", supervised)
    m.sft(learner(prompts_per_step=4), m.training_prompts(run.task), 10)
    seen = [call.args[1] for call in supervised.call_args_list]
    assert len(seen) == 160
    trained_on = {str(prompt.turns) for prompt in seen + run.trainer.prompts}
    held_out = {str(prompt.turns) for prompt in run.held_out}
    assert len(trained_on) > 300 and len(held_out) == CFG.eval_prompts
    assert not trained_on & held_out


def test_a_step_that_a_signal_interrupts_is_finished_and_logged(tmp_path: Path) -> None:
    async def interrupt() -> Any:
        run = run_of(replace(SMALL_RUN, generators=1), FakeServices())
        run.log = open(tmp_path / "log", "w", buffering=1)
        run.trainer.k3 = math.nan
        groups = await run.sample(run.draw(4))
        run.trainer.request = AsyncMock(wraps=run.trainer.request)
        await run.trainer.trainer.acquire()  # the trainer is busy when the signal comes
        step = asyncio.ensure_future(run.step(groups))
        await asyncio.sleep(0.05)
        step.cancel()
        await asyncio.sleep(0.05)
        assert not step.done()
        run.trainer.trainer.release()
        with raises(asyncio.CancelledError):
            await step
        return run

    run = asyncio.run(interrupt())
    run.trainer.request.assert_called_with(m.require_finite)
    (line,) = (tmp_path / "log").read_text().splitlines()
    row = run.progress.rows[0]
    assert json.loads(line, parse_constant=pytest.fail) == row | {"k3": None}


def test_a_prompt_that_the_template_refuses_costs_only_itself(capsys: Any) -> None:
    policy = policy_of()
    policy.tokenizer.chat_template += NO_B

    class Refusing(FakeServices):
        async def request(self, method: Any, *args: Any) -> Any:
            for episode in args[2] if method == "rollout" else ():
                try:
                    policy.prompt_ids(episode.prompt, 0)
                except m.UsageError as error:
                    raise ActorError(error) from error
            return await super().request(method, *args)

    for texts in ("abcb", "bb"):
        run = run_of(replace(CFG, eval_prompts=1), Refusing())
        prompts = [m.Prompt(i, (m.user_turn(text, ""),)) for i, text in enumerate(texts)]
        groups = asyncio.run(run.sample_and_score(prompts, 2, None))
        assert (run.num_too_long, sum(run.errors.values())) == (0, 2)  # of two prompts
        kept = [group[0].prompt.number for group in groups]
        assert kept == [i for i, text in enumerate(texts) if text != "b"]
    assert re.search("not scored: .*'content': 'b'.*no b", capsys.readouterr().out)


@cases("loop", [lambda run: m.train_async(run, 2, 5), lambda run: m.train_sync(run, 5)])
@cases("error, told", [(m.ReplicaLost("died"), "no reward: .*died"), (KeyError("odd"), "odd")])
def test_a_run_that_earns_nothing_or_has_a_bug_ends(loop: Any, error: Any, told: str) -> None:
    services = FakeServices()
    services.request = AsyncMock(side_effect=error)
    with raises((m.RunError, KeyError), match=told):
        asyncio.run(asyncio.wait_for(loop(run_of(CFG, services)), 60))


def test_20_requests_that_earn_nothing_end_a_run_or_an_evaluation() -> None:
    ask = lambda: asyncio.run(run.sample_and_score(letters(1), 2, None))  # noqa: E731
    learned: Any = {"reward": "model"}
    for num_held_out, flags, num_wanted in ((8, {}, 1), (8, learned, 8), (7, {}, 8), (9, {}, 20)):
        progress = m.SavedProgress(heldout=[(0, 0.5)] * (num_held_out == 9))
        cfg = replace(CFG, train=True, eval_prompts=num_held_out, **flags)
        run = run_of(cfg, FakeServices(), progress)
        run.generators = fake(request=AsyncMock(return_value=[]))
        assert [ask() for _ in range(num_wanted - 1)] == [[]] * (num_wanted - 1)
        with raises(m.RunError, match="no prompt fits"):
            ask()
    run = run_of(CFG, FakeServices())
    assert ask() and run.num_fruitless == 0


def test_every_rank_has_rows_in_each_step_although_groups_are_lost() -> None:
    class Services(FakeServices):
        async def ask(self, method: str, groups: list[Any]) -> list[Any]:
            return [[[0.0], [1.0]]] + [["no", "no"]] * (len(groups) - 1)

        async def step(self, episodes: list[Any]) -> Any:
            for rank in range(4):
                batches = batches_of(m.UserLearner(policy, cfg, rank), episodes)
                assert all(len(batch.ids) > 0 for batch in batches)
            return await super().step(episodes)

    cfg = replace(SMALL_RUN, generators=1, trainers=4)
    policy = policy_of()
    run = run_of(cfg, Services())
    asyncio.run(asyncio.wait_for(m.train_sync(run, 3), 60))


def test_a_batch_that_is_cut_is_drawn_again_whole() -> None:
    async def rollout(_: str, __: Any, at_least: int, asked: list[Any], seed: int) -> list[Any]:
        parts.append({episode.prompt.number for episode in asked})
        await asyncio.sleep(0.05 * len(parts))
        return []  # one part is lost before the cut

    parts: list[Any] = []
    run = run_of(replace(SMALL_RUN, generators=2, eval_prompts=1), FakeServices())
    run.generators = fake(request=rollout)
    with raises(asyncio.TimeoutError):
        asyncio.run(asyncio.wait_for(m.train_sync(run, 1), 0.08))
    assert m.progress_state(run.progress)["requeued"] == sorted(parts[0] | parts[1])


def test_groups_of_equal_rewards_are_dropped_but_for_100_in_a_row() -> None:
    run = run_of(replace(SMALL_RUN, equal_rewards="drop"), FakeServices())
    kept: list[int] = []
    for number in range(202):
        other = 1.0 if number == 1 else 0.5
        run.reward_workers = fake(request=AsyncMock(return_value=[[[0.5], [other]]]))
        kept += [number] * len(asyncio.run(run.sample(run.draw(1))))
    assert kept == [1, *range(101, 202)] and run.progress.counts()["dropped"] == 100
    run.cfg = SMALL_RUN
    run.num_equal = 0
    assert len(asyncio.run(run.sample(run.draw(1)))) == 1


def test_a_truncated_episode_has_no_gradient_if_masked() -> None:
    how = {"turn_of": [0, 1, 1, 0, 2], "rewards": [0.0, 1.0], "truncated": [False, True]}
    for given, wanted in (("keep", [0, 1, 1, 0, 1]), ("mask", [0, 0, 0, 0, 0])):
        cfg = replace(CFG, advantage="none", truncated=given)
        found = m.UserLearner(policy_of(), cfg).advantages([m.Episode(letters(1)[0], **how)])
        assert found == [wanted]


@cases("num_left", [1, 31])
def test_the_time_left_is_that_of_the_median_step(num_left: int) -> None:
    run = run_of(SMALL_RUN, FakeServices())
    asyncio.run(m.train_sync(run, 4))
    for row, when in zip(run.progress.rows, (0, 1000, 1006, 1012), strict=True):
        row["time"] = when
    line = m.step_line(run.progress.rows, 4 + num_left)
    assert ("3 min left" in line, "min left" in line) == (num_left == 31,) * 2


@cases("done", [[], [0], [0, 2]])
def test_an_evaluation_that_a_signal_has_cut_comes_first(done: list[int], swap: Any) -> None:
    async def evaluate(*_: Any) -> None:
        progress.heldout.append((run.version, 0.0))

    swap("evaluate_pass_at_k", evaluate)
    swap("train_saved", AsyncMock(side_effect=lambda *_: before.update(dict(progress.heldout))))
    before: dict[int, float] = {}
    progress = m.SavedProgress(rows=[{}, {}] if done else [], heldout=[(v, 0.0) for v in done])
    run = run_of(replace(CFG, eval_every=2), FakeServices(), progress)
    assert asyncio.run(m.train_and_evaluate(run, Mock()))["steps"] == run.version
    assert list(before) == ([0, 2] if done else [0])


def test_a_task_with_held_out_prompts_only_is_refused(swap: Any) -> None:
    (held_out,) = m.held_out_prompts(TASK, 1)
    same = fake(prompt=lambda number: replace(held_out, number=number))
    swap("user_task", lambda cfg: same)
    with refused("held out"):
        run_of(replace(CFG, train=True), None)
    assert run_of(CFG, None).held_out  # to evaluate


def groups_with(*rewards: list[float]) -> list[Any]:
    """A group for each list, with an episode for each reward."""
    return [[m.Episode(PROMPT, rewards=[r]) for r in each] for each in rewards]


def test_pass_at_k_is_the_share_of_groups_with_a_right_response(capsys: Any) -> None:
    groups = groups_with([1, 0.99, 0, 0, 1], [0, 0, 0.99, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1])
    run = fake(held_out=[0] * 4, num_too_long=0, mean_reward=0.6)
    run.sample_and_score = AsyncMock(return_value=groups)
    run.evaluate = lambda: asyncio.sleep(0, 0.5)
    found = asyncio.run(m.evaluate_pass_at_k(run, 5))
    run.sample_and_score.assert_called_once_with(run.held_out, 5, seed=0)
    assert found["greedy"] == 0.5
    assert found["pass@1"] == approx((2 / 5 + 0 + 1) / 3)  # of groups with all samples
    assert found["pass@5"] == approx(2 / 3) and "right" not in capsys.readouterr().out
    run.evaluate = AsyncMock(return_value=0.0)
    asyncio.run(m.evaluate_pass_at_k(run))
    assert "greedy 0.000  reward 0.600  (right: a reward of 1)" in capsys.readouterr().out


def test_an_evaluation_counts_full_rewards_of_all_held_out_prompts() -> None:
    groups = groups_with([1.0], [0.99], [0.5])  # the fourth could not be scored
    groups[2][0].rewards = [0.5, 0.5]
    run = fake(held_out=[0] * 4, version=3, progress=m.Progress())
    run.sample_and_score = AsyncMock(return_value=groups)
    assert asyncio.run(m.Run.evaluate(run)) == 0.5
    run.sample_and_score.assert_called_once_with(run.held_out, 1, seed=None)
    groups.clear()
    assert asyncio.run(m.Run.evaluate(run)) is None
    assert run.progress.heldout == [(3, 0.5), (3, None)]


# == data and rewards of one's own ====

THINKS = "<think>Rome?</think>\n\nParis"
RIGHT = [(" paris. ", "Paris"), (THINKS, "Paris"), ("so #### Rome", "Rome"), ("{Rome}", "Rome")]
RIGHT += [(r"not \boxed{41} but \boxed{42}", "42"), ("is -3.50", "-3.5"), ("Paris\t", "Paris")]
RIGHT += [("«7» 👍", "«7» 👍"), ("cafe\u0301", "caf\u00e9"), ("\u22125", -5), ("0.00001", 1e-5)]
RIGHT += [(r"$\boxed{12}$ cm$^2$", 12), (r"\boxed{42}. In 3.", 42), ("$$\nx+1\n$$", "x+1")]
RIGHT += [(r"so \boxed{\frac{\sqrt{3}}{2}}.", r"\frac{\sqrt{3}}{2}")]
RIGHT += [("(B)", "B"), (".5", "0.5"), ("5 km^2", 5)]
THOUGHTS = [("<|channel|>analysis<|message|>3<|channel|>final<|message|>4", 4)]
THOUGHTS += [("[THINK]3[/THINK]4", 4), ("<think>3</think>4", 4)]
RIGHT += THOUGHTS
WRONG_ANSWERS = [("<|channel|>analysis<|message|>3", 3), ("[THINK]4", 4)]
WRONG_ANSWERS += [("London", "Paris"), ("42 or 43", "42"), ("", "Paris"), ("", "7"), ("-7", "7")]
WRONG_ANSWERS += [("<think>42", "42"), ("None", ""), ("B or C", "B"), ("a,b", "ab"), ("3/12", 12)]
WRONG_ANSWERS += [("{a} and {c}", "{a} and {b}"), ("\u22125", 5), (r"\boxed{41}. Or 42", 42)]
WRONG_ANSWERS += [("9" * 20, int("9" * 19 + "8")), ("3e8", 8), ("3/12", 3), ("1/2.5", 5)]
SAME_TEXT = "1e5 1_000 nan Infinity 1/2 3-4 x=2 Rome 7% -0.5 1,234 $5 (7) 2^10 ~".split()


def test_answers() -> None:
    task = object.__new__(m.FileTask)
    assert all(task.grade(answer, response) == 1 for response, answer in RIGHT)
    assert not any(task.grade(answer, response) for response, answer in WRONG_ANSWERS)
    assert [text for text in SAME_TEXT if task.grade(text, text) != 1] == []
    assert m.final_part(r"<think>7</think> So #### \boxed{1,042}.") == "1042"
    assert m.final_part("**(B)**.") == "b"


def test_a_response_keeps_the_marks_of_thoughts(tmp_path: Path) -> None:
    policy = policy_of(model_folder(tmp_path, characters=BYTES))
    marks = "<|channel|> <|message|> [THINK] [/THINK] <think> </think>".split()
    policy.tokenizer.add_tokens(marks, special_tokens=True)
    said = [("", text) for text in ("4", THOUGHTS[0][0], THOUGHTS[1][0])]
    for prompt, sampled in [*said, ("<think>\n", "3</think>4"), ("<think>\n", "4")]:
        episode = m.Episode(PROMPT)
        episode.add_prompt(policy.tokenize("<user>" + prompt))
        for token in policy.tokenize(sampled + "<end>"):
            episode.add(token, 1, 0.0)
        assert policy.response_text(episode, 1) == prompt.strip() + sampled


def test_words_are_graded() -> None:
    task = m.WordTask(0)
    responses = [" apple\n", "Apple.", "apple, it is", "an apple", ""]
    grades = [task.grade("apple", response) for response in responses]
    assert grades == approx([1, 1 / 2, 1 / 6, 0, 0]) and TASK.grade("abc", "abcd") == 3 / 4
    for prompt in letters(20):
        assert TASK.score(prompt, [turn.answer for turn in prompt.turns]) == [0.5, 0.5]


WRONG_LINES = dict.fromkeys(["{", "[1]", '{"answer": 1}', '{"prompt": 3}', "[" * 9999], "")
WRONG_LINES |= {
    '{"prompt": [{"role": 1}]}': "",
    '{"prompt": [{"role": "assistant", "content": "a"}]}': "",
    '{"prompt": "\\ud800"}': "",
    '{"prompt": " "}': "no question",
    '{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}': "content must be text",
    '{"question": "a", "answer": 1}': "no prompt in .*question",
    '{"prompt": [{"role": "human", "content": "a"}]}': r"roles \['human'\]",
    '{"prompt": "a", "solution": 1}': r"no answer .*'solution'\]: use --reward",
    '{"prompt": "a", "answer": "(*)."}': "no answer",
    '{"prompt": "a", "answer": 1, "held_out": "no"}': "held_out must be",
}


@cases("line", WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}\n\n')
    assert m.FileTask(str(file), 0).prompt(0) == m.Prompt(0, (m.user_turn("a", "b"),))
    m.prompt_of(0, {"prompt": [{"role": "observation", "content": "a"}]}, "")
    file.write_text(file.read_text() + line + "\n")
    with refused("line 3: .*" + WRONG_LINES[line]):
        m.FileTask(str(file), 0)


def data_file(folder: Path, num: int = 60) -> Path:
    """Sums. Texts have odd ends of lines, and a mark is at the front."""
    sums = [(number // 8, number % 8) for number in range(num)]
    lines = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in sums]
    lines[3]["note"] = "🙂 é \u2028 \x85"
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    file = folder / "data.jsonl"
    file.write_text("\ufeff" + text, encoding="utf-8")
    return file


def test_a_file_has_each_prompt_once_in_every_epoch(tmp_path: Path) -> None:
    file = str(data_file(tmp_path, 30))
    task, other = m.FileTask(file, 0), m.FileTask(file, 1)
    orders = [[str(task.prompt(30 * e + i).turns) for i in range(30)] for e in range(3)]
    assert [len(set(order)) for order in orders] == [30, 30, 30]
    assert orders[0] != [str(other.prompt(i).turns) for i in range(30)]
    assert [task.prompt(number).number for number in (3, 33)] == [3, 33]
    trained_on = {str(p.turns) for p in itertools.islice(m.training_prompts(task), 100)}
    held_out = {str(p.turns) for p in m.held_out_prompts(task, 10)}
    assert held_out and not trained_on & held_out
    for says in (True, False, None):
        prompts = [m.prompt_of(0, {"prompt": str(i), "held_out": says}, "") for i in range(99)]
        assert len({prompt.is_held_out for prompt in prompts}) == (2 if says is None else 1)
        assert says in (None, prompts[0].is_held_out)


def test_python_of_the_user_is_loaded_or_refused(tmp_path: Path) -> None:
    (tmp_path / "user_neighbour.py").write_text("VALUE = 7")
    code = tmp_path / "user_code.py"
    text = "from user_neighbour import VALUE\ndef f():\n    return VALUE\nnone = None\n"
    code.write_text(text + "trl = lambda prompts, completions, **columns: []")
    assert m.load_python(f"{code}:f")() == 7
    specs = {
        "user_code.py:g": "no attribute",
        "user_code.py:none": "none: .*not callable",
        "x:f": "FILE.py:NAME",
        "none.py:f": "no file .*/none.py",
        "none.jsonl": "FileNotFound",
        "data.csv": "csv: .*to_json",
        "user_wrong.py:f": r"user_wrong\.py, line 2: ZeroDivision",
        "asked.jsonl": "no answer",
    }
    asked = tmp_path / "asked.jsonl"
    asked.write_text('{"prompt": "a"}')
    m.make_task(str(asked), "model", 0)
    (tmp_path / "user_wrong.py").write_text("x = 1\ny = x / 0\n")
    (tmp_path / "other").mkdir()
    for name in ("user_neighbour", "statistics", "time"):
        (tmp_path / f"other/{name}.py").write_text("def f():\n    1 / 0\n")
        specs[f"other/{name}.py:f"] = "rename it"
    for spec, told in specs.items():
        with refused(told):
            m.make_task(f"{tmp_path}/{spec}", "", 0)
    with refused(r"not \(prompt, response, answer\)"):
        m.make_task(str(data_file(tmp_path)), f"{code}:trl", 0)


RESULTS = [(0.5, [0, 0.5]), (True, [0, 1]), ([1, 0], [1, 0]), ((0.25, 1), [0.25, 1])]
RESULTS += [([torch.tensor(0.25), 0.5], [0.25, 0.5]), (torch.tensor(0.5), [0, 0.5])]
NO_REWARDS = [None, math.nan, math.inf, 1e300, [1], [1, 2, 3], [0.5, None, 1], "x", [None, 1], {}]
NO_REWARDS += [[[0.5], [0.5]], LookupError("no")]


def test_results_of_score() -> None:
    for result, rewards in RESULTS:
        assert m.rewards_from(result, 2) == rewards
    for result in NO_REWARDS:
        told = "no" if isinstance(result, LookupError) else "not 2 finite numbers"
        with raises((ValueError, LookupError), match=told):
            m.rewards_from(result, 2)


def test_each_episode_of_a_group_is_scored_by_itself(swap: Any) -> None:
    results: dict[str, Any] = {
        "x": AsyncMock(side_effect=SystemExit(3)),
        "a": lambda: 0.5,
        "b": lambda: 1 / 0,
        "e": lambda: sys.exit(3),
        "f": AsyncMock(return_value=0.25),
        "g": AsyncMock(side_effect=KeyError),
    }

    def score(prompt: Any, responses: list[str]) -> Any:
        del prompt.turns[0].messages[0]["role"]  # of a copy
        return results[responses[0]]()

    swap("user_task", lambda cfg: fake(score=score))
    group = [(PROMPT, [response]) for response in results]
    (rewards,) = m.call_task(CFG, "score", [group])
    scored = dict(zip(results, rewards, strict=True))
    found = {response: text for response, text in scored.items() if not isinstance(text, str)}
    assert found == {"a": [0.5], "f": [0.25]} and "ZeroDivisionError" in scored["b"]


def test_coroutines_of_all_groups_run_together(swap: Any) -> None:
    async def meet(response: str) -> float:
        if response == "late":
            await asyncio.sleep(1000)
        await asyncio.wait_for(barrier.wait(), 10)  # all other groups are here, too
        return 0.5

    barrier = asyncio.Barrier(3)
    swap("user_task", lambda cfg: fake(score=lambda prompt, responses: [meet(responses[0])]))
    groups = [[(PROMPT, [response])] for response in ("a", "late", "b", "c")]
    found = m.call_task(replace(CFG, reward_deadline=2.0), "score", groups)
    assert [found[0], *found[2:]] == [[[0.5]]] * 3 and found[1] == ["TimeoutError"]


def test_a_reward_function_is_called_turn_by_turn() -> None:
    reward = Mock(return_value=0.5)
    prompt = m.Prompt(0, (m.user_turn("p", 1), m.Turn(CHAT, 2)))
    task = m.UserTask(fake(prompt=lambda number: prompt), reward)
    assert task.score(task.prompt(3), ["a", "b"]) == [0.5, 0.5]
    calls = [call.args for call in reward.call_args_list]
    assert calls == [("p", "a", 1), (list(CHAT), "b", 2)] and task.score(PROMPT, ["a"]) == [0.5]
    assert task.prompt(3) == replace(prompt, number=3)


def recipe(folder: Path, package: str, spec: str) -> m.Config:
    pytest.importorskip(package)
    file = spec.partition(":")[0]
    _, _, text = DOCS.partition(f"# {file}, for ")
    (folder / file).write_text("#" + text.partition("```")[0])
    return replace(CFG, model="x", task=f"{folder}/{spec}")


def tells_right_from_wrong(cfg: m.Config, answer: Any) -> bool:
    prompt = m.user_task(cfg).prompt(7)
    responses = [(prompt, [answer(prompt)]), (prompt, ["none"])]
    return m.call_task(cfg, "score", [responses]) == [[[1.0], [0.0]]]


def talk(cfg: m.Config, *responses: str) -> list[Any]:
    """What an environment says after each response, as role and text, and then the rewards."""
    episode = m.Episode(m.user_task(cfg).prompt(7))
    turns = []
    for response in responses:
        episode.responses.append(response.format(episode.prompt.turns[0].answer))
        ((reply,),) = m.call_task(cfg, "reply", [[(episode.prompt, episode.responses)]])
        if reply:
            episode.add_reply(reply)
        turns.append(reply and (*reply.messages[0].values(),))
    (rewards,) = m.call_task(cfg, "score", [[(episode.prompt, episode.responses)]])
    return [*turns, *rewards]


def test_the_recipes_for_a_user_and_for_a_tool(tmp_path: Path) -> None:
    cfg = recipe(tmp_path, "monarch_rl", "guess.py:Guess")
    told = ("Higher.", "Lower.", "Write only a number.")
    higher, lower, other = [("user", text) for text in told]
    assert talk(cfg, "It is 99.", "none", "0", "{}.") == [lower, other, higher, None, [0, 0, 0, 1]]
    assert talk(cfg, "1", "99", "1", "1") == [higher, lower, higher, None, [0, 0, 0, 0]]
    cfg = recipe(tmp_path, "monarch_rl", "tool.py:Calculator")
    results = [("tool", "84"), ("tool", "error: write calc(12 * 7)"), None, [0, 0, 1]]
    assert talk(cfg, "I write calc(12 * 7).", "calc(9 ** 9)", "{}") == results
    assert talk(cfg, "It is 1") == [None, [0]]


def test_the_recipe_for_a_page(tmp_path: Path) -> None:
    recipe(tmp_path, "pandas", "page.py")
    names = "reward response_tokens truncated equal_rewards staleness k3 entropy seconds".split()
    rows = [{name: 0.25 * i for name in names} | {"step": i, "time": 60 * i} for i in (1, 2, 3)]
    text = "\n".join(json.dumps(row | {"sample": f"<{row['step']}>"}) for row in rows)
    (tmp_path / "log").write_text(text)
    (tmp_path / "json").write_text('{"train": {"heldout": [[0, 0.125], [3, 0.875]]}}')
    (tmp_path / "flags").write_text('{"model": "", "task": "t<5"}')
    words = [sys.executable, "page.py", "log", "json", "flags"]
    page = subprocess.check_output(words, cwd=tmp_path, text=True)
    assert "<h1>tiny policy, t&lt;5: held-out accuracy 0.125 -&gt; 0.875 in 2.0 minutes" in page
    assert page.count("<svg") == 6 and "#010203" not in page and "<script" not in page
    assert "held-out accuracy: 0.12 to 0.88, last 0.88" in page


def test_the_recipe_for_reasoning_gym(tmp_path: Path) -> None:
    cfg = recipe(tmp_path, "reasoning_gym", "rg.py:Sums")
    assert tells_right_from_wrong(cfg, lambda p: f"It is {p.turns[0].answer['answer']}.")


TASKSET = """
import verifiers.v1 as vf
__all__ = ["Reverse"]
class Data(vf.TaskData):
    answer: str
class Task(vf.Task[Data, vf.State, vf.TaskConfig]):
    @vf.reward
    async def exact(self, trace):
        return float(trace.last_reply == self.data.answer)
class Reverse(vf.Taskset[Task, vf.TasksetConfig]):
    def load(self):
        for number in range(20):
            yield Task(Data(prompt=f"Reverse {number}", answer=str(number)[::-1]))
"""


def test_the_recipe_for_verifiers(tmp_path: Path) -> None:
    cfg = recipe(tmp_path, "verifiers.v1", "tasks.py:Tasks")
    (tmp_path / "reverse_text.py").write_text(TASKSET)
    assert tells_right_from_wrong(cfg, lambda p: p.turns[0].messages[0]["content"].split()[1][::-1])


ENVIRONMENT = """
import sys, uvicorn
from openenv.core.env_server import *
class Say(Action):
    message: str
class Heard(Observation):
    question: str = ""
class Doubles(Environment):
    state = State()
    def reset(self, seed=None, **_):
        self.number, self.left = seed, 2
        return Heard(question=f"Double {seed}")
    def step(self, action, **_):
        self.number *= 2
        self.left -= 1
        how = {"question": f"Double {self.number}", "done": not self.left}
        return Heard(reward=float(action.message == str(self.number)), **how)
uvicorn.run(create_fastapi_app(Doubles, Say, Heard), port=int(sys.argv[1]))
"""


def test_the_recipe_for_openenv(tmp_path: Path, monkeypatch: Any) -> None:
    cfg = recipe(tmp_path, "openenv.core", "room.py:Room")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    monkeypatch.setenv("OPENENV_URL", f"http://127.0.0.1:{port}")
    server = subprocess.Popen([sys.executable, "-c", ENVIRONMENT, str(port)])
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    right, wrong = talk(cfg, "14", "28"), talk(cfg, "14", "none")
    server.kill()
    server.wait()
    assert right == [("user", "Double 14"), None, [0, 1]]
    assert wrong == [("user", "Double 14"), None, [0, 0]]


USER_REWARDS = """
import asyncio, concurrent.futures, json, multiprocessing, os, signal, subprocess, time
def alarm():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 0.25
def double(x):
    return 2 * x
def raises(error=LookupError("nothing here")):
    raise error
class Wrong(Exception):
    __str__ = None
async def ends():
    os._exit(3)
async def client():
    loop = asyncio.get_running_loop()
    assert loops.setdefault("first", loop) is loop  # as a client of a module asks for
    return 0.375
loops = {}
interrupts = lambda: raises(KeyboardInterrupt())
wrong = lambda: raises(Wrong())
long = lambda: raises(ValueError("long \\n" * 9999))
library = lambda: json.loads("{")
def in_pool(function, x):
    return concurrent.futures.ProcessPoolExecutor(1).submit(function, x).result()
stuck = lambda: sum(range(10**12))  # other threads of Python do not run meanwhile
run = lambda: asyncio.run(asyncio.sleep(0, 0.5))
pool = lambda: in_pool(double, 0.5)
child = lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True) and 0.125
method = lambda: multiprocessing.set_start_method("spawn") or 0.625
dies = lambda: os._exit(3)
hangs = lambda: in_pool(time.sleep, 1000)
reward = lambda prompt, response, answer: globals()[response]()
"""


def user_rewards(folder: Path) -> Any:
    file = folder / "user_rewards.py"
    file.write_text(USER_REWARDS)
    task = str(data_file(folder))
    return replace(CFG, model="x", task=task, reward=f"{file}:reward", reward_deadline=6.0)


def test_reward_functions_as_people_write_them(tmp_path: Path, monkeypatch: Any) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))  # as main does for workers
    submit = create_autospec(m.ProcessPoolExecutor.submit, side_effect=m.ProcessPoolExecutor.submit)
    monkeypatch.setattr(m.ProcessPoolExecutor, "submit", submit)
    worker = object.__new__(m.RewardWorker)
    worker.setup(0, user_rewards(tmp_path), m.UserProcess)
    wanted = {"alarm": 0.25, "run": 0.5, "pool": 1.0, "child": 0.125, "client": 0.375}
    names = [*wanted, "client", "ends", "interrupts", "wrong", "long", "raises", "library"]
    names += ["dies", "method", "alarm", "hangs", "pool", "child"]
    wanted |= {"method": 0.625}  # only once in a process, and first
    found = worker.ask("score", [[(PROMPT, [name])] for name in names])
    # A call for each group, and one that `ends` ended; a process at first, and after it, `ends`
    # alone, `dies` and `hangs`.
    sent = Counter(call.args[1] for call in submit.call_args_list)
    assert sent == {m.call_task: len(names) + 1, os.getpid: 5}
    for name, (rewards,) in zip(names, found, strict=True):
        assert rewards == [wanted[name]] if name in wanted else isinstance(rewards, str), rewards
    for name in ("raises", "library"):
        assert "user_rewards.py, line" in found[names.index(name)][0]
    assert all(len(text) < 500 and "\n" not in text for (text,) in found if isinstance(text, str))
    # One child ended with the process that died, the other is killed when the worker is released.
    assert sum("sleep 1000" in line for line in processes(mark).values()) == 1
    m.release(worker)
    until(lambda: not processes(mark), 10)


def test_a_reward_process_that_does_not_start_is_given_up(swap: Any) -> None:
    pools = Mock()
    pools().submit().result.side_effect = TimeoutError
    swap("ProcessPoolExecutor", pools)
    one, other = m.UserProcess(CFG)("score", [[(PROMPT, ["a"])]] * 2)
    assert one == other and "no score (--reward-deadline 60)" in one[0]


CUT = """
import multiprocessing.connection, os
def reward(prompt, response, answer):
    send = multiprocessing.connection.Connection._send
    def cut(self, data, *args):
        send(self, bytes(data[:9]))
        os.kill(os.getpid(), 9)
    multiprocessing.connection.Connection._send = cut
    return 1.0
"""


def test_a_reward_process_may_die_while_it_answers(tmp_path: Path) -> None:
    files = lambda: {*Path("/dev/shm").glob("sem.mp-*")}  # noqa: E731
    before = files()
    cfg = user_rewards(tmp_path)
    Path(cfg.reward.partition(":")[0]).write_text(CUT)
    score = m.UserProcess(replace(cfg, reward_deadline=0.5))
    asked = ThreadPoolExecutor(1).submit(score, "score", [[(PROMPT, ["a"])]])
    assert "terminated abruptly" in asked.result(60)[0][0]
    assert files() <= before


PARENT = """
import sys
import monarch_rl as m
if __name__ == "__main__":
    cfg = m.Flags(model="x", task=sys.argv[1], reward=sys.argv[2])
    prompt = m.Prompt(0, (m.user_turn("p", 1),))
    score = m.UserProcess(cfg)
    print(score("score", [[(prompt, ["child"])]]), flush=True)
    score("score", [[(prompt, ["stuck"])]])
"""


def test_what_a_reward_function_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    cfg = user_rewards(tmp_path)
    (tmp_path / "parent.py").write_text(PARENT)
    command = f"exec {sys.executable} parent.py {cfg.task} {cfg.reward}"
    worker = Command(tmp_path, "", command, PYTHONPATH=str(FOLDER))
    worker.until("[[[0.125]]]")
    until(lambda: "sleep 1000" in str(processes(worker.mark)))  # after its exec
    time.sleep(1)  # the next one is stuck
    worker.process.kill()
    worker.end(-signal.SIGKILL)


# == commands ====

WRONG = (
    "--stage weigth_sync|--only nothing|--max-stalenes 2|--steps x|more|--lr nan|--loss ppp"
    "|--max-staleness -1|--train --model ./none"
    "|--train --reward own.py:f|--train --export /proc/x|--train --checkpoint /proc/x"
    "|--log /proc/x/log|--model qwen2"
)


SUGGESTED = {  # the new name of a flag, or the help
    "--learning_rate=1 2": "--lr",
    "--config x": "@FILE",
    "--foo[ 2": "--help",
}


@cases("words", [*WRONG.split("|"), *SUGGESTED])
def test_wrong_usage_is_one_line_and_status_2(words: str, capsys: Any) -> None:
    assert m.main(words.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and re.fullmatch(r"monarch_rl\.py: .+\n", err)
    assert SUGGESTED.get(words, "") in err


def test_a_running_loop_is_told_to_be_a_notebook(capsys: Any) -> None:
    cell = AsyncMock(side_effect=m.main)
    assert asyncio.run(cell(["--train"])) == 2 and "notebook" in capsys.readouterr().err


def test_mistakes_are_told_by_the_flags_that_they_concern() -> None:
    own = {"model": "x", "train": True}
    for changes, wanted in (
        ({}, []),
        ({"steps": 0}, ["--steps"]),
        ({"temperature": 0.0}, ["--temperature"]),
        ({"kl": -1.0}, ["--kl"]),
        ({"max_staleness": 0, "kl": 0.0, "evaluate": 0}, []),
        ({"lr": math.inf}, ["--lr"]),
        ({"group_size": 1}, ["--group-size"]),
        ({"group_size": 1, "advantage": "critic"}, []),
        ({"device": "cuda"}, ["--device cuda"][torch.cuda.is_available() :]),
        ({"trainers": 2, "advantage": "critic"}, ["--trainers"]),
        ({"task": "x.jsonl"}, ["--reward, and a --task other than repeat"]),
        (own | {"preferences": "x"}, ["--preferences and --reward model"]),
        (own | {"reward": "model"}, ["--preferences and --reward model"]),
        (own | {"reward": "model", "preferences": "x"}, []),
    ):
        told = [mistake.partition(":")[0] for mistake in m.mistakes_in(replace(CFG, **changes))]
        assert told == wanted
    with patch.dict(os.environ, TORCHELASTIC_RUN_ID="1"):
        assert "torchrun" in str([*m.mistakes_in(CFG)])


def test_an_output_is_no_input(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(data_file(tmp_path))
    spec = f"{tmp_path}/own.py:reward"
    cfg = replace(CFG, train=True, model=str(tmp_path), task=str(tmp_path / "data.jsonl"))
    outputs = {"link": "log", "./data.jsonl": "json", "own.py": "log", "": "export"}
    for path, flag in outputs.items():
        changed = replace(cfg, reward=spec, **{flag: f"{tmp_path}/{path}"})
        assert [*m.mistakes_in(changed)] == ["an output is also an input"]
    assert [*m.mistakes_in(replace(cfg, reward=spec, log="data.jsonl"))] == []
    model = {"reward": "model", "preferences": "x", "export": "model"}
    assert [*m.mistakes_in(replace(cfg, **model))] == []
    (tmp_path / "old").touch()
    told = [*m.mistaken_paths(replace(cfg, json=str(tmp_path / "old")))]
    assert told == [f"{tmp_path}/config.json: no such path"]
    assert not (tmp_path / "old").exists()


def test_an_error_in_a_prompt_is_told(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text("class T:\n def prompt(self, number):\n  1 / number")
    task = m.user_task(replace(CFG, model="x", task=f"{tmp_path / 'late.py'}:T"))
    for number, told in ((0, r"prompt\(0\): .*late.py, line 3: Zero"), (1, r"prompt\(1\): not")):
        with refused(told):
            task.prompt(number)
    with refused(r"prompt\(0\): .*no attribute 'prompt'"):
        m.UserTask(object(), None).prompt(0)


SAVED = ["", "[1]", "null", '{"a', '{"loss": "nonsense"}', '{"steps": 1.5}', '{"lr": null}']


def test_flags_are_read_from_a_file(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "own").write_text("--train\n--steps=7\n--lr=2\n")
    cfg = m.read_flags([f"@{tmp_path}/own", "--lr", "3"])
    assert (cfg.train, cfg.steps, cfg.lr) == (True, 7, 3)
    with raises((SystemExit, m.argparse.ArgumentError)):  # by version of Python
        m.read_flags([f"@{tmp_path}/none"])
    assert len(capsys.readouterr().err.splitlines()) < 2


def test_saved_flags_are_checked_like_given_ones(tmp_path: Path, capsys: Any) -> None:
    file = tmp_path / "flags.json"
    words = ["--train", "--checkpoint", str(tmp_path), "--kl", "0.5"]
    with refused("nothing saved there"):
        m.read_flags(words)
    file.write_text('\ufeff{"save_every": 7, "steps": 7, "kl": 0.1, "of_old": 1}')
    assert (m.read_flags(words).steps, m.read_flags(words).kl) == (7, 0.5)
    assert f"{file}: --save-every=7 --steps=7\n" in capsys.readouterr().out
    assert [m.read_flags(["--train", *own]).lr for own in ([], ["--model=x"])] == [1e-3, 1e-6]
    for flag, value in (("task", "x.jsonl"), ("sft-steps", "9"), ("model", "x")):
        with refused("use a new folder"):
            m.read_flags([*words, f"--{flag}", value])
    for text in SAVED:
        file.write_text(text)
        with refused(str(file)):
            m.read_flags(words)


def test_command_a_mistake_is_one_line_and_status_2(tmp_path: Path) -> None:
    model_folder(tmp_path, characters="0123456789+")  # its context has 128 tokens
    output = Command(tmp_path, "--train --model qwen2 --max-new-tokens 9999 --generators 1").end(2)
    assert len(re.findall("^monarch_rl.py: |Traceback", output, re.MULTILINE)) == 1


def test_command_a_machine_may_lack_what_is_usual(tmp_path: Path) -> None:
    env = os.environ | {"TMPDIR": "/nowhere", "PYTHONIOENCODING": "latin-1", "RANK": "3"}
    how: Any = {"cwd": tmp_path, "env": env, "stderr": subprocess.PIPE}
    (tmp_path / "copy").mkdir()
    (tmp_path / "math.py").write_text("1 / 0")  # is not taken for the one of Python
    file = shutil.copy(FILE, tmp_path / "copy" / "my-rl.py")
    command = f"{sys.executable} -P {file} --only hello_actor --json out.json"
    for output in ("/dev/null", "/dev/full"):
        done = subprocess.run(["bash", "-c", f"{command} > {output}"], **how)
        assert done.returncode == (output == "/dev/full"), done.stderr
        assert b"Traceback" not in done.stderr


def test_command_the_tour_confirms_all_stages(tmp_path: Path) -> None:
    Command(tmp_path, "--json out.json").end()
    assert os.listdir(tmp_path) == ["out.json"]
    stages = read(tmp_path)["stages"]
    assert [stage["name"] for stage in stages] == list(m.STAGES)
    assert any(stage["rows"] for stage in stages)
    for stage in stages:
        assert stage["checks"] and all(check["ok"] for check in stage["checks"])


WITHOUT = """
import importlib, sys
import monarch_rl as m
if __name__ == "__main__":
    m.STAGES = {name: importlib.import_module(name).STAGES[name] for name in sys.argv[1:]}
    sys.exit(m.main(["--json", "out.json"]))
"""
CHECKS = """additions of 200 lost by the actor|members of 4 that ran under `call`
|s from the pull to the end of `compute`|witnesses of 3 in the journal of this process
|hangs detected by the ping|requests of 400 with the right answer|torn reads of 96 with leases
|bytes written / bytes needed|k3 of recorded and recomputed|push with a clip / without
|largest staleness|largest staleness|largest difference of a weight|right letters, critic - batch
|liked share at the end, with --kl|torn reads of 100""".replace("\n", "").split("|")
NAMED = dict(zip(m.STAGES, CHECKS, strict=True))


def each_fails(folder: Path, *stages: str) -> None:
    """Runs stages, each of a module of its own that lacks its mechanism, in one command."""
    folder.mkdir(exist_ok=True)
    for stage in stages:
        changed(folder, stage, stage)
    (folder / "without.py").write_text(WITHOUT)
    script = f"{sys.executable} without.py {' '.join(stages)}"
    output = Command(folder, "", script, PYTHONPATH=f"{FOLDER}:{folder}").end(1)
    for told in read(folder)["stages"]:
        failed = [check["what"] for check in told["checks"] if not check["ok"]]
        if NAMED[told["name"]] not in failed and len(stages) > 1:  # by chance
            each_fails(folder, told["name"])
        else:
            assert NAMED[told["name"]] in failed, output


def test_command_stages_fail_without_their_mechanisms(tmp_path: Path) -> None:
    training = {"sync_rl", "async_rl", "recovery", "critic", "reward_model"}

    def half_fails(trains: bool) -> None:
        each_fails(tmp_path / str(trains), *[s for s in m.STAGES if (s in training) == trains])

    with ThreadPoolExecutor() as pool:
        assert list(pool.map(half_fails, [True, False])) == [None, None]


REWARD = """
def reward(prompt, response, answer):
    return sum(a == b for a, b in zip(answer, response)) / max(len(answer), len(response), 1)
"""


def test_command_the_whole_way_of_a_user(tmp_path: Path) -> None:
    model_folder(tmp_path, characters="0123456789+")
    data_file(tmp_path)
    (tmp_path / "own.py").write_text(REWARD)
    words = "--train --model qwen2 --task data.jsonl --reward own.py:reward"
    words += " --sft-steps 6 --steps 6 --prompts-per-step 4"
    words += " --group-size 4 --max-new-tokens 4 --lr 1e-3 --eval-every 2 --evaluate 2"
    words += " --json out.json --log log.jsonl --samples samples.jsonl --export out"
    output = Command(tmp_path, words).end()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").open()]
    assert all([said["role"][0] for said in row["messages"]] == ["u", "a"] for row in samples)
    assert sum(not row["held_out"] for row in samples) >= 6 * 16
    held_out = Counter(row["version"] for row in samples if row["held_out"])
    assert held_out[0] == held_out[2] == held_out[6] / 4 > 0  # at 6 twice, and pass@2
    rewards = [sum(row["rewards"]) for row in samples if row["held_out"] and not row["version"]]
    assert f"reward {sum(rewards) / len(rewards):.3f}" in output.split("step ")[0]
    figures = read(tmp_path)["train"]
    assert (figures["steps"], figures["workers_replaced"]) == (6, 0)
    assert {version for version, _ in figures["heldout"]} == {0, 2, 4, 6}
    rows = logged(tmp_path)
    assert rows[0]["staleness"] == 0
    assert all(row["k3"] < 1e-6 for row in rows if row["staleness"] == 0)
    assert max(row["reward"] for row in rows) > 0
    assert not have_same_weights(tmp_path / "out", tmp_path / "qwen2")


def test_command_two_ranks_train_what_one_does(tmp_path: Path) -> None:
    words = "--train --max-staleness 0 --generators 1 --steps 4 --sft-steps 3 --prompts-per-step 8"
    words += " --eval-prompts 8 --export out --log log.jsonl"
    found = []
    for num_trainers in (1, 2):
        folder = tmp_path / str(num_trainers)
        folder.mkdir()
        Command(folder, f"{words} --trainers {num_trainers}").end()
        norms = [row["grad_norm"] for row in logged(folder)]
        found.append((load(folder / "out").state_dict(), norms))
    (one, norms), (two, norms_of_two) = found
    start = m.tiny_policy(0)[1].state_dict()
    assert list(one) == list(two) == list(start)
    moved = max(float((one[name] - start[name]).abs().max()) for name in one)
    differ = max(float((one[name] - two[name]).abs().max()) for name in one)
    assert moved > 3e-3 and differ < 1e-4
    assert norms_of_two == approx(norms, rel=1e-3)


def test_command_sigterm_ends_a_run_in_order(tmp_path: Path) -> None:
    words = "--train --task repeat --steps 100000 --eval-prompts 8 --generators 1"
    for beginning in ("step", "the tiny policy"):
        command = Command(tmp_path, f"{words} --checkpoint RUN", TMPDIR=str(tmp_path))
        command.until(beginning)  # the second time, its workers start
        until(lambda: len(command.children()) >= 2)  # noqa: B023
        for _ in range(2):  # to all processes; the second one changes nothing
            for number in (*command.children(), command.process.pid):
                os.kill(number, signal.SIGTERM)
            time.sleep(0.05)
        output = command.end(128 + signal.SIGTERM)
        assert "Traceback" not in output and "ending; a step" in output
        assert ("saved after step" in output) == (beginning == "step")
        assert not list(tmp_path.glob("monarch_rl_*"))


def test_a_signal_at_the_end_counts_without_a_terminal(tmp_path: Path, swap: Any) -> None:
    async def strike(pool: Any) -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.1)

    swap("ENDING", [signal.SIGHUP])
    swap("run_stages", AsyncMock(return_value={}))
    swap("print", MagicMock(side_effect=OSError), raising=False)
    swap("WarmPool.close", strike)
    assert asyncio.run(m.run_command(replace(CFG, json=str(tmp_path / "json")))) == 129
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert read(tmp_path, "json") == {"stages": [], "train": {}}


# == recovery ====


def trainer_of(learned: Any, version: int = 0) -> Any:
    return fake(learner=learned, version=version, writer=Mock())


def saved_run(**progress: Any) -> Any:
    """A run whose trainer writes checkpoints of a small learner."""

    async def request(what: Any, *args: Any) -> None:
        what(trainer, *args)

    trainer = trainer_of(learner())
    run = run_of(CFG, fake(request=request))
    run.progress = m.SavedProgress(**progress)
    return run


def test_the_newest_whole_file_is_used(tmp_path: Path, capsys: Any, swap: Any) -> None:
    checkpoints = m.Checkpoints(tmp_path / "run")
    assert checkpoints.newest() == ("", m.SavedProgress())
    run = saved_run(num_drawn=90, requeued=[3], in_flight={88, 7}, ended={"lost": 2})
    for version in (1, 2, 3):
        run.progress.rows.append({"step": version, "reward": math.nan})
        asyncio.run(checkpoints.save(run))
    newest, older = checkpoints.paths()
    path, progress = checkpoints.newest()
    assert (path, older.name) == (str(newest), "step_00000002.pt")  # two are kept
    assert (len(progress.rows), progress.num_drawn, progress.ended) == (3, 90, {"lost": 2})
    assert (progress.requeued, progress.in_flight) == ([3, 7, 88], set())
    whole = newest.read_bytes()
    for damaged in (whole[:-100], whole[:9999], whole.replace(b"reward", b"drawer"), b""):
        newest.write_bytes(damaged)
        assert checkpoints.newest()[0] == str(older)
        assert f"{newest} is damaged" in capsys.readouterr().out
    newest.write_bytes(whole)
    for error in (OSError("I/O"), MemoryError(), TypeError("a field"), RuntimeError("CUDA")):
        swap("read_progress", Mock(side_effect=error))
        with raises(m.RunError, match=rf"{newest}: {type(error).__name__}"):
            checkpoints.newest()
    assert newest.is_file()  # it may be whole


def test_a_folder_may_have_other_files_but_no_second_run(tmp_path: Path) -> None:
    checkpoints = m.Checkpoints(tmp_path)
    others = {"step_best.pt", "step_00000040 (1).pt", "step_.pt", "lock"}
    for name in others | {"step_00000007.pt", "step_00000009.pt", "step_00000008.pt.new"}:
        (tmp_path / name).touch()
    asyncio.run(checkpoints.save(saved_run(rows=[{}] * 10)))
    kept = {path.name for path in checkpoints.paths()}
    assert {*os.listdir(tmp_path)} - others == kept == {"step_00000010.pt", "step_00000009.pt"}
    with refused("another run uses it"):
        m.Checkpoints(tmp_path)


@cases("value", [math.nan, math.inf, 1e30])
def test_weights_that_are_not_finite_are_not_written(tmp_path: Path, value: float) -> None:
    trainer = trainer_of(learner(), 3)
    trainer.learner.weights[-1].data[0] = value
    for write in (partial(m.write_checkpoint, progress={}), m.export):
        with raises(m.RunError, match="diverged after step 3: lower --lr"):
            write(trainer, str(tmp_path / "new"))
    assert os.listdir(tmp_path) == []


@cases("num_trainers, lives", [(1, True), (1, False), (2, True)])
def test_an_error_of_a_worker_saves_the_run(tmp_path: Path, num_trainers: int, lives: bool) -> None:
    cfg = replace(CFG, checkpoint="RUN", max_staleness=0, trainers=num_trainers)
    run = run_of(cfg, saved_run().trainer)
    run.trainer.ready = lambda: [run] * lives
    run.draw = Mock(side_effect=ActorError(ValueError("a")))
    checkpoints = m.Checkpoints(tmp_path)
    with raises(ActorError):
        asyncio.run(m.train_saved(run, checkpoints, run.evaluate))
    assert len(checkpoints.paths()) == (lives and num_trainers == 1)


def test_a_failed_save_is_said_and_the_older_one_stays(tmp_path: Path, capsys: Any) -> None:
    checkpoints = m.Checkpoints(tmp_path)
    run = saved_run(rows=[{}])
    assert asyncio.run(checkpoints.save(run))
    run.trainer.request = AsyncMock(side_effect=ActorError(OSError("disk full")))
    run.progress.rows.append({})
    assert not asyncio.run(checkpoints.save(run))
    assert "step 2 is not saved: " in capsys.readouterr().out
    assert [path.name for path in checkpoints.paths()] == ["step_00000001.pt"]

    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9999, limit[1]))
    with raises(OSError, match="File too large"):
        m.write_durably(tmp_path / "step_00000003.pt", {"full": torch.zeros(9999)})
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(os.listdir(tmp_path)) == ["lock", "step_00000001.pt"]


def test_a_file_is_on_disk_before_it_has_its_name(tmp_path: Path, swap: Any) -> None:
    def sync(file: int) -> None:
        assert os.fstat(file).st_size > 0
        synced.append((os.readlink(f"/proc/self/fd/{file}"), (tmp_path / "x").exists()))

    synced = []
    swap("os.fsync", sync)
    m.write_durably(tmp_path / "x", "text")
    assert synced == [(f"{tmp_path}/x.new", False), (str(tmp_path), True)]


@cases("kind", ["group", "critic"])
def test_a_restored_learner_goes_on_as_if_nothing_had_happened(tmp_path: Path, kind: str) -> None:
    def new(lr: float = 1e-3) -> Any:
        return m.UserLearner(policy_of(), replace(CFG, lr=lr, advantage=kind))

    def after_steps(version: int, path: str, forgets: bool = False) -> torch.Tensor:
        trainer = trainer_of(new(), version)
        m.restore(trainer, path)
        trainer.writer.publish.assert_called_once_with(version)
        if forgets:
            trainer.learner.optimizer.state.clear()
        make_steps(trainer.learner)
        return parameters(trainer.learner)

    def make_steps(learned: Any) -> None:
        for _ in range(2):  # the second one is by the moments of the critic, too
            learned.step(episodes)

    first, saved = str(tmp_path / "first.pt"), str(tmp_path / "saved.pt")
    one = new()
    episodes = episodes_of(one)
    m.write_checkpoint(trainer_of(new()), first, {})
    make_steps(one)
    assert torch.equal(after_steps(0, first), parameters(one))
    m.write_checkpoint(trainer_of(one, 1), saved, {})
    make_steps(one)
    assert torch.equal(after_steps(1, saved), parameters(one))
    assert not torch.equal(after_steps(1, saved, forgets=True), parameters(one))
    slower = new(lr=1e-5)
    m.restore(trainer_of(slower, 1), saved)
    assert slower.optimizer.param_groups[0]["lr"] == 1e-5


def test_a_signal_counts_although_the_save_fails() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ActorError(OSError("disk full"))

    async def work() -> None:
        asyncio.get_running_loop().call_soon(asyncio.current_task().cancel)
        await m.finished(fail())

    with raises(asyncio.CancelledError):
        asyncio.run(work())


def test_prompts_in_flight_are_drawn_again_before_others() -> None:
    async def train() -> list[int]:
        drawn = []
        progress = m.SavedProgress()
        for _ in range(4):  # lives, each of which ends in the middle
            services = FakeServices(len(drawn))
            services.version = len(progress.rows)
            run = run_of(SMALL_RUN, services, progress)
            run.prompts = m.requeued_first(run.task, progress.requeued, run.prompts)
            async with m.generating(run, 2) as buffer:
                await m.learn(buffer, 5)
                state = m.progress_state(run.progress)
            drawn += [prompt.number for prompt in run.trainer.prompts]
            progress = m.SavedProgress(**state)
        assert progress.requeued
        return drawn[::2]  # groups have two episodes

    drawn = asyncio.run(train())
    assert len(drawn) == len(set(drawn)) == 4 * 5 * 4  # none twice


def test_command_a_run_that_is_struck_anywhere_comes_to_its_end(tmp_path: Path) -> None:
    """Four times a random child is killed or stopped, 1 to 5 seconds after the one before."""
    rng = random.Random(0)
    words = "--train --task repeat --steps 120 --checkpoint RUN --save-every 10 --eval-prompts 8"
    command = Command(tmp_path, words + " --sft-steps 20 --json out.json")
    command.until("load it")
    num_struck = 0
    while num_struck < 4 and command.process.poll() is None:
        time.sleep(rng.uniform(1, 5))
        children = command.children()
        if children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(children), rng.choice([signal.SIGKILL, signal.SIGSTOP]))
                num_struck += 1
    command.end()
    figures = read(tmp_path)["train"]
    assert (figures["steps"], figures["in_flight"]) == (120, 0)


def test_command_a_synchronous_run_that_is_cut_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """The main process of the second run is killed at a random time, and started again."""
    rng = random.Random(0)
    words = "--train --task repeat --max-staleness 0 --steps 16 --save-every 3 --eval-prompts 8"
    words += " --prompts-per-step 4 --group-size 4 --sft-steps 3 --log log.jsonl"
    samples = []
    for name in ("whole", "cut"):
        words_of_run = f"{words} --checkpoint {name} --export {name}_model"
        if name == "cut":
            command = Command(tmp_path, words_of_run)
            command.until(f"step {rng.randint(1, 15):4}")
            time.sleep(rng.uniform(0, 0.3))
            command.process.kill()
            command.end(-signal.SIGKILL)
        Command(tmp_path, words_of_run).end()
        rows = logged(tmp_path)
        assert [row["step"] for row in rows] == [*range(1, 17)]
        samples.append([row["sample"] for row in rows])
    assert samples[0] == samples[1]
    assert have_same_weights(tmp_path / "whole_model", tmp_path / "cut_model")


def test_command_killed_while_its_workers_start_leaves_none(tmp_path: Path) -> None:
    command = Command(tmp_path, "--train --eval-prompts 8")
    until(command.children)
    command.process.kill()
    assert subprocess.run([sys.executable, "-c", m.START.format(0)]).returncode == 0
    command.end(-signal.SIGKILL)


def test_command_a_run_goes_on_from_its_folder_alone(tmp_path: Path) -> None:
    model_folder(tmp_path, characters="0123456789+")
    data_file(tmp_path)
    words = "--train --model qwen2 --task data.jsonl --steps 4000 --prompts-per-step 4 --lr 1e-3"
    words += " --group-size 4 --max-new-tokens 4 --eval-prompts 4 --generators 1 --checkpoint RUN"
    _, _, job = DOCS.partition("#SBATCH --signal=B")  # the recipe for Slurm
    requeue = "scontrol() { echo $1; }\n"
    command = Command(tmp_path, words, requeue + job.partition("```")[0].partition("\n")[2])
    command.until("step    5")
    command.process.send_signal(signal.SIGTERM)
    output = command.end(128 + signal.SIGTERM)
    assert output.endswith("ended by SIGTERM\nrequeue\n")
    made = int(re.findall(r"^step +(\d+)", output, re.MULTILINE)[-1])
    (path,) = (tmp_path / "RUN").glob("step_*.pt")
    saved = int(path.stem.removeprefix("step_"))
    assert made <= saved <= made + 2
    shutil.rmtree(tmp_path / "qwen2")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    words = f"--train --checkpoint ../RUN --prompts-per-step 8 --steps {saved + 2}"
    Command(elsewhere, words + " --log log.jsonl --export out").end()
    rows = logged(elsewhere)
    assert [row["step"] for row in rows] == [*range(1, saved + 3)]
    assert rows[-1]["num_tokens"] > 1.5 * rows[0]["num_tokens"]
    Command(elsewhere, "--evaluate 2 --export again --checkpoint ../RUN").end()
    assert have_same_weights(elsewhere / "out", elsewhere / "again")


def test_a_bonus_lowers_the_loss_and_a_penalty_raises_it() -> None:
    one = learner(entropy=0.25, loss="reinforce")
    batch = fake(old_logprobs=None, prox_logprobs=None, advantage=torch.ones(3))
    logp, entropy = torch.zeros(3), torch.tensor([1.0, 2.0, 4.0])
    assert one.token_losses(batch, logp, entropy).tolist() == [-0.25, -0.5, -1.0]
    one.penalty = lambda batch, logp: torch.tensor([8.0, 0.0, 1.0])
    assert one.token_losses(batch, logp, entropy).tolist() == [7.75, -0.5, 0.0]


def test_a_saved_model_has_had_its_supervised_steps(tmp_path: Path, swap: Any) -> None:
    swap("with_restarts", AsyncMock())
    for folder, wanted in ((tmp_path / "new", ("x", 3)), (tmp_path / "old", ("saved", 0))):
        model = folder / "model"
        if wanted[0] == "saved":
            model.mkdir(parents=True)
        cfg = replace(CFG, model="x", checkpoint=str(folder), sft_steps=3)
        asyncio.run(m.run_user_command(fake(), cfg))
        used = m.with_restarts.call_args.args[1].args[0]
        assert (used.model.replace(str(model), "saved"), used.sft_steps) == wanted


def test_a_command_saves_flags_and_fails_without_its_last_step(tmp_path: Path, swap: Any) -> None:
    swap("train_and_evaluate", AsyncMock(return_value={}))
    run = fake(cfg=replace(CFG, train=True, checkpoint="RUN"), version=3)
    command = partial(m.do_command, m.Checkpoints(tmp_path), run.cfg, run)
    with raises(m.RunError, match="step 3 is not saved"):
        asyncio.run(command())
    (tmp_path / "step_00000003.pt").touch()
    assert asyncio.run(command()) == {}
    saved = read(tmp_path, "flags.json")
    of_command = "stage only train evaluate export hosts worker checkpoint log samples json"
    assert saved.items() == {(k, v) for k, v in vars(CFG).items() if k not in of_command.split()}


@cases("kind", ["loss", "bug", "effect of a loss", "loss after a signal"])
def test_five_losses_at_one_checkpoint_a_bug_or_a_signal_end_a_run(kind: str, swap: Any) -> None:
    async def lose(_: Any) -> None:
        asyncio.current_task().cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1)
        raise lost

    lost = m.ReplicaLost("trainer_0 has died")
    error = lost if kind == "loss" else ActorError(ValueError("a bug"))
    signalled = kind == "loss after a signal"
    trainer = fake(error=None if kind == "bug" else lost)
    run = fake(task=TASK, prompts=iter([PROMPT]), trainer=trainer, close=AsyncMock())
    run.begin = AsyncMock(side_effect=None if signalled else error)
    work = AsyncMock(side_effect=lose)
    swap("sleep", AsyncMock())
    saved = [m.SavedProgress(requeued=[5, 3]), *[m.SavedProgress()] * 9]
    checkpoints = fake(newest=lambda: ("", saved.pop(0)))
    versions = iter([0] * 4 + [9] * 5)
    make_run = lambda _: setattr(run, "version", next(versions)) or run  # noqa: E731
    with raises(asyncio.CancelledError if signalled else type(error)):
        asyncio.run(m.with_restarts(checkpoints, make_run, work))
    assert run.begin.call_count == (1 if signalled or kind == "bug" else 9)
    assert work.called is signalled and [prompt.number for prompt in run.prompts] == [5, 3, 0]


def test_the_task_scores_held_out_prompts_beside_a_reward_model(swap: Any) -> None:
    swap("user_task", lambda cfg: fake(task=None))
    swap("UserProcess", lambda cfg: lambda method, groups: ["task"])
    swap("RewardModel", lambda *_: lambda group: "model")
    score = m.user_scorer(replace(CFG, reward="model"))
    prompts = letters(50)
    for method, by in (("score", "model"), ("reply", "task")):
        scored = {prompt.is_held_out: score(method, [[(prompt, [])]]) for prompt in prompts}
        assert scored == {True: ["task"], False: [by]}


# == on GPUs ====


def test_devices_of_trainers_and_generators(swap: Any) -> None:
    used = []
    swap("torch.cuda.set_device", used.append)
    swap("torch.cuda.mem_get_info", lambda: (1, 1))
    swap("torch.cuda.is_available", lambda: is_usable)
    swap("HubPolicy", Mock())
    is_usable = True

    def places(load: Any, num: int) -> Counter[int]:
        used.clear()
        for number in range(num):
            load(replace(CFG, device="cuda"), number)
        return Counter(used)

    for num_trainers, hosts in product(range(1, 5), (None, MagicMock())):
        cfg = replace(SMALL_RUN, device="cuda", trainers=num_trainers)
        run = m.UserRun(cfg, Mock(folder=""), hosts, m.SavedProgress())
        _, load, reader = run.generators.setup_args
        assert m.BlockReader in (reader, *getattr(reader, "args", ()))
        for num_gpus, num_generators in product(range(1, 9), range(1, 8)):
            swap("torch.cuda.device_count", Mock(return_value=num_gpus))
            ranks = places(partial(m.load_policy, dtype=None), min(num_trainers, num_gpus))
            assert max(ranks.values()) == 1
            shares = places(load, num_generators)
            assert max(shares.values()) == math.ceil(num_generators / num_gpus)
            if num_trainers + num_generators <= num_gpus:
                assert shares.keys().isdisjoint(ranks) is (hosts is None)
    several = (CFG, m.Flags(), m.Flags(trainers=8), m.Flags(trainers=9))
    for is_usable in (True, False):  # NVML may count GPUs that CUDA cannot use
        found = ["cpu", *["cuda" if is_usable else "cpu"] * 2, "cpu"]
        assert [m.device_of(cfg) for cfg in several] == found
    assert m.dtype_of(m.Flags(device="cuda")) == torch.bfloat16


def test_a_writer_for_another_dtype_casts_at_once(swap: Any) -> None:
    mine = {"a": torch.randn(5, 3), "b": torch.randn(7)}
    before = {name: t.clone() for name, t in mine.items()}
    theirs = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in mine.items()}
    writer = m.BlockWriter(mine, 1, torch.bfloat16)
    swap("pin", Mock())
    reader = m.BlockReader(writer.handle, 0, theirs)
    go = threading.Event()
    write = m.WeightWriter.write
    swap("WeightWriter.write", lambda *args: go.wait(30) and write(*args))
    for version in (1, 2, 3):
        writer.publish(version)  # waits for the copy of the version before
        for tensor in mine.values():  # the next step changes the weights during the copy
            tensor.mul_(3)
        if version == 1:
            assert reader.pull() == m.Arena.NOTHING
            threading.Timer(0.2, go.set).start()
            continue
        writer.wait()
        assert reader.pull() == version
        wanted = [(3 ** (version - 1) * before[name]).bfloat16() for name in mine]
        assert all(map(torch.equal, theirs.values(), wanted))


class Tape(TorchDispatchMode):
    """A stand-in for a CUDA graph: it runs kernels again on the same tensors, and no Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, kernel: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(kernel, *args, **(kwargs or {}))
        self.calls.append((call, call()))
        return self.calls[-1][1]

    def replay(self) -> None:
        for call, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(call()), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


@cases("shape", SHAPES)
def test_a_graph_decodes_alike(tmp_path: Path, shape: str, swap: Any, capsys: Any) -> None:
    policy = policy_of(model_folder(tmp_path, shape), temperature=0.8, max_new_tokens=12)
    requests = [(FIVE, 0), (FIVE, None), *[(FIVE[3:], seed) for seed in range(6)]]
    wanted = [sampled(policy, some, 3, seed) for some, seed in requests]
    streams = {"Stream": Mock, "stream": m.nullcontext}
    swap("torch.cuda", fake(CUDAGraph=Tape, graph=lambda tape, **how: tape, **streams))
    swap("GraphDecoder", Mock(wraps=m.GraphDecoder))
    policy.has_graphs = True
    found = [sampled(policy, some, 3, seed) for some, seed in requests]
    num_told = capsys.readouterr().out.count("without a CUDA graph")
    assert num_told == (shape in ("qwen3_next", "lfm2"))
    assert m.GraphDecoder.call_count == 1  # all turns and rollouts share it
    for one, other in zip(chain(*wanted), chain(*found), strict=True):
        assert one.ids == other.ids and one.logprobs == approx(other.logprobs, abs=1e-5)


@cases("shape", ["qwen2", "gpt2", "opt", "bloom", "phi3", "cohere", "granite", "gemma2"])
@cases("entropy", [0.0, 0.01])
def test_chunks_compute_what_whole_logits_do(tmp_path: Path, shape: str, entropy: float) -> None:
    model = str(model_folder(tmp_path, shape))
    learned = learner(model=model, entropy=entropy, temperature=0.7)
    if shape in UNUSUAL:
        learned.policy.model.get_output_embeddings().weight.data *= 100
    m.verify(learned.policy)
    assert learned.policy.has_chunks is (shape not in UNUSUAL)
    (batch,) = batches_of(learned, episodes_of(learned))
    found = []
    for has_chunks in (False, learned.policy.has_chunks):
        learned.policy.has_chunks = has_chunks
        logp, entropies = learned.policy.token_logprobs(batch.ids, batch.is_sampled)
        loss = (logp * torch.linspace(-1, 1, len(logp))).sum() - entropy * entropies.sum()
        parts = torch.autograd.grad(loss, learned.weights, allow_unused=True)
        found.append((logp, entropies, torch.cat([p.flatten() for p in parts if p is not None])))
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-5)


@cases("shape", SHAPES)
def test_activations_are_computed_again(tmp_path: Path, shape: str) -> None:
    learned = learner(model=str(model_folder(tmp_path, shape)))
    (batch,) = batches_of(learned, episodes_of(learned))
    found = []
    for recompute in (Mock(), m.recompute_activations):
        recompute(learned.policy)
        calls: Counter[Any] = Counter()
        count = torch.nn.modules.module.register_module_forward_hook(
            lambda module, *_, calls=calls: calls.update([module])
        )
        with count:
            logp, _ = learned.policy.token_logprobs(batch.ids, batch.is_sampled)
            parts = torch.autograd.grad(logp.sum(), learned.weights, allow_unused=True)
        found.append((max(calls.values()), *[p for p in parts if p is not None]))
    (once, *one), (twice, *other) = found
    assert (once, twice) == (1, 2)
    assert all(map(torch.equal, one, other))  # no dropout: gpt2 and opt have some


def test_no_logits_but_those_of_a_chunk_are_alive() -> None:
    """A chunk: 342 tokens."""
    policy = policy_of()
    policy.model.config.vocab_size = 49152
    policy.model = type(policy.model)(policy.model.config)
    policy.has_chunks = True
    policy.logprobs_of = Mock(wraps=policy.logprobs_of)
    ids = torch.randint(0, 49152, (16, 33))
    policy.token_logprobs(ids, torch.arange(33).expand(16, 33) > 0)[0].sum().backward()
    sizes = [len(call.args[0]) for call in policy.logprobs_of.call_args_list]
    assert sizes == [342, 170, 170, 342]  # forward, and again backward


# == hosts ====


@contextlib.contextmanager
def hosts(folder: Path, *addresses: str, **environment: str) -> Iterator[list[Any]]:
    folder.mkdir()
    start = partial(Command, folder.parent, f"--worker {folder}", **environment)
    workers = [start(MONARCH_RL_ADDRESS=address) for address in addresses]
    try:
        until(lambda: len(m.urls_in(folder)) == len(addresses))
        yield workers
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.end(128 + signal.SIGTERM)
        assert m.urls_in(folder) == []


def test_command_a_lost_host_costs_no_group(tmp_path: Path) -> None:
    with hosts(tmp_path / "hosts", "127.0.0.2", "127.0.0.3") as workers:
        words = "--train --sft-steps 10 --eval-prompts 8 --prompts-per-step 8 --hosts hosts"
        local = {"MONARCH_RL_ADDRESS": "127.0.0.1"}
        command = Command(tmp_path, words + " --steps 60 --json out.json", **local)
        command.until("step    5")
        os.kill(random.choice(workers[0].children()), signal.SIGKILL)
        command.end()
        found = read(tmp_path)["train"]
        assert (found["steps"], found["lost"], found["in_flight"]) == (60, 0, 0)
        assert found["workers_replaced"] == 1

        # On each host there is its Monarch host, and nothing else.
        until(lambda: [len(worker.children()) for worker in workers] == [1, 1])
        command = Command(tmp_path, words + " --steps 100000", **local)
        command.until("step    5")
        assert min(len(worker.children()) for worker in workers) > 1
        command.process.kill()
        until(lambda: [len(worker.children()) for worker in workers] == [1, 1], 10)
        command.end(-signal.SIGKILL)


def test_hosts_that_do_not_answer_are_passed_over(tmp_path: Path, swap: Any) -> None:
    def attach(workers: list[str], **_: Any) -> Any:
        host = MagicMock()
        agent = host.spawn_procs().spawn()
        agent.ping.call_one = AsyncMock(side_effect=None if workers == ["alive"] else OSError)
        return host

    async def started() -> int:
        pool = m.HostPool(tmp_path, 4)
        pool.lost["gone"].set_result("with its machine, but for its note")
        await asyncio.wait_for(asyncio.gather(*[pool.start(1) for _ in range(4)]), 30)
        return pool.started["alive"]

    for note in ("dead", "gone", "alive"):
        (tmp_path / f"{note}.url").write_text(note)
    swap("SILENCE_S", 0.05)
    swap("this_proc", MagicMock())
    swap("monarch.actor.attach_to_workers", attach)
    assert asyncio.run(started()) == 4


ATTACH = """
import asyncio, pathlib, sys, monarch_rl as m
m.SILENCE_S = 1.5
m.monarch.actor.enable_transport(m.this_url() + ":0")
async def main() -> None:
    process = await m.HostPool(pathlib.Path(sys.argv[1]), 1).start(1)
    await process.kill()
    print("attached")
asyncio.run(main())
"""


def certificate(folder: Path) -> dict[str, str]:
    """Runs the commands of DOCS 09. Returns the variables that they set."""
    folder.mkdir()
    _, _, text = DOCS.partition("may name all machines:\n```sh\n")
    script = text.partition("```")[0].replace("10.0.0.2", "127.0.0.1,IP:127.0.0.2") + "env"
    lines = subprocess.check_output(["bash", "-ec", script], cwd=folder, text=True).splitlines()
    return dict(line.split("=", 1) for line in lines if line.startswith("HYPERACTOR_TLS_"))


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_clients_without_our_ca_are_refused(tmp_path: Path) -> None:
    ours, theirs = certificate(tmp_path / "ours"), certificate(tmp_path / "theirs")
    (tmp_path / "attach.py").write_text(ATTACH)
    script = f"exec {sys.executable} attach.py hosts"
    own = {"MONARCH_RL_ADDRESS": "127.0.0.1", "PYTHONPATH": str(FOLDER)}
    with hosts(tmp_path / "hosts", "127.0.0.2", **ours):
        clients = [Command(tmp_path, "", script, **own, **each) for each in (theirs, {}, ours)]
        for client in clients:
            client.process.wait(60)
        found = [client.output() for client in clients]
        assert ["attached" in output for output in found] == [False, False, True]
        refused = "and certificates of one CA"
        assert [refused in output for output in found] == [True, True, False]
        assert ["tcp://, not tls://" in output for output in found] == [False, True, False]


# == critic ====


def single(policy: m.Policy, num_prompts: int, seed: int) -> list[m.Episode]:
    episodes = sampled(policy, letters(num_prompts), 1, seed)
    for episode in episodes:
        episode.rewards = [TASK.grade("a", text) + 0.1 * len(text) for text in episode.responses]
    return episodes


def test_gains_by_hand() -> None:
    """The table of the section, with tokens between the turns that were not sampled."""
    episode = m.Episode(PROMPT, ids=[3] * 6, turn_of=[0, 1, 1, 0, 0, 2], rewards=[0.0, 0.9])
    found = m.gains(episode, [9.0, 0.4, 0.5, 9.0, 9.0, 0.7])
    assert found == approx([0.0, 0.5, 0.4, 0.0, 0.0, 0.2])


def test_a_critic_gives_each_sampled_token_a_normalized_advantage() -> None:
    policy = policy_of()
    critic = m.Critic(policy, CFG)
    critic(single(policy, 16, 0))
    episodes = single(policy, 16, 99)
    rows = critic(episodes)
    gains = torch.tensor([value for row in rows for value in row if value])
    assert [gains.mean(), gains.std(correction=0)] == approx([0, 1], abs=0.01)
    for row, episode in zip(rows, episodes, strict=True):
        assert [value != 0 for value in row] == [turn > 0 for turn in episode.turn_of]


def test_a_critic_learns_and_passes_of_any_size_are_equal() -> None:
    policy = policy_of()
    episodes = single(policy, 16, 0)
    ids = m.padded([e.ids for e in episodes], policy.device)
    later_rewards = m.padded([m.gains(e, [0.0] * len(e.ids)) for e in episodes], policy.device)
    is_sampled = m.padded([e.turn_of for e in episodes], policy.device) > 0
    found = []
    small = m.Critic(policy, replace(CFG, tokens_per_micro_batch=1))
    for critic in (m.Critic(policy, CFG), small):
        for _ in range(20):
            critic(episodes)
        errors = (later_rewards - critic.values(ids).detach())[is_sampled]
        found.append(1 - float(errors.var() / later_rewards[is_sampled].var()))  # explained
    assert found[0] == approx(found[1], abs=0.01) and found[0] > 0.3
    values = small.values(torch.tensor([[3, 4, 5], [3, 7, 5]]))  # before each token
    assert torch.allclose(values[0, :2], values[1, :2])
    assert not torch.allclose(values[0, 2], values[1, 2])


@cases("shape", ["llama", "qwen3", "gpt2", "bloom"])
def test_value_networks_of_other_models(tmp_path: Path, shape: str) -> None:
    policy = policy_of(model_folder(tmp_path, shape))
    network, _ = m.value_network(policy, CFG)
    bodies = [model.base_model.state_dict() for model in (network, policy.model)]
    torch.testing.assert_close(*bodies)
    assert not network(torch.tensor([[3, 4, 5]])).logits.any()
    assert {p.dtype for p in network.parameters()} == {torch.float32}


# == reward model ====


def asked(*responses: str, num_turns: int = 1) -> m.Conversations:
    turns = tuple(m.user_turn(text, text) for text in ("abc", "bcd")[:num_turns])
    return [(m.Prompt(0, turns), [said] * num_turns) for said in responses]


def test_lines_of_preferences(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    one = {"prompt": "abc", "chosen": "a", "rejected": ""}
    other = {"prompt": CHAT, "chosen": "b", "rejected": "c", "more": 1}
    path.write_text("\ufeff" + json.dumps(one) + "\n\n" + json.dumps(other) + "\n")
    first, second = m.read_preferences(path)
    assert first == (m.Prompt(0, (m.user_turn("abc", None),)), ["a", ""])
    assert second == (m.Prompt(0, (m.Turn(CHAT, None),)), ["b", "c"])
    wrong = json.dumps(one | {"rejected": None})
    for text, told in ((wrong, ", line 1: needs"), ("\n", ": no lines")):
        path.write_text(text)
        with refused(r"p\.jsonl" + told):
            m.read_preferences(path)


def test_a_reward_model_learns_and_scores_the_last_turn(tmp_path: Path) -> None:
    rng = random.Random(0)
    with open(tmp_path / "p.jsonl", "w") as file:
        for _ in range(800):  # for the response with more letters a
            prompt, *both = ["".join(rng.choices(m.LETTERS, k=3)) for _ in range(3)]
            both.sort(key=lambda text: -text.count("a"))
            print(json.dumps({"prompt": prompt, "chosen": both[0], "rejected": both[1]}), file=file)
    model = m.RewardModel(replace(CFG, preferences=file.name))
    scores = [sum(rewards) for rewards in model(asked("aab", "abk", "cde"))]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1] + 0.5
    (of_turns,) = model(asked("abc", num_turns=2))
    assert of_turns[0] == 0.0 != of_turns[-1]
    # Neither padding nor length matters.
    alone = [model(asked(said))[0] for said in ("abc", "abcdefghijklmnop")]
    torch.testing.assert_close(alone, model(asked("abc", "abcdefghijklmnop")), atol=1e-5, rtol=0)
    with torch.no_grad():
        model.network.score.weight.zero_()
        model.network.score.bias.fill_(0.5)
    assert model(asked("a", "abcdefgh")) == [[0.5], [0.5]]


def test_a_conversation_that_is_over_stays_however_long() -> None:
    policy = policy_of()
    short = m.Prompt(0, (m.user_turn("a", "a"), m.user_turn("b", "b")))
    long = m.Prompt(1, (m.user_turn("a" * 40, "a"),))
    policy.context = 40 + 3 + policy.max_new_tokens  # the long one fits, before its response
    longer = m.Prompt(2, (m.user_turn("a" * 41, "a"),))
    episodes = sampled(policy, [short, long, longer], 2, 0)
    assert [episode.prompt.number for episode in episodes] == [0, 0, 1, 1]


@cases("trainers", [1, 2])
def test_kl_is_0_after_the_warm_start(tmp_path: Path, swap: Any, trainers: int) -> None:
    form_group, shard = m.dist.init_process_group, m.shard  # here, of one rank
    of_one = lambda *args, **how: form_group(*args, **how | {"world_size": 1})  # noqa: E731
    swap("dist.init_process_group", of_one)
    swap("shard", lambda model, _, dtype: shard(model, 1, dtype))
    swap("current_rank", lambda: fake(rank=0))
    how: Any = {"dtype": "bfloat16", "activations": "recompute"}
    cfg = replace(CFG, kl=0.1, trainers=trainers, sft_steps=2, **how)
    (batch,) = batches_of(learner(), episodes_of(learner()))
    one, _ = m.user_learner(cfg, str(tmp_path / "meeting"))
    reference, weight = one.penalty.args
    one.token_losses = lambda batch, logp, _: seen.append(logp.detach()) or logp
    seen = []
    one.update([batch])
    assert weight == cfg.kl and not one.penalty(batch, seen[0]).any()
    assert m.divergence(policy_of(), 1.0, batch, seen[0]).mean() > 1e-3  # the weights moved
    assert reference.has_chunks and one.policy.has_chunks
    assert "forward" in vars(one.policy.model.model.layers[0])  # recomputed
    if trainers > 1:
        torch.distributed.destroy_process_group()
