"""I2, I6 and I7 at one peer: whatever happens to its membership, and wherever it waits meanwhile, every payload is
exactly the work on the samples that its vote names, no sample is in two commits, and no lease is forgotten."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.digest import Hasher
from tests.unit.trainer.loop_rig import Happening, Rig

HAPPENINGS = st.lists(
    st.one_of(st.just(Happening.NOTHING), st.just(Happening.NOTHING), st.sampled_from(Happening)), max_size=60
)


@given(script=HAPPENINGS)
@settings(max_examples=150, deadline=None)
def test_no_work_is_lost_or_counted_twice(script: list[Happening]) -> None:
    async def life() -> None:
        hasher = Hasher(num_threads=1)
        try:
            rig = Rig(hasher, script, outer_steps=5)
            async with asyncio.timeout(20.0):
                await rig.run()
            rig.audit_the_end()
        finally:
            hasher.close()

    asyncio.run(life())
