# SPDX-License-Identifier: Apache-2.0
"""The processes that compute: started, driven and replaced by the daemon; and the inner loop that each of them runs."""
