#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# `isthmus` for whoever calls it in a container: as the user of the daemon, so that root's `docker exec` finds its run.
SHAPE_LINK='' ON_FAILURE='' exec /opt/isthmus/entrypoint.sh /usr/local/bin/isthmus "$@"
