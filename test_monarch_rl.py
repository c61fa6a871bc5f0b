"""Tests of monarch_rl.py. Stages run as subprocesses, from another folder, as a reader runs them.

One tour is shared by many tests. For every claim a test takes away the line that provides it and
expects that stage to fail, and the stages before it to hold. No test asserts a time.
"""

import ast
import asyncio
import json
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid

import pytest
import torch

import monarch_rl as m

FOLDER = pathlib.Path(__file__).resolve().parent
FILE = FOLDER / "monarch_rl.py"
SOURCE = FILE.read_text(encoding="utf-8")
NAMES = [stage.name for stage in m.STAGES.values()]
MARK = "MONARCH_RL_TEST"  # an environment variable by which a run's processes are found


class Run:
    """One finished run of the file."""

    def __init__(self, folder, *args, file=FILE, timeout=300):
        self.mark = uuid.uuid4().hex
        found = subprocess.run(
            [sys.executable, str(file), *args, "--json", "out.json"], cwd=folder, text=True,
            capture_output=True, timeout=timeout, env={**os.environ, MARK: self.mark})
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
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue  # it ended, or belongs to somebody else
    return found


def wait_until(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="session")
def tour(tmp_path_factory):
    """The whole tour, as `python monarch_rl.py` runs it."""
    before, folder = sorted(os.listdir("/dev/shm")), tmp_path_factory.mktemp("tour")
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
    assert sorted(os.listdir(tour.folder)) == ["log.jsonl", "out.json"]


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
    "weight_sync": "model_mb memmove_ms publish_ms pull_ms sync_ms sync_over_memmove message_ms rdma_ms "
    "reads torn_reads torn_reads_without_leases trainer_waits",
    "sync_rl": "heldout_before heldout_after reward_first reward_last mismatch_k3",
    "async_rl": "heldout_before heldout_after reward_first reward_last async_speedup lag_max started "
    "trained dropped lost in_flight mismatch_k3",
}


@pytest.mark.parametrize("name", FIGURES)
def test_figures_are_there(tour, name):
    assert set(FIGURES[name].split()) <= set(tour.figures(name))


def test_weights_are_never_torn_and_the_demo_can_tell(tour):
    found = tour.figures("weight_sync")
    assert found["torn_reads"] == 0 < found["reads"]
    assert found["torn_reads_without_leases"] > 0
    assert found["trainer_waits"] == 0


def test_service_answered_every_request_once(tour):
    found = tour.figures("service")
    assert found["answered_once"] == found["requests"] == 400


