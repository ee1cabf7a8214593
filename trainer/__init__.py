# SPDX-License-Identifier: Apache-2.0
"""The product: peers that train one model together. See README.md."""
