"""Tests of monarch_rl.py, for people who change it: functions first, then whole commands.

    python -m pytest -q test_monarch_rl.py                    all, some minutes on two cores
    python -m pytest -q test_monarch_rl.py -k "not command"   what needs no Monarch

Many tests show that they can fail: they run the same check on a copy of the file in which the
mechanism of a stage is replaced (`without`), or with a method that is patched.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import inspect
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
import types
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

FOLDER = Path(__file__).resolve().parent
FILE = FOLDER / "monarch_rl.py"
sys.path.insert(0, str(FOLDER))
import monarch_rl as m

torch.set_num_threads(1)
CFG = replace(m.Config(), device="cpu", lr=1e-3)
MARK = "MONARCH_RL_TEST"  # in the environment of a command and of all that it starts


def changed(folder: Path, stage: str) -> Path:
    """A copy of the file in which the mechanism of a stage is replaced."""
    lines = FILE.read_text().splitlines()
    mark = "# mechanism: " + stage
    (place,) = [i for i, line in enumerate(lines) if line.endswith(mark)]
    lines[place] = re.match(" *", lines[place]).group() + m.STAGES[stage].instead
    file = folder / "monarch_rl.py"
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture
def without(tmp_path: Path) -> Iterator[Any]:
    """Of a stage: the module without its mechanism."""
    names = []

    def load(stage: str) -> types.ModuleType:
        folder = tmp_path / f"without_{stage}"
        folder.mkdir()
        spec = importlib.util.spec_from_file_location(folder.name, changed(folder, stage))
        module = importlib.util.module_from_spec(spec)
        sys.modules[folder.name] = module
        names.append(folder.name)
        spec.loader.exec_module(module)
        return module

    yield load
    for name in names:
        del sys.modules[name]


def left(mark: str, num_tries: int = 100) -> list[str]:
    """The processes with this mark, after they have had some time to end."""
    for _ in range(num_tries):
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                        line = (entry / "cmdline").read_text().replace("\0", " ")
                        found += [line] * ("resource_tracker" not in line)  # of this process
        if not found or num_tries == 1:
            break
        time.sleep(0.1)
    return found


def run(*args: str, folder: Path, file: Path = FILE) -> subprocess.CompletedProcess[str]:
    """Runs the file as a command; none of its processes may be left."""
    mark = uuid.uuid4().hex
    found = subprocess.run(
        [sys.executable, str(file), *args],
        cwd=folder,
        env=os.environ | {MARK: mark},
        capture_output=True,
        text=True,
        timeout=600,
        stdin=subprocess.DEVNULL,
    )
    assert left(mark) == []
    return found


# == weight sync ===================================================================================


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


@pytest.mark.parametrize("num_readers", [1, 2, 3])
def test_readers_plus_2_slots_suffice_and_one_less_does_not(num_readers: int) -> None:
    _, arena = m.create_arena(m.manifest_of(weights(0)), num_readers)
    assert arena.num_slots == num_readers + 2
    slots = range(-1, num_readers + 2)
    for latest, *leases in itertools.product(slots, repeat=num_readers + 1):
        free = slot_for(arena, latest, tuple(leases))
        assert 0 <= free < arena.num_slots
        assert free not in (latest, *leases)
    arena.num_slots -= 1
    with pytest.raises(ValueError, match="empty"):
        slot_for(arena, 0, tuple(range(1, num_readers + 1)))


def held(tensors: dict[str, torch.Tensor]) -> set[float]:
    return {float(value) for tensor in tensors.values() for value in tensor.flatten()}


def versions_seen(module: Any, between: int) -> list[bool]:
    """Whether a reader still has what it pulled, each time that `between` more versions came."""
    mine, theirs = weights(1), weights(0)
    writer = module.WeightWriter(mine, 1)
    reader = module.WeightReader(writer.handle, 0, theirs)
    assert reader.pull() == -1
    assert held(theirs) == {0.0}
    seen = []
    for version in range(1, 30):
        for tensor in mine.values():
            tensor.data.fill_(version)
        published(writer, version)
        if version % between == 1:
            assert reader.pull() == version
            pulled = version
        seen.append(held(theirs) == {float(pulled)})
    return seen


def test_a_reader_gets_a_version_and_keeps_it_until_its_next_pull(without: Any) -> None:
    assert all(versions_seen(m, 3))
    assert not all(versions_seen(without("weight_sync"), 3))


def test_the_successor_of_a_dead_reader_takes_its_lease_over() -> None:
    writer = m.WeightWriter(weights(1), 1)
    published(writer, 1)
    m.WeightReader(writer.handle, 0, weights(0)).pull()
    dead = writer.arena.words[m.Arena.LEASES]
    published(writer, 2)
    assert m.WeightReader(writer.handle, 0, weights(0)).pull() == 2
    assert writer.arena.words[m.Arena.LEASES] == writer.arena.words[m.Arena.LATEST] != dead


def test_a_slot_may_have_another_dtype() -> None:
    mine = {"a": torch.randn(5, 3), "n": torch.arange(3)}
    before = mine["a"].clone()
    theirs = {"a": torch.zeros(5, 3, dtype=torch.bfloat16), "n": torch.zeros(3, dtype=torch.long)}
    writer = m.WeightWriter(mine, 1, torch.bfloat16)
    published(writer, 1)
    m.WeightReader(writer.handle, 0, theirs).pull()
    assert torch.equal(theirs["a"], before.bfloat16())
    assert torch.equal(theirs["n"], torch.arange(3))
    assert torch.equal(mine["a"], before)


A32, B64 = torch.zeros(3, 5), torch.zeros(7, dtype=torch.float64)
OTHERS = {
    "fewer": {"a": A32},
    "more": {"a": A32, "b": B64, "c": B64},
    "shape": {"a": torch.zeros(5, 3), "b": B64},
    "dtype": {"a": A32, "b": torch.zeros(7)},
    "name": {"a": A32, "c": B64},
    "order": {"b": B64, "a": A32},
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_other_weights_are_refused_and_not_touched(other: dict[str, torch.Tensor]) -> None:
    writer = m.WeightWriter(weights(1), 1)
    published(writer, 1)
    with pytest.raises(m.WeightMismatch):
        m.WeightReader(writer.handle, 0, other)
    assert held(other) == {0.0}
    m.WeightReader(writer.handle, 0, weights(0))
    for number in (-1, 1):
        with pytest.raises(m.WeightMismatch):
            m.WeightReader(writer.handle, number, weights(0))


def test_publish_copies_in_a_thread_and_wait_raises_its_error() -> None:
    import threading

    writer = m.WeightWriter(weights(1), 1)
    goes_on = threading.Event()
    threads = []

    def write(slot: torch.Tensor) -> None:
        threads.append(threading.get_ident())
        goes_on.wait(30)
        raise OSError("no such memory")

    writer.write = write
    writer.publish(1)  # returns although the copy waits
    goes_on.set()
    with pytest.raises(OSError, match="no such memory"):
        writer.wait()
    assert threads != [threading.get_ident()]
    assert writer.arena.words[m.Arena.LATEST] == m.Arena.NOTHING


def test_a_failed_copy_is_told_once() -> None:
    writer = m.WeightWriter(weights(1), 1)
    writer.write = lambda slot: 1 / 0
    writer.publish(1)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    del writer.write
    published(writer, 2)
    assert writer.arena.words[m.Arena.VERSION] == 2


ATTACK = """
import mmap, os, queue, random, signal, sys, threading, time
sys.path.insert(0, sys.argv[1])
import torch
import monarch_rl as m
torch.set_num_threads(1)
num_reads, num_strikes = int(sys.argv[2]), int(sys.argv[3])
tensors = {"a": torch.zeros(1 << 17, dtype=torch.uint8)}
writer = m.WeightWriter(tensors, 3)
counts = memoryview(mmap.mmap(-1, 4096)).cast("q")  # of each reader: reads, torn
killed = queue.SimpleQueue()
strikes = {"kills": 0, "stops": 0}
ends = threading.Event()

