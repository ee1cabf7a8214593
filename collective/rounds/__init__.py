# SPDX-License-Identifier: Apache-2.0
"""One operation from its caller's tensors to its end: plan, memory, chunks, deadlines."""
