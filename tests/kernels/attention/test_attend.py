"""`kernels.attention.attend.attend_ragged` against `math.ragged_attention.attend_ragged`, interpreted or on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from forerun.errors import InvalidArgument
from forerun.kernels.attention import attend as kernel
from forerun.kernels.attention import device as attention_device
from forerun.kernels.attention import shape as shapes
from forerun.kernels.attention.shape import TUNING, AttentionTuning
from forerun.math import attention as dense
from forerun.math import ragged_attention as reference
from forerun.math.attention import Form, Scale
from forerun.math.ragged_attention import Reach
from forerun.types import RaggedRows
from kernels.attention.cases import ROWS, Case, make_case, random_tree
from support import rounding
from support.interpreter import DEVICE, kernel_tests, on_gpu_alone

pytestmark = kernel_tests()

FORMS = (Form.PAD, Form.SPLIT, Form.KEYS)
# Blocks of 16 keys and chunks of as few: rows of 73 keys then have five chunks, of which queries see all, some or none.
SMALL = replace(TUNING, block_bytes=0, resident=1000)
# Relative and absolute. The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {torch.float32: (1e-6, 3e-6), torch.float16: (2e-3, 1e-3), torch.bfloat16: (2e-2, 1e-2)}
IN_FLOAT64 = 1e-10  # a rounding is 1e-16 of numbers below 100, and a result takes some hundreds


@pytest.fixture(autouse=True)
def nothing_is_read_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory is often zero, which would hide a chunk that is merged and was never made."""
    real = kernel._parts

    def poisoned(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
        parts = real(*arguments)
        if arguments[-1].is_cut:
            for part in parts:
                part.fill_(torch.nan)
        return parts

    monkeypatch.setattr(kernel, "_parts", poisoned)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    relative, absolute = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=relative, atol=absolute)


def check(case: Case, form: Form, tuning: AttentionTuning = SMALL, is_shared: bool = False) -> None:
    """Rows that are cut: into shares, where their lengths are known and differ, and into chunks.

    Rows in blocks are cut into chunks, or, with `is_shared`, into shares.
    """
    want = reference.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale)
    assert want.isfinite().all()
    size = 2 * shapes.choose_shape(case.query, case.keys, case.reach, form, tuning).block_keys
    blocks, unknown = case.in_blocks(size), replace(case, reach=replace(case.reach, num_keys=None))
    if form is Form.KEYS and not is_shared:
        blocks = replace(blocks, reach=replace(blocks.reach, num_keys=None))
    for held in (case, blocks, unknown)[: 2 + (form is Form.KEYS)]:
        got = kernel.attend_ragged(held.query, held.keys, held.values, held.reach, held.scale, form, tuning)
        assert got.dtype == case.query.dtype
        close(got, want)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"window": 4},
        {"window": 12},
        {"window": 40},
        {"softcap": 2.0},
        {"sinks": True},
        {"sinks": True, "window": 20, "softcap": 3.0},
        {"distances": 7},
        {"distances": 99, "window": 40},
    ],
    ids=lambda how: "-".join(how) or "plain",
)
@pytest.mark.quick("sinks-window-softcap-keys", "plain-pad")
def test_what_a_query_sees(form: Form, how: dict[str, Any]) -> None:
    check(make_case(**how), form)


MOST_PROGRAMS = 65535  # of a CUDA grid's second and third axis


