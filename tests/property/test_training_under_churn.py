# SPDX-License-Identifier: Apache-2.0
"""I2, I6 and I7 at one peer: whatever happens to its membership, and wherever it waits meanwhile, every payload is
exactly the work on the samples that its vote names, no sample is in two commits, and no lease is forgotten."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.elastic.state.digest import Hasher
from isthmus.optim.co2 import CO2
from isthmus.optim.delayed import Delayed
from isthmus.optim.diloco import DiLoCo
from isthmus.optim.eager import Eager
from tests.unit.trainer.loop_rig import INNER_STEPS, Happening, Rig

HAPPENINGS = st.lists(
    st.one_of(st.just(Happening.NOTHING), st.just(Happening.NOTHING), st.sampled_from(Happening)), max_size=60
)


STREAMING = st.fixed_dictionaries(
    {
        "inner_steps": st.just(8),
        "num_fragments": st.sampled_from([1, 3, 4]),
        "delay": st.integers(0, 2),
        "keep": st.just(1.0),  # nothing that was trained is thrown away, so that it can be found again
    }
)

DELAYED = {"lr": 1.0, "momentum": 0.0, "inner_steps": INNER_STEPS}


@given(script=HAPPENINGS, streaming=st.one_of(st.none(), STREAMING))
@settings(max_examples=80, deadline=None)
def test_no_work_is_lost_or_counted_twice(script: list[Happening], streaming: dict[str, object] | None) -> None:
    asyncio.run(_life(script, outer_steps=5 if streaming is None else 9, streaming=streaming))


@given(
    script=HAPPENINGS,
    method=st.sampled_from([Delayed(**DELAYED), Eager(**DELAYED), CO2(clip=float("inf"), **DELAYED)]),
)
@settings(max_examples=80, deadline=None)
def test_nor_is_it_where_a_payload_is_the_only_copy_of_its_block(script: list[Happening], method: DiLoCo) -> None:
    asyncio.run(_life(script, outer_steps=8, method=method))


async def _life(script: list[Happening], **settings: object) -> None:
    hasher = Hasher(num_threads=1)
    try:
        rig = Rig(hasher, script, **settings)
        async with asyncio.timeout(20.0):
            await rig.run()
        rig.audit_the_end()
    finally:
        hasher.close()
