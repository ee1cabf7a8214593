# SPDX-License-Identifier: Apache-2.0
"""Where tensors lie, and how fragments are cut."""

import pytest
import torch

from isthmus.optim.fragments import FragmentKey, FragmentTable

SHAPES = [("embed", (4, 2)), ("layer0", (3,)), ("layer1", (2, 2)), ("scale", ()), ("layer2", (5,))]


@pytest.fixture
def table() -> FragmentTable:
    return FragmentTable.from_named_shapes(SHAPES)


def test_tensors_lie_end_to_end_in_the_order_given(table):
    assert [(s.name, s.offset, s.numel) for s in table.specs] == [
        ("embed", 0, 8),
        ("layer0", 8, 3),
        ("layer1", 11, 4),
        ("scale", 15, 1),
        ("layer2", 16, 5),
    ]
    assert table.numel == 21


def test_view_has_the_tensors_shape_and_shares_memory(table):
    flat = torch.arange(21, dtype=torch.float32)
    view = table.view(flat, "layer1")
    assert view.tolist() == [[11.0, 12.0], [13.0, 14.0]]
    view[0, 0] = -1.0
    assert flat[11] == -1.0
    assert table.view(flat, "scale").shape == ()


def test_strided_layers_become_one_contiguous_buffer(table):
    flat = torch.arange(21, dtype=torch.float32)
    fragment = table.fragment(1, ["layer2", "layer0"])
    buffer = fragment.gather(flat, out=torch.empty(fragment.numel))
    assert fragment.key == FragmentKey(kind="param", index=1)
    assert buffer.tolist() == [8.0, 9.0, 10.0, 16.0, 17.0, 18.0, 19.0, 20.0]
    assert fragment.view(buffer, "layer2").tolist() == [16.0, 17.0, 18.0, 19.0, 20.0]


def test_scatter_touches_only_the_fragments_places(table):
    flat = torch.zeros(21)
    fragment = table.fragment(0, ["layer0", "scale"])
    fragment.scatter(torch.tensor([1.0, 2.0, 3.0, 4.0]), out=flat)
    assert flat.nonzero().flatten().tolist() == [8, 9, 10, 15]


def test_tensors_that_touch_share_one_range(table):
    assert table.whole().ranges == (slice(0, 21),)
    assert table.fragment(0, ["embed", "layer0", "layer2"]).ranges == (slice(0, 11), slice(16, 21))


def test_a_split_that_holds_everything_once_is_accepted(table):
    halves = [table.fragment(0, ["embed", "layer1"]), table.fragment(1, ["layer0", "scale", "layer2"])]
    table.check_partition(halves)
    table.check_partition([*halves, table.whole("adam.exp_avg")])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([["embed", "layer0", "layer1", "scale"]], "'layer2' is in no fragment"),
        ([["embed", "layer0", "layer1"], ["layer1", "scale", "layer2"]], "'layer1' is in two fragments"),
    ],
)
def test_a_lost_or_doubled_tensor_is_named(table, split, message):
    fragments = [table.fragment(index, names) for index, names in enumerate(split)]
    with pytest.raises(ValueError, match=message):
        table.check_partition(fragments)


def test_a_tensor_of_another_table_is_named(table):
    other = FragmentTable.from_named_shapes([*SHAPES, ("head", (2,))])
    with pytest.raises(ValueError, match="'head' is not in this table"):
        table.check_partition([other.whole()])


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([], "at least one tensor"),
        ([("a", (1,)), ("a", (2,))], "listed twice"),
        ([("a", (2, -1))], "negative dimension"),
    ],
)
def test_an_impossible_table_is_refused(shapes, message):
    with pytest.raises(ValueError, match=message):
        FragmentTable.from_named_shapes(shapes)


def test_unknown_and_missing_names_are_refused(table):
    with pytest.raises(ValueError, match="'nothing'"):
        table.fragment(0, ["embed", "nothing"])
    with pytest.raises(ValueError, match="holds no tensor"):
        table.fragment(0, [])


def test_a_buffer_of_another_size_is_refused(table):
    fragment = table.fragment(0, ["layer0"])
    for use in (
        lambda: fragment.views(torch.zeros(4)),
        lambda: fragment.gather(torch.zeros(21), out=torch.zeros(2)),
        lambda: fragment.scatter(torch.zeros(1, 3), out=torch.zeros(21)),
    ):
        with pytest.raises(ValueError, match="flat buffer of 3 elements"):
            use()


def test_fragments_are_values(table):
    again = FragmentTable.from_named_shapes(SHAPES)
    assert again == table
    assert hash(again.whole()) == hash(table.whole())
