# SPDX-License-Identifier: Apache-2.0
"""The simulated engine: who is there when."""

import dataclasses

import pytest
import torch

from isthmus.optim import ANCHOR, DiLoCo, FragmentKey, FragmentTable
from isthmus.optim.outer import Weigh
from isthmus.optim.simulate import by_samples, simulate
from isthmus.optim.workload import OneByOne

TABLE = FragmentTable.from_named_shapes([("w", (4,))])
KEY = FragmentKey(kind="param", index=0)


def step_by_name(worker, _inner_step, value):
    value += {"ash": 1.0, "birch": 2.0, "cedar": 4.0}[worker]


def run(num_inner_steps, workers=("ash", "birch"), outer=None, **settings):
    return simulate(
        outer or DiLoCo(lr=1.0, momentum=0.0, inner_steps=2),
        table=TABLE,
        initial=torch.zeros(4),
        workers=workers,
        workload=OneByOne(step_by_name, rows=4, numel=4),
        num_inner_steps=num_inner_steps,
        **settings,
    )


def anchor_heights(trajectory):
    return [committed.shared[ANCHOR][0].item() for committed in trajectory.committed]


def test_the_anchor_moves_by_the_mean_of_the_workers():
    assert anchor_heights(run(4)) == [3.0, 6.0]


def test_a_worker_that_leaves_takes_its_payload_with_it():
    trajectory = run(4, leaves={4: ["birch"]})
    assert anchor_heights(trajectory) == [3.0, 5.0]
    assert trajectory.committed[-1].members == ("ash",)
    assert list(trajectory.values) == ["ash"]


def test_a_joiner_starts_from_the_anchor_and_the_donors_shared_state():
    trajectory = run(4, joins={2: ["cedar"]}, outer=DiLoCo(lr=1.0, momentum=0.5, inner_steps=2))
    assert trajectory.committed[1].members == ("ash", "birch", "cedar")
    assert len(set(trajectory.committed[1].digests.values())) == 1
    # anchor 4.5, momentum 3; then delta = -(2 + 4 + 8) / 3
    assert anchor_heights(trajectory) == pytest.approx([4.5, 4.5 + 14 / 3 + 0.5 * (1.5 + 14 / 3)])


def test_a_joiner_in_mid_round_brings_the_steps_it_did():
    assert anchor_heights(run(2, joins={1: ["cedar"]})) == pytest.approx([(2 + 4 + 4) / 3])


def test_nobody_can_join_when_all_have_left():
    with pytest.raises(ValueError, match="nobody is there"):
        run(4, leaves={1: ["ash", "birch"]}, joins={2: ["cedar"]})


def test_a_round_without_contributors_is_dropped():
    trajectory = run(2, weigh=lambda _worker, _work: 0.0)
    assert not trajectory.committed
    assert [round_.inner_step for round_ in trajectory.dropped] == [2]


def test_the_initial_value_is_not_written():
    initial = torch.zeros(4)
    simulate(
        DiLoCo(inner_steps=1),
        table=TABLE,
        initial=initial,
        workers=("ash",),
        workload=OneByOne(step_by_name, rows=4, numel=4),
        num_inner_steps=3,
    )
    assert initial.count_nonzero() == 0


def test_a_method_that_lets_its_own_value_into_shared_state_is_caught():
    class Diverging(DiLoCo):
        def emit(self, round_, value, shared, private, work, /, *, out):
            shared["momentum"].add_(value[0] * 1e-6)  # no method may write to the state that it is given
            return super().emit(round_, value, shared, private, work, out=out)

    trajectory = run(4, outer=Diverging(momentum=0.9, inner_steps=2))
    assert all(len(set(committed.digests.values())) == 2 for committed in trajectory.committed)


@pytest.mark.parametrize("keeps_value", [False, True])
def test_settle_sees_the_value_of_a_result_only_if_its_round_keeps_it(keeps_value):
    seen = []

    class Looking(DiLoCo):
        def plan(self, inner_step, /):
            return tuple(dataclasses.replace(r, keeps_value=keeps_value) for r in super().plan(inner_step))

        def settle(self, outcome, /, *, out=None):
            seen.append(outcome.result.value.tolist())
            return super().settle(outcome, out=out)

    run(2, outer=Looking(lr=1.0, momentum=0.0, inner_steps=2))
    assert seen == [[-3.0] * 4 if keeps_value else []] * 2


def test_a_worker_settles_between_the_state_a_round_began_from_and_the_one_it_led_to():
    seen = []

    class Looking(DiLoCo):
        def settle(self, outcome, /, *, out=None):
            seen.append([state[ANCHOR][0].item() for state in (outcome.before, outcome.after)])
            assert (outcome.result is None) == (outcome.after is outcome.before)
            assert outcome.contribution.weight == 1.0
            return super().settle(outcome, out=out)

    looking = Looking(lr=1.0, momentum=0.0, inner_steps=2)
    run(4, workers=("ash",), outer=looking, aborted=lambda round_: round_.inner_step == 4)
    assert seen == [[0.0, 2.0], [2.0, 2.0]]


class Halved(DiLoCo):
    """Its payloads weigh half as much as the run says."""

    def emit(self, round_, value, shared, private, work, /, *, out):
        emitted = super().emit(round_, value, shared, private, work, out=out)
        return dataclasses.replace(emitted, weight=0.5, notes=(0.0,) * round_.num_notes)


def test_a_payload_has_a_weight_of_its_own_only_where_members_are_told():
    with pytest.raises(ValueError, match="not told"):
        run(2, outer=Halved(inner_steps=2))

    class Told(Halved):
        def plan(self, inner_step, /):
            return tuple(dataclasses.replace(r, num_notes=1) for r in super().plan(inner_step))

    assert run(2, outer=Told(inner_steps=2)).committed[0].members == ("ash", "birch")


def test_a_round_says_whether_its_members_are_weighed_by_samples_or_alike():
    class Alike(DiLoCo):
        def plan(self, inner_step, /):
            return tuple(dataclasses.replace(r, weigh=Weigh.ALIKE) for r in super().plan(inner_step))

    settings = {"lr": 1.0, "momentum": 0.0, "inner_steps": 2}
    sizes = {"ash": 3.0, "birch": 1.0}
    heights = [
        anchor_heights(run(2, outer=method(**settings), weigh=by_samples, batch_size=sizes))
        for method in (DiLoCo, Alike)
    ]
    assert heights == [[(3 * 2.0 + 4.0) / 4], [3.0]]


def test_fragments_of_another_kind_are_refused():
    class Moments(DiLoCo):
        def fragments(self, table, /):
            return (table.whole("adam.exp_avg"),)

    with pytest.raises(ValueError, match=r"has no adam\.exp_avg"):
        run(1, outer=Moments())
