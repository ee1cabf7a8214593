# SPDX-License-Identifier: Apache-2.0
"""The machines of core/ in life: a member, a coordinator, their connections and their time."""
