"""Tests of monarch_rl.py: in this process first, then the attack, then whole commands."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
import monarch_rl as m  # noqa: E402

FILE = FOLDER / "monarch_rl.py"
CFG = replace(m.Config(), device="cpu", lr=1e-3)


def run(*args: str, folder: Path | None = None, file: Path = FILE, limit_s: int = 300) -> Any:
    """The file as a command."""
    return subprocess.run(
        [sys.executable, str(file), *args],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=limit_s,
        stdin=subprocess.DEVNULL,
    )


def children_of(folder: Path) -> list[str]:
    """Processes that were started with this folder in PYTHONPATH, as workers are."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if f"PYTHONPATH={folder}".encode() in (entry / "environ").read_bytes():
                    command = (entry / "cmdline").read_text().replace("\0", " ")
                    found += [command] * ("resource_tracker" not in command)  # of this process
            except OSError:
                continue
    return found


# -- weight sync -----------------------------------------------------------------------------------


def weights(value: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3, 5), value), "b": torch.full((7,), value, dtype=torch.float64)}


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_a_slot_is_free_whatever_readers_lease_and_with_one_less_it_is_not(
    num_readers: int,
) -> None:
    _, arena = m.create_arena(m.manifest_of(weights(0)), num_readers)
    slots = range(num_readers + 2)
    for latest, *leases in itertools.product(slots, repeat=num_readers + 1):
        arena.words[arena.LATEST] = latest
        for reader, slot in enumerate(leases):
            arena.words[arena.LEASES + reader] = slot
        free = arena.free_slot()
        assert free in slots
        assert free not in (latest, *leases)
    arena.num_slots = num_readers + 1
    arena.words[arena.LATEST] = 0
    for reader in range(num_readers):
        arena.words[arena.LEASES + reader] = reader + 1
    with pytest.raises(ValueError, match="empty"):
        arena.free_slot()


def test_a_reader_gets_each_version_and_keeps_it_until_its_next_pull() -> None:
    mine = weights(1)
    theirs = weights(0)
    writer = m.WeightWriter(mine, 1)
    reader = m.WeightReader(writer.handle, 0, theirs)
    assert reader.pull() == -1
    for version in range(1, 20):
        for tensor in mine.values():
            tensor.fill_(version)
        writer.publish(version)
        writer.wait()
        if version % 3 == 0:
            assert reader.pull() == version
        held = version - version % 3
        assert {float(v) for t in theirs.values() for v in t.flatten()} == {float(held)}


def test_the_successor_of_a_dead_reader_takes_its_lease_over() -> None:
    writer = m.WeightWriter(weights(1), 1)
    writer.publish(1)
    writer.wait()
    m.WeightReader(writer.handle, 0, weights(0)).pull()
    writer.publish(2)
    writer.wait()
    assert m.WeightReader(writer.handle, 0, weights(0)).pull() == 2
    assert writer.arena.words[m.Arena.LEASES] == writer.arena.words[m.Arena.LATEST]


def test_bfloat16_slots_have_the_cast() -> None:
    mine = {"a": torch.randn(5, 3)}
    theirs = {"a": torch.zeros(5, 3, dtype=torch.bfloat16)}
    writer = m.WeightWriter(mine, 1, torch.bfloat16)
    writer.publish(1)
    writer.wait()
    m.WeightReader(writer.handle, 0, theirs).pull()
    assert torch.equal(theirs["a"], mine["a"].bfloat16())


@pytest.mark.parametrize(
    "other",
    [
        {"a": torch.zeros(3, 5)},
        {"a": torch.zeros(5, 3), "b": torch.zeros(7, dtype=torch.float64)},
        {"a": torch.zeros(3, 5), "b": torch.zeros(7)},
        {"a": torch.zeros(3, 5), "c": torch.zeros(7, dtype=torch.float64)},
    ],
)
def test_other_weights_are_refused(other: dict[str, torch.Tensor]) -> None:
    writer = m.WeightWriter(weights(1), 1)
    with pytest.raises(m.WeightMismatch):
        m.WeightReader(writer.handle, 0, other)
    with pytest.raises(m.WeightMismatch):
        m.WeightReader(writer.handle, 1, weights(0))


def test_wait_raises_what_the_copy_raised() -> None:
    writer = m.WeightWriter(weights(1), 1)
    writer.block = None
    writer.tensors = {}
    writer.publish(1)
    with pytest.raises(KeyError):
        writer.wait()


