"""Tests of monarch_rl.py. Stages run as subprocesses, from another folder, as a reader runs them.

One tour is shared by many tests. For every claim a test takes away the line that provides it and
expects that stage to fail, and the stages before it to hold. No test asserts a time.

The suite has one of several alike; `python test_monarch_rl.py` runs those that are skipped in it
too, other tasks, trainers, hosts and faults, and the long measurements at the end of this file.
"""

import ast
import asyncio
import collections
import contextlib
import fcntl
import functools
import itertools
import json
import math
import multiprocessing
import os
import pathlib
import random
import re
import shutil
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import uuid
from unittest import mock

import pytest
import torch

import monarch_rl as m

# It is meant for what monarch_rl starts, and not for what these tests start.
del os.environ["PYTHONSAFEPATH"]

FOLDER = pathlib.Path(__file__).resolve().parent
FILE = FOLDER / "monarch_rl.py"
SOURCE = FILE.read_text(encoding="utf-8")
NAMES = [stage.name for stage in m.STAGES.values()]
ALL = "MONARCH_RL_ALL" in os.environ
long = pytest.mark.skipif(not ALL, reason="long: run by `python test_monarch_rl.py`")
MARK = "MONARCH_RL_TEST"  # an environment variable by which a run's processes are found


class Run:
    """One finished run of the file."""

    def __init__(self, folder, *args, file=FILE, timeout=300, prefix=()):
        self.mark = uuid.uuid4().hex
        found = subprocess.run(
            [*prefix, sys.executable, str(file), *args, "--json", "out.json"],
            cwd=folder,
            text=True,
            capture_output=True,
            timeout=timeout,
            env={**os.environ, MARK: self.mark},
        )
        self.status, self.out, self.err = found.returncode, found.stdout, found.stderr
        written = pathlib.Path(folder) / "out.json"
        self.json = json.loads(written.read_text()) if written.exists() else None
        self.left = processes_of(self.mark)

    def stage(self, name):
        return next(stage for stage in self.json["stages"] if stage["name"] == name)

    def figures(self, name):
        return self.stage(name)["figures"]


def processes_of(mark):
    """Process ids that carry the mark, zombies left out."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        try:
            if (
                entry.name.isdigit()
                and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes()
            ):
                found.append(int(entry.name))
        except OSError:
            continue  # it ended, or belongs to somebody else
    return found


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture
def refused(tmp_path, monkeypatch, capsys):
    """The one line with which arguments are refused, before a process is started."""
    monkeypatch.chdir(tmp_path)

    def refused(*args):
        with pytest.raises(SystemExit) as ended:
            m.parse([*map(str, args)])
        out, err = capsys.readouterr()
        assert ended.value.code == 2 and out == "" and len(err.splitlines()) == 1, out + err
        assert err.startswith("monarch_rl: ")
        return err

    return refused


@pytest.fixture(scope="session")
def tour(tmp_path_factory):
    """The whole tour, as `python monarch_rl.py` runs it, in a folder with another such file."""
    before, folder = sorted(os.listdir("/dev/shm")), tmp_path_factory.mktemp("tour")
    (folder / "monarch_rl.py").write_text("raise SystemExit('this is not the one')")
    run = Run(folder, "--log", "log.jsonl")
    run.folder, run.shared_memory = folder, (before, sorted(os.listdir("/dev/shm")))
    return run


# -- the tour -------------------------------------------------------------------------------------


def test_tour_holds_and_is_quiet(tour):
    assert tour.status == 0, tour.out + tour.err
    assert tour.err == ""
    for noise in ("Traceback", "Warning", "RdmaXcel", "internal logs", "monarch_log"):
        assert noise not in tour.out
    assert [stage["name"] for stage in tour.json["stages"]] == NAMES
    assert max(map(len, tour.out.splitlines())) <= 100


def test_tour_leaves_nothing_behind(tour):
    assert tour.left == []
    before, after = tour.shared_memory
    assert after == before
    assert sorted(os.listdir(tour.folder)) == ["log.jsonl", "monarch_rl.py", "out.json"]


def test_json_has_the_agreed_form(tour):
    assert set(tour.json) == {"version", "args", "machine", "stages"} and tour.json["version"] == 1
    assert tour.json["args"]["seed"] == 0 and tour.json["machine"]["cores"] >= 1
    for number, stage in enumerate(tour.json["stages"], 1):
        assert set(stage) == {"name", "number", "claim", "ok", "seconds", "checks", "figures"}
        assert stage["number"] == number and stage["checks"] and stage["ok"] is True
        for check in stage["checks"]:
            assert set(check) == {"what", "got", "want", "ok"} and check["ok"] is True


FIGURES = {
    "rdma_transfer": "handle_bytes message_ms pull_ms backend",
    "supervision": "detect_ms respawn_ms",
    "service": "requests answered_once failover_ms route_overhead_us",
    "weight_sync": "memmove_ms pull_ms sync_over_memmove sync_over_memmove_1 "
    "sync_over_memmove_4 relay_gb_per_s gloo_gb_per_s rdma_gb_per_s trainer_held_ms "
    "trainer_held_by_group_ms late_join_ms reads torn_reads torn_reads_unsafe",
    "reshard": "reshard_over_same reshard_over_memmove gather_over_reshard moved_over_needed",
    "sync_rl": "heldout_before heldout_after reward_first reward_last mismatch_k3",
    "async_rl": "heldout_before heldout_after reward_first reward_last async_speedup lag_max started "
    "trained dropped lost undone in_flight unjudged mismatch_k3 trainer_stall_share",
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_there(tour, name):
    assert set(FIGURES[name].split()) <= set(tour.figures(name))


def test_weights_are_never_torn_and_the_demo_can_tell(tour):
    found = tour.figures("weight_sync")
    assert found["torn_reads"] == 0 < found["reads"]
    assert found["torn_reads_unsafe"] > 0


def test_service_answered_every_request_once(tour):
    found = tour.figures("service")
    assert found["answered_once"] == found["requests"] == 400


def test_log_has_a_line_per_training_step(tour):
    rows = [json.loads(line) for line in (tour.folder / "log.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["run"] == "async"]
    # the trainer was killed on the way: some steps appear again, after a checkpoint
    assert sorted({*steps}) == list(range(1, tour.json["args"]["steps"] + 1))
    [back] = [b for a, b in zip(steps, steps[1:]) if b != a + 1]
    assert (back - 1) % m.Config().save_every == 0
    assert {"version", "reward", "lag_max", "mismatch_k3", "entropy", "clipped"} <= set(rows[0])


def learned(run, least_after):
    assert run.status == 0, run.out + run.err
    found = run.figures("async_rl")
    assert 0.03 <= found["heldout_before"] <= 0.20
    assert found["heldout_after"] >= least_after
    assert found["lag_max"] <= run.json["args"]["max_lag"]
    assert found["mismatch_k3"] <= 1e-6
    whither = "trained", "dropped", "lost", "undone", "in_flight"
    assert found["started"] == sum(found[k] for k in whither)
    assert found["trained"] == m.GROUPS_PER_BATCH * run.json["args"]["steps"]


def test_training_learns_in_the_tour(tour):
    learned(tour, 0.95)


@long
@pytest.mark.parametrize("task", ["count", "pattern"])
def test_training_learns(tmp_path, task):
    learned(Run(tmp_path, "--only", "async_rl", "--task", task, "--steps", "300"), 0.90)


# -- without its mechanism a stage fails, and only that one ---------------------------------------

BROKEN = {  # stage: (what provides the claim, what is there instead)
    "hello_actor": (
        "    @endpoint\n    async def add(",
        "    @concurrent_endpoint\n    async def add(",
    ),
    "actor_mesh": (
        '"mesh.add.broadcast()", [mesh.add.broadcast()]',
        '"mesh.add.broadcast()", [await mesh.add.choose()]',
    ),
    "rdma_transfer": (
        "await handle.read_into(pulled)",
        "pulled.copy_(await owner.as_message.call_one())",
    ),
    "controllers": ('name or f"store', 'f"store'),
    "supervision": ('if told or saw == "TimeoutError":', "if 'broadcast' in trigger:"),
    "service": ("range(self.max_attempts)", "range(1)"),
    "weight_sync": ("self.arena.words[self.word] = os.getpid() * Arena.MAX_SLOTS + slot", "pass"),
    "reshard": ("-(-len(part) // num_ranks)", "len(part) // num_ranks"),
    "sync_rl": ("        version = self.reader.pull()", "        version = self.reader.version"),
    "async_rl": (" and version - g[3] <= self.max_lag]", "]"),
}


def broken_file(folder, *changes):
    source = SOURCE
    for old, new in changes:
        assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in the file"
        source = source.replace(old, new)
    file = folder / "file" / "monarch_rl.py"
    file.parent.mkdir()
    file.write_text(source, encoding="utf-8")
    return file


@pytest.fixture(scope="session")
def quick_file(tmp_path_factory):
    """The file, but for the warm start: for runs that need not learn."""
    folder = tmp_path_factory.mktemp("quick")
    shutil.copy(FOLDER / "DOCS.md", folder)
    (folder / FILE.name).write_text(SOURCE.replace(*WARM), encoding="utf-8")
    assert SOURCE.count(WARM[0]) == 1
    return folder / FILE.name


WARM = "        if found >= 0.11: return", "        return"


@pytest.mark.parametrize("name", NAMES)
def test_stage_fails_without_its_mechanism(tmp_path, name):
    changes = [BROKEN[name], WARM]
    if name == "async_rl":  # tickets alone nearly bound the lag of equally long rollouts
        changes.append(("(max_lag + 1) * GROUPS", "(max_lag + 100) * GROUPS"))
    how = "--stage" if name == "supervision" else "--only"  # the stages before it hold
    run = Run(
        tmp_path,
        how,
        name,
        "--steps",
        "40",
        "--model-mb",
        "16",
        file=broken_file(tmp_path, *changes),
    )
    assert run.status == 1, run.out + run.err
    assert {stage["name"] for stage in run.json["stages"] if not stage["ok"]} == {name}
    failed = {check["what"] for check in run.stage(name)["checks"] if not check["ok"]}
    print(name, failed)
    because = {
        "sync_rl": {"k3 of both sides", "lag, largest of all steps"},
        "async_rl": {"largest lag"},
    }
    assert because.get(name, failed) <= failed and run.left == []


@pytest.mark.parametrize(
    "name, change, check",
    [
        (
            "hello_actor",
            (
                "one, other = tallies.slice(worker=0), tallies.slice(worker=1)",
                "one = other = tallies.slice(worker=0)",
            ),
            "overlap of two actors",
        ),
        ("weight_sync", ("num_readers + 2\n", "num_readers + 1\n"), "no free slot"),
        pytest.param(
            "service",
            ('self._lose(replica, "missed its deadline" if late else "died")', "pass"),
            "kinds of failure",
            marks=long,
        ),
        pytest.param(
            "sync_rl",
            (
                "position_ids=(mask.cumsum(1) - 1).clamp(min=0)[:, -new:], logits_to_keep=1)",
                "logits_to_keep=1)",
            ),
            "k3 of both sides",
            marks=long,
        ),
    ],
)
def test_second_line_of_a_claim(tmp_path, name, change, check):
    run = Run(
        tmp_path,
        "--only",
        name,
        "--steps",
        "40",
        "--model-mb",
        "16",
        file=broken_file(tmp_path, change),
    )
    failed = [c["what"] + c["got"] for c in run.stage(name)["checks"] if not c["ok"]]
    assert run.status == 1 and any(check in what for what in failed), run.out + run.err


# -- pure parts -----------------------------------------------------------------------------------


def expected_advantage(returns, ids, row, baseline):
    """Of one row and turn, by the textbook."""
    group = [r for r, g in zip(returns, ids) if g == ids[row]]
    others = [r for i, (r, g) in enumerate(zip(returns, ids)) if g == ids[row] and i != row]
    spread = lambda some: statistics.pstdev(some) + 1e-4
    return {
        "none": lambda: returns[row],
        "batch": lambda: (returns[row] - statistics.fmean(returns)) / spread(returns),
        "group": lambda: (returns[row] - statistics.fmean(group)) / spread(group),
        "leave_one_out": lambda: returns[row] - statistics.fmean(others or [0.0]),
    }[baseline]()


@pytest.mark.parametrize("baseline", m.BASELINES)
def test_advantages_against_closed_form_per_turn_and_in_any_order(baseline):
    ids = torch.tensor([7, 7, 3, 3, 9, 9, 9, 5])  # uneven groups, one of a single row
    returns = torch.tensor(
        [[0.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.25, 0.75], [0.5, 0.0, 0.25, 0.25, 0.0, 1.0, 1.0, 0.5]]
    ).T
    expected = torch.tensor(
        [
            [expected_advantage(turn.tolist(), ids.tolist(), row, baseline) for turn in returns.T]
            for row in range(8)
        ]
    )
    for _ in range(20):
        order = torch.randperm(8)
        found = m.advantages(returns[order], ids[order], baseline)
        assert found.dtype == torch.float32 and torch.allclose(found, expected[order], atol=1e-5)
    if baseline == "group":  # no spread, no signal
        assert m.advantages(returns, ids)[(ids == 3) | (ids == 5)].abs().max() == 0


def gradient_of(loss, pi, mu, near, advantage):
    pi = pi.clone().requires_grad_()
    per_token, outside = m.LOSSES[loss](pi, mu, near, advantage)
    per_token.sum().backward()
    return pi.grad, outside


@pytest.mark.parametrize("loss", m.LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_losses_have_reinforces_gradient_on_policy(loss, seed):
    rng = torch.Generator().manual_seed(seed)
    mu, advantage = -torch.rand(64, generator=rng) * 8, torch.randn(64, generator=rng)
    found, outside = gradient_of(loss, mu, mu, mu, advantage)
    assert torch.cosine_similarity(found, -advantage, dim=0) >= 1 - 1e-6
    assert torch.allclose(found, -advantage, atol=1e-5) and not outside.any()


@pytest.mark.parametrize(
    "loss, stops",
    [("ppo", True), ("decoupled", True), ("dppo", True), ("cispo", False), ("reinforce", False)],
)
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_a_token_outside_the_trust_region_has_no_gradient_if_the_loss_has_one(
    loss, stops, advantage
):
    mu, good = torch.tensor([-0.7]), math.copysign(1, advantage)
    for way, log_ratio in ((1, 0.6), (-1, -0.6), (1, 0.01), (-1, -0.01)):
        found, outside = gradient_of(loss, mu + log_ratio, mu, mu, torch.tensor([advantage]))
        too_far = stops and way == good and abs(log_ratio) > 0.1
        assert bool(outside) is too_far and bool(found == 0) is too_far, (way, log_ratio)
        if not too_far:
            assert found.sign() == -good


def test_ratios_and_differences_are_different_trust_regions():
    """A rare token may double for dppo, a frequent one move by a fifth for neither."""
    for mu, log_ratio, outside in (
        (-8.0, 0.7, {"ppo": True, "dppo": False}),
        (-0.3, 0.19, {"ppo": True, "dppo": False}),
        (-0.3, 0.28, {"ppo": True, "dppo": True}),
    ):
        mu = torch.tensor([mu])
        for loss, expected in outside.items():
            found = m.LOSSES[loss](mu + log_ratio, mu, mu, torch.ones(1))[1]
            assert bool(found) is expected, (loss, mu, log_ratio)


def test_decoupled_corrects_for_age_apart_from_its_trust_region():
    """With near = mu it is ppo; else ppo around near, times the importance weight of near."""
    pi, mu, near, advantage = -torch.rand(4, 256) * 2 + torch.tensor([[0], [0], [0], [1]])
    for found, expected in zip(
        gradient_of("decoupled", pi, mu, mu, advantage), gradient_of("ppo", pi, mu, mu, advantage)
    ):
        assert torch.equal(found, expected)
    found, outside = gradient_of("decoupled", pi, mu, near, advantage)
    plain, far = gradient_of("ppo", pi, near, near, advantage)
    weight = (near - mu).exp().clamp(max=m.MAX_WEIGHT)
    assert torch.allclose(found, plain * weight) and torch.equal(outside, far)
    assert outside.any() and not outside.all() and (weight == m.MAX_WEIGHT).any()


def test_cispo_cuts_the_weight_and_not_the_gradient():
    mu, advantage = torch.tensor([-5.0, -5.0, -1.0]), torch.tensor([1.0, -1.0, 1.0])
    found, _ = gradient_of("cispo", torch.tensor([-1.0, -1.0, -1.5]), mu, mu, advantage)
    assert found.tolist() == pytest.approx([-m.MAX_WEIGHT, m.MAX_WEIGHT, -math.exp(-0.5)])


def test_k3_is_zero_for_equals_and_positive_otherwise():
    recorded = torch.randn(100)
    assert (m.k3(recorded, recorded) == 0).all()
    assert (m.k3(recorded, recorded + 0.1 * torch.randn(100)) > 0).all()


def test_held_out_prompts_are_never_drawn():
    for task in m.TASKS:
        sampler = m.Sampler(m.Config(task=task, seed=3))
        held = {prompt.turns for prompt in sampler.heldout + sampler.validation}
        assert len(held) == 512 and len(sampler.heldout) == 256
        assert sampler.heldout == m.Sampler(m.Config(task=task, seed=4)).heldout
        drawn = sampler.draw(3000)
        assert not held & {prompt.turns for prompt in drawn}
        assert len({prompt.id for prompt in drawn}) == 3000


def test_rewards_add_up_to_one_only_for_right_answers():
    turns, task = (("abc", "abc"), ("d", "efg")), m.task_of("repeat")
    assert task.score(turns, ["abc", "efg"]) == [0.5, 0.5]
    assert task.score(turns, ["abc+", "efg"]) == [pytest.approx(3 / 8), 0.5]  # did not stop
    assert task.score(turns, ["abd", "efg"]) == [pytest.approx(1 / 3), 0.5]
    assert task.score(turns, ["", ""]) == task.score(turns, []) == [0, 0]
    assert task.score(turns, ["abc"]) == [0.5, 0]  # cut off after a turn


def rollout_of(group_ids, version, width=5):
    rows = len(group_ids)
    ones = torch.ones(rows, width, dtype=torch.int64)
    return m.Rollout(
        ids=torch.arange(rows * width).view(rows, width),
        mask=ones,
        turns=ones,
        logprobs=torch.zeros(rows, width),
        versions=ones * version,
        rewards=torch.rand(rows, 1),
        group_ids=torch.tensor(group_ids),
        prompts=[None] * rows,
        answers=[[]] * rows,
    )


class StubFleet:
    """Generators and a trainer that only sleep, in one process."""

    def __init__(self, generate_s=0.005, step_s=0.002, lost_at=()):
        self.cfg, self.sampler = m.Config(generators=2), m.Sampler(m.Config())
        self.trainer = asyncio.Lock()
        self.version = self.made = 0  # version: after the steps that are under way
        self.handle = types.SimpleNamespace(run_id=1)
        self.generate_s, self.step_s, self.lost_at = generate_s, step_s, [*lost_at]

    async def rollout(self, prompts):
        version = self.made
        await asyncio.sleep(random.random() * 2 * self.generate_s)
        return rollout_of([p.id for p in prompts for _ in range(2)], version)

    async def ask(self, method, batch):
        assert method == "step"
        async with self.trainer:
            await asyncio.sleep(self.step_s)
        if self.lost_at and self.made >= self.lost_at[0]:
            raise m.TrainerLost
        self.made += 1
        return self.made, int((self.made - 1 - batch.versions).max())


class StubHistory:
    """Every tenth step is a checkpoint."""

    def __init__(self, fleet, num_steps):
        self.fleet, self.num_steps, self.count = (
            fleet,
            num_steps,
            collections.Counter(started=0, trained=0, dropped=0, lost=0, undone=0),
        )
        self.rows, self.groups, self.saved, self.sent = [], [], 0, 0

    async def start(self):
        pass

    def is_due(self, step):
        return step % 10 == 0

    async def save(self):
        assert self.fleet.made == len(self.rows) == self.sent  # nothing has been sent ahead
        self.saved = len(self.rows)

    async def restore(self):
        fleet = self.fleet
        fleet.lost_at.pop(0)
        await asyncio.sleep(0.02)
        fleet.version = fleet.made = self.sent = self.saved
        fleet.handle = types.SimpleNamespace(run_id=fleet.handle.run_id + 1)
        undone = len(self.rows) - self.saved
        del self.rows[self.saved :], self.groups[self.saved :]
        self.count.update(trained=-16 * undone, undone=16 * undone)

    def add(self, stats, batch):
        self.rows.append(stats)
        self.groups.append({*batch.group_ids.tolist()})


@pytest.mark.parametrize("max_lag", [0, 1, 3])
@pytest.mark.parametrize(
    "generate_s, step_s, lost_at",
    [(0.005, 0.002, []), (0.002, 0.012, []), (0.03, 0.002, []), (0.005, 0.002, [7, 23, 25])],
)
def test_two_loops_end_with_every_bound(max_lag, generate_s, step_s, lost_at):
    """Against a fleet of one process, also with one side much faster, and with a trainer that is
    lost: no wait without an end, lag and memory bounded, books in order, no group trained twice."""

    async def scene():
        history = StubHistory(StubFleet(generate_s, step_s, lost_at), 40)
        run, most = m.AsyncRun(history, max_lag), 0
        running = asyncio.ensure_future(run.run())
        while not running.done():
            most = max(most, run.away + len(run.buffer.groups))
            await asyncio.sleep(0.001)
        await asyncio.wait_for(running, 60)
        assert len(history.rows) == 40 and max(lag for _, lag in history.rows) <= max_lag
        assert most <= run.gate.size
        assert history.count["trained"] == 16 * 40
        assert m.under_way(history.count) == len(run.buffer.groups)
        assert len(set.union(*history.groups)) == 16 * 40
        assert bool(history.count["undone"]) is bool(lost_at)

    asyncio.run(scene())


@pytest.mark.parametrize("broken", ["rollout", "step"])
def test_a_loop_that_raises_ends_the_run_at_once_with_its_cause(broken):
    """Though other rollouts hang for a minute."""

    async def scene():
        fleet = StubFleet()
        if broken == "rollout":
            answers = itertools.chain([0.05], itertools.repeat(60))

            async def rollout(prompts):
                await asyncio.sleep(next(answers))
                raise KeyError("the cause")

            fleet.rollout = rollout
        else:

            async def step(*_):
                fleet.generate_s = 60
                await asyncio.sleep(0.05)
                raise KeyError("the cause")

            fleet.ask = step
        start = time.monotonic()
        with pytest.raises(KeyError, match="the cause"):
            await m.AsyncRun(StubHistory(fleet, 40), 2).run()
        assert time.monotonic() - start < 30

    asyncio.run(scene())


async def history_of_gate_and_buffer(seed):
    """Random rollouts, late and early, against a trainer; checks the books after every event."""
    rng, max_lag = random.Random(seed), random.Random(seed).randrange(4)
    gate = m.Gate(max_lag, collections.Counter(started=0, trained=0, dropped=0, lost=0, undone=0))
    buffer, version, away, trained = m.ReplayBuffer(gate, max_lag), 0, [], 0
    for group_id in range(0, 6000, m.GROUPS_PER_BATCH):
        if m.under_way(gate.count) + m.GROUPS_PER_BATCH <= gate.size:
            await gate.admit(m.GROUPS_PER_BATCH)
            ids = range(group_id, group_id + m.GROUPS_PER_BATCH)
            away.append(rollout_of([g for g in ids for _ in (0, 1)], version))
        if away and rng.random() < 0.6:
            rollout = away.pop(rng.randrange(len(away)))  # any order: stragglers are overtaken
            if rng.random() < 0.1:
                gate.settle("lost", m.GROUPS_PER_BATCH)
            else:
                buffer.put(rollout, m.GROUPS_PER_BATCH, 1)
        fresh = [g for g in buffer.groups if version - g[3] <= max_lag]
        if len(fresh) >= m.GROUPS_PER_BATCH:
            batch = await buffer.take(1, version)
            assert int((version - batch.versions).max()) <= max_lag
            gate.settle("trained", m.GROUPS_PER_BATCH)
            version, trained = version + 1, trained + m.GROUPS_PER_BATCH
        in_flight = m.GROUPS_PER_BATCH * len(away) + len(buffer.groups)
        assert m.under_way(gate.count) == in_flight <= gate.size
        assert gate.count["trained"] == trained
    return gate.count


@pytest.mark.parametrize("seed", range(12))
def test_lag_is_bounded_and_tickets_add_up(seed):
    count = asyncio.run(history_of_gate_and_buffer(seed))
    assert count["trained"] > 0


def test_a_group_that_is_lost_does_not_stop_a_run_without_lag():
    """With K = 0 there is one batch of tickets: what is left in the buffer holds 15 of them."""

    async def scene():
        gate = m.Gate(0, collections.Counter(started=0, trained=0, dropped=0, lost=0, undone=0))
        assert await gate.admit(m.GROUPS_PER_BATCH) == m.GROUPS_PER_BATCH
        gate.settle("lost", 1)
        assert await asyncio.wait_for(gate.admit(m.GROUPS_PER_BATCH), 1) == 1

    asyncio.run(scene())


def test_gate_waits_until_tickets_come_back():
    async def scene():
        gate = m.Gate(0, collections.Counter(started=0, trained=0, dropped=0, lost=0, undone=0))
        await gate.admit(m.GROUPS_PER_BATCH)
        waiting = asyncio.ensure_future(gate.admit(m.GROUPS_PER_BATCH))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        gate.settle("dropped", m.GROUPS_PER_BATCH)
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scene())


def test_join_pads_and_keeps_rows_together():
    a, b = rollout_of([1, 2, 1], 4, width=3), rollout_of([5, 6], 7, width=5)
    joined = m.Rollout.join([(a, [0, 2]), (b, [1])])
    assert joined.turns[0].tolist() == [1, 1, 1, 0, 0] and joined.rewards.shape == (3, 1)
    assert joined.ids.shape == (3, 5) and joined.group_ids.tolist() == [1, 1, 6]
    assert joined.versions[:, 0].tolist() == [4, 4, 7] and joined.mask[0].tolist() == [
        1,
        1,
        1,
        0,
        0,
    ]


# -- weight slots, in one process -----------------------------------------------------------------


def tensors(value=0.0):
    return {"a": torch.full((3, 5), value), "b": torch.full((7,), value, dtype=torch.bfloat16)}


def publish(writer, version, value=None):
    for tensor in writer.tensors.values():
        tensor.fill_(version if value is None else value)
    writer.publish(version)


def holds(reader, value):
    return all((t == value).all() for t in reader.tensors.values())


def test_reader_sees_what_was_published_without_a_copy():
    writer = m.WeightWriter(tensors(), num_readers=1)
    reader = m.WeightReader(writer.arena.handle, 0, tensors(9.0))
    assert reader.pull() == -1 and holds(reader, 9)
    publish(writer, 1)
    assert reader.pull() == 1 and holds(reader, 1)
    slot = reader.arena.tensors(reader.arena.words[m.Arena.LEASES] % m.Arena.MAX_SLOTS)
    assert reader.tensors["a"].data_ptr() == slot["a"].data_ptr()


def test_in_place_reader_keeps_its_addresses():
    writer = m.WeightWriter(tensors(), num_readers=1)
    mine = tensors()
    before = {name: tensor.data_ptr() for name, tensor in mine.items()}
    reader = m.WeightReader(writer.arena.handle, 0, mine, in_place=True)
    publish(writer, 3)
    assert reader.pull() == 3 and holds(reader, 3)
    assert before == {name: tensor.data_ptr() for name, tensor in mine.items()}


@pytest.mark.parametrize("seed", range(8))
def test_leased_slots_are_never_written(seed):
    """Random interleavings: whatever a reader holds stays as it was pulled, and a slot is free."""
    rng, num_readers = random.Random(seed), 3
    writer = m.WeightWriter(tensors(), num_readers, checksums=True)
    readers = [
        m.WeightReader(writer.arena.handle, i, tensors(), check=i == 0) for i in range(num_readers)
    ]
    for version in range(1, 120):
        publish(writer, version)
        for reader in rng.sample(readers, rng.randrange(num_readers + 1)):
            assert reader.pull() == version
        for reader in readers:
            assert reader.version < 0 or holds(reader, reader.version)


def test_a_slot_is_free_whatever_the_readers_lease():
    """Readers + 2 slots: every reader another one, and the latest; with a reader more it raises."""
    for num_readers in range(4):
        writer = m.WeightWriter(tensors(), num_readers)
        for leased in itertools.product(range(num_readers + 2), repeat=num_readers):
            for reader, slot in enumerate(leased):
                writer.arena.words[m.Arena.LEASES + reader] = os.getpid() * m.Arena.MAX_SLOTS + slot
            publish(writer, writer.version + 1)
            assert writer.arena.words[m.Arena.LATEST] % m.Arena.MAX_SLOTS not in leased
    writer.arena.handle = writer.arena.handle._replace(num_slots=4)
    for reader, slot in enumerate(
        {*range(4)} - {writer.arena.words[m.Arena.LATEST] % m.Arena.MAX_SLOTS}
    ):
        writer.arena.words[m.Arena.LEASES + reader] = os.getpid() * m.Arena.MAX_SLOTS + slot
    with pytest.raises(m.WeightMismatch, match="no free slot"):
        publish(writer, writer.version + 1)


def test_a_reader_number_that_the_arena_does_not_serve_is_refused():
    writer = m.WeightWriter(tensors(), num_readers=2)
    for reader in (-1, 2):
        with pytest.raises(m.WeightMismatch, match="^arena: "):
            m.WeightReader(writer.arena.handle, reader, tensors())


def test_a_transposed_view_of_the_same_memory_is_not_a_tie():
    def make(fill):
        square = torch.arange(16.0).reshape(4, 4) + fill
        return {"w": square, "t": square.t()}

    writer, mine = m.WeightWriter(make(5), num_readers=1), make(0)
    writer.publish(1)
    m.WeightReader(writer.arena.handle, 0, mine).pull()
    assert all(torch.equal(mine[name], tensor) for name, tensor in make(5).items())


def test_without_descriptors_nobody_is_taken_for_dead(monkeypatch):
    def refuse(path):
        raise OSError(24, "too many open files")

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)
    with pytest.raises(OSError):
        m.is_alive(os.getpid())


def test_lease_goes_round_again_when_a_version_comes_in_between():
    writer = m.WeightWriter(tensors(), num_readers=1)
    reader = m.WeightReader(writer.arena.handle, 0, tensors())
    publish(writer, 1)
    looks = []

    def fence():  # between the announcement and the second look
        looks.append(reader.arena.words[m.Arena.LEASES])
        if len(looks) == 1:
            publish(writer, 2)

    reader.arena.fence = fence
    assert reader.pull() == 2 and len(looks) == 2 and holds(reader, 2)


def test_copy_runs_beside_the_trainer_and_ends_before_the_next():
    """`start` returns while the copy waits; `wait` ends with it; what it raised is raised."""
    writer, gate = m.WeightWriter(tensors(1.0), num_readers=1), threading.Event()
    copy = writer._copy

    def slow(version):
        assert gate.wait(10)
        copy(version)

    writer._copy = slow
    writer.start(1)
    assert writer.arena.words[m.Arena.LATEST] == m.Arena.NOTHING
    threading.Timer(0.2, gate.set).start()
    assert writer.wait() > 0.1 and writer.arena.words[m.Arena.LATEST] // m.Arena.MAX_SLOTS == 1
    writer._copy = lambda version: 1 / 0
    writer.start(2)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    assert writer.arena.words[m.Arena.LATEST] // m.Arena.MAX_SLOTS == 1


def small_weights(**changes):
    """name -> tensor, two of them tied, with changes; None: not there."""
    embed, norm = torch.ones(4, 4), torch.ones(4, dtype=torch.bfloat16)
    weights = {"embed": embed, "norm": norm, "head": embed} | changes
    return {name: tensor for name, tensor in weights.items() if tensor is not None}


def faults():
    """fault: (the reader's other tensors, what its handle says otherwise, what is done to its
    arena when the reader is at version 1, in slot 0, and version 2 is in slot 1)"""
    ones = torch.ones
    return {
        "missing name": ({"norm": None}, {}, None),
        "extra name": ({"bias": ones(4)}, {}, None),
        "wrong shape": ({"embed": ones(8, 2)}, {}, None),
        "other dtype, same size": ({"norm": ones(4, dtype=torch.float16)}, {}, None),
        "smaller dtype": ({"norm": ones(4).to(torch.float8_e5m2)}, {}, None),
        "integers for floats": ({"norm": ones(4, dtype=torch.int16)}, {}, None),
        "not tied": ({"head": ones(4, 4)}, {}, None),
        "dead trainer": ({}, {"pid": 1 << 22}, None),  # no process has that number
        "truncated arena": ({}, {"num_slots": 99}, None),
        "stale run id": ({}, {"run_id": 1}, None),
        "flipped bit": ({}, {}, lambda arena: arena.slots[1, 64].bitwise_xor_(1)),  # in norm
        "version going back": ({}, {}, lambda arena: arena.commit(0, 0)),
    }


def answer_to(others, said, done):
    """What a reader at version 1 answers to a fault; or in brackets, how it fails to."""
    writer = m.WeightWriter(small_weights(), 1, checksums=True)
    reader = m.WeightReader(writer.arena.handle, 0, small_weights(), check=True)
    writer.publish(1)
    reader.pull()
    writer.tensors["norm"].fill_(2)
    writer.publish(2)
    try:
        if done:
            done(writer.arena)
            reader.pull()
        m.WeightReader(writer.arena.handle._replace(**said), 0, small_weights(**others))
        return "(nothing)"
    except m.WeightMismatch as error:
        kept = reader.version == 1 and all((t == 1).all() for t in reader.tensors.values())
        return str(error) if kept else "(took them)"


@pytest.mark.parametrize("fault", faults())
def test_fault_raises_names_what_is_wrong_and_changes_nothing(fault):
    """Twelve of twelve: seven in the reader's tensors, five in the arena."""
    others, said, done = faults()[fault]
    answer = answer_to(others, said, done)
    print(f"{fault}: {answer}")
    named = [*others, "norm" if fault == "flipped bit" else "arena"][0]
    assert answer.startswith(f"{named}: "), answer


