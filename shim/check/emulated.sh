#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# emulated.sh KNOWN VARIANT PROGRAM...: runs test programs of another machine, as many at a time as
# there are cores, under the emulator TEST_RUNNER. The file KNOWN lists the tests that must fail there,
# and why: lines "PROGRAM: TEST<tab>REASON". A test that fails and is not listed is a failure, and so
# is a listed one that passes: then the emulator has learned it, and the line is to go.
set -eu
known=$1
variant=$2
shift 2
failed=0
passed=0
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
mkdir "$scratch/said"
for program in "$@"; do
	printf '%s\n' "$(basename "${program%% *}")" "timeout 240 $TEST_RUNNER $program"
done | "${0%/*}/together.sh" "$scratch/said" "$(nproc)"
for program in "$@"; do
	name=$(basename "${program%% *}")
	output=$scratch/said/$name
	status=$(cat "$output.status")
	sed -n "s/^$name: \([^	]*\)	.*/\1/p" "$known" | sort >"$scratch/known"
	sed -n 's/^not ok - //p' "$output" >"$scratch/failures"
	while IFS= read -r test; do
		if grep -qF "not ok - $test" "$output"; then
			echo "ok - $variant $name: $test: fails as known"
		else
			echo "not ok - $variant $name: $test: is listed in $known and did not fail"
			failed=$((failed + 1))
		fi
	done <"$scratch/known"
	while IFS= read -r line; do
		listed=no
		while IFS= read -r test; do
			case $line in "$test"*) listed=yes ;; esac
		done <"$scratch/known"
		if [ "$listed" = no ]; then
			echo "not ok - $variant $name: $line"
			failed=$((failed + 1))
		fi
	done <"$scratch/failures"
	count=$(grep -c '^ok - ' "$output" || true)
	passed=$((passed + count))
	echo "ok - $variant $name: $count tests under $(basename "$TEST_RUNNER")"
	if [ "$count" -eq 0 ] || { [ "$status" -ne 0 ] && [ ! -s "$scratch/failures" ]; }; then
		echo "not ok - $variant $name: $count tests passed, exit status $status: $(tail -c 300 "$output" | tr '\n' ' ')"
		failed=$((failed + 1))
	fi
done
echo "$variant: $passed passed, $failed failed"
[ "$failed" -eq 0 ]