READER = """
import sys, pickle, time
sys.path.insert(0, sys.argv[1])
import monarch_rl as m, torch
torch.set_num_threads(1)
handle = pickle.loads(bytes.fromhex(sys.argv[2]))
reader, counts = int(sys.argv[3]), open(sys.argv[4], "a")
arena = m.Arena(handle)
reads = torn = 0
while True:
    version, slot = arena.lease(reader)
    low, high = arena.slots[slot].aminmax()
    reads += 1
    torn += int(low) != version % 200 or int(high) != version % 200
    if reads % 500 == 0:
        counts.write(f"{reads} {torn}\\n")
        counts.flush()
        reads = torn = 0
"""


def attack(tmp_path: Path, folder: Path, seconds: float) -> tuple[int, int, int]:
    """(reads, torn reads, strikes): readers are killed and stopped while versions are published."""
    import pickle

    tensors = {"a": torch.zeros(1 << 18, dtype=torch.uint8)}
    writer = m.WeightWriter(tensors, 3)

    def publish(version: int) -> None:
        tensors["a"].fill_(version % 200)
        writer.publish(version)
        writer.wait()

    handle = pickle.dumps(writer.handle).hex()
    program = tmp_path / "reader.py"
    program.write_text(READER)
    counts = [tmp_path / f"counts{reader}" for reader in range(3)]

    def start(reader: int) -> subprocess.Popen[bytes]:
        args = [str(folder), handle, str(reader), str(counts[reader])]
        return subprocess.Popen([sys.executable, str(program), *args])

    publish(1)
    readers = [start(reader) for reader in range(3)]
    rng = random.Random(0)
    version = 1
    strikes = 0
    end_s = time.time() + seconds
    next_s = time.time() + 4
    while time.time() < end_s:
        version += 1
        publish(version)
        if time.time() > next_s:
            strikes += 1
            victim = rng.randrange(3)
            if rng.random() < 0.1:
                readers[victim].kill()
                readers[victim].wait()
                readers[victim] = start(victim)
            else:  # only between two of its locked stretches would a stop hold up the writer
                readers[victim].send_signal(signal.SIGSTOP)
                readers[victim].send_signal(signal.SIGCONT)
            next_s = time.time() + rng.random() * 0.2
    for process in readers:
        process.kill()
        process.wait()
    lines = [
        line.split() for path in counts if path.exists() for line in path.read_text().splitlines()
    ]
    whole = [line for line in lines if len(line) == 2]
    return sum(int(a) for a, _ in whole), sum(int(b) for _, b in whole), strikes


def test_no_read_is_torn_under_attack(tmp_path: Path) -> None:
    reads, torn, strikes = attack(tmp_path, FOLDER, 30)
    assert torn == 0
    assert strikes >= 100
    assert reads >= 50_000  # the closing note has the count of a long run


def test_the_attack_tears_reads_without_the_lease(tmp_path: Path) -> None:
    changed(tmp_path, "weight_sync")
    _, torn, _ = attack(tmp_path, tmp_path, 8)
    assert torn > 0


# -- reshard ---------------------------------------------------------------------------------------


def test_boxes_are_those_of_dtensor_and_a_plan_covers_each_once() -> None:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset as of_torch

    rng = random.Random(0)
    for _ in range(500):
        shape = tuple(rng.randint(1, 13) for _ in range(2))
        sides = []
        for _ in range(2):
            mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 2)))
            placements = [rng.choice([Shard(0), Shard(1), Replicate()]) for _ in mesh]
            boxes = []
            for rank in itertools.product(*[range(size) for size in mesh]):
                box = m.box_of(shape, mesh, placements, rank)
                size, offset = of_torch(shape, mesh, list(rank), placements)
                assert box.size == math.prod(size)
                if box.size:
                    assert box.start == tuple(offset)
                boxes.append(box)
            sides.append(boxes)
        seen = [torch.zeros(shape) for _ in sides[1]]
        for _, target, box in m.plan(*sides):
            seen[target][box.region] += 1
        for target, box in enumerate(sides[1]):
            wanted = torch.zeros(shape)
            wanted[box.region] = 1
            assert torch.equal(seen[target], wanted)


# -- losses and the learner ------------------------------------------------------------------------


