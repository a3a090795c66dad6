"""The GGUF reader, against files written by the tests and values computed one by one."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from forerun.errors import ForerunError, ModelNotFound, UnsupportedModel
from forerun.loading import embedded
from forerun.loading.gguf import read_gguf
from loading.gguf_writer import Raw, Typed, plain, write_gguf, write_llama


def half(number: float) -> float:
    return struct.unpack("<e", struct.pack("<e", number))[0]


def f32(number: float) -> float:
    return struct.unpack("<f", struct.pack("<f", number))[0]


def nibbles(values: list[int]) -> bytes:
    """Value i in the low half of byte i, value i + 16 in its high half."""
    return bytes(values[i] | values[i + 16] << 4 for i in range(16))


def some_blocks(form: str, count: int) -> tuple[int, bytes, list[float]]:
    """(GGUF's number of the format, bytes, the values they stand for)."""
    rng = random.Random(form)
    data, values = b"", []
    for _ in range(count):
        scale, low = half(rng.uniform(-2, 2)), half(rng.uniform(-9, 9))
        small = [rng.randrange(16) for _ in range(32)]
        wide = [-128, 127, *(rng.randrange(-128, 128) for _ in range(30))]
        match form:
            case "F32":
                number, block, new = 0, struct.pack("<f", low + scale), [f32(low + scale)]
            case "F16":
                number, block, new = 1, struct.pack("<e", scale), [scale]
            case "Q4_0":
                number, block, new = 2, struct.pack("<e", scale) + nibbles(small), [scale * (v - 8) for v in small]
            case "Q4_1":
                number, block = 3, struct.pack("<ee", scale, low) + nibbles(small)
                new = [f32(f32(scale * v) + low) for v in small]
            case _:
                number, block, new = 8, struct.pack("<e32b", scale, *wide), [scale * v for v in wide]
        data += block
        values += new
    return number, data, values


@pytest.mark.parametrize("form", ["F32", "F16", "Q4_0", "Q4_1", "Q8_0"])
def test_every_format_is_decoded_exactly(tmp_path: Path, form: str) -> None:
    number, data, values = some_blocks(form, 96)
    shape = (3, len(values) // 3)
    # The one before it is odd in size: the next has to be found by its alignment.
    tensors = {"before": plain(torch.arange(5.0)), "x": Raw(shape, number, data), "after": plain(torch.arange(3.0))}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", {}, tensors))
    expected = torch.tensor(values, dtype=torch.float64).float().reshape(shape)
    assert file.tensor("x").dtype == torch.float32
    torch.testing.assert_close(file.tensor("x"), expected, rtol=0, atol=0)
    torch.testing.assert_close(file.tensor("before"), torch.arange(5.0))
    torch.testing.assert_close(file.tensor("after"), torch.arange(3.0))


def test_metadata_of_every_type_comes_back(tmp_path: Path) -> None:
    numbers = {"u8": 255, "i8": -128, "u16": 65535, "i16": -32768, "u32": 2**32 - 1, "i32": -(2**31), "f32": 0.5,
               "bool": True, "u64": 2**64 - 1, "i64": -(2**63), "f64": 0.1}  # fmt: skip
    metadata = {kind: Typed(kind, value) for kind, value in numbers.items()}
    arrays = {f"{kind}s": Typed(kind, [value, value]) for kind, value in numbers.items()}
    texts = {"text": "naïve 日本", "texts": ["", "Ġa", "👍"]}
    file = read_gguf(write_gguf(tmp_path / "x.gguf", {**metadata, **arrays, **texts}, {}))
    assert file.metadata == {**numbers, **{f"{kind}s": [v, v] for kind, v in numbers.items()}, **texts}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    metadata = {"name": "x", "list": ["a", "b"], "numbers": Typed("u16", [1, 2]), "general.alignment": Typed("u32", 32)}
    tensors = {"a": plain(torch.ones(8)), "q": Raw((2, 32), 3, bytes(40))}
    file = write_gguf(tmp_path_factory.mktemp("gguf") / "x.gguf", metadata, tensors).read_bytes()
    return file[: len(file) - 24]  # without the padding after the last tensor, which nobody needs


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, sample: bytes) -> None:
    path = tmp_path / "cut.gguf"
    path.write_bytes(sample)
    read_gguf(path)
    for size in range(len(sample)):
        path.write_bytes(sample[:size])
        with pytest.raises(ModelNotFound, match="fetch it again"):
            read_gguf(path)


@settings(
    max_examples=400, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_damaged_byte_never_gives_a_strange_error(tmp_path: Path, sample: bytes, place: float, byte: int) -> None:
    damaged = bytearray(sample)
    damaged[int(place * len(sample))] = byte
    path = tmp_path / "damaged.gguf"
    path.write_bytes(damaged)
    try:
        file = read_gguf(path)
        for name in file.records:
            file.tensor(name)
    except ForerunError:
        pass


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no GGUF file"):
        read_gguf(tmp_path / "absent.gguf")
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 and more")
    with pytest.raises(ModelNotFound, match="not a GGUF file"):
        read_gguf(other)
    with pytest.raises(UnsupportedModel, match="version 1"):
        read_gguf(write_gguf(tmp_path / "old.gguf", {}, {}, version=1))
    with pytest.raises(UnsupportedModel, match=r"'x' has format number 10.*Q4_1"):
        read_gguf(write_gguf(tmp_path / "q2k.gguf", {}, {"x": Raw((256,), 10, bytes(84))}))
    with pytest.raises(ModelNotFound, match="no whole number of Q8_0 blocks"):
        read_gguf(write_gguf(tmp_path / "odd.gguf", {}, {"x": Raw((33,), 8, bytes(68))}))
    with pytest.raises(ModelNotFound, match="alignment of 0"):
        read_gguf(write_gguf(tmp_path / "flat.gguf", {"general.alignment": Typed("u32", 0)}, {}))


def test_a_missing_entry_is_named(tmp_path: Path) -> None:
    file = read_gguf(write_llama(tmp_path / "x.gguf"))
    assert file.need("llama.block_count") == 2
    with pytest.raises(UnsupportedModel, match=r"no 'llama\.expert_count'"):
        file.need("llama.expert_count")


ODD = {
    "a text for a number": {"llama.attention.head_count": "four"},
    "no heads": {"llama.attention.head_count": Typed("u32", 0)},
    "a wrong number of heads": {"llama.attention.head_count": Typed("u32", 5)},
    "a number for a list": {"tokenizer.ggml.tokens": Typed("u32", 3)},
    "a number for a text": {"tokenizer.ggml.pre": Typed("u32", 3)},
    "merges that merge nothing": {"tokenizer.ggml.merges": ["abc", "d"]},
    "a token that is not there": {"tokenizer.ggml.eos_token_id": Typed("u32", 999)},
    "too few kinds of tokens": {"tokenizer.ggml.token_type": ["1"]},
}


@pytest.mark.parametrize("name", ODD)
def test_odd_metadata_is_refused_with_the_files_name(name: str, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "odd.gguf", change=lambda metadata: metadata.update(ODD[name]))
    with pytest.raises(ForerunError, match=r"odd\.gguf"):
        embedded.convert(path, tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["odd.gguf"]


def test_arrays_within_arrays_end(tmp_path: Path) -> None:
    path = tmp_path / "deep.gguf"
    nested = struct.pack("<IQ", 9, 1) * 100_000
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"k" + struct.pack("<I", 9) + nested
    )
    with pytest.raises(ModelNotFound, match=r"deep\.gguf.*arrays more than"):
        read_gguf(path)


def test_an_array_longer_than_the_file_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "long.gguf"
    entry = struct.pack("<Q", 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**60)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + entry)
    with pytest.raises(ModelNotFound, match="cut short"):
        read_gguf(path)
