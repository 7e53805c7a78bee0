#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# root.sh [PACKAGE...]: prints the path of a tar with a clean, minimal Debian (of the release SUITE) and these
# packages, which is made once, outside the work tree, from where this machine's apt gets its packages.
set -eu

suite=${SUITE:-bookworm}
cache=${GPUFENCE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/gpufence}/roots
name=$suite-minbase
for package in "$@"; do
	name=$name+$package
done
tar=$cache/$name-$(dpkg --print-architecture).tar
include=$(IFS=,; echo "$*")
mkdir -p "$cache"
exec 9>"$cache/$name.lock"
flock 9
if [ ! -f "$tar" ]; then
	# shellcheck disable=SC2016 # apt's variable
	mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' "Codename: bookworm" 'Component: main' | head -n 1)
	new=$(mktemp -d "$cache/new.XXXXXX")
	trap 'rm -rf --one-file-system "$new"' EXIT
	trap 'exit 1' INT TERM HUP
	# What it mounts goes with a mount namespace of its own.
	unshare --mount debootstrap --variant=minbase ${include:+"--include=$include"} "$suite" "$new/root" "${mirror:-http://deb.debian.org/debian}" >"$new/log" 2>&1 || {
		tail -n 20 "$new/log" >&2
		exit 1
	}
	rm -rf "$new"/root/var/cache/apt/archives/*.deb "$new"/root/var/lib/apt/lists/* "$new"/root/dev/*
	tar -C "$new/root" --numeric-owner --one-file-system -cf "$new/tar" .
	mv "$new/tar" "$tar"
fi
echo "$tar"
