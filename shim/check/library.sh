#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# library.sh LIBRARY MAP OBJECTS: what every process of a container gets must be small and silent:
# exactly the names of the map, nothing newer than glibc 2.17, no constructor, no public dlsym,
# nothing that prints or exits, no thread-local storage to speak of, a jump in dlsym.
# CROSS is the prefix of the tools for another machine's library.
set -eu
CROSS=${CROSS-}
library=$1
map=$2
objects=$3
failed=0
result() { # name, what is wrong (empty: nothing)
	if [ -z "$2" ]; then
		echo "ok - library: $1"
	else
		echo "not ok - library: $1: $(printf '%s' "$2" | tr '\n' ' ')"
		failed=1
	fi
}
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

"${CROSS}objdump" -T "$library" | awk '$2 ~ /^[gw]/ && $3 != "*UND*" && $4 != "*UND*" {print $NF}' | sort >"$scratch/exported"
sed -n 's/^\t\([a-zA-Z0-9_]*\);$/\1/p' "$map" | sort >"$scratch/allowed"
result "exports exactly the names of $map" "$(diff "$scratch/allowed" "$scratch/exported" | grep '^[<>]' || true)"

{
	echo dlsym
	echo dlvsym
	sed -n '/^#define TABLE_HOOKED/,/^$/s/.*ROW([A-Z]*, \([a-zA-Z0-9_]*\),.*/\1/p' src/table.h
} | sort >"$scratch/table"
result "the table and $map name the same" "$(diff "$scratch/table" "$scratch/allowed" | grep '^[<>]' || true)"

newest=$("${CROSS}objdump" -T "$library" | grep -o 'GLIBC_[0-9.]*' | sed 's/GLIBC_//' | sort -uV | tail -1)
result "needs no glibc newer than 2.17" "$(printf '%s\n2.17\n' "$newest" | sort -V | tail -1 | grep -vx 2.17 || true)"
result "needs the C library and its loader only" \
	"$("${CROSS}readelf" -dW "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | grep -Evx 'libc\.so\.6|ld-linux-[a-z0-9-]*\.so\.[0-9]|lib(dl|pthread)\.so\.[0-9]' || true)"
result "has no constructor and no destructor" \
	"$("${CROSS}readelf" -dW "$library" | grep -Eo '\((PRE)?(INIT|FINI)(_ARRAY)?(SZ)?\)' || true)"
result "never calls the public dlsym, nor anything private to glibc" \
	"$("${CROSS}objdump" -T "$library" | grep -E 'UND.*( dlv?sym$| dlopen$| dlmopen$| dladdr1?$|GLIBC_PRIVATE)' || true)"
result "never prints, exits, aborts or allocates" \
	"$("${CROSS}objdump" -T "$library" | grep -E 'UND.* (_?_?(exit|_exit|_Exit|abort|quick_exit|printf.*|.*printf|puts|fputs|fwrite|write|perror|syslog|malloc|calloc|realloc|free|atexit|__cxa_.*|pthread_atfork|signal|sigaction|umask|setenv|putenv))$' || true)"
result "is bound at load, read-only after it, never unloaded" \
	"$("${CROSS}readelf" -dW "$library" | grep -q 'FLAGS_1.*NOW.*NODELETE' || echo flags; "${CROSS}readelf" -lW "$library" | grep -q GNU_RELRO || echo relro)"
result "has no writable and executable memory, no executable stack" \
	"$("${CROSS}readelf" -lW "$library" | awk '$1 == "LOAD" && /RWE/ {print}; $1 == "GNU_STACK" && /E *0x/ {print}')"
result "dlsym calls nothing that another library may have taken" \
	"$(for o in dlsym objects elf_view table thunk; do "${CROSS}nm" -u "$objects/$o".?.o; done | awk '{print $2}' |
		grep -Evx 'dl_iterate_phdr|_r_debug|__stack_chk_(fail|guard)|_DYNAMIC|_GLOBAL_OFFSET_TABLE_|(objects|elf|real|table|hook|gpufence)_.*|table' || true)"
tls=$("${CROSS}readelf" -lW "$library" | awk '$1 == "TLS" {print $6}')
result "has at most 16 bytes of thread-local storage" "$([ -z "$tls" ] || [ $((tls)) -le 16 ] || echo "$tls")"
for entry in dlsym dlvsym; do
	code=$("${CROSS}objdump" -d --no-show-raw-insn --disassemble="$entry" "$library")
	case $("${CROSS}objdump" -f "$library" | sed -n 's/^architecture: \([^,]*\),.*/\1/p') in
	i386:x86-64) jump='jmp +\*%r11' ret='ret' ;;
	aarch64) jump='br[[:space:]]x16' ret='ret' ;;
	*) jump=none ret=none ;;
	esac
	calls=$(printf '%s\n' "$code" | grep -Ec '[[:space:]](call|bl)[[:space:]]' || true)
	result "$entry reaches the true one by a jump" "$(
		printf '%s\n' "$code" | grep -Eq "$jump" || echo 'no jump'
		printf '%s\n' "$code" | grep -Eq "$ret" || echo 'no return'
		[ "$calls" -eq 1 ] || echo "$calls calls"
	)"
done
result "is known by its name" "$("${CROSS}readelf" -dW "$library" | grep -q 'SONAME.*\[libgpufence.so\]' || echo 'no soname')"
exit $failed