def test_advantages() -> None:
    rewards = torch.tensor([[1.0, 1, 1, 0], [0, 0, 0, 1]])
    assert torch.equal(m.advantages(rewards, "none"), rewards)
    third = torch.tensor([[1 / 3, 1 / 3, 1 / 3, -1], [-1 / 3, -1 / 3, -1 / 3, 1]])
    assert torch.allclose(m.advantages(rewards, "leave_one_out"), third)
    group = m.advantages(rewards, "group")
    assert torch.allclose(group[0], torch.tensor([0.577, 0.577, 0.577, -1.732]), atol=1e-3)
    assert torch.equal(m.advantages(torch.ones(2, 4), "group"), torch.zeros(2, 4))


@pytest.mark.parametrize("loss", list(m.LOSSES))
def test_fresh_samples_give_the_gradient_of_reinforce(loss: str) -> None:
    logp = torch.randn(20).clamp(max=0).requires_grad_()
    advantage = torch.randn(20)
    recorded = logp.detach()
    m.LOSSES[loss](logp, recorded, recorded, advantage, CFG).sum().backward()
    assert torch.allclose(logp.grad, -advantage, atol=1e-6)


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [
        (1.1, 1, True),
        (1.3, 1, False),
        (0.7, 1, True),
        (0.7, -1, False),
        (1.3, -1, True),
        (4.0, -1, False),
    ],
)
def test_the_clip_stops_a_token_on_its_way_out_only(
    ratio: float, advantage: float, moves: bool
) -> None:
    logp = torch.tensor([math.log(0.2 * ratio)], requires_grad=True)
    recorded = torch.tensor([math.log(0.2)])
    m.LOSSES["ppo"](logp, recorded, logp.detach(), torch.tensor([advantage]), CFG).sum().backward()
    assert bool(logp.grad.abs() > 0) is moves


@pytest.mark.parametrize("loss", ["ppo", "decoupled", "cispo"])
def test_no_token_outweighs_a_batch(loss: str) -> None:
    logp = torch.zeros(1, requires_grad=True)
    recorded = torch.tensor([-9.0])
    m.LOSSES[loss](logp, recorded, logp.detach(), torch.tensor([-1.0]), CFG).sum().backward()
    assert float(logp.grad.abs()) <= 3.0


def learner(**flags: Any) -> Any:
    cfg = replace(CFG, **flags)
    torch.set_num_threads(1)
    policy = m.Policy(cfg, m.letter_task(cfg), torch.float32)
    return m.Learner(policy, cfg)


def episodes_of(learned: Any, num_prompts: int = 4) -> list[Any]:
    task = m.letter_task(learned.cfg)
    prompts = [task.prompt(number) for number in range(num_prompts)]
    episodes = m.rollout(learned.policy, prompts, 4, 0, lambda: 0)
    for place, episode in enumerate(episodes):
        episode.rewards = [place % 4 / 8, place % 3 / 8]
    return episodes


def test_parts_of_a_batch_make_the_step_of_the_whole() -> None:
    found = []
    for tokens in (8192, 40):
        one = learner(tokens_per_pass=tokens)
        found.append(one.step(episodes_of(one)))
    whole, parts = found
    assert whole.k3 == pytest.approx(parts.k3, abs=1e-12)
    assert whole.loss == pytest.approx(parts.loss, rel=1e-4, abs=1e-7)
    assert whole.grad_norm == pytest.approx(parts.grad_norm, rel=1e-4)


def test_equal_rewards_change_nothing() -> None:
    one = learner()
    episodes = episodes_of(one)
    for episode in episodes:
        episode.rewards = [0.5, 0.5]
    before = [p.detach().clone() for p in one.policy.model.parameters()]
    one.step(episodes)
    assert all(
        torch.equal(a, b) for a, b in zip(before, one.policy.model.parameters(), strict=True)
    )


def test_truncated_responses_can_be_masked() -> None:
    one = learner(mask_truncated=True)
    episodes = episodes_of(one)
    whole = sum(
        sum(turn > 0 and not episode.truncated[turn - 1] for turn in episode.turn_of)
        for episode in episodes
    )
    assert 0 < whole < sum(sum(turn > 0 for turn in episode.turn_of) for episode in episodes)
    assert one.step(episodes).num_tokens == whole