def test_log_has_a_line_per_training_step(tour):
    rows = [json.loads(line) for line in (tour.folder / "log.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["run"] == "async"]
    assert steps == list(range(1, tour.json["args"]["steps"] + 1))
    assert {"version", "reward", "lag_max", "mismatch_k3", "entropy", "clipped"} <= set(rows[0])


def learned(run, least_after):
    assert run.status == 0, run.out + run.err
    found = run.figures("async_rl")
    assert 0.03 <= found["heldout_before"] <= 0.20
    assert found["heldout_after"] >= least_after
    assert found["lag_max"] <= run.json["args"]["max_lag"]
    assert found["mismatch_k3"] <= 1e-6
    assert found["started"] == sum(found[k] for k in ("trained", "dropped", "lost", "in_flight"))


def test_training_learns_in_the_tour(tour):
    learned(tour, 0.95)


@pytest.mark.parametrize("task, seed, least", [("repeat", 1, 0.95), ("repeat", 2, 0.95),
                                               ("count", 0, 0.90), ("pattern", 0, 0.90)])
def test_training_learns(tmp_path, task, seed, least):
    learned(Run(tmp_path, "--only", "async_rl", "--steps", "400", "--task", task,
                "--seed", str(seed)), least)


# -- without its mechanism a stage fails, and only that one ---------------------------------------

BROKEN = {  # stage: (what provides the claim, what is there instead)
    "hello_actor": ("@endpoint  # add", "@concurrent_endpoint  # add"),
    "actor_mesh": ("    mesh.ping.broadcast()", "    await mesh.ping.choose()"),
    "rdma_transfer": ("await handle.read_into(room)",
                      "room.copy_(await self.owner.as_message.call_one(num_bytes))"),
    "controllers": ("await get_or_spawn_controller(name, Metrics) if name else own", "own"),
    "supervision": ("respawn_s = 0.0 if lives else await supervisor.spawn.call_one()",
                    "respawn_s = await supervisor.spawn.call_one() if 'broad' in trigger else 0.0"),
    "service": ("range(self.MAX_ATTEMPTS)", "range(1)"),
    "weight_sync": ("self.arena[self.word] = latest % Arena.MAX_SLOTS", "pass"),
    "sync_rl": ("start, version = time.monotonic(), self.reader.pull()",
                "start, version = time.monotonic(), self.reader.version"),
    "async_rl": ("if version - g[2] <= self.max_lag]", "]"),
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


@pytest.mark.parametrize("name", NAMES)
def test_stage_fails_without_its_mechanism(tmp_path, name):
    changes = [BROKEN[name]]
    if name == "async_rl":  # tickets alone nearly bound the lag of equally long rollouts
        changes.append(("self.limit = (max_lag + 1)", "self.limit = (max_lag + 100)"))
    how = ["--only", name] if name.endswith("_rl") else ["--stage", name]
    run = Run(tmp_path, *how, "--steps", "200", "--model-mb", "16", file=broken_file(tmp_path, *changes))
    assert run.status == 1, run.out + run.err
    assert {stage["name"] for stage in run.json["stages"] if not stage["ok"]} == {name}
    assert run.left == []


@pytest.mark.parametrize("name, change, check", [
    ("hello_actor", ("other = far.slice(worker=0), far.slice(worker=1)",
                     "other = far.slice(worker=0), far.slice(worker=0)"), "two actors"),
    ("weight_sync", ("num_readers + 2  # slots", "num_readers + 1  # slots"), "no free slot"),
    ("service", ("self._evict(replica, \"missed its deadline\" if stopped else \"died\")", "pass"),
     "kinds of failure"),
    ("sync_rl", ("attention_mask=mask, position_ids=positions(mask))", "attention_mask=mask)"),
     "recorded and recomputed"),
])
def test_second_line_of_a_claim(tmp_path, name, change, check):
    run = Run(tmp_path, "--only", name, "--steps", "40", "--model-mb", "16",
              file=broken_file(tmp_path, change))
    failed = [c["what"] for c in run.stage(name)["checks"] if not c["ok"]]
    assert run.status == 1 and any(check in what for what in failed), run.out + run.err


# -- pure parts -----------------------------------------------------------------------------------


def test_advantages_against_closed_form_in_any_order():
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.5, 1.0, 0.0, 0.25])
    ids = torch.tensor([7, 7, 3, 3, 9, 9, 9])  # the last group is uneven
    expected = torch.empty(7)
    for group in (3, 7, 9):
        rows = ids == group
        centred = rewards[rows] - rewards[rows].mean()
        expected[rows] = centred / (rewards[rows].std(correction=0) + 1e-4)
    for _ in range(20):
        order = torch.randperm(7)
        found = m.advantages(rewards[order], ids[order])
        assert torch.allclose(found, expected[order], atol=1e-6)
    assert m.advantages(rewards, ids)[ids == 3].abs().max() == 0  # no spread, no signal


def test_losses_have_reinforces_gradient_on_policy():
    mu, advantage = torch.randn(64).sub(3).double(), torch.randn(64).double()
    gradients = {}
    for name, loss in m.LOSSES.items():
        pi = mu.clone().requires_grad_()
        loss(pi, mu, advantage)[0].mean().backward()
        gradients[name] = pi.grad
    for gradient in gradients.values():
        assert torch.allclose(gradient, gradients["reinforce"], atol=1e-12)


@pytest.mark.parametrize("advantage, log_ratio, moves", [(1, 0.3, False), (1, -0.3, True),
                                                         (-1, -0.3, False), (-1, 0.3, True)])
def test_ppo_has_no_gradient_outside_its_trust_region(advantage, log_ratio, moves):
    mu = torch.tensor([-1.0])
    pi = (mu + log_ratio).requires_grad_()
    loss, outside = m.LOSSES["ppo"](pi, mu, torch.tensor([float(advantage)]))
    loss.sum().backward()
    assert bool(pi.grad.abs() > 0) is moves and bool(outside) is not moves


def test_k3_is_zero_for_equals_and_positive_otherwise():
    recorded = torch.randn(100)
    assert m.k3(recorded, recorded) == 0
    assert m.k3(recorded, recorded + 0.1 * torch.randn(100)) > 0


def test_held_out_prompts_are_never_drawn():
    for task in m.TASKS:
        held = {prompt.turns for prompt in m.fixed_prompts(task)}
        assert len(held) == 512 and len(m.heldout(task)) == 256
        drawn = m.Sampler(m.Config(task=task, seed=3)).draw(3000)
        assert not held & {prompt.turns for prompt in drawn}
        assert len({prompt.id for prompt in drawn}) == 3000


def test_score_is_one_only_for_right_answers():
    prompt = m.Prompt(0, (("abc", "abc"), ("d", "efg")))
    assert m.score(prompt, ["abc", "efg"]) == 1
    assert m.score(prompt, ["abc+", "efg"]) < 1  # did not stop
    assert m.score(prompt, ["abd", "efg"]) == pytest.approx(5 / 6)
    assert m.score(prompt, ["", ""]) == 0


def rollout_of(group_ids, version, width=5):
    rows = len(group_ids)
    return m.Rollout(
        ids=torch.arange(rows * width).view(rows, width), mask=torch.ones(rows, width, dtype=torch.int64),
        sampled=torch.ones(rows, width).bool(), logprobs=torch.zeros(rows, width),
        rewards=torch.rand(rows), group_ids=torch.tensor(group_ids),
        versions=torch.full((rows,), version), prompts=[None] * rows, answers=[[]] * rows)


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_two_loops_end_with_every_bound(max_lag):
    """Against a fleet of one process: no wait without an end, lag within the bound, books in order."""
    class Fleet:
        cfg, version = m.Config(generators=2), 0
        sampler = m.Sampler(cfg)

        async def rollout(self, prompts):
            version = self.version
            await asyncio.sleep(random.random() * 0.01)
            return rollout_of([p.id for p in prompts], version)

        class Step:
            async def call_one(self, batch):
                await asyncio.sleep(0.002)
                fleet.version += 1
                return fleet.version, int((fleet.version - 1 - batch.versions).max())

    class History:
        lags = []

        async def begin(self):
            pass

        async def add(self, stats, batch):
            self.lags.append(stats[1])

    async def scene():
        fleet.trainer = type("T", (), {"step": Fleet.Step()})()
        run = m.AsyncRun(fleet, 40, max_lag, History())
        await asyncio.wait_for(run.run(0, {}), 60)
        assert len(run.history.lags) == 40 and max(run.history.lags) <= max_lag
        count = run.gate.count
        assert count["started"] == count["trained"] + count["dropped"] + len(run.buffer.groups)
        History.lags.clear()

    fleet = Fleet()
    asyncio.run(scene())


async def history_of_gate_and_buffer(seed):
    """Random rollouts, late and early, against a trainer; checks the books after every event."""
    rng, max_lag = random.Random(seed), random.Random(seed).randrange(4)
    gate = m.Gate(max_lag)
    buffer, version, away, trained = m.ReplayBuffer(gate, max_lag), 0, [], 0
    for group_id in range(0, 6000, m.GROUPS_PER_BATCH):
        if gate.under_way() + m.GROUPS_PER_BATCH <= gate.limit:
            await gate.admit(m.GROUPS_PER_BATCH)
            away.append(rollout_of([g for g in range(group_id, group_id + m.GROUPS_PER_BATCH)], version))
        if away and rng.random() < 0.6:
            rollout = away.pop(rng.randrange(len(away)))  # any order: stragglers are overtaken
            if rng.random() < 0.1:
                await gate.settle("lost", m.GROUPS_PER_BATCH)
            else:
                await buffer.put(rollout)
        fresh = [g for g in buffer.groups if version - g[2] <= max_lag]
        if len(fresh) >= m.GROUPS_PER_BATCH:
            batch = await buffer.take(m.GROUPS_PER_BATCH, version)
            assert int((version - batch.versions).max()) <= max_lag
            await gate.settle("trained", m.GROUPS_PER_BATCH)
            version, trained = version + 1, trained + m.GROUPS_PER_BATCH
        in_flight = m.GROUPS_PER_BATCH * len(away) + len(buffer.groups)
        assert gate.under_way() == in_flight <= gate.limit
        assert gate.count["trained"] == trained
    return gate.count


@pytest.mark.parametrize("seed", range(12))
def test_lag_is_bounded_and_tickets_add_up(seed):
    count = asyncio.run(history_of_gate_and_buffer(seed))
    assert count["trained"] > 0


def test_gate_waits_until_tickets_come_back():
    async def scene():
        gate = m.Gate(0)
        await gate.admit(m.GROUPS_PER_BATCH)
        waiting = asyncio.ensure_future(gate.admit(m.GROUPS_PER_BATCH))
        await asyncio.sleep(0.02)
        assert not waiting.done()
        await gate.settle("dropped", m.GROUPS_PER_BATCH)
        await asyncio.wait_for(waiting, 5)

    asyncio.run(scene())


def test_join_pads_and_keeps_rows_together():
    a, b = rollout_of([1, 2, 1], 4, width=3), rollout_of([5, 6], 7, width=5)
    joined = m.Rollout.join([(a, [0, 2]), (b, [1])])
    assert joined.ids.shape == (3, 5) and joined.group_ids.tolist() == [1, 1, 6]
    assert joined.versions.tolist() == [4, 4, 7] and joined.mask[0].tolist() == [1, 1, 1, 0, 0]


def test_timeline_draws_what_was_recorded():
    spans = [m.Span("trainer", "step", 1.0, 1.5), m.Span("generator 0", "generate", 1.5, 2.0)]
    assert m.timeline(spans, 1.0, 2.0, width=10) == ["generator 0  .....ggggg", "trainer      sssss....."]


# -- weight slots, in one process -----------------------------------------------------------------


def tensors(value=0.0):
    return {"a": torch.full((3, 5), value), "b": torch.full((7,), value, dtype=torch.bfloat16)}


def test_reader_sees_what_was_published_without_a_copy():
    writer = m.WeightWriter(tensors(), num_readers=1)
    reader = m.WeightReader(writer.arena.handle, 0, tensors(9.0))
    assert reader.pull() == -1 and reader.tensors["a"][0, 0] == 9
    assert writer.publish(1, tensors(1.0)) and reader.pull() == 1
    assert all((t == 1).all() for t in reader.tensors.values())
    slot = reader.arena.slots[reader.arena[1]]
    assert reader.tensors["a"].data_ptr() == slot["a"].data_ptr()


@pytest.mark.parametrize("seed", range(8))
def test_leased_slots_are_never_written(seed):
    """Random interleavings: whatever a reader holds stays as it was pulled."""
    rng, num_readers = random.Random(seed), 3
    writer = m.WeightWriter(tensors(), num_readers)
    readers = [m.WeightReader(writer.arena.handle, i, tensors()) for i in range(num_readers)]
    for version in range(1, 120):
        assert writer.publish(version, tensors(float(version)))  # readers + 2 slots: always one free
        for reader in rng.sample(readers, rng.randrange(num_readers + 1)):
            assert reader.pull() == version
        for reader in readers:
            if reader.version > 0:
                assert all((t == reader.version).all() for t in reader.tensors.values())
    assert writer.skipped == 0


def test_writer_takes_the_only_free_slot():
    writer = m.WeightWriter(tensors(), num_readers=1)
    reader = m.WeightReader(writer.arena.handle, 0, tensors())
    assert writer.publish(1, tensors(1.0)) and reader.pull() == 1
    assert writer.publish(2, tensors(2.0))
    only = {reader.arena[1], writer.arena[0] % m.Arena.MAX_SLOTS, writer.free_slot()}
    assert len(only) == 3 == writer.arena.handle.num_slots
    third = m.Arena.create(writer.arena.handle.manifest, 2)  # two readers, so four slots
    writer.arena = third
    third[0], third[1], third[2] = 2 * m.Arena.MAX_SLOTS, 1, 2
    assert writer.free_slot() == 3
    third[2] = 3
    assert writer.free_slot() == 2


def test_a_version_without_a_free_slot_is_skipped_and_counted(monkeypatch):
    writer = m.WeightWriter(tensors(), num_readers=1)
    assert writer.publish(1, tensors(1.0))
    monkeypatch.setattr(writer, "free_slot", lambda: None)
    assert writer.publish(2, tensors(2.0)) is False
    assert writer.skipped == 1 and writer.arena[0] // m.Arena.MAX_SLOTS == 1


def test_lease_goes_round_again_when_a_version_comes_in_between():
    writer = m.WeightWriter(tensors(), num_readers=1)
    reader = m.WeightReader(writer.arena.handle, 0, tensors())
    writer.publish(1, tensors(1.0))

    looks = []

    def fence():  # between the announcement and the second look
        looks.append(reader.arena[1])
        if len(looks) == 1:
            writer.publish(2, tensors(2.0))

    reader.arena.fence = fence
    assert reader.pull() == 2 and len(looks) == 2
    assert all((t == 2).all() for t in reader.tensors.values())


@pytest.mark.parametrize("change, named", [
    (lambda t: t.pop("b"), "b"), (lambda t: t.update(c=torch.zeros(1)), "c"),
    (lambda t: t.update(a=torch.zeros(5, 3)), "a"), (lambda t: t.update(b=torch.zeros(7).half()), "b"),
    (lambda t: t.update(a=torch.zeros(3, 5).int()), "a"),
])
def test_mismatch_names_the_tensor_and_changes_nothing(change, named):
    writer = m.WeightWriter(tensors(), num_readers=1)
    other = tensors(5.0)
    change(other)
    before = {name: tensor.clone() for name, tensor in other.items()}
    with pytest.raises(m.WeightMismatch, match=f"\\b{named}\\b"):
        m.WeightReader(writer.arena.handle, 0, other)
    with pytest.raises(m.WeightMismatch, match=f"\\b{named}\\b"):
        writer.publish(1, other)
    assert writer.arena[0] == m.Arena.NOTHING
    assert all(torch.equal(before[name], tensor) for name, tensor in other.items())


def test_tied_weights_and_buffers_arrive_as_such():
    policy = m.Policy(m.Config())
    model = policy.model
    model.register_buffer("steps", torch.tensor([3.0]))
    weights = m.weights_of(model)
    assert "steps" in weights and "lm_head.weight" not in weights
    writer = m.WeightWriter(weights, num_readers=1)
    other = m.Policy(m.Config(seed=1)).model
    other.register_buffer("steps", torch.tensor([0.0]))
    writer.publish(1, weights)
    m.WeightReader(writer.arena.handle, 0, m.weights_of(other)).pull()
    assert other.steps.item() == 3.0
    assert other.lm_head.weight.data_ptr() == other.model.embed_tokens.weight.data_ptr()
    ids = torch.tensor([[0, 5, 6, 2, 1]])
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)


