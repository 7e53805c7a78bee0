#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# companion.sh LIBRARY: what 32-bit programs get under our name must do nothing at all: no code, no
# name, no need, nothing that runs.
set -eu
library=$1
failed=0
result() { # name, what is wrong (empty: nothing)
	if [ -z "$2" ]; then
		echo "ok - companion: $1"
	else
		echo "not ok - companion: $1: $(printf '%s' "$2" | tr '\n' ' ')"
		failed=1
	fi
}
result "is a 32-bit library" "$(readelf -h "$library" | awk '/Class:/ && $2 != "ELF32" || /Machine:/ && !/80386/ || /Type:/ && $2 != "DYN"')"
result "exports and imports no name" "$(readelf --dyn-syms -W "$library" | awk '$1 ~ /^[0-9]+:$/ && $1 != "0:"')"
result "asks for no version" "$(readelf -VW "$library" | grep -E 'Version (needs|definition)' || true)"
result "needs nothing, runs nothing" "$(readelf -dW "$library" | grep -E 'NEEDED|INIT|FINI|TEXTREL|REL' || true)"
result "has no code and no executable memory" "$(readelf -lW "$library" | awk '($1 == "LOAD" || $1 == "GNU_STACK") && / R?W?E /')"
result "is never unloaded" "$(readelf -dW "$library" | grep -q 'FLAGS_1.*NODELETE' || echo flags)"
result "is known by its name" "$(readelf -dW "$library" | grep -q 'SONAME.*\[libgpufence.so\]' || echo 'no soname')"
exit $failed
