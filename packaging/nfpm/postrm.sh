#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# After the files are removed. dpkg: remove, purge, upgrade, ... rpm: 0 removed, 1 upgraded.
set -eu

# Then there is Debian's own keeper of units' states, and it insists on dpkg.
dpkg_runs() { [ -n "${DPKG_MAINTSCRIPT_NAME-}" ] && command -v deb-systemd-helper >/dev/null 2>&1; }

# Libraries that an upgrade kept and nobody uses. All of them with purge: a file that is in use stays
# with its user.
drop_libraries() { # [all]
	[ -d /usr/lib/gpufence ] || return 0
	cd /usr/lib/gpufence
	rm -rf .kept
	for folder in */; do
		name=${folder%/}
		[ -f "$name/libgpufence.so" ] || continue
		if [ "${1-}" = all ] || ! grep -qsF "/lib/gpufence/$name/" /proc/[0-9]*/mountinfo /proc/[0-9]*/maps; then
			rm -rf "$name"
		fi
	done
	cd /
	rmdir /usr/lib/gpufence 2>/dev/null || true # others may have put something there
}

reload() {
	if [ -d /run/systemd/system ] && command -v systemctl >/dev/null 2>&1; then
		systemctl daemon-reload
	fi
}

# The pages of pods are file systems of their own.
drop_run() {
	[ -d /run/gpufence ] || return 0
	sed -n 's|^[0-9]* [0-9]* [^ ]* [^ ]* \(/run/gpufence/[^ ]*\) .*|\1|p' /proc/self/mountinfo | sort -r |
		while read -r mount; do umount "$mount" || echo "gpufence: $mount is still in use, and stays until the next boot" >&2; done
	rm -rf --one-file-system /run/gpufence || true
}

case ${1-} in
remove)
	drop_libraries
	reload
	;;
0)
	drop_libraries
	reload
	drop_run
	;;
purge)
	drop_libraries all
	drop_run
	rm -rf /etc/gpufence /var/lib/gpufence
	if dpkg_runs; then
		deb-systemd-helper purge gpufenced.socket gpufenced.service gpufence-nri.service >/dev/null
		deb-systemd-helper unmask gpufenced.socket gpufenced.service gpufence-nri.service >/dev/null
	fi
	reload
	# A group with members is somebody's.
	if getent group gpufence | grep -q ':$'; then
		groupdel gpufence
	fi
	;;
esac