# -- the policy -----------------------------------------------------------------------------------


def test_rows_of_any_length_hear_the_end_of_a_turn_once():
    """Later user turns of different lengths: who has said <end> does not hear it again."""
    policy = m.Policy(m.Config())
    decoder = m.Decoder(policy, 2, seed=0, greedy=False)
    with torch.no_grad():
        decoder.hear(["abc", "d"], 1, first=True)
        decoder.speak()
        decoder.alive = torch.tensor([False, True])  # row 0 ended its turn, row 1 did not
        before = decoder.columns[0].shape[1]
        decoder.hear(["e", "fgh"], 1, first=False)
    ids, mask = (column[:, before:] for column in decoder.columns[:2])
    heard = [policy.tokenizer.decode(row[keep == 1], skip_special_tokens=False)
             for row, keep in zip(ids, mask)]
    assert heard == ["<user>e<end><assistant>", "<end><user>fgh<end><assistant>"]


def generated(task="repeat", seed=0, group_size=3):
    cfg = m.Config(task=task, seed=seed)
    policy = m.Policy(cfg)
    prompts = m.Sampler(cfg).draw(6)
    return policy, m.generate(policy, prompts, group_size, version=4, seed=seed)


@pytest.mark.parametrize("task", list(m.TASKS))
@pytest.mark.parametrize("seed", [0, 1])
def test_recorded_log_probabilities_are_the_trainers(task, seed):
    policy, rollout = generated(task, seed)
    with torch.no_grad():
        every = policy.log_softmax(rollout.ids, rollout.mask)
    mine = every.gather(2, rollout.ids[:, 1:, None]).squeeze(-1)
    sampled = rollout.sampled[:, 1:]
    assert (rollout.mask == 0).any(), "rows should end at different times, or holes are not tested"
    assert (mine - rollout.logprobs[:, 1:])[sampled].abs().max() < 1e-5
    assert (rollout.logprobs[~rollout.sampled] == 0).all()
    assert (rollout.mask[rollout.sampled] == 1).all()


