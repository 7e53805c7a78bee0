#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# stub.sh STUBS MAP: the libraries that stand in for the driver's export exactly their hooks, and need
# the true one, by its path in the container, before anything else.
set -eu
CROSS=${CROSS-}
stubs=$1
map=$2
failed=0
result() { # name, what is wrong (empty: nothing)
	if [ -z "$2" ]; then
		echo "ok - stub: $1"
	else
		echo "not ok - stub: $1: $(printf '%s' "$2" | tr '\n' ' ')"
		failed=1
	fi
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for folder in dev=/dev/gpufence run=/run/gpufence-shim; do
	for name in libcuda=cu libnvidia-ml=nvml; do
		library=$stubs/${folder%%=*}/${name%%=*}.so.1
		what="${folder%%=*}/${name%%=*}"
		"${CROSS}objdump" -T "$library" | awk '$2 ~ /^[gw]/ && $3 != "*UND*" && $4 != "*UND*" {print $NF}' | sort >"$scratch/exported"
		sed -n "s/^\t\(${name#*=}[A-Z][a-zA-Z0-9_]*\);\$/\1/p" "$map" | sort >"$scratch/allowed"
		result "$what exports its hooks" "$([ -s "$scratch/allowed" ] || echo none; diff "$scratch/allowed" "$scratch/exported" | grep '^[<>]' || true)"
		"${CROSS}readelf" -dW "$library" >"$scratch/dynamic"
		result "$what needs the driver's own first" "$(
			sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' "$scratch/dynamic" | head -1 | grep -Fvx "${folder#*=}/real/${name%%=*}.so.1" || true)"
		result "$what needs the C library and its loader besides" "$(
			sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' "$scratch/dynamic" | tail -n +2 | grep -Evx 'libc\.so\.6|ld-linux-[a-z0-9-]*\.so\.[0-9]|lib(dl|pthread)\.so\.[0-9]' || true)"
		result "$what has the driver's name" "$(grep -q "SONAME.*\[${name%%=*}.so.1\]" "$scratch/dynamic" || echo 'no soname')"
		result "$what has no constructor and no destructor" "$(grep -Eo '\((PRE)?(INIT|FINI)(_ARRAY)?(SZ)?\)' "$scratch/dynamic" || true)"
		newest=$("${CROSS}objdump" -T "$library" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -1)
		result "$what needs no glibc newer than 2.17" "$(printf '%s\n2.17\n' "$newest" | sort -V | tail -1 | grep -vx 2.17 || true)"
	done
done
exit $failed