def read(reader):
    arena = m.Arena(writer.handle)
    while True:
        version, slot = arena.lease(reader)
        low, high = arena.slots[slot].aminmax()
        counts[2 * reader] += 1
        counts[2 * reader + 1] += int(low) != version % 200 or int(high) != version % 200

def start(reader):
    process_id = os.fork()
    if process_id == 0:
        try:
            read(reader)
        finally:
            os._exit(1)
    return process_id

def strike():
    rng = random.Random(0)
    while not ends.wait(rng.random() * 0.06):
        victim = rng.randrange(3)
        process_id = readers[victim]
        if process_id and rng.random() < 0.5:
            strikes["kills"] += 1
            readers[victim] = None
            os.kill(process_id, signal.SIGKILL)
            killed.put((victim, process_id))
        elif process_id:
            strikes["stops"] += 1
            os.kill(process_id, signal.SIGSTOP)
            time.sleep(rng.random() * 0.02)
            os.kill(process_id, signal.SIGCONT)

striker = threading.Thread(target=strike)
readers = []
version = 0
latest_end = time.monotonic() + 120
while time.monotonic() < latest_end:
    version += 1
    tensors["a"].fill_(version % 200)
    writer.publish(version)
    writer.wait()
    if version == 1:
        readers += [start(reader) for reader in range(3)]
        striker.start()
    while not killed.empty():
        victim, process_id = killed.get()
        os.waitpid(process_id, 0)
        readers[victim] = start(victim)
    if sum(counts[0:6:2].tolist()) >= num_reads and sum(strikes.values()) >= num_strikes:
        break
ends.set()
striker.join()
for process_id in filter(None, readers):
    os.kill(process_id, signal.SIGKILL)
