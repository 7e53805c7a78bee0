#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# enter.sh PAGES ETC PROGRAMS OUTPUT PRELOAD COMMAND: runs a shell command as in a container whose
# files are this machine's. Called in mount, pid and ipc namespaces of its own. PAGES becomes
# /dev/gpufence, ETC (a copy of /etc that may have a preload file) /etc, PROGRAMS /opt; /srv and
# /tmp are empty. LD_PRELOAD becomes PRELOAD. What the command prints and its exit status go to
# files in OUTPUT, outside.
set -eu
pages=$1 etc=$2 programs=$3 output=$4 preload=$5 command=$6
exec >"$output/stdout" 2>"$output/stderr" 3>"$output/status" </dev/null
mount -t proc -o nosuid,nodev,noexec proc /proc
mount --bind "$programs" /opt
mount -t tmpfs -o size=256m,mode=755 tmpfs /srv

# A container's /dev, with our folder.
mkdir /srv/dev /srv/dev/gpufence /srv/dev/pts /srv/dev/shm
for node in null zero full random urandom tty; do
	touch "/srv/dev/$node"
	mount --bind "/dev/$node" "/srv/dev/$node"
done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620 devpts /srv/dev/pts
mount -t tmpfs -o mode=1777 tmpfs /srv/dev/shm
ln -s pts/ptmx /srv/dev/ptmx
ln -s /proc/self/fd /srv/dev/fd
ln -s /proc/self/fd/0 /srv/dev/stdin
ln -s /proc/self/fd/1 /srv/dev/stdout
ln -s /proc/self/fd/2 /srv/dev/stderr
mount --rbind "$pages" /srv/dev/gpufence
mkdir /srv/home
chmod 755 /srv/home
mount --rbind /srv/dev /dev
mount --bind /srv/home /srv
# The mounts below still resolve: the shell holds no path that is hidden now but ETC.
mount --bind "$etc" /etc
mount -t tmpfs -o mode=1777,size=256m tmpfs /tmp
cd /srv
status=0
# Always there, as programs see how many variables there are.
export SHIM="$preload" LD_PRELOAD="$preload"
/bin/sh -c "$command" 3>&- || status=$?
echo "$status" >&3
