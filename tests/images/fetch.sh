#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# fetch.sh CACHE SUITE ARCH NAME PACKAGE...: unpacks Debian packages of a suite, from the archive that
# this machine's apt uses and with its keys, into the folder CACHE/SUITE-ARCH-NAME, and prints that.
# What is there is not fetched again: remove it to get a newer one. Nothing of this machine's apt
# is changed. Status 3: the archive cannot be reached, or has no such suite.
set -eu
cache=$1 suite=$2 arch=$3 name=$4
shift 4
folder=$cache/$suite-$arch-$name
if [ -d "$folder" ]; then
	echo "$folder"
	exit 0
fi
command -v apt-get >/dev/null 2>&1 || exit 3
# apt fills these in.
# shellcheck disable=SC2016
archive=$(apt-get indextargets --format '$(REPO_URI) $(ORIGIN) $(COMPONENT)' 'Created-By: Packages' |
	awk '$2 == "Debian" && $3 == "main" && $1 !~ /security/ {print $1; exit}')
[ -n "$archive" ] || exit 3
mkdir -p "$cache"
state=$cache/$suite-$arch.apt
mkdir -p "$state/lists/partial" "$state/archives/partial"
: >"$state/status"
echo "deb $archive $suite main" >"$state/sources.list"
apt() {
	apt-get -q -o Dir::Etc::sourcelist="$state/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$state/lists" \
		-o Dir::State::status="$state/status" -o Dir::Cache::archives="$state/archives" -o Dir::Cache::pkgcache= \
		-o Dir::Cache::srcpkgcache= -o APT::Architecture="$arch" -o APT::Architectures="$arch" -o Acquire::Languages=none \
		-o Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false -o Acquire::IndexTargets::deb::DEP-11-icons-small::DefaultEnabled=false \
		-o Acquire::IndexTargets::deb::CNF::DefaultEnabled=false -o APT::Sandbox::User=root "$@"
}
if [ ! -e "$state/updated" ]; then
	apt -o APT::Update::Error-Mode=any update >&2 || exit 3
	touch "$state/updated"
fi
new=$(mktemp -d "$cache/new.XXXXXX")
trap 'rm -rf "$new"' EXIT
(cd "$new" && apt download "$@" >&2) || exit 3
mkdir "$new/root"
for package in "$new"/*.deb; do
	dpkg-deb -x "$package" "$new/root"
done
# As base-files would, where all is in /usr.
for link in bin sbin lib lib64; do
	if [ -d "$new/root/usr/$link" ] && [ ! -e "$new/root/$link" ]; then
		ln -s "usr/$link" "$new/root/$link"
	fi
done
# Links from the root would lead out of a compiler's sysroot.
find "$new/root" -type l -lname '/*' | while read -r link; do
	ln -sfn "$(realpath -ms --relative-to="$(dirname "$link")" "$new/root$(readlink "$link")")" "$link"
done
chmod 755 "$new/root"
mv "$new/root" "$folder"
echo "$folder"
