# SPDX-License-Identifier: Apache-2.0
"""The connections of one peer to the others of its view, and what is measured of them."""
