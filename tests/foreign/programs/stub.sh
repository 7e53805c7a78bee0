#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# stub.sh PAGES STUBS REAL COMMAND...: runs a command with the stubs of STUBS in place of the driver's libraries in
# REAL. Called in a mount namespace of its own, where PAGES becomes /dev/gpufence as in a container.
set -eu
pages=$1 stubs=$2 real=$3
shift 3
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs /srv
mkdir -p /srv/dev/gpufence /srv/dev/shm /srv/pages
for node in null zero full random urandom tty; do
	touch "/srv/dev/$node"
	mount --bind "/dev/$node" "/srv/dev/$node"
done
# What the links lead to may lie there.
mount --rbind /dev/shm /srv/dev/shm
# Links, as the pages are links already.
for page in "$pages"/*; do
	ln -s "$page" "/srv/dev/gpufence/${page##*/}"
done
mkdir /srv/dev/gpufence/real
ln -s "$real"/*.so.1 /srv/dev/gpufence/real
mount --rbind /srv/dev /dev
export LD_LIBRARY_PATH="$stubs"
exec "$@"