def test_conversations_are_exactly_what_the_template_renders():
    """Row by row, without its holes: the user's words, what was sampled, and nothing else."""
    policy, rollout = generated("repeat", seed=2)
    for row, prompt in enumerate(rollout.prompts):
        ids = rollout.ids[row][rollout.mask[row] == 1].tolist()
        text = policy.tokenizer.decode(ids, skip_special_tokens=False)
        expected = "".join(f"<user>{said}<end><assistant>{answer.rstrip('+')}<end>"
                           for (said, _), answer in zip(prompt.turns, rollout.answers[row]))
        assert text in (expected, expected[: -len("<end>")])


def test_only_sampled_tokens_carry_loss():
    _, rollout = generated("count", seed=1)
    for row, prompt in enumerate(rollout.prompts):
        num_sampled = sum(len(a.rstrip("+")) + (not a.endswith("+")) for a in
                          [re.sub(r"<\w+>", "?", answer) for answer in rollout.answers[row]])
        assert int(rollout.sampled[row].sum()) == num_sampled


def test_same_seed_samples_the_same_and_another_does_not():
    policy, first = generated()
    again = m.generate(policy, first.prompts[::3], 3, 4, seed=0)
    other = m.generate(policy, first.prompts[::3], 3, 4, seed=1)
    assert torch.equal(first.ids, again.ids) and first.answers == again.answers
    assert first.answers != other.answers