@pytest.mark.parametrize(
    ("rows", "form"),
    [
        (RaggedRows(tuple(range(65)), (0,) * 65, (4096, *(1,) * 64)), Form.SPLIT),  # 65 rows of 1024 blocks
        (RaggedRows((0,), (0,), (MOST_PROGRAMS + 1,)), Form.KEYS),
    ],
    ids=("many rows", "many tokens"),
)
def test_a_long_prompt_beside_many_rows_fits_the_grid(
    rows: RaggedRows, form: Form, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launch beyond it fails on a GPU; the interpreter has no such limit, so launches are looked at and not run."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *arguments, **options: None

    monkeypatch.setattr(kernel, "attend_kernel", Recorder())
    monkeypatch.setattr(kernel, "merge_kernel", Recorder())
    made = make_case(rows, heads=(4, 1), sizes=(16, 16))
    kernel.attend_ragged(
        made.query, made.keys, made.values, made.reach, made.scale, form, AttentionTuning(most_queries=16)
    )
    assert len(grids) == (2 if form is Form.KEYS else 1)
    assert max(grids)[0] > MOST_PROGRAMS, "control"
    assert all(max(grid[1:]) <= MOST_PROGRAMS for grid in grids), grids


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "sizes"), [((3, 3), (80, 80)), ((8, 1), (96, 96)), ((6, 2), (128, 64)), ((1, 1), (256, 256))]
)
def test_shapes(dtype: torch.dtype, heads: tuple[int, int], sizes: tuple[int, int]) -> None:
    rows = RaggedRows((1, 0), (30, 3), (2, 6))
    check(make_case(rows, dtype=dtype, heads=heads, sizes=sizes), Form.AUTO, TUNING)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_one_token_of_one_row(form: Form) -> None:
    check(make_case(RaggedRows((0,), (0,), (1,))), form)
    check(make_case(RaggedRows((0,), (33,), (1,)), heads=(1, 1)), form)


@pytest.mark.quick("pad")
@pytest.mark.parametrize("form", FORMS)
def test_more_queries_than_a_block_holds(form: Form) -> None:
    """Each block of queries stops where its last one does, and begins where its first one's window does."""
    rows = RaggedRows((0, 1), (9, 0), (17, 2))
    for window in (0, 5):
        check(make_case(rows, heads=(2, 1), window=window), form, replace(SMALL, most_queries=16))


@pytest.mark.quick("pad")
@pytest.mark.parametrize("form", FORMS)
def test_host_knows_a_bound_only(form: Form) -> None:
    """In a captured graph: the grid is for the capacity, the lengths are the device's."""
    check(make_case(heads=(2, 1), longest=82), form)
    check(make_case(heads=(2, 1), longest=82, window=11), form)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_scores_that_would_overflow(form: Form) -> None:
    check(make_case(heads=(2, 1), gain=3e3), form)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_another_text_is_seen_whole(form: Form) -> None:
    """Cross-attention: no order among keys, and a source may be shorter than the text that reads it."""
    case = make_case(RaggedRows(slots=(3, 0, 2), past=(70, -2, 17), counts=(3, 5, 1)))
    whole = replace(case, reach=replace(case.reach, across=True))
    check(whole, form)
    first, every = (reference.attend_ragged(c.query, c.keys, c.values, c.reach, c.scale) for c in (case, whole))
    assert not torch.equal(first[:3], every[:3]), "causality would hide keys from all but the last"


@pytest.mark.parametrize("form", FORMS)
def test_a_token_before_the_beginning_disturbs_nobody(form: Form) -> None:
    """A draft's first step takes two tokens, of which a row of one token has but the second."""
    case = make_case(RaggedRows((0, 1), (-1, 5), (2, 2)), heads=(2, 1), distances=4)
    check(case, form)
    alone = make_case(RaggedRows((0,), (0,), (1,)), heads=(2, 1))
    alone = replace(alone, query=case.query[1:2], keys=case.keys, values=case.values, scale=case.scale)
    check(alone, form)
    got, want = (reference.attend_ragged(c.query, c.keys, c.values, c.reach, c.scale) for c in (case, alone))
    assert torch.equal(got[1], want[0])


def test_reference_of_a_bias_by_distance_is_the_masked_one() -> None:
    case = make_case(heads=(2, 2), distances=6, dtype=torch.float64)
    position = torch.cat([torch.arange(p, p + c) for p, c in zip(ROWS.past, ROWS.counts, strict=True)])[:, None]
    key = torch.arange(ROWS.longest)
    assert case.scale.by_distance is not None
    bias = case.scale.by_distance.cpu()[:, (position - key).clamp(0, 5)].transpose(0, 1)  # [N, H, S]
    added = bias.masked_fill((key > position)[:, None], -torch.inf).to(DEVICE)
    keys, values = case.keys.nan_to_num(0), case.values.nan_to_num(0)
    want = dense.attend(case.query, keys, values, dense.plan(ROWS, added.double(), 1, DEVICE), Scale(case.scale.factor))
    got = reference.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale)
    torch.testing.assert_close(got, want, rtol=0, atol=IN_FLOAT64)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_trees(form: Form) -> None:
    rows = RaggedRows((2, 0), (21, 3), (7, 4))
    for window in (0, 9):
        case = make_case(rows, heads=(2, 1), window=window, sinks=True)
        check(case.with_tree(random_tree(rows, 8)), form)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("form", [Form.SPLIT, Form.KEYS])