def test_nothing_is_raised_without_a_fault():
    assert len(faults()) == 12
    assert answer_to({}, {}, None) == answer_to({}, {}, lambda arena: None) == "(nothing)"


def test_a_tensor_that_changes_its_shape_is_not_copied():
    writer = m.WeightWriter(tensors(), num_readers=1)
    publish(writer, 1)
    writer.tensors["a"].data = torch.zeros(2, 2)
    with pytest.raises(m.WeightMismatch, match="^a: "):
        publish(writer, 2)
    assert writer.arena.words[m.Arena.LATEST] // m.Arena.MAX_SLOTS == 1


def test_a_failed_check_keeps_the_old_weights():
    writer = m.WeightWriter(tensors(), num_readers=1, checksums=True)
    reader = m.WeightReader(writer.arena.handle, 0, tensors(), check=True)
    publish(writer, 1)
    assert reader.pull() == 1
    publish(writer, 2)
    latest = writer.arena.words[m.Arena.LATEST] % m.Arena.MAX_SLOTS
    writer.arena.tensors(latest)["b"].view(torch.int16).bitwise_xor_(64)
    for _ in range(3):
        with pytest.raises(m.WeightMismatch, match="^b: "):
            reader.pull()
    for version in range(3, 40):
        publish(writer, version)
        assert holds(reader, 1), version
    assert reader.pull() == writer.version == 39 and holds(reader, 39)


def test_a_check_refuses_weights_without_checksums():
    writer = m.WeightWriter(tensors(), num_readers=1)
    reader = m.WeightReader(writer.arena.handle, 0, tensors(9.0), check=True)
    publish(writer, 1)
    with pytest.raises(m.WeightMismatch, match="^a, b: "):
        reader.pull()
    assert holds(reader, 9)


def test_writer_refuses_to_go_back():
    writer = m.WeightWriter(tensors(), num_readers=1)
    publish(writer, 5)
    for version in (5, 4):
        with pytest.raises(m.WeightMismatch):
            publish(writer, version)


def test_cast_in_the_copy_is_the_plain_cast():
    source = {"w": torch.randn(1000, 37), "n": torch.arange(9)}
    writer = m.WeightWriter(source, num_readers=1, dtype=torch.bfloat16)
    mine = {
        "w": torch.zeros(1000, 37, dtype=torch.bfloat16),
        "n": torch.zeros(9, dtype=torch.int64),
    }
    writer.publish(1)
    m.WeightReader(writer.arena.handle, 0, mine).pull()
    assert torch.equal(mine["w"], source["w"].bfloat16()) and torch.equal(mine["n"], source["n"])


def test_strided_empty_and_scalar_tensors_arrive():
    def make(fill):
        return {
            "t": torch.full((6, 4), fill).t(),
            "none": torch.zeros(0, 3),
            "one": torch.tensor(fill),
            "flags": torch.tensor([True, False, fill > 0]),
        }

    writer = m.WeightWriter(make(2.0), num_readers=1, checksums=True)
    reader = m.WeightReader(writer.arena.handle, 0, make(0.0), check=True)
    writer.publish(1)
    assert reader.pull() == 1
    for name, tensor in make(2.0).items():
        assert torch.equal(reader.tensors[name], tensor), name