def save_checkpoint(folder, kind):
    """A small model of another architecture, in the hub's format, with a tokenizer and template."""
    import transformers as t

    tokenizer = m.tiny_tokenizer()
    size = len(tokenizer)
    if kind == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(
            vocab_size=size, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128))
    else:
        model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=size, n_embd=32, n_layer=1, n_head=2,
                                               n_positions=512, bos_token_id=2, eos_token_id=2))
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_other_models_take_the_same_path(tmp_path, kind):
    save_checkpoint(tmp_path / "model", kind)
    policy = m.Policy(m.Config(model=str(tmp_path / "model")))
    rollout = m.generate(policy, m.Sampler(m.Config()).draw(4), 2, 0, seed=0)
    with torch.no_grad():
        every = policy.log_softmax(rollout.ids, rollout.mask)
    mine = every.gather(2, rollout.ids[:, 1:, None]).squeeze(-1)
    assert (mine - rollout.logprobs[:, 1:])[rollout.sampled[:, 1:]].abs().max() < 1e-4


def test_a_model_from_a_folder_runs_through_the_stage(tmp_path):
    save_checkpoint(tmp_path / "model", "llama")
    run = Run(tmp_path, "--only", "async_rl", "--model", str(tmp_path / "model"), "--steps", "10")
    failed = {check["what"] for check in run.stage("async_rl")["checks"] if not check["ok"]}
    learning = {"held-out exact, gained", "sync seconds / async seconds", "reward lost to lag",
                "largest lag without the rule"}  # ten steps at 1e-6 do not teach
    assert failed <= learning and run.left == [], run.out + run.err


