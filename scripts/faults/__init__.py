# SPDX-License-Identifier: Apache-2.0
"""What the fault benchmarks are made of: peers in processes of their own, and a server that makes the views.

    values      inputs whose mean over any subset of peers is exact, and the check of a result
    words       what server and peers say to each other
    peer        one peer: a communicator that does what the server says and reports how it ended
    nursery     the process that starts peers, in a few milliseconds each, in network namespaces if wanted
    keeper      their processes: signals, signs of life, what they say
    views       the server: who is a member, what is repeated, what was wrong, late or never heard of
    churn       peers that come and go
    reviving    one fault after another, each followed until the survivors have finished an operation without its victim

The collective layer decides nothing about membership and nothing about whether a round counts: both are the business
of the layer above. Here that layer is `views`, as small as it can be.
"""
