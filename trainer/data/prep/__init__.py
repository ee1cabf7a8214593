# SPDX-License-Identifier: Apache-2.0
"""`isthmus data prep`: documents in, token shards out."""