def test_tied_weights_and_buffers_arrive_as_such():
    model = m.Policy(m.Config()).model
    model.register_buffer("steps", torch.tensor([3.0]))
    weights = m.weights_of(model)
    manifest = m.manifest_of(weights)
    spec = {spec.name: spec for spec in manifest.specs}
    assert "steps" in spec and spec["lm_head.weight"].tied_to == "model.embed_tokens.weight"
    assert spec["lm_head.weight"].offset == spec["model.embed_tokens.weight"].offset
    stored = {s.offset: s.num_bytes for s in manifest.specs}
    assert sum(stored.values()) == sum(p.nbytes for p in model.parameters()) + 4  # no byte twice
    writer = m.WeightWriter(weights, num_readers=1)
    other = m.Policy(m.Config(seed=1)).model
    other.register_buffer("steps", torch.tensor([0.0]))
    writer.publish(1)
    m.WeightReader(writer.arena.handle, 0, m.weights_of(other)).pull()
    assert other.steps.item() == 3.0
    assert other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()
    ids = torch.tensor([[0, 5, 6, 2, 1]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


# -- weight slots, between processes that die and stop --------------------------------------------
# Plain processes and pipes: no actors, so that nothing but the arena stands between the two sides.

SIDES = multiprocessing.get_context("spawn")
MIB16 = 16 << 20


def sized(num_bytes):
    """(one block, 29 bf16 tensors that are views of it)"""
    block = torch.zeros(num_bytes, dtype=torch.uint8)
    return block, {str(i): part for i, part in enumerate(block.view(torch.bfloat16).chunk(29))}


def resident_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * 4096


def writing_side(pipe, num_bytes, num_readers):
    """Publishes while told to: ("for", versions) or ("on",), which only a kill ends."""
    torch.set_num_threads(1)
    block, weights = sized(num_bytes)
    writer, version = m.WeightWriter(weights, num_readers), 0
    pipe.send(writer.arena.handle)
    while True:
        order = pipe.recv()
        end = version + order[1] if order[0] == "for" else 10**9
        before = resident_bytes()
        while version < end:
            version += 1
            writer.wait()
            block.fill_(version % 120)
            writer.start(version)
        writer.wait()
        pipe.send((version, resident_bytes() - before))


def reading_side(pipe, reader_id, num_bytes, leases):
    """Pulls, sleeps a little, checks every byte; for each order ("read", handle, reads) it answers
    (reads, torn, growth of resident memory). Stops early when no version comes for a second."""
    torch.set_num_threads(1)
    _, weights = sized(num_bytes)
    rng, arena_of = random.Random(reader_id), None
    pipe.send("ready")
    while True:
        _, handle, num_reads = pipe.recv()
        if handle != arena_of:
            start = time.perf_counter()
            reader, arena_of = m.WeightReader(handle, reader_id, weights), handle
            reader.pull()
            pipe.send(time.perf_counter() - start)
            reader.arena.whole.sum()  # maps all pages, also of slots that are free for long
        reads = torn = 0
        before, last, idle_since = None, reader.version, time.monotonic()
        while reads < num_reads and time.monotonic() - idle_since < 1:
            version = reader.pull()
            if version == last:
                time.sleep(0.0002)
                continue
            last, idle_since = version, time.monotonic()
            if not leases:
                reader.arena.words[reader.word] = m.Arena.NOTHING
            time.sleep(rng.random() * 0.002)
            ends = {int(e) for t in weights.values() for e in t.view(torch.int8).aminmax()}
            reads, torn = reads + 1, torn + (ends != {version % 120})
            before = before or (resident_bytes() if reads == 20 else None)
        pipe.send((reads, torn, resident_bytes() - (before or resident_bytes())))


class Side:
    """A process of one side, and a pipe to it."""

    def __init__(self, work, *args):
        self.pipe, theirs = SIDES.Pipe()
        self.process = SIDES.Process(target=work, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()

    def hears(self, seconds=60):
        assert self.pipe.poll(seconds), "no answer"
        return self.pipe.recv()

    def kill(self, how=signal.SIGKILL):
        if self.process.is_alive():
            os.kill(self.process.pid, how)
        if how == signal.SIGKILL:
            self.process.join(10)


@pytest.fixture
def sides():
    made = []

    def make(work, *args):
        made.append(Side(work, *args))
        return made[-1]

    yield make
    for side in made:
        side.kill()


def latest_version(handle):
    with open(f"/proc/{handle.pid}/fd/{handle.fd}", "rb") as file:
        return int.from_bytes(file.read(8), "little", signed=True) // m.Arena.MAX_SLOTS


def attacked_reads(sides, leases, enough, round_s):
    """(reads, torn, trainers killed): three readers, stopped and continued at random, of trainers
    that are killed at random, mostly in mid-publish, one after the other; until enough(these)."""
    rng, reads, torn, killed, mib4 = random.Random(0), 0, 0, 0, MIB16 // 4
    readers = [sides(reading_side, i, mib4, leases) for i in range(3)]
    trainer = sides(writing_side, mib4, 3)
    assert all(reader.hears() == "ready" for reader in readers)
    while not enough(reads, torn, killed):
        handle = trainer.hears()
        trainer.pipe.send(("on",))
        assert wait_until(lambda: latest_version(handle) > 0)
        for reader in readers:
            reader.pipe.send(("read", handle, 10**9))
        assert all(reader.hears() >= 0 for reader in readers)  # attached
        successor = sides(writing_side, mib4, 3)  # imports meanwhile
        end = time.monotonic() + round_s * (0.5 + rng.random())
        while time.monotonic() < end:
            victim = rng.choice(readers)
            victim.kill(signal.SIGSTOP)
            time.sleep(rng.random() * 0.03)
            victim.kill(signal.SIGCONT)
            time.sleep(rng.random() * 0.1)
        trainer.kill()
        killed, trainer = killed + 1, successor
        for reader in readers:
            found = reader.hears()
            reads, torn = reads + found[0], torn + found[1]
    return reads, torn, killed


def test_ten_thousand_reads_under_attack_and_none_is_torn(sides):
    reads, torn, killed = attacked_reads(sides, True, lambda n, _, k: n >= 10_000 and k >= 4, 4.0)
    print(f"with leases: {torn} of {reads} reads torn, {killed} trainers killed")
    assert torn == 0 and reads >= 10_000 and killed >= 4


def test_the_attack_tears_reads_without_leases(sides):
    reads, torn, _ = attacked_reads(sides, False, lambda n, t, _: t >= 5 or n >= 2000, 1.0)
    print(f"without leases: {torn} of {reads} reads torn")
    assert torn >= 5  # of at most 2000: of ten thousand it would be 25


def test_a_stopped_reader_costs_no_version_and_memory_does_not_grow(sides):
    readers, trainer = (
        [sides(reading_side, i, MIB16, True) for i in range(2)],
        sides(writing_side, MIB16, 2),
    )
    assert all(reader.hears() == "ready" for reader in readers)
    handle = trainer.hears()
    trainer.pipe.send(("for", 20))
    assert trainer.hears()[0] == 20
    for reader in readers:
        reader.pipe.send(("read", handle, 10**9))
        reader.hears()
    file = f"/proc/{handle.pid}/fd/{handle.fd}"
    blocks = os.stat(file).st_blocks
    readers[0].kill(signal.SIGSTOP)
    trainer.pipe.send(("for", 1000))
    version, growth = trainer.hears(120)
    readers[0].kill(signal.SIGCONT)
    assert version == 1020
    assert os.stat(file).st_blocks == blocks
    reads, torn, grown = readers[1].hears()
    print(
        f"1000 publishes beside a stopped reader: trainer grew by {growth} bytes, "
        f"a reader of {reads} versions by {grown}"
    )
    assert torn == 0 and max(growth, grown) < 1 << 20  # bytes; one slot is 16 times that


def test_a_late_joiner_needs_no_help(sides):
    reader, trainer = sides(reading_side, 0, MIB16, True), sides(writing_side, MIB16, 1)
    assert reader.hears() == "ready"
    handle = trainer.hears()
    trainer.pipe.send(("for", 50))
    assert trainer.hears() == (50, mock.ANY)
    trainer.kill(signal.SIGSTOP)
    reader.pipe.send(("read", handle, 1))
    print(f"joined after {reader.hears() * 1e3:.1f} ms")
    assert reader.hears(5)[:2] == (0, 0)  # nothing newer came; it holds version 50
    trainer.kill(signal.SIGCONT)


def test_a_dead_readers_lease_is_nobodys(sides):
    writer = m.WeightWriter(sized(MIB16)[1], num_readers=1)
    publish(writer, 1)
    reader = sides(reading_side, 0, MIB16, True)
    assert reader.hears() == "ready"
    reader.pipe.send(("read", writer.arena.handle, 0))
    assert reader.hears() >= 0 and reader.hears()[0] == 0  # it has attached, and keeps what it has
    leased = writer.arena.words[m.Arena.LEASES] % m.Arena.MAX_SLOTS
    used = set()
    for version in range(2, 8):
        publish(writer, version)
        used.add(writer.arena.words[m.Arena.LATEST] % m.Arena.MAX_SLOTS)
    assert leased not in used and len(used) == 2
    reader.kill()
    for version in range(8, 12):
        publish(writer, version)
        used.add(writer.arena.words[m.Arena.LATEST] % m.Arena.MAX_SLOTS)
    assert leased in used


def test_kill_leaves_nothing_and_readers_go_on(sides):
    shared_memory, files = sorted(os.listdir("/dev/shm")), sorted(os.listdir("/tmp"))
    trainer, (_, weights) = sides(writing_side, MIB16, 1), sized(MIB16)
    handle = trainer.hears()
    trainer.pipe.send(("for", 3))
    trainer.hears()
    reader = m.WeightReader(handle, 0, weights)
    assert reader.pull() == 3
    trainer.kill()
    assert reader.pull() == 3 and {int(t.view(torch.int8).max()) for t in weights.values()} == {3}
    with pytest.raises(m.WeightMismatch, match="writer"):
        m.WeightReader(handle, 0, sized(MIB16)[1])
    reader.check = True
    with pytest.raises(m.WeightMismatch, match="writer"):
        reader.pull()
    assert sorted(os.listdir("/dev/shm")) == shared_memory
    assert not [name for name in set(os.listdir("/tmp")) - set(files) if "monarch_rl" in name]


def test_an_arena_may_be_larger_than_dev_shm():
    """It has no entry there, so the 64 MB of a container are no limit."""
    before = os.statvfs("/dev/shm").f_bavail
    writer = m.WeightWriter({"w": torch.zeros(80 << 20, dtype=torch.uint8)}, num_readers=0)
    assert len(writer.arena.memory) > 160 << 20 and os.statvfs("/dev/shm").f_bavail == before


def test_cast_costs_a_plain_cast_and_no_extra_memory():
    """fp32 -> bf16 in the copy: the highest resident memory rises by less than 16 MiB."""
    code = """
import resource, statistics, sys, time, torch, monarch_rl as m
torch.set_num_threads(1)
source = {str(i): torch.ones(int(sys.argv[1]) << 20).view(-1, 1024) for i in range(64)}
plain = {name: torch.zeros_like(t, dtype=torch.bfloat16) for name, t in source.items()}
writer, ratios, highest = m.WeightWriter(source, 0, torch.bfloat16), [], []
for version in range(12):
    start = time.perf_counter()
    for name, tensor in source.items():
        plain[name].copy_(tensor)
    middle = time.perf_counter()
    writer.publish(version)
    ratios.append((time.perf_counter() - middle) / (middle - start))
    highest.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
print(statistics.median(ratios), highest[-1] - highest[1])"""
    found = subprocess.run(
        [sys.executable, "-c", code, os.environ.get("CAST_MIB_NUMBERS", "1")],
        cwd=FOLDER,
        text=True,
        capture_output=True,
    )
    ratio, grown = found.stdout.split()
    print(f"cast_over_plain_cast {float(ratio):.3f}, extra memory {grown} KiB")
    assert int(grown) < 16 << 10, found.stderr


# -- the relay ------------------------------------------------------------------------------------

RELAY = """
import asyncio, json, monarch_rl as m

async def main():
    procs, relay_procs = [m.this_host().spawn_procs(per_host={"rank": n}) for n in (3, 1)]
    ranks, place = procs.spawn("ranks", m.Bench), m.meeting_place()
    await ranks.do.call("join", place, 16, 0, 2)
    relay = relay_procs.spawn("relay", m.Relay, 0, ranks.slice(rank=0), "do", 2)
    handle = await relay.do.call_one("setup")
    await ranks.slice(rank=slice(1, 3)).do.call("attach", handle)
    row = await m.row(ranks, 30, "relay", 2)
    with open(f"/proc/{handle.pid}/fd/{handle.fd}", "r+b", buffering=0) as file:
        arena, versions = m.Arena(handle, file.fileno()), []
    for _ in range(3):
        await asyncio.sleep(0.2)
        versions.append(arena.newest())
    print(json.dumps([row.reads, row.torn, versions]), flush=True)

asyncio.run(main())
m.leave(0)
"""


@pytest.mark.parametrize("lease, torn_expected", [(True, False), (False, True)])
def test_relay_is_never_torn_and_the_test_can_tell(tmp_path, lease, torn_expected):
    """Between two arenas, by one-sided reads and writes, while the trainer publishes without a
    pause; then without the announcement that protects the slot."""
    changes = (
        []
        if lease
        else [("await self.remote.lease.write_from(self.lease_word)", "await asyncio.sleep(0)")]
    )
    folder = broken_file(tmp_path, *changes).parent
    found = subprocess.run(
        [sys.executable, "-c", RELAY], cwd=folder, text=True, capture_output=True, timeout=200
    )
    reads, torn, versions = json.loads(found.stdout.splitlines()[-1])
    print(f"relay, lease {lease}: {torn} of {reads} reads torn")
    assert reads == 60 and (torn > 0) is torn_expected
    assert versions == [50 + 30 * 14] * 3


# -- resharding -----------------------------------------------------------------------------------
# DTensors of ranks that do not exist: the "fake" process group never talks to anybody.

CUTS = [(1,), (2,), (3,), (4,), (5,), (6,), (1, 4), (2, 2), (2, 3), (3, 2)]  # meshes of ranks


@contextlib.contextmanager
def rank_of(mesh_shape, rank):
    """This process is that rank of such a mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group(
        "fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape)
    )
    try:
        yield m.dtensor.init_device_mesh("cpu", mesh_shape)
    finally:
        torch.distributed.destroy_process_group()


def cut(wholes, mesh, placements):
    """name -> DTensor, of name -> tensor and name -> placements"""
    return {
        name: m.dtensor.distribute_tensor(whole.clone(), mesh, placements[name], src_data_rank=None)
        for name, whole in wholes.items()
    }


def ranks(wholes, mesh_shape, placements):
    """[rank] what each rank of the mesh has"""
    found = []
    for rank in range(math.prod(mesh_shape)):
        with rank_of(mesh_shape, rank) as mesh:
            found.append(cut(wholes, mesh, placements))
    return found


def rows(dim=0):
    return m.dtensor.Shard(dim)


def strided(dim=0, split_factor=2):
    return m.dtensor.placement_types._StridedShard(dim, split_factor=split_factor)


def random_weights(rng, num_tensors):
    """name -> tensor of 1-3 dimensions, some empty, whose elements are their own indices"""
    kinds, wholes = [torch.bfloat16, torch.float32, torch.int64, torch.int8], {}
    for i in range(num_tensors):
        shape = rng.choices([0, *range(1, 10)], [1] + [6] * 9, k=rng.randint(1, 3))
        whole = torch.arange(math.prod(shape)) % 100
        wholes[f"w{i}"] = whole.to(rng.choice(kinds)).view(shape)
    return wholes


def random_cut(rng, wholes):
    """(mesh, name -> a placement for each dimension of the mesh)"""

    def placement(dim):
        some = [m.dtensor.Replicate(), rows(dim), strided(dim, rng.choice([2, 3]))]
        return rng.choices(some, [3, 5, 2])[0]

    mesh_shape = rng.choice(CUTS)
    return mesh_shape, {
        name: tuple(placement(rng.randrange(whole.dim())) for _ in mesh_shape)
        for name, whole in wholes.items()
    }


def same(left, right):
    return all(torch.equal(m.local(left[name]), m.local(right[name])) for name in right)


@pytest.mark.parametrize("seed", range(5))
def test_plan_gives_every_rank_what_distribute_tensor_gives(seed):
    """300 random pairs of layouts each: every element once, no byte more, replicas by turns."""
    rng = random.Random(seed)
    for _ in range(300):
        wholes = random_weights(rng, 1)
        whole, sides = wholes["w0"], [random_cut(rng, wholes) for _ in range(2)]
        have, want = (ranks(wholes, *side) for side in sides)
        boxes = [m.layout(whole.shape, mesh, placed["w0"]) for mesh, placed in sides]
        assert boxes == [
            [m.boxes(whole.shape, *m.placed(d["w0"])) for d in side] for side in (have, want)
        ]
        got = [torch.full_like(m.local(d["w0"]), -1) for d in want]
        writes, sent = [torch.zeros(t.shape) for t in got], [[] for _ in have]
        for move in m.plan("w0", *boxes):
            part = m.local(have[move.source]["w0"])[m.region(move.read_at, move.size)]
            assert torch.equal(part, whole[m.region(move.offset, move.size)])
            got[move.target][m.region(move.write_at, move.size)] = part
            writes[move.target][m.region(move.write_at, move.size)] += 1
            sent[move.source].append(part.nbytes)
        case = f"{tuple(whole.shape)}: {sides[0]} -> {sides[1]}"
        assert all(same({"w0": t}, d) for t, d in zip(got, want)), case
        assert all((n == 1).all() for n in writes), case
        assert sum(map(sum, sent)) == sum(m.local(d["w0"]).nbytes for d in want), case
        for held in boxes[0]:  # of the ranks that have the same
            loads = [each for each, theirs in zip(sent, boxes[0]) if theirs == held]
            fair = sum(map(sum, loads)) / len(loads)
            assert max(map(sum, loads)) <= fair + max([0, *sum(loads, [])]), case


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_replica_is_read_once_by_as_many_targets(num_ranks):
    everywhere = m.layout((8, 3), (num_ranks,), (m.dtensor.Replicate(),))
    moves = m.plan("w", everywhere, everywhere)
    assert sorted(move.source for move in moves) == [*range(num_ranks)]


def test_an_element_that_nobody_has_is_named():
    """Each box of random layouts in turn, taken away from all who have it."""
    rng, refused = random.Random(0), 0
    for _ in range(60):
        wholes = {"w0": torch.zeros(rng.randint(1, 9), rng.randint(1, 9))}
        source, target = (
            m.layout(wholes["w0"].shape, mesh, placed["w0"])
            for mesh, placed in (random_cut(rng, wholes) for _ in range(2))
        )
        for box in {box for held in source for box in held}:
            without = [[other for other in held if other != box] for held in source]
            with pytest.raises(m.WeightMismatch, match="^layer.w: "):
                m.plan("layer.w", without, target)
            refused += 1
    assert refused > 100


@pytest.mark.parametrize(
    "there, here",
    [
        ((6, 4), (7, 4)),
        ((7, 4), (7, 5)),
        ((8, 4), (7, 4)),
        ((7, 5), (7, 4)),
        ((28,), (7, 4)),
        ((7, 4), (28,)),
        ((7, 4), (7, 4, 2)),
        ((7, 4, 2), (7, 4)),
        ((4, 7), (7, 4)),
        ((0, 4), (7, 4)),
        ((7, 4), (0, 4)),
    ],
)
def test_different_shapes_have_no_plan(there, here):
    for placements in itertools.product([rows(), m.dtensor.Replicate()], repeat=2):
        with pytest.raises(m.WeightMismatch, match="^layer.w: "):
            m.plan(
                "layer.w",
                *(
                    m.layout(shape, (2,), (placement,))
                    for shape, placement in zip((there, here), placements)
                ),
            )


def test_parcels_carry_what_is_needed_and_nothing_else():
    """Several tensors of 1, 2, 4 and 8 bytes an element in one parcel, at any offset."""
    rng, kinds = random.Random(1), set()
    for _ in range(100):
        wholes = random_weights(rng, 4)
        sides = [random_cut(rng, wholes) for _ in range(2)]
        have, want = (ranks(wholes, *side) for side in sides)
        got = [{name: torch.full_like(m.local(t), -1) for name, t in d.items()} for d in want]
        moves = [
            move
            for name, whole in wholes.items()
            for move in m.plan(
                name, *(m.layout(whole.shape, mesh, placed[name]) for mesh, placed in sides)
            )
        ]
        num_bytes = 0
        for source, target in itertools.product(range(len(have)), range(len(got))):
            sent = m.Parcel(moves, have[source], (source, target), sending=True)
            found = m.Parcel(moves, got[target], (source, target), sending=False)
            sent.copy()
            found.buffer.copy_(sent.buffer)
            found.copy()
            num_bytes += sent.buffer.nbytes
            kinds.add(
                frozenset(
                    wholes[move.name].dtype.itemsize
                    for move in moves
                    if (move.source, move.target) == (source, target)
                )
            )
        assert all(map(same, got, want)), sides
        assert num_bytes == sum(m.local(t).nbytes for d in want for t in d.values())
    assert frozenset([1, 2, 4, 8]) in kinds


def test_a_parcel_is_unpacked_while_the_next_is_read():
    """Each unpacking waits until the next read has begun, so that without overlap none ends."""
    held = m.layout((8,), (4,), (rows(),))
    moves = m.plan("w", held, m.layout((8,), (1,), (rows(),)))
    begun, log = [threading.Event() for _ in range(5)], []
    begun[4].set()  # nobody is left to wait for
    target = {"w": torch.zeros(8)}
    parcels = [m.Parcel(moves, target, (i, 0), sending=False) for i in range(4)]

    class Handle:
        def __init__(self, i):
            self.i = i

        async def read_into(self, buffer):
            begun[self.i].set()
            await asyncio.sleep(0.001)
            buffer.copy_(torch.tensor([2.0 * self.i, 2.0 * self.i + 1]).view(torch.uint8))
            log.append(f"read {self.i}")

    def slow(i, unpack):
        assert begun[i + 1].wait(5), "nothing is read meanwhile"
        time.sleep(0.02)  # so that `receive` would end before the last, if it did not wait
        log.append(f"unpack {i}")
        return unpack()

    for i, parcel in enumerate(parcels):
        parcel.copy = functools.partial(slow, i, parcel.copy)

    async def received():
        await m.receive(parcels, [(Handle(i),) for i in range(4)])
        return target["w"].tolist(), sorted(log)

    assert asyncio.run(received()) == (
        [*range(8)],
        sorted(f"{what} {i}" for i in range(4) for what in ("read", "unpack")),
    )


def test_sharded_tensors_are_tied_if_they_are_one():
    """Also where a rank has nothing of them, and so no address to tell them apart by."""
    wholes = {name: torch.zeros(2, 5) for name in ("embed", "other", "head")}
    for mesh_shape, placement in [((2,), rows()), ((4,), rows()), ((4,), m.dtensor.Replicate())]:
        for found in ranks(wholes, mesh_shape, dict.fromkeys(wholes, [placement])):
            found["head"] = found["embed"]
            specs = m.manifest_of(found).specs
            assert [spec.tied_to for spec in specs] == ["embed", "other", "embed"], mesh_shape
            assert specs[0].num_bytes == 40 and specs[1].offset == 64


class Grid:
    """A trainer and a generator, all their ranks in this process, with writers and readers."""

    def __init__(self, wholes, source, target):
        """source, target: (mesh, name -> placements)"""
        self.wholes, self.sides = wholes, (source, target)
        self.have, got = ranks(wholes, *source), ranks(wholes, *target)
        for tensor in (t for d in got for t in d.values()):
            m.local(tensor).fill_(-1)
        lead = m.ShardWriter(self.have[0], len(got), 0, len(self.have))
        handle = lead.arena.handle
        self.writers = [
            lead,
            *(
                m.ShardWriter(d, len(got), rank, len(self.have), handle)
                for rank, d in enumerate(self.have[1:], 1)
            ),
        ]
        self.readers = [m.ShardReader(handle, i, d) for i, d in enumerate(got)]

    def step(self):
        for tensor in [*self.wholes.values(), *(m.local(t) for d in self.have for t in d.values())]:
            tensor += 1

    def pulled(self):
        """The version that all readers have now, and whether it is what it should be."""
        (version,) = {reader.pull() for reader in self.readers}
        want = ranks(self.wholes, *self.sides[1])
        return version, all(same(r.tensors, d) for r, d in zip(self.readers, want))


@pytest.mark.parametrize("seed", range(4))
def test_slots_give_every_rank_what_distribute_tensor_gives(seed):
    """Random layouts, ranks that come in any order; nothing is visible before the last has come."""
    rng = random.Random(seed)
    for _ in range(15):
        wholes = random_weights(rng, 4)
        grid = Grid(wholes, random_cut(rng, wholes), random_cut(rng, wholes))
        views = grid.writers[0].arena.tensors(0)
        assert sum(
            view.nbytes
            for writer in grid.writers
            for name, t in writer.tensors.items()
            for view, _ in writer.parts(views[name], t)
        ) == sum(whole.nbytes for whole in wholes.values()), "of copies one is written"
        for version in (1, 2, 3):
            grid.step()
            *first, last = rng.sample(grid.writers, len(grid.writers))
            for writer in first:
                writer.start(version)
            time.sleep(0.003)  # enough to write and to commit, if nobody waited for the last
            assert {reader.pull() for reader in grid.readers} == {
                version - 1 if version > 1 else -1
            }
            last.publish(version)
            for writer in first:
                writer.wait()
            assert grid.pulled() == (version, True), grid.sides


@pytest.fixture
def two_to_two():
    wholes = {"w": torch.arange(35.0).view(7, 5), "b": torch.zeros(1)}
    grid = Grid(
        wholes,
        ((2,), dict.fromkeys("wb", [rows()])),
        ((2,), {"w": [rows(1)], "b": [m.dtensor.Replicate()]}),
    )
    yield grid
    for word in range(-3, 0):  # no thread of a failed test waits on
        grid.writers[0].arena.words[word] = 1 << 62


def test_a_rank_with_other_tensors_is_refused(two_to_two):
    handle, mine = two_to_two.writers[0].arena.handle, two_to_two.have[1]
    for others, named in [
        ({"w": mine["w"]}, "b"),
        ({**mine, "c": mine["b"]}, "c"),
        ({**mine, "w": mine["b"]}, "w"),
    ]:
        with pytest.raises(m.WeightMismatch, match=f"^{named}: "):
            m.ShardWriter(others, 2, 1, 2, handle)
        with pytest.raises(m.WeightMismatch, match=f"^{named}: "):
            m.ShardReader(handle, 1, others)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_fails_the_others(two_to_two, failing):
    """A copy that raises on one rank leaves no other waiting, and no version becomes visible."""
    failed, other = two_to_two.writers[failing], two_to_two.writers[1 - failing]
    failed._write = lambda slot: 1 / 0
    failed.start(1), other.start(1)
    with pytest.raises(ZeroDivisionError):
        failed.copying.result(10)
    with pytest.raises(m.WeightMismatch, match=f"rank {failing}|another rank"):
        other.copying.result(10)
        other.start(2)
        other.copying.result(10)
    assert other.arena.words[m.Arena.LATEST] == m.Arena.NOTHING


def test_tensors_that_are_not_cut_travel_as_they_are(two_to_two):
    """Buffers of an FSDP model are plain tensors."""
    wholes = [{**d, "steps": torch.full((3,), i)} for i, d in enumerate(two_to_two.have)]
    lead = m.ShardWriter(wholes[0], 1, 0, 2)
    other = m.ShardWriter(wholes[1], 1, 1, 2, lead.arena.handle)
    lead.start(1), other.publish(1), lead.wait()
    mine = {**two_to_two.readers[0].tensors, "steps": torch.full((3,), 9)}
    m.ShardReader(lead.arena.handle, 0, mine).pull()
    assert mine["steps"].tolist() == [0, 0, 0]


# Between processes. Tensor: (shape, how the trainer cuts it, how the generator does)
PLACED = {
    "rows to rows": ((1030, 517), rows, rows),
    "rows to columns": ((1031, 517), rows, lambda: rows(1)),
    "columns to rows": ((7, 9), lambda: rows(1), rows),
    "copies to rows": ((5, 3), m.dtensor.Replicate, rows),
    "rows to copies": ((5, 3), rows, m.dtensor.Replicate),
    "one row": ((1, 9), rows, lambda: rows(1)),
    "one row again": ((1, 9), rows, rows),
    "vector": ((11,), rows, rows),
    "strided": ((9, 2, 3), strided, lambda: rows(2)),
    "to strided": ((10, 3), rows, strided),
}
KINDS = [torch.float32, torch.bfloat16, torch.int64]


def placed_weights(rank, side):
    """What that rank of the trainer (0) or generator (1) has of version 0; element: its index."""
    wholes = {
        name: (torch.arange(math.prod(shape)) % 100).to(KINDS[i % 3]).view(shape)
        for i, (name, (shape, *_)) in enumerate(PLACED.items())
    }
    with rank_of((2,), rank) as mesh:
        return cut(wholes, mesh, {name: [how[side]()] for name, (_, *how) in PLACED.items()})


def trainer_rank(pipe, rank, waits):
    """Publishes the versions that it is told: (first, end, slowly). Slowly: asks before it writes.
    waits: False for a rank 0 that commits when it has written its own."""
    torch.set_num_threads(1)
    base, mine, rng = placed_weights(rank, 0), placed_weights(rank, 0), random.Random(rank)
    writer = m.ShardWriter(mine, 2, rank, 2, pipe.recv())
    if not waits:
        writer.others = ()
    pipe.send(writer.arena.handle)
    write = writer._write

    def ask(slot):
        pipe.send("writing")
        assert pipe.recv() == "write"
        write(slot)

    while True:
        first, end, slowly = pipe.recv()
        writer._write = ask if slowly else write
        for version in range(first, end):
            writer.wait()
            for name, tensor in mine.items():
                m.local(tensor).copy_(m.local(base[name]) + version % 100)
            if not slowly:
                time.sleep(rng.random() * 0.002)
            writer.start(version)
        writer.wait()
        pipe.send(end - 1)


def generator_rank(pipe, rank):
    """Pulls so many new versions, ends with that one, and answers (version, names of the tensors
    that were wrong in any of them, reads)."""
    torch.set_num_threads(1)
    base, mine, rng = placed_weights(rank, 1), placed_weights(rank, 1), random.Random(rank)
    pipe.send("ready")
    reader = m.ShardReader(pipe.recv(), rank, mine)
    while True:
        last, wrong, reads = pipe.recv(), set(), 0
        while True:
            before, version = reader.version, reader.pull()
            time.sleep(rng.random() * 0.002)
            if version != before:
                reads += 1
                wrong |= {
                    name
                    for name, t in mine.items()
                    if not torch.equal(m.local(t), m.local(base[name]) + version % 100)
                }
            if version >= last:
                break
        pipe.send((version, sorted(wrong), reads))


def four_ranks(sides, waits):
    readers = [sides(generator_rank, rank) for rank in range(2)]
    writers = [sides(trainer_rank, rank, waits) for rank in range(2)]
    writers[0].pipe.send(None)
    handle = writers[0].hears()
    writers[1].pipe.send(handle)
    writers[1].hears()
    for reader in readers:
        assert reader.hears() == "ready"
        reader.pipe.send(handle)
    return writers, readers, handle


def order(sides, *what):
    for side in sides:
        side.pipe.send(what if len(what) > 1 else what[0])


def test_no_rank_of_a_generator_sees_half_a_version(sides):
    """Two trainer ranks, two generator ranks, every way to cut; rank 1 writes when it is told, then
    both without a pause and are stopped at random."""
    writers, readers, handle = four_ranks(sides, waits=True)
    for version in (1, 2, 3):
        slow = writers[version % 2]
        writers[1 - version % 2].pipe.send((version, version + 1, False))
        slow.pipe.send((version, version + 1, True))
        assert slow.hears() == "writing"
        time.sleep(0.1)  # enough for the other to write and to commit, if it did not wait
        order(readers, -1)
        assert [r.hears() for r in readers] == [(version - 1 or -1, [], mock.ANY)] * 2
        slow.pipe.send("write")
        assert [w.hears() for w in writers] == [version] * 2
        order(readers, version)
        assert [r.hears() for r in readers] == [(version, [], 1)] * 2
    order(writers, 4, 404, False)
    order(readers, 403)
    rng = random.Random(0)
    while not all(w.pipe.poll() for w in writers):
        victim = rng.choice(writers + readers)
        victim.kill(signal.SIGSTOP)
        time.sleep(rng.random() * 0.02)
        victim.kill(signal.SIGCONT)
        time.sleep(rng.random() * 0.05)
    assert [w.hears() for w in writers] == [403] * 2
    found = [r.hears() for r in readers]
    print("versions that each generator rank saw of 400:", *(reads for *_, reads in found))
    assert [f[:2] for f in found] == [(403, [])] * 2 and min(reads for *_, reads in found) > 20


def test_the_check_sees_half_a_version(sides):
    """The same with a rank 0 that waits for nobody."""
    writers, readers, _ = four_ranks(sides, waits=False)
    writers[1].pipe.send((1, 2, True))
    writers[0].pipe.send((1, 2, False))
    assert writers[1].hears() == "writing" and writers[0].hears() == 1
    order(readers, 1)
    assert all("rows to columns" in wrong for _, wrong, _ in (r.hears() for r in readers))


# -- a sharded trainer ----------------------------------------------------------------------------

PROBE = """
import asyncio, dataclasses, random, sys
import torch
import monarch_rl as m

class Probe(m.Trainer):
    async def gradients(self, batch):
        "(name -> the whole gradient with which the optimizer steps, what the step says of itself)"
        found = {}

        def keep(*_):
            for name, p in self.policy.model.named_parameters():
                found[name] = (p.grad.full_tensor() if self.cfg.trainers > 1 else p.grad).clone()

        self.optimizer.register_step_pre_hook(keep)
        stats = await self.step(batch)
        return found, stats._asdict()

async def gradients_of(num_ranks, loss, batch):
    cfg, place, room = m.Config(trainers=num_ranks, loss=loss), m.meeting_place(), m.Vault().room()
    procs = m.this_host().spawn_procs(per_host={"trainer": num_ranks})
    ranks = procs.spawn("probe", Probe, 0, cfg)
    await ranks.do.call("setup")
    await ranks.do.call("begin", place, False)  # no warm start
    await ranks.do.call("save", room[0], "")
    await ranks.do.call("load", room[0], room[0], cfg)
    answers = [*(await ranks.do.call("gradients", batch)).values()]
    await procs.stop()
    return answers

async def main(loss, *sizes):
    cfg = m.Config()
    rollout, _ = m.generate(m.Policy(cfg), m.Sampler(cfg).draw(5), 3, seed=0, greedy=False)
    rng = torch.Generator().manual_seed(0)
    rewards = torch.rand(15, 2, generator=rng)  # the policy is untrained: all of its own are near 0
    batch = rollout._replace(rewards=rewards)
    (alone, stats), = await gradients_of(1, loss, batch)
    for num_ranks in map(int, sizes):
        for found, told in await gradients_of(num_ranks, loss, batch):
            gaps = [float((found[k] - g).norm() / g.norm()) for k, g in alone.items()]
            off = {k: abs(told[k] - v) / max(1e-3, abs(v)) for k, v in stats.items()
                   if not k.endswith("_s")}
            print(num_ranks, max(gaps), max(off.values()), len(gaps), flush=True)

def run():
    asyncio.run(main(*sys.argv[1:]))
    m.leave(0)

if __name__ == "__main__":
    import probe
    probe.run()
"""


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=long), 3])
def test_many_trainers_have_the_gradient_of_one(tmp_path, num_ranks, loss="ppo"):
    """The ranks score 15 rows, in fp32. The log-probabilities come from another policy, so that
    ratios are far from 1; all ranks say of the step what one trainer says."""
    (tmp_path / "probe.py").write_text(PROBE, encoding="utf-8")
    found = subprocess.run(
        [sys.executable, "probe.py", loss, str(num_ranks)],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{FOLDER}"},
    )
    rows = [line.split() for line in found.stdout.splitlines() if line[:2] == f"{num_ranks} "]
    assert len(rows) == num_ranks, found.stdout + found.stderr
    print(f"{loss}: largest relative difference of gradients and of figures", rows)
    assert all(float(gap) <= 1e-5 and float(off) <= 1e-4 and int(n) > 20 for _, gap, off, n in rows)


@long
def test_training_learns_with_two_trainers(tmp_path):
    learned(Run(tmp_path, "--only", "async_rl", "--trainers", "2", "--seed", "1"), 0.95)


# -- faults ---------------------------------------------------------------------------------------
# What runs is this file, and this, in processes of its own. `python test_monarch_rl.py` runs it at
# length and prints the figures of DOCS 10.

CHAOS = r'''import asyncio, contextlib, json, math, os, pathlib, random, signal, statistics, sys, time, zlib
import monarch_rl as m

FLAG = pathlib.Path(os.environ.get("CHAOS_FLAG", "/nowhere"))  # what goes wrong now, if anything


def goes_wrong():
    with contextlib.suppress(OSError):
        return FLAG.read_text()


class Shaky(m.Generator):
    """Replica 1 raises while that is told, replica 0 cannot start."""

    async def setup(self):
        if self.replica_id == 0 and goes_wrong() == "no replica 0":
            raise RuntimeError("cannot start")
        await super().setup()

    async def rollout(self, *args):
        if self.replica_id == 1 and goes_wrong() == "generator raises":
            raise RuntimeError("a bad spell")
        return await super().rollout(*args)


class Wicked(m.Judge):
    """A reward function that does to one answer in 50 what is told."""

    async def setup(self):
        await super().setup()
        score = self.task.score

        def wicked(turns, said):
            what = goes_wrong() if zlib.crc32(repr((turns, said)).encode()) % 50 == 0 else None
            if what == "judge raises":
                raise ValueError("no reward")
            if what == "judge hangs":
                while True:
                    pass
            if what == "judge exits":
                os._exit(3)
            return [math.inf, 0.5] if what == "judge says infinity" else score(turns, said)

        self.task.score = wicked


TOLD = ["generator raises", "judge raises", "judge hangs", "judge exits", "judge says infinity"]
FAULTS = TOLD + [
    "SIGKILL generators", "SIGSTOP generators", "slow generators", "two generators", "killed again",
    "SIGKILL judges", "SIGSTOP judges", "SIGKILL trainer", "SIGSTOP trainer"]


class Quiet(m.Report):
    def __init__(self):
        super().__init__()
        self.now = dict(checks=[], figures={})

    def say(self, *lines, **_):
        for line in lines:
            print("   ", line, file=sys.stderr, flush=True)


class Record(m.History):
    """Also: which groups each step that counts has trained on, and when it ended."""

    def __init__(self, *args, **changes):
        super().__init__(*args, **changes)
        self.groups = {}

    def add(self, stats, batch):
        super().add(stats, batch)
        self.groups[len(self.rows)] = {*batch.group_ids.tolist()}


class Watched(m.Fleet):
    """Counts rollouts of versions older than the run had reached when they were asked for."""

    old = 0

    async def rollout(self, prompts, *args, **kwargs):
        rows, run_id = getattr(self, "rows", []), self.handle.run_id
        reached = rows[-1]["version"] - 1 if rows else -1
        found = await super().rollout(prompts, *args, **kwargs)
        if run_id == self.handle.run_id and found.turns.any():
            self.old += int(found.versions[found.turns > 0].min()) < reached
        return found


async def pids(fleet, name):
    return (await getattr(fleet, name).status.call_one(30.0))["pids"]


async def do(fault, fleet, rng):
    how, _, name = fault.partition(" ")
    if fault in TOLD:
        FLAG.write_text(fault)
        await asyncio.sleep(0.5)
        FLAG.unlink()
    elif how.startswith("SIG"):
        os.kill(rng.choice(await pids(fleet, name)), signal.Signals[how])
    elif how == "two":
        for pid in rng.sample(await pids(fleet, name), 2):
            os.kill(pid, signal.SIGKILL)
    elif how == "killed":
        before = {*m.descendants()}
        os.kill(rng.choice(await pids(fleet, "generators")), signal.SIGKILL)
        await asyncio.sleep(1.0)  # its replacement is importing
        m.kill([*{*m.descendants()} - before])
    elif how == "slow":  # a tenth of the time
        pid = rng.choice(await pids(fleet, name))
        for _ in range(30):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                await asyncio.sleep(0.09)
                os.kill(pid, signal.SIGCONT)
                await asyncio.sleep(0.01)


async def until_step(step, history, running):
    """Waits until a run has come so far, or has ended."""
    while len(history.rows) < step and not running.done():
        await asyncio.sleep(0.002)
    if running.done():
        running.result()  # raises what ended it


async def chaos(seed, num_steps=100):
    """A run with three random faults at random steps; what is wrong with it."""
    rng = random.Random(f"chaos {seed}")
    faults = rng.sample(FAULTS, 3)
    at = sorted(rng.randrange(1, num_steps) for _ in faults)
    cfg, report = m.Config(generators=3, steps=num_steps, save_every=20, seed=seed), Quiet()
    print("   ", seed, [*zip(at, faults)], file=sys.stderr, flush=True)
    async with Watched(cfg) as fleet:
        history = Record(fleet, report, "chaos", num_steps)
        fleet.rows = history.rows
        run = m.AsyncRun(history, cfg.max_lag)
        running = asyncio.ensure_future(run.run())
        for step, fault in zip(at, faults):
            await until_step(step, history, running)
            if not running.done():
                await do(fault, fleet, rng)
        await running
    count, groups = history.count, history.groups.values()
    in_flight = run.away + len(run.buffer.groups)
    wrong = {
        "steps": [row["step"] for row in history.rows] != [*range(1, num_steps + 1)],
        "lag": max(history["lag_max"]) > cfg.max_lag, "old versions": fleet.old,
        "trained": count["trained"] != 16 * num_steps,
        "in flight": m.under_way(count) != in_flight,
        "trained twice": len({g for ids in groups for g in ids}) != sum(map(len, groups))}
    return dict(seed=seed, faults=faults, count={**count}, unjudged=fleet.num_unjudged,
                wrong=[k for k, v in wrong.items() if v])


async def failover(num_kills):
    """ms from a SIGKILL or SIGSTOP to the last answer of four requests that were under way."""
    cfg, ms, late = m.Config(generators=3), [], []
    async with m.Fleet(cfg) as fleet:
        prompts = fleet.sampler.draw(16)
        for kill in range(num_kills + 2):
            found = await pids(fleet, "generators")
            asked = [asyncio.ensure_future(fleet.rollout(prompts)) for _ in range(4)]
            await asyncio.sleep(0.008)
            struck, when = time.monotonic(), time.time()
            os.kill(found[kill % 3], signal.SIGKILL if kill < num_kills else signal.SIGSTOP)
            await asyncio.gather(*asked)
            ms.append(m.since(struck) * 1e3)
        await fleet.generators.status.call_one(30.0)
        late = [e.start - when for e in m.losses("generator") if e.what == "missed its deadline"]
    return dict(failover_ms=statistics.median(ms[:num_kills]), failover_all_ms=ms,
                freeze_found_s=late, deadline_s=5.0)


async def outside(num_steps=20):
    """The trainer is killed between runs, and whoever asks next finds it as it was; the second time
    when there is already another one, which has not begun."""
    found = []
    async with m.Fleet(m.Config(steps=num_steps)) as fleet:
        async def lose(replaced):
            [before] = await pids(fleet, "trainer")
            os.kill(before, signal.SIGKILL)
            while replaced and await pids(fleet, "trainer") in ([], [before]):
                await asyncio.sleep(0.05)

        for replaced in (False, True):
            found.append(await fleet.evaluate())
            await lose(replaced)
            found.append(await fleet.evaluate())
            batch = await fleet.batch()
            await lose(replaced)
            failed = [row[0] for row in await fleet.surely("examine", batch)
                      if not m.Report.OPERATORS[row[2]](row[1], row[3])]
            if not replaced:
                history = await m.train_sync(m.History(fleet, Quiet(), "sync", num_steps))
        return dict(exact=found, failed=failed, steps=len(history.rows), lost=history.losses)


async def throughput(num_steps=300):
    """steps/s with three generators, and with one of them dead all the time."""
    cfg, rates = m.Config(generators=3, steps=num_steps, save_every=10**6), []
    async with m.Fleet(cfg) as fleet:
        for dead in (False, True):
            if dead:
                FLAG.write_text("no replica 0")
                found = (await pids(fleet, "generators"))[0]
                os.kill(found, signal.SIGKILL)
                await asyncio.sleep(6.0)
            history = m.History(fleet, Quiet(), "two" if dead else "three", num_steps)
            await m.AsyncRun(history, cfg.max_lag).run()
            rates.append(num_steps / history["seconds"][-1])
        FLAG.unlink()
    return dict(steps_per_s_three=rates[0], steps_per_s_two=rates[1], share=rates[1] / rates[0])


async def memory(num_steps=2000):
    """Resident memory of all processes, after 200 steps and after all."""
    def resident():
        found = 0
        for pid in [os.getpid(), *m.descendants()]:
            with contextlib.suppress(OSError):
                text = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text()
                found += int(text.split("Pss:")[1].split()[0])
        return found / 1024

    cfg = m.Config(steps=num_steps)
    async with m.Fleet(cfg) as fleet:
        history = m.History(fleet, Quiet(), "memory", num_steps)
        running = asyncio.ensure_future(m.AsyncRun(history, cfg.max_lag).run())
        await until_step(200, history, running)
        early = resident()
        await running
        late = resident()
    return dict(mib_after_200=early, mib_at_the_end=late, ratio=late / early)


class Cold(m.Trainer):
    """Begins with random weights, which takes no time."""

    async def begin(self, place, warm):
        return await super().begin(place, False)


async def sync(num_steps=30):
    """Two synchronous runs, the second like the first: with checkpoints, goes on from what there is."""
    m.Trainer, cfg = Cold, m.Config(steps=2 * num_steps, save_every=5, checkpoint=".", generators=1)
    async with m.Fleet(cfg) as fleet:
        if not list(pathlib.Path("straight").glob(f"*{num_steps}.pt")):
            await m.train_sync(m.History(fleet, Quiet(), "straight", num_steps, "straight"))
        fleet.sampler.num_drawn = 0
        print("begun", flush=True)
        history = await m.train_sync(m.History(fleet, Quiet(), "sync", num_steps, "saved"))
    return dict(steps=len(history.rows))


def run():
    m.Generator = Shaky
    m.Judge = Wicked
    for what in sys.argv[1:]:
        name, _, arg = what.partition(":")
        answer = asyncio.run({"chaos": lambda: chaos(int(arg)), "failover": lambda: failover(int(arg)),
                              "throughput": throughput, "memory": memory, "outside": outside,
                              "sync": sync}[name]())
        print(json.dumps(answer), flush=True)
    m.leave(0)


if __name__ == "__main__":
    import chaos as by_name

    by_name.run()
'''


def chaos(folder, *what, timeout=400):
    """The answers of CHAOS to each of these, its exit status, and the processes it has left."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chaos.py").write_text(CHAOS, encoding="utf-8")
    mark = uuid.uuid4().hex
    found = subprocess.run(
        [sys.executable, "chaos.py", *what],
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=timeout,
        env={
            **os.environ,
            MARK: mark,
            "PYTHONPATH": f"{folder}:{FOLDER}",
            "CHAOS_FLAG": str(folder / "flag"),
        },
    )
    print(found.stderr[-4000:])
    answers = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert found.returncode == 0 and len(answers) == len(what), found.stdout + found.stderr
    assert wait_until(lambda: processes_of(mark) == [])
    assert sorted(os.listdir(folder)) in (
        ["chaos.py"],
        ["__pycache__", "chaos.py"],
        ["chaos.py", "saved"],
    )
    return answers


@long
@pytest.mark.parametrize("seed", [14, 1])
def test_three_faults_cost_no_step_and_the_books_are_true(tmp_path, seed):
    """Of twenty seeds two; each draws three faults and three steps."""
    [found] = chaos(tmp_path, f"chaos:{seed}")
    print(found)
    assert found["wrong"] == []


@long
def test_a_trainer_lost_outside_a_run_is_made_up_for(tmp_path):
    """Greedy evaluations before and after a loss have the same weights, and so the same result."""
    [found] = chaos(tmp_path, "outside")
    first, again, trained, after = found["exact"]
    assert first == again and trained == after and found["failed"] == [] and found["steps"] == 20, (
        found
    )


@long
def test_requests_of_a_killed_generator_are_answered_elsewhere(tmp_path):
    [found] = chaos(tmp_path, "failover:3")
    print(found)
    assert len(found["failover_all_ms"]) == 5 and found["freeze_found_s"]


def difference(folders):
    """The largest of parameters and optimizer states in the newest checkpoints of two folders."""
    left, right = (torch.load(max(folder.glob("step-*")), weights_only=True) for folder in folders)
    assert json.loads(left["state"])[2:] == json.loads(right["state"])[2:]  # asked and drawn
    pairs = [(left["weights"][k], right["weights"][k]) for k in left["weights"]]
    for name, states in left["moments"]["state"].items():
        pairs += [(states[k], right["moments"]["state"][name][k]) for k in states]
    versions = left["version"], right["version"]  # of one trainer, if nobody killed it in between
    assert len(pairs) > 80 and versions[1] in (versions[0], 2 * versions[0])
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def power_cuts(folder, num_outside, num_inside, seed=0):
    """Kills all processes of a synchronous run at random moments, some while a checkpoint is being
    written, and starts it again, until there were so many: (kills outside, kills inside, ends of
    runs, largest difference of such a run's end from one that nobody has killed)"""
    rng, outside, inside, ends, gap = random.Random(seed), 0, 0, 0, 0.0
    room = folder / "cut"
    room.mkdir(parents=True)
    (room / "chaos.py").write_text(CHAOS, encoding="utf-8")
    while outside < num_outside or inside < num_inside or (room / "saved").exists():
        mark, unfinished = uuid.uuid4().hex, room / "saved" / "unfinished"
        process = subprocess.Popen(
            [sys.executable, "chaos.py", "sync"],
            cwd=room,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, MARK: mark, "PYTHONPATH": f"{room}:{FOLDER}"},
        )
        assert process.stdout.readline() == "begun\n"
        unfinished.unlink(missing_ok=True)
        within = inside < num_inside and (outside >= num_outside or rng.random() < 0.5)
        end = time.monotonic() + (20 if within else rng.random() * 3.5)
        if within or outside < num_outside:
            while (
                time.monotonic() < end
                and process.poll() is None
                and not (within and unfinished.exists() and rng.random() < 0.5)
            ):
                time.sleep(0.0002 if within else 0.002)
            cut_off = process.poll() is None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # all at once
        process.wait()
        assert wait_until(lambda: processes_of(mark) == [], 90)
        if process.returncode == 0:
            ends += 1
            gap = max(gap, difference([room / "straight", room / "saved"]))
            shutil.rmtree(room / "saved")
        elif cut_off:
            inside += unfinished.exists()
            outside += not unfinished.exists()
    return outside, inside, ends, gap


@pytest.mark.parametrize("num_outside, num_inside", [(0, 1), pytest.param(2, 2, marks=long)])
def test_a_power_cut_at_any_moment_changes_nothing(tmp_path, num_outside, num_inside):
    outside, inside, ends, gap = power_cuts(tmp_path, num_outside, num_inside)
    print(
        f"power cuts: {outside} outside, {inside} inside a checkpoint, {ends} ends, difference {gap}"
    )
    assert outside >= num_outside and inside >= num_inside and ends >= 1 and gap == 0.0


def checkpoint(path, **about):
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"about": m.about(m.Config()) | about, "weights": torch.arange(1000.0)}, path)


