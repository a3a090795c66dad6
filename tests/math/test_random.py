from __future__ import annotations

import pytest
import torch
from torch import Tensor

from forerun.math import random
from forerun.math.random import MASK, RandomStream, draft_uniforms, philox, span, uniforms
from forerun.types import Keys, Rule
from support.oracle import chi_square_ok, keys_for

# Known answers published with Random123, the authors' own implementation.
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter: tuple[int, ...], key: tuple[int, ...], answer: tuple[int, ...]):
    words = philox(torch.tensor(counter).unsqueeze(1), torch.tensor(key).unsqueeze(1))
    assert tuple(words.flatten().tolist()) == answer


def python_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        first, second = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & MASK, (first >> 32) ^ c3 ^ k1, first & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def test_a_uniform_is_the_documented_function_of_its_key():
    keys = Keys(torch.tensor([-7, 1 << 40]), torch.tensor([3, MASK]), torch.tensor([0, 9]), torch.tensor([100, 5]))
    drawn = uniforms(keys, ((RandomStream.ACCEPT, 2), (RandomStream.TARGET, 4)))
    for b in range(2):
        seed = int(keys.seed[b]) & (2**64 - 1)
        key = (seed & MASK, seed >> 32)
        accept = python_philox((int(keys.request_id[b]), int(keys.round[b]), 2, 1), key)
        target = python_philox((int(keys.request_id[b]), 0, int(keys.position[b]) + 4, 3), key)
        for column, words in enumerate((accept, target)):
            assert drawn[b, column] == (((words[0] >> 5) << 26) + (words[1] >> 6)) / 2**53


def test_tensor_and_array_arithmetic_give_the_same_words(monkeypatch: pytest.MonkeyPatch):
    generator = torch.Generator().manual_seed(0)
    counter = torch.randint(0, 1 << 32, (4, 5, 100), generator=generator)
    key = torch.randint(0, 1 << 32, (2, 5, 100), generator=generator)
    keys = keys_for(33, seed=-3, round_=4, position=7)
    draws = span(RandomStream.ACCEPT, 3) + span(RandomStream.TARGET, 2)
    arrays = philox(counter, key), uniforms(keys, draws)
    random._constants.cache_clear()
    random._columns.cache_clear()
    monkeypatch.setattr(random, "_words", lambda tensor: tensor)
    monkeypatch.setattr(random, "_empty", lambda *shape: torch.empty(shape[:3], dtype=torch.int64))
    tensors = philox(counter, key), uniforms(keys, draws)
    random._constants.cache_clear()
    random._columns.cache_clear()
    assert torch.equal(arrays[0], tensors[0])
    assert torch.equal(arrays[1], tensors[1])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits():
    keys = keys_for(64, seed=5, round_=2)
    there = Keys(*(getattr(keys, name).cuda() for name in ("seed", "request_id", "round", "position")))
    draws = span(RandomStream.ACCEPT, 5) + span(RandomStream.TARGET, 3)
    assert torch.equal(uniforms(keys, draws), uniforms(there, draws).cpu())


def test_numbers_do_not_depend_on_the_company_they_are_drawn_in():
    keys = keys_for(8, seed=11)
    everything = uniforms(keys, span(RandomStream.ACCEPT, 4) + span(RandomStream.FINAL, 5))
    alone = Keys(keys.seed[3:4], keys.request_id[3:4], keys.round[3:4], keys.position[3:4])
    assert torch.equal(uniforms(alone, ((RandomStream.FINAL, 2),))[0, 0], everything[3, 6])


@pytest.mark.parametrize("field", ["seed", "request_id", "round"])
def test_every_part_of_the_key_matters(field: str):
    keys = keys_for(4)
    parts = {name: getattr(keys, name) for name in ("seed", "request_id", "round", "position")}
    changed = Keys(**{**parts, field: parts[field] + 1000})
    draws = span(RandomStream.DRAFT, 3)
    assert not bool((uniforms(keys, draws) == uniforms(changed, draws)).any())


def test_both_halves_of_the_seed_matter():
    low, high = keys_for(1, seed=1), keys_for(1, seed=1 + (1 << 32))
    assert uniforms(low, span(RandomStream.DRAFT, 1)) != uniforms(high, span(RandomStream.DRAFT, 1))


def test_streams_and_positions_never_share_a_number():
    draws = tuple((stream, i) for stream in RandomStream for i in range(50))
    drawn = uniforms(keys_for(20), draws)
    assert drawn.unique().numel() == drawn.numel()


def test_the_coupled_draft_draws_with_the_targets_own_numbers():
    early, late = keys_for(3, round_=2, position=10), keys_for(3, round_=9, position=12)
    draft = draft_uniforms(early, 4, Rule.COUPLED)
    assert torch.equal(draft, uniforms(early, span(RandomStream.TARGET, 4)))
    assert torch.equal(draft[:, 2:], uniforms(late, span(RandomStream.TARGET, 2)))


@pytest.mark.parametrize("rule", [Rule.TOKEN, Rule.BLOCK])
def test_a_sampled_draft_draws_fresh_numbers_every_round(rule: Rule):
    first = draft_uniforms(keys_for(3, round_=0, position=0), 4, rule)
    second = draft_uniforms(keys_for(3, round_=1, position=0), 4, rule)
    assert torch.equal(first, uniforms(keys_for(3), span(RandomStream.DRAFT, 4)))
    assert not bool((first == second).any())


def lag_one(u: Tensor) -> float:
    centred = u - u.mean()
    return float((centred[1:] * centred[:-1]).mean() / centred.var())


@pytest.mark.parametrize("along", ["request", "round", "position", "stream"])
def test_consecutive_numbers_are_uncorrelated(along: str):
    number = 20_000
    if along == "request":
        u = uniforms(keys_for(number), ((RandomStream.ACCEPT, 0),)).flatten()
    elif along == "round":
        zero = torch.zeros(number, dtype=torch.int64)
        u = uniforms(Keys(zero, zero, torch.arange(number), zero), ((RandomStream.ACCEPT, 0),)).flatten()
    elif along == "position":
        u = uniforms(keys_for(1), span(RandomStream.ACCEPT, number)).flatten()
    else:
        u = uniforms(keys_for(number // len(RandomStream)), tuple((stream, 0) for stream in RandomStream)).flatten()
    assert abs(lag_one(u)) < 4 / number**0.5
    assert chi_square_ok(torch.histc(u, 100, 0, 1), torch.full((100,), number / 100))


def test_a_generator_seeded_afresh_for_every_draw_is_caught():
    u = uniforms(keys_for(1), ((RandomStream.ACCEPT, 0),)).expand(20_000, 1).flatten()
    wobbling = u + torch.linspace(0, 1e-6, 20_000, dtype=torch.float64)
    assert not chi_square_ok(torch.histc(u, 100, 0, 1), torch.full((100,), 200.0))
    assert abs(lag_one(wobbling)) > 4 / 20_000**0.5


def test_numbers_have_53_bits_and_stay_below_one():
    u = uniforms(keys_for(100_000), ((RandomStream.FINAL, 0),)).flatten()
    assert u.dtype == torch.float64
    assert bool(((u >= 0) & (u < 1)).all())
    bits = (u * 2**53).long()
    assert torch.equal(bits.double() / 2**53, u)
    assert all(0.48 < float(((bits >> i) & 1).double().mean()) < 0.52 for i in range(53))
