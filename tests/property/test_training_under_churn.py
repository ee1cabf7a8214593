# SPDX-License-Identifier: Apache-2.0
"""I2, I6 and I7 at one peer: whatever happens to its membership, and wherever it waits meanwhile, every payload is
exactly the work on the samples that its vote names, no sample is in two commits, and no lease is forgotten."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.elastic.state.digest import Hasher
from tests.unit.trainer.loop_rig import Happening, Rig

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


@given(script=HAPPENINGS, streaming=st.one_of(st.none(), STREAMING))
@settings(max_examples=80, deadline=None)
def test_no_work_is_lost_or_counted_twice(script: list[Happening], streaming: dict[str, object] | None) -> None:
    async def life() -> None:
        hasher = Hasher(num_threads=1)
        try:
            rig = Rig(hasher, script, outer_steps=5 if streaming is None else 9, streaming=streaming)
            async with asyncio.timeout(20.0):
                await rig.run()
            rig.audit_the_end()
        finally:
            hasher.close()

    asyncio.run(life())