class Bomb:
    def __reduce__(self):
        return os.mkdir, ("exploded",)


def spoil(path, how):
    """A file that no run can go on from."""
    whole = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(whole[: len(whole) // 2])
    elif how == "damaged":
        whole[whole.index(torch.tensor([500.0]).numpy().tobytes())] ^= 1
        path.write_bytes(whole)
    elif how == "newer":
        checkpoint(path, format=2)
    elif how == "another task":
        checkpoint(path, task="count")
    else:
        torch.save({"foreign": [1], "code": Bomb(), "nothing": None}[how], path)


@pytest.mark.parametrize(
    "how, told",
    [
        ("truncated", "not a zip"),
        ("damaged", "damaged in"),
        ("newer", "'format': 2"),
        ("another task", "'task': 'count'"),
        ("foreign", "no checkpoint"),
        ("code", "Weights only"),
    ],
)
def test_a_bad_checkpoint_gets_one_line_and_the_older_one_is_used(tmp_path, refused, how, told):
    folder = tmp_path / "saved" / "sync_rl"
    checkpoint(folder / "step-00000002.pt")
    spoil(folder / "step-00000002.pt", how)
    assert told in refused("--only", "sync_rl", "--checkpoint", "saved")
    checkpoint(folder / "step-00000001.pt")
    said = []
    assert m.Vault(str(folder)).newest(m.Config(), said.append).endswith("step-00000001.pt")
    assert len(said) == 1 and told in said[0]
    assert not (tmp_path / "exploded").exists() and not os.path.exists("exploded")


@pytest.mark.parametrize("in_memory", [True, False])
def test_a_vault_keeps_the_newest_two_and_only_whole_ones(tmp_path, in_memory):
    def fds():
        return len(os.listdir("/proc/self/fd"))

    vault, before = m.Vault("" if in_memory else str(tmp_path)), fds()
    assert vault.newest(m.Config(), print) == ""
    for step in (10, 20, 30, 30):
        room = vault.room()
        torch.save({"about": m.about(m.Config()), "step": step}, room[0])
        expected = [torch.load(path)["step"] for path, _ in vault.kept]
        vault.keep(room, step)
        assert [torch.load(path)["step"] for path, _ in vault.kept] == [
            step,
            *expected[:1],
        ] or step == 30
    left_unfinished = vault.room()
    pathlib.Path(left_unfinished[0]).write_bytes(b"cut off")
    assert torch.load(vault.newest(m.Config(), print))["step"] == 30 and len(vault.kept) == 2
    if in_memory:
        del vault, left_unfinished, room
        assert fds() == before  # the memory goes with the vault
    else:
        assert sorted(os.listdir(tmp_path)) == [
            "step-00000020.pt",
            "step-00000030.pt",
            "unfinished",
        ]
        assert [path for path, _ in m.Vault(str(tmp_path)).kept] == [path for path, _ in vault.kept]


@pytest.mark.parametrize(
    "answer",
    [
        ValueError,
        SystemExit,
        1.0,
        None,
        "many",
        [1.0],
        [0.1, 0.2, 0.3],
        [0.5, None],
        [0.5, "x"],
        [0.5, math.inf],
        [math.nan, 0.5],
    ],
    ids=str,
)
def test_not_judged_is_not_zero(answer):
    class Odd(m.Task):
        def score(self, turns, said):
            if said == ["bad"]:
                if isinstance(answer, type):
                    raise answer
                return answer
            return [0.25, 0.5]

    judge = m.Judge(0, m.Config())
    judge.task = Odd()
    bad, good = asyncio.run(judge.rewards([m.Prompt(0, ())] * 2, [["bad"], ["good"]]))
    assert good == [0.25, 0.5] and len(bad) == 2 and not all(map(math.isfinite, bad))


def stats_of(**changes):
    zeros = dict.fromkeys(m.StepStats._fields, 0)
    return m.StepStats(**zeros | {"num_tokens": 8, "version": 1} | changes)


class Evaluated:
    """A fleet that answers each evaluation with the next of these."""

    def __init__(self, *answers):
        self.cfg, self.busy_s, self.answers = m.Config(steps=10**6), 0.0, iter(answers)

    async def evaluate(self, newest):
        answer = next(self.answers, 0.5)
        if isinstance(answer, Exception):
            raise answer
        return answer


def history_of(*answers):
    made = m.History(Evaluated(*answers), m.Report(), "test", 100)
    made.started = time.monotonic()
    return made


BATCH = rollout_of([0], 0)._replace(prompts=[m.Prompt(0, (("a", "a"),))], answers=[("a",)])


def test_ten_gradients_that_are_not_finite_end_the_run_and_no_signal_is_said(capsys):
    async def scene():
        for reward, told in ((0.0, True), (1.0, True), (0.5, False)):
            run = history_of()
            for _ in range(39):
                run.add(stats_of(reward=reward), BATCH)
            assert ("nothing to learn" in capsys.readouterr().out) is told
        run = history_of()
        for skipped in [1] * 9 + [0] + [1] * 9:
            run.add(stats_of(skipped=skipped), BATCH)
        with pytest.raises(RuntimeError, match="10 gradients in a row"):
            run.add(stats_of(skipped=1), BATCH)

    asyncio.run(scene())


def test_evaluations_run_beside_the_steps_and_may_fail():
    async def scene():
        run = history_of(0.2, m.NoReplica("none left"), 0.9)
        for version in range(1, 101):
            run.add(stats_of(version=version), BATCH)
            await asyncio.sleep(0)
        assert run["heldout"] == [-1] * 25 + [0.2] * 50 + [0.9] * 25

    asyncio.run(scene())


@pytest.mark.parametrize(
    "heldout, k3, shown", [(-1.0, -1.0, ["-", "-"]), (0.25, 2e-9, ["0.25", "2e-09"])]
)
def test_a_step_line_has_a_dash_where_nothing_was_measured(capsys, heldout, k3, shown):
    run = history_of()
    run.heldout = heldout
    run.add(stats_of(mismatch_k3=k3, reward=-1.0), BATCH)
    line = capsys.readouterr().out.splitlines()[-1]  # after alarms
    assert [line.split()[3], line.split()[6]] == shown and line.split()[2] == "-1.00"
    assert run.rows[0]["mismatch_k3"] == k3 and run.rows[0]["heldout"] == heldout  # in --log


@pytest.mark.parametrize("alarm", m.ALARMS[1:], ids=str)
def test_an_alarm_is_told_once_and_not_without_cause(capsys, alarm):
    """The step before the limit, or a row that was interrupted, is none."""
    name, relation, limit, num_steps, meaning = alarm
    fine = dict(mismatch_k3=0.0, ess=1.0, clipped=0.0, entropy=1.0, grad_norm=1.0, reward=0.5)
    beyond = limit + {">": 1, "<": -1, "==": 0}[relation]

    async def scene():
        run = m.History(Evaluated(), m.Report(), "test", 100)
        run.started = time.monotonic()
        for found, times in ((beyond, num_steps - 1), (fine[name], 1), (beyond, num_steps - 1)):
            for _ in range(times):
                run.add(stats_of(**fine | {name: found}), BATCH)
        assert meaning not in capsys.readouterr().out
        for _ in range(3):
            run.add(stats_of(**fine | {name: beyond}), BATCH)
        assert capsys.readouterr().out.count(meaning) == 1

    asyncio.run(scene())


def test_ctrl_c_saves_the_step_and_the_same_command_goes_on(tmp_path, quick_file):
    command = "--only sync_rl --steps 60 --checkpoint saved --save-every 1000".split()
    process, mark = start(tmp_path, *command, file=quick_file)
    while "sync " not in process.stdout.readline():
        pass
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    step = int(
        re.fullmatch(r"monarch_rl: interrupted; the same command goes on after step (\d+)\n", err)[
            1
        ]
    )
    assert wait_until(lambda: processes_of(mark) == []) and 0 < step < 30
    saved = tmp_path / "saved" / "sync_rl"
    assert os.listdir(saved) == [f"step-{step:08d}.pt"]
    run = Run(tmp_path, *command, file=quick_file)
    failed = {check["what"] for check in run.stage("sync_rl")["checks"] if not check["ok"]}
    assert failed <= {TOO_FEW_STEPS} and f"goes on after step {step}" in run.out, run.out + run.err
    assert (
        sorted(os.listdir(saved)) == [f"step-{step:08d}.pt", "step-00000030.pt"] and run.left == []
    )


# -- the policy -----------------------------------------------------------------------------------


def test_rows_of_any_length_hear_the_end_of_a_turn_once():
    """Later user turns of different lengths: who has said <end> does not hear it again."""
    policy = m.Policy(m.Config())
    decoder = m.Decoder(policy, 2)
    with torch.no_grad():
        decoder.hear(["abc", "d"])
        decoder.speak()
        decoder.alive = torch.tensor([False, True])  # row 0 ended its turn, row 1 did not
        before = decoder.columns[0].shape[1]
        decoder.hear(["e", "fgh"])
    ids, mask = (column[:, before:] for column in decoder.columns[:2])
    heard = [
        policy.tokenizer.decode(row[keep == 1], skip_special_tokens=False)
        for row, keep in zip(ids, mask)
    ]
    assert heard == ["<user>e<end><assistant>", "<end><user>fgh<end><assistant>"]


def generated(task="repeat", seed=0, group_size=3):
    cfg = m.Config(task=task, seed=seed)
    policy = m.Policy(cfg)
    prompts = m.Sampler(cfg).draw(6)
    rollout, num_cut = m.generate(policy, prompts, group_size, seed, greedy=False, pull=lambda: 4)
    assert num_cut == 0
    return policy, rollout


def recomputed(model, rollout):
    """[N] of all sampled tokens, row by row: the log-probabilities that one forward pass gives, as
    the trainer's. Each row alone and without its holes: nothing of the file is used here."""
    found = []
    for ids, mask, turns in zip(rollout.ids, rollout.mask, rollout.turns):
        ids, turns = ids[mask == 1], turns[mask == 1]
        if turns.any():
            with torch.no_grad():
                logp = model(input_ids=ids[None]).logits[0, :-1].float().log_softmax(-1)
            found.append(logp.gather(1, ids[1:, None])[:, 0][turns[1:] > 0])
    return torch.cat(found)


def assert_recorded_is_recomputed(policy, rollout, tolerance=1e-5):
    recorded, mine = rollout.logprobs[rollout.turns > 0], recomputed(policy.model, rollout)
    assert len(recorded) and (mine - recorded).abs().max() < tolerance
    assert m.k3(recorded, mine).mean() <= 1e-6
    assert (rollout.logprobs[rollout.turns == 0] == 0).all()
    assert (rollout.mask[rollout.turns > 0] == 1).all()


@pytest.mark.parametrize("task", list(m.TASKS))
@pytest.mark.parametrize("seed", [0, 1])
def test_recorded_log_probabilities_are_the_trainers(task, seed):
    policy, rollout = generated(task, seed)
    assert (rollout.mask == 0).any(), "rows should end at different times, or holes are not tested"
    assert_recorded_is_recomputed(policy, rollout)
    assert (rollout.versions[rollout.turns > 0] == 4).all()
    # the trainer's own way: all rows at once, packed, the chosen places alone
    ids, turns = m.packed(rollout.mask, rollout.ids, rollout.turns)
    chosen = turns[:, 1:] > 0
    with torch.no_grad():
        every = m.log_softmax(policy.model, ids, chosen)
    mine = every.gather(1, ids[:, 1:][chosen][:, None])[:, 0]
    assert (mine - recomputed(policy.model, rollout)).abs().max() < 1e-5


def test_conversations_are_exactly_what_the_template_renders():
    """Row by row, without its holes: the user's words, what was sampled, and nothing else."""
    policy, rollout = generated("repeat", seed=2)
    for row, prompt in enumerate(rollout.prompts):
        ids = rollout.ids[row][rollout.mask[row] == 1].tolist()
        text = policy.tokenizer.decode(ids, skip_special_tokens=False)
        expected = "".join(
            f"<user>{said}<end><assistant>{answer.rstrip('+')}<end>"
            for (said, _), answer in zip(prompt.turns, rollout.answers[row])
        )
        assert text in (expected, expected[: -len("<end>")])


def test_only_sampled_tokens_carry_loss():
    _, rollout = generated("count", seed=1)
    for row, answers in enumerate(rollout.answers):
        for turn, answer in enumerate(answers, 1):
            letters = re.sub(r"<\w+>", "?", answer)
            num_sampled = len(letters.rstrip("+")) + (not letters.endswith("+"))
            assert int((rollout.turns[row] == turn).sum()) == num_sampled
        assert int(rollout.turns[row].max()) == len(answers) == 3


def test_every_parameter_gets_a_gradient_and_conversations_differ():
    policy, rollout = generated(group_size=8)
    ids, turns = m.packed(rollout.mask, rollout.ids, rollout.turns)
    chosen = turns[:, 1:] > 0
    every = m.log_softmax(policy.model, ids, chosen)
    every.gather(1, ids[:, 1:][chosen][:, None]).sum().backward()
    for name, parameter in policy.model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name
    assert len({*map(tuple, rollout.answers)}) > len(rollout.answers) / 5


def test_same_seed_samples_the_same_and_another_does_not():
    policy, first = generated()
    again, _ = m.generate(policy, first.prompts[::3], 3, seed=0, greedy=False)
    other, _ = m.generate(policy, first.prompts[::3], 3, seed=1, greedy=False)
    assert torch.equal(first.ids, again.ids) and first.answers == again.answers
    assert first.answers != other.answers


# -- conversations of any shape -------------------------------------------------------------------


class Chat(m.Task):
    """The user says what the prompt has; None there ends the conversation."""


def talk(texts, policy=None, group_size=1, greedy=True, **changes):
    """A rollout of these conversations, a tuple of what the user says each; and who was cut off."""
    policy = policy or m.Policy(m.Config(**changes))
    policy.task = Chat()
    policy.task.num_turns = len(texts[0])
    prompts = [m.Prompt(i, tuple((text, "a") for text in turns)) for i, turns in enumerate(texts)]
    return policy, *m.generate(policy, prompts, group_size, seed=3, greedy=greedy)


def row_of(rollout, row):
    """ids, log-probabilities and turns of one row, without its holes."""
    kept = rollout.mask[row] == 1
    return tuple(column[row][kept] for column in (rollout.ids, rollout.logprobs, rollout.turns))


def assert_same_rows(found, expected, pairs):
    for row, other in pairs:
        (ids, logp, turns), (ids_2, logp_2, turns_2) = row_of(found, row), row_of(expected, other)
        assert torch.equal(ids, ids_2) and torch.equal(turns, turns_2), (row, other)
        assert (logp - logp_2).abs().max() < 1e-5
        assert found.answers[row] == expected.answers[other]


MIXED = [
    ("abc", "d", "efgh"),
    ("a", "bcdefghijklmnop", "c"),
    ("ponmlkjihgfedcba", "a", "b"),
    ("b", "b", "b"),
]


@pytest.mark.parametrize("greedy", [True, False])
def test_texts_of_different_lengths_are_one_batch(greedy):
    policy, rollout, num_cut = talk(MIXED, group_size=4, greedy=greedy)
    assert num_cut == 0 and len({*rollout.mask.sum(1).tolist()}) > 2
    assert_recorded_is_recomputed(policy, rollout)
    if greedy:  # a row is what it is alone
        for row, turns in enumerate(MIXED):
            assert_same_rows(rollout, talk([turns])[1], [(4 * row, 0)])


@pytest.mark.parametrize("model", ["tiny", "llama"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_user_who_says_nothing_more_ends_that_conversation_only(tmp_path, model, at):
    texts = [
        tuple(None if (row, i) == (1, at) else text for i, text in enumerate(turns))
        for row, turns in enumerate(MIXED)
    ]
    changes = {} if model == "tiny" else {"model": save_checkpoint(tmp_path, model)}
    policy, rollout, num_cut = talk(texts, **changes)
    assert num_cut == 0 and [len(said) for said in rollout.answers] == [3, at, 3, 3]
    assert int(rollout.turns[1].max()) == at and rollout.logprobs.isfinite().all()
    assert_same_rows(rollout, talk(MIXED, policy)[1], [(0, 0), (2, 2), (3, 3)])
    assert_recorded_is_recomputed(policy, rollout)


@pytest.mark.parametrize("model", ["tiny", "llama"])
@pytest.mark.parametrize("context, least, most", [(12, 4, 4), (28, 1, 3), (36, 1, 3), (60, 0, 0)])
def test_a_conversation_too_long_for_the_context_is_cut_and_no_other(
    tmp_path, model, context, least, most
):
    """Some rows have no room for their first turn, some none for a later one."""
    changes = {} if model == "tiny" else {"model": save_checkpoint(tmp_path, model)}
    policy, whole, _ = talk(MIXED, **changes)
    policy.max_new_tokens = 4  # of `llama` too, which also hears an instruction
    context += len(policy.tokenizer(policy.head, add_special_tokens=False).input_ids) - 1
    whole, policy.context = talk(MIXED, policy)[1], context
    _, rollout, found = talk(MIXED, policy)
    cut = [row for row in range(4) if not rollout.turns[row].any()]
    expected = []  # a turn needs room for all that the policy may say
    for row in range(4):
        turns = row_of(whole, row)[2].tolist()
        if max(turns.index(i) for i in (1, 2, 3)) + policy.max_new_tokens > context:
            expected.append(row)
    assert cut == expected and found == len(cut) and least <= found <= most
    assert int(rollout.mask.sum(1).max()) <= context
    assert rollout.logprobs.isfinite().all()
    assert_same_rows(rollout, whole, [(row, row) for row in range(4) if row not in cut])
    if model == "tiny":  # and the trainer has no trouble with it
        _, stats = gradients_of(trainer_of(), rollout._replace(rewards=torch.rand(4, 3)))
        assert stats.num_tokens == max(1, int((rollout.turns > 0).sum())) and not stats.skipped
        assert math.isfinite(stats.loss)


def test_groups_of_which_all_was_cut_are_lost_and_not_waited_for():
    async def scene():
        gate = m.Gate(0, collections.Counter(started=3, trained=0, dropped=0, lost=0, undone=0))
        buffer, rollout = m.ReplayBuffer(gate, 0), rollout_of([1, 1, 2, 2, 3], 0)
        rollout.turns[:2] = 0
        buffer.put(rollout, 3, 1)
        assert gate.count["lost"] == 2 and len(buffer.groups) == 1

    asyncio.run(scene())


@pytest.mark.parametrize("model", ["tiny", "gpt2"])
def test_a_group_shares_its_first_prefill(tmp_path, model):
    changes = {} if model == "tiny" else {"model": save_checkpoint(tmp_path, model)}
    policy, shared, _ = talk(MIXED, group_size=8, greedy=False, **changes)
    _, alone, _ = talk([turns for turns in MIXED for _ in range(8)], policy, greedy=False)
    assert_same_rows(shared, alone, [(row, row) for row in range(32)])
    assert shared.group_ids.tolist() == [i for i in range(4) for _ in range(8)]
    assert len({*map(tuple, shared.answers)}) > 8  # the rows of a group sample on their own
    seen = []  # rows of each forward pass
    policy.model.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    talk(MIXED, policy, group_size=8)
    assert seen[0] == 4 and {*seen[1:]} == {32}


# -- new weights between two tokens ---------------------------------------------------------------


def in_flight(schedule, group_size):
    """A rollout during which weights change, and those of every version. schedule: the version at
    each pull; the last one stays."""
    states = [m.Policy(m.Config(seed=seed)).model.state_dict() for seed in range(3)]
    states = [{name: 2 * tensor for name, tensor in state.items()} for state in states]
    policy, versions = (
        m.Policy(m.Config()),
        itertools.chain(schedule, itertools.repeat(schedule[-1])),
    )

    def pull():
        version = next(versions)
        policy.model.load_state_dict(states[version])
        return version

    prompts = m.Sampler(m.Config()).draw(8 // group_size)
    return policy, states, m.generate(policy, prompts, group_size, 5, False, pull)[0]


def off_by(policy, states, rollout):
    """[N] of every sampled token: recorded log-probability minus that of the version it names."""
    versions, recorded = (c[rollout.turns > 0] for c in (rollout.versions, rollout.logprobs))
    gaps = torch.full_like(recorded, math.nan)
    for version, state in enumerate(states):
        policy.model.load_state_dict(state)
        mine = versions == version
        gaps[mine] = (recomputed(policy.model, rollout) - recorded)[mine]
    return gaps


SCHEDULES = [
    [0, 0, 0, 1, 1, 1, 2],
    [0, 1, 2],
    [0, 0, 0, 0, 0, 1, 1, 2],
    [0, 0, 2, 2, 1],
    [2, 0, 1, 2],
]


@pytest.mark.parametrize("group_size", [1, 8])
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_token_is_recorded_under_the_version_that_it_names(monkeypatch, schedule, group_size):
    policy, states, rollout = in_flight(schedule, group_size)
    per_row = [{*v[t > 0].tolist()} for v, t in zip(rollout.versions, rollout.turns)]
    assert max(map(len, per_row)) >= 2 and {*schedule[1:]} <= set.union(*per_row)
    gaps = off_by(policy, states, rollout)
    assert gaps.abs().max() < 1e-5 and m.k3(torch.zeros(len(gaps)), gaps).mean() <= 1e-6
    # with the keys and values of the weights before it is wrong
    only = m.transformers.DynamicCache(config=policy.model.config)
    monkeypatch.setattr(m.transformers, "DynamicCache", lambda config: only)
    gaps = off_by(*in_flight(schedule, group_size))
    assert not gaps.abs().max() <= 1e-3


# -- the trainer, in this process -----------------------------------------------------------------


def trainer_of(now=None, before=None, **changes):
    """A trainer that has published its first version. now, before: modules, what it is now and was
    before RL, instead of the policy that the changes to the Config make."""
    trainer, rooms = m.Trainer(0, m.Config(**changes)), [m.Vault().room() for _ in range(2)]

    async def begin():
        await trainer.setup()
        trainer.policy.model = before or trainer.policy.model
        await trainer.begin(0, False)
        await trainer.save(rooms[0][0], "")
        if now:
            before.load_state_dict(now.state_dict())
        await trainer.save(rooms[1][0], "")
        await trainer.load(rooms[1][0], rooms[0][0], trainer.cfg)

    asyncio.run(begin())
    return trainer


def batch_of(trainer, num_groups=4, group_size=3, seed=0):
    """What it says itself, with random rewards."""
    prompts = m.Sampler(trainer.cfg).draw(num_groups)
    rollout, _ = m.generate(
        trainer.policy, prompts, group_size, seed, False, lambda: trainer.version
    )
    rng = torch.Generator().manual_seed(seed)
    shape = len(rollout.answers), trainer.policy.task.num_turns
    return rollout._replace(rewards=torch.rand(shape, generator=rng))


def gradients_of(trainer, batch):
    """(name -> gradient with which it steps, per optimizer step), what the step says of itself."""
    found, named = [], [*trainer.policy.model.named_parameters()]
    hook = trainer.optimizer.register_step_pre_hook(
        lambda *_: found.append({name: p.grad.clone() for name, p in named})
    )
    stats = asyncio.run(trainer.step(batch))
    hook.remove()
    return found, stats


def gap(left, right):
    """Largest relative difference of two gradients, by parameter."""
    return max(float((left[name] - g).norm() / g.norm()) for name, g in right.items())


def seen_by_loss(trainer, batch):
    """(row, column) of each token -> (pi, near, advantage), per pass. A token's recorded
    log-probability is used as a mark to find it again."""
    width, passes, spied = batch.ids.shape[1], [], []
    marks = torch.arange(batch.ids.numel()).view_as(batch.ids) / -1024

    def spy(pi, mu, near, advantage):
        places = (divmod(int(mark), width) for mark in (mu * -1024).tolist())
        spied.extend(zip(places, zip(*(c.tolist() for c in (pi, near, advantage)))))
        return m.reinforce_loss(pi, mu, near, advantage)

    with mock.patch.dict(m.LOSSES, spy=spy):
        trainer.cfg = trainer.cfg._replace(loss="spy")
        asyncio.run(trainer.step(batch._replace(logprobs=marks * (batch.turns > 0))))
    num_tokens = int((batch.turns > 0).sum())
    while spied:
        passes.append(dict(spied[:num_tokens]))
        del spied[:num_tokens]
        assert len(passes[-1]) == num_tokens
    return passes


def turns_that_differ(batch, left, right, which):
    """In which turns the loss sees something else."""
    return {
        int(batch.turns[place])
        for place in left
        if abs(left[place][which] - right[place][which]) > 1e-6
    }


@pytest.mark.parametrize("baseline", m.BASELINES)
@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_reward_is_due_to_its_own_turn_and_the_turns_before(baseline, turn):
    trainer = trainer_of(task="count", lr=1e-12, baseline=baseline)
    batch = batch_of(trainer)
    rewards = batch.rewards.clone()
    rewards[:, turn - 1] = torch.rand(len(rewards))
    [left], [right] = (
        seen_by_loss(trainer, batch),
        seen_by_loss(trainer, batch._replace(rewards=rewards)),
    )
    assert turns_that_differ(batch, left, right, 2) == {*range(1, turn + 1)}
    returns = batch.rewards.flip(1).cumsum(1).flip(1)
    expected = m.advantages(returns, batch.group_ids, baseline)
    for (row, column), (_, _, advantage) in left.items():
        assert advantage == pytest.approx(
            float(expected[row, batch.turns[row, column] - 1]), abs=1e-6
        )


def test_what_comes_later_changes_nothing_of_what_was_said_before():
    """Neither log-probabilities nor the gradient of turn 1 know the user's words of turn 2."""
    trainer = trainer_of(lr=1e-12, baseline="none", entropy=0.0)  # every token has an entropy
    batch = batch_of(trainer)
    batch.rewards[:, 1] = 0  # only what was said in turn 1 has an advantage
    ids = batch.ids.clone()
    for row in range(len(ids)):
        first = int((batch.turns[row] == 1).nonzero().max())
        later = ((batch.turns[row] == 0) & (batch.mask[row] == 1)).nonzero()[:, 0]
        heard = later[later > first + 1][2:3]  # a letter of the user's second text
        assert 3 <= int(ids[row, heard])
        ids[row, heard] = 3 + (ids[row, heard] - 2) % 16
    other = batch._replace(ids=ids)
    [left], [right] = seen_by_loss(trainer, batch), seen_by_loss(trainer, other)
    assert turns_that_differ(batch, left, right, 0) == {2}
    trainer.cfg = trainer.cfg._replace(loss="reinforce")
    [left], [right] = gradients_of(trainer, batch)[0], gradients_of(trainer, other)[0]
    assert gap(left, right) < 1e-4


@pytest.mark.parametrize("max_logits", [3000, 1000, 400, 1])
def test_several_forward_passes_have_the_gradient_of_one(monkeypatch, max_logits):
    """Also if a single row has more logits than one pass may have."""
    found = []
    for limit in (m.MAX_LOGITS, max_logits):
        monkeypatch.setattr(m, "MAX_LOGITS", limit)
        trainer, rows = trainer_of(kl=0.5), []
        batch = batch_of(trainer)
        for parameter in trainer.policy.model.parameters():
            parameter.data += 0.05 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
        trainer.policy.model.register_forward_pre_hook(
            lambda _, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
        )
        found.append((*gradients_of(trainer, batch), rows))
    ([whole], stats, one), ([parts], told, several) = found
    assert len(one) == 1 < len(several) and sum(several) == 12 and gap(parts, whole) < 1e-5
    for name in stats._fields:
        if not name.endswith("_s"):
            assert getattr(told, name) == pytest.approx(getattr(stats, name), rel=1e-4, abs=1e-7), (
                name
            )


def test_two_passes_are_two_updates_around_the_same_near():
    trainer = trainer_of(passes=2)
    batch = batch_of(trainer)
    gradients, stats = gradients_of(trainer, batch)
    assert len(gradients) == 2 and gap(*gradients) > 1e-4
    assert stats.version == trainer.version == 1 and stats.skipped == 0
    first, second = seen_by_loss(trainer_of(passes=2), batch)
    for place, (pi, near, advantage) in first.items():
        assert near == pi and second[place][1:] == (near, advantage)
    assert max(abs(second[place][0] - pi) for place, (pi, *_) in first.items()) > 1e-4


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted():
    trainer = trainer_of(passes=2)
    before = {name: p.clone() for name, p in trainer.policy.model.named_parameters()}
    batch = batch_of(trainer)
    batch.rewards[0] = math.inf
    gradients, stats = gradients_of(trainer, batch)
    assert gradients == [] and stats.skipped and stats.version == 1
    assert all(torch.equal(p, before[name]) for name, p in trainer.policy.model.named_parameters())


class Unigram(torch.nn.Module):
    """A policy of six symbols that listens to nobody."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits.clone())
        self.config = types.SimpleNamespace(vocab_size=6, max_position_embeddings=99)

    def forward(self, input_ids, **_):
        return types.SimpleNamespace(logits=self.logits.expand(*input_ids.shape, 6))


def exact_batch(counts, logits):
    """Each symbol as often as the policy says it: means over tokens are expectations."""
    said = torch.arange(6).repeat_interleave(torch.tensor(counts))
    ids = torch.cat([torch.zeros(1).long(), said])[None]
    turns = torch.ones_like(ids)
    turns[0, 0] = 0
    logprobs = logits.log_softmax(0)[ids] * turns
    return m.Rollout(
        ids,
        torch.ones_like(ids),
        turns,
        logprobs,
        torch.zeros_like(ids),
        torch.zeros(1, 1),
        torch.zeros(1).long(),
        [None],
        [("",)],
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("weight", [1.0, 0.1])
def test_kl_has_the_gradient_of_the_divergence(seed, weight):
    """Its expectation over the policy's own samples, against autograd of the exact sum."""
    counts, rng = [1, 2, 3, 4, 5, 1], torch.Generator().manual_seed(seed)
    logits, before = torch.tensor(counts).log(), torch.randn(6, generator=rng) / 3
    trainer = trainer_of(
        Unigram(logits), Unigram(before), kl=weight, baseline="none", loss="reinforce", entropy=0.0
    )
    [found], stats = gradients_of(trainer, exact_batch(counts, logits))

    theta = logits.clone().requires_grad_()
    logp, reference = theta.log_softmax(0), before.log_softmax(0)
    p = logp.detach().exp()
    [expected] = torch.autograd.grad(
        weight * (logp.exp() * (logp - reference)).sum(), theta, retain_graph=True
    )
    assert expected.norm() < m.MAX_GRAD_NORM and expected.norm() > 0.01
    assert torch.allclose(found["logits"], expected, atol=1e-6)
    assert stats.kl == pytest.approx(float((p * (logp - reference) ** 2).sum() / 2), rel=1e-5)
    # why k2: k1 has no gradient at all, and k3 another one
    ratio = reference - logp
    k1, k3 = (
        torch.autograd.grad((p * k).sum(), theta, retain_graph=True)[0]
        for k in (-ratio, ratio.exp() - 1 - ratio)
    )
    assert k1.abs().max() < 1e-6 and (weight * k3 - expected).norm() > 0.1 * expected.norm()


@pytest.mark.parametrize(
    "model, entropy, weight",
    [
        ("tiny", -1.0, 0.01),
        ("tiny", 0.0, 0.0),
        ("tiny", 0.3, 0.3),
        ("another", -1.0, 0.0),
        ("another", 0.3, 0.3),
    ],
)
def test_the_entropy_bonus_has_the_gradient_of_the_entropy(monkeypatch, model, entropy, weight):
    """Without rewards nothing else has one. Only the tiny policy has a bonus unless told."""
    counts = [1, 2, 3, 4, 5, 1]
    logits, policy = torch.tensor(counts).log(), m.Policy
    monkeypatch.setattr(m, "Policy", lambda cfg: policy(cfg._replace(model="tiny")))
    trainer = trainer_of(
        Unigram(logits),
        Unigram(logits),
        model=model,
        entropy=entropy,
        baseline="none",
        loss="reinforce",
    )
    [found], stats = gradients_of(trainer, exact_batch(counts, logits))
    theta = logits.clone().requires_grad_()
    exact = torch.distributions.Categorical(logits=theta).entropy()
    [expected] = torch.autograd.grad(-weight * exact, theta)
    assert stats.entropy == pytest.approx(float(exact), rel=1e-5)
    assert torch.allclose(found["logits"], expected, atol=1e-6) and bool(expected.any()) == (
        weight > 0
    )


def test_a_token_that_cannot_come_has_a_finite_gradient():
    logits = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, -math.inf])
    trainer = trainer_of(Unigram(logits), Unigram(logits), baseline="none", loss="reinforce")
    [found], _ = gradients_of(trainer, exact_batch([1, 1, 1, 1, 1, 0], logits))
    assert found["logits"].isfinite().all()


def test_the_reference_is_the_policy_before_rl_and_stays():
    """After steps, and for a trainer that goes on from a checkpoint."""
    trainer = trainer_of(kl=0.1)
    before = trainer.policy.model.state_dict()["model.embed_tokens.weight"].clone()
    batch = batch_of(trainer)
    assert gradients_of(trainer, batch)[1].kl == 0  # nothing has been learned yet
    kls = [gradients_of(trainer, batch)[1].kl for _ in range(3)]
    assert 0 < kls[0] < kls[2]
    assert torch.equal(trainer.reference.state_dict()["model.embed_tokens.weight"], before)


@pytest.mark.parametrize(
    "broken, what",
    [
        (None, ""),
        ("frozen", "without a gradient"),
        ("certain", "log-probabilities above 0"),
        ("alike", "conversations that differ"),
        ("another", "k3"),
    ],
)
def test_examine_finds_what_is_broken(broken, what):
    trainer = trainer_of()
    batch = batch_of(trainer)
    if broken == "frozen":
        next(trainer.policy.model.parameters()).requires_grad_(False)
    if broken == "certain":
        batch = batch._replace(logprobs=batch.logprobs + 9.0 * (batch.turns > 0))
    if broken == "another":
        batch = batch._replace(ids=(batch.ids + 1) % 19)
    if broken == "alike":
        batch = batch._replace(answers=[("a", "b")] * 12)
    found = asyncio.run(trainer.examine(batch))
    failed = [row[0] for row in found if not m.Report.OPERATORS[row[2]](row[1], row[3])]
    assert bool(failed) is bool(broken) and any(what in name for name in failed or [""]), failed
    assert len(failed) <= 1 + (broken == "certain")  # which also has another k3
    assert all(p.grad is None or not p.grad.any() for p in trainer.policy.model.parameters())


# -- a task and models of one's own ---------------------------------------------------------------


def save_checkpoint(folder, kind, shard="1GB", **generation):
    """A small model of another architecture, in the hub's format, with a tokenizer and template."""
    import transformers as t

    torch.manual_seed(7)
    tokenizer = m.tiny_policy(m.Task.letters)[0]
    sizes = dict(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
    )
    model = {
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**sizes, tie_word_embeddings=False)),
        "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**sizes, tie_word_embeddings=True)),
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=len(tokenizer),
                n_embd=32,
                n_layer=2,
                n_head=2,
                n_positions=512,
                bos_token_id=2,
                eos_token_id=2,
            )
        ),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=len(tokenizer), d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2
            )
        ),
    }[kind]()
    with torch.no_grad():  # far from uniform, so that temperature and top_k would show
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter *= 4
    model.generation_config = t.GenerationConfig(**generation)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder, max_shard_size=shard)
    return str(folder)


