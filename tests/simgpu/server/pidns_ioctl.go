// SPDX-License-Identifier: Apache-2.0

package server

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// nsGetParent is NS_GET_PARENT of ioctl_ns(2).
const nsGetParent = 0xb702

// inNamespace tells whether the namespace `up` levels above pid's own is the one that link
// names, as in pid:[4026531836].
func inNamespace(pid int, link string, up int) bool {
	f, err := os.Open(nsPath(pid))
	if err != nil {
		return false // gone
	}
	fd := int(f.Fd())
	defer func() { _ = f.Close() }() // nothing was written
	for range up {
		parent, err := unix.IoctlRetInt(fd, nsGetParent)
		if err != nil {
			return false
		}
		defer func() { _ = unix.Close(parent) }() // as above
		fd = parent
	}
	var st unix.Stat_t
	return unix.Fstat(fd, &st) == nil && fmt.Sprintf("pid:[%d]", st.Ino) == link
}
