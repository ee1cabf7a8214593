# SPDX-License-Identifier: Apache-2.0
"""A real peer that lies: `python liar.py KIND join ... --dir DIR`, the program with one thing made untrue.

    weight       its worker claims to have trained on a million million tokens a step, and sends noise
    noise        its worker sends noise, a thousand times as large as the others' differences
    huge         its worker sends numbers whose weighted sum is beyond the largest fp32
    not_finite   it sends parts with a NaN
    length       its worker says that its difference is a million times as long (Decoupled alone)
    against      its worker sends −5 times its difference
    two_weights  it tells every other member another weight
    two_results  it gives two of the others another sum than the rest, in rounds; in surveys of links it is honest
    sum          it gives all the same false sum of its slice, in rounds
    framing      it sends numbers a hundred times as large to one other alone, for the slice that this one adds up
    two_surveys  it tells two of the others that its line is slow, and the rest the truth; its rounds are honest
    digest       it votes for another state than it has computed, in every round
    leased       it asks for 2^31 samples at once, claims to have used up 2^20 a round, or all it gets, and sends noise
    unsigned     it signs something else than what it votes for
    certificate  it joins with a certificate of step 1,000,001, made with all that a member has
    state        it offers learners a state of step 2^40

Of these, each is told only while there is a file `mute` in its folder:

    mute         it keeps its votes to itself
    told         it says instead of a vote that somebody told it to give up
    voice        it says instead of a vote that whoever joined since then cannot be reached
    late         it votes 8 s later than it could, and its progress grows meanwhile
    padding      it sends bytes without meaning instead of its parts
    trickle      its lines carry 80 bytes a second each (join it with --max-upload, which may be high)
    withhold     it gives none of the sums that it owes
    miser        it serves the state to nobody
    epoch        it names the highest epoch that a run may reach whenever it joins

Not a test. Nothing else of it is changed: it joins, leases, exchanges and votes like any other.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for scripts/ and tests/

from scripts.chaoslab.mute import MUTE, keep_votes_while
from tests.multiprocess.lies import at_work, in_words, on_the_wire

ALWAYS: dict[str, Callable[[], None]] = {
    "weight": at_work.claim_a_huge_weight,
    "noise": at_work.send_noise,
    "huge": at_work.send_huge_numbers,
    "not_finite": on_the_wire.send_parts_that_are_no_numbers,
    "length": at_work.claim_a_long_difference,
    "against": at_work.work_against_the_others,
    "two_weights": on_the_wire.tell_each_another_weight,
    "two_results": on_the_wire.give_two_another_sum,
    "sum": on_the_wire.give_all_a_false_sum,
    "framing": on_the_wire.frame_one_other,
    "two_surveys": on_the_wire.tell_two_another_speed,
    "digest": at_work.vote_for_another_state,
    "leased": at_work.claim_all_leases,
    "unsigned": in_words.sign_something_else,
    "certificate": in_words.join_with_a_forged_certificate,
    "state": in_words.offer_a_state_of_the_far_future,
}
AT_TIMES: dict[str, Callable[[Callable[[], bool]], None]] = {
    "told": in_words.say_that_it_was_told,
    "voice": in_words.say_that_newcomers_cannot_be_reached,
    "late": in_words.vote_late,
    "padding": on_the_wire.pad_instead_of_parts,
    "trickle": on_the_wire.send_byte_by_byte,
    "withhold": on_the_wire.withhold_sums,
    "miser": in_words.serve_nobody,
    "epoch": in_words.join_with_the_highest_epoch,
}


def lie(kind: str) -> None:
    """Run the command that the rest of the command line gives."""
    from isthmus.trainer.cli.app import main

    file = Path(sys.argv[sys.argv.index("--dir") + 1]) / MUTE
    if kind == "mute":
        keep_votes_while(file)
    elif kind in AT_TIMES:
        AT_TIMES[kind](file.exists)
    else:
        ALWAYS[kind]()
    main()


if __name__ == "__main__":
    lie(sys.argv.pop(1))
