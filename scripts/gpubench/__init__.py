# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/bench_gpu.py. Each is a module with `measure(task) -> figures`, in a process of its own.

A module imports at its top what it needs, so that one whose packages are missing fails before it has begun.
"""
