#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# together.sh FOLDER JOBS: runs the commands that it reads, JOBS at a time. Of each it reads two lines,
# a name and the command, and leaves what it said in FOLDER/NAME and its exit status in FOLDER/NAME.status.
set -eu
# shellcheck disable=SC2016 # for the shell that xargs starts; split into program and arguments
exec xargs -r -P "$2" -d '\n' -n 2 sh -c '$2 >"$0/$1" 2>&1; echo $? >"$0/$1.status"' "$1"