def test_a_bias_by_distance_counts_depths_of_a_tree(form: Form) -> None:
    rows = RaggedRows((2, 0), (21, 3), (7, 4))
    case = make_case(rows, heads=(2, 1), distances=9)
    check(case.with_tree(random_tree(rows, 8)), form)


def test_reference_of_a_bias_by_distance_in_a_tree() -> None:
    """Two siblings behind one token: each is one step from it, and neither sees the other."""
    case = make_case(RaggedRows((0,), (2,), (3,)), heads=(1, 1), distances=9)
    tree = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=DEVICE)
    found = reference.attend_ragged(case.query, case.keys, case.values, case.with_tree(tree).reach, case.scale)
    lone = make_case(RaggedRows((0,), (2,), (2,)), heads=(1, 1), distances=9)
    keys, values = case.keys.clone(), case.values.clone()
    keys[0, :, 3], values[0, :, 3] = case.keys[0, :, 4], case.values[0, :, 4]
    alone = reference.attend_ragged(case.query[[0, 2]], keys, values, lone.reach, case.scale)
    torch.testing.assert_close(found[[0, 2]], alone)


def test_a_chain_is_a_tree() -> None:
    rows = RaggedRows((1, 0), (30, 0), (3, 5))
    case, line = make_case(rows, heads=(2, 1)), torch.ones(5, 5, dtype=torch.bool).tril()
    chain = case.with_tree(torch.cat([line[:count] for count in rows.counts]).to(DEVICE))
    bound = 2 * rounding.of_attention(case.query, case.keys, case.values, case.scale.factor, rows.longest)
    for form in (Form.SPLIT, Form.KEYS):
        plain, tree = (
            kernel.attend_ragged(c.query, c.keys, c.values, c.reach, c.scale, form, SMALL) for c in (case, chain)
        )
        torch.testing.assert_close(plain, tree, rtol=0, atol=bound)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("form", FORMS)
def test_a_key_of_the_row_is_read(form: Form) -> None:
    """The negative control of the NaN that surrounds every row: one place earlier it spoils the row, and it alone."""
    case = make_case(heads=(2, 1))
    case.values[3, :, 72] = torch.nan
    got = kernel.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale, form, SMALL)
    assert got[2].isnan().all(), "the newest key of the first row is seen by that row's last query"
    assert got[3:].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("places", [1, 2, 3, 5, 8])
def test_balanced_splits_wherever_rows_begin_and_end(places: int) -> None:
    """Shares that hold several rows, end with one, or are a piece of one; rows of one key and of whole blocks.

    Two heads of an even group are merged by one program, the three of an odd one by three.
    """
    rows = RaggedRows((4, 0, 2, 1, 3), (0, 14, 15, 59, 31), (1, 2, 1, 3, 1))
    case, tuning = make_case(rows, heads=(2 + places % 2, 1)), replace(SMALL, resident=places / 132)
    check(case, Form.KEYS, tuning, is_shared=True)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", [{}, {"sinks": True, "window": 20, "softcap": 3.0}, {"distances": 7}])
def test_blocks_with_more_keys_than_queries(form: Form, how: dict[str, Any]) -> None:
    """Weights are then summed place by place, and over places at the end."""
    case = make_case(heads=(2, 1), **how)
    tuning = replace(SMALL, block_bytes=32 * shapes.power(case.query.shape[-1]) * case.query.element_size())
    shape = shapes.choose_shape(case.query, case.keys, case.reach, form, tuning)
    assert (shape.block_queries, shape.block_keys) == (16, 32)
    assert shape.block_queries * shape.block_keys <= attention_device.MOST_UNSUMMED.value
    check(case, form, tuning)


