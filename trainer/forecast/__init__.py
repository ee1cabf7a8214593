# SPDX-License-Identifier: Apache-2.0
"""What a run will take, said before it is founded: time, bytes and memory, over given links (`isthmus plan`)."""