@pytest.mark.parametrize(
    "kind, shard, tied",
    [
        ("qwen2", "1GB", True),
        ("llama", "1GB", False),
        ("llama", "10KB", False),
        ("qwen2", "10KB", True),
        ("gpt2", "1GB", True),
    ],
)
def test_other_models_take_the_same_path(tmp_path, kind, shard, tied):
    """What the folder says of sampling, for others, is not obeyed."""
    folder = save_checkpoint(
        tmp_path / "model", kind, shard, do_sample=True, temperature=0.01, top_k=1
    )
    assert (len([*pathlib.Path(folder).glob("*.safetensors")]) > 1) is (shard == "10KB")
    policy, prompts = m.Policy(m.Config(model=folder)), m.Sampler(m.Config()).draw(4)
    assert tied is (
        policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight
    )
    rollout, _ = m.generate(policy, prompts, 8, seed=0, greedy=False)
    assert_recorded_is_recomputed(policy, rollout, 1e-4)
    assert len({*map(tuple, rollout.answers)}) > 16  # top_k 1 has one answer per prompt
    os.remove(f"{folder}/generation_config.json")
    again, _ = m.generate(m.Policy(m.Config(model=folder)), prompts, 8, seed=0, greedy=False)
    assert torch.equal(rollout.ids, again.ids)


