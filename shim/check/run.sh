#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# run.sh VARIANT "PROGRAM ARGUMENT..."...: runs test programs one after the other. Fails if a test or
# a program fails, or a program tests nothing.
set -u
variant=$1
shift
failed=0
for command in "$@"; do
	name=$(basename "${command%% *}")
	# shellcheck disable=SC2086 # split into program and arguments
	output=$($command 2>&1)
	status=$?
	printf '%s\n' "$output" | sed "s|^ok - |ok - $variant $name: |; s|^not ok - |not ok - $variant $name: |"
	if ! printf '%s\n' "$output" | grep -q '^ok - '; then
		echo "not ok - $variant $name: no test passed (exit status $status)"
		failed=1
	elif [ "$status" -ne 0 ]; then
		printf '%s\n' "$output" | grep -q '^not ok - ' || echo "not ok - $variant $name: exit status $status"
		failed=1
	fi
done
exit $failed
