#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs the Debian packages that a target needs and says so; does nothing where all is there.
# Usage: deps.sh [--try] NEED...   with NEED of the list below, or package:NAME for the Debian package
# NAME. With --try what cannot be installed is said, and the status is 3; GPUFENCE_MUST=1 makes that
# a failure.
set -eu

fail=1
if [ "${1-}" = --try ]; then
	shift
	[ "${GPUFENCE_MUST-}" = 1 ] || fail=3
fi

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
	arm64-cc) echo "cmd:aarch64-linux-gnu-gcc gcc-aarch64-linux-gnu" ;;
	arm64-libc) echo "file:/usr/aarch64-linux-gnu/include/stdio.h libc6-dev-arm64-cross" ;;
	arm64-qemu) echo "cmd:qemu-aarch64-static qemu-user-static" ;;
	musl) echo "cmd:musl-gcc musl-tools" ;;
	systemd-analyze) echo "cmd:systemd-analyze systemd" ;;
	package:*) echo "package:${1#package:} ${1#package:}" ;;
	shellcheck) echo "cmd:shellcheck shellcheck" ;;
	certificates) echo "file:/etc/ssl/certs/ca-certificates.crt ca-certificates" ;;
	*) echo "deps.sh: unknown need $1" >&2; exit 2 ;;
	esac
}

present() {
	case $1 in
	cmd:*) command -v "${1#cmd:}" >/dev/null 2>&1 ;;
	package:*) [ "$(dpkg-query -W -f '${db:Status-Status}' "${1#package:}" 2>/dev/null)" = installed ] ;;
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
skip=
[ $fail = 1 ] || skip="SKIP of what needs them: "
if ! command -v apt-get >/dev/null 2>&1; then
	echo "deps: ${skip}this system has no apt-get; install what Debian calls:$missing" >&2
	exit $fail
fi
if [ "$(id -u)" != 0 ]; then
	echo "deps: ${skip}not root; run: apt-get install --no-install-recommends$missing" >&2
	exit $fail
fi
echo "deps: installing with apt-get:$missing"
# Another apt, such as that of a make beside this one or of the nightly upgrades, is waited for: without
# it apt-get fails at once.
patience=${GPUFENCE_APT_PATIENCE:-600}
install() {
	# shellcheck disable=SC2086 # a list of package names
	DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout="$patience" install -y -q --no-install-recommends --no-remove $missing >"$log" 2>&1
}
# The lists have a lock of their own, which that option does not wait for.
update() {
	end=$(($(date +%s) + patience))
	while ! LC_ALL=C apt-get update -q >"$log" 2>&1; do
		grep -q '^E: Could not get lock' "$log" && [ "$(date +%s)" -lt "$end" ] || return 0
		sleep 1
	done
}
# What one release of Debian has and another has not need not keep the others away.
one_by_one() {
	all=$missing failed=
	for missing in $all; do
		install || failed="$failed $missing"
	done
	missing=$failed
}
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if ! install; then
	# An empty or old package list is the usual reason: fetch it once.
	update
	if ! install; then
		tail -n 20 "$log" >&2
		[ $fail = 1 ] || one_by_one
		echo "deps: ${skip}apt-get could not install:$missing" >&2
		exit $fail
	fi
fi