# -- the command line -----------------------------------------------------------------------------


@pytest.mark.parametrize("args", [
    "--stage nope", "--only 12", "--task sums", "--loss none", "--steps 0", "--steps x",
    "--generators -2", "--max-lag -1", "--model-mb 0", "--model /nowhere/model", "--bogus",
    "--json /nowhere/out.json", "--log /nowhere/log", "--stage 1 --only 2",
] + ([] if torch.cuda.is_available() else ["--device cuda"]))
def test_bad_input_gets_one_line_and_exit_2(tmp_path, args):
    found = subprocess.run([sys.executable, str(FILE), *args.split()], cwd=tmp_path, text=True,
                           capture_output=True, timeout=60)
    assert found.returncode == 2 and found.stdout == ""
    assert len(found.stderr.splitlines()) == 1 and found.stderr.startswith("monarch_rl: ")
    assert os.listdir(tmp_path) == []


def test_more_generators_than_cores_is_said_but_allowed(tmp_path):
    run = Run(tmp_path, "--only", "hello_actor", "--generators", "64")
    assert run.status == 0 and "64 generators and a trainer on" in run.out


def start(folder, *args):
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(FILE), *args], cwd=folder, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, env={**os.environ, MARK: mark}, start_new_session=True)
    return process, mark


@pytest.mark.parametrize("args, moments", [("--only async_rl", [0.05, 0.4, 1.5, 4.0, 14.0]),
                                           ("--only service", [1.0, 2.5])])
