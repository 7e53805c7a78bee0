#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that a target needs and says so; does nothing where all is there.
# Usage: deps.sh NEED...   with NEED of the list below.
set -eu

# need -> what to look for (a command, or a file after "file:"), the Debian package
lookup() {
	case $1 in
	cc) echo "cmd:gcc gcc" ;;
	libc) echo "file:/usr/include/stdio.h libc6-dev" ;;
	make) echo "cmd:make make" ;;
	git) echo "cmd:git git" ;;
	binutils) echo "cmd:objdump binutils" ;;
	runc) echo "cmd:runc runc" ;;
	busybox) echo "file:/bin/busybox|/usr/bin/busybox busybox-static" ;;
	python) echo "cmd:python3 python3-minimal" ;;
	shellcheck) echo "cmd:shellcheck shellcheck" ;;
	certificates) echo "file:/etc/ssl/certs/ca-certificates.crt ca-certificates" ;;
	*) echo "deps.sh: unknown need $1" >&2; exit 2 ;;
	esac
}

present() {
	case $1 in
	cmd:*) command -v "${1#cmd:}" >/dev/null 2>&1 ;;
	file:*)
		old=$IFS; IFS='|'
		for f in ${1#file:}; do [ -e "$f" ] && { IFS=$old; return 0; }; done
		IFS=$old; return 1 ;;
	esac
}

missing=
for need in "$@"; do
	entry=$(lookup "$need")
	present "${entry% *}" || missing="$missing ${entry#* }"
done

if ! command -v go >/dev/null 2>&1; then
	echo "deps: no go in PATH: install Go 1.26 or newer (https://go.dev/doc/install), then run make again" >&2
	exit 1
fi
[ -n "$missing" ] || exit 0
if ! command -v apt-get >/dev/null 2>&1; then
	echo "deps: this system has no apt-get; install what Debian calls:$missing" >&2
	exit 1
fi
if [ "$(id -u)" != 0 ]; then
	echo "deps: not root; run: apt-get install --no-install-recommends$missing" >&2
	exit 1
fi
echo "deps: installing with apt-get:$missing"
install() {
	# shellcheck disable=SC2086 # a list of package names
	DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends $missing >"$log" 2>&1
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! install; then
	# An empty or old package list is the usual reason: fetch it once.
	apt-get update -q >>"$log" 2>&1 || true
	if ! install; then
		tail -n 20 "$log" >&2
		echo "deps: apt-get could not install:$missing" >&2
		exit 1
	fi
fi
