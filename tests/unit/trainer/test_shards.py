# SPDX-License-Identifier: Apache-2.0
"""Where shards lie in the flat vector; real FSDP2 processes are in tests/multiprocess/test_shard_processes.py."""

import pytest
import torch
from torch import Tensor, nn

from isthmus.optim.fragments import FragmentTable
from isthmus.trainer.workers.shards import ShardMap, shard_rows

SHAPES = [("weight", (3, 4)), ("gain", (5,)), ("bias", (2,))]
TABLE = FragmentTable.from_named_shapes(SHAPES)


def _params() -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.full(shape, -1.0)) for name, shape in SHAPES}


def _flat(params: dict[str, nn.Parameter]) -> Tensor:
    return torch.cat([params[name].detach().flatten() for name, _ in SHAPES])


@pytest.mark.parametrize("local_world_size", range(1, 9))
@pytest.mark.parametrize("num_rows", range(18))
def test_rows_are_those_of_torch_chunk(num_rows: int, local_world_size: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(num_rows).chunk(local_world_size)] if num_rows else []
    expected = (chunks + [[]] * local_world_size)[:local_world_size]
    actual = [list(shard_rows(num_rows, local_rank, local_world_size)) for local_rank in range(local_world_size)]
    assert actual == expected


def test_a_rank_outside_of_the_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="local rank 2"):
        shard_rows(8, 2, 2)


def test_all_shards_land_in_canonical_order_whatever_the_order_of_the_model() -> None:
    params = _params()
    for number, (name, shape) in enumerate(SHAPES):
        params[name].data = torch.arange(torch.Size(shape).numel()).float().view(shape) + 100 * number
    mailbox = torch.full((TABLE.numel,), torch.nan)
    ShardMap.build(reversed(params.items()), TABLE).write(mailbox)
    torch.testing.assert_close(mailbox, _flat(params), rtol=0, atol=0)


def test_read_without_keep_takes_the_mailbox_bit_for_bit_even_over_nan() -> None:
    params = _params()
    params["gain"].data.fill_(torch.nan)
    mailbox = torch.randn(TABLE.numel)
    ShardMap.build(params.items(), TABLE).read(mailbox)
    assert torch.equal(_flat(params).view(torch.int32), mailbox.view(torch.int32))


def test_blend_rounds_each_product() -> None:
    params = _params()
    before = torch.randn(TABLE.numel)
    mailbox = torch.randn(TABLE.numel)
    shards = ShardMap.build(params.items(), TABLE)
    shards.read(before)
    shards.read(mailbox, keep=0.3)
    expected = torch.add(torch.mul(before, 0.3), torch.mul(mailbox, 0.7))
    assert torch.equal(_flat(params), expected)


def test_keep_of_one_changes_nothing() -> None:
    params = _params()
    ShardMap.build(params.items(), TABLE).read(torch.full((TABLE.numel,), torch.nan), keep=1.0)
    assert torch.equal(_flat(params), torch.full((TABLE.numel,), -1.0))


def test_what_is_not_finite_takes_the_mailboxs_value_instead_of_a_blend_and_is_counted() -> None:
    params = _params()
    params["gain"].data[:2] = torch.nan
    params["weight"].data[1, 0] = torch.inf
    mailbox = torch.arange(TABLE.numel).float()
    shards = ShardMap.build(params.items(), TABLE)
    assert shards.read(mailbox, (range(0, 13),), keep=0.5) == 2, "of the range alone"
    expected = mailbox * 0.5 - 0.5
    expected[[4, 12]] = mailbox[[4, 12]]
    assert torch.equal(_flat(params)[:13], expected[:13])
    assert shards.read(mailbox) == 0
    assert torch.equal(_flat(params), mailbox)


def test_what_is_kept_for_some_parameters_lies_in_their_places_and_is_zero_elsewhere() -> None:
    params = _params()
    kept = {"gain": torch.arange(5.0), "bias": torch.tensor([8.0, 9.0])}
    states = ShardMap.build(params.items(), TABLE).of(kept)
    mailbox = torch.full((TABLE.numel,), 7.0)
    states.write(mailbox, (range(3, 18),))
    assert mailbox.tolist() == [7.0] * 3 + [0.0] * 9 + [0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 7.0]
    states.read(torch.arange(TABLE.numel).float())
    assert kept["gain"].tolist() == [12.0, 13.0, 14.0, 15.0, 16.0]
    assert torch.equal(_flat(params), torch.full((TABLE.numel,), -1.0)), "the parameters themselves are untouched"


def test_what_is_kept_in_another_shape_or_type_is_refused_by_name() -> None:
    shards = ShardMap.build(_params().items(), TABLE)
    with pytest.raises(ValueError, match="'gain' has 4 elements"):
        shards.of({"gain": torch.zeros(4)})
    with pytest.raises(ValueError, match=r"'gain' is kept in torch\.int32"):
        shards.of({"gain": torch.zeros(5, dtype=torch.int32)})
    with pytest.raises(ValueError, match="'gain' does not lie in memory"):
        shards.of({"gain": torch.zeros(5, 2)[:, 0]})


def test_only_the_wanted_ranges_move() -> None:
    params = _params()
    shards = ShardMap.build(params.items(), TABLE)
    wanted = (range(2, 4), range(10, 14), range(18, 19))
    inside = torch.zeros(TABLE.numel, dtype=torch.bool)
    for part in wanted:
        inside[part.start : part.stop] = True
    mailbox = torch.arange(TABLE.numel).float()
    shards.read(mailbox, wanted)
    assert torch.equal(_flat(params), torch.where(inside, mailbox, -1.0))
    written = torch.full((TABLE.numel,), 7.0)
    shards.write(written, wanted)
    assert torch.equal(written, torch.where(inside, mailbox, 7.0))


@pytest.mark.parametrize("part", [range(-1, 2), range(0, 20), range(4, 2), range(0, 4, 2)])
def test_a_range_outside_of_the_flat_vector_is_refused(part: range) -> None:
    shards = ShardMap.build(_params().items(), TABLE)
    with pytest.raises(ValueError, match="is no range of 19 elements"):
        shards.write(torch.zeros(TABLE.numel), (part,))


@pytest.mark.parametrize("mailbox", [torch.zeros(18), torch.zeros(19, dtype=torch.float64), torch.zeros(1, 19)])
def test_a_mailbox_of_another_size_or_type_is_refused(mailbox: Tensor) -> None:
    with pytest.raises(ValueError, match="the mailbox must be fp32"):
        ShardMap.build(_params().items(), TABLE).read(mailbox)


def test_a_model_that_differs_from_the_table_is_refused_by_name() -> None:
    params = _params()
    params["extra"] = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match="'extra'"):
        ShardMap.build(params.items(), TABLE)
    del params["extra"], params["bias"]
    with pytest.raises(ValueError, match="'bias'"):
        ShardMap.build(params.items(), TABLE)
    params["bias"] = nn.Parameter(torch.zeros(3))
    with pytest.raises(ValueError, match=r"'bias' has shape \(3,\) in the model"):
        ShardMap.build(params.items(), TABLE)


def test_parameters_that_are_no_fractions_are_refused() -> None:
    params = _params()
    params["gain"] = nn.Parameter(torch.zeros(5, dtype=torch.int32), requires_grad=False)
    with pytest.raises(ValueError, match=r"kept in torch\.int32"):
        ShardMap.build(params.items(), TABLE)
