# SPDX-License-Identifier: Apache-2.0
"""The model that is trained by default, how good it is, and text out of it."""