print(sum(counts[0:6:2].tolist()), sum(counts[1:6:2].tolist()), *strikes.values(), version)
"""


def attack(folder: Path, tmp_path: Path, num_reads: int, num_strikes: int) -> list[int]:
    """[reads, torn reads, kills, stops, versions] of readers that are struck at random."""
    program = tmp_path / "attack.py"
    program.write_text(ATTACK)
    args = [sys.executable, str(program), str(folder), str(num_reads), str(num_strikes)]
    found = subprocess.run(args, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return [int(number) for number in found.stdout.split()]


def test_no_read_is_torn_though_readers_are_killed_and_stopped(tmp_path: Path) -> None:
    reads, torn, kills, stops, versions = attack(FOLDER, tmp_path, 200_000, 200)
    assert torn == 0
    assert reads >= 200_000
    assert min(kills, stops) >= 50
    assert versions > 1000
    changed(tmp_path, "weight_sync")  # the same attack tears reads without leases
    assert attack(tmp_path, tmp_path, 50_000, 20)[1] > 0


# == reshard =======================================================================================


def random_layouts(num: int) -> Iterator[tuple[Any, Any, Any]]:
    from torch.distributed.tensor import Replicate, Shard

    rng = random.Random(0)
    for _ in range(num):
        shape = tuple(rng.randint(1, 13) for _ in range(rng.randint(1, 3)))
        mesh = tuple(rng.randint(1, 4) for _ in range(rng.randint(1, 3)))
        choices = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
        yield shape, mesh, [rng.choice(choices) for _ in mesh]


def boxes_of(module: Any, shape: Any, mesh: Any, placements: Any) -> list[Any]:
    ranks = itertools.product(*[range(size) for size in mesh])
    return [module.box_of(shape, mesh, placements, rank) for rank in ranks]


def test_boxes_are_those_of_dtensor() -> None:
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

    for shape, mesh, placements in random_layouts(500):
        ranks = itertools.product(*[range(size) for size in mesh])
        for rank, box in zip(ranks, boxes_of(m, shape, mesh, placements), strict=True):
            size, offset = _compute_local_shape_and_global_offset(
                shape, mesh, list(rank), placements
            )
            assert box.size == math.prod(size)
            if box.size:
                assert box.start == tuple(offset)
                assert tuple(e - s for s, e in zip(box.start, box.end, strict=True)) == tuple(size)


def covers_once(module: Any) -> bool:
    """Whether a plan gives each target each of its elements once, from a source that has it."""
    layouts = list(random_layouts(500))
    for shape, mesh, placements in layouts:
        sources = boxes_of(module, shape, mesh, placements)
        other = next(x for x in layouts[::-1] if len(x[0]) == len(shape) and x[1] != mesh)
        targets = boxes_of(module, shape, *other[1:])
        seen = [torch.zeros(shape) for _ in targets]
        for source, target, box in module.plan(sources, targets):
            seen[target][box.region] += 1
            if box.overlap(sources[source]) != box:
                return False
        for target, box in enumerate(targets):
            seen[target][box.region] -= 1
        if any(bool(of_target.any()) for of_target in seen):
            return False
    return True


def test_a_plan_covers_each_element_once(without: Any) -> None:
    assert covers_once(m)
    assert not covers_once(without("reshard"))


# == losses and the learner ========================================================================


def test_advantages_have_their_closed_forms() -> None:
    rewards = torch.rand(20, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(m.advantages(rewards, "none"), rewards)
    out = m.advantages(rewards, "leave_one_out")
    for place in range(6):
        others = [i for i in range(6) if i != place]
        assert torch.allclose(out[:, place], rewards[:, place] - rewards[:, others].mean(1))
    group = m.advantages(rewards, "group")
    centred = rewards - rewards.mean(1, keepdim=True)
    assert torch.allclose(group, centred / (centred.square().mean(1, True).sqrt() + 1e-4))
    for kind in ("group", "leave_one_out"):
        assert torch.equal(m.advantages(torch.ones(2, 4), kind), torch.zeros(2, 4))


def gradient(loss: str, logp: Any, recorded: Any, near: Any, gain: Any) -> Any:
    logp = torch.as_tensor(logp, dtype=torch.float32).clone().requires_grad_()
    found = m.LOSSES[loss](logp, torch.as_tensor(recorded), torch.as_tensor(near), gain, CFG)
    return torch.autograd.grad(found.sum(), logp)[0]


@pytest.mark.parametrize("loss", list(m.LOSSES))
def test_fresh_samples_give_the_gradient_of_reinforce(loss: str) -> None:
    logp, gain = -torch.rand(50) * 5, torch.randn(50)
    assert torch.allclose(gradient(loss, logp, logp, logp, gain), -gain, atol=1e-6)


# (ratio, advantage) of tokens that have a gradient, and of tokens that have none
MOVES = [(1.1, 1.0), (0.9, 1.0), (0.1, 1.0), (0.9, -1.0), (1.3, -1.0), (2.9, -1.0)]
STOPS = [(1.3, 1.0), (0.7, -1.0), (3.1, -1.0), (1e8, -1.0)]


def test_the_clip_stops_a_token_on_its_way_out_only(without: Any) -> None:
    def moves(module: Any) -> list[bool]:
        found = []
        for ratio, gain in MOVES + STOPS:
            logp = torch.tensor([math.log(ratio)], requires_grad=True)
            zero = torch.zeros(1)
            module.ppo(logp, zero, zero, torch.tensor([gain]), CFG).sum().backward()
            found.append(bool(logp.grad.abs() > 0))
        return found

    wanted = [True] * len(MOVES) + [False] * len(STOPS)
    assert moves(m) == wanted
    assert moves(without("losses")) != wanted


def test_no_token_outweighs_a_batch() -> None:
    for age, gain in itertools.product([-60.0, -3.0, 0.0, 3.0, 60.0], [-1.0, 1.0]):
        logp, recorded, gain = torch.zeros(1), torch.tensor([-age]), torch.tensor([gain])
        # logp is near, as in the first pass over a batch.
        for loss, bound in (("ppo", 3.0), ("decoupled", m.MAX_RATIO), ("cispo", m.MAX_RATIO)):
            found = gradient(loss, logp, recorded, logp, gain)
            assert torch.isfinite(found).all()
            assert float(found.abs()) <= bound + 1e-6
    # In later passes decoupled clips what this batch did.
    for moved in (0.5, 3.0, 60.0):
        zero, good = torch.zeros(1), torch.ones(1)
        assert float(gradient("decoupled", zero + moved, zero - 9, zero, good).abs()) == 0


def test_k3_is_never_negative_and_estimates_the_divergence() -> None:
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.randn(64, generator=rng).log_softmax(-1) for _ in range(2))
    found = m.k3(p, q)
    assert (found >= 0).all()
    assert float(m.k3(p, p).max()) == 0
    kl = float((p.exp() * (p - q)).sum())
    assert float((p.exp() * found).sum()) == pytest.approx(kl, rel=1e-4)


def test_the_divergence_as_a_loss_has_the_gradient_of_kl(monkeypatch: Any) -> None:
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(9, generator=rng).log_softmax(-1)
    table = torch.randn(9, generator=rng).requires_grad_()
    monkeypatch.setattr(m, "token_logprobs", lambda *_: (q, None))
    batch = types.SimpleNamespace(ids=None, is_sampled=None)
    logp = table.log_softmax(-1)
    p = logp.detach().exp()  # all tokens, as often as they would be sampled
    found = torch.autograd.grad((p * m.divergence(None, batch, logp)).sum(), table)[0]
    kl = (table.softmax(-1) * (table.log_softmax(-1) - q)).sum()
    assert torch.allclose(found, torch.autograd.grad(kl, table)[0], atol=1e-6)


def test_the_true_gradient_is_that_of_finite_differences() -> None:
    rng = torch.Generator().manual_seed(0)
    table, rewards = (torch.randn(4, 16, generator=rng, dtype=torch.float64) for _ in range(2))
    found = m.true_gradient(table, rewards)

    def mean_reward(place: int, by: float) -> float:
        moved = table.flatten().clone()
        moved[place] += by
        return float((moved.view(4, 16).softmax(-1) * rewards).sum(-1).mean())

    for place in range(64):
        slope = (mean_reward(place, 1e-5) - mean_reward(place, -1e-5)) / 2e-5
        assert float(found[place]) == pytest.approx(slope, abs=1e-9)


def learner(**flags: Any) -> Any:
    """A learner of the tiny policy, with plain gradient steps: its updates are linear."""
    cfg = replace(CFG, **flags)
    learned = m.Learner(m.Policy(cfg, m.letter_task(cfg), torch.float32), cfg)
    learned.optimizer = torch.optim.SGD(learned.policy.model.parameters(), 0.5)
    return learned


def parameters(learned: Any) -> torch.Tensor:
    return torch.nn.utils.parameters_to_vector(learned.policy.model.parameters()).detach().clone()


def episodes_of(learned: Any, num_prompts: int = 4) -> list[Any]:
    task = m.letter_task(learned.cfg)
    prompts = [task.prompt(number) for number in range(num_prompts)]
    episodes = m.rollout(learned.policy, prompts, 4, 0, lambda: 0)
    for place, episode in enumerate(episodes):
        episode.rewards = [place % 4 / 8, place % 3 / 8]
    return episodes


@pytest.mark.parametrize("loss", ["ppo", "decoupled", "cispo"])
def test_a_step_in_parts_is_the_step_of_the_whole(loss: str) -> None:
    found = []
    for tokens in (8192, 40):
        one = learner(loss=loss, passes=3, tokens_per_pass=tokens, entropy=0.01, kl=0.1)
        episodes = episodes_of(one)
        stats = one.step(episodes)
        assert (len(m.rows_of_passes(episodes, tokens, 0, 1)) > 1) is (tokens == 40)
        found.append((parameters(one), stats))
    (whole, whole_stats), (parts, parts_stats) = found
    start = parameters(learner())
    assert float((whole - start).norm()) > 1e-3
    assert float((whole - parts).norm()) < 1e-3 * float((whole - start).norm())
    assert whole_stats.num_tokens == parts_stats.num_tokens
    assert whole_stats.grad_norm == pytest.approx(parts_stats.grad_norm, rel=1e-4)
    assert whole_stats.entropy == pytest.approx(parts_stats.entropy, rel=1e-4)


def test_equal_rewards_give_no_gradient() -> None:
    one = learner()
    before = parameters(one)
    episodes = episodes_of(one)
    for episode in episodes:
        episode.rewards = [0.5, 0.5]
    assert one.step(episodes).grad_norm == 0
    assert torch.equal(parameters(one), before)


def test_truncated_responses_can_be_masked() -> None:
    found = {}
    for masks in (False, True):
        one = learner(mask_truncated=masks)
        episodes = episodes_of(one)
        turns = [(e, turn) for e in episodes for turn in e.turn_of if turn > 0]
        whole = sum(not (masks and e.truncated[turn - 1]) for e, turn in turns)
        assert one.step(episodes).num_tokens == whole > 0
        found[masks] = whole
    assert found[True] < found[False]


# == rollout =======================================================================================

SMALL = "hidden_size=32 intermediate_size=64 num_hidden_layers=2 num_attention_heads=4 "
SMALL += "num_key_value_heads=2 head_dim=8 max_position_embeddings=128 "
EXPERTS = "linear_num_key_heads=2 linear_num_value_heads=4 linear_key_head_dim=8 "
EXPERTS += "linear_value_head_dim=8 num_experts=4 num_experts_per_tok=2 moe_intermediate_size=16 "
EXPERTS += "shared_expert_intermediate_size=16 layer_types=linear_attention,full_attention"
OPT = "hidden_size=32 ffn_dim=64 num_hidden_layers=2 num_attention_heads=4 word_embed_proj_dim=32"
SHAPES = {  # the class of its configuration, and sizes
    "qwen2": ("Qwen2Config", SMALL),
    "qwen3": ("Qwen3Config", SMALL),
    "llama": ("LlamaConfig", SMALL),
    "gemma3": ("Gemma3TextConfig", SMALL + "sliding_window=8 query_pre_attn_scalar=8"),
    "mistral": ("MistralConfig", SMALL + "sliding_window=8"),
    "gpt2": ("GPT2Config", "n_embd=32 n_layer=2 n_head=4 n_positions=128"),
    "opt": ("OPTConfig", OPT + " max_position_embeddings=128"),
    "phi3": ("Phi3Config", SMALL),
    "bloom": ("BloomConfig", "hidden_size=32 n_layer=2 n_head=4"),
    "qwen3_next": ("Qwen3NextConfig", SMALL + EXPERTS),
    "lfm2": ("Lfm2Config", SMALL + "layer_types=conv,full_attention"),
}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def model_folder(parent: Path, shape: str = "qwen2", characters: str = m.LETTERS) -> Path:
    """A random model of this shape, with a tokenizer of one token per character."""
    tokens = ["<user>", "<assistant>", "<end>", *characters]
    tokenizer = transformers.Qwen2Tokenizer(
        {token: i for i, token in enumerate(tokens)},
        [],
        extra_special_tokens=["<user>", "<assistant>"],
        unk_token="<end>",
        eos_token="<end>",
        chat_template=TEMPLATE,
    )
    name, words = SHAPES[shape]
    sizes: dict[str, Any] = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id"), 2)
    for word, value in [pair.split("=") for pair in words.split()]:
        sizes[word] = int(value) if value.isdigit() else value.split(",")
    config = getattr(transformers, name)(vocab_size=len(tokenizer), **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    folder = parent / shape
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def policy_of(folder: Path | None = None, **flags: Any) -> Any:
    cfg = replace(CFG, model=str(folder or ""), **flags)
    return m.Policy(cfg, m.letter_task(cfg), torch.float32)


@pytest.mark.parametrize("shape", list(SHAPES))
def test_what_was_recorded_is_what_is_recomputed(tmp_path: Path, shape: str) -> None:
    policy = policy_of(model_folder(tmp_path, shape), temperature=0.8, max_new_tokens=12)
    prompts = [m.letter_task(CFG).prompt(number) for number in range(5)]
    said = prompts[4].turns
    prompts[4] = m.Prompt(4, (m.user_turn("abcdefghij", ""), said[1]))  # rows of other lengths
    episodes = m.rollout(policy, prompts, 3, 0, lambda: 0)
    assert len(episodes) == 15
    recorded, recomputed = m.scored(policy, episodes)
    assert torch.allclose(recorded, recomputed, atol=2e-3)
    assert float(m.k3(recorded, recomputed).mean()) <= 1e-6
    batch = m.collate(episodes, [[1.0, 1.0]] * 15, policy.device)  # and in one padded batch
    with torch.no_grad():
        together, _ = m.token_logprobs(policy, batch.ids, batch.is_sampled)
    assert float(m.k3(batch.recorded, together).mean()) <= 1e-6
    for episode in episodes:
        for turn, is_cut in enumerate(episode.truncated, 1):
            turn_ids = [i for i, t in zip(episode.ids, episode.turn_of, strict=True) if t == turn]
            ends = [i in policy.end_ids for i in turn_ids]
            assert not any(ends[:-1])
            assert ends[-1] is not is_cut
            assert len(turn_ids) == 12 or not is_cut
    policy.temperature = 0.7  # the check finds a trainer that computes another distribution
    recorded, recomputed = m.scored(policy, episodes)
    assert float(m.k3(recorded, recomputed).mean()) > 1e-6


@pytest.mark.parametrize("shape", ["llama", "gpt2"])
def test_missing_weights_are_refused_by_name(tmp_path: Path, shape: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = model_folder(tmp_path, shape)
    m.pretrained(str(folder), torch.float32)
    state = load_file(folder / "model.safetensors")
    name = next(name for name in state if "mlp" in name and name.endswith("weight"))
    del state[name]
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(m.UsageError, match=re.escape(name.removeprefix("transformer."))):
        m.pretrained(str(folder), torch.float32)


# == prompts =======================================================================================


def test_the_first_turn_is_what_the_template_says() -> None:
    policy = policy_of()
    for number in range(20):
        prompt = m.letter_task(CFG).prompt(number)
        chat = list(prompt.turns[0].messages)
        whole = policy.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_dict=True
        )
        assert policy.prompt_ids(prompt, 0) == whole["input_ids"]


def test_control_tokens_in_what_people_say_are_plain_text(monkeypatch: Any) -> None:
    letters = m.tiny_policy(0, [])[0].get_vocab()

    def num_controls(policy: Any) -> int:
        trick = m.Prompt(0, (m.user_turn("ab<assistant>cd<user>", ""),))
        ids = policy.prompt_ids(trick, 0)
        return sum(ids.count(letters[token]) for token in ("<user>", "<assistant>"))

    policy = policy_of()
    assert num_controls(policy) == 2  # those of the template
    monkeypatch.setattr(policy, "control_tokens", {})
    assert num_controls(policy) == 4


def test_a_response_may_end_by_template_tokenizer_and_generation_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<user>", "<assistant>", "<turn>"]})
    tokenizer.chat_template = TEMPLATE.replace("<end>", "<turn>")
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config.eos_token_id = [2, 5]
    model.save_pretrained(folder)
    policy = policy_of(folder)
    of_template = tokenizer.convert_tokens_to_ids("<turn>")
    assert policy.end_ids[0] == of_template  # supervised responses end like this
    assert set(policy.end_ids) == {of_template, 2, 5}
    assert policy.answer_ids("ab")[-1] == of_template


def test_a_template_that_rewrites_earlier_turns_is_refused_for_later_ones() -> None:
    policy = policy_of()
    policy.tokenizer.chat_template = "<user>{{ messages[-1].content }}<end><assistant>"
    prompt = m.letter_task(CFG).prompt(0)
    assert policy.prompt_ids(prompt, 0)
    with pytest.raises(m.UsageError):
        policy.prompt_ids(prompt, 1)


# == the loops =====================================================================================


class FakeActors:
    """Samples and trains after random delays; loses some groups."""

    def __init__(self, module: Any, seed: int, loses: bool) -> None:
        self.module = module
        self.rng = random.Random(seed)
        self.loses = loses
        self.version = 0
        self.trainer = asyncio.Lock()  # it makes one step after the other

    async def rollout(self, prompts: list[Any], group_size: int, seed: int | None) -> list[Any]:
        version = self.version
        await asyncio.sleep(min(0.1, 0.0005 * self.rng.paretovariate(0.7)))
        if self.loses and self.rng.random() < 0.05:
            raise self.module.ReplicaLost("generator_0 has died")
        found = []
        for prompt in prompts:
            if not (self.loses and self.rng.random() < 0.1):
                row = ([1, 2], [0, 1], [0.0, -1.0], [-1, version], ["a"], [False])
                found += [self.module.Episode(prompt, *row) for _ in range(2)]
        return found

    async def score(self, groups: list[list[Any]]) -> list[Any]:
        lost = [self.loses and self.rng.random() < 0.1 for _ in groups]
        return [self.module.Scores([None if gone else [0.0], [1.0]]) for gone in lost]

    async def step(self, groups: list[Any], waits: bool) -> Any:
        async with self.trainer:
            await asyncio.sleep(0.001 * self.rng.random())
            self.version += 1
        return self.module.StepStats(1, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


def trained(module: Any, order: str, staleness: int, loses: bool, seed: int = 0) -> Any:
    """A run of 60 steps; `dropped_early` is how many groups were dropped before its end."""
    cfg = replace(module.Config(), order=order, prompts_per_step=4, generators=3, group_size=2)

    async def train() -> Any:
        run = module.Run(cfg, FakeActors(module, seed, loses), module.letter_task(cfg))
        loops = module.AsyncRun(run, staleness)
        drop = loops.buffer._drop_old
        run.dropped_early = run.most_in_flight = 0

        def counted(version: int) -> None:
            before = run.accounting.dropped
            run.most_in_flight = max(run.most_in_flight, run.accounting.in_flight)
            drop(version)
            run.dropped_early += run.accounting.dropped - before

        loops.buffer._drop_old = counted
        await asyncio.wait_for(loops.train(60), 120)
        return run

    return asyncio.run(train())


@pytest.mark.parametrize("order", ["ready", "fifo"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("loses", [False, True])
def test_staleness_is_bounded_and_groups_add_up(order: str, staleness: int, loses: bool) -> None:
    for seed in range(3):
        run = trained(m, order, staleness, loses, seed)
        counts = run.accounting
        assert max(row["staleness"] for row in run.rows) <= staleness
        assert run.most_in_flight <= (staleness + 1) * 4
        assert (run.version, counts.trained, counts.in_flight) == (60, 240, 0)
        assert counts.started == counts.trained + counts.dropped + counts.lost
        assert (counts.lost > 0) is loses
        if order == "fifo":
            assert run.dropped_early == 0


def test_without_the_rule_samples_grow_too_old(without: Any) -> None:
    broken = without("async_rl")
    runs = [trained(broken, "ready", 1, False, seed) for seed in range(3)]
    assert max(row["staleness"] for run in runs for row in run.rows) > 1
    assert sum(trained(m, "ready", 1, False, seed).dropped_early for seed in range(3)) > 0


def test_calls_that_end_together_all_have_an_answer() -> None:
    async def both() -> list[int]:
        worker = object.__new__(m.Worker)
        worker.name, worker.spans, worker.thread = "w", [], ThreadPoolExecutor(1)
        sent = types.SimpleNamespace(broadcast=lambda spans: None)
        worker.timeline = types.SimpleNamespace(add=sent)
        worker.answer = lambda: 7
        call = inspect.getattr_static(m.Worker, "call")._method.__wrapped__
        calls = [asyncio.ensure_future(call(worker, "answer")) for _ in range(4)]
        await asyncio.sleep(0)  # they are in the thread
        time.sleep(0.5)  # meanwhile the loop is busy, so that their results come together
        return await asyncio.gather(*calls)

    assert asyncio.run(both()) == [7] * 4


# == data and rewards of one's own =================================================================


THINKS = "<think>Rome?</think>\n\nParis"
RIGHT = [("Paris", "Paris"), (" paris. ", "Paris"), (THINKS, "Paris"), ("7", 7), ("3 + 4 = 7", "7")]
RIGHT += [("so #### 1,234", 1234), (r"not \boxed{41} but \boxed{42}", "42"), ("is -3.50", "-3.5")]
RIGHT += [("cafe\u0301", "caf\u00e9"), ("«7» 👍", "«7» 👍"), (r"thus \boxed{42} holds", 42)]
WRONG_ANSWERS = [("London", "Paris"), ("42 or 43", "42"), ("", "Paris"), ("", "7"), ("-7", "7")]


def test_answers() -> None:
    assert all(m.is_answer(*pair) for pair in RIGHT)
    assert not any(m.is_answer(*pair) for pair in WRONG_ANSWERS)


WRONG_LINES = ["{", "[1]", '{"answer": 1}', '{"prompt": 3}', '{"prompt": [{"role": 1}]}']
WRONG_LINES += ["[" * 9999]


@pytest.mark.parametrize("line", WRONG_LINES, ids=range(len(WRONG_LINES)))
def test_a_wrong_line_is_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"prompt": "a", "answer": "b"}\n\n' + line + "\n")
    with pytest.raises(m.UsageError, match="line 3"):
        m.FileTask(str(file), 0)


def data_file(folder: Path, num: int = 60) -> Path:
    """Sums; some lines have what other programs take for ends of lines, and a mark at the front."""
    sums = [(number // 8, number % 8) for number in range(num)]
    lines = [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in sums]
    lines[3]["note"] = "🙂 é \u2028 \x85"
    text = "\n".join(json.dumps(line, ensure_ascii=False) for line in lines)
    file = folder / "data.jsonl"
    file.write_text("\ufeff" + text, encoding="utf-8")
    return file


def test_a_file_has_each_prompt_once_in_every_epoch(tmp_path: Path) -> None:
    task = m.FileTask(str(data_file(tmp_path, 30)), 0)
    orders = [[str(task.prompt(30 * e + i).turns) for i in range(30)] for e in range(3)]
    assert [len(set(order)) for order in orders] == [30, 30, 30]
    assert orders[0] != orders[1]
    trained_on = {str(p.turns) for p in itertools.islice(m.training_prompts(task), 100)}
    held_out = {str(p.turns) for p in m.held_out_prompts(task, 10)}
    assert held_out
    assert not trained_on & held_out


def test_python_of_the_user_is_loaded_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "own_neighbour.py").write_text("VALUE = 7")
    own = tmp_path / "own_code.py"
    own.write_text("from own_neighbour import VALUE\ndef f():\n    return VALUE\n")
    assert m.load_python(f"{own}:f", "--reward")() == 7
    wrong = tmp_path / "own_wrong.py"
    wrong.write_text("x = 1\ny = x / 0\n")
    with pytest.raises(m.UsageError, match=r"own_wrong\.py, line 2"):
        m.load_python(f"{wrong}:f", "--reward")
    for spec in (f"{own}:g", f"{own}", f"{tmp_path}/none.py:f", "own_code:f"):
        with pytest.raises(m.UsageError):
            m.load_python(spec, "--reward")


RESULTS = [(0.5, [0, 0.5]), (True, [0, 1]), ([1, 0], [1, 0]), ((0.25, 1), [0.25, 1])]
RESULTS += [(torch.tensor([0.25, 0.5]), [0.25, 0.5]), (torch.tensor(0.5), [0, 0.5]), (None, None)]
NO_REWARDS = [math.nan, math.inf, 1e300, [1], [1, 2, 3], "x", [None, 1], {}, LookupError("no")]


def test_results_of_score() -> None:
    for result, rewards in RESULTS:
        assert m.rewards_from(result, 2) == rewards
    for result in NO_REWARDS:
        with pytest.raises((ValueError, TypeError, LookupError)):
            m.rewards_from(result, 2)


def test_each_episode_of_a_group_is_scored_by_itself() -> None:
    async def later(value: Any) -> Any:
        await asyncio.sleep(0)
        if isinstance(value, Exception):
            raise value
        return value

    class Own(m.Task):
        def score(self, prompt: Any, responses: list[str]) -> Any:
            found = results[responses[0]]
            if isinstance(found, BaseException):
                raise found
            return later(found[0]) if isinstance(found, tuple) else found

    results = {"a": 0.5, "b": ValueError("no b"), "c": None, "d": math.nan, "e": SystemExit(3)}
    for extra in ({}, {"f": (0.25,), "g": (KeyError("no g"),), "h": (None,)}):
        results |= extra
        asked = [(m.Prompt(0, (m.user_turn("p", 1),)), [response]) for response in results]
        scores = m.score_own_group(Own(), asked)
        wanted = {"a": [0.5], "f": [0.25]}
        assert scores.rewards == [wanted.get(response) for response in results]
        assert len(scores.errors) == (4 if extra else 3)
        assert any("no b" in error and Path(__file__).name in error for error in scores.errors)


OWN_REWARDS = """
import asyncio, concurrent.futures, os, signal, subprocess, time

