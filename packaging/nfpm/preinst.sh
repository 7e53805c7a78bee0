#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Before the files of this version are there. dpkg: install|upgrade OLD. rpm: 1 installs, 2 upgrades.
set -eu

# What is removed with the old version may be in use, or about to be: a container that is being created
# has been told its path. Hard links keep file and path, and after-upgrade takes the unused ones away.
keep_libraries() {
	cd /usr/lib/gpufence 2>/dev/null || return 0
	rm -rf .kept
	for folder in *; do
		if [ -f "$folder/libgpufence.so" ] && [ ! -L "$folder" ]; then
			mkdir -p .kept
			cp -al "$folder" ".kept/$folder"
		fi
	done
	# It is the newest of the old: unused, too, it stays until the next upgrade.
	if current=$(readlink libgpufence.so) && [ -d .kept ]; then
		echo "${current%%/*}" >.kept/previous
	fi
}

case ${1-} in
upgrade | 2) keep_libraries ;;
esac