def test_a_step_of_another_model_reaches_its_generators(tmp_path):
    """It changes every parameter, and who reads what is published has the same weights."""
    changes = dict(model=save_checkpoint(tmp_path / "model", "qwen2", "10KB"), lr=1e-3)
    trainer, other = trainer_of(**changes), m.Policy(m.Config(**changes)).model
    [found], stats = gradients_of(trainer, batch_of(trainer))
    assert stats.mismatch_k3 <= 1e-6 and all(g.any() for g in found.values())
    handle = asyncio.run(trainer.begin(0, False))
    asyncio.run(trainer.published())
    before = {name: p.clone() for name, p in other.named_parameters()}
    assert m.WeightReader(handle, 0, m.weights_of(other)).pull() == 1
    for name, p in trainer.policy.model.named_parameters():
        assert torch.equal(other.get_parameter(name), p) and not torch.equal(p, before[name]), name


def bad_model(folder, how):
    """A folder with which no run can begin."""
    path = pathlib.Path(folder) / "model"
    save_checkpoint(path, "t5" if how == "not causal" else "llama", "10KB")
    if how == "no weights":
        for file in path.glob("*.safetensors*"):
            file.unlink()
    if how == "no template":
        for file in path.glob("chat_template*"):
            file.unlink()
        about = json.loads((path / "tokenizer_config.json").read_text())
        (path / "tokenizer_config.json").write_text(
            json.dumps({key: value for key, value in about.items() if key != "chat_template"})
        )
    if how == "no tokenizer":
        for file in path.glob("*token*"):
            file.unlink()
    if how == "no config":
        (path / "config.json").unlink()
    return str(path)


