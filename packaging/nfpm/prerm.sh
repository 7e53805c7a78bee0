#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Before the files are removed. dpkg: remove, upgrade NEW, ... rpm: 0 removes, 1 upgrades.
set -eu

# Then there is Debian's own keeper of units' states, and it insists on dpkg.
dpkg_runs() { [ -n "${DPKG_MAINTSCRIPT_NAME-}" ] && command -v deb-systemd-helper >/dev/null 2>&1; }

# Containers see their pages below one of these two.
fenced() { grep -lsE ' (/dev/gpufence|/run/gpufence-shim)/' /proc/[0-9]*/mountinfo | wc -l; }

# Those of containers without pages, where the shim is off, are known to gpufenced only. Nothing holds what has the level none.
listed() { gpufence ps 2>/dev/null | grep ' running ' | grep -cv ' none ' || true; }

# Files of the engines that name us.
configured() {
	grep -rlsF gpufence-runtime /etc/containerd /etc/crio /etc/docker/daemon.json /etc/containers \
		/var/lib/rancher/k3s/agent/etc/containerd /var/lib/rancher/rke2/agent/etc/containerd /var/snap/microk8s/current/args || true
}

removed() {
	processes=$(fenced) containers=$(listed)
	if [ $((processes + containers)) -gt 0 ] && [ "${GPUFENCE_REMOVE-}" != force ]; then
		echo "gpufence: not removed: $processes processes and $containers containers with a GPU are held to a GPU memory limit, which nothing would enforce any more." >&2
		echo "gpufence: end them (gpufence ps), or set GPUFENCE_REMOVE=force" >&2
		exit 1
	fi
	files=$(configured)
	if [ -n "$files" ]; then
		echo "gpufence: warning: engines are still told to start containers with gpufence-runtime, and cannot any more; before removing, run gpufence uninstall --runtime ENGINE:" >&2
		echo "$files" | sed 's/^/gpufence:   /' >&2
	fi
	if [ -d /run/systemd/system ] && command -v systemctl >/dev/null 2>&1; then
		systemctl stop gpufence-nri.service gpufenced.socket gpufenced.service
	fi
	# On Debian the state of units goes with purge.
	if ! dpkg_runs && command -v systemctl >/dev/null 2>&1; then
		systemctl disable gpufence-nri.service gpufenced.socket gpufenced.service
	fi
}

case ${1-} in
remove | 0) removed ;;
esac