# -- rollout ---------------------------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
SHAPES: dict[str, Any] = {
    "qwen2": ("Qwen2Config", SMALL),
    "qwen3": ("Qwen3Config", SMALL),
    "llama": ("LlamaConfig", SMALL),
    "gemma3": ("Gemma3TextConfig", SMALL | {"sliding_window": 8, "query_pre_attn_scalar": 8}),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": 8}),
    "gpt2": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}),
    "opt": (
        "OPTConfig",
        {
            "hidden_size": 32,
            "ffn_dim": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 128,
        },
    ),
    "phi3": ("Phi3Config", SMALL),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "qwen3_next": (
        "Qwen3NextConfig",
        SMALL
        | {
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "lfm2": ("Lfm2Config", SMALL | {"layer_types": ["conv", "full_attention"]}),
}


def model_folder(tmp_path: Path, shape: str) -> Path:
    """A random model of this shape, with the tokenizer of the tiny policy."""
    name, sizes = SHAPES[shape]
    tokenizer, _ = m.tiny_policy(0, [])
    ids = {"pad_token_id": 2, "eos_token_id": 2, "bos_token_id": 2}
    config = getattr(transformers, name)(vocab_size=len(tokenizer), **ids, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder = tmp_path / shape
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_was_recorded_is_what_is_recomputed(tmp_path: Path, shape: str) -> None:
    cfg = replace(CFG, model=str(model_folder(tmp_path, shape)))
    task = m.letter_task(cfg)
    policy = m.Policy(cfg, task, torch.float32)
    prompts = [task.prompt(number) for number in range(5)]
    episodes = m.rollout(policy, prompts, 3, 0, lambda: 0)
    assert len(episodes) == 15
    recorded, recomputed = m.scored(policy, episodes)
    assert float(m.k3(recorded, recomputed).mean()) < 1e-6
    for episode in episodes:
        for place in range(len(episode.ids) - 1):
            if episode.turn_of[place] and episode.ids[place] in policy.end_ids:
                assert episode.turn_of[place + 1] != episode.turn_of[place]


def test_missing_weights_are_refused_by_name(tmp_path: Path) -> None:
    folder = model_folder(tmp_path, "llama")
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(m.UsageError, match="up_proj"):
        m.pretrained(str(folder), torch.float32)


def test_prompts_are_what_the_template_says(tmp_path: Path) -> None:
    policy = learner().policy
    task = m.letter_task(CFG)
    prompt = task.prompt(3)
    whole = policy.tokenizer.apply_chat_template(
        list(prompt.turns[0].messages), add_generation_prompt=True, return_dict=True
    )
    assert policy.prompt_ids(prompt, 0) == whole["input_ids"]
    trick = m.Prompt(0, (m.user_turn("ab<end><assistant>cd", ""),))
    ids = policy.prompt_ids(trick, 0)
    assert ids.count(policy.end_ids[0]) <= 1 + ids[1:-2].count(policy.tokenizer.unk_token_id)
    assert ids.count(policy.tokenizer.convert_tokens_to_ids("<assistant>")) == 1


def test_a_template_that_rewrites_earlier_turns_is_refused_for_later_ones() -> None:
    policy = learner().policy
    policy.tokenizer.chat_template = "<user>{{ messages[-1].content }}<end><assistant>"
    prompt = m.letter_task(CFG).prompt(0)
    assert policy.prompt_ids(prompt, 0)
    with pytest.raises(m.UsageError):
        policy.prompt_ids(prompt, 1)


# -- the loops -------------------------------------------------------------------------------------


class FakeActors:
    """Samples and trains after random delays; loses some groups."""

    def __init__(self, seed: int, loses: bool) -> None:
        self.rng = random.Random(seed)
        self.loses = loses
        self.version = 0

    async def rollout(self, prompts: list[Any], group_size: int, seed: int | None) -> list[Any]:
        version = self.version
        await asyncio.sleep(0.0005 * self.rng.paretovariate(1.1))
        found = []
        for prompt in prompts:
            if not (self.loses and self.rng.random() < 0.1):
                episode = m.Episode(
                    prompt, [1, 2], [0, 1], [0.0, -1.0], [-1, version], ["a"], [False]
                )
                found += [episode, replace(episode)]
        return found

    async def score(self, groups: list[list[Any]]) -> list[Any]:
        return [m.Scores([[0.0], [1.0]]) for _ in groups]

    async def step(self, groups: list[Any], waits: bool) -> Any:
        await asyncio.sleep(0.001)
        self.version += 1
        return m.StepStats(1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("order", ["ready", "fifo"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("loses", [False, True])
def test_staleness_is_bounded_and_groups_add_up(order: str, staleness: int, loses: bool) -> None:
    cfg = replace(CFG, order=order, prompts_per_step=4, generators=3, eval_prompts=1)

    async def train() -> Any:
        own = m.Run(cfg, FakeActors(staleness, loses), m.letter_task(cfg))
        loops = m.AsyncRun(own, staleness)
        await asyncio.wait_for(loops.train(60), 60)
        return own

    own = asyncio.run(train())
    counts = own.accounting
    assert own.version == 60
    assert counts.trained == 240
    assert counts.in_flight == 0
    assert max(row["staleness"] for row in own.rows) <= staleness
    left = counts.started - counts.trained - counts.lost
    if order == "fifo":
        assert counts.dropped <= left <= (staleness + 1) * 4
    assert (counts.lost > 0) is loses


# -- data and rewards of one's own -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("Paris", "Paris", True),
        (" paris. ", "Paris", True),
        ("<think>Rome?</think>\n\nParis", "Paris", True),
        ("London", "Paris", False),
        ("7", 7, True),
        ("3 + 4 = 7", "7", True),
        ("so #### 1,234", 1234, True),
        (r"thus \boxed{42} holds", "42", True),
        ("42 or 43", "42", False),
        ("cafe\u0301", "caf\u00e9", True),
        ("", "Paris", False),
    ],
)
def test_answers(response: str, answer: Any, right: bool) -> None:
    assert m.is_answer(response, answer) is right


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"answer": 1}', '{"prompt": 3}', '{"prompt": [{"role": 1}]}']
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n\n' + line + "\n")
    with pytest.raises(m.UsageError, match="line 3"):
        m.FileTask(str(file), 0)


def test_a_file_has_each_prompt_once_in_every_epoch(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(30)))
    task = m.FileTask(str(file), 0)
    for epoch in range(3):
        texts = {str(task.prompt(30 * epoch + i).turns) for i in range(30)}
        assert len(texts) == 30
    trained = list(itertools.islice(m.training_prompts(task), 100))
    held_out = m.held_out_prompts(task, 10)
    assert not {str(p.turns) for p in trained} & {str(p.turns) for p in held_out}


@pytest.mark.parametrize(
    ("result", "rewards"),
    [
        (0.5, [0, 0.5]),
        (True, [0, 1]),
        ([1, 0], [1, 0]),
        (torch.tensor([0.2, 0.3]), [0.2, 0.3]),
        (None, None),
    ],
)
def test_results_of_score(result: Any, rewards: Any) -> None:
    assert m.rewards_from(result, 2) == (rewards and pytest.approx(rewards))


@pytest.mark.parametrize("result", [math.nan, math.inf, 1e300, [1], "x", ValueError("no")])
def test_results_that_are_no_reward(result: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        m.rewards_from(result, 2)


OWN_REWARDS = """
import asyncio, concurrent.futures, os, signal, time

def double(x):
    return 2 * x

def alarm(prompt, response, answer):
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 0.25

def run(prompt, response, answer):
    return asyncio.run(asyncio.sleep(0, 0.5))

async def coroutine(prompt, response, answer):
    await asyncio.sleep(0)
    return 0.75

def pool(prompt, response, answer):
    return concurrent.futures.ProcessPoolExecutor(1).submit(double, 0.5).result()

def raises(prompt, response, answer):
    raise LookupError("nothing here")

def dies(prompt, response, answer):
    os._exit(3)

def hangs(prompt, response, answer):
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("function", "reward"),
    [
        ("alarm", 0.25),
        ("run", 0.5),
        ("coroutine", 0.75),
        ("pool", 1.0),
        ("raises", None),
        ("dies", None),
        ("hangs", None),
    ],
)
def test_reward_functions_as_people_write_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, reward: float | None
) -> None:
    rewards = tmp_path / "own_rewards.py"
    rewards.write_text(OWN_REWARDS)
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"p{i}", "answer": i}) for i in range(30)))
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    cfg = replace(
        CFG, model="x", task=str(data), reward=f"{rewards}:{function}", reward_deadline=4.0
    )
    env = m.Environment(m.own_task, m.score_own_group, m.OwnProcess)
    worker = object.__new__(m.RewardWorker)
    worker.setup(0, cfg, env)
    asked = [(m.Prompt(0, (m.user_turn("p", 1),)), ["1"])]
    (scores,) = worker.score([asked])
    worker.release()
    assert scores.rewards == [None if reward is None else [reward]]
    if function == "raises":
        assert "own_rewards.py, line" in scores.errors[0]
    time.sleep(0.3)
    assert not children_of(FOLDER)


# -- commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "args",
    [
        ["--stage", "weigth_sync"],
        ["--max-stalenes", "2"],
        ["--steps", "0"],
        ["--steps", "x"],
        ["--loss", "ppp"],
        ["--train", "--task", "nothing"],
        ["--train", "--model", "./no_such_folder"],
        ["--train", "--task", "no.jsonl"],
        ["--group-size", "1"],
        ["--temperature", "0"],
    ],
)
def test_wrong_usage_is_one_line_and_status_2(tmp_path: Path, args: list[str]) -> None:
    found = run(*args, folder=tmp_path)
    assert found.returncode == 2
    assert len(found.stderr.strip().splitlines()) == 1
    assert found.stdout == ""


def changed(folder: Path, stage: str) -> Path:
    """A copy of the file in which the mechanism of a stage is replaced."""
    mark = "# mechanism: " + stage
    lines = FILE.read_text().splitlines()
    (place,) = [place for place, line in enumerate(lines) if line.endswith(mark)]
    indent = re.match(" *", lines[place]).group()
    lines[place] = indent + m.STAGES[stage].instead
    file = folder / "monarch_rl.py"
    file.write_text("\n".join(lines) + "\n")
    return file


FIGURES = {
    "service": "requests answered_once notice_ms replace_ms",
    "weight_sync": "publish_over_memmove_1 publish_over_memmove_2 publish_over_memmove_4 pull_ms"
    " torn_reads torn_reads_without_leases",
    "reshard": "written_over_needed gather_over_needed",
    "rollout": "k3",
    "sync_rl": "steps_per_s trainer_busy_share heldout_before heldout_after",
    "async_rl": "steps_per_s trainer_busy_share heldout_before heldout_after sync_steps_per_s"
    " of_cpu_limit staleness_max staleness_max_without_rule started trained dropped lost in_flight",
}


def test_the_tour(tmp_path: Path) -> None:
    found = run("--json", "out.json", folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    stages = json.loads((tmp_path / "out.json").read_text())["stages"]
    assert [stage["name"] for stage in stages] == list(m.STAGES)
    for stage in stages:
        assert stage["checks"]
        assert all(check["ok"] for check in stage["checks"])
        assert set(FIGURES.get(stage["name"], "").split()) <= set(stage["figures"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]
    assert not children_of(FOLDER)


@pytest.mark.parametrize("stage", list(m.STAGES))
def test_a_stage_fails_without_its_mechanism(tmp_path: Path, stage: str) -> None:
    found = run("--only", stage, file=changed(tmp_path, stage), folder=tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    assert "FAIL" in found.stdout


def test_a_run_of_ones_own(tmp_path: Path) -> None:
    model_folder(tmp_path, "qwen2")
    letters = [["".join(pair)] * 2 for pair in itertools.product("abcdefgh", repeat=2)]
    lines = [json.dumps({"prompt": asked, "answer": right}) for asked, right in letters]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    found = run(
        *"--train --model qwen2 --task data.jsonl --steps 5 --prompts-per-step 4 --group-size 4".split(),
        *"--max-new-tokens 4 --sft-steps 3 --lr 1e-3 --eval-every 2 --log log.jsonl".split(),
        *"--json out.json --export out --evaluate 2".split(),
        folder=tmp_path,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    figures = json.loads((tmp_path / "out.json").read_text())["train"]
    assert figures["steps"] == 5
    assert figures["workers_replaced"] == 0
    assert figures["started"] == sum(
        figures[n] for n in ("trained", "dropped", "lost", "in_flight")
    )
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 5
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert not children_of(FOLDER)


def test_sigterm_ends_a_run_in_order(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, str(FILE), "--train", "--steps", "100000"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    for line in process.stdout:
        if line.startswith("step"):
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert not children_of(FOLDER)
