#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# rpm alone: at the end, when the files of the old version are gone.
set -eu

if [ -d /usr/lib/gpufence/.kept ]; then
	/usr/lib/gpufence/after-upgrade
fi
