#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# coverage.sh TABLE FUNCTIONS HARMLESS: every function of the driver whose name sounds like memory is
# hooked, or on the list of harmless ones with a reason; and the table says of each function what
# NVIDIA's headers say.
set -eu
table=$1
functions=$2
harmless=$3
sounds='Mem|Alloc|Array|Pool|Ipc|External|Ctx|Module|Library|Graph.*Mem|Multicast|Graphics'
failed=0
result() { # name, what is wrong (empty: nothing)
	if [ -z "$2" ]; then
		echo "ok - coverage: $1"
	else
		echo "not ok - coverage: $1: $(printf '%s' "$2" | tr '\n' ' ')"
		failed=1
	fi
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
tab=$(printf '\t')

# symbol name version stream
rows() {
	sed -n "/^#define TABLE_$1/,/^\$/s/.*ROW(CUDA, \([A-Za-z0-9_]*\), \([A-Za-z0-9_]*\), \([0-9]*\), \([A-Z_]*\)).*/\1 \2 \3 \4/p" "$table"
}
rows HOOKED | cut -d' ' -f1 | sort >"$scratch/hooked"
grep -v '^#' "$functions" | cut -f2 | sort >"$scratch/all"
grep -E "$sounds" "$scratch/all" >"$scratch/sound"
grep -v '^#' "$harmless" | cut -f1 | sort >"$scratch/harmless"

result "the list of functions is one" "$([ "$(wc -l <"$scratch/sound")" -ge 300 ] || echo "only $(wc -l <"$scratch/sound") sound like memory")"
result "every function that sounds like memory is hooked or harmless" \
	"$(sort -u "$scratch/hooked" "$scratch/harmless" | comm -23 "$scratch/sound" -)"
result "no function is both" "$(comm -12 "$scratch/hooked" "$scratch/harmless")"
result "the harmless ones exist, sound like it, and are listed once" \
	"$(uniq -d "$scratch/harmless"; comm -13 "$scratch/sound" "$scratch/harmless")"
result "each has a reason" "$(grep -v '^#' "$harmless" | grep -Ev "^[A-Za-z0-9_]+$tab.{10,}\$" || true)"
result "the table says what the headers say" "$(
	{ rows HOOKED; rows CALLED; } | sort >"$scratch/rows"
	awk 'NR == FNR { if ($1 !~ /^#/) known[$2] = $1 " " $3 " " ($4 == "-" ? "ANY" : "PER_THREAD"); next }
		{ says = $2 " " $3 " " ($4 == "BY_SYMBOL" ? "PER_THREAD" : $4)
		  if (!($1 in known)) print $1 " is none of the functions"
		  else if (known[$1] != says) print $1 ": " says ", not " known[$1] }' "$functions" "$scratch/rows"
)"
newest=$(grep -v '^#' "$functions" | cut -f3 | sort -n | tail -1)
compared=$(sed -n 's/^#define TABLE_CUDA_VERSION //p' "$table")
result "the table was compared with the newest of them" "$([ "$compared" -ge "$newest" ] || echo "with $compared, there is $newest")"
exit $failed