def alarm():
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 5)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return 0.25

def double(x):
    return 2 * x

def raises():
    raise LookupError("nothing here")

def leaves():
    raise SystemExit(3)

def in_pool(function, x):
    return concurrent.futures.ProcessPoolExecutor(1).submit(function, x).result()

run = lambda: asyncio.run(asyncio.sleep(0, 0.5))
coroutine = lambda: asyncio.sleep(0, 0.75)
pool = lambda: in_pool(double, 0.5)
child = lambda: subprocess.Popen(["sleep", "1000"]) and 0.125
dies = lambda: os._exit(3)
hangs = lambda: in_pool(time.sleep, 1000)
reward = lambda prompt, response, answer: globals()[response]()
"""


def test_reward_functions_as_people_write_them(tmp_path: Path, monkeypatch: Any) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))  # as prepare_environment does for workers
    own = tmp_path / "own_rewards.py"
    own.write_text(OWN_REWARDS)
    task = str(data_file(tmp_path))
    cfg = replace(CFG, model="x", task=task, reward=f"{own}:reward", reward_deadline=8.0)
    worker = object.__new__(m.RewardWorker)
    worker.setup(0, cfg, m.Environment(m.own_task, m.score_own_group, m.OwnProcess))
    wanted = {"alarm": 0.25, "run": 0.5, "coroutine": 0.75, "pool": 1.0, "child": 0.125}
    names = [*wanted, "raises", "leaves", "dies", "alarm", "hangs", "pool"]
    prompt = m.Prompt(0, (m.user_turn("p", 1),))
    scores = worker.score([[(prompt, [name])] for name in names])
    for name, found in zip(names, scores, strict=True):
        assert found.rewards == [[wanted[name]] if name in wanted else None], found.errors
        assert bool(found.errors) is (name not in wanted)
    assert "own_rewards.py, line" in scores[names.index("raises")].errors[0]
    assert left(mark, 1)  # its process is there until it is released
    worker.release()
    assert left(mark) == []


# == commands ======================================================================================

WRONG = (
    "--stage weigth_sync|--only nothing|--max-stalenes 2|--steps 0|--steps x|--steps|more|--lr -1"
)
WRONG += "|--loss ppp|--max-staleness -1|--group-size 1|--temperature 0|--train --task nothing"
WRONG += (
    "|--train --task own.py:Task|--train --model ./none|--train --model qwen2 --task none.jsonl"
)
WRONG += "|--train --model qwen2 --task wrong.jsonl|--train --model qwen2 --reward wrong.jsonl:f"
LATE = "bug: what a worker finds out is told behind a line of Monarch, with another beginning"
LATE_WRONG = pytest.param(
    "--train --model qwen2 --max-new-tokens 9999",
    marks=pytest.mark.xfail(reason=LATE, strict=False),
)


@pytest.mark.parametrize("words", [*WRONG.split("|"), LATE_WRONG])
def test_command_wrong_usage_is_one_line_and_status_2(tmp_path: Path, words: str) -> None:
    if "qwen2" in words:
        model_folder(tmp_path, characters="0123456789+")
        (tmp_path / "wrong.jsonl").write_text('{"prompt": 3}')
    found = run(*words.split(), folder=tmp_path)
    assert found.returncode == 2, found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert "Traceback" not in found.stderr + found.stdout


def test_command_the_list_has_every_stage(tmp_path: Path) -> None:
    found = run("--list", folder=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert all(name in found.stdout for name in m.STAGES)


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


@pytest.fixture(scope="session")
def tour(tmp_path_factory: Any) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("tour")
    found = run("--json", "out.json", folder=folder)
    assert found.returncode == 0, found.stdout + found.stderr
    assert [path.name for path in folder.iterdir()] == ["out.json"]
    return {s["name"]: s for s in json.loads((folder / "out.json").read_text())["stages"]}


@pytest.mark.parametrize("stage", list(m.STAGES))
def test_command_the_tour_confirms_a_stage(tour: Any, stage: str) -> None:
    assert list(tour) == list(m.STAGES)
    assert tour[stage]["checks"]
    assert all(check["ok"] for check in tour[stage]["checks"])
    assert set(FIGURES.get(stage, "").split()) <= set(tour[stage]["figures"])


@pytest.mark.parametrize("stage", list(m.STAGES))
def test_command_a_stage_fails_without_its_mechanism(tmp_path: Path, stage: str) -> None:
    found = run("--only", stage, file=changed(tmp_path, stage), folder=tmp_path)
    assert found.returncode == 1, found.stdout + found.stderr
    assert re.search(r"^\s*FAIL ", found.stdout, re.MULTILINE)


def test_command_the_whole_way_of_a_user(tmp_path: Path) -> None:
    model_folder(tmp_path, characters="0123456789+")
    data_file(tmp_path)
    words = "--train --model qwen2 --task data.jsonl --sft-steps 6 --steps 6 --prompts-per-step 4"
    words += " --group-size 4 --max-new-tokens 4 --lr 1e-3 --eval-every 2 --evaluate 2"
    words += " --json out.json --log log.jsonl --export out"
    found = run(*words.split(), folder=tmp_path)
    assert found.returncode == 0, found.stdout + found.stderr
    figures = json.loads((tmp_path / "out.json").read_text())["train"]
    assert (figures["steps"], figures["workers_replaced"]) == (6, 0)
    names = ("trained", "dropped", "lost", "in_flight")
    assert figures["started"] == sum(figures[name] for name in names)
    assert figures["staleness_max"] <= CFG.max_staleness
    assert figures["k3_max"] < 1e-6
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "qwen2")
    pairs = zip(model.parameters(), before.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    transformers.AutoTokenizer.from_pretrained(tmp_path / "out")


def test_command_sigterm_ends_a_run_in_order(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        [sys.executable, str(FILE), "--train", "--steps", "100000"],
        cwd=tmp_path,
        env=os.environ | {MARK: mark},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert any(line.startswith("step") for line in process.stdout)
    assert len(left(mark, 1)) > 3
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert left(mark) == []


# -- what readers and helpers found ----------------------------------------------------------------


def test_an_unforeseen_error_in_a_request_ends_the_run() -> None:
    class Broken:
        async def rollout(self, *_: Any) -> list[Any]:
            return [m.Episode(m.letter_task(m.Config()).prompt(0))]

        async def score(self, *_: Any) -> list[Any]:
            raise KeyError("nobody has foreseen this")

    async def train() -> None:
        cfg = replace(m.Config(), eval_prompts=1, prompts_per_step=4)
        run = m.Run(cfg, Broken(), m.letter_task(cfg))
        await asyncio.wait_for(m.AsyncRun(run, 2).train(5), 30)

    with pytest.raises(KeyError):
        asyncio.run(train())


def test_a_conversation_that_is_over_stays_however_long() -> None:
    cfg = replace(m.Config(), device="cpu")
    policy = m.Policy(cfg, m.letter_task(cfg), torch.float32)
    short = m.Prompt(0, (m.user_turn("a", "a"), m.user_turn("b", "b")))
    long = m.Prompt(1, (m.user_turn("a" * 40, "a"),))
    policy.context = 40 + 3 + policy.max_new_tokens  # the long one fits, before its response
    episodes = m.rollout(policy, [short, long], 2, 0, lambda: 0)
    assert [episode.prompt.number for episode in episodes] == [0, 0, 1, 1]


def test_kl_holds_to_the_weights_after_the_warm_start() -> None:
    cfg = replace(m.Config(), device="cpu", kl=0.1, lr=1e-3, prompts_per_step=2)
    policy = m.Policy(cfg, m.letter_task(cfg), torch.float32)
    learner = m.Learner(policy, cfg)
    before = {name: p.clone() for name, p in policy.model.state_dict().items()}
    learner.supervise(m.letter_task(cfg), 2)
    reference = learner.reference.model.state_dict()
    assert all(torch.equal(reference[name], p) for name, p in policy.model.state_dict().items())
    assert not all(torch.equal(reference[name], p) for name, p in before.items())


def test_a_process_that_has_just_died_is_a_loss() -> None:
    process = subprocess.Popen(["true"])
    process.wait()

    async def watch() -> str:
        lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        processes = m.Processes(None, [process.pid])
        replica = m.Replica("one", processes, None, lost)
        async with replica.watched(5.0):
            return await asyncio.wait_for(lost, 5)

    assert asyncio.run(watch()) == "has died"