@pytest.mark.parametrize(
    "how, told",
    [
        ("no weights", "no file named model.safetensors"),
        ("no template", "chat_template is not set"),
        ("not causal", "AutoModelForCausalLM"),
        ("no tokenizer", "tokenizer"),
        ("no config", "config"),
    ],
)
def test_a_model_that_cannot_be_trained_gets_one_line_and_exit_2(tmp_path, refused, how, told):
    line = refused("--only", "sync_rl", "--model", bad_model(tmp_path, how))
    assert line.startswith("monarch_rl: --model ") and told in line


def test_a_model_that_cannot_be_reached_gets_one_line_and_exit_2(tmp_path):
    found = subprocess.run(
        [sys.executable, str(FILE), "--model", "nobody/nothing"],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # else it tries for 50 s
    assert found.returncode == 2 and found.stdout == "", found.stdout + found.stderr
    assert len(found.stderr.splitlines()) == 1 and "--model nobody/nothing" in found.stderr, (
        found.stderr
    )


@pytest.mark.parametrize(
    "body",
    [
        "import sys; sys.exit()",
        "class X(",
        "X = 1",
        "class Y: pass",
        "class X: pass",
        "class X(m.Task): pass",
        "class X(m.Task):\n  def conversation(self, rng): return [['a', 'b'], ['a', 'b']]",
        "class X(m.Task):\n  def conversation(self, rng): return ('a', 'b'), ('a', 'b')",  # the only one
        "class X(m.Task):\n  def conversation(self, rng): return (rng.choice('abcdefgh'), 'b'),",
    ],
    ids=[
        "exits",
        "syntax",
        "no class",
        "no such class",
        "no methods",
        "no conversation",
        "lists",
        "one conversation",
        "one turn of two",
    ],
)
def test_a_task_that_cannot_be_learned_gets_one_line_and_exit_2(tmp_path, refused, body):
    (tmp_path / "own.py").write_text(f"import monarch_rl as m\n{body}\n", encoding="utf-8")
    assert refused("--task", f"{tmp_path}/own.py:X").startswith("monarch_rl: --task ")


def calculator(folder):
    """DOCS has a task of one's own, whole."""
    blocks = re.findall(
        r"^```py(?:thon)?\n(.*?)^```", (FOLDER / "DOCS.md").read_text("utf-8"), re.M | re.S
    )
    found = [block for block in blocks if "class Calculator" in block]
    assert len(found) == 1, "DOCS has no recipe with a class Calculator"
    (folder / "calculator.py").write_text(found[0], encoding="utf-8")


TOO_FEW_STEPS = "reward gained, last tenth over first"


@pytest.mark.parametrize("trainers", [pytest.param(1, marks=long), 2])
def test_the_recipe_for_a_task_of_ones_own_runs(tmp_path, quick_file, trainers):
    """With one trainer, and with two and a reference: what is scored without a backward pass can be
    loaded again. So few steps teach nothing; nothing else may fail."""
    calculator(tmp_path)
    how = [["--steps", "40"], ["--trainers", "2", "--kl", "0.01", "--steps", "8"]][trainers - 1]
    run = Run(
        tmp_path,
        "--only",
        "sync_rl",
        "--task",
        "calculator.py:Calculator",
        *how,
        file=[FILE, quick_file][trainers - 1],
    )
    failed = [check["what"] for check in run.stage("sync_rl")["checks"] if not check["ok"]]
    assert run.status == bool(failed) and run.left == [], run.out + run.err
    assert {*failed} <= {TOO_FEW_STEPS}, run.out + run.err
    assert "Traceback" not in run.out + run.err


def test_a_model_from_a_folder_runs_through_the_stage(tmp_path):
    save_checkpoint(tmp_path / "model", "llama")
    run = Run(tmp_path, "--only", "async_rl", "--model", str(tmp_path / "model"), "--steps", "10")
    failed = {check["what"] for check in run.stage("async_rl")["checks"] if not check["ok"]}
    learning = {
        "held-out exact, gained",
        "seconds to the same reward, sync / async",
        "largest lag without the rule",
    }  # ten steps at 1e-6 do not teach
    assert failed <= learning and run.left == [], run.out + run.err


# -- several hosts --------------------------------------------------------------------------------


class Hub:
    """A cable in user space: it joins taps, and drops frames at random. Frames of a tap are no
    larger than those of a wire (1514 bytes), so that one dropped is one packet lost."""

    def __init__(self, names, loss):
        self.loss, self.taps, self.threads = loss, [], []
        self.counts = [[0, 0] for _ in names]  # for each tap: frames of it carried, and dropped
        with contextlib.suppress(OSError):  # no such device here, or not for this user
            for name in names:
                self.taps.append(os.open("/dev/net/tun", os.O_RDWR))
                request = struct.pack(
                    "16sH22x", name.encode(), 0x0002 | 0x1000
                )  # IFF_TAP | IFF_NO_PI
                fcntl.ioctl(self.taps[-1], 0x400454CA, request)  # TUNSETIFF

    def start(self):
        for i in range(len(self.taps)):
            self.threads.append(threading.Thread(target=self.carry, args=(i,), daemon=True))
            self.threads[-1].start()

    def carry(self, i):
        """Frames of tap i to all others; until the tap is gone."""
        rng, others = random.Random(i), self.taps[:i] + self.taps[i + 1 :]
        with contextlib.suppress(OSError):
            while frame := os.read(self.taps[i], 2048):
                dropped = rng.random() < self.loss
                self.counts[i][dropped] += 1
                for tap in () if dropped else others:
                    with contextlib.suppress(OSError):  # that one is gone
                        os.write(tap, frame)

    def close(self):
        for thread in self.threads:
            thread.join(10)
        while self.taps:
            os.close(self.taps.pop())


class Network:
    """Hosts that are one machine: each a network namespace with process ids of its own, joined by a
    bridge; where the machine allows none, loopback addresses. `loss`: the share of frames that is
    dropped on the way, which is a `Hub` then."""

    PORT = 26600

    def __init__(self, num_hosts, loss=0.0):
        self.tag, self.workers, self.marks = f"mrl{os.getpid() % 10000}", {}, []
        self.names = [f"{self.tag}h{i}" for i in range(num_hosts)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(num_hosts)]
        self.hub = Hub(self.names if loss else [], loss)
        commands = [
            f"netns add {self.tag}",
            f"-n {self.tag} link add br0 type bridge",
            f"-n {self.tag} link set br0 up",
        ]
        for i, (name, address) in enumerate(zip(self.names, self.addresses)):
            cable = (
                [f"link set {name} netns {name} name eth"]
                if loss
                else [
                    f"link add eth netns {name} type veth peer name p{i} netns {self.tag}",
                    f"-n {self.tag} link set p{i} master br0 up",
                ]
            )
            commands += [
                f"netns add {name}",
                *cable,
                f"-n {name} addr add {address}/24 dev eth",
                f"-n {name} link set eth up",
                f"-n {name} link set lo up",
            ]
        self.real = all(self.ip(command) for command in commands)
        if self.real:
            self.hub.start()
        else:
            self.close()
            self.names, self.addresses = None, [f"127.0.0.{i + 2}" for i in range(num_hosts)]

    def ip(self, command):
        try:
            return subprocess.run(["ip", *command.split()], capture_output=True).returncode == 0
        except FileNotFoundError:
            return False

    def url(self, i):
        return f"tcp://{self.addresses[i]}:{self.PORT}"

    @property
    def hosts(self):
        return ",".join(map(self.url, range(len(self.addresses))))

    def inside(self, i, own_pids=False):
        """What to put before a command."""
        if not self.real:
            return []
        pids = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"] if own_pids else []
        return ["ip", "netns", "exec", self.names[i], *pids]

    def work(self, i, file=FILE):
        """Starts a worker there."""
        mark = uuid.uuid4().hex
        worker = self.workers[i] = subprocess.Popen(
            [*self.inside(i, True), sys.executable, str(file), "--worker", self.url(i)],
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, MARK: mark},
        )
        worker.mark = mark
        assert "any code" in worker.stdout.readline()
        return worker

    def close(self):
        for worker in self.workers.values():
            for pid in processes_of(worker.mark):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            worker.wait()
        for name in [*(self.names or []), self.tag]:
            self.ip(f"-n {name} link del eth")
            self.ip(f"netns del {name}")
        self.hub.close()


@pytest.fixture
def network(request):
    net = Network(*getattr(request, "param", [2]))
    yield net
    net.close()


def test_a_run_on_two_hosts_pulls_what_was_published(network, tmp_path, quick_file):
    """The generator there has the same weights as the trainer here, at every step."""
    for i in (0, 1):
        network.work(i, quick_file)
    run = Run(
        tmp_path,
        "--only",
        "sync_rl",
        "--hosts",
        network.hosts,
        "--steps",
        "20",
        file=quick_file,
        prefix=network.inside(0),
    )
    failed = {check["what"] for check in run.stage("sync_rl")["checks"] if not check["ok"]}
    assert failed <= {TOO_FEW_STEPS} and run.left == [], run.out + run.err
    assert f"{network.url(1)}   cpu" not in run.out and network.url(1) in run.out


@long
def test_training_learns_on_two_hosts_as_on_one(network, tmp_path):
    workers = [network.work(i) for i in (0, 1)]
    before = [processes_of(worker.mark) for worker in workers]
    run = Run(tmp_path, "--only", "async_rl", "--hosts", network.hosts, prefix=network.inside(0))
    learned(run, 0.95)
    rows = [line.split() for line in run.out.splitlines() if line.lstrip().startswith("tcp://")]
    assert rows == [[network.url(0), "cpu", "cpu", "cpu"], [network.url(1), "cpu", "cpu"]]
    # the trainer, killed there, was replaced there; and nothing is left
    assert run.stage("async_rl")["ok"] and run.left == []
    assert wait_until(lambda: [processes_of(worker.mark) for worker in workers] == before)


