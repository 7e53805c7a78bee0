#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh VARIANT "PROGRAM ARGUMENT"... -- "PROGRAM ARGUMENT"...: runs test programs: as many at a time
# as there are cores, and those behind -- each for itself. What they say is shown in the order in which
# they are named. Fails if a test or a program fails, or a program tests nothing; then what is needed to
# know why comes once more at the end.
set -u
variant=$1
shift
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
named() { basename "${1%% *}"; }

list=$scratch/together
: >"$scratch/together"
: >"$scratch/apart"
for command in "$@"; do
	case $command in
	--) list=$scratch/apart ;;
	*) printf '%s\n' "$(named "$command")" "$command" >>"$list" ;;
	esac
done
mkdir "$scratch/said"
"${0%/*}/together.sh" "$scratch/said" "$(nproc)" <"$scratch/together"
"${0%/*}/together.sh" "$scratch/said" 1 <"$scratch/apart"

# What tells why a program failed: all but its successes, and of a sanitizer's report the accesses, the
# first frames of each, and what it was about.
why() {
	grep -v '^ok - ' "$1" | awk '
		/^=+$/ { next }
		/WARNING: ThreadSanitizer|ERROR: AddressSanitizer|runtime error:/ { report = 1; frames = 0 }
		!report { print; next }
		/^ *#[0-9]+ / { if (frames++ < 3) print; next }
		/^ *$/ { next }
		{ frames = 0; print }
		/^SUMMARY:/ { report = 0 }' | tail -n 30
}

failed=0
for command in "$@"; do
	[ "$command" != -- ] || continue
	name=$(named "$command")
	said=$scratch/said/$name
	status=$(cat "$said.status")
	sed "s|^ok - |ok - $variant $name: |; s|^not ok - |not ok - $variant $name: |" "$said"
	if ! grep -q '^ok - ' "$said"; then
		echo "not ok - $variant $name: no test passed (exit status $status)"
	elif [ "$status" = 0 ]; then
		continue
	elif ! grep -q '^not ok - ' "$said"; then
		echo "not ok - $variant $name: exit status $status"
	fi
	failed=1
	{
		echo "# $variant $name: exit status $status, $(grep -c '^ok - ' "$said") passed; what it said besides:"
		why "$said" | sed 's|^|#   |'
	} >>"$scratch/failures"
done
[ "$failed" = 0 ] || cat "$scratch/failures"
exit $failed
