# SPDX-License-Identifier: Apache-2.0
"""The coordinator's memory: on disk, in an etcd cluster, put aside, and read by others."""