def test_ctrl_c_leaves_nothing_behind(tmp_path, args, moments):
    for moment in moments:
        process, mark = start(tmp_path, *args.split())
        time.sleep(moment)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the run
        _, err = process.communicate(timeout=30)
        assert process.returncode in (130, -signal.SIGINT if moment < 0.1 else 130), (moment, err)
        assert "Traceback" not in err or moment < 0.1
        assert wait_until(lambda: processes_of(mark) == []), moment
    assert os.listdir(tmp_path) == []


def test_killing_the_controller_ends_its_processes(tmp_path):
    process, mark = start(tmp_path, "--only", "weight_sync")
    assert wait_until(lambda: len(processes_of(mark)) >= 4, 30)
    time.sleep(2)  # a process killed between fork and exec would only end a minute later
    process.kill()
    process.wait()
    assert wait_until(lambda: processes_of(mark) == [], 30)


def test_list_names_every_banner_and_its_line():
    found = subprocess.run([sys.executable, str(FILE), "--list"], text=True, capture_output=True,
                           timeout=60)
    listed = [line.split()[:2] for line in found.stdout.splitlines()]
    banners = re.findall(r"^# == (\d+)\. ([A-Z ]+) =+$", SOURCE, re.M)
    assert listed == [[number, name.lower().replace(" ", "_")] for number, name in banners]
    lines = SOURCE.splitlines()
    for line in found.stdout.splitlines():
        number, name = line.split()[0], line.split()[1]
        at = int(re.search(r"line (\d+)", line)[1])
        assert f'@stage({number}, "{name}"' in lines[at - 1]


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
    code = [i for i, line in enumerate(LINES, 1)
            if line.strip() and not line.strip().startswith("#") and i not in docs]
    assert len(code) <= 1700 and len(LINES) <= 2800
    assert max(map(len, LINES)) <= 100


def test_functions_are_short_and_flat():
    def depth(node):
        blocks = (ast.For, ast.AsyncFor, ast.While, ast.If, ast.With, ast.AsyncWith, ast.Try)
        return max((depth(child) + isinstance(child, blocks) for child in ast.iter_child_nodes(node)
                    if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))), default=0)

    for function in FUNCTIONS:
        size = function.end_lineno - function.lineno + 1
        assert size <= (45 if function.name.startswith("demo_") else 40), function.name
        assert depth(function) <= 4, function.name


def test_only_the_report_and_the_plumbing_print():
    printing = [n.lineno for n in ast.walk(TREE) if isinstance(n, ast.Call)
                and isinstance(n.func, ast.Name) and n.func.id == "print"]
    allowed = {i for node in TREE.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))
               and node.name in ("Report", "Parser", "leave", "main")
               for i in range(node.lineno, node.end_lineno + 1)}
    assert set(printing) <= allowed


def test_no_global_is_rebound_and_no_except_is_bare():
    assert not [n for n in ast.walk(TREE) if isinstance(n, ast.Global)]
    for node in ast.walk(TREE):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None
    assert not re.search(r"#.*\b(TODO|FIXME|XXX|HACK)\b", SOURCE)


def test_marks_for_line_numbers_are_unique():
    for mark in re.findall(r"line_of\('([^']+)'\)", SOURCE):
        assert len([line for line in LINES if line.endswith(f"# {mark}")]) == 1, mark


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
    for field in m.StepStats.__dataclass_fields__:
        assert field in docs, f"{field} is logged but not explained"
    assert shutil.which("bash") and (FOLDER / ".ci" / "run").exists()
