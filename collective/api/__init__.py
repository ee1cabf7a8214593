# SPDX-License-Identifier: Apache-2.0
"""What a caller of this package holds: communicators, awaitable, blocking and alone."""