def test_in_a_recording_a_row_has_the_same_bits_in_any_company() -> None:
    """The control is the same row where the host knows the lengths: there it is cut where the others let it."""
    alone, company = RaggedRows((0, 1), (72, 0), (2, 2)), RaggedRows((0, 1), (72, 31), (2, 2))
    case = make_case(alone, heads=(2, 1))
    case.keys[1], case.values[1] = torch.randn_like(case.keys[1]), torch.randn_like(case.values[1])
    tuning = replace(SMALL, resident=3 / 132)

    def first_row(rows: RaggedRows, num_keys: int | None) -> torch.Tensor:
        reach = replace(reference.reach_of(rows, DEVICE), num_keys=num_keys)
        return kernel.attend_ragged(case.query, case.keys, case.values, reach, case.scale, Form.KEYS, tuning)[:2]

    assert torch.equal(first_row(alone, None), first_row(company, None))
    assert not torch.equal(first_row(alone, 76), first_row(company, 107))


@pytest.mark.parametrize("how", [{}, {"window": 12}, {"distances": 7}])
def test_blocks_are_the_same_rows(how: dict[str, Any]) -> None:
    """In the reference bit for bit. The control reads a row's blocks in another order."""
    case = make_case(**how)
    blocks = case.in_blocks(8)
    want, got = (reference.attend_ragged(c.query, c.keys, c.values, c.reach, c.scale) for c in (case, blocks))
    assert torch.equal(got, want)
    assert blocks.reach.table is not None
    turned = blocks.reach.table.clone()
    turned[3, :2] = turned[3, :2].flip(0)
    reach = replace(blocks.reach, table=turned)
    other = reference.attend_ragged(blocks.query, blocks.keys, blocks.values, reach, blocks.scale)
    assert torch.equal(other, want) == ("window" in how), "a window does not reach that far back"


@pytest.mark.parametrize("window", [0, 3, 25])
def test_reference_agrees_with_the_masked_one(window: int) -> None:
    """The reference of the kernels is itself held to the one that takes any mask."""
    case = make_case(window=window, softcap=4.0, sinks=True, dtype=torch.float64)
    keys, values = case.keys.nan_to_num(0), case.values.nan_to_num(0)
    position = torch.cat([torch.arange(p, p + c) for p, c in zip(ROWS.past, ROWS.counts, strict=True)])[:, None]
    key = torch.arange(ROWS.longest)
    mask = (key <= position) & (key > position - (window or 1000))
    plan = dense.plan(ROWS, mask.to(DEVICE), 2, DEVICE)
    want = dense.attend(case.query, keys, values, plan, case.scale)
    got = reference.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale)
    torch.testing.assert_close(got, want, rtol=0, atol=IN_FLOAT64)