@pytest.mark.parametrize("network", [(3,)], indirect=True)
@long
@pytest.mark.parametrize("victim, step", [(0, 50), (2, 22), (1, 0)])
def test_a_run_goes_on_without_a_host_that_is_lost(network, tmp_path, victim, step):
    """Killed at that step, 0: while processes are started; the host of the trainer comes back."""
    num_steps = 90
    workers, log = [network.work(i) for i in range(3)], tmp_path / "log.jsonl"
    process, mark = start(
        tmp_path,
        "--only",
        "async_rl",
        "--hosts",
        network.hosts,
        "--steps",
        str(num_steps),
        "--generators",
        "3",
        "--log",
        str(log),
        "--json",
        "out.json",
        prefix=network.inside(0),
    )

    def steps():
        lines = log.read_text().splitlines() if log.exists() else []
        return sum('"run": "async"' in line for line in lines)

    before = [processes_of(worker.mark) for worker in workers]
    alone = len(before[victim])
    assert wait_until(lambda: len(processes_of(workers[victim].mark)) > alone + 2, 60)
    assert wait_until(lambda: steps() >= step, 120)
    for pid in processes_of(workers[victim].mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if victim == 0:
        time.sleep(1.0)
        network.work(0)
    out, err = process.communicate(timeout=240)
    assert f"{network.url(victim)}: lost" in out, out + err
    assert (f"{network.url(victim)}: back" in out) == (victim == 0)
    [stage] = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert stage["ok"], out + err
    found = stage["figures"]
    assert found["started"] == sum(
        found[k] for k in ("trained", "dropped", "lost", "undone", "in_flight")
    )
    assert found["trained"] == m.GROUPS_PER_BATCH * num_steps
    for i in {0, 1, 2} - {victim}:
        assert wait_until(lambda: processes_of(workers[i].mark) == before[i])


@pytest.mark.parametrize(
    "network", [pytest.param((2,), marks=long), (2, 0.01)], indirect=True, ids=["whole", "lossy"]
)
def test_what_crosses_the_network(network, tmp_path):
    """The recipe of DOCS 8: each byte once per host, however many generators there are; and none of
    another version, also where one packet in a hundred is lost."""
    if not network.real:
        pytest.skip("no network namespaces here, whose bytes could be counted")
    [recipe] = re.findall(
        r'```python\n("""What a relay costs.*?)```', (FILE.parent / "DOCS.md").read_text(), re.S
    )
    (tmp_path / "wire.py").write_text(
        recipe.replace("SECONDS = 96 * m.MIB, 15, 8", "SECONDS = 8 * m.MIB, 5, 4")
    )
    most = (
        1.1 if network.hub.loss else 1.05
    )  # no frame is larger there, and the lost ones come again
    for i in (0, 1):
        network.work(i)
    command = [
        *network.inside(0),
        sys.executable,
        "wire.py",
        network.url(0),
        "eth",
        network.url(1),
        "eth",
    ]
    found = subprocess.run(
        command,
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{FILE.parent}:{tmp_path}"},
    )
    found = json.loads(found.stdout.splitlines()[-1])
    assert 1 <= found["bytes_1"] <= most and abs(found["bytes_4"] / found["bytes_1"] - 1) <= 0.02
    assert found["torn_reads"] == 0 and found["reads"] > 3
    assert all(dropped > carried / 200 for carried, dropped in network.hub.counts)


def ends_at_once(tmp_path, *args, timeout=20):
    """The line with which it does."""
    start = time.monotonic()
    found = subprocess.run(
        [sys.executable, str(FILE), *args],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=timeout,
    )
    assert found.returncode == 2 and found.stdout == "" and time.monotonic() - start < 15
    [line] = found.stderr.splitlines()
    return line


@pytest.mark.parametrize(
    "args",
    [
        "--worker 127.0.0.1:26600",
        "--worker tcp://:26600",
        "--worker tcp://127.0.0.1",
        "--worker http://127.0.0.1:1",
        "--worker tcp://[:26600",
    ],
)
def test_a_worker_serves_no_address_that_is_not_named(tmp_path, args):
    assert args.split()[1] in ends_at_once(tmp_path, *args.split())


def test_a_worker_binds_to_the_loopback_unless_told():
    assert m.parse(["--worker"])[0].worker.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("says", [None, b"", b"SSH-2.0\n", b'{"torch": "1.0"}\n'])
def test_a_host_that_is_no_worker_is_named(tmp_path, says):
    """Nobody listens; somebody does who says nothing, another thing, or has another version."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        if says is None:
            server.close()
        else:

            def answer():
                client = server.accept()[0]
                client.send(says)
                time.sleep(8)

            threading.Thread(target=answer, daemon=True).start()
        line = ends_at_once(tmp_path, "--only", "sync_rl", "--hosts", address)
    assert address in line
    assert says != b'{"torch": "1.0"}\n' or "1.0" in line and m.versions()["torch"] in line


def test_another_version_of_the_file_is_named(network, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / FILE.name).write_text(FILE.read_text() + "\n# another version\n")
    network.work(0, tmp_path / "old" / FILE.name)
    found = subprocess.run(
        [*network.inside(0), sys.executable, str(FILE), "--hosts", network.url(0)],
        cwd=tmp_path,
        text=True,
        capture_output=True,
        timeout=60,
    )
    [line] = found.stderr.splitlines()
    assert found.returncode == 2 and network.url(0) in line and FILE.name in line


@pytest.mark.parametrize(
    "stage, last", [("service", "checks"), pytest.param("sync_rl", "held-out", marks=long)]
)
def test_a_run_on_one_host_opens_no_port(tmp_path, stage, last):
    """In a network namespace of its own, where nobody else listens."""
    net = Network(1)
    try:
        if not net.real:
            pytest.skip("no network namespaces here; on a shared network others listen too")
        process, _ = start(tmp_path, "--only", stage, "--steps", "20", prefix=net.inside(0))
        heard, proc = set(), pathlib.Path(f"/proc/{process.pid}")
        ours = os.readlink("/proc/self/ns/net")
        while process.poll() is None:
            with contextlib.suppress(OSError):
                if os.readlink(proc / "ns" / "net") != ours:  # it has got there
                    lines = [
                        line.split()
                        for kind in ("tcp", "tcp6")
                        for line in (proc / "net" / kind).read_text().splitlines()[1:]
                    ]
                    heard |= {line[1] for line in lines if line[3] == "0A"}
            time.sleep(0.05)
        assert last in process.communicate()[0] and heard == set()
    finally:
        net.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_worker_that_ends_leaves_nothing_behind(network, tmp_path, number):
    worker = network.work(0)
    process, _ = start(
        tmp_path, "--only", "sync_rl", "--hosts", network.url(0), prefix=network.inside(0)
    )
    assert wait_until(lambda: len(processes_of(worker.mark)) > 5, 60)
    inner = [
        pid
        for pid in processes_of(worker.mark)
        if b"--worker" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(max(inner), number)
    assert wait_until(lambda: processes_of(worker.mark) == [], 90)  # Monarch's own limit is 60 s
    process.kill()
    process.communicate()


def test_a_main_process_that_ends_leaves_nothing_on_other_hosts(network, tmp_path):
    worker = network.work(0)
    before = processes_of(worker.mark)
    process, mark = start(
        tmp_path, "--only", "sync_rl", "--hosts", network.url(0), prefix=network.inside(0)
    )
    assert wait_until(lambda: len(processes_of(worker.mark)) > len(before) + 3, 60)
    for pid in processes_of(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.communicate()
    assert wait_until(lambda: processes_of(worker.mark) == before, 30)


# -- what --report and --trace write --------------------------------------------------------------


@pytest.fixture(scope="session")
def pictures(tmp_path_factory, quick_file):
    """A short run with both files."""
    folder = tmp_path_factory.mktemp("pictures")
    run = Run(
        folder,
        "--only",
        "async_rl",
        "--steps",
        "30",
        "--report",
        "page.html",
        "--trace",
        "trace.json",
        file=quick_file,
    )
    return run, folder / "page.html", json.loads((folder / "trace.json").read_text())


class Chromium:
    """A headless browser, driven over two pipes in its own protocol: no package is needed."""

    PATH = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )

    def __enter__(self):
        self.ids, self.events, self.session = itertools.count(1), [], {}
        (theirs, ours), (self.answers, to_us) = os.pipe(), os.pipe()
        self.profile = tempfile.TemporaryDirectory()
        # the browser reads descriptor 3 and writes 4
        command = (
            f"exec 3<&{theirs} 4>&{to_us}; exec {self.PATH} --headless --no-sandbox --disable-gpu "
            f"--disable-dev-shm-usage --remote-debugging-pipe --user-data-dir={self.profile.name}"
        )
        self.process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=(theirs, to_us), stderr=subprocess.DEVNULL
        )
        os.close(theirs), os.close(to_us)
        self.orders, self.unread = os.fdopen(ours, "wb", buffering=0), b""
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self.session = {
            "sessionId": self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        }
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        self.orders.close(), os.close(self.answers)
        with contextlib.suppress(OSError):  # its helpers may still be writing
            self.profile.cleanup()

    def __call__(self, method, **params):
        number = next(self.ids)
        self.orders.write(
            json.dumps({"id": number, "method": method, "params": params, **self.session}).encode()
            + b"\0"
        )
        while True:
            while b"\0" not in self.unread:
                found = os.read(self.answers, 1 << 20)
                assert found, "the browser has ended"
                self.unread += found
            text, _, self.unread = self.unread.partition(b"\0")
            message = json.loads(text)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def js(self, code):
        found = self("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def key(self, name):
        code = {"ArrowRight": 39, "ArrowLeft": 37, "Tab": 9}[name]
        for kind in ("keyDown", "keyUp"):
            self(
                "Input.dispatchKeyEvent", type=kind, key=name, code=name, windowsVirtualKeyCode=code
            )

    def open(self, path, width, scheme):
        self.events.clear()
        self(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=800,
            deviceScaleFactor=1,
            mobile=width < 500,
        )
        self(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        self("Page.navigate", url=path.as_uri())
        assert wait_until(lambda: self.js("document.readyState") == "complete", 20)


@pytest.mark.skipif(not Chromium.PATH, reason="no Chromium is installed")
@pytest.mark.parametrize("width, scheme", [(360, "dark"), (1280, "light")])
def test_the_page_of_a_report_in_a_browser(pictures, width, scheme):
    """Its slider, moved with the keyboard, changes timeline and numbers; nothing goes wrong."""
    run, path, _ = pictures
    assert run.status == 0 or {
        c["what"] for c in run.stage("async_rl")["checks"] if not c["ok"]
    } <= {"held-out exact, gained", "seconds to the same reward, sync / async"}, run.out + run.err
    shown = {}
    with Chromium() as browser:
        browser.open(path, width, scheme)
        browser.js("document.getElementById('width').value = '1e9'; draw()")
        for _ in range(20):  # by keyboard alone to the slider
            if browser.js("document.activeElement.id") == "bound":
                break
            browser.key("Tab")
        for bound in (0, 1, 2, 4, 8):
            assert browser.js("document.getElementById('shown').value") == f"K = {bound}"
            assert (
                browser.js("document.getElementById('bound').getAttribute('aria-valuetext')")
                == f"K = {bound}"
            )
            rects = browser.js(
                "JSON.stringify([...document.querySelectorAll('#timeline rect')].map("
                "r => [r.className.baseVal, +r.getAttribute('x'), +r.getAttribute('width')]))"
            )
            kinds = collections.Counter(kind for kind, *_ in json.loads(rects))
            assert min(kinds[k] for k in ("rollout", "step", "rewards", "publish", "pull")) >= 15, (
                kinds
            )
            assert kinds["step"] >= 20 and kinds["lost"] >= 1  # a step each, and the generator
            assert all(x >= 0 and x + w <= width + 1 for _, x, w in json.loads(rects))
            assert "generator" in browser.js("document.getElementById('faults').textContent")
            numbers = browser.js("document.getElementById('numbers').innerText")
            most = int(re.search(r"largest\s+[\d.]+, (\d+)", numbers)[1])
            assert most <= bound and (
                "100 %" in browser.js("document.getElementById('lag').textContent")
            ) is (most == 0)
            shown[bound] = rects, numbers, browser.js("document.getElementById('work').innerHTML")
            browser.key("ArrowRight")
        assert [len({*column}) for column in zip(*shown.values())] == [5, 5, 5]
        browser.key("ArrowLeft")
        assert browser.js("document.getElementById('shown').value") == "K = 4"
        assert browser.js("document.getElementById('said').textContent").count(">") >= 8
        assert browser.js("document.documentElement.scrollWidth") <= width
        ink, paper = (
            sum(
                map(
                    int,
                    re.findall(r"\d+", browser.js(f"getComputedStyle(document.body).{which}"))[:3],
                )
            )
            for which in ("color", "backgroundColor")
        )
        assert (ink > paper) is (scheme == "dark") and abs(ink - paper) > 380  # of 765
        asked = [
            e["params"]["request"]["url"]
            for e in browser.events
            if e["method"] == "Network.requestWillBeSent"
        ]
        assert asked == [path.as_uri()]
        assert not [
            e
            for e in browser.events
            if e["method"]
            in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        ]


def test_a_page_that_was_told_to_end_its_script_does_not(tmp_path):
    """What a policy says may be anything."""
    asked, report = [], m.Report()

    class Fleet:
        cfg = m.Config(steps=3, report=str(tmp_path / "page.html"))
        generators = types.SimpleNamespace(
            strike=types.SimpleNamespace(call_one=lambda n: asyncio.sleep(0)),
            status=types.SimpleNamespace(call_one=lambda s: asyncio.sleep(0)),
        )

        async def evaluate(self):
            return 0.5

    class Runs:
        def __init__(self, history, max_lag):
            self.history = history

        async def run(self):
            self.history.started = time.monotonic()
            for version in (1, 2):
                said = BATCH._replace(answers=[("</script><script>boom()",)])
                self.history.add(stats_of(version=version, step_s=0.1), said)
            asked.append(self.history.label)

    class History(m.History):
        def __init__(self, fleet, *args):
            fleet.busy_s, fleet.sampler = 0.0, None
            super().__init__(fleet, *args)

    report.now = dict(checks=[], figures={})
    with mock.patch.object(m, "AsyncRun", Runs), mock.patch.object(m, "History", History):
        asyncio.run(m.recipe()["sweep"](report, Fleet(), 0.1))
    page = (tmp_path / "page.html").read_text()
    assert asked == [f"K = {k}" for k in (0, 1, 2, 4, 8)] and page.count("</script>") == 1
    assert page.count("\\u003c/script>") == 10


def test_a_trace_is_what_perfetto_reads(pictures):
    """Rows have names, spans of a row lie beside or inside each other, and what happened is there."""
    _, _, trace = pictures
    names = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    spans = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(names) == len({*names.values()}) and {e["tid"] for e in spans} == {*names}
    assert {
        "trainer 0.0",
        "trainer 0.0 copies",
        "generator 0.0",
        "generator 1.0",
        "judge 0.0",
        "trainer 0 lost",
    } <= {*names.values()}
    what = collections.Counter(e["name"] for e in spans)
    assert min(what[name] for name in ("rollout", "rewards", "step", "publish", "pull")) > 100, what
    for tid in names:
        open_until = []
        for span in sorted(
            (e for e in spans if e["tid"] == tid), key=lambda e: (e["ts"], -e["dur"])
        ):
            assert span["dur"] >= 0 and span["pid"] == 0
            while open_until and open_until[-1] <= span["ts"] + 1:
                open_until.pop()
            assert not open_until or span["ts"] + span["dur"] <= open_until[-1] + 1, span  # us
            open_until.append(span["ts"] + span["dur"])


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        "--stage nope",
        "--only 12",
        "--task sums",
        "--loss none",
        "--steps 0",
        "--steps x",
        "--generators -2",
        "--max-lag -1",
        "--model-mb 0",
        "--model /nowhere/model",
        "--bogus",
        "--json /nowhere/out.json",
        "--task nowhere.py:X",
        "--task :X",
        "--kl -1",
        "--kl nan",
        "--entropy -2",
        "--lr -1",
        "--passes 0",
        "--baseline x",
        "--loss x",
        "--pull never",
        "--log /nowhere/log",
        "--stage 1 --only 2",
        "--trace /nowhere/trace",
        "--only sync_rl --report page.html",
        "--report /nowhere/page.html",
    ]
    + ([] if torch.cuda.is_available() else ["--device cuda"]),
)
def test_bad_input_gets_one_line_and_exit_2(tmp_path, refused, args):
    refused(*args.split())
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("args", ["--bogus", "--task :X", "--report /nowhere/page.html"])
def test_bad_input_leaves_nothing_behind(tmp_path, args):
    run = Run(tmp_path, *args.split())
    assert run.status == 2 and run.out == "" and len(run.err.splitlines()) == 1
    assert os.listdir(tmp_path) == [] and run.left == []


def start(folder, *args, prefix=(), file=FILE):
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [*prefix, sys.executable, str(file), *args],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, MARK: mark},
        start_new_session=True,
    )
    return process, mark


@pytest.mark.parametrize(
    "args, moments", [("--only async_rl", [0.05, 1.5, 14.0]), ("--only service", [1.0, 2.5])]
)
def test_ctrl_c_leaves_nothing_behind(tmp_path, args, moments):
    for moment in moments:
        process, mark = start(tmp_path, *args.split())
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the run
        try:
            _, err = process.communicate(timeout=30 if moment > 0.1 else 3)
        except subprocess.TimeoutExpired:  # Python, still starting, has swallowed it
            assert moment < 0.1
            os.killpg(process.pid, signal.SIGINT)
            _, err = process.communicate(timeout=30)
        # at 0.05 s Python itself may still be starting, and says so in its own ways
        allowed = (130, -signal.SIGINT, 1) if moment < 0.1 else (130,)
        assert process.returncode in allowed, (moment, err)
        assert "Traceback" not in err or moment < 0.1
        assert wait_until(lambda: processes_of(mark) == []), moment
    assert os.listdir(tmp_path) == []


def test_killing_the_main_process_ends_its_processes(tmp_path):
    process, mark = start(tmp_path, "--only", "weight_sync")
    assert wait_until(lambda: len(processes_of(mark)) >= 4, 30)
    time.sleep(6)  # a process killed between fork and exec would only end a minute later
    process.kill()
    process.wait()
    assert wait_until(lambda: processes_of(mark) == [], 30)


def test_list_names_every_banner_and_its_line():
    found = subprocess.run(
        [sys.executable, str(FILE), "--list"], text=True, capture_output=True, timeout=60
    )
    listed = [line.split()[:2] for line in found.stdout.splitlines()]
    banners = re.findall(r"^# == (\d+)\. ([A-Z ]+) =+$", SOURCE, re.M)
    assert listed == [[number, name.lower().replace(" ", "_")] for number, name in banners]
    lines = SOURCE.splitlines()
    for line in found.stdout.splitlines():
        name = line.split()[1]
        at = int(re.search(r"line (\d+)", line)[1])
        assert f"async def demo_{name}(" in lines[at - 1] or lines[at - 1].startswith("@stage(")


# -- the form of the file -------------------------------------------------------------------------

TREE = ast.parse(SOURCE, feature_version=(3, 10))
LINES = SOURCE.splitlines()
FUNCTIONS = [n for n in ast.walk(TREE) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef))]


def docstring_lines():
    found = set()
    for node in ast.walk(TREE):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                found.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return found


def test_size():
    docs = docstring_lines()
    code = [
        i
        for i, line in enumerate(LINES, 1)
        if line.strip() and not line.strip().startswith("#") and i not in docs
    ]
    assert len(code) <= 1700 and len(LINES) <= 2800
    assert max(map(len, LINES)) <= 100


def test_functions_are_short_and_flat():
    def depth(node):
        blocks = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)
        return max(
            (
                depth(child) + isinstance(child, blocks)
                for child in ast.iter_child_nodes(node)
                if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            ),
            default=0,
        )

    for function in FUNCTIONS:
        size = function.end_lineno - function.lineno + 1
        assert size <= 45, function.name
        assert depth(function) <= 4, function.name


def test_only_the_report_and_the_plumbing_print():
    printing = [
        n.lineno
        for n in ast.walk(TREE)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Name) and n.func.id == "print"
    ]
    allowed = {
        i
        for node in TREE.body
        if isinstance(node, (ast.ClassDef, ast.FunctionDef))
        and node.name in ("Report", "Link", "serve", "attend", "leave", "main")
        for i in range(node.lineno, node.end_lineno + 1)
    }
    assert set(printing) <= allowed


def test_no_global_is_rebound_and_no_except_is_bare():
    assert not [n for n in ast.walk(TREE) if isinstance(n, ast.Global)]
    for node in ast.walk(TREE):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None
    assert not re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", SOURCE)


def test_names_in_the_header_picture_exist():
    picture = m.__doc__.split("Each stage shows")[1].split("1 hello_actor")[0]
    for name in re.findall(r"\b[A-Z][a-z]+(?:[A-Z][a-z]+)*\b", picture):
        if name != "RDMA":
            assert hasattr(m, name) or hasattr(m, name.rstrip("s")), name


def test_readme_and_docs_agree_with_the_file():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    pins = re.search(r"dependencies = \[(.*)\]", SOURCE)[1].replace('"', "").split(", ")
    for pin in pins:
        assert readme.count(pin) == 2, f"{pin} in both commands"
    for name in NAMES:
        assert name in readme
    docs = (FOLDER / "DOCS.md").read_text(encoding="utf-8")
    for stage in m.STAGES.values():
        assert stage.name in docs
    for field in m.StepStats._fields:
        assert field in docs, f"{field} is logged but not explained"
    assert shutil.which("bash") and (FOLDER / ".ci" / "run").exists()


def test_the_map_in_readme_has_the_lines_of_the_file():
    readme = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", readme, re.M))
    banners = {
        str(i): re.sub(r"^# [=-]+ | [=-]+$", "", line)
        for i, line in enumerate(LINES, 1)
        if re.match(r"# (==|--) .* [=-]+$", line)
    }
    assert {line: row.split(" | ")[0] for line, row in rows.items()} | banners == {
        line: row.split(" | ")[0] for line, row in rows.items()
    } and len(rows) == len(banners) + 1
    named = re.findall(r"`(\w+)` (\d+)", " ".join(rows.values()))
    assert len(named) > 40
    for name, line in named:
        assert re.match(rf"(class|def|async def) {name}\b", LINES[int(line) - 1]), name


def test_help_is_one_screen_and_every_flag_has_its_default():
    found = subprocess.run(
        [sys.executable, str(FILE), "--help"], text=True, capture_output=True, timeout=60
    )
    lines = found.stdout.splitlines()
    assert found.returncode == 0 and len(lines) <= 40 and max(map(len, lines)) <= 100
    for name, default in m.Config()._asdict().items():
        [line] = [line for line in lines if line.startswith(f"  --{name.replace('_', '-')} ")]
        assert line.endswith(f" [{default}]") and len(line.split()) > 5
    for name, some in (("loss", m.LOSSES), ("baseline", m.BASELINES)):
        assert ", ".join(some) in next(line for line in lines if line.startswith(f"  --{name} "))


# What DOCS names in code font and neither the file, nor these tests, nor a recipe has.
ELSEWHERE = {
    "_bytes",
    "_ms",
    "_per_s",
    "_us",
    "_s",  # ends of names
    "ablate.py",
    "tails.py",
    "wire.py",
    "calculator.py",  # the recipes' own
    "memfd",
    "pidfd",
    "ibverbs",
    "srun",
    "rollout_func",  # Linux, Monarch, Slurm, TRL
}


def test_names_in_docs_exist():
    docs = (FOLDER / "DOCS.md").read_text(encoding="utf-8")
    fence = re.compile(r"^```.*?^```", re.M | re.S)
    words = {
        *re.findall(
            r"\w+", SOURCE + pathlib.Path(__file__).read_text() + " ".join(fence.findall(docs))
        )
    }
    named = {
        span
        for span in re.findall(r"`([^`\n]+)`", fence.sub("", docs))
        if re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", span)
    }
    assert len(named) > 200
    assert {span for span in named - ELSEWHERE if not {*re.findall(r"\w+", span)} <= words} == set()
    flags = {*re.findall(r"`(--[a-z][a-z-]+)", docs)}
    assert flags <= {"--" + name.replace("_", "-") for name in m.Config._fields} | {
        "--stage",
        "--only",
        "--list",
        "--worker",
        "--help",
    }, flags
    chapters = re.findall(r"^## (\d+)\. ", docs, re.M)
    assert chapters == [str(i) for i in range(12)]


# -- all of it, at length -------------------------------------------------------------------------

if __name__ == "__main__":
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", __file__], env=os.environ | {"MONARCH_RL_ALL": "1"}
    )
    with tempfile.TemporaryDirectory() as room:
        room = pathlib.Path(room)
        for number, what in enumerate(["failover:15", "throughput", "memory"]):
            print(json.dumps(*chaos(room / str(number), what)), flush=True)
        answers = [chaos(room / f"chaos {seed}", f"chaos:{seed}")[0] for seed in range(20)]
        print(*map(json.dumps, answers), sep="\n")
        print(
            f"runs with three faults, as they should be: {sum(not a['wrong'] for a in answers)} of 20"
        )
        print(
            "power cuts outside, inside a checkpoint; runs that ended; largest difference:",
            power_cuts(room / "cuts", 40, 10),
        )
