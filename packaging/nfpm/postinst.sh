#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# After the files are there. dpkg: configure [OLD], and abort-*. rpm: 1 installs, 2 upgrades.
# It changes no engine's configuration and restarts no engine: `gpufence install` does, when somebody
# asks for it.
set -eu

# Then there is Debian's own keeper of units' states, and it insists on dpkg.
dpkg_runs() { [ -n "${DPKG_MAINTSCRIPT_NAME-}" ] && command -v deb-systemd-helper >/dev/null 2>&1; }

systemd_runs() { [ -d /run/systemd/system ] && command -v systemctl >/dev/null 2>&1; }

make_group() {
	getent group gpufence >/dev/null 2>&1 && return 0
	if command -v systemd-sysusers >/dev/null 2>&1; then
		systemd-sysusers gpufence.conf
	else
		groupadd --system gpufence
	fi
}

enable_socket() {
	if dpkg_runs; then
		deb-systemd-helper unmask gpufenced.socket >/dev/null || true
		if deb-systemd-helper --quiet was-enabled gpufenced.socket; then
			deb-systemd-helper enable gpufenced.socket >/dev/null
		else
			deb-systemd-helper update-state gpufenced.socket >/dev/null
		fi
	elif command -v systemctl >/dev/null 2>&1; then
		systemctl enable gpufenced.socket
	fi
	if systemd_runs; then
		systemctl daemon-reload
		# Who asks for gpufenced starts it.
		if dpkg_runs; then
			deb-systemd-invoke start gpufenced.socket
		else
			systemctl start gpufenced.socket
		fi
	fi
}

make_folders() {
	if systemd_runs && command -v systemd-tmpfiles >/dev/null 2>&1; then
		systemd-tmpfiles --create gpufence.conf
	fi
}

case ${1-} in
configure)
	make_group
	make_folders
	/usr/lib/gpufence/after-upgrade
	# Also after an upgrade: a unit that somebody disabled stays so.
	enable_socket
	;;
1)
	make_group
	make_folders
	enable_socket
	;;
2)
	make_group
	make_folders
	;; # the rest in posttrans, when the old version's files are gone
esac