class TestRule:
    """`auto` looks at shapes and nothing else."""

    @pytest.mark.parametrize(
        ("places", "lengths", "chunk"),
        [
            (8.25, (512,), 64),  # one row of 32 heads, 264 programs at once: no chunk shorter than a block
            (33, (4096,), 128),
            (33, (4096,) * 8, 1024),  # all at once: 32 of 33 places
            (33, (64, 640, 1216, 1792, 2368, 2944, 3520, 4096), 512),
            (8.25, (64, 640, 1216, 1792, 2368, 2944, 3520, 4096), 1024),  # in two rounds: none is long
            (33, (131072,), 2048),  # no more of them than the merging kernel takes
        ],
    )
    def test_chunks(self, places: float, lengths: tuple[int, ...], chunk: int) -> None:
        rows = RaggedRows(tuple(range(len(lengths))), tuple(n - 8 for n in lengths), (8,) * len(lengths))
        assert shapes.choose_chunk(places, max(lengths), reference.reach_of(rows, DEVICE), 64) == chunk

    def test_chunks_of_lengths_that_the_host_does_not_know(self) -> None:
        """As many as there would be if every row were as long as it may become."""
        rows = RaggedRows((0, 1), (100, 500), (8, 8))
        known = reference.reach_of(rows, DEVICE)
        unknown = replace(known, longest=4096, num_keys=None)
        assert shapes.choose_chunk(33, 4096, unknown, 64) == 256
        windowed = replace(unknown, window=1016)
        assert shapes.choose_chunk(33, 1024, windowed, 64) == 64

    @pytest.mark.parametrize(
        ("lengths", "balanced_splits", "pieces"),
        [
            ((64, 640, 1216, 1792, 2368, 2944, 3520, 4096), 33, 10),  # as many as places; 66 blocks in shares of 7.9
            ((64, 512), 11, 11),  # no more than key blocks, and a beginning for each row
        ],
    )
    def test_balanced_splits(self, lengths: tuple[int, ...], balanced_splits: int, pieces: int) -> None:
        rows = RaggedRows(tuple(range(len(lengths))), tuple(n - 8 for n in lengths), (8,) * len(lengths))
        found = shapes.choose_balanced_splits(33, max(lengths), reference.reach_of(rows, DEVICE), 64)
        assert found == (balanced_splits, pieces)

    def test_which_rows_are_split_evenly(self) -> None:
        """Rows that differ, as far as the host knows; even ones are even already."""
        spread, even = RaggedRows((0, 1), (100, 4000), (8, 8)), RaggedRows((0, 1), (4000, 4000), (8, 8))
        keys = torch.zeros(2, 8, 4096, 128, dtype=torch.bfloat16)
        query = torch.zeros(16, 32, 128, dtype=keys.dtype)
        known, same = (reference.reach_of(rows, torch.device("cpu")) for rows in (spread, even))
        for reach, is_shared in ((known, True), (same, False), (replace(known, num_keys=None), False)):
            shape = shapes.choose_shape(query, keys, reach, Form.AUTO)
            assert shape.form is Form.KEYS
            assert (shape.balanced_splits > 0) is is_shared

    @pytest.mark.parametrize(
        ("filling", "span", "is_even", "form"),
        [
            (0.2, 512, True, Form.KEYS),
            (0.97, 512, True, Form.SPLIT),
            (0.97, 512, None, Form.SPLIT),
            (0.97, 4096, True, Form.SPLIT),
            (0.97, 4096, False, Form.KEYS),
            (0.97, 4096, None, Form.KEYS),
            (1.94, 1024, None, Form.SPLIT),
            (3.9, 512, True, Form.PAD),
            (3.9, 512, False, Form.SPLIT),
            (3.9, 4096, False, Form.KEYS),
        ],
    )
    def test_form(self, filling: float, span: int, is_even: bool | None, form: Form) -> None:
        """Each line is a case that was measured on an H200."""
        assert shapes.choose_form(filling, span, is_even, saved=100.0) is form
        assert shapes.choose_form(0.2, span, is_even, saved=-1.0) is Form.SPLIT

    def test_merging_many_queries_costs_more(self) -> None:
        """Eight rows of 512 keys and eight key heads: cutting pays for one new token, not for eight."""
        rows = [RaggedRows(tuple(range(8)), (512 - n,) * 8, (n,) * 8) for n in (1, 8)]
        keys = torch.zeros(8, 8, 512, 128, dtype=torch.bfloat16)
        queries = [torch.zeros(r.num_tokens, 32, 128, dtype=keys.dtype) for r in rows]
        reaches = [reference.reach_of(r, torch.device("cpu")) for r in rows]
        found = [shapes.choose_shape(q, keys, r, Form.AUTO) for q, r in zip(queries, reaches, strict=True)]
        assert [shape.form for shape in found] == [Form.KEYS, Form.SPLIT]

    def shape(self, window: int, longest: int, form: Form = Form.AUTO) -> shapes.LaunchShape:
        numbers = torch.zeros(2, dtype=torch.int32)
        reach = Reach(numbers[:1], numbers[:1], numbers, 8, longest, window)
        return shapes.choose_shape(torch.zeros(8, 32, 128), torch.zeros(1, 8, longest, 128), reach, form)

    def test_a_window_is_all_there_is_to_share(self) -> None:
        assert self.shape(0, 8192).form is Form.KEYS
        assert self.shape(256, 8192).form is Form.SPLIT
        wide = self.shape(1024, 8192)
        assert wide.splits * wide.chunk < 2048

    def test_chunks_cover_the_longest_row(self) -> None:
        for longest in (1, 100, 513, 8192):
            for form in Form:
                shape = self.shape(0, longest, form)
                assert (shape.splits - 1) * shape.chunk < longest <= shape.splits * shape.chunk

    def test_what_was_asked_for(self) -> None:
        assert [self.shape(0, 8192, form).form for form in FORMS] == list(FORMS)


class TestRefusals:
    def test_kernel(self) -> None:
        case = make_case(RaggedRows((0,), (2,), (1,)))
        wide = torch.zeros(1, 4, 512, device=DEVICE)
        for query in (case.query.double(), wide, torch.zeros(1, 64, 4, device=DEVICE).mT):
            with pytest.raises(InvalidArgument, match="kernel cannot take this"):
                kernel.attend_ragged(query, case.keys, case.values, case.reach, Scale(1.0))

    def test_blocks_that_a_tile_would_straddle(self) -> None:
        case = make_case().in_blocks(24)
        with pytest.raises(InvalidArgument, match="blocks of 24 keys: the kernel reads 16 at a time"):
            kernel.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale, Form.SPLIT, SMALL)

    def test_a_bias_by_distance_is_for_one_text(self) -> None:
        case = make_case(distances=5)
        for attend in (kernel.attend_ragged, reference.attend_ragged):
            with pytest.raises(InvalidArgument, match="within a text"):
                attend(case.query, case.keys, case.values, replace(case.reach, across=True), case.scale)

    def test_reach(self) -> None:
        reach = make_case().reach
        with pytest.raises(InvalidArgument, match="window=-1"):
            replace(reach, window=-1)
        with pytest.raises(InvalidArgument, match="cannot describe 5 new tokens"):
            replace(reach, tree=torch.ones(9, 4, dtype=torch.bool))
        with pytest.raises(InvalidArgument, match="narrower than a tree"):
            replace(reach, window=4, tree=torch.ones(9, 5, dtype=torch.bool))


@on_gpu_alone
class TestOnGpu:
    """What an interpreter cannot show: real sizes, graphs, no waiting."""

    LENGTHS = (64, 640, 1216, 1792, 2368, 2944, 3520, 4096)

    def real(self, heads: tuple[int, int], dtype: torch.dtype = torch.bfloat16, **how: Any) -> Case:
        rows = RaggedRows(tuple(range(8)), tuple(length - 8 for length in self.LENGTHS), (8,) * 8)
        return make_case(rows, heads=heads, sizes=(128, 128), dtype=dtype, **how)

    @pytest.mark.parametrize("form", [*FORMS, Form.AUTO])
    @pytest.mark.parametrize("heads", [(32, 32), (32, 8)])
    def test_real_sizes(self, heads: tuple[int, int], form: Form) -> None:
        check(self.real(heads), form, TUNING)
        check(self.real(heads, torch.float32), form, TUNING)
        check(self.real(heads, window=1000, softcap=20.0, sinks=True), form, TUNING)

    def test_a_prompt_with_a_past(self) -> None:
        rows = RaggedRows((0, 1), (1000, 0), (700, 324))
        for heads in ((32, 32), (32, 4)):
            check(make_case(rows, heads=heads, sizes=(128, 128), dtype=torch.float16), Form.AUTO, TUNING)

    @pytest.mark.parametrize("form", [*FORMS, Form.AUTO])
    def test_one_graph_serves_every_length(self, form: Form) -> None:
        case = self.real((32, 8))
        reach = replace(case.reach, lengths=case.reach.lengths.clone())

        def call() -> torch.Tensor:
            return kernel.attend_ragged(case.query, case.keys, case.values, reach, case.scale, form)

        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()
        for shorter in (0, 1, 50):
            reach.lengths.copy_((case.reach.lengths - shorter).clamp(min=8))
            graph.replay()
            want = reference.attend_ragged(case.query, case.keys, case.values, reach, case.scale)
            close(out, want)

    def test_nobody_waits(self) -> None:
        case = self.real((32, 8))
        kernel.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale)
        torch.cuda.set_sync_debug_mode("error")
        try:
            kernel.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_the_same_every_time(self) -> None:
        case = self.real((32, 32))
        outs = [kernel.attend_ragged(case.query, case.keys, case.values, case.reach, case.scale) for _ in range(20)]
        assert all(torch.equal(out, outs[0]) for out in outs)
